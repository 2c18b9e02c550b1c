"""What a batch is: the mesh axes that shard it, its weights, its rows and its padding.

A batch is any tree of arrays with one row per example. A short one is padded to the
static shape, and a weight of 0 marks the padding. Weights are found by a key: that of a
mapping, an index of a tuple or list, or the name of a field. Weights that the library
put into a batch are remembered by weak reference: a step that looks for them elsewhere
refuses the batch, and does not count padding as examples.
"""

import contextlib
import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout import _checks, _paths
from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout.errors import StepError, warn
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh


WeightsKey: TypeAlias = str | int
AnyMesh: TypeAlias = Mesh | jax.sharding.Mesh | jax.sharding.AbstractMesh

# Mesh axes that shard the rows of batches when only a mesh is given.
BATCH_AXES = ("batch", "data", "replica", "fsdp", "dp", "ddp", "data_parallel")


def batch_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Returns the axes of a mesh that shard the rows of a batch, in its order."""
    return tuple(axis for axis in mesh.axis_names if axis in BATCH_AXES)


def batch_layout(mesh: Mesh) -> Layout:
    """Returns the layout of batches of any rank: rows sharded over the batch axes."""
    axes = batch_axes(mesh)
    # On a mesh without any, such as one of "model" alone, every device has all rows.
    return mesh.layout(axes, ...) if axes else mesh.layout(...)


def leaf_layout(layout: Layout, rank: int) -> Layout:
    """Returns the layout of one leaf of a batch, whose rank includes the batch dim.

    Dims that the layout does not name are unsharded; a vector takes its first entry,
    and others may lack unsharded last ones, as masks lack the channels of images.
    """
    specs = layout.specs
    while len(specs) > rank and specs[-1] is None:
        specs = specs[:-1]
    if rank == 1:
        specs = () if specs[:1] == (...,) else specs[:1]
    elif layout.has_ellipsis or len(specs) > rank:
        return layout.with_specs(specs).with_rank(rank)  # refuses what has more dims
    return layout.with_specs([*specs, *[None] * (rank - len(specs))])


@functools.lru_cache(maxsize=64)
def num_row_shards(layout: Layout) -> int:
    """Returns the number of shards of the rows of a batch."""
    return leaf_layout(layout, 1).num_shards(0)


def num_examples(batch: Batch) -> int:
    """Returns the number of rows of a batch, including padding; scalars have none."""
    shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(batch)]
    sizes = {shape[0] for shape in shapes if shape}
    if len(sizes) == 1:
        return sizes.pop()
    if not sizes:
        raise StepError("the batch has no array with a batch dim.")
    # Paths are only needed for the message: finding them takes longer than a step.
    names: dict[int, str] = {}
    for leaf, shape in zip(_paths.flatten(batch).leaves, shapes, strict=True):
        if shape:
            names.setdefault(shape[0], leaf.path or "the batch")
    (rows, name), (other_rows, other_name), *_ = names.items()
    raise StepError(
        f"the first dim is the batch dim, and {name!r} has {rows} rows where "
        f"{other_name!r} has {other_rows}. Pass values that are not part of the batch "
        "to the loss function in another way, such as a closure or a scalar."
    )


def map_batch(function: Callable[[Any], Any], batch: Batch) -> Batch:
    """Applies a function to the arrays of a batch, but not to its scalars."""
    return jax.tree.map(lambda leaf: function(leaf) if np.ndim(leaf) else leaf, batch)


def get_weights(batch: Batch, key: WeightsKey) -> Any:
    """Returns the batch's entry under the weights key, unchecked, or None."""
    if isinstance(batch, Mapping):
        return batch.get(key)
    if isinstance(batch, (tuple, list)) and isinstance(key, int):
        return batch[key] if -len(batch) <= key < len(batch) else None
    if isinstance(key, str) and not hasattr(batch, "dtype"):
        return getattr(batch, key, None)  # a named tuple or a dataclass
    return None


def weights_of(batch: Batch, key: WeightsKey) -> Any:
    """Returns the weights of a batch, checked, or None if it carries none."""
    weights = get_weights(batch, key)
    if weights is None:
        return None
    dtype: Any = getattr(weights, "dtype", np.dtype(object))
    kinds = (jnp.number, jnp.bool_)
    if np.ndim(weights) and any(jnp.issubdtype(dtype, kind) for kind in kinds):
        return weights
    msg = f"the batch's {key!r} is taken for its weights, one per example, but it is a "
    msg += f"{type(weights).__name__} of dtype {dtype} and shape {np.shape(weights)}. "
    raise StepError(f"{msg}Give the weights another name with weights=.")


def takes_weights(batch: Batch, key: WeightsKey) -> bool:
    """Returns whether a batch carries no weights but has a place for them."""
    if isinstance(batch, Mapping):
        # JAX sorts the keys of a dict, and keys of different types have no order.
        return key not in batch and all(isinstance(other, type(key)) for other in batch)
    return type(batch) in (tuple, list) and key == len(batch)


