"""What a replica's function uses besides its arguments."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx


class Bindings:
    """The NNX objects that a function uses from outside.

    Args:
        objects: The objects with their names.
    """

    def __init__(self, objects: tuple[tuple[str, Any], ...]) -> None:
        self.objects = objects

    def is_current(self) -> bool:
        """Returns whether every name still stands for the same object."""
        return True

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Refuses side effects of a trace in the block."""
        yield


def find(fn: Callable[..., Any]) -> Bindings:
    """Returns what a function uses from outside."""
    names = inspect.getclosurevars(fn)
    pairs = [*names.nonlocals.items(), *names.globals.items()]
    return Bindings(
        tuple(pair for pair in pairs if isinstance(pair[1], nnx.Pytree | nnx.Variable))
    )
