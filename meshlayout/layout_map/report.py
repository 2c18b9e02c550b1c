"""The decision for each leaf, as plain values; the report and the lock text of a tree.

A map says where arrays should be. Existing arrays may be elsewhere: a parameter placed
by its own metadata loses that metadata once it is a plain array, and ZeRO shards slots
that no rule names. So the report, its bytes and the lock show where concrete arrays
are, and note each one that this map would place differently. `Resolved.layouts` has the
layouts of the map.
"""

import difflib
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
        bytes_per_device: Bytes of the leaf on each device, in its current layout.
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
    fallback: str | None
    note: str | None
    bytes_per_device: int
    placed: Layout | None = None
    is_array: bool = True

    @property
    def current_layout(self) -> Layout:
        """The layout of a concrete array, or else the layout that the map gives."""
        return self.placed or self.layout

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf: what each device would hold if replicated."""
        if not self.is_array:
            return 0
        return math.prod(self.shape) * _jax.itemsize(self.dtype)

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

    Attributes:
        mesh: The mesh.
        resolutions: One `Resolution` per array or number.
        bytes_per_device: Bytes on each device, all leaves together.
        replicated_bytes: Bytes on each device if everything were replicated.
        dead_rules: Patterns that match nothing, with the paths that they almost match.
        shadowed_rules: Patterns that match leaves but decide none, with the rules or
            reasons that win there.
        large_replicated: Paths of large leaves that every device holds in full.
        shared: Other paths of shared arrays, with the path that names the array.
    """

    mesh: Mesh
    resolutions: tuple[Resolution, ...]
    bytes_per_device: int
    replicated_bytes: int
    dead_rules: Mapping[str, tuple[str, ...]]
    shadowed_rules: Mapping[str, tuple[str, ...]]
    large_replicated: tuple[str, ...]
    shared: Mapping[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """Everything that deserves a second look, one sentence each."""
        rows = self.resolutions
        return [
            *(f"fallback: {r.path}: {r.fallback}" for r in rows if r.fallback),
            *_grouped_notes(rows),
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
            *(f"large and replicated: {path}" for path in self.large_replicated),
        ]

    def __str__(self) -> str:
        table = _render.text_table(_HEADERS, self._rows(), align=_ALIGN)
        return "\n".join([repr(self.mesh), table, self._total(), *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        notes = [self._total(), *self.notes]
        return _render.html_table(
            _HEADERS, self._rows(), _ALIGN, caption=repr(self.mesh), notes=notes
        )

    def _rows(self) -> list[list[str]]:
        return [
            [
                leaf.path or "(the array)",
                leaf.array,
                str(leaf.current_layout) if leaf.is_array else "",
                "(placed)" if leaf.placed else leaf.rule or f"({leaf.reason})",
                _render.bytes_text(leaf.bytes_per_device) if leaf.is_array else "",
                _saving(leaf.bytes_per_device, leaf.nbytes) if leaf.is_array else "",
            ]
            for leaf in self.resolutions
        ]

    def _total(self) -> str:
        here = _render.bytes_text(self.bytes_per_device)
        whole = _render.bytes_text(self.replicated_bytes)
        saving = _saving(self.bytes_per_device, self.replicated_bytes)
        num_arrays = sum(leaf.is_array for leaf in self.resolutions)
        return (
            f"{num_arrays} arrays, {here} on each of {self.mesh.size} "
            f"devices; replicated it would be {whole} (saving {saving})."
        )


def _grouped_notes(rows: Iterable[Resolution]) -> Iterator[str]:
    """Yields notes, one line for all leaves that have the same."""
    by_note: dict[str, list[str]] = {}
    for leaf in rows:
        if leaf.note:
            by_note.setdefault(leaf.note, []).append(leaf.path)
    for note, paths in by_note.items():
        more = f" and {len(paths) - 1} more" * (len(paths) > 1)
        yield f"note: {paths[0]}{more}: {note}"


_HEADERS = ["path", "array", "layout", "rule", "bytes/device", "saving"]
_ALIGN = "llllrr"


def _saving(here: int, whole: int) -> str:
    return f"{100 * (1 - here / whole):.0f}%" if whole else "0%"


def explain(
    mesh: Mesh,
    resolved: Resolved,
    matching: Mapping[str, Sequence[str]],
    shared: Mapping[str, str],
) -> Explanation:
    """Makes the report.

    Args:
        mesh: The mesh.
        resolved: The resolved layouts.
        matching: The paths that each pattern of the map matches.
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
    large = max(_LARGE_BYTES, _LARGE_SHARE * resolved.nbytes)
    large_replicated = tuple(
        leaf.path
        for leaf in rows
        if mesh.size > 1
        and leaf.nbytes >= large
        and leaf.current_layout.is_fully_replicated
    )
    return Explanation(
        mesh,
        rows,
        resolved.bytes_per_device,
        resolved.nbytes,
        nearest_paths(dead, winners),
        shadowed,
        large_replicated,
        shared,
    )


def shared_text(pattern: str, shared: Mapping[str, str]) -> str:
    """Returns a sentence if a pattern matches only the other path of a shared array."""
    for path, first in shared.items():
        if re.search(pattern, path):
            return (
                f" {path!r} shares its array with {first!r}, which a rule must match."
            )
    return ""


# Limits for the search of nearest paths, as difflib is slow: it may take milliseconds
# for one misspelled rule of a large model, and seconds for hundreds.
_MOST_PATHS = 5000
_MOST_WORDS = 300
_MOST_COMPARISONS = 100


def nearest_paths(
    patterns: Sequence[str], paths: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """Returns, for each pattern, up to three paths that it almost matches.

    The letters of the pattern are compared with every path, its digits folded, and with
    every run of its last keys, but only with those that have a word in common with the
    pattern, or nearly.

    Example:
        >>> nearest_paths(["embed/kernl"], ["embed/kernel", "head/bias"])
        {'embed/kernl': ('embed/kernel',)}
    """
    if not patterns:
        return {}
    # One path for all layers: `layers/0/kernel` stands for `layers/31/kernel`.
    folded: dict[str, str] = {}
    for path in paths:
        folded.setdefault(_DIGITS.sub("0", path), path)
    tails: dict[str, str] = {}
    for path in list(folded.values())[:_MOST_PATHS]:
        keys = path.lower().split("/")
        for start in range(len(keys)):
            tails.setdefault("/".join(keys[start:]), path)
    by_word: dict[str, list[str]] = {}
    for tail in tails:
        for word in set(_WORD.findall(tail)):
            by_word.setdefault(word, []).append(tail)
    words = list(by_word)[:_MOST_WORDS]
    nearest: dict[str, tuple[str, ...]] = {}
    for pattern in patterns:
        # What a regular expression says literally, with everything else as a separator.
        letters = re.sub(r"\\[a-zA-Z]|[^\w/]+", "/", pattern).strip("/").lower()
        known: set[str] = set()
        for word in set(_WORD.findall(letters)):
            if word in by_word:
                known.add(word)
            known.update(difflib.get_close_matches(word, words, n=3, cutoff=0.5))
        candidates: dict[str, None] = {}
        # Rare words first: `kernel` is in half of all paths and tells nothing.
        for word in sorted(known, key=lambda word: (len(by_word[word]), word)):
            candidates.update(dict.fromkeys(by_word[word][:_MOST_COMPARISONS]))
            if len(candidates) >= _MOST_COMPARISONS:
                break
        near = difflib.get_close_matches(letters, list(candidates), n=9, cutoff=0.5)
        nearest[pattern] = tuple(dict.fromkeys(tails[tail] for tail in near))[:3]
    return nearest


_DIGITS = re.compile(r"\d+")
_WORD = re.compile(r"[^\W\d_]+")
