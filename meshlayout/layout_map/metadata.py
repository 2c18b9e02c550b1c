"""Layouts that a parameter itself carries: the axis names of Flax's metadata.

Flax has several generations of partitioning metadata (boxes of Linen, keys of NNX
variables that were renamed twice). They are read here as Flax itself reads them, so
that a model written for `nn.logical_axis_rules` gets the same layouts.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
from flax import linen as nn, nnx

from meshlayout import _checks
from meshlayout._annotations import Box
from meshlayout.errors import LayoutError, LayoutMapError, did_you_mean
from meshlayout.layout import Layout, axes_text
from meshlayout.mesh import Mesh


# The keys under which versions of Flax keep axis names, newest first.
_AXES_KEYS = ("out_sharding", "sharding_names", "sharding")


def logical_axes(box: Box) -> tuple[Any, ...] | None:
    """Returns the axis names in Flax's partitioning metadata, or None."""
    if isinstance(box, nnx.Variable):
        metadata = box.get_metadata()
        names = next((metadata[k] for k in _AXES_KEYS if metadata.get(k)), None)
    elif isinstance(box, (nn.Partitioned, nn.LogicallyPartitioned)):
        names = box.names
    else:
        return None
    return None if names is None else tuple(names)


AxisRule: TypeAlias = tuple[str, str | Sequence[str] | None]
"""A logical axis name, and the mesh axes (or None) that it may take."""


def parse_axis_rules(axes: Any, mesh: Mesh) -> tuple[AxisRule, ...] | None:
    """Returns a user's `logical_axes` as pairs, or raises LayoutMapError."""
    if axes is None:
        return None
    try:
        pairs = axes.items() if isinstance(axes, Mapping) else axes
        rules = tuple((name, meant) for name, meant in pairs)
    except (TypeError, ValueError):
        msg = (
            "logical_axes must map names to mesh axes, got "
            f"{_checks.shown(axes)}. Write {{'embed': 'model', 'batch': None}}, or "
            "pairs of these."
        )
        raise LayoutMapError(msg) from None
    for name, meant in rules:
        meant = (meant,) if isinstance(meant, str) else () if meant is None else meant
        for axis in meant if isinstance(meant, (tuple, list)) else (meant,):
            if axis not in mesh:
                msg = (
                    f"logical_axes maps {name!r} to {axis!r}, which is not an axis of "
                    f"{mesh!r}.{did_you_mean(axis, mesh.axis_names)}"
                )
                raise LayoutMapError(msg)
    return rules


def axis_rules(box: Box, own: Sequence[AxisRule]) -> list[AxisRule]:
    """Returns the rules for one leaf: those of the map, of the leaf, and of Flax."""
    if isinstance(box, nnx.Variable):
        local = box.get_metadata().get("sharding_rules")
    else:
        local = getattr(box, "rules", None)
    return [*own, *(local or ()), *nn.get_logical_axis_rules()]


def means_nothing(box: Box, rules: Sequence[AxisRule], mesh: Mesh) -> bool:
    """Returns whether a leaf has axis names, and none of them has a rule or an axis."""
    names = [name for name in jax.tree.leaves(logical_axes(box)) if name]
    known = {name for name, _ in rules}
    if not isinstance(box, nn.LogicallyPartitioned):
        known.update(mesh.axis_names)
    return bool(names) and known.isdisjoint(names)


def logical_layout(
    box: Box, rules: Sequence[AxisRule], mesh: Mesh
) -> tuple[Layout, list[str]]:
    """Returns the layout that axis names mean on a mesh, as Flax reads them.

    Rules are taken in order. A rule whose name occurs, and whose mesh axes are all
    free, assigns them to that dim. A dim takes at most one rule, so that several rules
    for one name are an order of preference. A name without a rule is unsharded, unless
    it is a mesh axis and Flax reads it as one (in `nn.with_partitioning` and NNX, but
    not in `nn.with_logical_partitioning`).

    Returns:
        The layout, and a sentence for each name that did not get its first choice.

    Raises:
        LayoutError: If two dims have the same name, or a rule names an unknown axis.
    """
    names: tuple[Any, ...] = logical_axes(box) or ()
    parts = [
        (dim, part)
        for dim, name in enumerate(names)
        for part in (name if isinstance(name, tuple) else (name,))
        if isinstance(part, str)
    ]
    words = [part for _, part in parts]
    repeated = next((part for part in words if words.count(part) > 1), None)
    if repeated is not None:
        msg = f"{repeated!r} names two dims; it may name only one dim of an array."
        raise LayoutError(msg)
    owner: dict[str, str] = {}  # logical axis by mesh axis
    assigned: dict[str, tuple[str, ...]] = {}
    refused: dict[str, list[str]] = {}
    for name, axes in rules:
        if name not in words or name in assigned:
            continue
        mesh_axes = (axes,) if isinstance(axes, str) else tuple(axes or ())
        taken = [axis for axis in mesh_axes if axis in owner]
        if taken:
            text = f"{axes_text(taken)} is {owner[taken[0]]!r}'s"
            refused.setdefault(name, []).append(text)
            continue
        assigned[name] = mesh_axes
        owner.update(dict.fromkeys(mesh_axes, name))
    is_logical = isinstance(box, nn.LogicallyPartitioned)
    notes = []
    for part in words:
        if part in refused:
            axes = assigned.get(part)
            result = f"on {axes_text(axes)}" if axes else "unsharded"
            notes.append(f"{part!r} is {result}: {', '.join(refused[part])}")
        if part in assigned or part in refused:
            continue
        # Only after all rules: a rule for another dim may take the axis of this name.
        if part in mesh and not is_logical and part not in owner:
            assigned[part] = (part,)
            owner[part] = part
            continue
        near = did_you_mean(part, [*mesh.axis_names, *(name for name, _ in rules)])
        why = "has no rule" if part not in owner else f"is {owner[part]!r}'s"
        notes.append(f"{part!r} is unsharded: it {why}.{near}".removesuffix("."))
    entries: list[tuple[str, ...]] = [()] * len(names)
    for dim, part in parts:
        entries[dim] += assigned.get(part, ())
    return Layout(entries, mesh), notes
