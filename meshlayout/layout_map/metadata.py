"""Layouts that a parameter carries itself: its own, or Flax's logical axes."""

from collections.abc import Mapping
from typing import Any

from flax import linen as nn, nnx, struct
from flax.core import meta
from jax.sharding import PartitionSpec

from meshlayout.errors import LayoutError, did_you_mean
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh


OWN_LAYOUT = "own_layout"
_AXES_KEYS = ("out_sharding", "sharding_names", "sharding")


class LayoutBox(struct.PyTreeNode, meta.AxisMetadata[Any]):
    """Linen's way of carrying a parameter's own layout: a box around its value."""

    value: Any
    own_layout: Any = struct.field(pytree_node=False)

    def unbox(self) -> Any:
        """Returns the value."""
        return self.value

    def replace_boxed(self, val: Any) -> "LayoutBox":
        """Returns the box around another value."""
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "LayoutBox":
        """Returns the box as it is: layouts name their stacked dim with `...`."""
        del index, params
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "LayoutBox":
        """Returns the box as it is."""
        del index, params
        return self


def own_layout_metadata(box: Any) -> Any:
    """Returns the layout or spec given on the layer for this leaf, or None."""
    if isinstance(box, nnx.Variable):
        return box.get_metadata().get(OWN_LAYOUT)
    if isinstance(box, LayoutBox):
        return box.own_layout
    return None


def logical_axes(box: Any) -> tuple[Any, ...] | None:
    """Returns the axis names that Flax's partitioning metadata gives, or None."""
    if isinstance(box, nnx.Variable):
        metadata = box.get_metadata()
        names = next((metadata[k] for k in _AXES_KEYS if metadata.get(k)), None)
    elif isinstance(box, (nn.Partitioned, nn.LogicallyPartitioned)):
        names = box.names
    else:
        return None
    return None if names is None else tuple(names)


def axis_rules(box: Any, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the mesh axes of each logical axis that holds for one leaf.

    The map's own rules come first, then the leaf's, then Flax's global ones.
    """
    if isinstance(box, nnx.Variable):
        local = box.get_metadata().get("sharding_rules")
    else:
        local = getattr(box, "rules", None)
    rules: dict[str, Any] = {}
    for pairs in ((given or {}).items(), local or (), nn.get_logical_axis_rules()):
        for name, axes in pairs:
            rules.setdefault(name, axes)
    return rules


def logical_layout(
    names: tuple[Any, ...], rules: Mapping[str, Any], mesh: Mesh
) -> Layout:
    """Returns the layout that logical axis names mean on a mesh.

    A name is a mesh axis, or has a rule that says which axes (or None) it means.

    Raises:
        LayoutError: If a name is neither, or an axis would be used twice.
    """
    entries: list[Any] = []
    for name in names:
        if name is None or name is PartitionSpec.UNCONSTRAINED:
            entries.append(None)
            continue
        parts = name if isinstance(name, tuple) else (name,)
        axes: list[str] = []
        for part in parts:
            if part in rules:
                meant = rules[part]
                axes += [meant] if isinstance(meant, str) else list(meant or ())
            elif part in mesh:
                axes.append(part)
            else:
                near = did_you_mean(part, [*mesh.axis_names, *rules])
                msg = (
                    f"logical axis {part!r} has no rule and is no axis of {mesh!r}."
                    f"{near} Give logical_axes={{{part!r}: <mesh axis or None>}}."
                )
                raise LayoutError(msg)
        entries.append(tuple(axes))
    return Layout(entries, mesh)
