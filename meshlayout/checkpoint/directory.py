"""A directory of steps: which of them exist, who may save, and how one takes its name.

    5                             step 5, sealed by 5/files.json
    5.new.orbax-checkpoint-tmp    Orbax writes it
    5.new                         Orbax has committed it; sealed, it becomes `5`
    5.deleting-1712345            is being removed
    .lock                         held by the run that saves

A save writes beside what is there, and a step takes its name by renames. So at no file
call is there a moment without an intact copy of a step: readers take a sealed `5.new`
for step 5 if there is no `5`, and whoever takes the lock finishes what was cut off.

In Google Cloud Storage nothing can be renamed. There Orbax writes a step under its own
name, and commits it by a file that is written last and deleted first. The store has its
own checksums, so that there are no seals.
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
# What declares a step whole: here the sizes and hashes of its files, in a store a file
# of Orbax. Orbax's metadata hold the facts of a step that we give it; a manifest was in
# the place of a seal before this format.
_SEAL, _COMMIT = "files.json", "commit_success.txt"
_FACTS, _MANIFEST = "_CHECKPOINT_METADATA", "manifest.json"
# How long what another machine wrote may take to appear here.
_SHARED_S = 5.0


# Paths.


def path_text(name: str, path: object, hint: str = "") -> str:
    """Returns a user's path as a string, or raises CheckpointError."""
    text = path.__fspath__() if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        msg = f"{name} must be a path, got {_checks.shown(path)}. {hint}"
        raise CheckpointError(msg.rstrip())
    return text


def as_directory(path: object) -> Path:
    """Returns an absolute path; in a store, Orbax's kind of path."""
    hint = "Write Checkpointer('/data/run') or 'gs://...'."
    text = path_text("a checkpoint directory", path, hint)
    if text.startswith(_REMOTE):
        require("gcsfs", extra="gcs", purpose=f"A directory in {_REMOTE}")
        epath = require("etils.epath", extra="checkpoint", purpose="Checkpointing")
        return epath.Path(text.rstrip("/"))
    if "://" in text or text.startswith("gs:/"):
        msg = (
            f"{text!r} is neither a local path nor 'gs://bucket/run' in Google Cloud "
            "Storage. (pathlib.Path makes one slash of two: give a string.)"
        )
        raise CheckpointError(msg)
    return Path(text).expanduser().absolute()


def is_remote(path: Path) -> bool:
    """Returns whether a path is in a store, where nothing can be renamed."""
    return str(path).startswith(_REMOTE)


def _refresh(path: Path) -> None:
    """Has listings of a store see what other machines wrote."""
    if is_remote(path):
        # `test_checkpoint_store` notices if this is left out. etils has no public way
        # to reach its client.
        backend = require("etils.epath.backend", extra="checkpoint", purpose="Orbax")
        client = backend.fsspec_backend.fs(_REMOTE)
        client.invalidate_cache()
        client.dircache.use_listings_cache = False


# Which steps there are.


