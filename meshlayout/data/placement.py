"""From this process's rows of a batch to global arrays on the mesh, with weights."""

import functools
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
class BatchSpec:
    """The leaves of batches, and which of them are the weights.

    Attributes:
        treedef: The structure of batches.
        leaves: Their leaves.
        weights_index: The number of the weights among them; None if there are none.
        has_own_weights: Whether the source has them already.
    """

    treedef: Any
    leaves: tuple[LeafSpec, ...]
    weights_index: int | None = None
    has_own_weights: bool = False

    def weighted(
        self, leaves: list[np.ndarray], is_real: np.ndarray | None, num_rows: int
    ) -> list[np.ndarray]:
        """Returns a batch's leaves with its weights, 0 for padding.

        Args:
            leaves: The leaves that the source gave.
            is_real: Which rows are not padding; None for all.
            num_rows: How many rows there are.
        """
        index = self.weights_index
        if index is None:
            return leaves
        if not self.has_own_weights:
            real = np.ones(num_rows, np.float32) if is_real is None else is_real
            return [*leaves[:index], real.astype(np.float32), *leaves[index:]]
        if is_real is None:
            return leaves
        masked = _batches.mask_padding(leaves[index], is_real)
        return [*leaves[:index], masked, *leaves[index + 1 :]]


class Placement:
    """Places this process's rows of batches as global arrays.

    Attributes:
        spec: What batches are.
        element_spec: The abstract batch: a tree of shapes, dtypes and shardings.

    Args:
        spec: What batches are.
        layout: Their layout.
        num_rows: Rows of a global batch.
        own_rows: Which of them are this process's own.

    Raises:
        DataError: If a leaf does not fit the layout.
    """

    def __init__(
        self, spec: BatchSpec, layout: Layout, num_rows: int, own_rows: np.ndarray
    ) -> None:
        per_shard = num_rows // _batches.num_row_shards(layout)
        starts = {
            int(row): start
            for start, row in enumerate(own_rows)
            if row % per_shard == 0
        }
        self.spec = spec
        self._places: list[Callable[[np.ndarray], Any]] = []
        abstract_leaves = []
        for leaf in spec.leaves:
            shape, dtype, sharding = (num_rows, *leaf.shape), leaf.dtype, None
            place: Callable[[np.ndarray], Any] = _on_host
            if leaf.to is not None:
                dtype, sharding = leaf.to, _sharding(leaf, layout, shape)
                slices = _shard_slices(sharding, shape, starts)
                placer = _jax.shard_placer(shape, dtype, sharding)
                place = functools.partial(_placed, placer, slices)
            self._places.append(place)
            abstract_leaves.append(
                jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            )
        self.element_spec: PyTree = spec.treedef.unflatten(abstract_leaves)
        self._x64 = _jax.canonical_dtype(np.int64) == np.int64

    @property
    def has_weights(self) -> bool:
        """Whether batches carry weights."""
        return self.spec.weights_index is not None

    def __call__(
        self, leaves: list[np.ndarray], is_real: np.ndarray | None, num_rows: int
    ) -> Batch:
        """Returns a batch on the mesh, with its weights.

        Args:
            leaves: This process's rows of each leaf that the source gave.
            is_real: Which of them are not padding; None for all.
            num_rows: How many rows these are.
        """
        leaves = self.spec.weighted(leaves, is_real, num_rows)
        # What the loop's thread had when the dataset was made counts, in any thread.
        with _jax.x64_mode(enabled=self._x64):
            arrays = [
                place(leaf) for place, leaf in zip(self._places, leaves, strict=True)
            ]
        if self.spec.weights_index is not None:
            _batches.mark_weights(arrays[self.spec.weights_index])
        return self.spec.treedef.unflatten(arrays)


def _on_host(leaf: np.ndarray) -> np.ndarray:
    return leaf


def _placed(
    place: Callable[[list[np.ndarray]], jax.Array],
    slices: list[tuple[slice, ...]],
    leaf: np.ndarray,
) -> jax.Array:
    """Returns a global array of this process's rows."""
    return place([leaf[part] for part in slices])


