"""The rows of a batch that a process loads, and their way into global arrays.

A process loads the rows of which its devices hold a part, each row once. If the mesh
shards rows themselves, several processes load the same row. Weights are added or masked
on the way, so that every batch says which of its rows are padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshlayout import _batches, _checks, _jax
from meshlayout._annotations import Batch, PyTree
from meshlayout._render.tables import array_text
from meshlayout.data.examples import ExampleSpec, LeafSpec, leaf_path
from meshlayout.errors import DataError, LayoutError
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh, auto_mesh


LayoutOrMesh: TypeAlias = Layout | Mesh | jax.sharding.Mesh | NamedSharding
"""The layout of batches, or a mesh, whose batch axes then shard the rows."""


@_checks.user_call
def process_rows(
    layout: LayoutOrMesh,
    global_shape: Sequence[int] | int,
    process_index: int | None = None,
) -> np.ndarray:
    """Returns the rows of a global array that a process must load.

    Use this to write a source for `per_process=True`, or to read only the needed rows
    of a file. The process's devices hold parts of these rows; each row is listed once,
    however the mesh spans the processes.

    Args:
        layout: The layout of the array; or a mesh, whose batch axes then shard the
            first dim, as for `distribute_dataset`.
        global_shape: Shape of the whole array, or only its number of rows.
        process_index: The process; this one if None.

    Returns:
        The row indices, ascending, int64; none for a process without devices.

    Examples:
        >>> from meshlayout import create_mesh
        >>> mesh = create_mesh({"batch": 2, "model": 4})
        >>> process_rows(mesh.layout("batch", None), (6, 5))
        array([0, 1, 2, 3, 4, 5])
    """
    is_shape = isinstance(global_shape, Sequence)
    first = (*global_shape, None)[0] if is_shape else global_shape
    num_rows = _checks.count("the number of rows", first, at_least=0, error=DataError)
    rows = _batches.leaf_layout(batch_layout(layout), 1)
    here = jax.process_index() if process_index is None else process_index
    # A set: replicas of a shard, and shards of other dims, have the same rows.
    starts = {
        rows.shard_slices((num_rows,), device)[0].start
        for device in rows.mesh.devices.flat
        if device.process_index == here
    }
    (size,) = rows.shard_shape((num_rows,))
    parts = [np.arange(start, start + size) for start in sorted(starts)]
    return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64)


@_checks.user_call
def per_replica_batch_size(global_batch_size: int, layout_or_mesh: LayoutOrMesh) -> int:
    """Returns the number of rows of a global batch per replica; they must divide.

    The number of replicas is the product of the mesh's batch axes.

    Examples:
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
        fact = f"a global batch of {size} rows does not divide into {replicas} replicas"
        sizes = " and ".join(map(str, nearest))
        raise DataError(f"{fact}{where}. Nearest sizes that divide: {sizes}.")
    return size // replicas


def batch_layout(
    layout_or_mesh: LayoutOrMesh, warn: Callable[[str], None] = lambda _: None
) -> Layout:
    """Returns the layout of batches; a mesh shards the first dim over `BATCH_AXES`.

    Calls `warn` if it has no such axis: whole batches everywhere are rarely meant.
    """
    if isinstance(layout_or_mesh, (Mesh, jax.sharding.Mesh)):
        mesh = auto_mesh(layout_or_mesh)
        if mesh.size > 1 and not _batches.batch_axes(mesh):
            warn(
                f"every device of {mesh!r} gets all rows of each batch: none of its "
                "axes has one of the names that shard batches, "
                f"{', '.join(map(repr, _batches.BATCH_AXES))}. Name the axis so, or "
                "give a layout in place of the mesh, with the axes that shard rows: "
                f"mesh.layout({mesh.axis_names[0]!r}, ...), or a tuple of them; if all "
                "devices are to have all rows, mesh.layout(...)."
            )
        return _batches.batch_layout(mesh)
    if not isinstance(layout_or_mesh, (Layout, NamedSharding)):
        shown = _checks.shown(layout_or_mesh)
        raise DataError(
            f"batches need a Layout, a mesh or a NamedSharding, got {shown}. One is "
            "for all entries, of which those with fewer dims take its first ones: "
            "distribute_dataset(data, mesh, global_batch_size=8)."
        )
    return Layout.of(layout_or_mesh)


def input_pipeline(layout: Layout) -> tuple[int, int]:
    """Returns the number of groups of processes that load equal rows, and this one's.

    Raises DataError where no source can give this process its own rows.
    """
    here, replicas = jax.process_index(), _batches.num_row_shards(layout)
    # With one row per replica, processes that share a replica share its row.
    rows = {
        process: tuple(process_rows(layout, replicas, process).tolist())
        for process in processes_of(layout.mesh)
    }
    groups = sorted(set(rows.values()))
    # Sets of rows that overlap have more rows together than there are.
    if sum(map(len, groups)) > replicas:
        raise DataError(
            f"processes share a part of their rows under {layout!r}, so that no source "
            "can give a process its own rows. Leave out per_process=True, or order the "
            "mesh's devices by process."
        )
    if here not in rows:
        msg = f"process {here} has no devices in {layout.mesh!r}, and feeds no replica."
        raise DataError(msg)
    return len(groups), groups.index(rows[here])


