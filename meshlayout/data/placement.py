"""Which rows of a batch a process loads, and how they become global arrays.

A process loads the rows of which its devices hold a part, each row once; where the mesh
shards a row itself, several processes load it. Weights are added or masked on the way,
so that every batch says which of its rows are padding.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _batches, _checks, _jax
from meshlayout._annotations import AnySharding, Batch, PyTree
from meshlayout._render.tables import array_text
from meshlayout.data.examples import ExampleSpec, LeafSpec, leaf_path
from meshlayout.errors import DataError, LayoutError, StepError
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh, as_mesh


LayoutOrMesh: TypeAlias = Layout | Mesh | jax.sharding.Mesh | AnySharding
"""The layout of batches, or a mesh, whose batch axes then shard the rows."""


def process_rows(
    layout: LayoutOrMesh,
    global_shape: Sequence[int] | int,
    process_index: int | None = None,
) -> np.ndarray:
    """Returns which rows of a global array a process has to load.

    Use this to write a source for `per_process=True`, or to read only what is needed
    from a file. These are the rows of which the process's devices hold a part, each of
    them once, however the mesh spans the processes.

    Args:
        layout: The layout of the array, or a mesh: then its batch axes shard the first
            dim, as for `distribute_dataset`.
        global_shape: Shape of the whole array, or only its number of rows.
        process_index: The process; this one if None.

    Returns:
        The row indices, ascending, int64.

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
    if not isinstance(global_shape, Sequence):
        rows = _checks.count("global_shape", global_shape, at_least=0, error=DataError)
        global_shape = (rows,)
    shape = tuple(global_shape)
    if not shape:
        msg = "an array without dims has no rows; global_shape needs its batch dim."
        raise LayoutError(msg)
    full = _batches.leaf_layout(batch_layout(layout), len(shape))
    here = jax.process_index() if process_index is None else process_index
    here = _checks.count("process_index", here, at_least=0, error=DataError)
    # The mesh of a topology, made for planning, has processes that are not running.
    num_processes = max(jax.process_count(), processes_of(full.mesh)[-1] + 1)
    if here >= num_processes:
        raise DataError(
            f"process_index must be below {num_processes}, the number of processes, "
            f"got {here}."
        )
    # A set: replicas of a shard, and shards of other dims, have the same rows.
    size = full.shard_shape(shape)[0]
    starts = {
        full.shard_slices(shape, device)[0].start
        for device in full.mesh.devices.flat
        if device.process_index == here
    }
    parts = [np.arange(start, start + size) for start in sorted(starts)]
    return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64)


def per_replica_batch_size(global_batch_size: int, layout_or_mesh: LayoutOrMesh) -> int:
    """Returns how many rows of a global batch each replica gets; they must divide.

    The replicas of a mesh are along its batch axes.

    Example:
        >>> from meshlayout import create_mesh
        >>> per_replica_batch_size(512, create_mesh({"batch": 2, "model": 4}))
        256
    """
    layout = batch_layout(layout_or_mesh)
    replicas = _batches.num_row_shards(layout)
    return rows_per_replica(global_batch_size, replicas, f" ({layout!r})")


def rows_per_replica(global_batch_size: int, replicas: int, where: str = "") -> int:
    """Returns the rows of a replica; `where` names the replicas in messages."""
    size = _checks.count("global_batch_size", global_batch_size, error=DataError)
    if size % replicas:
        below = size // replicas * replicas
        nearest = [below, below + replicas] if below else [replicas]
        raise DataError(
            f"a global batch of {size} rows does not divide into {replicas} replicas"
            f"{where}. Nearest sizes that divide: {' and '.join(map(str, nearest))}."
        )
    return size // replicas


