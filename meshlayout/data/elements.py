"""The elements of a stream: one example or one batch each, with the position before it.

The first element has to be looked at before anything else can be decided (its shapes,
and whether it is a batch), and a generator gives it only once. So one object reads the
stream, remembers the element it has looked at, and gives it again.
"""

import itertools
import json
from collections.abc import Iterator

import jax

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout.data.element_rows import as_batch, is_placed, looks_batched, stack
from meshlayout.data.protocols import JSON, Stream, StreamSource
from meshlayout.errors import DataError


class ElementReader:
    """Reads the elements of a stream, one pass after another.

    `look` reads the first element, which then comes again: nothing is read twice, and a
    source that can be read only once loses nothing.
    """

    def __init__(self, source: StreamSource) -> None:
        name = type(source).__name__
        batched, num_rows = source.batched, source.num_rows
        choices = (True, False, None)
        _checks.choice(f"batched of the {name}", batched, choices, error=DataError)
        if num_rows is not None:
            what = f"num_rows of the {name}"
            _checks.count(what, num_rows, at_least=0, error=DataError)
        self.source = source
        self._stream: Stream | None = None
        # The element that was looked at, with the position before it; until it is read.
        self._first: tuple[PyTree, JSON] | None = None
        self._epoch: int | None = None  # of the open pass

    def look(self) -> tuple[PyTree, int | None]:
        """Returns the first element that has rows, as arrays, and the number of rows.

        The number is None for a single example, to which a dim for the rows is added.

        Raises:
            DataError: If no element has rows, or the first could be an example as well
                as a batch.
        """
        try:
            if self._first is None:
                self.seek(0)
            state = self.position()
            for element in self.elements():
                rows, count = _with_rows(element, batched=self.source.batched)
                if count != 0:  # empty batches have no rows to learn shapes from
                    self._first = element, state
                    return rows, count
                state = self.position()
            raise DataError(no_rows(0))
        except BaseException:
            self.close()
            raise

    def seek(self, epoch: int, state: JSON = None) -> None:
        """Starts a pass, at a position of the stream's own if there is one."""
        # The pass whose first element was looked at is still at its start.
        if self._first is None or self._epoch != epoch:
            self.close()
            self._stream = _checked_stream(self.source.open(epoch), self.source, epoch)
            self._epoch = epoch
        if state is not None and self._stream is not None:
            self._first = None
            self._stream.set_state(state)

    def elements(self) -> Iterator[PyTree]:
        """Returns the elements that come next; at least one of them must be taken.

        The element that was looked at is part of this iterator alone, so it would be
        lost with an iterator that nobody reads.
        """
        first, self._first = self._first, None
        stream = iter(() if self._stream is None else self._stream)
        return stream if first is None else itertools.chain(first[:1], stream)

    def position(self) -> JSON:
        """Returns the stream's own position before the next element; None if unknown.

        Raises:
            DataError: If it is not JSON-serializable.
        """
        if self._first is not None:
            return self._first[1]
        state = None if self._stream is None else self._stream.get_state()
        if state is None:
            return None
        try:
            # A copy: the stream may return the same dict again, changed.
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            msg = (
                f"the source's get_state() returned a {type(state).__name__} that is "
                f"not JSON-serializable: {error}. Return numbers, strings, lists and "
                "dicts."
            )
            raise DataError(msg) from error

    def close(self) -> None:
        """Closes the open pass."""
        stream, self._stream, self._first = self._stream, None, None
        self._epoch = None
        if stream is not None:
            stream.close()


def _checked_stream(stream: Stream, source: StreamSource, epoch: int) -> Stream:
    """Returns what a source has opened, if it has all the methods of a `Stream`."""
    # A list, say, is no iterator: every batch would start at its first element.
    for method in ("__next__", "__iter__", "get_state", "set_state", "close"):
        if not hasattr(stream, method):
            msg = (
                f"open({epoch}) of the {type(source).__name__} returned "
                f"{_checks.shown(stream)}, which lacks {method}: a Stream is an "
                "iterator with get_state (which may return None), set_state and close."
            )
            raise DataError(msg)
    return stream


def _with_rows(element: PyTree, *, batched: bool | None) -> tuple[PyTree, int | None]:
    """Returns an element as rows, and their number; None for a single example."""
    if batched is not False and is_placed(element):
        return element, len(jax.tree.leaves(element)[0])
    if batched is None and looks_batched(element):
        raise DataError(ambiguous("the source"))
    return as_batch(element) if batched else (stack([element]), None)


def ambiguous(what: str) -> str:
    """Returns the message that asks for `batched=`.

    Nothing is guessed: a batch of 5 rows and an example of 5 vectors look alike, and a
    wrong guess would train on rows of the wrong rank.
    """
    return (
        f"the elements of {what} may be examples or batches: all their arrays have the "
        "same first dim. Say batched=False for examples, or batched=True for batches."
    )


def no_rows(epoch: int) -> str:
    """Returns the message about an epoch, counted from 0, that has no examples."""
    if not epoch:
        return "the source is empty: it yielded no examples."
    return (
        f"the source yielded no examples in epoch {epoch + 1}, though it did before: "
        "it can be read once. A function that makes the generator must make a new one "
        "at every call."
    )


def rows_text(count: int) -> str:
    """Returns a number of rows in words."""
    return f"{count} row" if count == 1 else f"{count} rows"
