"""From what users have to a source: one module per framework.

`adapt(obj, class_names, *, batched)` of each returns an object of the framework as a
source, or None. The names of its class and its bases identify it, without importing the
framework; `batched` says whether elements are batches, and None infers it or asks.
"""

from collections.abc import Callable
from typing import Any

from meshlayout import _checks
from meshlayout.data.adapters import arrays, grain, hugging_face, tensorflow, torch
from meshlayout.data.protocols import RandomAccessSource, Source, StreamSource
from meshlayout.errors import DataError


# By the top-level package of an object's class or of one of its bases.
_ADAPTERS: dict[str, Callable[..., Source | None]] = {
    "grain": grain.adapt,
    "tensorflow": tensorflow.adapt,
    "tensorflow_datasets": tensorflow.adapt,
    "torch": torch.adapt,
    "datasets": hugging_face.adapt,
}


def as_source(obj: object, *, batched: bool | None = None) -> Source:
    """Returns the user's object as a source; see `distribute_dataset` for `batched`."""
    batched = _checks.choice("batched", batched, (True, False, None), error=DataError)
    is_source = isinstance(obj, (RandomAccessSource, StreamSource))
    source: Any = obj if is_source else None
    packages = [kind.__module__.partition(".")[0] for kind in type(obj).__mro__]
    class_names = {kind.__name__ for kind in type(obj).__mro__}
    for package in dict.fromkeys(packages):
        if source is None and package in _ADAPTERS:
            source = _ADAPTERS[package](obj, class_names, batched=batched)
    source = arrays.adapt(obj, batched=batched) if source is None else source
    yields = getattr(source, "batched", False)  # one with random access has rows
    if batched not in (None, yields):
        what = {False: "single examples", True: "batches"}.get(yields, "what it says")
        kind = _checks.type_text(obj)
        raise DataError(f"{kind} yields {what}: leave out batched={batched}.")
    return source
