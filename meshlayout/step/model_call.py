"""One pure call of a function of a state's model, in a policy's dtypes.

Parameters keep their dtype, and are cast where they are used: inside the differentiated
function, so that their gradients have full precision again.

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
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx
from flax.errors import InvalidRngError

from meshlayout import _checks, _paths
from meshlayout._annotations import DType, Leaf, PyTree
from meshlayout._patches import SharedPatches
from meshlayout.errors import StateError, StepError, warn
from meshlayout.losses import COLLECTION, ModelLoss, quiet_sow
from meshlayout.state import TrainState
from meshlayout.state.creation import is_array
from meshlayout.state.train_state import start_training


_T = TypeVar("_T")

# Collections that a step does not return as the model's state.
_PASSING = (COLLECTION, "intermediates")

# The names under which a plain `sow(nnx.Intermediate, name, ...)` is a loss.
_LOSS_PATH = re.compile(r"(^|_|/)loss(es)?(/\d+)?$")

# JAX's words for a collective over an axis that nothing binds. Should they change,
# users see JAX's own error; tests/test_interception.py notices.
_UNBOUND_AXIS = re.compile(r"unbound axis name:? '?(\w+)")

Module: TypeAlias = nn.Module | nnx.Module


class ModuleCall(NamedTuple):
    """A submodule that is about to be called: its path, itself, and how to call it."""

    path: str  # empty for the model itself
    module: Any
    proceed: Callable[..., Any]


# A function from a call to what takes its place, or to its own `proceed`.
Interceptor: TypeAlias = Callable[[ModuleCall], Callable[..., Any]]
Interceptors: TypeAlias = Sequence[Interceptor]
_interceptors: ContextVar[Interceptors] = ContextVar("_interceptors", default=())


@_checks.user_call
@dataclass(frozen=True)
class PrecisionPolicy:
    """Dtypes of a step, for combinations that `precision=` has no name for.

    Attributes:
        compute: The dtype in which layers without a dtype of their own compute; None
            for that of the parameters. Statistics, losses and norms stay in float32.
        output: The dtype of the model's outputs; None leaves it unchanged.
    """

    compute: Any = None
    output: Any = None

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            if value is not None:  # as a dtype, to compare and hash by
                object.__setattr__(self, name, jnp.finfo(jnp.dtype(value)).dtype)


Precision: TypeAlias = str | PrecisionPolicy

_NAMED = {
    "float32": PrecisionPolicy(),
    "bfloat16": PrecisionPolicy("bfloat16", "float32"),
    "float16": PrecisionPolicy("float16", "float32"),
}


def parse_precision(precision: Precision) -> PrecisionPolicy:
    """Returns the policy that a `precision=` argument means."""
    if isinstance(precision, PrecisionPolicy):
        return precision
    text = getattr(precision, "__name__", str(precision))  # as of jnp.bfloat16
    marks = {"bf": "bfloat16", "16": "float16", "32": "float32"}
    near = next((f"Did you mean {marks[x]!r}?" for x in marks if x in text), "")
    hint = near or "For other dtypes, give a PrecisionPolicy, or a layer its dtype=."
    name = _checks.choice("precision", precision, _NAMED, error=StateError, hint=hint)
    return _NAMED[name]


def cast(tree: PyTree, dtype: DType | None) -> Any:
    """Casts the floating-point arrays in a tree, and copies no NNX object."""
    if dtype is None:
        return tree

    def cast_leaf(leaf: Leaf) -> Any:
        kind = None if _paths.is_nnx_object(leaf) else getattr(leaf, "dtype", None)
        is_float = kind is not None and jnp.issubdtype(kind, jnp.floating)
        return leaf.astype(dtype) if is_float else leaf

    return jax.tree.map(cast_leaf, tree, is_leaf=_paths.is_nnx_object)


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
    global batch. For Linen, all random streams (in evaluation, all but dropout's) start
    from the key, and a function whose model is cast is traced once more.
    """
    streams = {"params": key} if train else {}

    def bound_model(params: PyTree) -> Any:
        if state.program.graphdef is None:
            others = {k: x for k, x in state.model_state.items() if k not in _PASSING}
            variables = {"params": params, **others}  # Flax refuses to change others
            mutable = [x for x in (*others, *_PASSING) if train or x != "batch_stats"]
            return state.program.module.bind(variables, rngs=streams, mutable=mutable)
        model = replace(state, params=params).model
        if not train:
            model.eval()
        elif not start_training(model):
            msg = "the model was built in evaluation mode, and a train step keeps it. "
            hint = "Call model.train() in its builder, unless its layers are frozen."
            warn(msg + hint)
        return model

    def call() -> tuple[Any, dict[str, Any], PyTree]:
        model, handlers = bound_model(state.params), interceptors
        with quiet_sow():
            if policy != PrecisionPolicy():
                params = _paths.flatten(state.params)
                layers, dtype = _layers_with_dtype(model, function), policy.compute
                arrays = [
                    x if path.rpartition("/")[0] in layers else cast(x, dtype)
                    for path, x, _ in params.leaves
                ]
                model = bound_model(params.unflatten(arrays))
                handlers = (_casting(policy, model), *interceptors)
            with intercepting(model, handlers):
                result = function(model)
        return result, *_collected(model, state.model_state)

    while True:
        try:
            return _with_pmap_axes(call)
        except InvalidRngError as error:  # Flax cannot bind all but one
            name = re.search(r'needs PRNG for "(\w+)"', str(error))
            if name is None or name[1] in {"dropout", *streams}:
                raise
            streams[name[1]] = jax.random.fold_in(key, len(streams))


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
        own = getattr(module, "dtype", policy.compute)
        if isinstance(module, nnx.Embed) and own == module.param_dtype:
            own = None  # for which Flax takes that of the table
        if policy.compute and own is None:
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
    leaves = _paths.flatten(tree).leaves if tree else ()
    return {re.sub("/0$", "", leaf.path): leaf.value for leaf in leaves}


