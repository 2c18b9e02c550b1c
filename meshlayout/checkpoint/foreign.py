"""States that other libraries wrote: Flax's msgpack, and directories of plain Orbax.

Each is a `SavedArrays` for the restore engine. Neither format has checksums of arrays,
so that damage is found only where a file is cut off or contradicts itself.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from flax import serialization

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout._optional import require
from meshlayout.checkpoint.difference import ArraySpec, key_dtype
from meshlayout.checkpoint.files import path_text
from meshlayout.checkpoint.orbax_arrays import (
    TREE,
    ArrayReadError,
    Format,
    OrbaxArrays,
    read_json,
)
from meshlayout.checkpoint.pairs import Dtypes, Request
from meshlayout.checkpoint.restore import MOST_KEYS, READ_AHEAD_BYTES, load_foreign
from meshlayout.checkpoint.target import HostArray, Index
from meshlayout.errors import CheckpointError, DamagedCheckpointError
from meshlayout.layout_map import LayoutMap


# `msgpack_restore` and `msgpack` raise all of these for bytes of another kind.
_UNPACK_ERRORS = (
    ValueError,
    TypeError,
    KeyError,
    AssertionError,
    AttributeError,
    IndexError,
    RecursionError,
    MemoryError,
)


def load_msgpack(
    path: str | os.PathLike[str] | bytes,
    like: PyTree,
    *,
    layouts: LayoutMap | None = None,
    rename: Mapping[str, str] | None = None,
    transpose: Mapping[str, Sequence[int]] | None = None,
    partial: bool = False,
    allow: str | Sequence[str] = (),
    dtype: Dtypes = None,
) -> PyTree:
    """Loads a state that Flax wrote as msgpack, each array in its layout.

    Use this for the output of `flax.serialization.to_bytes`. Msgpack can only be read
    from beginning to end: the host holds all arrays during the call, and those that
    Flax wrote in chunks twice. Each device gets only its own slices. A changed bit
    inside an array goes unnoticed, since the format has no checksums.

    `path` is the file, or its bytes: the output of `flax.serialization.to_bytes` or
    `msgpack_serialize`. All other arguments are those of `load_safetensors`; in saved
    paths, `/` separates the keys.

    Raises:
        DamagedCheckpointError: If the file is truncated or is not Flax's msgpack.
        RestoreDiffError: If the arrays differ in ways that are not allowed.
        CheckpointError: If the file does not exist, or an option does not fit.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 8})
        >>> written = serialization.to_bytes({"w": np.arange(8, dtype="int32")})
        >>> loaded = load_msgpack(written, ml.LayoutMap(mesh, {"w": ("batch",)}))
        >>> str(ml.fetch_layout(loaded["w"]))
        '[batch]'
    """
    request = Request(like, layouts, rename, transpose, partial, allow, dtype)
    return load_foreign(_MsgpackFile(path), request)


def load_orbax(
    directory: str | os.PathLike[str],
    like: PyTree,
    *,
    layouts: LayoutMap | None = None,
    item: str | None = None,
    rename: Mapping[str, str] | None = None,
    transpose: Mapping[str, Sequence[int]] | None = None,
    partial: bool = False,
    allow: str | Sequence[str] = (),
    dtype: Dtypes = None,
) -> PyTree:
    """Loads a state that plain Orbax wrote, each array in its layout.

    Use this for checkpoints of `StandardCheckpointer`, `PyTreeCheckpointer`, a
    `CheckpointManager` or Orbax's newer functions, saved on any mesh. Every device
    reads only the slices that it holds. Orbax writes no checksums of arrays: a changed
    bit inside one is not always found.

    `directory` is the directory that was saved to; for a `CheckpointManager`, that of
    one step. `item` names the tree in it, if it holds several. All other arguments are
    those of `load_msgpack`. A leading `params/`, and the `/value` that NNX once wrote,
    need no renaming.

    Raises:
        DamagedCheckpointError: If files are missing or changed, as far as the format
            shows it.
        RestoreDiffError: If the arrays differ in ways that are not allowed.
        CheckpointError: If Orbax wrote nothing there, or an option does not fit.
    """
    request = Request(like, layouts, rename, transpose, partial, allow, dtype)
    return load_foreign(_OrbaxDirectory(directory, item), request)


# Msgpack.


class _MsgpackFile:
    """The arrays of one file, all of them in memory; see `SavedArrays`."""

    is_foreign = True
    read_ahead_bytes = 0

    def __init__(self, path: Any) -> None:
        self.name = "the msgpack data"
        content = path
        if not isinstance(path, (bytes, bytearray, memoryview)):
            self.name = path_text("path", path)
            try:
                content = Path(self.name).expanduser().read_bytes()
            except OSError as error:
                msg = f"{path} cannot be read: {error}."
                raise CheckpointError(msg) from None
        self._values: dict[str, Any] = {}
        for keys, value in _values_in(_unpacked(bytes(content), self.name), self.name):
            path = "/".join(keys)
            if path in self._values:
                # Keys `1` and `"1"`, or a key that contains a slash.
                msg = f"{self.name}: two arrays have the path {path!r}."
                raise CheckpointError(msg)
            self._values[path] = value
        self.leaves = [
            ArraySpec(path, (), np.shape(value), getattr(value, "dtype", type(value)))
            for path, value in self._values.items()
        ]

    def start(self, leaf: ArraySpec, index: Index) -> Callable[[], HostArray]:
        """As for `SavedArrays`."""
        value = np.asarray(self._values[leaf.path])
        return lambda: np.array(value[index])


def _unpacked(content: bytes, name: str) -> Mapping[Any, Any]:
    try:
        tree = serialization.msgpack_restore(content)
    except _UNPACK_ERRORS as error:
        msg = f"{name} is truncated or is not Flax's msgpack: {error}"
        raise DamagedCheckpointError(f"{msg.rstrip('.: ')}.") from None
    if not isinstance(tree, Mapping) or not tree:
        is_empty = isinstance(tree, Mapping)
        what = "an empty dict" if is_empty else _checks.shown(tree)
        msg = f"{name} is not msgpack of a state: it holds {what}."
        raise DamagedCheckpointError(msg)
    return tree


def _values_in(
    node: PyTree, name: str, keys: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the keys and the value of all arrays and numbers."""
    if len(keys) > MOST_KEYS:
        msg = (
            f"{name}: {'/'.join(keys)[:40]}... is nested more than {MOST_KEYS} deep, "
            "which no state is."
        )
        raise CheckpointError(msg)
    if isinstance(node, msgpack.ExtType):  # which `msgpack_restore` leaves as it comes
        msg = (
            f"{name}: {'/'.join(keys)} has the msgpack extension type {node.code}, "
            "which Flax does not write."
        )
        raise DamagedCheckpointError(msg)
    if isinstance(node, (np.ndarray, np.generic, bool, int, float, complex)):
        yield keys, node
        return
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(node, Mapping):
        children = node.items()
    elif isinstance(node, (list, tuple)):
        children = enumerate(node)
    for key, child in children:
        yield from _values_in(child, name, (*keys, str(key)))


