"""A decoder-only language model in JAX alone: its parameters are a dict of arrays.

Rotary positions, root-mean-square normalization, attention in which several query heads
may share a key and value head, and a gated MLP. It does not use Flax: `init` makes the
parameters, `apply` calls the model. Matrices keep heads as a dim: `query` is (features,
heads, head features). Every product is an einsum.

Layers are a list of dicts, or one dict of arrays stacked along a first dim, through
which `apply` scans. It is written for one device and has no layout map: the ready-made
rules of `meshlayout.parallel` derive layouts from the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


Params = Mapping[str, Any]


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of the model.

    Attributes:
        vocab_size: Number of tokens in the vocabulary.
        features: Features of each token between the layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads, each for `num_heads / num_kv_heads` query
            heads.
        head_features: Features of each head, an even number.
        num_layers: Number of layers.
        mlp_features: Hidden features of each layer's MLP.
        is_scanned: Whether the layers' parameters are stacked, and `apply` scans.
    """

    vocab_size: int = 256
    features: int = 64
    num_heads: int = 8
    num_kv_heads: int = 4
    head_features: int = 8
    num_layers: int = 2
    mlp_features: int = 256
    is_scanned: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            msg = (
                f"num_heads={self.num_heads} does not divide by "
                f"num_kv_heads={self.num_kv_heads}: every key and value head serves as "
                "many query heads. Change one of them."
            )
            raise ValueError(msg)
        if self.head_features % 2:
            msg = (
                f"head_features={self.head_features} is odd: rotary positions turn "
                "features in pairs. Make it even."
            )
            raise ValueError(msg)


def init(config: GPTConfig, key: jax.Array) -> dict[str, Any]:
    """Returns random parameters.

    Args:
        config: The model's sizes.
        key: A PRNG key.

    Returns:
        A dict of `embed`, `layers`, `norm` and `output`.

    Examples:
        >>> params = init(GPTConfig(num_layers=3), jax.random.key(0))
        >>> len(params["layers"]), params["layers"][0]["attention"]["key"].shape
        (3, (64, 4, 8))
        >>> params = init(GPTConfig(num_layers=3, is_scanned=True), jax.random.key(0))
        >>> params["layers"]["attention"]["key"].shape
        (3, 64, 4, 8)
    """
    embed_key, layers_key, output_key = jax.random.split(key, 3)
    layer_keys = jax.random.split(layers_key, config.num_layers)
    if config.is_scanned:
        layers = jax.vmap(lambda key: init_layer(config, key))(layer_keys)
    else:
        layers = [init_layer(config, key) for key in layer_keys]
    shape = (config.vocab_size, config.features)
    return {
        "embed": jax.random.normal(embed_key, shape),
        "layers": layers,
        "norm": jnp.ones(config.features),
        "output": random_matrix(output_key, shape[::-1], config.features),
    }


def init_layer(config: GPTConfig, key: jax.Array) -> dict[str, Any]:
    """Returns the random parameters of one layer."""
    features, hidden = config.features, config.mlp_features
    heads = (config.num_heads, config.head_features)
    kv_heads = (config.num_kv_heads, config.head_features)
    keys = iter(jax.random.split(key, 7))
    return {
        "attention_norm": jnp.ones(features),
        "attention": {
            "query": random_matrix(next(keys), (features, *heads), features),
            "key": random_matrix(next(keys), (features, *kv_heads), features),
            "value": random_matrix(next(keys), (features, *kv_heads), features),
            "output": random_matrix(
                next(keys), (*heads, features), heads[0] * heads[1]
            ),
        },
        "mlp_norm": jnp.ones(features),
        "mlp": {
            "gate": random_matrix(next(keys), (features, hidden), features),
            "up": random_matrix(next(keys), (features, hidden), features),
            "down": random_matrix(next(keys), (hidden, features), hidden),
        },
    }


def random_matrix(key: jax.Array, shape: tuple[int, ...], num_inputs: int) -> jax.Array:
    """Returns normal numbers whose products with unit inputs have unit variance."""
    return jax.random.normal(key, shape) * num_inputs**-0.5


def apply(params: Params, tokens: jax.Array) -> jax.Array:
    """Returns logits for the token after each one.

    The sizes are those of the parameters.

    Args:
        params: From `init`.
        tokens: Shape (batch, length), int32.

    Returns:
        An array of shape (batch, length, vocab_size).
    """
    x = params["embed"][tokens]
    layers = params["layers"]
    if isinstance(layers, Mapping):
        x, _ = jax.lax.scan(lambda x, layer: (apply_layer(layer, x), None), x, layers)
    else:
        for layer in layers:
            x = apply_layer(layer, x)
    return jnp.einsum("bld,dv->blv", rms_norm(x, params["norm"]), params["output"])


def apply_layer(params: Params, x: jax.Array) -> jax.Array:
    """Returns the features after one layer, of shape (batch, length, features)."""
    x = x + attend(params["attention"], rms_norm(x, params["attention_norm"]))
    x_norm = rms_norm(x, params["mlp_norm"])
    gate = jax.nn.silu(jnp.einsum("bld,df->blf", x_norm, params["mlp"]["gate"]))
    up = jnp.einsum("bld,df->blf", x_norm, params["mlp"]["up"])
    return x + jnp.einsum("blf,fd->bld", gate * up, params["mlp"]["down"])


def attend(params: Params, x: jax.Array) -> jax.Array:
    """Returns causal attention; query heads in equal groups share keys and values.

    Args:
        params: The matrices `query`, `key`, `value` and `output`.
        x: Shape (batch, length, features).

    Returns:
        An array of the shape of `x`; the softmax is in float32.
    """
    query = rotate(jnp.einsum("bld,dhf->blhf", x, params["query"]))
    key = rotate(jnp.einsum("bld,dkf->blkf", x, params["key"]))
    value = jnp.einsum("bld,dkf->blkf", x, params["value"])
    batch, length, num_heads, features = query.shape
    num_kv_heads = key.shape[2]
    grouped = (batch, length, num_kv_heads, num_heads // num_kv_heads, features)
    scores = jnp.einsum("bqkgf,bskf->bkgqs", query.reshape(grouped), key)
    scores = scores.astype("float32") * features**-0.5
    is_past = jnp.tril(jnp.ones((1, 1, 1, length, length), bool))
    weights = jax.nn.softmax(jnp.where(is_past, scores, -jnp.inf)).astype(x.dtype)
    read = jnp.einsum("bkgqs,bskf->bqkgf", weights, value).reshape(query.shape)
    return jnp.einsum("blhf,hfd->bld", read, params["output"])


def rotate(x: jax.Array) -> jax.Array:
    """Turns pairs of features by angles that grow with the token's position.

    Su et al., "RoFormer", 2021; a pair is a feature of the first half and its
    counterpart in the second.

    Args:
        x: Shape (batch, length, heads, head features).
    """
    length, half = x.shape[1], x.shape[-1] // 2
    rates = 10_000.0 ** -(jnp.arange(half) / half)
    angles = jnp.outer(jnp.arange(length), rates)
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divides features by their root mean square, and scales them."""
    mean_square = jnp.mean(jnp.square(x.astype("float32")), axis=-1, keepdims=True)
    x = (x * jax.lax.rsqrt(mean_square + 1e-6)).astype(x.dtype)
    return jnp.einsum("bld,d->bld", x, scale)
