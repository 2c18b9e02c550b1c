"""One pass over a collection of documents, whatever holds them, with its place."""

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np

from meshlayout.errors import DataError


class Documents(Protocol):
    """One pass over documents.

    Attributes:
        can_seek: Whether a place is found again without reading up to it.
    """

    can_seek: bool

    def __next__(self) -> Any:
        """Returns the next document."""
        ...

    def get_state(self) -> Any:
        """Returns the place before the next document, as JSON takes it."""
        ...

    def set_state(self, state: Any) -> None:
        """Goes to a place that `get_state` of a pass has named.

        Args:
            state: What it returned.
        """
        ...

    def close(self) -> None:
        """Lets go of what the pass holds."""
        ...


def check_documents(documents: Any) -> None:
    """Raises DataError if something is no collection of documents, or an empty one."""
    if isinstance(documents, (str, bytes)):
        msg = (
            f"documents is one {type(documents).__name__}, and is to be several. For "
            "one document, give [text]."
        )
        raise DataError(msg)
    if isinstance(documents, Mapping):
        msg = (
            "documents is a mapping, whose documents have no order. Give "
            "list(documents.values())."
        )
        raise DataError(msg)
    if _is_tokens(documents):
        msg = (
            f"documents is an array of shape {documents.shape}, the tokens of one "
            "document. Give [tokens]."
        )
        raise DataError(msg)
    if not (callable(documents) or _is_indexed(documents) or _is_iterable(documents)):
        msg = (
            f"documents is a {type(documents).__name__}. Give a list of texts, a Grain "
            "dataset, or a function that returns a generator of them."
        )
        raise DataError(msg)
    if _is_indexed(documents) and len(documents) == 0:
        msg = "documents is empty: there is nothing to pack."
        raise DataError(msg)


def open_documents(documents: Any) -> Documents:
    """Begins a pass.

    Args:
        documents: What `check_documents` let pass.

    Raises:
        DataError: If it is a function that returns no iterable.
    """
    if _is_indexed(documents):
        return IndexedDocuments(documents)
    iterable = documents if _is_iterable(documents) else documents()
    if not _is_iterable(iterable):
        msg = (
            f"documents is a function that returned a {type(iterable).__name__}, where "
            "an iterable of documents was expected."
        )
        raise DataError(msg)
    iterator = iter(iterable)
    if all(callable(getattr(iterator, name, None)) for name in _STATE):
        return StatefulDocuments(iterator)
    return CountedDocuments(iterator)


class IndexedDocuments:
    """Documents that are had by number: a list, a Grain MapDataset."""

    can_seek = True

    def __init__(self, documents: Any) -> None:
        self._documents = documents
        self._at = 0
        # What a filter took out of a Grain MapDataset is None.
        self._may_lack = _is_grain(documents)

    def __next__(self) -> Any:
        while self._at < len(self._documents):
            document = self._documents[self._at]
            self._at += 1
            if document is not None or not self._may_lack:
                return document
        raise StopIteration

    def get_state(self) -> int:
        """Returns how many documents were passed."""
        return self._at

    def set_state(self, state: int) -> None:
        """Goes on after as many documents."""
        self._at = state

    def close(self) -> None:
        """Holds nothing."""


class StatefulDocuments:
    """Documents of an iterator that knows its place, as Grain's do."""

    can_seek = True

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __next__(self) -> Any:
        return next(self._iterator)

    def get_state(self) -> Any:
        """Returns the iterator's state; bytes as text."""
        state = self._iterator.get_state()
        if isinstance(state, bytes):
            return {_BYTES: base64.b64encode(state).decode()}
        return state

    def set_state(self, state: Any) -> None:
        """Sets the iterator's state."""
        if isinstance(state, Mapping) and set(state) == {_BYTES}:
            state = base64.b64decode(state[_BYTES])
        self._iterator.set_state(state)

    def close(self) -> None:
        """Closes the iterator, if it can be closed."""
        _close(self._iterator)


class CountedDocuments:
    """Documents of any iterator: to go to a place is to read up to it."""

    can_seek = False

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._at = 0

    def __next__(self) -> Any:
        document = next(self._iterator)
        self._at += 1
        return document

    def get_state(self) -> int:
        """Returns how many documents were read."""
        return self._at

    def set_state(self, state: int) -> None:
        """Reads and drops documents until as many were read.

        Raises:
            DataError: If there are fewer, or more were read already.
        """
        if self._at > state:
            msg = (
                f"{self._at} documents were read, and the place is after {state}: "
                "documents of an iterator are read once. Set the state of a new "
                "iterator, over documents that can be read again."
            )
            raise DataError(msg)
        while self._at < state:
            try:
                next(self)
            except StopIteration:
                msg = (
                    f"the place is after document {state}, and there are "
                    f"{self._at} documents: they are not those of the state."
                )
                raise DataError(msg) from None

    def close(self) -> None:
        """Closes the iterator, if it can be closed."""
        _close(self._iterator)


_STATE = ("get_state", "set_state")
_BYTES = "base64"


def _is_indexed(documents: Any) -> TypeGuard[Sequence[Any]]:
    has = all(hasattr(documents, name) for name in ("__len__", "__getitem__"))
    return has and not isinstance(documents, type)


def _is_iterable(documents: Any) -> TypeGuard[Iterable[Any]]:
    return hasattr(documents, "__iter__") and not isinstance(documents, type)


def _is_tokens(documents: Any) -> bool:
    if not isinstance(documents, np.ndarray) or documents.ndim > 1:
        return False
    return np.issubdtype(documents.dtype, np.number)


def _is_grain(documents: Any) -> bool:
    return any(one.__module__.startswith("grain.") for one in type(documents).__mro__)


def _close(iterator: Any) -> None:
    close: Callable[[], None] | None = getattr(iterator, "close", None)
    if callable(close):
        close()
