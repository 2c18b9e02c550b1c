"""Epochs: passes over the data, the position in them, and the batches of steps."""

import logging
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshlayout import _checks
from meshlayout._annotations import Batch
from meshlayout._batches import WeightsKey, get_weights, num_examples
from meshlayout.checkpoint.input import Data, Input, why_not
from meshlayout.errors import MeshLayoutError
from meshlayout.trainer.batch_placement import BatchPlacer, PlacedBatch


_log = logging.getLogger("meshlayout")

_END = object()


@dataclass(frozen=True)
class TrainingPosition:
    """How far training is, in numbers that the host knows without the device.

    Attributes:
        epoch: The epoch, from 1.
        last_epoch: The number of the last epoch of this `fit`.
        step: The steps of the state so far, including those before this `fit`.
        step_in_fit: The steps of this `fit` so far.
        step_in_epoch: The steps of this epoch so far.
        steps_per_epoch: The steps of an epoch, where that is known.
        examples_in_epoch: The examples of this epoch so far, without padding that the
            trainer added.
    """

    epoch: int = 0
    last_epoch: int = 0
    step: int = 0
    step_in_fit: int = 0
    step_in_epoch: int = 0
    steps_per_epoch: int | None = None
    examples_in_epoch: int = 0


class DataPasses:
    """Cuts passes over the data into epochs.

    Without `steps_per_epoch`, an epoch is one pass. With it, an epoch is that many
    batches, and the next epoch resumes where it stopped; a new pass begins where one
    ends, as in Keras. An iterator has one pass: its end is the end.

    Args:
        name: What the data is called in messages.
        data: The data.
        steps_per_epoch: Batches in an epoch, or None.
        num_epochs: How many epochs will be asked for.
        weights: Where batches on the host carry their weights, if those in which all
            weights are 0 are to be left out; None keeps them.

    Attributes:
        is_over: Whether the last epoch ended before its batches, or had none left.
        input: The passes, whose position can be saved.

    Raises:
        MeshLayoutError: If the data is of another type, or an iterator for several
            epochs.
    """

    def __init__(
        self,
        name: str,
        data: Data,
        steps_per_epoch: int | None = None,
        num_epochs: int = 1,
        weights: WeightsKey | None = None,
    ) -> None:
        data = _checked(name, data)
        self._name, self._data = name, data
        self._num_steps, self._weights = steps_per_epoch, weights
        self.input = Input(data)
        self._begun: int | None = None
        self._has_batches = False
        self.is_over = False
        if isinstance(data, Iterator) and num_epochs > 1 and steps_per_epoch is None:
            msg = (
                f"{name} is an iterator, which gives its batches once, and "
                f"epochs={num_epochs}. Say how many batches an epoch has, "
                "steps_per_epoch=, or give a list, or a function that returns a new "
                "iterator."
            )
            raise MeshLayoutError(msg)

    @property
    def num_steps(self) -> int | None:
        """Batches in an epoch, if known beforehand."""
        if self._num_steps is not None:
            return self._num_steps
        return operator.length_hint(self._data, 0) or None

    def resume(self, num_done: int | None) -> None:
        """Resumes an epoch, or begins one after it, where `input` stands now.

        Args:
            num_done: The batches of the epoch that were used; None after its end.
        """
        self._begun, self._has_batches = num_done, True

    def epoch(self) -> Iterator[Batch]:
        """Yields the batches of the next epoch; those without examples are skipped.

        Raises:
            MeshLayoutError: If there is none.
        """
        begun, self._begun = self._begun, None
        count = begun or 0
        for batch in self._batches(begun):
            count += 1
            self._has_batches = True
            if _is_empty(batch):
                _log.warning("batch %d of %s has no rows: left out", count, self._name)
            elif self._is_padding(batch):
                _log.warning(
                    "batch %d of %s has weight 0 in all its rows: left out",
                    count,
                    self._name,
                )
            else:
                yield batch
        self.is_over = self._has_batches and count < (self._num_steps or 1)
        if not self._has_batches:
            msg = f"{self._name} gave no batch. An iterator that is used up gives none."
            raise MeshLayoutError(msg)

    def _is_padding(self, batch: Batch) -> bool:
        """Returns whether all rows of a batch on the host have weight 0.

        On devices, looking would mean waiting. A step with such a batch has gradients
        of 0, and momentum and weight decay would still move the parameters.
        """
        if self._weights is None:
            return False
        weights = get_weights(batch, self._weights)
        return isinstance(weights, np.ndarray) and not weights.any()

    def _batches(self, begun: int | None) -> Iterator[Batch]:
        if self._num_steps is None:
            if begun is None:
                self.input.begin()
            yield from self.input
            return
        for _ in range(self._num_steps - (begun or 0)):
            batch = self._next()
            if batch is _END:
                return
            yield batch

    def _next(self) -> Any:
        """Returns the next batch, starting a new pass if necessary."""
        batch = next(self.input, _END)
        if batch is _END:
            self.input.begin()
            batch = next(self.input, _END)
        return batch


