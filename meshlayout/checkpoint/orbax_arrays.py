"""Arrays in a directory that Orbax wrote, read slice by slice with TensorStore.

Orbax itself reads whole trees into JAX arrays. TensorStore, on which Orbax is built,
reads the same files one slice at a time, as the restore engine needs; for many small
arrays it takes a fifth of the CPU time.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshlayout._optional import require
from meshlayout.checkpoint.target import HostArray, Index
from meshlayout.errors import DamagedCheckpointError


# Orbax's file with the metadata of all leaves of a tree.
TREE = "_METADATA"


class ArrayReadError(Exception):
    """An array cannot be read; holds the first sentence of TensorStore's message.

    Attributes:
        name: The array's name in the files.
    """

    def __init__(self, name: str, error: Exception) -> None:
        sentence = str(error).partition(" [")[0].partition("\n")[0].rstrip(".")
        super().__init__(sentence or type(error).__name__)
        self.name = name


@dataclass(frozen=True)
class Format:
    """How Orbax wrote a directory, which depends on its version and options.

    Attributes:
        tree: Its metadata of every leaf.
        driver: TensorStore's name for the format of arrays.
        is_ocdbt: Whether all arrays are in one key-value store.
        is_full: Whether chunks of zeros are written, too, instead of left out.
    """

    tree: Mapping[str, Any]
    driver: str
    is_ocdbt: bool
    is_full: bool

    @classmethod
    def read(cls, directory: Any) -> "Format":
        """Reads Orbax's metadata files.

        Raises:
            DamagedCheckpointError: If they are not in Orbax's format.
        """
        path = directory / TREE
        content = read_json(path)
        try:
            return cls(
                tree=dict(content["tree_metadata"]),
                driver="zarr3" if content.get("use_zarr3") else "zarr",
                is_ocdbt=bool(content.get("use_ocdbt", True)),
                is_full=bool(content.get("store_array_data_equal_to_fill_value")),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            msg = f"{path} is not in Orbax's format: {error!r}."
            raise DamagedCheckpointError(msg) from None


class OrbaxArrays:
    """The arrays of one tree, which are all opened concurrently.

    Args:
        directory: The directory of the tree, as text.
        layout: How it was written.
        names: The arrays' names in the files.
    """

    def __init__(self, directory: str, layout: Format, names: Iterable[str]) -> None:
        library = require(
            "tensorstore", extra="checkpoint", purpose="Reading Orbax's files"
        )
        # All are opened at once, with one cache: each opening is a request.
        context = library.Context()
        self._stores = {
            name: library.open(
                _spec(directory, layout, name), context=context, read=True, open=True
            )
            for name in names
        }

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Returns the shape and dtype of an array, or raises ArrayReadError."""
        store = self._store(name)
        return tuple(store.shape), store.dtype.numpy_dtype

    def start(self, name: str, index: Index) -> Callable[[], HostArray]:
        """Starts reading a slice; returns a function that waits for it.

        Raises:
            ArrayReadError: If the array cannot be read; the returned function, too.
        """
        future = self._store(name)[index].read()

        def finish() -> HostArray:
            try:
                return np.asarray(future.result())
            except Exception as error:
                raise ArrayReadError(name, error) from error

        return finish

    def _store(self, name: str) -> Any:
        try:
            return self._stores[name].result()
        except Exception as error:
            raise ArrayReadError(name, error) from error


def read_json(path: Any) -> Any:
    """Returns the content of one of Orbax's files.

    Raises:
        DamagedCheckpointError: If it cannot be read.
    """
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        msg = f"{path} is not in Orbax's format: {error}."
        raise DamagedCheckpointError(msg) from None


def _spec(directory: str, layout: Format, name: str) -> dict[str, Any]:
    store = _key_value_store(f"{directory}/{'' if layout.is_ocdbt else f'{name}/'}")
    if layout.is_ocdbt:
        store = {"driver": "ocdbt", "base": store, "path": f"{name}/"}
    spec: dict[str, Any] = {"driver": layout.driver, "kvstore": store}
    if layout.is_full:
        # By default TensorStore reads a missing chunk as zeros. Here it was lost.
        spec["fill_missing_data_reads"] = False
    return spec


def _key_value_store(path: str) -> dict[str, Any] | str:
    """Returns TensorStore's spec of a directory."""
    scheme, _, rest = path.rpartition("://")
    if not scheme:
        return {"driver": "file", "path": path}
    bucket, _, inside = rest.partition("/")
    drivers = {"gs": "gcs", "s3": "s3"}
    if scheme not in drivers:
        return path
    return {"driver": drivers[scheme], "bucket": bucket, "path": inside}
