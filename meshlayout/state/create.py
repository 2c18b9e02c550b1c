"""`create`: describe a state, place it, make it; never bigger than its shards."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import errors as flax_errors, nnx

from meshlayout import _jax, _paths
from meshlayout.errors import StateError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutBox, LayoutMap, Resolution, Resolved
from meshlayout.state.operations import MemoryEstimate, Operations


@dataclass(frozen=True)
class Description:
    """A state before it is made: all that is known of it without a byte allocated.

    Attributes:
        abstract: The state with a `jax.ShapeDtypeStruct`, sharding included, for
            every array; for NNX modules, an abstract module.
        layouts: The state's tree with a `Layout` for every array.
        resolutions: One `Resolution` per array.
    """

    abstract: Any
    layouts: Any
    resolutions: tuple[Resolution, ...]
    _traced: "Traced"
    _shardings: list[Any]

    def create(self) -> Any:
        """Makes the state, as `create` does."""
        return self._traced.made(self._shardings)

    def memory(self) -> MemoryEstimate:
        """Compiles what makes the state and reads off what each device holds."""
        return self._traced.operations(self._shardings).memory()


def describe(build: Callable[[], Any], layouts: LayoutMap) -> Description:
    """Describes what `create(build, layouts)` would make, and makes nothing.

    Args:
        build: As for `create`. It is traced, once.
        layouts: As for `create`.

    Raises:
        StateError: If the builder cannot be traced.
        LayoutMapError: If the rules disagree or do not fit.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> layouts = ml.LayoutMap(mesh, {"w": (None, "model")})
        >>> plan = ml.describe(lambda: {"w": jax.numpy.ones((64, 64))}, layouts)
        >>> plan.memory().state_bytes
        4096
    """
    return place(trace(build), layouts)


def create(build: Callable[[], Any], layouts: LayoutMap) -> Any:
    """Makes a state whose arrays are born in their layouts.

    The values are those of calling `build()` without a mesh, to the bit, under any
    layouts. No device ever holds an array whole that its layout cuts; operations
    that need whole operands to give the same bits, such as the QR of an orthogonal
    initializer, are the exception.

    Args:
        build: A function of no arguments that makes an NNX module, Linen variables,
            an optimiser's state, or any pytree. It is traced, once. Arrays that
            already exist when it returns them are moved; leaves that are no arrays
            are returned as they are.
        layouts: Where every array goes.

    Raises:
        StateError: If the builder cannot be traced, as when it draws from an
            `nnx.Rngs` made outside of it.
        LayoutMapError: If the rules disagree or do not fit.

    Example:
        >>> import meshlayout as ml
        >>> from flax import nnx
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> layouts = ml.LayoutMap(mesh, {"kernel": (None, "model")})
        >>> model = ml.create(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)), layouts)
        >>> model.kernel[...].addressable_shards[0].data.shape
        (8, 4)
    """
    return describe(build, layouts).create()


def place(
    traced: "Traced",
    layouts: LayoutMap,
    resolve: Callable[[Any], Resolved] | None = None,
) -> Description:
    """Gives every array of a traced state its layout."""
    if not isinstance(layouts, LayoutMap):
        msg = (
            f"expected a LayoutMap, and got {layouts!r} of type "
            f"{type(layouts).__name__}. For replicated: LayoutMap(mesh)."
        )
        raise StateError(msg)
    resolved = (resolve or layouts.resolve)(traced.node)
    flat = jax.tree.leaves(resolved.layouts, is_leaf=lambda one: one is None)
    arrays = [one for one in flat if isinstance(one, Layout)]
    shardings = [layout.sharding for layout in arrays]
    return Description(
        traced.abstract(shardings),
        resolved.layouts,
        resolved.resolutions,
        traced,
        shardings,
    )


# What a leaf of the built tree is.
_TRACED, _CONCRETE, _OTHER = range(3)


class Traced:
    """A builder, traced: its operations, and the tree that it makes.

    Attributes:
        node: The tree with a `ShapeDtypeStruct` for every array, in the structure
            that is laid out: for NNX modules, their state.
    """

    def __init__(
        self,
        jaxpr: Any,
        shapes: list[jax.ShapeDtypeStruct],
        leaves: list[tuple[int, Any]],
        treedef: Any,
        graphdef: Any,
    ) -> None:
        self._jaxpr = jaxpr
        self._shapes = shapes
        self._leaves = leaves
        self._treedef = treedef
        self._graphdef = graphdef
        traced = iter(shapes)
        with eager_sharding_off():
            self.node = treedef.unflatten(
                [next(traced) if k == _TRACED else v for k, v in leaves]
            )

    def abstract(self, shardings: Sequence[Any]) -> Any:
        """Returns the tree with shapes, dtypes and shardings for arrays."""
        traced, at = iter(self._shapes), iter(shardings)
        leaves = []
        for kind, value in self._leaves:
            if kind == _OTHER:
                placed = _is_number(value) and next(at)
                del placed
                leaves.append(value)
                continue
            like = next(traced) if kind == _TRACED else value
            leaves.append(
                jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=next(at))
            )
        return self._rebuild(leaves)

    def operations(self, shardings: Sequence[Any]) -> Operations:
        """Returns the operations, planned for these shardings."""
        targets = [
            s
            for s, kind in zip(shardings, self._kinds(), strict=True)
            if kind == _TRACED
        ]
        mesh = _mesh_of(shardings)
        return Operations(self._jaxpr, targets, mesh)

    def made(self, shardings: Sequence[Any], inputs: Sequence[Any] = ()) -> Any:
        """Makes the tree.

        Args:
            shardings: One per array.
            inputs: The arguments that it was traced with, flat.
        """
        made = iter(self.operations(shardings).run(inputs) if shardings else ())
        at = iter(shardings)
        leaves = []
        for kind, value in self._leaves:
            if kind == _TRACED:
                next(at)
                leaves.append(next(made))
            elif kind == _CONCRETE:
                leaves.append(jax.device_put(value, next(at)))
            else:
                if _is_number(value):
                    next(at)
                leaves.append(value)
        return self._rebuild(leaves)

    def _kinds(self) -> list[int]:
        """Returns the kind of each leaf that has a layout."""
        return [k for k, v in self._leaves if k != _OTHER or _is_number(v)]

    def _rebuild(self, leaves: list[Any]) -> Any:
        with eager_sharding_off():
            tree = self._treedef.unflatten(leaves)
            if self._graphdef is not None:
                return nnx.merge(self._graphdef, tree)
        return _without_layout_boxes(tree)


def trace(build: Callable[..., Any], *inputs: Any) -> Traced:
    """Traces a builder once.

    Args:
        build: The builder.
        inputs: Flat arrays that it takes, if it takes any.

    Raises:
        StateError: If it cannot be traced.
    """
    if not callable(build):
        msg = (
            f"expected a function that builds the state, and got {build!r} of type "
            f"{type(build).__name__}. Write create(lambda: Model(...), layouts)."
        )
        raise StateError(msg)
    kept: dict[str, Any] = {}

    def flat(*values: Any) -> list[Any]:
        built = build(*values)
        graphdef = None
        if _paths.holds_modules(built):
            graphdef, built = nnx.split(built)
        leaves, treedef = jax.tree.flatten(built)
        kinds = [_kind(leaf) for leaf in leaves]
        kept.update(graphdef=graphdef, treedef=treedef)
        kept["leaves"] = [
            (kind, None if kind == _TRACED else leaf)
            for kind, leaf in zip(kinds, leaves, strict=True)
        ]
        return [
            leaf for kind, leaf in zip(kinds, leaves, strict=True) if kind == _TRACED
        ]

    try:
        with eager_sharding_off():
            jaxpr, shapes = _jax.traced(flat, *inputs)
    except flax_errors.TraceContextError as error:
        msg = (
            "the builder changes an NNX object that was made outside of it, such as "
            "nnx.Rngs. Make it inside: create(lambda: Model(rngs=nnx.Rngs(0)), "
            f"layouts); or build inside layouts.scope(). ({error})"
        )
        raise StateError(msg) from error
    return Traced(jaxpr, shapes, kept["leaves"], kept["treedef"], kept["graphdef"])


def eager_sharding_off() -> contextlib.AbstractContextManager[Any]:
    """Keeps Flax from placing parameters by their metadata: the layout map does."""
    if hasattr(nnx, "use_eager_sharding"):  # not in flax 0.11
        return nnx.use_eager_sharding(False)
    return contextlib.nullcontext()


def _kind(leaf: Any) -> int:
    if isinstance(leaf, jax.core.Tracer):
        return _TRACED
    return (
        _CONCRETE if isinstance(leaf, (jax.Array, np.ndarray, np.generic)) else _OTHER
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex))


def _mesh_of(shardings: Sequence[Any]) -> Any:
    return Layout.of(shardings[0]).mesh


def _without_layout_boxes(tree: Any) -> Any:
    """Takes our own boxes off; Flax's stay, as Linen's `init` gives them."""
    return jax.tree.map(
        lambda node: node.value if isinstance(node, LayoutBox) else node,
        tree,
        is_leaf=lambda node: isinstance(node, LayoutBox),
    )
