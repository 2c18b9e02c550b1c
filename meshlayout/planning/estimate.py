"""What a step costs under some layouts, before anything is compiled.

The step is traced once for all candidates. The engine of `tensor_parallel` follows the
dims of all arrays through its jaxpr, backward pass and update included, so that a
candidate is a table: which factors of dims its axes shard. Axes that shard batches
shard rows; parameters that they shard are gathered where they are used.

Memory is that of the state and of what operations keep for later ones, in the order of
the jaxpr. What is computed element by element is taken to be fused into what reads it,
unless it is smaller than what it is made of.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshlayout import _jax, _paths
from meshlayout._annotations import Equation, Leaf, PyTree
from meshlayout._batches import batch_axes
from meshlayout.hlo.cost import _products, read_cost
from meshlayout.layout import axes_of
from meshlayout.parallel.factors import Flow, Value, fresh_dims, leaves_of, link_all
from meshlayout.parallel.program import _CALLS, MOVES, _walk
from meshlayout.planning.chips import Chip
from meshlayout.planning.rows import Estimate, Row
from meshlayout.planning.schedule import ring_hops
from meshlayout.state import TrainState


_CONVOLUTION = "conv_general_dilated"
_PRODUCTS = {"dot_general", "ragged_dot_general", _CONVOLUTION}
# Their results are in memory; all other operations are fused into what reads them.
_HEAVY = {"gather", "sort", "scatter", "scatter-add", "top_k", "cumsum", "concatenate"}
_HEAVY |= {"select_and_scatter_add", "dynamic_update_slice", *_PRODUCTS}
_LOOPS, _LINEAR = {"scan", "while"}, {"add", "add_any", *MOVES}

# Seen in programs for TPUs: what they take beyond FLOPs and bytes of jaxprs, how much
# of gathers of parameters is waited for, and what is lost between arrays in memory.
_BEYOND, _GAPS = 1.5, 1.08
_WAITED = {"all_gather": 0.65, "reduce_scatter": 0.65}
_START_S = 0.5e-6  # that an operation takes at the least, as TPU compilers estimate


@dataclass(slots=True)
class _Operation:
    name: str
    place: str  # the module that it is for, or else its name
    inputs: list[Value]
    outputs: list[Value]
    runs: int
    flops: float  # of all devices, in one run
    # Of what shards pass around: the array, the factors that shard it, and the share.
    passed: tuple[Value, Iterable[Any], float] | None = None

    @property
    def is_heavy(self) -> bool:
        return self.name in _HEAVY or self.name.startswith("reduce_")


class StepTrace:
    """A traced train step, walked through; made once for all layouts."""

    def __init__(
        self, traced: jax.stages.Traced, state: TrainState[Any], batch: PyTree
    ) -> None:
        self.operations: list[_Operation] = []
        self.nbytes: dict[Value, int] = {}
        # The smallest array that heavy operations read of a parameter, cast or a layer,
        # and the largest that they make of it.
        self.uses: dict[Value, tuple[Value, Value]] = {}
        self._stacked: list[Any] = []  # dims that loops go along
        self._reads: dict[bool, set[object]] = {True: set(), False: set()}
        paths = [leaf.path for leaf in _paths.flatten(state.params).leaves]
        self.modules = [path.rpartition("/")[0] or path for path in paths]
        num_state, num_batch = (len(jax.tree.leaves(x)) for x in (state, batch))
        self._flow, jaxpr = Flow(visit=self._visit), traced.jaxpr.jaxpr
        args = [
            Value(shape, fresh_dims(shape), (i < len(paths)) << i, i >= num_state)
            for i, shape in enumerate(var.aval.shape for var in jaxpr.invars)
        ]
        self.params, self.batch = args[: len(paths)], args[num_state:]
        self._note(args, jaxpr.invars)
        results = _walk(self._flow, jaxpr, args)
        # The state comes back as it was, so that gradients lie like their parameters.
        for before, after in zip(args[:num_state], results, strict=False):
            if before.shape == after.shape:
                link_all(before.dims, after.dims)
        self.factors = {value: _majors(value.dims) for value in self.nbytes}
        self.layers = {*_majors(self._stacked)} - {None}
        self.inputs = [self.factors[value] for value in self.batch[:num_batch]]
        self.rows = {x for factors in self.inputs for x in factors[:1]} - {None}
        images = [x for x in self.factors.values() if len(x) == 4 and x[0] in self.rows]
        self.heights = {factors[1] for factors in images} - {None}
        # Gradients have the factors of their parameters, in a loop those of a layer.
        keys = [self.factors[value] for value in self.params]
        owners = {frozenset(x[n:]): i for n in (1, 0) for i, x in enumerate(keys)}
        for op in filter(lambda x: x.is_heavy, self.operations):
            owner = owners.get(frozenset(self.factors[op.outputs[0]]))
            if owner is not None and op.place == op.name:
                op.place = self.modules[owner]
            op.passed = self._passed(op) if op.name in _PRODUCTS else None
        self.saved = self._saved()
        self.flops = read_cost(traced).flops
        self.convolves = any(op.name == _CONVOLUTION for op in self.operations)

    def _note(self, values: Iterable[Value], variables: Iterable[Any]) -> None:
        for value, var in zip(values, variables, strict=True):
            dtype = getattr(var.aval, "dtype", bool)  # tokens have none
            self.nbytes[value] = value.size * _jax.itemsize(dtype)

    def _visit(self, eqn: Equation, args: list[Value], results: list[Value]) -> None:
        name = eqn.primitive.name
        if name in _CALLS and name not in _LOOPS:
            return
        self._note([*args, *results], [*eqn.invars, *eqn.outvars])
        flops = 2.0 * _products(eqn) * max([x.size for x in results[:1]], default=0)
        op = _Operation(name, name, args, results, self._flow.runs, flops)
        self.operations.append(op)
        if name == "scan":
            first, count = _jax.scan_counts(eqn)
            stacks = [*args[first + count :], *results[count:]]
            self._stacked += [x.dims[0] for x in stacks]
            for stack in stacks[1:]:  # their layers lie in one way
                link_all(stacks[0].dims[:1], stack.dims[:1])
        elif name not in MOVES:
            self._reads[name in _PRODUCTS].update(x.source for x in args)
        for value in args if op.is_heavy else ():
            index = value.weights.bit_length() - 1
            if value.weights and value.weights == 1 << index:
                op.place, param = self.modules[index], self.params[index]
                part, result = self.uses.get(param, (param, results[0]))
                part = min(part, value, key=self.nbytes.__getitem__)
                result = max(result, results[0], key=self.nbytes.__getitem__)
                self.uses[param] = part, result

    def use(self, param: Value) -> tuple[int, float, Value]:
        """Returns the turns of the loop that reads a parameter, and bytes read in each.

        Then the largest array that is made of it.
        """
        part, result = self.uses.get(param, (param, param))
        is_stack = param in self.uses and self.layers & {*self.factors[param][:1]}
        turns = param.shape[0] if is_stack else 1
        itemsize = self.nbytes[part] / max(1, part.size)
        return turns, itemsize * param.size / turns, result

    def is_narrow(self, value: Value) -> bool:
        """Whether it is in float32, and only matrix products read it."""
        by_products, by_others = (value.source in self._reads[x] for x in (True, False))
        is_float32 = self.nbytes[value] == 4 * value.size
        return is_float32 and by_products and not by_others

    def _passed(self, op: _Operation) -> tuple[Value, Iterable[Any], float]:
        """Returns what shards pass around to compute a product, and along what."""
        arrays = [*op.inputs[:2], *op.outputs]
        if op.name == _CONVOLUTION:  # edges, as high as the kernel, or its gradient
            image, *others = arrays
            window = min(x.shape[0] for x in others)
            share = min(1.0, (window - 1) / image.shape[1])
            return image, self.heights.intersection(self.factors[image]), share
        # Each shard of a dim meets all of another.
        counts = [Counter(self.factors[value]) for value in arrays]
        twice = {x for count in counts for x, n in count.items() if n > 1}
        return min(arrays, key=self.nbytes.__getitem__), twice, 1.0

    def _saved(self) -> list[Value]:
        """Returns what is in memory when that is the most, besides the state."""
        nothing = frozenset[Value]()
        roots: dict[Value, frozenset[Value]] = {}  # what it is made of, in memory
        births: dict[Value, tuple[int, frozenset[Value]]] = {}
        last: dict[Value, int] = {}
        for place, op in enumerate(self.operations):
            is_stored = op.is_heavy or op.name in _LOOPS
            whence = nothing.union(*(roots.get(x, nothing) for x in op.inputs))
            size = sum(self.nbytes[x] for x in whence)
            for value in op.outputs:
                roots[value] = whence
                if is_stored or size > self.nbytes[value]:
                    roots[value] = frozenset([value])
                    births[value] = place, nothing if is_stored else whence
                    last |= dict.fromkeys(whence, place)
        memory, lives = np.zeros(len(self.operations)), dict[Value, slice]()
        for value, place in last.items():
            start, sources = births[value]
            # What can be made again of what is kept anyway is not kept besides.
            if not sources or any(last.get(x, -1) < place for x in sources):
                lives[value] = slice(start, place + 1)
                memory[lives[value]] += self.nbytes[value]
        peak = memory.argmax()
        return [x for x, life in lives.items() if life.start <= peak < life.stop]


def _majors(dims: Iterable[Any]) -> tuple[Any, ...]:
    """Returns the factor of each dim that a sharding would divide."""
    return tuple((*leaves_of(dim), None)[0] for dim in dims)


def estimate(
    trace: StepTrace, row: Row, chip: Chip, hop_s: float, accumulate: int, remat: object
) -> Estimate:
    """Returns what a step costs for a candidate's abstract state."""
    device = _Device(trace, row, chip, hop_s, accumulate)
    device.compute()
    peak = device.gather(2 if remat != "none" else 1)
    peak += _GAPS * sum(device.sizes[value] for value in trace.saved)
    seconds = seconds_of(device.parts, device.computing_s)
    return Estimate(seconds, peak, device.sent, device.parts)


