"""Keeps quiet about what Orbax leaves behind where it cannot read or write a file."""

import sys
from collections.abc import Callable
from typing import Any


def quiet_orbax() -> Callable[[Any], Any]:
    """Has Python not tell of Orbax's coroutines that are never awaited.

    Nor of callbacks to loops that it has closed. Some are found at the very end, so
    that this stays.

    Returns:
        What told of them before.
    """
    before = sys.unraisablehook

    def tell(found: Any) -> None:
        code = getattr(found.object, "cr_code", None)
        if "orbax" in getattr(code, "co_filename", ""):
            return
        if "Event loop is closed" not in str(found.exc_value):
            before(found)

    sys.unraisablehook = tell
    return before
