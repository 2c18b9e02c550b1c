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

    `arrays` are the arrays and numbers, those of replicas (`is_own`) as one array, also
    of `scalars`; and then the `mask` of real rows, if rows are padded. `objects` are
    the NNX objects, and `signature` is what a program depends on besides.
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
        self.scalars = set[int]()
        self.mask: Any = None
        # A bool, such as `training`, is for Python to decide on.
        self._forms = tuple([x if type(x) is bool else self._add(x) for x in values])
        if self.mask is not None:
            self.arrays.append(self.mask)
            self.is_own.append(True)
        self.signature = self._treedef, self._values, self._forms

    def _add(self, x: Leaf) -> tuple[Any, ...]:
        """Adds an array; returns what a program depends on."""
        mask, is_own, is_scalar = None, type(x) is PerReplica, False
        if is_own:
            if x.num_replicas != self._mesh.jax_mesh.size:  # which is fast to ask
                check_replicas(x, self._mesh, "run")
            mask, is_scalar, x = x.mask, x.is_scalar, x.array
            if mask is not None and mask is not self.mask:
                is_traced = isinstance(mask, Tracer) or isinstance(self.mask, Tracer)
                first = mask if self.mask is None else self.mask
                if first is not mask and (
                    is_traced or not jnp.array_equal(mask, first)
                ):
                    msg = (
                        "run: two arguments have different rows that are padding, and "
                        "which are meant is unknown. Pass values of one batch."
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
            name = next((name for name, y in self.named() if y is x), "of a state")
            msg = (
                f"run: the argument {name} is {_checks.shown(x)}. A replica's "
                "function takes arrays, numbers, values of replicas and NNX objects; "
                "fix anything else with functools.partial or a closure."
            )
            raise StrategyError(msg)
        self.arrays.append(x)
        self.is_own.append(is_own)
        kind = getattr(x, "aval", None) or jax.typeof(x)
        return kind, is_own, is_scalar, mask is not None

    def named(self) -> Iterator[tuple[str, Any]]:
        """Yields values and NNX objects with names, by the function's parameters."""
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


@functools.lru_cache(maxsize=1024)
def _is_whole(sharding: Any, ndim: int, mesh: jax.sharding.Mesh) -> bool:
    whole = NamedSharding(mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
    is_there = sharding.is_equivalent_to(whole, ndim)
    return is_there and not _jax.is_in_other_memory(sharding)
