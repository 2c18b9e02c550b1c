"""`History`: the metrics of a trainer's epochs."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from meshlayout import _checks, _render
from meshlayout._render.consoles import running_cell
from meshlayout._render.curves import Curves
from meshlayout._render.tables import html_block, html_line
from meshlayout.errors import MeshLayoutError, did_you_mean


class History(Mapping[str, list[Any]]):
    """The metrics of each epoch: a mapping from names to lists of values.

    Values are floats, or NumPy arrays for metrics that have dims. In an epoch without
    a value for a name, the value is NaN.

    Attributes:
        epochs: The numbers of the finished epochs, from 1.
        stopped: Why the last `fit` ended before its last epoch; empty if it did not.

    Example:
        >>> history = History()
        >>> history.add(1, {"loss": 0.5, "val_loss": 0.75})
        >>> history.add(2, {"loss": 0.25, "val_loss": 0.5})
        >>> history["val_loss"]
        [0.75, 0.5]
        >>> history
        epoch    loss  val_loss
        ─────  ──────  ────────
            1  0.5000    0.7500
            2  0.2500    0.5000
    """

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.stopped = ""
        # The cell in which `Progress` already shows these epochs line by line: as the
        # result of that cell, the history is one line, not a second table.
        self._shown_in: int | None = None
        self._values: dict[str, list[Any]] = {}

    def add(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Adds an epoch.

        Args:
            epoch: Its number, from 1.
            logs: Its values by name.
        """
        epoch = _checks.count("epoch", epoch, where="History.add")
        _check_mapping("History.add: logs", logs)
        # A name that is new in this epoch gets NaN for the epochs before it.
        for name in logs:
            self._values.setdefault(name, [math.nan] * len(self.epochs))
        self.epochs.append(epoch)
        for name, values in self._values.items():
            values.append(logs.get(name, math.nan))

    def set(self, epochs: Sequence[int], values: Mapping[str, Sequence[Any]]) -> None:
        """Replaces all epochs, for example by those of a checkpoint.

        Args:
            epochs: The numbers of the epochs.
            values: The values by name, one per epoch; as from `to_dict`.

        Raises:
            MeshLayoutError: If a name does not have one value per epoch.
        """
        _check_mapping("History.set: values", values)
        epochs = _as_list("epochs", epochs)
        lists = {name: _as_list(repr(name), column) for name, column in values.items()}
        for name, column in lists.items():
            if len(column) != len(epochs):
                msg = (
                    f"History.set: {name!r} has {len(column)} values for "
                    f"{len(epochs)} epochs; give one value per epoch."
                )
                raise MeshLayoutError(msg)
        self.epochs, self._values = epochs, lists

    def to_dict(self) -> dict[str, list[Any]]:
        """Returns copies of the lists of values, by name."""
        return {name: list(values) for name, values in self._values.items()}

    def plot(self, *names: str) -> Curves:
        """Returns the curves of metrics by epoch, to print or as a notebook's result.

        A metric and its `val_` share a panel. Values that are not finite, and metrics
        that have dims, are left out.

        Args:
            *names: The metrics to draw; by default all.

        Raises:
            KeyError: If there is no such metric.

        Example:
            >>> history = History()
            >>> history.set([1, 2, 3], {"loss": [0.9, 0.5, 0.4]})
            >>> history.plot("loss")
            loss  █▂▁  0.9 → 0.4, lowest 0.4 in epoch 3
            epochs 1 to 3
        """
        chosen = names or tuple(self._values)
        return Curves.of(self.epochs, {name: self[name] for name in chosen})

    def __getitem__(self, name: str) -> list[Any]:
        if name not in self._values:
            near = did_you_mean(name, self._values)
            known = ", ".join(map(repr, self._values)) or "nothing yet"
            msg = f"the history has no {name!r}, only {known}.{near}"
            raise KeyError(msg)
        return list(self._values[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        if not self.epochs:
            return "History(no epochs)"
        return _render.text_table(*self._table(), notes=self._notes())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: FBT001
        printer.text(self._summary() if self._is_shown() else repr(self))

    def _repr_html_(self) -> str:
        if self._is_shown():
            return html_block(html_line(self._summary(), ""))
        return _render.html_table(*self._table(), notes=self._notes())

    def _is_shown(self) -> bool:
        """Returns whether the lines of `Progress` are above what is displayed now."""
        return self._shown_in is not None and running_cell() == self._shown_in

    def _summary(self) -> str:
        if not self.epochs:
            return repr(self)
        count = len(self.epochs)
        values = [
            f", {name} {_column(column)[-1]}"
            for name, column in self._values.items()
            if isinstance(column[-1], float)
        ]
        return f"History({count} epoch{'s' * (count > 1)}{''.join(values)})"

    def _table(self) -> tuple[list[str], list[list[str]], str]:
        columns = list(map(_column, self._values.values()))
        rows = [list(row) for row in zip(map(str, self.epochs), *columns, strict=True)]
        return ["epoch", *self._values], rows, "r" * (1 + len(columns))

    def _notes(self) -> list[str]:
        return [f"stopped: {self.stopped}"] if self.stopped else []


def _check_mapping(name: str, values: Any) -> None:
    if not isinstance(values, Mapping):
        msg = (
            f"{name} must be a dict from names to values, got {_checks.shown(values)}."
        )
        raise MeshLayoutError(msg)


def _as_list(name: str, values: Any) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        msg = f"History.set: {name} must be a list, got {_checks.shown(values)}."
        raise MeshLayoutError(msg)
    return list(values)


def decimals_of(value: float) -> int:
    """Returns how many decimals the numbers of a column have, from its first one.

    A loss that starts at 2.1 is still legible at 0.01, and a learning rate has as many
    as it needs; what is below a thousandth is in powers of ten.

    Example:
        >>> decimals_of(2.103), decimals_of(0.00125), decimals_of(5822.0)
        (4, 6, 2)
    """
    if not math.isfinite(value) or abs(value) < 1e-3:
        return 4
    return 2 if abs(value) >= 100 else 6 if abs(value) < 1e-2 else 4


def number_text(value: float, decimals: int) -> str:
    """Returns a number with some decimals, or in powers of ten if they do not suit it.

    Example:
        >>> number_text(0.81, 4), number_text(0.00042, 4), number_text(-1.5e9, 4)
        ('0.8100', '4.20e-04', '-1.50e+09')
    """
    least = 10 ** (1 - decimals) if decimals else 0  # two digits at least
    if value and not least <= abs(value) < 1e9:
        return f"{value:.2e}"
    return f"{value:.{decimals}f}"


def _column(values: Sequence[Any]) -> list[str]:
    """Returns the texts of a column; numbers have the decimals of the first."""
    numbers = [v for v in values if isinstance(v, float) and math.isfinite(v)]
    is_whole = all(number.is_integer() for number in numbers)
    decimals = 0 if is_whole else decimals_of(numbers[0])
    return [
        number_text(value, decimals)
        if isinstance(value, float)
        else _render.array_text(value.dtype, value.shape)
        for value in values
    ]
