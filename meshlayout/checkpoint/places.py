"""A leaf that was saved, on its way to its place in a state."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _jax, _render
from meshlayout.checkpoint import orbax
from meshlayout.checkpoint.manifest import SavedLeaf
from meshlayout.checkpoint.matching import Pair, is_number
from meshlayout.checkpoint.snapshot import PYTHON_TYPES, bytes_to_bits
from meshlayout.checkpoint.wanted import Slot, check_fits
from meshlayout.errors import CheckpointError


# What JAX makes something else of without x64.
_OF_64_BITS = ("int64", "uint64", "float64", "complex128")


@dataclass(frozen=True)
class Place:
    """A leaf that was saved, and the place in the state that it goes to.

    Attributes:
        slot: The place.
        pair: What was matched.
        leaf: What the manifest says of the leaf.
    """

    slot: Slot
    pair: Pair
    leaf: SavedLeaf

    def check(self) -> None:
        """Raises if JAX cannot hold the dtype, or the shape does not fit its place."""
        if self.sharding is not None:
            check_fits(self.sharding, stored_shape(self.leaf), str(self.pair.saved))
        if self.on_host or is_number(self.pair.dtype) or self.slot.is_key:
            return
        used = _jax.canonical_dtype(self.pair.dtype)
        if used != self.pair.dtype:
            msg = (
                f"{self.pair.saved}: JAX makes {used} of {self.pair.dtype}. Ask for it "
                f"with dtype='{used}', or set jax_enable_x64."
            )
            raise CheckpointError(msg)

    @property
    def on_host(self) -> bool:
        """Whether NumPy or Python is to have it."""
        if is_number(self.slot.leaf.dtype):
            return True
        return isinstance(self.slot.value, (np.ndarray, np.generic)) and (
            not self.slot.moves
        )

    @property
    def sharding(self) -> Any:
        """Where it is read to; None for the host."""
        sharding = self.slot.sharding
        if sharding is None or self.on_host:
            return None
        if isinstance(sharding, NamedSharding):
            spec = list(sharding.spec)
            if self.slot.is_key:
                rank = len(self.slot.value.shape)
                spec += [None] * (rank + 1 - len(spec))
            return NamedSharding(sharding.mesh, PartitionSpec(*spec))
        return sharding

    @property
    def _is_read_on_host(self) -> bool:
        """Whether no device reads it: Orbax's threads need x64 for 64 bits on one."""
        if self.sharding is None:
            return True
        has_64_bits = np.dtype(self.leaf.stored).name in _OF_64_BITS
        return has_64_bits and not _jax.x64_in_all_threads()

    def request(self) -> Any:
        """Returns what is asked of Orbax."""
        shape, dtype = stored_shape(self.leaf), np.dtype(self.leaf.stored)
        if self._is_read_on_host:
            return orbax.OnHost(shape, dtype)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)

    def bits(self, stored: Any) -> Any:
        """Returns the array in the dtype it was saved in."""
        dtype = words_dtype(self.leaf)
        if self._is_read_on_host:
            return host_bits(np.asarray(stored), self.leaf)
        if stored.dtype == dtype:
            return stored
        cast = jax.jit(bytes_to_bits, static_argnums=1, out_shardings=self.sharding)
        return cast(stored, dtype)

    def empty(self) -> Any:
        """Returns the value of a leaf that is in no array file."""
        if self.leaf.kind == "python":
            return np.asarray(python_value(self.leaf))
        zeros = np.zeros(stored_shape(self.leaf), words_dtype(self.leaf))
        return zeros if self.sharding is None else jax.device_put(zeros, self.sharding)

    def finish(self, value: Any) -> Any:
        """Returns a value as the state wants it: its dtype, place and type."""
        slot = self.slot
        if is_number(slot.leaf.dtype):
            return self._number(value)
        where = str(self.pair.saved)
        if not slot.is_key:
            dtype = self.pair.dtype
            if is_number(saved_dtype(self.leaf)):
                dtype = _jax.canonical_dtype(slot.leaf.dtype)
            value = _cast(value, dtype, self.sharding, where)
        if self.on_host:
            is_scalar = isinstance(slot.value, np.generic)
            return value[()] if is_scalar else np.array(value)
        if slot.sharding is None:
            value = jax.device_put(value)
        elif isinstance(value, np.ndarray) or value.sharding != slot.sharding:
            value = self._move(value)
        if slot.is_key:
            impl = _jax.key_impl(slot.value.dtype)
            value = jax.random.wrap_key_data(value, impl=impl)
            if slot.sharding is not None:
                value = jax.device_put(value, slot.sharding)
            return value
        is_weak = bool(getattr(slot.value, "weak_type", False))
        return _jax.with_weak_type(value, is_weak) if is_weak else value

    def _number(self, value: Any) -> Any:
        if self.leaf.kind == "python":
            return self.slot.leaf.dtype(python_value(self.leaf))
        return self.slot.leaf.dtype(np.asarray(value).item())

    def _move(self, value: Any) -> Any:
        if self.slot.is_key:
            return jax.device_put(value, self.sharding)
        return jax.device_put(value, self.slot.sharding)


