"""From a batch on the host to a global batch on the mesh, padded to one size."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshlayout import _jax
from meshlayout._batches import (
    BATCH_AXES,
    map_batch,
    num_examples,
    weights_of,
    with_weights,
)
from meshlayout.arrays import relayout, to_numpy
from meshlayout.errors import MeshLayoutError
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh


@dataclass(frozen=True)
class Fed:
    """A batch as a step takes it.

    Attributes:
        batch: The batch, on the mesh.
        num_examples: Its rows without those that were added here.
    """

    batch: Any
    num_examples: int


class Feeder:
    """Puts the batches of one data set on the mesh, all in one size.

    Batches with arrays that were placed by their maker are left as they are. Others get
    weights, padding up to the size of the first batch (rounded up to a multiple of the
    shards; a larger batch is rounded up itself), and the layout.

    Args:
        layout: Where batches go; None leaves them to JAX.
        weights: Where a batch carries its weights, as for `make_train_step`.
        pad: Whether batches get weights and padding.
        needs_weights: Whether padding has to be marked by weights; if not, batches
            without a place for weights are padded, too.

    Attributes:
        size: The rows that batches are padded to; 0 before the first one.
    """

    def __init__(
        self,
        layout: Layout | None,
        weights: str | int,
        *,
        pad: bool,
        needs_weights: bool = True,
    ) -> None:
        self._layout, self._weights = layout, weights
        self._pad, self._needs_weights = pad, needs_weights
        self._num_shards = 1 if layout is None else _num_shards(layout)
        self.size = 0
        self._full: Any = None

    def __call__(self, batch: Any) -> Fed:
        """Returns a batch on the mesh.

        Args:
            batch: A mapping or tuple of arrays, or any tree of them.

        Raises:
            StepError: If its arrays have no batch dim, or differ in it.
            MeshLayoutError: If it does not divide over the mesh, and cannot be padded.
            LayoutError: If an array does not fit the layout.
        """
        rows = num_examples(batch)
        if any(map(_is_placed, jax.tree.leaves(batch))):
            return Fed(batch, rows)
        if self._pad and rows == self.size and self._takes_weights(batch):
            # Full batches share one array of weights, which is on the mesh already.
            batch = self._placed(batch)
            return Fed(with_weights(batch, self._weights, self._ones()), rows)
        if self._pad:
            batch = self._padded(batch, rows)
        self._check_rows(batch, rows)
        return Fed(self._placed(batch), rows)

    def real_rows(self, fed: Fed) -> Any:
        """Returns what selects the examples among a batch's rows: weight 0 is padding.

        Args:
            fed: A batch that was fed.
        """
        weights = weights_of(fed.batch, self._weights)
        if weights is None:
            return slice(fed.num_examples)
        found = to_numpy(weights)
        return np.any(found != 0, axis=tuple(range(1, found.ndim)))

    def _padded(self, batch: Any, rows: int) -> Any:
        takes = self._takes_weights(batch)
        if takes:
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
        padded = map_batch(lambda leaf: _with_rows(leaf, size), batch)
        if weights_of(padded, self._weights) is None:
            return padded
        return self._masked(padded, np.arange(size) < rows)

    def _takes_weights(self, batch: Any) -> bool:
        """Tells whether a batch has no weights, and a place for them."""
        if isinstance(batch, Mapping) and isinstance(self._weights, str):
            return self._weights not in batch
        return type(batch) in (tuple, list) and self._weights == len(batch)

    def _ones(self) -> jax.Array:
        """Returns the weights of a full batch, where they belong."""
        if self._full is None:
            self._full = self._placed(np.ones(self.size, np.float32))
        return self._full

    def _masked(self, batch: Any, is_real: np.ndarray[Any, Any]) -> Any:
        """Returns a batch with weights of 0 for its padding."""
        weights = np.asarray(weights_of(batch, self._weights))
        mask = is_real.reshape(-1, *[1] * (weights.ndim - 1))
        weights = np.where(mask, weights, np.zeros_like(weights))
        return with_weights(batch, self._weights, weights)

    def _check_rows(self, batch: Any, rows: int) -> None:
        if num_examples(batch) % self._num_shards:
            msg = (
                f"a batch has {rows} rows, which do not divide into "
                f"{self._num_shards} shards of {self._layout}, and was not padded: "
                "padding is marked by weights, which a dict carries under a key, and a "
                "tuple in the place given by weights=, its last. With pad=False, "
                "nothing is padded."
            )
            raise MeshLayoutError(msg)

    def _placed(self, batch: Any) -> Any:
        if self._layout is None:
            return batch
        if all(map(np.ndim, jax.tree.leaves(batch))):
            return relayout(batch, self._layout)
        whole = self._layout.mesh.layout()
        layouts = jax.tree.map(
            lambda leaf: self._layout if np.ndim(leaf) else whole, batch
        )
        return relayout(batch, layouts)


def mesh_of(state: Any) -> Mesh | None:
    """Returns the mesh that a state lies on, or None if it lies on none.

    Args:
        state: Any tree of arrays.
    """
    for leaf in jax.tree.leaves(state):
        sharding = _jax.sharding_of(leaf)
        if isinstance(sharding, NamedSharding):
            return Layout.of(leaf).mesh
    return None


def data_layout(mesh: Mesh | None, given: Any) -> Layout | None:
    """Returns where batches go: their first dim over the axes for it.

    Args:
        mesh: The state's mesh.
        given: A layout or its entries, or None for the axes named in `BATCH_AXES`.
    """
    if given is not None:
        return given if isinstance(given, Layout) else Layout(given, mesh)
    if mesh is None:
        return None
    axes = tuple(axis for axis in mesh.axis_names if axis in BATCH_AXES)
    return mesh.layout(axes, ...) if axes else mesh.layout(...)


def is_even(data: Any, layout: Layout | None) -> bool:
    """Tells whether data is known to need no padding.

    Args:
        data: What is gone through; only of a list or tuple is it known.
        layout: Where batches go.
    """
    if not isinstance(data, (list, tuple)):
        return False
    sizes = {num_examples(batch) for batch in data}
    shards = 1 if layout is None else _num_shards(layout)
    return len(sizes) == 1 and sizes.pop() % shards == 0


def _num_shards(layout: Layout) -> int:
    """Returns into how many shards the first dim is cut."""
    return Layout(layout.specs[:1], layout.mesh).with_rank(1).num_shards(0)


def _is_placed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and _jax.is_committed(leaf)


def _with_rows(leaf: Any, size: int) -> Any:
    """Returns an array with its last row repeated, which is as finite as the data."""
    rows = leaf.shape[0]
    if not rows:
        return np.zeros((size, *leaf.shape[1:]), leaf.dtype)
    return leaf[np.minimum(np.arange(size), rows - 1)]
