"""Values that processes exchange, and programs that they compare.

Values go through a channel and not through a collective: JAX's own helpers
(`multihost_utils`) need devices, make 64 bits 32, and given trees that differ, or calls
in another order, they hang or return another call's values. Calls are paired by their
order, which only the main thread has, and every message names its call.

Every process compiles its own program, and JAX compares nothing: with a different mesh,
batch shape, seed or function on one process, all run on with wrong numbers. So before
the first call of a program, its processes compare a digest of it.
"""

import functools
import hashlib
import pickle
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from meshlayout import _checks, _jax, _render
from meshlayout._annotations import Leaf, PyTree
from meshlayout.cluster import startup
from meshlayout.cluster.channel import processes_text, shared_channel
from meshlayout.errors import ClusterError


T = TypeVar("T")

_HINT = "All processes must make the same calls of ml.cluster, in the same order."
_PROGRAMS_HINT = "All processes must compile the same programs, in the same order."
_VALUE_BYTES = 2**20  # values of larger arguments are not compared
_NUM_SHOWN = 6  # elements of an array in a message
_NUM_LISTED = 3  # differences in a message


def barrier(name: str, timeout_s: float = 600.0) -> None:
    """Waits until all processes have come to the barrier of this name.

    Use this before a process reads what another one wrote. No device is involved.

    Raises:
        ClusterError: On all processes, naming one that is late or at another call.

    Examples:
        >>> barrier("the vocabulary is written")
    """
    _exchange(f"barrier {name!r}", timeout_s, lambda: None)


def broadcast(tree: T, *, timeout_s: float = 600.0) -> T:
    """Returns the values of process 0 on all processes.

    Use this for values that only one process knows, such as a run's name or a seed: a
    pytree of arrays, numbers and text. Dtypes stay; JAX arrays become NumPy arrays.

    Examples:
        >>> broadcast({"name": "run-3", "seed": 7})
        {'name': 'run-3', 'seed': 7}
    """
    sent = tree if startup.is_main() else None
    return _exchange("broadcast", timeout_s, _on_host, sent)[0]


def all_gather(tree: T, *, timeout_s: float = 600.0) -> T:
    """Returns the values of all processes, stacked along a new first dim.

    Use this for values of each process, such as its number of rows: a pytree as for
    `broadcast`. If structures, shapes or dtypes differ, a ClusterError names the
    difference. Text becomes an array of objects.

    Examples:
        >>> all_gather({"host": "a", "rows": 12})
        {'host': array(['a'], dtype=object), 'rows': array([12])}
    """
    trees = _exchange("all_gather", timeout_s, _on_host, tree)
    if text := difference({p: _texts(x, _type_text) for p, x in trees.items()}):
        raise ClusterError(f"all_gather: the trees differ between processes: {text}.")
    return jax.tree.map(_stacked, *trees.values())


def assert_same(value: PyTree, what: str, *, timeout_s: float = 600.0) -> None:
    """Raises an error on all processes unless all have the same value, bit by bit.

    Use this for values that must agree, such as a configuration: a pytree as for
    `broadcast`. Large arrays are compared by digest, replicated ones by the local copy.

    Args:
        value: The value.
        what: The name of the value, with which the message begins.
        timeout_s: How long to wait for the others, in seconds.

    Raises:
        ClusterError: Names what differs from most processes; or as for `barrier`.

    Examples:
        >>> assert_same({"lr": 0.1, "files": ["a", "b"]}, "the configuration")
    """
    facts = _exchange(f"assert_same {what!r}", timeout_s, _texts, value, _value_text)
    if text := difference(facts):
        raise ClusterError(f"{what} must be the same on all processes: {text}.")


def difference(facts: Mapping[int, Mapping[str, str]]) -> str:
    """Describes what differs between processes, and on which; empty if nothing does."""
    texts = []
    for name in dict.fromkeys(name for values in facts.values() for name in values):
        processes: defaultdict[str, list[int]] = defaultdict(list)
        for process, values in facts.items():
            processes[values.get(name, "missing")].append(process)
        if len(processes) > 1:
            # The majority is taken to be right; of two, process 0.
            groups = sorted(processes.items(), key=lambda g: (len(g[1]), -g[1][0]))
            parts = [f"{x[:200]} on {processes_text(group)}" for x, group in groups]
            if len(parts) > _NUM_LISTED:
                parts[_NUM_LISTED - 1 : -1] = ["other values elsewhere"]
            texts.append(f"{name} is {', '.join(parts[:-1])}, and {parts[-1]}")
    if len(texts) > _NUM_LISTED:
        texts[_NUM_LISTED:] = [f"and {len(texts) - _NUM_LISTED} more differ"]
    return "; ".join(texts)


