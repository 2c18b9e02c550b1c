"""Restores: from saved arrays of any kind to a state on devices.

Each file format is a `Source`: names, shapes, dtypes, and how to read them. All else is
shared. Names are matched, and all differences are known, before any array is read. Then
each process casts and places the slices that its devices hold, in NumPy, where 64-bit
values and PRNG keys need no special handling.

Patterns are for `re.search`. One that matches nothing is an error, nearly always a
typo; if several match a path, the first one counts.
"""

import contextlib
import difflib
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding
from jax.typing import DTypeLike

from meshlayout import _checks, _jax, _paths, _render
from meshlayout._annotations import DType, Leaf, PyTree
from meshlayout.arrays import copy_to_mesh
from meshlayout.errors import CheckpointError, RestoreDiffError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap
from meshlayout.layout_map.report import nearest_paths
from meshlayout.state.creation import StateDescription, eager_sharding_off


logger = logging.getLogger("meshlayout.checkpoint")

# Rows of a difference that an error shows; names among which it looks for near ones.
_SHOWN, _COMPARED = 40, 100

_COLUMNS = ("differs", "wanted", "saved")
_MODEL = re.compile("^(params|model_state)/")  # in a TrainState
_TRAINING = re.compile("(opt_state|optimizer|extra)/|(step|rng|key)$")  # besides it

