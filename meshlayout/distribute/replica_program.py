"""A function per replica, compiled as one program for all of them.

The function is traced twice. The first trace is under `jax.vmap` over the replicas,
whose batching rules know of every operation what differs between them: which Variables
would, which gradients still have to be added up, which results are the same everywhere.
The second one is compiled, under `jax.shard_map`, with the Variables that change as the
state of a `compile_step`. (Compiled, `vmap` would gather whole batches; and
`shard_map`'s own types, which know what differs, refuse scans whose carry starts as a
constant, as in every recurrent layer.)
"""

import collections
import itertools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from meshlayout import _checks, _jax
from meshlayout._annotations import Leaf, PyTree
from meshlayout.collectives import ReplicaContext, array_of, entered
from meshlayout.distribute import capture, gradients, sums
from meshlayout.distribute.aggregation import Combination
from meshlayout.distribute.arguments import Arguments, is_leaf
from meshlayout.distribute.forgotten import find_forgotten
from meshlayout.distribute.gradients import MARKED, Decisions, ReplicaTrace
from meshlayout.distribute.padded_statistics import padding_left_out
from meshlayout.distribute.values import REPLICA_AXIS, PerReplica
from meshlayout.distribute.variables import (
    Modes,
    TraceWatch,
    Variable,
    aggregation,
    belongs_here,
    raw_value,
    set_raw_value,
)
from meshlayout.errors import StrategyError


if TYPE_CHECKING:
    from meshlayout.distribute.strategy import Strategy

_phases = itertools.count()


