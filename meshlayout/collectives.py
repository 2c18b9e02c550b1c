"""The replica context: what a function that runs once per replica may ask and send.

`meshlayout.distribute` runs functions per replica under `jax.shard_map`; in them,
`get_replica_context()` says which replica this is and combines values of all of them.
The context is kept here, below losses and strategies, because losses are divided by
the number of examples of all replicas.

Gradients are those of the sum of all replicas' losses, as in tf.distribute: a replica
differentiates its own loss, and what it sent counts in the losses of all. So the
gradient of an all-reduce is an all-reduce.
"""

import contextlib
import enum
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import Leaf, PyTree
from meshlayout.errors import StrategyError, did_you_mean


class ReduceOp(enum.Enum):
    """How the values of all replicas are combined.

    Wherever one is taken, its name is taken as well, in capitals or not.

    Example:
        >>> ReduceOp.parse("sum")
        <ReduceOp.SUM: 'SUM'>
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MAX = "MAX"
    MIN = "MIN"

    @classmethod
    def parse(cls, op: "ReduceOp | str") -> "ReduceOp":
        """Returns the operation that a user named.

        Raises:
            StrategyError: If there is no such operation.
        """
        if isinstance(op, cls):
            return op
        if isinstance(op, str) and op.upper() in cls.__members__:
            return cls[op.upper()]
        hint = did_you_mean(op.upper(), cls.__members__) if isinstance(op, str) else ""
        msg = (
            "the reduction must be 'SUM', 'MEAN', 'MAX' or 'MIN', or a ReduceOp, got "
            f"{_checks.shown(op)}.{hint}"
        )
        raise StrategyError(msg)


class DistributedValues:
    """The values of all replicas, which are not one array: the base of `PerReplica`."""


class ReplicaContext:
    """What a function knows that runs on one replica; see `get_replica_context`.

    Args:
        strategy: The strategy that runs it.
        axis_name: The mesh axis along which replicas are; None for one replica alone.
        num_replicas_in_sync: The number of replicas.
        mask: 1 for this replica's real rows and 0 for padding, float32, of shape
            (rows,); None if there is no padding.

    Attributes:
        strategy: The strategy that runs it.
        num_replicas_in_sync: The number of replicas.
        mask: Which rows are real; unlike `example_mask`, not noted as asked for.
        mask_was_read: Whether the function has asked which rows are real, or called
            something of the library that has.
        mask_was_taken: Whether the function has asked itself.
    """

    def __init__(
        self,
        strategy: Any,
        axis_name: str | None,
        num_replicas_in_sync: int,
        mask: jax.Array | None = None,
    ) -> None:
        self.strategy = strategy
        self.axis_name = axis_name
        self.num_replicas_in_sync = num_replicas_in_sync
        self.mask_was_read = False
        self.mask_was_taken = False
        self.mask = mask

    @property
    def replica_id_in_sync_group(self) -> jax.Array:
        """The index of this replica, from 0; an int32 scalar, known on the device."""
        if self.axis_name is None:
            return jnp.int32(0)
        return jax.lax.axis_index(self.axis_name)

    @property
    def example_mask(self) -> jax.Array | None:
        """1 for real rows of this replica's batch and 0 for padding; None without any.

        A last batch that is too short is padded to the shape of the others. Multiply
        losses by this and divide by `num_examples`; `losses.compute_average_loss` does.
        """
        self.mask_was_taken = True
        return self.read_mask()

    def read_mask(self) -> jax.Array | None:
        """Returns `example_mask`, for the library's own functions."""
        self.mask_was_read = True
        return self.mask

    @property
    def num_examples(self) -> jax.Array | None:
        """The number of real rows of all replicas; None if there is no padding."""
        mask = self.read_mask()
        return None if mask is None else self.combine(ReduceOp.SUM, mask.sum())

    def all_reduce(self, reduce_op: ReduceOp | str, value: PyTree) -> PyTree:
        """Combines a value of each replica; all replicas get the result.

        It can be differentiated: see the head of this module.

        Args:
            reduce_op: `"SUM"`, `"MEAN"`, `"MAX"` or `"MIN"`, or a `ReduceOp`.
            value: An array or number, or a tree of them, of equal shapes on all
                replicas.

        Returns:
            The same tree of arrays, of the dtypes that `jnp.sum`, `jnp.mean`, `jnp.max`
            and `jnp.min` give: means of integers are float32, and sums of small
            integers and of booleans int32 or uint32.

        Raises:
            StrategyError: If the operation does not exist, or a leaf is not an array of
                numbers.
        """
        op = ReduceOp.parse(reduce_op)
        arrays, treedef = _flattened("all_reduce", value)
        return treedef.unflatten(self.combine(op, x) for x in arrays)

    def all_gather(self, value: PyTree, axis: int) -> PyTree:
        """Concatenates the replicas' values along a dim; all replicas get the result.

        Args:
            value: An array, or a tree of arrays, of equal shapes on all replicas.
            axis: The dim to concatenate along.

        Raises:
            StrategyError: If a value has no such dim, or is not an array of numbers.
        """
        arrays, treedef = _flattened("all_gather", value)
        dims = [check_axis(axis, x.shape, "all_gather") for x in arrays]
        if self.axis_name is not None:
            arrays = [
                # XLA refuses a dim of size 0, of which there is nothing to gather.
                jax.lax.all_gather(x, self.axis_name, axis=dim, tiled=True)
                if x.shape[dim]
                else x
                for x, dim in zip(arrays, dims, strict=True)
            ]
        return treedef.unflatten(arrays)

    def combine(self, op: ReduceOp, x: jax.Array) -> jax.Array:
        """Combines one array of each replica."""
        # Over no dims, these change the dtype alone. Small integers would wrap around,
        # in a mean, too.
        x = _REDUCTIONS[op](x, axis=())
        if self.axis_name is None:
            return x
        if op is ReduceOp.SUM:
            return jax.lax.psum(x, self.axis_name)
        if op is ReduceOp.MEAN:
            return jax.lax.pmean(x, self.axis_name)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            msg = (
                f"complex numbers ({x.dtype}) have no order: {op.value} is not defined."
            )
            raise StrategyError(msg)
        reduce = jax.lax.pmax if op is ReduceOp.MAX else jax.lax.pmin
        return reduce(x, self.axis_name)

    def __repr__(self) -> str:
        return f"ReplicaContext(num_replicas_in_sync={self.num_replicas_in_sync})"


