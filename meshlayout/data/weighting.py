"""Per-example weights in a batch: where they ride, and 0 for padding."""

import copy
from collections.abc import Mapping, MutableMapping
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
    places = [_Place(number) for number in range(len(element.leaves))]
    placed = element.treedef.unflatten(places)
    if _has(rows, key):
        if jax.tree.structure(_get(rows, key)) != jax.tree.structure(0):
            msg = (
                f"the source's {key!r} is taken for the weights, one per example, and "
                f"is a {type(_get(rows, key)).__name__}. Give weights= another name."
            )
            raise DataError(msg)
        at = getattr(_get(placed, key), "number", None)
        if at is None:  # a field that is no part of the tree
            return none
        _check_numbers(element.leaves[at])
        return Weighting(at, own=True, treedef=element.treedef, leaves=element.leaves)
    return (_added(placed, key, element) or none) if add else none


def way_out(rows: Any) -> str:
    """Returns what to do where padding has no place for its weights.

    Args:
        rows: Some rows of the source.
    """
    if type(rows) in (tuple, list):
        named = f"weights={len(rows)} appends them"
    elif isinstance(rows, Mapping) and all(isinstance(key, int) for key in rows):
        named = f"beside keys that are numbers, weights={max(rows) + 1} adds them"
    else:
        named = "a dict carries them under a key"
    return f"Padding is marked by weights: {named}. Or choose another remainder=."


@dataclass(frozen=True)
class _Place:
    """Stands for a leaf in a tree, to find its place among the leaves.

    Attributes:
        number: Which leaf of the batches given; None for weights that are added.
    """

    number: int | None


_ADDED = _Place(None)


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


def _added(placed: Any, key: str | int, element: Element) -> Weighting | None:
    """Returns where added weights are, or None if there is no place for them."""
    larger = _with(placed, key)
    if larger is None:
        return None
    named, treedef = named_leaves(larger)
    numbers = [place.number for _, place in named]
    given = [number for number in numbers if number is not None]
    if given == numbers or given != list(range(len(element.leaves))):
        return None
    at = numbers.index(None)
    dtype = np.dtype(np.float32)
    spec = LeafSpec(named[at][0], dtype, (), dtype)
    leaves = (*element.leaves[:at], spec, *element.leaves[at:])
    return Weighting(at, own=False, treedef=treedef, leaves=leaves)


def _with(tree: Any, key: str | int) -> Any:
    """Returns a tree of its kind with weights, or None if it takes none."""
    if type(tree) in (tuple, list) and key == len(tree):
        return type(tree)([*tree, _ADDED])
    if not isinstance(tree, Mapping):
        return None
    if not all(isinstance(other, type(key)) for other in tree):
        return None  # keys of several types have no order
    if isinstance(tree, MutableMapping):
        larger = copy.copy(tree)  # a defaultdict keeps its default
        larger[key] = _ADDED
        return larger
    kind: Any = type(tree)
    try:
        larger = kind({**tree, key: _ADDED})
    except (TypeError, ValueError):  # a dataclass, whose fields are all of its keys
        return None
    return larger if set(larger) == {*tree, key} else None


def _check_numbers(spec: LeafSpec) -> None:
    if spec.to is None or spec.dtype.kind == "c":
        msg = (
            f"{spec.text} is taken for the weights, one number per example, and has "
            f"dtype {spec.dtype}. Give weights= another name."
        )
        raise DataError(msg)
