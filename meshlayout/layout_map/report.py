"""The decision for each leaf, as plain values; the report and the lock text of a tree.

A map says where arrays should be. Existing arrays may be elsewhere: a parameter placed
by its own metadata loses that metadata once it is a plain array. So the report, its
bytes and the lock show where concrete arrays are, and note each one that this map would
place differently. `Resolved.layouts` has the layouts of the map.
"""

import difflib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jax.typing import DTypeLike

from meshlayout import _checks, _jax, _render
from meshlayout._annotations import PyTree
from meshlayout.errors import LayoutMapError, did_you_mean
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Resolution:
    """The layout of one leaf, and why.

    Attributes:
        path: The path of the leaf.
        shape: Its global shape.
        dtype: Its dtype.
        layout: The layout that the map gives it.
        rule: The pattern that decided, as the user wrote it, or None.
        reason: The reason for this layout, as a phrase.
        fallback: The part of the rule that could not be followed, such as a dim that
            does not divide, or None.
        note: The note of the rule, or a disagreement that is not an error, or None.
        placed: The layout of a concrete array on the mesh of the map, if it differs
            from `layout`; else None.
        is_array: False for a Python number, which `create` leaves unchanged.
    """

    path: str
    shape: tuple[int, ...]
    dtype: DTypeLike
    layout: Layout
    rule: str | None
    reason: str
    fallback: str | None = None
    note: str | None = None
    placed: Layout | None = None
    is_array: bool = True

    @property
    def current_layout(self) -> Layout:
        """The layout of a concrete array, or else the layout that the map gives."""
        return self.placed or self.layout

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf: what each device would hold if replicated."""
        return math.prod(self.shape) * _jax.itemsize(self.dtype) if self.is_array else 0

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the leaf on each device, in its current layout."""
        shards = map(self.current_layout.num_shards, range(len(self.shape)))
        return self.nbytes // math.prod(shards)

    @property
    def array(self) -> str:
        """The dtype and shape of the leaf, such as `f32[784, 128]`."""
        if not self.is_array:
            return "(not an array)"
        return _render.array_text(self.dtype, self.shape)


@dataclass(frozen=True)
class Resolved:
    """The layouts of a whole tree.

    Unpacks as `layouts, resolutions = layout_map.resolve(tree)`.

    Attributes:
        layouts: A tree with the structure of the resolved one and a `Layout` for every
            leaf (None for leaves that are neither arrays nor numbers).
        resolutions: One `Resolution` per array or number, in the tree's order.
    """

    layouts: PyTree
    resolutions: tuple[Resolution, ...]

    def __iter__(self) -> Iterator[PyTree]:
        yield self.layouts
        yield self.resolutions

    def __getitem__(self, path: str) -> Resolution:
        """Returns the resolution of the leaf with this path.

        Raises:
            LayoutMapError: If no leaf has this path.
        """
        for resolution in self.resolutions:
            if resolution.path == path:
                return resolution
        paths = [resolution.path for resolution in self.resolutions]
        msg = f"no leaf has the path {path!r}.{did_you_mean(path, paths)}"
        raise LayoutMapError(msg)

    @property
    def bytes_per_device(self) -> int:
        """Bytes on each device, all leaves together."""
        return sum(resolution.bytes_per_device for resolution in self.resolutions)

    @property
    def nbytes(self) -> int:
        """Bytes on each device if everything were replicated."""
        return sum(resolution.nbytes for resolution in self.resolutions)

    def to_lock(self) -> str:
        """Returns the layout of every array as stable text, one line each, by path.

        Use this to notice changes in review: commit the text next to a test that calls
        `check_lock` with it. Concrete arrays are written with their current layouts.
        """
        arrays = [leaf for leaf in self.resolutions if leaf.is_array]
        meshes = ", ".join(
            sorted({f"Mesh({leaf.layout.mesh._axes_text()})" for leaf in arrays})
        )
        lines = [f"{leaf.path}: {leaf.array} {leaf.current_layout}" for leaf in arrays]
        return "\n".join([f"# layouts on {meshes}", *sorted(lines)]) + "\n"

    def check_lock(self, text: str) -> None:
        """Raises LayoutMapError, with the lines that differ, if layouts changed.

        Args:
            text: The result of `to_lock` when the layouts were last reviewed.
        """
        fact = "the layouts are not the locked ones"
        _checks.lock(text, self.to_lock(), fact, error=LayoutMapError)


