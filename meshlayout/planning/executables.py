"""Programs ahead of time: for devices that are not here, and executables in files.

A file holds what XLA compiled, and what it was compiled from: versions, devices and the
lowered text. A step that loads it traces and lowers as ever, and compares, so that no
other program than its own can run.
"""

import contextlib
import difflib
import functools
import importlib.metadata
import json
import math
import os
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable  # noqa: TID251
from jax.sharding import NamedSharding, Sharding

from meshlayout import _jax, _render
from meshlayout._annotations import Leaf
from meshlayout.cluster import process_count, process_index
from meshlayout.errors import StepError
from meshlayout.hlo import Communication, Cost
from meshlayout.mesh import Mesh, as_mesh, create_mesh
from meshlayout.planning.chips import chip_of, describe_devices, memory_refusal
from meshlayout.planning.schedule import Replay, replay
from meshlayout.step.inspection import StepInspection, StepMemory
from meshlayout.step.state_step import StateStep


@dataclass(frozen=True, repr=False)
class CompiledProgram:
    """A step's program for a mesh, and its reports; made by `step.compile_for`.

    Attributes:
        compiled: What JAX compiled; it runs if its devices are here.
        mesh, cost, memory, communication: Its mesh, and the step's reports on it.
    """

    compiled: jax.stages.Compiled
    mesh: Mesh
    cost: Cost
    memory: StepMemory
    communication: Communication

    def schedule(self, *, hop_s: float = 1e-6) -> Replay:
        """Returns how long a step takes by the schedule of a TPU program.

        `hop_s` is the latency of a message from one device to the next, in seconds.
        Other compilers estimate no cycles, which is a MeshError.
        """
        chip = chip_of(self.mesh.devices.flat[0])
        return replay(self.compiled.as_text() or "", chip, hop_s=hop_s)

    def __repr__(self) -> str:
        head = f"program for {self.mesh!r}, {self.cost.flops:.3g} FLOPs in all"
        return "\n".join([head, str(self.memory), str(self.communication)])


