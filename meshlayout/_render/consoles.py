"""Where output goes: terminals, where their stream is one, and cells of notebooks."""

import sys
from typing import Any

from rich.console import Console


def console_on(stream: Any) -> Console:
    """Returns a console that writes to a stream.

    Rich takes FORCE_COLOR, which notebooks set for the programs they start, as a sign
    of a terminal. It only asks for colors; a live line needs a real terminal.

    Args:
        stream: A text stream such as `sys.stdout`.
    """
    return Console(file=stream, force_terminal=stream is not None and stream.isatty())


def notebook_shell() -> Any:
    """Returns IPython's shell if a notebook runs this program, or None.

    Its `execution_count` is the number of the cell that runs.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None
