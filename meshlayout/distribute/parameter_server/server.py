"""A parameter server: variables, the optimizers that update them, and what was applied.

Ray runs it as an actor: one call at a time, so that a push is applied completely or not
at all. Each push carries the number of its closure. A server remembers the numbers that
it has applied, and so a closure that is run a second time, because a worker was killed
after it had pushed, changes nothing here.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshlayout._annotations import PyTree


Arrays = dict[str, Any]


class UpdateRule(NamedTuple):
    """An optimizer, and the names of its parameters, its state and its counter.

    The trees are Optax's, with `optax.MaskedNode` for what is on other servers.
    """

    tx: optax.GradientTransformation
    params: PyTree
    slots: PyTree
    step: str


class Push(NamedTuple):
    """What a closure changes on a server: by optimizer and name, or by name."""

    closure: int
    grads: dict[int, dict[str, Any]]
    added: dict[str, Any]
    assigned: dict[str, Any]


class ParameterServer:
    """Variables, and the optimizers that update them."""

    def __init__(self) -> None:
        self._values: dict[str, jax.Array] = {}
        self._updates: dict[int, Any] = {}
        self._applied: set[int] = set()

    def place(self, contents: tuple[Arrays, Mapping[int, UpdateRule]]) -> None:
        """Takes values of variables, in place of former ones, and optimizers."""
        values, rules = contents
        self._values |= {name: jnp.asarray(x) for name, x in values.items()}
        for number, rule in rules.items():
            self._updates[number] = jax.jit(functools.partial(_update, rule))

    def pull(self, names: list[str]) -> Arrays:
        """Returns variables, all of one moment."""
        return {name: np.asarray(self._values[name]) for name in names}

    def push(self, push: Push) -> bool:
        """Applies what a closure changes; returns False if that was applied before."""
        if push.closure in self._applied:
            return False
        new = {}
        for number, grads in push.grads.items():
            new |= self._updates[number](self._values, grads)
        for name, change in push.added.items():
            new[name] = self._values[name] + change
        new |= {name: jnp.asarray(x) for name, x in push.assigned.items()}
        # An error comes up here at the latest, when nothing has been changed.
        self._values |= jax.block_until_ready(new)
        self._applied.add(push.closure)
        return True


def _update(rule: UpdateRule, values: Arrays, grads: Arrays) -> Arrays:
    """Returns the new values of the variables and slots of an optimizer."""
    params, slots = jax.tree.map(values.__getitem__, (rule.params, rule.slots))
    gradients = jax.tree.map(grads.__getitem__, rule.params)
    updates, new_slots = rule.tx.update(gradients, slots, params)
    new = jax.tree.leaves((optax.apply_updates(params, updates), new_slots))
    names = jax.tree.leaves((rule.params, rule.slots))
    pairs = zip(names, new, strict=True)
    new = {name: x.astype(jnp.result_type(values[name])) for name, x in pairs}
    return {**new, rule.step: values[rule.step] + 1}