def seconds_of(parts: Mapping[str, float], computing_s: float) -> dict[str, float]:
    """Returns how long a step computes, is bound by memory beyond that, and waits."""
    network = sum(x for name, x in parts.items() if name.startswith("wait: "))
    busy = sum(parts.values()) - network
    computing = min(computing_s, busy)
    return {"compute": computing, "memory": busy - computing, "network": network}


class _Device:
    """What one device computes, sends and holds in a step."""

    def __init__(
        self, trace: StepTrace, row: Row, chip: Chip, hop_s: float, accumulate: int
    ) -> None:
        self.trace, self.row, self.chip, self.hop_s = trace, row, chip, hop_s
        self.accumulate, self.leaves = accumulate, jax.tree.leaves(row.state)
        self.is_tpu, self.computing_s = chip.clock_hz is not None, 0.0
        self.beyond = _BEYOND if self.is_tpu else 1.0
        self.parts: dict[str, float] = defaultdict(float)  # seconds
        self.sent: dict[str, float] = defaultdict(float)
        # Parameters are gathered along these, but not experts to which tokens are sent.
        self.rows, usual = {x for axes in row.batch for x in axes}, batch_axes(row.mesh)
        self.gathered = self.rows - ({*row.batch[0]} - {*usual})
        self.shards: dict[Any, tuple[str, ...]] = {}  # axes by factor
        for factors in trace.inputs:
            self.shards |= zip(factors, row.batch, strict=False)
        if len(row.batch) == 4:  # images, whose rows are in shards where they divide
            axes, count = row.batch[1], self.count({*row.batch[1]})
            self.shards |= {x: axes for x in trace.heights if x.size % count == 0}
        for param, leaf in zip(trace.params, self.leaves, strict=False):
            entries = zip(trace.factors[param], leaf.sharding.spec, strict=False)
            for factor, entry in entries:
                axes = tuple(x for x in axes_of(entry) if x not in self.gathered)
                if factor is not None and axes:
                    self.shards.setdefault(factor, axes)
        # With sequence parallelism, what lacks the model axis is in shards of tokens.
        spare = {"model"} if "sequence=True" in "".join(row.code) else set[str]()
        tokens = {x for factors in trace.inputs for x in factors[1:2] if spare}
        self.spread = self.count(spare)  # before and after sums
        self.axes = {x: self.along(factors) for x, factors in trace.factors.items()}
        self.sizes: dict[Value, float] = {}
        for value, factors in trace.factors.items():
            others = set[str]() if tokens.isdisjoint(factors) else spare
            count = self.count(self.axes[value] | others)
            # XLA casts what a TPU multiplies, before it is kept or sent.
            count *= 2 if self.is_tpu and trace.is_narrow(value) else 1
            count *= 1 if trace.rows.isdisjoint(factors) else accumulate
            self.sizes[value] = trace.nbytes[value] / count

    def count(self, axes: set[str]) -> int:
        """Returns the number of devices along some axes."""
        return math.prod(self.row.mesh.shape[axis] for axis in axes)

    def along(self, factors: Iterable[Any]) -> set[str]:
        """Returns the axes that shard factors."""
        return {axis for x in factors for axis in self.shards.get(x, ())}

    def send(
        self, what: str, axes: set[str], size: float, passes: float, hops: float = 1
    ) -> None:
        """Counts passes of a ring, an all-reduce as two, and what is waited for."""
        if (n := self.count(axes)) > 1:
            nbytes, delay = (n - 1) / n * size, hops * ring_hops(n) * self.hop_s
            seconds = passes * (nbytes / self.chip.ring_bytes_per_s + delay)
            waited = _WAITED.get(what.partition(",")[0], 1.0)
            self.parts[f"wait: {what}"] += waited * seconds
            names = ", ".join(x for x in self.row.mesh.axis_names if x in axes)
            self.sent[names] += passes * nbytes

    def compute(self) -> None:
        """Counts what operations compute, read and write, and the sums over shards."""
        chip, passes = self.chip, self.row.microbatches
        # A device of a pipeline has some of the layers, and waits for the others.
        stages = self.count(self.along(self.trace.layers))
        busy = (passes + stages - 1) / passes / stages
        sums: dict[Value, tuple[set[str], str]] = {}  # over which axes, and for what
        for op in self.trace.operations:
            size, runs = (
                sum(map(self.sizes.__getitem__, op.outputs)),
                op.runs * self.accumulate,
            )
            known = [sums.get(x, (set[str](), "")) for x in op.inputs]
            if op.name in _LINEAR and all(axes == known[0][0] for axes, _ in known):
                # Sums are added up before they are sent.
                sums[op.outputs[0]] = axes, name = known[0]
                self.send(name, axes, size * self.spread, 2 * runs * (1 - len(known)))
            if not op.is_heavy:
                continue
            inner = set[str]().union(*(self.axes[x] for x in op.inputs[:2]))
            outer = set[str]().union(*(self.axes[x] for x in op.outputs))
            # Sums over rows are gradients of parameters, which follow, or few numbers.
            over, name = inner - outer - self.rows, f"all_reduce, {op.place}"
            self.send(name, over, size * self.spread, 2 * runs)
            sums |= dict.fromkeys(op.outputs, (over, name))
            share = busy if op.runs > 1 else 1.0
            flops = share * op.runs * op.flops / self.count(inner | outer)
            computing, read = (
                flops / chip.flops_per_s,
                sum(map(self.sizes.__getitem__, op.inputs)),
            )
            seconds = max(_START_S, (size + read) / chip.memory_bytes_per_s)
            self.computing_s += computing
            self.parts[op.place] += self.beyond * max(computing, share * runs * seconds)
            if op.passed:
                value, factors, share = op.passed
                around = self.along(factors)
                whole = share * self.sizes[value] * self.count(around)
                self.send(f"collective_permute, {op.place}", around, whole, runs)

    def gather(self, times: int) -> float:
        """Counts gathers of parameters, so many in a step, and sums of gradients.

        Returns the bytes that are held all the time.
        """
        trace, chip, count = self.trace, self.chip, self.accumulate
        share = 1 / max(1, len(trace.params))  # compilers combine what is not gathered
        held = largest = moved = 0.0
        triples = zip(trace.modules, trace.params, self.leaves, strict=False)
        for module, param, leaf in triples:
            own = {axis for entry in leaf.sharding.spec for axis in axes_of(entry)}
            split, whole = self.gathered & own, self.rows - own
            n, others = self.count(split), self.count(own - split)
            turns, used, result = trace.use(param)
            used, size = used / others, trace.nbytes[param] / others
            # XLA casts what a TPU multiplies before it gathers it.
            part = min(used, size / turns / 2) if self.is_tpu else used
            again, runs = 2 if turns > 1 else times, turns * count
            if split:
                self.send(f"all_gather, {module}", split, part, again * runs)
                self.send(f"reduce_scatter, {module}", split, used, runs)
                # Small matrices are multiplied in parts, as they come, if they are in
                # as many as the batch: each part reads and writes the results.
                if self.is_tpu and not whole and part < self.sizes[result]:
                    moved += runs * (n - 1) / 3 * self.sizes[result]
                held += part * (again == 1)  # kept for the backward pass
            self.send(f"all_reduce, {module}", whole, used * turns / n, 2, share)
            # A gradient, and what is gathered; gradients that are added up or stacked.
            largest = max(largest, used + again * part * bool(split))
            held += size / n * ((count > 1) + (turns > 1) * (1 + bool(whole)))
        here = [x for x in self.leaves if "host" not in (x.sharding.memory_kind or "")]
        nbytes, total = sum(map(shard_bytes, here)), sum(map(shard_bytes, self.leaves))
        # What is on the host comes, and goes back.
        host_s = 2 * (total - nbytes) / chip.host_bytes_per_s
        self.parts["wait: host memory"] = host_s
        # The state is read and written, and gradients are read.
        updating = (moved + 7 / 3 * total) / chip.memory_bytes_per_s
        updating += _START_S * len(trace.params)
        self.parts["optimizer"] += self.beyond * updating
        return (
            held
            + nbytes
            + largest
            + count * sum(map(self.sizes.__getitem__, trace.batch))
        )


def shard_bytes(leaf: Leaf) -> int:
    """Returns the bytes of an abstract array on each device."""
    shape = leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * _jax.itemsize(leaf.dtype)
