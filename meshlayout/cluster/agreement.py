"""Values that processes bring together: barriers, broadcasts, comparisons.

They go through the channel and not through a collective: JAX's own helpers
(`multihost_utils`) need devices, make 64 bits 32, and given trees that differ, or calls
in another order, they hang or return another call's values. Here every message says
which call it is for.

Calls are paired by their order, which only a single thread has. That is the main
thread; in others, a call has a name, and calls of one name are paired.
"""

import hashlib
import pickle
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

import jax
import numpy as np
from jax.core import Tracer

from meshlayout import _checks, _jax, _paths, _render
from meshlayout._annotations import Leaf, PyTree
from meshlayout.cluster import startup
from meshlayout.cluster.channel import processes_text, shared_channel
from meshlayout.errors import ClusterError


T = TypeVar("T")

_HINT = "All processes must make the same calls of ml.cluster, in the same order."

# Arrays of up to so many elements are shown in messages.
_NUM_SHOWN = 6

# Differences that one message lists, and characters of a value.
_NUM_LISTED, _LONGEST_TEXT = 3, 80

# Bits of the longest integer that is shown as a decimal.
_LONGEST_DECIMAL = 2**10

# The name of what a tree is apart from its leaves.
_STRUCTURE = "the structure"


def barrier(name: str, timeout_s: float = 600.0) -> None:
    """Waits until all processes have come to this barrier.

    Use this before a process reads what another one wrote. No device is involved.

    Args:
        name: The name of the barrier, the same on all processes. It may be used again.
        timeout_s: How long to wait for the others, in seconds.

    Raises:
        ClusterError: If a process does not come in time, which is named, or is at
            another call.

    Example:
        >>> barrier("the vocabulary is written")
    """
    _checked_name("name", name, "barrier")
    _exchange("barrier", name, lambda: None, timeout_s)


def broadcast(tree: T, *, name: str | None = None, timeout_s: float = 600.0) -> T:
    """Returns the values of process 0 on all processes.

    Use this for what only one process can know, such as a run's name, a random seed or
    a file that only process 0 reads. Values keep their dtypes: float64 and int64 stay
    what they are, also without `jax_enable_x64`.

    Args:
        tree: Arrays, numbers and text, or a pytree of those. The other processes give a
            tree of the same paths, shapes and dtypes, whose values do not matter, or
            None.
        name: A name for the call, the same on all processes; needed only in a thread
            other than the main one.
        timeout_s: How long to wait for the others, in seconds.

    Returns:
        The tree, with NumPy arrays for arrays of JAX.

    Raises:
        ClusterError: If trees differ, a process does not come, or is at another call.

    Example:
        >>> broadcast({"name": "run-3", "seed": 7})
        {'name': 'run-3', 'seed': 7}
    """

    def value() -> Any:
        host = _HostTree.of(tree, "broadcast")
        if startup.is_main():
            return host.types(), host.to_bytes()
        return None if tree is None else host.types(), b""

    values = _exchange("broadcast", name, value, timeout_s)
    _check_types({p: types for p, (types, _) in values.items() if types}, "broadcast")
    return _restored(pickle.loads(values[0][1]))


def all_gather(tree: T, *, name: str | None = None, timeout_s: float = 600.0) -> T:
    """Returns the values of all processes, stacked in a first dim, on all of them.

    Use this for figures that each process has for itself, such as its number of rows or
    its time. Values keep their dtypes, as for `broadcast`.

    Args:
        tree: Arrays, numbers and text, or a pytree of those, of the same paths, shapes
            and dtypes on all processes.
        name: As for `broadcast`.
        timeout_s: As for `broadcast`.

    Returns:
        The tree with NumPy arrays, whose index in the first dim is the process; text
        becomes arrays of objects.

    Raises:
        ClusterError: If trees differ, a process does not come, or is at another call.

    Example:
        >>> all_gather({"host": "a", "rows": 12})
        {'host': array(['a'], dtype=object), 'rows': array([12])}
    """

    def value() -> Any:
        host = _HostTree.of(tree, "all_gather")
        return host.types(), host.to_bytes()

    values = _exchange("all_gather", name, value, timeout_s)
    _check_types({p: types for p, (types, _) in values.items()}, "all_gather")
    trees = [pickle.loads(content) for _, content in values.values()]
    return jax.tree.map(lambda *leaves: _restored(_stacked(leaves)), *trees)


