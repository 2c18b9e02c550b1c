"""Refuses convolution kernels whose gradients XLA's partitioner multiplies.

A kernel's gradient is a sum over rows and over space. XLA (jax 0.7.2 and 0.10.2, also
for TPUs) adds up equal sums of several devices, too: for grouped convolutions along any
mesh axis that is left over, for images sharded in space along some. A grouped one is
right if that axis shards the channels, of images and kernel alike.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding

from meshlayout import _jax, _render
from meshlayout._annotations import Equation, PyTree
from meshlayout.errors import StepError


_Axes: TypeAlias = frozenset[str]
# The shape of an array, and the mesh axes that shard each dim.
_Array: TypeAlias = tuple[tuple[int, ...], list[_Axes]]


def check_kernel_gradients(jaxpr: Any, state: PyTree, batch: PyTree) -> None:
    """Raises StepError if XLA would multiply the gradient of a convolution's kernel.

    Inside another jit layouts are known, and it is raised, when that is compiled.
    """
    eqns = list(_jax.equations(jaxpr))
    gradients = list(filter(_is_kernel_gradient, eqns))
    if not gradients:
        return
    params = jax.tree.leaves(getattr(state, "params", state))  # without slots
    leaves = [*params, *jax.tree.leaves(batch)]
    shardings: list[Any] = list(map(_jax.sharding_of, leaves))
    unknown = [
        index
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tracer) and shardings[index] is None
    ]
    told: set[int] = set()

    def check() -> None:
        meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
        arrays = list(map(_array, map(np.shape, leaves), shardings))
        for eqn in gradients if meshes else ():
            step = _Step(eqns, arrays[: len(params)], arrays[len(params) :])
            step.check(eqn, meshes[0].shape)

    def tell(index: int, sharding: Any) -> None:
        shardings[index] = sharding
        told.add(index)
        if len(told) == len(unknown):
            told.clear()  # for another compilation of the same trace
            check()

    for index in unknown:
        callback = functools.partial(tell, index)
        jax.debug.inspect_array_sharding(leaves[index], callback=callback)
    if not unknown:
        check()


def _is_kernel_gradient(eqn: Equation) -> bool:
    if eqn.primitive.name != "conv_general_dilated":
        return False
    # JAX writes it with the features in the place of the batch dim.
    numbers = eqn.params["dimension_numbers"]
    return numbers.lhs_spec[0] != 0 or numbers.lhs_spec != numbers.out_spec


def _array(shape: tuple[int, ...], sharding: Any) -> _Array:
    spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
    axes = [_Axes(e if isinstance(e, tuple) else (e,)) - {None} for e in spec]
    return shape, [*axes, *[_Axes()] * (len(shape) - len(axes))]


@dataclass(frozen=True)
class _Step:
    """A traced step, and how its arrays are sharded."""

    eqns: list[Equation]
    params: list[_Array]
    batch: list[_Array]

    def check(self, eqn: Equation, sizes: Mapping[str, int]) -> None:
        """Raises StepError if this gradient of a kernel would be multiplied."""
        mesh, kernel = eqn.invars[0].aval.sharding.mesh, eqn.outvars[0].aval
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        manual = {axis for axis, kind in types.items() if kind == AxisType.Manual}
        every = _Axes(axis for axis, size in sizes.items() if size > 1) - manual
        blamed = self._blamed(eqn, every, sizes)
        if blamed:
            text = _render.array_text(kernel.dtype, kernel.shape)
            rows = tuple(axis for axis in sizes if axis in every)
            msg = (
                f"XLA would multiply the gradient of a convolution's kernel {text}: it "
                "adds up equal sums of the devices along the mesh axes "
                f"{', '.join(map(repr, sorted(blamed)))}. Two layouts are right, of "
                f"images that are whole in space: their rows over all axes, {rows}; or "
                "the channels of kernels and images over the axes without rows."
            )
            raise StepError(msg)

    def _blamed(self, eqn: Equation, every: _Axes, sizes: Mapping[str, int]) -> _Axes:
        """Returns the mesh axes along which XLA would add up equal sums."""
        images, kernel = eqn.invars[0].aval, eqn.outvars[0].aval
        rank, numbers = kernel.ndim, eqn.params["dimension_numbers"]
        (channel_dim, row_dim, *_), out_dim = numbers.lhs_spec, numbers.out_spec[1]
        shapes = {
            x.outvars[0].aval.shape for x in filter(_is_kernel_gradient, self.eqns)
        }
        kernels = [
            axes[-rank:] for shape, axes in self.params if shape[-rank:] == kernel.shape
        ]
        others = [
            dim
            for shape, axes in self.params
            for dim in axes
            if not any(shape[-len(x) :] == x for x in shapes)
        ]
        # Besides the arguments, where the compiler has no choice.
        fixed = [
            _array(x.outvars[0].aval.shape, x.params["sharding"])
            for x in self.eqns
            if x.primitive.name == "sharding_constraint"
            and x.outvars[0].aval.ndim == rank
            and x.outvars[0].aval.shape not in shapes
        ]
        if any(images.sharding.spec):  # on Explicit axes
            fixed.append(_array(images.shape, images.sharding))
        inputs = [array for array in self.batch if len(array[0]) >= rank] or self.batch
        cuts: set[tuple[_Axes, _Axes]] = set()
        has_channels = bool(kernels)
        for shape, axes in (*fixed, *inputs):
            dims, extra = dict(enumerate(axes)), max(len(shape) - rank, 0)
            rows = dims.pop(row_dim + extra, _Axes())
            rows |= dims.pop(0, _Axes()) if extra else _Axes()  # of stacked batches
            dims.pop(channel_dim + extra, None)
            cuts.add((rows & every, _Axes().union(*dims.values()) & every))
            is_pinned = (shape, axes) in fixed or shape[1 - rank :] == images.shape[
                1 - rank :
            ]
            has_channels &= not is_pinned
        space = _Axes().union(*(space for _, space in cuts))
        spare = _Axes().union(*(every - rows - space for rows, space in cuts))
        if space:
            # Right only if nothing else is sharded over these axes.
            others += [dim for dims in kernels for dim in dims]
            return (
                spare
                or space & _Axes().union(*others)
                or (space if len(cuts) > 1 else _Axes())
            )
        # The compiler may shard images in space because of a map of positions, or of
        # the rows of a matrix that multiplies flattened images.
        if any(dim & spare and not dim >= spare for dim in others):
            return spare
        groups = max(eqn.params["batch_group_count"], eqn.params["feature_group_count"])
        has_channels &= all(dims[out_dim] == spare for dims in kernels)
        has_channels &= groups % math.prod(sizes[axis] for axis in spare) == 0
        is_sharded = any(rows for rows, _ in cuts)
        return spare if groups > 1 and is_sharded and not has_channels else _Axes()
