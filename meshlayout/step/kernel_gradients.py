"""Refuses convolution kernels whose gradients XLA's partitioner multiplies.

A kernel's gradient is a sum over rows and over space. XLA (jax 0.7.2 and 0.10.2, also
for TPUs) adds up equal sums of several devices, too: for grouped convolutions along any
mesh axis that is left over, for images sharded in space along some. A grouped one is
right if that axis shards the channels, of images and kernel alike.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from meshlayout import _jax, _render
from meshlayout._annotations import Equation, PyTree
from meshlayout.errors import StepError
from meshlayout.exchange.halos import ShardedShape, wrong_halo


_Axes: TypeAlias = frozenset[str]


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
    traced = [i for i, x in enumerate(leaves) if isinstance(x, Tracer)]
    unknown = [i for i in traced if shardings[i] is None]
    waiting = set(unknown)

    def check() -> None:
        meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
        arrays = list(map(_array, map(np.shape, leaves), shardings))
        step = eqns, arrays[: len(params)], arrays[len(params) :]
        for eqn in gradients if meshes else ():
            if blamed := _blamed(eqn, *step, meshes[0].shape):
                raise StepError(_refusal(eqn, blamed, meshes[0].shape))
        others = [eqn for eqn in eqns if not _is_kernel_gradient(eqn)]
        if meshes and (message := wrong_halo(others, step[2], meshes[0].shape)):
            raise StepError(message)

    def tell(index: int, sharding: object) -> None:
        shardings[index] = sharding
        waiting.discard(index)
        if not waiting:
            waiting.update(unknown)  # for another compilation of the same trace
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


def _array(shape: tuple[int, ...], sharding: object) -> ShardedShape:
    spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
    axes = [_Axes(e if isinstance(e, tuple) else (e,)) - {None} for e in spec]
    return ShardedShape(shape, [*axes, *[_Axes()] * (len(shape) - len(axes))])


def _refusal(eqn: Equation, blamed: _Axes, sizes: Mapping[str, int]) -> str:
    kernel = _render.array_text(eqn.outvars[0].aval.dtype, eqn.outvars[0].aval.shape)
    rows = tuple(axis for axis, size in sizes.items() if size > 1)
    return (
        f"XLA would multiply the gradient of a convolution's kernel {kernel}: it adds "
        "up equal sums of the devices along the mesh axes "
        f"{', '.join(map(repr, sorted(blamed)))}. Two layouts are right, of images "
        f"that are whole in space: their rows over all axes, {rows}; or the channels "
        "of kernels and images over the axes without rows."
    )


def _blamed(
    eqn: Equation,
    eqns: Sequence[Equation],
    params: Sequence[ShardedShape],
    batch: Sequence[ShardedShape],
    sizes: Mapping[str, int],
) -> _Axes:
    """Returns the mesh axes along which XLA would add up equal sums."""
    images, kernel = eqn.invars[0].aval, eqn.outvars[0].aval
    manual = images.sharding.mesh.manual_axes
    every = _Axes(axis for axis, size in sizes.items() if size > 1).difference(manual)
    rank, numbers = kernel.ndim, eqn.params["dimension_numbers"]
    (channel_dim, row_dim, *_), out_dim = numbers.lhs_spec, numbers.out_spec[1]
    kernels = {x.outvars[0].aval.shape for x in filter(_is_kernel_gradient, eqns)}
    # Besides the arguments, where the compiler has no choice.
    fixed = [
        _array(x.outvars[0].aval.shape, x.params["sharding"])
        for x in eqns
        if x.primitive.name == "sharding_constraint"
        and x.outvars[0].aval.ndim == rank
        and x.outvars[0].aval.shape not in kernels
    ]
    if any(images.sharding.spec):  # on Explicit axes
        fixed.append(_array(images.shape, images.sharding))
    pinned = list(fixed)  # channels
    cuts: set[tuple[_Axes, _Axes]] = set()  # of rows, and of space
    for array in (*fixed, *([x for x in batch if len(x.shape) >= rank] or batch)):
        dims, extra = dict(enumerate(array.axes)), max(len(array.shape) - rank, 0)
        rows = dims.pop(row_dim + extra, _Axes())
        rows |= dims.pop(0, _Axes()) if extra else _Axes()  # of stacked batches
        dims.pop(channel_dim + extra, None)
        cuts.add((rows & every, _Axes().union(*dims.values()) & every))
        if array.shape[1 - rank :] == images.shape[1 - rank :]:
            pinned.append(array)
    space = _Axes().union(*(space for _, space in cuts))
    spare = _Axes().union(*(every - rows - space for rows, space in cuts))
    if space:
        # Right only if nothing else is sharded over these axes.
        shared = space & _Axes().union(*(axes for x in params for axes in x.axes))
        return spare or shared or (space if len(cuts) > 1 else _Axes())
    others = [x for x in params if not any(x.shape[-len(k) :] == k for k in kernels)]
    for shape, dims in others:
        for dim, axes in enumerate(dims):
            if _Axes() < axes & spare < spare and _may_be_of_images(shape, dim, eqn):
                return spare
    groups = max(eqn.params["batch_group_count"], eqn.params["feature_group_count"])
    if groups == 1 or not any(rows for rows, _ in cuts):
        return _Axes()
    outs = [x.axes[out_dim - rank] for x in params if x.shape[-rank:] == kernel.shape]
    has_channels = bool(outs) and not pinned and all(axes == spare for axes in outs)
    is_whole = groups % math.prod(sizes[axis] for axis in spare) == 0
    return _Axes() if has_channels and is_whole else spare


def _may_be_of_images(shape: tuple[int, ...], dim: int, eqn: Equation) -> bool:
    """Returns whether the compiler may shard images in space like a parameter's dim.

    It does so for a map of positions, and for the rows of a matrix that multiplies
    flattened images, which may be pooled before, or the columns of one that makes them.
    """
    numbers, size = eqn.params["dimension_numbers"], shape[dim]
    for var, spec in zip(eqn.invars, (numbers.lhs_spec, numbers.rhs_spec), strict=True):
        features, *space = (var.aval.shape[d] for d in (spec[0], *spec[2:]))
        area = math.prod(space)
        is_map = len(shape) > len(space) and dim - len(shape) < -1 and size in space
        is_flat = size == area * features
        if spec is numbers.rhs_spec:  # what the convolution returns
            is_flat |= size > 8 * features and area * features % size == 0
        if is_map or is_flat or size == area:
            return True
    return False
