"""The arguments of a function that runs on replicas, taken apart."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from meshlayout import _checks, _jax
from meshlayout._annotations import PyTree
from meshlayout._host_arrays import host_array
from meshlayout.distribute.values import PerReplica, check_replicas, is_per_replica
from meshlayout.distribute.variables import is_on
from meshlayout.errors import LayoutError, StrategyError
from meshlayout.mesh import Mesh


# What JAX raises if Python asks a traced array for its value.
_NEEDS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of one call of `run`, taken apart.

    Attributes:
        treedef: The structure of `(args, kwargs)`, with objects and `PerReplica` as
            leaves.
        leaves: The leaves, with None in place of objects.
        objects: The NNX objects, with their names.
        signature: What a program depends on: structure, kinds, shapes and dtypes.
        mask: Which rows are real, if rows are padded.
    """

    treedef: Any
    leaves: list[Any]
    objects: tuple[tuple[str, Any], ...]
    signature: Any
    mask: jax.Array | None

    @classmethod
    def of(
        cls,
        fn: Callable[..., PyTree],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mesh: Mesh,
    ) -> "Arguments":
        """Takes arguments apart.

        Raises:
            StrategyError: If one is not an array, a number, a `PerReplica` of the
                mesh's replicas or an NNX object, or two are padded differently.
        """
        args, kwargs = _without_states((args, kwargs))
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_leaf)
        arrays, kinds, objects, mask = [], [], [], None
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, PerReplica):
                check_replicas(leaf, mesh, "run")
                shape, dtype = leaf.array.shape, leaf.array.dtype
                kinds.append((shape, dtype, leaf.is_scalar, leaf.mask is not None))
                if leaf.mask is not None:
                    if mask is not None and leaf.mask is not mask:
                        _refuse_masks(mask, leaf.mask)
                    if leaf.mask is not mask:
                        leaf.check_mask()
                    mask = leaf.mask
            elif isinstance(leaf, jax.Array | np.ndarray | np.generic):
                if not isinstance(leaf, jax.Array):
                    leaf = _host_argument(leaf, fn, args, kwargs, index)
                leaf = _moved(leaf, mesh)
                kinds.append((leaf.shape, leaf.dtype, getattr(leaf, "weak_type", None)))
            elif isinstance(leaf, bool):  # like `training`: for Python to decide on
                kinds.append(leaf)
                leaf = None
            elif isinstance(leaf, int | float | complex):
                _host_argument(leaf, fn, args, kwargs, index)
                kinds.append(type(leaf))
            elif is_object(leaf):
                kinds.append(None)
                objects.append((_name(fn, args, kwargs, index), leaf))
                leaf = None
            else:
                _refuse_argument(_name(fn, args, kwargs, index), leaf)
            arrays.append(leaf)
        return cls(treedef, arrays, tuple(objects), (treedef, tuple(kinds)), mask)

    def call(self, fn: Callable[..., PyTree], leaves: Sequence[Any]) -> PyTree:
        """Calls the function with one replica's arrays, and with the objects."""
        nodes = iter(self.objects)
        whole = [
            next(nodes)[1] if kind is None else kind if isinstance(kind, bool) else leaf
            for leaf, kind in zip(leaves, self.signature[1], strict=True)
        ]
        args, kwargs = _with_states(self.treedef.unflatten(whole))
        try:
            return fn(*args, **kwargs)
        except _NEEDS_A_VALUE as error:
            error.add_note(
                "run: while the function is compiled, its arguments are arrays without "
                "values, also those that are Python numbers. Fix a number that Python "
                "needs, as in range(n), with functools.partial or a closure."
            )
            raise

    def without_arrays(self) -> "Arguments":
        """Returns what is needed to trace another call of the same signature."""
        return dataclasses.replace(self, leaves=[], mask=None)

    @property
    def rows(self) -> int:
        """The rows of one replica's part of a padded batch."""
        masked = (x for x in self.leaves if is_per_replica(x) and x.mask is not None)
        return next(masked).shape[0]

    def with_twice_the_rows(self) -> list[Any]:
        """Returns abstract leaves, those that are padded with twice as many rows.

        Twice, since functions that split their rows into microbatches take those, too.
        """

        def longer(leaf: Any) -> Any:
            if not isinstance(leaf, PerReplica) or leaf.mask is None:
                return leaf
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype),
                leaf,
            )

        return [longer(leaf) for leaf in self.leaves]


