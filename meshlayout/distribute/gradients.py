"""Gradients that optimizers add up over replicas, as those of tf.distribute do.

While a replica's function is traced, `nnx.Optimizer.update` first adds up the gradients
of all replicas, except those that the function has combined itself; which they are is
known after a first trace. Gradients may be the same on all replicas for another reason:
those of a regularization loss, of which each replica has its part, do not depend on the
batch. They are added up like all others, for which nothing has to be sent.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
from flax import nnx

from meshlayout._annotations import PyTree
from meshlayout._patches import SharedPatches
from meshlayout.collectives import ReduceOp, get_replica_context
from meshlayout.distribute.sameness import OWN_SUM, Sameness, mark


class GradientSums:
    """Which gradients a function's optimizers have to add up.

    Before the first trace has been read, all of them.
    """

    def __init__(self) -> None:
        self._combined: set[str] = set()  # by the function
        self._equal: set[str] = set()  # on all replicas, without having been combined
        self._is_read = False
        self._num_updates = 0

    def read(self, same: Sameness, analyze: Callable[..., Sameness]) -> None:
        """Finds the gradients that are not to be sent.

        Args:
            same: What is the same on all replicas.
            analyze: Returns that for other assumptions about collectives; its keyword
                arguments are those of `same_values`.
        """
        self._is_read = True
        names = {name for name, is_same in same.marks.items() if is_same}
        if not names:
            return
        # Is it the same also if collectives did not make it so?
        without = analyze(of_differing=False).marks
        untouched = analyze(of_differing=False, of_same=False).marks
        for members in _grouped(same.marks).values():
            # A tree that is the same as a whole was combined as a whole, as by
            # all_reduce: also what was equal before.
            of_same = without if not names.issuperset(members) else untouched
            equal = {name for name in members if name in names and of_same[name]}
            self._equal |= equal
            self._combined |= names.intersection(members) - equal

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
        known = self._combined | self._equal
        differ = [index for index, name in enumerate(names) if name not in known]
        marked = [mark(leaves[index], names[index]) for index in differ]
        for index, leaf in zip(
            differ, context.combine_all(ReduceOp.SUM, marked), strict=True
        ):
            leaves[index] = leaf if self._is_read else mark(leaf, OWN_SUM)
        for index, name in enumerate(names):
            if name in self._equal:
                leaves[index] = leaves[index] * context.num_replicas_in_sync
        return treedef.unflatten(leaves)


def _grouped(marks: Iterable[str]) -> dict[str, list[str]]:
    """Returns the marks of gradients by the update that they are of."""
    groups: dict[str, list[str]] = {}
    for name in marks:
        groups.setdefault(name.rpartition("/")[0], []).append(name)
    return groups


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
