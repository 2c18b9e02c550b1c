"""What a step costs under some layouts, before anything is compiled.

The step is traced once for all candidates. The engine of `tensor_parallel` follows the
dims of all arrays through its jaxpr, backward pass and update included, so that a
candidate is a table: which factors of dims its axes shard. Axes that shard batches
shard rows; parameters that they shard are gathered where they are used.

Memory is a liveness of the jaxpr in its order. What is computed element by element is
taken to be fused into what reads it, unless it is smaller than what it is made of.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import Literal
from jax.sharding import NamedSharding

from meshlayout import _jax
from meshlayout._annotations import Equation, PyTree
from meshlayout._batches import batch_axes
from meshlayout.hlo.cost import _products
from meshlayout.layout import axes_of
from meshlayout.mesh import Mesh
from meshlayout.parallel.factors import (
    Dims,
    Factor,
    Flow,
    Value,
    fresh_dims,
    leaves_of,
    link_all,
    made_of,
)
from meshlayout.parallel.operations import OPERATIONS, out_shapes
from meshlayout.parallel.program import _INLINED
from meshlayout.planning.chips import Chip
from meshlayout.state import TrainState


# Their results are in memory; all other operations are fused into what reads them.
_PRODUCTS = {"dot_general", "ragged_dot_general", "conv_general_dilated"}
_HEAVY = _PRODUCTS | {"gather", "sort", "scatter", "scatter-add", "top_k", "cumsum"}
_HEAVY |= {"select_and_scatter_add", "dynamic_update_slice", "scan", "concatenate"}


@dataclass(frozen=True)
class Estimate:
    """What one step costs on each device.

    Attributes:
        compute_s: Of products, at the peak rate.
        memory_s: Of reading and writing.
        network_s: Of collectives.
        total_s: Of the step.
        peak_bytes: What it holds at the most: state, batch and what is computed.
        sent: Bytes that a device sends, by axes.
    """

    compute_s: float
    memory_s: float
    network_s: float
    total_s: float
    peak_bytes: float
    sent: Mapping[str, float]


@dataclass(slots=True)
class _Operation:
    is_heavy: bool
    inputs: list[int]
    outputs: list[int]
    runs: int
    flops: float  # of all devices
    summed: Dims  # that it sums over


class StepTrace:
    """A traced train step, walked through; made once for all layouts."""

    def __init__(
        self, traced: jax.stages.Traced, state: TrainState[Any], batch: PyTree
    ) -> None:
        self.operations: list[_Operation] = []
        self.values: list[Value] = []
        self.nbytes: list[int] = []
        self._flow = Flow()
        jaxpr = traced.jaxpr.jaxpr
        self.arguments = [self._new(var.aval) for var in jaxpr.invars]
        results = self._walk(jaxpr, self.arguments, 1)
        num_state, num_batch = (len(jax.tree.leaves(x)) for x in (state, batch))
        self.num_params = len(jax.tree.leaves(state.params))
        # The state comes back as it was, so that gradients lie like their parameters.
        for old, new in zip(self.arguments[:num_state], results, strict=False):
            link_all(self.values[old].dims, self.values[new].dims)
        rows = self.arguments[num_state : num_state + num_batch]
        self.factors = [self._majors(value.dims) for value in self.values]
        self.summed = [{*self._majors(op.summed)} for op in self.operations]
        self.rows = {x for index in rows for x in self.factors[index][:1]} - {None}
        # Parameters that are cast where they are used are gathered as that.
        self.used = self.nbytes[: self.num_params]
        for op in self.operations:
            for index in op.inputs[:1] if not op.is_heavy else ():
                if index < self.num_params and op.outputs:
                    size = self.nbytes[op.outputs[0]]
                    self.used[index] = min(self.used[index], size)
        self.flops = sum(op.flops * op.runs for op in self.operations)

    @staticmethod
    def _majors(dims: Dims) -> tuple[Factor | None, ...]:
        """Returns the factor of each dim that a sharding would divide."""
        return tuple((*leaves_of(dim), None)[0] for dim in dims)

    def _new(self, aval: Any, value: Value | None = None) -> int:
        shape = tuple(getattr(aval, "shape", ()))
        self.values.append(value or Value(shape, fresh_dims(shape)))
        dtype = getattr(aval, "dtype", None)
        size = 0 if dtype is None else math.prod(shape) * _jax.itemsize(dtype)
        self.nbytes.append(size)
        return len(self.values) - 1

    def _walk(self, jaxpr: Any, args: Sequence[int], runs: int) -> list[int]:
        known = dict(zip(jaxpr.invars, args, strict=True))
        known |= {var: self._new(var.aval) for var in jaxpr.constvars}

        def read(var: Any) -> int:
            return self._new(var.aval) if isinstance(var, Literal) else known[var]

        for eqn in jaxpr.eqns:
            inputs = [*map(read, eqn.invars)]
            outputs = self._walked(eqn, inputs, runs)
            known.update(zip(eqn.outvars, outputs, strict=True))
        return [*map(read, jaxpr.outvars)]

    def _walked(self, eqn: Equation, inputs: list[int], runs: int) -> list[int]:
        name, inner = eqn.primitive.name, _jax.inner_jaxprs(eqn)
        if name == "scan":
            return self._scan(eqn, inner[0], inputs, runs)
        if name == "while":
            first = eqn.params["cond_nconsts"]
            carry = inputs[first + eqn.params["body_nconsts"] :]
            body = getattr(eqn.params["body_jaxpr"], "jaxpr", eqn.params["body_jaxpr"])
            return self._linked(carry, self._walk(body, inputs[first:], runs))
        if name == "cond":
            return self._walk(inner[-1], inputs[1:], runs)
        if name in _INLINED.split() and len(inner[0].invars) == len(inputs):
            return self._walk(inner[0], inputs, runs)
        return self._operation(eqn, inputs, runs)

    def _linked(self, carry: Sequence[int], results: list[int]) -> list[int]:
        for old, new in zip(carry, results, strict=False):
            link_all(self.values[old].dims, self.values[new].dims)
        return results

    def _scan(
        self, eqn: Equation, body: Any, inputs: list[int], runs: int
    ) -> list[int]:
        num_consts, num_carry = _jax.scan_counts(eqn)
        length, start = max(1, eqn.params["length"]), num_consts + num_carry
        slices: list[int] = []
        for index, var in zip(inputs[start:], body.invars[start:], strict=True):
            value = self.values[index]
            part = made_of([value], value.shape[1:], value.dims[1:])
            slices.append(self._new(var.aval, part))
            self._note([index], slices[-1:], runs)
        args = [*inputs[:start], *slices]
        results = self._linked(
            inputs[num_consts:start], self._walk(body, args, runs * length)
        )
        stacks: list[int] = []
        for index, var in zip(
            results[num_carry:], eqn.outvars[num_carry:], strict=True
        ):
            value, shape = self.values[index], var.aval.shape
            dims = (*fresh_dims(shape[:1]), *value.dims)
            stacks.append(self._new(var.aval, made_of([value], shape, dims)))
            self._note([index], stacks[-1:], runs, is_heavy=True)
        return [*results[:num_carry], *stacks]

    def _operation(self, eqn: Equation, inputs: list[int], runs: int) -> list[int]:
        name, args = eqn.primitive.name, [self.values[index] for index in inputs]
        shapes, flow = out_shapes(eqn), self._flow
        flow.new_bits = 0
        dims = [self._alike(shape, args) for shape in shapes]
        if name in OPERATIONS:
            dims = OPERATIONS[name](flow, eqn, *args)
        outputs = [
            self._new(var.aval, Value(shape, each))
            for var, shape, each in zip(eqn.outvars, shapes, dims, strict=True)
        ]
        products = _products(eqn)
        flops = 2.0 * products * math.prod(shapes[0]) if products else 0.0
        is_heavy = name in _HEAVY or name.startswith("reduce_")
        kept = {id(factor) for each in dims for factor in itertools.chain(*each)}
        gone = tuple(
            dim
            for arg in args[:2]
            for dim in arg.dims
            if is_heavy and dim and id(dim[0]) not in kept
        )
        self._note(inputs, outputs, runs, flops, gone, is_heavy=is_heavy)
        return outputs

    def _note(
        self,
        inputs: list[int],
        outputs: list[int],
        runs: int,
        flops: float = 0.0,
        summed: Dims = (),
        *,
        is_heavy: bool = False,
    ) -> None:
        new = _Operation(is_heavy, inputs, outputs, runs, flops, summed)
        self.operations.append(new)

    @staticmethod
    def _alike(shape: tuple[int, ...], args: Iterable[Value]) -> Dims:
        """Returns the dims of an operation's result that is not followed."""
        for arg in args:
            if arg.shape == shape:
                return arg.dims
            if shape and arg.shape[:1] == shape[:1]:
                return (arg.dims[0], *fresh_dims(shape[1:]))
        return fresh_dims(shape)


