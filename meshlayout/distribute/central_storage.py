"""`CentralStorageStrategy`: variables in the host's memory, replicas on its devices."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshlayout import _jax, _render
from meshlayout._annotations import DType, PyTree
from meshlayout.distribute.arguments import is_leaf
from meshlayout.distribute.host_variables import HOST_MEMORY, HostVariable
from meshlayout.distribute.strategies import local_mesh
from meshlayout.distribute.strategy import Strategy
from meshlayout.distribute.values import PerReplica
from meshlayout.distribute.variables import Aggregation
from meshlayout.errors import StrategyError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap
from meshlayout.step import StepMemory


# Below, one more copy per device takes less than what gathering it costs.
_MIN_SHARDED_BYTES = 2**16


@dataclass(frozen=True)
class VariableStorage:
    """Where one variable is between steps, and what of it a device holds in a step.

    Attributes:
        path: Its path, with the name of the object that holds it.
        array: Its dtype and shape, as text.
        nbytes: Its bytes, counted once.
        memory: The memory that it is stored in, such as `"pinned_host"`.
        num_copies: How many copies of it are stored there.
        held: What a device holds of it during a step: `"one slice"` at a time,
            `"all"`, or `"nothing"` if the step does not use it.
        reason: The operation that needs all of it, if that is so.
    """

    path: str
    array: str
    nbytes: int
    memory: str
    num_copies: int
    held: str
    reason: str = ""


@dataclass(frozen=True, repr=False)
class StorageReport:
    """What a step of `CentralStorageStrategy` stores on the host and on devices.

    Attributes:
        variables: One entry per array of a variable.
        gradients: The operations for which a device holds the gradients of all slices
            of a scanned variable; those of other variables it always holds.
        memory: The bytes that the compiled program takes on each device.
    """

    variables: tuple[VariableStorage, ...]
    gradients: tuple[str, ...]
    memory: StepMemory

    @property
    def sliced_bytes(self) -> int:
        """The bytes of all variables of which a device holds one slice at a time."""
        return sum(x.nbytes for x in self.variables if x.held == "one slice")

    @property
    def whole_bytes(self) -> int:
        """The bytes of all variables that a device holds whole at some time."""
        return sum(x.nbytes for x in self.variables if x.held == "all")

    def __repr__(self) -> str:
        rows = [
            (x.path, x.array, f"{x.memory} x {x.num_copies}", x.held, x.reason)
            for x in self.variables
        ]
        head = ("variable", "array", "stored in", "held by a device", "because of")
        text = _render.bytes_text
        peak = self.memory.argument_bytes + self.memory.temporary_bytes
        lines = [
            _render.text_table(head, rows),
            f"a device holds one slice at a time of {text(self.sliced_bytes)} of "
            f"variables, and all of {text(self.whole_bytes)}",
            f"arguments and temporaries of the program on each device: {text(peak)}",
        ]
        lines += [f"gradients of all slices: {reason}" for reason in self.gradients]
        return "\n".join(lines)


class CentralStorageStrategy(Strategy):
    """Variables in the memory of the host, and a replica on each of its devices.

    Use this if parameters and optimizer state are too large for a device. Variables
    whose dim 0 is scanned over (blocks made by `nnx.vmap` and called in `nnx.scan`, or
    the stacked arrays of a `jax.lax.scan`) are moved to the devices slice by slice, in
    the forward pass, in the backward pass and for the update: a device never holds all
    of one. Other variables are moved whole for each step. `memory` says which is which.
    The numbers are those of `MirroredStrategy`.

    Large arrays are stored once, divided among the replicas, which gather what they
    need; small ones once per device. Scalars and PRNG keys are stored on the devices.
    Arrays that are passed as such, as Linen's variables are, are moved whole for each
    call.

    Args:
        devices: The devices, as for `MirroredStrategy`; None for all of this process.

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
        >>> model.kernel.sharding.memory_kind
        'pinned_host'
        >>> report = strategy.memory(
        ...     lambda x: model(x), args=(jax.numpy.ones((2, 256)),)
        ... )
        >>> [variable.held for variable in report.variables]
        ['all', 'all']
    """

    def __init__(self, devices: Iterable[Any] | None = None) -> None:
        super().__init__(local_mesh(devices, "CentralStorageStrategy"))
        kinds, _ = _jax.memory_kinds(self.mesh.devices.flat[0])
        is_old = self.mesh.platform == "cpu" and not _jax.memory_in_jit()
        if is_old or HOST_MEMORY not in kinds:
            have = ", ".join(kinds) or "none that JAX names"
            msg = (
                f"CentralStorageStrategy keeps variables in {HOST_MEMORY} memory, "
                f"which programs on {self.mesh.platform.upper()} devices cannot use "
                f"with jax {jax.__version__} (memories: {have}). Use MirroredStrategy."
            )
            raise StrategyError(msg)

    @property
    def layouts(self) -> LayoutMap:
        """The layout map of what is made in the scope: in the memory of the host."""
        # A rule, as what has only the default is created elsewhere, and moved there.
        return LayoutMap(self.mesh, {".*": self._layout}, unused="ignore")

    def memory(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> StorageReport:
        """Returns where the variables are, and what a device holds in `run`.

        The program is compiled and not run.

        Args:
            fn: As for `run`.
            args: As for `run`. Models may be abstract, as `nnx.eval_shape` makes them:
                then nothing is stored, and the devices may be described ones.
            kwargs: As for `run`.

        Raises:
            StrategyError: As `run`.
        """
        args, kwargs = self._checked_call(fn, args, kwargs)
        with self._inside():
            program, arguments = self._runs.program(fn, args, kwargs)
            memory = program.memory(arguments)
        transfers = program.transfers
        entries: list[VariableStorage] = []
        index = 0
        values = zip(program.variables.paths, program.variables.get(), strict=True)
        for path, value in values:
            for leaf in jax.tree.leaves(value):
                entries.append(self._entry(path, leaf, index, transfers))
                index += 1
        return StorageReport(tuple(entries), tuple(transfers.gradients), memory)

    def _checked_call(
        self, fn: object, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def on_devices(leaf: Any) -> Any:
            if HostVariable.of(leaf) is None:
                return leaf
            whole = self.mesh.layout(...).with_rank(leaf.ndim)
            return _jax.put(leaf, whole.sharding)

        call = super()._checked_call(fn, args, kwargs)
        return jax.tree.map(on_devices, call, is_leaf=is_leaf)

    def _entry(
        self, path: str, leaf: Any, index: int, transfers: Any
    ) -> VariableStorage:
        variable = HostVariable.of(leaf)
        text = _render.array_text(leaf.dtype, leaf.shape)
        nbytes = math.prod(leaf.shape) * _jax.itemsize(leaf.dtype)
        copies = 1 if variable and variable.dim is not None else self.mesh.size
        held, reason = "nothing", ""
        if variable is None:
            held = "all"
        elif index in transfers.whole:
            held, reason = "all", transfers.whole[index]
        elif index in transfers.sliced:
            held = "one slice"
        memory = HOST_MEMORY if variable else "device"
        return VariableStorage(path, text, nbytes, memory, copies, held, reason)

    def _layout(self, path: str, shape: tuple[int, ...], dtype: DType) -> Layout:
        """Returns how an array is stored."""
        del path
        if not shape or _jax.is_extended(dtype):
            return self.mesh.layout(...).with_rank(len(shape))
        specs: list[str | None] = [None] * len(shape)
        if math.prod(shape) * _jax.itemsize(dtype) >= _MIN_SHARDED_BYTES:
            # Not dim 0, which may be the one to take slices along.
            dims = (d for d in range(1, len(shape)) if shape[d] % self.mesh.size == 0)
            if self.mesh.size > 1 and (dim := next(dims, None)) is not None:
                specs[dim] = self.mesh.axis_names[0]
        return Layout(specs, self.mesh, memory_kind=HOST_MEMORY)

    def _place(self, path: str, kind: Aggregation | None, value: Any) -> Any:
        if isinstance(value, PerReplica) or kind == "per_replica":
            return super()._place(path, kind, value)
        x = value if hasattr(value, "dtype") else jnp.asarray(value)
        layout = self._layout(path, x.shape, x.dtype)
        if layout.memory_kind is None:
            return super()._place(path, kind, value)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.sharding)
        if not _jax.is_committed(x):
            return _jax.put(x, layout.sharding)
        if x.sharding.is_equivalent_to(layout.sharding, x.ndim):
            return x
        msg = (
            f"the variable {path} is on {Layout.of(x)!r}, and {self!r} needs it on "
            f"{layout!r}. Create it in this strategy's scope."
        )
        raise StrategyError(msg)
