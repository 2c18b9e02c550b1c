"""One call of a loss function on a state's model, as a pure function of arrays."""

import inspect
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx

from meshlayout import _checks, _paths
from meshlayout._annotations import Batch, PyTree
from meshlayout.errors import StepError
from meshlayout.losses import ModelLoss
from meshlayout.losses.model_losses import COLLECTION
from meshlayout.state import TrainState
from meshlayout.state.precision import Policies, cast, cast_for_compute
from meshlayout.step.batch_norm import ignoring_unbound_axes
from meshlayout.step.interception import (
    Call,
    Interceptors,
    Module,
    intercepting,
    named_modules,
)
from meshlayout.step.remat import RematRule, Rematting


# What a step does not hand back as the model's state.
_PASSING = (COLLECTION, "intermediates")

# What plain `sow(nnx.Intermediate, name, ...)` has to be called to be a loss.
_LOSS_NAME = re.compile(r"(^|_)loss(es)?$")

# What JAX says of a collective over an axis that nothing binds. Should it say it in
# other words, users see JAX's own error; test_step_inputs.py notices.
_UNBOUND_AXIS = re.compile(r"unbound axis name:? '?(\w+)")


@dataclass(frozen=True)
class Outcome:
    """What a loss function and the model returned.

    Attributes:
        losses: What the loss function returned: per-example losses, or a scalar.
        outputs: Its dict of outputs, or an empty one.
        recorded: The losses that the model recorded, by path.
        model_state: The model's other arrays after the call.
    """

    losses: Any
    outputs: dict[str, Any]
    recorded: dict[str, Any]
    model_state: Any


jax.tree_util.register_dataclass(
    Outcome, ["losses", "outputs", "recorded", "model_state"], []
)


@dataclass(frozen=True)
class ModelCall:
    """How a step calls the model.

    Attributes:
        loss_fn: The user's function of the model and the batch.
        policies: The dtypes to compute in.
        remat: What is recomputed.
        train: Whether this is training.
    """

    loss_fn: Callable[..., Any]
    policies: Policies
    remat: tuple[RematRule, ...] = ()
    train: bool = False

    def __call__(
        self,
        state: TrainState,
        params: PyTree,
        model_state: PyTree,
        batch: Batch,
        key: jax.Array,
        interceptors: Interceptors = (),
    ) -> Outcome:
        """Calls the loss function.

        Args:
            state: Gives the model's structure.
            params: The parameters to use instead of the state's.
            model_state: The model's other arrays, likewise.
            batch: The batch.
            key: For this call's random numbers.
            interceptors: What handles the submodules' calls, besides.
        """
        remat = Rematting(self.remat, params) if self.remat else None

        def call(model: Any) -> Any:
            return self.loss_fn(model, batch, **self._extras(key))

        def bound(params: PyTree) -> Any:
            return bound_model(state, params, model_state, key, train=self.train)

        model, casting = cast_model(self.policies, state, params, bound, call)
        rematting = () if remat is None else (remat,)
        found = (*casting, *rematting, *interceptors)
        with handled_calls(model, found):
            result = call(model)
        if remat is not None:
            remat.check_used()
        losses, outputs = _parts(_name(self.loss_fn), result)
        recorded, after = collect(model, model_state)
        return Outcome(losses, outputs, recorded, after)

    def _extras(self, key: jax.Array) -> dict[str, Any]:
        """Returns what the loss function asks for by name."""
        asked = _asked(self.loss_fn)
        extras: dict[str, Any] = {}
        if "rngs" in asked:
            extras["rngs"] = nnx.Rngs(key)
        if "train" in asked:
            extras["train"] = self.train
        return extras


def check_loss_fn(name: str, where: str, function: Callable[..., Any]) -> None:
    """Raises StepError unless this can be called with a model and a batch.

    Args:
        name: What the argument is called.
        where: The public function.
        function: A loss function, or one that predicts.
    """
    _checks.function(
        name,
        function,
        "model",
        "batch",
        keywords=("rngs", "train") if name == "loss_fn" else (),
        where=where,
        error=StepError,
    )


def bound_model(
    state: TrainState,
    params: PyTree,
    model_state: PyTree,
    key: jax.Array,
    *,
    train: bool,
) -> Any:
    """Returns a model around arrays, in training or evaluation mode.

    Args:
        state: Gives the structure.
        params: The parameters.
        model_state: The model's other arrays.
        key: For Linen: what all random streams start from.
        train: The mode of an NNX model.
    """
    if state.program.graphdef is None:
        kept = {k: v for k, v in model_state.items() if k not in _PASSING}
        return state.program.module.bind(
            {"params": params, **kept},
            rngs={"params": key} if train else {},
            mutable=[*kept, *_PASSING],
        )
    model = state.replace(params=params, model_state=model_state).model
    if train:
        model.train()
    else:
        model.eval()
    return model


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
        return _named(recorded, lambda name: True), after
    sown = nnx.to_pure_dict(nnx.pop(model, ModelLoss))
    passing = nnx.to_pure_dict(nnx.pop(model, nnx.Intermediate))
    recorded = {
        **_named(sown, lambda name: True),
        **_named(passing, lambda name: bool(_LOSS_NAME.search(name))),
    }
    return recorded, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))


