"""The gradients of one global batch, in one program over it.

With microbatches the program is a plain scan whose carry is `grads + grad(loss)(...)`.
Under Auto axes that means the same on every mesh, whatever the loss function does with
the rows: the compiler is the partitioner. It would add up the devices' gradients in
every microbatch, but XLA's compilers for TPU and GPU recognize a carry that is only
added to (while-loop-all-reduce-code-motion) and move the all-reduce out of the loop. So
nothing may read the carry, or the sum of a microbatch's losses, inside of the loop:
losses leave it one per example, and are added up behind it. Running replicas by hand in
shard_map was tried: losses in which examples meet then depend on the mesh.
`test_tpu_programs` counts the all-reduces.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from meshlayout import _jax, _paths, _render
from meshlayout._annotations import Batch, PyTree
from meshlayout._batches import map_batch, num_examples, without_nan_padding
from meshlayout.errors import StepError
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.step.objective import Loss, LossShare
from meshlayout.step.placement import StepMesh


@dataclass(frozen=True)
class Gradients:
    """The gradients of one global batch, and what else was computed with them.

    Attributes:
        grads: The leaves of the trained parameters.
        parts: The objective's parts by name, scalars; their sum is the loss.
        model_state: The model's other arrays, after.
        metrics: The metrics, with this batch added.
    """

    grads: list[jax.Array]
    parts: dict[str, jax.Array]
    model_state: PyTree
    metrics: Metrics


class Trainable:
    """Which parameters a step trains.

    Args:
        params: All parameters.
        matches: Returns whether the parameter of a path is trained.
    """

    def __init__(self, params: PyTree, matches: Callable[[str], bool]) -> None:
        leaves = _paths.flatten(params).leaves
        self._treedef = jax.tree.structure(params)
        self.mask = [matches(leaf.path) for leaf in leaves]
        self.paths = [leaf.path for leaf in self.chosen(leaves)]
        for leaf in self.chosen(leaves):
            if not _is_float(leaf.value):
                text = _render.array_text(leaf.value.dtype, leaf.value.shape)
                msg = (
                    f"the parameter {leaf.path} {text} cannot be trained: there is no "
                    "gradient for integers. Make it another kind of variable than "
                    "nnx.Param, or leave it out with trainable=."
                )
                raise StepError(msg)

    def chosen(self, leaves: Iterable[Any]) -> list[Any]:
        """Returns the trained ones of all leaves."""
        return [x for x, is_in in zip(leaves, self.mask, strict=True) if is_in]

    def filled(self, chosen: Iterable[Any], others: PyTree) -> PyTree:
        """Returns a tree of trained leaves, with the others from `others`."""
        new = iter(chosen)
        pairs = zip(jax.tree.leaves(others), self.mask, strict=True)
        return self._treedef.unflatten(
            [next(new) if is_in else x for x, is_in in pairs]
        )


class Backward:
    """The backward pass of a step.

    Args:
        loss: What is minimized.
        state: The state.
        trainable: With respect to what.
        scale: A factor for the loss, which the gradients keep; None for 1.
    """

    def __init__(
        self,
        loss: Loss,
        state: TrainState,
        trainable: Trainable,
        scale: jax.Array | None,
    ) -> None:
        self._loss, self._state, self._trainable = loss, state, trainable
        self._scale = scale
        self._chosen = trainable.chosen(jax.tree.leaves(state.params))

    def whole_batch(self, batch: Batch, key: jax.Array, metrics: Metrics) -> Gradients:
        """Returns the gradients of a batch that goes through the model at once.

        Args:
            batch: The global batch.
            key: For this step's random numbers.
            metrics: The metrics so far.
        """
        share, factor = self._loss.provisional_share(batch)
        batch = without_nan_padding(batch, share.weights)
        before = self._state.model_state
        grads, parts, after, metrics = self._part(share, batch, key, before, metrics)
        if share.weights is not None:  # of nothing but padding nothing is learned
            after = select((share.weights != 0).any(), after, before)
        return self._finished(grads, parts, factor, after, metrics)

    def microbatches(
        self,
        batch: Batch,
        key: jax.Array,
        metrics: Metrics,
        count: int,
        mesh: StepMesh,
        shardings: list[tuple[NamedSharding, NamedSharding]] | None,
    ) -> Gradients:
        """Returns the gradients of a batch that goes through the model in parts.

        Microbatch i holds the rows i, i + count, i + 2 * count, ...: every device cuts
        its own rows, and no row moves.

        Args:
            batch: The global batch.
            key: For this step's random numbers.
            metrics: The metrics so far.
            count: How many microbatches.
            mesh: Which axes shard the rows.
            shardings: Where the update is sharded (zero=1): those of each trained
                parameter, and of its update. Otherwise the compiler would scatter the
                sums in the loop.

        Raises:
            StepError: If the batch does not divide.
        """
        _check_rows(num_examples(batch), count, mesh.num_shards)
        share, factor = self._loss.provisional_share(batch)
        batch = without_nan_padding(batch, share.weights)
        batch = map_batch(lambda leaf: mesh.constrain(_cut(leaf, count), 1), batch)
        leaves, treedef = jax.tree.flatten(batch)
        weights = self._loss.weights_of(batch)
        has_examples = None
        if weights is not None:
            # Here, once: in the loop it would be a round of communication in each.
            has_examples = (weights != 0).any(axis=tuple(range(1, weights.ndim)))

        def add(carry: Any, cuts: tuple[list[Any], Any, Any]) -> tuple[Any, Any]:
            sums, before, metrics_before = carry
            cut, index, has_examples = iter(cuts[0]), *cuts[1:]
            part = treedef.unflatten(
                [next(cut) if jnp.ndim(leaf) else leaf for leaf in leaves]
            )
            weights = self._loss.weights_of(part)
            part_share = LossShare(weights, share.denominator, 1 / count)
            part_key = jax.random.fold_in(key, index)
            grads, parts, after, metrics = self._part(
                part_share, part, part_key, before, metrics_before
            )
            dtypes[:] = [x.dtype for x in jax.tree.leaves(metrics)]
            metrics = jax.tree.map(_as_dtype_of, metrics, metrics_before)
            if has_examples is not None:
                # Padding draws random numbers and is counted, but nothing is learned.
                after = jax.tree.map(
                    lambda a, b: select(has_examples, a, b) if _is_float(b) else a,
                    after,
                    before,
                )
            sums = [a + g.astype(a.dtype) for a, g in zip(sums, grads, strict=True)]
            return (sums, after, metrics), parts

        zeros = [
            # Many small gradients would vanish in a sum in bfloat16.
            jnp.zeros(x.shape, jnp.promote_types(x.dtype, "float32"))
            for x in self._chosen
        ]
        before = self._state.model_state
        cuts = [leaf for leaf in leaves if jnp.ndim(leaf)]
        dtypes: list[Any] = []  # of the metrics after a microbatch

        def scan(metrics: Metrics) -> Any:
            start = zeros, before, metrics
            xs = cuts, jnp.arange(count), has_examples
            return jax.lax.scan(add, start, xs)

        (sums, after, metrics_after), parts = scan(metrics)
        starts, treedef_of_metrics = jax.tree.flatten(metrics)
        if dtypes != [x.dtype for x in starts]:
            # What starts as a whole number goes on as a float; a loop keeps dtypes.
            starts = [x.astype(dtype) for x, dtype in zip(starts, dtypes, strict=True)]
            metrics = treedef_of_metrics.unflatten(starts)
            (sums, after, metrics_after), parts = scan(metrics)
        if has_examples is not None:
            after = select(has_examples.any(), after, before)
        if shardings is not None:
            sums = [
                _jax.constrain(_jax.constrain(x, whole), sharded)
                for x, (whole, sharded) in zip(sums, shardings, strict=True)
            ]
        return self._finished(sums, parts, factor, after, metrics_after)

    def _part(
        self,
        share: LossShare,
        batch: Batch,
        key: jax.Array,
        model_state: PyTree,
        metrics: Metrics,
    ) -> tuple[list[jax.Array], dict[str, jax.Array], PyTree, Metrics]:
        """Returns gradients, parts of the loss, the model's state and the metrics."""

        def objective(chosen: list[Any]) -> tuple[jax.Array, Any]:
            params = self._trainable.filled(chosen, self._state.params)
            parts, outcome = self._loss.forward(
                self._state, params, model_state, batch, key, share
            )
            total = sum(part.sum() for part in parts.values())
            # JAX would return a plain dict in the order of its keys.
            return self._scaled(total), (OrderedDict(parts), outcome)

        grads, (parts, outcome) = jax.grad(objective, has_aux=True)(self._chosen)
        metrics = outcome.added_to(metrics, batch, share.weights)
        return grads, parts, outcome.model_state, metrics

    def _finished(
        self,
        grads: list[jax.Array],
        parts: dict[str, jax.Array],
        factor: jax.Array | None,
        model_state: PyTree,
        metrics: Metrics,
    ) -> Gradients:
        """Corrects what a provisional share gave, and adds the regularizers."""
        parts = {name: part.sum() for name, part in parts.items()}
        if factor is not None:
            grads = [(g * factor).astype(g.dtype) for g in grads]
            parts = {name: part * factor for name, part in parts.items()}
        grads = [g.astype(x.dtype) for g, x in zip(grads, self._chosen, strict=True)]
        if self._loss.regularizers:

            def penalty(chosen: list[Any]) -> tuple[Any, dict[str, jax.Array]]:
                params = self._trainable.filled(chosen, self._state.params)
                penalties = self._loss.penalties(params)
                return self._scaled(sum(penalties.values())), penalties

            slopes, penalties = jax.grad(penalty, has_aux=True)(self._chosen)
            grads = list(map(jnp.add, grads, slopes))
            parts = self._loss.with_penalties(parts, penalties)
        return Gradients(grads, parts, model_state, metrics)

    def _scaled(self, loss: Any) -> Any:
        return loss if self._scale is None else loss * self._scale


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


def _cut(leaf: jax.Array, count: int) -> jax.Array:
    """Splits rows into (microbatches, rows of one), of every shard's rows a share each.

    Not into (count, rows) at once: a microbatch would be the rows of few devices.
    """
    rows = leaf.reshape(leaf.shape[0] // count, count, *leaf.shape[1:])
    return jnp.moveaxis(rows, 1, 0)


def _as_dtype_of(x: jax.Array, like: jax.Array) -> jax.Array:
    return x if x.dtype == like.dtype else x.astype(like.dtype)


def _is_float(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def select(condition: jax.Array, ours: PyTree, theirs: PyTree) -> PyTree:
    """Returns one of two trees; leaves that are the same object stay unchanged."""
    return jax.tree.map(
        lambda a, b: a if a is b else jnp.where(condition, a, b), ours, theirs
    )
