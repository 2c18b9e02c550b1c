"""The decision for each leaf, as plain values; the report and the lock text of a tree.

A map says where arrays should be, but existing arrays may be elsewhere: a parameter
that was placed by its metadata loses that as a plain array. So the report, its bytes
and the lock show where concrete arrays are; `Resolved.layouts` is the map's.
"""

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.typing import DTypeLike

from meshlayout import _checks, _jax, _render
from meshlayout._annotations import PyTree
from meshlayout.errors import LayoutMapError, did_you_mean
from meshlayout.layout import Layout, axes_of
from meshlayout.mesh import Mesh, sizes_text


# A replicated leaf gets a line if it is at least this share of the whole tree.
_LARGE_SHARE = 0.01
_LARGE_BYTES = 64 * 1024

GROUPED = (
    "XLA may multiply its gradient by the size of an axis that shards no rows; "
    "ml.compile_step and train steps refuse that, jax.jit does not"
)


@dataclass(frozen=True, slots=True)
class Resolution:
    """The layout of one leaf, and why.

    Attributes:
        path, shape, dtype: Those of the whole leaf.
        layout: The layout that the map gives it.
        rule: The pattern that decided, as the user wrote it, or None.
        reason: The reason for this layout, as a phrase.
        fallback: What could not be applied, such as a dim that does not divide.
        note: The note of the rule, or a disagreement that is not an error.
        placed: The actual layout of an array on the map's mesh, if it differs.
        axes, wrong_axes: The axis names in Flax's metadata; those that lack a rule.
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
    axes: tuple[str, ...] = ()
    wrong_axes: tuple[str, ...] = ()

    @property
    def current_layout(self) -> Layout:
        """The layout of a concrete array, otherwise the layout that the map gives."""
        return self.placed or self.layout

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf, as each device would hold if it were replicated."""
        return math.prod(self.shape) * _jax.itemsize(self.dtype)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the leaf on each device, in its current layout."""
        return self.current_layout.bytes_per_device(self.shape, self.dtype)

    @property
    def array(self) -> str:
        """The dtype and shape of the leaf, such as `f32[784, 128]`."""
        return _render.array_text(self.dtype, self.shape)


@dataclass(frozen=True)
class Resolved:
    """The layouts of a whole tree.

    Attributes:
        layouts: A tree with the structure of the resolved one and a `Layout` for every
            leaf (None for leaves that are neither arrays nor numbers).
        resolutions: One `Resolution` per array or number, in the tree's order.
    """

    layouts: PyTree
    resolutions: tuple[Resolution, ...]

    def __getitem__(self, path: str) -> Resolution:
        """Returns the resolution of a leaf; raises LayoutMapError for other paths."""
        by_path = {resolution.path: resolution for resolution in self.resolutions}
        if path in by_path:
            return by_path[path]
        msg = f"no leaf has the path {path!r}.{did_you_mean(path, by_path)}"
        raise LayoutMapError(msg)

    @property
    def shardings(self) -> PyTree:
        """The layouts as JAX's shardings, as `jax.jit(in_shardings=...)` takes them."""
        return jax.tree.map(lambda layout: layout.sharding, self.layouts)

    @property
    def bytes_per_device(self) -> int:
        """Bytes on each device, all leaves together."""
        return sum(resolution.bytes_per_device for resolution in self.resolutions)

    @property
    def nbytes(self) -> int:
        """Bytes on each device if everything were replicated."""
        return sum(resolution.nbytes for resolution in self.resolutions)

    def to_lock(self) -> str:
        """Returns the current layout of every array as stable text for `check_lock`."""
        arrays = self.resolutions
        meshes = {f"Mesh({sizes_text(leaf.layout.mesh.shape)})" for leaf in arrays}
        lines = [f"{leaf.path}: {leaf.array} {leaf.current_layout}" for leaf in arrays]
        header = f"# layouts on {', '.join(sorted(meshes))}"
        return "\n".join([header, *sorted(lines)]) + "\n"

    def check_lock(self, text: str) -> None:
        """Raises LayoutMapError, with the lines that differ from a former lock text."""
        fact = "the layouts are not the locked ones"
        _checks.lock(text, self.to_lock(), fact, error=LayoutMapError)


