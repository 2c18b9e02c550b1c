"""A user's function of one example, and the random numbers that it gets.

What an example becomes depends on seed, epoch and row alone, never on who maps it or on
what shares its batch: so batches are the same on any number of processes and workers,
and a resumed run equals an uninterrupted one.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout.errors import DataError


@dataclass(frozen=True)
class RowMap:
    """A function of an example and, if `is_random`, of a NumPy random generator."""

    function: Callable[..., Any]
    is_random: bool
    seed: int

    def __call__(
        self, examples: Iterable[PyTree], rows: np.ndarray, epoch: int
    ) -> list[PyTree]:
        """Returns the mapped examples of some rows."""
        mapped = []
        for example, row in zip(examples, rows.tolist(), strict=True):
            seeds = [[self.seed, epoch, row]] if self.is_random else []
            with _checks.noted(f"This was raised by map= at row {row} of the split."):
                mapped.append(
                    self.function(example, *map(np.random.default_rng, seeds))
                )
        return mapped


def row_map(function: Any, seed: int) -> RowMap | None:
    """Returns a user's function, checked: with two required arguments, it is random."""
    if function is None:
        return None
    if not callable(function):
        msg = f"map must be a function of an example, got {_checks.shown(function)}."
        raise DataError(msg)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions
        return RowMap(function, is_random=False, seed=seed)
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind < parameter.VAR_POSITIONAL
    ]
    if len(required) > 2 or not parameters:
        msg = (
            "map must be a function of an example, or of an example and a NumPy random "
            f"generator, got one that needs {len(required)} arguments."
        )
        raise DataError(msg)
    return RowMap(function, is_random=len(required) == 2, seed=seed)