def assert_same(value: PyTree, what: str, *, timeout_s: float = 600.0) -> None:
    """Raises an error on all processes unless all have the same value, bit by bit.

    Use this for what all processes must compute alike, such as a configuration or a
    list of files.

    Args:
        value: Arrays, numbers and text, or a pytree of those. Only digests of large
            arrays are sent. A global array that is replicated is compared as this
            process has it.
        what: What it is, to begin the message with.
        timeout_s: How long to wait for the others, in seconds.

    Raises:
        ClusterError: If values differ. It names what differs, and the process that has
            another value than most; or if a process does not come, or is at another
            call.

    Example:
        >>> assert_same({"lr": 0.1, "files": ["a", "b"]}, "the configuration")
    """
    _checked_name("what", what, "assert_same")
    values = _exchange(
        "assert_same",
        what,
        lambda: _HostTree.of(value, f"assert_same, {what}").values(),
        timeout_s,
    )
    if text := _tree_difference(values):
        msg = f"{what} must be the same on all processes: {text}."
        raise ClusterError(msg)


def difference(facts: Mapping[int, Mapping[str, str]]) -> str:
    """Describes what differs between processes, and on which; empty if nothing does.

    Args:
        facts: For each process, values as texts by the names of what they belong to.

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
            parts = [f"{text} on {processes_text(group)}" for text, group in groups]
            if len(parts) > _NUM_LISTED:
                parts = [*parts[: _NUM_LISTED - 1], "other values elsewhere", parts[-1]]
            texts.append(f"{name} is {', '.join(parts[:-1])}, and {parts[-1]}")
    if len(texts) > _NUM_LISTED:
        texts = [*texts[:_NUM_LISTED], f"and {len(texts) - _NUM_LISTED} more differ"]
    return "; ".join(texts)


# Calls.


def _exchange(
    call: str, name: str | None, value: Callable[[], Any], timeout_s: float
) -> dict[int, Any]:
    """Returns the values of all processes that make a call.

    Args:
        call: The function.
        name: The name that was given to the call.
        value: Returns this process's value. If it raises, all processes do.
        timeout_s: As the user gave it.
    """
    timeout_s = _checks.number(
        "timeout_s", timeout_s, above=0, where=call, error=ClusterError
    )
    if name is not None:
        _checked_name("name", name, call)
    client = _jax.coordination_client()
    if client is None:
        if startup.process_count() > 1:
            msg = (
                f"{call}: there are {startup.process_count()} processes, which cannot "
                "exchange messages. Call ml.initialize() at the top of the program."
            )
            raise ClusterError(msg)
        return {startup.process_index(): value()}
    text = call if name is None else f"{call} {name!r}"
    sequence = ""
    if threading.current_thread() is not threading.main_thread():
        if name is None:
            msg = (
                f"{call} was called in the thread {threading.current_thread().name!r}. "
                "Calls of processes are paired by their order, which threads do not "
                f"have. Call it in the main thread, or give it a name: {call}(..., "
                "name='...')."
            )
            raise ClusterError(msg)
        sequence = text
    channel = shared_channel(
        f"cluster/{quote(sequence, safe='')}", what=text, hint=_HINT
    )
    if not channel.lock.acquire(blocking=False):
        msg = (
            f"{text} is called in two threads at once, so that calls of different "
            "processes cannot be paired. Give each thread its own name."
        )
        raise ClusterError(msg)
    try:
        with channel.failure_told():
            message = text, value()
        messages = channel.exchange(message, what=text, timeout_s=timeout_s)
    finally:
        channel.lock.release()
    calls = difference({p: {"the call": call} for p, (call, _) in messages.items()})
    if calls:
        raise ClusterError(f"processes are at different calls: {calls}. {_HINT}")
    return {process: value for process, (_, value) in messages.items()}


def _checked_name(parameter: str, name: Any, call: str) -> None:
    if not isinstance(name, str) or not name:
        msg = f"{call}: {parameter} must be a text, got {_checks.shown(name)}."
        raise ClusterError(msg)


# Trees.


@dataclass(frozen=True)
class _Key:
    """A PRNG key on the host: the name of its generator, and its words."""

    impl: str
    words: np.ndarray[Any, Any]


@dataclass(frozen=True)
class _HostTree:
    """A tree with its arrays on the host.

    Attributes:
        call: What it was given to.
        paths: The path of each leaf.
        leaves: Numbers, text, NumPy arrays and keys.
        treedef: The structure.
    """

    call: str
    paths: list[str]
    leaves: list[Any]
    treedef: Any

    @classmethod
    def of(cls, tree: PyTree, call: str) -> "_HostTree":
        """Fetches a tree.

        Raises:
            ClusterError: If a leaf is neither of these, or the keys of a dict have no
                order.
        """
        try:
            leaves, treedef = jax.tree.flatten(tree)
        except ValueError as error:
            first = str(error).partition("\n")[0]
            msg = f"{call}: JAX cannot flatten the tree: {first} Use keys of one type."
            raise ClusterError(msg) from None
        paths = list(_paths.leaf_names(tree))
        hosts = [
            _on_host(leaf, f"{call}: {path}" if path else call)
            for path, leaf in zip(paths, leaves, strict=True)
        ]
        return cls(call, paths, hosts, treedef)

    def types(self) -> dict[str, str]:
        """Returns the type of each leaf, and the structure of the tree."""
        return self._facts(_type)

    def values(self) -> dict[str, str]:
        """Returns the type and the value of each leaf, and the structure."""
        return self._facts(value_text)

    def _facts(self, text: Callable[[Any], str]) -> dict[str, str]:
        names = [repr(path) if path else "the value" for path in self.paths]
        facts: dict[str, str] = {}
        for index, (name, leaf) in enumerate(zip(names, self.leaves, strict=True)):
            # Two leaves may have the same path: {"a/b": 1, "a": {"b": 2}}.
            facts[f"{name} (leaf {index})" if name in facts else name] = text(leaf)
        # Nodes of other libraries may show where they are in memory.
        structure = re.sub(r" at 0x[0-9a-f]+", "", str(self.treedef))
        return {**facts, _STRUCTURE: _shortened(structure)}

    def to_bytes(self) -> bytes:
        """Returns the tree as bytes.

        Raises:
            ClusterError: If pickle cannot hold it.
        """
        try:
            return pickle.dumps(self.treedef.unflatten(self.leaves))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            msg = f"{self.call}: the tree cannot be sent: {error}."
            raise ClusterError(msg) from error


def _on_host(leaf: Leaf, where: str) -> Any:
    if isinstance(leaf, (bool, int, float, complex, str, bytes)):
        return leaf
    if isinstance(leaf, Tracer):
        msg = (
            f"{where}: a value inside jit is not known yet. Call this outside, with "
            "the result."
        )
        raise ClusterError(msg)
    if isinstance(leaf, jax.Array):
        return _fetched(leaf, where)
    is_array = isinstance(leaf, (np.ndarray, np.generic))
    if not is_array or leaf.dtype.hasobject or isinstance(leaf, np.ma.MaskedArray):
        what = f"an array of {leaf.dtype}" if is_array else _checks.shown(leaf)
        what = "a masked array" if isinstance(leaf, np.ma.MaskedArray) else what
        msg = f"{where} is {what}. Processes exchange arrays, numbers and text."
        raise ClusterError(msg)
    return leaf


def _fetched(x: jax.Array, where: str) -> Any:
    """Returns the value of a JAX array; for a replicated one, this process's copy."""
    if x.is_deleted():
        msg = f"{where} is deleted: it was donated to a step or a relayout."
        raise ClusterError(msg)
    if _jax.is_extended(x.dtype):
        words = _fetched(jax.random.key_data(x), where)
        return _Key(_jax.key_impl(x.dtype), words)
    if not x.is_fully_addressable and not x.is_fully_replicated:
        msg = (
            f"{where} {_render.array_text(x.dtype, x.shape)} is sharded over several "
            "processes. Gather it with ml.to_numpy(x)."
        )
        raise ClusterError(msg)
    return np.asarray(x if x.is_fully_addressable else x.addressable_data(0))


