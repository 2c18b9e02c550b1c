"""From a step's files to a state: matched by name, read by slices, verified, cast."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey

from meshlayout.checkpoint import damage, files, orbax, store
from meshlayout.checkpoint.difference import Leaf
from meshlayout.checkpoint.manifest import Manifest, SavedLeaf
from meshlayout.checkpoint.matching import Dtypes, Matched, match
from meshlayout.checkpoint.patterns import renamed
from meshlayout.checkpoint.places import (
    Place,
    host_bits,
    python_value,
    saved_dtype,
    stored_shape,
    words_dtype,
)
from meshlayout.checkpoint.store import StoreError
from meshlayout.checkpoint.wanted import Slot, Target, check_kept, target
from meshlayout.errors import CheckpointError
from meshlayout.layout_map import LayoutMap


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of a restore; see `Checkpointer.restore`."""

    like: Any = None
    layouts: LayoutMap | None = None
    rename: Mapping[str, str] | None = None
    partial: bool = False
    only: str | None = None
    allow: str | Sequence[str] = ()
    dtype: Dtypes = None
    verify: bool = True


def restore(folder: Any, manifest: Manifest, request: Request) -> tuple[Any, Matched]:
    """Returns the state that is asked for, and what was matched.

    Args:
        folder: The step's directory.
        manifest: Its manifest.
        request: What is asked for.

    Raises:
        CheckpointError: If what was saved does not fit.
        DamagedCheckpointError: If it is not what was saved.
    """
    wanted = _target(manifest, request)
    matched = _match(manifest, wanted, request)
    saved = {leaf.path: leaf for leaf in manifest.leaves}
    pairs = {pair.wanted.path: pair for pair in matched.pairs}
    places = [
        Place(slot, pair, saved[pair.saved.path])
        for slot in wanted.slots
        if (pair := pairs.get(slot.leaf.path)) is not None
    ]
    kept = [slot for slot in wanted.slots if slot.leaf.path not in pairs]
    check_kept(kept, f"step {manifest.step}")
    for place in places:
        place.check()
    values = _read(folder, manifest, places, verify=request.verify)
    made = {
        place.slot.leaf.path: place.finish(value)
        for place, value in zip(places, values, strict=True)
    }
    return wanted.rebuild(
        [
            made[slot.leaf.path] if slot.leaf.path in made else slot.keep()
            for slot in wanted.slots
        ]
    ), matched


def to_numpy(folder: Any, manifest: Manifest, *, verify: bool) -> Any:
    """Returns nested dicts of NumPy arrays; PRNG keys as their words.

    Args:
        folder: The step's directory.
        manifest: Its manifest.
        verify: Whether to compare what is read with what was saved.

    Raises:
        DamagedCheckpointError: If it is not what was saved.
    """
    wanted = {
        leaf.array: orbax.OnHost(stored_shape(leaf), np.dtype(leaf.stored))
        for leaf in manifest.leaves
        if leaf.array is not None
    }
    found = _load(folder, manifest, wanted)
    values = []
    for leaf in manifest.leaves:
        if leaf.kind == "python":
            values.append(python_value(leaf))
        elif leaf.array is None:
            values.append(np.zeros(stored_shape(leaf), words_dtype(leaf)))
        else:
            found[leaf.array] = host_bits(np.asarray(found[leaf.array]), leaf)
            values.append(found[leaf.array])
    if verify:
        arrays = {
            leaf.array: leaf for leaf in manifest.leaves if leaf.array is not None
        }
        damage.check_arrays(
            folder,
            manifest,
            {name: (leaf, found[name]) for name, leaf in arrays.items()},
        )
    return nested([leaf.parts for leaf in manifest.leaves], values)


def nested(parts: Sequence[Sequence[str]], values: Sequence[Any]) -> Any:
    """Returns nested dicts of values.

    Args:
        parts: The keys of every value, from the outermost.
        values: The values.

    Example:
        >>> nested([("a", "b"), ("c",)], [1, 2])
        {'a': {'b': 1}, 'c': 2}
    """
    tree: dict[str, Any] = {}
    for keys, value in zip(parts, values, strict=True):
        if not keys:
            return value
        *above, last = keys
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def _check_apart(parts: Sequence[Sequence[str]]) -> None:
    """Raises if a name is inside another one, after renaming."""
    names = {tuple(keys) for keys in parts}
    for keys in names:
        inner = next((keys[:at] for at in range(len(keys)) if keys[:at] in names), None)
        if inner is not None:
            msg = (
                f"rename= makes the names {'/'.join(inner)!r} and {'/'.join(keys)!r}, "
                "one inside the other. Change it so that no name is part of another."
            )
            raise CheckpointError(msg)


# What is wanted.


def _target(manifest: Manifest, request: Request) -> Target:
    like, layouts = request.like, request.layouts
    if isinstance(like, LayoutMap):
        if layouts is not None:
            msg = "give one layout map: like=layouts, or layouts= with like=state."
            raise CheckpointError(msg)
        like, layouts = None, like
    if like is None:
        return _as_saved(manifest, request, layouts)
    if not manifest.leaves and not jax.tree.leaves(like):
        return Target([], lambda values: like)
    return target(like, layouts, whole=True)


