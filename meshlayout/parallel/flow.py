"""The flow of factors through a program: which dims each operation ties together.

A program is a jaxpr, walked once from its arguments to its results, inner jaxprs in
place. Each operation links factors of what it reads and makes, or blocks them; what it
would send, should a factor be cut, is noted down: the partial sums of a contraction
(forward), and of the gradient of what is read by all parts (backward). Which factors to
cut is decided afterwards, when all links are known.

Operations that are not listed here block all that they touch, by their name. To guess
that a new one works element by element would cost a collective that nobody looks for.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from meshlayout import _jax
from meshlayout._annotations import Equation
from meshlayout.parallel.factors import (
    Dim,
    Dims,
    Factor,
    FactoredArray,
    block,
    fresh_dims,
    link,
    regroup,
)


@dataclass(frozen=True, eq=False)
class Contraction:
    """A sum over factors, of products or of what a look-up finds: forward.

    Attributes:
        factors: What it sums over.
        operand: What is multiplied with a weight, or the larger one of two operands.
        size: Elements of the result.
        runs: How often it runs, in the loops around it.
        weights: The parameters that it multiplies with, as bits.
        bit: Its own bit in the history of what depends on it.
        before: The contractions that it depends on.
    """

    factors: tuple[Factor, ...]
    operand: FactoredArray
    size: int
    runs: int
    weights: int
    bit: int
    before: int


@dataclass(frozen=True, eq=False)
class GradientSum:
    """A sum over a factor in the gradient of an array without it: backward.

    Attributes:
        factor: What the gradient is summed over.
        of: The array, which all parts of the factor read.
        runs: How often it runs, in the loops around it.
        other_size: Elements of what the array is multiplied with; for a broadcast, of
            the result.
        by_weight: Whether that is a weight, as in a matmul by columns.
    """

    factor: Factor
    of: FactoredArray
    runs: int
    other_size: int
    by_weight: bool


@dataclass(eq=False)
class Flow:
    """What is known of a program's factors while it is walked, and afterwards.

    Attributes:
        contractions: The contractions of parameters or of two other arrays.
        gradient_sums: Where gradients are summed over a factor.
        reductions: Factors that reductions end, and the elements of the results.
        together: Dims of arrays in which factors come together for the first time.
        added_lookups: Groups of look-ups whose results are added up, as bits.
        experts: Factors of stacked weights that a product batches over.
        multiplied: The parameters that something is multiplied with, as bits.
    """

    contractions: list[Contraction] = field(default_factory=list)
    gradient_sums: list[GradientSum] = field(default_factory=list)
    reductions: list[tuple[Factor, int]] = field(default_factory=list)
    together: list[Dims] = field(default_factory=list)
    added_lookups: set[int] = field(default_factory=set)
    experts: list[Factor] = field(default_factory=list)
    multiplied: int = 0
    _lookups: int = 0
    _loops: int = 1
    _bits: int = 0

    def walk(self, jaxpr: Any, args: Sequence[FactoredArray]) -> list[FactoredArray]:
        """Walks a jaxpr from its arguments and returns its results."""
        values: dict[Any, FactoredArray] = dict(zip(jaxpr.invars, args, strict=True))
        for constant in jaxpr.constvars:
            values[constant] = _constant(constant)

        def read(var: Any) -> FactoredArray:
            return _constant(var) if hasattr(var, "val") else values[var]

        for eqn in jaxpr.eqns:
            results = self._results(eqn, list(map(read, eqn.invars)))
            values.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def _results(
        self, eqn: Equation, args: list[FactoredArray]
    ) -> Sequence[FactoredArray]:
        name = eqn.primitive.name
        if name in _CALLS:
            return _CALLS[name](self, eqn, args)
        handler = _OPERATIONS.get(name)
        self._bits = 0
        dims = handler(self, eqn, *args) if handler else _unknown(eqn, args)
        params, of_inputs, history = 0, False, self._bits
        for arg in args:
            params |= arg.params
            of_inputs |= arg.of_inputs
            history |= arg.history
        origin = args[0].source if name in _CASTS else None
        return [
            FactoredArray(shape, one, params, of_inputs, history, origin)
            for shape, one in zip(_out_shapes(eqn), dims, strict=True)
        ]

    def contract(
        self,
        dims: Iterable[Dim],
        operands: Sequence[FactoredArray],
        size: int,
    ) -> None:
        """Notes a sum over dims of products of some arrays."""
        factors = tuple(factor for dim in dims for factor in dim)
        weights = before = 0
        for operand in operands:
            weights |= operand.params if operand.is_weight else 0
            before |= operand.history
        self.multiplied |= weights
        if not factors:
            return
        others = [operand for operand in operands if not operand.is_weight] or operands
        operand = max(others, key=lambda array: array.size)
        self._bits = 1 << len(self.contractions)
        self.contractions.append(
            Contraction(
                factors,
                operand.source,
                size,
                self._loops,
                weights,
                self._bits,
                before,
            )
        )

    def sum_gradient(
        self, of: FactoredArray, dims: Iterable[Dim], other: int, *, by_weight: bool
    ) -> None:
        """Notes that the gradient of an array is summed over dims that it lacks."""
        if of.params:
            self.gradient_sums += [
                GradientSum(factor, of.source, self._loops, other, by_weight)
                for dim in dims
                for factor in dim
            ]

    def reduce(self, dims: Iterable[Dim], size: int) -> None:
        """Notes that a reduction to an array of some size ends dims."""
        self.reductions += [
            (factor, size * self._loops) for dim in dims for factor in dim
        ]

    def look_up(self, table: FactoredArray, dims: Iterable[Dim], size: int) -> None:
        """Notes that an array of some size is looked up along dims of a table."""
        if table.is_weight:
            self.contract(dims, (table,), size)
            self._lookups |= self._bits
        else:
            self.reduce(dims, size)

    def add_lookups(self, args: Iterable[FactoredArray]) -> None:
        """Notes that arrays are combined, if all of them were only looked up."""
        bits = [arg.history for arg in args if arg.history]
        if len(bits) > 1 and not any(each & ~self._lookups for each in bits):
            self.added_lookups.add(functools.reduce(operator.or_, bits))

    def loop(
        self, jaxpr: Any, args: Sequence[FactoredArray], length: int
    ) -> list[FactoredArray]:
        """Walks the body of a loop."""
        self._loops *= length
        try:
            return self.walk(jaxpr, args)
        finally:
            self._loops //= length


def _constant(var: Any) -> FactoredArray:
    shape = tuple(getattr(var.aval, "shape", ()))
    return FactoredArray(shape, fresh_dims(shape))


def _out_shapes(eqn: Equation) -> list[tuple[int, ...]]:
    return [tuple(getattr(var.aval, "shape", ())) for var in eqn.outvars]


def _unknown(eqn: Equation, args: Sequence[FactoredArray]) -> list[Dims]:
    reason = f"{eqn.primitive.name} is not followed"
    for arg in args:
        block(arg.dims, reason)
    return [fresh_dims(shape, reason) for shape in _out_shapes(eqn)]


# One handler per kind of operation. It gets the flow, the equation and the operands,
# and returns the dims of each result.

_Handler: TypeAlias = Callable[..., "list[Dims]"]


def _elementwise(flow: Flow, eqn: Equation, *args: FactoredArray) -> list[Dims]:
    shapes = _out_shapes(eqn)
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
    if x.shape == _out_shapes(eqn)[0]:
        return [x.dims]
    block(x.dims, "bitcast_convert_type takes its numbers apart")
    return [
        fresh_dims(shape, "it holds parts of numbers") for shape in _out_shapes(eqn)
    ]


def _pairwise(flow: Flow, eqn: Equation, *args: FactoredArray) -> list[Dims]:
    return [arg.dims for arg in args]


def _generated(flow: Flow, eqn: Equation, *args: FactoredArray) -> list[Dims]:
    return [fresh_dims(shape) for shape in _out_shapes(eqn)]


def _transposed(flow: Flow, eqn: Equation, x: FactoredArray) -> list[Dims]:
    return [tuple(x.dims[dim] for dim in eqn.params["permutation"])]


def _reshaped(flow: Flow, eqn: Equation, x: FactoredArray) -> list[Dims]:
    dims = regroup(x.dims, _out_shapes(eqn)[0])
    return [dims]


def _squeezed(flow: Flow, eqn: Equation, x: FactoredArray) -> list[Dims]:
    gone = {dim % len(x.shape) for dim in eqn.params["dimensions"]}
    return [tuple(dim for index, dim in enumerate(x.dims) if index not in gone)]


def _broadcast(flow: Flow, eqn: Equation, x: FactoredArray, *_: Any) -> list[Dims]:
    shape = _out_shapes(eqn)[0]
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
    shapes = _out_shapes(eqn)
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


def _matmul(
    flow: Flow, eqn: Equation, lhs: FactoredArray, rhs: FactoredArray
) -> list[Dims]:
    return _contraction(flow, eqn, lhs, rhs, eqn.params["dimension_numbers"])


def _grouped_matmul(
    flow: Flow, eqn: Equation, lhs: FactoredArray, rhs: FactoredArray, *_: Any
) -> list[Dims]:
    """Serves rows of the left that are multiplied with a matrix for their group."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    groups = numbers.rhs_group_dimensions
    block([rhs.dims[dim] for dim in groups], "rows are grouped by it")
    flow.experts += [factor for dim in groups for factor in rhs.dims[dim]]
    contracted, batch = numbers.dot_dimension_numbers
    if {*numbers.lhs_ragged_dimensions} & {*contracted[0], *batch[0]}:
        return _unknown(eqn, (lhs, rhs))
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
    if lhs.is_weight != rhs.is_weight:
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
    flow.contract(summed, (lhs, rhs), int(np.prod(_out_shapes(eqn)[0])))
    flow.sum_gradient(lhs, free[1], rhs.size, by_weight=rhs.is_weight)
    flow.sum_gradient(rhs, free[0], lhs.size, by_weight=lhs.is_weight)
    flow.together.append(result)
    return result