# Plain Orbax.


class _OrbaxDirectory:
    """The arrays of one tree that Orbax wrote; see `SavedArrays`."""

    is_foreign = True
    read_ahead_bytes = READ_AHEAD_BYTES

    def __init__(self, directory: Any, item: str | None) -> None:
        # A dependency of Orbax, which also reads paths in cloud storage.
        epath = require("etils.epath", extra="checkpoint", purpose="Reading a path")
        path = epath.Path(path_text("directory", directory))
        if "://" not in str(path):
            path = epath.Path(Path(path).expanduser().absolute())
        path = _find_tree(path, item)
        self.name = str(path)
        layout = Format.read(path)
        # The type of each leaf, by its keys; strings and empty nodes are not in the
        # array files.
        kinds: dict[tuple[str, ...], str] = {}
        try:
            for entry in layout.tree.values():
                value = entry["value_metadata"]
                kind = value.get("value_type")
                if not value.get("skip_deserialize") and kind not in _NOT_VALUES:
                    keys = tuple(str(key["key"]) for key in entry["key_metadata"])
                    kinds[keys] = kind
        except (AttributeError, KeyError, TypeError) as error:
            msg = f"{path / TREE} is not in Orbax's format: {error!r}."
            raise DamagedCheckpointError(msg) from None
        self._check_distinct(kinds)
        self._arrays = OrbaxArrays(self.name, layout, map(".".join, kinds))
        impls = _key_impls(path)
        self.leaves = [
            self._leaf(keys, kind, impls.get(".".join(keys)))
            for keys, kind in kinds.items()
        ]

    def start(self, leaf: ArraySpec, index: Index) -> Callable[[], HostArray]:
        """As for `SavedArrays`."""

        def finish() -> HostArray:
            with self._unreadable(leaf.path):
                return read()

        with self._unreadable(leaf.path):
            read = self._arrays.start(".".join(leaf.parts), index)
        return finish

    def _leaf(self, keys: tuple[str, ...], kind: str, impl: str | None) -> ArraySpec:
        path = "/".join(keys)
        with self._unreadable(path):
            shape, dtype = self._arrays.shape_and_dtype(".".join(keys))
        if kind == "scalar" and not shape:
            return ArraySpec(path, keys, (), type(dtype.type(0).item()))
        array = ArraySpec(path, keys, shape, dtype)
        if impl is None or key_dtype(impl) is None:
            return array
        # Orbax stores keys as their words, in trailing dims. If the file does not fit
        # the generator, the array is what the file says: plain words.
        key = replace(array, shape=(), dtype=key_dtype(impl))
        rank = len(shape) - len(key.host_shape)
        is_key = (shape[rank:], dtype) == (key.host_shape, key.host_dtype)
        return replace(key, shape=shape[:rank]) if is_key else array

    @contextlib.contextmanager
    def _unreadable(self, path: str) -> Iterator[None]:
        try:
            yield
        except ArrayReadError as error:
            msg = f"{self.name}: {path} cannot be read: {error}."
            raise DamagedCheckpointError(msg) from None

    def _check_distinct(self, leaves: Iterable[tuple[str, ...]]) -> None:
        """Raises if two arrays share a name in Orbax's files, or a path."""
        lost = "name in Orbax's files, which hold only one of them"
        unclear = "path. Read them with Orbax, and rename one"
        for separator, problem, kind in (
            (".", lost, DamagedCheckpointError),
            ("/", unclear, CheckpointError),
        ):
            by_name: dict[str, tuple[str, ...]] = {}
            for keys in leaves:
                other = by_name.setdefault(separator.join(keys), keys)
                if other != keys:
                    msg = f"{self.name}: {other} and {keys} have the same {problem}."
                    raise kind(msg)


