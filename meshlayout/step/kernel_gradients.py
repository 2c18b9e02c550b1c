"""Convolutions and pooling that XLA's partitioner would compute wrongly, in steps.

To the gradient of a kernel, XLA (jax 0.7.2 and 0.10.2, also for TPUs) adds equal sums
of several devices: in grouped convolutions along any mesh axis that is left over, for
images in space along some. Grouped ones are right if that axis shards the channels of
images and kernel alike, else refused. From images in space, wrong axes are hidden.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from meshlayout import _jax, _render
from meshlayout._annotations import Equation, PyTree
from meshlayout._paths import leaf_names
from meshlayout.errors import StepError
from meshlayout.exchange.partitioner import is_sure, may_shard
from meshlayout.metrics import Metrics


_Axes: TypeAlias = frozenset[str]
# The shape of an array, and the axes of each dim.
_Array: TypeAlias = tuple[tuple[int, ...], Sequence[_Axes]]


def axes_to_hide(windows: Sequence[Equation], jaxpr: Any, call: PyTree) -> _Axes:
    """Returns mesh axes over which XLA would compute convolutions or pooling wrongly.

    Raises StepError where it would even if these were hidden from it. Inside another
    jit layouts are known, and it is raised, while XLA compiles that. `windows` are the
    convolutions and pooling of a step, and `call` its arguments with their layouts.
    """
    (state, *rest), named = call
    batch = [x for x in rest if not isinstance(x, Metrics)], named
    params = jax.tree.leaves(getattr(state, "params", state))  # without slots
    leaves = [*params, *jax.tree.leaves(batch)]
    shardings: list[Any] = list(map(_jax.sharding_of, leaves))
    traced = [i for i, x in enumerate(leaves) if isinstance(x, Tracer)]
    unknown = [i for i in traced if shardings[i] is None]
    waiting = set(unknown)
    kernels = {x.outvars[0].aval.shape for x in filter(_is_kernel_gradient, windows)}
    names = leaf_names(getattr(state, "params", state))
    paths = {np.shape(x): name for x, name in zip(params, names, strict=False)}
    # Besides the arguments, where the compiler has no choice.
    fixed = [
        _array(x.outvars[0].aval.shape, x.params["sharding"])
        for x in _jax.equations(jaxpr)
        if x.primitive.name == "sharding_constraint"
    ]

    def find() -> _Axes:
        meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
        arrays = list(map(_array, map(np.shape, leaves), shardings))
        step = kernels, paths, fixed, arrays[: len(params)], arrays[len(params) :]
        sizes, is_late = meshes[0].shape if meshes else {}, bool(unknown)
        hidden = [_hidden(x, sizes, *step, is_late=is_late) for x in windows if sizes]
        return _Axes().union(*hidden)

    def tell(index: int, sharding: object) -> None:
        shardings[index] = sharding
        waiting.discard(index)
        if not waiting:
            waiting.update(unknown)  # for another compilation of the same trace
            find()

    for index in unknown:
        callback = functools.partial(tell, index)
        jax.debug.inspect_array_sharding(leaves[index], callback=callback)
    return _Axes() if unknown else find()


def _refusal(error: Exception) -> StepError | None:
    """Returns the StepError of a callback that XLA's own error quotes, if any."""
    quoted = re.search(r"StepError: (XLA would .*)", str(error))
    return quoted and StepError(quoted[1])


_jax.register_xla_runtime_error_handler(_refusal)


def _is_kernel_gradient(window: Equation) -> bool:
    # JAX writes it with the features in the place of the batch dim.
    lhs_spec, _, out_spec = window.params.get("dimension_numbers", [(0,)] * 3)
    return lhs_spec[0] > 0 or lhs_spec != out_spec


def _array(shape: tuple[int, ...], sharding: object) -> _Array:
    spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
    axes = [_Axes(e if isinstance(e, tuple) else (e,)) - {None} for e in spec]
    return shape, [*axes, *[_Axes()] * (len(shape) - len(axes))]


