"""Training in plain JAX, Flax and Optax on one device: what any mesh has to agree with.

As a user would write it out, in a loop of Python: nothing is masked or intercepted,
padding is cut off, and nothing is shared with the library's steps. In `batches_of`, one
batch in five is short and padded.
"""

import functools
import inspect
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
    """What came of training; gradients on the host, by path."""

    losses: np.ndarray  # of every step
    gradients: list[dict[str, np.ndarray]]  # of every step
    params: Any  # after the last one
    state: Any  # the model's other arrays, likewise
    average: Any = None  # the moving average of the parameters, likewise
    metrics: tuple[dict[str, float], ...] = ()  # of every step


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


def taken_apart(
    built: Any, module: nn.Module | None, loss_fn: Callable[..., Any]
) -> Any:
    """The parameters, the other arrays, and a function of both and of a batch.

    That returns what the loss function does, what the model records, by name, and the
    other arrays afterwards.
    """
    extras = {"train": True, "rngs": None}
    extras = {
        x: extras[x] for x in extras if x in inspect.signature(loss_fn).parameters
    }
    if module is not None:
        recordings = ("params", "losses", "intermediates")  # of `init`, too
        others = {name: x for name, x in built.items() if name not in recordings}

        def of_linen(params: Any, others: Any, rows: Any, key: jax.Array) -> Any:
            apply = nn.apply(loss_fn, module, mutable=[*others, "losses"])
            values, after = apply({"params": params, **others}, rows, **extras)
            return values, named(after.pop("losses", {})), after

        return built["params"], others, of_linen
    graphdef, *states = nnx.split(built, nnx.Param, ...)

    def of_nnx(params: Any, others: Any, rows: Any, key: jax.Array) -> Any:
        model = nnx.merge(graphdef, params, others)
        model.train()
        drawn = {"rngs": nnx.Rngs(key)} if "rngs" in extras else {}
        values = loss_fn(model, rows, **{**extras, **drawn})
        recorded = named(nnx.to_pure_dict(nnx.pop(model, nnx.Intermediate)))
        return values, recorded, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))

    return *map(nnx.to_pure_dict, states), of_nnx


def named(recorded: Any) -> dict[str, jax.Array]:
    """What a model has recorded or sown, without what is no loss."""
    texts = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    leaves = jax.tree.leaves_with_path(recorded)
    every = {texts(keys).removesuffix("/0"): leaf for keys, leaf in leaves}
    return {name: leaf for name, leaf in every.items() if name != "features"}


def optimizer() -> optax.GradientTransformation:
    """SGD with momentum; linear in the gradients, so that rounding stays rounding.

    The first part of its state is the last gradients, for tests to read.
    """
    keep = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda gradients, state, params=None: (gradients, gradients),
    )
    return optax.chain(keep, optax.sgd(0.002, momentum=0.9))


