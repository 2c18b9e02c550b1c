"""The meshes and layouts that `plan` compares, made by the code to paste."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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
        shapes = [{"batch": count // n, axis: n} for n in {*models, count} - {1}]
    for shape in shapes:
        # JAX may find no order of the devices for it.
        with contextlib.suppress(MeshError):
            yield create_mesh(shape, devices=target.devices)


def proposals(
    target: Slice, values: Mapping[str, object], traits: Traits
) -> Iterator[Row]:
    """Yields the usual layouts, and those for axes that a model asks for.

    `values` are those of `module` or `build`, of `batch` and of `loss_fn`.
    """
    library = SimpleNamespace(parallel=parallel, LayoutMap=LayoutMap)
    only = "(batch,)" if isinstance(values["batch"], tuple) else "batch"
    call = f"{next(iter(values))}, {only}, call=loss_fn"
    # What the model asks for is known when the first candidate has been traced.
    for axis in itertools.chain([""], traits.axes):
        for mesh in meshes(target, axis):
            batch, ways = _ways(mesh, axis, call, traits)
            for name, *maps in ways:
                code = tuple(map("{} = {}".format, ("layouts", "activations"), maps))
                none, error = LayoutMap(mesh), ""
                known: dict[str, Any] = {**values, "ml": library, "mesh": mesh}
                known |= {"layouts": none, "activations": none}
                try:
                    with _checks.noted(f"while plan traces the candidate {name!r}"):
                        exec("\n".join(code), known)
                except LayoutMapError as failure:  # nothing can be sharded
                    error = str(failure).splitlines()[0]
                made = known["layouts"], known["activations"], batch, code
                number = traits.axes.get(axis, ("", 1))[1]
                yield Row(name, target.name, mesh, *made, number, error=error)


def _ways(
    mesh: Mesh, axis: str, call: str, traits: Traits
) -> tuple[tuple[tuple[str, ...], ...], list[tuple[str, str, str]]]:
    """Returns the axes that shard batches; then names, and the code of both maps."""
    rows, both = batch_axes(mesh), "ml.parallel.compose({}, {})".format
    fsdp = f"ml.parallel.fsdp(mesh, {call})"
    data, carry = "ml.parallel.data_parallel(mesh)", "carry"
    tensor = f"ml.parallel.tensor_parallel(mesh, {call})"
    asked, passes = traits.axes.get(axis, ("", 1))
    batch: tuple[tuple[str, ...], ...] = (rows,)
    ways = {"fsdp": fsdp, "data": data}
    if asked == "dispatch":
        batch, experts = ((*rows, axis),), f"expert_parallel(mesh, {axis!r}, {call})"
        experts = f"ml.parallel.{experts}"
        ways = {"fsdp + experts": both(experts, fsdp), "data + experts": experts}
    elif asked == "pipeline":  # stages would wait for a single microbatch
        stages = f"ml.parallel.stages(mesh, {axis!r}, pattern={traits.stacks!r})"
        ways = {"fsdp + stages": both(stages, fsdp), "data + stages": stages}
        ways = ways if passes > 1 else {}
    elif asked == "convolution":
        batch, ways = (rows, (axis,), (), ()), {"data + space": data}
    elif asked:
        batch, carry = (rows, (axis,)), "carry|^residual$"
        fsdp = f"{fsdp[:-1]}, axes={(*rows, axis)})"
        ways = {"fsdp + context": fsdp, "data + context": data}
    elif "model" in mesh:
        ways = {"tensor + fsdp": both(tensor, fsdp), "tensor": tensor}
        ways = {"tensor + fsdp": both(tensor, fsdp)} if "fsdp" in mesh else ways
    elif "fsdp" in mesh:
        ways = {"hybrid fsdp": fsdp}
    dims = str((*batch, ...)).replace("Ellipsis", "...")
    text = f"ml.LayoutMap(mesh, {{{carry!r}: {dims}}}, unused='ignore')"
    every = [(name, code, text) for name, code in ways.items()]
    if "model" in mesh and "residual" in traits.names:
        text = f"{tensor[:-1]}, sequence=True) | {{'carry': ({rows}, 'model', ...)}}"
        names = (name.replace("tensor", "tensor, sequence") for name in ways)
        every += [(*pair, text) for pair in zip(names, ways.values(), strict=True)]
    return batch, every


def given(candidates: Candidates, target: Slice) -> Iterator[Row]:
    """Yields a user's candidates: maps, and functions of every mesh that they take."""
    context: Any = {"where": "plan", "error": MeshLayoutError}
    context["hint"] = "Give layout maps by name, or functions of a mesh that make them."
    for name, value in candidates.items():
        title, maps = f"candidates[{name!r}]", [value]
        code = [f"layouts = {title}", "mesh = layouts.mesh"]
        if not isinstance(value, LayoutMap):
            make = _checks.function(title, value, "mesh", **context)
            code, maps, every = [f"layouts = {title}(mesh)"], [], [*meshes(target)]
            for mesh in every:  # some may lack the axes that it is for
                with contextlib.suppress(MeshLayoutError):
                    maps.append(make(mesh))
            with _checks.noted(f"while plan calls the candidate {name!r}"):
                maps = maps or [make(every[-1])]
        for layouts in maps:
            if not isinstance(layouts, LayoutMap):
                fact = f"plan: {title}(mesh) is {_checks.shown(layouts)}"
                raise MeshLayoutError(f"{fact}, and not a LayoutMap.")
            mesh, rows = layouts.mesh, batch_axes(layouts.mesh)
            text = f"ml.LayoutMap(mesh, {{'carry': ({rows}, ...)}}, unused='ignore')"
            known = LayoutMap(mesh, {"carry": (rows, ...)}, unused="ignore")
            made, text = (layouts, known, (rows,)), f"activations = {text}"
            if {*mesh.devices.flat} <= {*target.devices}:
                yield Row(name, target.name, mesh, *made, (*code, text))


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
