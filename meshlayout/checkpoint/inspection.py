"""`Inspection`: what a step holds, from the facts that were saved with it."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshlayout import _render
from meshlayout.checkpoint.orbax import specs_of


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
        rows = [
            (
                x.path,
                x.shape,
                y["dtype"],
                y.get("layout", ""),
                y.get("mesh", ""),
                x.nbytes,
            )
            for x, y in zip(specs, leaves, strict=True)
        ]
        return cls(
            facts["step"],
            datetime.datetime.fromtimestamp(facts["time"], datetime.UTC),
            facts["processes"],
            tuple(InspectedLeaf(*row) for row in rows),
            facts["metadata"],
            facts["metrics"],
            facts["data"] is not None,
            sum(spec.nbytes for spec in specs),
            file_bytes,
        )

    def __str__(self) -> str:
        return "\n".join(
            [
                self._title(),
                _render.text_table(*self._table(), align="lllr"),
                *self._notes(),
            ]
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        texts = {"caption": self._title(), "notes": self._notes()}
        return _render.html_table(*self._table(), align="lllr", **texts)

    def _title(self) -> str:
        meshes = {leaf.mesh: None for leaf in self.leaves if leaf.mesh}
        on = f" on {', '.join(meshes)}" if meshes else ""
        many = "" if self.num_processes == 1 else f" by {self.num_processes} processes"
        return (
            f"step {self.step}, saved {self.saved_at:%Y-%m-%d %H:%M:%S UTC}{many}{on}"
        )

    def _table(self) -> tuple[list[str], list[tuple[str, ...]]]:
        text, size = _render.array_text, _render.bytes_text
        return ["path", "array", "layout", "bytes"], [
            (x.path or "(the array)", text(x.dtype, x.shape), x.layout, size(x.nbytes))
            for x in self.leaves
        ]

    def _notes(self) -> list[str]:
        state, disk = map(_render.bytes_text, (self.nbytes, self.file_bytes))
        metrics = ", ".join(f"{name} {x:.6g}" for name, x in self.metrics.items())
        notes = {
            f"{len(self.leaves)} leaves, {state}; {disk} on disk.": True,
            f"metrics: {metrics}": metrics,
            f"metadata: {self.metadata!r}": self.metadata,
            "with the state of the input iterator": self.has_data,
        }
        return [text for text, is_there in notes.items() if is_there]
