"""Plain values as JSON, and back: what JSON has no word for keeps its type."""

import base64
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from meshlayout.errors import CheckpointError


_MARK = "!"


def encode(value: Any, where: str) -> Any:
    """Returns a value as JSON has it.

    Args:
        value: Numbers, texts, bytes, None, NumPy's scalars, small arrays, and lists,
            tuples and dicts of them.
        where: What it is, for messages.

    Raises:
        CheckpointError: If it holds anything else.

    Example:
        >>> encode({"at": (1, np.int64(2)), "key": b"ab"}, "metadata")
        {'at': {'!': 'tuple', 'items': [1, 2]}, 'key': {'!': 'bytes', 'base64': 'YWI='}}
    """
    if isinstance(value, (jax.Array, np.generic)) and not np.ndim(value):
        value = np.asarray(value).item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, bytes):
        return {_MARK: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufS":
        content = base64.b64encode(value.tobytes()).decode()
        shape = list(value.shape)
        return {
            _MARK: "array",
            "dtype": value.dtype.str,
            "shape": shape,
            "base64": content,
        }
    if isinstance(value, (list, tuple)):
        items = [encode(one, f"{where}[{at}]") for at, one in enumerate(value)]
        return {_MARK: "tuple", "items": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        pairs = [(key, encode(one, f"{where}[{key!r}]")) for key, one in value.items()]
        if all(isinstance(key, str) for key, _ in pairs) and _MARK not in value:
            return dict(pairs)
        items = [[encode(key, f"a key of {where}"), one] for key, one in pairs]
        return {_MARK: "dict", "items": items}
    msg = (
        f"{where} is {value!r} of type {type(value).__name__}, which cannot be written "
        "as JSON. Give numbers, texts, bytes, and lists and dicts of them."
    )
    raise CheckpointError(msg)


def decode(value: Any) -> Any:
    """Returns the value that `encode` was given.

    Args:
        value: What `encode` returned.
    """
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_MARK)
    if kind is None:
        return {key: decode(one) for key, one in value.items()}
    if kind == "tuple":
        return tuple(decode(value["items"]))
    if kind == "dict":
        return {decode(key): decode(one) for key, one in value["items"]}
    content = base64.b64decode(value["base64"])
    if kind == "bytes":
        return content
    return np.frombuffer(content, value["dtype"]).reshape(value["shape"]).copy()