def step_paths(directory: Path) -> dict[int, Path]:
    """Returns the directories of the steps that exist, in ascending order."""
    _refresh(directory)
    try:
        names = [path.name for path in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    paths: dict[int, Path] = {}
    for name in sorted(names, key=len, reverse=True):  # `5.new` before `5`, which wins
        match, path = re.fullmatch(r"(0|[1-9]\d*)(\.new)?", name), directory / name
        if match and (is_whole(path) or not match[2] and _is_unsealed_step(path)):
            paths[int(match[1])] = path
    return dict(sorted(paths.items()))


def is_whole(path: Path) -> bool:
    """Returns whether a directory is a step that this format wrote to its end."""
    return _seal_of(path).exists()


def read_facts(path: Path) -> dict[str, Any]:
    """Returns what a step is, as its save gave it to Orbax.

    Raises:
        DamagedCheckpointError: If it cannot be read.
        CheckpointError: If this format did not write it.
    """
    if (path / _MANIFEST).exists():
        msg = (
            f"{path} is a checkpoint of an older format, which this version does not "
            "read. The last commit of meshlayout that reads it is bb727a3: there, "
            "ml.checkpoint.save_safetensors(file, checkpointer.restore_numpy()) "
            "exports it, and ml.checkpoint.load_safetensors loads that file here."
        )
        raise CheckpointError(msg)
    try:
        facts = json.loads((path / _FACTS).read_bytes())["custom_metadata"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path / _FACTS, f"cannot be read: {error}") from error
    if not isinstance(facts, Mapping) or facts.get("format") != 4:
        msg = (
            f"{path} was not written by a Checkpointer of this version. "
            "ml.checkpoint.load_orbax loads what plain Orbax wrote."
        )
        raise CheckpointError(msg)
    return dict(facts)


def read_seal(path: Path) -> bytes:
    """Returns what declares a step whole; another save of it would change this."""
    return _seal_of(path).read_bytes()


def check(path: Path, *, verify: bool) -> bytes:
    """Compares this process's share of a step's files with what was saved.

    Returns the seal; raises DamagedCheckpointError, which names the file. Without
    `verify`, only sizes are compared.
    """
    if (path / _MANIFEST).exists():
        read_facts(path)  # says that it is of an older format
    try:
        content = read_seal(path)
        files = {} if is_remote(path) else json.loads(content)
        names = _share({name: size for name, (size, _) in files.items()})
        share = [(path / name, *files[name]) for name in names]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(_seal_of(path), f"is not as it was saved: {error}") from error
    for file, size, digest in share:
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


def num_bytes(path: Path) -> int:
    """Returns the size of a step's files."""
    # Orbax's kind of path has another name for it.
    size = "length" if is_remote(path) else "st_size"
    return sum(getattr(file.stat(), size) for file in _files_below(path))


def _seal_of(path: Path) -> Path:
    return path / (_COMMIT if is_remote(path) else _SEAL)


def _is_unsealed_step(path: Path) -> bool:
    """Returns whether it is a step of an older format, or one whose seal was lost."""
    if is_remote(path) or not (path / _FACTS).exists():
        return (path / _MANIFEST).exists()
    try:
        read_facts(path)
    except DamagedCheckpointError:
        return True
    except CheckpointError:
        return False
    return True


def _damaged(path: Path, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{path} {what}. Restore another step, or the newest intact one with "
        "fallback=True; verify=False reads whatever is there."
    )


# A step that is written.


def clear(directory: Path, step: int) -> None:
    """Makes room for a step, or raises CheckpointError if something else is there."""
    path, new = directory / str(step), directory / f"{step}.new"
    if is_remote(path):
        # What a save or deletion that was cut off left has no other files at its top.
        known = {_COMMIT, _FACTS, "orbax.checkpoint"}
        files = path.iterdir() if path.exists() else ()
        is_foreign = any(x.name not in known and not x.is_dir() for x in files)
    else:
        is_ours = is_whole(path) or _is_unsealed_step(path)
        is_foreign = path.exists() and (not is_ours or (path / _MANIFEST).exists())
    if is_foreign or (new.exists() and not is_remote(path)):
        msg = (
            f"{path if is_foreign else new} is in the way, which no Checkpointer of "
            "this version wrote. Save to another directory, or remove it."
        )
        raise CheckpointError(msg)
    if is_remote(path):
        delete(path)


def digests(path: Path) -> dict[str, list[Any]]:
    """Returns sizes and hashes of this process's share of a step's files."""
    files = {str(x.relative_to(path)): x.stat().st_size for x in _files_below(path)}
    return {name: _digest(path / name) for name in _share(files)}


def seal(path: Path, files: Mapping[str, list[Any]]) -> None:
    """Declares a step whole, by the sizes and hashes of all of its files."""
    for where, _, _ in os.walk(path):
        _sync(Path(where))
    temporary = path / f"{_SEAL}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(files, file, separators=(",", ":"))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path / _SEAL)
    _sync(path)


def take_name(directory: Path, step: int) -> None:
    """Gives a sealed `5.new` its name, in the place of a `5` that is there."""
    path = directory / str(step)
    old = _hidden(path) if path.exists() else None
    (directory / f"{step}.new").rename(path)
    _sync(directory)
    if old is not None:
        _remove(old)


def delete(path: Path) -> None:
    """Removes a step, which is no step any more before any of its files goes."""
    if not is_remote(path):
        _remove(_hidden(path))
    elif path.exists():
        _seal_of(path).unlink(missing_ok=True)
        path.rmtree()  # type: ignore[attr-defined]
        _refresh(path)


def recover(directory: Path) -> None:
    """Finishes what a save that was cut off has begun; the lock must be held."""
    if is_remote(directory):
        return
    for path in list(directory.iterdir()):
        if re.fullmatch(r"\d+\.new", path.name):
            # First, as what is being deleted may be the only other copy.
            if is_whole(path):
                take_name(directory, int(path.stem))
            elif (path / _FACTS).exists():
                delete(path)
    for path in list(directory.iterdir()):
        if re.fullmatch(r"\d+\.(new\.orbax-checkpoint-tmp.*|deleting-\d+)", path.name):
            _remove(path)
        elif re.fullmatch(r"\.shared-\w{16}", path.name):
            path.unlink()


def _files_below(path: Path) -> Iterator[Path]:
    for child in path.iterdir():
        if child.is_dir():
            yield from _files_below(child)
        elif not child.name.startswith(_SEAL):
            yield child


def _share(sizes: Mapping[str, int]) -> list[str]:
    """Returns the files of this process, of about as many bytes as any other's."""
    loads = [0] * jax.process_count()
    shares: list[list[str]] = [[] for _ in loads]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        process = loads.index(min(loads))
        loads[process] += sizes[name] + 1
        shares[process].append(name)
    return shares[jax.process_index()]


def _digest(path: Path) -> list[Any]:
    """Returns the size and the hash of a file, which becomes durable."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if os.name == "posix":
            os.fsync(file.fileno())
        return [file.tell(), digest]


def _hidden(path: Path) -> Path:
    """Renames a directory that is to be removed."""
    name = f"{path.name.partition('.')[0]}.deleting-{time.time_ns()}"
    return path.rename(path.with_name(name))


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:  # the next save tries again
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

    The system frees it with the process, and when the process closes any descriptor of
    the file: nothing else may open it, and `_held` says whether this process has it.
    """
    if is_remote(directory):
        logger.warning("%s has no locks: nobody guards it from other runs", directory)
        return lambda: None
    status, pid = directory.stat(), os.getpid()
    key = status.st_dev, status.st_ino
    refusal = (
        "{} saves to {}. Save to another directory, or end that one first."
    ).format
    if _held.get(key) == pid:
        who = "another Checkpointer of this process"
        raise CheckpointError(refusal(who, directory))
    file = (directory / ".lock").open("w")
    try:
        import fcntl  # noqa: PLC0415 (Windows has none)

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        raise CheckpointError(refusal("another run", directory)) from None
    except (ImportError, OSError) as error:
        logger.warning(
            "%s cannot be locked (%s): nobody guards it from other runs",
            *(directory, error),
        )
    _held[key] = pid

    def unlock() -> None:
        if os.getpid() == pid:
            _held.pop(key, None)
            file.close()

    return weakref.finalize(owner, unlock)


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
