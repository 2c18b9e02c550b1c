"""What a dataset does, decided once from its options and the first rows of its source.

Everything that can be refused is refused here, before training starts: leaves that
cannot be placed, padded or divided, and on several processes options or rows that
differ between them. Each process sends its errors to the others, so that none of them
waits for a process that has already failed.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import jax
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import Batch, PyTree
from meshlayout._render.tables import array_text
from meshlayout.data.adapters.torch import LoaderSource
from meshlayout.data.agreement import (
    FACTS,
    PLAN,
    Agreement,
    BatchReport,
    RowDigest,
    agreement_of,
    block_digests,
    failure_told,
    sample_digests,
)
from meshlayout.data.by_row import Cut, HostBatch, RowReader
from meshlayout.data.by_stream import StreamReader, first_row
from meshlayout.data.clock import Clock
from meshlayout.data.element_rows import check_on_mesh, is_placed
from meshlayout.data.elements import ElementReader, no_rows, rows_text
from meshlayout.data.examples import ExampleSpec, as_rows, describe
from meshlayout.data.placement import (
    Placement,
    find_weights,
    local_rows,
    padding_hint,
    processes_by_rows,
)
from meshlayout.data.position import Position
from meshlayout.data.protocols import JSON, RandomAccessSource, Source
from meshlayout.errors import DataError
from meshlayout.layout import Layout


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
        seed_hint = "shuffle=0 is a shuffle that is the same in every run."
        for name, at_least, can_be_none, hint in (
            ("shuffle", 0, True, seed_hint),
            ("global_batch_size", 1, False, ""),
            ("epochs", 1, True, ""),
            ("steps", 1, True, ""),
            ("prefetch", 0, False, ""),
        ):
            value = getattr(self, name)
            if value is not None or not can_be_none:
                number = _checks.count(
                    name, value, at_least=at_least, error=DataError, hint=hint
                )
                # NumPy's numbers become Python's: JSON, which processes exchange and
                # positions are saved as, takes no others.
                object.__setattr__(self, name, number)
        remainders = ("pad", "drop", "repeat", "error")
        _checks.choice("remainder", self.remainder, remainders, error=DataError)
        _checks.choice("strings", self.strings, ("error", "host"), error=DataError)
        per_process = _checks.flag("per_process", self.per_process, error=DataError)
        object.__setattr__(self, "per_process", per_process)
        if isinstance(self.weights, np.integer):
            object.__setattr__(self, "weights", int(self.weights))
        is_key = isinstance(self.weights, (str, int))
        is_key = is_key and not isinstance(self.weights, bool)
        if self.weights is not None and not is_key:
            msg = (
                "weights must be a key of the batch, an index into a tuple, or None, "
                f"got {_checks.shown(self.weights)}."
            )
            raise DataError(msg)
        if self.per_process and self.remainder == "repeat" and self.steps is None:
            msg = (
                "remainder='repeat' with per_process=True needs steps=: the processes "
                "may have different numbers of rows, and must take as many steps."
            )
            raise DataError(msg)

    @property
    def continues(self) -> bool:
        """Whether an iteration starts where the last one ended."""
        is_part = self.steps is not None or self.epochs is None
        return is_part or self.remainder == "repeat"


Reader: TypeAlias = RowReader | StreamReader


class DataPlan:
    """What all iterations over a dataset share, decided from its first rows.

    Attributes:
        options: The user's options.
        clock: Takes times and notes for the report.
        agreement: With the other processes; None if there are none.
        cut: How batches are cut from the source's rows.
        placement: Puts batches on the mesh; None for batches that are on it already.
        padding_hint: What a user can do if batches cannot be padded.
        filler: The row that fills batches for which a process has no rows, leaf by
            leaf; None if there are no such batches.
        num_steps: Batches of one iteration, or None if that is not known.
        groups: The processes that must read the same rows, group by group: all of them
            if they share a stream, and otherwise those whose devices hold the same rows
            of a batch.
        identity: What must match for a saved position to fit, by name.
    """

    def __init__(
        self,
        open_source: Callable[[], Source | ElementReader],
        layout: Layout,
        options: DataOptions,
        clock: Clock,
        agreement: Agreement | None = None,
        *,
        assemble: Callable[[PyTree, jax.Array | None], Batch] | None = None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """Opens the source and decides.

        Args:
            open_source: Returns the source; or a reader that has already looked at its
                first element.
            layout: The layout of batches.
            options: The user's options.
            clock: Takes times and notes for the report.
            agreement: With the other processes, if the caller has made it; None makes
                it.
            assemble: Makes a batch of the source's tree on the mesh and weights, which
                are None if no process has padding in the batch. None for batches that
                carry weights in the tree, as `options.weights` says.
            close: Releases what the source holds, if it is not the user's to close.

        Raises:
            DataError: If the source cannot be made into such batches, here or on
                another process.
        """
        self.options, self.clock, self._close_source = options, clock, close
        self._assemble = assemble
        self.agreement = agreement = agreement or agreement_of(layout.mesh)
        with failure_told(agreement, FACTS):
            size, is_per_process = options.global_batch_size, options.per_process
            own_rows = local_rows(layout, size, per_process=is_per_process)
            self._first = first = _look(open_source(), layout, options, clock)
            digests = {} if agreement is None else self._digests()
        # A source of this process alone holds nothing but its own rows: all are kept.
        num_read = len(own_rows) if is_per_process else size
        self.cut = Cut(num_read, None if len(own_rows) == num_read else own_rows)
        # Of an epoch, if it is known. Processes with sources of their own must take
        # the same number of steps, so they agree on it.
        self._num_batches = self._count_batches()
        if agreement is not None:
            where = "the first rows" if self.is_stream else "some rows"
            agreement.check_same(self._facts(), digests, where)
            if is_per_process and self._num_batches is not None:
                self._num_batches = agreement.num_batches(
                    self._num_batches, options.remainder
                )
        self.groups: list[list[int]] = []
        if agreement is not None:
            self.groups = list(processes_by_rows(layout, size).values())
            if self._compares_all:
                self.groups = [[p for group in self.groups for p in group]]
        self.placement: Placement | None = None
        self.filler: list[np.ndarray] | None = None
        self.padding_hint = (
            "Batches that are on the mesh already are not padded: yield the same "
            "number on every process, or choose remainder='drop'."
        )
        with failure_told(agreement, PLAN):
            if first.spec is not None:
                rows, spec, key = first.rows, first.spec, options.weights
                self.padding_hint = padding_hint(rows)
                if assemble is not None:
                    # Beside the source's own tree, so that any tree has a place.
                    treedef = jax.tree_util.treedef_tuple([spec.treedef])
                    rows, spec, key = (rows,), replace(spec, treedef=treedef), 1
                # Nothing but padding needs weights that the source does not have.
                add = options.remainder == "pad"
                spec, index = find_weights(rows, spec, key, add=add)
                self.placement = Placement(spec, index, layout, size, own_rows)
                if is_per_process and self.has_weights and self.is_stream:
                    self.filler = first_row(first.spec, first.rows)
            self._check_length()
        if agreement is not None:
            agreement.check_made()
        self.num_steps = self._count_steps()
        # A position of global rows fits any number of processes; one in a source of
        # this process alone fits nowhere else.
        process = [jax.process_index(), jax.process_count()]
        self.identity: dict[str, JSON] = {
            "source": "stream" if self.is_stream else "rows",
            "num_rows": None if self.is_stream else first.num_rows,
            "global_batch_size": options.global_batch_size,
            "remainder": options.remainder,
            "seed": options.shuffle,
            "process": process if is_per_process else None,
            "block": first.block,
        }
        self._idle_readers = [self._new_reader(first.elements)]

    @property
    def has_weights(self) -> bool:
        """Whether batches carry weights."""
        return self.placement is not None and self.placement.has_weights

    @property
    def is_stream(self) -> bool:
        """Whether the source has no random access."""
        return self._first.elements is not None

    @property
    def _compares_all(self) -> bool:
        """Whether all processes read all rows, and compare them."""
        is_shared = self.agreement is not None and not self.options.per_process
        return self.is_stream and is_shared

    @property
    def element_spec(self) -> PyTree:
        """The abstract batch: a tree of shapes, dtypes and shardings."""
        if self.placement is not None:
            spec = self.placement.element_spec
            return spec if self._assemble is None else spec[0]
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=leaf.sharding
            ),
            self._first.rows,
        )

    def placed(self, batch: HostBatch) -> Batch:
        """Returns a batch on the mesh, with its weights."""
        if self.placement is None:
            placed = batch.leaves[0]
            return placed if self._assemble is None else self._assemble(placed, None)
        num_kept = self.cut.num_kept
        with self.clock.stage("place", num_kept):
            is_real = self.cut.is_real(batch.count)
            placed = self.placement(batch.leaves, is_real, num_kept)
            if self._assemble is None:
                return placed
            rows, *weights = placed
            is_padded = is_real is not None or batch.is_padded_elsewhere
            return self._assemble(rows, weights[0] if is_padded else None)

    def report_of(self, batch: HostBatch | None, position: Position) -> BatchReport:
        """Returns the message to other processes about the batch after a position."""
        report = BatchReport(position.epoch, position.batch, None, {})
        if batch is None:
            return report
        digests = batch.digests
        here, spec = jax.process_index(), self._first.spec
        has_others = any(here in group and len(group) > 1 for group in self.groups)
        if has_others and spec is not None and not self._compares_all:
            digest = RowDigest(spec.paths)
            digest.add(batch.leaves)
            digests = digest.by_leaf()
        is_full = batch.count >= self.cut.size
        return report._replace(num_rows=batch.count, digests=digests, is_full=is_full)

    def check_padding(self, batch: HostBatch) -> None:
        """Raises DataError if a batch is padded and cannot carry weights.

        Of sources whose length is known, `_check_length` refuses this earlier.
        """
        is_padded = batch.count < self.cut.size and self.placement is not None
        if is_padded and not self.has_weights:
            msg = (
                f"the last batch of an epoch has {rows_text(batch.count)}, and batches "
                f"have {self.cut.size}. {self.padding_hint}"
            )
            raise DataError(msg)

    def check_position(self, position: Position) -> None:
        """Raises DataError for a position beyond the end of the source's epochs.

        Only with random access: a stream is found to be shorter when it is read.
        """
        num_rows, num_batches = self._first.num_rows, self._num_batches
        if self.is_stream or num_rows is None:
            return
        is_beyond = position.row > num_rows
        if num_batches is not None:  # padded, so that rows may exceed those there are
            is_beyond = position.batch > num_batches
        if is_beyond:
            msg = (
                f"the state is after batch {position.batch} and row {position.row} of "
                f"an epoch, and the source has {num_rows} rows: the state is damaged, "
                "or was changed by hand."
            )
            raise DataError(msg)

    def take_reader(self) -> Reader:
        """Returns an idle reader, or a new one.

        At first the reader that has looked at the first rows is idle; later, the one of
        an iteration that the next iteration continues.
        """
        try:
            return self._idle_readers.pop()  # of several threads, one gets it
        except IndexError:
            return self._new_reader()

    def keep_reader(self, reader: Reader) -> None:
        """Keeps a reader for the next iteration, instead of any kept before."""
        self._close_readers()
        self._idle_readers.append(reader)

    def close(self) -> None:
        """Releases what no iteration is using."""
        self._close_source()
        self._close_readers()

    def _close_readers(self) -> None:
        while self._idle_readers:
            self._idle_readers.pop().close()

    def _new_reader(self, elements: ElementReader | None = None) -> Reader:
        first, options = self._first, self.options
        if first.elements is not None:
            elements = elements or ElementReader(first.source)
            is_batched = first.block is not None
            return StreamReader(
                elements,
                first.spec,
                self.cut,
                batched=is_batched,
                remainder=options.remainder,
                compared=self._compares_all,
                clock=self.clock,
            )
        assert first.spec is not None
        return RowReader(
            first.source,
            first.spec,
            self.cut,
            num_batches=self._num_batches,
            seed=options.shuffle,
            clock=self.clock,
        )

    def _count_batches(self) -> int | None:
        """Returns the number of batches of an epoch.

        None if it is not known, or if epochs run into each other.
        """
        num_rows, remainder = self._first.num_rows, self.options.remainder
        if num_rows is None or remainder == "repeat":
            return None
        size = self.cut.size
        return num_rows // size if remainder == "drop" else math.ceil(num_rows / size)

    def _count_steps(self) -> int | None:
        """Returns the number of batches of an iteration; None if it is not known."""
        epochs, steps = self.options.epochs, self.options.steps
        num_rows = self._first.num_rows
        if num_rows is None or epochs is None:
            return steps
        if self._num_batches is None:  # epochs run into each other
            return (
                math.ceil(epochs * num_rows / self.cut.size) if steps is None else steps
            )
        available = epochs * self._num_batches
        if steps is not None and steps > available:
            have = "1 epoch has" if epochs == 1 else f"{epochs} epochs have"
            msg = (
                f"steps={steps}, and {have} {available} batches. Take more epochs=, "
                "fewer steps=, or remainder='repeat'."
            )
            raise DataError(msg)
        return steps or available

    def _check_length(self) -> None:
        """Raises DataError if an epoch is known not to divide into batches.

        Whether padding is possible is checked here and not when the last batch comes,
        which may be hours later.
        """
        num_rows, num_batches = self._first.num_rows, self._num_batches
        if num_rows is None or num_batches is None:
            return
        size, remainder = self.cut.size, self.options.remainder
        # `dropped` is negative if this process is padded up to the batches of others.
        left, dropped = num_rows % size, num_rows - num_batches * size
        what = f"a source of {num_rows} rows, in batches of {size}, leaves {left}"
        is_unmarked = self.placement is not None and not self.has_weights
        if remainder == "drop" and num_rows < size:
            msg = (
                f"the source has {num_rows} rows, fewer than a batch of {size}: "
                "remainder='drop' drops all of them. Take a smaller "
                "global_batch_size, or another remainder=."
            )
            raise DataError(msg)
        if remainder == "drop" and dropped:
            self.clock.warn(
                f"remainder='drop' drops {dropped} of {num_rows} rows in every epoch."
            )
        if remainder == "error" and left:
            msg = f"{what}. Choose another remainder=, or another global_batch_size."
            raise DataError(msg)
        if remainder == "pad" and is_unmarked and left:
            raise DataError(f"{what}, to be padded. {self.padding_hint}")
        if remainder == "pad" and is_unmarked and dropped < 0:
            msg = (
                f"the source has {num_rows} rows, and those of other processes fill "
                f"{num_batches} batches of {size}, up to which this one is padded. "
                f"{self.padding_hint}"
            )
            raise DataError(msg)

    def _facts(self) -> dict[str, JSON]:
        """Returns the facts that must be the same on all processes."""
        facts: dict[str, JSON] = asdict(self.options)
        if not self.options.per_process:
            facts["number of rows"] = self._first.num_rows
        if self._first.spec is not None:
            facts["leaves"] = [
                f"{leaf.path} {array_text(leaf.dtype, leaf.shape)}"
                for leaf in self._first.spec.leaves
            ]
        return facts

    def _digests(self) -> dict[str, JSON]:
        """Returns digests of some rows, if all processes read the same ones."""
        if self.options.per_process or self._first.spec is None:
            return {}
        if self.is_stream:
            return block_digests([self._first.rows])
        return sample_digests(self._first.source)


@dataclass(frozen=True)
class _FirstRows:
    """A source, and its first rows.

    Attributes:
        source: The source.
        rows: Its first rows.
        spec: The spec of its examples; None for batches that are on the mesh already.
        num_rows: How many rows it has; None if that is not known.
        elements: Reads a stream, and has looked at its first element; None for a source
            with random access.
        block: The examples in that element; None for a single one.
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
        rows = as_rows(source.read_rows(np.zeros(1, np.int64), 0), 1)
        spec = describe(rows, options.strings, clock.warn)
        return _FirstRows(source, rows, spec, len(source))
    if options.shuffle is not None:
        msg = (
            "shuffle= reorders the rows of a source with random access, and this one "
            "is read in order. Shuffle it where it is made, and leave out shuffle=."
        )
        raise DataError(msg)
    elements = source if isinstance(source, ElementReader) else ElementReader(source)
    source = elements.source
    num_parts = source.num_parts if isinstance(source, LoaderSource) else 1
    if num_parts > 1 and not options.per_process:
        # Processes compare their rows only if there are several; one process that
        # reads a part of the data would do so without an error.
        clock.warn(
            f"The DataLoader's sampler gives each of {num_parts} processes its own "
            "part: say per_process=True."
        )
    rows, block = elements.look()
    try:
        if is_placed(rows) and block is not None:
            check_on_mesh(rows, block, layout, options.global_batch_size)
            return _FirstRows(source, rows, None, None, elements, block)
        spec = describe(rows, options.strings, clock.warn).with_objects()
    except BaseException:
        elements.close()
        raise
    # The numbers of rows that processes read in streams of their own may be wrong or
    # differ; they agree in every step instead.
    num_rows = None if options.per_process else source.num_rows
    return _FirstRows(source, rows, spec, num_rows, elements, block)
