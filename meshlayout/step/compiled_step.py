"""`compile_step`: one jit, state donated, layouts kept; never a silent recompile."""

import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
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
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _checks, _jax, _paths, _render
from meshlayout._annotations import Leaf, PyTree
from meshlayout.errors import RecompileWarning, StepError, did_you_mean, stack_level
from meshlayout.layout_map import LayoutMap, activate
from meshlayout.state import TrainState
from meshlayout.state.flat_state import StateStructure
from meshlayout.step.call_signature import (
    SETTING,
    CallSignature,
    check_arguments,
    check_memory,
    describe,
    differences,
    gives_memory_twice,
    layout_of,
    mesh_text,
    named_leaves,
    structure_text,
    what,
)
from meshlayout.step.kernel_gradients import (
    GradientAxes,
    gradient_axes,
    with_right_gradients,
)
from meshlayout.step.model_call import ignoring_unbound_axes


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
class _Signature:
    """What one jitted function is made for: structures and layouts, not shapes."""

    state_def: Any
    structure: StateStructure | None
    state_layouts: tuple[Any, ...]
    rest_def: Any
    rest_layouts: tuple[Any, ...]


@dataclass(frozen=True)
class _JittedStep:
    """One jitted function."""

    signature: _Signature
    jitted: Any
    first_call: CallSignature
    seen: list[CallSignature]  # what it was traced for
    structure: StateStructure | None  # takes a TrainState as a tuple of its leaves
    loose: bool  # some batch leaf has no layout of its own: look at it every call
    spread: bool  # several devices: JAX may crash on memory given twice, so look
    bounded: bool  # several CPU devices: bound what is in flight

    def flattened(self, state: PyTree) -> Any:
        """Returns a state as the function takes it."""
        if self.structure is None:
            return state
        is_state = type(state) is TrainState
        leaves = self.structure.flatten(state) if is_state else None
        if leaves is None:
            raise _Retrace  # the state has another structure
        return leaves


class _Thread(threading.local):
    """What one thread is doing with a step."""

    may_trace = False
    is_quiet = False


class _Retrace(Exception):  # noqa: N818 (no error: it stops a trace that has to wait)
    """JAX traces a program again, and nothing has said why yet."""


