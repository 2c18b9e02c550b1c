"""Pictures of how an array is laid out on its devices, drawn from indices alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import Sharding

from meshlayout import _checks, _jax, _paths, _render
from meshlayout.errors import LayoutError
from meshlayout.layout import Layout, entry_text


@dataclass(frozen=True, repr=False)
class Shards:
    """A picture of shards, each a block with the ids of the devices that hold it.

    Attributes:
        held: The id of each device, and the start and stop of its part in every dim.
    """

    held: _render.Held
    _title: str
    _picture: _render.Picture
    _note: str  # on how many shards there are

    def __repr__(self) -> str:
        return "\n".join([self._title, _render.picture_text(self._picture), self._note])

    def _repr_html_(self) -> str:
        return _render.picture_html(self._title, self._picture, [self._note])


@_checks.user_call
def visualize(
    value: Layout | Sharding | jax.Array | jax.ShapeDtypeStruct | nnx.Variable[Any],
    shape: Sequence[int] | None = None,
) -> Shards:
    """Returns a picture of which device holds which part of an array.

    Use this to check a layout, also one of an abstract array or on other processes.

    Args:
        value: A placed array, NNX variable or `ShapeDtypeStruct`; a layout or sharding.
        shape: Shape of the whole array; only for a layout or a sharding.

    Raises:
        LayoutError: If the value has no devices, or `shape` is missing or unfit.

    Examples:
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
            fact = f"{_checks.shown(array)} is on no devices; value must be a Layout or"
            way_out = "a sharding, with shape=, or an array, as of relayout(x, layout)."
            raise LayoutError(f"{fact} {way_out}")
        shape, dtype, array = array.shape, array.dtype, sharding
    if shape is None:
        msg = "a layout alone has no size to draw: give the shape of the array, shape="
        raise LayoutError(f"{msg}(8, 8).")
    shape = tuple(shape)
    layout = Layout.of(array, len(shape))
    layout.check(shape)  # says better than JAX what does not divide
    held: list[tuple[int, tuple[tuple[int, int], ...]]] = []
    for device, slices in layout.sharding.devices_indices_map(shape).items():
        pairs = zip(slices, shape, strict=True)
        part = tuple(dim.indices(size)[:2] for dim, size in pairs)
        held.append((int(device.id), part))
    axes = [entry_text(entry) if entry else "" for entry in layout.specs]
    dims = [f"{n}@{x}" if x else f"{n}" for n, x in zip(shape, axes, strict=True)]
    title = "" if dtype is None else _render.dtype_text(dtype)
    title += f"[{', '.join(dims)}] on {layout.mesh!r}"
    title += f" in {layout.memory_kind}" * bool(layout.memory_kind)
    num_shards = len({part for _, part in held})
    copies, nbytes = len(held) // num_shards, ""
    if dtype is not None:
        nbytes = f", {_render.bytes_text(layout.bytes_per_device(shape, dtype))}"
    note = f"{copies} devices hold" if copies > 1 else "One device holds"
    note += f" the whole array{nbytes}"
    if num_shards > 1:
        note = f"{num_shards} shards of shape {layout.shard_shape(shape)}{nbytes}"
        note += " each" * bool(nbytes) + f", on {copies} devices each" * (copies > 1)
    platform = layout.mesh.platform.upper()
    note += f". Numbers in the blocks are ids of {platform} devices."
    return Shards(held, title, _render.shards_picture(shape, axes, held), note)
