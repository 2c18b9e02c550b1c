"""The base of the built-in metrics: frozen values that hold sums.

A metric passes through jit, scan, shard_map and checkpoints as a pytree, so its arrays
must keep their structure, shapes and dtypes from the first batch to the last, and
metrics must merge in any grouping. Sums do both, in one array, because every array of
its state costs a step host time.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from meshlayout import _checks, _render
from meshlayout.collectives import current_context
from meshlayout.errors import MetricError, did_you_mean


_Class = TypeVar("_Class", bound=type)


def setting(*, default: Any) -> Any:
    """Returns a field for a metric's configuration, which is not an array."""
    return dataclasses.field(default=default, metadata={"static": True})


def source(*, default: str | int) -> Any:
    """Returns a field that names the output or batch entry for an argument."""
    return dataclasses.field(default=default, metadata={"static": True, "source": True})


@dataclass_transform(frozen_default=True, field_specifiers=(setting, source))
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
    keys = [jax.tree_util.GetAttrKey("sums")]

    def flatten(metric: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [metric.sums], tuple(getattr(metric, name) for name in static)

    def flatten_with_keys(metric: Any) -> tuple[Any, tuple[Any, ...]]:
        arrays, settings = flatten(metric)
        return zip(keys, arrays, strict=True), settings

    def unflatten(settings: tuple[Any, ...], arrays: Iterable[Any]) -> Any:
        # Past __init__: JAX makes metrics of None and of placeholders, too.
        metric = object.__new__(metric_type)
        for name, value in zip((*static, "sums"), (*settings, *arrays), strict=True):
            object.__setattr__(metric, name, value)
        return metric

    jax.tree_util.register_pytree_with_keys(
        metric_type, flatten_with_keys, unflatten, flatten
    )
    return metric_type


@functools.cache
def source_fields(kind: type["Metric"]) -> tuple[str, ...]:
    """Returns the fields that name the sources of `update`'s arguments, in order."""
    fields = dataclasses.fields(kind)
    return tuple(field.name for field in fields if field.metadata.get("source"))


@dataclass(frozen=True, eq=False)
class Metric:
    """Base of the built-in metrics: an immutable value, and a pytree.

    It follows the protocol of clu and metrax, with settings in the instance: `empty`,
    `from_model_output`, `merge` and `compute`; `update` merges a batch whose arguments
    are given one by one. `merge` is associative, so that steps, shards and processes
    can be merged in any grouping, and `jax.lax.psum` of a metric merges those of all
    shards in `shard_map`. All of it works eagerly and inside jit, scan, vmap and
    shard_map, on inputs in any layout.

    `weights` are per element: None if all elements count, or an array of the shape of
    the elements or of their first dims. An element of weight 0 adds nothing, even if it
    is NaN. Inputs of any dtype are summed in float32, so that a count of more than
    2**24 is rounded. In a function that a strategy runs, rows that pad a short batch
    add nothing either.

    Attributes:
        sums: float32: what has been counted so far.
    """

    sums: Any = dataclasses.field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if self.sums is None:
            self._check_sources()
            self._check()
            self._set(sums=np.zeros(self._shape, np.float32))

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

    @property
    def _shape(self) -> tuple[int, ...]:
        """The shape of the sums."""
        return ()

    def update(self, *args: Any, **kwargs: Any) -> Self:
        """Returns the metric with a batch added; subclasses name the inputs."""
        raise NotImplementedError

    def _added(self, sums: jax.Array) -> Self:
        """Returns the metric with the sums of a batch added."""
        return dataclasses.replace(self, sums=self._merged(self.sums, sums))

    def from_model_output(self, **named: Any) -> Self:
        """Returns the metric of one batch alone.

        Args:
            **named: The outputs of the model and the entries of the batch, among them
                those that the metric's settings name; and `weights`, if any.

        Raises:
            MetricError: If an input is missing, or does not fit.
        """
        return self.of(named, named.get("weights"))

    def of(self, named: Mapping[Any, Any], weights: ArrayLike | None) -> Self:
        """Returns the metric of one batch alone, with the entries of any batch.

        Args:
            named: The outputs and entries, by name or position.
            weights: The weights; None if all count.
        """
        where = type(self).__name__
        names = [getattr(self, field) for field in source_fields(type(self))]
        args = [find(named, name, where) for name in names]
        return self.empty().update(*args, weights)

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
        return self._added(other.sums)

    def _merged(self, sums: ArrayLike, others: ArrayLike) -> jax.Array:
        """Returns the sums of two metrics together."""
        return jnp.add(sums, others)

    def empty(self) -> Self:
        """Returns the empty metric of the same configuration."""
        return dataclasses.replace(self, sums=None)


# Inputs. `where` is the name of the metric, which opens a message.


def find(named: Mapping[Any, Any], name: str | int, where: str) -> Any:
    """Returns an input by name, or raises MetricError."""
    if named.get(name) is not None:
        return named[name]
    names = [key for key, value in named.items() if value is not None]
    msg = (
        f"{where}: there is no {name!r} among the outputs and the entries of the batch "
        f"({', '.join(map(repr, names)) or 'none'})."
        f"{did_you_mean(name, map(str, names))}"
    )
    raise MetricError(msg)


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
    context = current_context.get()
    mask = None
    if context is not None and context.mask is not None:
        mask = context.example_mask
    if weights is None and mask is None:
        return jnp.ones_like(elements, dtype=jnp.float32)
    if weights is None:
        weights = _mask_of(elements, mask, name, where)
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


def _mask_of(elements: jax.Array, mask: Any, name: str, where: str) -> jax.Array:
    """Returns which rows are real, if it is known which elements are of padding."""
    if elements.ndim and elements.shape[0] != mask.shape[0]:
        msg = (
            f"{where}: {text(name, elements)} has not one entry per row of this "
            f"replica's batch of {mask.shape[0]} rows, some of which may be padding. "
            "Give weights, made of get_replica_context().example_mask."
        )
        raise MetricError(msg)
    return mask


def weighted(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns values times weights; 0 where the weight is 0, even if a value is NaN."""
    return jnp.where(weights != 0, values * weights, 0)


def mean_sums(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns what a mean sums up: the values times their weights, and the weights."""
    return jnp.stack([jnp.sum(weighted(values, weights)), jnp.sum(weights)])
