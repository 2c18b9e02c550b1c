"""A function per replica, compiled as one program for all of them.

The function is traced under `jax.shard_map`, with the NNX variables that it uses bound
to this replica's values. A first trace tells which variables change, whether every
replica computes the same new values, and whether gradients still have to be added up;
the program is then compiled by `compile_step`, with the variables that change as its
state. JAX itself could track what differs between replicas, in the types of values; but
then it refuses scans whose carry starts as a constant, as in every recurrent layer.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from meshlayout import _checks, _jax
from meshlayout._annotations import PyTree
from meshlayout.collectives import ReduceOp, ReplicaContext, array_of, entered
from meshlayout.distribute.arguments import Arguments, is_leaf
from meshlayout.distribute.bindings import Bindings
from meshlayout.distribute.gradients import GradientSums
from meshlayout.distribute.host_step import HostStep, Transfers
from meshlayout.distribute.host_variables import (
    find_hosted,
    hosted_specs,
    without_host,
)
from meshlayout.distribute.nnx_graph import belongs_here
from meshlayout.distribute.padded_statistics import padding_left_out
from meshlayout.distribute.padding_check import check_padding
from meshlayout.distribute.sameness import same_values
from meshlayout.distribute.values import (
    REPLICA_AXIS,
    PerReplica,
    is_per_replica,
    map_per_replica,
)
from meshlayout.distribute.variables import Aggregation, Variables
from meshlayout.errors import StrategyError
from meshlayout.hlo import Communication
from meshlayout.step import StepMemory, compile_step


if TYPE_CHECKING:
    from meshlayout.distribute.strategy import Strategy


def _is_abstract(value: PyTree) -> bool:
    leaves = jax.tree.leaves(value)
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


@dataclasses.dataclass
class _Trace:
    """What a trace of a replica's function found out.

    Attributes:
        changed: The indices of the variables that it changed.
        treedef: The structure of what it returned.
        mask_was_read: Whether it asked which rows are real.
        with_old: Whether the old values of variables follow the new ones.
    """

    changed: list[int] = dataclasses.field(default_factory=list)
    treedef: Any = None
    mask_was_read: bool = False
    with_old: bool = False


class ReplicaProgram:
    """A function, compiled for the replicas of a strategy and one signature.

    Args:
        strategy: The strategy.
        fn: The function.
        found: What it uses besides its arguments.
        variables: The NNX variables that it may use.
        arguments: Its arguments.

    Attributes:
        step: The compiled step of `inputs`.
        variables: The NNX variables that it may use.
        hosted: Those in host memory, by index among the leaves of all.
        transfers: What of these it moves to the devices; known once it was traced.

    Raises:
        StrategyError: See `Strategy.run`.
    """

    def __init__(
        self,
        strategy: "Strategy",
        fn: Callable[..., PyTree],
        found: Bindings,
        variables: Variables,
        arguments: Arguments,
    ) -> None:
        self._strategy = strategy
        self._fn = fn
        self._found = found
        self.variables = variables
        self._axis = REPLICA_AXIS if strategy.num_replicas_in_sync > 1 else None
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self._sums = GradientSums()
        self._changed: list[int] = []
        # Variables that functions under nnx.jit return as they were.
        self._passed_on: set[int] = set()
        # How the new values of variables that differ become one.
        self._aggregations: dict[int, Aggregation] = {}
        with (
            jax.ensure_compile_time_eval()
        ):  # a constant of the trace under way, if any
            variables.set(strategy._place_all(variables))
        self.hosted = find_hosted(variables.get())
        self.transfers = Transfers()
        trace = self._examine(arguments)
        self._treedef = trace.treedef
        self._is_abstract = any(map(_is_abstract, variables.get()))
        # Results with one row for each row of a padded batch, by index.
        self._aligned: list[int] = []
        # Whether padding counts in its results; None if that is not known yet.
        self._counts_padding = None if arguments.mask is not None else False
        if arguments.mask is not None:
            self._aligned = self._find_aligned(arguments)
            self._check_padding(trace)

        whole = arguments.without_arrays()  # which would live as long as the program

        def step(state: Any, rest: Any, leaves: Any) -> Any:
            return self._traced_step(whole, state, rest, leaves)

        step.__name__ = self._name
        self.step = compile_step(step, on_recompile="ignore")

    def is_current(self) -> bool:
        """Returns whether the objects still have the attributes that were traced."""
        return self.variables.is_current()

    def __call__(self, arguments: Arguments) -> PyTree:
        """Runs the program, and sets the variables that changed."""
        if self._is_abstract:
            self._refuse_abstract()
        self._check_trace()
        values = self.variables.get_for_reuse(self._changed)
        state, rest, leaves = self._inputs(values, arguments)
        if self._counts_padding is None and not _jax.is_tracing():
            check_padding(
                self._name,
                lambda leaves: self.step(_copied(state), rest, leaves),
                leaves,
                self._aligned,
            )
            self._counts_padding = False
        new, leaves = self.step(state, rest, leaves)
        for index in self._changed:  # not in the dict's order: JAX sorts keys
            values[index] = new[self.variables.paths[index]]
        self.variables.set(values)
        for index in self._aligned:
            leaves[index] = self._with_mask(leaves[index], arguments.mask)
        return self._treedef.unflatten(leaves)

    def _check_trace(self) -> None:
        """Refuses to change variables from outside of the trace under way, if any."""
        if not _jax.is_tracing():
            return
        for index in self._changed:
            if not belongs_here(self.variables.variables[index]):
                msg = (
                    f"{self._name} changes the variable {self.variables.paths[index]} "
                    "from outside of the function that is being compiled. run compiles "
                    "by itself: call it without jit, or pass the objects through "
                    "nnx.jit as arguments."
                )
                raise StrategyError(msg)

    def _refuse_abstract(self) -> None:
        values = zip(self.variables.paths, self.variables.get(), strict=True)
        path = next(path for path, value in values if _is_abstract(value))
        msg = (
            f"run: the variable {path} has a shape and no values, as nnx.eval_shape "
            "makes it. That is enough to look at a program, not to run it: create the "
            "object in the strategy's scope."
        )
        raise StrategyError(msg)

    def communication(self, arguments: Arguments) -> Communication:
        """Returns what the program sends between devices."""
        return self.step.communication(*self._inputs(self.variables.get(), arguments))

    def memory(self, arguments: Arguments) -> StepMemory:
        """Returns the bytes that the program takes on each device."""
        return self.step.memory(*self._inputs(self.variables.get(), arguments))

    def _with_mask(self, leaf: Any, mask: jax.Array | None) -> PerReplica:
        array = leaf.array if isinstance(leaf, PerReplica) else leaf
        count = self._strategy.num_replicas_in_sync
        return PerReplica(array, mask, num_replicas=count)

    def _inputs(self, values: list[Any], arguments: Arguments) -> tuple[Any, ...]:
        """Returns what the compiled step takes: state, other variables, arguments."""
        paths = self.variables.paths
        state = {paths[index]: values[index] for index in self._changed}
        changed = set(self._changed)
        rest = [value for i, value in enumerate(values) if i not in changed]
        return state, rest, arguments.leaves

    def _traced_step(
        self, arguments: Arguments, state: Any, rest: Any, leaves: Any
    ) -> tuple[Any, Any]:
        remaining = iter(rest)
        paths = self.variables.paths
        values = [state[path] if path in state else next(remaining) for path in paths]
        specs = hosted_specs(_specs(values), self.hosted)
        trace = _Trace()
        outputs = ([specs[index] for index in self._changed], PartitionSpec(self._axis))
        on_replicas = self._on_replicas(trace, arguments, outputs, specs)
        new, out = on_replicas(values, leaves)
        if trace.changed != self._changed:
            msg = (
                f"{self._name} changed other variables when it was traced again: it "
                "depends on something that changes in Python. Pass that as an argument."
            )
            raise StrategyError(msg)
        changed = [paths[index] for index in self._changed]
        return dict(zip(changed, new, strict=True)), out

    def _on_replicas(
        self,
        trace: _Trace,
        arguments: Arguments,
        outputs: Any,
        specs: list[Any] | None = None,
    ) -> Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]:
        """Returns a function of all values and leaves that runs on all replicas.

        Args:
            trace: What is found out while it is traced.
            arguments: The arguments.
            outputs: The specs of the results.
            specs: The specs of the values, if they are where they are stored; None for
                whole values on the devices.
        """

        def replica(
            values: list[Any], leaves: list[Any]
        ) -> tuple[list[Any], list[Any]]:
            replica = functools.partial(self._replica, trace, arguments)
            if specs is None or not self.hosted:
                return replica(values, leaves)
            step = HostStep(replica, self.hosted, lambda: trace.changed)
            self.transfers = step.transfers
            return step(values, leaves)

        def on_replicas(
            values: list[Any], leaves: list[Any]
        ) -> tuple[list[Any], list[Any]]:
            # Functions that are jitted inside are traced anew: what they ask of the
            # context belongs to this trace.
            with _jax.trace_phase(id(trace)):
                if self._axis is None:
                    return replica(values, leaves)
                return jax.shard_map(
                    replica,
                    mesh=self._strategy.mesh.jax_mesh,
                    in_specs=(specs or _specs(values), _specs(leaves)),
                    out_specs=outputs,
                    check_vma=False,
                )(values, leaves)

        return on_replicas

    def _replica(
        self, trace: _Trace, arguments: Arguments, values: list[Any], leaves: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Runs the function on one replica: returns new values, and results."""
        strategy = self._strategy
        masks = [leaf.mask for leaf in leaves if is_per_replica(leaf)]
        mask = next((mask for mask in masks if mask is not None), None)
        context = ReplicaContext(
            strategy, self._axis, strategy.num_replicas_in_sync, mask
        )
        own = [
            self._own_value(variable, value, context)
            for variable, value in zip(self.variables.variables, values, strict=True)
        ]
        with (
            entered(context),
            self._sums.traced(),
            self._found.watch(),
            self.variables.bound(own) as bound,
            padding_left_out(),
        ):
            result = arguments.call(
                self._fn, [map_per_replica(_own, x) for x in leaves]
            )
        trace.mask_was_read = context.mask_was_read
        changed = {i for i, is_changed in enumerate(bound.changed) if is_changed}
        trace.changed = sorted(changed - self._passed_on)
        with entered(context):
            new = [
                self._combined(index, own[index], bound.new_values[index], context)
                for index in trace.changed
            ]
        if trace.with_old:
            new += [own[index] for index in trace.changed]
        out, trace.treedef = jax.tree.flatten(result, is_leaf=_is_refused)
        return new, [self._result(leaf) for leaf in out]

    def _own_value(self, variable: object, value: Any, context: ReplicaContext) -> Any:
        """Returns what a replica sees of a variable."""

        def own(leaf: Any) -> Any:
            is_typed = _jax.is_extended(jax.typeof(leaf).dtype)
            is_key = is_typed or isinstance(variable, nnx.RngKey)
            if self._axis is None or not is_key:
                return leaf
            # Otherwise all replicas would drop the same features. The layers of a scan
            # have an array of keys.
            fold_in = jax.random.fold_in
            for _ in range(leaf.ndim if is_typed else leaf.ndim - 1):
                fold_in = jax.vmap(fold_in, in_axes=(0, None))
            return fold_in(leaf, context.replica_id_in_sync_group)

        return jax.tree.map(own, map_per_replica(_own, value))

    def _combined(self, index: int, old: Any, new: Any, context: ReplicaContext) -> Any:
        """Returns the new value of a variable for all replicas."""
        kind = self._aggregations.get(index)
        if kind is None:
            return new
        path = self.variables.paths[index]

        def combined(before: Any, after: Any) -> Any:
            after = jnp.asarray(after)
            if kind == "per_replica":
                return _whole(after, context.num_replicas_in_sync)
            if kind == "mean":
                return context.mean_of_real(after).astype(after.dtype)
            if kind == "first":
                is_first = context.replica_id_in_sync_group == 0
                chosen = jnp.where(is_first, after, jnp.zeros_like(after))
                return context.combine(ReduceOp.SUM, chosen).astype(after.dtype)
            if after.dtype == jnp.bool_:
                msg = f"{path} is a variable of booleans, which cannot be summed."
                raise StrategyError(msg)
            change = context.combine(ReduceOp.SUM, after - before)
            return before + change.astype(after.dtype)

        return jax.tree.map(combined, old, new)

    def _result(self, leaf: object) -> jax.Array | PerReplica:
        if _is_refused(leaf):
            msg = (
                f"{self._name} returned {_checks.type_text(leaf)}; a replica's "
                "function returns arrays. What it sets in NNX objects is kept anyway."
            )
            raise StrategyError(msg)
        x = array_of(leaf)
        if x is None:
            msg = f"{self._name} returned {_checks.shown(leaf)}, which is not an array."
            raise StrategyError(msg)
        x = _jax.with_weak_type(x, weak_type=False)
        if self._axis is None:
            return x  # of one replica, a plain array
        return _whole(x, self._strategy.num_replicas_in_sync)

    # What is found out before it is compiled.

    def _examine(self, arguments: Arguments) -> _Trace:
        """Traces the function once, and plans how its results are combined.

        Raises:
            StrategyError: If a variable would differ between replicas.
        """
        values = without_host(self.variables.get())

        def traced(trace: _Trace) -> Any:
            on_replicas = self._on_replicas(trace, arguments, PartitionSpec())
            return jax.make_jaxpr(on_replicas)(values, arguments.leaves)

        trace = _Trace(with_old=True)
        closed = traced(trace)
        self._passed_on = self._find_passed_on(closed, trace, values)
        if self._passed_on:
            trace = _Trace()
            closed = traced(trace)
        self._changed = trace.changed
        if self._axis is None:
            return trace
        inputs = jax.tree.leaves(
            map_per_replica(
                lambda leaf: jax.tree.map(lambda _: not is_per_replica(leaf), leaf),
                (values, arguments.leaves),
            )
        )
        analyze = functools.partial(same_values, closed, self._axis, inputs)
        same = analyze()
        self._sums.read(same, analyze)
        if same.unmatched:
            msg = (
                f"{self._name} combines values of all replicas ({same.unmatched[0]}) "
                "where only some of them may come, as in a branch of jax.lax.cond "
                "whose condition differs: these would wait for the others for ever. "
                "Combine them outside, or make the condition the same on all replicas."
            )
            raise StrategyError(msg)
        self._plan_aggregations(trace, same.outputs, values)
        return trace

    def _find_passed_on(
        self, closed: Any, trace: _Trace, values: list[Any]
    ) -> set[int]:
        """Returns the indices of variables whose new values are the old ones."""
        counts = [len(jax.tree.leaves(values[index])) for index in trace.changed]
        outputs = iter(_jax.sources(closed.jaxpr))
        new = [list(itertools.islice(outputs, count)) for count in counts]
        old = [list(itertools.islice(outputs, count)) for count in counts]
        triples = zip(trace.changed, new, old, strict=True)
        return {
            index
            for index, after, before in triples
            if all(map(operator.is_, after, before))
        }

    def _plan_aggregations(
        self, trace: _Trace, same: list[bool], values: list[Any]
    ) -> None:
        paths = self.variables.paths
        outputs = iter(same)
        differing = []
        for index in trace.changed:
            count = len(jax.tree.leaves(values[index]))
            is_same = all(list(itertools.islice(outputs, count)))
            kind = self.variables.aggregations[index]
            if kind in ("sum", "per_replica") or (kind and not is_same):
                self._aggregations[index] = kind
            elif not is_same:
                differing.append(paths[index])
        if differing:
            listed = ", ".join(differing[:3])
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            msg = (
                f"{self._name} would leave different values of {listed}{more} on the "
                "replicas: the new values are computed from what differs between them. "
                "Combine that first, as get_replica_context().all_reduce('MEAN', x) "
                "does, or say how the variable's values become one: "
                "nnx.Variable(x, aggregation='mean'), or 'sum', 'first', 'per_replica'."
            )
            raise StrategyError(msg)

    def _find_aligned(self, arguments: Arguments) -> list[int]:
        """Returns the results that have one row for each row of the batch, by index.

        Those are the ones that get longer if the batch does.
        """

        def shapes(leaves: list[Any]) -> list[tuple[int, ...]]:
            on_replicas = self._on_replicas(_Trace(), arguments, PartitionSpec())
            values = without_host(self.variables.get())
            _, out = jax.eval_shape(on_replicas, values, leaves)
            return [x.array.shape if is_per_replica(x) else x.shape for x in out]

        now = shapes(arguments.leaves)
        try:
            later = shapes(arguments.with_twice_the_rows())
        except Exception:  # a function for this number of rows alone
            rows = arguments.rows
            return [i for i, shape in enumerate(now) if shape[:1] == (rows,)]
        pairs = enumerate(zip(now, later, strict=True))
        return [i for i, (a, b) in pairs if a[:1] != b[:1]]

    def _check_padding(self, trace: _Trace) -> None:
        if trace.mask_was_read:
            return
        num_leaves = trace.treedef.num_leaves
        changes_statistics_alone = all(map(self._is_statistic, trace.changed))
        if changes_statistics_alone and len(self._aligned) == num_leaves:
            return
        msg = (
            f"{self._name} got a short batch, which is padded to the shape of the "
            "others, and did not ask which rows are real: padding would count. Use "
            "losses.compute_average_loss, which asks; or multiply by "
            "get_replica_context().example_mask and divide by its num_examples; or "
            "return one value per row and combine these with reduce(..., axis=0); or "
            "leave such batches out with distribute_dataset(..., remainder='drop')."
        )
        raise StrategyError(msg)

    def _is_statistic(self, index: int) -> bool:
        """Returns whether a variable is one that `padding_left_out` looks after."""
        metadata = self.variables.variables[index].get_metadata()
        is_combined = self.variables.aggregations[index] is not None
        return is_combined and "aggregation" not in metadata


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state that may be used up, in the same memory."""
    return jax.tree.map(
        lambda x: jax.device_put(x, _jax.sharding_of(x), may_alias=False), state
    )


def _is_refused(result: object) -> bool:
    """Returns whether this is no result; a Variable, as in gradients, is its value."""
    return is_leaf(result) and not isinstance(result, nnx.Variable)


def _specs(tree: PyTree) -> PyTree:
    """Returns how arguments are divided among the replicas."""
    rows, whole = PartitionSpec(REPLICA_AXIS), PartitionSpec()
    return map_per_replica(lambda leaf: rows if is_per_replica(leaf) else whole, tree)


def _own(leaf: Any) -> Any:
    """Returns a replica's own value, inside of shard_map."""
    if not isinstance(leaf, PerReplica):
        return leaf
    return leaf.array[0] if leaf.is_scalar else leaf.array


def _whole(x: jax.Array, num_replicas: int) -> PerReplica:
    """Returns a replica's own value as a part of the values of all, in shard_map."""
    is_scalar = x.ndim == 0
    array = x[None] if is_scalar else x
    return PerReplica(array, num_replicas=num_replicas, is_scalar=is_scalar)
