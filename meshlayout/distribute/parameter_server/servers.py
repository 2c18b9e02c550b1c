"""A parameter server: variables, the optimizers that update them, and what was applied.

A server is a plain object, which Ray runs as an actor: one call at a time, so that a
push is applied completely or not at all. Each push carries the number of its closure.
A server remembers the numbers that it has applied, and so a closure that is run a
second time, because a worker was killed after it had pushed, changes nothing here.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshlayout._annotations import DType, PyTree


Arrays: TypeAlias = dict[str, np.ndarray[Any, Any]]
Version: TypeAlias = tuple[int, int]
"""The life of a server, counted by its restarts, and the pushes applied so far."""


@dataclass(frozen=True)
class UpdateRule:
    """An optimizer and its variables, as one server has them.

    Attributes:
        tx: The optimizer.
        params: The names of the parameters, in the structure that the optimizer takes.
        slots: The names of its state, in its structure.
        step: The name of the number of updates.
        absent: Shapes and dtypes of variables that this server has no part of. Zeros
            take their place, so that trees have one structure; the compiler leaves out
            what would be computed from them.
    """

    tx: optax.GradientTransformation
    params: PyTree
    slots: PyTree
    step: str
    absent: Mapping[str, tuple[tuple[int, ...], DType]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The variables that this server has, and which an update reads and sets."""
        names = [*jax.tree.leaves(self.params), *jax.tree.leaves(self.slots), self.step]
        return [name for name in names if name not in self.absent]


@dataclass(frozen=True)
class Contents:
    """Values of variables by name, and optimizers by number."""

    values: Arrays = field(default_factory=dict)
    rules: Mapping[int, UpdateRule] = field(default_factory=dict)


@dataclass(frozen=True)
class Pulled:
    """Values of a server's variables, of one moment."""

    values: Arrays
    version: Version


@dataclass(frozen=True)
class Push:
    """What one closure changes on one server.

    Attributes:
        closure: The number of the closure.
        version: The version that it was computed from; None if it pulled nothing.
        grads: Gradients by the number of the optimizer and by name.
        added: Changes to be added, by name.
        assigned: New values, by name.
        max_staleness: How many pushes may have been applied since; None for any number.
    """

    closure: int
    version: Version | None
    grads: dict[int, Arrays] = field(default_factory=dict)
    added: Arrays = field(default_factory=dict)
    assigned: Arrays = field(default_factory=dict)
    max_staleness: int | None = None


@dataclass(frozen=True)
class Receipt:
    """What became of a push.

    Attributes:
        status: `"applied"`; `"duplicate"` if the closure's push was applied before; or
            `"stale"` if it is too old, and must be computed again.
        staleness: The number of pushes that were applied between pull and push.
    """

    status: Literal["applied", "duplicate", "stale"]
    staleness: int


@dataclass(frozen=True)
class ServerCounts:
    """What a server has done since it was started, or since its checkpoint.

    Attributes:
        num_variables: The number of variables of which it has rows.
        num_applied: The number of pushes applied, each of another closure.
        num_duplicates: The number of pushes left out, as the closure's was applied.
        num_stale: The number of pushes sent back to be computed again.
    """

    num_variables: int
    num_applied: int
    num_duplicates: int
    num_stale: int


class AppliedClosures:
    """A set of closures' numbers that stays small, as they are about consecutive."""

    def __init__(self, below: int = 0, others: set[int] | None = None) -> None:
        self.below = below
        self.others = others or set()

    def __contains__(self, closure: int) -> bool:
        return closure < self.below or closure in self.others

    def add(self, closure: int) -> None:
        """Adds a number."""
        self.others.add(closure)
        while self.below in self.others:
            self.others.remove(self.below)
            self.below += 1

    def to_list(self) -> list[int]:
        """Returns the set as a list, which `of` takes."""
        return [self.below, *sorted(self.others)]

    @classmethod
    def of(cls, numbers: list[int]) -> "AppliedClosures":
        """Returns the set of a list."""
        below, *others = numbers
        return cls(below, set(others))


@dataclass(frozen=True)
class Snapshot:
    """All of a server, of one moment.

    Attributes:
        values: Its variables.
        num_applied: The number of pushes applied.
        applied: The closures whose pushes were applied, as `AppliedClosures.to_list`.
    """

    values: Arrays
    num_applied: int = 0
    applied: tuple[int, ...] = (0,)