def estimate(
    trace: StepTrace,
    state: TrainState[Any],
    mesh: Mesh,
    chip: Chip,
    *,
    accumulate: int = 1,
    hop_s: float = 1e-6,
) -> Estimate:
    """Returns what a step costs for an abstract state in its layouts."""
    rows, leaves = batch_axes(mesh), jax.tree.leaves(state)
    shards: dict[Any, tuple[str, ...]] = dict.fromkeys(trace.rows, rows)
    for index, leaf in enumerate(leaves[: trace.num_params]):
        spec = leaf.sharding.spec
        for factor, entry in zip(trace.factors[index], spec, strict=False):
            axes = tuple(axis for axis in axes_of(entry) if axis not in rows)
            if factor is not None and axes:
                shards.setdefault(factor, axes)

    def axes_in(factors: Iterable[Any]) -> list[str]:
        return [*dict.fromkeys(x for f in factors if f for x in shards.get(f, ()))]

    sizes: list[float] = []
    for nbytes, factors in zip(trace.nbytes, trace.factors, strict=True):
        count = mesh.axis_size(axes_in(factors)) if factors else 1
        is_batch = accumulate > 1 and not trace.rows.isdisjoint(factors)
        sizes.append(nbytes / count / (accumulate if is_batch else 1))
    network = _Network(mesh, chip, hop_s)
    compute_s = memory_s = 0.0
    for op, summed in zip(trace.operations, trace.summed, strict=True):
        if not op.is_heavy:
            continue
        factors = [f for index in op.outputs for f in trace.factors[index]]
        count = mesh.axis_size([*dict.fromkeys(axes_in([*factors, *summed]))] or ())
        read = sum(sizes[index] for index in (*op.inputs, *op.outputs))
        compute_s += op.runs * op.flops / count / chip.flops_per_s
        memory_s += op.runs * accumulate * read / chip.memory_bytes_per_s
        over = [axis for axis in axes_in(summed) if axis not in axes_in(factors)]
        # Sums over rows are gradients of parameters, which follow, or a few numbers.
        inner = [axis for axis in over if axis not in rows]
        if inner:
            size = sum(sizes[index] for index in op.outputs)
            network.send("all_reduce", inner, size, op.runs * accumulate)
    gathered, sums = 0.0, 0.0
    for index, leaf in enumerate(leaves[: trace.num_params]):
        own = {axis for entry in leaf.sharding.spec for axis in axes_of(entry)}
        used = trace.used[index] / mesh.axis_size([*(own - {*rows})] or ())
        split = [axis for axis in rows if axis in own]
        whole = [axis for axis in rows if axis not in own]
        if split:
            network.send("all_gather", split, used, 2 * accumulate)
            network.send("reduce_scatter", split, used, accumulate)
            gathered = max(gathered, used)
        if whole:
            part = used / mesh.axis_size(split or ())
            network.send("all_reduce", whole, part, 1)
        sums += used / mesh.axis_size(split or ()) if accumulate > 1 else 0.0
    on_device = [x for x in leaves if not _is_on_host(x.sharding)]
    held = sum(_shard_bytes(leaf) for leaf in on_device)
    num_state = len(leaves)
    held += sum(sizes[index] for index in trace.arguments[num_state:]) * accumulate
    memory_s += 3 * sum(map(_shard_bytes, leaves)) / chip.memory_bytes_per_s
    peak = held + _temporary_bytes(trace, sizes) + 2 * gathered + sums
    computing = max(compute_s, memory_s)
    waiting = network.sync_s + max(0.0, network.async_s - computing)
    network_s = network.sync_s + network.async_s
    total = computing + waiting
    return Estimate(compute_s, memory_s, network_s, total, peak, network.sent)


