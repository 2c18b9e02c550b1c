"""The meshes and layouts that `plan` compares, each a value with the code to paste."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from meshlayout import _jax
from meshlayout._annotations import Leaf, PyTree
from meshlayout._batches import batch_axes
from meshlayout.errors import LayoutMapError, MeshError, MeshLayoutError
from meshlayout.layout_map import LayoutMap
from meshlayout.mesh import Mesh, create_mesh
from meshlayout.parallel import compose, data_parallel, zero_rule
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

    def with_options(self, **options: object) -> "Variant":
        """Returns the same with other options of the step."""
        return replace(self, options={**self.options, **options})

    def offloaded(self) -> "Variant":
        """Returns the same with the optimizer's state in the host's memory."""
        rule = zero_rule(self.mesh, memory_kind="pinned_host")
        layouts = self.layouts | {"^opt_state/": rule}
        return replace(self, layouts=layouts, code=(*self.code, OFFLOAD))

    @property
    def activations(self) -> LayoutMap:
        """Layouts of what loops carry, which XLA may shard like the weights."""
        return LayoutMap(self.mesh, {"carry": (batch_axes(self.mesh), ...)})

    def to_code(self) -> str:
        """Returns Python that makes the mesh, the map, the state and the step."""
        axes = ", ".join(f'"{name}": {size}' for name, size in self.mesh.shape.items())
        options = [f"{name}={value!r}" for name, value in self.options.items()]
        call = ", ".join(["loss_fn", "layouts=activations", *options, "**step_options"])
        lines = ["import meshlayout as ml", "", f"mesh = ml.create_mesh({{{axes}}})"]
        lines += [*self.code, "state = ml.TrainState.create(build, optimizer, layouts)"]
        rules = f"{{'carry': ({batch_axes(self.mesh)!r}, ...)}}"
        lines.append(f"activations = ml.LayoutMap(mesh, {rules})")
        return "\n".join([*lines, f"train_step = ml.make_train_step({call})"])


def meshes(devices: Sequence[_jax.Device], grid: Sequence[int]) -> list[Mesh]:
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
    known: list[Mesh] = []
    for shape in shapes:
        try:
            known.append(create_mesh(shape, devices=devices))
        except MeshError:  # JAX finds no order of the devices for it
            continue
    return known


def proposals(
    mesh: Mesh,
    topology: str,
    sharded: Callable[[Mesh], LayoutMap],
    tensor: Callable[[Mesh], LayoutMap],
) -> Iterator[Variant]:
    """Yields the usual layout maps for a mesh, made of these two."""
    line = "layouts = ml.parallel.{}".format
    parts, rest = (
        f"{x}(mesh, build, batch, call=loss_fn)" for x in ("tensor_parallel", "fsdp")
    )
    if "model" not in mesh:
        name = "hybrid fsdp" if "fsdp" in mesh else "fsdp"
        yield Variant(name, topology, mesh, sharded(mesh), (line(rest),))
        if "fsdp" not in mesh:
            code = (line("data_parallel(mesh)"),)
            yield Variant("data", topology, mesh, data_parallel(mesh), code)
        return
    try:
        first = tensor(mesh)
    except LayoutMapError as error:
        yield Variant("tensor", topology, mesh, LayoutMap(mesh), error=str(error))
        return
    if "fsdp" not in mesh:
        yield Variant("tensor", topology, mesh, first, (line(parts),))
    layouts, code = (
        compose(first, sharded(mesh)),
        line(f"compose(ml.parallel.{parts}, ml.parallel.{rest})"),
    )
    yield Variant("tensor + fsdp", topology, mesh, layouts, (code,))


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


def bfloat16_state(optimizer: Optimizer) -> optax.GradientTransformationExtraArgs:
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
        def leaf(x: Leaf) -> Leaf:
            return x.astype(dtype) if jnp.ndim(x) and x.dtype == source else x

        return jax.tree.map(leaf, tree)

    def update(updates: PyTree, state: PyTree, *rest: PyTree, **extra: Any) -> Any:
        whole = cast(state, "bfloat16", "float32")
        updates, state = tx.update(updates, whole, *rest, **extra)
        return updates, cast(state, "float32", "bfloat16")

    def init(params: PyTree) -> PyTree:
        return cast(tx.init(params), "float32", "bfloat16")

    return optax.GradientTransformationExtraArgs(init, update)
