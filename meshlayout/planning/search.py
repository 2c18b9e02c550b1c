"""`plan`: estimates every candidate, and compiles the best of them."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from meshlayout import _checks, _jax
from meshlayout._annotations import Batch, Leaf
from meshlayout._batches import batch_axes, num_examples
from meshlayout.errors import MeshLayoutError
from meshlayout.hlo import read_communication
from meshlayout.layout_map import LayoutMap
from meshlayout.mesh import Mesh, as_mesh
from meshlayout.planning import candidates as ways, chips
from meshlayout.planning.compilation import Compilation, Outcome, compile_all, job_of
from meshlayout.planning.estimate import StepTrace, estimate
from meshlayout.planning.rows import Ranking, Row
from meshlayout.planning.schedule import replay
from meshlayout.state import TrainState
from meshlayout.state.creation import place
from meshlayout.state.train_state import Optimizer
from meshlayout.step import make_train_step
from meshlayout.step.interception import Remat, _block_paths


_NUM_COMPILED, _MOST_COMPILED = 4, 12  # at the least and at the most, without a budget
_HOST_BYTES = 4 * 2**30  # that a compilation may take, to say how many go at once


def plan(
    build: Callable[[], Any],
    loss_fn: Callable[..., Any],
    batch: Batch,
    *,
    optimizer: Optimizer,
    topology: "str | Mesh | Sequence[str | Mesh]",
    candidates: ways.Candidates | None = None,
    budget_s: float | None = None,
    module: nn.Module | None = None,
    workers: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    hop_s: float = 1e-6,
    progress: bool = True,
    **step_options: Any,
) -> Ranking:
    """Ranks meshes and layouts for a train step, by the compiler of the hardware.

    Every candidate is estimated from the traced step; then the best are compiled, for
    devices that need not be here. Use this on a laptop before paying for a slice.
    Ctrl-C returns what is ranked so far.

    Args:
        build: As for `TrainState.create`, as are `optimizer` and `module`.
        loss_fn: As for `make_train_step`.
        batch: One global batch; abstract arrays (`jax.ShapeDtypeStruct`) suffice.
        optimizer: An Optax transformation.
        topology: A TPU slice, as `"v5e:16x16"`, GPUs, as `"h100:8"`, or a mesh of
            devices that are here; or several, whose rows are compared per device.
        candidates: Layout maps by name, or functions of a mesh that return one. By
            default, data, fully sharded, hybrid and tensor parallelism and their
            compositions, on meshes of one to three axes.
        budget_s: For how many seconds compilations may be started; by default, as long
            as one that is left is estimated to be faster, between 4 and 12 of them.
        module: For Linen.
        workers: How many compilations go at once; by default what memory allows.
        cache: A directory for what compilers said, by default in `~/.cache`.
        hop_s: The latency of a message from one device to the next, in seconds.
        progress: Whether to write lines on what is done to stderr.
        **step_options: Options of `make_train_step`, for all candidates.

    Raises:
        MeshError: If a topology does not exist, or its compiler is not installed.
        MeshLayoutError: If an option is wrong. A model that cannot be traced raises its
            own error.

    Examples:
        >>> import jax, optax, meshlayout as ml
        >>> from flax import nnx
        >>> def build():
        ...     return nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        >>> def loss_fn(model, x):
        ...     return model(x) ** 2
        >>> x, sgd = jax.ShapeDtypeStruct((16, 8), "float32"), optax.sgd(0.1)
        >>> options = {"topology": ml.create_mesh(), "budget_s": 0, "progress": False}
        >>> ranking = ml.plan(build, loss_fn, x, optimizer=sgd, **options)
        >>> ranking.fits, ranking.best.source
        (True, 'estimated')
    """
    where: Any = {"where": "plan", "error": MeshLayoutError}
    deadline = time.monotonic()
    if budget_s is not None:
        deadline += _checks.number("budget_s", budget_s, at_least=0, **where)
    if workers is not None:
        workers = _checks.count("workers", workers, **where)
    hop_s = _checks.number("hop_s", hop_s, at_least=0, **where)
    make_train_step(loss_fn, **step_options)  # checks them
    is_single = isinstance(topology, (str, Mesh, jax.sharding.Mesh))
    targets: list[Any] = [topology] if is_single else [*topology]
    slices = {x.name: x for x in map(_hardware, targets)}
    folder = Path(cache or Path.home() / ".cache" / "meshlayout" / "plan")
    problem = build, loss_fn, jax.tree.map(_abstract, batch), optimizer, module
    settings = (workers or _num_workers(), folder, hop_s, progress)
    deadline = math.inf if budget_s is None else deadline
    search = _Search(*problem, step_options, slices, deadline, *settings)
    return search.run(candidates)


@dataclass
class _Hardware:
    """Devices, their figures, and the grid that they are in."""

    name: str
    devices: list[_jax.Device]
    chip: chips.Chip
    grid: tuple[int, ...]
    topology: str = ""  # to compile for; empty if the devices are here


def _hardware(target: "str | Mesh | jax.sharding.Mesh") -> _Hardware:
    if isinstance(target, str):
        _, grid = chips.parse_topology(target)
        devices = chips.describe_devices(target)
        return _Hardware(target, devices, chips.chip_of(devices[0]), grid, target)
    devices = [*as_mesh(target).devices.flat]
    name = f"{len(devices)} {devices[0].platform.upper()} devices"
    return _Hardware(name, devices, chips.chip_of(devices[0]), (len(devices),))


@dataclass
class _Search:
    """A plan under way."""

    build: Callable[[], Any]
    loss_fn: Callable[..., Any]
    batch: Batch
    optimizer: Optimizer
    module: nn.Module | None
    options: Mapping[str, Any]
    targets: dict[str, _Hardware]
    deadline: float
    workers: int
    cache: Path
    hop_s: float
    progress: bool
    notes: list[str] = field(default_factory=list)
    # What is traced once for all meshes.
    traces: dict[Any, StepTrace | None] = field(default_factory=dict)
    states: dict[Any, Any] = field(default_factory=dict)

    def run(self, candidates: ways.Candidates | None) -> Ranking:
        start, rows, changes = time.monotonic(), list[Row](), list[Row]()
        try:
            for target in [*self.targets.values()]:
                for row in self._proposals(target, candidates):
                    with _checks.noted(f"while plan traces the candidate '{row}'"):
                        rows += self._estimates(row)
            if not rows:
                fact = f"plan: no candidate is for {', '.join(self.targets)}"
                fix = "Give functions of a mesh, or layout maps on one of these devices"
                raise MeshLayoutError(f"{fact}. {fix}.")
            rows.sort(key=_order)
            seconds = time.monotonic() - start
            self._say(f"{len(rows)} candidates estimated in {seconds:.1f} s")
            self._compile(rows, self._chosen(rows))
            if not any(row.fits for row in rows):
                self._change(rows, changes)
        except KeyboardInterrupt:
            self.notes.append("Interrupted: what is ranked so far.")
        rows.sort(key=_order)
        return Ranking(tuple(rows), tuple(changes), tuple(self.notes))

    def _say(self, line: str) -> None:
        if self.progress:
            sys.stderr.write(f"plan: {line}\n")
            sys.stderr.flush()

    # Estimates.

    def _proposals(
        self, target: _Hardware, candidates: ways.Candidates | None = None
    ) -> Iterator[Row]:
        known = ways.meshes(target.devices, target.grid)
        if candidates is not None:
            yield from ways.given(candidates, known, target.name)
        model = self.module or self.build, (self.batch,), self.loss_fn
        for mesh in known if candidates is None else ():
            yield from ways.proposals(mesh, target.name, *model)

    def _estimates(self, row: Row) -> Iterator[Row]:
        """Yields a candidate as it is, recomputing, and with what memory needs."""
        row = self._estimate(row)
        yield row
        is_tight = not row.fits
        for less in self._shrunk(row, (2, 4, 8)) if not row.error else ():
            row = self._estimate(less)
            if [*row.step_options] == ["remat"] or (is_tight and row.fits):
                yield row
            is_tight = is_tight and not row.fits
            if not is_tight:
                return

    def _shrunk(self, row: Row, counts: Sequence[int]) -> Iterator[Row]:
        """Yields a candidate with options that take less and less memory."""
        given = {**self.options, **row.step_options}
        if "remat" not in given and self._trace("blocks") is not None:
            row = row.with_options(remat="blocks")
            yield row
        rows = num_examples(self.batch) // row.mesh.axis_size(batch_axes(row.mesh))
        for count in counts if "accumulate" not in self.options else ():
            if count > given.get("accumulate", 1) and rows % count == 0:
                row = row.with_options(accumulate=count)
                yield row
        if row.mesh.platform != "cpu":
            yield row.offloaded()

    def _estimate(self, row: Row) -> Row:
        """Returns a row with its estimate, or why it cannot be estimated."""
        chip, rows = self.targets[row.topology].chip, num_examples(self.batch)
        texts = [
            math.prod(leaf.shape)
            for leaf in jax.tree.leaves(self.batch)
            if len(leaf.shape) == 2 and jnp.issubdtype(leaf.dtype, jnp.integer)
        ]
        known = {"rows": rows, "tokens": max(texts, default=0)}
        row = replace(row, memory_bytes=chip.memory_bytes, **known)
        options = {"remat": "none", "accumulate": 1, **self.options, **row.step_options}
        trace, count = self._trace(options["remat"]), options["accumulate"]
        if row.error or trace is None:
            return row
        axes = batch_axes(row.mesh)
        if rows % (row.mesh.axis_size(axes) * count):
            line = f"{rows} examples do not divide over {', '.join(axes)}"
            return replace(row, error=f"{line} and {count} microbatches.")
        try:
            state = self._state(row)
        except MeshLayoutError as error:
            return replace(row, error=str(error).splitlines()[0])
        settings = count, options["remat"] != "none", self.hop_s
        cost = estimate(trace, state, row.mesh, chip, *settings)
        row = replace(row, sent=cost.sent, peak_bytes=cost.peak_bytes, estimate=cost)
        return self._timed(row, cost.seconds, cost.seconds)

    def _timed(
        self, row: Row, seconds: Mapping[str, float], parts: Mapping[str, float]
    ) -> Row:
        """Returns a row with what its time is bound by and consists of."""
        step_s = sum(seconds.values())
        traces = [trace for trace in self.traces.values() if trace is not None]
        flops = min(trace.flops for trace in traces)  # without what is recomputed
        peak = step_s * row.mesh.size * self.targets[row.topology].chip.flops_per_s
        bound = max(seconds, key=lambda name: seconds[name])
        row = replace(row, step_s=step_s, bound=bound, parts=parts)
        return replace(row, utilization=flops / peak)

    def _described(self, *, is_bfloat16: bool = False) -> Any:
        """Returns the state on one device."""
        if is_bfloat16 not in self.states:
            device = next(iter(self.targets.values())).devices[0]
            one = LayoutMap(jax.sharding.Mesh(np.array([device]), ("batch",)))
            tx = ways.bfloat16_state(self.optimizer) if is_bfloat16 else self.optimizer
            described = TrainState.describe(self.build, tx, one, module=self.module)
            self.states[is_bfloat16] = described
        return self.states[is_bfloat16]

    def _trace(self, remat: Remat) -> StepTrace | None:
        """Returns the traced step; None if there are no blocks to recompute."""
        if remat not in self.traces:
            self.traces[remat], state = None, self._described().abstract
            options = {**self.options, "remat": remat, "accumulate": 1}
            is_given = remat != "blocks" or "remat" in self.options
            if is_given or _block_paths(state.params):
                step = make_train_step(self.loss_fn, **options)
                state = step._plan.update.prepared(state)
                traced = step.trace(state, self.batch)
                self.traces[remat] = StepTrace(traced, state, self.batch)
        return self.traces[remat]

    def _state(self, row: Row) -> TrainState[Any]:
        """Returns the abstract state in the layouts of a candidate."""
        key = id(row.layouts), row.is_bfloat16
        if key not in self.states:
            traced = self._described(is_bfloat16=row.is_bfloat16)._traced
            placed = place(traced, row.layouts, row.layouts.resolve)
            self.states[key] = placed.abstract, row.layouts  # kept, and so its id
        return self.states[key][0]

    # Compilations.

    def _chosen(self, rows: Sequence[Row]) -> Iterator[int]:
        """Yields which rows are to be compiled, the best first, by the budget."""
        indices = [index for index, row in enumerate(rows) if not row.error]
        # What fits without recomputing or microbatches is faster without.
        plain = {_key(row) for row in rows if row.fits and not row.step_options}
        spare = [bool(row.step_options) and _key(row) in plain for row in rows]
        indices.sort(key=spare.__getitem__)
        for number, index in enumerate(indices):
            if time.monotonic() >= self.deadline:
                text = f"The budget ended after {number} of {len(indices)} candidates."
                self.notes.append(text)
                return
            if math.isinf(self.deadline) and number >= _NUM_COMPILED:
                known = [x for x in rows if x.fits and x.source != "estimated"]
                best = min(map(_cost, known), default=math.inf)
                # Programs are hardly faster, or smaller, than their estimates.
                is_worse = best <= _cost(rows[index]) or not rows[index].fits
                if number >= _MOST_COMPILED or is_worse:
                    return
            yield index

    def _compile(self, rows: list[Row], chosen: Iterator[int]) -> None:
        """Compiles rows, and puts what came of it in their place."""

        def jobs() -> Iterator[tuple[int, Compilation]]:
            for index in chosen:
                row = rows[index]
                options = {"layouts": row.activations, **self.options}
                options |= row.step_options
                try:
                    step = make_train_step(self.loss_fn, **options)
                    lowered = step.lower(self._state(row), self.batch)
                except Exception as error:  # of the user's model on this mesh
                    line = f"{type(error).__name__}: {error}".splitlines()[0]
                    rows[index] = replace(row, error=line)
                    continue
                devices = [*row.mesh.devices.flat]
                yield (
                    index,
                    job_of(lowered, devices, self.targets[row.topology].topology),
                )

        for index, outcome in compile_all(jobs(), self.cache, self.workers):
            rows[index] = self._measured(rows[index], outcome)
            self._say(repr(rows[index]))

    def _measured(self, row: Row, outcome: Outcome) -> Row:
        """Returns a row with what the compiler said."""
        chip, seconds = self.targets[row.topology].chip, {**row.parts}
        names = "error", "compile_s", "host_bytes", "peak_bytes", "memory_bytes"
        facts = {name: getattr(outcome, name) or getattr(row, name) for name in names}
        row = replace(row, source="compiled", **facts)
        if outcome.error:
            return replace(row, step_s=math.nan, bound="", sent={}, parts={})
        communication = read_communication(outcome.text, row.mesh)
        sent = {k: float(x.wire_bytes) for k, x in communication.by("axes").items()}
        row = replace(row, sent=sent)
        if chip.clock_hz is None:
            times = sum(x.times for x in communication.collectives)
            wire = communication.wire_bytes / chip.ring_bytes_per_s
            seconds["network"] = wire + self.hop_s * times
            return self._timed(replace(row, source="roofline"), seconds, seconds)
        schedule = replay(outcome.text, chip, hop_s=self.hop_s)
        # What computing takes beyond its FLOPs is for memory.
        seconds["memory"] = max(0.0, schedule.compute_s - seconds["compute"])
        seconds["compute"] = schedule.compute_s - seconds["memory"]
        seconds["network"] = schedule.total_s - schedule.compute_s
        return self._timed(row, seconds, schedule.parts)

    # What would fit.

    def _change(self, rows: Sequence[Row], changes: list[Row]) -> None:
        """Adds the smallest change with which something fits, compiled."""
        sized = [row for row in rows if not math.isnan(row.peak_bytes)]
        base = min(sized, key=lambda row: row.peak_bytes, default=None)
        for row in self._changed(replace(base, error="")) if base else ():
            if time.monotonic() >= self.deadline:
                self.notes.append("The budget ended while looking for what would fit.")
                return
            rows = [self._estimate(replace(row, source="estimated"))]
            # Estimates of memory are a few percent off.
            if not rows[0].error and rows[0].peak_bytes < 1.2 * rows[0].memory_bytes:
                self._compile(rows, iter([0]))
                if rows[0].fits:
                    changes += rows
                    return

    def _changed(self, base: Row) -> Iterator[Row]:
        """Yields larger and larger changes of a candidate."""
        for row in self._shrunk(base, (2, 4, 8, 16, 32)):
            base = row if row.layouts is base.layouts else base
            yield row
        options = dict(base.step_options)
        for row in self._proposals(self.targets[base.topology]):
            if row.name == "fsdp" != base.name:
                base = row.with_options(**options)
                yield base
                break
        base = base.in_bfloat16()
        yield base
        if base.mesh.platform != "cpu":
            yield base.offloaded()
        name = base.topology
        while name := chips.larger_topology(name):
            self.targets[name] = _hardware(name)
            yield next(self._proposals(self.targets[name])).with_options(**options)


def _key(row: Row) -> tuple[object, ...]:
    return row.name, row.topology, row.mesh


def _cost(row: Row) -> float:
    """Returns the seconds of an example times devices, to compare rows by."""
    return row.step_s * row.mesh.size / max(1, row.rows)


def _order(row: Row) -> tuple[object, ...]:
    cost = math.inf if math.isnan(row.step_s) else _cost(row)
    return not row.fits, bool(row.error), row.source == "estimated", cost


def _abstract(leaf: Leaf) -> jax.ShapeDtypeStruct:
    array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))


def _num_workers() -> int:
    """Returns how many compilations memory and cores allow at once."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on this system
        return 1
    return max(1, min((os.cpu_count() or 1) // 2, free // _HOST_BYTES))
