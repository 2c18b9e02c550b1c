"""The error of an expectation that is not met, and how it names an array."""

from typing import Any

from jax.sharding import NamedSharding

from meshlayout import _jax, _render
from meshlayout.errors import MeshLayoutError
from meshlayout.layout import Layout


class VerificationError(MeshLayoutError, AssertionError):
    """A step, a layout or a program is not what a test expects of it."""


def leaf_text(x: Any) -> str:
    """Returns an array's type with its layout, as `f32[512@batch, 10]`."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return f"{x!r} of type {type(x).__name__}"
    if not isinstance(_jax.sharding_of(x), NamedSharding):
        return _render.array_text(x.dtype, x.shape)
    dims = [
        f"{size}@({', '.join(entry)})"
        if isinstance(entry, tuple)
        else f"{size}@{entry}" * bool(entry) or str(size)
        for size, entry in zip(x.shape, Layout.of(x).specs, strict=True)
    ]
    return f"{_render.dtype_text(x.dtype)}[{', '.join(dims)}]"
