"""Published weights: reads safetensors, one file or indexed shards.

A file is mapped into memory, and the slices that devices hold are copied. The library
`safetensors` checks the header; it has no NumPy dtypes for bfloat16 and float8, so the
bytes are read here.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout._optional import require
from meshlayout.checkpoint.difference import ArraySpec
from meshlayout.checkpoint.foreign import check_path
from meshlayout.checkpoint.pairs import Dtypes, Request
from meshlayout.checkpoint.restore import load_foreign
from meshlayout.checkpoint.target import HostArray, Index
from meshlayout.errors import CheckpointError, DamagedCheckpointError
from meshlayout.layout_map import LayoutMap


INDEX = ".index.json"
SUFFIX = ".safetensors"

# What can stand between the keys in the name of an array.
SEPARATORS = (".", "/")

# The names of dtypes in the files, and those of NumPy and JAX.
DTYPES = {
    code: jnp.dtype(name)
    for code, name in {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "U16": "uint16",
        "I16": "int16",
        "U32": "uint32",
        "I32": "int32",
        "U64": "uint64",
        "I64": "int64",
        "F16": "float16",
        "F32": "float32",
        "F64": "float64",
        "C64": "complex64",
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
    }.items()
}


def load_safetensors(
    path: str | os.PathLike[str],
    like: PyTree,
    *,
    layouts: LayoutMap | None = None,
    rename: Mapping[str, str] | None = None,
    transpose: Mapping[str, Sequence[int]] | None = None,
    partial: bool = False,
    allow: str | Sequence[str] = (),
    dtype: Dtypes = None,
    separator: str = ".",
) -> PyTree:
    r"""Returns a state with the arrays of safetensors files, each in its layout.

    Use this for published weights. Every device reads only the slices that it holds;
    the host never holds more than one of them.

    Args:
        path: A `.safetensors` file, an index of shards (`.safetensors.index.json`),
            or a directory that holds one of them. On several processes, each of them
            reads it.
        like: The state to restore: arrays, whose values are ignored, or abstract
            arrays (from `ml.describe`), in any tree. Or a layout map alone: then nested
            dicts of all arrays are returned.
        layouts: Where arrays go, if not where those of `like` are.
        rename: `{pattern: replacement}`, applied to the names in the files as by
            `re.sub`. A name may be changed by one pattern only.
        transpose: `{pattern: permutation}`, by path in the state: the array in the
            state is `np.transpose(saved, permutation)`. PyTorch has the weights of
            dense layers as `(out, in)`, which is `(1, 0)`, and those of convolutions
            as `(out, in, h, w)`, which is `(2, 3, 1, 0)`.
        partial: Whether arrays of the state may be missing in the files, and keep
            their values, and extra arrays in the files are ignored.
        allow: Patterns of paths that may differ in any way, in shape too; they then
            keep their values.
        dtype: A dtype for every array of its kind, or `{pattern: dtype}`. All others
            must have been saved in the state's dtype.
        separator: The separator between the keys in the names, after renaming.

    Raises:
        DamagedCheckpointError: If a file is truncated or contradicts its header.
        RestoreDiffError: If they differ in ways that are not allowed.
        CheckpointError: If there is no such file, or an option does not fit.

    Example:
        >>> import tempfile
        >>> import meshlayout as ml
        >>> from meshlayout import checkpoint
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> layouts = ml.LayoutMap(mesh, {"kernel": (None, "model")})
        >>> state = {
        ...     "dense": {"kernel": ml.arrays.ones((2, 8), mesh.layout(None, None))}
        ... }
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     _ = checkpoint.save_safetensors(directory, state)
        ...     loaded = load_safetensors(directory, layouts)
        >>> loaded["dense"]["kernel"].addressable_shards[0].data.shape
        (2, 2)
    """
    _checks.choice("separator", separator, SEPARATORS, error=CheckpointError)
    request = Request(
        like, layouts, rename, transpose, partial, allow, dtype, separator
    )
    return load_foreign(_Files(path), request)


def local_path(path: Any) -> Path:
    """Returns a path, or raises CheckpointError for an address."""
    check_path("path", path)
    if "://" in str(path):
        msg = (
            f"{path}: safetensors files are read and written where the system can map "
            "them into memory. Copy them to a disk."
        )
        raise CheckpointError(msg)
    return Path(path).expanduser()


class _Files:
    """The arrays of one file, or of all files of an index; see `Source`."""

    is_foreign = True
    read_ahead_bytes = 0

    def __init__(self, path: Any) -> None:
        path = local_path(path)
        self.name = str(path)
        try:
            self._arrays = _arrays(_resolved(path))
        except OSError as error:
            msg = f"{path}: it cannot be read: {error}."
            raise CheckpointError(msg) from None
        self.leaves = [array.leaf for array in self._arrays.values()]

    def start(self, leaf: ArraySpec, index: Index) -> Callable[[], HostArray]:
        """As for `Source`; reads when the returned function is called."""
        return lambda: self.read(leaf, index)

    def read(self, leaf: ArraySpec, index: Index) -> HostArray:
        """Reads a slice; touches only its pages of the file."""
        array = self._arrays[leaf.path]
        shape, dtype = array.leaf.shape, array.leaf.dtype
        try:
            if not math.prod(shape):
                return np.empty(shape, dtype)[index]
            whole = np.memmap(array.file, dtype, "r", array.offset, shape)
        except (OSError, ValueError) as error:
            msg = f"{array.file}: {leaf.path} cannot be read: {error}."
            raise DamagedCheckpointError(msg) from None
        # An array without dims is mapped as one of one element.
        return np.array(whole.reshape(shape)[index])


@dataclass(frozen=True)
class _FileArray:
    """One array of a file, and the byte at which it begins."""

    leaf: ArraySpec
    file: Path
    offset: int


def _resolved(path: Path) -> Path:
    """Returns the file or index of a path."""
    if not path.is_dir():
        if not path.exists():
            msg = f"{path}: there is no such file or directory."
            raise CheckpointError(msg)
        return path
    indices = sorted(path.glob(f"*{SUFFIX}{INDEX}"))
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len(indices) == 1 and path / indices[0].name.removesuffix(INDEX) not in files:
        return indices[0]
    if not indices and len(files) == 1 and "-of-" not in files[0].name:
        return files[0]
    names = [file.name for file in [*indices, *files]]
    why = "there is no safetensors file in it."
    if not indices and any("-of-" in name for name in names):
        why = (
            f"there are shards in it, such as {names[0]}, and no index "
            f"*{SUFFIX}{INDEX}, without which nobody knows whether they are complete."
        )
    elif names:
        listed = ", ".join(names[:6])
        why = f"it holds several: {listed}. Give the path of one file or index."
    raise CheckpointError(f"{path}: {why}")


def _arrays(path: Path) -> dict[str, _FileArray]:
    """Returns the arrays of a file or index, by name."""
    if not path.name.endswith(INDEX):
        return _file_arrays(path)
    names: dict[str, list[str]] = {}
    for name, file in _weight_map(path).items():
        names.setdefault(file, []).append(name)
    arrays: dict[str, _FileArray] = {}
    for file, names_in_file in names.items():
        in_file = _file_arrays(path.parent / file, index=path)
        for name in names_in_file:
            if name not in in_file:
                msg = (
                    f"{path.parent / file}: there is no array {name!r} in it, which "
                    f"{path.name} says. The two are not of one save."
                )
                raise DamagedCheckpointError(msg)
            arrays[name] = in_file[name]
    return arrays


def _weight_map(path: Path) -> dict[str, str]:
    try:
        files = _json(path.read_bytes())["weight_map"]
        is_map = all(map(_is_plain_name, files.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_map, files = False, {}
    if not is_map:
        msg = (
            f"{path}: it is not an index of safetensors files: there is no "
            "'weight_map' of names of arrays, each once, to names of files next to it."
        )
        raise DamagedCheckpointError(msg)
    return files


def _json(content: bytes) -> Any:
    """Returns the content of a JSON file; raises ValueError where a key comes twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            msg = f"{twice!r} is in it twice"
            raise ValueError(msg)
        return entries

    return json.loads(content, object_pairs_hook=unique)


