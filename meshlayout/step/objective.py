"""What a step minimizes and measures: the loss, as the sum of named parts, and metrics.

The loss function runs once on the model of a state, as a pure function of arrays. What
it returns and what the model records meanwhile are parts of the loss; so are the
regularizers, which do not depend on the batch. Parts stay one number per example for
as long as possible: to add up what is sharded takes a round of communication, and the
compiler can combine it with that of the gradients only if nothing reads it before.
"""

import inspect
import operator
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _checks, _jax, losses
from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout._batches import check_weights_key, get_weights, num_examples, weights_of
from meshlayout.errors import LossError, MetricError, StepError, warn
from meshlayout.metrics import Last, Mean, Metrics, Sum
from meshlayout.state import TrainState
from meshlayout.step import model_call


# The name of the loss function's own part in the metrics.
DATA = "data_loss"

# Notes of an update that are not averaged over the examples.
_KINDS: dict[str, Any] = {"learning_rate": Last, "loss_scale": Last, "skipped": Sum}

# Names in a step's metrics that no part, and no metric of a user's, may have.
RESERVED = ("loss", DATA, "grad_norm", *_KINDS)

# Loss functions of whose shapes a step has warned.
_warned: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


@dataclass(frozen=True)
class Loss:
    """How a batch becomes one number to minimize, and how it is measured."""

    loss_fn: Callable[..., Any]
    policy: model_call.PrecisionPolicy
    weights: str | int  # where a batch carries them
    denominator: losses.Denominator
    regularizers: Mapping[str, losses.Regularizer]
    metrics: Metrics  # the user's, empty
    remat: model_call.Remat = "none"
    train: bool = False

    def weights_of(self, batch: Batch) -> jax.Array | None:
        """Returns a batch's weights, or None; NaN for negative ones."""
        # An error cannot be raised on the device; a loss of NaN is noticed.
        weights = weights_of(batch, self.weights)
        if weights is None:
            return None
        return jnp.where(weights >= 0, weights, jnp.nan).astype("float32")

    def total_weight(self, batch: Batch) -> jax.Array:
        """Returns the weight of a batch's examples; 0 for a batch of padding alone."""
        weights = self.weights_of(batch)
        return jnp.float32(num_examples(batch)) if weights is None else weights.sum()

    def denominators(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns the number of losses, and by what their weighted sum is divided."""
        weights = self.weights_of(batch)
        # One weight per token makes each token's loss count one.
        count = num_examples(batch) if weights is None else weights.size
        real = losses.denominator_of(self.denominator, weights, count)
        return jnp.float32(count), real

    def parts(
        self,
        state: TrainState,
        batch: Batch,
        key: jax.Array,
        denominator: jax.Array,
        fraction: float = 1.0,
    ) -> tuple[dict[str, jax.Array], tuple[PyTree, jax.Array, dict[str, Any]]]:
        """Returns the parts of the loss on a (micro)batch, a fraction of the whole one.

        Each is a scalar, or what every example contributes, of shape (batch,). Then the
        model's other arrays after, and the losses and outputs of the loss function.
        """
        weights, rows = self.weights_of(batch), num_examples(batch)
        if rows == 0:
            msg = "the batch has no examples, and there is nothing to learn from it."
            raise StepError(msg)
        interceptors: list[model_call.Interceptor] = []
        if self.remat != "none":
            interceptors.append(model_call.rematting(self.remat, state.params))
        if weights is not None and self.train:
            interceptors.append(model_call.weight_mask(weights))
        names = inspect.signature(self.loss_fn).parameters

        def function(model: Any) -> Any:
            options = {"train": self.train, "rngs": nnx.Rngs(key)}
            options = {name: x for name, x in options.items() if name in names}
            return self.loss_fn(model, batch, **options)

        result, recorded, after = model_call.call_model(
            function, self.policy, state, key, interceptors, train=self.train
        )
        if self.train and state.program.module and "train" not in names:
            _check_mode(state.model_state, after)
        values, outputs = _losses_and_outputs(self.loss_fn, result)
        if rows > 1 and jnp.shape(values) == (rows, rows):
            self._check_broadcast(batch, rows)
        for name in set(recorded) & {*RESERVED, *self.regularizers, *self.metrics}:
            msg = f"the model records a loss as {name!r}, as the step: rename it."
            raise LossError(msg)

        def part(what: str, value: jax.Array) -> jax.Array:
            if not jnp.ndim(value) and weights is None:
                return jnp.asarray(value).astype("float32") * fraction
            each = _weighted_rows(what, value, weights, rows)
            return each.reshape(rows, -1).sum(axis=1) / denominator

        parts = {DATA: part("the loss function returned", values)}
        for name, value in recorded.items():
            parts[name] = part(f"the model recorded, as {name!r},", value)
        return parts, (after, values, outputs)

    def _check_broadcast(self, batch: Batch, rows: int) -> None:
        """Warns of losses of shape (rows, rows), of each row with each label."""
        weights = get_weights(batch, self.weights)
        shapes = [np.shape(x) for x in jax.tree.leaves(batch) if x is not weights]
        has_labels = any(shape in ((rows,), (rows, 1)) for shape in shapes)
        is_square = any(shape[1:2] == (rows,) for shape in shapes)
        if has_labels and not is_square and self.loss_fn not in _warned:
            _warned.add(self.loss_fn)
            fact = f"losses have shape {(rows, rows)} for {rows} rows: {(rows, 1)} and"
            fact += f" {(rows,)} broadcast. Take the column of the one that has it:"
            warn(f"{fact} model(x)[:, 0] or y[:, 0].")

    def measured(
        self, values: jax.Array, outputs: Mapping[str, Any], batch: Batch
    ) -> Metrics:
        """Returns the user's metrics of what the loss function returned for a batch."""
        weights = self.weights_of(batch)
        each = losses.per_example(values, weights) if jnp.ndim(values) else None
        return self.metrics.update_from(
            outputs=outputs, batch=batch, losses=each, weights=weights
        )


def _check_mode(before: PyTree, after: PyTree) -> None:
    """Warns of a Linen module's batch statistics that a train step does not change."""
    stats, new = (jax.tree.leaves(x.get("batch_stats")) for x in (before, after))
    if stats and all(map(operator.is_, stats, new)):
        msg = "batch_stats do not change in this train step: the Linen module runs in "
        msg += "evaluation mode, without dropout. Write def loss_fn(model, batch, "
        msg += "train), and in it model(x, train=train)."
        warn(msg)


def _losses_and_outputs(
    loss_fn: Callable[..., Any], result: PyTree
) -> tuple[Any, dict[str, Any]]:
    is_pair = isinstance(result, tuple) and len(result) == 2
    values, outputs = result if is_pair else (result, {})
    dtype = getattr(values, "dtype", np.void)
    if not jnp.issubdtype(dtype, jnp.floating) or not isinstance(outputs, Mapping):
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        texts = [
            f"an array of {x.dtype}" if hasattr(x, "dtype") else _checks.type_text(x)
            for x in (result if isinstance(result, tuple) else [result])
        ]
        raise StepError(
            f"{name} returned {' and '.join(texts)}; a loss function returns losses, "
            "floats of shape (batch, ...), or those and a dict of outputs for the "
            'metrics: return losses, {"logits": logits}.'
        )
    return values, dict(outputs)


def _weighted_rows(
    what: str, value: jax.Array, weights: jax.Array | None, rows: int
) -> jax.Array:
    shape = jnp.shape(value)
    if not shape:
        raise LossError(
            f"{what} a scalar, and the batch has weights, 0 for padding. Return a loss "
            "per example, (batch,); for a scalar, distribute_dataset(remainder='drop')."
        )
    if shape[0] != rows:
        raise LossError(
            f"{what} losses of shape {shape} in a batch of {rows} examples: the first "
            "dim has to be the batch dim."
        )
    try:
        return losses.weighted(losses.per_example(value, weights), weights)
    except LossError as error:
        raise LossError(f"{what} losses that do not fit: {error}") from None


def metrics_of_batch(
    parts: Mapping[str, jax.Array],
    notes: Mapping[str, jax.Array],
    weight: jax.Array,
    users: Metrics,
) -> Metrics:
    """Returns the metrics of one batch: of the loss, of the update, the user's."""
    total = sum(parts.values(), jnp.float32(0))
    values = {"loss": total, **(parts if len(parts) > 1 else {}), **notes}
    # As a batch of one; of an update, every step counts the same.
    weight = jnp.asarray(weight, "float32").reshape(1)
    weights = dict.fromkeys(notes, jnp.sign(weight))
    metrics: dict[str, Any] = {
        name: _KINDS[name]().update(value)
        if name in _KINDS
        else Mean().update(jnp.reshape(value, 1), weights.get(name, weight))
        for name, value in values.items()
    }
    return Metrics({**metrics, **{name: users.metric(name) for name in users}})


def merged(metrics: Metrics | None, measured: Metrics) -> Metrics:
    """Returns the metrics of earlier batches, if any, and of one more, inside jit."""
    if metrics is None:
        return measured
    try:
        metrics = metrics.merge(measured)
    except MetricError as error:
        msg = f"{error} Start with None, and pass on what the step returned."
        raise StepError(msg) from None
    mesh = jax.sharding.get_abstract_mesh()

    def settled(leaf: Leaf) -> Any:
        # Weak types, or a sum that the compiler shards, would recompile the next call.
        leaf = _jax.with_weak_type(leaf, weak_type=False)
        whole = NamedSharding(mesh, PartitionSpec())
        return leaf if mesh.empty else _jax.constrain(leaf, whole)

    return jax.tree.map(settled, metrics)


def check_batch(batch: Batch, key: str | int | None) -> None:
    """Raises StepError if the weights of a batch are elsewhere, or not weights."""
    if key is None:
        return
    check_weights_key(batch, key)
    weights = get_weights(batch, key)
    # On devices, reading them would mean waiting. There, the loss becomes NaN instead.
    on_host = isinstance(weights, np.ndarray) and weights.dtype.kind in "fiu"
    is_wrong = ~((weights >= 0) & np.isfinite(weights)) if on_host else np.False_
    if is_wrong.any():
        wrong, first = f"{is_wrong.sum()} of {is_wrong.size}", weights[is_wrong][0]
        fact = f"weights must be finite and not negative; of {key!r}, {wrong} are not,"
        raise StepError(f"{fact} such as {first}.")


def make_loss(
    where: str,
    loss_fn: Callable[..., Any],
    metrics: Mapping[str, Any] | None,
    regularizers: Mapping[str, losses.Regularizer] | None,
    weights: str | int,
    denominator: losses.Denominator,
    precision: model_call.Precision,
    remat: model_call.Remat = "none",
    *,
    train: bool = False,
) -> Loss:
    """Returns the checked options of `where`: `make_train_step` or the like."""
    context: Any = {"keywords": ("rngs", "train"), "where": where, "error": StepError}
    _checks.function("loss_fn", loss_fn, "model", "batch", **context)
    choices = get_args(losses.Denominator)
    _checks.choice("denominator", denominator, choices, error=LossError)
    if isinstance(remat, type) or not callable(remat):
        hint = "Or give one of jax.checkpoint_policies, for the numbered blocks."
        options: Any = {"hint": hint, "error": StepError}
        _checks.choice("remat", remat, ("none", "blocks", "full"), **options)
    if not isinstance(weights, (str, int)) or isinstance(weights, bool):
        raise StepError(
            f"weights must be a key of the batch, as 'weight', or an index, as 2, got "
            f"{_checks.shown(weights)}."
        )
    penalties = {} if regularizers is None else regularizers
    if not isinstance(penalties, Mapping) or not all(map(callable, penalties.values())):
        raise StepError(
            "regularizers= takes functions of the parameters by name, as "
            f'{{"l2": losses.l2(1e-5)}}, not {_checks.shown(penalties)}.'
        )
    users = Metrics({} if metrics is None else metrics)
    for name in (*users, *penalties):
        if name in RESERVED or (name in penalties and name in users):
            kind = "metrics" if name in users else "regularizers"
            msg = f"{kind}=: {name!r} is reported by the step; take another name."
            raise StepError(msg)
    policy = model_call.parse_precision(precision)
    basis = loss_fn, policy, weights, denominator, penalties
    return Loss(*basis, users.empty(), remat, train)
