"""`Communication`: what a program sends, grouped, totalled, compared and locked."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
from jax.sharding import NamedSharding

from meshlayout import _checks, _render
from meshlayout.errors import CommunicationError
from meshlayout.hlo.collectives import KINDS, Collective, read_collectives
from meshlayout.hlo.leaves import Leaves
from meshlayout.hlo.program import Program, text_of
from meshlayout.mesh import Mesh


Key = Literal["kind", "axes", "module", "source", "in_loop", "is_async"]


@dataclass(frozen=True, eq=False)
class Communication(Mapping[str, int]):
    """The collectives of a program; a mapping from kind to how many there are.

    In the counts each is counted once, in a loop or not; in the bytes, as often as it
    runs. Text by `str` or `print`, a table in notebooks. Use `diff` to see what a
    change of the layouts changes here, and `to_lock` to hold it in a test.

    Attributes:
        collectives: Every one, in the program's order.

    Example:
        >>> import jax, meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> x = ml.arrays.ones((8, 64), mesh.layout("batch", "model"))
        >>> sent = read_communication(jax.jit(lambda x: x.sum(1)).lower(x).compile())
        >>> sent["all_reduce"], [*sent.by("axes")], sent.wire_bytes
        (1, ['model'], 24)
    """

    collectives: tuple[Collective, ...]

    @property
    def in_loops(self) -> "Communication":
        """Those inside a loop, such as a `scan` over layers or microbatches."""
        return Communication(tuple(x for x in self.collectives if x.in_loop))

    @property
    def wire_bytes(self) -> int:
        """Bytes that each device sends in one run of the program."""
        return sum(collective.wire_bytes for collective in self.collectives)

    def by(self, key: Key) -> "dict[str, Communication]":
        """Returns the collectives in groups, those that send most first.

        Args:
            key: `"kind"`, `"axes"`, `"module"`, `"source"`, `"in_loop"` or
                `"is_async"`, which is what those of a group have in common.

        Raises:
            CommunicationError: If the key is none of these.
        """
        _checks.choice("key", key, get_args(Key), error=CommunicationError)
        groups: dict[str, list[Collective]] = {}
        for collective in self.collectives:
            groups.setdefault(_text_of(collective, key), []).append(collective)
        sent = {name: Communication(tuple(group)) for name, group in groups.items()}
        return dict(sorted(sent.items(), key=lambda x: -x[1].wire_bytes))

    def __getitem__(self, kind: str) -> int:
        if kind not in KINDS:
            raise KeyError(kind)
        return sum(collective.kind == kind for collective in self.collectives)

    def __iter__(self) -> Iterator[str]:
        return iter(KINDS)

    def __len__(self) -> int:
        return len(KINDS)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Communication):
            return self.collectives == other.collectives
        return super().__eq__(other)  # a mapping of the same counts

    def __hash__(self) -> int:
        return hash(self.collectives)

    def __str__(self) -> str:
        if not self.collectives:
            return "The program has no collectives."
        return _render.text_table(_HEADERS, self._rows(), _ALIGN, self._notes())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _render.html_table(_HEADERS, self._rows(), _ALIGN, notes=self._notes())

    def _rows(self) -> list[list[str]]:
        counts = Counter(self.collectives)
        return [_cells(collective, count) for collective, count in counts.items()]

    def _total(self) -> str:
        count = len(self.collectives)
        ending = "s" * (count != 1)
        return f"{count} collective{ending}, {_render.bytes_text(self.wire_bytes)}"

    def _notes(self) -> list[str]:
        lines = [f"each device sends: {self._total()}"]
        for key in ("kind", "axes", "module"):
            groups = self.by(key)
            parts = (f"{name or 'none'} {x._total()}" for name, x in groups.items())
            if len(groups) > 1:
                lines.append(f"by {key}: {'; '.join(parts)}")
        if not all(x.times_known for x in self.collectives):
            lines.append(_UNKNOWN)
        return lines

    def diff(self, other: "Communication") -> "CommunicationDiff":
        """Compares with another program, such as that of other layouts.

        Args:
            other: What the other program sends.

        Returns:
            What only the other one sends, and what only this one.

        Raises:
            CommunicationError: If it is not a `Communication`.
        """
        if not isinstance(other, Communication):
            msg = f"diff takes a Communication, and got {_checks.shown(other)}."
            raise CommunicationError(msg)
        before = Counter(map(_essence, self.collectives))
        after = Counter(map(_essence, other.collectives))
        added, removed = _pick(other, after - before), _pick(self, before - after)
        return CommunicationDiff(added, removed, self, other)

    def to_lock(self) -> str:
        """Returns the collectives as stable text, one line for those that are alike.

        Commit the text next to a test that calls `check_lock` with it. Lines of source
        code are not in it, because they move.
        """
        counts = Counter(map(_essence, self.collectives))
        lines = [f"{count} x {line}" for line, count in sorted(counts.items())]
        total = f"# {self.wire_bytes} bytes sent by each device"
        return "\n".join([total, *lines]) + "\n"

    def check_lock(self, text: str) -> None:
        """Raises CommunicationError, with the lines that differ, if there are any.

        Args:
            text: What `to_lock` returned when the program was last reviewed.
        """
        fact = "the program does not send what is locked"
        _checks.lock(text, self.to_lock(), fact, error=CommunicationError)


@dataclass(frozen=True)
class CommunicationDiff:
    """What one program sends and another does not; text, or a table in notebooks.

    Attributes:
        added: Collectives that only the second program has.
        removed: Those that only the first one has.
        before: What the first program sends.
        after: What the second one sends.
    """

    added: tuple[Collective, ...]
    removed: tuple[Collective, ...]
    before: Communication
    after: Communication

    @property
    def wire_bytes(self) -> int:
        """Bytes that each device sends more in the second program than in the first."""
        return self.after.wire_bytes - self.before.wire_bytes

    def __str__(self) -> str:
        if not self.added and not self.removed:
            return "Both programs send the same."
        return _render.text_table(*self._table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        headers, rows, align, notes = self._table()
        return _render.html_table(headers, rows, align, notes=notes)

    def _table(self) -> tuple[list[str], list[list[str]], str, list[str]]:
        rows = [
            [sign, *_cells(collective, count)]
            for sign, part in (("+", self.added), ("-", self.removed))
            for collective, count in Counter(part).items()
        ]
        sent = map(_render.bytes_text, (self.before.wire_bytes, self.after.wire_bytes))
        notes = [f"each device sends: {' -> '.join(sent)}"]
        return ["", *_HEADERS], rows, "l" + _ALIGN, notes


_HEADERS = ["collective", "axes", "arrays", "sent", "times", "for", "source"]
_ALIGN = "lllrrll"
_UNKNOWN = (
    "? marks loops of unknown length, counted as one iteration, and branches, counted "
    "as taken"
)


def read_communication(
    program: Any,
    mesh: Mesh | None = None,
    *,
    arguments: Mapping[str, str] | None = None,
    results: Sequence[str] = (),
) -> Communication:
    """Reads the collectives of a compiled program, for CPUs, GPUs or TPUs.

    A compiled step has this as its `communication`. With JAX's persistent compilation
    cache, source lines and scopes are those of the run that filled it.

    Args:
        program: What `jax.jit(...).lower(...).compile()` returns, for devices that are
            here or described ones; or the text of an optimized program.
        mesh: The mesh it runs on; if None, that of its arguments and results.
        arguments: Better names of arguments, from what `hlo.leaf_name` makes of JAX's.
        results: Names of the program's first results, to know gradients by; those of
            one leaf end alike.

    Raises:
        CommunicationError: If it is not a compiled program.
    """
    text = text_of("read_communication", program)
    if mesh is not None and not isinstance(mesh, Mesh):
        msg = f"mesh must be a Mesh, got {_checks.shown(mesh)}."
        raise CommunicationError(msg)
    parsed = Program(text)
    leaves = Leaves(parsed, arguments or {}, results)
    found = read_collectives(parsed, mesh or _mesh_of(program), leaves)
    return Communication(tuple(found))


def _mesh_of(program: Any) -> Mesh | None:
    """Returns the mesh of a program's arguments or results: the most detailed one."""
    shardings: list[Any] = []
    for name in ("input_shardings", "output_shardings"):
        shardings += jax.tree.leaves(getattr(program, name, ()))
    meshes = {x.mesh: None for x in shardings if isinstance(x, NamedSharding)}
    whole = [x for x in meshes if isinstance(x, jax.sharding.Mesh)]
    most = max(whole, key=lambda x: sum(n > 1 for n in x.shape.values()), default=None)
    return None if most is None else Mesh(most)