@dataclass(frozen=True, repr=False)
class Explanation(Resolved):
    """How a layout map applies to a tree: text if printed, HTML in notebooks.

    One row stands for all leaves whose paths differ only in numbers.

    Attributes:
        dead_rules: Patterns that match nothing, with the paths that they almost match.
        shadowed_rules: Patterns that match leaves but decide none, with the winners.
        sends: Bytes of the whole arrays that all-reduces sum up in one step, by
            pattern, if known; `step.communication` counts what each device sends.
    """

    mesh: Mesh
    dead_rules: Mapping[str, tuple[str, ...]]
    shadowed_rules: Mapping[str, tuple[str, ...]]
    sends: Mapping[str, int]

    @property
    def large_replicated(self) -> tuple[str, ...]:
        """Paths of large leaves that every device holds in full."""
        large = max(_LARGE_BYTES, _LARGE_SHARE * self.nbytes)
        whole = [x for x in self.resolutions if x.current_layout.is_fully_replicated]
        return tuple(x.path for x in whole if self.mesh.size > 1 and x.nbytes >= large)

    @property
    def notes(self) -> list[str]:
        """Everything that deserves a second look, one sentence each."""
        leaves = self.resolutions
        return [
            *grouped("fallback", ((leaf.path, leaf.fallback) for leaf in leaves)),
            *grouped("note", ((leaf.path, _note(leaf)) for leaf in leaves)),
            *grouped("placed", ((x.path, _placed_text(x)) for x in leaves if x.placed)),
            *(f"dead {line}" for line in self.dead_lines()),
            *(
                f"shadowed rule {pattern!r} decides nothing; where it matches, "
                f"{', '.join(winners)} wins."
                for pattern, winners in self.shadowed_rules.items()
            ),
            *grouped("large and replicated", ((p, "") for p in self.large_replicated)),
        ]

    def dead_lines(self) -> Iterator[str]:
        """Yields a line for each rule that matches nothing."""
        for pattern, near in self.dead_rules.items():
            text = f"rule {pattern!r} matches no path."
            yield text + (f" Nearest: {', '.join(near)}." if near else "")

    def __str__(self) -> str:
        table = _render.text_table(*self._table(), [self._total(), *self.notes])
        return f"{self.mesh!r}\n{table}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        notes = [self._total(), *self.notes]
        return _render.html_table(*self._table(), repr(self.mesh), notes)

    def _table(self) -> tuple[list[str], list[list[str]], str]:
        groups: dict[str, dict[tuple[str, ...], list[Resolution]]] = {}
        for leaf in self.resolutions:
            rule = "(placed)" if leaf.placed else leaf.rule or f"({leaf.reason})"
            kind = (folded(leaf.path), leaf.array, str(leaf.current_layout))
            groups.setdefault(rule, {}).setdefault(kind, []).append(leaf)
        rows: list[list[str]] = []
        for rule, kinds in groups.items():
            sends = self.sends.get(rule)
            for (_, array, layout), leaves in kinds.items():
                path = _merged(leaf.path for leaf in leaves) or "(the array)"
                array = f"{len(leaves)} x " * (len(leaves) > 1) + array
                sent = "" if sends is None else _render.bytes_text(sends)
                rows.append([path, array, layout, rule, *_sizes(leaves), sent])
                sends = None  # once for each rule
        headers = ["path", "array", "layout", "rule", "bytes/device", "saving"]
        if self.sends:
            return [*headers, "sent/step"], rows, "llllrrr"
        return headers, [row[:-1] for row in rows], "llllrr"

    def _total(self) -> str:
        per_device, saving = _sizes(self.resolutions)
        text = f"{len(self.resolutions)} arrays, {per_device} on each of "
        text += f"{self.mesh.size} devices; replicated it would be "
        return f"{text}{_render.bytes_text(self.nbytes)} (saving {saving})."


def _sizes(leaves: Sequence[Resolution]) -> tuple[str, str]:
    """Returns bytes per device, and the share that sharding saves, as text."""
    used, whole = sum(x.bytes_per_device for x in leaves), sum(x.nbytes for x in leaves)
    saving = 1 - used / whole if whole else 0
    return _render.bytes_text(used), f"{100 * saving:.0f}%"


def _note(x: Resolution) -> str | None:  # that of a rule, or of a possible kernel
    used = [axis for spec in x.current_layout.specs for axis in axes_of(spec)]
    left = {k for k, n in x.layout.mesh.shape.items() if n > 1}.difference(used)
    is_window = len(x.shape) == 4 and min(map(max, (x.shape[:2], x.shape[2:]))) <= 16
    is_window &= len(left) > 1 and not x.reason.startswith("follows parameter")
    return x.note or (f"if its feature_group_count > 1, {GROUPED}" * is_window or None)


def _placed_text(x: Resolution) -> str:
    return f"{x.placed}, where this map gives {x.layout} ({x.rule or x.reason})"


def grouped(what: str, pairs: Iterable[tuple[str, str | None]]) -> Iterator[str]:
    """Yields texts about leaves, with one line for all leaves that share a text."""
    by_text: dict[tuple[str, str], list[str]] = {}
    for path, text in pairs:
        if text is not None:
            by_text.setdefault((text, "" if text else folded(path)), []).append(path)
    for (text, _), paths in by_text.items():
        more = f" and {len(paths) - 1} more" * (len(paths) > 1)
        yield f"{what}: {paths[0]}{more}{f': {text}' if text else ''}"


def folded(path: str) -> str:
    """Returns a path with `*` for its numbers: `layers/*/kernel`."""
    return re.sub("[0-9]+", "*", path)


def _merged(paths: Iterable[str]) -> str:
    """Returns paths that differ in numbers as one, with `*` where they do."""
    parts = zip(*(re.split("([0-9]+)", path) for path in paths), strict=True)
    return "".join(part[0] if len({*part}) == 1 else "*" for part in parts)


def nearest_paths(pattern: str, paths: Iterable[str]) -> tuple[str, ...]:
    """Returns up to three paths whose last keys a pattern almost matches."""
    # The literal parts of a regular expression; everything else separates them.
    letters = re.sub(r"\\[a-zA-Z]|[^\w/]+", "/", pattern).strip("/").lower()
    num_keys = letters.count("/") + 1
    ends = {"/".join(path.lower().split("/")[-num_keys:]): path for path in paths}
    near = difflib.get_close_matches(letters, ends, n=3, cutoff=0.6)
    # Or the arrays of the same layer, for PyTorch's `head.weight`.
    head = letters.rpartition("/")[0]
    near = near or [end for end in ends if head and end.rpartition("/")[0] == head]
    if not near:  # or the arrays of a layer that is called like it
        ends = {key.lower(): path for path in paths for key in path.split("/")}
        near = difflib.get_close_matches(letters, ends, n=3, cutoff=0.6)
    if not near and "/" in letters:  # or what lies deeper, as in `layers.*.attn.weight`
        return nearest_paths(letters.partition("/")[2], paths)
    return tuple(dict.fromkeys(ends[end] for end in near[:3]))
