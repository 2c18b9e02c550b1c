"""Where a metric's arguments come from: the outputs of the step, or its batch.

Everything is found by name, so that one dict of metrics serves any model. Outputs come
first: a loss function that returns `label` means that one rather than the batch's.
"""

import inspect
from collections.abc import Mapping
from inspect import Parameter
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from meshlayout._annotations import Batch, Leaf
from meshlayout._checks import shown
from meshlayout.errors import MetricError
from meshlayout.metrics.metric import Metric, as_array, find
from meshlayout.metrics.nnx_metrics import STATISTICS


_PROTOCOL = ("empty", "from_model_output", "merge", "compute")


def as_metric(metric: Any) -> Any:
    """Returns an object that follows the protocol of clu and metrax, or MetricError.

    Args:
        metric: One of this library; a class or an instance of clu or metrax; or nnx's
            Average, Accuracy or Welford.
    """
    if isinstance(metric, type) and issubclass(metric, (Metric, nnx.metrics.Metric)):
        name = metric.__name__
        msg = f"{name} is a class, and a metric is an instance of it: call {name}()."
        raise MetricError(msg)
    if type(metric) in STATISTICS:
        return STATISTICS[type(metric)](metric)
    if not all(hasattr(metric, name) for name in _PROTOCOL):
        msg = (
            f"{shown(metric)} is not a metric: it must have {', '.join(_PROTOCOL)}, "
            "like those of this library, clu and metrax, or be nnx's Average, Accuracy "
            "or Welford."
        )
        raise MetricError(msg)
    return metric.empty() if isinstance(metric, type) else metric


def named_inputs(
    outputs: Mapping[str, Any] | None, batch: Batch, losses: Any
) -> dict[Any, Any]:
    """Returns all inputs of a step by name, or by position for those of a tuple."""
    if outputs is not None and not isinstance(outputs, Mapping):
        msg = (
            f"outputs is {shown(outputs)}; metrics find them by name, so it must be a "
            "dict, such as {'logits': logits}."
        )
        raise MetricError(msg)
    entries: Mapping[Any, Any] = {}
    if isinstance(batch, Mapping):
        entries = batch
    elif isinstance(batch, (tuple, list)):
        entries = dict(enumerate(batch))
    return {"losses": losses, "batch": batch, **entries, **(outputs or {})}


def measured(
    metric: Any, named: Mapping[Any, Any], weights: ArrayLike | None = None
) -> Any:
    """Returns the metric of one batch alone; its arguments are found by name.

    A built-in metric has the names in its fields, as in `Accuracy(labels="class")`. For
    any other, each parameter of its `from_model_output` gets the input of that name;
    one with a default may be missing, and `**kwargs` gets all. Elements of weight 0 are
    set to 0 before it sees them, so that NaN in them cannot leak; `mask` gets whether
    weights are not 0, and `weights` and `sample_weights` get the weights.

    Args:
        metric: The metric.
        named: The inputs by name, from `named_inputs`.
        weights: Per-example weights; None if all count.

    Raises:
        MetricError: If an argument is not found, or does not fit; or if there are
            weights, and the metric cannot leave anything out.

    Example:
        >>> from meshlayout.metrics import Accuracy
        >>> logits, labels = jnp.eye(3), jnp.array([0, 1, 0])
        >>> metric = measured(Accuracy(), {"logits": logits, "label": labels})
        >>> round(float(metric.compute()), 3)
        0.667
    """
    if isinstance(metric, Metric):
        return metric.of(named, weights)
    where = f"{type(metric).__module__.partition('.')[0]}'s {type(metric).__name__}"
    parameters = inspect.signature(metric.from_model_output).parameters
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    values = {name: x for name, x in named.items() if isinstance(name, str)}
    if weights is not None:
        counts = as_array(weights, "weights", where)
        values = {name: _blanked(x, counts) for name, x in values.items()}
        every = {"mask": counts != 0, "weights": counts, "sample_weights": counts}
        masks = {name: x for name, x in every.items() if name in parameters}
        if not masks and not takes_any:
            msg = (
                f"{where} takes neither 'mask' nor 'sample_weights', so it cannot "
                "leave out what has weight 0. Use a metric of meshlayout.metrics, or "
                "batches without padding and weights."
            )
            raise MetricError(msg)
        # A function of **kwargs alone is a composition, which passes a mask on.
        values |= masks or {"mask": counts != 0}
    for name, parameter in parameters.items():
        is_variable = parameter.kind in (
            Parameter.VAR_KEYWORD,
            Parameter.VAR_POSITIONAL,
        )
        if parameter.default is Parameter.empty and not is_variable:
            find(values, name, where)
    taken = {name: x for name, x in values.items() if takes_any or name in parameters}
    return metric.from_model_output(**taken)


def _blanked(value: Leaf, weights: Any) -> Any:
    """Returns a value with 0 where the weight is 0."""
    # A value of another shape is not per element, and integers cannot be NaN.
    if getattr(value, "shape", (None,))[: weights.ndim] != weights.shape:
        return value
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    missing = tuple(range(weights.ndim, value.ndim))
    return jnp.where(jnp.expand_dims(weights, missing) != 0, value, 0)
