"""A trace of some steps for TensorBoard, XProf or Perfetto."""

from pathlib import Path
from typing import TYPE_CHECKING

import jax

from meshlayout import _checks
from meshlayout.metrics import Metrics
from meshlayout.trainer.callbacks.callback import Callback
from meshlayout.trainer.callbacks.loggers import as_path


if TYPE_CHECKING:
    from meshlayout.trainer.trainer import Trainer


class ProfilerTrace(Callback):
    """Traces a window of steps with `jax.profiler`, on process 0.

    The window begins and ends when the device has finished the steps before it and in
    it, so these two moments wait. The first steps compile: leave them out.

    Args:
        directory: Where the trace goes.
        start_step: The first step of the window; a `fit` counts its steps from 1.
        num_steps: How many steps it has.

    Raises:
        MeshLayoutError: If a number is not a positive integer, or the directory is not
            a path.
    """

    def __init__(
        self, directory: str | Path, *, start_step: int = 10, num_steps: int = 5
    ) -> None:
        start_step = _checks.count("start_step", start_step, where="ProfilerTrace")
        num_steps = _checks.count("num_steps", num_steps, where="ProfilerTrace")
        self._directory = as_path("ProfilerTrace", "directory", directory)
        self._before, self._last = start_step - 1, start_step + num_steps - 1
        self._is_tracing = False

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Begins the window, if it begins with the first step."""
        if self._before == 0:
            self._start(trainer)

    def on_step_end(self, trainer: "Trainer", step: int, metrics: Metrics) -> None:
        """Begins or ends the window."""
        now = trainer.position.step_in_fit
        if self._is_tracing and now >= self._last:
            jax.block_until_ready((trainer.state, metrics))
            self.close()
        elif 0 <= now - self._before < trainer.steps_in_call and self._before:
            self._start(trainer)

    def _start(self, trainer: "Trainer") -> None:
        if jax.process_index() == 0:
            jax.block_until_ready(trainer.state)
            jax.profiler.start_trace(self._directory)
            self._is_tracing = True

    def close(self) -> None:
        """Ends the window if the training is over before it is."""
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()