@jax.tree_util.register_pytree_node_class
class _StateValues:
    """The values of an `nnx.State`.

    Its Variables are not objects that a function may change, but new ones at each call,
    such as those of gradients.
    """

    def __init__(self, leaves: Sequence[Any], treedef: Any) -> None:
        self.leaves = leaves
        self.treedef = treedef

    def tree_flatten(self) -> tuple[Sequence[Any], Any]:
        return self.leaves, self.treedef

    @classmethod
    def tree_unflatten(cls, treedef: Any, leaves: Sequence[Any]) -> "_StateValues":
        return cls(leaves, treedef)


def _without_states(tree: PyTree) -> Any:
    def values(leaf: Any) -> Any:
        if not isinstance(leaf, nnx.State):
            return leaf
        return _StateValues(*jax.tree.flatten(leaf, is_leaf=is_per_replica))

    return jax.tree.map(
        values, tree, is_leaf=lambda x: isinstance(x, nnx.State) or is_leaf(x)
    )


def _with_states(tree: PyTree) -> Any:
    def state(leaf: Any) -> Any:
        if not isinstance(leaf, _StateValues):
            return leaf
        return leaf.treedef.unflatten(leaf.leaves)

    return jax.tree.map(
        state, tree, is_leaf=lambda x: isinstance(x, _StateValues) or is_leaf(x)
    )


def _moved(x: Any, mesh: Mesh) -> Any:
    """Returns an array on the devices of the replicas, such as another strategy's."""
    if is_on(x, mesh.jax_mesh) is not False or not x.is_fully_addressable:
        return x
    return _jax.put(x, mesh.layout(...).with_rank(x.ndim).sharding)


def is_object(leaf: object) -> bool:
    """Returns whether this is an NNX object, whose variables a function may use."""
    return isinstance(leaf, nnx.Pytree | nnx.Variable)


def is_leaf(leaf: object) -> bool:
    """Returns whether this is an NNX object or a value of replicas."""
    return is_per_replica(leaf) or is_object(leaf)


def _name(
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    index: int,
) -> str:
    """Returns the name of a leaf of the arguments, by the function's parameters."""
    paths, _ = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_leaf)
    (side, first, *rest), _ = paths[index]
    name = str(getattr(first, "key", getattr(first, "idx", first)))
    if side.idx == 0:
        with contextlib.suppress(TypeError, ValueError, IndexError):
            name = list(inspect.signature(fn).parameters)[first.idx]
    return name + jax.tree_util.keystr(tuple(rest))


def _host_argument(
    leaf: Any,
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    index: int,
) -> np.ndarray[Any, Any]:
    """Returns an array or number of the host, which devices hold unchanged.

    Raises:
        StrategyError: If they cannot, as integers beyond 32 bits.
    """
    try:
        return host_array(leaf)
    except LayoutError:  # named only now, since finding the name takes longer
        name = _name(fn, args, kwargs, index)
    try:
        return host_array(leaf, f"run: the argument {name}")
    except LayoutError as error:
        raise StrategyError(str(error)) from None


def _refuse_argument(name: str, leaf: object) -> None:
    msg = (
        f"run: the argument {name} is {_checks.shown(leaf)}. A replica's function "
        "takes arrays, numbers, values of replicas and NNX objects; fix anything else "
        "with functools.partial or a closure."
    )
    raise StrategyError(msg)


def _refuse_masks(first: jax.Array, second: jax.Array) -> None:
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
