"""What changed between two calls of a step, and what is wrong with one.

JAX says that it compiles again, but not why. It refuses arguments in its own words,
and for an array that was used up or is passed twice, on several devices, it may end
the process. So both are described here, by the names of the arguments. A call that is
right and like the one before never comes by.
"""

from collections.abc import Iterable
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding

from meshlayout import _checks
from meshlayout._annotations import Leaf, PyTree
from meshlayout.errors import StepError
from meshlayout.step.jitted_step import CallSignature, is_deleted, named_leaves
from meshlayout.step.placement import layout_of, mesh_text


def _texts(call: CallSignature) -> tuple[dict[str, str], dict[str, str]]:
    """Returns a call's shapes and dtypes by name, and the layouts that are known."""
    arrays = {name: f"{value!r}" for name, value in call.static}
    layouts = {}
    for name, argument in labelled(call.names, *call.arguments):
        arrays[name] = str(argument)
        if not argument.is_traced:
            layouts[name] = _sharding_text(argument.layout)
    return arrays, layouts


def labelled(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, Any]]:
    """Returns every leaf of some arguments, by parameter name and path."""
    labels = [
        *names[: len(args)],
        *(f"args[{i}]" for i in range(len(names), len(args))),
    ]
    return [
        (f"{label}/{path}" if path else label, leaf)
        for label, value in [*zip(labels, args, strict=True), *kwargs.items()]
        for path, leaf in named_leaves(value)
    ]


def _sharding_text(sharding: Any) -> str:
    if isinstance(sharding, NamedSharding):
        return f"{tuple(sharding.spec)} on ({mesh_text(sharding.mesh)})"
    return _NOWHERE if sharding is None else str(sharding)


_NOWHERE = "no layout of its own"


def _same_layout(before: str, after: str) -> bool:
    """Returns whether layouts are equal; an array on no mesh is put on every device."""
    # By their texts: meshes that are equal but not identical count as one.
    if _NOWHERE in (before, after):
        return all(
            text == _NOWHERE or text.startswith("() on") for text in (before, after)
        )
    return before == after


SETTING = (
    "something changed other than a shape, dtype or layout: the code of the state (a "
    "new model or optimizer), the default mesh, the active layout map, a JAX setting, "
    "or whether an array is committed to its devices"
)


def differences(last: CallSignature, now: CallSignature) -> list[str]:
    """Returns what changed between two calls, one phrase each."""
    (arrays, layouts), (new_arrays, new_layouts) = _texts(last), _texts(now)
    changes = []
    for name in dict.fromkeys([*new_arrays, *arrays]):
        before, after = arrays.get(name), new_arrays.get(name)
        if before is None:
            changes.append(f"{name} is new: {after}")
        elif after is None:
            changes.append(f"{name} is gone: it was {before}")
        elif before != after:
            changes.append(f"{name} changed from {before} to {after}")
        old, new = layouts.get(name), new_layouts.get(name)
        if old is not None and new is not None and not _same_layout(old, new):
            changes.append(f"the layout of {name} changed from {old} to {new}")
    return changes or _moves(last, now)


def _moves(last: CallSignature, now: CallSignature) -> list[str]:
    """Returns which arguments are on other devices, in layouts of the same text."""
    before, after = (
        {
            name: _devices(argument.layout)
            for name, argument in labelled(call.names, *call.arguments)
            if argument.layout is not None
        }
        for call in (last, now)
    )
    return [
        f"{name} moved from {_names_text(before[name])} to {_names_text(devices)}"
        for name, devices in after.items()
        if before.get(name, devices) != devices
    ]


def structure_text(name: str, old: PyTree, new: PyTree) -> str:
    """Returns a sentence on how the returned state differs from the one passed in."""
    before, after = dict(named_leaves(old)), dict(named_leaves(new))
    lost = ", ".join([repr(path) for path in before if path not in after][:3])
    extra = ", ".join([repr(path) for path in after if path not in before][:3])
    facts = [f"lacks {lost}" * bool(lost), f"also has {extra}" * bool(extra)]
    fact = " and ".join(filter(None, facts))
    if not fact:
        fact = f"is {what(new)} where {what(old)} came in"
    return (
        f"{name} returned a state of another structure: it {fact}. Return the state "
        "that came in, with new values."
    )


