"""The restore engine: from saved arrays in any format to a state on devices.

A format is a `SavedArrays`: names, shapes, dtypes, and a function that starts reading a
slice. Everything else is here and in `target`, and is the same for our checkpoints,
plain Orbax, safetensors and msgpack: names are matched, differences are shown, and each
process reads, casts and places the slices that its devices hold.

An earlier version let Orbax build the arrays of our format. It needed a second engine
next to this one, and five times the CPU time for many small arrays.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict

import jax
import numpy as np

from meshlayout import _render
from meshlayout._annotations import PyTree
from meshlayout.checkpoint.data_state import Continues
from meshlayout.checkpoint.difference import ArraySpec, RestoreDiff, is_number
from meshlayout.checkpoint.pairs import Dtypes, Request, match
from meshlayout.checkpoint.patterns import permutations, renamed
from meshlayout.checkpoint.target import (
    HostArray,
    Index,
    LeafRestore,
    Rebuild,
    target_of,
)
from meshlayout.errors import CheckpointError
from meshlayout.layout_map import LayoutMap


logger = logging.getLogger("meshlayout.checkpoint")

# Deeper trees make JAX exceed Python's recursion limit, from which the process does
# not recover. `test_restore_bad_inputs` has a name of 1,500 keys.
MOST_KEYS = 100

# How much a source with slow reads may read ahead: enough to keep a disk or a store
# busy, and little for the memory of a host.
READ_AHEAD_BYTES = 2**28


class SavedArrays(Protocol):
    """Saved arrays that can be read slice by slice.

    Attributes:
        name: The file or directory, for messages.
        leaves: The saved leaves.
        is_foreign: Whether another library wrote them; see `match`.
        read_ahead_bytes: How many bytes may be read ahead.
    """

    name: str
    leaves: list[ArraySpec]
    is_foreign: bool
    read_ahead_bytes: int

    def start(self, leaf: ArraySpec, index: Index) -> Callable[[], HostArray]:
        """Starts reading a slice of a saved array.

        Args:
            leaf: One of `leaves`, perhaps with its dims permuted.
            index: One slice per dim of the array in the file, each with a start and a
                stop; for PRNG keys, of the array of their words.

        Returns:
            A function that waits for the slice and returns it in its saved dtype, in
            memory that nothing else uses: a CPU device may take it over.
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


@dataclass(frozen=True)
class Restored:
    """The result of a restore.

    Attributes:
        state: The restored state.
        diff: How the saved arrays differed from it.
        restores: The arrays that were read, with their targets.
    """

    state: PyTree
    diff: RestoreDiff
    restores: Sequence[LeafRestore]


def load(source: SavedArrays, request: Request) -> Restored:
    """Restores a state from saved arrays.

    Args:
        source: The saved arrays.
        request: The state to restore, and its options.

    Raises:
        CheckpointError: If the saved arrays do not fit.
    """
    saved = _saved_by_name(source, request)
    leaves, rebuild = _target(source, saved, request)
    is_chosen = any(request.chooses(leaf.spec.path) for leaf in leaves)
    if request.only is not None and not is_chosen and not saved:
        first = source.leaves[0].path if source.leaves else ""
        msg = (
            f"only={request.only!r} matches no path in {source.name}, whose first path "
            f"is {first!r}. only= is a regular expression."
        )
        raise CheckpointError(msg)
    leaves, diff = match(
        saved, leaves, request, is_foreign=source.is_foreign, source=source.name
    )
    # All leaves before the first read: an error after minutes of reading helps nobody.
    _check(leaves, source.name)
    parts = _read(source, (part for leaf in leaves for part in leaf.saved_slices()))
    values = [leaf.place(parts) for leaf in leaves]
    restores = [leaf for leaf in leaves if leaf.saved is not None]
    return Restored(rebuild(values), diff, restores)


def load_foreign(source: SavedArrays, request: Request) -> PyTree:
    """Restores from files of another library; as `load`, but logs the differences."""
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


def to_numpy(source: SavedArrays) -> PyTree:
    """Returns all arrays as nested dicts of NumPy arrays, PRNG keys as their words."""
    for leaf in source.leaves:
        _check_known(leaf)
    slices = (
        (leaf, tuple(slice(0, size) for size in leaf.host_shape))
        for leaf in source.leaves
    )
    values = [
        leaf.dtype(array.item()) if is_number(leaf.dtype) else array
        for leaf, array in zip(source.leaves, _read(source, slices), strict=True)
    ]
    return _nested(source.leaves, [leaf.parts for leaf in source.leaves], values)


