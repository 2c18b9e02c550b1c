"""Windows over images sharded in space, where XLA's partitioner may not be trusted.

For convolutions and pooling, XLA exchanges the rows and columns at the edges of shards
between neighbors (halos). Where shards have few rows, results may be wrong, or the
process may abort (jax 0.7.2 and 0.10.2, also for TPUs). `is_sure` comes from thousands
of random programs that were compared with one device.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax

from meshlayout._annotations import Equation


def is_sure(eqn: Equation, shards: Mapping[int, int]) -> bool:
    """Returns whether XLA is right for so many shards, but for gradients of kernels."""
    is_pooling = "window_dimensions" in eqn.params
    is_scatter = eqn.primitive.name == "select_and_scatter_add"
    for dim, size, stride, padding, num_inputs, num_outputs in _windows(eqn):
        num_shards = shards.get(dim, 1)
        inputs, outputs = (-(-n // num_shards) for n in (num_inputs, num_outputs))
        num_used = -(-num_outputs // max(outputs, 1))
        if num_shards > 1 and (
            stride > 2
            or size > (min if is_pooling else max)(inputs, outputs) + 1
            or not 0 <= min(padding) <= max(padding) < size
            or num_used < num_shards - 1
            or (is_scatter and size >= 2 * stride)
        ):
            return False
    return True


def _windows(eqn: Equation) -> Iterator[tuple[Any, ...]]:
    """Yields the dim, dilated size, stride, padding, inputs and outputs of windows."""
    params, names = eqn.params, ("window_dimensions", "window_strides", "padding")
    images, outputs = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if names[0] in params:
        if eqn.primitive.name == "select_and_scatter_add":
            images, outputs = outputs, images
        windows = zip(*(params[name] for name in names), images, outputs, strict=True)
        for dim, window in enumerate(windows):
            if window[:3] != (1, 1, (0, 0)):
                yield (dim, *window)
        return
    numbers, kernel = params["dimension_numbers"], eqn.invars[1].aval.shape
    for i, dim in enumerate(numbers.lhs_spec[2:]):
        size = (kernel[numbers.rhs_spec[2 + i]] - 1) * params["rhs_dilation"][i] + 1
        spread, (low, high) = params["lhs_dilation"][i], params["padding"][i]
        padding = low, min(high, size - 1) if spread > 1 else high  # of gradients
        stride, out = max(params["window_strides"][i], spread), numbers.out_spec[2 + i]
        yield dim, size, stride, padding, images[dim], outputs[out]


def may_shard(
    shape: tuple[int, ...],
    dim: int,
    eqn: Equation,
    count: int,
    *,
    is_part: bool,
    flat: Collection[int],
) -> bool:
    """Returns whether XLA may shard images, but over a part of the axes, as this dim.

    It would be a map of positions or a flat matrix: with `is_part`, over some of the
    axes, else with too many shards for the first dim of the images. `flat` has the
    sizes of dims that are reshaped into others.
    """
    (lhs, rhs, _), size = eqn.params["dimension_numbers"], shape[dim]
    for var, spec in zip(eqn.invars, (lhs, rhs), strict=True):
        features, *space = (var.aval.shape[d] for d in (spec[0], *spec[2:]))
        area = math.prod(space)
        is_map = len(space) < len(shape) > dim + 1 and size in space
        is_pooled = spec is rhs and size > 8 * features and not area * features % size
        is_flat = size in flat and (is_pooled or size in (area, area * features))
        flat_dims = sorted(spec[2:] if size == area else (spec[0], *spec[2:]))
        first = next((d for d in flat_dims if var.aval.shape[d] > 1), spec[0])
        pooled = area * features // size if is_pooled and first != spec[0] else 1
        length = var.aval.shape[first] // round(pooled ** (1 / len(space)))
        is_cut = is_part or (is_flat and 1 < math.gcd(length, count) < count)
        if count > 1 and is_cut and (is_map or is_flat):
            return True
    return False


def run_without(axes: frozenset[str], function: Callable[[], Any]) -> Any:
    """Returns what a function does with all arrays whole over axes that XLA ignores."""
    if not axes:
        return function()
    options: Any = {"mesh": jax.sharding.get_abstract_mesh(), "axis_names": {*axes}}
    specs = {"in_specs": (), "out_specs": jax.sharding.PartitionSpec()}
    return jax.jit(jax.shard_map(function, **options, **specs, check_vma=False))()
