"""`compile_step`: one jit, state donated, layouts kept; never a silent recompile.

A call is that of `jax.jit` on the same pytrees, and next to nothing else. Checks of a
new program happen while JAX traces it, before anything runs or is donated: what has
changed, whether the result fits, whether all processes agree.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import compress
from typing import Any, Generic, Literal, ParamSpec, TypeAlias, TypeVar, cast, overload
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from meshlayout import _checks, _jax, _paths, _render
from meshlayout._annotations import Leaf, PyTree
from meshlayout._batches import batch_axes, check_padding, marked_weights
from meshlayout._counts import counts
from meshlayout.cluster.agreement import compare_program, program_facts
from meshlayout.errors import LayoutWarning, RecompileWarning, StepError, warn
from meshlayout.exchange.partitioner import gathering_once, run_without
from meshlayout.layout_map import LayoutMap, applied
from meshlayout.state import TrainState
from meshlayout.step.inspection import Kinds, StepInspection, changes_of
from meshlayout.step.kernel_gradients import axes_to_hide


P = ParamSpec("P")
R = TypeVar("R")

OnRecompile: TypeAlias = Literal["warn", "error", "ignore"]

# Virtual CPU devices share one thread pool. With many collectives queued, the last
# participant of one finds no thread, and XLA ends the process after 40 seconds.
_MAX_IN_FLIGHT = 8
_num_in_flight = 0  # the last calls of all steps

_OTHER_CHANGE = (
    "no shape, dtype or layout, but the state's code (a new model or optimizer), its "
    "devices, a Python number for an array, the active layout map or a JAX setting"
)


@overload
def compile_step(
    step: None = None,
    *,
    static_argnames: str | Sequence[str] = (),
    on_recompile: OnRecompile = "warn",
    layouts: LayoutMap | None = None,
) -> "Callable[[Callable[P, R]], CompiledStep[P, R]]": ...
@overload
def compile_step(
    step: Callable[P, R],
    *,
    static_argnames: str | Sequence[str] = (),
    on_recompile: OnRecompile = "warn",
    layouts: LayoutMap | None = None,
) -> "CompiledStep[P, R]": ...
@_checks.user_call
def compile_step(
    step: Callable[..., Any] | None = None,
    *,
    static_argnames: str | Sequence[str] = (),
    on_recompile: OnRecompile = "warn",
    layouts: LayoutMap | None = None,
) -> Any:
    """Compiles `step(state, batch, ...) -> (state, aux)`; also a decorator.

    The program is the one that `jax.jit` makes, with the state donated and its layouts
    preserved. The state that you pass is used up: continue with the one that is
    returned. On several virtual CPU devices, every eighth call waits for its result,
    because more steps in flight can deadlock XLA's thread pool.

    Args:
        step: A function of a state (any pytree of arrays) and other pytrees. It
            returns a pair: the new state, in the same structure, shapes and dtypes,
            and any pytree. It is traced with the state's mesh as JAX's ambient mesh.
        static_argnames: Hashable arguments, not arrays; new values make new programs.
        on_recompile: When a call after the first needs a new program: `"warn"`,
            `"error"` (nothing is run and the state is not used up) or `"ignore"`.
        layouts: The layout map that `constrain` applies inside.

    Examples:
        >>> import jax.numpy as jnp
        >>> @compile_step
        ... def train_step(state, batch):
        ...     return {"w": state["w"] + batch.sum()}, {"seen": batch.size}
        >>> state, aux = train_step({"w": jnp.zeros(2)}, jnp.ones(3))
        >>> state["w"].tolist(), int(aux["seen"])
        ([3.0, 3.0], 3)
    """
    options: dict[str, Any] = {"layouts": layouts, "static_argnames": static_argnames}
    make = functools.partial(CompiledStep, on_recompile=on_recompile, **options)
    return make if step is None else make(step)


class _StepProgram:
    """The jitted function for one structure of the arguments and one set of layouts."""

    def __init__(self, treedef: PyTree, layouts: list[Any]) -> None:
        self.treedef, self.layouts, self.mesh = treedef, layouts, _mesh_of(layouts)
        self.key = treedef, *map(_key, layouts)
        self.jitted: Any = None
        self.is_loop = False  # JAX knows the layouts of all arguments
        self.may_share = False  # an array with the state: one has a shape of its
        devices = (layout.device_set for layout in layouts if layout)
        self.devices: frozenset[Any] = frozenset().union(*devices)
        self.is_spread = len(self.devices) > 1
        platforms = {device.platform for device in self.devices}
        self.is_bounded = self.is_spread and platforms == {"cpu"}
        processes = {device.process_index for device in self.devices}
        self.has_peers = min(len(processes), jax.process_count()) > 1
        self.is_shared = self.has_peers and len(processes) == jax.process_count()

    def caller(self, args: PyTree, kwargs: PyTree, *, donates: bool) -> Any:
        """Returns what runs calls like one with these arguments, and refuses others.

        JAX would silently recompile for other layouts, or (0.10, on several devices)
        end the process for an array that was used up or is donated twice. A loop gives
        it `in_shardings`, by which all that it does not tell is whether the state was
        used up, and whether the batch, of which one array is looked at, is elsewhere.
        """
        jitted, flatten = self.jitted, jax.tree_util.default_registry.flatten
        if not self.is_spread:  # where JAX itself refuses them
            return jitted
        leaves = flatten((args, kwargs))[0]
        num_donated = len(flatten(args[:donates])[0])
        types = [*map(type, leaves)]
        # Not of PRNG keys, which have to look for where they are, and are whole.
        is_compared = [issubclass(x, _jax.ArrayImpl) for x in types]
        shardings = [x.sharding for x in compress(leaves, is_compared)]
        is_shared, is_bounded = self.is_shared, self.is_bounded
        one, key = (*args, None)[1], None  # an array of the batch, and where it is
        if type(one) in (dict, tuple) and one:
            key = 0 if type(one) is tuple else next(iter(one))
            one = one[key]
        sharding = getattr(one, "sharding", None)
        is_loop = self.is_loop and sharding is not None and not self.may_share
        # What need not be checked: this call, which was, or the last result.
        last: Any = ref(args[0]) if is_loop else lambda: args[0]

        def check(*call: PyTree) -> None:
            leaves = flatten(call)[0]
            compared = [*compress(leaves, is_compared)]
            ids = {*map(id, leaves[:num_donated])}
            if not (
                [*map(type, leaves)] == types
                and [x.sharding for x in compared] == shardings
                and not any(map(_jax.is_deleted, compared))
                and len(ids) == num_donated
                and ids.isdisjoint(map(id, leaves[num_donated:]))
            ):
                raise OtherProgramError

        def again(*args: Any, **kwargs: Any) -> Any:
            global _num_in_flight
            nonlocal last
            is_next = args[0] is last()
            if is_next and is_loop:
                one = args[1] if key is None else args[1][key]
                is_here = getattr(one, "sharding", None) == sharding
                is_next = is_here and not args[0].step.is_deleted()
            if not is_next:
                check(args, kwargs)
            if is_shared:
                counts.steps += 1
            try:
                result = jitted(*args, **kwargs)
            except Exception:
                counts.steps -= is_shared
                raise
            last = ref(result[0]) if is_loop else object
            if is_bounded:
                _num_in_flight += 1
                if _num_in_flight >= _MAX_IN_FLIGHT:  # threads may count past it
                    _num_in_flight = 0
                    # One array will do: a program's results are ready together.
                    for leaf in flatten(result[0].step if is_loop else result)[0][:1]:
                        leaf.block_until_ready()
            return result

        return again


class OtherProgramError(Exception):
    """A call differs from the last one, or JAX would trace; nothing has run."""


# The program that JAX may trace now, and the arguments of the call that needs it.
_opened: ContextVar[Any] = ContextVar("_opened", default=(None, None))


class CompiledStep(StepInspection, Generic[P, R]):
    """A compiled step; made by `compile_step`.

    Calling it raises StepError, before anything is run or used up, if the step does not
    return a pair, if the new state differs from the old one in structure, shape or
    dtype, if an array was already used up or would be donated twice, or if a new
    program is needed with `on_recompile="error"`. With `donate=False` there is no
    state: nothing is donated, and the function may return anything.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        static_argnames: str | Sequence[str] = (),
        on_recompile: OnRecompile = "warn",
        layouts: LayoutMap | None = None,
        donate: bool = True,
    ) -> None:
        choices = ("warn", "error", "ignore")
        _checks.choice("on_recompile", on_recompile, choices, error=StepError)
        if layouts is not None and not isinstance(layouts, LayoutMap):
            msg = f"layouts must be a LayoutMap, got {_checks.shown(layouts)}."
            raise StepError(msg)
        functools.update_wrapper(self, step, updated=())
        self.__name__: str = getattr(step, "__name__", type(step).__name__)
        names, self.function = static_argnames, step
        self.static_argnames = (names,) if isinstance(names, str) else tuple(names)
        self._options = {"layouts": layouts, "on_recompile": on_recompile}
        self._donates = self.warns_of_padding = donate
        self._signature = inspect.signature(step)
        self._state_name = next(iter(self._signature.parameters), "")
        # Traced inside of a program's trace, for a look at its operations.
        self._inner: Any = jax.jit(step, static_argnames=self.static_argnames)
        self._programs: dict[Any, _StepProgram] = {}
        self._last: _StepProgram | None = None
        self.again: Callable[..., Any] | None = None  # runs calls like the last one
        self.called: Any = None  # the program and types of the last call traced
        self._seen: list[Kinds] = []  # the last calls that were traced

    def __reduce__(self) -> tuple[Any, ...]:
        # Compiled programs belong to this process; a copy compiles its own.
        options = {**self._options, "static_argnames": self.static_argnames}
        make = functools.partial(CompiledStep, donate=self._donates, **options)
        return make, (self.function,)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the step; the state, which comes first, is used up."""
        error = None
        try:
            if kwargs or not args:  # by name or by place is one program
                args, kwargs = cast(Any, self._by_place(args, kwargs))
            if self.again is not None and not _jax.is_tracing():
                return self.again(*args, **kwargs)
        except OtherProgramError:
            pass
        except Exception as problem:
            error = problem
        try:
            return self.call(args, kwargs, error)
        except Exception as problem:
            _checks.show_user_frames(problem)
            raise

    def call(self, args: PyTree, kwargs: PyTree, error: Exception | None) -> Any:
        """Runs a call that is not like the last one, with all checks."""
        args, kwargs = self._by_place(args, kwargs)
        if _jax.is_tracing():
            return self._traced(None, args, kwargs)
        leaves = jax.tree.leaves((args, kwargs))
        # JAX refuses arrays that were used up. A call that fails otherwise with its
        # arrays gone has run, as collectives do when a process is lost.
        is_other = error and ("deleted" not in str(error) or error.__context__)
        if is_other and any(getattr(x, "is_deleted", bool)() for x in leaves):
            raise cast(Exception, error)
        self._check(args, kwargs)
        mesh = _mesh_of(map(layout_of, leaves))
        if mesh and self._donates:  # it comes back on the mesh, and would recompile
            named, whole = self._named(args[:1], {}), PartitionSpec()
            new, is_sharded = _unplaced(named)
            if new and (is_sharded or type(args[0]) is TrainState):
                fact = f"{new[0]} is not on the mesh yet, and goes whole to each device"
                warn(f"{fact}. To shard it, use ml.relayout(x, layout).", LayoutWarning)
            put = functools.partial(_jax.put, sharding=NamedSharding(mesh, whole))
            state = jax.tree.map(lambda x: x if layout_of(x) else put(x), args[0])
            args = (state, *args[1:])
        program = self._program(args, kwargs)
        if error and program is self._last:  # else, on other devices it may succeed
            raise error
        again, seen = program.caller(args, kwargs, donates=self._donates), self._seen
        with _may_trace(program, (args, kwargs)):
            result = again(*args, **kwargs)
        # After a trace, what the next call is given may be on a mesh by then.
        self._last, self.again = program, again if self._seen is seen else None
        return result

    def _program(
        self, args: PyTree, kwargs: PyTree, *, is_call: bool = True
    ) -> _StepProgram:
        """Returns the program for arguments, which may be abstract."""
        leaves, treedef = jax.tree.flatten((args, kwargs))
        program = _StepProgram(treedef, list(map(layout_of, leaves)))
        # Processes compare what a call traces, and may not all trace for a look at it.
        if is_call or not program.has_peers:
            program = self._programs.setdefault(program.key, program)
        if program.jitted is not None:
            return program

        @functools.wraps(self.function, updated=())  # JAX shows its arguments' names
        def traced(*args: Any, **kwargs: Any) -> Any:
            return self._traced(program, args, kwargs)

        traced.__name__ = self.__name__
        options: dict[str, Any] = {"static_argnames": self.static_argnames}
        if self._donates:
            layouts, _ = treedef.unflatten(program.layouts)
            options |= {"donate_argnums": 0, "out_shardings": (layouts[0], None)}
            # JAX takes none for arguments by name, or that are static; and from one
            # device it would move all to another.
            is_plain = program.is_spread and not (kwargs or self.static_argnames)
            is_placed = all(isinstance(x, NamedSharding) for x in program.layouts)
            if type(args[0]) is TrainState and is_plain and is_placed:
                program.is_loop, options["in_shardings"] = True, layouts
        program.jitted = jax.jit(traced, **options)
        if self.executable:
            program.jitted = self.executable(program, self.static_argnames)
        return program

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Traces the step for these arguments, as `jax.jit(...).trace` does."""
        args, kwargs = self._by_place(args, kwargs)
        program = self._program(args, kwargs, is_call=False)
        with _may_trace(program):
            return program.jitted.trace(*args, **kwargs)

    def _traced(
        self, program: _StepProgram | None, args: PyTree, kwargs: PyTree
    ) -> Any:
        """Runs the step inside a program's trace; without one, inside any other."""
        leaves, treedef = jax.tree.flatten((args, kwargs))
        why, now, call = "", None, None
        if program is None:
            program = _StepProgram(treedef, list(map(_jax.sharding_of, leaves)))
        elif any(isinstance(x, Tracer) for x in leaves):  # jax_debug_nans gives arrays
            opened, call = _opened.get()
            if opened is not program or treedef != program.treedef:
                raise OtherProgramError
            now = self._kinds(args, kwargs, program.layouts)
            if tx := getattr((*args, None)[0], "tx", None):
                now["the optimizer"] = str(id(tx)), None
            if call is not None:
                self.called = program, [getattr(x, "aval", x) for x in leaves]
                why = self._explain(now) if self._last else ""
        layouts, names = self._options["layouts"], self._named(args, kwargs)
        scope = applied(layouts, names) if layouts else contextlib.nullcontext()
        inner = functools.partial(self._inner, *args, **kwargs)
        with _jax.ambient_mesh(program.mesh), scope:
            # Until all agree, it is behind those that run this call already.
            num_steps = int(call is not None and program.is_shared)
            counts.steps -= num_steps
            try:
                traced = self._inner.trace(*args, **kwargs)
                jaxpr = traced.jaxpr
                if call is not None and program.has_peers:
                    constants = [*jaxpr.consts, *_jax.inner_constants(jaxpr.jaxpr)]
                    named = {f"constant {i}": x for i, x in enumerate(constants)}
                    named |= self._named(*call)
                    facts = functools.partial(program_facts, named, str(jaxpr.jaxpr))
                    compare_program(self.__name__, program.devices, facts, why)
            finally:
                counts.steps += num_steps
            if call is not None and self.warns_of_padding and marked_weights:
                check_padding(self.__name__, call, _jax.operands_of(jaxpr.jaxpr))
            if call is not None and self.warns_of_padding and program.mesh:
                _check_rows(self._named((None, *call[0][1:]), call[1]), program.mesh)
            if layouts and now is not None:
                inner = gathering_once(traced, leaves, program.layouts) or inner
            # Convolutions and pooling, and their gradients.
            every = _jax.equations(jaxpr.jaxpr)
            if windows := [eqn for eqn in every if "window_strides" in eqn.params]:
                placed = treedef.unflatten(map(_placed, leaves, program.layouts))
                if hidden := axes_to_hide(windows, jaxpr.jaxpr, placed):
                    inner = functools.partial(run_without, hidden, inner)
            result = inner()
        if self._donates:
            shapes = {*map(jnp.shape, jax.tree.leaves(args[0]))}
            others = map(jnp.shape, jax.tree.leaves((args[1:], kwargs)))
            program.may_share |= not shapes.isdisjoint(others)
            result = self._kept(args[0], result, program.layouts)
        if now is not None:
            self._seen = [*self._seen[-15:], now]
        return result

    def _kept(self, old: PyTree, result: PyTree, layouts: list[Any]) -> Any:
        """Returns a step's result, if its state is like the one that came in."""
        if not isinstance(result, tuple) or len(result) != 2:
            raise StepError(
                f"{self.__name__} returned {_checks.type_text(result)}; a step returns "
                "a pair, (state, aux), with aux=None if there is nothing else."
            )
        new, aux = result
        olds, treedef = jax.tree.flatten(old)
        before, after = (self._kinds((state,), {}) for state in (old, new))
        if before != after or treedef != jax.tree.structure(new):
            changes = [*changes_of(before, after), "its containers changed"]
            fact = f"{self.__name__} returned another state than came in: {changes[0]}."
            fix = "Return it in the structure, shapes and dtypes that it had: cast or "
            fix += "reshape it back."
            if jax.tree.structure(aux) == treedef != jax.tree.structure(new):
                fix = "Write `return state, aux`: the state comes first."
            raise StepError(f"{fact} {fix}")
        return treedef.unflatten(map(_like, jax.tree.leaves(new), olds, layouts)), aux

    def _check(self, args: PyTree, kwargs: PyTree) -> None:
        """Raises StepError for arrays that were used up or would be donated twice."""
        state = args[0] if self._donates else None
        if type(state) is not TrainState and _paths.holds_modules(state):
            raise StepError(
                f"{self.__name__}: the state holds an NNX module, no pytree of arrays. "
                "Pass what nnx.split(module) gives, or a TrainState; or keep @nnx.jit."
            )
        donated = {*map(id, jax.tree.leaves(state))}
        owners: dict[int, str] = {}
        for name, leaf in self._named(args, kwargs).items():
            fact, other = "", owners.setdefault(id(leaf), name)
            if getattr(leaf, "is_deleted", bool)():
                fact = f"{name!r} was used up by an earlier call of a step. Continue"
                fact += " with the state that the step returned."
            elif name != other and isinstance(leaf, jax.Array) and id(leaf) in donated:
                fact = f"{other!r} and {name!r} are the same array, whose memory the"
                fact += " step reuses. Copy one with jax.numpy.copy."
            if fact:
                raise StepError(f"{self.__name__}: {fact}") from None

    def _explain(self, now: Kinds) -> str:
        """Warns of the differences from the most similar earlier call; returns them."""
        # A step looks for the shapes of its metrics without any: no call is like that.
        names = {name.partition("/")[0] for name in now}
        alike = [x for x in self._seen if {n.partition("/")[0] for n in x} == names]
        every = (changes_of(seen, now) for seen in alike or self._seen)
        change = [*min(every, key=len, default=[]), _OTHER_CHANGE][0]
        line = f"{self.__name__} recompiles: {change}."
        if self._options["on_recompile"] == "error":
            raise StepError(line)
        if self._options["on_recompile"] == "warn":
            warn(line, RecompileWarning)
        return change

    def _kinds(
        self, args: PyTree, kwargs: PyTree, layouts: Sequence[Any] = ()
    ) -> Kinds:
        """Returns the kinds of arguments by name, and layouts if they are given."""
        treedef = jax.tree.structure((args, kwargs))
        is_call, layouts = bool(layouts), layouts or [None] * treedef.num_leaves
        on_mesh = self._named(*treedef.unflatten([x or "" for x in layouts]))

        def kind(name: str, leaf: Leaf) -> Any:
            if name.partition("/")[0] in self.static_argnames:
                return repr(leaf)
            kind = jax.typeof(leaf)  # a new state's weak types become those of the old
            if is_call and kind.weak_type:
                text = _render.array_text(kind.dtype, kind.shape)
                return f"{text} of a Python number, not of np.{kind.dtype}(...)"
            return kind.dtype, kind.shape

        named = self._named(args, kwargs)
        return {name: (kind(name, x), on_mesh[name]) for name, x in named.items()}

    def _named(self, args: PyTree, kwargs: PyTree) -> dict[str, Any]:
        """Returns every leaf of some arguments, by parameter and path."""
        bound = self._signature.bind_partial(*args, **kwargs)
        entries = jax.tree_util.tree_flatten_with_path(dict(bound.arguments))[0]
        text = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
        return {text(keys): leaf for keys, leaf in entries}

    def _by_place(self, args: PyTree, kwargs: PyTree) -> tuple[Any, Any]:
        bound = self._signature.bind(*args, **kwargs)
        return bound.args, bound.kwargs


