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
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Literal

from meshlayout import _jax
from meshlayout._annotations import Equation, Leaf, PyTree
from meshlayout._batches import batch_axes
from meshlayout.hlo.cost import _products
from meshlayout.layout import axes_of
from meshlayout.mesh import Mesh
from meshlayout.parallel.factors import (
    Dims,
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
from meshlayout.planning.schedule import ring_hops
from meshlayout.state import TrainState


# Their results are in memory; all other operations are fused into what reads them.
_HEAVY = {"dot_general", "ragged_dot_general", "conv_general_dilated", "gather", "sort"}
_HEAVY |= {"scatter", "scatter-add", "top_k", "cumsum", "concatenate", "scan"}
_HEAVY |= {"select_and_scatter_add", "dynamic_update_slice"}

_START_S = 0.5e-6  # that an operation takes at the least, as TPU compilers estimate
_CODE_BYTES = 12_000  # of a TPU program, for each operation of the jaxpr


@dataclass(frozen=True)
class Estimate:
    """What one step costs on each device: seconds, bytes, and bytes sent by axes."""

    compute_s: float
    memory_s: float
    network_s: float
    total_s: float
    peak_bytes: float
    sent: Mapping[str, float]


@dataclass(slots=True)
class _Operation:
    is_heavy: bool
    inputs: list[int]  # arrays, by index
    outputs: list[int]
    runs: int = 1
    flops: float = 0.0  # of all devices, in one run
    summed: Dims = ()


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
        # The state comes back as it was, so that gradients lie like their parameters.
        results = self._walk(jaxpr, self.arguments, 1)
        num_state, num_batch = (len(jax.tree.leaves(x)) for x in (state, batch))
        self._link(self.arguments[:num_state], results)
        self.num_params = len(jax.tree.leaves(state.params))
        self.factors = [_majors(value.dims) for value in self.values]
        self.summed = [{*_majors(op.summed)} for op in self.operations]
        rows = self.arguments[num_state : num_state + num_batch]
        self.rows = {x for index in rows for x in self.factors[index][:1]} - {None}
        self.flops = sum(op.flops * op.runs for op in self.operations)
        # Parameters that are cast where they are used are gathered as that.
        self.used, self.in_loops = self.nbytes[: self.num_params], set[int]()
        for op in self.operations:
            index, *_ = *op.inputs, self.num_params
            if index < self.num_params and op.outputs and not op.is_heavy:
                cast = math.prod(self.values[index].shape), self.nbytes[op.outputs[0]]
                if self.values[op.outputs[0]].shape == self.values[index].shape:
                    self.used[index] = min(self.used[index], cast[1])
                elif op.runs > 1:
                    self.in_loops.add(index)

    def _new(self, aval: Leaf, value: Value | None = None) -> int:
        shape = tuple(getattr(aval, "shape", ()))
        self.values.append(value or Value(shape, fresh_dims(shape)))
        dtype = getattr(aval, "dtype", None)
        size = 0 if dtype is None else math.prod(shape) * _jax.itemsize(dtype)
        self.nbytes.append(size)
        return len(self.values) - 1

    def _link(self, first: Iterable[int], second: Iterable[int]) -> None:
        for a, b in zip(first, second, strict=False):
            if self.values[a].shape == self.values[b].shape:
                link_all(self.values[a].dims, self.values[b].dims)

    def _walk(self, jaxpr: Any, args: Sequence[int], runs: int) -> list[int]:
        known = dict(zip(jaxpr.invars, args, strict=True))
        known |= {var: self._new(var.aval) for var in jaxpr.constvars}

        def read(var: Any) -> int:
            return self._new(var.aval) if isinstance(var, Literal) else known[var]

        for eqn in jaxpr.eqns:
            outputs = self._equation(eqn, [*map(read, eqn.invars)], runs)
            known.update(zip(eqn.outvars, outputs, strict=True))
        return [*map(read, jaxpr.outvars)]

    def _equation(self, eqn: Equation, inputs: list[int], runs: int) -> list[int]:
        name, inner = eqn.primitive.name, _jax.inner_jaxprs(eqn)
        if name == "scan":
            return self._scan(eqn, inner[0], inputs, runs)
        if name == "while":
            first = eqn.params["cond_nconsts"]
            body = getattr(eqn.params["body_jaxpr"], "jaxpr", eqn.params["body_jaxpr"])
            results = self._walk(body, inputs[first:], runs)
            self._link(inputs[first + eqn.params["body_nconsts"] :], results)
            return results
        if name == "cond":
            return self._walk(inner[-1], inputs[1:], runs)
        if name in _INLINED.split() and len(inner[0].invars) == len(inputs):
            return self._walk(inner[0], inputs, runs)
        args, shapes = [self.values[index] for index in inputs], out_shapes(eqn)
        self._flow.new_bits = 0
        dims = [_alike(shape, args) for shape in shapes]
        if name in OPERATIONS:
            dims = OPERATIONS[name](self._flow, eqn, *args)
        triples = zip(eqn.outvars, shapes, dims, strict=True)
        outputs = [self._new(var.aval, Value(shape, x)) for var, shape, x in triples]
        flops = 2.0 * _products(eqn) * math.prod(shapes[0] if shapes else ())
        is_heavy = name in _HEAVY or name.startswith("reduce_")
        kept = {id(factor) for each in dims for factor in itertools.chain(*each)}
        both = itertools.chain(*(arg.dims for arg in args[:2] if is_heavy))
        gone = tuple(dim for dim in both if dim and id(dim[0]) not in kept)
        new = _Operation(is_heavy, inputs, outputs, runs, flops, gone)
        self.operations.append(new)
        return outputs

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
            step = _Operation(False, [index], slices[-1:], runs * length)  # noqa: FBT003
            self.operations.append(step)
        results = self._walk(body, [*inputs[:start], *slices], runs * length)
        self._link(inputs[num_consts:start], results)
        stacks: list[int] = []
        pairs = zip(results[num_carry:], eqn.outvars[num_carry:], strict=True)
        for index, var in pairs:
            value, shape = self.values[index], var.aval.shape
            dims = (*fresh_dims(shape[:1]), *value.dims)
            stacks.append(self._new(var.aval, made_of([value], shape, dims)))
            stack = _Operation(True, [index], stacks[-1:], runs)  # noqa: FBT003
            self.operations.append(stack)
        return [*results[:num_carry], *stacks]


def _majors(dims: Dims) -> tuple[Any, ...]:
    """Returns the factor of each dim that a sharding would divide."""
    return tuple((*leaves_of(dim), None)[0] for dim in dims)


def _alike(shape: tuple[int, ...], args: Iterable[Value]) -> Dims:
    """Returns the dims of the result of an operation that is not followed."""
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
    is_remat: bool = False,
    hop_s: float = 1e-6,
) -> Estimate:
    """Returns what a step costs for an abstract state in its layouts."""
    rows, leaves = batch_axes(mesh), jax.tree.leaves(state)
    params = leaves[: trace.num_params]
    shards: dict[Any, tuple[str, ...]] = dict.fromkeys(trace.rows, rows)
    for factors, leaf in zip(trace.factors, params, strict=False):
        for factor, entry in zip(factors, leaf.sharding.spec, strict=False):
            axes = tuple(axis for axis in axes_of(entry) if axis not in rows)
            if factor is not None and axes:
                shards.setdefault(factor, axes)

    def axes_in(*groups: Iterable[Any]) -> list[str]:
        known = (shards.get(factor, ()) for factor in itertools.chain(*groups))
        return [*dict.fromkeys(itertools.chain(*known))]

    sizes: list[float] = []
    for nbytes, factors in zip(trace.nbytes, trace.factors, strict=True):
        count = mesh.axis_size(axes_in(factors))
        is_batch = accumulate > 1 and not trace.rows.isdisjoint(factors)
        sizes.append(nbytes / count / (accumulate if is_batch else 1))
    sync_s = async_s = compute_s = memory_s = 0.0
    sent: dict[str, float] = defaultdict(float)

    def send(
        axes: list[str], nbytes: float, times: int, passes: int, hops: float = 1
    ) -> float:
        """Notes a pass of a ring, or two for an all-reduce; returns its seconds."""
        n = mesh.axis_size(axes)
        sent[", ".join(axes)] += times * passes * (n - 1) / n * nbytes
        wire_s = passes * (n - 1) / n * nbytes / chip.ring_bytes_per_s
        return times * (wire_s + hops * passes * ring_hops(n) * hop_s)

    for op, summed in zip(trace.operations, trace.summed, strict=True):
        if not op.is_heavy:
            continue
        factors = [f for index in op.outputs for f in trace.factors[index]]
        count, runs = mesh.axis_size(axes_in(factors, summed)), op.runs * accumulate
        read = sum(sizes[index] for index in (*op.inputs, *op.outputs))
        compute_s += op.runs * op.flops / count / chip.flops_per_s
        memory_s += runs * max(_START_S, read / chip.memory_bytes_per_s)
        # Sums over rows are gradients of parameters, which follow, or a few numbers.
        over = {*axes_in(summed)} - {*axes_in(factors), *rows}
        if over:
            size = sum(sizes[index] for index in op.outputs)
            sync_s += send([x for x in mesh.axis_names if x in over], size, runs, 2)
    is_tpu = chip.scratch_bytes > 0
    slots: dict[Any, set[str]] = defaultdict(set)
    for leaf in jax.tree.leaves(state.opt_state):
        slots[leaf.shape].update(*map(axes_of, leaf.sharding.spec))
    kept: dict[Any, int] = {}  # gradients are, in the layout of the update
    gathered = sums = 0.0
    share = 1 / max(1, len(params))  # compilers combine what is not gathered
    for index, leaf in enumerate(params):
        own = {axis for entry in leaf.sharding.spec for axis in axes_of(entry)}
        count = mesh.axis_size([*(own - {*rows})])
        used, size = trace.used[index] / count, trace.nbytes[index] / count
        split = [axis for axis in rows if axis in own]
        later = [axis for axis in rows if axis in slots[leaf.shape] - own]
        whole = [axis for axis in rows if axis not in {*own, *later}]
        if split:
            # XLA casts what a TPU multiplies before it gathers it.
            part = min(used, math.prod(leaf.shape) / count * 2) if is_tpu else used
            again = 2 if is_remat or index in trace.in_loops else 1
            async_s += send(split, part, again * accumulate, 1)
            async_s += send(split, used, accumulate, 1)
            gathered = max(gathered, part)
        used, size = (x / mesh.axis_size(split) for x in (used, size))
        if later:
            sync_s += send(later, used, 1, 1, share) + send(later, size, 1, 1, share)
        if whole:
            sync_s += send(whole, used / mesh.axis_size(later), 1, 2, share)
        kept[trace.factors[index]] = mesh.axis_size([*split, *later])
        sums += size / mesh.axis_size(later) if accumulate > 1 else 0.0
    on_device = [x for x in leaves if "host" not in (x.sharding.memory_kind or "")]
    held = sum(map(shard_bytes, on_device))
    held += sum(sizes[x] for x in trace.arguments[len(leaves) :]) * accumulate
    memory_s += 3 * sum(map(shard_bytes, leaves)) / chip.memory_bytes_per_s
    memory_s += _START_S * len(params)
    grads = {index: kept.get(factors) for index, factors in enumerate(trace.factors)}
    temporary = _temporary_bytes(trace, sizes, grads) + gathered + sums
    peak = held + max(0.0, temporary - chip.scratch_bytes)
    peak += is_tpu * _CODE_BYTES * len(trace.operations)
    computing = max(compute_s, memory_s)
    total = computing + sync_s + max(0.0, async_s - computing)
    return Estimate(compute_s, memory_s, sync_s + async_s, total, peak, dict(sent))


