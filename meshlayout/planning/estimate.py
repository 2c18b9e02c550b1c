"""What a step costs under some layouts, before anything is compiled.

The step is traced once for all candidates. The engine of `tensor_parallel` follows the
dims of all arrays through its jaxpr, backward pass and update included, so that a
candidate is a table: which factors of dims its axes shard. Axes that shard batches
shard rows; parameters that they shard are gathered where they are used.

Memory is a liveness of the jaxpr in its order. What is computed element by element is
taken to be fused into what reads it, unless it is smaller than what it is made of. Seen
in programs for TPUs: a loop has its stacked results from its start, and what it reads
until its end; the next weights are gathered while some are used, in bfloat16; while a
gradient is computed, the reduce-scatter of the one before goes on.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from meshlayout import _jax
from meshlayout._annotations import Equation, Leaf, PyTree
from meshlayout._batches import batch_axes
from meshlayout.hlo.cost import _products, read_cost
from meshlayout.layout import axes_of
from meshlayout.mesh import Mesh
from meshlayout.parallel.factors import Flow, Value, fresh_dims, leaves_of, link_all
from meshlayout.parallel.program import _CALLS, _walk
from meshlayout.planning.chips import Chip
from meshlayout.planning.schedule import ring_hops
from meshlayout.state import TrainState


# Their results are in memory; all other operations are fused into what reads them.
_HEAVY = {"dot_general", "ragged_dot_general", "conv_general_dilated", "gather", "sort"}
_HEAVY |= {"scatter", "scatter-add", "top_k", "cumsum", "concatenate"}
_HEAVY |= {"select_and_scatter_add", "dynamic_update_slice"}
_LOOPS = {"scan", "while"}

_START_S = 0.5e-6  # that an operation takes at the least, as TPU compilers estimate
_CODE_BYTES = 12_000  # of a TPU program, for each operation of the jaxpr


@dataclass(frozen=True)
class Estimate:
    """What one step costs on each device: seconds, bytes, and bytes sent by axes."""

    seconds: Mapping[str, float]  # compute, memory beyond it, and network beyond both
    peak_bytes: float
    sent: Mapping[str, float]


@dataclass(slots=True)
class _Operation:
    name: str
    inputs: list[int]  # arrays, by index
    outputs: list[int]
    runs: int
    start: int  # the first operation of a loop; else its own place
    flops: float = 0.0  # of all devices, in one run
    summed: Iterable[Any] = ()  # factors over which it sums
    sliced: dict[int, int] = field(default_factory=dict)  # inputs by turns of a loop

    @property
    def is_heavy(self) -> bool:
        return self.name in _HEAVY | _LOOPS or self.name.startswith("reduce_")


class StepTrace:
    """A traced train step, walked through; made once for all layouts."""

    def __init__(
        self, traced: jax.stages.Traced, state: TrainState[Any], batch: PyTree
    ) -> None:
        self.operations: list[_Operation] = []
        self.values: list[Value] = []
        self.nbytes: list[int] = []
        self._indices: dict[int, int] = {}
        self._starts: dict[int, int] = {}  # of the loops that are walked through
        self._flow, jaxpr = Flow(visit=self._visit), traced.jaxpr.jaxpr
        shapes = [var.aval.shape for var in jaxpr.invars]
        args = [Value(shape, fresh_dims(shape)) for shape in shapes]
        self.arguments = [*map(self._index, args, jaxpr.invars)]
        results = _walk(self._flow, jaxpr, args)
        # The state comes back as it was, so that gradients lie like their parameters.
        num_state, num_batch = (len(jax.tree.leaves(x)) for x in (state, batch))
        for before, after in zip(args[:num_state], results, strict=False):
            if before.shape == after.shape:
                link_all(before.dims, after.dims)
        self.num_params = len(jax.tree.leaves(state.params))
        self.factors = [_majors(value.dims) for value in self.values]
        for op in self.operations:
            op.summed = {*_majors(op.summed)}
        rows = self.arguments[num_state : num_state + num_batch]
        self.rows = {x for index in rows for x in self.factors[index][:1]} - {None}
        self.flops = read_cost(traced).flops
        self.uses = self._uses()

    def _index(self, value: Value, var: Any) -> int:
        if id(value) not in self._indices:
            self._indices[id(value)] = len(self.values)
            self.values.append(value)
            dtype = getattr(var.aval, "dtype", None)
            size = 0 if dtype is None else _jax.itemsize(dtype)
            self.nbytes.append(size * math.prod(value.shape))
        return self._indices[id(value)]

    def _visit(self, eqn: Equation, args: list[Value], results: list[Value]) -> None:
        name, depth, place = eqn.primitive.name, self._flow.depth, len(self.operations)
        is_loop = name in _LOOPS
        if name in _CALLS and not is_loop:
            return
        start = self._starts.pop(depth + 1, place) if is_loop else place
        self._starts.setdefault(depth, start)
        inputs = [*map(self._index, args, eqn.invars)]
        outputs = [*map(self._index, results, eqn.outvars)]
        flops = 2.0 * _products(eqn) * math.prod([*[x.shape for x in results], ()][0])
        op = _Operation(name, inputs, outputs, self._flow.runs, start, flops)
        if name == "scan":
            sliced = inputs[sum(_jax.scan_counts(eqn)) :]
            op.sliced = dict.fromkeys(sliced, max(1, eqn.params["length"]))
        elif op.is_heavy and not is_loop:
            dims = itertools.chain(*(value.dims for value in results))
            kept = {id(factor) for factor in itertools.chain(*dims)}
            both = itertools.chain(*(value.dims for value in args[:2]))
            op.summed = [dim for dim in both if dim and id(dim[0]) not in kept]
        self.operations.append(op)

    def _uses(self) -> dict[int, tuple[int, int, int, int]]:
        """Returns where parameters are first and last used, in what parts and bytes.

        That is as they are cast, or a layer at a time.
        """
        uses: dict[int, tuple[int, int, int, int]] = {}
        origins = {index: index for index in range(self.num_params)}
        for place, op in enumerate(self.operations):
            for index in op.inputs:
                if index not in origins:
                    continue
                origin = origins[index]
                if op.is_heavy:
                    turns = op.sliced.get(index, 1)
                    first, _, runs, size = uses.get(origin, (op.start, 0, 1, 2**63))
                    size = min(size, self.nbytes[index] // turns)
                    uses[origin] = first, place, max(runs, turns), size
                else:
                    whole = self.values[index].size
                    same = (x for x in op.outputs if self.values[x].size <= whole)
                    origins.update(dict.fromkeys(same, origin))
        return uses


def _majors(dims: Iterable[Any]) -> tuple[Any, ...]:
    """Returns the factor of each dim that a sharding would divide."""
    return tuple((*leaves_of(dim), None)[0] for dim in dims)


def estimate(
    trace: StepTrace,
    state: TrainState[Any],
    mesh: Mesh,
    chip: Chip,
    accumulate: int,
    is_remat: bool,  # noqa: FBT001
    hop_s: float,
) -> Estimate:
    """Returns what a step costs for an abstract state in its layouts."""
    rows, leaves = batch_axes(mesh), jax.tree.leaves(state)
    params, is_tpu = leaves[: trace.num_params], chip.scratch_bytes > 0
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
        if not op.is_heavy or op.name in _LOOPS:
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
    slots: dict[Any, set[str]] = defaultdict(set)
    for leaf in jax.tree.leaves(state.opt_state):
        slots[leaf.shape].update(*map(axes_of, leaf.sharding.spec))
    # Into how many shards, and whether by a reduce-scatter and added up after it.
    grads: dict[Any, tuple[int, bool, bool]] = {}
    lives: list[tuple[int, int, float]] = []
    transient = sums = 0.0
    share = 1 / max(1, len(params))  # compilers combine what is not gathered
    for index, leaf in enumerate(params):
        own = {axis for entry in leaf.sharding.spec for axis in axes_of(entry)}
        count = mesh.axis_size([*(own - {*rows})])
        nbytes = trace.nbytes[index]
        first, last, runs, used = trace.uses.get(index, (0, 0, 1, nbytes))
        used, size = used / count, nbytes / count
        split = [axis for axis in rows if axis in own]
        later = [axis for axis in rows if axis in slots[leaf.shape] - own]
        whole = [axis for axis in rows if axis not in {*own, *later}]
        if split:
            # XLA casts what a TPU multiplies before it gathers it.
            part = min(used, size / runs / 2) if is_tpu else used
            again = 2 if is_remat or runs > 1 else 1
            send(split, part, again * accumulate * runs)
            send(split, used, accumulate * runs)
            transient = max(transient, again * part)
            lives += [(first, last, part)] * (again == 1)
        size, total = size / mesh.axis_size(split), used * runs
        if later:
            send(later, total / mesh.axis_size(split), 1, share)
            send(later, size, 1, share)
        if whole:
            send(whole, total / mesh.axis_size([*split, *later]), 2, share)
        shares = mesh.axis_size([*split, *later]), bool(split), bool(whole)
        grads[frozenset(trace.factors[index])] = shares
        sums += size / mesh.axis_size(later) if accumulate > 1 else 0.0
    on_device = [x for x in leaves if "host" not in (x.sharding.memory_kind or "")]
    held = sum(map(shard_bytes, on_device)) + sums
    held += sum(sizes[x] for x in trace.arguments[len(leaves) :]) * accumulate
    held += is_tpu * _CODE_BYTES * len(trace.operations)
    # The state is read and written, and gradients are read.
    memory_s += 7 / 3 * sum(map(shard_bytes, leaves)) / chip.memory_bytes_per_s
    memory_s += _START_S * len(params)
    found = {i: grads.get(frozenset(x)) for i, x in enumerate(trace.factors)}
    temporary = _peak([*lives, *_lives(trace, sizes, found)]) + transient
    peak = held + temporary * (temporary > chip.scratch_bytes)
    seconds = {"compute": compute_s, "memory": memory_s, "network": network_s}
    return Estimate(seconds, peak, dict(sent))


def _peak(lives: Iterable[tuple[int, int, float]]) -> float:
    """Returns the most bytes at a time."""
    changes: dict[int, float] = defaultdict(float)
    for first, last, size in lives:
        changes[2 * first] += size
        changes[2 * last + 1] -= size
    totals = itertools.accumulate(changes[place] for place in sorted(changes))
    return max(totals, default=0.0)


def _lives(
    trace: StepTrace,
    sizes: Sequence[float],
    grads: Mapping[int, tuple[int, bool, bool] | None],
) -> Iterator[tuple[int, int, float]]:
    """Yields first and last operation and bytes of what is computed and needed again.

    `grads` are gradients, if no operation reads them but the update.
    """
    _, last, sources = _reads(trace, sizes, ())
    # What can be made again of what is kept anyway is not kept besides.
    fused = {
        index
        for index, place in last.items()
        if sources[index] and all(last.get(x, -1) >= place for x in sources[index])
    }
    births, last, _ = _reads(trace, sizes, fused)
    whole: list[tuple[int, float, bool]] = []
    for index, place in births.items():
        op = trace.operations[place]
        count, is_scattered, is_added = grads[index] or (0, False, False)
        if index in last:
            yield op.start, last[index], sizes[index]
        elif count and op.sliced:
            # Stacked ones are all added up after the loop.
            copies = 2 if is_added else 1
            yield op.start, len(trace.operations), copies * sizes[index] / count
        elif count:
            whole.append((place, sizes[index], is_scattered))
    large = max((size for _, size, _ in whole), default=0.0) / 8
    whole = [each for each in whole if each[1] >= large]
    for (place, size, is_scattered), after in zip(
        whole, [*whole[1:], None], strict=True
    ):
        yield place, after[0] if after and is_scattered else place, size


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
