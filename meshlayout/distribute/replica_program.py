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
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from meshlayout import _checks, _jax
from meshlayout._annotations import Leaf, PyTree
from meshlayout.collectives import ReplicaContext, entered
from meshlayout.distribute.aggregation import ADDED_UP, COMBINED, ReplicaTrace, patches
from meshlayout.distribute.arguments import Arguments, is_leaf
from meshlayout.distribute.capture import Roots
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
from meshlayout.step import compile_step


_phases = itertools.count()


class Examination(NamedTuple):
    """What the first trace of a function shows."""

    variables: list[Variable]  # that it reads or sets
    is_changed: list[bool]  # which of them it sets
    nodes: list[Any]  # the modules whose attributes it reads
    treedef: Any  # of its results
    shapes: list[tuple[int, ...]]
    differs: list[bool]  # which results differ between replicas
    rows: int  # of each replica, if some are padding; else 0
    decisions: list[Any]  # how values of replicas are combined, in order


def examine(strategy: Any, fn: Any, arguments: Arguments, path_of: Any) -> Examination:
    """Traces a function under `jax.vmap` over the replicas, for what it does.

    A batch with padding gets twice its rows, so that the second trace, which has as
    many as there are, shows which results have one value for each.
    """
    found: list[Examination] = []

    def examined(arrays: list[Any], **marks: jax.Array) -> tuple[()]:
        options = {"marks": marks, "path_of": path_of}
        traced = _traced(strategy, fn, arguments, arrays, _placeholder, **options)
        found.append(_read(arguments, path_of, *traced))
        _check_states(arguments, arrays, traced[2], traced[0].is_mapped)
        return ()

    def marked(arrays: list[Any]) -> tuple[()]:
        def call(added_up: jax.Array, combined: jax.Array) -> tuple[()]:
            return examined(arrays, added_up=added_up, combined=combined)

        once = jax.vmap(call, (0, None), axis_name=ADDED_UP)
        twice = jax.vmap(once, (None, 0), axis_name=COMBINED)
        return twice(jnp.zeros(1, bool), jnp.zeros(1, bool))

    count, has_mask = strategy.num_replicas_in_sync, arguments.mask is not None
    axes = [0 if is_own else None for is_own in arguments.is_own]
    arrays = list(arguments.arrays)
    for index in itertools.compress(range(len(arrays)), arguments.is_own):
        (length, *rest), dtype = arrays[index].shape, arrays[index].dtype
        rows = length // count * (1 + has_mask)
        shape = rest if index in arguments.scalars else (rows, *rest)
        shape = (count, *shape) if count > 1 else shape
        arrays[index] = jax.ShapeDtypeStruct(shape, dtype)
    try:
        if count > 1:
            sizes: dict[str, Any] = {"axis_name": REPLICA_AXIS, "axis_size": count}
            jax.eval_shape(jax.vmap(marked, (axes,), **sizes), arrays)
        else:
            jax.eval_shape(examined, arrays)
    except Exception as error:
        if has_mask or isinstance(error, NotImplementedError):
            error.add_note(
                "run: a function is traced first under jax.vmap over the replicas, to "
                "see what differs between them, and for a batch with padding with "
                "twice its rows, to see which results have one value for each. So give "
                "callbacks a vmap_method, and write -1 for the number of rows."
            )
        raise
    return found[0]


def _traced(
    strategy: Any,
    fn: Any,
    arguments: Arguments,
    arrays: Any,
    value_of: Any,
    **options: Any,
) -> tuple[ReplicaTrace, TraceWatch, PyTree]:
    """Runs a function on one replica, while it is traced."""
    mask = arrays[-1] if arguments.mask is not None else None
    count = strategy.num_replicas_in_sync
    axis = REPLICA_AXIS if count > 1 else None
    context = ReplicaContext(strategy, axis, count, mask)
    trace = ReplicaTrace(context, value_of, **options)
    # Functions that are jitted inside are traced anew: what they ask of the context
    # belongs to this trace.
    with (
        _jax.trace_phase(next(_phases)),
        strategy._inside(),
        entered(context),
        patches,
        padding_left_out(),
        TraceWatch(trace) as watch,
    ):
        result = arguments.call(fn, arrays)
        watch.check_attributes(arguments.name)
    return trace, watch, result


