"""One call of a function of a state's model, and of the submodules inside.

Remat by path, precision by path and the weights in BatchNorm all act when a submodule
is called. Linen has interceptors for that; NNX does not. Replacing the modules' classes
by subclasses was tried and is wrong: models look at `type(layer)`, register classes in
`__init_subclass__`, pickle them. So the `__call__` of a class is wrapped while any
thread is inside, and the wrapper checks whether the call is meant: a ContextVar holds
the interceptors, and each submodule that they want carries its path (in an attribute,
which the copies that `nnx.remat`, `nnx.scan` and `nnx.split` make carry, too).
"""

import contextlib
import functools
import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
from flax import linen as nn, nnx

from meshlayout import _paths
from meshlayout._annotations import PyTree
from meshlayout._patches import SharedPatches
from meshlayout.errors import StepError
from meshlayout.losses import ModelLoss
from meshlayout.losses.penalties import COLLECTION
from meshlayout.state import TrainState
from meshlayout.state.precision import Policies, cast, cast_for_compute


Module: TypeAlias = nn.Module | nnx.Module

# Collections that a step does not return as the model's state.
_PASSING = (COLLECTION, "intermediates")

# The names under which a plain `sow(nnx.Intermediate, name, ...)` is a loss.
_LOSS_NAME = re.compile(r"(^|_)loss(es)?$")

# JAX's words for a collective over an axis that nothing binds. Should they change,
# users see JAX's own error; test_step_inputs.py and test_interception.py notice.
_UNBOUND_AXIS = re.compile(r"unbound axis name:? '?(\w+)")

# InstanceNorm is new in Flax 0.12.
_NNX_NORMS = tuple(
    getattr(nnx, name)
    for name in ("BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm")
    if hasattr(nnx, name)
)


class ModuleCall(NamedTuple):
    """A submodule that is about to be called: its path, itself, and how to call it."""

    path: str  # empty for the model itself
    module: Any
    proceed: Callable[..., Any]


