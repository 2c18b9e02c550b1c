"""`Log`: metrics as CSV, JSON lines or TensorBoard's event files."""

import csv
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshlayout import _checks, _optional
from meshlayout._tracebacks import user_call
from meshlayout.errors import MeshLayoutError
from meshlayout.metrics import Metrics
from meshlayout.trainer.callbacks.callback import (
    AsyncMetrics,
    Callback,
    Logs,
    Trainer,
    is_due,
    scalars,
)


class Log(Callback):
    """Writes the values of each epoch into a file, on process 0.

    The path says how. `log.csv` gets a line per epoch with the columns of the first
    one; `log.jsonl` a JSON object per line, with lists for metrics with dims and null
    for what is not finite; any other path is a directory of TensorBoard's event files.
    A line is in the file as soon as its epoch is over. A later `fit` of the same
    callback, and a run that resumes, add to the file; a resumed run writes the lines of
    steps that it repeats again.

    Args:
        path: The file or directory; it is overwritten, and created.
        every: Also writes the values of the epoch so far, after every so many steps,
            once the device has computed them: not for CSV, and for TensorBoard under
            names that begin with `steps/`.
    """

    @user_call
    def __init__(
        self, path: str | os.PathLike[str], *, every: int | None = None
    ) -> None:
        self._path = Path(path)
        self._kind = self._path.suffix
        self._every, self._tensorboard = every, None
        if every is not None:
            self._every = _checks.count("every", every, where="Log")
            if self._kind == ".csv":
                msg = "Log: every= is for JSON lines (log.jsonl) and TensorBoard."
                raise MeshLayoutError(msg)
        if self._kind not in (".csv", ".jsonl"):
            options = {"extra": "tensorboard", "purpose": "Log for TensorBoard"}
            self._tensorboard = _optional.require("tensorboardX", **options)
        self._pending, self._mode = AsyncMetrics(), "w+"
        self._file: Any = None  # while it is open

    def on_fit_start(self, trainer: Trainer) -> None:
        """Opens the file."""
        if jax.process_index() != 0:
            return
        resumes = trainer.input is not None and trainer.input.is_resumed
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._tensorboard is not None:  # a new file, beside those of other runs
            self._file = self._tensorboard.SummaryWriter(str(self._path))
        else:
            mode = "a+" if resumes else self._mode
            self._file = self._path.open(mode, encoding="utf-8", newline="")
        self._mode = "a+"

    def on_step_end(self, trainer: Trainer, step: int, metrics: Metrics) -> None:
        """Writes the values that are ready."""
        if self._file is not None and self._every:
            if is_due(trainer, self._every):
                self._pending.add(trainer.position, metrics)
            self._write_steps(wait=False)

    def on_epoch_end(self, trainer: Trainer, epoch: int, logs: Logs) -> None:
        """Writes the epoch's values."""
        if self._file is not None:
            self._write_steps(wait=True)
            self._write(epoch, trainer.position.step, logs)
            self._file.flush()

    def _write_steps(self, *, wait: bool) -> None:
        for position, values in self._pending.read(wait=wait):
            self._write(position.epoch, position.step, values, prefix="steps/")

    def _write(self, epoch: int, step: int, values: Logs, prefix: str = "") -> None:
        row: dict[str, Any] = {"epoch": epoch, "step": step, **scalars(values)}
        if self._kind == ".jsonl":
            row |= {
                x: _finite(np.asarray(value).tolist()) for x, value in values.items()
            }
            self._file.write(json.dumps(row) + "\n")
        elif self._kind == ".csv":
            self._file.seek(0)
            # The columns of an existing file count, not those of this run.
            columns = next(csv.reader(self._file), None)
            self._file.seek(0, os.SEEK_END)
            writer = csv.DictWriter(self._file, columns or [*row])
            if columns is None:
                writer.writeheader()
            with _checks.noted(f"in writing {str(self._path)!r}"):
                writer.writerow(row)
        else:
            for name, value in scalars(values).items():
                self._file.add_scalar(prefix + name, value, step)

    def close(self) -> None:
        """Closes the file."""
        self._pending.pending.clear()
        if self._file is not None:
            self._file.close()
        self._file = None


def _finite(value: list[Any] | float) -> Any:
    """Returns a number or lists of them, with None where JSON has no number."""
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if math.isfinite(value) else None
