"""Which saved array belongs to which array of the state, and what does not fit.

Pure functions: names, shapes and dtypes in; pairs and differences out. No file is
opened here, so that every mismatch is known before any array is read. Patterns are
regular expressions for `re.search`; one that matches nothing is an error, since it is
nearly always a typo, and of several that match a path the first one counts.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from meshlayout import _checks, _jax
from meshlayout._annotations import DType, PyTree
from meshlayout.checkpoint.difference import ArraySpec, Change, RestoreDiff, is_number
from meshlayout.checkpoint.tree import Target
from meshlayout.errors import CheckpointError, RestoreDiffError
from meshlayout.layout_map import LayoutMap
from meshlayout.layout_map.report import nearest_paths


# How many rows of a difference an error shows; the rest is counted.
_SHOWN = 40

_ADVICE = (
    "rename={pattern: replacement} gives saved arrays other names. partial=True keeps "
    "the values of missing arrays and ignores extra ones; partial=[pattern] leaves all "
    "that it matches as it is. dtype= asks for another dtype of the same kind."
)


@dataclass(frozen=True)
class Request:
    """The arguments of a restore; see `load_arrays` and `Checkpointer.restore`."""

    like: PyTree = None
    layouts: LayoutMap | None = None
    rename: Mapping[str, str] | None = None
    transpose: Mapping[str, Sequence[int]] | None = None
    partial: bool | str | Sequence[str] = False
    dtype: DTypeLike | None = None
    separator: str = "/"


def match(
    saved: Mapping[str, ArraySpec],
    targets: Sequence[Target],
    request: Request,
    *,
    is_foreign: bool = False,
    source: str = "what was saved",
) -> tuple[list[Target], RestoreDiff]:
    """Returns the targets, each with its saved array, and all differences.

    The saved arrays come by their names after renaming. If another library wrote them,
    a leading `params/` and a trailing `/value`, which some versions of Flax write and
    others do not, are ignored, and PRNG keys may be saved as their words.
    """
    names, paths = [*saved], [target.spec.path for target in targets]
    plain_names, plain_paths = names, paths
    if is_foreign:
        plain_names, plain_paths = _without_flax(names), _without_flax(paths)
    left = _left_as_they_are(request.partial, {*names, *plain_names, *paths})
    extra: dict[str, ArraySpec] = {}
    candidates: dict[str, list[str]] = {}
    for plain, name in zip(plain_names, names, strict=True):
        if not left & {plain, name}:
            extra[name] = saved[name]
            candidates.setdefault(plain, []).append(name)
    requested = _requested(request.dtype, targets)
    matched: list[Target] = []
    missing: dict[str, ArraySpec] = {}
    shapes: list[Change] = []
    dtypes: list[Change] = []
    for target, plain in zip(targets, plain_paths, strict=True):
        spec = expected = target.spec
        matched.append(target)
        if left & {plain, spec.path}:
            continue
        # With two candidates it is unclear which is meant: both are reported as extra.
        if len(candidates.get(plain, ())) != 1:
            missing[spec.path] = spec
            continue
        partner = extra.pop(candidates[plain][0])
        if is_foreign and spec.is_key:
            expected = replace(spec, shape=spec.host_shape, dtype=spec.host_dtype)
        # Keys of another generator may also have another number of words: report the
        # generator, which is the cause.
        has_dtype = _fits(partner.dtype, expected.dtype, requested.get(spec.path))
        is_key = expected.is_key or partner.is_key
        if partner.shape != expected.shape and (has_dtype or not is_key):
            shapes.append(Change(spec.path, partner, spec))
        elif not has_dtype:
            dtypes.append(Change(spec.path, partner, spec))
        else:
            dtype = spec.host_dtype if spec.is_key else spec.dtype
            dtype = requested.get(spec.path, dtype)
            if is_number(partner.dtype) and not target.on_host:
                # A Python number becomes an array of JAX's default precision.
                dtype = _jax.canonical_dtype(dtype)
            matched[-1] = replace(target, saved=partner, dtype=dtype)
    rows = tuple(missing), tuple(extra), tuple(shapes), tuple(dtypes)
    diff = RestoreDiff(*rows, extra | missing)
    wrong = replace(diff, missing=(), extra=()) if request.partial is True else diff
    # If nothing at all is restored, names are wrong, and a training would begin from
    # scratch unnoticed.
    if wrong or (targets and saved and not any(target.saved for target in matched)):
        wrong = wrong or diff
        msg = (
            f"{source} does not fit the state to restore: {wrong.summary()}.\n"
            f"{wrong.table(_SHOWN)}\n{_ADVICE}"
        )
        raise RestoreDiffError(msg, diff)
    return matched, diff


def _without_flax(paths: Sequence[str]) -> Sequence[str]:
    """Returns paths without what differs between versions of Flax, if that is clear."""
    for strip in (
        lambda path: path.removeprefix("params/"),
        lambda path: path.removesuffix("/value"),
    ):
        bare = [*map(strip, paths)]
        paths = bare if len({*bare}) == len(bare) else paths
    return paths


# Patterns.


def _compiled(
    option: str, patterns: Iterable[Any], paths: Collection[str]
) -> list[re.Pattern[str]]:
    """Returns an option's patterns, each of which must match a path."""
    regexes = [_checks.pattern(option, p, error=CheckpointError) for p in patterns]
    for regex in regexes:
        if not any(map(regex.search, paths)):
            near = nearest_paths([regex.pattern], paths)[regex.pattern]
            hint = f" Nearest: {', '.join(near)}." if near else ""
            msg = (
                f"the pattern {regex.pattern!r} of {option}= matches none of the "
                f"{len(paths):,} paths.{hint} Correct it or remove it."
            )
            raise CheckpointError(msg)
    return regexes


