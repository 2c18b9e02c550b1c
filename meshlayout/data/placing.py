"""From this process's rows of a batch to global arrays on the mesh."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshlayout import _jax
from meshlayout._batches import leaf_layout
from meshlayout._render.tables import array_text
from meshlayout.data.elements import LeafSpec
from meshlayout.errors import DataError, LayoutError
from meshlayout.layout import Layout


@dataclass(frozen=True)
class LeafPlacement:
    """Where the arrays of one leaf go.

    Attributes:
        sharding: Where.
        shards: For each device of this process, its part of this process's rows.
        place: Makes a global array of these parts.
    """

    sharding: NamedSharding
    shards: tuple[tuple[slice, ...], ...]
    place: Callable[[list[np.ndarray[Any, Any]]], jax.Array]

    def __call__(self, leaf: np.ndarray[Any, Any]) -> jax.Array:
        """Returns the global array of this process's rows."""
        return self.place([leaf[shard] for shard in self.shards])


@dataclass(frozen=True)
class Placement:
    """Where the leaves of batches go.

    Attributes:
        treedef: Their structure.
        leaves: One per leaf; None for those that stay on the host.
        specs: The leaves.
        num_rows: Rows of a global batch.
    """

    treedef: Any
    leaves: tuple[LeafPlacement | None, ...]
    specs: tuple[LeafSpec, ...]
    num_rows: int

    @property
    def element_spec(self) -> Any:
        """The tree of what a batch is."""
        return self.treedef.unflatten(
            [
                jax.ShapeDtypeStruct(
                    (self.num_rows, *spec.shape),
                    spec.dtype if leaf is None else spec.to,
                    sharding=None if leaf is None else leaf.sharding,
                )
                for spec, leaf in zip(self.specs, self.leaves, strict=True)
            ]
        )

    def placed(self, leaves: list[Any]) -> Any:
        """Returns a batch as global arrays.

        Args:
            leaves: This process's rows of each leaf.
        """
        return self.treedef.unflatten(
            [
                leaf if place is None else place(leaf)
                for leaf, place in zip(leaves, self.leaves, strict=True)
            ]
        )


def plan_placement(
    treedef: Any,
    specs: tuple[LeafSpec, ...],
    layout: Layout,
    num_rows: int,
    kept: np.ndarray[Any, Any],
) -> Placement:
    """Returns where batches go.

    Args:
        treedef: Their structure.
        specs: Their leaves.
        layout: The layout of batches.
        num_rows: Rows of a global batch.
        kept: Which of them are this process's own.

    Raises:
        DataError: If a leaf does not fit the layout.
    """
    per_shard = num_rows // leaf_layout(layout, 1).num_shards(0)
    starts = {int(row): place for place, row in enumerate(kept) if row % per_shard == 0}
    leaves = tuple(_plan_leaf(spec, layout, num_rows, starts) for spec in specs)
    return Placement(treedef, leaves, specs, num_rows)


def is_on_mesh(batch: Any, layout: Layout) -> bool:
    """Tells whether all arrays of a batch lie on a mesh's devices.

    Args:
        batch: Arrays that were placed by their maker.
        layout: The layout of batches.
    """
    devices = set(layout.mesh.devices.flat)
    shardings = map(_jax.sharding_of, jax.tree.leaves(batch))
    return all(s is not None and s.device_set == devices for s in shardings)


def _plan_leaf(
    spec: LeafSpec, layout: Layout, num_rows: int, starts: dict[int, int]
) -> LeafPlacement | None:
    sharding = _sharding(spec, layout, num_rows)
    if sharding is None:
        return None
    shape = (num_rows, *spec.shape)
    shards = []
    indices: Any = sharding.addressable_devices_indices_map(shape)
    for index in indices.values():
        first, stop, _ = index[0].indices(num_rows)
        here = starts[first]
        shards.append((slice(here, here + stop - first), *index[1:]))
    place = _jax.shard_placer(shape, spec.to, sharding)
    return LeafPlacement(sharding, tuple(shards), place)


def _sharding(spec: LeafSpec, layout: Layout, num_rows: int) -> NamedSharding | None:
    if spec.to is None:
        return None
    shape = (num_rows, *spec.shape)
    where = f"{spec.path or 'the array'} {array_text(spec.to, shape)}"
    try:
        full = leaf_layout(layout, len(shape))
    except LayoutError as error:
        raise DataError(f"{where}: {error}") from None
    try:
        full.check(shape, where)
    except LayoutError as error:
        raise DataError(str(error)) from None
    return full.sharding
