"""One call of a function of a state's model, and of the submodules inside.

Remat, precision and the weights in BatchNorm all act when a submodule is called. Linen
has interceptors for that; NNX does not. Replacing the modules' classes by subclasses
was tried and is wrong: models look at `type(layer)`, register classes in
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
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
from flax import linen as nn, nnx

from meshlayout import _paths
from meshlayout._annotations import PyTree
from meshlayout._patches import SharedPatches
from meshlayout.losses import ModelLoss
from meshlayout.losses.penalties import COLLECTION
from meshlayout.state import TrainState
from meshlayout.state.precision import PrecisionPolicy, cast


Module: TypeAlias = nn.Module | nnx.Module

# Collections that a step does not return as the model's state.
_PASSING = (COLLECTION, "intermediates")

# The names under which a plain `sow(nnx.Intermediate, name, ...)` is a loss.
_LOSS_NAME = re.compile(r"(^|_)loss(es)?$")

# JAX's words for a collective over an axis that nothing binds. Should they change,
# users see JAX's own error; test_interception.py notices.
_UNBOUND_AXIS = re.compile(r"unbound axis name:? '?(\w+)")


class ModuleCall(NamedTuple):
    """A submodule that is about to be called: its path, itself, and how to call it."""

    path: str  # empty for the model itself
    module: Any
    proceed: Callable[..., Any]


# A function from a call to what takes its place, or to its own `proceed`.
Interceptor: TypeAlias = Callable[[ModuleCall], Callable[..., Any]]
Interceptors: TypeAlias = Sequence[Interceptor]

_interceptors: ContextVar[Interceptors] = ContextVar("_interceptors", default=())

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
    modules = {path: one for path, one in _named_modules(model) if callable(one)}
    for path, module in modules.items():
        object.__setattr__(module, _PATH, _Path(path))
    token = _interceptors.set(interceptors)
    kinds = {type(module) for module in modules.values()}
    try:
        with SharedPatches(*((kind, "__call__", _wrapper) for kind in kinds)):
            yield
    finally:
        _interceptors.reset(token)
        for module in modules.values():
            object.__delattr__(module, _PATH)


def _named_modules(model: nnx.Module) -> list[tuple[str, nnx.Module]]:
    return [
        ("/".join(map(str, path)), module)
        for path, module in nnx.iter_graph(model)
        if isinstance(module, nnx.Module)
    ]


def _wrapper(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        proceed = original.__get__(self, type(self))
        # A subclass that calls super().__call__ has been intercepted already.
        if vars(type(self)).get("__call__") is __call__ and _PATH in vars(self):
            path = vars(self)[_PATH].text
            proceed = _handled(_interceptors.get(), path, self, proceed)
        return proceed(*args, **kwargs)

    return __call__


def _linen_call(
    interceptors: Interceptors, proceed: Any, args: PyTree, kwargs: PyTree, context: Any
) -> Any:
    if context.method_name == "__call__":
        path = "/".join(context.module.path)
        proceed = _handled(interceptors, path, context.module, proceed)
    return proceed(*args, **kwargs)


def _handled(
    interceptors: Interceptors, path: str, module: Module, proceed: Callable[..., Any]
) -> Callable[..., Any]:
    for interceptor in reversed(interceptors):
        proceed = interceptor(ModuleCall(path, module, proceed))
    return proceed


def _casting(policy: PrecisionPolicy, model: Module) -> Interceptor:
    """Lets a model compute in other dtypes.

    Layers that name no dtype get the policy's: those of an NNX model at once, those of
    a Linen model when they are called.
    """

    def set_dtype(module: Any) -> None:
        if policy.compute and getattr(module, "dtype", policy.compute) is None:
            object.__setattr__(module, "dtype", policy.compute)

    for _, module in _named_modules(model) if isinstance(model, nnx.Module) else ():
        set_dtype(module)

    def intercept(call: ModuleCall) -> Callable[..., Any]:
        if isinstance(call.module, nn.Module):
            set_dtype(call.module)
        return call.proceed if call.path else functools.partial(whole, call)

    def whole(call: ModuleCall, /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast((args, kwargs), policy.compute)
        return cast(call.proceed(*args, **kwargs), policy.output)

    return intercept


class ModelOutputs(NamedTuple):
    """What a function of a model returned, and what the model recorded meanwhile."""

    result: Any
    recorded: dict[str, Any]  # losses, by path
    model_state: PyTree  # the model's other arrays, after the call


def call_model(
    function: Callable[[Any], Any],
    policy: PrecisionPolicy,
    state: TrainState,
    params: PyTree,
    model_state: PyTree,
    key: jax.Array,
    interceptors: Interceptors = (),
    *,
    train: bool,
) -> ModelOutputs:
    """Calls a function of a state's model, in a policy's dtypes.

    A layer with a field `dtype` casts its own parameters, to that dtype or else to the
    policy's; the parameters of other layers are cast beforehand. Axes of pmap that the
    model or the function names are of size 1: the program is over the global batch.

    Args:
        function: The function; traced once more for a Linen model that is cast, whose
            layers exist only while they are called.
        policy: The dtypes.
        state: Gives the model's structure.
        params: The parameters to use instead of the state's.
        model_state: The model's other arrays, likewise.
        key: For Linen: what all random streams start from.
        interceptors: What else handles the submodules' calls.
        train: Whether the model is in training mode.
    """

    def bound_model(params: PyTree) -> Any:
        if state.program.graphdef is None:
            others = {k: v for k, v in model_state.items() if k not in _PASSING}
            return state.program.module.bind(
                {"params": params, **others},
                rngs={"params": key} if train else {},
                mutable=[*others, *_PASSING],
            )
        model = state.replace(params=params, model_state=model_state).model
        (model.train if train else model.eval)()
        return model

    def call() -> ModelOutputs:
        model, handlers = bound_model(params), interceptors
        if policy != PrecisionPolicy():
            model = bound_model(_cast_params(params, policy, state, model, function))
            handlers = (_casting(policy, model), *interceptors)
        with intercepting(model, handlers), _quiet_sow():
            result = function(model)
        return ModelOutputs(result, *_collected(model, model_state))

    return _with_pmap_axes(call)


@contextlib.contextmanager
def _quiet_sow() -> Iterator[None]:
    """Silences Flax's warning that sown values should be captured; the step does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "\\s*Using 'Module.sow", DeprecationWarning)
        yield


