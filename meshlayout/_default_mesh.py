"""The default mesh, which layouts use when none is given."""

import functools
import inspect
from collections.abc import Callable
from contextlib import ContextDecorator
from contextvars import ContextVar
from typing import Any, TypeVar

import jax

from meshlayout import _jax
from meshlayout.errors import MeshError
from meshlayout.mesh import Mesh, as_mesh


_Function = TypeVar("_Function", bound=Callable[..., Any])


class default_mesh(ContextDecorator):  # noqa: N801 (used like a function)
    """Makes a mesh the default, inside a `with` block or a decorated function.

    Use this so that layouts need no mesh argument. Blocks may be nested, and an
    exception restores the outer mesh. Only the thread or task that entered sees the
    mesh; a new thread has none. JAX's own mesh is not changed, and if no default mesh
    is set, `get_default_mesh` returns that of `jax.set_mesh`. A compiled function is
    retraced under another default mesh, as under another `jax.set_mesh`. `async def`
    functions can be decorated, but not generators: between the pieces of their bodies,
    the caller would see the mesh.

    Args:
        mesh: A `Mesh` or `jax.sharding.Mesh`.

    Raises:
        MeshError: If `mesh` is not a mesh, or the decorated function is a generator.

    Example:
        >>> import meshlayout as ml
        >>> with ml.default_mesh(ml.create_mesh({"batch": 8})):
        ...     ml.get_default_mesh()
        Mesh(batch=8)
    """

    def __init__(self, mesh: Mesh | jax.sharding.Mesh) -> None:
        self.mesh = as_mesh(mesh)

    def __enter__(self) -> Mesh:
        """Makes the mesh the default, and returns it."""
        _set_entered((*_entered.get(), self))
        return self.mesh

    def __exit__(self, *exception: object) -> None:
        """Restores the previous default mesh."""
        entered = list(_entered.get())
        # Remove the innermost entry of this object, not simply the last entry: a
        # generator that holds a block open may end later than the block around it.
        for index in reversed(range(len(entered))):
            if entered[index] is self:
                del entered[index]
                break
        _set_entered(tuple(entered))

    def __call__(self, func: _Function) -> _Function:
        """Returns the function, wrapped to run with the mesh as the default."""
        if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            msg = (
                f"default_mesh cannot decorate the generator {func.__qualname__!r}, "
                "whose body runs after the call has returned. Iterate over it inside "
                "`with default_mesh(mesh):`."
            )
            raise MeshError(msg)
        if not inspect.iscoroutinefunction(func):
            return super().__call__(func)

        @functools.wraps(func)
        async def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await func(*args, **kwargs)

        return call  # pyright: ignore[reportReturnType]


_entered: ContextVar[tuple[default_mesh, ...]] = ContextVar("entered", default=())


def _set_entered(entered: tuple[default_mesh, ...]) -> None:
    _entered.set(entered)
    _jax.set_trace_key(entered[-1].mesh if entered else None)


def get_default_mesh() -> Mesh | None:
    """Returns the default mesh, or that of `jax.set_mesh`, or None."""
    entered = _entered.get()
    if entered:
        return entered[-1].mesh
    concrete = _jax.concrete_mesh()
    return None if concrete is None else Mesh(concrete)