def batch_layout(
    layout_or_mesh: LayoutOrMesh, warn: Callable[[str], None] = lambda _: None
) -> Layout:
    """Returns the layout of batches; a mesh shards the first dim over `BATCH_AXES`.

    Calls `warn` if it has no such axis: whole batches everywhere are seldom meant.
    """
    if isinstance(layout_or_mesh, (Mesh, jax.sharding.Mesh)):
        mesh = as_mesh(layout_or_mesh)
        if mesh.size > 1 and not _batches.batch_axes(mesh):
            warn(
                f"every device of {mesh!r} gets all rows of each batch: none of its "
                "axes has one of the names that shard batches, "
                f"{', '.join(map(repr, _batches.BATCH_AXES))}. Name the axis so, or "
                f"give a layout in place of the mesh, as "
                f"mesh.layout({mesh.axis_names[0]!r}, ...); if every device is to have "
                "all rows, mesh.layout(...)."
            )
        return _batches.batch_layout(mesh)
    if isinstance(layout_or_mesh, PartitionSpec):
        return Layout(layout_or_mesh)
    if not isinstance(layout_or_mesh, (Layout, NamedSharding)):
        shown = _checks.shown(layout_or_mesh)
        raise DataError(
            f"batches need a Layout, a mesh or a NamedSharding, got {shown}. For a "
            "list of entries, write mesh.layout(...)."
        )
    layout = Layout.of(layout_or_mesh)
    _ = layout.is_fully_replicated  # raises for MATCH, which no batch can have
    return layout


def row_groups(layout: Layout, global_batch_size: int) -> list[tuple[int, ...]]:
    """Returns the processes that load the same rows, group by group, by first row."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for process in processes_of(layout.mesh):
        rows = process_rows(layout, global_batch_size, process)
        groups.setdefault(tuple(rows.tolist()), []).append(process)
    # Sets of rows that overlap have more rows together than there are.
    if sum(map(len, groups)) > global_batch_size:
        raise DataError(
            f"processes share a part of their rows under {layout!r}, so that no source "
            "can give a process its own rows. Leave out per_process=True, or order the "
            "mesh's devices by process."
        )
    return [tuple(groups[rows]) for rows in sorted(groups)]


def local_rows(layout: Layout, size: int, *, per_process: bool) -> np.ndarray:
    """Returns this process's rows, which with `per_process` it alone must fill."""
    per_replica_batch_size(size, layout)
    rows = process_rows(layout, size)
    if per_process:
        row_groups(layout, size)
        if not len(rows):
            raise DataError(
                f"process {jax.process_index()} has no devices in {layout.mesh!r}, and "
                "so no rows of its own: with per_process=True it makes no dataset."
            )
    return rows


def processes_of(mesh: Mesh) -> list[int]:
    """Returns the processes that have devices in a mesh."""
    return sorted({device.process_index for device in mesh.devices.flat})


# Batches on the mesh.


class Placement:
    """Makes global arrays of this process's `own` rows of a batch of `num_rows`."""

    def __init__(
        self,
        spec: ExampleSpec,
        weights_index: int | None,
        layout: Layout,
        num_rows: int,
        own: np.ndarray,
    ) -> None:
        per_shard = num_rows // _batches.num_row_shards(layout)
        # The first row of each shard, and its index among this process's rows.
        starts = {int(row): i for i, row in enumerate(own) if row % per_shard == 0}
        self._treedef, self._weights_index = spec.treedef, weights_index
        self._num_own = len(own)
        self.has_weights = weights_index is not None
        # By leaf, what makes a global array of its shards, and the slices of this
        # process's rows that they are; None for a leaf that stays on the host.
        self._shards: list[tuple[Callable[..., jax.Array], list[Any]] | None] = []
        abstract = []
        for leaf in spec.leaves:
            shape, dtype, sharding = (num_rows, *leaf.shape), leaf.dtype, None
            shards = None
            if leaf.to is not None:
                dtype, sharding = leaf.to, _sharding(leaf, layout, shape)
                slices = []
                indices: Any = sharding.addressable_devices_indices_map(shape)
                for rows, *others in indices.values():
                    first, stop, _ = rows.indices(num_rows)
                    part = slice(starts[first], starts[first] + stop - first)
                    slices.append((part, *others))
                shards = _jax.shard_placer(shape, dtype, sharding), slices
            self._shards.append(shards)
            abstract.append(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))
        self.element_spec: PyTree = spec.treedef.unflatten(abstract)
        self._x64 = _jax.canonical_dtype(np.int64) == np.int64

    def __call__(self, leaves: list[np.ndarray], is_real: np.ndarray | None) -> Batch:
        """Returns a batch on the mesh, where rows that are not `is_real` weigh 0."""
        index = self._weights_index
        if index is not None:
            is_added = len(leaves) < len(self._shards)
            weights = np.ones(self._num_own, np.float32) if is_added else leaves[index]
            if is_real is not None:  # also of the source's own weights
                weights = _batches.mask_padding(weights, is_real)
            others = leaves[index:] if is_added else leaves[index + 1 :]
            leaves = [*leaves[:index], weights, *others]
        # `jax.enable_x64` as a context manager does not reach the prefetching thread.
        with _jax.x64_mode(enabled=self._x64):
            arrays: list[Any] = list(leaves)
            for number, shards in enumerate(self._shards):
                if shards is not None:
                    place, slices = shards
                    arrays[number] = place([leaves[number][part] for part in slices])
        if index is not None:  # a step that looks for them elsewhere then refuses
            _batches.mark_weights(arrays[index])
        return self._treedef.unflatten(arrays)


