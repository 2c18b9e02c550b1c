"""A grid of shards or devices, described once and drawn as text or as an HTML table.

A `Picture` is plain data: titles and labels of rows and columns, and the cells. Both
renderers read it, so that a terminal and a notebook show the same. Of large arrays and
meshes the middle is left out.
"""

import colorsys
import html
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from meshlayout._render.tables import (
    cell_width,
    html_block,
    html_line,
    one_line,
    padded,
    ranges_text,
)


Held: TypeAlias = Sequence[tuple[int, tuple[tuple[int, int], ...]]]
"""The id of each device, and (start, stop) of what it holds in every dim."""

# How many rows, columns and grids are drawn before the middle ones are left out.
_MOST_STEPS = 16
_MOST_PANELS = 8
_MOST_TEXT_COLUMNS = 110  # of a terminal
_MOST_LABEL = 18

# With more rows than this, text has no lines between rows.
_MOST_RULED = 8


@dataclass(frozen=True)
class Direction:
    """The rows or the columns of all grids: their title, and the label of each."""

    title: str = ""
    steps: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Cell:
    """One shard or device.

    Attributes:
        devices: The devices that hold it.
        color: Its fill, on which dark text is legible.
        about: Its description, shown as a tooltip.
    """

    devices: tuple[int, ...]
    color: str
    about: str


Grid: TypeAlias = dict[tuple[int, int], Cell]


@dataclass(frozen=True)
class Picture:
    """Grids of the same rows and columns, one after another.

    Attributes:
        down: The rows.
        across: The columns.
        grids: The title of each grid, and its cells by row and column.
        notes: Lines below the picture.
    """

    down: Direction
    across: Direction
    grids: tuple[tuple[str, Grid], ...]
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
    cuts = [sorted({part[dim] for _, part in held}) for dim in range(len(shape))]
    holders: dict[tuple[int, ...], list[int]] = {}
    for device, part in held:
        index = tuple(cut.index(piece) for cut, piece in zip(cuts, part, strict=True))
        holders.setdefault(index, []).append(device)
    cut_dims = [dim for dim, cut in enumerate(cuts) if len(cut) > 1]
    whole = sorted(set(range(len(shape))) - set(cut_dims), key=lambda d: -shape[d])
    drawn = sorted((cut_dims + whole[: max(0, 2 - len(cut_dims))])[-2:])
    stacked = [dim for dim in cut_dims if dim not in drawn]
    directions = [
        Direction(
            f"dim {dim} ({shape[dim]})" + (f" over {axes[dim]}" if axes[dim] else ""),
            tuple(f"{start}:{stop}" for start, stop in cuts[dim]),
        )
        for dim in drawn
    ]
    # A shard has the color of its first device in the picture of the mesh. Those of
    # many devices are too similar to tell a few shards apart.
    devices = [device for device, _ in held]
    is_small = len(holders) > 1 and len(devices) <= _MOST_STEPS
    grids: dict[str, Grid] = {}
    for number, index in enumerate(sorted(holders)):
        pieces = [f"{cuts[d][i][0]}:{cuts[d][i][1]}" for d, i in enumerate(index)]
        color = (
            _color(devices.index(holders[index][0]), len(devices))
            if is_small
            else _color(number, len(holders))
        )
        title = ", ".join(f"dim {dim} at {pieces[dim]}" for dim in stacked)
        # An array of one dim is drawn as a single row.
        row, column = [0] * (2 - len(drawn)) + [index[dim] for dim in drawn]
        cell = Cell(tuple(holders[index]), color, f"[{', '.join(pieces)}]")
        grids.setdefault(title, {})[row, column] = cell
    left_out = sorted(dim for dim in whole if dim not in drawn)
    names = ", ".join(f"{dim} ({shape[dim]})" for dim in left_out)
    dims = "dim" if len(left_out) == 1 else "dims"
    notes = [f"Not drawn: {dims} {names}, whole in every shard."] if left_out else []
    return _picture(directions, grids, notes)


