"""Operations of a program, and how each ties the dims of its arrays together.

A table has a handler for each kind of operation, which links factors of what it reads
and makes, or blocks them with the reason, and notes in the `Flow` what would be sent.
Operations that are not listed block all that they touch, by their name. To guess that a
new one works element by element would cost a collective that nobody looks for.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from meshlayout._annotations import Equation
from meshlayout.parallel.factors import (
    Dim,
    Dims,
    Flow,
    Value,
    block,
    fresh_dims,
    link,
    link_all,
    regroup,
    union,
)


WINDOW = "it is the window of a convolution"
STACKED = "a loop runs over it"

# (flow, eqn, *operands) -> dims of each result
Handler: TypeAlias = Callable[..., "list[Dims]"]


def out_shapes(eqn: Equation) -> list[tuple[int, ...]]:
    """Returns the shapes of an operation's results."""
    return [tuple(getattr(var.aval, "shape", ())) for var in eqn.outvars]


def unknown(flow: Flow, eqn: Equation, *args: Value) -> list[Dims]:
    """Serves an operation that is not followed: it blocks what it touches."""
    reason = f"{eqn.primitive.name} is not followed"
    for arg in args:
        block(arg.dims, reason)
    return [fresh_dims(shape, reason) for shape in out_shapes(eqn)]


# Operations that pass their operands' dims on.


def _elementwise(flow: Flow, eqn: Equation, *args: Value) -> list[Dims]:
    shapes = out_shapes(eqn)
    dims: list[Dim] = list(fresh_dims(shapes[0]))
    for index, size in enumerate(shapes[0]):
        whole = [arg for arg in args if arg.shape[index : index + 1] == (size,)]
        if whole:
            dims[index] = whole[0].dims[index]
        for arg in whole[1:]:
            link(dims[index], arg.dims[index])
    for arg in args:
        if arg.shape != shapes[0]:  # dims of size 1, and scalars, serve all the others
            own = arg.dims or ((),) * len(dims)
            served = [dim for dim, mine in zip(dims, own, strict=True) if not mine]
            flow.sum_gradient(arg, served, math.prod(shapes[0]))
    if len(args) > 1:
        flow.together.append(tuple(dims))
        bits = [arg.history for arg in args if arg.history]
        if len(bits) > 1 and not union(bits) & ~flow.lookups:
            flow.added_lookups.add(union(bits))
    return [tuple(dims)] * len(shapes)


def _squeezed(flow: Flow, eqn: Equation, x: Value) -> list[Dims]:
    gone = {dim % len(x.shape) for dim in eqn.params["dimensions"]}
    return [tuple(dim for index, dim in enumerate(x.dims) if index not in gone)]


def _broadcast(flow: Flow, eqn: Equation, x: Value, *_: Any) -> list[Dims]:
    shape = out_shapes(eqn)[0]
    dims = dict(enumerate(fresh_dims(shape)))
    places = zip(eqn.params["broadcast_dimensions"], x.dims, strict=True)
    old = {target: dim for target, dim in places if dim}
    new = [dim for index, dim in dims.items() if index not in old]
    flow.sum_gradient(x, new, math.prod(shape))
    result = tuple((dims | old).values())
    flow.together.append(result)
    return [result]


def _tiled(flow: Flow, eqn: Equation, x: Value) -> list[Dims]:
    copies = fresh_dims(eqn.params["reps"])
    for copy, dim in zip(copies, x.dims, strict=True):
        for factor in dim if copy else ():
            factor.put_below(copy[0].size)
    flow.sum_gradient(x, copies, math.prod(out_shapes(eqn)[0]))
    dims = tuple((*copy, *dim) for copy, dim in zip(copies, x.dims, strict=True))
    flow.together.append(dims)
    return [dims]


def _reduced(flow: Flow, eqn: Equation, *args: Value) -> list[Dims]:
    axes = set(eqn.params["axes" if "axes" in eqn.params else "dimensions"])
    shapes = out_shapes(eqn)
    x, *others = args[: len(shapes)]  # initial values of the general one follow
    for other in others:
        link_all(x.dims, other.dims)
    flow.reduce([x.dims[axis] for axis in axes], math.prod(shapes[0]))
    left = tuple(dim for index, dim in enumerate(x.dims) if index not in axes)
    return [left] * len(shapes)


