"""Directories that plain Orbax or NNX code wrote, read slice by slice."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshlayout._optional import require
from meshlayout.checkpoint.difference import Leaf
from meshlayout.checkpoint.matching import Dtypes
from meshlayout.checkpoint.placing import Options, load
from meshlayout.errors import CheckpointError, DamagedCheckpointError
from meshlayout.layout_map import LayoutMap


_TREE = "_METADATA"


def load_orbax(
    directory: Any,
    like: Any,
    *,
    layouts: LayoutMap | None = None,
    item: str | None = None,
    rename: Mapping[str, str] | None = None,
    transpose: Mapping[str, Sequence[int]] | None = None,
    partial: bool = False,
    allow: str | Sequence[str] = (),
    dtype: Dtypes = None,
) -> Any:
    """Returns a state with the arrays that plain Orbax wrote, each in its layout.

    For what `StandardCheckpointer`, `PyTreeCheckpointer`, a step of a
    `CheckpointManager`, or the functions of Orbax's newer API wrote, on whatever mesh
    that was. Every device reads only the slices that it holds. Orbax writes no
    checksums of arrays: a changed bit inside one is not always found.

    Args:
        directory: What was saved to; of a `CheckpointManager`, the directory of a
            step.
        like: The state that is wanted: arrays, whose values are not looked at, or
            abstract arrays, as `ml.describe` gives them, in any tree. Or a layout map
            alone: then nested dicts of all arrays are returned.
        layouts: Where arrays go, if not where those of `like` are.
        item: The name of the tree in the directory, where it holds several.
        rename: `{pattern: replacement}`, applied to the saved paths (keys joined by
            `/`) as by `re.sub`. A path may be changed by one pattern only. A leading
            `params/`, and the `/value` that NNX once wrote, need no renaming.
        transpose: `{pattern: permutation}`, by path in the state: the array in the
            state is `np.transpose(saved, permutation)`.
        partial: Whether arrays of the state may be missing in the directory, which
            then keep their values, and it may hold more, which is then not read.
        allow: Patterns of paths that may differ in any way, in shape too; they then
            keep their values.
        dtype: A dtype for every array of its kind, or `{pattern: dtype}`. All others
            have to be saved in the dtype that is wanted.

    Raises:
        DamagedCheckpointError: If files are missing or are not what was saved, as far
            as the format can tell.
        RestoreDiffError: If what differs is not allowed.
        CheckpointError: If there is nothing of Orbax, or an option does not fit.
    """
    options = Options(
        rename=rename, transpose=transpose, partial=partial, allow=allow, dtype=dtype
    )
    state, _ = load(_Directory(directory, item), like, layouts, options)
    return state


class _Directory:
    """The arrays of one tree that Orbax wrote."""

    def __init__(self, directory: Any, item: str | None) -> None:
        self._library = require(
            "tensorstore", extra="checkpoint", purpose="Reading Orbax's files"
        )
        # Orbax's own dependency, for paths in clouds too.
        epath = require("etils.epath", extra="checkpoint", purpose="Reading a path")
        path = _absolute(epath.Path(directory))
        self._path = _find_tree(path, item)
        self.name = str(self._path)
        tree = _read_json(self._path / _TREE)
        try:
            self._is_ocdbt = bool(tree.get("use_ocdbt", True))
            self._driver = "zarr3" if tree.get("use_zarr3") else "zarr"
            self._is_full = bool(tree.get("store_array_data_equal_to_fill_value"))
            entries = [_Entry(one) for one in tree["tree_metadata"].values()]
        except (AttributeError, KeyError, TypeError) as error:
            msg = f"{self._path / _TREE}: it is not what Orbax writes: {error!r}."
            raise DamagedCheckpointError(msg) from None
        self.key_impls = _key_impls(self._path)
        self._opened = self._open([one for one in entries if one.is_value])
        self.leaves = [
            Leaf(path, entry.keys, tuple(store.shape), entry.dtype(store))
            for path, (entry, store) in self._opened.items()
        ]

    def read(self, leaf: Leaf, index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        _, store = self._opened[leaf.path]
        try:
            return np.asarray(store[index].read().result())
        except ValueError as error:
            raise self._damaged(leaf.path, error) from None

    def _open(self, entries: Sequence["_Entry"]) -> dict[str, Any]:
        """Opens all arrays at once: that takes their shapes and dtypes, no values."""
        self._check_distinct(entries)
        context = self._library.Context()
        started = [
            (one, self._library.open(self._spec(one), context=context, read=True))
            for one in entries
        ]
        opened: dict[str, Any] = {}
        for entry, future in started:
            try:
                opened[entry.path] = entry, future.result()
            except ValueError as error:
                raise self._damaged(entry.path, error) from None
        return opened

    def _check_distinct(self, entries: Sequence["_Entry"]) -> None:
        names: dict[str, _Entry] = {}
        paths: dict[str, _Entry] = {}
        for one in entries:
            other = names.setdefault(one.name, one)
            if other is not one:
                msg = (
                    f"{self.name}: Orbax has one name, {one.name!r}, for the arrays "
                    f"{other.keys} and {one.keys}, and kept only one of them."
                )
                raise DamagedCheckpointError(msg)
            other = paths.setdefault(one.path, one)
            if other is not one:
                msg = (
                    f"{self.name}: the arrays {other.keys} and {one.keys} have the "
                    f"same path, {one.path!r}. Read it with Orbax and rename one."
                )
                raise CheckpointError(msg)

    def _spec(self, entry: "_Entry") -> dict[str, Any]:
        name = entry.name
        store = _store(f"{self._path}/{'' if self._is_ocdbt else f'{name}/'}")
        if self._is_ocdbt:
            store = {"driver": "ocdbt", "base": store, "path": f"{name}/"}
        spec: dict[str, Any] = {"driver": self._driver, "kvstore": store}
        if self._is_full:
            # A chunk that is not there was lost: it does not stand for zeros.
            spec["fill_missing_data_reads"] = False
        return spec

    def _damaged(self, path: str, error: Exception) -> DamagedCheckpointError:
        line = str(error).partition(" [")[0].partition("\n")[0].rstrip(".")
        msg = f"{self.name}: {path} cannot be read: {line}."
        return DamagedCheckpointError(msg)


class _Entry:
    """What Orbax says of one leaf."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.keys = tuple(str(one["key"]) for one in entry["key_metadata"])
        value = entry["value_metadata"]
        # Empty nodes and texts are no arrays.
        self.is_value = not value.get("skip_deserialize") and (
            value.get("value_type") not in ("string", "None", "Dict", "List")
        )

        self._is_number = value.get("value_type") == "scalar"

    @property
    def path(self) -> str:
        return "/".join(self.keys)

    @property
    def name(self) -> str:
        """What Orbax calls it in its files."""
        return ".".join(self.keys)

    def dtype(self, store: Any) -> Any:
        found = store.dtype.numpy_dtype
        if not self._is_number:
            return found
        return type(np.zeros((), found).item())  # a Python number