@dataclass
class _Network:
    """Collectives in rings along axes, one after another."""

    mesh: Mesh
    chip: Chip
    hop_s: float
    sync_s: float = 0.0
    async_s: float = 0.0  # of gathers and scatters, which compilers overlap
    sent: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def send(self, kind: str, axes: Sequence[str], nbytes: float, times: int) -> None:
        n = self.mesh.axis_size([*axes])
        factor = 2 if kind == "all_reduce" else 1
        wire = factor * (n - 1) / n * nbytes
        seconds = wire / self.chip.ring_bytes_per_s
        if kind == "all_reduce":
            self.sync_s += times * (seconds + (n > 1) * self.hop_s)
        else:
            self.async_s += times * seconds
        self.sent[", ".join(axes)] += times * wire


def _temporary_bytes(trace: StepTrace, sizes: Sequence[float]) -> float:
    """Returns the most bytes that are computed and still needed."""
    fused: set[int] = set()
    _, last, sources = _lives(trace, sizes, fused)
    # What can be made again of what is kept anyway is not kept besides.
    for index, place in last.items():
        made_of = sources[index]
        if made_of and all(last.get(x, -1) >= place for x in made_of):
            fused.add(index)
    births, last, _ = _lives(trace, sizes, fused)
    deaths: dict[int, list[int]] = defaultdict(list)
    for index, place in last.items():
        deaths[place].append(index)
    alive = peak = 0.0
    for place, new in enumerate(births):
        # What nothing reads any more is the new state, in the old one's memory.
        alive += sum(sizes[x] for x in new if x in last)
        peak = max(peak, alive)
        alive -= sum(sizes[x] for x in deaths.get(place, ()))
    return peak


