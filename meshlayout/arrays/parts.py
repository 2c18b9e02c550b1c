"""Whole arrays and the parts of devices: `pack`, `unpack`, `to_numpy`."""

import json
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, SingleDeviceSharding

from meshlayout import _checks, _jax
from meshlayout._annotations import Leaf
from meshlayout._host_arrays import plain_array
from meshlayout.arrays.leaf import (
    as_array,
    can_compare,
    check_alive,
    is_array,
    with_full_rank,
)
from meshlayout.arrays.tree import (
    LayoutLike,
    Tree,
    Where,
    describe,
    device_ids,
    is_number_list,
    type_text,
)
from meshlayout.cluster.agreement import all_gather, digest
from meshlayout.errors import LayoutError
from meshlayout.layout import Layout


def pack(parts: Iterable[Any], layout: LayoutLike, *, verify: bool = False) -> Any:
    """Makes global arrays from the parts that the devices hold.

    Use this if each device's part was computed separately. It is the inverse of
    `unpack`. Each part goes directly to its device; nothing is gathered. Devices that
    are replicas of each other in the layout must get equal parts, which is checked only
    on request.

    Args:
        parts: One part per device of this process, in mesh order. A part is anything
            array-like, even a list of numbers, or a pytree of those; all parts have the
            same structure.
        layout: The layout of the global array, or a tree of layouts.
        verify: Whether to compare the parts of replicas, bit by bit, also those of
            other processes.

    Returns:
        The array, or a pytree of arrays.

    Raises:
        LayoutError: If the number of parts, their structures, shapes or dtypes do not
            fit, or replicas differ.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> x = ml.pack([[0, 1]] * 4 + [[2, 3]] * 4, mesh.layout("batch"), verify=True)
        >>> x.shape, ml.to_numpy(x).tolist()
        ((4,), [0, 1, 2, 3])
    """
    verify = _checks.flag("verify", verify, where="pack", error=LayoutError)
    if isinstance(parts, (dict, str)) or not isinstance(parts, Iterable):
        msg = (
            "pack: parts must be a list with one part per device, got "
            f"{type(parts).__name__}. Put the trees of all devices into a list."
        )
        raise LayoutError(msg)
    parts = list(parts)
    if not parts:
        msg = "pack: parts is empty; give one part per device."
        raise LayoutError(msg)
    # A list of numbers is one array here, where JAX sees a tree of scalars.
    trees = [Tree(part, is_leaf=is_number_list) for part in parts]
    for index, tree in enumerate(trees):
        if tree.treedef != trees[0].treedef:
            msg = (
                f"parts 0 and {index} have different structures: leaves "
                f"{trees[0].listed()} and {tree.listed()}."
            )
            raise LayoutError(msg)
    first = trees[0]
    return first.unflatten(
        _pack_leaf([tree.leaves[i] for tree in trees], target, path, verify=verify)
        for i, (path, target) in enumerate(
            zip(first.paths, first.broadcast(layout), strict=True)
        )
    )


