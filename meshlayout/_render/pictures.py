"""A grid of shards or devices, described once and drawn as text or as SVG.

A `Picture` is plain data: two directions, cells by row and column, and the devices of
each cell. Both renderers read it, so that a terminal and a notebook show the same.
Large arrays and meshes are drawn with their middle left out, never scaled down.
"""

import colorsys
import html
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from meshlayout._render.tables import (
    SANS,
    cell_width,
    html_block,
    html_line,
    one_line,
    padded,
    ranges_text,
)


Held: TypeAlias = Sequence[tuple[int, tuple[tuple[int, int], ...]]]
"""The id of each device, and (start, stop) of what it holds in every dim."""

# How many steps of a direction are drawn before its middle is left out.
_MAX_STEPS = 16
_MAX_PANELS = 8
_MAX_TEXT_WIDTH = 110
_MAX_TEXT_LABEL = 18

# With more rows than this, text has no lines between rows.
_MAX_RULED = 8


@dataclass(frozen=True)
class Direction:
    """One drawn direction, across or down.

    Attributes:
        title: Its title, in one or two parts.
        steps: The label of each row or column.
        length: Its length in proportion to the other direction; 0 if all cells have the
            same size.
        most: How many steps are drawn before the middle ones are left out.
    """

    title: tuple[str, ...] = ()
    steps: tuple[str, ...] = ("",)
    length: int = 0
    most: int = _MAX_STEPS

    @property
    def indices(self) -> list[int | None]:
        """The indices of the drawn steps; None where some are left out."""
        return _outer(len(self.steps), self.most)

    @property
    def drawn(self) -> list[str]:
        """The labels of the drawn steps."""
        return ["…" if index is None else self.steps[index] for index in self.indices]


@dataclass(frozen=True)
class Cell:
    """One shard or device.

    Attributes:
        labels: The devices that hold it.
        number: The index of its color in the picture.
        about: Its description, shown as a tooltip.
    """

    labels: tuple[int, ...]
    number: int
    about: str


@dataclass(frozen=True)
class Picture:
    """A grid, or several side by side.

    Attributes:
        down: The direction of the rows.
        across: The direction of the columns.
        panels: The title of each grid, and its cells by row and column.
        num_colors: The number of colors in all panels.
        notes: Lines below the picture.
    """

    down: Direction
    across: Direction
    panels: tuple[tuple[str, dict[tuple[int, int], Cell]], ...]
    num_colors: int
    notes: tuple[str, ...] = ()


# Describing.


def shards_picture(shape: Sequence[int], axes: Sequence[str], held: Held) -> Picture:
    """Describes how an array is divided into shards, and which device holds which.

    Two dims are drawn: the last two sharded ones, or else the largest others. Further
    sharded dims become several grids.

    Args:
        shape: The shape of the whole array.
        axes: The mesh axes that shard each dim, as text; empty if none.
        held: The part of the array on each device.
    """
    cuts = [sorted({slices[dim] for _, slices in held}) for dim in range(len(shape))]
    holders: dict[tuple[int, ...], list[int]] = {}
    for label, slices in held:
        index = tuple(cut.index(part) for cut, part in zip(cuts, slices, strict=True))
        holders.setdefault(index, []).append(label)
    cut_dims = [dim for dim, cut in enumerate(cuts) if len(cut) > 1]
    whole = sorted(set(range(len(shape))) - set(cut_dims), key=lambda d: -shape[d])
    drawn = sorted((cut_dims + whole[: max(0, 2 - len(cut_dims))])[-2:])
    stacked = [dim for dim in cut_dims if dim not in drawn]
    directions = [
        Direction(
            (f"dim {dim} ({shape[dim]})", f"over {axes[dim]}" * bool(axes[dim])),
            tuple(f"{start}:{stop}" for start, stop in cuts[dim]),
            shape[dim],
        )
        for dim in drawn
    ]
    numbers, num_colors = _numbers(holders, [label for label, _ in held])

    def cell(index: tuple[int, ...]) -> Cell:
        slices = (cuts[d][i] for d, i in enumerate(index))
        about = ", ".join(f"{start}:{stop}" for start, stop in slices)
        return Cell(tuple(holders[index]), numbers[index], f"[{about}]")

    def title(index: tuple[int, ...]) -> str:
        steps = ((d, cuts[d][i]) for d, i in zip(stacked, index, strict=True))
        return ", ".join(f"dim {d} at {start}:{stop}" for d, (start, stop) in steps)

    panels: dict[tuple[int, ...], dict[tuple[int, int], Cell]] = {}
    for index in numbers:
        # An array of one dim is drawn as a single row.
        row, column = [0] * (2 - len(drawn)) + [index[dim] for dim in drawn]
        panel = panels.setdefault(tuple(index[dim] for dim in stacked), {})
        panel[row, column] = cell(index)
    left_out = sorted(dim for dim in whole if dim not in drawn)
    names = ", ".join(f"{dim} ({shape[dim]})" for dim in left_out)
    dims = "dim" if len(left_out) == 1 else "dims"
    notes = [f"Not drawn: {dims} {names}, whole in every shard."] if left_out else []
    return _picture(
        directions,
        [(title(index), panel) for index, panel in panels.items()],
        num_colors,
        notes,
    )


