"""Metrics of clu, metrax and flax.nnx, as immutable metrics.

Those of flax.nnx change themselves, and cannot be merged; most of all three cannot
leave out padding by themselves. Here they become values like the built-in ones.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from meshlayout._annotations import Leaf, PyTree
from meshlayout._checks import shown
from meshlayout.errors import MetricError
from meshlayout.metrics.inputs import MetricInputs, bound_arguments, updated
from meshlayout.metrics.metric import Metric, as_array, metric_class, setting


_Names: TypeAlias = tuple[tuple[str, str | int], ...]


def adapt(metric: Any, **sources: str | int) -> Metric:
    """Makes an immutable metric of one of clu, metrax or flax.nnx.

    Use this to pass a metric of another library to a step or to `Metrics`. The result
    has `merge`, `compute` and `reset`; `update_from` finds its arguments by the names
    of its parameters.

    Elements of weight 0 are set to 0 before the metric sees them, so that NaN in them
    cannot leak. A parameter `mask` gets whether weights are not 0, and `weights` and
    `sample_weights` get the weights. flax's Average, Accuracy and Welford leave out
    elements of weight 0, and merge exactly, in every version. A metric that cannot
    leave anything out is refused if there are weights.

    Args:
        metric: A metric of flax.nnx, or a class or an instance that has
            `from_model_output`, `merge`, `compute` and `empty`. What an instance has
            already counted is kept.
        **sources: By parameter, the name of its input, as in `labels="label"`.

    Returns:
        A metric; `metric` itself, if it is one of this library or already adapted.

    Raises:
        MetricError: If it is not such a metric.

    Example:
        >>> from meshlayout.metrics import update_from
        >>> average = adapt(nnx.metrics.Average("loss"))
        >>> average = update_from(average, outputs={"loss": jnp.arange(4.0)}, batch={})
        >>> float(average.compute())
        1.5
    """
    if isinstance(metric, Metric) and not sources:
        return metric
    for parameter, name in sources.items():
        if not isinstance(name, (str, int)) or isinstance(name, bool):
            msg = (
                f"adapt: {parameter} must be the name of an output or of an entry of "
                f"the batch, got {shown(name)}."
            )
            raise MetricError(msg)
    names: _Names = tuple(sorted(sources.items()))
    if isinstance(metric, nnx.MultiMetric):
        # Private, since flax has no public list of the parts. Without it this raises
        # AttributeError; `test_metrics.py` adapts a MultiMetric.
        parts = {name: getattr(metric, name) for name in metric._metric_names}
        return AdaptedParts(
            {name: adapt(part, **sources) for name, part in parts.items()}
        )
    if isinstance(metric, nnx.metrics.Metric):
        definition, state = nnx.split(metric)
        return AdaptedNnx(_copied(state), definition, type(metric), names)
    needed = ("from_model_output", "merge", "compute", "empty")
    if all(hasattr(metric, name) for name in needed):
        kind: Any = metric if isinstance(metric, type) else type(metric)
        state = kind.empty() if isinstance(metric, type) else metric
        return AdaptedModelOutput(state, kind, names)
    is_called = hasattr(metric, "update") and not hasattr(metric, "empty")
    if isinstance(metric, type) and is_called:
        name = metric.__name__
        msg = f"{name} is a class, and a metric is an instance of it: call {name}()."
        raise MetricError(msg)
    msg = (
        f"{shown(metric)} cannot be adapted: it must be a metric of flax.nnx, or have "
        f"{', '.join(needed)}, like those of clu and metrax."
    )
    raise MetricError(msg)


def _copied(state: PyTree) -> PyTree:
    """Returns a new state of the same arrays: flax's metrics change their own."""
    return jax.tree.map(lambda x: x, state)


def _blanked(value: Leaf, weights: jax.Array | None) -> Any:
    """Returns a value with 0 where the weight is 0."""
    if weights is None or not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return value
    # A value of another shape is not per element, such as a learning rate.
    if value.shape[: weights.ndim] != weights.shape:
        return value
    if not jnp.issubdtype(value.dtype, jnp.floating):  # integers cannot be NaN
        return value
    missing = tuple(range(weights.ndim, value.ndim))
    return jnp.where(jnp.expand_dims(weights, missing) != 0, value, 0)


