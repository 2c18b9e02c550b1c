"""From a batch on the host to a global batch on the mesh, all of one size.

Steps are compiled for one shape, and a mesh divides rows into equal shards. So short
batches are padded to the size of the first, and weights of 0 mark the padding. If
nothing can mark it (a loss function that returns a mean, a tuple without a place for
weights), a short batch keeps its size: a second program is compiled and, if the rows do
not divide, every device computes the whole batch. The numbers are right either way.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout import _jax, _paths, _render
from meshlayout._annotations import Batch, PyTree
from meshlayout._batches import (
    WeightsKey,
    check_weights_key,
    get_weights,
    is_marked,
    map_batch,
    mark_weights,
    mask_padding,
    num_examples,
    num_row_shards,
    pad_rows,
    takes_weights,
    weights_of,
    with_weights,
)
from meshlayout.arrays import relayout, to_numpy
from meshlayout.errors import MeshLayoutError
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh
from meshlayout.trainer.tables import TableBatch


_log = logging.getLogger("meshlayout")


@dataclass(frozen=True)
class PlacedBatch:
    """A batch that is ready for a step.

    Attributes:
        batch: The batch, on the mesh.
        num_examples: Its rows without padding that was added here.
        source: The original batch, if it was changed or placed here.
        is_odd: Whether its size differs from the first, so that a program is compiled.
        is_weighted: Whether its weights were added here.
        number: Its number in the epoch, from 1.
        position: The position in the data after it, if that is to be saved and batches
            after it were read; see `Input.place`.
    """

    batch: Batch
    num_examples: int
    source: Batch | None = None
    is_odd: bool = False
    is_weighted: bool = False
    number: int = 1
    position: tuple[dict[str, Any], Any] | None = None

    @property
    def given(self) -> Batch:
        """The original batch."""
        source = self.batch if self.source is None else self.source
        return source.tree if isinstance(source, TableBatch) else source


class BatchPlacer:
    """Puts the batches of one dataset on the mesh, all of one size.

    Batches whose arrays are already on devices are left alone. Others get weights,
    padding and the layout. They are padded to the size of the first batch, rounded up
    to a multiple of the shards; a larger batch only to a multiple of the shards.

    Args:
        layout: The layout of batches; None leaves them to JAX.
        weights: The key or index of the weights in a batch, as for `make_train_step`.
        pad: Whether batches get weights and padding.
        needs_weights: Whether padding has to be marked by weights. If not, batches
            without a place for weights are padded, too.

    Attributes:
        size: The number of rows that batches are padded to; 0 before the first one.
    """

    def __init__(
        self,
        layout: Layout | None,
        weights: WeightsKey,
        *,
        pad: bool,
        needs_weights: bool = True,
    ) -> None:
        self._layout, self._weights = layout, weights
        self._needs_weights = needs_weights
        self._num_shards = 1 if layout is None else num_row_shards(layout)
        self.pad = pad
        self.size = 0
        self._first_rows = 0
        self._first: dict[str, str] | None = None
        self._first_kind = ""
        self._full_weights: Any = None
        self._has_warned = False

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the layout, if there is one."""
        return None if self._layout is None else self._layout.mesh

    def __call__(self, batch: Batch) -> PlacedBatch:
        """Puts a batch on the mesh.

        Raises:
            StepError: If its arrays have no batch dim, or different ones, or its
                weights are at another key.
            LayoutError: If an array does not fit the layout.
        """
        if isinstance(batch, TableBatch):
            return self._of_table(batch)
        rows = num_examples(batch)
        # Only texts of the first batch are kept, for messages about later ones.
        if self._first is None:
            self._first, self._first_kind = _arrays_of(batch), _kind(batch)
        for leaf in jax.tree.leaves(batch):
            if isinstance(leaf, jax.Array) and _jax.is_committed(leaf):
                check_weights_key(batch, self._weights)
                return PlacedBatch(batch, rows)
        is_weighted = self.pad and takes_weights(batch, self._weights)
        if is_weighted and rows == self.size:
            # Full batches share one array of weights: nothing is copied for it.
            if self._full_weights is None:
                self._full_weights = self._placed(np.ones(rows, np.float32))
            placed = self._placed(batch)
            placed = with_weights(placed, self._weights, self._full_weights)
            return PlacedBatch(placed, rows, batch, is_weighted=True)
        padded = self._padded(batch, rows) if self.pad else batch
        size = num_examples(padded)
        # Not `self.size`, that of padded batches, which stays when padding ends.
        self._first_rows = self._first_rows or size
        is_odd = size != self._first_rows
        return PlacedBatch(self._placed(padded), rows, batch, is_odd, is_weighted)

    def _of_table(self, table: TableBatch) -> PlacedBatch:
        """Returns a batch of a table with weights; or without, and without padding."""
        batch, mask, key = table.tree, table.mask, self._weights
        if self._first is None:
            self._first, self._first_kind = _arrays_of(batch), _kind(batch)
        size = rows = num_examples(batch)
        if mask is not None:
            rows = int(to_numpy(mask).sum())
        own = weights_of(batch, key) if self._needs_weights else None
        is_added = self.pad and own is None and takes_weights(batch, key)
        if is_added:
            if self._full_weights is None:
                self._full_weights = self._placed(np.ones(size, np.float32))
            weights = self._full_weights if mask is None else mask
            mark_weights(weights)
            batch = with_weights(batch, key, weights)
        elif own is not None and self.pad and mask is not None:
            real = mask.reshape(-1, *[1] * (own.ndim - 1)) > 0
            batch = with_weights(batch, key, jnp.where(real, own, 0))
        elif rows < size and (self._needs_weights or not self.pad):
            cut = jax.tree.map(lambda leaf: leaf[:rows], to_numpy(batch))
            return PlacedBatch(self._placed(cut), rows, table, is_odd=True)
        return PlacedBatch(batch, rows, table, is_weighted=is_added)

    def without_weights(self, group: list[PlacedBatch]) -> list[PlacedBatch] | None:
        """Stops adding weights and padding, and returns a call's batches without them.

        Their sizes may then differ. Returns None if nothing was added to them.
        """
        if not any(placed.is_weighted for placed in group):
            return None
        self.pad, self._first_rows = False, 0
        return self.renewed(group)

    def renewed(self, group: list[PlacedBatch]) -> list[PlacedBatch]:
        """Places batches again that were placed before `without_weights`."""
        return [
            replace(self(x.source), number=x.number, position=x.position)
            if x.is_weighted and not self.pad
            else x
            for x in group
        ]

    def real_outputs(self, placed: PlacedBatch, outputs: PyTree) -> PyTree:
        """Returns the outputs of the user's rows, on the host.

        Args:
            placed: A batch.
            outputs: A tree of arrays with one row per example.
        """
        size, rows = num_examples(placed.batch), slice(placed.num_examples)
        weights = get_weights(placed.batch, self._weights)
        # Rows of weight 0 are padding only where `distribute_dataset` says so.
        if placed.source is None and is_marked(weights):
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

    def difference(self, batch: Batch) -> str:
        """Describes how a batch differs from the first one; empty if it does not."""
        kind = _kind(batch)
        if kind != self._first_kind:
            return f"it is {kind}, but the first batch is {self._first_kind}"
        first, arrays = self._first or {}, _arrays_of(batch)
        missing = [repr(path) for path in first if path not in arrays]
        if missing:
            return f"it lacks {', '.join(missing)}, which the first batch has"
        extra = [repr(path) for path in arrays if path not in first]
        if extra:
            return f"it has {', '.join(extra)}, which the first batch lacks"
        for path, text in arrays.items():
            if text != first[path]:
                name = repr(path) if path else "the array"
                return f"{name} is {text}, but {first[path]} in the first batch"
        return ""

    def _padded(self, batch: Batch, rows: int) -> Batch:
        if takes_weights(batch, self._weights):
            batch = with_weights(batch, self._weights, np.ones(rows, np.float32))
        elif self._needs_weights and weights_of(batch, self._weights) is None:
            return batch
        whole = -(-rows // self._num_shards) * self._num_shards
        self.size = self.size or whole
        # A larger batch does not raise it: a resumed run may not see that one, and has
        # to pad as this one does.
        size = max(self.size, whole)
        if rows == size:
            return batch
        padded = map_batch(lambda leaf: pad_rows(leaf, size), batch)
        weights = weights_of(padded, self._weights)
        if weights is None:
            return padded
        weights = mask_padding(np.asarray(weights), np.arange(size) < rows)
        return with_weights(padded, self._weights, weights)

    def _placed(self, batch: Batch) -> Batch:
        if self._layout is None:
            return batch
        rows, layout = num_examples(batch), self._layout
        if rows % self._num_shards:
            # Replicated: JAX does not shard rows unevenly, and the numbers stay right.
            layout = layout.mesh.layout(...)
            if not self._has_warned:
                _log.warning(
                    "a batch of %d rows does not divide into %d shards, and cannot be "
                    "padded: every device computes the whole batch.",
                    rows,
                    self._num_shards,
                )
            self._has_warned = True
        if all(map(np.ndim, jax.tree.leaves(batch))):
            return relayout(batch, layout)
        # A scalar, such as a temperature for the loss, has no rows to shard.
        scalar = layout.mesh.layout()
        layouts = jax.tree.map(lambda leaf: layout if np.ndim(leaf) else scalar, batch)
        return relayout(batch, layouts)


def _kind(batch: Batch) -> str:
    if isinstance(batch, Mapping):
        return "a dict"
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {len(batch)}"
    return "an array" if hasattr(batch, "shape") else f"a {type(batch).__name__}"


def _arrays_of(batch: Batch) -> dict[str, str]:
    """Returns the dtypes and shapes of a batch's arrays, by path."""
    texts = {}
    for leaf in _paths.flatten(batch).leaves:
        value = leaf.value if hasattr(leaf.value, "dtype") else np.asarray(leaf.value)
        dims = ["rows", *map(str, np.shape(value)[1:])][: np.ndim(value)]
        texts[leaf.path] = f"{_render.dtype_text(value.dtype)}[{', '.join(dims)}]"
    return texts
