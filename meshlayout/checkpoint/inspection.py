"""`Inspection`: what a step holds, from the facts that were saved with it."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshlayout import _render
from meshlayout.checkpoint.tree import specs_of


_HEADERS = ["path", "array", "layout", "bytes"]
_ALIGN = "lllr"


@dataclass(frozen=True)
class InspectedLeaf:
    """One leaf of a checkpoint; layout and mesh are empty if it was not on a mesh."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    mesh: str
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """The contents of a checkpoint; text by `str` or `print`, HTML in notebooks.

    `saved_at` is in UTC; `has_data` says whether it holds the state of an input
    iterator; `nbytes` are the bytes of the state, and `file_bytes` those on the disk.
    """

    step: int
    saved_at: datetime.datetime
    num_processes: int
    leaves: tuple[InspectedLeaf, ...]
    metadata: Any
    metrics: Mapping[str, float]
    has_data: bool
    nbytes: int
    file_bytes: int

    @classmethod
    def of(cls, facts: Mapping[str, Any], file_bytes: int) -> "Inspection":
        """Returns the inspection of a step, from the facts of its save."""
        leaves = facts["items"]["state"]
        specs = specs_of(leaves)
        return cls(
            facts["step"],
            datetime.datetime.fromtimestamp(facts["time"], datetime.UTC),
            facts["processes"],
            tuple(
                InspectedLeaf(
                    *(spec.path, spec.shape, leaf["dtype"]),
                    *(leaf.get("layout", ""), leaf.get("mesh", ""), spec.nbytes),
                )
                for leaf, spec in zip(leaves, specs, strict=True)
            ),
            facts["metadata"],
            facts["metrics"],
            facts["data"] is not None,
            sum(spec.nbytes for spec in specs),
            file_bytes,
        )

    def __str__(self) -> str:
        table = _render.text_table(_HEADERS, self._rows(), align=_ALIGN)
        return "\n".join([self._title(), table, *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        texts = {"caption": self._title(), "notes": self._notes()}
        return _render.html_table(_HEADERS, self._rows(), align=_ALIGN, **texts)

    def _title(self) -> str:
        meshes = {leaf.mesh: None for leaf in self.leaves if leaf.mesh}
        on = f" on {', '.join(meshes)}" if meshes else ""
        many = "" if self.num_processes == 1 else f" by {self.num_processes} processes"
        return (
            f"step {self.step}, saved {self.saved_at:%Y-%m-%d %H:%M:%S UTC}{many}{on}"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        text, size = _render.array_text, _render.bytes_text
        return [
            (x.path or "(the array)", text(x.dtype, x.shape), x.layout, size(x.nbytes))
            for x in self.leaves
        ]

    def _notes(self) -> list[str]:
        state, disk = map(_render.bytes_text, (self.nbytes, self.file_bytes))
        notes = [f"{len(self.leaves)} leaves, {state}; {disk} on disk."]
        if self.metrics:
            pairs = (f"{name} {value:.6g}" for name, value in self.metrics.items())
            notes.append(f"metrics: {', '.join(pairs)}")
        if self.metadata not in (None, {}):
            notes.append(f"metadata: {self.metadata!r}")
        if self.has_data:
            notes.append("with the state of the input iterator")
        return notes
