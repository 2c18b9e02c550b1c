"""A function per replica, compiled as one program for all of them.

The function is traced twice. The first trace is under `jax.vmap` over the replicas,
whose batching rules tell what differs between replicas: which Variables, which
gradients that must still be summed, and which results are equal everywhere. The second
one is compiled under `jax.shard_map`, with the Variables that change as the state of a
`compile_step`. (Compiled, `vmap` would gather whole batches, and the types of
`shard_map` refuse scans whose carry starts as a constant, as in recurrent layers.)
"""

import collections
import contextlib
import functools
import gc
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from meshlayout import _checks, _jax
from meshlayout._annotations import Leaf, PyTree
from meshlayout.collectives import ReplicaContext, entered
from meshlayout.distribute.arguments import Arguments, is_leaf
from meshlayout.distribute.capture import Roots
from meshlayout.distribute.padded_statistics import padding_left_out
from meshlayout.distribute.replica_trace import (
    GIVEN,
    MARKS,
    MarksNeeded,
    ReplicaTrace,
    patches,
)
from meshlayout.distribute.values import (
    REPLICA_AXIS,
    PerReplica,
    check_replicas,
    is_per_replica,
)
from meshlayout.distribute.variables import (
    TRACE,
    Modes,
    Variable,
    aggregation,
    raw_value,
    set_raw_value,
)
from meshlayout.errors import RecompileWarning, StrategyError, warn
from meshlayout.step import compile_step


_MOST_PROGRAMS = 64
_phases = itertools.count()


