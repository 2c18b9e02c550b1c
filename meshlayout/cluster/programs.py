"""The programs of a run are the same on all processes, or an error names the other one.

Every process compiles its own program, and JAX compares nothing: with another mesh,
another batch shape, another seed or another function on one process, all run on, and
each gets other numbers. So before the first call of a program, its processes compare a
digest of what they compile and of what they call it with. Later calls cost nothing.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from meshlayout import _jax, _render
from meshlayout._annotations import Leaf
from meshlayout.cluster.agreement import difference, digest, value_text
from meshlayout.cluster.channel import shared_channel
from meshlayout.errors import ClusterError


_FAILURE_WAIT_S = 5.0  # for the others to read an error, if they come at all
_VALUE_BYTES = 2**20  # values of larger arrays are not compared; a seed shows in others

_HINT = (
    "All processes must compile the same programs, in the same order. One that needs "
    "no new program runs an earlier one, and waits in it for the others."
)


@contextlib.contextmanager
def new_program(
    name: str, devices: Iterable[_jax.Device], why: str = ""
) -> Iterator[Callable[[Callable[[], Mapping[str, str]]], None]]:
    """A context in which all processes of some devices make a program.

    It yields a function to call once, before the program runs, with a function that
    returns the program's facts: if there are other processes, it raises ClusterError
    where theirs differ. An error inside is told to the others, which wait for this
    process. `why` says why there is a new program, if there was one before.
    """
    processes = sorted({device.process_index for device in devices})
    is_alone = len(processes) == 1 or _jax.process_index() not in processes
    if is_alone or _jax.coordination_client() is None:
        yield lambda facts: None
        return
    what = f"a new program of {name} ({why})" if why else f"the first call of {name}"
    key = f"programs/{'-'.join(map(str, processes))}"
    channel = shared_channel(key, processes, what=what, hint=_HINT)
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
    """Returns what processes compare of a program, as texts by name.

    Args:
        arguments: Arrays, abstract arrays and numbers, by their names.
        text: The program.
    """
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
    leaf = _jax.words_of_key(leaf) if _jax.is_extended(leaf.dtype) else leaf
    if leaf.size * leaf.dtype.itemsize > _VALUE_BYTES:
        return None
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return leaf.addressable_data(0) if leaf.is_fully_replicated else None
    return leaf


def _stable(text: str) -> str:
    """Returns a program's text without what differs between processes.

    These are addresses of functions, and the order of a set of names.
    tests/test_cluster_programs.py notices.

    Example:
        >>> _stable("jvp=<function f at 0x7f00> axes=frozenset({'b', 'a'})")
        "jvp=<function f> axes=frozenset({'a', 'b'})"
    """
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return re.sub(
        r"\{('[^{}\n]*')\}",
        lambda match: f"{{{', '.join(sorted(match[1].split(', ')))}}}",
        text,
    )
