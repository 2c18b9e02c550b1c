"""The gradient of a global batch that goes through the model in parts.

The parts' losses are divided by the whole batch's denominator, so that their
gradients add up to the whole batch's. Every replica sums its own gradients over the
parts, and the replicas' sums are added once, at the end; that is what shard_map is for,
because a program over the global batch would add them in every part.

Batch statistics are those of the whole batch, too, although no part sees it. Let s be
the statistics of all layers, m(w, s) those that come of normalising by s, and l(w, s)
the loss. A layer's statistics depend only on those of layers before it, so s = m(w, s)
is reached from anywhere in as many passes over the parts as there are layers, and so
is the adjoint equation t = dl/ds + t dm/ds. The gradient is d(l + t m)/dw.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshlayout import _jax, _paths
from meshlayout.errors import StepError
from meshlayout.layout_map import leaving_out
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.step.batch_norm import Moments, Replaying
from meshlayout.step.gradients import (
    Gradients,
    Loss,
    Trainable,
    kept_without_examples,
    scaled,
    updated,
    with_penalties,
)
from meshlayout.step.model_call import Outcome
from meshlayout.step.objective import (
    Share,
    check_rows,
    parts_of,
)
from meshlayout.step.own_draws import OwnDraws, draws_like
from meshlayout.step.weights import map_batch, num_examples, without_nan_padding


_log = logging.getLogger("meshlayout")


@dataclass(frozen=True)
class Replicas:
    """The mesh axes over which a batch's rows are sharded.

    Attributes:
        mesh: The mesh.
        axes: Their names; none where the batch is not sharded.
    """

    mesh: Mesh | None
    axes: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many shards the batch has."""
        return (
            1 if self.mesh is None else math.prod(self.mesh.shape[a] for a in self.axes)
        )

    @property
    def is_explicit(self) -> bool:
        """Whether the mesh has Explicit axes."""
        types = () if self.mesh is None else self.mesh.axis_types
        return jax.sharding.AxisType.Explicit in types

    def constrain(self, x: jax.Array, dim: int) -> jax.Array:
        """Shards a dim over the replicas, and leaves the others to the compiler."""
        if self.mesh is None or not self.axes:
            return x
        others = None if self.is_explicit else PartitionSpec.UNCONSTRAINED
        entries: list[Any] = [others] * x.ndim
        entries[dim] = self.axes
        return _jax.constrain(x, NamedSharding(self.mesh, PartitionSpec(*entries)))


@dataclass(frozen=True)
class _Facts:
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


class _Parts:
    """One global batch in parts, and what is computed on each.

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
        self._loss, self._state, self._trainable = loss, state, trainable
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

    def _run(
        self, chosen: list[Any], given: Any, part: Any, at: Any, model_state: Any
    ) -> tuple[jax.Array, tuple[dict[str, Any], Outcome, int]]:
        """Returns the objective's share of one part of the batch, and how it came."""
        loss = self._loss
        params = self._trainable.filled(chosen, self._state.params)
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
        outcome = call(self._state, params, before, part, key, (replaying,))
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

    def _look(self) -> _Facts:
        """Traces one part to find out what it does."""
        part = map_batch(lambda leaf: leaf[0], self.parts)
        chosen = self._trainable.chosen(self._state.params)
        seen: dict[str, Any] = {}

        def run(chosen: list[Any], part: Any, model_state: Any) -> Any:
            _, (parts, outcome, order) = self._run(chosen, None, part, 0, model_state)
            same = jax.tree.map(lambda a, b: a is b, outcome.model_state, model_state)
            seen.update(order=order, same=same, names=tuple(parts))
            return outcome

        jaxpr, shapes = jax.make_jaxpr(run, return_shape=True)(
            chosen, part, self._state.model_state
        )
        norms = _norm_state_mask(shapes.moments, self._state.model_state)
        given = len(chosen), len(jax.tree.leaves(part))
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
            draws = self._draws(run, chosen, part, jaxpr.jaxpr)
        return _Facts(seen["order"], shapes.moments, seen["names"], draws)

    def _draws(
        self, run: Callable[..., Any], chosen: list[Any], part: Any, whole: Any
    ) -> OwnDraws | None:
        """Returns how replicas draw, or None if that cannot be told."""
        drawn = _jax.draws(whole)
        if not drawn or not self._may_split:
            return OwnDraws()
        rows = self._rows // self._num_parts // self._replicas.count
        own = map_batch(lambda leaf: leaf[:rows], part)
        try:
            with self._as_replica(OwnDraws(), 0):
                jaxpr = jax.make_jaxpr(run)(chosen, own, self._state.model_state)
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

    def moments(self, given: Any) -> Any:
        """Returns the whole batch's moments, normalising by given ones."""
        chosen = self._trainable.chosen(self._state.params)

        def add(carry: Any, part: Any, at: Any) -> Any:
            total, state = carry

            def one(part: Any) -> Any:
                _, (_, outcome, _) = self._run(chosen, given, part, at, state)
                return outcome.moments, outcome.model_state

            found, after = self.over_replicas(one, part)
            return _add(total, _sum_replicas(found)), self.carried(state, after)

        start = _zeros(self.facts.moments), self._state.model_state
        return self.each(add, start)[0]

    def carried(self, before: Any, after: Any) -> Any:
        """Returns the model's state for the next part: counts of random draws, say.

        Running statistics wait for the end: they are updated once, as by one batch.
        """
        return _choose(self.is_norm, before, after)

    def statistics(self) -> Any:
        """Returns the whole batch's moments, normalised by themselves."""
        start = jax.tree.map(
            lambda m: Moments(
                jnp.zeros(m.first.shape),
                jnp.zeros(m.second.shape),
                jnp.ones(m.count.shape),
            ),
            self.facts.moments,
            is_leaf=lambda x: isinstance(x, Moments),
        )
        return jax.lax.fori_loop(
            0, self.facts.order, lambda _, given: self.moments(given), start
        )

    def lagrangian(
        self,
        chosen: list[Any],
        given: Any,
        adjoint: Any,
        part: Any,
        at: Any,
        state: Any,
    ) -> Any:
        """Returns a part's share of the objective and of the statistics' adjoint."""
        value, (parts, outcome, _) = self._run(chosen, given, part, at, state)
        terms = jax.tree.map(lambda a, m: (a * m).sum(), adjoint, outcome.moments)
        return sum(jax.tree.leaves(terms), value), (parts, outcome)

    def adjoint(self, given: Any, scale: Any) -> Any:
        """Returns how the whole objective depends on the statistics."""
        chosen = self._trainable.chosen(self._state.params)

        def once(_: Any, adjoint: Any) -> Any:
            def add(carry: Any, part: Any, at: Any) -> Any:
                total, state = carry

                def one(part: Any) -> Any:
                    def value(given: Any) -> Any:
                        found, (_, outcome) = self.lagrangian(
                            chosen, given, adjoint, part, at, state
                        )
                        return scaled(found, scale), outcome.model_state

                    return jax.grad(value, has_aux=True)(given)

                found, after = self.over_replicas(one, part)
                return _add(total, _sum_replicas(found)), self.carried(state, after)

            start = _zeros(self.facts.moments), self._state.model_state
            return _unscaled(self.each(add, start)[0], scale)

        zeros = _zeros(self.facts.moments)
        return jax.lax.fori_loop(0, self.facts.order, once, zeros)


