"""Whether the files and arrays of a checkpoint are those that were saved."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from meshlayout import _render
from meshlayout.checkpoint import files
from meshlayout.checkpoint.fingerprint import fingerprints, host_fingerprint
from meshlayout.checkpoint.manifest import Manifest, SavedLeaf
from meshlayout.errors import DamagedCheckpointError


_WAY_OUT = (
    "Restore another step, or the newest intact one with fallback=True; verify=False "
    "reads what there is."
)


def check_files(folder: Any, manifest: Manifest) -> None:
    """Raises if a file is gone, has another size or, if it is small, other content.

    Args:
        folder: The step's directory.
        manifest: Its manifest.

    Raises:
        DamagedCheckpointError: Names the file.
    """
    for name, saved in manifest.files.items():
        file = folder / name
        try:
            size = files.size_of(file)
            content = None if saved.sha256 is None else file.read_bytes()
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{file} is missing. {_WAY_OUT}") from None
        except OSError as error:
            msg = f"{file} cannot be read: {error}. {_WAY_OUT}"
            raise DamagedCheckpointError(msg) from error
        if size != saved.size:
            msg = (
                f"{file} has {size:,} bytes, and {saved.size:,} were saved. {_WAY_OUT}"
            )
            raise DamagedCheckpointError(msg)
        if content is not None and files.digest(content) != saved.sha256:
            msg = f"{file} is not what was saved: its content has changed. {_WAY_OUT}"
            raise DamagedCheckpointError(msg)


def check_arrays(
    folder: Any, manifest: Manifest, arrays: Mapping[str, tuple[SavedLeaf, Any]]
) -> None:
    """Raises if the bits of an array are not those that were saved.

    Args:
        folder: The step's directory.
        manifest: Its manifest.
        arrays: What was saved and what was read, by the name in the files.

    Raises:
        DamagedCheckpointError: Names the arrays, and the files that may hold them.
    """
    on_devices = {n: x for n, (_, x) in arrays.items() if isinstance(x, jax.Array)}
    found = {name: one.text() for name, one in fingerprints(on_devices).items()}
    for name, (_, x) in arrays.items():
        if isinstance(x, np.ndarray):
            found[name] = host_fingerprint(x)
    wrong = [
        leaf for name, (leaf, _) in arrays.items() if found[name] != leaf.fingerprint
    ]
    if not wrong:
        return
    named = ", ".join(
        f"{leaf.path} {_render.array_text(leaf.dtype, leaf.shape)}".lstrip()
        for leaf in wrong[:3]
    )
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    unhashed = [name for name, file in manifest.files.items() if file.sha256 is None]
    some = ", ".join(unhashed[:3]) or str(manifest.arrays)
    msg = (
        f"{named}{more}: the values in {folder} are not those that were saved; the "
        f"damage is in {some}. {_WAY_OUT}"
    )
    raise DamagedCheckpointError(msg)


def unreadable(folder: Any, manifest: Manifest, why: str) -> DamagedCheckpointError:
    """Returns the error for arrays that cannot be read.

    Args:
        folder: The step's directory.
        manifest: Its manifest.
        why: What the reader says.
    """
    where = folder / str(manifest.arrays)
    msg = f"the arrays in {where} cannot be read: {why}. {_WAY_OUT}"
    return DamagedCheckpointError(msg)
