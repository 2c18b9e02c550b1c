"""Documents of any length: one pass over them, and the tokens of each.

Any collection of documents is read in one way: as an iterator with a place. Grain's
iterators have one; of other iterators it is the number of documents that were read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeGuard, runtime_checkable

import numpy as np

from meshlayout import _checks
from meshlayout._optional import require
from meshlayout.errors import DataError


TokenArray: TypeAlias = np.ndarray[Any, Any]
Document: TypeAlias = Any
"""A text, its bytes, or a 1-D array of tokens."""

Documents: TypeAlias = Any
"""A collection of documents: indexed, iterable, or a function that returns one."""

# Tokens are int32.
_LARGEST = 2**31 - 1


@runtime_checkable
class Tokenizer(Protocol):
    """Whatever turns a text into tokens."""

    def encode(self, text: str, /) -> Any:
        """Returns a text's tokens: integers, from 0."""
        ...


Encode: TypeAlias = Callable[[str], Any]


class DocumentPass:
    """One pass over documents.

    Attributes:
        can_seek: Whether a place is found again without reading up to it.

    Args:
        documents: What `check_documents` accepts.

    Raises:
        DataError: If it is a function that does not return an iterable.
    """

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        # A list is read by number, since Grain takes None for what a filter left out.
        self._by_number = _is_indexed(documents) and not _is_grain(documents)
        self._iterator = _opened(documents)
        self._count = 0
        names = ("get_state", "set_state")
        self.can_seek = all(hasattr(self._iterator, name) for name in names)

    def __next__(self) -> Document:
        item = next(self._iterator)
        self._count += 1
        return self._documents[item] if self._by_number else item

    def get_state(self) -> Any:
        """Returns the place before the next document."""
        return self._iterator.get_state() if self.can_seek else self._count

    def set_state(self, state: Any) -> None:
        """Goes to a place, if need be by reading up to it.

        Raises:
            DataError: If there are fewer documents, or more were read already.
        """
        if self.can_seek:
            self._iterator.set_state(state)
            return
        if self._count > state:
            msg = (
                f"{self._count} documents were read, and the place is after {state}: "
                "documents of an iterator are read once. Set the state of a new "
                "iterator, over documents that can be read again."
            )
            raise DataError(msg)
        while self._count < state:
            try:
                next(self)
            except StopIteration:
                msg = (
                    f"the place is after document {state}, and there are "
                    f"{self._count} documents: they are not those of the state."
                )
                raise DataError(msg) from None

    def close(self) -> None:
        """Closes the iterator, if it can be closed."""
        close = getattr(self._iterator, "close", None)
        if callable(close):
            close()


def _opened(documents: Documents) -> Any:
    """Returns an iterator of documents, or of the numbers of those in a list."""
    if _is_indexed(documents):
        grain: Any = require("grain", extra="data", purpose="pack_sequences")
        here = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        dataset: Any = documents
        if not _is_grain(documents):
            dataset = grain.MapDataset.range(len(documents))
        return iter(dataset.to_iter_dataset(here))
    iterable = documents if isinstance(documents, Iterable) else documents()
    if not isinstance(iterable, Iterable):
        msg = (
            f"documents is a function that returned {_checks.shown(iterable)}, where "
            "an iterable of documents was expected."
        )
        raise DataError(msg)
    return iter(iterable)


def _is_grain(documents: object) -> bool:
    return any(kind.__name__ == "MapDataset" for kind in type(documents).__mro__)


def check_documents(documents: Documents) -> None:
    """Raises DataError if something is not a collection of documents, or is empty."""
    if isinstance(documents, (str, bytes)):
        msg = (
            f"documents is one {type(documents).__name__}, where several documents are "
            "expected. For one document, give [text]."
        )
        raise DataError(msg)
    if isinstance(documents, Mapping):
        msg = (
            "documents is a mapping, whose documents have no order. Give "
            "list(documents.values())."
        )
        raise DataError(msg)
    is_array = isinstance(documents, np.ndarray) and documents.ndim <= 1
    if is_array and np.issubdtype(documents.dtype, np.number):
        msg = (
            f"documents is an array of shape {documents.shape}, the tokens of one "
            "document. Give [tokens]."
        )
        raise DataError(msg)
    is_collection = _is_indexed(documents) or isinstance(documents, Iterable)
    if isinstance(documents, type) or not (callable(documents) or is_collection):
        msg = (
            f"documents is {_checks.shown(documents)}. Give a list of texts, a Grain "
            "dataset, or a function that returns a generator of them."
        )
        raise DataError(msg)
    if _is_indexed(documents) and len(documents) == 0:
        msg = "documents is empty: there is nothing to pack."
        raise DataError(msg)


