"""The manifest: a checkpoint's table of contents, in one file that is written last.

A step exists if its manifest is complete. It names every array with its shape, dtype,
layout and fingerprint, and every file with its size and hash. The user's metadata is in
it as JSON, tagged where JSON lacks a type, so that tuples, bytes and small arrays come
back with their types. `Inspection` is the user's view of it.

The file contains its own hash, over one fixed form of the JSON: a flipped bit or a
missing end is found without any other file. Fields that have their default are left
out, which keeps the manifest of a state of many leaves small.
"""

import base64
import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from meshlayout import _checks, _jax, _render
from meshlayout.checkpoint.files import digest
from meshlayout.errors import CheckpointError, DamagedCheckpointError


NAME = "manifest.json"

# Of the format: to be increased by any change that an earlier version would misread.
_VERSION = 3


@dataclass(frozen=True, kw_only=True)
class InspectedLeaf:
    """One leaf of a checkpoint.

    Attributes:
        path: Its path, keys joined by `/`.
        shape: Its global shape.
        dtype: Its dtype, or the type of a Python number.
        layout: Its layout when it was saved; empty if it was not on a mesh.
        mesh: Its mesh when it was saved; empty as well.
        nbytes: The bytes of the whole array.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    layout: str = ""
    mesh: str = ""
    nbytes: int = 0


@dataclass(frozen=True, kw_only=True, repr=False)
class SavedLeaf(InspectedLeaf):
    """One saved leaf, with everything that a restore needs.

    Attributes:
        parts: The keys of its path.
        kind: `"array"`, `"key"` for PRNG keys, `"numpy"`, or `"python"` for a Python
            number.
        array: Its name in the array files; None if it is not in them.
        stored: Its dtype in the array files.
        key_impl: The implementation of PRNG keys.
        fingerprint: The fingerprint of its bits, whatever their layout.
        value: A Python number itself.
    """

    parts: tuple[str, ...]
    kind: str
    array: str | None = None
    stored: str | None = None
    key_impl: str | None = None
    fingerprint: str | None = None
    value: Any = None


@dataclass(frozen=True)
class SavedFile:
    """One file of a checkpoint.

    Attributes:
        size: Its size in bytes.
        sha256: Its hash; None for large files, whose arrays have fingerprints.
    """

    size: int
    sha256: str | None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        step: The step.
        saved_at: Seconds since the epoch when it was complete.
        num_processes: How many processes wrote it.
        arrays: The directory of the array files, next to the manifest; None if the
            state holds no arrays.
        data: The file of the input iterator's state, if any.
        metadata: The user's metadata, as JSON.
        metrics: The metrics at this step.
        leaves: The leaves of the state.
        files: All files but the manifest, by name.
    """

    step: int
    saved_at: float
    num_processes: int
    arrays: str | None
    data: str | None
    metadata: Any
    metrics: Mapping[str, float]
    leaves: tuple[SavedLeaf, ...]
    files: Mapping[str, SavedFile] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of the state."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def file_bytes(self) -> int:
        """The bytes of all files but the manifest."""
        return sum(file.size for file in self.files.values())

    def to_bytes(self) -> bytes:
        """Returns the file's content."""
        fields = {"version": _VERSION, **dataclasses.asdict(self)}
        return _sealed(fields | {"leaves": [*map(_without_defaults, self.leaves)]})

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> "Manifest":
        """Returns the manifest in a file's content.

        Args:
            content: The content.
            where: The file's name, for messages.

        Raises:
            DamagedCheckpointError: If it is damaged.
            CheckpointError: If another version of this library wrote it.
        """
        fields: Any = None
        try:
            fields = json.loads(content)["manifest"]
            # Written again and compared: a flipped bit cannot hide anywhere.
            is_whole = _sealed(fields) == content
        except (ValueError, KeyError, TypeError, RecursionError):
            is_whole = False
        if not is_whole:
            msg = (
                f"{where} is not as it was saved: the file is truncated or changed. "
                "Restore another step, or the newest intact one with fallback=True."
            )
            raise DamagedCheckpointError(msg)
        version = fields.pop("version", None) if isinstance(fields, dict) else None
        if version != _VERSION:
            msg = (
                f"{where} has version {version} of the format, and this version of "
                f"meshlayout reads format {_VERSION}. Use the meshlayout that wrote it."
            )
            raise CheckpointError(msg)
        try:
            fields["leaves"] = tuple(map(_leaf, fields["leaves"]))
            entries = fields["files"].items()
            fields["files"] = {name: SavedFile(**file) for name, file in entries}
            manifest = cls(**fields)
            sizes = [file.size for file in manifest.files.values()]
            numbers = [manifest.saved_at, *manifest.metrics.values(), *sizes]
            _check_types(numbers, (int, float), "a number")
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            msg = (
                f"{where} has other fields than this version of meshlayout writes: "
                f"{error}. Use the program that wrote it."
            )
            raise CheckpointError(msg) from error
        # A forged or damaged name must not have files elsewhere read.
        for name in (manifest.arrays, manifest.data, *manifest.files):
            if name is not None and not _is_inside(name):
                msg = (
                    f"{where} names {name!r}, which is not inside the step's "
                    "directory. Restore another step, or the newest intact one with "
                    "fallback=True."
                )
                raise DamagedCheckpointError(msg)
        return manifest


