"""The language model in JAX alone, against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import gpt
from models.gpt import GPTConfig


SMALL = GPTConfig(
    vocab_size=16,
    features=8,
    num_heads=4,
    num_kv_heads=2,
    head_features=4,
    num_layers=2,
    mlp_features=12,
)


def random_tokens(*shape):
    return np.random.default_rng(0).integers(0, SMALL.vocab_size, shape).astype("int32")


def rotated(x, position):
    """One head's features of one token, pair by pair as complex numbers."""
    half = len(x) // 2
    angles = position * 10_000.0 ** -(np.arange(half) / half)
    turned = (x[:half] + 1j * x[half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag])


def rms_norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def numpy_logits(params, tokens, config):
    """The model on one sequence, token by token and head by head, in float64."""
    x = params["embed"][tokens]
    group = config.num_heads // config.num_kv_heads
    for layer in params["layers"]:
        y, attention = rms_norm(x, layer["attention_norm"]), layer["attention"]
        read = np.zeros_like(x)
        for head in range(config.num_heads):
            shared = head // group
            query = y @ attention["query"][:, head]
            key, value = (y @ attention[name][:, shared] for name in ("key", "value"))
            query = np.stack([rotated(q, at) for at, q in enumerate(query)])
            key = np.stack([rotated(k, at) for at, k in enumerate(key)])
            scores = query @ key.T / np.sqrt(config.head_features)
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            read += weights @ value @ attention["output"][head]
        x = x + read
        y, mlp = rms_norm(x, layer["mlp_norm"]), layer["mlp"]
        gate = y @ mlp["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ mlp["up"])) @ mlp["down"]
    return rms_norm(x, params["norm"]) @ params["output"]


def with_random_scales(params):
    """Parameters whose normalizations do something."""
    keys = iter(jax.random.split(jax.random.key(1), 100))
    return jax.tree.map(
        lambda x: x * (1 + 0.1 * jax.random.normal(next(keys), x.shape)), params
    )


@pytest.mark.parametrize(
    "num_kv_heads", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))]
)
def test_the_model_is_what_numpy_computes(num_kv_heads):
    config = dataclasses.replace(SMALL, num_kv_heads=num_kv_heads)
    params = with_random_scales(gpt.init(config, jax.random.key(0)))
    wide = jax.tree.map(lambda x: np.asarray(x, "float64"), params)
    tokens = random_tokens(2, 6)
    expected = [numpy_logits(wide, row, config) for row in tokens]
    logits = jax.jit(gpt.apply)(params, tokens)
    np.testing.assert_allclose(logits, expected, atol=2e-5)  # float32's rounding


def test_scanned_layers_compute_what_listed_ones_do():
    params = with_random_scales(gpt.init(SMALL, jax.random.key(0)))
    stacked = {
        **params,
        "layers": jax.tree.map(lambda *x: jnp.stack(x), *params["layers"]),
    }
    scanned = dataclasses.replace(SMALL, is_scanned=True)
    shapes = jax.eval_shape(lambda: gpt.init(scanned, jax.random.key(0)))
    assert jax.tree.map(jnp.shape, stacked) == jax.tree.map(jnp.shape, shapes)
    tokens = random_tokens(2, 6)
    np.testing.assert_allclose(
        jax.jit(gpt.apply)(stacked, tokens),
        jax.jit(gpt.apply)(params, tokens),
        atol=1e-5,
    )


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"^num_heads=4 does not divide by num_kv_hea"):
        dataclasses.replace(SMALL, num_kv_heads=3)
    with pytest.raises(ValueError, match=r"^head_features=3 is odd: rotary positions"):
        dataclasses.replace(SMALL, head_features=3)