def _placeholder(variable: Variable) -> Any:
    """Returns a value for a first trace, which has no numbers that Python could use."""

    def value(x: Leaf) -> Any:
        if isinstance(x, PerReplica):
            own = x.array.reshape(x.num_replicas, *x.shape)
            return own[jax.lax.axis_index(REPLICA_AXIS)]
        is_abstract = isinstance(x, jax.ShapeDtypeStruct)
        x = jnp.zeros(x.shape, x.dtype) if is_abstract else jnp.asarray(x)
        return jax.lax.optimization_barrier(x)

    return jax.tree.map(value, raw_value(variable), is_leaf=_is_per_replica)


def _read(
    arguments: Arguments,
    path_of: Any,
    trace: ReplicaTrace,
    watch: TraceWatch,
    result: Any,
) -> Examination:
    """Reads a first trace, inside of it; refuses what replicas cannot do."""
    is_changed, differing, is_safe = [], [], True
    for variable, before in watch.entered.values():
        after = watch.values[id(variable)]
        differs, kind = trace.is_mapped(after), aggregation(variable)
        # nnx.scan hands a replica's own keys back as new arrays.
        is_key = isinstance(variable, nnx.RngKey) and differs
        is_changed.append(_is_changed(before, after) and not is_key)
        if is_changed[-1]:
            is_statistic = isinstance(variable, nnx.BatchStat) or kind == "metric"
            is_safe &= is_statistic and "aggregation" not in variable.get_metadata()
            if differs and kind != "per_replica":
                differing.append(path_of(variable))
    if differing:
        msg = (
            f"{arguments.name} would leave different values of "
            f"{', '.join(differing[:3])} on the replicas: the new values are computed "
            "from what differs between them. Combine that first, as "
            "get_replica_context().all_reduce('MEAN', x) does, or say how the "
            "variable's values become one: nnx.Variable(x, aggregation='mean'), or "
            "'sum', 'first', 'per_replica'."
        )
        raise StrategyError(msg)
    arrays, treedef = _flattened(arguments.name, result)
    mask, shapes = trace.context.mask, [x.shape for x in arrays]
    rows = 0 if mask is None else mask.shape[0]
    is_safe &= all(shape[:1] == (rows,) for shape in shapes)
    if rows and not is_safe and not trace.context.mask_was_read:
        msg = (
            f"{arguments.name} got a short batch, which is padded to the shape of the "
            "others, and did not ask which rows are real: padding would count. Use "
            "losses.compute_average_loss, which asks; or multiply by "
            "get_replica_context().example_mask and divide by its num_examples; or "
            "return one value per row and combine these with reduce(..., axis=0); or "
            "leave such batches out with distribute_dataset(..., remainder='drop')."
        )
        raise StrategyError(msg)
    variables = [variable for variable, _ in watch.entered.values()]
    nodes = [node for node, *_ in watch.nodes.values()]
    differs, decisions = list(map(trace.is_mapped, arrays)), trace.decisions
    return Examination(
        variables, is_changed, nodes, treedef, shapes, differs, rows, decisions
    )


def _is_changed(before: Leaf, after: Leaf) -> bool:
    old, structure = jax.tree.flatten(before)
    new, new_structure = jax.tree.flatten(after)
    return structure != new_structure or not all(map(operator.is_, old, new))


def _flattened(name: str, result: PyTree) -> tuple[list[jax.Array], Any]:
    """Returns what a function returned as arrays, and its structure."""

    def array(leaf: Leaf) -> jax.Array:
        kinds = jax.Array | np.ndarray | np.generic | bool | int | float | complex
        if not isinstance(leaf, kinds):  # JAX would take a text for the name of a dtype
            msg = f"{name} returned {_checks.shown(leaf)}, which is not an array."
            raise StrategyError(msg)
        return _strong(leaf)

    def is_refused(x: object) -> bool:  # a Variable or state, as gradients, is values
        return is_leaf(x) and not isinstance(x, nnx.Variable | nnx.State)

    leaves, treedef = jax.tree.flatten(result, is_leaf=is_refused)
    return list(map(array, leaves)), treedef


def _strong(x: Leaf) -> jax.Array:
    return _jax.with_weak_type(jnp.asarray(x), weak_type=False)


