"""The metrics of a step: the loss and its parts, the update's notes, the user's own."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from meshlayout import losses
from meshlayout.errors import StepError
from meshlayout.metrics import Last, Mean, Metrics, Sum, adapt
from meshlayout.step.objective import RESERVED


# Notes of an update that are not averaged over the examples.
_KINDS = {
    "learning_rate": Last,
    "loss_scale": Last,
    "skipped": Sum,
    "nonfinite_loss": Sum,
}


@dataclass(frozen=True)
class Measured:
    """One step's own numbers.

    Attributes:
        parts: The parts of the loss, by name.
        notes: What else there is: the learning rate, the gradients' norm.
        weight: The weight of the batch's examples; 0 if the step was skipped.
    """

    parts: Mapping[str, Any]
    notes: Mapping[str, Any]
    weight: Any

    @property
    def values(self) -> dict[str, Any]:
        """All numbers by name: the loss first, its parts if there are several."""
        total = sum(self.parts.values(), jnp.float32(0))
        parts = dict(self.parts) if len(self.parts) > 1 else {}
        return {"loss": total, **parts, **self.notes}

    def added_to(self, metrics: Metrics) -> dict[str, Any]:
        """Returns these names' metrics, with this step's numbers added."""
        found: dict[str, Any] = {}
        for name, value in self.values.items():
            metric = metrics.metric(name)
            if isinstance(metric, Mean):
                weight = jnp.asarray(self.weight, "float32")
                found[name] = metric.update(jnp.reshape(value, 1), weight.reshape(1))
            else:
                found[name] = metric.update(value)
        return found


def user_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the user's metrics, adapted, empty.

    Raises:
        StepError: If they are no mapping from names, or have a name that is taken.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        msg = (
            f"metrics= takes a dict from names to metrics, and got a "
            f"{type(metrics).__name__}."
        )
        raise StepError(msg)
    for name in metrics:
        if name in RESERVED:
            msg = f"metrics=: {name!r} is reported by every step; take another name."
            raise StepError(msg)
    return {name: _as_metric(metric) for name, metric in metrics.items()}


def _as_metric(metric: Any) -> Any:
    """Returns a metric as it is if it has what a metric needs, and else adapted."""
    needed = ("update", "merge", "compute")
    is_metric = not isinstance(metric, type)
    if is_metric and all(hasattr(metric, name) for name in needed):
        return metric
    return adapt(metric)


def empty_metrics(names: Sequence[str], users: Mapping[str, Any]) -> Metrics:
    """Returns metrics that have counted nothing.

    Raises:
        StepError: If a user's metric has the name of one of the step's.
    """
    for name in names:
        if name in users:
            msg = f"metrics=: {name!r} is also a part of the loss; take another name."
            raise StepError(msg)
    own = {name: _KINDS.get(name, Mean)() for name in names}
    return Metrics({**own, **users})


def as_regularizers(regularizers: Any) -> tuple[losses.Regularizer, ...]:
    """Returns regularisers as a tuple.

    Raises:
        StepError: If there is anything else among them, or a name occurs twice.
    """
    if isinstance(regularizers, losses.Regularizer):
        return (regularizers,)
    if not isinstance(regularizers, Iterable):
        msg = (
            "regularizers= takes what losses.l1 and losses.l2 give, not "
            f"{regularizers!r}."
        )
        raise StepError(msg)
    found = tuple(regularizers)
    names = [getattr(one, "name", None) for one in found]
    for one, name in zip(found, names, strict=True):
        if not isinstance(one, losses.Regularizer):
            msg = f"regularizers= takes what losses.l1 and losses.l2 give, not {one!r}."
            raise StepError(msg)
        if names.count(name) > 1:
            msg = (
                f"two regularizers are called {name!r}; give each a name of its own: "
                f"losses.l2(1e-5, where='kernel', name='kernel_l2')."
            )
            raise StepError(msg)
    return found


def total_weight(batch_weights: Any, num_examples: int) -> Any:
    """Returns the weight of a batch's examples.

    That of a batch of nothing but padding is too small to count beside any other, and
    not 0, so that its loss is shown as it is.
    """
    if batch_weights is None:
        return jnp.float32(num_examples)
    total = jnp.asarray(batch_weights).astype("float32").sum()
    return jnp.where(total > 0, total, 1e-30)


def check_metrics(name: str, given: Any, empty: Metrics) -> None:
    """Raises StepError unless metrics to add to are those of this step."""
    if not isinstance(given, Metrics):
        msg = (
            f"{name}: metrics to add to are what an earlier call returned; got a "
            f"{type(given).__name__}."
        )
        raise StepError(msg)
    if tuple(given) != tuple(empty):
        msg = (
            f"{name}: the metrics given are {', '.join(given)}, and this step measures "
            f"{', '.join(empty)}. Start with None, and pass on what the step returned."
        )
        raise StepError(msg)