# Orbax's types of strings, and of nodes without leaves.
_NOT_VALUES = ("string", "None", "Dict", "List")


def _find_tree(path: Any, item: str | None) -> Any:
    """Returns the directory of the requested tree."""
    if not path.is_dir():
        msg = f"{path} does not exist, or is not a directory."
        raise CheckpointError(msg)
    if item is None and (path / TREE).exists():
        return path
    inside = sorted(child.name for child in path.iterdir() if child.is_dir())
    trees = [name for name in inside if (path / name / TREE).exists()]
    if item in trees:
        return path / str(item)
    if item is None and len(trees) == 1:
        return path / trees[0]
    names = ", ".join(map(repr, trees))
    steps = sorted((name for name in inside if name.isdecimal()), key=int)
    if trees and item is None:
        why = f"holds several trees: {names}. Choose one with item=."
    elif trees:
        why = f"has no tree {item!r}, only {names}."
    elif steps:
        why = (
            f"holds the steps {', '.join(steps[-5:])}. Give the directory of one of "
            f"them, such as {path / steps[-1]}."
        )
    else:
        why = "holds nothing that Orbax finished writing."
    raise CheckpointError(f"{path} {why}")


def _key_impls(path: Any) -> dict[str, str]:
    """Returns the generator of each array of PRNG keys, by Orbax's name."""
    impls: dict[str, str] = {}
    for file in path.glob("array_metadatas/process_*"):
        try:
            for entry in read_json(file)["array_metadatas"]:
                array = entry["array_metadata"]
                impl = (array["ext_metadata"] or {}).get("random_key_impl")
                if isinstance(impl, str):
                    impls[array["param_name"]] = impl
        except (AttributeError, KeyError, TypeError) as error:
            msg = f"{file} is not in Orbax's format: {error!r}."
            raise DamagedCheckpointError(msg) from None
    return impls
