"""What a call of a step is compiled for, what of it changed, and what is wrong with it.

JAX says that it compiles again, and not why; of arguments that it cannot take it says
so in its own words, and for an array that was used up, or is given twice, on several
devices it may end the process. So calls are described by name, and looked at first.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from meshlayout import _jax, _paths, _render
from meshlayout._annotations import Leaf, PyTree
from meshlayout.errors import StepError


@dataclass(frozen=True)
class CallSignature:
    """Every argument of a call, by name: what a program is compiled for."""

    avals: dict[str, str]
    layouts: dict[str, str]  # empty for a call seen while tracing


def describe(
    names: tuple[str, ...], static: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CallSignature:
    """Describes a call.

    Args:
        names: The step's parameter names, in order.
        static: Names and values of its static arguments.
        args: Its other positional arguments, arrays or tracers in them.
        kwargs: Its other keyword arguments.
    """
    avals = {name: f"{value!r}" for name, value in static}
    layouts: dict[str, str] = {}
    for where, leaf in labelled(names, args, kwargs):
        avals[where] = _aval_text(leaf)
        if not isinstance(leaf, Tracer):
            layouts[where] = _sharding_text(layout_of(leaf))
    return CallSignature(avals, layouts)


def labelled(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, Any]]:
    """Returns every leaf of some arguments, by argument name and path.

    Args:
        names: The names of the parameters, in order.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """
    labels = [
        *names[: len(args)],
        *(f"args[{i}]" for i in range(len(names), len(args))),
    ]
    return [
        (f"{label}/{path}" if path else label, leaf)
        for label, value in [*zip(labels, args, strict=True), *kwargs.items()]
        for path, leaf in named_leaves(value)
    ]


def _aval_text(leaf: Leaf) -> str:
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
        leaf = jax.ShapeDtypeStruct(
            leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype), weak_type=True
        )
    dtype = leaf.dtype
    if not _jax.is_extended(dtype):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    weak = " (weakly typed)" if getattr(leaf, "weak_type", False) else ""
    return _render.array_text(dtype, leaf.shape) + weak


def _sharding_text(sharding: Any) -> str:
    if isinstance(sharding, NamedSharding):
        return f"{tuple(sharding.spec)} on ({mesh_text(sharding.mesh)})"
    return _NOWHERE if sharding is None else str(sharding)


_NOWHERE = "no layout of its own"


def _same_layout(before: str, after: str) -> bool:
    """Returns whether layouts are alike; an array on no mesh is put on every device."""
    if _NOWHERE in (before, after):
        return all(
            text == _NOWHERE or text.startswith("() on") for text in (before, after)
        )
    return before == after


SETTING = (
    "something changed that is no shape, dtype or layout: the code of the state (a "
    "model or an optimizer made anew), the default mesh, the layout map in force, a "
    "JAX setting, or whether an array is bound to its devices"
)


def differences(last: CallSignature, now: CallSignature) -> list[str]:
    """Returns what changed between two calls, one phrase each."""
    found = []
    for where in dict.fromkeys([*now.avals, *last.avals]):
        before, after = last.avals.get(where), now.avals.get(where)
        if before is None:
            found.append(f"{where} is new: {after}")
        elif after is None:
            found.append(f"{where} is gone: it was {before}")
        elif before != after:
            found.append(f"{where} changed from {before} to {after}")
        was, is_ = last.layouts.get(where), now.layouts.get(where)
        if was is not None and is_ is not None and not _same_layout(was, is_):
            found.append(f"the layout of {where} changed from {was} to {is_}")
    return found


def structure_text(name: str, old: PyTree, new: PyTree) -> str:
    """Says how the state that a step returned is unlike the one that came in."""
    was, now = dict(named_leaves(old)), dict(named_leaves(new))
    lost = [repr(path) for path in was if path not in now]
    new_ones = [repr(path) for path in now if path not in was]
    if lost or new_ones:
        parts = []
        if lost:
            parts.append(f"lacks {', '.join(lost[:3])}")
        if new_ones:
            parts.append(f"has {', '.join(new_ones[:3])} besides")
        fact = " and ".join(parts)
    else:
        fact = f"is {what(new)} where {what(old)} came in"
    return (
        f"{name} returned a state of another structure: it {fact}. Return the state "
        "that came in with new values."
    )


def what(value: object) -> str:
    """Returns what kind of thing a value is, with its article."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"


def layout_of(leaf: Leaf) -> Any:
    """Returns the sharding of a leaf that has one of its own, else None."""
    if isinstance(leaf, Tracer):  # the step is called inside another jit
        return None
    if isinstance(leaf, jax.Array):
        return leaf.sharding if leaf.committed else None
    return leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None


def is_array_like(leaf: Leaf) -> bool:
    """Returns whether jit accepts a leaf as an array."""
    return hasattr(leaf, "dtype") or isinstance(leaf, (int, float, complex))


def devices_text(sharding: Any) -> str:
    """Returns the devices of a sharding, in words."""
    if isinstance(sharding, NamedSharding):
        return f"a mesh ({mesh_text(sharding.mesh)})"
    names = sorted(str(device) for device in sharding.device_set)
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def mesh_text(mesh: Any) -> str:
    """Returns the axes of a mesh as `"batch=2, model=4"`."""
    return ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """Returns the path and value of every leaf."""
    entries = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [("/".join(map(_paths.key_name, keys)), leaf) for keys, leaf in entries]


# What JAX refuses, or would crash on.


def gives_memory_twice(state: PyTree, rest: PyTree) -> bool:
    """Returns, fast, whether the state may be used up, or an array passed twice."""
    leaves = jax.tree.leaves(state)
    given = {*map(id, leaves)}
    try:
        used_up = True in [leaf.is_deleted() for leaf in leaves]
    except (AttributeError, jax.errors.ConcretizationTypeError):
        return True  # NumPy arrays, numbers, tracers: to be looked at one by one
    others = jax.tree.leaves(rest)
    # On several devices, JAX ends the process for an array that was deleted.
    used_up = used_up or True in map(_is_deleted, others)
    is_twice = len(given) != len(leaves) or not given.isdisjoint(map(id, others))
    return used_up or is_twice


def _is_deleted(leaf: Leaf) -> bool:
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


def _check_devices(name: str, state: PyTree, rest: list[tuple[str, Any]]) -> None:
    """Raises StepError if arguments are on other devices than the state."""
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
