"""What a step minimizes: the loss function's result, as the sum of named parts.

The loss function runs once on the model of a state, as a pure function of arrays. What
it returns and what the model records meanwhile are parts of the loss; so are the
regularizers, which do not depend on the batch. Parts stay one number per example for
as long as possible: to add up what is sharded takes a round of communication, and the
compiler can combine it with that of the gradients only if nothing reads it before.
"""

import functools
import inspect
import logging
import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx

from meshlayout import _checks, losses
from meshlayout._annotations import Batch, PyTree
from meshlayout._batches import (
    num_examples,
    weights_of,
)
from meshlayout.errors import LossError, StepError
from meshlayout.losses.reduction import weighted
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.state.precision import PrecisionPolicy
from meshlayout.step.model_call import (
    Interceptors,
    ModuleCall,
    call_model,
)
from meshlayout.step.remat import Remat, Rematting


_log = logging.getLogger("meshlayout")

# The name of the loss function's own part in the metrics.
DATA = "data_loss"

# Names in a step's metrics that no part may have.
RESERVED = (
    "loss",
    DATA,
    "grad_norm",
    "learning_rate",
    "loss_scale",
    "skipped",
)

_RETURNS = (
    "a loss function returns losses of shape (batch, ...), or those and a dict of "
    'outputs for the metrics: return losses, {"logits": logits}.'
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outcome:
    """What a loss function and the model returned.

    Attributes:
        losses: What the loss function returned: per-example losses, or a scalar.
        outputs: Its dict of outputs, or an empty one.
        recorded: The losses that the model recorded, by path.
        model_state: The model's other arrays after the call.
    """

    losses: Any
    outputs: dict[str, Any]
    recorded: dict[str, Any]
    model_state: Any

    def added_to(
        self, metrics: Metrics, batch: Batch, weights: jax.Array | None
    ) -> Metrics:
        """Returns metrics with this batch added."""
        if not metrics:
            return metrics
        is_scalar = jnp.ndim(self.losses) == 0
        return metrics.update_from(
            outputs=self.outputs,
            batch=batch,
            losses=None if is_scalar else losses.per_example(self.losses, weights),
            weights=weights,
        )


@dataclass(frozen=True)
class LossShare:
    """What a part of a global batch contributes to the whole batch's mean.

    Attributes:
        weights: The part's weights, or None for ones.
        denominator: The whole batch's.
        fraction: The part's share of the examples, for scalars.
    """

    weights: jax.Array | None
    denominator: jax.Array
    fraction: float = 1.0


@dataclass(frozen=True)
class Loss:
    """How a batch becomes one number to minimize.

    Attributes:
        loss_fn: The user's function of the model and the batch.
        policy: The dtypes to compute in.
        weights: Where a batch carries its weights.
        denominator: What sums are divided by.
        regularizers: Penalties on parameters.
        remat: What is recomputed.
        train: Whether this is training.
        has_metrics: Whether metrics read the outputs.
    """

    loss_fn: Callable[..., Any]
    policy: PrecisionPolicy
    weights: str | int
    denominator: losses.Denominator
    regularizers: Mapping[str, losses.Regularizer]
    remat: Remat = "none"
    train: bool = False
    has_metrics: bool = False

    def expected_metrics(self) -> list[str]:
        """Returns the names of the loss and its parts, if the model records none."""
        return ["loss", *([DATA, *self.regularizers] if self.regularizers else [])]

    def weights_of(self, batch: Batch) -> jax.Array | None:
        """Returns a batch's weights, or None; NaN for negative ones."""
        # An error cannot be raised on the device; a loss of NaN is noticed.
        weights = weights_of(batch, self.weights)
        return None if weights is None else jnp.where(weights >= 0, weights, jnp.nan)

    def share(self, batch: Batch) -> LossShare:
        """Returns the share of a batch that is the whole batch."""
        weights = self.weights_of(batch)
        count = _num_losses(batch, weights)
        denominator = losses.denominator_of(self.denominator, weights, count)
        return LossShare(weights, denominator)

    def provisional_share(self, batch: Batch) -> tuple[LossShare, jax.Array | None]:
        """Returns a whole batch's share, and the factor that corrects its results.

        The sum of the weights takes the devices a round of communication. Divided by
        their number instead, gradients need not wait for it, and both sums share a
        round.
        """
        share = self.share(batch)
        if share.weights is None or self.denominator != "real":
            return share, None
        count = _num_losses(batch, share.weights)
        return replace(share, denominator=count), count / share.denominator

    def forward(
        self,
        state: TrainState,
        params: PyTree,
        model_state: PyTree,
        batch: Batch,
        key: jax.Array,
        share: LossShare,
    ) -> tuple[dict[str, jax.Array], Outcome]:
        """Calls the loss function, with batch statistics of real rows.

        Args:
            state: Gives the model's structure.
            params: The parameters to use instead of the state's.
            model_state: The model's other arrays, likewise.
            batch: A batch or a microbatch.
            key: For this call's random numbers.
            share: How much it counts.

        Returns:
            The parts of the loss by name, and all that the loss function and the model
            returned. Each part is what its examples contribute, of shape (batch,), or a
            scalar.

        Raises:
            LossError: If there are losses for another number of examples, if the loss
                is a scalar and the batch has weights, or the shapes of losses and
                weights do not fit.
        """
        weights = share.weights
        interceptors: Interceptors = ()
        if self.remat != "none":
            interceptors = (Rematting(self.remat, params),)
        if weights is not None and self.train:
            interceptors = (*interceptors, WeightMask(weights))
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
        outcome = Outcome(values, outputs, recorded, after)
        _check_rows(outcome, num_examples(batch))
        if weights is None or weights.ndim == 1:
            _note_pairs(outcome, num_examples(batch), self.loss_fn)
        if self.has_metrics:  # nothing else reads outputs by name
            _note_hidden(outcome, batch, self.loss_fn)
        return self._parts(outcome, share), outcome

    def _parts(self, outcome: Outcome, share: LossShare) -> dict[str, jax.Array]:
        parts = {DATA: _part("the loss function returned", outcome.losses, share)}
        for path, recorded in outcome.recorded.items():
            if path in RESERVED:
                msg = (
                    f"the model records a loss as {path!r}, which every step reports. "
                    "Record it under another name."
                )
                raise LossError(msg)
            parts[path] = _part(f"the model recorded, as {path!r},", recorded, share)
        return parts

    def penalties(self, params: PyTree) -> dict[str, jax.Array]:
        """Returns the regularizers' penalties by name."""
        return {name: fn(params) for name, fn in self.regularizers.items()}

    def with_penalties(
        self, parts: Mapping[str, jax.Array], penalties: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Returns all parts of the objective, penalties in the order of regularizers.

        Raises:
            LossError: If two have the same name.
        """
        for name in self.regularizers:
            if name in parts:
                msg = (
                    f"a regularizer is called {name!r}, as another part of the loss "
                    "is. Give it another name."
                )
                raise LossError(msg)
        return {**parts, **{name: penalties[name] for name in self.regularizers}}


def _num_losses(batch: Batch, weights: jax.Array | None) -> Any:
    """Returns the number of losses: one per weight, or per example."""
    rows = num_examples(batch)
    # One weight per token makes each token's loss count one.
    return jnp.float32(rows if weights is None else math.prod(jnp.shape(weights)))


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


def _part(what: str, value: jax.Array, share: LossShare) -> jax.Array:
    if jnp.ndim(value) == 0:
        if share.weights is not None:
            msg = (
                f"{what} a scalar, and the batch has weights: it may hold padding, "
                "which a scalar has already averaged in. Return one loss per example, "
                "(batch,), or take the weights out of the batch."
            )
            raise LossError(msg)
        return jnp.asarray(value).astype("float32") * share.fraction
    try:
        each = weighted(losses.per_example(value, share.weights), share.weights)
        return each.reshape(each.shape[0], -1).sum(axis=1) / share.denominator
    except LossError as error:
        msg = f"{what} losses that do not fit: {error}"
        raise LossError(msg) from None


def _check_rows(outcome: Outcome, num_rows: int) -> None:
    """Raises LossError if there are losses for another number of examples."""
    if num_rows == 0:
        msg = "the batch has no examples, and there is nothing to learn from it."
        raise StepError(msg)
    values = {"the loss function's losses": outcome.losses, **outcome.recorded}
    for name, value in values.items():
        if jnp.ndim(value) and jnp.shape(value)[0] != num_rows:
            msg = (
                f"{name} have shape {jnp.shape(value)} in a batch of {num_rows} "
                "examples: the first dim has to be the batch dim."
            )
            raise LossError(msg)


def _note_pairs(outcome: Outcome, num_rows: int, loss_fn: Callable[..., Any]) -> None:
    """Warns of one loss per pair of examples: an accident of broadcasting."""
    shape = jnp.shape(outcome.losses)
    if shape == (num_rows, num_rows) and num_rows > 1:
        _warn_once(
            loss_fn,
            "the losses have shape %s, one for every pair of examples, and are "
            "averaged. Predictions of shape (batch, 1) minus labels of shape (batch,) "
            "give that: take predictions[:, 0].",
            shape,
        )


def _note_hidden(outcome: Outcome, batch: Batch, loss_fn: Callable[..., Any]) -> None:
    """Warns of outputs that hide entries of the batch from metrics."""
    hidden = [
        repr(name)
        for name, value in outcome.outputs.items()
        if isinstance(batch, Mapping) and name in batch and value is not batch[name]
    ]
    if hidden:
        _warn_once(
            loss_fn,
            "the loss function's outputs %s have the names of entries of the batch: "
            "metrics that read these names get the outputs. Rename the outputs if "
            "the entries of the batch are meant.",
            ", ".join(hidden),
        )


# The warnings that each loss function has caused, so that none is repeated per trace.
_warned: weakref.WeakKeyDictionary[Callable[..., Any], set[str]]
_warned = weakref.WeakKeyDictionary()


def _warn_once(loss_fn: Callable[..., Any], warning: str, *args: object) -> None:
    warned = _warned.setdefault(loss_fn, set())
    if warning not in warned:
        warned.add(warning)
        _log.warning(warning, *args)


# Padding.


class WeightMask:
    """Leaves examples of weight 0 out of batch statistics; an `Interceptor`.

    Args:
        weights: The batch's weights, (batch,) or (batch, ...).
    """

    def __init__(self, weights: jax.Array) -> None:
        self._weights = weights

    def __call__(self, call: ModuleCall) -> Callable[..., Any]:
        """Returns a call with a mask, of a BatchNorm that is given none."""
        is_norm = isinstance(call.module, (nn.BatchNorm, nnx.BatchNorm))
        return functools.partial(self._masked, call) if is_norm else call.proceed

    def _masked(self, call: ModuleCall, /, *args: Any, **kwargs: Any) -> Any:
        x, *others = args
        flag = others[0] if others else kwargs.get("use_running_average")
        uses_average = bool(call.module.use_running_average if flag is None else flag)
        if not uses_average and kwargs.get("mask") is None:
            mask = _real_mask(call.path, self._weights, x)
            # Without any real example all count, so that nothing is NaN.
            kwargs = {**kwargs, "mask": mask | ~mask.any()}
        return call.proceed(*args, **kwargs)


def _real_mask(path: str, weights: jax.Array, x: jax.Array) -> jax.Array:
    """Returns which elements are real, in a shape that broadcasts to `x`.

    Raises:
        StepError: If the rows of `x` are not the examples.
    """
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


# Checks.


def check_loss_fn(name: str, where: str, function: Callable[..., Any]) -> None:
    """Raises StepError unless this can be called with a model and a batch.

    Args:
        name: What the argument is called.
        where: The public function.
        function: A loss function, or one that predicts.
    """
    _checks.function(
        name,
        function,
        "model",
        "batch",
        keywords=("rngs", "train") if name == "loss_fn" else (),
        where=where,
        error=StepError,
    )


def check_weights(weights: str | int) -> None:
    """Raises StepError unless this is a key or an index."""
    if not isinstance(weights, (str, int)) or isinstance(weights, bool):
        msg = (
            f"weights must be a key of the batch, as 'weight', or an index, as 2, got "
            f"{_checks.shown(weights)}."
        )
        raise StepError(msg)
