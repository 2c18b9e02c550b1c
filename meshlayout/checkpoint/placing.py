"""From saved arrays, whatever the format, to a state on devices, slice by slice.

A format is a `Source`: names, shapes, dtypes, and a function that reads one slice.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from meshlayout import _jax, _paths, _render
from meshlayout.arrays import copy_to_mesh
from meshlayout.checkpoint.difference import Leaf
from meshlayout.checkpoint.matching import Dtypes, Matched, Pair, is_number, match
from meshlayout.checkpoint.patterns import by_pattern, renamed
from meshlayout.errors import CheckpointError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap
from meshlayout.state.create import Description, eager_sharding_off, has_layout


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
        [_turn(leaf, turns.get(leaf.path)) for leaf in source.leaves],
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


# What is wanted.


@dataclass(frozen=True)
class Slot:
    """A leaf of the state that is wanted.

    Attributes:
        leaf: Its name, shape and dtype; of PRNG keys, those of their words.
        value: The leaf itself.
        sharding: Where it goes; None for JAX's default device.
        moves: Whether that is another place than where the value is.
    """

    leaf: Leaf
    value: Any
    sharding: Any
    moves: bool

    @property
    def is_key(self) -> bool:
        """Whether it is an array of PRNG keys."""
        return _jax.is_extended(getattr(self.value, "dtype", np.dtype("int32")))

    @property
    def is_abstract(self) -> bool:
        """Whether it has no value."""
        return isinstance(self.value, jax.ShapeDtypeStruct)

    def keep(self) -> Any:
        """Returns the value that there is, in its place."""
        if not self.moves:
            return self.value
        return copy_to_mesh(self.value, Layout.of(self.sharding, np.ndim(self.value)))


@dataclass(frozen=True)
class Target:
    """The state that is wanted.

    Attributes:
        slots: Its arrays and numbers.
        rebuild: Makes the state of their new values.
    """

    slots: list[Slot]
    rebuild: Callable[[Sequence[Any]], Any]


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


def target(like: Any, layouts: LayoutMap | None = None) -> Target:
    """Takes apart a state that is wanted.

    Args:
        like: As for `load`.
        layouts: As for `load`.

    Raises:
        CheckpointError: If it holds nothing that could be restored, or `layouts` is
            no layout map.
    """
    if layouts is not None and not isinstance(layouts, LayoutMap):
        msg = (
            f"layouts= takes a LayoutMap, and got {layouts!r} of type "
            f"{type(layouts).__name__}. Without it, arrays go where those of like= are."
        )
        raise CheckpointError(msg)
    like = like.abstract if isinstance(like, Description) else like
    graphdef = None
    tree = like
    if _paths.holds_modules(like):
        with eager_sharding_off():
            graphdef, tree = nnx.split(like)
    named = _paths.flatten(tree).leaves
    values, treedef = jax.tree.flatten(tree)
    shardings = _shardings(tree if graphdef is not None else like, values, layouts)
    slots = {
        at: _slot(leaf.path, value, sharding, moves=layouts is not None)
        for at, (leaf, value, sharding) in enumerate(
            zip(named, values, shardings, strict=True)
        )
        if has_layout(value)
    }
    if not slots:
        msg = (
            f"like= holds no arrays: {like!r} of type {type(like).__name__}. Give the "
            "state that is wanted, or its shapes, as ml.describe or jax.eval_shape "
            "give them."
        )
        raise CheckpointError(msg)

    def rebuild(new: Sequence[Any]) -> Any:
        leaves = list(values)
        for at, value in zip(slots, new, strict=True):
            leaves[at] = value
        with eager_sharding_off():
            made = treedef.unflatten(leaves)
            return made if graphdef is None else nnx.merge(graphdef, made)

    return Target(list(slots.values()), rebuild)


def _shardings(
    tree: Any, values: Sequence[Any], layouts: LayoutMap | None
) -> list[Any]:
    if layouts is None:
        return [_own_sharding(value) for value in values]
    resolved = layouts.resolve(tree)
    layouts.check_used(resolved)
    found = iter(jax.tree.leaves(resolved.layouts))
    return [next(found).sharding if has_layout(value) else None for value in values]


def _own_sharding(value: Any) -> Any:
    # An array that was not bound to its device is not bound after either.
    if isinstance(value, jax.Array) and not _jax.is_committed(value):
        return None
    return getattr(value, "sharding", None)


def _slot(path: str, value: Any, sharding: Any, *, moves: bool) -> Slot:
    parts = tuple(path.split("/"))
    if not hasattr(value, "dtype"):
        leaf = Leaf(path, parts, (), type(value))
    elif _jax.is_extended(value.dtype):
        words = key_words(value.shape, value.dtype)
        leaf = Leaf(path, parts, words.shape, words.dtype)
    else:
        leaf = Leaf(path, parts, tuple(value.shape), np.dtype(value.dtype))
    return Slot(leaf, value, sharding, moves and not is_number(leaf.dtype))


def key_words(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of the words that PRNG keys are made of."""
    keys = jax.ShapeDtypeStruct(tuple(shape), dtype)
    return jax.eval_shape(jax.random.key_data, keys)


