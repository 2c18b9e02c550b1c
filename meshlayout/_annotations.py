"""Short names for signatures: what a user may hand in, said once.

`Any` in a signature tells a reader nothing. Where Python's types cannot say more (any
pytree is allowed), the name does; where they can, the type itself is used.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding


PyTree: TypeAlias = Any
"""Any tree that JAX knows: dicts, tuples, NNX modules and states, dataclasses."""

Batch: TypeAlias = Any
"""A pytree of arrays with one row per example, all of the same number of rows."""

Leaf: TypeAlias = Any
"""One leaf of a pytree: an array, a `ShapeDtypeStruct`, or a Python number."""

DType: TypeAlias = Any
"""A dtype, or what NumPy or JAX takes for one; PRNG keys have dtypes of their own."""

Equation: TypeAlias = Any
"""One operation of a jaxpr, which may hold other jaxprs among its parameters."""

Box: TypeAlias = Any
"""A Flax variable, or a box of Flax's around an array that says more about it."""

AbstractArray: TypeAlias = jax.Array | jax.ShapeDtypeStruct
"""An array, or the shape, dtype and sharding of one."""

Metadata: TypeAlias = Mapping[str, Any]
"""Values written next to saved arrays: those that JSON can hold, by name."""

AnySharding: TypeAlias = NamedSharding | Sharding | PartitionSpec
"""What JAX takes for where an array goes."""
