"""The result of `plan`: rows by what they cost, and what their time consists of."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from meshlayout import _render
from meshlayout.errors import MeshLayoutError
from meshlayout.layout_map import LayoutMap
from meshlayout.mesh import Mesh, sizes_text
from meshlayout.planning.candidates import Variant
from meshlayout.planning.estimate import Estimate


@dataclass(frozen=True, repr=False)
class Row:
    """A candidate and what it costs.

    `source` is `"compiled"` for the compiler's memory and schedule, `"roofline"` for
    its memory and the program's FLOPs and bytes over peaks, or `"estimated"`.
    """

    variant: Variant
    rows: int  # of a global batch
    tokens: int  # of a global batch; 0 for none
    memory_bytes: float  # that each device has
    source: Literal["estimated", "compiled", "roofline"] = "estimated"
    step_s: float = math.nan
    bound: str = ""  # "compute", "memory" or "network": what takes the most time
    peak_bytes: float = math.nan  # that each device holds at the most
    utilization: float = math.nan  # model FLOPs as a share of what devices could do
    sent: Mapping[str, float] = field(default_factory=dict)  # by each device, by axes
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds
    error: str = ""  # why there is no program: the compiler's first line
    compile_s: float = 0.0
    host_bytes: int = 0  # that the compilation took
    estimate: Estimate | None = None  # of before the compilation

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.variant.mesh

    @property
    def layouts(self) -> LayoutMap:
        """The layout map."""
        return self.variant.layouts

    @property
    def step_options(self) -> dict[str, Any]:
        """The options of `make_train_step` besides those that were given."""
        return dict(self.variant.options)

    @property
    def fits(self) -> bool:
        """Whether there is a program, and it fits each device's memory."""
        return not self.error and not self.peak_bytes > self.memory_bytes

    @property
    def examples_per_s(self) -> float:
        """Examples per second on all devices."""
        return self.rows / self.step_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second on all devices."""
        return self.tokens / self.step_s

    def to_code(self) -> str:
        """Returns Python that makes the mesh, the map, the state and the step."""
        return self.variant.to_code()

    def to_dict(self) -> dict[str, Any]:
        """Returns values by name, for JSON; numbers that are not known are None."""
        names = "source step_s bound peak_bytes memory_bytes utilization sent error"
        names += " compile_s host_bytes fits examples_per_s tokens_per_s step_options"
        facts = {name: getattr(self, name) for name in names.split()}
        for name, value in facts.items():
            if isinstance(value, float) and not math.isfinite(value):
                facts[name] = None
        facts |= {"name": str(self.variant), "topology": self.variant.topology}
        return {**facts, "mesh": dict(self.mesh.shape), "code": self.to_code()}

    def __repr__(self) -> str:
        cells = [x for x in (*self._cells()[3:6], self.source) if x]
        return f"{self.variant} on ({sizes_text(self.mesh.shape)}): {', '.join(cells)}"

    def _cells(self) -> list[str]:
        room = self.memory_bytes - self.peak_bytes
        fits = "fits" if self.fits else "too large" if room < 0 else self.error[:72]
        if math.isfinite(room) and (self.fits or room < 0):
            side = "left" if room >= 0 else "over"
            fits += f", {_render.bytes_text(abs(room))} {side}"
        step, *rates = ["", "", ""]
        if not math.isnan(self.step_s):
            rate = f"{self.examples_per_s:,.0f}"
            tokens = f" ({self.tokens_per_s:,.0f} tokens)" if self.tokens else ""
            step = f"{self.step_s * 1e3:.4g} ms"
            rates = [f"{rate}{tokens}", f"{self.utilization:.0%}"]
        sent = (f"{k} {_render.bytes_text(x)}" for k, x in self.sent.items())
        place = [self.variant.topology, sizes_text(self.mesh.shape), str(self.variant)]
        return [*place, fits, step, self.bound, *rates, "; ".join(sent), self.source]


@dataclass(frozen=True, repr=False)
class Ranking:
    """The result of `plan`: text if printed, a table in notebooks.

    Rows that fit come first, the compiled ones of these before the others, each by
    examples per second and device. Where none fits, `changes` has the smallest change
    with which one does. `notes` say what else there is, as that the budget has ended.
    """

    rows: tuple[Row, ...]
    changes: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether any candidate fits."""
        return any(row.fits for row in self.rows)

    @property
    def best(self) -> Row:
        """The best candidate, or change; MeshLayoutError if nothing fits."""
        for row in (*self.rows, *self.changes):
            if row.fits:
                return row
        msg = "no candidate fits, and no change of one: take a larger slice."
        raise MeshLayoutError(msg)

    def explain(self, row: Row | int = 0) -> str:
        """Returns what the time of a row, or of its place in `rows`, consists of."""
        chosen = self.rows[row] if isinstance(row, int) else row
        parts = [*chosen.parts.items()]
        total, rest = sum(chosen.parts.values()), sum(x for _, x in parts[30:])
        parts = parts[:30] + [("everything else", rest)] * (rest > 0)
        lines = [[name, f"{x * 1e3:.4f} ms", f"{x / total:.1%}"] for name, x in parts]
        headers = ["what", "time", "share"]
        return _render.text_table(headers, lines, "lrr", [repr(chosen)])

    def to_dict(self) -> dict[str, Any]:
        """Returns values by name, for JSON."""
        rows, changes = ([x.to_dict() for x in y] for y in (self.rows, self.changes))
        return {"rows": rows, "changes": changes, "notes": list(self.notes)}

    def __repr__(self) -> str:
        return _render.text_table(*self._table(), self._notes())

    def _repr_html_(self) -> str:
        return _render.html_table(*self._table(), notes=self._notes())

    def _table(self) -> tuple[list[str], list[list[str]], str]:
        headers = ["topology", "mesh", "layouts", "memory", "step", "bound"]
        headers += ["examples/s", "MFU", "sent", ""]
        return headers, [row._cells() for row in self.rows], "llllrlrrll"

    def _notes(self) -> list[str]:
        changes = [f"would fit: {row}" for row in self.changes]
        return [*["Nothing fits."] * (not self.fits), *self.notes, *changes]
