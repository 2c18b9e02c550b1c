"""`Loop`: makes a hand-written training loop resumable.

The loop owns what a checkpoint needs besides the state: the step and epoch numbers and
the position in the data. It insists on the order of calls (`resume`, a batch,
`step_done`), since any other order would save a position that does not belong to the
state: a batch would be trained on twice, or never.
"""

from collections.abc import Callable, Iterator, Mapping
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
    """A hand-written training loop that is saved, and resumes where it stopped.

    Use this if `Trainer.fit` does not suit you. It yields the batches, counts steps and
    epochs, saves when the checkpointer's schedule says so, and resumes from the newest
    intact checkpoint: the state, the metrics of the epoch so far, and the data at the
    very batch. After a SIGTERM to any process it saves at the end of the running step
    and ends the process with status 75 (`EXIT_STATUS`).

    Args:
        checkpointer: Where to save, and how often; the loop does not close it.
        data: A distributed dataset or any other iterable of batches, iterated anew in
            each epoch; a function that returns one; or an iterator. Iterators without
            `get_state` and `set_state` are read up to their position, and must yield
            the same batches in each run.

    Attributes:
        step: The number of steps so far, including earlier runs; the number of the
            next checkpoint.
        epoch: The current epoch, from 1; 0 before the first one.

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
        # Whether a pass over the data has begun, a batch was yielded and is not counted
        # as done, and restored metrics have not been read.
        self._is_ready = self._is_given = self._is_untaken = False

    def __enter__(self) -> Self:
        self._is_entered = True
        self._preemption.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._is_entered = False
        self._preemption.__exit__(*exception)

    def resume(
        self,
        state: T,
        train_step: Callable[[T, Any, Any], tuple[T, Any]] | None = None,
    ) -> T:
        """Resumes from the newest intact checkpoint, if there is one.

        Args:
            state: The state that training begins with. It also defines the structure
                and the layouts of the state to restore.
            train_step: The step, which you call as `train_step(state, batch, metrics)`.
                If there is a checkpoint, it is called once, with metrics None, to see
                the structure of the metrics, and any arrays that it adds to the state,
                such as a moving average. That call uses `state` up. None for a step
                that has no metrics and adds nothing.

        Returns:
            The state to continue with; `state` itself if there is no checkpoint.

        Raises:
            CheckpointError: If the checkpoint cannot be resumed from.
            RestoreDiffError: If the saved state differs from `state`.

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
                "the checkpoint holds metrics of the epoch so far, whose structure is "
                "needed. Write loop.resume(state, train_step).",
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
        """The metrics of the epoch so far, to be updated; None at its beginning."""
        self._is_untaken = False
        return self._metrics

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yields epoch numbers, starting at the one to resume.

        Args:
            num_epochs: The number of the last epoch.

        Raises:
            CheckpointError: If it is not a number, or `resume` was not called.
        """
        # Checked here, not in the generator below, which starts at its first `next`.
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
            # Also after a `break` out of the batches: the epoch is over.
            self._is_ready = False

    def __iter__(self) -> Iterator[Any]:
        """Yields the remaining batches of the epoch, or those of the next one."""
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
        """Counts a batch as done, and saves if a save is due; call it after each batch.

        Args:
            state: The state after the step.
            metrics: The metrics of the epoch so far, from the step: any tree of arrays
                and numbers. They have to be small, as they are kept in the metadata of
                the checkpoint, so that the state can be restored alone.
            measured: Values by name, from which the checkpointer finds the best step;
                `metrics` of `Checkpointer.save`.

        Raises:
            CheckpointError: If the state holds no arrays, the metrics hold anything but
                arrays and numbers, no batch was yielded before, or a save failed.
            Preempted: After SIGTERM; it ends the process.
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
            "the checkpoint held metrics of the epoch so far, which were not read. "
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
            # The process ends now: an error of the save must still be raised.
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
            "another batch was requested before step_done(state) was called for the "
            "previous one, which a checkpoint would miss.",
        )

    def _check_resumed(self) -> None:
        self._check(
            self._is_resumed,
            "call state = loop.resume(state) before the first batch. It returns the "
            "state unchanged if there is no checkpoint.",
        )

    def _check(self, is_right: bool, problem: str) -> None:  # noqa: FBT001
        if not is_right:
            raise CheckpointError(f"checkpoint.Loop: {problem}")
