"""Attributes of other libraries that are replaced only while needed.

A permanent patch would change programs that never asked for it, and a patch per thread
is not possible. So patches are counted, and the last user undoes them.
"""

import contextlib
import inspect
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias


# An object, an attribute's name, and a function from original to replacement.
Patch: TypeAlias = tuple[Any, str, Callable[[Any], Any]]

# The number of users inside each patch, and a function that undoes it.
# A finalizer may leave while this thread enters: the garbage collector runs anywhere.
_lock = threading.RLock()
_num_inside: Counter[Patch] = Counter()
_undo: dict[Patch, Callable[[], None]] = {}


class SharedPatches(contextlib.AbstractContextManager[None]):
    """Attributes that are replaced while any thread is inside, and restored after.

    Equal patches are shared, also between objects of this class. An attribute that
    someone else has replaced in the meantime is left alone. Other threads call the
    replacement, too: it must check, as by a ContextVar, whether it applies.
    """

    def __init__(self, *patches: Patch) -> None:
        self._patches = patches

    def __enter__(self) -> None:
        with _lock:
            for patch in self._patches:
                _num_inside[patch] += 1
                if _num_inside[patch] == 1:
                    _undo[patch] = _replace(*patch)

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
    # The descriptor itself, not what it returns: it may be an object of nnx.jit.
    original = inspect.getattr_static(owner, name)
    replacement = make(original)

    def undo() -> None:
        # Someone else has replaced it since, and may call ours: leave it.
        if vars(owner).get(name) is not replacement:
            return
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    setattr(owner, name, replacement)
    return undo
