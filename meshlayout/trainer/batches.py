"""From a batch to a global batch on the mesh, all of one size.

Steps are compiled for one shape, and a mesh divides rows into equal shards. So a short
batch is padded to the size of the first, and weights of 0 mark the padding. If nothing
can leave padding out (a loss function that returns a mean, a tuple without a place for
weights), a short batch keeps its size: a second program is compiled and, if the rows do
not divide, every device computes the whole batch. The numbers are right either way.

Arrays go through `distribute_dataset`'s pipeline, and their batches come here on the
mesh, with the padding marked beside them. Iterables of batches do not: the pipeline
would cut them anew, into batches of one size and shape.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout import _checks, _jax
from meshlayout._annotations import Batch, PyTree
from meshlayout._batches import (
    WeightsKey,
    batch_layout,
    check_weights_key,
    get_weights,
    is_marked,
    map_batch,
    mark_weights,
    num_examples,
    num_row_shards,
    pad_rows,
    takes_weights,
    weights_of,
    with_weights,
)
from meshlayout.arrays import relayout, to_numpy
from meshlayout.data import DistributedDataset
from meshlayout.data.adapters.arrays import Rows
from meshlayout.data.plan import DataPlan
from meshlayout.errors import MeshLayoutError
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh
from meshlayout.step.placement import check_batch


class RowsBatch(NamedTuple):
    """A batch on the mesh, padded; the mask is 0 for padding, None if there is none."""

    tree: PyTree
    mask: jax.Array | None
    num_examples: int


@dataclass(frozen=True)
class PlacedBatch:
    """A batch that is ready for a step, and what is known of it."""

    batch: Batch
    num_examples: int  # without padding that was added here
    is_odd: bool = False  # whether a program is compiled for its size
    is_given: bool = False  # as the data yielded it
    number: int = 1  # in the epoch
    place: tuple[dict[str, Any], Any] | None = None  # the position in the data after it


class BatchPlacer:
    """Puts the batches of one dataset on the mesh; those on devices are left alone.

    Batches get weights and padding if `pad`, and if `accepts` the first one with
    weights. If padding need not be marked, `marks`, they get no weights. `size` is that
    of padded batches; 0 before the first one.
    """

    def __init__(
        self,
        layout: Layout | None,
        key: WeightsKey,
        *,
        pad: bool,
        marks: bool,
        accepts: Callable[[Batch], bool] | None,
        tell: Callable[[str], None],
    ) -> None:
        self.layout, self._key, self._pad, self._marks = layout, key, pad, marks
        self._accepts, self._tell = accepts, tell
        self._num_shards = 1 if layout is None else num_row_shards(layout)
        self.size = self._first_size = 0
        self._ones: Any = None

    def __call__(self, batch: Batch | RowsBatch) -> PlacedBatch | None:
        """Returns a batch on the mesh; None if it holds no examples."""
        is_rows = isinstance(batch, RowsBatch)
        tree = batch.tree if is_rows else batch
        leaves = jax.tree.leaves(tree)
        is_placed = any(
            isinstance(x, jax.Array) and _jax.is_committed(x) for x in leaves
        )
        if is_placed and not is_rows:
            check_weights_key(batch, self._key)
            return PlacedBatch(batch, num_examples(batch), is_given=True)
        check_batch(tree, self._key)
        weights = weights_of(tree, self._key)
        if weights is not None and self._marks:
            self._tell(f"examples are weighted by {self._key!r} of their batch.")
        # With weights of 0 gradients are 0, but momentum and weight decay would still
        # move the parameters. Weights on devices are not read: that would wait.
        is_padding = isinstance(weights, np.ndarray) and not weights.any()
        if num_examples(tree) == 0 or (is_padding and self._marks):
            return None
        adds = self._pad and self._marks and takes_weights(tree, self._key)
        placed = self._placed(batch, adds=adds)
        if adds and self._accepts is not None and not self._accepts(placed.batch):
            self._pad, self._first_size = False, 0
            placed = self._placed(batch, adds=False)
        self._accepts = None
        return placed

    def _placed(self, batch: Batch | RowsBatch, *, adds: bool) -> PlacedBatch:
        tree = batch.tree if isinstance(batch, RowsBatch) else batch
        own = weights_of(tree, self._key)
        pads = self._pad and (adds or own is not None or not self._marks)
        if not isinstance(batch, RowsBatch):
            batch = self._padded(batch) if pads else RowsBatch(batch, None, 0)
        tree, mask, rows = batch
        if mask is not None and not pads:
            tree, mask = jax.tree.map(lambda x: x[:rows], to_numpy(tree)), None
        size = num_examples(tree)
        if adds:
            mask = self._full_weights(size) if mask is None else mask
            tree = with_weights(tree, self._key, mask)
        elif own is not None and mask is not None:
            own = get_weights(tree, self._key)
            real = mask.reshape(-1, *[1] * (np.ndim(own) - 1)) > 0
            where = jnp.where if isinstance(own, jax.Array) else np.where
            tree = with_weights(tree, self._key, where(real, own, 0))
        tree = self._on_mesh(tree, size)
        if adds:
            mark_weights(get_weights(tree, self._key))
        self._first_size = self._first_size or size
        return PlacedBatch(tree, rows or size, is_odd=size != self._first_size)

    def _padded(self, batch: Batch) -> RowsBatch:
        rows = num_examples(batch)
        whole = -(-rows // self._num_shards) * self._num_shards
        self.size = self.size or whole
        # A larger batch does not raise it: a resumed run may not see that one, and has
        # to pad as this one does.
        size = max(self.size, whole)
        if size == rows:
            return RowsBatch(batch, None, rows)
        mask: Any = (np.arange(size) < rows).astype(np.float32)
        return RowsBatch(map_batch(lambda x: pad_rows(x, size), batch), mask, rows)

    def _full_weights(self, size: int) -> Any:
        """Returns ones, a single array for all full batches: nothing is copied."""
        if np.shape(self._ones) != (size,):
            self._ones = self._on_mesh(np.ones(size, np.float32), size)
        return self._ones

    def _on_mesh(self, batch: Batch, rows: int) -> Batch:
        if self.layout is None:
            return jax.tree.map(jnp.asarray, batch)
        layout, scalar = self.layout, self.layout.mesh.layout()
        if rows % self._num_shards:
            # Replicated: JAX does not shard rows unevenly, and the numbers stay right.
            layout = layout.mesh.layout(...)
            self._tell(
                f"a batch of {rows} rows does not divide into {self._num_shards} "
                "shards, and cannot be padded: every device computes the whole batch."
            )
        # A scalar, such as a temperature for the loss, has no rows to shard.
        layouts = jax.tree.map(lambda leaf: layout if np.ndim(leaf) else scalar, batch)
        return relayout(batch, layouts)

    def real_rows(self, placed: PlacedBatch, outputs: PyTree) -> PyTree:
        """Returns the outputs of the user's rows, on the host."""
        size, rows = num_examples(placed.batch), slice(placed.num_examples)
        weights = get_weights(placed.batch, self._key)
        # Rows of weight 0 are padding only where `distribute_dataset` says so.
        if placed.is_given and is_marked(weights):
            weights = to_numpy(weights)
            rows = np.any(weights != 0, axis=tuple(range(1, weights.ndim)))

        def real(value: np.ndarray) -> np.ndarray:
            if np.shape(value)[:1] != (size,):
                msg = (
                    f"predict: an output has shape {np.shape(value)} for a batch of "
                    f"{size} rows; it must have one row per example."
                )
                raise MeshLayoutError(msg)
            return value[rows]

        return jax.tree.map(real, to_numpy(outputs))


