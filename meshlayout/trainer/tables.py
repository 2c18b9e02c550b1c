"""Arrays and tables given to `fit`, as batches of `distribute_dataset`'s pipeline.

Its batches have one size. What fills up the last one is marked beside the batch, not in
it, so that `BatchPlacer` can add weights, or cut the padding off again where nothing
could leave it out (the loss function returns a mean, or a tuple has no place).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout._batches import batch_layout
from meshlayout.data.adapters.arrays import array_rows, is_columns
from meshlayout.data.dataset import DistributedDataset
from meshlayout.data.plan import DataPlan
from meshlayout.errors import DataError, MeshLayoutError
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh


@dataclass(frozen=True)
class TableBatch:
    """A batch of columns on the mesh.

    Attributes:
        tree: The columns' rows, padded to the size of all batches.
        mask: 1 for real rows and 0 for padding; None if there is no padding.
    """

    tree: PyTree
    mask: jax.Array | None


def batches_from(
    where: str,
    name: str,
    data: object,
    labels: object = None,
    batch_size: int | None = None,
    *,
    layout: Layout | None,
    shuffle: int | None = None,
) -> Any:
    """Cuts arrays or tables into batches; returns other data unchanged.

    Args:
        where: The method that was called, for error messages.
        name: Its parameter that holds the data.
        data: Arrays, tables or batches.
        labels: More columns of the same examples, or None.
        batch_size: Rows of a global batch.
        layout: The layout of batches; None for the default device.
        shuffle: The seed of the shuffle, or None.

    Raises:
        MeshLayoutError: If columns come without a batch size, or batches with one.
    """
    columns = data if labels is None else (data, labels)
    if batch_size is not None:
        batch_size = _checks.count("batch_size", batch_size, where=where)
    elif not is_columns(columns):
        return data
    try:
        rows = array_rows(columns)
        if batch_size is not None:
            layout = layout or batch_layout(_one_device())
            options = {
                "global_batch_size": batch_size,
                "weights": None,
                "shuffle": shuffle,
            }
            plan = DataPlan(lambda: rows, layout, options, assemble=TableBatch)
            return DistributedDataset(plan)
    except DataError as error:
        msg = (
            f"{where}: {name} {'' if labels is None else 'and labels '}cannot be cut "
            f"into batches: {error}"
        )
        raise MeshLayoutError(msg) from None
    arguments = name if labels is None else f"{name}, labels"
    msg = (
        f"{where}: {name} is {_checks.shown(data)}, of arrays with {len(rows):,} rows. "
        f"Give the size of a batch, {where}({arguments}, batch_size=32), or an "
        "iterable of batches, which may be a list of one batch."
    )
    raise MeshLayoutError(msg)


def _one_device() -> Mesh:
    """Returns a mesh of the device to which JAX sends arrays by default."""
    device = next(iter(jnp.zeros(()).devices()))
    return Mesh(jax.sharding.Mesh(np.array([device]), ("batch",)))
