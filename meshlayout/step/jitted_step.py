"""One jitted function of a compiled step: what it is made for, and how it is called.

`jax.jit` needs the layouts of a state and its arguments in advance, so there is one
jitted function for each combination of structures and layouts; shapes it distinguishes
itself. What each was traced for is remembered, because JAX compiles again without a
word about why.

Flattening a `TrainState` and building one costs a call of a small step a third of its
time on the host, and most states are only passed to the next call. So a jitted function
takes and returns a state as a tuple of plain arrays, and what a call returns becomes a
state when one of its fields is read.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _jax, _paths, _render
from meshlayout._annotations import DType, Leaf, PyTree
from meshlayout.errors import StepError, did_you_mean
from meshlayout.state import TrainState
from meshlayout.step.kernel_gradients import check_kernel_gradients
from meshlayout.step.placement import layout_of, mesh_text, replicated


class Retrace(Exception):  # noqa: N818 (not an error: it stops a trace that must wait)
    """JAX traces a program again, and the reason has not been explained yet."""


# Arguments.


class StepParameters:
    """The parameters of a step: which are static, and how a call fills them.

    Args:
        step: The step.
        name: Its name in messages.
        static_names: The parameters that are not arrays.

    Attributes:
        names: The parameters other than `*args` and `**kwargs`, in order.

    Raises:
        StepError: If the step takes no arguments, or a parameter cannot be static.
    """

    def __init__(
        self, step: Callable[..., Any], name: str, static_names: tuple[str, ...]
    ) -> None:
        self._step, self._static_names = name, static_names
        self._signature = inspect.signature(step)
        parameters = self._signature.parameters
        kinds = {name: parameter.kind for name, parameter in parameters.items()}
        if not kinds:
            msg = f"{name} takes no arguments; a step takes the state first."
            raise StepError(msg)
        variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        self.names = tuple(name for name, kind in kinds.items() if kind not in variadic)
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
        for static in static_names:
            if (static,) == self.names[:1]:
                msg = f"{name}: {static!r} is the state; it cannot be static."
                raise StepError(msg)
            if self.names and static not in self.names and not takes_any:
                hint = did_you_mean(static, self.names)
                msg = f"{name} has no argument {static!r} to be static.{hint}"
                raise StepError(msg)
            if kinds.get(static) is inspect.Parameter.POSITIONAL_ONLY:
                msg = (
                    f"{name}: {static!r} is positional-only, and what is static is "
                    "passed by name. Take the '/' out of the signature."
                )
                raise StepError(msg)

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[tuple[str, Any], ...]]:
        """Returns positional, keyword and static arguments, the state first.

        An argument given by name or by position is then the same program.

        Raises:
            StepError: If the arguments do not fit, or a static one is not hashable.
        """
        if not args and (not self.names or self.names[0] not in kwargs):
            msg = f"{self._step} takes the state as its first argument."
            raise StepError(msg)
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            msg = f"{self._step}: {error}."
            raise StepError(msg) from None
        parameters = self._signature.parameters
        by_kind = {parameter.kind: name for name, parameter in parameters.items()}
        extra = bound.arguments.get(by_kind.get(inspect.Parameter.VAR_KEYWORD, ""), {})
        static = []
        for name in self._static_names:
            arguments = bound.arguments if name in bound.arguments else extra
            if name not in arguments:
                continue
            value = arguments.pop(name)
            try:
                hash(value)
            except TypeError:
                msg = (
                    f"{self._step}: static argument {name!r} is a "
                    f"{type(value).__name__}, which cannot be hashed. Give a tuple or "
                    "a frozen dataclass, or pass it as an array argument."
                )
                raise StepError(msg) from None
            static.append((name, value))
        # Arguments after a static one are passed by name, which *args cannot be.
        others = by_kind.get(inspect.Parameter.VAR_POSITIONAL)
        for name, _ in static if others in bound.arguments else ():
            if parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                msg = (
                    f"{self._step}: {name!r} is static and comes before *args; make it "
                    "a keyword-only argument, after them."
                )
                raise StepError(msg)
        return bound.args, bound.kwargs, tuple(static)


@dataclass(frozen=True)
class _Argument:
    """One leaf of an argument, without its values; a traced one's layout is unknown."""

    array: jax.ShapeDtypeStruct
    layout: Any
    is_traced: bool

    @classmethod
    def of(cls, leaf: Leaf) -> "_Argument":
        is_number = not hasattr(leaf, "dtype")
        is_weak = is_number or getattr(leaf, "weak_type", False)
        array = np.asarray(leaf) if is_number else leaf
        dtype = _jax.canonical_dtype(array.dtype)
        aval = jax.ShapeDtypeStruct(array.shape, dtype, weak_type=is_weak)
        return cls(aval, layout_of(leaf), isinstance(leaf, Tracer))

    def __str__(self) -> str:
        weak = " (weakly typed)" if self.array.weak_type else ""
        return _render.array_text(self.array.dtype, self.array.shape) + weak


