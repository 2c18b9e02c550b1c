"""`Strategy.extended`: tf.distribute's methods for authors of libraries."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout._axes import parse_devices
from meshlayout.collectives import ReduceOp
from meshlayout.distribute.variables import is_on
from meshlayout.errors import StrategyError
from meshlayout.layout import Layout


if TYPE_CHECKING:
    from meshlayout.distribute.strategy import Strategy


class StrategyExtended:
    """What authors of libraries ask of a strategy; get it as `strategy.extended`.

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
        """The devices that hold variables."""
        return self.worker_devices

    def variable_created_in_scope(self, variable: "nnx.Variable[Any]") -> bool:
        """Returns whether a Variable is where this strategy keeps its variables.

        Args:
            variable: The Variable.

        Raises:
            StrategyError: If it is not an `nnx.Variable`.
        """
        if not isinstance(variable, nnx.Variable):
            msg = (
                "variable_created_in_scope takes an nnx.Variable, got "
                f"{_checks.shown(variable)}."
            )
            raise StrategyError(msg)
        leaves = jax.tree.leaves(variable.get_value())
        mesh = self._strategy.mesh.jax_mesh
        return bool(leaves) and all(is_on(leaf, mesh) is True for leaf in leaves)

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: PyTree, destinations: Any
    ) -> PyTree:
        """Combines values of all replicas, and puts the result somewhere.

        Args:
            reduce_op: As for `Strategy.reduce`.
            value: As for `Strategy.reduce`.
            destinations: A device or its name, a `Layout`, or an array or Variable
                whose layout the result gets.

        Raises:
            StrategyError: As `Strategy.reduce`, or if `destinations` is none of these.
        """
        sharding = _sharding(destinations)
        reduced = self._strategy.reduce(reduce_op, value, axis=None)
        return jax.tree.map(lambda x: jax.device_put(x, sharding), reduced)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[PyTree, Any]],
    ) -> list[PyTree]:
        """Combines several values, as `reduce_to` does each.

        Args:
            reduce_op: As for `Strategy.reduce`.
            value_destination_pairs: Values with their destinations.

        Raises:
            StrategyError: As `reduce_to`.
        """
        return [
            self.reduce_to(reduce_op, value, destinations)
            for value, destinations in value_destination_pairs
        ]

    def update(
        self,
        var: "nnx.Variable[Any]",
        fn: Callable[..., Any],
        args: Sequence[PyTree] = (),
        kwargs: dict[str, PyTree] | None = None,
    ) -> PyTree:
        """Calls `fn(var, *args, **kwargs)` on every copy of a Variable.

        Args:
            var: A Variable made in the strategy's scope.
            fn: A function that sets its value; the same on all replicas.
            args: Its arguments.
            kwargs: Its arguments by name.

        Raises:
            StrategyError: As `Strategy.run`.
        """
        return self._strategy.run(fn, args=(var, *args), kwargs=kwargs)


def _sharding(place: Any) -> Any:
    """Returns where a result is to be put."""
    if isinstance(place, Layout):
        return place.sharding
    if isinstance(place, nnx.Variable):
        place = place.get_value()
    if isinstance(place, jax.Array):
        return place.sharding
    (device,) = parse_devices([place])
    return jax.sharding.SingleDeviceSharding(device)
