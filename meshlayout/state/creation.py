"""`create`: describe a state, lay it out, make it; never larger than its shards.

A builder runs once, abstractly, whatever it returns. Leaves that it computes become
results of the trace; leaves that exist already (arrays from outside, Python numbers,
functions) are kept. Flax's own sharding by metadata is off in the meantime, since the
layout map decides.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, cast

import jax
from flax import errors as flax_errors, linen as nn, nnx
from jax.core import Tracer
from jax.typing import ArrayLike

from meshlayout import _checks, _jax, _jaxprs, _paths, _render
from meshlayout._annotations import Leaf, PyTree
from meshlayout._tracebacks import user_call
from meshlayout.arrays import copy_to_mesh
from meshlayout.cluster.agreement import new_program, program_facts
from meshlayout.errors import StateError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap, Resolution, Resolved
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
eager_sharding_off: Callable[[], contextlib.AbstractContextManager[Any]]
if hasattr(nnx, "use_eager_sharding"):
    eager_sharding_off = functools.partial(nnx.use_eager_sharding, False)  # noqa: FBT003
else:  # flax 0.11
    eager_sharding_off = contextlib.nullcontext


class ComputedArray(jax.ShapeDtypeStruct):
    """The shape and dtype of an array that the builder computes."""


@dataclass(frozen=True)
class TracedBuild:
    """A traced builder: its operations, and the tree that it makes."""

    jaxpr: Any  # its results are the leaves that the builder computes
    leaves: list[Leaf]  # of the tree; a ComputedArray for what the builder computes
    treedef: Any  # of the tree; for NNX modules, of their state
    graphdef: Any  # the structure of the modules, if there are any
    shared: dict[str, str]  # other paths of variables that modules share, by path

    @property
    def node(self) -> PyTree:
        """The tree to lay out, with a `ShapeDtypeStruct` for every computed array."""
        with eager_sharding_off():
            return self.treedef.unflatten(self.leaves)

    def rebuild(self, leaves: Sequence[Leaf]) -> PyTree:
        """Returns what the builder would have returned with these leaves."""
        with eager_sharding_off():
            tree = self.treedef.unflatten(leaves)
            return tree if self.graphdef is None else nnx.merge(self.graphdef, tree)


@dataclass(frozen=True)
class StateDescription(Generic[T]):
    """A state before it is made: everything known without allocating a byte.

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
    _placed: list[Leaf] = field(repr=False, compare=False)  # the leaves of `abstract`
    _mesh: Mesh = field(repr=False, compare=False)

    def create(self) -> T:
        """Makes the state, as `create` does."""
        return cast(T, self._make())

    def _make(self, inputs: Sequence[ArrayLike] = ()) -> PyTree:
        """Makes the state, given values for the flat arguments it was traced with."""
        if _jax.is_tracing():
            msg = (
                "create makes arrays on devices, and was called inside a function that "
                "JAX transforms (jit, eval_shape, vmap, or another create's builder). "
                "Call it outside; describe(build, layouts).abstract has the shapes "
                "alone."
            )
            raise StateError(msg)
        with new_program("create", self._mesh.devices.flat) as compare:
            compare(lambda: self._facts(inputs))
        traced = self._traced
        targets = [
            Layout.of(placed)
            for leaf, placed in zip(traced.leaves, self._placed, strict=True)
            if isinstance(leaf, ComputedArray)
        ]
        results = iter(run_on_shards(traced.jaxpr, inputs, targets, self._mesh))
        leaves: list[Leaf] = []
        for leaf, placed in zip(traced.leaves, self._placed, strict=True):
            if isinstance(leaf, ComputedArray):
                leaves.append(next(results))
            elif placed is not leaf:
                # A copy, so that donating the state does not delete the user's array.
                leaves.append(copy_to_mesh(leaf, Layout.of(placed)))
            else:
                leaves.append(leaf)
        return traced.rebuild(leaves)

    def _facts(self, inputs: Sequence[ArrayLike]) -> dict[str, str]:
        """Returns what must be the same on all processes that make the state."""
        jaxpr = self._traced.jaxpr
        # Seeds are constants of the program, in it or beside it.
        constants = [*jaxpr.consts, *_jax.inner_constants(jaxpr.jaxpr)]
        facts: dict[str, Leaf] = {f"input {i}": x for i, x in enumerate(inputs)}
        facts |= {f"constant {i}": value for i, value in enumerate(constants)}
        paths = _paths.leaf_names(self._traced.node)
        leaves = zip(self._traced.leaves, self._placed, strict=True)
        for path, (leaf, placed) in zip(paths, leaves, strict=True):
            if placed is not leaf:
                facts[path] = placed
                if not isinstance(leaf, ComputedArray):
                    facts[f"the array for {path}"] = leaf
        return program_facts(facts, str(jaxpr.jaxpr))


