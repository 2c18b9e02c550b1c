"""Examples read from a TFDS dataset's files: decoded, mapped and stacked.

Everything here is a source of rows by number, so that the order of an epoch, its
shards and its place are those of every other source. What an example becomes depends
on seed, epoch and row alone, never on who reads it or on what is read with it.
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
from meshlayout.data.examples import (
    as_batch,
    concatenate,
    examples_of,
    named_leaves,
    stack,
)
from meshlayout.data.protocols import RandomAccessSource
from meshlayout.data.workers import TimedRows, WorkerPool
from meshlayout.errors import DataError


Array: TypeAlias = np.ndarray[Any, Any]

# Rows of a file that stay together where the order may follow the files.
_RUN = 64
# Rows that are shuffled together: a batch has rows of many places in the files.
_WINDOW = 16 * _RUN


class RowGenerators(list[np.random.Generator]):
    """One random generator for each row of a batch.

    It draws as a single one does, with a `size` that begins with the number of rows. A
    row gets the same numbers whichever rows share its batch, on any number of
    processes.

    Args:
        seed: What the generators start from, together with epoch and row.
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
            # Without replacement, a row would have to know what others drew.
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
        function: Takes an example, or a batch of them if `is_batched`; and if it
            needs a second argument a NumPy random generator, or `RowGenerators`.
        is_batched: Whether it takes a batch.
        is_random: Whether it takes generators.
        seed: What the generators start from, together with epoch and row.
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
        except StopIteration as error:  # would end the epoch
            msg = f"map= raised StopIteration at {where}."
            raise RuntimeError(msg) from error


def as_map_function(
    function: object, *, is_batched: bool, seed: int
) -> MapFunction | None:
    """Returns a user's function as one of rows, or None if there is none.

    Args:
        function: The function or None. With two required arguments, the second is a
            random generator.
        is_batched: Whether it takes a batch.
        seed: What its random numbers start from.

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
    """Returns how many arguments a function needs; 1 where it does not say."""
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
    """Reads, decodes, maps and stacks rows; it can be sent to a worker process.

    Attributes:
        source: TFDS's data source.
        keys: The features that make an example, as TFDS's supervised keys; None for
            all of them, by name.
        map: The user's function of an example, or None.
    """

    source: Any
    keys: PyTree
    map: MapFunction | None = None

    @functools.cached_property
    def _dtypes(self) -> Mapping[str, np.dtype]:
        """Once, and not for every batch: TFDS computes them anew each time."""
        return feature_dtypes(self.source.dataset_info.features)

    def __call__(self, rows: Array, epoch: int) -> TimedRows:
        """Returns rows, at least one, as they are in an epoch."""
        clock = Clock()
        with clock.stage("read"):
            # One call for all records, which reads from several files at once.
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
        """Returns the features that make each example, in the dtypes they have."""
        decode = self.source.dataset_info.features.deserialize_example_np
        decoders = self.source.decoders
        examples = [decode(record, decoders=decoders) for record in records]
        typed = _with_dtypes(examples, self._dtypes)
        if self.keys is None:
            return list(typed)
        return [jax.tree.map(example.__getitem__, self.keys) for example in typed]


@dataclass(frozen=True)
class RowMapper:
    """Maps rows that are decoded; it can be sent to a worker process.

    Attributes:
        map: The user's function of an example.
    """

    map: MapFunction

    def __call__(self, rows: Array, epoch: int, decoded: PyTree) -> TimedRows:
        """Returns rows, at least one, as they are in an epoch."""
        clock = Clock()
        with clock.stage("map"):
            examples = examples_of(decoded, len(rows))
            stacked = stack(self.map.examples(examples, rows, epoch))
        return TimedRows(stacked, clock.report().stages)


def _with_dtypes(
    examples: Sequence[PyTree], dtypes: Mapping[str, np.dtype]
) -> Iterator[PyTree]:
    """Yields examples of one structure, their Python numbers in dtypes by path."""
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
    """Returns a source of rows that workers make.

    Args:
        pool: The workers.
        num_rows: How many rows there are.
        clock: Where the time goes.
        decoded: The rows that workers are sent; None if they read rows by number.
    """

    def read(indices: Array, epoch: int) -> Batch:
        inputs = () if decoded is None else (decoded.read_rows(indices, epoch),)
        pieces, num_workers = pool.read(indices, epoch, *inputs)
        # Workers read in parallel: their seconds are divided by their number. The
        # rows are counted once, in the stage around this one.
        for stages in zip(*(piece.stages for piece in pieces), strict=True):
            name = stages[0].name
            seconds = sum(stage.seconds for stage in stages) / num_workers
            clock.add(name, 0 if name == "read" else len(indices), seconds)
        return concatenate([piece.rows for piece in pieces])

    return Rows(num_rows, read)


def mapped_batches(
    source: RandomAccessSource, function: MapFunction, batch_size: int, clock: Clock
) -> Rows:
    """Returns a source of rows that a user's function of a batch has mapped.

    Args:
        source: The rows before.
        function: The user's function.
        batch_size: Rows of this process in a batch; a shorter one is filled with its
            last row, so that the function only sees batches of one shape.
        clock: Where the time goes.

    Returns:
        The rows. Reading raises DataError if the function returns another number.
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
                "map_batched=True it has to keep their number."
            )
            raise DataError(msg)
        return jax.tree.map(lambda leaf: leaf[: len(indices)], mapped_rows)

    return Rows(len(source), read)


class FileOrder:
    """An order of rows in which files are read piece by piece, many at once.

    Neighboring rows stay near each other: shuffled, runs of them have an order of
    their own in every epoch, and so have the rows in a window of several runs. That is
    less random than a shuffle of all rows, and suits disks and buckets, where each
    read costs time.

    Args:
        files: The rows of each file.
        seed: What shuffles; None reads the files in turn.

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
        runs.sort(key=lambda run: run[:2])  # one run of each file in turn
        self._starts = np.array([run.start for *_, run in runs])
        self._lengths = np.array([len(run) for *_, run in runs])
        self._num_rows = int(self._lengths.sum())
        self._seed = seed
        # Iterations in several threads may be in different epochs.
        self._runs_of = functools.lru_cache(maxsize=2)(self._runs_in_order)

    def at(self, places: Array, epoch: int) -> Array:
        """Returns the rows at some places of an epoch's order."""
        if self._seed is not None:
            places = self._shuffled(places, epoch)
        ends, shifts = self._runs_of(epoch)
        return places + shifts[np.searchsorted(ends, places, side="right")]

    def _runs_in_order(self, epoch: int) -> tuple[Array, Array]:
        """Returns by run where it ends in an epoch, and its rows minus their places."""
        count = len(self._starts)
        order = Order(count, self._seed, epoch).at(np.arange(count))
        ends = np.cumsum(self._lengths[order])
        return ends, self._starts[order] - (ends - self._lengths[order])

    def _shuffled(self, places: Array, epoch: int) -> Array:
        """Returns places after a shuffle inside each window."""
        shuffled = np.empty_like(places)
        windows = places // _WINDOW
        num_windows = -(-self._num_rows // _WINDOW)
        for window in np.unique(windows).tolist():
            start = window * _WINDOW
            size = min(_WINDOW, self._num_rows - start)
            order = Order(size, self._seed, epoch * num_windows + window)
            inside = windows == window
            shuffled[inside] = start + order.at(places[inside] - start)
        return shuffled
