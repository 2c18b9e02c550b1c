"""Training in raw JAX on one device: what any mesh has to agree with.

Nothing of meshlayout is in here. The mean is over the real rows alone: padding is cut
off, not masked. One batch in five is short and padded.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn, nnx


NUM_STEPS = 20
EPOCH_STEPS = 5
GLOBAL_BATCH_SIZE = 32
# Of eight shards of four rows four are full, one is short, three are all padding.
NUM_REAL_IN_LAST = 19
NUM_CLASSES = 10


@dataclass(frozen=True)
class RawModel:
    """A model, and what its examples look like."""

    make: Callable[[], Any]  # the NNX module; or, for Linen, the variables
    module: nn.Module | None = None  # of Linen
    example_shape: tuple[int, ...] = (8, 8, 1)  # of tokens, (length,)
    weights_shape: tuple[int, ...] = ()  # of an example: (), or (length,) for tokens
    keywords: tuple[tuple[str, Any], ...] = ()  # that the model is called with

    def build(self) -> Any:
        """Makes the NNX module or the variables, with values from NumPy."""
        if self.module is not None:
            return with_values(jax.eval_shape(self.make))
        graphdef, shapes = nnx.split(nnx.eval_shape(self.make))
        return nnx.merge(graphdef, with_values(nnx.to_pure_dict(shapes)))


@dataclass(frozen=True)
class Run:
    """What came of training, on the host; arrays by path."""

    losses: np.ndarray  # of every step
    gradients: list[dict[str, np.ndarray]]  # of every step
    params: dict[str, np.ndarray]  # after the last one
    statistics: dict[str, np.ndarray]  # the model's other floats, likewise


def with_values(shapes: Any) -> Any:
    """Random arrays of these shapes, none of a special value, cheap to make."""
    rng = np.random.default_rng(0)

    def values(keys: Any, leaf: Any) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        noise = 0.1 * rng.normal(size=leaf.shape)
        if len(leaf.shape) > 1:
            noise = 10 * noise / np.sqrt(np.prod(leaf.shape[:-1]))
        elif str(keys[-1].key) in ("scale", "var"):
            noise = 1 + noise
        return jnp.asarray(noise, leaf.dtype)

    return jax.tree_util.tree_map_with_path(values, shapes)


def by_path(tree: Any) -> dict[str, np.ndarray]:
    """The floats in a tree of dicts, on the host."""
    return {
        "/".join(str(key.key) for key in keys): np.asarray(leaf)
        for keys, leaf in jax.tree.leaves_with_path(tree)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }


# Examples.


@functools.cache
def batches_of(model: RawModel) -> tuple[dict[str, np.ndarray], ...]:
    """The batches of all steps, padded to one shape, with weight 0 for padding.

    Training starts with the last batch of an epoch: what a short batch does to the
    gradients is then seen at the initial parameters.
    """
    rng = np.random.default_rng(0)
    count = EPOCH_STEPS * GLOBAL_BATCH_SIZE
    weights = np.ones((count, *model.weights_shape), "float32")
    if len(model.example_shape) == 1:  # tokens
        (length,) = model.example_shape
        tokens = rng.integers(0, NUM_CLASSES, (count, length + 1)).astype("int32")
        inputs, labels = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    else:
        inputs = rng.normal(size=(count, *model.example_shape)).astype("float32")
        labels = rng.integers(0, NUM_CLASSES, count).astype("int32")
    if model.weights_shape:
        weights = rng.choice(np.float32([0, 0.5, 1]), weights.shape)
    padding = slice(count - GLOBAL_BATCH_SIZE + NUM_REAL_IN_LAST, None)
    # Not of zeros, so that what leaks out of it is seen.
    inputs[padding], labels[padding], weights[padding] = 9, 9, 0
    rows = {"input": inputs, "label": labels, "weight": weights}
    epoch = [
        {name: x[start : start + GLOBAL_BATCH_SIZE] for name, x in rows.items()}
        for start in range(0, count, GLOBAL_BATCH_SIZE)
    ]
    return (*[epoch[-1], *epoch[:-1]] * (NUM_STEPS // EPOCH_STEPS),)


# The program.


def taken_apart(model: RawModel) -> tuple[Any, Any, Callable[..., Any]]:
    """The parameters, the other arrays, and a function of both and the inputs."""
    built, keywords = model.build(), dict(model.keywords)
    if model.module is not None:
        module, rest = model.module, dict(built)
        params = rest.pop("params")

        def apply_linen(params: Any, rest: Any, inputs: Any) -> Any:
            variables = {"params": params, **rest}
            return module.apply(variables, inputs, mutable=list(rest), **keywords)

        return params, rest, apply_linen
    graphdef, params, rest = nnx.split(built, nnx.Param, ...)

    def apply(params: Any, rest: Any, inputs: Any) -> tuple[jax.Array, Any]:
        merged = nnx.merge(graphdef, params, rest)
        logits = merged(inputs, **keywords)
        return logits, nnx.to_pure_dict(nnx.state(merged, nnx.Not(nnx.Param)))

    return nnx.to_pure_dict(params), nnx.to_pure_dict(rest), apply


def optimizer() -> optax.GradientTransformation:
    """SGD with momentum; linear in the gradients, so that rounding stays rounding.

    The first part of its state is the last gradients, for tests to read.
    """
    keep = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda gradients, state, params=None: (gradients, gradients),
    )
    return optax.chain(keep, optax.sgd(0.002, momentum=0.9))


def cross_entropies(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """One per label."""
    logs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logs, labels[..., None], axis=-1)[..., 0]


def weighted_mean(losses: jax.Array, weights: jax.Array) -> jax.Array:
    """sum(w * l) / sum(w); where rows have one weight, l is the mean of a row."""
    losses = losses.mean(axis=tuple(range(weights.ndim, losses.ndim)))
    return (losses * weights).sum() / weights.sum()


def right_loss(apply: Any, params: Any, rest: Any, batch: Any) -> Any:
    """The loss of a batch of real rows, and the other arrays after."""
    logits, rest = apply(params, rest, batch["input"])
    losses = cross_entropies(logits, batch["label"])
    return weighted_mean(losses, batch["weight"]), rest


def microbatch_loss(apply: Any, params: Any, rest: Any, batch: Any) -> Any:
    """The same with the batch statistics of four microbatches, one after another.

    Microbatch i is rows i, i + 4, i + 8, ...; the denominator is the whole batch's.
    """
    total = 0.0
    for part in range(4):
        rows = {name: x[part::4] for name, x in batch.items()}
        loss, rest = right_loss(apply, params, rest, rows)
        total += loss * rows["weight"].sum()
    return total / batch["weight"].sum(), rest


def train(model: RawModel, loss: Callable[..., Any] = right_loss) -> Run:
    """Trains in raw JAX on the real rows alone."""
    params, rest, apply = taken_apart(model)
    tx = optimizer()

    @jax.jit
    def step(params: Any, rest: Any, opt_state: Any, batch: Any) -> Any:
        (value, rest), gradients = jax.value_and_grad(
            lambda params: loss(apply, params, rest, batch), has_aux=True
        )(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, rest, opt_state, value, gradients

    opt_state, losses, gradients = tx.init(params), [], []
    for number, batch in enumerate(batches_of(model)):
        num_real = GLOBAL_BATCH_SIZE if number % EPOCH_STEPS else NUM_REAL_IN_LAST
        real = {name: x[:num_real] for name, x in batch.items()}
        params, rest, opt_state, value, slopes = step(params, rest, opt_state, real)
        losses.append(float(value))
        gradients.append(by_path(slopes))
    return Run(np.array(losses), gradients, by_path(params), by_path(rest))


# Agreement.


@dataclass(frozen=True)
class Tolerance:
    """How far two runs may be apart, relative to what is compared.

    Arrays are compared by their norm: |a - b| <= tolerance * |b|. An array that is less
    than a hundredth of the largest one counts as that: the gradient of an attention's
    key bias is zero, and rounding all there is.

    Sums in another order differ by some float32 roundings of 6e-8; after 20 steps by
    at most 1e-6 in values and 1e-5 in gradients, measured. Means that count padding are
    off by 2e-3 in losses and by 1e-1 in gradients.
    """

    values: float = 5e-6  # losses and their means, and batch statistics
    params: float = 5e-6  # after the last step
    gradients: float = 5e-5  # of every step
    first_gradients: float = 5e-5  # at the same parameters


SMOOTH = Tolerance()
# Where two inputs of a max-pooling are equal but for rounding, or that of a ReLU is
# zero, one example gives its gradient to another position: 6e-8 between two of a
# million inputs changed a gradient by 3e-3, and parameters by 1e-5. Losses, which are
# continuous there, stay as close as ever.
KINKED = Tolerance(params=1e-4, gradients=1e-2)


def disagreements(found: Run, expected: Run, tolerance: Tolerance) -> dict[str, str]:
    """What is not the same in two runs, and by how much; empty if they agree."""
    steps = zip(found.gradients, expected.gradients, strict=True)
    apart = [distance(one, other) for one, other in steps]
    times = {
        "losses": np.max(abs(found.losses / expected.losses - 1)) / tolerance.values,
        "first gradients": apart[0] / tolerance.first_gradients,
        "gradients": np.max(apart) / tolerance.gradients,
        "params": distance(found.params, expected.params) / tolerance.params,
        "statistics": distance(found.statistics, expected.statistics)
        / tolerance.values,
    }
    return {
        name: f"{number:.3g} times what is allowed"
        for name, number in times.items()
        if not number <= 1  # NaN is no agreement
    }


def distance(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The largest |a - b| / |b| of two dicts of arrays; see `Tolerance`."""
    assert found.keys() == expected.keys()
    norms = {path: np.linalg.norm(x) for path, x in expected.items()}
    least = max(norms.values(), default=0) / 100
    apart = [
        np.linalg.norm(found[path] - x) / max(norms[path], least)
        for path, x in expected.items()
    ]
    return float(np.max(apart, initial=0))
