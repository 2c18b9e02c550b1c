"""All errors that meshlayout raises on purpose, and helpers for their messages."""

import difflib
import warnings
from collections.abc import Iterable
from inspect import currentframe
from traceback import walk_stack
from typing import Any


class MeshLayoutError(ValueError):
    """Base of all errors of this library; a `ValueError`."""


class MeshError(MeshLayoutError):
    """Devices and axes do not make a mesh, or a mesh has no such axis."""


class ClusterError(MeshLayoutError):
    """Processes do not start or come together, or one of them differs or fails."""


class LayoutError(MeshLayoutError):
    """A layout is malformed, or does not fit its array."""


class LayoutMapError(MeshLayoutError):
    """A rule is malformed, disagrees with another one, or does not fit a leaf."""


class LayoutMapKeyError(LayoutMapError, KeyError):
    """A layout map does not hold a pattern."""

    # KeyError would show the repr of the sentence.
    __str__ = Exception.__str__


class StateError(MeshLayoutError):
    """A state cannot be created, or is not what was promised."""


class StepError(MeshLayoutError):
    """A step got arguments that it cannot take, or returned what it must not."""


class CommunicationError(MeshLayoutError):
    """A compiled program sends what was not expected, or cannot be read."""


class LossError(MeshLayoutError):
    """Losses, weights or a denominator do not fit each other."""


class MetricError(MeshLayoutError):
    """A metric is misconfigured, or got inputs that it cannot measure."""


class StrategyError(MeshLayoutError):
    """A strategy cannot run a function on replicas, or combine their values."""


class DataError(MeshLayoutError):
    """A source, or its examples, cannot be made into global batches."""


class CheckpointError(MeshLayoutError):
    """A state cannot be saved, or a checkpoint does not match what was requested."""


class RestoreDiffError(CheckpointError):
    """The saved arrays differ from the requested state.

    Attributes:
        diff: The `RestoreDiff`.
    """

    def __init__(self, message: str, diff: Any = None) -> None:
        super().__init__(message)
        self.diff = diff

    def __reduce__(self) -> tuple[Any, ...]:
        # By default, pickle would leave `diff` out.
        return type(self), (str(self), self.diff)


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's files are not as they were saved; names the file and array."""


class CheckpointWarning(UserWarning):
    """A checkpoint was damaged, and another one was used; says why."""


class RecompileWarning(UserWarning):
    """A compiled step needs another program; says why."""


class LayoutWarning(UserWarning):
    """A layout could not be followed completely; says why."""


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns with a line of the user's code, rather than one of the library."""
    inside = ("jax", "flax", "meshlayout", "contextlib", "functools")
    names = [str(f.f_globals.get("__name__")) for f, _ in walk_stack(currentframe())]
    users = [name.partition(".")[0] not in inside for name in names]
    warnings.warn(text, category, stacklevel=[*users, True].index(True) + 1)


def did_you_mean(name: object, candidates: Iterable[str]) -> str:
    """Returns a sentence with the candidate nearest to a name, or nothing."""
    near = difflib.get_close_matches(str(name), list(candidates), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
