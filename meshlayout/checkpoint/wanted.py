"""The state that is wanted: its leaves, and where each of them goes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from meshlayout import _jax, _paths
from meshlayout.arrays import copy_to_mesh
from meshlayout.checkpoint.difference import Leaf
from meshlayout.checkpoint.matching import is_number
from meshlayout.errors import CheckpointError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap
from meshlayout.state.create import Description, eager_sharding_off, has_layout


@dataclass(frozen=True)
class Slot:
    """A leaf of the state that is wanted.

    Attributes:
        leaf: Its name, shape and dtype; of PRNG keys, those of their words.
        value: The leaf itself.
        sharding: Where it goes; None for JAX's default device.
        moves: Whether that is another place than where the value is.
    """

    leaf: Leaf
    value: Any
    sharding: Any
    moves: bool

    @property
    def is_key(self) -> bool:
        """Whether it is an array of PRNG keys."""
        return _jax.is_extended(getattr(self.value, "dtype", np.dtype("int32")))

    @property
    def is_abstract(self) -> bool:
        """Whether it has no value."""
        return isinstance(self.value, jax.ShapeDtypeStruct)

    @property
    def is_deleted(self) -> bool:
        """Whether its value was donated."""
        return isinstance(self.value, jax.Array) and self.value.is_deleted()

    def keep(self) -> Any:
        """Returns the value that there is, in its place."""
        if not self.moves:
            return self.value
        return copy_to_mesh(self.value, Layout.of(self.sharding, np.ndim(self.value)))


@dataclass(frozen=True)
class Target:
    """The state that is wanted.

    Attributes:
        slots: Its arrays and numbers.
        rebuild: Makes the state of their new values.
    """

    slots: list[Slot]
    rebuild: Callable[[Sequence[Any]], Any]


def target(
    like: Any, layouts: LayoutMap | None = None, *, whole: bool = False
) -> Target:
    """Takes apart a state that is wanted.

    Args:
        like: Arrays or abstract arrays in any tree, or a `Description`.
        layouts: Where its arrays go, if not where they are.
        whole: Whether paths keep the `params` at the root of Linen variables.

    Raises:
        CheckpointError: If it holds nothing that could be restored, or `layouts` is
            no layout map.
    """
    if layouts is not None and not isinstance(layouts, LayoutMap):
        msg = (
            f"layouts= takes a LayoutMap, and got {layouts!r} of type "
            f"{type(layouts).__name__}. Without it, arrays go where those of like= are."
        )
        raise CheckpointError(msg)
    like = like.abstract if isinstance(like, Description) else like
    graphdef = None
    tree = like
    if _paths.holds_modules(like):
        with eager_sharding_off():
            graphdef, tree = nnx.split(like)
    named = _paths.flatten(tree, whole=whole).leaves
    values, treedef = jax.tree.flatten(tree)
    shardings = _shardings(tree if graphdef is not None else like, values, layouts)
    slots = {
        at: _slot(leaf.path, value, sharding, moves=layouts is not None)
        for at, (leaf, value, sharding) in enumerate(
            zip(named, values, shardings, strict=True)
        )
        if has_layout(value)
    }
    if not slots:
        msg = (
            f"like= holds no arrays: {like!r} of type {type(like).__name__}. Give the "
            "state that is wanted, or its shapes, as ml.describe or jax.eval_shape "
            "give them."
        )
        raise CheckpointError(msg)

    def rebuild(new: Sequence[Any]) -> Any:
        leaves = list(values)
        for at, value in zip(slots, new, strict=True):
            leaves[at] = value
        with eager_sharding_off():
            made = treedef.unflatten(leaves)
            return made if graphdef is None else nnx.merge(graphdef, made)

    return Target(list(slots.values()), rebuild)


def _shardings(
    tree: Any, values: Sequence[Any], layouts: LayoutMap | None
) -> list[Any]:
    if layouts is None:
        return [_own_sharding(value) for value in values]
    resolved = layouts.resolve(tree)
    layouts.check_used(resolved)
    found = iter(jax.tree.leaves(resolved.layouts))
    return [next(found).sharding if has_layout(value) else None for value in values]


def _own_sharding(value: Any) -> Any:
    # An array that was not bound to its device is not bound after either.
    if isinstance(value, jax.Array) and not _jax.is_committed(value):
        return None
    return getattr(value, "sharding", None)


def _slot(path: str, value: Any, sharding: Any, *, moves: bool) -> Slot:
    parts = tuple(path.split("/"))
    if not hasattr(value, "dtype"):
        leaf = Leaf(path, parts, (), type(value))
    elif _jax.is_extended(value.dtype):
        words = key_words(value.shape, value.dtype)
        leaf = Leaf(path, parts, words.shape, words.dtype)
    else:
        leaf = Leaf(path, parts, tuple(value.shape), np.dtype(value.dtype))
    return Slot(leaf, value, sharding, moves and not is_number(leaf.dtype))


def key_words(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of the words that PRNG keys are made of."""
    keys = jax.ShapeDtypeStruct(tuple(shape), dtype)
    return jax.eval_shape(jax.random.key_data, keys)


def check_kept(kept: Sequence[Slot], name: str) -> None:
    """Raises if a leaf that is not restored has no value to keep.

    Args:
        kept: What is not restored.
        name: What holds the saved arrays, for messages.

    Raises:
        CheckpointError: Names the leaves.
    """
    gone = [slot.leaf.path for slot in kept if slot.is_deleted]
    if gone:
        msg = (
            f"{gone[0]}: not restored from {name}, and the array in like= is deleted; "
            "it was donated, to a step or a relayout. Give a state that is alive."
        )
        raise CheckpointError(msg)
    paths = [slot.leaf.path for slot in kept if slot.is_abstract]
    if paths:
        more = f" and {len(paths) - 5:,} more" if len(paths) > 5 else ""
        msg = (
            f"{', '.join(paths[:5])}{more}: not restored from {name}, and like= holds "
            "shapes alone there, so that there is no value to keep. Give a state that "
            "was created."
        )
        raise CheckpointError(msg)


def check_fits(
    sharding: jax.sharding.Sharding, shape: Sequence[int], where: str
) -> None:
    """Raises if an array cannot lie as it is wanted.

    Args:
        sharding: Where it goes.
        shape: Its shape.
        where: The array, for messages.

    Raises:
        CheckpointError: If a dim does not divide.
    """
    try:
        if isinstance(sharding, NamedSharding):
            Layout.of(sharding, len(shape)).shard_shape(shape)
        sharding.shard_shape(tuple(shape))
    except ValueError as error:
        msg = f"{where} cannot lie where it is wanted: {error}"
        raise CheckpointError(msg) from None
