"""Changing, copying, reading and checking the layouts of arrays.

JAX's `device_put` does most moves, but cannot move PRNG keys between processes, and
inside jit it is a constraint. Processes compare host values that become one array.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _checks, _jax, _paths, _render
from meshlayout._annotations import Leaf, PyTree
from meshlayout._checks import shown
from meshlayout.cluster.agreement import assert_same
from meshlayout.errors import ClusterError, LayoutError, MeshLayoutError
from meshlayout.layout import MATCH, Layout, as_layout
from meshlayout.mesh import Mesh


LayoutLike: TypeAlias = Layout | NamedSharding | PyTree
"""A layout, or a tree of layouts that is a prefix of the tree of arrays."""

_NUMBERS = (bool, int, float, complex)


@_checks.user_call
def relayout(x: Leaf, layout: LayoutLike, *, donate: bool = False) -> Any:
    """Returns the same values in another layout.

    Moves from any layout to any other, on the same or other devices, and from NumPy
    arrays and numbers. An array that already has the layout is not copied. This is
    differentiable. Inside jit it is a constraint; for another mesh, JAX may need
    `out_shardings`. Arrays that do not fit raise a LayoutError, host arrays that differ
    between processes a ClusterError.

    Args:
        x: An array or a pytree of arrays.
        layout: The layout, or a tree of layouts. A `MATCH` entry keeps the sharding of
            that dim; inside jit on Auto axes it leaves the dim to the compiler.
        donate: Whether to delete `x` after the move; no effect inside jit.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> x = ml.relayout(np.ones((4, 8)), mesh.layout("batch", None))
        >>> ml.fetch_layout(ml.relayout(x, mesh.layout(ml.MATCH, "model")))
        Layout([batch, model], Mesh(batch=2, model=4))
    """
    # Check all layouts first: an error must not leave a donated tree half deleted.
    layouts = for_each(_fitting, x, broadcast(layout, x))
    moved = _moved(x, layouts, copy=donate)
    # Only after all moves: the same array may be in the tree under several paths.
    for leaf in jax.tree.leaves(x) if donate else ():
        if is_concrete(leaf) and not leaf.is_deleted():
            leaf.delete()
    return moved


@_checks.user_call
def relayout_like(x: Leaf, other: PyTree, *, donate: bool = False) -> Any:
    """Returns `x` in the layouts of other arrays, or a tree prefix: see `relayout`."""
    return relayout(x, fetch_layout(other), donate=donate)


@_checks.user_call
def copy_to_mesh(x: Leaf, layout: LayoutLike) -> Any:
    """Copies arrays from the host, or from anywhere else, to a mesh.

    Use this instead of `relayout` if the result must not share memory with `x`, because
    you write to `x` or donate the result. `x` may also be a list of numbers, or a tree
    of lists. Layouts may not use MATCH. Errors are those of `relayout`.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> ml.copy_to_mesh([[1.0, 2.0], [3.0, 4.0]], mesh.layout("batch", None)).shape
        (2, 2)
    """
    x = with_lists_as_arrays(x)
    return _moved(x, for_each(full_rank, x, broadcast(layout, x)), copy=True)


@_checks.user_call
def fetch_layout(x: Leaf) -> Any:
    """Returns the layout of an array, or a tree of layouts.

    Inside jit, JAX knows it only if `jax.set_mesh` has set a mesh of Explicit axes.
    Unknown layouts and host arrays raise a LayoutError. One device is a mesh of one.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 8})
        >>> ml.fetch_layout({"w": ml.arrays.zeros((8, 2), mesh.layout("batch", None))})
        {'w': Layout([batch, unsharded], Mesh(batch=8))}
    """
    x = _paths.box_value(x) if _paths.is_box(x) else x
    return jax.tree.structure(x).unflatten(for_each(Layout.of, x))


@_checks.user_call
def check_layout(x: Leaf, layout: LayoutLike) -> None:
    """Raises LayoutError unless arrays have the expected layouts.

    Layouts are compared by meaning: every device must hold the same shard in the same
    memory, whatever the axes are called. `MATCH` allows any sharding of its dim.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> x = ml.arrays.zeros((4, 8), mesh.layout("batch", None))
        >>> ml.check_layout(x, mesh.layout("batch", ...))
    """

    def check(leaf: Leaf, layout: object) -> None:
        actual = Layout.of(leaf)
        expected = as_layout(layout, actual.rank)
        if not is_same_layout(actual, expected):
            msg = f"the layout is {actual!r}, but {expected!r} was expected."
            raise LayoutError(f"{msg} Move it with relayout(x, layout).")

    for_each(check, x, broadcast(layout, x))


def is_same_layout(actual: Layout, expected: Layout) -> bool:
    """Returns whether layouts of equal rank mean the same; MATCH allows anything."""
    # Dims that MATCH leaves open are compared as if both were unsharded.
    pairs = list(zip(actual.specs, expected.specs, strict=True))
    actual = actual.with_specs([None if e is MATCH else a for a, e in pairs])
    expected = expected.with_specs([None if e is MATCH else e for _, e in pairs])
    return actual.sharding.is_equivalent_to(expected.sharding, actual.rank)


def for_each(function: Callable[..., Any], x: PyTree, *columns: list[Any]) -> list[Any]:
    """Calls a function for each leaf, and adds the leaf's name to its LayoutErrors."""
    results = []
    for index, arguments in enumerate(zip(jax.tree.leaves(x), *columns, strict=True)):
        try:
            results.append(function(*arguments))
        except LayoutError as error:
            # Paths are computed only for errors, as a loop may relayout each batch.
            name = array_text(_paths.leaf_names(x)[index], arguments[0])
            text = f"{name}: {error}" if name else str(error)
            raise LayoutError(text) from error.__cause__
    return results