class CallSignature:
    """Every argument of a call: what a program is compiled for.

    Args:
        names: The step's parameters.
        static: The static arguments by name.
        args: The other positional arguments.
        kwargs: The other arguments by name.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        static: tuple[tuple[str, Any], ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.names, self.static = names, static
        # Their names are only looked up to explain a recompilation, which is rare.
        self.arguments = jax.tree.map(_Argument.of, (args, kwargs))


# States.


@dataclass(frozen=True)
class StateStructure:
    """The structure of a train state, and which of its leaves are PRNG keys.

    Attributes:
        treedef: As `jax.tree.flatten` gives it.
        keys: The index and the dtype of each leaf that is a PRNG key; a compiled
            function takes the words of one faster.
    """

    treedef: Any  # PyTreeDef, a variable to a type checker
    keys: tuple[tuple[int, DType], ...]

    @classmethod
    def of(cls, leaves: Sequence[Leaf], treedef: Any) -> "StateStructure":
        """Returns the structure of a flattened state."""
        dtypes = enumerate(getattr(leaf, "dtype", None) for leaf in leaves)
        keys = (entry for entry in dtypes if type(entry[1]) is _jax.KeyDType)
        return cls(treedef, tuple(keys))

    def flatten(self, state: PyTree) -> tuple[Leaf, ...] | None:
        """Returns the arrays of a state, or None if it has another structure.

        The dicts of a state can be changed in place, so the arrays that it was made
        of are used only until a field is read.
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
        # The last entry: whether the arrays may still be donated, which is once.
        object.__setattr__(state, "_flat", [leaves, self, True])
        return state


def _words(key: Leaf) -> Any:
    if isinstance(key, jax.ShapeDtypeStruct):
        words = jax.eval_shape(jax.random.key_data, key)
        return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=key.sharding)
    return (
        jax.random.key_data(key) if isinstance(key, Tracer) else _jax.words_of_key(key)
    )


# The jitted function.


@dataclass(frozen=True)
class LayoutSignature:
    """What one jitted function is made for: structures and layouts, not shapes.

    Attributes:
        state_def: The structure of the state.
        structure: That of a TrainState, which is passed flat; else None.
        state_layouts: The layout of each leaf of the state; None for one without.
        rest_def: The structure of the other arguments.
        rest_layouts: Their layouts.
        whole: The layout for arrays on no mesh: replicated over the state's.
    """

    state_def: Any
    structure: StateStructure | None
    state_layouts: tuple[Any, ...]
    rest_def: Any
    rest_layouts: tuple[Any, ...]
    whole: NamedSharding | None = field(compare=False)

    @classmethod
    def of(cls, step: str, state: PyTree, rest: PyTree) -> "LayoutSignature":
        """Returns the structures and layouts of a state and the other arguments.

        Raises:
            StepError: If the state is a module, or on several meshes.
        """
        if _paths.holds_modules(state):
            msg = (
                f"{step}: the state holds an NNX module. Pass what "
                "nnx.split(module) gives, or a TrainState; a module would be taken "
                "apart at every call, and what it shares would be doubled."
            )
            raise StepError(msg)
        leaves, treedef = jax.tree.flatten(state)
        # What is on no mesh yet comes back from the step on the mesh. If it did not
        # start there, the next call would be a recompilation.
        whole = replicated(map(layout_of, leaves))
        state_layouts = layouts_of(leaves, whole)
        if whole is not None:
            _check_devices(step, state, state_layouts, whole)
        is_state = type(state) is TrainState
        return cls(
            treedef,
            StateStructure.of(leaves, treedef) if is_state else None,
            state_layouts,
            jax.tree.structure(rest),
            tuple(map(_plainly_replicated, layouts_of(rest, whole))),
            whole,
        )

    @functools.cached_property
    def devices(self) -> frozenset[Any]:
        """All devices of all layouts."""
        layouts = (*self.state_layouts, *self.rest_layouts)
        sets = (layout.device_set for layout in layouts if layout is not None)
        return frozenset().union(*sets)

    @functools.cached_property
    def has_peers(self) -> bool:
        """Whether these are devices of several processes."""
        return len({device.process_index for device in self.devices}) > 1


