"""Documents of any length: what counts as a collection of them, and their tokens."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeGuard, runtime_checkable

import numpy as np

from meshlayout import _checks
from meshlayout.data.adapters.iterables import NumberedItems
from meshlayout.errors import DataError


TokenArray: TypeAlias = np.ndarray[Any, Any]
Document: TypeAlias = Any
"""A text, its bytes, or a 1-D array of tokens."""

Documents: TypeAlias = Any
"""A collection of documents: indexed, iterable, or a function that returns one."""

# The largest token: they are int32, as JAX has no larger integers by default.
_LARGEST = 2**31 - 1


@runtime_checkable
class Tokenizer(Protocol):
    """An object that turns text into tokens, as tokenizers of most packages do."""

    def encode(self, text: str, /) -> Any:
        """Returns the tokens of a text: integers, 0 or larger."""
        ...


Encode: TypeAlias = Callable[[str], Any]


def check_documents(documents: Documents) -> None:
    """Raises DataError if this is not a collection of documents, or is empty.

    A single text or array of tokens is a common mistake. Every character or token of it
    would count as a document.
    """
    if isinstance(documents, (str, bytes)):
        msg = (
            f"documents is one {type(documents).__name__}, and a collection of "
            "documents is expected. For one document, give [text]."
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


def open_documents(documents: Documents) -> Iterator[Document]:
    """Returns an iterator over documents, which has `set_state` if it can seek.

    Raises:
        DataError: If this is a function that does not return an iterable.
    """
    if _is_indexed(documents):
        class_names = {kind.__name__ for kind in type(documents).__mro__}
        # In a Grain dataset, None is an item that a filter left out; elsewhere it is a
        # mistake, and refused as a document.
        is_grain = "MapDataset" in class_names
        return NumberedItems(documents, len(documents), skip_none=is_grain)
    iterable = documents if isinstance(documents, Iterable) else documents()
    if not isinstance(iterable, Iterable):
        msg = (
            f"documents is a function that returned {_checks.shown(iterable)}, and an "
            "iterable of documents is expected."
        )
        raise DataError(msg)
    return iter(iterable)


class DocumentTokens:
    """Turns documents into arrays of tokens.

    Args:
        tokenizer: Encodes texts; None takes their bytes.
        separator: A token to put after every document, or None.

    Raises:
        DataError: If one of them is not of such a kind.
    """

    def __init__(
        self, tokenizer: Tokenizer | Encode | None, separator: int | None
    ) -> None:
        self._encode = _bytes_of if tokenizer is None else _encoder(tokenizer)
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
            number: The index of the document, for messages.

        Raises:
            DataError: If it is anything else.
        """
        # Added here, so that an empty document still ends the one before it.
        tokens = self._tokens(document, number)
        if self._separator is None:
            return tokens
        return np.append(tokens, np.int32(self._separator))

    def _tokens(self, document: Document, number: int) -> TokenArray:
        if isinstance(document, np.ndarray) and document.ndim == 0:
            document = document.item()  # a text in an array, as TFDS yields it
        if isinstance(document, bytes) and not self._takes_bytes:
            try:
                document = document.decode()
            except UnicodeDecodeError as error:
                msg = (
                    f"document {number} is bytes that are not UTF-8 at byte "
                    f"{error.start}. Give texts, or leave out tokenizer= to take the "
                    "bytes themselves."
                )
                raise DataError(msg) from None
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


def _encoder(tokenizer: Tokenizer | Encode) -> Callable[[Any], Any]:
    # str has an `encode` method as well, and a class one that needs an instance.
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


def _as_tokens(tokens: Any, what: str) -> TokenArray:
    if isinstance(tokens, Sequence) and not len(tokens):  # a float64 array to NumPy
        return np.zeros(0, np.int32)
    try:
        values = np.asarray(tokens)
    except ValueError:  # ragged
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
