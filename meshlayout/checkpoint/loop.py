"""`Loop`: a training loop written by hand that is saved, and resumes where it was."""

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from meshlayout import _checks
from meshlayout._annotations import Batch, PyTree
from meshlayout.checkpoint.checkpointer import Checkpointer
from meshlayout.checkpoint.input import Data, Input, why_not
from meshlayout.checkpoint.preemption import Preempted, Preemption
from meshlayout.checkpoint.resume import (
    KEY,
    Notes,
    check_metrics,
    notes_of,
    resume,
)
from meshlayout.errors import CheckpointError
from meshlayout.state import TrainState


T = TypeVar("T")


class Loop:
    """A training loop written by hand that is saved, and resumes where it was.

    Use this where `Trainer.fit` does not fit. It yields the batches, counts steps and
    epochs, saves when the checkpointer says that a save is due, and resumes from
    the newest intact checkpoint: state, metrics of the epoch so far, and the data to
    the batch. At SIGTERM, on several processes to any of them, it saves after the
    running step and ends the process with status 75 (`EXIT_STATUS`).

    Args:
        checkpointer: Where to save, and how often; it is not closed.
        data: A distributed dataset or any other iterable of batches, a new iteration
            for each epoch; a function that returns one; or an iterator. Iterators
            without `get_state` and `set_state` are read up to their place, and must
            yield the same batches in each run.

    Attributes:
        step: The steps so far, of earlier runs too: the checkpoints' numbers.
        epoch: The epoch, from 1; 0 before the first one.

    Raises:
        CheckpointError: If `checkpointer` or `data` is of another type.

    Example:
        >>> import tempfile, numpy as np
        >>> from meshlayout import Checkpointer
        >>> def train_step(state, batch):
        ...     return {"sum": state["sum"] + batch}
        >>> directory = tempfile.mkdtemp()
        >>> for run in range(2):  # the second one resumes in the middle of an epoch
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
            "checkpointer must be an ml.Checkpointer(directory), got "
            f"{_checks.shown(checkpointer)}.",
        )
        kind = why_not(data)
        self._check(
            not kind,
            f"data is {_checks.shown(data)}, {kind}. Give an iterable of batches, or a "
            "function that returns one; for a single batch, [batch].",
        )
        self._checkpointer, self._input = checkpointer, Input(data)
        self._preemption = Preemption()
        self.step = self.epoch = 0
        self._metrics: Any = None
        self._is_entered = self._is_resumed = False
        # Whether an epoch is set up, a batch is in use, restored metrics are unread.
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
        state: T,
        train_step: Callable[[T, Any, Any], tuple[T, Any]] | None = None,
    ) -> T:
        """Resumes from the newest intact checkpoint, if there is one.

        Args:
            state: The state that training begins with. It also says what the state of
                a checkpoint looks like, and where it goes.
            train_step: What the loop calls as `train_step(state, batch, metrics)`. If
                there is a checkpoint, it is called once, with metrics None, to see what
                metrics look like, and what it adds to the state, such as a moving
                average. That uses `state` up. None for a step without either.

        Returns:
            The state to continue with: `state` itself if there is no checkpoint.

        Raises:
            CheckpointError: If the checkpoint cannot be resumed from.
            RestoreDiffError: If it holds another state.

        Warns:
            CheckpointWarning: If a newer checkpoint is damaged.
        """
        self._check(self._is_entered, "resume is called inside 'with Loop(...)'.")
        if train_step is not None:
            _checks.function(
                "train_step",
                train_step,
                *("state", "batch", "metrics"),
                where="checkpoint.Loop",
                error=CheckpointError,
            )
        self._check(not self._is_resumed, "resume was called before.")

        def first_step(state: T, batch: Batch) -> tuple[T, PyTree]:
            assert train_step is not None
            return train_step(state, batch, None)

        def look(notes: Notes) -> None:
            self._check(
                "epoch" in notes,
                f"the newest checkpoint in {self._checkpointer.directory} was saved by "
                "a Trainer. Continue with fit(resume=True), or give another directory; "
                "Checkpointer.restore returns the state alone.",
            )
            self._check(
                train_step is not None or "metrics" not in notes,
                "the checkpoint holds the metrics of the epoch so far. Give "
                "loop.resume(state, train_step), to see what they look like.",
            )

        resumed = resume(
            self._checkpointer,
            state,
            self._input,
            None if train_step is None else first_step,
            look,
        )
        self._is_resumed = True
        if resumed is None:
            self.step = int(state.step) if isinstance(state, TrainState) else 0
            return state
        self.step, self.epoch = resumed.step, resumed.notes["epoch"]
        self._metrics = resumed.metrics
        self._is_ready, self._is_untaken = True, resumed.metrics is not None
        return resumed.state

    @property
    def metrics(self) -> Any:
        """The metrics of the epoch so far, to add to; None at its beginning."""
        self._is_untaken = False
        return self._metrics

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yields epoch numbers, starting at the one to resume.

        Args:
            num_epochs: The number of the last one.

        Raises:
            CheckpointError: If it is not a number, or `resume` was not called.
        """
        num_epochs = _checks.count(
            "num_epochs", num_epochs, at_least=0, error=CheckpointError
        )
        self._check_resumed()
        return self._epochs(num_epochs)

    def _epochs(self, num_epochs: int) -> Iterator[int]:
        while True:
            if not self._is_ready:
                if self.epoch >= num_epochs:
                    return
                self._begin_epoch()
            if self.epoch <= num_epochs:
                yield self.epoch
            self._is_ready = False

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of the epoch that are left, or those of the next one."""
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
        state: PyTree,
        metrics: PyTree = None,
        *,
        measured: Mapping[str, Any] | None = None,
    ) -> None:
        """Counts a batch as done, and saves if due; call it after each batch.

        Args:
            state: The state after the step.
            metrics: The metrics of the epoch so far, which the step returned: any tree
                of arrays and numbers. They are kept in the checkpoint's metadata, so
                that the state can be restored alone: they have to be small.
            measured: Values by name, from which the checkpointer finds the best step,
                as for `save`.

        Raises:
            CheckpointError: If the state holds no arrays, the metrics hold something
                else than arrays and numbers, no batch was yielded, or the state could
                not be saved.
            Preempted: After SIGTERM, which ends the process.
        """
        if not isinstance(state, TrainState):
            where = "checkpoint.Loop: step_done"
            _checks.has_arrays("state", state, where=where, error=CheckpointError)
        check_metrics(metrics, "checkpoint.Loop: step_done")
        self._check(
            self._is_given, "step_done is called once after each batch of the loop."
        )
        self._check(
            not self._is_untaken,
            "the checkpoint held metrics of the epoch so far, which were not added to. "
            "Write state, metrics = train_step(state, batch, loop.metrics).",
        )
        self._is_given = False
        self.step += 1
        self._metrics = metrics
        is_last = self._preemption.is_due()
        place, data = self._input.place()

        def metadata() -> dict[str, Any]:
            notes = notes_of(place, metrics, epoch=self.epoch)
            return {"epoch": self.epoch, KEY: notes}

        self._checkpointer.save(
            self.step,
            state,
            data=data,
            metadata=metadata,
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
            "one before: a checkpoint would miss it.",
        )

    def _check_resumed(self) -> None:
        self._check(
            self._is_resumed,
            "call state = loop.resume(state) before the first batch. Without a "
            "checkpoint it returns the state unchanged.",
        )

    def _check(self, is_right: bool, problem: str) -> None:  # noqa: FBT001
        if not is_right:
            raise CheckpointError(f"checkpoint.Loop: {problem}")
