"""Callbacks that write down what was measured: CSV, JSON lines, TensorBoard."""

import csv
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import jax
import numpy as np

from meshlayout import _optional
from meshlayout.errors import MeshLayoutError
from meshlayout.metrics import Metrics
from meshlayout.trainer.callbacks.callback import Callback
from meshlayout.trainer.callbacks.late import Late, numbers
from meshlayout.trainer.callbacks.stopping import check_every, is_due


if TYPE_CHECKING:
    from meshlayout.trainer.trainer import Trainer


class _File:
    """A text file that every `fit` opens, and that is begun anew only once."""

    def __init__(self, path: str | Path, *, append: bool) -> None:
        self.path, self._append = Path(path), append
        self.file: TextIO | None = None

    def open(
        self,
        trainer: "Trainer",
        place_of: Callable[[str], tuple[int, int]],
        every: int | None = None,
    ) -> TextIO:
        """Opens the file, after what this object wrote before.

        When a run is resumed, after what it wrote up to there in another process.

        Args:
            trainer: The trainer.
            place_of: Returns the epoch and the step that a line is of.
            every: How many steps lie between two lines inside an epoch.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_resumed = trainer.reading is not None and trainer.reading.is_resumed
        if is_resumed and self.path.exists():
            before = self.path.read_text(encoding="utf-8")
            done, last = len(trainer.history.epochs), trainer.position.step
            kept: dict[Any, str] = {}
            for at, line in enumerate(before.splitlines(keepends=True)):
                epoch, step = place_of(line) if line.endswith("\n") else (done + 2, 0)
                if epoch <= done:
                    kept[at] = line
                elif epoch == done + 1 and step <= last and every and not step % every:
                    # The second line of a step is the whole epoch's, which is to come.
                    kept.setdefault((epoch, step), line)
            self.path.write_text("".join(kept.values()), encoding="utf-8", newline="")
            self._append = True
        mode = "a" if self._append else "w"
        self._append = True
        self.file = self.path.open(mode, encoding="utf-8", newline="")
        return self.file

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
        path: The file; its folder is made. What it held is written over.
        append: Whether lines are added to what it holds.

    Raises:
        MeshLayoutError: At the end of an epoch, if something else was measured than the
            columns say.
    """

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        self._file = _File(path, append=append)
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
                f"CSVLogger: {', '.join(map(repr, extra))} is no column of "
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
    it; metrics with dims as lists. What is not finite is written as null, which JSON
    has, and NaN it has not.

    Args:
        path: The file; its folder is made. What it held is written over.
        every: Also writes the epoch's values so far after every so many steps, once
            the device has them.
        append: Whether lines are added to what it holds.

    Raises:
        MeshLayoutError: If `every` is no number of steps.
    """

    def __init__(
        self, path: str | Path, *, every: int | None = None, append: bool = False
    ) -> None:
        if every is not None:
            check_every("JSONLLogger", every)
        self._file, self._every = _File(path, append=append), every
        self._late = Late()

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Opens the file."""
        if jax.process_index() == 0:
            self._file.open(trainer, _json_place, self._every)

    def on_step_end(self, trainer: "Trainer", step: int, metrics: Metrics) -> None:
        """Writes the values that are there."""
        if self._file.file is None or self._every is None:
            return
        if is_due(trainer, self._every):
            self._late.add(trainer.position, metrics)
        for position, values in self._late.ready():
            self._write(position.epoch, position.step, values)

    def on_epoch_end(
        self, trainer: "Trainer", epoch: int, logs: Mapping[str, Any]
    ) -> None:
        """Writes the epoch's values."""
        if self._file.file is None:
            return
        for position, values in self._late.drain():
            self._write(position.epoch, position.step, values)
        self._write(epoch, trainer.position.step, logs)
        self._file.file.flush()

    def _write(self, epoch: int, step: int, values: Mapping[str, Any]) -> None:
        row = {"epoch": epoch, "step": step, **_plain(values)}
        if self._file.file is not None:
            self._file.file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._late.clear()
        self._file.close()


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _finite(np.asarray(x).tolist()) for name, x in values.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return value if math.isfinite(value) else None


def _csv_place(line: str) -> tuple[int, int]:
    epoch, step, *_ = line.split(",")
    return (int(epoch), int(step)) if epoch.isdigit() else (0, 0)  # the columns' names


def _json_place(line: str) -> tuple[int, int]:
    row = json.loads(line)
    return row["epoch"], row["step"]


class TensorBoard(Callback):
    """Writes what was measured for TensorBoard, on process 0, with tensorboardX.

    An epoch's values are written at the number of its last step, under their names.

    Args:
        directory: Where the event files go.
        every: Also writes the epoch's values so far after every so many steps, under
            names that begin with `steps/`, once the device has them.

    Raises:
        MeshLayoutError: If tensorboardX is not installed, or `every` is no number of
            steps.
    """

    def __init__(self, directory: str | Path, *, every: int | None = None) -> None:
        if every is not None:
            check_every("TensorBoard", every)
        self._package: Any = _optional.require(
            "tensorboardX", extra="tensorboard", purpose="The TensorBoard callback"
        )
        self._directory, self._every = Path(directory), every
        self._late = Late()
        self._writer: Any = None

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Opens an event file."""
        if jax.process_index() == 0:
            self._writer = self._package.SummaryWriter(str(self._directory))

    def on_step_end(self, trainer: "Trainer", step: int, metrics: Metrics) -> None:
        """Writes the values that are there."""
        if self._writer is None or self._every is None:
            return
        if is_due(trainer, self._every):
            self._late.add(trainer.position, metrics)
        for position, values in self._late.ready():
            self._write("steps/", position.step, values)

    def on_epoch_end(
        self, trainer: "Trainer", epoch: int, logs: Mapping[str, Any]
    ) -> None:
        """Writes the epoch's values."""
        if self._writer is None:
            return
        for position, values in self._late.drain():
            self._write("steps/", position.step, values)
        self._write("", trainer.position.step, numbers(logs))
        self._writer.flush()

    def _write(self, prefix: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(prefix + name, value, step)

    def close(self) -> None:
        """Closes the event file."""
        self._late.clear()
        if self._writer is not None:
            self._writer.close()
        self._writer = None
