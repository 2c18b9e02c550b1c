"""Published weights: reads safetensors, one file or indexed shards.

A file is mapped into memory, and the slices that devices hold are copied. The library
`safetensors` checks the header; the bytes are read here, since its NumPy interface
lacks bfloat16 and float8.
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
from meshlayout.checkpoint.files import path_text
from meshlayout.checkpoint.pairs import Dtypes, Request
from meshlayout.checkpoint.restore import load_foreign
from meshlayout.checkpoint.target import HostArray, Index
from meshlayout.errors import CheckpointError, DamagedCheckpointError
from meshlayout.layout_map import LayoutMap


INDEX = ".index.json"
SUFFIX = ".safetensors"

# Separators between the keys in the name of an array.
SEPARATORS = (".", "/")

# Dtypes by their names in the files.
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
    r"""Loads a state from safetensors files, each array in its layout.

    Use this for published weights. Every device reads only the slices that it holds;
    the host never holds more than one slice.

    Args:
        path: A `.safetensors` file, an index of shards (`.safetensors.index.json`),
            or a directory that contains one of them. Every process reads it.
        like: The state to restore: arrays, whose values are ignored, or abstract
            arrays (from `ml.describe`), in any tree. Or just a layout map, to get
            nested dicts of all arrays.
        layouts: The layouts of the arrays, if not those of `like`.
        rename: `{pattern: replacement}`, applied to the names in the files as by
            `re.sub`. Only one pattern may change a name.
        transpose: `{pattern: permutation}`, by path in the state: the array in the
            state is `np.transpose(saved, permutation)`. The weights of PyTorch's dense
            layers are `(out, in)` and need `(1, 0)`; those of its convolutions are
            `(out, in, h, w)` and need `(2, 3, 1, 0)`.
        partial: Whether arrays of the state may be missing in the files, and keep
            their values, and extra arrays in the files are ignored.
        allow: Patterns of paths that may differ in any way, even in shape, and keep
            their values.
        dtype: A dtype for every array of its kind, or `{pattern: dtype}`. All others
            must have been saved in the dtype of the state.
        separator: The separator between the keys in the names, after renaming.

    Raises:
        DamagedCheckpointError: If a file is truncated or contradicts its header.
        RestoreDiffError: If the arrays differ in ways that are not allowed.
        CheckpointError: If a file does not exist, or an option does not fit.

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
    """Returns a local path, or raises CheckpointError for a URL."""
    text = path_text("path", path)
    if "://" in text:
        msg = (
            f"{path}: safetensors files are read and written by mapping them into "
            "memory, which needs a local path. Copy them to a disk."
        )
        raise CheckpointError(msg)
    return Path(text).expanduser()


class _Files:
    """The arrays of one file, or of all files of an index; see `SavedArrays`."""

    is_foreign = True
    read_ahead_bytes = 0

    def __init__(self, path: Any) -> None:
        path = local_path(path)
        self.name = str(path)
        try:
            self._arrays = _arrays(_resolved(path))
        except OSError as error:
            msg = f"{path} cannot be read: {error}."
            raise CheckpointError(msg) from None
        self.leaves = [array.leaf for array in self._arrays.values()]

    def start(self, leaf: ArraySpec, index: Index) -> Callable[[], HostArray]:
        """As for `SavedArrays`; reads when the returned function is called."""
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
        # NumPy maps an array without dims as one of shape (1,).
        return np.array(whole.reshape(shape)[index])


@dataclass(frozen=True)
class _FileArray:
    """One array of a file, and its first byte."""

    leaf: ArraySpec
    file: Path
    offset: int


