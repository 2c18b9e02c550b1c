"""Short names for the types in signatures.

`Any` tells a reader nothing. These names do, where Python's types cannot.
"""

from typing import Any, TypeAlias


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
"""A Flax variable, or one of Flax's boxes that add metadata to an array."""