@contextlib.contextmanager
def _may_trace(program: _StepProgram, call: PyTree = None) -> Iterator[None]:
    """Lets JAX trace a program inside: for a call's arguments, or for inspection."""
    token = _opened.set((program, call))
    try:
        yield
    finally:
        _opened.reset(token)


def layout_of(leaf: Leaf) -> Any:
    """Returns the sharding of a leaf that is bound to one, else None."""
    if isinstance(leaf, jax.Array):  # a tracer, if it is called inside another jit
        return None if isinstance(leaf, Tracer) or not leaf.committed else leaf.sharding
    return leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None


def _unplaced(named: Mapping[str, Leaf]) -> tuple[list[str], bool]:
    """Returns what is on no mesh, but for a few numbers, and if anything is sharded."""
    layouts = {name: layout_of(x) for name, x in named.items()}
    new = [name for name, x in named.items() if np.size(x) > 8 and not layouts[name]]
    return new, not all(x.is_fully_replicated for x in layouts.values() if x)


def _check_rows(named: Mapping[str, Leaf], mesh: Any) -> None:
    """Warns of a batch that nobody has placed, whose rows all devices compute."""
    axes, (unplaced, is_sharded) = batch_axes(mesh), _unplaced(named)
    shards = np.prod([mesh.shape[axis] for axis in axes], dtype=int)
    rows = [name for name in unplaced if np.shape(named[name])[0] % shards == 0]
    if rows and shards > 1 and not is_sharded:
        way = f"ml.relayout({rows[0].partition('/')[0]}, mesh.layout({axes[0]!r}, ...))"
        fact = f"{rows[0]} is whole on all {mesh.size} devices, which all compute the"
        warn(f"{fact} same. Write {way}.", LayoutWarning)