def _resolved(path: Path) -> Path:
    """Returns the file or index of a path."""
    if not path.is_dir():
        if not path.exists():
            msg = f"{path} does not exist."
            raise CheckpointError(msg)
        return path
    indices = sorted(path.glob(f"*{SUFFIX}{INDEX}"))
    files = sorted(path.glob(f"*{SUFFIX}"))
    # `model.safetensors` next to `model.safetensors.index.json`: nobody knows which of
    # them is the newer one.
    if len(indices) == 1 and path / indices[0].name.removesuffix(INDEX) not in files:
        return indices[0]
    if not indices and len(files) == 1 and "-of-" not in files[0].name:
        return files[0]
    names = [file.name for file in [*indices, *files]]
    why = "holds no safetensors file."
    if not indices and any("-of-" in name for name in names):
        why = (
            f"holds shards, such as {names[0]}, and no index *{SUFFIX}{INDEX}, without "
            "which nobody knows whether they are complete."
        )
    elif names:
        listed = ", ".join(names[:6])
        why = f"holds several: {listed}. Give the path of one file or index."
    raise CheckpointError(f"{path} {why}")


def _arrays(path: Path) -> dict[str, _FileArray]:
    """Returns the arrays of a file or index, by name."""
    if not path.name.endswith(INDEX):
        return _file_arrays(path)
    names: dict[str, list[str]] = {}
    for name, file in _weight_map(path).items():
        names.setdefault(file, []).append(name)
    arrays: dict[str, _FileArray] = {}
    for file, listed in names.items():
        file_arrays = _file_arrays(path.parent / file, index=path)
        for name in listed:
            if name not in file_arrays:
                msg = (
                    f"{path.parent / file} does not hold the array {name!r}, which "
                    f"{path.name} lists for it. They are from different saves."
                )
                raise DamagedCheckpointError(msg)
            arrays[name] = file_arrays[name]
    return arrays


def _weight_map(path: Path) -> dict[str, str]:
    try:
        files = _json(path.read_bytes())["weight_map"]
        is_map = all(map(_is_plain_name, files.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_map, files = False, {}
    if not is_map:
        msg = (
            f"{path} is not an index of safetensors files: it has no 'weight_map' from "
            "the names of arrays, each once, to the names of files next to it."
        )
        raise DamagedCheckpointError(msg)
    return files


def _json(content: bytes) -> Any:
    """Parses JSON, and raises ValueError if a key is repeated."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            keys = [key for key, _ in pairs]
            repeated = next(key for key in keys if keys.count(key) > 1)
            msg = f"{repeated!r} is repeated"
            raise ValueError(msg)
        return entries

    return json.loads(content, object_pairs_hook=unique)


def _is_plain_name(file: object) -> bool:
    return isinstance(file, str) and Path(file).name == file and file not in ("", "..")


def _file_arrays(path: Path, index: Path | None = None) -> dict[str, _FileArray]:
    if not path.is_file():
        if index is None:
            msg = f"{path} is not a regular file."
            raise CheckpointError(msg)
        msg = f"{path}, which {index.name} names, does not exist."
        raise DamagedCheckpointError(msg)
    library = require("safetensors", extra="safetensors", purpose="Reading safetensors")
    try:
        # The library checks that arrays cover the file without gaps or overlaps, but
        # accepts repeated names, of which it takes the last.
        with library.safe_open(path, framework="np"):
            pass
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = _json(file.read(size))
    except (library.SafetensorError, ValueError, RecursionError) as error:
        msg = f"{path} is truncated or is not a safetensors file: {error}."
        raise DamagedCheckpointError(msg) from None
    header.pop("__metadata__", None)
    arrays: dict[str, _FileArray] = {}
    for name, entry in header.items():
        code = entry["dtype"]
        if code not in DTYPES:
            msg = (
                f"{path}: {name} has the dtype {code}, which cannot be loaded. "
                f"Supported dtypes: {', '.join(DTYPES)}."
            )
            raise CheckpointError(msg)
        leaf = ArraySpec(name, (), tuple(entry["shape"]), DTYPES[code])
        arrays[name] = _FileArray(leaf, path, 8 + size + entry["data_offsets"][0])
    return arrays
