"""The meshes and layouts that `plan` compares, made by the code to paste."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

import meshlayout
from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout._batches import batch_axes
from meshlayout.errors import LayoutError, LayoutMapError, MeshError
from meshlayout.layout_map import LayoutMap
from meshlayout.mesh import Mesh, create_mesh
from meshlayout.planning.chips import Slice
from meshlayout.planning.rows import Row
from meshlayout.state.train_state import Optimizer, _transformation


Candidates: TypeAlias = Mapping[str, "LayoutMap | Callable[[Mesh], LayoutMap]"]
_Axes: TypeAlias = tuple[tuple[str, ...], ...]  # that shard each dim of a batch
# A name, the axes, the microbatches of a pipeline, and code that makes the maps.
_Way: TypeAlias = tuple[str, Mesh, _Axes, int, Sequence[str]]

_DATA = "ml.parallel.data_parallel(mesh)"
_ACTIVATIONS = "activations = ml.LayoutMap(mesh, {{{!r}: {}}}, unused='ignore')"


@dataclass
class Traits:
    """What a traced model shows of how it can be laid out."""

    # Axes that it asks for, which function does, and in how many microbatches.
    axes: dict[str, tuple[str, int]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)  # of activations that it constrains
    stacks: str = ""  # a pattern of the parameters that loops read layer by layer


def meshes(target: Slice, axis: str = "") -> Iterator[Mesh]:
    """Yields the meshes of one to three axes that divide a slice along its grid.

    With an axis that a model asks for, those that have it beside one for the batch.
    """
    count, sides = len(target.devices), {size for size in target.grid if size > 1}
    # Part of one side of the grid, or whole sides.
    parts = {n for side in sides for n in range(2, side + 1) if side % n == 0}
    parts |= {n * m for n, m in itertools.combinations(target.grid, 2)}
    parts = sorted(n for n in parts if count % n == 0 and 1 < n < count)
    models = [n for n in parts if n <= 16]  # what it sends grows with it
    shards = [n for n in parts if n in sides or len(sides) == 1]
    shapes: list[dict[str, int]] = []
    for n, m in itertools.product([1, *shards], [1, *models]):
        rest = count // n // m
        if rest * n * m == count and (rest > 1 or n * m == 1):
            rows = {"replica": rest, "fsdp": n} if n > 1 else {"batch": rest}
            shapes.append(rows | {"model": m} if m > 1 else rows)
    if axis:
        shapes = [{"batch": count // n, axis: n} for n in {*models, count} - {1}]
    for shape in shapes:
        # JAX may find no order of the devices for it.
        with contextlib.suppress(MeshError):
            yield create_mesh(shape, devices=target.devices)


def proposals(
    target: Slice,
    values: Mapping[str, object],
    traits: Traits,
    candidates: Candidates | None = None,
) -> Iterator[Row]:
    """Yields a user's candidates; or the usual ones, and those that a model asks for.

    What cannot be laid out has an error. `values` are those of `module` or `build`, of
    `batch` and of `loss_fn`.
    """
    ways = _given(candidates, target) if candidates else _usual(target, values, traits)
    for name, mesh, batch, passes, code in ways:
        known: dict[str, Any] = {**values, "ml": meshlayout, "mesh": mesh}
        known["layouts"] = known["activations"] = LayoutMap(mesh)
        known["candidates"], error = candidates, ""
        with _checks.noted(f"while plan traces the candidate {name!r}"):
            try:
                exec("\n".join(code), known)
            except (LayoutError, LayoutMapError, MeshError) as failure:
                error = str(failure).splitlines()[0]
        rows, *others = batch
        dims = None if rows == batch_axes(mesh) else (rows, ...)
        dims = batch if others[1:] else dims
        maps = known["layouts"], known["activations"], batch, dims
        yield Row(name, target.name, mesh, *maps, tuple(code), passes, error=error)


def _given(candidates: Candidates, target: Slice) -> Iterator[_Way]:
    """Yields maps that are on a slice, and functions of a mesh on all of its meshes."""
    for name, value in candidates.items():
        is_map, code = isinstance(value, LayoutMap), f"layouts = candidates[{name!r}]"
        lines = [code if is_map else f"{code}(mesh)", "mesh = layouts.mesh"]
        for mesh in [value.mesh] if isinstance(value, LayoutMap) else meshes(target):
            if {*mesh.devices.flat} <= {*target.devices}:
                rows = batch_axes(mesh)
                activations = _ACTIVATIONS.format("carry", f"({rows}, ...)")
                yield name, mesh, (rows,), 1, [*lines, activations]


def _usual(
    target: Slice, values: Mapping[str, object], traits: Traits
) -> Iterator[_Way]:
    """Yields the usual layouts, and those for axes that a model asks for."""
    only = "(batch,)" if isinstance(values["batch"], tuple) else "batch"
    call = f"{next(iter(values))}, {only}, call=loss_fn"
    # What the model asks for is known when the first candidate has been traced.
    for axis in itertools.chain([""], traits.axes):
        kind, passes = traits.axes.get(axis, ("", 1))
        if (kind, passes) != ("pipeline", 1):  # whose stages would wait for each other
            for mesh in meshes(target, axis):
                for name, batch, *code in _ways(mesh, kind, call, traits):
                    yield name, mesh, batch, passes, code


def _ways(
    mesh: Mesh, kind: str, call: str, traits: Traits
) -> Iterator[tuple[str, _Axes, str, str]]:
    """Yields names, the axes that shard batches, and the code of both maps."""
    rows, axis = batch_axes(mesh), mesh.axis_names[-1]
    fsdp = f"ml.parallel.fsdp(mesh, {call})"
    tensor = f"ml.parallel.tensor_parallel(mesh, {call})"
    experts = f"ml.parallel.expert_parallel(mesh, {axis!r}, {call})"
    stages = f"ml.parallel.stages(mesh, {axis!r}, pattern={traits.stacks!r})"
    label, first, batch = {
        "": ("", tensor if axis == "model" else "", (rows,)),
        "dispatch": ("experts", experts, ((*rows, axis),)),
        "pipeline": ("stages", stages, (rows,)),
        "convolution": ("space", "", (rows, (axis,), (), ())),
    }.get(kind, ("context", "", (rows, (axis,))))
    names, carry = (f"fsdp + {label}", f"data + {label}"), "carry"
    if label == "context":
        fsdp, carry = f"{fsdp[:-1]}, axes={(*rows, axis)})", "carry|^residual$"
    elif label == "space":
        names, fsdp = names[1:], _DATA
    elif not label:
        names = ("tensor + fsdp", "tensor") if first else ("fsdp", "data")
    if "fsdp" in mesh and not kind:
        names = (names[0] if first else "hybrid fsdp",)
    both = f"ml.parallel.compose({first}, {fsdp})" if first else fsdp
    dims = str((*batch, ...)).replace("Ellipsis", "...")
    for name, code in zip(names, (both, first or _DATA), strict=False):
        code = f"layouts = {code}"
        yield name, batch, code, _ACTIVATIONS.format(carry, dims)
        if first == tensor and "residual" in traits.names:
            name = name.replace("tensor", "tensor, sequence")
            text = f"activations = {tensor[:-1]}, sequence=True)"
            yield name, batch, code, f"{text} | {{'carry': ({rows}, 'model', ...)}}"


def bfloat16_state(optimizer: Optimizer) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that keeps its state in bfloat16, in half the memory.

    The update is computed in float32 from that state. Small changes of a moving average
    are lost in bfloat16: compare losses before you rely on it.

    Examples:
        >>> tx = bfloat16_state(optax.adam(1e-3))
        >>> str(tx.init({"w": jnp.zeros(2)})[0].mu["w"].dtype)
        'bfloat16'
    """
    tx = optax.with_extra_args_support(_transformation(optimizer))

    def cast(tree: PyTree, source: str, dtype: str) -> PyTree:
        return jax.tree.map(
            lambda x: x.astype(dtype) if jnp.ndim(x) and x.dtype == source else x, tree
        )

    def init(params: PyTree) -> PyTree:
        return cast(tx.init(params), "float32", "bfloat16")

    def update(updates: PyTree, state: PyTree, *rest: PyTree, **extra: Any) -> Any:
        whole = cast(state, "bfloat16", "float32")
        updates, state = tx.update(updates, whole, *rest, **extra)
        return updates, cast(state, "float32", "bfloat16")

    return optax.GradientTransformationExtraArgs(init, update)
