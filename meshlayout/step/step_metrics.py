"""The metrics of a step: the loss and its parts, the update's notes, the user's own.

Which there are is known only when a step has been traced: a model may record losses,
and a user's metric that starts with integers may continue with floats. But the trace
takes the metrics as an argument. So it gets those that the step's options promise, and
if it finds others, it ends with `OtherMetricsError` and a second trace gets those.

"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout import _checks, _jax, losses
from meshlayout._annotations import Leaf, PyTree
from meshlayout.errors import MetricError, StepError
from meshlayout.metrics import Last, Mean, Metrics, Sum
from meshlayout.metrics.inputs import as_metric
from meshlayout.state import TrainState
from meshlayout.step.compiled_step import CompiledStep
from meshlayout.step.objective import RESERVED
from meshlayout.step.placement import StepMesh


T = TypeVar("T")

# Notes of an update that are not averaged over the examples.
_KINDS = {
    "learning_rate": Last,
    "loss_scale": Last,
    "skipped": Sum,
}


@dataclass(frozen=True)
class StepValues:
    """One step's own numbers.

    Attributes:
        parts: The parts of the loss, by name.
        notes: Other numbers: the learning rate, the gradients' norm.
        weight: The weight of the batch's examples; 0 if the step was skipped.
    """

    parts: Mapping[str, Any]
    notes: Mapping[str, Any]
    weight: Any

    @property
    def values(self) -> dict[str, Any]:
        """All numbers by name: the loss first, then its parts if there are several."""
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
        # As a batch of one: a value without dims counts 1, whatever its weight.
        weight = jnp.asarray(self.weight, "float32").reshape(1)
        for name, value in self.values.items():
            metric = metrics.metric(name)
            if isinstance(metric, Mean):
                updated[name] = metric.update(jnp.reshape(value, 1), weight)
            else:
                updated[name] = metric.update(value)
        return strong(Metrics({name: updated[name] for name in metrics}))


class OtherMetricsError(StepError):
    """A step that is being traced measures other metrics than those it was given.

    Args:
        names: The names of the step's own metrics.
        users: The user's metrics after a batch, abstract.
    """

    def __init__(self, names: Sequence[str], users: Metrics) -> None:
        measured = ", ".join([*names, *users])
        msg = (
            f"this batch makes the step measure {measured}, and other batches did not: "
            "what a model records must not depend on the batch."
        )
        super().__init__(msg)
        self.names, self.users = tuple(names), users


class MetricsStart:
    """Metrics that have counted nothing, on the mesh of a state.

    Args:
        empty: The metrics.
        mesh: The mesh.
    """

    def __init__(self, empty: Metrics, mesh: StepMesh) -> None:
        self._mesh = mesh
        self.empty: Metrics = mesh.put(empty, is_own=True)
        self.treedef = jax.tree.structure(self.empty)
        self.is_confirmed = False  # a trace has measured the same metrics

    def given(self, name: str, metrics: Metrics | None) -> Metrics:
        """Returns the metrics that a step adds to.

        Args:
            name: The step.
            metrics: The metrics of an earlier call, or None for empty ones.

        Raises:
            StepError: If they are not the metrics of this step.
        """
        if metrics is None:
            return self.empty
        check_metrics(name, metrics, self.empty)
        placed = self._mesh.put(_cast(strong(metrics), self.empty), is_own=True)
        if jax.tree.structure(placed) != self.treedef:
            msg = (
                f"{name}: the metrics given have the names of this step's metrics but "
                "other settings. Start with None, and pass on what the step returned."
            )
            raise StepError(msg)
        return placed


class StepMetrics:
    """The metrics of a step on one mesh.

    Args:
        name: The step.
        users: The user's metrics, as they start.
        mesh: The mesh of the states.
    """

    def __init__(self, name: str, users: Mapping[str, Any], mesh: StepMesh) -> None:
        self._name, self._users, self._mesh = name, users, mesh
        self._starts: dict[Hashable, MetricsStart] = {}

    def run(
        self,
        compiled: CompiledStep[..., Any],
        args: tuple[Any, ...],
        state: TrainState,
        metrics: Metrics | None,
        expected: Callable[[TrainState], Sequence[str]],
        *,
        is_traced: bool = False,
    ) -> tuple[Any, MetricsStart]:
        """Calls a compiled step with the arrays of its metrics, or traces it.

        Args:
            compiled: The step, which adds to the metrics with `add`.
            args: Its arguments before the metrics.
            state: The state.
            metrics: Metrics to add to; None for empty ones.
            expected: Returns the names of the step's own metrics, as far as its
                options tell; called once per model and optimizer.
            is_traced: Whether to trace it.

        Returns:
            What the compiled step returns, and where the metrics start.

        Raises:
            StepError: If the metrics are not those of this step.
        """
        run = compiled.trace if is_traced else compiled
        # What a model records depends on its code, so each has metrics of its own.
        code = state.program
        start = self._starts.get(code)
        if start is None:
            start = self._starts[code] = self._start(expected(state), None)
        try:
            names = list(metrics) if isinstance(metrics, Metrics) else None
            if not start.is_confirmed and names not in (None, list(start.empty)):
                compiled.trace(*args, start.empty)  # the trace decides who is right
            result = run(*args, start.given(self._name, metrics))
        except OtherMetricsError as other:
            if start.is_confirmed:  # another batch was measured otherwise
                raise
            start = self._starts[code] = self._start(other.names, other.users)
            result = run(*args, start.given(self._name, metrics))
        start.is_confirmed = True
        return result, start

    def _start(self, names: Sequence[str], updated: Metrics | None) -> MetricsStart:
        for name in names:
            if name in self._users:
                msg = (
                    f"metrics=: {name!r} is also a part of the loss; take another name."
                )
                raise StepError(msg)
        own = {name: _KINDS.get(name, Mean)() for name in names}
        users = dict(self._users)
        if updated is not None:
            users = {name: _cast(x, updated.metric(name)) for name, x in users.items()}
        return MetricsStart(Metrics({**own, **users}), self._mesh)

    def add(
        self,
        code: Hashable,
        before: Metrics,
        measure: Callable[[Metrics], tuple[StepValues, Metrics, T]],
    ) -> tuple[T, Metrics]:
        """Adds what a step measures to its metrics, inside jit.

        Args:
            code: The code of the state.
            before: The metrics before.
            measure: Given the user's metrics, returns the step's values, the user's
                metrics with the batch added, and any other results.

        Returns:
            The other results, and the metrics after.

        Raises:
            OtherMetricsError: If the step measures others, or they need other dtypes:
                what starts with integers may continue with floats.
        """
        users = Metrics({name: before.metric(name) for name in self._users})
        values, updated, rest = measure(users)
        names = list(values.values)
        if [*names, *users] != list(before) or _grows(users, updated):
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), updated
            )
            raise OtherMetricsError(names, shapes)
        # The compiler might shard a sum; the next call would then be a recompilation.
        return rest, self._mesh.everywhere(values.added_to(before, updated))


def strong(tree: PyTree) -> Any:
    """Returns a tree of arrays, none of them weakly typed, as Python's numbers are."""
    return jax.tree.map(_as_strong, tree)


