"""`create`: describe a state, place it, make it; never bigger than its shards."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import errors as flax_errors, linen as nn, nnx
from jax.core import Tracer

from meshlayout import _jax, _paths, _render
from meshlayout.arrays import copy_to_mesh
from meshlayout.errors import StateError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutBox, LayoutMap, Resolution, Resolved
from meshlayout.mesh import Mesh
from meshlayout.state.operations import MemoryEstimate, Operations


@dataclass(frozen=True)
class Description:
    """A state before it is made: all that is known of it without a byte allocated.

    Attributes:
        abstract: The state with a `jax.ShapeDtypeStruct`, sharding included, for
            every array; for NNX modules, an abstract module.
        layouts: The state's tree with a `Layout` for every array.
        resolutions: One `Resolution` per array.
        placed: The traced builder and where its arrays go.
    """

    abstract: Any
    layouts: Any
    resolutions: tuple[Resolution, ...]
    placed: "Placed" = field(repr=False, compare=False)

    def create(self) -> Any:
        """Makes the state, as `create` does.

        Raises:
            StateError: If this is called inside a transformed function.
        """
        return self.placed.make()

    def memory(self) -> MemoryEstimate:
        """Compiles what makes the state and reads off what each device holds."""
        return self.placed.memory()


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
    """Gives every array of a traced state its layout.

    Args:
        traced: The state.
        layouts: The layout map.
        resolve: What resolves the state's layouts, if not the map.

    Raises:
        StateError: If `layouts` is no layout map.
        LayoutMapError: If the rules disagree or do not fit.
    """
    if not isinstance(layouts, LayoutMap):
        msg = (
            f"expected a LayoutMap, and got {layouts!r} of type "
            f"{type(layouts).__name__}. For replicated: LayoutMap(mesh)."
        )
        raise StateError(msg)
    resolved = (resolve or layouts.resolve)(traced.node)
    if resolve is None:
        layouts._check_used(resolved, traced.shared)
    found = iter(jax.tree.leaves(resolved.layouts))
    flat = [next(found) if has_layout(leaf.value) else None for leaf in traced.leaves]
    placed = Placed(traced, flat, layouts.mesh)
    return Description(
        placed.abstract(), resolved.layouts, resolved.resolutions, placed
    )


@dataclass(frozen=True)
class Leaf:
    """A leaf of what a builder returned.

    Attributes:
        value: The leaf; for an array that the builder makes, its
            `ShapeDtypeStruct`.
        is_traced: Whether the builder makes it.
    """

    value: Any
    is_traced: bool

    @property
    def is_array(self) -> bool:
        """Whether it is an array: one that the builder makes, or one that exists."""
        return _is_array(self.value)

    @property
    def dtype(self) -> Any:
        """The dtype that the array has on a device, where NumPy's 64 bits are 32."""
        dtype = self.value.dtype
        return dtype if self.is_traced else _jax.canonical_dtype(dtype)


@dataclass(frozen=True)
class Traced:
    """A builder, traced: its operations, and the tree that it makes.

    Attributes:
        jaxpr: The operations, closed; their results are the traced leaves.
        leaves: The leaves of the tree.
        treedef: Its structure; for NNX modules, that of their state.
        graphdef: The modules' structure, if there are modules.
        shared: The other paths of variables that modules share.
    """

    jaxpr: Any
    leaves: list[Leaf]
    treedef: Any
    graphdef: Any
    shared: dict[str, str]

    @property
    def node(self) -> Any:
        """The tree that is laid out, with a `ShapeDtypeStruct` for every array."""
        with eager_sharding_off():
            return self.treedef.unflatten([leaf.value for leaf in self.leaves])

    def rebuild(self, leaves: list[Any]) -> Any:
        """Returns what the builder would return, with these leaves."""
        with eager_sharding_off():
            tree = self.treedef.unflatten(leaves)
            if self.graphdef is not None:
                return nnx.merge(self.graphdef, tree)
        return _without_layout_boxes(tree)


@dataclass(frozen=True)
class Placed:
    """A traced builder, and where its arrays go.

    Attributes:
        traced: The builder.
        layouts: One per leaf; None where it has none.
        mesh: The mesh.
    """

    traced: Traced
    layouts: list[Layout | None]
    mesh: Mesh

    def abstract(self) -> Any:
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

    def make(self, inputs: Sequence[Any] = ()) -> Any:
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
        made = iter(self._operations().run(inputs))
        return self.traced.rebuild(
            [_made(leaf, layout, made) for leaf, layout in self._leaves()]
        )

    def memory(self) -> MemoryEstimate:
        """Compiles every operation and reads off what the devices hold."""
        made = self._operations().memory()
        moved = sum(
            layout.bytes_per_device(leaf.value.shape, leaf.value.dtype)
            for leaf, layout in self._leaves()
            if leaf.is_array and not leaf.is_traced and layout is not None
        )
        return MemoryEstimate(made.state_bytes + moved, made.peak_bytes + moved)

    def _leaves(self) -> Iterator[tuple[Leaf, Layout | None]]:
        return zip(self.traced.leaves, self.layouts, strict=True)

    def _operations(self) -> Operations:
        targets = [
            layout
            for leaf, layout in self._leaves()
            if leaf.is_traced and layout is not None
        ]
        return Operations(self.traced.jaxpr, targets, self.mesh)


