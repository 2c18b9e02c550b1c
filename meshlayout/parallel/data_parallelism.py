"""`data_parallel` and `fsdp`: the batch is sharded, and the parameters with it or not.

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
from meshlayout.errors import LayoutMapError
from meshlayout.layout import DimSpec, axes_of
from meshlayout.layout_map import LayoutMap, Rule
from meshlayout.layout_map.rules import shard_further
from meshlayout.mesh import Mesh, as_mesh


MIN_BYTES = 8192
"""The default of `fsdp`: `benchmarks/fsdp_rules.py` measures it."""

# Flax's dense layers hold a kernel of inputs x outputs. A matrix by another name with
# more rows than columns may be a lookup table; one of few rows is known by its name.
_KERNEL = re.compile(r"(^|/)kernel$")
# One of this many times more columns than rows gives logits for a vocabulary.
_VOCABULARY = 6
_TABLE = re.compile(r"(embed|wte|wpe)[^/]*(/[^/]*)?$", re.IGNORECASE)


def data_parallel(
    mesh: Mesh | jax.sharding.Mesh, *, optimizer_memory_kind: str | None = None
) -> LayoutMap:
    """Returns the map for data parallelism: every device holds the whole model.

    Only batches are sharded, over the mesh's batch axes; a step sends the gradients
    once. Use this while model, gradients and optimizer state fit each device. Arrays
    whose own Flax metadata names axes of this mesh are sharded as that says.

    Args:
        mesh: The mesh.
        optimizer_memory_kind: As for `fsdp`.

    Example:
        >>> import meshlayout as ml
        >>> data_parallel(ml.create_mesh({"batch": 8}))
        LayoutMap(Mesh(batch=8), {})
    """
    return LayoutMap(mesh, optimizer_memory_kind=optimizer_memory_kind)


def fsdp(
    mesh: Mesh | jax.sharding.Mesh,
    axes: str | Sequence[str] | None = None,
    min_bytes: int = MIN_BYTES,
    *,
    optimizer_memory_kind: str | None = None,
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
        optimizer_memory_kind: Where the optimizer's state is between updates, such as
            `"pinned_host"`; the devices' own memory if None. A train step copies it to
            the device for the update and back.

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
    names = _natural_axes(mesh) if axes is None else _as_axes(axes)
    mesh.axis_size(names)
    context = _checks.Context(where="fsdp", error=LayoutMapError)
    _checks.count("min_bytes", min_bytes, at_least=0, **context)
    return LayoutMap(
        mesh,
        default=FsdpRule(names, int(min_bytes), mesh),
        optimizer_memory_kind=optimizer_memory_kind,
    )


def _natural_axes(mesh: Mesh) -> tuple[str, ...]:
    axes = ("fsdp",) if "fsdp" in mesh else batch_axes(mesh)
    if not axes:
        msg = (
            f"fsdp: {mesh!r} has no axis named "
            f"{', '.join(map(repr, BATCH_AXES))}. Give the axes to shard over, as "
            f"fsdp(mesh, {mesh.axis_names[0]!r})."
        )
        raise LayoutMapError(msg)
    return axes


def _as_axes(axes: Any) -> tuple[str, ...]:
    names = (axes,) if isinstance(axes, str) else axes
    is_names = isinstance(names, (tuple, list)) and all(
        isinstance(name, str) for name in names
    )
    if not is_names or not names or len(set(names)) < len(names):
        msg = (
            "fsdp: axes must be a mesh axis name or several different ones, got "
            f"{_checks.shown(axes)}."
        )
        raise LayoutMapError(msg)
    return tuple(names)


@dataclass(frozen=True)
class FsdpRule:
    """The rule of `fsdp`: one dim of every large array is sharded.

    Attributes:
        axes: The mesh axes to shard over, major first.
        min_bytes: Arrays of fewer bytes stay whole.
        mesh: The mesh.
    """

    axes: tuple[str, ...]
    min_bytes: int
    mesh: Mesh = field(repr=False)

    def __call__(self, path: str, shape: tuple[int, ...], dtype: DType) -> Rule:
        """Returns the layout of one array, and why if it stays whole."""
        specs, note = self.further(path, shape, dtype, (None,) * len(shape))
        return Rule(specs, note=note)

    def further(
        self,
        path: str,
        shape: tuple[int, ...],
        dtype: DType,
        specs: tuple[DimSpec, ...],
    ) -> tuple[tuple[DimSpec, ...], str | None]:
        """Returns the entries of an array that other rules have sharded already.

        Args:
            path: Its path.
            shape: Its global shape.
            dtype: Its dtype.
            specs: One entry per dim so far.

        Returns:
            The new entries, and why they are the same.
        """
        taken = self.mesh.axis_size(
            [axis for entry in specs for axis in axes_of(entry)]
        )
        if not shape or self.mesh.axis_size(self.axes) == 1:
            return specs, None
        state = "not sharded further" if taken > 1 else "whole"
        if math.prod(shape) * _jax.itemsize(dtype) < self.min_bytes * taken:
            return specs, f"{state}: smaller than min_bytes={self.min_bytes}"
        # A dim that is sharded already is the last choice: it gets smaller still.
        dims = sorted(self._dims(path, shape), key=lambda dim: specs[dim] is not None)
        sharded, reason = shard_further(
            shape, specs, self.axes, self.mesh.shape, dims=dims
        )
        if reason and len(dims) < len(shape):
            reason += "; sharded by another, a lookup table shards every activation"
        return sharded, f"{state}: {reason}" if reason else None

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
