"""Which saved array belongs to which array of the state, and what does not fit.

Pure functions: names, shapes and dtypes in; pairs and differences out. No file is
opened here, so that every mismatch is known before any array is read. Patterns are
regular expressions for `re.search`; one that matches nothing is an error, since it is
nearly always a typo, and of several that match a path the first one counts.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from meshlayout import _checks
from meshlayout._annotations import DType, PyTree
from meshlayout.checkpoint.difference import ArraySpec, Change, RestoreDiff, is_number
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
    wanted: Sequence[ArraySpec],
    request: Request,
    source: str,
) -> tuple[list[tuple[str, DType] | None], RestoreDiff]:
    """Returns a saved array's name and the dtype of the result for each wanted array.

    Or None, where it is to keep its value; and all differences. The saved arrays come
    by their names after renaming. A leading `params/` and a trailing `/value`, which
    some versions of Flax write and others do not, are ignored, and PRNG keys may be
    saved as their words.
    """
    names, paths = [*saved], [spec.path for spec in wanted]
    name_of = dict(zip(_without_flax(names), names, strict=True))
    path_of = dict(zip(_without_flax(paths), paths, strict=True))
    # Patterns mean names that the user sees, on either side.
    left = _left_as_they_are(request.partial, {*names, *paths})
    stays = {x for x in {*name_of, *path_of} if left & {name_of.get(x), path_of.get(x)}}
    rest = {path: x for path, x in name_of.items() if path not in stays}
    dtype, kind = _requested(request.dtype, wanted)
    pairs: list[tuple[str, DType] | None] = []
    missing: dict[str, ArraySpec] = {}
    shapes: list[Change] = []
    dtypes: list[Change] = []
    for spec, path in zip(wanted, path_of, strict=True):
        pairs.append(None)
        if path in stays:
            continue
        if path not in rest:
            missing[spec.path] = spec
            continue
        name, expected = rest.pop(path), spec
        partner = saved[name]
        if spec.is_key and not partner.is_key:
            expected = replace(spec, shape=spec.host_shape, dtype=spec.host_dtype)
        is_cast = kind == _kind_of(spec.dtype) and not is_number(spec.dtype)
        if not _fits(partner.dtype, expected.dtype, is_cast=is_cast):
            dtypes.append(Change(spec.path, partner, spec))
        elif partner.shape != expected.shape:
            shapes.append(Change(spec.path, partner, spec))
        else:
            own = spec.host_dtype if spec.is_key else spec.dtype
            pairs[-1] = name, dtype if is_cast else own
    extra = {name: saved[name] for name in rest.values()}
    rows = tuple(missing), tuple(extra), tuple(shapes), tuple(dtypes)
    diff = RestoreDiff(*rows, extra | missing)
    wrong = replace(diff, missing=(), extra=()) if request.partial is True else diff
    # If nothing at all is restored, names are wrong, and a training would begin from
    # scratch unnoticed.
    if wrong or (saved and not any(pairs)):
        wrong = wrong or diff
        msg = (
            f"{source} does not fit the state to restore: {wrong.summary()}.\n"
            f"{wrong.table(_SHOWN)}\n{_ADVICE}"
        )
        raise RestoreDiffError(msg, diff)
    return pairs, diff


def _without_flax(paths: Sequence[str]) -> Sequence[str]:
    """Returns paths without what differs between versions of Flax, if that is clear."""
    bare = [path.removeprefix("params/").removesuffix("/value") for path in paths]
    return bare if len({*bare}) == len(bare) else paths


# Patterns.


def renamed(
    paths: Sequence[str], rename: Mapping[str, str] | None, old: str, new: str
) -> list[str]:
    r"""Returns paths under their new names, with another separator of their keys.

    Example:
        >>> renamed(["h.0.w", "h.1.w"], {r"h\.(\d+)": r"layers/\1"}, ".", "/")
        ['layers/0/w', 'layers/1/w']
    """
    table = _table("rename", rename, paths)
    path_by_name: dict[str, str] = {}
    for path in paths:
        names = (regex.sub(x, path) for regex, x in table if regex.search(path))
        name = next(names, path).replace(old, new)
        if path_by_name.setdefault(name, path) != path:
            msg = (
                f"the saved arrays {path_by_name[name]!r} and {path!r} both become "
                f"{name!r}. Change rename= so that they differ."
            )
            raise CheckpointError(msg)
    return list(path_by_name)


def permutations(
    transpose: Mapping[str, Sequence[int]] | None, paths: Sequence[str]
) -> dict[str, Sequence[int]]:
    """Returns the permutation of dims for each array that has one, by its path."""
    by_path: dict[str, Sequence[int]] = {}
    for regex, dims in _table("transpose", transpose, paths):
        for path in filter(regex.search, paths):
            by_path.setdefault(path, dims)
    return by_path


def _left_as_they_are(partial: Any, paths: Collection[str]) -> set[str]:
    """Returns the paths that the patterns of `partial=` match."""
    if isinstance(partial, bool):
        return set()
    patterns = [partial] if isinstance(partial, str) else partial
    if not isinstance(patterns, (list, tuple)):
        msg = (
            "partial must be True, False, or patterns of the paths to leave as they "
            f"are, got {_checks.shown(partial)}."
        )
        raise CheckpointError(msg)
    table = _table("partial", dict.fromkeys(patterns), paths)
    return {path for path in paths if any(regex.search(path) for regex, _ in table)}


def _table(
    option: str, table: Any, paths: Collection[str]
) -> list[tuple[re.Pattern[str], Any]]:
    """Returns an option's patterns with their values; each must match a path."""
    if not isinstance(table, Mapping | None):
        msg = f"{option}= must be a dict from patterns, got {_checks.shown(table)}."
        raise CheckpointError(msg)
    pairs: list[tuple[re.Pattern[str], Any]] = []
    for pattern, value in (table or {}).items():
        regex = _checks.pattern(option, pattern, error=CheckpointError)
        if not any(map(regex.search, paths)):
            near = nearest_paths([regex.pattern], paths)[regex.pattern]
            hint = f" Nearest: {', '.join(near)}." if near else ""
            msg = (
                f"the pattern {regex.pattern!r} of {option}= matches none of the "
                f"{len(paths):,} paths.{hint} Correct it or remove it."
            )
            raise CheckpointError(msg)
        pairs.append((regex, value))
    return pairs


