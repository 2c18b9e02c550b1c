"""`Loop`: a training loop of one's own that is saved, and goes on where it was."""

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from meshlayout.checkpoint.checkpointer import Checkpointer
from meshlayout.checkpoint.input import Data, Input, why_not
from meshlayout.checkpoint.preemption import Preempted, Preemption
from meshlayout.checkpoint.resuming import KEY, notes_of, resume
from meshlayout.errors import CheckpointError
from meshlayout.state import TrainState


class Loop:
    """A training loop of one's own that is saved, and goes on where it was.

    It gives the batches, counts steps and epochs, saves when the checkpointer says that
    it is time, and goes on from the newest intact checkpoint: state, metrics of the
    epoch so far, and the data to the batch. At SIGTERM, on several processes to any of
    them, it saves after the step that is running and ends the process with status 75
    (`EXIT_STATUS`).

    Args:
        checkpointer: Where to save, and how often; it is not closed.
        data: A distributed dataset or any other iterable of batches, a new iteration
            for each epoch; a function that returns one; or an iterator. If its
            iterators do not tell their place (`get_state` and `set_state`), they are
            read up to it, and have to give the same batches in each run.

    Attributes:
        step: The steps so far, of earlier runs too: the checkpoints' numbers.
        epoch: The epoch, from 1; 0 before the first one.

    Raises:
        CheckpointError: If it is given no checkpointer, or no batches.

    Example:
        >>> import tempfile, numpy as np
        >>> from meshlayout import Checkpointer
        >>> def train_step(state, batch):
        ...     return {"sum": state["sum"] + batch}
        >>> directory = tempfile.mkdtemp()
        >>> for run in range(2):  # the second one goes on in the middle of an epoch
        ...     with Checkpointer(directory) as ck, Loop(ck, [1, 2, 3]) as loop:
        ...         state = loop.resume({"sum": np.zeros(())})
        ...         for epoch in loop.epochs(2):
        ...             for batch in loop:
        ...                 state = train_step(state, batch)
        ...                 loop.step_done(state)
        ...                 if run == 0 and loop.step == 4:
        ...                     break
        ...     print(loop.step, loop.epoch, state["sum"])
        4 2 7.0
        6 2 12.0
    """

    def __init__(self, checkpointer: Checkpointer, data: Data) -> None:
        self._check(
            isinstance(checkpointer, Checkpointer),
            "it takes an ml.Checkpointer(directory), and got a "
            f"{type(checkpointer).__name__}.",
        )
        kind = why_not(data)
        self._check(
            not kind,
            f"data is a {type(data).__name__}, {kind}: it takes an iterable of "
            "batches, or a function that returns one. A list of one batch is one, too.",
        )
        self._checkpointer, self._input = checkpointer, Input(data)
        self._preemption = Preemption()
        self.step = self.epoch = 0
        self._metrics: Any = None
        self._is_entered = self._is_resumed = False
        # Whether an epoch is set up, a batch is with the user, metrics were not taken.
        self._is_ready = self._is_given = self._is_untaken = False

    def __enter__(self) -> Self:
        self._is_entered = True
        self._preemption.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_entered = False
        self._preemption.__exit__(kind, error, trace)

    def resume(
        self,
        state: Any,
        train_step: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None,
    ) -> Any:
        """Goes on from the newest intact checkpoint, if there is one.

        Args:
            state: The state that training begins with. It also says what the state of
                a checkpoint looks like, and where it goes.
            train_step: What the loop calls as `train_step(state, batch, metrics)`. If
                there is a checkpoint, it is called once, with metrics None, to see what
                it makes of both: metrics, and what it keeps beside the state, as a
                moving average. That uses `state` up. None for a step without either.

        Returns:
            The state to go on with; the one that was given, if there is no checkpoint.

        Raises:
            CheckpointError: If the checkpoint cannot be gone on from.
            RestoreDiffError: If it holds another state.

        Warns:
            CheckpointWarning: If a newer checkpoint is damaged.
        """
        self._check(self._is_entered, "resume is called inside 'with Loop(...)'.")
        self._check(not self._is_resumed, "resume was called before.")

        def first_step(state: Any, batch: Any) -> tuple[Any, Any]:
            assert train_step is not None
            return train_step(state, batch, None)

        def look(notes: Mapping[str, Any]) -> None:
            self._check(
                "epoch" in notes,
                f"the newest checkpoint in {self._checkpointer.directory} was saved by "
                "a Trainer. Go on with fit(resume=True), or give another directory; "
                "Checkpointer.restore returns the state alone.",
            )
            self._check(
                train_step is not None or "metrics" not in notes,
                "the checkpoint holds the metrics of the epoch so far. Give "
                "loop.resume(state, train_step), to see what they look like.",
            )

        is_counted = isinstance(state, TrainState)
        found = resume(
            self._checkpointer,
            state,
            self._input,
            None if train_step is None else first_step,
            look,
        )
        self._is_resumed = True
        if found is None:
            self.step = int(state.step) if is_counted else 0
            return state
        self.step, self.epoch = found.step, found.notes["epoch"]
        self._metrics = found.metrics
        self._is_ready, self._is_untaken = True, found.metrics is not None
        return found.state

    @property
    def metrics(self) -> Any:
        """The metrics of the epoch so far, to add to; None at its beginning."""
        self._is_untaken = False
        return self._metrics

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Gives the numbers of the epochs, from the one that is to be gone on with.

        Args:
            num_epochs: The number of the last one.
        """
        self._check_resumed()
        while True:
            if not self._is_ready:
                if self.epoch >= num_epochs:
                    return
                self._begin_epoch()
            if self.epoch <= num_epochs:
                yield self.epoch
            self._is_ready = False

    def __iter__(self) -> Iterator[Any]:
        """Gives the batches of the epoch that are left, or those of the next one."""
        self._check_resumed()
        self._check_done()
        if not self._is_ready:
            self._begin_epoch()
        for batch in self._input:
            self._is_given = True
            yield batch
            self._check_done()
        self._is_ready = False

    def step_done(
        self,
        state: Any,
        metrics: Any = None,
        *,
        measured: Mapping[str, Any] | None = None,
    ) -> None:
        """Notes that a batch is done, and saves if it is time; once for each batch.

        Args:
            state: The state after the step.
            metrics: The metrics of the epoch so far, which the step returned: any tree
                of arrays. They are kept in the checkpoint's metadata, so that the state
                can be restored alone: they have to be small.
            measured: What the checkpointer finds the best step by, as for `save`.

        Raises:
            CheckpointError: If it could not be saved; if no batch was given.
            Preempted: After SIGTERM, which ends the process.
        """
        self._check(
            self._is_given, "step_done is called once after each batch of the loop."
        )
        self._check(
            not self._is_untaken,
            "the checkpoint held metrics of the epoch so far, which nobody added to. "
            "Write state, metrics = train_step(state, batch, loop.metrics).",
        )
        self._is_given = False
        self.step += 1
        self._metrics = metrics
        is_last = self._preemption.is_due()
        place, data = self._input.place()
        self._checkpointer.save(
            self.step,
            state,
            data=data,
            metadata={
                "epoch": self.epoch,
                KEY: notes_of(place, metrics, epoch=self.epoch),
            },
            metrics=measured,
            force=is_last,
        )
        if is_last:
            self._checkpointer.wait()
            raise Preempted(self.step)

    def _begin_epoch(self) -> None:
        self._input.begin()
        self.epoch += 1
        self._metrics = None
        self._is_ready, self._is_untaken = True, False

    def _check_done(self) -> None:
        self._check(
            not self._is_given,
            "another batch was asked for, and step_done(state) was not called for the "
            "one before: a checkpoint would not know of it.",
        )

    def _check_resumed(self) -> None:
        self._check(
            self._is_resumed,
            "call state = loop.resume(state) before the first batch. Where there is no "
            "checkpoint, it returns the state as it is.",
        )

    def _check(self, is_right: bool, problem: str) -> None:  # noqa: FBT001
        if not is_right:
            raise CheckpointError(f"checkpoint.Loop: {problem}")
