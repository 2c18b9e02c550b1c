"""`ring_attention`: keys and values travel around a ring of devices, queries stay.

Each device has one shard of the sequence and meets all others' keys in turn (Liu,
Zaharia and Abbeel 2023): one permute per step, sent while the step before computes. The
backward pass sends them around again with the gradients that they collect, so that
nothing is saved but each device's own shards and two numbers per row.

Under a causal mask, the first devices would idle. In zigzag order each has a chunk from
the front and one from the back (as Llama 3 does), so that all meet as many keys: two of
four blocks in each step, none of which is masked in part. The order is made and undone
inside, by permutes. A window reaches neighbors alone, which is equal work as it is.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshlayout import _checks
from meshlayout.exchange.attention import (
    Block,
    FlaxArguments,
    Inputs,
    Precision,
    Rules,
    Window,
    attend,
    nothing_seen,
    same_segment,
)
from meshlayout.exchange.axes import MeshAxis
from meshlayout.mesh import Mesh


@_checks.user_call
def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: str,
    causal: bool,
    segment_ids: jax.Array | None = None,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    mesh: Mesh | jax.sharding.Mesh | None = None,
    mask: jax.Array | None = None,
    dtype: DTypeLike | None = None,
    precision: Precision = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    **flax: Unpack[FlaxArguments],
) -> jax.Array:
    """Returns attention over a sequence that is sharded over a mesh axis.

    Exactly that of the whole sequence, in value and gradient, in memory that falls with
    the size of the axis: no device ever has all keys. Use this for sequences too long
    for one device, as `attention_fn=functools.partial(ring_attention, axis="seq",
    causal=True)` of a Flax module too. The mesh is that of the step, or of
    `jax.set_mesh`; without one, or on one that has no such axis or has it with size 1,
    this is `jax.nn.dot_product_attention`. Lengths that do not divide are padded.

    Args:
        q: Queries: (batch, length, heads, head_dim), or without a batch.
        k: Keys: (batch, length, kv_heads, head_dim); each head serves heads / kv_heads
            of queries.
        v: Values, shaped as the keys.
        axis: The mesh axis that the sequence is sharded over.
        causal: Whether positions see only themselves and those before.
        segment_ids: (batch, length): positions see only those of an equal number, as in
            packed rows.
        window: How many positions before and after are seen, or a pair of the two;
            devices then send only as far as it reaches.
        scale: What scores are multiplied by; 1 / sqrt(head_dim) if None.
        softcap: The bound of scores, which become `softcap * tanh(scores / softcap)`.
        mesh: The mesh, where nothing else says it.
        mask: Bools that broadcast to (batch, heads, length, length). Each device holds
            its rows of it, whole; `causal` and `segment_ids` take no such memory.
        dtype: What q, k and v are cast to.
        precision: Of the products, as in `jax.lax.dot`.
        dropout_rate: Must be 0, unless `deterministic`.
        deterministic: Whether nothing is dropped, whatever the rate.
        **flax: What else Flax passes: `is_causal` is the same as `causal`; `bias` and
            `module` must be None.

    Returns:
        An array of the shape and dtype of `q`, sharded over `axis` along the sequence.

    Raises:
        LayoutError: If shapes or dtypes do not fit, or an option is not supported.
        MeshError: If this is called inside `shard_map` over the axis.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "seq": 4})
        >>> x = jax.random.normal(jax.random.key(0), (2, 30, 4, 8))
        >>> out = ring_attention(x, x, x, axis="seq", causal=True, mesh=mesh)
        >>> whole = jax.nn.dot_product_attention(x, x, x, is_causal=True)
        >>> bool(jnp.allclose(out, whole, atol=1e-5))
        True
    """
    return attend(_on_ring, "ring_attention", **locals())


@dataclass(frozen=True)
class Ring:
    """Who meets whom: all that is known before there are arrays.

    On a device, chunks of the sequence are in front, one in plain order and two in
    zigzag order: queries (chunk, b, t, k, g, d), keys and values (chunk, b, s, k, d).
    """

    axis: MeshAxis
    rules: Rules
    zigzag: bool
    num_rows: int  # of a chunk of queries
    num_columns: int  # of a chunk of keys
    num_keys: int  # of the sequence, without padding
    first: int  # keys come first from the device so many places before,
    last: int  # and last from this one

    def chunks(self, x: jax.Array) -> jax.Array:
        """Returns a shard of the sequence as chunks, in the order of this ring."""
        if not self.zigzag:
            return x[None]
        halves = [self._swap(part, i) for i, part in enumerate(jnp.split(x, 2, axis=1))]
        return jnp.where(self._is_odd(), jnp.stack(halves[::-1]), jnp.stack(halves))

    def shard(self, chunks: jax.Array) -> jax.Array:
        """Returns chunks as a shard in the order of the sequence: undoes `chunks`."""
        if not self.zigzag:
            return chunks[0]
        halves = jnp.where(self._is_odd(), chunks[::-1], chunks)
        parts = [self._swap(part, i, back=True) for i, part in enumerate(halves)]
        return jnp.concatenate(parts, axis=1)

    def _is_odd(self) -> jax.Array:
        return self.axis.index() % 2 == 1

    def _swap(self, x: jax.Array, half: int, *, back: bool = False) -> jax.Array:
        """Sends one half of each shard, chunk j of 2n, to device j or 2n - 1 - j."""
        size = self.axis.size
        chunks = range(half, 2 * size, 2)
        pairs = [(j // 2, min(j, 2 * size - 1 - j)) for j in chunks]
        pairs = [pair[::-1] for pair in pairs] if back else pairs
        return jax.lax.ppermute(x, self.axis.name, pairs)

    def rotate(self, visit: Callable[..., Any], keys: Any) -> Any:
        """Calls `visit(shift, keys, carry)` with the keys of one device after another.

        `shift` is how many places before this one it is, `carry` what the call before
        returned. Each step's keys are sent before the step before computes.
        """
        keys = self.axis.shift(keys, self.first)
        if self.first == self.last:
            return visit(self.first, keys, None)
        following = self.axis.shift(keys, 1)
        carry = visit(self.first, keys, None)

        def step(loop: Any, shift: jax.Array) -> Any:
            keys, carry = loop
            following = self.axis.shift(keys, 1)
            return (following, visit(shift, keys, carry)), None

        if self.last - self.first > 1:
            shifts = jnp.arange(self.first + 1, self.last)
            (following, carry), _ = jax.lax.scan(step, (following, carry), shifts)
        return visit(self.last, following, carry)

    def blocks(self, shift: Any, keys: Any, segments: Any, mask: Any) -> Iterator[Any]:
        """Yields the chunks of queries and keys that meet, by index, and the block."""
        k, v, key_segments = keys
        index = self.axis.index()
        source = (index - shift) % self.axis.size
        pairs: list[tuple[Any, Any, bool]] = [(0, 0, True)]
        if self.zigzag and isinstance(shift, int) and shift == 0:
            pairs = [(0, 0, True), (1, 0, False), (1, 1, True)]
        elif self.zigzag:
            # Both chunks see the first chunk of an earlier device's keys, and the last
            # one both chunks of a later device's.
            later = (source > index).astype("int32")
            pairs = [(1, 0, False), (later, later, False)]
        start, offset = index * self.num_rows, source * self.num_columns
        if self.zigzag:
            start = offset = 0
        for a, b, is_partial in pairs:
            masks: list[jax.Array] = []
            padding: list[jax.Array] = []
            if is_partial:
                columns = offset + jnp.arange(self.num_columns)
                masks += self.rules.visible(start + jnp.arange(self.num_rows), columns)
                if (
                    not self.zigzag
                    and self.num_columns * self.axis.size > self.num_keys
                ):
                    padding = [(columns < self.num_keys)[None, None, None, None]]
            if mask is not None:
                size = self.num_columns
                part = jax.lax.dynamic_slice_in_dim(mask, offset, size, axis=4)
                masks.append(jnp.moveaxis(part, 1, 3))
            if key_segments is not None:
                masks.append(same_segment(_get(segments, a), _get(key_segments, b)))
            yield a, b, Block(self.rules, _get(k, b), _get(v, b), masks, padding)


def _get(chunks: jax.Array, index: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(chunks, index, keepdims=False)


def _set(chunks: jax.Array, index: Any, chunk: jax.Array) -> jax.Array:
    # Not `.at[index]`: the compiler gathers rows where a scatter changes them.
    return jax.lax.dynamic_update_index_in_dim(chunks, chunk, index, 0)


def _on_ring(axis: MeshAxis, inputs: Inputs) -> jax.Array:
    rules, length, num_keys = inputs.rules, inputs.q.shape[1], inputs.k.shape[1]
    is_plain = length == num_keys and inputs.mask is None
    zigzag = is_plain and rules.causal and rules.window is None
    parts = axis.size * (1 + zigzag)
    num_rows, num_columns = -(-length // parts), -(-num_keys // parts)
    first, last = 0, axis.size - 1
    if is_plain and rules.window is not None:
        before, after = (-(-reach // num_columns) for reach in rules.window)
        first, last = (-after, before) if before + after < last else (first, last)
    ring = Ring(axis, rules, zigzag, num_rows, num_columns, num_keys, first, last)

    def padded(x: jax.Array | None, dim: int, size: int) -> jax.Array | None:
        if x is None or x.shape[dim] == size * parts:
            return x
        widths = [(0, 0)] * x.ndim
        widths[dim] = (0, size * parts - x.shape[dim])
        return jnp.pad(x, widths)

    rows = [padded(x, 1, num_rows) for x in (inputs.q, inputs.segment_ids, inputs.mask)]
    keys = [padded(x, 1, num_columns) for x in (inputs.k, inputs.v)]
    out = _attend(ring, rows[0], *keys, rows[1], padded(rows[2], 4, num_columns))
    return out[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(ring: Ring, q: Any, k: Any, v: Any, segments: Any, mask: Any) -> Any:
    return _forward(ring, q, k, v, segments, mask)[0]


def _specs(ring: Ring) -> tuple[PartitionSpec, PartitionSpec]:
    """Returns the specs of shards along the sequence, and of chunks."""
    return PartitionSpec(None, ring.axis.name), PartitionSpec(ring.axis.name)


def _forward(ring: Ring, q: Any, k: Any, v: Any, segments: Any, mask: Any) -> Any:
    def on_device(q: Any, k: Any, v: Any, segments: Any, mask: Any) -> Any:
        q, k, v, segments = jax.tree.map(ring.chunks, (q, k, v, segments))

        def visit(shift: Any, keys: Any, running: Any) -> Any:
            running = jax.vmap(nothing_seen)(q) if running is None else running
            for a, _, block in ring.blocks(shift, keys, segments, mask):
                now = block.forward(_get(q, a), [_get(x, a) for x in running])
                running = [_set(x, a, y) for x, y in zip(running, now, strict=True)]
            return running

        total, top, weight = ring.rotate(visit, (k, v, segments))
        out = jnp.einsum("cbkgtd->cbtkgd", total / weight[..., None])
        return ring.shard(out.astype(q.dtype)), (q, k, v, segments, top, weight)

    along, chunked = _specs(ring)
    mapped = ring.axis.shard_map(on_device, along, (along, chunked))
    out, saved = mapped(q, k, v, segments, mask)
    return out, (saved, out, mask)


def _backward(ring: Ring, residuals: Any, grad: Any) -> Any:
    def on_device(saved: Any, out: Any, mask: Any, grad: Any) -> Any:
        q, k, v, segments, top, weight = saved
        delta = jnp.sum(out.astype(top.dtype) * grad.astype(top.dtype), axis=-1)
        grad, delta = ring.chunks(grad), ring.chunks(delta)
        delta = jnp.einsum("cbtkg->cbkgt", delta)

        def visit(shift: Any, keys: Any, grads: Any) -> Any:
            if grads is None:
                grads = [jnp.zeros(x.shape, top.dtype) for x in (q, k, v)]
            else:  # those of keys follow their keys, a step behind
                grads = [grads[0], *ring.axis.shift(grads[1:], 1)]
            for a, b, block in ring.blocks(shift, keys, segments, mask):
                rows = [_get(x, a) for x in (q, top, weight, grad, delta)]
                parts = zip(grads, (a, b, b), block.backward(*rows), strict=True)
                grads = [_set(x, i, _get(x, i) + part) for x, i, part in parts]
            return grads

        grads = ring.rotate(visit, (k, v, segments))
        grads = [grads[0], *ring.axis.shift(grads[1:], -ring.last)]
        return tuple(ring.shard(x.astype(q.dtype)) for x in grads)

    along, chunked = _specs(ring)
    mapped = ring.axis.shard_map(on_device, (chunked, along, along, along), along)
    return *mapped(*residuals, grad), None, None


_exchange.defvjp(_forward, _backward)
# Traced once for all layers of a model, compiled once for calls outside of jit.
_attend = jax.jit(_exchange, static_argnums=0)