# A replicated leaf gets a line if it is at least this share of the whole tree.
_LARGE_SHARE = 0.01
_LARGE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Explanation:
    """How a layout map applies to a tree; text by `str` or `print`, HTML in notebooks.

    A row of the table stands for all leaves that differ only in the numbers in their
    paths, as those of the layers of a model do; rows of one rule stand together.

    Attributes:
        mesh: The mesh.
        resolutions: One `Resolution` per array or number.
        dead_rules: Patterns that match nothing, with the paths that they almost match.
        shadowed_rules: Patterns that match leaves but decide none, with the rules or
            reasons that win there.
        sends: Bytes that all-reduces send in one step because of a rule, by pattern,
            where a program was traced: over its example inputs, all devices' rows.
        shared: Other paths of shared arrays, with the path that names the array.
    """

    mesh: Mesh
    resolutions: tuple[Resolution, ...]
    dead_rules: Mapping[str, tuple[str, ...]]
    shadowed_rules: Mapping[str, tuple[str, ...]]
    sends: Mapping[str, int] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes_per_device(self) -> int:
        """Bytes on each device, all leaves together."""
        return sum(leaf.bytes_per_device for leaf in self.resolutions)

    @property
    def replicated_bytes(self) -> int:
        """Bytes on each device if everything were replicated."""
        return sum(leaf.nbytes for leaf in self.resolutions)

    @property
    def large_replicated(self) -> tuple[str, ...]:
        """Paths of large leaves that every device holds in full."""
        large = max(_LARGE_BYTES, _LARGE_SHARE * self.replicated_bytes)
        return tuple(
            leaf.path
            for leaf in self.resolutions
            if self.mesh.size > 1
            and leaf.nbytes >= large
            and leaf.current_layout.is_fully_replicated
        )

    @property
    def notes(self) -> list[str]:
        """Everything that deserves a second look, one sentence each."""
        rows = self.resolutions
        return [
            *_grouped("fallback", ((r.path, r.fallback) for r in rows)),
            *_grouped("note", ((r.path, r.note) for r in rows)),
            *(
                f"placed: {r.path} is {r.placed}, not by this map, which gives "
                f"{r.layout} ({r.rule or r.reason})"
                for r in rows
                if r.placed
            ),
            *(
                f"dead rule: {pattern!r} matches nothing."
                + (f" Nearest: {', '.join(near)}." if near else "")
                + shared_text(pattern, self.shared)
                for pattern, near in self.dead_rules.items()
            ),
            *(
                f"shadowed rule: {pattern!r} decides nothing; "
                f"where it matches, {', '.join(winners)} wins."
                for pattern, winners in self.shadowed_rules.items()
            ),
            *_grouped("large and replicated", ((p, "") for p in self.large_replicated)),
        ]

    def __str__(self) -> str:
        headers, align, rows = self._table()
        table = _render.text_table(headers, rows, align=align)
        return "\n".join([repr(self.mesh), table, self._total(), *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        headers, align, rows = self._table()
        notes = [self._total(), *self.notes]
        return _render.html_table(
            headers, rows, align, caption=repr(self.mesh), notes=notes
        )

    def _table(self) -> tuple[list[str], str, list[list[str]]]:
        groups: dict[str, dict[tuple[str, ...], list[Resolution]]] = {}
        for leaf in self.resolutions:
            rule = "(placed)" if leaf.placed else leaf.rule or f"({leaf.reason})"
            layout = str(leaf.current_layout) if leaf.is_array else ""
            kind = (folded(leaf.path), leaf.array, layout)
            groups.setdefault(rule, {}).setdefault(kind, []).append(leaf)
        rows: list[list[str]] = []
        for rule, kinds in groups.items():
            sends = self.sends.get(rule)
            for (path, array, layout), leaves in kinds.items():
                here = sum(leaf.bytes_per_device for leaf in leaves)
                saving = _saving(here, sum(leaf.nbytes for leaf in leaves))
                rows.append(
                    [
                        (path if len(leaves) > 1 else leaves[0].path) or "(the array)",
                        f"{len(leaves)} x {array}" if len(leaves) > 1 else array,
                        layout,
                        rule,
                        *([_render.bytes_text(here), saving] if layout else ["", ""]),
                        "" if sends is None else _render.bytes_text(sends),
                    ]
                )
                sends = None  # once for each rule
        headers = ["path", "array", "layout", "rule", "bytes/device", "saving"]
        if self.sends:
            return [*headers, "sent/step"], "llllrrr", rows
        return headers, "llllrr", [row[:-1] for row in rows]

    def _total(self) -> str:
        here = _render.bytes_text(self.bytes_per_device)
        whole = _render.bytes_text(self.replicated_bytes)
        saving = _saving(self.bytes_per_device, self.replicated_bytes)
        num_arrays = sum(leaf.is_array for leaf in self.resolutions)
        return (
            f"{num_arrays} arrays, {here} on each of {self.mesh.size} "
            f"devices; replicated it would be {whole} (saving {saving})."
        )


def _grouped(what: str, pairs: Iterable[tuple[str, str | None]]) -> Iterator[str]:
    """Yields texts about leaves, one line for all leaves that have the same."""
    by_text: dict[tuple[str, str], list[str]] = {}
    for path, text in pairs:
        if text is not None:
            key = (text, "" if text else folded(path))
            by_text.setdefault(key, []).append(path)
    for (text, _), paths in by_text.items():
        more = f" and {len(paths) - 1} more" * (len(paths) > 1)
        yield f"{what}: {paths[0]}{more}{f': {text}' if text else ''}"


def _saving(here: int, whole: int) -> str:
    return f"{100 * (1 - here / whole):.0f}%" if whole else "0%"


def folded(path: str) -> str:
    """Returns a path with `*` for its numbers: `layers/*/kernel`."""
    return re.sub("[0-9]+", "*", path)


def explain(
    mesh: Mesh,
    resolved: Resolved,
    matching: Mapping[str, Sequence[str]],
    sends: Mapping[str, int],
    shared: Mapping[str, str],
) -> Explanation:
    """Makes the report.

    Args:
        mesh: The mesh.
        resolved: The resolved layouts.
        matching: The paths that each pattern of the map matches.
        sends: As in `Explanation`.
        shared: As from `_paths.shared_paths`.
    """
    rows = resolved.resolutions
    # A slot has the rule of its parameter, whose path the pattern need not match.
    used = {leaf.rule for leaf in rows}
    winners = {leaf.path: leaf.rule or f"({leaf.reason})" for leaf in rows}
    dead = [p for p, matched in matching.items() if not matched and p not in used]
    shadowed = {
        pattern: tuple(sorted({winners[path] for path in matched}))
        for pattern, matched in matching.items()
        if matched and pattern not in used
    }
    one_of_each = {folded(path): path for path in reversed(winners)}.values()
    near = {pattern: nearest_paths(pattern, one_of_each) for pattern in dead}
    return Explanation(mesh, rows, near, shadowed, sends, shared)


def shared_text(pattern: str, shared: Mapping[str, str]) -> str:
    """Returns a sentence if a pattern matches only the other path of a shared array."""
    for path, first in shared.items():
        if re.search(pattern, path):
            return (
                f" {path!r} shares its array with {first!r}, which a rule must match."
            )
    return ""


def nearest_paths(pattern: str, paths: Iterable[str]) -> tuple[str, ...]:
    """Returns up to three paths that a pattern almost matches.

    Its letters are compared with the last keys of each path.

    Example:
        >>> nearest_paths("embed/kernl", ["embed/kernel", "head/bias"])
        ('embed/kernel',)
    """
    # What a regular expression says literally, with everything else as a separator.
    letters = re.sub(r"\\[a-zA-Z]|[^\w/]+", "/", pattern).strip("/").lower()
    num_keys = letters.count("/") + 1
    ends = {
        "/".join(path.lower().split("/")[-num_keys:]): path
        for path in itertools.islice(paths, _MOST_PATHS)
    }
    near = difflib.get_close_matches(letters, ends, n=3, cutoff=0.6)
    return tuple(ends[end] for end in near)


# difflib takes a second for this many, and models have far fewer kinds of leaves.
_MOST_PATHS = 5000