def _saved_by_name(source: SavedArrays, request: Request) -> dict[str, ArraySpec]:
    """Returns the chosen leaves by their new names, with their dims permuted."""
    names = [leaf.path for leaf in source.leaves]
    if request.rename is not None or request.separator != "/":
        names = renamed(names, request.rename, request.separator)
    dims: dict[str, tuple[int, ...]] = {}
    if request.transpose is not None:
        dims = permutations(request.transpose, names)
    return {
        name: leaf.transposed(dims.get(name))
        for leaf, name in zip(source.leaves, names, strict=True)
        if request.chooses(name)
    }


def _target(
    source: SavedArrays, saved: Mapping[str, ArraySpec], request: Request
) -> tuple[list[LeafRestore], Rebuild]:
    """Returns the target for `like=`, or for nested dicts of all saved leaves."""
    like, layouts = request.like, request.layouts
    if isinstance(like, LayoutMap):
        if layouts is not None:
            msg = (
                "like= and layouts= are both layout maps. Give one: like=layouts, or "
                "like=state and layouts=layouts."
            )
            raise CheckpointError(msg)
        like, layouts = None, like
    elif like is not None or source.is_foreign:
        return target_of(like, layouts, whole=not source.is_foreign)
    parts = [
        leaf.parts
        if leaf.path == name and not source.is_foreign
        else tuple(name.split("/"))
        for name, leaf in saved.items()
    ]
    leaves = list(saved.values())
    tree = _nested(leaves, parts, [_template(leaf) for leaf in leaves])
    if not leaves:
        return [], lambda values: tree
    if source.is_foreign:
        return target_of(tree, layouts)
    # Under an empty key, which paths leave out, so that rules see whole paths. At the
    # root, a tree with the key `params` would be taken for Linen variables, and
    # `params` left out of paths; but it may be a `TrainState`, whose type is not saved.
    targets, rebuild = target_of({"": tree}, layouts)
    return targets, lambda values: rebuild(values)[""]


def _template(leaf: ArraySpec) -> Any:
    """Returns the placeholder of a saved leaf in the state to build."""
    _check_known(leaf)
    if is_number(leaf.dtype):
        return leaf.dtype()
    if leaf.is_numpy:
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _check_known(leaf: ArraySpec) -> None:
    if leaf.dtype is None:
        msg = (
            f"{leaf.path} holds PRNG keys of a generator that is not registered with "
            "JAX. Register the generator, or restore the rest with like= and "
            "partial=True."
        )
        raise CheckpointError(msg)


def _nested(
    leaves: Sequence[ArraySpec], parts: Sequence[Sequence[str]], values: Sequence[Any]
) -> PyTree:
    """Returns nested dicts of values by their keys; a value without keys itself."""
    tree: dict[str, Any] = {}
    for leaf, keys, value in zip(leaves, parts, values, strict=True):
        if not keys:
            return value
        if len(keys) > MOST_KEYS:
            msg = (
                f"{leaf.path[:40]}...: the name has {len(keys):,} keys, and dicts may "
                f"be nested {MOST_KEYS} deep. Shorten the name with rename=, or give "
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
                f"{leaf.path}: the name {'/'.join(keys)!r} and that of another array "
                "contain each other. Change rename= so that no name is the beginning "
                "of another."
            )
            raise CheckpointError(msg)
        node[last] = value
    return tree


def _check(leaves: Sequence[LeafRestore], source: str) -> None:
    """Raises if a leaf would have no value, or a value that does not fit its layout."""
    abstract: list[str] = []
    for leaf in leaves:
        leaf.check(source)
        if leaf.saved is None and isinstance(leaf.value, jax.ShapeDtypeStruct):
            abstract.append(leaf.spec.path)
    if abstract:
        more = f" and {len(abstract) - 5:,} more" if len(abstract) > 5 else ""
        msg = (
            f"{', '.join(abstract[:5])}{more}: not restored from {source}, and like= "
            "holds only shapes there, so that there is no value to keep. Give a "
            "created state."
        )
        raise CheckpointError(msg)


def _read(
    source: SavedArrays, requests: Iterable[tuple[ArraySpec, Index]]
) -> Iterator[HostArray]:
    """Yields slices in order, reading ahead up to the source's number of bytes."""
    reads: deque[tuple[int, Callable[[], HostArray]]] = deque()
    num_bytes = 0
    for leaf, index in requests:
        lengths = [part.stop - part.start for part in index]
        size = leaf.host_dtype.itemsize * math.prod(lengths)
        # One read is always allowed, however large: otherwise it would never start.
        while reads and num_bytes + size > source.read_ahead_bytes:
            first_size, finish = reads.popleft()
            num_bytes -= first_size
            yield finish()
        reads.append((size, source.start(leaf, index)))
        num_bytes += size
    while reads:
        yield reads.popleft()[1]()
