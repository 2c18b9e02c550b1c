"""Changing layouts: `relayout` and its relatives, and which layout an array has."""

from collections import Counter
from typing import Any

from meshlayout import _checks
from meshlayout._annotations import Leaf, PyTree
from meshlayout.arrays.leaf import (
    as_array,
    is_concrete_array,
    layout_of,
    move,
    resolve,
    with_full_rank,
)
from meshlayout.arrays.tree import LayoutLike, Tree, array_text, is_number_list
from meshlayout.errors import LayoutError
from meshlayout.layout import MATCH


def relayout(x: Leaf, layout: LayoutLike, *, donate: bool = False) -> Any:
    """Returns the same values in another layout.

    From any layout to any other, also on other devices; from NumPy arrays and numbers
    too. It is differentiable. Inside jit it becomes a constraint, and there the mesh
    must have the devices that the whole computation runs on; if the arguments are on
    a mesh of another shape, JAX may need `out_shardings` to name the layouts
    of the results.

    Args:
        x: An array or a pytree of arrays.
        layout: The layout, or a tree of layouts. A `MATCH` entry keeps how that dim
            of the array is sharded; inside jit on a mesh with Auto axes, where JAX
            does not know it, the entry leaves the dim to the compiler.
        donate: Whether to delete `x`, so that both are not held for longer than the
            move takes. Inside jit it has no effect: the compiler frees what it can.

    Returns:
        The array or pytree. Nothing is copied if it already has the layout.

    Raises:
        LayoutError: If the layout does not fit an array, the trees do not fit each
            other, or a leaf is not like an array.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> x = ml.relayout(
        ...     ml.arrays.ones((4, 8), mesh.layout(...)), mesh.layout("batch", None)
        ... )
        >>> ml.fetch_layout(ml.relayout(x, mesh.layout(ml.MATCH, "model")))
        Layout([batch, model], Mesh(batch=2, model=4))
    """
    donate = _checks.flag("donate", donate, where="relayout", error=LayoutError)
    tree = Tree(x)
    layouts = tree.broadcast(layout)
    todo = [
        (leaf, where, resolve(leaf, target, where))
        for (where, leaf), target in zip(tree.named(), layouts, strict=True)
    ]
    times = Counter(id(leaf) for leaf in tree.leaves)
    moved = [
        move(leaf, target, where, donate=donate and times[id(leaf)] == 1, copy=donate)
        for leaf, where, target in todo
    ]
    for leaf in tree.leaves if donate else ():
        if is_concrete_array(leaf) and not leaf.is_deleted():
            leaf.delete()
    return tree.unflatten(moved)


def relayout_like(x: Leaf, other: PyTree, *, donate: bool = False) -> Any:
    """Returns `x` in the layout that other arrays have; see `relayout`.

    Args:
        x: An array or a pytree of arrays.
        other: The array or arrays with the layouts to take; a prefix of `x`.
        donate: As for `relayout`.
    """
    return relayout(x, fetch_layout(other), donate=donate)


def copy_to_mesh(x: Leaf, layout: LayoutLike) -> Any:
    """Copies arrays from the host, or from anywhere, to a mesh.

    The copy is independent: it shares no memory with `x`.

    Args:
        x: Anything array-like, even a list of numbers, or a pytree of those.
        layout: The layout, or a tree of layouts; no MATCH.

    Returns:
        The array, or a pytree of arrays.

    Raises:
        LayoutError: If the layout does not fit an array, the trees do not fit each
            other, or a leaf is not like an array.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> ml.copy_to_mesh([[1.0, 2.0], [3.0, 4.0]], mesh.layout("batch", None)).shape
        (2, 2)
    """
    tree = Tree(x, is_leaf=is_number_list)
    copies = []
    for (path, leaf), target in zip(tree.items(), tree.broadcast(layout), strict=True):
        if is_number_list(leaf):
            leaf = as_array(leaf, path or "the list")
        where = array_text(path, leaf)
        resolved = resolve(leaf, target, where, match=False)
        copies.append(move(leaf, resolved, where, copy=True))
    return tree.unflatten(copies)


def fetch_layout(x: Leaf) -> Any:
    """Returns the layout of an array, or a tree of layouts.

    Works inside jit where JAX knows it: on a mesh whose axes are all Explicit and that
    `jax.set_mesh` has set. An array on a single device is on a mesh of one.

    Args:
        x: An array, an abstract array with a sharding, or a pytree of those.

    Raises:
        LayoutError: If a leaf has no layout, or it is unknown.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 8})
        >>> ml.fetch_layout({"w": ml.arrays.zeros((8, 2), mesh.layout("batch", None))})
        {'w': Layout([batch, unsharded], Mesh(batch=8))}
    """
    tree = Tree(x)
    return tree.unflatten(layout_of(leaf, where) for where, leaf in tree.named())


def check_layout(x: Leaf, layout: LayoutLike) -> None:
    """Raises LayoutError unless arrays have the expected layouts.

    Layouts are compared by what they mean: every device must hold the same shard, in
    the same memory, whatever the names of the axes, and ignoring axes of size 1.

    Args:
        x: An array, an abstract array with a sharding, or a pytree of those.
        layout: The expected layout, or a tree of layouts; a `MATCH` entry allows
            anything for that dim.

    Raises:
        LayoutError: If an array has another layout, or its layout is unknown.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> ml.check_layout(
        ...     ml.arrays.zeros((4, 8), mesh.layout("batch", None)),
        ...     mesh.layout("batch", ...),
        ... )
    """
    tree = Tree(x)
    for (where, leaf), target in zip(tree.named(), tree.broadcast(layout), strict=True):
        actual = layout_of(leaf, where)
        expected = with_full_rank(target, actual.rank, where)
        # Dims for which MATCH allows anything are left out of the comparison.
        is_free = [entry is MATCH for entry in expected.specs]
        ours, theirs = (
            side.with_specs(
                [
                    None if free else e
                    for free, e in zip(is_free, side.specs, strict=True)
                ]
            )
            for side in (actual, expected)
        )
        if ours != theirs and not ours.sharding.is_equivalent_to(
            theirs.sharding, ours.rank
        ):
            msg = f"{where}: the layout is {actual!r}, and {expected!r} was expected."
            raise LayoutError(f"{msg} Move it with relayout(x, layout).")
