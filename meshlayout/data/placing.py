"""From this process's rows of a batch to global arrays on the mesh."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshlayout import _jax
from meshlayout._render.tables import array_text
from meshlayout.data.elements import LeafSpec
from meshlayout.data.rows import leaf_layout
from meshlayout.errors import DataError, LayoutError
from meshlayout.layout import Layout


@dataclass(frozen=True)
class Placement:
    """Where the leaves of batches go.

    Attributes:
        treedef: Their structure.
        shardings: One per leaf; None for those that stay on the host.
        specs: The leaves.
        num_rows: Rows of a global batch.
        starts: For a shard's first row, the place of that row among this process's.
    """

    treedef: Any
    shardings: tuple[NamedSharding | None, ...]
    specs: tuple[LeafSpec, ...]
    num_rows: int
    starts: dict[int, int]

    @property
    def element_spec(self) -> Any:
        """The tree of what a batch is."""
        return self.treedef.unflatten(
            [
                jax.ShapeDtypeStruct(
                    (self.num_rows, *spec.shape),
                    spec.dtype if sharding is None else spec.to,
                    sharding=sharding,
                )
                for spec, sharding in zip(self.specs, self.shardings, strict=True)
            ]
        )

    def placed(self, leaves: list[Any]) -> Any:
        """Returns a batch as global arrays.

        Args:
            leaves: This process's rows of each leaf.
        """
        return self.treedef.unflatten(
            [
                leaf if sharding is None else self._placed(leaf, sharding)
                for leaf, sharding in zip(leaves, self.shardings, strict=True)
            ]
        )

    def _placed(self, leaf: np.ndarray[Any, Any], sharding: NamedSharding) -> Any:
        shape = (self.num_rows, *leaf.shape[1:])
        if not self.starts:  # no device of the mesh is in this process
            return jax.make_array_from_single_device_arrays(
                shape, sharding, [], dtype=leaf.dtype
            )

        def part(index: Any) -> Any:
            first, stop, _ = index[0].indices(self.num_rows)
            start = self.starts[first]
            return leaf[(slice(start, start + stop - first), *index[1:])]

        return jax.make_array_from_callback(shape, sharding, part)


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
    shardings = tuple(_sharding(spec, layout, num_rows) for spec in specs)
    per_shard = num_rows // leaf_layout(layout, 1).num_shards(0)
    starts = {int(row): place for place, row in enumerate(kept) if row % per_shard == 0}
    return Placement(treedef, shardings, specs, num_rows, starts)


def is_on_mesh(batch: Any, layout: Layout) -> bool:
    """Tells whether all arrays of a batch lie on a mesh's devices.

    Args:
        batch: Arrays that were placed by their maker.
        layout: The layout of batches.
    """
    devices = set(layout.mesh.devices.flat)
    shardings = map(_jax.sharding_of, jax.tree.leaves(batch))
    return all(s is not None and s.device_set == devices for s in shardings)


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
