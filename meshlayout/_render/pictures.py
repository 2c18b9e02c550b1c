"""A grid of shards or devices, described once and drawn as text or as an HTML table.

The middle of large arrays and meshes is left out.
"""

import colorsys
import html
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from rich.cells import cell_len

from meshlayout._render.tables import (
    html_block,
    html_line,
    one_line,
    padded,
    ranges_text,
)


Held: TypeAlias = Sequence[tuple[int, tuple[tuple[int, int], ...]]]
"""The id of each device, and (start, stop) of what it holds in every dim."""

# How many rows, columns and grids are drawn before the middle ones are left out.
_MAX_STEPS = 16
_MAX_GRIDS = 8
_MAX_TEXT_COLUMNS = 110  # of a terminal
_MAX_LABEL = 18


class Direction(NamedTuple):
    """The rows or the columns of all grids."""

    title: str = ""
    steps: Sequence[str] = ("",)  # the label of each


class Cell(NamedTuple):
    """One shard or device."""

    devices: list[int]  # that hold it
    color: str


Grid: TypeAlias = dict[tuple[int, int], Cell]


@dataclass(frozen=True)
class Picture:
    """Grids by title, with equal rows (down) and columns (across); lines below."""

    down: Direction
    across: Direction
    grids: dict[str, Grid]
    notes: Sequence[str] = ()


def shards_picture(shape: Sequence[int], axes: Sequence[str], held: Held) -> Picture:
    """Describes how an array is divided into shards, and the devices that hold each.

    Two dims are drawn: the last two sharded ones, or else the largest others. Further
    sharded dims become several grids.
    """
    cuts = [sorted({part[dim] for _, part in held}) for dim in range(len(shape))]
    holders: dict[tuple[int, ...], list[int]] = {}
    for device, part in held:
        index = tuple(cut.index(piece) for cut, piece in zip(cuts, part, strict=True))
        holders.setdefault(index, []).append(device)
    sharded = [dim for dim, cut in enumerate(cuts) if len(cut) > 1]
    whole = sorted({*range(len(shape))} - {*sharded}, key=lambda dim: -shape[dim])
    drawn = sorted((sharded + whole[: max(0, 2 - len(sharded))])[-2:])
    directions = [
        Direction(
            f"dim {dim} ({shape[dim]})" + f" over {axes[dim]}" * bool(axes[dim]),
            [f"{start}:{stop}" for start, stop in cuts[dim]],
        )
        for dim in drawn
    ]
    grids: dict[str, Grid] = {}
    for number, (index, devices) in enumerate(sorted(holders.items())):
        stacked = {dim: cuts[dim][index[dim]] for dim in sharded if dim not in drawn}
        parts = [f"dim {d} at {start}:{stop}" for d, (start, stop) in stacked.items()]
        # An array of one dim is drawn as a single row.
        row, column = [0] * (2 - len(drawn)) + [index[dim] for dim in drawn]
        cell = Cell(devices, _color(number, len(holders)))
        grids.setdefault(", ".join(parts), {})[row, column] = cell
    rest = [f"dim {dim} ({shape[dim]})" for dim in sorted({*whole} - {*drawn})]
    notes = [f"Whole in every shard, and not drawn: {', '.join(rest)}."] * bool(rest)
    return _picture(directions, grids, notes)


def mesh_picture(
    axis_names: Sequence[str], shape: Sequence[int], devices: Sequence[int]
) -> Picture:
    """Describes the devices of a mesh, with the last two axes as a grid."""
    directions = [
        Direction(f"{name} ({size})", [*map(str, range(size))])
        for name, size in list(zip(axis_names, shape, strict=True))[-2:]
    ]
    grids: dict[str, Grid] = {}
    for number, coords in enumerate(itertools.product(*map(range, shape))):
        names = [f"{name} {i}" for name, i in zip(axis_names, coords, strict=True)]
        row, column = (0, *coords)[-2:]
        cell = Cell([devices[number]], _color(number, len(devices)))
        grids.setdefault(", ".join(names[:-2]), {})[row, column] = cell
    return _picture(directions, grids, [])


def _picture(
    directions: list[Direction], grids: dict[str, Grid], notes: list[str]
) -> Picture:
    down, across = [Direction()] * (2 - len(directions)) + directions
    titles = [x for index, x in _shortened([*grids], _MAX_GRIDS) if index >= 0]
    if len(titles) < len(grids):
        notes = [*notes, f"{len(titles)} of {len(grids)} grids are drawn."]
    return Picture(down, across, {title: grids[title] for title in titles}, notes)


