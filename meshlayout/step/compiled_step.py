"""`compile_step`: one jit, state donated, layouts kept; never a silent recompile.

A call is that of `jax.jit` on the same pytrees, and next to nothing else. What is to be
said about a new program is said while JAX traces it, when nothing has run and nothing
was donated: what has changed, whether the result fits, whether all processes agree.
"""

import contextlib
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any, Generic, Literal, ParamSpec, TypeAlias, TypeVar, cast, overload

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.tree_util import default_registry

from meshlayout import _checks, _jax, _paths, _render
from meshlayout._annotations import Leaf, PyTree
from meshlayout._batches import check_padding, marked_weights
from meshlayout._counts import counts
from meshlayout.cluster.agreement import compare_program, program_facts
from meshlayout.errors import RecompileWarning, StepError, stack_level
from meshlayout.exchange.halos import run_without
from meshlayout.layout_map import LayoutMap, activate
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.step.inspection import StepInspection, layout_of, mesh_text
from meshlayout.step.kernel_gradients import axes_to_hide


P = ParamSpec("P")
R = TypeVar("R")

OnRecompile: TypeAlias = Literal["warn", "error", "ignore"]

# Virtual CPU devices share one thread pool. With many collectives queued, the last
# participant of one finds no thread, and XLA ends the process after 40 seconds.
_MAX_IN_FLIGHT = 8

_OTHER_CHANGE = (
    "no shape, dtype or layout, but the state's code (a new model or optimizer), its "
    "devices, a Python number for an array, the active layout map or a JAX setting"
)

# Type and layout of every argument of a call, by name.
_Seen: TypeAlias = dict[str, tuple[str, str]]


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

    The program is the one `jax.jit` makes, with the state donated and its layouts
    the same coming out as going in. The state that was passed is used up: continue with
    the one that is returned. On several virtual CPU devices, every eighth call waits
    for its result, because more steps in flight can deadlock XLA's thread pool.

    Args:
        step: A function of a state (any pytree of arrays) and other pytrees. It
            returns a pair: the new state, in the same structure, shapes and dtypes,
            and any pytree. It is traced with the state's mesh as JAX's ambient mesh.
        static_argnames: Hashable arguments that are not arrays; a new value makes a
            new program.
        on_recompile: When a call after the first needs a new program: `"warn"`,
            `"error"` (nothing is run and the state is not used up) or `"ignore"`.
        layouts: The layout map that `constrain` follows inside.

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


