"""`Progress`: a line per epoch, and a bar in terminals and notebooks."""

import html
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress as Bars, TextColumn

from meshlayout._checks import shown
from meshlayout._render.consoles import console_on, notebook_shell
from meshlayout._render.tables import html_block, html_line
from meshlayout.errors import MeshLayoutError
from meshlayout.metrics import Metrics
from meshlayout.trainer.callbacks.async_metrics import AsyncMetrics, numbers
from meshlayout.trainer.callbacks.callback import Callback
from meshlayout.trainer.epochs import TrainingPosition
from meshlayout.trainer.history import number_text


if TYPE_CHECKING:
    from meshlayout.trainer.trainer import Trainer


# Seconds between two checks of the device.
_INTERVAL_S = 0.2


class Progress(Callback):
    """Shows how training goes, on process 0.

    A line per epoch: what was measured, the epoch's seconds, the examples per second
    without validation, and how long the rest will take. A terminal also has a bar while
    an epoch runs, and a notebook one display that is updated. The bar shows the newest
    values that the device has computed, and waits for none; during validation it shows
    the batches measured so far.

    Args:
        console: Where to write, a `rich` console; standard output if left out, or the
            notebook's cell.
    """

    def __init__(self, console: Console | None = None) -> None:
        if console is not None and not isinstance(console, Console):
            msg = f"Progress: console must be a rich Console, got {shown(console)}."
            raise MeshLayoutError(msg)
        self._console = console
        self._view: _BarView | None = None
        self._pending = AsyncMetrics()

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Chooses the display: a terminal, a notebook or a log."""
        self._pending.clear()
        self._start_s = self._looked_s = time.perf_counter()
        self._first_epoch = len(trainer.history.epochs) + 1
        if jax.process_index() == 0:
            self._view = _view(self._console)
        if isinstance(self._view, _Notebook):
            trainer.history.shown_in = notebook_shell().execution_count

    def on_epoch_start(self, trainer: "Trainer", epoch: int) -> None:
        """Starts a bar."""
        self._pending.clear()
        self._epoch_start_s = time.perf_counter()
        self._trained_s = 0.0
        if self._view is not None:
            self._view.show(_bar(trainer.position, {}, ""))

    def on_step_end(self, trainer: "Trainer", step: int, metrics: Metrics) -> None:
        """Moves the bar, now and then, to the device's newest values."""
        if self._view is None or not self._view.is_live:
            return
        now_s = time.perf_counter()
        if not self._pending and now_s - self._looked_s >= _INTERVAL_S:
            self._looked_s = now_s
            self._pending.add(trainer.position, metrics)
        for position, values in self._pending.ready():
            self._view.show(_bar(position, values, self._pace(position, now_s)))

    def on_validation_start(self, trainer: "Trainer") -> None:
        """Shows that the epoch is being validated, and stops its clock."""
        self._trained_s = time.perf_counter() - self._epoch_start_s
        self._show_validation(trainer, 0)

    def on_validation_step_end(self, trainer: "Trainer", step: int) -> None:
        """Moves the bar, now and then."""
        now_s = time.perf_counter()
        if now_s - self._looked_s >= _INTERVAL_S:
            self._looked_s = now_s
            self._show_validation(trainer, step)

    def _show_validation(self, trainer: "Trainer", step: int) -> None:
        if self._view is not None and self._view.is_live:
            total = trainer.validation_steps
            steps = f"{step}/{total}" if total else f"{step}"
            text = f"validating  step {steps}"
            self._view.show(_Bar(_title(trainer.position), step, total, text))

    def on_epoch_end(
        self, trainer: "Trainer", epoch: int, logs: Mapping[str, Any]
    ) -> None:
        """Writes the epoch's line."""
        if self._view is None:
            return
        position, now_s = trainer.position, time.perf_counter()
        epoch_s = now_s - self._epoch_start_s
        facts = [
            f"{epoch_s:.1f} s",
            _rate_text(position, self._trained_s or epoch_s),
        ]
        left = position.last_epoch - epoch
        if left and not trainer.stopped:
            done = epoch - self._first_epoch + 1
            facts.append(_left_text((now_s - self._start_s) / done * left))
        self._view.end_epoch(
            f"{_title(position)}  {_values_text(numbers(logs))}  ({', '.join(facts)})"
        )
        if trainer.stopped:
            self._view.end_epoch(f"stopped: {trainer.stopped}")

    def close(self) -> None:
        """Removes the bar."""
        if self._view is not None:
            self._view.close()
        self._view = None

    def _pace(self, position: TrainingPosition, now_s: float) -> str:
        """Returns the speed, and the time left if the number of steps is known."""
        pace = _rate_text(position, now_s - self._epoch_start_s)
        if position.steps_per_epoch is None:
            return pace
        left_epochs = position.last_epoch - position.epoch + 1
        left = left_epochs * position.steps_per_epoch - position.step_in_epoch
        each_s = (now_s - self._start_s) / max(1, position.step_in_fit)
        return f"{pace}, {_left_text(each_s * max(0, left))}"


