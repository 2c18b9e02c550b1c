"""Programs ahead of time: for devices that are not here, and executables in files.

A file holds what XLA compiled, and what for: versions, devices and the lowered text. A
step that loads it traces and lowers as ever, and compares: no other program can run.
"""

import contextlib
import copy
import functools
import hashlib
import importlib.metadata
import inspect
import itertools
import math
import os
import pickle
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from meshlayout import _checks, _jax, _render
from meshlayout._annotations import Leaf
from meshlayout.cluster import process_count, process_index
from meshlayout.errors import StepError
from meshlayout.hlo import Communication, Cost
from meshlayout.layout import AnyMesh, Layout
from meshlayout.layout_map import LayoutMap, Rule
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
    step: StepInspection, target: str | AnyMesh, *args: Any, **kwargs: Any
) -> CompiledProgram:
    """Compiles a step for devices that need not be here; as `step.compile_for`.

    Args:
        step: A made or compiled step, whose layout map follows to the target.
        target: A topology, as `"v5e:4x4"`, for the axes of the state's mesh, of which
            the first takes what is left; or a mesh with these axes.
        *args: What the step takes, abstract or not, on any mesh: the specs count.
        **kwargs: The same by name.

    Raises:
        MeshError: If there is no such topology, or it has no such mesh.
        LayoutError: If an array is sharded over an axis that the target does not have.
        StepError: If the program does not fit into the devices' memory.
    """
    layouts = map(layout_of, jax.tree.leaves((args, kwargs)))
    meshes = (x.mesh for x in layouts if isinstance(x, NamedSharding))
    if isinstance(target, str):
        axes = dict(next((x.shape for x in meshes), {"batch": 0}))
        axes |= {next(iter(axes)): -1}
        mesh = create_mesh(axes, devices=describe_devices(target))
    else:
        mesh = as_mesh(target)

    def moved(default: Sharding | None, leaf: Leaf) -> Any:
        if not isinstance(layout := layout_of(leaf), NamedSharding):
            return _abstract(leaf, default)
        kind = "pinned_host" if layout.memory_kind == "pinned_host" else None
        return _abstract(leaf, Layout(layout.spec, mesh, memory_kind=kind).sharding)

    # A batch from the host has no layout: the step gives it one.
    move_state = functools.partial(moved, mesh.layout(...).sharding)
    state, args = jax.tree.map(move_state, args[:1]), args[1:]
    args, kwargs = jax.tree.map(functools.partial(moved, None), (args, kwargs))
    if (layouts := step._options["layouts"]) and layouts.mesh != mesh:
        step = copy.copy(step)
        step._options = {**step._options, "layouts": _map_on(mesh, layouts)}
    try:  # JAX's cache cannot read programs for devices that are not here
        with _jax.min_cached_s(math.inf):
            compiled = step.lower(*state, *args, **kwargs).compile()
            reports: Any = step.cost, step.memory, step.communication
            reports = [report(*state, *args, **kwargs) for report in reports]
    except jax.errors.JaxRuntimeError as error:
        if not (refusal := memory_refusal(error)):
            raise
        needed, available = map(_render.bytes_text, refusal)
        fact = f"the step does not fit {mesh!r}: it needs {needed} of {available}"
        fix = "Shard the state further, or take remat= or accumulate=."
        raise StepError(f"{fact} on each device. {fix}") from error
    return CompiledProgram(compiled, mesh, *reports)


def _map_on(mesh: Mesh, layouts: LayoutMap) -> LayoutMap:
    """Returns a map's rules for `constrain`, which has no default, on another mesh."""

    def moved(rule: Any) -> Any:
        if isinstance(rule, Rule):
            return replace(rule, layout=moved(rule.layout))
        return replace(rule, mesh=mesh) if isinstance(rule, Layout) else rule

    rules = {pattern: moved(rule) for pattern, rule in layouts.items()}
    options = {"mesh": mesh, "rules": rules, "default": None}
    return LayoutMap(**{**layouts._arguments(), **options})


def _abstract(leaf: Leaf, layout: Sharding | None) -> Any:
    if isinstance(leaf, type) or not hasattr(leaf, "dtype"):  # a static argument
        return leaf
    dtype, is_weak = _jax.canonical_dtype(leaf.dtype), getattr(leaf, "weak_type", False)
    options: Any = {"sharding": layout, "weak_type": is_weak}
    return jax.ShapeDtypeStruct(leaf.shape, dtype, **options)