def mesh_picture(
    axis_names: Sequence[str],
    shape: Sequence[int],
    devices: Sequence[int],
    crossed: Sequence[str] = (),
) -> Picture:
    """Describes the devices of a mesh, with the last two axes as a grid.

    Args:
        axis_names: The names of the axes.
        shape: The sizes of the axes.
        devices: The id of each device, in the order of the flattened mesh.
        crossed: What each axis crosses, such as `"processes"`; empty if nothing.
    """
    crossed = crossed or [""] * len(axis_names)
    directions = [
        Direction(
            f"{name} ({size})" + (f" across {unit}" if unit else ""),
            tuple(map(str, range(size))),
        )
        for name, size, unit in list(zip(axis_names, shape, crossed, strict=True))[-2:]
    ]
    grids: dict[str, Grid] = {}
    for number, coords in enumerate(itertools.product(*map(range, shape))):
        names = [f"{name} {i}" for name, i in zip(axis_names, coords, strict=True)]
        row, column = (0, *coords)[-2:]
        color = _color(number, len(devices))
        cell = Cell((devices[number],), color, f"{', '.join(names)}:")
        grids.setdefault(", ".join(names[:-2]), {})[row, column] = cell
    return _picture(directions, grids, [])


def _picture(
    directions: list[Direction], grids: dict[str, Grid], notes: list[str]
) -> Picture:
    down, across = [Direction()] * (2 - len(directions)) + directions
    named = list(grids.items())
    shown = tuple(named[i] for i in _outer(len(named), _MOST_PANELS) if i is not None)
    if len(shown) < len(named):
        notes = [*notes, f"{len(shown)} of {len(named)} grids are drawn."]
    return Picture(down, across, shown, tuple(notes))


def _color(number: int, count: int) -> str:
    """Returns one of `count` light colors of evenly spaced hues; gray for a single one.

    With many of them the lightness alternates.
    """
    if count == 1:
        return "#b6bfcc"
    lightness = 0.8 if count <= 8 or number % 2 else 0.7
    color = colorsys.hls_to_rgb((0.6 + number / count) % 1, lightness, 0.6)
    return "#" + "".join(f"{round(255 * c):02x}" for c in color)


def _outer(count: int, most: int) -> list[int | None]:
    """Returns the indices below `count`, with None for the middle if there are many."""
    if count <= most:
        return list(range(count))
    tail = (most - 1) // 2
    return [*range(most - 1 - tail), None, *range(count - tail, count)]


def _steps(direction: Direction, most: int) -> list[tuple[int | None, str]]:
    """Returns the index and label of each row or column that is drawn."""
    indices = _outer(len(direction.steps), most)
    return [(i, "…" if i is None else direction.steps[i]) for i in indices]


def labels_text(devices: Iterable[int], room: int | None = None) -> str:
    """Returns device ids in one line, runs of them as ranges, shortened to `room`.

    Example:
        >>> labels_text([0, 1, 2, 3, 8]), labels_text(range(0, 64, 2), room=12)
        ('0-3, 8', '0, …, 62')
    """
    devices = sorted(devices)
    parts = ranges_text(devices).split(",")
    texts = [", ".join(parts), f"{parts[0]}, …, {parts[-1]}", f"{len(devices)} devices"]
    return next((text for text in texts if room is None or len(text) <= room), "…")


def _cell_text(grid: Grid, row: int | None, column: int | None) -> str:
    cell = None if row is None or column is None else grid[row, column]
    return labels_text(cell.devices, _MOST_LABEL) if cell else "…"


# Drawing.