def check_kept(kept: Sequence[Slot], name: str) -> None:
    """Raises if a leaf that is not restored has no value to keep.

    Args:
        kept: What is not restored.
        name: What holds the saved arrays, for messages.

    Raises:
        CheckpointError: Names the leaves.
    """
    paths = [slot.leaf.path for slot in kept if slot.is_abstract]
    if paths:
        more = f" and {len(paths) - 5:,} more" if len(paths) > 5 else ""
        msg = (
            f"{', '.join(paths[:5])}{more}: not restored from {name}, and like= holds "
            "shapes alone there, so that there is no value to keep. Give a state that "
            "was created."
        )
        raise CheckpointError(msg)


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
        shape = _turn(leaf, turns.get(leaf.path)).shape
        node[last] = (
            leaf.dtype()
            if is_number(leaf.dtype)
            else jax.ShapeDtypeStruct(shape, leaf.dtype)
        )
    return tree


# Transposing.


def _turns(leaves: Sequence[Leaf], options: Options) -> dict[str, tuple[int, ...]]:
    """Returns the permutation of each saved array that has one, by its saved path."""
    if not options.transpose:
        return {}
    paths = [leaf.path for leaf in leaves]
    names = renamed(paths, options.rename, options.separator)
    found = by_pattern(check_permutations(options.transpose), names, "transpose")
    return {
        path: found[name]
        for path, name in zip(paths, names, strict=True)
        if name in found
    }


def check_permutations(transpose: Any) -> dict[str, tuple[int, ...]]:
    """Returns permutations of dims as tuples.

    Raises:
        CheckpointError: If one is none.
    """
    if not isinstance(transpose, Mapping):
        msg = (
            "transpose= maps patterns of paths to permutations of dims, and got "
            f"{transpose!r}. Write transpose={{r'kernel$': (1, 0)}}."
        )
        raise CheckpointError(msg)
    for pattern, dims in transpose.items():
        numbers = list(dims) if isinstance(dims, (list, tuple)) else [None]
        if set(numbers) != set(range(len(numbers))):
            msg = (
                f"transpose= gives {pattern!r} the dims {dims!r}, which are no "
                "permutation. Write (1, 0) to swap the dims of a matrix."
            )
            raise CheckpointError(msg)
    return {pattern: tuple(dims) for pattern, dims in transpose.items()}


def _turn(leaf: Leaf, dims: tuple[int, ...] | None) -> Leaf:
    if dims is None:
        return leaf
    if len(dims) != len(leaf.shape):
        msg = (
            f"{leaf}: transpose= gives it the dims {dims}, which are for arrays of "
            f"{len(dims)} dims. Make the pattern narrower."
        )
        raise CheckpointError(msg)
    return dataclasses.replace(leaf, shape=tuple(leaf.shape[dim] for dim in dims))


# Reading and placing.


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
        return _place_keys(slot, shape, read)
    return place(shape, pair.dtype, slot.sharding, read)


