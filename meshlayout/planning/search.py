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
from flax import linen as nn

from meshlayout import _checks
from meshlayout._annotations import Batch
from meshlayout.errors import MeshLayoutError
from meshlayout.hlo import read_communication
from meshlayout.mesh import Mesh
from meshlayout.planning import candidates as ways
from meshlayout.planning.chips import Slice
from meshlayout.planning.compilation import Compilation, Outcome, compile_all, job_of
from meshlayout.planning.estimate import estimate
from meshlayout.planning.problem import Problem
from meshlayout.planning.rows import Ranking, Row
from meshlayout.planning.schedule import replay
from meshlayout.state.train_state import Optimizer
from meshlayout.step import make_train_step


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
        loss_fn: As for `make_train_step`, as are `step_options`, for all candidates.
        batch: One global batch; abstract arrays (`jax.ShapeDtypeStruct`) suffice.
        optimizer: An Optax transformation.
        topology: A TPU slice, as `"v5e:16x16"`, GPUs, as `"h100:8"`, or a mesh of
            devices that are here; or several, whose rows are compared per device.
        candidates: Layout maps by name, or functions of a mesh that return one. By
            default, data, fully sharded and tensor parallelism and their compositions
            on meshes of one to three axes, and what the model asks for: sequences,
            experts and stages over the axes that it names.
        budget_s: For how many seconds compilations may be started; by default, as long
            as one that is left is estimated to be faster, between 4 and 12 of them.
        module: For Linen.
        workers: How many compilations go at once; by default what memory allows.
        cache: A directory for what compilers said, by default in `~/.cache`.
        hop_s: The latency of a message from one device to the next, in seconds.
        progress: Whether to write lines on what is done to stderr.
        **step_options: Options of the step.

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
    deadline = math.inf
    if budget_s is not None:
        budget_s = _checks.number("budget_s", budget_s, at_least=0, **where)
        deadline = time.monotonic() + budget_s
    count = workers or _num_workers()
    count = _checks.count("workers", count if workers is None else workers, **where)
    hop_s = _checks.number("hop_s", hop_s, at_least=0, **where)
    make_train_step(loss_fn, **step_options)  # checks them
    is_single = isinstance(topology, (str, Mesh, jax.sharding.Mesh))
    targets: list[Any] = [topology] if is_single else [*topology]
    slices = {x.name: x for x in map(Slice.of, targets)}
    folder = Path(cache or Path.home() / ".cache" / "meshlayout" / "plan")
    problem = Problem(build, loss_fn, batch, optimizer, module, step_options)
    search = _Search(problem, slices, deadline, count, folder, hop_s, progress)
    return search.run(candidates)