# What a reduction does within one array, before replicas are combined.
_REDUCTIONS: dict[ReduceOp, Callable[..., jax.Array]] = {
    ReduceOp.SUM: jnp.sum,
    ReduceOp.MEAN: jnp.mean,
    ReduceOp.MAX: jnp.max,
    ReduceOp.MIN: jnp.min,
}


def check_axis(axis: object, shape: tuple[int, ...], where: str) -> int:
    """Returns a dim of an array as a non-negative number.

    Raises:
        StrategyError: If the array has no such dim.
    """
    rank = len(shape)
    with contextlib.suppress(StrategyError):
        dim = _checks.count("axis", axis, at_least=None, error=StrategyError)
        if -rank <= dim < rank:
            return dim % rank
    dims = f"-{rank} to {rank - 1}" if rank else "none, it is a scalar"
    msg = (
        f"{where}: axis must be a dim of a value of shape {shape} ({dims}), got "
        f"{_checks.shown(axis)}."
    )
    raise StrategyError(msg)


def array_of(leaf: Leaf) -> jax.Array | None:
    """Returns an array or number as a JAX array; None for anything else."""
    arrays = jax.Array | np.ndarray | np.generic | bool | int | float | complex
    if not isinstance(leaf, arrays):
        return None  # JAX would take a text for the name of a dtype
    try:
        return jnp.asarray(leaf)
    except (TypeError, OverflowError):  # an array of objects; too large an int
        return None


def _flattened(where: str, tree: PyTree) -> tuple[list[jax.Array], Any]:
    """Returns the leaves of a tree as arrays of numbers, and its structure.

    Raises:
        StrategyError: If a leaf is anything else.
    """
    leaves, treedef = jax.tree.flatten(
        tree, is_leaf=lambda leaf: isinstance(leaf, DistributedValues)
    )
    return [_numbers(where, leaf) for leaf in [None] * (tree is None) + leaves], treedef


def _numbers(where: str, leaf: object) -> jax.Array:
    if isinstance(leaf, DistributedValues):
        msg = (
            f"{where} takes a replica's own arrays, got the values of all replicas, a "
            "PerReplica. Pass it to run as an argument, so that each replica gets its "
            "own; outside of run, use strategy.reduce or strategy.gather."
        )
        raise StrategyError(msg)
    x = array_of(leaf)
    if x is None or not (x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.number)):
        msg = f"{where} takes arrays and numbers, got {_checks.shown(leaf)}."
        raise StrategyError(msg)
    return x


# Code outside a strategy runs as a single replica.
_alone = ReplicaContext(None, None, 1)
# The context of a replica; None in cross-replica context.
_context: ContextVar[ReplicaContext | None] = ContextVar(
    "replica_context", default=_alone
)

# Which of the current replica's rows are real, float32 of shape (rows,); None if there
# is no padding. Reading this does not count as the function asking for the mask.
padding_mask: ContextVar[jax.Array | None] = ContextVar("padding_mask", default=None)


class entered(contextlib.AbstractContextManager[None]):  # noqa: N801 (a function)
    """Makes a context current; None is the cross-replica context of a strategy."""

    def __init__(self, context: ReplicaContext | None) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._token = _context.set(self._context)
        mask = None if self._context is None else self._context.mask
        self._mask_token = padding_mask.set(mask)

    def __exit__(self, *error: object) -> None:
        _context.reset(self._token)
        padding_mask.reset(self._mask_token)


def get_replica_context() -> ReplicaContext | None:
    """Returns the context of the replica that this code runs on.

    Outside of any strategy that is a context of one replica, so that a function can be
    called with and without one. In cross-replica context, as in a strategy's scope, it
    is None.

    Example:
        >>> context = get_replica_context()
        >>> context.num_replicas_in_sync, int(context.replica_id_in_sync_group)
        (1, 0)
    """
    return _context.get()


def in_cross_replica_context() -> bool:
    """Returns whether this code runs once for all replicas, as in a strategy's scope.

    Example:
        >>> in_cross_replica_context()
        False
    """
    return _context.get() is None
