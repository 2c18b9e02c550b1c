"""`Metrics`: named metrics that read like a dict of their values.

Nothing waits for the device until a value is printed or turned into a number, so that a
training loop can hand metrics around without stalling.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from meshlayout import _jax, _render
from meshlayout._annotations import Batch, Leaf
from meshlayout._checks import shown
from meshlayout.errors import MetricError, did_you_mean
from meshlayout.metrics.inputs import as_metric, measured, named_inputs
from meshlayout.metrics.metric import Metric


@jax.tree_util.register_pytree_with_keys_class
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

    __slots__ = ("__weakref__", "_flat", "_metrics")

    _flat: Any
    _metrics: dict[str, Any]

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        if not isinstance(metrics, Mapping):
            msg = f"Metrics takes a dict from names to metrics, got {shown(metrics)}."
            raise MetricError(msg)
        for name in metrics:
            if not isinstance(name, str) or not name:
                msg = f"Metrics: a name must be a non-empty string, got {shown(name)}."
                raise MetricError(msg)
        self._fill({name: _named_metric(name, x) for name, x in metrics.items()})

    @classmethod
    def from_flat(cls, leaves: Sequence[Any], treedef: Any) -> "Metrics":
        """Returns metrics that are put together when they are first looked at.

        A step of a small model takes as long as its Python, so it does not build
        objects that a loop may never read.

        Args:
            leaves: The arrays.
            treedef: The structure, from `jax.tree.flatten`.
        """
        lazy = object.__new__(cls)  # `_metrics` stays unset: see `__getattr__`
        set_flat(lazy, (leaves, treedef))
        return lazy

    def _fill(self, metrics: dict[str, Any]) -> "Metrics":
        object.__setattr__(self, "_metrics", metrics)
        set_flat(self, None)
        return self

    if not TYPE_CHECKING:  # to a type checker, any attribute would exist

        def __getattr__(self, name: str) -> Any:
            """Puts the metrics of `from_flat` together when they are first read."""
            if name != "_metrics":
                return object.__getattribute__(self, name)  # raises
            leaves, treedef = self._flat
            metrics = treedef.unflatten(leaves)._metrics
            object.__setattr__(self, "_metrics", metrics)
            return metrics

    def __setattr__(self, name: str, value: object) -> None:
        msg = f"Metrics cannot be changed: make new ones instead of setting {name!r}."
        raise AttributeError(msg)

    def __reduce__(self) -> Any:  # by default it would set attributes
        return Metrics, (self._metrics,)

    # A mapping of values.

    def __getitem__(self, name: str) -> Any:
        return self.metric(name).compute()

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)

    def __contains__(self, name: object) -> bool:
        return name in self._metrics

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        # A mapping would compare values, and == of two arrays is an array.
        return self is other

    def metric(self, name: str) -> Any:
        """Returns the metric with a name, rather than its value.

        Raises:
            KeyError: If there is none.
        """
        if name not in self._metrics:
            near = did_you_mean(name, self._metrics)
            msg = f"there is no metric {name!r} among {', '.join(self._metrics)}.{near}"
            raise KeyError(msg)
        return self._metrics[name]

    # All metrics at once.

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
        for name, metric in self._metrics.items():
            try:
                updated[name] = metric.merge(measured(metric, named, weights))
            except MetricError as error:  # names its class, of which there may be two
                msg = f"metric {name!r}: {error}"
                raise MetricError(msg) from None
        return object.__new__(Metrics)._fill(updated)

    def merge(self, other: "Metrics") -> "Metrics":
        """Returns the metrics of everything that both have counted.

        Args:
            other: Metrics with the same names.

        Raises:
            MetricError: If a name is missing on either side, or two metrics of the same
                name do not merge.
        """
        if not isinstance(other, Metrics):
            msg = f"Metrics do not merge with {shown(other)}."
            raise MetricError(msg)
        missing = [name for name in self if name not in other]
        extra = [name for name in other if name not in self]
        if missing or extra:
            parts = [f"the second lack {_names(missing)}"] if missing else []
            parts += [f"the first lack {_names(extra)}"] if extra else []
            msg = f"two Metrics of different names do not merge: {' and '.join(parts)}."
            raise MetricError(msg)
        return Metrics(
            {name: m.merge(other.metric(name)) for name, m in self._metrics.items()}
        )

    def empty(self) -> "Metrics":
        """Returns the empty metrics of the same configuration."""
        return Metrics({name: metric.empty() for name, metric in self._metrics.items()})

    def compute(self) -> dict[str, Any]:
        """Returns the values by name, as arrays that may still be being computed."""
        return {name: metric.compute() for name, metric in self._metrics.items()}

    def _compute_copy(self) -> dict[str, Any]:
        """Returns the values by name, computed by one device of this process.

        A metric's value is a few operations on scalars, which would otherwise be
        dispatched to every device, and on several processes by all of them.
        """
        copy = jax.tree.map(_one_copy, self)
        # One device is none of the mesh that `jax.set_mesh` has set.
        if jax.sharding.get_abstract_mesh().empty or _jax.is_tracing():
            return copy.compute()
        with _jax.without_set_mesh():
            return copy.compute()

    def to_host(self) -> dict[str, Any]:
        """Returns the values by name, as Python floats and NumPy arrays.

        Use this to log or print: all values are computed first and then waited for
        together, instead of one by one.
        """
        values = self._compute_copy()
        # All copies are started before the first is waited for.
        for leaf in jax.tree.leaves(values):
            if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
                leaf.copy_to_host_async()
        return {name: jax.tree.map(_on_host, x) for name, x in values.items()}

    # As text.

    def __repr__(self) -> str:
        # Printed inside jit, while debugging: there are no values yet.
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(self)):
            return f"Metrics({', '.join(self)})"
        return _render.text_table(("metric", "value"), self._rows(), "lr")

    def _repr_html_(self) -> str:
        return _render.html_table(("metric", "value"), self._rows(), "lr")

    def _rows(self) -> list[list[str]]:
        return [[name, _value_text(value)] for name, value in self.to_host().items()]

    # As a pytree.

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """Returns the metrics with their keys, and the names."""
        children = [
            (jax.tree_util.DictKey(name), metric)
            for name, metric in self._metrics.items()
        ]
        return tuple(children), tuple(self._metrics)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], metrics: Any) -> "Metrics":
        """Returns metrics of names and whatever JAX has put in their places."""
        return object.__new__(cls)._fill(dict(zip(names, metrics, strict=True)))


# Faster than `object.__setattr__`: a small step takes the device as long as this file.
set_flat: Any = vars(Metrics)["_flat"].__set__


def _named_metric(name: str, metric: Any) -> Any:
    if isinstance(metric, Metric):
        return metric
    try:
        return as_metric(metric)
    except MetricError as error:
        msg = f"Metrics: {name!r}: {error}"
        raise MetricError(msg) from None


def _names(names: list[str]) -> str:
    return ", ".join(map(repr, names))


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
