"""Examples read from the files of a TFDS dataset: decoded, mapped and stacked.

Everything here is a source with random access, so that the order of an epoch, its
shards and positions work as for every other source. What an example becomes depends on
seed, epoch and row alone, never on who reads it or on what is read with it.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import Batch, PyTree
from meshlayout.data.adapters.arrays import Rows
from meshlayout.data.adapters.tfds import feature_dtypes
from meshlayout.data.by_row import Order
from meshlayout.data.clock import Clock
from meshlayout.data.element_rows import as_batch, stack
from meshlayout.data.examples import ExampleSpec, LeafSpec, named_leaves
from meshlayout.data.protocols import RandomAccessSource
from meshlayout.data.workers import TimedRows, WorkerPool
from meshlayout.errors import DataError


Array: TypeAlias = np.ndarray[Any, Any]

# With deterministic=False: the rows of a file that are read one after another.
_RUN = 64
# And the rows that are shuffled together, so that a batch mixes several runs. Positions
# in a saved run depend on both.
_WINDOW = 16 * _RUN


class RowGenerators(list[np.random.Generator]):
    """One random generator per row of a batch, which also draws like a single one.

    Draws take a `size` that starts with the number of rows. A row gets the same random
    numbers whichever rows share its batch, on any number of processes.

    Args:
        seed: The seed of the generators, together with epoch and row.
        epoch: The epoch.
        rows: The rows of the batch.

    Example:
        >>> rng = RowGenerators(0, 2, np.array([5, 7]))
        >>> both = rng.normal(size=(2, 3))
        >>> other = RowGenerators(0, 2, np.array([7]))
        >>> np.array_equal(both[1:], other.normal(size=(1, 3)))
        True
    """

    def __init__(self, seed: int, epoch: int, rows: Array) -> None:
        super().__init__(
            np.random.default_rng([seed, epoch, row]) for row in rows.tolist()
        )

    def __getattr__(self, name: str) -> Callable[..., Array]:
        draw = getattr(np.random.Generator, name, None)
        if name.startswith("_") or not callable(draw):
            raise AttributeError(name)

        def draw_by_row(*args: Any, **kwargs: Any) -> Array:
            options = inspect.signature(draw).bind(None, *args, **kwargs).arguments
            del options["self"]
            size = np.atleast_1d(options.pop("size", ())).tolist()
            # Without replacement, a row's draws would depend on those of other rows.
            if size[:1] != [len(self)] or not options.get("replace", True):
                msg = (
                    f"rng.{name} draws for each row of the batch by itself: give "
                    f"size=({len(self)}, ...), or call the generators of the rows, as "
                    f"in [rng_of_row.{name}(...) for rng_of_row in rng]."
                )
                raise DataError(msg)
            shape = tuple(size[1:])
            return np.stack([getattr(rng, name)(**options, size=shape) for rng in self])

        return draw_by_row


@dataclass(frozen=True)
class MapFunction:
    """A user's function of an example or a batch.

    Attributes:
        function: Takes an example, or a batch if `is_batched`; and, if `is_random`, a
            NumPy random generator, or `RowGenerators`.
        is_batched: Whether it takes a batch.
        is_random: Whether it takes generators.
        seed: The seed of the generators, together with epoch and row.
    """

    function: Callable[..., Any]
    is_batched: bool
    is_random: bool
    seed: int

    def examples(
        self, examples: Iterable[PyTree], rows: Array, epoch: int
    ) -> list[PyTree]:
        """Returns the mapped examples of some rows."""
        mapped = []
        for example, row in zip(examples, rows.tolist(), strict=True):
            rng = ()
            if self.is_random:
                rng = (np.random.default_rng([self.seed, epoch, row]),)
            mapped.append(self._called(f"row {row}", example, *rng))
        return mapped

    def batch(self, batch: Batch, rows: Array, epoch: int) -> Batch:
        """Returns the mapped batch of some rows."""
        rngs = (RowGenerators(self.seed, epoch, rows),) if self.is_random else ()
        return self._called(f"the batch that begins with row {rows[0]}", batch, *rngs)

    def _called(self, where: str, *args: Any) -> PyTree:
        try:
            with _checks.noted(f"This was raised by map= at {where} of the split."):
                return self.function(*args)
        except StopIteration as error:  # would pass for the end of the epoch
            msg = f"map= raised StopIteration at {where}."
            raise RuntimeError(msg) from error


def as_map_function(
    function: object, *, is_batched: bool, seed: int
) -> MapFunction | None:
    """Returns a user's function, checked; None if there is none.

    Args:
        function: The function or None. With two required arguments, the second is a
            random generator.
        is_batched: Whether it takes a batch.
        seed: The seed of its random numbers.

    Raises:
        DataError: If it is not a function of one or two arguments.
    """
    if function is None:
        if is_batched:
            msg = "map_batched=True says how map= is called, and there is no map=."
            raise DataError(msg)
        return None
    if not callable(function):
        msg = f"map must be a function of an example, got {_checks.shown(function)}."
        raise DataError(msg)
    num_arguments = _num_required(function)
    if num_arguments not in (1, 2):
        msg = (
            "map must be a function of an example, or of an example and a NumPy random "
            f"generator, got one that needs {num_arguments} arguments."
        )
        raise DataError(msg)
    return MapFunction(function, is_batched, num_arguments == 2, seed)


def _num_required(function: Callable[..., Any]) -> int:
    """Returns the number of arguments a function requires; 1 if that is unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions
        return 1
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    required = [p for p in parameters if p.kind in positional and p.default is p.empty]
    takes_any = any(p.kind in (*positional, p.VAR_POSITIONAL) for p in parameters)
    return len(required) or int(takes_any)