class _Jitted:
    """The jitted function for one structure of the arguments and one set of layouts."""

    def __init__(self, treedef: PyTree, layouts: list[Any]) -> None:
        self.treedef, self.layouts, self.mesh = treedef, layouts, _mesh_of(layouts)
        self.key = treedef, *map(_key, layouts)
        self.jitted: Any = None
        # Of the last call: where its arrays were, without PRNG keys, which have to look
        # for that and are whole; and how many leaves were the state's.
        self.types: list[type] = []
        self.shardings: list[Any] = []
        self.is_compared: list[bool] = []
        self.num_donated = 0
        # Of a TrainState's program: a weak reference to the state that the last call
        # returned, its metrics, where other arguments were, and the state's shapes.
        self.has_state, self.metrics = False, cast(Any, None)
        self.state: Callable[[], object] = object  # like no other
        self.other_shardings: list[Any] = []
        self.shapes: set[Any] = set()
        self.arguments: Any = None  # of a call, while it is under way
        devices = (layout.device_set for layout in layouts if layout)
        self.devices: frozenset[Any] = frozenset().union(*devices)
        self.is_spread = len(self.devices) > 1
        is_cpu = all(device.platform == "cpu" for device in self.devices)
        self.is_bounded = self.is_spread and is_cpu
        processes = {device.process_index for device in self.devices}
        self.has_peers = min(len(processes), jax.process_count()) > 1
        self.is_shared = self.has_peers and len(processes) == jax.process_count()

    def goes_on(self, *args: Any) -> bool:
        """Returns whether a call goes on where its last one ended, in a loop.

        That passes on a TrainState and metrics, whose arrays the program has made: one
        of them tells whether the state was used up. Others have to be looked at.
        """
        if args[0] is not self.state():
            return False
        has_metrics = self.metrics is not None and args[-1] is self.metrics
        leaves, _ = default_registry.flatten(args[1:-1] if has_metrics else args[1:])
        try:
            if [leaf.sharding for leaf in leaves] != self.other_shardings:
                return False
            for leaf in leaves if self.is_spread else ():  # else, JAX refuses them
                if leaf.is_deleted() or leaf.shape in self.shapes:
                    return False
        except AttributeError:  # of what is no array now
            return False
        return not (self.is_spread and args[0].step.is_deleted())

    def is_like_last(self, args: PyTree, kwargs: PyTree) -> bool:
        """Returns, fast, whether the arrays of a call are where those of the last were.

        JAX would compile again without a word, or (0.10) end the process for an array
        that was used up or is donated twice.
        """
        leaves, _ = default_registry.flatten((args, kwargs))
        compared = [*compress(leaves, self.is_compared)]
        donated, rest = leaves[: self.num_donated], leaves[self.num_donated :]
        ids = {*map(id, donated)}
        return (
            [*map(type, leaves)] == self.types
            and [leaf.sharding for leaf in compared] == self.shardings
            and not any(map(_jax.is_deleted, compared))
            and len(ids) == len(donated)
            and ids.isdisjoint(map(id, rest))
        )


