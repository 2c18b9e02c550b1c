"""`data_parallel`, `fsdp` and `zero_rule`: shard the batch, and states with it.

With FSDP (ZeRO stage 3) the compiler gathers each weight where it is used and scatters
its gradient, whichever dim is sharded. Measured (`benchmarks/fsdp_rules.py`): with the
vocabulary of embedding and logits sharded, a transformer sends a fifth less. Other
matrices are as cheap on their smaller dim, and cheaper for wide inputs and in bfloat16.
An embedding must never be sharded by features: every activation then would be, on the
axis that also shards the batch, and the program sends ten times as much.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax

from meshlayout import _checks, _jax
from meshlayout._annotations import Batch, DType
from meshlayout._batches import BATCH_AXES, batch_axes
from meshlayout.errors import LayoutMapError, LayoutWarning, warn
from meshlayout.layout import Layout, axes_of
from meshlayout.layout_map import LayoutMap, Rule
from meshlayout.mesh import Mesh, auto_mesh
from meshlayout.parallel.factors import leaves_of, union
from meshlayout.parallel.program import Call, Model, follow


# Each sharded array costs an all-gather in every step, whatever its size, and biases
# and norms take next to no memory (`benchmarks/fsdp_rules.py` measures it).
_MIN_BYTES = 8192
_MIN_SIZE = 1024

# Flax's dense layers hold a kernel of inputs x outputs. A matrix by another name with
# more rows than columns may be a lookup table; one of few rows is known by its name.
_KERNEL = re.compile(r"(^|/)kernel$")
_VOCABULARY = 6  # so many times more columns than rows are logits for a vocabulary
_TABLE = re.compile(r"(embed|wte|wpe)[^/]*(/[^/]*)?$", re.IGNORECASE)


@_checks.user_call
def data_parallel(mesh: Mesh | jax.sharding.Mesh) -> LayoutMap:
    """Returns the map for data parallelism: every device holds the whole model.

    Only batches are sharded. Use this if the state and gradients fit on each device.

    Examples:
        >>> import meshlayout as ml
        >>> data_parallel(ml.create_mesh({"batch": 8}))
        LayoutMap(Mesh(batch=8), {})
    """
    return LayoutMap(mesh)


@_checks.user_call
def zero_rule(
    mesh: Mesh | jax.sharding.Mesh,
    axes: str | Sequence[str] | None = None,
    *,
    min_size: int = _MIN_SIZE,
    memory_kind: str | None = None,
) -> "FsdpRule":
    """Returns a rule that shards arrays further, on the largest dim that divides.

    Use this for the optimizer's state, in `layouts | {"^opt_state/": zero_rule(mesh)}`
    under any map (Rajbhandari et al., "ZeRO", 2020, stage 1): a slot keeps its
    parameter's layout and is also sharded over the batch's axes; the update is computed
    in shards, too. Arrays that are small or do not divide keep their layout.

    Args:
        mesh: The mesh.
        axes: The axes to shard over; by default all that shard the mesh's batches. Use
            `()` for none, if only `memory_kind` matters.
        min_size: Arrays of fewer elements are not sharded.
        memory_kind: The devices' memory that holds the arrays, such as
            `"pinned_host"`: a train step copies them to the device and back.

    Raises:
        MeshError: If the mesh has no such axis.
        LayoutMapError: If the mesh has no axis for batches, `min_size` is not a count,
            or the devices have no such memory.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> layouts = ml.LayoutMap(mesh, {"kernel$": (None, "model")})
        >>> layouts |= {"^opt_state/": zero_rule(mesh)}
        >>> params = {"kernel": jax.ShapeDtypeStruct((784, 128), "float32")}
        >>> state = {"params": params, "opt_state": {"mu": params}}
        >>> layouts.resolve(state)["opt_state/mu/kernel"].layout
        Layout([batch, model], Mesh(batch=2, model=4))
    """
    mesh = auto_mesh(mesh)
    names = () if axes == () else _axes(mesh, "zero_rule", axes, batch_axes(mesh))
    where = _checks.Context(where="zero_rule", error=LayoutMapError)
    min_size = _checks.count("min_size", min_size, at_least=0, **where)
    if memory_kind is not None:
        is_old = not _jax.memory_in_jit and mesh.platform == "cpu"
        sharding = Layout([], mesh, memory_kind=memory_kind).sharding
        # Described GPUs do not list their memories, and JAX then leaves out the kind.
        if is_old or sharding.memory_kind != memory_kind:
            move = f"move arrays to {memory_kind!r} in programs for {mesh!r}"
            raise LayoutMapError(f"zero_rule: JAX cannot {move}.")
    return FsdpRule(names, mesh, 0, min_size, memory_kind)


@_checks.user_call
def fsdp(
    mesh: Mesh | jax.sharding.Mesh,
    model_or_build: "Model | Callable[[], Model] | None" = None,
    example_inputs: Batch = None,
    *,
    axes: str | Sequence[str] | None = None,
    min_bytes: int = _MIN_BYTES,
    call: Call | None = None,
) -> LayoutMap:
    """Returns the map for fully sharded data parallelism (ZeRO stage 3).

    Every array of `min_bytes` or more is sharded on one dim, chosen by its shape; its
    optimizer state and moving average follow. Use this when the model does not fit on
    each device. Rules for single arrays go on top: `fsdp(mesh) | {"head/kernel":
    [...]}`; Flax metadata that names axes of this mesh counts for its array.

    If a model is given, its forward program is traced as by `tensor_parallel`: lookup
    tables are sharded by rows, however small.

    For hybrid sharding (shards inside a host or slice, replicas across), give the mesh
    two axes, of which only `fsdp` then holds shards: `create_mesh({"replica": 2,
    "fsdp": -1}, dcn="replica")` sends only gradients over the slow network.

    Args:
        mesh: The mesh.
        model_or_build: None, or a model as for `tensor_parallel`.
        example_inputs: What the model is called with.
        axes: The mesh axes to shard over. By default `fsdp` if the mesh has this axis,
            otherwise all axes that shard its batches.
        min_bytes: Arrays with fewer bytes on a device stay whole; by default 8192.
        call: How the model is called.

    Raises:
        MeshError: If the mesh has no such axis.
        LayoutMapError: If the mesh has no axis for it, `min_bytes` is not a count, or
            the model cannot be called like this.

    Warns:
        LayoutWarning: If a loop reads sharded parameters and carries an activation that
            nothing constrains: XLA may shard it like the weights' features.

    Examples:
        >>> import meshlayout as ml
        >>> layouts = fsdp(ml.create_mesh({"batch": 8}))
        >>> layouts
        LayoutMap(Mesh(batch=8), {}, default=FsdpRule(axes=('batch',), min_bytes=8192))
        >>> kernel = jax.ShapeDtypeStruct((784, 128), "float32")
        >>> layouts.resolve({"dense": {"kernel": kernel}})["dense/kernel"].layout
        Layout([unsharded, batch], Mesh(batch=8))
    """
    mesh = auto_mesh(mesh)
    names = _axes(mesh, "fsdp", axes, ("fsdp",) if "fsdp" in mesh else batch_axes(mesh))
    where = _checks.Context(where="fsdp", error=LayoutMapError)
    min_bytes = _checks.count("min_bytes", min_bytes, at_least=0, **where)
    if model_or_build is None and example_inputs is None and call is None:
        return LayoutMap(mesh, default=FsdpRule(names, mesh, min_bytes))
    params, flow = follow(model_or_build, example_inputs, call, "fsdp", mesh)
    large = union((x.nbytes >= min_bytes) << i for i, x in enumerate(params))
    loops = [(shape, read & large) for shape, read in flow.loops if read & large]
    if loops:
        shape, read = loops[0]
        path = next(x.path for i, x in enumerate(params) if read >> i & 1)
        rows = batch_axes(mesh) or names
        line = (
            f"fsdp: a loop reads {path!r}, which is sharded, and carries an activation "
            f"of shape {shape}, which nothing constrains: XLA may shard that like the "
            "weights and move every activation. Write x = ml.constrain(x, 'carry') as "
            "the first line of the loop's body, and give the step layouts=ml.LayoutMap("
            f"mesh, {{'carry': ({rows[0] if len(rows) == 1 else rows!r}, ...)}})."
        )
        warn(line, LayoutWarning)
    tables = {
        param.path: tuple({*leaves_of(dim)} <= rows for dim in param.array.dims)
        for each in flow.contractions
        for rows in [{*leaves_of(each.factors)}]
        for index, param in enumerate(params)
        if each.bit & flow.lookups and each.weights >> index & 1
    }
    rule = FsdpRule(names, mesh, min_bytes, tables=tuple(tables.items()))
    return LayoutMap(mesh, default=rule)


def _axes(mesh: Mesh, where: str, axes: Any, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes that a user gave, or the usual ones of the mesh."""
    if axes is None and not usual:
        fact = f"{mesh!r} has no axis named {', '.join(map(repr, BATCH_AXES))}"
        axis = max(mesh.axis_names, key=lambda x: "shard" in x or "fsdp" in x)
        fix = f"the axes to shard over, as {where}(mesh, axes={axis!r})"
        raise LayoutMapError(f"{where}: {fact}. Give {fix}.")
    names = usual if axes is None else axes
    mesh.axis_size(names)
    names = (names,) if isinstance(names, str) else tuple(names)
    if len({*names}) < max(1, len(names)):
        msg = f"{where}: axes must be different mesh axes, one at least, got {axes!r}."
        raise LayoutMapError(msg)
    return names


