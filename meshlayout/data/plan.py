"""What a dataset does, decided once: checked from the first rows of its source.

Everything that can be refused is refused here, before training starts: leaves that
cannot be placed, padded or divided, and on several processes options or rows that
differ between them. Each process sends its errors to the others, so that none waits.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import jax
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import Batch, PyTree
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
    RowDigest,
    agreement_of,
    block_digests,
    sample_digests,
)
from meshlayout.data.by_row import Cut, HostBatch, RowReader, batches_in_epoch
from meshlayout.data.by_stream import ElementReader, StreamReader, no_rows, rows_text
from meshlayout.data.clock import Clock
from meshlayout.data.examples import ExampleSpec, describe, is_placed
from meshlayout.data.placement import Placement, batch_spec, is_on_mesh, way_out
from meshlayout.data.position import Position
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

REMAINDERS = ("pad", "drop", "repeat", "error")


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
    kinds = {kind.__name__ for kind in type(obj).__mro__}
    for package in dict.fromkeys(packages):
        adapter = _ADAPTERS.get(package)
        source = adapter(obj, kinds, clock, batched=batched) if adapter else None
        if source is not None:
            return source
    rows = arrays.adapt(obj, batched=batched)
    return iterables.adapt(obj, batched=batched) if rows is None else rows


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The arguments of `distribute_dataset`, of the same names, checked.

    Raises:
        DataError: If one of them is wrong.
    """

    global_batch_size: int
    remainder: str
    weights: str | int | None
    shuffle: int | None
    epochs: int | None
    steps: int | None
    prefetch: int
    per_process: bool
    strings: str

    def __post_init__(self) -> None:
        hint = "shuffle=0 is a shuffle that is the same in every run."
        for name, at_least, can_be_none in (
            ("shuffle", 0, True),
            ("global_batch_size", 1, False),
            ("epochs", 1, True),
            ("steps", 1, True),
            ("prefetch", 0, False),
        ):
            value = getattr(self, name)
            if value is not None or not can_be_none:
                number = _checks.count(
                    name,
                    value,
                    at_least=at_least,
                    error=DataError,
                    hint=hint if name == "shuffle" else "",
                )
                object.__setattr__(self, name, number)  # NumPy's become Python's
        _checks.choice("remainder", self.remainder, REMAINDERS, error=DataError)
        _checks.flag("per_process", self.per_process, error=DataError)
        _checks.choice("strings", self.strings, ("error", "host"), error=DataError)
        is_key = isinstance(self.weights, (str, int))
        is_key = is_key and not isinstance(self.weights, bool)
        if self.weights is not None and not is_key:
            msg = (
                "weights must be a batch's key, a place in a tuple, or None, got "
                f"{_checks.shown(self.weights)}."
            )
            raise DataError(msg)
        if self.per_process and self.remainder == "repeat" and self.steps is None:
            msg = (
                "remainder='repeat' with per_process=True needs steps=: the processes "
                "may have different numbers of rows, and have to take as many steps."
            )
            raise DataError(msg)

    @property
    def goes_on(self) -> bool:
        """Whether an iteration begins where the last one ended."""
        is_part = self.steps is not None or self.epochs is None
        return is_part or self.remainder == "repeat"


class Reader(Protocol):
    """Cuts a source into batches."""

    def read(
        self, position: Position, digest: RowDigest | None = None
    ) -> HostBatch | None:
        """Returns the batch after a position, or None at the epoch's end.

        Args:
            position: The place after the batch before it, or an epoch's start.
            digest: Where the rows of a stream are added.

        Raises:
            DataError: If the source cannot go there.
        """
        ...

    def close(self) -> None:
        """Releases what it holds; another `read` begins anew."""
        ...