def _check_states(arguments: Arguments, arrays: Any, result: Any, differs: Any) -> None:
    """Refuses a state that came in the same on all replicas, and goes out different.

    NNX objects are changed in place, where that is an error. A state of Linen is
    returned, and a forgotten all-reduce would give each replica one of its own.
    """

    def shapes(leaves: list[Any]) -> list[Any]:
        return [None if is_leaf(x) else np.shape(x) for x in leaves]

    args, kwargs = arguments.unflatten(arrays)
    parts = [result, *jax.tree.leaves(result, is_leaf=lambda x: x is not result)]
    for state, part in itertools.product((*args, *kwargs.values()), parts):
        before, structure = jax.tree.flatten(state, is_leaf=is_leaf)
        after, new_structure = jax.tree.flatten_with_path(part)
        is_bare = jax.tree_util.treedef_is_leaf(structure)
        is_state = any(shapes(before)) and not is_bare  # two numbers are none
        is_same = structure == new_structure and not differs(before)
        if is_state and is_same and shapes(before) == shapes([x for _, x in after]):
            text = jax.tree_util.keystr
            keys = [key for key, x in after if differs(x)]
            names = [text(key, simple=True, separator="/") for key in keys]
            if names:
                msg = (
                    f"{arguments.name} returns a state that came in the same on all "
                    "replicas, and would leave different values of "
                    f"{', '.join(names)} on them. Combine gradients and losses first: "
                    "get_replica_context().all_reduce('SUM', grads)."
                )
                raise StrategyError(msg)


