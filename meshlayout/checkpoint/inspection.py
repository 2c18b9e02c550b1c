"""`Inspection`: what a step holds, from the facts that were saved with it."""

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshlayout import _jax, _render
from meshlayout.checkpoint.difference import is_number
from meshlayout.checkpoint.tree import specs_of


_HEADERS = ["path", "array", "layout", "bytes"]
_ALIGN = "lllr"


@dataclass(frozen=True)
class InspectedLeaf:
    """One leaf of a checkpoint.

    Attributes:
        path: Its path, keys joined by `/`.
        shape: Its global shape.
        dtype: Its dtype, or the type of a Python number.
        layout: Its layout when it was saved; empty if it was not on a mesh.
        mesh: Its mesh when it was saved; empty as well.
        nbytes: The bytes of the whole array.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    mesh: str
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """The contents of a checkpoint; text by `str` or `print`, HTML in notebooks.

    Attributes:
        step: The step.
        saved_at: When it was saved, in UTC.
        num_processes: How many processes wrote it.
        leaves: The leaves of the state.
        metadata: The user's metadata.
        metrics: The metrics at this step.
        has_data: Whether it holds the state of an input iterator.
        nbytes: The bytes of the state.
        file_bytes: The bytes of the files.
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
        leaves: list[InspectedLeaf] = []
        for leaf, spec in zip(
            facts["items"]["state"], specs_of(facts["items"]["state"]), strict=True
        ):
            itemsize = 0 if is_number(spec.dtype) else _jax.itemsize(spec.dtype)
            where = leaf.get("layout", ""), leaf.get("mesh", "")
            nbytes = math.prod(spec.shape) * itemsize
            leaves.append(
                InspectedLeaf(spec.path, spec.shape, leaf["dtype"], *where, nbytes)
            )
        return cls(
            facts["step"],
            datetime.datetime.fromtimestamp(facts["time"], datetime.UTC),
            facts["processes"],
            tuple(leaves),
            facts["metadata"],
            facts["metrics"],
            facts["data"] is not None,
            sum(leaf.nbytes for leaf in leaves),
            file_bytes,
        )

    def __str__(self) -> str:
        table = _render.text_table(_HEADERS, self._rows(), align=_ALIGN)
        return "\n".join([self._title(), table, *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        caption, notes = self._title(), self._notes()
        return _render.html_table(
            _HEADERS, self._rows(), align=_ALIGN, caption=caption, notes=notes
        )

    def _title(self) -> str:
        meshes = {leaf.mesh: None for leaf in self.leaves if leaf.mesh}
        on = f" on {', '.join(meshes)}" if meshes else ""
        many = "" if self.num_processes == 1 else f" by {self.num_processes} processes"
        return (
            f"step {self.step}, saved {self.saved_at:%Y-%m-%d %H:%M:%S UTC}{many}{on}"
        )

    def _rows(self) -> list[list[str]]:
        return [
            [
                leaf.path or "(the array)",
                _render.array_text(leaf.dtype, leaf.shape),
                leaf.layout,
                _render.bytes_text(leaf.nbytes),
            ]
            for leaf in self.leaves
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
