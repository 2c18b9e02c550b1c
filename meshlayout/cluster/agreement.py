"""What processes exchange and compare: values of theirs, programs, replicas.

Values go through a channel and not through a collective: JAX's own helpers
(`multihost_utils`) need devices, make 64 bits 32, and given trees that differ, or calls
in another order, they hang or return another call's values. Calls are paired by their
order, which only the main thread has, and every message says which call it is for.

Every process compiles its own program, and JAX compares nothing: with another mesh,
batch shape, seed or function on one process, all run on, and each gets other numbers.
So before the first call of a program, its processes compare a digest of what they
compile and of what they call it with. Later calls cost nothing.
"""

import contextlib
import functools
import hashlib
import pickle
import re
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout import _checks, _jax, _render
from meshlayout._annotations import Leaf, PyTree
from meshlayout.cluster import startup
from meshlayout.cluster.channel import processes_text, shared_channel
from meshlayout.errors import ClusterError


T = TypeVar("T")

_HINT = "All processes must make the same calls of ml.cluster, in the same order."
_PROGRAMS_HINT = (
    "All processes must compile the same programs, in the same order. One that needs "
    "no new program runs an earlier one, and waits in it for the others."
)
_FAILURE_WAIT_S = 5.0  # for the others to read an error, if they come at all
_VALUE_BYTES = 2**20  # values of larger arguments are not compared
_NUM_SHOWN = 6  # elements of an array in a message
_NUM_LISTED = 3  # differences in a message


def barrier(name: str, timeout_s: float = 600.0) -> None:
    """Waits until all processes have come to the barrier of this name.

    Use this before a process reads what another one wrote. No device is involved.

    Raises:
        ClusterError: If a process does not come in time, which is named, or is at
            another call. So do the others.

    Example:
        >>> barrier("the vocabulary is written")
    """
    _exchange(f"barrier {name!r}", timeout_s, lambda: None)


def broadcast(tree: T, *, timeout_s: float = 600.0) -> T:
    """Returns the values of process 0 on all processes.

    Use this for what only one process can know, such as a run's name or a seed: a
    pytree of arrays, numbers and text. Dtypes stay what they are, also without
    `jax_enable_x64`; JAX's arrays become NumPy's.

    Example:
        >>> broadcast({"name": "run-3", "seed": 7})
        {'name': 'run-3', 'seed': 7}
    """
    sent = tree if startup.is_main() else None
    return _exchange("broadcast", timeout_s, _on_host, sent)[0]


def all_gather(tree: T, *, timeout_s: float = 600.0) -> T:
    """Returns the values of all processes, stacked in a first dim, on all of them.

    Use this for figures that each process has for itself, such as its number of rows:
    a pytree as for `broadcast`, of the same structure, shapes and dtypes on all
    processes, or ClusterError says what differs. Text becomes an array of objects.

    Example:
        >>> all_gather({"host": "a", "rows": 12})
        {'host': array(['a'], dtype=object), 'rows': array([12])}
    """
    trees = _exchange("all_gather", timeout_s, _on_host, tree)
    text = difference({p: _texts(x, _type_text) for p, x in trees.items()})
    if text:
        msg = f"all_gather: the trees differ between processes: {text}."
        raise ClusterError(msg)
    return jax.tree.map(_stacked, *trees.values())


def assert_same(value: PyTree, what: str, *, timeout_s: float = 600.0) -> None:
    """Raises an error on all processes unless all have the same value, bit by bit.

    Use this for what all processes must compute alike, such as a configuration: a
    pytree as for `broadcast`. Of large arrays, digests are sent; a replicated global
    array is compared as this process has it.

    Args:
        value: The value.
        what: What it is, to begin the message with.
        timeout_s: How long to wait for the others, in seconds.

    Raises:
        ClusterError: With what differs, and the process that has another value than
            most; or as for `barrier`.

    Example:
        >>> assert_same({"lr": 0.1, "files": ["a", "b"]}, "the configuration")
    """
    call = f"assert_same {what!r}"
    text = difference(_exchange(call, timeout_s, _texts, value, value_text))
    if text:
        msg = f"{what} must be the same on all processes: {text}."
        raise ClusterError(msg)


