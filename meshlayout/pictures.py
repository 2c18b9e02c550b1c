"""Pictures of how an array is laid out on its devices: `visualize`.

Only indices are read: abstract arrays, and those of other processes, are drawn too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import Sharding

from meshlayout import _checks, _jax, _paths, _render
from meshlayout._annotations import DType
from meshlayout.errors import LayoutError
from meshlayout.layout import Layout, entry_text


@dataclass(frozen=True, repr=False)
class Shards:
    """A picture of which device holds which part of an array, in color in notebooks.

    Attributes:
        shape: Shape of the whole array.
        dtype: Its dtype, if known.
        layout: Its layout.
        held: The id of each device, and the start and stop of its part in every dim.
    """

    shape: tuple[int, ...]
    dtype: DType
    layout: Layout
    held: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]

    def __repr__(self) -> str:
        picture = _render.picture_text(self._picture())
        return "\n".join([self._title(), picture, self._note()])

    def _repr_html_(self) -> str:
        return _render.picture_html(self._title(), self._picture(), [self._note()])

    def _picture(self) -> _render.Picture:
        return _render.shards_picture(self.shape, self._axes(), self.held)

    def _axes(self) -> list[str]:
        """Returns the mesh axes that shard each dim; an empty string for none."""
        return [entry_text(entry) if entry else "" for entry in self.layout.specs]

    def _title(self) -> str:
        axes = [f"@{axes}" * bool(axes) for axes in self._axes()]
        dims = [f"{size}{text}" for size, text in zip(self.shape, axes, strict=True)]
        dtype = "" if self.dtype is None else _render.dtype_text(self.dtype)
        memory = f" in {self.layout.memory_kind}" if self.layout.memory_kind else ""
        return f"{dtype}[{', '.join(dims)}] on {self.layout.mesh!r}{memory}"

    def _note(self) -> str:
        """Returns a line on the shards: how many, their shape, bytes and copies."""
        shape = tuple(stop - start for start, stop in self.held[0][1])
        parts = len({part for _, part in self.held})
        copies = len(self.held) // parts
        size = ""
        if self.dtype is not None:
            nbytes = math.prod(shape) * _jax.itemsize(self.dtype)
            size = f", {_render.bytes_text(nbytes)}"
        if parts == 1:
            who = f"{copies} devices hold" if copies > 1 else "One device holds"
            text = f"{who} the whole array{size}"
        else:
            text = f"{parts} shards of shape {shape}{size}{' each' * bool(size)}"
            text += f", on {copies} devices each" * (copies > 1)
        platform = self.layout.mesh.platform.upper()
        ids = f"Numbers in the blocks are ids of {platform} devices."
        return f"{text}. {ids}"


def visualize(
    value: Layout | Sharding | jax.Array | jax.ShapeDtypeStruct | nnx.Variable[Any],
    shape: Sequence[int] | None = None,
) -> Shards:
    """Returns a picture of which device holds which part of an array.

    Use this to check a layout before or after creating an array. Nothing is moved.

    Args:
        value: A placed array, NNX variable or `jax.ShapeDtypeStruct`, or a layout or a
            sharding together with `shape`.
        shape: Shape of the whole array; only for a layout or a sharding.

    Raises:
        LayoutError: If the value is on no devices, or the shape is missing or does not
            divide into the shards of the layout.

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
    array: Any = _paths.box_value(value) if isinstance(value, nnx.Variable) else value
    dtype = None
    if not isinstance(array, (Layout, Sharding)):
        # Not `array.sharding`, for which traced values raise.
        sharding = _jax.sharding_of(array)
        if not isinstance(sharding, Sharding):
            msg = (
                f"{_checks.shown(array)} is on no devices; value must be a Layout or a "
                "sharding, with shape=, or an array that is placed, such as by "
                "relayout(x, layout)."
            )
            raise LayoutError(msg)
        shape, dtype, array = array.shape, array.dtype, sharding
    if shape is None:
        msg = "a layout alone has no size to draw: give the shape of the array, shape=."
        raise LayoutError(msg)
    shape = tuple(shape)
    layout = Layout.of(array, len(shape))
    layout.check(shape)  # says better than JAX what does not divide
    held: list[tuple[int, tuple[tuple[int, int], ...]]] = []
    for device, index in layout.sharding.devices_indices_map(shape).items():
        part = (s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
        held.append((int(device.id), tuple(part)))
    return Shards(shape, dtype, layout, tuple(held))
