"""Whether the files and arrays of a checkpoint are those that were saved."""

from typing import Any

from meshlayout.checkpoint import files
from meshlayout.checkpoint.manifest import Manifest
from meshlayout.errors import DamagedCheckpointError


WAY_OUT = (
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
            raise DamagedCheckpointError(f"{file} is missing. {WAY_OUT}") from None
        except OSError as error:
            msg = f"{file} cannot be read: {error}. {WAY_OUT}"
            raise DamagedCheckpointError(msg) from error
        if size != saved.size:
            msg = f"{file} has {size:,} bytes, and {saved.size:,} were saved. {WAY_OUT}"
            raise DamagedCheckpointError(msg)
        if content is not None and files.digest(content) != saved.sha256:
            msg = f"{file} is not what was saved: its content has changed. {WAY_OUT}"
            raise DamagedCheckpointError(msg)


def unreadable(folder: Any, manifest: Manifest, why: str) -> DamagedCheckpointError:
    """Returns the error for arrays that cannot be read.

    Args:
        folder: The step's directory.
        manifest: Its manifest.
        why: What the reader says.
    """
    where = folder / str(manifest.arrays)
    msg = f"the arrays in {where} cannot be read: {why}. {WAY_OUT}"
    return DamagedCheckpointError(msg)
