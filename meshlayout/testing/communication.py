"""`expect_communication`: the collectives of a compiled program."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshlayout import _checks, _render
from meshlayout.errors import did_you_mean
from meshlayout.step import compile_step
from meshlayout.testing.expectations import VerificationError


KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
    "ragged_all_to_all",
    "collective_broadcast",
)


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
        kind: Its kind, such as `"all_reduce"`.
        arrays: Its results on each device, such as `("f32[512, 10]",)`.
        nbytes: Bytes of the results on each device.
        in_loop: Whether it is inside a loop, and so may run many times.
        op_name: JAX's name of the operation in the user's code.
    """

    kind: str
    arrays: tuple[str, ...]
    nbytes: int
    in_loop: bool
    op_name: str


@dataclass(frozen=True, eq=False)
class Communication(Mapping[str, int]):
    """How many collectives of each kind a program has; a mapping from kind to count.

    Each is counted once, in a loop or not. Text by `str` or `print`, a table in
    notebooks.

    Attributes:
        collectives: Every one, in the program's order.
    """

    collectives: tuple[Collective, ...]

    @property
    def in_loops(self) -> "Communication":
        """Those inside a loop, such as a `scan` over layers or microbatches."""
        return Communication(tuple(x for x in self.collectives if x.in_loop))

    def __getitem__(self, kind: str) -> int:
        if kind not in KINDS:
            raise KeyError(kind)
        return sum(collective.kind == kind for collective in self.collectives)

    def __iter__(self) -> Iterator[str]:
        return iter(KINDS)

    def __len__(self) -> int:
        return len(KINDS)

    def __str__(self) -> str:
        if not self.collectives:
            return "The program has no collectives."
        return _render.text_table(_HEADERS, self._rows(), _ALIGN)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _render.html_table(_HEADERS, self._rows(), _ALIGN)

    def _rows(self) -> list[list[str]]:
        return [
            [
                collective.kind,
                _arrays_text(collective.arrays),
                _render.bytes_text(collective.nbytes),
                "yes" if collective.in_loop else "no",
                collective.op_name,
            ]
            for collective in self.collectives
        ]


def _arrays_text(arrays: tuple[str, ...]) -> str:
    counts = Counter(arrays)
    parts = [f"{n} x {text}" if n > 1 else text for text, n in counts.items()]
    more = f", ... ({len(parts) - 4} more)" * (len(parts) > 4)
    return ", ".join(parts[:4]) + more


_HEADERS = ["collective", "array", "bytes", "in a loop", "operation"]
_ALIGN = "llrll"


