"""TensorFlow's tf.data.Dataset, and what tfds.load gives, as streams."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from meshlayout import _paths
from meshlayout.data.adapters.streams import Elements, ElementStream
from meshlayout.data.clock import Clock
from meshlayout.data.leaves import leaf_text
from meshlayout.data.source import Source, Stream
from meshlayout.errors import DataError


# Bytes of the blocks in which single examples are fetched: one by one costs more.
_BLOCK_BYTES = 2**20
_MAX_BLOCK_ROWS = 512

# Steps of a tf.data pipeline by class name, without underscores and "Dataset": those
# that make batches; and what comes after them and gives a batch for each of theirs, for
# all of them or for some.
_BATCH = ("Batch", "ParallelBatch", "PaddedBatch")
_BATCH_OTHERWISE = ("MapAndBatch", "Rebatch", "LegacyRebatch")
_KEEP_COUNT = (
    *("Map", "ParallelMap", "MapOnGpu", "Prefetch", "Options", "Cache", "Shuffle"),
    "GlobalShuffle",
)
_KEEP_BATCHES = (
    *("Filter", "Take", "TakeWhile", "Skip", "Repeat", "ShuffleAndRepeat", "Shard"),
    *("AutoShard", "IgnoreErrors", "AssertCardinality", "CopyToDevice", *_KEEP_COUNT),
)


def adapt(obj: Any, clock: Clock, *, batched: bool | None) -> Source | None:
    """Returns a tf.data.Dataset as a source, or None if it is of another kind.

    Args:
        obj: The data set.
        clock: Where notes go.
        batched: Whether its elements are batches; None looks for a batch step.

    Raises:
        DataError: If it holds ragged or sparse tensors, or may give batches or
            examples.
    """
    if "DatasetV2" not in {kind.__name__ for kind in type(obj).__mro__}:
        return None
    return DatasetStream(obj, clock, batched=batched)


class DatasetStream:
    """A tf.data.Dataset as a stream. It cannot seek.

    Args:
        dataset: The data set.
        clock: Where notes go.
        batched: Whether its elements are batches; None looks for a batch step.
    """

    def __init__(self, dataset: Any, clock: Clock, *, batched: bool | None) -> None:
        specs = _specs(dataset)
        self._batched = _gives_batches(dataset, specs) if batched is None else batched
        self.num_rows = _num_rows(dataset, batched=self._batched)
        self._dataset = dataset
        if not self._batched and all(s.shape.is_fully_defined() for s in specs):
            # Stacked by TensorFlow: the same examples in the same order.
            self._dataset = dataset.batch(_block_rows(specs))
            self._batched = True

    def open(self, epoch: int) -> Stream:
        """Begins a pass; whether it shuffles anew is the data set's own choice."""
        return ElementStream(_Numpy(self._dataset), batched=self._batched)


class _Numpy(Elements):
    """The elements of one pass over a tf.data.Dataset, as arrays."""

    def __init__(self, dataset: Any) -> None:
        self._iterator: Any = dataset.as_numpy_iterator()

    def __next__(self) -> Any:
        if self._iterator is None:
            raise StopIteration
        return next(self._iterator)

    def close(self) -> None:
        self._iterator = None


def _specs(dataset: Any) -> list[Any]:
    """Returns the specs of a data set's tensors.

    Raises:
        DataError: If one is no dense tensor; names it.
    """
    entries, _ = jax.tree_util.tree_flatten_with_path(
        dataset.element_spec, is_leaf=lambda node: type(node).__name__.endswith("Spec")
    )
    for keys, spec in entries:
        kind = type(spec).__name__
        if kind == "TensorSpec":
            continue
        path = "/".join(map(_paths.key_name, keys))
        msg = (
            f"{leaf_text(path)} of the tf.data.Dataset is a "
            f"{kind.removesuffix('Spec')}, not a dense tensor. Make it one with "
            "map, as by to_tensor() or tf.sparse.to_dense."
        )
        raise DataError(msg)
    return [spec for _, spec in entries]


def _gives_batches(dataset: Any, specs: list[Any]) -> bool:
    """Tells batches from examples by the data set's steps and shapes.

    Raises:
        DataError: If neither tells.
    """
    if any(spec.shape.rank == 0 for spec in specs):
        return False
    dims = _first_dims(specs)
    batch = _find(dataset, (*_BATCH, *_BATCH_OTHERWISE), through=_KEEP_BATCHES)
    if batch is None and None not in dims:
        return False
    # A map after the batch step may have made something else of the batches.
    if batch is not None and dims <= {None, *_first_dims(_leaves(batch))}:
        return True
    shapes = ", ".join(str(spec.shape) for spec in specs)
    msg = (
        f"the tf.data.Dataset gives tensors of shape {shapes}, which may be batches or "
        "single examples. Say which with batched=True or batched=False."
    )
    raise DataError(msg)


def _num_rows(dataset: Any, *, batched: bool) -> int | None:
    """Returns how many examples a pass gives, where TensorFlow knows."""
    counted = _before_batching(dataset) if batched else dataset
    if counted is None:
        return None
    cardinality = int(counted.cardinality())
    return cardinality if cardinality >= 0 else None


def _before_batching(dataset: Any) -> Any:
    """Returns the data set of the examples in the batches, or None if none is found."""
    step = _find(dataset, _BATCH, through=_KEEP_COUNT)
    if step is None or not all(map(_is_of_unknown_length, _leaves(step))):
        return None
    inputs = getattr(step, "_inputs", list)()
    return inputs[0] if len(inputs) == 1 else None


def _is_of_unknown_length(spec: Any) -> bool:
    # As of a batch step that keeps its last short batch.
    return spec.shape.rank is not None and spec.shape[0] is None


def _first_dims(specs: list[Any]) -> set[int | None]:
    return {spec.shape[0] if spec.shape.rank else None for spec in specs}


def _leaves(dataset: Any) -> list[Any]:
    return jax.tree.leaves(dataset.element_spec)


def _find(dataset: Any, names: Sequence[str], *, through: Sequence[str]) -> Any:
    """Returns the last of some steps after which there are only others, or None."""
    for step in _steps(dataset):
        name = type(step).__name__.strip("_").removesuffix("Dataset")
        if name in names:
            return step
        if name not in through:
            return None
    return None


def _steps(dataset: Any) -> Iterator[Any]:
    """Yields a data set and, back to where it forks, those that it was made from."""
    while True:
        yield dataset
        inputs = getattr(dataset, "_inputs", list)()
        if len(inputs) != 1:
            return
        (dataset,) = inputs


def _block_rows(specs: list[Any]) -> int:
    sizes = [
        spec.shape.num_elements() * np.dtype(spec.dtype.as_numpy_dtype).itemsize
        for spec in specs
    ]
    return max(1, min(_MAX_BLOCK_ROWS, _BLOCK_BYTES // max(1, sum(sizes))))
