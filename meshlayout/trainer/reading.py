"""`Reading`: what the steps of an epoch are fed with, and how far that is."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshlayout.trainer.batches import Fed, Feeder
from meshlayout.trainer.passes import Passes


@dataclass
class Reading:
    """The training data of a `fit`.

    Attributes:
        passes: Passes over the data.
        feeder: What puts batches on the mesh.
        is_saved: Whether its place is asked for.
        is_resumed: Whether this `fit` goes on from a checkpoint; the history then has
            the epochs before it.
    """

    passes: Passes
    feeder: Feeder
    is_saved: bool = False
    is_resumed: bool = False
    _place: tuple[dict[str, Any], Any] | None = None

    def place(self) -> tuple[dict[str, Any], Any]:
        """Returns the place after the last batch that was used; see `Input.place`."""
        return self.passes.input.place() if self._place is None else self._place

    def batches(self, group_size: int) -> Iterator[tuple[Any, int, int]]:
        """Gives what calls of the train step take, with its steps and examples.

        Args:
            group_size: The batches of a call, which come as a list if they are more
                than one; those that are left over at the end of an epoch come one by
                one, each in a list of its own.
        """
        fed = map(self.feeder, self.passes.epoch())
        self._place = None
        if group_size == 1:
            for one in fed:
                yield one.batch, 1, one.num_examples
            return
        # A group is read ahead: each batch keeps the place after it.
        group: list[tuple[Fed, Any]] = []
        for one in fed:
            place = self.passes.input.place(keep=True) if self.is_saved else None
            group.append((one, place))
            if len(group) == group_size:
                examples = sum(one.num_examples for one, _ in group)
                yield [one.batch for one, _ in group], group_size, examples
                group = []
        for one, place in group:
            self._place = place
            yield [one.batch], 1, one.num_examples
        self._place = None