def _call(
    function: Callable[..., Any], inputs: MetricInputs, names: _Names, label: str
) -> Any:
    """Calls a method of another library's metric with the arguments that it takes.

    Args:
        function: The method.
        inputs: The inputs of a step.
        names: By parameter, the name of its input, if it differs.
        label: The name of the metric, for messages.
    """
    weights = inputs.weights
    if weights is not None:
        weights = as_array(weights, "weights", label)
    blank = MetricInputs(
        {name: _blanked(value, weights) for name, value in inputs.outputs.items()},
        jax.tree.map(lambda x: _blanked(x, weights), inputs.batch),
        _blanked(inputs.losses, weights),
        weights,
    )
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    # The names that clu, metrax and flax use.
    takers = {"mask", "weights", "sample_weights"} & {*parameters}
    if weights is not None and not takers and not takes_any:
        msg = (
            f"{label} takes neither 'mask' nor 'sample_weights', so it cannot leave "
            "out what has weight 0. Use a metric of meshlayout.metrics, or batches "
            "without padding and weights."
        )
        raise MetricError(msg)
    # A parameter that the user has named a source for gets that instead.
    masks = {name: None for name in takers if name not in dict(names)}
    if weights is not None:
        every = {"mask": weights != 0, "weights": weights, "sample_weights": weights}
        # A function of **kwargs alone is a composition, which passes a mask on.
        masks = {name: every[name] for name in masks or (["mask"] if takes_any else [])}
    renamed = {name: of for name, of in names if takes_any or name in parameters}
    # A mask takes precedence over an output or an entry of the same name.
    masked = dataclasses.replace(blank, outputs={**blank.outputs, **masks})
    args, kwargs = bound_arguments(function, masked, renamed, label)
    return function(*args, **{**kwargs, **masks})


class Adapted(Metric):
    """Base of adapted metrics, whose arguments `update_from` finds."""

    def update(self, *args: Any, **kwargs: Any) -> Self:
        """Raises MetricError: use `metrics.update_from`, which finds the arguments."""
        msg = (
            f"{self!r} finds its arguments by name: use "
            "metrics.update_from(metric, outputs=..., batch=...)."
        )
        raise MetricError(msg)


@metric_class
class AdaptedModelOutput(Adapted):
    """A metric of clu or metrax; made by `adapt`."""

    state: PyTree
    kind: type = setting()
    sources: _Names = setting()

    def __repr__(self) -> str:
        return f"{self.kind.__module__.partition('.')[0]}'s {self.kind.__name__}"

    def _update_from(self, inputs: MetricInputs) -> Self:
        from_model_output = self.kind.from_model_output
        new = _call(from_model_output, inputs, self.sources, repr(self))
        return dataclasses.replace(self, state=self.state.merge(new))

    def _merged(self, other: Any) -> Self:
        return dataclasses.replace(self, state=self.state.merge(other.state))

    def compute(self) -> Any:
        """Returns the value of the adapted metric."""
        return self.state.compute()

    def reset(self) -> Self:
        """Returns the empty metric."""
        return dataclasses.replace(self, state=self.kind.empty())


@metric_class
class AdaptedNnx(Adapted):
    """A metric of flax.nnx; made by `adapt`."""

    state: PyTree
    definition: Any = setting()
    kind: type = setting()
    sources: _Names = setting()

    def __repr__(self) -> str:
        return f"nnx's {self.kind.__name__}"

    def _metric(self) -> Any:
        return nnx.merge(self.definition, _copied(self.state))

    def _of(self, metric: nnx.metrics.Metric) -> Self:
        """Returns this metric with the state of a flax metric.

        In the dtypes that it had: a dtype that changes would compile the step again.
        """
        state = nnx.split(metric)[1]
        state = jax.tree.map(
            lambda new, old: jnp.asarray(new, old.dtype), state, self.state
        )
        return dataclasses.replace(self, state=state)

    def _update_from(self, inputs: MetricInputs) -> Self:
        metric = self._metric()
        if self.kind in _STATISTICS:
            values = _values(metric, inputs, dict(self.sources), repr(self))
            _add(metric, *_batch_statistics(values, inputs.weights, repr(self)))
        else:
            _call(metric.update, inputs, self.sources, repr(self))
        return self._of(metric)

    def _merged(self, other: Any) -> Self:
        if self.kind not in _STATISTICS:
            msg = (
                f"{self!r} cannot be merged: flax does not define how. Average, "
                "Accuracy, Welford and MultiMetric of them can."
            )
            raise MetricError(msg)
        metric = self._metric()
        _add(metric, *_statistics(other._metric()))
        return self._of(metric)

    def compute(self) -> Any:
        """Returns the value of the adapted metric."""
        return self._metric().compute()

    def reset(self) -> Self:
        """Returns the empty metric."""
        metric = self._metric()
        metric.reset()
        return self._of(metric)