def _numbers(
    holders: Mapping[tuple[int, ...], Sequence[int]], devices: list[int]
) -> tuple[dict[tuple[int, ...], int], int]:
    """Returns the color of each shard, and the number of colors.

    A shard has the color of its first device in the picture of the mesh. With many
    devices those colors are too similar to distinguish a few shards, which get colors
    of their own.
    """
    shards = sorted(holders)
    if len(shards) == 1 or len(devices) > _MAX_STEPS:
        return {index: number for number, index in enumerate(shards)}, len(shards)
    return {index: devices.index(holders[index][0]) for index in shards}, len(devices)


def mesh_picture(
    axis_names: Sequence[str],
    shape: Sequence[int],
    labels: Sequence[int],
    crossed: Sequence[str] = (),
) -> Picture:
    """Describes the devices of a mesh, with the last two axes as a grid.

    Args:
        axis_names: The names of the axes.
        shape: The sizes of the axes.
        labels: One number per device, in the order of the flattened mesh.
        crossed: What each axis crosses, such as `"processes"`; empty if nothing.
    """
    crossed = crossed or [""] * len(axis_names)
    directions = [
        Direction(
            (f"{name} ({size})", *([f"across {unit}"] if unit else [])),
            tuple(map(str, range(size))),
        )
        for name, size, unit in list(zip(axis_names, shape, crossed, strict=True))[-2:]
    ]
    panels: dict[str, dict[tuple[int, int], Cell]] = {}
    for device, coords in enumerate(itertools.product(*map(range, shape))):
        names = [f"{name} {i}" for name, i in zip(axis_names, coords, strict=True)]
        row, column = (0, *coords)[-2:]
        panel = panels.setdefault(", ".join(names[:-2]), {})
        about = f"{', '.join(names)}:"
        panel[row, column] = Cell((labels[device],), device, about)
    return _picture(directions, list(panels.items()), len(labels), [])


def _picture(
    directions: list[Direction],
    panels: Sequence[tuple[str, dict[tuple[int, int], Cell]]],
    num_colors: int,
    notes: list[str],
) -> Picture:
    down, across = [Direction()] * (2 - len(directions)) + directions
    shown = [i for i in _outer(len(panels), _MAX_PANELS) if i is not None]
    if len(shown) < len(panels):
        notes = [*notes, f"{len(shown)} of {len(panels)} grids are drawn."]
    return Picture(
        down, across, tuple(panels[i] for i in shown), num_colors, tuple(notes)
    )


def _outer(count: int, most: int) -> list[int | None]:
    """Returns the indices below `count`, with None for the middle if there are many."""
    if count <= most:
        return list(range(count))
    tail = (most - 1) // 2
    return [*range(most - 1 - tail), None, *range(count - tail, count)]


def labels_text(labels: Iterable[int], room: int | None = None) -> str:
    """Returns labels in one line, runs of numbers as ranges, shortened to `room`.

    Example:
        >>> labels_text([0, 1, 2, 3, 8]), labels_text(range(0, 64, 2), room=12)
        ('0-3, 8', '0, …, 62')
    """
    labels = sorted(labels)
    parts = ranges_text(labels).split(",")
    text = ", ".join(parts)
    if room is None or cell_width(text) <= room:
        return text
    count = len(labels)
    shorter = [f"{parts[0]}, …, {parts[-1]}", f"{count} devices", f"({count})"]
    return next((text for text in shorter if cell_width(text) <= room), "…"[:room])


# Drawing as text.


