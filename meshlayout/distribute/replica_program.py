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
import functools
import itertools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

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


if TYPE_CHECKING:
    from meshlayout.distribute.strategy import Strategy

Function: TypeAlias = Callable[..., PyTree]

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


def examine(
    strategy: "Strategy", fn: Function, arguments: Arguments, path_of: Any
) -> Examination:
    """Traces a function under `jax.vmap` over the replicas, for what it does.

    A batch with padding gets twice its rows, so that the second trace, which has as
    many as there are, shows which results have one value for each.
    """
    found: list[Examination] = []

    def examined(arrays: list[Any], **marks: jax.Array) -> tuple[()]:
        options = {"marks": marks, "path_of": path_of}
        traced = _traced(strategy, fn, arguments, arrays, _placeholder, **options)
        found.append(_read(arguments.name, path_of, *traced))
        _check_states(arguments, arrays, traced[2], traced[0].is_mapped)
        if not traced[0].context.mask_was_read:
            _check_padding(arguments.name, found[-1])
        return ()

    def marked(arrays: list[Any]) -> tuple[()]:
        call = lambda a, c: examined(arrays, added_up=a, combined=c)  # noqa: E731
        call = jax.vmap(call, (0, None), axis_name=ADDED_UP)
        call = jax.vmap(call, (None, 0), axis_name=COMBINED)
        return call(*[jnp.zeros(1, bool)] * 2)

    count, has_mask = strategy.num_replicas_in_sync, arguments.mask is not None
    arrays, axes = list(arguments.arrays), []
    for index, (x, is_own) in enumerate(zip(arrays, arguments.is_own, strict=True)):
        axes.append(0 if is_own else None)
        if is_own:
            is_scalar = index in arguments.scalars
            rows = () if is_scalar else (x.shape[0] // count * (1 + has_mask),)
            shape = (*((count,) if count > 1 else ()), *rows, *x.shape[1:])
            arrays[index] = jax.ShapeDtypeStruct(shape, x.dtype)
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
    strategy: "Strategy",
    fn: Function,
    arguments: Arguments,
    arrays: list[Any],
    value_of: Callable[[Variable], Any],
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
            return own[jax.lax.axis_index(REPLICA_AXIS) if x.num_replicas > 1 else 0]
        is_abstract = isinstance(x, jax.ShapeDtypeStruct)
        x = jnp.zeros(x.shape, x.dtype) if is_abstract else jnp.asarray(x)
        return jax.lax.optimization_barrier(x)

    return jax.tree.map(value, raw_value(variable), is_leaf=_is_per_replica)


def _read(
    name: str, path_of: Any, trace: ReplicaTrace, watch: TraceWatch, result: PyTree
) -> Examination:
    """Reads a first trace, inside of it."""
    is_changed, differing = [], []
    for variable, before in watch.entered.values():
        after = watch.values[id(variable)]
        differs = trace.is_mapped(after)
        # nnx.scan hands a replica's own keys back as new arrays.
        is_key = isinstance(variable, nnx.RngKey) and differs
        is_changed.append(_is_changed(before, after) and not is_key)
        if is_changed[-1] and differs and aggregation(variable) != "per_replica":
            differing.append(variable)
    if differing:
        msg = (
            f"{name} would leave different values of "
            f"{', '.join(map(path_of, differing[:3]))} on the replicas: the new values "
            "are computed from what differs between them. Combine that first, as "
            "get_replica_context().all_reduce('MEAN', x) does, or say how the "
            "variable's values become one: nnx.Variable(x, aggregation='mean'), or "
            "'sum', 'first', 'per_replica'."
        )
        raise StrategyError(msg)
    arrays, treedef = _flattened(name, result)
    mask = trace.context.mask
    return Examination(
        variables=[variable for variable, _ in watch.entered.values()],
        is_changed=is_changed,
        nodes=[node for node, *_ in watch.nodes.values()],
        treedef=treedef,
        shapes=[x.shape for x in arrays],
        differs=list(map(trace.is_mapped, arrays)),
        rows=0 if mask is None else mask.shape[0],
        decisions=trace.decisions,
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

    # A Variable or state, as gradients are, is its values.
    is_refused = lambda x: is_leaf(x) and not isinstance(x, nnx.Variable | nnx.State)  # noqa: E731
    leaves, treedef = jax.tree.flatten(result, is_leaf=is_refused)
    return list(map(array, leaves)), treedef


def _strong(x: Leaf) -> jax.Array:
    return _jax.with_weak_type(jnp.asarray(x), weak_type=False)


def _check_states(
    arguments: Arguments, arrays: list[Any], result: PyTree, differs: Any
) -> None:
    """Refuses a state that came in the same on all replicas, and goes out different.

    NNX objects are changed in place, where that is an error. A state of Linen is
    returned, and a forgotten all-reduce would give each replica one of its own.
    """
    args, kwargs = arguments.unflatten(arrays)
    parts = [result, *jax.tree.leaves(result, is_leaf=lambda x: x is not result)]
    for state in (*args, *kwargs.values()):
        before, treedef = jax.tree.flatten(state, is_leaf=is_leaf)
        shapes = [] if any(map(is_leaf, before)) else list(map(np.shape, before))
        is_bare = jax.tree_util.treedef_is_leaf(treedef)
        if is_bare or not any(shapes) or differs(before):  # two numbers are no state
            continue
        for part in parts:
            after, structure = jax.tree.flatten_with_path(part)
            if structure != treedef or [np.shape(x) for _, x in after] != shapes:
                continue
            names = [
                jax.tree_util.keystr(path, simple=True, separator="/")
                for path, x in after
                if differs(x)
            ]
            if names:
                msg = (
                    f"{arguments.name} returns a state that came in the same on all "
                    "replicas, and would leave different values of "
                    f"{', '.join(names)} on them. Combine gradients and losses first: "
                    "get_replica_context().all_reduce('SUM', grads)."
                )
                raise StrategyError(msg)


def _check_padding(name: str, seen: Examination) -> None:
    """Refuses a function that did not ask for the mask and may count padding."""
    is_safe = all(shape[:1] == (seen.rows,) for shape in seen.shapes) and all(
        isinstance(x, nnx.BatchStat | nnx.metrics.MetricState)
        and "aggregation" not in x.get_metadata()
        for x in itertools.compress(seen.variables, seen.is_changed)
    )
    if seen.rows and not is_safe:
        msg = (
            f"{name} got a short batch, which is padded to the shape of the others, "
            "and did not ask which rows are real: padding would count. Use "
            "losses.compute_average_loss, which asks; or multiply by "
            "get_replica_context().example_mask and divide by its num_examples; or "
            "return one value per row and combine these with reduce(..., axis=0); or "
            "leave such batches out with distribute_dataset(..., remainder='drop')."
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
        self,
        strategy: "Strategy",
        fn: Function,
        arguments: Arguments,
        gone: Callable[[], None],
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
        self._rest = [*itertools.compress(seen.variables, is_rest)]
        self._placed: tuple[Any, ...] = ()  # the values that the Variables have
        self._aligned: set[int] = (
            set()
        )  # results with one value per row of a short batch
        self._call: Any = None

        def step(state: Any, rest: Any, arrays: Any) -> Any:
            return self._traced_step(state, rest, arrays)

        step.__name__ = self._name
        self.step = compile_step(step, on_recompile="ignore")

    def _traced_step(self, state: Any, rest: Any, arrays: Any) -> tuple[Any, Any]:
        """Traces the function for the second time."""
        if self._strategy.num_replicas_in_sync == 1:
            return self._replica(state, rest, arrays)
        own, whole = PartitionSpec(REPLICA_AXIS), PartitionSpec()

        def specs(is_own: list[bool]) -> tuple[PartitionSpec, ...]:
            return tuple(own if x else whole for x in is_own)

        changed, rest_specs = (
            specs([aggregation(x) == "per_replica" for x in variables])
            for variables in (self._changed, self._rest)
        )
        return jax.shard_map(
            self._replica,
            mesh=self._strategy.mesh.jax_mesh,
            in_specs=(changed, rest_specs, [*specs(self._call[1].is_own)]),
            out_specs=(changed, [*specs(self._seen.differs)]),
            check_vma=False,
        )(state, rest, arrays)

    def _replica(self, state: Any, rest: Any, arrays: Any) -> tuple[Any, Any]:
        fn, arguments = self._call
        pairs = zip((*self._changed, *self._rest), (*state, *rest), strict=True)
        values = {id(variable): x for variable, x in pairs}

        def value_of(variable: Variable) -> Any:
            value = values.get(id(variable), raw_value(variable))
            return jax.tree.map(_own_part, value, is_leaf=_is_per_replica)

        scalars, options = arguments.scalars, {"decisions": self._seen.decisions}
        arrays = [x[0] if i in scalars else x for i, x in enumerate(arrays)]
        _, watch, result = _traced(
            self._strategy, fn, arguments, arrays, value_of, **options
        )
        results, treedef = _flattened(self._name, result)
        expected = {*map(id, self._changed)}
        is_same = treedef == self._seen.treedef
        is_same &= expected <= watch.entered.keys() <= values.keys()
        for key, (variable, before) in watch.entered.items():
            is_changed = _is_changed(before, watch.values[key])
            is_expected = key in expected or isinstance(variable, nnx.RngKey)
            is_same &= is_expected or not is_changed
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

    def _whole(self, x: Leaf) -> PerReplica:
        """Returns a replica's own value as its part of the values of all."""
        count, is_scalar = self._strategy.num_replicas_in_sync, not np.ndim(x)
        rows = _strong(x)[None] if is_scalar else _strong(x)
        return PerReplica(rows, num_replicas=count, is_scalar=is_scalar)

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
        values = self._values()
        is_same = len(values) == len(self._placed)
        if not is_same or not all(map(operator.is_, values, self._placed)):
            self._place()
            self._placed = values = self._values()
        count = len(self._changed)
        return values[:count], values[count:], arguments.arrays

    def _values(self) -> tuple[Any, ...]:
        return (*map(raw_value, self._changed), *map(raw_value, self._rest))

    def _place(self) -> None:
        """Places the Variables on the devices of all replicas.

        The program uses up the arrays of those that it changes. So what several hold is
        copied: clones share arrays, and so do Variables that were set to the same one.
        """
        seen: set[int] = set()
        for variable in (*self._rest, *self._changed):
            before = raw_value(variable)
            is_own = aggregation(variable) == "per_replica"
            place = functools.partial(self._strategy._place, "", is_own=is_own)
            with jax.ensure_compile_time_eval():
                after = jax.tree.map(place, before, is_leaf=_is_per_replica)
            # A placed array may have the memory of the one that it is from.
            ids = {id(x) for x in jax.tree.leaves((before, after))}
            if ids & seen and not _jax.is_tracing():
                after = jax.tree.map(jnp.copy, after)
            seen |= ids
            set_raw_value(variable, after)

    def held(self, fn: Function, arguments: Arguments) -> Any:
        """Returns the compiled step, for a look at the program alone."""
        self._call = fn, arguments
        return self.step

    def __call__(self, fn: Function, arguments: Arguments) -> PyTree:
        """Runs the program, and sets the variables that changed."""
        inputs = self.inputs(arguments)
        if _jax.is_tracing():
            self._check_trace(fn, arguments)
        # A program does not keep its function alive; JAX may have to trace it anew.
        self._call = fn, arguments
        try:
            state, out = self.step(*inputs)
        finally:
            self._call = None
        collections.deque(map(set_raw_value, self._changed, state), 0)
        self._placed = (*state, *inputs[1])
        count = self._strategy.num_replicas_in_sync
        for index in itertools.compress(range(len(out)), self._seen.differs):
            mask = arguments.mask if index in self._aligned else None
            options = {"num_replicas": count, "is_scalar": not self._seen.shapes[index]}
            out[index] = PerReplica(out[index], mask, **options)
        return self._seen.treedef.unflatten(out)

    def _check_trace(self, fn: Function, arguments: Arguments) -> None:
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