def picture_text(picture: Picture) -> str:
    """Draws with box characters, no wider than a terminal."""
    rows = _steps(picture.down, _MOST_STEPS)
    down, across = one_line(picture.down.title), one_line(picture.across.title)
    labels = [_cell_text(grid, *at) for _, grid in picture.grids for at in grid]
    width = 2 + max(map(cell_width, [*labels, *picture.across.steps]))
    margin = max(cell_width(text) for text in [down, *(step for _, step in rows)])
    most = max(3, (_MOST_TEXT_COLUMNS - margin - 1) // (width + 1))
    columns = _steps(picture.across, min(_MOST_STEPS, most))
    left = " " * (margin + 1)

    def rule(corners: str) -> str:
        return (
            left
            + corners[0]
            + corners[1].join(["─" * width] * len(columns))
            + (corners[2])
        )

    lines: list[str] = []
    for title, grid in picture.grids:
        lines += [title] * bool(title) + [f"{left} {across}"] * bool(across)
        steps = " ".join(padded(step, width, "c") for _, step in columns)
        lines += [f"{padded(down, margin, 'l')}  {steps}"] if across or down else []
        lines.append(rule("┌┬┐"))
        for at, (row, step) in enumerate(rows):
            if at and len(rows) <= _MOST_RULED:
                lines.append(rule("├┼┤"))
            texts = [padded(_cell_text(grid, row, c), width, "c") for c, _ in columns]
            lines.append(f"{padded(step, margin, 'r')} │{'│'.join(texts)}│")
        lines.append(rule("└┴┘"))
    return "\n".join([*(line.rstrip() for line in lines), *picture.notes])


def picture_html(title: str, picture: Picture, notes: Sequence[str] = ()) -> str:
    """Draws for a notebook, with a title above and notes below.

    Text outside the cells has the color of the page, so that it is legible on light and
    on dark ones; pages that strip styles still show the table.
    """
    rows = _steps(picture.down, _MOST_STEPS)
    columns = _steps(picture.across, _MOST_STEPS)
    above = [_label(""), _label(picture.across.title, len(columns))]
    labels = [_label(picture.down.title), *(_label(step) for _, step in columns)]
    tables: list[str] = []
    for name, grid in picture.grids:
        lines = [above, labels] if picture.across.title else []
        for row, step in rows:
            cells = [_cell_html(grid, row, column) for column, _ in columns]
            lines.append([_label(step), *cells])
        body = "".join(f'<tr style="{_PLAIN}">{"".join(line)}</tr>' for line in lines)
        tables.append(
            f"<div>{html_line(name, 'font-weight:600') if name else ''}"
            f'<table style="{_TABLE}">{body}</table></div>'
        )
    return html_block(
        html_line(title, "font-weight:600;margin-bottom:6px"),
        f'<div style="display:flex;flex-wrap:wrap;gap:12px">{"".join(tables)}</div>',
        *(
            html_line(note, "opacity:0.85;font-size:12px")
            for note in (*notes, *picture.notes)
        ),
    )


# Notebook themes stripe rows and right-align cells, so every style is explicit.
_PLAIN = "background:transparent;border:none;font-weight:400;padding:0 6px"
_TABLE = (
    "border-collapse:separate;border-spacing:2px;margin:0;color:inherit;"
    "font-size:12px;text-align:center;white-space:nowrap"
)


def _label(text: str, span: int = 1) -> str:
    across = f' colspan="{span}"' if span > 1 else ""
    return f'<th style="{_PLAIN}"{across}>{html.escape(one_line(text))}</th>'


def _cell_html(grid: Grid, row: int | None, column: int | None) -> str:
    text = _cell_text(grid, row, column)
    if row is None or column is None:
        return f'<td style="{_PLAIN}">{text}</td>'
    cell = grid[row, column]
    about = html.escape(f"{one_line(cell.about)} {labels_text(cell.devices)}")
    style = "color:#111827;border:none;border-radius:4px;padding:5px 12px"
    fill = f"background:{cell.color};{style};text-align:center"
    return f'<td title="{about}" style="{fill}">{text}</td>'
