"""Draws the pictures of the README and the site: `python docs/draw.py`.

What is drawn are the library's own descriptions of a mesh and of layouts, the ones that
notebooks show. GitHub and package indexes take no HTML tables in colors, so here they
become SVG files, one for light pages and one for dark ones.
"""

import html
from pathlib import Path

import meshlayout as ml
from meshlayout import _render


FOLDER = Path(__file__).parent / "pictures"

# The batch and the arrays of the README's model, under the rules of its second program:
# shape, layout, and the width of the drawing.
ARRAYS = {
    "batch": ((128, 64), ("batch", None), 112),
    "up/kernel": ((64, 256), (None, "model"), 148),
    "down/kernel": ((256, 10), ("model", None), 112),
    "biases": ((256,), (None,), 88),
}

# One picture for each parallelism of the guide: its mesh, the arrays with their layouts
# (of two of their dims), and what a step sends.
PARALLELISMS = {
    "data": (
        {"batch": 8},
        {
            "batch (rows, ...)": ("batch", None),
            "parameters": (None, None),
        },
        "all-reduce of the gradients",
    ),
    "fsdp": (
        {"batch": 8},
        {
            "batch (rows, ...)": ("batch", None),
            "parameters, slots": ("batch", None),
            "a layer in use": (None, None),
        },
        "all-gather of each layer's parameters, reduce-scatter of its gradients",
    ),
    "hybrid": (
        {"replica": 2, "fsdp": 4},
        {
            "batch (rows, ...)": (("replica", "fsdp"), None),
            "parameters, slots": ("fsdp", None),
        },
        "as fsdp along 'fsdp'; all-reduce of the gradients along 'replica'",
    ),
    "tensor": (
        {"batch": 2, "model": 4},
        {
            "batch (rows, ...)": ("batch", None),
            "first matrix": (None, "model"),
            "second matrix": ("model", None),
        },
        "all-reduce of activations, one for each half of a block",
    ),
    "sequence": (
        {"batch": 2, "model": 4},
        {
            "residual (rows, length)": ("batch", "model"),
            "first matrix": (None, "model"),
            "second matrix": ("model", None),
        },
        "all-gather before each half of a block, reduce-scatter after it",
    ),
    "ring": (
        {"batch": 2, "seq": 4},
        {
            "queries (rows, length)": ("batch", "seq"),
            "keys, at first": ("batch", "seq"),
            "parameters": (None, None),
        },
        "keys and values to the next device, until each has met all",
    ),
    "all_to_all": (
        {"seq": 8},
        {
            "(length, heads) outside": ("seq", None),
            "in attention": (None, "seq"),
            "parameters": (None, None),
        },
        "all-to-all of queries, keys, values and results",
    ),
    "experts": (
        {"batch": 2, "expert": 4},
        {
            "tokens (rows, ...)": (("batch", "expert"), None),
            "experts (number, ...)": ("expert", None),
            "the rest": (None, None),
        },
        "all-to-all of tokens to their experts, and of results back",
    ),
    "pipeline": (
        {"batch": 2, "stage": 4},
        {
            "batch (rows, ...)": ("batch", None),
            "blocks (layer, ...)": ("stage", None),
        },
        "activations of a microbatch to the next stage",
    ),
    "space": (
        {"batch": 2, "height": 2, "width": 2},
        {
            "images (height, width)": ("height", "width"),
            "kernels": (None, None),
        },
        "edges of shards to the neighbors; all-reduce of the gradients",
    ),
}

TEXT = {"light": "#1f2937", "dark": "#e5e7eb"}
QUIET = {"light": "#6b7280", "dark": "#9ca3af"}
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"


def text(
    x: float,
    y: float,
    words: str,
    color: str,
    size: int,
    font: str = SANS,
    **style: str,
) -> str:
    """Draws words."""
    options = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in style.items())
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{color}" font-family="{font}" '
        f'font-size="{size}"{options}>{html.escape(words)}</text>'
    )


def grid(
    picture: _render.Picture, x: float, y: float, width: float, height: float
) -> list[str]:
    """Draws the blocks of a picture into a rectangle, each with its devices."""
    (cells,) = picture.grids.values()
    rows, columns = len(picture.down.steps), len(picture.across.steps)
    wide, high = width / columns, height / rows
    parts: list[str] = []
    for (row, column), cell in cells.items():
        left, top = x + column * wide, y + row * high
        parts.append(
            f'<rect x="{left + 1.5:g}" y="{top + 1.5:g}" width="{wide - 3:g}" '
            f'height="{high - 3:g}" rx="4" fill="{cell.color}"/>'
        )
        label = _render.ranges_text(sorted(cell.devices)).replace(",", ", ")
        middle = left + wide / 2, top + high / 2 + 4
        parts.append(text(*middle, label, "#111827", 12, text_anchor="middle"))
    return parts


