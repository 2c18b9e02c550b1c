"""`ring_attention`: keys and values travel around a ring of devices, queries stay.

Each device has one shard of the sequence and meets all others' keys in turn (Liu, Zaharia
and Abbeel 2023): one permute per step, sent while the step before computes. The backward
pass sends them around once more with the gradients that they collect, so that nothing is
saved but each device's own shards and two numbers per row.

Causal attention over shards in order would leave the first devices idle. In zigzag order
each has chunk i from the front and chunk i from the back, of which any two devices see
the same number (Brandon et al. 2023, Llama 3): two of four blocks, never a masked one.
The order is made and undone inside, by permutes. A window needs only its neighbors,
which is the same work for all in plain order.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshlayout import _checks
from meshlayout.exchange.attention import (
    Block,
    Inputs,
    Precision,
    Rules,
    Window,
    checked_inputs,
    nothing_seen,
    same_segment,
)
from meshlayout.exchange.axes import MeshAxis, find_axis
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
    bias: jax.Array | None = None,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool = True,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Precision = None,
    module: object = None,
    is_causal: bool = False,
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
        k: Keys: (batch, length, kv_heads, head_dim); each head may serve several heads
            of queries. Of another length only if nothing else relates positions.
        v: Values, shaped as the keys.
        axis: The mesh axis that the sequence is sharded over.
        causal: Whether positions see only themselves and those before.
        segment_ids: (batch, length), int: positions see only those of equal number, as
            in packed rows.
        window: How many positions before and after are seen, or a pair of the two;
            devices then send only as far as it reaches.
        scale: What scores are multiplied by, 1 / sqrt(head_dim) if None.
        softcap: The bound that `softcap * tanh(scores / softcap)` bends scores to.
        mesh: The mesh, where nothing else says it.
        mask: Bools that broadcast to (batch, heads, length, length). Each device has
            all columns of its rows of it; segment_ids and causal cost no such memory.
        bias: Refused, as are dropout and `module`, which Flax passes.
        dropout_rng: Not needed, as there is no dropout.
        dropout_rate: Must be 0 unless `deterministic`.
        broadcast_dropout: Says nothing without dropout.
        deterministic: Whether there is no dropout whatever the rate.
        dtype: What q, k and v are cast to.
        precision: Of the products, as in `jax.lax.dot`.
        module: Must be None.
        is_causal: The same as `causal`, as Flax says it.

    Returns:
        An array of the shape and dtype of `q`, sharded over `axis` along the sequence.

    Raises:
        LayoutError: If shapes or dtypes do not fit each other.
        MeshError: If this is called inside `shard_map` over the axis.
        MeshLayoutError: If an option is given that has no meaning here.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "seq": 4})
        >>> x = jax.random.normal(jax.random.key(0), (2, 30, 4, 8))
        >>> out = ring_attention(x, x, x, axis="seq", causal=True, mesh=mesh)
        >>> whole = jax.nn.dot_product_attention(x, x, x, is_causal=True)
        >>> bool(jnp.allclose(out, whole, atol=1e-5))
        True
    """
    _ = dropout_rng, broadcast_dropout
    where = "ring_attention"
    inputs = checked_inputs(
        *(where, (q, k, v)),
        causal=causal or is_causal,
        segment_ids=segment_ids,
        window=window,
        scale=scale,
        softcap=softcap,
        bias=bias,
        mask=mask,
        dropout=0.0 if deterministic else dropout_rate,
        dtype=dtype,
        precision=precision,
        module=module,
    )
    mesh_axis = find_axis(axis, mesh, where)
    if mesh_axis is None:
        return inputs.on_one_device()
    return _on_ring(mesh_axis, inputs)


