"""How arrays are sharded during creation without changing a bit of their values.

Initial values must not depend on the mesh. An array computed in shards has the same
bits as the unsharded one if its operations are elementwise or only move elements, and
if its shards fill the compiler's vectors: XLA's CPU compiler runs the remainder of a
loop, too short to fill a vector, as scalar code that may round differently. Compiling a
whole builder into one program would change bits, too, and creating everything unsharded
first would take too much memory. Hence one operation at a time, in a sharding chosen
backwards from its uses (`ShardingPlan`), the finest one if nothing else is requested.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _jax
from meshlayout._annotations import DType, Equation
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh


# Shards of a multiple of this many elements fill the vectors of every CPU (AVX-512:
# 16 float32).
_VECTOR = 16
# Arrays up to this size are created unsharded if their shards would have other bits.
_SMALL_BYTES = 512 * 1024


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


def bit_exact_sharding(
    sharding: NamedSharding, shape: tuple[int, ...], dtype: DType, mesh: Mesh
) -> NamedSharding:
    """Returns a sharding in which every element has the bits of the unsharded array.

    It is the requested sharding if that preserves the bits; else replication for small
    arrays, and another fine sharding for large ones. Large arrays that no sharding
    preserves keep the requested one: unsharded, they might not fit into memory.

    Args:
        sharding: The requested sharding.
        shape: The shape of the array.
        dtype: Its dtype.
        mesh: The mesh of the sharding, with Auto axes.
    """
    replicated = NamedSharding(mesh.jax_mesh, PartitionSpec())
    if not math.prod(shape):  # JAX does not shard empty arrays, or fails
        return replicated
    # Only on CPUs does XLA run the remainder of a loop as other code.
    if mesh.platform != "cpu" or preserves_bits(sharding, shape):
        return sharding
    if not is_large(shape, dtype):
        return replicated
    specs = [*_finest_on_one_side(mesh, shape), finest_layout(mesh, shape).specs]
    shardings = [Layout(entries, mesh).sharding for entries in specs]
    exact = [other for other in shardings if preserves_bits(other, shape)]
    finest = min(
        [*exact, replicated], key=lambda other: math.prod(other.shard_shape(shape))
    )
    return sharding if finest.is_fully_replicated else finest


def _finest_on_one_side(mesh: Mesh, shape: Sequence[int]) -> list[list[Any]]:
    """Returns the finest specs that leave the last dim, or all others, unsharded."""
    return [
        [*finest_layout(mesh, shape[:-1]).specs, None],
        [*[None] * (len(shape) - 1), *finest_layout(mesh, shape[-1:]).specs],
    ]


def is_large(shape: Sequence[int], dtype: DType) -> bool:
    """Returns whether an array is too large to exist unsharded, even temporarily."""
    return math.prod(shape) * _jax.itemsize(dtype) > _SMALL_BYTES


def preserves_bits(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    """Returns whether separately computed shards have the bits of the whole array."""
    if sharding.is_fully_replicated:
        return True
    shard = sharding.shard_shape(shape)
    # XLA divides by a broadcast array with other code than by one that is not, and in a
    # shard of size 1 nothing is broadcast.
    if any(size == 1 < whole for size, whole in zip(shard, shape, strict=True)):
        return False
    if shard[-1] != shape[-1]:
        return shard[-1] % _VECTOR == 0
    return math.prod(shard) % _VECTOR == 0


# Operations of a traced function (`eqn`s) and their values (`var`s).


class ShardingPlan:
    """The shardings of a traced function's values, chosen backwards from its results.

    Args:
        mesh: The mesh, with Auto axes.
        outputs: The results of the function.
        targets: The layout of each result.
        eqns: The operations, the last one first.
    """

    def __init__(
        self,
        mesh: Mesh,
        outputs: Sequence[Any],
        targets: Sequence[Layout],
        eqns: Iterable[Any],
    ) -> None:
        self._mesh = mesh
        self._shardings: dict[Any, NamedSharding] = {}
        for var, target in zip(outputs, targets, strict=True):
            if not is_literal(var):
                self._shardings.setdefault(var, self._exact(var, target.specs))
        for eqn in eqns:
            self._choose_result(eqn)
            for out in eqn.outvars:
                self._choose_operands(eqn, out)

    def __getitem__(self, var: Any) -> NamedSharding:
        """Returns the sharding in which a value is created."""
        if is_literal(var):
            return NamedSharding(self._mesh.jax_mesh, PartitionSpec())
        if var not in self._shardings:
            finest = finest_layout(self._mesh, var.aval.shape)
            self._shardings[var] = self._exact(var, finest.specs)
        return self._shardings[var]

    def _choose_result(self, eqn: Equation) -> None:
        """Gives the result of a reordering a sharding that its operand can have, too.

        Moving the result afterwards is cheap; inside the operation, XLA may unshard it.
        """
        operands = [var for var in eqn.invars if not is_literal(var)]
        if eqn.primitive.name not in _REORDERINGS or not operands:
            return
        (out,) = eqn.outvars
        finest = _finest_on_one_side(self._mesh, out.aval.shape)
        for specs in (tuple(self[out].spec), *finest):
            sharding = self._exact(out, specs)
            if _operand_specs(eqn, sharding) is not None:
                self._shardings[out] = sharding
                return

    def _choose_operands(self, eqn: Equation, out: Any) -> None:
        """Shards operands like the result, if shapes agree or can be traced back."""
        sharding = self[out]
        for var in eqn.invars:
            if is_literal(var) or var in self._shardings:
                continue
            if var.aval.shape == out.aval.shape:
                self._shardings[var] = sharding
            elif (specs := _operand_specs(eqn, sharding)) is not None:
                self._shardings[var] = self._exact(var, specs)

    def _exact(self, var: Any, specs: Sequence[Any]) -> NamedSharding:
        sharding = Layout(specs, self._mesh).sharding
        return bit_exact_sharding(sharding, var.aval.shape, var.aval.dtype, self._mesh)


def is_literal(var: Any) -> bool:
    """Returns whether a value of a traced function is a literal constant."""
    return hasattr(var, "val")


_REORDERINGS = ("reshape", "squeeze", "expand_dims", "concatenate", "stack")


def _operand_specs(eqn: Equation, sharding: NamedSharding) -> list[Any] | None:
    """Returns how an operand must be sharded so that no element has to move.

    Returns None for operations of other kinds, and if every sharding moves elements.
    """
    name, shape = eqn.primitive.name, eqn.invars[0].aval.shape
    specs = [*sharding.spec, *[None] * (eqn.outvars[0].aval.ndim - len(sharding.spec))]
    if name == "transpose":
        return [specs[dim] for dim in np.argsort(eqn.params["permutation"])]
    if name == "broadcast_in_dim":
        dims = zip(eqn.params["broadcast_dimensions"], shape, strict=True)
        return [specs[dim] if size > 1 else None for dim, size in dims]
    if name == "concatenate":
        return None if specs[eqn.params["dimension"]] else specs
    if name == "stack":
        return None if specs.pop(eqn.params["axis"]) else specs
    if name not in _REORDERINGS:
        return None
    # A reshape keeps the order in memory: a sharded dim of the result corresponds to
    # the operand's dim that begins after the same number of runs.
    before: list[Any] = [None] * len(shape)
    starts = _starts(shape)
    for spec, start in zip(specs, _starts(eqn.outvars[0].aval.shape), strict=True):
        if spec is None:
            continue
        axes = spec if isinstance(spec, tuple) else (spec,)
        num_shards = math.prod(sharding.mesh.shape[axis] for axis in axes)
        fitting = [
            dim
            for dim, size in enumerate(shape)
            if starts[dim] == start and size % num_shards == 0 and before[dim] is None
        ]
        if not fitting:
            return None
        before[fitting[-1]] = spec
    return before


def _starts(shape: Sequence[int]) -> list[int]:
    """Returns, for each dim, the product of the sizes of the dims before it."""
    return [math.prod(shape[:dim]) for dim in range(len(shape))]


# Operations that compute the same bits for each element, however the array is sharded:
# elementwise ones, moves of elements, and counter-based random numbers. A reduction is
# not among them: its partial sums would be added in another order.
_SAFE_NAMES = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type
broadcast_in_dim cbrt ceil clamp clz complex concatenate conj
convert_element_type copy copy_p cos cosh digamma div dynamic_slice
dynamic_update_slice empty eq erf erf_inv erfc exp exp2 expand_dims expm1 floor
full gather ge gt imag integer_pow iota is_finite le lgamma log log1p logistic
lt max min mul ne neg nextafter not or optimization_barrier pad population_count
pow random_bits random_clone random_fold_in random_seed random_split
random_unwrap random_wrap real reduce_precision rem reshape rev round rsqrt
select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh
slice split sqrt square squeeze stack stop_gradient sub tan tanh threefry2x32 tile
transpose unstack xor
"""
_CONTAINER_NAMES = """
jit pjit closed_call core_call custom_jvp_call custom_vjp_call remat2 scan while cond
"""
_SAFE = frozenset(_SAFE_NAMES.split())
_CONTAINERS = frozenset(_CONTAINER_NAMES.split())