# What the manifest says.


def saved_dtype(leaf: SavedLeaf) -> Any:
    """Returns the dtype of a saved leaf; of Python's numbers, their type."""
    if leaf.kind == "python":
        return PYTHON_TYPES[leaf.dtype]
    if leaf.kind == "key":
        impl = leaf.key_impl
        return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
    return jnp.dtype(leaf.dtype)


def words_dtype(leaf: SavedLeaf) -> Any:
    """Returns the dtype of what is read of a leaf; of PRNG keys, of their words."""
    return np.dtype("uint32") if leaf.kind == "key" else jnp.dtype(leaf.dtype)


def stored_shape(leaf: SavedLeaf) -> tuple[int, ...]:
    """Returns the shape of what is read of a leaf; of PRNG keys, of their words."""
    if leaf.kind != "key":
        return leaf.shape
    keys = jax.ShapeDtypeStruct(leaf.shape, saved_dtype(leaf))
    return jax.eval_shape(jax.random.key_data, keys).shape


def python_value(leaf: SavedLeaf) -> Any:
    """Returns a number of Python's."""
    if leaf.dtype == "complex":
        return complex(*leaf.value)
    return PYTHON_TYPES[leaf.dtype](leaf.value)


def host_bits(x: np.ndarray[Any, Any], leaf: SavedLeaf) -> np.ndarray[Any, Any]:
    """Returns what was read, in the dtype that was saved."""
    dtype = words_dtype(leaf)
    return x if x.dtype == dtype else x.view(dtype)


# Another dtype.


def _cast(value: Any, dtype: Any, sharding: Any, where: str) -> Any:
    """Returns values in another dtype; raises if one is beyond what it can hold."""
    if value.dtype == dtype:
        return value
    if isinstance(value, np.ndarray):
        with np.errstate(over="ignore", invalid="ignore"):
            made = value.astype(dtype)
            lost = bool(np.any(_lost(value, made, np)))
    else:
        both = jax.jit(_converted, static_argnums=1, out_shardings=(sharding, None))
        made, any_lost = both(value, np.dtype(dtype))
        lost = bool(_jax.to_host(any_lost))
    if lost:
        kind = _render.dtype_text(dtype)
        msg = (
            f"{where}: it holds values that {kind} cannot hold. Ask for another dtype, "
            "or leave this array out of dtype={pattern: dtype}."
        )
        raise CheckpointError(msg)
    return made


def _converted(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    made = x.astype(dtype)
    return made, jnp.any(_lost(x, made, jnp))


def _lost(x: Any, made: Any, numpy: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.integer):
        return (made.astype(x.dtype) != x) | ((made < 0) != (x < 0))
    return numpy.isfinite(x) & ~numpy.isfinite(made)
