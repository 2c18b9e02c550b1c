"""From this process's rows of a batch to global arrays on the mesh, with weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshlayout import _batches, _jax
from meshlayout._annotations import Batch, PyTree
from meshlayout._render.tables import array_text
from meshlayout.data.examples import ExampleSpec, LeafSpec, named_leaves
from meshlayout.errors import DataError, LayoutError, StepError
from meshlayout.layout import Layout


@dataclass(frozen=True)
class LeafPlacement:
    """Where the arrays of one leaf go.

    Attributes:
        sharding: Where.
        shards: For each device of this process, its part of this process's rows.
        place: Makes a global array of these parts.
    """

    sharding: NamedSharding
    shards: tuple[tuple[slice, ...], ...]
    place: Callable[[list[np.ndarray]], jax.Array]

    def __call__(self, leaf: np.ndarray) -> jax.Array:
        """Returns the global array of this process's rows."""
        return self.place([leaf[shard] for shard in self.shards])


@dataclass(frozen=True)
class Placement:
    """Where the leaves of batches go.

    Attributes:
        treedef: Their structure.
        leaves: One per leaf; None for those that stay on the host.
        specs: The leaves.
        num_rows: Rows of a global batch.
    """

    treedef: Any
    leaves: tuple[LeafPlacement | None, ...]
    specs: tuple[LeafSpec, ...]
    num_rows: int

    @property
    def element_spec(self) -> PyTree:
        """The abstract batch: a tree of shapes, dtypes and shardings."""
        return self.treedef.unflatten(
            [
                jax.ShapeDtypeStruct(
                    (self.num_rows, *spec.shape),
                    spec.dtype if leaf is None else spec.to,
                    sharding=None if leaf is None else leaf.sharding,
                )
                for spec, leaf in zip(self.specs, self.leaves, strict=True)
            ]
        )

    def placed(self, leaves: list[np.ndarray]) -> list[Any]:
        """Returns the leaves of a batch as global arrays.

        Args:
            leaves: This process's rows of each leaf.
        """
        return [
            leaf if place is None else place(leaf)
            for leaf, place in zip(leaves, self.leaves, strict=True)
        ]


def plan_placement(
    treedef: PyTree,
    specs: tuple[LeafSpec, ...],
    layout: Layout,
    num_rows: int,
    kept: np.ndarray,
) -> Placement:
    """Returns the placement of batches.

    Args:
        treedef: Their structure.
        specs: Their leaves.
        layout: The layout of batches.
        num_rows: Rows of a global batch.
        kept: Which of them are this process's own.

    Raises:
        DataError: If a leaf does not fit the layout.
    """
    per_shard = num_rows // _batches.num_row_shards(layout)
    starts = {int(row): start for start, row in enumerate(kept) if row % per_shard == 0}
    leaves = tuple(_plan_leaf(spec, layout, num_rows, starts) for spec in specs)
    return Placement(treedef, leaves, specs, num_rows)


def is_on_mesh(batch: Batch, layout: Layout) -> bool:
    """Returns whether all arrays of a batch are on the devices of a layout's mesh."""
    devices = set(layout.mesh.devices.flat)
    shardings = map(_jax.sharding_of, jax.tree.leaves(batch))
    return all(s is not None and s.device_set == devices for s in shardings)


def _plan_leaf(
    spec: LeafSpec, layout: Layout, num_rows: int, starts: dict[int, int]
) -> LeafPlacement | None:
    if spec.to is None:
        return None
    shape = (num_rows, *spec.shape)
    sharding = _leaf_sharding(spec, layout, shape)
    shards = []
    indices: Any = sharding.addressable_devices_indices_map(shape)
    for index in indices.values():
        first, stop, _ = index[0].indices(num_rows)
        start = starts[first]
        shards.append((slice(start, start + stop - first), *index[1:]))
    place = _jax.shard_placer(shape, spec.to, sharding)
    return LeafPlacement(sharding, tuple(shards), place)


def _leaf_sharding(
    spec: LeafSpec, layout: Layout, shape: tuple[int, ...]
) -> NamedSharding:
    def where() -> str:
        return f"{spec.path or 'the array'} {array_text(spec.to, shape)}"

    try:
        full = _batches.leaf_layout(layout, len(shape))
    except LayoutError as error:
        raise DataError(f"{where()}: {error}") from None
    if full.misfits(shape):
        try:
            full.check(shape, where())
        except LayoutError as error:
            raise DataError(str(error)) from None
    return full.sharding


