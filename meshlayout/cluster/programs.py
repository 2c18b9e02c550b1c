"""The programs of a run are the same on all processes, or an error names the other one.

Every process compiles its own program, and JAX compares nothing: with another mesh,
another batch shape, another seed or another function on one process, all run on, and
each gets other numbers. So before the first call of a program, its processes compare
digests of what they compile and of what they call it with. Later calls cost nothing.

Of arrays that several processes hold (replicated parameters, PRNG keys) the values are
compared, too: other seeds make the same program. Floats may differ by rounding, as
processors of several kinds make them.
"""

import contextlib
import functools
import itertools
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshlayout import _jax, _render
from meshlayout._annotations import Leaf
from meshlayout.cluster.agreement import difference, digest, value_text
from meshlayout.cluster.channel import Channel, shared_channel
from meshlayout.errors import ClusterError


# Processes trace a program for about as long as each other, but one of them may take
# long for its first batch. If one is lost or does not need the program, `watch` says so
# long before.
TIMEOUT_S = 1800.0

# A process with an error waits for the others to read it, if they come at all.
_FAILURE_WAIT_S = 5.0

# Small arrays first, values are compared up to this many bytes. They show another seed
# as well as the large ones.
_VALUE_BYTES = 256 * 2**20

# Elements of large arrays of floats that are compared.
_NUM_PROJECTED = 2**18

# Relative to the norm. Another seed makes a difference of about 1.
_TOLERANCE = 1e-5

_HINT = (
    "All processes must compile the same programs, in the same order. One that needs "
    "no new program runs an earlier one, and waits in it for the others."
)


@dataclass(frozen=True)
class ProgramFacts:
    """What processes compare of a program.

    Attributes:
        arguments: Arrays, abstract arrays and numbers, by their names.
        text: The program.
        settings: What else is to be the same, as texts by name.
        own: Names of arguments whose values may differ between processes.
    """

    arguments: Mapping[str, Leaf]
    text: str
    settings: Mapping[str, str] = field(default_factory=dict)
    own: Collection[str] = ()


