"""The metrics of a step: the loss and its parts, the update's notes, the user's own."""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout import _jax, losses
from meshlayout._annotations import Leaf, PyTree
from meshlayout.errors import MetricError, StepError
from meshlayout.metrics import Last, Mean, Metrics, Sum, Throughput, adapt
from meshlayout.step.call_signature import is_array_like, named_leaves
from meshlayout.step.objective import RESERVED
from meshlayout.step.placement import StepMesh


# Notes of an update that are not averaged over the examples.
_KINDS = {
    "learning_rate": Last,
    "loss_scale": Last,
    "skipped": Sum,
    "nonfinite_loss": Sum,
}


@dataclass(frozen=True)
class StepValues:
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

    def added_to(self, metrics: Metrics, users: Metrics) -> Metrics:
        """Returns metrics with this step's values added.

        Args:
            metrics: All metrics before.
            users: The user's, with the batch added.
        """
        updated = {name: users.metric(name) for name in users}
        weight = jnp.asarray(self.weight, "float32").reshape(1)
        for name, value in self.values.items():
            metric = metrics.metric(name)
            if isinstance(metric, Mean):
                updated[name] = metric.update(jnp.reshape(value, 1), weight)
            else:
                updated[name] = metric.update(value)
        return strong(Metrics({name: updated[name] for name in metrics}))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FlatMetrics:
    """Metrics as a program takes and returns them: flat, because JAX takes time.

    Taking a `Metrics` apart and making one costs a call of a small step a third of its
    time on the host; most that a step returns are only handed to the next call.

    Attributes:
        leaves: The arrays.
        treedef: The structure of the `Metrics`.
    """

    leaves: list[Any]
    treedef: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, metrics: Metrics) -> "FlatMetrics":
        """Returns metrics, taken apart."""
        return cls(*jax.tree.flatten(metrics))

    def metrics(self) -> Metrics:
        """Returns the metrics."""
        return self.treedef.unflatten(self.leaves)


class MetricsStart:
    """Where a step's metrics start, and those that it returned last.

    Args:
        empty: Metrics that have counted nothing.
        mesh: The mesh of the state.
    """

    def __init__(self, empty: Metrics, mesh: StepMesh) -> None:
        self._mesh = mesh
        self.empty: Metrics = mesh.put(empty, is_own=True)
        self._flat_empty = self._flat_returned = FlatMetrics.of(self.empty)
        leaves = jax.tree.leaves(empty, is_leaf=_is_clock)
        self._has_clock = any(map(_is_clock, leaves))
        self._returned: Callable[[], Metrics | None] = lambda: None

    def flat(self, name: str, metrics: Metrics | None) -> FlatMetrics:
        """Returns the metrics that a step adds to, on the mesh of the state.

        Args:
            name: The step.
            metrics: Those of an earlier call, or None for empty ones.

        Raises:
            StepError: If those are not the metrics of this step.
        """
        if metrics is None:
            return FlatMetrics.of(self._now()) if self._has_clock else self._flat_empty
        if metrics is self._returned():
            return self._flat_returned
        check_metrics(name, metrics, self.empty)
        placed = self._mesh.put(_cast(strong(metrics), self.empty), is_own=True)
        return FlatMetrics.of(placed)

    def returned(self, flat: FlatMetrics) -> Metrics:
        """Returns the metrics of a program; given back, they are on the mesh."""
        metrics = Metrics.from_flat(flat.leaves, flat.treedef)
        self._returned, self._flat_returned = weakref.ref(metrics), flat
        return metrics

    def _now(self) -> Metrics:
        """Returns empty metrics whose clocks start now."""

        def start(node: Any) -> Any:
            if not _is_clock(node):
                return node
            return self._mesh.put(node.started(), is_own=True)

        return jax.tree.map(start, self.empty, is_leaf=_is_clock)


def _is_clock(node: object) -> bool:
    return isinstance(node, Throughput)


def strong(tree: PyTree) -> Any:
    """Returns a tree of arrays, none weakly typed as Python's numbers are."""
    return jax.tree.map(_as_strong, tree)


def _as_strong(leaf: Leaf) -> Any:
    if isinstance(leaf, (int, float, complex)):
        leaf = np.asarray(leaf)
        return leaf.astype(_jax.canonical_dtype(leaf.dtype))
    is_weak = isinstance(leaf, jax.Array) and jax.typeof(leaf).weak_type
    return _jax.with_weak_type(leaf, weak_type=False) if is_weak else leaf


def user_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the user's metrics, adapted, as they start.

    Raises:
        StepError: If they are not a mapping from names, or have a name that is taken,
            or one is not a metric, or not a pytree of arrays.
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
    return {name: _as_metric(name, metric) for name, metric in metrics.items()}


def _as_metric(name: str, metric: Any) -> Any:
    """Returns a metric unchanged if it has what a metric needs, else adapted."""
    needed = ("update", "merge", "compute")
    is_metric = not isinstance(metric, type)
    if not is_metric or not all(hasattr(metric, method) for method in needed):
        try:
            metric = adapt(metric)
        except MetricError as error:
            msg = f"metrics=: {name!r}: {error}"
            raise StepError(msg) from None
    for path, leaf in named_leaves(metric):
        if leaf is metric:
            msg = (
                f"metrics=: {name!r} is a {type(metric).__name__}, which JAX does not "
                "know as a tree of arrays. Register the class with "
                "jax.tree_util.register_dataclass, or make it a flax.struct.dataclass; "
                "its update returns a new one."
            )
            raise StepError(msg)
        if not is_array_like(leaf):
            msg = (
                f"metrics=: the field {path!r} of {name!r} is {leaf!r}, no array. Mark "
                'it static: dataclasses.field(metadata={"static": True}), or '
                "flax.struct.field(pytree_node=False)."
            )
            raise StepError(msg)
    return strong(metric)


def empty_metrics(
    names: Sequence[str], users: Mapping[str, Any], updated: Metrics
) -> Metrics:
    """Returns metrics that have counted nothing.

    Args:
        names: Those of the step.
        users: The user's.
        updated: The user's after a batch, abstract: what starts with whole numbers
            may go on with floats.

    Raises:
        StepError: If a user's metric has the name of one of the step's.
    """
    for name in names:
        if name in users:
            msg = f"metrics=: {name!r} is also a part of the loss; take another name."
            raise StepError(msg)
    own = {name: _KINDS.get(name, Mean)() for name in names}
    cast = {name: _cast(one, updated.metric(name)) for name, one in users.items()}
    return Metrics({**own, **cast})


def _cast(tree: PyTree, like: PyTree) -> Any:
    """Returns a tree in the dtypes of one that is like it, where those hold more."""
    if jax.tree.structure(tree) != jax.tree.structure(like):
        return tree

    def one(leaf: Leaf, other: Leaf) -> Any:
        if leaf.dtype == other.dtype or isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return leaf.astype(jnp.promote_types(leaf.dtype, other.dtype))

    return jax.tree.map(one, tree, like)


def as_regularizers(regularizers: Any) -> tuple[losses.Regularizer, ...]:
    """Returns regularizers as a tuple.

    Raises:
        StepError: If there is anything else among them, or a name occurs twice.
    """
    if isinstance(regularizers, losses.Regularizer):
        return (regularizers,)
    if isinstance(regularizers, (str, Mapping)) or not isinstance(
        regularizers, Iterable
    ):
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

    For a batch of nothing but padding it is too small to count next to any other, and
    not 0, so that its loss is shown unchanged.
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
