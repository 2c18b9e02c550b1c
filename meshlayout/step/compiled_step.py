"""`compile_step`: one jit, state donated, layouts kept; never a silent recompile.

JAX compiles again without a word when an argument changes, refuses arguments in its
own words, and may end the process for memory that is given away twice. So a compiled
step remembers what each program was traced for. A call goes straight to `jax.jit`, and
only what that cannot answer from its cache is looked at here, before anything has run.

To take a `TrainState` apart and to put one together costs a call of a small step a
third of its time on the host, and most states are only handed to the next call. So a
program takes and returns a state as a tuple of plain arrays, and what a call returns
becomes a state when somebody reads a field.
"""

import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import (
    Any,
    Generic,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    get_args,
    overload,
)

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding

from meshlayout import _checks, _jax, _paths, _render
from meshlayout._annotations import DType, Leaf, PyTree
from meshlayout.errors import RecompileWarning, StepError, did_you_mean, stack_level
from meshlayout.layout_map import LayoutMap, activate
from meshlayout.state import TrainState
from meshlayout.step.call_signature import (
    SETTING,
    CallSignature,
    check_arguments,
    check_memory,
    differences,
    is_deleted,
    named_leaves,
    structure_text,
    what,
)
from meshlayout.step.inspection import Inspection
from meshlayout.step.kernel_gradients import gradient_axes, with_right_gradients
from meshlayout.step.model_call import ignoring_unbound_axes
from meshlayout.step.placement import (
    in_own_mesh,
    layout_of,
    mesh_text,
    place_rest,
    replicated,
)


P = ParamSpec("P")
R = TypeVar("R")

OnRecompile: TypeAlias = Literal["warn", "error", "ignore"]

# Virtual CPU devices share one thread pool. With many collectives queued, the last
# participant of one finds no thread, and XLA ends the process after 40 seconds.
_MAX_IN_FLIGHT = 8


@overload
def compile_step(
    step: None = None,
    *,
    static_argnames: Sequence[str] = (),
    on_recompile: OnRecompile = "warn",
    layouts: LayoutMap | None = None,
) -> "Callable[[Callable[P, R]], CompiledStep[P, R]]": ...
@overload
def compile_step(
    step: Callable[P, R],
    *,
    static_argnames: Sequence[str] = (),
    on_recompile: OnRecompile = "warn",
    layouts: LayoutMap | None = None,
) -> "CompiledStep[P, R]": ...
def compile_step(
    step: Callable[..., Any] | None = None,
    *,
    static_argnames: Sequence[str] = (),
    on_recompile: OnRecompile = "warn",
    layouts: LayoutMap | None = None,
) -> Any:
    """Compiles `step(state, batch, ...) -> (state, aux)`; also a decorator.

    The program is the one `jax.jit` makes, with the state donated and its layouts
    the same coming out as going in. The state that was passed is used up: go on with
    the one that is returned. On several virtual CPU devices, every eighth call waits
    for its result, because more steps in flight can dead-lock XLA's thread pool.

    Args:
        step: A function of a state (any pytree of arrays) and other pytrees, that
            returns the new state, in the same structure, shapes and dtypes, and
            anything else.
        static_argnames: Arguments that are not arrays, hashable; a new value makes a
            new program.
        on_recompile: When a call after the first needs a new program: `"warn"`,
            `"error"` (nothing is run and the state is not used up) or `"ignore"`.
        layouts: The layout map that `constrain` follows inside.

    Raises:
        StepError: If an argument here is wrong, and at calls: see `CompiledStep`.

    Example:
        >>> import jax.numpy as jnp
        >>> @compile_step
        ... def train_step(state, batch):
        ...     return {"w": state["w"] + batch.sum()}, {"seen": batch.size}
        >>> state, aux = train_step({"w": jnp.zeros(2)}, jnp.ones(3))
        >>> state["w"].tolist(), int(aux["seen"])
        ([3.0, 3.0], 3)
    """
    check_options(on_recompile, layouts)
    names = (static_argnames,) if isinstance(static_argnames, str) else static_argnames
    if step is None:
        return lambda function: CompiledStep(
            function, tuple(names), on_recompile, layouts
        )
    return CompiledStep(step, tuple(names), on_recompile, layouts)


