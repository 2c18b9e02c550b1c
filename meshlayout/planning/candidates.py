"""The meshes and layouts that `plan` compares, made by the code to paste."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from meshlayout import _checks, parallel
from meshlayout._annotations import Leaf, PyTree
from meshlayout._batches import batch_axes
from meshlayout.errors import LayoutMapError, MeshError, MeshLayoutError
from meshlayout.layout_map import LayoutMap
from meshlayout.mesh import Mesh, create_mesh
from meshlayout.planning.chips import Slice
from meshlayout.planning.rows import Row
from meshlayout.state.train_state import Optimizer, _transformation


Candidates: TypeAlias = Mapping[str, "LayoutMap | Callable[[Mesh], LayoutMap]"]

_LARGEST_MODEL_AXIS = 16  # what it sends grows with it


@dataclass
class Traits:
    """What a traced model shows of how it can be laid out."""

    axes: dict[str, str] = field(default_factory=dict)  # asked for, and what asks
    names: set[str] = field(default_factory=set)  # of activations that it constrains
    stacks: str = ""  # a pattern of the parameters that loops read layer by layer


def meshes(target: Slice, axis: str = "") -> list[Mesh]:
    """Returns the meshes of one to three axes that divide a slice along its grid.

    With an axis that a model asks for, those that have it beside one for the batch.
    """
    count, sides = len(target.devices), {size for size in target.grid if size > 1}
    # Part of one side of the grid, or whole sides.
    parts = {n for side in sides for n in range(2, side + 1) if side % n == 0}
    for number in range(2, len(target.grid)):
        parts |= {math.prod(x) for x in itertools.combinations(target.grid, number)}
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
    if axis:
        sizes = [*models, count] if count > 1 else []
        shapes = [{"batch": count // n, axis: n} for n in sizes]
    known: list[Mesh] = []
    for shape in shapes:
        try:
            known.append(create_mesh(shape, devices=target.devices))
        except MeshError:  # JAX finds no order of the devices for it
            continue
    return known


def proposals(
    target: Slice, values: Mapping[str, object], traits: Traits
) -> Iterator[Row]:
    """Yields the usual layouts, and those for axes that a model asks for.

    `values` are those of `module` or `build`, of `batch` and of `loss_fn`.
    """
    space = SimpleNamespace(parallel=parallel, LayoutMap=LayoutMap)
    # What the model asks for is known when the first candidate has been traced.
    for axis in itertools.chain([""], traits.axes):
        for mesh in meshes(target, axis):
            known = {**values, "ml": space, "mesh": mesh}
            for name, batch, layouts, activations in _ways(mesh, axis, values, traits):
                code = f"layouts = {layouts}", f"activations = {activations}"
                maps = LayoutMap(mesh), LayoutMap(mesh)
                row = Row(name, target.name, mesh, *maps, batch, code)
                try:
                    with _checks.noted(f"while plan traces the candidate {name!r}"):
                        maps = eval(f"{layouts}, {activations}", known)
                        row = replace(row, layouts=maps[0], activations=maps[1])
                except LayoutMapError as error:  # nothing can be sharded
                    row = replace(row, error=str(error).splitlines()[0])
                yield row


def _ways(
    mesh: Mesh, axis: str, values: Mapping[str, object], traits: Traits
) -> Iterator[tuple[str, tuple[tuple[str, ...], ...], str, str]]:
    """Yields names, axes that shard batches, and code for both maps."""
    call = f"{next(iter(values))}, batch, call=loss_fn"
    fsdp, tensor = (
        f"ml.parallel.{x}(mesh, {call})" for x in ("fsdp", "tensor_parallel")
    )
    data, rows = "ml.parallel.data_parallel(mesh)", batch_axes(mesh)
    batch, kind = (rows,), traits.axes.get(axis, "")
    rules: dict[str, object] = {"carry": (rows, ...)}
    ways = {"fsdp": fsdp, "data": data}
    if kind == "dispatch":
        experts = f"ml.parallel.expert_parallel(mesh, {axis!r}, {call})"
        both = f"ml.parallel.compose({experts}, {fsdp})"
        ways, batch = (
            {"fsdp + experts": both, "data + experts": experts},
            ((*rows, axis),),
        )
        rules["carry"] = (*batch, ...)
    elif kind == "pipeline":
        stages = f"ml.parallel.stages(mesh, {axis!r}, pattern={traits.stacks!r})"
        both = f"ml.parallel.compose({stages}, {fsdp})"
        ways = {"fsdp + stages": both, "data + stages": stages}
    elif axis:
        whole = f"{fsdp[:-1]}, axes={(*rows, axis)})"
        ways, batch = {"fsdp + context": whole, "data + context": data}, (rows, (axis,))
        rules = {"carry|^residual$": (*batch, ...)}
    elif "model" in mesh:
        ways = {} if "fsdp" in mesh else {"tensor": tensor}
        ways["tensor + fsdp"] = f"ml.parallel.compose({tensor}, {fsdp})"
    elif "fsdp" in mesh:
        ways = {"hybrid fsdp": fsdp}
    text = f"ml.LayoutMap(mesh, {rules})".replace("Ellipsis", "...")
    for name, layouts in ways.items():
        yield name, batch, layouts, text
    if "model" in mesh and "residual" in traits.names:
        sequence = f"{tensor[:-1]}, sequence=True)"
        text = f"{sequence} | {{'carry': ({rows}, 'model', ...)}}"
        for name, layouts in ways.items():
            yield name.replace("tensor", "tensor, sequence"), batch, layouts, text


def given(candidates: Candidates, target: Slice) -> Iterator[Row]:
    """Yields a user's candidates: maps, and functions of every mesh that they take."""
    for name, value in candidates.items():
        maps: list[LayoutMap] = []
        problem: MeshLayoutError | None = None
        code = f"layouts = {name}  # your map"
        if isinstance(value, LayoutMap):
            maps = [value] * ({*value.mesh.devices.flat} <= {*target.devices})
        else:
            code = f"layouts = {getattr(value, '__name__', name)}(mesh)"
            for mesh in meshes(target):
                try:
                    maps.append(value(mesh))
                except MeshLayoutError as error:  # it is for meshes with other axes
                    problem = error
        if problem is not None and not maps:
            problem.add_note(f"while plan calls the candidate {name!r}")
            raise problem
        for layouts in maps:
            mesh, rows = layouts.mesh, batch_axes(layouts.mesh)
            carry = LayoutMap(mesh, {"carry": (rows, ...)})
            text = f"activations = ml.LayoutMap(mesh, {{'carry': ({rows}, ...)}})"
            yield Row(name, target.name, mesh, layouts, carry, (rows,), (code, text))


def bfloat16_state(optimizer: Optimizer) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that keeps its state in bfloat16, in half the memory.

    The update is computed in float32 of what was kept. Small changes of a moving
    average are lost in bfloat16: compare losses before you rely on it.

    Examples:
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
