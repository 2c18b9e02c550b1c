"""The mesh of a state and the axes that shard a batch: what a step's program is for."""

import contextlib
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _checks, _jax, _paths
from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout._batches import BATCH_AXES, batch_axes, check_weights_key, get_weights
from meshlayout.arrays import relayout
from meshlayout.arrays.placement import check_same
from meshlayout.errors import MeshLayoutError, StepError
from meshlayout.mesh import Mesh
from meshlayout.state import TrainState


_log = logging.getLogger("meshlayout")


@dataclass(frozen=True)
class StepMesh:
    """The mesh of a state, and the axes that shard the rows of a batch.

    Attributes:
        mesh: The mesh; None for a state on no mesh.
        axes: Its axes that shard the rows; none where the batch is not sharded.
        sharding: The sharding of arrays that are replicated.
        is_abstract: Whether the state is only described, perhaps on devices that are
            only described, too.
    """

    mesh: jax.sharding.Mesh | None
    axes: tuple[str, ...]
    sharding: Any
    is_abstract: bool = False

    @property
    def num_shards(self) -> int:
        """How many shards the batch has."""
        if self.mesh is None:
            return 1
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def constrain(self, x: jax.Array, dim: int) -> jax.Array:
        """Shards a dim over the batch axes, and leaves the others to the compiler."""
        if self.mesh is None or not self.axes:
            return x
        is_explicit = jax.sharding.AxisType.Explicit in self.mesh.axis_types
        others = None if is_explicit else PartitionSpec.UNCONSTRAINED
        entries: list[Any] = [others] * x.ndim
        entries[dim] = self.axes
        return _jax.constrain(x, NamedSharding(self.mesh, PartitionSpec(*entries)))

    def put(self, tree: PyTree, *, is_own: bool = False) -> Any:
        """Replicates arrays that are on no mesh; others stay.

        Args:
            tree: Arrays.
            is_own: Whether NumPy arrays differ between processes, as clocks do;
                otherwise they are checked to be the same on all.
        """
        if self.sharding is None:
            return tree
        is_own = is_own and not self.sharding.is_fully_addressable

        def replicate(leaf: Leaf) -> Any:
            if self.is_abstract and not isinstance(leaf, jax.ShapeDtypeStruct):
                leaf = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf.update(sharding=leaf.sharding or self.sharding)
            now = _jax.sharding_of(leaf)
            is_here = now is not None and now.device_set == self.sharding.device_set
            if is_here and _jax.is_committed(leaf):  # in a layout of its own, perhaps
                return leaf
            if is_own and isinstance(leaf, np.ndarray):
                return jax.make_array_from_callback(
                    leaf.shape, self.sharding, lambda index: leaf[index]
                )
            return _jax.put(leaf, self.sharding)

        if not is_own:
            _check_same(tree, self.sharding)
        return jax.tree.map(replicate, tree)

    def everywhere(self, tree: PyTree) -> Any:
        """Keeps values inside jit replicated."""
        if not isinstance(self.sharding, NamedSharding):
            return tree
        return jax.tree.map(lambda x: _jax.constrain(x, self.sharding), tree)


def _check_same(tree: PyTree, sharding: Any) -> None:
    """Checks arrays that every process has for itself before they become one."""
    if jax.process_count() > 1 and isinstance(sharding, NamedSharding):
        jax_mesh: Any = sharding.mesh
        mesh = Mesh(jax_mesh)
        leaves = _paths.flatten(tree).leaves
        check_same((leaf.path, leaf.value, mesh) for leaf in leaves)


def in_own_mesh(tree: PyTree) -> AbstractContextManager[None]:
    """Returns a context for work on arrays, whatever mesh `jax.set_mesh` has set.

    JAX refuses arrays under a mesh other than theirs, or under the same one with other
    types of axes. If it is the arrays' own mesh, it stays set, for functions that
    constrain values by a PartitionSpec alone.

    Args:
        tree: The state.
    """
    ambient = jax.sharding.get_abstract_mesh()
    if ambient.empty or _jax.is_tracing():
        return _NOTHING
    shardings = map(_jax.sharding_of, jax.tree.leaves(tree))
    meshes = (x.mesh for x in shardings if isinstance(x, NamedSharding))
    mesh = next(meshes, None)
    is_own = mesh is not None and mesh.abstract_mesh == ambient
    return _NOTHING if is_own else _jax.without_set_mesh()


