"""Arrays that are created sharded, never in full on one device.

Values do not depend on the layout: random numbers have the bits of JAX's on one device,
for which some arrays are computed in another sharding and moved (see `_bit_exact`), and
`arange` rounds as often as `jnp.arange` does.
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from meshlayout import _checks, _jax
from meshlayout._annotations import DType, Leaf, PyTree
from meshlayout._bit_exact import bit_exact_sharding
from meshlayout._host_arrays import check_cast
from meshlayout.arrays.calls import call_with_layout, finish
from meshlayout.arrays.leaf import (
    as_array,
    is_array,
    is_concrete_array,
    with_full_rank,
)
from meshlayout.arrays.tree import (
    LayoutLike,
    Tree,
    describe,
    first_line,
    type_text,
)
from meshlayout.errors import LayoutError
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh


ShapeLike: TypeAlias = int | Sequence[int] | Any
"""A shape, or a pytree of shapes."""


def zeros(shape: ShapeLike, layout: LayoutLike, dtype: DTypeLike | None = None) -> Any:
    """Creates arrays of zeros, each device only its shard.

    Args:
        shape: Shape of the whole array, or a pytree of shapes.
        layout: The layout, or a tree of layouts.
        dtype: Dtype of the elements; by default JAX's float.

    Raises:
        LayoutError: If the layout does not fit the shape, or `dtype` is not a dtype.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> ml.arrays.zeros((4, 8), mesh.layout("batch", "model")).addressable_shards[
        ...     0
        ... ].data.shape
        (2, 2)
    """
    return _create(_full, shape, layout, _dtype(dtype, float), (0,))


def ones(shape: ShapeLike, layout: LayoutLike, dtype: DTypeLike | None = None) -> Any:
    """Creates arrays of ones, each device only its shard; see `zeros`."""
    return _create(_full, shape, layout, _dtype(dtype, float), (1,))


def full(
    shape: ShapeLike,
    value: ArrayLike,
    layout: LayoutLike,
    dtype: DTypeLike | None = None,
) -> Any:
    """Creates arrays of one value, each device only its shard.

    Args:
        shape: Shape of the whole array, or a pytree of shapes.
        value: The value of every element.
        layout: The layout, or a tree of layouts.
        dtype: Dtype of the elements; by default that of the value.

    Raises:
        LayoutError: As for `zeros`, and if the value is not a scalar.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 8})
        >>> ml.arrays.full((8,), 7, mesh.layout("batch")).dtype
        dtype('int32')
    """
    if not is_array(value) or np.shape(value):
        msg = (
            f"full: value must be a single number, got {describe(value)}. To place an "
            "array, use relayout(x, layout)."
        )
        raise LayoutError(msg)
    if not isinstance(value, _PYTHON_NUMBERS):
        value = as_array(value, "full: value")
    dtype = _dtype(dtype, None)
    if dtype is not None:
        check_cast(value, dtype, "full: value")
        if not jnp.issubdtype(dtype, np.complexfloating):
            value = jnp.real(value) if jnp.iscomplexobj(value) else value
    return _create(_full, shape, layout, dtype, (value,))


def normal(
    key: PyTree, shape: ShapeLike, layout: LayoutLike, dtype: DTypeLike | None = None
) -> Any:
    """Creates arrays of standard normal values, each device only its shard.

    The values are those of `jax.random.normal`, bit for bit, in any layout.

    Args:
        key: A PRNG key; for a pytree of shapes, a pytree of keys with its structure.
        shape: Shape of the whole array, or a pytree of shapes.
        layout: The layout, or a tree of layouts.
        dtype: A float dtype; by default JAX's float.

    Raises:
        LayoutError: As for `zeros`, and if the key is not a PRNG key.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 8})
        >>> x = ml.arrays.normal(jax.random.key(0), (8, 4), mesh.layout("batch", None))
        >>> bool((ml.to_numpy(x) == jax.random.normal(jax.random.key(0), (8, 4))).all())
        True
    """
    return _create(_random, shape, layout, _dtype(dtype, float), (), keys=key)


def uniform(
    key: PyTree,
    shape: ShapeLike,
    layout: LayoutLike,
    dtype: DTypeLike | None = None,
    minval: ArrayLike = 0.0,
    maxval: ArrayLike = 1.0,
) -> Any:
    """Creates arrays of uniform values in `[minval, maxval)`, each device its shard.

    The values are those of `jax.random.uniform`, bit for bit, in any layout.

    Args:
        key: A PRNG key; for a pytree of shapes, a pytree of keys with its structure.
        shape: Shape of the whole array, or a pytree of shapes.
        layout: The layout, or a tree of layouts.
        dtype: A float dtype; by default JAX's float.
        minval: Inclusive lower bound.
        maxval: Exclusive upper bound.

    Raises:
        LayoutError: As for `normal`.
    """
    dtype = _dtype(dtype, float)
    bounds = {"minval": minval, "maxval": maxval}
    for name, value in bounds.items():
        if not isinstance(value, _PYTHON_NUMBERS):
            bounds[name] = as_array(value, f"uniform: {name}")
        check_cast(bounds[name], dtype, f"uniform: {name}")
    return _create(_random, shape, layout, dtype, tuple(bounds.values()), keys=key)


def arange(
    start: float,
    stop: float | None = None,
    step: float | None = None,
    *,
    layout: LayoutLike,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Creates evenly spaced values, each device only its shard.

    The values are `start + step * i`, computed in the dtype, as in `jnp.arange`.

    Args:
        start: The first value; without `stop`, the end, and the first value is 0.
        stop: The exclusive end.
        step: The distance between values; by default 1.
        layout: The layout.
        dtype: Dtype of the elements; by default that of the arguments.

    Raises:
        LayoutError: If the layout does not fit, or an argument is not a number.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 8})
        >>> ml.to_numpy(
        ...     ml.arrays.arange(0, 16, 2, layout=mesh.layout("batch"))
        ... ).tolist()
        [0, 2, 4, 6, 8, 10, 12, 14]
    """
    bounds = {"start": start, "stop": stop, "step": step}
    bounds = {n: v for n, v in bounds.items() if v is not None or n == "start"}
    for name, value in bounds.items():
        if not isinstance(value, int) or isinstance(value, bool):
            _checks.number(name, value, where="arange", error=LayoutError)
    if step == 0:
        msg = "arange: step must not be 0."
        raise LayoutError(msg)
    first, end = (0, start) if stop is None else (start, stop)
    try:
        chosen = _dtype(dtype, None) or np.dtype(jnp.result_type(*bounds.values()))
        size = max(0, math.ceil((end - first) / (1 if step is None else step)))
    except OverflowError:
        msg = "arange: the numbers do not fit into any dtype."
        raise LayoutError(msg) from None
    if dtype is not None:
        check_cast(first, chosen, "arange: start")
        check_cast(step or 1, chosen, "arange: step")
    work = chosen
    if jnp.issubdtype(chosen, jnp.floating) and jnp.finfo(chosen).bits < 32:
        work = np.dtype(np.float32)  # bfloat16 has not all integers above 256
    try:
        # The last value is only converted to see whether it fits.
        last = first + max(0, size - 1) * (step or 1)
        start_, step_, _ = (np.asarray(x, work) for x in (first, step or 1, last))
    except OverflowError:
        msg = f"arange from {first!r} to {end!r} does not fit into dtype {work}."
        raise LayoutError(msg) from None
    if not jnp.issubdtype(work, jnp.floating) or step in (None, 1) or first == 0:
        return _create(_arange, (size,), layout, chosen, (start_, step_))
    # Two roundings, as in jnp.arange: XLA would fuse them into one in one program.
    where = type_text((size,), chosen)
    main = with_full_rank(layout, 1, where).with_memory_kind(None)
    steps = _create(_arange, (size,), main, work, (np.zeros_like(start_), step_))
    with contextlib.nullcontext() if _jax.is_staged(None) else _jax.no_mesh():
        return call_with_layout(_shifted, layout, steps, start_, dtype=chosen)