@dataclass(frozen=True)
class DataPlan:
    """What all iterations over a dataset share.

    Attributes:
        options: What was asked for.
        cut: How batches are cut.
        placement: Where they go; None for batches that are placed already.
        element_spec: What a batch is.
        identity: What must match for a saved position to fit, by name.
        num_steps: Batches of one iteration, or None where that is not known.
        no_place: What to do if batches cannot be padded.
        filler: The row that fills batches for which a process has no rows, leaf by
            leaf; None if there cannot be such batches.
        reader: Has looked at the first rows, and reads them again.
        new_reader: Returns another reader of the source.
        close: Releases what the source holds, if it is not the user's.
        clock: Where time and notes go.
        agreement: With the other processes; None if there are none.
    """

    options: DataOptions
    cut: Cut
    placement: Placement | None
    element_spec: PyTree
    identity: dict[str, JSON]
    num_steps: int | None
    no_place: str
    filler: list[np.ndarray] | None
    reader: Reader
    new_reader: Callable[[], Reader]
    close: Callable[[], None]
    clock: Clock
    agreement: Agreement | None

    @property
    def has_weights(self) -> bool:
        """Whether batches carry weights."""
        return self.placement is not None and self.placement.has_weights

    @property
    def is_stream(self) -> bool:
        """Whether the source is read one way."""
        return self.identity["source"] == "stream"

    def check_padding(self, batch: HostBatch) -> None:
        """Raises DataError if a batch is padded and has no place for weights."""
        is_padded = batch.count < self.cut.size and self.placement is not None
        if is_padded and not self.has_weights:
            msg = (
                f"the last batch of an epoch has {rows_text(batch.count)}, and batches "
                f"have {self.cut.size}. {self.no_place}"
            )
            raise DataError(msg)

    def placed(self, batch: HostBatch) -> Batch:
        """Returns a batch on the mesh, with its weights."""
        if self.placement is None:
            return batch.leaves[0]
        num_kept = self.cut.num_kept
        with self.clock.stage("place", num_kept):
            is_real = self.cut.is_real(batch.count)
            return self.placement(batch.leaves, is_real, num_kept)


def make_plan(
    open_source: Callable[[], Source | ElementReader],
    layout: Layout,
    options: DataOptions,
    clock: Clock,
    agreement: Agreement | None = None,
    *,
    close: Callable[[], None] = lambda: None,
) -> DataPlan:
    """Returns the plan of a dataset.

    Args:
        open_source: Returns the source, or one that was opened before.
        layout: The layout of batches.
        options: What was asked for.
        clock: Where time and notes go.
        agreement: With the other processes, where it was made before; None makes it.
        close: Releases what the source holds, if it is not the user's.

    Raises:
        DataError: If the source cannot be made into such batches, here or on another
            process.
    """
    agreement = agreement or agreement_of(processes_of(layout.mesh))
    channel = agreement and agreement.channel
    with report_failure_to(channel, FACTS):
        own_rows = _own_rows(layout, options)
        first = _look(open_source(), layout, options, clock)
        digests = _digests(first, options) if agreement is not None else {}
    size = len(own_rows) if options.per_process else options.global_batch_size
    num_batches = None
    if first.num_rows is not None and options.remainder != "repeat":
        num_batches = batches_in_epoch(first.num_rows, size, options.remainder)
    if agreement is not None:
        where = "some rows" if first.elements is None else "the first rows"
        agreement.check_same(_facts(first, options), digests, where)
        if options.per_process and num_batches is not None:
            num_batches = _agreed_batches(agreement, num_batches, options)
    with report_failure_to(channel, PLAN):
        placement, no_place = _placement(first, layout, options, own_rows)
        is_weighted = placement is None or placement.has_weights
        why_not = None if is_weighted else no_place
        _check_length(first.num_rows, size, num_batches, options, why_not, clock)
    if agreement is not None:
        agreement.check_made()
    cut = Cut(size, None if len(own_rows) == size else own_rows)
    new_reader = functools.partial(_new_reader, first, cut, options, num_batches, clock)
    element_spec = placement and placement.element_spec
    return DataPlan(
        options=options,
        cut=cut,
        placement=placement,
        element_spec=_placed_spec(first.rows) if placement is None else element_spec,
        identity=_identity(first, options),
        num_steps=_num_steps(first.num_rows, size, num_batches, options),
        no_place=no_place,
        filler=_filler(first) if options.per_process and is_weighted else None,
        reader=new_reader(first.elements),
        new_reader=new_reader,
        close=close,
        clock=clock,
        agreement=agreement,
    )


