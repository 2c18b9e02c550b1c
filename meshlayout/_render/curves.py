"""Curves of numbers by epoch, drawn as text or as SVG.

Series whose names differ by `val_` alone share a panel: whether a model overfits is
seen where its two curves part. Values that are not finite are left out.
"""

import html
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

from meshlayout._render.tables import SANS, one_line, text_columns


Series: TypeAlias = list[tuple[float, float]]
"""Pairs of an epoch and a value, both finite, in order."""

_MAX_BLOCKS = 60  # of a curve in a terminal; more values are averaged in groups
_BLOCKS = "▁▂▃▄▅▆▇█"

# Blue and orange differ for the color-blind, too.
_COLORS = ("#3b82f6", "#f97316")

# Pixels: the limits of the values are left of a plot, those of the epochs below.
_WIDTH, _HEIGHT, _PANEL_WIDTH = 300, 150, 384


@dataclass(frozen=True, repr=False)
class Curves:
    """Curves by epoch: `print` draws them in characters, a notebook as SVG.

    Attributes:
        panels: The series of each panel by name, at most two.

    Example:
        >>> Curves.of([1, 2, 3], {"loss": [0.9, 0.5, 0.4], "val_loss": [0.8, 0.5, 0.6]})
        loss      █▂▁  0.9 → 0.4, lowest 0.4 in epoch 3
        val_loss  ▇▂▄  0.8 → 0.6, lowest 0.5 in epoch 2
        epochs 1 to 3
    """

    panels: Sequence[dict[str, Series]]

    @classmethod
    def of(
        cls, epochs: Sequence[float], columns: Mapping[str, Sequence[Any]]
    ) -> "Curves":
        """Returns the curves of columns with a value per epoch; arrays are left out."""
        panels: dict[str, dict[str, Series]] = {}
        for name, values in columns.items():
            points = zip(epochs, values, strict=True)
            series = [(x, float(y)) for x, y in points if _is_finite(y)]
            if series:
                panels.setdefault(name.removeprefix("val_"), {})[name] = series
        return cls([*panels.values()])

    def __repr__(self) -> str:
        if not self.panels:
            return "no values to draw"
        rows: list[list[str]] = []
        for panel in self.panels:
            height = _scale([y for series in panel.values() for _, y in series], 0, 7)
            for name, series in panel.items():
                count = min(len(series), _MAX_BLOCKS)
                ends = (len(series) * n // count for n in range(count + 1))
                groups = (series[a:b] for a, b in itertools.pairwise(ends))
                means = (fmean(y for _, y in group) for group in groups)
                spark = "".join(_BLOCKS[round(height(mean))] for mean in means)
                rows.append([name, spark, _summary(series)])
        epochs = [x for panel in self.panels for y in panel.values() for x, _ in y]
        last = f"epochs {min(epochs):g} to {max(epochs):g}"
        return "\n".join([*text_columns(rows, "lll"), last])

    def _repr_svg_(self) -> str | None:
        # One image, also for pages that remove SVG from a notebook's HTML, such as
        # GitHub. It cannot know the color of the page, and brings its own.
        if not self.panels:
            return None
        width, height = len(self.panels) * _PANEL_WIDTH, _HEIGHT + 60
        panels = (
            f'<g transform="translate({number * _PANEL_WIDTH + 70} 30)">{_svg(x)}</g>'
            for number, x in enumerate(self.panels)
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
            f'height="{height}" style="background:#fff;font-family:{SANS};'
            f'font-size:12px" fill="#57606a">{"".join(panels)}</svg>'
        )


def _is_finite(value: Any) -> bool:
    return not getattr(value, "shape", ()) and math.isfinite(value)


def _scale(
    values: Sequence[float], start: float, stop: float
) -> Callable[[float], float]:
    """Returns the line through the least and the greatest of some values."""
    low, high = min(values), max(values)
    return lambda value: start + (stop - start) * (value - low) / ((high - low) or 1)


def _summary(series: Series) -> str:
    """Returns the first and the last value, and the lowest of a series that falls."""
    first, last = series[0][1], series[-1][1]
    best, name = (min, "lowest") if last <= first else (max, "highest")
    epoch, value = best(series, key=lambda point: point[1])
    return f"{first:.4g} → {last:.4g}, {name} {value:.4g} in epoch {epoch:g}"


def _svg(panel: dict[str, Series]) -> str:
    epochs, values = zip(*(x for series in panel.values() for x in series), strict=True)
    across, up = _scale(epochs, 0, _WIDTH), _scale(values, _HEIGHT, 0)
    parts = [
        f'<path d="M0 0V{_HEIGHT}H{_WIDTH}" fill="none" stroke="#b6bfcc"/>',
        _text(f"{max(values):.4g}", -6, 4, 'text-anchor="end"'),
        _text(f"{min(values):.4g}", -6, _HEIGHT + 4, 'text-anchor="end"'),
        _text(f"epoch {min(epochs):g}", 0, _HEIGHT + 16),
        _text(f"{max(epochs):g}", _WIDTH, _HEIGHT + 16, 'text-anchor="end"'),
    ]
    for number, (name, series) in enumerate(panel.items()):
        color = _COLORS[number]
        points = [f"{across(x):.1f},{up(y):.1f}" for x, y in series]
        # A line of one point twice is a dot.
        style = f'fill="none" stroke="{color}" stroke-width="3" stroke-linecap="round"'
        parts.append(f'<polyline points="{" ".join(points + points[-1:])}" {style}/>')
        parts.append(_text(name, number * _WIDTH / 2, -14, f'style="fill:{color}"'))
    return "".join(parts)


def _text(text: str, x: float, y: float, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {style}>{html.escape(one_line(text))}</text>'
