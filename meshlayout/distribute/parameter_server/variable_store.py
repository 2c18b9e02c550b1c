"""The coordinator's side of the servers: what is on them, and how they come back.

Variables are placed when a closure first uses them, and an optimizer's state when a
closure first updates by it, since only the call of `update` says for which parameters
it is. Between closures, the objects on the coordinator and the servers are kept equal:
what the user assigned is sent before the next closure, and `join` reads all back.
"""

import threading
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np

from meshlayout import _paths
from meshlayout._annotations import PyTree
from meshlayout._render import array_text
from meshlayout.checkpoint import Checkpointer
from meshlayout.distribute.parameter_server.closures import VariableTable
from meshlayout.distribute.parameter_server.placement import (
    VariablePlacement,
    VariableShards,
)
from meshlayout.distribute.parameter_server.reach import Reach, trace_optimizer
from meshlayout.distribute.parameter_server.servers import (
    AppliedClosures,
    Contents,
    Snapshot,
    UpdateRule,
)
from meshlayout.distribute.parameter_server.workers import Servers, Unplaced, World
from meshlayout.distribute.variables import Variables
from meshlayout.errors import StrategyError


class ServerCluster(Servers, Protocol):
    """The servers, as the coordinator starts them."""

    def start_server(self, server: int, life: int, snapshot: Snapshot | None) -> None:
        """Starts a server, in place of one that died."""
        ...


