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
        high: The sum, rounded to float32.
        low: What the rounding left out.
    """

    high: Any
    low: Any

    @classmethod
    def zeros(cls, shape: tuple[int, ...] = ()) -> "Total":
        """Returns an empty sum, which lies on no device yet."""
        return cls(np.zeros(shape, np.float32), np.zeros(shape, np.float32))

    @property
    def value(self) -> jax.Array:
        """The sum, in float32."""
        return jnp.add(self.high, self.low)

    def add(self, x: Any) -> "Total":
        """Returns the sum with a float32 array added, element by element."""
        return self.merge(Total(x, jnp.zeros_like(x)))

    def merge(self, other: "Total") -> "Total":
        """Returns the sum of two sums."""
        high, error = _two_sum(self.high, other.high)
        return Total(*_two_sum(high, jnp.add(self.low, other.low) + error))


def _two_sum(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
    """Returns a sum rounded to float32, and exactly what the rounding left out."""
    a, b = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
    rounded = a + b
    b_part = rounded - a
    error = (a - (rounded - b_part)) + (b - b_part)
    return rounded, jnp.where(jnp.isfinite(rounded), error, 0)
