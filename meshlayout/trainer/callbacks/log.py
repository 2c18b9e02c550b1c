"""`Log`: the metrics of epochs as CSV, JSON lines or TensorBoard's event files."""

import csv
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshlayout import _checks
from meshlayout.trainer.callbacks.callback import Callback, Logs, Trainer, scalars


@_checks.user_call
class Log(Callback):
    """Writes the values of each epoch into a file, on process 0.

    A CSV file has the columns of its first epoch. A JSON-lines file has an object per
    line, with lists for metrics with dims, and null for what is not finite. A later
    `fit` of the same callback, and a run that resumes, add to it, maybe an epoch again.

    Args:
        path: `log.csv` or `log.jsonl`, overwritten; or a directory for TensorBoard.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path, self._mode = Path(path), "w+"
        self._kind, self._tensorboard = self._path.suffix, None
        if self._kind not in (".csv", ".jsonl"):
            options = {"extra": "tensorboard", "purpose": "Log for TensorBoard"}
            self._tensorboard = _checks.require("tensorboardX", **options)
        self._file: Any = None  # while it is open

    def on_fit_start(self, trainer: Trainer) -> None:
        if jax.process_index() != 0:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._tensorboard is not None:  # a new file, beside those of other runs
            self._file = self._tensorboard.SummaryWriter(str(self._path))
        else:
            resumes = trainer.input is not None and trainer.input.is_resumed
            mode = "a+" if resumes else self._mode
            self._file = self._path.open(mode, encoding="utf-8", newline="")
        self._mode = "a+"

    def on_epoch_end(self, trainer: Trainer, epoch: int, logs: Logs) -> None:
        if self._file is None:
            return
        step, values = trainer.position.step, scalars(logs)
        row: dict[str, Any] = {"epoch": epoch, "step": step, **values}
        if self._kind == ".jsonl":
            lists = {name: np.asarray(value).tolist() for name, value in logs.items()}
            self._file.write(json.dumps({**row, **_finite(lists)}) + "\n")
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
            for name, value in values.items():
                self._file.add_scalar(name, value, step)
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


def _finite(values: Any) -> Any:
    """Returns nested values with None where JSON has no number."""
    if isinstance(values, (float, int)):
        return values if math.isfinite(values) else None
    return jax.tree.map(_finite, values)
