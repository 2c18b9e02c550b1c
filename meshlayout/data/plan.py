"""The plan of a dataset, decided once from its options and its source's first rows.

Everything that can be refused is refused here, before training starts: leaves that
cannot be placed, padded or divided, and options or rows that differ between processes.
Each process sends its errors to the others, so none waits for a process that has
already failed.
"""

import functools
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import jax
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import Batch, PyTree
from meshlayout._batches import num_row_shards
from meshlayout._render.tables import array_text
from meshlayout.data.adapters import arrays, grain, hugging_face, tensorflow, torch
from meshlayout.data.agreement import Agreement, checksums, sample_checksums
from meshlayout.data.by_row import HostBatch, RowReader
from meshlayout.data.by_stream import StreamPass, StreamReader
from meshlayout.data.examples import (
    Division,
    as_batch,
    describe,
    looks_batched,
    no_rows,
    rows_text,
)
from meshlayout.data.placement import (
    LayoutOrMesh,
    Placement,
    batch_layout,
    find_weights,
    input_pipeline,
    padding_hint,
    per_replica_batch_size,
    process_rows,
)
from meshlayout.data.protocols import JSON, RandomAccessSource, Source, StreamSource
from meshlayout.data.report import WEIGHTED, PipelineReport
from meshlayout.errors import DataError


Assemble: TypeAlias = Callable[[PyTree, jax.Array | None], Batch]
BatchSizeOf: TypeAlias = Callable[[int | None], int]


# By the top-level package of an object's class or of one of its bases.
_ADAPTERS: dict[str, Callable[..., Source | None]] = {
    "grain": grain.adapt,
    "tensorflow": tensorflow.adapt,
    "tensorflow_datasets": tensorflow.adapt,
    "torch": torch.adapt,
    "datasets": hugging_face.adapt,
}


def as_source(obj: object, *, batched: bool | None = None) -> Source:
    """Returns the user's object as a source; see `distribute_dataset` for `batched`."""
    batched = _checks.choice("batched", batched, (True, False, None), error=DataError)
    is_source = isinstance(obj, (RandomAccessSource, StreamSource))
    source: Any = obj if is_source else None
    packages = [kind.__module__.partition(".")[0] for kind in type(obj).__mro__]
    class_names = {kind.__name__ for kind in type(obj).__mro__}
    for package in dict.fromkeys(packages):
        if source is None and package in _ADAPTERS:
            source = _ADAPTERS[package](obj, class_names, batched=batched)
    source = arrays.adapt(obj, batched=batched) if source is None else source
    yields = getattr(source, "batched", False)  # one with random access has rows
    if batched not in (None, yields):
        what = {False: "single examples", True: "batches"}.get(yields, "what it says")
        kind = _checks.type_text(obj)
        raise DataError(f"{kind} yields {what}: leave out batched={batched}.")
    return source


def checked_seed(shuffle: object, where: str = "") -> int | None:
    """Returns `shuffle=` of a function: a seed, or None to keep the order of rows."""
    if isinstance(shuffle, (bool, np.bool_)):
        raise DataError(
            f"{where}{': ' * bool(where)}shuffle={bool(shuffle)} is not a seed. "
            "Write shuffle=0: the seed and the epoch determine the order of the rows; "
            "or shuffle=None to keep their order."
        )
    if shuffle is None:
        return None
    return _checks.count("shuffle", shuffle, at_least=0, where=where, error=DataError)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The checked arguments of `distribute_dataset`, with the same names."""

    global_batch_size: int | None = None  # which may be inferred from the source
    remainder: str = "pad"
    weights: str | int | None = "weight"
    shuffle: int | None = None
    epochs: int | None = 1
    prefetch: int = 2
    per_process: bool = False
    strings: str = "error"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "DataOptions":
        """Returns a user's options; raises DataError for a misspelled one."""
        for name in options:
            known = tuple(cls.__dataclass_fields__)
            _checks.choice("an option of a dataset", name, known, error=DataError)
        return cls(**options)

    def __post_init__(self) -> None:
        # NumPy's integers become Python's: JSON, which positions are saved as, takes no
        # others.
        at_least = {"global_batch_size": 1, "epochs": 1, "prefetch": 0}
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None or name == "prefetch":
                value = _checks.count(name, value, at_least=least, error=DataError)
                object.__setattr__(self, name, value)
        object.__setattr__(self, "shuffle", checked_seed(self.shuffle))
        if not isinstance(self.weights, (str, int, type(None))):
            kinds = "a key of the batch, an index into a tuple, or None"
            shown = _checks.shown(self.weights)
            raise DataError(f"weights must be {kinds}, got {shown}.")
        flags = (True, False)
        _checks.choice("per_process", self.per_process, flags, error=DataError)
        _checks.choice("strings", self.strings, ("error", "host"), error=DataError)
        remainders = ("pad", "drop", "repeat")
        _checks.choice("remainder", self.remainder, remainders, error=DataError)
        if self.per_process and self.remainder == "repeat" and self.epochs is not None:
            msg = "remainder='repeat' with per_process=True needs epochs=None: the "
            msg += "processes may have different numbers of rows, and must take as many"
            raise DataError(f"{msg} steps, as itertools.islice(iterator, steps) does.")


