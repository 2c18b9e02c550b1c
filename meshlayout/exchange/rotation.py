"""Attention on a ring: keys and values travel around a ring of devices, queries stay.

Each device has one shard of the sequence and meets all others' keys in turn (Liu,
Zaharia and Abbeel 2023): one permute per step, sent while the step before computes. The
backward pass sends them around again with the gradients that they collect, so that
nothing is saved but each device's own shards and two numbers per row: `Block.forward`
adds a block of keys to a running softmax (Milakov and Gimelshein 2018), and
`Block.backward` recomputes its weights from the largest score and the sum of each row
(Dao et al. 2022), both in float32 or wider.

Under a causal mask, the first devices would idle. In zigzag order each has a chunk from
the front and one from the back (as Llama 3 does), so that all meet as many keys: two of
four blocks in each step, none of which is masked in part. The order is made and undone
inside, by permutes. A window reaches neighbors alone, which is equal work as it is.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jax.sharding import PartitionSpec

from meshlayout.exchange.axes import MeshAxis


# The sum of weighted values (b, k, g, t, d); the largest score and the sum of weights,
# both (b, k, g, t).
Running: TypeAlias = Sequence[jax.Array]
# Chunks of keys, values and the keys' segments: what travels.
Keys: TypeAlias = tuple[jax.Array, jax.Array, jax.Array | None]

# Finite, as in JAX: where all scores of a row are masked, all count the same.
_MASKED = -0.7 * float(jnp.finfo("float32").max)

_get = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
# Not `.at[index]`: the compiler gathers rows where a scatter changes them.
_set = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)


class Inputs(NamedTuple):
    """The arrays of an attention function; the masks are those of all heads or each."""

    q: jax.Array  # (batch, length, kv_heads, groups, head_dim)
    k: jax.Array  # (batch, key_length, kv_heads, head_dim)
    v: jax.Array
    segment_ids: jax.Array | None = None  # (batch, length)
    mask: jax.Array | None = None  # (batch, length, kv_heads, groups, key_length), or 1


@dataclass(frozen=True)
class Rules:
    """How queries score keys, and the positions that they see."""

    causal: bool
    window: tuple[int, int] | None  # positions before and after
    scale: float
    softcap: float | None
    precision: PrecisionLike

    def product(self, equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
        """Returns a product in the dtype of `b`, summed up in float32 or wider."""
        dtype = jnp.promote_types(b.dtype, jnp.float32)
        options: Any = {"preferred_element_type": dtype, "precision": self.precision}
        return jnp.einsum(equation, a.astype(b.dtype), b, **options)

    def visible(self, rows: jax.Array, columns: jax.Array) -> list[jax.Array]:
        """Returns masks: which keys at positions `columns` queries at `rows` see."""
        ahead = (columns[None, :] - rows[:, None])[None, None, None]
        masks = [ahead <= 0] if self.causal else []
        if self.window is not None:
            masks += [ahead >= -self.window[0], ahead <= self.window[1]]
        return masks

    def attend(self, inputs: Inputs) -> jax.Array:
        """Returns attention on one device, by JAX's own function if it can do it."""
        q, k, v, segment_ids, mask = inputs
        masks = [] if mask is None else [jnp.moveaxis(mask, 1, 3)]
        if segment_ids is not None:
            masks.append(same_segment(segment_ids, segment_ids))
        if self.softcap is not None or self.precision is not None:
            masks += self.visible(jnp.arange(q.shape[1]), jnp.arange(k.shape[1]))
            weights = jax.nn.softmax(Block(self, k, v, masks).scores(q))
            return self.product("bkgts,bskd->btkgd", weights, v).astype(q.dtype)
        joined = functools.reduce(jnp.logical_and, masks) if masks else None
        if joined is not None:
            joined = joined.reshape(len(joined), -1, *joined.shape[3:])
        out = jax.nn.dot_product_attention(
            *(q.reshape(*q.shape[:2], -1, q.shape[-1]), k, v, None, joined),
            scale=self.scale,
            is_causal=self.causal,
            local_window_size=self.window,
        )
        return out.reshape(q.shape)


