"""Programs ahead of time: for devices that are not here, and executables in files.

A file holds what XLA compiled, and what for: versions, devices and the lowered text. A
step that loads it traces and lowers as ever, and compares: no other program can run.
"""

import contextlib
import copy
import difflib
import importlib.metadata
import os
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
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
        return "\n".join(map(str, list(vars(self).values())[1:]))


@_checks.user_call
def compile_for(
    step: StepInspection, target: str | Mesh | jax.sharding.Mesh, *args: Any
) -> CompiledProgram:
    """Compiles a step for devices that need not be here; as `step.compile_for`.

    Args:
        step: A made or compiled step.
        target: A topology, as `"v5e:4x4"`, for the axes of the state's mesh, of which
            the first takes what is left; or a mesh with these axes.
        *args: What the step takes, abstract or not, on any mesh: the specs count.

    Raises:
        MeshError: If there is no such topology, or it has no such mesh.
        StepError: If the program does not fit into the devices' memory.
    """
    leaves, treedef = jax.tree.flatten(args)
    layouts = [
        x if isinstance(x, NamedSharding) else None for x in map(layout_of, leaves)
    ]
    axes = next((dict(x.mesh.shape) for x in layouts if x), {"batch": 0})
    if isinstance(target, str):
        axes |= {next(iter(axes)): -1}
        mesh = create_mesh(axes, devices=describe_devices(target))
    else:
        mesh = as_mesh(target)
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
            reports = step.cost(*args), step.memory(*args), step.communication(*args)
    except jax.errors.JaxRuntimeError as error:
        if not (refusal := memory_refusal(error)):
            raise
        needed, available = map(_render.bytes_text, refusal)
        fact = f"the step does not fit {mesh!r}: it needs {needed} of {available}"
        fix = "Shard the state further, or take remat= or accumulate=."
        raise StepError(f"{fact} on each device. {fix}") from error
    return CompiledProgram(compiled, mesh, *reports)


def _abstract(leaf: Leaf, layout: Sharding | None) -> Any:
    if not hasattr(leaf, "dtype"):
        return leaf
    dtype, is_weak = _jax.canonical_dtype(leaf.dtype), getattr(leaf, "weak_type", False)
    options: Any = {"sharding": layout, "weak_type": is_weak}
    return jax.ShapeDtypeStruct(leaf.shape, dtype, **options)


@_checks.user_call
def save_compiled(step: Any, path: str | os.PathLike[str]) -> None:
    """Saves the program that a step has compiled last; as `step.save_compiled`.

    Each of several processes writes a file, and appends its index to the path. A step
    that was not called, or that has static arguments, is a StepError.
    """
    # A made step has a compiled one for every mesh and model.
    steps = getattr(step, "_compiled", {"": step}).values()
    called = [(each, *each.called) for each in steps if each.called is not None]
    if not called or called[-1][0].static_argnames:
        msg = "save_compiled takes a step that was called, without static_argnames."
        raise StepError(msg)
    step, program, leaves = called[-1]
    args, kwargs = program.treedef.unflatten(map(_abstract, leaves, program.layouts))
    lowered = step.trace(*args, **kwargs).lower()
    # XLA cannot save a CPU program that the cache had. With an option, by its default,
    # it is not the one that JAX remembers; a test notices.
    is_cpu = all(device.platform == "cpu" for device in _devices_of(program))
    with _jax.without_compilation_cache():
        compiled = lowered.compile({"xla_dump_hlo_as_text": False} if is_cpu else None)
    payload, *_ = _jax.serialize(compiled)
    with zipfile.ZipFile(_own_path(path), "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("key", _key())
        file.writestr("text", _text_of(program, lowered))
        file.writestr("program", payload)


@_checks.user_call
def load_compiled(step: StepInspection, path: str | os.PathLike[str]) -> None:
    """Takes a step's first program from a file; as `step.load_compiled`.

    The first call traces and lowers, and compiles nothing. Another program than that in
    the file is a StepError then, which says what differs; the programs after the first
    are compiled as ever. Loading runs what is in the file: load none that you do not
    trust. A file of other versions or devices is a StepError, too.
    """
    target = _own_path(path)
    try:
        with zipfile.ZipFile(target) as file:
            content = [file.read(name) for name in ("key", "text", "program")]
    except (OSError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        msg = f"{str(target)!r} is no file of save_compiled, or it is damaged: {error}."
        raise StepError(msg) from None
    key, text = (part.decode() for part in content[:2])
    _compare(target, key, _key())
    vars(step).update(vars(copy.copy(step)))  # which has compiled nothing yet
    step.executable = SavedExecutable(target, content[2], text)


@dataclass(repr=False, eq=False)
class SavedExecutable:
    """A program from a file, which a step's first call takes instead of compiling."""

    path: Path
    payload: bytes
    text: str
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
        _compare(self.path, self.text, _text_of(program, lowered))
        self.is_used, devices = True, _devices_of(program)
        trees = jax.tree.structure(lowered.args_info), lowered.out_tree
        options: Any = {"backend": devices[0].client, "execution_devices": devices}
        return _jax.deserialize_and_load(self.payload, *trees, **options)


def _devices_of(program: Any) -> list[_jax.Device]:
    on_mesh = [] if program.mesh is None else [*program.mesh.devices.flat]
    return on_mesh or [*program.devices] or jax.local_devices()[:1]


def _text_of(program: Any, lowered: jax.stages.Lowered) -> str:
    return f"devices {[x.id for x in _devices_of(program)]}\n{lowered.as_text()}"


def _key() -> str:
    """Returns what a program is compiled for, besides its text."""
    device, compiled = jax.devices()[0], importlib.metadata.version("jaxlib")
    where = f"{device.device_kind}, processes: {process_count()}"
    versions = f"jax {jax.__version__}\njaxlib {compiled}"
    return f"{versions}\n{device.client.platform_version.strip()}\n{where}"


def _compare(path: Path, saved: str, here: str) -> None:
    """Raises StepError if two texts differ."""
    diff = difflib.unified_diff(saved.splitlines(), here.splitlines(), n=0, lineterm="")
    if lines := [*diff][2:]:
        firsts = [next((x for x in lines if x[0] == sign), "") for sign in "-+"]
        text = " ".join(line[:200] for line in firsts if line)
        fact = f"{str(path)!r} holds another program than this one"
        raise StepError(f"{fact} (- saved, + here): {text}. Save it anew.")


def _own_path(path: str | os.PathLike[str]) -> Path:
    """Returns the file of this process: each of several has one."""
    name = os.fspath(path)
    return Path(name if process_count() == 1 else f"{name}.{process_index()}")
