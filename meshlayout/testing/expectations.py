"""`assert_layout`: whether arrays have the layouts that a test expects."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _jax, _paths, _render
from meshlayout._annotations import Leaf, PyTree
from meshlayout.arrays.placement import is_same_layout
from meshlayout.errors import LayoutError, MeshLayoutError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap


# How many wrong leaves an error lists.
_MAX_SHOWN = 10


class VerificationError(MeshLayoutError, AssertionError):
    """A step, a layout or a program differs from what a test expects."""


def leaf_text(x: Leaf) -> str:
    """Returns the type of an array with its layout, such as `f32[512@batch, 10]`."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return f"{x!r} of type {type(x).__name__}"
    if not isinstance(_jax.sharding_of(x), NamedSharding):
        return _render.array_text(x.dtype, x.shape)
    dims = [
        f"{size}@({', '.join(entry)})"
        if isinstance(entry, tuple)
        else f"{size}@{entry}" * bool(entry) or str(size)
        for size, entry in zip(x.shape, Layout.of(x).specs, strict=True)
    ]
    return f"{_render.dtype_text(x.dtype)}[{', '.join(dims)}]"


def assert_layout(x: PyTree, expected: Any) -> None:
    """Raises VerificationError unless arrays have the expected layouts.

    Layouts are compared by their effect: every device must hold the same piece,
    whatever the names of the axes; axes of size 1 make no difference.

    Args:
        x: An array, an abstract array with a sharding, or a tree of these.
        expected: A `Layout`, `NamedSharding`, `PartitionSpec` or tuple of entries for
            all arrays. Entries are for the mesh of each array; `...` stands for any
            number of unsharded dims, and `MATCH` for anything in that dim. Or a
            `LayoutMap`, which is resolved for the tree.

    Raises:
        VerificationError: If a layout differs, or there are no arrays.
        LayoutError: If `expected` is not a layout, or does not fit.
        LayoutMapError: If the map does not fit the tree.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> kernel = ml.arrays.zeros((4, 8), mesh.layout(None, "model"))
        >>> assert_layout(kernel, (None, "model"))
        >>> assert_layout({"kernel": kernel}, ml.LayoutMap(mesh, {"k": (..., "model")}))
    """
    leaves = _paths.flatten(x).leaves
    if isinstance(expected, LayoutMap):
        resolved = _paths.flatten(expected.resolve(x).layouts).leaves
        layouts = {leaf.path: leaf.value for leaf in resolved}
        # Leaves that are neither arrays nor numbers have no layout in the map.
        leaves = [leaf for leaf in leaves if leaf.path in layouts]
    else:
        layouts = dict.fromkeys((leaf.path for leaf in leaves), expected)
    if not leaves:
        msg = f"{x!r} holds no arrays, and so there is no layout to check."
        raise VerificationError(msg)
    problems = [text for leaf in leaves if (text := _problem(leaf, layouts[leaf.path]))]
    if problems:
        others = len(problems) - _MAX_SHOWN
        rest = [f"... and {others} more."] * (others > 0)
        raise VerificationError("\n".join([*problems[:_MAX_SHOWN], *rest]))


def _problem(leaf: _paths.Leaf, expected: Any) -> str:
    """Describes the layout of an array that is not the expected one; else empty."""
    where = " ".join(filter(None, [leaf.path, leaf_text(leaf.value)]))
    if not isinstance(leaf.value, (jax.Array, jax.ShapeDtypeStruct)):
        return f"{where} is on no mesh, but {expected!r} was expected."
    try:
        actual = Layout.of(leaf.value)
        layout = _as_layout(expected, actual)
    except LayoutError as error:
        raise LayoutError(f"{where}: {error}") from None
    if is_same_layout(actual, layout):
        return ""
    return f"{where}: the layout is {actual!r}, but {layout!r} was expected."


def _as_layout(expected: Any, actual: Layout) -> Layout:
    """Returns what the user expects as a layout; entries are on the array's mesh."""
    if isinstance(expected, PartitionSpec):  # it may leave out unsharded dims
        expected = NamedSharding(actual.mesh.jax_mesh, expected)
    if isinstance(expected, (Layout, NamedSharding)):
        return Layout.of(expected, actual.rank)
    if isinstance(expected, (tuple, list)):
        layout = Layout(expected, actual.mesh, memory_kind=actual.memory_kind)
        return layout.with_rank(actual.rank)
    msg = (
        "expected a Layout, a NamedSharding, a PartitionSpec, a tuple of entries "
        f"or a LayoutMap, got {expected!r} of type {type(expected).__name__}."
    )
    raise LayoutError(msg)