def _as_saved(
    manifest: Manifest, request: Request, layouts: LayoutMap | None
) -> Target:
    """Returns all that was saved as what is wanted, in nested dicts, by new names."""
    paths = [leaf.path for leaf in manifest.leaves]
    names = renamed(paths, request.rename)
    parts = [
        leaf.parts if name == leaf.path else tuple(name.split("/"))
        for leaf, name in zip(manifest.leaves, names, strict=True)
    ]
    if request.only is not None:
        chosen = [_matches(request.only, name) for name in names]
    else:
        chosen = [True] * len(names)
    keys = [one for one, is_chosen in zip(parts, chosen, strict=True) if is_chosen]
    shapes = [
        _abstract(leaf)
        for leaf, is_chosen in zip(manifest.leaves, chosen, strict=True)
        if is_chosen
    ]
    if not keys:
        return Target([], lambda values: {})
    _check_apart(keys)
    tree = nested(keys, shapes)
    if layouts is None or not isinstance(tree, dict):
        return target(tree, layouts, whole=True)
    found = target(_Saved(tree), layouts)
    return Target(found.slots, lambda values: found.rebuild(values).tree)


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class _Saved:
    """Nested dicts, to whose rules a root key `params` is a part of the paths."""

    tree: dict[str, Any]

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        names = tuple(sorted(self.tree))
        return [(DictKey(name), self.tree[name]) for name in names], names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Sequence[Any]) -> Any:
        return cls(dict(zip(names, values, strict=True)))


def _abstract(leaf: SavedLeaf) -> Any:
    if leaf.kind == "python":
        return python_value(leaf)
    if leaf.kind == "numpy":
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return jax.ShapeDtypeStruct(leaf.shape, saved_dtype(leaf))


def _match(manifest: Manifest, wanted: Target, request: Request) -> Matched:
    slots = wanted.slots
    saved = [
        Leaf(leaf.path, leaf.parts, leaf.shape, saved_dtype(leaf))
        for leaf in manifest.leaves
    ]
    rename = request.rename
    if request.only is not None:
        names = renamed([leaf.path for leaf in saved], rename)
        only = request.only
        slots = [slot for slot in slots if _matches(only, slot.leaf.path)]
        chosen = [_matches(only, name) for name in names]
        saved = [
            leaf for leaf, is_chosen in zip(saved, chosen, strict=True) if is_chosen
        ]
        if not slots and not saved:
            msg = (
                f"only={only!r} matches no path of step {manifest.step}, whose first "
                f"is {names[0] if names else ''!r}. It is a regular expression."
            )
            raise CheckpointError(msg)
        paths = [leaf.path for leaf in saved]
        rename = {
            pattern: new
            for pattern, new in (rename or {}).items()
            if any(re.search(pattern, path) for path in paths)
        }
    return match(
        saved,
        [_own_leaf(slot) for slot in slots],
        rename=rename,
        partial=request.partial,
        allow=request.allow,
        dtype=request.dtype,
        what=f"step {manifest.step}",
    )


def _matches(pattern: str, path: str) -> bool:
    try:
        return re.search(pattern, path) is not None
    except (re.error, TypeError) as error:
        msg = f"only={pattern!r} is no regular expression: {error}."
        raise CheckpointError(msg) from None


def _own_leaf(slot: Slot) -> Leaf:
    """Returns a leaf with PRNG keys as such, so that another generator is told."""
    if not slot.is_key:
        return slot.leaf
    return dataclasses.replace(
        slot.leaf, shape=tuple(slot.value.shape), dtype=slot.value.dtype
    )


# Reading.


def _read(
    folder: Any, manifest: Manifest, places: Sequence[Place], *, verify: bool
) -> list[Any]:
    """Returns the values of leaves, in the dtypes they were saved in."""
    in_files = {place.leaf.array: place for place in places if place.leaf.array}
    requests = {name: place.request() for name, place in in_files.items()}
    stored = _load(folder, manifest, requests)
    found = {name: place.bits(stored[name]) for name, place in in_files.items()}
    if verify:
        damage.check_arrays(
            folder,
            manifest,
            {name: (place.leaf, found[name]) for name, place in in_files.items()},
        )
    return [
        found[place.leaf.array] if place.leaf.array else place.empty()
        for place in places
    ]


def _load(folder: Any, manifest: Manifest, wanted: Mapping[str, Any]) -> dict[str, Any]:
    if not wanted:
        return {}
    try:
        found = orbax.read(folder / str(manifest.arrays), wanted)
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # that says nothing of the files
    except Exception as error:
        why = orbax.reason(error)
        if files.is_remote(folder):
            _check_store(folder, manifest, why)
        raise damage.unreadable(folder, manifest, why) from error
    for name, one in wanted.items():
        got = found.get(name)
        kind = np.ndarray if isinstance(one, orbax.OnHost) else jax.Array
        if not isinstance(got, kind) or (got.shape, got.dtype) != (
            one.shape,
            one.dtype,
        ):
            why = f"array {name} is not there as it was saved"
            raise damage.unreadable(folder, manifest, why)
    return found


def _check_store(folder: Any, manifest: Manifest, why: str) -> None:
    """Raises if a store cannot be read, which says nothing of what it holds."""
    damage.check_files(folder, manifest)
    if why.startswith(store.REFUSALS):
        raise StoreError.of(folder, "read", why)