def _restored(tree: PyTree) -> Any:
    """Returns a tree with PRNG keys again where it had some."""
    return jax.tree.map(
        lambda leaf: (
            jax.random.wrap_key_data(jax.numpy.asarray(leaf.words), impl=leaf.impl)
            if isinstance(leaf, _Key)
            else leaf
        ),
        tree,
    )


def _stacked(leaves: tuple[Any, ...]) -> Any:
    first = leaves[0]
    if isinstance(first, _Key):
        return _Key(first.impl, np.stack([leaf.words for leaf in leaves]))
    if isinstance(first, (str, bytes)) or (
        isinstance(first, int) and any(abs(leaf) >= 2**63 for leaf in leaves)
    ):
        # NumPy would cut off zeros at the end of text, and make large integers floats.
        return np.array(leaves, object)
    return np.stack([np.asarray(leaf) for leaf in leaves])


def _check_types(types: Mapping[int, Mapping[str, str]], call: str) -> None:
    if text := _tree_difference(types):
        msg = f"{call}: the trees differ between processes: {text}."
        raise ClusterError(msg)


def _tree_difference(facts: Mapping[int, Mapping[str, str]]) -> str:
    """Describes how trees differ: in their leaves, or else in their structure."""
    leaves = {
        process: {name: text for name, text in texts.items() if name != _STRUCTURE}
        for process, texts in facts.items()
    }
    return difference(leaves) or difference(facts)


