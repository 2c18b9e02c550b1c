"""Packages that only some users need, imported when they are first used."""

import importlib
from types import ModuleType

from meshlayout.errors import MeshLayoutError


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Imports a module of an optional package, which an extra of this library installs.

    `purpose` begins the sentence that is raised where it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        # Something that the package itself imports: installing it would not help.
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        msg = (
            f"{purpose} needs {package}, which is not installed: "
            f"pip install 'meshlayout[{extra}]'."
        )
        raise MeshLayoutError(msg) from error
