"""States that other libraries wrote: Flax's msgpack, and directories of plain Orbax."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from flax import serialization

from meshlayout import _checks
from meshlayout._annotations import Leaf, PyTree
from meshlayout._optional import require
from meshlayout.checkpoint.difference import ArraySpec
from meshlayout.checkpoint.orbax_arrays import (
    TREE,
    ArrayReadError,
    Format,
    OrbaxArrays,
    read_json,
)
from meshlayout.checkpoint.pairs import Dtypes, key_dtype, key_words
from meshlayout.checkpoint.restore import (
    MOST_KEYS,
    READ_AHEAD_BYTES,
    Request,
    load_foreign,
)
from meshlayout.checkpoint.target import HostArray, Index
from meshlayout.errors import CheckpointError, DamagedCheckpointError
from meshlayout.layout_map import LayoutMap


# `msgpack_restore` and `msgpack` raise all of these for other kinds of bytes.
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
    """Returns a state with the arrays that Flax wrote, each in its layout.

    Use this for what `flax.serialization.to_bytes` wrote. Msgpack can only be read from
    beginning to end: the host holds all arrays while this runs, twice for those that
    Flax wrote in chunks. Each device gets only its own slices. A changed bit inside an
    array goes unnoticed, as the format has no checksums.

    Args:
        path: The file, or its bytes: what `flax.serialization.to_bytes` or
            `msgpack_serialize` made of a state.
        like: The state to restore: arrays, whose values are ignored, or abstract
            arrays (from `ml.describe`), in any tree. Or a layout map alone: then nested
            dicts of all arrays are returned.
        layouts: Where arrays go, if not where those of `like` are.
        rename: `{pattern: replacement}`, applied to the saved paths (keys joined by
            `/`) as by `re.sub`. A path may be changed by one pattern only.
        transpose: `{pattern: permutation}`, by path in the state: the array in the
            state is `np.transpose(saved, permutation)`.
        partial: Whether arrays of the state may be missing in the file, and keep
            their values, and extra arrays in the file are ignored.
        allow: Patterns of paths that may differ in any way, in shape too; they then
            keep their values.
        dtype: A dtype for every array of its kind, or `{pattern: dtype}`. All others
            must have been saved in the state's dtype.

    Raises:
        DamagedCheckpointError: If the file is cut off or is not Flax's msgpack.
        RestoreDiffError: If they differ in ways that are not allowed.
        CheckpointError: If there is no such file, or an option does not fit.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 8})
        >>> written = serialization.to_bytes({"w": np.arange(8, dtype="int32")})
        >>> loaded = load_msgpack(written, ml.LayoutMap(mesh, {"w": ("batch",)}))
        >>> str(ml.fetch_layout(loaded["w"]))
        '[batch]'
    """
    request = Request(
        like=like,
        layouts=layouts,
        rename=rename,
        transpose=transpose,
        partial=partial,
        allow=allow,
        dtype=dtype,
    )
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
    """Returns a state with the arrays that plain Orbax wrote, each in its layout.

    Use this for what `StandardCheckpointer`, `PyTreeCheckpointer`, a step of a
    `CheckpointManager`, or the functions of Orbax's newer API wrote, on whatever mesh
    that was. Every device reads only the slices that it holds. Orbax writes no
    checksums of arrays: a changed bit inside one is not always found.

    Args:
        directory: What was saved to; of a `CheckpointManager`, the directory of a
            step.
        like: As for `load_msgpack`, as are all options but `item`.
        layouts: Where arrays go, if not where those of `like` are.
        item: The name of the tree in the directory, where it holds several.
        rename: `{pattern: replacement}` for saved paths. A leading `params/`, and the
            `/value` that NNX once wrote, need no renaming.
        transpose: `{pattern: permutation}`, by path in the state.
        partial: Whether arrays may be missing or extra.
        allow: Patterns of paths that may differ in any way.
        dtype: A dtype for every array of its kind, or `{pattern: dtype}`.

    Raises:
        DamagedCheckpointError: If files are missing or are not what was saved, as far
            as the format can tell.
        RestoreDiffError: If they differ in ways that are not allowed.
        CheckpointError: If Orbax wrote nothing there, or an option does not fit.
    """
    request = Request(
        like=like,
        layouts=layouts,
        rename=rename,
        transpose=transpose,
        partial=partial,
        allow=allow,
        dtype=dtype,
    )
    return load_foreign(_OrbaxDirectory(directory, item), request)


def check_path(name: str, path: Any) -> None:
    """Raises CheckpointError if a value is not a path.

    Args:
        name: The parameter, for messages.
        path: What the user gave.
    """
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text or "\0" in text:
        msg = (
            f"{name} must be the path of a file or directory, got "
            f"{_checks.shown(path)}."
        )
        raise CheckpointError(msg)


# Msgpack.


class _MsgpackFile:
    """The arrays of one file, all of them in memory; see `Source`."""

    is_foreign = True
    read_ahead_bytes = 0

    def __init__(self, path: Any) -> None:
        is_bytes = isinstance(path, (bytes, bytearray, memoryview))
        if not is_bytes:
            check_path("path", path)
        self.name = "the msgpack data" if is_bytes else str(path)
        tree = _unpack(bytes(path) if is_bytes else _read_file(path), self.name)
        self._values: dict[str, Any] = {}
        for keys, value in _values_in(tree, (), self.name):
            name = "/".join(keys)
            if name in self._values:
                msg = f"{self.name}: two arrays have the path {name!r}."
                raise CheckpointError(msg)
            self._values[name] = value
        self.leaves = [_leaf(path, value) for path, value in self._values.items()]

    def start(self, leaf: ArraySpec, index: Index) -> Callable[[], HostArray]:
        """As for `Source`."""
        value = np.asarray(self._values[leaf.path])
        return lambda: np.array(value[index])


def _read_file(path: Any) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        msg = f"{path}: it cannot be read: {error}."
        raise CheckpointError(msg) from None


def _unpack(data: bytes, name: str) -> Mapping[Any, Any]:
    try:
        tree = serialization.msgpack_restore(data)
    except _UNPACK_ERRORS as error:
        msg = f"{name}: it is cut off or not msgpack of Flax: {error}"
        raise DamagedCheckpointError(f"{msg.rstrip('.: ')}.") from None
    if not isinstance(tree, Mapping) or not tree:
        kind = type(tree).__name__
        msg = f"{name}: it is not msgpack of a state: it holds {_checks.shown(tree)}."
        if isinstance(tree, Mapping):
            msg = f"{name}: it is not msgpack of a state: it holds an empty {kind}."
        raise DamagedCheckpointError(msg)
    return tree


def _values_in(
    node: PyTree, keys: tuple[str, ...], name: str
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the keys and the value of all arrays and numbers."""
    if len(keys) > MOST_KEYS:
        msg = (
            f"{name}: {'/'.join(keys)[:40]}... is nested more than {MOST_KEYS} deep, "
            "which no state is."
        )
        raise CheckpointError(msg)
    if isinstance(node, msgpack.ExtType):
        msg = (
            f"{name}: {'/'.join(keys)} is of the extension type {node.code} of "
            "msgpack, which Flax does not write."
        )
        raise DamagedCheckpointError(msg)
    if isinstance(node, Mapping):
        for key, child in node.items():
            yield from _values_in(child, (*keys, str(key)), name)
    elif isinstance(node, (list, tuple)):
        for position, child in enumerate(node):
            yield from _values_in(child, (*keys, str(position)), name)
    elif isinstance(node, (np.ndarray, np.generic, bool, int, float, complex)):
        yield keys, node


