"""Attempts to save a step: their names, who is at work on them, and what is left over.

An attempt writes its files beside those of an earlier save of the same step, and the
manifest, which is replaced in one piece, then names the new ones. Whatever no manifest
names is left over from a process that died, unless its writer is alive: it has left a
note with its machine, process number and start time. On the same machine the system
tells whether that process lives; a writer on another machine counts as alive for a day.
"""

import json
import logging
import os
import pathlib
import re
import socket
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from meshlayout.checkpoint import files, manifest, orbax
from meshlayout.checkpoint.store import StoreError
from meshlayout.errors import CheckpointError


logger = logging.getLogger("meshlayout.checkpoint")

_NOTE = ".writer-"
_DELETING = ".deleting-"
_FAR_AWAY_S = 24 * 3600.0

# The names that attempts use in a step's directory, and Orbax and `write_whole` for
# them. Whatever else is there is somebody else's.
_OWN = re.compile(
    r"(state(-\d+)?(\..+)?|data(-\d+)?\.json|\.writer-\d+\.json"
    r"|\.(manifest|data(-\d+)?|\.writer-\d+)\.json-[0-9a-f]{8})"
)
_FILES = re.compile(r"state|data")
_NOTE_OR_PART = re.compile(r"\.?\.writer-")

# The attempts that this process is at work on.
_at_work: set[str] = set()


@dataclass(frozen=True)
class Attempt:
    """Where one attempt to save a step writes.

    Attributes:
        folder: The step's directory.
        number: How many attempts left their files there before.
    """

    folder: Any
    number: int

    @classmethod
    def begin(cls, folder: Any) -> "Attempt":
        """Makes the step's directory, and leaves a note of who is at work there.

        Args:
            folder: The step's directory.

        Raises:
            CheckpointError: If somebody else's files are in it.
        """
        files.make_directory(folder)
        names = files.names_in(folder)
        if not _is_ours(folder, names):
            msg = (
                f"{folder} holds {', '.join(sorted(names)[:3])}, which no Checkpointer "
                "wrote. Give a directory of its own, or remove that one"
            )
            raise CheckpointError(msg)
        number = 0
        while any(cls(folder, number).may_own(name) for name in names):
            number += 1
        attempt = cls(folder, number)
        _at_work.add(str(attempt.note))
        files.write_whole(attempt.note, json.dumps(_writer()).encode())
        return attempt

    @property
    def arrays(self) -> str:
        """The name of the directory for the arrays."""
        return f"state-{self.number}" if self.number else "state"

    @property
    def data(self) -> str:
        """The name of the file for the input iterator's state."""
        return f"data-{self.number}.json" if self.number else "data.json"

    @property
    def note(self) -> Any:
        """The file that tells who is at work."""
        return self.folder / f"{_NOTE}{self.number}.json"

    def may_own(self, name: str) -> bool:
        """Tells whether a name is one that the attempt uses, or Orbax for it."""
        own = (self.arrays, self.data, self.note.name)
        return name in own or name.startswith(f"{self.arrays}.")

    def end(self) -> None:
        """Takes away what no manifest names, and the note."""
        _at_work.discard(str(self.note))
        clean_step(self.folder)
        files.remove(self.note)


def clean(directory: Any) -> None:
    """Removes what processes that died have left over.

    Args:
        directory: The directory of all steps.
    """
    for name in sorted(files.names_in(directory)):
        if name.startswith(_DELETING):
            files.remove(directory / name)
        elif is_step(name):
            clean_step(directory / name)