_NOTHING = contextlib.nullcontext()


def step_mesh_of(state: PyTree, axes: tuple[str, ...] = ()) -> StepMesh:
    """Returns the mesh of a train state, with the axes that shard the rows."""
    # The step number is replicated over the mesh: other scalars go where it is.
    sharding = _jax.sharding_of(state.step)
    is_abstract = isinstance(state.step, jax.ShapeDtypeStruct)
    if not isinstance(sharding, NamedSharding):
        return StepMesh(None, (), sharding, is_abstract)
    mesh: Any = sharding.mesh
    return StepMesh(mesh, axes, sharding, is_abstract)


def row_axes(batch: Batch, dim: int = 0) -> tuple[str, ...]:
    """Returns the mesh axes that shard a dim of a batch, by default the first."""
    for leaf in jax.tree.leaves(batch):
        sharding = _jax.sharding_of(leaf)
        if isinstance(sharding, NamedSharding) and len(sharding.spec) > dim:
            entry = sharding.spec[dim]
            if entry is not None:
                return entry if isinstance(entry, tuple) else (entry,)
    return ()


def layout_of(leaf: Leaf) -> Any:
    """Returns the sharding of a leaf that is bound to one, else None."""
    if isinstance(leaf, Tracer):  # the step is called inside another jit
        return None
    if isinstance(leaf, jax.Array):
        return leaf.sharding if leaf.committed else None
    return leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None


def mesh_text(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> str:
    """Returns the axes of a mesh as `"batch=2, model=4"`."""
    return ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())