class Interceptor(Protocol):
    """Handles the calls of some submodules."""

    def wants(self, path: str, module: Module) -> bool:
        """Returns whether it handles the calls of a submodule."""
        ...

    def call(
        self, call: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Returns what the call returns."""
        ...


Interceptors: TypeAlias = tuple[Interceptor, ...]

_of_model: ContextVar[Interceptors] = ContextVar("_of_model", default=())
_of_norms: ContextVar[Interceptors] = ContextVar("_of_norms", default=())

_PATH = "_meshlayout_path"


@dataclass(frozen=True, eq=False)
class _Path:
    """A submodule's path; any two compare equal.

    For NNX it is a static attribute, and blocks that differ only in it must stay of one
    structure: models stack them to scan over.
    """

    text: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Path)

    def __hash__(self) -> int:
        return hash(_Path)


@contextlib.contextmanager
def intercepting(model: Module, interceptors: Interceptors) -> Iterator[None]:
    """Lets interceptors handle the calls inside, the last one closest to the module.

    Args:
        model: A bound Linen module, or an NNX module that nothing else refers to.
        interceptors: What handles the calls.
    """
    if not interceptors:
        yield
        return
    if isinstance(model, nn.Module):
        with nn.intercept_methods(functools.partial(_linen_call, interceptors)):
            yield
        return
    chosen = []
    for path, module in named_modules(model):
        # Not `any(...)` of a generator: each has to see every module, because some
        # remember which there are.
        is_wanted = [interceptor.wants(path, module) for interceptor in interceptors]
        if any(is_wanted) and callable(module):
            chosen.append(module)
            object.__setattr__(module, _PATH, _Path(path))
    try:
        with _wrapped(map(type, chosen), _of_model, interceptors):
            yield
    finally:
        for module in chosen:
            object.__delattr__(module, _PATH)


def named_modules(model: nnx.Module) -> list[tuple[str, nnx.Module]]:
    """Returns an NNX model's modules by path, itself with an empty one."""
    return [
        ("/".join(map(str, path)), module)
        for path, module in nnx.iter_graph(model)
        if isinstance(module, nnx.Module)
    ]


@contextlib.contextmanager
def _wrapped(
    kinds: Iterable[type],
    variable: ContextVar[Interceptors],
    interceptors: Interceptors,
) -> Iterator[None]:
    """Wraps the `__call__` of classes, for the interceptors of a variable."""
    token = variable.set(interceptors)
    try:
        with SharedPatches(*((kind, "__call__", _wrapper) for kind in {*kinds})):
            yield
    finally:
        variable.reset(token)


def _wrapper(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        interceptors, path = _of_norms.get(), ""
        # A subclass that calls super().__call__ has been intercepted already.
        if vars(type(self)).get("__call__") is __call__ and _PATH in vars(self):
            interceptors = (*_of_model.get(), *interceptors)
            path = vars(self)[_PATH].text
        proceed = original.__get__(self, type(self))
        return _handled(interceptors, path, self, proceed)(*args, **kwargs)

    return __call__


def _handled(
    interceptors: Interceptors, path: str, module: Module, proceed: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a call as the interceptors handle it."""
    for interceptor in reversed(interceptors):
        if interceptor.wants(path, module):
            call = ModuleCall(path, module, proceed)
            proceed = functools.partial(_intercepted, interceptor, call)
    return proceed


def _intercepted(
    interceptor: Interceptor, call: ModuleCall, /, *args: Any, **kwargs: Any
) -> Any:
    return interceptor.call(call, args, kwargs)


def _linen_call(
    interceptors: Interceptors,
    next_fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: Any,
) -> Any:
    if context.method_name != "__call__":
        return next_fun(*args, **kwargs)
    path = "/".join(context.module.path)
    return _handled(interceptors, path, context.module, next_fun)(*args, **kwargs)


# Interceptors of all calls.


class Casting:
    """Lets a model compute in other dtypes; an `Interceptor`.

    Args:
        policies: The dtypes, by path.
        model: The model. The layers of an NNX model that name no dtype get the policy's
            at once; those of a Linen model, when they are called.
    """

    def __init__(self, policies: Policies, model: Module) -> None:
        self._policies = policies
        if isinstance(model, nnx.Module):
            for path, module in named_modules(model):
                self._set_dtype(path, module)

    def wants(self, path: str, module: Module) -> bool:
        """Returns whether to handle calls: the model's own, and all of Linen's."""
        return not path or isinstance(module, nn.Module)

    def call(
        self, call: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a submodule in the policy's dtypes."""
        if isinstance(call.module, nn.Module):
            self._set_dtype(call.path, call.module)
        if call.path:
            return call.proceed(*args, **kwargs)
        policy = self._policies.default
        args, kwargs = cast((args, kwargs), policy.compute)
        return cast(call.proceed(*args, **kwargs), policy.output)

    def _set_dtype(self, path: str, module: Any) -> None:
        compute = self._policies.at(path).compute
        if compute is not None and getattr(module, "dtype", compute) is None:
            object.__setattr__(module, "dtype", compute)


class _UnboundAxes:
    """Lets layers ignore an `axis_name` that is not bound; an `Interceptor`.

    Inside a shard_map of the user's own the axis is bound, and counts.
    """

    def wants(self, path: str, module: Module) -> bool:
        """Returns whether a submodule averages over an axis that does not exist."""
        axis_name = getattr(module, "axis_name", None)
        return axis_name is not None and not _is_bound(axis_name)

    def call(
        self, call: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a layer as if it named no axis."""
        # Linen freezes modules, and NNX refuses to change them in another trace.
        module, axis_name = call.module, call.module.axis_name
        object.__setattr__(module, "axis_name", None)
        try:
            return call.proceed(*args, **kwargs)
        finally:
            object.__setattr__(module, "axis_name", axis_name)


def names_unbound_axis(error: NameError) -> bool:
    """Returns whether this is JAX's error for an axis that nothing binds."""
    return _UNBOUND_AXIS.search(str(error)) is not None


def _is_bound(axis_name: Any) -> bool:
    try:
        jax.lax.psum(1, axis_name)  # of a Python number: nothing is traced
    except NameError:
        return False
    return True


@contextlib.contextmanager
def ignoring_unbound_axes() -> Iterator[None]:
    """Lets layers written for pmap ignore its axis, whatever model they are in.

    Example:
        >>> norm = nnx.BatchNorm(2, axis_name="batch", rngs=nnx.Rngs(0))
        >>> with ignoring_unbound_axes():
        ...     print(norm(jax.numpy.eye(2)).shape, norm.axis_name)
        (2, 2) batch
    """
    interceptors = (_UnboundAxes(),)
    with (
        nn.intercept_methods(functools.partial(_linen_call, interceptors)),
        _wrapped(_NNX_NORMS, _of_norms, interceptors),
    ):
        yield


# The model.


def call_model(
    function: Callable[[Any], Any],
    policies: Policies,
    state: TrainState,
    params: PyTree,
    model_state: PyTree,
    key: jax.Array,
    interceptors: Interceptors = (),
    *,
    train: bool,
) -> tuple[Any, Any]:
    """Calls a function of a state's model, in a policy's dtypes.

    A layer with a field `dtype` casts its own parameters, to that dtype or else to the
    policy's; the parameters of other layers are cast beforehand.

    Args:
        function: The function; traced once more for Linen, whose layers exist only
            while they are called.
        policies: The dtypes.
        state: Gives the model's structure.
        params: The parameters to use instead of the state's.
        model_state: The model's other arrays, likewise.
        key: For Linen: what all random streams start from.
        interceptors: What else handles the submodules' calls.
        train: Whether the model is in training mode.

    Returns:
        The model after the call, and what the function returned.
    """
    model = _bound_model(state, params, model_state, key, train=train)
    if policies.casts:
        if isinstance(model, nn.Module):
            own = _linen_paths_with_dtype(state, model, function)
        else:
            modules = named_modules(model)
            own = {path for path, module in modules if hasattr(module, "dtype")}
        params = cast_for_compute(params, policies, own)
        model = _bound_model(state, params, model_state, key, train=train)
        interceptors = (Casting(policies, model), *interceptors)
    with _handled_calls(model, interceptors):
        return model, function(model)


def _bound_model(
    state: TrainState,
    params: PyTree,
    model_state: PyTree,
    key: jax.Array,
    *,
    train: bool,
) -> Any:
    """Returns a model around arrays, in training or evaluation mode."""
    if state.program.graphdef is None:
        others = {k: v for k, v in model_state.items() if k not in _PASSING}
        return state.program.module.bind(
            {"params": params, **others},
            rngs={"params": key} if train else {},
            mutable=[*others, *_PASSING],
        )
    model = state.replace(params=params, model_state=model_state).model
    if train:
        model.train()
    else:
        model.eval()
    return model


@contextlib.contextmanager
def _handled_calls(model: Module, interceptors: Interceptors) -> Iterator[None]:
    """Lets interceptors handle a model's calls.

    Flax warns that sown values should be captured; the step collects them, and
    silences it.

    Raises:
        StepError: If the user's own code names an axis of pmap.
    """
    with intercepting(model, interceptors), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "\\s*Using 'Module.sow", DeprecationWarning)
        try:
            yield
        except NameError as error:
            axis = _UNBOUND_AXIS.search(str(error))
            # The first time, the compiled step traces again, ignoring axes in layers.
            if axis is None or not _of_norms.get():
                raise
            msg = (
                f"the loss function or the model names the axis {axis[1]!r}, as code "
                "for pmap does in lax.pmean or lax.psum, and a step has no such axis: "
                "it is one program over the global batch, in which a mean over the "
                "rows is over those of all devices. Leave that call out, or make it "
                "inside a jax.shard_map that binds the axis."
            )
            raise StepError(msg) from error


# By the code of a train state, because finding them takes a trace.
_casting_paths: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def _linen_paths_with_dtype(
    state: TrainState, model: nn.Module, function: Callable[[Any], Any]
) -> set[str]:
    """Returns the paths of a Linen model's layers that have a field `dtype`."""
    if state.program in _casting_paths:
        return _casting_paths[state.program]
    paths: set[str] = set()

    def note(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name == "__call__" and hasattr(context.module, "dtype"):
            paths.add("/".join(context.module.path))
        return next_fun(*args, **kwargs)

    def trace() -> None:
        with _handled_calls(model, ()), nn.intercept_methods(note):
            function(model)

    jax.eval_shape(trace)
    return _casting_paths.setdefault(state.program, paths)


def collect(model: Any, before: PyTree) -> tuple[dict[str, Any], Any]:
    """Returns the recorded losses of a model by path, and its other arrays.

    Args:
        model: A model that was called.
        before: Its other arrays before the call.
    """
    if isinstance(model, nn.Module):
        variables = dict(model.variables)
        recorded = variables.get(COLLECTION, {})
        after = {k: before[k] if k in _PASSING else variables[k] for k in before}
        return _named(recorded), after
    recorded = _named(nnx.to_pure_dict(nnx.pop(model, ModelLoss)))
    passing = _named(nnx.to_pure_dict(nnx.pop(model, nnx.Intermediate)))
    for path, value in passing.items():
        name = re.sub(r"/\d+$", "", path).rpartition("/")[2]
        if _LOSS_NAME.search(name):
            recorded[path] = value
    return recorded, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))


def _named(tree: PyTree) -> dict[str, Any]:
    """Returns sown values by path; the first under a name loses its number 0."""
    leaves = _paths.flatten(tree).leaves
    return {re.sub("/0$", "", leaf.path): leaf.value for leaf in leaves}