def _scattered(flow: Flow, eqn: Equation, *args: Value) -> list[Dims]:
    x, indices, updates = args
    numbers, how = eqn.params["dimension_numbers"], "a scatter writes parts of it"
    shared = numbers.operand_batching_dims
    for dim, other in zip(shared, numbers.scatter_indices_batching_dims, strict=True):
        link(x.dims[dim], indices.dims[other])
    rows = iter(indices.dims[:-1])
    for index, dim in enumerate(updates.dims):
        if index not in numbers.update_window_dims:
            link(dim, next(rows))
    written = set(numbers.inserted_window_dims)
    block([x.dims[dim] for dim in written], how)
    kept = [dim for dim in range(len(x.shape)) if dim not in {*written, *shared}]
    for dim, index in zip(kept, numbers.update_window_dims, strict=True):
        if x.shape[dim] == updates.shape[index]:
            link(x.dims[dim], updates.dims[index])
        else:
            block([x.dims[dim], updates.dims[index]], how)
    return [x.dims]


def _stacked(flow: Flow, eqn: Equation, *args: Value) -> list[Dims]:
    for arg in args[1:]:
        link_all(args[0].dims, arg.dims)
    dims = list(args[0].dims)
    dims.insert(eqn.params["axis"], fresh_dims((len(args),), "a stack of arrays")[0])
    return [tuple(dims)]


def _unstacked(flow: Flow, eqn: Equation, x: Value) -> list[Dims]:
    dims = list(x.dims)
    block([dims.pop(eqn.params["axis"])], "it is taken apart into arrays")
    return [tuple(dims)] * len(out_shapes(eqn))


def _placewise(flow: Flow, eqn: Equation, *args: Value) -> list[Dims]:
    """Serves what leaves most dims in their place, and works along the others."""
    name, params, x = eqn.primitive.name, eqn.params, args[0]
    shapes, rank = out_shapes(eqn), len(x.shape)
    operands = [arg for arg in args if arg.shape and len(arg.shape) == rank]
    dims = {params[key] for key in ("dimension", "axis") if key in params}
    dims |= {*params.get("dimensions", ())}
    if name == "top_k":  # along the last dim in older versions of JAX
        dims.add(params.get("axis", rank - 1))
    window = enumerate(params.get("window_dimensions", ()))
    padding = enumerate(params.get("padding_config", ()))
    dims |= {dim for dim, size in window if size != 1}
    dims |= {dim for dim, pads in padding if any(pads)}
    for shape in (*(arg.shape for arg in operands), *shapes):
        dims |= {dim for dim in range(rank) if x.shape[dim] != shape[dim]}
    worked = {dim % rank for dim in dims}
    reason = f"{name} {_VERBS.get(name, 'works along it')}"
    if name == "dynamic_slice" and flow.depth:
        reason = STACKED  # as layers are, which a loop takes out by their number
    for arg in operands:
        block([arg.dims[dim] for dim in worked], reason)
        for dim in {*range(rank)} - worked:
            link(x.dims[dim], arg.dims[dim])
    return [
        tuple(new if d in worked else x.dims[d] for d, new in enumerate(fresh))
        for fresh in (fresh_dims(shape, reason) for shape in shapes)
    ]


_TAKES = "takes parts of it"
_FUSED = f"{_TAKES}; of matrices side by side, interleaved columns could be sharded"
_VERBS = {"dynamic_slice": _TAKES, "slice": _FUSED, "split": _FUSED}


# Products and look-ups: where parameters meet activations.


def _matmul(flow: Flow, eqn: Equation, lhs: Value, rhs: Value, *_: Any) -> list[Dims]:
    """Products of matrices, also of rows with a matrix for their group."""
    numbers, groups = eqn.params.get("dimension_numbers"), ()
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    contracted, batch = numbers or ragged.dot_dimension_numbers
    if ragged:
        groups = ragged.rhs_group_dimensions
        block([rhs.dims[dim] for dim in groups], "rows are grouped by it")
        flow.experts += [factor for dim in groups for factor in rhs.dims[dim]]
        if {*ragged.lhs_ragged_dimensions} & {*contracted[0], *batch[0]}:
            return unknown(flow, eqn, lhs, rhs)
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
    return _product(flow, eqn, (lhs, rhs), summed, free, (*shared, *free[0], *free[1]))


def _product(
    flow: Flow,
    eqn: Equation,
    operands: tuple[Value, Value],
    summed: list[Dim],
    free: Sequence[Sequence[Dim]],
    result: Dims,
) -> list[Dims]:
    """Notes what a product sums over, forward and in the gradients of its operands."""
    lhs, rhs = operands
    flow.contract(summed, operands, math.prod(out_shapes(eqn)[0]))
    flow.sum_gradient(lhs, free[1], rhs.size, rhs.weights)
    flow.sum_gradient(rhs, free[0], lhs.size, lhs.weights)
    flow.together.append(result)
    return [result]