def overview(scheme: str, *, is_narrow: bool = False) -> str:
    """Draws the mesh of eight devices, the batch, and the arrays of the model."""
    mesh = ml.create_mesh({"batch": 2, "model": 4})
    devices = _render.mesh_picture(mesh.axis_names, (2, 4), range(8))
    color, quiet = TEXT[scheme], QUIET[scheme]
    turned = {"text_anchor": "middle", "transform": "rotate(-90 14 150)"}
    # Where the arrays begin: beside the mesh, or below it in two rows.
    left, top = (24, 236) if is_narrow else (290, 0)
    parts = [
        text(24, 28, "A mesh of devices", color, 17, font_weight="600"),
        text(24, 50, '{"batch": 2, "model": 4}', quiet, 12, MONO),
        text(134, 88, "model", quiet, 13, text_anchor="middle"),
        text(14, 150, "batch", quiet, 13, **turned),
        *grid(devices, 24, 98, 220, 104),
        text(24, 226, "each number is a device", quiet, 12),
        text(left, top + 28, "A model's layouts on it", color, 17, font_weight="600"),
        text(left, top + 50, "each block is a shard, on the devices in it", quiet, 12),
    ]
    x, y = left, top + 98
    for number, (name, (shape, spec, width)) in enumerate(ARRAYS.items()):
        if is_narrow and number == 2:
            x, y = left, y + 176
        shards = ml.visualize(ml.Layout(list(spec), mesh), shape)._picture
        parts += grid(shards, x, y, width, 104 if len(shape) > 1 else 40)
        below = str(spec).replace("'", '"') if any(spec) else "replicated"
        parts.append(text(x + 2, y - 10, name, color, 13, MONO))
        parts.append(text(x + 2, y + 128, below, quiet, 12, MONO))
        x += 152 if is_narrow else width + 24
    label = "A 2 x 4 mesh of devices, and the layouts of a model's arrays"
    body = "\n".join(parts)
    width, height = (340, 656) if is_narrow else (840, 244)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{label}">\n'
        f"{body}\n</svg>\n"
    )


def parallelism(name: str, scheme: str) -> str:
    """Draws the arrays of one parallelism as they lie on eight devices."""
    axes, arrays, sent = PARALLELISMS[name]
    mesh, color, quiet = ml.create_mesh(axes), TEXT[scheme], QUIET[scheme]
    parts = [text(8, 20, repr(mesh).removeprefix("Mesh"), quiet, 12, MONO)]
    for number, (title, spec) in enumerate(arrays.items()):
        shards = ml.visualize(ml.Layout(list(spec), mesh), (8, 8))._picture
        x = 8 + 214 * number
        parts += grid(shards, x, 58, 190, 128)
        parts.append(text(x + 2, 46, title, color, 13))
    parts.append(text(8, 212, f"sent: {sent}", color, 13))
    body, label = "\n".join(parts), html.escape(f"{name}: {sent}")
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 222" width="640" '
        f'height="222" role="img" aria-label="{label}">\n{body}\n</svg>\n'
    )


def logo() -> str:
    """Draws a mesh of three by three devices."""
    picture = _render.mesh_picture(("", ""), (3, 3), range(9))
    (cells,) = picture.grids.values()
    parts = [
        f'<rect x="{2 + 10 * column}" y="{2 + 10 * row}" width="8" height="8" rx="2" '
        f'fill="{cell.color}"/>'
        for (row, column), cell in cells.items()
    ]
    body = "\n".join(parts)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">\n'
        f"{body}\n</svg>\n"
    )


def drawings() -> dict[str, str]:
    """Returns each file's name and content."""
    ml.virtual_devices(8)
    files = {"logo.svg": logo()}
    for scheme in TEXT:
        files[f"overview-{scheme}.svg"] = overview(scheme)
        files[f"overview-narrow-{scheme}.svg"] = overview(scheme, is_narrow=True)
        for name in PARALLELISMS:
            files[f"{name}-{scheme}.svg"] = parallelism(name, scheme)
    return files


if __name__ == "__main__":
    for name, content in drawings().items():
        (FOLDER / name).write_text(content)