def _check_devices(
    step: str, state: PyTree, layouts: tuple[Any, ...], whole: NamedSharding
) -> None:
    for index, layout in enumerate(layouts):
        if layout.device_set != whole.device_set:
            path, _ = named_leaves(state)[index]
            msg = (
                f"{step}: the state's {path!r} is on other devices than the rest, "
                f"which is on {mesh_text(whole.mesh)}. Move it with "
                "relayout(x, layout)."
            )
            raise StepError(msg)


@dataclass(frozen=True)
class JittedStep:
    """One jitted function of a compiled step.

    Attributes:
        signature: What it is made for.
        jitted: What `jax.jit` returned: a function of static arguments, the state,
            and the other arguments as `(args, kwargs)`.
        first_call: The call it was made for.
        seen: What it was traced for.
        is_loose: Whether some argument has no layout: to look at in every call.
        is_spread: Whether it runs on several devices. JAX may end the process there
            for memory that is donated twice or was used up, so arguments are checked.
        is_bounded: Whether these are CPU devices, which bound what is in flight.
        is_shared: Whether it runs on devices of all processes, so all must call it.
        checked: Layouts known to be on the program's devices.
        compared: Calls whose program was compared with those of other processes.
    """

    signature: LayoutSignature
    jitted: Callable[..., Any]
    first_call: CallSignature
    seen: list[CallSignature]
    is_loose: bool
    is_spread: bool
    is_bounded: bool
    is_shared: bool
    checked: set[Any] = field(default_factory=set)
    compared: set[Any] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        step: Callable[..., Any],
        name: str,
        signature: LayoutSignature,
        call: CallSignature,
        arguments: tuple[Any, PyTree, Any],
    ) -> "JittedStep":
        """Jits a step; refuses one whose kernel gradients XLA would multiply.

        Args:
            step: What to jit: a function of the list `seen`, the static arguments,
                the state and the rest.
            name: The name of the step, which profilers show.
            signature: The structures and layouts.
            call: The call that it is for.
            arguments: The static arguments, the state and the rest of that call.
        """
        seen: list[CallSignature] = []
        noting = functools.partial(step, seen)
        devices = signature.devices
        processes = {device.process_index for device in devices}
        jitted: Any = _jit(noting, name, signature)
        program = cls(
            signature,
            jitted,
            call,
            seen,
            is_loose=None in signature.rest_layouts,
            is_spread=len(devices) > 1,
            is_bounded=len(devices) > 1 and next(iter(devices)).platform == "cpu",
            is_shared=len(processes) == jax.process_count(),
        )
        if program.is_spread or _jax.is_tracing():
            # This trace is not wasted: JAX keeps it for the program's first call.
            static, state, rest = arguments
            traced = jitted.trace(static, program.flattened(state), rest)
            check_kernel_gradients(traced.jaxpr.jaxpr, state, rest)
        return program

    def is_elsewhere(self, leaves: Sequence[Leaf]) -> bool:
        """Returns, fast, whether an array is bound to other devices than the program's.

        `jax.jit` compares how arrays are sharded, not where, and would copy such an
        array to the program's devices at every call and leave the results there.
        """
        try:
            if self.checked.issuperset([leaf.sharding for leaf in leaves]):
                return False
        except AttributeError:
            pass  # NumPy arrays, numbers, tracers
        devices = self.signature.devices
        layouts = {layout_of(leaf) for leaf in leaves} - {None}
        if any(layout.device_set != devices for layout in layouts if devices):
            return True
        self.checked.update(layouts)
        return False

    def flattened(self, state: PyTree) -> Any:
        """Returns a state as the function takes it.

        Raises:
            Retrace: If it has another structure.
        """
        structure = self.signature.structure
        leaves = state if structure is None else structure.flatten(state)
        if leaves is None:
            raise Retrace
        return leaves


