"""What a dataset does, decided once: checked from the first rows of its source.

Everything that can be refused is refused here, before training starts: leaves that
cannot be placed, padded or divided, and on several processes options or rows that
differ between them. Each process sends its errors to the others, so that none waits.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from meshlayout import _checks, _jax
from meshlayout._annotations import PyTree
from meshlayout._render.tables import array_text
from meshlayout.cluster.process_sync import report_failure_to
from meshlayout.data.adapters import (
    arrays,
    grain,
    hugging_face,
    iterables,
    tensorflow,
    tfds,
    torch,
)
from meshlayout.data.agreement import (
    FACTS,
    PLAN,
    Agreement,
    agreement_of,
    block_digests,
    sample_digests,
)
from meshlayout.data.batch_iterator import DataOptions, Pipeline
from meshlayout.data.by_row import Cut, RowReader, batches_in_epoch
from meshlayout.data.by_stream import (
    OpenedStream,
    PlacedReader,
    Reader,
    StreamReader,
    first_row,
    no_rows,
    open_first,
)
from meshlayout.data.clock import Clock
from meshlayout.data.examples import ExampleSpec, describe, is_placed
from meshlayout.data.placement import (
    find_weights,
    is_on_mesh,
    plan_placement,
    way_out,
)
from meshlayout.data.position import Identity
from meshlayout.data.protocols import JSON, RandomAccessSource, Source, StreamSource
from meshlayout.data.rows import (
    per_replica_batch_size,
    process_rows,
    processes_of,
    row_groups,
)
from meshlayout.errors import DataError
from meshlayout.layout import Layout


# By the outermost package of an object's class or one of its bases, so that looking
# imports no framework. An adapter returns None for an object of its package that it
# does not support.
_ADAPTERS: dict[str, Callable[..., Source | None]] = {
    "grain": grain.adapt,
    "tensorflow": tensorflow.adapt,
    "tensorflow_datasets": tfds.adapt,
    "torch": torch.adapt,
    "datasets": hugging_face.adapt,
}


def as_source(obj: object, clock: Clock, *, batched: bool | None = None) -> Source:
    """Returns the user's object as a source.

    Args:
        obj: A source already, or an object that one of the adapters supports.
        clock: Where notes go.
        batched: Whether the elements of an iterable are batches (True) or single
            examples (False); None infers it from the object, if possible.

    Raises:
        DataError: If it is of no known kind, or ambiguous.
    """
    batched = _checks.choice("batched", batched, (True, False, None), error=DataError)
    if isinstance(obj, type):  # a class whose objects are iterated
        obj = functools.partial(obj)
    if isinstance(obj, (RandomAccessSource, StreamSource)):
        if batched is not None:
            msg = (
                f"a {type(obj).__name__} is a source that says itself what it gives. "
                f"Leave out batched={batched}."
            )
            raise DataError(msg)
        return obj
    packages = [kind.__module__.partition(".")[0] for kind in type(obj).__mro__]
    for package in dict.fromkeys(packages):
        adapter = _ADAPTERS.get(package)
        source = adapter(obj, clock, batched=batched) if adapter else None
        if source is not None:
            return source
    rows = arrays.adapt(obj, batched=batched)
    return iterables.adapt(obj, batched=batched) if rows is None else rows


@dataclass(frozen=True)
class DataPlan:
    """What all iterations over a dataset share.

    Attributes:
        pipeline: What is done with every batch.
        element_spec: What a batch is.
        identity: The facts that must match for a saved position to fit.
        num_steps: Batches of one iteration, or None where that is not known.
        new_reader: Begins to read the source.
        close: Releases what was opened to see the first element.
        agreement: With the other processes; None if there are none.
    """

    pipeline: Pipeline
    element_spec: PyTree
    identity: Identity
    num_steps: int | None
    new_reader: Callable[[], Reader]
    close: Callable[[], None]
    agreement: Agreement | None


def make_plan(
    open_source: Callable[[], Source],
    layout: Layout,
    options: DataOptions,
    clock: Clock,
    agreement: Agreement | None = None,
    *,
    opened: OpenedStream | None = None,
    close: Callable[[], None] | None = None,
) -> DataPlan:
    """Returns the plan of a dataset.

    Args:
        open_source: Returns the source.
        layout: The layout of batches.
        options: What was asked for.
        clock: Where time and notes go.
        agreement: With the other processes, where it was made before; None makes it.
        opened: The source's first pass, where it was begun before.
        close: Releases what the source holds, if it is not the user's.

    Raises:
        DataError: If the source cannot be made into such batches, here or on another
            process.
    """
    agreement = agreement or agreement_of(processes_of(layout.mesh))
    channel = agreement and agreement.channel
    with report_failure_to(channel, FACTS):
        kept = _kept_rows(layout, options)
        first = _look(open_source(), layout, options, clock, opened)
        facts = {} if agreement is None else _facts(first, options)
    num_batches = None
    if agreement is not None:
        agreement.check_same(facts)
        if options.per_process and first.is_random_access:
            num_batches = _agreed_batches(agreement, first, len(kept), options)
    with report_failure_to(channel, PLAN):
        pipeline = _pipeline(first, layout, options, clock, kept)
        _check_length(first, pipeline, num_batches)
    if agreement is not None:
        agreement.check_made()
    num_steps = _num_steps(first, pipeline.cut, options, num_batches)
    placement = pipeline.placement
    first_pass = [] if first.opened is None else [first.opened]
    return DataPlan(
        pipeline,
        _placed_spec(first.rows) if placement is None else placement.element_spec,
        _identity(first, options),
        num_steps,
        functools.partial(_reader, first, pipeline, num_batches, first_pass),
        functools.partial(_close, first_pass, close),
        agreement,
    )


@dataclass(frozen=True)
class _FirstRows:
    """A source, and its first rows.

    Attributes:
        source: The source.
        rows: Its first rows.
        spec: What its examples are; None for batches that are placed already.
        num_rows: How many it has; None where that is not known.
        opened: The pass that they were read from; None for random access.
    """

    source: Any
    rows: PyTree
    spec: ExampleSpec | None
    num_rows: int | None
    opened: OpenedStream | None

    @property
    def is_random_access(self) -> bool:
        """Whether the source can read any row by number."""
        return self.opened is None


def _look(
    source: Source,
    layout: Layout,
    options: DataOptions,
    clock: Clock,
    opened: OpenedStream | None,
) -> _FirstRows:
    """Returns a source with its first rows, checked."""
    if isinstance(source, RandomAccessSource):
        if not len(source):
            raise DataError(no_rows(0))
        rows = source.read_rows(np.zeros(1, np.int64), 0)
        spec = describe(rows, options.strings, clock.warn)
        return _FirstRows(source, rows, spec, len(source), None)
    if options.shuffle is not None:
        msg = (
            "shuffle= reorders the rows of a source with random access, and this one "
            "is read one way. Shuffle it where it is made, and leave out shuffle=."
        )
        raise DataError(msg)
    opened = opened or open_first(source)
    try:
        if is_placed(opened.rows) and opened.count is not None:
            _check_placed(opened.rows, opened.count, layout, options)
            return _FirstRows(source, opened.rows, None, None, opened)
        spec = describe(opened.rows, options.strings, clock.warn).with_objects()
    except BaseException:
        opened.stream.close()
        raise
    num_rows = None if options.per_process else source.num_rows
    return _FirstRows(source, opened.rows, spec, num_rows, opened)


def _check_placed(
    batch: PyTree, count: int, layout: Layout, options: DataOptions
) -> None:
    if not is_on_mesh(batch, layout):
        msg = (
            "the source gives arrays that are on other devices than those of "
            f"{layout.mesh!r}. Place them on this mesh, or give them as NumPy arrays."
        )
        raise DataError(msg)
    if count != options.global_batch_size:
        msg = (
            f"the source gives batches of {count} rows that are on the mesh already, "
            f"and global_batch_size={options.global_batch_size}. They pass through "
            "unchanged: give their size."
        )
        raise DataError(msg)


def _pipeline(
    first: _FirstRows,
    layout: Layout,
    options: DataOptions,
    clock: Clock,
    kept: np.ndarray,
) -> Pipeline:
    size = len(kept) if options.per_process else options.global_batch_size
    is_all = options.per_process or len(kept) == size
    weights, placement, filler = None, None, None
    no_place = (
        "Batches that are on the mesh already are not padded: give as many on every "
        "process, or choose remainder='drop'."
    )
    if first.spec is not None:
        add = options.remainder == "pad"
        weights = find_weights(first.rows, first.spec, options.weights, add=add)
        no_place = way_out(first.rows)
        placement = plan_placement(
            weights.treedef, weights.leaves, layout, options.global_batch_size, kept
        )
        may_run_short = options.per_process and not first.is_random_access
        if may_run_short and weights.index is not None:
            filler = first_row(first.spec, first.rows)
    return Pipeline(
        options,
        Cut(size, None if is_all else kept),
        weights,
        placement,
        no_place,
        filler,
        _jax.canonical_dtype(np.int64) == np.int64,
        clock,
    )


def _check_length(
    first: _FirstRows, pipeline: Pipeline, num_batches: int | None
) -> None:
    """Raises DataError if an epoch is known not to divide into batches."""
    num_rows, size = first.num_rows, pipeline.cut.size
    remainder, weights = pipeline.options.remainder, pipeline.weights
    if num_rows is None or remainder == "repeat":
        return
    if num_batches is None:
        num_batches = batches_in_epoch(num_rows, size, remainder)
    left = num_rows % size
    what = f"a source of {num_rows} rows, in batches of {size}, leaves {left}"
    if remainder == "drop":
        if num_rows < size:
            msg = (
                f"the source has {num_rows} rows, fewer than a batch of {size}: "
                "remainder='drop' drops all of them. Take a smaller "
                "global_batch_size, or another remainder=."
            )
            raise DataError(msg)
        dropped = num_rows - num_batches * size
        if dropped:
            pipeline.clock.warn(
                f"remainder='drop' drops {dropped} of {num_rows} rows in every epoch."
            )
    if remainder == "error" and left:
        msg = f"{what}. Choose another remainder=, or another global_batch_size."
        raise DataError(msg)
    if remainder != "pad" or weights is None or weights.index is not None:
        return
    if left:
        raise DataError(f"{what}, to be padded. {pipeline.no_place}")
    if num_rows < num_batches * size:
        msg = (
            f"the source has {num_rows} rows, and those of other processes fill "
            f"{num_batches} batches of {size}, up to which this one is padded. "
            f"{pipeline.no_place}"
        )
        raise DataError(msg)


def _kept_rows(layout: Layout, options: DataOptions) -> np.ndarray:
    """Returns which rows of a global batch are this process's own."""
    size = options.global_batch_size
    per_replica_batch_size(size, layout)
    kept = process_rows(layout, size)
    if options.per_process:
        row_groups(layout, size)
        if not len(kept):
            msg = (
                f"process {jax.process_index()} has no devices in {layout.mesh!r}, and "
                "so no rows of its own: with per_process=True it makes no dataset."
            )
            raise DataError(msg)
    return kept


