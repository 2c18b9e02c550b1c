"""A global batch in parts that go through the model one after another.

Every replica sums its own gradients over the parts, and the replicas' sums are added
once, at the end; that is what shard_map is for, because a program over the global batch
would add them in every part.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshlayout import _jax, _paths
from meshlayout.errors import StepError
from meshlayout.layout_map import leaving_out
from meshlayout.state import TrainState
from meshlayout.step.batch_norm import Replaying
from meshlayout.step.gradients import (
    Loss,
    Trainable,
)
from meshlayout.step.model_call import Outcome
from meshlayout.step.objective import (
    Share,
    check_rows,
    parts_of,
)
from meshlayout.step.own_draws import OwnDraws, draws_like
from meshlayout.step.replicas import Replicas
from meshlayout.step.weights import map_batch, num_examples, without_nan_padding


_log = logging.getLogger("meshlayout")


@dataclass(frozen=True)
class Facts:
    """What a trace of one part shows.

    Attributes:
        order: How many passes batch statistics take; 0 if there are none.
        moments: Their structure.
        names: What the objective's parts are called.
        draws: How replicas draw their rows of random numbers; None if replicas cannot
            be told apart: not all that comes out has a row per example, say.
    """

    order: int
    moments: Any
    names: tuple[str, ...]
    draws: OwnDraws | None


class Microbatches:
    """One global batch in parts, and what is computed on each.

    Attributes:
        state: The state.
        chosen: The parameters with respect to which there are gradients.
        parts: The batch's leaves, with a leading dim for the parts.
        facts: What the model does with a part.
        is_norm: For each of the model's other arrays, whether it is a running
            statistic of a BatchNorm.

    Args:
        loss: What is minimised.
        state: The state.
        trainable: With respect to what.
        batch: The global batch.
        key: For this step's random numbers.
        num_parts: How many microbatches.
        replicas: How the batch is sharded.
    """

    def __init__(
        self,
        loss: Loss,
        state: TrainState,
        trainable: Trainable,
        batch: Any,
        key: jax.Array,
        num_parts: int,
        replicas: Replicas,
    ) -> None:
        self._loss, self._trainable = loss, trainable
        self.state, self.chosen = state, trainable.chosen(state.params)
        self._key, self._num_parts, self._replicas = key, num_parts, replicas
        self._weights = loss.weights_of(batch)
        batch = without_nan_padding(batch, self._weights)
        self._denominator = loss.denominator_of(batch, self._weights)
        self._rows = num_examples(batch)
        self._check_rows()
        # How one replica draws, and which it is, while its program is traced.
        self._mine: tuple[OwnDraws, Any] | None = None
        self.parts = map_batch(self._cut, batch)
        self.facts = self._look()
        self.is_norm = _norm_state_mask(self.facts.moments, state.model_state)

    def _check_rows(self) -> None:
        rows, parts, replicas = self._rows, self._num_parts, self._replicas.count
        if rows % (parts * replicas):
            step = parts * replicas
            near = sorted({max(step, rows // step * step), -(-rows // step) * step})
            msg = (
                f"a global batch of {rows} examples does not divide into {parts} "
                f"microbatches over {replicas} shards. Global batch sizes that do: "
                f"{' and '.join(map(str, near))}."
            )
            raise StepError(msg)

    def _cut(self, leaf: jax.Array) -> jax.Array:
        """Cuts rows into (parts, rows of a part), every shard's into equal shares.

        A part takes every n-th row, on any number of replicas: no row moves.
        """
        parts = self._num_parts
        cut = leaf.reshape(self._rows // parts, parts, *leaf.shape[1:])
        return self._replicas.constrain(jnp.moveaxis(cut, 1, 0), 1)

    # One part.

    def run(
        self, chosen: list[Any], given: Any, part: Any, at: Any, model_state: Any
    ) -> tuple[jax.Array, tuple[dict[str, Any], Outcome, int]]:
        """Returns the objective's share of one part of the batch, and how it came."""
        loss = self._loss
        params = self._trainable.filled(chosen, self.state.params)
        weights = loss.weights_of(part)
        rows = num_examples(part)
        replaying = Replaying(weights, given)
        outcome = self._call(params, model_state, part, at, replaying)
        check_rows(outcome, rows)
        is_mean = isinstance(loss.denominator, str)
        share = Share(weights, self._denominator, rows / self._rows, is_mean)
        parts = parts_of(outcome, share)
        return sum(parts.values(), jnp.float32(0)), (parts, outcome, replaying.order)

    def _call(
        self, params: Any, model_state: Any, part: Any, at: Any, replaying: Replaying
    ) -> Outcome:
        """Calls the model, with a replica's keys in its program."""
        key, before = self._key, model_state
        if self._mine is not None:
            draws, replica = self._mine
            key, before = draws.keys((key, model_state), replica)
        key = jax.random.fold_in(key, at)
        call = self._loss.call
        outcome = call(self.state, params, before, part, key, (replaying,))
        if self._mine is None:
            return outcome
        after = self._mine[0].common(outcome.model_state, model_state)
        return replace(outcome, model_state=after)

    @contextmanager
    def _as_replica(self, draws: OwnDraws, replica: Any) -> Iterator[None]:
        """Calls the model as one replica does, for as long as the context lasts."""
        self._mine = draws, replica
        try:
            yield
        finally:
            self._mine = None

    def _look(self) -> Facts:
        """Traces one part to find out what it does."""
        part = map_batch(lambda leaf: leaf[0], self.parts)
        seen: dict[str, Any] = {}

        def run(chosen: list[Any], part: Any, model_state: Any) -> Any:
            _, (parts, outcome, order) = self.run(chosen, None, part, 0, model_state)
            same = jax.tree.map(lambda a, b: a is b, outcome.model_state, model_state)
            seen.update(order=order, same=same, names=tuple(parts))
            return outcome

        jaxpr, shapes = jax.make_jaxpr(run, return_shape=True)(
            self.chosen, part, self.state.model_state
        )
        norms = _norm_state_mask(shapes.moments, self.state.model_state)
        given = len(self.chosen), len(jax.tree.leaves(part))
        inputs = range(given[0], sum(given))
        before = (shapes.losses, shapes.outputs, shapes.recorded)
        first = len(jax.tree.leaves(before))  # of what comes out, before the state
        changed = [
            _jax.uses(jaxpr.jaxpr, first + at, inputs)
            for at, (same, norm) in enumerate(
                zip(jax.tree.leaves(seen["same"]), norms, strict=True)
            )
            if not (same or norm)
        ]
        per_row = [shapes.losses, *jax.tree.leaves((shapes.outputs, shapes.recorded))]
        rows = self._rows // self._num_parts
        draws = None
        if not any(changed) and all(x.shape[:1] == (rows,) for x in per_row):
            draws = self._draws(run, part, jaxpr.jaxpr)
        return Facts(seen["order"], shapes.moments, seen["names"], draws)

    def _draws(self, run: Callable[..., Any], part: Any, whole: Any) -> OwnDraws | None:
        """Returns how replicas draw, or None if that cannot be told."""
        drawn = _jax.draws(whole)
        if not drawn or not self._may_split:
            return OwnDraws()
        rows = self._rows // self._num_parts // self._replicas.count
        own = map_batch(lambda leaf: leaf[:rows], part)
        try:
            with self._as_replica(OwnDraws(), 0):
                jaxpr = jax.make_jaxpr(run)(self.chosen, own, self.state.model_state)
        except (TypeError, ValueError) as error:
            # It ran with the step's keys: a model that takes keys apart has no others.
            _log.info("replicas add their gradients in every microbatch: %s", error)
            return None
        return draws_like(drawn, _jax.draws(jaxpr.jaxpr), rows)

    # All parts.

    @property
    def is_split(self) -> bool:
        """Whether replicas are told apart."""
        return self._may_split and self.facts.draws is not None

    @property
    def _may_split(self) -> bool:
        """Whether there are several replicas, and shard_map takes what is around it.

        It takes no values of Explicit axes.
        """
        return self._replicas.count > 1 and not self._replicas.is_explicit

    def each(self, function: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """Scans `function(carry, part, index)` over the parts."""
        xs = (self.parts, jnp.arange(self._num_parts))
        if self._num_parts == 1:
            part = map_batch(lambda leaf: leaf[0], self.parts)
            return function(carry, part, 0)
        arrays, treedef = jax.tree.flatten(xs)
        is_row = [jnp.ndim(a) > 0 for a in arrays]

        def body(carry: Any, rows: list[Any]) -> tuple[Any, None]:
            found = iter(rows)
            leaves = [
                next(found) if row else a for a, row in zip(arrays, is_row, strict=True)
            ]
            part, at = treedef.unflatten(leaves)
            return function(carry, part, at), None

        rows = [a for a, row in zip(arrays, is_row, strict=True) if row]
        return jax.lax.scan(body, carry, rows)[0]

    def over_replicas(
        self, function: Callable[[Any], tuple[Any, Any]], part: Any
    ) -> tuple[Any, Any]:
        """Applies a function to each replica's rows.

        Args:
            function: Returns what differs between replicas, and what does not.
            part: A part of the batch.

        Returns:
            Both; what differs with a leading dim for the replicas.
        """

        def local(part: Any) -> tuple[Any, Any]:
            own, common = function(part)
            return jax.tree.map(lambda x: x[None], own), common

        if not self.is_split:
            return local(part)
        axes = self._replicas.axes
        rows = PartitionSpec(axes)

        def replica(part: Any) -> tuple[Any, Any]:
            with self._as_replica(self.facts.draws or OwnDraws(), lax.axis_index(axes)):
                return local(part)

        specs = jax.tree.map(lambda x: rows if jnp.ndim(x) else PartitionSpec(), part)
        with leaving_out(axes):
            return jax.shard_map(
                replica,
                mesh=self._replicas.mesh,
                in_specs=(specs,),
                out_specs=(rows, PartitionSpec()),
                axis_names=set(axes),
                check_vma=False,
            )(part)

    def carried(self, before: Any, after: Any) -> Any:
        """Returns the model's state for the next part: counts of random draws, say.

        Running statistics wait for the end: they are updated once, as by one batch.
        """
        return _choose(self.is_norm, before, after)


def _norm_state_mask(moments: Any, model_state: Any) -> list[bool]:
    """Tells which of the model's other arrays are running statistics of a BatchNorm."""
    of_norms = {
        "/".join(filter(None, (collection, path, name)))
        for path in moments
        for name in ("mean", "var")
        for collection in ("", "batch_stats")
    }
    return [leaf.path in of_norms for leaf in _paths.flatten(model_state).leaves]


def _choose(mask: list[bool], ours: Any, theirs: Any) -> Any:
    leaves = zip(mask, jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    chosen = [a if is_ours else b for is_ours, a, b in leaves]
    return jax.tree.unflatten(jax.tree.structure(theirs), chosen)
