"""`with ml.scope(layouts):` creates models sharded, with unchanged code.

While a scope is open, constructing an NNX module or calling Linen's `init` goes through
`create`. A module that is passed to another one later (the layers of an
`nnx.Sequential`) is created first, under a path that is not final: arrays without a
rule are sharded as finely as possible, and get their layouts when the parent is made.
Inside jit and other transformations, a scope changes nothing.
"""

import contextlib
import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from flax import linen as nn, nnx

from meshlayout import _checks, _jax, _paths
from meshlayout._annotations import PyTree
from meshlayout._patches import SharedPatches
from meshlayout.errors import LayoutMapError
from meshlayout.layout_map import LayoutMap, Resolution, Resolved, activate
from meshlayout.state import creation
from meshlayout.state.operations import finest_layout


@_checks.user_call
def scope(layouts: LayoutMap) -> contextlib.AbstractContextManager[LayoutMap]:
    """Creates models with these layouts.

    Inside, unchanged code creates NNX modules and the variables of Linen's `init`
    sharded, and `constrain` and `create` follow the map.

    Raises:
        StateError: If a module draws from an `nnx.Rngs` that it was not given.
        LayoutMapError: At the end, if rules disagree or do not fit; with
            `unused="error"`, also if nothing was made or a rule matches no path.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> with ml.scope(ml.LayoutMap(mesh, {"kernel": (None, "model")})):
        ...     layer = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
        >>> ml.Layout.of(layer.kernel[...])
        Layout([unsharded, model], Mesh(batch=2, model=4))
    """
    creation.check_map(layouts, "ml.scope")
    return _Scope(layouts)


