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

import contextlib
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
from meshlayout.cluster.channel import Channel
from meshlayout.errors import CheckpointError, DamagedCheckpointError


logger = logging.getLogger("meshlayout.checkpoint")

# What declares a step whole: here the sizes and hashes of its files, in a store a file
# of Orbax. Orbax's metadata hold the facts of a step that we give it. Before this
# format, steps had a manifest.
_SEAL, _COMMIT = "files.json", "commit_success.txt"
_FACTS, _MANIFEST = "_CHECKPOINT_METADATA", "manifest.json"
_STEP = r"(0|[1-9]\d*)(\.new)?"
# How long what another machine wrote may take to appear here.
_SHARED_S = 5.0


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
    if text.startswith("gs://"):
        require("gcsfs", extra="gcs", purpose="A directory in gs://")
        epath = require("etils.epath", extra="checkpoint", purpose="Checkpointing")
        return epath.Path(text.rstrip("/"))
    if "://" in text or text.startswith("gs:/"):  # which pathlib makes of gs://
        msg = f"{text!r} is neither a local path nor 'gs://bucket/run' as a string."
        raise CheckpointError(msg)
    return Path(text).expanduser().absolute()


def is_remote(path: Path) -> bool:
    """Returns whether a path is in a store, where nothing can be renamed."""
    return str(path).startswith("gs://")


# Which steps there are.


def step_paths(directory: Path) -> dict[int, Path]:
    """Returns the directories of the steps that exist, in ascending order."""
    if is_remote(directory):
        # What other machines write is seen at once. etils has no public way to reach
        # its client; `test_checkpoint_store` notices if this is left out.
        backend = require("etils.epath.backend", extra="checkpoint", purpose="Orbax")
        client = backend.fsspec_backend.fs("gs://")
        client.invalidate_cache()
        client.dircache.use_listings_cache = False
    children = list(directory.iterdir()) if directory.is_dir() else []
    children = [x for x in children if re.fullmatch(_STEP, x.name)]
    children.sort(key=lambda x: -len(x.name))  # `5` wins over `5.new`
    paths = {int(path.stem): path for path in children if _is_step(path)}
    if not is_remote(directory) and not all(path.exists() for path in children):
        return step_paths(directory)  # one took its name meanwhile, or was deleted
    return dict(sorted(paths.items()))


def is_whole(path: Path) -> bool:
    """Returns whether a directory is a step that this format wrote to its end."""
    return (path / (_COMMIT if is_remote(path) else _SEAL)).exists()


def _is_step(path: Path) -> bool:
    """Returns whether it is whole, of an older format, or has only lost its seal."""
    if is_whole(path) or is_remote(path) or path.suffix:
        return is_whole(path)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if b'"format"' in (path / _FACTS).read_bytes():
            return True
    return (path / _MANIFEST).exists()


def mark(path: Path) -> Any:
    """Returns what tells this copy of a step from another one in its place."""
    if is_remote(path):
        return (path / _FACTS).read_bytes()
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def read_facts(path: Path) -> dict[str, Any]:
    """Returns what a step is, as its save gave it to Orbax."""
    _refuse_older(path)
    try:
        facts = json.loads((path / _FACTS).read_bytes())["custom_metadata"]
        if facts["format"] != 4:
            raise ValueError("it has another format")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path / _FACTS, f"cannot be read: {error}") from error
    return facts


def check(path: Path, *, verify: bool) -> None:
    """Compares this process's share of a step's files with what was saved.

    Raises DamagedCheckpointError, which names the file. Without `verify`, only sizes
    are compared.
    """
    _refuse_older(path)
    if is_remote(path):
        return
    file = path / _SEAL
    try:
        files = json.loads(file.read_bytes())
        for name in _share({name: size for name, (size, _) in files.items()}):
            file, wanted = path / name, files[name]
            size = file.stat().st_size
            if size != wanted[0]:
                raise ValueError(f"it has {size} bytes, but {wanted[0]} were saved")
            if verify and _digest(file) != wanted:
                raise ValueError("its content has changed")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(file, f"is not as it was saved: {error}") from error


def _refuse_older(path: Path) -> None:
    if (path / _MANIFEST).exists():
        msg = (
            f"{path} is a checkpoint of an older format, which this version does not "
            "read. The last commit of meshlayout that reads it is bb727a3: there, "
            "ml.checkpoint.save_safetensors(file, checkpointer.restore_numpy()) "
            "exports it, and ml.checkpoint.load_safetensors loads that file here."
        )
        raise CheckpointError(msg)


