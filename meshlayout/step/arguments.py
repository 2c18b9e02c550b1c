"""What is said of a step's arguments that JAX refuses, or would crash on."""

from typing import Any

import jax
from jax.core import Tracer

from meshlayout.errors import StepError
from meshlayout.step.call_signature import (
    devices_text,
    is_array_like,
    labelled,
    layout_of,
    named_leaves,
)


def gives_memory_twice(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tells, fast, whether the state may be used up, or an array be given twice."""
    leaves = jax.tree.leaves(args[0])
    given = {*map(id, leaves)}
    try:
        used_up = True in [leaf.is_deleted() for leaf in leaves]
    except (AttributeError, jax.errors.ConcretizationTypeError):
        return True  # NumPy arrays, numbers, tracers: to be looked at one by one
    rest = jax.tree.leaves((args[1:], kwargs))
    # On several devices, JAX ends the process for an array that was deleted.
    used_up = used_up or True in map(_is_deleted, rest)
    is_twice = len(given) != len(leaves) or not given.isdisjoint(map(id, rest))
    return used_up or is_twice


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and (
        not isinstance(leaf, Tracer) and leaf.is_deleted()
    )


def check_arguments(
    name: str, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raises StepError for arguments that no program can take."""
    check_memory(name, names, args, kwargs)
    for path, leaf in named_leaves(args[0]):
        if not is_array_like(leaf):
            msg = (
                f"{name}: the state's {path!r} is a {type(leaf).__name__}, "
                "no array. Keep it out of the state, or in a static field."
            )
            raise StepError(msg)
    rest = labelled(names[1:], args[1:], kwargs)
    for path, leaf in rest:
        if not is_array_like(leaf):
            argument = path.partition("/")[0]
            msg = (
                f"{name}: {path!r} is {leaf!r}, a {type(leaf).__name__} and "
                "no array. What the program depends on is named when it is made: "
                f"compile_step(static_argnames={argument!r})."
            )
            raise StepError(msg)
    _check_devices(name, args[0], rest)


def _check_devices(name: str, state: Any, rest: list[tuple[str, Any]]) -> None:
    """Raises StepError if arguments lie on other devices than the state."""
    layouts = [layout_of(leaf) for leaf in jax.tree.leaves(state)]
    first = next((one for one in layouts if one is not None), None)
    for path, leaf in rest:
        layout = layout_of(leaf)
        if first is None or layout is None:
            continue
        if layout.device_set != first.device_set:
            msg = (
                f"{name}: {path!r} lies on {devices_text(layout)}, and the "
                f"state on {devices_text(first)}. Move it with relayout(x, layout)."
            )
            raise StepError(msg)


def check_memory(
    name: str, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raises StepError if the state is used up, or given away twice."""
    state = [
        (path, leaf)
        for path, leaf in named_leaves(args[0])
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    ]
    seen: dict[int, str] = {}
    for path, leaf in state:
        if leaf.is_deleted():
            msg = (
                f"{name}: the state's {path!r} was used up by an earlier "
                "call. Go on with the state that the call returned: "
                f"state, aux = {name}(state, ...)."
            )
            raise StepError(msg)
        if id(leaf) in seen:
            msg = (
                f"{name}: the state's {seen[id(leaf)]!r} and {path!r} are "
                "one array, and its memory cannot be given away twice. Copy one of "
                "them with jax.numpy.copy."
            )
            raise StepError(msg)
        seen[id(leaf)] = path
    for path, leaf in labelled(names[1:], args[1:], kwargs):
        is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        if is_array and leaf.is_deleted():
            msg = (
                f"{name}: {path!r} was used up by an earlier call of a step, which "
                "takes the memory of its state. Use the state that the call returned."
            )
            raise StepError(msg)
        if id(leaf) in seen:
            msg = (
                f"{name}: {path!r} is the state's {seen[id(leaf)]!r}, whose "
                "memory the step gives away. Read it from the state inside the "
                "step, or copy it with jax.numpy.copy."
            )
            raise StepError(msg)
