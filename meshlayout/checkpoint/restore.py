"""The restore engine: from saved arrays in any format to a state on devices.

A format is a `Source`: names, shapes, dtypes, and a function that starts reading one
slice. Everything else is here and in `leaf_restore`, and is the same for checkpoints of
our own, plain Orbax, safetensors and msgpack: names are matched, differences shown,
each process reads the slices that its devices hold, casts them and places them.

An earlier version let Orbax build the arrays of our own format. It needed a second
engine next to this one, and for many small arrays five times the CPU time.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict

import jax
import numpy as np
from jax.tree_util import DictKey

from meshlayout import _checks, _render
from meshlayout._annotations import PyTree
from meshlayout.checkpoint.data_state import Continues
from meshlayout.checkpoint.difference import ArraySpec, RestoreDiff, is_number
from meshlayout.checkpoint.pairs import Dtypes, Matched, key_words, match
from meshlayout.checkpoint.patterns import permutations, renamed
from meshlayout.checkpoint.target import (
    HostArray,
    Index,
    LeafRestore,
    Target,
    TargetLeaf,
    check_kept,
)
from meshlayout.errors import CheckpointError
from meshlayout.layout_map import LayoutMap


logger = logging.getLogger("meshlayout.checkpoint")

# Deeper trees make JAX exceed Python's recursion limit, from which the process does
# not recover (test: names of 1,500 keys in test_checkpoint_foreign).
MOST_KEYS = 100

# How far a source with slow reads may read ahead: enough to keep a disk or a store
# busy, and little for a host's memory.
READ_AHEAD_BYTES = 2**28


class Source(Protocol):
    """Saved arrays that can be read in part.

    Attributes:
        name: The file or directory, for messages.
        leaves: The saved leaves.
        is_foreign: Whether another library wrote it; see `match`.
        read_ahead_bytes: How many bytes may be read ahead.
    """

    name: str
    leaves: list[ArraySpec]
    is_foreign: bool
    read_ahead_bytes: int

    def start(self, leaf: ArraySpec, index: Index) -> Callable[[], HostArray]:
        """Starts reading a slice of a saved array.

        Args:
            leaf: One of `leaves`.
            index: One slice per dim, with a start and a stop; of PRNG keys, of their
                words.

        Returns:
            A function that waits for the slice and returns it, in its saved dtype, in
            memory that nothing else uses.
        """
        ...


class RestoreOptions(TypedDict, total=False):
    """The options of `Checkpointer.restore`, for its overloads."""

    step: int | Literal["latest", "best"]
    layouts: LayoutMap | None
    data: Continues | None
    partial: bool
    rename: Mapping[str, str] | None
    only: str | None
    allow: str | Sequence[str]
    dtype: Dtypes
    verify: bool
    fallback: bool


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of a restore; see `Checkpointer.restore` and `load_safetensors`.

    Raises:
        CheckpointError: If a flag or a pattern is not one.
    """

    like: PyTree = None
    layouts: LayoutMap | None = None
    rename: Mapping[str, str] | None = None
    partial: bool = False
    only: str | None = None
    allow: str | Sequence[str] = ()
    dtype: Dtypes = None
    separator: str = "/"
    transpose: Mapping[str, Sequence[int]] | None = None

    def __post_init__(self) -> None:
        _checks.flag("partial", self.partial, error=CheckpointError)
        if self.only is not None:
            _checks.pattern("only", self.only, error=CheckpointError)


@dataclass(frozen=True)
class Restored:
    """The result of a restore.

    Attributes:
        state: The state.
        diff: How the saved arrays differed from it.
        restores: The arrays that were read, with their targets.
    """

    state: PyTree
    diff: RestoreDiff
    restores: Sequence[LeafRestore]


