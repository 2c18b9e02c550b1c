"""Which rows of a batch a process loads, and how they become global arrays.

Rows belong to the process whose devices hold a part of them, each once. Weights are
added or masked on the way, so that every batch says which of its rows are padding.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _batches, _checks, _jax
from meshlayout._annotations import AnySharding, Batch, PyTree
from meshlayout._render.tables import array_text
from meshlayout.data.examples import ExampleSpec, LeafSpec, named_leaves
from meshlayout.errors import DataError, LayoutError, StepError
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
    num_processes = max(jax.process_count(), _processes(mesh)[-1] + 1)
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
    for process in _processes(layout.mesh):
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


def _processes(mesh: Mesh) -> list[int]:
    """Returns the processes that have devices in a mesh."""
    return sorted({device.process_index for device in mesh.devices.flat})


# Batches on the mesh


class Placement:
    """Places this process's rows of batches as global arrays.

    Attributes:
        element_spec: The abstract batch: a tree of shapes, dtypes and shardings.

    Args:
        spec: What batches are.
        weights_index: The number of their weights' leaf; None if they have none.
        layout: The layout of batches.
        num_rows: Rows of a global batch.
        own_rows: Which of them are this process's own.

    Raises:
        DataError: If a leaf does not fit the layout.
    """

    def __init__(
        self,
        spec: ExampleSpec,
        weights_index: int | None,
        layout: Layout,
        num_rows: int,
        own_rows: np.ndarray,
    ) -> None:
        per_shard = num_rows // _batches.num_row_shards(layout)
        starts = {
            int(row): start
            for start, row in enumerate(own_rows)
            if row % per_shard == 0
        }
        self._treedef, self._index = spec.treedef, weights_index
        self._places: list[Callable[[np.ndarray], Any]] = []
        abstract_leaves = []
        for leaf in spec.leaves:
            shape, dtype, sharding = (num_rows, *leaf.shape), leaf.dtype, None
            place: Callable[[np.ndarray], Any] = _on_host
            if leaf.to is not None:
                dtype, sharding = leaf.to, _sharding(leaf, layout, shape)
                slices = _shard_slices(sharding, shape, starts)
                placer = _jax.shard_placer(shape, dtype, sharding)
                place = functools.partial(_placed, placer, slices)
            self._places.append(place)
            abstract_leaves.append(
                jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            )
        self.element_spec: PyTree = spec.treedef.unflatten(abstract_leaves)
        self._x64 = _jax.canonical_dtype(np.int64) == np.int64

    @property
    def has_weights(self) -> bool:
        """Whether batches carry weights."""
        return self._index is not None

    def __call__(
        self, leaves: list[np.ndarray], is_real: np.ndarray | None, num_rows: int
    ) -> Batch:
        """Returns a batch on the mesh, with its weights.

        Args:
            leaves: This process's rows of each leaf that the source gave; its weights
                may be one of them.
            is_real: Which of them are not padding; None for all.
            num_rows: How many rows these are.
        """
        index = self._index
        if index is not None:
            is_added = len(leaves) < len(self._places)
            weights = np.ones(num_rows, np.float32) if is_added else leaves[index]
            if is_real is not None:
                weights = _batches.mask_padding(weights, is_real)
            others = leaves[index:] if is_added else leaves[index + 1 :]
            leaves = [*leaves[:index], weights, *others]
        # The mode in which the dataset was made counts, in any thread.
        with _jax.x64_mode(enabled=self._x64):
            arrays = [
                place(leaf) for place, leaf in zip(self._places, leaves, strict=True)
            ]
        if index is not None:
            _batches.mark_weights(arrays[index])
        return self._treedef.unflatten(arrays)


def _on_host(leaf: np.ndarray) -> np.ndarray:
    return leaf


def _placed(
    place: Callable[[list[np.ndarray]], jax.Array],
    slices: list[tuple[slice, ...]],
    leaf: np.ndarray,
) -> jax.Array:
    """Returns a global array of this process's rows."""
    return place([leaf[part] for part in slices])


