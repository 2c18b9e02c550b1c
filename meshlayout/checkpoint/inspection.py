"""`Inspection`: what a step holds, from the facts that were saved with it."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshlayout import _render
from meshlayout.checkpoint.orbax import specs_of


@dataclass(frozen=True)
class Inspection:
    """The contents of a checkpoint: a table if printed or displayed; times are UTC.

    `arrays` has by path the dtype, shape, layout and mesh of each array, as text.
    """

    step: int
    saved_at: datetime.datetime
    num_processes: int
    arrays: Mapping[str, str]
    nbytes: int
    metadata: Any
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Inspection":
        """Returns the inspection of a step, from the facts of its save."""
        leaves = facts["items"]["state"]
        arrays, specs = dict[str, str](), specs_of(leaves)
        for x, leaf in zip(specs, leaves, strict=True):
            place = f"{leaf.get('layout', '')} {leaf.get('mesh', '')}"
            text = f"{_render.array_text(x.dtype, x.shape)} {place}"
            arrays[x.path] = text.strip()
        return cls(
            step=facts["step"],
            saved_at=datetime.datetime.fromtimestamp(facts["time"], datetime.UTC),
            num_processes=facts["processes"],
            arrays=arrays,
            nbytes=sum(x.nbytes for x in specs),
            metadata=facts["metadata"],
            metrics=facts["metrics"],
        )

    def __repr__(self) -> str:
        return f"{self._title()}\n{_render.text_table(*self._table())}"

    def _repr_html_(self) -> str:
        return _render.html_table(*self._table(), caption=self._title())

    def _title(self) -> str:
        facts = (_render.bytes_text(self.nbytes), self.metrics, self.metadata)
        saved = f"saved {self.saved_at:%Y-%m-%d %H:%M:%S} UTC"
        return ", ".join([f"step {self.step}", saved, *(f"{x}" for x in facts if x)])

    def _table(self) -> tuple[list[str], list[tuple[str, str]]]:
        return ["path", "array"], list(self.arrays.items())
