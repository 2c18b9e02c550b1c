"""`with layouts.scope():` models are born sharded in unchanged code.

While a scope is open, constructing an NNX module or calling Linen's `init` goes
through `create`. Modules that are parts of others are constructed inside their
parent's creation. A module that is given to another one later (the layers of an
`nnx.Sequential`) was created first, under a path that is not its last: its arrays
are spread as finely as they divide, and take their layouts when the parent is made.
An `nnx.Optimizer` is made for a model that is complete, and its slots lie as the
model's parameters do. Inside jit, vmap and other transformations there are no arrays
to lay out, and everything is constructed as without a scope.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
from flax import errors as flax_errors, linen as nn, nnx

from meshlayout import _jax, _paths
from meshlayout._cuts import spread
from meshlayout.errors import LayoutMapError, LayoutWarning, StateError, stack_level
from meshlayout.layout import Layout
from meshlayout.layout_map import (
    LayoutMap,
    Resolution,
    Resolved,
    in_force,
    register_scope_factory,
)
from meshlayout.state.create import (
    create,
    eager_sharding,
    eager_sharding_off,
    has_layout,
    marked,
    place,
    trace,
)


class Scope:
    """What was constructed while one scope is open.

    Args:
        layouts: The layout map of the scope.
    """

    def __init__(self, layouts: LayoutMap) -> None:
        self.layouts = layouts
        self._roots: list[nnx.Module] = []
        self._optimizers: list[tuple[nnx.Optimizer[Any], nnx.Module]] = []

    def construct(self, cls: Any, args: Any, kwargs: Any) -> Any:
        """Constructs one NNX module that is not part of another construction."""
        given = _module_leaves((args, kwargs))
        if any(isinstance(node, nnx.Module) for node in given):
            # A composition: its parts exist. Parts that it makes itself pass here.
            made = self._composed(cls, args, kwargs)
        else:
            made = self._born(cls, args, kwargs, given)
        self._roots.append(made)
        return made

    def finish(self) -> None:
        """Gives every module the layouts of its final paths, or raises."""
        found: list[Resolution] = []
        for root in self._roots:
            found.extend(self._move(root, strict=True))
        for optimizer, model in self._optimizers:
            found.extend(self._follow(optimizer, model))
        if self._roots:
            self.layouts.check_used(Resolved(None, tuple(found)))

    def start_optimizer(
        self, optimizer: nnx.Optimizer[Any], model: nnx.Module, start: Callable[[], Any]
    ) -> None:
        """Makes an optimiser's state for a model, which it takes to be complete.

        Args:
            optimizer: The optimiser, without its state.
            model: The model.
            start: Makes the state.
        """
        self._move(model, strict=False)
        start()
        self._follow(optimizer, model)
        self._optimizers.append((optimizer, model))

    def _composed(self, cls: Any, args: Any, kwargs: Any) -> Any:
        """Constructs a module as without a scope, and moves what it holds."""
        flag = eager_sharding()
        with eager_sharding_off():
            made = _construct(cls, *args, **kwargs)
        marked(made, flag)
        inside = {id(node) for _, node in nnx.iter_graph(made)}
        self._roots = [root for root in self._roots if id(root) not in inside]
        self._move(made, strict=False)
        return made

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
            return _construct(cls, *new_args, **new_kwargs), nodes

        try:
            traced = trace(build, *inputs)
        except StateError as error:
            if not isinstance(error.__cause__, flax_errors.TraceContextError):
                raise
            line = (
                f"{cls.__name__} draws from an nnx.Rngs that it was not given as an "
                "argument: its arrays are made whole on one device, and cut then. Pass "
                "the Rngs to it, as rngs=rngs."
            )
            warnings.warn(line, LayoutWarning, stacklevel=stack_level())
            return self._composed(cls, args, kwargs)
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

    def _move(self, module: nnx.Module, *, strict: bool) -> tuple[Resolution, ...]:
        """Relays a module's arrays out by their paths below it."""
        try:
            resolved = self.layouts.resolve(module)
        except LayoutMapError:
            if strict:
                raise
            return ()
        _lay_out(module, resolved.layouts)
        return resolved.resolutions

    def _follow(
        self, optimizer: nnx.Optimizer[Any], model: nnx.Module
    ) -> tuple[Resolution, ...]:
        """Relays an optimiser's state out as its parameters lie now."""
        params = nnx.state(model, optimizer.wrt)
        owners = [_as_it_lies(leaf) for leaf in _paths.flatten(params).leaves]
        resolved = self.layouts.resolve_slots(optimizer, params, owners)
        _lay_out(optimizer, resolved.layouts)
        return resolved.resolutions


