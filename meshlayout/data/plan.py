"""What a dataset does, decided once: checked from the first rows of its source.

Everything that can be refused is refused here, before training starts: leaves that
cannot be placed, padded or divided, and on several processes options or rows that
differ between them. Each process sends its errors to the others, so that none waits.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import Batch, PyTree
from meshlayout._render.tables import array_text
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
    failure_reported,
    sample_digests,
)
from meshlayout.data.by_row import Cut, HostBatch, RowReader
from meshlayout.data.by_stream import (
    ElementReader,
    StreamReader,
    first_row,
    no_rows,
    rows_text,
)
from meshlayout.data.clock import Clock
from meshlayout.data.examples import ExampleSpec, describe, is_placed
from meshlayout.data.placement import (
    Placement,
    find_weights,
    is_on_mesh,
    padding_hint,
    per_replica_batch_size,
    process_rows,
    row_groups,
)
from meshlayout.data.protocols import JSON, RandomAccessSource, Source, StreamSource
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
                object.__setattr__(self, name, number)  # NumPy's become Python's
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


Reader: TypeAlias = RowReader | StreamReader


class DataPlan:
    """What all iterations over a dataset share, decided from its first rows.

    Attributes:
        options: What was asked for.
        clock: Where time and notes go.
        agreement: With the other processes; None if there are none.
        cut: How batches are cut.
        placement: Where they go; None for batches that are placed already.
        padding_hint: What to do if batches cannot be padded.
        filler: The row that fills batches for which a process has no rows, leaf by
            leaf; None if there cannot be such batches.
        num_steps: Batches of one iteration, or None where that is not known.
        identity: What must match for a saved position to fit, by name.

    Args:
        open_source: Returns the source; or its reader, which has looked at it before.
        layout: The layout of batches.
        options: See above, as `clock`.
        agreement: With the other processes, where it was made before; None makes it.
        close: Releases what the source holds, if it is not the user's.

    Raises:
        DataError: If the source cannot be made into such batches, here or on another
            process.
    """

    def __init__(
        self,
        open_source: Callable[[], Source | ElementReader],
        layout: Layout,
        options: DataOptions,
        clock: Clock,
        agreement: Agreement | None = None,
        *,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.options, self.clock, self._close_source = options, clock, close
        self.agreement = agreement = agreement or agreement_of(layout.mesh)
        with failure_reported(agreement, FACTS):
            own_rows = _own_rows(layout, options)
            self._first = first = _look(open_source(), layout, options, clock)
            digests = {} if agreement is None else self._digests()
        size = len(own_rows) if options.per_process else options.global_batch_size
        self.cut = Cut(size, None if len(own_rows) == size else own_rows)
        # Of an epoch, where it is known.
        self._num_batches = self._count_batches()
        if agreement is not None:
            where = "the first rows" if self.is_stream else "some rows"
            agreement.check_same(self._facts(), digests, where)
            if options.per_process and self._num_batches is not None:
                self._num_batches = agreement.num_batches(
                    self._num_batches, options.remainder
                )
        self.placement: Placement | None = None
        self.filler: list[np.ndarray] | None = None
        self.padding_hint = (
            "Batches that are on the mesh already are not padded: give as many on "
            "every process, or choose remainder='drop'."
        )
        with failure_reported(agreement, PLAN):
            if first.spec is not None:
                self.padding_hint = padding_hint(first.rows)
                add = options.remainder == "pad"
                leaves = find_weights(first.rows, first.spec, options.weights, add=add)
                num_rows = options.global_batch_size
                self.placement = Placement(*leaves, layout, num_rows, own_rows)
                if options.per_process and self.has_weights and self.is_stream:
                    self.filler = first_row(first.spec, first.rows)
            self._check_length()
        if agreement is not None:
            agreement.check_made()
        self.num_steps = self._count_steps()
        process = [jax.process_index(), jax.process_count()]
        self.identity: dict[str, JSON] = {
            "source": "stream" if self.is_stream else "rows",
            "num_rows": None if self.is_stream else first.num_rows,
            "global_batch_size": options.global_batch_size,
            "remainder": options.remainder,
            "seed": options.shuffle,
            "process": process if options.per_process else None,
            "block": first.block,
        }
        self._idle_readers = [self._new_reader(first.elements)]

    @property
    def has_weights(self) -> bool:
        """Whether batches carry weights."""
        return self.placement is not None and self.placement.has_weights

    @property
    def is_stream(self) -> bool:
        """Whether the source is read one way."""
        return self._first.elements is not None

    @property
    def element_spec(self) -> PyTree:
        """The abstract batch: a tree of shapes, dtypes and shardings."""
        if self.placement is not None:
            return self.placement.element_spec
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=leaf.sharding
            ),
            self._first.rows,
        )

    def placed(self, batch: HostBatch) -> Batch:
        """Returns a batch on the mesh, with its weights."""
        if self.placement is None:
            return batch.leaves[0]
        num_kept = self.cut.num_kept
        with self.clock.stage("place", num_kept):
            is_real = self.cut.is_real(batch.count)
            return self.placement(batch.leaves, is_real, num_kept)

    def check_padding(self, batch: HostBatch) -> None:
        """Raises DataError if a batch is padded and has no place for weights."""
        is_padded = batch.count < self.cut.size and self.placement is not None
        if is_padded and not self.has_weights:
            msg = (
                f"the last batch of an epoch has {rows_text(batch.count)}, and batches "
                f"have {self.cut.size}. {self.padding_hint}"
            )
            raise DataError(msg)

    def take_reader(self) -> Reader:
        """Returns the reader that is idle, or another one.

        Idle is first the one that has looked at the first rows, and later that of an
        iteration which the next iteration continues.
        """
        try:
            return self._idle_readers.pop()  # of several threads, one gets it
        except IndexError:
            return self._new_reader()

    def keep_reader(self, reader: Reader) -> None:
        """Keeps a reader for the next iteration, in place of any kept before."""
        self._close_readers()
        self._idle_readers.append(reader)

    def close(self) -> None:
        """Releases what no iteration uses."""
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
        """Returns the batches of an epoch; None if not known, or epochs run on."""
        num_rows, remainder = self._first.num_rows, self.options.remainder
        if num_rows is None or remainder == "repeat":
            return None
        size = self.cut.size
        return num_rows // size if remainder == "drop" else math.ceil(num_rows / size)

    def _count_steps(self) -> int | None:
        """Returns how many batches an iteration has, or None."""
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
        """Raises DataError if an epoch is known not to divide into batches."""
        num_rows, num_batches = self._first.num_rows, self._num_batches
        if num_rows is None or num_batches is None:
            return
        size, remainder = self.cut.size, self.options.remainder
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
