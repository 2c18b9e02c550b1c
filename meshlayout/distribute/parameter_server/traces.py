"""A closure, traced: what it reads, changes and returns.

The whole closure becomes one function from the variables' values, batches and other
arrays to its results, gradients and changes. Two things in it are Python, and happen
while it is traced. `next(iterator)` returns a traced batch: the program takes as many
batches as the function drew. `optimizer.update` hands the gradients over instead of
applying them, so that nothing that follows it in the function may read what would have
been updated. The update returns values that depend on a marker, an input of the traced
function, and a result that depends on the marker is refused.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

from meshlayout import _checks, _jax, _paths
from meshlayout._annotations import PyTree
from meshlayout.distribute.parameter_server.batches import Draws, draws
from meshlayout.distribute.parameter_server.closures import (
    HostKey,
    VariableReference,
    is_key,
    take_over,
)
from meshlayout.distribute.variables import Variables
from meshlayout.errors import StrategyError


@dataclass
class Taken:
    """Gradients that optimizers handed over while a function was traced."""

    names: Mapping[int, str]  # by the identity of a traced value
    marker: jax.Array
    grads: dict[int, list[Any]] = field(default_factory=dict)
    params: dict[int, PyTree] = field(default_factory=dict)

    def __call__(
        self,
        number: int,
        grads: PyTree,
        state: PyTree,
        params: PyTree,
        options: Mapping[str, Any],
    ) -> tuple[PyTree, PyTree]:
        """Takes the place of an Optax update."""
        if options:
            msg = (
                f"optimizer.update was called with {', '.join(options)}, and the "
                "update happens on the parameter servers, which get gradients alone."
            )
            raise StrategyError(msg)
        if number in self.grads:
            msg = (
                "a closure updates one optimizer twice. The second update would start "
                "from variables that the first has not changed yet: schedule two "
                "closures."
            )
            raise StrategyError(msg)
        leaves, treedef = jax.tree.flatten(params)
        names = [self.names.get(id(leaf)) for leaf in leaves]
        if None in names:
            msg = (
                "optimizer.update got parameters that are not the model's own: they "
                "were changed in this closure, or belong to a copy, as inside nnx.jit. "
                "A closure is compiled as a whole; call its parts without nnx.jit, and "
                "change parameters by one optimizer alone."
            )
            raise StrategyError(msg)
        if jax.tree.structure(grads) != treedef:
            msg = (
                "optimizer.update got gradients of another structure than the model's "
                "parameters: the filter wrt of the optimizer must be that of nnx.grad."
            )
            raise StrategyError(msg)
        self.params[number] = treedef.unflatten(names)
        self.grads[number] = jax.tree.leaves(grads)
        marked = jax.tree.map(
            lambda x: jnp.broadcast_to(self.marker.astype(x.dtype), x.shape), params
        )
        return marked, state


class Traceable(Protocol):
    """A closure's function and its Variables, as a `ClosureProgram` has them."""

    variables: Variables
    references: list[VariableReference]

    def call(self, inputs: Sequence[Any]) -> PyTree:
        """Calls the function."""
        ...

    def slots_of(self, number: int) -> list[str]:
        """Returns the names of the state of an optimizer."""
        ...


