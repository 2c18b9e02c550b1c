"""Attributes of other libraries, replaced for as long as anyone needs it."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any


class SharedPatches(contextlib.AbstractContextManager[None]):
    """Attributes that are replaced while any thread is inside, and restored after.

    The first thread to enter patches; the last one to leave restores the original,
    or deletes the attribute if it was inherited. An attribute that
    someone else has replaced in the meantime is left alone. A replacement must check
    whether it is meant, by a ContextVar for instance: other threads call it too.

    Args:
        *patches: The class, the attribute's name, and a function from the original to
            its replacement.

    Example:
        >>> class Greeter:
        ...     def greet(self):
        ...         return "hello"
        >>> def louder(greet):
        ...     return lambda self: greet(self).upper()
        >>> with SharedPatches((Greeter, "greet", louder)):
        ...     Greeter().greet()
        'HELLO'
        >>> Greeter().greet()
        'hello'
    """

    def __init__(self, *patches: tuple[type, str, Callable[[Any], Any]]) -> None:
        self._patches = patches
        self._lock = threading.Lock()
        self._num_inside = 0
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._num_inside += 1
            if self._num_inside == 1:
                self._undo = [_replace(*patch) for patch in self._patches]

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                for undo in self._undo:
                    undo()


def _replace(owner: type, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Replaces one attribute; returns a function that undoes it."""
    is_inherited = name not in vars(owner)
    original = getattr(owner, name)
    replacement = make(original)

    def undo() -> None:
        if vars(owner).get(name) is not replacement:
            return
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    setattr(owner, name, replacement)
    return undo
