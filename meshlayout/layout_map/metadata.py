"""Layouts that a parameter itself carries: the axis names of Flax's metadata.

Flax has several generations of partitioning metadata (boxes of Linen, keys of NNX
variables that were renamed twice). Flax itself says what their names mean, so that a
model written for `nn.logical_axis_rules` gets the same layouts.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
from flax import linen as nn, nnx
from flax.linen import spmd

from meshlayout import _checks
from meshlayout._annotations import Box
from meshlayout.errors import LayoutError, LayoutMapError, did_you_mean
from meshlayout.layout import Layout, axes_of, axes_text
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
        for axis in jax.tree.leaves(meant):
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
) -> tuple[Layout, str | None]:
    """Returns the layout that axis names mean on a mesh, as Flax reads them.

    A name without a rule is unsharded, unless it is a mesh axis and Flax reads it as
    one (in `nn.with_partitioning` and NNX, but not in `nn.with_logical_partitioning`).

    Returns:
        The layout, and a sentence on names that did not get what their first rule says.

    Raises:
        LayoutError: If two dims have the same name, or a rule names an unknown axis.
    """
    dims = [
        dim if isinstance(dim, tuple) else (dim,) for dim in logical_axes(box) or ()
    ]
    words = [name if isinstance(name, str) else None for dim in dims for name in dim]
    names = [name for name in words if name is not None]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        msg = f"{repeated!r} names two dims; it may name only one dim of an array."
        raise LayoutError(msg)
    if not isinstance(box, nn.LogicallyPartitioned):
        rules = [*rules, *((axis, axis) for axis in mesh.axis_names)]
    pairs: Any = [(name, tuple(x) if isinstance(x, list) else x) for name, x in rules]
    spec: Any = spmd.logical_to_mesh_axes(words, pairs)
    taken = dict(zip(words, map(axes_of, spec), strict=True))
    wanted = {name: axes_of(axes) for name, axes in reversed(pairs)}
    notes: list[str] = []
    for name in names:
        if name not in wanted:
            near = did_you_mean(name, [*mesh.axis_names, *wanted])
            notes.append(f"{name!r} has no rule.{near}".removesuffix("."))
        elif taken[name] != wanted[name]:
            now = axes_text(taken[name]) if taken[name] else "no axis"
            notes.append(f"{name!r} is on {now}, not on {axes_text(wanted[name])}")
    found = iter(map(axes_of, spec))
    entries = [
        tuple(itertools.chain.from_iterable(itertools.islice(found, len(dim))))
        for dim in dims
    ]
    return Layout(entries, mesh), "; ".join(notes) or None
