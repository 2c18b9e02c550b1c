"""Variables and modules as the programs of a strategy see them."""

import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshlayout import _checks
from meshlayout._annotations import Leaf, PyTree
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


def _containers(values: Iterable[Any]) -> Iterator[Any]:
    """Yields the dicts and lists in nested ones, and in tuples."""
    for value in values:
        if type(value) is list or type(value) is dict:
            yield value
        if isinstance(value, list | tuple) or type(value) is dict:
            yield from _containers(value.values() if isinstance(value, dict) else value)


def keep_numbers(optimizer_state: PyTree, level: Any) -> None:
    """Puts Variables of a trace where a user has assigned numbers.

    As in `opt_state.hyperparams["learning_rate"] = 0.1`, over Flax's own Variable: an
    update assigns there, and a program returns only what Variables hold.
    """
    numbers = jax.Array | np.ndarray | np.generic | int | float
    for container in _containers([optimizer_state]):
        for key, x in container.items() if type(container) is dict else ():
            if isinstance(x, numbers):
                with unwatched(), jax.ensure_compile_time_eval():
                    container[key] = nnx.optimizer.OptArray(jnp.asarray(x))
                    setattr(container[key], TRACE, level)


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
        containers = _containers(self._attributes)
        self._views = [x.values() if isinstance(x, dict) else x for x in containers]
        self._before = [*itertools.chain.from_iterable(self._views)]

    def are_current(self) -> bool:
        """Returns whether all attributes are unchanged."""
        if sum(map(len, self._views)) == len(self._before):
            now = itertools.chain.from_iterable(self._views)
            if all(map(operator.is_, now, self._before)):
                return True
        if list(map(frozen, self._attributes)) != self._frozen:
            return False
        self._look()  # Flax's transforms replace attributes by equal ones
        return True
