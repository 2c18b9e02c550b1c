"""The manifest: what a checkpoint holds, in one file that is written last.

A step exists if its manifest is there and whole. It names every array with its shape,
dtype, layout and fingerprint, and every other file with its size and hash.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshlayout.checkpoint.files import digest
from meshlayout.errors import CheckpointError, DamagedCheckpointError


NAME = "manifest.json"

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class SavedLeaf:
    """One leaf of a state that was saved.

    Attributes:
        path: Its name.
        parts: The keys that the name is made of.
        kind: `"array"`, `"key"` for PRNG keys, `"numpy"`, or `"python"` for a number of
            Python's.
        shape: Its global shape.
        dtype: Its dtype; of Python's values, their type.
        layout: How it lay when it was saved.
        mesh: The mesh that it lay on.
        nbytes: The bytes of the whole leaf.
        array: Its name in the array files; None if it is not in them.
        stored: The dtype there.
        key_impl: The implementation of PRNG keys.
        fingerprint: Of its bits, whatever their layout.
        value: Python's values themselves.
    """

    path: str
    parts: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    dtype: str
    layout: str = ""
    mesh: str = ""
    nbytes: int = 0
    array: str | None = None
    stored: str | None = None
    key_impl: str | None = None
    fingerprint: str | None = None
    value: Any = None


@dataclass(frozen=True)
class SavedFile:
    """One file of a checkpoint.

    Attributes:
        size: Its bytes.
        sha256: Its hash; None for files so large that fingerprints stand for them.
    """

    size: int
    sha256: str | None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: The step.
        saved_at: Seconds since the epoch when it was complete.
        num_processes: How many processes wrote it.
        arrays: The directory of the array files, beside the manifest; None if the
            state holds no arrays.
        data: The file of the input iterator's state, if there is one.
        metadata: What the user gave.
        metrics: What was measured.
        leaves: The state.
        files: All files but the manifest, by their names.
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
        fields = dataclasses.asdict(self)
        leaves = [_without_defaults(leaf) for leaf in self.leaves]
        body = _text({"version": _VERSION, **fields, "leaves": leaves})
        return f'{{"manifest":{body},"sha256":"{digest(body.encode())}"}}\n'.encode()

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> "Manifest":
        """Returns the manifest in a file's content.

        Args:
            content: The content.
            where: The file's name, for messages.

        Raises:
            DamagedCheckpointError: If it is not what was written.
            CheckpointError: If another version of this library wrote it.
        """
        try:
            whole = json.loads(content)
            body, found = _text(whole["manifest"]), whole["sha256"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DamagedCheckpointError(_damaged(where)) from None
        same = f'{{"manifest":{body},"sha256":"{found}"}}\n'.encode() == content
        if digest(body.encode()) != found or not same:
            raise DamagedCheckpointError(_damaged(where))
        fields = whole["manifest"]
        version = fields.pop("version")
        if version != _VERSION:
            msg = (
                f"{where} has version {version} of the format, and this meshlayout "
                f"reads version {_VERSION}. Use the meshlayout that wrote it."
            )
            raise CheckpointError(msg)
        return cls(
            **fields
            | {
                "leaves": tuple(map(_leaf, fields["leaves"])),
                "files": {
                    name: SavedFile(**file) for name, file in fields["files"].items()
                },
            }
        )


def _damaged(where: str) -> str:
    return (
        f"{where} is not what was written: the file is cut off or changed. Restore "
        "another step, or the newest intact one with fallback=True."
    )


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=True)


def _without_defaults(leaf: SavedLeaf) -> dict[str, Any]:
    return {
        one.name: getattr(leaf, one.name)
        for one in dataclasses.fields(leaf)
        if one.default is dataclasses.MISSING or getattr(leaf, one.name) != one.default
    }


def _leaf(fields: dict[str, Any]) -> SavedLeaf:
    fields["parts"], fields["shape"] = tuple(fields["parts"]), tuple(fields["shape"])
    return SavedLeaf(**fields)