def _is_inside(name: object) -> bool:
    """Returns whether a relative path stays inside its directory."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    return not name.startswith("/") and not {"..", "."} & {*name.split("/")}


def _sealed(fields: Mapping[str, Any]) -> bytes:
    """Returns the file's content: the fields in one fixed form, and their hash."""
    body = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=True)
    return f'{{"manifest":{body},"sha256":"{digest(body.encode())}"}}\n'.encode()


def _without_defaults(leaf: SavedLeaf) -> dict[str, Any]:
    return {
        field.name: getattr(leaf, field.name)
        for field in dataclasses.fields(leaf)
        if getattr(leaf, field.name) != field.default
    }


def _leaf(fields: dict[str, Any]) -> SavedLeaf:
    fields["parts"], fields["shape"] = tuple(fields["parts"]), tuple(fields["shape"])
    leaf = SavedLeaf(**fields)
    texts = [leaf.path, leaf.kind, leaf.dtype, leaf.layout, leaf.mesh, *leaf.parts]
    _check_types(texts, str, "a string")
    _check_types([leaf.nbytes, *leaf.shape], int, "an integer")
    if min([leaf.nbytes, *leaf.shape]) < 0:
        msg = f"the size of {leaf.path!r} is negative"
        raise ValueError(msg)
    return leaf


def _check_types(
    values: Sequence[object], kind: type | tuple[type, ...], what: str
) -> None:
    for value in values:
        if not isinstance(value, kind):
            msg = f"{value!r} is not {what}"
            raise TypeError(msg)


# The user's view.


