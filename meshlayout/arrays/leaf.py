"""One array and one layout: whether they fit, and the move.

JAX's `device_put` does most moves, but not all: some versions cannot leave Explicit
axes, none moves PRNG keys between processes, and inside jit it is a constraint. What
every process has for itself is compared before it becomes one array on the devices of
all.
"""

import functools
import threading
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _jax
from meshlayout._annotations import Leaf
from meshlayout._host_arrays import host_array
from meshlayout.arrays.tree import Where, describe, first_line
from meshlayout.cluster.agreement import assert_same
from meshlayout.errors import ClusterError, LayoutError
from meshlayout.layout import MATCH, DimSpec, Layout, as_layout
from meshlayout.mesh import Mesh


def resolve(
    x: Leaf, layout: object, where: Where, *, match: bool = True, what: str = ""
) -> Layout:
    """Returns the layout for one array, with its rank and known to fit.

    Args:
        x: The array, abstract or not.
        layout: The user's layout.
        where: The name of the array, for messages.
        match: Whether the layout may hold MATCH, which is filled in if the array's
            layout is known, and kept otherwise.
        what: Set if `x` is known to be an array.

    Raises:
        LayoutError: If the layout does not fit.
    """
    if not what and not is_array(x) and not isinstance(x, jax.ShapeDtypeStruct):
        msg = f"{where}: a layout is for arrays, but this is {describe(x)}."
        raise LayoutError(msg)
    if isinstance(x, Tracer) and _jax.is_manual(x):
        msg = (
            f"{where}: inside shard_map every device works on its own shard, which "
            "relayout cannot move. Call it outside shard_map."
        )
        raise LayoutError(msg)
    shape = np.shape(x) if not hasattr(x, "shape") else x.shape
    fitting = _fitting(layout, shape) if isinstance(layout, Layout) else None
    if fitting is not None:
        return fitting
    layout = with_full_rank(layout, len(shape), where, match=match)
    if MATCH in layout.specs:
        layout = _matched(x, layout, where)
    whole = [None if entry is MATCH else entry for entry in layout.specs]
    layout.with_specs(whole).check(shape, str(where))
    return layout


@functools.lru_cache(maxsize=4096)
def _fitting(layout: Layout, shape: tuple[int, ...]) -> Layout | None:
    """Returns a layout with the rank of a shape, or None if it does not fit.

    Cached, for loops that relayout each batch; the caller finds out what is wrong.
    """
    try:
        full = layout.with_rank(len(shape))
    except LayoutError:
        return None
    return None if MATCH in full.specs or full.misfits(shape) else full


@functools.lru_cache(maxsize=4096)
def _sharding(layout: Layout) -> NamedSharding:
    """Returns the sharding of a layout; MATCH entries are left to the compiler."""
    spec = PartitionSpec(
        *(PartitionSpec.UNCONSTRAINED if e is MATCH else e for e in layout.specs)
    )
    return NamedSharding(layout.mesh.jax_mesh, spec, memory_kind=layout.memory_kind)


def _matched(x: Leaf, layout: Layout, where: Where) -> Layout:
    """Fills in MATCH if the array's layout is known."""
    if not isinstance(_jax.concrete_value(x), (jax.Array, jax.ShapeDtypeStruct)):
        # An array on the host is not sharded.
        current: Sequence[DimSpec] = [None] * layout.rank
    elif _jax.is_staged(x) and _jax.sharding_of(x) is None:
        return layout
    elif _jax.is_staged(x):
        spec = tuple(getattr(_jax.sharding_of(x), "spec", ()))
        current = spec + (None,) * (layout.rank - len(spec))
    else:
        current = layout_of(x, where).specs
    specs = [
        current_entry if entry is MATCH else entry
        for entry, current_entry in zip(layout.specs, current, strict=True)
    ]
    try:
        return layout.with_specs(specs)
    except LayoutError as error:
        msg = f"{where}: with MATCH filled in from {Layout.of(x)!r}, {error}"
        raise LayoutError(msg) from None


def move(x: Leaf, layout: Layout, where: Where, *, copy: bool = False) -> Any:
    """Moves one array to a layout that is known to fit it.

    Args:
        x: The array.
        layout: The layout, from `resolve`.
        where: The name of the array, for messages.
        copy: Whether the result must not share memory with `x`.
    """
    sharding = _sharding(layout)
    if isinstance(x, jax.ShapeDtypeStruct):
        msg = f"{where}: an abstract array has no values to move."
        raise LayoutError(msg)
    if is_concrete_array(x):
        check_alive(x, where)
    # Python numbers stay weakly typed.
    if not isinstance(x, (bool, int, float, complex)):
        x = as_array(x, where)
    try:
        if _jax.is_staged(x):
            return _constrain(x, sharding, layout, where)
        if not isinstance(x, jax.Array):
            # A CPU device would use the user's own memory, whatever `may_alias` says.
            return _jax.put(np.array(x) if isinstance(x, np.ndarray) else x, sharding)
        if not is_concrete_array(x):  # traced by eager grad, which differentiates this
            return jax.device_put(x, sharding)
        x = _jax.movable(x, layout.mesh.jax_mesh)
        moved = _jax.put(x, sharding)
        return _in_own_memory(moved) if copy else moved
    except LayoutError:
        raise
    except (AssertionError, ValueError, TypeError, OverflowError) as error:
        reason = first_line(error) if str(error) else "other axes are in force."
        msg = f"{where}: JAX cannot move it to {layout!r}: {reason}"
        raise LayoutError(msg) from error


