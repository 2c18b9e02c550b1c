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


class ComputedArray(jax.ShapeDtypeStruct):
    """The shape and dtype of an array that the builder computes."""


@dataclass(frozen=True)
class TracedBuild:
    """A builder, traced: its operations, and the tree that it makes.

    Attributes:
        jaxpr: The operations, closed; their results are the traced leaves.
        leaves: The leaves of the tree; a `ComputedArray` for what the builder makes.
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
    def node(self) -> PyTree:
        """The tree that is laid out, with a `ShapeDtypeStruct` for every array."""
        with eager_sharding_off():
            return self.treedef.unflatten(self.leaves)

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
    leaves: list[Leaf] = []
    is_eager = eager_sharding()

    def flat(*values: Any) -> list[Any]:
        nonlocal graphdef, treedef, shared
        tree = build(*values)
        if _paths.holds_modules(tree):
            shared = _paths.shared_paths(tree)
            graphdef, tree = nnx.split(marked(tree, is_eager=is_eager))
        built, treedef = jax.tree.flatten(tree)
        computed = [leaf for leaf in built if isinstance(leaf, Tracer)]
        leaves.extend(
            ComputedArray(leaf.shape, leaf.dtype) if isinstance(leaf, Tracer) else leaf
            for leaf in built
        )
        return computed

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
    for index, leaf in enumerate(leaves):
        if type(leaf) is jax.ShapeDtypeStruct:
            path = _paths.flatten(traced.node).leaves[index].path
            msg = (
                f"{path or 'the result'} "
                f"{_render.array_text(leaf.dtype, leaf.shape)}: the builder returned a "
                "shape without values, as jax.eval_shape does. Return what makes the "
                "array."
            )
            raise StateError(msg)
    return traced


_READS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def check_builder(build: object, where: str) -> None:
    """Raises StateError for what is not a builder, such as a module that exists."""
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
    """
    plain = (dict, list, tuple)
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: type(node) not in plain)
    for node in nodes:
        is_leaf = jax.tree_util.all_leaves([node]) and not isinstance(node, nnx.Pytree)
        if is_array(node) or (node is not None and not is_leaf):
            return
    _checks.has_arrays("what the builder returned", tree, where=where, error=StateError)


def has_layout(value: object) -> bool:
    """Returns whether a map gives a leaf a layout; Python numbers get one too."""
    return is_array(value) or isinstance(value, (bool, int, float, complex))


def is_array(value: object) -> bool:
    """Returns whether a leaf is an array, or the shape and dtype of one."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def eager_sharding() -> bool:
    """Returns whether Flax places parameters by their metadata when they are made."""
    return hasattr(nnx, "using_eager_sharding") and nnx.using_eager_sharding()


def marked(tree: PyTree, *, is_eager: bool) -> PyTree:
    """Marks variables made without Flax's placing as it would have, if it was on."""
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
