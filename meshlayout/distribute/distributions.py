"""Keras 3's entry points: a layout map and the layout of batches in one object.

They are for whole programs over global arrays, as everywhere in this library outside of
strategies: replicas play no part in them.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from meshlayout._batches import batch_axes
from meshlayout.data import distribute_dataset
from meshlayout.data.dataset import DistributedDataset
from meshlayout.errors import StrategyError, did_you_mean
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap
from meshlayout.mesh import Mesh, as_mesh


@dataclass(frozen=True)
class Distribution:
    """How a program is distributed; made by `DataParallel` and `ModelParallel`.

    Attributes:
        layouts: The layout map of the model, for `create`, `TrainState.create` and
            others.
        batch_layout: The layout of batches.
    """

    layouts: LayoutMap
    batch_layout: Layout

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.layouts.mesh

    @contextlib.contextmanager
    def scope(self) -> Iterator["Distribution"]:
        """Lays out the models and optimizers that are made inside.

        Yields:
            This distribution.
        """
        with self.layouts.scope():
            yield self

    def distribute_dataset(
        self, source: Any, *, global_batch_size: int, **options: Any
    ) -> DistributedDataset:
        """Makes global batches on the mesh; see `meshlayout.distribute_dataset`.

        Args:
            source: Any source that it takes.
            global_batch_size: Rows of a batch, on all devices together.
            **options: Its other arguments.
        """
        return distribute_dataset(
            source, self.batch_layout, global_batch_size=global_batch_size, **options
        )


def DataParallel(mesh: Mesh | jax.sharding.Mesh) -> Distribution:  # noqa: N802 (Keras)
    """Copies of the model on all devices, each with its rows of the batch.

    Args:
        mesh: A mesh. Its batch axes (as for `ml.distribute_dataset`) divide the rows;
            without any, its first axis does.

    Raises:
        MeshError: If it is not a mesh.

    Example:
        >>> from meshlayout import create_mesh
        >>> DataParallel(create_mesh({"batch": 8})).batch_layout.specs
        ('batch', Ellipsis)
    """
    mesh = as_mesh(mesh)
    axes = batch_axes(mesh) or mesh.axis_names[:1]
    return Distribution(LayoutMap(mesh), mesh.layout(axes, ...))


def ModelParallel(layout_map: LayoutMap, batch_axis: str) -> Distribution:  # noqa: N802
    """A model divided by a layout map, and batches divided along one axis.

    Args:
        layout_map: The layouts of the model.
        batch_axis: The mesh axis that divides the rows of batches.

    Raises:
        StrategyError: If these are not a layout map and an axis of its mesh.

    Example:
        >>> from meshlayout import LayoutMap, create_mesh
        >>> mesh = create_mesh({"batch": 2, "model": 4})
        >>> ModelParallel(LayoutMap(mesh), "batch").batch_layout.specs
        ('batch', Ellipsis)
    """
    if not isinstance(layout_map, LayoutMap):
        msg = f"ModelParallel takes a LayoutMap, got {layout_map!r}."
        raise StrategyError(msg)
    names = layout_map.mesh.axis_names
    if batch_axis not in names:
        hint = did_you_mean(batch_axis, names)
        msg = f"{layout_map.mesh!r} has no axis {batch_axis!r}.{hint}"
        raise StrategyError(msg)
    return Distribution(layout_map, layout_map.mesh.layout(batch_axis, ...))
