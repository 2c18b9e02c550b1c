"""The walk over a jaxpr, from its arguments to its results, inner jaxprs in place.

Each operation gives its results the factors that it ties to those of its operands, and
what they depend on. What a loop carries depends value by value, not each on all: else a
counter would make activations of the weights that it picks.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from meshlayout import _jax
from meshlayout._annotations import Equation
from meshlayout.parallel.factors import (
    Value,
    block,
    fresh_dims,
    link_all,
    made_of,
)
from meshlayout.parallel.flow import Flow, union
from meshlayout.parallel.operations import OPERATIONS, STACKED, out_shapes, unknown


_CASTS = ("convert_element_type", "copy", "reduce_precision")


def walk(flow: Flow, jaxpr: Any, args: Sequence[Value]) -> list[Value]:
    """Walks a jaxpr from its arguments, notes in a flow, and returns its results."""
    values: dict[Any, Value] = dict(zip(jaxpr.invars, args, strict=True))
    values |= {constant: _constant(constant) for constant in jaxpr.constvars}

    def read(var: Any) -> Value:
        return _constant(var) if isinstance(var, Literal) else values[var]

    for eqn in jaxpr.eqns:
        call = _CALLS.get(eqn.primitive.name, _operation)
        results = call(flow, eqn, list(map(read, eqn.invars)))
        values.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _constant(var: Any) -> Value:
    shape = tuple(getattr(var.aval, "shape", ()))
    return Value(shape, fresh_dims(shape))


# These take whole values and return whole values.


def _operation(flow: Flow, eqn: Equation, args: list[Value]) -> list[Value]:
    name = eqn.primitive.name
    flow.new_bits = 0
    flow.itemsize = max([1, *(_jax.itemsize(v.aval.dtype) for v in eqn.outvars[:1])])
    dims = OPERATIONS.get(name, unknown)(flow, eqn, *args)
    # A slice of a weight is a weight, whatever says where it begins.
    sources = args[:1] if name == "dynamic_slice" else args
    origin = args[0].source if name in _CASTS else None
    return [
        made_of(sources, shape, each, flow.new_bits, origin)
        for shape, each in zip(out_shapes(eqn), dims, strict=True)
    ]


def _called(flow: Flow, eqn: Equation, args: list[Value]) -> list[Value]:
    return walk(flow, _jax.inner_jaxprs(eqn)[0], args)


def _scan(flow: Flow, eqn: Equation, args: list[Value]) -> list[Value]:
    num_consts, num_carry = _jax.scan_counts(eqn)
    length = eqn.params["length"]
    (body,) = _jax.inner_jaxprs(eqn)
    consts, rest = args[:num_consts], args[num_consts:]
    carry, stacked = rest[:num_carry], rest[num_carry:]
    block([x.dims[0] for x in stacked], STACKED)
    slices = [made_of([x], x.shape[1:], x.dims[1:]) for x in stacked]
    results = _looped(flow, body, consts, carry, slices, max(1, length))
    loop = fresh_dims((length,), STACKED)
    stacks = [
        made_of([x], (length, *x.shape), (*loop, *x.dims)) for x in results[num_carry:]
    ]
    return [*results[:num_carry], *stacks]


def _while(flow: Flow, eqn: Equation, args: list[Value]) -> list[Value]:
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    consts, carry = args[first : first + second], args[first + second :]
    walk(flow, _jaxpr(eqn.params["cond_jaxpr"]), (*args[:first], *carry))
    # How often is not known here.
    return _looped(flow, _jaxpr(eqn.params["body_jaxpr"]), consts, carry, [], 1)


def _looped(
    flow: Flow,
    body: Any,
    consts: list[Value],
    carry: list[Value],
    slices: list[Value],
    length: int,
) -> list[Value]:
    """Walks the body of a loop, when it is known what each carried value depends on."""
    uses = [_jax.operands_of(body, index) for index in range(len(carry))]
    while True:
        args = [*consts, *carry, *slices]
        after = [
            made_of([x, *itertools.compress(args, used)], x.shape, x.dims)
            for x, used in zip(carry, uses, strict=True)
        ]
        if list(map(_dependence, after)) == list(map(_dependence, carry)):
            break
        carry = after
    read = union(arg.weights for arg in args)
    constrained = {
        out_shapes(eqn)[0]
        for eqn in _jax.equations(body)
        if eqn.primitive.name == "sharding_constraint"
    }
    flow.loops += [
        (x.shape, read)
        for x, var in zip(carry, body.outvars, strict=False)
        if x.of_inputs and len(x.shape) > 1 and x.shape not in constrained
        if jnp.issubdtype(var.aval.dtype, jnp.inexact)
    ]
    with flow.repeated(length):
        results = walk(flow, body, args)
    for x, result in zip(carry, results, strict=False):
        link_all(x.dims, result.dims)
    return results


def _dependence(x: Value) -> tuple[int, bool, int]:
    return x.params, x.of_inputs, x.history


def _jaxpr(closed: Any) -> Any:
    return getattr(closed, "jaxpr", closed)  # they are not closed in jax 0.12


def _conditional(flow: Flow, eqn: Equation, args: list[Value]) -> list[Value]:
    branches = [walk(flow, inner, args[1:]) for inner in _jax.inner_jaxprs(eqn)]
    results: list[Value] = []
    for x, *others in zip(*branches, strict=True):
        for other in others:
            link_all(x.dims, other.dims)
        # It depends on what the branches make it of.
        results.append(made_of([x, *others], x.shape, x.dims))
    return results


_INLINED = """
    jit pjit closed_call core_call named_call checkpoint remat remat2 custom_jvp_call
    custom_vjp_call custom_vjp_call_jaxpr composite
"""
_CALLS: dict[str, Callable[..., list[Value]]] = {
    **dict.fromkeys(_INLINED.split(), _called),
    "scan": _scan,
    "while": _while,
    "cond": _conditional,
}
