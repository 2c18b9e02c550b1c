"""`RestoreDiff`: how saved arrays differ from those of the state to restore into."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from meshlayout import _render


if TYPE_CHECKING:
    from meshlayout.checkpoint.load import ArraySpec


# difflib is slow: near names are looked for among so many at most.
_MOST = 100

_COLUMNS = ("differs", "wanted", "saved")


@dataclass(frozen=True, slots=True)
class Change:
    """A path whose saved array has another shape or dtype than the one in the state."""

    path: str
    saved: "ArraySpec"
    wanted: "ArraySpec"


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
    specs: Mapping[str, "ArraySpec"] = field(default_factory=dict, repr=False)

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
