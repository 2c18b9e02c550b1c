"""Callbacks that log metrics: CSV, JSON lines, TensorBoard."""

import csv
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import jax
import numpy as np

from meshlayout import _checks, _optional
from meshlayout.errors import MeshLayoutError
from meshlayout.metrics import Metrics
from meshlayout.trainer.callbacks.async_metrics import AsyncMetrics, numbers
from meshlayout.trainer.callbacks.callback import Callback
from meshlayout.trainer.callbacks.stop_conditions import is_due


if TYPE_CHECKING:
    from meshlayout.trainer.trainer import Trainer


def as_path(where: str, name: str, path: str | os.PathLike[str]) -> Path:
    """Returns a path, or raises MeshLayoutError if it is not one.

    Args:
        where: The callback.
        name: The parameter.
        path: What the user gave.
    """
    if not isinstance(path, (str, os.PathLike)) or not str(path) or "\0" in str(path):
        msg = f"{where}: {name} must be a path, got {_checks.shown(path)}."
        raise MeshLayoutError(msg)
    return Path(path)


class _LogFile:
    """A text file that every `fit` opens, and only the first one overwrites.

    Args:
        where: The callback.
        path: The file.
        append: Whether the first `fit` keeps the existing content.
    """

    def __init__(
        self, where: str, path: str | os.PathLike[str], *, append: bool
    ) -> None:
        self.path = as_path(where, "path", path)
        if self.path.is_dir():
            msg = f"{where}: {str(path)!r} is a directory; give a file in it."
            raise MeshLayoutError(msg)
        self._where = where
        self._append = _checks.flag("append", append, where=where)
        self.file: TextIO | None = None

    def open(
        self,
        trainer: "Trainer",
        place_of: Callable[[str], tuple[int, int]],
        every: int | None = None,
    ) -> TextIO:
        """Opens the file, after the lines that this object wrote before.

        A resumed run writes after the lines of the steps that are in its checkpoint;
        later lines are removed.

        Args:
            trainer: The trainer.
            place_of: Returns the epoch and the step of a line.
            every: How many steps are between two lines inside an epoch.

        Raises:
            MeshLayoutError: If the file cannot be written.
        """
        is_resumed = trainer.input is not None and trainer.input.is_resumed
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if is_resumed and self.path.exists():
                self._cut(trainer, place_of, every)
                self._append = True
            mode = "a" if self._append else "w"
            self.file = self.path.open(mode, encoding="utf-8", newline="")
        except OSError as error:
            msg = f"{self._where}: cannot write {str(self.path)!r}: {error}."
            raise MeshLayoutError(msg) from error
        self._append = True
        return self.file

    def _cut(
        self,
        trainer: "Trainer",
        place_of: Callable[[str], tuple[int, int]],
        every: int | None,
    ) -> None:
        """Removes the lines after the position that a run resumes from."""
        text = self.path.read_text(encoding="utf-8")
        done, last = len(trainer.history.epochs), trainer.position.step
        lines: dict[Any, str] = {}
        for index, line in enumerate(text.splitlines(keepends=True)):
            epoch, step = place_of(line) if line.endswith("\n") else (done + 2, 0)
            if epoch <= done:
                lines[index] = line
            elif epoch == done + 1 and step <= last and every and not step % every:
                # The second line of a step is the epoch's, which is still to come.
                lines.setdefault((epoch, step), line)
        self.path.write_text("".join(lines.values()), encoding="utf-8", newline="")

    def close(self) -> None:
        """Closes the file, if it is open."""
        if self.file is not None:
            self.file.close()
        self.file = None


