"""What train, eval and predict steps share: how they are called, and with what.

A batch from the host is sharded over the batch axes of the state's mesh: every device
would otherwise compute all of its rows, and nothing would say so. Then the function
that is compiled for that mesh is called. The first call on a mesh traces it, for its
empty metrics, and JAX keeps that trace for the call itself.
"""

import copy
import logging
import math
import re
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Self

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _checks, _jax
from meshlayout._annotations import Batch
from meshlayout._batches import BATCH_AXES, batch_axes, check_weights_key, get_weights
from meshlayout.arrays import relayout
from meshlayout.errors import StepError
from meshlayout.layout_map import LayoutMap
from meshlayout.mesh import Mesh
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.step.compiled_step import CompiledStep, OnRecompile
from meshlayout.step.inspection import StepInspection, layout_of, mesh_text


_log = logging.getLogger("meshlayout")
# Loss functions whose weighted batches were told of, by a train or an eval step.
_told: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


class StateStep(StepInspection):
    """A step of a train state and a batch, compiled at its first call.

    A step that measures nothing has no `weights`.
    """

    __name__: str
    _row_dim = 0  # of what a call takes
    # What the last call ran, if the next may go on from there, and empty metrics.
    _last: tuple[CompiledStep[..., Any], Any, Metrics | None] | None = None

    def __init__(
        self,
        function: Callable[..., Any],
        weights: str | int | None,
        layouts: LayoutMap | None,
        on_recompile: OnRecompile,
        plan: Any,  # what the kind of step needs besides
    ) -> None:
        self._function, self.weights, self._plan = function, weights, plan
        self._options = {"layouts": layouts, "on_recompile": on_recompile}
        CompiledStep(function, **self._options)  # checks them
        self._compiled: dict[Hashable, CompiledStep[..., Any]] = {}
        # Metrics are not donated: all calls that begin without any share these.
        self._empty: dict[Hashable, Metrics | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Compiled programs belong to this process; a copy compiles its own.
        return {**vars(self), "_compiled": {}, "_empty": {}, "_last": None}

    def without_layouts(self) -> Self:
        """Returns the same step for states on any mesh, which follows no layout map."""
        step = copy.copy(self)
        step._options = {"layouts": None, "on_recompile": "ignore"}
        return step

    @_checks.user_call
    def trace(
        self, state: TrainState, batch: Batch, metrics: Metrics | None = None
    ) -> jax.stages.Traced:
        """Traces the step for these arguments, as `jax.jit(...).trace` does.

        Arrays may be `jax.ShapeDtypeStruct` with shardings.
        """
        compiled, args, _ = self._call_of(state, batch, metrics)
        return compiled.trace(*args)

    def _run(self, state: TrainState, batch: Batch, metrics: Metrics | None) -> Any:
        compiled, args, empty = self._call_of(state, batch, metrics)
        result = compiled(*args)
        if compiled.last and not (self._row_dim or _jax.is_tracing()):
            self._last = compiled, compiled.last, empty
        return result

    def _call_of(
        self, state: TrainState, batch: Batch, metrics: Metrics | None
    ) -> tuple[CompiledStep[..., Any], tuple[Any, ...], Metrics | None]:
        """Returns what to call, with what, and the empty metrics."""
        check_state(self.__name__, state)
        state, placed = self._placed(state, batch)
        key = self._key(state, placed)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._compile_for(key)
            compiled.executable = self.executable
            first = batch[0] if isinstance(batch, list) and batch else batch
            weights = None if self.weights is None else get_weights(first, self.weights)
            if isinstance(weights, np.ndarray) and self._function not in _told:
                _told.add(self._function)
                _log.warning("examples are weighted by %r of each batch.", self.weights)
        program = key, state.program
        empty = self._empty.get(program)
        if program not in self._empty:
            empty = self._start(compiled, state, placed)
            if not isinstance(state.step, (jax.ShapeDtypeStruct, Tracer)):
                self._empty[program] = empty
        if self.weights is None:
            return compiled, (state, placed), None
        metrics = empty if metrics is None else metrics
        return compiled, (state, placed, metrics), empty

    def _start(
        self, compiled: CompiledStep[..., Any], state: TrainState, batch: Batch
    ) -> Metrics | None:
        """Traces the step on a new mesh, and returns its empty metrics there."""
        args = (state, batch) if self.weights is None else (state, batch, None)
        traced = compiled.trace(*args)
        _check_divided(state, batch, traced, self._row_dim)
        if self.weights is None:
            return None
        out: Any = traced.out_info
        measured = out[1] if isinstance(out, tuple) else out
        sharding: Any = _jax.sharding_of(state.step)
        if isinstance(state.step, jax.ShapeDtypeStruct):
            return jax.tree.map(lambda x: x.update(sharding=sharding), measured)
        empty = measured.empty()
        if sharding is None:  # inside another jit
            return empty
        return jax.tree.map(lambda x: _jax.put(x, sharding), empty)

    def _placed(self, state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
        """Returns the state and the batch as the compiled function takes them."""
        check_batch(batch, self.weights)
        # What a forward pass needs; a step that trains takes all.
        return state.replace(opt_state=(), extra={}), place_batch(state, batch)

    def _key(self, state: TrainState, batch: Batch) -> Hashable:
        """Returns what needs a compiled function of its own."""
        # To measure several models is no recompilation to warn of.
        return _jax.sharding_of(state.step), state.program

    def _compile_for(self, key: Any) -> CompiledStep[..., Any]:
        """Returns a compiled function, which takes None for the metrics, too."""
        raise NotImplementedError


def check_state(where: str, state: object) -> None:
    """Raises StepError, which says how to make one, for what is no TrainState."""
    if type(state) is not TrainState:
        how = "build, optimizer"
        if hasattr(state, "apply_fn"):  # Flax's own
            how = 'lambda: {"params": state.params}, state.tx, module=module'
        elif isinstance(state, tuple):
            how = "lambda: nnx.clone(model), optimizer.tx"
        msg = f"{where} takes a TrainState, got {_checks.shown(state)}. Write"
        raise StepError(f"{msg} ml.TrainState.create({how}), or ml.compile_step(step).")


def check_batch(batch: Batch, key: str | int | None) -> None:
    """Raises StepError if the weights of a batch are elsewhere, or not weights."""
    if key is None:
        return
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


def place_batch(state: TrainState, batch: Batch, dim: int = 0) -> Batch:
    """Shards the rows, in a dim, of a batch from the host over the mesh's batch axes.

    A batch with any array on a mesh is left as its owner has placed it.
    """
    leaves, treedef = jax.tree.flatten(batch)
    if any(isinstance(leaf, Tracer) or layout_of(leaf) for leaf in leaves):
        return batch
    sharding = _jax.sharding_of(state.step)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return batch
    mesh: Any = sharding.mesh
    axes = batch_axes(mesh)
    with_rows = [leaf for leaf in leaves if np.ndim(leaf) > dim]
    if not axes or not with_rows:
        return batch
    shards = math.prod(mesh.shape[axis] for axis in axes)
    for size in (np.shape(leaf)[dim] for leaf in with_rows):
        if size % shards:
            msg = (
                f"the batch has {size} rows, which do not divide into {shards} shards "
                f"over {', '.join(map(repr, axes))} of Mesh({mesh_text(mesh)}): every "
                "device would compute all of them. Pad or drop rows, or take "
                "ml.distribute_dataset(source, mesh), which pads the last batch and "
                "gives the padding weight 0."
            )
            raise StepError(msg)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        sharding = NamedSharding(mesh, PartitionSpec(*[None] * dim, axes))
        placed = [leaf.update(sharding=sharding) for leaf in with_rows]
    else:  # in one call, as processes compare what they place
        placed = relayout(with_rows, Mesh(mesh).layout(*[None] * dim, axes, ...))
    each = iter(placed)
    return treedef.unflatten([next(each) if np.ndim(x) > dim else x for x in leaves])


def row_sharding(batch: Batch, dim: int = 0) -> NamedSharding | None:
    """Returns the sharding of a batch's rows alone, in a dim; None if on no axis."""
    for leaf in jax.tree.leaves(batch):
        sharding = _jax.sharding_of(leaf)
        if isinstance(sharding, NamedSharding) and any(sharding.spec[dim : dim + 1]):
            return NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[dim]))
    return None


