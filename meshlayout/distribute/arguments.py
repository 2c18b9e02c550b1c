"""The arguments of a function that runs on replicas, taken apart."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding

from meshlayout import _checks, _jax
from meshlayout._annotations import Leaf, PyTree
from meshlayout._host_arrays import host_array
from meshlayout.distribute.capture import is_nnx
from meshlayout.distribute.values import PerReplica, check_replicas
from meshlayout.errors import LayoutError, StrategyError
from meshlayout.mesh import Mesh


# What JAX raises if Python asks a traced array for its value.
_NEEDS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_LEAF_TYPES: dict[type, bool] = {}


def is_leaf(value: object) -> bool:
    """Returns whether this is an NNX object, a state, or a value of replicas."""
    kind = type(value)
    known = _LEAF_TYPES.get(kind)
    if known is None:  # Flax's classes are slow to ask
        known = isinstance(value, PerReplica | nnx.State) or is_nnx(value)
        _LEAF_TYPES[kind] = known
    return known


class Arguments:
    """The arguments of one call of `run`, taken apart.

    Args:
        fn: The function, for messages.
        args: Its arguments.
        kwargs: Its arguments by name.
        mesh: The mesh of replicas.

    Attributes:
        leaves: Arrays, numbers and values of replicas; None for what is no array.
        objects: The NNX objects, with their names.
        signature: What a program depends on: structure, kinds, shapes and dtypes.
        mask: Which rows are real, if rows are padded.

    Raises:
        StrategyError: If one is not an array, a number, a `PerReplica` of the mesh's
            replicas or an NNX object, or two are padded differently.
    """

    def __init__(
        self,
        fn: Callable[..., PyTree],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mesh: Mesh,
    ) -> None:
        self._call = fn, args, kwargs
        leaves, self._treedef = jax.tree.flatten((args, kwargs), is_leaf=is_leaf)
        # The values of states, whose Variables are not objects of the user's.
        self._states: dict[int, Any] = {}
        self.objects: list[tuple[str, Any]] = []
        self.leaves: list[Any] = []
        self.mask: Any = None
        kinds: list[Any] = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, nnx.State):
                values, treedef = jax.tree.flatten(
                    leaf, is_leaf=lambda x: isinstance(x, PerReplica)
                )
                self._states[index] = treedef
                kinds.append(treedef)
                for value in values:
                    self._add(index, value, kinds, mesh)
            else:
                self._add(index, leaf, kinds, mesh)
        self._kinds = kinds
        self.signature = self._treedef, tuple(kinds)

    def _add(self, index: int, leaf: Leaf, kinds: list[Any], mesh: Mesh) -> None:
        if isinstance(leaf, jax.Array):
            leaf = _moved(leaf, mesh)
            kinds.append((leaf.shape, leaf.dtype, leaf.weak_type))
        elif isinstance(leaf, PerReplica):
            check_replicas(leaf, mesh, "run")
            shape, dtype = leaf.array.shape, leaf.array.dtype
            kinds.append((shape, dtype, leaf.is_scalar, leaf.mask is not None))
            if leaf.mask is not None:
                if self.mask is not None and leaf.mask is not self.mask:
                    _check_masks(self.mask, leaf.mask)
                self.mask = leaf.mask
        elif isinstance(leaf, np.ndarray | np.generic | jax.ShapeDtypeStruct):
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                leaf = self._on_host(index, leaf)
            kinds.append((leaf.shape, leaf.dtype, False))
        elif isinstance(leaf, bool):  # like `training`: for Python to decide on
            kinds.append(leaf)
            leaf = None
        elif isinstance(leaf, int | float | complex):
            self._on_host(index, leaf)
            kinds.append(type(leaf))
        elif is_leaf(leaf):
            kinds.append(None)
            self.objects.append((self._name(index), leaf))
            leaf = None
        else:
            self._refuse(index, leaf)
        self.leaves.append(leaf)

    def call(self, fn: Callable[..., PyTree], leaves: list[Any]) -> PyTree:
        """Calls the function with one replica's arrays, and with the objects."""
        args, kwargs = self.unflatten(leaves)
        try:
            return fn(*args, **kwargs)
        except _NEEDS_A_VALUE as error:
            error.add_note(
                "run: while the function is compiled, its arguments are arrays without "
                "values, also those that are Python numbers. Fix a number that Python "
                "needs, as in range(n), with functools.partial or a closure."
            )
            raise

    def unflatten(self, leaves: list[Any]) -> Any:
        """Returns `(args, kwargs)` with other arrays."""
        own, objects = iter(leaves), iter(self.objects)
        whole: list[Any] = []
        kinds = iter(self._kinds)
        for index in range(self._treedef.num_leaves):
            kind = next(kinds)
            if index in self._states:
                count = kind.num_leaves
                values = [next(own) for _ in range(count)]
                for _ in range(count):
                    next(kinds)
                whole.append(kind.unflatten(values))
                continue
            leaf = next(own)
            if kind is None:
                leaf = next(objects)[1]
            elif isinstance(kind, bool):
                leaf = kind
            whole.append(leaf)
        return self._treedef.unflatten(whole)

    def forget(self) -> None:
        """Lets go of arrays, which would live as long as a program."""
        self.leaves, self.mask, self._call = [], None, (self._call[0], (), {})

    def _name(self, index: int) -> str:
        """Returns the name of a leaf of the arguments, by the function's parameters."""
        fn, args, kwargs = self._call
        paths, _ = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_leaf)
        (side, first, *rest), _ = paths[index]
        name = str(getattr(first, "key", getattr(first, "idx", first)))
        if side.idx == 0:
            with contextlib.suppress(TypeError, ValueError, IndexError):
                name = list(inspect.signature(fn).parameters)[first.idx]
        return name + jax.tree_util.keystr(tuple(rest))

    def _on_host(self, index: int, leaf: Leaf) -> Any:
        """Returns an array or number of the host, which devices hold unchanged.

        Raises:
            StrategyError: If they cannot, as integers beyond 32 bits.
        """
        try:
            return host_array(leaf)
        except LayoutError:  # named only now, since finding the name takes longer
            pass
        try:
            return host_array(leaf, f"run: the argument {self._name(index)}")
        except LayoutError as error:
            raise StrategyError(str(error)) from None

    def _refuse(self, index: int, leaf: object) -> NoReturn:
        msg = (
            f"run: the argument {self._name(index)} is {_checks.shown(leaf)}. A "
            "replica's function takes arrays, numbers, values of replicas and NNX "
            "objects; fix anything else with functools.partial or a closure."
        )
        raise StrategyError(msg)


