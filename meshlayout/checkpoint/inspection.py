"""`Inspection`: what a step holds, from the facts that were saved with it."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshlayout import _render
from meshlayout.checkpoint.tree import specs_of


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
    iterator; `nbytes` are the bytes of the state.
    """

    step: int
    saved_at: datetime.datetime
    num_processes: int
    leaves: tuple[InspectedLeaf, ...]
    metadata: Any
    metrics: Mapping[str, float]
    has_data: bool
    nbytes: int

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Inspection":
        """Returns the inspection of a step, from the facts of its save."""
        leaves = facts["items"]["state"]
        on = [(leaf["dtype"], leaf.get("layout"), leaf.get("mesh")) for leaf in leaves]
        rows = tuple(
            InspectedLeaf(x.path, x.shape, dtype, layout or "", mesh or "", x.nbytes)
            for x, (dtype, layout, mesh) in zip(specs_of(leaves), on, strict=True)
        )
        saved_at = datetime.datetime.fromtimestamp(facts["time"], datetime.UTC)
        names = "step", "processes", "metadata", "metrics"
        step, processes, metadata, metrics = (facts[name] for name in names)
        has_data, nbytes = facts["data"] is not None, sum(x.nbytes for x in rows)
        return cls(step, saved_at, processes, rows, metadata, metrics, has_data, nbytes)

    def __str__(self) -> str:
        return f"{self._title()}\n{_render.text_table(*self._table(), align='lllr')}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _render.html_table(*self._table(), align="lllr", caption=self._title())

    def _title(self) -> str:
        meshes = {leaf.mesh: None for leaf in self.leaves if leaf.mesh}
        facts = {
            f"saved {self.saved_at:%Y-%m-%d %H:%M:%S UTC}": True,
            f"by {self.num_processes} processes": self.num_processes > 1,
            f"on {', '.join(meshes)}": meshes,
            _render.bytes_text(self.nbytes): True,
            f"metrics {self.metrics}": self.metrics,
            f"metadata {self.metadata}": self.metadata,
            "with the position of the data": self.has_data,
        }
        return ", ".join(
            [f"step {self.step}", *(x for x, is_so in facts.items() if is_so)]
        )

    def _table(self) -> tuple[list[str], list[tuple[str, ...]]]:
        text, size = _render.array_text, _render.bytes_text
        return ["path", "array", "layout", "bytes"], [
            (x.path or "(the array)", text(x.dtype, x.shape), x.layout, size(x.nbytes))
            for x in self.leaves
        ]