def _type(leaf: Any) -> str:
    """Returns the type of a leaf on the host, for messages."""
    if isinstance(leaf, _Key):
        return f"key<{leaf.impl}>{list(leaf.words.shape[:-1])}"
    if not isinstance(leaf, (np.ndarray, np.generic)):
        return _checks.type_text(leaf)
    if leaf.dtype.kind in "US":  # their length may differ
        return _render.array_text(
            "text" if leaf.dtype.kind == "U" else "bytes", leaf.shape
        )
    return _render.array_text(leaf.dtype, leaf.shape)


def value_text(leaf: Any) -> str:
    """Returns a text that is the same for two leaves if they have the same bits."""
    if isinstance(leaf, _Key):
        return f"{_type(leaf)} {leaf.words.tolist()}"
    if not isinstance(leaf, (np.ndarray, np.generic)):
        # Python refuses to write huge integers as decimals.
        is_huge = isinstance(leaf, int) and leaf.bit_length() > _LONGEST_DECIMAL
        return _shortened(hex(leaf) if is_huge else repr(leaf))
    values = np.asarray(leaf)
    # NaNs of different bits look the same.
    if values.size <= _NUM_SHOWN and bool((values == values).all()):
        return _shortened(f"{_type(leaf)} {values.tolist()}")
    content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return f"{_type(leaf)} (digest {digest(content)})"


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:_LONGEST_TEXT]}... (digest {digest(text.encode())})"


def digest(content: Any) -> str:
    """Returns a digest that is the same in all processes.

    Example:
        >>> digest(b"abc")
        'd8bb14d833d59559'
    """
    return hashlib.blake2b(content, digest_size=8).hexdigest()
