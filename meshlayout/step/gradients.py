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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from meshlayout import _jax, _paths, _render
from meshlayout._annotations import Batch, DType, PyTree
from meshlayout._batches import map_batch, num_examples, without_nan_padding
from meshlayout.errors import StepError
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.step.model_call import Outcome
from meshlayout.step.objective import (
    Loss,
    LossShare,
    example_losses,
    joined,
    parts_of,
    penalties_of,
)
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
        self.paths = [leaf.path for leaf in leaves if matches(leaf.path)]
        for leaf in leaves:
            if matches(leaf.path) and not is_statistic(leaf.value):
                text = _render.array_text(leaf.value.dtype, leaf.value.shape)
                msg = (
                    f"the parameter {leaf.path} {text} cannot be trained: there is no "
                    "gradient for integers. Make it another kind of variable than "
                    "nnx.Param, or leave it out with trainable=."
                )
                raise StepError(msg)

    @property
    def is_all(self) -> bool:
        """Whether all of them are trained."""
        return all(self.mask)

    def chosen(self, tree: PyTree) -> list[Any]:
        """Returns the trained leaves of a tree in the parameters' structure."""
        return [x for x, is_trained in self._pairs(tree) if is_trained]

    def filled(self, chosen: list[Any], rest: PyTree) -> PyTree:
        """Returns a tree of trained leaves, with the others from `rest`."""
        new = iter(chosen)
        return self._treedef.unflatten(
            [next(new) if is_trained else x for x, is_trained in self._pairs(rest)]
        )

    def zeros_elsewhere(self, chosen: list[Any], like: PyTree) -> PyTree:
        """Returns a tree of trained leaves, with zeros for the others."""
        return self.filled(chosen, jax.tree.map(jnp.zeros_like, like))

    def _pairs(self, tree: PyTree) -> list[tuple[Any, bool]]:
        return list(zip(jax.tree.leaves(tree), self.mask, strict=True))