def check_options(on_recompile: OnRecompile, layouts: LayoutMap | None) -> None:
    """Raises StepError unless these are options of `compile_step`."""
    _checks.choice("on_recompile", on_recompile, get_args(OnRecompile), error=StepError)
    if layouts is not None and not isinstance(layouts, LayoutMap):
        msg = f"layouts= takes a LayoutMap, and got a {type(layouts).__name__}."
        raise StepError(msg)


@dataclass(frozen=True)
class StateStructure:
    """The structure of a train state, and which of its leaves are PRNG keys.

    Attributes:
        treedef: As `jax.tree.flatten` gives it.
        keys: The place and the dtype of each leaf that is a PRNG key; a compiled
            function takes the words of one faster.
    """

    treedef: Any  # PyTreeDef, a variable to a type checker
    keys: tuple[tuple[int, DType], ...]

    @classmethod
    def of(cls, leaves: Sequence[Leaf], treedef: Any) -> "StateStructure":
        """Returns the structure of a state that was taken apart."""
        dtypes = enumerate(getattr(leaf, "dtype", None) for leaf in leaves)
        keys = (place for place in dtypes if type(place[1]) is _jax.KeyDType)
        return cls(treedef, tuple(keys))

    def flatten(self, state: PyTree) -> tuple[Leaf, ...] | None:
        """Returns the arrays of a state, or None if its structure is another one.

        The dicts in a state can be changed in place, so that the arrays it was made of
        are only taken while nobody has read it.
        """
        flat = state._flat if type(state) is TrainState else None
        if flat is not None and flat[1] == self:
            return flat[0]
        leaves, treedef = jax.tree.flatten(state)
        if self.of(leaves, treedef) != self:
            return None
        for index, _ in self.keys:
            leaves[index] = _words(leaves[index])
        return tuple(leaves)

    def unflatten(self, leaves: Sequence[Leaf]) -> TrainState:
        """Returns the state of some arrays."""
        leaves = list(leaves)
        for index, dtype in self.keys:
            leaves[index] = _jax.key_of_words(leaves[index], dtype)
        return self.treedef.unflatten(leaves)

    def lazy(self, leaves: Sequence[Leaf]) -> TrainState:
        """Returns the state of some arrays, put together when a field is read."""
        state: TrainState = object.__new__(TrainState)
        # The last one says whether the arrays may be given away: once, to a step.
        object.__setattr__(state, "_flat", [leaves, self, True])
        return state


def _words(key: Leaf) -> Any:
    if isinstance(key, jax.ShapeDtypeStruct):
        words = jax.eval_shape(jax.random.key_data, key)
        return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=key.sharding)
    return (
        jax.random.key_data(key) if isinstance(key, Tracer) else _jax.words_of_key(key)
    )


@dataclass(frozen=True)
class _Signature:
    """What one jitted function is made for: structures and layouts, not shapes."""

    state_def: Any
    structure: StateStructure | None  # of a TrainState, which is passed flat
    state_layouts: tuple[Any, ...]
    rest_def: Any
    rest_layouts: tuple[Any, ...]


@dataclass(frozen=True)
class JittedStep:
    """One jitted function of a compiled step.

    Attributes:
        signature: What it is made for.
        jitted: What `jax.jit` returned.
        first_call: The call it was made for.
        seen: What it was traced for.
        is_loose: Whether some argument has no layout: to look at in every call.
        is_spread: Whether it runs on several devices. JAX may end the process there
            for memory that is given twice or was used up, so arguments are looked at.
        is_bounded: Whether these are CPU devices, which bound what is in flight.
    """

    signature: _Signature
    jitted: Callable[..., Any]
    first_call: CallSignature
    seen: list[CallSignature]
    is_loose: bool
    is_spread: bool
    is_bounded: bool

    def flattened(self, state: PyTree) -> Any:
        """Returns a state as the function takes it."""
        structure = self.signature.structure
        leaves = state if structure is None else structure.flatten(state)
        if leaves is None:
            raise _Retrace  # the state has another structure
        return leaves


class _Thread(threading.local):
    """What one thread is doing with a step."""

    may_trace = False
    is_quiet = False


class _Retrace(Exception):  # noqa: N818 (no error: it stops a trace that has to wait)
    """JAX traces a program again, and nothing has said why yet."""


