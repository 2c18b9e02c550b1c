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


def values_of(strategy: Strategy, *parts: Any) -> Any:
    """Gives each replica a value of its own."""
    return strategy.distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group]
    )


def split(strategy: Strategy, x: Any, size: int = 0) -> Any:
    """Gives each replica rows of an array, `size` as long as there are any."""
    count, x = strategy.num_replicas_in_sync, np.asarray(x)
    size = size or len(x) // count
    return values_of(strategy, *[x[i * size :][:size] for i in range(count)])


def total(strategy: Strategy, value: Any, axis: int | None = None) -> float:
    """Returns the sum of what `run` returned."""
    return float(strategy.reduce("SUM", value, axis=axis))


def parts_of(strategy: Strategy, value: Any) -> list[Any]:
    """Returns the value of each replica, as numbers in lists."""
    return [np.asarray(part).tolist() for part in strategy.local_results(value)]


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
