"""The calls of a model's submodules: who may handle them, and the two that often do.

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
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
from flax import linen as nn, nnx

from meshlayout import _paths
from meshlayout._annotations import Leaf, PyTree
from meshlayout._patches import SharedPatches
from meshlayout.errors import StepError


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

_PATH = "_meshlayout_path"


# Any two compare equal: for NNX it is a static attribute, and blocks that differ only
# in it must stay of one structure, as models stack them to scan over.
@dataclass(frozen=True, eq=False)
class _Path:
    text: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Path)

    def __hash__(self) -> int:
        return hash(_Path)


@contextlib.contextmanager
def intercepting(model: Module, interceptors: Interceptors) -> Iterator[None]:
    """Lets interceptors handle the calls inside, the last one closest to the module."""
    if not interceptors:
        yield
        return
    if isinstance(model, nn.Module):
        with nn.intercept_methods(functools.partial(_linen_call, interceptors)):
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
    nodes = nnx.iter_graph(model)
    modules = [(path, x) for path, x in nodes if isinstance(x, nnx.Module)]
    return [("/".join(map(str, path)), module) for path, module in modules]


def _wrapper(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def __call__(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        proceed = original.__get__(self, type(self))
        # A subclass that calls super().__call__ has been intercepted already.
        if vars(type(self)).get("__call__") is __call__ and _PATH in vars(self):
            path = vars(self)[_PATH].text
            proceed = _handled(_interceptors.get(), path, self, proceed)
        return proceed(*args, **kwargs)

    return __call__


def _linen_call(
    interceptors: Interceptors,
    proceed: Callable[..., Any],
    args: PyTree,
    kwargs: PyTree,
    context: Any,
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
        msg = (
            f"{path or 'the model'}: a BatchNorm is called with an array of shape "
            f"{x.shape} in a batch with weights for {weights.shape[0]} examples, so "
            "which rows are padding is unknown. Pass it mask= in the model."
        )
        raise StepError(msg)
    dims = 1  # as many as both have: the weights may be per token
    while dims < x.ndim - 1 and weights.shape[dims : dims + 1] == (x.shape[dims],):
        dims += 1
    is_real = (weights != 0).any(axis=tuple(range(dims, weights.ndim)))
    return is_real.reshape(is_real.shape + (1,) * (x.ndim - dims))


# "none", "blocks", "full", or what is saved of blocks: one of jax.checkpoint_policies.
Remat: TypeAlias = str | Callable[..., Any]


class Rematting:
    """Recomputes submodules; an `Interceptor`. What is inside of one is not done twice.

    They are wrapped in `nnx.remat` or `nn.remat` when they are called. The parameters'
    paths show which submodules are blocks.
    """

    def __init__(self, remat: Remat, params: PyTree) -> None:
        self._policy = remat if callable(remat) else None
        self._paths = {""} if remat == "full" else _block_paths(params)
        self._is_inside = False
        if not self._paths:
            msg = (
                "remat: the model has no blocks (numbered submodules, as 'layers/0', "
                "that hold submodules with parameters). Take remat='full'."
            )
            raise StepError(msg)

    def __call__(self, call: ModuleCall) -> Callable[..., Any]:
        """Returns a call whose insides are recomputed, of a chosen submodule."""
        is_chosen = call.path in self._paths and not self._is_inside
        return functools.partial(self._recomputed, call) if is_chosen else call.proceed

    def _recomputed(self, call: ModuleCall, /, *args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_paths.is_nnx_object)
        is_nnx = isinstance(call.module, nnx.Module)

        def is_traced(leaf: Leaf) -> bool:
            # Not flags and None. An NNX object (with any attribute, as nnx.Rngs) is
            # not flattened: a copy's random streams would advance alone. Linen's remat
            # would; to it such an object is a constant.
            if _paths.is_nnx_object(leaf):
                return is_nnx
            return hasattr(leaf, "dtype") and hasattr(leaf, "shape")

        traced = {i: leaf for i, leaf in enumerate(leaves) if is_traced(leaf)}

        def inner(module: Module, traced: dict[int, Any]) -> Any:
            every = {**dict(enumerate(leaves)), **traced}
            args, kwargs = treedef.unflatten(every.values())
            # The module inside is a copy, whose call is intercepted again.
            self._is_inside = True
            try:
                return module(*args, **kwargs)
            finally:
                self._is_inside = False

        remat: Any = nnx.remat if is_nnx else nn.remat
        return remat(inner, policy=self._policy)(call.module, traced)


def _block_paths(params: PyTree) -> set[str]:
    """Returns the outermost numbered paths that hold submodules with parameters."""
    # As blocks/0 of blocks/0/mlp/kernel; but nothing of layers/0/kernel.
    pattern = re.compile(r"((?:[^/]*/)*?[^/]*\d)/[^/]*/")
    matches = [pattern.match(leaf.path) for leaf in _paths.flatten(params).leaves]
    return {match[1] for match in matches if match}
