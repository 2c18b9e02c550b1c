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
import optax

from meshlayout import _checks
from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout._batches import batch_axes, num_examples
from meshlayout.errors import MeshLayoutError
from meshlayout.hlo import read_communication
from meshlayout.layout_map import LayoutMap
from meshlayout.mesh import Mesh
from meshlayout.planning.candidates import (
    OFFLOAD,
    Candidates,
    Proposals,
    Variant,
    given,
    meshes,
)
from meshlayout.planning.chips import (
    Chip,
    chip_of,
    describe_devices,
    grid_of,
    larger_topology,
)
from meshlayout.planning.compilation import Job, Outcome, compile_all, compiled, job_of
from meshlayout.planning.estimate import StepTrace, estimate
from meshlayout.planning.ranking import Ranking, Row
from meshlayout.planning.schedule import replay
from meshlayout.state import TrainState
from meshlayout.state.creation import place
from meshlayout.step import make_train_step
from meshlayout.step.interception import _block_paths


_NUM_COMPILED = 4  # without a budget
_ACCUMULATE = (2, 4, 8)  # tried where a candidate does not fit
_HOST_BYTES = 4 * 2**30  # that a compilation may take, to say how many go at once


def plan(
    build: Callable[[], Any],
    loss_fn: Callable[..., Any],
    batch: Batch,
    *,
    optimizer: Any,
    topology: "str | Mesh | Sequence[str | Mesh]",
    candidates: Candidates | None = None,
    budget_s: float | None = None,
    module: Any = None,
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
            default, data, fully sharded, hybrid, tensor and expert parallelism and
            their compositions, on meshes of one to three axes.
        budget_s: For how many seconds compilations may be started; by default, the
            four best candidates are compiled.
        module: For Linen.
        workers: How many compilations go at once; by default what memory allows.
        cache: A directory for what compilers said, by default in `~/.cache`.
        hop_s: The latency of a message from one device to the next, in seconds.
        progress: Whether to write lines on what is done to stderr.
        **step_options: Options of `make_train_step`, for all candidates.

    Raises:
        MeshError: If a topology does not exist, or its compiler is not installed.
        MeshLayoutError: If the model cannot be traced, or an option is wrong.

    Example:
        >>> import jax, optax, meshlayout as ml
        >>> from flax import nnx
        >>> def build():
        ...     return nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        >>> batch = jax.ShapeDtypeStruct((16, 8), "float32")
        >>> ranking = ml.plan(
        ...     build,
        ...     lambda model, x: model(x) ** 2,
        ...     batch,
        ...     optimizer=optax.sgd(0.1),
        ...     topology=ml.create_mesh(),
        ...     budget_s=0,
        ...     progress=False,
        ... )
        >>> ranking.fits, ranking.best.source
        (True, 'estimated')
    """
    targets = [topology] if isinstance(topology, (str, Mesh)) else list(topology)
    where: dict[str, Any] = {"where": "plan", "error": MeshLayoutError}
    if budget_s is not None:
        budget_s = _checks.number("budget_s", budget_s, at_least=0, **where)
    if workers is not None:
        workers = _checks.count("workers", workers, **where)
    hop_s = _checks.number("hop_s", hop_s, at_least=0, **where)
    step = make_train_step(loss_fn, **step_options)  # checks them
    del step
    problem = _Problem(build, loss_fn, batch, optimizer, module, step_options)
    folder = Path(cache or Path.home() / ".cache" / "meshlayout" / "plan")
    deadline = math.inf if budget_s is None else time.monotonic() + budget_s
    limits = _Limits(deadline, workers or _workers(), folder, hop_s)
    say = _say if progress else lambda line: None
    return _Search(problem, limits, say).run(targets, candidates)


@dataclass(frozen=True)
class _Problem:
    """What is to be trained."""

    build: Callable[[], Any]
    loss_fn: Callable[..., Any]
    batch: Batch
    optimizer: Any
    module: Any
    options: Mapping[str, Any]

    def call(self, model: Any, batch: Batch) -> Any:
        """Calls the loss function as a step does, for rules that trace the model."""
        return self.loss_fn(model, batch)


@dataclass(frozen=True)
class _Limits:
    deadline: float
    workers: int
    cache: Path
    hop_s: float


@dataclass
class _Target:
    """A topology: its devices, and their figures."""

    name: str
    devices: list[Any]
    chip: Chip
    grid: tuple[int, ...]
    is_here: bool  # its devices are here, and are no CPUs

    @classmethod
    def of(cls, topology: "str | Mesh") -> "_Target":
        if isinstance(topology, str):
            devices, name = describe_devices(topology), topology
        else:
            devices = [*topology.devices.flat]
            name = f"{len(devices)} {devices[0].platform.upper()} devices"
        is_here = not isinstance(topology, str) and devices[0].platform != "cpu"
        return cls(name, devices, chip_of(devices[0]), grid_of(topology), is_here)

    @property
    def job_topology(self) -> str:
        ids = [int(device.id) for device in self.devices]
        return self.name if ":" in self.name else str(max(ids) + 1)


@dataclass
class _Search:
    """A plan under way."""

    problem: _Problem
    limits: _Limits
    say: Callable[[str], None]
    notes: list[str] = field(default_factory=list)
    targets: dict[str, _Target] = field(default_factory=dict)
    traces: dict[Any, StepTrace | None] = field(default_factory=dict)
    states: dict[Any, Any] = field(default_factory=dict)
    descriptions: dict[bool, Any] = field(default_factory=dict)
    batch: Any = None
    model_flops: float = 0.0

    def run(self, topologies: list[Any], candidates: Candidates | None) -> Ranking:
        start, problem = time.monotonic(), self.problem
        rows: list[Row] = []
        changes: list[Row] = []
        try:
            for topology in topologies:
                target = _Target.of(topology)
                self.targets[target.name] = target
            self.batch = jax.tree.map(_abstract, problem.batch)
            proposals = Proposals(
                problem.module or problem.build, problem.call, self.batch
            )
            for target in self.targets.values():
                grids = [*meshes(target.devices, target.grid)]
                variants = (
                    given(candidates, grids, target.name)
                    if candidates is not None
                    else (x for mesh in grids for x in proposals.of(mesh, target.name))
                )
                for variant in variants:
                    rows += self._estimated(variant)
            rows.sort(key=_order)
            seconds = time.monotonic() - start
            self.say(f"{len(rows)} candidates estimated in {seconds:.1f} s")
            self._compile(rows, self._chosen(rows))
            if rows and not any(row.fits for row in rows):
                changes = self._changes(rows)
        except KeyboardInterrupt:
            self.notes.append("Interrupted: what is ranked so far.")
        rows.sort(key=_order)
        return Ranking(tuple(rows), tuple(changes), tuple(self.notes))

    # Estimates.

    def _estimated(self, variant: Variant) -> Iterator[Row]:
        """Yields a candidate as it is, and with what memory needs."""
        options = self.problem.options
        row = self._row(variant)
        yield row
        if row.error:
            return
        best = row
        if "remat" not in options and self._trace("blocks") is not None:
            best = self._row(variant.with_options(remat="blocks"))
            yield best
        for count in () if "accumulate" in options else _ACCUMULATE:
            if row.fits or best.fits or not self._divides(variant, count):
                break
            best = self._row(best.variant.with_options(accumulate=count))
            if best.fits or count == _ACCUMULATE[-1]:
                yield best
        if not row.fits and not best.fits and variant.mesh.platform != "cpu":
            yield self._row(best.variant.offloaded())

    def _divides(self, variant: Variant, accumulate: int) -> bool:
        axes = batch_axes(variant.mesh)
        shards = variant.mesh.axis_size(axes) if axes else 1
        return num_examples(self.batch) % (shards * accumulate) == 0

    def _row(self, variant: Variant) -> Row:
        """Returns the row of an estimate, or of what cannot be estimated."""
        target = self.targets[variant.topology]
        rows, tokens = num_examples(self.batch), _num_tokens(self.batch)
        memory = target.chip.memory_bytes
        empty = Row(
            *(variant, "estimated", 0.0, "", math.nan, memory, rows, tokens, 0.0, {}),
            {},
            variant.error,
        )
        if variant.error:
            return empty
        if not self._divides(variant, variant.options.get("accumulate", 1)):
            axes = batch_axes(variant.mesh)
            fact = f"{rows} examples do not divide over {', '.join(axes)}"
            return replace(empty, error=f"{fact} and the microbatches.")
        remat = variant.options.get("remat", self.problem.options.get("remat", "none"))
        count = self.problem.options.get("accumulate", 1)
        trace = self._trace(remat)
        assert trace is not None
        try:
            state = self._state(variant)
        except MeshLayoutError as error:
            return replace(empty, error=str(error).splitlines()[0])
        count = variant.options.get("accumulate", count)
        options: Any = {"accumulate": count, "hop_s": self.limits.hop_s}
        cost = estimate(trace, state, variant.mesh, target.chip, **options)
        parts = {
            "compute": cost.compute_s,
            "memory": cost.memory_s,
            "network": cost.network_s,
        }
        return replace(
            empty,
            step_s=cost.total_s,
            bound=max(parts, key=lambda name: parts[name]),
            peak_bytes=cost.peak_bytes,
            utilization=self._utilization(target, cost.total_s),
            sent=cost.sent,
            parts=parts,
            estimate=cost,
        )

    def _utilization(self, target: _Target, seconds: float) -> float:
        peak = len(target.devices) * target.chip.flops_per_s
        return self.model_flops / (seconds * peak) if seconds else 0.0

    def _description(self, *, is_bfloat16: bool = False) -> Any:
        if is_bfloat16 not in self.descriptions:
            device = next(iter(self.targets.values())).devices[0]
            one = jax.sharding.Mesh(np.array([device]), ("batch",))
            tx = self.problem.optimizer
            self.descriptions[is_bfloat16] = TrainState.describe(
                self.problem.build,
                bfloat16_state(tx) if is_bfloat16 else tx,
                LayoutMap(one),
                module=self.problem.module,
            )
        return self.descriptions[is_bfloat16]

    def _trace(self, remat: Any) -> StepTrace | None:
        """Returns the traced step; None if recomputing blocks changes nothing."""
        key = remat if isinstance(remat, str) else id(remat)
        if key in self.traces:
            return self.traces[key]
        params = self._description().abstract.params
        is_ours = remat == "blocks" and remat != self.problem.options.get("remat")
        if is_ours and not _block_paths(params):
            self.traces[key] = None
            return None
        options = {**self.problem.options, "remat": remat, "accumulate": 1}
        step = make_train_step(self.problem.loss_fn, **options)
        with _checks.noted(f"while plan traces the step with remat={remat!r}"):
            state = step._plan.update.prepared(self._description().abstract)
            traced = step.trace(state, self.batch)
        trace = self.traces[key] = StepTrace(traced, state, self.batch)
        self.model_flops = self.model_flops or trace.flops
        return trace

    def _state(self, variant: Variant) -> TrainState[Any]:
        """Returns the abstract state in the layouts of a candidate."""
        key = id(variant.layouts), variant.has_bfloat16_state
        if key not in self.states:
            description = self._description(is_bfloat16=variant.has_bfloat16_state)
            layouts = variant.layouts
            placed = place(description._traced, layouts, layouts.resolve)
            # The map is kept, and so its id.
            self.states[key] = placed.abstract, layouts
        return self.states[key][0]

    # Compilations.

    def _chosen(self, rows: Sequence[Row]) -> Iterator[int]:
        """Yields which rows are to be compiled, the best first, by the budget."""
        is_limited = math.isinf(self.limits.deadline)
        for index, row in enumerate(rows):
            if is_limited and index >= _NUM_COMPILED:
                return
            if time.monotonic() >= self.limits.deadline:
                if index < len(rows):
                    text = f"The budget ended after {index} of {len(rows)} candidates."
                    self.notes.append(text)
                return
            if not row.error:
                yield index

    def _compile(self, rows: list[Row], chosen: Iterator[int]) -> None:
        """Compiles rows, and puts what came of it in their place."""

        def jobs() -> Iterator[tuple[int, Job]]:
            for index in chosen:
                variant = rows[index].variant
                target = self.targets[variant.topology]
                try:
                    lowered = self._lower(variant)
                    job = job_of(lowered, variant.mesh, target.job_topology)
                except Exception as error:  # of the user's model on this mesh
                    line = f"{type(error).__name__}: {error}".splitlines()[0]
                    rows[index] = replace(rows[index], error=line)
                    continue
                if target.is_here:
                    self._told(rows, index, compiled(lowered.compile))
                    continue
                yield index, job

        limits = self.limits
        for index, outcome in compile_all(jobs(), limits.cache, limits.workers):
            self._told(rows, index, outcome)

    def _told(self, rows: list[Row], index: int, outcome: Outcome) -> None:
        rows[index] = self._measured(rows[index], outcome)
        self.say(f"{rows[index]!r}")

    def _lower(self, variant: Variant) -> jax.stages.Lowered:
        options = {**self.problem.options, **variant.options}
        step = make_train_step(self.problem.loss_fn, **options)
        return step.lower(self._state(variant), self.batch)

    def _measured(self, row: Row, outcome: Outcome) -> Row:
        """Returns a row with what the compiler said."""
        target = self.targets[row.variant.topology]
        costs: Any = {"compile_s": outcome.seconds, "host_bytes": outcome.host_bytes}
        if outcome.error:
            peak = outcome.peak_bytes or row.peak_bytes
            memory = outcome.memory_bytes or row.memory_bytes
            costs |= {"peak_bytes": peak, "memory_bytes": memory, "step_s": 0.0}
            source = "compiled"
            return replace(row, error=outcome.error, source=source, parts={}, **costs)
        communication = read_communication(outcome.text, row.mesh)
        sent = {k: float(x.wire_bytes) for k, x in communication.by("axes").items()}
        parts, source, bound = dict(row.parts), "roofline", row.bound
        if target.chip.clock_hz is not None:
            schedule = replay(outcome.text, target.chip, hop_s=self.limits.hop_s)
            seconds, parts, source = schedule.total_s, schedule.parts, "compiled"
            computing = row.estimate.compute_s if row.estimate else 0.0
            bound = "compute" if 2 * computing > schedule.compute_s else "memory"
            if schedule.total_s > 2 * schedule.compute_s:
                bound = "network"
        else:
            network = sum(sent.values()) / target.chip.ring_bytes_per_s
            network += self.limits.hop_s * sum(
                x.times for x in communication.collectives
            )
            parts["network"] = network
            seconds = max(parts["compute"], parts["memory"]) + network
            bound = max(parts, key=lambda name: parts[name])
        return replace(
            row,
            source=source,
            step_s=seconds,
            bound=bound,
            peak_bytes=outcome.peak_bytes,
            utilization=self._utilization(target, seconds),
            sent=sent,
            parts=parts,
            **costs,
        )

    # What would fit.

    def _changes(self, rows: Sequence[Row]) -> list[Row]:
        """Returns the smallest change with which something fits, compiled."""
        sized = [row for row in rows if not math.isnan(row.peak_bytes)]
        if not sized:
            return []
        base = min(sized, key=lambda row: row.peak_bytes).variant
        for variant in self._changed(base):
            if time.monotonic() >= self.limits.deadline:
                self.notes.append("The budget ended while looking for what would fit.")
                break
            row = [self._row(variant)]
            if not row[0].error:
                self._compile(row, iter([0]))
            if row[0].fits:
                return row
        return []

    def _changed(self, base: Variant) -> Iterator[Variant]:
        options = self.problem.options
        if "remat" not in (*options, *base.options) and self._trace("blocks"):
            base = base.with_options(remat="blocks")
            yield base
        counts = [n for n in (2, 4, 8, 16, 32) if self._divides(base, n)]
        done = base.options.get("accumulate", 1)
        for count in [n for n in counts if n > done and "accumulate" not in options]:
            base = base.with_options(accumulate=count)
            yield base
        base = replace(base, has_bfloat16_state=True)
        yield base
        if OFFLOAD not in base.code and base.mesh.platform != "cpu":
            base = base.offloaded()
            yield base
        name = larger_topology(base.topology)
        while name:
            target = self.targets[name] = _Target.of(name)
            mesh = next(meshes(target.devices, target.grid))
            variants = Proposals(None, self.problem.call, self.batch).of(mesh, name)
            yield next(variants).with_options(**base.options)
            name = larger_topology(name)


def bfloat16_state(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that keeps its state in bfloat16, in half the memory.

    The update is computed in float32 of what was kept. Small changes of a moving
    average are lost in bfloat16: compare losses before you rely on it.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> tx = bfloat16_state(optax.adam(1e-3))
        >>> str(tx.init({"w": jnp.zeros(2)})[0].mu["w"].dtype)
        'bfloat16'
    """
    tx = optax.with_extra_args_support(optimizer)

    def cast(tree: PyTree, source: str, dtype: str) -> PyTree:
        def leaf(x: Leaf) -> Any:
            is_it = hasattr(x, "dtype") and x.dtype == jnp.dtype(source)
            return x.astype(dtype) if is_it and x.ndim else x

        return jax.tree.map(leaf, tree)

    def init(params: PyTree) -> PyTree:
        return cast(tx.init(params), "float32", "bfloat16")

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        whole = cast(state, "bfloat16", "float32")
        updates, state = tx.update(updates, whole, params, **extra)
        return updates, cast(state, "float32", "bfloat16")

    return optax.GradientTransformationExtraArgs(init, update)


def _order(row: Row) -> tuple[Any, ...]:
    # Compared per device: seconds of an example times devices.
    cost = row.step_s * row.mesh.size / max(1, row.rows)
    return not row.fits, bool(row.error), row.source == "estimated", cost


def _abstract(leaf: Leaf) -> Any:
    array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))


def _num_tokens(batch: Batch) -> int:
    sizes = [
        math.prod(leaf.shape)
        for leaf in jax.tree.leaves(batch)
        if len(leaf.shape) == 2 and jnp.issubdtype(leaf.dtype, jnp.integer)
    ]
    return max(sizes, default=0)


def _workers() -> int:
    """Returns how many compilations memory and cores allow at once."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on this system
        return 1
    return max(1, min((os.cpu_count() or 1) // 2, free // _HOST_BYTES))


def _say(line: str) -> None:
    sys.stderr.write(f"plan: {line}\n")
    sys.stderr.flush()
