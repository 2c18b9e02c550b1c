"""Callbacks that write files: metrics as CSV, JSON lines or TensorBoard, and traces.

A log file has to survive a kill and a resume. A run resumes from its last checkpoint
and repeats the steps after it, so that the lines of those steps are removed first: the
file of an interrupted run is the same as that of an uninterrupted one.
"""

import csv
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def _as_path(where: str, name: str, path: str | os.PathLike[str]) -> Path:
    """Returns a path, or raises MeshLayoutError if it is not one."""
    if not isinstance(path, (str, os.PathLike)) or not str(path) or "\0" in str(path):
        msg = f"{where}: {name} must be a path, got {_checks.shown(path)}."
        raise MeshLayoutError(msg)
    return Path(path)


class _Logger(Callback):
    """Base of the loggers: process 0 writes, and waits for no value during an epoch.

    Args:
        every: Also writes the values of the epoch so far, after every so many steps.
    """

    def __init__(self, every: int | None) -> None:
        if every is not None:
            every = _checks.count("every", every, where=type(self).__name__)
        self._every, self._pending = every, AsyncMetrics()
        self._output: Any = None  # while it is open

    def _open(self, trainer: "Trainer") -> Any:
        """Opens the output, an object with `flush` and `close`."""
        raise NotImplementedError

    def _write(
        self, epoch: int, step: int, values: Mapping[str, Any], *, is_epoch: bool
    ) -> None:
        """Writes the values of an epoch, or of its steps so far."""
        raise NotImplementedError

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Opens the log."""
        if jax.process_index() == 0:
            self._output = self._open(trainer)

    def on_step_end(self, trainer: "Trainer", step: int, metrics: Metrics) -> None:
        """Writes the values that are ready."""
        if self._output is not None and self._every is not None:
            if is_due(trainer, self._every):
                self._pending.add(trainer.position, metrics)
            self._write_steps(wait=False)

    def on_epoch_end(
        self, trainer: "Trainer", epoch: int, logs: Mapping[str, Any]
    ) -> None:
        """Writes the epoch's values."""
        if self._output is not None:
            self._write_steps(wait=True)
            self._write(epoch, trainer.position.step, logs, is_epoch=True)
            self._output.flush()

    def _write_steps(self, *, wait: bool) -> None:
        for position, values in self._pending.read(wait=wait):
            self._write(position.epoch, position.step, values, is_epoch=False)

    def close(self) -> None:
        """Closes the log."""
        self._pending.clear()
        if self._output is not None:
            self._output.close()
        self._output = None


class _FileLogger(_Logger):
    """Base of the loggers that write lines.

    Every `fit` opens the file, but only the first one overwrites it. A resumed run
    keeps the lines of the steps that its checkpoint has, and removes later ones.
    """

    def __init__(
        self, path: str | os.PathLike[str], every: int | None, *, append: bool
    ) -> None:
        super().__init__(every)
        where = type(self).__name__
        self._path = _as_path(where, "path", path)
        if self._path.is_dir():
            msg = f"{where}: {str(path)!r} is a directory; give the path of a file."
            raise MeshLayoutError(msg)
        self._append = _checks.flag("append", append, where=where)

    def _place(self, line: str) -> tuple[int, int]:
        """Returns the epoch and the step of a line in the file."""
        raise NotImplementedError

    def _open(self, trainer: "Trainer") -> Any:
        is_resumed = trainer.input is not None and trainer.input.is_resumed
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if is_resumed and self._path.exists():
                self._cut(trainer)
                self._append = True
            mode = "a" if self._append else "w"
            file = self._path.open(mode, encoding="utf-8", newline="")
        except OSError as error:
            where = type(self).__name__
            msg = f"{where}: cannot write {str(self._path)!r}: {error}."
            raise MeshLayoutError(msg) from error
        self._append = True  # for the next `fit` of the same callback
        return file

    def _cut(self, trainer: "Trainer") -> None:
        """Removes the lines after the position that a run resumes from."""
        text = self._path.read_text(encoding="utf-8")
        done, last = len(trainer.history.epochs), trainer.position.step
        lines: dict[Any, str] = {}
        for index, line in enumerate(text.splitlines(keepends=True)):
            is_whole = line.endswith("\n")
            # A kill may have cut the last line: it counts as one of a later epoch.
            epoch, step = self._place(line) if is_whole else (done + 2, 0)
            is_logged = self._every is not None and not step % self._every
            if epoch <= done:
                lines[index] = line
            elif epoch == done + 1 and step <= last and is_logged:
                # A second line of the step is that of the epoch, which will be written
                # again at its end.
                lines.setdefault((epoch, step), line)
        self._path.write_text("".join(lines.values()), encoding="utf-8", newline="")