def array_text(path: str, x: Leaf) -> str:
    """Returns the name of an array in messages: `encoder/kernel f32[512, 10]`."""
    has_type = hasattr(x, "shape") and hasattr(x, "dtype")
    return f"{path} {_render.array_text(x.dtype, x.shape) if has_type else ''}".strip()


def broadcast(layout: LayoutLike, x: PyTree) -> list[Any]:
    """Returns one layout per leaf, from a single one or a prefix tree."""
    is_spec = isinstance(layout, (list, tuple)) and str in map(type, layout)
    if is_spec or isinstance(layout, (Layout, NamedSharding)):
        return [layout] * jax.tree.structure(x).num_leaves  # a spec is refused

    def is_layout(node: PyTree) -> bool:
        return isinstance(node, (Layout, NamedSharding))

    try:
        layouts = jax.tree.broadcast(layout, x, is_leaf=is_layout)
    except (ValueError, TypeError):
        names, of = (_paths.leaf_names(tree) for tree in (x, layout))
        lacks = [a for a in names if not any(f"{a}/".startswith(f"{b}/") for b in of)]
        fact = f"; there is none for {lacks[0]!r}" if lacks else f", got those of {of}"
        msg = "expected one Layout for all arrays, or a tree of layouts like theirs"
        raise LayoutError(f"{msg}{fact}.") from None
    return jax.tree.leaves(layouts, is_leaf=is_layout)


def with_lists_as_arrays(x: PyTree) -> PyTree:
    """Returns a tree in which lists of numbers are arrays, not lists of leaves."""

    def is_numbers(node: PyTree) -> bool:
        if not isinstance(node, list) or not node:  # JAX's tree without leaves
            return False
        kinds = (*_NUMBERS, np.generic)
        return all(isinstance(item, kinds) or is_numbers(item) for item in node)

    leaves, treedef = jax.tree.flatten(x, is_leaf=is_numbers)
    return treedef.unflatten(host_array(n) if is_numbers(n) else n for n in leaves)


