"""Metrics that are read once the device has computed them, without blocking."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from meshlayout._annotations import Leaf
from meshlayout.metrics import Metrics, Throughput
from meshlayout.trainer.epochs import TrainingPosition


class AsyncMetrics:
    """A queue of metrics, each read once its values are there.

    The values are computed from this process's copy, so that processes may look at
    different times. `Throughput` reads the clock, and waits: it is left out.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[TrainingPosition, dict[str, Any]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, position: TrainingPosition, metrics: Metrics) -> None:
        """Puts metrics in the queue.

        Args:
            position: Where they were measured.
            metrics: The metrics, on the device.
        """
        local = {
            name: jax.tree.map(_local, metrics.metric(name))
            for name in metrics
            if not isinstance(metrics.metric(name), Throughput)
        }
        self._waiting.append((position, Metrics(local).compute()))

    def ready(self) -> Iterator[tuple[TrainingPosition, dict[str, float]]]:
        """Yields the scalar values that are ready, oldest first."""
        while self._waiting and all(
            getattr(leaf, "is_ready", _always_ready)()
            for leaf in jax.tree.leaves(self._waiting[0][1])
        ):
            yield self._first()

    def drain(self) -> Iterator[tuple[TrainingPosition, dict[str, float]]]:
        """Yields all remaining values, waiting for them."""
        while self._waiting:
            yield self._first()

    def clear(self) -> None:
        """Empties the queue."""
        self._waiting.clear()

    def _first(self) -> tuple[TrainingPosition, dict[str, float]]:
        position, values = self._waiting.popleft()
        return position, numbers(values)


def _always_ready() -> bool:
    """Returns True: values that are not JAX arrays are always ready."""
    return True


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the scalar values.

    Args:
        values: Values by name: numbers and arrays.
    """
    return {name: float(value) for name, value in values.items() if not np.ndim(value)}


def _local(leaf: Leaf) -> Leaf:
    """Returns this process's copy of a replicated array."""
    if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
        return leaf.addressable_data(0)
    return leaf
