"""A directory of steps: which of them exist, who may save, and how one takes its name.

    5                             step 5, sealed by 5/files.json
    5.new.orbax-checkpoint-tmp    Orbax writes it
    5.new                         Orbax has committed it; sealed, it becomes `5`
    5.deleting-1712345            is being removed
    .lock                         held by the run that saves

A step takes its name by renames, and there is an intact copy at every moment: readers
take a sealed `5.new` if there is no `5`; the next run that saves finishes the renames.

In gs:// nothing can be renamed. Orbax commits a step under its own name, by a file that
is written last and deleted first. A step that is saved again is deleted first.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from meshlayout._checks import require
from meshlayout.errors import CheckpointError, DamagedCheckpointError


logger = logging.getLogger("meshlayout.checkpoint")

# The sizes and hashes of its files mark a step as whole; in a store, Orbax's commit.
# Orbax keeps the facts of a step for us. Steps of older formats have a manifest.
_SEAL, _COMMIT = "files.json", "commit_success.txt"
_FACTS, _MANIFEST = "_CHECKPOINT_METADATA", "manifest.json"
_STEP = r"(0|[1-9]\d*)(\.new)?"
_LEFTOVER = r"\d+\.(new(\.orbax-checkpoint-tmp.*)?|deleting-\d+)"
# What process 0 writes, and how long that may take to appear on another machine.
_TOKEN, _SHARED_S = ".shared", 5.0


def as_directory(path: str | os.PathLike[str]) -> Path:
    """Returns an absolute path; in a store, Orbax's kind of path."""
    text = os.fspath(path)
    if text.startswith("gs://"):
        require("gcsfs", extra="gcs", purpose="A directory in gs://")
        epath = require("etils.epath", extra="checkpoint", purpose="Checkpointing")
        # What other machines write is seen at once (`test_checkpoint_store`).
        client = epath.backend.fsspec_backend.fs("gs://")
        client.invalidate_cache()
        client.dircache.use_listings_cache = False
        return epath.Path(text.rstrip("/"))
    if "://" in text or text.startswith("gs:/"):  # which pathlib makes of gs://
        msg = f"{text!r} is neither a local path nor 'gs://bucket/run' as a string."
        raise CheckpointError(msg)
    return Path(text).expanduser().absolute()


def is_remote(path: Path) -> bool:
    """Returns whether a path is in a store, where nothing can be renamed."""
    return str(path).startswith("gs://")


def step_paths(directory: Path) -> dict[int, Path]:
    """Returns the directories of the steps that exist, in ascending order."""
    children = list(directory.iterdir()) if directory.is_dir() else []
    children = [path for path in children if re.fullmatch(_STEP, path.name)]
    children.sort(key=lambda path: -len(path.name))  # `5` wins over `5.new`
    paths = {int(path.stem): path for path in children if _is_step(path)}
    if not is_remote(directory) and not all(map(os.path.lexists, children)):
        return step_paths(directory)  # one took its name meanwhile, or was deleted
    return dict(sorted(paths.items()))


def is_whole(path: Path) -> bool:
    """Returns whether a directory is a step that this format wrote to its end."""
    return (path / (_COMMIT if is_remote(path) else _SEAL)).exists()


def _is_step(path: Path) -> bool:
    """Returns whether it is whole, of an older format, or missing only its seal."""
    if is_whole(path) or is_remote(path) or path.suffix:
        return is_whole(path)
    return b'"format"' in (mark(path) or b"") or (path / _MANIFEST).exists()


def mark(path: Path) -> bytes | None:
    """Returns bytes that differ between a step and a later save of the same number."""
    with contextlib.suppress(OSError):
        return (path / _FACTS).read_bytes()  # the time of the save is among them


def read_facts(path: Path) -> dict[str, Any]:
    """Returns the facts about a step that its save stored through Orbax."""
    if (path / _MANIFEST).exists():
        msg = f"{path} has an older format, which commit bb727a3 of meshlayout reads. "
        msg += "There, write ml.checkpoint.save_safetensors(file, checkpointer."
        msg += "restore_numpy()); here, ml.checkpoint.load_safetensors(file, state)."
        raise CheckpointError(msg)
    try:
        facts = json.loads((path / _FACTS).read_bytes())["custom_metadata"]
        if facts["format"] != 4:
            raise ValueError("it has another format")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path / _FACTS, error) from error
    return facts


def check(path: Path, *, verify: bool) -> None:
    """Compares this process's share of the files with the seal, or only their sizes."""
    file = path / _SEAL
    try:
        files = {} if is_remote(path) else json.loads(file.read_bytes())
        for name in _share({name: size for name, (size, _) in files.items()}):
            file, saved = path / name, files[name]
            found = _digest(file) if verify else [file.stat().st_size, saved[1]]
            if found != saved:
                raise ValueError(f"size and SHA-256 are {found}, and were {saved}")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(file, error) from error


def _damaged(path: Path, error: Exception) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{path} is not as it was saved: {error}. Restore another step, or `resume`, "
        "which takes the newest intact one; verify=False reads whatever is there."
    )


