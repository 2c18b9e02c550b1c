"""Which saved array belongs to which array of the state, and what does not fit.

Pure functions: names, shapes and dtypes in; pairs and differences out. No file is
opened here, so that every mismatch is known before any array is read. Patterns are
regular expressions for `re.search`; one that matches nothing is an error, since it is
nearly always a typo, and of several that match a path the first one counts.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from meshlayout import _checks, _jax
from meshlayout._annotations import DType, PyTree
from meshlayout.checkpoint.difference import ArraySpec, Change, RestoreDiff, is_number
from meshlayout.checkpoint.tree import Target
from meshlayout.errors import CheckpointError, RestoreDiffError, did_you_mean
from meshlayout.layout_map import LayoutMap
from meshlayout.layout_map.report import nearest_paths


# How many rows of a difference an error shows; the rest is counted.
_SHOWN = 40

_KINDS = {
    "bool": np.bool_,
    "integer": np.integer,
    "floating": np.floating,
    "complex": np.complexfloating,
}

_RENAME = "rename={pattern: replacement} gives saved arrays other names"


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
    """Matches every array of a state with its saved array.

    Args:
        saved: The saved arrays, by their names after renaming.
        targets: The arrays of the state, with paths as in `LayoutMap`.
        request: The allowed differences, and the requested dtype.
        is_foreign: Whether another library wrote the arrays. A leading `params/` and a
            trailing `/value`, which some versions of Flax write and others do not, are
            then ignored in comparisons, and PRNG keys may be saved as their words.
        source: The file or directory of the saved arrays, for messages.

    Returns:
        The targets, each with its saved array if it is restored; and all differences,
        including the allowed ones.

    Raises:
        CheckpointError: If an option is wrong, or a pattern matches nothing.
        RestoreDiffError: If a difference is not allowed; it holds the `RestoreDiff`.

    Example:
        >>> old = ArraySpec("net.w", (), (2, 3), np.dtype("float32"))
        >>> new = Target(ArraySpec("model/w", (), (2, 3), np.dtype("float32")))
        >>> (target,), diff = match({"model/w": old}, [new], Request())
        >>> target.spec.path, target.saved.path
        ('model/w', 'net.w')
    """
    names, paths = [*saved], [target.spec.path for target in targets]
    plain_names, plain_paths = names, paths
    if is_foreign:
        plain_names, plain_paths = _without_flax(names), _without_flax(paths)
    left = _left_as_they_are(request.partial, [*names, *paths])
    candidates: dict[str, list[str]] = {}
    for plain, name in zip(plain_names, names, strict=True):
        if not left & {plain, name}:
            candidates.setdefault(plain, []).append(name)
    requested = _requested_dtypes(request.dtype, targets)
    restored: dict[str, Target] = {}
    missing: dict[str, str] = {}
    shapes: list[Change] = []
    dtypes: list[Change] = []
    used: set[str] = set()
    for target, plain in zip(targets, plain_paths, strict=True):
        spec = expected = target.spec
        if left & {plain, spec.path}:
            continue
        # With two candidates it is unclear which is meant: both are reported as extra.
        if len(candidates.get(plain, ())) != 1:
            missing[spec.path] = spec.array
            continue
        (name,) = candidates[plain]
        used.add(name)
        partner = saved[name]
        if is_foreign and spec.is_key and not partner.is_key:
            expected = replace(spec, shape=spec.host_shape, dtype=spec.host_dtype)
        has_dtype = _fits(partner.dtype, expected.dtype, requested.get(spec.path))
        has_shape = partner.shape == expected.shape
        # Keys of another generator may also have another number of words: report the
        # generator, which is the cause.
        if not has_dtype and (has_shape or expected.is_key or partner.is_key):
            dtypes.append(Change(spec.path, partner, spec))
        elif not has_shape:
            shapes.append(Change(spec.path, partner, spec))
        else:
            dtype = _host_dtype(requested.get(spec.path, spec.dtype), target, partner)
            restored[spec.path] = replace(target, saved=partner, dtype=dtype)
    compared = [name for group in candidates.values() for name in group]
    extra = {name: saved[name] for name in compared if name not in used}
    diff = RestoreDiff(
        tuple(missing),
        tuple(extra),
        tuple(shapes),
        tuple(dtypes),
        missing | {path: spec.array for path, spec in extra.items()},
    )
    some = replace(diff, missing=(), extra=()) if request.partial is True else diff
    if some:
        msg = (
            f"{source} does not fit the state to restore: {some.summary()}.\n"
            f"{some.table(_SHOWN)}\n{_advice(some, is_foreign=is_foreign)}"
        )
        raise RestoreDiffError(msg, diff)
    _check_kind(request.dtype, requested, targets)
    # If partial= allows every difference and nothing is restored, names are wrong, and
    # a training would begin from scratch unnoticed.
    if targets and saved and not restored:
        msg = (
            f"nothing in {source} matches the state to restore: {diff.summary()}.\n"
            f"{diff.table(_SHOWN)}\n{_RENAME}."
        )
        raise RestoreDiffError(msg, diff)
    return [restored.get(target.spec.path, target) for target in targets], diff


def _without_flax(paths: Sequence[str]) -> list[str]:
    """Returns paths without the parts that differ between versions of Flax.

    A part stays where paths would otherwise coincide.
    """
    bare = [path.removeprefix("params/") for path in paths]
    paths = bare if len({*bare}) == len(bare) else list(paths)
    # `a/value` becomes `a` only if nothing else is below `a`: it may be a real name.
    num_below: dict[str, int] = {}
    for path in paths:
        parent = path
        while parent:
            parent = parent.rpartition("/")[0]
            num_below[parent] = num_below.get(parent, 0) + 1
    parents = [path.removesuffix("/value") for path in paths]
    return [
        parent if num_below.get(parent) == 1 else path
        for path, parent in zip(paths, parents, strict=True)
    ]


# Patterns.


def _compiled(
    option: str, patterns: Iterable[str], paths: Sequence[str]
) -> list[re.Pattern[str]]:
    """Returns an option's patterns, each of which must match a path."""
    regexes = [_checks.pattern(option, p, error=CheckpointError) for p in patterns]
    for regex in regexes:
        if any(map(regex.search, paths)):
            continue
        near = nearest_paths([regex.pattern], paths)[regex.pattern]
        hint = f" Nearest: {', '.join(near)}." if near else ""
        msg = (
            f"the pattern {regex.pattern!r} of {option}= matches none of the "
            f"{len(paths):,} paths.{hint} Correct it or remove it."
        )
        raise CheckpointError(msg)
    return regexes


