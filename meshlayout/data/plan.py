"""What a dataset does, decided once from its options and the first rows of its source.

Everything that can be refused is refused here, before training starts: leaves that
cannot be placed, padded or divided, and on several processes options or rows that
differ between them. Each process sends its errors to the others, so that none of them
waits for a process that has already failed.
"""

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import jax
import numpy as np

from meshlayout import _checks, _jax
from meshlayout._annotations import Batch, PyTree
from meshlayout._render.tables import array_text
from meshlayout.data.agreement import Agreement, digests, sample_digests
from meshlayout.data.by_row import HostBatch, RowReader
from meshlayout.data.by_stream import Elements, StreamReader
from meshlayout.data.examples import (
    ExampleSpec,
    describe,
    is_placed,
    named_leaves,
    no_rows,
    row_array,
    rows_text,
)
from meshlayout.data.placement import Placement, find_weights, local_rows, padding_hint
from meshlayout.data.protocols import JSON, RandomAccessSource, Source
from meshlayout.data.report import Clock
from meshlayout.errors import DataError
from meshlayout.layout import Layout


Reader: TypeAlias = RowReader | StreamReader
Assemble: TypeAlias = Callable[[PyTree, jax.Array | None], Batch]


def checked_seed(shuffle: Any, where: str = "") -> int | None:
    """Returns `shuffle=` of a function: a seed, or None to keep the order of rows."""
    if isinstance(shuffle, (bool, np.bool_)):
        msg = (
            f"{where}{': ' * bool(where)}shuffle={bool(shuffle)} is no seed: give a "
            "seed, shuffle=0, which with the epoch determines the order of the rows; "
            "or shuffle=None, which keeps their order."
        )
        raise DataError(msg)
    context = _checks.Context(where=where, error=DataError)
    if shuffle is None:
        return None
    return _checks.count("shuffle", shuffle, at_least=0, **context)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The arguments of `distribute_dataset`, of the same names, checked."""

    global_batch_size: int
    remainder: str = "pad"
    weights: str | int | None = "weight"
    shuffle: int | None = None
    epochs: int | None = 1
    prefetch: int = 2
    per_process: bool = False
    strings: str = "error"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shuffle", checked_seed(self.shuffle))
        for name, at_least, can_be_none in (
            ("global_batch_size", 1, False),
            ("epochs", 1, True),
            ("prefetch", 0, False),
        ):
            value = getattr(self, name)
            if value is not None or not can_be_none:
                number = _checks.count(name, value, at_least=at_least, error=DataError)
                # NumPy's numbers become Python's: JSON, which processes exchange and
                # positions are saved as, takes no others.
                object.__setattr__(self, name, number)
        remainders = ("pad", "drop", "repeat")
        _checks.choice("remainder", self.remainder, remainders, error=DataError)
        _checks.choice("strings", self.strings, ("error", "host"), error=DataError)
        per_process = _checks.flag("per_process", self.per_process, error=DataError)
        object.__setattr__(self, "per_process", per_process)
        if isinstance(self.weights, np.integer):
            object.__setattr__(self, "weights", int(self.weights))
        if not isinstance(self.weights, (str, int, type(None))) or self.weights is True:
            msg = (
                "weights must be a key of the batch, an index into a tuple, or None, "
                f"got {_checks.shown(self.weights)}."
            )
            raise DataError(msg)
        if self.per_process and self.remainder == "repeat" and self.epochs is not None:
            msg = (
                "remainder='repeat' with per_process=True needs epochs=None: the "
                "processes may have different numbers of rows, and must take as many "
                "steps, as itertools.islice(iterator, steps) does."
            )
            raise DataError(msg)


@dataclass(frozen=True)
class _FirstRows:
    """A source and its first rows.

    A stream has `elements` that have looked at the first one, a batch of `block` rows
    or an example. Batches that are on the mesh already have no `spec`.
    """

    source: Any
    rows: PyTree
    spec: ExampleSpec | None
    num_rows: int | None
    elements: Elements | None = None
    block: int | None = None


class DataPlan:
    """What all iterations over a dataset share, decided from its first rows.

    Args:
        open_source: Returns the source; or elements whose first was looked at already.
        layout: The layout of batches.
        options: The user's options.
        clock: Takes times and notes for the report.
        agreement: With the other processes; None makes it.
        assemble: Makes a batch of the source's tree on the mesh and float32 weights,
            which are None if no process has padding in the batch. None for batches that
            carry weights in the tree, as `options.weights` says.
        close: Releases what the source holds, if it is not the user's to close.

    Attributes:
        size: How many rows of the source make a batch: of all processes, or with
            `per_process` of this one.
        own: Which of them are this process's own.
        padding_hint: What a user can do if batches cannot be padded.
        filler: The row that fills batches for which a process has no rows, leaf by
            leaf; None if there are no such batches.
        num_steps: Batches of one iteration, or None if that is not known.
        identity: What must match for a saved position to fit, by name.
    """

    def __init__(
        self,
        open_source: Callable[[], Source | Elements],
        layout: Layout,
        options: DataOptions,
        clock: Clock,
        *,
        agreement: Agreement | None = None,
        assemble: Assemble | None = None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.options, self.clock, self._close = options, clock, close
        self._assemble = assemble
        self.agreement = agreement = agreement or Agreement(layout.mesh)
        with agreement.failure_told():
            size, is_own = options.global_batch_size, options.per_process
            own = local_rows(layout, size, per_process=is_own)
            self._first = first = _look(open_source(), layout, options, clock)
            facts = self._facts() if agreement.has_others else ({}, {})
        self.is_stream = first.elements is not None
        # A source of this process alone holds nothing but its own rows: all are kept.
        self.size, self.own = (len(own), np.arange(len(own))) if is_own else (size, own)
        num_rows, remainder = first.num_rows, options.remainder
        num_batches: int | None = None  # of an epoch, unless epochs run together
        if num_rows is not None and remainder != "repeat":
            is_drop = remainder == "drop"
            num_batches = (
                num_rows // self.size if is_drop else -(-num_rows // self.size)
            )
        self._num_full: int | None = None  # batches without padding on any process
        if agreement.has_others:
            agreement.check_same(*facts)
            if is_own and num_batches is not None:
                # Processes with sources of their own must take as many steps.
                num_full = (num_rows or 0) // self.size
                num_batches, self._num_full = agreement.num_batches(
                    num_batches, num_full, remainder
                )
        self._num_batches = num_batches
        self._placement: Placement | None = None
        self.filler: list[np.ndarray] | None = None
        self.padding_hint = (
            "Batches that are on the mesh already are not padded: yield the same "
            "number on every process, or choose remainder='drop'."
        )
        with agreement.failure_told(made=True):
            if first.spec is not None:
                rows, spec, key = first.rows, first.spec, options.weights
                self.padding_hint = padding_hint(rows)
                if assemble is not None:
                    # Beside the source's own tree, so that any tree has a place.
                    treedef = jax.tree_util.treedef_tuple([spec.treedef])
                    rows, spec, key = (rows,), replace(spec, treedef=treedef), 1
                # Nothing but padding needs weights that the source does not have.
                spec, index = find_weights(rows, spec, key, add=remainder == "pad")
                self._placement = Placement(spec, index, layout, size, own)
                if is_own and self.has_weights and self.is_stream:
                    leaves = first.spec.checked(first.rows)
                    pairs = zip(first.spec.leaves, leaves, strict=True)
                    self.filler = [
                        leaf.converted(row[:1].copy()) for leaf, row in pairs
                    ]
            self._check_length()
        agreement.check_made()
        self.num_steps: int | None = None
        if num_rows is not None and options.epochs is not None:
            rows, batches = options.epochs * num_rows, num_batches
            together = -(-rows // self.size)  # if epochs run into each other
            self.num_steps = together if batches is None else options.epochs * batches
        # A position of global rows fits any number of processes; one in a source of
        # this process alone fits nowhere else.
        process = [jax.process_index(), jax.process_count()]
        self.identity: dict[str, JSON] = {
            "source": "stream" if self.is_stream else "rows",
            "num_rows": None if self.is_stream else num_rows,
            "global_batch_size": size,
            "remainder": remainder,
            "shuffle": options.shuffle,
            "process": process if is_own else None,
            "block": first.block,
        }
        # Has looked at the first element, which a generator yields only once.
        self._looked = [] if first.elements is None else [first.elements]

    @property
    def has_weights(self) -> bool:
        """Whether batches carry weights."""
        return self._placement is not None and self._placement.has_weights

    @property
    def element_spec(self) -> PyTree:
        """The abstract batch: a tree of shapes, dtypes and shardings."""
        if self._placement is not None:
            spec = self._placement.element_spec
            return spec if self._assemble is None else spec[0]
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            self._first.rows,
        )

    def check_padding(self, batch: HostBatch) -> None:
        """Raises DataError if a batch is padded and cannot carry weights.

        Of sources whose length is known, `_check_length` refuses this earlier.
        """
        is_padded = self._placement is not None and batch.count < self.size
        if is_padded and not self.has_weights:
            msg = (
                f"the last batch of an epoch has {rows_text(batch.count)}, and batches "
                f"have {self.size}. {self.padding_hint}"
            )
            raise DataError(msg)

    def placed(self, batch: HostBatch) -> Batch:
        """Returns a batch on the mesh, with its weights."""
        if self._placement is None:
            placed = batch.leaves[0]
            return placed if self._assemble is None else self._assemble(placed, None)
        is_padded = batch.count < self.size
        with self.clock.timed("place_s"):
            is_real = self.own < batch.count if is_padded else None
            placed = self._placement(batch.leaves, is_real)
            if self._assemble is None:
                return placed
            rows, *weights = placed
            is_late = self._num_full is not None and batch.after.batch > self._num_full
            is_padded = is_padded or batch.is_padded_elsewhere or is_late
            return self._assemble(rows, weights[0] if is_padded else None)

    def new_reader(self) -> Reader:
        """Returns a reader of the source for one iteration."""
        first, options, clock = self._first, self.options, self.clock
        if first.elements is not None:
            try:
                elements = self._looked.pop()  # of several threads, one gets it
            except IndexError:
                elements = Elements(first.source)
            return StreamReader(
                elements,
                first.spec,
                self.size,
                self.own,
                batched=first.block is not None,
                remainder=options.remainder,
                clock=clock,
            )
        assert first.spec is not None
        order = self._num_batches, options.shuffle
        return RowReader(first.source, first.spec, self.size, self.own, *order, clock)

    def close(self) -> None:
        """Releases what no iteration is using."""
        self._close()
        while self._looked:
            self._looked.pop().close()

    def _check_length(self) -> None:
        """Raises DataError if an epoch is known not to divide into batches.

        Whether padding is possible is checked here and not when the last batch comes,
        which may be hours later.
        """
        num_rows, num_batches, size = self._first.num_rows, self._num_batches, self.size
        if num_rows is None or num_batches is None:
            return
        if self.options.remainder == "drop":
            if num_rows < size:
                msg = (
                    f"the source has {num_rows} rows, fewer than a batch of {size}: "
                    "remainder='drop' drops all of them. Take a smaller "
                    "global_batch_size, or another remainder=."
                )
                raise DataError(msg)
            dropped = num_rows - num_batches * size
            if dropped:
                text = f"drops {dropped} of {num_rows} rows in every epoch."
                self.clock.warn(f"remainder='drop' {text}")
        elif self._placement is not None and not self.has_weights:
            if num_rows % size:
                what = f"leaves {num_rows % size}, to be padded"
            elif num_rows < num_batches * size:
                what = f"is padded up to the {num_batches} batches of other processes"
            else:
                return
            msg = f"a source of {num_rows} rows, in batches of {size}, {what}. "
            raise DataError(msg + self.padding_hint)

    def _facts(self) -> tuple[dict[str, JSON], dict[str, JSON]]:
        """Returns what must be the same on all processes, and digests of some rows."""
        first, facts = self._first, asdict(self.options)
        if first.spec is not None:
            facts["leaves"] = [
                f"{leaf.path} {array_text(leaf.dtype, leaf.shape)}"
                for leaf in first.spec.leaves
            ]
        if self.options.per_process:
            return facts, {}
        facts["number of rows"] = first.num_rows
        if first.spec is None:
            return facts, {}
        is_stream = first.elements is not None
        return facts, digests(first.rows) if is_stream else sample_digests(first.source)


def _look(
    source: Source | Elements, layout: Layout, options: DataOptions, clock: Clock
) -> _FirstRows:
    """Returns a source with its first rows, checked."""
    if isinstance(source, RandomAccessSource):
        if not len(source):
            raise DataError(no_rows(0))
        named, treedef = named_leaves(source.read_rows(np.zeros(1, np.int64), 0))
        rows = treedef.unflatten([row_array(path, leaf, 1) for path, leaf in named])
        spec = describe(rows, options.strings, clock.warn)
        return _FirstRows(source, rows, spec, len(source))
    elements = source if isinstance(source, Elements) else Elements(source)
    source = elements.source
    for name, is_wrong, way_out in (
        ("shuffle=", options.shuffle is not None, "Shuffle it where it is made"),
        ("strings='host'", options.strings != "error", "Make strings numbers there"),
    ):
        if is_wrong:
            msg = (
                f"{name} is for sources with random access, and this one is read in "
                f"order. {way_out}, and leave out {name}."
            )
            raise DataError(msg)
    num_parts = getattr(source, "num_parts", 1)
    if num_parts > 1 and not options.per_process:
        # Processes compare their rows only if there are several; one process that
        # reads a part of the data would do so without an error.
        clock.warn(
            f"The DataLoader's sampler gives each of {num_parts} processes its own "
            "part: say per_process=True."
        )
    with contextlib.ExitStack() as closing:
        closing.callback(elements.close)
        rows, block = elements.look()
        spec = None
        if is_placed(rows) and block is not None:
            _check_on_mesh(rows, block, layout, options.global_batch_size)
        else:
            spec = describe(rows, "error", clock.warn)
        closing.pop_all()
    # The numbers of rows that processes read in streams of their own may be wrong or
    # differ; they agree in every step instead.
    num_rows = None if options.per_process or spec is None else source.num_rows
    return _FirstRows(source, rows, spec, num_rows, elements, block)


def _check_on_mesh(batch: PyTree, rows: int, layout: Layout, size: int) -> None:
    """Raises DataError unless a batch of the source can pass through unchanged."""
    devices = set(layout.mesh.devices.flat)
    shardings = map(_jax.sharding_of, jax.tree.leaves(batch))
    if not all(s is not None and s.device_set == devices for s in shardings):
        msg = (
            f"the source yields arrays on devices other than those of {layout.mesh!r}. "
            "Place them on this mesh, or yield NumPy arrays."
        )
        raise DataError(msg)
    if rows != size:
        msg = (
            f"the source yields batches of {rows} rows that are on the mesh already, "
            f"and global_batch_size={size}. They pass through unchanged: give "
            f"global_batch_size={rows}."
        )
        raise DataError(msg)
