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
    ComputedArray,
    TracedBuild,
    check_builder,
    check_result,
    has_layout,
    is_array,
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
    """

    abstract: T
    layouts: PyTree
    resolutions: tuple[Resolution, ...]
    _traced: TracedBuild = field(repr=False, compare=False)
    _targets: list[Layout | None] = field(repr=False, compare=False)
    _mesh: Mesh = field(repr=False, compare=False)

    def create(self) -> T:
        """Makes the state, as `create` does.

        Raises:
            StateError: If this is called inside a transformed function.
        """
        return cast(T, self._make())

    def _make(self, inputs: Sequence[ArrayLike] = ()) -> PyTree:
        """Makes the state from the arguments that it was traced with, flat."""
        if _jax.is_tracing():
            msg = (
                "create makes arrays on devices, and was called inside a function that "
                "JAX transforms (jit, eval_shape, vmap, or another create's builder). "
                "Call it outside; describe(build, layouts).abstract has the shapes "
                "alone."
            )
            raise StateError(msg)
        results = iter(self._operations().run(inputs))
        leaves: list[Leaf] = []
        for leaf, layout in self._leaves():
            if isinstance(leaf, ComputedArray):
                leaves.append(next(results))
            elif is_array(leaf) and layout is not None:
                # Donating the state must not delete the caller's array.
                leaves.append(copy_to_mesh(leaf, layout))
            else:
                leaves.append(leaf)
        return self._traced.rebuild(leaves)

    def memory(self) -> CreationMemory:
        """Compiles what makes the state and reads off what each device holds."""
        computed = self._operations().memory()
        moved_bytes = sum(
            layout.bytes_per_device(leaf.shape, leaf.dtype)
            for leaf, layout in self._leaves()
            if is_array(leaf)
            and not isinstance(leaf, ComputedArray)
            and layout is not None
        )
        return CreationMemory(
            computed.state_bytes + moved_bytes, computed.peak_bytes + moved_bytes
        )

    def _leaves(self) -> Iterator[tuple[Leaf, Layout | None]]:
        return zip(self._traced.leaves, self._targets, strict=True)

    def _operations(self) -> Operations:
        targets = [
            layout
            for leaf, layout in self._leaves()
            if isinstance(leaf, ComputedArray) and layout is not None
        ]
        return Operations(self._traced.jaxpr, targets, self._mesh)


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
    """Describes a state for `where`, the public function that messages name."""
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
    """Gives every array of a traced state its layout, by the map or by `resolve`.

    Raises:
        LayoutMapError: If the rules disagree or do not fit.
    """
    resolved = (resolve or layouts.resolve)(traced.node)
    if resolve is None:
        layouts._check_used(resolved, traced.shared)
    remaining = iter(jax.tree.leaves(resolved.layouts))
    targets = [next(remaining) if has_layout(leaf) else None for leaf in traced.leaves]
    abstract = traced.rebuild(
        [
            _abstract(leaf, layout) if is_array(leaf) and layout is not None else leaf
            for leaf, layout in zip(traced.leaves, targets, strict=True)
        ]
    )
    return StateDescription(
        abstract,
        resolved.layouts,
        resolved.resolutions,
        traced,
        targets,
        layouts.mesh,
    )


def _abstract(leaf: Leaf, layout: Layout) -> jax.ShapeDtypeStruct:
    # On a device, NumPy's 64 bits are 32; what a builder computes is as it says.
    is_computed = isinstance(leaf, ComputedArray)
    dtype = leaf.dtype if is_computed else _jax.canonical_dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=layout.sharding)
