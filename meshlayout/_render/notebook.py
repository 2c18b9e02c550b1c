"""What meshes, layouts and shards look like in a notebook or a terminal."""

import math
from collections.abc import Sequence

from meshlayout._render.pictures import (
    Held,
    mesh_picture,
    picture_svg,
    picture_text,
    shards_picture,
)
from meshlayout._render.tables import html_block, html_line, html_table


def mesh_html(
    axis_names: Sequence[str], shape: Sequence[int], device_labels: Sequence[str]
) -> str:
    """Returns a picture of a mesh: a grid of its devices.

    Args:
        axis_names: The mesh's axes.
        shape: Their sizes.
        device_labels: One label per device in mesh order, as `"cpu:3"`.
    """
    kind, labels = _without_kind(device_labels)
    picture = mesh_picture(axis_names, shape, labels)
    return html_block(
        html_line(_mesh_title(axis_names, shape, kind), _TITLE),
        picture_svg(picture),
        *(html_line(note, _NOTE) for note in picture.notes),
    )


def mesh_text(
    axis_names: Sequence[str], shape: Sequence[int], device_labels: Sequence[str]
) -> str:
    """Returns the same picture with box characters."""
    kind, labels = _without_kind(device_labels)
    title = _mesh_title(axis_names, shape, kind)
    return f"{title}\n{picture_text(mesh_picture(axis_names, shape, labels))}"


def layout_html(
    entries: Sequence[str],
    axis_names: Sequence[str],
    sizes: Sequence[int],
    memory_kind: str | None = None,
) -> str:
    """Returns a table of the mesh axes that shard each dim of a layout.

    Args:
        entries: One text per dim, as `"batch"`, `"(fsdp, model)"` or `"unsharded"`.
        axis_names: The mesh's axes.
        sizes: Their sizes.
        memory_kind: The kind of memory, if it is not the default one.
    """
    by_name = dict(zip(axis_names, sizes, strict=True))
    mesh = ", ".join(f"{name}={size}" for name, size in by_name.items())
    memory = f" in {memory_kind}" if memory_kind else ""
    caption = f"Layout [{', '.join(entries)}] on Mesh({mesh}){memory}"
    if not entries:
        return html_block(
            html_line(caption, _TITLE), html_line("a scalar, on every device", _NOTE)
        )
    # After `...`, only the distance from the end is known.
    rest = entries.index("...") if "..." in entries else len(entries)
    rows = [
        [
            dim if dim < rest else "" if dim == rest else dim - len(entries),
            entry,
            _shards(entry, by_name),
        ]
        for dim, entry in enumerate(entries)
    ]
    return html_table(["dim", "lies on", "shards"], rows, align="rlr", caption=caption)


def shards_html(
    shape: Sequence[int],
    axes: Sequence[str],
    held: Held,
    title: str,
    notes: Sequence[str] = (),
) -> str:
    """Returns a picture of how an array is divided into shards.

    Args:
        shape: The shape of the whole array.
        axes: For each dim, the mesh axes that shard it, as text; empty if none.
        held: What each device holds.
        title: A line above.
        notes: Lines below.
    """
    picture = shards_picture(shape, axes, held)
    return html_block(
        html_line(title, _TITLE),
        picture_svg(picture),
        *(html_line(note, _NOTE) for note in [*notes, *picture.notes]),
    )


def shards_text(
    shape: Sequence[int],
    axes: Sequence[str],
    held: Held,
    title: str,
    notes: Sequence[str] = (),
) -> str:
    """Returns the same picture with box characters."""
    picture = picture_text(shards_picture(shape, axes, held))
    return "\n".join([title, picture, *notes])


_TITLE = "font-weight:600;margin-bottom:6px"
_NOTE = "opacity:0.85;font-size:12px"


def _mesh_title(axis_names: Sequence[str], shape: Sequence[int], kind: str) -> str:
    axes = ", ".join(f"{n}={size}" for n, size in zip(axis_names, shape, strict=True))
    count = math.prod(shape)
    return f"Mesh({axes}): {count} {kind.upper()} device{'s' * (count != 1)}".replace(
        "  ", " "
    )


def _without_kind(labels: Sequence[str]) -> tuple[str, list[int | str]]:
    """Returns the kind that all labels begin with, and the rest of each."""
    kinds = {label.partition(":")[0] for label in labels}
    if len(kinds) > 1 or not all(":" in label for label in labels):
        return "", list(labels)
    rest = [label.partition(":")[2] for label in labels]
    return kinds.pop(), [int(one) if one.isdecimal() else one for one in rest]


def _shards(entry: str, sizes: dict[str, int]) -> str:
    if entry in ("...", "MATCH"):
        return ""
    names = entry.removeprefix("(").removesuffix(")").split(", ")
    return str(math.prod(sizes.get(name, 1) for name in names))
