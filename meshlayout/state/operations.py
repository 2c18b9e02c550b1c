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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshlayout import _jax
from meshlayout._bit_exact import is_large, preserves_bits
from meshlayout.arrays import copy_to_mesh
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh
from meshlayout.state.cuts import Cuts, is_literal, keeps_bits_when_sharded
from meshlayout.state.inlining import inlined


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
    mesh: Mesh


@dataclass
class _Result:
    """A value that was asked for, and the layout it was asked for in.

    Every result has memory of its own, so that a step may donate them all:
    `is_copied` is False where the value lies as asked and nothing else holds it.
    """

    var: Any
    layout: Layout
    is_copied: bool
    is_last: bool


class Operations:
    """The operations of a traced function, planned on a mesh.

    Args:
        jaxpr: The traced function, closed.
        targets: The layout of each of its results, of its rank.
        mesh: The mesh.
    """

    def __init__(self, jaxpr: Any, targets: Sequence[Layout], mesh: Mesh) -> None:
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        # On Explicit axes, operations ask what JAX without a mesh does not.
        self._mesh = _with_auto_axes(mesh)
        self._inputs = list(inner.invars)
        self._consts = dict(zip(inner.constvars, jaxpr.consts, strict=True))
        names: dict[Any, Any] = {}
        eqns = list(inlined(inner.eqns, names, self._consts))
        self._outputs = [
            var if is_literal(var) else names.get(var, var) for var in inner.outvars
        ]
        self._given = {*self._inputs, *self._consts}
        self._cuts = Cuts(self._mesh)
        self._steps = self._plan(eqns, targets)
        self._results = self._finish(targets)

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
            values[var] = _placed(value, self._cuts.of(var))
        for step in self._steps:
            operands = [
                _literal(var) if is_literal(var) else values[var] for var in step.inputs
            ]
            results = self._compiled(step)(*operands)
            values.update(zip(step.outputs, results, strict=True))
            for var in step.dead:
                del values[var]
        results: list[Any] = []
        for result in self._results:
            var, layout = result.var, result.layout
            value = _literal(var) if is_literal(var) else values[var]
            if result.is_copied:
                results.append(copy_to_mesh(value, layout))
            else:
                results.append(jax.device_put(value, layout.sharding))
            if result.is_last:
                del values[var]
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
                if sharding != self._cuts.of(var)
            )
            peak = max(peak, now + moved)
            held.update({var: self._bytes(var) for var in step.outputs})
            for var in step.dead:
                held.pop(var, None)
        finished = 0
        for result in self._results:
            aval = result.var.aval
            finished += result.layout.bytes_per_device(aval.shape, aval.dtype)
            if result.is_copied:
                peak = max(peak, sum(held.values()) + finished)
            if result.is_last:
                del held[result.var]
        return MemoryEstimate(finished, max(peak, finished))

    # Planning.

    def _plan(self, eqns: list[Any], targets: Sequence[Layout]) -> list[_Step]:
        needed: list[Any] = []
        wanted = {var for var in self._outputs if not is_literal(var)}
        for eqn in reversed(eqns):
            if wanted.intersection(eqn.outvars):
                needed.append(eqn)
                wanted.update(var for var in eqn.invars if not is_literal(var))
        self._cuts.choose(self._outputs, targets, needed)
        last_use = {
            var: at
            for at, eqn in enumerate(reversed(needed))
            for var in eqn.invars
            if not is_literal(var)
        }
        kept = {var for var in self._outputs if not is_literal(var)}
        return [
            self._step(at, eqn, last_use, kept)
            for at, eqn in enumerate(reversed(needed))
        ]

    def _finish(self, targets: Sequence[Layout]) -> list[_Result]:
        left = Counter(map(id, self._outputs))
        results = []
        for var, layout in zip(self._outputs, targets, strict=True):
            left[id(var)] -= 1
            is_last = not left[id(var)] and not is_literal(var)
            is_own = is_last and var not in self._given
            made = Layout(layout.specs, self._mesh).sharding
            lies_so = self._cuts.of(var) == made and layout.memory_kind is None
            results.append(_Result(var, layout, not (is_own and lies_so), is_last))
        return results

    def _step(
        self, at: int, eqn: Any, last_use: dict[Any, int], kept: set[Any]
    ) -> _Step:
        # Literals are operands too, as they are without jit: a constant would be
        # folded into the program, and change its bits.
        inputs = list(eqn.invars)
        values = dict.fromkeys(var for var in inputs if not is_literal(var))
        dead = [var for var in values if last_use[var] == at and var not in kept]
        outputs = list(eqn.outvars)
        shardings_in = [self._cuts.of(var) for var in inputs]
        shardings_out = [self._cuts.of(var) for var in outputs]
        is_whole = not keeps_bits_when_sharded(eqn)
        if is_whole:
            whole = NamedSharding(self._mesh.jax_mesh, PartitionSpec())
            shardings_in = [whole] * len(inputs)
        donated = _reusable(inputs, outputs, shardings_in, shardings_out, dead)
        donated = tuple(at for at in donated if inputs[at] not in self._given)
        # What nobody reads is not kept.
        dead += [v for v in outputs if v not in last_use and v not in kept]
        return _Step(
            eqn=eqn,
            inputs=inputs,
            outputs=outputs,
            shardings_in=shardings_in,
            shardings_out=shardings_out,
            donated=donated,
            dead=dead,
            is_whole=is_whole,
            mesh=self._mesh,
        )

    def _bytes(self, var: Any) -> int:
        shape = self._cuts.of(var).shard_shape(var.aval.shape)
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
        given_once = not is_literal(var) and inputs.count(var) == 1
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
        with jax.disable_jit(disable=False), _jax.no_mesh():
            self._compiled = (
                _jax.compile_frugally(jitted, operands)
                if _is_worth_it(step)
                else jitted.lower(*operands).compile()
            )
        self.memory_analysis: Callable[[], Any] = self._compiled.memory_analysis
        self.as_text: Callable[[], str | None] = self._compiled.as_text

    def __call__(self, *operands: Any) -> Any:
        """Runs it, on operands that lie anywhere."""
        moved = [
            jax.device_put(operand, sharding)
            for operand, sharding in zip(operands, self._shardings, strict=True)
        ]
        with jax.disable_jit(disable=False), _jax.no_mesh():
            return self._compiled(*moved)


def _is_worth_it(step: _Step) -> bool:
    """Tells whether to save the memory in which random numbers are made on CPU.

    What is small has the bits of an unsharded build for sure only as JAX compiles it.
    """
    return step.mesh.platform == "cpu" and all(
        is_large(var.aval.shape, var.aval.dtype) and preserves_bits(cut, var.aval.shape)
        for var, cut in zip(step.outputs, step.shardings_out, strict=True)
    )


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


def _placed(value: Any, sharding: NamedSharding) -> jax.Array:
    """Returns a value of this process on the mesh."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    # JAX 0.7 moves no array of one process to the devices of several.
    return copy_to_mesh(value, Layout.of(sharding, np.ndim(value)))


def _with_auto_axes(mesh: Mesh) -> Mesh:
    types = (AxisType.Auto,) * len(mesh.axis_names)
    devices = mesh.jax_mesh.devices
    return Mesh(jax.sharding.Mesh(devices, mesh.axis_names, axis_types=types))


def _literal(var: Any) -> Any:
    return (
        np.asarray(var.val, dtype=var.aval.dtype)
        if not isinstance(var.val, jax.Array)
        else var.val
    )