@dataclass(frozen=True)
class Backward:
    """The backward pass of a step.

    Attributes:
        loss: What is minimized.
        state: The state.
        trainable: With respect to what.
        scale: A factor for the loss, which the gradients keep; None for 1.
    """

    loss: Loss
    state: TrainState
    trainable: Trainable
    scale: jax.Array | None

    def whole_batch(self, batch: Batch, key: jax.Array, metrics: Metrics) -> Gradients:
        """Returns the gradients of a batch that goes through the model at once.

        Args:
            batch: The global batch.
            key: For this step's random numbers.
            metrics: The metrics so far.
        """
        share, factor = self.loss.provisional_share(batch)
        batch = without_nan_padding(batch, share.weights)
        before = self.state.model_state
        part = self._part(share, batch, key, before, metrics)
        grads, parts, names, model_state, metrics = part
        if share.weights is not None:  # of nothing but padding nothing is learned
            model_state = select((share.weights != 0).any(), model_state, before)
        parts = {name: parts[name].sum() for name in names}
        grads, parts = _corrected(grads, parts, factor)
        return self._with_penalties(Gradients(grads, parts, model_state, metrics))

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
        rows = num_examples(batch)
        _check_rows(rows, count, mesh.num_shards)
        share, factor = self.loss.provisional_share(batch)
        batch = without_nan_padding(batch, share.weights)
        is_row = [jnp.ndim(leaf) > 0 for leaf in jax.tree.leaves(batch)]
        leaves, treedef = jax.tree.flatten(
            map_batch(lambda leaf: mesh.constrain(_cut(leaf, count), 1), batch)
        )
        names: list[str] = []

        def add(carry: Any, cuts: tuple[list[Any], Any, Any]) -> tuple[Any, Any]:
            sums, model_state, metrics = carry
            cut, index, has_examples = iter(cuts[0]), *cuts[1:]
            part = treedef.unflatten(
                [next(cut) if has_rows else leaf for leaf, has_rows in both]
            )
            weights = self.loss.weights_of(part)
            part_share = LossShare(weights, share.denominator, 1 / count, share.is_mean)
            part_key = jax.random.fold_in(key, index)
            grads, parts, order, after, metrics = self._part(
                part_share, part, part_key, model_state, metrics
            )
            names[:] = order
            if has_examples is not None:
                after = jax.tree.map(
                    lambda a, b: select(has_examples, a, b) if is_statistic(b) else a,
                    after,
                    model_state,
                )
            sums = [a + g.astype(a.dtype) for a, g in zip(sums, grads, strict=True)]
            return (sums, after, metrics), parts

        both = list(zip(leaves, is_row, strict=True))
        chosen = self.trainable.chosen(self.state.params)
        zeros = [jnp.zeros(x.shape, _sum_dtype(x.dtype)) for x in chosen]
        carry = zeros, self.state.model_state, metrics
        cuts = [leaf for leaf, has_rows in both if has_rows]
        # Asked here once: in the loop it would be a round of communication in each.
        has_examples = _has_examples(self.loss.weights_of(treedef.unflatten(leaves)))
        (sums, model_state, metrics), parts = jax.lax.scan(
            add, carry, (cuts, jnp.arange(count), has_examples)
        )
        if has_examples is not None:
            before = self.state.model_state
            model_state = select(has_examples.any(), model_state, before)
        if shardings is not None:
            sums = [
                _jax.constrain(_jax.constrain(x, whole), sharded)
                for x, (whole, sharded) in zip(sums, shardings, strict=True)
            ]
        parts = {name: parts[name].sum() for name in names}
        sums, parts = _corrected(sums, parts, factor)
        grads = [s.astype(x.dtype) for s, x in zip(sums, chosen, strict=True)]
        return self._with_penalties(Gradients(grads, parts, model_state, metrics))

    def _part(
        self,
        share: LossShare,
        batch: Batch,
        key: jax.Array,
        model_state: PyTree,
        metrics: Metrics,
    ) -> tuple[list[jax.Array], dict[str, jax.Array], list[str], PyTree, Metrics]:
        """Returns gradients, parts, the parts' order, the model's state and metrics."""
        names: list[str] = []  # JAX gives dicts back in the order of their keys

        def objective(
            chosen: list[Any],
        ) -> tuple[jax.Array, tuple[Mapping[str, Any], Outcome]]:
            params = self.trainable.filled(chosen, self.state.params)
            outcome = self.loss.forward(
                self.state, params, model_state, batch, key, share.weights
            )
            parts = parts_of(outcome, share)
            names.extend(parts)
            return self._scaled(sum(x.sum() for x in parts.values())), (parts, outcome)

        chosen = self.trainable.chosen(self.state.params)
        grads, (parts, outcome) = jax.grad(objective, has_aux=True)(chosen)
        metrics = updated(metrics, outcome, batch, share.weights)
        return grads, dict(parts), names, outcome.model_state, metrics

    def _with_penalties(self, gradients: Gradients) -> Gradients:
        """Adds the regularizers, which do not depend on the batch."""
        regularizers = self.loss.regularizers
        if not regularizers:
            return gradients

        def penalty(chosen: list[Any]) -> tuple[Any, dict[str, jax.Array]]:
            params = self.trainable.filled(chosen, self.state.params)
            parts = penalties_of(params, regularizers)
            return self._scaled(sum(parts.values())), parts

        chosen = self.trainable.chosen(self.state.params)
        grads, parts = jax.grad(penalty, has_aux=True)(chosen)
        return Gradients(
            jax.tree.map(jnp.add, gradients.grads, grads),
            joined(
                gradients.parts, {one.name: parts[one.name] for one in regularizers}
            ),
            gradients.model_state,
            gradients.metrics,
        )

    def _scaled(self, loss: Any) -> Any:
        return loss if self.scale is None else loss * self.scale


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


def _has_examples(weights: jax.Array | None) -> jax.Array | None:
    """Returns which microbatches hold more than padding; None without weights."""
    if weights is None:
        return None
    return (weights != 0).any(axis=tuple(range(1, weights.ndim)))


def is_statistic(leaf: jax.Array) -> bool:
    """Returns whether an array is learned from rows, as keys and counters are not.

    In a microbatch of padding those go on: the next one draws other numbers.
    """
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _sum_dtype(dtype: DType) -> Any:
    """Returns the dtype to add gradients in: many small ones vanish in bfloat16."""
    return jnp.promote_types(dtype, "float32")


def _corrected(
    grads: list[jax.Array], parts: dict[str, jax.Array], factor: jax.Array | None
) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    """Returns gradients and parts times the factor of a provisional share."""
    if factor is None:
        return grads, parts
    grads = [(g * factor).astype(g.dtype) for g in grads]
    return grads, {name: part * factor for name, part in parts.items()}


def updated(
    metrics: Metrics, outcome: Outcome, batch: Batch, weights: jax.Array | None
) -> Metrics:
    """Returns metrics with a batch added."""
    return metrics.update_from(
        outputs=outcome.outputs,
        batch=batch,
        losses=example_losses(outcome, weights),
        weights=weights,
    )


def select(condition: jax.Array, ours: PyTree, theirs: PyTree) -> PyTree:
    """Returns one of two trees; leaves that are the same object stay as they are."""
    return jax.tree.map(
        lambda a, b: a if a is b else jnp.where(condition, a, b), ours, theirs
    )


def finite_leaves(leaves: list[jax.Array]) -> jax.Array:
    """Returns of each array whether all of its numbers are finite."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves])
