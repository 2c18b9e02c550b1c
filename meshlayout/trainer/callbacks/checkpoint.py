"""`Checkpoint`: saves the run during training, and for `fit(resume=True)`."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax

from meshlayout import _checks
from meshlayout._tracebacks import user_call
from meshlayout.checkpoint.checkpointer import Checkpointer
from meshlayout.errors import CheckpointError, MeshLayoutError
from meshlayout.metrics import Metrics
from meshlayout.trainer.callbacks.callback import Callback, is_due, scalars
from meshlayout.trainer.resume import KEY, METRICS, notes_of


if TYPE_CHECKING:
    from meshlayout.trainer.trainer import Trainer


class Checkpoint(Callback):
    """Saves the run every epoch or every n steps, at its end, and at preemption.

    A checkpoint holds the state and the position in the data. Its metadata has the
    epoch, the epoch's values (`"logs"`) if it is over, and whatever else
    `fit(resume=True)` needs, such as the history; the metrics of the epoch so far are a
    tree of their own. `checkpointer.restore(like=state)` restores the state alone.

    If the checkpointer has `every=`, too, a save happens when both are due. If it has
    `best=`, the end of every epoch is saved, due or not, with the values of the epoch;
    within an epoch there are none. An epoch that was stopped and not validated has no
    value for `best`, and is never the best.

    It is called after all callbacks that do not save, wherever it is among them.

    Args:
        checkpointer: Where to save; the callback does not close it.
        every: `"epoch"`, or a number of steps.

    Attributes:
        checkpointer: The checkpointer.
    """

    @user_call
    def __init__(
        self, checkpointer: Checkpointer, every: Literal["epoch"] | int = "epoch"
    ) -> None:
        is_class = isinstance(checkpointer, type)
        if is_class or not callable(getattr(checkpointer, "save", None)):
            msg = (
                "Checkpoint: checkpointer must be an ml.Checkpointer(directory), got "
                f"{_checks.shown(checkpointer)}."
            )
            raise MeshLayoutError(msg)
        if every != "epoch":
            hint = "Or write every='epoch'."
            every = _checks.count("every", every, where="Checkpoint", hint=hint)
        self.checkpointer, self._every = checkpointer, every
        best = getattr(checkpointer, "best", None)
        self._best: str | None = best[0] if best else None  # the name of a metric
        # The step of the last save, and whether an epoch ended there.
        self._saved_at: tuple[int, bool] | None = None

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Raises CheckpointError if a new run would mix its steps with another's."""
        self._saved_at, first = None, trainer.position.step
        if trainer.input is not None and trainer.input.is_resumed:
            return
        self.checkpointer.wait()
        later = [step for step in self.checkpointer.all_steps() if step > first]
        if later:
            has = f"step {later[0]}"
            if len(later) > 1:
                has = f"{len(later)} steps up to {later[-1]}"
            msg = (
                f"fit begins at step {first}, but {self.checkpointer.directory} holds "
                f"{has} of another run: resume=True would later resume from step "
                f"{later[-1]}, not from this run. Give resume=True to resume from "
                "there now, or save to another directory."
            )
            raise CheckpointError(msg)

    def on_step_end(self, trainer: "Trainer", step: int, metrics: Metrics) -> None:
        """Saves if a multiple of `every` steps was reached."""
        if self._every != "epoch" and is_due(trainer, int(self._every)):
            self._save(trainer, metrics)

    def on_epoch_end(
        self, trainer: "Trainer", epoch: int, logs: Mapping[str, Any]
    ) -> None:
        """Saves if `every` is `"epoch"`, or the checkpointer keeps the best step."""
        if self._best is not None or self._every == "epoch":
            self._save(trainer, None, force=self._best is not None)

    def on_fit_end(self, trainer: "Trainer") -> None:
        """Saves the end and waits for it, so that a failure is raised here."""
        position = trainer.position
        if position.step_in_fit and (self._saved_at or (None,))[0] != position.step:
            self._save(trainer, None, force=True)
        self.checkpointer.wait()

    def save_now(self, trainer: "Trainer", metrics: Metrics | None) -> None:
        """Saves, due or not, and waits for it; metrics are None at an epoch's end."""
        if self._saved_at != (trainer.position.step, metrics is None):
            self._save(trainer, metrics, force=True)
        self.checkpointer.wait()

    def _save(
        self, trainer: "Trainer", metrics: Metrics | None, *, force: bool = False
    ) -> None:
        step, history, source = trainer.position.step, trainer.history, trainer.input
        used = None if source is None else source.used
        assert used is not None
        assert used.place is not None
        place, data = used.place
        is_end = metrics is None
        # A value that this epoch lacks is NaN in the history, which is never the best.
        logs = {name: history[name][-1] for name in history} if is_end else {}
        measured = scalars(logs)
        if is_end and self._best is not None and trainer.stopped:
            # Stopped in its first epoch, without validation: no history has the name.
            measured.setdefault(self._best, math.nan)

        def metadata() -> dict[str, Any]:
            notes = notes_of(trainer, place, is_end=is_end)
            ends = {"logs": logs} if is_end else {}
            return {"epoch": trainer.position.epoch, KEY: notes, **ends}

        if self.checkpointer.save(
            step,
            trainer.state,
            data=data,
            metadata=metadata,
            metrics=measured or None,
            force=force,
            _beside={METRICS: metrics} if jax.tree.leaves(metrics) else None,
        ):
            self._saved_at = step, is_end
