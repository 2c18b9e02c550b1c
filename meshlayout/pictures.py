"""Pictures of how an array is laid out on its devices: `visualize`.

Only indices are read, from the layout or from JAX's `devices_indices_map`: arrays that
are not addressable, abstract or too large for this machine can be drawn, too.
"""

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload, runtime_checkable

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from meshlayout import _checks, _jax, _paths, _render
from meshlayout._annotations import DType
from meshlayout.errors import LayoutError
from meshlayout.layout import Layout, as_layout, entry_text
from meshlayout.mesh import Mesh


@dataclass(frozen=True, repr=False)
class Shards:
    """Which device holds which part of an array, shown as a picture.

    `print` draws it with characters, and a notebook in color. Each block is a shard,
    with the ids of the devices that hold it.

    Attributes:
        shape: Shape of the whole array.
        dtype: Its dtype, if known.
        layout: Its layout, if its sharding has axis names.
        platform: The platform of the devices, such as `"cpu"`.
        held: The id of each device, and the start and stop of its part in every dim.
    """

    shape: tuple[int, ...]
    dtype: DType
    layout: Layout | None
    platform: str
    held: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]

    def __repr__(self) -> str:
        picture = _render.picture_text(self._picture())
        return "\n".join([self._title(), picture, *self._notes()])

    def _repr_html_(self) -> str:
        return _render.picture_html(self._title(), self._picture(), self._notes())

    def _picture(self) -> _render.Picture:
        return _render.shards_picture(self.shape, self._axes(), self.held)

    def _axes(self) -> list[str]:
        """Returns the mesh axes that shard each dim; an empty string for none."""
        if self.layout is None:
            return [""] * len(self.shape)
        specs = self.layout.with_rank(len(self.shape)).specs
        return ["" if entry is None else entry_text(entry) for entry in specs]

    def _title(self) -> str:
        dims = [
            f"{size}@{axes}" if axes else str(size)
            for size, axes in zip(self.shape, self._axes(), strict=True)
        ]
        dtype = "" if self.dtype is None else _render.dtype_text(self.dtype)
        array = f"{dtype}[{', '.join(dims)}]"
        if self.layout is None:
            return array
        memory = f" in {self.layout.memory_kind}" if self.layout.memory_kind else ""
        return f"{array} on {self.layout.mesh!r}{memory}"

    def _notes(self) -> list[str]:
        """Returns a line on the shards: how many, their shape, bytes and copies."""
        parts = {slices for _, slices in self.held}
        shapes = {tuple(stop - start for start, stop in part) for part in parts}
        num_devices, num_copies = len(self.held), len(self.held) // len(parts)
        if len(parts) == 1:
            what = "the whole array"
            if self.dtype is not None:
                what += f", {self._bytes_text(self.shape)}"
            who = (
                f"{num_devices} devices hold" if num_devices > 1 else "One device holds"
            )
            return [f"{who} {what}. {self._legend()}"]
        shape = f" of shape {shapes.pop()}" if len(shapes) == 1 else ""
        if shape and self.dtype is not None:
            shape += f", {self._bytes_text(self.shape, len(parts))} each"
        copies = f", on {num_copies} devices each" if num_copies > 1 else ""
        return [f"{len(parts)} shards{shape}{copies}. {self._legend()}"]

    def _bytes_text(self, shape: Sequence[int], parts: int = 1) -> str:
        return _render.bytes_text(math.prod(shape) * _jax.itemsize(self.dtype) // parts)

    def _legend(self) -> str:
        return f"Numbers in the blocks are ids of {self.platform.upper()} devices."


@runtime_checkable
class HasCurves(Protocol):
    """An object with values by epoch to draw: a `History`, unknown to this module."""

    def plot(self) -> _render.Curves:
        """Returns the curves of all metrics."""
        ...


@overload
def visualize(value: HasCurves) -> _render.Curves: ...
@overload
def visualize(
    value: Layout | Sharding | jax.Array | jax.ShapeDtypeStruct | nnx.Variable[Any],
    shape: Sequence[int] | None = None,
) -> Shards: ...
def visualize(value: Any, shape: Sequence[int] | None = None) -> Any:
    """Returns a picture of which device holds which part of an array.

    Use this to check a layout before or after creating an array. Nothing is moved or
    copied, and an abstract array is enough.

    Args:
        value: A `jax.Array`, an NNX variable, a `jax.ShapeDtypeStruct` with a
            sharding, or a layout or a sharding together with `shape`. Also a `History`,
            whose curves are drawn as by `history.plot()`.
        shape: Shape of the whole array; only for a layout or a sharding.

    Raises:
        LayoutError: If the value is on no devices, the shape is missing or is not
            that of the array, or it does not divide into the shards of the layout.

    Example:
        >>> from meshlayout import create_mesh
        >>> mesh = create_mesh({"batch": 2, "model": 4})
        >>> visualize(Layout([None, "model"], mesh), shape=(4, 8))
        [4, 8@model] on Mesh(batch=2, model=4)
                    dim 1 (8) over model
        dim 0 (4)   0:2    2:4    4:6    6:8
                  ┌──────┬──────┬──────┬──────┐
              0:4 │ 0, 4 │ 1, 5 │ 2, 6 │ 3, 7 │
                  └──────┴──────┴──────┴──────┘
        4 shards of shape (4, 2), on 2 devices each. Numbers in the blocks are ids of
        CPU devices.
    """
    if isinstance(value, HasCurves) and shape is None:
        return value.plot()
    if isinstance(value, (Layout, Sharding)):
        if shape is None:
            kind = "layout" if isinstance(value, Layout) else "sharding"
            msg = (
                f"a {kind} alone has no size to draw: give the shape of the array, "
                f"visualize({kind}, shape=(8, 8))."
            )
            raise LayoutError(msg)
        return _shards(value, shape, None)
    array: Any = _paths.box_value(value) if isinstance(value, nnx.Variable) else value
    # Not `array.sharding`: traced values raise for it, and some know it nevertheless.
    sharding = _jax.sharding_of(array)
    if not isinstance(sharding, Sharding):
        raise LayoutError(_no_sharding(array))
    if shape is not None and _checks.shape(shape, error=LayoutError) != array.shape:
        msg = (
            f"{_render.array_text(array.dtype, array.shape)} was given with shape="
            f"{tuple(shape)}; an array has its own shape, so omit shape=."
        )
        raise LayoutError(msg)
    return _shards(sharding, array.shape, array.dtype)


def _shards(value: Layout | Sharding, shape: Sequence[int], dtype: DType) -> Shards:
    shape = _checks.shape(shape, error=LayoutError)
    if isinstance(value, (Layout, NamedSharding)):
        # With our arithmetic, which says what does not divide and knows `...`.
        layout = as_layout(value, len(shape))
        layout.check(shape)
        held = [
            (device, layout.shard_slices(shape, index))
            for index, device in enumerate(layout.mesh.devices.flat)
        ]
    else:
        layout = None
        held = value.devices_indices_map(shape).items()
    first, *_ = parts = [
        (
            device,
            tuple(s.indices(size)[:2] for s, size in zip(part, shape, strict=True)),
        )
        for device, part in held
    ]
    held = tuple((int(device.id), part) for device, part in parts)
    return Shards(shape, dtype, layout, first[0].platform, held)


def _no_sharding(value: Any) -> str:
    expected = "value must be a jax.Array, a Layout or a sharding"
    if isinstance(value, np.ndarray):
        array = _render.array_text(value.dtype, value.shape)
        return (
            f"{expected}, got a NumPy array {array}, which is on no device. Place it "
            "first: relayout(x, layout)."
        )
    if isinstance(value, Tracer):
        return (
            f"{expected}, got a value inside jit whose sharding is not known while "
            "tracing. Visualize the result, or use a mesh with Explicit axes."
        )
    if isinstance(value, jax.ShapeDtypeStruct):
        return (
            f"{_render.array_text(value.dtype, value.shape)} is abstract and has no "
            "sharding. Give it one: jax.ShapeDtypeStruct(shape, dtype, "
            "sharding=layout.sharding)."
        )
    short = " ".join(reprlib.repr(value).split())
    got = f"{expected}, got {short} of type {type(value).__name__}."
    if isinstance(value, (Mesh, jax.sharding.Mesh)):
        return f"{got} To draw an array on it: visualize(mesh.layout(...), shape=...)."
    if isinstance(value, (PartitionSpec, str)):
        return f"{got} A spec needs a mesh: mesh.layout(...)."
    if len(jax.tree.leaves(value)) > 1:
        return f"{got} Give one of its arrays, or use LayoutMap.explain for the tree."
    return got
