"""From the name of a TFDS dataset to global batches on the mesh.

A split that fits into memory is decoded once and gathered from there. Everything else
is read batch by batch. Either way the split is a source with random access, so that
order, shards, padding and positions work as for any other source.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout._render.tables import bytes_text
from meshlayout.data.adapters.arrays import Rows, array_rows
from meshlayout.data.adapters.tensorflow import TypedExamples
from meshlayout.data.dataset import DistributedDataset
from meshlayout.data.examples import describe, stack
from meshlayout.data.plan import DataOptions, DataPlan
from meshlayout.data.preparation import find_dataset
from meshlayout.data.report import PipelineReport
from meshlayout.data.workers import Workers
from meshlayout.errors import DataError


# Without in_memory=, a split is kept in memory if it takes at most so many bytes.
_KEPT_BYTES = 2**30

# How many rows are decoded at a time.
_CHUNK = 512


@_checks.user_call
def from_tfds(
    name: Any,
    split: str,
    layout_or_mesh: Any,
    *,
    global_batch_size: int,
    shuffle: int | None = 0,
    map: Callable[..., Any] | None = None,
    num_workers: int = 0,
    in_memory: bool | None = None,
    data_dir: str | Path | None = None,
    decoders: Any = None,
    supervised: bool = False,
    **options: Any,
) -> DistributedDataset:
    """Returns a TFDS dataset as shuffled, sharded, prefetched global batches.

    Use this for a dataset of TFDS: its name is enough. Datasets that are prepared as
    array_record are read without TensorFlow. TFDS downloads and prepares others; those
    of the MNIST family need no TensorFlow for that either. Batches depend only on seed
    and epoch, not on the number of processes and workers, and iteration resumes at any
    batch.

    Args:
        name: TFDS's name, such as `mnist` or `emnist/letters`, or a builder.
        split: The split, such as `train` or `train[:10%]`.
        layout_or_mesh: The layout of batches.
        global_batch_size: Rows of a global batch.
        shuffle: A seed, which together with the epoch determines the order of the rows
            and the random numbers of `map`. None keeps the order of the files.
        map: A function from a decoded example, a tree of NumPy arrays, to a tree. If it
            requires a second argument, it gets a NumPy random generator that depends
            only on seed, epoch and row.
        num_workers: How many processes read, decode and map; with 0, the prefetching
            thread does. Worker processes import the script that starts them, so put
            what the script runs under `if __name__ == "__main__":`.
        in_memory: Whether to decode the split once and keep it. None keeps it if its
            examples have one size and take at most 1 GiB; `report()` says which.
        data_dir: Where TFDS keeps prepared datasets; None for its default.
        decoders: TFDS's decoders by feature, as for `tfds.data_source`.
        supervised: Whether examples are TFDS's pairs of input and target, with weights
            appended, rather than dicts of all features.
        **options: Those of `distribute_dataset`: `remainder`, `weights`, `epochs`,
            `prefetch` and `strings`.

    Raises:
        DataError: If an argument is wrong, the dataset can be neither found nor
            downloaded, or its examples cannot be made into batches.
    """
    _checks.choice("in_memory", in_memory, (True, False, None), error=DataError)
    num_workers = _checks.count("num_workers", num_workers, at_least=0, error=DataError)
    if supervised:
        options.setdefault("weights", 2)  # appended to the pair
    options |= {"global_batch_size": global_batch_size, "shuffle": shuffle}
    checked = DataOptions.of(options)
    is_random = map is not None and _is_random(map)
    clock, closing = PipelineReport(), contextlib.ExitStack()

    def rows_of(num_rows: int, reader: _Reader, decoded: Rows | None = None) -> Rows:
        read: Callable[..., list[PyTree]] = reader
        if num_workers:
            read = workers = Workers(reader, num_workers)
            closing.callback(workers.close)

        def read_rows(indices: np.ndarray, epoch: int) -> PyTree:
            rows = None if decoded is None else decoded.read_rows(indices, epoch)
            return stack(read((indices, rows), epoch))

        return Rows(num_rows, read_rows)

    def open_source() -> Rows:
        builder = find_dataset(name, split, data_dir)
        source = builder.as_data_source(split=split, decoders=decoders)
        keys = builder.info.supervised_keys if supervised else None
        if supervised and keys is None:
            msg = f"{builder.info.full_name} has no supervised keys: choose with map=."
            raise DataError(msg)
        examples = TypedExamples(source, builder.info.features)
        reader = _Reader(examples, keys, is_random, checked.shuffle or 0)
        mapped = replace(reader, map=map)
        row = np.zeros(1, np.int64)
        with _checks.noted("TFDS raised this for the first example."):
            first = stack(reader((row, None), 0))
        # What cannot be placed is refused before the whole split is decoded.
        describe(stack(mapped((row, first), 0)), checked.strings)
        is_kept = _fits(first, builder.info, split) if in_memory is None else in_memory
        if not is_kept:
            clock.note("The split is not kept in memory, but decoded in every epoch.")
            return rows_of(len(source), mapped)
        decoded = _decoded(rows_of(len(source), reader), clock.note)
        closing.close()  # ends the workers that have decoded
        return decoded if map is None else rows_of(len(source), mapped, decoded)

    return DistributedDataset(
        DataPlan(open_source, layout_or_mesh, options, clock=clock, close=closing.close)
    )


def _is_random(function: Callable[..., Any]) -> bool:
    """Returns whether a function of an example requires a generator, too."""
    try:
        inspect.signature(function).bind("an example")
    except (TypeError, ValueError) as error:
        return isinstance(error, TypeError)  # some built-ins have no signature
    return False


@dataclass(frozen=True)
class _Reader:
    """Reads, decodes and maps rows of TFDS's data source, also in a worker process.

    `keys` are the features that make up an example, in the form of TFDS's supervised
    keys. What `map` makes of an example, also by a generator if it `is_random`, depends
    on seed, epoch and row alone, never on who maps it or on what shares its batch.
    """

    read: TypedExamples
    keys: PyTree
    is_random: bool
    seed: int
    map: Callable[..., Any] | None = None

    def __call__(self, inputs: tuple[np.ndarray, PyTree], epoch: int) -> list[PyTree]:
        """Returns examples, given row indices and, if they were decoded, the rows."""
        indices, decoded = inputs
        examples: Iterable[PyTree]
        if decoded is None:
            examples = self.read(indices)
            if self.keys is not None:
                examples = [jax.tree.map(each.get, self.keys) for each in examples]
        else:
            leaves, treedef = jax.tree.flatten(decoded)
            examples = map(treedef.unflatten, zip(*leaves, strict=True))
        if self.map is None:
            return list(examples)
        mapped = []
        for example, row in zip(examples, indices.tolist(), strict=True):
            seed = [self.seed, epoch, row]
            rng = [np.random.default_rng(seed)] if self.is_random else []
            with _checks.noted(f"This was raised by map= at row {row} of the split."):
                mapped.append(self.map(example, *rng))
        return mapped


def _decoded(rows: Rows, note: Callable[[str], None]) -> Rows:
    """Returns all rows of a split in memory, in the dtypes of the dataset."""
    arrays: PyTree = None
    for start in range(0, len(rows), _CHUNK):
        indices = np.arange(start, min(start + _CHUNK, len(rows)))
        chunk = rows.read_rows(indices, 0)
        if arrays is None:
            # Allocated once: joining the chunks would take twice the memory.
            new = lambda x: np.empty((len(rows), *x.shape[1:]), x.dtype)  # noqa: E731
            arrays = jax.tree.map(new, chunk)
        pairs = zip(jax.tree.leaves(arrays), jax.tree.leaves(chunk), strict=True)
        for array, part in pairs:
            array[indices] = part
    size = sum(array.nbytes for array in jax.tree.leaves(arrays))
    note(f"Decoded {len(rows):,} examples once into {bytes_text(size)} of memory.")
    return array_rows(arrays)


def _fits(first: PyTree, info: Any, split: str) -> bool:
    """Returns whether a decoded split, of such rows, should be kept in memory."""
    # Without decoding all examples, an unknown dim has no size to allocate.
    infos = jax.tree.leaves(info.features.get_tensor_info())
    has_one_size = all(None not in leaf.shape for leaf in infos)
    leaves = jax.tree.leaves(first)
    strings = [x for leaf in leaves if leaf.dtype == object for x in leaf.flat]
    row_bytes = sum(leaf.nbytes for leaf in leaves) + sum(map(sys.getsizeof, strings))
    return has_one_size and info.splits[split].num_examples * row_bytes <= _KEPT_BYTES
