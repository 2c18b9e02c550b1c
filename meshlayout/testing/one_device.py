"""A step on one device: its mesh, its arguments there, and what is in force there."""

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from meshlayout import _jax
from meshlayout._annotations import Leaf, PyTree
from meshlayout.arrays import copy_to_mesh, to_numpy
from meshlayout.errors import MeshError, RecompileWarning
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap, activate
from meshlayout.mesh import Mesh, as_mesh, create_mesh


def one_device_mesh(mesh: Mesh | jax.sharding.Mesh) -> Mesh:
    """Returns a mesh with the same axes, all of size 1, on its first device.

    On several processes, it is each process's own first device.

    Raises:
        MeshError: If this process has no devices in the mesh.

    Example:
        >>> import meshlayout as ml
        >>> one_device_mesh(ml.create_mesh({"batch": 2, "model": 4}))
        Mesh(batch=1, model=1)
    """
    mesh = as_mesh(mesh)
    if not mesh.local_devices:
        msg = (
            f"one_device_mesh: process {jax.process_index()} has no devices in "
            f"{mesh!r}. Call this on the processes of the mesh."
        )
        raise MeshError(msg)
    sizes, types = dict.fromkeys(mesh.axis_names, 1), mesh.axis_types
    return create_mesh(sizes, devices=mesh.local_devices[:1], axis_types=types)


# One map per mesh: under another map JAX compiles everything again.
_map_without_rules = functools.lru_cache(maxsize=8)(LayoutMap)


@contextlib.contextmanager
def alone(mesh: Mesh) -> Iterator[None]:
    """Makes a mesh of one device the mesh in force, and leaves layout maps no rules."""
    outer = _jax.concrete_mesh()
    with contextlib.ExitStack() as stack:
        if outer is not None:
            stack.enter_context(jax.set_mesh(one_device_mesh(outer).jax_mesh))
        # Without a rule, `constrain` leaves every value where it is.
        stack.enter_context(activate(_map_without_rules(mesh)))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", RecompileWarning)
        yield


def to_one_device(tree: PyTree, mesh: Mesh) -> Any:
    """Copies the arrays of a tree to a mesh of one device; the rest is unchanged."""

    def move(leaf: Leaf) -> Leaf:
        if not isinstance(leaf, jax.Array):
            return leaf
        values, layout = to_numpy(leaf), Layout([...], mesh)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            values = jax.random.wrap_key_data(values, impl=jax.random.key_impl(leaf))
        if isinstance(leaf.sharding, NamedSharding):
            now = Layout.of(leaf)
            layout = Layout(now.specs, mesh, memory_kind=now.memory_kind)
        # The program depends on it, whether an array is weakly typed.
        is_weak = jax.typeof(leaf).weak_type
        with _jax.without_set_mesh():
            return _jax.with_weak_type(copy_to_mesh(values, layout), weak_type=is_weak)

    return jax.tree.map(move, tree)


def copied(tree: PyTree) -> Any:
    """Copies the arrays of a tree, each on its own devices."""

    def copy(leaf: Leaf) -> Leaf:
        if isinstance(leaf, jax.Array) and _jax.is_committed(leaf):
            return _jax.put(leaf, leaf.sharding, may_alias=False)
        return leaf.copy() if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(copy, tree)