def _in_own_memory(x: jax.Array) -> jax.Array:
    """Returns a copy of an array that shares no memory with any other.

    `may_alias=False` of `device_put` is only a hint where an array moves, but holds
    where it stays; the words of PRNG keys it shares in any case.
    """
    if _jax.is_extended(x.dtype):
        return _jax.key_of_words(_in_own_memory(_jax.words_of_key(x)), x.dtype)
    return jax.device_put(x, x.sharding, may_alias=False)


# What `check_same` has compared.
_compared: set[tuple[Any, ...]] = set()


def check_same(named: Iterable[tuple[Where, Leaf, Mesh]]) -> None:
    """Checks that what goes to devices of all processes is the same on all of them.

    Arrays of the same name, shape, dtype and mesh are compared once, as programs are:
    in a loop, this costs nothing after the first step. Otherwise each process would
    place its own value, and the array would be another one on each. JAX compares, too
    (`device_put` of a host array): it gathers the values of all processes on all
    devices, takes NaN for a difference, and names no process.

    Args:
        named: Arrays with their names for messages, and the meshes they go to.

    Raises:
        ClusterError: If a process has another value.
    """
    if jax.process_count() == 1:
        return
    values: dict[str, Any] = {}
    for where, x, mesh in named:
        key = str(where), np.shape(x), getattr(x, "dtype", type(x)), mesh
        if not can_compare(mesh) or _jax.is_staged(x) or key in _compared:
            continue
        _compared.add(key)
        if _is_of_this_process(x):
            values[str(where)] = x
        elif isinstance(x, jax.Array) and x.sharding.device_set != {*mesh.devices.flat}:
            # For its own process it is an array like any other.
            values[str(where)] = "an array on devices of other processes"
    try:
        if values:
            assert_same(values, "an array that goes to devices of all processes")
    except ClusterError as error:
        if "must be the same" not in str(error):  # a process did not come
            raise
        msg = (
            f"{error} What each process has for itself becomes one array through "
            "ml.pack, or through ml.distribute_dataset with per_process=True."
        )
        raise ClusterError(msg) from None


def can_compare(mesh: Mesh) -> bool:
    """Returns whether processes can compare what they place on a mesh.

    On a mesh of some processes, each may place arrays of its own, as in JAX. In threads
    other than the main one, the calls of processes have no order by which to pair them.
    """
    if jax.process_count() == 1:
        return False
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and _num_processes(mesh) == jax.process_count()


@functools.lru_cache(maxsize=64)
def _num_processes(mesh: Mesh) -> int:
    return len({device.process_index for device in mesh.devices.flat})


def _is_of_this_process(x: Leaf) -> bool:
    """Returns whether this process has a value for itself, in its own memory."""
    if isinstance(x, (Tracer, jax.ShapeDtypeStruct)):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def _constrain(x: Leaf, sharding: NamedSharding, layout: Layout, where: Where) -> Any:
    """Constrains a value inside jit, possibly to another memory."""
    x = _jax.constrain(x, sharding)
    if layout.memory_kind is None:
        return x
    if MATCH in layout.specs:
        msg = (
            f"{where}: {layout!r} holds MATCH and a memory kind, but inside jit JAX "
            "does not know the layout of the array. Name the axes."
        )
        raise LayoutError(msg)
    if not _jax.memory_in_jit() and layout.mesh.platform == "cpu":
        msg = (
            f"{where}: jax {jax.__version__} cannot move a value to another memory "
            "of a CPU inside jit; jax 0.9 can. Move it outside jit."
        )
        raise LayoutError(msg)
    return jax.device_put(x, sharding)


def layout_of(x: Leaf, where: Where) -> Layout:
    """Returns the layout of an array, or raises LayoutError."""
    if is_concrete_array(x):
        check_alive(x, where)
    if not isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        msg = (
            f"{where} is {describe(x)}, which is on no mesh. Place it with "
            "relayout(x, layout)."
        )
        raise LayoutError(msg)
    try:
        return Layout.of(x)
    except LayoutError as error:
        raise LayoutError(f"{where}: {error}") from None


def with_full_rank(
    layout: object, rank: int, where: Where, *, match: bool = True
) -> Layout:
    """Returns a user's layout for arrays of a rank; `match` allows MATCH in it."""
    try:
        layout = as_layout(layout, rank)
    except LayoutError as error:
        raise LayoutError(f"{where}: {error}") from None
    if not match and MATCH in layout.specs:
        msg = f"{where}: {layout!r} holds MATCH; a new array has nothing to match."
        raise LayoutError(msg)
    return layout


def check_alive(x: jax.Array, where: Where) -> None:
    """Raises LayoutError if an array is deleted."""
    if x.is_deleted():
        msg = f"{where}: the array is deleted; it was donated, to a step or a relayout."
        raise LayoutError(msg)


def as_array(x: Leaf, where: Where) -> Any:
    """Returns a NumPy or JAX array for anything array-like."""
    if isinstance(x, jax.Array):
        return x
    if hasattr(x, "__jax_array__"):
        return jnp.asarray(x)
    return host_array(x, where)


def is_array(x: Leaf) -> bool:
    """Returns whether a leaf is an array, a number, or array-like."""
    if isinstance(x, (np.ndarray, np.generic)):
        return _jax.is_array_dtype(x.dtype)
    if isinstance(x, (jax.Array, bool, int, float, complex)):
        return True
    likes = ("__jax_array__", "__array__")
    return not isinstance(x, type) and any(hasattr(x, name) for name in likes)


def is_concrete_array(x: Leaf) -> TypeGuard[jax.Array]:
    """Returns whether a leaf is a `jax.Array` that has values now."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)
