"""The batches of one iteration, one after another, placed on the mesh."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshlayout import _jax
from meshlayout._batches import mark_weights
from meshlayout.data.agreement import Agreement, failure
from meshlayout.data.clock import Clock
from meshlayout.data.host_batches import Cut, HostBatch, Reader
from meshlayout.data.options import Options
from meshlayout.data.placing import Placement
from meshlayout.data.position import Position
from meshlayout.data.stream_batches import no_rows, rows_text
from meshlayout.data.weighting import Weighting
from meshlayout.errors import DataError


@dataclass(frozen=True)
class Pipeline:
    """What all iterations over a data set share.

    Attributes:
        options: What was asked for.
        cut: How batches are cut.
        weighting: Where their weights are.
        placement: Where they go; None for batches that are placed already.
        no_place: What to do where batches cannot be padded.
        filler: The row of which batches consist for which a process has no rows of
            its own, leaf by leaf; None where there cannot be such batches.
        agreement: With the processes that have sources of their own, which agree in
            every step that all have a batch; or None.
        x64: Whether arrays are 64-bit.
        clock: Where the time goes.
    """

    options: Options
    cut: Cut
    weighting: Weighting | None
    placement: Placement | None
    no_place: str
    filler: list[Any] | None
    agreement: Agreement | None
    x64: bool
    clock: Clock

    def check_padding(self, batch: HostBatch) -> None:
        """Raises DataError if a batch is padded and has no place for weights.

        Args:
            batch: This process's rows of it.
        """
        if self.weighting is None or self.weighting.at is not None:
            return
        if self.cut.is_real(batch.count) is not None:
            msg = (
                f"the last batch of an epoch has {rows_text(batch.count)}, and batches "
                f"have {self.cut.size}. {self.no_place}"
            )
            raise DataError(msg)

    def placed(self, batch: HostBatch) -> Any:
        """Returns a batch on the mesh, with its weights.

        Args:
            batch: This process's rows of it.
        """
        if self.placement is None or self.weighting is None:
            return batch.leaves[0]
        is_real = self.cut.is_real(batch.count)
        with (
            self.clock.stage("place", self.cut.num_kept),
            _jax.x64_mode(self.x64),
        ):
            leaves = self.weighting.weighted(batch.leaves, is_real, self.cut.num_kept)
            placed = self.placement.placed(leaves)
            if self.weighting.at is not None:
                mark_weights(jax.tree.leaves(placed)[self.weighting.at])
            return placed


# What a process says that takes no more steps.
_LEFT = ["left"]


class Producer:
    """Makes the batches of one iteration.

    Attributes:
        position: Where it stands.
        given: The place after the last batch.
        reader: Where batches come from.

    Args:
        pipeline: What to do with them.
        reader: Where they come from.
        position: Where to begin.
        must_seek: Whether the reader is not there already.
        name: Of this iteration, for the other processes.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        reader: Reader,
        position: Position,
        *,
        must_seek: bool,
        name: str,
    ) -> None:
        self._pipeline, self.reader, self.position = pipeline, reader, position
        self._name = name
        self._must_seek = must_seek and (position.row > 0 or position.batch > 0)
        self.given = position
        self._step = 0
        self._is_ended = False

    def __next__(self) -> tuple[Any, Position]:
        batch = self._next_host_batch()
        given = self.position.given + 1
        self.position = batch.position._replace(given=given)
        self.given = self.position
        return self._pipeline.placed(batch), self.position

    def close(self) -> None:
        """Lets go of the source, and of the other processes that wait for this one."""
        agreement = self._pipeline.agreement
        was_ended, self._is_ended = self._is_ended, True
        try:
            self.reader.close()
        finally:
            if agreement is not None and not was_ended:
                agreement.say(self._topic(), _LEFT)

    def _next_host_batch(self) -> HostBatch:
        while not self._is_over():
            batch = self._agreed(self._read())
            if batch is not None:
                return batch
            here = self.position
            self.position = here._replace(
                epoch=here.epoch + 1, batch=0, row=0, source=None, offset=0
            )
        self._is_ended = True
        raise StopIteration

    def _is_over(self) -> bool:
        options, here = self._pipeline.options, self.position
        if options.steps is not None and here.given >= options.steps:
            return True
        last = here.first_epoch + options.epochs
        if options.remainder == "repeat":
            if options.steps is not None:
                return False
            return (here.epoch, here.row) >= (last, here.first_row)
        if here.epoch < last:
            return False
        if options.steps is not None:
            msg = (
                f"the data ended after {here.given} of steps={options.steps}: "
                f"{_epochs(options.epochs)} had no more batches. Take more epochs=, "
                "fewer steps=, or remainder='repeat'."
            )
            raise DataError(msg)
        return True

    def _read(self) -> HostBatch | Exception | None:
        if self._pipeline.agreement is None:
            return self._found()
        try:
            return self._found()
        except Exception as error:  # raised once the other processes know of it
            return error

    def _found(self) -> HostBatch | None:
        """Returns this process's next batch, or None at the epoch's end."""
        here = self.position
        if self._must_seek:
            self.reader.seek(here)
            self._must_seek = False
        found = self.reader.read(here)
        if found is not None:
            self._pipeline.check_padding(found)
        elif not here.row:
            raise DataError(no_rows(here.epoch))
        return found

    def _agreed(self, found: HostBatch | Exception | None) -> HostBatch | None:
        """Returns this step's batch: all processes have one, or none has."""
        agreement = self._pipeline.agreement
        if agreement is None:
            assert not isinstance(found, Exception)
            return found
        if isinstance(found, Exception):
            self._is_ended = True
            agreement.fail(self._topic(), found)
            raise found
        if found is None and self._pipeline.options.remainder == "repeat":
            return None  # the next epoch has this step's batch
        said = agreement.exchange(self._topic(), found is not None)
        if self._step:
            agreement.forget(topic(self._name, self._step - 1))
        self._step += 1
        _check_going(said)
        going = [process for process, word in said.items() if word]
        if len(going) == len(said) or not going:
            return found
        return self._out_of_step(found, going, said)

    def _topic(self) -> str:
        return topic(self._name, self._step)

    def _out_of_step(
        self, found: HostBatch | None, going: list[int], said: dict[int, Any]
    ) -> HostBatch | None:
        """Returns the batch of a step for which only some processes have rows."""
        pipeline = self._pipeline
        remainder, filler = pipeline.options.remainder, pipeline.filler
        if remainder == "pad" and filler is not None:
            return found or self._padding(filler)
        ended = next(process for process in said if process not in going)
        if remainder == "drop":
            if found is not None:
                pipeline.clock.note(
                    f"Dropped at least {rows_text(found.count)} at the end of an "
                    f"epoch: process {ended} had no more batches, and the source was "
                    "not read any further."
                )
            return None
        way_out = pipeline.no_place
        if remainder != "pad":
            way_out = "remainder='pad' pads the shorter ones."
        msg = (
            f"the source of process {ended} has fewer batches than that of process "
            f"{going[0]}. {way_out}"
        )
        raise DataError(msg)

    def _padding(self, filler: list[Any]) -> HostBatch:
        """Returns a batch of nothing but padding."""
        here = self.position
        leaves = [np.repeat(row, self._pipeline.cut.num_kept, axis=0) for row in filler]
        return HostBatch(leaves, 0, here._replace(batch=here.batch + 1))


def topic(name: str, step: int) -> str:
    """Returns the name of the exchange about one step.

    Args:
        name: Of the iteration.
        step: Which one, from 0.
    """
    return f"{name}/{step}"


def _check_going(said: dict[int, Any]) -> None:
    """Raises DataError if a process has failed, or has left its loop."""
    failed = failure(said)
    if failed is not None:
        process, text = failed
        raise DataError(f"the source of process {process} failed: {text}")
    for process, word in said.items():
        if word == _LEFT:
            msg = (
                f"process {process} has left its loop over the data, and this one "
                "goes on. All processes have to take the same number of steps."
            )
            raise DataError(msg)


def _epochs(count: int) -> str:
    return "1 epoch" if count == 1 else f"{count} epochs"
