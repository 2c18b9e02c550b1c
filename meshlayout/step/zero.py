"""ZeRO, stage 1: the optimizer's state and update, sharded over the replicas.

Every replica would keep the same optimizer state, and compute the same update. Sharded
over the axes that shard the batch, each keeps and computes a part, and the compiler
gathers the new parameters (Rajbhandari et al., "ZeRO", 2020).
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _jax, _paths, _render
from meshlayout._annotations import PyTree
from meshlayout.errors import StepError
from meshlayout.layout import DimSpec, axes_of
from meshlayout.state import TrainState
from meshlayout.step.placement import StepMesh


_log = logging.getLogger("meshlayout")

MIN_SIZE = 1024


class ZeroPlacement:
    """Keeps the optimizer's state of a step sharded over the batch axes.

    Attributes:
        exceptions: Which leaves stay as they were, and why.
    """

    def __init__(self) -> None:
        self.exceptions: tuple[str, ...] = ()
        self._shardings: list[Any] | None = None

    def place(self, state: TrainState, mesh: StepMesh) -> TrainState:
        """Returns the state with the optimizer's part sharded over the batch axes."""
        leaves, treedef = jax.tree.flatten(state.opt_state)
        if [leaf.sharding for leaf in leaves] == self._shardings:  # as in every call
            return state
        layouts = zero_layouts({"opt_state": state.opt_state}, mesh)
        if not layouts:
            return state
        self.exceptions = tuple(
            f"{layout.path} {layout.reason}" for layout in layouts if layout.reason
        )
        for line in self.exceptions:
            _log.info("zero=1 leaves %s", line)
        self._shardings = [layout.sharding for layout in layouts]
        placed = [
            leaf.update(sharding=sharding)
            if isinstance(leaf, jax.ShapeDtypeStruct)
            else jax.device_put(leaf, sharding)
            for leaf, sharding in zip(leaves, self._shardings, strict=True)
        ]
        return state.replace(opt_state=treedef.unflatten(placed))


@dataclass(frozen=True)
class ZeroLayout:
    """How one array is sharded over the replicas, in addition to its own layout.

    Attributes:
        path: The array's path.
        sharding: Where it goes.
        reason: Why it stays as it was; empty if it does not.
    """

    path: str
    sharding: NamedSharding
    reason: str


def zero_layouts(tree: PyTree, replicas: StepMesh) -> list[ZeroLayout]:
    """Shards arrays over the axes that shard the batch, each on one dim more.

    The largest dim that divides takes the axes. Small arrays stay as they are.

    Args:
        tree: Arrays on the mesh.
        replicas: The axes.

    Raises:
        StepError: If the batch is sharded over no axes of a mesh of several devices.
    """
    mesh = replicas.mesh
    if mesh is None or not replicas.axes:
        if mesh is not None and mesh.size > 1:
            msg = (
                "zero=1 shards the optimizer's state over the axes that shard the "
                "batch, and this batch is sharded over none. Place it with "
                "relayout(batch, mesh.layout('batch', ...))."
            )
            raise StepError(msg)
        return []
    return [_zero_layout(leaf, replicas) for leaf in _paths.flatten(tree).leaves]


def _zero_layout(leaf: _paths.Leaf, replicas: StepMesh) -> ZeroLayout:
    now: Any = _jax.sharding_of(leaf.value)
    shape = leaf.value.shape
    spec = (*now.spec, *[None] * (len(shape) - len(now.spec)))
    sharded, reason = shard_further(
        shape, spec, replicas.axes, now.mesh.shape, min_size=MIN_SIZE
    )
    if sharded != spec:
        kind = now.memory_kind
        now = NamedSharding(now.mesh, PartitionSpec(*sharded), memory_kind=kind)
    if reason:
        reason = f"{_render.array_text(leaf.value.dtype, shape)}: {reason}"
    return ZeroLayout(leaf.path, now, reason)


def update_shardings(params: PyTree, replicas: StepMesh) -> tuple[tuple[Any, Any], ...]:
    """Returns the shardings of each parameter, and of its update."""
    whole = map(_jax.sharding_of, jax.tree.leaves(params))
    sharded = (layout.sharding for layout in zero_layouts(params, replicas))
    return tuple(zip(whole, sharded, strict=True))


def shard_further(
    shape: Sequence[int],
    spec: Sequence[DimSpec],
    axes: Sequence[str],
    axis_sizes: Mapping[str, int],
    *,
    min_size: int = 0,
    dims: Sequence[int] | None = None,
) -> tuple[tuple[DimSpec, ...], str]:
    """Shards one more dim of an array over axes that do not shard it yet.

    Args:
        shape: The array's global shape.
        spec: Its entries so far.
        axes: The axes, major first.
        axis_sizes: The sizes of the mesh's axes.
        min_size: Arrays of fewer elements are left unchanged.
        dims: The dims to try, in order: the first that divides is sharded. By default
            all, the largest first.

    Returns:
        The new entries, and the reason if they are unchanged; empty otherwise.

    Example:
        >>> shard_further((784, 4096), (None, "model"), ["b"], {"b": 2, "model": 4})
        ((None, ('model', 'b')), '')
        >>> shard_further((999, 3), (None, None), ["batch"], {"batch": 8})
        ((None, None), "no dim divides over 'batch'")
        >>> shard_further((64,), (None,), ["batch"], {"batch": 8}, min_size=65)
        ((None,), '64 elements, fewer than 65')
    """
    spec = tuple(spec)
    # An axis can shard an array only once.
    used = {axis for entry in spec for axis in axes_of(entry)}
    free = tuple(axis for axis in axes if axis not in used)
    num_shards = math.prod(axis_sizes[axis] for axis in free)
    if not shape or num_shards == 1:
        return spec, ""
    if math.prod(shape) < min_size:
        return spec, f"{math.prod(shape)} elements, fewer than {min_size}"
    if dims is None:
        dims = sorted(range(len(shape)), key=lambda dim: -shape[dim])
    for dim in dims:
        now = axes_of(spec[dim])
        if shape[dim] % (num_shards * math.prod(axis_sizes[axis] for axis in now)) == 0:
            entry = (*now, *free)
            new = entry[0] if len(entry) == 1 else entry
            return (*spec[:dim], new, *spec[dim + 1 :]), ""
    over = ", ".join(map(repr, free))
    if len(dims) == 1:
        return (
            spec,
            f"dim {dims[0]}, of size {shape[dims[0]]}, does not divide over {over}",
        )
    return spec, f"no dim divides over {over}"
