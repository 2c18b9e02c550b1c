"""Operations of a program, and how each ties the dims of its arrays together.

A jaxpr is walked once from its arguments to its results, inner jaxprs in place. A table
has a handler for each kind of operation, which links factors of what it reads and
makes, or blocks them with the reason, and notes in the `Flow` what would be sent.

Operations that are not listed here block all that they touch, by their name. To guess
that a new one works element by element would cost a collective that nobody looks for.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
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
    link_all,
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
    flow.itemsize = max([1, *(_jax.itemsize(v.aval.dtype) for v in eqn.outvars[:1])])
    dims = handler(flow, eqn, *args) if handler else unknown(eqn, args)
    # A slice of a weight is a weight, whatever says where it begins.
    params, of_inputs, history = dependence(args[: 1 if name in _SLICES else None])
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
    for arg in args:
        if arg.shape != shapes[0]:  # dims of size 1, and scalars, serve all the others
            served = [
                dim
                for index, dim in enumerate(dims)
                if dim and not (arg.shape and arg.dims[index])
            ]
            flow.sum_gradient(arg, served, int(np.prod(shapes[0])))
    if len(args) > 1:
        flow.together.append(tuple(dims))
        flow.add_lookups(args)
    return [tuple(dims)] * len(shapes)


def _bitcast(flow: Flow, eqn: Equation, x: FactoredArray) -> list[Dims]:
    return [x.dims] if x.shape == out_shapes(eqn)[0] else unknown(eqn, [x])


def _pairwise(flow: Flow, eqn: Equation, *args: FactoredArray) -> list[Dims]:
    return [arg.dims for arg in args]


def _generated(flow: Flow, eqn: Equation, *args: FactoredArray) -> list[Dims]:
    return [fresh_dims(shape) for shape in out_shapes(eqn)]


def _transposed(flow: Flow, eqn: Equation, x: FactoredArray) -> list[Dims]:
    return [tuple(x.dims[dim] for dim in eqn.params["permutation"])]


def _reshaped(flow: Flow, eqn: Equation, x: FactoredArray) -> list[Dims]:
    return [regroup(x.dims, out_shapes(eqn)[0])]


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
    flow.sum_gradient(x, [dims[index] for index in new], int(np.prod(shape)))
    flow.together.append(tuple(dims))
    return [tuple(dims)]


def _tiled(flow: Flow, eqn: Equation, x: FactoredArray) -> list[Dims]:
    copies = [fresh_dims((count,))[0] for count in eqn.params["reps"]]
    for (copy,), dim in ((c, d) for c, d in zip(copies, x.dims, strict=True) if c):
        for factor in dim:
            factor.put_below(copy.size)
    flow.sum_gradient(x, copies, int(np.prod(out_shapes(eqn)[0])))
    dims = tuple((*copy, *dim) for copy, dim in zip(copies, x.dims, strict=True))
    flow.together.append(dims)
    return [dims]


def _reduced(flow: Flow, eqn: Equation, *args: FactoredArray) -> list[Dims]:
    axes = set(eqn.params["axes" if "axes" in eqn.params else "dimensions"])
    shapes = out_shapes(eqn)
    operands = args[: len(shapes)]  # of the general one, initial values follow
    for operand in operands[1:]:
        link_all(operands[0].dims, operand.dims)
    x = operands[0]
    flow.reduce([x.dims[axis] for axis in axes], int(np.prod(shapes[0])))
    left = tuple(dim for index, dim in enumerate(x.dims) if index not in axes)
    return [left] * len(shapes)


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


def _stacked(flow: Flow, eqn: Equation, *args: FactoredArray) -> list[Dims]:
    for arg in args[1:]:
        link_all(args[0].dims, arg.dims)
    dims = list(args[0].dims)
    dims.insert(eqn.params["axis"], fresh_dims((len(args),), "a stack of arrays")[0])
    return [tuple(dims)]


def _unstacked(flow: Flow, eqn: Equation, x: FactoredArray) -> list[Dims]:
    dims = list(x.dims)
    block([dims.pop(eqn.params["axis"])], "it is taken apart into arrays")
    return [tuple(dims)] * len(out_shapes(eqn))


# Operations that leave most dims in their place, and work along the others.


def _placewise(flow: Flow, eqn: Equation, *args: FactoredArray) -> list[Dims]:
    name, x = eqn.primitive.name, args[0]
    shapes, rank = out_shapes(eqn), len(x.shape)
    operands = [arg for arg in args if arg.shape and len(arg.shape) == rank]
    worked = {dim % rank for dim in _worked_along(eqn.params)} if rank else set()
    if name == "top_k":
        worked.add(eqn.params.get("axis", rank - 1) % rank)
    for other in (*(arg.shape for arg in operands), *shapes):
        worked |= {dim for dim in range(rank) if x.shape[dim] != other[dim]}
    reason = f"{name} {_VERBS.get(name, 'works along it')}"
    if name == "dynamic_slice" and flow.depth:
        reason = STACKED  # as layers are, which a loop takes out by their number
    for arg in operands:
        block([arg.dims[dim] for dim in worked], reason)
        for dim in set(range(rank)) - worked:
            link(x.dims[dim], arg.dims[dim])
    return [
        tuple(
            fresh_dims((size,), reason)[0] if dim in worked else x.dims[dim]
            for dim, size in enumerate(shape)
        )
        for shape in shapes
    ]


def _worked_along(params: dict[str, Any]) -> set[int]:
    """Returns the dims along which an operation works even if their sizes stay."""
    worked: set[int] = set()
    for name in ("dimension", "dimensions", "axis"):
        dims = params.get(name, ())
        worked |= {*dims} if isinstance(dims, (tuple, list)) else {dims}
    for name, usual in _USUAL.items():
        values = params.get(name) or ()
        worked |= {dim for dim, value in enumerate(values) if value != usual}
    return worked


_USUAL = {"padding_config": (0, 0, 0), "strides": 1, "window_dimensions": 1}
_TAKES = "takes parts of it"
_VERBS = {
    "dynamic_slice": _TAKES,
    "slice": _TAKES,
    "split": f"{_TAKES}; with its columns in the order of heads it could be sharded",
}


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
    results = _looped(flow, body, consts, carry, slices, max(1, length))
    loop = fresh_dims((length,), STACKED)
    stacks = [_at(x, (length, *x.shape), (*loop, *x.dims)) for x in results[num_carry:]]
    return [*results[:num_carry], *stacks]


STACKED = "a loop runs over it"


def _while(flow: Flow, eqn: Equation, args: list[FactoredArray]) -> list[FactoredArray]:
    params = eqn.params
    first, second = params["cond_nconsts"], params["body_nconsts"]
    consts, carry = args[first : first + second], args[first + second :]
    walk(flow, _jaxpr(params["cond_jaxpr"]), (*args[:first], *carry))
    # How often is not known here.
    return _looped(flow, _jaxpr(params["body_jaxpr"]), consts, carry, [], 1)


def _looped(
    flow: Flow,
    body: Any,
    consts: list[FactoredArray],
    carry: list[FactoredArray],
    slices: list[FactoredArray],
    length: int,
) -> list[FactoredArray]:
    """Walks the body of a loop, when it is known what each carried value depends on."""
    uses = [_jax.operands_of(body, index) for index in range(len(carry))]
    while True:
        args = [*consts, *carry, *slices]
        after = [
            _at(x, x.shape, x.dims, [x, *itertools.compress(args, used)])
            for x, used in zip(carry, uses, strict=True)
        ]
        if list(map(_depends, after)) == list(map(_depends, carry)):
            break
        carry = after
    read, _, _ = dependence(arg for arg in args if arg.weights)
    constrained = set(_constrained(body))
    flow.loops += [
        (x.shape, read)
        for x, var in zip(carry, body.outvars, strict=False)
        if x.of_inputs and len(x.shape) > 1 and x.shape not in constrained
        if jnp.issubdtype(var.aval.dtype, jnp.inexact)
    ]
    with flow.repeated(length):
        results = walk(flow, body, (*consts, *carry, *slices))
    for before, after_it in zip(carry, results, strict=False):
        link_all(before.dims, after_it.dims)
    return results


def _depends(x: FactoredArray) -> tuple[int, bool, int]:
    return x.params, x.of_inputs, x.history


def _constrained(jaxpr: Any) -> Iterable[tuple[int, ...]]:
    """Yields the shapes of values whose sharding a program constrains."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sharding_constraint":
            yield from out_shapes(eqn)
        for inner in _jax.inner_jaxprs(eqn):
            yield from _constrained(inner)


