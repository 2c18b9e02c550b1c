"""What a program sends, computes and holds, read off its text and its jaxpr.

`compile_step` and the made steps have this as `step.communication`, `step.cost` and
`step.memory`; `read_communication` is for any other program that `jax.jit` compiled.
Loaded at first use (PEP 562): steps know the readers, and most programs never ask.
"""

import importlib
from typing import TYPE_CHECKING, Any


_HOME = {
    **dict.fromkeys(("KINDS", "Collective"), "collectives"),
    **dict.fromkeys(
        ("Communication", "CommunicationDiff", "read_communication"), "communication"
    ),
    **dict.fromkeys(("Cost", "read_cost"), "cost"),
    "leaf_name": "leaves",
}

if TYPE_CHECKING:
    from meshlayout.hlo.collectives import KINDS as KINDS, Collective as Collective
    from meshlayout.hlo.communication import (
        Communication as Communication,
        CommunicationDiff as CommunicationDiff,
        read_communication as read_communication,
    )
    from meshlayout.hlo.cost import Cost as Cost, read_cost as read_cost
    from meshlayout.hlo.leaves import leaf_name as leaf_name
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