def _pack_leaf(
    parts: list[Any], layout: object, path: str, *, verify: bool
) -> jax.Array:
    where = f"{path}: " if path else ""
    if any(isinstance(part, Tracer) for part in parts):
        msg = (
            f"{where}pack joins arrays on devices, and inside jit, grad or vmap there "
            "are none yet. Pack outside, or use relayout."
        )
        raise LayoutError(msg)
    parts = [as_array(part, f"{where}part {index}") for index, part in enumerate(parts)]
    # In the dtypes on the devices: float64 and float32 parts fit together without x64.
    kinds = [(part.shape, _jax.canonical_dtype(part.dtype)) for part in parts]
    for index, kind in enumerate(kinds):
        if kind != kinds[0]:
            msg = (
                f"{where}part 0 is {type_text(*kinds[0])}, but part {index} is "
                f"{type_text(*kind)}; the parts of an array have one shape and dtype."
            )
            raise LayoutError(msg)
    shard_shape, _ = kinds[0]
    text = f"{where}parts {type_text(*kinds[0])}"
    layout = with_full_rank(layout, len(shard_shape), text, match=False)
    devices = layout.mesh.local_devices
    if len(parts) != len(devices):
        local = " of this process" if layout.mesh.process_axes else ""
        msg = (
            f"{text}: got {len(parts)} parts for the {len(devices)} devices{local} of "
            f"{layout.mesh!r}. Give one part per device, in mesh order, including "
            "devices that hold replicas."
        )
        raise LayoutError(msg)
    digests = _verify(parts, layout, where) if verify else {}
    if can_compare(layout.mesh):
        kind = type_text(*kinds[0])
        _verify_processes(all_gather([kind, json.dumps(digests)]), layout, where)
    # Copied, as a CPU device would use the user's memory, and a step may donate it.
    shards = [
        jax.device_put(
            np.array(part) if isinstance(part, np.ndarray) else part,
            SingleDeviceSharding(device, memory_kind=layout.memory_kind),
        )
        for part, device in zip(parts, devices, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(
        layout.global_shape(shard_shape), layout.sharding, shards
    )


def _verify_processes(told: list[Any], layout: Layout, where: Where) -> None:
    """Raises LayoutError if the parts on processes do not fit together.

    Args:
        told: What each process told: the types of its parts, and their digests by
            shard.
        layout: The layout.
        where: The name of the array, for messages.
    """
    types, digests = told
    for process, kind in enumerate(types):
        if kind != types[0]:
            msg = (
                f"{where}the parts on process 0 are {types[0]}, but {kind} on process "
                f"{process}; the parts of an array have one shape and dtype."
            )
            raise LayoutError(msg)
    seen: dict[str, tuple[int, str]] = {}
    for process, text in enumerate(digests):
        for index, value in json.loads(text).items():
            first, expected = seen.setdefault(index, (process, value))
            if value != expected:
                msg = (
                    f"{where}processes {first} and {process} give different parts for "
                    f"shard {index} of {layout!r}, which should be replicas."
                )
                raise LayoutError(msg)


def _verify(parts: list[Any], layout: Layout, where: Where) -> dict[str, str]:
    """Raises LayoutError if two parts for the same shard differ.

    Returns:
        The digest of each shard that this process has, by its index.
    """
    index_of = layout.offset_to_shard()
    flat = {device: index for index, device in enumerate(layout.mesh.devices.flat)}
    seen: dict[tuple[int, ...], tuple[int, _jax.Device, np.ndarray[Any, Any]]] = {}
    for number, device in enumerate(layout.mesh.local_devices):
        value = _host_value(parts[number])
        index = index_of[flat[device]]
        first, other, expected = seen.setdefault(index, (number, device, value))
        # By bits: NaN equals itself here, and -0.0 differs from 0.0.
        if value.tobytes() != expected.tobytes():
            msg = (
                f"{where}parts {first} and {number}, for devices {other} and {device}, "
                f"should be replicas in {layout!r} (shard {index}), but "
                f"{_difference(expected, value)}."
            )
            raise LayoutError(msg)
    return {str(index): digest(value.tobytes()) for index, (*_, value) in seen.items()}


def _difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> str:
    differ = np.atleast_1d((a != b) & ~((a != a) & (b != b)))  # except NaN and NaN
    count = int(np.count_nonzero(differ))
    if not count:
        return "differ in the bits of zeros or NaNs"
    first = tuple(map(int, np.argwhere(differ)[0]))[: a.ndim]
    values = f"{a[first]} and {b[first]}"
    return f"differ in {count} of {a.size} elements, first at {first}: {values}"


def unpack(x: Leaf) -> list[Any]:
    """Splits arrays into the parts that the devices hold.

    Use this to look at what each device has; nothing is copied.

    Args:
        x: An array on a mesh, or a pytree of those on the same devices.

    Returns:
        One part per device of this process, in mesh order: an array on that device,
        or a pytree of them.

    Raises:
        LayoutError: If a leaf is not a `jax.Array` outside jit, or the leaves are on
            different devices.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> [
        ...     part.shape
        ...     for part in ml.unpack(
        ...         ml.arrays.zeros((4, 8), mesh.layout(None, "model"))
        ...     )
        ... ]
        [(4, 2), (4, 2), (4, 2), (4, 2), (4, 2), (4, 2), (4, 2), (4, 2)]
    """
    tree = Tree(x)
    if not tree.leaves:
        msg = "unpack: x must be arrays on a mesh, got a tree without any."
        raise LayoutError(msg)
    columns = [_unpack_leaf(leaf, where) for where, leaf in tree.named()]
    for (where, _), column in zip(tree.named(), columns, strict=True):
        if list(column) != list(columns[0]):
            msg = (
                f"{where} is on devices {device_ids(column)}, but "
                f"{tree.named()[0][0]} on {device_ids(columns[0])}; all arrays must be "
                "on the same devices in the same order."
            )
            raise LayoutError(msg)
    return [
        tree.unflatten(column[device] for column in columns) for device in columns[0]
    ]


def _unpack_leaf(x: Leaf, where: Where) -> dict[_jax.Device, jax.Array]:
    """Returns the parts by device, in mesh order."""
    if isinstance(x, Tracer):
        msg = f"{where}: a value inside jit has no parts yet; unpack the result of jit."
        raise LayoutError(msg)
    if not isinstance(x, jax.Array):
        msg = (
            f"{where}: unpack needs arrays on a mesh, but this is {describe(x)}. "
            "Place it with relayout(x, layout)."
        )
        raise LayoutError(msg)
    check_alive(x, where)
    held = {
        shard.device: shard.data for shard in _jax.with_shards(x).addressable_shards
    }
    if not isinstance(x.sharding, NamedSharding):
        return held
    # In mesh order, in which `pack` takes them; JAX's order may be another one.
    devices = Layout.of(x).mesh.local_devices
    return {device: held[device] for device in devices}


def to_numpy(x: Leaf) -> Any:
    """Returns full values on the host, gathered from all devices and processes.

    Use this for results and tests, not for states that may not fit into host memory.

    Args:
        x: An array in any layout, or a pytree of arrays; all processes must call this.
            PRNG keys become their words; leaves that are neither arrays nor numbers are
            returned unchanged.

    Returns:
        A read-only NumPy array, or a pytree of them.

    Raises:
        LayoutError: If a leaf has no value: inside jit, abstract, or deleted.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 8})
        >>> ml.to_numpy({"x": ml.arrays.arange(8, layout=mesh.layout("batch"))})
        {'x': array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)}
    """
    tree = Tree(x)
    return tree.unflatten(_numpy_leaf(leaf, where) for where, leaf in tree.named())


def _numpy_leaf(x: Leaf, where: Where) -> Any:
    x = _jax.concrete_value(x)  # eager grad and the like still have values
    if isinstance(x, Tracer):
        msg = f"{where}: a value inside jit is not known yet; return it from jit."
        raise LayoutError(msg)
    if isinstance(x, jax.ShapeDtypeStruct):
        msg = f"{where}: an abstract array has no values."
        raise LayoutError(msg)
    return _host_value(x, where) if is_array(x) else x


def _host_value(x: Leaf, where: Where = "the array") -> np.ndarray[Any, Any]:
    """Returns the full value of an array or number; for PRNG keys, their words."""
    if not isinstance(x, jax.Array):
        return plain_array(x, where)
    check_alive(x, where)
    if not x.is_fully_addressable and not _jax.with_shards(x).addressable_shards:
        msg = (
            f"{where}: process {jax.process_index()} has no part of the array, which "
            f"is on devices {device_ids(x.sharding.device_set)}."
        )
        raise LayoutError(msg)
    is_key = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
    return _jax.to_host(jax.random.key_data(x) if is_key else x)
