"""The target of a restore: the state to build, its leaves and where each one goes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from meshlayout import _jax, _paths
from meshlayout._annotations import PyTree
from meshlayout.arrays import copy_to_mesh
from meshlayout.checkpoint.difference import Leaf, is_number
from meshlayout.errors import CheckpointError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap
from meshlayout.state.create import Description, eager_sharding_off, has_layout


@dataclass(frozen=True)
class TargetLeaf:
    """A leaf of the target.

    Attributes:
        leaf: Its name, shape and dtype.
        value: The leaf itself, abstract or not.
        sharding: Where it goes; None for JAX's default device.
        moves: Whether that is another place than where the value is now.
    """

    leaf: Leaf
    value: Any
    sharding: jax.sharding.Sharding | None
    moves: bool

    @property
    def on_host(self) -> bool:
        """Whether it is NumPy's or a Python number, not a `jax.Array`."""
        if is_number(self.leaf.dtype):
            return True
        return isinstance(self.value, (np.ndarray, np.generic)) and not self.moves

    def keep(self) -> Any:
        """Returns the current value, moved to where it goes."""
        if not self.moves or self.sharding is None:
            return self.value
        return copy_to_mesh(self.value, Layout.of(self.sharding, np.ndim(self.value)))


@dataclass(frozen=True)
class Target:
    """The state to build.

    Attributes:
        leaves: Its arrays and numbers.
        rebuild: Makes the state from new values, one per leaf.
    """

    leaves: list[TargetLeaf]
    rebuild: Callable[[Sequence[Any]], PyTree]

    @classmethod
    def of(
        cls, like: PyTree, layouts: LayoutMap | None = None, *, whole: bool = False
    ) -> "Target":
        """Takes apart a state.

        Args:
            like: Arrays or abstract arrays in any tree, or a `Description`.
            layouts: Where its arrays go, if not where they are.
            whole: Whether paths keep the `params` at the root of Linen variables.

        Raises:
            CheckpointError: If it holds nothing that could be restored, or `layouts`
                is not a layout map.
        """
        if layouts is not None and not isinstance(layouts, LayoutMap):
            msg = (
                f"layouts= must be a LayoutMap, got {layouts!r} of type "
                f"{type(layouts).__name__}. Without it, arrays go where those of like= "
                "are."
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
        # By position, as leaves that are not arrays stay as they are.
        leaves = {
            position: _target_leaf(leaf.path, value, sharding, layouts is not None)
            for position, (leaf, value, sharding) in enumerate(
                zip(named, values, shardings, strict=True)
            )
            if has_layout(value)
        }
        if not leaves:
            msg = (
                f"like= holds no arrays: {like!r} of type {type(like).__name__}. Give "
                "the state to restore, or its shapes, as ml.describe or jax.eval_shape "
                "return them."
            )
            raise CheckpointError(msg)

        def rebuild(new_values: Sequence[Any]) -> PyTree:
            rebuilt = list(values)
            for position, value in zip(leaves, new_values, strict=True):
                rebuilt[position] = value
            with eager_sharding_off():
                state = treedef.unflatten(rebuilt)
                return state if graphdef is None else nnx.merge(graphdef, state)

        return cls(list(leaves.values()), rebuild)


def check_kept(leaves: Sequence[TargetLeaf], source: str) -> None:
    """Raises if a leaf that is not restored has no value to keep.

    Args:
        leaves: What is not restored.
        source: What holds the saved arrays, for messages.

    Raises:
        CheckpointError: Names the leaves.
    """
    for target in leaves:
        if isinstance(target.value, jax.Array) and target.value.is_deleted():
            msg = (
                f"{target.leaf.path}: not restored from {source}, and the array in "
                "like= is deleted: it was donated to a step or a relayout. Give a "
                "state that is alive."
            )
            raise CheckpointError(msg)
    abstract = [
        target.leaf.path
        for target in leaves
        if isinstance(target.value, jax.ShapeDtypeStruct)
    ]
    if abstract:
        more = f" and {len(abstract) - 5:,} more" if len(abstract) > 5 else ""
        msg = (
            f"{', '.join(abstract[:5])}{more}: not restored from {source}, and like= "
            "holds only shapes there, so there is no value to keep. Give a state that "
            "was created."
        )
        raise CheckpointError(msg)


def _shardings(
    tree: PyTree, values: Sequence[Any], layouts: LayoutMap | None
) -> list[Any]:
    if layouts is None:
        return [_own_sharding(value) for value in values]
    resolved = layouts.resolve(tree)
    layouts._check_used(resolved)
    resolved_layouts = iter(jax.tree.leaves(resolved.layouts))
    return [
        next(resolved_layouts).sharding if has_layout(value) else None
        for value in values
    ]


def _own_sharding(value: Any) -> Any:
    # An array that was not committed to its device is not committed afterwards either.
    if isinstance(value, jax.Array) and not _jax.is_committed(value):
        return None
    return getattr(value, "sharding", None)


def _target_leaf(
    path: str,
    value: Any,
    sharding: Any,
    moves: bool,  # noqa: FBT001
) -> TargetLeaf:
    parts = tuple(path.split("/"))
    if not hasattr(value, "dtype"):
        # A Python number has no place of its own.
        return TargetLeaf(Leaf(path, parts, (), type(value)), value, sharding, False)  # noqa: FBT003
    is_key = _jax.is_extended(value.dtype)
    dtype = value.dtype if is_key else np.dtype(value.dtype)
    leaf = Leaf(path, parts, tuple(value.shape), dtype)
    return TargetLeaf(leaf, value, sharding, moves)
