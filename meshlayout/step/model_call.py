"""One pure call of a function of a state's model, in a policy's dtypes."""

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import linen as nn, nnx

from meshlayout import _paths
from meshlayout._annotations import PyTree
from meshlayout.errors import stack_level
from meshlayout.losses import COLLECTION, ModelLoss, quiet_sow
from meshlayout.state import TrainState
from meshlayout.state.precision import PrecisionPolicy, cast
from meshlayout.state.train_state import start_training
from meshlayout.step.interception import (
    Interceptor,
    Interceptors,
    Module,
    ModuleCall,
    intercepting,
    named_modules,
)


_T = TypeVar("_T")

# Collections that a step does not return as the model's state.
_PASSING = (COLLECTION, "intermediates")

# The names under which a plain `sow(nnx.Intermediate, name, ...)` is a loss.
_LOSS_PATH = re.compile(r"(^|_|/)loss(es)?(/\d+)?$")

# JAX's words for a collective over an axis that nothing binds. Should they change,
# users see JAX's own error; test_interception.py notices.
_UNBOUND_AXIS = re.compile(r"unbound axis name:? '?(\w+)")


def call_model(
    function: Callable[[Any], Any],
    policy: PrecisionPolicy,
    state: TrainState,
    key: jax.Array,
    interceptors: Interceptors = (),
    *,
    train: bool,
) -> tuple[Any, dict[str, Any], PyTree]:
    """Calls a function of a state's model, in a policy's dtypes.

    Returns its result, the losses that the model recorded, by path, and the model's
    other arrays after. A layer with a field `dtype` casts its own parameters, to that
    dtype or else to the policy's; those of other layers are cast beforehand. Axes of
    pmap that the model or the function names are of size 1: the program is over the
    global batch. For Linen, all random streams start from the key, and a function whose
    model is cast is traced once more.
    """

    def bound_model(params: PyTree) -> Any:
        if state.program.graphdef is None:
            others = {k: x for k, x in state.model_state.items() if k not in _PASSING}
            return state.program.module.bind(
                {"params": params, **others},
                rngs={"params": key} if train else {},
                mutable=[*others, *_PASSING],
            )
        model = state.replace(params=params).model
        if not train:
            model.eval()
        elif not start_training(model):
            msg = "the model was built in evaluation mode, and a train step keeps it. "
            hint = "Call model.train() in its builder, unless its layers are frozen."
            warnings.warn(msg + hint, stacklevel=stack_level())
        return model

    def call() -> tuple[Any, dict[str, Any], PyTree]:
        model, handlers = bound_model(state.params), interceptors
        with quiet_sow():
            if policy != PrecisionPolicy():
                params = _paths.flatten(state.params)
                casting_layers = _layers_with_dtype(model, function)
                arrays = [leaf.value for leaf in params.leaves]
                for i, leaf in enumerate(params.leaves):
                    if leaf.path.rpartition("/")[0] not in casting_layers:
                        arrays[i] = cast(leaf.value, policy.compute)
                model = bound_model(params.unflatten(arrays))
                handlers = (_casting(policy, model), *interceptors)
            with intercepting(model, handlers):
                result = function(model)
        return result, *_collected(model, state.model_state)

    return _with_pmap_axes(call)


def _with_pmap_axes(call: Callable[[], _T]) -> _T:
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


def _layers_with_dtype(model: Module, function: Callable[[Any], Any]) -> set[str]:
    """Returns the paths of the layers that have a field `dtype`."""
    if isinstance(model, nnx.Module):
        return {path for path, one in named_modules(model) if hasattr(one, "dtype")}
    paths: set[str] = set()

    def note(call: ModuleCall) -> Callable[..., Any]:
        if hasattr(call.module, "dtype"):
            paths.add(call.path)
        return call.proceed

    def trace() -> None:
        function(model)

    with intercepting(model, [note]):
        jax.eval_shape(trace)
    return paths


def _casting(policy: PrecisionPolicy, model: Module) -> Interceptor:
    def set_dtype(module: Any) -> None:
        if policy.compute and getattr(module, "dtype", policy.compute) is None:
            object.__setattr__(module, "dtype", policy.compute)

    # Linen's layers exist only while they are called.
    for _, module in named_modules(model) if isinstance(model, nnx.Module) else ():
        set_dtype(module)

    def intercept(call: ModuleCall) -> Callable[..., Any]:
        is_part = bool(call.path)
        if isinstance(call.module, nn.Module):
            set_dtype(call.module)
            is_part = call.module is not model  # it may apply modules without a path
        return call.proceed if is_part else functools.partial(whole, call)

    def whole(call: ModuleCall, /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast((args, kwargs), policy.compute)
        return cast(call.proceed(*args, **kwargs), policy.output)

    return intercept


def _collected(model: Any, before: PyTree) -> tuple[dict[str, Any], PyTree]:
    """Returns the recorded losses of a model by path, and its other arrays."""
    if isinstance(model, nn.Module):
        variables = dict(model.variables)
        recorded = variables.get(COLLECTION, {})
        after = {k: before[k] if k in _PASSING else variables[k] for k in before}
        return _named(recorded), after
    recorded = _named(nnx.to_pure_dict(nnx.pop(model, ModelLoss)))
    passing = _named(nnx.to_pure_dict(nnx.pop(model, nnx.Intermediate)))
    recorded |= {path: x for path, x in passing.items() if _LOSS_PATH.search(path)}
    return recorded, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))


def _named(tree: PyTree) -> dict[str, Any]:
    """Returns sown values by path; the first under a name loses its number 0."""
    leaves = _paths.flatten(tree).leaves
    return {re.sub("/0$", "", leaf.path): leaf.value for leaf in leaves}
