"""Draws `layouts.svg`, the picture in the README: `python docs/layouts.py`."""

import html
import operator
from pathlib import Path

import meshlayout as ml


SHAPE = (8, 16)
PANEL_WIDTH, PANEL_HEIGHT, HEADING = 424, 222, 30

# The theme of the page may differ from the one that the reader's system asks for, so
# the picture brings its own background.
STYLE = (
    "<style>svg{color:#1f2328}.card{fill:#fff;stroke:#d1d9e0}"
    "@media(prefers-color-scheme:dark){"
    "svg{color:#e6edf3}.card{fill:#0d1117;stroke:#3d444d}}</style>"
)
CARD = '<rect class="card" x="0.5" y="0.5" width="{}" height="{}" rx="8"/>'
MARGIN = 18


def svg_of(value: object) -> str:
    """Returns the SVG element in a value's picture for notebooks."""
    text = operator.methodcaller("_repr_html_")(value)
    return text[text.index("<svg") : text.index("</svg>") + len("</svg>")]


def main() -> None:
    """Writes the picture."""
    ml.virtual_devices(8)
    mesh = ml.create_mesh({"batch": 2, "model": 4})
    panels = {"create_mesh({'batch': 2, 'model': 4})": svg_of(mesh)}
    for specs in (["batch", None], [None, "model"], ["batch", "model"]):
        names = ", ".join("UNSHARDED" if s is None else repr(s) for s in specs)
        layout = ml.Layout(specs, mesh)
        panels[f"Layout([{names}], mesh)"] = svg_of(ml.visualize(layout, SHAPE))
    parts = []
    for at, (heading, picture) in enumerate(panels.items()):
        x = MARGIN + at % 2 * PANEL_WIDTH
        y = MARGIN + at // 2 * (PANEL_HEIGHT + HEADING)
        parts.append(
            f'<text x="{x + 2}" y="{y + 18}" font-size="14" font-family="ui-monospace,'
            f'Menlo,Consolas,monospace">{html.escape(heading)}</text>'
            f'<g transform="translate({x} {y + HEADING}) scale(0.9)">{picture}</g>'
        )
    width = 2 * MARGIN + 2 * PANEL_WIDTH
    height = MARGIN + 2 * (PANEL_HEIGHT + HEADING)
    Path(__file__).with_suffix(".svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" fill="currentColor">{STYLE}'
        f"{CARD.format(width - 1, height - 1)}"
        f"{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    main()
