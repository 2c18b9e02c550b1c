"""Saving the run as training goes."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from meshlayout import _checks
from meshlayout.checkpoint.checkpointer import Checkpointer
from meshlayout.checkpoint.resume import KEY, notes_of
from meshlayout.errors import MeshLayoutError
from meshlayout.metrics import Metrics
from meshlayout.trainer.callbacks.callback import Callback, is_due, scalars


if TYPE_CHECKING:
    from meshlayout.trainer.trainer import Trainer


class Checkpoint(Callback):
    """Saves the run every epoch or so many steps, at its end, and at preemption.

    A checkpoint holds the state, the place in the data, and as metadata the epoch, its
    values (`"logs"`) at the end of an epoch, and what `fit(resume=True)` needs
    besides: the history, and the metrics of the epoch so far.
    The state alone comes back with `checkpointer.restore(like=state)`.

    A checkpointer with `every=` or `every_s=` of its own saves where both are due. One
    with `best=` saves the end of every epoch, whatever is due, with what was measured;
    within an epoch nothing is. An epoch that was stopped, and not validated, has no
    such metric, and is not the best.

    Whatever its place among the callbacks, it is called after those that do not save.

    Args:
        checkpointer: Where to save; it is not closed.
        every: `"epoch"`, or a number of steps.

    Attributes:
        checkpointer: Where it saves.

    Raises:
        MeshLayoutError: If `checkpointer` is not one, or `every` is neither.
    """

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
        # The metric of `best=`.
        best = getattr(checkpointer, "best", None)
        self._best: str | None = best[0] if best else None
        self._saved_at: tuple[int, bool] | None = None

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Requests that positions in the data be recorded."""
        self._saved_at = None
        if trainer.input is not None:
            trainer.input.is_saved = True

    def on_step_end(self, trainer: "Trainer", step: int, metrics: Metrics) -> None:
        """Saves if a multiple of `every` steps was reached."""
        if self._every != "epoch" and is_due(trainer, int(self._every)):
            self._save(trainer, metrics)

    def on_epoch_end(
        self, trainer: "Trainer", epoch: int, logs: Mapping[str, Any]
    ) -> None:
        """Saves if `every` is `"epoch"`, or the checkpointer keeps the best step."""
        if self._best is not None:
            self._save(trainer, None, force=True)
        elif self._every == "epoch":
            self._save(trainer, None)

    def on_fit_end(self, trainer: "Trainer") -> None:
        """Saves the end, and waits for it, so that a failure is raised here."""
        now = trainer.position
        if now.step_in_fit and (self._saved_at or (None,))[0] != now.step:
            self.save_now(trainer, None)
        self.checkpointer.wait()

    def save_now(self, trainer: "Trainer", metrics: Metrics | None) -> None:
        """Saves, due or not, and waits for it.

        Args:
            trainer: The trainer.
            metrics: Those of the epoch so far; None at its end.
        """
        if self._saved_at != (trainer.position.step, metrics is None):
            self._save(trainer, metrics, force=True)
        self.checkpointer.wait()

    def _save(
        self,
        trainer: "Trainer",
        metrics: Metrics | None,
        *,
        force: bool = False,
    ) -> None:
        now, history, source = trainer.position, trainer.history, trainer.input
        assert source is not None
        place, data = source.place()
        # The history has a NaN for what was not measured in this epoch: no best step.
        logs = {name: history[name][-1] for name in history} if metrics is None else {}
        measured = scalars(logs)
        if metrics is None and self._best is not None and trainer.stopped:
            measured.setdefault(self._best, math.nan)

        def metadata() -> dict[str, Any]:
            notes = notes_of(
                place,
                metrics,
                is_end=metrics is None,
                stopped=trainer.stopped,
                batch_rows=source.placer.size,
                pads=source.placer.pad,
                position={
                    "step_in_epoch": now.step_in_epoch,
                    "steps_per_epoch": now.steps_per_epoch,
                    "examples_in_epoch": now.examples_in_epoch,
                },
                history={"epochs": history.epochs, "values": history.to_dict()},
            )
            ends = {"logs": logs} if metrics is None else {}
            return {"epoch": now.epoch, KEY: notes, **ends}

        if self.checkpointer.save(
            now.step,
            trainer.state,
            data=data,
            metadata=metadata,
            metrics=measured or None,
            force=force,
        ):
            self._saved_at = now.step, metrics is None
