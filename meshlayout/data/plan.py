"""What a dataset does, decided once from its options and the first rows of its source.

Everything that can be refused is refused here, before training starts: leaves that
cannot be placed, padded or divided, and on several processes options or rows that
differ between them. Each process sends its errors to the others, so that none of them
waits for a process that has already failed.
"""

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


Assemble: TypeAlias = Callable[[PyTree, jax.Array | None], Batch]


def checked_seed(shuffle: object, where: str = "") -> int | None:
    """Returns `shuffle=` of a function: a seed, or None to keep the order of rows."""
    if isinstance(shuffle, (bool, np.bool_)):
        raise DataError(
            f"{where}{': ' * bool(where)}shuffle={bool(shuffle)} is no seed: give a "
            "seed, shuffle=0, which with the epoch determines the order of the rows; "
            "or shuffle=None, which keeps their order."
        )
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
        context = _checks.Context(error=DataError)
        size, epochs, weights = self.global_batch_size, self.epochs, self.weights
        if epochs is not None:
            epochs = _checks.count("epochs", epochs, **context)
        if isinstance(weights, np.integer):
            weights = int(weights)
        if not isinstance(weights, (str, int, type(None))) or weights is True:
            raise DataError(
                "weights must be a key of the batch, an index into a tuple, or None, "
                f"got {_checks.shown(weights)}."
            )
        # NumPy's numbers become Python's: JSON, which processes exchange and positions
        # are saved as, takes no others.
        for name, value in (
            ("shuffle", checked_seed(self.shuffle)),
            ("global_batch_size", _checks.count("global_batch_size", size, **context)),
            ("epochs", epochs),
            (
                "prefetch",
                _checks.count("prefetch", self.prefetch, at_least=0, **context),
            ),
            ("per_process", _checks.flag("per_process", self.per_process, **context)),
            ("weights", weights),
        ):
            object.__setattr__(self, name, value)
        remainders = ("pad", "drop", "repeat")
        _checks.choice("remainder", self.remainder, remainders, **context)
        _checks.choice("strings", self.strings, ("error", "host"), **context)
        if self.per_process and self.remainder == "repeat" and epochs is not None:
            raise DataError(
                "remainder='repeat' with per_process=True needs epochs=None: the "
                "processes may have different numbers of rows, and must take as many "
                "steps, as itertools.islice(iterator, steps) does."
            )


