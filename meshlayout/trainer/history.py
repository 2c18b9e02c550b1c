"""`History`: the metrics of a trainer's epochs."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

import numpy as np

from meshlayout import _checks, _render
from meshlayout._render.curves import Curves
from meshlayout.errors import did_you_mean


class History(_checks.WithReflexes, dict[str, list[Any]]):
    """The metrics of each epoch: a dict from names to lists of values.

    Values are floats, or NumPy arrays for metrics with dims; NaN if there is none.

    Attributes:
        epochs: The numbers of the finished epochs, from 1.
        stopped: Why the last `fit` ended early; empty if it did not.

    Examples:
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

    def add(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Adds an epoch, by its number from 1, or more values to the last one."""
        if self.epochs[-1:] != [epoch]:
            self.epochs.append(epoch)
        # A name that is new in this epoch gets NaN for the epochs before it.
        for name in {**self, **logs}:
            values = self.setdefault(name, [math.nan] * (len(self.epochs) - 1))
            value = logs.get(name, math.nan)
            values[len(self.epochs) - 1 :] = [value if np.ndim(value) else float(value)]

    def plot(self, *names: str) -> Curves:
        """Returns curves of some or all metrics, to print or to show in a notebook.

        Values that are not finite and metrics with more than one dim are left out.
        """
        flat = History()
        for number, epoch in enumerate(self.epochs):
            flat.add(epoch, scalars({x: self[x][number] for x in names or self}))
        return Curves.of(self.epochs, flat)

    @_checks.user_call
    def __missing__(self, name: str) -> NoReturn:
        known, near = ", ".join(map(repr, self)) or "nothing yet", unseen(name, self)
        raise KeyError(f"the history has no {name!r}, only {known}.{near}")

    def __repr__(self) -> str:
        text = self._rendered(_render.text_table)
        return text if self.epochs else "History(no epochs)"

    def _repr_html_(self) -> str:
        return self._rendered(_render.html_table)

    def _rendered(self, render: Callable[..., str]) -> str:
        columns = [map(value_text, values) for values in self.values()]
        rows = [list(row) for row in zip(map(str, self.epochs), *columns, strict=True)]
        notes = [f"stopped: {self.stopped}"] if self.stopped else []
        names = ["epoch", *self]
        return render(names, rows, "r" * len(names), notes=notes)


def unseen(name: str, known: Collection[str]) -> str:
    """Returns a sentence on a value that is not among the known ones."""
    if str(name).startswith("val_") and not any(x[:4] == "val_" for x in known):
        return " Give fit validation_data= or validation_split=."
    longer = [x for x in known if x.startswith(str(name))]  # as 'acc' of 'accuracy'
    return did_you_mean((longer or [name])[0], known)


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns values as floats, those of one dim as `name_0`, `name_1` and so on."""
    return {
        "_".join([name, *map(str, index)]): float(number)
        for name, value in values.items()
        if np.ndim(value) < 2
        for index, number in np.ndenumerate(value)
    }


def value_text(value: Any) -> str:
    """Returns a metric's value with four decimals, or in powers of ten."""
    if np.ndim(value) == 1 and len(value) <= 10:
        return f"[{' '.join(map(value_text, value))}]"
    if np.ndim(value):
        return _render.array_text(value.dtype, value.shape)
    is_plain = not value or 0.01 <= abs(value) < 1e5
    return f"{value:.4f}" if is_plain else f"{value:.2e}"
