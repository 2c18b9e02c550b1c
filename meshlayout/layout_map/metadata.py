"""Layouts that parameters carry themselves: the axis names in Flax's metadata.

Flax interprets them: a model for `nn.logical_axis_rules` gets the same layouts.
"""

import difflib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
from flax import linen as nn, nnx
from flax.linen import spmd

from meshlayout._annotations import Box
from meshlayout.errors import LayoutError, LayoutMapError, did_you_mean
from meshlayout.layout import Layout, axes_of, axes_text
from meshlayout.mesh import Mesh


AxisRule: TypeAlias = tuple[str, str | Sequence[str] | None]
"""A logical axis name, and the mesh axes (or None) that it may take."""

# The keys under which versions of Flax keep axis names, newest first.
_AXES_KEYS = ("out_sharding", "sharding_names", "sharding")


def logical_axes(box: Box) -> tuple[Any, ...] | None:
    """Returns the axis names in Flax's partitioning metadata, or None."""
    names = None
    if isinstance(box, nnx.Variable):
        metadata = box.get_metadata()
        names = next((metadata[k] for k in _AXES_KEYS if metadata.get(k)), None)
    elif isinstance(box, (nn.Partitioned, nn.LogicallyPartitioned)):
        names = box.names
    return None if names is None else tuple(names)


def parse_axis_rules(axes: Any, mesh: Mesh) -> tuple[AxisRule, ...] | None:
    """Returns a user's `logical_axes` as pairs, or raises LayoutMapError."""
    if axes is None:
        return None
    pairs = axes.items() if isinstance(axes, Mapping) else axes
    rules = tuple((name, meant) for name, meant in pairs)
    for name, meant in rules:
        for axis in jax.tree.leaves(meant):
            if axis not in mesh:
                msg = f"logical_axes maps {name!r} to {axis!r}, not an axis of "
                near = did_you_mean(axis, mesh.axis_names)
                raise LayoutMapError(f"{msg}{mesh!r}.{near}")
    return rules


def logical_layout(
    box: Box, map_rules: Sequence[AxisRule], mesh: Mesh
) -> tuple[Layout, str | None, bool, dict[str, list[str]]]:
    """Returns a layout, a note, whether any name is known, and the wrong names.

    The rules are those of the map, of the leaf and of Flax, in this order. A name
    without a rule is unsharded, unless it is a mesh axis and Flax reads it as one (in
    `nn.with_partitioning` and NNX, but not in `nn.with_logical_partitioning`). The note
    lists names that did not get their first rule's axis. Wrong names need a rule and
    have none; each comes with the known name that it resembles, if any.
    """
    if isinstance(box, nnx.Variable):
        local = box.get_metadata().get("sharding_rules")
    else:
        local = getattr(box, "rules", None)
    rules: list[Any] = [*map_rules, *(local or ()), *nn.get_logical_axis_rules()]
    if not isinstance(box, nn.LogicallyPartitioned):
        rules += [(axis, axis) for axis in mesh.axis_names]
    rules = [(name, tuple(x) if isinstance(x, list) else x) for name, x in rules]
    dims = [d if isinstance(d, tuple) else (d,) for d in logical_axes(box) or ()]
    words = [name if isinstance(name, str) else None for dim in dims for name in dim]
    first = {name: axes_of(axes) for name, axes in reversed(rules)}
    is_known = any(name in first for name in words) or not any(words)
    spec: Any = [None] * len(words)
    try:
        if is_known:
            spec = spmd.logical_to_mesh_axes(words, rules)
    except ValueError as error:
        raise LayoutError(f"{error}") from None
    notes, wrong = list[str](), dict[str, list[str]]()
    for name, axes in zip(words, map(axes_of, spec), strict=True):
        if name is not None and name not in first:
            near = difflib.get_close_matches(name, [*mesh.axis_names, *first], n=1)
            # Flax takes names without a rule for mesh axes, except logical ones.
            rest = f", but {near[0]!r} has" if near else ", and is no mesh axis"
            if is_wrong := near or not isinstance(box, nn.LogicallyPartitioned):
                wrong[name] = near
            notes.append(f"{name!r} has no rule{rest if is_wrong else ''}")
        elif name is not None and axes != first[name]:
            text = axes_text(axes) if axes else "no axis"
            notes.append(f"{name!r} is on {text}, not on {axes_text(first[name])}")
    axes = iter(map(axes_of, spec))
    entries = [tuple(itertools.chain(*itertools.islice(axes, len(x)))) for x in dims]
    return Layout(entries, mesh), "; ".join(notes) or None, is_known, wrong
