"""The choices of a pipeline, checked."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from meshlayout.data.rows import whole
from meshlayout.errors import DataError, did_you_mean


REMAINDERS = ("pad", "drop", "repeat", "error")


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        global_batch_size: Rows of a global batch.
        remainder: What becomes of rows that do not fill a batch.
        weights: Where batches carry their weights; None for nowhere.
        seed: What shuffles the rows of a source with random access.
        epochs: Passes over the source in one iteration.
        steps: Batches in one iteration; None for all.
        prefetch: Batches that are made ready ahead.
        per_process: Whether the source gives only this process's rows.
        strings: `"error"` or `"host"`.
    """

    global_batch_size: int
    remainder: str
    weights: str | int | None
    seed: int | None
    epochs: int
    steps: int | None
    prefetch: int
    per_process: bool
    strings: str


def check_options(
    *,
    global_batch_size: Any,
    remainder: Any,
    weights: Any,
    shuffle: Any,
    epochs: Any,
    steps: Any,
    prefetch: Any,
    per_process: Any,
    strings: Any,
) -> Options:
    """Returns the choices, or raises DataError for the first that is none."""
    if isinstance(shuffle, (bool, np.bool_)):
        msg = (
            f"shuffle= takes a seed, a whole number, or None, and got {shuffle}. Write "
            "shuffle=0 for a shuffle that is the same in every run."
        )
        raise DataError(msg)
    if isinstance(weights, bool) or not isinstance(weights, (str, int, type(None))):
        msg = (
            "weights= is a batch's key, or the place in a tuple, or None, and got "
            f"{weights!r}."
        )
        raise DataError(msg)
    if not isinstance(per_process, bool):
        msg = f"per_process= is True or False, and got {per_process!r}."
        raise DataError(msg)
    options = Options(
        whole("global_batch_size", global_batch_size, at_least=1),
        _one_of("remainder", remainder, REMAINDERS),
        weights,
        None if shuffle is None else whole("shuffle", shuffle, at_least=0),
        whole("epochs", epochs, at_least=1),
        None if steps is None else whole("steps", steps, at_least=1),
        whole("prefetch", prefetch, at_least=0),
        per_process,
        _one_of("strings", strings, ("error", "host")),
    )
    if per_process and remainder == "repeat" and steps is None:
        msg = (
            "remainder='repeat' with per_process=True needs steps=: the processes may "
            "have different numbers of rows, and have to take as many steps."
        )
        raise DataError(msg)
    return options


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        listed = ", ".join(map(repr, allowed))
        hint = did_you_mean(value, allowed)
        msg = f"{name}= is one of {listed}, and got {value!r}.{hint}"
        raise DataError(msg)
    return value
