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
    max_wire_bytes: int | Mapping[str, int] | None = None,
    **counts: int,
) -> Communication:
    """Checks how many collectives of each kind a compiled program has, and their bytes.

    To hold every collective as it is, commit what `to_lock` returns and call
    `check_lock` of the result with it.

    Args:
        program: A compiled step, or anything that `jax.jit` returned, to be compiled
            for `args`; what its `lower`, or `lower` and `compile`, returned; or a
            plain function `(state, batch, ...) -> (state, aux)`.
        *args: The step's arguments; nothing is run or donated.
        only: Whether kinds that are not named must be absent.
        in_loops: Counts of those inside a loop, by kind; a gradient's all-reduce in
            the scan over microbatches is one.
        max_wire_bytes: The most bytes that each device may send in one run, loops
            counted in full: of all kinds together, or a dict from kind to bytes. A loop
            whose length is unknown counts as one iteration.
        **counts: Counts by kind: `all_reduce`, `all_gather`, `reduce_scatter`,
            `all_to_all`, `collective_permute`, `ragged_all_to_all`,
            `collective_broadcast`. A collective in a loop counts once.

    Returns:
        The collectives of the program.

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
    if in_loops is not None and not isinstance(in_loops, Mapping):
        msg = (
            "in_loops takes a dict from kinds of collectives to counts, and got "
            f"{_checks.shown(in_loops)}."
        )
        raise VerificationError(msg)
    expected, expected_in_loops = _by_kind(counts), _by_kind(in_loops or {})
    if isinstance(max_wire_bytes, Mapping):
        budgets = _by_kind(max_wire_bytes)
    elif max_wire_bytes is not None:
        budgets = {"": _checks.count("max_wire_bytes", max_wire_bytes, **_BYTES)}
    else:
        budgets = {}
    if only:
        expected = dict.fromkeys(KINDS, 0) | expected
    sent = _sent_by(program, args)
    wrong = [
        *_unlike(sent, expected, ""),
        *_unlike(sent.in_loops, expected_in_loops, " in loops"),
        *_over(sent, budgets),
    ]
    if wrong:
        name = getattr(program, "__name__", "the program")
        raise VerificationError(f"{name} has {', and '.join(wrong)}.\n{sent}")
    return sent


_BYTES: Any = {"at_least": 0, "error": VerificationError}


def _by_kind(numbers: Mapping[str, int]) -> dict[str, int]:
    """Returns counts or bytes by kind, checked."""
    for kind in numbers:
        if kind not in KINDS:
            msg = (
                f"{kind!r} is not a kind of collective; the kinds are "
                f"{', '.join(KINDS)}.{did_you_mean(kind, KINDS)}"
            )
            raise VerificationError(msg)
    return {kind: _checks.count(kind, n, **_BYTES) for kind, n in numbers.items()}


def _unlike(sent: Communication, expected: Mapping[str, int], where: str) -> list[str]:
    return [
        f"{sent[kind]} {kind}{where} where {count} was expected"
        for kind, count in expected.items()
        if sent[kind] != count
    ]


def _over(sent: Communication, budgets: Mapping[str, int]) -> list[str]:
    by_kind = {"": sent, **sent.by("kind")}
    return [
        f"{by_kind[kind].wire_bytes} bytes of {kind or 'collectives'} sent by each "
        f"device where at most {budget} were expected"
        for kind, budget in budgets.items()
        if kind in by_kind and by_kind[kind].wire_bytes > budget
    ]


def _sent_by(program: Any, args: tuple[Any, ...]) -> Communication:
    """Compiles a program, unless it is compiled already, and reads it."""
    has_text = hasattr(program, "as_text")
    if has_text and args:
        msg = (
            f"a {type(program).__name__} program is made for its arguments already; "
            f"leave out the {len(args)} that were given."
        )
        raise VerificationError(msg)
    if not has_text and not callable(program):
        msg = (
            "expect_communication takes a step with its arguments, or what lowering or "
            f"compiling it returned, got {program!r} of type "
            f"{type(program).__name__}."
        )
        raise VerificationError(msg)
    is_step = has_text or hasattr(program, "lower")
    step: Any = program if is_step else compile_step(program)
    if isinstance(step, StepInspection):
        return step.communication(*args)
    lowered = step if has_text else step.lower(*args)
    is_lowered = hasattr(lowered, "compile")
    return read_communication(lowered.compile() if is_lowered else lowered)
