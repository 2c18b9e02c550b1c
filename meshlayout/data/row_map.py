"""A user's function of one example, and the random numbers that it gets.

What an example becomes depends on seed, epoch and row alone, never on who maps it or on
what shares its batch: that is what makes batches the same on any number of processes
and workers, and a resumed run equal to an uninterrupted one.
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
    """A function of an example, which can be sent to a worker process.

    Attributes:
        function: Takes an example; and, if `is_random`, a NumPy random generator.
        is_random: Whether it takes a generator.
        seed: The seed of the generators, together with epoch and row.
    """

    function: Callable[..., Any]
    is_random: bool
    seed: int

    def __call__(
        self, examples: Iterable[PyTree], rows: np.ndarray, epoch: int
    ) -> list[PyTree]:
        """Returns the mapped examples of some rows."""
        mapped = []
        for example, row in zip(examples, rows.tolist(), strict=True):
            rng = ()
            if self.is_random:
                rng = (np.random.default_rng([self.seed, epoch, row]),)
            with _checks.noted(f"This was raised by map= at row {row} of the split."):
                mapped.append(self.function(example, *rng))
        return mapped


def row_map(function: Any, seed: int) -> RowMap | None:
    """Returns a user's function, checked; None if there is none.

    With two required arguments, the second is a random generator.

    Raises:
        DataError: If it is not a function of one or two arguments.
    """
    if function is None:
        return None
    if not callable(function):
        msg = f"map must be a function of an example, got {_checks.shown(function)}."
        raise DataError(msg)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions
        return RowMap(function, is_random=False, seed=seed)
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind
        in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    count = sum(parameter.default is parameter.empty for parameter in positional)
    takes_any = any(
        parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters
    )
    if count not in (1, 2) and not (count == 0 and (positional or takes_any)):
        msg = (
            "map must be a function of an example, or of an example and a NumPy random "
            f"generator, got one that needs {count} arguments."
        )
        raise DataError(msg)
    return RowMap(function, is_random=count == 2, seed=seed)
