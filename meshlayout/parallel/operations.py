"""Operations of a program, and how each ties the dims of its arrays together.

A jaxpr is walked once from its arguments to its results, inner jaxprs in place. A table
has a handler for each kind of operation, which links factors of what it reads and
makes, or blocks them with the reason, and notes in the `Flow` what would be sent.

Operations that are not listed here block all that they touch, by their name. To guess
that a new one works element by element would cost a collective that nobody looks for.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from jax.extend.core import Literal

from meshlayout import _jax
from meshlayout._annotations import Equation
from meshlayout.parallel.factors import (
    Dim,
    Dims,
    FactoredArray,
    block,
    dependence,
    fresh_dims,
    link,
    part,
    regroup,
)
from meshlayout.parallel.flow import Flow
from meshlayout.parallel.products import (
    convolution,
    grouped_matmul,
    look_up,
    matmul,
    out_shapes,
    unknown,
)


def walk(flow: Flow, jaxpr: Any, args: Sequence[FactoredArray]) -> list[FactoredArray]:
    """Walks a jaxpr from its arguments and returns its results.

    Args:
        flow: Where to note what is found.
        jaxpr: The operations.
        args: The factors of its arguments.
    """
    values: dict[Any, FactoredArray] = dict(zip(jaxpr.invars, args, strict=True))
    for constant in jaxpr.constvars:
        values[constant] = _constant(constant)

    def read(var: Any) -> FactoredArray:
        return _constant(var) if isinstance(var, Literal) else values[var]

    for eqn in jaxpr.eqns:
        results = _results(flow, eqn, list(map(read, eqn.invars)))
        values.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _results(
    flow: Flow, eqn: Equation, args: list[FactoredArray]
) -> Sequence[FactoredArray]:
    name = eqn.primitive.name
    if name in _CALLS:
        return _CALLS[name](flow, eqn, args)
    handler = _OPERATIONS.get(name)
    flow.new_bits = 0
    dims = handler(flow, eqn, *args) if handler else unknown(eqn, args)
    params, of_inputs, history = dependence(args)
    history |= flow.new_bits
    origin = args[0].source if name in _CASTS else None
    return [
        FactoredArray(shape, each, params, of_inputs, history, origin)
        for shape, each in zip(out_shapes(eqn), dims, strict=True)
    ]


def _constant(var: Any) -> FactoredArray:
    shape = tuple(getattr(var.aval, "shape", ()))
    return FactoredArray(shape, fresh_dims(shape))


# One handler per kind of operation. It gets the flow, the equation and the operands,
# and returns the dims of each result.

_Handler: TypeAlias = Callable[..., "list[Dims]"]


def _elementwise(flow: Flow, eqn: Equation, *args: FactoredArray) -> list[Dims]:
    shapes = out_shapes(eqn)
    dims: list[Dim] = list(fresh_dims(shapes[0]))
    for index, size in enumerate(shapes[0]):
        whole = [arg for arg in args if arg.shape[index : index + 1] == (size,)]
        if whole:
            dims[index] = whole[0].dims[index]
        for arg in whole[1:]:
            link(dims[index], arg.dims[index])
    result = int(np.prod(shapes[0]))
    for arg in args:
        if arg.shape != shapes[0]:  # dims of size 1, and scalars, serve all the others
            served = [
                dim
                for index, dim in enumerate(dims)
                if dim and not (arg.shape and arg.dims[index])
            ]
            flow.sum_gradient(arg, served, result, by_weight=False)
    if len(args) > 1:
        flow.together.append(tuple(dims))
        flow.add_lookups(args)
    return [tuple(dims)] * len(shapes)


def _bitcast(flow: Flow, eqn: Equation, x: FactoredArray) -> list[Dims]:
    if x.shape == out_shapes(eqn)[0]:
        return [x.dims]
    block(x.dims, "bitcast_convert_type takes its numbers apart")
    return [fresh_dims(shape, "it holds parts of numbers") for shape in out_shapes(eqn)]


def _pairwise(flow: Flow, eqn: Equation, *args: FactoredArray) -> list[Dims]:
    return [arg.dims for arg in args]


def _generated(flow: Flow, eqn: Equation, *args: FactoredArray) -> list[Dims]:
    return [fresh_dims(shape) for shape in out_shapes(eqn)]


def _transposed(flow: Flow, eqn: Equation, x: FactoredArray) -> list[Dims]:
    return [tuple(x.dims[dim] for dim in eqn.params["permutation"])]


def _reshaped(flow: Flow, eqn: Equation, x: FactoredArray) -> list[Dims]:
    dims = regroup(x.dims, out_shapes(eqn)[0])
    return [dims]


def _squeezed(flow: Flow, eqn: Equation, x: FactoredArray) -> list[Dims]:
    gone = {dim % len(x.shape) for dim in eqn.params["dimensions"]}
    return [tuple(dim for index, dim in enumerate(x.dims) if index not in gone)]


def _broadcast(flow: Flow, eqn: Equation, x: FactoredArray, *_: Any) -> list[Dims]:
    shape = out_shapes(eqn)[0]
    dims = list(fresh_dims(shape))
    new = set(range(len(shape)))
    for dim, target in zip(x.dims, eqn.params["broadcast_dimensions"], strict=True):
        if dim:
            dims[target] = dim
            new.discard(target)
    flow.sum_gradient(
        x, [dims[index] for index in new], int(np.prod(shape)), by_weight=False
    )
    flow.together.append(tuple(dims))
    return [tuple(dims)]


def _reduced(flow: Flow, eqn: Equation, *args: FactoredArray) -> list[Dims]:
    axes = set(eqn.params["axes" if "axes" in eqn.params else "dimensions"])
    shapes = out_shapes(eqn)
    operands = args[: len(shapes)]  # of the general one, initial values follow
    for operand in operands[1:]:
        _link_all(operands[0].dims, operand.dims)
    x = operands[0]
    flow.reduce([x.dims[axis] for axis in axes], int(np.prod(shapes[0])))
    left = tuple(dim for index, dim in enumerate(x.dims) if index not in axes)
    return [left] * len(shapes)


def _link_all(first: Dims, second: Dims) -> None:
    for a, b in zip(first, second, strict=True):
        link(a, b)


def _scattered(
    flow: Flow,
    eqn: Equation,
    x: FactoredArray,
    indices: FactoredArray,
    updates: FactoredArray,
) -> list[Dims]:
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


def _sliced(flow: Flow, eqn: Equation, x: FactoredArray, *_: Any) -> list[Dims]:
    """Serves what takes a part of some dims, as slices, pads and pools do."""
    how = f"{eqn.primitive.name} takes parts of it"
    results: list[Dims] = []
    for shape in out_shapes(eqn):
        pairs = zip(x.dims, x.shape, shape, strict=True)
        dims = [dim if a == b else part(dim, b, how) for dim, a, b in pairs]
        results.append(tuple(dims))
    return results


def _pooled(flow: Flow, eqn: Equation, *args: FactoredArray) -> list[Dims]:
    """Serves windows that slide along some dims, perhaps to a result as long."""
    how = f"{eqn.primitive.name} slides along it"
    for dim, window in zip(args[0].dims, eqn.params["window_dimensions"], strict=True):
        if window != 1:
            block([dim], how)
    return _sliced(flow, eqn, args[0]) * len(out_shapes(eqn))


def _written(
    flow: Flow, eqn: Equation, x: FactoredArray, update: FactoredArray, *_: Any
) -> list[Dims]:
    for index, size in enumerate(x.shape):
        if size == update.shape[index]:
            link(x.dims[index], update.dims[index])
        else:
            how = "an update writes parts of it"
            block([x.dims[index], update.dims[index]], how)
    return [x.dims]


def _concatenated(flow: Flow, eqn: Equation, *args: FactoredArray) -> list[Dims]:
    along, how = eqn.params["dimension"], "arrays are joined along it"
    dims = list(args[0].dims)
    for arg in args:
        block([arg.dims[along]], how)
        for index, dim in enumerate(arg.dims):
            if index != along:
                link(dims[index], dim)
    dims[along] = fresh_dims((out_shapes(eqn)[0][along],), how)[0]
    return [tuple(dims)]


def _stacked(flow: Flow, eqn: Equation, *args: FactoredArray) -> list[Dims]:
    for arg in args[1:]:
        _link_all(args[0].dims, arg.dims)
    dims = list(args[0].dims)
    dims.insert(eqn.params["axis"], fresh_dims((len(args),), "a stack of arrays")[0])
    return [tuple(dims)]


def _unstacked(flow: Flow, eqn: Equation, x: FactoredArray) -> list[Dims]:
    dims = list(x.dims)
    block([dims.pop(eqn.params["axis"])], "it is taken apart into arrays")
    return [tuple(dims)] * len(out_shapes(eqn))


def _ordered(flow: Flow, eqn: Equation, *args: FactoredArray) -> list[Dims]:
    """Serves what moves or accumulates elements along dims, such as a sort."""
    params = eqn.params
    along = next(
        params[name]
        for name in ("dimensions", "dimension", "axis", "axes")
        if name in params
    )
    for arg in args:
        _link_all(args[0].dims, arg.dims)
    dims = along if isinstance(along, (tuple, list)) else (along,)
    how = f"{eqn.primitive.name} works along it"
    block([args[0].dims[dim] for dim in dims], how)
    return [args[0].dims] * len(out_shapes(eqn))


def _top_k(flow: Flow, eqn: Equation, x: FactoredArray) -> list[Dims]:
    block([x.dims[eqn.params.get("axis", -1)]], "top_k works along it")
    return _sliced(flow, eqn, x)


def _padded(flow: Flow, eqn: Equation, x: FactoredArray, _: Any) -> list[Dims]:
    for dim, config in zip(x.dims, eqn.params["padding_config"], strict=True):
        if any(config):
            block([dim], "it is padded")
    return _sliced(flow, eqn, x)


def _cut(flow: Flow, eqn: Equation, x: FactoredArray, *_: Any) -> list[Dims]:
    strides = eqn.params.get("strides") or ()
    for dim, stride in zip(x.dims, strides, strict=False):
        if stride != 1:
            block([dim], "slices take parts of it")
    return _sliced(flow, eqn, x)


# Operations with a program of their own: they return whole values.


def _called(
    flow: Flow, eqn: Equation, args: list[FactoredArray]
) -> list[FactoredArray]:
    return walk(flow, _jax.inner_jaxprs(eqn)[0], args)


def _scan(flow: Flow, eqn: Equation, args: list[FactoredArray]) -> list[FactoredArray]:
    num_consts, num_carry = _jax.scan_counts(eqn)
    length = eqn.params["length"]
    (body,) = _jax.inner_jaxprs(eqn)
    consts, rest = args[:num_consts], args[num_consts:]
    carry, stacked = rest[:num_carry], rest[num_carry:]
    block([x.dims[0] for x in stacked], STACKED)
    slices = [_at(x, x.shape[1:], x.dims[1:]) for x in stacked]
    carry = _carried(carry, args)
    with flow.repeated(max(1, length)):
        results = walk(flow, body, (*consts, *carry, *slices))
    for before, after in zip(carry, results, strict=False):
        _link_all(before.dims, after.dims)
    loop = fresh_dims((length,), STACKED)
    stacks = [_at(x, (length, *x.shape), (*loop, *x.dims)) for x in results[num_carry:]]
    return [*results[:num_carry], *stacks]


STACKED = "a loop runs over it"


def _while(flow: Flow, eqn: Equation, args: list[FactoredArray]) -> list[FactoredArray]:
    params = eqn.params
    first, second = params["cond_nconsts"], params["body_nconsts"]
    carry = _carried(args[first + second :], args)
    walk(flow, _jaxpr(params["cond_jaxpr"]), (*args[:first], *carry))
    body = _jaxpr(params["body_jaxpr"])
    results = walk(flow, body, (*args[first : first + second], *carry))
    for before, after in zip(carry, results, strict=True):
        _link_all(before.dims, after.dims)
    return results


def _jaxpr(closed: Any) -> Any:
    return getattr(closed, "jaxpr", closed)  # they are not closed in jax 0.12


def _conditional(
    flow: Flow, eqn: Equation, args: list[FactoredArray]
) -> list[FactoredArray]:
    branches = _jax.inner_jaxprs(eqn)
    first, *others = [walk(flow, branch, args[1:]) for branch in branches]
    for results in others:
        for a, b in zip(first, results, strict=True):
            _link_all(a.dims, b.dims)
    return _carried(first, [x for results in (first, *others) for x in results])


def _carried(
    carry: Sequence[FactoredArray], args: Sequence[FactoredArray]
) -> list[FactoredArray]:
    """Returns what a loop carries: after the first round it depends on all."""
    return [FactoredArray(x.shape, x.dims, *dependence(args)) for x in carry]


def _at(x: FactoredArray, shape: tuple[int, ...], dims: Dims) -> FactoredArray:
    return FactoredArray(shape, dims, x.params, x.of_inputs, x.history)


_CALLS: dict[str, Callable[..., Sequence[FactoredArray]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _conditional,
}
_INLINED = """
    jit pjit closed_call core_call named_call checkpoint remat remat2 custom_jvp_call
    custom_vjp_call custom_vjp_call_jaxpr composite