@dataclass(frozen=True)
class RecordDecoder:
    """Reads, decodes, maps and stacks rows; can be sent to a worker process.

    Attributes:
        source: TFDS's data source.
        keys: The features that make up an example, in the form of TFDS's supervised
            keys; None for a dict of all features.
        map: The user's function of an example, or None.
    """

    source: Any
    keys: PyTree
    map: MapFunction | None = None

    @functools.cached_property
    def _dtypes(self) -> Mapping[str, np.dtype]:
        """The dtypes of numbers by path; TFDS would compute them for every batch."""
        return feature_dtypes(self.source.dataset_info.features)

    def __call__(self, rows: Array, epoch: int) -> TimedRows:
        """Returns at least one row, as it is in an epoch."""
        clock = Clock()
        with clock.stage("read"):
            # One call for all records, so that several files are read at once.
            records = self.source.data_source.__getitems__(rows.tolist())
        with clock.stage("decode"):
            examples = self._decoded(records)
        if self.map is not None:
            with clock.stage("map"):
                examples = self.map.examples(examples, rows, epoch)
        with clock.stage("stack"):
            stacked = stack(examples)
        return TimedRows(stacked, clock.report().stages)

    def _decoded(self, records: Sequence[bytes]) -> list[PyTree]:
        """Returns the examples, their numbers in the dtypes of their features."""
        decode = self.source.dataset_info.features.deserialize_example_np
        decoders = self.source.decoders
        examples = [decode(record, decoders=decoders) for record in records]
        typed = _with_dtypes(examples, self._dtypes)
        if self.keys is None:
            return list(typed)
        return [jax.tree.map(example.__getitem__, self.keys) for example in typed]


@dataclass(frozen=True)
class RowMapper:
    """Maps decoded rows; can be sent to a worker process.

    Attributes:
        map: The user's function of an example.
    """

    map: MapFunction

    def __call__(self, rows: Array, epoch: int, decoded: PyTree) -> TimedRows:
        """Returns at least one row, as it is in an epoch."""
        clock = Clock()
        with clock.stage("map"):
            leaves, treedef = jax.tree.flatten(decoded)
            examples = (
                treedef.unflatten([leaf[row] for leaf in leaves])
                for row in range(len(rows))
            )
            stacked = stack(self.map.examples(examples, rows, epoch))
        return TimedRows(stacked, clock.report().stages)


def _with_dtypes(
    examples: Sequence[PyTree], dtypes: Mapping[str, np.dtype]
) -> Iterator[PyTree]:
    """Yields examples of one structure, with dtypes by path for Python numbers."""
    named, treedef = named_leaves(examples[0])
    own = [
        dtypes.get(path) if isinstance(leaf, (bool, int, float)) else None
        for path, leaf in named
    ]
    for example in examples:
        leaves = zip(treedef.flatten_up_to(example), own, strict=True)
        yield treedef.unflatten(
            leaf if dtype is None else dtype.type(leaf) for leaf, dtype in leaves
        )


def worker_rows(
    pool: WorkerPool,
    num_rows: int,
    clock: Clock,
    decoded: RandomAccessSource | None = None,
) -> Rows:
    """Returns a source whose rows are made by workers.

    Args:
        pool: The workers.
        num_rows: The number of rows.
        clock: Takes the workers' times.
        decoded: The rows that are sent to the workers; None if they read them from the
            files.
    """

    def read(indices: Array, epoch: int) -> Batch:
        inputs = () if decoded is None else (decoded.read_rows(indices, epoch),)
        pieces, num_workers = pool.read(indices, epoch, *inputs)
        # Workers read in parallel, so their seconds are divided by their number. Rows
        # of "read" are counted by the stage that encloses this call.
        for stages in zip(*(piece.stages for piece in pieces), strict=True):
            name = stages[0].name
            seconds = sum(stage.seconds for stage in stages) / num_workers
            clock.add(name, 0 if name == "read" else len(indices), seconds)
        return _concatenated([piece.rows for piece in pieces])

    return Rows(num_rows, read)


