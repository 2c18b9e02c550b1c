"""`RestoreDiff`: how saved arrays differ from those of the state to restore into."""

import difflib
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from meshlayout import _jax, _render
from meshlayout._annotations import DType


# difflib is slow: near names are looked for among so many at most.
_MOST = 100

_COLUMNS = ("differs", "wanted", "saved")


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What is known of an array before it is read.

    The dtype of a Python number is `bool`, `int`, `float` or `complex`; `is_numpy` says
    whether it becomes a NumPy array if no target is given.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    is_numpy: bool = False

    @property
    def is_key(self) -> bool:
        """Whether it is an array of PRNG keys, which the host holds as words."""
        return not is_number(self.dtype) and _jax.is_extended(self.dtype)

    @property
    def host_shape(self) -> tuple[int, ...]:
        """Its shape on the host; of PRNG keys, with that of the words in the end."""
        return (*self.shape, *_word_shape(self.dtype)) if self.is_key else self.shape

    @property
    def host_dtype(self) -> np.dtype[Any]:
        """Its dtype on the host; of PRNG keys, that of the words."""
        return np.dtype("uint32" if self.is_key else self.dtype)

    @property
    def nbytes(self) -> int:
        """Its bytes; none for a Python number."""
        itemsize = 0 if is_number(self.dtype) else self.host_dtype.itemsize
        return math.prod(self.host_shape) * itemsize

    def __str__(self) -> str:
        return f"{self.path} {_render.array_text(self.dtype, self.shape)}".lstrip()


def is_number(dtype: object) -> bool:
    """Returns whether this is the type of a Python number instead of a dtype."""
    # By identity: NumPy's float64 equals float.
    return any(dtype is kind for kind in (bool, int, float, complex))


@functools.lru_cache(maxsize=16)
def key_dtype(impl: str) -> Any:
    """Returns the dtype of a generator's PRNG keys, without running a program."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


@functools.lru_cache(maxsize=16)
def _word_shape(dtype: DType) -> tuple[int, ...]:
    key = jax.ShapeDtypeStruct((), dtype)
    return jax.eval_shape(jax.random.key_data, key).shape


@dataclass(frozen=True, slots=True)
class Change:
    """A path whose saved array has another shape or dtype than the one in the state."""

    path: str
    saved: ArraySpec
    wanted: ArraySpec


@dataclass(frozen=True)
class RestoreDiff:
    """How a saved state differs from the state to restore; print or display it.

    Attributes:
        missing: Paths of the state to restore that were not saved.
        extra: Paths that were saved but are not in the state, after renaming.
        shapes: Arrays whose shapes differ.
        dtypes: Arrays whose dtypes differ.
    """

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    shapes: tuple[Change, ...] = ()
    dtypes: tuple[Change, ...] = ()
    # By path, what stands in the table for a missing or extra array.
    specs: Mapping[str, ArraySpec] = field(default_factory=dict, repr=False)

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.shapes or self.dtypes)

    def summary(self) -> str:
        """Returns the counts, as `1 missing, 2 extra`."""
        rows = self.missing, self.extra, self.shapes, self.dtypes
        kinds = "missing", "extra", "of another shape", "of another dtype"
        texts = [f"{len(x)} {kind}" for x, kind in zip(rows, kinds, strict=True) if x]
        return ", ".join(texts) or "nothing differs"

    def table(self, most: int | None = None) -> str:
        """Returns the differences side by side, at most so many of them."""
        rows, notes = self._rows(), list[str]()
        if most is not None and len(rows) > most:
            notes = [f"... and {len(rows) - most:,} more"]
        return _render.text_table(_COLUMNS, rows[:most], notes=notes)

    def __str__(self) -> str:
        return f"{self.summary()}\n{self.table()}" if self else self.summary()

    def _repr_html_(self) -> str:
        return _render.html_table(_COLUMNS, self._rows(), caption=self.summary())

    def _rows(self) -> list[tuple[str, str, str]]:
        text = {path: str(replace(x, path=path)) for path, x in self.specs.items()}
        near: dict[str, str] = {}
        for path in self.missing[:_MOST]:
            for match in difflib.get_close_matches(path, self.extra[:_MOST], n=1):
                near[path] = f"(near: {text.get(match, match)})"
        return [
            *(("missing", text.get(x, x), near.get(x, "")) for x in self.missing),
            *(("shape", str(x.wanted), str(x.saved)) for x in self.shapes),
            *(("dtype", str(x.wanted), str(x.saved)) for x in self.dtypes),
            *(("extra", "", text.get(x, x)) for x in self.extra),
        ]