def _is_plain_name(file: object) -> bool:
    return isinstance(file, str) and Path(file).name == file and file not in ("", "..")


def _file_arrays(path: Path, index: Path | None = None) -> dict[str, _FileArray]:
    if not path.is_file():
        msg = f"{path}: there is no such file"
        if index is None:
            raise CheckpointError(f"{msg}.")
        raise DamagedCheckpointError(f"{msg}, which {index.name} names.")
    library = require("safetensors", extra="safetensors", purpose="Reading safetensors")
    try:
        # The library checks that arrays cover the file, but accepts duplicate names.
        with library.safe_open(path, framework="np"):
            pass
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = _json(file.read(size))
    except (library.SafetensorError, ValueError, RecursionError) as error:
        msg = f"{path}: it is cut off or not a safetensors file: {error}."
        raise DamagedCheckpointError(msg) from None
    header.pop("__metadata__", None)
    arrays: dict[str, _FileArray] = {}
    for name, entry in header.items():
        code = entry["dtype"]
        if code not in DTYPES:
            msg = (
                f"{path}: {name} is of the dtype {code}, which is not read here; these "
                f"are: {', '.join(DTYPES)}."
            )
            raise CheckpointError(msg)
        leaf = ArraySpec(name, (), tuple(entry["shape"]), DTYPES[code])
        arrays[name] = _FileArray(leaf, path, 8 + size + entry["data_offsets"][0])
    return arrays