def _left_as_they_are(partial: Any, paths: Collection[str]) -> set[str]:
    """Returns the paths that the patterns of `partial=` match."""
    if isinstance(partial, (bool, np.bool_)):
        return set()
    patterns = [partial] if isinstance(partial, str) else partial
    if not isinstance(patterns, (list, tuple)):
        msg = (
            "partial must be True, False, or patterns of the paths to leave as they "
            f"are, got {_checks.shown(partial)}."
        )
        raise CheckpointError(msg)
    regexes = _compiled("partial", patterns, paths)
    return {path for path in paths if any(regex.search(path) for regex in regexes)}


def permutations(
    transpose: Mapping[str, Sequence[int]] | None, paths: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """Returns the permutation of dims for each array that has one, by its path."""
    by_path: dict[str, tuple[int, ...]] = {}
    for regex, dims in _pairs("transpose", transpose, paths):
        if not isinstance(dims, (list, tuple)) or {*map(type, dims)} - {int}:
            msg = f"transpose= takes dims such as (1, 0), got {_checks.shown(dims)}."
            raise CheckpointError(msg)
        for path in filter(regex.search, paths):
            by_path.setdefault(path, tuple(dims))
    return by_path


def renamed(
    paths: Sequence[str], rename: Mapping[str, str] | None, old: str, new: str
) -> list[str]:
    r"""Returns paths under their new names, with another separator of their keys.

    Example:
        >>> renamed(["h.0.w", "h.1.w"], {r"h\.(\d+)": r"layers/\1"}, ".", "/")
        ['layers/0/w', 'layers/1/w']
    """
    table = _pairs("rename", rename, paths)
    path_by_name: dict[str, str] = {}
    for path in paths:
        pairs = (pair for pair in table if pair[0].search(path))
        regex, replacement = next(pairs, (re.compile("$"), ""))
        try:
            name = regex.sub(replacement, path).replace(old, new)
        except (re.error, IndexError, TypeError) as error:
            msg = f"rename= replaces {regex.pattern!r} by {replacement!r}: {error}."
            raise CheckpointError(msg) from None
        if path_by_name.setdefault(name, path) != path:
            msg = (
                f"the saved arrays {path_by_name[name]!r} and {path!r} both become "
                f"{name!r}. Change rename= so that they differ."
            )
            raise CheckpointError(msg)
    return list(path_by_name)


def _pairs(
    option: str, table: Any, paths: Sequence[str]
) -> list[tuple[re.Pattern[str], Any]]:
    """Returns the patterns of an option that is a dict, each with its value."""
    table = {} if table is None else table
    if not isinstance(table, Mapping):
        msg = f"{option}= must be a dict from patterns, got {_checks.shown(table)}."
        raise CheckpointError(msg)
    return [*zip(_compiled(option, table, paths), table.values(), strict=True)]


# Dtypes.


def _requested(
    dtype: DTypeLike | None, targets: Iterable[Target]
) -> dict[str, np.dtype[Any]]:
    """Returns the dtype of `dtype=` for every array of its kind, by path."""
    if dtype is None:
        return {}
    try:
        value = jnp.dtype(dtype).newbyteorder("=")
        is_dtype = _jax.is_array_dtype(value)
    except (TypeError, ValueError):
        value, is_dtype = np.dtype(bool), False
    specs = [target.spec for target in targets if not is_number(target.spec.dtype)]
    kinds = {spec.path: _kind_of(spec.dtype) for spec in specs}
    if not is_dtype or (kinds and _kind_of(value) not in kinds.values()):
        msg = (
            f"dtype= must be a dtype of {' or '.join(sorted({*kinds.values()}))} "
            f"arrays, as are in the state, got {_checks.shown(dtype)}."
        )
        raise CheckpointError(msg)
    return {path: value for path, kind in kinds.items() if kind == _kind_of(value)}


def _kind_of(dtype: DTypeLike) -> str:
    """Returns the kind of a dtype's values; arrays are never cast to another kind."""
    if _jax.is_extended(dtype):
        return "key"
    for kind in (np.bool_, np.integer, np.floating, np.complexfloating):
        if jnp.issubdtype(dtype, kind):
            return kind.__name__.removesuffix("_")
    return str(dtype)


def _fits(saved: DType, wanted: DType, requested: DType | None) -> bool:
    if requested is None and not is_number(wanted) and not is_number(saved):
        return saved == wanted
    kinds = {_kind_of(saved), _kind_of(wanted)}
    return len(kinds if requested is None else {*kinds, _kind_of(requested)}) == 1
