"""`all_to_all_attention`: each device gets the whole sequence for some of the heads.

DeepSpeed-Ulysses (Jacobs et al. 2023): an all-to-all makes shards of heads from shards
of the sequence, and one brings the results back. Which heads: every n-th, so that heads
which are also sharded in order over an axis of the compiler's stay where they are.
"""

import functools
from typing import Any, Unpack

import jax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshlayout import _checks
from meshlayout.errors import LayoutError
from meshlayout.exchange.attention import (
    FlaxArguments,
    Inputs,
    Precision,
    Rules,
    Window,
    attend,
    nearest,
)
from meshlayout.exchange.axes import MeshAxis
from meshlayout.mesh import Mesh


@_checks.user_call
def all_to_all_attention(
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
    """Returns attention over a sequence that is sharded over a mesh axis, by heads.

    As `ring_attention`, with its arguments, result and errors, but each device computes
    whole rows for some of the heads, by `jax.nn.dot_product_attention`. It sends less
    than a ring if there are many devices and as many heads; its memory is that of all
    scores of those heads. The heads of keys and the length must divide among the
    devices, or there is a LayoutError with the nearest numbers that do.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "seq": 4})
        >>> x = jax.random.normal(jax.random.key(0), (2, 32, 4, 8))
        >>> out = all_to_all_attention(x, x, x, axis="seq", causal=True, mesh=mesh)
        >>> whole = jax.nn.dot_product_attention(x, x, x, is_causal=True)
        >>> bool(jax.numpy.allclose(out, whole, atol=1e-5))
        True
    """
    return attend(_by_heads, "all_to_all_attention", **locals())


def _by_heads(axis: MeshAxis, inputs: Inputs) -> jax.Array:
    lengths = {"positions": inputs.q.shape[1], "positions of keys": inputs.k.shape[1]}
    for name, number in {**lengths, "heads of keys": inputs.k.shape[2]}.items():
        if number % axis.size:
            fact = f"{number} {name} do not divide among {axis.size} devices"
            hint = f"{nearest(number, axis.size)} ring_attention takes any number."
            msg = f"all_to_all_attention: {fact} of mesh axis {axis.name!r}. {hint}"
            raise LayoutError(msg)
    arrays = inputs.q, inputs.k, inputs.v, inputs.segment_ids, inputs.mask
    return _attend(axis, inputs.rules, *arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend(axis: MeshAxis, rules: Rules, q: Any, k: Any, v: Any, ids: Any, mask: Any):
    def split(x: jax.Array) -> jax.Array:
        """Parts the heads, dim 2, into those of one device and the devices."""
        return x.reshape(*x.shape[:2], -1, axis.size, *x.shape[3:])

    def to_heads(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(split(x), axis.name, 3, 1, tiled=True)[:, :, :, 0]

    def on_device(q: Any, k: Any, v: Any, ids: Any, mask: Any) -> jax.Array:
        mask = mask if mask is None else mask[:, :, :, 0]
        inputs = Inputs(*map(to_heads, (q, k, v)), ids, mask, rules)
        out = inputs.on_one_device()[:, :, :, None]
        out = jax.lax.all_to_all(out, axis.name, 1, 3, tiled=True)
        return out.reshape(*out.shape[:2], -1, *out.shape[4:])

    along, whole = PartitionSpec(None, axis.name), PartitionSpec()
    mask_spec = whole
    if mask is not None and mask.shape[2] > 1:
        mask, mask_spec = split(mask), PartitionSpec(None, None, None, axis.name)
    elif mask is not None:
        mask = mask[:, :, :, None]
    specs = (along, along, along, whole, mask_spec)
    return axis.shard_map(on_device, specs, along)(q, k, v, ids, mask)
