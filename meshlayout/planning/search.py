"""`plan`: estimates every candidate, and compiles the best of them."""

import functools
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from flax import linen as nn

from meshlayout import _checks
from meshlayout._annotations import Batch
from meshlayout.errors import MeshLayoutError
from meshlayout.mesh import Mesh
from meshlayout.planning import candidates as ways
from meshlayout.planning.chips import Slice
from meshlayout.planning.compilation import Compilation, compile_all, job_of
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
    devices that need not exist here. Use this on a laptop before paying for a slice.
    Ctrl-C returns the ranking so far.

    Args:
        build: As for `TrainState.create`, like `optimizer` and `module`.
        loss_fn: As for `make_train_step`, like `step_options`, for all candidates.
        batch: One global batch, or the batches of a call with `steps_per_call`, of
            which one is planned; `jax.ShapeDtypeStruct` suffices.
        optimizer: An Optax transformation.
        topology: A TPU slice, such as `"v5e:16x16"`, GPUs, such as `"h100:8"`, or a
            mesh of devices here; or several of these, compared per device.
        candidates: Layout maps by name, or functions of a mesh that return one. By
            default, data, fully sharded and tensor parallelism and their compositions
            on meshes of one to three axes, and those that the model asks for:
            sequences, experts and stages over the axes that it names.
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
    count = _num_workers() if workers is None else workers
    count = _checks.count("workers", count, **where)
    hop_s = _checks.number("hop_s", hop_s, at_least=0, **where)
    make_train_step(loss_fn, **step_options)  # checks them
    if candidates is not None and not isinstance(candidates, Mapping):
        msg = f"candidates must be a dict by names, got {_checks.shown(candidates)}."
        raise MeshLayoutError(f"plan: {msg}")
    is_list = isinstance(topology, Sequence) and not isinstance(topology, str)
    targets: Any = topology if is_list else [topology]
    slices = {x.name: x for x in map(Slice.of, targets)}
    folder = Path(cache or Path.home() / ".cache" / "meshlayout" / "plan")
    problem = Problem(build, loss_fn, batch, optimizer, module, step_options, hop_s)
    return _Search(problem, slices, deadline, count, folder, progress).run(candidates)


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

    def run(self, candidates: ways.Candidates | None) -> Ranking:
        start, rows, changes = time.monotonic(), list[Row](), list[Row]()
        try:
            for target in [*self.slices.values()]:
                proposals = self._proposals(target)
                if candidates is not None:
                    proposals = ways.given(candidates, target)
                for row in proposals:
                    with _checks.noted(f"while plan traces the candidate '{row}'"):
                        rows += self._estimates(row)
            names = {row.name for row in rows}
            unused = [name for name in candidates or () if name not in names]
            self.notes += [f"{x!r} is for other devices than these." for x in unused]
            if not rows:
                fact = f"plan: no candidate is for {[*self.slices]}"
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

    def _proposals(self, target: Slice) -> Iterator[Row]:
        return ways.proposals(target, self.problem.values, self.problem.traits)

    def _estimate(self, row: Row, *changes: _Change) -> Row:
        for change in changes:
            row = change(row)
        return self.problem.estimate(row, self.slices[row.topology].chip)

    def _estimates(self, row: Row) -> Iterator[Row]:
        """Yields a candidate as it is, recomputing, and with what memory needs."""
        yield (row := self._estimate(row))
        changes, fits = [] if row.error else [*self._options(row)], row.fits
        if _RECOMPUTING in changes:
            yield (again := self._estimate(row, _RECOMPUTING))
            fits = fits or again.fits
        if changes and not fits:
            yield from itertools.islice(self._smaller(row, changes), 1)

    def _options(self, row: Row) -> Iterator[_Change]:
        """Yields options of a candidate that take less memory."""
        given = {**self.problem.options, **row.step_options}
        if "remat" not in given and self.problem.has_blocks:
            yield _RECOMPUTING
        if "accumulate" not in given:
            for count in (2, 4, 8, 16, 32):
                if row.rows % (row.num_row_shards * count) == 0:
                    yield functools.partial(Row.with_options, accumulate=count)
        if row.mesh.platform != "cpu":
            yield Row.offloaded

    def _smaller(self, row: Row, changes: Iterable[_Change]) -> Iterator[Row]:
        """Yields a row with the fewest of some changes that fits by its estimate."""
        # Of one model, estimates of memory are all off by about the same factor.
        peak, applied = row.peak_bytes, list[_Change]()
        row = self._estimate(replace(row, error="", source="estimated"))
        scale = peak / row.peak_bytes

        def fits(*changes: _Change) -> bool:
            changed = self._estimate(row, *changes)
            return not changed.error and scale * changed.peak_bytes <= row.memory_bytes

        for change in changes:
            if self._estimate(row, *applied, change).error:
                continue
            applied.append(change)
            if fits(*applied):
                needed = [*applied]
                for other in applied[:-1]:  # the last one may do without it
                    rest = [x for x in needed if x is not other]
                    needed = rest if fits(*rest) else needed
                yield self._estimate(row, *needed)

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
            chip = self.slices[rows[index].topology].chip
            rows[index] = self.problem.measure(rows[index], outcome, chip)
            self._say(repr(rows[index]))

    def _changes(self, rows: Sequence[Row]) -> list[Row]:
        """Returns the smallest change with which something fits, compiled."""
        large = [row for row in rows if row.peak_bytes > row.memory_bytes]
        plain = [row for row in large if not row.step_options]
        plain.sort(key=lambda row: row.peak_bytes)
        for smaller in self._changed(plain[0]) if plain else ():
            if time.monotonic() >= self.deadline:
                self.notes.append("The budget ended while looking for what would fit.")
                break
            self._compile(changed := [smaller], iter([0]))
            if changed[0].fits and changed[0].source != "estimated":
                return changed
        return []

    def _changed(self, row: Row) -> Iterator[Row]:
        """Yields a row with other layouts, options, numbers or devices that may fit."""
        target = self.slices[row.topology]
        options = [*self._options(row), Row.in_bfloat16]
        yield from self._smaller(row, [self._sharded(target), *options])
        for larger in target.larger():
            self.slices[larger.name] = larger
            yield from self._smaller(row, [self._sharded(larger)])

    def _sharded(self, target: Slice) -> _Change:
        first = next(self._proposals(target))  # over all devices
        return lambda row: first.with_options(**row.step_options)


def _cost(row: Row) -> float:
    """Returns the seconds of an example times devices, to compare rows by."""
    return row.step_s * row.mesh.size / max(1, row.rows)


def _order(row: Row) -> tuple[object, ...]:
    cost = math.inf if math.isnan(row.step_s) else _cost(row)
    return not row.fits, bool(row.error), row.source == "estimated", cost


def _num_workers() -> int:
    """Returns how many compilations memory and cores allow at once."""
    # Free memory, where the system knows, or all.
    pages = min({"SC_AVPHYS_PAGES", "SC_PHYS_PAGES"} & os.sysconf_names.keys())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages)
    return max(1, min((os.cpu_count() or 1) // 2, memory // _HOST_BYTES))
