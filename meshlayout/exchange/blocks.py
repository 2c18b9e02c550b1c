"""Attention as one device computes it, whole or block by block.

Queries meet blocks of keys one by one: `Block.forward` adds each to a running softmax
(Milakov and Gimelshein 2018), `Block.backward` recomputes its weights from the largest
score and the sum of each row (Dao et al. 2022), in float32 or wider.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp


Precision: TypeAlias = Any  # as of jax.lax.dot: a name, a Precision, or a pair
# The sum of weighted values (b, k, g, t, d); the largest score and the sum of weights,
# both (b, k, g, t).
Running: TypeAlias = Sequence[jax.Array]

# Finite, as in JAX: where all scores of a row are masked, all count the same.
_MASKED = -0.7 * float(jnp.finfo("float32").max)


@dataclass(frozen=True)
class Rules:
    """How queries score keys, and the positions that they see."""

    causal: bool
    window: tuple[int, int] | None  # positions before and after
    scale: float
    softcap: float | None
    precision: Precision

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


class Inputs(NamedTuple):
    """The arrays of an attention function; the masks are those of all heads or each."""

    q: jax.Array  # (batch, length, kv_heads, groups, head_dim)
    k: jax.Array  # (batch, key_length, kv_heads, head_dim)
    v: jax.Array
    segment_ids: jax.Array | None = None  # (batch, length)
    mask: jax.Array | None = None  # (batch, length, kv_heads, groups, key_length), or 1


def attend_on_one_device(rules: Rules, inputs: Inputs) -> jax.Array:
    """Returns the attention, by `jax.nn.dot_product_attention` if it can do it."""
    q, k, v, segment_ids, mask = inputs
    rows, columns = jnp.arange(q.shape[1]), jnp.arange(k.shape[1])
    masks = [] if mask is None else [jnp.moveaxis(mask, 1, 3)]
    if segment_ids is not None:
        masks.append(same_segment(segment_ids, segment_ids))
    if rules.softcap is not None or rules.precision is not None:
        block = Block(rules, k, v, (*masks, *rules.visible(rows, columns)))
        weights = jax.nn.softmax(block.scores(q))
        return rules.product("bkgts,bskd->btkgd", weights, v).astype(q.dtype)
    joined = functools.reduce(jnp.logical_and, masks) if masks else None
    if joined is not None:
        joined = joined.reshape(len(joined), -1, *joined.shape[3:])
    out = jax.nn.dot_product_attention(
        *(q.reshape(*q.shape[:2], -1, q.shape[-1]), k, v, None, joined),
        scale=rules.scale,
        is_causal=rules.causal,
        local_window_size=rules.window,
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

    def backward(
        self,
        q: jax.Array,
        top: jax.Array,
        weight: jax.Array,
        grad: jax.Array,
        delta: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the gradients of queries, keys and values through this block.

        `top` and `weight` are those of the whole row; `grad` is that of the result, and
        `delta` its product with the result, summed over features.
        """
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


def nothing_seen(q: jax.Array) -> Running:
    """Returns the running softmax of queries before their first block."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    total = jnp.zeros_like(jnp.moveaxis(q, 1, 3), dtype)
    # Not 0, so that rows of padding, which may see no key, are not NaN.
    weight = jnp.full_like(total[..., 0], jnp.finfo(dtype).tiny)
    return total, jnp.full_like(weight, _MASKED), weight