def _convolution(
    flow: Flow, eqn: Equation, lhs: FactoredArray, rhs: FactoredArray
) -> list[Dims]:
    numbers = eqn.params["dimension_numbers"]
    shape = _out_shapes(eqn)[0]
    (rows, channels, *image), (features, inputs, *window) = numbers[:2]
    block([lhs.dims[dim] for dim in image], "a convolution slides along it")
    block([rhs.dims[dim] for dim in window], WINDOW)
    result = list(fresh_dims(shape, "a convolution slides along it"))
    result[numbers[2][0]], result[numbers[2][1]] = lhs.dims[rows], rhs.dims[features]
    groups = eqn.params["feature_group_count"]
    if groups == lhs.shape[channels] == rhs.shape[features] != 1:  # depthwise
        link(lhs.dims[channels], rhs.dims[features])
        flow.sum_gradient(rhs, [lhs.dims[rows]], lhs.size, by_weight=False)
        return [tuple(result)]
    if groups * eqn.params["batch_group_count"] != 1:
        dims = [lhs.dims[channels], rhs.dims[features], rhs.dims[inputs]]
        block(dims, "a grouped convolution takes it apart")
        return [tuple(result)]
    link(lhs.dims[channels], rhs.dims[inputs])
    free = [lhs.dims[rows]], [rhs.dims[features]]
    summed = [lhs.dims[channels]]
    return [_product(flow, eqn, lhs, rhs, summed, free, tuple(result))]