def _damaged(path: Path, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{path} {what}. Restore another step, or the newest intact one with "
        "fallback=True; verify=False reads whatever is there."
    )


def num_bytes(path: Path) -> int:
    """Returns the size of a step's files; in a store 0, as it costs a request each."""
    return 0 if is_remote(path) else sum(x.stat().st_size for x in _files_below(path))


# A step that is written.


def clear(directory: Path, step: int) -> None:
    """Makes room for a step, or raises CheckpointError if something else is there."""
    path, new = directory / str(step), directory / f"{step}.new"
    if is_remote(path):
        # What a save or deletion that was cut off left has no other files at its top.
        files = (
            [x.name for x in path.iterdir() if not x.is_dir()] if path.exists() else []
        )
        is_ours = {*files} <= {"", _COMMIT, _FACTS, "orbax.checkpoint"}
    else:
        is_old = (path / _MANIFEST).exists()
        is_ours = _is_step(path) and not is_old
    if (path.exists() and not is_ours) or (not is_remote(path) and new.exists()):
        msg = (
            f"{new if is_ours else path} is in the way, which no Checkpointer of this "
            "version wrote. Save to another directory, or remove it."
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
        (path / _COMMIT).unlink(missing_ok=True)
        path.rmtree()  # type: ignore[attr-defined]


def recover(directory: Path) -> None:
    """Finishes what a save that was cut off has begun; the lock must be held."""
    for path in [] if is_remote(directory) else list(directory.iterdir()):
        if re.fullmatch(r"\d+\.new", path.name):
            # Before any removal: what is being deleted may be the only other copy.
            if is_whole(path):
                take_name(directory, int(path.stem))
            elif (path / _FACTS).exists():
                _hidden(path)
    for path in [] if is_remote(directory) else list(directory.iterdir()):
        if re.fullmatch(r"\d+\.(new\.orbax-checkpoint-tmp.*|deleting-\d+)", path.name):
            _remove(path)
        elif re.fullmatch(r"\.shared-\w{16}", path.name):
            path.unlink()


def _files_below(path: Path) -> Iterator[Path]:
    files = (x for x in path.rglob("*") if not x.is_dir())
    return (x for x in files if not x.name.startswith(_SEAL))


def _share(sizes: Mapping[str, int]) -> list[str]:
    """Returns the files of this process, of about as many bytes as any other's."""
    loads = [0] * jax.process_count()
    share: list[str] = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        process = loads.index(min(loads))
        loads[process] += sizes[name] + 1
        share += [name] * (process == jax.process_index())
    return share


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
    """Makes the names in a directory durable, where the system can."""
    if os.name == "posix":  # Windows cannot open directories
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
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
    nobody = "%s cannot be locked (%s): nobody guards it from other runs"
    refusal = "{} saves to {}. Save to another directory, or end that one first."
    if is_remote(directory):
        logger.warning(nobody, directory, "it is in a store")
        return lambda: None
    status, pid = directory.stat(), os.getpid()
    key = status.st_dev, status.st_ino
    if _held.get(key) == pid:
        who = "another Checkpointer of this process"
        raise CheckpointError(refusal.format(who, directory))
    file = (directory / ".lock").open("w")
    try:
        import fcntl  # noqa: PLC0415 (Windows has none)

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        raise CheckpointError(refusal.format("another run", directory)) from None
    except (ImportError, OSError) as error:
        logger.warning(nobody, directory, error)
    _held[key] = pid

    def unlock() -> None:
        if os.getpid() == pid:
            _held.pop(key, None)
            file.close()

    return weakref.finalize(owner, unlock)


def check_shared(directory: Path, channel: Channel) -> None:
    """Raises CheckpointError on all processes unless they share a directory."""
    if jax.process_count() == 1 or is_remote(directory):
        return
    token = directory / channel.from_first(f".shared-{secrets.token_hex(8)}")
    with channel.failure_told():
        end_s = time.monotonic() + _SHARED_S
        if jax.process_index() == 0:
            token.touch()
        while not token.exists():
            if time.monotonic() > end_s:
                msg = (
                    f"process {jax.process_index()} does not see what process 0 wrote "
                    f"to {directory}: the processes do not share this directory. Give "
                    "one that all machines share."
                )
                raise CheckpointError(msg)
            time.sleep(0.02)
    channel.exchange(None)
    if jax.process_index() == 0:
        token.unlink()