def clean_step(folder: Any) -> None:
    """Removes what no manifest names from a step's directory, if no writer lives.

    What is not of a checkpointer stays, and so does what has neither a manifest nor a
    note: no attempt leaves that behind.

    Args:
        folder: The step's directory.
    """
    if is_begun(folder):
        return
    names = files.names_in(folder)
    named: set[str | None] = set()
    if manifest.NAME in names:
        try:
            content = (folder / manifest.NAME).read_bytes()
            found = manifest.Manifest.from_bytes(content, "")
        except StoreError:
            raise
        except (CheckpointError, OSError):
            return  # it may still name something; whoever restores it is told
        named = {manifest.NAME, found.arrays, found.data}
    elif names and not any(map(_NOTE_OR_PART.match, names)):
        return
    left = {name for name in names - named if _OWN.fullmatch(name)}
    # The notes go last: without one, a directory may be somebody else's.
    for name in sorted(left, key=lambda one: (one.startswith(_NOTE), one)):
        files.remove(folder / name)
    some = sorted(name for name in left if not name.startswith(_NOTE))
    if some:
        what = ", ".join(some)
        logger.info("removed %s of an unfinished save from %s", what, folder)
    if names == left:
        files.remove(folder)


def _is_ours(folder: Any, names: Collection[str]) -> bool:
    """Tells whether a step's directory is new, or one that an attempt wrote to."""
    own = list(filter(_OWN.fullmatch, names))
    return (
        not names
        or manifest.NAME in names
        or any(map(_NOTE_OR_PART.match, own))
        or any(orbax.is_written(folder / name) for name in own)
    )


def is_begun(folder: Any) -> bool:
    """Tells whether a writer who lives is at work on a step.

    Args:
        folder: The step's directory.
    """
    notes = [name for name in files.names_in(folder) if name.startswith(_NOTE)]
    return any(_is_alive(folder / name) for name in notes)


def is_left_over(folder: Any) -> bool:
    """Tells whether a step has files, but no manifest and nobody who writes one.

    Args:
        folder: The step's directory.
    """
    names = files.names_in(folder)
    if manifest.NAME in names or not any(map(_FILES.match, names)):
        return False
    notes = [folder / name for name in names if name.startswith(_NOTE)]
    # A note that is gone by now was of a writer who has come to an end.
    if any(_is_alive(note) or not note.exists() for note in notes):
        return False
    return folder.is_dir() and not (folder / manifest.NAME).exists()


def delete(folder: Any) -> None:
    """Removes a step: first, in one operation, it stops being one.

    Args:
        folder: The step's directory.
    """
    if files.is_remote(folder):
        note = f"{_NOTE}0.json"
        files.write_whole(folder / note, b"{}")  # of nobody who lives
        files.remove(folder / manifest.NAME)
        # The note goes last, so that whoever finds the rest knows whose it is.
        for one in files.names_in(folder) - {note}:
            files.remove(folder / one)
        files.remove(folder / note)
        files.remove(folder)
        return
    name = f"{_DELETING}{folder.name}-{uuid.uuid4().hex[:8]}"
    files.remove(folder.rename(folder.with_name(name)))


def is_step(name: str) -> bool:
    """Tells whether a name is one of a step's directory."""
    return name.isascii() and name.isdecimal() and str(int(name)) == name


# Who is at work.


def _writer() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "machine": _machine(),
        "pid": pid,
        "started": _started(pid),
        "time": time.time(),
    }


def _is_alive(note: Any) -> bool:
    try:
        content = note.read_bytes()
    except OSError:
        return False  # gone meanwhile
    try:
        writer = json.loads(content)
        there, pid, since = writer["machine"], writer["pid"], writer["time"]
    except (ValueError, KeyError, TypeError):
        return False  # not whole: written by nobody who lives
    if there != _machine():
        return time.time() - since < _FAR_AWAY_S
    if pid == os.getpid():
        return str(note) in _at_work
    return _lives(pid) and _started(pid) == writer["started"]


def _machine() -> str:
    """Returns what process numbers are unique in."""
    facts = [socket.gethostname()]
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    names = pathlib.Path("/proc/self/ns/pid")
    if boot.exists():
        facts += [boot.read_text().strip(), str(names.stat().st_ino)]
    return " ".join(facts)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _started(pid: int) -> str | None:
    """Returns when a process started, where the system tells; else None."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is a name in parentheses, which may hold spaces.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]
