"""`pack_sequences`: documents as rows of one length, on Grain's packing."""

import functools
import importlib
from typing import Any, Literal

from meshlayout import _checks
from meshlayout.errors import DataError


@_checks.user_call
def pack_sequences(
    documents: Any,
    length: int,
    *,
    mode: Literal["chunk", "pack"] = "chunk",
    tokenizer: Any = None,
    separator: int | None = None,
    remainder: Literal["pad", "drop"] = "pad",
    targets: bool = False,
    document_ids: bool = False,
    open_rows: int = 64,
) -> Any:
    r"""Makes rows of one length from documents of any length.

    Use this to feed a language model. A row is a dict of arrays of shape (length,):
    `tokens`, int32, and `weight`, float32, which is 0 for padding and other tokens
    without a loss. `mode="chunk"` concatenates the documents and cuts the result into
    rows. `mode="pack"` puts whole documents into a row, several if they fit, and adds
    `segment_ids` (1, 2, ... in a row; 0 is padding) and `positions` (0, 1, ... in a
    segment), with which a model can tell documents apart.

    Grain does the packing: each document goes into the first of `open_rows` rows that
    has room; if none has room, all rows are closed. A document longer than a row is
    cut. Every token is in exactly one row.

    Args:
        documents: Texts, bytes, or 1-D arrays of tokens: a list, any iterable, a
            function that returns one, or a Grain dataset, which can encode in its own
            threads or processes.
        length: Tokens in a row.
        mode: `"chunk"` or `"pack"`.
        tokenizer: Encodes texts: an object with `encode(text)`, or a function. By
            default, every byte of a text's UTF-8 is a token, 0 to 255.
        separator: A token to add after every document; None adds nothing.
        remainder: Whether to `"pad"` or `"drop"` the last row in chunk mode.
        targets: Whether rows get `targets`: for every token, the next token of its
            document (in chunk mode, of the whole text). Without a next token, target
            and weight are 0.
        document_ids: Whether rows get `document_ids`, the index of each token's
            document in its pass (-1 for padding), and `document_positions`.
        open_rows: The number of rows open at once; more rows leave less padding.

    Returns:
        The rows: a Grain IterDataset, whose iterators have `get_state` and `set_state`,
        exact to the row, and a source for `distribute_dataset`, which can shuffle
        `list(rows)` with `batched=False`.

    Raises:
        DataError: If an argument is wrong.

    Examples:
        >>> rows = pack_sequences(["to be", "or", "not"], 6, mode="pack")
        >>> for row in rows:
        ...     print(bytes(row["tokens"].tolist()), row["segment_ids"])
        b'to be\x00' [1 1 1 1 1 0]
        b'ornot\x00' [1 1 2 2 2 0]
    """
    count = functools.partial(_checks.count, error=DataError)
    recipe = {
        "mode": _checks.choice("mode", mode, ("chunk", "pack"), error=DataError),
        "length": count("length", length),
        "separator": separator,
        "remainder": remainder,
        "targets": targets,
        "document_ids": document_ids,
        "open_rows": count("open_rows", open_rows),
    }
    if separator is not None:
        hint = "It is the token that ends a document; None adds nothing."
        recipe["separator"] = count("separator", separator, at_least=0, hint=hint)
    _checks.choice("remainder", remainder, ("pad", "drop"), error=DataError)
    if mode == "pack" and remainder != "pad":
        raise DataError(
            f"remainder={remainder!r} is for mode='chunk', where all rows but the last "
            "are full. Packed rows are padded where nothing fits; leave it out."
        )
    is_text = isinstance(tokenizer, str)  # which has an `encode` of its own
    encode = tokenizer if is_text else getattr(tokenizer, "encode", tokenizer)
    if encode is not None:
        _checks.function("tokenizer", encode, "text", error=DataError)
    _checks.require("grain", extra="data", purpose="pack_sequences")
    packed_rows = importlib.import_module("meshlayout.data.packed_rows")
    return packed_rows.PackedRows(documents, encode, recipe)