@metric_class
class AdaptedParts(Adapted):
    """A MultiMetric of flax.nnx, part by part; made by `adapt`."""

    parts: dict[str, Any]

    def __repr__(self) -> str:
        return f"nnx's MultiMetric({', '.join(self.parts)})"

    def _update_from(self, inputs: MetricInputs) -> Self:
        return type(self)(
            {name: updated(part, inputs) for name, part in self.parts.items()}
        )

    def _merged(self, other: Any) -> Self:
        return type(self)(
            {name: part.merge(other.parts[name]) for name, part in self.parts.items()}
        )

    def compute(self) -> Any:
        """Returns the value of each part, by name."""
        return {name: part.compute() for name, part in self.parts.items()}

    def reset(self) -> Self:
        """Returns the empty metric."""
        return type(self)({name: part.reset() for name, part in self.parts.items()})


# flax's metrics whose state is a count and a sum, or a mean and a variance. They are
# updated from statistics that are computed here, since not all of flax's versions take
# a mask, and none can merge.
_STATISTICS = (nnx.metrics.Average, nnx.metrics.Accuracy, nnx.metrics.Welford)


def _values(
    metric: Any, inputs: MetricInputs, names: Mapping[str, str | int], label: str
) -> jax.Array:
    """Returns the values that one of flax's own metrics averages."""

    def find(name: str) -> jax.Array:
        return as_array(inputs.find(names.get(name, name), label), name, label)

    if type(metric) is not nnx.metrics.Accuracy:
        return find(metric.argname).astype(jnp.float32)
    # Shapes as flax checks them.
    logits, labels = find("logits"), find("labels")
    threshold = metric.threshold
    binary = threshold is not None
    if logits.ndim != labels.ndim + (not binary):
        dims = "as many dims as" if binary else "one dim more than"
        msg = (
            f"{label}: logits of shape {logits.shape} and labels of shape "
            f"{labels.shape} do not fit; logits have {dims} labels."
        )
        raise MetricError(msg)
    if threshold is not None:
        right = (logits >= threshold) == (labels > 0)
    else:
        right = jnp.argmax(logits, axis=-1) == labels
    return right.astype(jnp.float32)


def _batch_statistics(
    values: jax.Array, weights: ArrayLike | None, label: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns count, sum and sum of squared deviations where weights are not 0."""
    counts = jnp.ones(values.shape, bool)
    if weights is not None:
        weights = as_array(weights, "weights", label)
        if values.ndim and weights.shape != values.shape[: weights.ndim]:
            msg = (
                f"{label}: weights of shape {weights.shape} do not fit values of shape "
                f"{values.shape}."
            )
            raise MetricError(msg)
        is_real = weights != 0
        missing = tuple(range(weights.ndim, values.ndim))
        is_real = jnp.expand_dims(is_real, missing) if values.ndim else is_real.any()
        counts = counts & is_real
    count = jnp.sum(counts, dtype=jnp.int32)
    total = jnp.sum(jnp.where(counts, values, 0))
    mean = total / jnp.maximum(count, 1)
    return count, total, jnp.sum(jnp.where(counts, jnp.square(values - mean), 0))


def _statistics(metric: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns count, sum and sum of squared deviations of a metric so far."""
    count = metric.count[...]
    if isinstance(metric, nnx.metrics.Welford):
        return count, metric.mean[...] * count, metric.m2[...]
    return count, metric.total[...], jnp.zeros((), jnp.float32)


def _add(metric: Any, count: jax.Array, total: jax.Array, m2: jax.Array) -> None:
    """Adds statistics to those of a metric.

    Means and variances are combined as by Chan, Golub and LeVeque (1979), which does
    not lose precision as sums of squares do.
    """
    before = metric.count[...]
    after = before + count
    metric.count[...] = after
    if not isinstance(metric, nnx.metrics.Welford):
        metric.total[...] = metric.total[...] + total
        return
    delta = total / jnp.maximum(count, 1) - metric.mean[...]
    share = count / jnp.maximum(after, 1)
    metric.mean[...] = metric.mean[...] + delta * share
    metric.m2[...] = metric.m2[...] + m2 + jnp.square(delta) * before * share
