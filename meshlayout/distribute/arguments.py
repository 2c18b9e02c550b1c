"""The arguments of a function that runs on replicas, taken apart."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
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
from meshlayout.distribute.values import PerReplica, check_replicas, is_per_replica
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
                if self.mask is not None and not _are_equal(mask, self.mask):
                    msg = (
                        "run: two arguments have different rows that are padding, and "
                        "a replica cannot tell which are meant. Pass values of one "
                        "batch."
                    )
                    raise StrategyError(msg)
                self.mask = mask
            if is_scalar:
                self.scalars.add(len(self.arrays))
        elif isinstance(x, jax.Array):
            # It may have been placed elsewhere, as another strategy's.
            is_placed = not isinstance(x, Tracer) and _jax.is_committed(x)
            is_here = is_placed and _is_whole(x.sharding, x.ndim, self._mesh.jax_mesh)
            if is_placed and not is_here and x.is_fully_addressable:
                x = _jax.put(x, self._mesh.layout(...).with_rank(x.ndim).sharding)
        elif isinstance(x, (np.ndarray, np.generic)):
            x = host_array(x, "run: an argument")
        elif not isinstance(x, (int, float, complex, jax.ShapeDtypeStruct)):
            name = next((name for name, y in self._named() if y is x), "of a state")
            msg = (
                f"run: the argument {name} is {_checks.shown(x)}. A replica's "
                "function takes arrays, numbers, values of replicas and NNX objects; "
                "fix anything else with functools.partial or a closure."
            )
            raise StrategyError(msg)
        self.arrays.append(x)
        self.is_own.append(is_own)
        kind = getattr(x, "aval", None) or jax.typeof(x)
        return kind, is_own and (is_scalar, mask is not None)

    @property
    def name(self) -> str:
        """The name of the function, for messages."""
        return getattr(self._fn, "__name__", type(self._fn).__name__)

    def named_objects(self) -> list[tuple[str, Any]]:
        """Returns the NNX objects with their names, by the function's parameters."""
        return [(name, x) for name, x in self._named() if _is_object(type(x))]

    def _named(self) -> Iterator[tuple[str, Any]]:
        args, kwargs = self._call
        call: Any = [*args, kwargs]
        with contextlib.suppress(TypeError, ValueError):  # not all have a signature
            call = dict(inspect.signature(self._fn).bind(*args, **kwargs).arguments)
        for path, x in jax.tree.leaves_with_path(call, is_leaf=is_leaf):
            yield jax.tree_util.keystr(path, simple=True, separator="/"), x

    def unflatten(self, arrays: list[Any]) -> Any:
        """Returns `(args, kwargs)` with other arrays."""
        own, objects = iter(arrays), iter(self.objects)
        values = [x if type(x) is bool else next(own) for x in self._forms]
        leaves = self._values.unflatten(values)
        return self._treedef.unflatten(
            next(objects) if x is None else x for x in leaves
        )


def _are_equal(mask: jax.Array, other: jax.Array) -> bool:
    is_traced = isinstance(mask, Tracer) or isinstance(other, Tracer)
    return not is_traced and bool(jnp.array_equal(mask, other))


@functools.lru_cache(maxsize=1024)
def _is_whole(sharding: Any, ndim: int, mesh: jax.sharding.Mesh) -> bool:
    whole = NamedSharding(mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
    is_there = sharding.is_equivalent_to(whole, ndim)
    return is_there and not _jax.is_in_other_memory(sharding)
