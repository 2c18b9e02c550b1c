"""Which saved array belongs to which array of the state, and what does not fit.

Pure: names, shapes and dtypes in; pairs and differences out. No file is opened here.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from meshlayout import _jax
from meshlayout._annotations import DType
from meshlayout.checkpoint.difference import ArraySpec, Change, RestoreDiff, is_number
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

_KINDS = {
    "bool": np.bool_,
    "integer": np.integer,
    "floating": np.floating,
    "complex": np.complexfloating,
}

# Floats of more than 64 bits, where NumPy has them: JAX has none.
_NOT_IN_JAX = {np.dtype(np.longdouble), np.dtype(np.clongdouble)} - {
    np.dtype(np.float64),
    np.dtype(np.complex128),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A saved array and the place it goes to.

    Attributes:
        wanted: The array in the state.
        saved: The array that was saved, under the name that it was saved by.
        dtype: The dtype of the result.
    """

    wanted: ArraySpec
    saved: ArraySpec
    dtype: Any


@dataclass(frozen=True)
class Matched:
    """What belongs together.

    Attributes:
        pairs: What is restored, in the order of the state.
        kept: What keeps its value in the state.
        unused: What was saved and is not read.
        diff: All differences, the allowed ones too.
    """

    pairs: tuple[Pair, ...]
    kept: tuple[ArraySpec, ...]
    unused: tuple[ArraySpec, ...]
    diff: RestoreDiff


def match(
    saved: Sequence[ArraySpec],
    wanted: Sequence[ArraySpec],
    *,
    rename: Mapping[str, str] | None = None,
    partial: bool = False,
    allow: str | Iterable[str] = (),
    dtype: Dtypes = None,
    separator: str = "/",
    is_foreign: bool = False,
    source: str = "what was saved",
) -> Matched:
    r"""Matches every array of a state with its saved array.

    Args:
        saved: What was saved.
        wanted: The arrays of the state; paths as in `LayoutMap`.
        rename: `{pattern: replacement}`, applied to the saved paths as by `re.sub`.
            A path may be changed by one pattern only.
        partial: Whether arrays may be missing, which then keep their values, and
            extra, which are then not read.
        allow: Patterns of paths that may differ in any way: missing or extra, or of
            another shape or dtype; they then keep their values.
        dtype: A dtype for every array of its kind (floating, integer, ...), or
            `{pattern: dtype}`. All others must have been saved in the state's dtype.
        separator: What stands between the keys of a saved path, after renaming.
        is_foreign: Whether other libraries wrote it: a leading `params/` and a
            `/value` at the end, which some versions of Flax write and others do not,
            are then ignored when comparing, and PRNG keys may be saved as their words.
        source: What holds the saved arrays, for messages.

    Raises:
        CheckpointError: If a pattern is wrong or matches nothing, or two saved paths
            become one.
        RestoreDiffError: If what differs is not allowed; it holds the difference.

    Example:
        >>> old = [ArraySpec("net.w", (), (2, 3), np.dtype("float32"))]
        >>> new = [ArraySpec("model/w", (), (2, 3), np.dtype("float32"))]
        >>> matched = match(old, new, rename={r"^net\.": "model/"})
        >>> [(pair.wanted.path, pair.saved.path) for pair in matched.pairs]
        [('model/w', 'net.w')]
    """
    names = [leaf.path for leaf in saved]
    if rename is not None or separator != "/":
        names = renamed(names, rename, separator)
    unused, partners = _find(saved, names, wanted, is_foreign=is_foreign)
    allowed: Mapping[str, re.Pattern[str]] = {}
    if allow != ():
        patterns = [allow] if isinstance(allow, str) else allow
        allowed = compile_patterns("allow", patterns)
        check_used(allowed, [*names, *(leaf.path for leaf in wanted)], "allow")
    requested = _RequestedDtypes(dtype, wanted)
    pairs: list[Pair] = []
    kept: list[ArraySpec] = []
    missing: dict[str, str] = {}
    changes: dict[str, list[Change]] = {"shape": [], "dtype": []}
    for leaf, position in zip(wanted, partners, strict=True):
        if position is None:
            missing[leaf.path] = leaf.array
            kept.append(leaf)
            continue
        partner = saved[position]
        target_dtype = requested.of(leaf)
        expected = leaf
        if is_foreign and leaf.is_key and not partner.is_key:
            expected = dataclasses.replace(leaf, **key_words(leaf.dtype, leaf.shape))
        # Of other generators the number of words differs, which says less.
        is_key = expected.is_key or partner.is_key
        if partner.shape != expected.shape and not is_key:
            changes["shape"].append(Change(leaf.path, partner, leaf))
            kept.append(leaf)
        elif not _fits(partner.dtype, expected.dtype, target_dtype):
            changes["dtype"].append(Change(leaf.path, partner, leaf))
            kept.append(leaf)
        elif partner.shape != expected.shape:
            changes["shape"].append(Change(leaf.path, partner, leaf))
            kept.append(leaf)
        else:
            result = expected.dtype if target_dtype is None else target_dtype
            pairs.append(Pair(leaf, partner, result))
    extra = {names[position]: saved[position] for position in unused}
    diff = RestoreDiff(
        tuple(missing),
        tuple(extra),
        tuple(changes["shape"]),
        tuple(changes["dtype"]),
        missing | {path: leaf.array for path, leaf in extra.items()},
    )
    _check_allowed(diff, allowed, partial=partial, is_foreign=is_foreign, source=source)
    requested.check_used(wanted)
    if wanted and saved and not pairs and diff:
        raise RestoreDiffError(_nothing_fits(diff, source), diff)
    return Matched(tuple(pairs), tuple(kept), tuple(extra.values()), diff)