def _convolution(flow: Flow, eqn: Equation, lhs: Value, rhs: Value) -> list[Dims]:
    if eqn.params["batch_group_count"] != 1:
        return unknown(flow, eqn, lhs, rhs)
    of_lhs, of_rhs, out = eqn.params["dimension_numbers"]
    (rows, channels, *image), (features, inputs, *window) = of_lhs, of_rhs
    slides = "a convolution slides along it"
    block([lhs.dims[dim] for dim in image], slides)
    block([rhs.dims[dim] for dim in window], WINDOW)
    result = list(fresh_dims(out_shapes(eqn)[0], slides))
    result[out[0]], result[out[1]] = lhs.dims[rows], rhs.dims[features]
    groups = eqn.params["feature_group_count"]
    channel, feature = lhs.dims[channels], (rhs.dims[features],)
    if groups != 1:  # each group of features has its own group of channels
        group, channel = regroup((channel,), (groups, rhs.shape[inputs]))
        first, *feature = regroup(feature, (groups, rhs.shape[features] // groups))
        link(group, first)
        block((channel, *feature), "XLA cannot divide a group of a convolution")
        flow.grouped.append((rhs.weights, group))
    link(channel, rhs.dims[inputs])
    free = [lhs.dims[rows]], feature
    return _product(flow, eqn, (lhs, rhs), [channel], free, tuple(result))


def _look_up(flow: Flow, eqn: Equation, x: Value, indices: Value) -> list[Dims]:
    """Looks rows up in a table or an activation."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape = out_shapes(eqn)[0]
    shared = numbers.operand_batching_dims
    for dim, other in zip(shared, numbers.start_indices_batching_dims, strict=True):
        link(x.dims[dim], indices.dims[other])
    collapsed = numbers.collapsed_slice_dims
    rows = iter(indices.dims[:-1])
    windows = (d for d in range(len(sizes)) if d not in {*collapsed, *shared})
    looked_up = [x.dims[dim] for dim in sorted(collapsed)]
    how = "slices take parts of it"
    result: list[Dim] = []
    for index in range(len(shape)):
        if index not in numbers.offset_dims:
            result.append(next(rows))
            continue
        dim = next(windows)
        if sizes[dim] == x.shape[dim]:
            result.append(x.dims[dim])
            continue
        result += fresh_dims((sizes[dim],), how)
        if sizes[dim] == 1:  # a look-up like any other
            looked_up.append(x.dims[dim])
        else:
            block([x.dims[dim]], how)
    if not indices.of_inputs:  # as positions are: each example reads the same rows
        block(looked_up, "it is looked up at fixed places")
    if x.weights:
        flow.contract(looked_up, (x,), math.prod(shape))
        flow.lookups |= flow.new_bits
    else:
        flow.reduce(looked_up, math.prod(shape))
    flow.together.append(tuple(result))
    return [tuple(result)]


_KINDS: dict[Handler, str] = {
    _elementwise: """
        abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e
        bessel_i1e cbrt ceil clamp clz complex conj convert_element_type copy cos cosh
        digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
        igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to
        max min mul mulhi name ne neg nextafter not or polygamma population_count pow
        pvary real reciprocal reduce_precision regularized_incomplete_beta rem round
        rsqrt select_n shift_left shift_right_arithmetic shift_right_logical
        sharding_constraint sign sin sinh sqrt square stop_gradient sub tan tanh
        threefry2x32 xor zeta
    """,
    lambda flow, eqn, x: (
        [x.dims] if x.shape == out_shapes(eqn)[0] else unknown(flow, eqn, x)
    ): "bitcast_convert_type",
    lambda flow, eqn, *args: [arg.dims for arg in args]: """
        device_put layout_constraint optimization_barrier
    """,
    lambda flow, eqn, *_: [fresh_dims(shape) for shape in out_shapes(eqn)]: """
        iota iota_2x32_shape empty platform_index random_bits random_clone
        random_fold_in random_gamma random_seed random_split random_unwrap random_wrap
        rng_bit_generator rng_uniform
    """,
    lambda _, eqn, x: [
        tuple(x.dims[d] for d in eqn.params["permutation"])
    ]: "transpose",
    lambda flow, eqn, x: [regroup(x.dims, out_shapes(eqn)[0])]: "reshape",
    _squeezed: "squeeze",
    _broadcast: "broadcast_in_dim",
    _tiled: "tile",
    _reduced: """
        argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod
        reduce_sum reduce_xor
    """,
    _matmul: "dot_general ragged_dot_general",
    _convolution: "conv_general_dilated",
    _look_up: "gather",
    _scattered: """
        scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub
    """,
    _placewise: """
        concatenate cumlogsumexp cummax cummin cumprod cumsum dynamic_slice
        dynamic_update_slice pad reduce_window reduce_window_max reduce_window_min
        reduce_window_sum rev slice sort split top_k
    """,
    _stacked: "stack",
    _unstacked: "unstack",
}

OPERATIONS: dict[str, Handler] = {
    name: handler for handler, names in _KINDS.items() for name in names.split()
}