def _placed(leaf: Leaf, layout: Sharding | None) -> Any:
    """Returns a traced array with its layout, which only the program knows."""
    if not isinstance(leaf, Tracer) or layout is None:
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout)


def _mesh_of(layouts: Iterable[Sharding | None]) -> Any:
    return next((x.mesh for x in layouts if isinstance(x, NamedSharding)), None)


def as_weak_as(old: Leaf, leaf: Leaf) -> Any:
    """Returns a leaf with an older one's weak type, as a change would recompile."""
    return _jax.with_weak_type(leaf, weak_type=jax.typeof(old).weak_type)


def _like(leaf: Leaf, old: Leaf, layout: Any) -> Any:
    """Returns a leaf of a new state, with the old leaf's type and layout.

    JAX moves results to the host's memory first and then shards them: TPU compilers
    would gather on the host, or fail. tests/test_tpu_programs.py notices.
    """
    leaf = as_weak_as(old, leaf)
    if getattr(layout, "memory_kind", None) != "pinned_host" or _jax.is_on_host(leaf):
        return leaf
    on_device = layout.with_memory_kind("device")
    return jax.device_put(_jax.constrain(leaf, on_device), layout)


def _key(layout: Sharding | None) -> Any:
    """Returns a layout without the trailing `None`s of its spec, which mean nothing."""
    if not isinstance(layout, NamedSharding):
        return layout
    spec = [*layout.spec]
    while spec and spec[-1] is None:
        spec.pop()
    return layout.mesh, *spec, layout.memory_kind
