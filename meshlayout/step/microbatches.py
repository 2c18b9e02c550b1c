"""The gradients of a global batch that goes through the model in parts.

A plain scan, whose carry is `grads + grad(loss)(...)`. Under Auto axes that means the
same on every mesh, whatever the loss function does with the rows: the compiler is the
partitioner. It would add up the devices' gradients in every microbatch, but XLA's
compilers for TPU and GPU recognize a carry that is only added to
(while-loop-all-reduce-code-motion) and move the all-reduce out of the loop. So nothing
may read the carry, or the sum of a microbatch's losses, inside the loop: losses leave
it one per example, and are added up after it. Running replicas by hand in shard_map
was tried: losses in which examples meet then depend on the mesh. `test_tpu_programs`
counts the all-reduces.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from meshlayout import _jax
from meshlayout._annotations import Batch
from meshlayout._batches import map_batch, num_examples, without_nan_padding
from meshlayout.errors import StepError
from meshlayout.metrics import Metrics
from meshlayout.step.objective import LossShare
from meshlayout.step.placement import StepMesh
from meshlayout.step.updates import Gradients, is_float, select


if TYPE_CHECKING:
    from meshlayout.step.program import Backward


def microbatch_gradients(
    backward: "Backward",
    batch: Batch,
    key: jax.Array,
    metrics: Metrics,
    count: int,
    mesh: StepMesh,
    shardings: tuple[tuple[NamedSharding, NamedSharding], ...] | None,
) -> Gradients:
    """Returns the gradients of a batch, which are added up over its microbatches.

    Microbatch i holds the rows i, i + count, i + 2 * count, ...: every device cuts its
    own rows, and no row moves.

    Args:
        backward: The backward pass of one microbatch.
        batch: The global batch.
        key: For this step's random numbers.
        metrics: The metrics so far.
        count: How many microbatches.
        mesh: Which axes shard the rows.
        shardings: Where the update is sharded (zero=1): those of each parameter, and
            of its update. Otherwise the compiler would scatter the
            sums in the loop.

    Raises:
        StepError: If the batch does not divide.
    """
    _check_rows(num_examples(batch), count, mesh.num_shards)
    loss = backward.loss
    share, factor = loss.provisional_share(batch)
    batch = without_nan_padding(batch, share.weights)
    batch = map_batch(lambda leaf: mesh.constrain(_split(leaf, count), 1), batch)
    leaves, treedef = jax.tree.flatten(batch)
    weights = loss.weights_of(batch)
    has_examples = None
    if weights is not None:
        # Here, once: in the loop it would be a round of communication in each.
        has_examples = (weights != 0).any(axis=tuple(range(1, weights.ndim)))
    dtypes: list[Any] = []  # of the metrics after a microbatch

    def add(carry: Any, xs: tuple[list[Any], Any, Any]) -> tuple[Any, Any]:
        sums, before, metrics_before = carry
        rows, index, has_examples = iter(xs[0]), *xs[1:]
        part = treedef.unflatten(
            [next(rows) if jnp.ndim(leaf) else leaf for leaf in leaves]
        )
        part_share = LossShare(loss.weights_of(part), share.denominator, 1 / count)
        part_key = jax.random.fold_in(key, index)
        grads, parts, after, metrics = backward.part(
            part_share, part, part_key, before, metrics_before
        )
        dtypes[:] = [x.dtype for x in jax.tree.leaves(metrics)]
        metrics = jax.tree.map(_as_dtype_of, metrics, metrics_before)
        if has_examples is not None:
            # Padding draws random numbers and is counted, but nothing is learned.
            after = jax.tree.map(
                lambda a, b: select(has_examples, a, b) if is_float(b) else a,
                after,
                before,
            )
        sums = jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums, grads)
        return (sums, after, metrics), parts

    # Many small gradients would vanish in a sum in bfloat16.
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, "float32")),
        backward.state.params,
    )
    before = backward.state.model_state
    xs = [leaf for leaf in leaves if jnp.ndim(leaf)], jnp.arange(count), has_examples

    def scan(metrics: Metrics) -> Any:
        return jax.lax.scan(add, (zeros, before, metrics), xs)

    (sums, after, metrics_after), parts = scan(metrics)
    starts, treedef_of_metrics = jax.tree.flatten(metrics)
    if dtypes != [x.dtype for x in starts]:
        # What starts as an integer becomes a float, and a loop keeps dtypes.
        starts = [x.astype(dtype) for x, dtype in zip(starts, dtypes, strict=True)]
        metrics = treedef_of_metrics.unflatten(starts)
        (sums, after, metrics_after), parts = scan(metrics)
    if has_examples is not None:
        after = select(has_examples.any(), after, before)
    if shardings is not None:
        arrays, treedef = jax.tree.flatten(sums)
        arrays = [
            _jax.constrain(_jax.constrain(x, whole), sharded)
            for x, (whole, sharded) in zip(arrays, shardings, strict=True)
        ]
        sums = treedef.unflatten(arrays)
    return backward.finished(sums, parts, factor, after, metrics_after)


def _check_rows(rows: int, count: int, num_shards: int) -> None:
    if rows % (count * num_shards):
        step = count * num_shards
        near = sorted({max(step, rows // step * step), -(-rows // step) * step})
        msg = (
            f"a global batch of {rows} examples does not divide into {count} "
            f"microbatches over {num_shards} shards. Global batch sizes that do: "
            f"{' and '.join(map(str, near))}."
        )
        raise StepError(msg)


def _split(leaf: jax.Array, count: int) -> jax.Array:
    """Splits rows into (microbatches, rows of one), of every shard's rows a share each.

    Not into (count, rows) at once: a microbatch would be the rows of few devices.
    """
    rows = leaf.reshape(leaf.shape[0] // count, count, *leaf.shape[1:])
    return jnp.moveaxis(rows, 1, 0)


def _as_dtype_of(x: jax.Array, like: jax.Array) -> jax.Array:
    return x if x.dtype == like.dtype else x.astype(like.dtype)