def _absolute(path: Any) -> Any:
    return (
        path if "://" in str(path) else type(path)(Path(path).expanduser().absolute())
    )


def _store(path: str) -> Any:
    """Returns how TensorStore names a directory."""
    scheme, _, rest = path.rpartition("://")
    if not scheme:
        return {"driver": "file", "path": path}
    bucket, _, inside = rest.partition("/")
    drivers = {"gs": "gcs", "s3": "s3"}
    if scheme not in drivers:
        return path
    return {"driver": drivers[scheme], "bucket": bucket, "path": inside}


def _find_tree(path: Any, item: str | None) -> Any:
    """Returns the directory of the tree that is meant."""
    if not path.is_dir():
        msg = f"{path}: there is no such directory."
        raise CheckpointError(msg)
    if item is None and (path / _TREE).exists():
        return path
    inside = sorted(one.name for one in path.iterdir() if one.is_dir())
    trees = [name for name in inside if (path / name / _TREE).exists()]
    if item in trees:
        return path / item
    if item is None and len(trees) == 1:
        return path / trees[0]
    some = ", ".join(map(repr, trees))
    if trees and item is None:
        msg = f"{path}: it holds several trees: {some}. Give item= one of them."
    elif trees:
        msg = f"{path}: it holds no tree {item!r}; it holds {some}."
    else:
        msg = f"{path}: there is nothing in it that Orbax finished writing."
        steps = [name for name in inside if name.isdecimal()]
        if steps:
            last = max(steps, key=int)
            msg = (
                f"{path}: it holds the steps {', '.join(sorted(steps, key=int)[-5:])}. "
                f"Give the directory of one of them, as {path / last}."
            )
    raise CheckpointError(msg)


def _key_impls(path: Any) -> dict[str, str]:
    """Returns the generator of each array of PRNG keys, by path."""
    found: dict[str, str] = {}
    for file in path.glob("array_metadatas/process_*"):
        try:
            for one in _read_json(file)["array_metadatas"]:
                said = one["array_metadata"]
                impl = (said["ext_metadata"] or {}).get("random_key_impl")
                if impl is not None:
                    found[said["param_name"].replace(".", "/")] = impl
        except (AttributeError, KeyError, TypeError) as error:
            msg = f"{file}: it is not what Orbax writes: {error!r}."
            raise DamagedCheckpointError(msg) from None
    return found


def _read_json(path: Any) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        msg = f"{path}: it is not what Orbax writes: {error}."
        raise DamagedCheckpointError(msg) from None
