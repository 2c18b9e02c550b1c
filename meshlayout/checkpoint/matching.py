"""Which saved array belongs to which array that is wanted, and what does not fit.

Pure: names, shapes and dtypes in; pairs and differences out. No file is opened here.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from meshlayout import _jax, _render
from meshlayout.errors import CheckpointError, RestoreDiffError, did_you_mean
from meshlayout.layout_map.explain import nearest_paths


Dtypes: TypeAlias = DTypeLike | Mapping[str, DTypeLike] | None
"""A dtype for every array of its kind, or one for each pattern of paths."""

# Rows of a difference that an error shows; the rest is counted.
_SHOWN = 40

# Names that are compared with a missing one; difflib is slow.
_CANDIDATES = 200


@dataclass(frozen=True, slots=True)
class Leaf:
    """What is known of an array before it is read.

    Attributes:
        path: Its name.
        parts: The keys that the name is made of; empty where only the name is known.
        shape: Its global shape.
        dtype: Its dtype; for a Python number, `bool`, `int`, `float` or `complex`.
    """

    path: str
    parts: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: Any

    @property
    def array(self) -> str:
        """Its dtype and shape, as `f32[784, 128]`."""
        return _render.array_text(self.dtype, self.shape)

    def __str__(self) -> str:
        return f"{self.path} {self.array}".lstrip()


@dataclass(frozen=True, slots=True)
class Change:
    """An array that was saved with another shape or dtype than is wanted.

    Attributes:
        path: Its name in the state that is wanted.
        saved: The array that was saved, under the name that it was saved by.
        wanted: The array that is wanted.
    """

    path: str
    saved: Leaf
    wanted: Leaf


@dataclass(frozen=True)
class RestoreDiff:
    """How what was saved differs from the state that is wanted; print or display it.

    Attributes:
        missing: Paths that are wanted and were not saved.
        extra: Paths that were saved and are not wanted, after renaming.
        shapes: Arrays of another shape.
        dtypes: Arrays of another dtype.
    """

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    shapes: tuple[Change, ...] = ()
    dtypes: tuple[Change, ...] = ()
    arrays: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.shapes or self.dtypes)

    def near(self, path: str) -> str | None:
        """Returns the extra path that is most like a missing one, or None.

        Args:
            path: The missing path.
        """
        last = path.rpartition("/")[2]
        alike = sorted(self.extra, key=lambda one: one.rpartition("/")[2] != last)
        some = alike[:_CANDIDATES]
        found = difflib.get_close_matches(path, some, n=1, cutoff=0.6)
        return found[0] if found else None

    def summary(self) -> str:
        """Returns the counts, as `1 missing, 2 extra`."""
        counts = {
            "missing": self.missing,
            "extra": self.extra,
            "of another shape": self.shapes,
            "of another dtype": self.dtypes,
        }
        found = [f"{len(some)} {what}" for what, some in counts.items() if some]
        return ", ".join(found) or "nothing differs"

    def table(self, most: int | None = None) -> str:
        """Returns the differences side by side, for a terminal.

        Args:
            most: The most rows to show; all if left out.
        """
        rows = self._rows(most)
        left = self._count() - len(rows)
        notes = [f"... and {left:,} more"] if left else []
        return _render.text_table(_COLUMNS, rows, notes=notes)

    def __str__(self) -> str:
        return f"{self.summary()}\n{self.table()}" if self else self.summary()

    def _repr_html_(self) -> str:
        rows = self._rows(None)
        return _render.html_table(_COLUMNS, rows, caption=self.summary())

    def _count(self) -> int:
        parts = (self.missing, self.extra, self.shapes, self.dtypes)
        return sum(map(len, parts))

    def _rows(self, most: int | None) -> list[list[str]]:
        rows = [
            *(("missing", path, None) for path in self.missing),
            *(("shape", str(one.wanted), str(one.saved)) for one in self.shapes),
            *(("dtype", str(one.wanted), str(one.saved)) for one in self.dtypes),
            *(("extra", "", self._named(path)) for path in self.extra),
        ]
        return [
            [what, self._named(wanted), self._nearest(wanted)]
            if saved is None
            else [what, wanted, saved]
            for what, wanted, saved in rows[:most]
        ]

    def _named(self, path: str) -> str:
        return f"{path} {self.arrays.get(path, '')}".strip()

    def _nearest(self, path: str) -> str:
        near = self.near(path)
        return "" if near is None else f"(near: {self._named(near)})"


_COLUMNS = ("differs", "wanted", "saved")


@dataclass(frozen=True, slots=True)
class Pair:
    """A saved array and the place it goes to.

    Attributes:
        wanted: The array that is wanted.
        saved: The array that was saved, under the name that it was saved by.
        dtype: The dtype that the result has.
    """

    wanted: Leaf
    saved: Leaf
    dtype: Any


@dataclass(frozen=True)
class Matched:
    """What belongs together.

    Attributes:
        pairs: What is restored, in the order of what is wanted.
        kept: What is wanted, and stays as it is.
        unused: What was saved, and is not read.
        diff: All differences, the allowed ones too.
    """

    pairs: tuple[Pair, ...]
    kept: tuple[Leaf, ...]
    unused: tuple[Leaf, ...]
    diff: RestoreDiff


def match(
    saved: Sequence[Leaf],
    wanted: Sequence[Leaf],
    *,
    rename: Mapping[str, str] | None = None,
    partial: bool = False,
    allow: str | Iterable[str] = (),
    dtype: Dtypes = None,
    separator: str = "/",
    foreign: bool = False,
    what: str = "what was saved",
) -> Matched:
    r"""Finds the saved array for every one that is wanted.

    Args:
        saved: What was saved.
        wanted: What is wanted; paths as in `LayoutMap`.
        rename: `{pattern: replacement}`, applied to the saved paths as by `re.sub`.
            A path may be changed by one pattern only.
        partial: Whether arrays may be missing, which then stay as they are, and
            extra, which are then not read.
        allow: Patterns of paths that may differ in any way: missing or extra, or of
            another shape or dtype, which then stay as they are.
        dtype: A dtype for every array of its kind (floating, integer, ...), or
            `{pattern: dtype}`. All others have to be saved in the dtype wanted.
        separator: What stands between the keys of a saved path, after renaming.
        foreign: Whether other libraries wrote it: a leading `params/` and a `/value`
            at the end, which some versions of Flax write and others do not, are then
            left out when comparing.
        what: What holds the saved arrays, for messages.

    Raises:
        CheckpointError: If a pattern is wrong or matches nothing, or two saved paths
            become one.
        RestoreDiffError: If what differs is not allowed; it holds the difference.

    Example:
        >>> old = [Leaf("net.w", (), (2, 3), np.dtype("float32"))]
        >>> new = [Leaf("model/w", (), (2, 3), np.dtype("float32"))]
        >>> found = match(old, new, rename={r"^net\.": "model/"})
        >>> [(pair.wanted.path, pair.saved.path) for pair in found.pairs]
        [('model/w', 'net.w')]
    """
    names = renamed([leaf.path for leaf in saved], rename, separator)
    free, places = _find(saved, names, wanted, foreign=foreign)
    allowed = _patterns("allow", [allow] if isinstance(allow, str) else allow)
    _check_used(allowed, [*names, *(leaf.path for leaf in wanted)], "allow")
    targets = _Targets(dtype, wanted)
    pairs: list[Pair] = []
    kept: list[Leaf] = []
    differ: dict[str, list[Any]] = {"missing": [], "shape": [], "dtype": []}
    for leaf, place in zip(wanted, places, strict=True):
        if place is None:
            differ["missing"].append(leaf)
            kept.append(leaf)
            continue
        one = saved[place]
        target = targets.of(leaf)
        change = Change(leaf.path, one, leaf)
        if one.shape != leaf.shape:
            differ["shape"].append(change)
            kept.append(leaf)
        elif not _fits(one.dtype, leaf.dtype, target):
            differ["dtype"].append(change)
            kept.append(leaf)
        else:
            pairs.append(Pair(leaf, one, leaf.dtype if target is None else target))
    extra = {names[at]: saved[at] for at in free}
    missing = {leaf.path: leaf.array for leaf in differ["missing"]}
    diff = RestoreDiff(
        tuple(missing),
        tuple(extra),
        tuple(differ["shape"]),
        tuple(differ["dtype"]),
        missing | {path: leaf.array for path, leaf in extra.items()},
    )
    _check_allowed(diff, allowed, partial=partial, foreign=foreign, what=what)
    if wanted and saved and not pairs and diff:
        raise RestoreDiffError(_nothing(diff, what), diff)
    return Matched(tuple(pairs), tuple(kept), tuple(extra.values()), diff)


def renamed(
    paths: Sequence[str], rename: Mapping[str, str] | None, separator: str = "/"
) -> list[str]:
    r"""Returns saved paths under their new names, with `/` between the keys.

    Args:
        paths: The paths as they were saved.
        rename: As for `match`.
        separator: As for `match`.

    Raises:
        CheckpointError: As `match`.

    Example:
        >>> renamed(["h.0.w", "h.1.w"], {r"h\.(\d+)": r"layers/\1"}, ".")
        ['layers/0/w', 'layers/1/w']
    """
    table = _table(rename)
    names = [_rename(path, table) for path in paths]
    patterns = {pattern.pattern: pattern for pattern, _ in table}
    _check_used(patterns, paths, "rename")
    if separator != "/":
        names = [name.replace(separator, "/") for name in names]
    if table or separator != "/":
        _check_distinct(paths, names)
    return names


def by_pattern(
    patterns: Mapping[str, Any], paths: Sequence[str], option: str
) -> dict[str, Any]:
    """Returns the value of the pattern that matches, for each path that one does.

    Args:
        patterns: `{pattern: value}`; an exact path wins over patterns.
        paths: The paths.
        option: The option that the patterns are of, for messages.

    Raises:
        CheckpointError: If a pattern is wrong or matches no path, or two that match
            one path have different values.
    """
    compiled = _patterns(option, patterns)
    _check_used(compiled, paths, option)
    found: dict[str, Any] = {}
    for path in paths:
        if path in patterns:
            found[path] = patterns[path]
            continue
        fitting = [one for one, regex in compiled.items() if regex.search(path)]
        for one in fitting:
            if patterns[one] != patterns[fitting[0]]:
                msg = (
                    f"{path}: the patterns {fitting[0]!r} and {one!r} of {option}= "
                    f"say {patterns[fitting[0]]!r} and {patterns[one]!r}. Make one of "
                    "them narrower."
                )
                raise CheckpointError(msg)
            found[path] = patterns[one]
    return found


def kind(dtype: Any) -> str:
    """Returns what sort of values a dtype holds; no array is cast to another sort.

    Example:
        >>> kind("bfloat16"), kind("int8"), kind("bool")
        ('floating', 'integer', 'bool')
    """
    if _jax.is_extended(dtype):
        return "key"
    kinds = {
        "bool": np.bool_,
        "integer": np.integer,
        "floating": np.floating,
        "complex": np.complexfloating,
    }
    found = (name for name, of in kinds.items() if jnp.issubdtype(dtype, of))
    return next(found, str(dtype))


# Renaming.


def _table(rename: Any) -> list[tuple[re.Pattern[str], str]]:
    if rename is None:
        return []
    if not isinstance(rename, Mapping):
        msg = (
            "rename= maps patterns of saved paths to replacements, and got "
            f"{rename!r}. Write rename={{r'^encoder/': 'model/encoder/'}}."
        )
        raise CheckpointError(msg)
    compiled = _patterns("rename", rename)
    for pattern, new in rename.items():
        if not isinstance(new, str):
            msg = (
                f"rename= replaces {pattern!r} by {new!r}, which is no text. To leave "
                "arrays out, use partial=True."
            )
            raise CheckpointError(msg)
    return [(compiled[pattern], new) for pattern, new in rename.items()]


def _rename(path: str, table: list[tuple[re.Pattern[str], str]]) -> str:
    found: tuple[str, str] | None = None
    for pattern, replacement in table:
        try:
            new = pattern.sub(replacement, path)
        except (re.error, IndexError) as error:
            msg = (
                f"rename= replaces {pattern.pattern!r} by {replacement!r}, which is "
                f"not a replacement for it: {error}. Groups are written r'\\1'."
            )
            raise CheckpointError(msg) from None
        if new == path:
            continue
        if found is not None and found[1] != new:
            msg = (
                f"{path}: rename= makes {found[1]!r} of it by {found[0]!r}, and "
                f"{new!r} by {pattern.pattern!r}. Let one pattern match it."
            )
            raise CheckpointError(msg)
        found = (pattern.pattern, new)
    return path if found is None else found[1]


def _check_distinct(paths: Sequence[str], names: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for path, name in zip(paths, names, strict=True):
        if name in seen:
            msg = (
                f"the saved arrays {seen[name]!r} and {path!r} both become {name!r}. "
                "Change rename= so that they differ."
            )
            raise CheckpointError(msg)
        seen[name] = path


def _patterns(option: str, given: Iterable[Any]) -> dict[str, re.Pattern[str]]:
    compiled: dict[str, re.Pattern[str]] = {}
    for pattern in given:
        if not isinstance(pattern, str):
            msg = (
                f"{option}= takes patterns of paths, and got {pattern!r} of type "
                f"{type(pattern).__name__}. Write a regular expression as text."
            )
            raise CheckpointError(msg)
        try:
            compiled[pattern] = re.compile(pattern)
        except re.error as error:
            msg = (
                f"{option}= holds {pattern!r}, which is no regular expression: {error}."
            )
            raise CheckpointError(msg) from None
    return compiled


def _check_used(
    patterns: Mapping[str, re.Pattern[str]], paths: Sequence[str], option: str
) -> None:
    for pattern, regex in patterns.items():
        if pattern not in paths and not any(map(regex.search, paths)):
            near = nearest_paths(pattern, paths)
            hint = f" Nearest: {', '.join(near)}." if near else ""
            msg = (
                f"the pattern {pattern!r} of {option}= matches none of the "
                f"{len(paths):,} paths.{hint} Correct it or leave it out."
            )
            raise CheckpointError(msg)


# Finding.


def _find(
    saved: Sequence[Leaf],
    names: Sequence[str],
    wanted: Sequence[Leaf],
    *,
    foreign: bool,
) -> tuple[list[int], list[int | None]]:
    """Returns which saved leaves are left over, and the place of each wanted one."""
    ours = [leaf.path for leaf in wanted]
    theirs = list(names)
    if foreign:
        ours, theirs = _without_flax(ours), _without_flax(theirs)
    by_name: dict[str, list[int]] = {}
    for at, name in enumerate(theirs):
        by_name.setdefault(name, []).append(at)
    places: list[int | None] = []
    for leaf, name in zip(wanted, ours, strict=True):
        found = by_name.get(name, [])
        if len(found) > 1:  # `{"a/b": x}` beside `{"a": {"b": y}}`
            found = [at for at in found if saved[at].parts == leaf.parts]
        places.append(found[0] if len(found) == 1 else None)
    taken = set(places)
    return [at for at in range(len(saved)) if at not in taken], places


def _without_flax(paths: Sequence[str]) -> list[str]:
    """Returns paths without what versions of Flax write differently, if distinct."""
    bare = [path.removeprefix("params/") for path in paths]
    paths = bare if len(set(bare)) == len(bare) else list(paths)
    siblings: dict[str, int] = {}
    for path in paths:
        above = path
        while above:
            above = above.rpartition("/")[0]
            siblings[above] = siblings.get(above, 0) + 1
    return [
        path.removesuffix("/value")
        if siblings.get(path.removesuffix("/value")) == 1
        else path
        for path in paths
    ]


# Dtypes.


class _Targets:
    """The dtypes that were asked for."""

    def __init__(self, dtype: Dtypes, wanted: Sequence[Leaf]) -> None:
        self._one: Any = None
        self._by_path: dict[str, Any] = {}
        if isinstance(dtype, Mapping):
            named = {pattern: as_dtype(one) for pattern, one in dtype.items()}
            paths = [leaf.path for leaf in wanted]
            self._by_path = by_pattern(named, paths, "dtype")
        elif dtype is not None:
            self._one = as_dtype(dtype)

    def of(self, leaf: Leaf) -> Any:
        """Returns the dtype that is asked for a leaf, or None."""
        if is_number(leaf.dtype):
            return None
        if self._one is not None and kind(self._one) == kind(leaf.dtype):
            return self._one
        return self._by_path.get(leaf.path)


def is_number(dtype: Any) -> bool:
    """Tells whether a leaf is a Python number, which has no dtype of its own."""
    # By identity: NumPy's float64 equals float.
    return any(dtype is one for one in (bool, int, float, complex))


def _fits(saved: Any, wanted: Any, target: Any) -> bool:
    if is_number(wanted) or is_number(saved):
        return kind(saved) == kind(wanted)
    if target is None:
        return saved == wanted
    return kind(saved) == kind(target) == kind(wanted)


def as_dtype(dtype: Any) -> Any:
    """Returns a dtype that arrays can have.

    Raises:
        CheckpointError: If it is none.
    """
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not _jax.is_array_dtype(found):
        near = did_you_mean(dtype, ["bfloat16", "float16", "float32", "float64"])
        msg = f"dtype= takes a dtype of numbers, and got {dtype!r}.{near}"
        raise CheckpointError(msg)
    return found


# What is wrong.


def _check_allowed(
    diff: RestoreDiff,
    allowed: Mapping[str, re.Pattern[str]],
    *,
    partial: bool,
    foreign: bool,
    what: str,
) -> None:
    def ok(path: str) -> bool:
        return path in allowed or any(one.search(path) for one in allowed.values())

    wrong = RestoreDiff(
        () if partial else tuple(path for path in diff.missing if not ok(path)),
        () if partial else tuple(path for path in diff.extra if not ok(path)),
        tuple(one for one in diff.shapes if not ok(one.path)),
        tuple(one for one in diff.dtypes if not ok(one.path)),
        diff.arrays,
    )
    if not wrong:
        return
    advice = [_ADVICE[name] for name in _ADVICE if getattr(wrong, name)]
    if foreign and any(map(_is_turned, wrong.shapes)):
        advice.append("transpose={pattern: (1, 0)} puts dims in another order.")
    msg = (
        f"{what} does not fit the state that is wanted: {wrong.summary()}.\n"
        f"{wrong.table(_SHOWN)}\n{' '.join(dict.fromkeys(advice))}"
    )
    raise RestoreDiffError(msg, diff)


_PARTIAL = (
    "rename={pattern: replacement} gives saved arrays other names; partial=True keeps "
    "what is missing as it is and leaves out what is extra, and allow=[pattern] does "
    "so for some."
)
_ADVICE = {
    "missing": _PARTIAL,
    "extra": _PARTIAL,
    "shapes": "allow=[pattern] keeps arrays of another shape as they are.",
    "dtypes": (
        "dtype= asks for another dtype of the same kind; floating point never becomes "
        "integer."
    ),
}


def _is_turned(change: Change) -> bool:
    return sorted(change.saved.shape) == sorted(change.wanted.shape)


def _nothing(diff: RestoreDiff, what: str) -> str:
    return (
        f"nothing of {what} has a place in the state that is wanted: {diff.summary()}."
        f"\n{diff.table(_SHOWN)}\nrename={{pattern: replacement}} gives saved arrays "
        "other names."
    )