def picture_text(picture: Picture) -> str:
    """Draws with box characters, no wider than a terminal."""
    down, across = picture.down, picture.across
    cells = [cell for _, panel in picture.panels for cell in panel.values()]
    labels = [labels_text(cell.labels, _MAX_TEXT_LABEL) for cell in cells]
    width = 2 + max(map(cell_width, [*labels, *across.drawn]))
    margin = max(cell_width(text) for text in [*down.drawn, " ".join(down.title)])
    most = max(3, (_MAX_TEXT_WIDTH - margin - 1) // (width + 1))
    across = replace(across, most=min(across.most, most))
    blocks = [
        ([title] if title else []) + _grid_text(down, across, panel, width, margin)
        for title, panel in picture.panels
    ]
    lines = [line.rstrip() for block in blocks for line in block]
    return "\n".join([*lines, *picture.notes])


def _grid_text(
    down: Direction,
    across: Direction,
    panel: dict[tuple[int, int], Cell],
    width: int,
    margin: int,
) -> list[str]:
    columns = across.indices
    left = " " * (margin + 1)
    title = one_line(" ".join(across.title)).strip()
    lines = [f"{left} {title}"] if title else []
    if any(across.steps) or any(down.title):
        steps = " ".join(padded(step, width, "c") for step in across.drawn)
        lines.append(f"{padded(one_line(' '.join(down.title)), margin, 'l')}  {steps}")
    lines.append(left + _rule("┌┬┐", len(columns), width))
    for at, (row, step) in enumerate(zip(down.indices, down.drawn, strict=True)):
        if at and len(down.indices) <= _MAX_RULED:
            lines.append(left + _rule("├┼┤", len(columns), width))
        texts = [
            padded(_cell_text(panel, row, column), width, "c") for column in columns
        ]
        lines.append(f"{padded(step, margin, 'r')} │{'│'.join(texts)}│")
    lines.append(left + _rule("└┴┘", len(columns), width))
    return lines


def _cell_text(
    panel: dict[tuple[int, int], Cell], row: int | None, column: int | None
) -> str:
    if row is None or column is None:
        return "…"
    cell = panel.get((row, column))
    return labels_text(cell.labels, _MAX_TEXT_LABEL) if cell else ""


def _rule(corners: str, columns: int, width: int) -> str:
    return corners[0] + corners[1].join(["─" * width] * columns) + corners[2]


# Drawing as SVG. Sizes are in pixels.

_FONT = 12
_CHAR = 7.0
_GAP = 12


@dataclass(frozen=True)
class _GridFrame:
    """The position of one grid: the box of its cells, and the space around it."""

    left: float
    top: float
    width: float
    height: float
    right: float
    bottom: float


def picture_html(title: str, picture: Picture, notes: Sequence[str] = ()) -> str:
    """Draws for a notebook, with a title above and notes below."""
    return html_block(
        html_line(title, "font-weight:600;margin-bottom:6px"),
        picture_svg(picture),
        *(
            html_line(note, "opacity:0.85;font-size:12px")
            for note in (*notes, *picture.notes)
        ),
    )


def picture_svg(picture: Picture) -> str:
    """Draws as a self-contained SVG element.

    Text outside the cells has the color of the text around the picture, so that it is
    legible on light and on dark pages.
    """
    frame = _frame(picture)
    grid_width = frame.left + frame.width + frame.right
    grid_height = frame.top + frame.height + frame.bottom
    per_row = max(1, min(len(picture.panels), int(720 // grid_width)))  # of a notebook
    parts = []
    for index, (title, panel) in enumerate(picture.panels):
        x, y = index % per_row * grid_width, index // per_row * grid_height
        inside = _grid_svg(picture, frame, title, panel)
        parts.append(f'<g transform="translate({x:g} {y:g})">{inside}</g>')
    width = per_row * grid_width
    height = math.ceil(len(picture.panels) / per_row) * grid_height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" '
        f'height="{height:g}" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'style="max-width:100%;height:auto;font-family:{SANS};font-size:{_FONT}px" '
        f'fill="currentColor">{"".join(parts)}</svg>'
    )


def _frame(picture: Picture) -> _GridFrame:
    """Returns the frame of each grid, large enough for the longest text anywhere."""
    down, across = picture.down, picture.across
    cells = [cell for _, panel in picture.panels for cell in panel.values()]
    label = max(_wide(labels_text(cell.labels, 8)) for cell in cells) + 10
    if across.length:
        # To scale, within limits: a (1, 100000) array would be a line.
        scale = min(360 / max(1, across.length), 240 / max(1, down.length))
        width = min(360, max(120, across.length * scale))
        height = min(240, max(44, down.length * scale)) if down.length else 44
    else:
        width, height = 48 * len(across.drawn), 34 * len(down.drawn)
    width = max(width, len(across.drawn) * min(label, 60))
    height = max(height, len(down.drawn) * 24)
    title = max((_wide(text) for text, _ in picture.panels), default=0)
    over = max(_wide(" ".join(across.title)), title) - width
    ticks = max(map(_wide, down.steps))
    left = max(map(_wide, down.title), default=0) + ticks + 16 if down.title else 8
    top = 18 * bool(title) + 20 * bool(across.title) + 18 * any(across.steps) + 4
    right = max(_GAP, over + _GAP)
    return _GridFrame(math.ceil(left), top, width, height, math.ceil(right), _GAP)


def _grid_svg(
    picture: Picture,
    frame: _GridFrame,
    title: str,
    panel: dict[tuple[int, int], Cell],
) -> str:
    rows, columns = picture.down.indices, picture.across.indices
    step = frame.width / len(columns), frame.height / len(rows)
    parts = []
    if title:
        parts.append(svg_text(title, frame.left, 13, weight=600))
    if picture.across.title:
        heading = " ".join(picture.across.title)
        parts.append(svg_text(heading, frame.left, frame.top - 24))
    for at, line in enumerate(filter(None, picture.down.title)):
        middle = frame.top + frame.height / 2 + 4
        shift = (at - (sum(map(bool, picture.down.title)) - 1) / 2) * 15
        parts.append(svg_text(line, 2, middle + shift))
    for tick, offset in _ticks(picture.across, frame.width, _wide):
        x = frame.left + offset
        parts.append(svg_text(tick, x, frame.top - 6, anchor="middle", faint=True))
    for tick, offset in _ticks(picture.down, frame.height, lambda _: _FONT):
        y = frame.top + offset + 4
        parts.append(svg_text(tick, frame.left - 6, y, anchor="end", faint=True))
    for (i, row), (j, column) in itertools.product(enumerate(rows), enumerate(columns)):
        cell = None if row is None or column is None else panel.get((row, column))
        x, y = frame.left + j * step[0], frame.top + i * step[1]
        parts.append(_cell_svg(cell, x, y, step, picture.num_colors))
    return "".join(parts)


def _cell_svg(
    cell: Cell | None, x: float, y: float, step: tuple[float, float], num_colors: int
) -> str:
    width, height = step
    middle = x + width / 2, y + height / 2 + 4
    if cell is None:
        return svg_text("…", *middle, anchor="middle", faint=True)
    labels = labels_text(cell.labels, int((width - 8) / _CHAR))
    fill, ink = _colors(cell.number, num_colors)
    full = f"{one_line(cell.about)} {labels_text(cell.labels)}"
    return (
        f'<g><rect x="{x + 1:g}" y="{y + 1:g}" width="{width - 2:g}" '
        f'height="{height - 2:g}" rx="4" fill="{fill}"/>'
        f"{svg_text(labels, *middle, anchor='middle', fill=ink, weight=600)}"
        f"<title>{html.escape(full)}</title></g>"
    )


def svg_text(
    text: str,
    x: float,
    y: float,
    *,
    anchor: str = "",
    fill: str = "",
    weight: int = 0,
    faint: bool = False,
) -> str:
    """Returns a text element, without control characters and escaped."""
    options = "".join(
        f' {name}="{value}"'
        for name, value in (
            ("text-anchor", anchor),
            ("fill", fill),
            ("font-weight", weight),
            ("opacity", 0.65 * faint),
        )
        if value
    )
    return (
        f'<text x="{x:.4g}" y="{y:.4g}"{options}>{html.escape(one_line(text))}</text>'
    )


def _ticks(
    direction: Direction, length: float, wide: Callable[[str], float]
) -> list[tuple[str, float]]:
    """Returns the labels along a direction and their positions, without overlaps."""
    step = length / len(direction.indices)
    widest = max(map(wide, direction.drawn)) + 4
    every = max(1, math.ceil(widest / step))  # label every n-th step
    return [
        (text, (index + 0.5) * step)
        for index, text in enumerate(direction.drawn)
        if text not in ("", "…") and index % every == 0
    ]


def _wide(text: str) -> float:
    return cell_width(one_line(text)) * _CHAR


def _colors(number: int, count: int) -> tuple[str, str]:
    """Returns the fill of one of `count` cells, and the color of its text.

    Hues are evenly spaced; with many cells the lightness alternates. A single cell is
    gray.
    """
    if count == 1:
        return "#b6bfcc", "#111827"
    lightness = 0.8 if count <= 8 or number % 2 else 0.7
    color = colorsys.hls_to_rgb((0.6 + number / count) % 1, lightness, 0.6)
    return "#" + "".join(f"{round(255 * c):02x}" for c in color), "#111827"
