"""Programs ahead of time: for devices that are not here, and executables in files.

A file holds what XLA compiled, and what it was compiled from: versions, devices and the
lowered text. A step that loads it traces and lowers as ever, and compares, so that no
other program than its own can run.
"""

import difflib
import importlib.metadata
import json
import os
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental import serialize_executable  # noqa: TID251
from jax.sharding import NamedSharding

import meshlayout
from meshlayout import _checks, _jax, _render
from meshlayout._annotations import Leaf, PyTree
from meshlayout.cluster import process_count, process_index
from meshlayout.errors import StepError
from meshlayout.hlo import Communication, Cost
from meshlayout.mesh import Mesh
from meshlayout.planning.chips import chip_of, memory_refusal, mesh_for
from meshlayout.planning.schedule import Replay, replay
from meshlayout.step.inspection import (
    StepInspection,
    StepMemory,
    communication_of,
    memory_of,
)
from meshlayout.step.state_step import StateStep


if TYPE_CHECKING:
    from meshlayout.step import CompiledStep


@dataclass(frozen=True, repr=False)
class CompiledProgram:
    """A step's program for a mesh, and its reports; made by `step.compile_for`.

    Attributes:
        compiled: What JAX compiled; it runs if its devices are here.
        mesh: The mesh.
        cost: Its FLOPs, on all devices together.
        memory: The bytes on each device, by the compiler.
        communication: Every collective.
    """

    compiled: jax.stages.Compiled
    mesh: Mesh
    cost: Cost
    memory: StepMemory
    communication: Communication

    def schedule(self, *, hop_s: float = 1e-6) -> Replay:
        """Returns how long a step takes by the compiler's schedule, on TPUs.

        Args:
            hop_s: The latency of a message from one device to the next, in seconds.

        Raises:
            MeshError: If the program is for other devices, whose compilers estimate no
                cycles.
        """
        chip = chip_of(self.mesh.devices.flat[0])
        return replay(self.compiled.as_text() or "", chip, hop_s=hop_s)

    def __repr__(self) -> str:
        lines = [f"program for {self.mesh!r}", str(self.memory)]
        lines += [f"FLOPs of all devices: {self.cost.flops:.3g}"]
        return "\n".join([*lines, str(self.communication)])


def compile_for(
    step: StepInspection,
    target: "str | Mesh | jax.sharding.Mesh",
    *args: Any,
    **kwargs: Any,
) -> CompiledProgram:
    """Compiles a step for devices that need not be here; `step.compile_for` calls it.

    Args:
        step: A made or compiled step.
        target: A topology, as `"v5e:4x4"`, for the axes of the state's mesh, of which
            the first takes what is left; or a mesh with these axes, also of
            `describe_devices`.
        *args: What the step takes, abstract or not; on whatever mesh it lies, its specs
            are taken over.
        **kwargs: The same by name.

    Raises:
        MeshError: If there is no such topology, or it has no such mesh.
        StepError: If the program does not fit into the devices' memory.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    meshes = [x.sharding.mesh for x in leaves if _is_placed(x)]
    mesh = mesh_for(target, dict(meshes[0].shape) if meshes else {})
    moved = [_moved(leaf, mesh, is_state) for leaf, is_state in _marked(leaves, args)]
    args, kwargs = treedef.unflatten(moved)
    traced = step.trace(*args, **kwargs)
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        refusal = memory_refusal(error)
        if refusal is None:
            raise
        needed, available = map(_render.bytes_text, refusal)
        name = getattr(step, "__name__", "the step")
        msg = f"{name} does not fit {mesh!r}: it needs {needed} of {available} on each "
        fix = "device. Shard the state further, or take remat= or accumulate=."
        raise StepError(f"{msg}{fix}") from error
    reports = memory_of(compiled), communication_of(compiled, step._state_name)
    cost = meshlayout.hlo.read_cost(traced)
    return CompiledProgram(compiled, mesh, cost, *reports)


def _is_placed(leaf: Leaf) -> bool:
    return isinstance(getattr(leaf, "sharding", None), NamedSharding)


def _marked(leaves: list[Leaf], args: tuple[Any, ...]) -> list[tuple[Leaf, bool]]:
    """Returns leaves, and whether they are the state's, which comes first."""
    num_state = len(jax.tree.leaves(args[:1]))
    return [(leaf, index < num_state) for index, leaf in enumerate(leaves)]


