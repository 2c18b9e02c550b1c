"""The data of a `fit` or an evaluation: passes, epochs, and the batches of calls.

A group of batches is read completely before its call, so each carries what is needed
later: its number for errors, and the position after it for a checkpoint. Data resumes
at a position by `set_state` if its iterator has that; other data is read up to there.
"""

import contextlib
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from meshlayout import _checks
from meshlayout._annotations import Batch
from meshlayout._batches import num_examples
from meshlayout.checkpoint.positions import Continues
from meshlayout.data import DataIterator, DistributedDataset
from meshlayout.data.agreement import Agreement
from meshlayout.errors import CheckpointError, MeshLayoutError
from meshlayout.trainer.batches import BatchPlacer, PlacedBatch, RowsBatch


_log = logging.getLogger("meshlayout")

Data: TypeAlias = Iterable[Any] | Callable[[], Iterable[Any]]
"""An iterable of batches, a function that returns one, or an iterator."""

_END: Any = object()


@dataclass(frozen=True)
class TrainingPosition:
    """How far training is, in numbers that the host knows without asking the device.

    Attributes:
        epoch: The current epoch, from 1.
        last_epoch: The number of the last epoch of this `fit`.
        step: Steps of the state so far, including those before this `fit`.
        step_in_fit: Steps of this `fit` so far.
        step_in_epoch: Steps of this epoch so far.
        steps_per_epoch: Steps of an epoch; None if not known.
        examples_in_epoch: Examples of this epoch so far, without padding that the
            trainer added.
    """

    epoch: int = 0
    last_epoch: int = 0
    step: int = 0
    step_in_fit: int = 0
    step_in_epoch: int = 0
    steps_per_epoch: int | None = None
    examples_in_epoch: int = 0


@dataclass
class _SavedPosition:
    """The position of an iterator that has moved on, to save in its place."""

    state: object

    def get_state(self) -> object:
        return self.state

    def set_state(self, state: object) -> None:
        self.state = state