def _facts(first: _FirstRows, options: DataOptions) -> dict[str, JSON]:
    """Returns the facts that must be the same on all processes."""
    facts: dict[str, JSON] = asdict(options)
    if not options.per_process:
        facts["number of rows"] = first.num_rows
    if first.spec is not None:
        facts["leaves"] = [
            f"{spec.path} {array_text(spec.dtype, spec.shape)}"
            for spec in first.spec.leaves
        ]
        if not options.per_process:
            facts["rows"] = (
                sample_digests(first.source)
                if first.is_random_access
                else block_digests([first.rows])
            )
    return facts


def _agreed_batches(
    agreement: Agreement, first: _FirstRows, size: int, options: DataOptions
) -> int | None:
    """Returns how many batches an epoch has if each process has its own rows."""
    if options.remainder == "repeat" or first.num_rows is None:
        return None
    here = batches_in_epoch(first.num_rows, size, options.remainder)
    counts = agreement.channel.exchange(here, "batches")
    if options.remainder == "error" and len(set(counts.values())) > 1:
        listed = ", ".join(f"{n} on process {p}" for p, n in counts.items())
        msg = (
            f"the processes have different numbers of batches: {listed}. "
            "remainder='pad' pads the shorter ones."
        )
        raise DataError(msg)
    return (min if options.remainder == "drop" else max)(counts.values())


