"""Where output goes: terminals, logs and the cells of notebooks."""

import sys
from typing import Any

from rich.console import Console


def console_on(stream: Any) -> Console:
    """Returns a console that writes to a stream.

    To rich, FORCE_COLOR means a terminal, and notebooks set it for the programs that
    they start. But it only asks for colors; a line that moves needs a real terminal.

    Args:
        stream: A text stream such as `sys.stdout`.
    """
    return Console(file=stream, force_terminal=stream is not None and stream.isatty())


def notebook_shell() -> Any:
    """Returns IPython's shell if this program runs in a notebook, or None.

    Its `execution_count` is the number of the running cell.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None
