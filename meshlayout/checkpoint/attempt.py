"""One attempt to save a step: where it writes, how it commits, how it is cleaned up.

On a disk an attempt writes to a hidden directory, `.saving-<step>-<lease>-<random>`,
which is renamed to the step's number once everything in it is durable. A step that is
saved again is first renamed to `.replaced-...`; a process that dies between the two
renames leaves both, and the next one to open the directory completes them. A deleted
step is renamed too, to `.deleting-...`, so that it stops being a step atomically.

Nothing can be renamed in an object store. There an attempt writes next to the files of
an earlier save of the step; the manifest, which is replaced atomically, names the new
files, and a note, `.saving-...`, names the owner of the rest.

Files with the lease id of a living owner are never touched, and neither are files that
no checkpointer wrote. `test_checkpoint_kills` kills a process at every file operation
of a save, and `test_checkpoint_faults` lets each of them fail.
"""

import contextlib
import logging
import re
import uuid
from collections.abc import Collection
from typing import Any

from meshlayout.checkpoint import files, manifest, orbax
from meshlayout.checkpoint.lease import Lease, is_dead_note, is_own, living
from meshlayout.checkpoint.store import AnyPath, StoreError
from meshlayout.errors import CheckpointError


logger = logging.getLogger("meshlayout.checkpoint")

_HIDDEN = re.compile(
    r"\.(?P<kind>saving|replaced|deleting)-(?P<step>\d+)-(?:(?P<lease>\w{8})-)?\w{8}"
)

# Names that prove that a checkpointer, or Orbax on its behalf, wrote a directory.
_MARK = re.compile(
    r"\.(saving|deleting)-[\w-]+|\.writer-\d+\.json|\.[\w.-]+\.json-[0-9a-f]{8}"
    r"|state(-\w+)?\.orbax-checkpoint-tmp.*"
)
# Names that a user may choose, too: ours only next to a mark or a manifest.
_CONTENT = re.compile(r"manifest\.json|state(-\w+)?|data(-\w+)?\.json")

# Hidden names in use by a running save of this process. The lease alone cannot tell
# them from leftovers: a save that failed earlier left files under the same lease.
_at_work: set[str] = set()


class NotDurableError(Exception):
    """A step is in place, but a power cut may still undo that."""


class Attempt:
    """Where one attempt to save a step writes; on a disk, a hidden directory.

    Attributes:
        folder: The directory to write to, the manifest last.
        arrays: The name of the directory in it for the arrays.
        data: The name of the file in it for the input iterator's state.

    Raises:
        CheckpointError: If the step's directory holds files of another program.
    """

    folder: AnyPath
    arrays: str = "state"
    data: str = "data.json"

    def __init__(self, directory: AnyPath, step: int, lease: Lease) -> None:
        self._final = directory / str(step)
        self._lease = lease
        self._hidden = _hidden(directory, "saving", step, lease)
        _check_ours(self._final)
        _at_work.add(self._hidden.name)
        self._make_place()

    @staticmethod
    def begin(directory: AnyPath, step: int, lease: Lease) -> "Attempt":
        """Creates the place to write to, on a disk or in a store."""
        kind = _StoreAttempt if files.is_remote(directory) else Attempt
        return kind(directory, step, lease)

    def _make_place(self) -> None:
        self.folder = self._hidden
        self.folder.mkdir(parents=True)

    def commit(self, content: bytes) -> None:
        """Makes the step exist: writes its manifest, after all other files.

        Raises:
            NotDurableError: If the step exists but may not survive a power cut.
        """
        # Durable before it is visible: a rename may reach the disk before file contents
        # do, and a power cut would leave a step of empty files.
        files.sync_tree(self.folder)
        files.write_whole(self.folder / manifest.NAME, content)
        # Again: a user may have put files there while this attempt was writing.
        _check_ours(self._final)
        if self._final.exists():
            self._replace(self._final)
            return
        self.folder.rename(self._final)
        self._sync()

    def end(self) -> None:
        """Removes temporary files; if the step was not committed, all of its files."""
        _at_work.discard(self._hidden.name)
        files.remove(self._hidden)

    def _replace(self, final: AnyPath) -> None:
        # No file system can exchange two directories portably. Between the two renames
        # the step has no name; `_finish_replacing` gives it one after a crash.
        old = _hidden(final.parent, "replaced", int(final.name), self._lease)
        _at_work.add(old.name)
        try:
            final.rename(old)
            try:
                self.folder.rename(final)
            except BaseException:
                old.rename(final)
                raise
            self._sync()
            self._remove_replaced(old, final)
        finally:
            _at_work.discard(old.name)

    def _sync(self) -> None:
        try:
            files.sync_directory(self._final.parent)
        except OSError as error:
            raise NotDurableError(str(error)) from error

    def _remove_replaced(self, old: AnyPath, final: AnyPath) -> None:
        # The step is saved, so an error here is none of the save; the next process that
        # opens the directory removes what is left.
        with contextlib.suppress(OSError):
            for name in files.names_in(old):
                if not _MARK.fullmatch(name) and not _CONTENT.fullmatch(name):
                    (old / name).rename(final / name)  # a user's file stays in the step
            files.remove(old)


