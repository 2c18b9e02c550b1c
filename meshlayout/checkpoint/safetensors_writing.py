"""Writes states as safetensors files, never more than one shard in memory."""

import functools
import logging
import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from meshlayout import _render
from meshlayout.checkpoint.files import sync_directory
from meshlayout.checkpoint.processes import Channel, next_number
from meshlayout.checkpoint.safetensors import SUFFIX
from meshlayout.checkpoint.safetensors_planning import Part, Plan, make_plan
from meshlayout.errors import CheckpointError


logger = logging.getLogger("meshlayout.checkpoint")


def save_safetensors(
    path: Any,
    state: Any,
    *,
    max_shard_bytes: int = 5 * 2**30,
    rename: Mapping[str, str] | None = None,
    transpose: Mapping[str, Sequence[int]] | None = None,
    separator: str = ".",
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> list[Path]:
    r"""Writes the arrays of a state to safetensors files.

    The files appear under their names when all of them are complete, and the index
    last. Each device's shards are written one after the other, so that no array is
    ever whole on a device or in memory. On several processes all of them call this,
    with a path on a disk that they share; each writes its own shards.

    Args:
        path: A file name that ends in `.safetensors`, or a directory for a
            `model.safetensors`.
        state: Any tree of arrays.
        max_shard_bytes: The most bytes of arrays in one file, unless one array is
            larger. More are written as `model-00001-of-00002.safetensors`, ... with
            an index `model.safetensors.index.json`.
        rename: `{pattern: replacement}`, applied to the paths in the state as by
            `re.sub`. A path may be changed by one pattern only.
        transpose: `{pattern: permutation}`, by path in the state: the saved array is
            `np.transpose(array, permutation)`.
        separator: What stands between the keys in the names.
        metadata: Texts to write beside, by name.
        overwrite: Whether files of that name may be replaced. One file is replaced
            at once; of several, a kill in between leaves none that can be loaded.

    Returns:
        The files that were written, the index last.

    Raises:
        CheckpointError: If a leaf is no array or a PRNG key, a name is not
            unambiguous, or the files cannot be written; what was there before is
            there still.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     files = save_safetensors(directory, {"w": np.ones((4, 4))})
        ...     [file.name for file in files]
        ['model.safetensors']
    """
    begin = time.perf_counter()
    texts = _check_metadata(metadata)
    plan = make_plan(
        path,
        state,
        most=max_shard_bytes,
        rename=rename,
        transpose=transpose,
        separator=separator,
    )
    channel = Channel("safetensors", next_number())
    check = functools.partial(_check_free, plan, overwrite=overwrite)
    _together(channel, check, first_only=True)
    try:
        for part in plan.parts:
            make = functools.partial(_allocate, part, texts)
            _together(channel, make, first_only=True)
            _together(channel, functools.partial(_fill, part))
        _together(channel, functools.partial(_publish, plan), first_only=True)
    finally:
        if jax.process_index() == 0:
            for part in plan.parts:
                _take_away(part.temporary)
    logger.info(
        "saved %d arrays, %s, to %s in %.1f s",
        sum(len(part.arrays) for part in plan.parts),
        _render.bytes_text(sum(part.nbytes for part in plan.parts)),
        plan.path,
        time.perf_counter() - begin,
    )
    return plan.files


def _check_metadata(metadata: Any) -> dict[str, str]:
    texts = metadata or {}
    if not isinstance(texts, Mapping) or not all(
        isinstance(text, str) for pair in texts.items() for text in pair
    ):
        msg = f"metadata= is texts by name, and got {metadata!r}."
        raise CheckpointError(msg)
    return dict(texts)


def _take_away(path: Path) -> None:
    """Removes what is not complete; where that fails, the save has failed before."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)


def _together(
    channel: Channel, act: Callable[[], None], *, first_only: bool = False
) -> None:
    """Does something on every process or the first one; if one fails, all raise."""
    problem: CheckpointError | None = None
    try:
        if jax.process_index() == 0 or not first_only:
            act()
    except CheckpointError as error:
        problem = error
    except OSError as error:
        msg = f"the safetensors files cannot be written: {error}."
        problem = CheckpointError(msg)
    said = channel.exchange("" if problem is None else str(problem))
    if problem is not None:
        raise problem
    for index, text in enumerate(said):
        if text:
            msg = f"process {index}: {text}"
            raise CheckpointError(msg)


def _old_files(plan: Plan) -> list[Path]:
    """Returns what is there of an earlier save under this name."""
    stem = plan.path.name.removesuffix(SUFFIX)
    shards = plan.path.parent.glob(f"{_literal(stem)}-?????-of-?????{SUFFIX}")
    return [one for one in [plan.index, plan.path, *sorted(shards)] if one.exists()]


def _literal(text: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in text)


def _check_free(plan: Plan, *, overwrite: bool) -> None:
    plan.path.parent.mkdir(parents=True, exist_ok=True)
    old = _old_files(plan)
    if old and not overwrite:
        msg = f"{old[0]} exists. Give another name, or overwrite=True."
        raise CheckpointError(msg)


def _allocate(part: Part, metadata: Mapping[str, str]) -> None:
    """Makes the file, with its header and with room on the disk for all arrays."""
    header = part.header(metadata)
    with part.temporary.open("wb") as file:
        file.write(header)
        file.flush()
        if part.nbytes:
            _reserve(file, len(header), part.nbytes)
        os.fsync(file.fileno())


def _reserve(file: BinaryIO, begin: int, size: int) -> None:
    # A full disk is found out here: in mapped memory it would end the process.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), begin, size)
        return
    zeros = bytes(1 << 20)
    while size:
        size -= file.write(zeros[:size])


def _fill(part: Part) -> None:
    """Writes what this process has of a file's arrays."""
    with part.temporary.open("r+b") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        at = 8 + size
        for one in part.arrays:
            if one.nbytes:
                whole = np.memmap(file, one.dtype, "r+", at, one.shape or (1,))
                one.write(whole.reshape(one.shape))
                whole.flush()
            at += one.nbytes
        os.fsync(file.fileno())


def _publish(plan: Plan) -> None:
    """Gives the files their names; a kill in between leaves no complete mixture."""
    old = set(_old_files(plan))
    if plan.is_sharded:
        # Without its index an old set is not one, and cannot mix with the new one.
        plan.index.unlink(missing_ok=True)
    for part in plan.parts:
        part.temporary.replace(part.path)
    if plan.is_sharded:
        temporary = plan.index.with_name(f".{plan.index.name}.incomplete")
        with temporary.open("w") as file:
            file.write(plan.index_text())
            file.flush()
            os.fsync(file.fileno())
        sync_directory(plan.path.parent)
        temporary.replace(plan.index)
    for one in sorted(old - set(plan.files), key=lambda one: one != plan.index):
        one.unlink(missing_ok=True)
    sync_directory(plan.path.parent)
