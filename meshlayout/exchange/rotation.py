"""Attention on a ring: keys and values travel around a ring of devices, queries stay.

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
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshlayout.exchange.axes import MeshAxis
from meshlayout.exchange.blocks import Block, Inputs, Rules, nothing_seen, same_segment


# Chunks of keys, values and the keys' segments: what travels.
Keys: TypeAlias = tuple[jax.Array, jax.Array, jax.Array | None]


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

    @property
    def specs(self) -> tuple[PartitionSpec, PartitionSpec]:
        """The specs of shards along the sequence, and of chunks."""
        return PartitionSpec(None, self.axis.name), PartitionSpec(self.axis.name)

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
        return jax.lax.axis_index(self.axis.name) % 2 == 1

    def _swap(self, x: jax.Array, half: int, *, back: bool = False) -> jax.Array:
        """Sends one half of each shard, chunk j of 2n, to device j or 2n - 1 - j."""
        end = 2 * self.axis.size
        pairs = [(j // 2, min(j, end - 1 - j)) for j in range(half, end, 2)]
        pairs = [pair[::-1] for pair in pairs] if back else pairs
        stays = all(source == target for source, target in pairs)
        return x if stays else jax.lax.ppermute(x, self.axis.name, pairs)

    def rotate(self, visit: Callable[..., Any], keys: Keys) -> Any:
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

        shifts = jnp.arange(self.first + 1, self.last)
        (following, carry), _ = jax.lax.scan(step, (following, carry), shifts)
        return visit(self.last, following, carry)

    def blocks(
        self,
        shift: int | jax.Array,
        keys: Keys,
        segments: jax.Array | None,
        mask: jax.Array | None,
    ) -> Iterator[tuple[Any, Any, Block]]:
        """Yields the chunks of queries and keys that meet, by index, and the block."""
        k, v, key_segments = keys
        index = jax.lax.axis_index(self.axis.name)
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
        columns = offset + jnp.arange(self.num_columns)
        visible = self.rules.visible(start + jnp.arange(self.num_rows), columns)
        is_padded = self.num_columns * self.axis.size > self.num_keys
        padding = [(columns < self.num_keys)[None, None, None, None]] * is_padded
        for a, b, is_partial in pairs:
            masks = [*visible] if is_partial else []
            if mask is not None:
                part = jax.lax.dynamic_slice_in_dim(mask, offset, self.num_columns, 4)
                masks.append(jnp.moveaxis(part, 1, 3))
            if segments is not None and key_segments is not None:
                masks.append(same_segment(_get(segments, a), _get(key_segments, b)))
            yield a, b, Block(self.rules, _get(k, b), _get(v, b), masks, padding)


def _get(chunks: jax.Array, index: int | jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(chunks, index, keepdims=False)


def _set(chunks: jax.Array, index: int | jax.Array, chunk: jax.Array) -> jax.Array:
    # Not `.at[index]`: the compiler gathers rows where a scatter changes them.
    return jax.lax.dynamic_update_index_in_dim(chunks, chunk, index, 0)


def attend_on_ring(axis: MeshAxis, inputs: Inputs, rules: Rules) -> jax.Array:
    """Returns attention over a sequence whose shards are on an axis."""
    q, k, v, segment_ids, mask = inputs
    length, num_keys = q.shape[1], k.shape[1]
    is_plain = length == num_keys and mask is None
    zigzag = is_plain and rules.causal and rules.window is None
    parts = axis.size * (1 + zigzag)
    num_rows, num_columns = -(-length // parts), -(-num_keys // parts)
    first, last = 0, axis.size - 1
    if is_plain and rules.window is not None:
        before, after = (-(-reach // num_columns) for reach in rules.window)
        first, last = (-after, before) if before + after < last else (first, last)
    ring = Ring(axis, rules, zigzag, num_rows, num_columns, num_keys, first, last)

    def padded(x: jax.Array, dim: int, size: int) -> jax.Array:
        sizes = enumerate(x.shape)
        return jnp.pad(x, [(0, (size * parts - n) * (d == dim)) for d, n in sizes])

    rows = q, segment_ids, mask
    q, segment_ids, mask = jax.tree.map(lambda x: padded(x, 1, num_rows), rows)
    if mask is not None:
        mask = padded(mask, 4, num_columns)
    k, v = padded(k, 1, num_columns), padded(v, 1, num_columns)
    out: Any = _exchange(ring, Inputs(q, k, v, segment_ids, mask))
    return out[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(ring: Ring, inputs: Inputs) -> jax.Array:
    return _forward(ring, inputs)[0]


def _forward(ring: Ring, inputs: Inputs) -> tuple[jax.Array, tuple[Any, ...]]:
    def on_device(inputs: Inputs) -> tuple[jax.Array, tuple[Any, ...]]:
        *arrays, mask = inputs
        q, k, v, segments = jax.tree.map(ring.chunks, arrays)

        def visit(shift: int | jax.Array, keys: Keys, running: Any) -> Any:
            running = jax.vmap(nothing_seen)(q) if running is None else running
            for a, _, block in ring.blocks(shift, keys, segments, mask):
                now = block.forward(_get(q, a), [_get(x, a) for x in running])
                running = [_set(x, a, y) for x, y in zip(running, now, strict=True)]
            return running

        total, top, weight = ring.rotate(visit, (k, v, segments))
        out = jnp.einsum("cbkgtd->cbtkgd", total / weight[..., None])
        return ring.shard(out.astype(q.dtype)), (q, k, v, segments, top, weight)

    out, saved = ring.axis.shard_map(on_device, ring.specs[:1], ring.specs)(inputs)
    return out, (saved, out, inputs.mask)


def _backward(ring: Ring, residuals: tuple[Any, ...], grad: jax.Array) -> tuple[Inputs]:
    def on_device(
        saved: tuple[Any, ...], out: jax.Array, mask: jax.Array | None, grad: jax.Array
    ) -> tuple[jax.Array, ...]:
        q, k, v, segments, top, weight = saved
        delta = jnp.sum(out.astype(top.dtype) * grad.astype(top.dtype), axis=-1)
        grad, delta = ring.chunks(grad), ring.chunks(delta)
        delta = jnp.einsum("cbtkg->cbkgt", delta)

        def visit(shift: int | jax.Array, keys: Keys, grads: Any) -> Any:
            if grads is None:
                grads = [jnp.zeros_like(x, top.dtype) for x in (q, k, v)]
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

    along, chunked = ring.specs
    mapped = ring.axis.shard_map(on_device, (chunked, along, along, along), along)
    return (Inputs(*mapped(*residuals, grad)),)


_exchange.defvjp(_forward, _backward)
