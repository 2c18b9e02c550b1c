"""A step of a `Checkpointer` as a source to restore from, verified bit by bit.

As each slice is read, its part of the array's fingerprint is computed from the host's
copy, so that verifying reads nothing twice. With several processes none may have a
whole array: their sums are added up in one exchange after the reads.
"""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout import _render
from meshlayout.checkpoint import files, orbax
from meshlayout.checkpoint.difference import ArraySpec, is_number, key_dtype
from meshlayout.checkpoint.fingerprint import Sums, slice_sums, text_of, total
from meshlayout.checkpoint.manifest import Manifest, SavedLeaf
from meshlayout.checkpoint.orbax_arrays import ArrayReadError, Format, OrbaxArrays
from meshlayout.checkpoint.restore import READ_AHEAD_BYTES
from meshlayout.checkpoint.snapshot import PYTHON_TYPES
from meshlayout.checkpoint.store import REFUSALS, StoreError
from meshlayout.checkpoint.target import (
    Bounds,
    HostArray,
    Index,
    LeafRestore,
    bounds_of,
)
from meshlayout.errors import CheckpointError, DamagedCheckpointError


_WAY_OUT = (
    "Restore another step, or the newest intact one with fallback=True; verify=False "
    "reads whatever is there."
)

# Arrays of up to this size are read whole by each process, and sliced in memory: one
# request costs more than the bytes.
_WHOLE_BYTES = 2**18


class SavedStep:
    """The arrays of a manifest, to be read slice by slice; see `SavedArrays`."""

    is_foreign = False
    read_ahead_bytes = READ_AHEAD_BYTES

    def __init__(self, folder: Any, manifest: Manifest, *, verify: bool) -> None:
        self.name = f"step {manifest.step}"
        self.leaves = [_leaf(saved) for saved in manifest.leaves]
        self._folder, self._manifest, self._verify = folder, manifest, verify
        self._saved = {leaf.path: leaf for leaf in manifest.leaves}
        # By array: the slices read so far, and their sums.
        self._sums: dict[str, dict[Bounds, Sums]] = {}
        self._last_whole: tuple[str, Callable[[], HostArray]] | None = None
        # NumPy releases the GIL while it computes sums.
        self._threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1))

    def __enter__(self) -> "SavedStep":
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def start(self, leaf: ArraySpec, index: Index) -> Callable[[], HostArray]:
        """As for `SavedArrays`.

        Raises:
            DamagedCheckpointError: If the files are damaged.
        """
        saved = self._saved[leaf.path]
        if saved.array is None:
            value = np.zeros(leaf.host_shape, leaf.host_dtype)
            if is_number(leaf.dtype):
                value = np.asarray(_python_value(saved))
            return lambda: np.array(value[index])
        if saved.nbytes > _WHOLE_BYTES:
            return self._start(leaf, saved, index)
        # The slices of one leaf are requested one after another: keeping one is enough.
        if self._last_whole is None or self._last_whole[0] != leaf.path:
            whole = tuple(slice(0, size) for size in leaf.host_shape)
            self._last_whole = leaf.path, self._start(leaf, saved, whole)
        finish = self._last_whole[1]
        return lambda: np.array(finish()[index])

    def _start(
        self, leaf: ArraySpec, saved: SavedLeaf, index: Index
    ) -> Callable[[], HostArray]:
        """Starts reading a slice from the files, and computing its sums."""
        name, shape = str(saved.array), leaf.host_shape
        with self._unreadable():
            # The files say for themselves what they hold. If they disagree with the
            # manifest, a cast or a reshape would make plausible nonsense of them.
            stored_shape, stored = self._arrays.shape_and_dtype(name)
            is_wrong = stored.itemsize != leaf.host_dtype.itemsize
            if is_wrong or (stored_shape, stored.name) != (shape, saved.stored):
                why = f"array {name} has another shape or dtype than the manifest says"
                raise self._not_read(why)
            read = self._arrays.start(name, index)

        def finish() -> HostArray:
            part = read().view(leaf.host_dtype)
            if self._verify:
                sums = slice_sums(part, [dim.start for dim in index], shape)
                self._sums.setdefault(name, {})[bounds_of(index, shape)] = sums
            return part

        future = self._threads.submit(finish)

        def result() -> HostArray:
            with self._unreadable():
                return future.result()

        return result

    @functools.cached_property
    def _arrays(self) -> OrbaxArrays:
        directory = self._folder / str(self._manifest.arrays) / orbax.ITEM
        names = [leaf.array for leaf in self._manifest.leaves if leaf.array is not None]
        try:
            layout = Format.read(directory)
        except DamagedCheckpointError as error:
            raise self._not_read(str(error)) from error
        return OrbaxArrays(str(directory), layout, names)

    @contextlib.contextmanager
    def _unreadable(self) -> Iterator[None]:
        """Turns read errors into "damaged", or "out of reach" if the store refused."""
        try:
            yield
        except ArrayReadError as error:
            why = str(error)
            if files.is_remote(self._folder):
                # A refusal says nothing about the content, unless a file is missing or
                # has another size: that is damage, whatever the message.
                check_files(self._folder, self._manifest)
                if why.startswith(REFUSALS):
                    raise StoreError.of(self._folder, "read", why) from error
            raise self._not_read(why) from error

    def _not_read(self, why: str) -> DamagedCheckpointError:
        where = self._folder / str(self._manifest.arrays)
        msg = f"the arrays in {where} cannot be read: {why}. {_WAY_OUT}"
        return DamagedCheckpointError(msg)

    # Verifying.

    def partial_sums(
        self, restores: Sequence[LeafRestore]
    ) -> dict[str, dict[str, Sums]]:
        """Verifies the arrays of which this process has read every slice.

        Returns:
            For `check_sums`: the sums of arrays that this process has read in part, by
            array and by copy of the array.

        Raises:
            DamagedCheckpointError: If one of them is damaged.
        """
        shardings = {
            restore.saved.path: restore.sharding
            for restore in restores
            if restore.saved is not None
        }
        wrong: list[SavedLeaf] = []
        parts: dict[str, dict[str, Sums]] = {}
        for leaf in self.leaves:
            saved, shape = self._saved[leaf.path], leaf.host_shape
            sums = self._sums.get(str(saved.array))
            sharding = shardings.get(leaf.path)
            if sums is None:
                continue
            if sum(map(_num_elements, sums)) == math.prod(shape):
                if text_of(total(sums.values())) != saved.fingerprint:
                    wrong.append(saved)
            elif sharding is not None:
                parts[str(saved.array)] = _by_replica(sums, sharding, shape)
        if wrong:
            raise self._damaged(wrong)
        return parts

    def check_sums(
        self, partial_sums: Sequence[Mapping[str, Mapping[str, Sequence[int]]]]
    ) -> None:
        """Verifies the arrays that were read in parts, by several processes together.

        Args:
            partial_sums: What `partial_sums` returned on each process.

        Raises:
            DamagedCheckpointError: If one is damaged; on all processes.
        """
        replicas: dict[tuple[str, str], list[Sequence[int]]] = {}
        for parts in partial_sums:
            for name, by_replica in parts.items():
                for replica, sums in by_replica.items():
                    replicas.setdefault((name, replica), []).append(sums)
        by_array = {str(leaf.array): leaf for leaf in self._manifest.leaves}
        wrong = {
            name: by_array[name]
            for (name, _), sums in replicas.items()
            if text_of(total(sums)) != by_array[name].fingerprint
        }
        if wrong:
            raise self._damaged(list(wrong.values()))

    def _damaged(self, leaves: Sequence[SavedLeaf]) -> DamagedCheckpointError:
        """Returns the error that names arrays, and the files that may hold them."""
        arrays = [
            f"{leaf.path} {_render.array_text(leaf.dtype, leaf.shape)}".lstrip()
            for leaf in leaves[:3]
        ]
        more = f" and {len(leaves) - 3} more" if len(leaves) > 3 else ""
        unhashed = [
            name for name, file in self._manifest.files.items() if file.sha256 is None
        ]
        places = ", ".join(unhashed[:3]) or str(self._manifest.arrays)
        msg = (
            f"{', '.join(arrays)}{more}: the values in {self._folder} are not the ones "
            f"that were saved; the damage is in {places}. {_WAY_OUT}"
        )
        return DamagedCheckpointError(msg)


