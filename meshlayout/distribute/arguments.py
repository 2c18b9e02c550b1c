"""The arguments of a function that runs on replicas, taken apart."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _checks, _jax
from meshlayout._annotations import Leaf, PyTree
from meshlayout._host_arrays import host_array
from meshlayout.distribute.values import PerReplica, check_replicas
from meshlayout.errors import StrategyError
from meshlayout.mesh import Mesh


@functools.cache  # Flax's classes are slow to ask
def _is_leaf(kind: type) -> bool:
    return _is_object(kind) or issubclass(kind, PerReplica | nnx.State)


@functools.cache
def _is_object(kind: type) -> bool:
    is_object = issubclass(kind, nnx.Pytree | nnx.Variable)
    return is_object and not issubclass(kind, nnx.State)


def is_leaf(value: object) -> bool:
    """Returns whether this is an NNX object, a state, or a value of replicas."""
    return _is_leaf(type(value))


def is_per_replica(value: object) -> bool:
    """Returns whether this is a value of each replica."""
    return type(value) is PerReplica


class Arguments:
    """The arguments of one call of `run`, taken apart.

    Attributes:
        arrays: The arrays and numbers, those of replicas as one array; and then the
            mask of real rows, if rows are padded.
        is_own: Which of the arrays are values of replicas.
        scalars: The indices of those that are scalars on each replica.
        objects: The NNX objects.
        mask: Which rows are real, if rows are padded.
        signature: What a program depends on, besides the objects.
    """

    def __init__(
        self,
        fn: Callable[..., PyTree],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mesh: Mesh,
    ) -> None:
        self._fn, self._call, self._mesh = fn, (args, kwargs), mesh
        leaves, self._treedef = jax.tree.flatten(self._call, is_leaf=is_leaf)
        self.objects = [x for x in leaves if _is_object(type(x))]
        # A state is a tree of values: its Variables are not objects of the user's.
        values, self._values = jax.tree.flatten(
            [None if _is_object(type(x)) else x for x in leaves], is_leaf=is_per_replica
        )
        self.arrays, self.is_own = list[Any](), list[bool]()
        self.scalars, self.mask = set[int](), None
        # A bool, such as `training`, is for Python to decide on.
        self._forms = tuple([x if type(x) is bool else self._add(x) for x in values])
        if self.mask is not None:
            self.arrays.append(self.mask)
            self.is_own.append(True)
        self.signature = self._treedef, self._values, self._forms

    def _add(self, x: Leaf) -> tuple[Any, ...]:
        """Adds an array; returns what a program depends on."""
        mask, is_own = None, type(x) is PerReplica
        if is_own:
            check_replicas(x, self._mesh, "run")
            mask, is_scalar, x = x.mask, x.is_scalar, x.array
            if mask is not None and mask is not self.mask:
                self._check_mask(mask)
                self.mask = mask
            if is_scalar:
                self.scalars.add(len(self.arrays))
        elif isinstance(x, jax.Array):
            # It may be elsewhere, as another strategy's.
            if is_on(x, self._mesh.jax_mesh) is False and x.is_fully_addressable:
                x = _jax.put(x, self._mesh.layout(...).with_rank(x.ndim).sharding)
        elif isinstance(x, (np.ndarray, np.generic)):
            x = host_array(x, "run: an argument")
        elif not isinstance(x, (int, float, complex, jax.ShapeDtypeStruct)):
            msg = (
                f"run: the argument {self._name(x)} is {_checks.shown(x)}. A replica's "
                "function takes arrays, numbers, values of replicas and NNX objects; "
                "fix anything else with functools.partial or a closure."
            )
            raise StrategyError(msg)
        self.arrays.append(x)
        self.is_own.append(is_own)
        kind = getattr(x, "aval", None) or jax.typeof(x)
        return kind, is_own and (is_scalar, mask is not None)

    def _check_mask(self, mask: jax.Array) -> None:
        is_traced = isinstance(mask, Tracer) or isinstance(self.mask, Tracer)
        if self.mask is not None and (
            is_traced or not jnp.array_equal(mask, self.mask)
        ):
            msg = (
                "run: two arguments have different rows that are padding, and a "
                "replica cannot tell which are meant. Pass values of one batch."
            )
            raise StrategyError(msg)

    @property
    def name(self) -> str:
        """The name of the function, for messages."""
        return getattr(self._fn, "__name__", type(self._fn).__name__)

    def named_objects(self) -> list[tuple[str, Any]]:
        """Returns the NNX objects with their names, by the function's parameters."""
        return [(self._name(x), x) for x in self.objects]

    def _name(self, value: object) -> str:
        paths, _ = jax.tree.flatten_with_path(
            self._call, is_leaf=lambda x: x is value or is_per_replica(x)
        )
        side, first, *rest = next(path for path, x in paths if x is value)
        name = str(getattr(first, "key", getattr(first, "idx", first)))
        if side.idx == 0:
            with contextlib.suppress(TypeError, ValueError, IndexError):
                name = list(inspect.signature(self._fn).parameters)[first.idx]
        return name + jax.tree_util.keystr(tuple(rest))

    def unflatten(self, arrays: list[Any]) -> Any:
        """Returns `(args, kwargs)` with other arrays."""
        own, objects = iter(arrays), iter(self.objects)
        values = [x if type(x) is bool else next(own) for x in self._forms]
        leaves = self._values.unflatten(values)
        return self._treedef.unflatten(
            next(objects) if x is None else x for x in leaves
        )


def is_on(x: Leaf, mesh: jax.sharding.Mesh) -> bool | None:
    """Returns whether a value is replicated over the devices of a mesh.

    True if it is; None if it may be moved there freely, as NumPy arrays, numbers and
    JAX arrays that were never placed; False if it was placed elsewhere.
    """
    if isinstance(x, Tracer):
        return True  # the program that is traced is for devices of the mesh, or fails
    return _is_whole(x.sharding, x.ndim, mesh) if _jax.is_committed(x) else None


@functools.lru_cache(maxsize=1024)
def _is_whole(sharding: Any, ndim: int, mesh: jax.sharding.Mesh) -> bool:
    kind = sharding.memory_kind
    whole = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
    is_there = sharding.is_equivalent_to(whole, ndim)
    return is_there and not _jax.is_in_other_memory(sharding)