def _as_it_lies(leaf: _paths.Leaf) -> Resolution:
    x = leaf.value
    layout = Layout.of(x)
    size = layout.bytes_per_device(x.shape, x.dtype)
    why = "as it lies"
    return Resolution(leaf.path, x.shape, x.dtype, layout, None, why, None, None, size)


def _lay_out(node: Any, layouts: Any) -> None:
    """Moves the arrays of an NNX object."""
    flat = _paths.flatten(nnx.state(node))
    found = iter(jax.tree.leaves(layouts))
    moved = []
    for leaf in flat.leaves:
        layout = next(found) if has_layout(leaf.value) else None
        if layout is not None and isinstance(leaf.value, jax.Array):
            moved.append(jax.device_put(leaf.value, layout.sharding))
        else:
            moved.append(leaf.value)
    with eager_sharding_off():
        nnx.update(node, flat.unflatten(moved))


_scope: ContextVar[Scope | None] = ContextVar("scope", default=None)


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


# Flax has no hook for "a module is being constructed", so the metaclass's call,
# Linen's init and an optimizer's are replaced, once, by ones that ask whether a scope
# is open.
_MODULE_TYPE: Any = type(nnx.Module)
_construct = _MODULE_TYPE.__call__
_linen_init = nn.Module.init
_linen_init_with_output = nn.Module.init_with_output
_linen_lazy_init = nn.Module.lazy_init
_optimizer_init = nnx.Optimizer.__init__


def _call(cls: Any, *args: Any, **kwargs: Any) -> Any:
    scope = _scope.get()
    if scope is None or _jax.is_tracing():
        return _construct(cls, *args, **kwargs)
    return scope.construct(cls, args, kwargs)


def _init(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    scope = _scope.get()
    if scope is None or _jax.is_tracing():
        return _linen_init(self, *args, **kwargs)

    return create(lambda: _linen_init(self, *args, **kwargs), scope.layouts)


def _lazy_init(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    scope = _scope.get()
    if scope is None or _jax.is_tracing():
        return _linen_lazy_init(self, *args, **kwargs)
    return create(lambda: _linen_lazy_init(self, *args, **kwargs), scope.layouts)


def _init_with_output(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    scope = _scope.get()
    if scope is None or _jax.is_tracing():
        return _linen_init_with_output(self, *args, **kwargs)

    def resolve(node: Any) -> Resolved:
        output, variables = node
        whole = LayoutMap(scope.layouts.mesh).resolve(output)
        found = scope.layouts.resolve(variables)
        return Resolved((whole.layouts, found.layouts), found.resolutions)

    traced = trace(lambda: _linen_init_with_output(self, *args, **kwargs))
    return place(traced, scope.layouts, resolve).create()


def _start_optimizer(self: Any, model: nnx.Module, *args: Any, **kwargs: Any) -> None:
    start = functools.partial(_optimizer_init, self, model, *args, **kwargs)
    scope = _scope.get()
    if scope is None or _jax.is_tracing():
        start()
    else:
        scope.start_optimizer(self, model, start)


def _scope_factory(layouts: LayoutMap) -> Any:
    _MODULE_TYPE.__call__ = _call
    nn.Module.init = _init
    nn.Module.init_with_output = _init_with_output
    nn.Module.lazy_init = _lazy_init
    nnx.Optimizer.__init__ = _start_optimizer
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
