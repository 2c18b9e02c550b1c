"""How one array is laid out on a mesh: `Layout`, and its shape arithmetic.

A `NamedSharding` does not know the rank of its array, so JAX finds most mistakes only
when an array exists. A layout has one entry per dim: shapes, shards and bytes are
checked before anything is created, with errors that name the dim and the sizes that
would fit. Layouts that mean the same are equal, since they are keys of compiled
programs: `None`, `()` and `UNSHARDED` are one entry, as are `"model"` and `("model",)`.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Final, NamedTuple, TypeAlias, Union

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from meshlayout import _checks, _jax
from meshlayout._annotations import DType
from meshlayout.errors import LayoutError, did_you_mean
from meshlayout.mesh import Mesh, as_mesh, create_mesh, current_mesh


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

AnyMesh: TypeAlias = Mesh | jax.sharding.Mesh
Axes: TypeAlias = str | tuple[str, ...]

SpecLike: TypeAlias = Sequence[DimSpec | Sequence[str]] | PartitionSpec
"""What a user may write for the entries of a layout."""


class Misfit(NamedTuple):
    """One dim of a shape that does not divide into the shards of its mesh axes."""

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
        above = below + self.num_shards
        sizes = f"sizes that fit: {below} and" if below else "size that fits:"
        keep = f"To keep the size, leave dim {self.dim} UNSHARDED."
        return f"Nearest {sizes} {above}. {keep}"


@_checks.user_call
@dataclass(frozen=True, init=False, repr=False)
class Layout(_checks.WithReflexes):
    """How the dims of one array are sharded over the axes of a mesh.

    Use this wherever you would write a `NamedSharding`; unlike that, it knows its rank.
    Layouts are immutable, and two that mean the same are equal and have the same hash.

    Args:
        specs: One entry per dim: a mesh axis name, a tuple of names (major first),
            `UNSHARDED` (or `None`), `MATCH` (see `relayout`), or once `...` for any
            number of unsharded dims. Or a `PartitionSpec`.
        mesh: A `Mesh` or `jax.sharding.Mesh`; that of `jax.set_mesh` if omitted.
        memory_kind: The memory of the devices that holds the array, such as
            `"pinned_host"`; the devices' default if omitted.

    Attributes:
        specs: One canonical entry per dim: `None`, an axis, axes, `...` or `MATCH`.
        mesh: The mesh.
        memory_kind: The kind of memory, or None for the devices' default.

    Raises:
        LayoutError: If an axis is unknown or used twice, an entry is of another type,
            there is no mesh, or the devices do not have this memory.

    Examples:
        >>> mesh = create_mesh({"batch": 2, "model": 4})
        >>> layout = Layout(["batch", UNSHARDED, "model"], mesh)
        >>> tuple(layout.spec)
        ('batch', None, 'model')
    """

    specs: tuple[DimSpec, ...]
    mesh: Mesh
    memory_kind: str | None

    def __init__(
        self,
        specs: SpecLike,
        mesh: AnyMesh | None = None,
        *,
        memory_kind: str | None = None,
    ) -> None:
        parsed = _parse_specs(specs)
        mesh = current_mesh() if mesh is None else as_mesh(mesh)
        if mesh is None:
            msg = f"Layout({specs_text(parsed)}) has no mesh. Give one as the second "
            fix = "argument, or set one: `with jax.set_mesh(mesh.jax_mesh):`."
            raise LayoutError(msg + fix)
        _check_axes(parsed, mesh)
        if memory_kind is not None:
            # Only devices of this process list their memories.
            device = next(iter(mesh.local_devices), mesh.devices.flat[0])
            kinds, default = _jax.memory_kinds(device)
            if kinds:
                _checks.choice("memory_kind", memory_kind, kinds, error=LayoutError)
            # Layouts that mean the same must be equal, also if it is the default.
            memory_kind = None if memory_kind == default else memory_kind
        self.__dict__.update(specs=parsed, mesh=mesh, memory_kind=memory_kind)

    @property
    def has_ellipsis(self) -> bool:
        """Whether `...` leaves the rank open."""
        return ... in self.specs

    @property
    def rank(self) -> int:
        """The number of dims, or a LayoutError if `...` leaves it open."""
        if self.has_ellipsis:
            raise LayoutError(f"{self!r} has no rank yet: use layout.with_rank(n).")
        return len(self.specs)

    @property
    def spec(self) -> PartitionSpec:
        """The `PartitionSpec`, which cannot express MATCH, nor `...` before the end."""
        specs = self._known()
        if ... in specs[:-1]:
            fact = f"{self!r} has `...` before its end, which a PartitionSpec cannot"
            raise LayoutError(f"{fact} express; use layout.with_rank(n) first.")
        return PartitionSpec(*(entry for entry in specs if entry is not ...))

    @property
    def sharding(self) -> NamedSharding:
        """The `NamedSharding`, for any JAX function that takes one."""
        mesh, kind = self.mesh.jax_mesh, self.memory_kind
        return NamedSharding(mesh, self.spec, memory_kind=kind)

    @classmethod
    def of(cls, value: Any, rank: int | None = None) -> "Layout":
        """Returns the layout of an array, an abstract array or a sharding.

        Args:
            value: An array (inside jit, on a mesh with Explicit axes) or a sharding. A
                single device becomes a mesh of one.
            rank: The number of dims, if `value` is a sharding, which has none.

        Raises:
            LayoutError: If `value` has no sharding, or one without axis names.

        Examples:
            >>> sharding = create_mesh({"batch": 8}).layout("batch").sharding
            >>> Layout.of(jax.device_put(jax.numpy.zeros(16), sharding))
            Layout([batch], Mesh(batch=8))
        """
        if isinstance(value, Layout):
            return value if rank is None else value.with_rank(rank)
        sharding: Any = value
        if not isinstance(value, jax.sharding.Sharding):
            sharding, rank = _jax.sharding_of(value), getattr(value, "ndim", rank)
        if isinstance(sharding, SingleDeviceSharding):
            # JAX's usual arrays: with a mesh of one, all functions take them.
            mesh = create_mesh({"device": 1}, devices=[*sharding.device_set])
            return cls([None] * (rank or 0), mesh, memory_kind=sharding.memory_kind)
        if not isinstance(sharding, NamedSharding):
            what = type(value).__name__ if sharding is None else repr(sharding)
            msg = f"{what} has no layout: it has no NamedSharding. Place the array "
            msg += "with relayout(x, layout); inside jit, layouts are only known on a "
            raise LayoutError(f"{msg}mesh with Explicit axes.")
        mesh = sharding.mesh
        if not isinstance(mesh, jax.sharding.Mesh):
            # In a trace: the devices are known only if the program set the mesh.
            mesh = _jax.concrete_mesh()
            if mesh is None or mesh.abstract_mesh != sharding.mesh:
                msg = f"{sharding} has no devices: set its mesh with jax.set_mesh."
                raise LayoutError(msg)
        specs = [*sharding.spec]
        # JAX leaves trailing unsharded dims out.
        specs += [None] * (0 if rank is None else rank - len(specs))
        return cls(specs, mesh, memory_kind=sharding.memory_kind)

    def with_rank(self, rank: int) -> "Layout":
        """Fills in `...` for arrays of `rank` dims, or raises LayoutError."""
        is_open = self.has_ellipsis
        missing = rank - len(self.specs) + is_open
        if missing < 0 or (missing and not is_open):
            needed = f"{rank - missing}{' or more' * is_open}"
            hint = " Use `...` for any number of unsharded dims." * (not is_open)
            msg = f"{self!r} is for arrays of rank {needed}, but this one has rank "
            raise LayoutError(f"{msg}{rank}.{hint}")
        if not is_open:
            return self
        specs, index = list(self.specs), self.specs.index(...)
        specs[index : index + 1] = [None] * missing
        return self.with_specs(specs)

    def with_specs(self, specs: SpecLike) -> "Layout":
        """Returns the layout with other entries, on the same mesh and memory."""
        return Layout(specs, self.mesh, memory_kind=self.memory_kind)

    def with_memory_kind(self, memory_kind: str | None) -> "Layout":
        """Returns this layout in another kind of memory."""
        return Layout(self.specs, self.mesh, memory_kind=memory_kind)

    # Arithmetic on shapes.

    def misfits(self, global_shape: Sequence[int]) -> list[Misfit]:
        """Returns the dims of a shape that do not divide into their shards."""
        return [
            Misfit(dim, size, shards, axes_of(entry))
            for dim, (size, shards, entry) in enumerate(self._dims(global_shape))
            if size % shards
        ]

    def check(self, global_shape: Sequence[int]) -> None:
        """Raises LayoutError if an array of this shape cannot have this layout."""
        for misfit in self.misfits(global_shape):
            raise LayoutError(f"{misfit.fact} ({self!r}). {misfit.fix}")

    def shard_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the piece that each device holds, the same on all.

        Raises:
            LayoutError: If the rank differs, or a dim does not divide into its shards.

        Examples:
            >>> mesh = create_mesh({"batch": 2, "model": 4})
            >>> Layout(["batch", ("model",)], mesh).shard_shape((6, 8))
            (3, 2)
        """
        self.check(global_shape)
        return tuple(size // shards for size, shards, _ in self._dims(global_shape))

    def global_shape(self, shard_shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the whole array, from the shape of one shard."""
        return tuple(size * shards for size, shards, _ in self._dims(shard_shape))

    def shard_slices(
        self, global_shape: Sequence[int], device: _jax.Device | int
    ) -> tuple[slice, ...]:
        """Returns the slices of an array that a device holds, one per dim.

        Args:
            global_shape: Shape of the whole array, which must fit.
            device: A device of the mesh, or its index in the flattened mesh.

        Examples:
            >>> mesh = create_mesh({"batch": 2, "model": 4})
            >>> Layout(["batch", "model"], mesh).shard_slices((4, 8), 5)
            (slice(2, 4, None), slice(2, 4, None))
        """
        shape = tuple(global_shape)
        self.check(shape)
        by_device = self.with_rank(len(shape)).sharding.devices_indices_map(shape)
        slices = by_device[self.mesh.devices[self.mesh.coords(device)]]
        pairs = zip(slices, shape, strict=True)
        return tuple(slice(*part.indices(size)[:2]) for part, size in pairs)

    def bytes_per_device(self, global_shape: Sequence[int], dtype: DType) -> int:
        """Returns the bytes of an array on each device; PRNG keys count as words."""
        return math.prod(self.shard_shape(global_shape)) * _jax.itemsize(dtype)

    # DTensor's names, for code that comes from TensorFlow.

    local_shape_from_global_shape = shard_shape
    global_shape_from_local_shape = global_shape

    @property
    def is_fully_replicated(self) -> bool:
        """Whether every device holds the whole array."""
        return self.mesh.axis_size([x for e in self._known() for x in axes_of(e)]) == 1

    @property
    def is_batch_parallel(self) -> bool:
        """Whether the first dim, and no other, is sharded over mesh axes."""
        sharded = [bool(axes_of(entry)) for entry in self._known()]
        return sharded[:1] == [True] and not any(sharded[1:])

    def num_shards(self, dim: int) -> int:
        """Returns the number of shards of a dim."""
        _ = self.rank
        return self.mesh.axis_size(axes_of(self._known()[dim]))

    @classmethod
    def replicated(cls, mesh: AnyMesh | None = None, rank: int = 0) -> "Layout":
        """Returns the layout in which every device holds the whole array."""
        return cls([None] * rank, mesh)

    @classmethod
    def batch_sharded(
        cls, mesh: AnyMesh | None, axis: Axes, rank: int, dim: int = 0
    ) -> "Layout":
        """Returns the layout that shards one dim over a mesh axis, or over several."""
        specs: list[Any] = [None] * rank
        specs[dim] = axis
        return cls(specs, mesh)

    @classmethod
    def inner_sharded(cls, mesh: AnyMesh | None, axis: Axes, rank: int) -> "Layout":
        """Returns the layout that shards the last dim; see `batch_sharded`."""
        return cls.batch_sharded(mesh, axis, rank, dim=-1)

    def offset_to_shard(self) -> list[tuple[int, ...]]:
        """Returns the index of the shard of every device, in mesh order."""
        counts = tuple(map(self.num_shards, range(self.rank)))
        slices = self.sharding.devices_indices_map(counts)
        devices = self.mesh.devices.flat
        return [tuple(part.start or 0 for part in slices[x]) for x in devices]

    def __repr__(self) -> str:
        memory = f", memory_kind={self.memory_kind!r}" if self.memory_kind else ""
        return f"Layout({specs_text(self.specs)}, {self.mesh!r}{memory})"

    def __str__(self) -> str:
        memory = f" in {self.memory_kind}" if self.memory_kind else ""
        return specs_text(self.specs) + memory

    def _known(self) -> tuple[DimSpec, ...]:
        """Returns the entries, or raises LayoutError if one of them is MATCH."""
        if MATCH in self.specs:
            msg = f"{self!r} holds MATCH, which stands for the layout of an array."
            raise LayoutError(f"{msg} Only relayout(x, layout) can fill it in.")
        return self.specs

    def _dims(self, shape: Sequence[int]) -> list[tuple[int, int, DimSpec]]:
        """Returns the size, the number of shards and the entry of each dim."""
        sizes = list(map(operator.index, shape))
        entries = self.with_rank(len(sizes))._known()
        counts = [self.mesh.axis_size(axes_of(entry)) for entry in entries]
        return list(zip(sizes, counts, entries, strict=True))


def as_layout(value: Any, rank: int | None = None) -> Layout:
    """Returns a user's `Layout` or `NamedSharding` as a `Layout`, filled to a rank."""
    if not isinstance(value, (Layout, NamedSharding)):
        is_spec = isinstance(value, (list, tuple, PartitionSpec))
        hint = " A spec needs a mesh: Layout(spec, mesh)." * is_spec
        if isinstance(value, (Mesh, jax.sharding.Mesh)):
            hint = " Name the axes of each dim: mesh.layout('batch', ...)."
        elif hasattr(value, "resolve") or hasattr(value, "resolutions"):
            hint = " Instead of a map, give layouts.resolve(tree).layouts."
        msg = f"expected a Layout or a NamedSharding, got {_checks.shown(value)}.{hint}"
        raise LayoutError(msg)
    return Layout.of(value, rank)


# Entries.


def axes_of(entry: DimSpec) -> tuple[str, ...]:
    """Returns the mesh axes of one entry, major first."""
    if isinstance(entry, str):
        return (entry,)
    return entry if isinstance(entry, tuple) else ()


def axes_text(axes: Sequence[str]) -> str:
    """Returns `"axis 'a'"` or `"axes 'a', 'b'"`."""
    names = ", ".join(map(repr, axes))
    return f"axis {names}" if len(axes) == 1 else f"axes {names}"


def entry_text(entry: DimSpec) -> str:
    """Returns one entry as messages and tables show it."""
    if isinstance(entry, tuple):
        return f"({', '.join(entry)})"
    return {None: "unsharded", ...: "..."}.get(entry) or str(entry)


def specs_text(specs: Iterable[DimSpec]) -> str:
    """Returns entries as messages show them, such as `[batch, unsharded]`."""
    return f"[{', '.join(map(entry_text, specs))}]"


def _parse_specs(specs: Any) -> tuple[DimSpec, ...]:
    """Returns the canonical entries of what a user wrote, or raises LayoutError."""
    # A string is a sequence of strings: "batch" would be five axes.
    if not isinstance(specs, (list, tuple, PartitionSpec)):
        msg = "specs must be a list, a tuple or a PartitionSpec with one entry per dim"
        raise LayoutError(f"{msg}, got {_checks.shown(specs)}.")
    if any(getattr(specs, kind, ()) for kind in ("unreduced", "reduced")):
        raise LayoutError(f"{specs} has unreduced or reduced axes, not only shards.")
    entries = tuple(_parse_entry(entry, dim) for dim, entry in enumerate(specs))
    if entries.count(...) > 1:
        msg = f"{specs_text(entries)} has `...` twice; one stands for all other dims."
        raise LayoutError(msg)
    return entries


def _parse_entry(entry: Any, dim: int) -> DimSpec:
    if entry is None or entry is ... or entry is MATCH or isinstance(entry, str):
        return entry
    is_sequence = isinstance(entry, (tuple, list))
    if is_sequence and all(isinstance(axis, str) for axis in entry):
        # The canonical form, for which layouts that mean the same are equal.
        return None if not entry else entry[0] if len(entry) == 1 else tuple(entry)
    kinds = "a mesh axis name, a tuple of names, UNSHARDED (None), MATCH or `...`"
    raise LayoutError(f"entry {dim} must be {kinds}, got {_checks.shown(entry)}.")


def _check_axes(specs: tuple[DimSpec, ...], mesh: Mesh) -> None:
    """Raises LayoutError if an entry names an unknown axis, or one is used twice."""
    axes = [axis for entry in specs for axis in axes_of(entry)]
    for index, axis in enumerate(axes):
        if axis not in mesh:
            fact = f"mesh axis {axis!r} of {specs_text(specs)} is not in {mesh!r}."
            hint = " Write UNSHARDED, or None." * (axis == entry_text(None))
            raise LayoutError(fact + (hint or did_you_mean(axis, mesh.axis_names)))
        if axis in axes[:index]:
            fact = f"mesh axis {axis!r} is used twice in {specs_text(specs)}"
            raise LayoutError(f"{fact}; an axis can shard only one dim, and only once.")