@dataclass(frozen=True)
class _FirstRows:
    """A source, and its first rows.

    Attributes:
        source: The source.
        rows: Its first rows.
        spec: What its examples are; None for batches that are placed already.
        num_rows: How many it has; None where that is not known.
        elements: Reads a stream, and has looked at its first element; None for a source
            with random access.
        block: Examples in that element; None for a single one.
    """

    source: Any
    rows: PyTree
    spec: ExampleSpec | None
    num_rows: int | None
    elements: ElementReader | None = None
    block: int | None = None


def _look(
    source: Source | ElementReader, layout: Layout, options: DataOptions, clock: Clock
) -> _FirstRows:
    """Returns a source with its first rows, checked."""
    if isinstance(source, RandomAccessSource):
        if not len(source):
            raise DataError(no_rows(0))
        rows = source.read_rows(np.zeros(1, np.int64), 0)
        spec = describe(rows, options.strings, clock.warn)
        return _FirstRows(source, rows, spec, len(source))
    if options.shuffle is not None:
        msg = (
            "shuffle= reorders the rows of a source with random access, and this one "
            "is read one way. Shuffle it where it is made, and leave out shuffle=."
        )
        raise DataError(msg)
    elements = source if isinstance(source, ElementReader) else ElementReader(source)
    source = elements.source
    num_parts = source.num_parts if isinstance(source, torch.LoaderSource) else 1
    if num_parts > 1 and not options.per_process:
        clock.warn(
            f"The DataLoader's sampler gives each of {num_parts} processes a part of "
            "its own: say per_process=True."
        )
    rows, block = elements.look()
    try:
        if is_placed(rows) and block is not None:
            _check_placed(rows, block, layout, options)
            return _FirstRows(source, rows, None, None, elements, block)
        spec = describe(rows, options.strings, clock.warn).with_objects()
    except BaseException:
        elements.close()
        raise
    num_rows = None if options.per_process else source.num_rows
    return _FirstRows(source, rows, spec, num_rows, elements, block)


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


def _own_rows(layout: Layout, options: DataOptions) -> np.ndarray:
    """Returns which rows of a global batch are this process's own."""
    size = options.global_batch_size
    per_replica_batch_size(size, layout)
    own_rows = process_rows(layout, size)
    if options.per_process:
        row_groups(layout, size)
        if not len(own_rows):
            msg = (
                f"process {jax.process_index()} has no devices in {layout.mesh!r}, and "
                "so no rows of its own: with per_process=True it makes no dataset."
            )
            raise DataError(msg)
    return own_rows


def _placement(
    first: _FirstRows, layout: Layout, options: DataOptions, own_rows: np.ndarray
) -> tuple[Placement | None, str]:
    """Returns where batches go, and what to do if they cannot be padded."""
    if first.spec is None:
        return None, (
            "Batches that are on the mesh already are not padded: give as many on "
            "every process, or choose remainder='drop'."
        )
    add = options.remainder == "pad"
    spec = batch_spec(first.rows, first.spec, options.weights, add=add)
    placement = Placement(spec, layout, options.global_batch_size, own_rows)
    return placement, way_out(first.rows)


def _check_length(
    num_rows: int | None,
    size: int,
    num_batches: int | None,
    options: DataOptions,
    why_not_padded: str | None,
    clock: Clock,
) -> None:
    """Raises DataError if an epoch is known not to divide into batches."""
    if num_rows is None or num_batches is None:
        return
    left = num_rows % size
    what = f"a source of {num_rows} rows, in batches of {size}, leaves {left}"
    if options.remainder == "drop":
        if num_rows < size:
            msg = (
                f"the source has {num_rows} rows, fewer than a batch of {size}: "
                "remainder='drop' drops all of them. Take a smaller "
                "global_batch_size, or another remainder=."
            )
            raise DataError(msg)
        dropped = num_rows - num_batches * size
        if dropped:
            clock.warn(
                f"remainder='drop' drops {dropped} of {num_rows} rows in every epoch."
            )
    elif options.remainder == "error" and left:
        msg = f"{what}. Choose another remainder=, or another global_batch_size."
        raise DataError(msg)
    elif why_not_padded is not None and left:
        raise DataError(f"{what}, to be padded. {why_not_padded}")
    elif why_not_padded is not None and num_rows < num_batches * size:
        msg = (
            f"the source has {num_rows} rows, and those of other processes fill "
            f"{num_batches} batches of {size}, up to which this one is padded. "
            f"{why_not_padded}"
        )
        raise DataError(msg)


