"""`Checkpoint`: saves the run during training, and resumes it for `fit(resume=True)`.

A step may add arrays to the state (a moving average, a loss scale), and only it knows
the structure of its metrics. So resuming calls it once on a first batch, to see both;
the values come from the checkpoint, which holds the epoch's metrics, too.
"""

import math
from dataclasses import replace
from typing import Any, Literal

import jax

from meshlayout import _checks
from meshlayout.checkpoint.checkpointer import Checkpointer
from meshlayout.checkpoint.load import Request, abstract_leaf
from meshlayout.checkpoint.orbax import SavedStep
from meshlayout.errors import CheckpointError, MeshLayoutError
from meshlayout.metrics import Metrics
from meshlayout.trainer.callbacks.callback import Callback, Logs, Trainer
from meshlayout.trainer.epochs import TrainerInput
from meshlayout.trainer.history import scalars


# The metrics of the epoch so far, beside the state.
_METRICS = "epoch_metrics"


@_checks.user_call
class Checkpoint(Callback):
    """Saves the run every epoch or every n steps, at its end, and on preemption.

    A checkpoint holds the state, the position in the data, and metadata: the epoch, its
    values (`"logs"`, at its end), and what `fit(resume=True)` needs. To restore the
    state alone, call `checkpointer.restore(state)`.

    If the checkpointer also has `every=`, both must be due. If it has `best=`, every
    epoch's end is saved; an epoch without validation is never the best.

    Args:
        checkpointer: Where to save; the callback does not close it.
        every: `"epoch"`, or a number of steps.
    """

    def __init__(
        self, checkpointer: Checkpointer, every: Literal["epoch"] | int = "epoch"
    ) -> None:
        if not isinstance(checkpointer, Checkpointer):
            msg = "Checkpoint: checkpointer must be an ml.Checkpointer(directory), got"
            raise MeshLayoutError(f"{msg} {_checks.shown(checkpointer)}.")
        if every != "epoch":
            every = _checks.count("every", every, where="Checkpoint")
        self.checkpointer, self._every = checkpointer, every
        self._monitor = (checkpointer.best or [""])[0]
        # The step of the last save, and whether an epoch ended there.
        self._saved_at: tuple[int, bool] | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        self._saved_at, first = None, trainer.position.step
        if trainer.position.is_resumed:
            return
        self.checkpointer.wait()
        later = [step for step in self.checkpointer.all_steps() if step > first]
        if later:
            raise CheckpointError(
                f"fit begins at step {first}, but {self.checkpointer.directory} holds "
                f"steps of another run, up to {later[-1]}. Give resume=True to resume "
                "from there, or save to another directory."
            )

    def on_step_end(self, trainer: Trainer, step: int, metrics: Metrics) -> None:
        every = 0 if self._every == "epoch" else int(self._every)
        # With `steps_per_call`, the multiple need not be the call's last step.
        if every and step // every > (step - trainer.steps_in_call) // every:
            self._save(trainer, metrics)

    def on_epoch_end(self, trainer: Trainer, epoch: int, logs: Logs) -> None:
        if self._monitor or self._every == "epoch":
            self._save(trainer, None, force=bool(self._monitor))

    def on_fit_end(self, trainer: Trainer) -> None:
        position = trainer.position
        if position.step_in_fit and (self._saved_at or (None,))[0] != position.step:
            self._save(trainer, None, force=True)
        self.checkpointer.wait()

    def save_now(self, trainer: Trainer, metrics: Metrics | None) -> None:
        """Saves now, and waits for it; metrics are None at an epoch's end."""
        if self._saved_at != (trainer.position.step, metrics is None):
            self._save(trainer, metrics, force=True)
        self.checkpointer.wait()

    def _save(
        self, trainer: Trainer, metrics: Metrics | None, *, force: bool = False
    ) -> None:
        step, history, source = trainer.position.step, trainer.history, trainer.input
        assert source is not None
        place, data = source.place()
        is_end = metrics is None
        # A value that this epoch lacks is NaN in the history, which is never the best.
        logs = {name: history[name][-1] for name in history} if is_end else {}
        measured = scalars(logs)
        if is_end and self._monitor and trainer.stopped:
            # Stopped in its first epoch, without validation: no history has the name.
            measured.setdefault(self._monitor, math.nan)
        counts = "step_in_epoch", "steps_per_epoch", "examples_in_epoch"
        notes = {
            "place": place,
            "is_end": is_end,
            "stopped": trainer.stopped,
            "batch_rows": source.size,
            "position": {name: getattr(trainer.position, name) for name in counts},
            "history": {"epochs": history.epochs, "values": dict(history)},
        }
        metadata = {"epoch": trainer.position.epoch, "logs": logs, "resume": notes}
        options: dict[str, Any] = {"metadata": metadata, "metrics": measured or None}
        options |= {"data": data, "force": force}
        if jax.tree.leaves(metrics):
            options["_beside"] = {_METRICS: metrics}
        if self.checkpointer.save(step, trainer.state, **options):
            self._saved_at = step, is_end

    def resume(self, trainer: Trainer, source: TrainerInput) -> Metrics | None:
        """Restores a trainer from the newest intact checkpoint, if there is one.

        Returns the metrics of the epoch so far; None if it is over.
        """
        abstract: list[Any] = []  # the state and the metrics after a step

        def read(saved: SavedStep) -> tuple[SavedStep, Any, Metrics | None]:
            if "place" not in (saved.facts["metadata"] or {}).get("resume", {}):
                msg = f"{saved.path} holds a state, but not its position in the data."
                hint = "Restore it with Checkpointer.restore."
                raise CheckpointError(f"{msg} {hint}")
            if not abstract:  # else an older checkpoint is tried
                # Padded as before, so that the same program computes the same bits.
                source.size = saved.facts["metadata"]["resume"]["batch_rows"]
                (first,), count = next(source.groups()), trainer._steps.group_size
                batches = first.batch if count == 1 else [first.batch] * count
                result = trainer.train_step(trainer.state, batches, None)
                abstract.extend(jax.tree.map(abstract_leaf, result))
            state, metrics = abstract
            # A metric without arrays is what the first step returned.
            if _METRICS in saved.facts["items"]:
                metrics = saved.load(Request(like=metrics), _METRICS)
            return saved, saved.load(Request(like=state)), metrics

        checkpointer = self.checkpointer
        newest = checkpointer.newest(lambda step: checkpointer.read(step, read))
        if newest is None:
            return None
        saved, trainer.state, metrics = newest
        notes = saved.facts["metadata"]["resume"]
        history, position = trainer.history, trainer.position
        source.resume(notes["place"], saved.facts["data"], is_end=notes["is_end"])
        past = notes["history"]
        history.clear()
        history.epochs = past["epochs"]
        history.update(past["values"])
        trainer.position = replace(
            position,
            epoch=len(history.epochs),
            last_epoch=position.last_epoch - position.epoch,
            step=saved.number,
            is_resumed=True,
            **notes["position"],
        )
        if not notes["is_end"]:
            return metrics
        trainer.stopped = history.stopped = notes["stopped"]
        return None
