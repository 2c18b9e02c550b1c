"""Who may write to a directory: one process, as long as its lease is renewed.

Two runs that save to one directory would delete each other's steps. So whoever saves
first leaves a note there, `.owner-<id>.json`, and removes it when it is closed or ends.
All others may read, and get an error when they save. The note of a dead process is
ignored. On the same machine the system knows whether the process is alive, and after a
reboot it is not; from other machines a note counts for ten minutes, and the owner
renews it every minute. A note from far in the future counts as little as an old one.

No lock works on all file systems and object stores. So each process writes a note under
a unique name and then looks for others: of two that start at the same moment at least
one sees the other, and withdraws.
"""

import contextlib
import json
import math
import os
import pathlib
import random
import re
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace

from meshlayout.checkpoint import files
from meshlayout.checkpoint.store import AnyPath, StoreError
from meshlayout.errors import CheckpointError


_NOTE = re.compile(r"\.owner-([0-9a-f]{8})\.json")
_PART = re.compile(r"\.\.owner-[0-9a-f]{8}\.json-[0-9a-f]{8}")

# A store may fail for minutes, and clocks of machines differ by seconds: several
# renewals have to be missed before an owner counts as dead.
_RENEWED_EVERY_S = 60.0
_DEAD_AFTER_S = 600.0

# How long a process waits for a store at exit; a note that stays behind soon expires.
_EXIT_WAITS_S = 5.0

# How often two processes that start together withdraw and try again, after random
# pauses, until one of them is first.
_ROUNDS = 6

# The leases of this process, by directory.
_leases: dict[str, "Lease"] = {}

# Reentrant, as `renew` holds it while it ends a lease.
_lock = threading.RLock()


def _leave_to_parent() -> None:
    """Forgets the leases in a forked child: they are its parent's.

    The lock is a new one, since a thread of the parent may have held the old one, which
    nobody in the child would release. `test_a_forked_child_leaves_saves_to_its_parent`
    notices.
    """
    global _lock
    _leases.clear()
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