def load(source: Source, request: Request) -> Restored:
    """Returns a state with the values that were saved.

    Args:
        source: The saved arrays.
        request: The state to restore, names, dtypes and dims.

    Raises:
        CheckpointError: If the saved arrays do not fit.
    """
    saved, names, rename = _chosen(source, request)
    by_name: dict[str, tuple[int, ...]] = {}
    if request.transpose is not None:
        by_name = permutations(request.transpose, names)
    dims = {
        leaf.path: by_name.get(name) for leaf, name in zip(saved, names, strict=True)
    }
    permuted = [leaf.transposed(dims[leaf.path]) for leaf in saved]
    target = _target(source, permuted, names, request)
    chosen = [leaf for leaf in target.leaves if _is_chosen(leaf.leaf.path, request)]
    if request.only is not None and not chosen and not saved:
        first = source.leaves[0].path if source.leaves else ""
        msg = (
            f"only={request.only!r} matches no path in {source.name}, whose first is "
            f"{first!r}. It is a regular expression."
        )
        raise CheckpointError(msg)
    matched = match(
        permuted,
        [leaf.leaf for leaf in chosen],
        rename=rename,
        partial=request.partial,
        allow=request.allow,
        dtype=request.dtype,
        separator=request.separator,
        is_foreign=source.is_foreign,
        source=source.name,
    )
    plan = _plan(source, target, saved, matched, dims)
    restores = [leaf for leaf in plan if isinstance(leaf, LeafRestore)]
    slices = (
        (restore.saved, restore.saved_index(index))
        for restore in restores
        for index, _ in restore.slices()
    )
    parts = _read(source, slices)
    values = [
        leaf.place(parts) if isinstance(leaf, LeafRestore) else leaf.keep()
        for leaf in plan
    ]
    return Restored(target.rebuild(values), matched.diff, restores)


def load_foreign(source: Source, request: Request) -> PyTree:
    """Returns a state from another library's files, and logs the restore.

    Args:
        source: As for `load`.
        request: As for `load`.

    Raises:
        CheckpointError: As `load`.
    """
    begin_s = time.perf_counter()
    restored = load(source, request)
    num_bytes = sum(restore.nbytes for restore in restored.restores)
    logger.info(
        "loaded %d arrays, %s, from %s in %.1f s",
        len(restored.restores),
        _render.bytes_text(num_bytes),
        source.name,
        time.perf_counter() - begin_s,
    )
    if restored.diff:
        logger.info("%s differs: %s", source.name, restored.diff)
    return restored.state


def to_numpy(source: Source) -> PyTree:
    """Returns nested dicts of NumPy arrays; PRNG keys as their words.

    Args:
        source: The saved arrays.
    """
    shapes = [
        key_words(leaf.dtype, leaf.shape)["shape"] if leaf.is_key else leaf.shape
        for leaf in source.leaves
    ]
    wholes = [tuple(slice(0, size) for size in shape) for shape in shapes]
    parts = _read(source, zip(source.leaves, wholes, strict=True))
    values = [
        leaf.dtype(part.item()) if is_number(leaf.dtype) else part
        for leaf, part in zip(source.leaves, parts, strict=True)
    ]
    return _nested(source.leaves, [leaf.parts for leaf in source.leaves], values)


# The leaves to restore, and their names.


def _chosen(
    source: Source, request: Request
) -> tuple[list[ArraySpec], list[str], Mapping[str, str] | None]:
    """Returns what `only=` leaves of the saved leaves, their new names, and `rename=`.

    A pattern of `rename=` that only matches omitted leaves would be reported as
    matching nothing; it is omitted with them.
    """
    paths = [leaf.path for leaf in source.leaves]
    names = paths
    if request.rename is not None or request.separator != "/":
        names = renamed(paths, request.rename, request.separator)
    if request.only is None:
        return source.leaves, names, request.rename
    pairs = [
        (leaf, name)
        for leaf, name in zip(source.leaves, names, strict=True)
        if _is_chosen(name, request)
    ]
    saved = [leaf for leaf, _ in pairs]
    rename = {
        pattern: replacement
        for pattern, replacement in (request.rename or {}).items()
        if any(_checks.pattern("rename", pattern).search(leaf.path) for leaf in saved)
    }
    return saved, [name for _, name in pairs], rename


def _is_chosen(path: str, request: Request) -> bool:
    if request.only is None:
        return True
    return _checks.pattern("only", request.only).search(path) is not None


# The state to build.


def _target(
    source: Source, saved: Sequence[ArraySpec], names: Sequence[str], request: Request
) -> Target:
    like, layouts = request.like, request.layouts
    if isinstance(like, LayoutMap):
        if layouts is not None:
            msg = (
                "give one layout map: like=layouts, or like=state and layouts=layouts."
            )
            raise CheckpointError(msg)
        like, layouts = None, like
    elif like is not None or source.is_foreign:
        if not source.leaves and not jax.tree.leaves(like):
            return Target([], lambda values: like)
        return Target.of(like, layouts, whole=not source.is_foreign)
    parts = [
        leaf.parts
        if leaf.path == name and not source.is_foreign
        else tuple(name.split("/"))
        for leaf, name in zip(saved, names, strict=True)
    ]
    tree = _nested(saved, parts, [_template(leaf) for leaf in saved])
    if tree == {}:
        return Target([], lambda values: {})
    if source.is_foreign or layouts is None or not isinstance(tree, dict):
        return Target.of(tree, layouts, whole=not source.is_foreign)
    target = Target.of(_SavedTree(tree), layouts)
    return Target(target.leaves, lambda values: target.rebuild(values).tree)


