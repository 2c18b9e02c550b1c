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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
from meshlayout.parallel import factors as dims_of
from meshlayout.parallel.factors import Dims, Flow, Value, fresh_dims, leaves_of
from meshlayout.parallel.operations import OPERATIONS, out_shapes
from meshlayout.parallel.program import _INLINED
from meshlayout.planning.chips import Chip
from meshlayout.planning.schedule import ring_hops
from meshlayout.state import TrainState


# Their results are in memory; all other operations are fused into what reads them.
_HEAVY = {"dot_general", "ragged_dot_general", "conv_general_dilated", "gather", "sort"}
_HEAVY |= {"scatter", "scatter-add", "top_k", "cumsum", "concatenate", "stack"}
_HEAVY |= {"select_and_scatter_add", "dynamic_update_slice"}

_START_S = 0.5e-6  # that an operation takes at the least, as TPU compilers estimate
_CODE_BYTES = 12_000  # of a TPU program, for each operation of the jaxpr


@dataclass(frozen=True)
class Estimate:
    """What one step costs on each device: seconds, bytes, and bytes sent by axes."""

    compute_s: float
    memory_s: float  # more than computing takes
    network_s: float
    peak_bytes: float
    sent: Mapping[str, float]

    @property
    def total_s(self) -> float:
        """Seconds of a step: collectives are hardly overlapped."""
        return self.compute_s + self.memory_s + self.network_s


@dataclass(slots=True)
class _Operation:
    name: str
    inputs: list[int]  # arrays, by index
    outputs: list[int]
    runs: int
    flops: float = 0.0  # of all devices, in one run
    summed: Any = ()  # factors over which it sums

    @property
    def is_heavy(self) -> bool:
        return self.name in _HEAVY or self.name.startswith("reduce_")