def train(
    built: Any,
    loss_fn: Callable[..., Any],
    batches: Any,
    tx: optax.GradientTransformation,
    *,
    module: nn.Module | None = None,
    clip_norm: float = np.inf,
    ema: float = 0.0,
    accumulate: int = 1,
    denominator: int | None = None,
    penalties: Any = None,
    frozen: tuple[str, ...] = (),
) -> Run:
    """Trains an NNX module, or a Linen module from its variables, on the real rows.

    Microbatch i of k is rows i, i + k, i + 2k, ...; one follows another, and the
    denominator is the whole batch's. Losses are per example, or a scalar.
    """
    params, others, losses_of = taken_apart(built, module, loss_fn)
    average, opt_state, gradients, metrics = params, tx.init(params), [], []
    clip = optax.clip_by_global_norm(clip_norm)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def slopes_of(params: Any, others: Any, rows: Any, key: Any, total: Any) -> Any:
        values, recorded, others = losses_of(params, others, rows, key)

        def part(losses: jax.Array) -> jax.Array:
            if not losses.ndim:
                return losses / accumulate
            weights = rows.get("weight", np.ones(len(losses), "float32"))
            dims = tuple(range(weights.ndim, losses.ndim))
            return (losses.astype("float32").mean(dims) * weights).sum() / total

        parts = {k: part(x) for k, x in {"data_loss": values, **recorded}.items()}
        return sum(parts.values()), (parts, others)

    def penalties_of(params: Any) -> Any:
        kernels = [x for x in jax.tree.leaves(params) if x.ndim > 1]
        parts = {
            name: factor * sum(power(x).sum() for x in kernels)
            for name, (factor, power) in (penalties or {}).items()
        }
        return sum(parts.values(), 0.0), parts

    @jax.jit
    def update(params: Any, opt_state: Any, grads: Any, average: Any) -> Any:
        grads, _ = clip.update(grads, clip.init(params))
        updates, opt_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates)
        params = {**new, **{name: params[name] for name in frozen}}
        mixed = jax.tree.map(lambda a, x: ema * a + (1 - ema) * x, average, params)
        return params, opt_state, mixed

    for number, batch in enumerate(batches):
        weights = batch.get("weight", np.ones(len(next(iter(batch.values())))))
        key = jax.random.fold_in(jax.random.key(0), number)
        grads, parts = jax.grad(penalties_of, has_aux=True)(params)
        for index in range(accumulate):
            part_key = key if accumulate == 1 else jax.random.fold_in(key, index)
            rows = {name: x[index::accumulate] for name, x in batch.items()}
            shares = weights[index::accumulate]
            is_real = shares.reshape(len(shares), -1).any(axis=1)
            if not is_real.any():
                continue
            rows = {name: x[is_real] for name, x in rows.items()}
            total = np.float32(denominator or weights.sum())
            slopes, (found, others) = slopes_of(params, others, rows, part_key, total)
            grads = jax.tree.map(jnp.add, grads, slopes)
            parts |= {name: x + parts.get(name, 0.0) for name, x in found.items()}
        shown = {"loss": sum(parts.values()), "grad_norm": optax.tree.norm(grads)}
        metrics.append(jax.tree.map(float, shown | parts))
        gradients.append(by_path(grads))
        params, opt_state, average = update(params, opt_state, grads, average)
    losses = np.array([values["loss"] for values in metrics])
    return Run(losses, gradients, params, others, average, (*metrics,))


# Agreement.

# How far two runs may be apart: by the norm of the difference of two arrays, relative to
# that of one. An array that is less than a hundredth of the largest one counts as that:
# the gradient of an attention's key bias is zero, and rounding all there is.
#
# Sums in another order differ by some float32 roundings of 6e-8; after 20 steps by at
# most 1e-6 in values and 1e-5 in gradients, measured. Means that count padding are off
# by 2e-3 in losses and by 1e-1 in gradients.
SMOOTH = {
    "losses": 5e-6,
    "statistics": 5e-6,
    "params": 5e-6,  # after the last step
    "gradients": 5e-5,  # of every step
    "first gradients": 5e-5,  # at the same parameters
}
# Where two inputs of a max-pooling are equal but for rounding, or that of a ReLU is
# zero, one example gives its gradient to another position: 6e-8 between two of a
# million inputs changed a gradient by 3e-3, and parameters by 1e-5. Losses, which are
# continuous there, stay as close as ever.
KINKED = {**SMOOTH, "params": 1e-4, "gradients": 1e-2}


def disagreements(
    found: Run, expected: Run, tolerance: dict[str, float]
) -> dict[str, float]:
    """How far apart two runs are in what is not the same; empty if they agree."""
    steps = zip(found.gradients, expected.gradients, strict=True)
    gradients = [distance(one, other) for one, other in steps]
    apart = {
        "losses": np.max(abs(found.losses / expected.losses - 1)),
        "statistics": distance(by_path(found.state), by_path(expected.state)),
        "params": distance(by_path(found.params), by_path(expected.params)),
        "gradients": np.max(gradients),
        "first gradients": gradients[0],
    }
    # NaN is no agreement.
    return {name: x for name, x in apart.items() if not x <= tolerance[name]}


def distance(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The largest |a - b| / |b| of two dicts of arrays."""
    assert found.keys() == expected.keys()
    norms = {path: np.linalg.norm(x) for path, x in expected.items()}
    least = max(norms.values(), default=0) / 100
    apart = [
        np.linalg.norm(found[path] - x) / max(norms[path], least)
        for path, x in expected.items()
    ]
    return float(np.max(apart, initial=0))
