"""`create`: describe a state, lay it out, and create it shard by shard.

A builder runs once, abstractly. Arrays become results of the trace; other leaves
(Python numbers, functions) are kept. Flax's own sharding by metadata is off meanwhile,
since the layout map decides.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, cast

import jax
import numpy as np
from flax import errors as flax_errors, nnx
from jax.sharding import AxisType
from jax.typing import ArrayLike

from meshlayout import _checks, _jax, _paths
from meshlayout._annotations import Leaf, PyTree
from meshlayout.arrays.placement import host_array
from meshlayout.cluster.agreement import compare_program, program_facts
from meshlayout.errors import LayoutWarning, StateError, warn
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap, Resolution, Resolved, active_map
from meshlayout.mesh import Mesh, create_mesh, current_mesh
from meshlayout.state.operations import run_on_shards


if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # A bare `StateDescription` is one of any state. Python has it from 3.13 on.
    T = TypeVar("T", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")


# A context in which Flax does not shard parameters by their metadata: the map does.
_eager_sharding = getattr(nnx, "use_eager_sharding", contextlib.nullcontext)  # 0.11
eager_sharding_off = functools.partial(_eager_sharding, False)  # noqa: FBT003


@dataclass(frozen=True)
class TracedBuild:
    """A traced builder: its operations, and the tree that it makes."""

    jaxpr: Any  # its results are the arrays of the tree
    leaves: list[Leaf]  # of the tree, with a `ShapeDtypeStruct` for every array
    treedef: Any  # of the tree; for NNX modules, of their state
    graphdef: Any  # the structure of the modules, if there are any

    @property
    def node(self) -> PyTree:
        """The tree to lay out."""
        with eager_sharding_off():
            return self.treedef.unflatten(self.leaves)

    def rebuild(self, leaves: Sequence[Leaf]) -> PyTree:
        """Returns what the builder would have returned with these leaves."""
        with eager_sharding_off():
            tree = self.treedef.unflatten(leaves)
            return tree if self.graphdef is None else nnx.merge(self.graphdef, tree)


@dataclass(frozen=True)
class StateDescription(Generic[T]):
    """A state before it is created: all that is known without allocating a byte.

    Attributes:
        abstract: The state with a `jax.ShapeDtypeStruct`, which includes the sharding,
            for every array; for NNX modules, an abstract module.
        layouts: The state's tree with a `Layout` for every array.
        resolutions: One `Resolution` per array: its layout, and why.
    """

    abstract: T
    layouts: PyTree
    resolutions: tuple[Resolution, ...]
    _traced: TracedBuild = field(repr=False, compare=False)
    _leaves: list[Leaf] = field(repr=False, compare=False)  # of `abstract`
    _mesh: Mesh = field(repr=False, compare=False)

    def create(self) -> T:
        """Makes the state, as `create` does."""
        return cast(T, self._make())

    def _make(self, inputs: Sequence[ArrayLike] = ()) -> PyTree:
        """Makes the state; `inputs` are the flat arguments it was traced with."""
        if _jax.is_tracing():
            msg = "create was called inside a function that JAX transforms, or in a "
            msg += "builder of create. Call it outside; describe(build, layouts)."
            raise StateError(f"{msg}abstract has the shapes alone.")
        devices = self._mesh.devices.flat
        compare_program("create", devices, lambda: self._facts(inputs))
        is_array = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in self._leaves]
        targets = [*map(Layout.of, itertools.compress(self._leaves, is_array))]
        results = iter(run_on_shards(self._traced.jaxpr, inputs, targets, self._mesh))
        pairs = zip(self._leaves, is_array, strict=True)
        return self._traced.rebuild([next(results) if x else leaf for leaf, x in pairs])

    def _facts(self, inputs: Sequence[ArrayLike]) -> dict[str, str]:
        # What must be the same on all processes that make the state.
        jaxpr = self._traced.jaxpr
        # Seeds are constants of the program, in it or beside it.
        constants = [*jaxpr.consts, *_jax.inner_constants(jaxpr.jaxpr)]
        facts: dict[str, Leaf] = {f"input {i}": x for i, x in enumerate(inputs)}
        facts |= {f"constant {i}": value for i, value in enumerate(constants)}
        paths = _paths.leaf_names(self._traced.node)
        facts |= dict(zip(paths, self._leaves, strict=True))
        return program_facts(facts, str(jaxpr.jaxpr))


@_checks.user_call
def describe(
    build: Callable[[], T], layouts: LayoutMap | None = None
) -> StateDescription[T]:
    """Describes the state that `create(build, layouts)` makes, without allocating it.

    Use this for shapes and layouts, or to restore; arguments are those of `create`.
    """
    return describe_state(build, layouts, "describe")


@_checks.user_call
def create(build: Callable[[], T], layouts: LayoutMap | None = None) -> T:
    """Creates a state whose arrays are born in their layouts.

    The values are bit-identical to those of `build()` without a mesh. No device ever
    holds a sharded array whole, except where operations need whole operands for the
    same bits, as the QR of an orthogonal initializer does. To create a model together
    with its optimizer, use `TrainState.create`.

    Args:
        build: A function without arguments that returns an NNX module, Linen variables,
            an optimizer's state, or any pytree. It is traced once. Arrays that already
            exist are copied to the mesh; other leaves are returned unchanged.
        layouts: The layouts, by path. By default those of the open `scope`; else all is
            replicated, on the current mesh or on all devices as one axis `batch`.

    Raises:
        StateError: If the builder draws from an outer `nnx.Rngs`, or returns nothing.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> layouts = ml.LayoutMap(mesh, {"kernel": (None, "model")})
        >>> model = ml.create(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)), layouts)
        >>> model.kernel[...].addressable_shards[0].data.shape
        (8, 4)
    """
    description = describe_state(build, layouts, "create")
    if description.abstract is None:
        msg = "create: the builder returned None. Does it end without `return`?"
        raise StateError(msg)
    return description.create()


def describe_state(
    build: Callable[[], T], layouts: LayoutMap | None, where: str
) -> StateDescription[T]:
    """Describes a state; `where` is the public function, for messages."""
    check_builder(build, where)
    chosen = active_map() if layouts is None else layouts
    layouts = LayoutMap(current_mesh() or create_mesh()) if chosen is None else chosen
    check_map(layouts, where)
    traced = trace(build)
    olds = filter(None, map(_jax.sharding_of, traced.jaxpr.consts))
    if chosen is None and not all(sharding.is_fully_replicated for sharding in olds):
        msg = f"{where}: the builder returns sharded arrays, and without layouts every"
        msg += " device gets them whole. Give layouts; to replicate, LayoutMap(mesh)."
        warn(msg, LayoutWarning)
    return place(traced, layouts)


def check_map(layouts: object, where: str) -> None:
    """Raises StateError unless this is a layout map."""
    if not isinstance(layouts, LayoutMap):
        msg = f"{where} takes a LayoutMap, got {_checks.shown(layouts)}. Write"
        raise StateError(f"{msg} LayoutMap(mesh, rules); LayoutMap(mesh) replicates.")


def check_builder(build: object, where: str) -> None:
    """Raises StateError unless this can be called without arguments."""
    hint = "Give a function that builds the state, such as lambda: Model(...)."
    if _paths.is_nnx_object(build):
        raise StateError(f"{where}: {_checks.shown(build)} is already built. {hint}")
    _checks.function("build", build, where=where, error=StateError, hint=hint)


def place(
    traced: TracedBuild,
    layouts: LayoutMap,
    resolve: Callable[[PyTree], Resolved] | None = None,
) -> StateDescription[PyTree]:
    """Lays out every array of a traced state, by the map or by `resolve`."""
    resolved = (resolve or layouts.resolve)(traced.node)
    if resolve is None:
        layouts._check_used(resolved)
    leaves = list(traced.leaves)
    for index, layout in enumerate(layout_per_leaf(leaves, resolved.layouts)):
        if layout is not None and isinstance(leaves[index], jax.ShapeDtypeStruct):
            leaves[index] = leaves[index].update(sharding=layout.sharding)
    facts = (resolved.layouts, resolved.resolutions, traced, leaves, layouts.mesh)
    return StateDescription(traced.rebuild(leaves), *facts)


def trace(build: Callable[..., PyTree], *inputs: jax.Array) -> TracedBuild:
    """Traces a builder once; `inputs` are the arrays it takes as arguments, if any."""
    graphdef, treedef = None, None
    leaves: list[Leaf] = []
    is_eager = eager_sharding()

    # A jaxpr can only return arrays; the rest leaves the trace as a side effect.
    def flat(*values: Any) -> list[Any]:
        nonlocal graphdef, treedef
        tree = build(*values)
        if _paths.holds_modules(tree):
            graphdef, tree = nnx.split(marked(tree, is_eager=is_eager))
        built, treedef = jax.tree.flatten(tree)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in built):
            msg = "the builder returned shapes without values, as jax.eval_shape does."
            raise StateError(msg)
        arrays = []
        for leaf in built:
            if is_array(leaf) and _jax.is_array_dtype(leaf.dtype):
                # JAX would lose high bits of NumPy's integers of 64 bits.
                is_on_host = isinstance(leaf, (np.ndarray, np.generic))
                arrays.append(host_array(leaf, _RETURNED) if is_on_host else leaf)
                leaf = _ARRAY
            leaves.append(leaf)
        return arrays

    # On Explicit axes, the types of values would have shardings.
    is_explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    on_auto = _jax.no_mesh() if is_explicit else contextlib.nullcontext()
    # Without jit, its operations would not be fused, and have other bits.
    jitted = jax.disable_jit(disable=False)
    try:
        with on_auto, jitted, eager_sharding_off(), _jax.short_sharding_errors:
            # The inputs' present shardings must not become part of the trace.
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
            jaxpr = jax.make_jaxpr(flat)(*shapes)
    except flax_errors.TraceContextError as error:
        raise StateError(
            "the builder changes an NNX object that was made outside of it, such as "
            "nnx.Rngs. Make it inside: create(lambda: Model(rngs=nnx.Rngs(0)), "
            "layouts); or, inside ml.scope(layouts), give it as an argument. Of a "
            f"model that exists, return nnx.clone(model). ({error})"
        ) from error
    shapes = iter(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jaxpr.out_avals)
    leaves = [next(shapes) if leaf is _ARRAY else leaf for leaf in leaves]
    return TracedBuild(jaxpr, leaves, treedef, graphdef)


_ARRAY = object()  # stands for an array among the leaves
_RETURNED = "an array that the builder returns"


def layout_per_leaf(leaves: Sequence[Leaf], layouts: PyTree) -> list[Layout | None]:
    """Returns a layout, or None, per leaf; maps lay out arrays and Python numbers."""
    rest = iter(jax.tree.leaves(layouts))
    numbers = (bool, int, float, complex)
    has_layout = [is_array(leaf) or isinstance(leaf, numbers) for leaf in leaves]
    return [next(rest) if flag else None for flag in has_layout]


def is_array(value: object) -> bool:
    """Returns whether a leaf is an array, or the shape and dtype of one."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def eager_sharding() -> bool:
    """Returns whether Flax shards parameters by their metadata when they are made."""
    return hasattr(nnx, "using_eager_sharding") and nnx.using_eager_sharding()


def marked(tree: PyTree, *, is_eager: bool) -> PyTree:
    """Marks variables as Flax does while eager sharding is on.

    `jax.tree.map` would refuse a model made with a map together with one made without.
    """
    for _, node in nnx.iter_graph(tree) if is_eager else ():
        if isinstance(node, nnx.Variable):
            node.set_metadata("eager_sharding", is_eager)
    return tree
