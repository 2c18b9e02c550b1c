"""`RestoreDiff`: how what was saved differs from the state that is wanted."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshlayout import _render


# Names that are compared with a missing one; difflib is slow.
_CANDIDATES = 200


@dataclass(frozen=True, slots=True)
class Leaf:
    """What is known of an array before it is read.

    Attributes:
        path: Its name.
        parts: The keys that the name is made of; empty where only the name is known.
        shape: Its global shape.
        dtype: Its dtype; for a Python number, `bool`, `int`, `float` or `complex`.
    """

    path: str
    parts: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: Any

    @property
    def array(self) -> str:
        """Its dtype and shape, as `f32[784, 128]`."""
        return _render.array_text(self.dtype, self.shape)

    def __str__(self) -> str:
        return f"{self.path} {self.array}".lstrip()


@dataclass(frozen=True, slots=True)
class Change:
    """An array that was saved with another shape or dtype than is wanted.

    Attributes:
        path: Its name in the state that is wanted.
        saved: The array that was saved, under the name that it was saved by.
        wanted: The array that is wanted.
    """

    path: str
    saved: Leaf
    wanted: Leaf


@dataclass(frozen=True)
class RestoreDiff:
    """How what was saved differs from the state that is wanted; print or display it.

    Attributes:
        missing: Paths that are wanted and were not saved.
        extra: Paths that were saved and are not wanted, after renaming.
        shapes: Arrays of another shape.
        dtypes: Arrays of another dtype.
    """

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    shapes: tuple[Change, ...] = ()
    dtypes: tuple[Change, ...] = ()
    arrays: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.shapes or self.dtypes)

    def near(self, path: str) -> str | None:
        """Returns the extra path that is most like a missing one, or None.

        Args:
            path: The missing path.
        """
        last = path.rpartition("/")[2]
        alike = sorted(self.extra, key=lambda one: one.rpartition("/")[2] != last)
        some = alike[:_CANDIDATES]
        found = difflib.get_close_matches(path, some, n=1, cutoff=0.6)
        return found[0] if found else None

    def summary(self) -> str:
        """Returns the counts, as `1 missing, 2 extra`."""
        counts = {
            "missing": self.missing,
            "extra": self.extra,
            "of another shape": self.shapes,
            "of another dtype": self.dtypes,
        }
        found = [f"{len(some)} {what}" for what, some in counts.items() if some]
        return ", ".join(found) or "nothing differs"

    def table(self, most: int | None = None) -> str:
        """Returns the differences side by side, for a terminal.

        Args:
            most: The most rows to show; all if left out.
        """
        rows = self._rows(most)
        left = self._count() - len(rows)
        notes = [f"... and {left:,} more"] if left else []
        return _render.text_table(_COLUMNS, rows, notes=notes)

    def __str__(self) -> str:
        return f"{self.summary()}\n{self.table()}" if self else self.summary()

    def _repr_html_(self) -> str:
        rows = self._rows(None)
        return _render.html_table(_COLUMNS, rows, caption=self.summary())

    def _count(self) -> int:
        parts = (self.missing, self.extra, self.shapes, self.dtypes)
        return sum(map(len, parts))

    def _rows(self, most: int | None) -> list[list[str]]:
        rows = [
            *(("missing", path, None) for path in self.missing),
            *(("shape", str(one.wanted), str(one.saved)) for one in self.shapes),
            *(("dtype", str(one.wanted), str(one.saved)) for one in self.dtypes),
            *(("extra", "", self._named(path)) for path in self.extra),
        ]
        return [
            [what, self._named(wanted), self._nearest(wanted)]
            if saved is None
            else [what, wanted, saved]
            for what, wanted, saved in rows[:most]
        ]

    def _named(self, path: str) -> str:
        return f"{path} {self.arrays.get(path, '')}".strip()

    def _nearest(self, path: str) -> str:
        near = self.near(path)
        return "" if near is None else f"(near: {self._named(near)})"


_COLUMNS = ("differs", "wanted", "saved")