def _shard_slices(
    sharding: NamedSharding, shape: tuple[int, ...], starts: dict[int, int]
) -> list[tuple[slice, ...]]:
    """Returns the parts of a process's rows that its devices hold.

    `starts` has for the first row of each shard its place among the process's rows.
    """
    slices = []
    indices: Any = sharding.addressable_devices_indices_map(shape)
    for rows, *others in indices.values():
        first, stop, _ = rows.indices(shape[0])
        start = starts[first]
        slices.append((slice(start, start + stop - first), *others))
    return slices


def _sharding(leaf: LeafSpec, layout: Layout, shape: tuple[int, ...]) -> NamedSharding:
    def where() -> str:
        return f"{leaf.path or 'the array'} {array_text(leaf.to, shape)}"

    try:
        full = _batches.leaf_layout(layout, len(shape))
    except LayoutError as error:
        raise DataError(f"{where()}: {error}") from None
    if full.misfits(shape):
        try:
            full.check(shape, where())
        except LayoutError as error:
            raise DataError(str(error)) from None
    return full.sharding


def is_on_mesh(batch: Batch, layout: Layout) -> bool:
    """Returns whether all arrays of a batch are on the devices of a layout's mesh."""
    devices = set(layout.mesh.devices.flat)
    shardings = map(_jax.sharding_of, jax.tree.leaves(batch))
    return all(s is not None and s.device_set == devices for s in shardings)


def find_weights(
    rows: PyTree, spec: ExampleSpec, key: str | int | None, *, add: bool
) -> tuple[ExampleSpec, int | None]:
    """Returns what batches are, with the source's weights or added ones.

    Args:
        rows: Some rows of the source.
        spec: What its examples are.
        key: Where weights are: a mapping's key, a place in a tuple, or a field.
        add: Whether to add them where the source has none.

    Returns:
        The leaves of batches, and the number of the weights' one, if there are any.

    Raises:
        DataError: If the leaf there is not weights, or the chosen key cannot exist in
            these batches.
    """
    if key is None:
        return spec, None
    # Stand for the leaves, to find their places in the tree.
    markers: list[object] = [object() for _ in spec.leaves]
    marked = spec.treedef.unflatten(markers)
    weights = _batches.get_weights(rows, key)
    if weights is not None:
        marker = _batches.get_weights(marked, key)
        problem = ""
        if jax.tree.structure(weights) != jax.tree.structure(0):
            problem = f"one per example, and is a {type(weights).__name__}"
        elif marker not in markers:
            return spec, None  # a field that is not part of the tree
        else:
            leaf = spec.leaves[markers.index(marker)]
            if leaf.to is None or leaf.dtype.kind == "c":
                problem = f"one number per example, and has dtype {leaf.dtype}"
        if problem:
            msg = (
                f"the source's {key!r} is taken for the weights, {problem}. Give "
                "weights= another name."
            )
            raise DataError(msg)
        return spec, markers.index(marker)
    weighted = _with_weights(spec, marked, markers, key)
    # Sources without a place for the default key may never need one.
    if weighted is None and key != "weight":
        msg = f"the source's examples have no place for weights={key!r}. "
        raise DataError(msg + padding_hint(rows))
    return weighted if add and weighted else (spec, None)


def _with_weights(
    spec: ExampleSpec, marked: PyTree, markers: list[object], key: str | int
) -> tuple[ExampleSpec, int] | None:
    """Returns examples with added weights, or None if there is no place for them."""
    if not _batches.takes_weights(marked, key):
        return None
    marker = object()
    try:
        named, treedef = named_leaves(_batches.with_weights(marked, key, marker))
    except StepError:
        return None
    order = [leaf for _, leaf in named]
    index = order.index(marker) if marker in order else 0
    if order[:index] + order[index + 1 :] != markers:
        return None
    dtype = np.dtype(np.float32)
    weights = LeafSpec(named[index][0], dtype, (), dtype)
    leaves = (*spec.leaves[:index], weights, *spec.leaves[index:])
    return ExampleSpec(treedef, leaves), index


def padding_hint(rows: PyTree) -> str:
    """Returns what to do where padding of such rows has no place for its weights."""
    if type(rows) in (tuple, list):
        place = f"weights={len(rows)} appends them"
    elif isinstance(rows, Mapping) and all(isinstance(key, int) for key in rows):
        place = f"next to integer keys, weights={max(rows) + 1} adds them"
    else:
        place = "a dict carries them under a key"
    return f"Padding is marked by weights: {place}. Or choose another remainder=."
