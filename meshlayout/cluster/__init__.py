"""The processes of a program: start-up, and communication apart from devices.

Loaded at first use (PEP 562): the launcher is in this package, and needs no JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any


_HOME = {
    **dict.fromkeys(("all_gather", "assert_same", "barrier", "broadcast"), "agreement"),
    **dict.fromkeys(("initialize", "is_main", "process_count"), "startup"),
    **dict.fromkeys(("process_index", "shutdown"), "startup"),
}

if TYPE_CHECKING:
    from meshlayout.cluster.agreement import (
        all_gather as all_gather,
        assert_same as assert_same,
        barrier as barrier,
        broadcast as broadcast,
    )
    from meshlayout.cluster.startup import (
        initialize as initialize,
        is_main as is_main,
        process_count as process_count,
        process_index as process_index,
        shutdown as shutdown,
    )
else:

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        module = importlib.import_module(f"{__name__}.{_HOME[name]}")
        globals()[name] = value = getattr(module, name)
        return value


def __dir__() -> list[str]:
    return list(_HOME)
