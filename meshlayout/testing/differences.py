"""Two values of one leaf, and how far apart they are.

Rounding is not a mistake, and a tolerance that is wide enough for all rounding hides
mistakes. So the tolerance of a leaf comes from what it was computed from: the dtypes,
the size of the values and of their change, the number of terms of a mean, and, as the
last resort, what rounding was measured to do.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from meshlayout import _render
from meshlayout._annotations import DType, Leaf
from meshlayout.arrays import to_numpy
from meshlayout.testing.expectations import VerificationError, leaf_text
from meshlayout.testing.reference import Values, wide


@dataclass(frozen=True)
class Difference:
    """The largest difference between the two values of a leaf.

    Attributes:
        path: The path of the leaf, which begins with `state` or `aux`.
        array: Its dtype, shape and layout on the mesh, such as `f32[512@batch, 10]`.
        step: The step after which it was compared, from 1.
        largest: The largest difference; infinite if only one value is NaN.
        allowed: The largest difference that passes.
        index: The index of the largest difference.
        on_mesh: The value at that index on the mesh, as text.
        on_one_device: The value at that index on one device.
        num_different: The number of elements that differ by more than is allowed.
        size: The number of elements.
        kinds: The dtypes and shapes if they differ, else an empty string.
    """

    path: str
    array: str
    step: int
    largest: float
    allowed: float
    index: tuple[int, ...] = ()
    on_mesh: str = ""
    on_one_device: str = ""
    num_different: int = 0
    size: int = 0
    kinds: str = ""

    @property
    def is_too_large(self) -> bool:
        """Whether the two values differ."""
        return bool(self.kinds) or self.num_different > 0

    @property
    def badness(self) -> tuple[bool, float]:
        """The sort key that finds the worst of several steps."""
        relative = self.largest / self.allowed if self.allowed else self.largest
        return self.is_too_large, relative


@dataclass(frozen=True)
class Tolerance:
    """How far apart the floats of a leaf may be; see `verify`.

    Attributes:
        rtol: Relative to the largest value of the leaf; None derives it from dtypes.
        atol: Absolute; None derives it.
        eps: The rounding error of the dtype that the step computes in.
        num_terms: The number of terms of leaves that are means, by path.
        rounding: The measured effect of rounding on leaves, by path.
    """

    rtol: float | None
    atol: float | None
    eps: float = 0.0
    num_terms: Mapping[str, int] = field(default_factory=dict)
    rounding: Mapping[str, float] = field(default_factory=dict)

    def allowed(self, path: str, dtype: DType, value: float, change: float) -> float:
        """Returns the largest difference that passes.

        Args:
            path: The path of the leaf.
            dtype: Its dtype.
            value: Its largest value.
            change: Its largest change in the steps so far.
        """
        eps = float(jnp.finfo(dtype).eps)
        # Sums are computed in float32 or better, in another order on the mesh, and are
        # then rounded to the dtype of the leaf.
        of_sums = min(eps, float(jnp.finfo(jnp.float32).eps))
        atol = of_sums / 8 if self.atol is None else self.atol
        atol += self.rounding.get(path, 0.0)
        if self.rtol is not None:
            return atol + self.rtol * value
        # The errors of the terms of a mean are independent: they add up to the root of
        # their number, and the mean divides by the number.
        rounding = 2 * max(self.eps - of_sums, 0) * change
        rounding /= math.sqrt(self.num_terms.get(path, 1))
        return atol + (128 * of_sums + 4 * eps) * value + rounding


def compare(
    step: int,
    on_mesh: Mapping[str, Leaf],
    on_one: Values,
    moved: Values,
    tolerance: Tolerance,
) -> list[Difference]:
    """Compares two sets of leaves, in the order of the first.

    Args:
        step: The number of the step, from 1.
        on_mesh: The step's results on the mesh, by path.
        on_one: The reference's results.
        moved: The changes of the reference's leaves since the first step.
        tolerance: The tolerance.

    Raises:
        VerificationError: If the two sets have different paths.
    """
    if on_mesh.keys() != on_one.keys():
        lost = [repr(path) for path in on_mesh if path not in on_one]
        extra = [repr(path) for path in on_one if path not in on_mesh]
        parts = [
            *([f"{', '.join(lost[:3])} only on the mesh"] if lost else []),
            *([f"{', '.join(extra[:3])} only on one device"] if extra else []),
        ]
        msg = (
            f"step {step}: the step returns {' and '.join(parts)}. Its results must "
            "not depend on the number of devices."
        )
        raise VerificationError(msg)
    return [
        _difference(path, step, leaf, on_one[path], moved[path], tolerance)
        for path, leaf in on_mesh.items()
    ]


def _difference(
    path: str,
    step: int,
    on_mesh: Leaf,
    expected: np.ndarray,
    change: np.ndarray,
    tolerance: Tolerance,
) -> Difference:
    array = leaf_text(on_mesh)
    values = np.asarray(to_numpy(on_mesh))
    kinds = [_render.array_text(x.dtype, x.shape) for x in (values, expected)]
    if kinds[0] != kinds[1]:
        text = f"it is {kinds[0]} on the mesh and {kinds[1]} on one device"
        return Difference(path, array, step, np.inf, 0.0, kinds=text)
    distances = _distances(values, expected)
    allowed = 0.0
    if jnp.issubdtype(values.dtype, jnp.inexact):
        largest, moved = _largest(expected), _largest(change)
        allowed = tolerance.allowed(path, values.dtype, largest, moved)
    if not values.size:
        return Difference(path, array, step, 0.0, allowed)
    index = tuple(map(int, np.unravel_index(distances.argmax(), distances.shape)))
    return Difference(
        path,
        array,
        step,
        float(distances[index]),
        allowed,
        index,
        f"{values[index]}",
        f"{expected[index]}",
        int(np.count_nonzero(distances > allowed)),
        values.size,
    )


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


def _largest(values: np.ndarray) -> float:
    values = wide(values)
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
