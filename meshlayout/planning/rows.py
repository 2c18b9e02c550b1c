"""The result of `plan`: candidates, their cost, and the parts of their time."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from meshlayout import _render
from meshlayout._annotations import PyTree
from meshlayout.errors import MeshLayoutError
from meshlayout.layout_map import LayoutMap
from meshlayout.mesh import Mesh, sizes_text
from meshlayout.parallel import zero_rule


_OFFLOAD = 'layouts |= {"^opt_state/": ml.zero_rule(mesh, memory_kind="pinned_host")}'
_BFLOAT16 = "optimizer = ml.planning.bfloat16_state(optimizer)"
_HEADERS = ("topology", "mesh", "layouts", "memory", "step", "bound")
_HEADERS = (*_HEADERS, "examples per s", "MFU", "sent", "")
_FACTS = """topology source step_s bound peak_bytes memory_bytes utilization error sent
    fits examples_per_s tokens_per_s step_options"""


@dataclass(frozen=True)
class Estimate:
    """What one step costs on each device: seconds, bytes, and bytes sent by axes."""

    seconds: Mapping[str, float]  # compute, memory beyond it, and network
    peak_bytes: float
    sent: Mapping[str, float]
    parts: Mapping[str, float]  # seconds by module, and of waiting for collectives


@dataclass(frozen=True, repr=False)
class Row:
    """A candidate (a mesh, layout maps and options) and its cost.

    `source` is `"compiled"` for the compiler's memory and schedule, `"roofline"` for
    its memory and the program's FLOPs and bytes over peaks, or `"estimated"`.
    """

    name: str  # such as "fsdp"
    topology: str
    mesh: Mesh
    layouts: LayoutMap
    activations: LayoutMap  # for the step: of what loops carry, and between blocks
    batch: tuple[tuple[str, ...], ...]  # the axes that shard each dim of a batch
    batch_dims: tuple[Any, ...] | None  # the same, if they are not the usual ones
    code: tuple[str, ...]  # that makes the maps
    microbatches: int = 1  # of a pipeline
    create: str = "build, optimizer, layouts"  # what `TrainState.create` takes
    given: Mapping[str, Any] = field(default_factory=dict)  # options for all candidates
    step_options: Mapping[str, Any] = field(default_factory=dict)  # besides those given
    state: PyTree = None  # abstract, in its layouts
    error: str = ""  # why there is no program: the compiler's first line
    source: Literal["estimated", "compiled", "roofline"] = "estimated"
    memory_bytes: float = math.inf  # that each device has
    peak_bytes: float = math.nan  # that each device holds at the most
    step_s: float = math.nan
    examples_per_s: float = math.nan  # on all devices, like the next
    tokens_per_s: float = math.nan
    bound: str = ""  # "compute", "memory" or "network": what takes the most time
    utilization: float = math.nan  # model FLOPs as a share of what devices could do
    sent: Mapping[str, float] = field(default_factory=dict)  # by each device, by axes
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds
    estimate: Estimate = Estimate({}, math.nan, {}, {})  # of before the compilation

    def with_options(self, **options: object) -> "Row":
        """Returns the same candidate with other options of the step."""
        return replace(self, step_options={**self.step_options, **options})

    def offloaded(self) -> "Row":
        """Returns the same candidate with the optimizer's state on the host."""
        rule = zero_rule(self.mesh, memory_kind="pinned_host")
        layouts, name = self.layouts | {"^opt_state/": rule}, "optimizer on the host"
        code = (*self.code, _OFFLOAD)
        return replace(self, name=f"{self.name}, {name}", layouts=layouts, code=code)

    def in_bfloat16(self) -> "Row":
        """Returns the same candidate with the optimizer's state in bfloat16."""
        name = f"{self.name}, optimizer in bfloat16"
        return replace(self, name=name, code=(*self.code, _BFLOAT16))

    @property
    def is_bfloat16(self) -> bool:
        """Whether the optimizer's state is in bfloat16 for it."""
        return _BFLOAT16 in self.code

    @property
    def fits(self) -> bool:
        """Whether there is a program, and it fits each device's memory."""
        return not self.error and not self.peak_bytes > self.memory_bytes

    def to_code(self) -> str:
        """Returns Python that makes the mesh, the maps, the state and the step."""
        axes = ", ".join(f'"{name}": {size}' for name, size in self.mesh.shape.items())
        lines = ["import meshlayout as ml", "", f"mesh = ml.create_mesh({{{axes}}})"]
        lines += [*self.code, f"state = ml.TrainState.create({self.create})"]
        if self.batch_dims:
            dims = str(self.batch_dims).replace("Ellipsis", "...")
            lines.append(f"batch_layout = mesh.layout{dims}")
        call = "ml.make_train_step(loss_fn, layouts=activations"
        for name, value in {**self.step_options, **self.given}.items():
            is_plain = isinstance(value, (str, float, int))
            call += f", {name}={value!r}" if is_plain else f", {name}={name}"
        return "\n".join([*lines, f"train_step = {call})"])

    def to_dict(self) -> dict[str, Any]:
        """Returns values by name, for JSON; numbers that are not known are None."""
        facts: dict[str, Any] = {x: getattr(self, x) for x in _FACTS.split()}
        facts |= {"name": str(self), "mesh": dict(self.mesh.shape)}
        text = json.dumps({**facts, "code": self.to_code()}, default=dict)
        return json.loads(text, parse_constant=lambda _: None)

    def __str__(self) -> str:
        options = (f"{name}={x}" for name, x in self.step_options.items())
        return ", ".join([self.name, *options])

    def __repr__(self) -> str:
        cells = [x for x in (*self.cells()[3:6], self.source) if x]
        return f"{self} on ({sizes_text(self.mesh.shape)}): {', '.join(cells)}"

    def cells(self) -> list[str]:
        """Returns the texts of a line in a table; see `Ranking`."""
        room, fits = self.memory_bytes - self.peak_bytes, self.error[:72] or "fits"
        if room < 0:
            fits = f"too large, {_render.bytes_text(-room)} over"
        elif self.fits and math.isfinite(room):
            fits += f", {_render.bytes_text(room)} left"
        step, *rates = ["", "", ""]
        if not math.isnan(self.step_s):
            tokens = f" ({self.tokens_per_s:,.0f} tokens)" if self.tokens_per_s else ""
            rates = [f"{self.examples_per_s:,.0f}{tokens}", f"{self.utilization:.0%}"]
            step = f"{self.step_s * 1e3:.4g} ms"
        sent = (f"{k} {_render.bytes_text(x)}" for k, x in self.sent.items())
        place = [self.topology, sizes_text(self.mesh.shape), str(self)]
        return [*place, fits, step, self.bound, *rates, "; ".join(sent), self.source]