class CompiledStep(StepInspection, Generic[P, R]):
    """A compiled step; made by `compile_step`.

    Calling it raises StepError, before anything is run or used up, if what the step
    returns is not a pair, if its state has another structure, shape or dtype than the
    one that came in, if an array was used up before or would be donated twice; and with
    `on_recompile="error"` if a new program would be needed. With `donate=False` there
    is no state: nothing is donated, and the function may return anything.

    Attributes:
        function: The function, whose `static_argnames` are not arrays.
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
        self._donates = donate
        self._signature = inspect.signature(step)
        self._state_name = next(iter(self._signature.parameters), "")
        # Traced inside of a program's trace, for a look at its operations.
        self._inner: Any = jax.jit(step, static_argnames=self.static_argnames)
        self._programs: dict[Any, _Jitted] = {}
        self.last: _Jitted | None = None
        self.called: Any = None  # the program and types of the last call traced
        self._seen: list[_Seen] = []  # the last calls that were traced
        self._was_called = False
        self._in_flight = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # Compiled programs belong to this process; a copy compiles its own.
        options = {**self._options, "donate": self._donates}
        options |= {"static_argnames": self.static_argnames}
        return functools.partial(CompiledStep, self.function, **options), ()

    @_checks.user_call
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the step; the state, which comes first, is used up."""
        if kwargs or not args:  # by name or by place is one program
            args, kwargs = self._by_place(args, kwargs)
        if _jax.is_tracing():
            return self._traced(None, args, kwargs)
        program = self.last
        if program is None or (
            program.is_spread
            and (kwargs or not program.goes_on(*args))
            and not program.is_like_last(args, kwargs)
        ):
            program, args = self._switch(args, kwargs)
        return self.run(program, args, kwargs)

    def run(self, program: _Jitted, args: PyTree, kwargs: PyTree) -> Any:
        """Runs a program of this step."""
        program.arguments = (args, kwargs)
        if program.is_shared:
            counts.steps += 1
        try:
            result = program.jitted(*args, **kwargs)
        except Exception as error:
            counts.steps -= program.is_shared
            leaves = jax.tree.leaves((args, kwargs))
            is_gone = any(getattr(leaf, "is_deleted", bool)() for leaf in leaves)
            # JAX refuses arrays that were used up. A call that fails otherwise with its
            # arrays gone has run, as collectives do when a process is lost.
            if is_gone and ("deleted" not in str(error) or error.__context__):
                raise
            self._check(args, kwargs)
            if isinstance(error, StepError) or self._program(args, kwargs) is program:
                raise
        else:
            self._was_called = True
            if program.has_state:
                state, aux = result
                program.state = weakref.ref(state)
                program.metrics = aux if type(aux) is Metrics else None
            if program.is_bounded:
                self._in_flight += 1
                if self._in_flight >= _MAX_IN_FLIGHT:  # threads may count past it
                    self._in_flight = 0
                    # One array will do: a program's results are ready together.
                    one = result[0].step if program.has_state else result
                    default_registry.flatten(one)[0][0].block_until_ready()
            return result
        finally:
            program.arguments = None
        # It was refused as other devices or another structure need another program.
        self.last, call = None, cast(Any, self)
        return call(*args, **kwargs)

    def _switch(self, args: PyTree, kwargs: PyTree) -> tuple[_Jitted, Any]:
        """Returns the program for a call, and its arguments, the state on a mesh."""
        self._check(args, kwargs)
        mesh = _mesh_of(map(layout_of, jax.tree.leaves((args, kwargs))))
        if mesh and self._donates:  # it comes back on the mesh, and would recompile
            whole = NamedSharding(mesh, PartitionSpec())
            args = (
                jax.tree.map(
                    lambda x: x if layout_of(x) else _jax.put(x, whole), args[0]
                ),
                *args[1:],
            )
        program = self.last = self._program(args, kwargs)
        leaves = jax.tree.leaves((args, kwargs))
        program.types = [*map(type, leaves)]
        program.is_compared = [issubclass(x, _jax.ArrayImpl) for x in program.types]
        program.shardings = [x.sharding for x in compress(leaves, program.is_compared)]
        program.num_donated = len(jax.tree.leaves(args[: self._donates]))
        program.has_state = self._donates and type(args[0]) is TrainState
        program.state, program.metrics = object, None
        # Metrics are new now, and the last ones at the next call.
        others = args[1:-1] if type(args[-1]) is Metrics else args[1:]
        program.other_shardings = [*map(_jax.sharding_of, jax.tree.leaves(others))]
        return program, args

    def _program(
        self, args: PyTree, kwargs: PyTree, *, is_call: bool = True
    ) -> _Jitted:
        """Returns the program for arguments, which may be abstract."""
        leaves, treedef = jax.tree.flatten((args, kwargs))
        program = _Jitted(treedef, list(map(layout_of, leaves)))
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
            (state, *_), _ = treedef.unflatten(program.layouts)
            options |= {"donate_argnums": 0, "out_shardings": (state, None)}
        program.jitted = jax.jit(traced, **options)
        if self.executable:
            program.jitted = self.executable(program, self.static_argnames)
        return program

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Traces the step for these arguments, as `jax.jit(...).trace` does."""
        args, kwargs = self._by_place(args, kwargs)
        program = self._program(args, kwargs, is_call=False)
        return program.jitted.trace(*args, **kwargs)

    def _traced(self, program: _Jitted | None, args: PyTree, kwargs: PyTree) -> Any:
        """Runs the step inside a program's trace; without one, inside any other."""
        leaves, treedef = jax.tree.flatten((args, kwargs))
        why, now, is_compared = "", None, False
        if program is None:
            program = _Jitted(treedef, list(map(_jax.sharding_of, leaves)))
        elif any(isinstance(x, Tracer) for x in leaves):  # jax_debug_nans gives arrays
            if treedef != program.treedef:
                raise TypeError("the program is for another structure")
            now = self._texts(args, kwargs, program.layouts)
            if tx := getattr((*args, None)[0], "tx", None):
                now["the optimizer"] = f"one made at {id(tx):#x}", ""  # by optax.adam
            if program.arguments is not None:  # else, it is only looked at
                self.called = program, [getattr(x, "aval", x) for x in leaves]
                why = self._explain(now) if self._was_called else ""
                is_compared = True
        (state, *rest), named = treedef.unflatten(map(_placed, leaves, program.layouts))
        layouts = self._options["layouts"]
        scope = activate(layouts) if layouts else contextlib.nullcontext()
        with _jax.ambient_mesh(program.mesh), scope:
            # Until all agree, it is behind those that run this call already.
            num_steps = int(is_compared and program.is_shared)
            counts.steps -= num_steps
            try:
                jaxpr = self._inner.trace(*args, **kwargs).jaxpr
                hidden = axes_to_hide(jaxpr.jaxpr, state, (rest, named))
                if is_compared:
                    facts = functools.partial(self._facts, program.arguments, jaxpr)
                    compare_program(self.__name__, program.devices, facts, why)
            finally:
                counts.steps += num_steps
            if is_compared and self._donates and marked_weights:
                is_read = _jax.operands_of(jaxpr.jaxpr)
                check_padding(self.__name__, program.arguments, is_read)
            result = run_without(hidden, lambda: self._inner(*args, **kwargs))
        if self._donates:
            program.shapes |= set(map(jnp.shape, jax.tree.leaves(args[0])))
            result = self._kept(args[0], result, program.layouts)
        if now is not None:
            self._seen = [*self._seen[-15:], now]
            self.last = None  # what the next call is given may be on a mesh now
        return result

    def _facts(self, arguments: PyTree, jaxpr: ClosedJaxpr) -> dict[str, str]:
        constants = enumerate([*jaxpr.consts, *_jax.inner_constants(jaxpr.jaxpr)])
        named = {f"constant {index}": value for index, value in constants}
        return program_facts(self._named(*arguments) | named, str(jaxpr.jaxpr))

    def _kept(self, old: PyTree, result: PyTree, layouts: list[Any]) -> Any:
        """Returns a step's result, if its state is like the one that came in."""
        if not isinstance(result, tuple) or len(result) != 2:
            msg = (
                f"{self.__name__} returned {_checks.type_text(result)}; a step returns "
                "a pair, (state, aux), with aux=None if there is nothing else."
            )
            raise StepError(msg)
        new, aux = result
        olds, treedef = jax.tree.flatten(old)
        changes = _changes(*(self._texts((state,), {}) for state in (old, new)))
        if changes or treedef != jax.tree.structure(new):
            msg = (
                f"{self.__name__} returned another state than came in: "
                f"{[*changes, 'its containers changed'][0]}. Return it in the "
                "structure, shapes and dtypes that it had: cast or reshape it back."
            )
            raise StepError(msg)
        kept = map(_like, jax.tree.leaves(new), olds, layouts)
        return treedef.unflatten(kept), aux

    def _check(self, args: PyTree, kwargs: PyTree) -> None:
        """Raises StepError for arrays that were used up or would be donated twice."""
        if self._donates and _paths.holds_modules(args[:1]):
            msg = (
                f"{self.__name__}: the state holds an NNX module, no pytree of arrays. "
                "Pass what nnx.split(module) gives, or a TrainState; or keep @nnx.jit."
            )
            raise StepError(msg)
        donated = {*map(id, jax.tree.leaves(args[: self._donates]))}
        owners: dict[int, str] = {}
        for name, leaf in self._named(args, kwargs).items():
            msg, other = "", owners.setdefault(id(leaf), name)
            if getattr(leaf, "is_deleted", bool)():
                msg = (
                    f"{self.__name__}: {name!r} was used up by an earlier call of a "
                    "step. Continue with the state that the step returned."
                )
            elif name != other and isinstance(leaf, jax.Array) and id(leaf) in donated:
                msg = (
                    f"{self.__name__}: {other!r} and {name!r} are the same array, "
                    "whose memory the step reuses. Copy one with jax.numpy.copy."
                )
            if msg:
                raise StepError(msg) from None

    def _explain(self, now: _Seen) -> str:
        """Warns of what differs from the most similar earlier call, and returns it."""
        changes = min((_changes(seen, now) for seen in self._seen), key=len, default=[])
        change = [*changes, _OTHER_CHANGE][0]
        line = f"{self.__name__} recompiles: {change}."
        if self._options["on_recompile"] == "error":
            raise StepError(line)
        if self._options["on_recompile"] == "warn":
            warnings.warn(line, RecompileWarning, stacklevel=stack_level())
        return change

    def _texts(
        self, args: PyTree, kwargs: PyTree, layouts: Sequence[Any] = ()
    ) -> _Seen:
        """Returns the types of arguments by name, and layouts if they are given."""
        treedef = jax.tree.structure((args, kwargs))
        layouts = layouts or [None] * treedef.num_leaves
        on_mesh = self._named(*treedef.unflatten(map(_layout_text, layouts)))

        def text(name: str, leaf: Leaf) -> str:
            if name.partition("/")[0] in self.static_argnames:
                return repr(leaf)
            return _render.array_text(jax.typeof(leaf).dtype, jax.typeof(leaf).shape)

        named = self._named(args, kwargs)
        return {name: (text(name, x), on_mesh[name]) for name, x in named.items()}

    def _named(self, args: PyTree, kwargs: PyTree) -> dict[str, Any]:
        """Returns every leaf of some arguments, by parameter and path."""
        bound = self._signature.bind_partial(*args, **kwargs)
        entries = jax.tree_util.tree_flatten_with_path(dict(bound.arguments))[0]
        text = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
        return {text(keys): leaf for keys, leaf in entries}

    def _by_place(self, args: PyTree, kwargs: PyTree) -> tuple[Any, Any]:
        bound = self._signature.bind(*args, **kwargs)
        return bound.args, bound.kwargs


