"""From saved arrays, whatever the format, to a state on devices, slice by slice.

A format is a `Source`: names, shapes, dtypes, and a function that reads one slice.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from meshlayout import _jax, _render
from meshlayout.checkpoint.difference import Leaf
from meshlayout.checkpoint.matching import Dtypes, Matched, Pair, is_number, match
from meshlayout.checkpoint.patterns import renamed
from meshlayout.checkpoint.slices import cast, place, place_keys
from meshlayout.checkpoint.transposing import permutations, permuted
from meshlayout.checkpoint.wanted import Slot, Target, check_fits, check_kept, target
from meshlayout.errors import CheckpointError
from meshlayout.layout_map import LayoutMap


logger = logging.getLogger("meshlayout.checkpoint")


class Source(Protocol):
    """Saved arrays that can be read in part.

    Attributes:
        name: What holds them, for messages.
        leaves: What was saved; of PRNG keys, their words.
        key_impls: The generators of PRNG keys by path, where they are known.
    """

    name: str
    leaves: list[Leaf]
    key_impls: dict[str, str]

    def read(self, leaf: Leaf, index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        """Returns a slice of a saved array, in the dtype that it was saved in.

        Args:
            leaf: One of `leaves`.
            index: One slice per dim, with a start and a stop.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Options:
    """How saved arrays are brought into a state; see `match`.

    Attributes:
        rename: As for `match`.
        partial: As for `match`.
        allow: As for `match`.
        dtype: As for `match`.
        separator: As for `match`.
        transpose: `{pattern: permutation}` by path in the state: the array in the
            state is `np.transpose(saved, permutation)`.
    """

    rename: Mapping[str, str] | None = None
    partial: bool = False
    allow: str | Sequence[str] = ()
    dtype: Dtypes = None
    separator: str = "/"
    transpose: Mapping[str, Sequence[int]] | None = None


def load(
    source: Source, like: Any, layouts: LayoutMap | None, options: Options
) -> tuple[Any, Matched]:
    """Returns a state with the values that were saved, and what was matched.

    Each device reads only its own slices, one at a time, so that the host never
    holds more than one of them.

    Args:
        source: What was saved.
        like: The state that is wanted: arrays or abstract arrays in any tree, a
            `Description`, or a layout map alone for nested dicts of all arrays.
        layouts: Where arrays go, if not where those of `like` are.
        options: Names, dtypes and dims.

    Raises:
        CheckpointError: If the saved arrays do not fit.
    """
    begin = time.perf_counter()
    target = _target(source, like, layouts, options)
    turns = _turns(source.leaves, options)
    matched = match(
        [permuted(leaf, turns.get(leaf.path)) for leaf in source.leaves],
        [slot.leaf for slot in target.slots],
        rename=options.rename,
        partial=options.partial,
        allow=options.allow,
        dtype=options.dtype,
        separator=options.separator,
        foreign=True,
        what=source.name,
    )
    saved = {leaf.path: leaf for leaf in source.leaves}
    pairs = {pair.wanted.path: pair for pair in matched.pairs}
    kept = [slot for slot in target.slots if slot.leaf.path not in pairs]
    check_kept(kept, source.name)
    values: list[Any] = []
    for slot in target.slots:
        pair = pairs.get(slot.leaf.path)
        if pair is None:
            values.append(slot.keep())
            continue
        one = saved[pair.saved.path]
        values.append(_restore(source, slot, pair, one, turns.get(one.path)))
    _log(source, matched, time.perf_counter() - begin)
    return target.rebuild(values), matched


def _log(source: Source, matched: Matched, seconds: float) -> None:
    nbytes = sum(
        math.prod(pair.wanted.shape) * np.dtype(pair.dtype).itemsize
        for pair in matched.pairs
    )
    logger.info(
        "loaded %d arrays, %s, from %s in %.1f s",
        len(matched.pairs),
        _render.bytes_text(nbytes),
        source.name,
        seconds,
    )
    if matched.diff:
        logger.info("%s differs: %s", source.name, matched.diff)


def _target(
    source: Source, like: Any, layouts: LayoutMap | None, options: Options
) -> Target:
    if isinstance(like, LayoutMap):
        if layouts is not None:
            msg = (
                "give one layout map: like=layouts, or like=state and layouts=layouts."
            )
            raise CheckpointError(msg)
        return target(_nested(source, options), like)
    return target(like, layouts)


def _turns(leaves: Sequence[Leaf], options: Options) -> dict[str, tuple[int, ...]]:
    """Returns the permutation of each saved array that has one, by its saved path."""
    paths = [leaf.path for leaf in leaves]
    names = renamed(paths, options.rename, options.separator)
    found = permutations(options.transpose, names)
    return {
        path: found[name]
        for path, name in zip(paths, names, strict=True)
        if name in found
    }


def _nested(source: Source, options: Options) -> Any:
    """Returns nested dicts of the shapes of all saved arrays, by their new names."""
    paths = [leaf.path for leaf in source.leaves]
    names = renamed(paths, options.rename, options.separator)
    turns = _turns(source.leaves, options)
    tree: dict[str, Any] = {}
    for leaf, name in zip(source.leaves, names, strict=True):
        *above, last = name.split("/")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last in node:
            msg = (
                f"{leaf.path}: its name {name!r} is inside the name of another array, "
                "or around it. Change rename= so that no name is part of another."
            )
            raise CheckpointError(msg)
        shape = permuted(leaf, turns.get(leaf.path)).shape
        node[last] = (
            leaf.dtype()
            if is_number(leaf.dtype)
            else jax.ShapeDtypeStruct(shape, leaf.dtype)
        )
    return tree


def _restore(
    source: Source,
    slot: Slot,
    pair: Pair,
    saved: Leaf,
    dims: tuple[int, ...] | None,
) -> Any:
    shape = pair.wanted.shape

    def read(index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        whole = tuple(
            slice(*one.indices(size)[:2])
            for one, size in zip(index, shape, strict=True)
        )
        if dims is None:
            part = source.read(saved, whole)
        else:
            places = [dims.index(dim) for dim in range(len(dims))]
            part = source.read(saved, tuple(whole[at] for at in places)).transpose(dims)
        return part if is_number(pair.dtype) else cast(part, pair.dtype, str(saved))

    if is_number(slot.leaf.dtype):
        return slot.leaf.dtype(read(())[()])
    if isinstance(slot.value, (np.ndarray, np.generic)) and not slot.moves:
        return np.array(read((slice(None),) * len(shape)), order="C")
    if slot.sharding is not None:
        check_fits(slot.sharding, slot.value.shape, str(saved))
    _check_canonical(pair)
    if slot.is_key:
        _check_impl(slot, saved, source.key_impls.get(saved.path))
        return place_keys(slot, shape, read)
    return place(shape, pair.dtype, slot.sharding, read)


def _check_impl(slot: Slot, saved: Leaf, found: str | None) -> None:
    wanted = _jax.key_impl(slot.value.dtype)
    if found is not None and found != wanted:
        msg = (
            f"{saved.path}: the PRNG key was saved for {found}, and {wanted} is "
            f"wanted. Make the state with jax.random.key(seed, impl={found!r})."
        )
        raise CheckpointError(msg)


def _check_canonical(pair: Pair) -> None:
    dtype = pair.dtype
    used = _jax.canonical_dtype(dtype)
    if used != dtype:
        msg = (
            f"{pair.saved}: JAX makes {used} of {dtype}. Ask for it with "
            f"dtype='{used}', or set jax_enable_x64."
        )
        raise CheckpointError(msg)