def _shortened(steps: Sequence[str], most: int) -> list[tuple[int, str]]:
    """Returns indices and labels, with -1 for the middle ones where there are many."""
    labels = list(enumerate(steps))
    if len(labels) <= most:
        return labels
    tail = (most - 1) // 2
    return [*labels[: most - 1 - tail], (-1, "…"), *labels[-tail:]]


def _color(number: int, count: int) -> str:
    """Returns one of `count` light colors of evenly spaced hues; gray for one."""
    if count == 1:
        return "#b6bfcc"
    lightness = 0.8 if count <= 8 or number % 2 else 0.7  # many hues are alike
    color = colorsys.hls_to_rgb((0.6 + number / count) % 1, lightness, 0.6)
    return "#" + "".join(f"{round(255 * c):02x}" for c in color)


def _label(grid: Grid, row: int, column: int) -> str:
    """Returns the device ids in a cell, or their number if they do not fit."""
    if (row, column) not in grid:
        return "…"
    devices = grid[row, column].devices
    ids = ranges_text(sorted(devices)).replace(",", ", ")
    return ids if len(ids) <= _MAX_LABEL else f"{len(devices)} devices"


def picture_text(picture: Picture) -> str:
    """Draws with box characters, no wider than a terminal."""
    rows = _shortened(picture.down.steps, _MAX_STEPS)
    down, across = one_line(picture.down.title), one_line(picture.across.title)
    labels = [_label(grid, *at) for grid in picture.grids.values() for at in grid]
    width = 2 + max(map(cell_len, [*labels, *picture.across.steps]))
    margin = max(map(cell_len, [down, *(step for _, step in rows)]))
    room = max(3, (_MAX_TEXT_COLUMNS - margin - 1) // (width + 1))
    columns = _shortened(picture.across.steps, min(_MAX_STEPS, room))
    left = " " * (margin + 1)
    top, middle, bottom = (
        f"{left}{start}{joint.join(['─' * width] * len(columns))}{end}"
        for start, joint, end in ("┌┬┐", "├┼┤", "└┴┘")
    )
    lines: list[str] = []
    for title, grid in picture.grids.items():
        lines += [title] * bool(title) + [f"{left} {across}"] * bool(across)
        steps = " ".join(padded(step, width, "c") for _, step in columns)
        lines += [f"{padded(down, margin, 'l')}  {steps}"] * bool(across or down)
        rules = itertools.chain([top], itertools.repeat(middle))
        for (row, step), rule in zip(rows, rules, strict=False):
            texts = [padded(_label(grid, row, at), width, "c") for at, _ in columns]
            lines += [rule, f"{padded(step, margin, 'r')} │{'│'.join(texts)}│"]
        lines.append(bottom)
    return "\n".join([*(line.rstrip() for line in lines), *picture.notes])


# Notebook themes restyle tables, so every style is explicit, but not the page's color.
_PLAIN = "background:transparent;border:none;font-weight:400;padding:0 6px"
_TABLE = (
    "border-collapse:separate;border-spacing:2px;margin:0;color:inherit;"
    "font-size:12px;text-align:center;white-space:nowrap"
)
_FILLED = "color:#111827;border:none;border-radius:4px;padding:5px 12px"


def picture_html(title: str, picture: Picture, notes: Sequence[str] = ()) -> str:
    """Draws for a notebook, with a title above and notes below."""
    down, across = picture.down, picture.across
    columns = _shortened(across.steps, _MAX_STEPS)
    steps = [_head(down.title), *(_head(step) for _, step in columns)]
    heads = [[_head(""), _head(across.title, len(columns))], steps]
    tables: list[str] = []
    for name, grid in picture.grids.items():
        lines = [*heads] if across.title else []
        for row, step in _shortened(down.steps, _MAX_STEPS):
            lines.append([_head(step), *(_cell_html(grid, row, n) for n, _ in columns)])
        body = "".join(f'<tr style="{_PLAIN}">{"".join(line)}</tr>' for line in lines)
        above = html_line(name, "font-weight:600") if name else ""
        tables.append(f'<div>{above}<table style="{_TABLE}">{body}</table></div>')
    below = [*notes, *picture.notes]
    return html_block(
        html_line(title, "font-weight:600;margin-bottom:6px"),
        f'<div style="display:flex;flex-wrap:wrap;gap:12px">{"".join(tables)}</div>',
        *(html_line(note, "opacity:0.85;font-size:12px") for note in below),
    )


def _head(text: str, span: int = 1) -> str:
    text = html.escape(one_line(text))
    return f'<th style="{_PLAIN}" colspan="{span}">{text}</th>'


def _cell_html(grid: Grid, row: int, column: int) -> str:
    style, cell = _PLAIN, grid.get((row, column))
    if cell is not None:
        style = f"background:{cell.color};{_FILLED};text-align:center"
    return f'<td style="{style}">{_label(grid, row, column)}</td>'
