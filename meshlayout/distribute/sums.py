"""Values that are a Variable's own plus something: what `assign_add` writes.

In TensorFlow, `assign_add` and `assign` are two methods, and mean two things for a
variable that is added up over replicas. With NNX, both set a value, so a first trace
follows what is added to a value that was read, through the operators of traced arrays.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

from jax.core import Tracer

from meshlayout._patches import SharedPatches
from meshlayout.distribute.gradients import current


class Increments:
    """What is known of values that were computed from those of Variables."""

    def __init__(self) -> None:
        # The value, the Variables to whose value something was added to get it, and
        # those from which it was computed in another way, by the id of the value.
        self._known: dict[int, tuple[Any, frozenset[int], frozenset[int]]] = {}

    def start(self, variable: object, value: Any) -> None:
        """Notes the value of a Variable."""
        self._known[id(value)] = (value, frozenset([id(variable)]), frozenset())

    def is_increment(self, variable: object, value: Any) -> bool | None:
        """Returns whether something was added to a Variable's value; None: unknown."""
        _, added, other = self._known.get(id(value), (None, (), ()))
        return (
            False if id(variable) in other else True if id(variable) in added else None
        )

    def note(self, name: str, x: Any, y: Any, result: Any) -> None:
        """Notes the result of an operator."""
        _, added_x, other_x = self._known.get(id(x), _UNKNOWN)
        _, added_y, other_y = self._known.get(id(y), _UNKNOWN)
        added, other = added_x | added_y, other_x | other_y
        if not added | other:
            return
        if name == "__getitem__" and y is ...:
            pass
        elif name in ("__add__", "__radd__", "__sub__"):
            # v + v is twice the value, and x - v takes it away.
            other |= added_y if name == "__sub__" else added_x & added_y
        else:
            other |= added
        self._known[id(result)] = (result, added - other, other)


_UNKNOWN: tuple[None, frozenset[int], frozenset[int]] = (None, frozenset(), frozenset())


def _noting(name: str) -> Callable[[Any], Any]:
    def make(operator: Any) -> Any:
        @functools.wraps(operator)
        def replacement(self: Any, other: Any) -> Any:
            result, trace = operator(self, other), current.get()
            if trace is not None and trace.increments is not None:
                trace.increments.note(name, self, other, result)
            return result

        return replacement

    return make


_OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow")
_names = [f"__{name}__" for name in (*_OPERATORS, "matmul", "getitem")]

# If JAX stops defining these on all traced arrays, users' metrics are refused, and
# tests/test_distribute_variables.py notices.
patches = SharedPatches(
    *((cast("type", Tracer), name, _noting(name)) for name in _names)
)