def processes_of(mesh: Mesh) -> list[int]:
    """Returns the processes that have devices in a mesh."""
    return sorted({device.process_index for device in mesh.devices.flat})


# Batches on the mesh.


class Placement:
    """Makes global arrays of a batch of `num_rows`, of which this process has `own`."""

    def __init__(
        self,
        spec: ExampleSpec,
        weights_index: int | None,
        layout: Layout,
        num_rows: int,
    ) -> None:
        self._treedef, self._weights_index = spec.treedef, weights_index
        self.own = own = process_rows(layout, num_rows)
        # By leaf, what makes a global array of its shards, and the slices of this
        # process's rows that they are; None for a leaf that stays on the host.
        self._shards: list[tuple[Callable[..., jax.Array] | None, list[Any]]] = []
        abstract = []
        for leaf in spec.leaves:
            shape, dtype, sharding = (num_rows, *leaf.shape), leaf.dtype, None
            place, parts = None, []
            if leaf.to is not None:
                dtype, sharding = leaf.to, _sharding(leaf, layout, shape)
                place = _jax.shard_placer(shape, dtype, sharding)
                indices: Any = sharding.addressable_devices_indices_map(shape)
                for rows, *others in indices.values():
                    first, stop, _ = rows.indices(num_rows)
                    start = int(np.searchsorted(own, first))
                    parts.append((slice(start, start + stop - first), *others))
            self._shards.append((place, parts))
            abstract.append(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))
        self.element_spec: PyTree = spec.treedef.unflatten(abstract)
        self._x64 = _jax.canonical_dtype(np.int64) == np.int64

    def __call__(self, leaves: list[np.ndarray], is_real: np.ndarray | None) -> Batch:
        """Returns a batch on the mesh, where rows that are not `is_real` weigh 0."""
        index, leaves = self._weights_index, list(leaves)
        if index is not None:
            if len(leaves) < len(self._shards):  # the source has none
                leaves.insert(index, np.ones(len(self.own), np.float32))
            if is_real is not None:
                leaves[index] = _batches.mask_padding(leaves[index], is_real)
        # `jax.enable_x64` as a context manager does not reach the prefetching thread.
        with _jax.x64_mode(enabled=self._x64):
            arrays: list[Any] = [
                leaf if place is None else place([leaf[part] for part in parts])
                for leaf, (place, parts) in zip(leaves, self._shards, strict=True)
            ]
        if index is not None:  # a step that looks for them elsewhere then refuses
            _batches.marked_weights[id(arrays[index])] = arrays[index]
        return self._treedef.unflatten(arrays)


def _sharding(leaf: LeafSpec, layout: Layout, shape: tuple[int, ...]) -> NamedSharding:
    try:
        full = _batches.leaf_layout(layout, len(shape))
        full.check(shape)
    except LayoutError as error:
        where = f"{leaf.path or 'the array'} {array_text(leaf.to, shape)}"
        what = str(error).removeprefix(f"an array of shape {shape}: ")
        raise DataError(f"{where}: {what}") from None
    return full.sharding


def find_weights(
    rows: PyTree, spec: ExampleSpec, key: str | int | None, *, add: bool
) -> tuple[ExampleSpec, int | None]:
    """Returns the spec of batches, and the index of the weights among its leaves.

    These are the source's weights under `key`, or if there are none, `add`ed ones.
    """
    if key is None:
        return spec, None
    # Numbers in place of the leaves show which one `get_weights` finds.
    numbered = spec.treedef.unflatten(range(len(spec.leaves)))
    index = _batches.get_weights(numbered, key)
    if index is not None:
        leaf = spec.leaves[index] if isinstance(index, int) else None
        if leaf is None or leaf.to is None or leaf.dtype.kind == "c":
            kind = _checks.type_text(index) if leaf is None else leaf.dtype
            msg = (
                f"the source's {key!r} is taken for the weights, one number per example"
            )
            raise DataError(f"{msg}, and is {kind}. Give weights= another name.")
        return spec, index
    has_place = _batches.takes_weights(numbered, key)
    # The default key was not chosen by the user, and weights may not be needed.
    if not has_place and key != "weight":
        msg = f"the source's examples have no place for weights={key!r}. "
        raise DataError(msg + padding_hint(rows))
    if not has_place or not add:
        return spec, None
    weighted = _batches.with_weights(numbered, key, -1)
    entries, treedef = jax.tree_util.tree_flatten_with_path(weighted)
    index = [number for _, number in entries].index(-1)
    dtype = np.dtype(np.float32)
    weights = LeafSpec(leaf_path(entries[index][0]), dtype, (), dtype)
    leaves = (*spec.leaves[:index], weights, *spec.leaves[index:])
    return replace(spec, treedef=treedef, leaves=leaves), index


def padding_hint(rows: PyTree) -> str:
    """Returns advice for rows that have no place for weights of padding."""
    place = "a dict carries them under a key"
    if type(rows) in (tuple, list):
        place = f"weights={len(rows)} appends them"
    return f"Padding is marked by weights: {place}. Or choose another remainder=."