def dataset_of_rows(
    rows: Rows, batch_size: int, layout: Layout | None, shuffle: int | None
) -> DistributedDataset:
    """Returns the batches of some rows, each a `RowsBatch`."""

    def assemble(tree: PyTree, mask: jax.Array | None) -> RowsBatch:
        # Only the last batch of a pass has padding.
        count = batch_size if mask is None else len(rows) % batch_size
        return RowsBatch(tree, mask, count)

    if layout is None:  # on the device to which JAX sends arrays by default
        device = next(iter(jnp.zeros(()).devices()))
        layout = batch_layout(Mesh(jax.sharding.Mesh(np.array([device]), ("batch",))))
    options = {"global_batch_size": batch_size, "weights": None, "shuffle": shuffle}
    return DistributedDataset(
        DataPlan(lambda: rows, layout, options, assemble=assemble)
    )


def split_rows(rows: Rows, share: float) -> tuple[Rows, Rows]:
    """Returns all rows but a share of them, and those at the end."""
    number: dict[str, Any] = {"above": 0, "below": 1, "where": "fit"}
    share = _checks.number("validation_split", share, **number)
    first = len(rows) - round(len(rows) * share)
    if first in (0, len(rows)):
        msg = (
            f"fit: validation_split={share} leaves one part of {len(rows)} rows empty."
        )
        raise MeshLayoutError(msg)

    def read_last(indices: np.ndarray, epoch: int) -> PyTree:
        return rows.read(indices + first, epoch)

    return Rows(first, rows.read), Rows(len(rows) - first, read_last)
