"""Two values of one leaf, and how far they are from each other."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout import _paths, _render
from meshlayout.arrays import to_numpy
from meshlayout.testing.failure import VerificationError, leaf_text


@dataclass(frozen=True)
class Difference:
    """How far the values of one leaf are apart, where they are farthest.

    Attributes:
        path: The leaf's name, beginning with `state` or `aux`.
        array: Its dtype, shape and layout on the mesh, as `f32[512@batch, 10]`.
        step: The step after which it was compared, from 1.
        largest: The largest difference; infinite where one value alone is NaN.
        allowed: The largest difference that is let pass.
        index: Where it is.
        on_mesh: The value there, as text.
        on_one_device: The value there on one device.
        num_different: How many elements differ by more than is allowed.
        size: How many elements there are.
        kinds: Dtypes and shapes where they differ already, or an empty text.
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
        """Whether the two values are not the same."""
        return bool(self.kinds) or self.num_different > 0

    @property
    def badness(self) -> tuple[bool, float]:
        """What the worst of several steps is found by."""
        relative = self.largest / self.allowed if self.allowed else self.largest
        return self.is_too_large, relative


@dataclass(frozen=True)
class Tolerance:
    """How far floats may be apart: `atol + rtol * (the leaf's largest value)`.

    None stands for what the leaf's dtype suggests.
    """

    rtol: float | None
    atol: float | None

    def of(self, dtype: Any) -> tuple[float, float]:
        """Returns the relative and absolute tolerance for a dtype."""
        eps = float(jnp.finfo(dtype).eps)
        # Sums are made in float32 or better, in another order on the mesh, and are
        # then rounded to the leaf's own dtype.
        of_sums = min(eps, float(jnp.finfo(jnp.float32).eps))
        rtol = 128 * of_sums + 4 * eps if self.rtol is None else self.rtol
        atol = of_sums / 8 if self.atol is None else self.atol
        return rtol, atol


def compare(
    name: str, step: int, on_mesh: Any, on_one: Any, tolerance: Tolerance
) -> list[Difference]:
    """Compares two trees leaf by leaf, in JAX's order.

    Raises:
        VerificationError: If the trees have other leaves.
    """
    here, there = _named(name, on_mesh), _named(name, on_one)
    if here.keys() != there.keys():
        lost = [*(repr(path) for path in here if path not in there)]
        extra = [*(repr(path) for path in there if path not in here)]
        parts = [
            *([f"{', '.join(lost[:3])} only on the mesh"] if lost else []),
            *([f"{', '.join(extra[:3])} only on one device"] if extra else []),
        ]
        msg = (
            f"step {step}: the step returns {' and '.join(parts)}. What it returns "
            "must not depend on the number of devices."
        )
        raise VerificationError(msg)
    return [
        _difference(path, step, leaf, there[path], tolerance)
        for path, leaf in here.items()
    ]


def _named(name: str, tree: Any) -> dict[str, Any]:
    return {
        "/".join(filter(None, [name, leaf.path])): leaf.value
        for leaf in _paths.flatten(tree).leaves
    }


def _difference(
    path: str, step: int, on_mesh: Any, on_one: Any, tolerance: Tolerance
) -> Difference:
    array = leaf_text(on_mesh)
    kinds = [_kind_text(on_mesh), _kind_text(on_one)]
    if kinds[0] != kinds[1]:
        text = f"it is {kinds[0]} on the mesh and {kinds[1]} on one device"
        return Difference(path, array, step, np.inf, 0.0, kinds=text)
    a, b = np.asarray(to_numpy(on_mesh)), np.asarray(to_numpy(on_one))
    apart, allowed = _apart(a, b, tolerance)
    if not a.size:
        return Difference(path, array, step, 0.0, allowed)
    index = tuple(map(int, np.unravel_index(apart.argmax(), apart.shape)))
    return Difference(
        path,
        array,
        step,
        float(apart[index]),
        allowed,
        index,
        f"{a[index]}",
        f"{b[index]}",
        int(np.count_nonzero(apart > allowed)),
        a.size,
    )


def _apart(
    a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], tolerance: Tolerance
) -> tuple[np.ndarray[Any, Any], float]:
    """Returns how far every two elements are apart, and how far they may be."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        # As Python's integers: no dtype holds the difference of all of them.
        unlike = np.zeros(a.shape)
        where = a != b
        unlike[where] = abs(a[where].astype(object) - b[where].astype(object))
        return unlike, 0.0
    rtol, atol = tolerance.of(a.dtype)
    is_complex = jnp.issubdtype(a.dtype, jnp.complexfloating)
    a, b = (x.astype(np.complex128 if is_complex else np.float64) for x in (a, b))
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        apart = np.abs(a - b)
    apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, apart)
    apart = np.where(np.isnan(apart), np.inf, apart)
    finite = np.abs(b[np.isfinite(b)])
    return apart, atol + rtol * float(finite.max(initial=0.0))


def _kind_text(x: Any) -> str:
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
    return _render.array_text(x.dtype, x.shape)