class StepTrace:
    """A traced train step, walked through; made once for all layouts."""

    def __init__(
        self, traced: jax.stages.Traced, state: TrainState[Any], batch: PyTree
    ) -> None:
        self.operations: list[_Operation] = []
        self.values: list[Value] = []
        self.nbytes: list[int] = []
        self.loops: list[tuple[int, int]] = []  # their first and last operations
        self._flow, jaxpr = Flow(), traced.jaxpr.jaxpr
        self.arguments = [self._new(var.aval) for var in jaxpr.invars]
        # The state comes back as it was, so that gradients lie like their parameters.
        num_state, num_batch = (len(jax.tree.leaves(x)) for x in (state, batch))
        results = self._walk(jaxpr, self.arguments, 1)
        self._link(self.arguments[:num_state], results)
        self.num_params = len(jax.tree.leaves(state.params))
        self.factors = [_majors(value.dims) for value in self.values]
        for op in self.operations:
            op.summed = {*_majors(op.summed)}
        rows = self.arguments[num_state : num_state + num_batch]
        self.rows = {x for index in rows for x in self.factors[index][:1]} - {None}
        self.flops = sum(op.flops * op.runs for op in self.operations)
        self.uses = self._uses()

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
                dims_of.link_all(self.values[a].dims, self.values[b].dims)

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
            inputs = inputs[eqn.params["cond_nconsts"] :]
            results = self._walk(inner[-1], inputs, runs)
            self._link(inputs[eqn.params["body_nconsts"] :], results)
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
        op = _Operation(name, inputs, outputs, runs, flops)
        self.operations.append(op)
        if op.is_heavy:
            kept = {id(factor) for each in dims for factor in itertools.chain(*each)}
            both = itertools.chain(*(arg.dims for arg in args[:2]))
            op.summed = tuple(dim for dim in both if dim and id(dim[0]) not in kept)
        return outputs

    def _scan(
        self, eqn: Equation, body: Any, inputs: list[int], runs: int
    ) -> list[int]:
        num_consts, num_carry = _jax.scan_counts(eqn)
        times, start = runs * max(1, eqn.params["length"]), num_consts + num_carry
        args, begin = inputs[:start], len(self.operations)
        for index, var in zip(inputs[start:], body.invars[start:], strict=True):
            value = self.values[index]
            part = Value(value.shape[1:], value.dims[1:])
            args.append(self._new(var.aval, part))
            self.operations.append(_Operation("slice", [index], args[-1:], times))
        results = self._walk(body, args, times)
        self._link(inputs[num_consts:start], results)
        pairs = zip(results[num_carry:], eqn.outvars[num_carry:], strict=True)
        for number, (index, var) in enumerate(pairs, num_carry):
            shape = var.aval.shape
            dims = (*fresh_dims(shape[:1]), *self.values[index].dims)
            results[number] = self._new(var.aval, Value(shape, dims))
            stack = _Operation("stack", [index], results[number : number + 1], runs)
            self.operations.append(stack)
        self.loops.append((begin, len(self.operations) - 1))
        return results

    def _uses(self) -> dict[int, tuple[int, int, int, int]]:
        """Returns the first and last operation, runs and bytes of what is gathered."""
        uses: dict[int, tuple[int, int, int, int]] = {}
        origins = {index: index for index in range(self.num_params)}
        for place, op in enumerate(self.operations):
            for index in op.inputs:
                if index not in origins:
                    continue
                origin = origins[index]
                if not op.is_heavy:
                    # Cast, transposed, or a layer's: it may be gathered as that.
                    whole = self.values[index].size
                    small = [x for x in op.outputs if self.values[x].size <= whole]
                    origins.update(dict.fromkeys(small, origin))
                else:
                    first, _, runs, size = uses.get(origin, (place, 0, 0, math.inf))
                    size = min(size, self.nbytes[index])
                    uses[origin] = first, place, max(runs, op.runs), int(size)
        return uses


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
        is_batch = accumulate > 1 and not trace.rows.isdisjoint(factors)
        count = mesh.axis_size(axes_in(factors)) * (accumulate if is_batch else 1)
        sizes.append(nbytes / count)
    compute_s = memory_s = network_s = 0.0
    sent: dict[str, float] = defaultdict(float)

    def send(axes: list[str], nbytes: float, passes: float, hops: float = 1) -> None:
        """Counts passes of a ring; an all-reduce has two."""
        nonlocal network_s
        n = mesh.axis_size(axes)
        sent[", ".join(axes)] += passes * (n - 1) / n * nbytes
        network_s += passes * (n - 1) / n * nbytes / chip.ring_bytes_per_s
        network_s += passes * hops * ring_hops(n) * hop_s

    for op in trace.operations:
        if not op.is_heavy:
            continue
        factors = [f for index in op.outputs for f in trace.factors[index]]
        count, runs = mesh.axis_size(axes_in(factors, op.summed)), op.runs * accumulate
        read = sum(sizes[index] for index in (*op.inputs, *op.outputs))
        computing = op.flops / count / chip.flops_per_s / accumulate
        compute_s += runs * computing
        reading = max(_START_S, read / chip.memory_bytes_per_s)
        memory_s += runs * max(0.0, reading - computing)
        # Sums over rows are gradients of parameters, which follow, or a few numbers.
        over = {*axes_in(op.summed)} - {*axes_in(factors), *rows}
        if over:
            size = sum(sizes[index] for index in op.outputs)
            send([x for x in mesh.axis_names if x in over], size, 2 * runs)
    is_tpu = chip.scratch_bytes > 0
    slots: dict[Any, set[str]] = defaultdict(set)
    for leaf in jax.tree.leaves(state.opt_state):
        slots[leaf.shape].update(*map(axes_of, leaf.sharding.spec))
    grads: dict[Any, int] = {}  # into how many shards they are divided
    lives: list[tuple[int, int, float]] = []  # of what is gathered
    transient = sums = 0.0
    share = 1 / max(1, len(params))  # compilers combine what is not gathered
    for index, leaf in enumerate(params):
        own = {axis for entry in leaf.sharding.spec for axis in axes_of(entry)}
        count = mesh.axis_size([*(own - {*rows})])
        first, last, runs, used = trace.uses.get(index, (0, 0, 1, 0))
        used, size = used / count, trace.nbytes[index] / count
        split = [axis for axis in rows if axis in own]
        later = [axis for axis in rows if axis in slots[leaf.shape] - own]
        whole = [axis for axis in rows if axis not in {*own, *later}]
        if split:
            # XLA casts what a TPU multiplies before it gathers it.
            kind = min(2, _jax.itemsize(leaf.dtype)) if is_tpu else 4
            part = min(used, math.prod(leaf.shape) / count / runs * kind)
            again = 2 if is_remat or runs > 1 else 1
            send(split, part, again * accumulate * runs)
            send(split, used, accumulate * runs)
            if again == 1:
                lives.append((first, last, part))
            transient = max(transient, part * (again > 1))
        size, total = size / mesh.axis_size(split), used * runs
        if later:
            send(later, total / mesh.axis_size(split), 1, share)
            send(later, size, 1, share)
        if whole:
            send(whole, total / mesh.axis_size([*split, *later]), 2, share)
        grads[frozenset(trace.factors[index])] = mesh.axis_size([*split, *later])
        sums += size / mesh.axis_size(later) if accumulate > 1 else 0.0
    on_device = [x for x in leaves if "host" not in (x.sharding.memory_kind or "")]
    held = sum(map(shard_bytes, on_device))
    held += sum(sizes[x] for x in trace.arguments[len(leaves) :]) * accumulate
    memory_s += 7 / 3 * sum(map(shard_bytes, leaves)) / chip.memory_bytes_per_s
    memory_s += _START_S * len(params)
    counts = {i: grads.get(frozenset(x)) for i, x in enumerate(trace.factors)}
    lives += _lives(trace, sizes, counts)
    peak = held + sums + 2 * transient + _peak(lives, chip.scratch_bytes)
    peak += is_tpu * _CODE_BYTES * len(trace.operations)
    return Estimate(compute_s, memory_s, network_s, peak, dict(sent))


