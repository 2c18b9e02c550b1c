"""`PerReplica`: one value for each replica, held as one array on the mesh.

The replicas' values are the shards of one global array, which is what a batch is
already: nothing is copied when a batch becomes one value per replica, or when values
of rows become an array again. Values with fewer rows than others are padded to the
same shape, and a mask says which rows are real.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from meshlayout import _batches, _checks
from meshlayout._annotations import PyTree
from meshlayout.collectives import DistributedValues
from meshlayout.errors import StrategyError
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh


# The mesh axis of replicas: one that shards batches.
REPLICA_AXIS = "batch"


@jax.tree_util.register_pytree_with_keys_class
class PerReplica(DistributedValues):
    """A value of each replica, as `Strategy.run` takes and returns them.

    Use a strategy's `reduce`, `gather` or `local_results` to get plain arrays, and
    compute with values in `run`. As a pytree it is its `array` and `mask`, so it passes
    through jit; `jax.tree.map` would change the mask as well.

    Args:
        array: The replicas' values one after another along dim 0, sharded over the
            replicas: shape (replicas * n, ...) for values of shape (n, ...), and
            (replicas,) for scalars.
        mask: Of shape (replicas * n,), float32, laid out like the array: 1 for real
            rows, which come first on each replica, and 0 for padding. None if there is
            no padding.
        num_replicas: The number of replicas.
        is_scalar: Whether the replicas' values are scalars.

    Raises:
        StrategyError: If the shapes do not fit together.

    Example:
        >>> import jax.numpy as jnp
        >>> PerReplica(jnp.array([1.0, 2.0]), num_replicas=2, is_scalar=True)
        PerReplica:{
          0: Array(1., dtype=float32),
          1: Array(2., dtype=float32)
        }
    """

    def __init__(
        self,
        array: jax.Array,
        mask: jax.Array | None = None,
        *,
        num_replicas: int,
        is_scalar: bool = False,
    ) -> None:
        self.array = array
        self.mask = mask
        self.num_replicas = num_replicas
        self.is_scalar = is_scalar
        self._check()

    def _check(self) -> None:
        if isinstance(self.array, Tracer):
            return  # also one replica's own part, while a function is traced for it
        replicas = _checks.count(
            "num_replicas", self.num_replicas, where="PerReplica", error=StrategyError
        )
        shape = getattr(self.array, "shape", None)
        if (
            not shape
            or shape[0] % replicas
            or (self.is_scalar and shape != (replicas,))
        ):
            what = "one number" if self.is_scalar else "equally many rows in dim 0"
            msg = (
                f"PerReplica: array must have {what} for each of {replicas} replicas, "
                f"got {_checks.shown(self.array)}."
            )
            raise StrategyError(msg)
        if self.mask is not None and getattr(self.mask, "shape", None) != shape[:1]:
            msg = (
                f"PerReplica: mask must have one number for each of {shape[0]} rows, "
                f"got {_checks.shown(self.mask)}."
            )
            raise StrategyError(msg)

    def check_mask(self) -> None:
        """Raises StrategyError if somebody computed with the mask.

        Inside of a compiled function, nothing is known of its values.
        """
        if self.mask is None or isinstance(self.mask, Tracer):
            return
        for part in _local_parts(self.mask, self.num_replicas):
            if not np.isin(np.asarray(part), (0, 1)).all():
                msg = (
                    "the mask of a value of replicas must be 1 for real rows and 0 for "
                    "padding, and is something else, as if jax.tree.map had changed "
                    "it. Compute in a function that strategy.run calls."
                )
                raise StrategyError(msg)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one replica's value, padding included."""
        if self.is_scalar:
            return ()
        rows, *rest = self.array.shape
        return (rows // self.num_replicas, *rest)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self.array.dtype

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """The values of this process's replicas, in order, without padding.

        Raises:
            StrategyError: If rows are padded and this is inside a compiled function,
                where the number of real rows is not known.
        """
        if isinstance(self.array, Tracer):
            return self._traced_values()
        parts = _local_parts(self.array, self.num_replicas)
        if self.is_scalar:
            return tuple(part[0] for part in parts)
        if self.mask is None:
            return tuple(parts)
        self.check_mask()
        masks = _local_parts(self.mask, self.num_replicas)
        return tuple(
            part[: int(np.asarray(mask).sum())]
            for part, mask in zip(parts, masks, strict=True)
        )

    def _traced_values(self) -> tuple[jax.Array, ...]:
        if self.mask is not None:
            msg = (
                "the replicas may have different numbers of rows, which is not known "
                "inside a compiled function: call local_results outside of it, or "
                "reduce along axis=0."
            )
            raise StrategyError(msg)
        parts = jnp.split(self.array, self.num_replicas)
        return tuple(part[0] if self.is_scalar else part for part in parts)

    def tree_flatten_with_keys(self) -> tuple[Any, tuple[int, bool]]:
        """As JAX asks of pytrees."""
        key = jax.tree_util.GetAttrKey
        children = ((key("array"), self.array), (key("mask"), self.mask))
        return children, (self.num_replicas, self.is_scalar)

    def tree_flatten(self) -> tuple[Any, tuple[int, bool]]:
        """As JAX asks of pytrees."""
        return (self.array, self.mask), (self.num_replicas, self.is_scalar)

    @classmethod
    def tree_unflatten(cls, aux: tuple[int, bool], children: Any) -> "PerReplica":
        """As JAX asks of pytrees."""
        # JAX also makes trees of things that are not arrays, which are not checked.
        value = object.__new__(cls)
        value.num_replicas, value.is_scalar = aux
        value.array, value.mask = children
        return value

    def __setitem__(self, index: object, value: Any) -> None:
        # What Flax calls for `variable[...] = 0`, outside of `run`.
        if index is not ...:
            _refusing("__setitem__")(self)
        whole = jnp.broadcast_to(value, self.shape)
        rows = jnp.stack([whole] * self.num_replicas).reshape(self.array.shape)
        self.array = jax.device_put(rows.astype(self.dtype), self.array.sharding)

    def __format__(self, spec: str) -> str:
        return _refusing("__format__")(self) if spec else str(self)

    def __getattr__(self, name: str) -> NoReturn:
        # Of arrays, as `x.sum()`. The loss of a step is often used so.
        msg = f"a PerReplica has no attribute {name!r}: it is not one array. {_WAY_OUT}"
        raise AttributeError(msg)

    def __repr__(self) -> str:
        array, replicas = self.array, self.num_replicas
        if not isinstance(array, jax.Array) or isinstance(array, Tracer):
            return f"PerReplica({array!r}, num_replicas={replicas})"
        first = 0  # the index of this process's first replica
        if not array.is_fully_addressable:
            starts = (_start(shard.index[0]) for shard in array.addressable_shards)
            first = min(starts) * replicas // array.shape[0]
        try:
            values = self.values
        except StrategyError:  # the array or the mask was changed
            return f"PerReplica({array!r}, {self.mask!r}, num_replicas={replicas})"
        lines = (f"  {first + i}: {value!r}" for i, value in enumerate(values))
        return "PerReplica:{\n" + ",\n".join(lines) + "\n}"


_WAY_OUT = (
    "Combine it first, with strategy.reduce('SUM', value, axis=None) or "
    "strategy.gather(value, axis=0), or compute in a function that strategy.run calls."
)


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: PerReplica, *_: object, **__: object) -> NoReturn:
        msg = (
            f"a value of {self.num_replicas} replicas was used as one array ({name}). "
            f"{_WAY_OUT}"
        )
        raise StrategyError(msg)

    refuse.__name__ = name
    return refuse


