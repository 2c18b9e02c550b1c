"""Arrays that are created sharded, never in full on one device: JAX's own creators.

`jnp.zeros` and the like take a sharding as `device=`; here they take a layout, which is
checked against the shape. Random values have the bits of JAX's on one device in any
layout.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import ArrayLike, DTypeLike

from meshlayout import _checks, _jax
from meshlayout._annotations import DType
from meshlayout.arrays.leaf import is_concrete_array, move, with_full_rank
from meshlayout.arrays.tree import type_text
from meshlayout.errors import LayoutError
from meshlayout.layout import Layout


def zeros(
    shape: int | Sequence[int], layout: Layout, dtype: DTypeLike | None = None
) -> jax.Array:
    """Creates an array of zeros, each device only its shard.

    Args:
        shape: Shape of the whole array.
        layout: The layout.
        dtype: Dtype of the elements; by default JAX's float.

    Raises:
        LayoutError: If the layout does not fit the shape.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> x = ml.arrays.zeros((4, 8), mesh.layout("batch", "model"))
        >>> x.addressable_shards[0].data.shape
        (2, 2)
    """
    return full(shape, 0, layout, float if dtype is None else dtype)


def ones(
    shape: int | Sequence[int], layout: Layout, dtype: DTypeLike | None = None
) -> jax.Array:
    """Creates an array of ones, each device only its shard; see `zeros`."""
    return full(shape, 1, layout, float if dtype is None else dtype)


def full(
    shape: int | Sequence[int],
    value: ArrayLike,
    layout: Layout,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Creates an array of one value, each device only its shard.

    Args:
        shape: Shape of the whole array.
        value: The value of every element.
        layout: The layout.
        dtype: Dtype of the elements; by default that of the value.

    Raises:
        LayoutError: If the layout does not fit the shape.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 8})
        >>> ml.arrays.full((8,), 7, mesh.layout("batch")).dtype
        dtype('int32')
    """
    shape, layout = _fitting(shape, layout, dtype)
    make = functools.partial(jnp.full, shape, value, dtype)
    return _created(lambda sharding: make(device=sharding), layout)


def arange(
    start: float,
    stop: float | None = None,
    step: float | None = None,
    *,
    layout: Layout,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Creates evenly spaced values, as `jnp.arange` does, each device only its shard.

    Args:
        start: The first value; without `stop`, the end, and the first value is 0.
        stop: The exclusive end.
        step: The distance between values; by default 1.
        layout: The layout.
        dtype: Dtype of the elements; by default that of the arguments.

    Raises:
        LayoutError: If the layout does not fit.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 8})
        >>> x = ml.arrays.arange(0, 16, 2, layout=mesh.layout("batch"))
        >>> ml.to_numpy(x).tolist()
        [0, 2, 4, 6, 8, 10, 12, 14]
    """
    make = functools.partial(jnp.arange, start, stop, step, dtype)
    described = jax.eval_shape(make)
    _, layout = _fitting(described.shape, layout, described.dtype)
    return _created(lambda sharding: make(device=sharding), layout)


def normal(
    key: jax.Array,
    shape: int | Sequence[int],
    layout: Layout,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Creates an array of standard normal values, each device only its shard.

    The values are those of `jax.random.normal`, bit for bit, in any layout.

    Args:
        key: A PRNG key.
        shape: Shape of the whole array.
        layout: The layout.
        dtype: A float dtype; by default JAX's float.

    Raises:
        LayoutError: If the layout does not fit the shape.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 8})
        >>> x = ml.arrays.normal(jax.random.key(0), (8, 4), mesh.layout("batch", None))
        >>> bool((ml.to_numpy(x) == jax.random.normal(jax.random.key(0), (8, 4))).all())
        True
    """
    return _random(jax.random.normal, key, shape, layout, dtype)


def uniform(
    key: jax.Array,
    shape: int | Sequence[int],
    layout: Layout,
    dtype: DTypeLike | None = None,
    minval: ArrayLike = 0.0,
    maxval: ArrayLike = 1.0,
) -> jax.Array:
    """Creates an array of uniform values in `[minval, maxval)`; see `normal`.

    Args:
        key: A PRNG key.
        shape: Shape of the whole array.
        layout: The layout.
        dtype: A float dtype; by default JAX's float.
        minval: Inclusive lower bound.
        maxval: Exclusive upper bound.
    """
    return _random(jax.random.uniform, key, shape, layout, dtype, minval, maxval)


def _random(
    make: Callable[..., jax.Array],
    key: jax.Array,
    shape: int | Sequence[int],
    layout: Layout,
    dtype: DTypeLike | None,
    *bounds: ArrayLike,
) -> jax.Array:
    dtype = jax.dtypes.canonicalize_dtype(float if dtype is None else dtype)
    shape, layout = _fitting(shape, layout, dtype)
    if is_concrete_array(key) and _jax.is_committed(key):
        # jit takes no key of other devices.
        key = _jax.put(key, layout.mesh.layout(...).with_rank(key.ndim).sharding)

    def created(sharding: NamedSharding) -> jax.Array:
        return _compiled(make, shape, dtype, sharding)(key, *bounds)

    return _created(created, layout)


# jit caches by function object, and a partial is a new one in every call.
@functools.lru_cache(maxsize=512)
def _compiled(
    make: Callable[..., jax.Array],
    shape: tuple[int, ...],
    dtype: DType,
    sharding: NamedSharding,
) -> Callable[..., jax.Array]:
    def create(key: jax.Array, *bounds: Any) -> jax.Array:
        return make(key, shape, dtype, *bounds)

    return jax.jit(create, out_shardings=sharding)


def _fitting(
    shape: int | Sequence[int], layout: Layout, dtype: DTypeLike | None
) -> tuple[tuple[int, ...], Layout]:
    """Returns a shape as a tuple, and a user's layout of its rank."""
    entries = shape if isinstance(shape, (list, tuple)) else [shape]
    sizes = _checks.shape(entries, error=LayoutError)
    where = type_text(sizes, dtype)
    full_layout = with_full_rank(layout, len(sizes), where, match=False)
    full_layout.check(sizes, where)
    return sizes, full_layout


def _created(make: Callable[[NamedSharding], jax.Array], layout: Layout) -> jax.Array:
    """Creates an array in the devices' main memory, and moves it where it belongs."""
    main = layout.with_memory_kind(None).sharding
    with contextlib.nullcontext() if _jax.is_staged(None) else _jax.no_mesh():
        x = make(main)
    is_there = not _jax.is_staged(x) and _jax.sharding_of(x) == layout.sharding
    return x if is_there else move(x, layout, type_text(x.shape, x.dtype))
