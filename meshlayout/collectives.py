"""The replica context: what a function that runs once per replica can ask and send.

Losses and strategies use it, because losses are divided by the number of examples of
all replicas. Gradients are those of the sum of all replicas' losses, as in
tf.distribute: a replica differentiates its own loss, and what it sent counts in the
losses of all. So the gradient of an all-reduce is an all-reduce.
"""

import contextlib
import enum
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from meshlayout import _checks
from meshlayout._annotations import Leaf, PyTree
from meshlayout.errors import StrategyError


class ReduceOp(enum.Enum):
    """How the values of all replicas are combined.

    Wherever a `ReduceOp` is accepted, so is its name, in any case.

    Examples:
        >>> ReduceOp("sum")
        <ReduceOp.SUM: 'SUM'>
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MAX = "MAX"
    MIN = "MIN"

    @classmethod
    def _missing_(cls, value: object) -> "ReduceOp":
        name = value.upper() if isinstance(value, str) else value
        hint = "Did you mean 'MEAN'?" * str(name).startswith("AV")  # of torch, NCCL
        names, error = [*cls.__members__], StrategyError
        return cls[_checks.choice("reduce_op", name, names, error=error, hint=hint)]


class DistributedValues(_checks.WithReflexes):
    """The values of all replicas, which are not one array: the base of `PerReplica`."""


@dataclass(eq=False)
class ReplicaContext(_checks.WithReflexes):
    """What a function on one replica knows; see `get_replica_context`.

    Attributes:
        strategy: The strategy that runs it.
        axis_name: The mesh axis of the replicas; None for a single replica.
        num_replicas_in_sync: The number of replicas.
        mask: The `example_mask`; reading this is not noted.
        mask_was_read: Whether the function, or the library on its behalf, has read it.
    """

    strategy: Any
    axis_name: str | None = field(repr=False)
    num_replicas_in_sync: int
    mask: jax.Array | None = field(default=None, repr=False)
    mask_was_read: bool = field(default=False, repr=False)

    @property
    def replica_id_in_sync_group(self) -> jax.Array:
        """The index of this replica, from 0; an int32 scalar, known on the device."""
        if self.axis_name is None:
            return jnp.int32(0)
        return jax.lax.axis_index(self.axis_name)

    @property
    def example_mask(self) -> jax.Array | None:
        """1 for real rows of this replica's batch, 0 for padding; None without padding.

        Of shape (rows,), float32. Multiply losses by it and divide their sum by
        `num_examples`, as `losses.compute_average_loss` does.
        """
        self.mask_was_read = True
        return self.mask

    @property
    def num_examples(self) -> jax.Array | None:
        """The number of real rows on all replicas; None without padding."""
        mask = self.example_mask
        return None if mask is None else self.combine(ReduceOp.SUM, mask.sum())

    def all_reduce(self, reduce_op: ReduceOp | str, value: PyTree) -> PyTree:
        """Combines one value per replica; all replicas get the result.

        Its gradient is an all-reduce, too.

        Args:
            reduce_op: `"SUM"`, `"MEAN"`, `"MAX"` or `"MIN"`, or a `ReduceOp`.
            value: A tree of arrays and numbers, of equal shapes on all replicas. The
                dtypes of the result are those of `jnp.sum`, `jnp.mean` and so on.

        Examples:
            >>> import meshlayout as ml
            >>> strategy = ml.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> total = lambda: get_replica_context().all_reduce("SUM", 3.0)
            >>> float(strategy.run(total))
            6.0
        """
        op = ReduceOp(reduce_op)
        return jax.tree.map(lambda x: self.combine(op, x), value, is_leaf=_is_of_all)

    def all_gather(self, value: PyTree, axis: int) -> PyTree:
        """Concatenates the replicas' arrays, of equal shapes; all get the result."""

        def gather(leaf: Leaf) -> jax.Array:
            x, name = jnp.asarray(leaf), self.axis_name
            return jax.lax.all_gather(x, name, axis=axis, tiled=True) if name else x

        return jax.tree.map(gather, value, is_leaf=_is_of_all)

    def combine(self, op: ReduceOp, x: Leaf) -> jax.Array:
        """Combines one array of each replica."""
        name, axis = op.value.lower(), self.axis_name
        # Over no dims, this changes only the dtype: sums of small integers would wrap.
        x = getattr(jnp, name)(x, axis=())
        # Looked up at each call: strategies note what these return.
        return getattr(jax.lax, f"p{name}")(x, axis) if axis else x


def _is_of_all(leaf: object) -> bool:
    # A PerReplica is a pytree; its parts would be taken for a replica's own arrays.
    return isinstance(leaf, DistributedValues)


# Code outside of a strategy runs as a single replica; None is cross-replica context.
_alone = ReplicaContext(None, None, 1)
current_context = ContextVar[ReplicaContext | None]("replica", default=_alone)


@contextlib.contextmanager
def entered(context: ReplicaContext | None) -> Iterator[None]:
    """Makes a context current; None is the cross-replica context of a strategy."""
    token = current_context.set(context)
    try:
        yield
    finally:
        current_context.reset(token)


def get_replica_context() -> ReplicaContext | None:
    """Returns the context of the replica that this code runs on.

    Outside of strategies, it is a context of one replica. In cross-replica context, as
    in a strategy's scope, it is None.

    Examples:
        >>> get_replica_context()
        ReplicaContext(strategy=None, num_replicas_in_sync=1)
    """
    return current_context.get()


def in_cross_replica_context() -> bool:
    """Returns whether this code runs once for all replicas, as in a scope."""
    return current_context.get() is None
