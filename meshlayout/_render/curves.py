"""Curves of numbers by epoch, described once and drawn as text or as SVG.

Series whose names differ by `val_` alone share a panel: whether a model overfits is
seen where its two curves part. Values that are not finite are left out.
"""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from meshlayout._render.cards import svg_card
from meshlayout._render.pictures import svg_text
from meshlayout._render.tables import (
    SANS,
    cell_width,
    html_block,
    html_line,
    one_line,
    padded,
)


Series: TypeAlias = tuple[tuple[float, float], ...]
"""Pairs of an epoch and a value, both finite, in order."""

# A sparkline is at most this wide; more values are averaged in groups.
_MAX_BLOCKS = 60
_BLOCKS = "▁▂▃▄▅▆▇█"

# Legible on light and on dark pages; blue and orange differ for the color-blind, too.
_COLORS = ("#3b82f6", "#f97316")

# The SVG, in pixels.
_WIDTH, _HEIGHT = 300, 150
_LEFT, _TOP, _RIGHT, _BOTTOM = 58, 30, 14, 34
_NUM_TICKS = 4

# With more points than this, only the line is drawn.
_MAX_DOTS = 60

_VALIDATION = "val_"


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
                panels.setdefault(name.removeprefix(_VALIDATION), {})[name] = series
        ends = (epochs[0], epochs[-1]) if len(epochs) else (1, 1)
        return cls(ends, tuple(panels.values()))

    def __repr__(self) -> str:
        if not self.panels:
            return "no values to draw"
        series = {name: line for panel in self.panels for name, line in panel.items()}
        width = max(map(cell_width, map(one_line, series)))
        sparks = {
            name: _sparkline(line, self.epochs, _limits(panel.values()))
            for panel in self.panels
            for name, line in panel.items()
        }
        room = max(map(len, sparks.values()))
        lines = [
            f"{padded(one_line(name), width, 'l')}  {sparks[name]:{room}}  "
            f"{_summary(line)}"
            for name, line in series.items()
        ]
        first, last = self.epochs
        return "\n".join([*lines, f"epochs {first:g} to {last:g}"])

    def _repr_html_(self) -> str:
        if not self.panels:
            return html_block(html_line(repr(self), ""))
        drawn = "".join(_panel_svg(panel, self.epochs) for panel in self.panels)
        style = "display:flex;flex-wrap:wrap;gap:8px"
        return html_block(f'<div style="{style}">{drawn}</div>')

    def _repr_svg_(self) -> str | None:
        if not self.panels:
            return None
        return svg_card("", [_panel_svg(panel, self.epochs) for panel in self.panels])


def _is_finite(value: Any) -> bool:
    return not getattr(value, "shape", ()) and math.isfinite(value)


def _limits(lines: Iterable[Series]) -> tuple[float, float]:
    values = [y for line in lines for _, y in line]
    return min(values), max(values)


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
    width = min(count, _MAX_BLOCKS)
    groups: dict[int, list[float]] = {}
    for x, y in line:
        groups.setdefault(int((x - epochs[0]) * width / count), []).append(y)
    low, high = limits
    text = [" "] * width
    for index, values in groups.items():
        height = (sum(values) / len(values) - low) / ((high - low) or 1)
        text[min(index, width - 1)] = _BLOCKS[round(height * (len(_BLOCKS) - 1))]
    return "".join(text)


def _ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """Returns about `count` round numbers between two numbers.

    Example:
        >>> _ticks(0.13, 0.87, 4), _ticks(1, 9, 4, whole=True)
        ([0.2, 0.4, 0.6, 0.8], [2, 4, 6, 8])
    """
    if low == high:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
    if whole:
        step = max(1, round(step))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(k * step, digits) for k in range(first, last + 1)]


def _panel_svg(panel: dict[str, Series], epochs: tuple[float, float]) -> str:
    low, high = _limits(panel.values())
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = low - margin, high + margin
    first, last = epochs

    def x_of(epoch: float) -> float:
        share = (epoch - first) / (last - first) if last > first else 0.5
        return _LEFT + share * _WIDTH

    def y_of(value: float) -> float:
        return _TOP + (high - value) / (high - low) * _HEIGHT

    parts = []
    for value in _ticks(low, high, _NUM_TICKS):
        y = y_of(value)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="currentColor" stroke-opacity="0.15"/>'
            + svg_text(f"{value:g}", _LEFT - 6, y + 4, anchor="end", faint=True)
        )
    bottom = _TOP + _HEIGHT
    for epoch in _ticks(first, last, 2 * _NUM_TICKS, whole=True):
        parts.append(
            svg_text(
                f"{epoch:g}", x_of(epoch), bottom + 15, anchor="middle", faint=True
            )
        )
    parts.append(
        svg_text("epoch", _LEFT + _WIDTH, bottom + 29, anchor="end", faint=True)
    )
    title_x = float(_LEFT)
    for color, (name, line) in zip(_COLORS, panel.items(), strict=False):
        parts.append(
            _curve_svg(name, [(x, y, x_of(x), y_of(y)) for x, y in line], color)
        )
        parts.append(svg_text(name, title_x, 16, fill=color, weight=600))
        title_x += 7.5 * cell_width(one_line(name)) + 16
    width, height = _LEFT + _WIDTH + _RIGHT, _TOP + _HEIGHT + _BOTTOM
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" fill="currentColor" '
        f'style="max-width:100%;font-family:{SANS};font-size:12px">'
        f"{''.join(parts)}</svg>"
    )


def _curve_svg(
    name: str, points: Sequence[tuple[float, float, float, float]], color: str
) -> str:
    """Draws a series: a line, and a dot with a tooltip for each value.

    Args:
        name: The name of the series.
        points: Epoch, value, and where they are in the panel.
        color: Of the line.
    """
    path = " ".join(f"{x:.1f},{y:.1f}" for _, _, x, y in points)
    line = f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'
    if len(points) > _MAX_DOTS:
        return line
    dots = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}">'
        f"<title>{html.escape(one_line(name))} {value:.4g} in epoch {epoch:g}</title>"
        "</circle>"
        for epoch, value, x, y in points
    )
    return line + "".join(dots)