class _Scope:
    def __init__(self, layouts: LayoutMap) -> None:
        self.layouts = layouts
        # Modules that are not part of another one, as far as is known.
        self._roots: list[nnx.Module] = []
        self._slots: list[Resolution] = []  # of optimizers
        self.is_empty = True
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> LayoutMap:
        self._exits.enter_context(_constructors)
        self._exits.callback(_scope.reset, _scope.set(self))
        self._exits.enter_context(activate(self.layouts))
        return self.layouts

    @_checks.user_call
    def __exit__(self, kind: object, *_: object) -> None:
        self._exits.close()
        if kind is None:  # else a second error would hide that of the block
            self.finish()

    # Called instead of Flax's own methods, which are their first argument.

    def construct(
        self, construct: Callable[..., nnx.Module], cls: type, *args: Any, **kwargs: Any
    ) -> nnx.Module:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_paths.is_nnx_object)
        objects = {i: x for i, x in enumerate(leaves) if _paths.is_nnx_object(x)}
        if any(isinstance(x, nnx.Module) for x in objects.values()):
            # Its parts exist and cannot be traced as its own. Parts that it makes
            # itself come through here one by one; their paths now start at this module.
            is_eager = creation.eager_sharding()
            with creation.eager_sharding_off():
                module = construct(cls, *args, **kwargs)
            creation.marked(module, is_eager=is_eager)
            inside = {id(node) for _, node in nnx.iter_graph(module)}
            self._roots = [root for root in self._roots if id(root) not in inside]
            with contextlib.suppress(LayoutMapError):  # raised when the scope ends
                self._move(module)
        else:

            def build(objects: dict[int, nnx.Pytree]) -> nnx.Module:
                filled = {**dict(enumerate(leaves)), **objects}
                args, kwargs = treedef.unflatten(filled.values())
                return construct(cls, *args, **kwargs)

            module = self._created(build, objects)
        self._roots.append(module)
        return module

    def init(self, init: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        traced = creation.trace(lambda: init(*args, **kwargs))
        return creation.place(traced, self.layouts).create()

    def start_optimizer(
        self,
        init: Callable[..., None],
        optimizer: nnx.Optimizer[Any],
        model: nnx.Module,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Creates an optimizer's state for a model that is assumed to be complete."""
        self._move(model)  # slots are made like the parameters
        init(optimizer, model, *args, **kwargs)
        # nnx.ModelAndOptimizer holds the model, too.
        slots = nnx.state(optimizer, lambda path, _: path[0] != "model")
        params = nnx.state(model, optimizer.wrt)
        resolved = self.layouts.resolve(slots, params=params)
        _lay_out(optimizer, slots, resolved.layouts)
        self._slots.extend(resolved.resolutions)

    def finish(self) -> None:
        """Lays out every module by its final paths."""
        # A scope that only lays out activations is in use as well.
        if self.is_empty and not self.layouts._take_snapshot().names:
            self.layouts._report_unused(
                "nothing was made in this scope: it lays out NNX modules and the "
                "variables of Linen's init that are made inside it. For Equinox and "
                "other pytrees, write create(lambda: Model(...), layouts)."
            )
        if self._roots:
            moved = (one for root in self._roots for one in self._move(root))
            self.layouts._check_used(Resolved(None, (*moved, *self._slots)))

    def _created(
        self,
        build: Callable[[dict[int, nnx.Pytree]], nnx.Module],
        objects: dict[int, nnx.Pytree],
    ) -> nnx.Module:
        # A trace must not change objects from outside, so the builder gets copies of
        # the caller's Rngs, whose counts are written back after the module is made.
        graphdef, state = nnx.split(objects)
        inputs, state_def = jax.tree.flatten(state)

        def build_pair(*values: Any) -> tuple[nnx.Module, Any]:
            copies = nnx.merge(graphdef, state_def.unflatten(values))
            return build(copies), copies

        traced = creation.trace(build_pair, *inputs)
        description = creation.place(traced, self.layouts, self._lenient)
        module, copies = description._make(inputs)
        nnx.update(objects, nnx.state(copies))
        # A module that keeps its Rngs shares them with the caller, as without a scope.
        pairs = zip(nnx.iter_graph(copies), nnx.iter_graph(objects), strict=True)
        originals = {id(copy): original for (_, copy), (_, original) in pairs}
        for _, node in list(nnx.iter_graph(module)):
            attributes = vars(node) if _paths.is_nnx_object(node) else {}
            for name, value in list(attributes.items()):
                if id(value) in originals:
                    setattr(node, name, originals[id(value)])
        return module

    def _lenient(self, node: PyTree) -> Resolved:
        """Resolves leaves that have a rule; shards the others as finely as possible."""
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

    def _move(self, module: nnx.Module) -> tuple[Resolution, ...]:
        resolved = self.layouts.resolve(module)
        _lay_out(module, nnx.state(module), resolved.layouts)
        return resolved.resolutions


def _lay_out(node: nnx.Pytree, state: "nnx.State[Any, Any]", layouts: PyTree) -> None:
    flat = _paths.flatten(state)
    moved = [leaf.value for leaf in flat.leaves]
    for index, layout in enumerate(creation.layout_per_leaf(moved, layouts)):
        if layout is not None and isinstance(moved[index], jax.Array):
            moved[index] = _jax.put(moved[index], layout.sharding)
    with creation.eager_sharding_off():
        nnx.update(node, flat.unflatten(moved))


_scope: ContextVar[_Scope | None] = ContextVar("scope", default=None)


def _in_scope(around: Callable[..., Any]) -> Callable[[Any], Any]:
    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            scope = _scope.get()
            if scope is not None:
                scope.is_empty = False
            if scope is None or _jax.is_tracing():
                return original(*args, **kwargs)
            return around(scope, original, *args, **kwargs)

        return patched

    return replacement


# Flax has no hook for the construction of a module. If it moves one of these methods,
# arrays are made unsharded in a scope; tests/test_scope.py fails at its first test. The
# methods are replaced only while some thread is inside a scope.
_constructors = SharedPatches(
    (type(nnx.Module), "__call__", _in_scope(_Scope.construct)),
    (nn.Module, "init", _in_scope(_Scope.init)),
    (nnx.Optimizer, "__init__", _in_scope(_Scope.start_optimizer)),
)
