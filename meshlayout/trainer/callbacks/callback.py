"""`Callback`: the moments of training at which a user's code can run.

Callbacks run while the device computes: reading a metric there would make the host wait
for it, and leave the device without work. So those that show, log or watch values put
them into `AsyncMetrics`, and read each one when the device has computed it.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from meshlayout.metrics import Metrics, Throughput
from meshlayout.metrics.collection import one_copy
from meshlayout.trainer.epochs import TrainingPosition


if TYPE_CHECKING:
    from meshlayout.trainer.trainer import Trainer


class Callback:
    """Code that a trainer calls as it goes; override what you need.

    Callbacks run in the order they were passed, on every process. The trainer they get
    has `state`, `position`, `history` and `stop(reason)`. The next step donates the
    state, so copy the arrays that you keep.

    Example:
        >>> class Curriculum(Callback):
        ...     def on_epoch_end(self, trainer, epoch, logs):
        ...         if logs["loss"] < 0.1:
        ...             trainer.stop("the loss is below 0.1")
    """

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Called before the first epoch of a `fit`."""

    def on_epoch_start(self, trainer: "Trainer", epoch: int) -> None:
        """Called before the first step of an epoch; epochs are numbered from 1."""

    def on_step_end(self, trainer: "Trainer", step: int, metrics: Metrics) -> None:
        """Called after each call of the train step, which may still be running.

        Args:
            trainer: The trainer.
            step: How many steps the state has made.
            metrics: Those of the epoch so far, on the device: reading a value waits.
        """

    def on_validation_start(self, trainer: "Trainer") -> None:
        """Called after an epoch's last step, before validation, if there is any."""

    def on_validation_step_end(self, trainer: "Trainer", step: int) -> None:
        """Called after each batch of validation; `step` of them were measured."""

    def on_epoch_end(
        self, trainer: "Trainer", epoch: int, logs: Mapping[str, Any]
    ) -> None:
        """Called after an epoch and its validation.

        Args:
            trainer: The trainer; its history has the epoch already.
            epoch: The epoch's number.
            logs: The epoch's values as floats; those of validation begin with `val_`.
        """

    def on_fit_end(self, trainer: "Trainer") -> None:
        """Called after the last epoch, unless an error or Ctrl-C ended the `fit`."""

    def close(self) -> None:
        """Called last, however the `fit` ended: the place to close files."""


def is_due(trainer: "Trainer", every: int) -> bool:
    """Returns whether the last call took a step whose number divides by `every`."""
    step = trainer.position.step
    return step // every > (step - trainer.steps_in_call) // every


class AsyncMetrics:
    """A queue of metrics, each read once the device has computed its values.

    The values are computed from this process's copy, so that processes may look at
    different times. `Throughput` reads the clock, and waits: it is left out.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[TrainingPosition, dict[str, Any]]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, position: TrainingPosition, metrics: Metrics) -> None:
        """Adds metrics, on the device, and the position at which they were measured."""
        local = {
            name: jax.tree.map(one_copy, metrics.metric(name))
            for name in metrics
            if not isinstance(metrics.metric(name), Throughput)
        }
        self._pending.append((position, Metrics(local).compute()))

    def read(
        self, *, wait: bool = False
    ) -> Iterator[tuple[TrainingPosition, dict[str, float]]]:
        """Yields the scalar values that are ready, oldest first; all with `wait`."""
        while self._pending and (wait or _is_ready(self._pending[0][1])):
            position, values = self._pending.popleft()
            yield position, scalars(values)

    def clear(self) -> None:
        """Empties the queue."""
        self._pending.clear()


def _is_ready(values: dict[str, Any]) -> bool:
    # A value that is not a JAX array is always ready.
    leaves = jax.tree.leaves(values)
    return all(getattr(leaf, "is_ready", lambda: True)() for leaf in leaves)


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the values without dims, as floats."""
    return {name: float(value) for name, value in values.items() if not np.ndim(value)}
