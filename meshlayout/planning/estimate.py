"""What a step costs under some layouts, before anything is compiled.

The step is traced once for all candidates. The engine of `tensor_parallel` follows the
dims of all arrays through its jaxpr, backward pass and update included, so that a
candidate is a table: which factors of dims its axes shard. Axes that shard batches
shard rows; parameters that they shard are gathered where they are used.

Memory is the state, and a liveness of the jaxpr in its order: what is computed element
by element is taken to be fused into what reads it, unless it is smaller than what it is
made of. How compilers pack arrays is not modeled.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshlayout import _jax, _paths
from meshlayout._annotations import Equation, Leaf, PyTree
from meshlayout._batches import batch_axes
from meshlayout.hlo.cost import _products, read_cost
from meshlayout.layout import axes_of
from meshlayout.parallel import factors as parts
from meshlayout.parallel.factors import Value, fresh_dims
from meshlayout.parallel.program import _CALLS, _walk
from meshlayout.planning.chips import Chip
from meshlayout.planning.rows import Estimate, Row
from meshlayout.planning.schedule import ring_hops
from meshlayout.state import TrainState


_CONVOLUTION = "conv_general_dilated"
_PRODUCTS = {"dot_general", "ragged_dot_general", _CONVOLUTION}
# Their results are in memory; all other operations are fused into what reads them.
_HEAVY = {"gather", "sort", "scatter", "scatter-add", "top_k", "cumsum", "concatenate"}
_HEAVY |= {"select_and_scatter_add", "dynamic_update_slice", *_PRODUCTS}
_LOOPS = {"scan", "while"}
_MOVES = {"transpose", "reshape", "squeeze", "expand_dims", "convert_element_type"}

# Seen in programs for TPUs: what they take beyond FLOPs and bytes of jaxprs, how much
# of gathers of parameters is waited for, and what is lost between arrays in memory.
_BEYOND, _WAITED, _GAPS = 1.5, 0.65, 1.08
_START_S = 0.5e-6  # that an operation takes at the least, as TPU compilers estimate


@dataclass(slots=True)
class _Operation:
    name: str
    place: str  # the module that it is for, or else its name
    inputs: list[Value]
    outputs: list[Value]
    runs: int
    start: int  # the first operation of a loop; else its own number
    flops: float  # of all devices, in one run
    is_heavy: bool
    layers: Any = ()  # the factors of the layers of loops that it is in
    passed: tuple[Value, Any, float] | None = None  # around shards, and what share


@dataclass(slots=True)
class _Use:
    """How heavy operations read a parameter, cast or a layer at a time."""

    first: int
    last: int
    turns: int  # of the loop that reads it
    nbytes: int  # of what is read in a turn
    result: Value  # the largest array that is made of it


class StepTrace:
    """A traced train step, walked through; made once for all layouts."""

    def __init__(
        self, traced: jax.stages.Traced, state: TrainState[Any], batch: PyTree
    ) -> None:
        self.operations: list[_Operation] = []
        self.nbytes: dict[Value, int] = {}
        self.uses: dict[int, _Use] = {}  # by parameter
        self._starts: dict[int, int] = {}  # of the loops that are walked through
        # Of what is only moved, what it was; what products read, and all others.
        self._origins: dict[object, object] = {}
        self._reads: dict[bool, set[object]] = {True: set(), False: set()}
        paths = [leaf.path for leaf in _paths.flatten(state.params).leaves]
        self.modules = [path.rpartition("/")[0] or path for path in paths]
        trees = state.params, state, batch
        num_params, num_state, num_batch = (len(jax.tree.leaves(x)) for x in trees)
        self._flow, jaxpr = parts.Flow(visit=self._visit), traced.jaxpr.jaxpr
        args = [
            Value(shape, fresh_dims(shape), (i < num_params) << i, i >= num_state)
            for i, shape in enumerate(var.aval.shape for var in jaxpr.invars)
        ]
        self.params, self.batch = args[:num_params], args[num_state:]
        self._note(args, jaxpr.invars)
        results = _walk(self._flow, jaxpr, args)
        # The state comes back as it was, so that gradients lie like their parameters.
        for before, after in zip(args[:num_state], results, strict=False):
            if before.shape == after.shape:
                parts.link_all(before.dims, after.dims)
        self.factors = {value: _majors(value.dims) for value in self.nbytes}
        self.inputs = [self.factors[x] for x in self.batch[:num_batch]]
        self.rows = {x for factors in self.inputs for x in factors[:1]} - {None}
        images = [x for x in self.factors.values() if len(x) == 4 and x[0] in self.rows]
        self.heights = {factors[1] for factors in images} - {None}
        self.convolves = any(op.name == _CONVOLUTION for op in self.operations)
        # Gradients have the factors of their parameters, in a loop those of a layer.
        self.owners: dict[Any, int] = {}
        for index, value in enumerate(self.params):
            factors, use = self.factors[value], self.uses.get(index)
            layer = 1 if use and use.turns > 1 else 0
            self.owners |= {frozenset(x): index for x in (factors[layer:], factors)}
        for op in self.operations:
            self._finish(op)
        self.flops = read_cost(traced).flops
        narrow = self._reads[True] - self._reads[False]
        self.narrow = {
            value
            for value, nbytes in self.nbytes.items()
            if nbytes == 4 * value.size
            and self._origins.get(value.source, value.source) in narrow
        }
        self.lives = self._lives()

    def _note(self, values: Iterable[Value], variables: Iterable[Any]) -> None:
        """Notes the bytes of values."""
        for value, var in zip(values, variables, strict=True):
            dtype = getattr(var.aval, "dtype", None)
            size = 0 if dtype is None else _jax.itemsize(dtype)
            self.nbytes[value] = size * value.size

    def _visit(self, eqn: Equation, args: list[Value], results: list[Value]) -> None:
        name, depth, number = eqn.primitive.name, self._flow.depth, len(self.operations)
        is_loop = name in _LOOPS
        if name in _CALLS and not is_loop:
            return
        start = self._starts.pop(depth + 1, number) if is_loop else number
        self._starts.setdefault(depth, start)
        self._note(args, eqn.invars)
        self._note(results, eqn.outvars)
        flops = 2.0 * _products(eqn) * max([x.size for x in results[:1]], default=0)
        is_heavy = name in _HEAVY or name.startswith("reduce_")
        facts = self._flow.runs, start, flops, is_heavy
        op = _Operation(name, name, args, results, *facts)
        self.operations.append(op)
        read = args
        if is_loop:
            first, count = _jax.scan_counts(eqn) if name == "scan" else (0, len(args))
            stacks = [*args[first + count :], *results[count:]]
            read = [*args[first : first + count], *results[:count]]
            for each in stacks[1:]:  # their layers lie in one way
                parts.link(stacks[0].dims[0], each.dims[0])
            for each in self.operations[start:] if stacks else ():
                each.layers = (*each.layers, stacks[0].dims[0])
        elif is_heavy:
            self._use(op, number)
        sources = [self._origins.get(x.source, x.source) for x in read]
        if name in _MOVES:
            self._origins[results[0].source] = sources[0]
        else:
            self._reads[name in _PRODUCTS].update(sources)

    def _use(self, op: _Operation, number: int) -> None:
        """Notes which parameters a heavy operation reads."""
        for value in op.inputs:
            weights = value.weights
            index, result = weights.bit_length() - 1, op.outputs[0]
            if not weights or weights != 1 << index:
                continue
            op.place = self.modules[index]
            whole, part = max(1, self.params[index].size), max(1, value.size)
            turns = min(op.runs, max(1, whole // part))
            nbytes = self.nbytes[value] * whole // (part * turns)
            use = self.uses.setdefault(index, _Use(number, 0, 1, nbytes, result))
            use.last, use.turns = number, max(use.turns, turns)
            use.nbytes = min(use.nbytes, nbytes)
            use.result = max(use.result, result, key=self.nbytes.__getitem__)

    def _finish(self, op: _Operation) -> None:
        """Completes what is known of an operation when all factors are."""
        op.layers = _majors(op.layers)
        arrays = [*op.inputs[:2], *op.outputs] if op.name in _PRODUCTS else []
        for value in arrays:  # each shard of a dim meets all of another
            twice = {x for x, n in Counter(self.factors[value]).items() if n > 1}
            if twice - {None}:
                rest = [x for x in arrays if x is not value]
                op.passed = min(rest, key=self.nbytes.__getitem__), twice, 1.0
        image = self.factors[op.inputs[0]] if op.name == _CONVOLUTION else ()
        if heights := self.heights.intersection(image):  # its edges are passed on
            shapes = [x.shape for x in (*op.inputs, *op.outputs)]
            window = min(shapes[1][0], shapes[2][0])  # of the kernel, or its gradient
            op.passed = op.inputs[0], heights, min(1.0, (window - 1) / shapes[0][1])
        owner = self.owners.get(frozenset(self.factors[[*op.outputs, *op.inputs][0]]))
        if op.is_heavy and op.place == op.name and owner is not None:
            op.place = self.modules[owner]

    def _lives(self) -> dict[Value, tuple[int, int]]:
        """Returns the first and last operations that need what is in memory."""
        nothing = frozenset[Value]()
        roots: dict[Value, frozenset[Value]] = {}  # what it is made of, in memory
        lives: dict[Value, tuple[int, int]] = {}
        for place, op in enumerate(self.operations):
            is_stored = op.is_heavy or op.name in _LOOPS
            whence = nothing.union(*(roots.get(x, nothing) for x in op.inputs))
            size = sum(self.nbytes[x] for x in whence)
            for value in op.outputs:
                roots[value] = whence
                if is_stored or size > self.nbytes[value]:
                    roots[value] = frozenset([value])
                    lives[value] = op.start, place
                    lives.update({x: (lives[x][0], place) for x in whence})
        return lives


def _majors(dims: Iterable[Any]) -> tuple[Any, ...]:
    """Returns the factor of each dim that a sharding would divide."""
    return tuple((*parts.leaves_of(dim), None)[0] for dim in dims)


def estimate(
    trace: StepTrace, row: Row, chip: Chip, hop_s: float, accumulate: int, remat: object
) -> Estimate:
    """Returns what a step costs for a candidate's abstract state."""
    device = _Device(trace, row, chip, hop_s, accumulate)
    device.compute()
    device.gather(2 if remat != "none" else 1)
    network = sum(x for k, x in device.parts.items() if k.startswith("wait: "))
    seconds = {"compute": device.computing_s, "memory": 0.0, "network": network}
    seconds["memory"] = sum(device.parts.values()) - network - device.computing_s
    return Estimate(seconds, device.peak_bytes(), device.sent, device.parts)


