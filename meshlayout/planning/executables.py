"""Programs ahead of time: for devices that are not here, and executables in files.

A file holds what XLA compiled, and what for: versions, devices and the lowered text. A
step that loads it traces and lowers as ever, and compares: no other program can run.
"""

import contextlib
import copy
import difflib
import functools
import importlib.metadata
import json
import math
import os
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding

from meshlayout import _checks, _jax, _render
from meshlayout._annotations import Leaf
from meshlayout.cluster import process_count, process_index
from meshlayout.errors import StepError
from meshlayout.hlo import Communication, Cost
from meshlayout.mesh import Mesh, as_mesh, create_mesh
from meshlayout.planning.chips import describe_devices, memory_refusal
from meshlayout.step.inspection import StepInspection, StepMemory, layout_of


@dataclass(frozen=True, repr=False)
class CompiledProgram:
    """A step's program for a mesh, and its reports; made by `step.compile_for`."""

    compiled: jax.stages.Compiled  # it runs if its devices are here
    mesh: Mesh
    cost: Cost
    memory: StepMemory
    communication: Communication

    def __repr__(self) -> str:
        head = f"program for {self.mesh!r}, {self.cost.flops:.3g} FLOPs in all"
        return "\n".join([head, str(self.memory), str(self.communication)])


@_checks.user_call
def compile_for(
    step: StepInspection, target: str | Mesh | jax.sharding.Mesh, *args: Any
) -> CompiledProgram:
    """Compiles a step for devices that need not be here; as `step.compile_for`.

    Args:
        step: A made or compiled step.
        target: A topology, as `"v5e:4x4"`, for the axes of the state's mesh, of which
            the first takes what is left; or a mesh with these axes, also one of
            `describe_devices`.
        *args: What the step takes, abstract or not, on any mesh: the specs count.

    Raises:
        MeshError: If there is no such topology, or it has no such mesh.
        StepError: If the program does not fit into the devices' memory.
    """
    if getattr(step, "_row_dim", 0) and isinstance(args[1], list):  # of several steps
        stack = functools.partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
        args = args[0], jax.eval_shape(stack, *args[1]), *args[2:]
    leaves, treedef = jax.tree.flatten(args)
    layouts = [
        x if isinstance(x, NamedSharding) else None for x in map(layout_of, leaves)
    ]
    mesh = _mesh_for(target, next((dict(x.mesh.shape) for x in layouts if x), {}))
    # A batch from the host has no layout: the step gives it one.
    whole, num_state = mesh.layout(...).sharding, len(jax.tree.leaves(args[:1]))
    for index, layout in enumerate(layouts):
        if layout is not None:
            kind = "pinned_host" if layout.memory_kind == "pinned_host" else None
            layouts[index] = NamedSharding(mesh.jax_mesh, layout.spec, memory_kind=kind)
        elif index < num_state:
            layouts[index] = whole
    args = treedef.unflatten(map(_abstract, leaves, layouts))
    try:  # JAX's cache cannot read programs for devices that are not here
        with _jax.without_compilation_cache():
            compiled = step.lower(*args).compile()
            # JAX keeps the program, and compiles it once.
            reports = step.cost(*args), step.memory(*args), step.communication(*args)
    except jax.errors.JaxRuntimeError as error:
        if not (refusal := memory_refusal(error)):
            raise
        needed, available = map(_render.bytes_text, refusal)
        fact = f"the step does not fit {mesh!r}: it needs {needed} of {available}"
        fix = "Shard the state further, or take remat= or accumulate=."
        raise StepError(f"{fact} on each device. {fix}") from error
    return CompiledProgram(compiled, mesh, *reports)


def _mesh_for(target: str | Mesh | jax.sharding.Mesh, axes: dict[str, int]) -> Mesh:
    if not isinstance(target, str):
        return as_mesh(target)
    devices = describe_devices(target)
    if math.prod(axes.values()) != len(devices) or not axes:
        axes = {**axes, next(iter(axes), "batch"): -1}
    return create_mesh(axes, devices=devices)


def _abstract(leaf: Leaf, layout: Sharding | None) -> Any:
    if not hasattr(leaf, "dtype"):
        return leaf
    dtype, is_weak = _jax.canonical_dtype(leaf.dtype), getattr(leaf, "weak_type", False)
    options: Any = {"sharding": layout, "weak_type": is_weak}
    return jax.ShapeDtypeStruct(leaf.shape, dtype, **options)