def _peak(lives: Iterable[tuple[int, int, float]], scratch: float) -> float:
    """Returns the most bytes at a time."""
    changes: dict[int, float] = defaultdict(float)
    for first, last, size in lives:
        changes[2 * first] += size
        changes[2 * last + 1] -= size
    total = itertools.accumulate(changes[place] for place in sorted(changes))
    return max(0.0, max(total, default=0.0) - scratch)


def _lives(
    trace: StepTrace, sizes: Sequence[float], counts: Mapping[int, int | None]
) -> Iterator[tuple[int, int, float]]:
    """Yields first and last operation and bytes of what is computed and needed again.

    `counts` are the shards of gradients, which no operation reads but the update.
    """
    _, last, sources = _reads(trace, sizes, ())
    # What can be made again of what is kept anyway is not kept besides.
    fused = {
        index
        for index, place in last.items()
        if sources[index] and all(last.get(x, -1) >= place for x in sources[index])
    }
    births, last, _ = _reads(trace, sizes, fused)
    end, recent = len(trace.operations), list[int]()
    for index, place in births.items():
        # A loop has its stacks from its start, and what it reads until its end.
        done = last.get(index, end)
        for start, stop in trace.loops:
            if trace.operations[place].name == "stack" and start <= place <= stop:
                place = start
            elif place < start <= done <= stop:
                done = stop
        if index in last or trace.operations[births[index]].name == "stack":
            yield (
                place,
                done,
                sizes[index] / (1 if index in last else counts[index] or math.inf),
            )
        elif counts[index]:
            recent.append(index)
    for index, after in itertools.zip_longest(recent, recent[1:]):
        # Whole, until it is divided or added up while the next one is computed.
        yield births[index], births[after] if after else end, sizes[index]


def _reads(
    trace: StepTrace, sizes: Sequence[float], fused: Collection[int]
) -> tuple[dict[int, int], dict[int, int], dict[int, frozenset[int]]]:
    """Returns which operation puts what into memory, which reads it last, and of what.

    All other arrays are made again, wherever they are read, of those in memory.
    """
    roots: dict[int, frozenset[int]] = {}
    sources: dict[int, frozenset[int]] = {}
    births: dict[int, int] = {}
    last: dict[int, int] = {}
    nothing = frozenset[int]()
    for place, op in enumerate(trace.operations):
        whence = nothing.union(*(roots.get(index, nothing) for index in op.inputs))
        size, is_read = sum(sizes[x] for x in whence), False
        for index in op.outputs:
            roots[index] = whence
            if op.is_heavy or (size > sizes[index] and index not in fused):
                roots[index], is_read = frozenset([index]), True
                sources[index] = nothing if op.is_heavy else whence
                births[index] = place
        if is_read:
            last.update(dict.fromkeys(whence, place))
    return births, last, sources


def shard_bytes(leaf: Leaf) -> int:
    """Returns the bytes of an abstract array on each device."""
    shape = leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * _jax.itemsize(leaf.dtype)