def difference(facts: Mapping[int, Mapping[str, str]]) -> str:
    """Describes what differs between processes, and on which; empty if nothing does."""
    texts = []
    for name in dict.fromkeys(name for values in facts.values() for name in values):
        processes: defaultdict[str, list[int]] = defaultdict(list)
        for process, values in facts.items():
            processes[values.get(name, "missing")].append(process)
        if len(processes) > 1:
            # Most processes are right; of two, process 0.
            groups = sorted(processes.items(), key=lambda g: (len(g[1]), -g[1][0]))
            parts = [f"{x[:200]} on {processes_text(group)}" for x, group in groups]
            if len(parts) > _NUM_LISTED:
                parts = [*parts[: _NUM_LISTED - 1], "other values elsewhere", parts[-1]]
            texts.append(f"{name} is {', '.join(parts[:-1])}, and {parts[-1]}")
    if len(texts) > _NUM_LISTED:
        texts = [*texts[:_NUM_LISTED], f"and {len(texts) - _NUM_LISTED} more differ"]
    return "; ".join(texts)


def _exchange(
    call: str, timeout_s: float, value: Callable[..., Any], *args: Any
) -> dict[int, Any]:
    """Returns the values of all processes that make a call; all raise its errors."""
    _checks.number("timeout_s", timeout_s, above=0, where=call, error=ClusterError)
    if startup.process_count() == 1:
        return {startup.process_index(): value(*args)}
    if threading.current_thread() is not threading.main_thread():
        msg = f"{call}: call it in the main thread, as threads have no common order."
        raise ClusterError(msg)
    channel = shared_channel("cluster", what="a call of ml.cluster", hint=_HINT)
    with channel.failure_told():
        message = call, pickle.dumps(value(*args))
    messages = channel.exchange(message, what=call, timeout_s=timeout_s)
    calls = difference({p: {"the call": name} for p, (name, _) in messages.items()})
    if calls:
        msg = f"processes are at different calls: {calls}. {_HINT}"
        raise ClusterError(msg)
    return {process: pickle.loads(value) for process, (_, value) in messages.items()}


def _texts(tree: PyTree, text: Callable[[Any], str]) -> dict[str, str]:
    """Returns a text for each leaf of a tree by its path, and the tree's structure."""
    pairs = jax.tree.leaves_with_path(_on_host(tree))
    name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    texts = {repr(name(p)) if p else "the value": text(leaf) for p, leaf in pairs}
    # Nodes of other libraries may show where they are in memory.
    structure = re.sub(r" at 0x[0-9a-f]+", "", str(jax.tree.structure(tree)))
    return {**texts, "the structure": structure}


def _on_host(tree: PyTree) -> Any:
    """Returns a tree with NumPy arrays, this process's copy of what is replicated."""

    def on_host(leaf: Leaf) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        is_key = _jax.is_extended(leaf.dtype)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return jax.tree.map(on_host, tree)


def _stacked(*leaves: Leaf) -> Any:
    # NumPy would cut off zeros at the end of text, and make large integers floats.
    is_int = isinstance(leaves[0], int) and max(map(abs, leaves)) >= 2**63
    is_object = is_int or isinstance(leaves[0], (str, bytes))
    return np.array(leaves, object) if is_object else np.stack(leaves)


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


