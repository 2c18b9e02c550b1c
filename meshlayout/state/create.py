"""`create`: describe a state, place it, make it; never bigger than its shards."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, cast

import jax
from jax.typing import ArrayLike

from meshlayout import _jax
from meshlayout._annotations import Leaf, PyTree
from meshlayout._checks import shown
from meshlayout.arrays import copy_to_mesh
from meshlayout.errors import StateError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap, Resolution, Resolved
from meshlayout.mesh import Mesh
from meshlayout.state.build import (
    BuiltLeaf,
    TracedBuild,
    check_builder,
    check_result,
    has_layout,
    trace,
)
from meshlayout.state.operations import CreationMemory, Operations


if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # A default, so that a description without its state's type is one of any state.
    T = TypeVar("T", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")


@dataclass(frozen=True)
class StateDescription(Generic[T]):
    """A state before it is made: all that is known of it without a byte allocated.

    Attributes:
        abstract: The state with a `jax.ShapeDtypeStruct`, sharding included, for
            every array; for NNX modules, an abstract module.
        layouts: The state's tree with a `Layout` for every array.
        resolutions: One `Resolution` per array.
        placed: The traced builder and where its arrays go.
    """

    abstract: T
    layouts: PyTree
    resolutions: tuple[Resolution, ...]
    placed: "PlacedBuild" = field(repr=False, compare=False)

    def create(self) -> T:
        """Makes the state, as `create` does.

        Raises:
            StateError: If this is called inside a transformed function.
        """
        return cast(T, self.placed.make())

    def memory(self) -> CreationMemory:
        """Compiles what makes the state and reads off what each device holds."""
        return self.placed.memory()


def describe(build: Callable[[], T], layouts: LayoutMap) -> StateDescription[T]:
    """Describes what `create(build, layouts)` would make, and makes nothing.

    Use this to look at shapes, layouts and memory before paying for them, or to give
    `Checkpointer.restore` the state to restore into.

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
    return describe_state(build, layouts, "describe")


def create(build: Callable[[], T], layouts: LayoutMap) -> T:
    """Makes a state whose arrays are created in their layouts.

    The values are those of calling `build()` without a mesh, to the bit, under any
    layouts. No device ever holds an array whole that its layout shards; operations
    that need whole operands to give the same bits, such as the QR of an orthogonal
    initializer, are the exception.

    Use this for models, Linen variables and any other tree; `TrainState.create` makes
    a model together with its optimizer.

    Args:
        build: A function of no arguments that makes an NNX module, Linen variables,
            an optimizer's state, or any pytree. It is traced, once. Arrays that
            already exist when it returns them are moved; leaves that are not arrays
            are returned as they are.
        layouts: Where every array goes.

    Raises:
        StateError: If the builder cannot be traced, as when it draws from an
            `nnx.Rngs` made outside of it, or returns no arrays.
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
    description = describe_state(build, layouts, "create")
    check_result(description.abstract, "create")
    return description.create()


def describe_state(
    build: Callable[[], T], layouts: LayoutMap, where: str
) -> StateDescription[T]:
    """Describes a state for a public function; see `describe`.

    Args:
        build: As for `create`.
        layouts: As for `create`.
        where: The public function, for messages.

    Raises:
        StateError: If an argument is wrong, or the builder cannot be traced.
        LayoutMapError: If the rules disagree or do not fit.
    """
    check_builder(build, where)
    if not isinstance(layouts, LayoutMap):
        msg = (
            f"{where} takes a LayoutMap, got {shown(layouts)}. To replicate "
            "everything, give LayoutMap(mesh)."
        )
        raise StateError(msg)
    return place(trace(build), layouts)


def place(
    traced: TracedBuild,
    layouts: LayoutMap,
    resolve: Callable[[PyTree], Resolved] | None = None,
) -> StateDescription[PyTree]:
    """Gives every array of a traced state its layout.

    Args:
        traced: The state.
        layouts: The layout map.
        resolve: What resolves the state's layouts, if not the map.

    Raises:
        LayoutMapError: If the rules disagree or do not fit.
    """
    resolved = (resolve or layouts.resolve)(traced.node)
    if resolve is None:
        layouts._check_used(resolved, traced.shared)
    remaining = iter(jax.tree.leaves(resolved.layouts))
    flat = [
        next(remaining) if has_layout(leaf.value) else None for leaf in traced.leaves
    ]
    placed = PlacedBuild(traced, flat, layouts.mesh)
    return StateDescription(
        placed.abstract(), resolved.layouts, resolved.resolutions, placed
    )


@dataclass(frozen=True)
class PlacedBuild:
    """A traced builder, and where its arrays go.

    Attributes:
        traced: The builder.
        layouts: One per leaf; None where it has none.
        mesh: The mesh.
    """

    traced: TracedBuild
    layouts: list[Layout | None]
    mesh: Mesh

    def abstract(self) -> PyTree:
        """Returns the tree with shapes, dtypes and shardings for arrays."""
        return self.traced.rebuild(
            [
                jax.ShapeDtypeStruct(
                    leaf.value.shape, leaf.dtype, sharding=layout.sharding
                )
                if leaf.is_array and layout is not None
                else leaf.value
                for leaf, layout in self._leaves()
            ]
        )

    def make(self, inputs: Sequence[ArrayLike] = ()) -> PyTree:
        """Makes the tree.

        Args:
            inputs: The arguments that it was traced with, flat.

        Raises:
            StateError: If this is called inside a transformed function.
        """
        if _jax.is_tracing():
            msg = (
                "create makes arrays on devices, and was called inside a function that "
                "JAX transforms (jit, eval_shape, vmap, or another create's builder). "
                "Call it outside; describe(build, layouts).abstract has the shapes "
                "alone."
            )
            raise StateError(msg)
        results = iter(self._operations().run(inputs))
        return self.traced.rebuild(
            [_leaf(leaf, layout, results) for leaf, layout in self._leaves()]
        )

    def memory(self) -> CreationMemory:
        """Compiles every operation and reads off what the devices hold."""
        computed = self._operations().memory()
        moved_bytes = sum(
            layout.bytes_per_device(leaf.value.shape, leaf.value.dtype)
            for leaf, layout in self._leaves()
            if leaf.is_array and not leaf.is_traced and layout is not None
        )
        return CreationMemory(
            computed.state_bytes + moved_bytes, computed.peak_bytes + moved_bytes
        )

    def _leaves(self) -> Iterator[tuple[BuiltLeaf, Layout | None]]:
        return zip(self.traced.leaves, self.layouts, strict=True)

    def _operations(self) -> Operations:
        targets = [
            layout
            for leaf, layout in self._leaves()
            if leaf.is_traced and layout is not None
        ]
        return Operations(self.traced.jaxpr, targets, self.mesh)


def _leaf(leaf: BuiltLeaf, layout: Layout | None, results: Iterator[jax.Array]) -> Leaf:
    """Returns the next computed array, or the leaf that exists, in its layout."""
    if leaf.is_traced:
        return next(results)
    if leaf.is_array and layout is not None:
        # Donating the state must not delete the caller's array.
        return copy_to_mesh(leaf.value, layout)
    return leaf.value
