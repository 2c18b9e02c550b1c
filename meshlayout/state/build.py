"""A builder, traced: the operations that make a state, and the tree they make.

A builder runs once, abstractly, whatever it returns: NNX modules, Linen variables,
Optax states or any pytree. Leaves that it computes become results of the trace; leaves
that exist already (arrays from outside, Python numbers, functions) are kept. Flax's
own placing by metadata is off while this happens, because the layout map places.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import errors as flax_errors, linen as nn, nnx
from jax.core import Tracer

from meshlayout import _checks, _jax, _paths, _render
from meshlayout._annotations import Leaf, PyTree
from meshlayout.errors import StateError
from meshlayout.layout_map import LayoutBox


@dataclass(frozen=True)
class BuiltLeaf:
    """A leaf of what a builder returned.

    Attributes:
        value: The leaf; for an array that the builder makes, its
            `ShapeDtypeStruct`.
        is_traced: Whether the builder makes it.
    """

    value: Leaf
    is_traced: bool

    @property
    def is_array(self) -> bool:
        """Whether it is an array: one that the builder makes, or one that exists."""
        return is_array(self.value)

    @property
    def dtype(self) -> Any:
        """The dtype that the array has on a device, where NumPy's 64 bits are 32."""
        dtype = self.value.dtype
        return dtype if self.is_traced else _jax.canonical_dtype(dtype)


@dataclass(frozen=True)
class TracedBuild:
    """A builder, traced: its operations, and the tree that it makes.

    Attributes:
        jaxpr: The operations, closed; their results are the traced leaves.
        leaves: The leaves of the tree.
        treedef: Its structure; for NNX modules, that of their state.
        graphdef: The modules' structure, if there are modules.
        shared: The other paths of variables that modules share.
    """

    jaxpr: Any
    leaves: list[BuiltLeaf]
    treedef: Any
    graphdef: Any
    shared: dict[str, str]

    @property
    def node(self) -> PyTree:
        """The tree that is laid out, with a `ShapeDtypeStruct` for every array."""
        with eager_sharding_off():
            return self.treedef.unflatten([leaf.value for leaf in self.leaves])

    def rebuild(self, leaves: Sequence[Leaf]) -> PyTree:
        """Returns what the builder would return, with these leaves."""
        with eager_sharding_off():
            tree = self.treedef.unflatten(leaves)
            if self.graphdef is not None:
                return nnx.merge(self.graphdef, tree)
        return _without_layout_boxes(tree)


def trace(build: Callable[..., PyTree], *inputs: jax.Array) -> TracedBuild:
    """Traces a builder once.

    Args:
        build: The builder.
        inputs: Flat arrays that it takes, if it takes any.

    Raises:
        StateError: If it cannot be traced.
    """
    graphdef, treedef = None, None
    shared: dict[str, str] = {}
    leaves: list[BuiltLeaf] = []
    is_eager = eager_sharding()

    def flat(*values: Any) -> list[Any]:
        nonlocal graphdef, treedef, shared
        tree = build(*values)
        if _paths.holds_modules(tree):
            shared = _paths.shared_paths(tree)
            graphdef, tree = nnx.split(marked(tree, is_eager=is_eager))
        built, treedef = jax.tree.flatten(tree)
        for leaf in built:
            is_traced = isinstance(leaf, Tracer)
            shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_traced else leaf
            leaves.append(BuiltLeaf(shape, is_traced))
        return [leaf for leaf in built if isinstance(leaf, Tracer)]

    try:
        with eager_sharding_off(), _jax.short_sharding_errors:
            # Where the inputs are now is not part of the trace.
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
    traced = TracedBuild(jaxpr, leaves, treedef, graphdef, shared)
    _check_values(traced)
    return traced


_READS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def _check_values(traced: TracedBuild) -> None:
    """Raises StateError where the builder returned a shape in place of an array."""
    for index, leaf in enumerate(traced.leaves):
        if isinstance(leaf.value, jax.ShapeDtypeStruct) and not leaf.is_traced:
            path = _paths.flatten(traced.node).leaves[index].path
            msg = (
                f"{path or 'the result'} "
                f"{_render.array_text(leaf.value.dtype, leaf.value.shape)}: the "
                "builder returned a shape without values, as jax.eval_shape does. "
                "Return what makes the array."
            )
            raise StateError(msg)


def check_builder(build: object, where: str) -> None:
    """Raises StateError for what is not a builder, such as a module that exists.

    Args:
        build: What the user gave.
        where: The public function.
    """
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


def check_result(tree: PyTree, where: str) -> None:
    """Raises StateError for a result without arrays, as of a forgotten `return`.

    Modules and states without arrays (of `optax.sgd`, say) are fine.

    Args:
        tree: What the builder returned.
        where: The public function.
    """
    plain = (dict, list, tuple)
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: type(node) not in plain)
    for node in nodes:
        is_leaf = jax.tree_util.all_leaves([node]) and not isinstance(node, nnx.Pytree)
        if is_array(node) or (node is not None and not is_leaf):
            return
    _checks.has_arrays("what the builder returned", tree, where=where, error=StateError)


def has_layout(value: object) -> bool:
    """Returns whether a layout map gives a leaf a layout; Python numbers get one too.

    Args:
        value: The leaf.
    """
    return is_array(value) or isinstance(value, (bool, int, float, complex))


def is_array(value: object) -> bool:
    """Returns whether a leaf is an array, or the shape and dtype of one."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def eager_sharding() -> bool:
    """Returns whether Flax places parameters by their metadata when they are made."""
    return hasattr(nnx, "using_eager_sharding") and nnx.using_eager_sharding()


def marked(tree: PyTree, *, is_eager: bool) -> PyTree:
    """Marks variables that were made without Flax's placing as it would have.

    Args:
        tree: What holds the modules that were made.
        is_eager: What `eager_sharding` returned before it was turned off.
    """
    for _, node in nnx.iter_graph(tree) if is_eager else ():
        if isinstance(node, nnx.Variable):
            node.set_metadata("eager_sharding", is_eager)
    return tree


def eager_sharding_off() -> contextlib.AbstractContextManager[Any]:
    """Keeps Flax from placing parameters by their metadata: the layout map does."""
    if hasattr(nnx, "use_eager_sharding"):  # not in flax 0.11
        return nnx.use_eager_sharding(False)  # noqa: FBT003
    return contextlib.nullcontext()


def _without_layout_boxes(tree: PyTree) -> PyTree:
    """Takes our own boxes off; Flax's stay, as Linen's `init` gives them."""
    return jax.tree.map(
        lambda node: node.value if isinstance(node, LayoutBox) else node,
        tree,
        is_leaf=lambda node: isinstance(node, LayoutBox),
    )
