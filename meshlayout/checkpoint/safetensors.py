"""Published weights in and out: safetensors, in one file or in indexed shards."""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshlayout._optional import require
from meshlayout.checkpoint.difference import Leaf
from meshlayout.checkpoint.matching import Dtypes
from meshlayout.checkpoint.placing import Options, load
from meshlayout.errors import CheckpointError, DamagedCheckpointError
from meshlayout.layout_map import LayoutMap


INDEX = ".index.json"
SUFFIX = ".safetensors"

DTYPES = {
    "BOOL": np.dtype(bool),
    "U8": np.dtype("uint8"),
    "I8": np.dtype("int8"),
    "U16": np.dtype("uint16"),
    "I16": np.dtype("int16"),
    "U32": np.dtype("uint32"),
    "I32": np.dtype("int32"),
    "U64": np.dtype("uint64"),
    "I64": np.dtype("int64"),
    "F16": np.dtype("float16"),
    "F32": np.dtype("float32"),
    "F64": np.dtype("float64"),
    "C64": np.dtype("complex64"),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(jnp.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(jnp.float8_e5m2fnuz),
}


def load_safetensors(
    path: Any,
    like: Any,
    *,
    layouts: LayoutMap | None = None,
    rename: Mapping[str, str] | None = None,
    transpose: Mapping[str, Sequence[int]] | None = None,
    partial: bool = False,
    allow: str | Sequence[str] = (),
    dtype: Dtypes = None,
    separator: str = ".",
) -> Any:
    r"""Returns a state with the arrays of safetensors files, each in its layout.

    Every device reads only the slices that it holds; the host never holds more than
    one of them.

    Args:
        path: A `.safetensors` file, an index of shards (`.safetensors.index.json`),
            or a directory that holds one of them. On several processes, each of them
            reads it.
        like: The state that is wanted: arrays, whose values are not looked at, or
            abstract arrays, as `ml.describe` gives them, in any tree. Or a layout map
            alone: then nested dicts of all arrays are returned.
        layouts: Where arrays go, if not where those of `like` are.
        rename: `{pattern: replacement}`, applied to the names in the files as by
            `re.sub`. A name may be changed by one pattern only.
        transpose: `{pattern: permutation}`, by path in the state: the array in the
            state is `np.transpose(saved, permutation)`. PyTorch has the weights of
            dense layers as `(out, in)`, which is `(1, 0)`, and those of convolutions
            as `(out, in, h, w)`, which is `(2, 3, 1, 0)`.
        partial: Whether arrays of the state may be missing in the files, which then
            keep their values, and files may hold more, which is then not read.
        allow: Patterns of paths that may differ in any way, in shape too; they then
            keep their values.
        dtype: A dtype for every array of its kind, or `{pattern: dtype}`. All others
            have to be saved in the dtype that is wanted.
        separator: What stands between the keys in the names, after renaming.

    Raises:
        DamagedCheckpointError: If a file is cut off or is not what it says.
        RestoreDiffError: If what differs is not allowed.
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
    options = Options(
        rename=rename,
        transpose=transpose,
        partial=partial,
        allow=allow,
        dtype=dtype,
        separator=check_separator(separator),
    )
    state, _ = load(_Files(path), like, layouts, options)
    return state


class _Files:
    """The arrays of one file or of all files of an index."""

    def __init__(self, path: Any) -> None:
        require("safetensors", extra="safetensors", purpose="Reading safetensors")
        path = local_path(path)
        self.name = str(path)
        self._arrays = _arrays(_resolve(path))
        self.key_impls: dict[str, str] = {}
        self.leaves = [one.leaf for one in self._arrays.values()]

    def read(self, leaf: Leaf, index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        return self._arrays[leaf.path].read(index)


class _Array:
    """One array of a file."""

    def __init__(self, path: Path, name: str, header: Any, begin: int) -> None:
        code = header["dtype"]
        if code not in DTYPES:
            msg = (
                f"{path}: {name} is of the dtype {code}, which is not read here; these "
                f"are: {', '.join(DTYPES)}."
            )
            raise CheckpointError(msg)
        shape = tuple(header["shape"])
        self.leaf = Leaf(name, (name,), shape, DTYPES[code])
        self._path = path
        self._offset = begin + header["data_offsets"][0]

    def read(self, index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        """Reads a slice; the pages of the file around it alone are looked at."""
        shape, dtype = self.leaf.shape, self.leaf.dtype
        if not math.prod(shape):
            return np.empty(shape, dtype)[index]
        try:
            whole = np.memmap(self._path, dtype, "r", self._offset, shape)
        except (OSError, ValueError) as error:
            msg = f"{self._path}: {self.leaf.path} cannot be read: {error}."
            raise DamagedCheckpointError(msg) from None
        # An array of no dims is mapped as one of one.
        return np.array(whole.reshape(shape)[index])


def _arrays(path: Path) -> dict[str, _Array]:
    if not path.name.endswith(INDEX):
        return _file_arrays(path)
    found: dict[str, _Array] = {}
    names: dict[str, list[str]] = {}
    for name, file in _weight_map(path).items():
        names.setdefault(file, []).append(name)
    for file, some in names.items():
        held = _file_arrays(path.parent / file, of=path)
        for name in some:
            if name not in held:
                msg = (
                    f"{path.parent / file}: there is no array {name!r} in it, which "
                    f"{path.name} says. The two are not of one save."
                )
                raise DamagedCheckpointError(msg)
            found[name] = held[name]
    return found


def _weight_map(path: Path) -> dict[str, str]:
    try:
        files = json.loads(path.read_bytes())["weight_map"]
        fine = all(map(_is_plain, files.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        fine, files = False, {}
    if not fine:
        msg = (
            f"{path}: it is no index of safetensors files: there is no 'weight_map' of "
            "names of arrays to names of files beside it."
        )
        raise DamagedCheckpointError(msg)
    return files


def _is_plain(file: Any) -> bool:
    return isinstance(file, str) and Path(file).name == file and file not in ("", "..")


def _file_arrays(path: Path, of: Path | None = None) -> dict[str, _Array]:
    if not path.is_file():
        msg = f"{path}: there is no such file"
        if of is None:
            raise CheckpointError(f"{msg}.")
        raise DamagedCheckpointError(f"{msg}, which {of.name} names.")
    library = require("safetensors", extra="safetensors", purpose="Reading safetensors")
    try:
        with library.safe_open(path, framework="np"):  # checks header and length
            pass
    except library.SafetensorError as error:
        msg = f"{path}: it is cut off or no safetensors file: {error}."
        raise DamagedCheckpointError(msg) from None
    except OSError as error:
        msg = f"{path}: it cannot be read: {error}."
        raise CheckpointError(msg) from None
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {name: _Array(path, name, one, 8 + size) for name, one in header.items()}


def _resolve(path: Path) -> Path:
    """Returns the file or index that a path means."""
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
    names = [one.name for one in [*indices, *files]]
    msg = f"{path}: there is no safetensors file in it."
    if not indices and any("-of-" in name for name in names):
        msg = (
            f"{path}: there are shards in it, such as {names[0]}, and no index "
            f"*{SUFFIX}{INDEX}, without which nobody knows whether they are complete."
        )
    elif names:
        some = ", ".join(names[:6])
        msg = f"{path}: it holds several: {some}. Give the path of one file or index."
    raise CheckpointError(msg)


def local_path(path: Any) -> Path:
    """Returns a path, or raises CheckpointError for an address."""
    if not isinstance(path, str) and not hasattr(path, "__fspath__"):
        msg = f"expected the path of a file or directory, and got {path!r}."
        raise CheckpointError(msg)
    if "://" in str(path):
        msg = (
            f"{path}: safetensors files are read and written where the system can map "
            "them into memory. Copy them to a disk."
        )
        raise CheckpointError(msg)
    return Path(path).expanduser()


def check_separator(separator: Any) -> str:
    """Returns what stands between keys, or raises CheckpointError."""
    if separator not in (".", "/"):
        msg = f"separator= is '.' or '/', and got {separator!r}."
        raise CheckpointError(msg)
    return separator