def _identity(first: _FirstRows, options: DataOptions) -> Identity:
    process = None
    if options.per_process:
        process = [jax.process_index(), jax.process_count()]
    return Identity(
        "rows" if first.is_random_access else "stream",
        first.num_rows if first.is_random_access else None,
        options.global_batch_size,
        options.remainder,
        options.shuffle,
        process,
        None if first.opened is None else first.opened.count,
    )


def _num_steps(
    first: _FirstRows, cut: Cut, options: DataOptions, num_batches: int | None
) -> int | None:
    """Returns how many batches an iteration has, or None."""
    epochs, steps, num_rows = options.epochs, options.steps, first.num_rows
    if num_rows is None or epochs is None:
        return steps
    if options.remainder == "repeat":
        return math.ceil(epochs * num_rows / cut.size) if steps is None else steps
    if num_batches is None:
        num_batches = batches_in_epoch(num_rows, cut.size, options.remainder)
    available = epochs * num_batches
    if steps is not None and steps > available:
        have = "1 epoch has" if epochs == 1 else f"{epochs} epochs have"
        msg = (
            f"steps={steps}, and {have} {available} batches. Take more epochs=, fewer "
            "steps=, or remainder='repeat'."
        )
        raise DataError(msg)
    return available if steps is None else steps


def _reader(
    first: _FirstRows,
    pipeline: Pipeline,
    num_batches: int | None,
    opened: list[OpenedStream],
) -> Reader:
    options, clock = pipeline.options, pipeline.clock
    if first.spec is None:
        return PlacedReader(first.source, opened, clock)
    if first.opened is None:
        return RowReader(
            first.source,
            first.spec,
            pipeline.cut,
            remainder=options.remainder,
            seed=options.shuffle,
            num_batches=num_batches,
            clock=clock,
        )
    return StreamReader(
        first.source,
        opened,
        first.spec,
        pipeline.cut,
        batched=first.opened.count is not None,
        remainder=options.remainder,
        clock=clock,
    )


def _close(opened: list[OpenedStream], close: Callable[[], None] | None) -> None:
    while opened:
        opened.pop().stream.close()
    if close is not None:
        close()


def _placed_spec(batch: PyTree) -> PyTree:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding
        ),
        batch,
    )
