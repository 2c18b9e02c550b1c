"""`Strategy.extended`: extra methods for library authors, as tf.distribute has them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from meshlayout._axes import parse_devices
from meshlayout.collectives import ReduceOp
from meshlayout.distribute.variables import raw_value
from meshlayout.layout import Layout


if TYPE_CHECKING:
    from meshlayout.distribute.strategy import Strategy


class StrategyExtended:
    """Extra methods for library authors; get it as `strategy.extended`.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: "Strategy") -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[Any, ...]:
        """The devices that compute: those of all replicas, in order."""
        return tuple(self._strategy.mesh.devices.flat)

    @property
    def parameter_devices(self) -> tuple[Any, ...]:
        """The devices that hold variables, also if in the memory of their host."""
        return self.worker_devices

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any
    ) -> Any:
        """Combines values of all replicas, and puts the result on a device.

        Args:
            reduce_op: As for `Strategy.reduce`.
            value: As for `Strategy.reduce`.
            destinations: A device or its name, a `Layout`, or an array or Variable
                whose layout the result gets.

        Raises:
            StrategyError: As `Strategy.reduce`.
        """
        sharding = _sharding(destinations)
        reduced = self._strategy.reduce(reduce_op, value, axis=None)
        return jax.tree.map(lambda x: jax.device_put(x, sharding), reduced)

    def batch_reduce_to(
        self, reduce_op: ReduceOp | str, value_destination_pairs: Iterable[Any]
    ) -> list[Any]:
        """Combines pairs of a value and its destination, as `reduce_to` does each."""
        return [self.reduce_to(reduce_op, *pair) for pair in value_destination_pairs]


def _sharding(place: Any) -> Any:
    if isinstance(place, Layout):
        return place.sharding
    if isinstance(place, nnx.Variable):
        place = raw_value(place)
    if isinstance(place, jax.Array):
        return place.sharding
    (device,) = parse_devices([place])
    return jax.sharding.SingleDeviceSharding(device)