def _hidden(
    eqn: Equation,
    sizes: Mapping[str, int],
    kernels: set[tuple[int, ...]],
    paths: Mapping[tuple[int, ...], str],
    fixed: Sequence[_Array],
    params: Sequence[_Array],
    batch: Sequence[_Array],
    *,
    is_late: bool,
) -> _Axes:
    """Returns the axes to hide from XLA, or raises StepError if that is no remedy."""
    images, is_gradient = eqn.invars[0].aval, _is_kernel_gradient(eqn)
    rank, manual = images.ndim, images.sharding.mesh.manual_axes
    kernel = eqn.outvars[0].aval.shape
    every = _Axes(axis for axis, size in sizes.items() if size > 1).difference(manual)
    numbers = eqn.params.get("dimension_numbers")
    row_dim, channel_dim, *moved = numbers.lhs_spec if numbers else (0, rank)
    if is_gradient:
        row_dim, channel_dim = channel_dim, row_dim
    named = _Axes().union(*(axes for _, dims in fixed for axes in dims))
    fixed = [x for x in fixed if len(x[0]) == rank and x[0] not in kernels]
    if any(images.sharding.spec):  # on Explicit axes
        fixed.append(_array(images.shape, images.sharding))
    image_rank = min(rank, max((len(shape) for shape, _ in batch), default=0))
    arrays = [*fixed, *(x for x in batch if len(x[0]) >= image_rank)]
    cuts: set[tuple[_Axes, _Axes]] = set()  # of rows, and of space
    shards: dict[int, int] = {}
    for shape, array_axes in arrays:
        extra = max(len(shape) - rank, 0)
        dims = {dim - extra: axes & every for dim, axes in enumerate(array_axes)}
        rows = dims.pop(row_dim, _Axes())
        rows |= dims.pop(-extra, _Axes()) if extra else rows  # of stacked batches
        dims.pop(channel_dim, None)
        cuts.add((rows, _Axes().union(*dims.values())))
        for dim, axes in dims.items():
            count = math.prod(sizes[axis] for axis in axes)
            shards |= {dim: max(count, shards.get(dim, 1))} if count > 1 else {}
    space = _Axes().union(*(space for _, space in cuts))
    spare = _Axes().union(*(every - rows - space for rows, space in cuts))
    used = _Axes().union(*(axes for _, dims in params for axes in dims))
    wrong, is_stuck, cause = _Axes(), _Axes(), ""
    if space:
        # Right if nothing else is sharded over these axes, and no channels over others.
        wrong = (space | spare) & used
        is_moved = bool(numbers) and not {*shards} <= {*moved}  # by a transposition
        if is_gradient:
            is_stuck = every.difference(used, *(a for _, dims in batch for a in dims))
            wrong |= spare | (space if len(cuts) > 1 else wrong)
        elif is_moved or not is_sure(eqn, shards):
            wrong = space
    elif is_gradient:
        is_stuck = spare
        for shape, dims in params:
            is_kernel = any(shape[-len(k) :] == k for k in kernels)
            for dim, axes in enumerate(() if is_kernel else dims):
                count = math.prod(sizes[axis] for axis in axes & spare)
                is_part = axes & spare != spare
                if may_shard(shape, dim, eqn, count, is_part=is_part):
                    wrong, name = spare, paths.get(shape, "a parameter")
                    cause = f"dim {dim} of {name!r} may shard images in space"
        groups = max(eqn.params["batch_group_count"], eqn.params["feature_group_count"])
        if groups > 1 and any(rows for rows, _ in cuts):
            # Right if channels are over the spare axes, whole groups of them, and free.
            end, out_dim = images.shape[1 - rank :], numbers.out_spec[1] - rank
            outs = {dims[out_dim] for shape, dims in params if shape[-rank:] == kernel}
            like = [dims for shape, dims in arrays if shape[1 - rank :] == end]
            is_free = not fixed and all(d[channel_dim - rank] == spare for d in like)
            size = math.prod(sizes[axis] for axis in spare)
            is_right = outs == {spare} and is_free and groups % size == 0
            wrong |= wrong if is_right else spare
    others = every.difference(every.intersection(*(rows for rows, _ in cuts)))
    if wrong and (is_stuck or is_late or fixed or manual or others & named):
        array = _render.array_text(eqn.outvars[0].aval.dtype, kernel)
        what = f"multiply the gradient of a convolution's kernel {array}"
        what = what if is_gradient else f"wrongly compute {eqn.primitive.name} {array}"
        what += f" along the mesh axes {', '.join(map(repr, sorted(wrong)))}"
        if cause:
            raise StepError(f"XLA would {what}, as {cause}: shard another dim of it.")
        rows, rule = tuple(axis for axis, size in sizes.items() if size > 1), ""
        free = tuple(axis for axis in rows if axis in others)
        if is_gradient and free:
            dims = [free if dim == numbers.out_spec[1] else None for dim in range(rank)]
            path = paths.get(kernel, "its path")
            rule = f", as by the rule {{{path!r}: {tuple(dims)}}} or ml.parallel."
            rule += "tensor_parallel(...)"
        raise StepError(
            f"XLA would {what}. Two layouts are right, of images that are whole in "
            f"space: their rows over all axes, {rows}; or the channels of kernels and "
            f"images over the axes without rows{rule}."
        )
    return others if wrong else wrong
