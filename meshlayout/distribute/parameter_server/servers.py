"""Parameter servers, and what the coordinator knows of them.

Variables go to the servers whole, in turn, when a closure first uses them; the state of
an optimizer goes where its parameters are, when a first `update` says which these are.
"""

import functools
import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshlayout import _jax, _paths
from meshlayout._annotations import PyTree
from meshlayout.distribute.variables import set_raw_value
from meshlayout.errors import StrategyError
from meshlayout.layout_map.optimizer_slots import find_slots


class UpdateRule(NamedTuple):
    """An optimizer, and the names of its parameters, its state and its counter."""

    tx: optax.GradientTransformation
    params: PyTree
    slots: PyTree
    step: str


class ParameterServer:
    """Variables, and what updates them: a Ray actor, which runs one call at a time."""

    def __init__(self) -> None:
        self._values: dict[str, jax.Array] = {}
        self._updates: dict[str, Any] = {}

    def place(self, values: Mapping[str, Any], rules: Mapping[str, UpdateRule]) -> None:
        """Takes values of variables, in place of former ones, and optimizers."""
        self._values |= {name: jnp.asarray(x) for name, x in values.items()}
        for optimizer, rule in rules.items():
            params, slots = jax.tree.map(
                lambda name: name if name in self._values else optax.MaskedNode(),
                (rule.params, rule.slots),
            )
            rule = rule._replace(params=params, slots=slots)
            self._updates[optimizer] = jax.jit(functools.partial(_update, rule))

    def pull(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns variables, all of one moment."""
        return {name: np.asarray(self._values[name]) for name in names}

    def push(self, push: tuple[Any, dict[str, Any]]) -> None:
        """Applies what a closure changes: gradients for optimizers, and increments."""
        updates, added = push
        new = {name: self._values[name] + x for name, x in added.items()}
        for optimizer, grads in updates:
            new |= self._updates[optimizer](self._values | new, grads)
        # An error comes up here at the latest, when nothing has been changed.
        self._values |= jax.block_until_ready(new)


def _update(rule: UpdateRule, values: Any, grads: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the new values of the variables and slots of an optimizer."""
    params, slots = jax.tree.map(values.__getitem__, (rule.params, rule.slots))
    gradients = jax.tree.map(grads.__getitem__, rule.params)
    updates, slots = rule.tx.update(gradients, slots, params)
    new = jax.tree.leaves((optax.apply_updates(params, updates), slots))
    pairs = zip(jax.tree.leaves((rule.params, rule.slots)), new, strict=True)
    new = {name: x.astype(jnp.result_type(values[name])) for name, x in pairs}
    return {**new, rule.step: values[rule.step] + 1}


class VariableStore:
    """The Variables and optimizers that closures have used, on parameter servers."""

    def __init__(self, ray: Any, servers: Sequence[Any], checkpointer: Any) -> None:
        self._ray, self._servers, self._checkpointer = ray, servers, checkpointer
        self._turns = itertools.cycle(range(len(servers)))
        self._objects: dict[str, Any] = {}  # so that no other gets the id of one
        self._names: dict[int, str] = {}
        # One server; for the counters of an optimizer, all of its servers.
        self._places: dict[str, tuple[int, ...]] = {}
        # The value that each Variable had when it was last equal to the servers'.
        self._known: dict[str, Any] = {}
        self._rules: dict[str, UpdateRule] = {}
        self._lock = threading.RLock()
        self.ended: StrategyError | None = None  # why the training is over

    def name(self, node: Any) -> str:
        """Returns the name of a Variable or an optimizer."""
        with self._lock:
            if id(node) not in self._names:
                name = f"{type(node).__name__}_{len(self._names)}"
                self._names[id(node)], self._objects[name] = name, node
            return self._names[id(node)]

    def place(self, names: Sequence[str]) -> None:
        """Puts variables on the servers that are not there yet, and sends changes."""
        with self._lock:
            for name in names:
                if name not in self._places:
                    self._places[name] = (next(self._turns),)
            every, known = {*self._known, *names}, self._known
            changed = [n for n in every if known.get(n) is not self._value(n)]
            self._send({name: self._places[name] for name in changed}, {})

    def place_optimizer(self, name: str, params: PyTree) -> None:
        """Puts the state of an optimizer on the servers of its parameters, once."""
        with self._lock:
            rule, optimizer = self._rules.get(name), self._objects[name]
            if rule is None or rule.tx is not optimizer.tx:
                self._rules[name] = self._sent_rule(name, optimizer, params)

    def _sent_rule(self, name: str, optimizer: Any, params: PyTree) -> UpdateRule:
        places = self._places

        def slot_of(variable: Any) -> Any:  # Optax has masked some: these have none
            value = _paths.box_value(variable)
            return self.name(variable) if jax.tree.leaves(value) else value

        is_leaf, names = _paths.is_nnx_object, jax.tree.leaves(params)
        slots = jax.tree.map(slot_of, optimizer.opt_state, is_leaf=is_leaf)
        rule = UpdateRule(optimizer.tx, params, slots, self.name(optimizer.step))
        values, state = jax.tree.map(self._value, (params, slots))
        servers = tuple({places[n][0]: None for n in names})
        parts = [{n for n in names if places[n][0] == server} for server in servers]
        if len(parts) > 1 and any(_mixes(rule, values, state, part) for part in parts):
            msg = (
                "the optimizer looks at all parameters at once, as clipping by the "
                f"global norm does, and they are on {len(parts)} parameter servers. "
                "Use num_servers=1; or clip the gradients before optimizer.update."
            )
            raise StrategyError(msg)
        found = find_slots(_paths.flatten(state).leaves, _paths.flatten(values).leaves)
        pairs = zip(jax.tree.leaves(slots), found, strict=True)
        added = {n: places[names[slot.param]] if slot else servers for n, slot in pairs}
        self._send({**added, rule.step: servers}, {name: rule})
        return rule

    def _send(self, places: Any, rules: Mapping[str, UpdateRule]) -> None:
        known, answers = {name: self._value(name) for name in places}, {}
        for server in {server for on in places.values() for server in on}:
            values = {n: np.asarray(x) for n, x in known.items() if server in places[n]}
            answers[server] = self._servers[server].place.remote(values, rules)
        self.wait(answers)
        self._known |= known
        self._places |= places

    def read_back(self) -> None:
        """Gives the Variables on the coordinator the servers' values."""
        for values in self.wait(self.pull(self._known)):
            for name, value in values.items():
                place = getattr(self._known[name], "sharding", None)
                self._known[name] = jax.device_put(value, place)
                set_raw_value(self._objects[name], self._known[name])

    def pull(self, names: Iterable[str]) -> dict[int, Any]:
        """Asks the servers for variables."""
        by_server: dict[int, list[str]] = {}
        for name in names:
            by_server.setdefault(self._places[name][0], []).append(name)
        return {s: self._servers[s].pull.remote(x) for s, x in by_server.items()}

    def wait(self, answers: Mapping[int, Any]) -> list[Any]:
        """Waits for the servers' answers; the death of a server ends the training."""
        results: list[Any] = []
        for server, answer in answers.items() if self.ended is None else ():
            try:
                results.append(self._ray.get(answer))
            except self._ray.exceptions.RayActorError:
                saved, last = self._checkpointer, "none"
                if saved is not None and (step := saved.latest_step()) is not None:
                    last = f"step {step} in {saved.directory}"
                self.ended = StrategyError(
                    f"parameter server {server} of {len(self._servers)} died, and all "
                    f"updates since the last join. The last checkpoint: {last}. Go on "
                    "from that or from the last join with another coordinator."
                )
        if self.ended is not None:
            raise self.ended
        return results

    def _value(self, name: str) -> Any:
        return _paths.box_value(self._objects[name])


def _mixes(rule: UpdateRule, params: PyTree, state: PyTree, part: set[str]) -> bool:
    """Returns whether the update of one part depends on the gradients of another.

    JAX's batching rules know: the gradients of the others are mapped over an axis.
    """
    names, depends = jax.tree.leaves(rule.params), []

    def update(x: jax.Array) -> jax.Array:
        grads = jax.tree.map(
            lambda name, param: jnp.zeros_like(param) + (0 if name in part else x),
            rule.params,
            params,
        )
        updates = jax.tree.leaves(rule.tx.update(grads, state, params)[0])
        pairs = zip(names, updates, strict=True)
        depends.extend(_jax.is_mapped(u, "others") for n, u in pairs if n in part)
        return x

    jax.eval_shape(jax.vmap(update, axis_name="others"), jnp.zeros(1))
    return any(depends)
