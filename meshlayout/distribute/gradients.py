"""Gradients that optimizers add up over replicas, as those of tf.distribute do.

While a replica's function is traced, `nnx.Optimizer.update` first adds up the gradients
that differ between replicas. Those that the function has combined itself are the same
on all replicas, and are used unchanged; which they are is known after a first trace.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
from flax import nnx

from meshlayout._annotations import PyTree
from meshlayout._patches import SharedPatches
from meshlayout.collectives import ReduceOp, get_replica_context
from meshlayout.distribute.sameness import mark


class GradientSums:
    """Which gradients a function's optimizers have to add up.

    Attributes:
        same: By mark, whether a gradient is the same on all replicas already; empty
            before the first trace has been read, when all are added up.
    """

    def __init__(self) -> None:
        self.same: dict[str, bool] = {}
        self._num_updates = 0

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Adds up gradients in a block in which the function is traced once."""
        self._num_updates = 0
        with _updates:
            token = _current.set(self)
            try:
                yield
            finally:
                _current.reset(token)

    def __call__(self, grads: PyTree) -> PyTree:
        """Returns gradients added up over replicas, where they differ."""
        context = get_replica_context()
        update, self._num_updates = self._num_updates, self._num_updates + 1
        if context is None or context.axis_name is None:
            return grads
        leaves, treedef = jax.tree.flatten(grads)
        names = [f"gradients/{update}/{index}" for index in range(len(leaves))]
        differ = [index for index, name in enumerate(names) if not self.same.get(name)]
        marked = [mark(leaves[index], names[index]) for index in differ]
        for index, leaf in zip(
            differ, context.combine_all(ReduceOp.SUM, marked), strict=True
        ):
            leaves[index] = leaf
        return treedef.unflatten(leaves)


_current: ContextVar[GradientSums | None] = ContextVar("gradient_sums", default=None)


def _adding_up(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        sums = _current.get()
        if sums is None:
            return update(self, *args, **kwargs)
        if "grads" in kwargs:
            kwargs["grads"] = sums(kwargs["grads"])
        else:
            *first, grads = args
            args = (*first, sums(grads))
        return update(self, *args, **kwargs)

    return replacement


# Optimizers have no hook between gradients and update. If Flax renames the method,
# variables differ between replicas, which is an error, and nearly every test in
# tests/test_distribute.py fails.
_updates = SharedPatches((nnx.Optimizer, "update", _adding_up))
