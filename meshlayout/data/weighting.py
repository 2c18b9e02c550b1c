"""Per-example weights in a batch: where they ride, and 0 for padding."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshlayout.data.elements import Element, LeafSpec
from meshlayout.data.leaves import named_leaves
from meshlayout.errors import DataError


@dataclass(frozen=True)
class Weighting:
    """Where the weights of batches are.

    Attributes:
        at: The number of their leaf in the batches given; None if there are none.
        own: Whether the source has them already.
        treedef: The structure of the batches given.
        leaves: Their leaves.
    """

    at: int | None
    own: bool
    treedef: Any
    leaves: tuple[LeafSpec, ...]

    def weighted(
        self, leaves: list[Any], is_real: np.ndarray[Any, Any] | None, count: int
    ) -> list[Any]:
        """Returns a batch's leaves with its weights, 0 for padding.

        Args:
            leaves: The leaves that the source gave.
            is_real: Which rows are no padding; None for all.
            count: How many rows there are.
        """
        if self.at is None:
            return leaves
        if not self.own:
            ones = np.ones(count, np.float32) if is_real is None else is_real
            return [*leaves[: self.at], ones.astype(np.float32), *leaves[self.at :]]
        if is_real is None:
            return leaves
        weights = leaves[self.at]
        mask = is_real.reshape(-1, *[1] * (weights.ndim - 1))
        masked = np.where(mask, weights, np.zeros_like(weights))
        return [*leaves[: self.at], masked, *leaves[self.at + 1 :]]


def find_weighting(
    rows: Any, element: Element, key: str | int | None, *, add: bool
) -> Weighting:
    """Returns where batches have, or get, their weights.

    Args:
        rows: Some rows of the source.
        element: What its examples are.
        key: Their key in a mapping, their place in a tuple, or their field.
        add: Whether to add them where the source has none.

    Raises:
        DataError: If what is there are no weights.
    """
    none = Weighting(None, own=False, treedef=element.treedef, leaves=element.leaves)
    if key is None:
        return none
    marked = _with(rows, key, _MARK)
    if marked is None:
        return none
    named, treedef = named_leaves(marked)
    at = next(i for i, (_, leaf) in enumerate(named) if leaf is _MARK)
    is_there = _has(rows, key)
    if is_there and jax.tree.structure(_get(rows, key)) == jax.tree.structure(0):
        _check_numbers(element.leaves[at])
        return Weighting(at, own=True, treedef=element.treedef, leaves=element.leaves)
    if is_there:
        msg = (
            f"the source's {key!r} is taken for the weights, one per example, and is a "
            f"{type(_get(rows, key)).__name__}. Give weights= another name."
        )
        raise DataError(msg)
    if not add:
        return none
    dtype = np.dtype(np.float32)
    spec = LeafSpec(named[at][0], dtype, (), dtype)
    leaves = (*element.leaves[:at], spec, *element.leaves[at:])
    return Weighting(at, own=False, treedef=treedef, leaves=leaves)


def way_out(rows: Any) -> str:
    """Returns what to do where padding has no place for its weights.

    Args:
        rows: Some rows of the source.
    """
    if type(rows) in (tuple, list):
        named = f"weights={len(rows)} appends them"
    else:
        named = "a dict carries them under a key"
    return f"Padding is marked by weights: {named}. Or choose another remainder=."


class _Mark:
    """Stands for the weights while their place is looked for."""


_MARK = _Mark()


def _has(rows: Any, key: str | int) -> bool:
    if isinstance(rows, Mapping):
        return key in rows
    if isinstance(rows, (tuple, list)) and isinstance(key, int):
        return -len(rows) <= key < len(rows)
    is_field = isinstance(key, str) and not hasattr(rows, "dtype")
    return is_field and getattr(rows, str(key), None) is not None


def _get(rows: Any, key: Any) -> Any:
    if isinstance(rows, (Mapping, tuple, list)) and not isinstance(key, str):
        return rows[key]
    return rows[key] if isinstance(rows, Mapping) else getattr(rows, key)


def _with(rows: Any, key: Any, mark: Any) -> Any:
    """Returns the rows with a mark in the place of the weights, or None."""
    if isinstance(rows, Mapping):
        return {**rows, key: mark}
    if type(rows) in (tuple, list) and isinstance(key, int):
        if key == len(rows):
            return type(rows)([*rows, mark])
        if not -len(rows) <= key < len(rows):
            return None
        changed = list(rows)
        changed[key] = mark
        return type(rows)(changed)
    if _has(rows, key):
        return _replaced(rows, _get(rows, key), mark)
    return None


def _replaced(rows: Any, weights: Any, mark: Any) -> Any:
    """Returns an object with fields with a mark instead of one of its leaves."""
    named, treedef = named_leaves(rows)
    marked = [mark if leaf is weights else leaf for _, leaf in named]
    if not any(leaf is mark for leaf in marked):
        return None
    return treedef.unflatten(marked)


def _check_numbers(spec: LeafSpec) -> None:
    if spec.to is None or spec.dtype.kind == "c":
        msg = (
            f"{spec.text} is taken for the weights, one number per example, and has "
            f"dtype {spec.dtype}. Give weights= another name."
        )
        raise DataError(msg)
