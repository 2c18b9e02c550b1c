"""`Metrics`: named metrics that read like a dict of their values.

Nothing waits for the device until a value is printed or turned into a number, so that a
training loop can hand metrics around without stalling.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from meshlayout import _jax, _render
from meshlayout._annotations import Batch, Leaf
from meshlayout._checks import shown
from meshlayout.errors import MetricError, did_you_mean
from meshlayout.metrics.inputs import as_metric, measured, named_inputs
from meshlayout.metrics.metric import Metric


@jax.tree_util.register_dataclass
@dataclass(frozen=True, init=False, repr=False, eq=False)
class Metrics(Mapping[str, Any]):
    """Named metrics: an immutable mapping from names to values, and a pytree.

    Indexing computes a value on the device without waiting for it; `to_host` waits once
    for all of them. Names keep their order.

    Args:
        metrics: The metrics by name: of this library, clu, metrax or any pytrees that
            follow their protocol (`empty`, `from_model_output`, `merge`, `compute`), or
            nnx's Average and Accuracy.

    Example:
        >>> import jax.numpy as jnp
        >>> from meshlayout.metrics import Accuracy, Mean
        >>> metrics = Metrics({"loss": Mean(), "accuracy": Accuracy()})
        >>> metrics = metrics.update_from(
        ...     outputs={"logits": jnp.eye(2)},
        ...     batch={"label": jnp.array([0, 0])},
        ...     losses=jnp.array([0.5, 1.0]),
        ... )
        >>> metrics
        metric    value
        ────────  ─────
        loss       0.75
        accuracy    0.5
        >>> metrics.to_host()
        {'loss': 0.75, 'accuracy': 0.5}
    """

    metrics: dict[str, Any]
    names: tuple[str, ...] = field(metadata={"static": True})  # JAX sorts a dict's

    def __init__(
        self, metrics: Mapping[str, Any], names: tuple[str, ...] | None = None
    ) -> None:
        if names is None:  # from a user, not from JAX
            metrics = _checked(metrics)
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

    def __contains__(self, name: object) -> bool:
        return name in self.names

    # A mapping would compare values, and == of two arrays is an array.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def metric(self, name: str) -> Any:
        """Returns the metric with a name, rather than its value.

        Raises:
            KeyError: If there is none.
        """
        if name not in self.names:
            near = did_you_mean(name, self.names)
            msg = f"there is no metric {name!r} among {', '.join(self.names)}.{near}"
            raise KeyError(msg)
        return self.metrics[name]

    def update_from(
        self,
        *,
        outputs: Mapping[str, Any] | None,
        batch: Batch,
        losses: Any = None,
        weights: ArrayLike | None = None,
    ) -> "Metrics":
        """Returns the metrics with one step's batch added.

        Use this in your own loop; the steps of this library call it for `metrics=`.
        Arguments are found by name: an output of that name, otherwise an entry of the
        batch, otherwise `losses`, `outputs` or `batch` themselves. A built-in metric
        has the names in its fields, as in `Accuracy(labels="class")`; another one in
        the parameters of its `from_model_output`.

        Args:
            outputs: The outputs of the loss function, by name; None if there are none.
            batch: A mapping; or a tuple or list, whose entries are named by indices.
            losses: Per-example losses.
            weights: Per-example weights; None if all count.

        Raises:
            MetricError: If an argument is not found, or does not fit; or if there are
                weights, and a metric cannot leave anything out.
        """
        named = named_inputs(outputs, batch, losses)
        updated: dict[str, Any] = {}
        for name in self.names:
            metric = self.metrics[name]
            try:
                updated[name] = metric.merge(measured(metric, named, weights))
            except MetricError as error:  # names its class, of which there may be two
                msg = f"metric {name!r}: {error}"
                raise MetricError(msg) from None
        return Metrics(updated, self.names)

    def merge(self, other: "Metrics") -> "Metrics":
        """Returns the metrics of everything that both have counted.

        Args:
            other: Metrics with the same names.

        Raises:
            MetricError: If their names differ, or two metrics do not merge.
        """
        if not isinstance(other, Metrics) or {*self.names} != {*other.names}:
            is_other = isinstance(other, Metrics)
            what = f"Metrics of {', '.join(other.names)}" if is_other else shown(other)
            msg = f"Metrics of {', '.join(self.names)} do not merge with {what}."
            raise MetricError(msg)
        merged = {x: self.metrics[x].merge(other.metrics[x]) for x in self.names}
        return Metrics(merged, self.names)

    def empty(self) -> "Metrics":
        """Returns the empty metrics of the same configuration, dtypes and layouts."""
        empty = Metrics({x: self.metrics[x].empty() for x in self.names}, self.names)
        return jax.tree.map(_like, empty, self)

    def compute(self) -> dict[str, Any]:
        """Returns the values by name, as arrays that may still be being computed."""
        return {name: self[name] for name in self.names}

    def local_values(self) -> dict[str, Any]:
        """Returns the values by name, computed by one device of this process.

        All of a mesh would compute the same few scalars; on several processes they
        would have to do so together.
        """
        values = jax.tree.map(_one_copy, self)
        if _jax.is_tracing() or jax.sharding.get_abstract_mesh().empty:
            return values.compute()
        with _jax.without_set_mesh():  # one device is none of that mesh
            return values.compute()

    def to_host(self) -> dict[str, Any]:
        """Returns the values by name, as Python floats and NumPy arrays.

        Use this to log or print: all values are computed first and then waited for
        together, instead of one by one.
        """
        values = self.local_values()
        # All copies are started before the first is waited for.
        for leaf in jax.tree.leaves(values):
            if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
                leaf.copy_to_host_async()
        return {name: jax.tree.map(_on_host, x) for name, x in values.items()}

    def __repr__(self) -> str:
        # Printed inside jit, while debugging: there are no values yet.
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(self)):
            return f"Metrics({', '.join(self)})"
        return _render.text_table(("metric", "value"), self._rows(), "lr")

    def _repr_html_(self) -> str:
        return _render.html_table(("metric", "value"), self._rows(), "lr")

    def _rows(self) -> list[list[str]]:
        return [[name, _value_text(value)] for name, value in self.to_host().items()]


# In one dispatch: a value is a few operations on scalars.
_compute: Any = jax.jit(lambda metric: metric.compute())


def _like(empty: Leaf, leaf: Leaf) -> Any:
    """Returns what a metric starts with, perhaps a number, like a later value."""
    if not hasattr(leaf, "dtype"):
        return empty
    empty = _jax.with_weak_type(jnp.asarray(empty, leaf.dtype), weak_type=False)
    is_placed = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    return _jax.put(empty, leaf.sharding) if is_placed else empty


def _checked(metrics: Any) -> dict[str, Any]:
    if not isinstance(metrics, Mapping):
        msg = f"Metrics takes a dict from names to metrics, got {shown(metrics)}."
        raise MetricError(msg)
    checked = {}
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name:
            msg = f"Metrics: a name must be a non-empty string, got {shown(name)}."
            raise MetricError(msg)
        try:
            checked[name] = as_metric(metric)
        except MetricError as error:
            msg = f"Metrics: {name!r}: {error}"
            raise MetricError(msg) from None
    return checked


def _one_copy(leaf: Leaf) -> Any:
    """Returns a replicated array as a single device holds it."""
    is_spread = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    if is_spread and leaf.is_fully_replicated and not _jax.is_extended(leaf.dtype):
        return leaf.addressable_data(0)
    return leaf


def _on_host(value: Leaf) -> Any:
    value = _jax.to_host(value) if isinstance(value, jax.Array) else np.asarray(value)
    return float(value) if value.ndim == 0 else value


def _value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, np.ndarray) and value.size > 8:
        return _render.array_text(value.dtype, value.shape)
    if isinstance(value, np.ndarray):
        return np.array2string(value, precision=4, separator=", ").replace("\n", "")
    return str(value)