@dataclass(frozen=True)
class Inspection:
    """The contents of a checkpoint; text by `str` or `print`, HTML in notebooks.

    Attributes:
        step: The step.
        saved_at: When it was complete, in UTC.
        num_processes: How many processes wrote it.
        leaves: The leaves of the state.
        metadata: The user's metadata.
        metrics: The metrics at this step.
        has_data: Whether it holds the state of an input iterator.
        nbytes: The bytes of the state.
        file_bytes: The bytes of the files.
    """

    step: int
    saved_at: datetime.datetime
    num_processes: int
    leaves: tuple[InspectedLeaf, ...]
    metadata: Any
    metrics: Mapping[str, float]
    has_data: bool
    nbytes: int
    file_bytes: int

    @classmethod
    def of(cls, manifest: Manifest) -> "Inspection":
        """Returns the inspection of a manifest.

        Raises:
            CheckpointError: If another program wrote the metadata.
        """
        try:
            metadata = decode(manifest.metadata)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            msg = (
                f"step {manifest.step}: this version of meshlayout did not write its "
                f"metadata, and cannot read it: {error}."
            )
            raise CheckpointError(msg) from error
        return cls(
            manifest.step,
            datetime.datetime.fromtimestamp(manifest.saved_at, datetime.UTC),
            manifest.num_processes,
            manifest.leaves,
            metadata,
            dict(manifest.metrics),
            manifest.data is not None,
            manifest.nbytes,
            manifest.file_bytes,
        )

    def __str__(self) -> str:
        table = _render.text_table(_HEADERS, self._rows(), align=_ALIGN)
        return "\n".join([self._title(), table, *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        caption, notes = self._title(), self._notes()
        return _render.html_table(
            _HEADERS, self._rows(), align=_ALIGN, caption=caption, notes=notes
        )

    def _title(self) -> str:
        meshes = {leaf.mesh: None for leaf in self.leaves if leaf.mesh}
        on = f" on {', '.join(meshes)}" if meshes else ""
        when = self.saved_at.strftime("%Y-%m-%d %H:%M:%S UTC")
        many = "" if self.num_processes == 1 else f" by {self.num_processes} processes"
        return f"step {self.step}, saved {when}{many}{on}"

    def _rows(self) -> list[list[str]]:
        return [
            [
                leaf.path or "(the array)",
                _render.array_text(leaf.dtype, leaf.shape),
                leaf.layout,
                _render.bytes_text(leaf.nbytes),
            ]
            for leaf in self.leaves
        ]

    def _notes(self) -> list[str]:
        state = _render.bytes_text(self.nbytes)
        disk = _render.bytes_text(self.file_bytes)
        notes = [f"{len(self.leaves)} leaves, {state}; {disk} on disk."]
        if self.metrics:
            pairs = (f"{name} {value:.6g}" for name, value in self.metrics.items())
            notes.append(f"metrics: {', '.join(pairs)}")
        if self.metadata not in (None, {}):
            notes.append(f"metadata: {self.metadata!r}")
        if self.has_data:
            notes.append("with the state of the input iterator")
        return notes


_HEADERS = ["path", "array", "layout", "bytes"]
_ALIGN = "lllr"


# Plain values as JSON.

_MARK = "!"


def encode(value: Any, where: str) -> Any:
    """Returns a value in a form that JSON can hold.

    Args:
        value: Numbers, strings, bytes, None, NumPy scalars, small arrays, and lists,
            tuples and dicts of them.
        where: The name of the value, for messages.

    Raises:
        CheckpointError: If it holds anything else.

    Example:
        >>> encode({"at": (1, np.int64(2)), "key": b"ab"}, "metadata")
        {'at': {'!': 'tuple', 'items': [1, 2]}, 'key': {'!': 'bytes', 'base64': 'YWI='}}
    """
    # Numbers of NumPy and JAX come back as Python's: only arrays keep a dtype.
    if isinstance(value, (jax.Array, np.generic)) and not np.ndim(value):
        value = np.asarray(value).item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, bytes):
        return {_MARK: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and (
        value.dtype.kind == "S" or _jax.is_array_dtype(value.dtype)
    ):
        dtype = value.dtype
        return {
            _MARK: "array",
            "dtype": dtype.name if dtype.kind == "V" else dtype.str,  # V: bfloat16
            "shape": [*value.shape],
            "base64": base64.b64encode(value.tobytes()).decode(),
        }
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return {_MARK: "tuple", "items": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        pairs = [(k, encode(item, f"{where}[{k!r}]")) for k, item in value.items()]
        # A dict with our mark as a key is written as pairs: it would be decoded as one
        # of the values above.
        if all(isinstance(key, str) for key, _ in pairs) and _MARK not in value:
            return dict(pairs)
        items = [[encode(k, f"a key of {where}"), item] for k, item in pairs]
        return {_MARK: "dict", "items": items}
    msg = (
        f"{where} is {_checks.shown(value)}, which cannot be written as JSON. Give "
        "numbers, strings, bytes, and lists and dicts of them."
    )
    raise CheckpointError(msg)


def decode(value: Any) -> Any:
    """Returns the value that `encode` encoded."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_MARK)
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    if kind == "tuple":
        return tuple(decode(value["items"]))
    if kind == "dict":
        return {decode(key): decode(item) for key, item in value["items"]}
    content = base64.b64decode(value["base64"])
    if kind == "bytes":
        return content
    # Copied, as an array of bytes' memory is read-only.
    return np.frombuffer(content, value["dtype"]).reshape(value["shape"]).copy()
