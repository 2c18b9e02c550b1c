"""Consoles: terminals where their stream is one."""

from typing import Any

from rich.console import Console


def console_on(stream: Any) -> Console:
    """Returns a console that writes to a stream.

    Rich takes FORCE_COLOR, which notebooks set for the programs that they start, for a
    sign of a terminal. It asks for colors; a line that moves needs the real thing.

    Args:
        stream: As `sys.stdout`.
    """
    return Console(file=stream, force_terminal=stream is not None and stream.isatty())
