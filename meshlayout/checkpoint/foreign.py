"""Arrays of other libraries: any mapping, Flax's msgpack, directories of plain Orbax.

Each is a `Source` of names and things that can be sliced. None of the formats has
checksums of arrays: damage is found only where a file is cut off or contradicts itself.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import jax
import numpy as np
from flax import serialization
from jax.sharding import Sharding
from jax.typing import DTypeLike

from meshlayout import _checks, _jax, _paths
from meshlayout._annotations import Leaf, PyTree
from meshlayout._optional import require
from meshlayout.checkpoint import orbax
from meshlayout.checkpoint.difference import ArraySpec
from meshlayout.checkpoint.directory import path_text
from meshlayout.checkpoint.load import load
from meshlayout.checkpoint.match import Request
from meshlayout.errors import CheckpointError, DamagedCheckpointError
from meshlayout.layout_map import LayoutMap


# Orbax's file with the metadata of all leaves of a tree.
_TREE = "_METADATA"


class LoadOptions(TypedDict, total=False):
    """The options of all functions that load, as `load_arrays` documents them."""

    layouts: LayoutMap | None
    rename: Mapping[str, str] | None
    transpose: Mapping[str, Sequence[int]] | None
    partial: bool | str | Sequence[str]
    dtype: DTypeLike | None


def load_arrays(
    arrays: Mapping[str, Any],
    like: PyTree,
    *,
    separator: str = ".",
    **options: Unpack[LoadOptions],
) -> PyTree:
    """Loads a state from arrays by name, each array in its layout.

    Use this for what is in memory or in a format of its own: `np.load` of an `.npz`
    file, a `state_dict` of PyTorch, memory maps, HDF5. Every process takes only the
    slices that its devices hold.

    Args:
        arrays: Numbers, and anything with a shape, a dtype, and slices that NumPy can
            convert, by name; in nested dicts and lists, too.
        like: The state to restore: arrays, whose values are ignored, or abstract
            arrays (from `ml.describe`), in any tree. Or just a layout map, to get
            nested dicts of all arrays.
        separator: The separator between the keys in the names, after renaming.
        **options: `layouts`, a layout map, if the layouts are not those of `like`.
            `rename`, `{pattern: replacement}`, as by `re.sub`; the first pattern that
            matches a saved name changes it.
            `transpose`, `{pattern: permutation}` by path in the state, as by
            `np.transpose`: PyTorch's dense weights need `(1, 0)`, and those of its
            convolutions `(2, 3, 1, 0)`.
            `partial`: True if arrays of the state may be missing, and keep their
            values, and extra saved arrays are ignored; or patterns of paths that are
            left as they are in `like`, whatever was saved there.
            `dtype`, for every array of its kind; all others must have been saved in
            the dtype of the state.

    Returns:
        A new tree of the type of `like`.

    Raises:
        RestoreDiffError: If the arrays differ in ways that are not allowed.
        CheckpointError: If an option does not fit.

    Example:
        >>> import meshlayout as ml
        >>> layouts = ml.LayoutMap(ml.create_mesh({"batch": 8}), {"w": ("batch",)})
        >>> published = {"net.weight": np.arange(8, dtype="float32")}
        >>> loaded = load_arrays(published, layouts, rename={"net.weight": "w"})
        >>> str(ml.fetch_layout(loaded["w"]))
        '[batch]'
    """
    request = Request(like, separator=separator, **options)
    return load(Arrays("the mapping", arrays, separator), request)


def load_msgpack(
    path: str | os.PathLike[str] | bytes, like: PyTree, **options: Unpack[LoadOptions]
) -> PyTree:
    """Loads a state that Flax wrote as msgpack, each array in its layout.

    Use this for the output of `flax.serialization.to_bytes`: a file, or the bytes. All
    other arguments are those of `load_arrays`; `/` separates keys. The host holds all
    arrays during the call. A changed bit in an array goes unnoticed.

    Raises:
        DamagedCheckpointError: If it is truncated or is not a state in msgpack.
        CheckpointError: If it does not exist; or as `load_arrays`.

    Example:
        >>> written = serialization.to_bytes({"w": np.arange(3, dtype="float32")})
        >>> load_msgpack(written, {"w": np.zeros(3, "float32")})["w"].tolist()
        [0.0, 1.0, 2.0]
    """
    request, name = Request(like, **options), "the msgpack data"
    if not isinstance(path, bytes):
        name = path_text("path", path)
        try:
            path = Path(name).expanduser().read_bytes()
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error}.") from None
    try:
        source = Arrays(name, serialization.msgpack_restore(path))
    except Exception as error:  # of many kinds
        msg = f"{name} is truncated or is not a state in Flax's msgpack: {error}"
        raise DamagedCheckpointError(f"{msg.rstrip('.: ')}.") from None
    return load(source, request)


def load_orbax(
    directory: str | os.PathLike[str],
    like: PyTree,
    *,
    item: str | None = None,
    **options: Unpack[LoadOptions],
) -> PyTree:
    """Loads a state that plain Orbax wrote, each array in its layout.

    Use this for one checkpoint or step of `StandardCheckpointer`, `PyTreeCheckpointer`,
    a `CheckpointManager` or Orbax's version 1. `item` names a tree in it, if it holds
    several. All other arguments are those of `load_arrays`; `/` separates keys. A
    leading `params/`, and the `/value` that NNX once wrote, need no renaming. Every
    device reads only the slices that it holds. A changed bit is not always found.

    Raises:
        DamagedCheckpointError: If files are missing or changed, as far as the format
            shows it.
        CheckpointError: If Orbax wrote nothing there; or as `load_arrays`.
    """
    request = Request(like, **options)
    return load(_ForeignTree(_find_tree(directory, item)), request)


class Arrays:
    """Arrays and numbers by name, in nested dicts and lists, too; a `Source`."""

    is_foreign = True

    def __init__(self, name: str, arrays: Any, separator: str = "/") -> None:
        _checks.choice("separator", separator, (".", "/"), error=CheckpointError)
        if not isinstance(arrays, Mapping) or not arrays:
            msg = f"{name} holds no arrays by name: it is {_checks.shown(arrays)}."
            raise CheckpointError(msg)
        self.name, self._arrays = name, dict[str, Any]()
        for keys, value in jax.tree_util.tree_leaves_with_path(dict(arrays)):
            path = separator.join(map(_paths.key_name, keys))
            if path in self._arrays:  # keys 1 and "1", or one that holds the separator
                raise CheckpointError(f"{name}: two arrays have the path {path!r}.")
            if not isinstance(value, (str, bytes)):
                self._arrays[path] = _sliceable(f"{name}: {path}", value)
        self.leaves = [
            ArraySpec(path, np.shape(value), _dtype_of(value))
            for path, value in self._arrays.items()
        ]

    def read(
        self, wanted: Sequence[tuple[ArraySpec, Sharding | None]]
    ) -> Iterable[Any]:
        """As for `Source`."""
        return (self._arrays[spec.path] for spec, _ in wanted)


def _dtype_of(value: Leaf) -> Any:
    """Returns the type of a number, or a dtype in the byte order of this machine."""
    dtype = getattr(value, "dtype", type(value))
    return dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype


def _sliceable(where: str, value: Leaf) -> Any:
    """Returns a number or anything whose slices NumPy can convert."""
    if hasattr(value, "detach"):  # a tensor of PyTorch
        value = value.detach().cpu()
        is_narrow = "bfloat16" in str(value.dtype)  # which NumPy itself lacks
        value = np.asarray(jax.dlpack.from_dlpack(value) if is_narrow else value)
    is_array = hasattr(value, "shape") and _jax.is_array_dtype(value.dtype)
    if not is_array and type(value) not in (bool, int, float, complex):
        what = _checks.shown(value)
        msg = f"{where} is {what}, which is neither an array of numbers nor a number."
        raise CheckpointError(msg)
    is_key = is_array and _jax.is_extended(value.dtype)
    return jax.random.key_data(value) if is_key else value


class _ForeignTree:
    """The arrays of one tree that Orbax wrote, PRNG keys as their words; a `Source`.

    Read by the handler of Orbax's first API, which knows the trees of both, and has no
    barrier at which processes would wait for one that has raised.
    """

    is_foreign = True

    def __init__(self, path: Any) -> None:
        orbax.quiet()
        self._api = require("orbax.checkpoint", extra="checkpoint", purpose="Loading")
        self._handler = self._api.PyTreeCheckpointHandler()
        self._path, self.name = path, str(path)
        with self._unreadable():
            self._tree = self._handler.metadata(path).tree
            entries = jax.tree_util.tree_leaves_with_path(self._tree)
            specs = [_spec(*entry) for entry in entries]
        self._specs, self.leaves = specs, [spec for spec in specs if spec is not None]
        names = [spec.path.replace("/", ".") for spec in self.leaves]
        if len({*names}) < len(names):  # dots separate keys in Orbax's files
            name = max(names, key=names.count)
            msg = f"{path}: two arrays have the name {name!r}; one may be lost."
            raise DamagedCheckpointError(msg)

    def read(
        self, wanted: Sequence[tuple[ArraySpec, Sharding | None]]
    ) -> Iterable[Any]:
        """As for `Source`."""
        api, shardings = self._api, {spec.path: x for spec, x in wanted}
        on_host = api.RestoreArgs(restore_type=np.ndarray)
        items: list[Any] = []
        options: list[Any] = []
        for spec in self._specs:
            path = "" if spec is None else spec.path
            sharding = shardings.get(path)
            items.append(0 if path in shardings else api.PLACEHOLDER)
            is_on_host = sharding is None
            options.append(
                on_host if is_on_host else api.ArrayRestoreArgs(sharding=sharding)
            )
        treedef = jax.tree.structure(self._tree)
        arguments = api.args.PyTreeRestore(
            item=treedef.unflatten(items), restore_args=treedef.unflatten(options)
        )
        with self._unreadable():
            tree = self._handler.restore(self._path, args=arguments)
        values = zip(self._specs, treedef.flatten_up_to(tree), strict=True)
        arrays = {spec.path: value for spec, value in values if spec is not None}
        for spec, _ in wanted:
            value = arrays[spec.path]
            is_key = isinstance(value, jax.Array) and _jax.is_extended(value.dtype)
            yield jax.random.key_data(value) if is_key else value

    @contextlib.contextmanager
    def _unreadable(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            msg = f"{self.name} cannot be read: {orbax.reason(error)}."
            raise DamagedCheckpointError(msg) from error


def _spec(keys: Sequence[Any], entry: Any) -> ArraySpec | None:
    """Returns the spec of a leaf from Orbax's metadata; None for text."""
    if not hasattr(entry, "dtype"):
        return None
    path, dtype = "/".join(map(_paths.key_name, keys)), np.dtype(entry.dtype)
    is_number = type(entry).__name__ == "ScalarMetadata"
    kind = type(dtype.type(0).item()) if is_number else dtype
    return ArraySpec(path, tuple(entry.shape), kind)


def _find_tree(directory: Any, item: str | None) -> Any:
    """Returns the directory of the requested tree."""
    # A dependency of Orbax, which also reads paths in cloud storage.
    epath = require("etils.epath", extra="checkpoint", purpose="Reading a path")
    path = epath.Path(path_text("directory", directory)).expanduser()
    path = path if "://" in str(path) else epath.Path(Path(path).absolute())
    names = sorted(child.name for child in path.iterdir()) if path.is_dir() else []
    trees = [path / name for name in names if (path / name / _TREE).exists()]
    trees += [path] if _TREE in names else []
    chosen = [tree for tree in trees if item in (None, tree.name)]
    if len(chosen) == 1:
        return chosen[0]
    msg = (
        f"{path} holds {len(chosen)} trees that Orbax finished writing, and one is "
        f"needed. Give the directory of one step, and item= if it holds several. In it "
        f"are: {', '.join(names) or 'nothing'}."
    )
    raise CheckpointError(msg)
