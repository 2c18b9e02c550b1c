"""`benchmarks/scaling.py`: how long a program takes by its schedule."""

import functools

import pytest

from benchmarks import scaling
from meshlayout import planning
from meshlayout.planning import CHIPS
from tests.tpu import read_collectives


MEGABYTES = 100  # that are added up over four chips
MILLISECOND = round((CHIPS["v5e"].clock_hz or 0) / 1000)
replay = functools.partial(planning.replay, chip=CHIPS["v5e"])
# Each chip sends 2 * 3/4 of them, around both rings; and six hops.
COLLECTIVE_S = 1.5 * MEGABYTES * 1e6 / 100e9 + 6e-6

PROGRAM = """HloModule step, is_scheduled=true, num_partitions=4

%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}

%work (p: f32[{size}]) -> f32[{size}] {{
  %p = f32[{size}] parameter(0)
  ROOT %q = f32[{size}] negate(%p)
}}

%async_collective_fusion.1 (p: f32[{size}]) -> f32[{size}] {{
  %p = f32[{size}] parameter(0)
  %r = f32[{size}] all-reduce(%p), channel_id=7, replica_groups={{{{0,1,2,3}}}}, to_apply=%sum, frontend_attributes={{chain_id="0"}}
  ROOT %s = f32[{size}] custom-call(%r), custom_call_target="AsyncCollectiveStart"
}}

%async_collective_fusion.2 (p: f32[{size}]) -> f32[{size}] {{
  %p = f32[{size}] parameter(0)
  %r = f32[{size}] all-reduce(%p), channel_id=7, replica_groups={{{{0,1,2,3}}}}, to_apply=%sum, frontend_attributes={{chain_id="0"}}
  ROOT %s = f32[{size}] custom-call(%r), custom_call_target="AsyncCollectiveDone"
}}

ENTRY %main (x: f32[{size}]) -> f32[{size}] {{
  %x = f32[{size}] parameter(0)
{body}
}}
"""


def program(*body):
    text = "\n".join(f"  {line}" for line in body)
    size = MEGABYTES * 250_000
    return PROGRAM.format(size=size, body=text.replace("SIZE", f"f32[{size}]"))


def computing(name, operand, milliseconds):
    cycles = f'backend_config={{"estimated_cycles":"{milliseconds * MILLISECOND}"}}'
    return f"%{name} = SIZE fusion(%{operand}), kind=kLoop, calls=%work, {cycles}"


COUNTED = """
%body (p: (s32[], SIZE)) -> (s32[], SIZE) {
  %p = (s32[], SIZE) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %v = SIZE get-tuple-element(%p), index=1
  WORK
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], SIZE) tuple(%next, %r)
}

%condition (p: (s32[], SIZE)) -> pred[] {
  %p = (s32[], SIZE) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(7)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY"""


def looped(*body):
    loop = (
        "%zero = s32[] constant(0)",
        "%start = (s32[], SIZE) tuple(%zero, %x)",
        "%loop = (s32[], SIZE) while(%start), condition=%condition, body=%body",
        "ROOT %y = SIZE get-tuple-element(%loop), index=1",
    )
    size = MEGABYTES * 250_000
    text = PROGRAM.format(size=size, body="\n".join(f"  {line}" for line in loop))
    text = text.replace("ENTRY", COUNTED.replace("WORK", "\n  ".join(body)))
    return text.replace("SIZE", f"f32[{size}]")


SYNCHRONOUS = program(
    computing("a", "x", 10),
    "%b = SIZE all-reduce(%a), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%sum",
    computing("c", "b", 5),
)


def asynchronous(milliseconds):
    return program(
        computing("a", "x", 10),
        "%b = SIZE fusion(%a), kind=kCustom, calls=%async_collective_fusion.1",
        computing("c", "x", milliseconds),
        "%d = SIZE fusion(%b), kind=kCustom, calls=%async_collective_fusion.2",
        computing("e", "d", 5),
    )


def test_a_synchronous_collective_is_waited_for():
    step = replay(SYNCHRONOUS)
    assert step.compute_s == pytest.approx(15e-3, rel=1e-6)
    assert step.alone_s == pytest.approx(COLLECTIVE_S)
    assert step.total_s == pytest.approx(15e-3 + COLLECTIVE_S, rel=1e-6)
    assert (step.num_async, step.num_sync) == (0, 1)
    assert step.wire_bytes == 1.5 * MEGABYTES * 1e6


@pytest.mark.parametrize("overlapped", [0, 1, 4])
def test_an_asynchronous_collective_is_waited_for_as_far_as_it_is_not_done(overlapped):
    text = asynchronous(overlapped)
    step = replay(text)
    wait = max(0, COLLECTIVE_S - overlapped * 1e-3)
    assert step.total_s == pytest.approx((15 + overlapped) * 1e-3 + wait, rel=1e-6)
    # With nothing between its start and its end, it is not asynchronous.
    assert (step.num_async, step.num_sync) == ((1, 0) if overlapped else (0, 1))
    assert len(read_collectives(text)) == 1


def test_a_loop_takes_as_long_as_all_of_its_turns():
    reduced = "%r = SIZE all-reduce(%a), channel_id=1, replica_groups={{0,1,2,3}}"
    step = replay(looped(computing("a", "v", 2), f"{reduced}, to_apply=%sum"))
    assert step.total_s == pytest.approx(7 * (2e-3 + COLLECTIVE_S), rel=1e-6)
    assert step.compute_s == pytest.approx(14e-3, rel=1e-6)
    assert (step.num_sync, step.wire_bytes) == (7, 7 * 1.5 * MEGABYTES * 1e6)


def test_what_a_step_consists_of_adds_up():
    step = replay(asynchronous(1))
    assert sum(step.parts.values()) == pytest.approx(step.total_s)
    waits = [x for name, x in step.parts.items() if name.startswith("wait: all_reduce")]
    assert waits == pytest.approx([COLLECTIVE_S - 1e-3])


@pytest.mark.slow
@pytest.mark.parametrize(("chips", "num_sync"), [(1, 0), (4, 1)])
def test_replicas_add_up_all_gradients_at_once(chips, num_sync, tmp_path):
    pytest.importorskip("libtpu")
    work = scaling.Work(width=8, depths=(1, 1), size=32, rows=2)
    step = replay(scaling.program_text(work, "MirroredStrategy", chips, tmp_path))
    assert step.num_sync == num_sync
    assert step.compute_s > 0