class ServerIsEmpty(Exception):  # noqa: N818 - a state, not a mistake
    """A server was asked for what it does not have, as after a restart."""


class ParameterServer:
    """Variables, and the optimizers that update them.

    Args:
        life: Counts the restarts of this server. Versions of different lives are not
            compared.
        snapshot: What it starts with; None for nothing.
    """

    def __init__(self, life: int = 0, snapshot: Snapshot | None = None) -> None:
        snapshot = snapshot or Snapshot({})
        self._life = life
        self._values = {name: jnp.asarray(x) for name, x in snapshot.values.items()}
        self._num_applied = snapshot.num_applied
        self._applied = AppliedClosures.of(list(snapshot.applied))
        self._updates: dict[int, tuple[UpdateRule, Callable[..., Any]]] = {}
        self._num_duplicates = 0
        self._num_stale = 0

    def place(self, contents: Contents) -> None:
        """Adds variables, or sets their values; adds optimizers."""
        self._values |= {name: jnp.asarray(x) for name, x in contents.values.items()}
        for number, rule in contents.rules.items():
            self._updates[number] = (rule, jax.jit(functools.partial(_update, rule)))

    def pull(self, names: list[str]) -> Pulled:
        """Returns variables, all of one version.

        Raises:
            ServerIsEmpty: If it does not have one of them.
        """
        self._check(names)
        values = {name: np.asarray(self._values[name]) for name in names}
        return Pulled(values, (self._life, self._num_applied))

    def push(self, push: Push) -> Receipt:
        """Applies what a closure changes, unless it was applied or is too old.

        Raises:
            ServerIsEmpty: If it does not have one of the variables.
        """
        self._check([*push.added, *push.assigned])
        if not push.grads.keys() <= self._updates.keys():
            raise ServerIsEmpty
        if push.closure in self._applied:
            self._num_duplicates += 1
            return Receipt("duplicate", 0)
        life, num_pulled = push.version or (self._life, self._num_applied)
        staleness = self._num_applied - num_pulled
        limit = push.max_staleness
        if life != self._life or (limit is not None and staleness > limit):
            self._num_stale += 1
            return Receipt("stale", staleness)
        new = {}
        for number, grads in push.grads.items():
            rule, update = self._updates[number]
            new |= update({name: self._values[name] for name in rule.names}, grads)
        for name, change in push.added.items():
            new[name] = self._values[name] + change
        new |= {name: jnp.asarray(x) for name, x in push.assigned.items()}
        # An error comes up here at the latest, when nothing has been changed.
        self._values |= jax.block_until_ready(new)
        self._num_applied += 1
        self._applied.add(push.closure)
        return Receipt("applied", staleness)

    def snapshot(self, _: object = None) -> Snapshot:
        """Returns all that a server needs to go on from here."""
        values = {name: np.asarray(value) for name, value in self._values.items()}
        return Snapshot(values, self._num_applied, tuple(self._applied.to_list()))

    def counts(self, _: object = None) -> ServerCounts:
        """Returns how many pushes came, and what became of them."""
        return ServerCounts(
            len(self._values), self._num_applied, self._num_duplicates, self._num_stale
        )

    def _check(self, names: list[str]) -> None:
        for name in names:
            if name not in self._values:
                raise ServerIsEmpty(name)


def _update(
    rule: UpdateRule, values: Mapping[str, jax.Array], grads: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Returns the new values of the variables and slots of an optimizer."""

    def look_up(name: str, among: Mapping[str, jax.Array] = values) -> jax.Array:
        if name in rule.absent:
            return jnp.zeros(*rule.absent[name])
        return among[name]

    params = jax.tree.map(look_up, rule.params)
    slots = jax.tree.map(look_up, rule.slots)
    gradients = jax.tree.map(lambda name: look_up(name, grads), rule.params)
    updates, new_slots = rule.tx.update(gradients, slots, params)
    new_params = optax.apply_updates(params, updates)
    new = {rule.step: values[rule.step] + 1}
    for names, tree in ((rule.params, new_params), (rule.slots, new_slots)):
        for name, value in zip(
            jax.tree.leaves(names), jax.tree.leaves(tree), strict=True
        ):
            if name not in rule.absent:
                new[name] = value.astype(jnp.result_type(look_up(name)))
    return new