def _concatenated(blocks: Sequence[PyTree]) -> PyTree:
    """Returns blocks of rows as one block.

    Raises:
        DataError: If a leaf's rows differ between blocks in shape or dtype.
    """
    if len(blocks) == 1:
        return blocks[0]
    named, treedef = named_leaves(blocks[0])
    leaves = (LeafSpec(path, leaf.dtype, leaf.shape[1:], None) for path, leaf in named)
    spec = ExampleSpec(treedef, tuple(leaves))
    columns = zip(*map(spec.checked, blocks), strict=True)
    return treedef.unflatten(map(np.concatenate, columns))


def mapped_batches(
    source: RandomAccessSource, function: MapFunction, batch_size: int, clock: Clock
) -> Rows:
    """Returns a source whose rows go through a user's function of a batch.

    Args:
        source: The rows to be mapped.
        function: The user's function.
        batch_size: Rows of this process in a batch. A shorter one is filled up with its
            last row, so that the function sees batches of one shape only.
        clock: Takes the function's time.

    Returns:
        The rows. Reading raises DataError if the function changes their number.
    """

    def read(indices: Array, epoch: int) -> Batch:
        padding = max(0, batch_size - len(indices))
        padded = np.pad(indices, (0, padding), mode="edge")
        rows = source.read_rows(padded, epoch)
        with clock.stage("map", len(padded)):
            mapped = function.batch(rows, padded, epoch)
        mapped_rows, count = as_batch(mapped)
        if count != len(padded):
            msg = (
                f"map= returned {count} rows for a batch of {len(padded)}. With "
                "map_batched=True it must keep their number."
            )
            raise DataError(msg)
        return jax.tree.map(lambda leaf: leaf[: len(indices)], mapped_rows)

    return Rows(len(source), read)


class FileOrder:
    """An order of rows that reads many files side by side, a run of rows at a time.

    Neighboring rows stay close together. With a seed, every epoch shuffles the runs,
    and then the rows within each window of several runs. That is less random than a
    shuffle of all rows, and suits disks and buckets, where every read takes time.

    Args:
        files: The rows of each file.
        seed: The seed of the shuffle; None reads the files in turn.

    Example:
        >>> order = FileOrder([range(0, 100), range(100, 150)], seed=None)
        >>> order.at(np.array([0, 64, 114]), epoch=0)
        array([  0, 100,  64])
    """

    def __init__(self, files: Sequence[range], seed: int | None) -> None:
        runs = [
            (start, number, rows[start : start + _RUN])
            for number, rows in enumerate(files)
            for start in range(0, len(rows), _RUN)
        ]
        runs.sort(key=lambda run: run[:2])  # the first run of each file, then the next
        self._starts = np.array([run.start for *_, run in runs])
        self._lengths = np.array([len(run) for *_, run in runs])
        self._num_rows = int(self._lengths.sum())
        self._seed = seed
        # Two, as iterations in several threads may be in different epochs.
        self._runs_of = functools.lru_cache(maxsize=2)(self._runs_in_order)

    def at(self, positions: Array, epoch: int) -> Array:
        """Returns the row indices at some positions of an epoch's order."""
        if self._seed is not None:
            positions = self._shuffled(positions, epoch)
        ends, shifts = self._runs_of(epoch)
        return positions + shifts[np.searchsorted(ends, positions, side="right")]

    def _runs_in_order(self, epoch: int) -> tuple[Array, Array]:
        """Returns, by run, the position where it ends, and row minus position."""
        count = len(self._starts)
        order = Order(count, self._seed, epoch).at(np.arange(count))
        ends = np.cumsum(self._lengths[order])
        return ends, self._starts[order] - (ends - self._lengths[order])

    def _shuffled(self, positions: Array, epoch: int) -> Array:
        """Returns positions after a shuffle within each window."""
        shuffled = np.empty_like(positions)
        windows = positions // _WINDOW
        num_windows = -(-self._num_rows // _WINDOW)
        for window in np.unique(windows).tolist():
            start = window * _WINDOW
            size = min(_WINDOW, self._num_rows - start)
            # A different order in every window of every epoch.
            order = Order(size, self._seed, epoch * num_windows + window)
            inside = windows == window
            shuffled[inside] = start + order.at(positions[inside] - start)
        return shuffled
