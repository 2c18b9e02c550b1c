"""How long a compiled TPU program takes, by its schedule.

A compiled TPU program has its instructions in the order in which a chip runs them, each
with the compiler's estimate of its cycles, which knows nothing of other chips.
Replaying them, a synchronous collective is waited for in full, and an asynchronous one
only where it is not done when its result is needed; there is one network, so that one
collective goes after another. Of a loop, two turns are replayed, and the second stands
for all that follow; a loop of unknown length counts as one turn, and of the branches of
a condition the one that computes longest.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshlayout.errors import MeshError
from meshlayout.hlo.collectives import _CHAIN, _CHANNEL, _OPCODES, _PIECE, _collective
from meshlayout.hlo.origins import Origins
from meshlayout.hlo.program import Instruction, Program
from meshlayout.planning.chips import Chip


@dataclass(frozen=True)
class Replay:
    """How long a program takes, by its schedule.

    `parts` are the seconds of computing, by the submodule or else the source line that
    it is for, and of waiting for collectives, as `"wait: all_reduce, blocks"`.
    """

    compute_s: float  # of computing alone
    alone_s: float  # of all collectives alone
    total_s: float
    num_async: int  # collectives with computing meanwhile; each as often as it runs
    num_sync: int
    wire_bytes: float  # that each chip sends
    parts: Mapping[str, float] = field(default_factory=dict)


def replay(text: str, chip: Chip, *, hop_s: float = 1e-6) -> Replay:
    """Runs through a program's schedule, with one collective after another.

    Args:
        text: The program's, as `compiled.as_text()`.
        chip: What it runs on.
        hop_s: The latency of a message from one device to the next, in seconds.

    Raises:
        MeshError: If the chip's compiler estimates no cycles.
    """
    if chip.clock_hz is None:
        msg = f"the compiler for {chip.name} estimates no cycles to replay."
        raise MeshError(msg)
    program = Program(text)
    run = _Run(program, Origins(program, {}, ()), chip, chip.clock_hz, hop_s)
    run.computation(program.entry)
    totals = run.totals
    parts = {x[5:]: totals[x] for x in totals if x.startswith("part ")}
    parts = dict(sorted(parts.items(), key=lambda x: -x[1]))
    counts = round(totals["async"]), round(totals["sync"])
    compute_s, alone_s, total_s = (totals[x] for x in ("compute", "alone", "now"))
    return Replay(compute_s, alone_s, total_s, *counts, totals["sent"], parts)


@dataclass
class _Run:
    """A replay under way; all that it adds up is in `totals`."""

    program: Program
    origins: Origins
    chip: Chip
    clock_hz: float
    hop_s: float
    network_free: float = 0.0
    totals: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    # What goes on: when it ends, the computing before it, and its name.
    pending: dict[Any, tuple[float, float, str]] = field(default_factory=dict)

    def computation(self, name: str) -> None:
        for instruction in self.program.computations[name]:
            called = self.program.called(instruction)
            if instruction.opcode == "while":
                self._loop(instruction)
            elif instruction.opcode in ("conditional", "call") and called:
                self.computation(max(called, key=self._cycles))
            else:
                self._step(instruction, called)

    def _loop(self, loop: Instruction) -> None:
        count = self.program._trip_count(loop)
        turns, before = 1 if count is None else count, dict[str, float]()
        for _ in range(min(turns, 2)):
            before = {**self.totals}
            self.computation(loop.callee("body"))
        if turns > 2:
            now = self.totals["now"]
            for key, value in [*self.totals.items()]:
                self.totals[key] += (turns - 2) * (value - before.get(key, 0.0))
            later = self.totals["now"] - now
            self.network_free += later
            for key, (end, compute, name) in self.pending.items():
                self.pending[key] = end + later, compute, name

    def _cycles(self, name: str) -> int:
        return sum(map(_cycles_of, self.program.computations[name]))

    def _step(self, instruction: Instruction, called: list[str]) -> None:
        inner = [x for name in called for x in self.program.computations[name]]
        every = (x for x in [instruction, *inner] if x.opcode in _OPCODES)
        cycles, collective = _cycles_of(instruction), next(every, None)
        start: Any = None
        done: Any = None
        if instruction.opcode.endswith("-done") and instruction.operands:
            done = instruction.operands[0]
        elif instruction.opcode.endswith("-start"):
            start = instruction
        elif collective is not None:
            text, name = "".join(x.rest for x in inner), collective.computation
            starts, ends = (f"AsyncCollective{x}" in text for x in ("Start", "Done"))
            is_piece = collective is not instruction and bool(_PIECE.match(name))
            if is_piece and (name.startswith("async_collective") or starts or ends):
                # In the pieces between, it computes while a collective goes on.
                key = tuple(map(collective.attribute, (_CHANNEL, _CHAIN)))
                start, done = key if starts else None, key if ends else None
            else:
                start = done = instruction
                cycles *= collective is not instruction
        if start is not None and collective is not None:
            self._send(start, collective)
        totals, seconds = self.totals, cycles / self.clock_hz
        totals["now"] += seconds
        totals["compute"] += seconds
        if seconds:
            scopes, source = self.origins.scopes_and_source(instruction)
            place = "/".join(scopes) or self.origins.module(instruction) or source
            totals[f"part {place or 'other'}"] += seconds
        # A copy between memories, or a collective from an earlier turn of a loop.
        if done in self.pending:
            end, before, name = self.pending.pop(done)
            if end > totals["now"]:
                totals[f"part wait: {name}"] += end - totals["now"]
                totals["now"] = end
            totals["async" if totals["compute"] > before else "sync"] += 1

    def _send(self, key: Any, instruction: Instruction) -> None:
        facts = _collective(self.program, instruction, None, self.origins)
        sent, n = facts.wire_bytes / max(1, facts.times), facts.num_devices
        hops = ring_hops(n) * (2 if facts.kind == "all_reduce" else 1)
        hops = 1 if facts.kind == "collective_permute" else hops
        seconds = sent / self.chip.ring_bytes_per_s + hops * self.hop_s
        name = ", ".join(filter(None, (facts.kind, facts.module or facts.source)))
        self.network_free = max(self.network_free, self.totals["now"]) + seconds
        self.pending[key] = self.network_free, self.totals["compute"], name
        self.totals["alone"] += seconds
        self.totals["sent"] += sent


def ring_hops(n: int) -> float:
    """Returns how many devices a message passes on its way around n of them."""
    # Many are in a grid: it passes along one side and the other.
    return n - 1 if n <= 16 else 2 * (math.sqrt(n) - 1)


def _cycles_of(instruction: Instruction) -> int:
    return int(instruction.attribute(r'"estimated_cycles":"(\d+)"') or 0)