def _named(tree: PyTree, is_loss: Callable[[str], bool]) -> dict[str, Any]:
    """Returns sown values by path; those of one name are numbered from the second."""
    found: dict[str, Any] = {}
    for leaf in _paths.flatten(tree).leaves:
        path, _, number = leaf.path.rpartition("/")
        if not number.isdecimal():
            path, number = leaf.path, "0"
        if is_loss(path.rpartition("/")[2]):
            found[path if number == "0" else leaf.path] = leaf.value
    return found


@contextmanager
def handled_calls(model: Module, interceptors: Interceptors) -> Iterator[None]:
    """Lets interceptors handle a model's calls, and layers ignore the axes of pmap.

    Flax advises to capture what is sown; the step collects it, and silences that.

    Raises:
        StepError: If the user's own code names an axis of pmap.
    """
    with (
        ignoring_unbound_axes(),
        intercepting(model, interceptors),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "\\s*Using 'Module.sow", DeprecationWarning)
        try:
            yield
        except NameError as error:
            axis = _UNBOUND_AXIS.search(str(error))
            if axis is None:
                raise
            msg = (
                f"the loss function or the model names the axis {axis[1]!r}, as code "
                "for pmap does in lax.pmean or lax.psum, and a step has no such axis: "
                "it is one program over the global batch, in which a mean over the "
                "rows is over those of all devices. Leave that call out, or make it "
                "inside a jax.shard_map that binds the axis."
            )
            raise StepError(msg) from error


def cast_model(
    policies: Policies,
    state: TrainState,
    params: PyTree,
    bound: Callable[[Any], Any],
    call: Callable[[Any], Any],
) -> tuple[Any, tuple["Casting", ...]]:
    """Returns a model that computes in a policy's dtypes, and what handles its calls.

    A layer with a field `dtype` casts its own parameters, to what that says or to the
    policy's dtype; the parameters of other layers are cast beforehand.

    Args:
        policies: The dtypes.
        state: Gives the model's structure.
        params: The parameters.
        bound: Makes a model around parameters.
        call: Calls a model; traced once for Linen, whose layers exist only in calls.
    """
    if not policies.casts:
        return bound(params), ()
    model = bound(params)
    if isinstance(model, nn.Module):
        own = _linen_casting_paths(state, model, call)
    else:
        own = {path for path, module in named_modules(model) if _has_dtype(module)}
    model = bound(cast_for_compute(params, policies, own))
    casting = Casting(policies)
    if isinstance(model, nnx.Module):
        casting.set_dtypes(model)
    return model, (casting,)


def _has_dtype(module: object) -> bool:
    return hasattr(module, "dtype")


# By the code of a train state: a trace for each would be the same.
_casting_paths: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def _linen_casting_paths(
    state: TrainState, model: nn.Module, call: Callable[[Any], Any]
) -> set[str]:
    """Returns the paths of a Linen model's layers that have a field `dtype`."""
    if state.program not in _casting_paths:
        finding = _Finding()

        def trace() -> None:
            with handled_calls(model, (finding,)):
                call(model)

        jax.eval_shape(trace)
        _casting_paths[state.program] = finding.paths
    return _casting_paths[state.program]


class _Finding:
    """Notes the layers that have a field `dtype`; see `calls.Interceptor`."""

    def __init__(self) -> None:
        self.paths: set[str] = set()

    def wants(self, path: str, module: Any) -> bool:
        """Returns whether a layer has the field."""
        return _has_dtype(module)

    def call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Notes a layer and calls it."""
        self.paths.add(call.path)
        return call.proceed(*args, **kwargs)


class Casting:
    """Lets a model compute in other dtypes; see `calls.Interceptor`.

    Args:
        policies: The dtypes, by path.
    """

    def __init__(self, policies: Policies) -> None:
        self._policies = policies

    def set_dtypes(self, model: nnx.Module) -> None:
        """Gives the layers of an NNX model that name no dtype the policy's."""
        for path, module in named_modules(model):
            self._set_dtype(path, module)

    def wants(self, path: str, module: Any) -> bool:
        """Returns whether to handle calls: the model's own, and all of Linen's."""
        return not path or isinstance(module, nn.Module)

    def call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


def _parts(name: str, result: Any) -> tuple[Any, dict[str, Any]]:
    """Returns losses and outputs from what a loss function returned."""
    outputs: Any = {}
    if isinstance(result, tuple):
        if len(result) != 2 or not isinstance(result[1], Mapping):
            msg = (
                f"{name} returned a tuple of {len(result)}; a loss function returns "
                "losses of shape (batch, ...), or those and a dict of outputs for the "
                'metrics: return losses, {"logits": logits}.'
            )
            raise StepError(msg)
        result, outputs = result
    if not hasattr(result, "dtype") or not hasattr(result, "shape"):
        msg = (
            f"{name} returned a {type(result).__name__}; a loss function returns "
            "losses of shape (batch, ...), or those and a dict of outputs for the "
            'metrics: return losses, {"logits": logits}.'
        )
        raise StepError(msg)
    if not jnp.issubdtype(result.dtype, jnp.floating):
        msg = f"{name} returned losses of dtype {result.dtype}; losses are floats."
        raise StepError(msg)
    return result, dict(outputs)


def _asked(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
