"""Arrays of other libraries: any mapping, Flax's msgpack, directories of plain Orbax.

Each is a `Source` of names and things that can be sliced. None of the formats has
checksums of arrays: damage is found only where a file is cut off or contradicts itself.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import jax
import numpy as np
from flax import serialization
from jax.sharding import Sharding
from jax.typing import DTypeLike

from meshlayout import _checks, _jax, _paths
from meshlayout._annotations import PyTree
from meshlayout._optional import require
from meshlayout.checkpoint import orbax
from meshlayout.checkpoint.difference import ArraySpec
from meshlayout.checkpoint.directory import path_text
from meshlayout.checkpoint.load import load
from meshlayout.checkpoint.match import Request
from meshlayout.checkpoint.tree import spec_of
from meshlayout.errors import CheckpointError, DamagedCheckpointError
from meshlayout.layout_map import LayoutMap


class LoadOptions(TypedDict, total=False):
    """The options of all functions that load, as `load_arrays` documents them."""

    layouts: LayoutMap | None
    rename: Mapping[str, str] | None
    transpose: Mapping[str, Sequence[int]] | None
    partial: bool | str | Sequence[str]
    dtype: DTypeLike | None


def load_arrays(
    arrays: Mapping[str, Any], like: PyTree, **options: Unpack[LoadOptions]
) -> PyTree:
    """Loads a state from arrays by name, each array in its layout.

    Use this for what is in memory or in a format of its own: memory maps, HDF5,
    `np.load` of an `.npz` file, `{name: x.numpy() for name, x in ...}` of a
    `state_dict` of PyTorch. Every process takes only the slices that its devices hold.

    Args:
        arrays: Numbers, and anything with a shape, a dtype, and slices that NumPy can
            convert, by name; in nested dicts and lists, too. After renaming, dots and
            slashes in names separate keys.
        like: The state to restore: arrays, whose values are ignored, or abstract
            arrays (from `ml.describe`), in any tree. Or just a layout map, to get
            nested dicts of all arrays; or None, for one device.
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
    request = Request(like, separator=".", **options)
    return load(Arrays("the mapping", arrays, "."), request)


def load_msgpack(
    path: str | os.PathLike[str], like: PyTree, **options: Unpack[LoadOptions]
) -> PyTree:
    """Loads a state that Flax wrote as msgpack, each array in its layout.

    Use this for a file with the output of `flax.serialization.to_bytes`. All other
    arguments are those of `load_arrays`; `/` separates keys. The host holds all arrays
    during the call. A changed bit in an array goes unnoticed.

    Raises:
        DamagedCheckpointError: If it is truncated or is not a state in msgpack.
        CheckpointError: If it does not exist; or as `load_arrays`.
    """
    name = path_text("path", path)
    try:
        arrays = serialization.msgpack_restore(Path(name).expanduser().read_bytes())
        source = Arrays(name, arrays, "/")
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error}.") from None
    except Exception as error:  # of many kinds
        msg = f"{name} is truncated or is not a state in Flax's msgpack: {error}"
        raise DamagedCheckpointError(f"{msg.rstrip('.: ')}.") from None
    return load(source, Request(like, **options))


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
    device reads only the slices that it holds, except of what `transpose` names. A
    changed bit is not always found.

    Raises:
        DamagedCheckpointError: If files are missing or changed, as far as the format
            shows it.
        CheckpointError: If Orbax wrote nothing there; or as `load_arrays`.
    """
    # A dependency of Orbax, which also reads paths in cloud storage.
    epath = require("etils.epath", extra="checkpoint", purpose="Reading a path")
    path = epath.Path(path_text("directory", directory)).expanduser()
    path = path if "://" in str(path) else epath.Path(Path(path).absolute())
    # Orbax's file with the metadata of all leaves of a tree.
    files = [*path.glob("_METADATA"), *path.glob("*/_METADATA")]
    trees = [file.parent for file in files if item in (None, file.parent.name)]
    if len(trees) != 1:
        names = ", ".join(sorted(file.parent.name for file in files)) or "nothing"
        msg = (
            f"{path} holds {len(trees)} such trees of Orbax ({names}), and one is "
            "needed. Give the directory of one step, and item= if it holds several."
        )
        raise CheckpointError(msg)
    return load(ForeignTree(trees[0]), Request(like, **options))


class Arrays:
    """Arrays and numbers by name, in nested dicts and lists, too; a `Source`."""

    is_foreign = True

    def __init__(self, name: str, arrays: Any, separator: str) -> None:
        if not isinstance(arrays, Mapping) or not arrays:
            msg = f"{name} holds no arrays by name: it is {_checks.shown(arrays)}."
            raise CheckpointError(msg)
        self.name, self.leaves = name, list[ArraySpec]()
        self._arrays: dict[str, Any] = {}
        for keys, value in jax.tree_util.tree_leaves_with_path(dict(arrays)):
            if isinstance(value, (str, bytes)):
                continue
            path = separator.join(map(_paths.key_name, keys))
            spec = spec_of(path, value)
            if spec is None:
                what = f"{path} is {_checks.shown(value)}"
                msg = f"{name}: {what}, which is neither an array nor a number."
                raise CheckpointError(msg)
            if path in self._arrays:  # keys 1 and "1", or one that holds the separator
                raise CheckpointError(f"{name}: two arrays have the path {path!r}.")
            self._arrays[path] = value
            self.leaves.append(spec)

    def read(
        self, wanted: Sequence[tuple[ArraySpec, Sharding | None]]
    ) -> Iterable[Any]:
        """As for `Source`."""
        for spec, _ in wanted:
            array = self._arrays[spec.path]
            yield np.asarray(array) if isinstance(array, jax.Array) else array


class ForeignTree:
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
        with orbax.damage_told(self.name):
            tree = self._handler.metadata(path).tree
            self._specs = jax.tree_util.tree_map_with_path(_spec, tree)
        self.leaves = jax.tree.leaves(self._specs)

    def read(
        self, wanted: Sequence[tuple[ArraySpec, Sharding | None]]
    ) -> Iterable[Any]:
        """As for `Source`."""
        api, shardings = self._api, {spec.path: x for spec, x in wanted}

        def arguments(spec: ArraySpec) -> Any:
            sharding = shardings.get(spec.path)
            on_host = api.RestoreArgs(restore_type=np.ndarray)
            return api.ArrayRestoreArgs(sharding=sharding) if sharding else on_host

        is_wanted = jax.tree.map(
            lambda spec: 0 if spec.path in shardings else api.PLACEHOLDER, self._specs
        )
        request = api.args.PyTreeRestore(
            item=is_wanted, restore_args=jax.tree.map(arguments, self._specs)
        )
        with orbax.damage_told(self.name):
            tree = self._handler.restore(self._path, args=request)
        values = jax.tree.structure(self._specs).flatten_up_to(tree)
        arrays = dict(zip((spec.path for spec in self.leaves), values, strict=True))
        for spec, _ in wanted:
            value = arrays[spec.path]
            is_key = isinstance(value, jax.Array) and _jax.is_extended(value.dtype)
            yield jax.random.key_data(value) if is_key else value


def _spec(keys: Sequence[Any], entry: Any) -> ArraySpec:
    """Returns the spec of a leaf from Orbax's metadata, which may be a text."""
    path = "/".join(map(_paths.key_name, keys))
    dtype = np.dtype(getattr(entry, "dtype", object))
    if type(entry).__name__ == "ScalarMetadata":
        return ArraySpec(path, (), type(np.zeros((), dtype).item()))
    return ArraySpec(path, tuple(getattr(entry, "shape", ())), dtype)
