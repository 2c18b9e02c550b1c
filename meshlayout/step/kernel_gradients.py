"""Right gradients of convolution kernels where XLA's partitioner adds too much.

A kernel's gradient is a sum over the examples and over the image. Where devices hold
parts of that sum, XLA adds over every device that holds the same examples (for grouped
and depthwise convolutions, over all), not only over those with other parts. If a mesh
axis is left over, each part is added several times:

- images sharded in space: with batch=2, h=2, w=2 and images over `batch` and `h`, twice
  the gradient; where `w` shards the kernel, gradients of different features are added;
- grouped and depthwise convolutions: with batch=2, model=4 and images over `batch`,
  four times the gradient.

Plain `jax.jit` does it too, on jax 0.7.2 and 0.10.2, and the all-reduces of programs
for TPUs (v5e) have the same groups. The forward pass and the gradient of the input are
right. So the convolutions that compute kernel gradients get operands whose batch dim is
sharded over all the axes in question, and no other dim is: one all-to-all where images
were sharded in space, a local slice where an axis was left over, and less to compute.
Replicated operands would be right as well, but slow.

This file can go when XLA adds over the right devices; then the programs of plain JAX in
`test_kernel_gradients` that show the fault will fail.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshlayout import _jax, _jaxprs
from meshlayout._annotations import AbstractArray, PyTree
from meshlayout.errors import StepError


AnyMesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh
_Values: TypeAlias = list[Any]


@dataclass(frozen=True)
class GradientAxes:
    """The mesh axes that shard the batch dim while kernel gradients are computed.

    Attributes:
        mesh: The mesh.
        images: The axes that shard images, in the batch dim and in space; empty if
            none is sharded in space.
        every: All axes, those that shard the batch dim first: for grouped convolutions.
        batch: Those of them that shard the batch dim of images.
    """

    mesh: AnyMesh
    images: tuple[str, ...]
    every: tuple[str, ...]
    batch: tuple[str, ...]

    def of(self, eqn: JaxprEqn) -> tuple[str, ...]:
        """Returns the axes for one convolution; none if XLA computes it correctly."""
        return self.every if _is_grouped(eqn) else self.images


def gradient_axes(jaxpr: Jaxpr, state: PyTree, batch: PyTree) -> GradientAxes | None:
    """Returns the axes to compute kernel gradients with, where XLA's would be wrong.

    Args:
        jaxpr: The traced step.
        state: The state, with its shardings.
        batch: The other arguments, likewise.

    Returns:
        None if no kernel gradient is affected.

    Raises:
        StepError: If one is out of reach, in a shard_map over only some axes.
    """
    equations = list(_equations(jaxpr))
    gradients = [eqn for eqn in equations if _makes_kernel_gradient(eqn)]
    maps = [eqn for eqn in equations if eqn.primitive.name == "shard_map"]
    inside = [list(filter(_makes_kernel_gradient, _inner_equations(x))) for x in maps]
    kernels = {_shape(eqn.outvars[0]) for eqn in itertools.chain(gradients, *inside)}
    if not kernels:
        return None
    images = [*_shardings(batch), *_constraints(equations, kernels)]
    # The state's shardings matter, too: the compiler may propagate to images that of a
    # map of positions, or of the rows of a matrix that multiplies flattened images.
    others = [
        sharding
        for sharding, shape in _shardings(state)
        if not any(shape[-len(kernel) :] == kernel for kernel in kernels)
    ]
    for inner in filter(None, inside):
        images_in_it: Any = inner[0].invars[0].aval
        mesh: AnyMesh = images_in_it.sharding.mesh
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        axes = [axis for axis in _long_axes(mesh) if kinds[axis] != AxisType.Manual]
        if _affected_axes(mesh, axes, inner, images, others) is not None:
            msg = (
                "a convolution inside jax.shard_map leaves the mesh axes "
                f"{', '.join(map(repr, axes))} to the compiler, which would add up its "
                "kernel's gradient over too many devices. Name all axes of the mesh in "
                "axis_names=, or call the convolution outside of jax.shard_map."
            )
            raise StepError(msg)
    meshes = [sharding.mesh for sharding, _ in (*images, *_shardings(state))]
    if not gradients or not meshes:
        return None
    axes = _long_axes(meshes[0])
    return _affected_axes(meshes[0], axes, gradients, images, others)


def _long_axes(mesh: AnyMesh) -> list[str]:
    """Returns the axes of several devices."""
    return [axis for axis, size in mesh.shape.items() if size > 1]


def _affected_axes(
    mesh: AnyMesh,
    every: list[str],
    gradients: list[JaxprEqn],
    images: list[tuple[NamedSharding, tuple[int, ...]]],
    others: list[NamedSharding],
) -> GradientAxes | None:
    """Returns the axes to compute kernel gradients with; None if XLA's are right.

    Args:
        mesh: The mesh.
        every: Its axes of several devices that the compiler partitions over.
        gradients: The convolutions.
        images: Shardings of what may be images, with shapes.
        others: Shardings of other arrays that may shard images.
    """
    # In these convolutions the batch dim is contracted, in the place of the features.
    dims = {
        len(_shape(eqn.invars[0])): eqn.params["dimension_numbers"].lhs_spec
        for eqn in gradients
    }
    batch_axes: dict[str, None] = {}
    space_axes: dict[str, None] = {}
    is_cut = False
    for sharding, shape in images:
        rank = len(shape)
        entries = [_axes(entry) for entry in sharding.spec]
        entries += [()] * (rank - len(entries))
        _, batch_dim, *space_dims = dims.get(rank, (None, 0, *range(1, rank)))
        space = [axis for dim in space_dims for axis in entries[dim] if axis in every]
        batch_axes.update(dict.fromkeys(entries[batch_dim]) if rank else {})
        space_axes.update(dict.fromkeys(space))
        is_cut |= bool(space) and not {*entries[batch_dim], *space}.issuperset(every)
    free = [axis for axis in every if axis not in batch_axes]
    hidden = {axis for sharding in others for e in sharding.spec for axis in _axes(e)}
    hidden &= {*free}
    if hidden and len(free) > 1:
        is_cut = True
        # Images are seldom sharded this way; and if they are not, nothing moves.
        space_axes.update(dict.fromkeys(() if batch_axes else sorted(hidden)))
    ordered = tuple(dict.fromkeys((*batch_axes, *space_axes, *every)))
    ordered = tuple(axis for axis in ordered if axis in every)
    chosen = tuple(axis for axis in ordered if axis in {*batch_axes, *space_axes})
    is_grouped = len(every) > 1 and any(map(_is_grouped, gradients))
    if not is_cut and not is_grouped:
        return None
    batch = tuple(axis for axis in ordered if axis in batch_axes)
    return GradientAxes(mesh, chosen if is_cut else (), ordered, batch)


def with_right_gradients(
    function: Callable[..., PyTree], axes: GradientAxes
) -> Callable[..., PyTree]:
    """Returns a function whose kernel gradients are computed over the batch dim alone.

    Args:
        function: A function of arrays, called inside jit.
        axes: What `gradient_axes` found in it.
    """

    def mended(*args: PyTree) -> PyTree:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        results = _evaluated(closed.jaxpr, closed.consts, jax.tree.leaves(args), axes)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return mended


# Finding.


def _makes_kernel_gradient(eqn: JaxprEqn) -> bool:
    """Returns whether an equation convolves images with gradients of the output.

    JAX writes it with the features in the place of the batch dim. If a user's own
    convolution looks like it, it is only computed in another layout.
    """
    if eqn.primitive.name != "conv_general_dilated":
        return False
    numbers = eqn.params["dimension_numbers"]
    return numbers.lhs_spec[0] != 0 or numbers.lhs_spec != numbers.out_spec


def _is_grouped(eqn: JaxprEqn) -> bool:
    params = eqn.params
    return params["batch_group_count"] > 1 or params["feature_group_count"] > 1


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields all operations but those in a shard_map, which are a device's own part."""
    return _jax.equations(jaxpr, except_in="shard_map")