# The text.


class _Bar:
    """A bar's text and how full it is; None if that is not known."""

    def __init__(self, title: str, done: int, total: int | None, text: str) -> None:
        self.title, self.done, self.total, self.text = title, done, total, text


def _bar(position: TrainingPosition, values: Mapping[str, float], pace: str) -> _Bar:
    total, done = position.steps_per_epoch, position.step_in_epoch
    count = f"{done}/{total}" if total else f"{done}"
    parts = [f"step {count}", _values_text(values), pace]
    text = "  ".join(part for part in parts if part)
    return _Bar(_title(position), done, total, text)


def _title(position: TrainingPosition) -> str:
    width = len(str(position.last_epoch))
    return f"epoch {position.epoch:>{width}}/{position.last_epoch}"


def _values_text(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {number_text(x)}" for name, x in values.items())


def _rate_text(position: TrainingPosition, seconds: float) -> str:
    rate = position.examples_in_epoch / max(seconds, 1e-9)
    return f"{rate:,.0f} examples/s" if rate >= 10 else f"{rate:.2g} examples/s"


def _left_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02} left"
    return f"{minutes}:{rest:02} left"


# The displays.


class _BarView(Protocol):
    is_live: bool

    def show(self, bar: _Bar) -> None: ...
    def end_epoch(self, line: str) -> None: ...
    def close(self) -> None: ...


def _view(console: Console | None) -> _BarView:
    if console is None:
        if notebook_shell() is not None:
            return _Notebook(sys.modules["IPython.display"])
        console = console_on(sys.stdout)
    if console.is_terminal and not console.is_dumb_terminal:
        return _Terminal(console)
    return _Lines(console)


def _write(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)


class _Lines:
    """A log: one line per epoch, and nothing else."""

    is_live = False

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, bar: _Bar) -> None:
        """Does nothing: a log has no bar."""

    def end_epoch(self, line: str) -> None:
        """Writes a line and flushes it."""
        _write(self._console, line)
        self._console.file.flush()

    def close(self) -> None:
        """Does nothing: a log has no bar."""


class _Terminal:
    """A bar at the bottom, and the lines above it."""

    is_live = True

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = TextColumn("{task.description}"), BarColumn(bar_width=20)
        text = TextColumn("{task.fields[text]}", markup=False)
        self._bars = Bars(*columns, text, console=console, transient=True)
        self._task = self._bars.add_task("", total=None, text="")
        self._bars.start()

    def show(self, bar: _Bar) -> None:
        """Moves the bar."""
        self._bars.update(
            self._task,
            description=bar.title,
            total=bar.total,
            completed=bar.done,
            text=bar.text,
        )

    def end_epoch(self, line: str) -> None:
        """Writes a line above the bar."""
        _write(self._console, line)

    def close(self) -> None:
        """Removes the bar."""
        self._bars.stop()


class _Notebook:
    """One display: the lines, and the bar below."""

    is_live = True

    def __init__(self, display: Any) -> None:
        self._display = display
        self._lines: list[str] = []
        self._bar: _Bar | None = None
        self._handle = display.display(display.HTML(""), display_id=True)

    def show(self, bar: _Bar) -> None:
        """Moves the bar."""
        self._bar = bar
        self._update()

    def end_epoch(self, line: str) -> None:
        """Adds a line, and removes the bar until the next epoch."""
        self._lines.append(line)
        self._bar = None
        self._update()

    def close(self) -> None:
        """Removes the bar."""
        self._bar = None
        self._update()

    def _update(self) -> None:
        lines = [html_line(line, "") for line in self._lines]
        bar = [] if self._bar is None else [_bar_html(self._bar)]
        self._handle.update(self._display.HTML(html_block(*lines, *bar)))


def _bar_html(bar: _Bar) -> str:
    text = html.escape(f"{bar.title}  {bar.text}")
    total = f' value="{bar.done}" max="{bar.total}"' if bar.total else ""
    return f"<div><progress{total}></progress> {text}</div>"
