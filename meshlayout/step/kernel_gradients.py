"""Convolutions and pooling that XLA's partitioner would compute wrongly, in steps.

To the gradient of a kernel, XLA (jax 0.7.2 and 0.10.2, also for TPUs) adds equal sums
of several devices: in grouped convolutions along any mesh axis that is left over, for
images in space along some. Grouped ones are right if that axis shards the channels of
images and kernel alike, else refused. From images in space, wrong axes are hidden.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

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


class _Step(NamedTuple):
    """A step's arrays, which XLA may not shard in another way, and the mesh axes."""

    params: list[_Array]
    batch: list[_Array]
    fixed: list[_Array]  # by constraints
    kernels: set[tuple[int, ...]]  # the shapes of those that have a gradient
    paths: Sequence[str]  # of the parameters
    flat: set[int]  # the sizes of dims that reshapes join or divide
    sizes: Mapping[str, int]  # of the axes
    is_late: bool  # XLA compiles already


def axes_to_hide(windows: Sequence[Equation], jaxpr: Any, call: PyTree) -> _Axes:
    """Returns mesh axes over which XLA would compute convolutions or pooling wrongly.

    Raises StepError where it would even if these were hidden from it. Inside another
    jit layouts are known, and it is raised, while XLA compiles that. `windows` are the
    convolutions and pooling of a step, and `call` its arguments with their layouts.
    """
    (state, *rest), named = call
    params = getattr(state, "params", state)  # without slots
    batch = [x for x in rest if not isinstance(x, Metrics)], named
    leaves, names = jax.tree.leaves((params, batch)), leaf_names(params)
    shapes, num_params = list(map(np.shape, leaves)), len(names)
    shardings: list[Any] = list(map(_jax.sharding_of, leaves))
    traced = [i for i, x in enumerate(leaves) if isinstance(x, Tracer)]
    unknown = {i for i in traced if shardings[i] is None}
    waiting = {*unknown}
    fixed = [
        _array(x.outvars[0].aval.shape, x.params["sharding"])
        for x in _jax.equations(jaxpr)
        if x.primitive.name == "sharding_constraint"
    ]
    kernels = {x.outvars[0].aval.shape for x in filter(_is_kernel_gradient, windows)}
    flat = {n for x in _jax.equations(jaxpr) for n in _reshaped(x)}

    def find() -> _Axes:
        meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding))
        sizes = {axis: size for mesh in meshes for axis, size in mesh.shape.items()}
        arrays = list(map(_array, shapes, shardings))
        parts = arrays[:num_params], arrays[num_params:]
        step = _Step(*parts, fixed, kernels, names, flat, sizes, bool(unknown))
        return _Axes().union(*(_hidden(window, step) for window in windows))

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


def _reshaped(eqn: Equation) -> Counter[int]:
    """Returns the dims that a reshape changes, before and after."""
    if eqn.primitive.name != "reshape":
        return Counter()
    before, after = (Counter(x[0].aval.shape) for x in (eqn.invars, eqn.outvars))
    return (before - after) + (after - before)


def _array(shape: tuple[int, ...], sharding: object) -> _Array:
    spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
    axes = [_Axes(e if isinstance(e, tuple) else (e,)) - {None} for e in spec]
    return shape, [*axes, *[_Axes()] * (len(shape) - len(axes))]


