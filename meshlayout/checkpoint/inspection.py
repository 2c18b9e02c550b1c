"""`Inspection`: what a checkpoint holds, read from its manifest alone."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshlayout import _render
from meshlayout.checkpoint.encoding import decode
from meshlayout.checkpoint.manifest import Manifest


@dataclass(frozen=True, slots=True)
class InspectedLeaf:
    """One leaf of a checkpoint.

    Attributes:
        path: Its name.
        shape: Its global shape.
        dtype: Its dtype; of Python's numbers, their type.
        layout: How it lay when it was saved; empty where it was on no mesh.
        mesh: The mesh that it lay on.
        nbytes: Its bytes.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    mesh: str
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint holds; text by `str` or `print`, HTML in notebooks.

    Attributes:
        step: The step.
        saved_at: When it was complete, in UTC.
        num_processes: How many processes wrote it.
        leaves: The state.
        metadata: What the user gave.
        metrics: What was measured.
        has_data: Whether it holds the state of an input iterator.
        nbytes: Bytes of the state.
        file_bytes: Bytes of the files.
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
    def of(cls, manifest: Manifest) -> "Inspection":
        """Returns what a manifest says."""
        leaves = [
            InspectedLeaf(
                leaf.path, leaf.shape, leaf.dtype, leaf.layout, leaf.mesh, leaf.nbytes
            )
            for leaf in manifest.leaves
        ]
        return cls(
            manifest.step,
            datetime.datetime.fromtimestamp(manifest.saved_at, datetime.UTC),
            manifest.num_processes,
            tuple(leaves),
            decode(manifest.metadata),
            dict(manifest.metrics),
            manifest.data is not None,
            manifest.nbytes,
            manifest.file_bytes,
        )

    def __str__(self) -> str:
        table = _render.text_table(_HEADERS, self._rows(), align=_ALIGN)
        return "\n".join([self._title(), table, *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _render.html_table(
            _HEADERS,
            self._rows(),
            align=_ALIGN,
            caption=self._title(),
            notes=self._notes(),
        )

    def _title(self) -> str:
        meshes = {leaf.mesh: None for leaf in self.leaves if leaf.mesh}
        on = f" on {', '.join(meshes)}" if meshes else ""
        when = self.saved_at.strftime("%Y-%m-%d %H:%M:%S UTC")
        many = "" if self.num_processes == 1 else f" by {self.num_processes} processes"
        return f"step {self.step}, saved {when}{many}{on}"

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
        state = _render.bytes_text(self.nbytes)
        disk = _render.bytes_text(self.file_bytes)
        notes = [f"{len(self.leaves)} leaves, {state}; {disk} on disk."]
        if self.metrics:
            pairs = (f"{name} {value:.6g}" for name, value in self.metrics.items())
            notes.append(f"metrics: {', '.join(pairs)}")
        if self.metadata not in (None, {}):
            notes.append(f"metadata: {self.metadata!r}")
        if self.has_data:
            notes.append("with the state of the input iterator")
        return notes


_HEADERS = ["path", "array", "layout", "bytes"]
_ALIGN = "lllr"
