"""What a step minimizes: the loss function's result, as the sum of named parts.

The loss function runs once on the model of a state, as a pure function of arrays. What
it returns and what the model records meanwhile are parts of the loss; so are the
regularizers, which do not depend on the batch. Parts stay one number per example for
as long as possible: to add up what is sharded takes a round of communication, and the
compiler can combine it with that of the gradients only if nothing reads it before.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx

from meshlayout import _checks, losses
from meshlayout._annotations import Batch, PyTree
from meshlayout._batches import num_examples, weights_of
from meshlayout.errors import LossError, MetricError, StepError
from meshlayout.losses.reduction import check_denominator, weighted
from meshlayout.metrics import Metrics
from meshlayout.metrics.inputs import as_metric
from meshlayout.state import TrainState
from meshlayout.state.precision import Precision, PrecisionPolicy, parse_precision
from meshlayout.step.model_call import Interceptor, ModuleCall, call_model
from meshlayout.step.remat import Remat, Rematting, check_remat


# The name of the loss function's own part in the metrics.
DATA = "data_loss"

# Names in a step's metrics that no part may have.
RESERVED = ("loss", DATA, "grad_norm", "learning_rate", "loss_scale", "skipped")

_RETURNS = (
    "a loss function returns losses of shape (batch, ...), or those and a dict of "
    'outputs for the metrics: return losses, {"logits": logits}.'
)


@dataclass(frozen=True)
class Loss:
    """How a batch becomes one number to minimize, and is measured.

    Attributes:
        loss_fn: The user's function of the model and the batch.
        policy: The dtypes to compute in.
        weights: Where a batch carries its weights.
        denominator: What sums are divided by.
        regularizers: Penalties on parameters, by name.
        metrics: The user's metrics, empty.
        remat: What is recomputed.
        train: Whether this is training.
    """

    loss_fn: Callable[..., Any]
    policy: PrecisionPolicy
    weights: str | int
    denominator: losses.Denominator
    regularizers: Mapping[str, losses.Regularizer]
    metrics: Metrics
    remat: Remat = "none"
    train: bool = False

    def weights_of(self, batch: Batch) -> jax.Array | None:
        """Returns a batch's weights, or None; NaN for negative ones."""
        # An error cannot be raised on the device; a loss of NaN is noticed.
        weights = weights_of(batch, self.weights)
        return None if weights is None else jnp.where(weights >= 0, weights, jnp.nan)

    def denominators(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns the number of losses, and by what their weighted sum is divided."""
        weights, rows = self.weights_of(batch), num_examples(batch)
        # One weight per token makes each token's loss count one.
        count = rows if weights is None else math.prod(jnp.shape(weights))
        real = losses.denominator_of(self.denominator, weights, count)
        return jnp.float32(count), real

    def parts(
        self,
        state: TrainState,
        params: PyTree,
        model_state: PyTree,
        batch: Batch,
        key: jax.Array,
        denominator: jax.Array,
        fraction: float = 1.0,
    ) -> tuple[dict[str, jax.Array], tuple[PyTree, jax.Array, dict[str, Any]]]:
        """Calls the loss function, with batch statistics of real rows.

        Args:
            state: Gives the model's structure.
            params: The parameters to use instead of the state's.
            model_state: The model's other arrays, likewise.
            batch: A batch or a microbatch.
            key: For this call's random numbers.
            denominator: What sums are divided by.
            fraction: How much of the whole batch this is.

        Returns:
            The parts of the loss by name, each a scalar or what every example
            contributes, of shape (batch,); and the model's other arrays after, what the
            loss function returned, and its outputs.

        Raises:
            LossError: If there are losses for another number of examples, if the loss
                is a scalar and the batch has weights, or the shapes of losses and
                weights do not fit.
        """
        weights, rows = self.weights_of(batch), num_examples(batch)
        if rows == 0:
            msg = "the batch has no examples, and there is nothing to learn from it."
            raise StepError(msg)
        interceptors: list[Interceptor] = []
        if self.remat != "none":
            interceptors.append(Rematting(self.remat, params))
        if weights is not None and self.train:
            interceptors.append(weight_mask(weights))
        names = inspect.signature(self.loss_fn).parameters

        def function(model: Any) -> Any:
            extras: dict[str, Any] = {"train": self.train} if "train" in names else {}
            if "rngs" in names:
                extras["rngs"] = nnx.Rngs(key)
            return self.loss_fn(model, batch, **extras)

        result, recorded, after = call_model(
            function,
            *(self.policy, state, params, model_state, key, interceptors),
            train=self.train,
        )
        values, outputs = _losses_and_outputs(self.loss_fn, result)
        for name in set(recorded) & {*RESERVED, *self.regularizers}:
            msg = (
                f"the model records a loss as {name!r}, which is also the name of "
                "another number in the step's metrics. Record it under another name."
            )
            raise LossError(msg)
        whats = {f"the model recorded, as {name!r},": name for name in recorded}
        parts = {}
        for what, name in {"the loss function returned": DATA, **whats}.items():
            value = recorded.get(name, values)
            parts[name] = _part(what, value, rows, weights, denominator, fraction)
        return parts, (after, values, outputs)

    def measured(self, values: jax.Array, outputs: Any, batch: Batch) -> Metrics:
        """Returns the user's metrics of one batch.

        Args:
            values: What the loss function returned.
            outputs: Its outputs, by name.
            batch: The batch.
        """
        weights, is_scalar = self.weights_of(batch), jnp.ndim(values) == 0
        return self.metrics.update_from(
            outputs=outputs,
            batch=batch,
            losses=None if is_scalar else losses.per_example(values, weights),
            weights=weights,
        )

    def penalties(self, params: PyTree) -> dict[str, jax.Array]:
        """Returns the regularizers' penalties by name."""
        return {name: penalty(params) for name, penalty in self.regularizers.items()}


def _losses_and_outputs(
    loss_fn: Callable[..., Any], result: Any
) -> tuple[Any, dict[str, Any]]:
    """Returns losses and outputs from what a loss function returned."""
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    outputs: Any = {}
    if isinstance(result, tuple):
        if len(result) != 2 or not isinstance(result[1], Mapping):
            msg = f"{name} returned a tuple of {len(result)}; {_RETURNS}"
            raise StepError(msg)
        result, outputs = result
    if not hasattr(result, "dtype") or not hasattr(result, "shape"):
        msg = f"{name} returned a {type(result).__name__}; {_RETURNS}"
        raise StepError(msg)
    if not jnp.issubdtype(result.dtype, jnp.floating):
        msg = f"{name} returned losses of dtype {result.dtype}; losses are floats."
        raise StepError(msg)
    return result, dict(outputs)


def _part(
    what: str,
    value: jax.Array,
    rows: int,
    weights: jax.Array | None,
    denominator: jax.Array,
    fraction: float,
) -> jax.Array:
    """Returns what each example, or a scalar, contributes to the whole batch's loss."""
    shape = jnp.shape(value)
    if not shape:
        if weights is not None:
            msg = (
                f"{what} a scalar, and the batch has weights: it may hold padding, "
                "which a scalar has already averaged in. Return one loss per example, "
                "(batch,), or take the weights out of the batch."
            )
            raise LossError(msg)
        return jnp.asarray(value).astype("float32") * fraction
    if shape[0] != rows:
        msg = (
            f"{what} losses of shape {shape} in a batch of {rows} examples: the first "
            "dim has to be the batch dim."
        )
        raise LossError(msg)
    try:
        each = weighted(losses.per_example(value, weights), weights)
    except LossError as error:
        msg = f"{what} losses that do not fit: {error}"
        raise LossError(msg) from None
    return each.reshape(rows, -1).sum(axis=1) / denominator


# Padding.


def weight_mask(weights: jax.Array) -> Interceptor:
    """Returns an interceptor that leaves weight 0 out of batch statistics.

    Args:
        weights: The batch's weights, (batch,) or (batch, ...).
    """

    def masked(call: ModuleCall) -> Callable[..., Any]:
        def norm(x: jax.Array, *args: Any, **kwargs: Any) -> Any:
            flag = args[0] if args else kwargs.get("use_running_average")
            if flag is None:
                flag = call.module.use_running_average
            if not flag and kwargs.get("mask") is None:
                mask = _real_mask(call.path, weights, x)
                # Without any real example all count, so that nothing is NaN.
                kwargs = {**kwargs, "mask": mask | ~mask.any()}
            return call.proceed(x, *args, **kwargs)

        is_norm = isinstance(call.module, (nn.BatchNorm, nnx.BatchNorm))
        return norm if is_norm else call.proceed

    return masked


def _real_mask(path: str, weights: jax.Array, x: jax.Array) -> jax.Array:
    """Returns which elements are real, in a shape that broadcasts to `x`."""
    if jnp.shape(x)[:1] != weights.shape[:1]:
        msg = (
            f"{path or 'the model'}: a BatchNorm is called with an array of shape "
            f"{jnp.shape(x)} in a batch with weights for {weights.shape[0]} examples, "
            "so which rows are padding is unknown. Pass it mask= in the model."
        )
        raise StepError(msg)
    real = weights != 0
    # The weights may be per token: as many of their dims as the features have, too.
    dims = 1
    while dims < min(real.ndim, x.ndim - 1) and real.shape[dims] == x.shape[dims]:
        dims += 1
    if dims < real.ndim:
        real = real.any(axis=tuple(range(dims, real.ndim)))
    return real.reshape(real.shape + (1,) * (x.ndim - dims))


# Options.


def check_function(name: str, where: str, function: Callable[..., Any]) -> None:
    """Raises StepError unless `name=` of `where` takes a model and a batch."""
    _checks.function(
        name,
        function,
        "model",
        "batch",
        keywords=("rngs", "train") if name == "loss_fn" else (),
        where=where,
        error=StepError,
    )


def make_loss(
    where: str,
    loss_fn: Callable[..., Any],
    metrics: Mapping[str, Any] | None,
    regularizers: Mapping[str, losses.Regularizer] | None,
    weights: str | int,
    denominator: losses.Denominator,
    precision: Precision,
    remat: Remat = "none",
    *,
    train: bool = False,
) -> Loss:
    """Returns what the options of `where`, `make_train_step` or its like, mean.

    Raises:
        MeshLayoutError: If one of them is wrong.
    """
    check_function("loss_fn", where, loss_fn)
    check_denominator(denominator)
    check_remat(remat)
    if not isinstance(weights, (str, int)) or isinstance(weights, bool):
        msg = (
            f"weights must be a key of the batch, as 'weight', or an index, as 2, got "
            f"{_checks.shown(weights)}."
        )
        raise StepError(msg)
    penalties = {} if regularizers is None else regularizers
    if not isinstance(penalties, Mapping) or not all(map(callable, penalties.values())):
        msg = (
            "regularizers= takes functions of the parameters by name, as "
            f'{{"l2": losses.l2(1e-5)}}, not {_checks.shown(penalties)}.'
        )
        raise StepError(msg)
    users = {} if metrics is None else metrics
    if not isinstance(users, Mapping):
        msg = (
            "metrics= takes a dict from names to metrics, and got a "
            f"{type(users).__name__}."
        )
        raise StepError(msg)
    for kind, names in (("metrics", users), ("regularizers", penalties)):
        for name in names:
            if name in RESERVED or (name in penalties and name in users):
                msg = f"{kind}=: {name!r} is reported by the step; take another name."
                raise StepError(msg)
    empty = {}
    for name, metric in users.items():
        try:
            empty[name] = as_metric(metric)
        except MetricError as error:
            msg = f"metrics=: {name!r}: {error}"
            raise StepError(msg) from None
    return Loss(
        loss_fn,
        parse_precision(precision),
        weights,
        denominator,
        penalties,
        Metrics(empty).empty(),
        remat,
        train,
    )