WINDOW = "it is the window of a convolution"


def _gathered(
    flow: Flow, eqn: Equation, x: FactoredArray, indices: FactoredArray
) -> list[Dims]:
    numbers, shape = eqn.params["dimension_numbers"], _out_shapes(eqn)[0]
    sizes = eqn.params["slice_sizes"]
    shared = numbers.operand_batching_dims
    for dim, other in zip(shared, numbers.start_indices_batching_dims, strict=True):
        link(x.dims[dim], indices.dims[other])
    collapsed = set(numbers.collapsed_slice_dims)
    kept = [dim for dim in range(len(sizes)) if dim not in {*collapsed, *shared}]
    rows = iter(indices.dims[:-1])
    windows = iter(kept)
    result: list[Dim] = []
    for index in range(len(shape)):
        if index not in numbers.offset_dims:
            result.append(next(rows))
            continue
        dim = next(windows)
        is_whole = sizes[dim] == x.shape[dim]
        result.append(x.dims[dim] if is_whole else _part(x.dims[dim], sizes[dim]))
    looked_up = [x.dims[dim] for dim in sorted(collapsed)]
    flow.look_up(x, looked_up, int(np.prod(shape)))
    flow.together.append(tuple(result))
    return [tuple(result)]


def _part(dim: Dim, size: int, how: str = "slices take parts of it") -> Dim:
    """Returns a dim that holds a part of another one; neither can be cut."""
    block([dim], how)
    return fresh_dims((size,), how)[0]


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
    for shape in _out_shapes(eqn):
        pairs = zip(x.dims, x.shape, shape, strict=True)
        dims = [dim if a == b else _part(dim, b, how) for dim, a, b in pairs]
        results.append(tuple(dims))
    return results


def _pooled(flow: Flow, eqn: Equation, *args: FactoredArray) -> list[Dims]:
    """Serves windows that slide along some dims, perhaps to a result as long."""
    how = f"{eqn.primitive.name} slides along it"
    for dim, window in zip(args[0].dims, eqn.params["window_dimensions"], strict=True):
        if window != 1:
            block([dim], how)
    return _sliced(flow, eqn, args[0]) * len(_out_shapes(eqn))


def _written(
    flow: Flow, eqn: Equation, x: FactoredArray, update: FactoredArray, *_: Any
) -> list[Dims]:
    for dim, a, b in zip(x.dims, x.shape, range(len(x.shape)), strict=True):
        if a == update.shape[b]:
            link(dim, update.dims[b])
        else:
            block([dim, update.dims[b]], "an update writes parts of it")
    return [x.dims]


