"""Sums that stay exact: two float32 numbers for one."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Total:
    """A sum, or an array of sums, kept as a float32 number and what it rounds off.

    One float32 number stops counting at 2**24; the two count whole numbers exactly
    up to 2**48.

    Attributes:
        parts: float32 of shape (2, ...): the sums, rounded, and what the rounding left
            out. In one array, because every array costs a step host time.
    """

    parts: Any

    @classmethod
    def zeros(cls, shape: tuple[int, ...] = ()) -> "Total":
        """Returns an empty sum, which lies on no device yet."""
        return cls(np.zeros((2, *shape), np.float32))

    @property
    def high(self) -> Any:
        """The sum, rounded to float32."""
        return self.parts[0]

    @property
    def low(self) -> Any:
        """What the rounding left out."""
        return self.parts[1]

    @property
    def value(self) -> jax.Array:
        """The sum, in float32."""
        return jnp.sum(self.parts, axis=0)

    def add(self, x: Any) -> "Total":
        """Returns the sum with a float32 array added, element by element."""
        return self._with(x, 0)

    def merge(self, other: "Total") -> "Total":
        """Returns the sum of two sums."""
        return self._with(other.high, other.low)

    def _with(self, high: Any, low: Any) -> "Total":
        rounded, error = _two_sum(self.high, high)
        return Total(jnp.stack(_two_sum(rounded, jnp.add(self.low, low) + error)))


def _two_sum(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
    """Returns a sum rounded to float32, and exactly what the rounding left out."""
    a, b = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
    rounded = a + b
    b_part = rounded - a
    error = (a - (rounded - b_part)) + (b - b_part)
    return rounded, jnp.where(jnp.isfinite(rounded), error, 0)