class ReplicaProgram:
    """A function, compiled for the replicas of a strategy and one signature.

    Args:
        strategy: The strategy.
        fn: The function.
        arguments: Its arguments.
        gone: Called when an object that the program is for is gone.
    """

    def __init__(
        self, strategy: Any, fn: Any, arguments: Arguments, gone: Callable[[], None]
    ) -> None:
        self._strategy, self._name = strategy, arguments.name
        self.roots = roots = Roots(fn, arguments.named_objects())
        with roots.refuse_appends(self._name):
            seen = examine(strategy, fn, arguments, roots.path_of)
        self._seen = seen._replace(nodes=[])  # which a program does not keep alive
        self.roots.keep({*map(id, (*seen.variables, *seen.nodes))}, gone)
        self.modes = Modes(seen.nodes, gone)
        is_rest = map(operator.not_, seen.is_changed)
        self._changed = [*itertools.compress(seen.variables, seen.is_changed)]
        self._variables = [*self._changed, *itertools.compress(seen.variables, is_rest)]
        self._values: list[Any] = []  # after the last call
        # Which results have one value per row of a short batch.
        self._aligned: set[int] = set()
        self._call: Any = None

        def step(state: Any, rest: Any, arrays: Any) -> Any:
            return self._traced_step(state, rest, arrays)

        step.__name__ = self._name
        self.step = compile_step(step, on_recompile="ignore")

    def _traced_step(self, state: Any, rest: Any, arrays: Any) -> tuple[Any, Any]:
        """Traces the function for the second time."""
        if self._strategy.num_replicas_in_sync == 1:
            return self._replica(state, rest, arrays)

        def specs(flags: Iterable[bool]) -> list[PartitionSpec]:
            return [PartitionSpec(*[REPLICA_AXIS] * is_own) for is_own in flags]

        variables = specs(aggregation(x) == "per_replica" for x in self._variables)
        changed = tuple(variables[: len(state)])
        rest_specs = tuple(variables[len(state) :])
        return jax.shard_map(
            self._replica,
            mesh=self._strategy.mesh.jax_mesh,
            in_specs=(changed, rest_specs, specs(self._call[1].is_own)),
            out_specs=(changed, specs(self._seen.differs)),
            check_vma=False,
        )(state, rest, arrays)

    def _replica(self, state: Any, rest: Any, arrays: Any) -> tuple[Any, Any]:
        values = dict(zip(map(id, self._variables), (*state, *rest), strict=True))
        (fn, arguments), seen = self._call, self._seen

        def value_of(variable: Variable) -> Any:
            value = values.get(id(variable), raw_value(variable))
            return jax.tree.map(_own_part, value, is_leaf=_is_per_replica)

        scalars, options = arguments.scalars, {"decisions": seen.decisions}
        arrays = [x[0] if i in scalars else x for i, x in enumerate(arrays)]
        traced = _traced(self._strategy, fn, arguments, arrays, value_of, **options)
        _, watch, result = traced
        results, treedef = _flattened(self._name, result)
        expected = {*map(id, self._changed)}
        is_same = treedef == seen.treedef
        is_same &= expected <= watch.entered.keys() <= values.keys()
        for key, (variable, before) in watch.entered.items():
            is_expected = key in expected or isinstance(variable, nnx.RngKey)
            is_same &= is_expected or not _is_changed(before, watch.values[key])
        if not is_same:
            msg = (
                f"{self._name} did something else when it was traced again: it depends "
                "on something that changes in Python. Pass that as an argument."
            )
            raise StrategyError(msg)
        new = []
        for variable in self._changed:
            form = self._whole if aggregation(variable) == "per_replica" else _strong
            new.append(jax.tree.map(form, watch.values[id(variable)]))
        return tuple(new), list(map(self._result, itertools.count(), results))

    def _whole(self, x: Leaf) -> Any:
        """Returns a replica's own value as its part of the values of all."""
        count, x = self._strategy.num_replicas_in_sync, _strong(x)
        is_scalar = not x.ndim
        rows = x[None] if is_scalar else x
        value = PerReplica(rows, num_replicas=count, is_scalar=is_scalar)
        return x if count == 1 else value

    def _result(self, index: int, x: jax.Array) -> jax.Array:
        shape, rows = self._seen.shapes[index], self._seen.rows
        if not self._seen.differs[index]:
            return x
        if rows and (x.shape[:1], shape[:1]) == ((rows // 2,), (rows,)):
            self._aligned.add(index)
        elif x.shape != shape:
            msg = (
                f"{self._name} got a short batch and returned an array of shape "
                f"{x.shape}, which is not one value for each of a replica's "
                f"{rows // 2} rows: which of its values are padding is unknown. "
                "Combine rows with get_replica_context().example_mask, or leave such "
                "batches out with distribute_dataset(..., remainder='drop')."
            )
            raise StrategyError(msg)
        return x if shape else x[None]

    # Calls.

    def inputs(self, arguments: Arguments) -> tuple[Any, Any, list[Any]]:
        """Returns what the compiled step takes: state, other variables, arguments."""
        values = list(map(raw_value, self._variables))
        is_same = len(values) == len(self._values)
        self._is_again = is_same and all(map(operator.is_, values, self._values))
        if not self._is_again:
            values = self._placed()
        count = len(self._changed)
        return tuple(values[:count]), tuple(values[count:]), arguments.arrays

    def _placed(self) -> list[Any]:
        """Places the Variables on the devices of all replicas; returns their values.

        The program uses up the arrays of those that it changes. So what several hold is
        copied: clones share arrays, and so do Variables that were set to the same one.
        """
        seen: set[int] = set()
        for variable in reversed(self._variables):  # those that change come last
            before = raw_value(variable)
            with jax.ensure_compile_time_eval():
                value = self._strategy._placed(variable)
            # With jax 0.7, a placed array may have the memory of the one it is from.
            ids = set(map(id, jax.tree.leaves((before, value))))
            if ids & seen and not _jax.is_tracing():
                value = jax.tree.map(jnp.copy, value)
            seen |= ids
            set_raw_value(variable, value)
        return list(map(raw_value, self._variables))

    def held(self, fn: Any, arguments: Arguments) -> Any:
        """Returns the compiled step, for a look at the program alone."""
        self._call = fn, arguments
        return self.step

    def __call__(self, fn: Any, arguments: Arguments) -> PyTree:
        """Runs the program, and sets the variables that changed."""
        inputs, step = self.inputs(arguments), self.step
        if _jax.is_tracing():
            self._check_trace(fn, arguments)
        elif self._is_again:  # the state is what the last call returned
            step = self.step.again
        # A program does not keep its function alive; JAX may have to trace it anew.
        self._call = fn, arguments
        try:
            state, out = step(*inputs)
        finally:
            self._call = None
        self._values = [*state, *inputs[1]]
        collections.deque(map(set_raw_value, self._changed, state), 0)
        count = self._strategy.num_replicas_in_sync
        for index in itertools.compress(range(len(out)), self._seen.differs):
            mask = arguments.mask if index in self._aligned else None
            options = {"num_replicas": count, "is_scalar": not self._seen.shapes[index]}
            out[index] = PerReplica(out[index], mask, **options)
        return self._seen.treedef.unflatten(out)

    def _check_trace(self, fn: Any, arguments: Arguments) -> None:
        """Refuses to change variables from outside of the trace under way, if any."""
        for variable in itertools.filterfalse(belongs_here, self._changed):
            path = Roots(fn, arguments.named_objects()).path_of(variable)
            msg = (
                f"{self._name} changes the variable {path} from outside of the "
                "function that is being compiled. run compiles by itself: call it "
                "without jit, or pass the objects through nnx.jit as arguments."
            )
            raise StrategyError(msg)


def _is_per_replica(leaf: object) -> bool:
    return isinstance(leaf, PerReplica)


def _own_part(x: Leaf) -> Any:
    if not isinstance(x, PerReplica):
        return x
    return x.array[0] if x.is_scalar else x.array