# By what the path of every array that differs begins with.
_KNOWN = {
    "opt_state/": "The optimizer is not the saved one; one with a schedule counts its "
    "steps, too. To predict only, restore a model: restore(ml.create(build)). To train "
    "with a new optimizer, write partial='^opt_state/'.",
    "extra/ema/": "Averages of ema= are in one of the two. If they were saved, restore "
    "train_step.prepare(state); else, prepare the state after you have restored it.",
    "(.*/)?rngs/": "Only random streams differ: partial='rngs' keeps those of a model "
    "that ml.create made; ml.describe gives it none.",
}
_ADVICE = (
    "restore takes rename={pattern: replacement} for saved arrays of other names, "
    "partial=True to keep the values of missing arrays and ignore extra ones or "
    "partial=[pattern] to leave what it matches as it is, and dtype= for another dtype "
    "of the same kind; load_arrays also takes transpose={pattern: (1, 0)}, for square "
    "arrays, too. train_step.prepare(state) has what a step keeps in `extra`."
)


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What is known of an array before it is read.

    The dtype of a Python number is `bool`, `int`, `float` or `complex`; `is_numpy` says
    whether it becomes a NumPy array if no target is given.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    is_numpy: bool = False

    @property
    def is_number(self) -> bool:
        """Whether it is a Python number."""
        # By identity: NumPy's float64 equals float.
        return any(self.dtype is kind for kind in (bool, int, float, complex))

    @property
    def is_key(self) -> bool:
        """Whether it is an array of PRNG keys, which the host holds as words."""
        return not self.is_number and _jax.is_extended(self.dtype)

    @property
    def host(self) -> "ArraySpec":
        """The spec of the array on the host, where PRNG keys are their words."""
        if not self.is_key:
            return self
        keys = jax.ShapeDtypeStruct(self.shape, self.dtype)
        words = jax.eval_shape(jax.random.key_data, keys)
        return replace(self, shape=words.shape, dtype=np.dtype(words.dtype))

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes; 0 for a Python number."""
        itemsize = 0 if self.is_number else np.dtype(self.host.dtype).itemsize
        return math.prod(self.host.shape) * itemsize

    def __str__(self) -> str:
        return f"{self.path} {_render.array_text(self.dtype, self.shape)}".lstrip()


@dataclass(frozen=True, slots=True)
class Change:
    """A path whose saved array has another shape or dtype than the one in the state."""

    path: str
    saved: ArraySpec
    wanted: ArraySpec


@dataclass(frozen=True)
class RestoreDiff:
    """How a saved state differs from the state to restore; print or display it.

    Attributes:
        missing: Paths of the state to restore that were not saved.
        extra: Paths that were saved but are not in the state, after renaming.
        shapes: Arrays whose shapes differ.
        dtypes: Arrays whose dtypes differ.
    """

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    shapes: tuple[Change, ...] = ()
    dtypes: tuple[Change, ...] = ()
    # By path, the specs of missing and extra arrays, for the table.
    specs: Mapping[str, ArraySpec] = field(default_factory=dict, repr=False)

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.shapes or self.dtypes)

    def summary(self) -> str:
        """Returns the counts, as `1 missing, 2 extra`."""
        rows = self.missing, self.extra, self.shapes, self.dtypes
        kinds = "missing", "extra", "of another shape", "of another dtype"
        texts = [f"{len(x)} {kind}" for x, kind in zip(rows, kinds, strict=True) if x]
        return ", ".join(texts) or "nothing differs"

    def table(self, most: int | None = None) -> str:
        """Returns the differences side by side, at most `most` of them."""
        rows = self._rows()
        rest = len(rows[:most]) - len(rows)
        notes = [f"... and {-rest:,} more"] if rest else []
        return _render.text_table(_COLUMNS, rows[:most], notes=notes)

    def __str__(self) -> str:
        return f"{self.summary()}\n{self.table()}" if self else self.summary()

    def _repr_html_(self) -> str:
        return _render.html_table(_COLUMNS, self._rows(), caption=self.summary())

    def _rows(self) -> list[tuple[str, str, str]]:
        text = {path: str(replace(x, path=path)) for path, x in self.specs.items()}
        near: dict[str, str] = {}
        for path in self.missing[:_COMPARED]:
            for match in difflib.get_close_matches(path, self.extra[:_COMPARED], n=1):
                near[path] = f"(near: {text.get(match, match)})"
        return [
            *(("missing", text.get(x, x), near.get(x, "")) for x in self.missing),
            *(("shape", str(x.wanted), str(x.saved)) for x in self.shapes),
            *(("dtype", str(x.wanted), str(x.saved)) for x in self.dtypes),
            *(("extra", "", text.get(x, x)) for x in self.extra),
        ]


Wanted: TypeAlias = Sequence[tuple[ArraySpec, Sharding | None]]


@dataclass(frozen=True)
class Source:
    """Saved arrays: their location (for messages), their specs, and how to read them.

    `read` returns for each wanted array a `jax.Array` with the given sharding (None for
    NumPy), or anything whose slices NumPy can convert, of which only the needed ones
    are then taken; PRNG keys as their words.
    """

    name: str
    leaves: Sequence[ArraySpec]
    read: Callable[[Wanted], Iterable[Any]]


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


@dataclass(frozen=True)
class Target:
    """A leaf of the state to build, and its value in `like`.

    Without a sharding it is on JAX's default device, or `on_host`.
    """

    spec: ArraySpec
    value: Any
    sharding: Sharding | None
    on_host: bool


def load(source: Source, request: Request) -> PyTree:
    """Restores a state from saved arrays; raises CheckpointError if they do not fit."""
    names = [leaf.path for leaf in source.leaves]
    names = renamed(names, request.rename, request.separator, "/")
    in_file = dict(zip(names, source.leaves, strict=True))
    dims: dict[str, Sequence[int]] = {}
    for regex, permutation in _table("transpose", request.transpose, names):
        dims = {x: permutation for x in names if regex.search(x)} | dims
    saved = in_file | {x: _transposed(in_file[x], dims[x]) for x in dims}
    targets, rebuild = _targets(saved, request)
    pairs = _match(saved, [x.spec for x in targets], request, source.name)
    # Check all leaves before the first read, which may take minutes.
    wanted: list[tuple[ArraySpec, Sharding | None]] = []
    for target in targets:
        if target.spec.path in pairs:
            name, dtype = pairs[target.spec.path]
            sharding = _checked_sharding(target, saved[name], dtype)
            wanted.append((in_file[name], None if name in dims else sharding))
        elif isinstance(target.value, jax.ShapeDtypeStruct):
            place = f"{target.spec.path}: not restored from {source.name}"
            msg = f"{place}, and like= holds only its shape. Give a created state."
            raise CheckpointError(msg)
    arrays = iter(source.read(wanted))
    values: list[Any] = []
    for target in targets:
        if target.spec.path not in pairs:
            values.append(_kept(target))
            continue
        (name, dtype), array = pairs[target.spec.path], next(arrays)
        array = np.transpose(array, dims[name]) if name in dims else array
        values.append(_placed(target, saved[name], dtype, array))
    return rebuild(values)


def to_numpy(source: Source) -> PyTree:
    """Returns all arrays as nested dicts of NumPy arrays, PRNG keys as their words."""
    values = source.read([(leaf, None) for leaf in source.leaves])
    return nested(zip((leaf.path for leaf in source.leaves), values, strict=True))


def nested(items: Iterable[tuple[str, Any]]) -> PyTree:
    """Returns nested dicts of values by path; the one of an empty path itself."""
    tree: dict[str, Any] = {}
    for path, value in items:
        *parents, last = path.split("/")
        node: Any = tree
        for key in parents:
            node = node.setdefault(key, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict) or last in node:
            msg = f"{path!r}: one name is a prefix of another. Change rename=."
            raise CheckpointError(msg)
        node[last] = value
    return tree[""] if tree.keys() == {""} else tree


def spec_of(path: str, value: Any) -> ArraySpec | None:
    """Returns the spec of an array or a Python number; None for anything else."""
    if not hasattr(value, "dtype"):
        kinds = [x for x in (bool, int, float, complex) if isinstance(value, x)]
        return ArraySpec(path, (), kinds[0]) if kinds else None
    with contextlib.suppress(TypeError):  # which a dtype of another library raises
        if _jax.is_array_dtype(value.dtype):
            is_key = _jax.is_extended(value.dtype)
            dtype = value.dtype if is_key else np.dtype(value.dtype).newbyteorder("=")
            return ArraySpec(path, tuple(value.shape), dtype)
    return None


def _transposed(spec: ArraySpec, dims: Sequence[int]) -> ArraySpec:
    try:
        shape = np.transpose(np.broadcast_to(0, spec.shape), dims).shape
    except (TypeError, ValueError) as error:
        msg = f"{spec}: transpose= gives it {_checks.shown(dims)}: {error}."
        raise CheckpointError(msg) from None
    return replace(spec, shape=shape)


def _targets(
    saved: Mapping[str, ArraySpec], request: Request
) -> tuple[list[Target], Callable[[Sequence[Any]], PyTree]]:
    """Returns the leaves to build, and what builds the state from their values."""
    tree, layouts = request.like, request.layouts
    if isinstance(tree, LayoutMap) and layouts is None:
        tree, layouts = None, tree
    if not isinstance(layouts, LayoutMap | None):
        msg = f"layouts= must be a LayoutMap, got {_checks.shown(layouts)}."
        raise CheckpointError(msg)
    if isinstance(tree, (int, str, type)) or hasattr(tree, "__code__"):
        msg = f"like= must be a state or ml.describe(build), got {_checks.shown(tree)}."
        raise CheckpointError(f"{msg} The number of a step is step=.")
    if _jax.is_tracing():
        raise CheckpointError("like= is inside jit. Restore outside of it.")
    is_free, graphdef = tree is None, None
    if is_free:
        tree = nested((name, _placeholder(spec)) for name, spec in saved.items())
    elif isinstance(tree, StateDescription):
        tree = tree.abstract
    if _paths.holds_modules(tree):
        with eager_sharding_off():
            graphdef, tree = nnx.split(_paths.with_variables(tree))
    values, treedef = jax.tree.flatten(tree)
    named = enumerate(_paths.flatten(tree, whole=True).leaves)
    # By position among all leaves: those that are not arrays are kept.
    specs = {i: x for i, (path, value, _) in named if (x := spec_of(path, value))}
    if layouts is None:
        shardings = [_own_sharding(values[i]) for i in specs]
    else:
        # Under an empty key, which paths leave out: at the root, the key `params` of a
        # saved `TrainState` would be taken for Linen's, and left out.
        resolved = layouts.resolve({"": tree} if is_free else tree)
        layouts._check_used(resolved)
        shardings = [x.sharding for x in jax.tree.leaves(resolved.layouts)]
    targets: list[Target] = []
    for (i, spec), sharding in zip(specs.items(), shardings, strict=True):
        is_numpy = isinstance(values[i], (np.ndarray, np.generic)) and layouts is None
        targets.append(Target(spec, values[i], sharding, is_numpy or spec.is_number))

    def rebuild(new_values: Sequence[Any]) -> PyTree:
        filled = dict(enumerate(values)) | dict(zip(specs, new_values, strict=True))
        rebuilt = treedef.unflatten(filled.values())
        if graphdef is None:
            return rebuilt
        with eager_sharding_off():
            return _paths.without_variables(nnx.merge(graphdef, rebuilt))

    return targets, rebuild


def _placeholder(spec: ArraySpec) -> Any:
    """Returns a leaf like the saved one, for a restore without `like`."""
    if spec.is_number:
        return spec.dtype()
    if spec.is_numpy:
        return np.broadcast_to(np.zeros((), spec.dtype), spec.shape)
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype)


def _own_sharding(value: Leaf) -> Sharding | None:
    # JAX refuses to combine arrays that are committed to different devices.
    is_free = isinstance(value, jax.Array) and not _jax.is_committed(value)
    return None if is_free else getattr(value, "sharding", None)


def _checked_sharding(target: Target, saved: ArraySpec, dtype: DType) -> Any:
    """Returns the sharding to read an array with; None for NumPy."""
    if target.on_host:
        return None
    narrow = _jax.canonical_dtype(dtype)
    if narrow != dtype:
        way = f"Ask for that with dtype='{narrow}', or set jax_enable_x64."
        raise CheckpointError(f"{saved}: JAX would turn {dtype} into {narrow}. {way}")
    try:
        if target.sharding is not None:
            target.sharding.shard_shape(target.spec.shape)
    except ValueError as error:
        raise CheckpointError(f"{saved} does not fit its layout: {error}.") from None
    # Wider than JAX's, it would be narrowed on devices before its range is checked.
    is_wide = _jax.canonical_dtype(saved.host.dtype) != saved.host.dtype
    return None if is_wide or saved.is_number or target.spec.is_key else target.sharding


def _kept(target: Target) -> Any:
    if target.on_host or target.sharding in (None, _own_sharding(target.value)):
        return target.value
    return copy_to_mesh(target.value, Layout.of(target.sharding, np.ndim(target.value)))


def _placed(target: Target, saved: ArraySpec, dtype: DType, value: Leaf) -> Any:
    """Returns the value of a leaf as in the target, from its array as saved."""
    spec, sharding = target.spec, target.sharding
    if spec.is_number:
        return spec.dtype(np.asarray(value).item())
    if saved.is_number:
        value = np.asarray(value)
    # By index, as several devices may hold the same slice.
    is_placed = isinstance(value, jax.Array)
    is_done = is_placed and value.dtype == dtype
    shards = value.addressable_shards if is_placed and not is_done else ()
    placed = {repr(shard.index): shard.data for shard in shards}
    parts: dict[str, Any] = {}

    def read(index: Any = ()) -> Any:
        key = repr(index)
        if key not in parts:
            # A copy: a device may use the memory as its own, and give it away.
            part = np.array(placed[key] if is_placed else value[index])
            part: Any = _cast(part, dtype, saved)
            if spec.is_key:
                part = jax.random.wrap_key_data(part, impl=_jax.key_impl(spec.dtype))
            parts[key] = part
        return parts[key]

    if target.on_host:
        return read()[()] if isinstance(target.value, np.generic) else read()
    if is_done:
        array = value
    elif sharding is None:
        array = jax.device_put(read())
    else:
        array = jax.make_array_from_callback(spec.shape, sharding, read)
    is_weak = bool(getattr(target.value, "weak_type", False))
    return _jax.with_weak_type(array, weak_type=True) if is_weak else array


def _cast(
    values: np.ndarray[Any, Any], dtype: DType, saved: ArraySpec
) -> np.ndarray[Any, Any]:
    """Returns values in another dtype of the same kind, if that can hold them."""
    if values.dtype == dtype:
        return values
    is_wide = values.dtype == object  # a Python integer of more than 64 bits
    with np.errstate(over="ignore", invalid="ignore"):
        result = values if is_wide else values.astype(dtype)
    if jnp.issubdtype(dtype, np.inexact):
        # A narrower dtype may lose precision, but not range.
        lost = np.isfinite(values) & ~np.isfinite(result)
    else:
        lost = (result != values) | is_wide
    if lost.any():
        msg = f"{saved} holds {values[lost].flat[0]}, which {dtype} cannot represent."
        raise CheckpointError(msg)
    return result


def _match(
    saved: Mapping[str, ArraySpec],
    wanted: Sequence[ArraySpec],
    request: Request,
    source: str,
) -> dict[str, tuple[str, DType]]:
    """Returns what to restore by path: a saved name and a dtype.

    The saved arrays come by their names after renaming. A leading `params/` or
    `model_state/`, which a bare module does not have, and a trailing `/value`, which
    some versions of Flax write, are ignored, and PRNG keys may be saved as their words.
    """
    names, paths = [*saved], [spec.path for spec in wanted]
    rest = dict(zip(_without_flax(names), names, strict=True))
    # Patterns mean names that the user sees, on either side.
    left = _left_as_they_are(request.partial, {*names, *paths})
    dtype, kind = _requested(request.dtype, wanted)
    pairs: dict[str, tuple[str, DType]] = {}
    missing: dict[str, ArraySpec] = {}
    shapes: list[Change] = []
    dtypes: list[Change] = []
    for spec, path in zip(wanted, _without_flax(paths), strict=True):
        name = rest.pop(path, None)
        if spec.path in left or name in left:
            continue
        if name is None:
            missing[spec.path] = spec
            continue
        partner = saved[name]
        expected = spec if partner.is_key else spec.host
        is_cast = kind == _kind_of(spec.dtype) and not spec.is_number
        if is_cast or partner.is_number or spec.is_number:
            fits = _kind_of(partner.dtype) == _kind_of(expected.dtype)
        else:
            fits = partner.dtype == expected.dtype
        if not fits:
            dtypes.append(Change(spec.path, partner, spec))
        elif partner.shape != expected.shape:
            shapes.append(Change(spec.path, partner, spec))
        else:
            pairs[spec.path] = name, dtype if is_cast else spec.host.dtype
    extra = {name: saved[name] for name in rest.values() if name not in left}
    if any(map(_TRAINING.match, names)) and not any(map(_TRAINING.match, paths)):
        # A model takes its own arrays of a state.
        extra = {x: spec for x, spec in extra.items() if not _TRAINING.match(x)}
    # Numbers, as that of the step, are in any state.
    found = [spec for spec in wanted if spec.path in pairs]
    has_dims = [any(x.shape for x in specs) for specs in (found, missing.values())]
    is_found = not saved or has_dims[0] or (bool(found) and not has_dims[1])
    rows = tuple(missing), tuple(extra), tuple(shapes), tuple(dtypes)
    wrong = diff = RestoreDiff(*rows, extra | missing)
    if request.partial is True and is_found:
        wrong = replace(diff, missing=(), extra=())
    # If nothing fits, the names are wrong: training would silently start anew.
    if wrong or not is_found:
        path = next((x for x in missing if missing[x].shape), "")
        alike = [x for x in extra if path and extra[x].shape == missing[path].shape]
        rows = [*missing, *extra, *(x.path for x in (*shapes, *dtypes))]
        advice = _renaming(path, alike, request.separator) + _ADVICE
        for prefix, text in _KNOWN.items():
            advice = text if all(re.match(prefix, x) for x in rows) else advice
        msg = f"{source} does not fit the state to restore: {wrong.summary()}.\n"
        msg += f"{wrong.table(_SHOWN)}\n{advice}"
        if not wrong:
            msg = f"{source}: partial={request.partial!r} leaves every array as it is."
        raise RestoreDiffError(msg, diff)
    if missing:  # perhaps because a layer has another name now
        text = f"{diff.summary()}\n{diff.table(_SHOWN)}"
        logger.warning("%s differs: %s", source, text)
    return pairs


def _renaming(path: str, names: Collection[str], separator: str) -> str:
    """Returns advice to rename a prefix, if a name ends in the same keys as a path."""
    pattern = r"((?:.*?/)??)(.+)\n((?:.*?/)??)\2"
    ends = filter(None, (re.fullmatch(pattern, f"{name}\n{path}") for name in names))
    best = max(ends, key=lambda x: (len(x[2]), -len(x[1])), default=None)
    if best is None:
        return ""
    rename = {f"^{re.escape(best[1].replace('/', separator))}": best[3]}
    return f"Some names match with {rename=}. "


def _without_flax(paths: Sequence[str]) -> Sequence[str]:
    """Returns paths without what modules or versions of Flax lack, if that is clear."""
    bare = [re.sub(f"{_MODEL.pattern}|/value$", "", path) for path in paths]
    return bare if len({*bare}) == len(bare) else paths


def renamed(
    paths: Sequence[str], rename: Mapping[str, str] | None, old: str, new: str
) -> list[str]:
    """Returns paths under their new names, with another separator of their keys."""
    table = _table("rename", rename, paths)
    path_by_name: dict[str, str] = {}
    for path in paths:
        names = (regex.sub(x, path) for regex, x in table if regex.search(path))
        name = next(names, path).replace(old, new)
        if path_by_name.setdefault(name, path) != path:
            both = f"the saved arrays {path_by_name[name]!r} and {path!r} both become"
            way = "Change rename= so that they differ."
            raise CheckpointError(f"{both} {name!r}. {way}")
    return list(path_by_name)


def _left_as_they_are(partial: Any, paths: Collection[str]) -> set[str]:
    """Returns the paths that the patterns of `partial=` match."""
    if isinstance(partial, bool):
        return set()
    patterns = [partial] if isinstance(partial, str) else partial
    if not isinstance(patterns, (list, tuple)):
        msg = "partial must be True, False, or patterns of paths that stay"
        raise CheckpointError(f"{msg}, got {_checks.shown(partial)}.")
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
            near = nearest_paths(regex.pattern, paths)
            hint = f" Nearest: {', '.join(near)}." if near else ""
            msg = f"the pattern {regex.pattern!r} of {option}= matches none of the"
            way = "Correct it or remove it."
            raise CheckpointError(f"{msg} {len(paths):,} paths.{hint} {way}")
        pairs.append((regex, value))
    return pairs


def _requested(
    dtype: DTypeLike | None, wanted: Sequence[ArraySpec]
) -> tuple[Any, str | None]:
    """Returns the dtype of `dtype=`, and the kind of the arrays that it is for."""
    if dtype is None:
        return None, None
    kinds = {_kind_of(spec.dtype) for spec in wanted if not spec.is_number}
    value = kind = None
    with contextlib.suppress(TypeError, ValueError):
        value = jnp.dtype(dtype).newbyteorder("=")
        kind = _kind_of(value)
    if kind not in kinds:
        msg = f"dtype= must be a dtype of {' or '.join(sorted(kinds))} arrays, as are"
        raise CheckpointError(f"{msg} in the state, got {_checks.shown(dtype)}.")
    return value, kind


def _kind_of(dtype: DType) -> str:
    """Returns the kind of a dtype's values; arrays are never cast to another kind."""
    for kind in (np.bool_, np.integer, np.floating, np.complexfloating):
        if jnp.issubdtype(dtype, kind):
            return kind.__name__.removesuffix("_")
    return str(dtype)


def abstract_leaf(leaf: Leaf) -> Any:
    """Returns a leaf without its array, which may be large, for `Request.like`."""
    if not isinstance(leaf, jax.Array):
        return leaf
    options = {"sharding": leaf.sharding, "weak_type": jax.typeof(leaf).weak_type}
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, **options)