def _full(value: ArrayLike, *, shape: tuple[int, ...], dtype: DType) -> jax.Array:
    return jnp.full(shape, value, dtype)


def _random(
    key: PyTree, *bounds: ArrayLike, shape: tuple[int, ...], dtype: DType
) -> jax.Array:
    if bounds:
        return jax.random.uniform(key, shape, dtype, *bounds)
    return jax.random.normal(key, shape, dtype)


def _arange(
    start: jax.Array, step: jax.Array, *, shape: tuple[int, ...], dtype: DType
) -> jax.Array:
    steps = jax.lax.broadcasted_iota(start.dtype, shape, 0)
    return (start + step * steps).astype(dtype)


def _shifted(steps: jax.Array, start: jax.Array, *, dtype: DType) -> jax.Array:
    return (start + steps).astype(dtype)


def _create(
    make: Callable[..., jax.Array],
    shape: ShapeLike,
    layout: LayoutLike,
    dtype: DType,
    operands: tuple[Any, ...],
    *,
    keys: PyTree = None,
) -> Any:
    """Creates one array per shape.

    Args:
        make: Computes the values of one array; compiled once for each shape.
        shape: The user's shape, or tree of shapes.
        layout: The user's layout, or tree of layouts.
        dtype: The dtype; None for that of the operands.
        operands: Arguments of `make`.
        keys: The user's PRNG keys, for random values.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        msg = (
            "inside shard_map every device works on its own shard, and arrays cannot "
            "be created in a layout. Create them outside shard_map, and pass them in."
        )
        raise LayoutError(msg)
    tree = Tree(shape, is_leaf=_is_shape)
    each = _keys_for(keys, tree) if make is _random else [None] * len(tree.leaves)
    arrays = []
    for (path, entry), target, key in zip(
        tree.items(), tree.broadcast(layout), each, strict=True
    ):
        # A bare number is a shape of one dim.
        entries = entry if isinstance(entry, (list, tuple)) else [entry]
        sizes = _checks.shape(entries, where=path, error=LayoutError)
        where = " ".join(filter(None, [path, type_text(sizes, dtype)]))
        own = with_full_rank(target, len(sizes), where, match=False)
        own.check(sizes, where)
        values = operands if key is None else (key, *operands)
        try:
            array = _made(make, sizes, dtype, own, [_near(x, own.mesh) for x in values])
        except (TypeError, ValueError, OverflowError) as error:
            raise LayoutError(f"{where}: {first_line(error)}") from error
        arrays.append(finish(array, [own]))
    return tree.unflatten(arrays)


def _made(
    make: Callable[..., jax.Array],
    shape: tuple[int, ...],
    dtype: DType,
    layout: Layout,
    operands: list[Any],
) -> jax.Array:
    """Creates one array, if necessary in another layout that preserves its bits."""
    # Computed in the devices' main memory, and moved by `finish`.
    sharding = layout.with_memory_kind(None).sharding
    if 0 in shape and not _jax.is_staged(None):
        # jax 0.7.2 cannot shard results without elements.
        used = jnp.result_type(operands[0]) if dtype is None else dtype
        return jax.device_put(np.empty(shape, used), sharding)
    if make is _random and not _jax.is_staged(None):
        # The other functions are exact in any sharding.
        sharding = bit_exact_sharding(sharding, shape, dtype, layout.mesh)
    with contextlib.nullcontext() if _jax.is_staged(None) else _jax.no_mesh():
        return _compiled(make, shape, dtype, sharding)(*operands)


# jit caches by function object, and a partial is a new one in every call.
@functools.lru_cache(maxsize=512)
def _compiled(
    make: Callable[..., jax.Array],
    shape: tuple[int, ...],
    dtype: DType,
    sharding: NamedSharding,
) -> Callable[..., jax.Array]:
    create = functools.partial(make, shape=shape, dtype=dtype)
    return jax.jit(create, out_shardings=sharding)


def _keys_for(keys: PyTree, tree: "Tree") -> list[Any]:
    """Returns one PRNG key per shape."""
    key_tree = Tree(keys)
    if key_tree.treedef != tree.treedef:
        msg = (
            "keys and shapes must be trees of the same structure: "
            f"{tree.difference(key_tree, 'key', 'shape')} Split a key with "
            "jax.random.split."
        )
        raise LayoutError(msg)
    for path, key in key_tree.items():
        if not _jax.is_key(key):
            where = f"{path}: " if path else ""
            msg = (
                f"{where}expected a PRNG key, got {describe(key)}. Make one with "
                "jax.random.key(seed)."
            )
            raise LayoutError(msg)
    return key_tree.leaves


def _near(x: Leaf, mesh: Mesh) -> Any:
    """Moves a small operand of a creation function to the devices of the mesh."""
    if not is_concrete_array(x) or not _jax.is_committed(x):
        return x
    # On Auto axes, so that its layout does not affect that of the result.
    devices = _jax.with_auto_axes(mesh.jax_mesh)
    return _jax.put(x, NamedSharding(devices, PartitionSpec()))


def _is_shape(node: PyTree) -> bool:
    if isinstance(node, (list, tuple)):
        return not any(isinstance(size, (list, tuple, dict)) for size in node)
    return not isinstance(node, dict)


_PYTHON_NUMBERS = (bool, int, float, complex)


def _dtype(dtype: DTypeLike | None, default: Any) -> Any:
    """Returns the dtype that JAX will use, or None if there is no default."""
    if dtype is None and default is None:
        return None
    dtype = default if dtype is None else dtype
    try:
        requested = jnp.dtype(dtype)
        if isinstance(requested, np.dtype):
            requested = requested.newbyteorder("=")
        if not _jax.is_array_dtype(requested):
            raise TypeError
    except TypeError:
        text = _checks.shown(dtype)
        msg = f"{text} is not a dtype of numbers. Write jnp.float32 or 'float32'."
        raise LayoutError(msg) from None
    used = jax.dtypes.canonicalize_dtype(requested)
    # By identity: np.dtype("float64") == float, and it was requested by name.
    if used != requested and not any(dtype is kind for kind in _PYTHON_NUMBERS):
        warnings.warn(
            f"dtype {requested} is not enabled in JAX; {used} is used instead. See "
            "jax_enable_x64.",
            stacklevel=3,
        )
    return used
