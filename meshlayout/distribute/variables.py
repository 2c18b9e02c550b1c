"""Variables and modules as the programs of a strategy see them."""

import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshlayout import _checks
from meshlayout._annotations import Leaf
from meshlayout.errors import StrategyError


Variable: TypeAlias = "nnx.Variable[Any]"

# Flax's private attributes, which have no public counterparts. If one is renamed,
# look-ups here raise, and all of tests/test_distribute.py fails. - The slot of a
# Variable's value: `_raw_value`, which was `raw_value` in flax 0.11.
VALUE = "_raw_value" if hasattr(nnx.Variable, "_raw_value") else "raw_value"
# - The trace that may change a Variable, or a module by way of its state.
TRACE, STATE = "_trace_state", "_pytree__state"
# - Flax's bookkeeping in the attributes of modules, which its transforms replace.
_BOOKKEEPING = ("_pytree__", "_object__")

# The slot itself, for calls in C, without hooks, checks, or watching.
_slot: Any = vars(nnx.Variable)[VALUE]
raw_value: Callable[[Variable], Any] = _slot.__get__
set_raw_value: Callable[[Variable, Any], None] = _slot.__set__


def aggregation(variable: Variable) -> str | None:
    """Returns how the replicas' values of a Variable are combined.

    `"metric"` adds up states of metrics that were added to; None allows no difference.
    """
    choice = variable.get_metadata().get("aggregation")
    if choice is not None:
        kinds, error = ("sum", "mean", "first", "per_replica"), StrategyError
        return _checks.choice("aggregation", str(choice).lower(), kinds, error=error)
    if isinstance(variable, nnx.metrics.MetricState):
        return "metric"
    return "mean" if isinstance(variable, nnx.BatchStat) else None


# The `ReplicaTrace` that is under way in this thread.
current: ContextVar[Any] = ContextVar("trace", default=None)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Returns a context in which nothing is watched."""
    token = current.set(None)
    try:
        yield
    finally:
        current.reset(token)


def frozen(value: Leaf) -> Any:
    """Returns an attribute's current value, to compare while it is alive."""
    if isinstance(value, (list, tuple)):
        return type(value), list(map(frozen, value))
    if type(value) is dict:
        items = value.items()
        return {k: frozen(x) for k, x in items if not str(k).startswith(_BOOKKEEPING)}
    is_object = isinstance(value, nnx.Pytree | nnx.Variable | jax.Array)
    is_object |= type(value).__hash__ is None
    return type(value), id(value) if is_object else value


def _views(values: Iterable[Any]) -> Iterator[Collection[Any]]:
    """Yields the values in nested dicts and lists as they change."""
    for value in values:
        if isinstance(value, tuple):
            yield from _views(value)
        elif type(value) is list or type(value) is dict:
            view = value.values() if isinstance(value, dict) else value
            yield view
            yield from _views(view)


def keep_numbers(value: Any, level: Any) -> None:
    """Puts Variables of a trace where a user has assigned numbers in optimizer states.

    As in `opt_state.hyperparams["learning_rate"] = 0.1`, over Flax's own Variable: an
    update assigns there, and a program returns only what Variables hold.
    """
    is_dict = type(value) is dict
    for key, x in value.items() if is_dict else enumerate(value):
        if is_dict and isinstance(x, jax.Array | np.ndarray | np.generic | int | float):
            with unwatched(), jax.ensure_compile_time_eval():
                value[key] = nnx.OptArray(jnp.asarray(x))
                setattr(value[key], TRACE, level)
        elif isinstance(x, list | tuple | dict):
            keep_numbers(x, level)


class Modes:
    """The attributes of modules for which a program was compiled.

    They are nearly always the same objects as before, which is compared in C: a
    ResNet-50 has 2,400. Modules that no other one holds are not kept alive: once one
    is gone, `gone` is called.
    """

    def __init__(self, nodes: list[Any], gone: Callable[[], None]) -> None:
        self._refs = [weakref.ref(node, lambda _: gone()) for node in nodes]
        self._attributes = [vars(node) for node in nodes]
        self._frozen = list(map(frozen, self._attributes))
        self._look()

    def _look(self) -> None:
        self._containers = [*_views(self._attributes)]
        self._before = [*itertools.chain.from_iterable(self._containers)]

    def are_current(self) -> bool:
        """Returns whether all attributes are unchanged."""
        if sum(map(len, self._containers)) == len(self._before):
            now = itertools.chain.from_iterable(self._containers)
            if all(map(operator.is_, now, self._before)):
                return True
        if list(map(frozen, self._attributes)) != self._frozen:
            return False
        self._look()  # Flax's transforms replace attributes by equal ones
        return True
