"""The meshes and layouts that `plan` compares, each a value with the code to paste."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout.errors import LayoutMapError, MeshError, MeshLayoutError
from meshlayout.layout_map import LayoutMap
from meshlayout.mesh import Mesh, create_mesh
from meshlayout.parallel import (
    compose,
    data_parallel,
    expert_parallel,
    fsdp,
    tensor_parallel,
    zero_rule,
)
from meshlayout.state.train_state import Optimizer, _transformation


Candidates: TypeAlias = Mapping[str, "LayoutMap | Callable[[Mesh], LayoutMap]"]

OFFLOAD = 'layouts |= {"^opt_state/": ml.zero_rule(mesh, memory_kind="pinned_host")}'
BFLOAT16 = "optimizer = ml.planning.bfloat16_state(optimizer)"
_LARGEST_MODEL_AXIS = 16  # what it sends grows with it


@dataclass(frozen=True)
class Variant:
    """A candidate: a mesh, a layout map and options of a train step.

    Attributes:
        name: Such as `"fsdp"`.
        topology: What it is for.
        mesh: The mesh.
        layouts: The layout map.
        code: Lines that make the map, from `mesh`.
        options: Options of `make_train_step` besides those of the user.
        error: Why there is no layout map, or empty.
    """

    name: str
    topology: str
    mesh: Mesh
    layouts: LayoutMap
    code: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    def __str__(self) -> str:
        texts = [self.name, *(f"{name}={x}" for name, x in self.options.items())]
        texts += ["optimizer on the host"] * (OFFLOAD in self.code)
        return ", ".join(texts + ["optimizer in bfloat16"] * (BFLOAT16 in self.code))

    def with_options(self, **options: Any) -> "Variant":
        """Returns the same with other options of the step."""
        return replace(self, options={**self.options, **options})

    def offloaded(self) -> "Variant":
        """Returns the same with the optimizer's state in the host's memory."""
        rule = zero_rule(self.mesh, memory_kind="pinned_host")
        layouts = self.layouts | {"^opt_state/": rule}
        code = [line for line in self.code if "^opt_state/" not in line]
        return replace(self, layouts=layouts, code=(*code, OFFLOAD))

    def to_code(self) -> str:
        """Returns Python that makes the mesh, the map, the state and the step."""
        axes = ", ".join(f'"{name}": {size}' for name, size in self.mesh.shape.items())
        options = [f"{name}={value!r}" for name, value in self.options.items()]
        call = ", ".join(["loss_fn", *options, "**step_options"])
        lines = ["import meshlayout as ml", "", f"mesh = ml.create_mesh({{{axes}}})"]
        lines += [*self.code, "state = ml.TrainState.create(build, optimizer, layouts)"]
        return "\n".join([*lines, f"train_step = ml.make_train_step({call})"])


def meshes(devices: Sequence[Any], grid: Sequence[int]) -> list[Mesh]:
    """Returns the meshes of one to three axes that divide a slice along its grid."""
    count, sides = len(devices), {size for size in grid if size > 1}
    # Part of one side of the grid, or whole sides.
    parts = {n for side in sides for n in range(2, side + 1) if side % n == 0}
    for number in range(2, len(grid)):
        parts |= {math.prod(x) for x in itertools.combinations(grid, number)}
    parts = sorted(n for n in parts if count % n == 0 and 1 < n < count)
    models = [n for n in parts if n <= _LARGEST_MODEL_AXIS]
    shards = [n for n in parts if n in sides or len(sides) == 1]
    shapes: list[dict[str, int]] = [{"batch": count}]
    shapes += [{"replica": count // n, "fsdp": n} for n in shards]
    shapes += [{"batch": count // n, "model": n} for n in models]
    shapes += [
        {"replica": count // n // m, "fsdp": n, "model": m}
        for n, m in itertools.product(shards, models)
        if count % (n * m) == 0 and n * m < count
    ]
    made: list[Mesh] = []
    for shape in shapes:
        try:
            made.append(create_mesh(shape, devices=devices))
        except MeshError:  # JAX finds no order of the devices for it
            continue
    return made


class Proposals:
    """What is proposed for a model; it is traced once for each size of an axis."""

    def __init__(self, model: PyTree, call: Callable[..., Any], batch: Batch) -> None:
        self._arguments, self._call = (model, (batch,)), call
        self._rules: dict[tuple[str, int], dict[str, Any] | str] = {}

    def of(self, mesh: Mesh, topology: str) -> Iterator[Variant]:
        """Yields the layout maps for a mesh."""
        is_hybrid, sharded = "fsdp" in mesh, fsdp(mesh)
        line = "layouts = ml.parallel.{}"
        if "model" not in mesh:
            name = "hybrid fsdp" if is_hybrid else "fsdp"
            yield Variant(name, topology, mesh, sharded, (line.format("fsdp(mesh)"),))
            if is_hybrid:
                return
            whole, code = data_parallel(mesh), (line.format("data_parallel(mesh)"),)
            yield Variant("data", topology, mesh, whole, code)
            whole |= {"^opt_state/": zero_rule(mesh)}
            code += ('layouts |= {"^opt_state/": ml.zero_rule(mesh)}',)
            yield Variant("data, zero", topology, mesh, whole, code)
            return
        for kind, axis in {"tensor": "", "expert": '"model", '}.items():
            rules = self._rules_of(kind, mesh)
            if isinstance(rules, str) and kind == "tensor":
                yield Variant(kind, topology, mesh, LayoutMap(mesh), error=rules)
            if isinstance(rules, str) or not rules:
                continue
            first = LayoutMap(mesh, rules)
            call = f"{kind}_parallel(mesh, {axis}build, batch, call=loss_fn)"
            if not is_hybrid:
                yield Variant(kind, topology, mesh, first, (line.format(call),))
            both = f"compose(ml.parallel.{call}, ml.parallel.fsdp(mesh))"
            code, layouts = (line.format(both),), compose(first, sharded)
            yield Variant(f"{kind} + fsdp", topology, mesh, layouts, code)

    def _rules_of(self, kind: str, mesh: Mesh) -> dict[str, Any] | str:
        """Returns rules for an axis, as entries per dim, or why there are none."""
        key = kind, mesh.shape["model"]
        if key not in self._rules:
            try:
                if kind == "tensor":
                    made = tensor_parallel(mesh, *self._arguments, call=self._call)
                else:
                    made = expert_parallel(
                        mesh, "model", *self._arguments, call=self._call
                    )
            except LayoutMapError as error:
                self._rules[key] = str(error)
            else:
                rules: dict[str, Any] = {**made}
                layouts = {k: getattr(x, "layout", x) for k, x in rules.items()}
                self._rules[key] = {k: tuple(x.specs) for k, x in layouts.items()}
        return self._rules[key]


def given(
    candidates: Candidates, known: Sequence[Mesh], topology: str
) -> Iterator[Variant]:
    """Yields a user's candidates: maps, and functions of every mesh that they take."""
    for name, value in candidates.items():
        if isinstance(value, LayoutMap):
            if {*value.mesh.devices.flat} <= {*known[0].devices.flat}:
                code = (f"layouts = {name}  # your map",)
                yield Variant(name, topology, value.mesh, value, code)
            continue
        layouts, problem = None, None
        for mesh in known:
            try:
                layouts = value(mesh)
            except MeshLayoutError as error:  # it is for meshes with other axes
                problem = error
                continue
            code = (f"layouts = {getattr(value, '__name__', name)}(mesh)",)
            yield Variant(name, topology, mesh, layouts, code)
        if layouts is None and problem is not None:
            problem.add_note(f"while plan calls the candidate {name!r}")
            raise problem


def bfloat16_state(
    optimizer: Optimizer,
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that keeps its state in bfloat16, in half the memory.

    The update is computed in float32 of what was kept. Small changes of a moving
    average are lost in bfloat16: compare losses before you rely on it.

    Example:
        >>> tx = bfloat16_state(optax.adam(1e-3))
        >>> str(tx.init({"w": jnp.zeros(2)})[0].mu["w"].dtype)
        'bfloat16'
    """
    tx = optax.with_extra_args_support(_transformation(optimizer))

    def cast(tree: PyTree, source: str, dtype: str) -> PyTree:
        def leaf(x: Leaf) -> Any:
            return x.astype(dtype) if jnp.ndim(x) and x.dtype == source else x

        return jax.tree.map(leaf, tree)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> Any:
        whole = cast(state, "bfloat16", "float32")
        updates, state = tx.update(updates, whole, params, **extra)
        return updates, cast(state, "float32", "bfloat16")

    return optax.GradientTransformationExtraArgs(
        lambda params: cast(tx.init(params), "float32", "bfloat16"), update
    )