def _as_strong(leaf: Leaf) -> Any:
    if isinstance(leaf, (int, float, complex)):
        leaf = np.asarray(leaf)
        return leaf.astype(_jax.canonical_dtype(leaf.dtype))
    is_weak = isinstance(leaf, jax.Array) and jax.typeof(leaf).weak_type
    return _jax.with_weak_type(leaf, weak_type=False) if is_weak else leaf


def user_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the user's metrics, as they start.

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
    """Returns a metric of the user's, checked."""
    try:
        metric = as_metric(metric)
    except MetricError as error:
        msg = f"metrics=: {name!r}: {error}"
        raise StepError(msg) from None
    for keys, leaf in jax.tree_util.tree_flatten_with_path(metric)[0]:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        if leaf is metric:
            msg = (
                f"metrics=: {name!r} is a {type(metric).__name__}, which JAX does not "
                "know as a tree of arrays. Register the class with "
                "jax.tree_util.register_dataclass, or make it a flax.struct.dataclass."
            )
            raise StepError(msg)
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (int, float, complex)):
            msg = (
                f"metrics=: the field {path!r} of {name!r} is {leaf!r}, not an array. "
                'Mark it static: dataclasses.field(metadata={"static": True}), or '
                "flax.struct.field(pytree_node=False)."
            )
            raise StepError(msg)
    return strong(metric)


def _cast(tree: PyTree, like: PyTree) -> Any:
    """Returns a tree in the dtypes of another like it, where those hold more."""
    if jax.tree.structure(tree) != jax.tree.structure(like):
        return tree

    def cast(leaf: Leaf, other: Leaf) -> Any:
        if leaf.dtype == other.dtype or isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return leaf.astype(jnp.promote_types(leaf.dtype, other.dtype))

    return jax.tree.map(cast, tree, like)


def _grows(metrics: Metrics, updated: Metrics) -> bool:
    """Returns whether metrics need dtypes that hold more after an update."""
    pairs = zip(jax.tree.leaves(metrics), jax.tree.leaves(updated), strict=False)
    return jax.tree.structure(metrics) == jax.tree.structure(updated) and any(
        a.dtype != b.dtype and jnp.promote_types(a.dtype, b.dtype) != a.dtype
        for a, b in pairs
    )


def as_regularizers(regularizers: Any) -> dict[str, losses.Regularizer]:
    """Returns a step's regularizers by name, or raises StepError."""
    regularizers = {} if regularizers is None else regularizers
    is_dict = isinstance(regularizers, Mapping)
    if not is_dict or not all(map(callable, regularizers.values())):
        msg = (
            "regularizers= takes a dict from names to functions of the parameters, as "
            f"{{'l2': losses.l2(1e-5)}}, got {_checks.shown(regularizers)}."
        )
        raise StepError(msg)
    for name in regularizers:
        if name in RESERVED:
            msg = (
                f"regularizers=: {name!r} is reported by every step; take another name."
            )
            raise StepError(msg)
    return dict(regularizers)


def total_weight(batch_weights: Any, num_examples: int) -> Any:
    """Returns the weight of a batch's examples.

    For a batch of padding alone it is too small to count next to any other, and not 0,
    so that its loss is reported unchanged.
    """
    if batch_weights is None:
        return jnp.float32(num_examples)
    total = jnp.asarray(batch_weights).astype("float32").sum()
    return jnp.where(total > 0, total, 1e-30)


def check_metrics(name: str, given: Any, empty: Metrics) -> None:
    """Raises StepError unless metrics to add to are those of this step."""
    if not isinstance(given, Metrics):
        msg = (
            f"{name}: metrics to add to are what an earlier call returned; got "
            f"{_checks.type_text(given)}."
        )
        raise StepError(msg)
    if tuple(given) != tuple(empty):
        msg = (
            f"{name}: the metrics given are {', '.join(given)}, and this step measures "
            f"{', '.join(empty)}. Start with None, and pass on what the step returned."
        )
        raise StepError(msg)