class DataPlan:
    """What all iterations over a dataset share, decided from its first rows.

    `open_source` returns the source, or elements whose first was looked at already.
    `assemble` makes a batch of the source's tree on the mesh and float32 weights, which
    are None if no process has padding in the batch; without it, batches carry weights
    in the tree, as `options.weights` says. `close` releases what the source holds.

    Attributes:
        size: How many rows of the source make a batch: of all processes, or with
            `per_process` of this one.
        own: Which of them are this process's own.
        padding_hint: What a user can do if batches cannot be padded.
        filler: The first row of a stream, leaf by leaf.
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
        size, remainder = options.global_batch_size, options.remainder
        is_own, epochs = options.per_process, options.epochs
        with agreement.failure_told():
            own = local_rows(layout, size, per_process=is_own)
            self._look(open_source(), layout)
            facts = self._facts() if agreement.has_others else ({}, {})
        spec, rows, num_rows = self._spec, self._rows, self._num_rows
        # A source of this process alone holds nothing but its own rows: all are kept.
        self.size, self.own = (len(own), np.arange(len(own))) if is_own else (size, own)
        # Batches of an epoch, if known and unless epochs run together; and those that
        # have no padding on any process.
        self._num_batches: int | None = None
        self._num_full: int | None = None
        if num_rows is not None and remainder != "repeat":
            self._num_full, rest = divmod(num_rows, self.size)
            self._num_batches = self._num_full + (rest > 0 and remainder == "pad")
        if agreement.has_others:
            agreement.check_same(*facts)
            if is_own and self._num_batches is not None:
                # Processes with sources of their own must take as many steps.
                counts = self._num_batches, self._num_full or 0
                self._num_batches, self._num_full = agreement.counts(counts, remainder)
        self._placement: Placement | None = None
        self.filler: list[np.ndarray] = []
        self.padding_hint = (
            "Batches that are on the mesh already are not padded: yield the same "
            "number on every process, or choose remainder='drop'."
        )
        with agreement.failure_told(made=True):
            if spec is not None:
                self.padding_hint, key = padding_hint(rows), options.weights
                for leaf, row in zip(spec.leaves, jax.tree.leaves(rows), strict=True):
                    self.filler.append(leaf.converted(row[:1].copy()))
                if assemble is not None:
                    # Beside the source's own tree, so that any tree has a place.
                    treedef = jax.tree_util.treedef_tuple([spec.treedef])
                    rows, spec, key = (rows,), replace(spec, treedef=treedef), 1
                # Nothing but padding needs weights that the source does not have.
                spec, index = find_weights(rows, spec, key, add=remainder == "pad")
                self._placement = Placement(spec, index, layout, size, own)
            self._check_length()
        agreement.check_made()
        self.num_steps: int | None = None
        if num_rows is not None and epochs is not None:
            per_epoch, together = self._num_batches, -(-epochs * num_rows // self.size)
            self.num_steps = together if per_epoch is None else epochs * per_epoch
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
            "block": self._block,
        }

    def _look(self, source: Source | Elements, layout: Layout) -> None:
        """Looks at the first rows of a source, and checks them."""
        options, warn = self.options, self.clock.warn
        self.is_stream = not isinstance(source, RandomAccessSource)
        self._block: int | None = None  # the rows of a stream's first batch
        # A stream's elements, of which a generator yields the first only once.
        self._looked: list[Elements] = []
        self._spec: ExampleSpec | None = None  # None for batches on the mesh already
        if isinstance(source, RandomAccessSource):
            if not len(source):
                raise DataError(no_rows(0))
            named, treedef = named_leaves(source.read_rows(np.zeros(1, np.int64), 0))
            leaves = [row_array(path, leaf, 1) for path, leaf in named]
            self._source, self._rows = source, treedef.unflatten(leaves)
            self._spec = describe(self._rows, options.strings, warn)
            self._num_rows: int | None = len(source)
            return
        elements = source if isinstance(source, Elements) else Elements(source)
        self._source: Any = elements.source
        for name, is_wrong, way_out in (
            ("shuffle=", options.shuffle is not None, "Shuffle it where it is made"),
            (
                "strings='host'",
                options.strings != "error",
                "Make strings numbers there",
            ),
        ):
            if is_wrong:
                raise DataError(
                    f"{name} is for sources with random access, and this one is read "
                    f"in order. {way_out}, and leave out {name}."
                )
        parts = getattr(self._source, "num_parts", 1)
        if parts > 1 and not options.per_process:
            # Processes compare their rows only if there are several; one process that
            # reads a part of the data would do so without an error.
            warn(
                f"The DataLoader's sampler gives each of {parts} processes its own "
                "part: say per_process=True."
            )
        try:
            self._rows, self._block = elements.look()
            if self._block is None or not is_placed(self._rows):
                self._spec = describe(self._rows, "error", warn)
            else:
                _check_on_mesh(self._rows, self._block, layout, options)
        except BaseException:
            elements.close()
            raise
        self._looked.append(elements)
        # The numbers of rows that processes read in streams of their own may be wrong
        # or differ; they agree in every step instead.
        is_known = not options.per_process and self._spec is not None
        self._num_rows = self._source.num_rows if is_known else None

    def _facts(self) -> tuple[dict[str, JSON], dict[str, JSON]]:
        """Returns what must be the same on all processes, and digests of some rows."""
        facts, spec = asdict(self.options), self._spec
        if spec is not None:
            facts["leaves"] = [
                f"{leaf.path} {array_text(leaf.dtype, leaf.shape)}"
                for leaf in spec.leaves
            ]
        if self.options.per_process:
            return facts, {}
        facts["number of rows"] = self._num_rows
        if spec is None or self.is_stream:
            return facts, {} if spec is None else digests(self._rows)
        return facts, sample_digests(self._source)

    def _check_length(self) -> None:
        """Refuses now what is known not to fit at the end of an epoch, hours later."""
        num_rows, num_batches, size = self._num_rows, self._num_batches, self.size
        if num_rows is None or num_batches is None:
            return
        left = num_rows - num_batches * size
        if self.options.remainder == "drop" and num_rows < size:
            raise DataError(
                f"the source has {num_rows} rows, fewer than a batch of {size}: "
                "remainder='drop' drops all of them. Take a smaller global_batch_size, "
                "or another remainder=."
            )
        if left > 0:
            dropped = f"drops {left} of {num_rows} rows in every epoch."
            self.clock.warn(f"remainder='drop' {dropped}")
        elif left < 0 and self._placement is not None and not self.has_weights:
            raise DataError(
                f"the source has {num_rows} rows, to be padded to {num_batches} batches"
                f" of {size}. {self.padding_hint}"
            )

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
            self._rows,
        )

    def check_padding(self, batch: HostBatch) -> None:
        """Raises DataError if a batch is padded and cannot carry weights."""
        is_padded = self._placement is not None and batch.count < self.size
        if is_padded and not self.has_weights:
            raise DataError(
                f"the last batch of an epoch has {rows_text(batch.count)}, and batches "
                f"have {self.size}. {self.padding_hint}"
            )

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

    def new_reader(self) -> RowReader | StreamReader:
        """Returns a reader of the source for one iteration."""
        spec, cut, clock = self._spec, (self.size, self.own), self.clock
        if self.is_stream:
            try:
                elements = self._looked.pop()  # of several threads, one gets it
            except IndexError:
                elements = Elements(self._source)
            how = {"batched": self._block is not None}
            remainder = self.options.remainder
            return StreamReader(
                elements, spec, *cut, **how, remainder=remainder, clock=clock
            )
        assert spec is not None
        order = self._num_batches, self.options.shuffle
        return RowReader(self._source, spec, *cut, *order, clock)

    def close(self) -> None:
        """Releases what no iteration is using."""
        self._close()
        while self._looked:
            self._looked.pop().close()


def _check_on_mesh(
    batch: PyTree, rows: int, layout: Layout, options: DataOptions
) -> None:
    """Raises DataError unless a batch of the source can pass through unchanged."""
    devices = set(layout.mesh.devices.flat)
    shardings = map(_jax.sharding_of, jax.tree.leaves(batch))
    if not all(s is not None and s.device_set == devices for s in shardings):
        raise DataError(
            f"the source yields arrays on devices other than those of {layout.mesh!r}. "
            "Place them on this mesh, or yield NumPy arrays."
        )
    if rows != options.global_batch_size:
        raise DataError(
            f"the source yields batches of {rows} rows that are on the mesh already, "
            f"and global_batch_size={options.global_batch_size}. They pass through "
            f"unchanged: give global_batch_size={rows}."
        )