"""
_CALLS |= dict.fromkeys(_INLINED.split(), _called)

_CASTS = frozenset(("convert_element_type", "copy", "reduce_precision"))

_KINDS: dict[_Handler, str] = {
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
    _bitcast: "bitcast_convert_type",
    _pairwise: "optimization_barrier device_put layout_constraint",
    _generated: """
        iota iota_2x32_shape empty platform_index random_bits random_clone
        random_fold_in random_gamma random_seed random_split random_unwrap random_wrap
        rng_bit_generator rng_uniform
    """,
    _transposed: "transpose",
    _reshaped: "reshape",
    _squeezed: "squeeze",
    _broadcast: "broadcast_in_dim",
    _reduced: """
        argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod
        reduce_sum reduce_xor
    """,
    matmul: "dot_general",
    grouped_matmul: "ragged_dot_general",
    convolution: "conv_general_dilated",
    look_up: "gather",
    _scattered: """
        scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub
    """,
    _cut: "slice dynamic_slice split tile",
    _stacked: "stack",
    _unstacked: "unstack",
    _padded: "pad",
    _pooled: """
        reduce_window reduce_window_max reduce_window_min reduce_window_sum
    """,
    _written: "dynamic_update_slice",
    _concatenated: "concatenate",
    _ordered: "cumlogsumexp cummax cummin cumprod cumsum rev sort",
    _top_k: "top_k",
}

_OPERATIONS: dict[str, _Handler] = {
    name: handler for handler, names in _KINDS.items() for name in names.split()
}
