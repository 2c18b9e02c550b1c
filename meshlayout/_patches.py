"""Attributes of other libraries, replaced for as long as anyone needs it."""

import contextlib
import inspect
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias


# A class, the attribute's name, and a function from the original to its replacement.
Patch: TypeAlias = tuple[type, str, Callable[[Any], Any]]

# How many are inside of each patch, and what undoes it.
_lock = threading.Lock()
_num_inside: Counter[Patch] = Counter()
_undo: dict[Patch, Callable[[], None]] = {}


class SharedPatches(contextlib.AbstractContextManager[None]):
    """Attributes that are replaced while any thread is inside, and restored after.

    The first to enter patches; the last to leave restores the original, or deletes the
    attribute if it was inherited. Patches that are equal are shared, also between
    several objects of this class. An attribute that someone else has replaced in the
    meantime is left alone. A replacement must check whether it is meant, by a
    ContextVar for instance: other threads call it too.

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

    def __init__(self, *patches: Patch) -> None:
        self._patches = patches

    def __enter__(self) -> None:
        with _lock:
            for patch in self._patches:
                if not _num_inside[patch]:
                    _undo[patch] = _replace(*patch)
                _num_inside[patch] += 1

    def __exit__(self, *error: object) -> None:
        with _lock:
            for patch in self._patches:
                _num_inside[patch] -= 1
                if not _num_inside[patch]:
                    del _num_inside[patch]
                    _undo.pop(patch)()


def _replace(owner: type, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Replaces one attribute; returns a function that undoes it."""
    is_inherited = name not in vars(owner)
    # The descriptor itself: it may be another than a function, as nnx.jit gives.
    original = inspect.getattr_static(owner, name)
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
