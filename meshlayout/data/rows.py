"""Which rows of a global batch belong to which process, and how they are divided."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _batches, _checks
from meshlayout._annotations import AnySharding
from meshlayout.errors import DataError, LayoutError
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh, as_mesh


LayoutOrMesh: TypeAlias = Layout | Mesh | jax.sharding.Mesh | AnySharding
"""The layout of batches, or a mesh, whose batch axes then shard their rows."""


def process_rows(
    layout: LayoutOrMesh,
    global_shape: Sequence[int] | int,
    process_index: int | None = None,
) -> np.ndarray:
    """Returns which rows of a global array a process has to load.

    These are the rows of which its devices hold a part, each of them once, however
    the mesh spans the processes. A process without devices in the mesh has none.

    Args:
        layout: The layout of the array, or a mesh: then its axes called batch, data or
            fsdp shard the first dim.
        global_shape: Shape of the whole array, or only its number of rows.
        process_index: The process; this one if None.

    Returns:
        The numbers of the rows, ascending, as int64.

    Raises:
        LayoutError: If the shape does not fit the layout.
        DataError: If there is no such process.

    Example:
        >>> from meshlayout import create_mesh
        >>> mesh = create_mesh({"batch": 2, "model": 4})
        >>> process_rows(mesh.layout("batch", None), (6, 5))
        array([0, 1, 2, 3, 4, 5])
        >>> process_rows(mesh, 6, process_index=1)
        Traceback (most recent call last):
        meshlayout.errors.DataError: process_index must be below 1, the number of
            processes, got 1.
    """
    shape = tuple(global_shape) if isinstance(global_shape, Sequence) else None
    if shape is None:
        count = _checks.count("global_shape", global_shape, at_least=0, error=DataError)
        shape = (count,)
    if not shape:
        msg = "an array without dims has no rows; global_shape needs its batch dim."
        raise LayoutError(msg)
    full = _batches.leaf_layout(batch_layout(layout), len(shape))
    if process_index is None:
        process_index = jax.process_index()
    else:
        _check_process(process_index, full.mesh)
    size = full.shard_shape(shape)[0]
    starts = {
        full.shard_slices(shape, device)[0].start
        for device in full.mesh.devices.flat
        if device.process_index == process_index
    }
    parts = [np.arange(start, start + size) for start in sorted(starts)]
    return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64)


def _check_process(index: int, mesh: Mesh) -> None:
    index = _checks.count("process_index", index, at_least=0, error=DataError)
    # A mesh of a topology has processes that do not run.
    num_processes = max(jax.process_count(), processes_of(mesh)[-1] + 1)
    if index >= num_processes:
        msg = (
            f"process_index must be below {num_processes}, the number of processes, "
            f"got {index}."
        )
        raise DataError(msg)


def per_replica_batch_size(global_batch_size: int, layout_or_mesh: LayoutOrMesh) -> int:
    """Returns how many rows of a global batch each replica gets.

    Args:
        global_batch_size: Rows of the global batch.
        layout_or_mesh: The layout of batches, or a mesh: then its replicas are along
            the axes called batch, data or fsdp.

    Raises:
        DataError: If they do not divide.

    Example:
        >>> from meshlayout import create_mesh
        >>> per_replica_batch_size(512, create_mesh({"batch": 2, "model": 4}))
        256
    """
    size = _checks.count("global_batch_size", global_batch_size, error=DataError)
    layout = batch_layout(layout_or_mesh)
    replicas = _batches.num_row_shards(layout)
    if size % replicas:
        below = size // replicas * replicas
        nearest = [below, below + replicas] if below else [replicas]
        msg = (
            f"a global batch of {size} rows does not divide into {replicas} replicas "
            f"({layout!r}). Nearest sizes that divide: "
            f"{' and '.join(map(str, nearest))}."
        )
        raise DataError(msg)
    return size // replicas


def batch_layout(
    layout_or_mesh: LayoutOrMesh, note: Callable[[str], None] | None = None
) -> Layout:
    """Returns the layout of batches.

    Args:
        layout_or_mesh: A layout, a sharding, a PartitionSpec on the default mesh, or a
            mesh, whose axes in `BATCH_AXES` shard the first dim.
        note: Called with a sentence if there is only a mesh, without such an axis:
            every device then holds whole batches.

    Raises:
        DataError: If it is something else, or has an entry that JAX cannot place.
    """
    if isinstance(layout_or_mesh, (Mesh, jax.sharding.Mesh)):
        mesh = as_mesh(layout_or_mesh)
        is_whole = len(mesh.devices.flat) > 1 and not _batches.batch_axes(mesh)
        if is_whole and note is not None:
            axis = mesh.axis_names[0]
            note(
                f"Every device of {mesh!r} holds the whole batch: of a mesh's axes, "
                "those called batch, data or fsdp shard batches. To shard them along "
                f"another one, give a layout, as mesh.layout({axis!r}, ...)."
            )
        return _batches.batch_layout(mesh)
    if isinstance(layout_or_mesh, PartitionSpec):
        return Layout(layout_or_mesh)
    if not isinstance(layout_or_mesh, (Layout, NamedSharding)):
        msg = (
            "batches need a Layout, a mesh or a NamedSharding, got "
            f"{_checks.shown(layout_or_mesh)}. For a list of entries, write "
            "mesh.layout(...)."
        )
        raise DataError(msg)
    layout = Layout.of(layout_or_mesh)
    _ = layout.is_fully_replicated  # refuses MATCH
    return layout


def row_groups(layout: Layout, global_batch_size: int) -> list[tuple[int, ...]]:
    """Returns the processes, those with the same rows together.

    Args:
        layout: The layout of batches.
        global_batch_size: Rows of a global batch.

    Returns:
        One tuple of process indices for each different set of rows, in the order of
        their first rows.

    Raises:
        DataError: If two processes share a part of their rows, and not all.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for process in processes_of(layout.mesh):
        rows = process_rows(layout, global_batch_size, process)
        groups.setdefault(tuple(rows.tolist()), []).append(process)
    if sum(map(len, groups)) > global_batch_size:
        msg = (
            f"processes share a part of their rows under {layout!r}, so that no source "
            "can give a process its own rows. Leave out per_process=True, or order the "
            "mesh's devices by process."
        )
        raise DataError(msg)
    return [tuple(groups[rows]) for rows in sorted(groups)]


def processes_of(mesh: Mesh) -> list[int]:
    """Returns the processes that have devices in a mesh."""
    return sorted({device.process_index for device in mesh.devices.flat})