@dataclass(frozen=True)
class Owner:
    """The process that wrote a note.

    Attributes:
        host: The name of the machine.
        boot: An id that changes when the machine, or the container, restarts.
        namespace: The namespace of its process id; containers have their own.
        pid: The process id.
        started: When the process started, in the system's clock ticks: ids are reused.
        renewed_at: Seconds since the epoch when the note was written.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: str | None
    renewed_at: float

    @classmethod
    def of_this_process(cls) -> "Owner":
        """Returns this process as an owner, renewed now."""
        namespace = pathlib.Path("/proc/self/ns/pid")
        return cls(
            socket.gethostname(),
            _system_text("/proc/sys/kernel/random/boot_id"),
            str(namespace.stat().st_ino) if namespace.exists() else "",
            os.getpid(),
            _start_time(os.getpid()),
            time.time(),
        )

    @classmethod
    def read(cls, note: AnyPath) -> "Owner | None":
        """Returns the owner that a note names; None if it is missing or damaged."""
        try:
            owner = cls(**json.loads(note.read_bytes()))
            # Not `in range(...)`, which compares every number with a non-integer.
            is_pid = type(owner.pid) is int and 0 < owner.pid < 2**31
            is_whole = is_pid and math.isfinite(owner.renewed_at)
        except StoreError:
            raise
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        return owner if is_whole else None

    def is_alive(self) -> bool:
        """Returns whether the process that wrote the note still runs."""
        own = Owner.of_this_process()
        if self.host == own.host and self.boot != own.boot:
            return False  # the machine has restarted since
        if not self.is_visible():
            return abs(own.renewed_at - self.renewed_at) < _DEAD_AFTER_S
        return _is_running(self.pid) and _start_time(self.pid) == self.started

    def is_visible(self) -> bool:
        """Returns whether the system here knows the process, dead or alive."""
        own = Owner.of_this_process()
        return (self.host, self.namespace) == (own.host, own.namespace)

    def is_this_process(self) -> bool:
        """Returns whether this process wrote the note.

        Two containers may share a host name, and each has a process 1.
        """
        own = Owner.of_this_process()
        return replace(self, renewed_at=own.renewed_at) == own


class Lease:
    """This process's right to write to a directory; shared by its checkpointers.

    Attributes:
        id: Eight hex digits, which also mark the files written under the lease.
    """

    def __init__(self, directory: AnyPath) -> None:
        self.directory = directory
        self.id = uuid.uuid4().hex[:8]
        self._note = directory / f".owner-{self.id}.json"
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        self._is_over = threading.Event()

    @classmethod
    def hold(cls, directory: AnyPath, user: object) -> "Lease":
        """Returns the lease of a directory, for an object that will write to it.

        Args:
            directory: The directory of all steps.
            user: The object; the lease ends when all users have released it, or have
                been garbage collected.

        Raises:
            CheckpointError: If another living process has it; names the process.
        """
        with _lock:
            lease = _leases.get(str(directory))
            # A note that is gone was removed by a process that took this one for dead,
            # after a long pause: ask again, as that process may save here now.
            if lease is None or not lease._note.exists():
                lease = cls(directory)
                directory.mkdir(parents=True, exist_ok=True)
                lease.take()
                _leases[str(directory)] = lease
                name = "checkpoint-lease"
                threading.Thread(target=lease.renew, name=name, daemon=True).start()
            lease.users.add(user)
            return lease

    @classmethod
    def release(cls, directory: AnyPath, user: object) -> None:
        """Ends the lease if this was its last user."""
        lease = _leases.get(str(directory))
        if lease is not None:
            lease.users.discard(user)
            lease.end_if_unused()

    def take(self) -> None:
        """Writes an owner's note, and checks for other owners before and after it.

        Before, so that a living owner is never disturbed; after, for processes that
        start at the same moment.

        Raises:
            CheckpointError: If another process has the directory.
        """
        for _ in range(_ROUNDS):
            self._refuse_if_owned()
            self._write()
            if not living(self.directory).keys() - {self.id}:
                return
            files.remove(self._note)
            time.sleep(random.uniform(0.02, 0.3))
        self._refuse_if_owned()
        msg = (
            f"{self.directory}: another process is starting to save there, too. Try "
            "again."
        )
        raise CheckpointError(msg)

    def _refuse_if_owned(self) -> None:
        for owner in living(self.directory).values():
            msg = (
                f"{self.directory} belongs to process {owner.pid} on {owner.host}, "
                "which is alive and saves there. One run at a time may save to a "
                "directory: use another directory for this one, or end that process"
            )
            if not owner.is_visible():
                left_s = _DEAD_AFTER_S - abs(time.time() - owner.renewed_at)
                msg += f". If it has died, its lease ends in {left_s / 60:.0f} minutes"
            raise CheckpointError(msg)

    def _write(self) -> None:
        owner = asdict(Owner.of_this_process())
        files.write_whole(self._note, json.dumps(owner).encode())

    def renew(self) -> None:
        """Renews the note until the lease ends; runs in a thread."""
        while not self._is_over.wait(_RENEWED_EVERY_S):
            # An error now may be over in a minute. A note that was removed is not
            # written again: the next save takes a new lease, or is refused.
            with contextlib.suppress(OSError, CheckpointError), _lock:
                if not self.end_if_unused() and self._note.exists():
                    self._write()

    def end_if_unused(self) -> bool:
        """Ends the lease if it has no users; returns whether it did."""
        with _lock:
            if not self.users:
                self.end()
            return not self.users

    def end(self) -> None:
        """Ends the lease, and removes its note."""
        self._is_over.set()
        _leases.pop(str(self.directory), None)
        with contextlib.suppress(OSError, CheckpointError):
            files.remove(self._note)


def release_all() -> None:
    """Ends all leases of this process, at exit."""
    for lease in list(_leases.values()):
        # In a daemon thread: a store that no longer answers must not keep the process.
        thread = threading.Thread(target=lease.end, daemon=True)
        thread.start()
        thread.join(_EXIT_WAITS_S)


def living(directory: AnyPath) -> dict[str, Owner]:
    """Returns the owners that are alive, by the ids of their leases."""
    owners: dict[str, Owner] = {}
    with _lock:  # not between writing the note of a new lease and registering it
        own_ids = {lease.id for lease in _leases.values()}
    for name in files.names_in(directory):
        note = _NOTE.fullmatch(name)
        owner = None if note is None else Owner.read(directory / name)
        if note is None or owner is None or not owner.is_alive():
            continue
        # A note of this process without a lease is left over from a failed `take`.
        if not owner.is_this_process() or note[1] in own_ids:
            owners[note[1]] = owner
    return owners


def is_own(lease_id: str | None) -> bool:
    """Returns whether a lease is held by this process."""
    return any(lease.id == lease_id for lease in list(_leases.values()))


def is_dead_note(name: str, living_ids: Collection[str]) -> bool:
    """Returns whether a file is the note, or part of a note, of a dead owner."""
    note = _NOTE.fullmatch(name)
    if note is None:
        # A part has a moment to live in a writer: remove it only if there is none.
        return _PART.fullmatch(name) is not None and not living_ids
    return note[1] not in living_ids


# Processes, according to the system.


def _system_text(path: str) -> str:
    try:
        return pathlib.Path(path).read_text().strip()
    except OSError:
        return ""


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _start_time(pid: int) -> str | None:
    """Returns when a process started; None if it has ended, or that is unknown."""
    # The second field is a name in parentheses, which may contain spaces; Z is a
    # process that has ended and whose parent has not asked for its status.
    fields = _system_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if fields and fields[0] != "Z" else None