def compile_for(
    step: StepInspection,
    target: "str | Mesh | jax.sharding.Mesh",
    *args: Any,
    **kwargs: Any,
) -> CompiledProgram:
    """Compiles a step for devices that need not be here; as `step.compile_for`.

    Args:
        step: A made or compiled step.
        target: A topology, as `"v5e:4x4"`, for the axes of the state's mesh, of which
            the first takes what is left; or a mesh with these axes, also one of
            `describe_devices`.
        *args: What the step takes, abstract or not, on any mesh: the specs count.
        **kwargs: The same by name.

    Raises:
        MeshError: If there is no such topology, or it has no such mesh.
        StepError: If the program does not fit into the devices' memory.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    meshes = [x.sharding.mesh for x in leaves if _is_placed(x)]
    mesh = _mesh_for(target, dict(meshes[0].shape) if meshes else {})
    num_state = len(jax.tree.leaves(args[:1]))
    moved = [_moved(x, mesh, index < num_state) for index, x in enumerate(leaves)]
    args, kwargs = treedef.unflatten(moved)
    try:
        compiled = step.lower(*args, **kwargs).compile()
    except jax.errors.JaxRuntimeError as error:
        refusal = memory_refusal(error)
        if refusal is None:
            raise
        needed, available = map(_render.bytes_text, refusal)
        fact = f"the step does not fit {mesh!r}: it needs {needed} of {available}"
        fix = "Shard the state further, or take remat= or accumulate=."
        raise StepError(f"{fact} on each device. {fix}") from error
    # JAX keeps the program, and compiles it once.
    reports = step.memory(*args, **kwargs), step.communication(*args, **kwargs)
    return CompiledProgram(compiled, mesh, step.cost(*args, **kwargs), *reports)


def _mesh_for(target: "str | Mesh | jax.sharding.Mesh", axes: dict[str, int]) -> Mesh:
    """Returns a mesh with these axes, of which the first takes what is left."""
    if not isinstance(target, str):
        return as_mesh(target)
    devices = describe_devices(target)
    if math.prod(axes.values()) != len(devices) or not axes:
        axes = {**axes, next(iter(axes), "batch"): -1}
    return create_mesh(axes, devices=devices)


def _is_placed(leaf: Leaf) -> bool:
    return isinstance(getattr(leaf, "sharding", None), NamedSharding)


def _moved(leaf: Leaf, mesh: Mesh, is_state: bool) -> Any:  # noqa: FBT001
    """Returns an abstract array on another mesh; a batch from the host has no place."""
    if not hasattr(leaf, "dtype"):
        return leaf
    options: dict[str, Any] = {
        "weak_type": getattr(jax.typeof(leaf), "weak_type", False)
    }
    if _is_placed(leaf):
        kind = leaf.sharding.memory_kind
        kind = kind if kind == "pinned_host" else None
        spec = leaf.sharding.spec
        options["sharding"] = NamedSharding(mesh.jax_mesh, spec, memory_kind=kind)
    elif is_state:
        options["sharding"] = mesh.layout(*[None] * len(leaf.shape)).sharding
    return jax.ShapeDtypeStruct(leaf.shape, _jax.canonical_dtype(leaf.dtype), **options)


# Executables in files.

_MAGIC = b"meshlayout executable 1"


def save_compiled(
    step: StepInspection, path: str | os.PathLike[str], *args: Any
) -> None:
    """Saves the executable of a step's last call; as `step.save_compiled`.

    Args:
        step: A made or compiled step.
        path: The file; each of several processes appends its index.
        *args: What the step takes, for another program than that of the last call.

    Raises:
        StepError: If the step was not called and no arguments are given, or JAX cannot
            save programs for these devices.
    """
    if args and isinstance(step, StateStep):
        step, args, _ = step._call_of(*args, *[None] * (3 - len(args)))
    kwargs: dict[str, Any] = {}
    if not args:
        # Of the compiled steps that a made step has, the last was traced last.
        is_made = isinstance(step, StateStep)
        steps: list[Any] = [*step._compiled.values()] if is_made else [step]
        calls = [(each, each.called) for each in steps if each.called is not None]
        if not calls:
            msg = "save_compiled: the step was not called. Call it first, or give "
            raise StepError(f"{msg}what it takes: save_compiled(path, state, batch).")
        step, (treedef, types, layouts) = calls[-1]
        args, kwargs = treedef.unflatten(map(_abstract, types, layouts))
    lowered = step.trace(*args, **kwargs).lower()
    try:
        payload, _, _ = serialize_executable.serialize(_compiled_anew(lowered))
    except (ValueError, NotImplementedError) as error:
        raise StepError(f"JAX cannot save the program: {error}.") from error
    leaves = jax.tree.leaves((args, kwargs))
    meshes = [x.sharding.mesh.devices.flat for x in leaves if _is_placed(x)]
    facts = _facts(list([*meshes, jax.local_devices()[:1]][0]))
    header = json.dumps({**facts, "bytes": len(payload)}).encode()
    text = zlib.compress(lowered.as_text().encode())
    # Complete or not at all, as another process may read it meanwhile.
    target = _own_path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    partial.write_bytes(b"\n".join([_MAGIC, header, payload + text]))
    partial.replace(target)


def _compiled_anew(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles without JAX's caches: XLA cannot save what a CPU program was read from.

    tests/test_planning.py notices if it can.
    """
    with jax.enable_compilation_cache(False):  # noqa: FBT003
        return lowered.compile({"xla_dump_hlo_as_text": False})


