"""Saving the state as training goes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from meshlayout.errors import MeshLayoutError
from meshlayout.metrics import Metrics
from meshlayout.trainer.callbacks.callback import Callback
from meshlayout.trainer.callbacks.stopping import check_every, is_due


if TYPE_CHECKING:
    from meshlayout.trainer.trainer import Trainer


class Saves(Protocol):
    """What saves states."""

    def save(self, step: int, state: Any, *, metadata: Mapping[str, Any]) -> Any:
        """Saves a state, and has read it when it returns: the next step uses it up."""
        ...


class Checkpoint(Callback):
    """Saves the state every epoch, or every so many steps.

    Every process saves: a checkpointer writes each process's shards.

    Args:
        checkpointer: An object whose `save(step, state, metadata=...)` has read the
            state when it returns. The metadata is a dict: the epoch's number, and at
            the end of an epoch what was measured, `"logs"`.
        every: `"epoch"`, or a number of steps.

    Raises:
        MeshLayoutError: If the checkpointer has no `save`, or `every` is neither.
    """

    def __init__(
        self, checkpointer: Saves, every: Literal["epoch"] | int = "epoch"
    ) -> None:
        if not callable(getattr(checkpointer, "save", None)):
            msg = (
                "Checkpoint takes an object with a save(step, state, metadata=), "
                f"and got a {type(checkpointer).__name__}."
            )
            raise MeshLayoutError(msg)
        if every != "epoch":
            check_every("Checkpoint", every)
        self._checkpointer, self._every = checkpointer, every

    def on_step_end(self, trainer: "Trainer", step: int, metrics: Metrics) -> None:
        """Saves, if enough steps are done."""
        if self._every != "epoch" and is_due(trainer, int(self._every)):
            metadata = {"epoch": trainer.position.epoch}
            self._checkpointer.save(step, trainer.state, metadata=metadata)

    def on_epoch_end(
        self, trainer: "Trainer", epoch: int, logs: Mapping[str, Any]
    ) -> None:
        """Saves, if that is wanted each epoch."""
        if self._every == "epoch":
            metadata = {"epoch": epoch, "logs": dict(logs)}
            step = trainer.position.step
            self._checkpointer.save(step, trainer.state, metadata=metadata)
