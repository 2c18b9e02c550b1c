"""The user's function of an example or a batch, and its random numbers."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshlayout.errors import DataError


@dataclass(frozen=True)
class MapFunction:
    """A user's function, applied to rows.

    Attributes:
        function: Takes an example; or a batch of examples if `is_batched`; and a NumPy
            random generator if it takes a second argument.
        is_batched: Whether it takes a batch.
        is_random: Whether it takes a generator.
        seed: What the generators start from, together with epoch and row.
    """

    function: Callable[..., Any]
    is_batched: bool
    is_random: bool
    seed: int

    def examples(
        self,
        examples: Iterable[Any],
        indices: np.ndarray[Any, Any],
        epochs: np.ndarray[Any, Any],
    ) -> list[Any]:
        """Returns what single examples become.

        Args:
            examples: The examples.
            indices: Their rows.
            epochs: The epoch in which each of them is read.
        """
        places = zip(epochs.tolist(), indices.tolist(), strict=True)
        return [
            self._called(example, epoch, row)
            for example, (epoch, row) in zip(examples, places, strict=True)
        ]

    def batch(self, rows: Any, first: int, epoch: int) -> Any:
        """Returns what a batch becomes.

        Args:
            rows: A tree of arrays.
            first: The row that comes first.
            epoch: The epoch in which it is read.
        """
        return self._called(rows, epoch, first)

    def _called(self, example: Any, epoch: int, row: int) -> Any:
        more = ()
        if self.is_random:
            more = (np.random.default_rng([self.seed, epoch, row]),)
        try:
            return self.function(example, *more)
        except StopIteration as error:  # would end the epoch
            msg = f"map= raised StopIteration at row {row}."
            raise RuntimeError(msg) from error
        except Exception as error:
            what = "the batch that begins with row" if self.is_batched else "row"
            error.add_note(f"This was raised by map= at {what} {row} of the split.")
            raise


def as_map_function(
    function: Any, *, is_batched: bool, seed: int
) -> MapFunction | None:
    """Returns a user's function as one of rows, or None if there is none.

    Args:
        function: The function or None. With two required arguments, the second is a
            random generator.
        is_batched: Whether it takes a batch.
        seed: What its random numbers start from.

    Raises:
        DataError: If it is no function of one or two arguments.
    """
    if function is None:
        if is_batched:
            msg = "map_batched=True says how map= is called, and there is no map=."
            raise DataError(msg)
        return None
    if not callable(function):
        msg = f"map= is a function of an example, and got {function!r}."
        raise DataError(msg)
    num_arguments = _num_arguments(function)
    if num_arguments not in (1, 2):
        msg = (
            "map= is a function of an example, or of an example and a NumPy random "
            f"generator, and got one that needs {num_arguments} arguments."
        )
        raise DataError(msg)
    return MapFunction(function, is_batched, num_arguments == 2, seed)


def _num_arguments(function: Callable[..., Any]) -> int:
    """Returns how many arguments a function needs; 1 where it does not tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions
        return 1
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    needed = [p for p in parameters if p.kind in positional and p.default is p.empty]
    takes_any = any(p.kind in (*positional, p.VAR_POSITIONAL) for p in parameters)
    return len(needed) or int(takes_any)
