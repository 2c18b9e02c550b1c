"""Text for the example models: bytes as tokens, and a small corpus of English."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np


class ByteTokenizer:
    """Takes every byte of a text's UTF-8 as one token, 0 to 255.

    Examples:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("né").tolist()
        [110, 195, 169]
        >>> tokenizer.decode([110, 195, 169])
        'né'
    """

    vocab_size = 256

    def encode(self, text: str, /) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Returns the bytes of a text, int32."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(
        self, tokens: Sequence[int] | np.ndarray[Any, Any], *, errors: str = "replace"
    ) -> str:
        """Returns the text whose bytes these are.

        Args:
            tokens: Integers from 0 to 255, of one text.
            errors: What to do with bytes that are not UTF-8, as in `bytes.decode`: a
                model may generate any. Those of `encode` come back exactly.

        Raises:
            ValueError: If a token is not a byte.
        """
        values = np.asarray(tokens).reshape(-1)
        outside = values[(values < 0) | (values >= self.vocab_size)]
        if outside.size:
            msg = (
                f"token {outside[0]} is not a byte: a ByteTokenizer has the tokens 0 "
                f"to {self.vocab_size - 1}. Leave out separators and padding."
            )
            raise ValueError(msg)
        return values.astype(np.uint8).tobytes().decode(errors=errors)


def python_topics() -> list[str]:
    """Returns some English prose that every Python has: the topics of `help()`.

    About half a megabyte in eighty documents, from Python's reference manual, in the
    order of their names; the text is that of the Python that runs.

    Examples:
        >>> topics = python_topics()
        >>> len(topics) > 50 and all(isinstance(topic, str) for topic in topics)
        True
    """
    module = importlib.import_module("pydoc_data.topics")
    return [module.topics[name] for name in sorted(module.topics)]
