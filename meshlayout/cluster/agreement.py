"""Values that processes exchange: barriers, broadcasts, comparisons.

They go through a channel and not through a collective: JAX's own helpers
(`multihost_utils`) need devices, make 64 bits 32, and given trees that differ, or calls
in another order, they hang or return another call's values. Here every message says
which call it is for. Calls are paired by their order, which only the main thread has.
"""

import functools
import hashlib
import re
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from meshlayout import _checks, _jax, _render
from meshlayout._annotations import Leaf, PyTree
from meshlayout.cluster import startup
from meshlayout.cluster.channel import processes_text, shared_channel
from meshlayout.errors import ClusterError


T = TypeVar("T")

_HINT = "All processes must make the same calls of ml.cluster, in the same order."
_NUM_SHOWN = 6  # elements of an array in a message
_NUM_LISTED = 3  # differences in a message


def barrier(name: str, timeout_s: float = 600.0) -> None:
    """Waits until all processes have come to this barrier.

    Use this before a process reads what another one wrote. No device is involved.

    Args:
        name: The name of the barrier, the same on all processes. It may be used again.
        timeout_s: How long to wait for the others, in seconds.

    Raises:
        ClusterError: If a process does not come, which is named, or is at another call.

    Example:
        >>> barrier("the vocabulary is written")
    """
    _exchange(f"barrier {name!r}", lambda: None, timeout_s)


def broadcast(tree: T, *, timeout_s: float = 600.0) -> T:
    """Returns the values of process 0 on all processes.

    Use this for what only one process can know, such as a run's name or a seed. Dtypes
    stay what they are, also without `jax_enable_x64`; JAX's arrays become NumPy's.

    Args:
        tree: A pytree of arrays, numbers and text. That of the other processes does
            not matter.
        timeout_s: How long to wait for the others, in seconds.

    Raises:
        ClusterError: If a process does not come, or is at another call.

    Example:
        >>> broadcast({"name": "run-3", "seed": 7})
        {'name': 'run-3', 'seed': 7}
    """
    sent = tree if startup.is_main() else None
    values = _exchange("broadcast", lambda: _on_host(sent, "broadcast"), timeout_s)
    return values[0]


def all_gather(tree: T, *, timeout_s: float = 600.0) -> T:
    """Returns the values of all processes, stacked in a first dim, on all of them.

    Use this for figures that each process has for itself, such as its number of rows or
    its time. Dtypes stay what they are; text becomes an array of objects.

    Args:
        tree: A pytree of arrays, numbers and text, of the same structure, shapes and
            dtypes on all processes.
        timeout_s: How long to wait for the others, in seconds.

    Raises:
        ClusterError: If trees differ, a process does not come, or is at another call.

    Example:
        >>> all_gather({"host": "a", "rows": 12})
        {'host': array(['a'], dtype=object), 'rows': array([12])}
    """
    call = "all_gather"
    trees = _exchange(call, lambda: _on_host(tree, call), timeout_s)
    text = difference({p: _texts(x, _type_text) for p, x in trees.items()})
    if text:
        msg = f"{call}: the trees differ between processes: {text}."
        raise ClusterError(msg)
    return jax.tree.map(_stacked, *trees.values())


def assert_same(value: PyTree, what: str, *, timeout_s: float = 600.0) -> None:
    """Raises an error on all processes unless all have the same value, bit by bit.

    Use this for what all processes must compute alike, such as a configuration or a
    list of files.

    Args:
        value: A pytree of arrays, numbers and text; of large arrays, digests are sent.
            A replicated global array is compared as this process has it.
        what: What it is, to begin the message with.
        timeout_s: How long to wait for the others, in seconds.

    Raises:
        ClusterError: If values differ, which names what differs, and the process that
            has another value than most; or if a process does not come, or is at
            another call.

    Example:
        >>> assert_same({"lr": 0.1, "files": ["a", "b"]}, "the configuration")
    """

    def texts() -> dict[str, str]:
        return _texts(_on_host(value, what), value_text)

    text = difference(_exchange(f"assert_same {what!r}", texts, timeout_s))
    if text:
        msg = f"{what} must be the same on all processes: {text}."
        raise ClusterError(msg)


