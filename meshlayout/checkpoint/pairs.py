"""Which saved array belongs to which array of the state, and what does not fit.

Pure functions: names, shapes and dtypes in; pairs and differences out. No file is
opened here, so that every mismatch is known before any array is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from meshlayout import _checks, _jax
from meshlayout._annotations import DType, PyTree
from meshlayout.checkpoint.difference import ArraySpec, Change, RestoreDiff, is_number
from meshlayout.checkpoint.patterns import PathPatterns, by_pattern
from meshlayout.checkpoint.target import LeafRestore
from meshlayout.errors import CheckpointError, RestoreDiffError, did_you_mean
from meshlayout.layout_map import LayoutMap


Dtypes: TypeAlias = DTypeLike | Mapping[str, DTypeLike] | None
"""A dtype for every array of its kind, or one for each pattern of paths."""

# How many rows of a difference an error shows; the rest is counted.
_SHOWN = 40

_KINDS = {
    "bool": np.bool_,
    "integer": np.integer,
    "floating": np.floating,
    "complex": np.complexfloating,
}


@dataclass(frozen=True)
class Request:
    """The arguments of a restore; see `load_safetensors` and `Checkpointer.restore`.

    Raises:
        CheckpointError: If `partial` is not a flag, or `only` not a pattern.
    """

    like: PyTree = None
    layouts: LayoutMap | None = None
    rename: Mapping[str, str] | None = None
    transpose: Mapping[str, Sequence[int]] | None = None
    partial: bool = False
    allow: str | Sequence[str] = ()
    dtype: Dtypes = None
    separator: str = "/"
    only: str | None = None

    def __post_init__(self) -> None:
        _checks.flag("partial", self.partial, error=CheckpointError)
        if self.only is not None:
            _checks.pattern("only", self.only, error=CheckpointError)

    def chooses(self, path: str) -> bool:
        """Returns whether a path is to be restored, according to `only=`."""
        if self.only is None:
            return True
        return _checks.pattern("only", self.only).search(path) is not None


def match(
    saved: Mapping[str, ArraySpec],
    leaves: Sequence[LeafRestore],
    request: Request,
    *,
    is_foreign: bool = False,
    source: str = "what was saved",
) -> tuple[list[LeafRestore], RestoreDiff]:
    """Matches every array of a state with its saved array.

    Args:
        saved: The saved arrays, by their names after renaming.
        leaves: The arrays of the state, with paths as in `LayoutMap`.
        request: The allowed differences, and the requested dtypes.
        is_foreign: Whether another library wrote the arrays. A leading `params/` and a
            trailing `/value`, which some versions of Flax write and others do not, are
            then ignored in comparisons, and PRNG keys may be saved as their words.
        source: The file or directory of the saved arrays, for messages.

    Returns:
        The leaves, each with its saved array if it is restored; and all differences,
        including the allowed ones.

    Raises:
        CheckpointError: If a pattern is wrong or matches nothing.
        RestoreDiffError: If a difference is not allowed; it holds the `RestoreDiff`.

    Example:
        >>> old = ArraySpec("net.w", (), (2, 3), np.dtype("float32"))
        >>> new = LeafRestore(ArraySpec("model/w", (), (2, 3), np.dtype("float32")))
        >>> (leaf,), diff = match({"model/w": old}, [new], Request())
        >>> leaf.spec.path, leaf.saved.path
        ('model/w', 'net.w')
    """
    chosen = [leaf for leaf in leaves if request.chooses(leaf.spec.path)]
    specs = [leaf.spec for leaf in chosen]
    partners = _partners([*saved], specs, is_foreign=is_foreign)
    allowed = None
    if request.allow != ():
        patterns = request.allow
        if isinstance(patterns, str):
            patterns = [patterns]
        paths = [*saved, *(spec.path for spec in specs)]
        allowed = PathPatterns("allow", patterns, paths)
    requested = _requested_dtypes(request.dtype, specs)
    restored: dict[str, LeafRestore] = {}
    missing: dict[str, str] = {}
    shapes: list[Change] = []
    dtypes: list[Change] = []
    for leaf, name in zip(chosen, partners, strict=True):
        spec = expected = leaf.spec
        if name is None:
            missing[spec.path] = spec.array
            continue
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
            dtype = _host_dtype(requested.get(spec.path, spec.dtype), leaf, partner)
            restored[spec.path] = replace(leaf, saved=partner, dtype=dtype)
    used = set(partners)
    extra = {name: spec for name, spec in saved.items() if name not in used}
    diff = RestoreDiff(
        tuple(missing),
        tuple(extra),
        tuple(shapes),
        tuple(dtypes),
        missing | {path: spec.array for path, spec in extra.items()},
    )
    wrong = _without_allowed(diff, allowed, partial=request.partial)
    if wrong:
        msg = (
            f"{source} does not fit the state to restore: {wrong.summary()}.\n"
            f"{wrong.table(_SHOWN)}\n{_advice(wrong, is_foreign=is_foreign)}"
        )
        raise RestoreDiffError(msg, diff)
    _check_kind(request.dtype, requested, specs)
    # With partial=True or allow= every difference may be allowed. If nothing is
    # restored, names are wrong, and a training would begin from scratch unnoticed.
    if specs and saved and not restored and diff:
        msg = (
            f"nothing in {source} matches the state to restore: "
            f"{diff.summary()}.\n{diff.table(_SHOWN)}\nrename={{pattern: replacement}} "
            "gives saved arrays other names."
        )
        raise RestoreDiffError(msg, diff)
    return [restored.get(leaf.spec.path, leaf) for leaf in leaves], diff


def _partners(
    names: Sequence[str], specs: Sequence[ArraySpec], *, is_foreign: bool
) -> list[str | None]:
    """Returns the name of the saved array of each array of the state, or None."""
    paths = [spec.path for spec in specs]
    plain_names = names
    if is_foreign:
        plain_names, paths = map(_without_flax, (names, paths))
    candidates: dict[str, list[str]] = {}
    for plain, name in zip(plain_names, names, strict=True):
        candidates.setdefault(plain, []).append(name)
    # With two candidates nobody knows which one is meant: both are reported as extra.
    matches = (candidates.get(path, []) for path in paths)
    return [match[0] if len(match) == 1 else None for match in matches]


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


# Dtypes.


def _requested_dtypes(
    dtype: Dtypes, specs: Sequence[ArraySpec]
) -> dict[str, np.dtype[Any]]:
    """Returns the dtypes requested by `dtype=`, by path."""
    if dtype is None:
        return {}
    arrays = {spec.path: spec for spec in specs if not is_number(spec.dtype)}
    if isinstance(dtype, Mapping):
        by_text = {pattern: _as_dtype(value) for pattern, value in dtype.items()}
        by_path = by_pattern(by_text, [spec.path for spec in specs], "dtype")
        return {path: value for path, value in by_path.items() if path in arrays}
    value = _as_dtype(dtype)
    kind = _kind_of(value)
    return {
        path: value for path, spec in arrays.items() if _kind_of(spec.dtype) == kind
    }


def _check_kind(
    dtype: Dtypes, requested: Mapping[str, DType], specs: Sequence[ArraySpec]
) -> None:
    """Raises if the dtype for all arrays is of a kind that no array has."""
    kinds = {_kind_of(spec.dtype) for spec in specs if not is_number(spec.dtype)}
    if dtype is None or isinstance(dtype, Mapping) or requested or not kinds:
        return
    value = _as_dtype(dtype)
    msg = (
        f"dtype={str(value)!r} is for {_kind_of(value)} arrays, and the state has only "
        f"{' and '.join(sorted(kinds))} arrays: none is cast to another kind."
    )
    raise CheckpointError(msg)


def _as_dtype(dtype: DTypeLike | None) -> np.dtype[Any]:
    """Returns a dtype that arrays can have, or raises CheckpointError."""
    try:
        value = None if dtype is None else jnp.dtype(dtype)
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


def _host_dtype(dtype: DType, leaf: LeafRestore, saved: ArraySpec) -> Any:
    """Returns the dtype of a restored array on the host."""
    if leaf.spec.is_key:
        return leaf.spec.host_dtype
    if is_number(saved.dtype) and not leaf.on_host:
        # A Python number that becomes a JAX array gets the precision of JAX's default.
        return _jax.canonical_dtype(dtype)
    return dtype


# What is not allowed, and the options that would help.


_PARTIAL = (
    "rename={pattern: replacement} gives saved arrays other names; partial=True keeps "
    "the values of missing arrays and ignores extra ones, and allow=[pattern] does so "
    "for some."
)


def _without_allowed(
    diff: RestoreDiff, allowed: PathPatterns | None, *, partial: bool
) -> RestoreDiff:
    """Returns the differences that are not allowed."""

    def is_wrong(path: str) -> bool:
        return allowed is None or not allowed.matching(path)

    return RestoreDiff(
        () if partial else tuple(filter(is_wrong, diff.missing)),
        () if partial else tuple(filter(is_wrong, diff.extra)),
        tuple(change for change in diff.shapes if is_wrong(change.path)),
        tuple(change for change in diff.dtypes if is_wrong(change.path)),
        diff.arrays,
    )


def _advice(wrong: RestoreDiff, *, is_foreign: bool) -> str:
    """Returns sentences that name the options for these differences."""
    keys = [change for change in wrong.dtypes if change.wanted.is_key]
    advice: list[str] = []
    if wrong.missing or wrong.extra:
        advice.append(_PARTIAL)
    if wrong.shapes:
        advice.append("allow=[pattern] keeps the values of arrays of another shape.")
    if len(keys) < len(wrong.dtypes):
        advice.append(
            "dtype= asks for another dtype of the same kind; floating point never "
            "becomes integer."
        )
    if is_foreign and any(map(_is_transposed, wrong.shapes)):
        advice.append("transpose={pattern: (1, 0)} permutes dims.")
    if keys and keys[0].saved.is_key:
        impl = _jax.key_impl(keys[0].saved.dtype)
        advice.append(
            "A PRNG key is restored only for the generator that it was saved for: "
            f"create the state with jax.random.key(seed, impl={impl!r})."
        )
    elif keys:
        advice.append(
            "A PRNG key is restored only from a PRNG key; allow=[pattern] keeps that "
            "of the state."
        )
    return " ".join(advice)


def _is_transposed(change: Change) -> bool:
    return sorted(change.saved.shape) == sorted(change.wanted.shape)