def place(
    shape: tuple[int, ...],
    dtype: Any,
    sharding: jax.sharding.Sharding | None,
    read: Callable[[tuple[slice, ...]], np.ndarray[Any, Any]],
) -> jax.Array:
    """Makes an array of slices that are read one by one, each of them once.

    Args:
        shape: The global shape.
        dtype: The dtype of the slices.
        sharding: Where the array goes; None for JAX's default device.
        read: Returns the slice at an index.
    """
    if sharding is None:
        return jax.device_put(np.array(read((slice(None),) * len(shape))))
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        index = index or ()
        sizes = zip(index, shape, strict=True)
        bounds = tuple(one.indices(size)[:2] for one, size in sizes)
        devices.setdefault(bounds, []).append(device)
    kind = sharding.memory_kind
    parts: list[jax.Array] = []
    for bounds, some in devices.items():
        part = read(tuple(slice(*bound) for bound in bounds))
        # The devices of a CPU may use the memory of a NumPy array as their own.
        made = [
            jax.device_put(np.array(part), SingleDeviceSharding(one, memory_kind=kind))
            for one in some
        ]
        parts.extend(jax.block_until_ready(made))
    return jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=dtype)


def check_fits(
    sharding: jax.sharding.Sharding, shape: Sequence[int], where: str
) -> None:
    """Raises if an array cannot lie as it is wanted.

    Args:
        sharding: Where it goes.
        shape: Its shape.
        where: The array, for messages.

    Raises:
        CheckpointError: If a dim does not divide.
    """
    try:
        if isinstance(sharding, NamedSharding):
            Layout.of(sharding, len(shape)).shard_shape(shape)
        sharding.shard_shape(tuple(shape))
    except ValueError as error:
        msg = f"{where} cannot lie where it is wanted: {error}"
        raise CheckpointError(msg) from None


def _check_impl(slot: Slot, saved: Leaf, found: str | None) -> None:
    wanted = _jax.key_impl(slot.value.dtype)
    if found is not None and found != wanted:
        msg = (
            f"{saved.path}: the PRNG key was saved for {found}, and {wanted} is "
            f"wanted. Make the state with jax.random.key(seed, impl={found!r})."
        )
        raise CheckpointError(msg)


def _place_keys(
    slot: Slot,
    shape: tuple[int, ...],
    read: Callable[[tuple[slice, ...]], np.ndarray[Any, Any]],
) -> jax.Array:
    sharding = slot.sharding
    words_sharding = sharding
    if isinstance(sharding, NamedSharding):
        rank = len(slot.value.shape)
        spec = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
        words_sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec, None))
    words = place(shape, np.dtype("uint32"), words_sharding, read)
    impl = _jax.key_impl(slot.value.dtype)
    keys = jax.random.wrap_key_data(words, impl=impl)
    is_there = sharding is None or keys.sharding == sharding
    return keys if is_there else jax.device_put(keys, sharding)


def _check_canonical(pair: Pair) -> None:
    dtype = pair.dtype
    used = _jax.canonical_dtype(dtype)
    if used != dtype:
        msg = (
            f"{pair.saved}: JAX makes {used} of {dtype}. Ask for it with "
            f"dtype='{used}', or set jax_enable_x64."
        )
        raise CheckpointError(msg)


def cast(values: np.ndarray[Any, Any], dtype: Any, where: str) -> np.ndarray[Any, Any]:
    """Returns values in another dtype of the same kind.

    Args:
        values: The values.
        dtype: The dtype.
        where: The array, for messages.

    Raises:
        CheckpointError: If a value is beyond what the dtype can hold.
    """
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        made = values.astype(dtype)
        if np.issubdtype(values.dtype, np.integer):
            lost = made.astype(values.dtype) != values
            # Between signed and unsigned, the bits alone come back.
            lost |= (made < 0) != (values < 0)
        else:
            lost = np.isfinite(values) & ~np.isfinite(made)
    if lost.any():
        worst = values[lost].flat[0]
        msg = (
            f"{where}: it holds {worst}, which {dtype} cannot hold. Give another "
            "dtype=."
        )
        raise CheckpointError(msg)
    return made