# Dtypes.


def _requested(
    dtype: DTypeLike | None, wanted: Sequence[ArraySpec]
) -> tuple[Any, str | None]:
    """Returns the dtype of `dtype=`, and the kind of the arrays that it is for."""
    if dtype is None:
        return None, None
    kinds = {_kind_of(spec.dtype) for spec in wanted if not is_number(spec.dtype)}
    try:
        value = jnp.dtype(dtype).newbyteorder("=")
    except (TypeError, ValueError):
        value = None
    if value is None or _kind_of(value) not in kinds:
        msg = (
            f"dtype= must be a dtype of {' or '.join(sorted(kinds))} arrays, as are in "
            f"the state, got {_checks.shown(dtype)}."
        )
        raise CheckpointError(msg)
    return value, _kind_of(value)


def _kind_of(dtype: DType) -> str:
    """Returns the kind of a dtype's values; arrays are never cast to another kind."""
    for kind in (np.bool_, np.integer, np.floating, np.complexfloating):
        if jnp.issubdtype(dtype, kind):
            return kind.__name__.removesuffix("_")
    return str(dtype)


def _fits(saved: DType, wanted: DType, *, is_cast: bool) -> bool:
    if is_cast or is_number(saved) or is_number(wanted):
        return _kind_of(saved) == _kind_of(wanted)
    return saved == wanted
