"""Curves of numbers by epoch, drawn as text or as SVG.

Series whose names differ only by `val_` share a panel: where the two curves part, a
model overfits. Values that are not finite are left out.
"""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshlayout._render.tables import SANS, one_line, text_columns


_BLOCKS = "▁▂▃▄▅▆▇█"
_MAX_BLOCKS = 60  # of a curve in a terminal; of more values every second, or third

# Blue and orange differ for the color-blind, too.
_COLORS = ("#3b82f6", "#f97316")

# Pixels: the limits of the values are left of a plot, those of the epochs below.
_WIDTH, _HEIGHT, _PANEL_WIDTH = 300, 150, 384


@dataclass(frozen=True, repr=False)
class Curves:
    """Curves by epoch: `print` draws them in characters, a notebook as SVG."""

    # By name the series of each panel, at most two: pairs of an epoch and a value.
    panels: Sequence[dict[str, list[tuple[float, float]]]]

    @classmethod
    def of(
        cls, epochs: Sequence[float], columns: Mapping[str, Sequence[Any]]
    ) -> "Curves":
        """Returns the curves of columns with a value per epoch; arrays are left out."""
        panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for name, values in columns.items():
            points = zip(epochs, values, strict=True)
            numbers = [(x, float(y)) for x, y in points if not getattr(y, "shape", ())]
            series = [(x, y) for x, y in numbers if math.isfinite(y)]
            if series:
                panels.setdefault(name.removeprefix("val_"), {})[name] = series
        return cls([*panels.values()])

    def __repr__(self) -> str:
        if not self.panels:
            return "no values to draw"
        rows: list[list[str]] = []
        epochs: list[float] = []
        for panel in self.panels:
            height = _scale([y for series in panel.values() for _, y in series], 0, 7)
            for name, series in panel.items():
                shown = series[:: math.ceil(len(series) / _MAX_BLOCKS)]
                spark = "".join(_BLOCKS[round(height(y))] for _, y in shown)
                first, last = series[0][1], series[-1][1]
                best, word = (min, "lowest") if last <= first else (max, "highest")
                epoch, value = best(series, key=lambda point: point[1])
                best_text = f"{word} {value:.4g} in epoch {epoch:g}"
                rows.append([name, spark, f"{first:.4g} → {last:.4g}, {best_text}"])
                epochs += [epoch for epoch, _ in series]
        range_text = f"epochs {min(epochs):g} to {max(epochs):g}"
        return "\n".join([*text_columns(rows, "lll"), range_text])

    def _repr_svg_(self) -> str | None:
        # One image, as GitHub removes SVG from a notebook's HTML, with its own color.
        if not self.panels:
            return None
        panels = ""
        for number, panel in enumerate(self.panels):
            x = number * _PANEL_WIDTH + 70
            panels += f'<g transform="translate({x} 30)">{_svg(panel)}</g>'
        size = f'width="{len(self.panels) * _PANEL_WIDTH}" height="{_HEIGHT + 60}"'
        style = f"background:#fff;font-family:{SANS};font-size:12px"
        svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{style}"'
        return f'{svg} fill="#57606a">{panels}</svg>'


def _scale(
    values: Sequence[float], start: float, stop: float
) -> Callable[[float], float]:
    """Returns the line through the least and the greatest of some values."""
    low, high = min(values), max(values)
    return lambda value: start + (stop - start) * (value - low) / ((high - low) or 1)


def _svg(panel: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    epochs, values = zip(*(x for series in panel.values() for x in series), strict=True)
    across, up = _scale(epochs, 0, _WIDTH), _scale(values, _HEIGHT, 0)
    texts = [
        (f"{max(values):.4g}", 'x="-6" y="4" text-anchor="end"'),
        (f"{min(values):.4g}", f'x="-6" y="{_HEIGHT + 4}" text-anchor="end"'),
        (f"epoch {min(epochs):g}", f'x="0" y="{_HEIGHT + 16}"'),
        (f"{max(epochs):g}", f'x="{_WIDTH}" y="{_HEIGHT + 16}" text-anchor="end"'),
    ]
    svg = f'<path d="M0 0V{_HEIGHT}H{_WIDTH}" fill="none" stroke="#b6bfcc"/>'
    for number, (name, series) in enumerate(panel.items()):
        points = [f"{across(x):.1f},{up(y):.1f}" for x, y in series]
        points.append(points[-1])  # a line of one point twice is a dot
        style = f'stroke="{_COLORS[number]}" stroke-width="3" stroke-linecap="round"'
        svg += f'<polyline points="{" ".join(points)}" fill="none" {style}/>'
        texts += [(name, f'x="{number * 150}" y="-14" style="fill:{_COLORS[number]}"')]
    for text, place in texts:
        svg += f"<text {place}>{html.escape(one_line(text))}</text>"
    return svg
