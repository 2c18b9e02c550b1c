"""The weights that a batch carries, and how many examples it has."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout import _paths
from meshlayout.errors import StepError


def weights_of(batch: Any, key: str | int) -> Any:
    """Returns a batch's weights, or None if it carries none.

    Args:
        batch: A mapping, a tuple or list, an object with fields, or an array, which
            has none.
        key: Their key in a mapping, their place in a tuple or list, or their field.

    Raises:
        StepError: If they are no array of numbers, with a dim for the examples.
    """
    if isinstance(batch, Mapping):
        weights = batch.get(key)
    elif isinstance(batch, (tuple, list)) and isinstance(key, int):
        weights = batch[key] if -len(batch) <= key < len(batch) else None
    elif isinstance(key, str) and not hasattr(batch, "dtype"):
        weights = getattr(batch, key, None)  # a named tuple, or a dataclass
    else:
        weights = None
    if weights is None:
        return None
    dtype = getattr(weights, "dtype", None)
    if dtype is None or jnp.ndim(weights) == 0 or not _is_number(dtype):
        msg = (
            f"the batch's {key!r} is taken for its weights, one per example, and is "
            f"{_text(weights)}. Give the weights another name with weights=."
        )
        raise StepError(msg)
    return weights


def with_weights(batch: Any, key: Any, weights: Any) -> Any:
    """Returns a batch that carries these weights, in place of any it had.

    Args:
        batch: A mapping; a tuple or list that has them, or where they come next; or an
            object with a field for them.
        key: As for `weights_of`.
        weights: The weights.

    Raises:
        StepError: If the batch has no place for them.
    """
    if isinstance(batch, Mapping):
        return {**batch, key: weights}
    if isinstance(batch, (tuple, list)) and isinstance(key, int):
        is_named = hasattr(batch, "_fields")
        if -len(batch) <= key < len(batch):
            items = list(batch)
            items[key] = weights
            return type(batch)(*items) if is_named else type(batch)(items)
        if key == len(batch) and not is_named:
            return type(batch)((*batch, weights))
    holder: Any = batch
    if key in getattr(holder, "_fields", ()):
        return holder._replace(**{str(key): weights})
    if key in getattr(holder, "__dataclass_fields__", ()):
        return dataclasses.replace(holder, **{str(key): weights})
    msg = (
        f"a {type(batch).__name__} has no place for weights={key!r}. Give a dict of "
        "arrays; or a tuple, and weights= the place after its last array."
    )
    raise StepError(msg)


def _is_number(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)


def _text(value: Any) -> str:
    if hasattr(value, "dtype"):
        return f"of dtype {value.dtype} and shape {jnp.shape(value)}"
    return f"a {type(value).__name__}"


def num_examples(batch: Any) -> int:
    """Returns the size of the batch dim.

    Args:
        batch: Any tree of arrays; its scalars do not count.

    Raises:
        StepError: If there is no array with dims, or two have another first dim.
    """
    found = {np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf)}
    if len(found) == 1:
        return found.pop()
    sizes: dict[int, str] = {}
    for leaf in _paths.flatten(batch).leaves:
        shape = jnp.shape(leaf.value)
        if shape:
            sizes.setdefault(shape[0], leaf.path or "the batch")
    if not sizes:
        msg = "the batch has no array with a batch dim."
        raise StepError(msg)
    (first, one), (second, other), *_ = sizes.items()
    msg = (
        f"the first dim is the batch dim, and {one!r} has {first} rows where {other!r} "
        f"has {second}. Pass what is no part of the batch to the loss function "
        "otherwise, for instance as a closure or a scalar."
    )
    raise StepError(msg)


def without_nan_padding(batch: Any, weights: Any) -> Any:
    """Puts 0 for what is not finite in rows of weight 0.

    Their losses count for nothing, but a gradient through them is 0 times NaN.

    Args:
        batch: A batch.
        weights: Its weights, or None.
    """
    if weights is None:
        return batch
    real = weights != 0

    def clean(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        dims = min(real.ndim, leaf.ndim)
        if leaf.shape[:dims] != real.shape[:dims]:
            dims = 1
        kept = (
            real.any(axis=tuple(range(dims, real.ndim))) if dims < real.ndim else real
        )
        kept = kept.reshape(kept.shape + (1,) * (leaf.ndim - dims))
        return jnp.where(kept | jnp.isfinite(leaf), leaf, 0)

    return map_batch(clean, batch)


def map_batch(function: Any, batch: Any) -> Any:
    """Applies a function to a batch's arrays, and leaves its scalars as they are."""
    return jax.tree.map(lambda leaf: function(leaf) if jnp.ndim(leaf) else leaf, batch)
