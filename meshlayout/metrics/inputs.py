"""Where a metric's arguments come from: the outputs of the step, or its batch.

Everything is found by name, so that one dict of metrics serves any model. Outputs come
first: a loss function that returns `label` means that one rather than the batch's.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from meshlayout._annotations import Batch, Leaf
from meshlayout._checks import real_array, shown
from meshlayout.errors import MetricError
from meshlayout.metrics.classification import Accuracy
from meshlayout.metrics.metric import Mean, Metric, find


_PROTOCOL = ("empty", "from_model_output", "merge", "compute")


def as_metric(metric: object) -> Any:
    """Returns an object that follows the protocol of clu and metrax, or MetricError.

    Args:
        metric: One of this library; a class or an instance of clu or metrax; or nnx's
            Average or Accuracy, which become `Mean` and `Accuracy`.
    """
    if isinstance(metric, type) and issubclass(metric, (Metric, nnx.metrics.Metric)):
        name = metric.__name__
        msg = f"{name} is a class, and a metric is an instance of it: call {name}()."
        raise MetricError(msg)
    if type(metric) is nnx.metrics.Average:
        return Mean(metric.argname)
    if type(metric) is nnx.metrics.Accuracy:
        threshold = metric.threshold
        if threshold is not None:  # theirs counts a score at the threshold as 1
            threshold = float(np.nextafter(np.float32(threshold), np.float32(-np.inf)))
        return Accuracy(labels="labels", threshold=threshold)
    if not all(hasattr(metric, name) for name in _PROTOCOL):
        msg = (
            f"{shown(metric)} is not a metric: it must have {', '.join(_PROTOCOL)}, "
            "like those of this library, clu and metrax, or be nnx's Average or "
            "Accuracy."
        )
        raise MetricError(msg)
    return metric.empty() if isinstance(metric, type) else metric


def named_inputs(
    outputs: Mapping[str, Any] | None, batch: Batch, losses: ArrayLike | None
) -> dict[str, Any]:
    """Returns all inputs of a step by name; those of a tuple are "0", "1" and so on."""
    if outputs is not None and not isinstance(outputs, Mapping):
        msg = (
            f"outputs is {shown(outputs)}; metrics find them by name, so it must be a "
            "dict, such as {'logits': logits}."
        )
        raise MetricError(msg)
    entries = batch.items() if isinstance(batch, Mapping) else ()
    if isinstance(batch, (tuple, list)):
        entries = enumerate(batch)
    named = {str(name): value for name, value in entries}
    return {"losses": losses, "batch": batch, **named, **(outputs or {})}


def measured(
    metric: Any, named: Mapping[str, Any], weights: ArrayLike | None = None
) -> Any:
    """Returns the metric of one batch alone, from the inputs of a step by name.

    A built-in metric has the names in its fields. For any other, each parameter of its
    `from_model_output` gets the input of that name, and `**kwargs` gets all. Elements
    of weight 0 are set to 0 before it sees them, so that NaN in them cannot leak;
    `mask` gets whether weights are not 0, `weights` and `sample_weights` the weights.

    Raises:
        MetricError: If an argument is not found, or does not fit; or if there are
            weights, and the metric cannot leave anything out.
    """
    if isinstance(metric, Metric):
        return metric.from_model_output(**{**named, "weights": weights})
    where = f"{type(metric).__module__.partition('.')[0]}'s {type(metric).__name__}"
    parameters = inspect.signature(metric.from_model_output).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    known = {p.name: p for p in parameters if p.kind not in variable}
    values = dict(named)
    if weights is not None:
        counts = real_array("weights", weights, where=where, error=MetricError)
        values = {name: _blanked(x, counts) for name, x in values.items()}
        every = {"mask": counts != 0, "weights": counts, "sample_weights": counts}
        masks = {name: x for name, x in every.items() if name in known}
        if not masks and not takes_any:
            msg = (
                f"{where} takes neither 'mask' nor 'sample_weights', so it cannot "
                "leave out what has weight 0. Use a metric of meshlayout.metrics, or "
                "batches without padding and weights."
            )
            raise MetricError(msg)
        # A function of **kwargs alone is a composition, which passes a mask on.
        values |= masks or {"mask": counts != 0}
    for name, parameter in known.items():
        if parameter.default is parameter.empty:
            find(values, name, where)
    taken = {name: x for name, x in values.items() if takes_any or name in known}
    return metric.from_model_output(**taken)


def _blanked(value: Leaf, weights: jax.Array) -> Leaf:
    """Returns a value with 0 where the weight is 0."""
    # A value of another shape is not per element, and integers cannot be NaN.
    if getattr(value, "shape", (None,))[: weights.ndim] != weights.shape:
        return value
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    missing = tuple(range(weights.ndim, value.ndim))
    return jnp.where(jnp.expand_dims(weights, missing) != 0, value, 0)
