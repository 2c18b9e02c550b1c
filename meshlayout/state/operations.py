"""Runs a traced builder one operation at a time, on shards.

Compiling a whole builder into one program would change the last bits of the state: the
compiler fuses and reorders across operations. JAX without jit runs one compiled program
per operation, and so does this module, so that the values are the same to the bit. But
every value is sharded as what is made of it will be, chosen backwards from the results,
and freed after its last use. Equal operations share one program: all of them together
compile in a third of the CPU time of one large program.

Operations whose result depends on the order of a sum or on the blocking of a matrix
product (QR in an orthogonal initializer, say) run on replicated operands, because
sharded ones would give other bits.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from meshlayout import _jax, _jaxprs
from meshlayout._annotations import Equation
from meshlayout.arrays import copy_to_mesh
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh


def run_on_shards(
    jaxpr: Any, inputs: Sequence[ArrayLike], targets: Sequence[Layout], mesh: Mesh
) -> list[jax.Array]:
    """Runs a traced function; no two results share memory, so that all can be donated.

    Args:
        jaxpr: The function, as a closed jaxpr.
        inputs: The values of its arguments.
        targets: The layout of each result, of the same rank.
        mesh: The mesh.
    """
    inner, outputs = jaxpr.jaxpr, jaxpr.jaxpr.outvars
    variables, constants = (*inner.invars, *inner.constvars), (*inputs, *jaxpr.consts)
    given = dict(zip(variables, constants, strict=True))
    used = {var for var in outputs if not isinstance(var, Literal)}
    eqns: list[Equation] = []
    for eqn in reversed(inner.eqns):
        if used.intersection(eqn.outvars):
            used.update(_variables(eqn))
            eqns.insert(0, eqn)
    # On Explicit axes, operations need shardings as parameters, which a trace without a
    # mesh does not have.
    mesh = Mesh(_jax.with_auto_axes(mesh.jax_mesh))
    plan = _plan(mesh, outputs, targets, eqns)
    last_uses = dict.fromkeys(used, -1)
    for index, eqn in enumerate(eqns):
        last_uses.update(dict.fromkeys((*_variables(eqn), *eqn.outvars), index))
    values = {v: _placed(x, plan[v]) for v, x in given.items() if v in used}
    results: list[Any] = [None] * len(outputs)

    def finish(index: int) -> None:
        """Moves values that no later operation uses to the results, or frees them."""
        for var in [var for var in values if last_uses[var] == index]:
            value = values.pop(var)
            places = [place for place, out in enumerate(outputs) if out is var]
            for place in places:
                if place == places[-1] and var not in given:
                    results[place] = _jax.put(value, targets[place].sharding)
                else:
                    results[place] = copy_to_mesh(value, targets[place])

    finish(-1)
    for index, eqn in enumerate(eqns):
        operation = _Operation.of(eqn, plan, mesh)
        # Literals are operands as well, as without jit: the compiler would fold a
        # constant into the program, which can change the bits of the result.
        operands = [
            _jax.put(_literal(v) if isinstance(v, Literal) else values[v], sharding)
            for v, sharding in zip(eqn.invars, operation.shardings_in, strict=True)
        ]
        with jax.disable_jit(disable=False), _jax.no_mesh():
            made = operation.program()(*operands)
        values.update(zip(eqn.outvars, made, strict=True))
        del operands, made
        finish(index)
    for place, out in enumerate(outputs):
        if isinstance(out, Literal):
            results[place] = copy_to_mesh(_literal(out), targets[place])
    return results


def finest_layout(mesh: Mesh, shape: Sequence[int]) -> Layout:
    """Returns a layout that shards an array as finely as its shape allows.

    Axes that no dim can take are left out. The search is greedy: large axes go first,
    each to the largest dim that it divides.
    """
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
    mesh: Mesh,
    outputs: Sequence[Any],
    targets: Sequence[Layout],
    eqns: Sequence[Equation],
) -> dict[Any, NamedSharding]:
    """Returns the shardings of all values, chosen backwards from the results."""
    plan: dict[Any, NamedSharding] = {}

    def choose(var: Any, specs: PartitionSpec | Sequence[Any]) -> None:
        # JAX does not shard empty arrays, or fails.
        spec = PartitionSpec(*specs) if math.prod(var.aval.shape) else PartitionSpec()
        plan[var] = NamedSharding(mesh.jax_mesh, spec)

    def finest(shape: Sequence[int]) -> Sequence[Any]:
        return tuple(finest_layout(mesh, shape).sharding.spec)

    for var, target in zip(outputs, targets, strict=True):
        if not isinstance(var, Literal) and var not in plan:
            choose(var, target.sharding.spec)
    for eqn in reversed(eqns):
        before = None
        for out in eqn.outvars:
            shape = out.aval.shape
            if out not in plan:
                choose(out, finest(shape))
            if eqn.primitive.name in _REORDERINGS:
                # To move the result afterwards is cheap; inside of the operation, XLA
                # may unshard it.
                rows = (*finest(shape[:-1]), *[None] * len(shape))[: len(shape) - 1]
                columns = (*[None] * (len(shape) - 1), *finest(shape[-1:]))
                for specs in (tuple(plan[out].spec), rows, columns):
                    before = _operand_specs(eqn, mesh, specs)
                    if before is not None:
                        choose(out, specs)
                        break
            for var in _variables(eqn):
                specs = plan[out].spec if var.aval.shape == shape else before
                if var not in plan:
                    choose(var, finest(var.aval.shape) if specs is None else specs)
    return plan


# Operations that keep the order of elements in memory, or join arrays.
_REORDERINGS = ("reshape", "squeeze", "expand_dims", "concatenate", "stack")


def _operand_specs(
    eqn: Equation, mesh: Mesh, specs: Sequence[Any]
) -> Sequence[Any] | None:
    """Returns how operands must be sharded so that no element has to move.

    Returns None if every sharding moves elements.
    """
    shape, out_shape = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    specs = [*specs, *[None] * (len(out_shape) - len(specs))]
    if eqn.primitive.name in ("concatenate", "stack"):
        dim = eqn.params.get("dimension", eqn.params.get("axis"))
        rest = specs[: len(shape)] if len(shape) == len(specs) else None
        return None if specs[dim] else rest or [*specs[:dim], *specs[dim + 1 :]]
    # A sharded dim of the result corresponds to the operand's dim that begins after the
    # same number of runs.
    before: list[Any] = [None] * len(shape)
    for out_dim, spec in enumerate(specs):
        if spec is None:
            continue
        axes = spec if isinstance(spec, tuple) else (spec,)
        num_shards = math.prod(mesh.shape[axis] for axis in axes)
        fitting = [
            dim
            for dim, size in enumerate(shape)
            if math.prod(shape[:dim]) == math.prod(out_shape[:out_dim])
            and size % num_shards == 0
            and before[dim] is None
        ]
        if not fitting:
            return None
        before[fitting[-1]] = spec
    return before


@dataclass(frozen=True)
class _Operation:
    """One operation; equal to those that compile to one program.

    Initializers repeat the same few operations for every layer of a kind, so a state of
    hundreds of leaves needs a few dozen programs.
    """

    eqn: Equation = field(compare=False)
    primitive: Any
    params: tuple[tuple[str, Any], ...]
    types: tuple[Any, ...]
    shardings_in: tuple[NamedSharding, ...]
    shardings_out: tuple[NamedSharding, ...]

    @classmethod
    def of(
        cls, eqn: Equation, plan: dict[Any, NamedSharding], mesh: Mesh
    ) -> "_Operation":
        """Returns an operation with shardings that keep its bits."""
        whole = NamedSharding(mesh.jax_mesh, PartitionSpec())
        sharded = _variables(eqn) if _keeps_bits_on_shards(eqn) else ()
        return cls(
            eqn,
            eqn.primitive,
            tuple(sorted(eqn.params.items(), key=lambda item: item[0])),
            tuple((v.aval.shape, v.aval.dtype, v.aval.weak_type) for v in eqn.invars),
            tuple(plan[v] if v in sharded else whole for v in eqn.invars),
            tuple(plan[v] for v in eqn.outvars),
        )

    def program(self) -> Any:
        """Returns the compiled program of this operation and all that are equal."""
        try:
            hash(self)
        except TypeError:  # a parameter that cannot be hashed: a program of its own
            return _compile.__wrapped__(self)
        return _compile(self)


@functools.lru_cache(maxsize=1024)
def _compile(operation: _Operation) -> Any:
    eqn = operation.eqn
    operands = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=weak_type)
        for (shape, dtype, weak_type), sharding in zip(
            operation.types, operation.shardings_in, strict=True
        )
    ]

    def apply(*operands: jax.Array) -> list[jax.Array]:
        if eqn.primitive.name == "sharding_constraint":  # the layout map decides
            return list(operands)
        results = _jaxprs.apply_operation(eqn, list(operands))
        if _keeps_bits_on_shards(eqn):
            return results
        # Without this, the compiler would shard the operation like its result.
        whole = [
            NamedSharding(s.mesh, PartitionSpec()) for s in operation.shardings_out
        ]
        return list(map(_jax.constrain, results, whole))

    jitted = jax.jit(apply, out_shardings=list(operation.shardings_out))
    # Neither the user's `disable_jit` nor a mesh that is set may change the program.
    with jax.disable_jit(disable=False), _jax.no_mesh():
        return jitted.lower(*operands).compile()


def _placed(value: ArrayLike, sharding: NamedSharding) -> jax.Array:
    """Returns a value of this process, placed on the mesh."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if not isinstance(value, jax.Array):
        value = np.asarray(value)  # in JAX 0.7 also constants of a class of its own
    # JAX 0.7 cannot move an array of one process to the devices of several.
    return copy_to_mesh(value, Layout.of(sharding, np.ndim(value)))


def _variables(eqn: Equation) -> list[Any]:
    return [var for var in eqn.invars if not isinstance(var, Literal)]


def _literal(var: Any) -> ArrayLike:
    if isinstance(var.val, jax.Array):
        return var.val
    return np.asarray(var.val, dtype=var.aval.dtype)


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
_CONTAINER_NAMES = """
jit pjit closed_call core_call custom_jvp_call custom_vjp_call remat2 checkpoint scan
while cond
"""
_SAFE = frozenset(_SAFE_NAMES.split())
_CONTAINERS = frozenset(_CONTAINER_NAMES.split())


def _keeps_bits_on_shards(eqn: Equation) -> bool:
    """Returns whether an operation computes the same bits on shards as unsharded."""
    name = eqn.primitive.name
    inner = (e for jaxpr in _jax.inner_jaxprs(eqn) for e in jaxpr.eqns)
    is_container = name in _CONTAINERS
    return name in _SAFE or (is_container and all(map(_keeps_bits_on_shards, inner)))
