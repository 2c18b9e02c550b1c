"""From text to tokens and back."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from meshlayout.errors import DataError


@runtime_checkable
class Tokenizer(Protocol):
    """Whatever turns a text into tokens."""

    def encode(self, text: str, /) -> Any:
        """Returns a text's tokens: integers, from 0.

        Args:
            text: The text.
        """
        ...


Encode: TypeAlias = Callable[[str], Any]


class ByteTokenizer:
    """Takes every byte of a text's UTF-8 for one token, 0 to 255.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("né").tolist()
        [110, 195, 169]
        >>> tokenizer.decode([110, 195, 169])
        'né'
    """

    vocab_size = 256

    def encode(self, text: str | bytes, /) -> np.ndarray[Any, Any]:
        """Returns the bytes of a text, as int32.

        Args:
            text: A text, or bytes, which are taken as they are.

        Raises:
            DataError: If the text has a half of a surrogate pair, which UTF-8 has not.
        """
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

    def decode(self, tokens: Any, *, errors: str = "replace") -> str:
        """Returns the text whose bytes these are.

        Args:
            tokens: Integers from 0 to 255, of one text.
            errors: What becomes of bytes that are no UTF-8, as in `bytes.decode`; a
                model gives any. Those of `encode` come back exactly.

        Raises:
            DataError: If a token is no byte.
        """
        values = np.asarray(tokens).reshape(-1)
        wrong = values[(values < 0) | (values >= self.vocab_size)]
        if wrong.size:
            msg = (
                f"token {wrong[0]} is no byte: a ByteTokenizer has the tokens 0 to "
                f"{self.vocab_size - 1}. Leave out separators and padding."
            )
            raise DataError(msg)
        return values.astype(np.uint8).tobytes().decode(errors=errors)


class DocumentTokens:
    """Turns documents into arrays of tokens.

    Args:
        tokenizer: What encodes texts, or None for their bytes.
        separator: A token to put behind every document, or None.

    Raises:
        DataError: If one of them is of another kind.
    """

    def __init__(
        self, tokenizer: Tokenizer | Encode | None, separator: int | None
    ) -> None:
        self._encode = _encoder(tokenizer)
        self._takes_bytes = tokenizer is None or isinstance(tokenizer, ByteTokenizer)
        is_token = isinstance(separator, (int, np.integer)) and not isinstance(
            separator, bool
        )
        if separator is not None and not (is_token and 0 <= separator <= _LARGEST):
            msg = (
                f"separator={separator!r} is no token. Give the number of the token "
                "that ends a document, 0 for the byte that no text has, or None."
            )
            raise DataError(msg)
        self._separator = separator

    def __call__(self, document: Any, number: int) -> np.ndarray[Any, Any]:
        """Returns a document's tokens, int32, its separator with them.

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

    def _tokens(self, document: Any, number: int) -> np.ndarray[Any, Any]:
        if isinstance(document, np.ndarray) and document.ndim == 0:
            document = document.item()  # a text as NumPy holds it
        if isinstance(document, bytes) and not self._takes_bytes:
            document = _decoded(document, number)
        if isinstance(document, (str, bytes)):
            found = self._encode(document)
            return _as_tokens(found, f"the tokenizer, given document {number},")
        if isinstance(document, dict):
            keys = ", ".join(repr(key) for key in document)
            msg = (
                f"document {number} is a dict with the keys {keys}. Give the texts "
                "alone: for instance dataset.map(lambda record: record['text'])."
            )
            raise DataError(msg)
        return _as_tokens(document, f"document {number}")


_LARGEST = 2**31 - 1


def _encoder(tokenizer: Tokenizer | Encode | None) -> Callable[[Any], Any]:
    if tokenizer is None:
        return ByteTokenizer().encode
    if isinstance(tokenizer, Tokenizer) and not isinstance(tokenizer, type):
        return tokenizer.encode
    if callable(tokenizer) and not isinstance(tokenizer, type):
        return tokenizer
    msg = (
        f"tokenizer={tokenizer!r} has no encode(text), and is no function from a text "
        "to its tokens. Leave it out to take a text's bytes."
    )
    raise DataError(msg)


def _decoded(document: bytes, number: int) -> str:
    try:
        return document.decode()
    except UnicodeDecodeError as error:
        msg = (
            f"document {number} is bytes that are no UTF-8 at byte {error.start}. Give "
            "texts, or leave tokenizer= out to take the bytes as they are."
        )
        raise DataError(msg) from None


def _as_tokens(found: Any, what: str) -> np.ndarray[Any, Any]:
    if isinstance(found, Sequence) and not len(found):
        return np.zeros(0, np.int32)
    try:
        values = np.asarray(found)
    except ValueError:
        values = np.empty((), object)
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        kind = type(found).__name__
        if isinstance(found, np.ndarray):
            kind = f"n array of dtype {found.dtype} and shape {found.shape}"
        else:
            kind = f" {kind}"
        msg = (
            f"{what} gives a{kind}; a document is a text, bytes, or a 1-D array of "
            "integers."
        )
        raise DataError(msg)
    if values.size and (values.min() < 0 or values.max() > _LARGEST):
        wrong = values.min() if values.min() < 0 else values.max()
        msg = f"{what} gives the token {wrong}; tokens are from 0 to {_LARGEST}."
        raise DataError(msg)
    return values.astype(np.int32)
