"""A generative adversarial network for 28x28 images, and its trainer.

Two models and two optimizers: the generator makes images from noise, and the
discriminator tells them from real ones (Goodfellow et al., "Generative Adversarial
Nets", 2014, with the non-saturating loss). Both are updated in one compiled step; the
rest of training is the library's.

Both models are written for one device; the ready-made rules of `meshlayout.parallel`
lay them out on a mesh.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import meshlayout as ml


LATENT_FEATURES = 64


class Generator(nnx.Module):
    """Noise to images: a hidden layer with ReLU, and pixels from -1 to 1."""

    def __init__(self, hidden_features: int = 256, *, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(LATENT_FEATURES, hidden_features, rngs=rngs)
        self.output = nnx.Linear(hidden_features, 28 * 28, rngs=rngs)

    def __call__(self, noise: jax.Array) -> jax.Array:
        """Returns images of shape (batch, 28, 28, 1) from noise (batch, latent)."""
        x = nnx.relu(self.hidden(noise))
        return jnp.tanh(self.output(x)).reshape(-1, 28, 28, 1)


class Discriminator(nnx.Module):
    """Images to one logit each: positive for real ones."""

    def __init__(self, hidden_features: int = 256, *, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(28 * 28, hidden_features, rngs=rngs)
        self.output = nnx.Linear(hidden_features, 1, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits of shape (batch,)."""
        x = images.reshape(images.shape[0], -1)
        return self.output(nnx.leaky_relu(self.hidden(x), 0.2))[:, 0]


MODELS = {"generator": Generator, "discriminator": Discriminator}


def describe_state(
    layouts: ml.LayoutMap | Mapping[str, ml.LayoutMap],
    learning_rate: float = 2e-4,
    *,
    hidden_features: int = 256,
    seed: int = 0,
) -> dict[str, ml.state.StateDescription[ml.TrainState]]:
    """Describes the states of both models, each with its own Adam.

    Args:
        layouts: The layouts of the parameters, for both models or by model.
        learning_rate: The learning rate of both optimizers.
        hidden_features: Hidden features of both models.
        seed: Seeds the parameters and the noise.
    """
    is_one = isinstance(layouts, ml.LayoutMap)
    by_model = dict.fromkeys(MODELS, layouts) if is_one else dict(layouts)

    def state(name: str, key: int) -> ml.state.StateDescription[ml.TrainState]:
        return ml.TrainState.describe(
            lambda: MODELS[name](hidden_features, rngs=nnx.Rngs(key)),
            optax.adam(learning_rate, b1=0.5),
            by_model[name],
            rng=key,
        )

    return {name: state(name, seed + index) for index, name in enumerate(MODELS)}


def create_state(
    layouts: ml.LayoutMap, *args: Any, **kwargs: Any
) -> dict[str, ml.TrainState]:
    """Returns the states that `describe_state` describes."""
    described = describe_state(layouts, *args, **kwargs)
    return {name: state.create() for name, state in described.items()}


def empty_metrics(mesh: ml.Mesh) -> ml.metrics.Metrics:
    """Returns the means of both losses before the first step, on a mesh."""
    means = {name: ml.metrics.Mean() for name in MODELS}
    return ml.relayout(ml.metrics.Metrics(means), mesh.layout(...))


def gan_step(
    state: dict[str, ml.TrainState],
    batch: dict[str, jax.Array],
    metrics: ml.metrics.Metrics,
) -> tuple[dict[str, ml.TrainState], ml.metrics.Metrics]:
    """Updates both models against each other's old parameters.

    Args:
        state: The states of both models.
        batch: Images from -1 to 1, (batch, 28, 28, 1), and their weights.
        metrics: The means of both losses so far.
    """
    images, weights = batch["image"], batch["weight"]
    generator, discriminator = state["generator"], state["discriminator"]
    key = jax.random.fold_in(generator.rng, generator.step)
    noise = jax.random.normal(key, (images.shape[0], LATENT_FEATURES))

    # A mean over the real examples: rows of padding have weight 0.
    def mean(losses: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = ml.losses.weighted_sum(losses, weights)
        return total / ml.losses.denominator_of("real", weights, len(losses)), losses

    def generator_loss(params: Any) -> tuple[jax.Array, jax.Array]:
        fakes = generator.replace(params=params).model(noise)
        return mean(-jax.nn.log_sigmoid(discriminator.model(fakes)))

    def discriminator_loss(params: Any) -> tuple[jax.Array, jax.Array]:
        model = discriminator.replace(params=params).model
        fakes = generator.model(noise)
        real, fake = (
            jax.nn.log_sigmoid(model(images)),
            jax.nn.log_sigmoid(-model(fakes)),
        )
        return mean(-real - fake)

    new_states, new_metrics = {}, {}
    for name, loss in (
        ("generator", generator_loss),
        ("discriminator", discriminator_loss),
    ):
        grads, losses = jax.grad(loss, has_aux=True)(state[name].params)
        new_states[name] = state[name].apply_gradients(grads)
        new_metrics[name] = metrics.metric(name).update(losses, weights)
    return new_states, ml.metrics.Metrics(new_metrics)


class GANTrainer(ml.Trainer):
    """Trains both models: a custom step in the library's loop.

    Args:
        state: The result of `create_state`.
        mesh: The mesh of the state.
    """

    def __init__(self, state: dict[str, ml.TrainState], mesh: ml.Mesh) -> None:
        super().__init__(state)
        self._step = ml.compile_step(gan_step)
        self._empty = empty_metrics(mesh)

    def train_step(self, state: Any, batch: Any, metrics: Any) -> Any:
        """Runs one step of both models."""
        return self._step(state, batch, self._empty if metrics is None else metrics)