@contextlib.contextmanager
def new_program(
    name: str, devices: Iterable[_jax.Device], why: str = ""
) -> Iterator[Callable[[Callable[[], Mapping[str, str]]], None]]:
    """A context in which all processes of some devices make a program.

    It yields a function to call once, before the program runs, with one that returns
    the program's facts: it raises ClusterError if another process has others. An error
    inside is told to the others. `why` is why there is a new program.
    """
    processes = sorted({device.process_index for device in devices})
    is_alone = len(processes) == 1 or _jax.process_index() not in processes
    if is_alone or _jax.coordination_client() is None:
        yield lambda facts: None
        return
    what = f"a new program of {name} ({why})" if why else f"the first call of {name}"
    key = f"programs/{'-'.join(map(str, processes))}"
    channel = shared_channel(key, processes, what=what, hint=_PROGRAMS_HINT)
    failure = "process {process} cannot come to {what}: {failure}"
    is_compared = False

    def compare(facts: Callable[[], Mapping[str, str]]) -> None:
        nonlocal is_compared
        texts = {"the program's name": name, **facts()}
        is_compared, own = True, digest(repr(texts).encode())
        digests = channel.exchange(own, what=what, failure=failure)
        if len({*digests.values()}) > 1:
            text = difference(channel.exchange(texts, what=what))
            msg = f"{name} is not the same program on all processes: {text}. All "
            msg += "processes must run the same program, with the same arguments, "
            raise ClusterError(f"{msg}made from the same seed.")

    try:
        yield compare
    except Exception as error:
        if not is_compared:
            channel.fail(error, what=what, timeout_s=_FAILURE_WAIT_S)
        raise


def program_facts(arguments: Mapping[str, Leaf], text: str) -> dict[str, str]:
    """Returns what processes compare of a program: its arguments, and its text."""
    facts, meshes = dict[str, str](), set[str]()
    for name, leaf in arguments.items():
        sharding: Any = _jax.sharding_of(leaf)
        spec = [str(getattr(sharding, key, "")) for key in ("spec", "memory_kind")]
        is_array = hasattr(leaf, "shape")
        kind = _render.array_text(leaf.dtype, leaf.shape) if is_array else type(leaf)
        facts[name] = " ".join(filter(None, [str(kind), *spec]))
        if mesh := getattr(sharding, "mesh", None):
            ids = _render.ranges_text([device.id for device in mesh.devices.flat])
            meshes.add(f"{dict(mesh.shape)} of devices {ids}")
        value = _shared_value(leaf)
        if value is not None:
            facts[f"the value of {name}"] = value_text(np.asarray(value))
    facts["the mesh"] = ", ".join(sorted(meshes))
    facts["the program"] = f"one of digest {digest(_stable(text).encode())}"
    return facts


def _shared_value(leaf: Leaf) -> Any:
    """Returns the value of a small argument, if all processes have all of it."""
    if isinstance(leaf, (bool, int, float, complex)):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct) or not hasattr(leaf, "shape"):
        return None
    if leaf.size * leaf.dtype.itemsize > _VALUE_BYTES:
        return None
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        if not leaf.is_fully_replicated:
            return None
        leaf = leaf.addressable_data(0)
    with jax.ensure_compile_time_eval():  # the program is being traced
        return jax.random.key_data(leaf) if _jax.is_extended(leaf.dtype) else leaf


def _stable(text: str) -> str:
    """Returns a program's text without addresses, and with sets of names in order."""
    return re.sub(
        r"\{('[^{}\n]*')\}",
        lambda match: f"{{{', '.join(sorted(match[1].split(', ')))}}}",
        re.sub(r" at 0x[0-9a-f]+", "", text),
    )


def replica_sums(
    arrays: Iterable[jax.Array | np.ndarray[Any, Any]],
) -> dict[tuple[int, ...], int]:
    """Returns a sum of bits for each group of processes that hold the same shards.

    A program per device sums one copy of each such shard; only sums come to the host.
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
    name = "the sum of the arrays and numbers that processes share"
    for group in sorted({group for groups in sums.values() for group in groups}):
        text = difference({p: {name: f"{sums[p].get(group, 0):x}"} for p in group})
        if text:
            return text
    return ""


@functools.lru_cache(maxsize=1024)
def _shared_shards(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> dict[Any, tuple[str, tuple[int, ...]]]:
    """Returns each shard on several processes, by one device of each of them."""
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