def what(value: object) -> str:
    """Returns what kind of thing a value is, with its article."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return _checks.type_text(value)


def is_array_like(leaf: Leaf) -> bool:
    """Returns whether jit accepts a leaf as an array."""
    return hasattr(leaf, "dtype") or isinstance(leaf, (int, float, complex))


def devices_text(sharding: Any) -> str:
    """Returns the devices of a sharding, in words."""
    if isinstance(sharding, NamedSharding):
        return f"a mesh ({mesh_text(sharding.mesh)})"
    return _names_text(_devices(sharding))


def _devices(sharding: Any) -> list[Any]:
    """Returns the devices of a sharding in their order, which jit compares, too."""
    if isinstance(sharding, NamedSharding):
        mesh: Any = sharding.mesh
        return [*mesh.devices.flat]
    return sorted(sharding.device_set, key=lambda x: x.id)


def _names_text(devices: Iterable[Any]) -> str:
    names = [str(device) for device in devices]
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


# What JAX refuses in its own words, or ends the process for.


def check_arguments(
    name: str, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raises StepError for arguments that no program can take."""
    check_memory(name, names, args, kwargs)
    for path, leaf in named_leaves(args[0]):
        if not is_array_like(leaf):
            msg = (
                f"{name}: the state's {path!r} is {what(leaf)}, "
                "not an array. Keep it out of the state, or in a static field."
            )
            raise StepError(msg)
    rest = labelled(names[1:], args[1:], kwargs)
    for path, leaf in rest:
        if not is_array_like(leaf):
            argument = path.partition("/")[0]
            msg = (
                f"{name}: {path!r} is {leaf!r}, {what(leaf)} and "
                "not an array. Name what the program depends on when you compile it: "
                f"compile_step(static_argnames={argument!r})."
            )
            raise StepError(msg)
    # Steps that donate nothing have an empty state here, and theirs among the rest.
    state = [("state", leaf) for leaf in jax.tree.leaves(args[0])]
    layouts = [(path, layout_of(leaf)) for path, leaf in [*state, *rest]]
    layouts = [(path, layout) for path, layout in layouts if layout is not None]
    owner, first = layouts[0] if layouts else ("", None)
    owner = "the state" if owner.partition("/")[0] == "state" else repr(owner)
    for path, layout in layouts:
        if path == "state" or _devices(layout) == _devices(first):
            continue
        here, there = devices_text(layout), devices_text(first)
        if here == there:  # meshes of the same axes
            here, there = (_names_text(_devices(x)) for x in (layout, first))
        msg = (
            f"{name}: {path!r} is on {here}, and {owner} on {there}. Move it with "
            "relayout(x, layout)."
        )
        raise StepError(msg)


def check_memory(
    name: str, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raises StepError if the state is used up, or would be donated twice."""
    state = [
        (path, leaf)
        for path, leaf in named_leaves(args[0])
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    ]
    seen: dict[int, str] = {}  # paths of arrays by identity
    for path, leaf in state:
        if leaf.is_deleted():
            msg = (
                f"{name}: the state's {path!r} was used up by an earlier "
                "call. Continue with the state that the call returned: "
                f"state, aux = {name}(state, ...)."
            )
            raise StepError(msg)
        if id(leaf) in seen:
            msg = (
                f"{name}: the state's {seen[id(leaf)]!r} and {path!r} are "
                "the same array, whose memory cannot be donated twice. Copy one of "
                "them with jax.numpy.copy."
            )
            raise StepError(msg)
        seen[id(leaf)] = path
    for path, leaf in labelled(names[1:], args[1:], kwargs):
        if is_deleted(leaf):
            msg = (
                f"{name}: {path!r} was used up by an earlier call of a step, which "
                "reuses the memory of its state. Use the state that the call returned."
            )
            raise StepError(msg)
        if id(leaf) in seen:
            msg = (
                f"{name}: {path!r} is the state's {seen[id(leaf)]!r}, whose "
                "memory the step reuses. Read it from the state inside the "
                "step, or copy it with jax.numpy.copy."
            )
            raise StepError(msg)
