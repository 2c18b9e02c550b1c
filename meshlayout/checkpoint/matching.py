"""Which saved array belongs to which array that is wanted, and what does not fit.

Pure: names, shapes and dtypes in; pairs and differences out. No file is opened here.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from meshlayout import _jax
from meshlayout.checkpoint.difference import Change, Leaf, RestoreDiff
from meshlayout.checkpoint.patterns import (
    by_pattern,
    check_used,
    compile_patterns,
    renamed,
)
from meshlayout.errors import CheckpointError, RestoreDiffError, did_you_mean


Dtypes: TypeAlias = DTypeLike | Mapping[str, DTypeLike] | None
"""A dtype for every array of its kind, or one for each pattern of paths."""

# Rows of a difference that an error shows; the rest is counted.
_SHOWN = 40


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
    allowed = compile_patterns("allow", [allow] if isinstance(allow, str) else allow)
    check_used(allowed, [*names, *(leaf.path for leaf in wanted)], "allow")
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
    targets.check_used(wanted)
    if wanted and saved and not pairs and diff:
        raise RestoreDiffError(_nothing(diff, what), diff)
    return Matched(tuple(pairs), tuple(kept), tuple(extra.values()), diff)


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

    def check_used(self, wanted: Sequence[Leaf]) -> None:
        """Raises if nothing that is wanted is of the kind of one dtype for all."""
        if self._one is None:
            return
        kinds = {kind(leaf.dtype) for leaf in wanted if not is_number(leaf.dtype)}
        if kinds and kind(self._one) not in kinds:
            msg = (
                f"dtype={str(self._one)!r} is for {kind(self._one)} arrays, and the "
                f"state that is wanted has {' and '.join(sorted(kinds))} ones: no "
                "array is cast to another kind."
            )
            raise CheckpointError(msg)


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
    if found is None or not _jax.is_array_dtype(found) or found in _NOT_OF_JAX:
        near = did_you_mean(dtype, ["bfloat16", "float16", "float32", "float64"])
        msg = f"dtype= takes a dtype of numbers, and got {dtype!r}.{near}"
        raise CheckpointError(msg)
    return found


# Floats of more than 64 bits, where NumPy has them.
_NOT_OF_JAX = {np.dtype(np.longdouble), np.dtype(np.clongdouble)} - {
    np.dtype(np.float64),
    np.dtype(np.complex128),
}


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
