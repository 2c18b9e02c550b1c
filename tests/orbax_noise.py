"""Keeps quiet about what Orbax leaves behind where it cannot read or write a file."""

import sys
from typing import Any


def quiet_orbax() -> None:
    """Has Python not tell of Orbax's coroutines that nobody awaits, and closed loops.

    Some are found at the very end, so that this stays.
    """
    before = sys.unraisablehook

    def tell(found: Any) -> None:
        code = getattr(found.object, "cr_code", None)
        is_orbax = "orbax" in getattr(code, "co_filename", "")
        if not is_orbax and "Event loop is closed" not in str(found.exc_value):
            before(found)

    sys.unraisablehook = tell