class CompiledStep(Generic[P, R]):
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
        self._names = _parameter_names(step, self._name, _BY_PLACE | _BY_NAME)
        self._positional = _parameter_names(step, self._name, _BY_PLACE)
        for name in static_names:
            if self._names and name == self._names[0]:
                msg = f"{self._name}: {name!r} is the state; it cannot be static."
                raise StepError(msg)
            if self._names and name not in self._names and not _takes_any(step):
                hint = did_you_mean(name, self._names)
                msg = f"{self._name} has no argument {name!r} to be static.{hint}"
                raise StepError(msg)
            if name in _parameter_names(step, self._name, _BY_PLACE_ONLY):
                msg = (
                    f"{self._name}: {name!r} is positional-only, and what is static is "
                    "passed by name. Take the '/' out of the signature."
                )
                raise StepError(msg)
        self.static_argnames = static_names
        self._on_recompile: OnRecompile = on_recompile
        self._layouts = layouts
        self._programs: dict[_Signature, _JittedStep] = {}
        self._program: _JittedStep | None = None
        self._thread = _Thread()
        self._in_flight = 0
        self._places_rest = False
        # The mesh that jax.set_mesh has set, if calls can run under it; or none.
        self._ambient: jax.sharding.AbstractMesh | None = None

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
        if ambient is not self._ambient and self._is_foreign(ambient, args, kwargs):
            with _jax.without_set_mesh():
                return self._run(args, kwargs)
        return self._run(args, kwargs)

    def run_again(self, *args: Any) -> R:
        """Runs the step as a call would, where it was called under this ambient mesh.

        Args:
            *args: The state, and the step's other arguments.
        """
        return self._run(args, {})

    def _is_foreign(
        self, ambient: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Returns whether `jax.set_mesh` has set another mesh than the state's.

        JAX would refuse the state's arrays under it. A mesh that is the state's own
        stays, for functions that constrain values by a PartitionSpec alone.
        """
        if ambient.empty:
            self._ambient = ambient
            return False
        if _jax.is_tracing():
            return False
        leaves = jax.tree.leaves(args[:1] or kwargs)
        shardings = (_jax.sharding_of(leaf) for leaf in leaves)
        meshes = (x.mesh for x in shardings if isinstance(x, NamedSharding))
        mesh = next(meshes, None)
        if mesh is None or mesh.abstract_mesh != ambient:
            return True
        self._ambient = ambient
        return False

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        static: tuple[Any, ...] = ()
        if kwargs or self.static_argnames or not args:
            args, kwargs, static = self._normalized(args, kwargs)
        program = self._program
        if self._places_rest and program is not None:
            args, kwargs = _rest_placed(args, kwargs, program.signature)
        try:
            if program is None or (
                program.loose
                and _layouts_of(args[1:], kwargs, None)
                != program.signature.rest_layouts
            ):
                program, args, kwargs = self._switch(static, args, kwargs)
            rest = (args[1:], kwargs)
            state = args[0]
            if program.structure is not None:
                state = program.flattened(state)
            if program.spread and gives_memory_twice(state, rest):
                check_memory(self._name, self._names, args, kwargs)
            result = program.jitted(static, state, rest)
        except Exception as error:
            # Nothing has run: find out whether this call needs another program.
            found = self._after_error(error, program, static, args, kwargs)
            program, args, kwargs = found
            result = self._run_traced(program, static, args, kwargs)
        if program.bounded:
            self._in_flight += 1
            if self._in_flight >= _MAX_IN_FLIGHT:  # threads may count past it
                self._in_flight = 0
                jax.block_until_ready(result)
        if program.structure is not None:
            return program.structure.lazy(result[0]), result[1]
        return result

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the step for these arguments, as `jax.jit(...).lower` does.

        Args:
            *args: As for a call; arrays may be `jax.ShapeDtypeStruct` with shardings.
            **kwargs: Arguments by name.
        """
        ambient = jax.sharding.get_abstract_mesh()
        if self._is_foreign(ambient, args, kwargs):
            with _jax.without_set_mesh():
                return self.lower(*args, **kwargs)
        args, kwargs, static = self._normalized(args, kwargs)
        signature = self._signature(args, kwargs)
        before, self._thread.is_quiet = self._thread.is_quiet, True
        try:
            if signature not in self._programs:
                now = describe(self._names, static, args, kwargs)
                program = self._make(signature, now)
                self._programs[signature] = self._mended(program, static, args, kwargs)
            program = self._programs[signature]
            state = program.flattened(args[0])
            return program.jitted.lower(static, state, (args[1:], kwargs))
        finally:
            self._thread.is_quiet = before

    def _run_traced(
        self, program: _JittedStep, static: Any, args: Any, kwargs: Any
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

    # Arguments.

    def _normalized(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """Returns positional, keyword and static arguments, the state first."""
        if not args:
            if not self._names or self._names[0] not in kwargs:
                msg = f"{self._name} takes the state as its first argument."
                raise StepError(msg)
            kwargs = dict(kwargs)
            args = (kwargs.pop(self._names[0]),)
        kwargs = dict(kwargs)
        places = self._positional
        at = min(
            (places.index(name) for name in self.static_argnames if name in places),
            default=len(places),
        )
        # By name or by place is the same program.
        for name in places[len(args) : at]:
            if name not in kwargs:
                break
            args = (*args, kwargs.pop(name))
        if not self.static_argnames:
            return args, kwargs, ()
        if at < min(len(args), len(places)):  # a static one: all from there by name
            if len(args) > len(places):
                msg = (
                    f"{self._name}: {places[at]!r} is static and comes before *args; "
                    "make it a keyword-only argument, after them."
                )
                raise StepError(msg)
            for name, value in zip(places[at:], args[at:], strict=False):
                if name in kwargs:
                    msg = f"{self._name} got argument {name!r} twice."
                    raise StepError(msg)
                kwargs[name] = value
            args = args[:at]
        static = []
        for name in self.static_argnames:
            if name in kwargs:
                value = kwargs.pop(name)
                try:
                    hash(value)
                except TypeError:
                    msg = (
                        f"{self._name}: static argument {name!r} is a "
                        f"{type(value).__name__}, which cannot be hashed. Give a tuple "
                        "or a frozen dataclass, or pass it as an array argument."
                    )
                    raise StepError(msg) from None
                static.append((name, value))
        return args, kwargs, tuple(static)

    # Programs.

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Signature:
        if _paths.holds_modules(args[0]):
            msg = (
                f"{self._name}: the state holds an NNX module. Pass what "
                "nnx.split(module) gives, or a TrainState; a module would be taken "
                "apart at every call, and what it shares would be doubled."
            )
            raise StepError(msg)
        state_leaves, state_def = jax.tree.flatten(args[0])
        rest_def = jax.tree.structure((args[1:], kwargs))
        layouts = [layout_of(leaf) for leaf in state_leaves]
        state_layouts = _one_mesh(self._name, args[0], layouts)
        # What is on no mesh yet comes back from the step on the mesh: the next call
        # would be another one if it did not start there.
        whole = _whole(state_layouts)
        rest_layouts = _layouts_of(args[1:], kwargs, whole)
        is_state = type(args[0]) is TrainState
        structure = StateStructure.of(args[0]) if is_state else None
        return _Signature(state_def, structure, state_layouts, rest_def, rest_layouts)

    def _switch(
        self, static: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_JittedStep, tuple[Any, ...], dict[str, Any]]:
        """Makes the program for these arguments the current one, and places them."""
        signature = self._signature(args, kwargs)
        given = kwargs
        placed = (_placed(args[0], signature), *args[1:])
        placed, kwargs = self._with_rest_placed(placed, kwargs, signature)
        if signature not in self._programs:
            now = describe(self._names, static, args, given)
            before = [p.first_call for p in self._programs.values() if p.seen]
            self._explain(now, before)
            program = self._make(signature, now)
            self._programs[signature] = self._mended(program, static, placed, kwargs)
        program = self._program = self._programs[signature]
        return program, placed, kwargs

    def _with_rest_placed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], signature: _Signature
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Places arrays without a layout on the state's mesh; notes if any were."""
        placed = _rest_placed(args, kwargs, signature)
        before, after = map(jax.tree.leaves, ((args, kwargs), placed))
        if any(a is not b for a, b in zip(before, after, strict=True)):
            self._places_rest = True  # look for more at every call
        return placed

    def _mended(
        self,
        program: _JittedStep,
        static: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> _JittedStep:
        """Returns the program, or one with right gradients of kernels in its place.

        JAX keeps the trace that is looked at for the program's first call.
        """
        if not program.spread or _jax.is_tracing():
            return program
        rest = (args[1:], kwargs)
        state = program.flattened(args[0])
        jaxpr = program.jitted.trace(static, state, rest).jaxpr.jaxpr
        axes = gradient_axes(jaxpr, args[0], rest)
        if axes is None:
            return program
        return self._make(program.signature, program.first_call, axes)

    def _after_error(
        self,
        error: Exception,
        program: _JittedStep | None,
        static: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[_JittedStep, tuple[Any, ...], dict[str, Any]]:
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
        self._explain(describe(self._names, static, args, kwargs), program.seen)
        return program, args, kwargs

    def _make(
        self,
        signature: _Signature,
        now: CallSignature,
        axes: GradientAxes | None = None,
    ) -> _JittedStep:
        # None leaves the layout to JAX.
        structure = signature.structure
        into: Any = signature.state_layouts
        if structure is None:
            into = signature.state_def.unflatten(into)
        rest = signature.rest_def.unflatten(signature.rest_layouts)
        seen: list[CallSignature] = []

        def traced(static: tuple[Any, ...], state: PyTree, rest: Any) -> Any:
            step = functools.partial(self._traced, seen, static)
            if axes is not None:
                step = with_right_gradients(step, axes)
            if structure is None:
                return step(state, rest)
            state, aux = step(structure.unflatten(state), rest)
            return structure.flatten(state), aux

        traced.__name__ = traced.__qualname__ = self._name  # shown by profilers
        jitted = jax.jit(
            traced,
            static_argnums=0,
            donate_argnums=1,
            in_shardings=(into, rest),
            out_shardings=(into, None),
        )
        devices = {
            device
            for layout in (*signature.state_layouts, *signature.rest_layouts)
            if layout is not None
            for device in layout.device_set
        }
        spread = len(devices) > 1
        return _JittedStep(
            signature,
            jitted,
            now,
            seen,
            structure,
            loose=None in signature.rest_layouts,
            spread=spread,
            bounded=spread and next(iter(devices)).platform == "cpu",
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
        if seen and not self._thread.is_quiet and not self._thread.may_trace:
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
        kept = self._kept(state, new_state)
        if not self._thread.is_quiet:
            seen.append(describe(self._names, static, (state, *args), kwargs))
        return kept, aux

    def _explain(self, now: CallSignature, before: list[CallSignature]) -> None:
        """Says what is unlike the most similar call before, if there was one."""
        # Inside another transformation every call is traced.
        if self._on_recompile == "ignore" or not before or _jax.is_tracing():
            return
        found = min((differences(one, now) for one in before), key=len)
        first, *_ = [*found, SETTING]
        line = f"{self._name} recompiles: {first}."
        if self._on_recompile == "error":
            raise StepError(line)
        warnings.warn(line, RecompileWarning, stacklevel=stack_level())

    def _kept(self, old: PyTree, new: PyTree) -> Any:
        """Returns the new state, or raises if it is not of the old one's kind."""
        if jax.tree.structure(old) != jax.tree.structure(new):
            raise StepError(structure_text(self._name, old, new))
        leaves = []
        named = named_leaves(old)
        for (path, was), now in zip(named, jax.tree.leaves(new), strict=True):
            before, after = jax.typeof(was), jax.typeof(now)
            if (before.shape, before.dtype) != (after.shape, after.dtype):
                msg = (
                    f"{self._name} returned a state whose {path!r} is "
                    f"{_render.array_text(after.dtype, after.shape)}; it came in as "
                    f"{_render.array_text(before.dtype, before.shape)}. A step keeps "
                    "the shapes and dtypes of its state: cast or reshape it back."
                )
                raise StepError(msg)
            # A number added can make a leaf weakly typed: that alone would recompile.
            leaves.append(_jax.with_weak_type(now, weak_type=before.weak_type))
        return jax.tree.unflatten(jax.tree.structure(old), leaves)


# Reading arguments.


_BY_PLACE = {
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
}
_BY_PLACE_ONLY = {inspect.Parameter.POSITIONAL_ONLY}
_BY_NAME = {inspect.Parameter.KEYWORD_ONLY}


def _parameter_names(
    step: Callable[..., Any], name: str, kinds: Collection[Any]
) -> tuple[str, ...]:
    parameters = inspect.signature(step).parameters.values()
    names = tuple(one.name for one in parameters if one.kind in kinds)
    if not parameters:
        msg = f"{name} takes no arguments; a step takes the state first."
        raise StepError(msg)
    return names


def _takes_any(step: Callable[..., Any]) -> bool:
    kinds = {one.kind for one in inspect.signature(step).parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds


def _layouts_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], whole: NamedSharding | None
) -> tuple[Any, ...]:
    """Returns the layouts of arrays; for those that have none, `whole`."""
    leaves = jax.tree.leaves((args, kwargs))
    return tuple([layout_of(leaf) or whole for leaf in leaves])


def _whole(layouts: tuple[Any, ...]) -> NamedSharding | None:
    """Returns the layout of what is the same on every device of a state's mesh."""
    meshes = (one.mesh for one in layouts if isinstance(one, NamedSharding))
    mesh = next(meshes, None)
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def _placed(state: PyTree, signature: _Signature) -> Any:
    """Places the leaves that had no layout: else the next call would be another one."""
    leaves = [
        leaf if layout is None or layout_of(leaf) else jax.device_put(leaf, layout)
        for leaf, layout in zip(
            jax.tree.leaves(state), signature.state_layouts, strict=True
        )
    ]
    return signature.state_def.unflatten(leaves)


def _rest_placed(
    args: tuple[Any, ...], kwargs: dict[str, Any], signature: _Signature
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replicates arrays without a layout over the state's mesh."""
    whole = _whole(signature.state_layouts)
    if whole is None:
        return args, kwargs

    def placed(leaf: Leaf) -> Any:
        is_array = hasattr(leaf, "dtype") and not isinstance(
            leaf, (Tracer, jax.ShapeDtypeStruct)
        )
        is_free = is_array and layout_of(leaf) is None
        return jax.device_put(leaf, whole) if is_free else leaf

    rest, kwargs = jax.tree.map(placed, (args[1:], kwargs))
    return (args[0], *rest), kwargs


def _one_mesh(name: str, state: PyTree, layouts: list[Any]) -> tuple[Any, ...]:
    """Gives leaves without a layout the replicated one, if the others have a mesh."""
    whole = _whole(tuple(layouts))
    if whole is None:
        return tuple(layouts)
    devices = whole.device_set
    for (path, _), layout in zip(named_leaves(state), layouts, strict=True):
        if layout is not None and layout.device_set != devices:
            msg = (
                f"{name}: the state's {path!r} lies on other devices than the rest, "
                f"which is on {mesh_text(whole.mesh)}. Move it with "
                "relayout(x, layout)."
            )
            raise StepError(msg)
    return tuple(whole if layout is None else layout for layout in layouts)
