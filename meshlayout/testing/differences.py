"""Two values of one leaf, and how far they are from each other."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np

from meshlayout import _paths, _render
from meshlayout._annotations import DType, Leaf, PyTree
from meshlayout.arrays import to_numpy
from meshlayout.testing.expectations import VerificationError, leaf_text
from meshlayout.testing.rounding_errors import Values, changes


@dataclass(frozen=True)
class Difference:
    """How far the values of one leaf are apart, where they are farthest.

    Attributes:
        path: The leaf's name, beginning with `state` or `aux`.
        array: Its dtype, shape and layout on the mesh, as `f32[512@batch, 10]`.
        step: The step after which it was compared, from 1.
        largest: The largest difference; infinite where one value alone is NaN.
        allowed: The largest difference that passes.
        index: Where it is.
        on_mesh: The value there, as text.
        on_one_device: The value there on one device.
        num_different: How many elements differ by more than is allowed.
        size: How many elements there are.
        kinds: Dtypes and shapes where they differ already, or an empty text.
        distances: How far every two elements are apart, where they are numbers.
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
    distances: np.ndarray | None = field(default=None, repr=False, compare=False)

    @property
    def is_too_large(self) -> bool:
        """Whether the two values differ."""
        return bool(self.kinds) or self.num_different > 0

    def allowing(self, allowed: float) -> "Difference":
        """Returns the difference with a larger allowance."""
        if self.distances is None or allowed <= self.allowed:
            return self
        different = int(np.count_nonzero(self.distances > allowed))
        return replace(self, allowed=allowed, num_different=different)

    @property
    def badness(self) -> tuple[bool, float]:
        """The sort key that finds the worst of several steps."""
        relative = self.largest / self.allowed if self.allowed else self.largest
        return self.is_too_large, relative


@dataclass(frozen=True)
class Tolerance:
    """How far the floats of a leaf may be apart; see `verify`.

    None derives a tolerance from the dtypes.

    Attributes:
        rtol: Relative to the leaf's largest value.
        atol: Absolute.
        eps: The rounding error of the dtype that the step computes in.
    """

    rtol: float | None
    atol: float | None
    eps: float

    def allowed(self, dtype: DType, largest: float, largest_change: float) -> float:
        """Returns the largest difference that passes.

        Args:
            dtype: The leaf's.
            largest: Its largest value.
            largest_change: The largest change to it in the steps so far.
        """
        eps = float(jnp.finfo(dtype).eps)
        # Sums are made in float32 or better, in another order on the mesh, and are
        # then rounded to the leaf's own dtype.
        of_sums = min(eps, float(jnp.finfo(jnp.float32).eps))
        atol = of_sums / 8 if self.atol is None else self.atol
        if self.rtol is not None:
            return atol + self.rtol * largest
        rounding = 2 * max(self.eps - of_sums, 0) * largest_change
        return atol + (128 * of_sums + 4 * eps) * largest + rounding


def values_of(name: str, tree: PyTree) -> Values:
    """Returns the leaves of a tree by path, on the host."""
    return {
        "/".join(filter(None, [name, leaf.path])): np.asarray(to_numpy(leaf.value))
        for leaf in _paths.flatten(tree).leaves
    }


def compare(
    step: int,
    on_mesh: Mapping[str, Leaf],
    on_one: Values,
    start: Values,
    tolerance: Tolerance,
) -> list[Difference]:
    """Compares two sets of leaves, in the order of the first.

    Args:
        step: The number of the step, from 1.
        on_mesh: The step's results on the mesh, by path.
        on_one: The reference's results.
        start: The reference's state before the first step.
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
            f"step {step}: the step returns {' and '.join(parts)}. What it returns "
            "must not depend on the number of devices."
        )
        raise VerificationError(msg)
    moved = changes(on_one, start)
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
    kinds = [_kind_text(values), _kind_text(expected)]
    if kinds[0] != kinds[1]:
        text = f"it is {kinds[0]} on the mesh and {kinds[1]} on one device"
        return Difference(path, array, step, np.inf, 0.0, kinds=text)
    distances = _distances(values, expected)
    allowed = 0.0
    if jnp.issubdtype(values.dtype, jnp.inexact):
        allowed = tolerance.allowed(values.dtype, _largest(expected), _largest(change))
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
        distances=distances,
    )


def _distances(values: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Returns how far every two elements are apart; infinite where one is NaN."""
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        # As Python's integers: no dtype holds the difference of all of them.
        distances = np.zeros(values.shape)
        unlike = values != expected
        integers = (x[unlike].astype(object) for x in (values, expected))
        distances[unlike] = abs(np.subtract(*integers))
        return distances
    values, expected = _wide(values), _wide(expected)
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        distances = np.abs(values - expected)
    is_same = (values == expected) | (np.isnan(values) & np.isnan(expected))
    distances = np.where(is_same, 0.0, distances)
    return np.where(np.isnan(distances), np.inf, distances)


def _largest(values: np.ndarray) -> float:
    values = _wide(values)
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def _wide(values: np.ndarray) -> np.ndarray:
    is_complex = jnp.issubdtype(values.dtype, jnp.complexfloating)
    return values.astype(np.complex128 if is_complex else np.float64)


def _kind_text(x: np.ndarray) -> str:
    return _render.array_text(x.dtype, x.shape)
