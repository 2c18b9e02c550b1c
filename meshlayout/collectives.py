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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout._render import array_text
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


class MergedValue:
    """One replica's value inside of `merge_call`, standing for those of all replicas.

    It is made by `ReplicaContext.merge_call`; a strategy's `reduce`, `gather` and
    `local_results` take it like any other per-replica value.

    Args:
        value: This replica's own array.
        context: The context of the replica.
    """

    def __init__(self, value: jax.Array, context: "ReplicaContext") -> None:
        self.value = value
        self.context = context

    def reduce(self, op: ReduceOp, axis: int | None) -> jax.Array:
        """Combines the replicas' values, and along `axis` within each."""
        if axis is None:
            return self.context.combine(op, self.value)
        local = LOCAL_REDUCTIONS[op](self.value, axis=axis)
        return self.context.combine(op, local)

    def __repr__(self) -> str:
        aval = jax.typeof(self.value)
        text = array_text(aval.dtype, aval.shape)
        return f"PerReplica({text}, of {self.context.num_replicas_in_sync} replicas)"


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
        self._mask = mask

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
        return self._mask

    @property
    def num_examples(self) -> jax.Array | None:
        """The number of real rows of all replicas; None if there is no padding."""
        self.mask_was_read = True
        return (
            None if self._mask is None else self.combine(ReduceOp.SUM, self._mask.sum())
        )

    def all_reduce(self, reduce_op: ReduceOp | str, value: PyTree) -> PyTree:
        """Combines a value of each replica; all replicas get the result.

        It can be differentiated: see the head of this module.

        Args:
            reduce_op: `"SUM"`, `"MEAN"`, `"MAX"` or `"MIN"`, or a `ReduceOp`.
            value: An array or number, or a tree of them, of equal shapes on all
                replicas. Booleans are summed as integers.

        Returns:
            The same tree of arrays; means of integers are float32.

        Raises:
            StrategyError: If the operation does not exist, or a leaf is not an array of
                numbers.
        """
        op = ReduceOp.parse(reduce_op)
        leaves, treedef = jax.tree.flatten(value)
        arrays = [_numbers("all_reduce", leaf) for leaf in leaves]
        return treedef.unflatten(self.combine_all(op, arrays))

    def all_gather(self, value: PyTree, axis: int) -> PyTree:
        """Concatenates the replicas' values along a dim; all replicas get the result.

        Args:
            value: An array, or a tree of arrays, of equal shapes on all replicas.
            axis: The dim to concatenate along.

        Raises:
            StrategyError: If a value has no such dim.
        """

        def gathered(leaf: Any) -> jax.Array:
            x = _numbers("all_gather", leaf)
            dim = check_axis(axis, x.shape, "all_gather")
            if self.axis_name is None:
                return x
            return jax.lax.all_gather(x, self.axis_name, axis=dim, tiled=True)

        return jax.tree.map(gathered, value)

    def merge_call(
        self,
        merge_fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> PyTree:
        """Calls a function once for all replicas, with the values of all of them.

        Args:
            merge_fn: Called as `merge_fn(strategy, *args, **kwargs)`, in cross-replica
                context: each leaf stands for the values of all replicas, which the
                strategy's `reduce`, `gather` and `local_results` take.
            args: This replica's arguments.
            kwargs: This replica's arguments by name.

        Returns:
            What it returns; of a value of all replicas, this replica's own.

        Raises:
            StrategyError: If `merge_fn` is not such a function.
        """
        names = ("strategy", *(f"arg{index}" for index in range(len(args))))
        if not kwargs:  # Python says what is wrong with named ones
            _checks.function("merge_fn", merge_fn, *names, error=StrategyError)
        merged_args, merged_kwargs = jax.tree.map(
            lambda leaf: MergedValue(_numbers("merge_call", leaf), self),
            (tuple(args), dict(kwargs or {})),
        )
        with entered(None):
            result = merge_fn(self.strategy, *merged_args, **merged_kwargs)
        return jax.tree.map(
            lambda leaf: leaf.value if isinstance(leaf, MergedValue) else leaf, result
        )

    def combine_all(self, op: ReduceOp, arrays: list[jax.Array]) -> list[jax.Array]:
        """Combines arrays of each replica, as `all_reduce` does for a tree."""
        return [self.combine(op, x) for x in arrays]

    def combine(self, op: ReduceOp, x: jax.Array) -> jax.Array:
        """Combines one array of each replica."""
        if x.dtype == jnp.bool_ and op in (ReduceOp.SUM, ReduceOp.MEAN):
            x = x.astype("int32")
        if self.axis_name is None:
            return x
        if op is ReduceOp.SUM:
            return jax.lax.psum(x, self.axis_name)
        if op is ReduceOp.MEAN:
            return jax.lax.pmean(x, self.axis_name)
        sign = 1 if op is ReduceOp.MAX else -1
        if jnp.issubdtype(x.dtype, jnp.floating):
            return _maximum(sign * x, self.axis_name) * sign
        reduce = jax.lax.pmax if op is ReduceOp.MAX else jax.lax.pmin
        return reduce(x, self.axis_name)

    def __repr__(self) -> str:
        return f"ReplicaContext(num_replicas_in_sync={self.num_replicas_in_sync})"


# What a reduction does within one array, before replicas are combined.
LOCAL_REDUCTIONS: dict[ReduceOp, Callable[..., jax.Array]] = {
    ReduceOp.SUM: jnp.sum,
    ReduceOp.MEAN: jnp.mean,
    ReduceOp.MAX: jnp.max,
    ReduceOp.MIN: jnp.min,
}


def _maximum(x: jax.Array, axis_name: str) -> jax.Array:
    """Returns the maximum over replicas, differentiable: JAX's own pmax is not."""
    maximum = jax.custom_jvp(lambda x: jax.lax.pmax(x, axis_name))

    def jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        (x,), (tangent,) = primals, tangents
        top = jax.lax.pmax(x, axis_name)
        # Replicas that share the maximum share its gradient, as elements do in jnp.max.
        is_top = (x == top).astype(x.dtype)
        share = is_top / jax.lax.psum(is_top, axis_name)
        return top, jax.lax.psum(share * tangent, axis_name)

    maximum.defjvp(jvp)
    return maximum(x)


def check_axis(axis: object, shape: tuple[int, ...], where: str) -> int:
    """Returns a dim of an array as a non-negative number.

    Raises:
        StrategyError: If the array has no such dim.
    """
    rank = len(shape)
    if isinstance(axis, int) and not isinstance(axis, bool) and -rank <= axis < rank:
        return axis % rank
    dims = f"-{rank} to {rank - 1}" if rank else "none, it is a scalar"
    msg = (
        f"{where}: axis must be a dim of a value of shape {shape} ({dims}), got "
        f"{_checks.shown(axis)}."
    )
    raise StrategyError(msg)


def array_of(leaf: Any) -> jax.Array | None:
    """Returns an array or number as a JAX array; None for anything else."""
    arrays = jax.Array | np.ndarray | np.generic | bool | int | float | complex
    if not isinstance(leaf, arrays):
        return None  # JAX would take a text for the name of a dtype
    try:
        return jnp.asarray(leaf)
    except TypeError:  # an array of objects
        return None


def _numbers(where: str, leaf: object) -> jax.Array:
    x = array_of(leaf)
    if x is None:
        msg = f"{where} takes arrays and numbers, got {_checks.shown(leaf)}."
        raise StrategyError(msg)
    return x


# Outside of strategies, code runs as on the only replica.
_alone = ReplicaContext(None, None, 1)
# The context of a replica; None in cross-replica context.
_context: ContextVar[ReplicaContext | None] = ContextVar(
    "replica_context", default=_alone
)


@contextlib.contextmanager
def entered(context: ReplicaContext | None) -> Iterator[ReplicaContext | None]:
    """Makes a context current; None is the cross-replica context of a strategy."""
    token = _context.set(context)
    try:
        yield context
    finally:
        _context.reset(token)


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
