"""Arrays created sharded, by JAX's own functions, never whole on one device."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from meshlayout import _checks, _jax
from meshlayout._annotations import PyTree
from meshlayout.arrays import placement
from meshlayout.arrays.placement import LayoutLike, for_each, full_rank, relayout
from meshlayout.layout import Layout


Shape: TypeAlias = int | Sequence[int]


@_checks.user_call
def zeros(shape: Shape, layout: Layout, dtype: DTypeLike | None = None) -> jax.Array:
    """Creates an array of zeros, as `jnp.zeros` does, each device only its shard.

    A layout that does not fit the shape is a LayoutError.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> x = ml.arrays.zeros((4, 8), mesh.layout("batch", "model"))
        >>> x.addressable_shards[0].data.shape
        (2, 2)
    """
    return _created(functools.partial(jnp.zeros, shape, dtype), layout)


@_checks.user_call
def ones(shape: Shape, layout: Layout, dtype: DTypeLike | None = None) -> jax.Array:
    """Creates an array of ones, as `jnp.ones` does, each device only its shard."""
    return _created(functools.partial(jnp.ones, shape, dtype), layout)


@_checks.user_call
def full(
    shape: Shape, value: ArrayLike, layout: Layout, dtype: DTypeLike | None = None
) -> jax.Array:
    """Creates an array of one value, as `jnp.full` does, each device only its shard."""
    return _created(functools.partial(jnp.full, shape, value, dtype), layout)


@_checks.user_call
def arange(
    start: float,
    stop: float | None = None,
    step: float | None = None,
    *,
    layout: Layout,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Creates evenly spaced values, as `jnp.arange` does inside jit; see `zeros`."""
    # Not with `device=`, for which JAX makes the array whole on one device first.
    create = functools.partial(jnp.arange, start, stop, step, dtype)
    with _no_set_mesh():
        return call_with_layout(create, layout)


@_checks.user_call
def normal(
    key: jax.Array, shape: Shape, layout: Layout, dtype: DTypeLike | None = None
) -> jax.Array:
    """Creates the values of `jax.random.normal`, bit for bit, each device its shard."""
    return _random(jax.random.normal, shape, layout, dtype, key)


@_checks.user_call
def uniform(
    key: jax.Array,
    shape: Shape,
    layout: Layout,
    dtype: DTypeLike | None = None,
    minval: ArrayLike = 0.0,
    maxval: ArrayLike = 1.0,
) -> jax.Array:
    """Creates uniform values in `[minval, maxval)`; see `normal`."""
    return _random(jax.random.uniform, shape, layout, dtype, key, minval, maxval)


@_checks.user_call
def call_with_layout(
    fn: Callable[..., Any], layout: LayoutLike, *args: Any, **kwargs: Any
) -> Any:
    """Calls a function so that its results are created in a layout.

    The function is compiled, and no device ever holds a full result. Arguments with
    arrays are traced; all others (shapes, dtypes, numbers) must be hashable.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> eye = ml.arrays.call_with_layout(jnp.eye, mesh.layout("batch", "model"), 8)
        >>> eye.addressable_shards[0].data.shape
        (4, 2)
    """

    def is_static(x: PyTree) -> bool:
        kinds = (jax.Array, np.ndarray, np.generic)
        return not any(isinstance(leaf, kinds) for leaf in jax.tree.leaves(x))

    static: Any = {
        "static_argnums": [i for i, x in enumerate(args) if is_static(x)],
        "static_argnames": [name for name, x in kwargs.items() if is_static(x)],
    }
    shapes = jax.eval_shape(jax.jit(fn, **static), *args, **kwargs)
    layouts = for_each(full_rank, shapes, placement.broadcast(layout, shapes))
    # jax 0.7.2 cannot shard results without elements.
    out = [
        None if 0 in leaf.shape else layout.with_memory_kind(None).sharding
        for leaf, layout in zip(jax.tree.leaves(shapes), layouts, strict=True)
    ]
    structure = jax.tree.structure(shapes)
    jitted = jax.jit(fn, **static, out_shardings=structure.unflatten(out))
    # Inside jit, `out_shardings` cannot set Explicit axes, nor every kind of memory.
    return relayout(jitted(*args, **kwargs), structure.unflatten(layouts))


def _random(
    sample: Callable[..., jax.Array], shape: Shape, layout: Layout, dtype: Any, *xs: Any
) -> jax.Array:
    # jit refuses arrays on other devices, or on another mesh than the current one.
    replicated = layout.mesh.layout(...)
    key, *bounds = [x if isinstance(x, Tracer) else relayout(x, replicated) for x in xs]
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = jax.dtypes.canonicalize_dtype(float if dtype is None else dtype)
    with _no_set_mesh():
        return call_with_layout(sample, layout, key, shape, dtype, *bounds)


def _created(create: Callable[..., jax.Array], layout: Layout) -> jax.Array:
    """Creates an array in the devices' main memory, and moves it to its own."""
    [layout] = for_each(full_rank, jax.eval_shape(create), [layout])
    with _no_set_mesh():
        x = create(device=layout.with_memory_kind(None).sharding)
    return relayout(x, layout)


def _no_set_mesh() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if _jax.is_staged(None) else _jax.no_mesh()
