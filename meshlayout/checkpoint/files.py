"""Files of a checkpoint directory: read, written whole, made durable, removed.

A directory is local or in Google Cloud Storage (`gs://bucket/run`). In a store a file
appears whole or not at all; locally it is written under another name, flushed to the
disk, and renamed.
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


def path_text(name: str, path: object, hint: str = "") -> str:
    """Returns a user's path as a string.

    Args:
        name: The parameter, for messages.
        path: What the user gave.
        hint: A sentence that ends the message.

    Raises:
        CheckpointError: If it is not a path.
    """
    text = path.__fspath__() if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text:
        msg = f"{name} must be a path, got {_checks.shown(path)}. {hint}"
        raise CheckpointError(msg.rstrip())
    if "\0" in text:
        msg = f"{text!r} contains a null byte, which no path may have."
        raise CheckpointError(msg)
    return text


def as_directory(path: AnyPath) -> AnyPath:
    """Returns a directory as an absolute `pathlib.Path`, or as a `StorePath`.

    Raises:
        CheckpointError: If it is not a path, or is in an unsupported kind of store.
    """
    hint = "Write Checkpointer('/data/run') or 'gs://...'."
    text = path_text("a checkpoint directory", path, hint)
    if text.startswith(store.SCHEME):
        return StorePath.of(text)
    if text.startswith("gs:/"):
        msg = (
            f"{text!r} has lost a slash, as pathlib.Path takes it for a local path. "
            f"Give the string {'gs://' + text[4:]!r}."
        )
        raise CheckpointError(msg)
    if "://" in text:
        msg = (
            f"{text!r} is in a store that checkpoints cannot be written to. Give a "
            "local path, or 'gs://bucket/run' in Google Cloud Storage."
        )
        raise CheckpointError(msg)
    return pathlib.Path(text).expanduser().absolute()


def is_step(name: str) -> bool:
    """Returns whether a name is that of a step's directory."""
    # Not `007`: two names would mean one step.
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
    # The rename itself is in the directory, which has its own place on the disk.
    sync_directory(path.parent)


def sync_directory(path: pathlib.Path) -> None:
    """Makes the names in a local directory durable."""
    if os.name != "posix":  # Windows cannot open directories
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(path: pathlib.Path) -> None:
    """Makes everything below a local directory durable, and its own name, too."""
    for where, _, names in os.walk(path):
        for name in names:
            with pathlib.Path(where, name).open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(pathlib.Path(where))
    sync_directory(path.parent)


def names_in(path: AnyPath) -> set[str]:
    """Returns the names in a directory; none if it does not exist."""
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
