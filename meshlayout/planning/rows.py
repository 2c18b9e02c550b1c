"""The result of `plan`: rows by what they cost, and what their time consists of."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
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

    Attributes:
        variant: Its mesh, layouts and options.
        rows, tokens: Of a global batch; no tokens are 0.
        memory_bytes: What each device has.
        source: `"compiled"` for the compiler's memory and schedule, `"roofline"` for
            its memory and the program's FLOPs and bytes, or `"estimated"`.
        step_s: Seconds of a step; 0 if they are not known.
        bound: What takes most of them: `"compute"`, `"memory"` or `"network"`.
        peak_bytes: What each device holds at the most; NaN if it is not known.
        utilization: The model's FLOPs as a share of what the devices could do.
        sent: Bytes that each device sends, by axes.
        parts: Seconds, by what they are for.
        error: Why there is no program: the compiler's first line; or empty.
        compile_s, host_bytes: Seconds and memory of the compilation.
        estimate: What was estimated before it.
    """

    variant: Variant
    rows: int
    tokens: int
    memory_bytes: float
    source: Literal["estimated", "compiled", "roofline"] = "estimated"
    step_s: float = 0.0
    bound: str = ""
    peak_bytes: float = math.nan
    utilization: float = 0.0
    sent: Mapping[str, float] | None = None
    parts: Mapping[str, float] | None = None
    error: str = ""
    compile_s: float = 0.0
    host_bytes: int = 0
    estimate: Estimate | None = None

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
        return self.rows / self.step_s if self.step_s else math.nan

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second on all devices."""
        return self.tokens / self.step_s if self.step_s else math.nan

    def to_code(self) -> str:
        """Returns Python that makes the mesh, the map, the state and the step."""
        return self.variant.to_code()

    def to_dict(self) -> dict[str, Any]:
        """Returns values by name, for JSON."""
        names = "source step_s bound peak_bytes memory_bytes utilization sent error"
        names += " compile_s host_bytes fits examples_per_s tokens_per_s step_options"
        facts = {name: getattr(self, name) for name in names.split()}
        facts |= {"name": str(self.variant), "topology": self.variant.topology}
        return {**facts, "mesh": dict(self.mesh.shape), "code": self.to_code()}

    def __repr__(self) -> str:
        cells = [x for x in (*self._cells()[3:6], self.source) if x]
        return f"{self.variant} on ({sizes_text(self.mesh.shape)}): {', '.join(cells)}"

    def _cells(self) -> list[str]:
        room, fits = self.memory_bytes - self.peak_bytes, "too large"
        if self.fits:
            fits = "fits"
        elif math.isnan(room) or (self.error and room >= 0):
            fits, room = self.error[:72], math.nan
        if math.isfinite(room):
            side = "left" if room > 0 else "over"
            fits += f", {_render.bytes_text(abs(room))} {side}"
        speed = ["", "", ""]
        if self.step_s:
            rate = f"{self.examples_per_s:,.0f}"
            tokens = f" ({self.tokens_per_s:,.0f} tokens)" if self.tokens else ""
            speed = [f"{self.step_s * 1e3:.4g} ms", f"{rate}{tokens}"]
            speed.append(f"{self.utilization:.0%}")
        sent = (self.sent or {}).items()
        texts = (f"{axes} {_render.bytes_text(nbytes)}" for axes, nbytes in sent)
        place = [self.variant.topology, sizes_text(self.mesh.shape), str(self.variant)]
        step, *rates = speed
        return [*place, fits, step, self.bound, *rates, "; ".join(texts), self.source]


_HEADERS = ["topology", "mesh", "layouts", "memory", "step", "bound"]
_HEADERS += ["examples/s", "MFU", "sent", ""]
_ALIGN = "llllrlrrll"


@dataclass(frozen=True, repr=False)
class Ranking:
    """The result of `plan`: text if printed, a table in notebooks.

    Attributes:
        rows: Every candidate, the best first: those that fit, by examples per second
            and device, what was compiled before what was not.
        changes: Where nothing fits, the smallest change with which something does.
        notes: What else is to be said, such as that the budget was used up.
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
        parts = [*(chosen.parts or {}).items()]
        total, rest = sum(x for _, x in parts), sum(x for _, x in parts[30:])
        parts = parts[:30] + [("everything else", rest)] * (rest > 0)
        lines = [[name, f"{x * 1e3:.4f} ms", f"{x / total:.1%}"] for name, x in parts]
        headers = ["what", "time", "share"]
        return _render.text_table(headers, lines, "lrr", [repr(chosen)])

    def to_dict(self) -> dict[str, Any]:
        """Returns values by name, for JSON."""
        rows, changes = ([x.to_dict() for x in y] for y in (self.rows, self.changes))
        return {"rows": rows, "changes": changes, "notes": list(self.notes)}

    def __repr__(self) -> str:
        return _render.text_table(_HEADERS, *self._table())

    def _repr_html_(self) -> str:
        rows, align, notes = self._table()
        return _render.html_table(_HEADERS, rows, align, notes=notes)

    def _table(self) -> tuple[list[list[str]], str, list[str]]:
        notes = [*["Nothing fits."] * (not self.fits), *self.notes]
        notes += [f"would fit: {row}" for row in self.changes]
        return [row._cells() for row in self.rows], _ALIGN, notes
