"""How one array is laid out on a mesh: `Layout`, and its shape arithmetic.

A `NamedSharding` does not know the rank of its array, so that JAX finds most mistakes
only when an array is there. A layout has one entry per dim: shapes, shards and bytes
are worked out and checked before anything is created, with errors that name the dim and
the sizes that would fit. Parsing of entries is in `_specs`.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from meshlayout import _checks, _jax, _render
from meshlayout._annotations import DType
from meshlayout._default_mesh import get_default_mesh
from meshlayout._specs import (
    MATCH as MATCH,
    UNSHARDED as UNSHARDED,
    DimSpec as DimSpec,
    Misfit,
    SpecLike,
    axes_of,
    check_axes,
    entry_from_json,
    entry_text,
    entry_to_json,
    parse_specs,
    specs_text,
)
from meshlayout.errors import LayoutError, did_you_mean
from meshlayout.mesh import Mesh, Value, as_mesh
from meshlayout.mesh_creation import create_mesh


@dataclass(init=False, repr=False, unsafe_hash=True)
class Layout(Value):
    """How the dims of one array are sharded over the axes of a mesh.

    Use this wherever you would write a `NamedSharding`. A layout is an immutable value:
    two layouts that mean the same are equal and have the same hash. It is a
    `NamedSharding` with a rank, so that shapes can be worked out and checked before
    there is an array.

    Args:
        specs: One entry per dim: a mesh axis name, a tuple of names (major first),
            `UNSHARDED` (or `None`), `MATCH` (see `relayout`), or once `...` for any
            number of unsharded dims. Or a `PartitionSpec`.
        mesh: A `Mesh` or `jax.sharding.Mesh`; the default mesh if omitted.
        memory_kind: The memory of the devices that holds the array, such as
            `"pinned_host"`; the devices' default if omitted.

    Attributes:
        specs: One canonical entry per dim: `None`, an axis, axes, `...` or `MATCH`.
        mesh: The mesh.
        memory_kind: The kind of memory, or None for the devices' default.

    Raises:
        LayoutError: If an axis is unknown or used twice, an entry is of another type,
            there is no mesh, or the devices do not have this memory.

    Example:
        >>> mesh = create_mesh({"batch": 2, "model": 4})
        >>> layout = Layout(["batch", UNSHARDED, "model"], mesh)
        >>> tuple(layout.spec)
        ('batch', None, 'model')
        >>> layout.shard_shape((6, 5, 8))
        (3, 5, 2)
    """

    specs: tuple[DimSpec, ...]
    mesh: Mesh
    memory_kind: str | None

    def __init__(
        self,
        specs: SpecLike,
        mesh: Mesh | jax.sharding.Mesh | None = None,
        *,
        memory_kind: str | None = None,
    ) -> None:
        if isinstance(specs, (NamedSharding, Layout)):
            msg = (
                f"specs must be a list of entries, one per dim, got a "
                f"{type(specs).__name__}. Use Layout.of(sharding)."
            )
            raise LayoutError(msg)
        parsed = parse_specs(specs)
        mesh = get_default_mesh() if mesh is None else as_mesh(mesh)
        if mesh is None:
            msg = (
                f"Layout({specs_text(parsed)}) has no mesh. Give one as the second "
                "argument, or set one with default_mesh(mesh)."
            )
            raise LayoutError(msg)
        check_axes(parsed, mesh)
        kind = _memory_kind(memory_kind, mesh)
        self.__dict__.update(specs=parsed, mesh=mesh, memory_kind=kind)

    @property
    def has_ellipsis(self) -> bool:
        """Whether `...` leaves the rank open."""
        return ... in self.specs

    @property
    def rank(self) -> int:
        """The number of dims.

        Raises:
            LayoutError: If `...` leaves it open; see `with_rank`.
        """
        if self.has_ellipsis:
            msg = f"{self!r} has `...` and so no rank yet; use layout.with_rank(n)."
            raise LayoutError(msg)
        return len(self.specs)

    @property
    def spec(self) -> PartitionSpec:
        """The `PartitionSpec`.

        Raises:
            LayoutError: If `...` is not the last entry, or an entry is MATCH: a
                `PartitionSpec` cannot express these; see `with_rank` and `relayout`.
        """
        specs = self._known()
        if self.has_ellipsis:
            if specs[-1] is not ...:
                msg = (
                    f"{self!r} has `...` before its end, which a PartitionSpec cannot "
                    "express; use layout.with_rank(n) first."
                )
                raise LayoutError(msg)
            specs = specs[:-1]
        return PartitionSpec(*specs)

    @property
    def sharding(self) -> NamedSharding:
        """The `NamedSharding`, for any JAX function that takes one.

        Raises:
            LayoutError: As `spec`.
        """
        return NamedSharding(
            self.mesh.jax_mesh, self.spec, memory_kind=self.memory_kind
        )

    @property
    def is_fully_replicated(self) -> bool:
        """Whether every device holds the whole array.

        Raises:
            LayoutError: If an entry is MATCH, which may mean either.
        """
        return all(self._entry_shards(entry) == 1 for entry in self._known())

    @property
    def is_batch_parallel(self) -> bool:
        """Whether the first dim, and no other, is sharded over mesh axes.

        Raises:
            LayoutError: If an entry is MATCH, which may mean either.
        """
        sharded = [bool(axes_of(entry)) for entry in self._known()]
        return sharded[:1] == [True] and not any(sharded[1:])

    # Other layouts.

    @classmethod
    def of(cls, value: Any, rank: int | None = None) -> "Layout":
        """Returns the layout of an array, an abstract array or a sharding.

        Args:
            value: A `jax.Array`, a `jax.ShapeDtypeStruct` with a sharding, a value
                inside jit on a mesh with Explicit axes, a `NamedSharding`, or a
                sharding on a single device (which becomes a mesh of one device).
            rank: Dims of the array, if `value` is a sharding, which has no rank.

        Raises:
            LayoutError: If `value` has no sharding, or one without axis names.

        Example:
            >>> mesh = create_mesh({"batch": 2, "model": 4})
            >>> x = jax.device_put(
            ...     jax.numpy.zeros((4, 8)), Layout(["batch", None], mesh).sharding
            ... )
            >>> Layout.of(x)
            Layout([batch, unsharded], Mesh(batch=2, model=4))
        """
        if isinstance(value, Layout):
            return value if rank is None else value.with_rank(rank)
        sharding = value if isinstance(value, jax.sharding.Sharding) else None
        if sharding is None:
            sharding = _jax.sharding_of(value)
            ndim = getattr(value, "ndim", rank)
            if rank is not None and ndim != rank:
                msg = f"the array has rank {ndim}, but rank={rank} was given."
                raise LayoutError(msg)
            rank = ndim
        if isinstance(sharding, SingleDeviceSharding):
            # JAX's usual arrays: a mesh of one lets them pass through all functions.
            (device,) = sharding.device_set
            mesh = create_mesh({"device": 1}, devices=[device])
            entries = [None] * _check_rank(rank or 0)
            return cls(entries, mesh, memory_kind=sharding.memory_kind)
        if not isinstance(sharding, NamedSharding):
            what = type(value).__name__ if sharding is None else repr(sharding)
            msg = (
                f"{what} has no layout: it has no NamedSharding. Place the array with "
                "relayout(x, layout); inside jit, layouts are only known on a mesh "
                "with Explicit axes."
            )
            raise LayoutError(msg)
        jax_mesh: Any = sharding.mesh
        if not isinstance(jax_mesh, jax.sharding.Mesh):
            # In a trace, shardings are on abstract meshes. The devices are known only
            # if the program set the mesh.
            concrete = _jax.concrete_mesh()
            is_it = concrete is not None and concrete.abstract_mesh == jax_mesh
            jax_mesh = concrete if is_it else None
        if jax_mesh is None:
            msg = (
                f"the sharding {sharding} is on an abstract mesh, which has no "
                "devices. Set the mesh with jax.set_mesh(mesh.jax_mesh)."
            )
            raise LayoutError(msg)
        entries = list(sharding.spec)
        if rank is not None:
            if len(entries) > _check_rank(rank):
                msg = (
                    f"the spec {tuple(sharding.spec)} of the sharding has "
                    f"{len(entries)} entries, too many for an array of rank {rank}."
                )
                raise LayoutError(msg)
            entries += [None] * (rank - len(entries))
        return cls(entries, Mesh(jax_mesh), memory_kind=sharding.memory_kind)

    @classmethod
    def replicated(
        cls, mesh: Mesh | jax.sharding.Mesh | None = None, rank: int = 0
    ) -> "Layout":
        """Returns the layout in which every device holds the whole array.

        Args:
            mesh: The mesh; the default mesh if None.
            rank: Dims of the array.
        """
        return cls([None] * _check_rank(rank), mesh)

    @classmethod
    def batch_sharded(
        cls,
        mesh: Mesh | jax.sharding.Mesh | None,
        axis: str | tuple[str, ...],
        rank: int,
        dim: int = 0,
    ) -> "Layout":
        """Returns the layout that shards one dim, by default the first.

        Args:
            mesh: The mesh; the default mesh if None.
            axis: The mesh axis, or several.
            rank: Dims of the array.
            dim: The dim that is sharded over `axis`; negative counts from the end.

        Raises:
            LayoutError: If the axis is unknown, or `dim` is out of range.

        Example:
            >>> mesh = create_mesh({"batch": 8})
            >>> Layout.batch_sharded(mesh, "batch", rank=3)
            Layout([batch, unsharded, unsharded], Mesh(batch=8))
        """
        if not isinstance(axis, (str, tuple, list)) or not axis:
            text = _checks.shown(axis)
            msg = f"axis must be a mesh axis name or a tuple of names, got {text}."
            raise LayoutError(msg)
        specs: list[Any] = [None] * _check_rank(rank)
        specs[_check_dim(dim, rank)] = axis
        return cls(specs, mesh)

    @classmethod
    def inner_sharded(
        cls,
        mesh: Mesh | jax.sharding.Mesh | None,
        axis: str | tuple[str, ...],
        rank: int,
    ) -> "Layout":
        """Returns the layout that shards the last dim; see `batch_sharded`."""
        return cls.batch_sharded(mesh, axis, rank, dim=-1)

    def with_rank(self, rank: int) -> "Layout":
        """Returns this layout for arrays of `rank` dims, with `...` filled in.

        Raises:
            LayoutError: If the number of entries does not fit.

        Example:
            >>> mesh = create_mesh({"batch": 2, "model": 4})
            >>> Layout([..., "model"], mesh).with_rank(3)
            Layout([unsharded, unsharded, model], Mesh(batch=2, model=4))
        """
        rank = _check_rank(rank)
        if not self.has_ellipsis:
            if len(self.specs) != rank:
                msg = (
                    f"{self!r} is for arrays of rank {len(self.specs)}, but this one "
                    f"has rank {rank}. Use `...` for any number of unsharded dims."
                )
                raise LayoutError(msg)
            return self
        missing = rank - (len(self.specs) - 1)
        if missing < 0:
            msg = (
                f"{self!r} is for arrays of rank {len(self.specs) - 1} or more, but "
                f"this one has rank {rank}."
            )
            raise LayoutError(msg)
        filled: list[DimSpec] = []
        for entry in self.specs:
            filled += [None] * missing if entry is ... else [entry]
        return self.with_specs(filled)

    def delete(self, dims: int | Iterable[int]) -> "Layout":
        """Returns the layout without some dims, for an array reduced over them.

        Args:
            dims: One dim or several; negative ones count from the end.

        Raises:
            LayoutError: If a dim is out of range, or the rank is open.

        Example:
            >>> mesh = create_mesh({"batch": 2, "model": 4})
            >>> Layout(["batch", None, "model"], mesh).delete([0, 1])
            Layout([model], Mesh(batch=2, model=4))
        """
        is_one = isinstance(dims, str) or not isinstance(dims, Iterable)
        every: Iterable[Any] = [dims] if is_one else dims  # type: ignore[assignment]
        deleted = {_check_dim(dim, self.rank) for dim in every}
        return self.with_specs(
            [entry for dim, entry in enumerate(self.specs) if dim not in deleted]
        )

    def with_specs(self, specs: SpecLike) -> "Layout":
        """Returns the layout with other entries, on the same mesh and memory."""
        return Layout(specs, self.mesh, memory_kind=self.memory_kind)

    def with_memory_kind(self, memory_kind: str | None) -> "Layout":
        """Returns this layout in another kind of memory."""
        return Layout(self.specs, self.mesh, memory_kind=memory_kind)

    # Arithmetic on shapes.

    def num_shards(self, dim: int) -> int:
        """Returns the number of shards of a dim.

        Raises:
            LayoutError: If the dim is out of range, or the rank is open.
        """
        return self._entry_shards(self.specs[_check_dim(dim, self.rank)])

    def misfits(self, global_shape: Sequence[int]) -> list[Misfit]:
        """Returns the dims of a shape that do not divide into their shards.

        Args:
            global_shape: Shape of the whole array.

        Raises:
            LayoutError: If the rank differs.
        """
        return [
            Misfit(dim, size, shards, axes)
            for dim, (size, shards, axes) in enumerate(self._dims(global_shape))
            if size % shards
        ]

    def check(self, global_shape: Sequence[int], where: str = "") -> None:
        """Raises LayoutError if an array of this shape cannot have this layout.

        Args:
            global_shape: Shape of the whole array.
            where: The name of the array, with which the message begins.
        """
        prefix = f"{where}: " if where else ""
        try:
            misfits = self.misfits(global_shape)
        except LayoutError as error:
            raise LayoutError(f"{prefix}{error}") from None
        if misfits:
            first = misfits[0]
            prefix = prefix or f"an array of shape {tuple(global_shape)}: "
            raise LayoutError(f"{prefix}{first.fact} ({self!r}). {first.fix}")

    def shard_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the piece that each device holds.

        Every device holds a piece of the same shape; an array that does not divide
        evenly has no shard shape, and is refused rather than rounded down.

        Args:
            global_shape: Shape of the whole array, one entry per dim of this layout.

        Returns:
            One size per dim: `global_shape[d] // num_shards(d)`, in elements.

        Raises:
            LayoutError: If the rank differs from the layout's, or a dim does not
                divide by its number of shards.

        Example:
            >>> mesh = create_mesh({"batch": 2, "model": 4})
            >>> Layout(["batch", ("model",)], mesh).shard_shape((6, 8))
            (3, 2)
        """
        self.check(global_shape)
        return tuple(size // shards for size, shards, _ in self._dims(global_shape))

    def global_shape(self, shard_shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the whole array, from the shape of one shard.

        Args:
            shard_shape: Shape of the piece on one device, one entry per dim.

        Raises:
            LayoutError: If the rank differs from the layout's.
        """
        return tuple(size * shards for size, shards, _ in self._dims(shard_shape))

    def shard_slices(
        self, global_shape: Sequence[int], device: _jax.Device | int
    ) -> tuple[slice, ...]:
        """Returns the slices of an array that a device holds.

        Args:
            global_shape: Shape of the whole array.
            device: A device of the mesh, or its index in the flattened mesh.

        Returns:
            One `slice(start, stop)` per dim.

        Raises:
            LayoutError: If the shape does not fit.
            MeshError: If the mesh has no such device.

        Example:
            >>> mesh = create_mesh({"batch": 2, "model": 4})
            >>> Layout(["batch", "model"], mesh).shard_slices((4, 8), 5)
            (slice(2, 4, None), slice(2, 4, None))
        """
        shard_shape = self.shard_shape(global_shape)
        specs = self.with_rank(len(shard_shape)).specs
        index = self._shard_index(specs, device)
        return tuple(
            slice(i * size, (i + 1) * size)
            for i, size in zip(index, shard_shape, strict=True)
        )

    def bytes_per_device(self, global_shape: Sequence[int], dtype: DType) -> int:
        """Returns the bytes of an array on each device.

        Args:
            global_shape: Shape of the whole array.
            dtype: Its dtype; for PRNG keys, the words of the keys count.

        Raises:
            LayoutError: If the shape does not fit.
        """
        shard_size = math.prod(self.shard_shape(global_shape))
        try:
            if dtype is None or not _jax.is_array_dtype(dtype):
                raise TypeError
            return shard_size * _jax.itemsize(dtype)
        except TypeError:
            text = _checks.shown(dtype)
            msg = f"{text} is not a dtype, such as 'float32' or jnp.bfloat16."
            raise LayoutError(msg) from None

    def offset_to_shard(self) -> list[tuple[int, ...]]:
        """Returns the index of the shard of every device, in mesh order.

        Raises:
            LayoutError: If the rank is open.

        Example:
            >>> mesh = create_mesh({"batch": 2, "model": 4})
            >>> Layout(["batch"], mesh).offset_to_shard()
            [(0,), (0,), (0,), (0,), (1,), (1,), (1,), (1,)]
        """
        _ = self.rank, self._known()
        return [self._shard_index(self.specs, index) for index in range(self.mesh.size)]

    # DTensor's names, for code that comes from TensorFlow; not used in the library.

    @property
    def sharding_specs(self) -> list[DimSpec]:
        """DTensor's name for `specs`."""
        return list(self.specs)

    local_shape_from_global_shape = shard_shape
    global_shape_from_local_shape = global_shape

    # Text, pickle, equality.

    def to_string(self) -> str:
        """Returns the layout as one line of JSON that `from_string` reads back."""
        return json.dumps(
            {
                "specs": [entry_to_json(entry) for entry in self.specs],
                "mesh": self.mesh.to_string(),
                "memory_kind": self.memory_kind,
            }
        )

    @classmethod
    def from_string(cls, text: str) -> "Layout":
        """Returns the layout that `to_string` wrote.

        Raises:
            LayoutError: If the text was not written by `to_string`.
            MeshError: If the devices of the mesh do not exist here.
        """
        try:
            data = json.loads(text)
            specs = [entry_from_json(entry) for entry in data["specs"]]
            mesh, memory_kind = data["mesh"], data["memory_kind"]
        except (ValueError, KeyError, TypeError, RecursionError):
            msg = (
                f"{_checks.shown(text)} is not a layout; such text comes from "
                "layout.to_string()."
            )
            raise LayoutError(msg) from None
        return cls(specs, Mesh.from_string(mesh), memory_kind=memory_kind)

    def __repr__(self) -> str:
        memory = f", memory_kind={self.memory_kind!r}" if self.memory_kind else ""
        return f"Layout({specs_text(self.specs)}, {self.mesh!r}{memory})"

    def __str__(self) -> str:
        memory = f" in {self.memory_kind}" if self.memory_kind else ""
        return specs_text(self.specs) + memory

    def _repr_html_(self) -> str:
        memory = f" in {self.memory_kind}" if self.memory_kind else ""
        caption = f"Layout {specs_text(self.specs)} on {self.mesh!r}{memory}"
        # After `...`, dims are known only by their distance from the end.
        rank = len(self.specs)
        open_dim = self.specs.index(...) if self.has_ellipsis else rank
        rows: list[list[object]] = []
        for dim, entry in enumerate(self.specs):
            number = dim if dim < open_dim else "" if dim == open_dim else dim - rank
            is_open = entry is ... or entry is MATCH
            shards = "" if is_open else self._entry_shards(entry)
            rows.append([number, entry_text(entry), shards])
        notes = [] if rank else ["a scalar, on every device"]
        return _render.html_table(
            ["dim", "sharded over", "shards"], rows, "rlr", caption=caption, notes=notes
        )

    # Inside.

    def _known(self) -> tuple[DimSpec, ...]:
        """Returns the entries, or raises LayoutError if one of them is MATCH."""
        if MATCH in self.specs:
            msg = (
                f"{self!r} holds MATCH, which stands for the layout of an array; only "
                "relayout(x, layout) can fill it in."
            )
            raise LayoutError(msg)
        return self.specs

    def _entry_shards(self, entry: DimSpec) -> int:
        if entry is MATCH:
            self._known()
        return self.mesh.axis_size(axes_of(entry))

    def _dims(self, shape: Sequence[int]) -> list[tuple[int, int, tuple[str, ...]]]:
        """Returns the size, the number of shards and the mesh axes of each dim."""
        sizes = _checks.shape(shape, error=LayoutError)
        specs = self.with_rank(len(sizes)).specs
        return [
            (size, self._entry_shards(entry), axes_of(entry))
            for size, entry in zip(sizes, specs, strict=True)
        ]

    def _shard_index(
        self, specs: Sequence[DimSpec], device: _jax.Device | int
    ) -> tuple[int, ...]:
        """Returns the index of the shard that a device holds, one entry per dim."""
        mesh = self.mesh
        coord = dict(zip(mesh.axis_names, mesh.coords(device), strict=True))
        index = []
        for entry in specs:
            flat = 0
            for axis in axes_of(entry):  # major first, as in JAX
                flat = flat * mesh.shape[axis] + coord[axis]
            index.append(flat)
        return tuple(index)


def as_layout(value: Any, rank: int | None = None) -> Layout:
    """Returns a user's layout as a `Layout`.

    Args:
        value: A `Layout` or a `NamedSharding`.
        rank: Dims of the array, if known: fills in `...`, and for a sharding the
            trailing dims that its PartitionSpec leaves out.

    Raises:
        LayoutError: If it is neither, or its rank differs.
    """
    if not isinstance(value, (Layout, NamedSharding)):
        hint = ""
        if isinstance(value, (list, tuple, PartitionSpec)):
            hint = " A spec needs a mesh: Layout(spec, mesh)."
        msg = f"expected a Layout or a NamedSharding, got {_checks.shown(value)}.{hint}"
        raise LayoutError(msg)
    return Layout.of(value, rank)


def _memory_kind(kind: str | None, mesh: Mesh) -> str | None:
    """Returns the kind of memory, or None for the devices' default."""
    if kind is None:
        return None
    # Only devices of this process list their memories.
    device = next(iter(mesh.local_devices), mesh.devices.flat[0])
    kinds, default = _jax.memory_kinds(device)
    if kinds and kind not in kinds:
        msg = (
            f"memory_kind {_checks.shown(kind)} is not one of these devices' memories: "
            f"{', '.join(map(repr, kinds))}.{did_you_mean(kind, kinds)}"
        )
        raise LayoutError(msg)
    # Layouts that mean the same have to be equal, whether the default is named or not.
    return None if kind == default else kind


def _check_rank(rank: Any) -> int:
    hint = "It is the number of dims of an array."
    return _checks.count("rank", rank, at_least=0, error=LayoutError, hint=hint)


def _check_dim(dim: Any, rank: int) -> int:
    index = _checks.count("dim", dim, at_least=None, error=LayoutError)
    if not -rank <= index < rank:
        have = f"which has dims 0 to {rank - 1}" if rank else "which has no dims"
        msg = f"dim {index} is out of range for a layout of rank {rank}, {have}."
        raise LayoutError(msg)
    return index % rank
