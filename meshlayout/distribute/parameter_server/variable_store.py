"""The coordinator's side of the servers: which variable is where, and its value.

Variables go to the servers whole, in turn, when a closure first uses them; an
optimizer's state goes where its parameters are, when it first updates, since only the
call of `update` says which parameters these are. What the user assigns on the
coordinator is sent before the next closure, and `join` reads all back.
"""

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshlayout import _paths
from meshlayout._annotations import PyTree
from meshlayout._host_arrays import host_array
from meshlayout._render import array_text
from meshlayout.distribute.parameter_server.closures import VariableTable
from meshlayout.distribute.parameter_server.server import UpdateRule
from meshlayout.distribute.parameter_server.worker import call
from meshlayout.distribute.variables import set_raw_value
from meshlayout.errors import StrategyError
from meshlayout.layout_map.optimizer_slots import find_slots


# MultiSteps changes nothing until its last step.
_MOST_UPDATES = 100


class VariableStore:
    """The variables of a table, on parameter servers.

    `places` has the servers of each variable: one, but for the counters of an
    optimizer, which are wherever it has a parameter.
    """

    def __init__(self, table: VariableTable, servers: Sequence[Any]) -> None:
        self._table, self._servers = table, servers
        self._turns = itertools.cycle(range(len(servers)))
        self._lock = threading.RLock()
        # The raw value that each Variable had when it was last equal to the servers'.
        self._known: dict[str, Any] = {}
        self.places: dict[str, tuple[int, ...]] = {}
        self._rules: dict[int, UpdateRule] = {}

    def place(self, names: Iterable[str]) -> None:
        """Puts variables on the servers that are not there yet, and sends changes."""
        with self._lock:
            new = [name for name in names if name not in self.places]
            for name in new:
                value = self._raw(name)
                if len(getattr(getattr(value, "sharding", None), "device_set", ())) > 1:
                    msg = (
                        f"{name} is on several devices: it belongs to another strategy "
                        "or mesh. Make it in the scope of the ParameterServerStrategy."
                    )
                    raise StrategyError(msg)
                self.places[name] = (next(self._turns),)
            self._send(new)
            self.send_changes()

    def place_optimizer(self, number: int, params: PyTree) -> None:
        """Puts the state of an optimizer on the servers of its parameters."""
        with self._lock:
            optimizer, name_of = self._table.optimizers[number], self._table.name
            if number in self.placed():
                return
            state, is_leaf = optimizer.opt_state, _paths.is_nnx_object
            slots = jax.tree.map(name_of, state, is_leaf=is_leaf)
            rule = UpdateRule(optimizer.tx, params, slots, name_of(optimizer.step))
            values, state = jax.tree.map(self._raw, (params, slots))
            names, places = jax.tree.leaves(params), self.places
            parts: dict[tuple[int, ...], set[str]] = {}
            for name in names:
                parts.setdefault(places[name], set()).add(name)
            if len(parts) > 1 and _mixes(rule, values, state, parts.values()):
                msg = (
                    "the optimizer looks at all parameters at once, as clipping by the "
                    f"global norm does, and they are on {len(parts)} parameter "
                    "servers, each of which would see its own alone. Use num_servers=1;"
                    " or call optax.clip_by_global_norm on the gradients in the "
                    "closure, before optimizer.update."
                )
                raise StrategyError(msg)
            places[rule.step] = tuple(sorted(sum(parts, ())))
            added = jax.tree.leaves(slots)
            for name, slot in zip(
                added,
                find_slots(_paths.flatten(state).leaves, _paths.flatten(values).leaves),
                strict=True,
            ):
                places[name] = places[names[slot.param] if slot else rule.step]
            self._send([*added, rule.step], {number: rule})
            self._rules[number] = rule

    def placed(self) -> set[int]:
        """Returns the numbers of the optimizers whose state is on the servers."""
        optimizers = self._table.optimizers
        return {n for n, rule in self._rules.items() if optimizers[n].tx is rule.tx}

    def send_changes(self) -> None:
        """Sends what was assigned to Variables on the coordinator since then."""
        with self._lock:
            self._send([n for n, x in self._known.items() if self._raw(n) is not x])

    def read_back(self) -> None:
        """Gives the Variables on the coordinator the servers' values."""
        with self._lock:
            by_server: dict[int, list[str]] = {}
            for name in self._known:
                by_server.setdefault(self.places[name][0], []).append(name)
            for values in call(self._servers, "pull", by_server):
                for name, value in values.items():
                    place = getattr(self._known[name], "sharding", None)
                    self._known[name] = jax.device_put(value, place)
                    set_raw_value(self._table.variables[name], self._known[name])

    def contents(self, server: int) -> str:
        """Returns what messages call the variables of a server."""
        names = sorted(name for name, on in self.places.items() if server in on)
        more = f" and {len(names) - 5} more variables" if len(names) > 5 else ""
        return ", ".join(f"{n} {_text(self._known[n])}" for n in names[:5]) + more

    def _raw(self, name: str) -> Any:
        return _paths.box_value(self._table.variables[name])

    def _send(
        self, names: list[str], rules: dict[int, UpdateRule] | None = None
    ) -> None:
        known = {name: self._raw(name) for name in names}
        contents: dict[int, Any] = {}
        for name, value in known.items():
            for server in self.places[name]:
                values, _ = contents.setdefault(server, ({}, {}))
                values[name] = host_array(value, name)
        for server, (_, parts) in contents.items():
            for number, rule in (rules or {}).items():
                params, slots = jax.tree.map(
                    lambda n, s=server: (
                        n if s in self.places[n] else optax.MaskedNode()
                    ),
                    (rule.params, rule.slots),
                )
                parts[number] = rule._replace(params=params, slots=slots)
        call(self._servers, "place", contents)
        self._known |= known


def _mixes(
    rule: UpdateRule, params: PyTree, state: PyTree, parts: Iterable[set[str]]
) -> bool:
    """Returns whether the update of one part depends on the gradients of another.

    The gradients of the others are made NaN, which shows wherever they have a say.
    """
    update, names = jax.jit(rule.tx.update), jax.tree.leaves(rule.params)

    def updates(part: Iterable[str]) -> Iterator[list[Any]]:
        grad = lambda n, x: jnp.full_like(x, 1 if n in part else jnp.nan)  # noqa: E731
        grads, slots = jax.tree.map(grad, rule.params, params), state
        for _ in range(_MOST_UPDATES):
            new, slots = update(grads, slots, params)
            yield jax.tree.leaves(new)

    for part in parts:
        for plain, poisoned in zip(updates(names), updates(part), strict=True):
            triples = zip(names, plain, poisoned, strict=True)
            if any(n in part and not np.array_equal(x, y) for n, x, y in triples):
                return True
            if any(np.any(x) for x in plain):
                break
    return False


def _text(value: Any) -> str:
    return array_text(np.dtype(jnp.result_type(value)), np.shape(value))