def _made(leaf: Leaf, layout: Layout | None, made: Iterator[Any]) -> Any:
    if leaf.is_traced:
        return next(made)
    if leaf.is_array and layout is not None:
        # Donating the state must not delete the caller's array.
        return copy_to_mesh(leaf.value, layout)
    return leaf.value


def trace(build: Callable[..., Any], *inputs: Any) -> Traced:
    """Traces a builder once.

    Args:
        build: The builder.
        inputs: Flat arrays that it takes, if it takes any.

    Raises:
        StateError: If it cannot be traced.
    """
    check_builder(build)
    graphdef, treedef = None, None
    shared: dict[str, str] = {}
    leaves: list[Leaf] = []
    flag = eager_sharding()

    def flat(*values: Any) -> list[Any]:
        nonlocal graphdef, treedef, shared
        built = build(*values)
        if _paths.holds_modules(built):
            shared = _paths.shared_paths(built)
            graphdef, built = nnx.split(marked(built, flag))
        found, treedef = jax.tree.flatten(built)
        traced = [isinstance(leaf, Tracer) for leaf in found]
        leaves.extend(
            Leaf(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if made else leaf, made)
            for leaf, made in zip(found, traced, strict=True)
        )
        return [leaf for leaf, made in zip(found, traced, strict=True) if made]

    try:
        with eager_sharding_off():
            # Where the inputs are now is no part of the trace.
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
            jaxpr = jax.make_jaxpr(flat)(*shapes)
    except flax_errors.TraceContextError as error:
        msg = (
            "the builder changes an NNX object that was made outside of it, such as "
            "nnx.Rngs. Make it inside: create(lambda: Model(rngs=nnx.Rngs(0)), "
            f"layouts); or build inside layouts.scope(). ({error})"
        )
        raise StateError(msg) from error
    except _READS_A_VALUE as error:
        msg = (
            "the builder reads the value of an array it computed, as float(x), "
            "np.asarray(x) or 'if x > 0' do, and while it is traced there is none. "
            "Compute such values with NumPy, or outside of the builder."
        )
        raise StateError(msg) from error
    jaxpr = _jax.without_sharding_types(jaxpr)
    traced = Traced(jaxpr, leaves, treedef, graphdef, shared)
    _check_values(traced)
    return traced


_READS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def _check_values(traced: Traced) -> None:
    """Raises StateError where the builder returned a shape in place of an array."""
    at = next((i for i, leaf in enumerate(traced.leaves) if _is_hollow(leaf)), None)
    if at is None:
        return
    leaf = _paths.flatten(traced.node).leaves[at]
    msg = (
        f"{leaf.path or 'the result'} "
        f"{_render.array_text(leaf.value.dtype, leaf.value.shape)}: the builder "
        "returned a shape without values, as jax.eval_shape does. Return what makes "
        "the array."
    )
    raise StateError(msg)


def _is_hollow(leaf: Leaf) -> bool:
    return isinstance(leaf.value, jax.ShapeDtypeStruct) and not leaf.is_traced


def has_layout(value: Any) -> bool:
    """Tells whether a layout map gives a leaf a layout; a Python number gets one too.

    Args:
        value: The leaf.
    """
    return _is_array(value) or isinstance(value, (bool, int, float, complex))


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def check_builder(build: Any) -> None:
    """Raises StateError for what is no builder, such as a module that was made."""
    if not callable(build) or isinstance(build, (nnx.Pytree, nn.Module)):
        msg = (
            f"expected a function that builds the state, and got {build!r} of type "
            f"{type(build).__name__}. Write create(lambda: Model(...), layouts)."
        )
        raise StateError(msg)


def eager_sharding() -> bool:
    """Tells whether Flax places parameters by their metadata when they are made."""
    return hasattr(nnx, "using_eager_sharding") and nnx.using_eager_sharding()


def marked(tree: Any, flag: bool) -> Any:  # noqa: FBT001
    """Marks variables that were made without Flax's placing as it would have.

    Args:
        tree: What holds the modules that were made.
        flag: What `eager_sharding` told before it was turned off.
    """
    for _, node in nnx.iter_graph(tree) if flag else ():
        if isinstance(node, nnx.Variable):
            node.set_metadata("eager_sharding", flag)
    return tree


def eager_sharding_off() -> contextlib.AbstractContextManager[Any]:
    """Keeps Flax from placing parameters by their metadata: the layout map does."""
    if hasattr(nnx, "use_eager_sharding"):  # not in flax 0.11
        return nnx.use_eager_sharding(False)  # noqa: FBT003
    return contextlib.nullcontext()


def _without_layout_boxes(tree: Any) -> Any:
    """Takes our own boxes off; Flax's stay, as Linen's `init` gives them."""
    return jax.tree.map(
        lambda node: node.value if isinstance(node, LayoutBox) else node,
        tree,
        is_leaf=lambda node: isinstance(node, LayoutBox),
    )