def describe(
    build: Callable[[], T], layouts: LayoutMap | None = None
) -> StateDescription[T]:
    """Describes the state that `create(build, layouts)` would make, without making it.

    Use this to look at shapes and layouts, or to give `Checkpointer.restore` the state
    to restore into. Arguments and errors: as for `create`.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> layouts = ml.LayoutMap(mesh, {"w": (None, "model")})
        >>> plan = ml.describe(lambda: {"w": jax.numpy.ones((64, 64))}, layouts)
        >>> plan.abstract["w"].sharding.shard_shape((64, 64))
        (64, 16)
    """
    return describe_state(build, layouts, "describe")


@user_call
def create(build: Callable[[], T], layouts: LayoutMap | None = None) -> T:
    """Makes a state whose arrays are created in their layouts.

    Use this for models, Linen variables and any other tree; `TrainState.create` makes
    a model together with its optimizer.

    Under any layouts, the values are those of calling `build()` without a mesh, to the
    bit. No device ever holds the whole of an array that its layout shards, except for
    operations that need whole operands to give the same bits, such as the QR of an
    orthogonal initializer.

    Args:
        build: A function of no arguments that makes an NNX module, Linen variables,
            an optimizer's state, or any pytree. It is traced, once. Arrays that already
            exist are copied to the mesh; other leaves are returned unchanged.
        layouts: The layouts, by path. Without, every device holds everything, on the
            default mesh or on one of all devices with the axis `batch`, as data
            parallelism has it.

    Raises:
        StateError: If the builder cannot be traced, as when it draws from an
            `nnx.Rngs` made outside of it, or returns nothing.
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
    built: Any = description.abstract
    is_leaf = jax.tree_util.all_leaves([built]) and not isinstance(built, nnx.Pytree)
    if built is None or (is_leaf and not has_layout(built)):
        _checks.has_arrays(
            "what the builder returned", built, where="create", error=StateError
        )
    return description.create()


def describe_state(
    build: Callable[[], T], layouts: LayoutMap | None, where: str
) -> StateDescription[T]:
    """Describes a state; `where` is the public function, for messages."""
    check_builder(build, where)
    if layouts is None:
        layouts = LayoutMap(current_mesh() or create_mesh())
    if not isinstance(layouts, LayoutMap):
        msg = (
            f"{where} takes a LayoutMap, got {_checks.shown(layouts)}. To replicate "
            "everything, give LayoutMap(mesh)."
        )
        raise StateError(msg)
    return place(trace(build), layouts)


def place(
    traced: TracedBuild,
    layouts: LayoutMap,
    resolve: Callable[[PyTree], Resolved] | None = None,
) -> StateDescription[PyTree]:
    """Lays out every array of a traced state, by the map or by `resolve`."""
    resolved = (resolve or layouts.resolve)(traced.node)
    if resolve is None:
        layouts._check_used(resolved, traced.shared)
    remaining = iter(jax.tree.leaves(resolved.layouts))
    leaves: list[Leaf] = []
    for leaf in traced.leaves:
        layout = next(remaining) if has_layout(leaf) else None
        if layout is not None and is_array(leaf):
            # A NumPy array of 64 bits will have 32 on the device.
            is_computed = isinstance(leaf, ComputedArray)
            dtype = leaf.dtype if is_computed else _jax.canonical_dtype(leaf.dtype)
            leaf = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=layout.sharding)
        leaves.append(leaf)
    return StateDescription(
        traced.rebuild(leaves),
        resolved.layouts,
        resolved.resolutions,
        traced,
        leaves,
        layouts.mesh,
    )


def trace(build: Callable[..., PyTree], *inputs: jax.Array) -> TracedBuild:
    """Traces a builder once; `inputs` are the arrays it takes as arguments, if any."""
    graphdef, treedef = None, None
    shared: dict[str, str] = {}
    leaves: list[Leaf] = []
    is_eager = eager_sharding()

    # A jaxpr can only return arrays. Everything else that the builder makes (structure,
    # leaves of other types) leaves the trace as a side effect.
    def flat(*values: Any) -> list[Any]:
        nonlocal graphdef, treedef, shared
        tree = build(*values)
        if _paths.holds_modules(tree):
            shared = _paths.shared_paths(tree)
            graphdef, tree = nnx.split(marked(tree, is_eager=is_eager))
        built, treedef = jax.tree.flatten(tree)
        leaves.extend(
            ComputedArray(leaf.shape, leaf.dtype) if isinstance(leaf, Tracer) else leaf
            for leaf in built
        )
        return [leaf for leaf in built if isinstance(leaf, Tracer)]

    try:
        with eager_sharding_off(), _jaxprs.short_sharding_errors:
            # The inputs' present shardings must not become part of the trace.
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
            jaxpr = _jaxprs.without_sharding_types(jax.make_jaxpr(flat)(*shapes))
    except flax_errors.TraceContextError as error:
        msg = (
            "the builder changes an NNX object that was made outside of it, such as "
            "nnx.Rngs. Make it inside: create(lambda: Model(rngs=nnx.Rngs(0)), "
            f"layouts); or, inside ml.scope(layouts), give it as an argument. ({error})"
        )
        raise StateError(msg) from error
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    ) as error:
        msg = (
            "the builder reads the value of an array it computed, as float(x), "
            "np.asarray(x) or 'if x > 0' do, and there is no value while it is traced. "
            "Compute such values with NumPy, or outside of the builder."
        )
        raise StateError(msg) from error
    traced = TracedBuild(jaxpr, leaves, treedef, graphdef, shared)
    for path, leaf in zip(_paths.leaf_names(traced.node), leaves, strict=True):
        if type(leaf) is jax.ShapeDtypeStruct:
            msg = (
                f"{path or 'the result'} "
                f"{_render.array_text(leaf.dtype, leaf.shape)}: the builder returned a "
                "shape without values, as jax.eval_shape does. Return the array itself."
            )
            raise StateError(msg)
    return traced


def check_builder(build: object, where: str) -> None:
    """Raises StateError unless this is a builder, and not a model that exists."""
    example = "create(lambda: Model(...), layouts)"
    if where.startswith("TrainState"):
        example = "TrainState.create(lambda: Model(...), optimizer, layouts)"
    if isinstance(build, (nnx.Pytree, nn.Module)):
        msg = (
            f"{where} takes a function that builds the state, got "
            f"{_checks.shown(build)} that is built already. Write {example}."
        )
        raise StateError(msg)
    hint = f"Write {example}."
    _checks.function("build", build, where=where, error=StateError, hint=hint)


def has_layout(value: object) -> bool:
    """Returns whether a map lays out a leaf, which includes Python numbers."""
    return is_array(value) or isinstance(value, (bool, int, float, complex))


def is_array(value: object) -> bool:
    """Returns whether a leaf is an array, or the shape and dtype of one."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def eager_sharding() -> bool:
    """Returns whether Flax shards parameters by their metadata when they are made."""
    return hasattr(nnx, "using_eager_sharding") and nnx.using_eager_sharding()


def marked(tree: PyTree, *, is_eager: bool) -> PyTree:
    """Marks variables as Flax does while eager sharding is on.

    The mark is part of the structure, and `jax.tree.map` would refuse a model made with
    a layout map together with one made without.
    """
    for _, node in nnx.iter_graph(tree) if is_eager else ():
        if isinstance(node, nnx.Variable):
            node.set_metadata("eager_sharding", is_eager)
    return tree
