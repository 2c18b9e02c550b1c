"""`Progress`: a line per epoch, and a bar in terminals and notebooks.

A display knows how to show a bar and add a line, in a terminal, a notebook or a log;
`Progress` decides what they say. No value is waited for: the bar shows those that the
device has computed.
"""

import html
import math
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress as Bars, TextColumn

from meshlayout._checks import shown
from meshlayout._render.consoles import console_on, is_notebook, running_cell
from meshlayout._render.tables import html_block, html_text
from meshlayout.errors import MeshLayoutError
from meshlayout.metrics import Metrics
from meshlayout.trainer.callbacks.callback import AsyncMetrics, Callback, scalars
from meshlayout.trainer.epochs import TrainingPosition
from meshlayout.trainer.history import decimals_of, number_text


if TYPE_CHECKING:
    from meshlayout.trainer.trainer import Trainer


# Seconds between two updates of the bar; each computes metrics on the device.
_INTERVAL_S = 0.2

# Terminal columns of a bar, and of one where there is little room.
_BAR_WIDTH, _SHORT_BAR_WIDTH = 20, 5


class _Bar(NamedTuple):
    """A bar: its texts, and how full it is; `total` is None if it is not known."""

    title: str
    done: int
    total: int | None
    text: str


class _Display:
    """A log: lines without a bar."""

    has_bar = False

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, bar: _Bar) -> None:
        """Moves the bar, if there is one."""

    def add_line(self, line: str) -> None:
        """Writes a line and flushes it, so that a followed log is up to date."""
        self._console.print(
            line, soft_wrap=True, markup=False, highlight=False, emoji=False
        )
        self._console.file.flush()

    def close(self) -> None:
        """Removes the bar."""


class _TerminalDisplay(_Display):
    """A bar at the bottom of a terminal, and the lines above it."""

    has_bar = True

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        # Transient: the bar disappears, and the lines stay. Markup is off for text of
        # the user, in which brackets are brackets.
        self._bar_width = _BAR_WIDTH if console.width >= 80 else _SHORT_BAR_WIDTH
        bar = BarColumn(bar_width=self._bar_width)
        columns = TextColumn("{task.description}"), bar
        text = TextColumn("{task.fields[text]}", markup=False)
        self._bars = Bars(*columns, text, console=console, transient=True)
        self._task = self._bars.add_task("", total=None, text="")
        self._bars.start()

    def show(self, bar: _Bar) -> None:
        # Cut here: rich would take the room from the title and the bar, too.
        room = self._console.width - len(bar.title) - self._bar_width - 2
        text = bar.text if len(bar.text) <= room else f"{bar.text[: room - 1]}…"
        self._bars.update(
            self._task,
            description=bar.title,
            total=bar.total,
            completed=bar.done,
            text=text,
        )

    def close(self) -> None:
        self._bars.stop()


class _NotebookDisplay(_Display):
    """A single output of a notebook cell: the lines, and the bar below them."""

    has_bar = True

    def __init__(self, ipython_display: Any) -> None:
        self._html = ipython_display.HTML
        self._lines: list[str] = []
        # One output that is replaced: printed lines would pile up below the bar.
        self._handle = ipython_display.display(self._html(""), display_id=True)

    def show(self, bar: _Bar) -> None:
        total = f' value="{bar.done}" max="{bar.total}"' if bar.total else ""
        text = html.escape(f"{bar.title}  {bar.text}")
        self._update(f"<div><progress{total}></progress> {text}</div>")

    def add_line(self, line: str) -> None:
        self._lines.append(line)
        self._update()

    def close(self) -> None:
        self._update()

    def _update(self, *bar: str) -> None:
        lines = [html_text(self._lines)] if self._lines else []
        self._handle.update(self._html(html_block(*lines, *bar)))


class _Columns:
    """Cells that line up with those of the lines before: each as wide as the widest."""

    def __init__(self) -> None:
        self._widths: dict[str, int] = {}
        self._decimals: dict[str, int] = {}

    def values(self, values: Mapping[str, float]) -> str:
        """Returns names and numbers, each with the decimals of its first number."""
        return "  ".join(
            f"{name} {self.cell(name, self._number(name, value))}"
            for name, value in values.items()
        )

    def cell(self, name: str, text: str) -> str:
        """Returns a text, right-aligned in its column."""
        width = self._widths[name] = max(self._widths.get(name, 0), len(text))
        return text.rjust(width)

    def _number(self, name: str, value: float) -> str:
        if math.isfinite(value):
            self._decimals.setdefault(name, decimals_of(value))
        return number_text(value, self._decimals.get(name, 4))


def _display_on(console: Console | None) -> _Display:
    if console is None:
        if is_notebook():
            # Imported by every notebook; importing it here would be for all programs.
            return _NotebookDisplay(sys.modules["IPython.display"])
        console = console_on(sys.stdout)
    has_bar = console.is_terminal and not console.is_dumb_terminal
    return _TerminalDisplay(console) if has_bar else _Display(console)


