"""The meshes and layouts that `plan` compares, each with the code to paste."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from meshlayout import _checks, _jax
from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout.errors import LayoutMapError, MeshError, MeshLayoutError
from meshlayout.layout_map import LayoutMap
from meshlayout.mesh import Mesh, create_mesh
from meshlayout.parallel import compose, data_parallel, fsdp, tensor_parallel
from meshlayout.planning.rows import Row
from meshlayout.state.train_state import Optimizer, _transformation


Candidates: TypeAlias = Mapping[str, "LayoutMap | Callable[[Mesh], LayoutMap]"]

_LARGEST_MODEL_AXIS = 16  # what it sends grows with it


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
    mesh: Mesh, topology: str, model: Any, inputs: Batch, call: Callable[..., Any]
) -> Iterator[Row]:
    """Yields the usual layouts for a mesh."""
    arguments = "(mesh, build, batch, call=loss_fn)"
    rest, parts = (
        f"ml.parallel.fsdp{arguments}",
        f"ml.parallel.tensor_parallel{arguments}",
    )

    def sharded() -> LayoutMap:
        return fsdp(mesh, model, inputs, call=call)

    def tensor() -> LayoutMap:
        return tensor_parallel(mesh, model, inputs, call=call)

    ways: dict[str, tuple[str, Callable[[], LayoutMap]]] = {}
    if "model" not in mesh:
        ways["hybrid fsdp" if "fsdp" in mesh else "fsdp"] = rest, sharded
    if "model" not in mesh and "fsdp" not in mesh:
        ways["data"] = "ml.parallel.data_parallel(mesh)", lambda: data_parallel(mesh)
    if "model" in mesh and "fsdp" not in mesh:
        ways["tensor"] = parts, tensor
    if "model" in mesh:
        both = f"ml.parallel.compose({parts}, {rest})"
        ways["tensor + fsdp"] = both, lambda: compose(tensor(), sharded())
    for name, (text, make) in ways.items():
        row = Row(name, topology, mesh, LayoutMap(mesh), (f"layouts = {text}",))
        try:
            with _checks.noted(f"while plan traces the candidate {name!r}"):
                row = replace(row, layouts=make())
        except LayoutMapError as error:  # nothing can be sharded
            row = replace(row, error=str(error).splitlines()[0])
        yield row


def given(
    candidates: Candidates, known: Sequence[Mesh], topology: str
) -> Iterator[Row]:
    """Yields a user's candidates: maps, and functions of every mesh that they take."""
    devices = {*known[0].devices.flat}
    for name, value in candidates.items():
        maps: list[LayoutMap] = []
        problem: MeshLayoutError | None = None
        code = (f"layouts = {name}  # your map",)
        if isinstance(value, LayoutMap):
            maps = [value] * ({*value.mesh.devices.flat} <= devices)
        else:
            code = (f"layouts = {getattr(value, '__name__', name)}(mesh)",)
            for mesh in known:
                try:
                    maps.append(value(mesh))
                except MeshLayoutError as error:  # it is for meshes with other axes
                    problem = error
        if problem is not None and not maps:
            problem.add_note(f"while plan calls the candidate {name!r}")
            raise problem
        for layouts in maps:
            yield Row(name, topology, layouts.mesh, layouts, code)


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