def difference(facts: Mapping[int, Mapping[str, str]]) -> str:
    """Describes what differs between processes, and on which; empty if nothing does.

    Example:
        >>> difference({0: {"lr": "1"}, 1: {"lr": "2", "seed": "5"}, 2: {"lr": "1"}})
        'lr is 2 on process 1, and 1 on processes 0,2; seed is 5 on process 1, and
        missing on processes 0,2'
    """
    texts = []
    for name in dict.fromkeys(name for values in facts.values() for name in values):
        processes: defaultdict[str, list[int]] = defaultdict(list)
        for process, values in facts.items():
            processes[values.get(name, "missing")].append(process)
        if len(processes) > 1:
            # Most processes are right; of two, process 0.
            groups = sorted(processes.items(), key=lambda g: (len(g[1]), -g[1][0]))
            parts = [f"{_short(x)} on {processes_text(group)}" for x, group in groups]
            if len(parts) > _NUM_LISTED:
                parts = [*parts[: _NUM_LISTED - 1], "other values elsewhere", parts[-1]]
            texts.append(f"{name} is {', '.join(parts[:-1])}, and {parts[-1]}")
    if len(texts) > _NUM_LISTED:
        texts = [*texts[:_NUM_LISTED], f"and {len(texts) - _NUM_LISTED} more differ"]
    return "; ".join(texts)


def _short(text: str) -> str:
    return (
        text if len(text) < 100 else f"{text[:80]}... (digest {digest(text.encode())})"
    )


def _exchange(call: str, value: Callable[[], Any], timeout_s: float) -> dict[int, Any]:
    """Returns the values of all processes that make a call; all raise its errors."""
    _checks.number("timeout_s", timeout_s, above=0, where=call, error=ClusterError)
    if startup.process_count() == 1:
        return {startup.process_index(): value()}
    problem = ""
    if _jax.coordination_client() is None:
        problem = "the processes cannot exchange messages: call ml.initialize() first"
    elif threading.current_thread() is not threading.main_thread():
        problem = "call it in the main thread, as threads have no common order"
    if problem:
        msg = f"{call}: {problem}."
        raise ClusterError(msg)
    channel = shared_channel("cluster", what="a call of ml.cluster", hint=_HINT)
    with channel.failure_told():
        message = call, value()
    messages = channel.exchange(message, what=call, timeout_s=timeout_s)
    calls = difference({p: {"the call": name} for p, (name, _) in messages.items()})
    if calls:
        msg = f"processes are at different calls: {calls}. {_HINT}"
        raise ClusterError(msg)
    return {process: value for process, (_, value) in messages.items()}


def _texts(tree: PyTree, text: Callable[[Any], str]) -> dict[str, str]:
    """Returns a text for each leaf of a tree by its path, and the tree's structure."""
    pairs = jax.tree.leaves_with_path(tree)
    texts = {jax.tree_util.keystr(p) or "the value": text(leaf) for p, leaf in pairs}
    # Nodes of other libraries may show where they are in memory.
    structure = re.sub(r" at 0x[0-9a-f]+", "", str(jax.tree.structure(tree)))
    return {**texts, "the structure": structure}


def _on_host(tree: PyTree, where: str) -> Any:
    """Returns a tree with NumPy arrays, this process's copy of what is replicated."""

    def on_host(leaf: Leaf) -> Any:
        problem = ""
        if isinstance(leaf, Tracer):
            problem = "a value inside jit is not known yet. Call this outside"
        elif isinstance(leaf, jax.Array):
            leaf = jax.random.key_data(leaf) if _jax.is_extended(leaf.dtype) else leaf
            if leaf.is_fully_addressable or leaf.is_fully_replicated:
                return np.asarray(leaf.addressable_data(0))
            problem = f"{_render.array_text(leaf.dtype, leaf.shape)} is sharded over "
            problem += "several processes. Gather it with ml.to_numpy(x)"
        elif not isinstance(leaf, (bool, int, float, complex, str, bytes)):
            is_array = isinstance(leaf, (np.ndarray, np.generic))
            if not is_array or leaf.dtype.hasobject:
                problem = f"got {_checks.shown(leaf)}. Processes exchange arrays, "
                problem += "numbers and text"
        if problem:
            msg = f"{where}: {problem}."
            raise ClusterError(msg)
        return leaf

    return jax.tree.map(on_host, tree)


