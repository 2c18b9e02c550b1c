"""Strategies of virtual devices, values for their replicas, and small models."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from meshlayout.distribute import MirroredStrategy, Strategy


def mirrored(replicas: int) -> MirroredStrategy:
    """Returns a strategy of so many devices."""
    return MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def split(strategy: Strategy, x: Any, size: int = 0) -> Any:
    """Gives each replica rows of an array, `size` as long as there are any."""
    x, size = np.asarray(x), size or len(x) // strategy.num_replicas_in_sync
    return strategy.distribute_values_from_function(
        lambda c: x[c.replica_id_in_sync_group * size :][:size]
    )


def values_of(strategy: Strategy, *values: float) -> Any:
    """Gives each replica a number."""
    return strategy.distribute_values_from_function(
        lambda c: np.float32(values[c.replica_id_in_sync_group])
    )


def total(strategy: Strategy, value: Any, axis: int | None = None) -> float:
    """Returns the sum of what `run` returned."""
    return float(strategy.reduce("SUM", value, axis=axis))


class Scale(nnx.Module):
    """Multiplies by its parameter."""

    def __init__(self, factor: float) -> None:
        self.factor = nnx.Param(jnp.float32(factor))

    def __call__(self, x: Any) -> Any:
        """Returns the product."""
        return self.factor[...] * x


def scale(strategy: Strategy, factor: float) -> Scale:
    """Returns a model of the strategy."""
    with strategy.scope():
        return Scale(factor)


class Regression(nnx.Module):
    """A linear model, whose bias has the same gradient whatever the batch is."""

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.ones(3))
        self.bias = nnx.Param(jnp.zeros(()))
        self.penalized = nnx.Param(jnp.full(3, 2.0))

    def __call__(self, x: Any) -> Any:
        """Returns one number per row."""
        return (x * self.weight[None]).sum(-1) + self.bias[...]


def made(strategy: Strategy, build: Any = Regression, rate: float = 1.0) -> Any:
    """Returns a model of the strategy, and an optimizer."""
    with strategy.scope():
        model = build()
        return model, nnx.Optimizer(model, optax.sgd(rate), wrt=nnx.Param)
