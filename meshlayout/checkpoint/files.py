"""Files of a checkpoint directory: read, written whole, made durable, removed.

A directory is a local path, or one of Google Cloud Storage (`gs://bucket/run`). There a
file appears whole or not at all; locally it is written under another name, flushed to
the disk, and renamed.
"""

import contextlib
import hashlib
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator
from typing import Any

from meshlayout import _checks
from meshlayout.checkpoint import store
from meshlayout.checkpoint.store import AnyPath, StorePath
from meshlayout.errors import CheckpointError


def as_directory(path: AnyPath) -> AnyPath:
    """Returns a directory as an absolute `pathlib.Path`, or as a `StorePath`.

    Raises:
        CheckpointError: If it is not a path, or is in an unsupported kind of store.
    """
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text:
        msg = (
            f"a checkpoint directory must be a path, got {_checks.shown(path)}. Write "
            "Checkpointer('/data/run') or 'gs://...'."
        )
        raise CheckpointError(msg)
    if "\0" in text:
        msg = f"{text!r} has a null byte in it, which no path may have."
        raise CheckpointError(msg)
    if text.startswith(store.SCHEME):
        return StorePath.of(text)
    if text.startswith("gs:/"):
        msg = (
            f"{text!r} lost a slash, as pathlib.Path takes it for a local path. Give "
            f"the text {'gs://' + text[4:]!r}."
        )
        raise CheckpointError(msg)
    if "://" in text:
        msg = (
            f"{text!r} is in a store that checkpoints cannot be written to. Give a "
            "local path, or one of Google Cloud Storage, 'gs://bucket/run'."
        )
        raise CheckpointError(msg)
    return pathlib.Path(text).expanduser().absolute()


def is_step(name: str) -> bool:
    """Returns whether a name is one of a step's directory."""
    return name.isascii() and name.isdecimal() and str(int(name)) == name


def is_remote(path: AnyPath) -> bool:
    """Returns whether a path is in an object store."""
    return isinstance(path, StorePath)


def write_whole(path: AnyPath, content: bytes) -> None:
    """Writes a file atomically and durably."""
    if is_remote(path):
        path.write_bytes(content)
        return
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: pathlib.Path) -> None:
    """Makes the names in a local directory durable."""
    if os.name != "posix":
        return  # Windows cannot open directories
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(path: pathlib.Path) -> None:
    """Makes everything below a local directory durable, and its own name."""
    for where, _, names in os.walk(path):
        for name in names:
            with pathlib.Path(where, name).open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(pathlib.Path(where))
    sync_directory(path.parent)


def names_in(path: AnyPath) -> set[str]:
    """Returns the names in a directory; none where it does not exist."""
    if is_remote(path):
        return path.names()
    return {entry.name for entry in path.iterdir()} if path.is_dir() else set()


def files_below(path: AnyPath) -> Iterator[Any]:
    """Yields every file below a directory, in the order of their names."""
    if is_remote(path):
        yield from path.below()
    else:
        yield from sorted(file for file in path.rglob("*") if not file.is_dir())


def digest(content: bytes) -> str:
    """Returns the SHA-256 of bytes, as text."""
    return hashlib.sha256(content).hexdigest()


def remove(path: AnyPath) -> None:
    """Removes a file or a directory tree; a missing one is not an error."""
    if is_remote(path):
        path.remove()
        return
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