def _sharding(leaf: LeafSpec, layout: Layout, shape: tuple[int, ...]) -> NamedSharding:
    full = None
    try:
        full = _batches.leaf_layout(layout, len(shape))
        if not full.misfits(shape):
            return full.sharding
        full.check(shape, f"{leaf.path or 'the array'} {array_text(leaf.to, shape)}")
    except LayoutError as error:
        where = f"{leaf.path or 'the array'} {array_text(leaf.to, shape)}: "
        # `check` names the leaf by itself.
        raise DataError(f"{where if full is None else ''}{error}") from None
    return full.sharding


def find_weights(
    rows: PyTree, spec: ExampleSpec, key: str | int | None, *, add: bool
) -> tuple[ExampleSpec, int | None]:
    """Returns the spec of batches, and the index of the weights among its leaves.

    The weights that the source has under `key`; or if there are none, `add`ed ones.
    """
    if key is None:
        return spec, None
    # Numbers in place of the leaves show which one `get_weights` finds.
    numbered = spec.treedef.unflatten(range(len(spec.leaves)))
    index = _batches.get_weights(numbered, key)
    if index is not None:
        problem = ""
        if not isinstance(index, int):
            problem = f"one per example, and is {_checks.type_text(index)}"
        elif spec.leaves[index].to is None or spec.leaves[index].dtype.kind == "c":
            dtype = spec.leaves[index].dtype
            problem = f"one number per example, and has dtype {dtype}"
        if problem:
            raise DataError(
                f"the source's {key!r} is taken for the weights, {problem}. Give "
                "weights= another name."
            )
        return spec, index
    weighted: PyTree = None
    if isinstance(numbered, (Mapping, tuple, list)):
        with contextlib.suppress(StepError):  # a mapping whose keys are fixed
            if _batches.takes_weights(numbered, key):
                weighted = _batches.with_weights(numbered, key, -1)
    # The default key was not chosen by the user, and weights may never be needed.
    if weighted is None and key != "weight":
        msg = f"the source's examples have no place for weights={key!r}. "
        raise DataError(msg + padding_hint(rows))
    if weighted is None or not add:
        return spec, None
    entries, treedef = jax.tree_util.tree_flatten_with_path(weighted)
    index = [number for _, number in entries].index(-1)
    dtype = np.dtype(np.float32)
    weights = LeafSpec(leaf_path(entries[index][0]), dtype, (), dtype)
    leaves = (*spec.leaves[:index], weights, *spec.leaves[index:])
    return replace(spec, treedef=treedef, leaves=leaves), index


def padding_hint(rows: PyTree) -> str:
    """Returns what a user can do if such rows have no place for weights of padding."""
    if type(rows) in (tuple, list):
        place = f"weights={len(rows)} appends them"
    elif isinstance(rows, Mapping) and all(isinstance(key, int) for key in rows):
        place = f"next to integer keys, weights={max(rows) + 1} adds them"
    else:
        place = "a dict carries them under a key"
    return f"Padding is marked by weights: {place}. Or choose another remainder=."
