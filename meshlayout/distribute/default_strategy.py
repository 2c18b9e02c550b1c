"""The strategy outside of any scope, and what is current."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax

from meshlayout._annotations import PyTree
from meshlayout.distribute.strategy import Strategy, current_strategy
from meshlayout.distribute.values import REPLICA_AXIS
from meshlayout.mesh_creation import create_mesh


class DefaultStrategy(Strategy):
    """What is current outside of any scope: one replica, and nothing is changed.

    Library code may call `get_strategy()` without asking whether there is one.
    """

    def __init__(self) -> None:
        devices = jax.local_devices()[:1]
        super().__init__(create_mesh({REPLICA_AXIS: 1}, devices=devices))

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Changes nothing."""
        yield self

    def run(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
        options: None = None,
    ) -> PyTree:
        """Calls the function, as if without a strategy."""
        args, kwargs = self._checked_call(fn, args, kwargs, options)
        return fn(*args, **kwargs)


@functools.cache
def _default_strategy() -> Strategy:
    return DefaultStrategy()


def get_strategy() -> Strategy:
    """Returns the current strategy; one of a single replica outside of any scope.

    Example:
        >>> get_strategy().num_replicas_in_sync
        1
    """
    return current_strategy.get() or _default_strategy()


def has_strategy() -> bool:
    """Returns whether this code runs in a strategy's scope, or in its `run`.

    Example:
        >>> has_strategy()
        False
    """
    return current_strategy.get() is not None
