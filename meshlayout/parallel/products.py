"""Products of arrays and look-ups in tables: where parameters meet activations.

They tie the dims that they sum over, pass the others on, and note in the `Flow` what
sharding either would send: the sum over the first, and for the second the sum in the
gradient of the other operand.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshlayout._annotations import Equation
from meshlayout.parallel.factors import (
    Dim,
    Dims,
    FactoredArray,
    block,
    fresh_dims,
    link,
    regroup,
)
from meshlayout.parallel.flow import Flow


def out_shapes(eqn: Equation) -> list[tuple[int, ...]]:
    """Returns the shapes of an operation's results."""
    return [tuple(getattr(var.aval, "shape", ())) for var in eqn.outvars]


def unknown(eqn: Equation, args: Sequence[FactoredArray]) -> list[Dims]:
    """Serves an operation that is not followed: it blocks what it touches."""
    reason = f"{eqn.primitive.name} is not followed"
    for arg in args:
        block(arg.dims, reason)
    return [fresh_dims(shape, reason) for shape in out_shapes(eqn)]


def matmul(
    flow: Flow, eqn: Equation, lhs: FactoredArray, rhs: FactoredArray
) -> list[Dims]:
    """Serves `dot_general`."""
    return _contraction(flow, eqn, lhs, rhs, eqn.params["dimension_numbers"])


def grouped_matmul(
    flow: Flow, eqn: Equation, lhs: FactoredArray, rhs: FactoredArray, *_: Any
) -> list[Dims]:
    """Serves rows of the left that are multiplied with a matrix for their group."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    groups = numbers.rhs_group_dimensions
    block([rhs.dims[dim] for dim in groups], "rows are grouped by it")
    flow.experts += [factor for dim in groups for factor in rhs.dims[dim]]
    contracted, batch = numbers.dot_dimension_numbers
    if {*numbers.lhs_ragged_dimensions} & {*contracted[0], *batch[0]}:
        return unknown(eqn, (lhs, rhs))
    return _contraction(flow, eqn, lhs, rhs, (contracted, batch), groups)


def _contraction(
    flow: Flow,
    eqn: Equation,
    lhs: FactoredArray,
    rhs: FactoredArray,
    numbers: Any,
    groups: Sequence[int] = (),
) -> list[Dims]:
    contracted, batch = numbers
    for a, b in (*zip(*contracted, strict=True), *zip(*batch, strict=True)):
        link(lhs.dims[a], rhs.dims[b])
    used = ({*contracted[0], *batch[0]}, {*contracted[1], *batch[1], *groups})
    free = [
        [dim for index, dim in enumerate(x.dims) if index not in indices]
        for x, indices in zip((lhs, rhs), used, strict=True)
    ]
    shared = [lhs.dims[dim] for dim in batch[0]]
    if bool(lhs.weights) != bool(rhs.weights):
        flow.experts += [factor for dim in shared for factor in dim]
    summed = [lhs.dims[dim] for dim in contracted[0]]
    result = (*shared, *free[0], *free[1])
    return [_product(flow, eqn, lhs, rhs, summed, free, result)]


def _product(
    flow: Flow,
    eqn: Equation,
    lhs: FactoredArray,
    rhs: FactoredArray,
    summed: list[Dim],
    free: Sequence[Sequence[Dim]],
    result: Dims,
) -> Dims:
    """Notes what a product sums over, forward and in the gradients of its operands."""
    flow.contract(summed, (lhs, rhs), int(np.prod(out_shapes(eqn)[0])))
    flow.sum_gradient(lhs, free[1], rhs.size, rhs.weights)
    flow.sum_gradient(rhs, free[0], lhs.size, lhs.weights)
    flow.together.append(result)
    return result


def convolution(
    flow: Flow, eqn: Equation, lhs: FactoredArray, rhs: FactoredArray
) -> list[Dims]:
    """Serves convolutions."""
    numbers = eqn.params["dimension_numbers"]
    (rows, channels, *image), (features, inputs, *window) = numbers[:2]
    slides = "a convolution slides along it"
    block([lhs.dims[dim] for dim in image], slides)
    block([rhs.dims[dim] for dim in window], WINDOW)
    result = list(fresh_dims(out_shapes(eqn)[0], slides))
    result[numbers[2][0]], result[numbers[2][1]] = lhs.dims[rows], rhs.dims[features]
    if eqn.params["batch_group_count"] != 1:
        return unknown(eqn, (lhs, rhs))
    groups = eqn.params["feature_group_count"]
    channel, feature = lhs.dims[channels], (rhs.dims[features],)
    if groups != 1:  # each group of features has its own group of channels
        group, channel = regroup((channel,), (groups, rhs.shape[inputs]))
        feature = regroup(feature, (groups, rhs.shape[features] // groups))
        link(group, feature[0])
        flow.grouped.append((rhs.weights, group))
        feature = feature[1:]
    link(channel, rhs.dims[inputs])
    free = [lhs.dims[rows]], feature
    return [_product(flow, eqn, lhs, rhs, [channel], free, tuple(result))]


WINDOW = "it is the window of a convolution"


def look_up(
    flow: Flow, eqn: Equation, x: FactoredArray, indices: FactoredArray
) -> list[Dims]:
    """Serves `gather`, which looks rows up in a table or an activation."""
    numbers, shape = eqn.params["dimension_numbers"], out_shapes(eqn)[0]
    sizes = eqn.params["slice_sizes"]
    shared = numbers.operand_batching_dims
    for dim, other in zip(shared, numbers.start_indices_batching_dims, strict=True):
        link(x.dims[dim], indices.dims[other])
    collapsed = numbers.collapsed_slice_dims
    rows = iter(indices.dims[:-1])
    windows = (d for d in range(len(sizes)) if d not in {*collapsed, *shared})
    looked_up = [x.dims[dim] for dim in sorted(collapsed)]
    result: list[Dim] = []
    for index in range(len(shape)):
        if index not in numbers.offset_dims:
            result.append(next(rows))
            continue
        dim = next(windows)
        if sizes[dim] == x.shape[dim]:
            result.append(x.dims[dim])
        elif sizes[dim] == 1:
            looked_up.append(x.dims[dim])
            result.append(())
        else:
            how = "slices take parts of it"
            block([x.dims[dim]], how)
            result += fresh_dims((sizes[dim],), how)
    if not indices.of_inputs:  # as positions are: each example reads the same rows
        block(looked_up, "it is looked up at fixed places")
    flow.look_up(x, looked_up, int(np.prod(shape)))
    flow.together.append(tuple(result))
    return [tuple(result)]
