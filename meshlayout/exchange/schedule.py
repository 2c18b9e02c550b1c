"""`pipeline`: layers in stages over a mesh axis, and microbatches that pass through them.

Nothing here is written per device. As in GSPMD (Xu et al., 2021, arXiv:2105.04663,
section 3.3), the state of all stages is one array with a dim of stages, laid over the
mesh axis; the stages' function is mapped over that dim, and a roll by one hands each
microbatch to the next stage, for which the compiler sends a collective-permute. Being
plain operations on global arrays, it is differentiated, and composes with layouts over
the other axes, as any other part of a model.

Microbatches wait in a queue that lies over the stages, too: each stage stores its share
and hands one on for each that the first stage takes, which leaves its finished one in
exchange. So no device stores or gathers the rows of all.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout._batches import batch_axes
from meshlayout.errors import LayoutError
from meshlayout.exchange.axes import find_axis
from meshlayout.layout_map import LayoutMap
from meshlayout.mesh import Mesh, as_mesh


X = TypeVar("X")
Schedule: TypeAlias = Literal["gpipe", "circular"]

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
    """Returns the map that gives each device the layers of its pipeline stage.

    Arrays whose path matches are stacks of layers, sharded over the axis by their
    leading dim. Use this with `pipeline`, and compose it with rules for the other dims:
    `compose(stages(mesh), tensor_parallel(...), fsdp(mesh))`.

    Args:
        mesh: The mesh.
        axis: The mesh axis of the stages.
        pattern: A regular expression that is found in the paths of the stacks.
        schedule: That of `pipeline`. With `rounds` there, `"circular"`: the stacks'
            dims are (rounds, layers of a round, ...), and the second one is sharded.

    Raises:
        MeshError: If the mesh has no such axis.
        LayoutMapError: If the pattern is not a regular expression; on `resolve`, if the
            stages do not divide the layers.

    Example:
        >>> import meshlayout as ml
        >>> layouts = stages(ml.create_mesh({"batch": 2, "stage": 4}))
        >>> blocks = {
        ...     "blocks": {"kernel": jax.ShapeDtypeStruct((8, 16, 16), "float32")}
        ... }
        >>> layouts.resolve(blocks)["blocks/kernel"].layout
        Layout([stage, unsharded, unsharded], Mesh(batch=2, stage=4))
    """
    mesh = as_mesh(mesh)
    mesh.axis_size((axis,))
    schedule = _checks.choice("schedule", schedule, _SCHEDULES, where="stages")
    return LayoutMap(mesh, {pattern: (*[None] * (schedule != "gpipe"), axis, ...)})


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
    """Returns `x` after all layers, which are divided into stages over a mesh axis.

    Equal to a scan over the layers, in value and gradient. While a stage works on one
    microbatch, the next one has that before it: of the time, each device waits
    (s - 1) / (m + s - 1) with s stages and m microbatches (Huang et al., "GPipe",
    2019). With `"circular"`, each device has r stages that are not next to each other,
    and passes its microbatches round r times, a stage being 1 / r as long: it waits
    (s - 1) / (m r + s - 1) (Narayanan et al., "Efficient Large-Scale Language Model
    Training", 2021), if m is a multiple of s.

    Use this for a model of many equal layers on devices between which the network is
    too slow for `fsdp` or `tensor_parallel`, with `stages` for its parameters. Inside
    `jit`, the mesh is that of the step or of `jax.set_mesh`; without one, or where it
    has no such axis, this is the scan over the layers.

    Args:
        block: One layer: takes its parameters and `x` of some rows, and returns what
            has the structure, shapes and dtypes of that `x`. Rows must not depend on
            each other. What all rows share may come from around it.
        stacked_params: Arrays whose leading dim is the layers, in their order.
        x: Arrays, or a pytree of them, whose first dim is the rows of the batch; those
            that layers only read, as masks, are returned by the block as they are.
        axis: The mesh axis of the stages.
        microbatches: Into how many the rows are divided.
        schedule: `"gpipe"`, or `"circular"` for less waiting and more messages.
        rounds: How often `"circular"` passes round; `stacked_params` then have two
            leading dims, (rounds, layers of a round), of which the second lies over the
            axis. By default there is one round for each layer of a device: but layers
            in one dim lie on the devices in their order, and are exchanged every call.
        remat: Whether to store nothing but the inputs of stages for the backward pass,
            which computes each stage again.
        mesh: Another mesh.

    Raises:
        LayoutError: If stages do not divide the layers or microbatches the rows, the
            leading dims differ, or the block returns something else than its `x`.
        MeshLayoutError: If another argument cannot be.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "stage": 4})
        >>> def block(params, x):
        ...     return jnp.tanh(x @ params)
        >>> @jax.jit
        ... def model(params, x):
        ...     return ml.parallel.pipeline(
        ...         block, params, x, axis="stage", microbatches=2
        ...     )
        >>> with jax.set_mesh(mesh.jax_mesh):
        ...     model(jnp.ones((8, 16, 16)), jnp.ones((4, 16))).shape
        (4, 16)
    """
    where = _checks.Context(where="pipeline", error=LayoutError)
    count = _checks.count("microbatches", microbatches, **where)
    is_circular = (
        _checks.choice("schedule", schedule, _SCHEDULES, **where) == "circular"
    )
    if rounds is not None:
        rounds = _checks.count("rounds", rounds, **where)
        if not is_circular:
            fact = f"rounds={rounds} are of schedule='circular', and this one has one."
            raise LayoutError(f"pipeline: {fact} Leave rounds out.")
    lead = _leading("stacked_params", stacked_params, 1 if rounds is None else 2)
    (rows,) = _leading("x", x, 1)
    if rounds not in (None, lead[0]):
        fact = f"rounds={rounds}, and the leading dims of stacked_params are {lead}"
        raise LayoutError(
            f"pipeline: {fact}: they must be (rounds, layers of a round)."
        )

    def scan_layers(params: PyTree, x: X) -> X:
        return jax.lax.scan(lambda x, p: (_apply(block, p, x), None), x, params)[0]

    found = find_axis(axis, mesh, "pipeline")
    if found is None:
        merged = _reshape(stacked_params, len(lead), (math.prod(lead),))
        return scan_layers(merged, x)
    size = found.size
    if lead[-1] % size:
        what = "layers" if rounds is None else "layers of a round"
        fact = f"{lead[-1]} {what} do not divide into {size} stages over mesh axis"
        near = _nearest(
            [n for n in range(size, lead[-1] + size + 1) if n % size == 0], lead[-1]
        )
        raise LayoutError(f"pipeline: {fact} {axis!r}; nearest that do: {near}.")
    if rows % count:
        fact = f"{rows} rows do not divide into microbatches={count}; nearest that do:"
        near = _nearest([n for n in range(1, rows + 1) if rows % n == 0], count)
        raise LayoutError(f"pipeline: {fact} {near}.")
    if rounds is None:
        rounds = lead[0] // size if is_circular else 1
    per_stage = math.prod(lead) // (rounds * size)
    plan = _Plan(axis, size, rounds, count, rows, found.mesh)
    dims = (rounds, size, per_stage)
    params = plan.lay(_reshape(stacked_params, len(lead), dims), 1)
    return _run(plan, scan_layers, params, x, remat=remat)


@dataclass(frozen=True)
class _Plan:
    """How many stages, rounds and microbatches there are, and where they lie."""

    axis: str
    num_stages: int
    rounds: int
    count: int  # of microbatches
    rows: int
    mesh: jax.sharding.Mesh | AbstractMesh

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The axes that shard the rows of a microbatch, as far as they divide them."""
        names = tuple(x for x in batch_axes(self.mesh) if x != self.axis)
        shards = math.prod(self.mesh.shape[name] for name in names)
        return () if self.rows // self.count % shards else names

    @property
    def per_stage(self) -> int:
        """The number of microbatches that each stage stores, the last ones repeated."""
        return -(-self.count // self.num_stages)

    @property
    def rest(self) -> int:
        """The number of microbatches in the last group of one for each stage."""
        return self.count - (self.per_stage - 1) * self.num_stages

    @property
    def num_ticks(self) -> int:
        """How often each device computes a stage."""
        before = (self.per_stage - 1) * self.rounds + self.rounds - 1
        return before * self.num_stages + self.rest + self.num_stages - 1

    def lay(self, tree: X, stage_dim: int, row_dim: int | None = None) -> X:
        """Returns arrays with a dim over the stages; nothing is said of the others."""

        def constrain(x: jax.Array) -> jax.Array:
            entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
            entries[stage_dim] = self.axis
            if row_dim is not None and self.row_axes:
                entries[row_dim] = self.row_axes
            sharding = NamedSharding(self.mesh, PartitionSpec(*entries))
            return jax.lax.with_sharding_constraint(x, sharding)

        return jax.tree.map(constrain, tree)

    def turn(self, x: jax.Array, steps: int) -> jax.Array:
        """Returns what each stage gets from the one so many places before it.

        Laid before and after: merged with other operations, a roll is two permutes.
        """
        return self.lay(jnp.roll(self.lay(x, 0, 1), steps, axis=0), 0, 1)

    def to_queue(self, x: jax.Array) -> jax.Array:
        """Returns rows as (stages, microbatches of each, rows of one, ...).

        A microbatch takes rows of every shard, so that none of them moves.
        """
        shards = math.prod(self.mesh.shape[name] for name in self.row_axes)
        split = x.reshape(shards, self.count, -1, *x.shape[1:]).swapaxes(0, 1)
        if self.rest < self.num_stages:
            slots = np.arange(self.num_stages * self.per_stage)
            split = split[slots % self.count]
        return split.reshape(self.num_stages, self.per_stage, -1, *x.shape[1:])

    def from_queue(self, x: jax.Array) -> jax.Array:
        """Returns the rows of a queue in their order."""
        shards = math.prod(self.mesh.shape[name] for name in self.row_axes)
        rest = x.shape[3:]
        split = x.reshape(self.num_stages * self.per_stage, shards, -1, *rest)
        return split[: self.count].swapaxes(0, 1).reshape(self.rows, *rest)


def _run(
    plan: _Plan,
    scan_layers: Callable[[PyTree, X], X],
    params: PyTree,
    x: X,
    *,
    remat: bool,
) -> X:
    """Runs the schedule, for parameters of shape (rounds, stages, layers, ...)."""
    size, rounds, period = plan.num_stages, plan.rounds, plan.num_stages * plan.rounds
    stage_of = jnp.arange(size, dtype="int32")

    def stage(params: PyTree, number: jax.Array, x: X) -> X:
        def pick(p: jax.Array) -> jax.Array:
            mine = (
                p[0]
                if rounds == 1
                else jax.lax.dynamic_index_in_dim(p, number, 0, False)
            )
            return checkpoint_name(mine, _PARAMS)

        for layer in params:
            x = scan_layers(jax.tree.map(lambda p: pick(p)[None], layer), x)
        return x

    params = [jax.tree.map(lambda p: p[:, :, l], params) for l in range(jax.tree.leaves(params)[0].shape[2])]
    # The copy of a round's parameters is made again in any case.
    keep = jax.checkpoint_policies.save_anything_except_these_names(_PARAMS)
    compute = jax.checkpoint(
        jax.vmap(stage, in_axes=(1, 0, 0)),
        prevent_cse=False,
        policy=None if remat else keep,
    )

    def exchange(state: X, queue: X, tick: jax.Array) -> tuple[X, X]:
        """Gives the first stage the next microbatch, in exchange for a finished one."""
        group, phase = tick // period, tick % period
        is_due = phase < size
        slot = (group * size + phase) % plan.per_stage

        def leaf(state: jax.Array, queue: jax.Array) -> tuple[jax.Array, jax.Array]:
            is_first = (stage_of == 0).reshape(-1, *[1] * (state.ndim - 1))
            next_ones = jax.lax.dynamic_index_in_dim(queue, slot, 1, keepdims=False)
            handed_on = plan.turn(jnp.where(is_first, state, next_ones), -1)
            state = jnp.where(is_first & is_due, next_ones, state)
            stored = jnp.where(is_due, handed_on, next_ones)
            queue = jax.lax.dynamic_update_index_in_dim(queue, stored, slot, 1)
            return state, queue

        leaves, treedef = jax.tree.flatten(state)
        pairs = map(leaf, leaves, jax.tree.leaves(queue))
        state, queue = map(treedef.unflatten, zip(*pairs, strict=True))
        return plan.lay(state, 0, 1), plan.lay(queue, 0, 2)

    # Not to store masks of the size of the state for the backward pass.
    exchange = jax.checkpoint(exchange, prevent_cse=False)

    def step(carry: tuple[X, X], tick: jax.Array) -> tuple[tuple[X, X], None]:
        state, queue = exchange(*carry, tick)
        state = compute(params, (tick - stage_of) % period // size, state)
        return (jax.tree.map(lambda x: plan.turn(x, 1), state), queue), None

    queue = plan.lay(jax.tree.map(plan.to_queue, x), 0, 2)
    # A stage that waits computes on true rows: gradients of zeros may be NaN.
    state = jax.tree.map(lambda x: x[:, 0], queue)
    ticks = jnp.arange(plan.num_ticks, dtype="int32")
    (state, queue), _ = jax.lax.scan(step, (state, queue), ticks)
    for late in range(size - plan.rest + 1):
        state, queue = exchange(state, queue, jnp.int32(plan.num_ticks + late))
    queue = jax.tree.map(lambda x: jnp.roll(x, -size, axis=1), queue)
    return jax.tree.map(plan.from_queue, queue)


def _apply(block: Callable[[Any, X], X], params: PyTree, x: X) -> X:
    """Returns the block's result, which must have the form of what it got."""
    y = block(params, x)
    expected, got = (
        jax.tree.map(lambda a: (jnp.shape(a), jnp.result_type(a)), t) for t in (x, y)
    )
    if expected != got:
        fact = f"the block got {_text(x)} and returned {_text(y)}"
        raise LayoutError(
            f"pipeline: {fact}: layers follow each other, so both must be equal."
        )
    return y


def _text(tree: PyTree) -> str:
    return ", ".join(str(jax.typeof(x)) for x in jax.tree.leaves(tree))


def _leading(name: str, tree: PyTree, count: int) -> tuple[int, ...]:
    """Returns the leading dims that all arrays of a tree have."""
    shapes = [np.shape(leaf)[:count] for leaf in jax.tree.leaves(tree)]
    dims = sorted({*shapes})
    if len(dims) != 1 or len(dims[0]) < count or 0 in dims[0]:
        what = f"the same {count} leading dims" if count > 1 else "the same leading dim"
        fact = (
            f"arrays with {what}, at least 1, got {', '.join(map(str, dims)) or 'none'}"
        )
        raise LayoutError(f"pipeline: {name} must hold {fact}.")
    return dims[0]


def _reshape(tree: X, count: int, dims: tuple[int, ...]) -> X:
    """Returns arrays with other leading dims in place of so many."""
    return jax.tree.map(lambda x: jnp.reshape(x, (*dims, *x.shape[count:])), tree)


def _nearest(numbers: list[int], value: int) -> str:
    """Returns the numbers next to a value, as text."""
    below = [n for n in numbers if n < value][-1:]
    above = [n for n in numbers if n > value][:1]
    return " and ".join(map(str, (*below, *above)))
