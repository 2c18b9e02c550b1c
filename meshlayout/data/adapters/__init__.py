"""From what users have to a source: one adapter for each kind of object.

The adapter is found by the names of the modules in which an object's class and its
bases are defined, so that no framework is imported for the look.
"""

import functools
from collections.abc import Callable
from typing import Any

from meshlayout.data.adapters import (
    arrays,
    grain,
    hugging_face,
    iterables,
    tensorflow,
    tfds,
    torch,
)
from meshlayout.data.clock import Clock
from meshlayout.data.source import RowSource, Source, StreamSource
from meshlayout.errors import DataError


def _own(obj: Any, clock: Clock, *, batched: bool | None) -> Source | None:
    """Returns what is a source already, as `pack_sequences` makes them."""
    del clock
    if not isinstance(obj, (RowSource, StreamSource)):
        return None
    arrays.refuse_batches(f"a {type(obj).__name__}", batched)
    return obj


# By the outermost package of an object's class or one of its bases. An adapter returns
# None for an object of its package that it does not take.
_BY_PACKAGE: dict[str, Callable[..., Source | None]] = {
    "meshlayout": _own,
    "grain": grain.adapt,
    "tensorflow": tensorflow.adapt,
    "tensorflow_datasets": tfds.adapt,
    "torch": torch.adapt,
    "datasets": hugging_face.adapt,
}


def as_source(obj: Any, clock: Clock, *, batched: bool | None = None) -> Source:
    """Returns an object as a source of rows or of blocks.

    Args:
        obj: What the user gave.
        clock: Where its stages are measured, and its notes go.
        batched: Whether the elements of an iterable are batches (True) or single
            examples (False); None finds out where the object tells.

    Raises:
        DataError: If it is none of the kinds that are known, or may be two of them.
    """
    if batched is not None and not isinstance(batched, bool):
        msg = f"batched= is True, False or None, and got {batched!r}."
        raise DataError(msg)
    if isinstance(obj, type):  # a class whose objects are iterated
        obj = functools.partial(obj)
    packages = [kind.__module__.partition(".")[0] for kind in type(obj).__mro__]
    for package in dict.fromkeys(packages):
        adapter = _BY_PACKAGE.get(package)
        source = adapter(obj, clock, batched=batched) if adapter else None
        if source is not None:
            return source
    rows = arrays.adapt(obj, clock, batched=batched)
    return iterables.adapt(obj, clock, batched=batched) if rows is None else rows
