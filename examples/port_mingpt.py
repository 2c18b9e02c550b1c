"""minGPT's sorting demo, on one device and on a mesh.

    python examples/port_mingpt.py

Written after the demo of minGPT by Andrej Karpathy (MIT License): a small GPT learns to
sort digits. It reads a sequence, and predicts the same digits in order; only these
predictions count. AdamW with clipped gradients, and a decay for matrices only.

`on_a_mesh` is `one_device` and the lines marked `# mesh`: tensor parallelism, whose
rules are read off the model, by two groups of devices that share the batch. Attention
is split by heads, the MLP by columns and then rows. The model, the optimizer and the
step are not touched.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshlayout as ml


NUM_STEPS, GLOBAL_BATCH_SIZE = 30, 64
NUM_DIGITS, LENGTH = 8, 6
FEATURES, NUM_HEADS, NUM_LAYERS = 64, 4, 2

Batch = tuple[np.ndarray, np.ndarray]


class Block(nnx.Module):
    """Causal attention and an MLP, each added to what goes around it."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.ln_1 = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.query = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.key = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.value = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.proj = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.ln_2 = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.c_fc = nnx.Linear(FEATURES, 4 * FEATURES, rngs=rngs)
        self.c_proj = nnx.Linear(4 * FEATURES, FEATURES, rngs=rngs)

    def attention(self, x: jax.Array) -> jax.Array:
        """Returns what each position takes from itself and those before it."""
        heads = (*x.shape[:2], NUM_HEADS, FEATURES // NUM_HEADS)
        q, k, v = (
            layer(x).reshape(heads) for layer in (self.query, self.key, self.value)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(heads[-1])
        is_seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf))
        return self.proj(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the features after this block."""
        x = x + self.attention(self.ln_1(x))
        return x + self.c_proj(nnx.gelu(self.c_fc(self.ln_2(x))))


class GPT(nnx.Module):
    """Embeddings of digits and positions, blocks, and one logit per digit."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.wte = nnx.Embed(NUM_DIGITS, FEATURES, rngs=rngs)
        self.wpe = nnx.Embed(2 * LENGTH, FEATURES, rngs=rngs)
        self.h = nnx.Sequential(*(Block(rngs=rngs) for _ in range(NUM_LAYERS)))
        self.ln_f = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.lm_head = nnx.Linear(FEATURES, NUM_DIGITS, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the logits of the next digit at each position."""
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1]))
        return self.lm_head(self.ln_f(self.h(x)))


def new_model() -> GPT:
    """Returns the initial model."""
    return GPT(rngs=nnx.Rngs(0))


def new_optimizer(model: GPT) -> nnx.Optimizer:
    """Returns AdamW as minGPT configures it."""

    def is_decayed(params: nnx.State) -> nnx.State:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    adamw = optax.adamw(3e-3, b2=0.95, weight_decay=0.1, mask=is_decayed)
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    return nnx.Optimizer(model, tx, wrt=nnx.Param)


@nnx.jit
def train_step(model: GPT, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    """Updates the model and the optimizer in place; returns the loss."""

    def loss_fn(model: GPT) -> jax.Array:
        tokens, targets = batch
        logits = model(tokens)[:, LENGTH - 1 :]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def batches() -> Iterator[Batch]:
    """Yields sequences followed by themselves in order, and the digits to predict."""
    rng = np.random.default_rng(0)
    for _ in range(NUM_STEPS):
        digits = rng.integers(
            NUM_DIGITS, size=(GLOBAL_BATCH_SIZE, LENGTH), dtype="int32"
        )
        in_order = np.sort(digits)
        yield np.concatenate([digits, in_order[:, :-1]], axis=1), in_order


def one_device() -> list[float]:
    """Trains; returns the loss of each step."""
    model = new_model()
    optimizer = new_optimizer(model)
    losses = []
    for batch in batches():
        losses.append(float(train_step(model, optimizer, batch)))
    return losses


def on_a_mesh() -> list[float]:
    """Trains; returns the loss of each step."""
    mesh = ml.create_mesh({"batch": 2, "model": 4})  # mesh
    tokens, _ = next(batches())  # mesh
    layouts = ml.parallel.tensor_parallel(mesh, new_model, tokens)  # mesh
    with ml.scope(layouts):  # mesh
        model = new_model()
        optimizer = new_optimizer(model)
    losses = []
    for batch in batches():
        batch = ml.relayout(batch, mesh.layout("batch", ...))  # mesh
        losses.append(float(train_step(model, optimizer, batch)))
    return losses


def main() -> None:
    """Trains both ways and prints how far the results are apart."""
    ml.virtual_devices(8)
    before, after = one_device(), on_a_mesh()
    print(f"loss {before[0]:.4f} and {after[0]:.4f} in the first step")
    print(f"loss {before[-1]:.4f} and {after[-1]:.4f} after {NUM_STEPS} steps")


if __name__ == "__main__":
    main()
