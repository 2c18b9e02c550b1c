"""Programs compiled ahead of time: for described devices, and executables in files."""

import contextlib
import copy
import functools
import inspect
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
from meshlayout.step.compiled_step import layout_of
from meshlayout.step.inspection import StepInspection, StepMemory


@dataclass(frozen=True, repr=False)
class CompiledProgram:
    """A step's program for a mesh, and its reports; made by `step.compile_for`."""

    compiled: jax.stages.Compiled  # it runs if its devices are here
    mesh: Mesh
    cost: Cost
    memory: StepMemory
    communication: Communication

    def __repr__(self) -> str:
        return "\n".join(map(str, [*vars(self).values()][1:]))


@_checks.user_call
def compile_for(
    step: StepInspection, target: str | AnyMesh, *args: Any, **kwargs: Any
) -> CompiledProgram:
    """Compiles a step for devices that need not exist here; see `step.compile_for`.

    The target is a topology, such as `"v5e:4x4"`, for the axes of the state's mesh (the
    first takes what is left), or a mesh with these axes. The rest are the step's
    arguments, abstract or not, on any mesh: only specs count. Its layout map follows.

    Raises:
        MeshError: If there is no such topology, or it has no such mesh.
        LayoutError: If an array is sharded over an axis that the target does not have.
        StepError: If the program does not fit into the devices' memory.
    """
    if isinstance(target, str):
        layouts = map(layout_of, jax.tree.leaves((args, kwargs)))
        shapes = (x.mesh.shape for x in layouts if isinstance(x, NamedSharding))
        axes = dict(next(shapes, {"batch": -1}))
        axes[next(iter(axes))] = -1
        target = create_mesh(axes, devices=describe_devices(target))
    mesh = as_mesh(target)

    def moved(value: Any, layout: Sharding | None = None) -> Any:
        if isinstance(value, Rule):
            return replace(value, layout=moved(value.layout))
        if isinstance(value, Layout):
            return replace(value, mesh=mesh)
        if isinstance(given := layout_of(value), NamedSharding):
            kind = "pinned_host" if given.memory_kind == "pinned_host" else None
            layout = Layout(given.spec, mesh, memory_kind=kind).sharding
        return _abstract(value, layout)

    # A batch from the host has no layout: the step gives it one.
    whole = mesh.layout(...).sharding
    state, *rest = args or (kwargs.pop(step._state_name, None),)
    state = jax.tree.map(lambda leaf: moved(leaf, whole), state)
    rest, kwargs = jax.tree.map(moved, (rest, kwargs))
    if (layouts := step._options["layouts"]) and layouts.mesh != mesh:
        options = layouts._arguments() | {"mesh": mesh, "default": None}
        options["rules"] = {pattern: moved(rule) for pattern, rule in layouts.items()}
        step = copy.copy(step)  # for `constrain`, which has no default
        step._options = step._options | {"layouts": LayoutMap(**options)}
    try:  # JAX's cache cannot read programs for devices that are not here
        with _jax.min_cached_s(math.inf):
            compiled = step.lower(state, *rest, **kwargs).compile()
            reports: Any = step.cost, step.memory, step.communication
            reports = [report(state, *rest, **kwargs) for report in reports]
    except jax.errors.JaxRuntimeError as error:
        if not (refusal := memory_refusal(error)):
            raise
        needed, available = map(_render.bytes_text, refusal)
        fact = f"the step does not fit {mesh!r}: it needs {needed} of {available}"
        fix = "Shard the state further, or take remat= or accumulate=."
        raise StepError(f"{fact} on each device. {fix}") from error
    return CompiledProgram(compiled, mesh, *reports)


def _abstract(leaf: Leaf, layout: Sharding | None) -> Any:
    if isinstance(leaf, type) or not hasattr(leaf, "dtype"):  # a static argument
        return leaf
    options: Any = {"weak_type": getattr(leaf, "weak_type", False), "sharding": layout}
    return jax.ShapeDtypeStruct(leaf.shape, _jax.canonical_dtype(leaf.dtype), **options)


