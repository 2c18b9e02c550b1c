"""The data of a loop: epochs, and the batches of each call of a step, on the mesh.

A short batch that cannot be padded, as `Trainer` says, takes a second program; if its
rows do not divide, every device computes the whole batch.

Examples go through `distribute_dataset`'s pipeline. Batches do not, as it would rebatch
them; they are not read ahead, so the data's position is that of the state.
"""

import contextlib
import functools
import itertools
import logging
import operator
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from meshlayout import _batches, _checks, _jax
from meshlayout._annotations import Batch, PyTree
from meshlayout._batches import WeightsKey, get_weights, map_batch, num_examples
from meshlayout.arrays import relayout, to_numpy
from meshlayout.arrays.placement import plain_array
from meshlayout.checkpoint.positions import Continues, move_to_position
from meshlayout.data import DataIterator, DistributedDataset, RandomAccessSource
from meshlayout.data.adapters.arrays import Rows, array_rows, is_columns
from meshlayout.data.adapters.iterables import NumberedItems
from meshlayout.data.agreement import Agreement
from meshlayout.data.examples import looks_batched, named_leaves
from meshlayout.data.plan import DataPlan, as_source
from meshlayout.data.report import WEIGHTED
from meshlayout.errors import CheckpointError, MeshLayoutError
from meshlayout.layout import Layout
from meshlayout.step.objective import check_batch


if TYPE_CHECKING:
    from meshlayout.trainer.trainer import Trainer


_log = logging.getLogger("meshlayout")

Data: TypeAlias = Iterable[Any] | Callable[[], Iterable[Any]]
"""An iterable of batches, a function that returns one, or an iterator."""


@dataclass(frozen=True)
class TrainingPosition:
    """How far training is, as known on the host without asking the device."""

    epoch: int = 0  # the current one, from 1
    last_epoch: int = 0  # of this `fit`
    step: int = 0  # steps of the state so far, also before this `fit`
    step_in_fit: int = 0
    step_in_epoch: int = 0
    steps_per_epoch: int | None = None  # None if not known
    examples_in_epoch: int = 0
    is_resumed: bool = False  # from a checkpoint


@dataclass(frozen=True)
class PlacedBatch:
    """A batch that is ready for a step, with what is known about it."""

    batch: Batch
    num_examples: int  # without padding that was added here