def kind_of(dtype: DTypeLike) -> str:
    """Returns the kind of values a dtype holds; arrays are never cast across kinds.

    Example:
        >>> kind_of("bfloat16"), kind_of("int8"), kind_of("bool")
        ('floating', 'integer', 'bool')
    """
    if _jax.is_extended(dtype):
        return "key"
    kinds = (name for name, kind in _KINDS.items() if jnp.issubdtype(dtype, kind))
    return next(kinds, str(dtype))


def key_words(dtype: DType, shape: Sequence[int]) -> dict[str, Any]:
    """Returns the shape and the dtype of the words that PRNG keys are made of.

    Args:
        dtype: The dtype of the keys.
        shape: Their shape.
    """
    return {"shape": (*shape, *_word_shape(dtype)), "dtype": np.dtype("uint32")}


@functools.lru_cache(maxsize=16)
def key_dtype(impl: str | None) -> Any:
    """Returns the dtype of the PRNG keys of a generator; None if JAX has no such one.

    Args:
        impl: The generator's name, as `"threefry2x32"`.
    """
    try:
        return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
    except (TypeError, ValueError):
        return None


@functools.lru_cache(maxsize=16)
def _word_shape(dtype: DType) -> tuple[int, ...]:
    key = jax.ShapeDtypeStruct((), dtype)
    return jax.eval_shape(jax.random.key_data, key).shape


# Finding.


def _find(
    saved: Sequence[ArraySpec],
    names: Sequence[str],
    wanted: Sequence[ArraySpec],
    *,
    is_foreign: bool,
) -> tuple[list[int], list[int | None]]:
    """Returns the saved leaves that are left over, and the one for each wanted leaf."""
    wanted_names = [leaf.path for leaf in wanted]
    saved_names = list(names)
    if is_foreign:
        wanted_names = _without_flax(wanted_names)
        saved_names = _without_flax(saved_names)
    by_name: dict[str, list[int]] = {}
    for position, name in enumerate(saved_names):
        by_name.setdefault(name, []).append(position)
    partners: list[int | None] = []
    for leaf, name in zip(wanted, wanted_names, strict=True):
        positions = by_name.get(name, [])
        if len(positions) > 1:  # `{"a/b": x}` next to `{"a": {"b": y}}`
            positions = [i for i in positions if saved[i].parts == leaf.parts]
        partners.append(positions[0] if len(positions) == 1 else None)
    used = set(partners)
    return [i for i in range(len(saved)) if i not in used], partners


def _without_flax(paths: Sequence[str]) -> list[str]:
    """Returns paths without what versions of Flax write differently, if distinct."""
    bare = [path.removeprefix("params/") for path in paths]
    paths = bare if len(set(bare)) == len(bare) else list(paths)
    num_below: dict[str, int] = {}
    for path in paths:
        parent = path
        while parent:
            parent = parent.rpartition("/")[0]
            num_below[parent] = num_below.get(parent, 0) + 1
    return [
        path.removesuffix("/value")
        if num_below.get(path.removesuffix("/value")) == 1
        else path
        for path in paths
    ]


# Dtypes.