def _text_of(collective: Collective, key: str) -> str:
    if key != "axes":
        return str(getattr(collective, key))
    if collective.axes is None:
        return f"groups of {collective.num_devices}"
    names = ", ".join(collective.axes) or "none"
    return names if collective.whole_axes else f"{names} (in part)"


def _cells(collective: Collective, count: int) -> list[str]:
    way = "async " * collective.is_async
    return [
        f"{count} x {collective.kind}" if count > 1 else collective.kind,
        _text_of(collective, "axes"),
        arrays_text(collective.arrays, at_most=4),
        _render.bytes_text(collective.wire_bytes * count),
        f"{way}{collective.times}{'?' * (not collective.times_known)}",
        _purpose(collective),
        collective.source,
    ]


def _purpose(collective: Collective) -> str:
    """Returns the leaves, or the submodule and the operation, that it serves."""
    if collective.leaves:
        more = f", ... ({len(collective.leaves) - 2} more)" * (
            len(collective.leaves) > 2
        )
        return ", ".join(collective.leaves[:2]) + more
    *_, operation = collective.op_name.replace(")", "/").rpartition("/")
    backward = " (backward)" * ("transpose(" in collective.op_name)
    return f"{'/'.join(filter(None, (collective.module, operation)))}{backward}".strip()


def arrays_text(arrays: tuple[str, ...], at_most: int | None = None) -> str:
    """Returns arrays as text, those that are alike once.

    Example:
        >>> arrays_text(("f32[8]", "f32[8]", "f32[2, 3]"))
        '2 x f32[8], f32[2, 3]'
    """
    counts = Counter(arrays)
    parts = [f"{n} x {text}" if n > 1 else text for text, n in counts.items()]
    more = len(parts) - at_most if at_most and len(parts) > at_most else 0
    ending = f", ... ({more} more)" * bool(more)
    return ", ".join(parts[:at_most] if more else parts) + ending


def _essence(collective: Collective) -> str:
    """Returns a collective as a line that stays the same where source code moves."""
    times = f"{collective.times}{'?' * (not collective.times_known)}"
    purpose = ", ".join(collective.leaves) or collective.module
    return (
        f"{collective.kind} over {_text_of(collective, 'axes')}: "
        f"{arrays_text(collective.arrays)}, {collective.wire_bytes} bytes sent, "
        f"times {times}{', asynchronous' * collective.is_async}"
        f"{', for ' * bool(purpose)}{purpose}"
    )


def _pick(sent: Communication, counts: Counter[str]) -> tuple[Collective, ...]:
    """Returns collectives with these texts, as many of each as are counted."""
    left = counts.copy()
    picked: list[Collective] = []
    for collective in sent.collectives:
        line = _essence(collective)
        if left[line] > 0:
            left[line] -= 1
            picked.append(collective)
    return tuple(picked)
