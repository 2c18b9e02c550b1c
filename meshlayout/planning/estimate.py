"""What a step costs under some layouts, before anything is compiled.

The step is traced once for all candidates. The engine of `tensor_parallel` follows the
dims of all arrays through its jaxpr, backward pass and update included, so that a
candidate is a table: which factors of dims its axes shard. Axes that shard batches
shard rows; parameters that they shard are gathered where they are used.

Memory is a liveness of the jaxpr in its order. What is computed element by element is
taken to be fused into what reads it, unless it is smaller than what it is made of. Seen
in programs for TPUs: what fits on the chip is not in memory; a loop has its stacked
results from its start, and what it reads until its end; what only matrix products read
is kept, gathered and added up in bfloat16; while a gradient is computed, the
reduce-scatter of the one before goes on.
"""

import functools
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
_CODE_BYTES = 12_000  # of a TPU program, for each operation of the jaxpr


@dataclass(slots=True)
class _Operation:
    name: str
    place: str  # the module that it is for, or else its name
    inputs: list[int]  # arrays, by index
    outputs: list[int]
    runs: int
    start: int  # the first operation of a loop; else its own number
    flops: float  # of all devices, in one run
    is_heavy: bool
    summed: Any = ()  # factors over which it sums
    stack: Any = ()  # the factors of the layers of loops that it is in
    passed: tuple[int, Any, float] = (0, (), 0.0)  # around shards, and what share


@dataclass(slots=True)
class _Use:
    """How heavy operations read a parameter, cast or a layer at a time."""

    first: int
    last: int
    turns: int  # of the loop that reads it
    nbytes: int  # of what is read in a turn
    result: int  # the largest array that is made of it