class _Device:
    """What one device computes, sends and holds in a step."""

    def __init__(
        self, trace: StepTrace, row: Row, chip: Chip, hop_s: float, accumulate: int
    ) -> None:
        self.trace, self.mesh, self.chip, self.hop_s = trace, row.mesh, chip, hop_s
        self.accumulate, self.microbatches = accumulate, row.microbatches
        self.is_tpu = chip.clock_hz is not None
        self.beyond = _BEYOND if self.is_tpu else 1.0
        self.num_shards, self.leaves = row.mesh.axis_size, jax.tree.leaves(row.state)
        self.computing_s = self.held = 0.0  # what is held all the time, in bytes
        self.parts: dict[str, float] = defaultdict(float)  # seconds
        self.sent: dict[str, float] = defaultdict(float)
        self.gathered: list[tuple[int, int, float]] = []  # operations, and bytes
        self.copies: dict[Any, float] = {}  # of stacked gradients, by their factors
        # Parameters are gathered along these, but not experts to which tokens are sent.
        self.rows, usual = [*itertools.chain(*row.batch)], batch_axes(row.mesh)
        self.along = [x for x in self.rows if x not in row.batch[0] or x in usual]
        self.shards: dict[Any, tuple[str, ...]] = {}  # axes by factor
        for factors in trace.inputs:
            self.shards |= zip(factors, row.batch, strict=False)
        if len(row.batch) == 4:  # images, whose rows are in shards where they divide
            count, axes = self.num_shards(row.batch[1]), row.batch[1]
            self.shards |= {x: axes for x in trace.heights if x.size % count == 0}
        for value, leaf in zip(trace.params, self.leaves, strict=False):
            pairs = zip(trace.factors[value], leaf.sharding.spec, strict=False)
            for factor, entry in pairs:
                axes = tuple(x for x in axes_of(entry) if x not in self.along)
                if factor is not None and axes:
                    self.shards.setdefault(factor, axes)
        # With sequence parallelism, what lacks the model axis is in shards of tokens.
        spare = {"model"} if "sequence=True" in "".join(row.code) else set[str]()
        tokens = {x for factors in trace.inputs for x in factors[1:2] if spare}
        self.spread = self.num_shards([*spare])  # before and after sums
        self.axes: dict[Value, set[str]] = {}
        self.sizes: dict[Value, float] = {}
        for value, factors in trace.factors.items():
            self.axes[value] = axes = self.axes_in(factors)
            is_batch = accumulate > 1 and not trace.rows.isdisjoint(factors)
            # XLA casts what a TPU multiplies, before it is kept or sent.
            count = 2 if self.is_tpu and value in trace.narrow else 1
            others = set() if tokens.isdisjoint(factors) else spare
            count *= self.num_shards([*(axes | others)])
            self.sizes[value] = trace.nbytes[value] / count / accumulate**is_batch

    def axes_in(self, factors: Iterable[Any]) -> set[str]:
        """Returns the axes that shard factors."""
        return {axis for x in factors for axis in self.shards.get(x, ())}

    def send(
        self,
        what: str,
        axes: Iterable[str],
        size: float,
        passes: float,
        *,
        hops: float = 1,
        waited: float = 1,
    ) -> None:
        """Counts passes of a ring, an all-reduce as two, and what is waited for."""
        names = [axis for axis in self.mesh.axis_names if axis in {*axes}]
        n = self.num_shards(names)
        nbytes, delay = (n - 1) / n * size, hops * ring_hops(n) * self.hop_s
        seconds = passes * (nbytes / self.chip.ring_bytes_per_s + delay)
        if n > 1:
            self.sent[", ".join(names)] += passes * nbytes
            self.parts[f"wait: {what}"] += waited * seconds

    def compute(self) -> None:
        """Counts what operations compute, read and write, and the sums over shards."""
        sizes, partial = self.sizes, dict[Value, set[str]]()  # axes to sum over
        for op in self.trace.operations:
            runs, size = op.runs * self.accumulate, sum(sizes[x] for x in op.outputs)
            inner = set[str]().union(*(self.axes[x] for x in op.inputs[:2]))
            outer = set[str]().union(*(self.axes[x] for x in op.outputs))
            over, times = set[str](), 1
            if op.is_heavy:
                # Sums over rows are gradients of parameters, which follow, or few numbers.
                over = inner - outer - {*self.rows}
            elif op.name in {"add_any", "add", *_MOVES}:  # compilers add up before
                first, *others = (partial.get(x, set[str]()) for x in op.inputs)
                over, times = first, -len(others)
                if any(x != first for x in others):
                    continue
            self.send(
                f"all_reduce, {op.place}", over, size * self.spread, 2 * runs * times
            )
            partial.update(dict.fromkeys(op.outputs if over else (), over))
            if not op.is_heavy:
                continue
            layers = self.axes_in(op.layers)
            count, stages = (
                self.num_shards([*x]) for x in (inner | outer | layers, layers)
            )
            turns = (self.microbatches + stages - 1) / self.microbatches
            computing = turns * op.runs * op.flops / count / self.chip.flops_per_s
            read = (size + sum(sizes[x] for x in op.inputs)) / stages
            seconds = max(_START_S, read / self.chip.memory_bytes_per_s)
            self.computing_s += computing
            self.parts[op.place] += self.beyond * max(computing, turns * runs * seconds)
            if op.passed:
                value, crossed, share = op.passed
                around = self.axes_in(crossed)
                whole = share * sizes[value] * self.num_shards([*around])
                self.send(f"collective_permute, {op.place}", around, whole, runs)

    def gather(self, times: int) -> None:
        """Counts gathers of parameters, so many in a step, and sums of gradients."""
        trace, leaves, count = self.trace, self.leaves, self.accumulate
        share = 1 / max(1, len(trace.params))  # compilers combine what is not gathered
        transient = moved = 0.0
        for index, (value, leaf) in enumerate(zip(trace.params, leaves, strict=False)):
            module, nbytes = trace.modules[index], trace.nbytes[value]
            own = {axis for entry in leaf.sharding.spec for axis in axes_of(entry)}
            use = trace.uses.get(index) or _Use(0, 0, 1, nbytes, value)
            others = self.num_shards([*(own - {*self.along})])
            used, size = use.nbytes / others, nbytes / others
            split = [axis for axis in self.along if axis in own]
            whole, n = [x for x in self.rows if x not in own], self.num_shards(split)
            # XLA casts what a TPU multiplies before it gathers it.
            part = min(used, size / use.turns / 2) if self.is_tpu else used
            again = 2 if use.turns > 1 else times
            if split:
                runs = count * use.turns
                facts: Any = {"waited": _WAITED}
                self.send(f"all_gather, {module}", split, part, again * runs, **facts)
                self.send(f"reduce_scatter, {module}", split, used, runs, **facts)
                # Small matrices are multiplied in parts, as they come, if they are in
                # as many as the batch: each part reads and writes the results.
                if self.is_tpu and not whole and part < self.sizes[use.result]:
                    moved += runs * (n - 1) / 3 * self.sizes[use.result]
                transient = max(transient, (again + 1) * part)
                self.gathered += [(use.first, use.last, part)] * (again == 1)
            if use.turns > 1 and part < used:  # a loop's, before it
                self.gathered.append((use.first, use.last, part * use.turns / n))
            self.send(
                f"all_reduce, {module}", whole, used * use.turns / n, 2, hops=share
            )
            for factors in (trace.factors[value], trace.factors[value][1:]):
                self.copies[frozenset(factors)] = (1 + bool(whole)) / n
            self.held += size / n if count > 1 else 0.0
        on_device = [x for x in leaves if "host" not in (x.sharding.memory_kind or "")]
        on_host = sum(map(shard_bytes, leaves)) - sum(map(shard_bytes, on_device))
        if on_host:  # it comes, and goes back
            host_s = 2 * on_host / self.chip.host_bytes_per_s
            self.parts["wait: host memory"] += host_s
        self.held += sum(map(shard_bytes, on_device)) + transient
        self.held += sum(self.sizes[x] for x in trace.batch) * count
        # The state is read and written, and gradients are read.
        moved += 7 / 3 * sum(map(shard_bytes, leaves))
        updating = moved / self.chip.memory_bytes_per_s + _START_S * len(trace.params)
        self.parts["optimizer"] += self.beyond * updating

    def peak_bytes(self) -> float:
        """Returns what the device holds at the most."""
        trace, memory = self.trace, np.zeros(len(self.trace.operations) + 1)
        lives = [*self.gathered]
        for value, (first, last) in trace.lives.items():
            size = self.sizes[value]
            if first < last:  # stacked gradients
                size *= self.copies.get(frozenset(trace.factors[value]), 1)
            lives.append((first, last, size))
        for first, last, size in lives:
            memory[first : last + 1] += size
        return self.held + _GAPS * float(memory.max())


def shard_bytes(leaf: Leaf) -> int:
    """Returns the bytes of an abstract array on each device."""
    shape = leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * _jax.itemsize(leaf.dtype)
