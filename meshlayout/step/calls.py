"""What happens when a model calls its submodules, changed without editing the model.

Linen has interceptors. An NNX module that `TrainState.model` gave is the step's own, so
its submodules' classes are exchanged for subclasses that ask the interceptor first.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from flax import linen as nn, nnx


@dataclass(frozen=True)
class Call:
    """A submodule is about to be called.

    Attributes:
        path: Where it is in the model; empty for the model itself.
        module: The submodule.
        proceed: Calls it, given its arguments.
    """

    path: str
    module: Any
    proceed: Callable[..., Any]


class Interceptor(Protocol):
    """What is done with the calls of some submodules."""

    def wants(self, path: str, module: Any) -> bool:
        """Tells whether calls of a submodule are its business."""
        ...

    def call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what the call returns."""
        ...


@contextlib.contextmanager
def intercepting(model: Any, interceptors: tuple[Interceptor, ...]) -> Iterator[None]:
    """Lets interceptors handle the calls inside, the last one closest to the module.

    Args:
        model: A bound Linen module, or an NNX module of the caller's own, which is
            changed for good.
        interceptors: What handles the calls.
    """
    if not interceptors:
        yield
        return
    if isinstance(model, nn.Module):
        with nn.intercept_methods(functools.partial(_linen_call, interceptors)):
            yield
        return
    for path, module in named_modules(model):
        wanting = tuple(one for one in interceptors if one.wants(path, module))
        if wanting and callable(module):
            module.__class__ = _intercepted(type(module))
            object.__setattr__(module, _CALLS, _Calls(path, wanting))
    yield


def named_modules(model: Any) -> list[tuple[str, Any]]:
    """Returns an NNX model's modules by path, itself with an empty one."""
    return [
        ("/".join(map(str, path)), module)
        for path, module in nnx.iter_graph(model)
        if isinstance(module, nnx.Module)
    ]


# NNX.

_CALLS = "_meshlayout_calls"


@dataclass(frozen=True)
class _Calls:
    """What a module's class hands its calls to; hashable, as NNX wants attributes."""

    path: str
    interceptors: tuple[Interceptor, ...]


@functools.cache
def _intercepted(kind: type) -> type:
    """Returns a subclass whose calls are handed to the instance's interceptors."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        calls = getattr(self, _CALLS)
        proceed: Callable[..., Any] = functools.partial(kind.__call__, self)
        for one in reversed(calls.interceptors):
            proceed = _step_in(one, Call(calls.path, self, proceed))
        return proceed(*args, **kwargs)

    members = {"__call__": __call__, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), members)


def _step_in(one: Interceptor, call: Call) -> Callable[..., Any]:
    return lambda *args, **kwargs: one.call(call, args, kwargs)


# Linen.


def _linen_call(
    interceptors: tuple[Interceptor, ...],
    next_fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: Any,
) -> Any:
    if context.method_name != "__call__":
        return next_fun(*args, **kwargs)
    module = context.module
    path = "/".join(module.path)
    proceed = next_fun
    for one in reversed(interceptors):
        if one.wants(path, module):
            proceed = _step_in(one, Call(path, module, proceed))
    return proceed(*args, **kwargs)
