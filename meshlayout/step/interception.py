"""Calls of submodules, handled by a step without changing the model.

Remat by path, precision by path and the weights in BatchNorm all act when a submodule
is called. Linen has interceptors for that; NNX has not. Exchanging the modules' classes
for subclasses was tried and is wrong: models look at `type(layer)`, register classes in
`__init_subclass__`, pickle them. So the `__call__` of a class is wrapped for as long as
somebody is inside, and the wrapper looks at who is: a ContextVar holds the handlers,
and each submodule that they want carries its path (in an attribute, which the copies
that `nnx.remat`, `nnx.scan` and `nnx.split` make carry, too).
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from flax import linen as nn, nnx


Module: TypeAlias = nn.Module | nnx.Module


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
    """Handles the calls of some submodules."""

    def wants(self, path: str, module: Module) -> bool:
        """Returns whether it handles the calls of a submodule."""
        ...

    def call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what the call returns."""
        ...


Interceptors: TypeAlias = tuple[Interceptor, ...]

_of_model: ContextVar[Interceptors] = ContextVar("_of_model", default=())
_of_classes: ContextVar[Interceptors] = ContextVar("_of_classes", default=())


@contextlib.contextmanager
def intercepting(model: Module, interceptors: Interceptors) -> Iterator[None]:
    """Lets interceptors handle the calls inside, the last one closest to the module.

    Args:
        model: A bound Linen module, or an NNX module that nobody else holds.
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
        # Every interceptor is asked of every module: some remember what there is.
        wanted = [one.wants(path, module) for one in interceptors]
        if any(wanted) and callable(module):
            chosen.append((path, module))
    for path, module in chosen:
        object.__setattr__(module, _PATH, _Path(path))
    try:
        with (
            _wrapped({type(module) for _, module in chosen}),
            _set(_of_model, interceptors),
        ):
            yield
    finally:
        for _, module in chosen:
            object.__delattr__(module, _PATH)


@contextlib.contextmanager
def intercepting_classes(
    kinds: Iterable[type], interceptors: Interceptors
) -> Iterator[None]:
    """Lets interceptors handle the calls of some classes, whatever model they are in.

    Args:
        kinds: NNX classes; a subclass counts where it calls `super().__call__`.
        interceptors: What handles their calls, and those of all Linen modules.
    """
    with (
        nn.intercept_methods(functools.partial(_linen_call, interceptors)),
        _wrapped(set(kinds)),
        _set(_of_classes, interceptors),
    ):
        yield


def named_modules(model: nnx.Module) -> list[tuple[str, nnx.Module]]:
    """Returns an NNX model's modules by path, itself with an empty one."""
    return [
        ("/".join(map(str, path)), module)
        for path, module in nnx.iter_graph(model)
        if isinstance(module, nnx.Module)
    ]


@contextlib.contextmanager
def _set(variable: ContextVar[Interceptors], value: Interceptors) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


# NNX.

_PATH = "_meshlayout_path"


@dataclass(frozen=True, eq=False)
class _Path:
    """A submodule's path, of which any two are equal.

    It is a static attribute for NNX, and two blocks whose other attributes are equal
    stay alike: models stack them to scan over.
    """

    text: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Path)

    def __hash__(self) -> int:
        return hash(_Path)


# How many are inside for each class, and the `__call__` of its own that it had.
_lock = threading.Lock()
_counts: dict[type, int] = {}
_own_calls: dict[type, Any] = {}


@contextlib.contextmanager
def _wrapped(kinds: set[type]) -> Iterator[None]:
    """Wraps the `__call__` of classes; the last one to leave puts it back."""
    with _lock:
        for kind in kinds:
            _counts[kind] = _counts.get(kind, 0) + 1
            if _counts[kind] == 1:
                if "__call__" in vars(kind):
                    _own_calls[kind] = vars(kind)["__call__"]
                kind.__call__ = _wrapper(kind)
    try:
        yield
    finally:
        with _lock:
            for kind in kinds:
                _counts[kind] -= 1
                if not _counts[kind]:
                    del _counts[kind]
                    if kind in _own_calls:
                        kind.__call__ = _own_calls.pop(kind)
                    else:
                        del kind.__call__


def _wrapper(kind: type) -> Callable[..., Any]:
    # Not kind.__call__: it may be another descriptor than a function, as nnx.jit gives.
    original = next(
        vars(base)["__call__"] for base in kind.__mro__ if "__call__" in vars(base)
    )

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        interceptors = _of_classes.get()
        # In a subclass that calls super().__call__, the subclass has asked already.
        mark = vars(self).get(_PATH) if type(self) is kind else None
        if mark is not None:
            interceptors = (*_of_model.get(), *interceptors)
        path = "" if mark is None else mark.text
        proceed = original.__get__(self, type(self))
        return _handled(interceptors, path, self, proceed)(*args, **kwargs)

    return __call__


def _handled(
    interceptors: Interceptors, path: str, module: Module, proceed: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a call as the interceptors handle it."""
    for one in reversed(interceptors):
        if one.wants(path, module):
            proceed = _step_in(one, Call(path, module, proceed))
    return proceed


def _step_in(one: Interceptor, call: Call) -> Callable[..., Any]:
    return lambda *args, **kwargs: one.call(call, args, kwargs)


# Linen.


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
