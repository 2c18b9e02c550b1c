"""`Progress`, a line per epoch and a bar; and `Log`, the metrics of epochs in files."""

import csv
import html
import json
import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress as Bars, TextColumn
from rich.table import Column

from meshlayout import _checks
from meshlayout._render.tables import console_on, html_block, html_text, is_notebook
from meshlayout.data.report import WEIGHTED
from meshlayout.metrics import Metrics
from meshlayout.trainer.callbacks.callback import Callback, Logs, Trainer
from meshlayout.trainer.epochs import TrainingPosition
from meshlayout.trainer.history import scalars, value_text


# Seconds between two updates of the bar; each computes metrics on the device.
_INTERVAL_S = 0.2


class _Terminal:
    """Lines in a log; in a terminal with a bar below them, which disappears."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.has_bar = console.is_terminal and not console.is_dumb_terminal
        self.width = console.width if self.has_bar else sys.maxsize
        bar = BarColumn(bar_width=20 if self.width >= 80 else 5)
        column = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        # Without markup, brackets in a user's text are brackets.
        text = TextColumn("{task.description}", markup=False, table_column=column)
        options: dict[str, Any] = {"console": console, "disable": not self.has_bar}
        self._bars = Bars(bar, text, transient=True, expand=True, **options)
        self._task = self._bars.add_task("", total=None)
        self._bars.start()

    def show(self, text: str, done: int, total: int | None) -> None:
        self._bars.update(self._task, total=total, completed=done, description=text)

    def add_line(self, line: str) -> None:
        self._console.out(line, highlight=False)  # without markup, too
        self._console.file.flush()  # so that a followed log is up to date

    def close(self) -> None:
        self._bars.stop()


class _Notebook:
    """A single output of a cell, replaced again and again: lines and a bar."""

    has_bar, width = True, sys.maxsize

    def __init__(self) -> None:
        # Imported by every notebook; importing it here would be for all programs.
        display = sys.modules["IPython.display"]
        self._html, self._lines = display.HTML, []
        self._handle = display.display(self._html(""), display_id=True)

    def show(self, text: str, done: int, total: int | None) -> None:
        value = f' value="{done}" max="{total}"' if total else ""
        self._update(f"<div><progress{value}></progress> {html.escape(text)}</div>")

    def add_line(self, line: str) -> None:
        self._lines.append(line)
        self._update()

    def close(self) -> None:
        self._update()

    def _update(self, *bar: str) -> None:
        lines = [html_text(self._lines)] if self._lines else []
        self._handle.update(self._html(html_block(*lines, *bar)))


@_checks.user_call
class Progress(Callback):
    """Shows the progress of training, on process 0.

    Each epoch gets a line with its values, duration, time left, and examples per second
    without validation, as far as the terminal is wide enough. Terminals and notebooks
    also show a bar, with the newest values that the device has computed.

    Args:
        console: A `rich` console; by default standard output, or a notebook's cell.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        # At most one set of values is in flight: a slow device would fall behind.
        self._pending: tuple[TrainingPosition, dict[str, Any]] | None = None
        quiet = Console(quiet=True, force_terminal=False)  # for the other processes
        self._display: _Terminal | _Notebook = _Terminal(quiet)

    def on_fit_start(self, trainer: Trainer) -> None:
        self._start_s = self._shown_s = time.perf_counter()
        self._first_epoch = len(trainer.history.epochs) + 1
        if jax.process_index() == 0:
            in_cell = self._console is None and is_notebook()
            console = self._console or console_on(sys.stdout)
            self._display = _Notebook() if in_cell else _Terminal(console)

    def on_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        self._pending = None
        self._epoch_start_s, self._trained_s = time.perf_counter(), 0.0
        # Those before a run that is resumed are not of this epoch's time.
        self._examples_before = trainer.position.examples_in_epoch
        self._show(trainer.position)

    def on_step_end(self, trainer: Trainer, step: int, metrics: Metrics) -> None:
        if not self._display.has_bar:
            return
        now_s = time.perf_counter()
        if self._pending is None and now_s - self._shown_s >= _INTERVAL_S:
            self._shown_s = now_s
            # New arrays: the next step donates the metrics themselves.
            self._pending = trainer.position, metrics.local_values()
        leaves = jax.tree.leaves(self._pending)
        is_ready = all(x.is_ready() for x in leaves if hasattr(x, "is_ready"))
        if self._pending is not None and is_ready:
            (position, values), self._pending = self._pending, None
            texts = [f"  {k} {value_text(x)}" for k, x in values.items() if not x.ndim]
            rate = self._rate_text(position, now_s - self._epoch_start_s)
            self._show(position, "".join([*texts, f"  {rate}"]))

    def on_validation_start(self, trainer: Trainer) -> None:
        self._trained_s = time.perf_counter() - self._epoch_start_s
        self._show(trainer.position, "  validating")

    def on_epoch_end(self, trainer: Trainer, epoch: int, logs: Logs) -> None:
        position, width = trainer.position, self._display.width
        epoch_s = time.perf_counter() - self._epoch_start_s
        facts = [f"{epoch_s:.1f} s"]
        num_left = position.last_epoch - epoch
        if num_left and not trainer.stopped:
            fit_s = time.perf_counter() - self._start_s
            left_s = round(fit_s / (epoch - self._first_epoch + 1) * num_left)
            facts.append(f"{timedelta(seconds=left_s)} left")
        # Without validation there is no `_trained_s`: the epoch was all training.
        rate = self._rate_text(position, self._trained_s or epoch_s)
        facts += [rate] if rate else []
        texts = [f"{name} {value_text(x):>8}" for name, x in logs.items()]
        line = "  ".join([_title(position), *texts])
        while facts and len(line) + len(", ".join(facts)) + 4 > width:
            facts.pop()
        line = f"{line}  ({', '.join(facts)})" if facts else line
        if epoch == self._first_epoch and WEIGHTED in trainer._report.notes:
            self._display.add_line(WEIGHTED)
        self._display.add_line(line if len(line) <= width else line[: width - 1] + "…")

    def on_fit_end(self, trainer: Trainer) -> None:
        position, add_line = trainer.position, self._display.add_line
        if trainer.stopped:
            add_line(f"stopped: {trainer.stopped}")
        elif not position.step_in_fit:
            add_line(f"nothing to train: {position.epoch} epochs are done")

    def close(self) -> None:
        self._display.close()

    def _show(self, position: TrainingPosition, facts: str = "") -> None:
        done, total = position.step_in_epoch, position.steps_per_epoch
        count = f"step {done}/{total}" if total else f"step {done}"
        self._display.show(f"{_title(position)}  {count}{facts}", done, total)

    def _rate_text(self, position: TrainingPosition, seconds: float) -> str:
        count = position.examples_in_epoch - self._examples_before
        return f"{count / max(seconds, 1e-9):,.0f} examples/s" if count else ""


