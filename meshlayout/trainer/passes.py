"""Passes over the data: what an epoch is made of."""

import operator
from collections.abc import Iterator
from typing import Any

from meshlayout.checkpoint.input import Data, Input, why_not
from meshlayout.errors import MeshLayoutError


_END = object()


class Passes:
    """Cuts passes over the data into epochs.

    Without `steps_per_epoch`, an epoch is one pass. With it, an epoch is that many
    batches, and the next epoch goes on where it stopped; a new pass begins where one
    ends. An iterator cannot be gone through again: its end is the end.

    Args:
        name: What the data is called in messages.
        data: The data.
        steps_per_epoch: Batches in an epoch, or None.
        num_epochs: How many epochs will be asked for.

    Attributes:
        is_over: Whether the last epoch ended before its batches, or had none left.
        input: The passes, which tell their place.

    Raises:
        MeshLayoutError: If it is no such data, or an iterator that is to be gone
            through several times.
    """

    def __init__(
        self,
        name: str,
        data: Data,
        steps_per_epoch: int | None = None,
        num_epochs: int = 1,
    ) -> None:
        _check_data(name, data)
        self._name, self._data = name, data
        self._num_steps = steps_per_epoch
        self.input = Input(data)
        self._begun: int | None = None
        self._has_given = False
        self.is_over = False
        if isinstance(data, Iterator) and num_epochs > 1 and steps_per_epoch is None:
            msg = (
                f"{name} is an iterator, which gives its batches once, and "
                f"epochs={num_epochs}. Say how many batches an epoch has, "
                "steps_per_epoch=, or give a list, or a function that returns a new "
                "iterator."
            )
            raise MeshLayoutError(msg)

    @property
    def num_steps(self) -> int | None:
        """Batches in an epoch, as far as that is known beforehand."""
        if self._num_steps is not None:
            return self._num_steps
        return operator.length_hint(self._data, 0) or None

    def go_on(self, num_done: int | None) -> None:
        """Goes on with an epoch, or after one, where `input` stands now.

        Args:
            num_done: The batches of the epoch that were given; None after its end.
        """
        self._begun, self._has_given = num_done, True

    def epoch(self) -> Iterator[Any]:
        """Gives the batches of the next epoch.

        Raises:
            MeshLayoutError: If there is none.
        """
        begun, self._begun = self._begun, None
        count = begun or 0
        for batch in self._batches(begun):
            count += 1
            self._has_given = True
            yield batch
        self.is_over = self._has_given and count < (self._num_steps or 1)
        if not self._has_given:
            msg = f"{self._name} gave no batch. An iterator that is used up gives none."
            raise MeshLayoutError(msg)

    def _batches(self, begun: int | None) -> Iterator[Any]:
        if self._num_steps is None:
            if begun is None:
                self.input.begin()
            yield from self.input
            return
        for _ in range(self._num_steps - (begun or 0)):
            batch = self._next()
            if batch is _END:
                return
            yield batch

    def _next(self) -> Any:
        """Returns the next batch, of a new pass if need be."""
        batch = next(self.input, _END)
        if batch is _END:
            self.input.begin()
            batch = next(self.input, _END)
        return batch


def _check_data(name: str, data: Any) -> None:
    kind = why_not(data)
    if kind:
        msg = (
            f"{name} is a {type(data).__name__}, {kind}: it takes an iterable of "
            "batches, or a function that returns one. A list of one batch is one, too."
        )
        raise MeshLayoutError(msg)
