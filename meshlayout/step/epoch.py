"""A whole epoch in one dispatch, over a dataset that is on the devices.

A small model takes less time for a step than the host for its dispatch. If the data
fits into device memory, a scan over row numbers removes the host altogether: each turn
gathers its rows, shards them like any batch, and runs the step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout._batches import (
    batch_axes as default_axes,
    map_batch,
    num_examples,
    weights_of,
    with_weights,
)
from meshlayout.errors import StepError
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.step.compiled_step import CompiledStep
from meshlayout.step.multi_step import scan_steps
from meshlayout.step.placement import in_own_mesh, step_mesh_of
from meshlayout.step.program import StepProgram
from meshlayout.step.train_step import TrainStep


class _ScanEpoch:
    """The type of `scan_epoch`: a function, and `lower` for its program."""

    __name__ = "scan_epoch"

    def __call__(
        self,
        train_step: TrainStep,
        state: TrainState,
        data: PyTree,
        *,
        global_batch_size: int,
        shuffle: jax.Array | None = None,
        batch_axes: str | tuple[str, ...] | None = None,
        metrics: Metrics | None = None,
    ) -> tuple[TrainState, Metrics]:
        """Runs a train step over all batches of a dataset, in a loop on the device.

        The batches and the numbers are those of a loop in Python over the same rows
        in the same order. A short last batch is filled up with rows of weight 0. On
        CPUs, XLA's convolutions are several times slower inside a loop on the device
        than outside of it.

        Args:
            train_step: What `make_train_step` made.
            state: The state; it is used up.
            data: A tree of arrays whose first dim is the examples, on the state's
                devices (best replicated: rows are gathered from it). If the last batch
                is short, it needs weights or a place for them: a mapping has one, and a
                tuple after its last array.
            global_batch_size: Examples in a batch.
            shuffle: A PRNG key for the order of this epoch; None keeps the rows in
                order.
            batch_axes: The mesh axes that shard the rows of a batch; by default those
                called batch, data, replica, fsdp, dp, ddp or data_parallel.
            metrics: Metrics to add to; None starts with empty ones.

        Returns:
            The state after the epoch, and the metrics.

        Raises:
            StepError: If the dataset is empty, or its last batch is short and there is
                no place for weights; or an argument is wrong.
            LayoutError: If an axis does not exist.

        Example:
            >>> import optax
            >>> from flax import nnx
            >>> import meshlayout as ml
            >>> layouts = ml.LayoutMap(ml.create_mesh({"batch": 8}), {})
            >>> state = ml.TrainState.create(
            ...     lambda: nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), layouts
            ... )
            >>> def loss_fn(model, batch):
            ...     return jnp.square(model(batch["x"]) - batch["y"])
            >>> step = ml.make_train_step(loss_fn)
            >>> data = {"x": jnp.ones((20, 2)), "y": jnp.zeros((20, 1))}
            >>> state, metrics = scan_epoch(step, state, data, global_batch_size=8)
            >>> int(state.step)
            3
        """
        with in_own_mesh(state):
            call = _epoch_call(
                train_step,
                state,
                data,
                global_batch_size=global_batch_size,
                shuffle=shuffle,
                batch_axes=batch_axes,
                metrics=metrics,
            )
            return train_step._dispatch(*call)

    def lower(
        self, train_step: TrainStep, state: TrainState, *args: Any, **kwargs: Any
    ) -> jax.stages.Lowered:
        """Lowers the epoch for the arguments of a call, as `jax.jit(...).lower` does.

        Args:
            train_step: As for a call.
            state: As for a call; it is not used up.
            *args: As for a call.
            **kwargs: As for a call.
        """
        with in_own_mesh(state):
            call = _epoch_call(train_step, state, *args, **kwargs)
            return train_step._dispatch(*call, is_lowered=True)


scan_epoch = _ScanEpoch()


def _epoch_call(
    train_step: TrainStep,
    state: TrainState,
    data: PyTree,
    *,
    global_batch_size: int,
    shuffle: jax.Array | None = None,
    batch_axes: str | tuple[str, ...] | None = None,
    metrics: Metrics | None = None,
) -> tuple[StepProgram, CompiledStep[..., Any], tuple[Any, ...], Metrics | None]:
    """Returns the arguments of `TrainStep._dispatch` for an epoch."""
    if not isinstance(train_step, TrainStep):
        msg = (
            "scan_epoch takes what make_train_step made, and got a "
            f"{type(train_step).__name__}."
        )
        raise StepError(msg)
    global_batch_size = _checks.count(
        "global_batch_size", global_batch_size, where="scan_epoch", error=StepError
    )
    _check_key(shuffle)
    rows = num_examples(data)
    if rows == 0:
        msg = "scan_epoch was given a dataset of no examples."
        raise StepError(msg)
    if rows % global_batch_size:
        data = _with_weights(data, train_step.weights, rows, global_batch_size)
    jax_mesh = step_mesh_of(state).mesh
    axes: tuple[str, ...] = ()
    if jax_mesh is not None:
        chosen = default_axes(jax_mesh) if batch_axes is None else batch_axes
        axes = (chosen,) if isinstance(chosen, str) else tuple(chosen)
        Layout([axes or None], Mesh(jax_mesh))  # refuses axes that the mesh lacks
    mesh = step_mesh_of(state, axes)
    data = mesh.put(data)

    def batch_at(data: PyTree, order: jax.Array, start: jax.Array | int) -> Batch:
        indices = jax.lax.dynamic_slice_in_dim(order, start, global_batch_size)
        batch = map_batch(lambda leaf: leaf[jnp.maximum(indices, 0)], data)
        if rows % global_batch_size:
            weights = weights_of(batch, train_step.weights)
            is_real = (indices >= 0).reshape(-1, *[1] * (weights.ndim - 1))
            weights = jnp.where(is_real, weights, 0).astype("float32")
            batch = with_weights(batch, train_step.weights, weights)
        return map_batch(lambda leaf: mesh.constrain(leaf, 0), batch)

    def order_of(shuffle: jax.Array | None) -> jax.Array:
        order = jnp.arange(rows)
        if shuffle is not None:
            order = jax.random.permutation(shuffle, order)
        # -1 for the padding of the last batch: any row, with a weight of 0.
        return jnp.pad(order, (0, -rows % global_batch_size), constant_values=-1)

    state = train_step._prepared(state, mesh)
    program = train_step._program_on(mesh, state)

    def train_epoch(
        state: TrainState,
        data: PyTree,
        shuffle: jax.Array | None,
        metrics: tuple[Leaf, ...],
    ) -> tuple[TrainState, tuple[tuple[Leaf, ...], Any]]:
        order = order_of(shuffle)
        starts = jnp.arange(0, order.size, global_batch_size)
        return scan_steps(
            program.train_step,
            *(state, metrics, starts, lambda start: batch_at(data, order, start)),
        )

    compiled = program.compiled((global_batch_size, rows, shuffle is None), train_epoch)
    return program, compiled, (state, data, shuffle), metrics


def _check_key(shuffle: Any) -> None:
    """Raises StepError unless this is a PRNG key or None."""
    if shuffle is None:
        return
    dtype, shape = getattr(shuffle, "dtype", None), jnp.shape(shuffle)
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not (is_key and not shape) and not (dtype == jnp.uint32 and len(shape) == 1):
        msg = (
            "shuffle= takes a PRNG key, a new one for each epoch, as "
            f"jax.random.key(epoch), and got {shuffle!r}."
        )
        raise StepError(msg)


def _with_weights(data: PyTree, key: str | int, rows: int, size: int) -> Any:
    """Returns a dataset with weights, so that its last batch can be padded."""
    if weights_of(data, key) is not None:
        return data
    try:
        return with_weights(data, key, np.ones(rows, np.float32))
    except StepError as error:
        msg = (
            f"{rows} examples in batches of {size} leave a short last batch, and "
            f"{error} Or give a global batch size that divides."
        )
        raise StepError(msg) from None
