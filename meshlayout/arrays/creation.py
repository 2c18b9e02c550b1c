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
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from meshlayout import _jax
from meshlayout.arrays.placement import (
    LayoutLike,
    broadcast,
    for_each,
    full_rank,
    relayout,
)
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
    return _created(functools.partial(jnp.zeros, shape, dtype), layout)


def ones(
    shape: int | Sequence[int], layout: Layout, dtype: DTypeLike | None = None
) -> jax.Array:
    """Creates an array of ones, each device only its shard; see `zeros`."""
    return _created(functools.partial(jnp.ones, shape, dtype), layout)


def full(
    shape: int | Sequence[int],
    value: ArrayLike,
    layout: Layout,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Creates an array of one value, each device only its shard; see `zeros`."""
    return _created(functools.partial(jnp.full, shape, value, dtype), layout)


def arange(
    start: float,
    stop: float | None = None,
    step: float | None = None,
    *,
    layout: Layout,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Creates evenly spaced values, as `jnp.arange` does, each device only its shard.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 8})
        >>> x = ml.arrays.arange(0, 16, 2, layout=mesh.layout("batch"))
        >>> ml.to_numpy(x).tolist()
        [0, 2, 4, 6, 8, 10, 12, 14]
    """
    return _created(functools.partial(jnp.arange, start, stop, step, dtype), layout)


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
    """Creates an array of uniform values in `[minval, maxval)`; see `normal`."""
    return _random(jax.random.uniform, key, shape, layout, dtype, minval, maxval)


def call_with_layout(
    fn: Callable[..., Any], layout: LayoutLike, *args: Any, **kwargs: Any
) -> Any:
    """Calls a function so that its results are created in a layout.

    Use this for arrays that no other function of `ml.arrays` creates, such as
    `jnp.eye`. The function is compiled, and no device ever holds a full result.
    Arguments with arrays are traced; all others (shapes, dtypes, numbers) are compiled
    in, so that a function is compiled once for the same ones.

    Args:
        fn: Any function that `jax.jit` can compile.
        layout: The layout of the result, or a tree of layouts for a pytree.
        *args: Arguments of the function.
        **kwargs: Keyword arguments of the function.

    Returns:
        The results of the function.

    Raises:
        LayoutError: If a layout does not fit a result.

    Example:
        >>> import jax.numpy as jnp
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> eye = ml.arrays.call_with_layout(jnp.eye, mesh.layout("batch", "model"), 8)
        >>> eye.addressable_shards[0].data.shape
        (4, 2)
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    kinds = (jax.Array, np.ndarray, np.generic)
    arrays = [leaf for leaf in leaves if isinstance(leaf, kinds)]
    constants = tuple(
        None if isinstance(leaf, kinds) else (type(leaf), leaf) for leaf in leaves
    )
    call = _with_constants(fn, treedef, constants)
    shapes = jax.eval_shape(call, *arrays)
    layouts = for_each(_fitting, shapes, broadcast(layout, shapes))
    # jax 0.7.2 cannot shard results without elements.
    out = jax.tree.structure(shapes).unflatten(
        None if 0 in leaf.shape else layout.with_memory_kind(None).sharding
        for leaf, layout in zip(jax.tree.leaves(shapes), layouts, strict=True)
    )
    made = jax.jit(call, out_shardings=out)(*arrays)
    # Inside jit, `out_shardings` has no effect on Explicit axes, and not every backend
    # can compile results into another kind of memory.
    return relayout(made, jax.tree.structure(shapes).unflatten(layouts))


# jit caches by function object.
@functools.lru_cache(maxsize=512)
def _with_constants(
    fn: Callable[..., Any], treedef: Any, constants: tuple[Any, ...]
) -> Callable[..., Any]:
    """Returns a function of the arrays among some arguments."""

    def call(*arrays: Any) -> Any:
        rest = iter(arrays)
        leaves = [next(rest) if pair is None else pair[1] for pair in constants]
        args, kwargs = treedef.unflatten(leaves)
        return fn(*args, **kwargs)

    return call


def _fitting(described: jax.ShapeDtypeStruct, layout: object) -> Layout:
    fitting = full_rank(layout, described.ndim)
    fitting.check(described.shape)
    return fitting


def _random(
    make: Callable[..., jax.Array],
    key: jax.Array,
    shape: int | Sequence[int],
    layout: Layout,
    dtype: DTypeLike | None,
    *bounds: ArrayLike,
) -> jax.Array:
    # jit takes no arrays of other devices, or of another mesh that was set.
    arguments = [
        x if isinstance(x, Tracer) else relayout(x, layout.mesh.layout(...))
        for x in (key, *bounds)
    ]
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = jax.dtypes.canonicalize_dtype(float if dtype is None else dtype)
    with _no_set_mesh():
        return call_with_layout(
            make, layout, arguments[0], sizes, dtype, *arguments[1:]
        )


def _created(make: Callable[..., jax.Array], layout: Layout) -> jax.Array:
    """Creates an array in the devices' main memory, and moves it where it belongs."""
    shapes = jax.eval_shape(make)
    [layout] = for_each(_fitting, shapes, [layout])
    with _no_set_mesh():
        x = make(device=layout.with_memory_kind(None).sharding)
    return relayout(x, layout)


def _no_set_mesh() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which the layout's mesh counts, and no mesh that is set."""
    return contextlib.nullcontext() if _jax.is_staged(None) else _jax.no_mesh()
