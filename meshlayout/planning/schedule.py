"""How long a compiled TPU program takes, by its schedule.

A compiled TPU program has its instructions in the order in which a chip runs them, each
with the compiler's estimate of its cycles, which knows nothing of other chips.
Replaying them, a synchronous collective is waited for in full, and an asynchronous one
only where it is not done when its result is needed; there is one network, so that one
collective goes after another. Of a loop, two turns are replayed, and the second counts
for all that follow; a loop of unknown length counts as one turn, and of the branches of
a condition the one that computes longest.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from meshlayout.hlo.collectives import _CHAIN, _CHANNEL, _OPCODES, _collective
from meshlayout.hlo.origins import Origins
from meshlayout.hlo.program import Instruction, Program
from meshlayout.planning.chips import Chip


@dataclass
class Replay:
    """How long a program takes, by its schedule.

    `parts` are the seconds of computing, by the submodule or else the source line that
    it is for, and of waiting for collectives, as `"wait: all_reduce, blocks"`.
    """

    compute_s: float = 0.0  # of computing alone
    alone_s: float = 0.0  # of all collectives alone
    num_async: int = 0  # collectives with computing meanwhile; each as often as it runs
    num_sync: int = 0
    wire_bytes: float = 0.0  # that each chip sends
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def total_s(self) -> float:
        """The seconds of computing and of waiting."""
        return sum(self.parts.values())


def replay(text: str, chip: Chip, *, hop_s: float = 1e-6) -> Replay:
    """Runs through a program's schedule, with one collective after another.

    Computing takes no time where the chip's compiler estimates no cycles.

    Args:
        text: The program's, as `compiled.as_text()`.
        chip: What it runs on.
        hop_s: The latency of a message from one device to the next, in seconds.
    """
    program = Program(text)
    run = _Run(program, Origins(program, {}, ()), chip, hop_s)
    run.computation(program.entry)
    return run.result


@dataclass
class _Run:
    """A replay under way."""

    program: Program
    origins: Origins
    chip: Chip
    hop_s: float
    now: float = 0.0
    network_free: float = 0.0  # when all collectives so far are done
    times: int = 1  # that what is replayed counts for
    result: Replay = field(default_factory=Replay)
    # What goes on: when it ends, the computing before it, and its name.
    pending: dict[Any, tuple[float, float, str]] = field(default_factory=dict)

    def computation(self, name: str) -> None:
        for instruction in self.program.computations[name]:
            called = self.program.called(instruction)
            if instruction.opcode == "while":
                body, times = instruction.callee("body"), self.times
                self.computation(body)
                # The second turn counts for all that follow.
                self.times *= (self.program._trip_count(instruction) or 1) - 1
                self.computation(body)
                self.times = times
            elif instruction.opcode in ("conditional", "call") and called:
                self.computation(max(called, key=self._cycles))
            else:
                self._step(instruction, called)

    def _cycles(self, name: str) -> int:
        return sum(map(_cycles_of, self.program.computations[name]))

    def _step(self, instruction: Instruction, called: list[str]) -> None:
        inner = [x for name in called for x in self.program.computations[name]]
        every = (x for x in [instruction, *inner] if x.opcode in _OPCODES)
        seconds = _cycles_of(instruction) / (self.chip.clock_hz or math.inf)
        collective = next(every, None)
        start: Any = None
        done: Any = None
        if instruction.opcode.endswith("-done"):
            done = instruction.operands[0]
        elif instruction.opcode.endswith("-start"):
            start = instruction
        elif collective is not None:
            start = done = instruction
            text = collective.computation + "".join(x.rest for x in inner)
            if collective is instruction:
                seconds = 0.0
            elif "async_collective" in text or "AsyncCollective" in text:
                # In the pieces between, it computes while a collective goes on.
                key = tuple(map(collective.attribute, (_CHANNEL, _CHAIN)))
                start = key if "AsyncCollectiveStart" in text else None
                done = key if "AsyncCollectiveDone" in text else None
        if start is not None and collective is not None:
            self._send(start, collective)
        if seconds:
            scopes, source = self.origins.scopes_and_source(instruction)
            place = "/".join(scopes) or self.origins.module(instruction) or source
            self._pass(place or "other", seconds)
            self.result.compute_s += self.times * seconds
        # A copy between memories, or a collective from an earlier turn of a loop.
        if done in self.pending:
            end, before, name = self.pending.pop(done)
            self._pass(f"wait: {name}", max(0.0, end - self.now))
            is_async = self.result.compute_s > before
            self.result.num_async += self.times * is_async
            self.result.num_sync += self.times * (not is_async)

    def _pass(self, name: str, seconds: float) -> None:
        self.now += seconds
        self.result.parts[name] += self.times * seconds

    def _send(self, key: Any, instruction: Instruction) -> None:
        facts = _collective(self.program, instruction, None, self.origins)
        sent, n = facts.wire_bytes / max(1, facts.times), facts.num_devices
        hops = ring_hops(n) * (2 if facts.kind == "all_reduce" else 1)
        hops = 1 if facts.kind == "collective_permute" else hops
        seconds = sent / self.chip.ring_bytes_per_s + hops * self.hop_s
        name = ", ".join(filter(None, (facts.kind, facts.module or facts.source)))
        self.network_free = max(self.network_free, self.now) + seconds
        self.pending[key] = self.network_free, self.result.compute_s, name
        self.result.alone_s += self.times * seconds
        self.result.wire_bytes += self.times * sent


def ring_hops(n: int) -> float:
    """Returns how many devices a message passes on its way around n of them."""
    # Many are in a grid: it passes along one side and the other.
    return n - 1 if n <= 16 else 2 * (math.sqrt(n) - 1)


def _cycles_of(instruction: Instruction) -> int:
    return int(instruction.attribute(r'"estimated_cycles":"(\d+)"') or 0)
