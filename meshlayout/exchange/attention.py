"""Attention functions for sequences that are sharded over a mesh axis.

`ring_attention` sends keys and values around (`rotation`). `all_to_all_attention` makes
shards of heads from shards of the sequence, and back (DeepSpeed-Ulysses, Jacobs et al.
2023): a device gets every n-th head, so that heads which the compiler shards in order,
over another axis, stay where they are.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypedDict, TypeVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from meshlayout import _checks
from meshlayout.exchange.axes import MeshAxis, find_axis, nearest, on_auto_axes, require
from meshlayout.exchange.rotation import Inputs, Rules, attend_on_ring
from meshlayout.mesh import Mesh


F = TypeVar("F", bound=Callable[..., jax.Array])


class FlaxArguments(TypedDict, total=False):
    """What Flax's NNX passes besides; Linen passes only what signatures name."""

    is_causal: bool  # or else `causal`
    bias: None
    module: None  # to sow the weights, which no device has
    dropout_rng: jax.Array | None
    broadcast_dropout: bool


@_checks.user_call
def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: str,
    causal: bool,
    segment_ids: jax.Array | None = None,
    window: int | Sequence[int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    mesh: Mesh | jax.sharding.Mesh | None = None,
    mask: jax.Array | None = None,
    dtype: DTypeLike | None = None,
    precision: PrecisionLike = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    **flax: Unpack[FlaxArguments],
) -> jax.Array:
    """Returns attention over a sequence that is sharded over a mesh axis.

    It equals that of the whole sequence, in value and gradient (in reverse mode), in
    memory that shrinks with the size of the axis: no device has all keys. Use this for
    sequences too long for one device, or as `attention_fn=functools.partial(
    ring_attention, axis="seq", causal=True)` of a Flax module. Any length works, by
    padding.

    Args:
        q: Queries: (*batch, length, heads, head_dim), with any number of batch dims.
        k: Keys: (*batch, length, kv_heads, head_dim); each head serves heads / kv_heads
            of queries.
        v: Values, shaped as the keys.
        axis: The mesh axis that the sequence is sharded over.
        causal: Whether positions see only themselves and earlier ones.
        segment_ids: (*batch, length): positions see only positions with an equal id, as
            in packed rows.
        window: The number of visible positions before and after, or a pair of the two;
            devices then send only as far as it reaches.
        scale: The factor of the scores; 1 / sqrt(head_dim) if None.
        softcap: The bound of scores, which become `softcap * tanh(scores / softcap)`.
        mesh: The mesh; by default that of the step, or of `jax.set_mesh`. Without one,
            or with size 1 of the axis, this is `jax.nn.dot_product_attention`.
        mask: Bools, or numbers where 0 is False as in Flax, that broadcast to (*batch,
            heads, length, length). Each device holds all of its rows; `causal` and
            `segment_ids` need no such memory.
        dtype: The dtype that q, k and v are cast to.
        precision: The precision of products, as in `jax.lax.dot`.
        dropout_rate: Must be 0, unless `deterministic`.
        deterministic: Whether to disable dropout, whatever the rate.
        **flax: Other arguments from Flax: `is_causal` is the same as `causal`; `bias`
            and `module` must be None.

    Returns:
        An array of the shape and dtype of `q`, sharded over `axis` along the sequence.

    Raises:
        LayoutError: If shapes or dtypes do not fit, or an option is not supported.
        MeshError: If `mesh` lacks the axis, or this is called inside `shard_map` over
            it. (Inside one over others, gradients need its `check_vma=False`.)

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "seq": 4})
        >>> x = jax.random.normal(jax.random.key(0), (2, 30, 4, 8))
        >>> out = ring_attention(x, x, x, axis="seq", causal=True, mesh=mesh)
        >>> whole = jax.nn.dot_product_attention(x, x, x, is_causal=True)
        >>> bool(jnp.allclose(out, whole, atol=1e-5))
        True
    """
    return _attend(attend_on_ring, "ring_attention", **locals())