def _hidden(eqn: Equation, step: _Step) -> _Axes:
    """Returns the axes to hide from XLA, or raises StepError if that is no remedy."""
    images, is_gradient = eqn.invars[0].aval, _is_kernel_gradient(eqn)
    rank, manual = images.ndim, images.sharding.mesh.manual_axes
    every = _Axes(x for x, size in step.sizes.items() if size > 1).difference(manual)
    numbers = eqn.params.get("dimension_numbers")
    row_dim, channel_dim, *moved = numbers.lhs_spec if numbers else (0, rank)
    if is_gradient:
        row_dim, channel_dim = channel_dim, row_dim
    fixed = [x for x in step.fixed if len(x[0]) == rank and x[0] not in step.kernels]
    if any(images.sharding.spec):  # on Explicit axes
        fixed.append(_array(images.shape, images.sharding))
    image_rank = min(rank, max((len(shape) for shape, _ in step.batch), default=0))
    arrays = [*fixed, *(x for x in step.batch if len(x[0]) >= image_rank)]
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
            count = math.prod(step.sizes[x] for x in axes)
            shards |= {dim: max(count, shards.get(dim, 1))} if count > 1 else {}
    space = _Axes().union(*(space for _, space in cuts))
    spare = _Axes().union(*(every - rows - space for rows, space in cuts))
    free = every.difference(every.intersection(*(rows for rows, _ in cuts)))
    used = _Axes().union(*(axes for _, dims in step.params for axes in dims))
    wrong, is_stuck, cause = _Axes(), _Axes(), ""
    if space:
        # Right if nothing else is sharded over these axes, and no channels over others.
        wrong = (space | spare) & used
        is_moved = bool(numbers) and not {*shards} <= {*moved}  # by a transposition
        if is_gradient:
            is_stuck = every.difference(used, *(x for _, a in step.batch for x in a))
            wrong |= spare | (space if len(cuts) > 1 else wrong)
        elif is_moved or not is_sure(eqn, shards):
            wrong = space
    elif is_gradient:
        is_stuck, cause = spare, _dim_over_space(eqn, spare, step)
        groups = max(eqn.params["batch_group_count"], eqn.params["feature_group_count"])
        is_grouped = groups > 1 and any(rows for rows, _ in cuts)
        num_shards = math.prod(step.sizes[x] for x in spare)
        if is_grouped and not fixed and not groups % num_shards:
            # Right if channels are over the spare axes, in whole groups, and free.
            kernel, end = eqn.outvars[0].aval.shape, images.shape[1 - rank :]
            dim = numbers.out_spec[1] - rank
            outs = {dims[dim] for shape, dims in step.params if shape[-rank:] == kernel}
            like = (dims for shape, dims in arrays if shape[1 - rank :] == end)
            channels = {dims[channel_dim - rank] for dims in like}
            is_grouped = outs != {spare} or not channels <= {spare}
        wrong = spare if cause or is_grouped else wrong
    named = _Axes().union(*(axes for _, dims in step.fixed for axes in dims))
    if wrong and (is_stuck or step.is_late or fixed or manual or free & named):
        raise StepError(_text(eqn, step, wrong, free, cause))
    return free if wrong else wrong


def _dim_over_space(eqn: Equation, spare: _Axes, step: _Step) -> str:
    """Returns, in words, which parameter XLA may shard images in space for, if any."""
    for name, (shape, dims) in zip(step.paths, step.params, strict=True):
        is_kernel = any(shape[-len(kernel) :] == kernel for kernel in step.kernels)
        for dim, axes in enumerate(() if is_kernel else dims):
            count = math.prod(step.sizes[x] for x in axes & spare)
            is_part = axes & spare != spare
            if may_shard(shape, dim, eqn, count, is_part=is_part, flat=step.flat):
                return f"dim {dim} of {name!r} may shard images in space"
    return ""


def _text(eqn: Equation, step: _Step, wrong: _Axes, free: _Axes, cause: str) -> str:
    """Returns what XLA would do, and which layouts are right: over free axes."""
    aval, is_gradient = eqn.outvars[0].aval, _is_kernel_gradient(eqn)
    verb = f"wrongly compute {eqn.primitive.name}"
    verb = "multiply the gradient of a convolution's kernel" if is_gradient else verb
    axes = ", ".join(map(repr, sorted(wrong)))
    array = _render.array_text(aval.dtype, aval.shape)
    fact = f"XLA would {verb} {array} along the mesh axes {axes}"
    if cause:
        return f"{fact}, as {cause}: shard another dim of it."
    rows, rule = tuple(axis for axis, size in step.sizes.items() if size > 1), ""
    if is_gradient and free:
        out_dim = eqn.params["dimension_numbers"].out_spec[1]
        spec: list[Any] = [None] * len(aval.shape)
        spec[out_dim] = tuple(axis for axis in rows if axis in free)
        params = zip(step.paths, step.params, strict=True)
        # All of one shape, as the program does not tell which it is.
        like = {x: dims[out_dim] for x, (shape, dims) in params if shape == aval.shape}
        rules = {path: (*spec,) for path, axes in like.items() if axes != free}
        if rules and not aval.shape[out_dim] % math.prod(step.sizes[x] for x in free):
            rule = f", as by the rules {rules} or ml.parallel.tensor_parallel(...)"
    return (
        f"{fact}. Two layouts are right, of images that are whole in space: their rows "
        f"over all axes, {rows}; or the channels of kernels and images over the axes "
        f"without rows{rule}."
    )
