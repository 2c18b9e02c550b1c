"""The base of the built-in metrics: frozen values whose accumulators are exact sums.

A metric passes through jit, scan, shard_map and checkpoints as a pytree, so its arrays
must keep their structure, shapes and dtypes from the first update to the last, and
metrics must merge in any grouping. Sums do both. Each is kept as two float32 numbers:
a single one stops counting at 2**24, and float64 is slow or missing on accelerators.
"""

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Self,
    TypeVar,
    cast,
    dataclass_transform,
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from meshlayout import _checks, _render
from meshlayout.collectives import current_context
from meshlayout.errors import MetricError


if TYPE_CHECKING:
    from meshlayout.metrics.inputs import MetricInputs


_Class = TypeVar("_Class", bound=type)

# Stands for an accumulator that `_start` has to fill. Not None: a function that is
# mapped over a metric may return that, and it must stay.
EMPTY = cast(Any, object())


def setting(*, default: Any = dataclasses.MISSING) -> Any:
    """Returns a field for a metric's configuration, which is not an array."""
    return dataclasses.field(default=default, metadata={"static": True})


def source(*, default: str | int) -> Any:
    """Returns a field that names the output or batch entry for an argument."""
    return dataclasses.field(default=default, metadata={"static": True, "source": True})


def accumulator(*, default: Any, kw_only: Literal[True]) -> Any:
    """Returns a field for a metric's state, which `_start` fills if it is EMPTY."""
    return dataclasses.field(default=default, repr=False, kw_only=kw_only)


@dataclass_transform(
    frozen_default=True, field_specifiers=(setting, source, accumulator)
)
def metric_class(cls: _Class) -> _Class:
    """Makes a class a frozen dataclass and a pytree.

    Not by `jax.tree_util.register_dataclass`: to jax 0.8 to 0.12, the structures of two
    such classes with the same fields are equal, and jit may then run the program of
    `Precision` for a `Recall`.
    """
    # Without ==, which would compare arrays; metrics are compared by their values.
    metric_type = dataclass(frozen=True, eq=False)(cls)
    fields = dataclasses.fields(metric_type)
    static = tuple(field.name for field in fields if field.metadata.get("static"))
    names = tuple(field.name for field in fields if field.name not in static)
    keys = [jax.tree_util.GetAttrKey(name) for name in names]

    def flatten(metric: Any) -> tuple[list[Any], tuple[Any, ...]]:
        arrays = [getattr(metric, name) for name in names]
        return arrays, tuple(getattr(metric, name) for name in static)

    def flatten_with_keys(metric: Any) -> tuple[Any, tuple[Any, ...]]:
        arrays, settings = flatten(metric)
        return zip(keys, arrays, strict=True), settings

    def unflatten(settings: tuple[Any, ...], arrays: Iterable[Any]) -> Any:
        values = zip(static + names, (*settings, *arrays), strict=True)
        return metric_type(**dict(values))

    jax.tree_util.register_pytree_with_keys(
        metric_type, flatten_with_keys, unflatten, flatten
    )
    return metric_type


@functools.cache
def source_fields(kind: type["Metric"]) -> tuple[str, ...]:
    """Returns the fields that name the sources of `update`'s arguments, in order."""
    fields = dataclasses.fields(kind)
    return tuple(field.name for field in fields if field.metadata.get("source"))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Total:
    """A sum, or an array of sums, as float32 numbers with their rounding errors.

    Together they count integers exactly up to 2**48.

    Attributes:
        parts: float32 of shape (2, ...): the rounded sums, and their rounding errors.
            One array, because every array of its state costs a step host time.
    """

    parts: jax.Array | np.ndarray[Any, Any]

    @classmethod
    def zeros(cls, shape: tuple[int, ...] = ()) -> "Total":
        """Returns an empty sum, which is not on a device yet."""
        return cls(np.zeros((2, *shape), np.float32))

    @property
    def value(self) -> jax.Array:
        """The sum, in float32."""
        return jnp.sum(self.parts, axis=0)

    def add(self, x: ArrayLike) -> "Total":
        """Returns the sum with a float32 array added, element by element."""
        return self._plus(x, 0)

    def merge(self, other: "Total") -> "Total":
        """Returns the sum of two sums."""
        return self._plus(other.parts[0], other.parts[1])

    def _plus(self, high: ArrayLike, low: ArrayLike) -> "Total":
        rounded, error = _two_sum(self.parts[0], high)
        low = jnp.add(self.parts[1], low) + error
        return Total(jnp.stack(_two_sum(rounded, low)))