def _on_ring(axis: MeshAxis, inputs: Inputs) -> jax.Array:
    length, key_length = inputs.q.shape[1], inputs.k.shape[1]
    rules = inputs.rules
    is_square = length == key_length
    is_plain = is_square and inputs.mask is None
    zigzag = rules.causal and is_plain and rules.window is None
    parts = axis.size * (2 if zigzag else 1)
    rows, columns = -(-length // parts), -(-key_length // parts)
    first, last = 0, axis.size - 1
    if rules.window is not None and is_plain:
        before, after = (-(-reach // columns) for reach in rules.window)
        if before + after < last:
            first, last = -after, before
    ring = Ring(axis, rules, zigzag, rows, columns, key_length, first, last)

    def padded(x: jax.Array | None, dim: int, size: int) -> jax.Array | None:
        if x is None or x.shape[dim] == size * parts:
            return x
        widths = [(0, 0)] * x.ndim
        widths[dim] = (0, size * parts - x.shape[dim])
        return jnp.pad(x, widths)

    mask = padded(padded(inputs.mask, 3, rows), 4, columns)
    out = _attend(
        ring,
        *(padded(inputs.q, 1, rows), padded(inputs.k, 1, columns)),
        *(padded(inputs.v, 1, columns), padded(inputs.segment_ids, 1, rows), mask),
    )
    return out[:, :length].reshape(inputs.shape)


def _spec(dim: int, axis: MeshAxis) -> PartitionSpec:
    return PartitionSpec(*[None] * dim, axis.name)


@dataclass(frozen=True)
class Ring:
    """Who meets whom: all that is known before there are arrays.

    On a device, arrays have their chunks of the sequence in front, one in plain order
    and two in zigzag order: queries (chunk, b, t, k, g, d), keys (chunk, b, s, k, d).
    """

    axis: MeshAxis
    rules: Rules
    zigzag: bool
    rows: int  # of a chunk of queries
    columns: int  # of a chunk of keys
    num_keys: int  # without padding
    first: int  # whose keys come first: those of the device so many places before
    last: int

    def chunks(self, x: Any, dim: int = 1) -> Any:
        """Returns a shard's chunks, in the order of this ring."""
        if not self.zigzag:
            return x[None]
        halves = jnp.split(x, 2, axis=dim)
        return jnp.stack(self._crossed(halves))

    def shard(self, chunks: Any, dim: int = 1) -> Any:
        """Returns the shard in the order of the sequence: undoes `chunks`."""
        if not self.zigzag:
            return chunks[0]
        return jnp.concatenate(self._crossed(list(chunks), back=True), axis=dim)

    def _crossed(self, halves: list[Any], *, back: bool = False) -> list[Any]:
        """Sends chunk j to device j, or to 2n - 1 - j if that is less; or back."""
        size = self.axis.size
        is_odd = self.axis.index() % 2 == 1
        if back:
            halves = [jnp.where(is_odd, *pair) for pair in (halves[::-1], halves)]
        for half in range(2):
            chunks = [2 * device + half for device in range(size)]
            pairs = [(j // 2, min(j, 2 * size - 1 - j)) for j in chunks]
            pairs = [pair[::-1] for pair in pairs] if back else pairs
            halves[half] = jax.lax.ppermute(halves[half], self.axis.name, pairs)
        if not back:
            halves = [jnp.where(is_odd, *pair) for pair in (halves[::-1], halves)]
        return halves

    def rotate(self, visit: Callable[..., Any], keys: Any) -> Any:
        """Calls `visit(shift, keys, carry)` with the keys of all devices, in turn.

        Each step's keys are sent before the step before computes.
        """
        keys = self.axis.shift(keys, self.first)
        following = self.axis.shift(keys, 1) if self.last > self.first else None
        carry = visit(self.first, keys, None)

        def step(loop: Any, shift: Any) -> Any:
            keys, carry = loop
            following = self.axis.shift(keys, 1)
            return (following, visit(shift, keys, carry)), None

        middle = jnp.arange(self.first + 1, self.last)
        if middle.size:
            (following, carry), _ = jax.lax.scan(step, (following, carry), middle)
        return visit(self.last, following, carry) if following is not None else carry

    def blocks(self, shift: Any, q: Any, keys: Any, rows: Any) -> Iterator[Any]:
        """Yields the chunks of queries and keys that meet: both indices, the block."""
        k, v, segments = keys
        row_segments, mask = rows
        size, index = self.axis.size, self.axis.index()
        source = (index - shift) % size
        is_later = (source > index).astype("int32")
        pairs: list[tuple[Any, Any, bool]] = [(0, 0, True)]
        if self.zigzag:
            is_home = isinstance(shift, int) and shift == 0
            # Either the first chunk of the earlier device's keys meets both chunks, or
            # both of the later device's meet the last: never one that sees only a part.
            pairs = [(0, 0, True), (1, 0, False), (1, 1, True)]
            pairs = pairs if is_home else [(1, 0, False), (is_later, is_later, False)]
        for a, b, is_diagonal in pairs:
            masks: list[jax.Array] = []
            padding: tuple[jax.Array, ...] = ()
            if is_diagonal:
                columns = jnp.arange(self.columns)
                offset = 0 if self.zigzag else source * self.columns
                start = 0 if self.zigzag else index * self.rows
                near = self.rules.visible(
                    start + jnp.arange(self.rows), offset + columns
                )
                masks += [] if near is None else [near]
                if not self.zigzag and self.columns * size > self.num_keys:
                    is_key = offset + columns < self.num_keys
                    padding = (is_key[None, None, None, None],)
                if mask is not None:
                    part = jax.lax.dynamic_slice_in_dim
                    masks.append(part(mask, offset, self.columns, axis=4))
            if segments is not None:
                masks.append(same_segment(_chunk(row_segments, a), _chunk(segments, b)))
            yield (
                a,
                b,
                Block(self.rules, _chunk(k, b), _chunk(v, b), tuple(masks), padding),
            )


def _chunk(chunks: jax.Array, index: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(chunks, index, keepdims=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(ring: Ring, q: Any, k: Any, v: Any, segments: Any, mask: Any) -> Any:
    return _forward(ring, q, k, v, segments, mask)[0]


def _forward(ring: Ring, q: Any, k: Any, v: Any, segments: Any, mask: Any) -> Any:
    def on_device(q: Any, k: Any, v: Any, segments: Any, mask: Any) -> Any:
        q, k, v, segments = jax.tree.map(ring.chunks, (q, k, v, segments))

        def visit(shift: Any, keys: Any, running: Any) -> Any:
            if running is None:
                running = jax.vmap(nothing_seen)(q)
            for a, _, block in ring.blocks(shift, q, keys, (segments, mask)):
                now = [_chunk(x, a) for x in running]
                now = block.forward(_chunk(q, a), now)
                running = [x.at[a].set(y) for x, y in zip(running, now, strict=True)]
            return running

        total, top, weight = ring.rotate(visit, (k, v, segments))
        inverse = 1 / weight
        out = jnp.einsum("cbkgtd->cbtkgd", total * inverse[..., None])
        saved = q, k, v, segments, top, inverse
        return ring.shard(out.astype(q.dtype)), saved

    along, chunked = _spec(1, ring.axis), _spec(2, ring.axis)
    saved_specs = (*[chunked] * 4, *[_spec(4, ring.axis)] * 2)
    mapped = ring.axis.shard_map(
        on_device,
        (*[along] * 4, _spec(3, ring.axis)),
        (along, saved_specs),
    )
    out, saved = mapped(q, k, v, segments, mask)
    return out, (out, saved, mask)


def _backward(ring: Ring, residuals: Any, grad: Any) -> Any:
    def on_device(out: Any, saved: Any, mask: Any, grad: Any) -> Any:
        q, k, v, segments, top, inverse = saved
        delta = jnp.sum(out.astype(top.dtype) * grad.astype(top.dtype), axis=-1)
        grad, delta = ring.chunks(grad), ring.chunks(delta)
        delta = jnp.einsum("cbtkg->cbkgt", delta)

        def visit(shift: Any, keys: Any, grads: Any) -> Any:
            if grads is None:
                grads = [jnp.zeros(x.shape, top.dtype) for x in (q, k, v)]
            else:  # gradients follow their keys, a step behind
                grads = [grads[0], *ring.axis.shift(grads[1:], 1)]
            for a, b, block in ring.blocks(shift, q, keys, (segments, mask)):
                rows = [_chunk(x, a) for x in (q, top, inverse, grad, delta)]
                parts = zip(grads, (a, b, b), block.backward(*rows), strict=True)
                grads = [x.at[chunk].add(part) for x, chunk, part in parts]
            return grads

        grads = ring.rotate(visit, (k, v, segments))
        grads = [grads[0], *ring.axis.shift(grads[1:], -ring.last)]
        return tuple(ring.shard(x.astype(q.dtype)) for x in grads)

    along, chunked = _spec(1, ring.axis), _spec(2, ring.axis)
    saved_specs = (*[chunked] * 4, *[_spec(4, ring.axis)] * 2)
    mapped = ring.axis.shard_map(
        on_device, (along, saved_specs, _spec(3, ring.axis), along), along
    )
    return *mapped(*residuals, grad), None, None


_exchange.defvjp(_forward, _backward)
# Traced and compiled once for all layers of a model.
_attend = jax.jit(_exchange, static_argnums=0)
