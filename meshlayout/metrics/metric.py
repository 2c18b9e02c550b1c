"""Metrics as frozen values that hold one array of sums, and metrics of numbers.

A metric passes through jit, scan, shard_map and checkpoints as a pytree, so its array
must keep shape and dtype, and metrics must merge in any grouping. Sums do both.
"""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from meshlayout import _checks
from meshlayout.arrays.placement import array_text
from meshlayout.collectives import current_context
from meshlayout.errors import MetricError, did_you_mean


Arrays: TypeAlias = Sequence[jax.Array]


@dataclass_transform(frozen_default=True, eq_default=False)
@dataclass(frozen=True, eq=False)  # == would compare arrays
class Metric:
    """Base of the built-in metrics: an immutable value, and a pytree.

    It follows the protocol of clu and metrax, with settings in the instance: `empty`,
    `from_model_output`, `merge` and `compute`; `update` merges a batch given as
    separate arguments. In `shard_map`, `jax.lax.psum` merges the metrics of all shards.

    `weights` are per element: None if all count, or an array of the shape of the
    elements or of their first dims. An element with several weights, such as a row with
    weights per token, counts 1 unless all are 0. One of weight 0 adds nothing, even if
    NaN; nor does a strategy's padding. Sums are float32: counts above 2**24 round.

    A subclass automatically becomes a frozen dataclass and a pytree: its annotated
    fields are settings, and part of the structure.

    Attributes:
        sums: The sums so far, float32.
    """

    # () until there are any. Not None, which JAX puts in the place of arrays.
    sums: Any = dataclasses.field(default=(), kw_only=True, repr=False)

    # The fields that name the arguments of `update`, in its order.
    _inputs: ClassVar[tuple[str, ...]] = ()
    _kind: ClassVar[Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # To jax 0.8 to 0.12, two dataclasses with the same settings are equal, and jit
        # may run the program of one for the other: so the class is a setting.
        cls.__annotations__ = {**inspect.get_annotations(cls), "_kind": type}
        cls._kind = dataclasses.field(default=cls, kw_only=True, repr=False)
        dataclass(frozen=True, eq=False)(cls)
        settings = [x.name for x in dataclasses.fields(cls) if x.name != "sums"]
        jax.tree_util.register_dataclass(cls, ["sums"], settings)
        _checks.user_call(cls)

    def __post_init__(self) -> None:
        if isinstance(self.sums, tuple):
            object.__setattr__(self, "sums", np.zeros(self._shape(), np.float32))

    def _shape(self) -> tuple[int, ...]:
        """Returns the shape of the sums, and checks the settings."""
        raise NotImplementedError

    def _sums_of(self, inputs: Arrays, weights: ArrayLike | None) -> jax.Array:
        raise NotImplementedError

    def _added(self, *inputs: ArrayLike, weights: ArrayLike | None) -> Self:
        arrays = map(self._array, self._inputs, inputs)
        sums = self._merged(jnp.asarray(self.sums), self._sums_of([*arrays], weights))
        return dataclasses.replace(self, sums=sums)

    def from_model_output(
        self, *, weights: ArrayLike | None = None, **named: Any
    ) -> Self:
        """Returns the metric of one batch, or raises MetricError.

        Args:
            weights: The weights; None if all count.
            **named: Outputs and entries of the batch, including those that the settings
                name; positions are `"0"`, `"1"`.
        """
        kind, inputs = type(self).__name__, []
        home = "ml.metrics." * type(self).__module__.startswith("meshlayout.")
        for field in self._inputs:
            name = str(getattr(self, field))
            way_out = f" {home}{kind}({field}=...) takes the name or position of yours."
            if name == "loss":
                way_out = " A step reports the loss itself, as metrics['loss']."
            inputs.append(find(named, name, kind, way_out))
        return self.empty()._added(*inputs, weights=weights)

    def compute(self) -> jax.Array:
        """Returns the value; NaN where nothing was counted."""
        raise NotImplementedError

    def merge(self, other: Self) -> Self:
        """Returns the metric of everything that both counted; classes must match."""
        if jax.tree.structure(self) != jax.tree.structure(other):
            msg = f"{self!r} does not merge with {other!r}: both must have the same "
            raise MetricError(f"{msg}class and settings.")
        sums = self._merged(jnp.asarray(self.sums), jnp.asarray(other.sums))
        return dataclasses.replace(self, sums=sums)

    def _merged(self, sums: jax.Array, others: jax.Array) -> jax.Array:
        return sums + others

    def empty(self) -> Self:
        """Returns the empty metric of the same settings."""
        return dataclasses.replace(self, sums=())

    def _array(self, name: str, x: ArrayLike) -> jax.Array:
        return _checks.real_array(name, x, where=type(self).__name__, error=MetricError)

    def _weights(self, weights: ArrayLike | None, elements: jax.Array) -> jax.Array:
        """Returns one float32 weight per element, 0 for a strategy's padding."""
        context, name = current_context.get(), "weights"
        mask = None if context is None or context.mask is None else context.example_mask
        if weights is not None:
            factors = self._array(name, weights).astype(jnp.float32)
            if mask is not None and factors.shape[:1] == mask.shape:
                is_real = jnp.expand_dims(mask > 0, range(1, factors.ndim))
                factors = jnp.where(is_real, factors, 0)
        elif mask is not None:
            factors, name = mask, "this replica's example_mask"
        else:
            return jnp.ones_like(elements, dtype=jnp.float32)
        if factors.shape[: elements.ndim] != elements.shape[: factors.ndim]:
            raise MetricError(
                f"{type(self).__name__}: {array_text(name, factors)} does not fit "
                f"{array_text('elements', elements)}. Give weights of the shape of the "
                f"elements or of their first dims, such as {elements.shape[:1]}."
            )
        extra = tuple(range(elements.ndim, factors.ndim))
        if extra or not elements.ndim:  # one number of several, which may be padding
            factors = jnp.any(factors != 0, extra).astype(jnp.float32)
        factors = jnp.expand_dims(factors, range(factors.ndim, elements.ndim))
        return jnp.broadcast_to(factors, elements.shape)


class MeanMetric(Metric):
    """Base of the metrics that are a weighted mean."""

    def _shape(self) -> tuple[int, ...]:
        return (2,)

    def _mean_sums(self, values: jax.Array, weights: ArrayLike | None) -> jax.Array:
        """Returns the sum of the values times their weights, and of the weights."""
        values = values.astype(jnp.float32)
        counts = self._weights(weights, values)
        total = jnp.sum(jnp.where(counts != 0, values * counts, 0))  # 0 for NaN times 0
        return jnp.stack([total, jnp.sum(counts)])

    @property
    def total(self) -> jax.Array:
        """The weighted sum so far, a float32 scalar."""
        return jnp.asarray(self.sums)[0]

    @property
    def count(self) -> jax.Array:
        """The sum of the weights so far, a float32 scalar."""
        return jnp.asarray(self.sums)[1]

    def compute(self) -> jax.Array:
        """Returns the weighted mean; NaN where nothing was counted."""
        return self.total / self.count


class Mean(MeanMetric):
    """The weighted mean of values: `total` divided by `count`.

    Args:
        values: Their name in a step's outputs or batch; the default is the losses.

    Examples:
        >>> mean = Mean().update(jnp.array([1.0, 2.0, jnp.nan]), jnp.array([1, 1, 0]))
        >>> float(mean.compute()), float(mean.total), float(mean.count)
        (1.5, 3.0, 2.0)
    """

    values: str | int = "losses"

    _inputs: ClassVar[tuple[str, ...]] = ("values",)

    def update(self, values: ArrayLike, weights: ArrayLike | None = None) -> Self:
        """Returns the metric with a batch of values added.

        A value without dims, such as an auxiliary loss of a whole batch, counts once
        per update, unless all weights are 0.
        """
        return self._added(values, weights=weights)

    def _sums_of(self, inputs: Arrays, weights: ArrayLike | None) -> jax.Array:
        return self._mean_sums(inputs[0], weights)


class Sum(Mean):
    """The weighted sum of values, 0 if nothing was counted; arguments as for `Mean`."""

    def compute(self) -> jax.Array:
        """Returns the sum."""
        return self.total


class Last(Mean):
    """The most recent value: of a batch, the last element whose weight is not 0.

    Use this for a number per step, such as a learning rate. Arguments are as for
    `Mean`. Merging keeps the other metric's value, which is assumed to be later.
    """

    def _sums_of(self, inputs: Arrays, weights: ArrayLike | None) -> jax.Array:
        values = inputs[0]
        counted = self._weights(weights, values).ravel() != 0
        index = jnp.where(counted, jnp.arange(counted.size), -1)
        is_last = counted & (index == jnp.max(index, initial=-1))
        return self._mean_sums(values.ravel(), is_last)

    def _merged(self, sums: jax.Array, others: jax.Array) -> jax.Array:
        return jnp.where(others[1] > 0, others, sums)


def find(named: Mapping[str, Any], name: str, where: str, way_out: str = "") -> Any:
    """Returns an input by name, or raises MetricError."""
    if named.get(name) is not None:
        return named[name]
    names = [key for key, value in named.items() if value is not None]
    raise MetricError(
        f"{where}: there is no {name!r} among the outputs and the entries of the batch "
        f"({', '.join(map(repr, names)) or 'none'}).{did_you_mean(name, names)}"
        f"{way_out}"
    )
