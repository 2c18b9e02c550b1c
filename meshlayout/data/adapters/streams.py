"""Elements that come one after another, gathered to blocks."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from meshlayout import _paths
from meshlayout.data.adapters.arrays import ambiguous, is_placed, looks_batched
from meshlayout.data.source import Block
from meshlayout.data.stacking import host_leaf, stack
from meshlayout.errors import DataError


# Examples of one block: enough that the work per block does not count.
BLOCK_EXAMPLES = 32


class Elements:
    """An iterator of examples or batches that may know its place."""

    def __iter__(self) -> Iterator[Any]:
        """Returns what gives the elements: itself, or what is inside of it."""
        return self

    def __next__(self) -> Any:
        """Returns the next element; raises StopIteration after the last."""
        raise NotImplementedError

    def get_state(self) -> Any:
        """Returns the place after the last element as JSON takes it, or None."""
        return None

    def set_state(self, state: Any) -> None:
        """Goes to a place that `get_state` has named."""
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of what the iterator holds."""
        return


class ElementStream:
    """A stream of blocks from elements: each batch is one, examples are stacked.

    Args:
        elements: The elements.
        batched: Whether they are batches; None where they tell.
        what: What gives them, for a sentence.
        dtypes: By path, the dtypes of numbers that carry none of their own.
    """

    def __init__(
        self,
        elements: Elements,
        *,
        batched: bool | None,
        what: str = "the source",
        dtypes: dict[str, Any] | None = None,
    ) -> None:
        self._elements, self._batched, self._dtypes = elements, batched, dtypes
        self._what = what
        self._late: Exception | None = None
        self._before: Any = None
        self._uses_memory_again: bool | None = None  # None: not known yet

    def __next__(self) -> Block:
        return self.take(BLOCK_EXAMPLES)

    def take(self, count: int) -> Block:
        """Returns the next block: a batch, or examples.

        Args:
            count: At most how many examples; batches are as they are.
        """
        if self._late is not None:
            late, self._late = self._late, None
            try:
                raise late
            finally:
                del late  # a cycle with its traceback would keep the source's frames
        element = next(self._elements)
        if self._batched is None:
            self._batched = self._tells(element)
        if not self._batched:
            examples = self._examples(element, count)
            return Block(stack(examples, self._dtypes), len(examples), is_own=True)
        if is_placed(element):  # on devices by its maker: passes through
            return Block(element, len(jax.tree.leaves(element)[0]))
        return as_block(element)

    def get_state(self) -> Any:
        """Returns the place after the last block."""
        return self._elements.get_state()

    def set_state(self, state: Any) -> None:
        """Goes to such a place."""
        self._late = None
        self._elements.set_state(state)

    def close(self) -> None:
        """Closes the elements."""
        self._elements.close()

    def _examples(self, first: Any, count: int) -> list[Any]:
        if self._uses_memory_again is None:
            before, self._before = self._before, first
            if before is None:  # the first example is stacked before the second comes
                return [first]
            self._uses_memory_again = _share_memory(before, first)
            self._before = None
        if self._uses_memory_again:
            following = itertools.islice(self._elements, count - 1)
            return self._gathered(_copied(first), map(_copied, following))
        return self._gathered(first, itertools.islice(self._elements, count - 1))

    def _gathered(self, first: Any, following: Iterator[Any]) -> list[Any]:
        # An exception comes after the examples that were read before it.
        examples = [first]
        try:
            # What was read before an exception stays in the list.
            examples.extend(following)
        except Exception as error:
            self._late = error
        return examples

    def _tells(self, element: Any) -> bool:
        """Returns whether an element is a batch, where it tells."""
        if is_placed(element):
            return True
        if looks_batched(element):
            raise DataError(ambiguous(self._what))
        return False


def as_block(batch: Any) -> Block:
    """Returns a batch of the user's as a block of NumPy arrays.

    Raises:
        DataError: If its arrays have no batch dim, or differ in it.
    """
    entries, treedef = jax.tree_util.tree_flatten_with_path(batch, is_leaf=_is_strings)
    leaves = [
        stack(list(leaf))
        if _is_strings(leaf)
        else host_leaf("/".join(map(_paths.key_name, keys)), leaf)
        for keys, leaf in entries
    ]
    sizes = {leaf.shape[0] if leaf.ndim else -1 for leaf in leaves}
    if len(sizes) != 1 or -1 in sizes:
        shapes = ", ".join(str(leaf.shape) for leaf in leaves)
        msg = (
            f"the arrays of a batch have the shapes {shapes or 'of no array'}, which "
            "have no batch dim in common. If the source gives single examples, say "
            "batched=False."
        )
        raise DataError(msg)
    return Block(treedef.unflatten(leaves), sizes.pop())


def _share_memory(one: Any, other: Any) -> bool:
    """Tells whether two examples have an array in one place, so that one is lost."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=False)
    return any(_is_one_place(first, second) for first, second in pairs)


def _is_one_place(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.may_share_memory(one, other)
    return one is other and hasattr(one, "shape")


def _copied(example: Any) -> Any:
    return jax.tree.map(_copied_leaf, example)


def _copied_leaf(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else copy.deepcopy(leaf)


def _is_strings(node: Any) -> bool:
    """Tells a batch's strings, which come as a list, from a list of arrays."""
    if type(node) not in (list, tuple) or not node:
        return False
    return all(isinstance(item, (str, bytes)) for item in node)