def _left_as_they_are(partial: object, paths: Sequence[str]) -> set[str]:
    """Returns the paths that the patterns of `partial=` match."""
    if isinstance(partial, (bool, np.bool_)):
        return set()
    patterns = [partial] if isinstance(partial, (str, re.Pattern)) else partial
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
    if transpose is None:
        return {}
    if not isinstance(transpose, Mapping):
        msg = (
            "transpose= must map patterns of paths to permutations of dims, got "
            f"{_checks.shown(transpose)}. Write transpose={{r'kernel$': (1, 0)}}."
        )
        raise CheckpointError(msg)
    for pattern, dims in transpose.items():
        is_plain = isinstance(dims, (list, tuple)) and {*map(type, dims)} <= {int}
        if not is_plain or sorted(dims) != list(range(len(dims))):
            msg = (
                f"transpose= gives {pattern!r} the dims {dims!r}, which are not a "
                "permutation. Write (1, 0) to swap the dims of a matrix."
            )
            raise CheckpointError(msg)
    regexes = _compiled("transpose", transpose, paths)
    by_path: dict[str, tuple[int, ...]] = {}
    for regex, dims in zip(regexes, transpose.values(), strict=True):
        for path in filter(regex.search, paths):
            by_path.setdefault(path, tuple(dims))
    return by_path


def renamed(
    paths: Sequence[str],
    rename: Mapping[str, str] | None,
    separator: str = "/",
    new_separator: str = "/",
) -> list[str]:
    r"""Returns paths under their new names.

    Args:
        paths: The paths.
        rename: `{pattern: replacement}`, applied as by `re.sub`; the first pattern that
            matches a path changes it.
        separator: The separator between the keys of a path, after renaming.
        new_separator: The separator that replaces it.

    Raises:
        CheckpointError: If a pattern matches nothing, a replacement does not fit its
            pattern, or two paths get the same name.

    Example:
        >>> renamed(["h.0.w", "h.1.w"], {r"h\.(\d+)": r"layers/\1"}, ".")
        ['layers/0/w', 'layers/1/w']
    """
    if rename is not None and not isinstance(rename, Mapping):
        msg = (
            "rename= must map patterns of saved paths to replacements, got "
            f"{_checks.shown(rename)}. Write rename={{r'^encoder/': 'model/encoder/'}}."
        )
        raise CheckpointError(msg)
    rename = rename or {}
    for pattern, replacement in rename.items():
        if not isinstance(replacement, str):
            msg = (
                f"rename= replaces {pattern!r} by {replacement!r}, which is not a "
                "string. To leave arrays out, use partial=."
            )
            raise CheckpointError(msg)
    regexes = _compiled("rename", rename, paths)
    path_by_name: dict[str, str] = {}
    for path in paths:
        name = path
        for regex, replacement in zip(regexes, rename.values(), strict=True):
            if regex.search(path):
                name = _substituted(path, regex, replacement)
                break
        name = name.replace(separator, new_separator)
        if path_by_name.setdefault(name, path) != path:
            msg = (
                f"the saved arrays {path_by_name[name]!r} and {path!r} both become "
                f"{name!r}. Change rename= so that they differ."
            )
            raise CheckpointError(msg)
    return list(path_by_name)