def same_segment(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Returns a mask: which keys are of a query's segment."""
    return (rows[:, :, None] == columns[:, None, :])[:, None, None]


@dataclass(frozen=True)
class Block:
    """Some keys and values, and which of them the queries see."""

    rules: Rules
    k: jax.Array
    v: jax.Array
    masks: Sequence[jax.Array]  # each broadcasts to scores: (b, k, g, t, s)
    padding: Sequence[jax.Array] = ()  # masks, False where there is no key at all

    def scores(self, q: jax.Array) -> jax.Array:
        """Returns the scores of queries, far below others where they see nothing."""
        rules, cap = self.rules, self.rules.softcap
        scores = rules.scale * rules.product("btkgd,bskd->bkgts", q, self.k)
        scores = scores if cap is None else cap * jnp.tanh(scores / cap)
        for mask in self.masks:
            scores = jnp.where(mask, scores, _MASKED)
        for mask in self.padding:
            scores = jnp.where(mask, scores, -jnp.inf)
        return scores

    def forward(self, q: jax.Array, running: Running) -> Running:
        """Returns the running softmax of queries after this block."""
        total, top, weight = running
        scores = self.scores(q)
        new_top = jnp.maximum(top, scores.max(-1))
        weights, shrink = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
        part = self.rules.product("bkgts,bskd->bkgtd", weights, self.v)
        weight = weight * shrink + weights.sum(-1)
        return total * shrink[..., None] + part, new_top, weight

    def backward(self, q: jax.Array, *rows: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the gradients of queries, keys and values through this block.

        `rows` are the largest score and the sum of weights of the whole row, then the
        gradient of the result and its product with the result, summed over features.
        """
        top, weight, grad, delta = rows
        rules, scores = self.rules, self.scores(q)
        weights = jnp.exp(scores - top[..., None]) / weight[..., None]
        grad_v = rules.product("bkgts,btkgd->bskd", weights, grad)
        grads = rules.product("bskd,btkgd->bkgts", self.v, grad) - delta[..., None]
        grads = weights * grads * rules.scale
        if rules.softcap is not None:
            grads = grads * (1 - jnp.square(scores / rules.softcap))
        for mask in (*self.masks, *self.padding):
            grads = jnp.where(mask, grads, 0)
        grad_q = rules.product("bkgts,bskd->btkgd", grads, self.k)
        return grad_q, rules.product("bkgts,btkgd->bskd", grads, q), grad_v


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
        parts = enumerate(jnp.split(x, 1 + self.zigzag, axis=1))
        return self._turn(jnp.stack([self._swap(part, i) for i, part in parts]))

    def shard(self, chunks: jax.Array) -> jax.Array:
        """Returns chunks as a shard in the order of the sequence: undoes `chunks`."""
        parts = [self._swap(x, i, back=True) for i, x in enumerate(self._turn(chunks))]
        return jnp.concatenate(parts, axis=1)

    def _turn(self, chunks: jax.Array) -> jax.Array:
        """Swaps the two chunks of odd devices, to which the later one comes first."""
        is_odd = jax.lax.axis_index(self.axis.name) % 2 == 1
        return jnp.where(is_odd, chunks[::-1], chunks) if self.zigzag else chunks

    def _swap(self, x: jax.Array, part: int, *, back: bool = False) -> jax.Array:
        """Sends one part of each shard, chunk j of 2n, to device j or 2n - 1 - j."""
        size, count = self.axis.size, 1 + self.zigzag
        chunks = range(part, count * size, count)
        pairs = [(j // count, min(j, 2 * size - 1 - j)) for j in chunks]
        pairs = [pair[::-1] for pair in pairs] if back else pairs
        stays = all(source == target for source, target in pairs)
        return x if stays else jax.lax.ppermute(x, self.axis.name, pairs)

    def rotate(self, visit: Callable[..., Any], keys: Keys) -> Any:
        """Calls `visit(shift, keys, carry)` with the keys of one device after another.

        `shift` is how many places before this one it is, `carry` what the call before
        returned. Each step's keys are sent before the step before computes.
        """

        def step(shift: int | jax.Array, loop: Any) -> Any:
            keys, carry = loop
            return self.axis.shift(keys, 1), visit(shift, keys, carry)

        loop = self.axis.shift(keys, self.first), None
        if self.first < self.last:
            loop = step(self.first, loop)
            loop = jax.lax.fori_loop(self.first + 1, self.last, step, loop)
        return visit(self.last, *loop)

    def blocks(
        self, shift: int | jax.Array, keys: Keys, own: Inputs
    ) -> Iterator[tuple[Any, Any, Block]]:
        """Yields the chunks of queries and keys that meet, by index, and the block."""
        k, v, segments = keys
        index = jax.lax.axis_index(self.axis.name)
        source = (index - shift) % self.axis.size
        start, offset = index * self.num_rows, source * self.num_columns
        pairs: list[tuple[Any, Any, bool]] = [(0, 0, True)]
        if self.zigzag:
            # Both chunks see the first chunk of an earlier device's keys, and the last
            # one both chunks of a later device's.
            later = (source > index).astype("int32")
            pairs = [(1, 0, False), (later, later, False)]
            if isinstance(shift, int) and shift == 0:
                pairs = [(0, 0, True), (1, 0, False), (1, 1, True)]
            start = offset = 0
        columns = offset + jnp.arange(self.num_columns)
        visible = self.rules.visible(start + jnp.arange(self.num_rows), columns)
        is_padded = self.num_columns * self.axis.size > self.num_keys
        padding = [(columns < self.num_keys)[None, None, None, None]] * is_padded
        for a, b, is_partial in pairs:
            masks = [*visible] if is_partial else []
            if (mask := own.mask) is not None:
                part = jax.lax.dynamic_slice_in_dim(mask, offset, self.num_columns, 4)
                masks.append(jnp.moveaxis(part, 1, 3))
            if own.segment_ids is not None and segments is not None:
                masks.append(same_segment(_get(own.segment_ids, a), _get(segments, b)))
            yield a, b, Block(self.rules, _get(k, b), _get(v, b), masks, padding)


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

    def padded(x: Any, size: int, dim: int = 1) -> Any:
        pads = [(0, (size * parts - n) * (i == dim)) for i, n in enumerate(x.shape)]
        return jnp.pad(x, pads)

    k, v = padded(k, num_columns), padded(v, num_columns)
    mask = None if mask is None else padded(mask, num_columns, dim=4)
    rows = q, segment_ids, mask
    q, segment_ids, mask = jax.tree.map(lambda x: padded(x, num_rows), rows)
    out: Any = _exchange(ring, Inputs(q, k, v, segment_ids, mask))
    return out[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(ring: Ring, inputs: Inputs) -> jax.Array:
    return _forward(ring, inputs)[0]


def _forward(ring: Ring, inputs: Inputs) -> tuple[jax.Array, tuple[Any, ...]]:
    def on_device(inputs: Inputs) -> tuple[jax.Array, tuple[Any, ...]]:
        own = Inputs(*jax.tree.map(ring.chunks, inputs[:4]), mask=inputs.mask)
        dtype = jnp.promote_types(own.q.dtype, jnp.float32)
        total = jnp.zeros_like(jnp.moveaxis(own.q, 2, 4), dtype)
        # Not 0, so that rows of padding, which may see no key, are not NaN.
        weight = jnp.full_like(total[..., 0], jnp.finfo(dtype).tiny)
        nothing_seen = [total, jnp.full_like(weight, _MASKED), weight]

        def visit(shift: int | jax.Array, keys: Keys, running: Any) -> Any:
            running = running or nothing_seen
            for a, _, block in ring.blocks(shift, keys, own):
                now = block.forward(_get(own.q, a), [_get(x, a) for x in running])
                running = [_set(x, y, a) for x, y in zip(running, now, strict=True)]
            return running

        total, top, weight = ring.rotate(visit, own[1:4])
        out = jnp.einsum("cbkgtd->cbtkgd", total / weight[..., None])
        return ring.shard(out.astype(own.q.dtype)), (own[:4], top, weight)

    along, chunked = PartitionSpec(None, ring.axis.name), PartitionSpec(ring.axis.name)
    out, saved = ring.axis.shard_map(on_device, (along,), (along, chunked))(inputs)
    return out, (saved, out, inputs.mask)


def _backward(ring: Ring, residuals: tuple[Any, ...], grad: jax.Array) -> tuple[Inputs]:
    def on_device(
        saved: tuple[Any, ...], out: jax.Array, mask: jax.Array | None, grad: jax.Array
    ) -> tuple[jax.Array, ...]:
        chunks, top, weight = saved
        own = Inputs(*chunks, mask=mask)
        delta = jnp.sum(out.astype(top.dtype) * grad.astype(top.dtype), axis=-1)
        grad, delta = ring.chunks(grad), ring.chunks(delta)
        delta = jnp.einsum("cbtkg->cbkgt", delta)

        def visit(shift: int | jax.Array, keys: Keys, grads: Any) -> Any:
            if grads is None:
                grads = [jnp.zeros_like(x, top.dtype) for x in own[:3]]
            else:  # those of keys follow their keys, a step behind
                grads = [grads[0], *ring.axis.shift(grads[1:], 1)]
            for a, b, block in ring.blocks(shift, keys, own):
                rows = [_get(x, a) for x in (own.q, top, weight, grad, delta)]
                parts = zip(grads, (a, b, b), block.backward(*rows), strict=True)
                grads = [_set(x, _get(x, i) + part, i) for x, i, part in parts]
            return grads

        grads = ring.rotate(visit, own[1:4])
        grads = [grads[0], *ring.axis.shift(grads[1:], -ring.last)]
        return tuple(ring.shard(x.astype(own.q.dtype)) for x in grads)

    along, chunked = PartitionSpec(None, ring.axis.name), PartitionSpec(ring.axis.name)
    mapped = ring.axis.shard_map(on_device, (chunked, along, along, along), along)
    return (Inputs(*mapped(*residuals, grad)),)


_exchange.defvjp(_forward, _backward)