def _concatenated(flow: Flow, eqn: Equation, *args: FactoredArray) -> list[Dims]:
    along, how = eqn.params["dimension"], "arrays are joined along it"
    dims = list(args[0].dims)
    for arg in args:
        block([arg.dims[along]], how)
        for index, dim in enumerate(arg.dims):
            if index != along:
                link(dims[index], dim)
    dims[along] = fresh_dims((_out_shapes(eqn)[0][along],), how)[0]
    return [tuple(dims)]


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
    return [args[0].dims] * len(_out_shapes(eqn))


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
    return flow.walk(_jax.inner_jaxprs(eqn)[0], args)


def _scan(flow: Flow, eqn: Equation, args: list[FactoredArray]) -> list[FactoredArray]:
    params = eqn.params
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    length = params["length"]
    consts, rest = args[:num_consts], args[num_consts:]
    carry, stacked = rest[:num_carry], rest[num_carry:]
    block([x.dims[0] for x in stacked], STACKED)
    slices = [_at(x, x.shape[1:], x.dims[1:]) for x in stacked]
    carry = _carried(carry, args)
    results = flow.loop(
        params["jaxpr"].jaxpr, (*consts, *carry, *slices), max(1, length)
    )
    for before, after in zip(carry, results, strict=False):
        _link_all(before.dims, after.dims)
    loop = fresh_dims((length,), STACKED)
    stacks = [_at(x, (length, *x.shape), (*loop, *x.dims)) for x in results[num_carry:]]
    return [*results[:num_carry], *stacks]


STACKED = "a loop goes through it, one at a time"


def _while(flow: Flow, eqn: Equation, args: list[FactoredArray]) -> list[FactoredArray]:
    params = eqn.params
    first, second = params["cond_nconsts"], params["body_nconsts"]
    carry = _carried(args[first + second :], args)
    flow.walk(params["cond_jaxpr"].jaxpr, (*args[:first], *carry))
    body = params["body_jaxpr"].jaxpr
    results = flow.walk(body, (*args[first : first + second], *carry))
    for before, after in zip(carry, results, strict=True):
        _link_all(before.dims, after.dims)
    return results


def _conditional(
    flow: Flow, eqn: Equation, args: list[FactoredArray]
) -> list[FactoredArray]:
    first, *others = [
        flow.walk(branch.jaxpr, args[1:]) for branch in eqn.params["branches"]
    ]
    for results in others:
        for a, b in zip(first, results, strict=True):
            _link_all(a.dims, b.dims)
    return _carried(first, [x for results in (first, *others) for x in results])


def _carried(
    carry: Sequence[FactoredArray], args: Sequence[FactoredArray]
) -> list[FactoredArray]:
    """Returns what a loop carries: after the first round it depends on all."""
    params, of_inputs, history = 0, False, 0
    for arg in args:
        params |= arg.params
        of_inputs |= arg.of_inputs
        history |= arg.history
    return [FactoredArray(x.shape, x.dims, params, of_inputs, history) for x in carry]


def _at(x: FactoredArray, shape: tuple[int, ...], dims: Dims) -> FactoredArray:
    return FactoredArray(shape, dims, x.params, x.of_inputs, x.history)


_CALLS: dict[str, Callable[..., Sequence[FactoredArray]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _conditional,
}
_INLINED = """
    jit pjit closed_call core_call named_call checkpoint remat remat2 custom_jvp_call
    custom_vjp_call custom_vjp_call_jaxpr
"""
_CALLS |= dict.fromkeys(_INLINED.split(), _called)

_CASTS = frozenset(("convert_element_type", "copy", "copy_p", "reduce_precision"))

_KINDS: dict[_Handler, str] = {
    _elementwise: """
        abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e
        bessel_i1e cbrt ceil clamp clz complex conj convert_element_type copy copy_p
        cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
        igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to
        max min mul name ne neg nextafter not or polygamma population_count pow pvary
        real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
        shift_left shift_right_arithmetic shift_right_logical sharding_constraint sign
        sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta
    """,
    _bitcast: "bitcast_convert_type",
    _pairwise: "optimization_barrier device_put",
    _generated: """
        iota empty random_bits random_clone random_fold_in random_gamma random_seed
        random_split random_unwrap random_wrap rng_bit_generator rng_uniform
    """,
    _transposed: "transpose",
    _reshaped: "reshape",
    _squeezed: "squeeze",
    _broadcast: "broadcast_in_dim",
    _reduced: """
        argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod
        reduce_sum reduce_xor
    """,
    _matmul: "dot_general",
    _grouped_matmul: "ragged_dot_general",
    _convolution: "conv_general_dilated",
    _gathered: "gather",
    _scattered: "scatter scatter-add scatter-max scatter-min scatter-mul scatter_add "
    "scatter_max scatter_min scatter_mul scatter_sub scatter-sub",
    _cut: "slice dynamic_slice split",
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