class _StoreAttempt(Attempt):
    """An attempt that writes next to an earlier save's files, and leaves a note."""

    def _make_place(self) -> None:
        self.folder = self._final
        self._note = self.folder / self._hidden.name
        taken = files.names_in(self.folder)
        if any(name.startswith(("state", "data")) for name in taken):
            # An earlier save's files must stay as they are until the new manifest.
            number = self._hidden.name[-8:]
            self.arrays, self.data = f"state-{number}", f"data-{number}.json"
        # First of all: files without a note would belong to nobody.
        files.write_whole(self._note, b"{}")

    def commit(self, content: bytes) -> None:
        files.write_whole(self.folder / manifest.NAME, content)

    def end(self) -> None:
        _at_work.discard(self._note.name)
        _clean_step_in_store(self.folder, living(self.folder.parent))
        files.remove(self._note)


def delete(folder: AnyPath, lease: Lease) -> None:
    """Removes a step; the first operation atomically ends its being listed."""
    hidden = _hidden(folder.parent, "deleting", int(folder.name), lease)
    _at_work.add(hidden.name)
    try:
        if not files.is_remote(folder):
            files.remove(folder.rename(hidden))
            return
        note = folder / hidden.name
        files.write_whole(note, b"{}")
        files.remove(folder / manifest.NAME)
        # The note goes last, so that files left over by a kill always have an owner.
        for name in files.names_in(folder) - {note.name}:
            files.remove(folder / name)
        files.remove(note)
        files.remove(folder)
    finally:
        _at_work.discard(hidden.name)


# Leftovers.


def clean(directory: AnyPath) -> None:
    """Removes the leftovers of dead processes, or finishes what they began."""
    # Listed before the owners are read: otherwise a process could start in between,
    # and its new files would look like leftovers.
    names = files.names_in(directory)
    owners = living(directory)
    leftovers = [name for name in sorted(names) if _is_leftover(name, owners)]
    _finish_replacing(directory, leftovers)
    for name in leftovers:
        files.remove(directory / name)
    if leftovers:
        what = ", ".join(leftovers)
        logger.info("removed %s of unfinished saves from %s", what, directory)
    for name in filter(files.is_step, names):
        folder = directory / name
        if files.is_remote(folder):
            _clean_step_in_store(folder, owners)
        # On a disk a step is renamed when whole; with marks alone it is Orbax's rest.
        elif all(map(_MARK.fullmatch, files.names_in(folder))) and folder.is_dir():
            files.remove(folder)
    # Notes last: they say whose the files above were.
    for name in names:
        if is_dead_note(name, owners):
            files.remove(directory / name)