class ReplicaProgram:
    """A function, compiled for the replicas of a strategy and one signature.

    Args:
        strategy: The strategy.
        fn: The function.
        arguments: Its arguments.
        gone: Called when an object that the program is for is gone.

    Raises:
        StrategyError: See `Strategy.run`.
    """

    def __init__(
        self,
        strategy: "Strategy",
        fn: Callable[..., PyTree],
        arguments: Arguments,
        gone: Callable[[], None],
    ) -> None:
        self._strategy, self._count = strategy, strategy.num_replicas_in_sync
        self._axis = REPLICA_AXIS if self._count > 1 else None
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self._fn: Any = fn
        self._arguments: Any = arguments
        self._forgotten: dict[int, str] = {}
        mask = arguments.mask
        self._rows = None if mask is None else mask.shape[0] // self._count
        self.roots = capture.Roots(fn, arguments.objects)
        with self.roots.refuse_appends(self._name):
            nodes = self._examine(arguments)
        self.modes = Modes([x.node for x in nodes.values()], gone)
        self._place()
        self.roots.keep({*map(id, self.variables), *nodes}, gone)

        def step(state: Any, rest: Any, leaves: Any) -> Any:
            return self._traced_step(state, rest, leaves)

        step.__name__ = self._name
        self.step = strategy._compile(step)

    # The first trace.

    def _examine(self, arguments: Arguments) -> dict[int, Any]:
        """Traces the function for what it changes and returns; gives the modules.

        A padded batch is traced with twice its rows, so that the results that have one
        row for each of them are seen in the second trace.
        """
        if self._rows is not None:
            try:
                return self._trace_first(arguments, 2)
            except Exception:  # a text has numbers, and those were others
                pass
        return self._trace_first(arguments, 1)

    def _trace_first(self, arguments: Arguments, factor: int) -> dict[int, Any]:
        self._factor, self._decisions = factor, Decisions()
        nodes: dict[int, Any] = {}

        def examined(leaves: list[Any], mark: Any) -> jax.Array:
            trace = ReplicaTrace(self._decisions, mark, sums.Increments())
            watch, asked, result = self._traced(arguments, leaves, trace, self._enter)
            self._read(watch, result, asked=asked)
            forgotten = find_forgotten(
                self._name, arguments, leaves, result, self._differs
            )
            self._forgotten = forgotten
            nodes.update(watch.nodes)
            return jnp.zeros(())

        leaves = [self._parts(leaf) for leaf in arguments.leaves]
        if self._axis is None:
            jax.eval_shape(lambda leaves: examined(leaves, None), leaves)
            return nodes

        def marked(leaves: list[Any]) -> jax.Array:
            mark = jnp.zeros(1, bool)
            return jax.vmap(lambda mark: examined(leaves, mark), axis_name=MARKED)(mark)

        axes = ([0 if isinstance(x, PerReplica) else None for x in leaves],)
        sizes = {"axis_name": self._axis, "axis_size": self._count}
        try:
            jax.eval_shape(jax.vmap(marked, axes, **sizes), leaves)
        except NotImplementedError as error:
            error.add_note(
                "run: what differs between replicas is read from a trace under "
                "jax.vmap, which has no rule for this operation. Give a callback a "
                "vmap_method, and sum over all replicas instead of groups."
            )
            raise
        return nodes

    def _parts(self, leaf: Leaf) -> Any:
        """Returns the shapes of the replicas' own values, one after another."""
        if not isinstance(leaf, PerReplica):
            return leaf
        factor = 1 if leaf.mask is None else self._factor
        count = () if self._axis is None else (self._count,)

        def part(x: Leaf) -> Any:
            rows = () if leaf.is_scalar else (x.shape[0] // self._count * factor,)
            return jax.ShapeDtypeStruct((*count, *rows, *x.shape[1:]), x.dtype)

        return jax.tree.map(part, leaf)

    def _enter(self, variable: Variable) -> Any:
        """Returns what a replica sees of a Variable, when the first trace meets it."""

        def value(x: Leaf) -> Any:
            if isinstance(x, PerReplica):
                own = x.array.reshape(self._count, *x.shape)
                return (
                    own[0]
                    if self._axis is None
                    else own[jax.lax.axis_index(self._axis)]
                )
            if isinstance(x, jax.ShapeDtypeStruct):
                x = jnp.zeros(x.shape, x.dtype)
            elif _jax.is_ref(x) or (array_of(x) is None and not _jax.is_key(x)):
                msg = (
                    f"{self._path(variable)} is a variable that holds "
                    f"{_checks.type_text(x)}; the state of a compiled program consists "
                    "of arrays. Make it a plain attribute."
                )
                raise StrategyError(msg)
            return jax.lax.optimization_barrier(jnp.asarray(x))

        whole = jax.tree.map(value, raw_value(variable), is_leaf=_is_per_replica)
        own, trace = self._own(variable, whole), gradients.current.get()
        if trace is not None and aggregation(variable) in ("sum", "increments"):
            trace.increments.start(variable, own)
        return own

    def _own(self, variable: Variable, value: Leaf) -> Any:
        """Returns a replica's own keys of a Variable, and other values as they are."""
        value = self._strategy._entered(variable, value)

        def own(x: Leaf) -> Any:
            is_typed = _jax.is_extended(jax.typeof(x).dtype)
            if self._axis is None or not (is_typed or isinstance(variable, nnx.RngKey)):
                return x
            # Otherwise all replicas would drop the same features. The layers of a scan
            # have an array of keys.
            fold_in = jax.random.fold_in
            for _ in range(x.ndim if is_typed else x.ndim - 1):
                fold_in = jax.vmap(fold_in, in_axes=(0, None))
            return fold_in(x, jax.lax.axis_index(self._axis))

        return jax.tree.map(own, value)

    def _read(self, watch: TraceWatch, result: PyTree, *, asked: bool) -> None:
        """Reads a first trace, inside of it."""
        self.variables, self._changed = watch.variables, []
        self._is_own = [aggregation(x) == "per_replica" for x in self.variables]
        differing = []
        rows = zip(
            self.variables, watch.entered, watch.values, self._is_own, strict=True
        )
        for index, (variable, before, after, is_own) in enumerate(rows):
            differs = self._differs(after)
            # nnx.scan hands keys back as new arrays.
            is_key = isinstance(variable, nnx.RngKey) and differs
            if not _is_changed(before, after) or is_key:
                continue
            self._changed.append(index)
            if _kinds(before) != _kinds(after):
                msg = (
                    f"{self._name} sets the variable {self._path(variable)}, which "
                    f"was {_kinds(before)}, to {_kinds(after)}. A program's state "
                    "keeps its shapes and dtypes: convert the value."
                )
                raise StrategyError(msg)
            if differs and not is_own:
                differing.append(self._path(variable))
        if differing:
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            msg = (
                f"{self._name} would leave different values of "
                f"{', '.join(differing[:3])}{more} on the replicas: the new values are "
                "computed from what differs between them. Combine that first, as "
                "get_replica_context().all_reduce('MEAN', x) does, or say how the "
                "variable's values become one: nnx.Variable(x, aggregation='mean'), or "
                "'sum', 'first', 'per_replica'."
            )
            raise StrategyError(msg)
        flat, self._treedef = self._flattened(result)
        self._results = [(x.shape, self._differs(x)) for x in flat]
        if self._rows is not None and not asked:
            self._check_mask()

    def _differs(self, value: Leaf) -> bool:
        axis = self._axis
        if axis is None:
            return False
        return any(_jax.is_mapped(x, axis) for x in jax.tree.leaves(value))

    def _check_mask(self) -> None:
        """Refuses a function that did not ask for the mask and may count padding."""
        assert self._rows is not None
        rows = self._rows * self._factor
        statistics = (nnx.BatchStat, nnx.metrics.MetricState)
        changed = [self.variables[index] for index in self._changed]
        if all(shape[:1] == (rows,) for shape, _ in self._results) and all(
            isinstance(x, statistics) and "aggregation" not in x.get_metadata()
            for x in changed
        ):
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

    def _flattened(self, result: PyTree) -> tuple[list[jax.Array], Any]:
        """Returns what the function returned as arrays, and its structure."""
        out, treedef = jax.tree.flatten(result, is_leaf=_is_refused)
        arrays = [None if _is_refused(leaf) else array_of(leaf) for leaf in out]
        for leaf, x in zip(out, arrays, strict=True):
            if x is None:
                what = f"{_checks.shown(leaf)}, which is not an array."
                if _is_refused(leaf):
                    what = (
                        f"{_checks.type_text(leaf)}; a replica's function returns "
                        "arrays. What it sets in NNX objects is kept anyway."
                    )
                msg = f"{self._name} returned {what}"
                raise StrategyError(msg)
        return [_plain(x) for x in arrays], treedef

    # Both traces.

    def _traced(
        self, arguments: Arguments, leaves: list[Any], trace: ReplicaTrace, enter: Any
    ) -> tuple[TraceWatch, bool, Any]:
        """Runs the function on one replica; tells whether it asked for the mask."""
        masks = [x.mask for x in leaves if isinstance(x, PerReplica)]
        mask = next((x for x in masks if x is not None), None)
        context = ReplicaContext(self._strategy, self._axis, self._count, mask)
        own = [x.array if isinstance(x, PerReplica) else x for x in leaves]
        combination = Combination(context, trace)
        token = gradients.current.set(trace)
        try:
            # Functions that are jitted inside are traced anew: what they ask of the
            # context belongs to this trace.
            with (
                _jax.trace_phase(next(_phases)),
                self._strategy._inside(),
                entered(context),
                gradients.patches,
                sums.patches,
                padding_left_out(),
                TraceWatch(enter, combination) as watch,
            ):
                combination.watch = watch
                result = arguments.call(self._fn, own)
                watch.check_attributes(self._name)
        finally:
            gradients.current.reset(token)
        return watch, context.mask_was_read, result

    # The second trace.

    def _traced_step(self, state: Any, rest: Any, leaves: Any) -> tuple[Any, Any]:
        sources = iter(state), iter(rest)
        values = [next(sources[not is_changed]) for is_changed in self._is_changed]
        if self._axis is None:
            return self._replica(values, leaves)
        rows, whole = PartitionSpec(self._axis), PartitionSpec()
        specs = [rows if is_own else whole for is_own in self._is_own]
        results = [rows if differs else whole for _, differs in self._results]
        return jax.shard_map(
            self._replica,
            mesh=self._strategy.mesh.jax_mesh,
            in_specs=(specs, [rows if _is_per_replica(x) else whole for x in leaves]),
            out_specs=(tuple(specs[i] for i in self._changed), results),
            check_vma=False,
        )(values, leaves)

    def _replica(self, values: list[Any], leaves: list[Any]) -> tuple[Any, Any]:
        self._decisions.replay()
        self._aligned: set[int] = set()
        bound = {id(x): value for x, value in zip(self.variables, values, strict=True)}

        def enter(variable: Variable) -> Any:
            if id(variable) not in bound:
                self._refuse_second()
            value = jax.tree.map(
                _own_part, bound[id(variable)], is_leaf=_is_per_replica
            )
            return self._own(variable, value)

        own = [
            PerReplica(_own_part(x), x.mask, num_replicas=1, is_scalar=x.is_scalar)
            if isinstance(x, PerReplica)
            else x
            for x in leaves
        ]
        trace = ReplicaTrace(self._decisions)
        watch, _, result = self._traced(self._arguments, own, trace, enter)
        new = dict(zip(map(id, watch.variables), watch.values, strict=True))
        plan = {id(self.variables[index]) for index in self._changed}
        pairs = zip(watch.variables, watch.entered, strict=True)
        flat, treedef = self._flattened(result)
        if treedef != self._treedef or any(
            _is_changed(before, new[id(x)])
            and id(x) not in plan
            and not isinstance(x, nnx.RngKey)
            for x, before in pairs
        ):
            self._refuse_second()
        state = []
        for index in self._changed:
            value = new.get(id(self.variables[index]), values[index])
            form = self._whole if self._is_own[index] else _plain
            state.append(jax.tree.map(form, value))
        return tuple(state), [self._result(i, x) for i, x in enumerate(flat)]

    def _refuse_second(self) -> NoReturn:
        msg = (
            f"{self._name} did something else when it was traced again: it depends on "
            "something that changes in Python. Pass that as an argument."
        )
        raise StrategyError(msg)

    def _result(self, index: int, x: jax.Array) -> Any:
        shape, differs = self._results[index]
        if self._rows is not None:
            first = (self._rows * self._factor, *x.shape[1:])
            if differs and x.shape[:1] == (self._rows,) and shape == first:
                self._aligned.add(index)
            elif x.shape != shape:
                msg = (
                    f"{self._name} got a short batch, of which each replica has "
                    f"{self._rows} rows, padding included, and returned an array of "
                    f"shape {x.shape}, which is not one value per row: which of its "
                    "values are padding is unknown. Return one value per row, or "
                    "combine rows with get_replica_context().example_mask, or leave "
                    "such batches out with distribute_dataset(..., remainder='drop')."
                )
                raise StrategyError(msg)
        return self._whole(x) if differs else x

    def _whole(self, x: Leaf) -> Any:
        """Returns a replica's own value as its part of the values of all."""
        x = _plain(x)
        if self._axis is None:
            return x
        is_scalar, rows = x.ndim == 0, x if x.ndim else x[None]
        return PerReplica(rows, num_replicas=self._count, is_scalar=is_scalar)

    # Calls.

    def _place(self) -> None:
        """Places the Variables on the devices of all replicas, and sorts them."""
        self._is_changed = [i in self._changed for i in range(len(self.variables))]
        self._is_rest = [not is_changed for is_changed in self._is_changed]
        self._changed_variables = [self.variables[i] for i in self._changed]
        before = [raw_value(x) for x in self.variables]
        placed = [self._placed(i, value) for i, value in enumerate(before)]
        values = self._unshared(before, placed)
        for variable, value in zip(self.variables, values, strict=True):
            set_raw_value(variable, value)
        self._rest_variables = [*itertools.compress(self.variables, self._is_rest)]
        self._state: Any = tuple(itertools.compress(values, self._is_changed))
        self._rest: Any = tuple(itertools.compress(values, self._is_rest))

    def _unshared(self, before: list[Any], placed: list[Any]) -> list[Any]:
        """Copies arrays that several Variables hold: the program uses up what changes.

        Clones share arrays, and so do Variables that were set to the same one. What was
        `before` counts, too: a placed array may have the memory of the one it is from.
        """
        values = list(placed)
        rest = itertools.compress(zip(before, placed, strict=True), self._is_rest)
        seen = {id(x) for x in jax.tree.leaves(list(rest))}
        for index in self._changed if not _jax.is_tracing() else ():
            ids = {id(x) for x in jax.tree.leaves((before[index], placed[index]))}
            if not seen.isdisjoint(ids):
                values[index] = jax.tree.map(jnp.copy, placed[index])
            seen |= ids
        return values

    def _placed(self, index: int, value: Leaf) -> Any:
        is_own = self._is_own[index]

        def place(x: Leaf) -> Any:
            try:
                return self._strategy._place("", x, is_own=is_own)
            except StrategyError:  # named only now: the search takes time
                path = self._path(self.variables[index])
                return self._strategy._place(path, x, is_own=is_own)

        with jax.ensure_compile_time_eval():
            return jax.tree.map(place, value, is_leaf=_is_per_replica)

    def _path(self, variable: Variable) -> str:
        return capture.Roots(self._fn, self._arguments.objects).path_of(variable)

    def inputs(self, arguments: Arguments) -> tuple[Any, Any, list[Any]]:
        """Returns what the compiled step takes: state, other variables, arguments."""
        state = tuple(map(raw_value, self._changed_variables))
        rest = tuple(map(raw_value, self._rest_variables))
        if not all(map(operator.is_, (*state, *rest), (*self._state, *self._rest))):
            values = [raw_value(x) for x in self.variables]
            old = iter(self._state), iter(self._rest)
            placed = [
                value if value is next(old[is_rest]) else self._placed(i, value)
                for i, (value, is_rest) in enumerate(
                    zip(values, self._is_rest, strict=True)
                )
            ]
            values = self._unshared(values, placed)
            state = tuple(itertools.compress(values, self._is_changed))
            rest = tuple(itertools.compress(values, self._is_rest))
            self._state, self._rest = state, rest
        return state, rest, arguments.leaves

    def held(self, fn: Callable[..., PyTree], arguments: Arguments) -> Any:
        """Returns the compiled step, for a look at the program alone."""
        self._fn, self._arguments = fn, arguments
        return self.step

    def __call__(self, fn: Callable[..., PyTree], arguments: Arguments) -> PyTree:
        """Runs the program, and sets the variables that changed."""
        # A program does not keep its function alive; JAX may have to trace it anew.
        self._fn, self._arguments = fn, arguments
        try:
            inputs = self.inputs(arguments)
            if _jax.is_tracing():
                self._check_trace()
            state, out = self.step(*inputs)
        finally:
            self._fn = self._arguments = None
        self._state = state
        collections.deque(map(set_raw_value, self._changed_variables, state), 0)
        for index in self._aligned:
            value = out[index].array if self._axis is not None else out[index]
            out[index] = PerReplica(value, arguments.mask, num_replicas=self._count)
        for index, path in self._forgotten.items():
            out[index].forgotten = capture.function_key(fn), path
        return self._treedef.unflatten(out)

    def _check_trace(self) -> None:
        """Refuses to change variables from outside of the trace under way, if any."""
        for variable in self._changed_variables:
            if not belongs_here(variable):
                msg = (
                    f"{self._name} changes the variable {self._path(variable)} from "
                    "outside of the function that is being compiled. run compiles by "
                    "itself: call it without jit, or pass the objects through nnx.jit "
                    "as arguments."
                )
                raise StrategyError(msg)


def _is_per_replica(leaf: object) -> bool:
    return isinstance(leaf, PerReplica)


def _is_refused(result: object) -> bool:
    """Returns whether this is no result; a Variable, as in gradients, is its value."""
    return is_leaf(result) and not isinstance(result, nnx.Variable | nnx.State)


def _is_changed(before: Leaf, after: Leaf) -> bool:
    if before is after:
        return False
    old, old_structure = jax.tree.flatten(before)
    new, new_structure = jax.tree.flatten(after)
    return old_structure != new_structure or not all(map(operator.is_, old, new))


def _kinds(value: Leaf) -> str:
    leaves, treedef = jax.tree.flatten(value)
    texts = [f"{jnp.result_type(x)}{list(np.shape(x))}" for x in leaves]
    is_leaf_alone = jax.tree_util.treedef_is_leaf(treedef)
    return texts[0] if is_leaf_alone else str(treedef.unflatten(texts))


def _own_part(x: Leaf) -> Any:
    if not isinstance(x, PerReplica):
        return x
    return x.array[0] if x.is_scalar else x.array


def _plain(x: Leaf) -> jax.Array:
    return _jax.with_weak_type(jnp.asarray(x), weak_type=False)
