"""Files of a checkpoint directory: read, written whole, made durable, removed.

A directory is a local path, or one of an object store such as `gs://bucket/run`. In an
object store a file appears whole or not at all; locally it is written under another
name, flushed to the disk, and renamed.
"""

import contextlib
import hashlib
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator
from typing import Any

from meshlayout._optional import require
from meshlayout.errors import CheckpointError


def as_directory(path: Any) -> Any:
    """Returns a directory as an absolute `pathlib.Path`, or a path of a store.

    Args:
        path: What the user gave.

    Raises:
        CheckpointError: If it is no path.
    """
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text:
        msg = (
            f"a checkpoint directory is a path, and got {path!r} of type "
            f"{type(path).__name__}. Write Checkpointer('/data/run') or 'gs://...'."
        )
        raise CheckpointError(msg)
    if is_remote(text):
        epath = require("etils.epath", extra="checkpoint", purpose="A path of a store")
        return epath.Path(text)
    return pathlib.Path(text).expanduser().absolute()


def is_remote(path: Any) -> bool:
    """Tells whether a path is one of an object store."""
    return "://" in os.fspath(path)


def write_whole(path: Any, content: bytes) -> None:
    """Writes a file that is there whole, or as it was before; it survives a crash.

    Args:
        path: The file; one that exists is replaced.
        content: What it holds.
    """
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
        return  # Windows has no handles of directories
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(path: Any) -> None:
    """Makes everything below a directory durable, and its own name.

    Args:
        path: The directory; nothing is done in an object store.
    """
    if is_remote(path):
        return
    for where, _, names in os.walk(path):
        for name in names:
            with pathlib.Path(where, name).open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(pathlib.Path(where))
    sync_directory(path.parent)


def names_in(path: Any) -> set[str]:
    """Returns the names in a directory; none where it does not exist.

    Args:
        path: The directory; in an object store it exists if a file is in it.
    """
    return {one.name for one in path.iterdir()} if path.is_dir() else set()


def files_below(path: Any) -> Iterator[Any]:
    """Yields every file below a directory, in the order of their names.

    Args:
        path: The directory.
    """
    for one in sorted(path.iterdir(), key=lambda entry: entry.name):
        if one.is_dir():
            yield from files_below(one)
        else:
            yield one


def size_of(path: Any) -> int:
    """Returns the bytes of a file."""
    found = path.stat()
    return int(found.length if hasattr(found, "length") else found.st_size)


def digest(content: bytes) -> str:
    """Returns the SHA-256 of bytes, as text."""
    return hashlib.sha256(content).hexdigest()


def remove(path: Any) -> None:
    """Removes a file, or a directory with all in it; one that is gone is no error.

    Args:
        path: The file or directory.
    """
    if is_remote(path):
        if path.exists():
            path.rmtree() if path.is_dir() else path.unlink()
        return
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