def _is_leftover(name: str, living_ids: Collection[str]) -> bool:
    hidden = _HIDDEN.fullmatch(name)
    if hidden is None or name in _at_work:
        return False
    # Of this process's own files, those in `_at_work` are in use, and only those.
    return hidden["lease"] not in living_ids or is_own(hidden["lease"])


def _finish_replacing(directory: AnyPath, leftovers: Collection[str]) -> None:
    """Restores the names of steps that a process was replacing when it died."""
    hidden = {name: match for name in leftovers if (match := _HIDDEN.fullmatch(name))}
    for old, match in hidden.items():
        final = directory / match["step"]
        if match["kind"] != "replaced" or final.exists():
            continue
        # The new version if it is whole, which its manifest shows, else the old one.
        new = [
            name
            for name, other in hidden.items()
            if (other["kind"], other["step"]) == ("saving", match["step"])
            and (directory / name / manifest.NAME).exists()
        ]
        (directory / next(iter(new), old)).rename(final)


def _clean_step_in_store(folder: AnyPath, living_ids: Collection[str]) -> None:
    """Removes files that the manifest does not name from a step without a writer.

    Files that are not a checkpointer's stay, and so does a directory with neither a
    manifest nor a note: no attempt leaves one behind.
    """
    names = files.names_in(folder)
    notes = {name for name in names if _MARK.fullmatch(name)}
    if any(
        _HIDDEN.fullmatch(name) and not _is_leftover(name, living_ids) for name in notes
    ):
        return
    named: set[str | None] = set()
    if manifest.NAME in names:
        try:
            content = (folder / manifest.NAME).read_bytes()
            saved = manifest.Manifest.from_bytes(content, "")
        except StoreError:
            raise
        except (CheckpointError, OSError):
            # A damaged manifest may still name files, and a restore reports the damage:
            # without it nothing can be said of them.
            return
        named = {manifest.NAME, saved.arrays, saved.data}
    elif not notes:
        return
    content = {name for name in names - named - notes if _CONTENT.fullmatch(name)}
    for name in [*sorted(content), *sorted(notes)]:
        files.remove(folder / name)
    if content:
        what = ", ".join(sorted(content))
        logger.info("removed %s of an unfinished save from %s", what, folder)
    if names == content | notes:
        files.remove(folder)


def is_unfinished(folder: AnyPath) -> bool:
    """Returns whether a step has files but no manifest, and is not being saved."""
    names = files.names_in(folder)
    if manifest.NAME in names or not any(map(_CONTENT.fullmatch, names)):
        return False
    notes = list(filter(_HIDDEN.fullmatch, names))
    owners = living(folder.parent) if notes else {}
    if not all(_is_leftover(name, owners) for name in notes):
        return False
    # Again: the step may have been committed, or deleted, since it was listed.
    return folder.is_dir() and not (folder / manifest.NAME).exists()


def _check_ours(folder: AnyPath) -> None:
    """Raises if a step's directory holds files that no checkpointer wrote."""
    names = files.names_in(folder)
    marks = {name for name in names if _MARK.fullmatch(name)}
    content = {name for name in names if _CONTENT.fullmatch(name)}
    what = f"holds {', '.join(sorted(names)[:3])}"
    is_proven = not names or marks or manifest.NAME in names
    if not is_proven:  # Orbax finished and removed its marks; no manifest was written
        is_proven = any((folder / name / orbax.ITEM).is_dir() for name in content)
    if manifest.NAME in names or (is_proven and names == marks | content):
        if files.is_remote(folder) or folder.is_dir() or not folder.exists():
            return
        what = "is a file, not a directory"
    msg = (
        f"{folder} {what}, which no Checkpointer wrote. Save in another directory, or "
        "remove that one"
    )
    raise CheckpointError(msg)


def _hidden(directory: AnyPath, kind: str, step: int, lease: Lease) -> Any:
    return directory / f".{kind}-{step}-{lease.id}-{uuid.uuid4().hex[:8]}"
