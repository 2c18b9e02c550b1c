"""`plan`: estimates every candidate, and compiles the best of them."""

import functools
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
from flax import linen as nn

from meshlayout import _checks
from meshlayout._annotations import Batch
from meshlayout.errors import MeshLayoutError
from meshlayout.mesh import Mesh
from meshlayout.planning.candidates import Candidates, proposals
from meshlayout.planning.chips import Slice
from meshlayout.planning.compilation import Job, compile_all
from meshlayout.planning.problem import Problem
from meshlayout.planning.rows import Ranking, Row
from meshlayout.state.train_state import Optimizer
from meshlayout.step import make_train_step


_Change: TypeAlias = Callable[[Row], Row]
_RECOMPUTING: _Change = functools.partial(Row.with_options, remat="blocks")

_NUM_COMPILED, _MOST_COMPILED = 4, 12  # at the least and at the most, without a budget
_HOST_BYTES = 4 * 2**30  # that a compilation may take, to say how many go at once


def plan(
    build: Callable[[], Any],
    loss_fn: Callable[..., Any],
    batch: Batch,
    *,
    optimizer: Optimizer,
    topology: "str | Mesh | Sequence[str | Mesh]",
    candidates: Candidates | None = None,
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
    devices that need not exist here. Use this on a laptop before paying for a slice.
    Ctrl-C returns the ranking so far.

    Args:
        build: As for `TrainState.create`, like `optimizer` and `module`.
        loss_fn: As for `make_train_step`, like `step_options`, for all candidates.
        batch: One global batch, or those of a call with `steps_per_call`, of which one
            is planned; `jax.ShapeDtypeStruct` suffices.
        optimizer: An Optax transformation.
        topology: A TPU slice, such as `"v5e:16x16"`, GPUs, such as `"h100:8"`, or a
            mesh of devices here; or several of these, compared per device.
        candidates: Layout maps by name, or functions of a mesh that return one. By
            default, data, fully sharded and tensor parallelism and their compositions,
            and sequences, experts and stages over axes that the model names.
        budget_s: The seconds within which compilations may start; by default, 4 to 12
            are compiled, as long as another is estimated to be faster.
        module: The module, for Linen.
        workers: The number of compilations at a time; by default what memory allows.
        cache: A directory for compilers' results, by default in `~/.cache`.
        hop_s: The latency of a message from one device to the next, in seconds.
        progress: Whether to write progress lines to stderr.
        **step_options: Options of the step.

    Raises:
        MeshError: If a topology does not exist, or its compiler is not installed.
        MeshLayoutError: If an option is wrong. A model that cannot be traced raises its
            own error.

    Examples:
        >>> import jax, optax, meshlayout as ml
        >>> from flax import nnx
        >>> build = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        >>> loss_fn = lambda model, x: model(x) ** 2
        >>> x, sgd = jax.ShapeDtypeStruct((16, 8), "float32"), optax.sgd(0.1)
        >>> options = {"topology": ml.create_mesh(), "budget_s": 0, "progress": False}
        >>> ranking = ml.plan(build, loss_fn, x, optimizer=sgd, **options)
        >>> ranking.fits, ranking.best.source
        (True, 'estimated')
    """
    where: Any = {"where": "plan", "error": MeshLayoutError}
    if budget_s is not None:
        budget_s = _checks.number("budget_s", budget_s, at_least=0, **where)
    deadline = time.monotonic() + (math.inf if budget_s is None else budget_s)
    if workers is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        workers = max(1, min((os.cpu_count() or 1) // 2, memory // _HOST_BYTES))
    workers = _checks.count("workers", workers, **where)
    hop_s = _checks.number("hop_s", hop_s, at_least=0, **where)
    make_train_step(loss_fn, **step_options)  # checks them
    if candidates is not None and not isinstance(candidates, Mapping):
        msg = f"candidates must be a dict by names, got {_checks.shown(candidates)}."
        raise MeshLayoutError(f"plan: {msg}")
    is_one = isinstance(topology, (str, Mesh, jax.sharding.Mesh))
    slices = map(Slice.of, [topology] if is_one else topology)
    folder = Path(cache or Path.home() / ".cache" / "meshlayout" / "plan")
    problem = Problem(build, loss_fn, batch, optimizer, module, step_options, hop_s)
    named = {target.name: target for target in slices}
    search = _Search(problem, named, deadline, workers, folder, progress)
    return search.run(candidates)


@dataclass
class _Search:
    """A plan under way."""

    problem: Problem
    slices: dict[str, Slice]
    deadline: float
    workers: int
    cache: Path
    progress: bool
    notes: list[str] = field(default_factory=list)

    def run(self, candidates: Candidates | None) -> Ranking:
        rows, changes = list[Row](), list[Row]()
        try:
            for target in [*self.slices.values()]:
                for row in self._proposals(target, candidates):
                    with _checks.noted(f"while plan traces the candidate '{row}'"):
                        rows += self._variants(row)
            if unknown := {*(candidates or ())} - {row.name for row in rows}:
                fact = f"{min(unknown)!r} is for other devices than {[*self.slices]}"
                raise MeshLayoutError(f"plan: {fact}. Give a function of a mesh.")
            # What is for some meshes alone has no rows of the others.
            good = {(row.name, row.topology) for row in rows if not row.error}
            rows = [x for x in rows if not x.error or (x.name, x.topology) not in good]
            rows.sort(key=_order)
            self._say(f"{len(rows)} candidates estimated")
            self._compile(rows, self._chosen(rows))
            if not any(row.fits for row in rows):
                changes += self._changes(rows)
        except KeyboardInterrupt:
            self.notes.append("Interrupted: what is ranked so far.")
        return Ranking(tuple(sorted(rows, key=_order)), tuple(changes), (*self.notes,))

    def _say(self, line: str) -> None:
        if self.progress:
            sys.stderr.write(f"plan: {line}\n")

    def _proposals(
        self, target: Slice, candidates: Candidates | None = None
    ) -> Iterator[Row]:
        problem = self.problem
        return proposals(target, problem.values, problem.traits, candidates)

    def _estimate(self, row: Row) -> Row:
        return self.problem.estimate(row, self.slices[row.topology].chip)

    def _variants(self, row: Row) -> list[Row]:
        """Returns a candidate as it is, recomputing, and with what memory needs."""
        rows = [self._estimate(row)]
        if not rows[0].error:
            options = [*self._options(row)]
            rows += [self._estimate(x(row)) for x in options if x is _RECOMPUTING]
            if not any(row.fits for row in rows):
                rows += itertools.islice(self._smaller(rows[0], options), 1)
        return rows

    def _options(self, row: Row) -> Iterator[_Change]:
        """Yields options of a candidate that take less memory."""
        if "remat" not in self.problem.options and self.problem.has_blocks:
            yield _RECOMPUTING
        if "accumulate" not in self.problem.options:
            for count in (2, 4, 8, 16, 32):
                yield functools.partial(Row.with_options, accumulate=count)
        if row.mesh.platform != "cpu":
            yield Row.offloaded

    def _smaller(self, row: Row, changes: Sequence[_Change]) -> Iterator[Row]:
        """Yields a row with one change or the first ones, where its estimate fits."""
        # Of one model, estimates of memory are all off by about the same factor.
        scale = row.peak_bytes / row.estimate.peak_bytes
        row = replace(row, error="", source="estimated")

        def changed(row: Row, change: _Change) -> Row:
            other = self._estimate(change(row))
            return row if other.error else other

        single = (changed(row, change) for change in changes)
        several = itertools.accumulate(changes, changed, initial=row)
        for other in itertools.chain(single, several):
            if scale * other.estimate.peak_bytes <= other.memory_bytes:
                yield other

    def _chosen(self, rows: Sequence[Row]) -> Iterator[int]:
        """Yields which rows are to be compiled, the best first, by the budget."""
        count = sum(not row.error for row in rows)  # others are the last
        for index in range(count):
            if time.monotonic() >= self.deadline:
                text = f"The budget ended after {index} of {count} candidates."
                self.notes.append(text)
                return
            if math.isinf(self.deadline) and index >= _NUM_COMPILED:
                known = [_cost(x) for x in rows if x.fits and x.source != "estimated"]
                # Programs are hardly a quarter faster, or smaller, than estimates.
                is_worse = min(known, default=math.inf) <= 0.75 * _cost(rows[index])
                if index >= _MOST_COMPILED or is_worse or not rows[index].fits:
                    return
            yield index

    def _compile(self, rows: list[Row], chosen: Iterator[int]) -> None:
        """Compiles rows, and puts what came of it in their place."""

        def jobs() -> Iterator[Job]:
            for index in chosen:
                row = rows[index]
                place, devices = self.slices[row.topology].place, row.mesh.devices.flat
                try:
                    yield index, (self.problem.lower(row), [*devices], place)
                except Exception as error:  # of the user's model on this mesh
                    line = f"{type(error).__name__}: {error}".splitlines()[0]
                    rows[index] = replace(row, error=line)

        for index, outcome in compile_all(jobs(), self.cache, self.workers):
            chip = self.slices[rows[index].topology].chip
            rows[index] = self.problem.measure(rows[index], outcome, chip)
            self._say(repr(rows[index]))

    def _changes(self, rows: Sequence[Row]) -> list[Row]:
        """Returns the smallest change with which something fits, compiled."""
        rows = [x for x in rows if x.peak_bytes > x.memory_bytes and not x.step_options]
        for row in sorted(rows, key=lambda x: x.peak_bytes)[:1]:
            places = [row.topology, *self.slices[row.topology].larger]
            first, *larger = (functools.partial(self._sharded, x) for x in places)
            changes = [first, *self._options(row), Row.in_bfloat16], larger
            for smaller in itertools.chain(*(self._smaller(row, x) for x in changes)):
                if time.monotonic() >= self.deadline:
                    self.notes.append(
                        "The budget ended in a search for what would fit."
                    )
                    break
                self._compile(changed := [smaller], iter([0]))
                if changed[0].fits and changed[0].source != "estimated":
                    return changed
        return []

    def _sharded(self, name: str, row: Row) -> Row:
        """Returns a row with parameters sharded over all devices of a slice."""
        if name not in self.slices:
            self.slices[name] = Slice.of(name)
        return next(self._proposals(self.slices[name])).with_options(**row.step_options)


def _cost(row: Row) -> float:
    """Returns the seconds of a step times devices, to compare rows by."""
    return math.inf if math.isnan(row.step_s) else row.step_s * row.mesh.size


def _order(row: Row) -> tuple[object, ...]:
    return not row.fits, bool(row.error), row.source == "estimated", _cost(row)
