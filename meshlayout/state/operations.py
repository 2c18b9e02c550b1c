"""Runs a traced builder one operation at a time, on shards.

Compiling a whole builder into one program would change the last bits of the state: the
compiler fuses and reorders across operations. So operations run one by one, as in JAX
without jit, but every value is sharded like the results made from it, and freed after
its last use. All these programs together compile in a third of the CPU time of one
large program. Operations whose result depends on the order of a sum (QR in an
orthogonal initializer, say) run on replicated operands.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from meshlayout import _jax
from meshlayout._annotations import Equation
from meshlayout.arrays import copy_to_mesh
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh


def run_on_shards(
    jaxpr: Any, inputs: Sequence[ArrayLike], targets: Sequence[Layout], mesh: Mesh
) -> list[jax.Array]:
    """Runs a closed jaxpr; no two results share memory, so that all can be donated."""
    inner = jaxpr.jaxpr
    # On Explicit axes, operations would need shardings as parameters of the trace.
    mesh = Mesh(jax.sharding.Mesh(mesh.devices, mesh.axis_names))
    whole = NamedSharding(mesh.jax_mesh, PartitionSpec())
    plan, schedule = _plan(inner, targets, mesh)
    values: dict[Any, jax.Array] = {}
    results: list[Any] = [None] * len(targets)

    def finish(variables: Sequence[Any]) -> None:
        # Nothing uses these values any more: they become results, or are freed.
        for var in variables:
            value = values.pop(var)
            copies = [index for index, out in enumerate(inner.outvars) if out is var]
            for index in copies[:-1]:
                results[index] = copy_to_mesh(value, targets[index])
            for index in copies[-1:]:
                results[index] = _jax.put(value, targets[index].sharding)

    # Copies: results must not share memory with the caller's arrays.
    variables = (*inner.invars, *inner.constvars)
    for var, x in zip(variables, (*inputs, *jaxpr.consts), strict=True):
        if var in plan:
            layout = Layout.of(plan[var], len(var.aval.shape))
            values[var] = copy_to_mesh(_array(x), layout)
    for index, (out, target) in enumerate(zip(inner.outvars, targets, strict=True)):
        if isinstance(out, Literal):
            results[index] = copy_to_mesh(_array(out.val, out.aval), target)
    # Neither the user's `disable_jit` nor a mesh that is set may change the programs.
    with jax.disable_jit(disable=False), _jax.no_mesh():
        for eqn, last_used in schedule:
            # A shard may be one element, which XLA divides by a scalar; several, it
            # multiplies by the scalar's inverse.
            sizes = [math.prod(x.aval.shape) for x in (*eqn.invars, *eqn.outvars)]
            is_safe = _keeps_bits_on_shards(eqn) and not 1 < max(sizes) <= mesh.size
            # Literals are operands as well, as without jit: the compiler would fold a
            # constant into the program, which can change the bits of the result.
            operands: list[Any] = []
            for var in eqn.invars:
                is_literal = isinstance(var, Literal)
                x = _array(var.val, var.aval) if is_literal else values[var]
                operands.append(x if is_safe and not is_literal else _jax.put(x, whole))
            shardings = tuple(plan[out] for out in eqn.outvars)
            params = tuple(sorted(eqn.params.items()))
            program = _program(eqn.primitive, params, eqn.ctx, shardings, is_safe)
            values.update(zip(eqn.outvars, program(*operands), strict=True))
            del operands
            finish(last_used)
        finish([*values])  # inputs that are results as they are
    return results


def finest_layout(mesh: Mesh, shape: Sequence[int]) -> Layout:
    """Returns a layout that shards an array as finely as its shape allows."""
    entries: list[tuple[str, ...]] = [()] * len(shape)
    sizes = list(shape)
    for axis, axis_size in sorted(mesh.shape.items(), key=lambda item: -item[1]):
        fitting = [dim for dim, size in enumerate(sizes) if size % axis_size == 0]
        if fitting and axis_size > 1:
            dim = max(fitting, key=lambda fit: sizes[fit])
            entries[dim] = (*entries[dim], axis)
            sizes[dim] //= axis_size
    return Layout(entries, mesh)


def _plan(
    jaxpr: Any, targets: Sequence[Layout], mesh: Mesh
) -> tuple[dict[Any, NamedSharding], list[tuple[Equation, list[Any]]]]:
    """Chooses the shardings of all values, backwards from the results.

    Also returns its operations, each with the values that no later one uses.
    """
    plan: dict[Any, NamedSharding] = {}

    def choose(var: Any, specs: Any) -> None:
        # JAX does not shard empty arrays, or fails.
        spec = PartitionSpec(*(specs if math.prod(var.aval.shape) else ()))
        plan[var] = NamedSharding(mesh.jax_mesh, spec)

    def finest(shape: Sequence[int]) -> list[Any]:
        specs = finest_layout(mesh, shape).sharding.spec
        return [*specs, *[None] * (len(shape) - len(specs))]

    for var, target in zip(jaxpr.outvars, targets, strict=True):
        if not isinstance(var, Literal) and var not in plan:
            choose(var, target.sharding.spec)
    schedule: list[tuple[Equation, list[Any]]] = []
    used = set()
    for eqn in reversed(jaxpr.eqns):
        if plan.keys().isdisjoint(eqn.outvars):
            continue
        operands = [var for var in eqn.invars if not isinstance(var, Literal)]
        # In an order that is the same on all processes.
        variables = dict.fromkeys((*eqn.outvars, *operands))
        schedule.append((eqn, [var for var in variables if var not in used]))
        used.update(variables)
        before = None
        for out in eqn.outvars:
            shape = out.aval.shape
            if out not in plan:
                choose(out, finest(shape))
            if eqn.primitive.name in _REORDERINGS:
                # Moved afterwards, which is cheap; inside, XLA may unshard the result.
                rows = [*finest(shape[:-1]), None][: len(shape)]
                columns = [None] * (len(shape) - 1) + finest(shape[-1:])
                for specs in ([*plan[out].spec], rows, columns):
                    before = _operand_specs(eqn, mesh, specs)
                    if before is not None:
                        choose(out, specs)
                        break
            for var in operands:
                specs = plan[out].spec if var.aval.shape == shape else before
                if var not in plan:
                    choose(var, finest(var.aval.shape) if specs is None else specs)
    return plan, schedule[::-1]


# Operations that keep the order of elements in memory, or join arrays.
_REORDERINGS = ("reshape", "squeeze", "expand_dims", "concatenate")


def _operand_specs(eqn: Equation, mesh: Mesh, specs: list[Any]) -> list[Any] | None:
    """Returns how operands must be sharded so that no element has to move, or None."""
    if eqn.primitive.name == "concatenate":
        return None if any(specs[eqn.params["dimension"] :][:1]) else specs
    shape, out_shape = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    # A sharded dim corresponds to the operand's dim that begins after as many runs.
    starts = [math.prod(shape[:dim]) for dim in range(len(shape))]
    before: list[Any] = [None] * len(shape)
    for out_dim, spec in enumerate(specs):
        if spec is not None:
            axes = spec if isinstance(spec, tuple) else (spec,)
            num_shards = math.prod(mesh.shape[axis] for axis in axes)
            start = math.prod(out_shape[:out_dim])
            dims = [d for d, run in enumerate(starts) if run == start and not before[d]]
            fitting = [dim for dim in dims if shape[dim] % num_shards == 0]
            if not fitting:
                return None
            before[fitting[-1]] = spec
    return before


@functools.lru_cache(maxsize=1024)
def _program(
    primitive: Any,
    params: tuple[tuple[str, Any], ...],
    context: Any,
    shardings: tuple[NamedSharding, ...],
    is_safe: bool,  # noqa: FBT001
) -> Any:
    def apply(*operands: jax.Array) -> list[jax.Array]:
        if primitive.name == "sharding_constraint":  # the layout map decides
            return list(operands)
        results = _jax.apply_operation(primitive, dict(params), context, operands)
        if is_safe:
            return results
        # Without this, the compiler would shard the operation like its result.
        whole = [NamedSharding(s.mesh, PartitionSpec()) for s in shardings]
        return list(map(_jax.constrain, results, whole))

    return jax.jit(apply, out_shardings=list(shardings))


def _array(value: Any, aval: Any = None) -> ArrayLike:
    # Also of a class that JAX 0.7 has for constants.
    dtype = None if aval is None else aval.dtype
    return value if isinstance(value, jax.Array) else np.asarray(value, dtype)


# Operations that compute the same bits for each element, however the array is sharded:
# elementwise ones, moves of elements, and counter-based random numbers. A reduction is
# not among them: its partial sums would be added in another order.
_SAFE_NAMES = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type
broadcast_in_dim cbrt ceil clamp clz complex concatenate conj convert_element_type copy
copy_p cos cosh digamma div dynamic_slice dynamic_update_slice empty eq erf erf_inv erfc
exp exp2 expand_dims expm1 floor full gather ge gt imag integer_pow iota is_finite le
lgamma log log1p logistic lt max min mul ne neg nextafter not or optimization_barrier
pad population_count pow random_bits random_clone random_fold_in random_seed
random_split random_unwrap random_wrap real reduce_precision rem reshape rev round rsqrt
select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign
sin sinh slice split sqrt square squeeze stack stop_gradient sub tan tanh threefry2x32
tile transpose unstack xor
"""
_SAFE = frozenset(_SAFE_NAMES.split())
_CONTAINERS = {
    *("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"),
    *("remat2", "checkpoint", "scan", "while", "cond"),
}


def _keeps_bits_on_shards(eqn: Equation) -> bool:
    if eqn.primitive.name not in _CONTAINERS:
        return eqn.primitive.name in _SAFE
    inner = (e for jaxpr in _jax.inner_jaxprs(eqn) for e in jaxpr.eqns)
    return all(map(_keeps_bits_on_shards, inner))