def _moved(x: Leaf, mesh: Mesh) -> Any:
    """Returns an array on the devices of the replicas, such as another strategy's."""
    if is_on(x, mesh.jax_mesh) is not False or not x.is_fully_addressable:
        return x
    return _jax.put(x, mesh.layout(...).with_rank(x.ndim).sharding)


# Shardings that are whole on the devices of a mesh, as those of a state's 600 arrays.
_whole: dict[Any, jax.sharding.Mesh] = {}


def is_on(x: Leaf, mesh: jax.sharding.Mesh) -> bool | None:
    """Returns whether a value is replicated over the devices of a mesh.

    Returns:
        True if it is; None if it may be moved there freely, as NumPy arrays, numbers
        and JAX arrays that were never placed; False if it was placed elsewhere.

    Example:
        >>> mesh = jax.make_mesh((2,), ("batch",), devices=jax.devices()[:2])
        >>> whole = NamedSharding(mesh, jax.sharding.PartitionSpec())
        >>> is_on(jax.device_put(1.0, whole), mesh)
        True
        >>> is_on(jax.device_put(1.0, jax.devices()[1]), mesh)
        False
        >>> is_on(jax.numpy.ones(2), mesh) is None
        True
    """
    if isinstance(x, Tracer):
        return True  # the program that is traced is for devices of the mesh, or fails
    if not _jax.is_committed(x):
        return None
    sharding = x.sharding
    if _whole.get(sharding) is mesh:
        return True
    if not sharding.is_fully_replicated or _jax.is_in_other_memory(sharding):
        return False
    if isinstance(sharding, NamedSharding):
        # In the same order: jit refuses arrays on the same devices in another one.
        devices: Any = sharding.mesh.devices
        is_here = list(mesh.devices.flat) == list(devices.flat)
    else:
        is_here = mesh.size == 1 and sharding.device_set == set(mesh.devices.flat)
    if is_here and isinstance(sharding, NamedSharding):
        _whole[sharding] = mesh
    return is_here


def _check_masks(first: jax.Array, second: jax.Array) -> None:
    if isinstance(first, Tracer) or isinstance(second, Tracer):
        same = False
    else:
        same = first.shape == second.shape and bool(jnp.array_equal(first, second))
    if not same:
        msg = (
            "run: two arguments have different rows that are padding, and a replica "
            "cannot tell which are meant. Pass values of one batch."
        )
        raise StrategyError(msg)