class CSVLogger(Callback):
    """Writes a line per epoch into a CSV file, on process 0.

    The columns are the epoch, the step, and what is measured in the first epoch that is
    written, the learning rate among it; metrics with dims are left out. Each line is
    in the file when its epoch is over.

    Args:
        path: The file, overwritten; its folder is created.
        append: Whether lines are added to the file instead.

    Raises:
        MeshLayoutError: At the end of an epoch, if its values differ from the columns.
    """

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        self._file = _LogFile("CSVLogger", path, append=append)
        self._columns: list[str] = []

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Opens the file."""
        if jax.process_index() == 0:
            self._file.open(trainer, _csv_place)
            with self._file.path.open(encoding="utf-8", newline="") as before:
                self._columns = next(csv.reader(before), [])

    def on_epoch_end(
        self, trainer: "Trainer", epoch: int, logs: Mapping[str, Any]
    ) -> None:
        """Writes a line."""
        if self._file.file is None:
            return
        row = {"epoch": epoch, "step": trainer.position.step, **numbers(logs)}
        writer = csv.writer(self._file.file)
        if not self._columns:
            self._columns = list(row)
            writer.writerow(self._columns)
        extra = [name for name in row if name not in self._columns]
        if extra:
            msg = (
                f"CSVLogger: {', '.join(map(repr, extra))} is not a column of "
                f"{str(self._file.path)!r}, which has "
                f"{', '.join(map(repr, self._columns))}. Write to another file, or use "
                "JSONLLogger, whose lines may differ."
            )
            raise MeshLayoutError(msg)
        writer.writerow([row.get(name, "") for name in self._columns])
        self._file.file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class JSONLLogger(Callback):
    """Writes a JSON object per epoch into a file of lines, on process 0.

    An object has the epoch, the step, and what was measured, the learning rate among
    it; metrics with dims as lists. Values that are not finite are written as null:
    JSON has no NaN.

    Args:
        path: The file, overwritten; its folder is created.
        every: Also writes the epoch's values so far after every so many steps, once
            the device has them.
        append: Whether lines are added to the file instead.

    Raises:
        MeshLayoutError: If `every` is not a positive integer, or the path not one of a
            file.
    """

    def __init__(
        self, path: str | Path, *, every: int | None = None, append: bool = False
    ) -> None:
        if every is not None:
            every = _checks.count("every", every, where="JSONLLogger")
        self._file = _LogFile("JSONLLogger", path, append=append)
        self._every = every
        self._pending = AsyncMetrics()

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Opens the file."""
        if jax.process_index() == 0:
            self._file.open(trainer, _json_place, self._every)

    def on_step_end(self, trainer: "Trainer", step: int, metrics: Metrics) -> None:
        """Writes the values that are ready."""
        if self._file.file is None or self._every is None:
            return
        if is_due(trainer, self._every):
            self._pending.add(trainer.position, metrics)
        for position, values in self._pending.ready():
            self._write(position.epoch, position.step, values)

    def on_epoch_end(
        self, trainer: "Trainer", epoch: int, logs: Mapping[str, Any]
    ) -> None:
        """Writes the epoch's values."""
        if self._file.file is None:
            return
        for position, values in self._pending.drain():
            self._write(position.epoch, position.step, values)
        self._write(epoch, trainer.position.step, logs)
        self._file.file.flush()

    def _write(self, epoch: int, step: int, values: Mapping[str, Any]) -> None:
        row = {"epoch": epoch, "step": step, **_plain(values)}
        if self._file.file is not None:
            self._file.file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._pending.clear()
        self._file.close()


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _finite(np.asarray(x).tolist()) for name, x in values.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if math.isfinite(value) else None


def _csv_place(line: str) -> tuple[int, int]:
    epoch, step, *_ = line.split(",")
    return (int(epoch), int(step)) if epoch.isdigit() else (0, 0)  # the columns' names


def _json_place(line: str) -> tuple[int, int]:
    row = json.loads(line)
    return row["epoch"], row["step"]


class TensorBoard(Callback):
    """Writes metrics for TensorBoard, on process 0, with tensorboardX.

    An epoch's values are written at the number of its last step, under their names.

    Args:
        directory: Where the event files go.
        every: Also writes the epoch's values so far after every so many steps, under
            names that begin with `steps/`, once the device has them.

    Raises:
        MeshLayoutError: If tensorboardX is not installed, or `every` is not a positive
            integer.
    """

    def __init__(self, directory: str | Path, *, every: int | None = None) -> None:
        if every is not None:
            every = _checks.count("every", every, where="TensorBoard")
        self._package: Any = _optional.require(
            "tensorboardX", extra="tensorboard", purpose="The TensorBoard callback"
        )
        self._directory = as_path("TensorBoard", "directory", directory)
        self._every = every
        self._pending = AsyncMetrics()
        self._writer: Any = None

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Opens an event file."""
        if jax.process_index() == 0:
            self._writer = self._package.SummaryWriter(str(self._directory))

    def on_step_end(self, trainer: "Trainer", step: int, metrics: Metrics) -> None:
        """Writes the values that are ready."""
        if self._writer is None or self._every is None:
            return
        if is_due(trainer, self._every):
            self._pending.add(trainer.position, metrics)
        for position, values in self._pending.ready():
            self._write("steps/", position.step, values)

    def on_epoch_end(
        self, trainer: "Trainer", epoch: int, logs: Mapping[str, Any]
    ) -> None:
        """Writes the epoch's values."""
        if self._writer is None:
            return
        for position, values in self._pending.drain():
            self._write("steps/", position.step, values)
        self._write("", trainer.position.step, numbers(logs))
        self._writer.flush()

    def _write(self, prefix: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(prefix + name, value, step)

    def close(self) -> None:
        """Closes the event file."""
        self._pending.clear()
        if self._writer is not None:
            self._writer.close()
        self._writer = None