@_checks.user_call
def save_compiled(step: Any, path: str | os.PathLike[str]) -> None:
    """Saves the program that a step has compiled last; as `step.save_compiled`.

    The program is compiled once more where JAX cannot save the one that runs. Each of
    several processes writes a file, and appends its index to the path.

    Raises:
        StepError: If the step was not called or has static arguments, or JAX cannot
            save such a program.
    """
    # A made step has a compiled one for every mesh and model.
    steps = getattr(step, "_compiled", {"": step}).values()
    called = [(each, *each.called) for each in steps if each.called is not None]
    if not called:
        raise StepError("save_compiled: the step was not called yet. Call it first.")
    step, program, leaves = called[-1]
    if step.static_argnames:
        raise StepError("save_compiled: a step with static_argnames cannot be saved.")
    args, kwargs = program.treedef.unflatten(map(_abstract, leaves, program.layouts))
    lowered, devices = step.trace(*args, **kwargs).lower(), _devices_of(program)
    try:
        with _jax.without_compilation_cache():
            # XLA cannot save a CPU program that the cache had. With an option, by its
            # default, it is not the one that JAX remembers; a test notices.
            is_cpu = devices[0].platform == "cpu"
            options = {"xla_dump_hlo_as_text": False} if is_cpu else None
            payload, *_ = _jax.serialize(lowered.compile(options))
    except (ValueError, NotImplementedError) as error:
        raise StepError(f"JAX cannot save the program: {error}.") from error
    facts = {**_facts(), "devices": [x.id for x in devices]}
    header = json.dumps({**facts, "size": len(payload)}).encode()
    text = zlib.compress(lowered.as_text().encode())
    _own_path(path).write_bytes(header + b"\n" + payload + text)


@_checks.user_call
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
        header, rest = target.read_bytes().split(b"\n", 1)
        facts = json.loads(header)
        payload, text = rest[: facts["size"]], zlib.decompress(rest[facts["size"] :])
        content = payload, text.decode(), facts["devices"]
    except (OSError, ValueError, KeyError, TypeError, zlib.error) as error:
        msg = f"{str(target)!r} is no file of save_compiled, or it is damaged: {error}."
        raise StepError(msg) from None
    for name, value in _facts().items():
        if facts.get(name) != value:
            fact = f"was compiled for {name} {facts.get(name)}, and here it is {value}"
            raise StepError(f"{str(target)!r} {fact}. Save it anew here.")
    vars(step).update(vars(copy.copy(step)))  # which has compiled nothing yet
    step.executable = SavedExecutable(str(target), *content)


@dataclass(repr=False, eq=False)
class SavedExecutable:
    """A program from a file, which a step's first call takes instead of compiling."""

    path: str
    payload: bytes
    text: str
    devices: list[int]  # their ids, in the order of the mesh
    is_used: bool = False

    def wrap(self, program: Any) -> Callable[..., Any]:
        """Returns a program's jitted function, which runs this one where it may."""
        jitted, compiled = program.jitted, None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal compiled
            if not self.is_used:
                compiled = self._load(program, jitted.lower(*args, **kwargs))
            if compiled is not None:
                with contextlib.suppress(TypeError):  # of other shapes it takes nothing
                    return compiled(*args, **kwargs)
            return jitted(*args, **kwargs)

        vars(run)["trace"] = jitted.trace
        return run

    def _load(self, program: Any, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        devices = _devices_of(program)
        before = [f"devices {self.devices}", *self.text.splitlines()]
        after = [f"devices {[x.id for x in devices]}", *lowered.as_text().splitlines()]
        lines = [*difflib.unified_diff(before, after, n=0, lineterm="")][2:]
        if lines:
            fact = f"{self.path!r} holds another program than this step's"
            firsts = [
                next(filter(re.compile(x).match, lines), "") for x in ("-", r"\+")
            ]
            text = " ".join(line[:200] for line in firsts if line)
            raise StepError(f"{fact} (- saved, + now): {text}. Save it anew.")
        self.is_used = True
        trees = jax.tree.structure(lowered.args_info), lowered.out_tree
        options: Any = {"backend": devices[0].client, "execution_devices": devices}
        return _jax.deserialize_and_load(self.payload, *trees, **options)


def _devices_of(program: Any) -> list[_jax.Device]:
    if program.mesh is not None:
        return [*program.mesh.devices.flat]
    return [*program.devices] or jax.local_devices()[:1]


def _facts() -> dict[str, object]:
    """Returns what a program is compiled for, besides its text."""
    device = jax.devices()[0]
    return {
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "the compiler": str(device.client.platform_version).strip(),
        "devices of the kind": device.device_kind,
        "a number of processes of": process_count(),
    }


def _own_path(path: str | os.PathLike[str]) -> Path:
    """Returns the file of this process: each of several has one."""
    name = os.fspath(path)
    return Path(name if process_count() == 1 else f"{name}.{process_index()}")