class CSVLogger(_FileLogger):
    """Writes a line per epoch into a CSV file, on process 0.

    Use this for a spreadsheet or a plot. The columns are the epoch, the step, and the
    values of the first epoch that is written, including the learning rate; metrics with
    dims are left out. A line is in the file as soon as its epoch is over.

    Args:
        path: The file, which is overwritten; its directory is created.
        append: Whether to add lines to an existing file instead.

    Raises:
        MeshLayoutError: At the end of an epoch, if it has a value without a column.
    """

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        super().__init__(path, None, append=append)
        self._columns: list[str] = []

    def _open(self, trainer: "Trainer") -> Any:
        file = super()._open(trainer)
        # The columns of an existing file count, not those of this run.
        with self._path.open(encoding="utf-8", newline="") as before:
            self._columns = next(csv.reader(before), [])
        return file

    def _place(self, line: str) -> tuple[int, int]:
        epoch, step, *_ = line.split(",")
        return (int(epoch), int(step)) if epoch.isdigit() else (0, 0)  # the header

    def _write(
        self, epoch: int, step: int, values: Mapping[str, Any], *, is_epoch: bool
    ) -> None:
        row = {"epoch": epoch, "step": step, **scalars(values)}
        writer = csv.writer(self._output)
        if not self._columns:
            self._columns = list(row)
            writer.writerow(self._columns)
        extra = [name for name in row if name not in self._columns]
        if extra:
            msg = (
                f"CSVLogger: {', '.join(map(repr, extra))} is not a column of "
                f"{str(self._path)!r}, which has {', '.join(map(repr, self._columns))}."
                " Write to another file, or use JSONLLogger, whose lines may differ."
            )
            raise MeshLayoutError(msg)
        writer.writerow([row.get(name, "") for name in self._columns])


class JSONLLogger(_FileLogger):
    """Writes a line with a JSON object per epoch, on process 0.

    Use this if values have dims, or differ between epochs. An object has the epoch, the
    step, and the values, including the learning rate; metrics with dims are lists.
    Values that are not finite are written as null, since JSON has no NaN.

    Args:
        path: The file, which is overwritten; its directory is created.
        every: Also writes the values of the epoch so far, after every so many steps,
            once the device has computed them.
        append: Whether to add lines to an existing file instead.

    Raises:
        MeshLayoutError: If `every` is not a positive integer, or the path is that of a
            directory.
    """

    def __init__(
        self, path: str | Path, *, every: int | None = None, append: bool = False
    ) -> None:
        super().__init__(path, every, append=append)

    def _place(self, line: str) -> tuple[int, int]:
        row = json.loads(line)
        return row["epoch"], row["step"]

    def _write(
        self, epoch: int, step: int, values: Mapping[str, Any], *, is_epoch: bool
    ) -> None:
        plain = {name: _finite(np.asarray(x).tolist()) for name, x in values.items()}
        row = {"epoch": epoch, "step": step, **plain}
        self._output.write(json.dumps(row) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if math.isfinite(value) else None


class TensorBoard(_Logger):
    """Writes metrics for TensorBoard, on process 0, with tensorboardX.

    The values of an epoch are written under their names, at its last step.

    Args:
        directory: The directory of the event files.
        every: Also writes the values of the epoch so far, after every so many steps,
            under names that begin with `steps/`, once the device has computed them.

    Raises:
        MeshLayoutError: If tensorboardX is not installed, or `every` is not a positive
            integer.
    """

    def __init__(self, directory: str | Path, *, every: int | None = None) -> None:
        super().__init__(every)
        self._package: Any = _optional.require(
            "tensorboardX", extra="tensorboard", purpose="The TensorBoard callback"
        )
        self._directory = _as_path("TensorBoard", "directory", directory)

    def _open(self, trainer: "Trainer") -> Any:
        return self._package.SummaryWriter(str(self._directory))

    def _write(
        self, epoch: int, step: int, values: Mapping[str, Any], *, is_epoch: bool
    ) -> None:
        for name, value in scalars(values).items():
            self._output.add_scalar(name if is_epoch else f"steps/{name}", value, step)


class ProfilerTrace(Callback):
    """Traces a window of steps with `jax.profiler`, on process 0.

    Use this to see where a step spends its time, in TensorBoard, XProf or Perfetto. The
    trainer waits for the device at the beginning and the end of the window, so that the
    trace holds exactly its steps. Leave out the first steps, which compile.

    Args:
        directory: The directory of the trace.
        start_step: The first step of the window; a `fit` counts its steps from 1.
        num_steps: The number of steps in the window.

    Raises:
        MeshLayoutError: If a number is not a positive integer, or the directory is not
            a path.
    """

    def __init__(
        self, directory: str | Path, *, start_step: int = 10, num_steps: int = 5
    ) -> None:
        start_step = _checks.count("start_step", start_step, where="ProfilerTrace")
        num_steps = _checks.count("num_steps", num_steps, where="ProfilerTrace")
        self._directory = _as_path("ProfilerTrace", "directory", directory)
        self._before, self._last = start_step - 1, start_step + num_steps - 1
        self._is_tracing = False

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Begins the window, if it begins with the first step."""
        if self._before == 0:
            self._start(trainer)

    def on_step_end(self, trainer: "Trainer", step: int, metrics: Metrics) -> None:
        """Begins or ends the window."""
        done = trainer.position.step_in_fit
        if self._is_tracing and done >= self._last:
            # The host runs ahead: without waiting, the last steps would be cut off.
            jax.block_until_ready((trainer.state, metrics))
            self.close()
        elif 0 <= done - self._before < trainer.steps_in_call and self._before:
            self._start(trainer)

    def _start(self, trainer: "Trainer") -> None:
        if jax.process_index() == 0:
            jax.block_until_ready(trainer.state)
            jax.profiler.start_trace(self._directory)
            self._is_tracing = True

    def close(self) -> None:
        """Ends the window, if training ended inside it."""
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()