def _title(position: TrainingPosition) -> str:
    width = len(str(position.last_epoch))
    return f"epoch {position.epoch:>{width}}/{position.last_epoch}"


@_checks.user_call
class Log(Callback):
    """Writes the values of each epoch into a file, on process 0.

    A CSV file has the columns `name_0`, `name_1` and so on for a metric with one dim,
    none for more, and empty cells for values that an epoch lacks. JSON lines have lists
    for metrics with dims, and null for what is not finite. A later `fit` with the same
    callback and a resumed run append, perhaps an epoch twice.

    Args:
        path: `log.csv` or `log.jsonl`, overwritten; or a directory for TensorBoard.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path, self._begins = Path(path), True
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
            self._file = self._path.open("a+", encoding="utf-8", newline="")
        self._begins &= not trainer.position.is_resumed

    def on_epoch_end(self, trainer: Trainer, epoch: int, logs: Logs) -> None:
        if self._file is None:
            return
        if self._begins and self._tensorboard is None:  # now that a run has begun
            self._file.truncate(0)
        self._begins, step, values = False, trainer.position.step, scalars(logs)
        row: dict[str, Any] = {"epoch": epoch, "step": step, **values}
        if self._kind == ".jsonl":
            lists = {name: np.asarray(value).tolist() for name, value in logs.items()}
            # JSON has no number for what is not finite.
            lists = jax.tree.map(lambda x: x if math.isfinite(x) else None, lists)
            self._file.write(json.dumps({"epoch": epoch, "step": step, **lists}) + "\n")
        elif self._kind == ".csv":
            self._file.seek(0)
            reader = csv.DictReader(self._file)
            rows, known = [*reader], reader.fieldnames or ()
            writer = csv.DictWriter(self._file, [*dict.fromkeys([*known, *row])])
            if writer.fieldnames != known:  # the first row, or one with a new value
                self._file.truncate(0)
                writer.writeheader()
                writer.writerows(rows)
            writer.writerow(row)
        else:
            for name, value in values.items():
                self._file.add_scalar(name, value, step)
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
