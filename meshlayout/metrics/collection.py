"""`Metrics`: named metrics that read like a dict of their values.

Arguments are found by name, so one dict of metrics serves any model. Nothing waits for
the device until a value is printed or converted to a number.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.typing import ArrayLike

from meshlayout import _checks, _jax, _render
from meshlayout._annotations import Batch, Leaf
from meshlayout._batches import WeightsKey, get_weights
from meshlayout.errors import MetricError, did_you_mean
from meshlayout.metrics.classification import Accuracy
from meshlayout.metrics.metric import Mean, Metric, find


_EXAMPLE = "ml.metrics.Accuracy(labels='y')"
_PROTOCOL = ("empty", "from_model_output", "merge", "compute")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, init=False, repr=False, eq=False)
class Metrics(Mapping[str, Any]):
    """Named metrics: an immutable mapping from names to values, and a pytree.

    Indexing computes a value on the device without waiting for it; `to_host` waits once
    for all of them. Names keep their order.

    Args:
        metrics: Metrics by name: of this library, clu, metrax, nnx's Average and
            Accuracy, or pytrees with `empty`, `from_model_output`, `merge`, `compute`.

    Examples:
        >>> metrics = Metrics({"loss": Mean(), "accuracy": Accuracy()})
        >>> metrics = metrics.update_from(
        ...     outputs={"logits": jnp.eye(2)},
        ...     batch={"label": jnp.array([0, 0])},
        ...     losses=jnp.array([0.5, 1.0]),
        ... )
        >>> metrics.to_host()
        {'loss': 0.75, 'accuracy': 0.5}
    """

    metrics: dict[str, Any]
    names: tuple[str, ...] = field(metadata={"static": True})  # JAX sorts a dict's

    def __init__(
        self, metrics: Mapping[str, Any], names: tuple[str, ...] | None = None
    ) -> None:
        if names is None:  # from a user, not from JAX
            if not isinstance(metrics, Mapping):
                msg = f"metrics must be a dict, such as {{'accuracy': {_EXAMPLE}}},"
                raise MetricError(f"{msg} got {_checks.shown(metrics)}.")
            metrics = {name: _as_metric(name, x) for name, x in metrics.items()}
            names = tuple(metrics)
        object.__setattr__(self, "metrics", metrics)
        object.__setattr__(self, "names", names)

    def __getitem__(self, name: str) -> Any:
        metric = self.metric(name)
        return _compute(metric) if isinstance(metric, Metric) else metric.compute()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    # A mapping would compare values, and == of two arrays is an array.
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    def metric(self, name: str) -> Any:
        """Returns the metric with a name, rather than its value."""
        if name not in self.names:
            near = did_you_mean(name, self.names)
            raise KeyError(f"no metric {name!r} among {', '.join(self.names)}.{near}")
        return self.metrics[name]

    def update_from(
        self,
        *,
        outputs: Mapping[str, Any] | None,
        batch: Batch,
        losses: ArrayLike | None = None,
        weights: ArrayLike | WeightsKey | None = "weight",
    ) -> "Metrics":
        """Returns the metrics with one batch added, as in a step.

        Arguments are found by name: an output, otherwise an entry of the batch,
        otherwise `losses` or `batch` themselves. Built-in metrics have the names in
        fields, as in `Accuracy(labels="class")`, others in `from_model_output`.

        Args:
            outputs: The outputs of the loss function, by name; None if there are none.
            batch: A mapping, or a tuple or list, whose entries are named by index.
            losses: Per-example losses.
            weights: Per-example weights, or their key in the batch, where the trainer
                puts them; None if all examples count.

        Raises:
            MetricError: If an argument is not found or does not fit, or if there are
                weights and a metric cannot use them.
        """
        entries = dict(enumerate(batch)) if isinstance(batch, (tuple, list)) else batch
        entries = entries if isinstance(entries, Mapping) else {}
        named = {"losses": losses, "batch": batch}
        named |= {str(name): x for name, x in entries.items()} | {**(outputs or {})}
        is_key = isinstance(weights, (str, int))
        counts: Any = get_weights(batch, weights) if is_key else weights
        updated: dict[str, Any] = {}
        for name in self.names:
            metric = self.metrics[name]
            try:
                updated[name] = metric.merge(_measured(metric, named, counts))
            except MetricError as error:  # names its class, of which there may be two
                raise MetricError(f"metric {name!r}: {error}") from None
        return Metrics(updated, self.names)

    def merge(self, other: "Metrics") -> "Metrics":
        """Returns the metrics of everything that both counted; names must be equal."""
        if not isinstance(other, Metrics) or {*other.names} != {*self.names}:
            what = ", ".join(getattr(other, "names", ())) or _checks.shown(other)
            msg = f"Metrics of {', '.join(self.names)} do not merge with {what}."
            raise MetricError(msg)
        merged = {x: self.metrics[x].merge(other.metrics[x]) for x in self.names}
        return Metrics(merged, self.names)

    def empty(self) -> "Metrics":
        """Returns the empty metrics of the same configuration, dtypes and layouts."""
        empty = Metrics({x: self.metrics[x].empty() for x in self.names}, self.names)
        return jax.tree.map(_like, empty, self)

    def compute(self) -> dict[str, Any]:
        """Returns the values by name, as arrays that may not be computed yet."""
        return {name: self[name] for name in self.names}

    def local_values(self) -> dict[str, Any]:
        """Returns the values by name, computed by one device of this process."""
        # All of a mesh would compute the same; several processes, only together.
        values = jax.tree.map(_one_copy, self)
        if _jax.is_tracing() or jax.sharding.get_abstract_mesh().empty:
            return values.compute()
        with _jax.without_set_mesh():  # one device is none of that mesh
            return values.compute()

    def to_host(self) -> dict[str, Any]:
        """Waits, and returns the values by name, as Python floats and NumPy arrays."""
        values = self.local_values()
        return {name: jax.tree.map(_on_host, x) for name, x in values.items()}

    def __repr__(self) -> str:
        # Printed inside jit, while debugging: there are no values yet.
        kinds = (Tracer, jax.ShapeDtypeStruct)
        if any(isinstance(leaf, kinds) for leaf in jax.tree.leaves(self)):
            return f"Metrics({', '.join(self)})"
        return _render.text_table(("metric", "value"), self._rows(), "lr")

    def _repr_html_(self) -> str:
        return _render.html_table(("metric", "value"), self._rows(), "lr")

    def _rows(self) -> list[list[str]]:
        return [
            [name, f"{x:.6g}" if isinstance(x, float) else str(x).replace("\n", "")]
            for name, x in self.to_host().items()
        ]


# In one dispatch: a value is a few operations on scalars.
_compute: Any = jax.jit(lambda metric: metric.compute())


def _as_metric(name: str, metric: object) -> Any:
    if type(metric) is nnx.metrics.Average:
        return Mean(metric.argname)
    if type(metric) is nnx.metrics.Accuracy:
        threshold = metric.threshold
        if threshold is not None:  # theirs counts a score at the threshold as 1
            threshold = float(np.nextafter(np.float32(threshold), np.float32(-np.inf)))
        return Accuracy(labels="labels", threshold=threshold)
    is_class = isinstance(metric, type)
    if is_class and issubclass(metric, (Metric, nnx.metrics.Metric)):
        names = "labels='y'" * hasattr(metric, "labels")
        fact = f"is a class; give an instance: {metric.__name__}({names})."
    elif isinstance(metric, str):
        fact = f"is a name. Write {_EXAMPLE}, or Mean(values={metric!r}) for an output."
    elif inspect.isfunction(metric):
        fact = "is no metric: return its value per example as an output of the loss "
        fact += f"function, and write ml.metrics.Mean(values={name!r}). For a value of"
        fact += f" a whole epoch, write a callback that sets logs['val_{name}']."
    elif not all(hasattr(metric, method) for method in _PROTOCOL):
        fact = f"is not a metric such as {_EXAMPLE}: it must have "
        fact += f"{', '.join(_PROTOCOL)}, like those of clu and metrax, or be nnx's "
        fact += "Average or Accuracy."
    else:
        return metric.empty() if is_class else metric
    raise MetricError(f"metrics: {name!r}: {_checks.shown(metric)} {fact}")


def _measured(metric: Any, named: Mapping[str, Any], weights: ArrayLike | None) -> Any:
    if isinstance(metric, Metric):
        return metric.from_model_output(**{**named, "weights": weights})
    where = f"{type(metric).__module__.partition('.')[0]}'s {type(metric).__name__}"
    parameters = inspect.signature(metric.from_model_output).parameters.values()
    # A function of **kwargs is a composition, which passes a mask on.
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    known = {p.name: p for p in parameters if p.kind not in variable}
    values = dict(named)
    if weights is not None:
        counts = _checks.real_array("weights", weights, where=where, error=MetricError)
        masks = {"mask": counts != 0, "weights": counts, "sample_weights": counts}
        if not takes_any and known.keys().isdisjoint(masks):
            raise MetricError(
                f"{where} takes neither 'mask' nor 'sample_weights', so it cannot "
                "leave out what has weight 0. Use a metric of meshlayout.metrics, or "
                "batches without padding and weights."
            )
        values |= masks
    for name, parameter in known.items():
        if parameter.default is parameter.empty:
            find(values, name, where)
    taken = {name: x for name, x in values.items() if takes_any or name in known}
    return metric.from_model_output(**taken)


def _like(empty: Leaf, leaf: Leaf) -> Any:
    """Returns a metric's first value, perhaps a number, like its later ones."""
    if not hasattr(leaf, "dtype"):
        return empty
    empty = _jax.with_weak_type(jnp.asarray(empty, leaf.dtype), weak_type=False)
    is_placed = isinstance(leaf, _jax.ArrayImpl)  # not inside jit
    return _jax.put(empty, leaf.sharding) if is_placed else empty


def _one_copy(leaf: Leaf) -> Any:
    is_copied = isinstance(leaf, _jax.ArrayImpl) and leaf.is_fully_replicated
    return leaf.addressable_data(0) if is_copied else leaf


def _on_host(value: Leaf) -> Any:
    value = _jax.to_host(value) if isinstance(value, jax.Array) else np.asarray(value)
    return float(value) if value.ndim == 0 else value
