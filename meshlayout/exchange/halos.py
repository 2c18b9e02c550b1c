"""Windows over images sharded in space that XLA's partitioner computes wrongly.

For convolutions and pooling, XLA exchanges the rows and columns at the edges of shards
between neighbors (halos). Where shards have few rows, gradients may be wrong, or the
process may abort (jax 0.7.2 and 0.10.2). These conditions come from 3,500 programs
compared with one device: a third of those refused were wrong, none of the others.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from meshlayout._annotations import Equation


class ShardedShape(NamedTuple):
    """An array's shape, and the mesh axes that shard each dim."""

    shape: tuple[int, ...]
    axes: Sequence[frozenset[str]]


class _Window(NamedTuple):
    dim: int
    size: int  # with its dilation
    stride: int
    padding: tuple[int, int]
    num_inputs: int
    num_outputs: int


def wrong_halo(
    eqns: Sequence[Equation], batch: Sequence[ShardedShape], sizes: Mapping[str, int]
) -> str:
    """Returns why XLA would compute one of these operations wrongly, or ""."""
    for eqn in eqns:
        for window in _windows(eqn):
            rank = len(eqn.outvars[0].aval.shape)
            shards = max(
                math.prod(sizes[axis] for axis in x.axes[window.dim - rank])
                for x in [ShardedShape((1,) * rank, [frozenset()] * rank), *batch]
                if len(x.shape) >= rank
            )
            reason = _reason(eqn.primitive.name, window, shards) if shards > 1 else ""
            if reason:
                low, high = window.padding
                return (
                    f"XLA would compute {eqn.primitive.name} wrongly for images in "
                    f"space: windows of {window.size} with stride {window.stride} and "
                    f"padding ({low}, {high}) slide over {window.num_inputs} rows in "
                    f"{shards} shards of dim {window.dim}, and {reason}."
                )
    return ""


def _reason(name: str, window: _Window, num_shards: int) -> str:
    rows = -(-max(window.num_inputs, window.num_outputs) // num_shards)
    outputs = -(-window.num_outputs // num_shards)
    num_used = -(-window.num_outputs // outputs)
    if name == "select_and_scatter_add" and window.size >= 2 * window.stride > 0:
        return (
            "overlap by half or more. Take the maximum of shifted slices of the images "
            "instead, or make the stride more than half of the window"
        )
    if window.stride > 1 and window.size > rows + 1:
        return (
            f"reach past a neighbor's {rows}. Shard this dim over fewer devices, to "
            f"{window.size - 1} rows on each"
        )
    if name != "conv_general_dilated" or not any(window.padding):
        return ""
    if max(window.padding) >= window.size:
        return "some are padding alone. Pad the images by jnp.pad before"
    if window.num_outputs != window.num_inputs and num_used < num_shards - 1:
        return (
            f"give outputs to {num_used} devices alone. Shard this dim over "
            f"{num_used} or fewer"
        )
    return ""


def _windows(eqn: Equation) -> Iterator[_Window]:
    """Yields the windows of a convolution or of pooling along each dim."""
    name, params = eqn.primitive.name, eqn.params
    if name != "conv_general_dilated" and "window_dimensions" not in params:
        return
    images, outputs = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if name == "conv_general_dilated":
        numbers, kernel = params["dimension_numbers"], eqn.invars[1].aval.shape
        for i, dim in enumerate(numbers.lhs_spec[2:]):
            size = (kernel[numbers.rhs_spec[2 + i]] - 1) * params["rhs_dilation"][i] + 1
            dilation = params["lhs_dilation"][i]  # of gradients, which have paddings
            padding = params["padding"][i] if dilation == 1 else (0, 0)
            stride = max(params["window_strides"][i], dilation)
            out = numbers.out_spec[2 + i]
            yield _Window(dim, size, stride, padding, images[dim], outputs[out])
        return
    if name == "select_and_scatter_add":
        images, outputs = outputs, images
    names = ("window_dimensions", "window_strides", "padding")
    windows = zip(*(params[x] for x in names), images, outputs, strict=True)
    for dim, window in enumerate(windows):
        if window[0] > 1:
            yield _Window(dim, *window)
