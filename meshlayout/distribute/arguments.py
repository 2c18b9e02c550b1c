"""The arguments of a function that runs on replicas, taken apart."""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _checks, _jax
from meshlayout.arrays.placement import host_array
from meshlayout.distribute.values import PerReplica, check_replicas, is_per_replica
from meshlayout.errors import StrategyError
from meshlayout.mesh import Mesh


@functools.cache  # Flax's classes are slow to ask
def _is_leaf(kind: type) -> bool:
    return issubclass(kind, nnx.Pytree | nnx.Variable | nnx.State | PerReplica)


@functools.cache
def _is_fixed(kind: type) -> bool:
    """Returns whether values of this type are not converted: bools, NNX objects."""
    is_object = issubclass(kind, nnx.Pytree | nnx.Variable)
    return kind is bool or (is_object and not issubclass(kind, nnx.State))


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
        self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh
    ) -> None:
        self._fn, self._call, self._mesh = fn, (args, kwargs), mesh
        self.arrays: list[Any] = []
        self.is_own: list[bool] = []
        self.scalars: list[int] = []
        self.objects: list[Any] = []
        self.mask: Any = None
        self._leaves, self._treedef = jax.tree.flatten(self._call, is_leaf=is_leaf)
        self.signature = self._treedef, tuple(map(self._add, self._leaves))
        if self.mask is not None:
            self.arrays.append(self.mask)
            self.is_own.append(True)

    def _add(self, x: Any) -> Any:
        """Adds an argument; returns what a program depends on."""
        kind, is_scalar, mask = type(x), False, None
        if is_own := kind is PerReplica:
            if x.num_replicas != self._mesh.jax_mesh.size:  # which is fast to ask
                check_replicas(x, self._mesh, "run")
            is_scalar, mask, x = x.is_scalar, x.mask, x.array
            if mask is not self.mask and mask is not None:
                if self.mask is not None and isinstance(mask, Tracer):
                    msg = "run: padding is unknown under jit. run compiles by itself: "
                    raise StrategyError(f"{msg}call it without jit.")
                if self.mask is not None and not jnp.array_equal(mask, self.mask):
                    msg = "run: two arguments differ in which rows are padding. Pass "
                    raise StrategyError(f"{msg}values of one batch.")
                self.mask = mask
            if is_scalar:
                self.scalars.append(len(self.arrays))
        elif _is_fixed(kind):  # a bool, such as `training`, is for Python to decide on
            self.objects += [] if kind is bool else [x]
            return x if kind is bool else None
        elif _is_leaf(kind):  # a state, a tree of values: its Variables are no objects
            leaves, structure = jax.tree.flatten(x, is_leaf=is_per_replica)
            return structure, *map(self._add, leaves)
        else:
            x = self._placed(x)
        self.arrays.append(x)
        self.is_own.append(is_own)
        form = getattr(x, "aval", None) or jax.typeof(x)
        return form, is_own, is_scalar, mask is not None

    def _placed(self, x: Any) -> Any:
        """Returns an array or number that is the same for all replicas."""
        if isinstance(x, jax.Array):
            # It may be placed elsewhere, such as on another strategy's devices.
            is_placed = not isinstance(x, Tracer) and _jax.is_committed(x)
            if is_placed and not x.sharding.is_fully_replicated:
                msg = "run: every replica would get all rows of an array in shards."
                raise StrategyError(f"{msg} Take strategy.distribute_dataset.")
            is_here = is_placed and _is_whole(x.sharding, x.ndim, self._mesh.jax_mesh)
            if is_placed and not is_here and x.is_fully_addressable:
                return _jax.put(x, self._mesh.layout(...).with_rank(x.ndim).sharding)
        elif isinstance(x, (np.ndarray, np.generic)):
            return host_array(x, "run: an argument")
        elif not isinstance(x, (int, float, complex, jax.ShapeDtypeStruct)):
            name = next((name for name, y in self.named() if y is x), "of a state")
            msg = f"run: the argument {name} is {_checks.shown(x)}. A replica's "
            msg += "function takes arrays, numbers, values of replicas and NNX objects"
            hint = "; fix anything else with functools.partial or a closure."
            if isinstance(x, Iterator):
                hint = ": call next(iterator) outside, run(fn, args=(next(iterator),))."
            raise StrategyError(msg + hint)
        return x

    def named(self) -> Iterator[tuple[str, Any]]:
        """Yields the leaves, in their order, named by the function's parameters."""
        parameters: list[str] = []
        with contextlib.suppress(TypeError, ValueError):  # not all have a signature
            parameters += inspect.signature(self._fn).parameters
        paths = jax.tree.leaves_with_path(self._call, is_leaf=is_leaf)
        for (_, first, *rest), x in paths:
            index = getattr(first, "idx", None)  # of one that is given by position
            if index is not None and index < len(parameters):
                first = jax.tree_util.DictKey(parameters[index])
            path = first, *rest
            yield jax.tree_util.keystr(path, simple=True, separator="/"), x

    def unflatten(self, arrays: list[Any]) -> Any:
        """Returns `(args, kwargs)` with other arrays."""
        own = iter(arrays)

        def value(x: Any) -> Any:
            return x if _is_fixed(type(x)) else next(own)

        return self._treedef.unflatten(
            jax.tree.map(value, x, is_leaf=is_per_replica)
            if isinstance(x, nnx.State)
            else value(x)
            for x in self._leaves
        )


@functools.lru_cache(maxsize=1024)
def _is_whole(sharding: Any, ndim: int, mesh: jax.sharding.Mesh) -> bool:
    whole = NamedSharding(mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
    is_there = sharding.is_equivalent_to(whole, ndim)
    return is_there and not _jax.is_in_other_memory(sharding)