class NewProgram(contextlib.AbstractContextManager["NewProgram"]):
    """A context in which a program is made, on all processes of its devices.

    An error inside is told to the others, which wait for this process.

    Args:
        name: The program, as `"train_step"`.
        devices: The devices it will run on.
        why: Why a new one is needed, if there was one before.
    """

    def __init__(
        self, name: str, devices: Iterable[_jax.Device], why: str = ""
    ) -> None:
        self._name = name
        self._what = f"the first call of {name}"
        if why:
            self._what = f"a new program of {name} ({why})"
        self._processes = sorted({device.process_index for device in devices})
        is_shared = len(self._processes) > 1
        self._is_compared = (
            not is_shared
            or _jax.coordination_client() is None
            or _jax.process_index() not in self._processes
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and not self._is_compared:
            with self._channel() as channel:
                channel.fail(error, what=self._what, timeout_s=_FAILURE_WAIT_S)

    def compare(self, facts: Callable[[], ProgramFacts]) -> None:
        """Compares the program with the other processes', once.

        Args:
            facts: Returns what to compare; called if there are other processes.

        Raises:
            ClusterError: If a process has another program, or does not come.
        """
        if self._is_compared:
            return
        here = _Compared.of(self._name, facts())
        with self._channel() as channel:
            self._is_compared = True
            _compare(here, channel, self._what)

    @contextlib.contextmanager
    def _channel(self) -> Iterator[Channel]:
        """Yields the channel of the processes, for this thread alone."""
        name = f"programs/{'-'.join(map(str, self._processes))}"
        channel = shared_channel(name, self._processes, what=self._what, hint=_HINT)
        with channel.lock:
            yield channel


@dataclass(frozen=True)
class _Compared:
    """What one process sends of a program, and its values.

    Attributes:
        name: The program.
        facts: What it is.
        values: Of the arrays that other processes hold, too, by name: a digest, or for
            floats a projection and the norm.
        hosts: The same arrays on the host, for messages.
    """

    name: str
    facts: ProgramFacts
    values: dict[str, str | tuple[float, float]]
    hosts: dict[str, Any]

    @classmethod
    def of(cls, name: str, facts: ProgramFacts) -> "_Compared":
        """Fetches the values."""
        own = tuple(f"{argument}/" for argument in facts.own)
        pieces = [
            piece
            for path, leaf in facts.arguments.items()
            if not f"{path}/".startswith(own)
            for piece in _shared_pieces(path, leaf)
        ]
        pieces.sort(key=lambda piece: piece[1].nbytes)
        total, hosts = 0, {}
        for path, values in pieces:
            total += values.nbytes
            if total > _VALUE_BYTES:
                break
            hosts[path] = np.asarray(values)
        return cls(name, facts, {p: _summary(x) for p, x in hosts.items()}, hosts)

    def digest(self) -> str:
        """Returns a digest of everything but the values."""
        text = "\n".join(f"{name}: {text}" for name, text in self.texts().items())
        return digest(f"{text}\n{_stable(self.facts.text)}".encode())

    def texts(self) -> dict[str, str]:
        """Returns the arguments and settings the program is made for, by name."""
        arguments = self.facts.arguments
        return {
            "the program": self.name,
            **self.facts.settings,
            "the mesh": _meshes_text(arguments.values()),
            **{path: _leaf_text(leaf) for path, leaf in arguments.items()},
        }

    def is_like(self, values: Mapping[str, Any]) -> bool:
        """Returns whether values that another process has, too, are the same there."""
        return all(
            _is_close(self.values[path], values[path])
            for path in self.values.keys() & values.keys()
        )


def _compare(here: _Compared, channel: Channel, what: str) -> None:
    """Raises on all processes if one of them differs.

    Digests are compared with those of the first process; texts are sent only if one
    differs, as those of many processes would be a lot. Pieces that only some processes
    hold may be none of the first one's, so that all who have such pieces send theirs.
    """
    exchange = functools.partial(
        channel.exchange,
        what=what,
        timeout_s=TIMEOUT_S,
        failure="process {process} cannot come to {what}: {failure}",
    )
    is_first = channel.processes[0] == _jax.process_index()
    is_sender = is_first or any(path.endswith("]") for path in here.values)
    sent = exchange((here.digest(), here.values) if is_sender else None)
    messages = [message for message in sent.values() if message is not None]
    is_same = here.digest() == messages[0][0] and all(
        here.is_like(values) for _, values in messages
    )
    if all(exchange(is_same).values()):
        return
    texts = {f"the value of {path}": value_text(x) for path, x in here.hosts.items()}
    program = zlib.compress(_stable(here.facts.text).encode())
    messages = exchange((here.texts(), texts, program))
    text = (
        difference({p: facts for p, (facts, _, _) in messages.items()})
        or difference(_differing({p: v for p, (_, v, _) in messages.items()}))
        or _line_difference({p: text for p, (_, _, text) in messages.items()})
    )
    msg = (
        f"{here.name} is not the same program on all processes: {text}. All processes "
        "must run the same program, with the same arguments, made from the same seed."
    )
    raise ClusterError(msg)


def _differing(values: dict[int, dict[str, str]]) -> dict[int, dict[str, str]]:
    """Returns the values that differ between processes that have them."""
    texts: defaultdict[str, set[str]] = defaultdict(set)
    for facts in values.values():
        for path, text in facts.items():
            texts[path].add(text)
    return {
        process: {path: text for path, text in facts.items() if len(texts[path]) > 1}
        for process, facts in values.items()
    }


def _line_difference(programs: Mapping[int, bytes]) -> str:
    """Returns the first line in which programs differ."""
    lines = {
        p: zlib.decompress(text).decode().split("\n") for p, text in programs.items()
    }
    for number, row in enumerate(itertools.zip_longest(*lines.values(), fillvalue="")):
        if len(set(row)) > 1:
            columns = itertools.zip_longest(*row)
            start = next(i for i, chars in enumerate(columns) if len(set(chars)) > 1)
            shown = [_window(line, start) for line in row]
            facts = [{f"line {number + 1} of the program": line} for line in shown]
            return difference(dict(zip(lines, facts, strict=True)))
    return "the programs"


def _window(line: str, start: int) -> str:
    """Returns the part of a line around a place."""
    line = line.rstrip()
    begin = max(0, start - 60)
    part = line[begin : start + 60].strip()
    return f"`{'...' * (begin > 0)}{part}{'...' * (len(line) > start + 60)}`"


# Calls with pointers, or with the files that a kernel was written in.
_LOCAL_CALLS = re.compile(
    "callback|InspectSharding|CustomSPMDPartitioning|tpu_custom_call|triton|mosaic"
)


def _stable(text: str) -> str:
    """Returns a program's text without what differs between processes.

    These are addresses of functions, sets, the device on which callbacks run (the first
    of each process), and what they and kernels carry along.
    tests/test_cluster_programs.py notices.

    Example:
        >>> _stable("jvp=<function f at 0x7f00> axes=frozenset({'b', 'a'})")
        "jvp=<function f> axes=frozenset({'a', 'b'})"
    """
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    # Python orders a set of strings differently in each process.
    text = re.sub(r"\{('[^{}\n]*')\}", _sorted_set, text)
    text = re.sub(r"maximal( device=|_mesh_)\d+", "maximal", text)
    lines = text.split("\n")
    for index, line in enumerate(lines):
        if "@maximal" in line and "device_ids" in line:
            lines[index] = ""
        elif _LOCAL_CALLS.search(line):
            lines[index] = re.sub(r'"(\\.|[^"\\])*"|index = \d+|\b\d{4,}\b', "", line)
    return "\n".join(lines)


def _sorted_set(match: re.Match[str]) -> str:
    return f"{{{', '.join(sorted(match[1].split(', ')))}}}"


# Arrays.


def _shared_pieces(path: str, leaf: Leaf) -> Iterator[tuple[str, Any]]:
    """Yields the parts of an argument that other processes hold, too, by name."""
    if not hasattr(leaf, "shape") or isinstance(leaf, jax.ShapeDtypeStruct):
        if isinstance(leaf, (bool, int, float, complex)):
            yield path, np.asarray(leaf)
        return
    if _jax.is_extended(leaf.dtype):
        leaf = _jax.words_of_key(leaf)
    if not isinstance(leaf, jax.Array):
        yield path, np.asarray(leaf)  # in jax 0.7 also constants of a class of its own
        return
    if leaf.is_fully_addressable:
        yield path, leaf
        return
    if leaf.is_fully_replicated:
        # `addressable_shards` raises for some arrays of one device in each process.
        yield path, leaf.addressable_data(0)
        return
    holders: defaultdict[tuple[Any, ...], set[int]] = defaultdict(set)
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        holders[_bounds(index, leaf.shape)].add(device.process_index)
    for shard in leaf.addressable_shards:
        bounds = _bounds(shard.index, leaf.shape)
        # Once for several devices of this process.
        if len(holders.pop(bounds, ())) > 1:
            is_whole = shard.data.shape == leaf.shape
            part = ", ".join(f"{start}:{stop}" for start, stop in bounds)
            yield path if is_whole else f"{path}[{part}]", shard.data


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
    dims = zip(index, shape, strict=True)
    return tuple(dim.indices(size)[:2] for dim, size in dims)


def _summary(x: np.ndarray[Any, Any]) -> str | tuple[float, float]:
    """Returns a digest of an array; of floats, a projection and the norm."""
    if not jax.numpy.issubdtype(x.dtype, np.inexact):
        return digest(np.ascontiguousarray(x).reshape(-1).view(np.uint8))
    if jax.numpy.issubdtype(x.dtype, np.complexfloating):
        x = np.stack([x.real, x.imag])
    step = max(1, x.size // _NUM_PROJECTED)
    values = x.reshape(-1)[::step].astype(np.float64)
    return float(values @ _signs()[: values.size]), math.sqrt(values @ values)


@functools.cache
def _signs() -> np.ndarray[Any, Any]:
    """Returns signs without a period, so that no two rows are weighted alike."""
    return np.where(np.sin(np.arange(2 * _NUM_PROJECTED) ** 1.5) < 0, -1.0, 1.0)


def _is_close(a: Any, b: Any) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    if not all(map(math.isfinite, (*a, *b))):
        return repr(a) == repr(b)
    return max(abs(x - y) for x, y in zip(a, b, strict=True)) <= _TOLERANCE * max(
        a[1], b[1]
    )


def _meshes_text(leaves: Iterable[Leaf]) -> str:
    """Returns the meshes of arrays: their axes, and their devices in order."""
    meshes = {
        sharding.mesh
        for sharding in map(_jax.sharding_of, leaves)
        if isinstance(sharding, NamedSharding)
    }
    texts = []
    for mesh in meshes:
        axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        devices: Any = mesh.devices
        ids = _render.ranges_text([device.id for device in devices.flat])
        texts.append(f"Mesh({axes}) of devices {ids}")
    return " and ".join(sorted(texts))


def _leaf_text(leaf: Leaf) -> str:
    """Returns the type of an argument and how it is sharded: `f32[16@batch, 3]`."""
    if not hasattr(leaf, "shape"):
        return type(leaf).__name__
    sharding = _jax.sharding_of(leaf)
    sizes = list(map(str, leaf.shape))
    is_on_host = getattr(sharding, "memory_kind", None) == "pinned_host"
    for dim, entry in enumerate(getattr(sharding, "spec", ())):
        if entry is not None and entry != ():
            axes = "+".join(entry) if isinstance(entry, tuple) else entry
            sizes[dim] += f"@{axes}"
    text = f"{_render.dtype_text(leaf.dtype)}[{', '.join(sizes)}]"
    return f"{text} in pinned_host" if is_on_host else text