def _num_elements(bounds: Bounds) -> int:
    return math.prod(stop - start for start, stop in bounds)


def _by_replica(
    sums: Mapping[Bounds, Sums], sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> dict[str, Sums]:
    """Returns this process's sums for each complete copy (replica) of an array.

    The first device that holds a slice, in the order of the sharding, contributes to
    the first copy, the second one to the second copy, and so on. So every copy is
    verified, whichever processes hold its parts; counting each slice once would leave
    the other copies unverified.
    """
    num_copies: dict[Bounds, int] = {}
    by_replica: dict[int, list[Sums]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        bounds = bounds_of(index, shape)
        replica = num_copies.get(bounds, 0)
        num_copies[bounds] = replica + 1
        if device.process_index == jax.process_index():
            by_replica.setdefault(replica, []).append(sums[bounds])
    return {str(replica): total(own) for replica, own in by_replica.items()}


def check_files(folder: Any, manifest: Manifest) -> None:
    """Raises if a file is missing, has another size or, if it is small, other content.

    Raises:
        DamagedCheckpointError: Names the file.
    """
    for name, saved in manifest.files.items():
        file = folder / name
        try:
            size = file.stat().st_size
            content = None if saved.sha256 is None else file.read_bytes()
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{file} is missing. {_WAY_OUT}") from None
        except OSError as error:
            msg = f"{file} cannot be read: {error}. {_WAY_OUT}"
            raise DamagedCheckpointError(msg) from error
        if size != saved.size:
            msg = (
                f"{file} has {size:,} bytes, but {saved.size:,} were saved. {_WAY_OUT}"
            )
            raise DamagedCheckpointError(msg)
        if content is not None and files.digest(content) != saved.sha256:
            msg = f"{file} is not as it was saved: its content has changed. {_WAY_OUT}"
            raise DamagedCheckpointError(msg)


# The manifest's entries.


def _leaf(saved: SavedLeaf) -> ArraySpec:
    """Returns the spec of a saved leaf, for the restore engine."""
    is_numpy = saved.kind == "numpy"
    try:
        if saved.kind == "python":
            _python_value(saved)
            dtype = PYTHON_TYPES[saved.dtype]
        elif saved.kind == "key":
            dtype = key_dtype(str(saved.key_impl))
        else:
            dtype = jnp.dtype(saved.dtype)
    except (KeyError, TypeError, ValueError) as error:
        msg = (
            f"{saved.path}: this version of meshlayout does not write such an entry in "
            f"a manifest: {error!r}. Use the program that wrote it."
        )
        raise CheckpointError(msg) from None
    return ArraySpec(saved.path, saved.parts, saved.shape, dtype, is_numpy)


def _python_value(saved: SavedLeaf) -> complex:
    parts = saved.value if saved.dtype == "complex" else [saved.value]
    return PYTHON_TYPES[saved.dtype](*parts)
