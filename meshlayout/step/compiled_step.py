"""`compile_step`: one jit, state donated, layouts kept; never a silent recompile.

JAX compiles again without a word when an argument changes, refuses arguments in its
own words, and may end the process for memory that is donated twice. So a compiled step
remembers what each program was traced for. A call goes straight to `jax.jit`; only one
that `jax.jit` cannot answer from its cache is examined here, before anything has run.
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
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

from meshlayout import _checks, _jax, _render
from meshlayout._annotations import PyTree
from meshlayout._counts import counts
from meshlayout.cluster.programs import new_program, program_facts
from meshlayout.errors import RecompileWarning, StepError, stack_level
from meshlayout.layout_map import LayoutMap, activate
from meshlayout.step.call_errors import (
    SETTING,
    check_arguments,
    check_memory,
    differences,
    labelled,
    structure_text,
    what,
)
from meshlayout.step.inspection import StepInspection
from meshlayout.step.jitted_step import (
    CallSignature,
    JittedStep,
    LayoutSignature,
    Retrace,
    StepParameters,
    is_deleted,
    layouts_of,
    may_be_donated_twice,
    named_leaves,
)
from meshlayout.step.placement import in_own_mesh, layout_of, place_rest


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
    the same coming out as going in. The state that was passed is used up: continue with
    the one that is returned. On several virtual CPU devices, every eighth call waits
    for its result, because more steps in flight can deadlock XLA's thread pool.

    Args:
        step: A function of a state (any pytree of arrays) and other pytrees. It
            returns a pair: the new state, in the same structure, shapes and dtypes,
            and any pytree.
        static_argnames: Hashable arguments that are not arrays; a new value makes a
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
        msg = f"layouts must be a LayoutMap, got {_checks.shown(layouts)}."
        raise StepError(msg)


class _Thread(threading.local):
    """What one thread is doing with a step."""

    may_trace = False  # the recompilation has been explained
    is_quiet = False  # it is lowered, which needs no explanation


class CompiledStep(StepInspection, Generic[P, R]):
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
            msg = f"compile_step takes a function, and got {_checks.shown(step)}."
            raise StepError(msg)
        functools.update_wrapper(self, step)
        self._step = step
        self._name = getattr(step, "__name__", type(step).__name__)
        self._parameters = StepParameters(step, self._name, static_names)
        self._names = self._parameters.names
        self.static_argnames = static_names
        self._on_recompile: OnRecompile = on_recompile
        self._layouts = layouts
        self._programs: dict[LayoutSignature, JittedStep] = {}
        # The program of the last call: what the next one tries first.
        self.program: JittedStep | None = None
        self._thread = _Thread()
        self._in_flight = 0
        self._places_rest = False
        self._no_mesh: jax.sharding.AbstractMesh | None = None
        # Parameters whose values differ between processes, as those with clocks do.
        self.own: tuple[str, ...] = ()

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
        # Compiled programs belong to this process, and locks cannot be copied.
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
        return self._call(args, kwargs)

    def again(self, state: Any, rest: Any, arrays: list[Any]) -> Any:
        """Runs the step on what its last call returned and got, but for some arrays.

        Args:
            state: The state that the last call returned, which is not used up.
            rest: The second argument of that call.
            arrays: The third argument, which alone is checked.
        """
        program = self.program
        ids = {*map(id, arrays)}
        if (
            program is None
            or program.is_loose
            or self._places_rest  # as NumPy arrays, at every call
            or jax.sharding.get_abstract_mesh() is not self._no_mesh
            or program.is_elsewhere(arrays)
            or True in map(is_deleted, arrays)
            or not ids.isdisjoint(map(id, jax.tree.leaves(state)))
        ):
            return self(state, rest, arrays)  # type: ignore[call-arg]
        counts.steps += program.is_shared
        try:
            result = program.jitted((), state, ((rest, arrays), {}))
        except Exception:
            counts.steps -= program.is_shared
            if any(map(is_deleted, jax.tree.leaves(state))):  # it has run
                raise
            return self(state, rest, arrays)  # type: ignore[call-arg]
        if program.is_bounded:
            self.wait_if_many(result)
        return result

    def _call(self, args: Any, kwargs: Any) -> Any:
        ambient = jax.sharding.get_abstract_mesh()
        if ambient is self._no_mesh or ambient.empty:
            self._no_mesh = ambient  # to ask an abstract mesh takes time
            return self._run(args, kwargs)
        with in_own_mesh((args, kwargs)):
            return self._run(args, kwargs)

    def _run(self, args: Any, kwargs: dict[str, Any]) -> Any:
        static: tuple[Any, ...] = ()
        if kwargs or self.static_argnames or not args:
            args, kwargs, static = self._parameters.bind(args, kwargs)
        program, has_begun = self.program, False
        if self._places_rest and program is not None:
            args, kwargs = place_rest(args, kwargs, program.signature.whole)
        try:
            if program is None or (
                program.is_loose
                and layouts_of((args[1:], kwargs), None)
                != program.signature.rest_layouts
            ):
                program, args, kwargs = self._switch(static, args, kwargs)
            rest = (args[1:], kwargs)
            structure = program.signature.structure
            state = args[0] if structure is None else program.flattened(args[0])
            leaves = jax.tree.leaves((state, rest))
            if program.is_elsewhere(leaves):
                raise Retrace
            if program.is_spread and may_be_donated_twice(state, rest):
                check_memory(self._name, self._names, args, kwargs)
            counts.steps += program.is_shared
            has_begun = True
            result = program.jitted(static, state, rest)
        except Exception as error:
            # A step that fails while it runs, as collectives do if a process is gone,
            # has used up the state. On several devices it was not used up before.
            has_run = has_begun and program is not None and program.is_spread
            if has_run and any(map(is_deleted, jax.tree.leaves(args[:1]))):
                raise
            # Nothing has run: find out whether this call needs another program.
            if has_begun and program is not None:
                counts.steps -= program.is_shared
            needed = self._after_error(error, program, static, args, kwargs)
            program, args, kwargs = needed
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

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Traces the step for these arguments, as `jax.jit(...).trace` does.

        Args:
            *args: As for a call; arrays may be `jax.ShapeDtypeStruct` with shardings.
            **kwargs: Arguments by name.
        """
        before, self._thread.is_quiet = self._thread.is_quiet, True
        try:
            with in_own_mesh((args, kwargs)):
                args, kwargs, static = self._parameters.bind(args, kwargs)
                rest = (args[1:], kwargs)
                signature = LayoutSignature.of(self._name, args[0], rest)
                program = self._programs.get(signature)
                # Not the one that calls use, if other processes have it, too: they
                # compare what a call compiles, and may not trace this one.
                if program is None or signature.has_peers:
                    call = CallSignature(self._names, static, args, kwargs)
                    program = JittedStep.of(
                        self._traced,
                        self._name,
                        signature,
                        call,
                        (static, args[0], rest),
                    )
                    if not signature.has_peers:
                        self._programs[signature] = program
                jitted: Any = program.jitted
                return jitted.trace(static, program.flattened(args[0]), rest)
        except Exception:
            if args:  # what is wrong with them, if it is they
                check_arguments(self._name, self._names, args, kwargs)
            raise
        finally:
            self._thread.is_quiet = before

    def _run_traced(
        self, program: JittedStep, static: Any, args: Any, kwargs: Any
    ) -> Any:
        """Runs a program that was explained, and may be traced."""
        before, self._thread.may_trace = self._thread.may_trace, True
        try:
            if program.signature.has_peers:
                call = CallSignature(self._names, static, args, kwargs)
                why = self._change(call, program.seen) or "it was called before"
                with new_program(self._name, program.signature.devices, why) as compare:
                    self._compare(compare, program, call, args, kwargs)
            state = program.flattened(args[0])
            # Only now: while it waits for the others' program, it is behind those that
            # are in this call without a new one.
            counts.steps += program.is_shared
            return program.jitted(static, state, (args[1:], kwargs))
        except Exception as error:
            check_arguments(self._name, self._names, args, kwargs)
            raise error from None
        finally:
            self._thread.may_trace = before

    def __repr__(self) -> str:
        return f"CompiledStep({self._name}, {len(self._programs)} layouts seen)"

    # Programs.

    def _switch(
        self, static: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[JittedStep, tuple[Any, ...], dict[str, Any]]:
        """Makes the program for these arguments the current one, and places them."""
        signature = LayoutSignature.of(self._name, args[0], (args[1:], kwargs))
        program = self._programs.get(signature)
        call = CallSignature(self._names, static, args, kwargs)
        before: list[CallSignature] = []
        if program is None:
            before = [p.first_call for p in self._programs.values() if p.seen]
            self._explain(call, before)
        args, kwargs = self._with_rest_placed(args, kwargs, signature)
        # A leaf without a layout comes back with one, and would be a recompilation.
        leaves = [
            leaf if layout is None or layout_of(leaf) else _jax.put(leaf, layout)
            for leaf, layout in zip(
                jax.tree.leaves(args[0]), signature.state_layouts, strict=True
            )
        ]
        args = (signature.state_def.unflatten(leaves), *args[1:])
        if program is None:
            arguments = (static, args[0], (args[1:], kwargs))
            new: Any = contextlib.nullcontext()
            if signature.has_peers:
                why = self._change(call, before)
                new = new_program(self._name, signature.devices, why)
            with new as compare:
                program = JittedStep.of(
                    self._traced, self._name, signature, call, arguments
                )
                if compare is not None:
                    self._compare(compare, program, call, args, kwargs)
            self._programs[signature] = program
        self.program = program
        return program, args, kwargs

    def _with_rest_placed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], signature: LayoutSignature
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Puts arrays without a layout on the state's mesh, and remembers to do so."""
        placed = place_rest(args, kwargs, signature.whole)
        before, after = map(jax.tree.leaves, ((args, kwargs), placed))
        if any(a is not b for a, b in zip(before, after, strict=True)):
            self._places_rest = True  # at every call from now on
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
        rest = (args[1:], kwargs)
        if LayoutSignature.of(self._name, args[0], rest) != program.signature:
            return self._switch(static, args, kwargs)
        if not isinstance(error, Retrace):
            raise error
        if not self._places_rest:
            args, kwargs = self._with_rest_placed(args, kwargs, program.signature)
            if self._places_rest:
                return program, args, kwargs
        now = CallSignature(self._names, static, args, kwargs)
        self._explain(now, program.seen)
        return program, args, kwargs

    def _compare(
        self,
        compare: Callable[[Callable[[], Mapping[str, str]]], None],
        program: JittedStep,
        call: CallSignature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Compares a program with those of other processes, before its first call."""
        key = call.static, tuple(jax.tree.leaves(call.arguments))
        if key in program.compared or _jax.is_tracing():
            return

        def facts() -> Mapping[str, str]:
            # JAX keeps what is lowered for the call that follows.
            jitted: Any = program.jitted
            state = program.flattened(args[0])
            lowered = jitted.lower(call.static, state, (args[1:], kwargs))
            # The texts of other objects may show where they are in memory.
            static = {
                name: repr(value)
                for name, value in call.static
                if isinstance(value, (bool, int, float, str, NoneType))
            }
            arguments = dict(labelled(self._names, args, kwargs))
            return program_facts(arguments, lowered.as_text(), static, self.own)

        compare(facts)
        program.compared.add(key)

    # Inside the trace.

    def _traced(
        self,
        seen: list[CallSignature],
        static: tuple[Any, ...],
        state: PyTree,
        rest: Any,
    ) -> Any:
        args, kwargs = rest
        # With jax_debug_nans, JAX also runs this on arrays, to find the operation; that
        # is no recompilation.
        is_trace = any(isinstance(x, Tracer) for x in jax.tree.leaves(state))
        may_trace = self._thread.is_quiet or self._thread.may_trace
        if seen and is_trace and not may_trace:
            raise Retrace
        with contextlib.ExitStack() as stack:
            if self._layouts:
                stack.enter_context(activate(self._layouts))
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
        """Warns of what differs from the most similar earlier call, if there is one."""
        # Inside another transformation every call is traced.
        if self._on_recompile == "ignore" or not before or _jax.is_tracing():
            return
        line = f"{self._name} recompiles: {self._change(now, before)}."
        if self._on_recompile == "error":
            raise StepError(line)
        warnings.warn(line, RecompileWarning, stacklevel=stack_level())

    @staticmethod
    def _change(now: CallSignature, before: list[CallSignature]) -> str:
        """Returns what differs from the nearest earlier call; empty without one."""
        changes = (differences(call, now) for call in before)
        fewest = min(changes, key=len, default=[""])
        return [*fewest, SETTING][0]

    def _like(self, old: PyTree, new: PyTree) -> Any:
        """Returns the new state, weakly typed where the old one is.

        Raises:
            StepError: If it differs from the old one in structure, shape or dtype.
        """
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
            # Adding a Python number can change it, and that alone would recompile.
            leaves.append(_jax.with_weak_type(leaf, weak_type=before.weak_type))
        return treedef.unflatten(leaves)