def _jit(
    step: Callable[..., Any], name: str, signature: LayoutSignature
) -> Callable[..., Any]:
    # None leaves a layout to JAX.
    structure = signature.structure
    state_layouts: Any = signature.state_layouts
    if structure is None:
        state_layouts = signature.state_def.unflatten(state_layouts)
    rest_layouts = signature.rest_def.unflatten(signature.rest_layouts)

    def traced(static: tuple[Any, ...], state: PyTree, rest: Any) -> Any:
        if structure is None:
            state, aux = step(static, state, rest)
            leaves, treedef = jax.tree.flatten(state)
            leaves = map(_sharded_on_device, leaves, signature.state_layouts)
            return treedef.unflatten(leaves), aux
        state, aux = step(static, structure.unflatten(state), rest)
        leaves = structure.flatten(state) or ()
        return tuple(map(_sharded_on_device, leaves, state_layouts)), aux

    traced.__name__ = traced.__qualname__ = name
    return jax.jit(
        traced,
        static_argnums=0,
        donate_argnums=1,
        in_shardings=(state_layouts, rest_layouts),
        out_shardings=(state_layouts, None),
    )


def _sharded_on_device(leaf: Leaf, layout: Any) -> Leaf:
    """Returns a result for the host's memory, sharded before it is moved there.

    JAX moves results to their memory first and then shards them: TPU compilers would
    gather on the host, or fail. tests/test_tpu_programs.py notices.
    """
    if getattr(layout, "memory_kind", None) != "pinned_host" or _jax.is_on_host(leaf):
        return leaf
    on_device = layout.with_memory_kind("device")
    return jax.device_put(_jax.constrain(leaf, on_device), layout)


# Leaves.


def layouts_of(tree: PyTree, whole: NamedSharding | None) -> tuple[Any, ...]:
    """Returns the layouts of arrays; for those that have none, `whole`."""
    return tuple([layout_of(leaf) or whole for leaf in jax.tree.leaves(tree)])


def _plainly_replicated(sharding: Any) -> Any:
    """Returns `P()` for `P(None)`, which JAX makes of it, and compares as another."""
    if not isinstance(sharding, NamedSharding) or any(sharding.spec):
        return sharding
    kind = sharding.memory_kind
    return NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=kind)


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """Returns the path and value of every leaf."""
    entries = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [("/".join(map(_paths.key_name, keys)), leaf) for keys, leaf in entries]


def is_deleted(leaf: Leaf) -> bool:
    """Returns whether a leaf is an array that was used up."""
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    return is_array and leaf.is_deleted()


def may_be_donated_twice(state: PyTree, rest: PyTree) -> bool:
    """Returns, fast, whether an array may be used up, or be passed twice.

    Args:
        state: The arrays that will be used up.
        rest: Other arrays.
    """
    leaves, others = jax.tree.leaves(state), jax.tree.leaves(rest)
    try:
        is_used_up = True in [leaf.is_deleted() for leaf in leaves]
    except (AttributeError, jax.errors.ConcretizationTypeError):
        return True  # NumPy arrays, numbers, tracers: to be checked one by one
    ids = {*map(id, leaves)}
    is_twice = len(ids) != len(leaves) or not ids.isdisjoint(map(id, others))
    return is_used_up or is_twice or True in map(is_deleted, others)
