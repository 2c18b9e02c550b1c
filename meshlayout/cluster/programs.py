"""The programs of a run are the same on all processes, or an error names the other one.

Every process compiles its own program, and JAX compares nothing: with another mesh,
another batch shape, another seed or another function on one process, all run on, and
each gets other numbers. So before the first call of a program, its processes compare a
digest of what they compile and of what they call it with. Later calls cost nothing.
"""

import contextlib
import re
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


_TIMEOUT_S = 600.0
_FAILURE_WAIT_S = 5.0  # for the others to read an error, if they come at all
_VALUE_BYTES = (
    2**20
)  # of larger arrays, values are not compared: seeds show in small ones

_HINT = (
    "All processes must compile the same programs, in the same order. One that needs "
    "no new program runs an earlier one, and waits in it for the others."
)

# Calls with pointers, or with the files that a kernel was written in.
_LOCAL_CALLS = re.compile(
    "callback|InspectSharding|CustomSPMDPartitioning|tpu_custom_call|triton|mosaic"
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

    def texts(self) -> dict[str, str]:
        """Returns what is compared, by name."""
        own = tuple(f"{name}/" for name in self.own)
        named = self.arguments.items()
        values = {
            f"the value of {name}": value_text(np.asarray(value))
            for name, leaf in named
            if not f"{name}/".startswith(own)
            for value in _shared_values(leaf)
        }
        return {
            **self.settings,
            "the mesh": _meshes_text(self.arguments.values()),
            **{name: _leaf_text(leaf) for name, leaf in named},
            **values,
            "the program": f"the one of digest {digest(_stable(self.text).encode())}",
        }


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
        self._what = f"a new program of {name} ({why})"
        self._what = self._what if why else f"the first call of {name}"
        self._processes = sorted({device.process_index for device in devices})
        self._is_compared = (
            len(self._processes) == 1
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
        texts = {"its name": self._name, **facts().texts()}
        own, failure = digest(repr(texts).encode()), "process {process} cannot come to "
        with self._channel() as channel:
            self._is_compared = True
            digests = channel.exchange(
                own,
                what=self._what,
                timeout_s=_TIMEOUT_S,
                failure=f"{failure}{{what}}: {{failure}}",
            )
            if len({*digests.values()}) == 1:
                return
            text = difference(channel.exchange(texts, what=self._what))
        msg = f"{self._name} is not the same program on all processes: {text}. All "
        msg += "must run the same program, with the same arguments, made from the same "
        raise ClusterError(f"{msg}seed.")

    @contextlib.contextmanager
    def _channel(self) -> Iterator[Channel]:
        """Yields the channel of the processes, for this thread alone."""
        name = f"programs/{'-'.join(map(str, self._processes))}"
        channel = shared_channel(name, self._processes, what=self._what, hint=_HINT)
        with channel.lock:
            yield channel


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
    text = re.sub(
        r"\{('[^{}\n]*')\}",
        lambda match: f"{{{', '.join(sorted(match[1].split(', ')))}}}",
        text,
    )
    text = re.sub(r"maximal( device=|_mesh_)\d+", "maximal", text)
    lines = text.split("\n")
    for index, line in enumerate(lines):
        if "@maximal" in line and "device_ids" in line:
            lines[index] = ""
        elif _LOCAL_CALLS.search(line):
            lines[index] = re.sub(r'"(\\.|[^"\\])*"|index = \d+|\b\d{4,}\b', "", line)
    return "\n".join(lines)


def _shared_values(leaf: Leaf) -> Iterator[Any]:
    """Yields the value of a small argument, if all processes have all of it."""
    if isinstance(leaf, (bool, int, float, complex)):
        yield leaf
    if isinstance(leaf, jax.ShapeDtypeStruct) or not hasattr(leaf, "shape"):
        return
    if _jax.is_extended(leaf.dtype):
        leaf = _jax.words_of_key(leaf)
    if leaf.size * leaf.dtype.itemsize <= _VALUE_BYTES:
        is_array = isinstance(leaf, jax.Array)
        if not is_array or leaf.is_fully_addressable:
            yield leaf
        elif leaf.is_fully_replicated:
            yield leaf.addressable_data(0)


def _meshes_text(leaves: Iterable[Leaf]) -> str:
    """Returns the meshes of arrays: their axes, and their devices in order."""
    shardings = map(_jax.sharding_of, leaves)
    meshes: set[Any] = {x.mesh for x in shardings if isinstance(x, NamedSharding)}
    texts = []
    for mesh in meshes:
        axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        ids = _render.ranges_text([device.id for device in mesh.devices.flat])
        texts.append(f"Mesh({axes}) of devices {ids}")
    return " and ".join(sorted(texts))


def _leaf_text(leaf: Leaf) -> str:
    """Returns the type of an argument and how it is sharded: `f32[16, 3] batch,None`."""
    if not hasattr(leaf, "shape"):
        return type(leaf).__name__
    sharding = _jax.sharding_of(leaf)
    specs = [str(x) for x in (getattr(sharding, "spec", ()), _memory(sharding)) if x]
    return " ".join([_render.array_text(leaf.dtype, leaf.shape), *specs])


def _memory(sharding: Any) -> str:
    is_on_host = getattr(sharding, "memory_kind", None) == "pinned_host"
    return "in pinned_host" if is_on_host else ""
