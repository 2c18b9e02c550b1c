"""The batches of one iteration, one after another, placed on the mesh."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from meshlayout import _jax
from meshlayout.data.agreement import Agreement
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
        no_place: What to do where padding has no place for its weights.
        agreement: With the processes that have sources of their own, if the number of
            their batches has to be agreed on in every step; or None.
        x64: Whether arrays are 64-bit.
        clock: Where the time goes.
    """

    options: Options
    cut: Cut
    weighting: Weighting | None
    placement: Placement | None
    no_place: str
    agreement: Agreement | None
    x64: bool
    clock: Clock

    def placed(self, batch: HostBatch) -> Any:
        """Returns a batch on the mesh, with its weights.

        Args:
            batch: This process's rows of it.

        Raises:
            DataError: If it is padded and has no place for weights.
        """
        if self.placement is None or self.weighting is None:
            return batch.leaves[0]
        is_real = self.cut.is_real(batch.count)
        if is_real is not None and self.weighting.at is None:
            msg = (
                f"the last batch of an epoch has {rows_text(batch.count)}, and batches "
                f"have {self.cut.size}. {self.no_place}"
            )
            raise DataError(msg)
        with (
            self.clock.stage("place", self.cut.num_kept),
            _jax.x64_mode(self.x64),
        ):
            leaves = self.weighting.weighted(batch.leaves, is_real, self.cut.num_kept)
            return self.placement.placed(leaves)


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
        self._last: HostBatch | None = None
        self._step = 0
        self._is_ended = False

    def __next__(self) -> tuple[Any, Position]:
        batch = self._next_host_batch()
        given = self.position.given + 1
        self.position = batch.position._replace(given=given)
        self._last = batch
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
        if self._must_seek:
            self.reader.seek(self.position)
            self._must_seek = False
        while not self._is_over():
            batch = self._agreed(self._read())
            if batch is not None:
                return batch
            if not self.position.row:
                raise DataError(no_rows(self.position.epoch))
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
            return self.reader.read(self.position)
        try:
            return self.reader.read(self.position)
        except Exception as error:  # raised once the other processes know of it
            return error

    def _agreed(self, found: HostBatch | Exception | None) -> HostBatch | None:
        """Returns this step's batch: all processes have one, or none has."""
        agreement = self._pipeline.agreement
        if agreement is None:
            assert not isinstance(found, Exception)
            return found
        said = agreement.exchange(self._topic(), _word(found))
        if self._step:
            agreement.forget(f"{self._name}/{self._step - 1}")
        self._step += 1
        self._is_ended = isinstance(found, Exception)
        if isinstance(found, Exception):
            raise found
        for process, word in said.items():
            if word == _LEFT:
                msg = (
                    f"process {process} has left its loop over the data, and this one "
                    "goes on. All processes have to take the same number of steps."
                )
                raise DataError(msg)
            if isinstance(word, str):
                raise DataError(f"the source of process {process} failed: {word}")
        going = [process for process, word in said.items() if word]
        if len(going) == len(said) or not going:
            return found
        return self._out_of_step(found, going, said)

    def _topic(self) -> str:
        return f"{self._name}/{self._step}"

    def _out_of_step(
        self, found: HostBatch | None, going: list[int], said: dict[int, Any]
    ) -> HostBatch | None:
        """Returns the batch of a step for which only some processes have rows."""
        remainder = self._pipeline.options.remainder
        if remainder == "drop":
            self._pipeline.clock.note(
                "Dropped batches of processes that had more rows than others."
            )
            return None
        if remainder != "pad":
            ended = next(process for process in said if process not in going)
            msg = (
                f"the source of process {ended} has fewer batches than that of process "
                f"{going[0]}. remainder='pad' pads the shorter ones."
            )
            raise DataError(msg)
        return found or self._padding()

    def _padding(self) -> HostBatch:
        """Returns a batch of nothing but padding."""
        here, last = self.position, self._last
        if last is None:
            raise DataError(no_rows(here.epoch))
        leaves = [np.repeat(leaf[-1:], len(leaf), axis=0) for leaf in last.leaves]
        return HostBatch(leaves, 0, here._replace(batch=here.batch + 1))


def _word(found: HostBatch | Exception | None) -> bool | str:
    """Returns what the other processes are told."""
    if isinstance(found, Exception):
        return f"{type(found).__name__}: {found}"
    return found is not None


def _epochs(count: int) -> str:
    return "1 epoch" if count == 1 else f"{count} epochs"