class ReplicaProgram:
    """A function, compiled for the replicas of a strategy and one signature.

    It calls `gone` when one of its objects is deleted.
    """

    def __init__(
        self, strategy: Any, fn: Any, arguments: Arguments, gone: Callable[[], None]
    ) -> None:
        self._strategy, self._count = strategy, strategy.num_replicas_in_sync
        self.roots = roots = Roots(fn, arguments.named())
        self._name = roots.name
        with roots.refuse_changes(self._name):
            self._examine(fn, arguments)
        nodes, self._nodes = self._nodes, []  # which a program does not keep alive
        roots.keep({*map(id, (*self._changed, *self._others, *nodes))}, gone)
        self.modes = Modes(nodes, gone)
        # The values of Variables after the last call.
        self._state: Any = (self,) * len(self._changed)
        self._rest: Any = (self,) * len(self._others)
        # Which results have one value per row of a short batch.
        self._aligned: set[int] = set()
        self._call: Any = None

        def step(state: PyTree, rest: PyTree, arrays: PyTree) -> Any:
            return self._traced_step(state, rest, arrays)

        step.__name__ = self._name
        self._step = compile_step(step, on_recompile="ignore")
        self._step.warns_of_padding = False  # the mask of a replica's rows does

    def _examine(self, fn: Any, arguments: Arguments) -> None:
        """Traces the function under `jax.vmap` over the replicas, to see what it does.

        A batch with padding gets twice its rows, so that comparison with the second
        trace shows which results have one value per row.
        """
        count, has_mask = self._count, arguments.mask is not None

        def trace(*names: str) -> None:
            def examined(arrays: list[Any], *values: jax.Array) -> tuple[()]:
                marks = dict(zip(names, values, strict=True))
                of, options = self._placeholder, {"path_of": path_of, "marks": marks}
                traced = self._traced(fn, arguments, arrays, of, **options)
                self._read(arguments, arrays, *traced)
                return ()

            function: Any = examined
            for name in names:
                axes = [0 if name == other else None for other in names]
                function = jax.vmap(function, (None, *axes), axis_name=name)
            if count > 1:
                axes = [0 if is_own else None for is_own in arguments.is_own]
                sizes: dict[str, Any] = {"axis_name": REPLICA_AXIS, "axis_size": count}
                function = jax.vmap(function, (axes, *[None] * len(names)), **sizes)
            mark = jax.ShapeDtypeStruct([1], bool)
            jax.eval_shape(function, arrays, *[mark] * len(names))

        path_of, self._rows = self.roots.path_of, -1  # until a trace is read
        arrays = list(arguments.arrays)
        for index in itertools.compress(range(len(arrays)), arguments.is_own):
            (length, *rest), dtype = arrays[index].shape, arrays[index].dtype
            rows = length // count * (1 + has_mask)
            shape = rest if index in arguments.scalars else (rows, *rest)
            shape = (count, *shape) if count > 1 else shape
            arrays[index] = jax.ShapeDtypeStruct(shape, dtype)
        try:
            try:
                trace()
            except MarksNeeded:
                trace(*MARKS)
        except Exception as error:
            _checks.show_user_frames(error)
            if self._rows < 0 and (has_mask or isinstance(error, NotImplementedError)):
                error.add_note(
                    "run: shapes are those of a first trace, under jax.vmap over the "
                    "replicas, and for a batch with padding with twice its rows. Give "
                    "callbacks a vmap_method; in reshape, write -1 for the rows."
                )
            raise

    def _placeholder(self, variable: Variable) -> Any:
        """Returns a traced value: Python must not compute with current values."""
        mesh = self._strategy.mesh

        def value(x: Leaf) -> Any:
            if isinstance(x, PerReplica):
                check_replicas(x, mesh, "a variable of each replica's own")
                own = x.array.reshape(x.num_replicas, *x.shape)
                return own[jax.lax.axis_index(REPLICA_AXIS)]
            if isinstance(x, _jax.ArrayImpl) and x.is_deleted():
                name = self.roots.path_of(variable)
                msg = f"{name} was used up: run reuses the memory of what it changes. "
                msg += "Copy it by copy.deepcopy(model), or np.array(x)."
                raise StrategyError(msg)
            is_abstract = isinstance(x, jax.ShapeDtypeStruct)
            x = jnp.zeros(x.shape, x.dtype) if is_abstract else x
            return jax.lax.optimization_barrier(_strong(x))

        return jax.tree.map(value, raw_value(variable), is_leaf=is_per_replica)

    def _read(
        self, arguments: Arguments, inputs: list[Any], trace: ReplicaTrace, result: Any
    ) -> None:
        """Reads a first trace from inside, and refuses what replicas cannot do."""
        mask, self._changed = trace.context.mask, trace.changed()
        self._rows = rows = 0 if mask is None else mask.shape[0]
        ids = {*map(id, self._changed)}
        self._others = [x for x, _ in trace.entered.values() if id(x) not in ids]
        self._nodes = [node for node, *_ in trace.nodes.values()]
        self._decisions = trace.decisions
        differing = [
            self.roots.path_of(x)
            for x in self._changed
            if aggregation(x) != "per_replica" and trace.differs(trace.values[id(x)])
        ]
        if differing:
            raise StrategyError(
                f"{self._name} would leave different values of "
                f"{', '.join(differing[:3])} on the replicas: the new values are "
                "computed from what differs between them. Combine that first, as "
                "get_replica_context().all_reduce('MEAN', x) does, or say how the "
                "variable's values become one: nnx.Variable(x, aggregation='mean'), "
                "or 'sum', 'first', 'per_replica'."
            )
        self._check_states(arguments.unflatten(inputs), trace, result)
        arrays, self._treedef = _flattened(self._name, result)
        self._shapes = [x.shape for x in arrays]
        self._differs = list(map(trace.differs, arrays))
        is_safe = all(shape[:1] == (rows,) for shape in self._shapes) and all(
            (isinstance(x, nnx.BatchStat | nnx.RngState) or aggregation(x) == "metric")
            and "aggregation" not in x.get_metadata()
            for x in self._changed
        )
        if rows and not is_safe and not trace.context.mask_was_read:
            raise StrategyError(
                f"{self._name} got a short batch, which is padded to the shape of the "
                "others, and did not ask which rows are real: padding would count. Use "
                "losses.compute_average_loss, which asks; or multiply by get_replica_"
                "context().example_mask and divide by its num_examples; or return one "
                "value per row and combine these with reduce(..., axis=0); or leave "
                "such batches out with distribute_dataset(..., remainder='drop')."
            )

    def _check_states(self, call: Any, trace: ReplicaTrace, result: PyTree) -> None:
        """Refuses a Linen state that is returned with differing changes.

        A result is a state if it has an argument's structure and something was added to
        one of its leaves. Gradients, to which nothing was added, may differ.
        """
        args, kwargs = call
        parts = [result, *jax.tree.leaves(result, is_leaf=lambda x: x is not result)]
        text = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
        for state, part in itertools.product((*args, *kwargs.values()), parts):
            before, structure = jax.tree.flatten(state, is_leaf=is_leaf)
            after, new_structure = jax.tree.flatten_with_path(part)
            if jax.tree_util.treedef_is_leaf(structure) or structure != new_structure:
                continue  # two numbers are no states
            names = [text(key) for key, x in after if trace.differs(x)]
            ids = {id(x) for x in before if np.ndim(x)}
            if names and any(ids & trace.terms_of(x) for _, x in after):
                how = "Combine gradients and other changes, not their result: get_"
                how += "replica_context().all_reduce('SUM', grads)."
                wholes = jax.tree.leaves(part, is_leaf=lambda x: hasattr(x, "compute"))
                if all(hasattr(x, "compute") for x in wholes if trace.differs(x)):
                    how = "Return the metric of the batch, acc.empty().update(...), and"
                    how += " merge it outside of run: total = total.merge(strategy."
                    how += "reduce('SUM', result, axis=None))."
                raise StrategyError(
                    f"{self._name} returns a state that came in the same on all "
                    f"replicas, and would leave different values of {', '.join(names)} "
                    f"on them. {how}"
                )

    def _traced(
        self,
        fn: Any,
        arguments: Arguments,
        arrays: list[Any],
        value_of: Callable[[Variable], Any],
        **options: Any,
    ) -> tuple[ReplicaTrace, PyTree]:
        """Runs the function on one replica, while it is traced."""
        mask = arrays[-1] if arguments.mask is not None else None
        axis = REPLICA_AXIS if self._count > 1 else None
        context = ReplicaContext(self._strategy, axis, self._count, mask)
        # Jitted functions inside are traced anew: they may read this trace's context.
        with (
            _jax.trace_phase(next(_phases)),
            self._strategy._inside(),
            entered(context),
            _without_collecting(),
            patches,
            _jax.short_sharding_errors,  # Flax asks for one at each value
            padding_left_out,
            ReplicaTrace(context, value_of, **options) as trace,
        ):
            for x in itertools.compress(arrays, map(operator.not_, arguments.is_own)):
                trace.note_terms(x, frozenset([id(x), GIVEN]))
            args, kwargs = arguments.unflatten(arrays)
            result = fn(*args, **kwargs)
            trace.check_attributes(self._name)
        return trace, result

    def _traced_step(self, state: PyTree, rest: PyTree, arrays: Any) -> tuple[Any, Any]:
        if self._count == 1:
            return self._replica(state, rest, arrays)

        def specs(flags: Iterable[bool]) -> list[PartitionSpec]:
            return [PartitionSpec(*[REPLICA_AXIS] * is_own) for is_own in flags]

        def of(variables: list[Variable]) -> tuple[PartitionSpec, ...]:
            return tuple(specs(aggregation(x) == "per_replica" for x in variables))

        changed, (_, arguments) = of(self._changed), self._call
        return jax.shard_map(
            self._replica,
            mesh=self._strategy.mesh.jax_mesh,
            in_specs=(changed, of(self._others), specs(arguments.is_own)),
            out_specs=(changed, specs(self._differs)),
            check_vma=False,
        )(state, rest, arrays)

    def _replica(self, state: PyTree, rest: PyTree, arrays: PyTree) -> tuple[Any, Any]:
        variables = map(id, (*self._changed, *self._others))
        values = dict(zip(variables, (*state, *rest), strict=True))

        def own_part(x: Leaf) -> Any:
            return x.array[0 if x.is_scalar else ...] if is_per_replica(x) else x

        def value_of(variable: Variable) -> Any:
            value = values.get(id(variable), raw_value(variable))
            return jax.tree.map(own_part, value, is_leaf=is_per_replica)

        fn, arguments = self._call
        scalars, options = arguments.scalars, {"decisions": self._decisions}
        arrays = [x[0] if i in scalars else x for i, x in enumerate(arrays)]
        trace, result = self._traced(fn, arguments, arrays, value_of, **options)
        results, treedef = _flattened(self._name, result)
        is_same = [*map(id, trace.changed())] == [*map(id, self._changed)]
        is_same &= trace.entered.keys() <= values.keys()
        if not is_same or treedef != self._treedef:
            msg = f"{self._name} differed when it was traced again: it "
            msg += "depends on what changes in Python. Pass that as an argument."
            raise StrategyError(msg)
        new = []
        for variable in self._changed:
            form = self._whole if aggregation(variable) == "per_replica" else _strong
            new.append(jax.tree.map(form, trace.values[id(variable)]))
        return tuple(new), list(map(self._result, itertools.count(), results))

    def _whole(self, x: Leaf) -> Any:
        """Returns a replica's own value as its part of the values of all."""
        x = _strong(x)
        if self._count == 1:
            return x
        rows = jnp.atleast_1d(x)
        return PerReplica(rows, num_replicas=self._count, is_scalar=not x.ndim)

    def _result(self, index: int, x: jax.Array) -> jax.Array:
        shape, rows = self._shapes[index], self._rows
        if not self._differs[index]:
            return x
        if rows and (x.shape[:1], shape[:1]) == ((rows // 2,), (rows,)):
            self._aligned.add(index)
        elif x.shape != shape:
            raise StrategyError(
                f"{self._name} got a short batch and returned an array of shape "
                f"{x.shape}, which is not one value for each of a replica's "
                f"{rows // 2} rows: which of its values are padding is unknown. "
                "Combine rows with get_replica_context().example_mask, or leave such "
                "batches out with distribute_dataset(..., remainder='drop')."
            )
        return x if shape else x[None]

    def _place(self) -> None:
        """Places the Variables on the devices of all replicas.

        Arrays that several share are copied: a program donates the arrays it changes.
        """
        seen: dict[int, Any] = {}
        for variable in (*self._others, *self._changed):
            before = raw_value(variable)
            with jax.ensure_compile_time_eval():
                value = self._strategy._placed(variable)
            # With jax 0.7, a placed array may have the memory of the one it is from.
            leaves = {id(x): x for x in jax.tree.leaves((before, value))}
            if leaves.keys() & seen.keys() and not _jax.is_tracing():
                value = jax.tree.map(jnp.copy, value)
            seen |= leaves
            set_raw_value(variable, value)
        self._state = tuple(map(raw_value, self._changed))
        self._rest = tuple(map(raw_value, self._others))

    def lowered(self, fn: Any, arguments: Arguments) -> tuple[Any, tuple[Any, ...]]:
        """Returns the compiled step and its inputs, to inspect the program."""
        self._call = fn, arguments
        self._place()
        return self._step, (self._state, self._rest, arguments.arrays)

    def __call__(self, fn: Any, arguments: Arguments) -> PyTree:
        """Runs the program, and sets the variables that changed."""
        before = itertools.chain(self._state, self._rest)
        now = map(raw_value, itertools.chain(self._changed, self._others))
        if _jax.is_tracing() or not all(map(operator.is_, now, before)):
            if not all(getattr(x, TRACE).is_valid() for x in self._changed):
                msg = f"{self._name} changes variables from outside of the function "
                msg += "that is being compiled. run compiles by itself: call it without"
                msg += " jit, or pass the objects through nnx.jit as arguments."
                raise StrategyError(msg)
            self._place()
        # A program does not keep its function alive, so JAX may have to retrace it.
        self._call = fn, arguments
        try:
            self._state, out = self._step(self._state, self._rest, arguments.arrays)
        finally:
            self._call = None
        collections.deque(map(set_raw_value, self._changed, self._state), 0)
        value_of = functools.partial(PerReplica, num_replicas=self._count)
        for index in itertools.compress(range(len(out)), self._differs):
            mask = arguments.mask if index in self._aligned else None
            out[index] = value_of(out[index], mask, is_scalar=not self._shapes[index])
        return self._treedef.unflatten(out)


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    # Most of a trace's objects stay: collecting takes a tenth of a first call.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _strong(x: Leaf) -> jax.Array:
    return _jax.with_weak_type(jnp.asarray(x), weak_type=False)


def _flattened(name: str, result: PyTree) -> tuple[list[jax.Array], Any]:
    """Returns what a function returned as arrays, and its structure."""
    # A Variable or state, as gradients are, has values; other NNX objects are refused.
    values = (nnx.Variable, nnx.State)
    leaves, treedef = jax.tree.flatten(
        result, is_leaf=lambda x: is_leaf(x) and not isinstance(x, values)
    )
    kinds = jax.Array | np.ndarray | np.generic | bool | int | float | complex
    for leaf in leaves:  # JAX would take a text for the name of a dtype
        if not isinstance(leaf, kinds):
            msg = f"{name} returned {_checks.shown(leaf)}, which is not an array."
            raise StrategyError(msg)
    return list(map(_strong, leaves)), treedef


class ProgramCache:
    """The programs of a strategy; the least recently called are dropped.

    A function that is redefined with the same code reuses its program.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        # Of programs, the last called first: function and signature; roots; the program
        # itself, until an object of it is gone; how many roots that key had by then.
        self._programs: list[tuple[Any, Roots, list[ReplicaProgram], int]] = []

    def find(self, fn: Any, arguments: Arguments) -> ReplicaProgram:
        """Returns the program for a call, compiling it if there is none yet."""
        code = fn
        while isinstance(code, functools.partial):
            code = code.func
        key = getattr(code, "__code__", type(code)), arguments.signature
        differences, numbers = list[str | None](), [0]
        for index, (other, roots, held, number) in enumerate(self._programs):
            if other == key:
                difference = roots.difference(fn, arguments.objects)
                if not difference and held and held[0].modes.are_current():
                    if index:
                        self._programs.insert(0, self._programs.pop(index))
                    return held[0]
                differences.append(difference)
                numbers.append(number)
        held: list[ReplicaProgram] = []
        program = ReplicaProgram(self._strategy, fn, arguments, held.clear)
        held.append(program)
        number = max(numbers) + all(differences)
        self._programs.insert(0, (key, program.roots, held, number))
        del self._programs[_MOST_PROGRAMS:]
        if number == 3 and all(differences):
            text = (
                f"{program.roots.name} was compiled a third time for arguments of the "
                f"same shapes and types: {differences[0]} stands for another object "
                "than before. Pass arrays and numbers that change as arguments, or "
                "keep them in an nnx.Variable. A new model or optimizer compiles again "
                "even as an argument: nnx.update(model, nnx.state(new_model)) does not."
            )
            warn(text, RecompileWarning)
        return program