_PATH = "_meshlayout_path"


# Any two compare equal: for NNX it is a static attribute, and blocks that differ only
# in it must stay of one structure, as models stack them to scan over.
@dataclass(frozen=True)
class _Path:
    text: str = field(compare=False)


@contextlib.contextmanager
def intercepting(model: Module, interceptors: Interceptors) -> Iterator[None]:
    """Lets interceptors handle the calls inside, the last one closest to the module."""
    if not interceptors:
        yield
        return
    if isinstance(model, nn.Module):

        def handle(proceed: Any, args: PyTree, kwargs: PyTree, context: Any) -> Any:
            if context.method_name == "__call__":
                path = "/".join(context.module.path)
                call = ModuleCall(path, context.module, proceed)
                proceed = _handled(interceptors, call)
            return proceed(*args, **kwargs)

        with nn.intercept_methods(handle):
            yield
        return
    modules = [(path, x) for path, x in named_modules(model) if callable(x)]
    for path, module in modules:
        object.__setattr__(module, _PATH, _Path(path))
    token = _interceptors.set(interceptors)
    kinds = {type(module) for _, module in modules}
    try:
        with SharedPatches(*((kind, "__call__", _wrapper) for kind in kinds)):
            yield
    finally:
        _interceptors.reset(token)
        for _, module in modules:
            object.__delattr__(module, _PATH)


def named_modules(model: nnx.Module) -> list[tuple[str, nnx.Module]]:
    """Returns an NNX model's submodules by path, itself included."""
    nodes = nnx.iter_graph(model)  # flax 0.11 has no iter_modules
    modules = [(path, x) for path, x in nodes if isinstance(x, nnx.Module)]
    return [("/".join(map(str, path)), module) for path, module in modules]


