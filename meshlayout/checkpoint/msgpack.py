"""States that Flax wrote as msgpack: `flax.serialization.to_bytes`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import serialization

from meshlayout import _paths
from meshlayout.checkpoint.difference import Leaf
from meshlayout.checkpoint.matching import Dtypes
from meshlayout.checkpoint.placing import Options, load
from meshlayout.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MeshLayoutError,
)
from meshlayout.layout_map import LayoutMap


def load_msgpack(
    path: Any,
    like: Any,
    *,
    layouts: LayoutMap | None = None,
    rename: Mapping[str, str] | None = None,
    transpose: Mapping[str, Sequence[int]] | None = None,
    partial: bool = False,
    allow: str | Sequence[str] = (),
    dtype: Dtypes = None,
) -> Any:
    """Returns a state with the arrays that Flax wrote, each in its layout.

    Msgpack can only be read from beginning to end: the host holds all arrays for as
    long as this takes, twice for those that Flax wrote in chunks. Each device gets
    its own slices alone. A changed bit inside an array is not found: the format has
    nothing to tell it by.

    Args:
        path: The file, or its bytes: what `flax.serialization.to_bytes` or
            `msgpack_serialize` made of a state.
        like: The state that is wanted: arrays, whose values are not looked at, or
            abstract arrays, as `ml.describe` gives them, in any tree. Or a layout map
            alone: then nested dicts of all arrays are returned.
        layouts: Where arrays go, if not where those of `like` are.
        rename: `{pattern: replacement}`, applied to the saved paths (keys joined by
            `/`) as by `re.sub`. A path may be changed by one pattern only.
        transpose: `{pattern: permutation}`, by path in the state: the array in the
            state is `np.transpose(saved, permutation)`.
        partial: Whether arrays of the state may be missing in the file, which then
            keep their values, and the file may hold more, which is then not read.
        allow: Patterns of paths that may differ in any way, in shape too; they then
            keep their values.
        dtype: A dtype for every array of its kind, or `{pattern: dtype}`. All others
            have to be saved in the dtype that is wanted.

    Raises:
        DamagedCheckpointError: If the file is cut off or is no msgpack of Flax.
        RestoreDiffError: If what differs is not allowed.
        CheckpointError: If there is no such file, or an option does not fit.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 8})
        >>> written = serialization.to_bytes({"w": np.arange(8, dtype="int32")})
        >>> loaded = load_msgpack(written, ml.LayoutMap(mesh, {"w": ("batch",)}))
        >>> str(ml.fetch_layout(loaded["w"]))
        '[batch]'
    """
    options = Options(
        rename=rename, transpose=transpose, partial=partial, allow=allow, dtype=dtype
    )
    state, _ = load(_Written(path), like, layouts, options)
    return state


class _Written:
    """The arrays of one file."""

    def __init__(self, path: Any) -> None:
        is_bytes = isinstance(path, (bytes, bytearray, memoryview))
        self.name = "the msgpack data" if is_bytes else str(path)
        tree = _unpack(bytes(path) if is_bytes else _read(path), self.name)
        try:
            found = _paths.flatten(tree, whole=True).leaves
        except MeshLayoutError as error:
            raise CheckpointError(f"{self.name}: {error}") from None
        self._values = {leaf.path: leaf.value for leaf in found if _is_value(leaf)}
        self.key_impls: dict[str, str] = {}
        self.leaves = [_leaf(path, value) for path, value in self._values.items()]

    def read(self, leaf: Leaf, index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        return np.asarray(self._values[leaf.path])[index]


def _is_value(leaf: _paths.Leaf) -> bool:
    return isinstance(leaf.value, (np.ndarray, np.generic, bool, int, float, complex))


def _leaf(path: str, value: Any) -> Leaf:
    parts = tuple(path.split("/"))
    if not hasattr(value, "dtype"):
        return Leaf(path, parts, (), type(value))
    return Leaf(path, parts, value.shape, value.dtype)


def _read(path: Any) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except (OSError, TypeError) as error:
        msg = f"{path}: it cannot be read: {error}."
        raise CheckpointError(msg) from None


def _unpack(data: bytes, name: str) -> Any:
    try:
        tree = serialization.msgpack_restore(data)
    # What Flax and msgpack raise for bytes that are something else.
    except (
        ValueError,
        TypeError,
        KeyError,
        AssertionError,
        AttributeError,
        IndexError,
        RecursionError,
        MemoryError,
    ) as error:
        msg = f"{name}: it is cut off or no msgpack of Flax: {error}"
        raise DamagedCheckpointError(f"{msg.rstrip('.: ')}.") from None
    if not isinstance(tree, Mapping) or not jax.tree.leaves(tree):
        msg = f"{name}: it is no msgpack of a state, and holds a {type(tree).__name__}."
        raise DamagedCheckpointError(msg)
    return tree
