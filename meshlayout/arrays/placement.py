"""Changing, copying, reading and checking the layouts of arrays."""

from typing import Any

from meshlayout import _checks
from meshlayout._annotations import Leaf, PyTree
from meshlayout.arrays.leaf import (
    as_array,
    check_same,
    is_concrete_array,
    layout_of,
    move,
    resolve,
    with_full_rank,
)
from meshlayout.arrays.tree import LayoutLike, Tree, array_text, is_number_list
from meshlayout.errors import LayoutError
from meshlayout.layout import MATCH, Layout


def relayout(x: Leaf, layout: LayoutLike, *, donate: bool = False) -> Any:
    """Returns the same values in another layout.

    Use this to place and to move arrays: from any layout to any other, on the same or
    other devices, and from NumPy arrays and numbers. It is differentiable. Inside jit
    it becomes a constraint, and the mesh must have the devices of the whole
    computation; if the arguments are on a mesh of another shape, JAX may need
    `out_shardings` with the layouts of the results.

    Args:
        x: An array or a pytree of arrays.
        layout: The layout, or a tree of layouts. A `MATCH` entry keeps the sharding of
            that dim. Inside jit on a mesh with Auto axes, where JAX does not know the
            sharding, it leaves the dim to the compiler.
        donate: Whether to delete `x` after the move, so that both exist no longer than
            needed. No effect inside jit, where the compiler frees what it can.

    Returns:
        The array or pytree. Nothing is copied if it already has the layout.

    Raises:
        LayoutError: If the layout does not fit an array, the structures of the trees
            differ, or a leaf is not array-like.
        ClusterError: On several processes, if host arrays differ between them.

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
    # All layouts are checked before the first move: an error must not leave half of a
    # donated tree deleted.
    todo = [
        (leaf, where, resolve(leaf, target, where))
        for (where, leaf), target in zip(tree.named(), layouts, strict=True)
    ]
    check_same((where, leaf, target.mesh) for leaf, where, target in todo)
    moved = [move(leaf, target, where, copy=donate) for leaf, where, target in todo]
    # Only after all moves: the same array may be in the tree under several paths.
    for leaf in tree.leaves if donate else ():
        if is_concrete_array(leaf) and not leaf.is_deleted():
            leaf.delete()
    return tree.unflatten(moved)


def relayout_like(x: Leaf, other: PyTree, *, donate: bool = False) -> Any:
    """Returns `x` in the layout of other arrays; see `relayout`.

    Args:
        x: An array or a pytree of arrays.
        other: The array or arrays with the layouts; a tree prefix of `x`.
        donate: As for `relayout`.
    """
    return relayout(x, fetch_layout(other), donate=donate)


def copy_to_mesh(x: Leaf, layout: LayoutLike) -> Any:
    """Copies arrays from the host, or from anywhere else, to a mesh.

    Use this instead of `relayout` if the result must share no memory with `x`, because
    you write to `x` or donate the result.

    Args:
        x: Anything array-like, even a list of numbers, or a pytree of those.
        layout: The layout, or a tree of layouts, without MATCH.

    Returns:
        The array, or a pytree of arrays.

    Raises:
        LayoutError: If the layout does not fit an array, the structures of the trees
            differ, or a leaf is not array-like.
        ClusterError: As for `relayout`.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> ml.copy_to_mesh([[1.0, 2.0], [3.0, 4.0]], mesh.layout("batch", None)).shape
        (2, 2)
    """
    tree = Tree(x, is_leaf=is_number_list)
    todo = []
    for (path, leaf), target in zip(tree.items(), tree.broadcast(layout), strict=True):
        if is_number_list(leaf):
            leaf = as_array(leaf, path or "the list")
        where = array_text(path, leaf)
        todo.append((where, leaf, resolve(leaf, target, where, match=False)))
    check_same((where, leaf, target.mesh) for where, leaf, target in todo)
    return tree.unflatten(
        move(x, layout, where, copy=True) for where, x, layout in todo
    )


def fetch_layout(x: Leaf) -> Any:
    """Returns the layout of an array, or a tree of layouts.

    Inside jit, JAX only knows it on a mesh that `jax.set_mesh` has set and whose axes
    are all Explicit. An array on a single device is on a mesh of one.

    Args:
        x: An array, an abstract array with a sharding, or a pytree of those.

    Raises:
        LayoutError: If a leaf has no layout, or its layout is unknown.

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

    Use this in tests, or before a computation that relies on a layout. Layouts are
    compared by meaning: every device must hold the same shard, in the same memory,
    whatever the names of the axes, and ignoring axes of size 1.

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
        if not is_same_layout(actual, expected):
            msg = f"{where}: the layout is {actual!r}, but {expected!r} was expected."
            raise LayoutError(f"{msg} Move it with relayout(x, layout).")


def is_same_layout(actual: Layout, expected: Layout) -> bool:
    """Returns whether two layouts mean the same; MATCH in the second allows anything.

    Args:
        actual: The layout of an array.
        expected: A layout of the same rank.
    """
    # Dims that MATCH leaves open are compared as if both were unsharded.
    is_open = [entry is MATCH for entry in expected.specs]
    actual, expected = (
        layout.with_specs(
            [None if skip else e for skip, e in zip(is_open, layout.specs, strict=True)]
        )
        for layout in (actual, expected)
    )
    return actual == expected or actual.sharding.is_equivalent_to(
        expected.sharding, actual.rank
    )