def _wrapper(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def __call__(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        proceed = original.__get__(self, type(self))
        # A subclass that calls super().__call__ has been intercepted already.
        if vars(type(self)).get("__call__") is __call__ and _PATH in vars(self):
            call = ModuleCall(vars(self)[_PATH].text, self, proceed)
            proceed = _handled(_interceptors.get(), call)
        return proceed(*args, **kwargs)

    return __call__


def _handled(interceptors: Interceptors, call: ModuleCall) -> Callable[..., Any]:
    for interceptor in reversed(interceptors):
        call = call._replace(proceed=interceptor(call))
    return call.proceed


def weight_mask(weights: jax.Array) -> Interceptor:
    """Returns an interceptor that leaves weight 0 out of batch statistics."""

    def masked(call: ModuleCall) -> Callable[..., Any]:
        def norm(x: jax.Array, *args: Any, **kwargs: Any) -> Any:
            flag = args[0] if args else kwargs.get("use_running_average")
            if flag is None:
                flag = call.module.use_running_average
            if not flag and kwargs.get("mask") is None:
                is_real = _is_real(call.path, weights, x)
                # Without any real example all count, so that nothing is NaN.
                kwargs = {**kwargs, "mask": is_real | ~is_real.any()}
            return call.proceed(x, *args, **kwargs)

        is_norm = isinstance(call.module, (nn.BatchNorm, nnx.BatchNorm))
        return norm if is_norm else call.proceed

    return masked


def _is_real(path: str, weights: jax.Array, x: jax.Array) -> jax.Array:
    if x.shape[:1] != weights.shape[:1]:
        raise StepError(
            f"{path or 'the model'}: a BatchNorm is called with an array of shape "
            f"{x.shape} in a batch with weights for {weights.shape[0]} examples, so "
            "which rows are padding is unknown. Pass it mask= in the model."
        )
    dims = 1  # as many as both have: the weights may be per token
    while dims < x.ndim - 1 and weights.shape[dims : dims + 1] == (x.shape[dims],):
        dims += 1
    is_real = (weights != 0).any(axis=tuple(range(dims, weights.ndim)))
    return is_real.reshape(is_real.shape + (1,) * (x.ndim - dims))


# "none", "blocks", "full", or what is saved of blocks: one of jax.checkpoint_policies.
Remat: TypeAlias = str | Callable[..., Any]


def rematting(remat: Remat, params: PyTree) -> Interceptor:
    """Returns an interceptor that recomputes submodules, but nothing twice."""
    paths, is_inside = {""} if remat == "full" else _block_paths(params), False
    if not paths:
        raise StepError(
            "remat: the model has no blocks (numbered submodules, as 'layers/0', that "
            "hold submodules with parameters). Take remat='full'."
        )

    def intercept(call: ModuleCall) -> Callable[..., Any]:
        is_chosen = call.path in paths and not is_inside
        return functools.partial(recomputed, call) if is_chosen else call.proceed

    def recomputed(call: ModuleCall, /, *args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_paths.is_nnx_object)
        is_nnx = isinstance(call.module, nnx.Module)

        def is_traced(leaf: Leaf) -> bool:
            # Not flags and None. An NNX object (with any attribute, as nnx.Rngs) is
            # not flattened: a copy's random streams would advance alone. Linen's remat
            # would; to it such an object is a constant.
            return is_nnx if _paths.is_nnx_object(leaf) else is_array(leaf)

        traced = {i: leaf for i, leaf in enumerate(leaves) if is_traced(leaf)}

        def inner(module: Module, traced: dict[int, Any]) -> Any:
            every = {**dict(enumerate(leaves)), **traced}
            args, kwargs = treedef.unflatten(every.values())
            # The module inside is a copy, whose call is intercepted again.
            nonlocal is_inside
            is_inside = True
            try:
                return module(*args, **kwargs)
            finally:
                is_inside = False

        wrap: Any = nnx.remat if is_nnx else nn.remat
        policy = remat if callable(remat) else None
        return wrap(inner, policy=policy)(call.module, traced)

    return intercept


def _block_paths(params: PyTree) -> set[str]:
    """Returns the outermost numbered paths that hold submodules with parameters."""
    # As blocks/0 of blocks/0/mlp/kernel; but nothing of layers/0/kernel.
    pattern = re.compile(r"((?:[^/]*/)*?[^/]*\d)/[^/]*/")
    matches = [pattern.match(leaf.path) for leaf in _paths.flatten(params).leaves]
    return {match[1] for match in matches if match}