def clear(directory: Path, step: int) -> None:
    """Makes room for a step, or raises CheckpointError if something else is there."""
    path = directory / str(step)
    is_ours = is_whole(path) or not path.exists()
    if is_remote(path) and path.exists():
        # What a save or deletion that was cut off left has no other files at its top.
        files = {x.name for x in path.iterdir() if not x.is_dir()}
        is_ours = files <= {"", _COMMIT, _FACTS, "orbax.checkpoint"}
        if is_ours:
            delete(path)
    if not is_ours:
        msg = "it is not an intact step of this version. Remove it."
        raise CheckpointError(f"{path} is in the way: {msg}")


def digests(path: Path) -> dict[str, list[Any]]:
    """Returns sizes and hashes of this process's files, which become durable."""
    files = [x for x in path.rglob("*") if not x.is_dir()]
    names = _share({str(x.relative_to(path)): x.stat().st_size for x in files})
    for name in names:
        _sync(path / name)
    return {name: _digest(path / name) for name in names}


def publish(path: Path, files: Mapping[str, list[Any]]) -> None:
    """Seals `5.new` with the sizes and hashes of all its files, and names it `5`."""
    for folder in (path, *(x for x in path.rglob("*") if x.is_dir())):
        _sync(folder)
    temporary = path / f"{_SEAL}.tmp"
    temporary.write_text(json.dumps(files, separators=(",", ":")), encoding="utf-8")
    _sync(temporary)
    temporary.rename(path / _SEAL)
    _sync(path)
    _take_name(path)


def _take_name(new: Path) -> None:
    """Gives a sealed `5.new` its name, in the place of a `5` that is there."""
    path = new.with_suffix("")
    old = _hidden(path) if path.exists() else None
    new.rename(path)
    _sync(path.parent)
    if old is not None:
        delete(old)


def delete(path: Path) -> None:
    """Removes a step, which readers no longer find once its first file is gone."""
    try:
        if is_remote(path):
            (path / _COMMIT).unlink(missing_ok=True)
            path.rmtree()  # type: ignore[attr-defined]
        else:
            shutil.rmtree(_hidden(path))
    except OSError as error:  # the next save tries again
        logger.warning("%s is no longer needed, but remains: %s", path, error)


def recover(directory: Path) -> None:
    """Finishes what an interrupted save has begun; the lock must be held."""
    if is_remote(directory):
        return
    # Before any removal: what is being deleted may be the only other copy.
    for path in list(directory.glob("*.new")):
        if re.fullmatch(_STEP, path.name) and is_whole(path):
            _take_name(path)
    for path in list(directory.iterdir()):
        if re.fullmatch(_LEFTOVER, path.name):
            delete(path)


def _share(sizes: Mapping[str, int]) -> list[str]:
    """Returns the files of this process, about as many bytes as those of any other."""
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    return names[jax.process_index() :: jax.process_count()]


def _digest(path: Path) -> list[Any]:
    """Returns the size and the hash of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return [file.tell(), digest]


def _sync(path: Path) -> None:
    """Makes a file, or the names in a directory, outlast a power cut."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a mount that cannot do this
                raise
        finally:
            os.close(descriptor)


def _hidden(path: Path) -> Path:
    """Renames a directory that is to be removed."""
    name = f"{path.name.partition('.')[0]}.deleting-{time.time_ns()}"
    return path.rename(path.with_name(name))


# Who of this process has the lock of which directory.
_held: weakref.WeakValueDictionary[Path, Any] = weakref.WeakValueDictionary()


def lock(directory: Path, owner: Any) -> Callable[[], Any]:
    """Takes the lock of a directory, and returns a function that frees it.

    An owner in this process gives it up first. The system frees the lock, too, when
    this process ends, or closes any descriptor of the file: so nothing else opens it.
    """
    nobody = "%s cannot be locked (%s): nothing guards it from other runs"
    if is_remote(directory):
        logger.warning(nobody, directory, "it is in a store")
        return lambda: None
    key = directory.resolve()
    if key in _held:  # as of the trainer of a notebook's cell that runs again
        _held[key]._release()
    file = (directory / ".lock").open("w")
    try:
        import fcntl  # noqa: PLC0415 (Windows has none)

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        msg = f"another process saves to {directory}. End that one first."
        raise CheckpointError(msg) from None
    except (ImportError, OSError) as error:
        logger.warning(nobody, directory, error)
    _held[key] = owner

    def unlock() -> None:
        _held.pop(key, None)
        file.close()

    return weakref.finalize(owner, unlock)


def leave_token(directory: Path) -> str:
    """Writes a token for `find_token`; none if one process, or a store, needs none."""
    if jax.process_count() == 1 or is_remote(directory):
        return ""
    token = secrets.token_hex(8)
    (directory / _TOKEN).write_text(token)
    return token


def find_token(directory: Path, token: str) -> None:
    """Raises CheckpointError unless the token of process 0 appears on this process."""
    end_s, file = time.monotonic() + _SHARED_S, directory / _TOKEN
    while token and not (file.exists() and file.read_text() == token):
        if time.monotonic() > end_s:
            who = f"process {jax.process_index()} and process 0"
            msg = f"{who} do not share the directory {directory}: all of them must."
            raise CheckpointError(msg)
        time.sleep(0.02)
