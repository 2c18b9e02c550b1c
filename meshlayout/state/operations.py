"""Runs a traced builder one operation at a time, on shards.

Compiling a whole builder into one program would change the last bits of what it
makes: the compiler fuses and re-orders across operations. JAX without jit runs one
compiled program per operation, and so does this, so that the values are the same to
the bit. But every array is made in the layout it will have, and is freed or
overwritten with its last use, so that no device ever holds more than its shards.

Operations whose result depends on the order of a sum or on the blocking of a matrix
product (QR in an orthogonal initializer, say) run on replicated operands, because
sharded ones would give other bits.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _jax
from meshlayout._cuts import spread, tidy
from meshlayout.mesh import Mesh


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on each device while a state is made, read off the compiled programs.

    Attributes:
        state_bytes: The finished state's shards.
        peak_bytes: The most that is held at any time, the state's shards included.
    """

    state_bytes: int
    peak_bytes: int


@dataclass
class _Step:
    """One operation: what it reads, makes, and is done with."""

    eqn: Any
    inputs: list[Any]
    outputs: list[Any]
    shardings_in: list[NamedSharding]
    shardings_out: list[NamedSharding]
    donated: tuple[int, ...]
    dead: list[Any]
    is_whole: bool


class Operations:
    """The operations of a traced function, planned on a mesh.

    Args:
        jaxpr: The traced function, closed.
        targets: The sharding of each of its results.
        mesh: The mesh.
    """

    def __init__(
        self, jaxpr: Any, targets: Sequence[NamedSharding], mesh: Mesh
    ) -> None:
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        self._mesh = mesh
        self._inputs = list(inner.invars)
        self._outputs = list(inner.outvars)
        self._targets = list(targets)
        self._consts = dict(zip(inner.constvars, jaxpr.consts, strict=True))
        self._shardings: dict[Any, NamedSharding] = {}
        self._steps = self._plan(list(inner.eqns))

    def run(self, inputs: Sequence[Any] = ()) -> list[jax.Array]:
        """Makes the results.

        Args:
            inputs: The values of the traced function's arguments, flat.
        """
        values: dict[Any, Any] = {}
        for var, value in [
            *zip(self._inputs, inputs, strict=True),
            *self._consts.items(),
        ]:
            values[var] = jax.device_put(value, self._sharding(var))
        for step in self._steps:
            operands = [
                _literal(var) if _is_literal(var) else values[var]
                for var in step.inputs
            ]
            results = self._compiled(step)(*operands)
            values.update(zip(step.outputs, results, strict=True))
            for var in step.dead:
                del values[var]
        # Every result has memory of its own: a step may donate them all.
        taken = {*self._inputs, *self._consts}
        results = []
        for var, target in zip(self._outputs, self._targets, strict=True):
            if _is_literal(var):
                results.append(jax.device_put(_literal(var), target))
                continue
            alias = None if var not in taken else False
            results.append(jax.device_put(values[var], target, may_alias=alias))
            taken.add(var)
        return results

    def memory(self) -> MemoryEstimate:
        """Compiles every operation and reads off what the devices hold."""
        held = {var: self._bytes(var) for var in [*self._inputs, *self._consts]}
        peak = sum(held.values())
        for step in self._steps:
            analysis = self._compiled(step).memory_analysis()
            made = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
            now = sum(held.values()) + analysis.temp_size_in_bytes + made
            # An operand in another layout than it lies in is moved first.
            moved = sum(
                math.prod(sharding.shard_shape(var.aval.shape))
                * _jax.itemsize(var.aval.dtype)
                for var, sharding in zip(step.inputs, step.shardings_in, strict=True)
                if sharding != self._sharding(var)
            )
            peak = max(peak, now + moved)
            held.update({var: self._bytes(var) for var in step.outputs})
            for var in step.dead:
                held.pop(var, None)
        state = sum(
            math.prod(target.shard_shape(var.aval.shape))
            * _jax.itemsize(var.aval.dtype)
            for var, target in zip(self._outputs, self._targets, strict=True)
        )
        return MemoryEstimate(state, max(peak, state))

    # Planning.

    def _plan(self, eqns: list[Any]) -> list[_Step]:
        needed: list[Any] = []
        wanted = {var for var in self._outputs if not _is_literal(var)}
        for eqn in reversed(eqns):
            if wanted.intersection(eqn.outvars):
                needed.append(eqn)
                wanted.update(var for var in eqn.invars if not _is_literal(var))
        self._choose_shardings(needed)
        last_use = {
            var: at
            for at, eqn in enumerate(reversed(needed))
            for var in eqn.invars
            if not _is_literal(var)
        }
        kept = {var for var in self._outputs if not _is_literal(var)}
        return [
            self._step(at, eqn, last_use, kept)
            for at, eqn in enumerate(reversed(needed))
        ]

    def _choose_shardings(self, backwards: Iterable[Any]) -> None:
        """Gives every value a sharding: its use's where the shapes agree."""
        for var, target in zip(self._outputs, self._targets, strict=True):
            if not _is_literal(var):
                self._shardings.setdefault(
                    var, tidy(target, var.aval.shape, var.aval.dtype, self._mesh)
                )
        for eqn in backwards:
            for out in eqn.outvars:
                sharding = self._sharding(out)
                for var in eqn.invars:
                    if not _is_literal(var) and var.aval.shape == out.aval.shape:
                        self._shardings.setdefault(var, sharding)

    def _sharding(self, var: Any) -> NamedSharding:
        if _is_literal(var):
            return NamedSharding(self._mesh.jax_mesh, PartitionSpec())
        if var not in self._shardings:
            cut = spread(self._mesh, var.aval.shape).sharding
            self._shardings[var] = tidy(cut, var.aval.shape, var.aval.dtype, self._mesh)
        return self._shardings[var]

    def _step(
        self, at: int, eqn: Any, last_use: dict[Any, int], kept: set[Any]
    ) -> _Step:
        # Literals are operands too, as they are without jit: a constant would be
        # folded into the program, and change its bits.
        inputs = list(eqn.invars)
        values = dict.fromkeys(var for var in inputs if not _is_literal(var))
        dead = [var for var in values if last_use[var] == at and var not in kept]
        outputs = list(eqn.outvars)
        shardings_in = [self._sharding(var) for var in inputs]
        shardings_out = [self._sharding(var) for var in outputs]
        is_whole = not _keeps_bits_when_sharded(eqn)
        if is_whole:
            whole = NamedSharding(self._mesh.jax_mesh, PartitionSpec())
            shardings_in = [whole] * len(inputs)
        donated = _reusable(inputs, outputs, shardings_in, shardings_out, dead)
        given = {*self._inputs, *self._consts}
        donated = tuple(at for at in donated if inputs[at] not in given)
        # What nobody reads is not kept.
        dead += [v for v in outputs if v not in last_use and v not in kept]
        return _Step(
            eqn, inputs, outputs, shardings_in, shardings_out, donated, dead, is_whole
        )

    def _bytes(self, var: Any) -> int:
        shape = self._sharding(var).shard_shape(var.aval.shape)
        return math.prod(shape) * _jax.itemsize(var.aval.dtype)

    def _compiled(self, step: _Step) -> Any:
        return _compile(_Key(step))