class DocumentTokens:
    """Turns documents into arrays of tokens.

    Args:
        tokenizer: What encodes texts, or None for their bytes.
        separator: A token to put after every document, or None.

    Raises:
        DataError: If one of them is of another kind.
    """

    def __init__(
        self, tokenizer: Tokenizer | Encode | None, separator: int | None
    ) -> None:
        self._encode = _encoder(tokenizer)
        self._takes_bytes = tokenizer is None
        self._separator = separator
        if separator is not None:
            hint = "It is the token that ends a document; None adds nothing."
            self._separator = _checks.count(
                "separator", separator, at_least=0, error=DataError, hint=hint
            )
            if self._separator > _LARGEST:
                msg = f"separator must be at most {_LARGEST}, got {separator}."
                raise DataError(msg)

    def __call__(self, document: Document, number: int) -> TokenArray:
        """Returns a document's tokens, int32, including its separator.

        Args:
            document: A text, its bytes, or tokens.
            number: Which document it is, for errors.

        Raises:
            DataError: If it is something else.
        """
        tokens = self._tokens(document, number)
        if self._separator is None:
            return tokens
        return np.append(tokens, np.int32(self._separator))

    def _tokens(self, document: Document, number: int) -> TokenArray:
        if isinstance(document, np.ndarray) and document.ndim == 0:
            document = document.item()  # a text as NumPy holds it
        if isinstance(document, bytes) and not self._takes_bytes:
            document = _decoded(document, number)
        if isinstance(document, (str, bytes)):
            with _checks.noted(f"This was raised by tokenizer= at document {number}."):
                tokens = self._encode(document)
            return _as_tokens(tokens, f"the tokenizer, given document {number},")
        if isinstance(document, dict):
            keys = ", ".join(repr(key) for key in document)
            msg = (
                f"document {number} is a dict with the keys {keys}. Give the texts "
                "alone: for instance dataset.map(lambda record: record['text'])."
            )
            raise DataError(msg)
        return _as_tokens(document, f"document {number}")


def _encoder(tokenizer: Tokenizer | Encode | None) -> Callable[[Any], Any]:
    if tokenizer is None:
        return _bytes_of
    # Texts have an encode of their own, and classes one that needs an instance.
    is_object = not isinstance(tokenizer, (type, str, bytes))
    if is_object and isinstance(tokenizer, Tokenizer):
        return tokenizer.encode
    if is_object and callable(tokenizer):
        return _checks.function("tokenizer", tokenizer, "text", error=DataError)
    msg = (
        "tokenizer must be an object with encode(text), or a function from a text to "
        f"its tokens, got {_checks.shown(tokenizer)}. Leave it out to take a text's "
        "bytes."
    )
    raise DataError(msg)


def _bytes_of(text: str | bytes) -> TokenArray:
    """Returns the bytes of a text's UTF-8."""
    if isinstance(text, str):
        try:
            text = text.encode()
        except UnicodeEncodeError as error:
            half = ord(text[error.start])
            msg = (
                f"the text's character {error.start} is U+{half:04X}, half of a "
                "surrogate pair, which UTF-8 cannot write. Replace it with "
                "text.encode('utf-8', 'replace')."
            )
            raise DataError(msg) from None
    return np.frombuffer(text, np.uint8).astype(np.int32)


def _decoded(document: bytes, number: int) -> str:
    try:
        return document.decode()
    except UnicodeDecodeError as error:
        msg = (
            f"document {number} is bytes that are not UTF-8 at byte {error.start}. "
            "Give texts, or leave tokenizer= out to take the bytes as they are."
        )
        raise DataError(msg) from None


def _as_tokens(tokens: Any, what: str) -> TokenArray:
    if isinstance(tokens, Sequence) and not len(tokens):
        return np.zeros(0, np.int32)
    try:
        values = np.asarray(tokens)
    except ValueError:
        values = np.empty((), object)
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        kind = f"a {type(tokens).__name__}"
        if isinstance(tokens, np.ndarray):
            kind = f"an array of dtype {tokens.dtype} and shape {tokens.shape}"
        msg = (
            f"{what} gives {kind}; a document is a text, bytes, or a 1-D array of "
            "integers."
        )
        raise DataError(msg)
    if values.size and (values.min() < 0 or values.max() > _LARGEST):
        outside = values.min() if values.min() < 0 else values.max()
        msg = f"{what} gives the token {outside}; tokens are from 0 to {_LARGEST}."
        raise DataError(msg)
    return values.astype(np.int32)


def _is_indexed(documents: Documents) -> TypeGuard[Sequence[Any]]:
    has = all(hasattr(documents, name) for name in ("__len__", "__getitem__"))
    return has and not isinstance(documents, type)


def is_read_once(documents: object) -> bool:
    """Returns whether documents are an iterator, which only one pass can read."""
    return isinstance(documents, Iterator)
