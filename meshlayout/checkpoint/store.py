"""Google Cloud Storage paths with the methods of `pathlib.Path` that saving needs.

A store has no directories, only objects whose names contain slashes: a directory exists
while an object is in it. Nothing is cached between calls, since other machines write to
the store, too. One that refuses or does not answer is an error, never an empty store.
"""

import posixpath
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeVar

from meshlayout._optional import require
from meshlayout.errors import CheckpointError


AnyPath: TypeAlias = Any
"""A `pathlib.Path` or a `StorePath`, which has those of its methods that are used."""

SCHEME = "gs://"

# Prefixes of TensorStore's errors for a store that refuses, or does not answer: the
# canonical status codes that say nothing about the object.
REFUSALS = (
    "ABORTED",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
)

# Objects are deleted one by one, this many at a time.
_DELETIONS = 16

# fsspec or TensorStore take these for patterns, or for the end of a path.
_SPECIAL = "*?[]#"

_T = TypeVar("_T")


class StoreError(CheckpointError):
    """The store refuses or does not answer, which says nothing about its content.

    Attributes:
        fact: The error without the suggested fix.
    """

    def __init__(self, fact: str, way_out: str) -> None:
        super().__init__(f"{fact}. {way_out}")
        self.fact = fact

    @classmethod
    def of(cls, path: Any, what: str, why: str) -> "StoreError":
        """Returns the error for a failed request.

        Args:
            path: The object or directory.
            what: The request as a participle, such as `"read"`.
            why: The client's message.
        """
        return cls(
            f"{path} cannot be {what}: {why.rstrip('.')}",
            "That says nothing about the checkpoints there. Make sure that this "
            "process may use the bucket, and try again.",
        )


@dataclass(frozen=True)
class StorePath:
    """A path of Google Cloud Storage.

    Attributes:
        text: The path, as `gs://bucket/run`.
    """

    text: str

    @classmethod
    def of(cls, text: str) -> "StorePath":
        """Parses a user's path.

        Raises:
            CheckpointError: If it names no bucket.
            MeshLayoutError: If gcsfs is not installed.
        """
        bucket, _, inside = text.removeprefix(SCHEME).partition("/")
        if not bucket:
            msg = f"{text!r} names no bucket. Write 'gs://bucket/run'."
            raise CheckpointError(msg)
        special = next((char for char in text if char in _SPECIAL), None)
        if special is not None:
            msg = (
                f"{text!r} contains {special!r}, which has a special meaning for some "
                "clients of the store. Use a path without any of "
                f"{' '.join(_SPECIAL)}."
            )
            raise CheckpointError(msg)
        _files()  # a missing package is an error now, not at the first save
        inside = posixpath.normpath(f"/{inside}").strip("/")
        return cls(f"{SCHEME}{bucket}/{inside}".rstrip("/"))

    def __str__(self) -> str:
        return self.text

    def __fspath__(self) -> str:
        return self.text

    def __truediv__(self, name: str) -> "StorePath":
        return StorePath(f"{self.text}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> "StorePath":
        """The path without its last part."""
        return StorePath(self.text.rpartition("/")[0])

    def exists(self) -> bool:
        """Returns whether an object has this name."""
        try:
            return self._facts()["type"] == "file"
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        """Returns whether an object is in this directory."""
        return bool(self.names())

    def names(self) -> set[str]:
        """Returns the names in this directory."""
        try:
            entries = self._ask(
                "listed", lambda files: files.ls(self.text, detail=True)
            )
        except FileNotFoundError:
            return set()
        # The listing includes the directory itself if an object has its name.
        paths = [_plain(entry["name"]) for entry in entries]
        return {path.rpartition("/")[2] for path in paths if path != _plain(self.text)}

    def below(self) -> "Iterator[StorePath]":
        """Yields all objects of this directory, in the order of their names."""
        for name in self._all():
            if not name.endswith("/"):  # a placeholder that some tools make
                yield StorePath(SCHEME + name)

    def stat(self) -> SimpleNamespace:
        """Returns an object's size in bytes, and a number that every write changes."""
        facts = self._facts()
        return SimpleNamespace(
            st_size=int(facts["size"]), st_ino=str(facts["generation"]), st_mtime_ns=0
        )

    def read_bytes(self) -> bytes:
        """Returns the content of an object."""
        return self._ask("read", lambda files: files.cat_file(self.text))

    def write_bytes(self, content: bytes) -> None:
        """Writes an object atomically."""
        try:
            self._ask("written", lambda files: files.pipe_file(self.text, content))
        except FileNotFoundError:
            raise self._no_bucket() from None

    def remove(self) -> None:
        """Deletes the object of this name, and all objects in its directory."""
        inside = [StorePath(SCHEME + name) for name in self._all()]
        with ThreadPoolExecutor(_DELETIONS) as threads:
            list(threads.map(StorePath._remove_one, [self, *inside]))

    def mkdir(self, *, parents: bool, exist_ok: bool) -> None:
        """Checks that the bucket exists."""
        try:
            self._all()
        except FileNotFoundError:
            raise self._no_bucket() from None

    def _no_bucket(self) -> StoreError:
        bucket = _plain(self.text).partition("/")[0]
        fact = f"{self}: the bucket {bucket!r} does not exist"
        return StoreError(fact, "Create it, or use another one.")

    def _all(self) -> list[str]:
        """Lists all objects of this directory, if any; the bucket must exist."""
        paths = self._ask("listed", lambda files: files.find(self.text))
        return sorted(
            path for path in paths if path.startswith(f"{_plain(self.text)}/")
        )

    def _remove_one(self) -> None:
        try:
            self._ask("deleted", lambda files: files.rm_file(self.text))
        except FileNotFoundError:
            return  # another process was faster

    def _facts(self) -> dict[str, Any]:
        return self._ask("looked at", lambda files: files.info(self.text))

    def _ask(self, what: str, question: Callable[[Any], _T]) -> _T:
        try:
            return question(_files())
        except FileNotFoundError:
            raise
        except Exception as error:
            # Of gcsfs, fsspec, aiohttp or google-auth, without a common base class.
            why = " ".join(str(error).split()) or type(error).__name__
            raise StoreError.of(self, what, why) from error


def _plain(name: str) -> str:
    return name.removeprefix(SCHEME).rstrip("/")


def _files() -> Any:
    """Returns the store's client, without caching."""
    purpose = "A path of Google Cloud Storage"
    require("gcsfs", extra="gcs", purpose=purpose)
    fsspec = require("fsspec", extra="gcs", purpose=purpose)
    return fsspec.filesystem("gs", use_listings_cache=False)