def _checked(name: str, data: Any) -> Any:
    kind = why_not(data)
    if kind:
        msg = (
            f"{name} must be an iterable of batches, or a function that returns one, "
            f"got {_checks.shown(data)}."
        )
        raise MeshLayoutError(msg)
    if isinstance(data, Iterable):
        return data
    function = _checks.function(name, data)

    def batches() -> Iterable[Any]:
        result = function()
        if not isinstance(result, Iterable):
            msg = (
                f"{name} is a function that returned {_checks.shown(result)}; it must "
                "return an iterable of batches."
            )
            raise MeshLayoutError(msg)
        return result

    return batches


def _is_empty(batch: Batch) -> bool:
    try:
        return num_examples(batch) == 0
    except MeshLayoutError:  # it is raised where the batch is placed, with its number
        return False


@dataclass
class TrainingInput:
    """The training data of a `fit`.

    Attributes:
        passes: DataPasses over the data.
        placer: What puts batches on the mesh.
        is_saved: Whether a callback saves its position.
        is_resumed: Whether this `fit` resumes from a checkpoint; the history then has
            the epochs before it.
    """

    passes: DataPasses
    placer: BatchPlacer
    is_saved: bool = False
    is_resumed: bool = False
    _place: tuple[dict[str, Any], Any] | None = None
    _retried: list[PlacedBatch] | None = None

    def retry(self, group: list[PlacedBatch]) -> None:
        """Has `groups` yield the batches of a call that made no step one by one.

        Args:
            group: The batches of that call, placed anew, maybe of several sizes.
        """
        self._retried = group

    def place(self) -> tuple[dict[str, Any], Any]:
        """Returns the position after the last batch used; see `Input.place`."""
        return self.passes.input.place() if self._place is None else self._place

    def groups(
        self, group_size: int, place: Callable[[Batch], PlacedBatch]
    ) -> Iterator[list[PlacedBatch]]:
        """Yields the batches of each call of the train step.

        Args:
            group_size: The batches of a call; those that are left over at the end of
                an epoch come one by one.
            place: Puts a batch on the mesh.
        """
        self._place = self._retried = None
        placed_batches = map(place, self.passes.epoch())
        if group_size == 1:
            yield from ([placed] for placed in placed_batches)
            return
        # A group is read ahead: each batch keeps the position after it.
        group: list[tuple[PlacedBatch, Any]] = []
        for placed in placed_batches:
            position = self.passes.input.place(keep=True) if self.is_saved else None
            group.append((placed, position))
            if placed.is_odd:  # batches of one call have one size
                yield from self._one_by_one(group)
                group = []
            elif len(group) == group_size:
                yield [placed for placed, _ in group]
                if self._retried is not None:
                    positions = [position for _, position in group]
                    again = list(zip(self._retried, positions, strict=True))
                    self._retried = None
                    yield from self._one_by_one(again)
                group = []
        yield from self._one_by_one(group)

    def _one_by_one(
        self, group: list[tuple[PlacedBatch, Any]]
    ) -> Iterator[list[PlacedBatch]]:
        for placed, position in group:
            self._place = position
            yield [placed]
        self._place = None
