"""Models as plain pytrees of parameters, in the shapes that people give them.

Each is a function of its sizes that returns `(build, forward)`: what makes the
parameters, and what calls them on tokens of shape (batch, length). The losses are cross
entropies of the next token.
"""

import functools
import math

import jax
import jax.numpy as jnp


def parameters(shapes, seed=0):
    """A function that makes normal values in a tree of shapes, scaled by the inputs."""

    def build():
        leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: type(x) is tuple)
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        arrays = [
            jax.random.normal(key, shape) / math.sqrt(max(shape))
            for key, shape in zip(keys, leaves, strict=True)
        ]
        return treedef.unflatten(arrays)

    return build


def losses(forward):
    """The loss function of a model that returns logits."""

    def loss(params, tokens):
        logits = forward(params, tokens)[:, :-1]
        log_probs = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)
        return -picked[..., 0].mean(-1)

    return loss


def rms_norm(x, scale):
    scale = scale.reshape(*[1] * (x.ndim - 1), -1)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def rotary(x):
    """Rotates the halves of each head's features by position; (batch, length, ...)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 100.0 ** (jnp.arange(half)[None] / half)
    angles = angles.reshape(1, x.shape[1], *[1] * (x.ndim - 3), half)
    a, b = x[..., :half], x[..., half:]
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def causal(scores):
    return jnp.where(jnp.tril(jnp.ones_like(scores, bool)), scores, -1e9)


def gpt(d=32, heads=4, layers=1, vocab=64, hidden=64, tied=False):
    """Attention by einsum over `(features, heads, head features)`; GELU."""
    head = d // heads
    block = {
        "wq": (d, heads, head),
        "wk": (d, heads, head),
        "wv": (d, heads, head),
        "wo": (heads, head, d),
        "w1": (d, hidden),
        "b1": (hidden,),
        "w2": (hidden, d),
        "n1": (d,),
        "n2": (d,),
    }
    shapes = {"table": (vocab, d), "layers": [block] * layers, "n": (d,)}
    if not tied:
        shapes["unembed"] = (d, vocab)

    def forward(params, tokens):
        x = params["table"][tokens]
        for p in params["layers"]:
            y = rms_norm(x, p["n1"])
            q, k, v = (jnp.einsum("btd,dhk->bthk", y, p[w]) for w in ("wq", "wk", "wv"))
            scores = causal(jnp.einsum("bqhk,bshk->bhqs", rotary(q), rotary(k)))
            read = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), v)
            x = x + jnp.einsum("bqhk,hkd->bqd", read, p["wo"])
            y = jax.nn.gelu(rms_norm(x, p["n2"]) @ p["w1"] + p["b1"][None, None])
            x = x + y @ p["w2"]
        x = rms_norm(x, params["n"])
        return x @ (params["table"].T if tied else params["unembed"])

    return parameters(shapes), forward


def llama_block(d, heads, kv_heads, head, hidden):
    return {
        "attn": {
            "q": (d, heads * head),
            "k": (d, kv_heads * head),
            "v": (d, kv_heads * head),
            "o": (heads * head, d),
            "norm": (d,),
        },
        "ffn": {"gate": (d, hidden), "up": (d, hidden), "down": (hidden, d), "n": (d,)},
    }


def llama_layer(p, x, heads, kv_heads, repeat=False):
    """A block with grouped queries, rotary positions, RMSNorm and SwiGLU."""
    batch, length, _ = x.shape
    a, f = p["attn"], p["ffn"]
    y = rms_norm(x, a["norm"])
    q = rotary((y @ a["q"]).reshape(batch, length, heads, -1))
    k = rotary((y @ a["k"]).reshape(batch, length, kv_heads, -1))
    v = (y @ a["v"]).reshape(batch, length, kv_heads, -1)
    if repeat:
        k, v = (jnp.repeat(z, heads // kv_heads, axis=2) for z in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        read = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(causal(scores)), v)
    else:
        q = q.reshape(batch, length, kv_heads, heads // kv_heads, -1)
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k)
        read = jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(causal(scores)), v)
    x = x + read.reshape(batch, length, -1) @ a["o"]
    y = rms_norm(x, f["n"])
    return x + (jax.nn.silu(y @ f["gate"]) * (y @ f["up"])) @ f["down"]


def llama(
    d=32,
    heads=8,
    kv_heads=4,
    layers=1,
    vocab=64,
    hidden=64,
    head=8,
    repeat=False,
    scanned=False,
    remat=False,
):
    """A Llama-like model; its layers in a list, or stacked for `jax.lax.scan`."""
    block = llama_block(d, heads, kv_heads, head, hidden)
    blocks = [block] * layers
    if scanned:
        is_shape = lambda x: type(x) is tuple
        blocks = jax.tree.map(lambda x: (layers, *x), block, is_leaf=is_shape)
    shapes = {"embed": (vocab, d), "blocks": blocks, "norm": (d,), "head": (d, vocab)}

    def forward(params, tokens):
        x = jnp.take(params["embed"], tokens, axis=0)
        layer = functools.partial(
            llama_layer, heads=heads, kv_heads=kv_heads, repeat=repeat
        )
        if remat:
            layer = jax.checkpoint(layer)
        if scanned:
            x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, params["blocks"])
        else:
            for p in params["blocks"]:
                x = layer(p, x)
        return rms_norm(x, params["norm"]) @ params["head"]

    return parameters(shapes), forward


def fused(d=32, heads=4, vocab=64, order="three heads"):
    """Attention whose query, key and value come from one kernel.

    The kernel's columns are `three heads` (3, heads, features: all queries first) or
    `heads three` (each head's three together).
    """
    shapes = {"embed": (vocab, d), "qkv": (d, 3 * d), "out": (d, d), "head": (d, vocab)}

    def forward(params, tokens):
        x = params["embed"][tokens]
        y = x @ params["qkv"]
        if order == "heads three":
            y = y.reshape(*x.shape[:2], heads, -1)
        parts = jnp.split(y, 3, axis=-1)
        q, k, v = (z.reshape(*x.shape[:2], heads, -1) for z in parts)
        scores = causal(jnp.einsum("bqhk,bshk->bhqs", q, k))
        read = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), v)
        return (x + read.reshape(x.shape) @ params["out"]) @ params["head"]

    return parameters(shapes), forward


def mixture(d=32, vocab=64, hidden=16, experts=8, capacity=None):
    """A router and stacked experts: dispatched by one-hot products, or all for all."""
    shapes = {
        "embed": (vocab, d),
        "router": (d, experts),
        "up": (experts, d, hidden),
        "bias": (experts, hidden),
        "down": (experts, hidden, d),
        "head": (d, vocab),
    }

    def forward(params, tokens):
        x = params["embed"][tokens]
        gates = jax.nn.softmax(x @ params["router"])
        if capacity is None:
            y = jnp.einsum("btd,edh->bteh", x, params["up"])
            y = y + params["bias"][None, None]
            y = jnp.einsum("bteh,ehd->bted", jax.nn.relu(y), params["down"])
            x = x + jnp.einsum("bted,bte->btd", y, gates)
        else:
            weights, chosen = jax.lax.top_k(gates, 2)
            routes = jax.nn.one_hot(chosen, experts) * weights[..., None]
            mask = routes.sum(2)  # (batch, length, experts)
            place = jnp.cumsum(mask > 0, axis=1) - 1
            sent = jax.nn.one_hot(place, capacity) * mask[..., None]
            inputs = jnp.einsum("btec,btd->ebcd", sent > 0, x)
            y = jnp.einsum("ebcd,edh->ebch", inputs, params["up"])
            y = jax.nn.relu(y + params["bias"][:, None, None])
            y = jnp.einsum("ebch,ehd->ebcd", y, params["down"])
            x = x + jnp.einsum("ebcd,btec->btd", y, sent)
        return x @ params["head"]

    return parameters(shapes), forward