def _temporary_bytes(
    trace: StepTrace, sizes: Sequence[float], grads: Mapping[int, int | None]
) -> float:
    """Returns the most bytes that are computed and still needed."""
    _, last, sources = _lives(trace, sizes, ())
    # What can be made again of what is kept anyway is not kept besides.
    fused = [
        index
        for index, place in last.items()
        if sources[index] and all(last.get(x, -1) >= place for x in sources[index])
    ]
    births, last, _ = _lives(trace, sizes, {*fused})
    deaths: dict[int, float] = defaultdict(float)
    for index, place in last.items():
        deaths[place] += sizes[index]
    alive = peak = 0.0
    for place, new in enumerate(births):
        alive += sum(sizes[x] for x in new if x in last)
        # Nothing but the update reads them, which is fused.
        alive += sum(sizes[x] / (grads[x] or math.inf) for x in new if x not in last)
        peak = max(peak, alive)
        alive -= deaths[place]
    return peak


def _lives(
    trace: StepTrace, sizes: Sequence[float], fused: Collection[int]
) -> tuple[list[list[int]], dict[int, int], dict[int, frozenset[int]]]:
    """Returns what each operation puts into memory, where it is read last, and of what.

    All other arrays are made again, wherever they are read, of those in memory.
    """
    roots: dict[int, frozenset[int]] = {}
    sources: dict[int, frozenset[int]] = {}
    last: dict[int, int] = {}
    births: list[list[int]] = []
    nothing = frozenset[int]()
    for place, op in enumerate(trace.operations):
        whence = nothing.union(*(roots.get(index, nothing) for index in op.inputs))
        size, new = sum(sizes[x] for x in whence), list[int]()
        for index in op.outputs:
            roots[index] = whence
            if op.is_heavy or (size > sizes[index] and index not in fused):
                roots[index] = frozenset([index])
                sources[index] = nothing if op.is_heavy else whence
                new.append(index)
        if new:
            last.update(dict.fromkeys(whence, place))
        births.append(new)
    return births, last, sources


def shard_bytes(leaf: Leaf) -> int:
    """Returns the bytes of an abstract array on each device."""
    shape = leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * _jax.itemsize(leaf.dtype)