class _RequestedDtypes:
    """The dtypes that were asked for with `dtype=`."""

    def __init__(self, dtype: Dtypes, wanted: Sequence[ArraySpec]) -> None:
        self._for_kind: Any = None
        self._by_path: dict[str, Any] = {}
        if isinstance(dtype, Mapping):
            by_name = {pattern: as_dtype(value) for pattern, value in dtype.items()}
            paths = [leaf.path for leaf in wanted]
            self._by_path = by_pattern(by_name, paths, "dtype")
        elif dtype is not None:
            self._for_kind = as_dtype(dtype)

    def of(self, leaf: ArraySpec) -> np.dtype[Any] | None:
        """Returns the dtype that is asked for a leaf, or None."""
        if is_number(leaf.dtype):
            return None
        if self._for_kind is not None and kind_of(self._for_kind) == kind_of(
            leaf.dtype
        ):
            return self._for_kind
        return self._by_path.get(leaf.path)

    def check_used(self, wanted: Sequence[ArraySpec]) -> None:
        """Raises if no array of the state is of the kind of one dtype for all."""
        if self._for_kind is None:
            return
        kinds = {kind_of(leaf.dtype) for leaf in wanted if not is_number(leaf.dtype)}
        if kinds and kind_of(self._for_kind) not in kinds:
            msg = (
                f"dtype={str(self._for_kind)!r} is for {kind_of(self._for_kind)} "
                f"arrays, and the state has {' and '.join(sorted(kinds))} ones: no "
                "array is cast to another kind."
            )
            raise CheckpointError(msg)


def _fits(saved: DType, wanted: DType, requested: DType) -> bool:
    if is_number(wanted) or is_number(saved):
        return kind_of(saved) == kind_of(wanted)
    if requested is None:
        return saved == wanted
    return kind_of(saved) == kind_of(requested) == kind_of(wanted)


def as_dtype(dtype: DTypeLike | None) -> np.dtype[Any]:
    """Returns a dtype that arrays can have.

    Raises:
        CheckpointError: If it is not one.
    """
    try:
        found = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not _jax.is_array_dtype(found) or found in _NOT_IN_JAX:
        near = did_you_mean(dtype, ["bfloat16", "float16", "float32", "float64"])
        msg = f"dtype= must be a dtype of numbers, got {dtype!r}.{near}"
        raise CheckpointError(msg)
    return found


# What is wrong.


_PARTIAL = (
    "rename={pattern: replacement} gives saved arrays other names; partial=True keeps "
    "the values of what is missing and ignores what is extra, and allow=[pattern] does "
    "so for some."
)
_ADVICE = {
    "missing": _PARTIAL,
    "extra": _PARTIAL,
    "shapes": "allow=[pattern] keeps the values of arrays of another shape.",
    "dtypes": (
        "dtype= asks for another dtype of the same kind; floating point never becomes "
        "integer."
    ),
}


def _check_allowed(
    diff: RestoreDiff,
    allowed: Mapping[str, re.Pattern[str]],
    *,
    partial: bool,
    is_foreign: bool,
    source: str,
) -> None:
    def is_allowed(path: str) -> bool:
        return path in allowed or any(regex.search(path) for regex in allowed.values())

    wrong = RestoreDiff(
        () if partial else tuple(p for p in diff.missing if not is_allowed(p)),
        () if partial else tuple(p for p in diff.extra if not is_allowed(p)),
        tuple(change for change in diff.shapes if not is_allowed(change.path)),
        tuple(change for change in diff.dtypes if not is_allowed(change.path)),
        diff.arrays,
    )
    if not wrong:
        return
    keys = [change for change in wrong.dtypes if change.wanted.is_key]
    advice = [
        text
        for name, text in _ADVICE.items()
        if getattr(wrong, name) and (name != "dtypes" or len(keys) < len(wrong.dtypes))
    ]
    if is_foreign and any(map(_is_transposed, wrong.shapes)):
        advice.append("transpose={pattern: (1, 0)} puts dims in another order.")
    if keys and keys[0].saved.is_key:
        impl = _jax.key_impl(keys[0].saved.dtype)
        advice.append(
            "A PRNG key is restored for the generator that it was saved for: make the "
            f"state with jax.random.key(seed, impl={impl!r})."
        )
    elif keys:
        advice.append(
            "A PRNG key is restored from a PRNG key alone; allow=[pattern] keeps the "
            "state's own."
        )
    msg = (
        f"{source} does not fit the state to restore: {wrong.summary()}.\n"
        f"{wrong.table(_SHOWN)}\n{' '.join(dict.fromkeys(advice))}"
    )
    raise RestoreDiffError(msg, diff)


def _is_transposed(change: Change) -> bool:
    return sorted(change.saved.shape) == sorted(change.wanted.shape)


def _nothing_fits(diff: RestoreDiff, source: str) -> str:
    return (
        f"nothing in {source} has a place in the state to restore: {diff.summary()}."
        f"\n{diff.table(_SHOWN)}\nrename={{pattern: replacement}} gives saved arrays "
        "other names."
    )
