"""The same program on one device: its mesh, its arrays and its active mesh."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from meshlayout import _jax
from meshlayout._annotations import Leaf, PyTree
from meshlayout._default_mesh import default_mesh, get_default_mesh
from meshlayout.arrays import copy_to_mesh, to_numpy
from meshlayout.errors import RecompileWarning
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap, activate
from meshlayout.mesh import Mesh, as_mesh, create_mesh


def one_device_mesh(mesh: Mesh | jax.sharding.Mesh) -> Mesh:
    """Returns a mesh with the same axes, all of size 1, on its first device.

    On several processes, it is each process's own first device.

    Args:
        mesh: The mesh.

    Example:
        >>> import meshlayout as ml
        >>> one_device_mesh(ml.create_mesh({"batch": 2, "model": 4}))
        Mesh(batch=1, model=1)
    """
    mesh = as_mesh(mesh)
    return create_mesh(
        dict.fromkeys(mesh.axis_names, 1),
        devices=mesh.local_devices[:1],
        axis_types=dict(zip(mesh.axis_names, mesh.axis_types, strict=True)),
    )


@contextlib.contextmanager
def alone(mesh: Mesh) -> Iterator[None]:
    """Replaces the active mesh by one of one device, and layout maps by none.

    Args:
        mesh: A mesh of one device.
    """
    outer, default = _jax.concrete_mesh(), get_default_mesh()
    with contextlib.ExitStack() as stack:
        if outer is not None:
            stack.enter_context(jax.set_mesh(one_device_mesh(outer).jax_mesh))
        if default is not None:
            stack.enter_context(default_mesh(one_device_mesh(default)))
        # Without a rule, `constrain` leaves every value where it is.
        stack.enter_context(activate(LayoutMap(mesh)))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", RecompileWarning)
        yield


def to_one_device(tree: PyTree, mesh: Mesh) -> Any:
    """Copies the arrays of a tree to a mesh of one device; the rest is unchanged."""
    return jax.tree.map(lambda leaf: _to_one_device(leaf, mesh), tree)


def copied(tree: PyTree) -> Any:
    """Copies the arrays of a tree, each on its own devices."""
    return jax.tree.map(_copied, tree)


def _to_one_device(leaf: Leaf, mesh: Mesh) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    values = to_numpy(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        values = jax.random.wrap_key_data(values, impl=jax.random.key_impl(leaf))
    if isinstance(leaf.sharding, NamedSharding):
        now = Layout.of(leaf)
        layout = Layout(now.specs, mesh, memory_kind=now.memory_kind)
    else:
        layout = Layout([...], mesh)
    return _like(copy_to_mesh(values, layout), leaf)


def _copied(leaf: Leaf) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if not isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf.sharding, NamedSharding):
        return _like(copy_to_mesh(leaf, Layout.of(leaf)), leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        words = jnp.copy(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    return jnp.copy(leaf)


def _like(copy: Leaf, leaf: Leaf) -> Any:
    """Returns the copy, weakly typed if the leaf is: the program depends on it."""
    return _jax.with_weak_type(copy, weak_type=jax.typeof(leaf).weak_type)