@dataclass
class _Search:
    """A plan under way."""

    problem: Problem
    slices: dict[str, Slice]
    deadline: float
    workers: int
    cache: Path
    hop_s: float
    progress: bool
    notes: list[str] = field(default_factory=list)

    def run(self, candidates: ways.Candidates | None) -> Ranking:
        start, rows, changes = time.monotonic(), list[Row](), list[Row]()
        try:
            for target in [*self.slices.values()]:
                for row in self._proposals(target, candidates):
                    with _checks.noted(f"while plan traces the candidate '{row}'"):
                        rows += self._estimates(row)
            if not rows:
                fact = f"plan: no candidate is for {', '.join(self.slices)}"
                fix = "Give functions of a mesh, or layout maps on one of these devices"
                raise MeshLayoutError(f"{fact}. {fix}.")
            rows.sort(key=_order)
            seconds = time.monotonic() - start
            self._say(f"{len(rows)} candidates estimated in {seconds:.1f} s")
            self._compile(rows, self._chosen(rows))
            if not any(row.fits for row in rows):
                changes += self._changes(rows)
        except KeyboardInterrupt:
            self.notes.append("Interrupted: what is ranked so far.")
        return Ranking(tuple(sorted(rows, key=_order)), tuple(changes), (*self.notes,))

    def _say(self, line: str) -> None:
        if self.progress:
            sys.stderr.write(f"plan: {line}\n")
            sys.stderr.flush()

    def _proposals(
        self, target: Slice, candidates: ways.Candidates | None = None
    ) -> Iterator[Row]:
        facts: Any = {**self.problem.facts, "memory_bytes": target.chip.memory_bytes}
        rows = ways.proposals(target, self.problem.values, self.problem.traits)
        for row in rows if candidates is None else ways.given(candidates, target):
            yield replace(row, **facts)

    def _smaller(self, row: Row, *, is_last: bool = False) -> Iterator[Row]:
        """Yields a candidate with one change after another that takes less memory.

        At last also with those of its layouts, of its numbers and of the slice.
        """
        given, target = {**self.problem.options, **row.step_options}, row.topology
        if "remat" not in given and self.problem.trace("blocks") is not None:
            yield (row := row.with_options(remat="blocks"))
        options, rows = dict(row.step_options), row.rows // row.num_row_shards
        for count in (2, 4, 8, 16, 32)[: 5 if is_last else 3]:
            is_free = "accumulate" not in self.problem.options
            if is_free and count > given.get("accumulate", 1) and rows % count == 0:
                yield (row := row.with_options(accumulate=count))
        if is_last:
            every = self._proposals(self.slices[target]) if row.name != "fsdp" else ()
            for other in [x for x in every if x.name == "fsdp"][:1]:
                yield (row := other.with_options(**row.step_options))
            yield (row := row.in_bfloat16())
        if row.mesh.platform != "cpu":
            yield row.offloaded()
        for larger in self.slices[target].larger() if is_last else ():
            self.slices[larger.name] = larger
            yield next(self._proposals(larger)).with_options(**options)

    def _estimates(self, row: Row) -> Iterator[Row]:
        """Yields a candidate as it is, recomputing, and with what memory needs."""
        row = self._estimate(row)
        yield row
        is_tight = not row.fits
        for smaller in self._smaller(row) if not row.error else ():
            is_remat = [*smaller.step_options] == ["remat"]
            if not is_tight and not is_remat:
                return
            row = self._estimate(smaller)
            if is_remat or row.fits:
                yield row
            is_tight = is_tight and not row.fits

    def _estimate(self, row: Row) -> Row:
        """Returns a row with its estimate, or why it cannot be estimated."""
        options = self.problem.options_of(row)
        trace, count = self.problem.trace(options["remat"]), options["accumulate"]
        if row.error or trace is None:
            return row
        if row.rows % (row.num_row_shards * count):
            line = f"{row.rows} examples do not divide over {', '.join(row.batch[0])}"
            return replace(row, error=f"{line} and {count} microbatches.")
        try:
            row = replace(row, state=row.state or self.problem.state(row))
        except MeshLayoutError as error:
            return replace(row, error=str(error).splitlines()[0])
        chip = self.slices[row.topology].chip
        cost = estimate(trace, row, chip, self.hop_s, count, options["remat"])
        row = replace(row, sent=cost.sent, peak_bytes=cost.peak_bytes, estimate=cost)
        return self._timed(row, cost.seconds, cost.parts)

    def _timed(
        self, row: Row, seconds: Mapping[str, float], parts: Mapping[str, float]
    ) -> Row:
        """Returns a row with what its time is bound by and consists of."""
        step_s, bound = sum(seconds.values()), max(seconds, key=lambda x: seconds[x])
        peak = step_s * row.mesh.size * self.slices[row.topology].chip.flops_per_s
        used = self.problem.flops / peak
        return replace(row, step_s=step_s, bound=bound, parts=parts, utilization=used)

    def _chosen(self, rows: Sequence[Row]) -> Iterator[int]:
        """Yields which rows are to be compiled, the best first, by the budget."""
        keys = [(row.name, row.topology, row.mesh) for row in rows]
        # What fits without recomputing or microbatches is faster without.
        pairs = [*zip(keys, rows, strict=True)]
        plain = {key for key, row in pairs if row.fits and not row.step_options}
        spare = [bool(row.step_options) and key in plain for key, row in pairs]
        indices = [index for index, row in enumerate(rows) if not row.error]
        indices.sort(key=spare.__getitem__)
        for number, index in enumerate(indices):
            if time.monotonic() >= self.deadline:
                text = f"The budget ended after {number} of {len(indices)} candidates."
                self.notes.append(text)
                return
            if math.isinf(self.deadline) and number >= _NUM_COMPILED:
                known = [x for x in rows if x.fits and x.source != "estimated"]
                best = min(map(_cost, known), default=math.inf)
                # Programs are hardly a quarter faster, or smaller, than estimates.
                is_worse = best <= 0.75 * _cost(rows[index]) or not rows[index].fits
                if number >= _MOST_COMPILED or is_worse:
                    return
            yield index

    def _compile(self, rows: list[Row], chosen: Iterator[int]) -> None:
        """Compiles rows, and puts what came of it in their place."""

        def jobs() -> Iterator[tuple[int, Compilation]]:
            for index in chosen:
                row = rows[index]
                devices, target = [*row.mesh.devices.flat], self.slices[row.topology]
                try:
                    lowered = self.problem.lower(row)
                except Exception as error:  # of the user's model on this mesh
                    line = f"{type(error).__name__}: {error}".splitlines()[0]
                    rows[index] = replace(row, error=line)
                else:
                    yield index, job_of(lowered, devices, target.topology)

        for index, outcome in compile_all(jobs(), self.cache, self.workers):
            rows[index] = self._measured(rows[index], outcome)
            self._say(repr(rows[index]))

    def _measured(self, row: Row, outcome: Outcome) -> Row:
        """Returns a row with what the compiler said."""
        chip = self.slices[row.topology].chip
        seconds = {**(row.estimate.seconds if row.estimate else {})}
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

    def _changes(self, rows: Sequence[Row]) -> list[Row]:
        """Returns the smallest change with which something fits, compiled."""
        sized = [row for row in rows if not math.isnan(row.peak_bytes)]
        for base in sorted(sized, key=lambda row: row.peak_bytes)[:1]:
            base = replace(base, error="", source="estimated")
            for row in self._smaller(base, is_last=True):
                if time.monotonic() >= self.deadline:
                    line = "The budget ended while looking for what would fit."
                    self.notes.append(line)
                    return []
                changed = [self._estimate(row)]
                # Estimates of memory are some percent off.
                is_near = changed[0].peak_bytes < 1.2 * changed[0].memory_bytes
                self._compile(changed, iter([0] * (is_near and not changed[0].error)))
                if changed[0].fits and changed[0].source != "estimated":
                    return changed
        return []


def _cost(row: Row) -> float:
    """Returns the seconds of an example times devices, to compare rows by."""
    return row.step_s * row.mesh.size / max(1, row.rows)


def _order(row: Row) -> tuple[object, ...]:
    cost = math.inf if math.isnan(row.step_s) else _cost(row)
    return not row.fits, bool(row.error), row.source == "estimated", cost


def _num_workers() -> int:
    """Returns how many compilations memory and cores allow at once."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on this system
        return 1
    return max(1, min((os.cpu_count() or 1) // 2, free // _HOST_BYTES))
