"""`Log`: metrics as CSV, JSON lines or TensorBoard's event files."""

import csv
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import jax
import numpy as np

from meshlayout import _checks, _optional
from meshlayout.errors import MeshLayoutError
from meshlayout.metrics import Metrics
from meshlayout.trainer.callbacks.callback import (
    AsyncMetrics,
    Callback,
    is_due,
    scalars,
)


if TYPE_CHECKING:
    from meshlayout.trainer.trainer import Trainer


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

    Raises:
        MeshLayoutError: If an argument is wrong, tensorboardX is not installed, or
            nothing can be written to the path; and at the end of an epoch, if it has a
            value without a column.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, every: int | None = None
    ) -> None:
        if not isinstance(path, (str, os.PathLike)) or not str(path):
            msg = f"Log: path must be a path, got {_checks.shown(path)}."
            raise MeshLayoutError(msg)
        self._path, self._every = Path(path), every
        self._kind = _KINDS.get(self._path.suffix, _EventFiles)
        if every is not None:
            self._every = _checks.count("every", every, where="Log")
            if self._kind is _CSVFile:
                msg = "Log: every= is for JSON lines (log.jsonl) and TensorBoard."
                raise MeshLayoutError(msg)
        if self._kind is _EventFiles:
            _EventFiles.require_package()
        self._pending = AsyncMetrics()
        self._has_begun = False
        self._file: Any = None  # while it is open

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Opens the file."""
        if jax.process_index() != 0:
            return
        is_resumed = trainer.input is not None and trainer.input.is_resumed
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._kind(self._path, append=self._has_begun or is_resumed)
        except OSError as error:
            msg = f"Log: cannot write {str(self._path)!r}: {error}."
            raise MeshLayoutError(msg) from error
        self._has_begun = True

    def on_step_end(self, trainer: "Trainer", step: int, metrics: Metrics) -> None:
        """Writes the values that are ready."""
        if self._file is not None and self._every is not None:
            if is_due(trainer, self._every):
                self._pending.add(trainer.position, metrics)
            self._write_steps(wait=False)

    def on_epoch_end(
        self, trainer: "Trainer", epoch: int, logs: Mapping[str, Any]
    ) -> None:
        """Writes the epoch's values."""
        if self._file is not None:
            self._write_steps(wait=True)
            self._file.write(epoch, trainer.position.step, logs, is_epoch=True)

    def _write_steps(self, *, wait: bool) -> None:
        for position, values in self._pending.read(wait=wait):
            self._file.write(position.epoch, position.step, values, is_epoch=False)

    def close(self) -> None:
        """Closes the file."""
        self._pending.clear()
        if self._file is not None:
            self._file.close()
        self._file = None


class _CSVFile:
    def __init__(self, path: Path, *, append: bool) -> None:
        self._path = path
        self._file: TextIO = path.open("a+" if append else "w+", newline="")
        self._file.seek(0)
        # The columns of an existing file count, not those of this run.
        self._columns = next(csv.reader(self._file), [])
        self._file.seek(0, os.SEEK_END)

    def write(
        self, epoch: int, step: int, values: Mapping[str, Any], *, is_epoch: bool
    ) -> None:
        row = {"epoch": epoch, "step": step, **scalars(values)}
        writer = csv.writer(self._file)
        if not self._columns:
            self._columns = list(row)
            writer.writerow(self._columns)
        extra = [name for name in row if name not in self._columns]
        if extra:
            msg = (
                f"Log: {', '.join(map(repr, extra))} is not a column of "
                f"{str(self._path)!r}, which has {', '.join(map(repr, self._columns))}."
                " Write to another file, or to one of JSON lines, which may differ."
            )
            raise MeshLayoutError(msg)
        writer.writerow([row.get(name, "") for name in self._columns])
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _JSONLines:
    def __init__(self, path: Path, *, append: bool) -> None:
        self._file: TextIO = path.open("a" if append else "w", encoding="utf-8")

    def write(
        self, epoch: int, step: int, values: Mapping[str, Any], *, is_epoch: bool
    ) -> None:
        plain = {name: _finite(np.asarray(x).tolist()) for name, x in values.items()}
        row = {"epoch": epoch, "step": step, **plain}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _finite(value: Any) -> Any:
    """Returns a number or lists of them, with None where JSON has no number."""
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if math.isfinite(value) else None


class _EventFiles:
    @staticmethod
    def require_package() -> Any:
        return _optional.require(
            "tensorboardX", extra="tensorboard", purpose="Log for TensorBoard"
        )

    def __init__(self, path: Path, *, append: bool) -> None:
        # A new file in the directory, in which those of earlier runs stay.
        self._writer = self.require_package().SummaryWriter(str(path))

    def write(
        self, epoch: int, step: int, values: Mapping[str, Any], *, is_epoch: bool
    ) -> None:
        for name, value in scalars(values).items():
            self._writer.add_scalar(name if is_epoch else f"steps/{name}", value, step)
        if is_epoch:
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


_KINDS: dict[str, Any] = {".csv": _CSVFile, ".jsonl": _JSONLines}