def _moved(leaf: Leaf, mesh: Mesh, is_state: bool) -> Any:  # noqa: FBT001
    """Returns an abstract array on another mesh; a batch from the host has no place."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    sharding = None
    if _is_placed(leaf):
        kind, specs = leaf.sharding.memory_kind, leaf.sharding.spec
        kind = kind if kind == "pinned_host" else None
        sharding = NamedSharding(mesh.jax_mesh, specs, memory_kind=kind)
    elif is_state:
        sharding = mesh.layout(*[None] * len(leaf.shape)).sharding
    weak = bool(getattr(jax.typeof(leaf), "weak_type", False))
    dtype = _jax.canonical_dtype(leaf.dtype)
    options: Any = {"sharding": sharding, "weak_type": weak}
    return jax.ShapeDtypeStruct(leaf.shape, dtype, **options)


# Executables in files.

_MAGIC = b"meshlayout executable 1\n"
_FACTS = {  # what a program is compiled for, besides its text
    "jax": "jax",
    "jaxlib": "jaxlib",
    "compiler": "the compiler",
    "kinds": "devices of the kind",
    "ids": "the device ids",
    "processes": "a number of processes of",
}


def save_compiled(step: Any, path: str | os.PathLike[str], *args: Any) -> None:
    """Saves a program of a step in a file; `step.save_compiled` calls this.

    Args:
        step: A made or compiled step.
        path: The file; each of several processes appends its index.
        *args: What the step takes; without, it is the program of the last call.

    Raises:
        StepError: If the step was not called and no arguments are given, or JAX cannot
            save programs for these devices.
    """
    target, kwargs = _own_path(path), {}
    if args and isinstance(step, StateStep):
        step, args, _ = step._call_of(*args, *[None] * (3 - len(args)))
    elif not args:
        # A made step has compiled steps, of which the last was traced last.
        steps = [*step._compiled.values()] if isinstance(step, StateStep) else [step]
        called = [each for each in steps if each.called is not None]
        if not called:
            msg = "save_compiled: the step was not called. Call it first, or give "
            raise StepError(f"{msg}what it takes: save_compiled(path, state, batch).")
        step = called[-1]
        args, kwargs = step.called
    lowered = step.trace(*args, **kwargs).lower()
    try:
        payload, _, _ = serialize_executable.serialize(lowered.compile())
    except (ValueError, NotImplementedError) as error:
        msg = f"save_compiled: JAX cannot save the program: {error}."
        raise StepError(msg) from error
    text = lowered.as_text()
    facts = {**_facts(_devices_of((args, kwargs))), "bytes": len(payload)}
    header = json.dumps(facts).encode()
    parts = [_MAGIC, header, b"\n", payload, zlib.compress(text.encode())]
    # Complete or not at all, as another process may read it meanwhile.
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial.write_bytes(b"".join(parts))
    partial.replace(target)


def load_compiled(step: Any, path: str | os.PathLike[str]) -> None:
    """Reads a file of `save_compiled` for a step; `step.load_compiled` calls this.

    Raises:
        StepError: If it is no such file, or for other versions or devices.
    """
    target = _own_path(path)
    try:
        magic, header, rest = target.read_bytes().split(b"\n", 2)
        facts = json.loads(header)
        payload = rest[: facts.pop("bytes")]
        text = zlib.decompress(rest[len(payload) :]).decode()
    except FileNotFoundError:
        raise StepError(f"there is no file {str(target)!r}.") from None
    except (ValueError, KeyError, zlib.error):
        magic, facts, payload, text = b"", {}, b"", ""
    if magic + b"\n" != _MAGIC:
        msg = f"{str(target)!r} is no file of save_compiled, or it is damaged."
        raise StepError(msg)
    here = {device.id: device for device in jax.devices()}
    devices = [here[number] for number in facts["ids"] if number in here]
    for name, value in _facts(devices or jax.devices()).items():
        if facts[name] != value:
            what = f"{_FACTS[name]} {facts[name]}, and here it is {value}"
            msg = f"{str(target)!r} was compiled for {what}. Save it anew here."
            raise StepError(msg)
    step.executable = SavedExecutable(str(target), payload, text, devices)
    # A look at the program may have made functions that would compile.
    for name in ("_programs", "_compiled", "_empty"):
        vars(step).get(name, {}).clear()
    step._last = None


@dataclass(repr=False, eq=False)
class SavedExecutable:
    """A compiled program from a file, for the step that it was saved of."""

    path: str
    payload: bytes
    text: str
    devices: list[Any]
    is_used: bool = False  # by the first program

    def __call__(
        self, step: "CompiledStep[..., Any]", jitted: Any, devices: Collection[Any]
    ) -> Any:
        """Returns a jitted function that runs this program instead of compiling.

        Functions for other devices, and those after the first, compile as ever.
        """
        is_for_these = not devices or {*devices} == {*self.devices}
        if self.is_used or not is_for_these:
            return jitted
        names = [*step._signature.parameters]
        is_dynamic = [name not in step.static_argnames for name in names]
        return LoadedFunction(self, jitted, is_dynamic)

    def load(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Returns the program, if it is that of a lowered function.

        Raises:
            StepError: If it is another one; it says what differs first.
        """
        text = lowered.as_text()
        if text != self.text:
            lines = difflib.unified_diff(
                self.text.splitlines(), text.splitlines(), n=0, lineterm=""
            )
            changes = [x[:200] for x in lines if not x.startswith(("---", "+++", "@@"))]
            msg = (
                f"{self.path!r} holds another program than this step's (- saved, + "
                f"now): {' '.join(changes[:2])}. Call save_compiled anew, or do not "
                "load it."
            )
            raise StepError(msg)
        self.is_used = True
        in_tree = jax.tree.structure(lowered.args_info)
        return serialize_executable.deserialize_and_load(
            self.payload,
            in_tree,
            lowered.out_tree,
            backend=self.devices[0].client,
            execution_devices=self.devices,
        )