@_checks.user_call
def save_compiled(step: Any, path: str | os.PathLike[str]) -> None:
    """Saves the program that a step compiled last; see `step.save_compiled`.

    Each of several processes writes its own file, with its index appended to the path.
    A step that was never called is a StepError.
    """
    # A made step has a compiled one for every mesh and model.
    steps = getattr(step, "_compiled", {"": step}).values()
    if not (called := [each for each in steps if each.called]):
        raise StepError("save_compiled takes a step that was called: call it first.")
    program, leaves = called[-1].called
    args, kwargs = program.treedef.unflatten(map(_abstract, leaves, program.layouts))
    lowered = called[-1].lower(*args, **kwargs)
    # XLA cannot save a CPU program that the cache had. With an option, by its default,
    # it is neither there nor what JAX remembers; a test notices.
    is_cpu = _devices_of(program)[0].platform == "cpu"
    options: Any = {"xla_embed_ir_in_executable": False} if is_cpu else None
    with _jax.min_cached_s(math.inf):
        payload, *_ = _jax.serialize(lowered.compile(options))
    target = _own_path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    content = pickle.dumps((_key_of(program, lowered), payload))
    target.write_bytes(zlib.compress(content, level=1))


@_checks.user_call
def load_compiled(step: Any, path: str | os.PathLike[str]) -> None:
    """Loads a step's first program from a file; see `step.load_compiled`.

    The first call traces, lowers and compares, and compiles nothing: another program is
    a StepError then, which says what differs; other versions or devices are one now.
    Loading runs code from the file: load only files that you trust.
    """
    target = _own_path(path)
    try:  # the bytes have a checksum
        saved = pickle.loads(zlib.decompress(target.read_bytes()))
    except (OSError, zlib.error) as error:
        msg = f"{str(target)!r} is not a file of save_compiled, or it is damaged"
        raise StepError(f"{msg}: {error}. Save it anew.") from error
    _compare(target, saved[0], _key_of())
    vars(step).update(vars(copy.copy(step)))  # which has compiled nothing yet
    step.executable = functools.partial(_executable, target, [saved])


def _executable(
    path: Path, saved: list[tuple[str, bytes]], program: Any, static: tuple[str, ...]
) -> Callable[..., Any]:
    """Returns a program's jitted function, whose first call takes what is saved."""
    jitted, loaded = program.jitted, list[Any]()
    names = enumerate(inspect.signature(jitted).parameters)
    keys = {*static, *(index for index, name in names if name in static)}

    def run(*args: Any, **kwargs: Any) -> Any:
        pairs = [*enumerate(args), *kwargs.items()]
        values = [(key, type(x), x) for key, x in pairs if key in keys]
        if saved:
            lowered, devices = jitted.lower(*args, **kwargs), _devices_of(program)
            _compare(path, saved[0][0], _key_of(program, lowered))
            trees = jax.tree.structure(lowered.args_info), lowered.out_tree
            where: Any = {"backend": devices[0].client, "execution_devices": devices}
            _, payload = saved.pop()
            loaded[:] = values, _jax.deserialize_and_load(payload, *trees, **where)
        if loaded[:1] == [values]:
            rest = [x for index, x in enumerate(args) if index not in keys]
            named = {name: x for name, x in kwargs.items() if name not in keys}
            with contextlib.suppress(TypeError):  # of other shapes it takes nothing
                return loaded[1](*rest, **named)
        return jitted(*args, **kwargs)

    vars(run)["trace"] = jitted.trace
    return run


def _devices_of(program: Any) -> list[_jax.Device]:
    on_mesh = [] if program.mesh is None else [*program.mesh.devices.flat]
    return on_mesh or [*program.devices] or jax.local_devices()[:1]


def _key_of(program: Any = None, lowered: Any = None) -> str:
    """Returns what a program is compiled for, and what it does, where there is one."""
    info = str(jax.print_environment_info(return_string=True)).splitlines()[:6]
    platform = jax.devices()[0].client.platform_version
    lines = [*info, platform, f"hardware {_jax.hardware_key()}"]
    if program:
        devices = [device.id for device in _devices_of(program)]
        lines += [f"devices {devices}", lowered.as_text()]
    return "\n".join(lines)


def _compare(path: Path, saved: str, here: str) -> None:
    """Raises StepError if a saved key does not begin as the one here."""
    common = os.path.commonprefix([saved, here])  # noqa: RUF071 (letter by letter)
    if common != here:
        start = max(len(common) - 60, common.rfind("\n") + 1)  # lines may be long
        old, new = (text[start:][:200].partition("\n")[0] for text in (saved, here))
        fact = f"{str(path)!r} holds another program than this one"
        raise StepError(f"{fact} (- saved, + here): -{old} +{new}. Save it anew.")


def _own_path(path: str | os.PathLike[str]) -> Path:
    """Returns the file of this process: each of several has one."""
    suffix = f".{process_index()}" if process_count() > 1 else ""
    return Path(f"{os.fspath(path)}{suffix}")