def _filler(first: _FirstRows) -> list[np.ndarray] | None:
    """Returns the first row of a stream, leaf by leaf; it may run short of rows."""
    if first.spec is None or first.elements is None:
        return None
    return [
        spec.converted(leaf[:1].astype(spec.dtype))
        for spec, leaf in zip(
            first.spec.leaves, first.spec.checked(first.rows), strict=True
        )
    ]


def _facts(first: _FirstRows, options: DataOptions) -> dict[str, JSON]:
    """Returns the facts that must be the same on all processes."""
    facts: dict[str, JSON] = asdict(options)
    if not options.per_process:
        facts["number of rows"] = first.num_rows
    if first.spec is not None:
        facts["leaves"] = [
            f"{leaf.path} {array_text(leaf.dtype, leaf.shape)}"
            for leaf in first.spec.leaves
        ]
    return facts


def _digests(first: _FirstRows, options: DataOptions) -> dict[str, JSON]:
    """Returns digests of some rows, if all processes read the same ones."""
    if options.per_process or first.spec is None:
        return {}
    if first.elements is None:
        return sample_digests(first.source)
    return block_digests([first.rows])


def _agreed_batches(
    agreement: Agreement, num_batches: int, options: DataOptions
) -> int:
    """Returns how many batches an epoch has if each process has its own rows."""
    counts = agreement.channel.exchange(num_batches, "batches")
    if options.remainder == "error" and len(set(counts.values())) > 1:
        listed = ", ".join(f"{n} on process {p}" for p, n in counts.items())
        msg = (
            f"the processes have different numbers of batches: {listed}. "
            "remainder='pad' pads the shorter ones."
        )
        raise DataError(msg)
    return (min if options.remainder == "drop" else max)(counts.values())


def _identity(first: _FirstRows, options: DataOptions) -> dict[str, JSON]:
    process = [jax.process_index(), jax.process_count()]
    is_stream = first.elements is not None
    return {
        "source": "stream" if is_stream else "rows",
        "num_rows": None if is_stream else first.num_rows,
        "global_batch_size": options.global_batch_size,
        "remainder": options.remainder,
        "seed": options.shuffle,
        "process": process if options.per_process else None,
        "block": first.block,
    }


def _num_steps(
    num_rows: int | None, size: int, num_batches: int | None, options: DataOptions
) -> int | None:
    """Returns how many batches an iteration has, or None."""
    epochs, steps = options.epochs, options.steps
    if num_rows is None or epochs is None:
        return steps
    if num_batches is None:  # epochs run into each other
        return math.ceil(epochs * num_rows / size) if steps is None else steps
    available = epochs * num_batches
    if steps is not None and steps > available:
        have = "1 epoch has" if epochs == 1 else f"{epochs} epochs have"
        msg = (
            f"steps={steps}, and {have} {available} batches. Take more epochs=, fewer "
            "steps=, or remainder='repeat'."
        )
        raise DataError(msg)
    return available if steps is None else steps


def _new_reader(
    first: _FirstRows,
    cut: Cut,
    options: DataOptions,
    num_batches: int | None,
    clock: Clock,
    elements: ElementReader | None = None,
) -> Reader:
    if first.elements is not None:
        return StreamReader(
            elements or ElementReader(first.source),
            first.spec,
            cut,
            batched=first.block is not None,
            remainder=options.remainder,
            clock=clock,
        )
    assert first.spec is not None
    seed, num_rows = options.shuffle, len(first.source)
    return RowReader(first.source, num_rows, first.spec, cut, num_batches, seed, clock)


def _placed_spec(batch: PyTree) -> PyTree:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding
        ),
        batch,
    )