# Arithmetic and conversions: without these, Python's and JAX's own errors name neither
# replicas nor a way out.
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul")
_BITS = ("and", "or", "xor", "lshift", "rshift")
_COMPARISONS = ("lt", "le", "gt", "ge")
_UNARY = ("neg", "pos", "abs", "invert", "round")
_CONTAINER = ("getitem", "iter", "len", "bool", "contains")
_CONVERSIONS = ("float", "int", "complex", "index", "array", "jax_array")
_REFLECTED = tuple(f"r{name}" for name in (*_BINARY, *_BITS))
for _name in (
    *(*_BINARY, *_BITS, *_REFLECTED, *_COMPARISONS),
    *(*_UNARY, *_CONTAINER, *_CONVERSIONS),
):
    setattr(PerReplica, f"__{_name}__", _refusing(f"__{_name}__"))


def _start(rows: slice) -> int:
    return rows.start or 0


def _local_parts(array: jax.Array, num_replicas: int) -> list[jax.Array]:
    """Returns the rows of each of this process's replicas, as they are on devices."""
    rows = array.shape[0] // num_replicas
    shards = getattr(array, "addressable_shards", ())  # on the host, there are none
    devices = array.sharding.device_set if shards else ()
    if len(devices) == num_replicas and all(s.data.shape[0] == rows for s in shards):
        shards = sorted(shards, key=lambda shard: _start(shard.index[0]))
        return [shard.data for shard in shards]
    if shards and not array.is_fully_addressable:
        msg = (
            f"the values of {num_replicas} replicas are laid out as {array.sharding}, "
            "so that this process does not have those of its replicas. Take them from "
            "strategy.run or its datasets as they are."
        )
        raise StrategyError(msg)
    # Made by hand, or by a program that laid it out in another way.
    return list(jnp.split(jnp.asarray(array), num_replicas))