@dataclass(frozen=True)
class WeightsPlace:
    """Where the weights of batches are.

    Attributes:
        index: The number of their leaf in batches; None if there are none.
        is_own: Whether the source has them already.
        treedef: The structure of batches.
        leaves: Their leaves.
    """

    index: int | None
    is_own: bool
    treedef: Any
    leaves: tuple[LeafSpec, ...]

    def weighted(
        self, leaves: list[np.ndarray], is_real: np.ndarray | None, count: int
    ) -> list[np.ndarray]:
        """Returns a batch's leaves with its weights, 0 for padding.

        Args:
            leaves: The leaves that the source gave.
            is_real: Which rows are not padding; None for all.
            count: How many rows there are.
        """
        index = self.index
        if index is None:
            return leaves
        if not self.is_own:
            real = np.ones(count, np.float32) if is_real is None else is_real
            return [*leaves[:index], real.astype(np.float32), *leaves[index:]]
        if is_real is None:
            return leaves
        masked = _batches.mask_padding(leaves[index], is_real)
        return [*leaves[:index], masked, *leaves[index + 1 :]]


@dataclass(frozen=True)
class _LeafNumber:
    """Stands for a leaf in a tree, to find its place among the leaves.

    Attributes:
        number: Which leaf of the source's examples; None for weights that are added.
    """

    number: int | None


def find_weights(
    rows: PyTree, spec: ExampleSpec, key: str | int | None, *, add: bool
) -> WeightsPlace:
    """Returns the location of the weights in batches, the source's or added ones.

    Args:
        rows: Some rows of the source.
        spec: What its examples are.
        key: Their key in a mapping, their place in a tuple, or their field.
        add: Whether to add them where the source has none.

    Raises:
        DataError: If the leaf there is not weights, or the chosen key cannot exist in
            these batches.
    """
    nowhere = WeightsPlace(None, is_own=False, treedef=spec.treedef, leaves=spec.leaves)
    if key is None:
        return nowhere
    numbered = spec.treedef.unflatten(map(_LeafNumber, range(len(spec.leaves))))
    weights = _batches.get_weights(rows, key)
    if weights is not None:
        if jax.tree.structure(weights) != jax.tree.structure(0):
            msg = (
                f"the source's {key!r} is taken for the weights, one per example, and "
                f"is a {type(weights).__name__}. Give weights= another name."
            )
            raise DataError(msg)
        leaf = _batches.get_weights(numbered, key)
        if not isinstance(leaf, _LeafNumber) or leaf.number is None:
            return nowhere  # a field that is not part of the tree
        _check_numbers(spec.leaves[leaf.number])
        return replace(nowhere, index=leaf.number, is_own=True)
    added = _with_weights_leaf(numbered, key, spec)
    # Sources without a place for the default key may never need one.
    if added is None and key != "weight":
        msg = (
            f"the source's examples have no place for weights={key!r}. {way_out(rows)}"
        )
        raise DataError(msg)
    return added if add and added is not None else nowhere


def _with_weights_leaf(
    numbered: PyTree, key: str | int, spec: ExampleSpec
) -> WeightsPlace | None:
    """Returns the location of added weights, or None if there is no place for them."""
    if not _batches.takes_weights(numbered, key):
        return None
    try:
        larger = _batches.with_weights(numbered, key, _LeafNumber(None))
    except StepError:
        return None
    named, treedef = named_leaves(larger)
    numbers = [leaf.number for _, leaf in named]
    known = [number for number in numbers if number is not None]
    if known == numbers or known != list(range(len(spec.leaves))):
        return None
    index = numbers.index(None)
    dtype = np.dtype(np.float32)
    leaf = LeafSpec(named[index][0], dtype, (), dtype)
    leaves = (*spec.leaves[:index], leaf, *spec.leaves[index:])
    return WeightsPlace(index, is_own=False, treedef=treedef, leaves=leaves)


def way_out(rows: PyTree) -> str:
    """Returns what to do where padding has no place for its weights.

    Args:
        rows: Some rows of the source.
    """
    if type(rows) in (tuple, list):
        place = f"weights={len(rows)} appends them"
    elif isinstance(rows, Mapping) and all(isinstance(key, int) for key in rows):
        place = f"beside keys that are numbers, weights={max(rows) + 1} adds them"
    else:
        place = "a dict carries them under a key"
    return f"Padding is marked by weights: {place}. Or choose another remainder=."


def _check_numbers(spec: LeafSpec) -> None:
    if spec.to is None or spec.dtype.kind == "c":
        msg = (
            f"{spec.text} is taken for the weights, one number per example, and has "
            f"dtype {spec.dtype}. Give weights= another name."
        )
        raise DataError(msg)
