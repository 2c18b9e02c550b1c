"""`dispatch`: sends tokens to the devices of their experts, and results back.

To sort tokens by expert, the compiler gathers all of them, or all experts, on every
device. Here each device sorts its own and exchanges them in buckets of static size.
Overflow goes in later rounds, which are skipped if no device needs them: nothing is
dropped, however uneven the load, and memory and bytes are those of an even one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshlayout import _checks, _jax
from meshlayout._annotations import PyTree
from meshlayout._batches import batch_axes
from meshlayout.arrays.placement import array_text
from meshlayout.exchange.axes import MeshAxis, find_axis, nearest, on_auto_axes, require
from meshlayout.mesh import Mesh


# Buckets are so much larger than an even load fills: it never is quite even.
_SLACK = 1.25


@_checks.user_call
def dispatch(
    x: jax.Array,
    expert_index: jax.Array,
    weights: jax.Array,
    expert_fn: Callable[[Any, jax.Array, jax.Array], jax.Array],
    params: PyTree,
    *,
    axis: str,
    capacity: int | None = None,
    mesh: Mesh | jax.sharding.Mesh | None = None,
) -> jax.Array:
    """Returns the weighted sum of the outputs of each token's experts.

    It equals that of one device, in value and gradient. Experts are sharded over a mesh
    axis, rows of the batch over it and the batch's axes; one all-to-all sends tokens to
    their experts, and one returns the results. Use this after a model's router. Rows
    that do not divide are padded.

    Args:
        x: Tokens: (batch, length, features), or (tokens, features) without capacity.
        expert_index: Each token's experts, int: (batch, length, choices). A number that
            is not an expert, such as -1 for padding, adds nothing.
        weights: The factors of the results, shaped like `expert_index`.
        expert_fn: Takes the parameters of some experts, rows (n, features) sorted by
            expert, and the count of each, int32 (experts,); returns (n, features), as
            `jax.lax.ragged_dot` does. Rows after the last expert's are not used.
        params: A tree of arrays, stacked over all experts along their first dim.
        axis: The mesh axis that this dim is sharded over.
        capacity: The number of tokens that an expert takes per row of the batch; by
            default all. Others add nothing: first choices come before second ones, each
            in the order of the row (GShard, Lepikhin et al. 2020).
        mesh: The mesh; by default that of the step, or of `jax.set_mesh`. Without one,
            or if it lacks the axis, nothing is sent.

    Returns:
        An array of the tokens' shape, with the features and dtype of the results.

    Raises:
        LayoutError: If shapes or dtypes do not fit each other, or the number of experts
            does not divide among the devices.
        MeshError: If `mesh` lacks the axis, or this is inside `shard_map` over it.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "expert": 4})
        >>> x, kernels = jnp.ones((8, 3, 5)), jnp.ones((8, 5, 2))
        >>> index = jnp.arange(8 * 3 * 2).reshape(8, 3, 2) % 8
        >>> def layer(kernels, rows, group_sizes):
        ...     return jax.lax.ragged_dot(rows, kernels, group_sizes)
        >>> y = dispatch(x, index, index / 2, layer, kernels, axis="expert", mesh=mesh)
        >>> y.shape, y[0, :2].tolist()
        ((8, 3, 2), [[2.5, 2.5], [12.5, 12.5]])
    """
    mesh_axis, check = find_axis(axis, mesh, "dispatch"), partial(require, "dispatch")
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
    leads, got = {shape[:1] for shape in shapes}, ", ".join(map(str, shapes)) or "none"
    fact = "all params must be stacked over the experts in their first dim"
    check(len(leads) == 1 and all(leads), f"{fact}, got {got}")
    [[num_experts]], size = leads, mesh_axis.size
    fact = f"{num_experts} experts do not divide among the {size} devices of mesh axis"
    check(num_experts % size == 0, f"{fact} {axis!r}", nearest(num_experts, size))
    _checks.function("expert_fn", expert_fn, "params", "rows", "group_sizes")
    if capacity is not None:
        capacity = _checks.count("capacity", capacity, where="dispatch")
    x, index, weights = map(jnp.asarray, (x, expert_index, weights))
    is_flat, fact = x.ndim == index.ndim == 2, ""
    if x.ndim != 3 and not is_flat:
        fact = "tokens must have the shape (batch, length, features)"
    elif index.shape != weights.shape or index.shape[:-1] != x.shape[:-1]:
        fact = "expert_index and weights must have the shape (batch, length, choices)"
    elif not index.size:
        fact = "there must be tokens and choices"
    elif not jnp.issubdtype(index.dtype, jnp.integer):
        fact = "expert_index must hold integers; lax.top_k returns them after weights"
    elif capacity is not None and is_flat:
        fact = "capacity is for each row of a batch: give (batch, length, features)"
    got = map(array_text, ("x", "expert_index", "weights"), (x, index, weights))
    check(not fact, f"{fact}, got {', '.join(got)}")
    index = jnp.where((index < 0) | (index >= num_experts), num_experts, index)
    tokens = [a[:, None] if is_flat else a for a in (x, index, weights)]
    exchange = _Exchange(num_experts, capacity, expert_fn, mesh_axis)
    spec = PartitionSpec(*jax.typeof(tokens[0]).sharding.spec[:2])
    y = on_auto_axes(exchange.run, mesh_axis, spec, tokens, params)
    return y.reshape(*x.shape[:-1], y.shape[-1])


@dataclass(frozen=True)
class _Exchange:
    """How tokens meet their experts along an axis; with size 1, all are here."""

    num_experts: int
    capacity: int | None
    expert_fn: Callable[[Any, jax.Array, jax.Array], jax.Array]
    axis: MeshAxis

    def run(self, axis: MeshAxis, tokens: list[Any], params: PyTree) -> jax.Array:
        """Returns the weighted sums, with rows sharded over this axis and batches'."""
        if axis.size == 1:
            return self._on_device(*tokens, params=params)
        manual, num_rows = _jax.manual_axis_sizes(), len(tokens[0])
        axes = tuple(name for name in batch_axes(axis.mesh) if name not in manual)
        axes = axes if axis.name in axes else (*axes, axis.name)
        padding = -num_rows % math.prod(axis.mesh.shape[name] for name in axes)
        pads = [(0, padding), (0, 0), (0, 0)]
        # Tokens of ones: gradients of rows of zeros may be NaN.
        values = zip(tokens, (1, self.num_experts, 0), strict=True)
        tokens = [jnp.pad(x, pads, constant_values=value) for x, value in values]
        rows = PartitionSpec(axes)
        specs = (rows, rows, rows, PartitionSpec(axis.name))
        run = axis.shard_map(self._on_device, specs, rows, *axes)
        return run(*tokens, params)[:num_rows]

    def _on_device(self, x: Any, index: Any, weights: Any, params: Any) -> jax.Array:
        """Returns the weighted sums for the rows of one device, (rows, length, ...)."""
        num_rows, length, choices = index.shape
        size, bucket = self.axis.size, index.size
        if self.capacity is not None:
            index = jax.vmap(self._within, (0, None))(index, self.capacity)
            bucket = min(bucket, num_rows * self.capacity * self.num_experts // size)
        elif size > 1:
            bucket = min(bucket, math.ceil(_SLACK * bucket / size))
        x, weights = (a.reshape(-1, a.shape[-1]) for a in (x, weights))
        ids = index.ravel()
        order = jnp.argsort(ids, stable=True)
        counts = jnp.bincount(ids, length=self.num_experts).reshape(size, -1)
        received = self._exchanged(counts)  # from each device, for each expert here
        sent = counts.sum(1)
        start = jnp.cumsum(sent) - sent  # of those for each device, in this order
        device = jnp.minimum(ids * size // self.num_experts, size - 1)
        place = jnp.argsort(order) - start[device]

        def visit(number: Any) -> jax.Array:
            slots = number * bucket + jnp.arange(bucket)[None]
            # Buckets are filled up with true rows, for the same reason.
            places = start[:, None] + jnp.minimum(slots, sent[:, None] - 1)
            rows = x[order[jnp.maximum(places, 0)] // choices]
            results = self._computed(params, rows, slots, received)
            is_here = (place // bucket == number) & (ids < self.num_experts)
            slot = jnp.where(is_here, device * bucket + place % bucket, 0)
            # A row that no expert has had may hold anything, NaN too.
            results = jnp.where(is_here[:, None], results[slot], 0)
            results = results.reshape(-1, choices, results.shape[-1])
            return jnp.einsum("tkd,tk->td", results, weights).astype(results.dtype)

        def visit_later(y: jax.Array, number: Any) -> tuple[jax.Array, None]:
            is_needed = number * bucket < most
            return jax.lax.cond(is_needed, lambda: y + visit(number), lambda: y), None

        y = visit(0)
        later = jnp.arange(1, -(-ids.size // bucket))
        if self.capacity is None and later.size:
            # All devices together take part in a round, or skip it. The backward pass
            # computes it again: what each round keeps would take memory, used or not.
            most = jax.lax.pmax(sent.max(), tuple(_jax.manual_axis_sizes()))
            scan = partial(jax.lax.scan, jax.checkpoint(visit_later), y)
            y = jax.lax.cond(most > bucket, lambda: scan(later)[0], lambda: y)
        return y.reshape(num_rows, length, -1)

    def _computed(self, params: Any, rows: Any, slots: Any, received: Any) -> jax.Array:
        """Returns what experts make of rows (devices, bucket, features), as a list."""
        shape = rows.shape[:2]
        rows = self._exchanged(rows).reshape(-1, rows.shape[-1])
        if self.axis.size == 1:
            return self._applied(params, rows, received[0])
        # Each device's are sorted by expert; now all are, together.
        ends = jnp.cumsum(received, axis=1)[:, None]
        ids = (slots[..., None] >= ends).sum(-1).ravel()
        order = jnp.argsort(ids, stable=True)
        sizes = jnp.bincount(ids, length=ends.shape[-1])
        results = self._applied(params, rows[order], sizes)[jnp.argsort(order)]
        return self._exchanged(results.reshape(*shape, -1)).reshape(len(rows), -1)

    def _applied(self, params: Any, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        results = self.expert_fn(params, rows, sizes.astype("int32"))
        fact = f"expert_fn must return ({len(rows)}, features) for rows {rows.shape}"
        fits = jnp.ndim(results) == 2 and len(results) == len(rows)
        require("dispatch", fits, f"{fact}, got {jnp.shape(results)}")
        return results

    def _exchanged(self, x: jax.Array) -> jax.Array:
        """Sends entry i to device i of the axis; returns what all sent here."""
        if self.axis.size == 1:
            return x
        return jax.lax.all_to_all(x, self.axis.name, 0, 0, tiled=True)

    def _within(self, index: jax.Array, capacity: int) -> jax.Array:
        """Returns the experts of one row's tokens, none for those above capacity."""
        ids = index.T.ravel()  # first choices before second ones
        counts = jnp.bincount(ids, length=self.num_experts + 1)
        rank = jnp.argsort(jnp.argsort(ids, stable=True))
        rank -= (jnp.cumsum(counts) - counts)[ids]
        kept = jnp.where(rank < capacity, ids, self.num_experts)
        return kept.reshape(index.T.shape).T
