"""The entries of a layout: what a user may write for each dim, and its canonical form.

`None`, `()` and `UNSHARDED` are the same entry, and so are `"model"` and `("model",)`:
layouts that mean the same have to be equal, as they are keys of compiled programs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Final, TypeAlias, Union

from jax.sharding import PartitionSpec

from meshlayout import _jax
from meshlayout._checks import shown
from meshlayout.errors import LayoutError, did_you_mean
from meshlayout.mesh import Mesh


class _Match:
    """The type of `MATCH`."""

    def __repr__(self) -> str:
        return "MATCH"

    def __reduce__(self) -> str:
        return "MATCH"  # pickled by name: it is compared by identity


UNSHARDED: Final = None
"""An unsharded dim: whole on every device; the `None` of a `PartitionSpec`."""

MATCH: Final = _Match()
"""In `relayout`: this dim keeps the sharding that the array already has."""

DimSpec: TypeAlias = Union[str, tuple[str, ...], EllipsisType, _Match, None]  # noqa: UP007
"""One entry of a layout, in its canonical form."""

SpecLike: TypeAlias = Sequence[DimSpec | Sequence[str]] | PartitionSpec
"""What a user may write for the entries of a layout."""


@dataclass(frozen=True)
class Misfit:
    """One dim of a shape that does not divide into its shards.

    Attributes:
        dim: The array dim.
        size: Its size, in elements.
        num_shards: The number of shards that it would have to divide into.
        axes: The mesh axes that shard it.
    """

    dim: int
    size: int
    num_shards: int
    axes: tuple[str, ...]

    @property
    def fact(self) -> str:
        """What does not divide, without a period at the end."""
        return (
            f"dim {self.dim} has size {self.size}, which does not divide into "
            f"{self.num_shards} shards over mesh {axes_text(self.axes)}"
        )

    @property
    def fix(self) -> str:
        """The nearest sizes that would fit, and the alternative."""
        below = self.size // self.num_shards * self.num_shards
        sizes = [below] * (below > 0) + [below + self.num_shards]
        fit = " and ".join(map(str, sizes))
        return (
            f"Nearest size{'s' * (len(sizes) > 1)} that fit{'s' * (len(sizes) == 1)}: "
            f"{fit}. To keep the size, leave dim {self.dim} UNSHARDED."
        )

    def __str__(self) -> str:
        """Returns the fact and the fix, without saying which array."""
        return f"{self.fact}. {self.fix}"


def axes_text(axes: Sequence[str]) -> str:
    """Returns `"axis 'a'"` or `"axes 'a', 'b'"`."""
    names = ", ".join(map(repr, axes))
    return f"axis {names}" if len(axes) == 1 else f"axes {names}"


def _parse_entry(entry: Any, dim: int) -> DimSpec:
    if entry is None or entry is ... or entry is MATCH or isinstance(entry, str):
        return entry
    if isinstance(entry, (tuple, list)):
        if not all(isinstance(axis, str) for axis in entry):
            msg = f"entry {dim} is {entry!r}; a tuple must hold mesh axis names."
            raise LayoutError(msg)
        # The canonical form, for which layouts that mean the same are equal.
        return None if not entry else entry[0] if len(entry) == 1 else tuple(entry)
    if entry is PartitionSpec.UNCONSTRAINED:
        msg = (
            f"entry {dim} is PartitionSpec.UNCONSTRAINED, which leaves the dim to the "
            "compiler; a layout says how every dim is sharded. Write an axis name or "
            "UNSHARDED."
        )
        raise LayoutError(msg)
    msg = (
        f"entry {dim} is {shown(entry)}; an entry must be a mesh axis name, a tuple of "
        "names, UNSHARDED (None), MATCH or `...`."
    )
    raise LayoutError(msg)


def parse_specs(specs: Any) -> tuple[DimSpec, ...]:
    """Returns the canonical entries of what a user wrote, or raises LayoutError."""
    # A string is a sequence of strings: "batch" would be five axes.
    if isinstance(specs, str):
        msg = (
            f"specs must be a list of entries, one per dim, got the string {specs!r}. "
            f"Write [{specs!r}] for an array of one dim, or [{specs!r}, ...] for any."
        )
        raise LayoutError(msg)
    if isinstance(specs, PartitionSpec):
        if _jax.is_unreduced(specs):
            msg = f"{specs} has unreduced or reduced axes; a layout has only shards."
            raise LayoutError(msg)
    elif not isinstance(specs, (list, tuple)):
        msg = (
            "specs must be a list, a tuple or a PartitionSpec with one entry per dim, "
            f"got {shown(specs)}."
        )
        raise LayoutError(msg)
    entries = tuple(_parse_entry(entry, dim) for dim, entry in enumerate(specs))
    if sum(entry is ... for entry in entries) > 1:
        msg = f"{specs_text(entries)} has `...` twice; one stands for all other dims."
        raise LayoutError(msg)
    return entries


def axes_of(entry: DimSpec) -> tuple[str, ...]:
    """Returns the mesh axes of one entry, major first."""
    if isinstance(entry, str):
        return (entry,)
    return entry if isinstance(entry, tuple) else ()


def check_axes(specs: tuple[DimSpec, ...], mesh: Mesh) -> None:
    """Raises LayoutError if an entry names an unknown axis, or one is used twice."""
    seen: dict[str, int] = {}
    for dim, entry in enumerate(specs):
        for axis in axes_of(entry):
            if axis not in mesh.axis_names:
                msg = (
                    f"mesh axis {axis!r} of {specs_text(specs)} is not in {mesh!r}."
                    f"{did_you_mean(axis, mesh.axis_names)}"
                )
                raise LayoutError(msg)
            if axis in seen:
                place = f"entry {dim}"
                if seen[axis] != dim:
                    place = f"entries {seen[axis]} and {dim}"
                msg = (
                    f"mesh axis {axis!r} is used twice in {specs_text(specs)}, on "
                    f"{place}; an axis can shard only one dim, and only once."
                )
                raise LayoutError(msg)
            seen[axis] = dim


def entry_text(entry: DimSpec) -> str:
    """Returns one entry as messages and tables show it."""
    if entry is None:
        return "unsharded"
    if entry is ...:
        return "..."
    if isinstance(entry, tuple):
        return f"({', '.join(entry)})"
    return str(entry)


def specs_text(specs: Iterable[DimSpec]) -> str:
    """Returns entries as messages show them, such as `[batch, unsharded]`."""
    return f"[{', '.join(map(entry_text, specs))}]"


def entry_to_json(entry: DimSpec) -> Any:
    """Returns an entry as a value for JSON, which `entry_from_json` reads back."""
    if entry is ...:
        return {"special": "..."}
    if isinstance(entry, _Match):
        return {"special": "match"}
    return entry


def entry_from_json(entry: Any) -> Any:
    if isinstance(entry, Mapping):
        return {"...": ..., "match": MATCH}[entry["special"]]
    return tuple(entry) if isinstance(entry, list) else entry