def check_replicas(value: PerReplica, mesh: Mesh, where: str) -> None:
    """Raises StrategyError for a value of another strategy."""
    replicas = value.num_replicas
    if replicas != mesh.size:
        msg = (
            f"{where}: the value is of {replicas} replicas, and this strategy has "
            f"{mesh.size}: it is another strategy's."
        )
        raise StrategyError(msg)
    if isinstance(value.array, Tracer) or not isinstance(value.array, jax.Array):
        return
    sharding = value.array.sharding
    if getattr(sharding, "mesh", None) is mesh.jax_mesh:  # nearly always
        return
    # One made by hand may be on a single device: JAX spreads it.
    devices = sharding.device_set
    if len(devices) == replicas and devices != set(mesh.devices.flat):
        msg = (
            f"{where}: the value is on other devices than this strategy's replicas: it "
            "is another strategy's."
        )
        raise StrategyError(msg)


def replica_layout(mesh: Mesh, rank: int) -> Layout:
    """Returns the layout of a `PerReplica`'s array of a given rank."""
    return Layout([REPLICA_AXIS, *[None] * (rank - 1)], mesh)


def per_replica(
    values: Sequence[Any], mesh: Mesh, mask: jax.Array | None = None
) -> PerReplica:
    """Makes a `PerReplica` of the values of this process's replicas.

    Args:
        values: One array for each local device of the mesh, in mesh order. They may
            differ in their numbers of rows alone; shorter ones are padded.
        mesh: The strategy's mesh, with one axis.
        mask: Which rows are real, from `row_mask`, if other processes have values with
            other numbers of rows; None if these are all, or all are alike.
    """
    arrays = [jnp.asarray(value) for value in values]
    if not arrays[0].ndim:
        scalars = _joined([x[None] for x in arrays], mesh)
        return PerReplica(scalars, num_replicas=mesh.size, is_scalar=True)
    counts = [x.shape[0] for x in arrays]
    if mask is None and len(set(counts)) > 1:
        mask = row_mask(counts, max(counts), mesh)
    if mask is not None:
        rows = mask.shape[0] // mesh.size
        arrays = [jnp.asarray(_batches.pad_rows(x, rows)) for x in arrays]
    return PerReplica(_joined(arrays, mesh), mask, num_replicas=mesh.size)


def row_mask(counts: Sequence[int], num_rows: int, mesh: Mesh) -> jax.Array:
    """Returns the mask of values that have fewer rows than others.

    Args:
        counts: The number of real rows of each local replica.
        num_rows: The number of rows with padding, the same on all processes.
        mesh: The strategy's mesh.
    """
    masks = [jnp.asarray(np.arange(num_rows) < count, "float32") for count in counts]
    return _joined(masks, mesh)


def _joined(parts: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """Returns one array whose shards are these parts, one on each local device."""
    first = parts[0]
    shape = (mesh.size * first.shape[0], *first.shape[1:])
    sharding = replica_layout(mesh, first.ndim).sharding
    devices = mesh.local_devices
    placed = [jax.device_put(x, d) for x, d in zip(parts, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)

