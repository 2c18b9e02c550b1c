"""A directory of steps: which of them exist, who may save, and how one takes its name.

    5                             step 5, sealed by 5/files.json
    5.new.orbax-checkpoint-tmp    Orbax writes it
    5.new                         Orbax has committed it; sealed, it becomes `5`
    5.deleting-1712345            is being removed
    .lock                         held by the run that saves

A save writes beside what is there, and a step takes its name by renames. So at no file
call is there a moment without an intact copy of a step: readers take a sealed `5.new`
for step 5 if there is no `5`, and whoever takes the lock finishes what was cut off.

In Google Cloud Storage nothing can be renamed. There Orbax writes the step under its
own name, and commits it by a file that is written last and deleted first; the store has
its own checksums, so that there are no seals.
"""

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from meshlayout import _checks
from meshlayout._optional import require
from meshlayout.errors import CheckpointError, DamagedCheckpointError


logger = logging.getLogger("meshlayout.checkpoint")

_REMOTE = "gs://"

# The sizes and hashes of a step's files, which are written before it takes its name.
SEAL = "files.json"
# Orbax's: the facts of a step that we give it, and what it writes last in a store.
FACTS, COMMIT = "_CHECKPOINT_METADATA", "commit_success.txt"
# How long what another machine wrote may take to appear here.
_SHARED_S = 5.0
# What the formats before this one had in the place of a seal.
_OLD = "manifest.json"

# Paths.


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


def as_directory(path: object) -> Path:
    """Returns a directory as an absolute path; in a store, as Orbax's kind of path.

    Raises:
        CheckpointError: If it is not a path, or is in an unsupported kind of store.
    """
    hint = "Write Checkpointer('/data/run') or 'gs://...'."
    text = path_text("a checkpoint directory", path, hint)
    if text.startswith(_REMOTE):
        require("gcsfs", extra="gcs", purpose=f"A directory in {_REMOTE}")
        epath = require("etils.epath", extra="checkpoint", purpose="Checkpointing")
        return epath.Path(text.rstrip("/"))
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
    return Path(text).expanduser().absolute()


def is_remote(path: Path) -> bool:
    """Returns whether a path is in a store, where nothing can be renamed."""
    return str(path).startswith(_REMOTE)


def refresh(path: Path) -> None:
    """Has listings of a store see what other machines wrote."""
    if is_remote(path):
        # Without it, a step that another machine saved or deleted goes unnoticed;
        # `test_checkpoint_store` notices. etils has no public way to reach the client.
        backend = require("etils.epath.backend", extra="checkpoint", purpose="Orbax")
        backend.fsspec_backend.fs(_REMOTE).invalidate_cache()


# Which steps there are.


def step_paths(directory: Path) -> dict[int, Path]:
    """Returns the directories of the steps that exist, in ascending order."""
    refresh(directory)
    try:
        names = [path.name for path in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    paths: dict[int, Path] = {}
    for name in sorted(names, key=len, reverse=True):  # `5.new` before `5`, which wins
        match = re.fullmatch(r"(0|[1-9]\d*)(\.new)?", name)
        path = directory / name
        if match and (has_seal(path) or not match[2] and _is_step(path)):
            paths[int(match[1])] = path
    return dict(sorted(paths.items()))


def has_seal(path: Path) -> bool:
    """Returns whether a directory is a whole step that this format wrote."""
    return (path / (COMMIT if is_remote(path) else SEAL)).exists()


def _is_step(path: Path) -> bool:
    """Returns whether a directory without a seal is a step: damaged, or an old one."""
    if is_remote(path) or not (path / FACTS).exists():
        return (path / _OLD).exists()
    try:
        read_facts(path)
    except DamagedCheckpointError:
        return True
    except CheckpointError:
        return False
    return True


def read_facts(path: Path) -> dict[str, Any]:
    """Returns what a step is, as its save gave it to Orbax.

    Raises:
        DamagedCheckpointError: If it cannot be read.
        CheckpointError: If this format did not write it.
    """
    if (path / _OLD).exists():
        msg = (
            f"{path} is a checkpoint of an older format, which this version does not "
            "read. The last commit of meshlayout that reads it is bb727a3: there, "
            "ml.checkpoint.save_safetensors(file, checkpointer.restore_numpy()) "
            "exports it, and ml.checkpoint.load_safetensors loads that file here."
        )
        raise CheckpointError(msg)
    try:
        content = json.loads((path / FACTS).read_bytes())["custom_metadata"]
    except FileNotFoundError:
        content = None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path / FACTS, f"cannot be read: {error}") from error
    if not isinstance(content, Mapping) or content.get("format") != 4:
        msg = (
            f"{path} was not written by a Checkpointer of this version. "
            "ml.checkpoint.load_orbax loads what plain Orbax wrote."
        )
        raise CheckpointError(msg)
    return dict(content)


