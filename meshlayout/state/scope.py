"""`with layouts.scope():` models are born sharded in unchanged code.

While a scope is open, constructing an NNX module or calling Linen's `init` goes
through `create`. Modules that are parts of others are constructed inside their
parent's creation. A module that is given to another one later (the layers of an
`nnx.Sequential`) was created first, under a path that is not its last: its arrays
are spread as finely as they divide, and take their layouts when the parent is made.
Inside jit, vmap and other transformations there are no arrays to lay out, and a
module is constructed as without a scope.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
from flax import linen as nn, nnx

from meshlayout import _jax, _paths
from meshlayout._cuts import spread
from meshlayout.errors import LayoutMapError
from meshlayout.layout_map import LayoutMap, Resolved, in_force, register_scope_factory
from meshlayout.state.create import create, eager_sharding_off, place, trace


class Scope:
    """What was constructed while one scope is open.

    Args:
        layouts: The layout map of the scope.
    """

    def __init__(self, layouts: LayoutMap) -> None:
        self.layouts = layouts
        self._roots: list[nnx.Module] = []

    def construct(self, cls: Any, args: Any, kwargs: Any) -> Any:
        """Constructs one NNX module that is not part of another construction."""
        given = _module_leaves((args, kwargs))
        if any(isinstance(node, nnx.Module) for node in given):
            # A composition: its parts exist. Parts that it makes itself pass here.
            made = _construct(cls, *args, **kwargs)
            inside = {id(node) for _, node in nnx.iter_graph(made)}
            self._roots = [root for root in self._roots if id(root) not in inside]
            self._move(made, strict=False)
        else:
            made = self._born(cls, args, kwargs, given)
        self._roots.append(made)
        return made

    def finish(self) -> None:
        """Gives every module the layouts of its final paths, or raises."""
        for root in self._roots:
            self._move(root, strict=True)

    def _born(self, cls: Any, args: Any, kwargs: Any, given: list[Any]) -> Any:
        """Constructs a module through `create`, drawing from the caller's Rngs."""
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_module)
        at = [index for index, leaf in enumerate(leaves) if _is_module(leaf)]
        graphdef, state = nnx.split(tuple(given))
        inputs, state_def = jax.tree.flatten(state)

        def build(*values: Any) -> Any:
            nodes = nnx.merge(graphdef, state_def.unflatten(values))
            filled = list(leaves)
            for index, node in zip(at, nodes, strict=True):
                filled[index] = node
            new_args, new_kwargs = treedef.unflatten(filled)
            with _no_scope():
                return _construct(cls, *new_args, **new_kwargs), nodes

        traced = trace(build, *inputs)
        description = place(traced, self.layouts, self._lenient)
        made, nodes = description.placed.make(inputs)
        _adopt(made, nodes, given)
        return made

    def _lenient(self, node: Any) -> Resolved:
        """Resolves what has a rule; spreads the rest until its path is final."""
        # The module is entry 0 of what was built, the caller's Rngs are entry 1.
        flat = _paths.flatten(node)
        layouts = []
        for leaf in flat.leaves:
            below = leaf.path.partition("/")[2]
            layouts.append(self._lenient_leaf(dataclasses.replace(leaf, path=below)))
        return Resolved(flat.unflatten(layouts), ())

    def _lenient_leaf(self, leaf: _paths.Leaf) -> Any:
        try:
            found = self.layouts.resolve_leaf(leaf)
        except LayoutMapError:
            return spread(self.layouts.mesh, leaf.value.shape)
        if found is None or found.reason != "default":
            return found and found.layout
        return spread(self.layouts.mesh, found.shape)

    def _move(self, module: nnx.Module, *, strict: bool) -> None:
        """Relays a module's arrays out by their paths below it."""
        try:
            layouts, _ = self.layouts.resolve(module)
        except LayoutMapError:
            if strict:
                raise
            return
        state = nnx.state(module)
        flat = _paths.flatten(state)
        targets = _paths.flatten(layouts)
        moved = [
            jax.device_put(leaf.value, target.value.sharding)
            if isinstance(leaf.value, jax.Array)
            else leaf.value
            for leaf, target in zip(flat.leaves, targets.leaves, strict=True)
        ]
        with eager_sharding_off():
            nnx.update(module, flat.unflatten(moved))


_scope: ContextVar[Scope | None] = ContextVar("scope", default=None)


@contextlib.contextmanager
def _no_scope() -> Iterator[None]:
    token = _scope.set(None)
    try:
        yield
    finally:
        _scope.reset(token)


@contextlib.contextmanager
def _open_scope(layouts: LayoutMap) -> Iterator[LayoutMap]:
    scope = Scope(layouts)
    token = _scope.set(scope)
    try:
        with in_force(layouts):
            yield layouts
    finally:
        _scope.reset(token)
    scope.finish()


# Flax has no hook for "a module is being constructed", so the metaclass's call and
# Linen's init are replaced, once, by ones that ask whether a scope is open.
_MODULE_TYPE: Any = type(nnx.Module)
_construct = _MODULE_TYPE.__call__
_linen_init = nn.Module.init


def _call(cls: Any, *args: Any, **kwargs: Any) -> Any:
    scope = _scope.get()
    if scope is None or _jax.is_tracing():
        return _construct(cls, *args, **kwargs)
    return scope.construct(cls, args, kwargs)


def _init(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    scope = _scope.get()
    if scope is None or _jax.is_tracing():
        return _linen_init(self, *args, **kwargs)

    def build() -> Any:
        with _no_scope():
            return _linen_init(self, *args, **kwargs)

    return create(build, scope.layouts)


def _scope_factory(layouts: LayoutMap) -> Any:
    _MODULE_TYPE.__call__ = _call
    nn.Module.init = _init
    return _open_scope(layouts)


register_scope_factory(_scope_factory)


def _is_module(node: Any) -> bool:
    return isinstance(node, nnx.Pytree)


def _module_leaves(tree: Any) -> list[Any]:
    return [n for n in jax.tree.leaves(tree, is_leaf=_is_module) if _is_module(n)]


def _adopt(made: nnx.Module, copies: Any, originals: list[Any]) -> None:
    """Puts the caller's own objects in the place of their copies in a new module."""
    same: dict[int, Any] = {}
    for copy, original in zip(copies, originals, strict=True):
        nnx.update(original, nnx.state(copy))
        for (_, one), (_, other) in zip(
            nnx.iter_graph(copy), nnx.iter_graph(original), strict=True
        ):
            same[id(one)] = other
    for _, node in list(nnx.iter_graph(made)):
        for name, value in list(vars(node).items()) if _is_module(node) else ():
            if id(value) in same:
                setattr(node, name, same[id(value)])
