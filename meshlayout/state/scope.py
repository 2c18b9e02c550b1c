"""`with layouts.scope():` models are created sharded in unchanged code.

While a scope is open, constructing an NNX module or calling Linen's `init` goes
through `create`. Modules that are parts of others are constructed inside their
parent's creation. A module that is given to another one later (the layers of an
`nnx.Sequential`) was created first, under a path that is not its last: its arrays
are spread as finely as they divide, and take their layouts when the parent is made.
An `nnx.Optimizer` is made for a model that is complete, and its slots take the layouts
of the model's parameters. Inside jit, vmap and other transformations there are no
arrays to lay out, and everything is constructed as without a scope.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeGuard

import jax
from flax import errors as flax_errors, linen as nn, nnx

from meshlayout import _jax, _paths
from meshlayout._annotations import PyTree
from meshlayout._bit_exact import finest_layout
from meshlayout._patches import SharedPatches
from meshlayout.errors import LayoutMapError, LayoutWarning, StateError, stack_level
from meshlayout.layout import Layout
from meshlayout.layout_map import (
    LayoutMap,
    Resolution,
    Resolved,
    activate,
    register_scope_factory,
)
from meshlayout.state.create import (
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
        self.is_empty = True

    def construct(
        self,
        constructor: Callable[..., nnx.Module],
        cls: type[nnx.Module],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> nnx.Module:
        """Constructs one NNX module that is not part of another construction.

        Args:
            constructor: Flax's own way to construct the class.
            cls: The class.
            args: The constructor's arguments.
            kwargs: Its keyword arguments.
        """
        objects = _nnx_objects((args, kwargs))
        if any(isinstance(node, nnx.Module) for node in objects):
            # A composition: its parts exist. Parts that it makes itself pass here.
            module = self._composed(constructor, args, kwargs)
        else:
            module = self._born(constructor, cls, args, kwargs, objects)
        self._roots.append(module)
        return module

    def finish(self) -> None:
        """Gives every module the layouts of its final paths, or raises.

        Raises:
            LayoutMapError: If rules disagree or do not fit; if nothing was made, or a
                rule matches no path, and the map has `unused="error"`.

        Warns:
            LayoutWarning: If nothing was made, or a rule matches no path.
        """
        if self.is_empty:
            self._report_empty()
        found: list[Resolution] = []
        for root in self._roots:
            found.extend(self._move(root, strict=True))
        for optimizer, model in self._optimizers:
            found.extend(self._follow(optimizer, model))
        if self._roots:
            self.layouts._check_used(Resolved(None, tuple(found)))

    def start_optimizer(
        self, optimizer: nnx.Optimizer[Any], model: nnx.Module, start: Callable[[], Any]
    ) -> None:
        """Makes an optimizer's state for a model, which is taken to be complete.

        Args:
            optimizer: The optimizer, without its state.
            model: The model.
            start: Makes the state.
        """
        self._move(model, strict=False)
        start()
        self._follow(optimizer, model)
        self._optimizers.append((optimizer, model))

    def _report_empty(self) -> None:
        """Says that nothing was made, unless activations were laid out by the map."""
        if self.layouts._take_snapshot().is_read:
            return
        self.layouts._report_unused(
            "nothing was made in this scope: it lays out NNX modules and the variables "
            "of Linen's init that are made inside it. For Equinox and other pytrees, "
            "write create(lambda: Model(...), layouts)."
        )

    def _composed(
        self,
        constructor: Callable[..., nnx.Module],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> nnx.Module:
        """Constructs a module as without a scope, and moves what it holds."""
        flag = eager_sharding()
        with eager_sharding_off():
            module = constructor(*args, **kwargs)
        marked(module, is_eager=flag)
        inside = {id(node) for _, node in nnx.iter_graph(module)}
        self._roots = [root for root in self._roots if id(root) not in inside]
        self._move(module, strict=False)
        return module

    def _born(
        self,
        constructor: Callable[..., nnx.Module],
        cls: type[nnx.Module],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        objects: list[nnx.Pytree],
    ) -> nnx.Module:
        """Constructs a module through `create`, drawing from the caller's Rngs."""
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_nnx_object)
        graphdef, state = nnx.split(tuple(objects))
        inputs, state_def = jax.tree.flatten(state)

        def build(*values: Any) -> tuple[nnx.Module, Any]:
            copies = nnx.merge(graphdef, state_def.unflatten(values))
            remaining = iter(copies)
            new_args, new_kwargs = treedef.unflatten(
                [next(remaining) if _is_nnx_object(x) else x for x in leaves]
            )
            return constructor(*new_args, **new_kwargs), copies

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
            return self._composed(constructor, args, kwargs)
        description = place(traced, self.layouts, self._lenient)
        module, copies = description._make(inputs)
        _adopt(module, copies, objects)
        return module

    def _lenient(self, node: PyTree) -> Resolved:
        """Resolves what has a rule; shards the rest evenly until its path is final."""
        # The module is entry 0 of what was built, the caller's Rngs are entry 1.
        flat = _paths.flatten(node)
        layouts = []
        for leaf in flat.leaves:
            below = leaf.path.partition("/")[2]
            layouts.append(self._lenient_leaf(leaf._replace(path=below)))
        return Resolved(flat.unflatten(layouts), ())

    def _lenient_leaf(self, leaf: _paths.Leaf) -> Any:
        try:
            found = self.layouts._resolver().leaf(leaf)
        except LayoutMapError:
            return finest_layout(self.layouts.mesh, leaf.value.shape)
        if found is None or found.reason != "default":
            return found and found.layout
        return finest_layout(self.layouts.mesh, found.shape)

    def _move(self, module: nnx.Module, *, strict: bool) -> tuple[Resolution, ...]:
        """Lays out a module's arrays by their paths below it."""
        try:
            resolved = self.layouts.resolve(module)
        except LayoutMapError:
            if strict:
                raise
            return ()
        _lay_out(module, nnx.state(module), resolved.layouts)
        return resolved.resolutions

    def _follow(
        self, optimizer: nnx.Optimizer[Any], model: nnx.Module
    ) -> tuple[Resolution, ...]:
        """Lays out an optimizer's state like its parameters are now."""
        params = nnx.state(model, optimizer.wrt)
        owners = [_current_resolution(leaf) for leaf in _paths.flatten(params).leaves]
        slots = _without_model(optimizer, model)
        resolved = self.layouts._resolve_slots(slots, params, owners)
        _lay_out(optimizer, slots, resolved.layouts)
        return resolved.resolutions