def _nested(
    leaves: Sequence[ArraySpec], parts: Sequence[Sequence[str]], values: Sequence[Any]
) -> PyTree:
    """Returns nested dicts of values, or the value of a leaf without a name.

    Args:
        leaves: The saved leaves, for messages.
        parts: The keys of every value, from the outermost.
        values: The values.

    Raises:
        CheckpointError: If a name is inside another one, or has too many keys.
    """
    tree: dict[str, Any] = {}
    for leaf, keys, value in zip(leaves, parts, values, strict=True):
        if not keys:
            return value
        if len(keys) > MOST_KEYS:
            msg = (
                f"{leaf.path[:40]}...: its name has {len(keys):,} keys, and nested "
                f"dicts may have {MOST_KEYS}. Shorten it with rename=, or give "
                "another separator=."
            )
            raise CheckpointError(msg)
        *parents, last = keys
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last in node:
            msg = (
                f"{leaf.path}: its name {'/'.join(keys)!r} is inside the name of "
                "another array, or around it. Change rename= so that no name is part "
                "of another."
            )
            raise CheckpointError(msg)
        node[last] = value
    return tree


def _template(leaf: ArraySpec) -> Any:
    """Returns the placeholder of a saved leaf in the state to build."""
    if is_number(leaf.dtype):
        return leaf.dtype()
    if leaf.is_numpy:
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class _SavedTree:
    """Nested dicts whose root key `params` is part of the paths that rules see.

    A plain dict with that key is taken for Linen variables, but here it may be a
    `TrainState` whose type was not saved.
    """

    tree: dict[str, Any]

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        names = tuple(sorted(self.tree))
        return [(DictKey(name), self.tree[name]) for name in names], names

    @classmethod
    def tree_unflatten(
        cls, names: tuple[str, ...], values: Sequence[Any]
    ) -> "_SavedTree":
        return cls(dict(zip(names, values, strict=True)))


# Reading.


def _plan(
    source: Source,
    target: Target,
    saved: Sequence[ArraySpec],
    matched: Matched,
    dims: Mapping[str, tuple[int, ...] | None],
) -> list[TargetLeaf | LeafRestore]:
    """Returns the outcome for every leaf of the target: restored or kept."""
    in_files = {(leaf.path, leaf.parts): leaf for leaf in saved}
    pairs = {pair.wanted.path: pair for pair in matched.pairs}
    plan: list[TargetLeaf | LeafRestore] = []
    for leaf in target.leaves:
        pair = pairs.get(leaf.leaf.path)
        if pair is None:
            plan.append(leaf)
            continue
        origin = in_files[pair.saved.path, pair.saved.parts]
        plan.append(LeafRestore(leaf, pair, origin, dims[origin.path]))
    check_kept([leaf for leaf in plan if isinstance(leaf, TargetLeaf)], source.name)
    for leaf in plan:
        if isinstance(leaf, LeafRestore):
            leaf.check()
    return plan


def _read(
    source: Source, requests: Iterable[tuple[ArraySpec, Index]]
) -> Iterator[HostArray]:
    """Yields slices in order, reading ahead within the budget."""
    waiting: deque[tuple[int, Callable[[], HostArray]]] = deque()
    num_bytes = 0
    for leaf, index in requests:
        size = _slice_bytes(leaf, index)
        while waiting and num_bytes + size > source.read_ahead_bytes:
            first_size, finish = waiting.popleft()
            num_bytes -= first_size
            yield finish()
        waiting.append((size, source.start(leaf, index)))
        num_bytes += size
    while waiting:
        yield waiting.popleft()[1]()


def _slice_bytes(leaf: ArraySpec, index: Index) -> int:
    itemsize = 4 if leaf.is_key or is_number(leaf.dtype) else leaf.dtype.itemsize
    for part in index:
        itemsize *= part.stop - part.start
    return itemsize
