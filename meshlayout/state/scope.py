"""`with layouts.scope():` creates models sharded, in unchanged code.

While a scope is open, constructing an NNX module or calling Linen's `init` goes through
`create`. A module that constructs its own parts does so inside its creation. A module
that is passed to another one later (the layers of an `nnx.Sequential`) is created
first, under a path that is not final: its arrays are sharded as finely as they divide,
and get their layouts when the parent is made. An `nnx.Optimizer` is made for a complete
model, and its slots take the layouts of the model's parameters. Inside jit, vmap and
other transformations there are no arrays to lay out, and everything is constructed as
without a scope.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeGuard

import jax
import numpy as np
import optax
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
    """An open scope, and what was constructed in it.

    Args:
        layouts: The layout map of the scope.
    """

    def __init__(self, layouts: LayoutMap) -> None:
        self.layouts = layouts
        # Modules that are not part of another one, as far as is known.
        self._roots: list[nnx.Module] = []
        self._optimizers: list[tuple[nnx.Optimizer[Any], nnx.Module]] = []
        self.is_empty = True

    # Called instead of Flax's own methods, which are their first argument.

    def construct(
        self, construct: Callable[..., nnx.Module], cls: type, *args: Any, **kwargs: Any
    ) -> nnx.Module:
        """Constructs an NNX module, outside of another one's construction."""
        call = functools.partial(construct, cls)
        leaves = jax.tree.leaves((args, kwargs), is_leaf=_is_nnx_object)
        objects = [leaf for leaf in leaves if _is_nnx_object(leaf)]
        if any(isinstance(node, nnx.Module) for node in objects):
            # Its parts exist and cannot be traced as its own. Parts that it makes
            # itself come through here one by one.
            module = self._composed(call, args, kwargs)
        else:
            module = self._created(call, args, kwargs, objects)
        self._roots.append(module)
        return module

    def init(self, init: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Creates Linen's variables."""
        return place(trace(lambda: init(*args, **kwargs)), self.layouts).create()

    def init_with_output(
        self, init: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Creates Linen's variables and a replicated output."""

        def resolve(node: Any) -> Resolved:
            output, variables = node
            whole = LayoutMap(self.layouts.mesh).resolve(output)
            resolved = self.layouts.resolve(variables)
            return Resolved((whole.layouts, resolved.layouts), resolved.resolutions)

        traced = trace(lambda: init(*args, **kwargs))
        return place(traced, self.layouts, resolve).create()

    def start_optimizer(
        self,
        init: Callable[..., None],
        optimizer: nnx.Optimizer[Any],
        model: nnx.Module,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Makes an optimizer's state for a model, which is assumed to be complete."""
        # Slots are made like the parameters, so these come first. A rule that does not
        # fit is reported when the scope ends; the model may still become part of
        # another.
        self._move(model, strict=False)
        if any(map(_is_in_other_memory, jax.tree.leaves(nnx.state(model)))):
            tx, *others = (kwargs.pop("tx"),) if "tx" in kwargs else args
            made = functools.partial(self._slots, tx.init)
            created = optax.GradientTransformation(made, tx.update)
            init(optimizer, model, created, *others, **kwargs)
            optimizer.tx = tx
        else:
            init(optimizer, model, *args, **kwargs)
        self._follow(optimizer, model)
        self._optimizers.append((optimizer, model))

    def _slots(self, init: Callable[[PyTree], PyTree], params: PyTree) -> PyTree:
        """Makes optimizer state for parameters that are not in the devices' memory.

        In eager mode, JAX would compute on the devices with all of it, and (up to 0.12)
        cannot make zeros in the host's memory for one device.
        """
        leaves, treedef = jax.tree.flatten(params)
        like = {x.shape: Layout.of(x) for x in leaves}

        def resolve(node: PyTree) -> Resolved:
            flat = _paths.flatten(node)
            shapes = [np.shape(leaf.value) for leaf in flat.leaves]
            whole = self.layouts.mesh.layout(...)
            layouts = [like.get(x) or whole.with_rank(len(x)) for x in shapes]
            return Resolved(flat.unflatten(layouts), ())

        traced = trace(lambda *values: init(treedef.unflatten(values)), *leaves)
        return place(traced, self.layouts, resolve)._make(leaves)

    def finish(self) -> None:
        """Lays out every module by its final paths.

        Raises:
            LayoutMapError: If rules disagree or do not fit; or, if the map has
                `unused="error"`, nothing was made or a rule matches no path.

        Warns:
            LayoutWarning: If nothing was made, or a rule matches no path.
        """
        # A scope that only lays out activations is in use as well.
        if self.is_empty and not self.layouts._take_snapshot().is_read:
            self.layouts._report_unused(
                "nothing was made in this scope: it lays out NNX modules and the "
                "variables of Linen's init that are made inside it. For Equinox and "
                "other pytrees, write create(lambda: Model(...), layouts)."
            )
        resolutions: list[Resolution] = []
        for root in self._roots:
            resolutions.extend(self._move(root, strict=True))
        for optimizer, model in self._optimizers:
            resolutions.extend(self._follow(optimizer, model))
        if self._roots:
            self.layouts._check_used(Resolved(None, tuple(resolutions)))

    def _composed(
        self, call: functools.partial[nnx.Module], args: Any, kwargs: Any
    ) -> nnx.Module:
        """Constructs a module as without a scope, and lays out what it holds.

        Its parts are no longer roots: their paths now start at this module.
        """
        is_eager = eager_sharding()
        with eager_sharding_off():
            module = call(*args, **kwargs)
        marked(module, is_eager=is_eager)
        inside = {id(node) for _, node in nnx.iter_graph(module)}
        self._roots = [root for root in self._roots if id(root) not in inside]
        self._move(module, strict=False)
        return module

    def _created(
        self,
        call: functools.partial[nnx.Module],
        args: Any,
        kwargs: Any,
        objects: list[nnx.Pytree],
    ) -> nnx.Module:
        """Constructs a module through `create`, drawing from the caller's Rngs.

        A trace must not change objects from outside, so the constructor gets copies of
        the caller's Rngs, whose counts are written back after the module is made.
        """
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_nnx_object)
        graphdef, state = nnx.split(tuple(objects))
        inputs, state_def = jax.tree.flatten(state)

        def build(*values: Any) -> tuple[nnx.Module, Any]:
            copies = nnx.merge(graphdef, state_def.unflatten(values))
            remaining = iter(copies)
            new_args, new_kwargs = treedef.unflatten(
                [next(remaining) if _is_nnx_object(x) else x for x in leaves]
            )
            return call(*new_args, **new_kwargs), copies

        try:
            traced = trace(build, *inputs)
        except StateError as error:
            if not isinstance(error.__cause__, flax_errors.TraceContextError):
                raise
            warning = (
                f"{call.args[0].__name__} draws from an nnx.Rngs that is not among its "
                "arguments: its arrays are made unsharded on one device first. "
                "Pass the Rngs to it, as rngs=rngs."
            )
            warnings.warn(warning, LayoutWarning, stacklevel=stack_level())
            return self._composed(call, args, kwargs)
        description = place(traced, self.layouts, self._lenient)
        module, copies = description._make(inputs)
        _adopt(module, copies, objects)
        return module

    def _lenient(self, node: PyTree) -> Resolved:
        """Resolves leaves that have a rule; shards the others as finely as possible.

        The path may not be final, so a leaf that matches no rule yet must not be
        replicated: it may be too large for one device.
        """
        # The module is entry 0 of what was built, and the caller's Rngs are entry 1.
        flat = _paths.flatten(node)
        resolver = self.layouts._resolver()
        layouts = []
        for leaf in flat.leaves:
            layout = finest_layout(self.layouts.mesh, np.shape(leaf.value))
            with contextlib.suppress(LayoutMapError):  # raised at the final path
                path = leaf.path.partition("/")[2]
                resolution = resolver.leaf(leaf._replace(path=path))
                if resolution is None or resolution.reason != "default":
                    layout = resolution and resolution.layout
            layouts.append(layout)
        return Resolved(flat.unflatten(layouts), ())

    def _move(self, module: nnx.Module, *, strict: bool) -> tuple[Resolution, ...]:
        """Lays out a module's arrays by their paths below it.

        If not `strict`, a module with rules that do not fit stays where it is.
        """
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
        """Lays out an optimizer's state like its parameters are laid out now."""
        params = nnx.state(model, optimizer.wrt)
        owners = [_current_resolution(leaf) for leaf in _paths.flatten(params).leaves]
        slots = _without_model(optimizer, model)
        resolved = self.layouts._resolve_slots(slots, params, owners)
        _lay_out(optimizer, slots, resolved.layouts)
        return resolved.resolutions


def _is_in_other_memory(x: object) -> bool:
    return isinstance(x, jax.Array) and _jax.is_in_other_memory(x.sharding)


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
    why = "where it is"
    return Resolution(leaf.path, x.shape, x.dtype, layout, None, why)


def _lay_out(node: nnx.Pytree, state: "nnx.State[Any, Any]", layouts: PyTree) -> None:
    """Moves the arrays in (a part of) an NNX object's state to their layouts."""
    flat = _paths.flatten(state)
    remaining = iter(jax.tree.leaves(layouts))
    moved = []
    for leaf in flat.leaves:
        layout = next(remaining) if has_layout(leaf.value) else None
        if layout is not None and isinstance(leaf.value, jax.Array):
            moved.append(_jax.put(leaf.value, layout.sharding))
        else:
            moved.append(leaf.value)
    with eager_sharding_off():
        nnx.update(node, flat.unflatten(moved))


_scope: ContextVar[Scope | None] = ContextVar("scope", default=None)


@contextlib.contextmanager
def open_scope(layouts: LayoutMap) -> Iterator[LayoutMap]:
    """Creates models with these layouts; see `LayoutMap.scope`."""
    scope = Scope(layouts)
    with _constructors:
        token = _scope.set(scope)
        try:
            with activate(layouts):
                yield layouts
        finally:
            _scope.reset(token)
        # Not after an error in the block, which a second one would hide.
        scope.finish()


def _in_scope(around: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns a function that makes the replacement of one of Flax's constructors.

    In an open scope, the replacement calls `around` with the scope, the constructor and
    the arguments; otherwise, and while JAX traces, just the constructor.
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


# Flax has no hook for the construction of a module. If it moves one of these methods,
# arrays are made unsharded in a scope; tests/test_scope.py fails at its first test. The
# methods are replaced only while some thread is inside a scope.
_constructors = SharedPatches(
    (type(nnx.Module), "__call__", _in_scope(Scope.construct)),
    (nn.Module, "init", _in_scope(Scope.init)),
    (nn.Module, "init_with_output", _in_scope(Scope.init_with_output)),
    (nn.Module, "lazy_init", _in_scope(Scope.init)),
    (nnx.Optimizer, "__init__", _in_scope(Scope.start_optimizer)),
)


def _is_nnx_object(node: object) -> TypeGuard[nnx.Pytree]:
    return isinstance(node, nnx.Pytree)


def _adopt(module: nnx.Module, copies: Any, originals: list[nnx.Pytree]) -> None:
    """Replaces the copies of the caller's objects in a new module by the originals.

    A module that keeps its Rngs must share them with the caller, as without a scope.
    """
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
