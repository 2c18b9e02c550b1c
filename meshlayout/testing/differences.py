"""Two values of one leaf, and how far apart they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshlayout import _paths, _render
from meshlayout._annotations import Leaf, PyTree
from meshlayout.arrays import to_numpy
from meshlayout.metrics import Metrics
from meshlayout.testing.expectations import VerificationError, leaf_text


@dataclass(frozen=True)
class Difference:
    """The largest difference between the two values of a leaf.

    Attributes:
        path: The path of the leaf, which begins with `state` or `aux`.
        array: Its dtype, shape and layout on the mesh, such as `f32[512@batch, 10]`.
        step: The step after which it was compared, from 1.
        largest: The largest difference; infinite if only one value is NaN.
        allowed: The largest difference that passes.
        text: What differs and by how much; empty if it passes.
    """

    path: str
    array: str
    step: int
    largest: float
    allowed: float
    text: str = ""


def leaves_of(state: PyTree, aux: PyTree) -> dict[str, Leaf]:
    """Returns the leaves of a step's results by path."""
    aux = aux.compute() if isinstance(aux, Metrics) else aux
    return {
        "/".join(filter(None, [name, leaf.path])): leaf.value
        for name, tree in (("state", state), ("aux", aux))
        for leaf in _paths.flatten(tree).leaves
    }


def values_of(leaves: Mapping[str, Leaf]) -> dict[str, np.ndarray]:
    """Returns leaves on the host."""
    return {path: np.asarray(to_numpy(leaf)) for path, leaf in leaves.items()}


def check_same_leaves(
    step: int, on_mesh: Mapping[str, Any], on_one: Mapping[str, Any]
) -> None:
    """Raises VerificationError unless a step returns the same leaves on one device."""
    lost = [repr(path) for path in on_mesh if path not in on_one]
    extra = [repr(path) for path in on_one if path not in on_mesh]
    parts = [
        *([f"{', '.join(lost[:3])} only on the mesh"] if lost else []),
        *([f"{', '.join(extra[:3])} only on one device"] if extra else []),
    ]
    if parts:
        msg = (
            f"step {step}: the step returns {' and '.join(parts)}. Its results must "
            "not depend on the number of devices."
        )
        raise VerificationError(msg)


def compare(
    path: str, step: int, on_mesh: Leaf, expected: np.ndarray, allowed: float
) -> Difference:
    """Compares the two values of a leaf.

    Args:
        path: The path of the leaf.
        step: The number of the step, from 1.
        on_mesh: The leaf on the mesh.
        expected: Its values on one device.
        allowed: The largest difference of floats that passes; other values are equal.
    """
    array, values = leaf_text(on_mesh), np.asarray(to_numpy(on_mesh))
    kinds = [_render.array_text(x.dtype, x.shape) for x in (values, expected)]
    if kinds[0] != kinds[1]:
        text = f": it is {kinds[0]} on the mesh and {kinds[1]} on one device."
        return Difference(path, array, step, np.inf, 0.0, text)
    distances = _distances(values, expected)
    num_wrong = int(np.count_nonzero(distances > allowed))
    index = np.unravel_index(distances.argmax(), distances.shape) if values.size else ()
    largest = float(distances.max(initial=0.0))
    text = (
        f". The largest difference is {largest:.3g}"
        f"{f' at {[int(i) for i in index]}' if index else ''}: {values[index]} on the "
        f"mesh and {expected[index]} on one device, where {allowed:.2g} is allowed. "
        f"Elements that differ: {num_wrong:,} of {values.size:,}."
    )
    return Difference(path, array, step, largest, allowed, text if num_wrong else "")


def _distances(values: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Returns the distances of all elements; infinite where only one is NaN."""
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        # As Python integers: the difference of two int64 may not fit into one.
        distances = np.zeros(values.shape)
        unlike = values != expected
        integers = (x[unlike].astype(object) for x in (values, expected))
        distances[unlike] = abs(np.subtract(*integers))
        return distances
    values, expected = wide(values), wide(expected)
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        distances = np.abs(values - expected)
    is_same = (values == expected) | (np.isnan(values) & np.isnan(expected))
    distances = np.where(is_same, 0.0, distances)
    return np.where(np.isnan(distances), np.inf, distances)


def wide(values: np.ndarray) -> np.ndarray:
    """Returns floats in a dtype in which their differences are exact enough."""
    is_complex = jnp.issubdtype(values.dtype, jnp.complexfloating)
    return values.astype(np.complex128 if is_complex else np.float64)


def largest_of(values: np.ndarray) -> float:
    """Returns the largest finite magnitude of an array."""
    values = wide(values)
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