def _inner_equations(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    return itertools.chain.from_iterable(map(_equations, _jax.inner_jaxprs(eqn)))


def _shardings(tree: PyTree) -> Iterator[tuple[NamedSharding, tuple[int, ...]]]:
    for leaf in jax.tree.leaves(tree):
        sharding = None if isinstance(leaf, Tracer) else _jax.sharding_of(leaf)
        if isinstance(sharding, NamedSharding):
            yield sharding, leaf.shape


def _constraints(
    equations: Iterable[JaxprEqn], kernels: set[tuple[int, ...]]
) -> Iterator[tuple[NamedSharding, tuple[int, ...]]]:
    """Yields the shardings that the step constrains images to, not kernels."""
    for eqn in equations:
        if eqn.primitive.name != "sharding_constraint":
            continue
        sharding, shape = eqn.params["sharding"], _shape(eqn.outvars[0])
        is_image = len(shape) > 2 and shape not in kernels
        if is_image and isinstance(sharding, NamedSharding):
            yield sharding, shape


def _shape(var: Any) -> tuple[int, ...]:
    return var.aval.shape


def _axes(entry: object) -> tuple[str, ...]:
    if isinstance(entry, tuple):
        return entry
    return (entry,) if isinstance(entry, str) else ()


# Rewriting.


def _evaluated(
    jaxpr: Jaxpr, consts: Iterable[Any], args: Iterable[Any], axes: GradientAxes
) -> _Values:
    """Evaluates a jaxpr, with resharded operands for kernel gradients."""
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else values[var]

    for eqn in jaxpr.eqns:
        operands = [read(var) for var in eqn.invars]
        if _makes_kernel_gradient(eqn):
            numbers, names = eqn.params["dimension_numbers"], axes.of(eqn)
            images, cotangents = operands
            operands = [
                _over_batch(images, numbers.lhs_spec, axes, names),
                _over_batch(cotangents, numbers.rhs_spec, axes, names),
            ]
        elif eqn.primitive.name != "shard_map" and any(
            map(_makes_kernel_gradient, _inner_equations(eqn))
        ):
            eqn = eqn.replace(params=_mended_params(eqn, axes))
        results = _jaxprs.apply_operation(eqn, operands)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _mended_params(eqn: JaxprEqn, axes: GradientAxes) -> dict[str, Any]:
    """Returns an operation's parameters with the jaxprs among them rewritten."""

    def mended(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(mended, value))
        if isinstance(value, ClosedJaxpr):
            return _mended_jaxpr(value.jaxpr, value.consts, axes)
        if isinstance(value, Jaxpr):
            return _mended_jaxpr(value, (), axes).jaxpr
        return value

    is_tuple = {name: hasattr(value, "_fields") for name, value in eqn.params.items()}
    return {
        name: value if is_tuple[name] else mended(value)
        for name, value in eqn.params.items()
    }


def _mended_jaxpr(
    jaxpr: Jaxpr, consts: Iterable[Any], axes: GradientAxes
) -> ClosedJaxpr:
    def evaluate(*args: AbstractArray) -> _Values:
        return _evaluated(jaxpr, consts, args, axes)

    return jax.make_jaxpr(evaluate)(*[var.aval for var in jaxpr.invars])


def _over_batch(
    x: jax.Array, spec: tuple[int, ...], axes: GradientAxes, names: tuple[str, ...]
) -> jax.Array:
    """Returns an operand of a kernel gradient, sharded in no dim of the image.

    Args:
        x: Images, or the gradients of the output.
        spec: Its dims: features, batch, and those of the image.
        axes: What shards images.
        names: The axes to shard the batch dim over; without any, nothing is done.
    """
    if not names:
        return x
    features, batch, *_ = spec
    # Padding with zeros adds nothing to the sum. A dim that does not divide would not
    # be sharded.
    extra = -x.shape[batch] % math.prod(axes.mesh.shape[axis] for axis in names)
    x = jnp.pad(x, [(0, extra if dim == batch else 0) for dim in range(x.ndim)])
    is_auto = AxisType.Auto in axes.mesh.axis_types
    if is_auto and not axes.images:
        # Otherwise the compiler would shard the other uses of `x`, and all that it is
        # computed from, over every axis, too, and gather them again for each matmul
        # whose weights an axis shards. It follows chains of constraints in both
        # directions, except past a barrier.
        x = jax.lax.optimization_barrier(x)
        here: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
        here[batch] = axes.batch
        x = _jax.constrain(x, NamedSharding(axes.mesh, PartitionSpec(*here)))
    entries: list[Any] = [None] * x.ndim
    entries[batch] = names
    if is_auto:
        entries[features] = PartitionSpec.UNCONSTRAINED
    return _jax.constrain(x, NamedSharding(axes.mesh, PartitionSpec(*entries)))
