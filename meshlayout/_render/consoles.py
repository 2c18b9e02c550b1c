"""Consoles: terminals where their stream is one."""

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