class StepTrace:
    """A traced train step, walked through; made once for all layouts."""

    def __init__(
        self, traced: jax.stages.Traced, state: TrainState[Any], batch: PyTree
    ) -> None:
        self.operations: list[_Operation] = []
        self.values: list[Value] = []
        self.nbytes: list[int] = []
        self.uses: dict[int, _Use] = {}  # by parameter
        self._indices: dict[int, int] = {}
        self._starts: dict[int, int] = {}  # of the loops that are walked through
        # Of what is only moved, what it was; what products read, and all others.
        self._origins: dict[object, object] = {}
        self._reads: dict[bool, set[object]] = {True: set(), False: set()}
        paths = [leaf.path for leaf in _paths.flatten(state.params).leaves]
        self.modules = [path.rpartition("/")[0] or path for path in paths]
        trees = state.params, state, batch
        self.num_params, num_state, num_batch = (len(jax.tree.leaves(x)) for x in trees)
        self._flow, args = parts.Flow(visit=self._visit), list[Value]()
        jaxpr = traced.jaxpr.jaxpr
        for index, var in enumerate(jaxpr.invars):
            bits, dims = (index < self.num_params) << index, fresh_dims(var.aval.shape)
            args.append(Value(var.aval.shape, dims, bits, index >= num_state))
            self._index(args[-1], var)
        self.num_arguments, results = len(args), _walk(self._flow, jaxpr, args)
        # The state comes back as it was, so that gradients lie like their parameters.
        for before, after in zip(args[:num_state], results, strict=False):
            if before.shape == after.shape:
                parts.link_all(before.dims, after.dims)
        self.factors = [_majors(value.dims) for value in self.values]
        self.inputs = self.factors[num_state : num_state + num_batch]
        self.rows = {x for factors in self.inputs for x in factors[:1]} - {None}
        images = [x for x in self.factors if len(x) == 4 and x[0] in self.rows]
        self.heights = {factors[1] for factors in images} - {None}
        self.convolves = any(op.name == _CONVOLUTION for op in self.operations)
        # Gradients have the factors of their parameters, in a loop those of a layer.
        self.owners: dict[Any, int] = {}
        for index, factors in enumerate(self.factors[: self.num_params]):
            layer = 1 if index in self.uses and self.uses[index].turns > 1 else 0
            self.owners |= {frozenset(x): index for x in (factors[layer:], factors)}
        for op in self.operations:
            self._finish(op)
        self._name(results[: self.num_params])
        self.flops = read_cost(traced).flops
        # The float32 arrays that only matrix products read.
        narrow = self._reads[True] - self._reads[False]
        sources = [self._origins.get(x.source, x.source) for x in self.values]
        sizes = zip(self.values, self.nbytes, sources, strict=True)
        self.narrow = {
            index
            for index, (x, nbytes, source) in enumerate(sizes)
            if nbytes == 4 * x.size and source in narrow
        }
        self.lives, self.gradients = self._lives()

    def _index(self, value: Value, var: Any) -> int:
        if id(value) not in self._indices:
            self._indices[id(value)] = len(self.values)
            self.values.append(value)
            dtype = getattr(var.aval, "dtype", None)
            size = 0 if dtype is None else _jax.itemsize(dtype)
            self.nbytes.append(size * value.size)
        return self._indices[id(value)]

    def _visit(self, eqn: Equation, args: list[Value], results: list[Value]) -> None:
        name, depth, number = eqn.primitive.name, self._flow.depth, len(self.operations)
        is_loop = name in _LOOPS
        if name in _CALLS and not is_loop:
            return
        start = self._starts.pop(depth + 1, number) if is_loop else number
        self._starts.setdefault(depth, start)
        inputs = [*map(self._index, args, eqn.invars)]
        outputs = [*map(self._index, results, eqn.outvars)]
        flops = 2.0 * _products(eqn) * max([x.size for x in results[:1]], default=0)
        is_heavy = name in _HEAVY or name.startswith("reduce_")
        facts = self._flow.runs, start, flops, is_heavy
        op = _Operation(name, name, inputs, outputs, *facts)
        self.operations.append(op)
        read = args
        if is_loop:
            first, count = _jax.scan_counts(eqn) if name == "scan" else (0, len(inputs))
            read = [*args[first : first + count], *results[:count]]
            stacks = [*args[first + count :], *results[count:]]
            for each in stacks[1:]:  # their layers lie in one way
                parts.link(stacks[0].dims[0], each.dims[0])
            for each in self.operations[start:] if stacks else ():
                each.stack = (*each.stack, stacks[0].dims[0])
        elif is_heavy:
            kept = {id(factor) for x in results for dim in x.dims for factor in dim}
            both = itertools.chain(*(value.dims for value in args[:2]))
            op.summed = [dim for dim in both if dim and id(dim[0]) not in kept]
            self._use(op, number)
        sources = [self._origins.get(x.source, x.source) for x in read]
        if name in _MOVES:
            self._origins[results[0].source] = sources[0]
        else:
            self._reads[name in _PRODUCTS].update(sources)

    def _use(self, op: _Operation, number: int) -> None:
        """Notes which parameters a heavy operation reads."""
        for value in op.inputs:
            weights = self.values[value].weights
            index, result = weights.bit_length() - 1, op.outputs[0]
            if not weights or weights != 1 << index:
                continue
            op.place = self.modules[index]
            whole, part = (max(1, self.values[x].size) for x in (index, value))
            turns = min(op.runs, max(1, whole // part))
            nbytes = self.nbytes[value] * whole // (part * turns)
            use = self.uses.setdefault(index, _Use(number, 0, 1, nbytes, result))
            use.last, use.turns = number, max(use.turns, turns)
            use.nbytes = min(use.nbytes, nbytes)
            use.result = max(use.result, result, key=self.nbytes.__getitem__)

    def _finish(self, op: _Operation) -> None:
        """Completes what is known of an operation when all factors are."""
        op.summed, op.stack = {*_majors(op.summed)}, _majors(op.stack)
        arrays = [*op.inputs[:2], *op.outputs] if op.name in _PRODUCTS else []
        for index in arrays:  # each shard of a dim meets all of another
            twice = {x for x, n in Counter(self.factors[index]).items() if n > 1}
            if twice - {None}:
                rest = [x for x in arrays if x != index]
                op.passed = min(rest, key=self.nbytes.__getitem__), twice, 1.0
        image = self.factors[op.inputs[0]] if op.name == _CONVOLUTION else ()
        if heights := self.heights.intersection(image):  # its edges are passed on
            shapes = [self.values[x].shape for x in (*op.inputs, *op.outputs)]
            window = min(shapes[1][0], shapes[2][0])  # of the kernel, or its gradient
            op.passed = op.inputs[0], heights, min(1.0, (window - 1) / shapes[0][1])

    def _name(self, updated: list[Value]) -> None:
        """Gives what computes a gradient its parameter's module, back from updates."""
        makers = {x: op for op in self.operations for x in op.outputs}
        first: dict[object, int] = {}  # of a stack of layers, what makes a layer
        for index, value in enumerate(self.values):
            first.setdefault(value.source, index)
        for module, value in zip(self.modules, updated, strict=True):
            stack = [self._indices.get(id(value), -1)]
            while stack:
                index = stack.pop()
                op, size = makers.pop(index, None), self.values[index].size
                if op is None:
                    continue
                if op.is_heavy:
                    op.place = module
                elif op.name in _LOOPS:
                    stack.append(first[self.values[index].source])
                else:
                    stack += [x for x in op.inputs if self.values[x].size == size]

    def _lives(self) -> tuple[list[tuple[int, int, int]], ...]:
        """Returns the first and last operations of what is computed and needed again.

        Then the operations and parameters of gradients, which only the update reads.
        """
        nothing = frozenset[int]()
        roots: dict[int, frozenset[int]] = {}  # what an array is made of, in memory
        births: dict[int, tuple[int, frozenset[int]]] = {}
        last: dict[int, int] = {}
        for place, op in enumerate(self.operations):
            is_stored = op.is_heavy or op.name in _LOOPS
            whence = nothing.union(*(roots.get(index, nothing) for index in op.inputs))
            size = sum(self.nbytes[x] for x in whence)
            for index in op.outputs:
                roots[index] = whence
                if is_stored or size > self.nbytes[index]:
                    roots[index] = frozenset([index])
                    births[index] = place, nothing if is_stored else whence
                    last.update(dict.fromkeys(whence, place))
        # What can be made again of what is kept anyway is not kept besides.
        lives = [
            (self.operations[births[index][0]].start, place, index)
            for index, place in last.items()
            for sources in [births[index][1]]
            if not sources or any(last.get(x, -1) < place for x in sources)
        ]
        ends = {x: frozenset(self.factors[x]) for x in births if x not in last}
        gradients = [(x, key) for x, key in ends.items() if key in self.owners]
        return lives, [(births[x][0], x, self.owners[key]) for x, key in gradients]


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
        self.lives: list[tuple[int, int, float]] = []  # operations, and bytes
        # By parameter, into how many shards gradients are scattered, if they are, and
        # if these are added up after that.
        self.gradients: dict[int, tuple[int, bool, bool]] = {}
        # Parameters are gathered along these, but not experts to which tokens are sent.
        self.rows, usual = [*itertools.chain(*row.batch)], batch_axes(row.mesh)
        self.gathered = [x for x in self.rows if x not in row.batch[0] or x in usual]
        self.shards: dict[Any, tuple[str, ...]] = {}  # axes by factor
        for factors in trace.inputs:
            self.shards |= zip(factors, row.batch, strict=False)
        if len(row.batch) == 4:  # images, whose rows are in shards where they divide
            count, axes = self.num_shards(row.batch[1]), row.batch[1]
            self.shards |= {x: axes for x in trace.heights if x.size % count == 0}
        for index, leaf in enumerate(self.leaves[: trace.num_params]):
            pairs = zip(trace.factors[index], leaf.sharding.spec, strict=False)
            for factor, entry in pairs:
                axes = tuple(x for x in axes_of(entry) if x not in self.gathered)
                if factor is not None and axes:
                    self.shards.setdefault(factor, axes)
        # With sequence parallelism, what lacks the model axis is in shards of tokens.
        spare = ["model"] * ("sequence=True" in "".join(row.code))
        tokens = {x for factors in trace.inputs for x in factors[1:2] if spare}
        self.spread = self.num_shards(spare)  # before and after sums
        self.sizes: list[float] = []
        self.tiles: list[float] = []  # the same, as memory is divided
        for index, factors in enumerate(trace.factors):
            is_batch = accumulate > 1 and not trace.rows.isdisjoint(factors)
            # XLA casts what a TPU multiplies, before it is kept or sent.
            count = 2 if self.is_tpu and index in trace.narrow else 1
            others = [] if tokens.isdisjoint(factors) else spare
            count *= self.num_shards([*{*self.axes_in(factors), *others}])
            self.sizes.append(trace.nbytes[index] / count / accumulate**is_batch)
            dims = zip(trace.values[index].shape, factors, strict=True)
            shard = (-(-n // self.num_shards(self.shards.get(x, ()))) for n, x in dims)
            self.tiles.append(self.sizes[-1] * (_padding(*shard) if self.is_tpu else 1))

    def axes_in(self, *groups: Iterable[Any]) -> list[str]:
        """Returns the axes that shard factors."""
        known = (self.shards.get(factor, ()) for factor in itertools.chain(*groups))
        return [*dict.fromkeys(itertools.chain(*known))]

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
        trace, sizes = self.trace, self.sizes
        partial: dict[int, set[str]] = {}  # sums that are added to others first
        for op in trace.operations:
            runs, size = op.runs * self.accumulate, sum(sizes[x] for x in op.outputs)
            name = f"all_reduce, {op.place}"
            over = partial.get([*op.inputs, -1][0], set[str]())
            is_sum = bool(over) and op.name in {"add_any", "add", *_MOVES}
            if is_sum and all(partial.get(index) == over for index in op.inputs):
                times = 1 - len(op.inputs)
                self.send(name, over, size * self.spread, 2 * runs * times)
                partial[op.outputs[0]] = over
            if not op.is_heavy:
                continue
            factors = [f for index in op.outputs for f in trace.factors[index]]
            count = self.num_shards(self.axes_in(factors, op.summed, op.stack))
            stages = self.num_shards(self.axes_in(op.stack))
            turns = (self.microbatches + stages - 1) / self.microbatches
            computing = turns * op.runs * op.flops / count / self.chip.flops_per_s
            read = (size + sum(sizes[x] for x in op.inputs)) / stages
            seconds = max(_START_S, read / self.chip.memory_bytes_per_s)
            self.computing_s += computing
            reading = turns * runs * seconds
            self.parts[op.place] += self.beyond * max(computing, reading)
            # Sums over rows are gradients of parameters, which follow, or few numbers.
            over = {*self.axes_in(op.summed)} - {*self.axes_in(factors), *self.rows}
            self.send(name, over, size * self.spread, 2 * runs)
            partial.update(dict.fromkeys(op.outputs if over else (), over))
            index, crossed, share = op.passed
            around = self.axes_in(crossed)
            whole = share * sizes[index] * self.num_shards(around)
            self.send(f"collective_permute, {op.place}", around, whole, runs)

    def gather(self, times: int) -> None:
        """Counts gathers of parameters, so many in a step, and sums of gradients."""
        trace, leaves, count = self.trace, self.leaves, self.accumulate
        share = 1 / max(1, trace.num_params)  # compilers combine what is not gathered
        transient = moved = 0.0
        for index, leaf in enumerate(leaves[: trace.num_params]):
            module = trace.modules[index]
            own = {axis for entry in leaf.sharding.spec for axis in axes_of(entry)}
            use = trace.uses.get(index) or _Use(0, 0, 1, trace.nbytes[index], index)
            others = self.num_shards([*(own - {*self.gathered})])
            used, size = use.nbytes / others, trace.nbytes[index] / others
            split = [axis for axis in self.gathered if axis in own]
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
                transient = max(transient, again * part)
                self.lives += [(use.first, use.last, part)] * (again == 1)
            if use.turns > 1 and part < used:  # a loop's, before it
                self.lives.append((use.first, use.last, part * use.turns / n))
            nbytes = used * use.turns / n
            self.send(f"all_reduce, {module}", whole, nbytes, 2, hops=share)
            self.gradients[index] = n, bool(split), bool(whole)
            self.held += size / n if count > 1 else 0.0
        on_device = [x for x in leaves if "host" not in (x.sharding.memory_kind or "")]
        on_host = sum(map(shard_bytes, leaves)) - sum(map(shard_bytes, on_device))
        if on_host:  # it comes, and goes back
            host_s = 2 * on_host / self.chip.host_bytes_per_s
            self.parts["wait: host memory"] += host_s
        self.held += sum(map(shard_bytes, on_device)) + transient
        self.held += sum(self.sizes[len(leaves) : trace.num_arguments]) * count
        self.held += self.is_tpu * _CODE_BYTES * len(trace.operations)
        # The state is read and written, and gradients are read.
        moved += 7 / 3 * sum(map(shard_bytes, leaves))
        updating = moved / self.chip.memory_bytes_per_s + _START_S * trace.num_params
        self.parts["optimizer"] += self.beyond * updating

    def peak_bytes(self) -> float:
        """Returns what the device holds at the most."""
        trace, before = self.trace, (0, 0.0, False)
        lives = [(first, last, self.tiles[i]) for first, last, i in trace.lives]
        lives += self.lives
        chip, memory, made = np.zeros((3, len(trace.operations) + 1))
        # Collectives take gradients from memory.
        for place, index, owner in trace.gradients:
            op, size = trace.operations[place], self.sizes[index]
            n, is_scattered, is_summed = self.gradients[owner]
            if op.name in _LOOPS:  # stacked ones are added up after the loop
                memory[op.start :] += (1 + is_summed) * size / n
                continue
            memory[place] += size
            if size > before[1] / 8:
                if before[2]:  # its reduce-scatter goes on
                    memory[before[0] + 1 : place + 1] += before[1]
                before = place, size, is_scattered
        # Compilers keep on the chip what fits there and is needed before much else is
        # made, first what is needed shortly.
        for first, _, size in lives:
            made[first:] += size
        for first, last, size in sorted(lives, key=lambda x: x[1] - x[0]):
            room = 1.25e8 * self.is_tpu - chip[first : last + 1].max(initial=0.0)
            is_soon = made[last] - made[first] <= 2.5e8 * self.is_tpu
            (chip if is_soon and size <= room else memory)[first : last + 1] += size
        return self.held + _GAPS * float(memory.max())


@functools.cache
def _padding(*shape: int) -> float:
    """Returns how much larger an array is in tiles of 8 x 128, in its best layout."""
    ratios = [[-(-n // tile) * tile / max(1, n) for n in shape] for tile in (8, 128)]
    pairs = itertools.permutations(range(len(shape)), 2)
    return min((ratios[0][i] * ratios[1][j] for i, j in pairs), default=1.0)


def shard_bytes(leaf: Leaf) -> int:
    """Returns the bytes of an abstract array on each device."""
    shape = leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * _jax.itemsize(leaf.dtype)