class VariableStore:
    """Variables on parameter servers.

    Args:
        table: The names of the coordinator's Variables.
        servers: The servers.
        placement: Where variables are.
        max_staleness: How old a push may be.
        checkpointer: Keeps what a server needs to come back; None for nothing.

    Attributes:
        world: What workers must know.
        lives: How often each server has been started.
    """

    def __init__(
        self,
        table: VariableTable,
        servers: ServerCluster,
        placement: VariablePlacement,
        max_staleness: int | None,
        checkpointer: Checkpointer | None,
    ) -> None:
        self._table = table
        self._servers = servers
        self._placement = placement
        self._checkpointer = checkpointer
        self._rules: dict[int, dict[int, UpdateRule]] = {
            server: {} for server in range(placement.num_servers)
        }
        self._params: dict[int, list[str]] = {}
        # The raw value that each Variable had when it was last equal to the servers'.
        self._known: dict[str, Any] = {}
        self._saved: dict[int, AppliedClosures] = {}
        self._num_saves = 0
        self._max_staleness = max_staleness
        self.world = World(max_staleness=max_staleness)
        self.lives = [0] * placement.num_servers
        self.lock = threading.RLock()
        for server in range(placement.num_servers):
            servers.start_server(server, 0, None)

    @property
    def has_checkpoints(self) -> bool:
        """Whether a server that dies can come back."""
        return self._checkpointer is not None

    def place(self, unplaced: Unplaced) -> None:
        """Puts variables and optimizers on the servers that a closure needs.

        Raises:
            StrategyError: If an optimizer looks at more than a server would have.
        """
        with self.lock:
            params = {
                number: names
                for number, names in unplaced.params.items()
                if number not in self._params
            }
            self._check_same_params(unplaced.params)
            names = [x for x in unplaced.variables if x not in self.world.shards]
            rules: dict[int, dict[int, UpdateRule]] = {}
            try:
                for name in names:
                    value = self._local(name)
                    self._placement.add(name, value.shape, value.dtype)
                for number, tree in params.items():
                    for server, rule in self._rules_of(number, tree).items():
                        rules.setdefault(server, {})[number] = rule
                        names += rule.names
                self._send(list(dict.fromkeys(names)), rules)
            except Exception:
                self._placement.shards = dict(self.world.shards)
                raise
            self._note_equal(names)
            for server, by_number in rules.items():
                self._rules[server] |= by_number
            self._params |= {n: jax.tree.leaves(tree) for n, tree in params.items()}
            self._renew_world()
            self.save()

    def send_changes(self) -> None:
        """Sends what was assigned to Variables on the coordinator since then.

        Raises:
            StrategyError: If a Variable has another shape, or an optimizer another
                transformation than when it was placed.
        """
        with self.lock:
            self._check_transformations()
            changed = [
                name
                for name, value in self._known.items()
                if _paths.box_value(self._table.variables[name]) is not value
            ]
            for name in changed:
                self._check_shape(name)
            if changed:
                self._send(changed, {})
                self.save()
                # Not before: a server that dies here comes back without the change.
                self._note_equal(changed)

    def read_back(self) -> None:
        """Gives the Variables on the coordinator the servers' values."""
        with self.lock:
            names = list(self._known)
            if not names:
                return
            by_server = {
                server: on_server
                for server in range(self._placement.num_servers)
                if (on_server := self._placement.names_on(server))
            }
            pulled = self._servers.call("pull", by_server)
            values = []
            for name in names:
                shards = self._placement.shards[name]
                parts = {s: pulled[s].values[name] for s in shards.rows}
                values.append(_like(self._known[name], shards.join(parts)))
            variables = [(name, self._table.variables[name]) for name in names]
            Variables(variables).set(values)
            self._known = dict(zip(names, values, strict=True))

    def save(self) -> None:
        """Saves all servers, if there are checkpoints."""
        if self._checkpointer is None:
            return
        with self.lock:
            every = dict.fromkeys(range(self._placement.num_servers))
            snapshots: dict[int, Snapshot] = self._servers.call("snapshot", every)
            state = {
                f"server_{server}": {
                    "variables": snapshot.values,
                    "applied": np.array([snapshot.num_applied, *snapshot.applied]),
                }
                for server, snapshot in snapshots.items()
            }
            self._num_saves += 1
            self._checkpointer.save(self._num_saves, state, force=True)
            self._checkpointer.wait()
            self._saved = {
                server: AppliedClosures.of(list(snapshot.applied))
                for server, snapshot in snapshots.items()
            }

    def is_saved(self, closure: int, servers: tuple[int, ...]) -> bool:
        """Returns whether what a closure changed is in the last checkpoint."""
        return all(closure in self._saved.get(server, ()) for server in servers)

    def recover(self, server: int, life: int) -> bool:
        """Starts a dead server again from its last checkpoint.

        Args:
            server: The server.
            life: The life in which it died; another thread may have been faster.

        Returns:
            Whether it was started now.

        Raises:
            StrategyError: If there is no checkpoint; says what is lost.
        """
        with self.lock:
            if self.lives[server] != life:
                return False
            self.lives[server] += 1
            names = self._placement.names_on(server)
            if names and self._checkpointer is None:
                raise StrategyError(self._loss(server))
            snapshot = self._restored(server)
            self._servers.start_server(server, self.lives[server], snapshot)
            # If it died while it was being saved for the first time with a variable,
            # that still has its first value.
            new = {
                name: self._placement.shards[name].split(self._local(name))[server]
                for name in names
                if name not in snapshot.values
            }
            contents = Contents(new, self._rules[server])
            self._servers.call("place", {server: contents})
            return True

    def _restored(self, server: int) -> Snapshot:
        """Returns what the last checkpoint has of a server, which may be nothing."""
        if self._checkpointer is None or server not in self._saved:
            return Snapshot({})
        state = self._checkpointer.restore_numpy()[f"server_{server}"]
        num_applied, *applied = state["applied"].tolist()
        return Snapshot(state["variables"], num_applied, tuple(applied))

    def _loss(self, server: int) -> str:
        names = self._placement.names_on(server)
        texts = []
        for name in names[:5]:
            shards = self._placement.shards[name]
            ranges = shards.rows[server]
            rows = ", ".join(f"{a}:{b}" for a, b in ranges or ())
            text = f"{name} {array_text(np.dtype(shards.dtype), shards.shape)}"
            texts.append(f"{text} (rows {rows})" if rows else text)
        more = f" and {len(names) - 5} more variables" if len(names) > 5 else ""
        return (
            f"parameter server {server} died, and there is no checkpoint of it. Lost "
            f"are its values of {', '.join(texts)}{more}, with all updates since the "
            "last join, whose values the objects on the coordinator still have. With "
            "checkpoint_dir, a server that dies comes back."
        )

    def _rules_of(self, number: int, params: PyTree) -> dict[int, UpdateRule]:
        """Places an optimizer's state, and returns its rule on each server."""
        optimizer = self._table.optimizers[number]
        slots = jax.tree.map(
            self._table.name, optimizer.opt_state, is_leaf=_paths.is_nnx_object
        )
        step = self._table.name(optimizer.step)
        placement = self._placement
        names = jax.tree.leaves(params)
        trace = trace_optimizer(
            optimizer.tx,
            jax.tree.map(self._abstract, params),
            jax.tree.map(self._abstract, slots),
        )
        of_params = [placement.shards[name] for name in names]
        servers = sorted({server for shards in of_params for server in shards.rows})
        self._check_reach(trace.reach, names, servers)
        for name, (owner, has_its_rows) in zip(
            jax.tree.leaves(slots), trace.slots, strict=True
        ):
            value = self._local(name)
            like = None if owner is None else of_params[owner]
            if like is not None and (has_its_rows or not like.is_divided):
                placement.add_like(name, value.shape, value.dtype, like)
            else:
                placement.add_copies(name, value.shape, value.dtype, servers)
        placement.add_copies(step, (), self._local(step).dtype, servers)
        rules = {}
        for server in servers:
            absent = {
                name: (shards.shape, shards.dtype)
                for name in (*names, *jax.tree.leaves(slots))
                if server not in (shards := placement.shards[name]).rows
            }
            rules[server] = UpdateRule(optimizer.tx, params, slots, step, absent)
            if any(shards.is_divided for shards in of_params):
                self._check_operations(rules[server], server, trace.operations)
        return rules

    def _check_reach(self, reach: Reach, names: list[str], servers: list[int]) -> None:
        shards = self._placement.shards
        divided = [name for name in names if shards[name].is_divided]
        if reach is Reach.TREE and len(servers) > 1:
            msg = (
                "the optimizer looks at all parameters at once, as clipping by the "
                f"global norm does, and they are on {len(servers)} parameter servers, "
                "each of which would see its own alone. Use num_servers=1; or call "
                "optax.clip_by_global_norm on the gradients in the closure, before "
                "optimizer.update."
            )
            raise StrategyError(msg)
        if reach is Reach.VARIABLE and divided:
            msg = (
                "the optimizer looks at whole parameters, as LAMB and Adafactor do, "
                f"and the rows of {divided[0]} are divided over {len(servers)} "
                "parameter servers. Leave variable_partitioner out, or use "
                "num_servers=1."
            )
            raise StrategyError(msg)

    def _check_operations(
        self, rule: UpdateRule, server: int, operations: tuple[str, ...]
    ) -> None:
        """Refuses optimizers that do something else for other shapes."""

        def part(name: str) -> jax.ShapeDtypeStruct:
            shards = self._placement.shards[name]
            is_absent = name in rule.absent
            shape = shards.shape if is_absent else shards.part_shape(server)
            return jax.ShapeDtypeStruct(shape, shards.dtype)

        params, slots = (jax.tree.map(part, x) for x in (rule.params, rule.slots))
        if trace_optimizer(rule.tx, params, slots).operations != operations:
            msg = (
                "the optimizer decides by the shapes of parameters what to do, and on "
                f"parameter server {server} some have fewer rows. Use num_servers=1."
            )
            raise StrategyError(msg)

    def _check_same_params(self, params: Mapping[int, PyTree]) -> None:
        for number, tree in params.items():
            before = self._params.get(number)
            if before is not None and before != jax.tree.leaves(tree):
                msg = (
                    "an optimizer was used to update other parameters than before, for "
                    "which it has no state. Make an nnx.Optimizer for each model."
                )
                raise StrategyError(msg)

    def _check_transformations(self) -> None:
        for by_number in self._rules.values():
            for number, rule in by_number.items():
                if self._table.optimizers[number].tx is not rule.tx:
                    msg = (
                        "the Optax transformation of an optimizer was replaced, and "
                        "the parameter servers have the state of the former one. Make "
                        "another nnx.Optimizer."
                    )
                    raise StrategyError(msg)

    def _check_shape(self, name: str) -> None:
        placed, now = self._placement.shards[name], self._abstract(name)
        if (placed.shape, placed.dtype) != (now.shape, now.dtype):
            texts = [array_text(np.dtype(x.dtype), x.shape) for x in (placed, now)]
            msg = (
                f"{name} was placed on the parameter servers as {texts[0]}, and is now "
                f"{texts[1]}. Make another model and optimizer."
            )
            raise StrategyError(msg)

    def _abstract(self, name: str) -> jax.ShapeDtypeStruct:
        value = self._local(name)
        return jax.ShapeDtypeStruct(value.shape, value.dtype)

    def _local(self, name: str) -> np.ndarray[Any, Any]:
        """Returns the value that a Variable has on the coordinator."""
        value = np.asarray(_paths.box_value(self._table.variables[name]))
        return value.astype(jax.dtypes.canonicalize_dtype(value.dtype))

    def _send(
        self, names: list[str], rules: Mapping[int, Mapping[int, UpdateRule]]
    ) -> None:
        values: dict[int, dict[str, Any]] = {server: {} for server in rules}
        for name in names:
            parts = self._placement.shards[name].split(self._local(name))
            for server, part in parts.items():
                values.setdefault(server, {})[name] = part
        contents = {s: Contents(v, rules.get(s, {})) for s, v in values.items()}
        self._servers.call("place", contents)

    def _note_equal(self, names: list[str]) -> None:
        for name in names:
            self._known[name] = _paths.box_value(self._table.variables[name])

    def _renew_world(self) -> None:
        shards: dict[str, VariableShards] = dict(self._placement.shards)
        self.world = World(shards, dict(self._params), self._max_staleness)


def _like(before: Any, value: np.ndarray[Any, Any]) -> Any:
    """Returns a value in the place of another one, on its device."""
    if isinstance(before, jax.Array):
        return jax.device_put(value, before.sharding)
    return jax.numpy.asarray(value)