def _check_divided(
    state: TrainState, batch: Batch, traced: jax.stages.Traced, dim: int
) -> None:
    """Raises StepError, before the first call on a mesh, if its devices do the same."""
    sharding = _jax.sharding_of(state.step)
    leaves = jax.tree.leaves(batch)
    is_traced = any(isinstance(leaf, Tracer) for leaf in leaves)
    if is_traced or not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return
    mesh: Any = sharding.mesh
    shards = math.prod(mesh.shape[axis] for axis in batch_axes(mesh))
    rows = next((leaf.shape[dim] for leaf in leaves if np.ndim(leaf) > dim), 0)
    shardings = map(_jax.sharding_of, [*leaves, *jax.tree.leaves(state)])
    is_divided = any(x and not x.is_fully_replicated for x in shardings)
    if is_divided or rows % shards:  # or a short last batch that cannot be padded
        if shards > 1 and row_sharding(batch, dim) is None:
            _log.warning(
                "the batch is sharded over no axis, so that all %d devices compute all "
                "of its %d rows. Place it with ml.relayout(batch, mesh.layout(%r, "
                "...)), or take ml.distribute_dataset.",
                *(mesh.size, rows, batch_axes(mesh)[0]),
            )
        return
    # The program's text shows what is sharded inside it alone.
    if re.search(r'\{"\w|devices=\[', traced.lower().as_text()):
        return
    msg = (
        f"all {mesh.size} devices of Mesh({mesh_text(mesh)}) would compute the same: "
        "no array of the batch, and none of the state, is sharded over an axis. Shard "
        "the rows: ml.distribute_dataset(source, mesh) does over axes called "
        f"{', '.join(map(repr, BATCH_AXES))}, or ml.relayout(batch, mesh.layout("
        f"{mesh.axis_names[0]!r}, ...)) over any. Or shard the state, with a "
        "LayoutMap's rules; or make a mesh of one device."
    )
    raise StepError(msg)