class TrainerInput:
    """Data cut into epochs, and the epochs into the batches of each call of a step.

    Without `steps_per_epoch`, an epoch is one pass. With it, an epoch is that many
    batches, and the next epoch continues where it stopped; at the end of a pass a new
    one begins, as in Keras. An iterator has only one pass. A dataset's passes are its
    epochs if it `trains`, and otherwise its first one again and again.

    Attributes:
        is_over: Whether the data ended before or at the beginning of the last epoch.
        is_saved: Whether positions are recorded, for a callback that saves them.
        is_resumed: Whether this `fit` resumes from a checkpoint.
        used: The last batch trained on.
    """

    def __init__(
        self,
        where: str,
        name: str,
        data: Data,
        placer: BatchPlacer,
        *,
        steps_per_epoch: int | None = None,
        num_epochs: int = 1,
        trains: bool = False,
    ) -> None:
        if isinstance(data, str) or not (isinstance(data, Iterable) or callable(data)):
            what = "an iterable of batches, or a function that returns one"
            msg = f"{name} must be {what}, got {_checks.shown(data)}."
            raise MeshLayoutError(msg)
        if not isinstance(data, Iterable):
            _checks.function(name, data)
        if isinstance(data, Iterator) and num_epochs > 1 and steps_per_epoch is None:
            msg = (
                f"{name} is an iterator, which yields its batches only once, but "
                f"epochs={num_epochs}. Give the number of batches in an epoch, "
                "steps_per_epoch=, or a list, or a function that returns a new "
                "iterator."
            )
            raise MeshLayoutError(msg)
        self._where, self._name, self._data = where, name, data
        self._steps, self._trains, self.placer = steps_per_epoch, trains, placer
        self._pass: Iterator[Any] | None = None
        self._num_given = 0  # batches of this pass
        self._num_done = 0  # batches of the epoch that is resumed
        self._has_batches = False
        # Processes take a step together or not at all. Those datasets see to it
        # themselves, in their own thread.
        agrees = isinstance(data, (DistributedDataset, DataIterator))
        mesh = None if agrees or placer.layout is None else placer.layout.mesh
        self._agreement = None if mesh is None else Agreement(mesh)
        self.is_over = self.is_saved = self.is_resumed = False
        self.used: PlacedBatch | None = None

    @property
    def num_steps(self) -> int | None:
        """Batches in an epoch; None if not known beforehand."""
        return self._steps or operator.length_hint(self._data, 0) or None

    def groups(self, size: int = 1, *, text: str = "") -> Iterator[list[PlacedBatch]]:
        """Yields the batches of each call of a step, in the next epoch.

        Those left over at the end of an epoch, and those of another size than the
        first, come one by one. Errors name the epoch by `text`.
        """
        first, self._num_done = self._num_done + 1, 0
        group: list[PlacedBatch] = []
        for number, batch in enumerate(self._epoch(first, text), first):
            with _checks.noted(f"in {self._where}: batch {number}{text}"):
                placed = self.placer(batch)
            if placed is None:
                what = f"batch {number} of {self._name}"
                _log.warning("%s has no rows, or only rows of weight 0: left out", what)
                continue
            place = self._place(number) if self.is_saved else None
            group.append(replace(placed, number=number, place=place))
            if placed.is_odd:  # the batches of a call are stacked: they have one size
                yield from ([placed] for placed in group)
                group = []
            elif len(group) == size:
                yield group
                group = []
        yield from ([placed] for placed in group)

    def located(
        self, group: list[PlacedBatch], text: str = ""
    ) -> contextlib.AbstractContextManager[None]:
        """Notes in errors which batches a call takes."""
        first, last = group[0].number, group[-1].number
        numbers = f"batch {first}" if first == last else f"batches {first}-{last}"
        return _checks.noted(f"in {self._where}: {numbers}{text}")

    def _epoch(self, first: int, text: str) -> Iterator[Batch | RowsBatch]:
        """Yields the batches of an epoch from a number on, which all processes have."""
        if self._steps is None and first == 1:
            self._begin()
        turns = None if self._agreement is None else self._agreement.new_turns()
        number = first
        with turns or contextlib.nullcontext():
            while self._steps is None or number <= self._steps:
                batch = _END if self._pass is None else next(self._pass, _END)
                if batch is _END and self._steps is not None:
                    batch = next(self._begin(), _END)
                if turns is not None:
                    rows = 0 if batch is _END else num_examples(batch)
                    turns.take(None, f"{rows} rows in batch {number}{text}")
                if batch is _END:
                    break
                number, self._num_given = number + 1, self._num_given + 1
                yield batch
        self._has_batches = self._has_batches or number > 1
        if not self._has_batches:
            raise self._no_batch()
        self.is_over = number <= (self._steps or 1)

    def _begin(self) -> Iterator[Any]:
        """Begins a pass; an iterator continues its only one."""
        if self._pass is None or not isinstance(self._data, Iterator):
            self._pass, self._num_given = self._new_pass(trains=self._trains), 0
        return self._pass

    def _new_pass(self, *, trains: bool) -> Iterator[Any]:
        if isinstance(self._data, DistributedDataset) and not trains:
            return self._data.iterator(epoch=0)
        data = self._data if isinstance(self._data, Iterable) else self._data()
        if not isinstance(data, Iterable):
            what = f"is a function that returned {_checks.shown(data)}"
            msg = f"{self._name} {what}, not an iterable of batches."
            raise MeshLayoutError(msg)
        return iter(data)

    def _no_batch(self) -> MeshLayoutError:
        msg = f"{self._name} yielded no batch. Perhaps it is a used-up iterator."
        return MeshLayoutError(msg)

    # Positions.

    def _place(self, number: int) -> tuple[dict[str, Any], Continues | None]:
        """Returns the position after a batch, and the iterator's own, if it has one."""
        position = None
        if isinstance(self._pass, Continues):
            position = _SavedPosition(self._pass.get_state())
        return {"given": self._num_given, "number": number}, position

    def first_batch(self) -> Batch:
        """Returns a batch of a pass of its own; `resume` goes to a position next."""
        if self._pass is None:
            self._pass = self._new_pass(trains=False)
        batch, self._num_given = next(self._pass, _END), 1
        placed = None if batch is _END else self.placer(batch)
        if placed is None:
            raise self._no_batch()
        return placed.batch

    def resume(
        self,
        place: Mapping[str, Any],
        move: Callable[[Continues], None] | None,
        *,
        is_end: bool,
    ) -> None:
        """Goes to a place from which the rest of an epoch is read, or the next one.

        `move` moves an iterator to its own position; None if none was saved.
        """
        self.is_resumed = self._has_batches = True
        self._num_done = 0 if is_end else place["number"]
        batches = self._begin()
        if move is not None and isinstance(batches, Continues):
            move(batches)
        elif not is_end or self._steps is not None or isinstance(self._data, Iterator):
            count = place["given"] - self._num_given
            _log.info("the data has no position: dropping its first %d batches", count)
            for number in range(count):
                if next(batches, _END) is _END:
                    msg = (
                        f"the checkpoint was saved after {place['given']} batches of a "
                        f"pass over the data, which now ends {count - number} batches "
                        "earlier. Resume with the data of that run."
                    )
                    raise CheckpointError(msg)
        self._num_given = place["given"]