def _called_as(other: F) -> Callable[[Callable[..., jax.Array]], F]:
    """Gives a function the signature of another, for type checkers, help and Flax."""
    decorate: Any = functools.wraps(other, assigned=(), updated=())
    return decorate


@_checks.user_call
@_called_as(ring_attention)
def all_to_all_attention(*args: Any, **options: Any) -> jax.Array:
    """Returns attention over a sequence that is sharded over a mesh axis, by heads.

    It has the arguments, result and errors of `ring_attention`, but each device
    computes whole rows for some heads, by `jax.nn.dot_product_attention`. With many
    devices and as many heads, it sends less than a ring; it takes memory for all scores
    of those heads. The heads of keys and the length must divide among the devices;
    otherwise, a LayoutError lists the nearest numbers that do.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "seq": 4})
        >>> x = jnp.ones((2, 32, 4, 8))
        >>> all_to_all_attention(x, x, x, axis="seq", causal=True, mesh=mesh).shape
        (2, 32, 4, 8)
    """
    given = inspect.signature(ring_attention).bind(*args, **options)
    given.apply_defaults()
    return _attend(_by_heads, "all_to_all_attention", **given.arguments)


def _attend(
    exchange: Callable[[MeshAxis, Inputs, Rules], jax.Array], where: str, **args: Any
) -> jax.Array:
    """Checks the arguments, and exchanges shards if there is an axis for it."""
    given, check = SimpleNamespace(**args), functools.partial(require, where)
    allowed = FlaxArguments.__annotations__
    for name, value in given.flax.items():
        known = name in allowed and (value is None or name not in ("bias", "module"))
        fix = "Leave out sow_weights." if name == "module" else "Leave it out."
        check(known, f"{name}={_checks.shown(value)} is not supported", fix)
    fact = f"dropout_rate={given.dropout_rate}: no device has all weights"
    fix = "Drop features of the result instead, or give deterministic=True."
    check(given.deterministic or given.dropout_rate == 0, fact, fix)
    q, k, v = (jnp.asarray(x, given.dtype) for x in (given.q, given.k, given.v))
    shape, rows, spec = q.shape, q.shape[:-3] or (1,), jax.typeof(q).sharding.spec
    shapes = f"got query {shape}, key {k.shape} and value {v.shape}"
    fits = q.ndim == k.ndim >= 3 and k.shape == v.shape
    fits = fits and (shape[:-3], shape[-1]) == (k.shape[:-3], k.shape[-1])
    names = "(*batch, length, heads, head_dim), of equal batch and head_dim"
    check(fits, f"arrays are {names}, values shaped as keys, {shapes}")
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    is_float = q.dtype == k.dtype == v.dtype and jnp.issubdtype(q.dtype, np.floating)
    fact = f"all must be floats of one dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
    check(is_float, fact, "Give dtype= to cast them.")
    (length, heads), (key_length, kv_heads) = q.shape[1:3], k.shape[1:3]
    fact = f"{heads} heads of queries do not divide among {kv_heads} of keys"
    check(heads % kv_heads == 0, fact, nearest(heads, kv_heads))
    segment_ids = mask = reach = None
    if given.segment_ids is not None:
        ids = jnp.asarray(given.segment_ids)
        fits = ids.shape == shape[:-2] and length == key_length
        fact = f"segment_ids of shape {ids.shape} are not one for each query"
        check(fits, f"{fact} and key, {shapes}", "Give mask= instead.")
        segment_ids = ids.reshape(-1, length)
    if given.mask is not None:
        mask, full = jnp.asarray(given.mask), (*rows, heads, length, key_length)
        sizes = (*(1,) * (len(full) - mask.ndim), *mask.shape)
        fits = [size in (1, of) for size, of in zip(sizes, full, strict=False)]
        fits = len(sizes) == len(full) and all(fits)
        check(fits, f"mask must be bools that broadcast to {full}, got {mask.shape}")
        lead = sizes[:-3] if {*sizes[:-3]} == {1} else rows
        full = (*lead, sizes[-3], length, key_length)
        mask = jnp.broadcast_to(mask.reshape(sizes) != 0, full)
        groups = (1, 1) if sizes[-3] == 1 else (kv_heads, heads // kv_heads)
        mask = jnp.moveaxis(mask.reshape(-1, *groups, *full[-2:]), 3, 1)
    causal = _checks.choice("causal", given.causal, (True, False), where=where)
    causal = bool(causal or given.flax.get("is_causal"))
    if (window := given.window) is not None:
        pair = window if isinstance(window, Sequence) else (window, window)
        check(len(pair) == 2, f"window is one number or two: {_checks.shown(window)}")
        sizes = [_checks.count("window", x, at_least=0, where=where) for x in pair]
        before, after = sizes[0], 0 if causal else sizes[1]
        is_all = before >= key_length and (causal or after >= key_length)
        reach = None if is_all else (before, after)
    scale = q.shape[-1] ** -0.5 if given.scale is None else given.scale
    scale, softcap = _checks.number("scale", scale, where=where), given.softcap
    if softcap is not None:
        softcap = _checks.number("softcap", softcap, above=0, where=where)
    rules = Rules(causal, reach, scale, softcap, given.precision)
    q = q.reshape(*q.shape[:2], kv_heads, heads // kv_heads, q.shape[-1])
    inputs = Inputs(q, k, v, segment_ids, mask)
    mesh_axis = find_axis(given.axis, given.mesh, where)
    if mesh_axis.size == 1:
        return rules.attend(inputs).reshape(shape)
    # Traced once for all layers of a model, compiled once for calls outside of jit.
    attend = jax.jit(exchange, static_argnames=("axis", "rules"))

    def run(axis: MeshAxis, inputs: Inputs) -> jax.Array:
        return attend(axis, inputs, rules).reshape(shape)

    return on_auto_axes(run, mesh_axis, spec, inputs)


def _by_heads(axis: MeshAxis, inputs: Inputs, rules: Rules) -> jax.Array:
    q, k, v, segment_ids, mask = inputs
    sizes = {"positions": q.shape[1], "positions of keys": k.shape[1]}
    for name, number in {**sizes, "heads of keys": k.shape[2]}.items():
        fact = f"{number} {name} do not divide among {axis.size} devices"
        fact, hint = f"{fact} of mesh axis {axis.name!r}", nearest(number, axis.size)
        hint = f"{hint} ring_attention takes any number."
        require("all_to_all_attention", number % axis.size == 0, fact, hint)

    # By layouts, which the compiler makes all-to-alls of: under `shard_map` along one
    # axis it gathers the shards of all others first.
    by_length, by_heads = {1: axis.name, 3: None}, {1: None, 3: axis.name}

    def split(x: jax.Array) -> jax.Array:
        """Parts the heads, dim 2, into those of one device and the devices."""
        return x.reshape(*x.shape[:2], x.shape[2] // axis.size, axis.size, *x.shape[3:])

    if segment_ids is not None:
        segment_ids = axis.lay(segment_ids, {1: None})
    of_heads = None
    if mask is not None and mask.shape[2] > 1:
        of_heads, mask = 3, split(mask)
    arrays = [axis.lay(axis.lay(split(x), by_length), by_heads) for x in (q, k, v)]
    # Computed again backward: all weights of all layers would not fit.
    local = jax.checkpoint(lambda *arrays: rules.attend(Inputs(*arrays)))
    out = jax.vmap(local, (3, 3, 3, None, of_heads), 3)(*arrays, segment_ids, mask)
    return axis.lay(axis.lay(out, by_heads), by_length).reshape(q.shape)
