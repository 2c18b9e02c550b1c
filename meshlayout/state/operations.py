"""Runs a traced builder one operation at a time, on shards.

Compiling a whole builder into one program would change the last bits of the state: the
compiler fuses and reorders across operations. JAX without jit runs one compiled program
per operation, and so does this module, so that the values are the same to the bit. But
every array is made in its final layout, and is freed or overwritten after its last use,
so that no device ever holds more than its shards. Equal operations share one program:
all of them together compile in a third of the CPU time of one large program.

Operations whose result depends on the order of a sum or on the blocking of a matrix
product (QR in an orthogonal initializer, say) run on replicated operands, because
sharded ones would give other bits.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from meshlayout import _jax, _jaxprs
from meshlayout._annotations import Equation
from meshlayout._bit_exact import (
    ShardingPlan,
    inlined,
    is_bit_exact_on_shards,
    is_large,
    is_literal,
    preserves_bits,
)
from meshlayout.arrays import copy_to_mesh
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh


@dataclass(frozen=True)
class CreationMemory:
    """Bytes on each device while a state is made, as the compiled programs report it.

    Attributes:
        state_bytes: The shards of the finished state, in any memory.
        peak_bytes: The maximum at any time, including the state's shards in the memory
            of the device itself.
    """

    state_bytes: int
    peak_bytes: int


@dataclass(eq=False)
class _Operation:
    """One operation, and how to run it; equal to those that compile to one program.

    Initializers repeat the same few operations for every layer of a kind, so a state of
    hundreds of leaves needs a few dozen programs.

    Attributes:
        eqn: The operation.
        shardings_in: The shardings it takes its operands in.
        shardings_out: The shardings of its results.
        donated: The indices of operands whose memory a result takes over.
        dead: The values that nothing uses afterwards.
        is_whole: Whether it runs on replicated operands, to give the same bits.
    """

    eqn: Any
    shardings_in: list[NamedSharding]
    shardings_out: list[NamedSharding]
    donated: tuple[int, ...]
    dead: list[Any]
    is_whole: bool

    def __post_init__(self) -> None:
        eqn = self.eqn
        avals = [var.aval for var in eqn.invars]
        self._key: tuple[Any, ...] = (
            eqn.primitive,
            tuple(sorted(eqn.params.items(), key=lambda item: item[0])),
            tuple((aval.shape, aval.dtype, aval.weak_type) for aval in avals),
            tuple(self.shardings_in),
            tuple(self.shardings_out),
            self.donated,
        )
        try:
            self._hash = hash(self._key)
        except TypeError:  # a parameter that cannot be hashed: a program of its own
            self._key = (id(eqn), tuple(self.shardings_in), self.donated)
            self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Operation) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    @property
    def operands(self) -> Iterator[tuple[Any, NamedSharding]]:
        """The operands, each with the sharding it is needed in."""
        return zip(self.eqn.invars, self.shardings_in, strict=True)


class Operations:
    """The operations of a traced function, planned on a mesh.

    Args:
        jaxpr: The traced function, as a closed jaxpr.
        targets: The layout of each result, of the same rank.
        mesh: The mesh.
    """

    def __init__(self, jaxpr: Any, targets: Sequence[Layout], mesh: Mesh) -> None:
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        # On Explicit axes, operations need shardings as parameters, which a trace
        # without a mesh does not have.
        self._mesh = Mesh(_jax.with_auto_axes(mesh.jax_mesh))
        self._inputs = list(inner.invars)
        self._consts = dict(zip(inner.constvars, jaxpr.consts, strict=True))
        names: dict[Any, Any] = {}
        eqns = list(inlined(inner.eqns, names, self._consts))
        self._outputs = [
            var if is_literal(var) else names.get(var, var) for var in inner.outvars
        ]
        # Arrays of the caller's, which must be neither donated nor returned as results.
        self._given = {*self._inputs, *self._consts}
        needed = _needed(eqns, self._outputs)
        self._shardings = ShardingPlan(
            self._mesh, self._outputs, targets, [eqn for eqn, _ in needed]
        )
        self._operations = [self._operation(*pair) for pair in reversed(needed)]
        # The last operation that uses a value, by index; -1 if there is none.
        self._last_uses = dict.fromkeys(
            (v for v in self._outputs if not is_literal(v)), -1
        )
        for index, operation in enumerate(self._operations):
            used = (*operation.eqn.invars, *operation.eqn.outvars)
            self._last_uses |= {v: index for v in used if not is_literal(v)}
        # Results in the host's memory, by the operation after which they are moved.
        self._moves: dict[int, list[tuple[Any, Layout]]] = {}
        self._results = self._requested(targets)

    def run(self, inputs: Sequence[ArrayLike] = ()) -> list[jax.Array]:
        """Runs the operations.

        Args:
            inputs: The values of the traced function's arguments, flat.

        Returns:
            The results, in their layouts.
        """
        inputs_by_var = zip(self._inputs, inputs, strict=True)
        values: dict[Any, Any] = {
            var: _placed(value, self._shardings[var])
            for var, value in (*inputs_by_var, *self._consts.items())
            if var in self._last_uses
        }
        for index, operation in enumerate(self._operations):
            operands = [
                _literal(var) if is_literal(var) else values[var]
                for var in operation.eqn.invars
            ]
            outputs = _run(operation, operands)
            values.update(zip(operation.eqn.outvars, outputs, strict=True))
            for var in operation.dead:
                del values[var]
            for var, layout in self._moves.get(index, ()):
                values[var] = jax.device_put(values[var], layout.sharding)
        results: list[jax.Array] = []
        for var, layout, is_copied, is_last in self._results:
            value = _literal(var) if is_literal(var) else values[var]
            place = copy_to_mesh if is_copied else jax.device_put
            results.append(place(value, layout if is_copied else layout.sharding))
            if is_last:
                del values[var]
        return results

    def memory(self) -> CreationMemory:
        """Compiles every operation, and adds up what a device holds, as `run` would."""
        held = {
            var: self._bytes(var)
            for var in [*self._inputs, *self._consts]
            if var in self._last_uses
        }
        peak = sum(held.values())
        for index, operation in enumerate(self._operations):
            analysis = _compile(operation).memory_analysis()
            new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
            now = sum(held.values()) + analysis.temp_size_in_bytes + new
            # Operands that are needed in another sharding are copied first.
            moved = sum(
                _shard_bytes(var, sharding)
                for var, sharding in operation.operands
                if sharding != self._shardings[var]
            )
            peak = max(peak, now + moved)
            held.update({var: self._bytes(var) for var in operation.eqn.outvars})
            for var in operation.dead:
                held.pop(var, None)
            for var, _ in self._moves.get(index, ()):
                held[var] = 0
        finished = finished_on_host = 0
        for var, layout, is_copied, is_last in self._results:
            nbytes = layout.bytes_per_device(var.aval.shape, var.aval.dtype)
            finished += nbytes
            finished_on_host += nbytes if layout.memory_kind else 0
            if is_copied:
                peak = max(peak, sum(held.values()) + finished - finished_on_host)
            if is_last:
                del held[var]
        return CreationMemory(finished, max(peak, finished - finished_on_host))

    def _bytes(self, var: Any) -> int:
        return _shard_bytes(var, self._shardings[var])

    # Planning.

    def _requested(
        self, targets: Sequence[Layout]
    ) -> list[tuple[Any, Layout, bool, bool]]:
        """Returns (value, layout, is copied, is last) of each result.

        No two results share memory, so that a step can donate them all: a value is
        copied unless it is already in that layout and nothing else refers to it.
        """
        uses = Counter(map(id, self._outputs))
        results = []
        for var, layout in zip(self._outputs, targets, strict=True):
            uses[id(var)] -= 1
            is_last = not uses[id(var)] and not is_literal(var)
            sharding = Layout(layout.specs, self._mesh).sharding
            is_there = self._shardings[var] == sharding and layout.memory_kind is None
            is_own = is_last and var not in self._given
            is_moved = is_own and layout.memory_kind is not None
            if is_moved and self._outputs.count(var) == 1:
                self._moves.setdefault(self._last_uses[var], []).append((var, layout))
            is_copied = not (is_own and (is_there or is_moved))
            results.append((var, layout, is_copied, is_last))
        return results

    def _operation(self, eqn: Equation, dead: list[Any]) -> _Operation:
        # Literals are operands as well, as without jit: the compiler would fold a
        # constant into the program, which can change the bits of the result.
        shardings_in = [self._shardings[var] for var in eqn.invars]
        shardings_out = [self._shardings[var] for var in eqn.outvars]
        is_whole = not is_bit_exact_on_shards(eqn)
        if is_whole:
            whole = NamedSharding(self._mesh.jax_mesh, PartitionSpec())
            shardings_in = [whole] * len(eqn.invars)
        # A result can take over the memory of an operand of the same shape, dtype and
        # sharding that nothing uses any more.
        free = [
            (var.aval.shape, var.aval.dtype, sharding)
            for var, sharding in zip(eqn.outvars, shardings_out, strict=True)
        ]
        donated = []
        for index, (var, sharding) in enumerate(
            zip(eqn.invars, shardings_in, strict=True)
        ):
            memory = (var.aval.shape, var.aval.dtype, sharding)
            is_free = var in dead and var not in self._given
            if is_free and eqn.invars.count(var) == 1 and memory in free:
                free.remove(memory)
                donated.append(index)
        return _Operation(
            eqn, shardings_in, shardings_out, tuple(donated), dead, is_whole
        )


def _shard_bytes(var: Any, sharding: NamedSharding) -> int:
    shape = sharding.shard_shape(var.aval.shape)
    return math.prod(shape) * _jax.itemsize(var.aval.dtype)


def _needed(eqns: list[Any], outputs: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
    """Returns the operations that the results depend on, the last one first.

    Each comes with the values that are not used after it, found on the way back: the
    first operation that uses a value, seen from the end, is the last to do so.
    """
    needed: list[tuple[Any, list[Any]]] = []
    used = {var for var in outputs if not is_literal(var)}
    for eqn in reversed(eqns):
        if used.intersection(eqn.outvars):
            unread = [var for var in eqn.outvars if var not in used]
            operands = dict.fromkeys(var for var in eqn.invars if not is_literal(var))
            dead = [var for var in operands if var not in used]
            used.update(operands)
            needed.append((eqn, dead + unread))
    return needed


@functools.lru_cache(maxsize=1024)
def _compile(operation: _Operation) -> Any:
    """Compiles an operation, once for all that are equal."""
    operands = [
        jax.ShapeDtypeStruct(
            var.aval.shape,
            var.aval.dtype,
            sharding=sharding,
            weak_type=var.aval.weak_type,
        )
        for var, sharding in operation.operands
    ]
    jitted = jax.jit(
        functools.partial(_apply, operation),
        in_shardings=tuple(operation.shardings_in),
        out_shardings=list(operation.shardings_out),
        donate_argnums=operation.donated,
    )
    # Neither the user's `disable_jit` nor a mesh that is set may change the program.
    with jax.disable_jit(disable=False), _jax.no_mesh():
        if _saves_memory(operation):
            return _jaxprs.compile_frugally(jitted, operands)
        return jitted.lower(*operands).compile()


def _run(operation: _Operation, operands: Sequence[ArrayLike]) -> list[jax.Array]:
    """Runs an operation, on operands in any sharding."""
    program = _compile(operation)
    moved = [
        _jax.put(operand, sharding)
        for operand, sharding in zip(operands, operation.shardings_in, strict=True)
    ]
    with jax.disable_jit(disable=False), _jax.no_mesh():
        return program(*moved)


def _saves_memory(operation: _Operation) -> bool:
    """Returns whether to compile random numbers on CPU so that they take less memory.

    Not for small arrays: there the memory does not matter, and only JAX's own way of
    compiling is certain to give the bits of an unsharded build.
    """
    mesh: Any = operation.shardings_out[0].mesh
    return mesh.devices.flat[0].platform == "cpu" and all(
        is_large(var.aval.shape, var.aval.dtype)
        and preserves_bits(sharding, var.aval.shape)
        for var, sharding in zip(
            operation.eqn.outvars, operation.shardings_out, strict=True
        )
    )


def _apply(operation: _Operation, *operands: jax.Array) -> list[jax.Array]:
    results = _jaxprs.apply_operation(operation.eqn, list(operands))
    if not operation.is_whole:
        return results
    # Without this, the compiler would shard the operation like its result.
    return [
        _jax.constrain(result, NamedSharding(sharding.mesh, PartitionSpec()))
        for result, sharding in zip(results, operation.shardings_out, strict=True)
    ]


def _placed(value: ArrayLike, sharding: NamedSharding) -> jax.Array:
    """Returns a value of this process, placed on the mesh."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if not isinstance(value, jax.Array):
        value = np.asarray(value)  # in JAX 0.7 also constants of a class of its own
    # JAX 0.7 cannot move an array of one process to the devices of several.
    return copy_to_mesh(value, Layout.of(sharding, np.ndim(value)))


def _literal(var: Any) -> ArrayLike:
    if isinstance(var.val, jax.Array):
        return var.val
    return np.asarray(var.val, dtype=var.aval.dtype)