def is_concrete(x: Leaf) -> bool:
    """Returns whether a leaf is a `jax.Array` that has values now."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def as_array(x: Leaf) -> Any:
    """Returns a NumPy or JAX array for anything array-like."""
    if isinstance(x, jax.Array):
        return x
    return jnp.asarray(x) if hasattr(x, "__jax_array__") else host_array(x)


def full_rank(x: Leaf, layout: object) -> Layout:
    """Returns a layout for a new array, which fits it and has nothing to match."""
    layout = as_layout(layout, np.ndim(x))
    if MATCH in layout.specs:
        raise LayoutError(f"{layout!r} holds MATCH; a new array has nothing to match.")
    return _fitting(x, layout)


def _fitting(x: Leaf, layout: object) -> Layout:
    """Returns the layout for an array, with its rank, and MATCH filled in if known."""
    if isinstance(x, Tracer) and _jax.is_manual(x):
        msg = "inside shard_map every device works on its own shard, which relayout "
        raise LayoutError(f"{msg}cannot move. Call it outside shard_map.")
    if isinstance(layout, Layout) and MATCH not in layout.specs:
        return _fitted(layout, np.shape(x))
    fitting = _matched(x, as_layout(layout, np.ndim(x)))
    known = fitting.with_specs([None if e is MATCH else e for e in fitting.specs])
    known.check(np.shape(x))
    return fitting


@functools.lru_cache  # for the batches of a loop, which are all alike
def _fitted(layout: Layout, shape: tuple[int, ...]) -> Layout:
    fitted = layout.with_rank(len(shape))
    fitted.check(shape)
    return fitted


@functools.lru_cache
def _sharding(layout: Layout) -> NamedSharding:
    spec = (PartitionSpec.UNCONSTRAINED if e is MATCH else e for e in layout.specs)
    mesh, kind = layout.mesh.jax_mesh, layout.memory_kind
    return NamedSharding(mesh, PartitionSpec(*spec), memory_kind=kind)


def _matched(x: Leaf, layout: Layout) -> Layout:
    """Fills in MATCH if the array's layout is known; host arrays are unsharded."""
    current: tuple[Any, ...] = ()
    if isinstance(x, Tracer) and _jax.is_staged(x):
        sharding = _jax.sharding_of(x)
        if not isinstance(sharding, NamedSharding):
            return layout
        current = tuple(sharding.spec)
    elif isinstance(x, jax.Array):
        current = Layout.of(x).specs
    pairs = itertools.zip_longest(layout.specs, current)
    return layout.with_specs([old if e is MATCH else e for e, old in pairs])


def _moved(x: PyTree, layouts: list[Layout], *, copy: bool) -> Any:
    """Moves a tree to layouts that fit; a `copy` shares no memory with it."""
    if jax.process_count() > 1:
        check_same(x, [layout.mesh for layout in layouts])
    move = functools.partial(_move, copy=copy)
    return jax.tree.structure(x).unflatten(for_each(move, x, layouts))


def _move(x: Leaf, layout: Layout, *, copy: bool) -> Any:
    if not isinstance(x, _NUMBERS):  # which stay weakly typed
        x = as_array(x)
    sharding = _sharding(layout)
    try:
        if _jax.is_staged(x):
            x = _jax.constrain(x, sharding)
            return x if layout.memory_kind is None else jax.device_put(x, sharding)
        if not isinstance(x, jax.Array):
            # A CPU device would use the user's own memory, whatever `may_alias` says.
            return _jax.put(np.array(x) if isinstance(x, np.ndarray) else x, sharding)
        if isinstance(x, Tracer):  # of eager grad, which differentiates this
            return jax.device_put(x, sharding)
        if x.is_deleted():  # which JAX would return as it is
            msg = "a step has used up the state that this array is of. Continue with"
            raise LayoutError(f"{msg} the state that the step returned.")
        moved = _jax.put(x, sharding)
        return _in_own_memory(moved) if copy else moved
    except (
        *(AssertionError, ValueError, TypeError, OverflowError),
        NotImplementedError,  # between devices of other processes
    ) as error:
        reason = str(error).strip().partition("\n")[0] or "other axes are in force."
        raise LayoutError(f"JAX cannot move it to {layout!r}: {reason}") from error


def _in_own_memory(x: jax.Array) -> jax.Array:
    # `may_alias=False` of `device_put` is only a hint if an array moves, but a promise
    # if it stays. It always shares the words of PRNG keys.
    if _jax.is_extended(x.dtype):
        words = _in_own_memory(jax.random.key_data(x))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    return jax.device_put(x, x.sharding, may_alias=False)


# Host arrays. NumPy has some that JAX lacks: in the other byte order (as in IDX and
# FITS files), masked, of 64 bits, of objects.