class TrainerInput:
    """Data cut into epochs, and the epochs into the batches of each call of a step.

    An epoch is a pass, or `steps_per_epoch` batches. A dataset's passes are its epochs
    in `fit`, of arrays those after the trainer's last, and else its first one again.
    `where` is the method that reads it; all but `predict` mark padding by weights.
    """

    def __init__(
        self,
        trainer: "Trainer",
        where: str,
        name: str,
        data: Data | PyTree,
        batch_size: int | None = None,
        shuffle: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        self._trainer, self._opening, self._name = trainer, where, name
        self._warn = trainer._report.warn
        self._trains, self._marks = where == "fit", where != "predict"
        self._accepts = functools.partial(trainer._accepts, train=self._trains)
        self._steps, self._key = steps_per_epoch, trainer._steps.weights
        arrays = [x for x in jax.tree.leaves(trainer.state) if _jax.sharding_of(x)]
        # Those on a mesh first; without any, the device that JAX would choose.
        arrays.sort(key=lambda x: not isinstance(x.sharding, NamedSharding))
        mesh = Layout.of([*arrays, jnp.zeros(())][0]).mesh
        self._layout = _batches.batch_layout(mesh)
        checked_columns(where, data, trainer._columns)
        if not self._marks:
            data = _as_trained(data, trainer._steps._structure, self._key)
        is_rows, is_text = has_rows(data, batch_size), isinstance(data, (str, bytes))
        is_iterable = isinstance(data, Iterable) or callable(data)
        if is_text or not (is_rows or is_iterable or _is_indexed(data)):
            msg = f"{name} must be arrays, an iterable of batches, or a function that"
            raise MeshLayoutError(f"{msg} returns one, got {_checks.shown(data)}.")
        if batch_size is not None or is_rows:
            rows = rows_of(where, name, data, batch_size)
            weights = get_weights(data, self._key)
            if weights is not None:  # negative ones are refused
                check_batch({self._key: np.asarray(weights)}, self._key)
            shards = 1 if self._trains else _batches.num_row_shards(self._layout)
            size = -(-(batch_size or 0) // shards) * shards  # rounded up, and padded
            data = self._dataset(rows, size, shuffle)
            data._next = data._next._replace(epoch=len(trainer.history.epochs))
        elif not is_iterable:  # `iter` might never end
            data = functools.partial(NumberedItems, data, operator.length_hint(data))
        elif isinstance(data, DistributedDataset) and data._plan._assemble:
            msg = f"{where}: a strategy's batches are for its run. Give arrays, or"
            raise MeshLayoutError(f"{msg} ml.distribute_dataset(source, mesh, ...).")
        self._data, self._has_batches = data, False
        # Batches in an epoch; None if not known beforehand.
        self.num_steps = steps_per_epoch or operator.length_hint(data, 0) or None
        self._pass: Iterator[Any] = iter(())
        self._num_given = 0  # batches of this pass
        self._number = 0  # batches of the epoch
        self.size = 0  # rows of the first batch
        self.where = where  # the last batch, for errors
        self.is_over = False  # whether the data ended in, or before, the last epoch
        # Processes take a step together or not at all, as those datasets see to.
        is_agreed = isinstance(data, (DistributedDataset, DataIterator))
        self._agreement = None if is_agreed else Agreement(mesh)

    def groups(self, size: int = 1, *, text: str = "") -> Iterator[list[PlacedBatch]]:
        """Yields the batches for each call of a step; fewer at the end of the epoch."""
        group: list[PlacedBatch] = []
        for batch in self._epoch(text):
            name = f"batch {self._number}"
            self.where = f"in {self._opening}: {name}{text}"
            with _batches.noted_batch(self.where, batch):
                placed = self._placed(batch)
            if placed is None:
                what = f"{name} of {self._name}"
                _log.warning("%s has no rows, or only rows of weight 0: left out", what)
                continue
            group.append(placed)
            if len(group) == size:
                yield group
                group = []
        if group:
            yield group

    def _epoch(self, text: str) -> Iterator[Batch | PlacedBatch]:
        if self._steps is None and not self._number:
            self._begin()
        turns = None if self._agreement is None else self._agreement.new_turns()
        with turns or contextlib.nullcontext():
            while self._steps is None or self._number < self._steps:
                batch = next(self._pass, None)
                if batch is None and self._steps is not None:
                    batch = next(self._begin(), None)
                if turns is not None:
                    rows = 0 if batch is None else num_examples(batch)
                    turns.take(None, f"{rows} rows in batch {self._number + 1}{text}")
                if batch is None:
                    break
                self._number, self._num_given = self._number + 1, self._num_given + 1
                self._has_batches = True
                yield batch
        if not self._has_batches:
            msg = f"{self._name} yielded no batch. Perhaps it is a used-up iterator."
            raise MeshLayoutError(msg)
        self.is_over, self._number = self._number < (self._steps or 1), 0

    def _begin(self) -> Iterator[Any]:
        """Begins a pass; an iterator continues its only one."""
        data: Any = self._data
        if isinstance(data, DistributedDataset) and not self._trains:
            data = data.iterator(epoch=0)
        if not isinstance(self._data, Iterator):
            self._num_given = 0
        self._pass = iter(data if isinstance(data, Iterable) else data())
        return self._pass

    def _placed(self, batch: Batch | PlacedBatch) -> PlacedBatch | None:
        """Returns a batch on the mesh; None if it holds no examples."""
        if isinstance(batch, PlacedBatch):  # of arrays
            rows, size = batch.num_examples, num_examples(batch.batch)
            self.size = self.size or size
            if rows == size or not self._marks:
                return batch
            batch = map_batch(lambda x: x[:rows], to_numpy(batch.batch))
        leaves = jax.tree.leaves(batch)
        if any(isinstance(x, jax.Array) and _jax.is_committed(x) for x in leaves):
            _batches.check_weights_key(batch, self._key)
            return PlacedBatch(batch, num_examples(batch))
        check_batch(batch, self._key)
        if self._number == 1:
            self._tell_of_weights(batch)
        weights, rows = _batches.weights_of(batch, self._key), num_examples(batch)
        if weights is not None and self._marks:
            if self._key == "weight":  # by default
                self._trainer._report.note(WEIGHTED)
            # Momentum and weight decay would still move the parameters.
            rows = rows if np.any(weights) else 0
        if not rows:
            return None
        can_mark = weights is not None or _batches.takes_weights(batch, self._key)
        may_pad = self._trainer._pads is not False and (can_mark or not self._marks)
        placed = self._padded(batch, rows) if may_pad else self._on_mesh(batch)
        if may_pad and self._marks and not self._accepts(placed):
            placed = self._on_mesh(batch)
        self.size = self.size or num_examples(placed)
        return PlacedBatch(placed, rows)

    def _padded(self, batch: Batch, rows: int) -> Batch:
        # A larger one does not raise the size, as a resumed run may not see that one.
        shards = _batches.num_row_shards(self._layout)
        size = max(self.size, -(-rows // shards) * shards)
        padded = map_batch(lambda x: _batches.pad_rows(x, size), batch)
        if self._marks:
            known = get_weights(padded, self._key)
            weights = np.ones(size, "f4") if known is None else np.asarray(known)
            weights = _batches.mask_padding(weights, np.arange(size) < rows)
            padded = _batches.with_weights(padded, self._key, weights)
        return self._on_mesh(padded)

    def _on_mesh(self, batch: Batch) -> Batch:
        layout, mesh, rows = self._layout, self._layout.mesh, num_examples(batch)
        is_tuple = isinstance(batch, (tuple, list))  # without names
        if rows % (num_shards := _batches.num_row_shards(layout)):
            # Replicated: JAX does not shard rows unevenly, and the numbers stay right.
            way = "return one loss per example"
            if is_tuple:
                way = "write x, y, *_ = batch, and give Trainer weights=2; or use dicts"
            self._warn(
                f"a batch of {rows} rows does not divide into {num_shards} shards: "
                f"every device computes all of it. To have it padded, {way}."
            )
            layout = mesh.layout(...)
            for step in self._trainer._steps.of_loss:
                step.warns_of_rows = False
        # A scalar, such as a temperature for the loss, has no rows to shard.
        layouts = jax.tree.map(lambda x: layout if np.ndim(x) else mesh.layout(), batch)
        return relayout(batch, layouts)

    def _dataset(
        self, rows: RandomAccessSource, size: int, shuffle: int | None
    ) -> DistributedDataset:
        """Returns batches with weights, or `PlacedBatch`es that know their padding."""
        layout, key = self._layout, self._key
        options: dict[str, Any] = {"global_batch_size": size, "shuffle": shuffle}
        first = np.arange(min(1, len(rows)))  # none of no rows, which are refused below
        example, last = rows.read_rows(first, 0), len(rows) % size
        self._tell_of_weights(example)
        is_weighted = _batches.weights_of(example, key) is not None
        is_padded = last and _batches.takes_weights(example, key)
        if self._marks and (is_weighted or is_padded):
            options["weights"] = key
            plan = DataPlan(lambda: rows, layout, options, clock=self._trainer._report)
            where = f"in {self._opening}: batch 1{' of epoch 1' * self._trains}"
            with _batches.noted_batch(where, plan.element_spec):
                if self._accepts(plan.element_spec):
                    return DistributedDataset(plan)

        def assemble(tree: PyTree, mask: jax.Array | None) -> PlacedBatch:
            return PlacedBatch(tree, num_examples(tree) if mask is None else last)

        options["weights"] = None
        plan = DataPlan(lambda: rows, layout, options, assemble=assemble)
        return DistributedDataset(plan)

    def _tell_of_weights(self, batch: Batch) -> None:
        """Says once that an entry that looks like weights is not used as weights."""
        # What other libraries call them, and where Keras has them in a tuple.
        names: list[WeightsKey] = ["weights", "sample_weight", "sample_weights"]
        names += [2] * isinstance(batch, (tuple, list))
        for name in names * (get_weights(batch, self._key) is None):
            entry = get_weights(batch, name)
            kind = getattr(entry, "dtype", np.dtype(int)).kind
            if np.ndim(entry) == 1 and kind == "f":
                text = f"the data's entry {name!r} does not weight the examples. If it"
                self._warn(f"{text} is to, give Trainer weights={name!r}.")

    def place(self) -> tuple[dict[str, int], Continues | None]:
        """Returns the place in the epoch, and the iterator, if it has a position."""
        iterator = self._pass if isinstance(self._pass, Continues) else None
        return {"given": self._num_given, "number": self._number}, iterator

    def resume(
        self, place: Mapping[str, int], positions: Sequence[Any] | None, *, is_end: bool
    ) -> None:
        """Moves to a place; data without saved positions is read up to it."""
        self._has_batches = True
        self._number = 0 if is_end else place["number"]
        batches = self._begin()
        if positions is not None and isinstance(batches, Continues):
            move_to_position(batches, positions)
        elif not is_end or self._steps is not None or isinstance(self._data, Iterator):
            count = place["given"] - self._num_given
            _log.info("the data has no position: dropping its first %d batches", count)
            if sum(1 for _ in itertools.islice(batches, count)) < count:
                msg = f"{self._name} has fewer than the {place['given']} batches that"
                raise CheckpointError(f"{msg} the checkpointed run had read of it.")
        self._num_given = place["given"]


def checked_columns(
    where: str, data: PyTree, trained: Mapping[str, list[Any]]
) -> dict[str, list[Any]]:
    """Returns the columns of the data frames in a tree, by path.

    They must be those of `trained`, in order, as the model knows them by position.
    """
    is_tree = isinstance(data, (tuple, Mapping))
    leaves = named_leaves(data)[0] if is_tree else [("", data)]
    frames = {path: leaf for path, leaf in leaves if hasattr(leaf, "columns")}
    # Of a table of Arrow, `columns` are the arrays.
    columns = {p: [*getattr(x, "column_names", x.columns)] for p, x in frames.items()}
    for path, names in columns.items():
        known, is_bare = trained.get(path, names), where == "predict" and not path
        if is_bare and len(trained) == 1:  # the only frame, with or without its name
            known = next(iter(trained.values()))
        if "" in trained:  # alone: a loss function gets its columns by name
            by_name = not is_bare or {*names} == {*known}
            used = [name for name in known if name in names]
            known = names if by_name else used or known
        if names != known:
            lacks = [name for name in known if name not in names]
            sides = names, known, lacks, [name for name in names if name not in known]
            texts = (", ".join(map(str, each)) or "-" for each in sides)
            mine, theirs, less, more = (textwrap.shorten(text, 200) for text in texts)
            msg = f"{where}: the data frame has the columns {mine}, and that of fit had"
            way = "give them in that order."
            if less != more:
                way = f"missing: {less}; extra: {more}. Prepare it as that of fit."
                # As `get_dummies` names them; other columns of 0 would be wrong data.
                dummies = {str(name).rpartition("_")[0] for name in names} - {""}
                if dummies.issuperset(str(name).rpartition("_")[0] for name in lacks):
                    way += " After pd.get_dummies, write frame.reindex(columns=columns,"
                    way += " fill_value=0), with the columns of fit."
            raise MeshLayoutError(f"{msg} {theirs}: {way}")
    return columns


def _as_trained(data: PyTree, structure: Any, weights: str | int) -> PyTree:
    """Returns a data frame with other columns than `structure` as a matrix."""
    names = () if structure is None else structure.unflatten([0] * structure.num_leaves)
    columns = {*getattr(data, "columns", ())} - {weights}
    is_same = isinstance(names, Mapping) and columns == {*names}
    return plain_array(data, "data") if columns and not is_same else data


def has_rows(data: Any, size: int | None) -> bool:
    """Returns whether data is arrays or indexable examples, to be batched."""
    if is_columns(data) or isinstance(data, RandomAccessSource):
        return True
    if hasattr(data, "__next__") or not _is_indexed(data):
        return False
    return size is not None or not (isinstance(data, list) or looks_batched(data[0]))


def _is_indexed(data: Any) -> bool:
    has_index = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return has_index and not isinstance(data, (type, str, bytes)) and len(data) > 0


def rows_of(
    where: str, name: str, data: PyTree, size: int | None
) -> RandomAccessSource:
    """Returns arrays, or examples by index, as rows."""
    is_list, rows = isinstance(data, list), None  # of arrays, or of examples
    with _checks.noted(f"in {where}: cutting {name} into batches"):
        if is_list and any(hasattr(x, "dtype") for x in data):
            rows = array_rows(data)
        elif is_list or has_rows(data, size):
            source = as_source(data, batched=False if is_list else None)
            rows = source if isinstance(source, RandomAccessSource) else None
    call = f"ml.distribute_dataset({name}, ml.create_mesh(), global_batch_size="
    if rows is None:
        kind = f"{where}: batch_size= is for arrays, and {_checks.shown(data)} yields"
        hint = f"If it yields examples, write {call}{size})."
        raise MeshLayoutError(f"{kind} batches: leave out batch_size=. {hint}")
    if size is None:
        call = f"{call}32)" if ":" in where else f"{where}(..., batch_size=32)"
        raise MeshLayoutError(f"{where} needs the size of a batch: {call}.")
    _checks.count("batch_size", size, where=where)
    return rows


def split_rows(data: PyTree, size: int | None, share: float) -> list[Rows]:
    """Returns all rows of `fit` but a share of them, and that share: the last ones."""
    rows = rows_of("fit", "train", data, size)
    share = _checks.number("validation_split", share, above=0, below=1, where="fit")
    first = len(rows) - round(len(rows) * share)
    if first in (0, len(rows)):
        msg = f"fit: validation_split={share} leaves a part of {len(rows)} rows empty."
        raise MeshLayoutError(msg)
    parts = np.split(np.arange(len(rows)), [first])
    return [Rows(len(x), lambda i, n, x=x: rows.read_rows(x[i], n)) for x in parts]


def real_rows(placed: PlacedBatch, outputs: PyTree, key: WeightsKey) -> PyTree:
    """Returns the outputs of the user's rows, on the host."""
    size, rows = num_examples(placed.batch), slice(placed.num_examples)
    weights = get_weights(placed.batch, key)
    # Rows of weight 0 are padding only where `distribute_dataset` says so.
    if _batches.is_marked(weights):
        weights = to_numpy(weights)
        rows = np.any(weights != 0, axis=tuple(range(1, weights.ndim)))

    def real(value: np.ndarray) -> np.ndarray:
        if np.shape(value)[:1] != (size,):
            msg = f"predict: an output has shape {np.shape(value)} for a batch of"
            raise MeshLayoutError(f"{msg} {size} rows; give one row per example.")
        return value[rows]

    return jax.tree.map(real, to_numpy(outputs))
