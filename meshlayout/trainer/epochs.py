"""The data of a `fit` or an evaluation: epochs, positions, and the batches of calls.

An iterable yields batches in passes; steps take them in epochs and in groups, one group
per call. A group is read completely before its call, so each batch carries what is
needed later: its number for errors, and the position after it for a checkpoint.
"""

import logging
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshlayout import _checks
from meshlayout._annotations import Batch
from meshlayout._batches import WeightsKey, get_weights, num_examples
from meshlayout.data import DataIterator, DistributedDataset
from meshlayout.data.agreement import Agreement, Turns
from meshlayout.errors import DataError, MeshLayoutError
from meshlayout.trainer.batch_placement import BatchPlacer, PlacedBatch
from meshlayout.trainer.passes import Data, Input, why_not


_log = logging.getLogger("meshlayout")

_END = object()


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


class Restarted:
    """The batches of a dataset, from its first epoch in every iteration."""

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> DataIterator:
        return self._dataset.iterator(epoch=0)


class TrainerInput:
    """Data cut into epochs, and the epochs into the batches of each call of a step.

    Without `steps_per_epoch`, an epoch is one pass. With it, an epoch is that many
    batches, and the next epoch continues where it stopped; at the end of a pass a new
    one begins, as in Keras. An iterator has only one pass.

    Args:
        where: The method that reads the data, such as `"evaluate"`, for messages.
        name: The parameter that holds the data, for messages.
        data: The data.
        placer: Puts batches on the mesh.
        steps_per_epoch: Batches in an epoch, or None.
        num_epochs: How many epochs will be read.
        weights: The key of the weights in batches, to leave out batches on the host
            whose weights are all 0; None keeps them.

    Attributes:
        passes: The passes over the data, whose position can be saved.
        is_over: Whether the data ended before or at the beginning of the last epoch.
        is_saved: Whether a callback saves the position.
        is_resumed: Whether this `fit` resumes from a checkpoint.
        used: The last batch trained on, if batches after it were read.
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
        weights: WeightsKey | None = None,
    ) -> None:
        data = _checked(name, data)
        if isinstance(data, Iterator) and num_epochs > 1 and steps_per_epoch is None:
            msg = (
                f"{name} is an iterator, which yields its batches only once, but "
                f"epochs={num_epochs}. Give the number of batches in an epoch, "
                "steps_per_epoch=, or a list, or a function that returns a new "
                "iterator."
            )
            raise MeshLayoutError(msg)
        self._where, self._name, self._data = where, name, data
        self._num_steps, self._weights = steps_per_epoch, weights
        self._begun: int | None = None
        self._has_batches = False
        self._epoch_text = ""
        # Processes take a step together or not at all. Those datasets see to it
        # themselves, in their own thread.
        agrees = isinstance(data, (DistributedDataset, Restarted, DataIterator))
        self._agreement = (
            None if agrees or placer.mesh is None else Agreement(placer.mesh)
        )
        self.placer, self.passes = placer, Input(data)
        self.is_over = self.is_saved = self.is_resumed = False
        self.used: PlacedBatch | None = None

    @property
    def num_steps(self) -> int | None:
        """Batches in an epoch; None if not known beforehand."""
        if self._num_steps is not None:
            return self._num_steps
        return operator.length_hint(self._data, 0) or None

    def place(self) -> tuple[dict[str, Any], Any]:
        """Returns the position after the last used batch; see `Input.place`."""
        if self.used is None or self.used.position is None:
            return self.passes.place()
        return self.used.position

    def resume(self, num_done: int | None) -> None:
        """Resumes an epoch after `num_done` batches; with None, begins the next one."""
        self._begun, self._has_batches = num_done, True

    def groups(
        self, group_size: int = 1, *, num_done: int = 0, epoch: int | None = None
    ) -> Iterator[list[PlacedBatch]]:
        """Yields the batches of each call of a step, in the next epoch.

        Args:
            group_size: The batches of a call; those left over at the end of an epoch,
                and those of another size, come one by one.
            num_done: The steps of this epoch so far.
            epoch: The number of the epoch, for errors.

        Raises:
            MeshLayoutError: If there is no batch.
        """
        self.used = None
        self._epoch_text = "" if epoch is None else f" of epoch {epoch}"
        group: list[PlacedBatch] = []
        for number, batch in enumerate(self._epoch(), num_done + 1):
            with self._located([batch], number):
                placed = self.placer(batch)
            # With one batch per call, the position of the passes is that of the step.
            keeps = self.is_saved and group_size > 1
            position = self.passes.place(keep=True) if keeps else None
            group.append(replace(placed, number=number, position=position))
            if placed.is_odd:  # the batches of a call are stacked: they have one size
                yield from ([placed] for placed in group)
                group = []
            elif len(group) == group_size:
                yield group
                group = []
        yield from ([placed] for placed in group)
        self.used = None

    @contextmanager
    def located(self, group: list[PlacedBatch]) -> Iterator[None]:
        """Names the batches of a call in errors, and how they differ from the first."""
        with self._located([placed.given for placed in group], group[0].number):
            yield

    @contextmanager
    def _located(self, batches: list[Batch], first: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            last = first + len(batches) - 1
            numbers = f"batch {first}" if first == last else f"batches {first}-{last}"
            where = f"{self._where}: {numbers}{self._epoch_text}"
            differences = map(self.placer.difference, batches)
            difference = next(filter(None, differences), "")
            if difference and not isinstance(error, MeshLayoutError):
                # A KeyError or a shape error of JAX: the difference is the cause.
                msg = (
                    f"{where} differs from the first one: {difference}. All batches of "
                    "a dataset must have the same arrays."
                )
                raise MeshLayoutError(msg) from error
            error.add_note(f"in {where}{f': {difference}' if difference else ''}")
            raise

    def _epoch(self) -> Iterator[Batch]:
        """Yields the batches of the next epoch, without those that have no examples."""
        begun, self._begun = self._begun, None
        count = begun or 0
        batches = self._batches(begun)
        turns = None if self._agreement is None else self._agreement.new_turns()
        if turns is not None:
            batches = self._agreed(batches, count, turns)
        for batch in batches:
            count += 1
            self._has_batches = True
            problem = self._problem(batch)
            if problem:
                _log.warning("batch %d of %s %s: left out", count, self._name, problem)
            else:
                yield batch
        self.is_over = self._has_batches and count < (self._num_steps or 1)
        if not self._has_batches:
            msg = f"{self._name} yielded no batch. Perhaps it is a used-up iterator."
            raise MeshLayoutError(msg)

    def _batches(self, begun: int | None) -> Iterator[Batch]:
        """Yields the batches of the next epoch, after the `begun` first ones."""
        if begun is None and self._num_steps is None:
            self.passes.begin()
        num_left = None if self._num_steps is None else self._num_steps - (begun or 0)
        while num_left is None or num_left > 0:
            batch = next(self.passes, _END)
            if batch is _END and num_left is not None:  # a new pass begins
                self.passes.begin()
                batch = next(self.passes, _END)
            if batch is _END:
                return
            yield batch
            num_left = None if num_left is None else num_left - 1

    def _agreed(
        self, batches: Iterator[Batch], count: int, turns: Turns
    ) -> Iterator[Batch]:
        """Yields the batches that all processes have.

        Args:
            batches: This process's batches of the epoch.
            count: How many of the epoch came before.
            turns: The exchanges with the other processes.

        Raises:
            DataError: If another process has failed, or its data ended.
        """
        with turns:
            while True:
                batch = next(batches, _END)
                rows = None if batch is _END else num_examples(batch)
                num_rows = turns.take(rows, f"batch {count + 1}")
                if len(set(num_rows.values())) > 1:
                    raise DataError(self._unlike(count + 1, num_rows))
                if batch is _END:
                    return
                count += 1
                yield batch

    def _unlike(self, number: int, num_rows: Mapping[int, int | None]) -> str:
        listed = ", ".join(
            f"{'none' if rows is None else f'one of {rows} rows'} on process {process}"
            for process, rows in num_rows.items()
        )
        return (
            f"{self._where}: {self._name} differs between processes at batch {number}"
            f"{self._epoch_text}: {listed}. All processes must have the same batches; "
            "ml.distribute_dataset(per_process=True) makes global batches of what each "
            "of them has."
        )

    def _problem(self, batch: Batch) -> str:
        """Returns why a batch holds no examples; empty if it holds some."""
        try:
            if num_examples(batch) == 0:
                return "has no rows"
        except MeshLayoutError:  # raised again when the batch is placed
            return ""
        # With weights of 0 gradients are 0, but momentum and weight decay would still
        # move the parameters. Weights on devices are not read: that would wait.
        weights = None if self._weights is None else get_weights(batch, self._weights)
        is_padding = isinstance(weights, np.ndarray) and not weights.any()
        return "has weight 0 in all its rows" if is_padding else ""


def _checked(name: str, data: Any) -> Any:
    """Returns an iterable of batches, or a function that returns one and checks it."""
    if why_not(data):
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
                f"{name} is a function that returned {_checks.shown(result)}, not an "
                "iterable of batches."
            )
            raise MeshLayoutError(msg)
        return result

    return batches
