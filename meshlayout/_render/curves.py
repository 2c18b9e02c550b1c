"""Curves of numbers by epoch, drawn as text or as SVG.

Series whose names differ by `val_` alone share a panel: whether a model overfits is
seen where its two curves part. Values that are not finite are left out.
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from meshlayout._render.tables import SANS, cell_width, one_line, padded


Series: TypeAlias = tuple[tuple[float, float], ...]
"""Pairs of an epoch and a value, both finite, in order."""

_MOST_BLOCKS = 60  # of a curve in a terminal; more values are averaged in groups
_BLOCKS = "▁▂▃▄▅▆▇█"

# Blue and orange differ for the color-blind, too.
_COLORS = ("#3b82f6", "#f97316")

# A panel, in pixels: a plot with the limits of its values to the left, and those of the
# epochs below.
_WIDTH, _HEIGHT, _LEFT, _TOP = 300, 150, 70, 30
_PANEL_WIDTH, _PANEL_HEIGHT = _LEFT + _WIDTH + 14, _TOP + _HEIGHT + 24


@dataclass(frozen=True, repr=False)
class Curves:
    """Curves by epoch: `print` draws them in characters, a notebook as SVG.

    Attributes:
        epochs: The first and the last epoch.
        panels: The series of each panel by name, at most two.

    Example:
        >>> Curves.of([1, 2, 3], {"loss": [0.9, 0.5, 0.4], "val_loss": [0.8, 0.5, 0.6]})
        loss      █▂▁  0.9 → 0.4, lowest 0.4 in epoch 3
        val_loss  ▇▂▄  0.8 → 0.6, lowest 0.5 in epoch 2
        epochs 1 to 3
    """

    epochs: tuple[float, float]
    panels: tuple[dict[str, Series], ...]

    @classmethod
    def of(
        cls, epochs: Sequence[float], columns: Mapping[str, Sequence[Any]]
    ) -> "Curves":
        """Returns the curves of some columns of numbers.

        Args:
            epochs: The number of each epoch.
            columns: One value per epoch each, by name; arrays are left out.
        """
        panels: dict[str, dict[str, Series]] = {}
        for name, values in columns.items():
            points = zip(epochs, values, strict=True)
            series = tuple((x, float(y)) for x, y in points if _is_finite(y))
            if series:
                panels.setdefault(name.removeprefix("val_"), {})[name] = series
        ends = (epochs[0], epochs[-1]) if len(epochs) else (1, 1)
        return cls(ends, tuple(panels.values()))

    def __repr__(self) -> str:
        if not self.panels:
            return "no values to draw"
        rows = [
            (one_line(name), _sparkline(line, self.epochs, _limits(panel)), line)
            for panel in self.panels
            for name, line in panel.items()
        ]
        width = max(cell_width(name) for name, _, _ in rows)
        room = max(len(spark) for _, spark, _ in rows)
        lines = [
            f"{padded(name, width, 'l')}  {spark:{room}}  {_summary(line)}"
            for name, spark, line in rows
        ]
        first, last = self.epochs
        return "\n".join([*lines, f"epochs {first:g} to {last:g}"])

    def _repr_svg_(self) -> str | None:
        # One image, also for pages that remove SVG from a notebook's HTML, such as
        # GitHub. It cannot know the color of the page, and brings its own.
        if not self.panels:
            return None
        panels = "".join(map(self._panel, range(len(self.panels))))
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" '
            f'width="{len(self.panels) * _PANEL_WIDTH}" height="{_PANEL_HEIGHT}" '
            f'style="color:#1f2328;background:#fff;font-family:{SANS};font-size:12px" '
            f'fill="currentColor">{panels}</svg>'
        )

    def _panel(self, number: int) -> str:
        (first, last), panel = self.epochs, self.panels[number]
        low, high = _limits(panel)
        right, bottom = _LEFT + _WIDTH, _TOP + _HEIGHT
        parts = [
            f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" '
            'stroke="currentColor" stroke-opacity="0.3"/>',
            _text(f"{high:.4g}", _LEFT - 6, _TOP + 4, "end"),
            _text(f"{low:.4g}", _LEFT - 6, bottom + 4, "end"),
            _text(f"epoch {first:g}", _LEFT, bottom + 16, "start"),
            _text(f"{last:g}", right, bottom + 16, "end"),
        ]
        at = float(_LEFT)
        for color, (name, line) in zip(_COLORS, panel.items(), strict=False):
            points = [
                (
                    _LEFT + _share(epoch, first, last) * _WIDTH,
                    bottom - _share(value, low, high) * _HEIGHT,
                )
                for epoch, value in line
            ]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            style = f'fill="none" stroke="{color}" stroke-width="2"'
            parts.append(f'<polyline points="{path}" {style}/>')
            for (epoch, value), (x, y) in zip(line, points, strict=True):
                tip = html.escape(f"{one_line(name)} {value:.4g} in epoch {epoch:g}")
                circle = f'cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"'
                parts.append(f"<circle {circle}><title>{tip}</title></circle>")
            bold = f'fill="{color}" font-weight="600"'
            parts.append(_text(name, at, 16, "start", bold))
            at += 7.5 * cell_width(one_line(name)) + 16
        left = number * _PANEL_WIDTH
        return f'<g transform="translate({left} 0)">{"".join(parts)}</g>'


def _is_finite(value: Any) -> bool:
    return not getattr(value, "shape", ()) and math.isfinite(value)


def _limits(panel: dict[str, Series]) -> tuple[float, float]:
    values = [y for line in panel.values() for _, y in line]
    return min(values), max(values)


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5


def _summary(line: Series) -> str:
    """Returns the first and the last value of a series, and its extreme.

    Where it falls that is the lowest, and where it rises the highest.
    """
    first, last = line[0][1], line[-1][1]
    falls = last <= first
    epoch, value = (min if falls else max)(line, key=lambda point: point[1])
    extreme = f"{'lowest' if falls else 'highest'} {value:.4g} in epoch {epoch:g}"
    return f"{first:.4g} → {last:.4g}, {extreme}"


def _sparkline(
    line: Series, epochs: tuple[float, float], limits: tuple[float, float]
) -> str:
    """Returns one block per epoch or group of epochs; a space for no value."""
    count = round(epochs[1] - epochs[0]) + 1
    width = min(count, _MOST_BLOCKS)
    groups: dict[int, list[float]] = {}
    for x, y in line:
        at = min(int((x - epochs[0]) * width / count), width - 1)
        groups.setdefault(at, []).append(y)
    text = [" "] * width
    low, high = limits
    for at, values in groups.items():
        height = (sum(values) / len(values) - low) / ((high - low) or 1)
        text[at] = _BLOCKS[round(height * (len(_BLOCKS) - 1))]
    return "".join(text)


def _text(text: str, x: float, y: float, anchor: str, style: str = "") -> str:
    style = style or 'opacity="0.65"'
    text = html.escape(one_line(text))
    return f'<text x="{x:.4g}" y="{y:g}" text-anchor="{anchor}" {style}>{text}</text>'
