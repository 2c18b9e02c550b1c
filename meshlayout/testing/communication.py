"""`expect_communication`: the collectives of a compiled program."""

from collections.abc import Mapping
from typing import Any

from meshlayout import _checks
from meshlayout.errors import did_you_mean
from meshlayout.hlo import KINDS, Communication, read_communication
from meshlayout.step import compile_step
from meshlayout.step.inspection import StepInspection
from meshlayout.testing.expectations import VerificationError


def expect_communication(
    program: Any,
    *args: Any,
    only: bool = False,
    in_loops: Mapping[str, int] | None = None,
    max_wire_bytes: int | None = None,
    **counts: int,
) -> Communication:
    """Checks how many collectives of each kind a compiled program has, and their bytes.

    Returns them. To hold every one as it is, commit what its `to_lock` returns, and
    call its `check_lock` with that.

    Args:
        program: A compiled step, anything that `jax.jit` returned, or a plain function
            `(state, batch, ...) -> (state, aux)`; or what its `lower` or `compile`
            returned.
        *args: The step's arguments; nothing is run or donated.
        only: Whether kinds that are not named must be absent.
        in_loops: Counts of those inside a loop, by kind.
        max_wire_bytes: The most bytes that each device may send in one run, loops
            counted in full (once, if their length is unknown).
        **counts: Counts by kind: `all_reduce`, `all_gather`, `reduce_scatter`,
            `all_to_all`, `collective_permute`, `ragged_all_to_all`,
            `collective_broadcast`. A collective in a loop counts once.

    Raises:
        VerificationError: If a count differs, or more is sent; every collective is
            listed.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 8})
        >>> @ml.compile_step
        ... def step(state, batch):
        ...     return state, (state * batch).sum()
        >>> batch = ml.arrays.ones(8, mesh.layout("batch"))
        >>> found = expect_communication(
        ...     step, ml.arrays.ones((), mesh.layout()), batch, all_reduce=1, only=True
        ... )
        >>> found["all_reduce"], found.in_loops["all_reduce"]
        (1, 0)
    """
    expected = [(kind, "", count) for kind, count in counts.items()]
    expected += [(kind, " in loops", count) for kind, count in (in_loops or {}).items()]
    for kind, _, count in expected:
        if kind not in KINDS:
            msg = (
                f"{kind!r} is not a kind of collective; the kinds are "
                f"{', '.join(KINDS)}.{did_you_mean(kind, KINDS)}"
            )
            raise VerificationError(msg)
        _checks.count(kind, count, at_least=0, error=VerificationError)
    if only:
        expected += [(kind, "", 0) for kind in KINDS if kind not in counts]
    sent = _sent_by(program, args)
    wrong = [
        f"{actual[kind]} {kind}{where} where {count} was expected"
        for kind, where, count in expected
        if (actual := sent.in_loops if where else sent)[kind] != count
    ]
    if max_wire_bytes is not None and sent.wire_bytes > max_wire_bytes:
        wrong.append(
            f"{sent.wire_bytes} bytes of collectives sent by each device where at most "
            f"{max_wire_bytes} were expected"
        )
    if wrong:
        name = getattr(program, "__name__", "the program")
        raise VerificationError(f"{name} has {', and '.join(wrong)}.\n{sent}")
    return sent


def _sent_by(program: Any, args: tuple[Any, ...]) -> Communication:
    """Compiles a program, unless it is compiled already, and reads it."""
    is_lowered = hasattr(program, "as_text")
    if not callable(program) and (not is_lowered or args):
        msg = (
            "expect_communication takes a step with its arguments, or alone what "
            f"lowering or compiling it returned, got {_checks.shown(program)} with "
            f"{len(args)} arguments."
        )
        raise VerificationError(msg)
    step: Any = program
    if not is_lowered and not hasattr(program, "lower"):
        step = compile_step(program)
    if isinstance(step, StepInspection):
        return step.communication(*args)
    lowered = step if is_lowered else step.lower(*args)
    is_compiled = not hasattr(lowered, "compile")
    return read_communication(lowered if is_compiled else lowered.compile())
