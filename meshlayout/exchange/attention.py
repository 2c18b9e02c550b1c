"""Attention as one device computes it, whole or in blocks, and its arguments.

`Rules` say which scores count, by positions and segments. A block of queries meets
blocks of keys one by one: `Block.forward` adds each to a running softmax (Milakov and
Gimelshein 2018; Dao et al. 2022), `Block.backward` recomputes its probabilities from the
maximum and sum of each row. Scores, sums and gradients are in float32.
"""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from meshlayout import _checks
from meshlayout.errors import LayoutError, MeshLayoutError


Window: TypeAlias = int | tuple[int, int]
Precision: TypeAlias = "str | jax.lax.Precision | None"
Running: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]  # weighted sum, max, sum

# Finite, as in JAX: where all scores of a row are masked, all count the same.
_MASKED = -0.7 * float(jnp.finfo("float32").max)


@dataclass(frozen=True)
class Rules:
    """How queries score keys, and which scores count."""

    causal: bool
    window: tuple[int, int] | None  # positions before and after
    scale: float
    softcap: float | None
    precision: Precision

    def scores(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Returns the scores of queries (b, t, k, g, d) on keys (b, s, k, d)."""
        scores = self.scale * self.product("btkgd,bskd->bkgts", q, k)
        return scores if self.softcap is None else self.cap(scores)

    def cap(self, scores: jax.Array) -> jax.Array:
        """Returns scores bent into the range of the soft cap."""
        return self.softcap * jnp.tanh(scores / self.softcap)

    def product(self, equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
        """Returns a product of blocks, summed up in float32 or wider."""
        dtype = jnp.promote_types(b.dtype, jnp.float32)
        given: Any = {"preferred_element_type": dtype, "precision": self.precision}
        return jnp.einsum(equation, a.astype(b.dtype), b, **given)

    def visible(self, rows: jax.Array, columns: jax.Array) -> jax.Array | None:
        """Returns which keys at positions `columns` queries at `rows` see; None: all."""
        ahead = columns[None, :] - rows[:, None]
        mask = ahead <= 0 if self.causal else None
        if self.window is not None:
            before, after = self.window
            near = (ahead >= -before) & (ahead <= after)
            mask = near if mask is None else mask & near
        return None if mask is None else mask[None, None, None]


@dataclass(frozen=True)
class Inputs:
    """The arguments of an attention function, checked, with one batch dim.

    `q` has the shape (batch, length, kv_heads, groups, head_dim), `k` and `v` (batch,
    key_length, kv_heads, head_dim), `segment_ids` (batch, length), `mask` (batch or 1,
    kv_heads or 1, groups or 1, length, key_length).
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    segment_ids: jax.Array | None
    mask: jax.Array | None
    rules: Rules
    shape: tuple[int, ...]  # of the result

    def on_one_device(self) -> jax.Array:
        """Returns the whole attention, by `jax.nn.dot_product_attention` if it can."""
        q, k, v, rules = self.q, self.k, self.v, self.rules
        mask = self.mask
        if self.segment_ids is not None:
            same = same_segment(self.segment_ids, self.segment_ids)
            mask = same if mask is None else mask & same
        if rules.softcap is None and rules.precision is None:
            if mask is not None:  # one mask for all heads, or one for each
                num_heads = mask.shape[1] * mask.shape[2]
                full = (*mask.shape[:1], *q.shape[2:4], *mask.shape[3:])
                if num_heads > 1:
                    mask = jnp.broadcast_to(mask, full)
                mask = mask.reshape(len(mask), -1, *mask.shape[3:])
            out = jax.nn.dot_product_attention(
                *(q.reshape(*q.shape[:2], -1, q.shape[-1]), k, v, None, mask),
                scale=rules.scale,
                is_causal=rules.causal,
                local_window_size=rules.window,
            )
            return out.reshape(self.shape)
        near = rules.visible(jnp.arange(q.shape[1]), jnp.arange(k.shape[1]))
        scores = rules.scores(q, k)
        for part in (near, mask):
            scores = scores if part is None else jnp.where(part, scores, _MASKED)
        weights = jax.nn.softmax(scores, axis=-1)
        out = rules.product("bkgts,bskd->btkgd", weights, v)
        return out.astype(q.dtype).reshape(self.shape)


def same_segment(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Returns which keys are of a query's segment, for segment ids (batch, length)."""
    return (rows[:, :, None] == columns[:, None, :])[:, None, None]


@dataclass(frozen=True)
class Block:
    """One block of keys and values, and which of them a block of queries sees."""

    rules: Rules
    k: jax.Array  # (b, s, k, d)
    v: jax.Array
    masks: tuple[jax.Array, ...]  # each broadcasts to (b, k, g, t, s)
    padding: tuple[jax.Array, ...] = ()  # the same: False where there is no key at all

    def _scores(self, q: jax.Array) -> jax.Array:
        scores = self.rules.scores(q, self.k)
        for mask in self.masks:
            scores = jnp.where(mask, scores, _MASKED)
        for mask in self.padding:
            scores = jnp.where(mask, scores, -jnp.inf)
        return scores

    def forward(self, q: jax.Array, running: Running) -> Running:
        """Returns the running softmax of queries after this block."""
        total, top, weight = running
        scores = self._scores(q)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        summed = self.rules.product("bkgts,bskd->bkgtd", weights, self.v)
        total = total * shrink[..., None] + summed
        return total, new_top, weight * shrink + weights.sum(-1)

    def backward(
        self,
        q: jax.Array,
        top: jax.Array,
        inverse: jax.Array,
        grad: jax.Array,
        delta: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the gradients of queries, keys and values from this block alone.

        Args:
            q: Queries.
            top: The largest score of each row.
            inverse: One over the sum of the weights of each row.
            grad: The gradient of the result, shaped as the queries.
            delta: The sum over features of result times gradient, for each row.
        """
        rules, scores = self.rules, self._scores(q)
        weights = jnp.exp(scores - top[..., None]) * inverse[..., None]
        grad_v = rules.product("bkgts,btkgd->bskd", weights, grad)
        # v first: the product is in the dtype of its second operand.
        grad_weights = rules.product("bskd,btkgd->bkgts", self.v, grad)
        grad_scores = weights * (grad_weights - delta[..., None])
        if rules.softcap is not None:
            slope = 1 - jnp.square(scores / rules.softcap)
            grad_scores = grad_scores * slope
        for mask in (*self.masks, *self.padding):
            grad_scores = jnp.where(mask, grad_scores, 0)
        grad_scores = grad_scores * rules.scale
        grad_q = rules.product("bkgts,bskd->btkgd", grad_scores, self.k)
        grad_k = rules.product("bkgts,btkgd->bskd", grad_scores, q)
        return grad_q, grad_k, grad_v


def nothing_seen(q: jax.Array) -> Running:
    """Returns the running softmax of queries (b, t, k, g, d) before the first block."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    batch, length, *heads, features = q.shape
    total = jnp.zeros((batch, *heads, length, features), dtype)
    return total, jnp.full_like(total[..., 0], _MASKED), jnp.zeros_like(total[..., 0])


def checked_inputs(
    where: str,
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    *,
    causal: bool,
    segment_ids: jax.Array | None,
    window: Window | None,
    scale: float | None,
    softcap: float | None,
    bias: jax.Array | None,
    mask: jax.Array | None,
    dropout: float,
    dtype: DTypeLike | None,
    precision: Precision,
    module: object,
) -> Inputs:
    """Returns the arguments of an attention function, or raises a MeshLayoutError."""
    refusals = {
        "bias= is not supported: scores are made block by block. Masks and softcap are": (
            bias is not None
        ),
        f"dropout_rate={dropout} is not supported. Drop what the attention returns, or "
        "give deterministic=True": dropout > 0,
        "there are no attention weights to sow: no device has all of them": (
            module is not None
        ),
    }
    for text in (text for text, is_given in refusals.items() if is_given):
        raise MeshLayoutError(f"{where}: {text}.")
    q, k, v = (jnp.asarray(x, dtype) for x in arrays)
    shapes = f"query {q.shape}, key {k.shape} and value {v.shape}"
    if q.ndim < 3 or k.shape != v.shape or k.ndim != q.ndim:
        msg = f"{where} takes (batch, length, heads, head_dim), keys shaped as values"
        raise LayoutError(f"{msg}, got {shapes}.")
    if k.shape[:-3] != q.shape[:-3] or k.shape[-1] != q.shape[-1]:
        msg = f"{where}: batch and head_dim must be the same for all, got {shapes}."
        raise LayoutError(msg)
    num_heads, num_kv_heads = q.shape[-2], k.shape[-2]
    if num_heads % num_kv_heads:
        msg = f"{where}: {num_heads} query heads do not divide among {num_kv_heads} key"
        raise LayoutError(f"{msg} and value heads. {nearest(num_heads, num_kv_heads)}")
    if len({q.dtype, k.dtype, v.dtype}) > 1 or not jnp.issubdtype(q.dtype, jnp.inexact):
        dtypes = f"{q.dtype}, {k.dtype} and {v.dtype}"
        msg = (
            f"{where}: query, key and value must be floats of one dtype, got {dtypes}."
        )
        raise LayoutError(f"{msg} Give dtype= to cast them.")
    groups = num_heads // num_kv_heads
    batch, (length, key_length) = math.prod(q.shape[:-3]), (q.shape[-3], k.shape[-3])
    rules = Rules(
        _checks.choice("causal", causal, (True, False), where=where),
        _checked_window(where, window, key_length, causal=causal),
        _checks.number("scale", 1 / math.sqrt(q.shape[-1]) if scale is None else scale),
        None if softcap is None else _checks.number("softcap", softcap, above=0),
        precision,
    )
    if segment_ids is not None:
        if jnp.shape(segment_ids) != q.shape[:-2] or length != key_length:
            msg = f"{where}: segment_ids must have the shape {q.shape[:-2]} of queries "
            given = f"and keys, got {jnp.shape(segment_ids)} for {shapes}."
            raise LayoutError(f"{msg}{given} For others, give mask=.")
        segment_ids = jnp.asarray(segment_ids).reshape(batch, length)
    if mask is not None:
        mask = _checked_mask(
            where, mask, (*q.shape[:-3], num_heads, length, key_length)
        )
        heads = (1, 1) if mask.shape[-3] == 1 else (num_kv_heads, groups)
        mask = mask.reshape(-1, *heads, length, key_length)
    return Inputs(
        q.reshape(batch, length, num_kv_heads, groups, q.shape[-1]),
        k.reshape(batch, *k.shape[-3:]),
        v.reshape(batch, *v.shape[-3:]),
        *(segment_ids, mask, rules, q.shape),
    )


def nearest(number: int, divisor: int) -> str:
    """Returns a sentence with the nearest numbers that would divide."""
    below = number // divisor * divisor
    fits = " and ".join(str(x) for x in (below, below + divisor) if x)
    return f"Nearest that would: {fits}."


def _checked_window(
    where: str, window: Window | None, key_length: int, *, causal: bool
) -> tuple[int, int] | None:
    """Returns the positions seen before and after; None if those are all."""
    if window is None:
        return None
    pair = window if isinstance(window, (tuple, list)) else (window, window)
    if len(pair) != 2:
        msg = f"{where}: window must be one number of positions, or those before and "
        raise MeshLayoutError(f"{msg}after, got {_checks.shown(window)}.")
    before, after = (_checks.count("window", x, at_least=0, where=where) for x in pair)
    is_all = before >= key_length and (causal or after >= key_length)
    return None if is_all else (before, 0 if causal else after)


def _checked_mask(where: str, mask: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns a mask whose last two dims are whole, and others whole or all of 1."""
    mask = jnp.asarray(mask)
    dims = (*(1,) * (len(shape) - mask.ndim), *mask.shape)
    pairs = [*zip(dims, shape, strict=len(dims) == len(shape))]
    if (
        mask.dtype != bool
        or len(dims) > len(shape)
        or any(size not in (1, full) for size, full in pairs)
    ):
        msg = f"{where}: mask must be of bools and broadcast to {shape}, got "
        raise LayoutError(f"{msg}{mask.dtype}{list(mask.shape)}.")
    lead = (
        shape[:-3] if any(size > 1 for size in dims[:-3]) else (1,) * (len(shape) - 3)
    )
    return jnp.broadcast_to(mask.reshape(dims), (*lead, dims[-3], *shape[-2:]))