class ClosureTrace:
    """A function, traced: its program, and which variables this reads and changes.

    Args:
        program: The function and its variables.
        inputs: The arrays among its arguments.
        batches: The batches that it may draw.
        ended: The iterators whose datasets end after these.
    """

    def __init__(
        self,
        program: Traceable,
        inputs: Sequence[Any],
        batches: Mapping[int, list[PyTree]],
        ended: set[int],
    ) -> None:
        self._owner = program
        self._ended = ended
        leaves, self._batch_def = jax.tree.flatten(batches, is_leaf=is_key)
        self._values = [
            jax.ShapeDtypeStruct(x.shape, x.dtype)
            if x.constant is None
            else jax.ShapeDtypeStruct((), jnp.uint32)
            for x in program.references
        ]
        self._closed, shapes = jax.make_jaxpr(self._traced, return_shape=True)(
            self._values,
            [x() if isinstance(x, HostKey) else x for x in inputs],
            [x() if isinstance(x, HostKey) else x for x in leaves],
            jnp.uint32(0),
            jnp.float32(0),
        )
        self._jaxpr = self._closed.jaxpr
        self._num_first = len(shapes[0]) + len(shapes[1])
        kinds = self._kinds_of_changes()
        self.added = [i for i, kind in kinds.items() if kind in ("sum", "mean")]
        self.assigned = [i for i, kind in kinds.items() if kind == "first"]
        self.local = [i for i, kind in kinds.items() if kind == "per_replica"]
        needed = self._needed(kinds)
        # To add a change up, the old value is needed as well.
        self.read = [
            i
            for i, x in enumerate(program.references)
            if x.constant is None and (self._jaxpr.invars[i] in needed or i in kinds)
        ]

    @property
    def read_values(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the variables that the program reads."""
        return [self._values[i] for i in self.read]

    def program(
        self, read: list[Any], inputs: list[Any], leaves: list[Any], closure: Any
    ) -> list[Any]:
        """Returns results, gradients and changes, from what is read alone."""
        values = [jnp.zeros(x.shape, x.dtype) for x in self._values]
        for index, value in zip(self.read, read, strict=True):
            values[index] = value
        arguments = (values, inputs, leaves, closure, jnp.float32(0))
        outputs = jaxpr_as_fun(self._closed)(*jax.tree.leaves(arguments))
        new = outputs[self._num_first :]
        added = [new[i] - values[i] for i in self.added]
        rest = [new[i] for i in (*self.assigned, *self.local)]
        return [*outputs[: self._num_first], *added, *rest]

    def _traced(
        self,
        values: list[Any],
        inputs: list[Any],
        leaves: list[Any],
        closure: jax.Array,
        marker: jax.Array,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        references = self._owner.references
        values = [
            x if reference.constant is None else _random_state(reference, closure)
            for x, reference in zip(values, references, strict=True)
        ]
        drawn = Draws(self._batch_def.unflatten(leaves), self._ended)
        names = {
            id(x): reference.name
            for x, reference in zip(values, references, strict=True)
        }
        taken = Taken(names, marker)
        with (
            self._owner.variables.bound(values) as bound,
            _set(draws, drawn),
            _set(take_over, taken),
        ):
            result = self._owner.call(inputs)
            leaves, self.treedef = jax.tree.flatten(
                result, is_leaf=_paths.is_nnx_object
            )
            results = [_result(leaf) for leaf in leaves]
        self.taken = taken
        self.counts = {number: n for number, n in drawn.counts.items() if n}
        self._changed = bound.changed
        grads = [x for leaves in taken.grads.values() for x in leaves]
        return results, grads, bound.new_values

    def _kinds_of_changes(self) -> dict[int, str]:
        """Returns how each variable is pushed that changes outside of an optimizer.

        Raises:
            StrategyError: If nothing says how, or what an optimizer updates changes.
        """
        params = {
            x for tree in self.taken.params.values() for x in jax.tree.leaves(tree)
        }
        slots = {
            name
            for number in self.taken.params
            for name in self._owner.slots_of(number)
        }
        kinds: dict[int, str] = {}
        for i, reference in enumerate(self._owner.references):
            old = self._jaxpr.invars[i]
            new = self._jaxpr.outvars[self._num_first + i]
            unchanged = not self._changed[i] or new is old or reference.name in slots
            if unchanged or isinstance(reference.constant, (HostKey, np.ndarray)):
                continue
            name, kind = reference.name, self._owner.variables.aggregations[i]
            if name in params:
                if not self._is_update(new, old):
                    msg = (
                        f"the closure changes {name} besides updating it by an "
                        "optimizer, and only the update would reach the parameter "
                        "servers. Change it in another closure."
                    )
                    raise StrategyError(msg)
            elif kind is None:
                msg = (
                    f"the closure changes {name} without an nnx.Optimizer, and other "
                    "workers change it at the same time. Say what is meant: "
                    "nnx.Variable(value, aggregation='sum') adds up the changes of all "
                    "closures, 'first' keeps the value that was pushed last, and "
                    "'per_replica' a value for each worker."
                )
                raise StrategyError(msg)
            else:
                kinds[i] = kind
        return kinds

    def _is_update(self, new: Any, old: Any) -> bool:
        """Returns whether a new value is the old one plus the optimizer's update."""
        produced = {var: eqn for eqn in self._jaxpr.eqns for var in eqn.outvars}
        while new in produced and produced[new].primitive.name in _SUMS:
            new = produced[new].invars[0]
        return new is old

    def _needed(self, changed: Mapping[int, str]) -> set[Any]:
        """Returns what results, gradients and changes depend on, and perhaps more.

        Raises:
            StrategyError: If they depend on what an optimizer has updated.
        """
        outvars = self._jaxpr.outvars
        kept = [
            *outvars[: self._num_first],
            *(outvars[self._num_first + i] for i in changed),
        ]
        needed = {var for var in kept if not isinstance(var, Literal)}
        for eqn in reversed(self._jaxpr.eqns):
            if eqn.effects or not needed.isdisjoint(eqn.outvars):
                needed.update(var for var in eqn.invars if not isinstance(var, Literal))
        if self._jaxpr.invars[-1] in needed:
            msg = (
                "the closure reads variables after optimizer.update, which changes "
                "them on the parameter servers alone. Read them before the update, or "
                "schedule another closure."
            )
            raise StrategyError(msg)
        return needed


# What adds the update to a parameter, in optax.apply_updates.
_SUMS = {"add", "convert_element_type"}


def _random_state(reference: VariableReference, closure: jax.Array) -> Any:
    """Returns the state of a random stream, other for each closure."""
    constant = reference.constant
    value = constant() if isinstance(constant, HostKey) else jnp.asarray(constant)
    is_key = isinstance(constant, HostKey)
    return jax.random.fold_in(value, closure) if is_key else value


def _result(leaf: Any) -> jax.Array:
    array = None
    if not _paths.is_nnx_object(leaf):
        with contextlib.suppress(TypeError, ValueError):
            array = jnp.asarray(leaf)
    if array is None or _jax.is_extended(array.dtype):
        msg = (
            f"a closure returned {_checks.shown(leaf)}. Closures return arrays and "
            "numbers, and trees of them."
        )
        raise StrategyError(msg)
    return array


@contextlib.contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