def _stacked(*leaves: Leaf) -> Any:
    is_text = isinstance(leaves[0], (str, bytes))
    is_int = isinstance(leaves[0], int)
    if is_text or (is_int and max(map(abs, leaves)) >= 2**63):
        # NumPy would cut off zeros at the end of text, and make large integers floats.
        return np.array(leaves, object)
    return np.stack([np.asarray(leaf) for leaf in leaves])


def _type_text(leaf: Leaf) -> str:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return _render.array_text(leaf.dtype, leaf.shape)
    return type(leaf).__name__


def value_text(leaf: Leaf) -> str:
    """Returns a text that is the same for two leaves if they have the same bits."""
    if not isinstance(leaf, (np.ndarray, np.generic)):
        return repr(leaf)
    # NaNs of different bits look the same.
    if leaf.size <= _NUM_SHOWN and bool((leaf == leaf).all()):
        return f"{_type_text(leaf)} {leaf.tolist()}"
    content = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    return f"{_type_text(leaf)} (digest {digest(content)})"


def digest(content: Any) -> str:
    """Returns a digest of bytes or of an array that is the same in all processes."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def replica_sums(
    arrays: Iterable[jax.Array | np.ndarray[Any, Any]],
) -> dict[tuple[int, ...], int]:
    """Returns a sum of bits for each group of processes that hold the same shards.

    A program per device sums the bits of one copy of each shard that several processes
    hold; nothing but the sums comes to the host.
    """
    everybody = tuple(range(jax.process_count()))
    sums, shards = defaultdict[Any, int](int), defaultdict[Any, list[Any]](list)
    for number, array in enumerate(arrays if len(everybody) > 1 else ()):
        if not isinstance(array, jax.Array):
            sums[everybody] += zlib.crc32(array.tobytes(), number)
            continue
        shared = _shared_shards(array.sharding, array.shape)
        for shard in array.addressable_shards if shared else ():
            if shard.device in shared:
                index, group = shared[shard.device]
                factor = np.uint32(zlib.crc32(f"{number} {index}".encode()) | 1)
                shards[group, shard.device].append((shard.data, factor))
    for (group, _), parts in shards.items():
        sums[group] += int(_sum_of_bits(*zip(*parts, strict=True)))
    return dict(sums)


def replica_difference(sums: Mapping[int, Mapping[tuple[int, ...], int]]) -> str:
    """Describes between which processes the sums differ; empty if nowhere."""
    groups = sorted({group for of_process in sums.values() for group in of_process})
    name = "the sum of the arrays and numbers that processes share"
    texts = (
        difference({p: {name: f"{sums[p].get(group, 0):x}"} for p in group})
        for group in groups
    )
    return next(filter(None, texts), "")


@functools.lru_cache(maxsize=1024)
def _shared_shards(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> dict[Any, tuple[str, tuple[int, ...]]]:
    """Returns shards on several processes and those, by one device of each process."""
    devices = defaultdict[str, dict[int, Any]](dict)
    for device, index in sharding.devices_indices_map(shape).items():
        devices[str(index)].setdefault(device.process_index, device)
    rows = {index: row for index, row in devices.items() if len(row) > 1}
    groups = {index: tuple(sorted(row)) for index, row in rows.items()}
    return {x: (i, groups[i]) for i, row in rows.items() for x in row.values()}


@jax.jit
def _sum_of_bits(arrays: Sequence[jax.Array], factors: Sequence[Any]) -> jax.Array:
    total = jnp.uint32(0)
    for array, factor in zip(arrays, factors, strict=True):
        is_complex = jnp.iscomplexobj(array)
        for x in (array.real, array.imag) if is_complex else (array,):
            if x.dtype != bool:
                info = jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo
                bits = min(32, int(info(x.dtype).bits))
                x = jax.lax.bitcast_convert_type(x, f"uint{bits}")
            words = x.astype(jnp.uint32).ravel()
            # Odd factors and a shift: a change of any one word changes the sum.
            words += jax.lax.iota(jnp.uint32, words.size)
            words *= jnp.uint32(2654435761)
            total += factor * jnp.sum(words ^ (words >> 15))
    return total