# A step that is written.


def clear(directory: Path, step: int) -> None:
    """Makes room for a step that is to be written.

    Raises:
        CheckpointError: If its name is taken by what no Checkpointer wrote.
    """
    path = directory / str(step)
    if path.exists() and not has_seal(path):
        names = sorted(x.name for x in path.iterdir()) if path.is_dir() else ["a file"]
        if is_remote(path) and (path / FACTS).exists():
            names = []  # a save or deletion that was cut off
        if names and not ((path / FACTS).exists() and _is_step(path)):
            msg = (
                f"{path} is or holds {', '.join(names[:5])}, which no Checkpointer of "
                "this version wrote. Save in another directory, or remove that one"
            )
            raise CheckpointError(msg)
    if is_remote(path):
        delete(path)
    elif (directory / f"{step}.new").exists():
        msg = f"{path}.new is in the way, which no Checkpointer wrote. Remove it"
        raise CheckpointError(msg)


def digests(path: Path, *, shared: bool = True) -> dict[str, list[Any]]:
    """Returns the sizes and hashes of a step's files, which become durable.

    Args:
        path: The directory of the step.
        shared: Whether each process takes its share of the files.
    """
    names = sorted(str(file.relative_to(path)) for file in _files_below(path))
    if shared:
        names = names[jax.process_index() :: jax.process_count()]
    return {name: _digest(path / name) for name in names}


def seal(path: Path, files: Mapping[str, list[Any]]) -> None:
    """Declares a step whole, by the sizes and hashes of all of its files."""
    for where, _, _ in os.walk(path):
        _sync(Path(where))
    temporary = path / f"{SEAL}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(files, file, separators=(",", ":"))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path / SEAL)
    _sync(path)


def take_name(directory: Path, step: int) -> None:
    """Gives a sealed `5.new` its name, in the place of a `5` that is there."""
    path, old = directory / str(step), None
    if path.exists():
        old = _deleting(path)
        path.rename(old)
    (directory / f"{step}.new").rename(path)
    _sync(directory)
    if old is not None:
        _remove(old)


def read_seal(path: Path) -> bytes:
    """Returns what declares a step whole; another save of it would change this."""
    return (path / (COMMIT if is_remote(path) else SEAL)).read_bytes()


def check(path: Path, *, verify: bool) -> bytes:
    """Compares a step's files with what was saved, each process its share of them.

    Args:
        path: The directory of the step.
        verify: Whether to compare their hashes, and not only their sizes.

    Returns:
        The seal.

    Raises:
        DamagedCheckpointError: If they differ; names the file.
    """
    if (path / _OLD).exists():
        read_facts(path)  # says that it is of an older format
    try:
        content = read_seal(path)
        files = [] if is_remote(path) else sorted(json.loads(content).items())
        files = [(path / name, *facts) for name, facts in files]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path / SEAL, f"is not as it was saved: {error}") from error
    for file, size, digest in files[jax.process_index() :: jax.process_count()]:
        try:
            found = [file.stat().st_size]
            if found == [size] and verify:
                found = _digest(file)
        except OSError as error:
            raise _damaged(file, f"cannot be read: {error.strerror}") from error
        if found[0] != size:
            raise _damaged(file, f"has {found[0]} bytes, but {size} were saved")
        if found[1:] not in ([], [digest]):
            raise _damaged(file, "has other content than was saved")
    return content


def _damaged(path: Path, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{path} {what}. Restore another step, or the newest intact one with "
        "fallback=True; verify=False reads whatever is there."
    )


def num_bytes(path: Path) -> int:
    """Returns the size of a step's files, without the seal."""
    status = [file.stat() for file in _files_below(path)]
    # Orbax's kind of path has names of its own.
    return sum(getattr(x, "st_size", None) or getattr(x, "length", 0) for x in status)