class LoadedFunction:
    """A jitted function whose first program comes from a file."""

    def __init__(
        self, saved: SavedExecutable, jitted: Any, is_dynamic: list[bool]
    ) -> None:
        self._saved, self._jitted, self._is_dynamic = saved, jitted, is_dynamic
        self._compiled: Callable[..., Any] | None = None
        self.trace = jitted.trace

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program; for arguments of other shapes, JAX compiles as ever."""
        if self._compiled is None:
            if self._saved.is_used:
                return self._jitted(*args, **kwargs)
            self._compiled = self._saved.load(self._jitted.lower(*args, **kwargs))
        dynamic = [x for x, flag in zip(args, self._is_dynamic, strict=False) if flag]
        try:
            return self._compiled(*dynamic, **kwargs)
        except TypeError:  # it is for other shapes; nothing has run
            return self._jitted(*args, **kwargs)


def _devices_of(arguments: PyTree) -> list[Any]:
    """Returns the devices of arguments, in their mesh's order."""
    leaves = [x for x in jax.tree.leaves(arguments) if hasattr(x, "sharding")]
    for leaf in leaves:
        if _is_placed(leaf):
            return [*leaf.sharding.mesh.devices.flat]
    for leaf in leaves:
        if leaf.sharding is not None:
            return sorted(leaf.sharding.device_set, key=lambda device: device.id)
    return jax.local_devices()[:1]


def _facts(devices: list[Any]) -> dict[str, Any]:
    return {
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "compiler": str(devices[0].client.platform_version).strip(),
        "kinds": ", ".join(sorted({device.device_kind for device in devices})),
        "ids": [device.id for device in devices],
        "processes": process_count(),
    }


def _own_path(path: str | os.PathLike[str]) -> Path:
    """Returns the file of this process: each of several has one."""
    if not isinstance(path, (str, os.PathLike)):
        raise StepError(f"path must be that of a file, got {_checks.shown(path)}.")
    text = os.fspath(path)
    return Path(text if process_count() == 1 else f"{text}.{process_index()}")