def _two_sum(a: ArrayLike, b: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Returns a sum rounded to float32, and its exact rounding error.

    Knuth's TwoSum, which does not need to know the larger number. It relies on the
    compiler not to reassociate sums, which XLA does only with fast math.
    """
    a, b = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
    rounded = a + b
    b_part = rounded - a
    error = (a - (rounded - b_part)) + (b - b_part)
    # Of an infinite sum the error is NaN, which would turn the infinity into NaN.
    return rounded, jnp.where(jnp.isfinite(rounded), error, 0)


@dataclass(frozen=True, eq=False)
class Metric:
    """Base of the built-in metrics: an immutable value, and a pytree.

    The arrays hold what has been counted so far; the configuration is in static fields.
    `update`, `merge` and `reset` return new metrics, and `merge` is associative, so
    that steps, shards and processes can be merged in any grouping. They work eagerly
    and inside jit, scan, vmap and shard_map, on inputs in any layout.

    `weights` are per element: None if all elements count, or an array of the shape of
    the elements or of their first dims. An element of weight 0 adds nothing, even if it
    is NaN. Negative weights are meaningless, and not checked for. Inputs of any dtype
    are summed in float32. In a function that a strategy runs, rows that pad a short
    batch add nothing either.

    A subclass may have further fields; every update keeps them. Arrays among them are
    added when two metrics merge.
    """

    def __post_init__(self) -> None:
        # JAX makes metrics of tracers and placeholders all the time; only those that
        # a user makes have empty fields, and need to be checked.
        fields = dataclasses.fields(self)
        if any(getattr(self, field.name) is EMPTY for field in fields):
            self._check_sources()
            self._check()
            empty = self._start()
            self._set(**{k: v for k, v in empty.items() if getattr(self, k) is EMPTY})

    def _set(self, **values: Any) -> None:
        # Only from `__post_init__`: afterwards a metric is frozen.
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def _context(self) -> dict[str, Any]:
        """The context of a check, for its message."""
        return {"where": type(self).__name__, "error": MetricError}

    def _check_sources(self) -> None:
        for field in source_fields(type(self)):
            name = getattr(self, field)
            is_name = isinstance(name, str) and name
            is_position = type(name) is int and name >= 0  # which leaves out True
            if not is_name and not is_position:
                msg = (
                    f"{type(self).__name__}: {field} must be the name of an output or "
                    "of an entry of the batch, or the position of an entry, got "
                    f"{_checks.shown(name)}."
                )
                raise MetricError(msg)

    def _check(self) -> None:
        """Checks the configuration; raises MetricError if it is wrong."""

    def _start(self) -> dict[str, Any]:
        """Returns the empty accumulators by name."""
        raise NotImplementedError

    def update(self, *args: Any, **kwargs: Any) -> Self:
        """Returns the metric with a batch added; subclasses name the inputs."""
        raise NotImplementedError

    def _added(self, elements: Any, weights: jax.Array) -> Self:
        """Returns the metric with checked elements and their weights added."""
        raise NotImplementedError

    def _update_from(self, inputs: "MetricInputs") -> Self:
        """Returns the metric with a step added, whose inputs are found by name."""
        kind = type(self)
        names = [getattr(self, field) for field in source_fields(kind)]
        args = [inputs.find(name, kind.__name__) for name in names]
        # A metric of the whole batch names none of its parts.
        return self.update(*(args or [inputs.batch]), inputs.weights)

    def compute(self) -> jax.Array:
        """Returns the value; NaN where nothing was counted."""
        raise NotImplementedError

    def merge(self, other: Self) -> Self:
        """Returns the metric of everything that this one and another have counted.

        Args:
            other: A metric of the same class and configuration.

        Raises:
            MetricError: If the class or configuration differs.
        """
        structures = jax.tree.structure(self), jax.tree.structure(other)
        if type(self) is not type(other) or structures[0] != structures[1]:
            theirs = repr(other) if isinstance(other, Metric) else _checks.shown(other)
            msg = (
                f"{self!r} does not merge with {theirs}: both must have the same class "
                "and configuration."
            )
            raise MetricError(msg)
        return self._merged(other)

    def _merged(self, other: Any) -> Self:
        def add(a: Any, b: Any) -> Any:
            return a.merge(b) if isinstance(a, Total) else jnp.add(a, b)

        return jax.tree.map(add, self, other, is_leaf=lambda x: isinstance(x, Total))

    def reset(self) -> Self:
        """Returns the empty metric of the same configuration."""
        settings = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.metadata.get("static")
        }
        return type(self)(**settings)

    def all_reduce(self, axis_name: str | tuple[str, ...]) -> Self:
        """Merges the metrics of all shards of a mesh axis, inside shard_map.

        The shards are merged in the order of the axis. If the metric is a sum,
        `jax.lax.psum` of it gives the same up to float32 rounding.

        Args:
            axis_name: The mesh axis, or several.

        Returns:
            The metric of all shards, the same on each of them.

        Example:
            >>> from jax.sharding import PartitionSpec as P
            >>> import meshlayout as ml
            >>> from meshlayout.metrics import Mean
            >>> mesh = ml.create_mesh({"batch": 8}).jax_mesh
            >>> def mean(x):
            ...     return Mean().update(x).all_reduce("batch").compute()
            >>> shards = jax.shard_map(
            ...     mean, mesh=mesh, in_specs=P("batch"), out_specs=P()
            ... )
            >>> float(jax.jit(shards)(jnp.arange(16.0)))
            7.5
        """
        size = jax.lax.psum(1, axis_name)
        index = jax.lax.axis_index(axis_name)

        # An all-gather, written as a sum with zeros: that is exact as well, and JAX
        # knows that its result is the same on every shard.
        def gather(x: ArrayLike) -> jax.Array:
            x = jnp.asarray(x)
            is_own = jnp.arange(size).reshape(-1, *[1] * x.ndim) == index
            return jax.lax.psum(jnp.where(is_own, x[None], 0), axis_name)

        # One after another, because not every metric is a sum: `Last` takes the last.
        shards = jax.tree.map(gather, self)
        merged = jax.tree.map(lambda x: x[0], shards)
        for shard in range(1, size):
            merged = merged.merge(jax.tree.map(lambda x, i=shard: x[i], shards))
        return merged


@metric_class
class SumMetric(Metric):
    """Base of the metrics that are computed from sums, all in one array.

    One, because every array of its state costs a step host time.
    """

    sums: Total = accumulator(default=EMPTY, kw_only=True)

    @property
    def _shape(self) -> tuple[int, ...]:
        """The shape of the sums."""
        return ()

    def _start(self) -> dict[str, Any]:
        return {"sums": Total.zeros(self._shape)}

    def _added(self, elements: Any, weights: jax.Array) -> Self:
        sums = self.sums.add(self._sums_of(elements, weights))
        return dataclasses.replace(self, sums=sums)

    def _sums_of(self, elements: Any, weights: jax.Array) -> jax.Array:
        """Returns what the elements add to the sums."""
        raise NotImplementedError


class MeanMetric(SumMetric):
    """Base of the metrics that are a weighted mean."""

    @property
    def _shape(self) -> tuple[int, ...]:
        return (2,)

    def _sums_of(self, elements: Any, weights: jax.Array) -> jax.Array:
        return jnp.stack([jnp.sum(weighted(elements, weights)), jnp.sum(weights)])

    @property
    def total(self) -> jax.Array:
        """The weighted sum so far, a float32 scalar."""
        return self.sums.value[0]

    @property
    def count(self) -> jax.Array:
        """The sum of the weights so far, a float32 scalar."""
        return self.sums.value[1]

    def compute(self) -> jax.Array:
        """Returns the weighted mean; NaN where nothing was counted."""
        return self.total / self.count


class ValueMetric(Metric):
    """Base of the metrics of one array of numbers."""

    def update(self, values: ArrayLike, weights: ArrayLike | None = None) -> Self:
        """Returns the metric with a batch of values added.

        Args:
            values: Any numbers.
            weights: Per element; see `Metric`. A value without dims counts once per
                update, unless all weights are 0.

        Raises:
            MetricError: If the weights do not fit the values.
        """
        where = type(self).__name__
        elements = as_float(values, "values", where)
        return self._added(
            elements, element_weights(weights, elements, "values", where)
        )


# Inputs from users. `where` is the name of the metric, which opens a message.


def as_array(x: ArrayLike, name: str, where: str) -> jax.Array:
    """Returns an input as an array of real numbers or bools, or raises MetricError."""
    return _checks.real_array(name, x, where=where, error=MetricError)


def as_float(x: ArrayLike, name: str, where: str) -> jax.Array:
    """Returns an input as a float32 array."""
    return as_array(x, name, where).astype(jnp.float32)


def text(name: str, x: jax.Array) -> str:
    """Returns an array's name and type, for a message."""
    return f"{name} {_render.array_text(x.dtype, x.shape)}"


def element_weights(
    weights: ArrayLike | None, elements: jax.Array, name: str, where: str
) -> jax.Array:
    """Returns one float32 weight per element.

    Args:
        weights: None, or an array whose shape is that of the elements' first dims. For
            a single number, of any shape: it has weight 1 unless all weights are 0. In
            a function that a strategy runs, those of padding are 0 in any case.
        elements: The elements that are counted.
        name: The name of the elements, for messages.
        where: The name of the metric.

    Raises:
        MetricError: If the shapes do not fit.
    """
    mask = _replica_mask()
    if weights is None:
        if mask is None:
            return jnp.ones_like(elements, dtype=jnp.float32)
        _check_rows(elements, mask, name, where)
        weights = mask
    weights = as_float(weights, "weights", where)
    if mask is not None and weights.shape[:1] == mask.shape:
        is_real = mask.reshape(-1, *[1] * (weights.ndim - 1)) > 0
        weights = jnp.where(is_real, weights, 0)
    if not elements.ndim:  # a loss of the whole batch, which may be all padding
        return jnp.any(weights != 0).astype(jnp.float32)
    if weights.shape != elements.shape[: weights.ndim]:
        msg = (
            f"{where}: {text('weights', weights)} does not fit {text(name, elements)}. "
            "Weights have the shape of the elements or of their first dims, such as "
            f"{elements.shape[:1]}."
        )
        raise MetricError(msg)
    missing = tuple(range(weights.ndim, elements.ndim))
    return jnp.broadcast_to(jnp.expand_dims(weights, missing), elements.shape)


def _replica_mask() -> jax.Array | None:
    """Returns which rows are real, in a function that a strategy runs."""
    context = current_context.get()
    if context is None or context.mask is None:
        return None
    return context.example_mask


def _check_rows(elements: jax.Array, mask: jax.Array, name: str, where: str) -> None:
    """Raises MetricError if it is not known which elements are of padding."""
    if elements.ndim and elements.shape[0] != mask.shape[0]:
        msg = (
            f"{where}: {text(name, elements)} has not one entry per row of this "
            f"replica's batch of {mask.shape[0]} rows, some of which may be padding. "
            "Give weights, made of get_replica_context().example_mask."
        )
        raise MetricError(msg)


def weighted(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns values times weights; 0 where the weight is 0, even if a value is NaN."""
    return jnp.where(weights != 0, values * weights, 0)


NEEDED = (
    "must be an object with update, merge and compute. For metrics of clu, metrax or "
    "flax.nnx, use metrics.adapt."
)


def is_metric(value: object) -> bool:
    """Returns whether an object has the methods of a metric, as NEEDED lists them."""
    needed = ("update", "merge", "compute")
    return not isinstance(value, type) and all(hasattr(value, name) for name in needed)