class CompiledStep(Inspection, Generic[P, R]):
    """A compiled step; made by `compile_step`.

    Calling it raises StepError, before anything is run or used up, if what the step
    returns is not a pair, if its state has another structure, shape or dtype than
    the one that came in, if the state was used up before or holds an array twice, or
    if leaves are not arrays or are on other devices; and with `on_recompile="error"`
    if a new program would be needed.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        static_names: tuple[str, ...],
        on_recompile: OnRecompile,
        layouts: LayoutMap | None,
    ) -> None:
        if not callable(step):
            msg = f"compile_step takes a function, and got a {type(step).__name__}."
            raise StepError(msg)
        functools.update_wrapper(self, step)
        self._step = step
        self._name = getattr(step, "__name__", type(step).__name__)
        self._parameters = inspect.signature(step)
        self._names = _parameter_names(self._parameters, self._name, static_names)
        self.static_argnames = static_names
        self._on_recompile: OnRecompile = on_recompile
        self._layouts = layouts
        self._programs: dict[_Signature, JittedStep] = {}
        # The program of the last call: what the next one tries first.
        self.program: JittedStep | None = None
        self._thread = _Thread()
        self._in_flight = 0
        self._places_rest = False
        self._no_mesh: jax.sharding.AbstractMesh | None = None

    def __get__(
        self, instance: object, owner: type | None = None
    ) -> "CompiledStep[P, R]":
        if instance is None:
            return self
        msg = (
            f"{self._name} is a method, and compile_step takes functions of a state. "
            f"Compile it for the object: self.step = compile_step(self.{self._name})."
        )
        raise StepError(msg)

    def __reduce__(self) -> tuple[Any, ...]:
        # What was compiled belongs to this process, and locks cannot be copied.
        how = (self._step, self.static_argnames, self._on_recompile, self._layouts)
        return CompiledStep, how

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the step.

        Args:
            *args: The state, which is donated, and the step's other arguments.
            **kwargs: Arguments by name.

        Returns:
            What the step returns: the new state, and the rest.
        """
        ambient = jax.sharding.get_abstract_mesh()
        if ambient is self._no_mesh or ambient.empty:
            self._no_mesh = ambient  # to ask an abstract mesh takes time
            return self._run(args, kwargs)
        with in_own_mesh(args[:1] or kwargs):
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        static: tuple[Any, ...] = ()
        if kwargs or self.static_argnames or not args:
            args, kwargs, static = self._normalized(args, kwargs)
        program = self.program
        if self._places_rest and program is not None:
            args, kwargs = place_rest(args, kwargs, program.signature.state_layouts)
        try:
            if program is None or (
                program.is_loose
                and _layouts_of((args[1:], kwargs), None)
                != program.signature.rest_layouts
            ):
                program, args, kwargs = self._switch(static, args, kwargs)
            rest = (args[1:], kwargs)
            structure = program.signature.structure
            state = args[0] if structure is None else program.flattened(args[0])
            if program.is_spread and gives_memory_twice(state, rest):
                check_memory(self._name, self._names, args, kwargs)
            result = program.jitted(static, state, rest)
        except Exception as error:
            # Nothing has run: find out whether this call needs another program.
            found = self._after_error(error, program, static, args, kwargs)
            program, args, kwargs = found
            result = self._run_traced(program, static, args, kwargs)
            structure = program.signature.structure
        if program.is_bounded:
            self.wait_if_many(result)
        if structure is None:
            return result
        if args[0]._flat is not None:
            args[0]._flat[2] = False
        return structure.lazy(result[0]), result[1]

    def wait_if_many(self, result: PyTree) -> None:
        """Waits for a result, if as many calls are in flight as may be on CPUs."""
        self._in_flight += 1
        if self._in_flight >= _MAX_IN_FLIGHT:  # threads may count past it
            self._in_flight = 0
            jax.block_until_ready(result)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the step for these arguments, as `jax.jit(...).lower` does.

        Args:
            *args: As for a call; arrays may be `jax.ShapeDtypeStruct` with shardings.
            **kwargs: Arguments by name.
        """
        before, self._thread.is_quiet = self._thread.is_quiet, True
        try:
            with in_own_mesh(args[:1] or kwargs):
                args, kwargs, static = self._normalized(args, kwargs)
                signature = self._signature(args, kwargs)
                program = self._programs.get(signature)
                if program is None:
                    now = CallSignature(self._names, static, args, kwargs)
                    program = self._make(signature, now, static, args, kwargs)
                state = program.flattened(args[0])
                jitted: Any = program.jitted
                return jitted.lower(static, state, (args[1:], kwargs))
        finally:
            self._thread.is_quiet = before

    def _run_traced(
        self, program: JittedStep, static: Any, args: Any, kwargs: Any
    ) -> Any:
        """Runs a program that was explained, and may be traced."""
        before, self._thread.may_trace = self._thread.may_trace, True
        try:
            state = program.flattened(args[0])
            return program.jitted(static, state, (args[1:], kwargs))
        except Exception as error:
            check_arguments(self._name, self._names, args, kwargs)
            raise error from None
        finally:
            self._thread.may_trace = before

    def __repr__(self) -> str:
        return f"CompiledStep({self._name}, {len(self._programs)} layouts seen)"

    def _normalized(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """Returns positional, keyword and static arguments, the state first.

        By name or by place is the same program.
        """
        if not args and (not self._names or self._names[0] not in kwargs):
            msg = f"{self._name} takes the state as its first argument."
            raise StepError(msg)
        try:
            bound = self._parameters.bind(*args, **kwargs)
        except TypeError as error:
            msg = f"{self._name}: {error}."
            raise StepError(msg) from None
        parameters = self._parameters.parameters.values()
        by_kind = {one.kind: one.name for one in parameters}
        extra = bound.arguments.get(by_kind.get(inspect.Parameter.VAR_KEYWORD, ""), {})
        static = []
        for name in self.static_argnames:
            arguments = bound.arguments if name in bound.arguments else extra
            if name not in arguments:
                continue
            value = arguments.pop(name)
            try:
                hash(value)
            except TypeError:
                msg = (
                    f"{self._name}: static argument {name!r} is a "
                    f"{type(value).__name__}, which cannot be hashed. Give a tuple or "
                    "a frozen dataclass, or pass it as an array argument."
                )
                raise StepError(msg) from None
            static.append((name, value))
        # What comes after a static argument is passed by name, which *args cannot be.
        others = by_kind.get(inspect.Parameter.VAR_POSITIONAL)
        for name, _ in static if others in bound.arguments else ():
            kind = self._parameters.parameters[name].kind
            if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                msg = (
                    f"{self._name}: {name!r} is static and comes before *args; make it "
                    "a keyword-only argument, after them."
                )
                raise StepError(msg)
        return bound.args, bound.kwargs, tuple(static)

    # Programs.

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Signature:
        if _paths.holds_modules(args[0]):
            msg = (
                f"{self._name}: the state holds an NNX module. Pass what "
                "nnx.split(module) gives, or a TrainState; a module would be taken "
                "apart at every call, and what it shares would be doubled."
            )
            raise StepError(msg)
        leaves, treedef = jax.tree.flatten(args[0])
        # What is on no mesh yet comes back from the step on the mesh: the next call
        # would be another one if it did not start there.
        whole = replicated(map(layout_of, leaves))
        state_layouts = _layouts_of(leaves, whole)
        if whole is not None:
            self._check_one_mesh(args[0], state_layouts, whole)
        is_state = type(args[0]) is TrainState
        return _Signature(
            treedef,
            StateStructure.of(leaves, treedef) if is_state else None,
            state_layouts,
            jax.tree.structure((args[1:], kwargs)),
            _layouts_of((args[1:], kwargs), whole),
        )

    def _check_one_mesh(
        self, state: PyTree, layouts: tuple[Any, ...], whole: NamedSharding
    ) -> None:
        for index, layout in enumerate(layouts):
            if layout.device_set != whole.device_set:
                path, _ = named_leaves(state)[index]
                msg = (
                    f"{self._name}: the state's {path!r} lies on other devices than "
                    f"the rest, which is on {mesh_text(whole.mesh)}. Move it with "
                    "relayout(x, layout)."
                )
                raise StepError(msg)

    def _switch(
        self, static: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[JittedStep, tuple[Any, ...], dict[str, Any]]:
        """Makes the program for these arguments the current one, and places them."""
        signature = self._signature(args, kwargs)
        program = self._programs.get(signature)
        now = CallSignature(self._names, static, args, kwargs)
        if program is None:
            before = [p.first_call for p in self._programs.values() if p.seen]
            self._explain(now, before)
        args, kwargs = self._with_rest_placed(args, kwargs, signature)
        # A leaf without a layout gets one, else the next call would be another one.
        leaves = [
            leaf if layout is None or layout_of(leaf) else jax.device_put(leaf, layout)
            for leaf, layout in zip(
                jax.tree.leaves(args[0]), signature.state_layouts, strict=True
            )
        ]
        args = (signature.state_def.unflatten(leaves), *args[1:])
        if program is None:
            program = self._make(signature, now, static, args, kwargs)
        self.program = program
        return program, args, kwargs

    def _with_rest_placed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], signature: _Signature
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Places arrays without a layout on the state's mesh; notes if any were."""
        placed = place_rest(args, kwargs, signature.state_layouts)
        before, after = map(jax.tree.leaves, ((args, kwargs), placed))
        if any(a is not b for a, b in zip(before, after, strict=True)):
            self._places_rest = True  # look for more at every call
        return placed

    def _after_error(
        self,
        error: Exception,
        program: JittedStep | None,
        static: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[JittedStep, tuple[Any, ...], dict[str, Any]]:
        """Returns the program that this call needs, and its arguments, or raises."""
        if isinstance(error, StepError) or not args:
            raise error
        check_arguments(self._name, self._names, args, kwargs)
        if program is None:
            raise error
        if self._signature(args, kwargs) != program.signature:
            return self._switch(static, args, kwargs)
        if not isinstance(error, _Retrace):
            raise error
        if not self._places_rest:
            args, kwargs = self._with_rest_placed(args, kwargs, program.signature)
            if self._places_rest:
                return program, args, kwargs
        now = CallSignature(self._names, static, args, kwargs)
        self._explain(now, program.seen)
        return program, args, kwargs

    def _make(
        self,
        signature: _Signature,
        now: CallSignature,
        static: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> JittedStep:
        """Makes a program, with right gradients of kernels where XLA's would not be."""
        seen: list[CallSignature] = []
        step = functools.partial(self._traced, seen)
        jitted: Any = self._jitted(signature, step)
        layouts = (*signature.state_layouts, *signature.rest_layouts)
        device_sets = (one.device_set for one in layouts if one is not None)
        devices = set().union(*device_sets)
        program = JittedStep(
            signature,
            jitted,
            now,
            seen,
            is_loose=None in signature.rest_layouts,
            is_spread=len(devices) > 1,
            is_bounded=len(devices) > 1 and next(iter(devices)).platform == "cpu",
        )
        if program.is_spread and not _jax.is_tracing():
            rest = (args[1:], kwargs)
            # JAX keeps the trace that is looked at for the program's first call.
            trace = jitted.trace(static, program.flattened(args[0]), rest)
            axes = None
            if has_convolutions(trace.jaxpr.jaxpr):
                axes = gradient_axes(trace.jaxpr.jaxpr, args[0], rest)
            if axes is not None:

                def mended(static: tuple[Any, ...], *arguments: PyTree) -> Any:
                    partial = functools.partial(step, static)
                    return with_right_gradients(partial, axes)(*arguments)

                seen.clear()
                program = replace(program, jitted=self._jitted(signature, mended))
        self._programs[signature] = program
        return program

    def _jitted(self, signature: _Signature, step: Callable[..., Any]) -> Any:
        # None leaves the layout to JAX.
        structure = signature.structure
        into: Any = signature.state_layouts
        if structure is None:
            into = signature.state_def.unflatten(into)
        rest_layouts = signature.rest_def.unflatten(signature.rest_layouts)

        def traced(static: tuple[Any, ...], state: PyTree, rest: Any) -> Any:
            if structure is None:
                return step(static, state, rest)
            state, aux = step(static, structure.unflatten(state), rest)
            return structure.flatten(state), aux

        traced.__name__ = traced.__qualname__ = self._name  # shown by profilers
        return jax.jit(
            traced,
            static_argnums=0,
            donate_argnums=1,
            in_shardings=(into, rest_layouts),
            out_shardings=(into, None),
        )

    # Inside the trace.

    def _traced(
        self,
        seen: list[CallSignature],
        static: tuple[Any, ...],
        state: PyTree,
        rest: Any,
    ) -> Any:
        args, kwargs = rest
        # With jax_debug_nans, JAX also runs this on arrays, to find the operation.
        is_trace = any(isinstance(x, Tracer) for x in jax.tree.leaves(state))
        may_trace = self._thread.is_quiet or self._thread.may_trace
        if seen and is_trace and not may_trace:
            raise _Retrace
        scope = activate(self._layouts) if self._layouts else contextlib.nullcontext()
        with scope, ignoring_unbound_axes():
            result = self._step(state, *args, **kwargs, **dict(static))
        if not isinstance(result, tuple) or len(result) != 2:
            msg = (
                f"{self._name} returned {what(result)}; a step returns a pair, "
                "(state, aux), with aux=None if there is nothing else."
            )
            raise StepError(msg)
        new_state, aux = result
        new_state = self._like(state, new_state)
        if not self._thread.is_quiet:
            seen.append(CallSignature(self._names, static, (state, *args), kwargs))
        return new_state, aux

    def _explain(self, now: CallSignature, before: list[CallSignature]) -> None:
        """Says what is unlike the most similar call before, if there was one."""
        # Inside another transformation every call is traced.
        if self._on_recompile == "ignore" or not before or _jax.is_tracing():
            return
        changes = min((differences(one, now) for one in before), key=len)
        first, *_ = [*changes, SETTING]
        line = f"{self._name} recompiles: {first}."
        if self._on_recompile == "error":
            raise StepError(line)
        warnings.warn(line, RecompileWarning, stacklevel=stack_level())

    def _like(self, old: PyTree, new: PyTree) -> Any:
        """Returns the new state, or raises if it is not of the old one's kind."""
        old_leaves, treedef = jax.tree.flatten(old)
        if treedef != jax.tree.structure(new):
            raise StepError(structure_text(self._name, old, new))
        leaves = []
        for index, leaf in enumerate(jax.tree.leaves(new)):
            before, after = jax.typeof(old_leaves[index]), jax.typeof(leaf)
            if (before.shape, before.dtype) != (after.shape, after.dtype):
                path, _ = named_leaves(old)[index]
                msg = (
                    f"{self._name} returned a state whose {path!r} is "
                    f"{_render.array_text(after.dtype, after.shape)}; it came in as "
                    f"{_render.array_text(before.dtype, before.shape)}. A step keeps "
                    "the shapes and dtypes of its state: cast or reshape it back."
                )
                raise StepError(msg)
            # A number added can make a leaf weakly typed: that alone would recompile.
            leaves.append(_jax.with_weak_type(leaf, weak_type=before.weak_type))
        return treedef.unflatten(leaves)


def _parameter_names(
    parameters: inspect.Signature, step: str, static_names: tuple[str, ...]
) -> tuple[str, ...]:
    """Returns a step's parameters, and checks which of them are static."""
    kinds = {one.name: one.kind for one in parameters.parameters.values()}
    if not kinds:
        msg = f"{step} takes no arguments; a step takes the state first."
        raise StepError(msg)
    many = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    names = tuple(name for name, kind in kinds.items() if kind not in many)
    for name in static_names:
        if (name,) == names[:1]:
            msg = f"{step}: {name!r} is the state; it cannot be static."
            raise StepError(msg)
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
        if names and name not in names and not takes_any:
            hint = did_you_mean(name, names)
            msg = f"{step} has no argument {name!r} to be static.{hint}"
            raise StepError(msg)
        if kinds.get(name) is inspect.Parameter.POSITIONAL_ONLY:
            msg = (
                f"{step}: {name!r} is positional-only, and what is static is passed by "
                "name. Take the '/' out of the signature."
            )
            raise StepError(msg)
    return names


def has_convolutions(jaxpr: Any) -> bool:
    """Returns whether a program convolves, so that kernel gradients may be wrong."""
    names = (eqn.primitive.name for eqn in _jax.equations(jaxpr))
    return "conv_general_dilated" in names


def _layouts_of(tree: PyTree, whole: NamedSharding | None) -> tuple[Any, ...]:
    """Returns the layouts of arrays; for those that have none, `whole`."""
    return tuple([layout_of(leaf) or whole for leaf in jax.tree.leaves(tree)])


def gives_memory_twice(state: PyTree, rest: PyTree) -> bool:
    """Returns, fast, whether the state may be used up, or an array passed twice."""
    leaves, others = jax.tree.leaves(state), jax.tree.leaves(rest)
    try:
        is_used_up = True in [leaf.is_deleted() for leaf in leaves]
    except (AttributeError, jax.errors.ConcretizationTypeError):
        return True  # NumPy arrays, numbers, tracers: to be looked at one by one
    ids = {*map(id, leaves)}
    is_twice = len(ids) != len(leaves) or not ids.isdisjoint(map(id, others))
    return is_used_up or is_twice or True in map(is_deleted, others)