def _substituted(path: str, regex: re.Pattern[str], replacement: str) -> str:
    try:
        return regex.sub(replacement, path)
    except (re.error, IndexError) as error:
        msg = (
            f"rename= replaces {regex.pattern!r} by {replacement!r}, which does not "
            f"fit the pattern: {error}. Groups are written r'\\1'."
        )
        raise CheckpointError(msg) from None


# Dtypes.


def _requested_dtypes(
    dtype: DTypeLike | None, targets: Sequence[Target]
) -> dict[str, np.dtype[Any]]:
    """Returns the dtype of `dtype=` for every array of its kind, by path."""
    if dtype is None:
        return {}
    value = _as_dtype(dtype)
    specs = [target.spec for target in targets if not is_number(target.spec.dtype)]
    return {s.path: value for s in specs if _kind_of(s.dtype) == _kind_of(value)}


def _check_kind(
    dtype: DTypeLike | None, requested: Mapping[str, DType], targets: Sequence[Target]
) -> None:
    """Raises if `dtype=` is of a kind that no array has."""
    dtypes = [target.spec.dtype for target in targets]
    kinds = {_kind_of(dtype) for dtype in dtypes if not is_number(dtype)}
    if dtype is None or requested or not kinds:
        return
    value = _as_dtype(dtype)
    msg = (
        f"dtype={str(value)!r} is for {_kind_of(value)} arrays, and the state has only "
        f"{' and '.join(sorted(kinds))} arrays: none is cast to another kind."
    )
    raise CheckpointError(msg)


def _as_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Returns a dtype that arrays can have, or raises CheckpointError."""
    try:
        value = jnp.dtype(dtype)
    except TypeError:
        value = None
    # NumPy's "g" and "G" are `longdouble` and `clongdouble`, which JAX does not have.
    if value is None or not _jax.is_array_dtype(value) or value.char in "gG":
        near = did_you_mean(dtype, ["bfloat16", "float16", "float32", "float64"])
        msg = f"dtype= must be a dtype of numbers, got {_checks.shown(dtype)}.{near}"
        raise CheckpointError(msg)
    return value.newbyteorder("=")


def _kind_of(dtype: DTypeLike) -> str:
    """Returns the kind of a dtype's values; arrays are never cast to another kind."""
    if _jax.is_extended(dtype):
        return "key"
    kinds = (name for name, kind in _KINDS.items() if jnp.issubdtype(dtype, kind))
    return next(kinds, str(dtype))


def _fits(saved: DType, wanted: DType, requested: DType | None) -> bool:
    if requested is None and not is_number(wanted) and not is_number(saved):
        return saved == wanted
    kinds = {_kind_of(saved), _kind_of(wanted)}
    return len(kinds if requested is None else {*kinds, _kind_of(requested)}) == 1


def _host_dtype(dtype: DType, target: Target, saved: ArraySpec) -> Any:
    """Returns the dtype of a restored array on the host."""
    if target.spec.is_key:
        return target.spec.host_dtype
    if is_number(saved.dtype) and not target.on_host:
        # A Python number that becomes a JAX array gets the precision of JAX's default.
        return _jax.canonical_dtype(dtype)
    return dtype


# The options that would help.


def _advice(diff: RestoreDiff, *, is_foreign: bool) -> str:
    """Returns sentences that name the options for these differences."""
    keys = [change for change in diff.dtypes if change.wanted.is_key]
    advice: list[str] = []
    if diff.missing or diff.extra:
        advice.append(
            f"{_RENAME}; partial=True keeps the values of missing arrays and ignores "
            "extra ones."
        )
    if diff or keys:
        advice.append("partial=[pattern] leaves the arrays that it matches as they are.")
    if len(keys) < len(diff.dtypes):
        advice.append(
            "dtype= asks for another dtype of the same kind; floating point never "
            "becomes integer."
        )
    if is_foreign and any(
        sorted(change.saved.shape) == sorted(change.wanted.shape)
        for change in diff.shapes
    ):
        advice.append("transpose={pattern: (1, 0)} permutes dims.")
    if keys and keys[0].saved.is_key:
        impl = _jax.key_impl(keys[0].saved.dtype)
        advice.append(
            "A PRNG key is restored only for the generator that it was saved for: "
            f"create the state with jax.random.key(seed, impl={impl!r})."
        )
    return " ".join(advice)
