"""What was decided for each leaf, as plain values; and its lock text."""

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshlayout import _jax, _render
from meshlayout.errors import LayoutMapError, did_you_mean
from meshlayout.layout import Layout


@dataclass(frozen=True, slots=True)
class Resolution:
    """The layout of one leaf, and why.

    Attributes:
        path: The leaf's name.
        shape: Its global shape.
        dtype: Its dtype.
        layout: The layout it gets.
        rule: The pattern that gave it, in the user's words, or None.
        reason: Why this layout, as a phrase.
        fallback: What had to be given up, such as a dim that does not divide, or
            None.
        note: What disagreed without being an error, or None.
        bytes_per_device: Bytes of the leaf on each device.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    layout: Layout
    rule: str | None
    reason: str
    fallback: str | None
    note: str | None
    bytes_per_device: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf: what each device would hold if replicated."""
        return math.prod(self.shape) * _jax.itemsize(self.dtype)

    @property
    def array(self) -> str:
        """The leaf's dtype and shape, as `f32[784, 128]`."""
        return _render.array_text(self.dtype, self.shape)


@dataclass(frozen=True)
class Resolved:
    """The layouts of a whole tree.

    Unpacks as `layouts, resolutions = layout_map.resolve(tree)`.

    Attributes:
        layouts: A tree with the structure of the one that was resolved and a
            `Layout` for every leaf (None for leaves that are no arrays).
        resolutions: One `Resolution` per array, in the tree's order.
    """

    layouts: Any
    resolutions: tuple[Resolution, ...]

    def __iter__(self) -> Iterator[Any]:
        yield self.layouts
        yield self.resolutions

    def __getitem__(self, path: str) -> Resolution:
        """Returns the resolution of the leaf with this path.

        Raises:
            LayoutMapError: If no leaf has it.
        """
        for resolution in self.resolutions:
            if resolution.path == path:
                return resolution
        paths = [resolution.path for resolution in self.resolutions]
        msg = f"no leaf has the path {path!r}.{did_you_mean(path, paths)}"
        raise LayoutMapError(msg)

    @property
    def bytes_per_device(self) -> int:
        """Bytes on each device, all leaves together."""
        return sum(resolution.bytes_per_device for resolution in self.resolutions)

    @property
    def nbytes(self) -> int:
        """Bytes on each device if everything were replicated."""
        return sum(resolution.nbytes for resolution in self.resolutions)

    def to_lock(self) -> str:
        """Returns every layout as stable text, one line per leaf, sorted by path.

        Commit it beside a test that calls `check_lock` with it.
        """
        meshes = sorted({repr(found.layout.mesh) for found in self.resolutions})
        lines = sorted(
            f"{found.path}: {found.array} {found.layout}" for found in self.resolutions
        )
        return "\n".join([f"# layouts on {', '.join(meshes)}", *lines]) + "\n"

    def check_lock(self, text: str) -> None:
        """Raises LayoutMapError, with the lines that differ, if layouts changed.

        Args:
            text: What `to_lock` returned when the layouts were last reviewed.
        """
        if not isinstance(text, str):
            msg = f"check_lock takes the text of to_lock(), and got {text!r}."
            raise LayoutMapError(msg)
        locked = [line.rstrip() for line in text.strip().splitlines()]
        current = self.to_lock().splitlines()
        if locked == current:
            return
        changes = [
            line
            for line in difflib.unified_diff(locked, current, n=0, lineterm="")
            if not line.startswith(("---", "+++", "@@"))
        ]
        shown = "\n  ".join(changes[:40])
        more = f"\n  ... and {len(changes) - 40} more" * (len(changes) > 40)
        msg = (
            f"the layouts are not the locked ones (- locked, + now):\n  {shown}{more}\n"
            "If this is meant, write the lock anew with to_lock()."
        )
        raise LayoutMapError(msg)