def expect_communication(
    program: Any,
    *args: Any,
    only: bool = False,
    in_loops: Mapping[str, int] | None = None,
    **counts: int,
) -> Communication:
    """Checks how many collectives of each kind a compiled program has.

    Args:
        program: A compiled step, or anything that `jax.jit` returned, to be compiled
            for `args`; what its `lower`, or `lower` and `compile`, returned; or a
            plain function `(state, batch, ...) -> (state, aux)`.
        *args: The step's arguments; nothing is run or donated.
        only: Whether kinds that are not named must be absent.
        in_loops: Counts of those inside a loop, by kind; a gradient's all-reduce in
            the scan over microbatches is one.
        **counts: Counts by kind: `all_reduce`, `all_gather`, `reduce_scatter`,
            `all_to_all`, `collective_permute`, `ragged_all_to_all`,
            `collective_broadcast`. A collective in a loop counts once.

    Returns:
        The collectives of the program.

    Raises:
        VerificationError: If a count differs; every collective is listed.

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
    expected, expected_in_loops = dict(counts), dict(in_loops or {})
    for kind, count in (*expected.items(), *expected_in_loops.items()):
        if kind not in KINDS:
            msg = (
                f"{kind!r} is not a kind of collective; the kinds are "
                f"{', '.join(KINDS)}.{did_you_mean(kind, KINDS)}"
            )
            raise VerificationError(msg)
        _checks.count(kind, count, at_least=0, error=VerificationError)
    if only:
        expected = dict.fromkeys(KINDS, 0) | expected
    sent = Communication(tuple(_collectives(_compiled_text(program, args))))
    wrong = [
        *_unlike(sent, expected, ""),
        *_unlike(sent.in_loops, expected_in_loops, " in loops"),
    ]
    if wrong:
        name = getattr(program, "__name__", "the program")
        raise VerificationError(f"{name} has {', and '.join(wrong)}.\n{sent}")
    return sent


def _unlike(sent: Communication, expected: Mapping[str, int], where: str) -> list[str]:
    return [
        f"{sent[kind]} {kind}{where} where {count} was expected"
        for kind, count in expected.items()
        if sent[kind] != count
    ]


def _compiled_text(program: Any, args: tuple[Any, ...]) -> str:
    """Compiles a program, unless it is compiled already, and returns its text."""
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
            f"compiling it returned, and got {program!r} of type "
            f"{type(program).__name__}."
        )
        raise VerificationError(msg)
    lowered: Any = program
    if not has_text:
        step: Any = program if hasattr(program, "lower") else compile_step(program)
        lowered = step.lower(*args)
    compiled = lowered.compile() if hasattr(lowered, "compile") else lowered
    return compiled.as_text() or ""


# Reading the program's text.

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([^\s(=]+) .*\{\s*$")
_OPERATION = re.compile(
    r"^\s+(?:ROOT )?\S+ = (?P<type>.*?) (?P<kind>"
    + "|".join(kind.replace("_", "-") for kind in KINDS)
    + r")(?P<start>-start)?\("
)
_CALLED = re.compile(
    r"\b(to_apply|calls|body|condition|true_computation|false_computation|"
    r"branch_computations|called_computations)=(\{[^}]*\}|[^\s,)}]+)"
)
_LOOP = re.compile(r" while\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_IN_FUSION = re.compile("async_collective|fused_computation")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


def _collectives(text: str) -> Iterator[Collective]:
    computations = _computations(text)
    looped = _in_loops(computations)
    # On TPUs an asynchronous collective spans several fusions with the same channel.
    channels: set[str] = set()
    for name, lines in computations.items():
        for line in lines:
            match = _OPERATION.match(line)
            if match is None:
                continue
            channel = _CHANNEL.search(line) if _IN_FUSION.match(name) else None
            if channel and channel[1] in channels:
                continue
            channels.update(channel.groups() if channel else ())
            arrays = _results(match)
            op_name = _OP_NAME.search(line)
            # A TPU's reduce-scatter is a fusion around an all-reduce.
            is_scatter = name.startswith("all-reduce-scatter")
            yield Collective(
                "reduce_scatter" if is_scatter else match["kind"].replace("-", "_"),
                tuple(f"{dtype}[{', '.join(_sizes(dims))}]" for dtype, dims in arrays),
                sum(_nbytes(dtype, dims) for dtype, dims in arrays),
                name in looped,
                op_name[1] if op_name else "",
            )


def _computations(text: str) -> dict[str, list[str]]:
    """Returns the lines of every computation of a program, by name."""
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        head = None if line.startswith((" ", "HloModule")) else _COMPUTATION.match(line)
        if head:
            lines = computations.setdefault(head[1], [])
        else:
            lines.append(line)
    return computations


def _in_loops(computations: Mapping[str, list[str]]) -> set[str]:
    """Returns the computations that loops call, and all that those call."""
    called: dict[str, set[str]] = {}
    todo: list[str] = []
    for name, lines in computations.items():
        for line in lines:
            groups = (group for _, group in _CALLED.findall(line))
            names = {x.lstrip("% ") for g in groups for x in g.strip("{}").split(",")}
            called.setdefault(name, set()).update(names)
            if _LOOP.search(line):
                todo.extend(names)
    looped: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in looped:
            looped.add(name)
            todo.extend(called.get(name, ()))
    return looped


def _results(match: re.Match[str]) -> list[tuple[str, str]]:
    """Returns the dtypes and dims of a collective's results.

    The type of a `-start` operation holds its operands first, except for all-reduce,
    and perhaps two numbers of its context last.
    """
    arrays = _ARRAY.findall(match["type"])
    if not match["start"] or match["kind"] == "all-reduce":
        return arrays
    while len(arrays) > 2 and arrays[-1] == ("u32", ""):
        arrays.pop()
    return arrays[len(arrays) // 2 :]


def _sizes(dims: str) -> list[str]:
    return [dim.removeprefix("<=") for dim in dims.split(",") if dim]


def _nbytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(*re.findall(r"\d+", dtype)[:1] or [0])
    return math.ceil(math.prod(map(int, _sizes(dims))) * bits / 8)