def load_compiled(step: StepInspection, path: str | os.PathLike[str]) -> None:
    """Takes a step's first program from a file; as `step.load_compiled`.

    The first call traces and lowers, and compiles nothing. Another program than that in
    the file is a StepError then, which says what differs; the programs after the first
    are compiled as ever. Loading runs what is in the file: load none that you do not
    trust.

    Raises:
        StepError: If it is no file of `save_compiled`, or was compiled by other
            versions or for other devices than there are.
    """
    target = _own_path(path)
    try:
        _, header, rest = target.read_bytes().split(b"\n", 2)
        facts = json.loads(header)
        payload = rest[: facts.pop("bytes")]
        text = zlib.decompress(rest[len(payload) :]).decode()
    except (OSError, ValueError, KeyError, zlib.error) as error:
        msg = f"{str(target)!r} is no file of save_compiled, or it is damaged: {error}."
        raise StepError(msg) from None
    here = {device.id: device for device in jax.devices()}
    devices = [here[number] for number in facts["device ids"] if number in here]
    for name, value in _facts(devices or jax.devices()).items():
        if facts[name] != value:
            fact = f"was compiled for {name} {facts[name]}, and here it is {value}"
            raise StepError(f"{str(target)!r} {fact}. Save it anew here.")
    step.executable = SavedExecutable(str(target), payload, text, devices)
    # A look at the program may have made functions that would compile.
    for name in ("_programs", "_compiled", "_empty"):
        vars(step).get(name, {}).clear()
    vars(step)["_last"] = None


@dataclass(repr=False, eq=False)
class SavedExecutable:
    """A compiled program from a file, for a step that takes it for its first one."""

    path: str
    payload: bytes
    text: str
    devices: list[Any]
    is_used: bool = False

    def __call__(self, step: Any, jitted: Any, devices: Collection[Any]) -> Any:
        """Returns a jitted function that runs this program instead of compiling."""
        if self.is_used or (devices and {*devices} != {*self.devices}):
            return jitted
        names, compiled = [*step._signature.parameters], None

        @functools.wraps(jitted)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal compiled
            if compiled is None and not self.is_used:
                compiled = self.load(jitted.lower(*args, **kwargs))
            pairs = zip(names, args, strict=False)
            dynamic = [x for name, x in pairs if name not in step.static_argnames]
            if compiled is not None:
                # Of other shapes it takes nothing, and has not run.
                with contextlib.suppress(TypeError):
                    return compiled(*dynamic, **kwargs)
            return jitted(*args, **kwargs)

        vars(run)["trace"] = jitted.trace
        return run

    def load(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Returns the program, or raises StepError if it is not the lowered one."""
        before, after = self.text.splitlines(), lowered.as_text().splitlines()
        lines = [*difflib.unified_diff(before, after, n=0, lineterm="")][2:]
        if changes := [line[:200] for line in lines if not line.startswith("@@")]:
            fact = f"{self.path!r} holds another program than this step's"
            text = " ".join(changes[:2])
            raise StepError(
                f"{fact} (- saved, + now): {text}. Call save_compiled anew."
            )
        self.is_used = True
        trees = jax.tree.structure(lowered.args_info), lowered.out_tree
        options: Any = {"backend": self.devices[0].client}
        options["execution_devices"] = self.devices
        load = serialize_executable.deserialize_and_load
        return load(self.payload, *trees, **options)


def _abstract(kind: Leaf, layout: Sharding | None) -> Any:
    if not hasattr(kind, "dtype"):
        return kind
    options: dict[str, Any] = {"sharding": layout, "weak_type": kind.weak_type}
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, **options)


def _facts(devices: list[Any]) -> dict[str, Any]:
    """Returns what a program is compiled for, besides its text."""
    return {
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "the compiler": str(devices[0].client.platform_version).strip(),
        "devices of the kind": ", ".join(sorted({x.device_kind for x in devices})),
        "device ids": [device.id for device in devices],
        "a number of processes of": process_count(),
    }


def _own_path(path: str | os.PathLike[str]) -> Path:
    """Returns the file of this process: each of several has one."""
    name = os.fspath(path)
    return Path(name if process_count() == 1 else f"{name}.{process_index()}")