def _reusable(
    inputs: list[Any],
    outputs: list[Any],
    shardings_in: list[NamedSharding],
    shardings_out: list[NamedSharding],
    dead: list[Any],
) -> tuple[int, ...]:
    """Returns which operands' memory a result can take over."""
    free = [
        (var.aval.shape, var.aval.dtype, sharding)
        for var, sharding in zip(outputs, shardings_out, strict=True)
    ]
    found = []
    for at, (var, sharding) in enumerate(zip(inputs, shardings_in, strict=True)):
        what = (var.aval.shape, var.aval.dtype, sharding)
        given_once = not _is_literal(var) and inputs.count(var) == 1
        if given_once and var in dead and what in free:
            free.remove(what)
            found.append(at)
    return tuple(found)


# Compiling, once for each different operation.


class _Key:
    """An operation as a key: equal for operations that compile to one program."""

    def __init__(self, step: _Step) -> None:
        self.step = step
        eqn = step.eqn
        self._value = (
            eqn.primitive,
            tuple(sorted(eqn.params.items(), key=lambda item: item[0])),
            tuple((v.aval.shape, v.aval.dtype, v.aval.weak_type) for v in step.inputs),
            tuple(step.shardings_in),
            tuple(step.shardings_out),
            step.donated,
        )
        try:
            self._hash = hash(self._value)
        except TypeError:  # a parameter that cannot be hashed: no sharing
            self._value = (id(eqn), tuple(step.shardings_in), step.donated)
            self._hash = hash(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._value == other._value

    def __hash__(self) -> int:
        return self._hash


class _Program:
    """An operation, compiled."""

    def __init__(self, step: _Step) -> None:
        self._shardings = step.shardings_in
        operands = [
            jax.ShapeDtypeStruct(
                var.aval.shape,
                var.aval.dtype,
                sharding=sharding,
                weak_type=var.aval.weak_type,
            )
            for var, sharding in zip(step.inputs, step.shardings_in, strict=True)
        ]
        jitted = jax.jit(
            functools.partial(_apply, step),
            in_shardings=tuple(step.shardings_in),
            out_shardings=list(step.shardings_out),
            donate_argnums=step.donated,
        )
        with jax.disable_jit(False):
            self._compiled = jitted.lower(*operands).compile()
        self.memory_analysis: Callable[[], Any] = self._compiled.memory_analysis
        self.as_text: Callable[[], str] = self._compiled.as_text

    def __call__(self, *operands: Any) -> Any:
        """Runs it, on operands that lie anywhere."""
        moved = [
            jax.device_put(operand, sharding)
            for operand, sharding in zip(operands, self._shardings, strict=True)
        ]
        with jax.disable_jit(False):
            return self._compiled(*moved)


def _apply(step: _Step, *operands: Any) -> list[Any]:
    results = _jax.apply_operation(step.eqn, list(operands))
    if not step.is_whole:
        return results
    # Or else the compiler cuts the operation as its result is cut.
    return [
        _jax.constrain(result, NamedSharding(sharding.mesh, PartitionSpec()))
        for result, sharding in zip(results, step.shardings_out, strict=True)
    ]


@functools.lru_cache(maxsize=1024)
def _compile(key: _Key) -> _Program:
    return _Program(key.step)


def _is_literal(var: Any) -> bool:
    return hasattr(var, "val")


def _literal(var: Any) -> Any:
    return (
        np.asarray(var.val, dtype=var.aval.dtype)
        if not isinstance(var.val, jax.Array)
        else var.val
    )


# Operations that give each element the same bits however the array is cut: one
# element at a time, moving elements about, or counter-based random numbers.
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
slice split sqrt square squeeze stop_gradient sub tan tanh threefry2x32
transpose xor
"""
_SAFE = frozenset(_SAFE_NAMES.split())
_CONTAINERS_NAMES = """
jit pjit closed_call core_call custom_jvp_call custom_vjp_call
custom_vjp_call_jaxpr remat checkpoint scan while cond
"""
_CONTAINERS = frozenset(_CONTAINERS_NAMES.split())


def _keeps_bits_when_sharded(eqn: Any) -> bool:
    name = eqn.primitive.name
    if name in _SAFE:
        return True
    return name in _CONTAINERS and all(
        _keeps_bits_when_sharded(inner)
        for jaxpr in _jax.inner_jaxprs(eqn)
        for inner in jaxpr.eqns
    )