def _shard_slices(
    sharding: NamedSharding, shape: tuple[int, ...], starts: dict[int, int]
) -> list[tuple[slice, ...]]:
    """Returns the parts of a process's rows that its devices hold.

    Args:
        sharding: Where the array goes.
        shape: Its global shape.
        starts: For the first row of each shard, its place among the process's rows.
    """
    slices = []
    indices: Any = sharding.addressable_devices_indices_map(shape)
    for rows, *others in indices.values():
        first, stop, _ = rows.indices(shape[0])
        start = starts[first]
        slices.append((slice(start, start + stop - first), *others))
    return slices


def _sharding(leaf: LeafSpec, layout: Layout, shape: tuple[int, ...]) -> NamedSharding:
    where = f"{leaf.path or 'the array'} {array_text(leaf.to, shape)}"
    try:
        full = _batches.leaf_layout(layout, len(shape))
    except LayoutError as error:
        raise DataError(f"{where}: {error}") from None
    try:
        full.check(shape, where)
    except LayoutError as error:
        raise DataError(str(error)) from None
    return full.sharding


def is_on_mesh(batch: Batch, layout: Layout) -> bool:
    """Returns whether all arrays of a batch are on the devices of a layout's mesh."""
    devices = set(layout.mesh.devices.flat)
    shardings = map(_jax.sharding_of, jax.tree.leaves(batch))
    return all(s is not None and s.device_set == devices for s in shardings)


def batch_spec(
    rows: PyTree, spec: ExampleSpec, key: str | int | None, *, add: bool
) -> BatchSpec:
    """Returns what batches are, with the source's weights or added ones.

    Args:
        rows: Some rows of the source.
        spec: What its examples are.
        key: Where weights are: a mapping's key, a place in a tuple, or a field.
        add: Whether to add them where the source has none.

    Raises:
        DataError: If the leaf there is not weights, or the chosen key cannot exist in
            these batches.
    """
    unweighted = BatchSpec(spec.treedef, spec.leaves)
    if key is None:
        return unweighted
    weights = _batches.get_weights(rows, key)
    if weights is not None:
        if jax.tree.structure(weights) != jax.tree.structure(0):
            msg = (
                f"the source's {key!r} is taken for the weights, one per example, and "
                f"is a {type(weights).__name__}. Give weights= another name."
            )
            raise DataError(msg)
        markers = [object() for _ in spec.leaves]
        marker = _batches.get_weights(spec.treedef.unflatten(markers), key)
        if marker not in markers:
            return unweighted  # a field that is not part of the tree
        index = markers.index(marker)
        _check_numbers(spec.leaves[index])
        return replace(unweighted, weights_index=index, has_own_weights=True)
    weighted = _with_weights(spec, key)
    # Sources without a place for the default key may never need one.
    if weighted is None and key != "weight":
        msg = (
            f"the source's examples have no place for weights={key!r}. {way_out(rows)}"
        )
        raise DataError(msg)
    return weighted if add and weighted is not None else unweighted


def _with_weights(spec: ExampleSpec, key: str | int) -> BatchSpec | None:
    """Returns batches with added weights, or None if there is no place for them."""
    markers: list[object] = [object() for _ in spec.leaves]
    examples = spec.treedef.unflatten(markers)
    if not _batches.takes_weights(examples, key):
        return None
    marker = object()
    try:
        named, treedef = named_leaves(_batches.with_weights(examples, key, marker))
    except StepError:
        return None
    order = [leaf for _, leaf in named]
    if marker not in order:
        return None
    index = order.index(marker)
    if order[:index] + order[index + 1 :] != markers:
        return None
    dtype = np.dtype(np.float32)
    weights = LeafSpec(named[index][0], dtype, (), dtype)
    leaves = (*spec.leaves[:index], weights, *spec.leaves[index:])
    return BatchSpec(treedef, leaves, index)


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