def plain_array(
    value: Any,
    where: object = "the array",
    *,
    error: type[MeshLayoutError] = LayoutError,
) -> np.ndarray[Any, Any]:
    """Returns a value as a NumPy array in this machine's byte order, without a mask.

    Nothing is copied if it is one already. Any dtype is allowed, even strings.
    """
    nodes = jax.tree.leaves(value, is_leaf=lambda x: not isinstance(x, (list, tuple)))
    if any(isinstance(node, np.ma.MaskedArray) for node in nodes):
        msg = f"{where} is a masked array, and JAX would lose its mask. Fill it with"
        raise error(f"{msg} x.filled(value), and pass the mask on its own if needed.")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as problem:
        reason = str(problem).partition("\n")[0]
        msg = f"{where}: {shown(value)} cannot be converted to an array: {reason}"
        raise error(msg) from None
    if array.dtype == object and hasattr(value, "columns") and hasattr(value, "items"):
        array = _of_columns(value, array, where, error)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _of_columns(
    frame: Any, array: np.ndarray[Any, Any], where: object, error: type[MeshLayoutError]
) -> np.ndarray[Any, Any]:
    """Returns a data frame of several dtypes, which NumPy makes objects, as numbers."""
    columns = [(name, x.dtype, np.asarray(x)) for name, x in frame.items()]
    others = [f"{n!r} ({kind})" for n, kind, x in columns if x.dtype.kind not in "biuf"]
    if others and len(others) < len(columns):
        fact = f"{where}: no numbers are in the columns {', '.join(others)}. Leave them"
        way = "of numbers pd.to_numeric(frame[name]).astype('float32'), of dates "
        way += "(x - x.min()).dt.days, of text pd.get_dummies(frame)."
        raise error(f"{fact} out, or write {way}")
    return array if others else np.column_stack([x for *_, x in columns])


def host_array(value: Any, where: object = "the array") -> np.ndarray[Any, Any]:
    """Returns a value as a NumPy array that a device can hold with the same values.

    Integers that do not fit into 32 bits are refused; floats are narrowed, as in JAX.
    """
    if _jax.is_plain(value):
        return value
    array = plain_array(value, where)
    if not _jax.is_array_dtype(array.dtype):
        raise LayoutError(f"{where}: {shown(value)} is not an array of numbers.")
    dtype = _jax.canonical_dtype(array.dtype)
    if dtype == array.dtype or array.dtype.kind not in "iu" or not array.size:
        return array
    low, high = int(array.min()), int(array.max())
    limits = np.iinfo(dtype)
    if low < limits.min or high > limits.max:
        msg = f"{where} holds {high if high > limits.max else low}, and JAX would turn"
        hint = "Set jax_enable_x64, or give it another dtype."
        raise LayoutError(f"{msg} {array.dtype} into {dtype}. {hint}")
    return array


# Several processes.

# What `check_same` has compared.
_compared: set[tuple[Any, ...]] = set()


def check_same(tree: PyTree, meshes: Iterable[Mesh]) -> None:
    """Checks that values for devices of all processes are the same on all of them.

    Arrays of the same name, shape, dtype and mesh are compared once, as programs are.
    `jax.device_put` of a host array compares, too: it gathers the values of all on all
    devices, takes NaN for a difference, and names no process.
    """
    values: dict[str, Any] = {}
    leaves = zip(_paths.leaf_names(tree), jax.tree.leaves(tree), meshes, strict=True)
    for path, x, mesh in leaves:
        name = array_text(path, x)
        key = name, type(x), mesh
        if key in _compared or not can_compare(mesh.devices.flat) or _jax.is_staged(x):
            continue
        is_shared = isinstance(x, jax.Array) and not x.is_fully_addressable
        if is_shared and x.sharding.device_set != {*mesh.devices.flat}:
            # For its own process it is an array like any other.
            values[name] = "an array on devices of other processes"
        elif not is_shared and not isinstance(x, jax.ShapeDtypeStruct):
            values[name] = x
        if name in values:
            _compared.add(key)
    try:
        if values:
            assert_same(values, "an array that goes to devices of all processes")
    except ClusterError as error:
        error.add_note(
            "To join the processes' own parts into one array, use ml.pack, or "
            "through ml.distribute_dataset with per_process=True."
        )
        raise


def can_compare(devices: Iterable[_jax.Device]) -> bool:
    """Returns whether all processes take part in work on some devices."""
    # On a mesh of some processes, each may place arrays of its own, as in JAX. Calls in
    # other threads have no order by which to pair them.
    is_main = threading.current_thread() is threading.main_thread()
    processes = {device.process_index for device in devices}
    return is_main and 1 < jax.process_count() == len(processes)