def _without_model(
    optimizer: nnx.Optimizer[Any], model: nnx.Module
) -> "nnx.State[Any, Any]":
    """Returns an optimizer's own state; `nnx.ModelAndOptimizer` holds the model too."""
    variables = {id(node) for _, node in nnx.iter_graph(model)}
    paths = {path for path, node in nnx.iter_graph(optimizer) if id(node) in variables}
    return nnx.state(optimizer, lambda path, _: path not in paths)


def _current_resolution(leaf: _paths.Leaf) -> Resolution:
    x = leaf.value
    layout = Layout.of(x)
    size = layout.bytes_per_device(x.shape, x.dtype)
    why = "where it is"
    return Resolution(leaf.path, x.shape, x.dtype, layout, None, why, None, None, size)


def _lay_out(node: nnx.Pytree, state: "nnx.State[Any, Any]", layouts: PyTree) -> None:
    """Moves arrays of an NNX object: those of its state, or of a part of it."""
    flat = _paths.flatten(state)
    remaining = iter(jax.tree.leaves(layouts))
    moved = []
    for leaf in flat.leaves:
        layout = next(remaining) if has_layout(leaf.value) else None
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
    with _constructors:
        token = _scope.set(scope)
        try:
            with activate(layouts):
                yield layouts
        finally:
            _scope.reset(token)
        scope.finish()


register_scope_factory(_open_scope)


def _construct_module(
    scope: Scope, construct: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any
) -> Any:
    return scope.construct(functools.partial(construct, cls), cls, args, kwargs)


def _init(
    scope: Scope, init: Callable[..., Any], *args: Any, **kwargs: Any
) -> Mapping[str, Any]:
    return place(trace(lambda: init(*args, **kwargs)), scope.layouts).create()


def _init_with_output(
    scope: Scope, init: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Any, Mapping[str, Any]]:
    def resolve(node: Any) -> Resolved:
        output, variables = node
        whole = LayoutMap(scope.layouts.mesh).resolve(output)
        found = scope.layouts.resolve(variables)
        return Resolved((whole.layouts, found.layouts), found.resolutions)

    traced = trace(lambda: init(*args, **kwargs))
    return place(traced, scope.layouts, resolve).create()


def _start_optimizer(
    scope: Scope,
    init: Callable[..., None],
    optimizer: nnx.Optimizer[Any],
    model: nnx.Module,
    *args: Any,
    **kwargs: Any,
) -> None:
    start = functools.partial(init, optimizer, model, *args, **kwargs)
    scope.start_optimizer(optimizer, model, start)


def _in_scope(around: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns a function that replaces a constructor of Flax to look for a scope.

    Args:
        around: Called in place of the constructor where a scope is open, with the
            scope and the constructor before the arguments.
    """

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            scope = _scope.get()
            if scope is None:
                return original(*args, **kwargs)
            scope.is_empty = False
            if _jax.is_tracing():
                return original(*args, **kwargs)
            return around(scope, original, *args, **kwargs)

        return patched

    return replacement


# Flax has no hook for "a module is being constructed". If it moves one of these
# methods, tests/test_scope.py fails at its first test.
_constructors = SharedPatches(
    (type(nnx.Module), "__call__", _in_scope(_construct_module)),
    (nn.Module, "init", _in_scope(_init)),
    (nn.Module, "init_with_output", _in_scope(_init_with_output)),
    (nn.Module, "lazy_init", _in_scope(_init)),
    (nnx.Optimizer, "__init__", _in_scope(_start_optimizer)),
)


def _is_nnx_object(node: object) -> TypeGuard[nnx.Pytree]:
    return isinstance(node, nnx.Pytree)


def _nnx_objects(tree: PyTree) -> list[nnx.Pytree]:
    nodes = jax.tree.leaves(tree, is_leaf=_is_nnx_object)
    return [node for node in nodes if _is_nnx_object(node)]


def _adopt(module: nnx.Module, copies: Any, originals: list[nnx.Pytree]) -> None:
    """Puts the caller's own objects in the place of their copies in a new module."""
    originals_by_copy: dict[int, Any] = {}
    for copy, original in zip(copies, originals, strict=True):
        nnx.update(original, nnx.state(copy))
        for (_, node), (_, original_node) in zip(
            nnx.iter_graph(copy), nnx.iter_graph(original), strict=True
        ):
            originals_by_copy[id(node)] = original_node
    for _, node in list(nnx.iter_graph(module)):
        for name, value in list(vars(node).items()) if _is_nnx_object(node) else ():
            if id(value) in originals_by_copy:
                setattr(node, name, originals_by_copy[id(value)])
