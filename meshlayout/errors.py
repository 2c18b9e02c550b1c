"""Every error that meshlayout raises on purpose, and the helpers they share.

```
MeshLayoutError(ValueError)
├── MeshError            devices and axes that do not make a mesh
├── LayoutError          a layout that is not one, or does not fit an array
├── LayoutMapError       rules that are wrong, disagree or match nothing
│   └── LayoutMapKeyError    a pattern that the map does not hold (a KeyError too)
├── StateError           a builder or a state that cannot be created or placed
├── StepError            a step that does not keep its promises
├── CommunicationError   a program that sends what was not expected, or cannot be read
├── LossError            losses, weights and denominators that do not fit
├── MetricError          a metric that is misconfigured, or fed what does not fit
├── DataError            a source that cannot be split into global batches
└── CheckpointError      a state that cannot be saved or restored
    ├── RestoreDiffError     what was saved is not what was requested
    └── DamagedCheckpointError   a checkpoint whose files are not what was saved
```
"""

import difflib
import inspect
from collections.abc import Iterable
from typing import Any


class MeshLayoutError(ValueError):
    """Base of all errors of this library; a `ValueError`."""


class MeshError(MeshLayoutError):
    """Devices and axes do not make a mesh, or a mesh has no such axis."""


class LayoutError(MeshLayoutError):
    """A layout is malformed, or does not fit the array it is given for."""


class LayoutMapError(MeshLayoutError):
    """A rule is malformed, disagrees with another one, or does not fit a leaf."""


class LayoutMapKeyError(LayoutMapError, KeyError):
    """A layout map holds no such pattern."""

    # KeyError shows the repr of its argument; a sentence is shown as it is.
    __str__ = Exception.__str__


class StateError(MeshLayoutError):
    """A state cannot be created, or is not what was promised."""


class StepError(MeshLayoutError):
    """A compiled step was given, or returned, something it cannot take."""


class CommunicationError(MeshLayoutError):
    """A compiled program sends what was not expected, or cannot be read."""


class LossError(MeshLayoutError):
    """Losses, weights or a denominator do not fit each other."""


class MetricError(MeshLayoutError):
    """A metric is misconfigured, or was given inputs that it cannot measure."""


class DataError(MeshLayoutError):
    """A source, or what it yields, cannot be made into global batches."""


class CheckpointError(MeshLayoutError):
    """A state cannot be saved, or a checkpoint does not match what was requested."""


class RestoreDiffError(CheckpointError):
    """What was saved differs from the requested state.

    Attributes:
        diff: The `RestoreDiff`.
    """

    def __init__(self, message: str, diff: Any = None) -> None:
        super().__init__(message)
        self.diff = diff

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.diff)


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's files are not what was saved; names the file and the array."""


class CheckpointWarning(UserWarning):
    """A checkpoint was damaged and another one was used instead, and why."""


class RecompileWarning(UserWarning):
    """A compiled step needs another program, and why."""


class LayoutWarning(UserWarning):
    """A layout could not be followed completely, and why."""


def stack_level() -> int:
    """Returns how far up a warning has to point to name a line outside this library."""
    inside = ("jax", "flax", "meshlayout")
    plumbing = ("contextlib", "functools")
    level = 0
    frame = inspect.currentframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in inside and name not in plumbing:
            break
        frame = frame.f_back
        level += 1
    return max(1, level)


def did_you_mean(name: object, candidates: Iterable[str]) -> str:
    """Returns a sentence that names the candidate nearest to `name`, or nothing.

    Args:
        name: What the user wrote.
        candidates: The names that would have been right.

    Returns:
        `" Did you mean 'x'?"` with its leading space, or an empty string.

    Example:
        >>> did_you_mean("modle", ["batch", "model"])
        " Did you mean 'model'?"
        >>> did_you_mean("zzz", ["batch", "model"])
        ''
    """
    near = difflib.get_close_matches(str(name), list(candidates), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