def delete(path: Path) -> None:
    """Removes a step, which is no step any more before any of its files goes."""
    if is_remote(path):
        if path.exists():
            (path / COMMIT).unlink(missing_ok=True)
            path.rmtree()  # type: ignore[attr-defined]
        refresh(path)
        return
    hidden = _deleting(path)
    path.rename(hidden)
    _remove(hidden)


def write_token(directory: Path) -> Path | None:
    """Writes a file that the other processes have to see, if there are any."""
    if jax.process_count() == 1 or is_remote(directory):
        return None
    token = directory / f".shared-{secrets.token_hex(8)}"
    token.touch()
    return token


def await_token(token: Path) -> None:
    """Waits for the file that process 0 has written, or raises CheckpointError."""
    end_s = time.monotonic() + _SHARED_S
    while not token.exists():
        if time.monotonic() > end_s:
            msg = (
                f"process {jax.process_index()} does not see what process 0 wrote to "
                f"{token.parent}: the processes do not share this directory. Give one "
                "that all machines share."
            )
            raise CheckpointError(msg)
        time.sleep(0.02)


def recover(directory: Path) -> None:
    """Finishes what a save that was cut off has begun; the lock must be held."""
    if is_remote(directory):
        return
    news = [
        path for path in directory.iterdir() if re.fullmatch(r"\d+\.new", path.name)
    ]
    for path in news:
        # First, as what is being deleted may be the only other copy.
        if has_seal(path):
            take_name(directory, int(path.stem))
        elif (path / FACTS).exists():
            delete(path)
    for path in directory.iterdir():
        if re.fullmatch(r"\d+\.(new\.orbax-checkpoint-tmp.*|deleting-\d+)", path.name):
            _remove(path)
        elif re.fullmatch(r"\.shared-\w{16}", path.name):
            path.unlink()


def _files_below(path: Path) -> Iterator[Path]:
    for child in path.iterdir():
        if child.is_dir():
            yield from _files_below(child)
        elif not child.name.startswith(SEAL):
            yield child


def _digest(path: Path) -> list[Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if os.name == "posix":
            os.fsync(file.fileno())
        return [file.tell(), digest]


def _deleting(path: Path) -> Path:
    return path.with_name(f"{path.name.split('.')[0]}.deleting-{time.time_ns()}")


def _remove(path: Path) -> None:
    """Removes a directory; what cannot be removed is left to the next save."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s, which is no step any more, stays: %s", path, error)


def _sync(path: Path) -> None:
    """Makes the names in a directory durable."""
    if os.name != "posix":  # Windows cannot open directories
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some mounts cannot
            raise
    finally:
        os.close(handle)


# Who may save.

# By directory: the process that holds its lock, in case it was forked since.
_held: dict[tuple[int, int], int] = {}


def lock(directory: Path, owner: object) -> Callable[[], Any]:
    """Takes the lock of a directory, and returns a function that frees it.

    The system frees it when the process closes any descriptor of the file, and with the
    process. So nothing else may open the file, and `_held` says whether this process
    has the lock already.

    Args:
        directory: The directory, which exists.
        owner: The lock is also freed when this object is collected.

    Raises:
        CheckpointError: If somebody else holds it.
    """
    if is_remote(directory):
        logger.warning("%s has no locks: nobody guards it from other runs", directory)
        return lambda: None
    status = directory.stat()
    key = status.st_dev, status.st_ino
    way_out = "Save in another directory, or end that one first."
    if _held.get(key) == os.getpid():
        who = "another Checkpointer of this process"
        raise CheckpointError(f"{directory}: {who} saves there. {way_out}")
    file = (directory / ".lock").open("w")
    try:
        import fcntl  # noqa: PLC0415 (Windows has none)

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        msg = f"{directory}: another run saves there. {way_out}"
        raise CheckpointError(msg) from None
    except (ImportError, OSError) as error:
        logger.warning(
            "%s cannot be locked (%s): nobody guards it from other runs",
            *(directory, error),
        )
    _held[key] = pid = os.getpid()

    def unlock() -> None:
        if os.getpid() == pid:
            _held.pop(key, None)
            file.close()

    return weakref.finalize(owner, unlock)
