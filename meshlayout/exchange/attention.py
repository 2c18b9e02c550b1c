"""Attention as one device computes it, whole or block by block, and its arguments.

Queries meet blocks of keys one by one: `Block.forward` adds each to a running softmax
(Milakov and Gimelshein 2018), `Block.backward` recomputes its weights from the largest
score and the sum of each row (Dao et al. 2022), in float32 or wider.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from meshlayout import _checks
from meshlayout.errors import LayoutError, MeshLayoutError
from meshlayout.exchange.axes import MeshAxis, find_axis
from meshlayout.mesh import Mesh


Window: TypeAlias = int | Sequence[int]
Precision: TypeAlias = Any  # as of jax.lax.dot: a name, a Precision, or a pair
# The sum of weighted values (b, k, g, t, d); the largest score and the sum of weights,
# both (b, k, g, t).
Running: TypeAlias = Sequence[jax.Array]

# Finite, as in JAX: where all scores of a row are masked, all count the same.
_MASKED = -0.7 * float(jnp.finfo("float32").max)


class FlaxArguments(TypedDict, total=False):
    """What Flax passes to each attention function; most of it must be None."""

    is_causal: bool  # or else `causal`
    bias: None
    module: None  # to sow the weights, which no device has
    dropout_rng: jax.Array | None
    broadcast_dropout: bool


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


@dataclass(frozen=True)
class Inputs:
    """The arguments of an attention function, checked, with a batch dim.

    The shapes: `q` (batch, length, kv_heads, groups, head_dim), `k` and `v` (batch,
    key_length, kv_heads, head_dim), `segment_ids` (batch, length), `mask` (batch or 1,
    length, kv_heads or 1, groups or 1, key_length).
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    segment_ids: jax.Array | None
    mask: jax.Array | None
    rules: Rules

    def on_one_device(self) -> jax.Array:
        """Returns the attention, by `jax.nn.dot_product_attention` if it can do it."""
        q, k, v, rules = self.q, self.k, self.v, self.rules
        rows, columns = jnp.arange(q.shape[1]), jnp.arange(k.shape[1])
        masks = [] if self.mask is None else [jnp.moveaxis(self.mask, 1, 3)]
        if self.segment_ids is not None:
            masks.append(same_segment(self.segment_ids, self.segment_ids))
        if rules.softcap is not None or rules.precision is not None:
            block = Block(rules, k, v, (*masks, *rules.visible(rows, columns)))
            weights = jax.nn.softmax(block.scores(q))
            return rules.product("bkgts,bskd->btkgd", weights, v).astype(q.dtype)
        mask, heads = None, (*q.shape[:2], -1, q.shape[-1])
        if masks:
            mask = functools.reduce(jnp.logical_and, masks)
            shape = (len(q), *q.shape[2:4], len(rows), len(columns))
            mask = jnp.broadcast_to(mask, shape).reshape(len(q), -1, *shape[3:])
        out = jax.nn.dot_product_attention(
            *(q.reshape(heads), k, v, None, mask),
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
        """Returns the scores of queries, far below all others where they see nothing."""
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
        self, q: jax.Array, top: jax.Array, weight: jax.Array, grad: Any, delta: Any
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
    batch, length, *heads, features = q.shape
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    total = jnp.zeros((batch, *heads, length, features), dtype)
    # Not 0, so that rows of padding, which may see no key, are not NaN.
    weight = jnp.full_like(total[..., 0], jnp.finfo(dtype).tiny)
    return total, jnp.full_like(weight, _MASKED), weight


def attend(
    exchange: Callable[[MeshAxis, Inputs], jax.Array],
    where: str,
    *,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    axis: str,
    mesh: Mesh | jax.sharding.Mesh | None,
    causal: bool,
    segment_ids: jax.Array | None,
    window: Window | None,
    scale: float | None,
    softcap: float | None,
    mask: jax.Array | None,
    dtype: DTypeLike | None,
    precision: Precision,
    dropout_rate: float,
    deterministic: bool,
    flax: FlaxArguments,
) -> jax.Array:
    """Checks the arguments of an attention function, and calls what exchanges shards.

    That of one device, if there is no axis to exchange them along.
    """

    def check(passes: object, fact: str, fix: str = "") -> None:
        if not passes:
            raise LayoutError(f"{where}: {fact}.{fix and ' '}{fix}")

    allowed = FlaxArguments.__annotations__
    for name, value in flax.items():
        known = name in allowed and (value is None or name not in ("bias", "module"))
        check(known, f"{name}={_checks.shown(value)} is not supported", "Leave it out.")
    no_dropout = deterministic or dropout_rate == 0
    fix = "Drop features of the result instead, or give deterministic=True."
    check(no_dropout, f"dropout_rate={dropout_rate}: no device has all weights", fix)
    shape = jnp.shape(q)
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    q, k, v = (x[None] if x.ndim == 3 else x for x in (q, k, v))
    shapes = f"got query {q.shape}, key {k.shape} and value {v.shape}"
    fits = q.ndim == k.ndim == 4 and k.shape == v.shape
    fits = fits and (len(q), q.shape[-1]) == (len(k), k.shape[-1])
    names = "(batch, length, heads, head_dim), of equal batch and head_dim"
    check(fits, f"arrays are {names}, values shaped as keys, {shapes}")
    is_float = q.dtype == k.dtype == v.dtype and jnp.issubdtype(q.dtype, np.floating)
    dtypes = f"{q.dtype}, {k.dtype} and {v.dtype}"
    fix = "Give dtype= to cast them."
    check(is_float, f"all must be floats of one dtype, got {dtypes}", fix)
    (batch, length, heads, _), (key_length, kv_heads) = q.shape, k.shape[1:3]
    fact = f"{heads} heads of queries do not divide among {kv_heads} of keys"
    check(heads % kv_heads == 0, fact, nearest(heads, kv_heads))
    if segment_ids is not None:
        segment_ids = jnp.asarray(segment_ids).reshape(-1, length)
        fits = segment_ids.shape == (batch, length) and length == key_length
        fact = f"segment_ids of shape {segment_ids.shape} are not one for each query"
        check(fits, f"{fact} and key, {shapes}", "Give mask= instead.")
    if mask is not None:
        mask, full = jnp.asarray(mask), (batch, heads, length, key_length)
        sizes = (*(1,) * (4 - mask.ndim), *mask.shape)
        fits = all(size in (1, of) for size, of in zip(sizes, full, strict=False))
        fits = fits and len(sizes) == 4 and mask.dtype == bool
        given = f"{mask.dtype}{list(mask.shape)}"
        check(fits, f"mask must be bools that broadcast to {full}, got {given}")
        mask = jnp.broadcast_to(mask.reshape(sizes), (*sizes[:2], *full[2:]))
        groups = (1, 1) if sizes[1] == 1 else (kv_heads, heads // kv_heads)
        mask = jnp.moveaxis(mask.reshape(-1, *groups, *full[2:]), 3, 1)
    causal = bool(causal or flax.get("is_causal"))
    reach = None
    if window is not None:
        pair = window if isinstance(window, Sequence) else (window, window)
        given = _checks.shown(window)
        check(len(pair) == 2, f"window is a number, or those before and after: {given}")
        before, after = (_checks.count("window", x, at_least=0) for x in pair)
        after = 0 if causal else after
        is_all = before >= key_length and (causal or after >= key_length)
        reach = None if is_all else (before, after)
    scale = q.shape[-1] ** -0.5 if scale is None else _checks.number("scale", scale)
    if softcap is not None:
        softcap = _checks.number("softcap", softcap, above=0, where=where)
    rules = Rules(causal, reach, scale, softcap, precision)
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, -1)
    inputs = Inputs(q, k, v, segment_ids, mask, rules)
    mesh_axis = find_axis(axis, mesh, where)
    out = exchange(mesh_axis, inputs) if mesh_axis else inputs.on_one_device()
    return out.reshape(shape)


def nearest(number: int, divisor: int) -> str:
    """Returns a sentence with the nearest numbers that a divisor divides."""
    below = number // divisor * divisor
    above = below + divisor
    return f"Nearest that would: {f'{below} and {above}' if below else above}."
