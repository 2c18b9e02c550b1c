"""`distribute_values_from_function`: a value of each replica, made by a function.

Each process calls the function for its own replicas, and the processes then compare
what they got: a value is padded to the longest one of all replicas, and whether there
is padding must be the same on all processes, since it is part of the programs that take
the value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshlayout import _checks, _jax
from meshlayout._annotations import PyTree
from meshlayout._host_arrays import host_array
from meshlayout._render import array_text
from meshlayout.cluster.channel import Channel, shared_channel
from meshlayout.distribute.values import is_per_replica, per_replica, row_mask
from meshlayout.errors import LayoutError, StrategyError
from meshlayout.mesh import Mesh


@dataclass(frozen=True)
class ValueContext:
    """For which replica a value is asked for.

    Attributes:
        replica_id_in_sync_group: The index of the replica, from 0.
        num_replicas_in_sync: The number of replicas.

    Example:
        >>> ValueContext(1, 2)
        ValueContext(replica_id_in_sync_group=1, num_replicas_in_sync=2)
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        replica, replicas = self.replica_id_in_sync_group, self.num_replicas_in_sync
        _checks.count("num_replicas_in_sync", replicas, error=StrategyError)
        _checks.count(
            "replica_id_in_sync_group", replica, at_least=0, error=StrategyError
        )
        if replica >= replicas:
            msg = (
                "ValueContext: replica_id_in_sync_group must be below "
                f"num_replicas_in_sync={replicas}, got {replica}."
            )
            raise StrategyError(msg)


class _ReplicaValue(NamedTuple):
    """What a function returned for one replica, as processes compare it.

    Attributes:
        replica: The index of the replica.
        structure: The structure of the tree, as text.
        paths: The paths of the leaves.
        shapes: Their shapes.
        dtypes: Their dtypes.
    """

    replica: int
    structure: str
    paths: list[str]
    shapes: list[tuple[int, ...]]
    dtypes: list[str]

    def text(self, leaf: int) -> str:
        """Which array a leaf is, in words."""
        return array_text(self.dtypes[leaf], self.shapes[leaf])


def distribute_values_from_function(
    value_fn: Callable[[ValueContext], PyTree], mesh: Mesh
) -> PyTree:
    """Makes a value of each replica; see `Strategy.distribute_values_from_function`."""
    if _jax.is_tracing():
        msg = (
            "distribute_values_from_function was called in a compiled function, and "
            "places values on devices. Call it before, and pass its result."
        )
        raise StrategyError(msg)
    channel = _channel(mesh)
    local: list[_ReplicaValue] = []
    rows: list[list[jax.Array]] = []
    treedef = None
    with channel.failure_told():
        _checks.function("value_fn", value_fn, "context", error=StrategyError)
        for replica, device in enumerate(mesh.devices.flat):
            if device.process_index == jax.process_index():
                context = ValueContext(replica, mesh.size)
                with _checks.noted(
                    f"This was raised by value_fn, called with {context}."
                ):
                    tree = value_fn(context)
                leaves, treedef, value = _described(tree, replica)
                rows.append(leaves)
                local.append(value)
    failure = "value_fn failed on process {process}: {failure}"
    exchanged = channel.exchange(local, failure=failure).values()
    values = sorted(value for group in exchanged for value in group)
    for value in values:
        _check_alike(values[0], value)
    if treedef is None:
        msg = (
            f"process {jax.process_index()} has no devices in {mesh!r}, and no replica."
        )
        raise StrategyError(msg)
    columns = [list(column) for column in zip(*rows, strict=True)]
    if mesh.size == 1:
        sharding = mesh.layout(...).sharding
        return treedef.unflatten([jax.device_put(x, sharding) for [x] in columns])
    # Leaves with the same numbers of rows share their mask, so that one can tell.
    masks: dict[tuple[int, ...], jax.Array] = {}
    leaves = []
    for index, column in enumerate(columns):
        shapes = [value.shapes[index] for value in values]
        counts = tuple(shape[0] for shape in shapes if shape)
        if len(set(counts)) > 1 and counts not in masks:
            local_counts = [x.shape[0] for x in column]
            masks[counts] = row_mask(local_counts, max(counts), mesh)
        leaves.append(per_replica(column, mesh, masks.get(counts)))
    return treedef.unflatten(leaves)


def _channel(mesh: Mesh) -> Channel:
    """Returns the channel of the processes that have replicas."""
    processes = sorted({device.process_index for device in mesh.devices.flat})
    return shared_channel(
        f"distribute/values/{'-'.join(map(str, processes))}",
        processes,
        what="distribute_values_from_function",
        hint="All processes of a strategy must call it, in the same order.",
        error=StrategyError,
    )


def _described(
    tree: PyTree, replica: int
) -> tuple[list[jax.Array], Any, _ReplicaValue]:
    """Returns what the function returned: its leaves, its structure, and a summary.

    Raises:
        StrategyError: If it has no leaves, or one that is not an array.
    """
    where = f"value_fn's value for replica {replica}"
    try:
        entries, treedef = jax.tree_util.tree_flatten_with_path(
            tree, is_leaf=is_per_replica
        )
    except ValueError as error:  # keys of a dict that have no order
        reason = str(error).partition("\n")[0]
        msg = f"JAX cannot flatten {where}: {reason} Use keys of one type."
        raise StrategyError(msg) from None
    if not entries:
        msg = (
            f"{where} holds no arrays, got {_checks.shown(tree)}. A function that ends "
            "without `return` gives None."
        )
        raise StrategyError(msg)
    paths = [
        jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in entries
    ]
    leaves = [
        _array(leaf, f"{where}{f', leaf {path!r}' if path else ''}")
        for path, (_, leaf) in zip(paths, entries, strict=True)
    ]
    shapes = [x.shape for x in leaves]
    dtypes = [str(x.dtype) for x in leaves]
    return leaves, treedef, _ReplicaValue(replica, str(treedef), paths, shapes, dtypes)


def _array(leaf: Any, where: str) -> jax.Array:
    if is_per_replica(leaf):
        msg = f"{where} must be a plain array, got a PerReplica."
        raise StrategyError(msg)
    if isinstance(leaf, jax.Array):
        return leaf
    try:
        return jnp.asarray(host_array(leaf, where))
    except LayoutError as error:
        raise StrategyError(str(error)) from None


def _check_alike(first: _ReplicaValue, other: _ReplicaValue) -> None:
    """Raises StrategyError unless two replicas' values differ in rows alone."""
    if other.structure != first.structure:
        names, first_names = (
            ", ".join(map(repr, value.paths)) if any(value.paths) else "an array"
            for value in (other, first)
        )
        msg = (
            "value_fn returned different trees: for replica "
            f"{first.replica} {first_names}, for replica {other.replica} {names}. "
            "Return the same leaves for all replicas."
        )
        raise StrategyError(msg)
    for index, path in enumerate(first.paths):
        shape, first_shape = other.shapes[index], first.shapes[index]
        is_like = other.dtypes[index] == first.dtypes[index]
        if (
            not is_like
            or shape[1:] != first_shape[1:]
            or len(shape) != len(first_shape)
        ):
            msg = (
                "value_fn's values may differ in their number of rows alone"
                f"{f' (leaf {path!r})' if path else ''}: replica {first.replica} has "
                f"{first.text(index)}, replica {other.replica} has {other.text(index)}."
            )
            raise StrategyError(msg)
