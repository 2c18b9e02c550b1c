"""Where output goes: terminals, logs and the cells of notebooks."""

import sys
from typing import Any

from rich.console import Console


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
