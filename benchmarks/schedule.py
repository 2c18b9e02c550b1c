"""How long a program for TPU v5e takes, by its schedule.

A compiled TPU program has its instructions in the order in which a chip runs them, each
with the compiler's estimate of its cycles, which knows nothing of other chips.
Replaying them, a synchronous collective is waited for in full, and an asynchronous one
only where it is not done when its result is needed; there is one network, so that one
collective goes after another. It is for programs of data parallelism, without loops,
whose collectives are all-reduces.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from meshlayout.hlo.program import Program, arrays_of, nbytes


# A v5e chip, https://cloud.google.com/tpu/docs/v5e: 197 TFLOP/s in bfloat16, 819 GB/s
# of memory, and between chips 1,600 Gbit/s each way over four ports. Its four units of
# 128 x 128 multiply-adds do 197 TFLOP/s at 1.5 GHz.
FLOPS_PER_S = 197e12
MEMORY_BYTES_PER_S = 819e9
CLOCK_HZ = FLOPS_PER_S / (4 * 128 * 128 * 2)
PORT_BYTES_PER_S = 1600e9 / 8 / 4
# The programs say that a large all-reduce goes around two rings in opposite directions
# ("colors:2"), which is two ports of each chip.
BYTES_PER_S = 2 * PORT_BYTES_PER_S
HOP_S = 1e-6  # assumed, per chip that a small message passes


@dataclass(frozen=True)
class Event:
    """What a chip does next: computes, or starts and ends collectives.

    Attributes:
        cycles: That it computes.
        start: The collective that it starts, or "".
        done: The collective whose result it needs, or "".
        wire_bytes: That it sends in the collective that it starts.
    """

    cycles: int = 0
    start: str = ""
    done: str = ""
    wire_bytes: float = 0.0


def events_of(program: Program) -> Iterator[Event]:
    """Yields what a chip does, in the order of the program's schedule."""
    whole = program.computations[program.entry]
    for instruction in whole:
        if instruction.opcode == "while":
            raise SystemExit("a loop in the program: its cycles would not be counted")
        called = program.called(instruction)
        inner = [x for name in called for x in program.computations[name]]
        reduce = next(
            (x for x in [instruction, *inner] if x.opcode == "all-reduce"), None
        )
        cycles = int(instruction.attribute(r'"estimated_cycles":"(\d+)"') or 0)
        if reduce is None:
            yield Event(cycles)
            continue
        sent = 2 * (program.num_devices - 1) / program.num_devices
        sent *= sum(nbytes(*array) for array in arrays_of(reduce.type))
        channel = reduce.attribute(r"\bchannel_id=(\d+)")
        text = "".join(x.rest for x in inner)
        starts, ends = (f"AsyncCollective{x}" in text for x in ("Start", "Done"))
        if reduce is instruction:
            yield Event(0, channel, channel, sent)
        elif starts or ends:
            yield Event(cycles, channel * starts, channel * ends, sent)
        else:  # it computes while a collective goes on
            yield Event(cycles)


@dataclass(frozen=True)
class Replay:
    """How long a program takes, by its schedule.

    Attributes:
        compute_s: Of computing alone.
        alone_s: Of all collectives alone.
        total_s: Of the whole step.
        num_async: How many collectives are asynchronous, with computation between start
            and end.
        num_sync: How many are not.
        wire_bytes: That each chip sends.
    """

    compute_s: float
    alone_s: float
    total_s: float
    num_async: int
    num_sync: int
    wire_bytes: float


def replay(text: str) -> Replay:
    """Runs through a program's schedule, with one collective after another."""
    program = Program(text)
    hops = 2 * (program.num_devices - 1)
    now = compute = alone = network_free = sent = 0.0
    num_async = num_sync = 0
    ends: dict[str, tuple[float, float]] = {}
    for event in events_of(program):
        if event.start:
            taken = event.wire_bytes / BYTES_PER_S + hops * HOP_S
            network_free = max(network_free, now) + taken
            ends[event.start] = network_free, compute
            alone, sent = alone + taken, sent + event.wire_bytes
        seconds = event.cycles / CLOCK_HZ
        now, compute = now + seconds, compute + seconds
        if event.done:
            end, before = ends.pop(event.done)
            now = max(now, end)
            num_async += compute > before
            num_sync += compute == before
    return Replay(compute, alone, now, num_async, num_sync, sent)
