"""Pictures as SVG images of their own, with a background.

A notebook shows a picture as HTML, which takes the colors of the page. GitHub and
others remove SVG from the HTML of a committed notebook; there an image is shown, which
cannot know the page's colors and brings its own.
"""

import re
from collections.abc import Sequence

from meshlayout._render.pictures import Picture, picture_svg, svg_text
from meshlayout._render.tables import SANS, cell_width, one_line


_STYLE = (
    "<style>svg{color:#1f2328}.card{fill:#fff;stroke:#d1d9e0}"
    "@media(prefers-color-scheme:dark){"
    "svg{color:#e6edf3}.card{fill:#0d1117;stroke:#3d444d}}</style>"
)
_MARGIN, _LINE, _CHAR = 14, 20, 7.2
_MAX_WIDTH = 760  # of the pictures side by side


def picture_card(title: str, picture: Picture, notes: Sequence[str] = ()) -> str:
    """Returns what `picture_html` draws, as an image of its own."""
    return svg_card(title, [picture_svg(picture)], [*notes, *picture.notes])


def svg_card(title: str, pictures: Sequence[str], notes: Sequence[str] = ()) -> str:
    """Returns one image: a title, SVG elements side by side, and lines below.

    Args:
        title: Above the pictures; may be empty.
        pictures: SVG elements that begin with their width and height.
        notes: Lines below.
    """
    parts = []
    lines = [title] if title else []
    y = _MARGIN + _LINE * len(lines)
    if title:
        parts.append(svg_text(title, _MARGIN, _MARGIN + 13, weight=600))
    x, bottom, right = float(_MARGIN), y, 0.0
    for picture in pictures:
        width, height = _size(picture)
        if x > _MARGIN and x + width > _MAX_WIDTH:
            x, y = float(_MARGIN), bottom
        parts.append(f'<g transform="translate({x:g} {y:g})">{picture}</g>')
        x += width
        bottom, right = max(bottom, y + height), max(right, x)
    for note in notes:
        parts.append(svg_text(note, _MARGIN, bottom + 15))
        bottom += _LINE
    texts = (cell_width(one_line(line)) * _CHAR + _MARGIN for line in [*lines, *notes])
    width, height = max(right, *texts, 0.0) + _MARGIN, bottom + _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" '
        f'height="{height:g}" viewBox="0 0 {width:g} {height:g}" fill="currentColor" '
        f'font-family="{SANS}" font-size="13">{_STYLE}'
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1:g}" '
        f'height="{height - 1:g}" rx="8"/>{"".join(parts)}</svg>'
    )


def _size(svg: str) -> tuple[float, float]:
    width, height = re.findall(r' (?:width|height)="([\d.]+)"', svg)[:2]
    return float(width), float(height)