def with_weights(batch: Batch, key: WeightsKey, weights: Leaf) -> Batch:
    """Returns a copy of a batch with these weights, or raises StepError."""
    record: Any = batch
    is_record = dataclasses.is_dataclass(batch) or hasattr(batch, "_fields")
    if key in getattr(batch, "_fields", ()):
        return record._replace(**{str(key): weights})
    if key in getattr(batch, "__dataclass_fields__", ()):
        return dataclasses.replace(record, **{str(key): weights})
    if isinstance(batch, MutableMapping):
        copied = copy.copy(batch)  # a defaultdict keeps its default
        copied[key] = weights
        return copied
    if isinstance(batch, Mapping) and not is_record:
        return type(record)({**batch, key: weights})
    if isinstance(batch, (tuple, list)) and isinstance(key, int):
        items = [*batch, *[None] * (key == len(batch) and not is_record)]
        if -len(batch) <= key < len(items):
            items[key] = weights
            return type(record)(*items) if is_record else type(batch)(items)
    msg = f"a {type(batch).__name__} has no place for weights={key!r}. Give a dict of"
    raise StepError(f"{msg} arrays; or a tuple, with weights= its length.")


def mask_padding(weights: np.ndarray, is_real: np.ndarray) -> np.ndarray:
    """Returns weights of shape (batch, ...) with 0 in the rows that are padding."""
    mask = is_real.reshape(-1, *[1] * (weights.ndim - 1))
    return np.where(mask, weights, np.zeros_like(weights))


def pad_rows(leaf: Leaf, num_rows: int) -> Any:
    """Returns an array with its last row repeated up to a number of rows.

    Zeros would not do: the gradient of a norm is NaN there, and 0 times NaN is NaN.
    """
    rows = leaf.shape[0]
    if not rows:
        return np.zeros((num_rows, *leaf.shape[1:]), leaf.dtype)
    if rows == num_rows:
        return leaf
    return leaf[np.minimum(np.arange(num_rows), rows - 1)]


def without_nan_padding(batch: Batch, weights: Leaf) -> Batch:
    """Replaces NaN and infinity by 0 in rows of weight 0, as 0 times NaN is NaN."""
    if weights is None:
        return batch
    real = weights != 0

    def clean(leaf: Leaf) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        dims = min(real.ndim, leaf.ndim)
        if leaf.shape[:dims] != real.shape[:dims]:
            dims = 1
        # With weights per token and a leaf per example, a row is real if any token is.
        rows = real.any(axis=tuple(range(dims, real.ndim)))
        rows = rows.reshape(rows.shape + (1,) * (leaf.ndim - dims))
        return jnp.where(rows | jnp.isfinite(leaf), leaf, 0)

    return map_batch(clean, batch)


# Weights in batches that the library made, by id, since arrays are not hashable.
marked_weights: Any = weakref.WeakValueDictionary()


def check_weights_key(batch: Batch, key: WeightsKey) -> None:
    """Raises StepError if weights that the library made are under another key."""
    is_right = not marked_weights or is_marked(get_weights(batch, key))
    if is_right or not any(map(is_marked, jax.tree.leaves(batch))):
        return
    named = _paths.flatten(batch).leaves
    place: WeightsKey = next(leaf.path for leaf in named if is_marked(leaf.value))
    if isinstance(batch, (tuple, list)) and place.isdigit():
        place = int(place)
    msg = f"the batch's weights are at {place!r}, but the step looks for them at "
    msg += f"{key!r}, so that padding would count as examples. Give weights={place!r} "
    raise StepError(f"{msg}to the step, or weights={key!r} to the dataset.")


def check_padding(step: str, arguments: PyTree, is_read: list[bool]) -> None:
    """Warns if a step does not read the weights of a batch that may hold padding."""
    leaves = jax.tree.leaves(arguments)
    if len(leaves) != len(is_read):  # some are static
        return
    if any(is_marked(x) and not y for x, y in zip(leaves, is_read, strict=True)):
        msg = f"{step} does not read the batch's weights, so rows that pad a short "
        msg += "batch count as examples. Multiply losses by the weights and divide by "
        msg += "their sum, or give distribute_dataset remainder='drop'."
        warn(msg)


def is_marked(leaf: Leaf) -> bool:
    """Returns whether an array is the weights of a batch that the library made."""
    return leaf is not None and marked_weights.get(id(leaf)) is leaf


def noted_batch(where: str, batch: Batch) -> contextlib.AbstractContextManager[None]:
    """Adds a note to an error: which batch it is about, and its arrays."""

    def kind(leaf: Leaf) -> str:
        return f"{getattr(leaf, 'dtype', 'a number')}{[*np.shape(leaf)]}"

    return _checks.noted(
        lambda: f"{where}, {jax.tree.map(kind, batch)}".replace("'", "")
    )