def _placed(leaf: Leaf, layout: Sharding | None) -> Any:
    """Returns a traced array with its layout, which only the program knows."""
    if not isinstance(leaf, Tracer) or layout is None:
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout)


def _mesh_of(layouts: Iterable[Sharding | None]) -> Any:
    return next((x.mesh for x in layouts if isinstance(x, NamedSharding)), None)


def as_weak_as(old: Leaf, leaf: Leaf) -> Any:
    """Returns a leaf with an older one's weak type, whose change would recompile."""
    return _jax.with_weak_type(leaf, weak_type=jax.typeof(old).weak_type)


def _like(leaf: Leaf, old: Leaf, layout: Any) -> Any:
    """Returns a leaf of a new state as the old one was.

    JAX moves results to the host's memory first and then shards them: TPU compilers
    would gather on the host, or fail. tests/test_tpu_programs.py notices.
    """
    leaf = as_weak_as(old, leaf)
    if getattr(layout, "memory_kind", None) != "pinned_host" or _jax.is_on_host(leaf):
        return leaf
    on_device = layout.with_memory_kind("device")
    return jax.device_put(_jax.constrain(leaf, on_device), layout)


def _key(layout: Sharding | None) -> Any:
    """Returns a layout without `None` at the end of its spec, which means nothing."""
    if not isinstance(layout, NamedSharding):
        return layout
    spec = [*layout.spec]
    while spec and spec[-1] is None:
        spec.pop()
    return layout.mesh, *spec, layout.memory_kind


def _layout_text(layout: Sharding | None) -> str:
    if isinstance(layout, NamedSharding):
        return f"{tuple(layout.spec)} on ({mesh_text(layout.mesh)})"
    return "no layout of its own" if layout is None else str(layout)


def _changes(before: _Seen, now: _Seen) -> list[str]:
    """Returns what changed between two calls, one phrase each."""
    changes = []
    for name in dict.fromkeys([*now, *before]):
        (old, here), (new, there) = (x.get(name, ("", "")) for x in (before, now))
        if old != new:
            text = f"{name} changed from {old or 'nothing'} to {new or 'nothing'}"
            changes.append(text)
        elif here != there:
            changes.append(f"the layout of {name} changed from {here} to {there}")
    return changes
