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

import itertools
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from meshlayout import _checks, _jax
from meshlayout._annotations import Batch, DType
from meshlayout._batches import BATCH_AXES, batch_axes
from meshlayout.errors import LayoutError, LayoutMapError, LayoutWarning, stack_level
from meshlayout.layout import Layout, axes_of
from meshlayout.layout_map import LayoutMap, Rule
from meshlayout.mesh import Mesh, as_mesh
from meshlayout.parallel.forward import Call, Model, follow


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
    once (XLA for CPUs sends those of a loop's weights in each round). Use this while
    model, gradients and optimizer state fit each device. Arrays whose own Flax metadata
    names axes of this mesh are sharded as that says.

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
        min_size: Arrays of fewer elements are not sharded.
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
    names = () if axes == () else _axes(mesh, "zero_rule", axes, batch_axes(mesh))
    context = _checks.Context(where="zero_rule", error=LayoutMapError)
    min_size = _checks.count("min_size", min_size, at_least=0, **context)
    if memory_kind is not None:
        _check_memory(memory_kind, mesh)
    return ZeroRule(names, mesh, min_size, memory_kind)


def fsdp(
    mesh: Mesh | jax.sharding.Mesh,
    model_or_build: "Model | Callable[[], Model] | None" = None,
    example_inputs: Batch = None,
    *,
    axes: str | Sequence[str] | None = None,
    min_bytes: int = MIN_BYTES,
    call: Call | None = None,
) -> LayoutMap:
    """Returns the map for fully sharded data parallelism (ZeRO stage 3).

    Every array of `min_bytes` or more is sharded on one dim, which its shape decides;
    its optimizer state and moving average follow. Use this when the model does not fit
    each device whole. Rules for single arrays go on top: `fsdp(mesh) | {"head/kernel":
    [...]}`. Arrays whose own Flax metadata names axes of this mesh are sharded as that
    says.

    With a model, its forward program is traced as by `tensor_parallel`: what rows are
    looked up in is sharded by rows, however small, and a loop over layers whose carry
    nothing constrains is a warning with the line to write.

    For hybrid sharding, shards inside a host or slice and replicas across, give the
    mesh two axes, of which only `fsdp` then holds shards: `create_mesh({"replica": 2,
    "fsdp": -1}, dcn="replica")` sends nothing but gradients over the slow network.
    Batches are always sharded over all batch axes, here both.

    Args:
        mesh: The mesh.
        model_or_build: None, or the model as for `tensor_parallel`.
        example_inputs: As for `tensor_parallel`.
        axes: The mesh axes to shard over. By default `fsdp` if the mesh has this axis,
            and otherwise the axes that shard its batches: `batch` and `data`.
        min_bytes: Arrays of fewer bytes on a device stay whole.
        call: As for `tensor_parallel`.

    Raises:
        LayoutMapError: If the mesh has no axis for it, `min_bytes` is not a count, or
            the model cannot be called so.
        MeshError: If the mesh has no such axis.

    Warns:
        LayoutWarning: If a loop reads sharded parameters and carries an activation that
            nothing constrains: XLA may shard it like the weights' features, and then
            moves every activation.

    Example:
        >>> import meshlayout as ml
        >>> layouts = fsdp(ml.create_mesh({"batch": 8}))
        >>> layouts
        LayoutMap(Mesh(batch=8), {}, default=FsdpRule(axes=('batch',), min_bytes=8192))
        >>> kernel = jax.ShapeDtypeStruct((784, 128), "float32")
        >>> layouts.resolve({"dense": {"kernel": kernel}})["dense/kernel"].layout
        Layout([unsharded, batch], Mesh(batch=8))
    """
    mesh = as_mesh(mesh)
    natural = ("fsdp",) if "fsdp" in mesh else batch_axes(mesh)
    names = _axes(mesh, "fsdp", axes, natural)
    context = _checks.Context(where="fsdp", error=LayoutMapError)
    min_bytes = _checks.count("min_bytes", min_bytes, at_least=0, **context)
    if model_or_build is None and example_inputs is None and call is None:
        return LayoutMap(mesh, default=FsdpRule(names, mesh, min_bytes=min_bytes))
    params, flow = follow(model_or_build, example_inputs, call, "fsdp", mesh)
    tables = tuple(x.path for i, x in enumerate(params) if flow.looked_up >> i & 1)
    for shape, read in flow.loops:
        is_read = (bool(read >> index & 1) for index in range(len(params)))
        loop_params = itertools.compress(params, is_read)
        path = next((x.path for x in loop_params if x.nbytes >= min_bytes), None)
        if path is not None:
            rows = batch_axes(mesh) or names
            entry = rows[0] if len(rows) == 1 else rows
            line = (
                f"fsdp: a loop reads {path!r}, which is sharded, and carries an "
                f"activation of shape {shape}, which nothing constrains: XLA may "
                "shard that like the weights and move every activation. Write x = "
                "ml.constrain(x, 'carry') as the first line of the loop's body, and "
                "give the step layouts=ml.LayoutMap(mesh, "
                f"{{'carry': ({entry!r}, ...)}})."
            )
            warnings.warn(line, LayoutWarning, stacklevel=stack_level())
            break
    rule = FsdpRule(names, mesh, min_bytes=min_bytes, tables=tables)
    return LayoutMap(mesh, default=rule)


def _axes(
    mesh: Mesh, where: str, axes: Any, natural: tuple[str, ...]
) -> tuple[str, ...]:
    """Returns the axes that a user gave, or the natural ones of the mesh."""
    if axes is None and not natural:
        msg = (
            f"{where}: {mesh!r} has no axis named {', '.join(map(repr, BATCH_AXES))}. "
            f"Give the axes to shard over, as {where}(mesh, "
            f"axes={mesh.axis_names[0]!r})."
        )
        raise LayoutMapError(msg)
    names = natural if axes is None else (axes,) if isinstance(axes, str) else axes
    is_names = isinstance(names, (tuple, list)) and {str} == {*map(type, names)}
    if not is_names or len({*names}) < len(names):
        msg = (
            f"{where}: axes must be a mesh axis name or several different ones, got "
            f"{_checks.shown(axes)}."
        )
        raise LayoutMapError(msg)
    mesh.axis_size(names)
    return tuple(names)


def _check_memory(kind: Any, mesh: Mesh) -> None:
    try:
        sharding = Layout([], mesh, memory_kind=kind).sharding
    except LayoutError as error:
        raise LayoutMapError(f"zero_rule: {error}") from None
    is_old = not _jax.memory_in_jit() and mesh.platform == "cpu"
    if is_old or sharding.memory_kind != kind:
        # Described GPUs do not list their memories, and JAX then leaves out the kind.
        msg = (
            f"zero_rule: JAX cannot move arrays to {kind!r} in programs for the "
            f"devices of {mesh!r}. Leave out memory_kind; on real GPUs and TPUs, and "
            "on described TPUs, it works."
        )
        raise LayoutMapError(msg)


@dataclass(frozen=True)
class ZeroRule:
    """The rule of `zero_rule`: shards arrays over more axes, on the largest dim.

    Attributes:
        axes: The mesh axes to shard over, major first; those that shard an array
            already are left out.
        mesh: The mesh.
        min_size: Arrays of fewer elements are not sharded further.
        memory_kind: The memory of the arrays, or None for what they have.
    """

    axes: tuple[str, ...]
    mesh: Mesh = field(repr=False)
    min_size: int = field(default=0, repr=False)
    memory_kind: str | None = field(default=None, repr=False)

    def __call__(self, path: str, shape: tuple[int, ...], dtype: DType) -> Rule:
        """Returns the layout of an array that nothing else shards."""
        return self.extend(path, shape, dtype, Layout.replicated(self.mesh, len(shape)))

    def extend(
        self, path: str, shape: tuple[int, ...], dtype: DType, layout: Layout
    ) -> Rule:
        """Returns the layout of an array that has one, and why if it stays."""
        if shape and self.memory_kind is not None:
            layout = layout.with_memory_kind(self.memory_kind)
        used = [axis for entry in layout.specs for axis in axes_of(entry)]
        free = tuple(axis for axis in self.axes if axis not in used)
        if not shape or self.mesh.axis_size(free) == 1:
            return Rule(layout)
        shards = self.mesh.axis_size(used)
        dims = self._dims(path, shape, layout)
        reason = self._refusal(shape, dtype, shards)
        for dim in dims if not reason else ():
            entries = list(layout.specs)
            entries[dim] = (*axes_of(entries[dim]), *free)
            sharded = layout.with_specs(entries)
            if dim not in [misfit.dim for misfit in sharded.misfits(shape)]:
                return Rule(sharded)
        over = f"over {', '.join(map(repr, free))}"
        if len(dims) < len(shape):
            reason = reason or (
                f"dim {dims[0]}, of size {shape[dims[0]]}, does not divide {over}; "
                "sharded by another, a lookup table shards every activation"
            )
        state = "not sharded further" if shards > 1 else "whole"
        return Rule(layout, note=f"{state}: {reason or f'no dim divides {over}'}")

    def _dims(self, path: str, shape: tuple[int, ...], layout: Layout) -> Sequence[int]:
        """Returns the dims that may be sharded, in order of preference."""
        return sorted(range(len(shape)), key=lambda dim: -shape[dim])

    def _refusal(self, shape: tuple[int, ...], dtype: DType, shards: int) -> str:
        """Returns why an array that is sharded so often is not sharded further."""
        size = math.prod(shape)
        few = f"{size} elements, fewer than min_size={self.min_size}"
        return few if size < self.min_size else ""


@dataclass(frozen=True)
class FsdpRule(ZeroRule):
    """The rule of `fsdp`: on the dim that moves the least.

    Attributes:
        min_bytes: Arrays of fewer bytes on a device stay whole.
        tables: The paths of what rows are looked up in; None if no program was traced.
    """

    min_bytes: int = 0
    tables: tuple[str, ...] | None = field(default=None, repr=False)

    def _refusal(self, shape: tuple[int, ...], dtype: DType, shards: int) -> str:
        nbytes = math.prod(shape) * _jax.itemsize(dtype)
        few = f"smaller than min_bytes={self.min_bytes}"
        return few if nbytes < self.min_bytes * shards else ""

    def _dims(self, path: str, shape: tuple[int, ...], layout: Layout) -> Sequence[int]:
        dims = super()._dims(path, shape, layout)
        if len(shape) == 2:
            dims = self._matrix_dims(path, *shape)
        # A dim that is sharded already is the last choice: it gets smaller still.
        return sorted(dims, key=lambda dim: layout.specs[dim] is not None)

    def _matrix_dims(self, path: str, rows: int, columns: int) -> Sequence[int]:
        is_kernel = _KERNEL.search(path) is not None
        is_table = not is_kernel and _TABLE.search(path) is not None
        if self.tables is not None:
            is_table = any(f"/{path}".endswith(f"/{table}") for table in self.tables)
            is_kernel = not is_table
        if is_table:
            return (0,)
        if columns >= _VOCABULARY * rows:
            return (1, 0)
        if is_kernel:
            return (1, 0) if rows >= columns else (0, 1)
        return (0,) if rows > columns else (0, 1)
