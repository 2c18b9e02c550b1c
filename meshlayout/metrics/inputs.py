"""Where a metric's arguments come from: the outputs of the step, or its batch.

Everything is found by name, so that one dict of metrics serves any model. Outputs come
first: a loss function that returns `label` means that one rather than the batch's.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from jax.typing import ArrayLike

from meshlayout._annotations import Batch
from meshlayout._checks import shown
from meshlayout.errors import MetricError, did_you_mean
from meshlayout.metrics.metric import NEEDED, Metric, is_metric


@dataclass(frozen=True)
class MetricInputs:
    """The inputs of one step, from which metrics take their arguments.

    Attributes:
        outputs: The outputs that the loss function returned with the losses, by name.
        batch: The batch.
        losses: The losses per example, or None.
        weights: The weights per example; None if all count.
    """

    outputs: Mapping[Any, Any]
    batch: Batch
    losses: Any
    weights: ArrayLike | None

    @property
    def entries(self) -> Mapping[Any, Any]:
        """The batch's entries, by key or index."""
        # A batch that is an array or an object with fields has no entries: a metric
        # can still take all of it, as `batch`.
        if isinstance(self.batch, Mapping):
            return self.batch
        if isinstance(self.batch, (tuple, list)):
            return dict(enumerate(self.batch))
        return {}

    def find(self, name: str | int, where: str) -> Any:
        """Returns an output, an entry of the batch, or the losses, by name.

        Raises:
            MetricError: If nothing has this name.
        """
        if name in self.outputs:
            return self.outputs[name]
        entries = self.entries
        if name in entries:
            return entries[name]
        # Last, so that a batch may have an entry called `weights` or `losses`. None
        # counts as missing: a metric of losses needs a step that has some.
        special = self.special()
        if isinstance(name, str) and special.get(name) is not None:
            return special[name]
        msg = (
            f"{where}: {name!r} is neither among the outputs ({_names(self.outputs)}) "
            f"nor in the batch ({_names(entries)})."
            f"{did_you_mean(name, map(str, [*self.outputs, *entries]))}"
        )
        raise MetricError(msg)

    def special(self) -> dict[str, Any]:
        """Returns the inputs that every step has, by name."""
        return {
            "weights": self.weights,
            "losses": self.losses,
            "outputs": self.outputs,
            "batch": self.batch,
        }


def _names(entries: Mapping[Any, Any]) -> str:
    return ", ".join(map(repr, entries)) or "none"


def update_from(
    metric: Any,
    *,
    outputs: Mapping[str, Any] | None,
    batch: Batch,
    losses: Any = None,
    weights: ArrayLike | None = None,
) -> Any:
    """Returns a metric with one step's batch added; its arguments are found by name.

    Use this in your own loop; the steps of this library call it for their `metrics=`.

    A built-in metric has the names in its fields, as in `Accuracy(labels="class")`. An
    output of that name is taken, otherwise an entry of the batch, otherwise `losses`.

    For any other metric, each parameter of its `update` is filled with the output of
    that name, otherwise with an entry of the batch; `weights`, `losses`, `outputs` and
    `batch` are those of the step. A parameter with a default may be missing, and
    `**kwargs` gets all outputs and all entries of the batch.

    Args:
        metric: A metric: any object with an `update` that returns a new one.
        outputs: The outputs of the loss function, by name; None if there are none.
        batch: A mapping; or a tuple or list, whose entries are named by their indices.
        losses: Per-example losses.
        weights: Per-example weights; None if all count.

    Raises:
        MetricError: If an argument is not found, or does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from meshlayout.metrics import Accuracy
        >>> logits, batch = jnp.eye(3), {"label": jnp.array([0, 1, 0])}
        >>> metric = update_from(Accuracy(), outputs={"logits": logits}, batch=batch)
        >>> round(float(metric.compute()), 3)
        0.667
    """
    if outputs is not None and not isinstance(outputs, Mapping):
        msg = (
            f"outputs is {shown(outputs)}; metrics find them by name, so it must be a "
            "dict, such as {'logits': logits}."
        )
        raise MetricError(msg)
    inputs = MetricInputs({} if outputs is None else outputs, batch, losses, weights)
    return updated(metric, inputs)


def updated(metric: Any, inputs: MetricInputs) -> Any:
    """Returns a metric with the inputs of a step added; see `update_from`."""
    if isinstance(metric, Metric):
        return metric._update_from(inputs)
    if not is_metric(metric):
        msg = f"{shown(metric)} is not a metric: it {NEEDED}"
        raise MetricError(msg)
    where = type(metric).__name__
    args, kwargs = bound_arguments(metric.update, inputs, {}, f"{where}.update")
    new = metric.update(*args, **kwargs)
    if new is None:  # a metric that changes itself would be lost inside jit
        msg = (
            f"{where}.update returned None; it must return a new metric. For metrics "
            "of flax.nnx, which change themselves, use metrics.adapt."
        )
        raise MetricError(msg)
    return new


def bound_arguments(
    function: Callable[..., Any],
    inputs: MetricInputs,
    renamed: Mapping[str, str | int],
    where: str,
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the positional and the keyword arguments to call a function with.

    Args:
        function: A method of a metric.
        inputs: The inputs of a step.
        renamed: The name of the input, for parameters where it differs.
        where: The name of the function, for messages.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    special, everything = inputs.special(), {**inputs.entries, **inputs.outputs}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is Parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is Parameter.VAR_KEYWORD:
            # Compositions such as nnx.MultiMetric pass on what their parts pick out.
            named = {of: x for of, x in everything.items() if isinstance(of, str)}
            extra = {to: inputs.find(of, where) for to, of in renamed.items()}
            kwargs = {**named, **extra, **kwargs}
            continue
        if name in renamed:
            value = inputs.find(renamed[name], where)
        elif name in special:  # weights may be None, which most metrics take for ones
            value = special[name]
        elif parameter.default is not Parameter.empty and name not in everything:
            continue
        else:
            value = inputs.find(name, where)
        if parameter.kind is Parameter.POSITIONAL_ONLY:
            args.append(value)
        else:
            kwargs[name] = value
    return args, kwargs