def accumulated(
    loss: Loss,
    state: TrainState,
    trainable: Trainable,
    batch: Any,
    key: jax.Array,
    metrics: Metrics,
    scale: Any,
    *,
    num_parts: int,
    replicas: Replicas,
    reduce_dtype: Any,
) -> Gradients:
    """Returns the gradients of a batch that goes through the model in parts.

    Args:
        loss: What is minimised.
        state: The state.
        trainable: With respect to what.
        batch: The global batch.
        key: For this step's random numbers.
        metrics: The metrics so far.
        scale: A factor for the loss, which the gradients keep; None for 1.
        num_parts: How many microbatches.
        replicas: How the batch is sharded.
        reduce_dtype: The dtype in which replicas' gradients are added; None for that
            of the parameters.

    Raises:
        StepError: If the batch does not divide.
    """
    cut = _Parts(loss, state, trainable, batch, key, num_parts, replicas)
    chosen = trainable.chosen(state.params)
    given, adjoint = None, {}
    if cut.facts.order:
        given = cut.statistics()
        adjoint = cut.adjoint(given, scale)

    def add(carry: Any, part: Any, at: Any) -> Any:
        grads, parts, model_state, _, metrics = carry

        def one(part: Any) -> Any:
            def value(chosen: list[Any]) -> Any:
                found, aux = cut.lagrangian(
                    chosen, given, adjoint, part, at, model_state
                )
                return scaled(found, scale), aux

            grads, (parts, outcome) = jax.grad(value, has_aux=True)(chosen)
            rows = (outcome.losses, outcome.outputs)
            return (grads, parts, rows), outcome.model_state

        (new, found, rows), after = cut.over_replicas(one, part)
        each, outputs = jax.tree.map(_joined, rows)
        seen = Outcome(each, outputs, {}, None, {})
        carried = cut.carried(model_state, after)
        metrics = updated(metrics, seen, part, loss.weights_of(part))
        return (
            _add(grads, jax.tree.map(lambda g: g.astype("float32"), new)),
            _add(parts, _sum_replicas(found)),
            carried,
            after,
            metrics,
        )

    replicas_of_grads = replicas.count if cut.is_split else 1
    start = (
        [_grad_zeros(x, replicas_of_grads, replicas) for x in chosen],
        {name: jnp.float32(0) for name in cut.facts.names},
        state.model_state,
        state.model_state,
        metrics,
    )
    grads, parts, _, after, metrics = cut.each(add, start)
    parts = {name: parts[name] for name in cut.facts.names}
    grads = [
        g.astype(reduce_dtype or g.dtype).sum(axis=0).astype(x.dtype)
        for g, x in zip(grads, chosen, strict=True)
    ]
    share = loss.share(batch)
    after = kept_without_examples(share, state.model_state, after)
    found = Gradients(grads, parts, after, metrics)
    return with_penalties(found, loss, state, trainable, scale)


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


def _joined(x: jax.Array) -> jax.Array:
    """Undoes the cut over replicas."""
    return x.reshape(-1, *x.shape[2:]) if x.ndim > 1 else x[0]


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def _sum_replicas(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sum(axis=0), tree)


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _unscaled(tree: Any, scale: Any) -> Any:
    return tree if scale is None else jax.tree.map(lambda x: x / scale, tree)


def _grad_zeros(x: jax.Array, count: int, replicas: Replicas) -> jax.Array:
    zeros = jnp.zeros((count, *x.shape), "float32")
    return replicas.constrain(zeros, 0) if count > 1 else zeros