@_checks.user_call
def save_compiled(step: Any, path: str | os.PathLike[str]) -> None:
    """Saves the program that a step has compiled last; as `step.save_compiled`.

    Each of several processes writes a file, and appends its index to the path. A step
    that was not called is a StepError.
    """
    # A made step has a compiled one for every mesh and model.
    steps = getattr(step, "_compiled", {"": step}).values()
    called = [(each, *each.called) for each in steps if each.called is not None]
    if not called:
        raise StepError("save_compiled takes a step that was called: call it first.")
    step, program, leaves = called[-1]
    args, kwargs = program.treedef.unflatten(map(_abstract, leaves, program.layouts))
    lowered = step.trace(*args, **kwargs).lower()
    # XLA cannot save a CPU program that the cache had. With an option, by its default,
    # it is neither there nor what JAX remembers; a test notices.
    is_cpu = all(device.platform == "cpu" for device in _devices_of(program))
    options: Any = {"xla_embed_ir_in_executable": False} if is_cpu else None
    with _jax.min_cached_s(math.inf):
        payload, *_ = _jax.serialize(lowered.compile(options))
    content = _key(), _text_of(program, lowered), payload
    data, target = zlib.compress(pickle.dumps(content), level=1), _own_path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(hashlib.sha256(data).digest() + data)


@_checks.user_call
def load_compiled(step: Any, path: str | os.PathLike[str]) -> None:
    """Takes a step's first program from a file; as `step.load_compiled`.

    The first call traces and lowers, and compiles nothing. Another program than that in
    the file is a StepError then, which says what differs; the programs after the first
    are compiled as ever. Loading runs what is in the file: load none that you do not
    trust. A file of other versions or devices is a StepError, too.
    """
    target = _own_path(path)
    data = target.read_bytes() if target.is_file() else b""
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        msg = f"{str(target)!r} is no file of save_compiled, or it is damaged."
        raise StepError(f"{msg} Save it anew.")
    key, *saved = pickle.loads(zlib.decompress(data[32:]))
    _compare(target, key, _key())
    vars(step).update(vars(copy.copy(step)))  # which has compiled nothing yet
    step.executable = functools.partial(_saved_or_jitted, target, saved)


def _saved_or_jitted(
    path: Path, saved: list[Any], program: Any, static: tuple[str, ...]
) -> Callable[..., Any]:
    """Returns a program's jitted function, which runs a saved one where it may.

    The first program takes what is saved, and leaves the list empty.
    """
    jitted, compiled, values = program.jitted, None, None
    names = enumerate(inspect.signature(jitted).parameters)
    keys = {*static, *(index for index, name in names if name in static)}

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled, values
        pairs = (*enumerate(args), *kwargs.items())
        given = [(key, type(x), x) for key, x in pairs if key in keys]
        if saved:
            lowered = jitted.lower(*args, **kwargs)
            text, payload = saved
            _compare(path, text, _text_of(program, lowered))
            trees = jax.tree.structure(lowered.args_info), lowered.out_tree
            devices = _devices_of(program)
            options: Any = {"backend": devices[0].client, "execution_devices": devices}
            compiled = _jax.deserialize_and_load(payload, *trees, **options)
            values = given
            saved.clear()
        if compiled is not None and given == values:
            rest = [x for index, x in enumerate(args) if index not in keys]
            named = {name: x for name, x in kwargs.items() if name not in keys}
            with contextlib.suppress(TypeError):  # of other shapes it takes nothing
                return compiled(*rest, **named)
        return jitted(*args, **kwargs)

    vars(run)["trace"] = jitted.trace
    return run


def _devices_of(program: Any) -> list[_jax.Device]:
    on_mesh = [] if program.mesh is None else [*program.mesh.devices.flat]
    return on_mesh or [*program.devices] or jax.local_devices()[:1]


def _text_of(program: Any, lowered: jax.stages.Lowered) -> str:
    return f"devices {[x.id for x in _devices_of(program)]}\n{lowered.as_text()}"


def _key() -> str:
    """Returns what a program is compiled for, besides its text."""
    devices, jaxlib = jax.devices(), importlib.metadata.version("jaxlib")
    where = f"{len(devices)} x {devices[0].device_kind}, processes: {process_count()}"
    platform = devices[0].client.platform_version.strip()
    lines = f"jax {jax.__version__}", f"jaxlib {jaxlib}", where, platform
    return "\n".join([*lines, f"hardware {_jax.hardware_key()}"])


def _compare(path: Path, saved: str, here: str) -> None:
    """Raises StepError if two texts differ."""
    pairs = itertools.zip_longest(saved.splitlines(), here.splitlines(), fillvalue="")
    for pair in (pair for pair in pairs if pair[0] != pair[1]):
        letters = enumerate(zip(*pair, strict=False))
        first = next((index for index, (x, y) in letters if x != y), 0)
        old, new = (line[max(0, first - 60) :][:200].strip() for line in pair)
        fact = f"{str(path)!r} holds another program than this one"
        raise StepError(f"{fact} (- saved, + here): -{old} +{new}. Save it anew.")


def _own_path(path: str | os.PathLike[str]) -> Path:
    """Returns the file of this process: each of several has one."""
    suffix = f".{process_index()}" if process_count() > 1 else ""
    return Path(f"{os.fspath(path)}{suffix}")