def _exchange(
    call: str, timeout_s: float, value: Callable[..., Any], *args: Any
) -> dict[int, Any]:
    _checks.number("timeout_s", timeout_s, above=0, where=call, error=ClusterError)
    if startup.process_count() == 1:
        return {startup.process_index(): value(*args)}
    if threading.current_thread() is not threading.main_thread():
        msg = f"{call}: call it in the main thread, as threads have no common order."
        raise ClusterError(msg)
    channel = shared_channel(_jax.coordination.client, "cluster", hint=_HINT)
    with channel.failure_told():
        message = call, pickle.dumps(value(*args))
    messages = channel.exchange(message, what=call, timeout_s=timeout_s)
    if text := difference({p: {"the call": x} for p, (x, _) in messages.items()}):
        raise ClusterError(f"processes are in different calls: {text}. {_HINT}")
    return {process: pickle.loads(value) for process, (_, value) in messages.items()}


def _texts(tree: PyTree, text: Callable[[Any], str]) -> dict[str, str]:
    pairs, structure = jax.tree_util.tree_flatten_with_path(_on_host(tree))
    name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    texts = {repr(name(p)) if p else "the value": text(leaf) for p, leaf in pairs}
    return {**texts, "the structure": _without_addresses(str(structure))}


def _on_host(tree: PyTree) -> Any:
    # As NumPy arrays; of what is replicated, this process's copy.
    def on_host(x: Leaf) -> Any:
        return np.asarray(_jax.key_words(x)) if isinstance(x, jax.Array) else x

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


def _value_text(leaf: Leaf) -> str:  # the same for the same bits
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


def _without_addresses(text: str) -> str:
    # Nodes of other libraries, and functions, may show where they are in memory.
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def compare_program(
    name: str,
    devices: Iterable[_jax.Device],
    facts: Callable[[], Mapping[str, str]],
    why: str = "",
) -> None:
    """Raises ClusterError if processes of some devices make programs of other facts.

    `why` says why there is a new program after the first one of that name.
    """
    processes = tuple(sorted({device.process_index for device in devices}))
    client, here = _jax.coordination.client, _jax.process_index()
    if len(processes) == 1 or here not in processes or client is None:
        return
    what = f"a new program of {name} ({why})" if why else f"the first call of {name}"
    key = f"programs/{'-'.join(map(str, processes))}"
    channel = shared_channel(client, key, processes, hint=_PROGRAMS_HINT)
    texts = {"the program's name": name, **facts()}
    digests = channel.exchange(digest(repr(texts).encode()), what=what)
    if len({*digests.values()}) > 1:
        text = difference(channel.exchange(texts, what=what))
        msg = f"{name} is not the same program on all processes: {text}. All must run "
        msg += "the same program, with the same arguments, made from the same seed."
        raise ClusterError(msg)


def program_facts(arguments: Mapping[str, Leaf], text: str) -> dict[str, str]:
    """Returns the facts of a program that processes compare: its arguments and text."""
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
        if (value := _shared_value(leaf)) is not None:
            facts[f"the value of {name}"] = _value_text(np.asarray(value))
    facts["the mesh"] = ", ".join(sorted(meshes))
    # Sets of names have an order of each process.
    text = re.sub(
        r"\{('[^{}\n]*')\}",
        lambda match: f"{{{', '.join(sorted(match[1].split(', ')))}}}",
        _without_addresses(text),
    )
    facts["the program"] = f"one of digest {digest(text.encode())}"
    return facts


def _shared_value(leaf: Leaf) -> Any:
    # The value of a small argument that all processes hold in full.
    if isinstance(leaf, (bool, int, float, complex)):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct) or not hasattr(leaf, "shape"):
        return None
    is_global = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    is_apart = is_global and not leaf.is_fully_replicated
    if is_apart or leaf.size * leaf.dtype.itemsize > _VALUE_BYTES:
        return None
    leaf = leaf.addressable_data(0) if is_global else leaf
    with jax.ensure_compile_time_eval():  # the program is being traced
        return _jax.key_words(leaf)