def replicated(layouts: Iterable[Any]) -> NamedSharding | None:
    """Returns the layout of arrays replicated over a state's mesh, if it is on one."""
    meshes = (x.mesh for x in layouts if isinstance(x, NamedSharding))
    mesh = next(meshes, None)
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def place_rest(
    args: tuple[Any, ...], kwargs: dict[str, Any], whole: NamedSharding | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gives arrays without a layout the layout `whole`, if any; the state stays."""
    if whole is None:
        return args, kwargs

    def is_free(leaf: Leaf) -> bool:
        is_array = hasattr(leaf, "dtype") and not isinstance(
            leaf, (Tracer, jax.ShapeDtypeStruct)
        )
        # Python numbers stay: jit takes them to any device.
        return is_array and layout_of(leaf) is None

    rest = (args[1:], kwargs)
    _check_same(jax.tree.map(lambda x: x if is_free(x) else None, rest), whole)
    rest, kwargs = jax.tree.map(lambda x: _jax.put(x, whole) if is_free(x) else x, rest)
    return (args[0], *rest), kwargs


def place_host_batch(state: TrainState, batch: Batch, dim: int = 0) -> Batch:
    """Shards a batch that is on no mesh over the batch axes of the state's mesh.

    As the Trainer does; otherwise every device would compute all of it. A batch whose
    rows do not divide, or that has any array placed already, is left unchanged.

    Args:
        state: A train state.
        batch: A batch, or batches stacked in a dim before the rows.
        dim: The dim of the rows.
    """
    leaves = jax.tree.leaves(batch)
    if any(map(_is_placed, leaves)):  # its owner has decided where it goes
        return batch
    sharding = _jax.sharding_of(state.step)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return batch
    mesh: Any = sharding.mesh
    axes = batch_axes(mesh)
    num_shards = math.prod(mesh.shape[axis] for axis in axes)
    rows = {np.shape(leaf)[dim] for leaf in leaves if np.ndim(leaf) > dim}
    if not axes or any(size % num_shards for size in rows) or not rows:
        return batch

    def has_rows(leaf: Leaf) -> bool:
        return np.ndim(leaf) > dim

    def layout(leaf: Leaf) -> NamedSharding:
        spec: list[Any] = [None] * np.ndim(leaf)
        spec[dim] = axes
        return NamedSharding(mesh, PartitionSpec(*spec))

    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return jax.tree.map(
            lambda leaf: (
                leaf.update(sharding=layout(leaf))
                if isinstance(leaf, jax.ShapeDtypeStruct) and has_rows(leaf)
                else leaf
            ),
            batch,
        )
    # In one call, as processes compare what they place.
    with_rows = jax.tree.map(lambda leaf: leaf if has_rows(leaf) else None, batch)
    placed = relayout(with_rows, jax.tree.map(layout, with_rows))
    return jax.tree.map(
        lambda leaf, other: other if leaf is None else leaf,
        *(placed, batch),
        is_leaf=lambda leaf: leaf is None,
    )


def _is_placed(leaf: Leaf) -> bool:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding is not None
    return isinstance(leaf, Tracer) or _jax.is_committed(leaf)


def check_divided(
    state: PyTree, batch: Batch, text: Callable[[], str], dim: int = 0
) -> None:
    """Checks, before the first call on a mesh, that its devices divide the work.

    Where rows do not divide, every device has to compute the whole batch; and `text`,
    the program's, shows what is sharded inside the step alone.

    Args:
        state: The state.
        batch: The batch.
        text: Returns the text of the step's program.
        dim: The dim of the rows.

    Raises:
        StepError: If every device would compute the same.
    """
    sharding = _jax.sharding_of(state.step)
    leaves = jax.tree.leaves(batch)
    is_traced = any(isinstance(leaf, Tracer) for leaf in leaves)
    if is_traced or not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return
    mesh: Any = sharding.mesh
    if not any(map(_is_sharded, [*leaves, *jax.tree.leaves(state)])):
        shards = math.prod(mesh.shape[axis] for axis in batch_axes(mesh))
        rows = next((leaf.shape[dim] for leaf in leaves if np.ndim(leaf) > dim), 0)
        is_odd = shards > 1 and rows % shards
        if is_odd or re.search(r'\{"\w|devices=\[', text()):
            return
        msg = (
            f"all {mesh.size} devices of Mesh({mesh_text(mesh)}) would compute the "
            "same: no array of the batch, and none of the state, is sharded over an "
            f"axis. Shard the rows: ml.distribute_dataset(source, mesh) does over axes "
            f"called {', '.join(map(repr, BATCH_AXES))}, or ml.relayout(batch, "
            f"mesh.layout({mesh.axis_names[0]!r}, ...)) over any. Or shard the state, "
            "with a LayoutMap's rules; or make a mesh of one device."
        )
        raise StepError(msg)
    axes = [axis for axis in BATCH_AXES if mesh.shape.get(axis, 1) > 1]
    if axes and not row_axes(batch, dim):
        _log.warning(
            "the batch is sharded over no axis, so that all %d devices compute all of "
            "it. Place it with ml.relayout(batch, mesh.layout(%r, ...)), or take "
            "ml.distribute_dataset.",
            mesh.size,
            axes[0],
        )


def _is_sharded(leaf: Leaf) -> bool:
    sharding = _jax.sharding_of(leaf)
    return sharding is not None and not sharding.is_fully_replicated


# Checks.


@contextlib.contextmanager
def noted_call(name: str, state: TrainState) -> Iterator[None]:
    """Adds the number of the step to an exception of the user's own functions.

    Args:
        name: The step, as `"eval_step"`.
        state: What it is called with.
    """
    try:
        yield
    except (MeshLayoutError, Warning):  # sentences that need no note
        raise
    except Exception as error:
        step: Any = getattr(state, "step", None)
        text = "a step whose number is not known"
        is_known = isinstance(step, jax.Array) and not isinstance(step, Tracer)
        if is_known and not step.is_deleted():
            text = f"step {int(step)}"
        error.add_note(f"in {name}, at {text}")
        raise


def check_batch(batch: Batch, key: str | int) -> None:
    """Raises StepError if the weights of a batch are elsewhere, or not weights.

    Args:
        batch: A batch.
        key: Where the step looks for weights.
    """
    check_weights_key(batch, key)
    weights = get_weights(batch, key)
    # On devices, reading them would mean waiting. There, the loss becomes NaN instead.
    on_host = isinstance(weights, np.ndarray) and weights.dtype.kind in "fiu"
    if on_host and not ((weights >= 0) & np.isfinite(weights)).all():
        msg = (
            f"the weights of a batch must be finite and not negative; {key!r} has "
            f"values from {weights.min()} to {weights.max()}."
        )
        raise StepError(msg)


def check_state(name: str, state: TrainState) -> None:
    """Raises StepError unless this is a train state.

    Args:
        name: The step, as `"eval_step"`.
        state: What it was called with.
    """
    if type(state) is not TrainState:
        article = "an" if name[0] in "aeiou" else "a"
        words = name.replace("_", " ")
        msg = f"{article} {words} takes a TrainState, and got {_checks.shown(state)}."
        raise StepError(msg)