class DataPlan:
    """What all iterations over a dataset share, decided from its first rows.

    `open_source` returns the user's object, which `close` releases. `batch_size_of`
    infers a missing size from the rows of the first batch (None of examples), and
    `assemble` makes batches of the source's tree and of weights, None where no process
    has padding.
    A batch has `size` rows of the source, of which this process keeps its `own`, and a
    saved position fits datasets of the same `identity`.
    """

    def __init__(
        self,
        open_source: Callable[[], Any],
        layout_or_mesh: LayoutOrMesh,
        options: Mapping[str, Any],
        *,
        batched: bool | None = None,
        batch_size_of: BatchSizeOf | None = None,
        assemble: Assemble | None = None,
        clock: PipelineReport | None = None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.clock, self.close = clock or PipelineReport(), close
        self._assemble = assemble
        layout = batch_layout(layout_or_mesh, self.clock.warn)
        agreement = Agreement(layout.mesh) if jax.process_count() > 1 else None
        self.agreement = agreement
        with agreement.channel.failure_told() if agreement else nullcontext():
            self.options = DataOptions.of(options)
            infers_size = batch_size_of and self.options.global_batch_size is None
            data = open_source()
            if infers_size and batched is None and isinstance(data, list) and data:
                batched = looks_batched(data[0])
            self._source: Any = as_source(data, batched=batched)
            rows, block = self._look(prefers_batches=bool(infers_size))
            if batch_size_of and infers_size:
                inferred = batch_size_of(block)
                self.options = replace(self.options, global_batch_size=inferred)
            size: Any = self.options.global_batch_size
            per_replica_batch_size(size, layout)  # which must divide
            self.size, self.own = size, process_rows(layout, size)
            own, per_process = self.own, self.options.per_process
            if per_process:
                input_pipeline(layout)  # which may not be possible
                # A source of this process alone has nothing but its own rows.
                self.size, self.own = len(own), np.arange(len(own))
            key = self.options.weights
            self._spec = spec = describe(rows, self.options.strings, key)
            leaves = zip(spec.leaves, jax.tree.leaves(rows), strict=True)
            self.filler = [leaf.converted(row[:1].copy()) for leaf, row in leaves]
            facts = self._facts(rows) if agreement and agreement.has_others else {}
            self.padding_hint = padding_hint(rows)
            if assemble is not None:
                # Beside the source's own tree, so that any tree has a place.
                treedef = jax.tree_util.treedef_tuple([spec.treedef])
                rows, spec, key = (rows,), replace(spec, treedef=treedef), 1
            # Nothing but padding needs weights that the source does not have.
            is_padded = self.options.remainder == "pad"
            found, index = find_weights(rows, spec, key, add=is_padded)
            if found is spec and index is not None and key == "weight":  # by default
                self.clock.note(WEIGHTED)
            self._all_replicas = num_row_shards(layout)
            self._full = size // self._all_replicas  # the rows of a replica
            self.num_replicas = self.size // self._full
            place = functools.partial(Placement, found, index, layout)
            self._placement = functools.lru_cache(4)(place)
        self.has_weights = index is not None
        batch_spec = self._placement(size).element_spec
        self.element_spec = batch_spec if assemble is None else batch_spec[0]
        length = self._num_rows, self.size
        lengths = agreement.exchange(facts, length) if agreement else {0: length}
        self._set_lengths([*lengths.values()])
        # A position of global rows fits any number of processes; one in a source of
        # this process alone fits nowhere else.
        process = [jax.process_index(), jax.process_count()]
        self.identity: dict[str, JSON] = {
            "source": "stream" if self.is_stream else "rows",
            "num_rows": None if self.is_stream else self._num_rows,
            "global_batch_size": size,
            "remainder": self.options.remainder,
            "shuffle": self.options.shuffle,
            "process": process if per_process else None,
            "block": block,
        }

    def _look(self, *, prefers_batches: bool) -> tuple[PyTree, int | None]:
        """Returns the first rows, and how many make the first batch of a stream."""
        source = self._source
        self.is_stream = not isinstance(source, RandomAccessSource)
        # A stream's first pass, whose first element a generator yields only once.
        self._first: StreamPass | None = None
        if not self.is_stream:
            self._num_rows: int | None = len(source)
            if not self._num_rows:
                raise DataError(no_rows(0))
            return as_batch(source.read_rows(np.zeros(1, np.int64), 0))[0], None
        if self.options.shuffle is not None or self.options.strings == "host":
            raise DataError(
                "shuffle= and strings='host' are for sources with random access, and "
                "this one is read in order: shuffle it, and make numbers of strings, "
                "where it is made."
            )
        # The numbers of rows that processes read in streams of their own may differ;
        # they agree in every step instead.
        self._num_rows = None if self.options.per_process else source.num_rows
        self._first = StreamPass(source, 0)
        how = {"batched": source.batched, "prefers_batches": prefers_batches}
        return self._first.look(**how)

    def _facts(self, rows: PyTree) -> dict[str, JSON]:
        """Returns the facts on which all processes must agree."""
        facts = asdict(self.options)
        facts["the list of leaves"] = [
            f"{leaf.path} {array_text(leaf.dtype, leaf.shape)}"
            for leaf in self._spec.leaves
        ]
        if self.options.per_process:
            return facts
        sums = checksums(rows) if self.is_stream else sample_checksums(self._source)
        return {**facts, "the number of rows": self._num_rows, **sums}

    def _set_lengths(self, lengths: list[tuple[int | None, int]]) -> None:
        """Counts batches, given the rows and the rows per batch of each process.

        What does not fit at the end of an epoch, hours later, is refused now.
        """
        remainder, epochs = self.options.remainder, self.options.epochs
        # Batches of an epoch, if known and unless epochs run together.
        self._lengths, self._num_batches = lengths, None
        self.num_steps: int | None = None
        counts = [(num_rows, size) for num_rows, size in lengths if num_rows]
        if len(counts) < len(lengths):
            return
        if remainder == "repeat":
            rows = (epochs or 0) * counts[0][0]
            self.num_steps = -(-rows // self.size) or None
            return
        num_batches = min(rows // size for rows, size in counts)
        if remainder == "pad":
            num_batches = max(-(-rows // size) for rows, size in counts)
        self._num_batches = num_batches
        self.num_steps = (epochs or 0) * num_batches or None
        if not num_batches:
            raise DataError(no_rows(0, min(rows for rows, _ in counts)))
        for rows, size in counts:
            if rows < num_batches * size:
                self.check_padding(rows % size, size)
        left = (self._num_rows or 0) - num_batches * self.size
        if left > 0:
            dropped = f"drops {left} of {self._num_rows} rows in every epoch."
            self.clock.warn(f"remainder='drop' {dropped}")

    def check_padding(self, count: int, size: int) -> None:
        """Raises DataError if a batch of fewer rows cannot carry weights."""
        if count < size and not self.has_weights:
            msg = f"the last batch of an epoch has {rows_text(count)}, and batches"
            raise DataError(f"{msg} have {size}. {self.padding_hint}")

    def _num_even(self, *parts: Any) -> int | None:
        """Returns the rows of a batch, given those of a replica, if these are equal."""
        # Only strategies take batches that are shorter than others.
        is_even = self._assemble is not None and len(parts) == 1 and parts[0] % 1 == 0
        return int(parts[0]) * self._all_replicas or None if is_even else None

    def _rows(self, count: int) -> np.ndarray:
        num_even = self._num_even(count / self._all_replicas)
        if num_even is None or self.options.per_process:
            return np.minimum(self.own, count - 1)
        return self._placement(num_even).own

    def _parts(self, batch: HostBatch) -> frozenset[Any]:
        """Returns the rows of a replica on all processes; None at a source's end."""
        known = self._num_batches is not None and self.agreement is not None
        if not (known and self.options.per_process):
            return batch.parts or frozenset([batch.count / self.num_replicas])
        before = batch.after.batch - 1
        return frozenset(
            min(max((rows or 0) - before * size, 0), size) / (size // self._full)
            for rows, size in self._lengths
        )

    def placed(self, batch: HostBatch) -> Batch:
        """Returns a batch on the mesh, with its weights."""
        start_s, parts = time.perf_counter(), self._parts(batch)
        num_even = self._num_even(*parts)
        is_padded = batch.count < self.size and num_even is None
        is_real = self.own < batch.count if is_padded else None
        leaves = [x if num_even is None else x[: batch.count] for x in batch.leaves]
        placement = self._placement(num_even or self.options.global_batch_size)
        placed = placement(leaves, is_real)
        self.clock.place_s += time.perf_counter() - start_s
        if self._assemble is None:
            return placed
        rows, *weights = placed
        has_mask = num_even is None and parts != frozenset([self._full])
        return self._assemble(rows, weights[0] if has_mask else None)

    def new_reader(self) -> RowReader | StreamReader:
        """Returns a reader of the source for one iteration."""
        rows = self._source, self._spec, self.size, self._rows
        cut = Division(*rows, self.options.remainder, self.clock)
        if not self.is_stream:
            return RowReader(cut, self._num_batches, self.options.shuffle)
        first, self._first = self._first, None
        return StreamReader(cut, first, batched=self.identity["block"] is not None)