class Progress(Callback):
    """Shows the progress of training, on process 0.

    Each epoch gets a line: its values, its duration in seconds, the examples per second
    without validation, and the remaining time. Terminals and notebooks also show a bar
    while an epoch runs. The bar has the newest values that the device has computed, and
    waits for none; during validation it shows the number of batches so far.

    Args:
        console: A `rich` console to write to; by default standard output, or the cell
            of a notebook.
    """

    def __init__(self, console: Console | None = None) -> None:
        if console is not None and not isinstance(console, Console):
            msg = f"Progress: console must be a rich Console, got {shown(console)}."
            raise MeshLayoutError(msg)
        self._console = console
        self._display: _Display | None = None
        self._pending = AsyncMetrics()

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Chooses the display: a terminal, a notebook or a log."""
        self._start_s = self._looked_s = time.perf_counter()
        self._first_epoch = len(trainer.history.epochs) + 1
        self._columns = _Columns()
        if jax.process_index() == 0:
            self._display = _display_on(self._console)
        if self._display is not None and self._console is None:
            trainer.history._shown_in = running_cell()

    def on_epoch_start(self, trainer: "Trainer", epoch: int) -> None:
        """Starts a bar."""
        self._pending.clear()
        self._epoch_start_s = time.perf_counter()
        self._trained_s = 0.0
        self._show_step(trainer.position, {}, "")

    def on_step_end(self, trainer: "Trainer", step: int, metrics: Metrics) -> None:
        """Moves the bar, now and then, to the newest values of the device."""
        if self._display is None or not self._display.has_bar:
            return
        # At most one in flight: a slow device would fall behind further and further.
        if not self._pending and self._is_time_to_look():
            self._pending.add(trainer.position, metrics)
        for position, values in self._pending.read():
            self._show_step(position, values, self._pace_text(position))

    def on_validation_start(self, trainer: "Trainer") -> None:
        """Shows that the epoch is being validated, and stops its clock."""
        self._trained_s = time.perf_counter() - self._epoch_start_s
        self._show_validation(trainer, 0)

    def on_validation_step_end(self, trainer: "Trainer", step: int) -> None:
        """Moves the bar, now and then."""
        if self._is_time_to_look():
            self._show_validation(trainer, step)

    def on_epoch_end(
        self, trainer: "Trainer", epoch: int, logs: Mapping[str, Any]
    ) -> None:
        """Writes the epoch's line."""
        if self._display is None:
            return
        position, now_s = trainer.position, time.perf_counter()
        epoch_s = now_s - self._epoch_start_s
        # Without validation there is no `_trained_s`: the epoch was all training.
        rate = _rate_text(position, self._trained_s or epoch_s)
        cell = self._columns.cell
        facts = [cell("(seconds)", f"{epoch_s:.1f} s"), cell("(rate)", rate)]
        left = position.last_epoch - epoch
        if left and not trainer.stopped:
            done = epoch - self._first_epoch + 1
            facts.append(_left_text((now_s - self._start_s) / done * left))
        values = self._columns.values(scalars(logs))
        self._display.add_line(f"{_title(position)}  {values}  ({', '.join(facts)})")
        if trainer.stopped:
            self._display.add_line(f"stopped: {trainer.stopped}")

    def close(self) -> None:
        """Removes the bar."""
        if self._display is not None:
            self._display.close()
        self._display = None

    def _is_time_to_look(self) -> bool:
        """Returns whether the bar is due for an update; then restarts its clock."""
        now_s = time.perf_counter()
        is_time = now_s - self._looked_s >= _INTERVAL_S
        if is_time:
            self._looked_s = now_s
        return is_time

    def _show_step(
        self, position: TrainingPosition, values: Mapping[str, float], pace: str
    ) -> None:
        text = (f"{name} {number_text(x, 4)}" for name, x in values.items())
        facts = "  ".join(text), pace
        self._show(position, position.step_in_epoch, position.steps_per_epoch, facts)

    def _show_validation(self, trainer: "Trainer", step: int) -> None:
        total = trainer.validation_steps
        self._show(trainer.position, step, total, doing="validating")

    def _show(
        self,
        position: TrainingPosition,
        done: int,
        total: int | None,
        facts: tuple[str, ...] = (),
        *,
        doing: str = "",
    ) -> None:
        if self._display is not None:
            count = f"step {done}/{total}" if total else f"step {done}"
            text = "  ".join(filter(None, [doing, count, *facts]))
            self._display.show(_Bar(_title(position), done, total, text))

    def _pace_text(self, position: TrainingPosition) -> str:
        """Returns the speed, and the time left if the number of steps is known."""
        now_s = time.perf_counter()
        pace = _rate_text(position, now_s - self._epoch_start_s)
        if position.steps_per_epoch is None:
            return pace
        left_epochs = position.last_epoch - position.epoch + 1
        left = left_epochs * position.steps_per_epoch - position.step_in_epoch
        # From the whole fit, with validation and saves, not from the last steps.
        each_s = (now_s - self._start_s) / max(1, position.step_in_fit)
        return f"{pace}, {_left_text(each_s * max(0, left))}"


def _title(position: TrainingPosition) -> str:
    width = len(str(position.last_epoch))
    return f"epoch {position.epoch:>{width}}/{position.last_epoch}"


def _rate_text(position: TrainingPosition, seconds: float) -> str:
    rate = position.examples_in_epoch / max(seconds, 1e-9)
    # As wide as a hundred thousand: rates of epochs have different numbers of digits.
    text = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
    return f"{text:>7} examples/s"


def _left_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02} left"
    return f"{minutes}:{rest:02} left"
