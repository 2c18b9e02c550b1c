"""`data_parallel`, `fsdp` and `zero_rule`: the batch is sharded, and what goes with it.

With FSDP (ZeRO stage 3) the compiler gathers each weight where it is used and scatters
its gradient, whichever dim is sharded; wherever moving activations instead is
cheaper it does that, and this is where the dim decides. Measured on compiled programs
(`benchmarks/fsdp_rules.py`): with the vocabulary of embedding and logits sharded, a
transformer sends a fifth less than by the other dims. Other matrices are as cheap on
their smaller dim as on the larger one, and cheaper for wide inputs and in bfloat16. An
embedding must never be sharded by features: every activation then would be, on the axis
that also shards the batch, and the program sends ten times as much.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from meshlayout import _checks, _jax
from meshlayout._annotations import DType
from meshlayout._batches import BATCH_AXES, batch_axes
from meshlayout.errors import LayoutError, LayoutMapError
from meshlayout.layout import Layout, axes_of
from meshlayout.layout_map import LayoutMap, Rule
from meshlayout.mesh import Mesh, as_mesh


MIN_BYTES = 8192
"""The default of `fsdp`: `benchmarks/fsdp_rules.py` measures it."""

MIN_SIZE = 1024
"""The default of `zero_rule`. Each sharded array costs an all-gather in every step,
whatever its size, and biases and norms take next to no memory."""

# Flax's dense layers hold a kernel of inputs x outputs. A matrix by another name with
# more rows than columns may be a lookup table; one of few rows is known by its name.
_KERNEL = re.compile(r"(^|/)kernel$")
# One of this many times more columns than rows gives logits for a vocabulary.
_VOCABULARY = 6
_TABLE = re.compile(r"(embed|wte|wpe)[^/]*(/[^/]*)?$", re.IGNORECASE)


def data_parallel(mesh: Mesh | jax.sharding.Mesh) -> LayoutMap:
    """Returns the map for data parallelism: every device holds the whole model.

    Only batches are sharded, over the mesh's batch axes; a step sends the gradients
    once. Use this while model, gradients and optimizer state fit each device. Arrays
    whose own Flax metadata names axes of this mesh are sharded as that says.

    Args:
        mesh: The mesh.

    Example:
        >>> import meshlayout as ml
        >>> data_parallel(ml.create_mesh({"batch": 8}))
        LayoutMap(Mesh(batch=8), {})
    """
    return LayoutMap(mesh)


def zero_rule(
    mesh: Mesh | jax.sharding.Mesh,
    axes: str | Sequence[str] | None = None,
    *,
    min_size: int = MIN_SIZE,
    memory_kind: str | None = None,
) -> "ZeroRule":
    """Returns a rule that shards arrays further, on the largest dim that divides.

    Use this for the optimizer's state, as `layouts | {"^opt_state/": zero_rule(mesh)}`
    under any map: a slot keeps the layout that it takes from its parameter and is
    sharded over the batch's axes besides, the parameters stay as they are, and the
    update is computed in shards, too (Rajbhandari et al., "ZeRO", 2020, stage 1).
    Small arrays, and those that do not divide, keep their layout; `explain` says so.

    Args:
        mesh: The mesh.
        axes: The axes to shard over; by default all that shard the mesh's batches. None
            of them, `()`, if only `memory_kind` matters.
        min_size: Arrays of fewer elements are not sharded: it would save little
            memory, and each costs an all-gather.
        memory_kind: In which of the devices' memories the arrays are, such as
            `"pinned_host"`: a train step copies optimizer state to the device for the
            update, and back. None for the parameter's own.

    Raises:
        MeshError: If the mesh has no such axis.
        LayoutMapError: If the mesh has no axis for batches, `min_size` is not a count,
            or the devices have no such memory.

    Example:
        >>> import optax
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> layouts = ml.LayoutMap(mesh, {"kernel$": (None, "model")})
        >>> layouts |= {"^opt_state/": zero_rule(mesh)}
        >>> params = {"kernel": jax.ShapeDtypeStruct((784, 128), "float32")}
        >>> opt_state = jax.eval_shape(optax.sgd(0.1, momentum=0.9).init, params)
        >>> state = {"params": params, "opt_state": opt_state}
        >>> print(layouts.resolve(state).to_lock())
        # layouts on Mesh(batch=2, model=4)
        kernel: f32[784, 128] [unsharded, model]
        opt_state/0/trace/kernel: f32[784, 128] [batch, model]
        <BLANKLINE>
    """
    mesh = as_mesh(mesh)
    if axes == ():
        names: tuple[str, ...] = ()
    else:
        names = _axes(mesh, "zero_rule", axes, batch_axes(mesh))
    context = _checks.Context(where="zero_rule", error=LayoutMapError)
    min_size = _checks.count("min_size", min_size, at_least=0, **context)
    return ZeroRule(names, min_size, _check_memory_kind(memory_kind, mesh), mesh)


def fsdp(
    mesh: Mesh | jax.sharding.Mesh,
    axes: str | Sequence[str] | None = None,
    min_bytes: int = MIN_BYTES,
) -> LayoutMap:
    """Returns the map for fully sharded data parallelism (ZeRO stage 3).

    Every array of `min_bytes` or more is sharded on one dim, which its shape decides
    (see the top of this file); its optimizer state and moving average follow.
    Use this when the model does not fit each device whole. Rules for single arrays go
    on top: `fsdp(mesh) | {"head/kernel": [...]}`. Arrays whose own Flax metadata names
    axes of this mesh are sharded as that says.

    For layers in a `scan`, constrain what the loop carries to the batch's axes, as
    `ml.constrain(x, "residual")` in the model, and give the step a map for activations:
    `layouts=LayoutMap(mesh, {"residual": ("batch", ...)})`. XLA may otherwise shard it
    like the weights' features, and then moves every activation.

    For hybrid sharding, shards inside a host or slice and replicas across, give the
    mesh two axes, of which only `fsdp` then holds shards: `create_mesh({"replica": 2,
    "fsdp": -1}, dcn="replica")` sends nothing but gradients over the slow network.
    Batches are always sharded over all batch axes, here both.

    Args:
        mesh: The mesh.
        axes: The mesh axes to shard over. By default `fsdp` if the mesh has this axis,
            and otherwise the axes that shard its batches: `batch` and `data`.
        min_bytes: Arrays of fewer bytes on a device stay whole.

    Raises:
        LayoutMapError: If the mesh has no axis for it, or `min_bytes` is not a count.
        MeshError: If the mesh has no such axis.

    Example:
        >>> import meshlayout as ml
        >>> layouts = fsdp(ml.create_mesh({"batch": 8}))
        >>> layouts
        LayoutMap(Mesh(batch=8), {}, default=FsdpRule(axes=('batch',), min_bytes=8192))
        >>> kernel = jax.ShapeDtypeStruct((784, 128), "float32")
        >>> layouts.resolve({"dense": {"kernel": kernel}})["dense/kernel"].layout
        Layout([unsharded, batch], Mesh(batch=8))
        >>> hybrid = ml.create_mesh({"replica": 2, "fsdp": -1}, dcn="replica")
        >>> fsdp(hybrid).resolve({"dense": {"kernel": kernel}})["dense/kernel"].layout
        Layout([unsharded, fsdp], Mesh(replica=2, fsdp=4))
    """
    mesh = as_mesh(mesh)
    natural = ("fsdp",) if "fsdp" in mesh else batch_axes(mesh)
    names = _axes(mesh, "fsdp", axes, natural)
    context = _checks.Context(where="fsdp", error=LayoutMapError)
    min_bytes = _checks.count("min_bytes", min_bytes, at_least=0, **context)
    return LayoutMap(mesh, default=FsdpRule(names, min_bytes, mesh))


def _axes(
    mesh: Mesh, where: str, axes: Any, natural: tuple[str, ...]
) -> tuple[str, ...]:
    """Returns the axes that a user gave, or the natural ones of the mesh."""
    if axes is None and not natural:
        msg = (
            f"{where}: {mesh!r} has no axis named "
            f"{', '.join(map(repr, BATCH_AXES))}. Give the axes to shard over, as "
            f"{where}(mesh, {mesh.axis_names[0]!r})."
        )
        raise LayoutMapError(msg)
    names = natural if axes is None else (axes,) if isinstance(axes, str) else axes
    is_names = isinstance(names, (tuple, list)) and all(
        isinstance(name, str) for name in names
    )
    if not is_names or not names or len(set(names)) < len(names):
        msg = (
            f"{where}: axes must be a mesh axis name or several different ones, got "
            f"{_checks.shown(axes)}."
        )
        raise LayoutMapError(msg)
    mesh.axis_size(names)
    return tuple(names)


def _check_memory_kind(kind: Any, mesh: Mesh) -> str | None:
    try:
        layout = Layout([], mesh, memory_kind=kind)
    except LayoutError as error:
        raise LayoutMapError(f"zero_rule: {error}") from None
    kind = layout.memory_kind
    is_old = not _jax.memory_in_jit() and mesh.platform == "cpu"
    if kind is not None and (is_old or layout.sharding.memory_kind != kind):
        # Described GPUs do not list their memories, and JAX then leaves out the kind.
        msg = (
            f"zero_rule: JAX cannot move arrays to {kind!r} in programs for the "
            f"devices of {mesh!r}. Leave out memory_kind; on real GPUs and TPUs, and "
            "on described TPUs, it works."
        )
        raise LayoutMapError(msg)
    return kind


@dataclass(frozen=True)
class ZeroRule:
    """The rule of `zero_rule`: one dim more of every large array is sharded.

    Attributes:
        axes: The mesh axes to shard over, major first.
        min_size: Arrays of fewer elements are not sharded further.
        memory_kind: The memory of the arrays, or None for what they have.
        mesh: The mesh.
    """

    axes: tuple[str, ...]
    min_size: int
    memory_kind: str | None
    mesh: Mesh = field(repr=False)

    def __call__(self, path: str, shape: tuple[int, ...], dtype: DType) -> Rule:
        """Returns the layout of an array that nothing else shards."""
        return self.extend(path, shape, dtype, self.mesh.layout(*[None] * len(shape)))

    def extend(
        self, path: str, shape: tuple[int, ...], dtype: DType, layout: Layout
    ) -> Rule:
        """Returns the layout of an array that has one, and why if it stays."""
        if shape and self.memory_kind is not None:
            layout = layout.with_memory_kind(self.memory_kind)
        size = math.prod(shape)
        reason = f"{size} elements, fewer than min_size={self.min_size}"
        return further(
            shape,
            layout,
            self.axes,
            sorted(range(len(shape)), key=lambda dim: -shape[dim]),
            reason if size < self.min_size else "",
        )


@dataclass(frozen=True)
class FsdpRule:
    """The rule of `fsdp`: one dim of every large array is sharded.

    Attributes:
        axes: The mesh axes to shard over, major first.
        min_bytes: Arrays of fewer bytes on a device stay whole.
        mesh: The mesh.
    """

    axes: tuple[str, ...]
    min_bytes: int
    mesh: Mesh = field(repr=False)

    def __call__(self, path: str, shape: tuple[int, ...], dtype: DType) -> Rule:
        """Returns the layout of an array that nothing else shards."""
        return self.extend(path, shape, dtype, self.mesh.layout(*[None] * len(shape)))

    def extend(
        self, path: str, shape: tuple[int, ...], dtype: DType, layout: Layout
    ) -> Rule:
        """Returns the layout of an array that has one, and why if it stays."""
        # A dim that is sharded already is the last choice: it gets smaller still.
        taken = layout.specs
        dims = sorted(self._dims(path, shape), key=lambda dim: taken[dim] is not None)
        shards = math.prod(map(layout.num_shards, range(len(shape))))
        size = math.prod(shape) * _jax.itemsize(dtype)
        reason = f"smaller than min_bytes={self.min_bytes}"
        is_small = size < self.min_bytes * shards
        return further(shape, layout, self.axes, dims, reason if is_small else "")

    def _dims(self, path: str, shape: tuple[int, ...]) -> Iterable[int]:
        """Returns the dims that may be sharded, in order of preference."""
        if len(shape) != 2:
            return sorted(range(len(shape)), key=lambda dim: -shape[dim])
        rows, columns = shape
        is_kernel = _KERNEL.search(path) is not None
        if not is_kernel and _TABLE.search(path):
            return (0,)
        if columns >= _VOCABULARY * rows:
            return (1, 0)
        if is_kernel:
            return (1, 0) if rows >= columns else (0, 1)
        return (0,) if rows > columns else (0, 1)


def further(
    shape: Sequence[int],
    layout: Layout,
    axes: Iterable[str],
    dims: Sequence[int],
    refusal: str,
) -> Rule:
    """Returns the layout with the axes that it does not use yet on one dim more.

    Args:
        shape: The array's global shape.
        layout: Its layout so far.
        axes: The axes, major first.
        dims: The dims to try, in order: the first that divides is sharded.
        refusal: Why the array is not to be sharded; empty if it is.
    """
    used = {axis for entry in layout.specs for axis in axes_of(entry)}
    free = tuple(axis for axis in axes if axis not in used)
    if not shape or layout.mesh.axis_size(free) == 1:
        return Rule(layout)
    for dim in dims if not refusal else ():
        specs = list(layout.specs)
        specs[dim] = (*axes_of(specs[dim]), *free)
        sharded = layout.with_specs(specs)
        if dim not in [misfit.dim for misfit in sharded.misfits(shape)]:
            return Rule(sharded)
    over = ", ".join(map(repr, free))
    reason = f"no dim divides over {over}"
    if len(dims) < len(shape):
        reason = (
            f"dim {dims[0]}, of size {shape[dims[0]]}, does not divide over {over}; "
            "sharded by another, a lookup table shards every activation"
        )
    is_sharded = layout.mesh.axis_size(tuple(used)) > 1
    state = "not sharded further" if is_sharded else "whole"
    return Rule(layout, note=f"{state}: {refusal or reason}")