def _leaf(path: str, value: Leaf) -> ArraySpec:
    parts = tuple(path.split("/"))
    if not hasattr(value, "dtype"):
        return ArraySpec(path, parts, (), type(value))
    return ArraySpec(path, parts, value.shape, value.dtype)


# Plain Orbax.


class _OrbaxDirectory:
    """The arrays of one tree that Orbax wrote; see `Source`."""

    is_foreign = True
    read_ahead_bytes = READ_AHEAD_BYTES

    def __init__(self, directory: Any, item: str | None) -> None:
        check_path("directory", directory)
        # Orbax's own dependency, for paths in clouds too.
        epath = require("etils.epath", extra="checkpoint", purpose="Reading a path")
        path = epath.Path(directory)
        if "://" not in str(path):
            path = epath.Path(Path(path).expanduser().absolute())
        path = _find_tree(path, item)
        self.name = str(path)
        layout = Format.read(path)
        try:
            entries = [_Entry.of(entry) for entry in layout.tree.values()]
        except (AttributeError, KeyError, TypeError) as error:
            msg = f"{path / TREE}: it is not what Orbax writes: {error!r}."
            raise DamagedCheckpointError(msg) from None
        entries = [entry for entry in entries if entry.is_value]
        self._check_distinct(entries)
        self._names = {entry.path: entry.name for entry in entries}
        self._arrays = OrbaxArrays(self.name, layout, self._names.values())
        impls = _key_impls(path)
        self.leaves = [self._leaf(entry, impls.get(entry.path)) for entry in entries]

    def start(self, leaf: ArraySpec, index: Index) -> Callable[[], HostArray]:
        """As for `Source`."""

        def finish() -> HostArray:
            with self._unreadable(leaf.path):
                return read()

        with self._unreadable(leaf.path):
            read = self._arrays.start(self._names[leaf.path], index)
        return finish

    def _leaf(self, entry: "_Entry", impl: str | None) -> ArraySpec:
        with self._unreadable(entry.path):
            shape, dtype = self._arrays.shape_and_dtype(entry.name)
        if entry.is_number:
            return ArraySpec(entry.path, entry.keys, (), type(dtype.type(0).item()))
        keys = None if impl is None else key_dtype(impl)
        if keys is not None:
            rank = len(shape) - len(key_words(keys, ())["shape"])
            return ArraySpec(entry.path, entry.keys, shape[:rank], keys)
        return ArraySpec(entry.path, entry.keys, shape, dtype)

    @contextlib.contextmanager
    def _unreadable(self, path: str) -> Iterator[None]:
        try:
            yield
        except ArrayReadError as error:
            msg = f"{self.name}: {path} cannot be read: {error}."
            raise DamagedCheckpointError(msg) from None

    def _check_distinct(self, entries: Sequence["_Entry"]) -> None:
        by_name: dict[str, _Entry] = {}
        by_path: dict[str, _Entry] = {}
        for entry in entries:
            other = by_name.setdefault(entry.name, entry)
            if other is not entry:
                msg = (
                    f"{self.name}: Orbax has one name, {entry.name!r}, for the arrays "
                    f"{other.keys} and {entry.keys}, and kept only one of them."
                )
                raise DamagedCheckpointError(msg)
            other = by_path.setdefault(entry.path, entry)
            if other is not entry:
                msg = (
                    f"{self.name}: the arrays {other.keys} and {entry.keys} have the "
                    f"same path, {entry.path!r}. Read it with Orbax and rename one."
                )
                raise CheckpointError(msg)