@dataclass(frozen=True, repr=False)
class Ranking:
    """The result of `plan`: text if printed, a table in notebooks.

    Rows that fit come first, compiled ones before the others, each by examples per
    second and device. If none fits, `changes` has the smallest change with which one
    does. `notes` has other remarks, such as that the budget has ended.
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
        errors = (row.error for row in self.rows if row.error)
        why = next(errors, "take a larger slice.")
        raise MeshLayoutError(f"no candidate fits, and no change of one: {why}")

    def explain(self, row: Row | int = 0) -> str:
        """Returns the parts of the time of a row, or of the row with an index."""
        row = self.rows[row] if isinstance(row, int) else row
        total = sum(row.parts.values())
        parts = sorted(row.parts.items(), key=lambda x: -x[1])
        parts = [*parts[:30], ("everything else", sum(x for _, x in parts[30:]))]
        lines = [[k, f"{x * 1e3:.4f} ms", f"{x / total:.1%}"] for k, x in parts if x]
        return _render.text_table(["what", "time", "share"], lines, "lrr", [repr(row)])

    def to_dict(self) -> dict[str, Any]:
        """Returns values by name, for JSON."""
        rows, changes = ([x.to_dict() for x in y] for y in (self.rows, self.changes))
        return {"rows": rows, "changes": changes, "notes": [*self.notes]}

    def __repr__(self) -> str:
        return self._drawn(_render.text_table)

    def _repr_html_(self) -> str:
        return self._drawn(_render.html_table)

    def _drawn(self, table: Callable[..., str]) -> str:
        notes = ["Nothing fits."] * (not self.fits) + [*self.notes]
        notes += [f"would fit {x.topology}: {x!r}" for x in self.changes]
        cells = [row.cells() for row in self.rows]
        return table(_HEADERS, cells, "llllrlrrll", notes=notes)
