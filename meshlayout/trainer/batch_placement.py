"""From a batch on the host to a global batch on the mesh, all of one size.

Steps are compiled for one shape, and a mesh divides rows into equal shards. So short
batches are padded to the size of the first, and weights of 0 mark the padding. Where
nothing can mark it (a loss function that returns a mean, a tuple without a place for
weights), a short batch keeps its size: it compiles a second program and, if its rows do
not divide, is computed in full on every device. Its numbers are right either way.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from meshlayout import _jax, _paths, _render
from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout._batches import (
    WeightsKey,
    batch_layout,
    get_weights,
    is_marked,
    map_batch,
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


_log = logging.getLogger("meshlayout")


@dataclass(frozen=True)
class PlacedBatch:
    """A batch as a step takes it.

    Attributes:
        batch: The batch, on the mesh.
        num_examples: Its rows without those that were added here.
        host: The batch as it came, if it was placed here.
        is_odd: Whether its size differs from the first, so that it compiles again.
    """

    batch: Batch
    num_examples: int
    host: Batch | None = None
    is_odd: bool = False


class BatchPlacer:
    """Puts the batches of one dataset on the mesh, all in one size.

    Batches whose arrays are already on devices are left alone. Others get weights,
    padding up to the size of the first batch (rounded up to a multiple of the shards; a
    larger batch is rounded up itself), and the layout.

    Args:
        layout: The layout of batches; None leaves them to JAX.
        weights: Where a batch carries its weights, as for `make_train_step`.
        pad: Whether batches get weights and padding.
        needs_weights: Whether padding has to be marked by weights; if not, batches
            without a place for weights are padded, too.

    Attributes:
        pad: Whether batches get weights and padding.
        size: The rows that batches are padded to; 0 before the first one.
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

    def __call__(self, batch: Batch) -> PlacedBatch:
        """Returns a batch on the mesh.

        Args:
            batch: A mapping or tuple of arrays, or any tree of them.

        Raises:
            StepError: If its arrays have no batch dim, or differ in it.
            LayoutError: If an array does not fit the layout.
        """
        rows = num_examples(batch)
        if self._first is None:
            self._first, self._first_kind = _arrays_of(batch), _kind(batch)
        if any(map(_is_placed, jax.tree.leaves(batch))):
            return PlacedBatch(batch, rows)
        host = batch
        if self.pad and rows == self.size and takes_weights(batch, self._weights):
            # Full batches share one array of weights, which is on the mesh already.
            placed = with_weights(
                self._placed(batch), self._weights, self._weights_of_full()
            )
            return PlacedBatch(placed, rows, host)
        if self.pad:
            batch = self._padded(batch, rows)
        total = num_examples(batch)
        self._first_rows = self._first_rows or total
        is_odd = total != self._first_rows
        return PlacedBatch(self._placed(batch), rows, host, is_odd)

    def stop_weighting(self, batch: Batch | None) -> bool:
        """Stops adding weights and padding to batches.

        Args:
            batch: A batch as it came; None if it was already on devices.

        Returns:
            Whether that changes anything for this batch.
        """
        if batch is None or not self.pad or not takes_weights(batch, self._weights):
            return False
        self.pad, self._first_rows = False, 0
        return True

    def without_stale_weights(self, group: list[PlacedBatch]) -> list[PlacedBatch]:
        """Returns batches that were placed before `stop_weighting` as those after it.

        Args:
            group: Batches of one call, read ahead.
        """
        return [
            self(placed.host) if self._is_stale(placed) else placed for placed in group
        ]

    def _is_stale(self, placed: PlacedBatch) -> bool:
        """Returns whether a batch has weights of this placer that it gives no more."""
        if self.pad or placed.host is None:
            return False
        is_weighted = get_weights(placed.batch, self._weights) is not None
        return is_weighted and takes_weights(placed.host, self._weights)

    def real_rows(self, placed: PlacedBatch) -> Any:
        """Returns the index of the user's rows.

        Padding of `distribute_dataset` did not; rows of weight 0 of the user's did.
        """
        weights = get_weights(placed.batch, self._weights)
        if placed.host is not None or not is_marked(weights):
            return slice(placed.num_examples)
        weights = to_numpy(weights)
        return np.any(weights != 0, axis=tuple(range(1, weights.ndim)))

    def difference(self, batch: Batch) -> str:
        """Describes how a batch differs from the first one; empty if it does not."""
        kind = _kind(batch)
        if kind != self._first_kind:
            return f"it is {kind}, and the first batch is {self._first_kind}"
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
                return f"{name} is {text}, and {first[path]} in the first batch"
        return ""

    def _padded(self, batch: Batch, rows: int) -> Batch:
        if takes_weights(batch, self._weights):
            ones = np.ones(rows, np.float32)
            batch = with_weights(batch, self._weights, ones)
        elif self._needs_weights and weights_of(batch, self._weights) is None:
            return batch
        whole = -(-rows // self._num_shards) * self._num_shards
        self.size = self.size or whole
        # The first size stays, so that a resumed run pads as this one does.
        size = max(self.size, whole)
        if rows == size:
            return batch
        padded = map_batch(lambda leaf: pad_rows(leaf, size), batch)
        weights = weights_of(padded, self._weights)
        if weights is None:
            return padded
        weights = mask_padding(np.asarray(weights), np.arange(size) < rows)
        return with_weights(padded, self._weights, weights)

    def _weights_of_full(self) -> Any:
        """Returns the weights of a full batch, on the mesh."""
        weights = self._full_weights
        if weights is None:
            weights = self._full_weights = self._placed(np.ones(self.size, np.float32))
        return weights

    def _placed(self, batch: Batch) -> Batch:
        if self._layout is None:
            return batch
        rows, layout = num_examples(batch), self._layout
        if rows % self._num_shards:
            self._warn_of_whole(rows)
            layout = layout.mesh.layout(...)
        if all(map(np.ndim, jax.tree.leaves(batch))):
            return relayout(batch, layout)
        scalar = layout.mesh.layout()
        layouts = jax.tree.map(lambda leaf: layout if np.ndim(leaf) else scalar, batch)
        return relayout(batch, layouts)

    def _warn_of_whole(self, rows: int) -> None:
        if not self._has_warned:
            _log.warning(
                "a batch of %d rows does not divide over %d shards, and cannot be "
                "padded: every device computes all of it.",
                rows,
                self._num_shards,
            )
        self._has_warned = True


def mesh_of(state: PyTree) -> Mesh | None:
    """Returns the mesh of a state, or None if it is not on one."""
    for leaf in jax.tree.leaves(state):
        sharding = _jax.sharding_of(leaf)
        if isinstance(sharding, NamedSharding):
            return Layout.of(leaf).mesh
    return None


def data_layout(
    mesh: Mesh | None, layout: Layout | Sequence[Any] | None
) -> Layout | None:
    """Returns the layout of batches: by default their rows over the batch axes.

    Args:
        mesh: The state's mesh.
        layout: A layout or its entries, or None.
    """
    if layout is not None:
        return layout if isinstance(layout, Layout) else Layout(layout, mesh)
    return None if mesh is None else batch_layout(mesh)


def is_even(data: Any, layout: Layout | None) -> bool:
    """Returns whether data is known to need no padding: a list of equal batches."""
    if not isinstance(data, (list, tuple)):
        return False
    sizes = {num_examples(batch) for batch in data}
    shards = 1 if layout is None else num_row_shards(layout)
    return len(sizes) == 1 and sizes.pop() % shards == 0


def _is_placed(leaf: Leaf) -> bool:
    return isinstance(leaf, jax.Array) and _jax.is_committed(leaf)


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


# Predictions.


def outputs_of(loss_fn: Callable[..., Any]) -> Callable[[Any, Batch], PyTree]:
    """Returns a function of a model and a batch that returns the loss's outputs.

    Args:
        loss_fn: As for `make_train_step`.
    """
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    asked = inspect.signature(loss_fn).parameters

    def outputs(model: Any, batch: Batch) -> PyTree:
        extras: dict[str, Any] = {"train": False} if "train" in asked else {}
        if "rngs" in asked:
            extras["rngs"] = nnx.Rngs(0)
        result = loss_fn(model, batch, **extras)
        if not isinstance(result, tuple) or not result[1]:
            msg = (
                f"predict: {name} returns losses and no outputs. Return a pair of "
                "losses and a dict of outputs, or give the trainer a "
                "predict_fn(model, batch)."
            )
            raise MeshLayoutError(msg)
        return result[1]

    return outputs


def real_outputs(placer: BatchPlacer, placed: PlacedBatch, outputs: PyTree) -> PyTree:
    """Returns the outputs of the user's rows, on the host.

    Args:
        placer: What put the batch on the mesh.
        placed: The batch.
        outputs: A tree of arrays with one row per example.

    Raises:
        MeshLayoutError: If an output has a different number of rows.
    """
    rows, size = placer.real_rows(placed), num_examples(placed.batch)

    def chosen(value: np.ndarray) -> np.ndarray:
        if np.shape(value)[:1] != (size,):
            msg = (
                f"predict: an output has shape {np.shape(value)} for a batch of {size} "
                "rows; it must have one row per example."
            )
            raise MeshLayoutError(msg)
        return value[rows]

    return jax.tree.map(chosen, to_numpy(outputs))
