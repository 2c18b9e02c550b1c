"""Rows of text as a plain or an HTML table, the text of arrays, and where text goes.

Any text may come from a user: control characters are written out, and HTML is escaped.
"""

import html
import re
import sys
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console

from meshlayout._annotations import DType


# No black and no white: notebooks have light and dark themes.
_LINE = "1px solid rgba(128,128,128,0.35)"
_MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
SANS = "system-ui,-apple-system,'Segoe UI',Roboto,sans-serif"


def bytes_text(n: float) -> str:
    """Returns a number of bytes with a unit, such as `"392.0 KiB"`."""
    value, units = float(n), ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    # Rounded before the comparison: 1023.96 KiB would else become "1024.0 KiB".
    while abs(round(value, 1)) >= 1024 and units[1:]:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def dtype_text(dtype: DType) -> str:
    """Returns the short name of a dtype, as JAX prints it in types: `"bf16"`."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    name = str(name or dtype)
    return re.sub(r"^(b?)(f|u|i|c)(?:loat|int|nt|omplex)(?=\d)", r"\1\2", name)


def array_text(dtype: DType, shape: Sequence[int]) -> str:
    """Returns the type of an array, such as `"f32[512, 10]"`."""
    return f"{dtype_text(dtype)}[{', '.join(map(str, shape))}]"


def ranges_text(numbers: Sequence[int]) -> str:
    """Returns numbers in order, with runs as ranges: `"0-3,6"`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}-{b}" if a < b else str(a) for a, b in runs)


def text_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    align: str | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Returns a table for a terminal; `align` has one of `l`, `r`, `c` per column."""
    lines = [[one_line(cell) for cell in row] for row in [headers, *rows]]
    rule = ["─" * max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, rule)
    return "\n".join([*text_columns(lines, align or "l" * len(headers)), *notes])


def text_columns(rows: Sequence[Sequence[object]], align: str) -> list[str]:
    """Returns rows as lines with aligned columns."""
    lines = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(padded(*x) for x in zip(cells, widths, align, strict=True)).rstrip()
        for cells in lines
    ]


def html_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    align: str | None = None,
    caption: str | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Returns a table for a notebook; `caption` is a line above it."""
    align = align or "l" * len(headers)
    head = _html_row("th", headers, align, "opacity:0.75;font-weight:600;")
    body = "".join(_html_row("td", row, align, f"font-family:{_MONO};") for row in rows)
    # In quirks mode, a table does not inherit the color around it.
    style = "border-collapse:collapse;border:none;margin:0;font-size:12px;color:inherit"
    return html_block(
        html_line(caption, "font-weight:600;margin-bottom:4px") if caption else "",
        f'<div style="overflow:auto;max-height:40em"><table style="{style}">'
        f'<thead style="border-bottom:{_LINE}">{head}</thead>'
        f"<tbody>{body}</tbody></table></div>",
        *(html_line(note, "margin-top:3px;opacity:0.85") for note in notes),
    )


def _html_row(tag: str, cells: Sequence[object], align: str, style: str) -> str:
    sides = {"l": "left", "r": "right", "c": "center"}
    # Notebook themes stripe rows and right-align cells, so every style is explicit.
    parts = [
        f'<{tag} style="text-align:{sides[how]};padding:3px 14px 3px 2px;border:none;'
        f'background:transparent;white-space:nowrap;{style}">'
        f"{html.escape(one_line(cell))}</{tag}>"
        for cell, how in zip(cells, align, strict=True)
    ]
    line = f"border:none;border-bottom:{_LINE};background:transparent"
    return f'<tr style="{line}">{"".join(parts)}</tr>'


def html_block(*parts: str) -> str:
    """Returns pieces of HTML one below the other, in our font."""
    style = f"font-family:{SANS};font-size:13px;line-height:1.4;margin:4px 0"
    return f'<div style="{style}">{"".join(parts)}</div>'


def html_line(text: str, style: str) -> str:
    """Returns one line of text, escaped."""
    return f'<div style="{style}">{html.escape(one_line(text))}</div>'


def html_text(lines: Sequence[str]) -> str:
    """Returns lines of text, escaped, whose columns stay aligned."""
    text = html.escape("\n".join(map(one_line, lines)))
    style = f"font-family:{_MONO};font-size:12px;margin:0;padding:0;overflow-x:auto"
    return f'<pre style="{style};background:transparent;color:inherit">{text}</pre>'


def one_line(cell: object) -> str:
    """Returns the text of a cell with control characters escaped."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(cell)
    )


def padded(text: str, width: int, how: str) -> str:
    """Returns a text padded with spaces to a width, `l`eft, `r`ight or `c`entered."""
    space = max(0, width - cell_len(text))
    before = {"l": 0, "r": space, "c": space // 2}[how]
    return " " * before + text + " " * (space - before)


def console_on(stream: Any) -> Console:
    """Returns a console that writes to a stream.

    rich takes FORCE_COLOR for a terminal, and notebooks set it for programs that they
    start. But it only asks for colors; a moving line needs a real terminal.
    """
    return Console(file=stream, force_terminal=stream is not None and stream.isatty())


def is_notebook() -> bool:
    """Returns whether this program runs in a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None