def _with_pmap_axes(call: Callable[[], ModelOutputs]) -> ModelOutputs:
    """Calls a function with every axis that it names, and nothing binds, of size 1."""
    try:
        return call()
    except NameError as error:
        axis = _UNBOUND_AXIS.search(str(error))
        if axis is None:
            raise
    mapped = jax.vmap(
        lambda _: call(), in_axes=None, out_axes=None, axis_name=axis[1], axis_size=1
    )
    return _with_pmap_axes(lambda: mapped(0))


def _cast_params(
    params: PyTree,
    policy: PrecisionPolicy,
    state: TrainState,
    model: Module,
    function: Callable[[Any], Any],
) -> PyTree:
    """Casts the parameters of layers that do not do it themselves."""
    if isinstance(model, nn.Module):
        own = _linen_paths_with_dtype(state, model, function)
    else:
        own = {path for path, one in _named_modules(model) if hasattr(one, "dtype")}
    flat = _paths.flatten(params)
    leaves = [
        leaf.value
        if leaf.path.rpartition("/")[0] in own
        else cast(leaf.value, policy.compute)
        for leaf in flat.leaves
    ]
    return flat.unflatten(leaves)


# By the code of a train state, because finding them takes a trace.
_paths_with_dtype: weakref.WeakKeyDictionary[Any, set[str]] = (
    weakref.WeakKeyDictionary()
)


def _linen_paths_with_dtype(
    state: TrainState, model: nn.Module, function: Callable[[Any], Any]
) -> set[str]:
    """Returns the paths of a Linen model's layers that have a field `dtype`."""
    if state.program in _paths_with_dtype:
        return _paths_with_dtype[state.program]
    paths: set[str] = set()

    def note(next_fun: Any, args: PyTree, kwargs: PyTree, context: Any) -> Any:
        if context.method_name == "__call__" and hasattr(context.module, "dtype"):
            paths.add("/".join(context.module.path))
        return next_fun(*args, **kwargs)

    def trace() -> None:
        with nn.intercept_methods(note), _quiet_sow():
            function(model)

    jax.eval_shape(trace)
    return _paths_with_dtype.setdefault(state.program, paths)


def _collected(model: Any, before: PyTree) -> tuple[dict[str, Any], PyTree]:
    """Returns the recorded losses of a model by path, and its other arrays."""
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
