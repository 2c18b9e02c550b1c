"""GPT-2's published weights, restored onto a mesh: each device reads its own slices.

    python examples/restore_gpt2.py model.safetensors

The file is `model.safetensors` of any GPT-2 on Hugging Face, such as
https://huggingface.co/openai-community/gpt2/resolve/main/model.safetensors. Without a
file, the program writes a small one with the same names and made-up numbers.

Parameters are sharded over all devices (FSDP), and no device or host ever holds the
whole model. The names in the file differ from the paths in this model, whose layers
could be anybody's: `RENAME` translates them.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

import meshlayout as ml


HEAD_FEATURES = 64

# From the names in the file to the paths of the model: the first pattern that matches.
RENAME = {
    r"^wte\.weight$": "tokens/embedding",
    r"^wpe\.weight$": "positions/embedding",
    r"^ln_f\.weight$": "norm/scale",
    r"^ln_f\.": "norm/",
    r"^h\.(\d+)\.(ln_\d)\.weight$": r"blocks/\1/\2/scale",
    r"^h\.(\d+)\.(.+)\.weight$": r"blocks/\1/\2/kernel",
    r"^h\.": "blocks/",
}


class Block(nnx.Module):
    """Causal attention and an MLP, each added to what goes around it."""

    def __init__(self, features: int, *, rngs: nnx.Rngs) -> None:
        self.ln_1 = nnx.LayerNorm(features, epsilon=1e-5, rngs=rngs)
        self.attn = nnx.Dict(
            c_attn=nnx.Linear(features, 3 * features, rngs=rngs),
            c_proj=nnx.Linear(features, features, rngs=rngs),
        )
        self.ln_2 = nnx.LayerNorm(features, epsilon=1e-5, rngs=rngs)
        self.mlp = nnx.Dict(
            c_fc=nnx.Linear(features, 4 * features, rngs=rngs),
            c_proj=nnx.Linear(4 * features, features, rngs=rngs),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the features after this block."""
        parts = jnp.split(self.attn.c_attn(self.ln_1(x)), 3, axis=-1)
        q, k, v = (part.reshape(*x.shape[:2], -1, HEAD_FEATURES) for part in parts)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn.c_proj(mixed.reshape(x.shape))
        return x + self.mlp.c_proj(nnx.gelu(self.mlp.c_fc(self.ln_2(x))))


class GPT2(nnx.Module):
    """GPT-2 with the sizes of a file."""

    def __init__(self, sizes: dict[str, int], *, rngs: nnx.Rngs) -> None:
        features = sizes["features"]
        self.tokens = nnx.Embed(sizes["vocab"], features, rngs=rngs)
        self.positions = nnx.Embed(sizes["length"], features, rngs=rngs)
        blocks = [Block(features, rngs=rngs) for _ in range(sizes["layers"])]
        self.blocks = nnx.data(blocks)
        self.norm = nnx.LayerNorm(features, epsilon=1e-5, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the logits of the next token at every position."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def sizes_of(file: Path) -> dict[str, int]:
    """Reads the model's sizes off a file, and no weights."""
    with safe_open(file, "numpy") as content:
        vocab, features = content.get_slice("wte.weight").get_shape()
        length, _ = content.get_slice("wpe.weight").get_shape()
        names = content.keys()
        layers = sum(name.endswith("c_fc.weight") for name in names)
    return {"vocab": vocab, "features": features, "length": length, "layers": layers}


def restore(file: Path, mesh: ml.Mesh) -> GPT2:
    """Returns the model with the file's weights, sharded over the mesh."""
    sizes = sizes_of(file)
    layouts = ml.parallel.fsdp(mesh)
    described = ml.describe(lambda: GPT2(sizes, rngs=nnx.Rngs(0)), layouts)
    causal_masks = r"\battn/bias$"  # in the file, and not needed
    return ml.checkpoint.load_safetensors(
        file, described, rename=RENAME, partial=[causal_masks]
    )


def write_small_file(file: Path) -> None:
    """Writes a file with the names of GPT-2, two layers, and made-up numbers."""
    rng, features = np.random.default_rng(0), 128
    matrices = {
        "attn.c_attn": (features, 3 * features),
        "attn.c_proj": (features, features),
        "mlp.c_fc": (features, 4 * features),
        "mlp.c_proj": (4 * features, features),
    }
    weights: dict[str, Any] = {
        "wte.weight": rng.normal(size=(512, features)),
        "wpe.weight": rng.normal(size=(64, features)),
    }
    for layer in range(2):
        weights[f"h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 64, 64)))
        for name, shape in matrices.items():
            weights[f"h.{layer}.{name}.weight"] = 0.1 * rng.normal(size=shape)
            weights[f"h.{layer}.{name}.bias"] = np.zeros(shape[1])
    for name in ("h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f"):
        weights[f"{name}.weight"] = np.ones(features)
        weights[f"{name}.bias"] = np.zeros(features)
    save_file({name: x.astype("float32") for name, x in weights.items()}, file)


def main(arguments: list[str]) -> None:
    """Restores a file onto all devices, and compares with one device."""
    ml.virtual_devices(8)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(arguments[0]) if arguments else Path(folder) / "model.safetensors"
        if not arguments:
            write_small_file(file)
        mesh = ml.create_mesh({"fsdp": -1})
        model = restore(file, mesh)
        single = restore(file, ml.create_mesh({"fsdp": 1}, devices=jax.devices()[:1]))
    print(ml.parallel.fsdp(mesh).explain(model))
    tokens = np.arange(8 * 16).reshape(8, 16)
    logits = model(ml.relayout(tokens, mesh.layout("fsdp", None)))
    np.testing.assert_allclose(logits, single(tokens), rtol=1e-4, atol=1e-3)
    print(f"logits {logits.shape}, equal on {mesh.size} devices and on one")


if __name__ == "__main__":
    main(sys.argv[1:])
