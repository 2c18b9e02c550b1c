"""The result of `plan`: rows by what they cost, and what their time consists of."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from meshlayout import _render
from meshlayout.errors import MeshLayoutError
from meshlayout.layout_map import LayoutMap
from meshlayout.mesh import Mesh, sizes_text
from meshlayout.planning.candidates import Variant
from meshlayout.planning.estimate import Estimate


Source: TypeAlias = Literal["estimated", "compiled", "roofline"]


@dataclass(frozen=True, repr=False)
class Row:
    """A candidate and what it costs.

    Attributes:
        variant: Its mesh, layouts and options.
        source: `"compiled"` for the compiler's schedule and memory, `"roofline"` for
            its memory and the program's FLOPs and bytes, or `"estimated"`.
        step_s: Seconds of a step.
        bound: What takes most of them: `"compute"`, `"memory"` or `"network"`.
        peak_bytes: What each device holds at the most; NaN if it is not known.
        memory_bytes: What it has.
        rows: The examples of a global batch.
        tokens: Its tokens; 0 if it has none.
        utilization: The model's FLOPs as a share of what the devices could do.
        sent: Bytes that each device sends, by axes.
        parts: Seconds, by what they are for.
        error: Why it was not compiled: the compiler's first line; or empty.
        compile_s: Seconds of its compilation; 0 if it was not compiled.
        host_bytes: Memory of the compilation.
        estimate: What was estimated before.
    """

    variant: Variant
    source: Source
    step_s: float
    bound: str
    peak_bytes: float
    memory_bytes: float
    rows: int
    tokens: int
    utilization: float
    sent: Mapping[str, float]
    parts: Mapping[str, float]
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
        """Whether it can be compiled, and fits each device's memory."""
        return not self.error and not self.peak_bytes > self.memory_bytes

    @property
    def examples_per_s(self) -> float:
        """Examples per second on all devices."""
        return self.rows / self.step_s if self.step_s else math.nan

    def to_code(self) -> str:
        """Returns Python that makes the mesh, the map, the state and the step."""
        return self.variant.to_code()

    def to_dict(self) -> dict[str, Any]:
        """Returns values that JSON can hold."""
        return {
            "name": str(self.variant),
            "topology": self.variant.topology,
            "mesh": dict(self.mesh.shape),
            "step_options": self.step_options,
            "fits": self.fits,
            "source": self.source,
            "step_s": self.step_s,
            "bound": self.bound,
            "peak_bytes": self.peak_bytes,
            "memory_bytes": self.memory_bytes,
            "examples_per_s": self.examples_per_s,
            "tokens_per_s": self.tokens / self.step_s if self.step_s else math.nan,
            "utilization": self.utilization,
            "sent": dict(self.sent),
            "error": self.error,
            "compile_s": self.compile_s,
            "host_bytes": self.host_bytes,
            "code": self.to_code(),
        }

    def __repr__(self) -> str:
        return f"{self.variant} on {self.mesh!r}: {', '.join(self._cells()[3:6])}"

    def _cells(self) -> list[str]:
        room = self.memory_bytes - self.peak_bytes
        words = "fits" if self.fits else "too large"
        if math.isfinite(room):
            words += (
                f", {_render.bytes_text(abs(room))} {'left' if room > 0 else 'over'}"
            )
        rate = f"{self.examples_per_s:,.0f}" if self.step_s else ""
        if self.tokens and self.step_s:
            rate += f" ({self.tokens / self.step_s:,.0f} tok/s)"
        sent = "; ".join(f"{k} {_render.bytes_text(v)}" for k, v in self.sent.items())
        return [
            self.variant.topology,
            sizes_text(self.mesh.shape),
            str(self.variant),
            self.error[:80] if self.error and not self.peak_bytes else words,
            f"{self.step_s * 1e3:.3g} ms" if self.step_s else "",
            self.bound,
            rate,
            f"{self.utilization:.0%}" if self.step_s else "",
            sent,
            self.source,
        ]


_HEADERS = ["topology", "mesh", "layouts", "memory", "step", "bound"]
_HEADERS += ["examples/s", "MFU", "sent", ""]
_ALIGN = "llllrlrrll"


@dataclass(frozen=True, repr=False)
class Ranking:
    """The result of `plan`: text if printed, a table in notebooks.

    Attributes:
        rows: Every candidate, the best first: those that fit, by examples per second
            and device, what was compiled before what was not.
        changes: Where nothing fits, the smallest changes that would, compiled.
        notes: What else is to be said, such as that the budget was used up.
    """

    rows: tuple[Row, ...]
    changes: tuple[Row, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        """Whether any candidate fits."""
        return any(row.fits for row in self.rows)

    @property
    def best(self) -> Row:
        """The best candidate; the best change where nothing fits.

        Raises:
            MeshLayoutError: If nothing fits, and no change would.
        """
        for row in (*self.rows, *self.changes):
            if row.fits:
                return row
        msg = "no candidate fits, and no change of one: take a larger slice."
        raise MeshLayoutError(msg)

    def explain(self, row: "Row | int" = 0) -> str:
        """Returns what a row's time consists of, as text.

        Args:
            row: A row, or its place in `rows`.
        """
        chosen = self.rows[row] if isinstance(row, int) else row
        total = sum(chosen.parts.values()) or 1.0
        parts = list(chosen.parts.items())
        lines = [
            [name, f"{seconds * 1e3:.4f} ms", f"{seconds / total:.1%}"]
            for name, seconds in parts[:30]
        ]
        if rest := sum(seconds for _, seconds in parts[30:]):
            lines.append([f"{len(parts) - 30} more", f"{rest * 1e3:.4f} ms", ""])
            lines[-1][-1] = f"{rest / total:.1%}"
        return _render.text_table(
            ["what", "time", "share"], lines, "lrr", [repr(chosen)]
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns values that JSON can hold."""
        rows, changes = ([x.to_dict() for x in y] for y in (self.rows, self.changes))
        return {"rows": rows, "changes": changes, "notes": list(self.notes)}

    def __repr__(self) -> str:
        return _render.text_table(_HEADERS, self._table(), _ALIGN, self._notes())

    def _repr_html_(self) -> str:
        return _render.html_table(_HEADERS, self._table(), _ALIGN, notes=self._notes())

    def _table(self) -> list[list[str]]:
        return [row._cells() for row in self.rows]

    def _notes(self) -> Sequence[str]:
        changes = [f"would fit: {row}" for row in self.changes]
        nothing = ["Nothing fits."] * (not self.fits)
        return [*nothing, *changes, *self.notes]