def _lives(
    trace: StepTrace, sizes: Sequence[float], fused: Collection[int]
) -> tuple[list[list[int]], dict[int, int], dict[int, frozenset[int]]]:
    """Returns what each operation puts into memory, where it is read last, and of what.

    Arrays are in memory that heavy operations make, and those that are smaller than
    what they are made of; all others are made of these again wherever they are read.
    """
    roots: dict[int, frozenset[int]] = {}
    sources: dict[int, frozenset[int]] = {}
    last: dict[int, int] = {}
    births: list[list[int]] = []
    nothing = frozenset[int]()
    for place, op in enumerate(trace.operations):
        made_of = nothing.union(*(roots.get(index, nothing) for index in op.inputs))
        size, new = sum(sizes[x] for x in made_of), list[int]()
        for index in op.outputs:
            roots[index] = made_of
            if op.is_heavy or (size > sizes[index] and index not in fused):
                roots[index] = frozenset([index])
                sources[index] = nothing if op.is_heavy else made_of
                new.append(index)
        if new:
            last.update(dict.fromkeys(made_of, place))
        births.append(new)
    return births, last, sources


def _shard_bytes(leaf: Any) -> int:
    shape = leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * _jax.itemsize(leaf.dtype)


def _is_on_host(sharding: NamedSharding) -> bool:
    return "host" in (sharding.memory_kind or "")
