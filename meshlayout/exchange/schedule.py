"""`pipeline`: layers in stages over a mesh axis that microbatches pass through.

As in GSPMD (Xu et al., 2021, arXiv:2105.04663, section 3.3), the state of all stages is
one array with a dim of stages, laid over the mesh axis; the stages' function is mapped
over that dim, and a roll by one, a collective-permute, hands each microbatch on. These
are plain operations on global arrays, with gradients; the other mesh axes stay free.

Microbatches wait in a queue that lies over the stages, too: each stage stores its share
and hands one on for each that the first stage takes, which leaves a finished one in
exchange. So no device gathers the rows of all.

The layers of one stage are written out: in nested loops, the TPU compiler would add up
data-parallel gradients for every microbatch (tests/test_pipeline.py notices).
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from meshlayout import _checks, _jax
from meshlayout._annotations import PyTree
from meshlayout._batches import batch_axes
from meshlayout.errors import LayoutError, LayoutMapError
from meshlayout.exchange.axes import MeshAxis, find_axis, nearest, on_auto_axes, require
from meshlayout.layout_map import LayoutMap
from meshlayout.mesh import Mesh, as_mesh


X = TypeVar("X")
Schedule: TypeAlias = Literal["gpipe", "circular"]
"""The order in which stages compute microbatches; `pipeline` describes both."""

_SCHEDULES: tuple[Schedule, ...] = ("gpipe", "circular")
_PARAMS = "pipeline_params"  # the name of a round's parameters, which are never stored


@_checks.user_call
def stages(
    mesh: Mesh | jax.sharding.Mesh,
    axis: str = "stage",
    *,
    pattern: str = "blocks/",
    schedule: Schedule = "gpipe",
) -> LayoutMap:
    """Returns a map that gives each device the layers of its pipeline stage.

    The leading dim of stacked layers is sharded. Use this with `pipeline`, composed
    with rules for the other dims: `compose(stages(mesh), fsdp(mesh))`.

    Args:
        mesh: The mesh.
        axis: The mesh axis of the stages.
        pattern: A regular expression to find in the stacks' paths. If a number follows,
            as in `blocks/0/kernel`, the array is one layer's and stays whole.
        schedule: With `"circular"`, the second dim is sharded: the layers of a round,
            if `pipeline` has `rounds`.

    Raises:
        MeshError: If the mesh has no such axis.
        LayoutMapError: If the pattern is bad; on `resolve`, if layers do not divide.

    Examples:
        >>> import meshlayout as ml
        >>> layouts = stages(ml.create_mesh({"batch": 2, "stage": 4}))
        >>> kernels = jax.ShapeDtypeStruct((8, 16, 16), "float32")
        >>> layouts.resolve({"blocks": {"kernel": kernels}})["blocks/kernel"].layout
        Layout([stage, unsharded, unsharded], Mesh(batch=2, stage=4))
    """
    mesh = as_mesh(mesh)
    mesh.axis_size((axis,))
    schedule = _checks.choice("schedule", schedule, _SCHEDULES, where="stages")
    _checks.pattern("pattern", pattern, where="stages", error=LayoutMapError)
    stacks = f"(?:{pattern})" if "|" in pattern else pattern
    layout = (*[None] * (schedule != "gpipe"), axis, ...)
    return LayoutMap(mesh, {rf"{stacks}(?![/_]?\d+/)": layout})


@_checks.user_call
def pipeline(
    block: Callable[[Any, X], X],
    stacked_params: PyTree,
    x: X,
    *,
    axis: str,
    microbatches: int,
    schedule: Schedule = "gpipe",
    rounds: int | None = None,
    remat: bool = True,
    mesh: Mesh | jax.sharding.Mesh | None = None,
) -> X:
    """Applies all layers to `x`, divided into stages over a mesh axis.

    It equals a scan over the layers, and is one if the mesh has no such axis. Use this,
    with `stages`, if the network is too slow for `fsdp` or `tensor_parallel`.

    With s stages and m microbatches, each device waits (s - 1) / (m + s - 1) of the
    time (Huang et al., "GPipe", 2019). With `"circular"`, it has r shorter stages that
    are not next to each other, and passes each microbatch round r times: it waits
    (s - 1) / (m r + s - 1) if m is a multiple of s (Narayanan et al., "Efficient
    Large-Scale Language Model Training", 2021).

    Args:
        block: One layer, as block(params, x), where `x` holds a microbatch's rows; it
            returns the same structure, shapes and dtypes.
        stacked_params: Arrays whose leading dim is the layers, in order.
        x: An array or a pytree of arrays, whose first dim is the rows. Arrays that
            layers only read, such as segment ids, are returned unchanged by the block.
        axis: The mesh axis of the stages.
        microbatches: The number of microbatches; ideally several per stage.
        schedule: `"gpipe"`, or `"circular"` for less waiting and more messages.
        rounds: If given, the leading dims of `stacked_params` are (rounds, layers of a
            round), with the second sharded over the axis. By default, `"circular"` has
            a round per layer of a device, and exchanges layers stored in order.
        remat: Whether to store only the inputs of stages, and recompute each stage in
            the backward pass.
        mesh: A mesh with the axis; by default that of the step or of `jax.set_mesh`.

    Raises:
        LayoutError: If stages do not divide the layers, microbatches do not divide the
            rows, leading dims differ, or the block returns another form than its `x`.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "stage": 4})
        >>> layers, x = jnp.ones((8, 16, 16)), jnp.ones((4, 16))
        >>> def block(params, x):
        ...     return jnp.tanh(x @ params)
        >>> with jax.set_mesh(mesh.jax_mesh):
        ...     pipeline(block, layers, x, axis="stage", microbatches=2).shape
        (4, 16)
    """
    where = _checks.Context(where="pipeline", error=LayoutError)
    check = functools.partial(require, "pipeline")
    _checks.function("block", block, "params", "x", **where)
    count = _checks.count("microbatches", microbatches, **where)
    is_circular = _checks.choice("schedule", schedule, _SCHEDULES, **where) != "gpipe"
    lead = _leading("stacked_params", stacked_params, 1 if rounds is None else 2)
    (rows,) = _leading("x", x, 1)
    found = find_axis(axis, mesh, "pipeline", count)
    size, what = found.size, "layers"
    if rounds is not None:
        what, rounds = "layers of a round", _checks.count("rounds", rounds, **where)
        check(is_circular, f"{rounds=} is for schedule='circular': leave it out")
        fact = f"{rounds=}, but the leading dims of stacked_params are {lead}"
        check(rounds == lead[0], f"{fact}, not (rounds, layers of a round)")
    fact = f"{lead[-1]} {what} do not divide into {size} stages over {axis!r}"
    check(lead[-1] % size == 0, fact, nearest(lead[-1], size))

    def layer(params: PyTree, x: X) -> X:
        y = block(params, x)
        fact = f"the block got {_form(x)} and returned {_form(y)}"
        fix = "A layer returns what the next one takes: cast or reshape it."
        check(_form(y) == _form(x), fact, fix)
        return y

    if size == 1:
        layers = _reshape(stacked_params, len(lead), (-1,))
        return jax.lax.scan(lambda x, params: (layer(params, x), None), x, layers)[0]
    elsewhere = {axis, *_jax.manual_axis_sizes()}
    row_axes = tuple(name for name in batch_axes(found.mesh) if name not in elsewhere)
    shards = math.prod(found.mesh.shape[name] for name in row_axes)
    shards, row_axes = (shards, row_axes) if rows % shards == 0 else (1, ())
    fact = f"{rows} rows do not divide into microbatches={count}"
    fact += f" of rows for {shards} shards over {row_axes}" * (shards > 1)
    counts = [n for n in range(1, rows + 1) if rows % (n * shards) == 0]
    check(rows % (count * shards) == 0, fact, nearest(count, counts))
    rounds = rounds or (lead[0] // size if is_circular else 1)

    def run(mesh_axis: MeshAxis, params: PyTree, x: X) -> X:
        grid = _Grid(mesh_axis, row_axes, (shards, count, rows // count // shards))
        params = grid.lay(_reshape(params, len(lead), (rounds, size, -1)), 1)
        return _run(grid, layer, params, x, remat=remat)

    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, x)
    return on_auto_axes(run, found, specs, stacked_params, x)


@dataclass(frozen=True)
class _Grid:
    """Where stages lie, and the rows of their microbatches."""

    axis: MeshAxis
    row_axes: tuple[str, ...]  # that shard the rows of each microbatch
    split: tuple[int, int, int]  # of all rows: shards, microbatches, rows of one in one

    def lay(self, tree: X, stage_dim: int, row_dim: int | None = None) -> X:
        """Returns arrays with a dim over the stages; nothing is said of the others."""
        entries: dict[int, Any] = {stage_dim: self.axis.name}
        if row_dim is not None and self.row_axes:
            entries[row_dim] = self.row_axes
        return jax.tree.map(lambda x: self.axis.lay(x, entries), tree)

    def turn(self, x: jax.Array, steps: int) -> jax.Array:
        """Returns what each stage gets from the one so many places before it."""
        # Laid before and after: merged with other operations, a roll is two permutes.
        return self.lay(jnp.roll(self.lay(x, 0, 1), steps, axis=0), 0, 1)

    def to_queue(self, x: jax.Array) -> jax.Array:
        """Returns rows as (stages, microbatches of each, rows of one, ...)."""
        # A microbatch takes rows of every shard, so that none of them moves.
        split = x.reshape(*self.split, *x.shape[1:]).swapaxes(0, 1)
        size, count = self.axis.size, self.split[1]
        if count % size:  # the first ones again
            split = split[np.arange(-(-count // size) * size) % count]
        return split.reshape(size, -1, self.split[0] * self.split[2], *x.shape[1:])

    def to_rows(self, queue: jax.Array) -> jax.Array:
        """Returns the rows of a queue in their order."""
        shards, count, rows = self.split
        split = queue.reshape(-1, shards, rows, *queue.shape[3:])[:count]
        return split.swapaxes(0, 1).reshape(-1, *queue.shape[3:])


def _run(
    grid: _Grid, layer: Callable[[PyTree, X], X], params: PyTree, x: X, *, remat: bool
) -> X:
    """Runs the schedule, for parameters of shape (rounds, stages, layers, ...)."""
    rounds, size, depth = jax.tree.leaves(params)[0].shape[:3]
    count, period = grid.split[1], size * rounds
    per_stage = -(-count // size)  # microbatches that each stores
    stage_of = jnp.arange(size, dtype="int32")

    layers = [jax.tree.map(lambda p, i=i: p[:, :, i], params) for i in range(depth)]

    def stage(layers: Sequence[PyTree], number: jax.Array, x: X) -> X:
        index = 0 if rounds == 1 else number
        for stack in layers:
            params = jax.tree.map(lambda p: checkpoint_name(p[index], _PARAMS), stack)
            x = layer(params, x)
        return x

    # The copy of a round's parameters is made again in any case.
    most = jax.checkpoint_policies.save_anything_except_these_names(_PARAMS)
    compute = jax.checkpoint(
        jax.vmap(stage, in_axes=(1, 0, 0)),
        prevent_cse=False,
        policy=None if remat else most,
    )

    # Not to store masks of the size of the state for the backward pass.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def exchange(state: X, queue: X, tick: jax.Array) -> tuple[X, X]:
        """Gives the first stage the next microbatch, in exchange for a finished one."""
        group, phase = tick // period, tick % period
        is_due = phase < size
        slot = (group * size + phase) % per_stage

        def leaf(state: jax.Array, queue: jax.Array) -> tuple[jax.Array, jax.Array]:
            is_first = (stage_of == 0).reshape(-1, *[1] * (state.ndim - 1))
            waiting = jax.lax.dynamic_index_in_dim(queue, slot, 1, keepdims=False)
            handed_on = grid.turn(jnp.where(is_first, state, waiting), -1)
            state = jnp.where(is_first & is_due, waiting, state)
            waiting = jnp.where(is_due, handed_on, waiting)
            queue = jax.lax.dynamic_update_index_in_dim(queue, waiting, slot, 1)
            return grid.lay(state, 0, 1), grid.lay(queue, 0, 2)

        pairs = jax.tree.map(leaf, state, queue)
        return jax.tree.transpose(jax.tree.structure(state), None, pairs)

    def step(carry: tuple[X, X], tick: jax.Array) -> tuple[tuple[X, X], None]:
        state, queue = exchange(*carry, tick)
        state = compute(layers, (tick - stage_of) % period // size, state)
        return (jax.tree.map(lambda x: grid.turn(x, 1), state), queue), None

    queue = grid.lay(jax.tree.map(grid.to_queue, x), 0, 2)
    # A stage that waits computes on true rows: gradients of zeros may be NaN.
    state = jax.tree.map(lambda x: x[:, 0], queue)
    end = per_stage * period
    num_ticks = end + count - (per_stage - 1) * size - 1
    ticks = jnp.arange(num_ticks, dtype="int32")
    (state, queue), _ = jax.lax.scan(step, (state, queue), ticks)
    for tick in range(num_ticks, end + size):
        state, queue = exchange(state, queue, jnp.int32(tick))
    queue = jax.tree.map(lambda x: jnp.roll(x, -size, axis=1), queue)
    return jax.tree.map(grid.to_rows, queue)


def _form(tree: PyTree) -> str:
    """Returns the structure, shapes and dtypes of a tree, as `float32[8,16]`."""
    return str(jax.tree.map(lambda x: str(jax.typeof(x)), tree)).replace("'", "")


def _leading(name: str, tree: PyTree, count: int) -> tuple[int, ...]:
    """Returns the leading dims that all arrays of a tree have."""
    shapes = sorted({np.shape(leaf)[:count] for leaf in jax.tree.leaves(tree)})
    passes = len(shapes) == 1 and len(shapes[0]) == count and 0 not in shapes[0]
    fact = f"arrays that all have the same leading dims, {count} at least"
    found = ", ".join(map(str, shapes)) or "none"
    require("pipeline", passes, f"{name} must hold {fact}; they are {found}")
    return shapes[0]


def _reshape(tree: X, count: int, dims: tuple[int, ...]) -> X:
    """Returns arrays with other leading dims in place of so many."""
    return jax.tree.map(lambda x: jnp.reshape(x, (*dims, *x.shape[count:])), tree)
