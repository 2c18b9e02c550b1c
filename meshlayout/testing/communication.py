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
        return Communication(tuple(one for one in self.collectives if one.in_loop))

    def __getitem__(self, kind: str) -> int:
        if kind not in KINDS:
            raise KeyError(kind)
        return sum(one.kind == kind for one in self.collectives)

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
                one.kind,
                _arrays_text(one.arrays),
                _render.bytes_text(one.nbytes),
                "yes" if one.in_loop else "no",
                one.op_name,
            ]
            for one in self.collectives
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
        _check_count(kind, count)
    if only:
        expected = dict.fromkeys(KINDS, 0) | expected
    found = Communication(tuple(_collectives(_compiled_text(program, args))))
    wrong = [
        *_unlike(found, expected, ""),
        *_unlike(found.in_loops, expected_in_loops, " in loops"),
    ]
    if wrong:
        name = getattr(program, "__name__", "the program")
        raise VerificationError(f"{name} has {', and '.join(wrong)}.\n{found}")
    return found


def _unlike(found: Communication, expected: Mapping[str, int], where: str) -> list[str]:
    return [
        f"{found[kind]} {kind}{where} where {count} was expected"
        for kind, count in expected.items()
        if found[kind] != count
    ]


def _check_count(kind: str, count: Any) -> None:
    if kind not in KINDS:
        msg = (
            f"{kind!r} is not a kind of collective; the kinds are {', '.join(KINDS)}."
            f"{did_you_mean(kind, KINDS)}"
        )
        raise VerificationError(msg)
    _checks.count(kind, count, at_least=0, error=VerificationError)


def _compiled_text(program: Any, args: tuple[Any, ...]) -> str:
    """Compiles a program, unless it is compiled already, and returns its text."""
    is_made = hasattr(program, "as_text")
    if is_made and args:
        msg = (
            f"a {type(program).__name__} program is made for its arguments already; "
            f"leave out the {len(args)} that were given."
        )
        raise VerificationError(msg)
    if not is_made and not callable(program):
        msg = (
            "expect_communication takes a step with its arguments, or what lowering or "
            f"compiling it returned, and got {program!r} of type "
            f"{type(program).__name__}."
        )
        raise VerificationError(msg)
    made: Any = program
    if not is_made:
        step: Any = program if hasattr(program, "lower") else compile_step(program)
        made = step.lower(*args)
    compiled = made.compile() if hasattr(made, "compile") else made
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
_SCATTER = "reduce_scatter"
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
            arrays = _ARRAY.findall(_result_type(match))
            op_name = _OP_NAME.search(line)
            yield Collective(
                _SCATTER if _is_scatter(name) else match["kind"].replace("-", "_"),
                tuple(f"{dtype}[{', '.join(_sizes(dims))}]" for dtype, dims in arrays),
                sum(_nbytes(dtype, dims) for dtype, dims in arrays),
                name in looped,
                op_name[1] if op_name else "",
            )


def _is_scatter(computation: str) -> bool:
    """Returns whether it is a TPU's reduce-scatter: a fusion around an all-reduce."""
    return computation.startswith("all-reduce-scatter")


def _computations(text: str) -> dict[str, list[str]]:
    """Returns the lines of every computation of a program, by name."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        head = None if line.startswith((" ", "HloModule")) else _COMPUTATION.match(line)
        if head:
            lines = found.setdefault(head[1], [])
        else:
            lines.append(line)
    return found


def _in_loops(computations: Mapping[str, list[str]]) -> set[str]:
    """Returns the computations that loops call, and all that those call."""
    called: dict[str, set[str]] = {}
    todo: list[str] = []
    for name, lines in computations.items():
        for line in lines:
            names = {
                one.lstrip("% ")
                for _, group in _CALLED.findall(line)
                for one in group.strip("{}").split(",")
            }
            called.setdefault(name, set()).update(names)
            if _LOOP.search(line):
                todo.extend(names)
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo.extend(called.get(name, ()))
    return found


def _result_type(match: re.Match[str]) -> str:
    """Returns the type of a collective's result.

    The result of a `-start` operation includes its operands, except for all-reduce.
    """
    text = match["type"]
    if not match["start"] or match["kind"] == "all-reduce":
        return text
    parts = _parts(text)
    return parts[1] if len(parts) > 1 else text


def _parts(text: str) -> list[str]:
    """Returns the elements of a tuple type."""
    parts, depth, begin = [], 0, 1
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if (char == "," and depth == 1) or (char == ")" and depth == 0):
            parts.append(text[begin:at])
            begin = at + 1
    return parts


def _sizes(dims: str) -> list[str]:
    return [dim.removeprefix("<=") for dim in dims.split(",") if dim]


def _nbytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(*re.findall(r"\d+", dtype)[:1] or [0])
    return math.ceil(math.prod(map(int, _sizes(dims))) * bits / 8)
