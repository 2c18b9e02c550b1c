"""A function per replica, compiled as one program for all of them.

The function is traced twice. The first trace is under `jax.vmap` over the replicas,
whose batching rules know of every operation what differs between them: which Variables
would, which gradients still have to be added up, which results are the same everywhere.
The second one is compiled, under `jax.shard_map`, with the Variables that change as the
state of a `compile_step`. (Compiled, `vmap` would gather whole batches; and
`shard_map`'s own types, which know what differs, refuse scans whose carry starts as a
constant, as in every recurrent layer.)
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import FrozenDict
from jax.sharding import PartitionSpec

from meshlayout import _checks, _jax
from meshlayout._annotations import PyTree
from meshlayout.collectives import ReplicaContext, array_of, entered
from meshlayout.distribute import captured, gradients, sums
from meshlayout.distribute.aggregation import Combination
from meshlayout.distribute.arguments import Arguments, is_leaf
from meshlayout.distribute.gradients import MARKED, Decisions, ReplicaTrace
from meshlayout.distribute.padded_statistics import padding_left_out
from meshlayout.distribute.values import REPLICA_AXIS, PerReplica
from meshlayout.distribute.variables import (
    Modes,
    Variable,
    Watch,
    aggregation,
    belongs_here,
    raw_value,
    set_raw_value,
)
from meshlayout.errors import StrategyError


if TYPE_CHECKING:
    from meshlayout.distribute.strategy import Strategy

_phases = itertools.count()


@dataclasses.dataclass
class _Result:
    """One array that the function returned.

    Attributes:
        shape: Its shape, in the first trace.
        differs: Whether replicas have different ones.
        forgotten: What it is part of, if that was the same on all replicas before.
        is_aligned: Whether it has one row for each row of a padded batch.
    """

    shape: tuple[int, ...]
    differs: bool
    forgotten: str = ""
    is_aligned: bool = False


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
        self._strategy = strategy
        count = strategy.num_replicas_in_sync
        self._count, self._axis = count, REPLICA_AXIS if count > 1 else None
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self._fn: Any = fn
        self._arguments: Arguments | None = arguments
        self._rows: int | None = None
        if arguments.mask is not None:
            self._rows = arguments.mask.shape[0] // count
        entries = captured.walk(fn, arguments.objects)
        self._paths = _Paths(entries)
        with captured.refuse_appends(fn, self._name, entries):
            self._examine(arguments)
        touched = {*map(id, self.variables), *self._nodes}
        self.roots = captured.Roots(entries, touched, gone)
        self.modes = Modes([x.node for x in self._nodes.values()], gone)
        del self._nodes
        self._place()
        self._paths = _Paths(())

        def step(state: Any, rest: Any, leaves: Any) -> Any:
            return self._traced_step(state, rest, leaves)

        step.__name__ = self._name
        self.step = strategy._compile(step)

    # The first trace.

    def _examine(self, arguments: Arguments) -> None:
        """Traces the function for what it touches, changes and returns.

        A padded batch is traced with twice its rows, so that the results that have one
        row for each of them are seen in the second trace.
        """
        factor = 2 if self._rows is not None else 1
        try:
            self._trace_first(arguments, factor)
        except StrategyError:
            raise
        except Exception:
            if factor == 1:
                raise
            self._trace_first(arguments, 1)  # a function for this number of rows alone

    def _trace_first(self, arguments: Arguments, factor: int) -> None:
        self._factor = factor
        self._decisions = Decisions()

        def examined(leaves: list[Any], mark: Any) -> jax.Array:
            trace = ReplicaTrace(self._decisions, mark, sums.Increments())
            watch, context, result = self._traced(arguments, leaves, trace, self._enter)
            self._read(watch, context, arguments, leaves, result)
            return jnp.zeros(())

        leaves = [self._parts(leaf, factor) for leaf in arguments.leaves]
        if self._axis is None:
            jax.eval_shape(lambda x: examined(x, None), leaves)
            return
        axes = [0 if isinstance(leaf, PerReplica) else None for leaf in leaves]

        def marked(leaves: list[Any]) -> jax.Array:
            mark = jnp.zeros(1, bool)
            return jax.vmap(lambda mark: examined(leaves, mark), axis_name=MARKED)(mark)

        mapped = jax.vmap(
            marked, in_axes=(axes,), axis_name=self._axis, axis_size=self._count
        )
        try:
            jax.eval_shape(mapped, leaves)
        except NotImplementedError as error:
            error.add_note(
                "run: what differs between replicas is read from a trace under "
                "jax.vmap, which has no rule for this operation. Give a callback a "
                "vmap_method, and sum over all replicas instead of groups."
            )
            raise

    def _parts(self, leaf: Any, factor: int) -> Any:
        """Returns the shapes of the replicas' own values, one after another."""
        if not isinstance(leaf, PerReplica):
            return leaf
        has_mask = leaf.mask is not None

        def part(x: Any) -> Any:
            rows = x.shape[0] // self._count
            shape = () if leaf.is_scalar else (rows * (factor if has_mask else 1),)
            if self._axis is not None:
                shape = (self._count, *shape)
            return jax.ShapeDtypeStruct((*shape, *x.shape[1:]), x.dtype)

        return jax.tree.map(part, leaf)

    def _enter(self, variable: Variable) -> Any:
        """Returns what a replica sees of a Variable, when the first trace meets it."""

        def entered(x: Any) -> Any:
            if isinstance(x, PerReplica):
                own = x.array.reshape(self._count, *x.shape)
                return own[jax.lax.axis_index(self._axis)] if self._axis else own[0]
            if isinstance(x, jax.ShapeDtypeStruct):
                x = _zeros(x)
            elif array_of(x) is None and not _jax.is_key(x):
                _refuse_value(self._paths.of(variable), x)
            return jax.lax.optimization_barrier(jnp.asarray(x))

        value = raw_value(variable)
        if type(variable).__name__ == "HijaxVariable" or any(
            map(_jax.is_ref, jax.tree.leaves(value))
        ):
            msg = (
                f"{self._paths.of(variable)} is a variable with hijax=True or ref=True, "
                "which cannot be the state of a compiled program. Create it without."
            )
            raise StrategyError(msg)
        whole = jax.tree.map(entered, value, is_leaf=_is_per_replica)
        own = self._own(variable, whole)
        trace = gradients.current.get()
        if trace is not None and trace.increments is not None:
            if aggregation(variable) in ("sum", "increments"):
                trace.increments.start(variable, own)
        return own

    def _own(self, variable: Variable, value: Any) -> Any:
        """Returns a replica's own keys of a Variable, and other values as they are."""

        def own(x: Any) -> Any:
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

    def _read(
        self,
        watch: Watch,
        context: ReplicaContext,
        arguments: Arguments,
        leaves: list[Any],
        result: Any,
    ) -> None:
        """Reads a first trace, inside of it.

        Raises:
            StrategyError: If a Variable would differ between replicas, or its value
                would be another kind of array.
        """
        self.variables, self._nodes = watch.variables, watch.nodes
        pairs = zip(self.variables, watch.entered, watch.values, strict=True)
        self._changed, differing = [], []
        for index, (variable, before, after) in enumerate(pairs):
            differs = self._differs(after)
            if not _is_changed(before, after):
                continue
            if isinstance(variable, nnx.RngKey) and differs:
                continue  # nnx.scan hands keys back as new arrays
            self._changed.append(index)
            _check_kind(self._name, self._paths.of(variable), before, after)
            if differs and aggregation(variable) != "per_replica":
                differing.append(self._paths.of(variable))
        self._is_own = [aggregation(x) == "per_replica" for x in self.variables]
        if differing:
            _refuse_differing(self._name, differing)
        self._check_mask(context, watch, result)
        flat, self._treedef = self._flattened(result)
        self._results = [_Result(x.shape, self._differs(x)) for x in flat]
        self._find_forgotten(arguments, leaves, result)

    def _differs(self, value: Any) -> bool:
        axis = self._axis
        if axis is None:
            return False
        return any(_jax.is_mapped(x, axis) for x in jax.tree.leaves(value))

    def _check_mask(self, context: ReplicaContext, watch: Watch, result: Any) -> None:
        """Refuses a function that may count padding."""
        if self._rows is None or context.mask_was_read:
            return
        rows = self._rows * self._factor
        shapes = [jnp.shape(x) for x in jax.tree.leaves(result)]
        statistics = (nnx.BatchStat, nnx.metrics.MetricState)
        changed = [self.variables[index] for index in self._changed]
        if all(shape[:1] == (rows,) for shape in shapes) and all(
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

    def _find_forgotten(
        self, arguments: Arguments, leaves: list[Any], result: Any
    ) -> None:
        """Finds states that came in the same on all replicas, and would go out not so.

        Raises:
            StrategyError: If it is more than a plain tree, which gradients are, too.
        """
        args, kwargs = arguments.unflatten(list(range(len(leaves))))
        parts = {id(result): result} | {
            id(x): x
            for x in (
                result.values() if isinstance(result, dict) else result
                if isinstance(result, (tuple, list)) else ()
            )
        }
        position = {id(x): i for i, x in enumerate(jax.tree.leaves(result))}
        for argument in (*args, *kwargs.values()):
            indices, treedef = jax.tree.flatten(argument, is_leaf=is_leaf)
            is_leaf_alone = jax.tree_util.treedef_is_leaf(treedef)
            if is_leaf_alone or not all(type(i) is int for i in indices):
                continue
            before = [leaves[i] for i in indices]
            if any(x is None or isinstance(x, PerReplica) for x in before):
                continue
            for part in parts.values():
                paths, structure = jax.tree_util.tree_flatten_with_path(part)
                after = [x for _, x in paths]
                if structure != treedef or list(map(jnp.shape, after)) != list(
                    map(jnp.shape, before)
                ):
                    continue
                names = [
                    jax.tree_util.keystr(path, simple=True, separator="/")
                    for path, x in paths
                    if self._differs(x)
                ]
                if names and _is_state(argument):
                    raise StrategyError(_forgotten_text(self._name, names))
                for path, x in paths:
                    if self._differs(x):
                        name = jax.tree_util.keystr(path, simple=True, separator="/")
                        self._results[position[id(x)]].forgotten = name

    def _flattened(self, result: Any) -> tuple[list[jax.Array], Any]:
        """Returns what the function returned as arrays, and its structure."""
        out, treedef = jax.tree.flatten(result, is_leaf=_is_refused)
        arrays = []
        for leaf in out:
            x = None if _is_refused(leaf) else array_of(leaf)
            if x is None:
                msg = f"{self._name} returned {_checks.shown(leaf)}, which is not an array."
                if _is_refused(leaf):
                    msg = (
                        f"{self._name} returned {_checks.type_text(leaf)}; a replica's "
                        "function returns arrays. What it sets in NNX objects is kept "
                        "anyway."
                    )
                raise StrategyError(msg)
            arrays.append(_jax.with_weak_type(x, weak_type=False))
        return arrays, treedef

    # Both traces.

    def _traced(
        self,
        arguments: Arguments,
        leaves: list[Any],
        trace: ReplicaTrace,
        enter: Callable[[Variable], Any],
    ) -> tuple[Watch, ReplicaContext, Any]:
        """Runs the function on one replica, while it is traced."""
        masks = [leaf.mask for leaf in leaves if isinstance(leaf, PerReplica)]
        mask = next((mask for mask in masks if mask is not None), None)
        context = ReplicaContext(self._strategy, self._axis, self._count, mask)
        own = [x.array if isinstance(x, PerReplica) else x for x in leaves]
        token = gradients.current.set(trace)
        try:
            # Functions that are jitted inside are traced anew: what they ask of the
            # context belongs to this trace.
            with (
                _jax.trace_phase(next(_phases)),
                entered(context),
                gradients.patches,
                sums.patches,
                padding_left_out(),
            ):
                combination = Combination(context, trace)
                with Watch(enter, combination) as watch:
                    combination.watch = watch
                    result = arguments.call(self._fn, own)
                    self._check_attributes(watch)
        finally:
            gradients.current.reset(token)
        return watch, context, result

    def _check_attributes(self, watch: Watch) -> None:
        for attributes in watch.nodes.values():
            change = attributes.difference()
            if change is not None:
                msg = (
                    f"run: {self._name} {change}. It runs in Python once per compiled "
                    "program, not at every call: create variables before the call, set "
                    "them with variable[...] = value, return other values, and switch "
                    "modes, as model.eval() does, outside. (What sow() keeps can be "
                    "taken out with nnx.pop inside the function.)"
                )
                raise StrategyError(msg)

    # The second trace.

    def _traced_step(self, state: Any, rest: Any, leaves: Any) -> tuple[Any, Any]:
        assert self._arguments is not None
        changed, remaining, own_state = set(self._changed), iter(rest), iter(state)
        values = [
            next(own_state) if i in changed else next(remaining)
            for i in range(len(self.variables))
        ]

        def replica(values: list[Any], leaves: list[Any]) -> tuple[Any, Any]:
            return self._replica(self._arguments, values, leaves)

        if self._axis is None:
            return replica(values, leaves)
        rows, whole = PartitionSpec(self._axis), PartitionSpec()
        specs = [rows if is_own else whole for is_own in self._is_own]
        out_specs = (
            tuple(specs[index] for index in self._changed),
            [rows if result.differs else whole for result in self._results],
        )
        in_specs = [rows if isinstance(x, PerReplica) else whole for x in leaves]
        return jax.shard_map(
            replica,
            mesh=self._strategy.mesh.jax_mesh,
            in_specs=(specs, in_specs),
            out_specs=out_specs,
            check_vma=False,
        )(values, leaves)

    def _replica(
        self, arguments: Any, values: list[Any], leaves: list[Any]
    ) -> tuple[Any, Any]:
        self._decisions.replay()
        bound = {id(x): value for x, value in zip(self.variables, values, strict=True)}

        def enter(variable: Variable) -> Any:
            if id(variable) not in bound:
                self._refuse_second()
            value = jax.tree.map(
                lambda x: _own_part(x) if isinstance(x, PerReplica) else x,
                bound[id(variable)],
                is_leaf=_is_per_replica,
            )
            return self._own(variable, value)

        leaves = [_own_leaf(x) for x in leaves]
        trace = ReplicaTrace(self._decisions)
        watch, _, result = self._traced(arguments, leaves, trace, enter)
        after = dict(zip(map(id, watch.variables), watch.values, strict=True))
        before = dict(zip(map(id, watch.variables), watch.entered, strict=True))
        plan = {id(self.variables[index]) for index in self._changed}
        for variable in watch.variables:
            key = id(variable)
            is_new = _is_changed(before[key], after[key])
            if is_new and key not in plan and not isinstance(variable, nnx.RngKey):
                self._refuse_second()
        new = []
        for index in self._changed:
            value = after.get(id(self.variables[index]), values[index])
            is_own = self._is_own[index]
            new.append(jax.tree.map(_whole_part(self._count) if is_own else _plain, value))
        flat, treedef = self._flattened(result)
        if treedef != self._treedef:
            self._refuse_second()
        results = zip(flat, self._results, strict=True)
        return tuple(new), [self._result(x, result) for x, result in results]

    def _refuse_second(self) -> None:
        msg = (
            f"{self._name} did something else when it was traced again: it depends on "
            "something that changes in Python. Pass that as an argument."
        )
        raise StrategyError(msg)

    def _result(self, x: jax.Array, result: _Result) -> Any:
        if self._rows is not None and self._axis is not None and result.differs:
            grown = x.shape != result.shape if self._factor > 1 else False
            aligned = (self._rows * self._factor, *x.shape[1:])
            if x.shape[:1] == (self._rows,) and result.shape == aligned:
                result.is_aligned = True
            elif grown:
                self._refuse_rows(x)
        elif self._rows is not None and self._factor > 1 and x.shape != result.shape:
            self._refuse_rows(x)
        if not result.differs or self._axis is None:
            return x
        return _whole_part(self._count)(x)

    def _refuse_rows(self, x: jax.Array) -> None:
        msg = (
            f"{self._name} got a short batch, of which each replica has {self._rows} "
            f"rows, padding included, and returned an array of shape {x.shape}, which is "
            "not one value per row: which of its values are padding is unknown. Return "
            "one value per row, or combine rows under get_replica_context()."
            "example_mask, or leave such batches out with "
            "distribute_dataset(..., remainder='drop')."
        )
        raise StrategyError(msg)

    # Calls.

    def _place(self) -> None:
        """Places the Variables on the devices of all replicas, and sorts them."""
        with jax.ensure_compile_time_eval():
            self._values = [
                self._placed(index, raw_value(x)) for index, x in enumerate(self.variables)
            ]
        for variable, value in zip(self.variables, self._values, strict=True):
            set_raw_value(variable, value)
        changed = set(self._changed)
        self._rest = [i for i in range(len(self.variables)) if i not in changed]
        self._is_changed = [i in changed for i in range(len(self.variables))]
        self._changed_variables = [self.variables[i] for i in self._changed]
        # Two Variables with one array, as after nnx.clone: the program uses it up.
        seen = {id(x) for i in self._rest for x in jax.tree.leaves(self._values[i])}
        for index in self._changed:
            ids = {id(x) for x in jax.tree.leaves(self._values[index])}
            if not seen.isdisjoint(ids) and not _jax.is_tracing():
                self._values[index] = jax.tree.map(jnp.copy, self._values[index])
                set_raw_value(self.variables[index], self._values[index])
            seen |= ids

    def _placed(self, index: int, value: Any) -> Any:
        variable = self.variables[index]
        path = self._paths.of(variable)
        place = self._strategy._place
        return jax.tree.map(
            lambda x: place(path, x, is_own=self._is_own[index]),
            value,
            is_leaf=_is_per_replica,
        )

    def inputs(self, arguments: Arguments) -> tuple[Any, Any, list[Any]]:
        """Returns what the compiled step takes: state, other variables, arguments."""
        values = list(map(raw_value, self.variables))
        if not all(map(operator.is_, values, self._values)):
            with jax.ensure_compile_time_eval():
                for i, (value, old) in enumerate(zip(values, self._values, strict=True)):
                    if value is not old:
                        values[i] = self._placed(i, value)
            self._values = values
        state = tuple(itertools.compress(values, self._is_changed))
        return state, [values[i] for i in self._rest], arguments.leaves

    def __call__(self, fn: Callable[..., PyTree], arguments: Arguments) -> PyTree:
        """Runs the program, and sets the variables that changed."""
        inputs = self.inputs(arguments)
        if _jax.is_tracing():
            self._check_trace()
        # A program does not keep its function alive; JAX may have to trace it anew.
        self._fn, self._arguments = fn, arguments
        try:
            state, out = self.step(*inputs)
        finally:
            self._fn = self._arguments = None
        for index, variable, value in zip(
            self._changed, self._changed_variables, state, strict=True
        ):
            set_raw_value(variable, value)
            self._values[index] = value
        for index, result in enumerate(self._results):
            if result.is_aligned:
                array = out[index].array
                mask = arguments.mask
                out[index] = PerReplica(array, mask, num_replicas=self._count)
            if result.forgotten:
                out[index].forgotten = (captured.function_key(fn), result.forgotten)
        return self._treedef.unflatten(out)

    def held(self, fn: Callable[..., PyTree], arguments: Arguments) -> Any:
        """Returns the compiled step, for a look at the program alone."""
        self._fn, self._arguments = fn, arguments
        return self.step

    def _check_trace(self) -> None:
        """Refuses to change variables from outside of the trace under way, if any."""
        for index in self._changed:
            if not belongs_here(self.variables[index]):
                msg = (
                    f"{self._name} changes the variable "
                    f"{type(self.variables[index]).__name__} from outside of the "
                    "function that is being compiled. run compiles by itself: call it "
                    "without jit, or pass the objects through nnx.jit as arguments."
                )
                raise StrategyError(msg)


class _Paths:
    """The names of Variables, by the roots that lead to them."""

    def __init__(self, entries: Any) -> None:
        self._entries = entries
        self._found: dict[int, str] | None = None

    def of(self, variable: Variable) -> str:
        """Returns the path of a Variable, such as `model/encoder/kernel`."""
        if self._found is None:
            self._found = {}
            for entry in self._entries:
                if captured.is_nnx(entry.value):
                    for path, value in captured.iter_graph(entry.value):
                        name = "/".join((entry.path, *map(str, path)))
                        self._found.setdefault(id(value), name)
        value = raw_value(variable)
        kind = type(variable).__name__
        return self._found.get(id(variable), f"{kind} of shape {np.shape(value)}")


def _is_per_replica(leaf: object) -> bool:
    return isinstance(leaf, PerReplica)


def _is_refused(result: object) -> bool:
    """Returns whether this is no result; a Variable, as in gradients, is its value."""
    return is_leaf(result) and not isinstance(result, nnx.Variable | nnx.State)


def _is_changed(before: Any, after: Any) -> bool:
    if before is after:
        return False
    old, old_structure = jax.tree.flatten(before)
    new, new_structure = jax.tree.flatten(after)
    return old_structure != new_structure or not all(map(operator.is_, old, new))


def _zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an array in place of an abstract one, of which only the shape counts."""
    if not _jax.is_extended(x.dtype):
        return jnp.zeros(x.shape, x.dtype)
    words = jax.eval_shape(jax.random.key_data, x)
    return _jax.key_of_words(jnp.zeros(words.shape, words.dtype), x.dtype)


def _own_part(x: Any) -> Any:
    return x.array[0] if x.is_scalar else x.array


def _own_leaf(leaf: Any) -> Any:
    """Returns one replica's own value, as its part of a `PerReplica`."""
    if not isinstance(leaf, PerReplica) or not leaf.is_scalar:
        return leaf
    return PerReplica.tree_unflatten((leaf.num_replicas, True), (leaf.array[0], None))


def _plain(x: Any) -> jax.Array:
    return _jax.with_weak_type(jnp.asarray(x), weak_type=False)


def _whole_part(count: int) -> Callable[[Any], PerReplica]:
    """Returns a function that makes a replica's own value its part of all values."""

    def whole(x: Any) -> PerReplica:
        x = _plain(x)
        return PerReplica.tree_unflatten(
            (count, x.ndim == 0), (x[None] if x.ndim == 0 else x, None)
        )

    return whole


# Containers that hold gradients as well as parameters.
_CONTAINERS = (dict, list, tuple, FrozenDict, nnx.State)


def _is_state(tree: Any) -> bool:
    """Returns whether a tree is more than containers, as states of training are."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: type(x) not in _CONTAINERS)
    return not all(type(leaf) is int for leaf in leaves)


def _forgotten_text(name: str, paths: list[str]) -> str:
    return (
        f"{name} returns a state that came in the same on all replicas, and would leave "
        f"different values of {_listed(paths)} on them. Combine gradients and losses "
        "first: grads = get_replica_context().all_reduce('SUM', grads)."
    )


def check_forgotten(name: str, key: Any, arguments: Arguments) -> None:
    """Refuses what the same function returned in place of a value for all replicas."""
    for leaf in arguments.leaves:
        known, path = getattr(leaf, "forgotten", None) or (None, "")
        if path and known == key:
            raise StrategyError(_forgotten_text(name, [path]))


def _listed(paths: list[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more


def _refuse_differing(name: str, paths: list[str]) -> None:
    msg = (
        f"{name} would leave different values of {_listed(paths)} on the replicas: the "
        "new values are computed from what differs between them. Combine that first, as "
        "get_replica_context().all_reduce('MEAN', x) does, or say how the variable's "
        "values become one: nnx.Variable(x, aggregation='mean'), or 'sum', 'first', "
        "'per_replica'."
    )
    raise StrategyError(msg)


def _check_kind(name: str, path: str, before: Any, after: Any) -> None:
    """Refuses a new value of a Variable that a program could not take again."""
    old, old_tree = jax.tree.flatten(before)
    new, new_tree = jax.tree.flatten(after)
    kinds = [[(jnp.shape(x), jnp.result_type(x)) for x in xs] for xs in (old, new)]
    if old_tree != new_tree or kinds[0] != kinds[1]:
        was, now = (", ".join(f"{d}{list(s)}" for s, d in kind) for kind in kinds)
        msg = (
            f"{name} sets the variable {path}, which was {was}, to {now}. A program's "
            "state keeps its shapes and dtypes: convert the value, or create the "
            "variable so."
        )
        raise StrategyError(msg)


def _refuse_value(path: str, value: object) -> None:
    msg = (
        f"{path} is a variable that holds {_checks.type_text(value)}; the state of a "
        "compiled program consists of arrays. Make it a plain attribute."
    )
    raise StrategyError(msg)