@dataclass(frozen=True)
class _Entry:
    """Orbax's metadata of one leaf.

    Attributes:
        keys: The keys that its name is made of.
        is_value: Whether it is an array or a number; empty nodes and texts are not.
        is_number: Whether it is a Python number.
    """

    keys: tuple[str, ...]
    is_value: bool
    is_number: bool

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "_Entry":
        keys = tuple(str(key["key"]) for key in entry["key_metadata"])
        value = entry["value_metadata"]
        kind = value.get("value_type")
        is_empty = kind in ("string", "None", "Dict", "List")
        is_value = not value.get("skip_deserialize") and not is_empty
        return cls(keys, is_value, kind == "scalar")

    @property
    def path(self) -> str:
        return "/".join(self.keys)

    @property
    def name(self) -> str:
        """Orbax's name for it in its files."""
        return ".".join(self.keys)


def _find_tree(path: Any, item: str | None) -> Any:
    """Returns the directory of the requested tree."""
    if not path.is_dir():
        msg = f"{path}: there is no such directory."
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
    if trees and item is None:
        msg = f"{path}: it holds several trees: {names}. Give item= one of them."
    elif trees:
        msg = f"{path}: it holds no tree {item!r}; it holds {names}."
    else:
        msg = f"{path}: there is nothing in it that Orbax finished writing."
        steps = sorted((name for name in inside if name.isdecimal()), key=int)
        if steps:
            msg = (
                f"{path}: it holds the steps {', '.join(steps[-5:])}. Give the "
                f"directory of one of them, as {path / steps[-1]}."
            )
    raise CheckpointError(msg)


def _key_impls(path: Any) -> dict[str, str]:
    """Returns the generator of each array of PRNG keys, by path."""
    impls: dict[str, str] = {}
    for file in path.glob("array_metadatas/process_*"):
        try:
            for entry in read_json(file)["array_metadatas"]:
                array = entry["array_metadata"]
                impl = (array["ext_metadata"] or {}).get("random_key_impl")
                if impl is not None:
                    impls[array["param_name"].replace(".", "/")] = impl
        except (AttributeError, KeyError, TypeError) as error:
            msg = f"{file}: it is not what Orbax writes: {error!r}."
            raise DamagedCheckpointError(msg) from None
    return impls
