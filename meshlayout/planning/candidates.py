"""The meshes and layouts that `plan` compares, each a value with the code to paste."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from meshlayout._annotations import Batch
from meshlayout.errors import LayoutMapError, MeshError, MeshLayoutError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap, Rule
from meshlayout.mesh import Mesh, create_mesh
from meshlayout.parallel import (
    compose,
    data_parallel,
    expert_parallel,
    fsdp,
    tensor_parallel,
    zero_rule,
)


Candidates: TypeAlias = Mapping[str, "LayoutMap | Callable[[Mesh], LayoutMap]"]

OFFLOAD = 'layouts |= {"^opt_state/": ml.zero_rule(mesh, memory_kind="pinned_host")}'
BFLOAT16 = "optimizer = ml.planning.bfloat16_state(optimizer)"


@dataclass(frozen=True)
class Variant:
    """A mesh, a layout map and options of a train step.

    Attributes:
        name: Such as `"fsdp"`.
        topology: What it is for.
        mesh: The mesh.
        layouts: The layout map.
        options: Options of `make_train_step` besides those of the user.
        code: Lines that make the map, from `mesh`.
        has_bfloat16_state: Whether the optimizer's state is in bfloat16.
        error: Why there is no layout map, or empty.
    """

    name: str
    topology: str
    mesh: Mesh
    layouts: LayoutMap
    options: Mapping[str, Any] = field(default_factory=dict)
    code: Sequence[str] = ()
    has_bfloat16_state: bool = False
    error: str = ""

    def __str__(self) -> str:
        texts = [f"{name}={value}" for name, value in self.options.items()]
        texts += ["optimizer on the host"] * (OFFLOAD in self.code)
        texts += ["optimizer in bfloat16"] * self.has_bfloat16_state
        return ", ".join([self.name, *texts])

    def with_options(self, **options: Any) -> "Variant":
        """Returns the same with other options of the step."""
        return replace(self, options={**self.options, **options})

    def offloaded(self) -> "Variant":
        """Returns the same with the optimizer's state in the host's memory."""
        rule = zero_rule(self.mesh, memory_kind="pinned_host")
        layouts = self.layouts | {"^opt_state/": rule}
        code = [x for x in self.code if "^opt_state/" not in x]
        return replace(self, layouts=layouts, code=(*code, OFFLOAD))

    def to_code(self) -> str:
        """Returns Python that makes the mesh, the map, the state and the step."""
        axes = ", ".join(f'"{name}": {size}' for name, size in self.mesh.shape.items())
        options = [f"{name}={value!r}" for name, value in self.options.items()]
        lines = ["import meshlayout as ml", "", f"mesh = ml.create_mesh({{{axes}}})"]
        lines += [*self.code, *[BFLOAT16] * self.has_bfloat16_state]
        lines += ["state = ml.TrainState.create(build, optimizer, layouts)"]
        call = ", ".join(["loss_fn", *options, "**step_options"])
        return "\n".join([*lines, f"train_step = ml.make_train_step({call})"])


def meshes(devices: Sequence[Any], grid: Sequence[int]) -> Iterator[Mesh]:
    """Yields the meshes of one to three axes that divide a slice along its grid."""
    count = len(devices)
    sides = {size for size in grid if size > 1}
    # Part of one side of the grid, or whole sides.
    parts = {n for side in sides for n in range(2, side + 1) if side % n == 0}
    for number in range(2, len(grid)):
        parts |= {math.prod(x) for x in itertools.combinations(grid, number)}
    parts = {n for n in parts if count % n == 0 and 1 < n < count}
    shapes: list[dict[str, int]] = [{"batch": count}]
    shapes += [{"replica": count // n, "fsdp": n} for n in sorted(parts & sides)]
    shapes += [{"batch": count // n, "model": n} for n in sorted(parts) if n <= 16]
    shapes += [
        {"replica": count // n // m, "fsdp": n, "model": m}
        for n in sorted(parts & sides)
        for m in sorted(parts)
        if m <= 16 and count % (n * m) == 0 and n * m < count
    ]
    for shape in shapes:
        try:
            yield create_mesh(shape, devices=devices)
        except MeshError:  # JAX finds no order of the devices for it
            continue


class Proposals:
    """What is proposed for a model; it is traced once for each size of an axis."""

    def __init__(self, model: Any, call: Callable[..., Any], batch: Batch) -> None:
        self._model, self._call, self._batch = model, call, batch
        self._rules: dict[Any, dict[str, Any] | str] = {}

    def of(self, mesh: Mesh, topology: str) -> Iterator[Variant]:
        """Yields the layout maps for a mesh."""
        rows = [axis for axis in mesh.axis_names if axis != "model"]
        axes = "" if rows == ["batch"] or "fsdp" in rows else f", axes={rows!r}"
        sharded = fsdp(mesh)
        if "model" not in mesh:
            kind = "hybrid fsdp" if "fsdp" in mesh else "fsdp"
            code = f"layouts = ml.parallel.fsdp(mesh{axes})"
            yield Variant(kind, topology, mesh, sharded, code=(code,))
            if "fsdp" in mesh:
                return
            code = "layouts = ml.parallel.data_parallel(mesh)"
            whole = data_parallel(mesh)
            yield Variant("data", topology, mesh, whole, code=(code,))
            zero = whole | {"^opt_state/": zero_rule(mesh)}
            more = 'layouts |= {"^opt_state/": ml.zero_rule(mesh)}'
            yield Variant("data, zero", topology, mesh, zero, code=(code, more))
            return
        for kind, function in {"tensor": tensor_parallel, "expert": _experts}.items():
            rules = self._rules_of(kind, function, mesh)
            if isinstance(rules, str):
                if kind == "tensor":
                    yield Variant(kind, topology, mesh, LayoutMap(mesh), error=rules)
                continue
            if not rules:
                continue
            first = LayoutMap(mesh, rules)
            call = "build, batch, call=loss_fn"
            code = f"ml.parallel.tensor_parallel(mesh, {call})"
            if kind == "expert":
                code = f'ml.parallel.expert_parallel(mesh, "model", {call})'
            if "fsdp" not in mesh:
                lines = (f"layouts = {code}",)
                yield Variant(kind, topology, mesh, first, code=lines)
            both = compose(first, sharded)
            second = f"ml.parallel.fsdp(mesh{axes})"
            lines = (f"layouts = ml.parallel.compose({code}, {second})",)
            yield Variant(f"{kind} + fsdp", topology, mesh, both, code=lines)

    def _rules_of(
        self, kind: str, function: Callable[..., LayoutMap], mesh: Mesh
    ) -> dict[str, Any] | str:
        """Returns rules for an axis, as entries per dim, or why there are none."""
        key = kind, mesh.shape["model"]
        if key not in self._rules:
            try:
                layouts = function(mesh, self._model, (self._batch,), call=self._call)
            except LayoutMapError as error:
                self._rules[key] = str(error)
            else:
                self._rules[key] = {
                    pattern: _entries(rule) for pattern, rule in layouts.items()
                }
        return self._rules[key]


def _experts(mesh: Mesh, *args: Any, **kwargs: Any) -> LayoutMap:
    return expert_parallel(mesh, "model", *args, **kwargs)


def _entries(rule: Any) -> Any:
    layout = rule.layout if isinstance(rule, Rule) else rule
    return tuple(layout.specs) if isinstance(layout, Layout) else layout


def given(
    candidates: Candidates, grid_meshes: Sequence[Mesh], topology: str
) -> Iterator[Variant]:
    """Yields a user's candidates: maps, and functions of every mesh."""
    for name, value in candidates.items():
        if isinstance(value, LayoutMap):
            if set(value.mesh.devices.flat) <= set(grid_meshes[0].devices.flat):
                code = f"layouts = {name}  # your map"
                yield Variant(name, topology, value.mesh, value, code=(code,))
            continue
        problem: MeshLayoutError | None = None
        is_used = False
        for mesh in grid_meshes:
            try:
                layouts = value(mesh)
            except MeshLayoutError as error:  # it is for meshes with other axes
                problem = error
                continue
            code = f"layouts = {getattr(value, '__name__', name)}(mesh)"
            yield Variant(name, topology, mesh, layouts, code=(code,))
            is_used = True
        if not is_used and problem is not None:
            raise problem
