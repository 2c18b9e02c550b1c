"""`Communication`: what a program sends, grouped, totaled, compared and locked."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from meshlayout import _checks, _render
from meshlayout.errors import CommunicationError
from meshlayout.hlo.collectives import KINDS, Collective, read_collectives
from meshlayout.hlo.origins import Origins
from meshlayout.hlo.program import Program
from meshlayout.mesh import Mesh, as_mesh


@dataclass(frozen=True)
class Communication(Mapping[str, int]):
    """The collectives of a program; also a mapping from each kind to its count.

    A collective in a loop counts once, its bytes in every run. `print` shows a table.

    Attributes:
        collectives: All of them, in the program's order.

    Examples:
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
        """The collectives in loops, such as a `scan` over layers or microbatches."""
        return Communication(tuple(x for x in self.collectives if x.in_loop))

    @property
    def wire_bytes(self) -> int:
        """Bytes that each device sends in one run of the program."""
        return sum(collective.wire_bytes for collective in self.collectives)

    def by(
        self, key: Literal["kind", "axes", "module", "source", "in_loop", "is_async"]
    ) -> "dict[str, Communication]":
        """Returns groups with the same attribute, those that send the most first."""
        groups: dict[str, list[Collective]] = {}
        for x in self.collectives:
            text = _axes_text(x) if key == "axes" else str(getattr(x, key))
            groups.setdefault(text, []).append(x)
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

    def __str__(self) -> str:
        if not self.collectives:
            return "The program has no collectives."
        rows = _rows(self.collectives)
        return _render.text_table(_HEADERS, rows, _ALIGN, self._notes())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = _rows(self.collectives)
        return _render.html_table(_HEADERS, rows, _ALIGN, notes=self._notes())

    def _total(self) -> str:
        noun = f"collective{'s' * (len(self.collectives) != 1)}"
        return f"{len(self.collectives)} {noun}, {_render.bytes_text(self.wire_bytes)}"

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

    def diff(self, other: "Communication") -> str:
        """Returns as text how another program differs, such as with other layouts."""
        before, after = Counter(self.collectives), Counter(other.collectives)
        rows = [["+", *row] for row in _rows((after - before).elements())]
        rows += [["-", *row] for row in _rows((before - after).elements())]
        if not rows:
            return "Both programs send the same."
        sent = (_render.bytes_text(x.wire_bytes) for x in (self, other))
        notes = [f"each device sends: {' -> '.join(sent)}"]
        return _render.text_table(["", *_HEADERS], rows, "l" + _ALIGN, notes)

    def to_lock(self) -> str:
        """Returns the collectives as text for `check_lock`, without lines of code."""
        counts = Counter(map(_lock_line, self.collectives))
        lines = [f"{count} x {line}" for line, count in sorted(counts.items())]
        total = f"# {self.wire_bytes} bytes sent by each device"
        return "\n".join([total, *lines]) + "\n"

    def check_lock(self, text: str) -> None:
        """Raises CommunicationError if it differs from an earlier `to_lock`."""
        fact = "the program does not send what is locked"
        _checks.lock(text, self.to_lock(), fact, error=CommunicationError)


@_checks.user_call
def read_communication(
    program: Any,
    mesh: Mesh | jax.sharding.Mesh | None = None,
    *,
    arguments: Mapping[str, str] | None = None,
    results: Sequence[str] = (),
) -> Communication:
    """Reads the collectives of a compiled program, for CPUs, GPUs or TPUs.

    With JAX's persistent compilation cache, source lines are from the run that filled
    it. TPU programs of jax 0.7 have one line for an operation, which may be Flax's.

    Args:
        program: What `jax.jit(...).lower(...).compile()` returns, or its text.
        mesh: The mesh it runs on; if None, that of its arguments and results.
        arguments: Names to show for arguments, by JAX's names as paths: `"state/w"`.
        results: Names of its first results, for gradients; those of a leaf end alike.

    Raises:
        CommunicationError: If it is not a compiled program.
    """
    text = program.as_text() if hasattr(program, "as_text") else program
    if not isinstance(text, str) or not text.startswith("HloModule "):
        expected = "a compiled program or its text, which begins with HloModule"
        msg = f"read_communication takes {expected}, got {_checks.shown(program)}."
        raise CommunicationError(msg)
    if mesh is None:
        names = ("input_shardings", "output_shardings")
        shardings = jax.tree.leaves([getattr(program, name, ()) for name in names])
        meshes = [getattr(sharding, "mesh", None) for sharding in shardings]
        whole = [x for x in meshes if isinstance(x, jax.sharding.Mesh)]
        # The largest: a mesh of one device may be among them.
        mesh = max(whole, key=lambda x: sum(n > 1 for n in x.axis_sizes), default=None)
    parsed = Program(text)
    origins = Origins(parsed, arguments or {}, results)
    known = None if mesh is None else as_mesh(mesh)
    return Communication(tuple(read_collectives(parsed, known, origins)))


_HEADERS = ["collective", "axes", "arrays", "sent", "times", "for", "source"]
_ALIGN = "lllrrll"
_UNKNOWN = "? marks loops of unknown length, counted once, and branches, as if taken"


def _rows(collectives: Iterable[Collective]) -> list[list[str]]:
    """Returns the cells of a table, one row for those that are alike."""
    return [
        [
            f"{count} x {x.kind}" if count > 1 else x.kind,
            _axes_text(x),
            _listed(_counted(x.arrays), 4),
            _render.bytes_text(x.wire_bytes * count),
            f"{'async ' * x.is_async}{_times_text(x)}",
            _purpose(x),
            x.source,
        ]
        for x, count in Counter(collectives).items()
    ]


def _lock_line(x: Collective) -> str:
    purpose = ", ".join(x.leaves) or x.module
    return (
        f"{x.kind} over {_axes_text(x)}: {', '.join(_counted(x.arrays))}, "
        f"{x.wire_bytes} bytes sent, times {_times_text(x)}"
        f"{', asynchronous' * x.is_async}{', for ' * bool(purpose)}{purpose}"
    )


def _axes_text(x: Collective) -> str:
    if x.axes is None:
        return f"groups of {x.num_devices}"
    return (", ".join(x.axes) or "none") + " (in part)" * (not x.whole_axes)


def _times_text(x: Collective) -> str:
    return f"{x.times}{'?' * (not x.times_known)}"


def _purpose(x: Collective) -> str:
    """Returns the leaves, or the submodule and operation, that it serves."""
    if x.leaves:
        return _listed(x.leaves, 2)
    *_, operation = x.op_name.replace(")", "/").rpartition("/")
    backward = " (backward)" * ("transpose(" in x.op_name)
    operation *= not operation.startswith("psum")  # as the collective's name says
    return f"{'/'.join(filter(None, (x.module, operation)))}{backward}".strip()


def _counted(arrays: Iterable[str]) -> list[str]:
    counts = Counter(arrays).items()
    return [f"{count} x {text}" if count > 1 else text for text, count in counts]


def _listed(texts: Sequence[str], at_most: int) -> str:
    more = len(texts) - at_most
    return ", ".join(texts[:at_most]) + f", ... ({more} more)" * (more > 0)
