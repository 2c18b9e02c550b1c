"""`assert_layout`: arrays have the layouts that a test expects."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _jax, _paths, _render
from meshlayout._annotations import Leaf, PyTree
from meshlayout.errors import LayoutError, MeshLayoutError
from meshlayout.layout import MATCH, Layout
from meshlayout.layout_map import LayoutMap


_MAX_SHOWN = 10


class VerificationError(MeshLayoutError, AssertionError):
    """A step, a layout or a program differs from what a test expects."""


def leaf_text(x: Leaf) -> str:
    """Returns an array's type with its layout, as `f32[512@batch, 10]`."""
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
    """Checks the layouts of arrays.

    Layouts are compared by their effect: every device must hold the same piece,
    whatever the names of the axes; axes of size 1 make no difference.

    Args:
        x: An array, an abstract array with a sharding, or a tree of such: a module,
            a `TrainState`, any pytree.
        expected: For every array the same `Layout`, `NamedSharding`, `PartitionSpec`
            or tuple of entries (on each array's own mesh; `...` stands for any number
            of unsharded dims, `MATCH` for anything in that dim). Or a `LayoutMap`,
            which is resolved for the tree.

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
        wanted = {leaf.path: leaf.value for leaf in resolved}
        leaves = [leaf for leaf in leaves if leaf.path in wanted]
    else:
        wanted = dict.fromkeys((leaf.path for leaf in leaves), expected)
    if not leaves:
        msg = f"there is no array in {x!r}, and so no layout to check."
        raise VerificationError(msg)
    wrong = [text for leaf in leaves if (text := _wrong(leaf, wanted[leaf.path]))]
    if wrong:
        shown = "\n".join(wrong[:_MAX_SHOWN])
        more = f"\n... and {len(wrong) - _MAX_SHOWN} more." * (len(wrong) > _MAX_SHOWN)
        raise VerificationError(shown + more)


def _wrong(leaf: _paths.Leaf, expected: Any) -> str:
    """Describes an array's layout, if it is not the expected one."""
    where = " ".join(filter(None, [leaf.path, leaf_text(leaf.value)]))
    if not isinstance(leaf.value, (jax.Array, jax.ShapeDtypeStruct)):
        return f"{where}: it is on no mesh, and {expected!r} was expected."
    try:
        found = Layout.of(leaf.value)
        wanted = _as_layout(expected, found)
    except LayoutError as error:
        raise LayoutError(f"{where}: {error}") from None
    if _is_same(found, wanted):
        return ""
    return f"{where}: the layout is {found!r}, and {wanted!r} was expected."


def _as_layout(expected: Any, found: Layout) -> Layout:
    if isinstance(expected, (Layout, NamedSharding)):
        return Layout.of(expected, found.rank)
    if not isinstance(expected, (tuple, list, PartitionSpec)):
        msg = (
            "expected a Layout, a NamedSharding, a PartitionSpec, a tuple of entries "
            f"or a LayoutMap, got {expected!r} of type {type(expected).__name__}."
        )
        raise LayoutError(msg)
    if isinstance(expected, PartitionSpec):  # it may leave out unsharded dims
        expected = NamedSharding(found.mesh.jax_mesh, expected)
        return Layout.of(expected, found.rank)
    layout = Layout(expected, found.mesh, memory_kind=found.memory_kind)
    return layout.with_rank(found.rank)


def _is_same(found: Layout, wanted: Layout) -> bool:
    free = [entry is MATCH for entry in wanted.specs]
    found, wanted = (_without(found, free), _without(wanted, free))
    return found == wanted or wanted.sharding.is_equivalent_to(
        found.sharding, found.rank
    )


def _without(layout: Layout, free: list[bool]) -> Layout:
    """Returns a layout with those dims unsharded for which anything is allowed."""
    if not any(free):
        return layout
    specs = [
        None if any_ else entry for any_, entry in zip(free, layout.specs, strict=True)
    ]
    return Layout(specs, layout.mesh, memory_kind=layout.memory_kind)