def _jaxpr(closed: Any) -> Any:
    return getattr(closed, "jaxpr", closed)  # they are not closed in jax 0.12


def _conditional(
    flow: Flow, eqn: Equation, args: list[FactoredArray]
) -> list[FactoredArray]:
    branches = _jax.inner_jaxprs(eqn)
    first, *others = [walk(flow, branch, args[1:]) for branch in branches]
    for results in others:
        for a, b in zip(first, results, strict=True):
            link_all(a.dims, b.dims)
    # Each result depends on what the branches make it of.
    alike = zip(first, *others, strict=True)
    return [_at(x, x.shape, x.dims, [x, *rest]) for x, *rest in alike]


def _at(
    x: FactoredArray,
    shape: tuple[int, ...],
    dims: Dims,
    of: Sequence[FactoredArray] = (),
) -> FactoredArray:
    """Returns a value that depends on some others, or on the same as `x`."""
    return FactoredArray(shape, dims, *dependence(of or (x,)))


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

_SLICES = frozenset(("dynamic_slice",))
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
    _tiled: "tile",
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
    _placewise: """
        concatenate cumlogsumexp cummax cummin cumprod cumsum dynamic_slice
        dynamic_update_slice pad reduce_window reduce_window_max reduce_window_min
        reduce_window_sum rev slice sort split top_k
    """,
    _stacked: "stack",
    _unstacked: "unstack",
}

_OPERATIONS: dict[str, _Handler] = {
    name: handler for handler, names in _KINDS.items() for name in names.split()
}
