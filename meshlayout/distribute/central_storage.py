"""`CentralStorageStrategy`: variables in the host's memory, replicas on its devices."""

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer

from meshlayout import _jax
from meshlayout._annotations import Leaf
from meshlayout._patches import SharedPatches
from meshlayout.distribute.strategies import local_mesh
from meshlayout.distribute.strategy import Strategy
from meshlayout.distribute.values import PerReplica
from meshlayout.distribute.variables import current
from meshlayout.errors import StrategyError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap


HOST_MEMORY = "pinned_host"


class CentralStorageStrategy(Strategy):
    """Variables in the memory of the host, and a replica on each of its devices.

    Use this if optimizer state and parameters are too large for a device between steps,
    as when several models take turns. Each program moves the variables that it uses to
    the devices at its beginning, and those that it changed back at its end. The numbers
    are those of `MirroredStrategy`. Scalars and PRNG keys are stored on the devices.

    Args:
        devices: The devices, as for `MirroredStrategy`; None for all of this process.
        streamed: Types of Variables that programs leave in the host's memory: the model
            moves each block of them itself, by `jax.device_put(block,
            jax.memory.Space.Device)` in the body of its scan.

    Raises:
        MeshError: If there are no such devices, or one is given twice.
        StrategyError: If one belongs to another process, or programs on these devices
            cannot read the memory of the host.

    Example:
        >>> from flax import nnx
        >>> import meshlayout as ml
        >>> strategy = ml.distribute.CentralStorageStrategy()
        >>> with strategy.scope():
        ...     model = nnx.Linear(256, 512, rngs=nnx.Rngs(0))
        >>> jax.tree.leaves(nnx.state(model))[0].sharding.memory_kind
        'pinned_host'
    """

    def __init__(
        self,
        devices: Iterable[Any] | None = None,
        *,
        streamed: type | tuple[type, ...] = (),
    ) -> None:
        super().__init__(local_mesh(devices, "CentralStorageStrategy"))
        self._streamed = streamed
        kinds, _ = _jax.memory_kinds(self.mesh.devices.flat[0])
        is_old = self.mesh.platform == "cpu" and not _jax.memory_in_jit()
        if is_old or (kinds and HOST_MEMORY not in kinds):
            msg = (
                f"CentralStorageStrategy keeps variables in {HOST_MEMORY} memory, "
                f"which programs on {self.mesh.platform.upper()} devices cannot use "
                f"with jax {jax.__version__}: that takes jax 0.8 or newer. Use "
                "MirroredStrategy."
            )
            raise StrategyError(msg)
        _reads.__enter__()
        weakref.finalize(self, _reads.__exit__)

    @property
    def layouts(self) -> LayoutMap:
        """The layout map of what is made in the scope: in the memory of the host."""

        def rule(path: str, shape: tuple[int, ...], dtype: Any) -> Layout:
            del path
            return self._layout(shape, dtype)

        return LayoutMap(self.mesh, {".*": rule}, unused="ignore")

    def _layout(self, shape: tuple[int, ...], dtype: Any) -> Layout:
        if not shape or _jax.is_extended(dtype):
            return super()._layout(shape, dtype)
        return Layout([None] * len(shape), self.mesh, memory_kind=HOST_MEMORY)

    def _place(self, path: str, x: Leaf, *, is_own: bool) -> Any:
        is_plain = not is_own and not isinstance(x, (PerReplica, Tracer))
        if not is_plain or not _jax.is_committed(x):
            return super()._place(path, x, is_own=is_own)
        layout = self._layout(x.shape, x.dtype)
        if x.sharding.is_equivalent_to(layout.sharding, x.ndim) and (
            _jax.is_on_host(x) == (layout.memory_kind is not None)
        ):
            return x
        if x.sharding.device_set <= set(self.mesh.devices.flat):
            return _jax.put(x, layout.sharding)  # as the shape rule of another wants it
        return super()._place(path, x, is_own=is_own)

    def _entered(self, variable: nnx.Variable[Any], value: Leaf) -> Any:
        """Moves a Variable's value to the device at the beginning of a program."""
        if isinstance(variable, self._streamed):
            return value
        return jax.tree.map(_jax.in_device_memory, value)


def _fetching(read: Any) -> Any:
    """Makes code outside of `run` read a Variable's value on the device."""
    get: Any = read.fget if isinstance(read, property) else read

    @functools.wraps(get)
    def replacement(self: Any, **options: Any) -> Any:
        value = get(self, **options)
        # In `run`, what a program is to move has been moved.
        return value if current.get() is not None else jax.tree.map(_on_device, value)

    return property(replacement, read.fset) if get is not read else replacement


def _on_device(x: Leaf) -> Any:
    return _jax.in_device_memory(x) if isinstance(x, jax.Array) else x


# While there is such a strategy. The method is a property in flax 0.11.
_READ = "get_value" if hasattr(nnx.Variable, "get_value") else "value"
_reads = SharedPatches((nnx.Variable, _READ, _fetching))