def is_bit_exact_on_shards(eqn: Equation) -> bool:
    """Returns whether an operation computes the same bits on shards as unsharded."""
    name = eqn.primitive.name
    if name in _SAFE:
        return True
    return name in _CONTAINERS and all(
        is_bit_exact_on_shards(inner)
        for jaxpr in _jax.inner_jaxprs(eqn)
        for inner in jaxpr.eqns
    )


# Operations whose bodies JAX runs one operation at a time outside jit.
_OPENED = ("remat2", "remat", "checkpoint", "custom_jvp_call", "custom_vjp_call")


class InlinedVar:
    """A variable of an inlined body: each copy of the body has its own."""

    def __init__(self, aval: Any) -> None:
        self.aval = aval


def inlined(
    eqns: Iterable[Any], names: dict[Any, Any], consts: dict[Any, Any]
) -> Iterator[Any]:
    """Yields operations, with the bodies of remat and custom derivatives inlined.

    Args:
        eqns: The operations of a jaxpr.
        names: Filled with the new variable for each old one.
        consts: Filled with the values of the constants of inlined bodies.
    """
    for eqn in eqns:
        invars = [_renamed(var, names) for var in eqn.invars]
        if eqn.primitive.name == "sharding_constraint":
            # The layout map decides; a constraint would be computed unsharded.
            names[eqn.outvars[0]] = invars[0]
            continue
        if eqn.primitive.name not in _OPENED:
            outvars = [InlinedVar(var.aval) for var in eqn.outvars]
            names.update(zip(eqn.outvars, outvars, strict=True))
            yield eqn.replace(invars=invars, outvars=outvars)
            continue
        params = eqn.params
        closed = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
        body = getattr(closed, "jaxpr", closed)
        inner = dict(zip(body.invars, invars, strict=True))
        body_consts = getattr(closed, "consts", ())
        for var, value in zip(body.constvars, body_consts, strict=False):
            inner[var] = InlinedVar(var.aval)
            consts[inner[var]] = value
        yield from inlined(body.eqns, inner, consts)
        for out, var in zip(eqn.outvars, body.outvars, strict=True):
            names[out] = _renamed(var, inner)


def _renamed(var: Any, names: Mapping[Any, Any]) -> Any:
    return var if is_literal(var) else names.get(var, var)
