"""`CentralStorageStrategy`: variables in the host's memory, replicas on its devices."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
from flax import nnx

from meshlayout import _jax
from meshlayout._annotations import Leaf
from meshlayout._patches import SharedPatches
from meshlayout.distribute.strategy import MirroredStrategy, whole
from meshlayout.distribute.variables import current
from meshlayout.errors import StrategyError
from meshlayout.layout import Layout


class CentralStorageStrategy(MirroredStrategy):
    """Keeps variables in the host's memory, with a replica on each of its devices.

    Use this if several models take turns on the devices. Each program moves the
    variables that it uses to the devices first, and moves changed ones back at the end.

    A stack of blocks made as `nnx.Param(stack, streamed=True)` stays on the host: the
    model moves each block, in the body of its scan, by
    `jax.device_put(block, jax.memory.Space.Device)`.

    Args:
        devices: Devices, as for `MirroredStrategy`; None for all of this process.

    Raises:
        StrategyError: If programs on these devices cannot read the host's memory, as
            those of jax 0.7 on CPUs.
    """

    def __init__(self, devices: Iterable[Any] | None = None) -> None:
        super().__init__(devices)
        kinds, _ = _jax.memory_kinds(self.mesh.devices.flat[0])
        is_old = self.mesh.platform == "cpu" and not _jax.memory_in_jit
        if is_old or (kinds and "pinned_host" not in kinds):
            kind = self.mesh.platform.upper()
            msg = "CentralStorageStrategy keeps variables in pinned_host memory, which "
            msg += f"programs on {kind} devices cannot use with jax {jax.__version__}: "
            msg += "it needs jax 0.8 or newer. Use MirroredStrategy."
            raise StrategyError(msg)
        _reads.__enter__()  # for good: the garbage collector must not wait for a lock

    def _layout(self, shape: tuple[int, ...], dtype: Any) -> Layout:
        is_on_device = not shape or _jax.is_extended(dtype)
        return whole(self.mesh, len(shape), None if is_on_device else "pinned_host")

    def _entered(self, variable: "nnx.Variable[Any]", value: Leaf) -> Any:
        """Moves a Variable's value to the device at the beginning of a program."""
        is_streamed = variable.get_metadata().get("streamed")
        if is_streamed and not isinstance(variable, nnx.optimizer.OptState):
            return value  # of an optimizer's, the metadata are those of its parameter
        return jax.tree.map(_jax.in_device_memory, value)


def _fetching(read: Any) -> Any:
    """Makes code outside of `run` read a Variable's value on the device."""
    get: Any = read.fget if isinstance(read, property) else read

    def put(x: Leaf) -> Any:
        return _jax.in_device_memory(x) if isinstance(x, jax.Array) else x

    @functools.wraps(get)
    def replacement(self: Any, **options: Any) -> Any:
        value = get(self, **options)
        # In `run`, the program has moved its variables.
        return value if current.get() is not None else jax.tree.map(put, value)

    return property(replacement, read.fset) if get is not read else replacement


# Only once such a strategy exists. The method is a property in flax 0.11.
_READ = "get_value" if hasattr(nnx.Variable, "get_value") else "value"
_reads = SharedPatches((nnx.Variable, _READ, _fetching))