@dataclass(frozen=True)
class FsdpRule:
    """The rule of `fsdp` and `zero_rule`: shards arrays over more axes, on one dim."""

    name: ClassVar = "fsdp"  # as reports show it
    axes: tuple[str, ...]  # major first; those that shard an array already do not count
    mesh: Mesh = field(repr=False)
    min_bytes: int = 0  # on a device
    # Of `zero_rule`, by which the largest dim comes first; else what moves the least.
    min_size: int | None = field(default=None, repr=False)
    memory_kind: str | None = field(default=None, repr=False)
    # The paths of lookup tables, and which dims are looked up; None without a program.
    tables: tuple[tuple[str, tuple[bool, ...]], ...] | None = field(
        default=None, repr=False
    )

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
        size, shards = math.prod(shape), self.mesh.axis_size(used)
        dims = self._dims(path, shape, layout)
        over = f"over {', '.join(map(repr, free))}"
        reason = f"no dim divides {over}"
        if len(dims) < len(shape):
            reason = f"dim {dims[0]}, of size {shape[dims[0]]}, does not divide {over}"
            reason += "; sharded by another, a lookup table shards every activation"
        if size < (self.min_size or 0):
            reason = f"{size} elements, fewer than min_size={self.min_size}"
        elif size * _jax.itemsize(dtype) < self.min_bytes * shards:
            reason = f"smaller than min_bytes={self.min_bytes}"
        else:
            for dim in dims:
                entries = list(layout.specs)
                entries[dim] = (*axes_of(entries[dim]), *free)
                sharded = layout.with_specs(entries)
                if dim not in [misfit.dim for misfit in sharded.misfits(shape)]:
                    return Rule(sharded)
        state = "not sharded further" if shards > 1 else "whole"
        return Rule(layout, note=f"{state}: {reason}")

    def _dims(self, path: str, shape: tuple[int, ...], layout: Layout) -> Sequence[int]:
        """Returns the dims that may be sharded, in order of preference."""
        dims: Sequence[int] = sorted(range(len(shape)), key=lambda dim: -shape[dim])
        if self.min_size is not None:
            return dims
        for name, by_dim in self.tables or ():
            if f"/{path}".endswith(f"/{name}") and len(by_dim) == len(shape):
                return [dim for dim in dims if by_dim[dim]] or (0,)
        if len(shape) == 2:
            rows, columns = shape
            is_kernel = self.tables is not None or _KERNEL.search(path) is not None
            is_tall = is_kernel and rows >= columns
            dims = (1, 0) if columns >= _VOCABULARY * rows or is_tall else (0, 1)
            # If rows are sharded already, it is a kernel or as long as a vocabulary.
            least = columns if layout.specs[0] is None else _VOCABULARY * columns
            if not is_kernel and (rows > least or _TABLE.search(path)):
                dims = (0,)
        # A dim that is sharded already is the last choice: it gets smaller still.
        return sorted(dims, key=lambda dim: layout.specs[dim] is not None)
