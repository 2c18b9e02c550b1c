"""A worker: runs closures, one at a time, on a mesh of its own devices.

It compiles before it pulls, since a compilation takes seconds, in which other workers
go on. It pulls what the program reads, runs it, and pushes gradients and changes to
every server that has a part of them. A server that finds a push too old sends it back;
the worker then pulls again and computes anew, with the same batch. Each time, that is
because another worker's push was applied, so that the training as a whole moves on.
"""

import contextlib
import pickle
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle
import jax
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout.data import InputContext
from meshlayout.distribute.parameter_server.closures import Packed
from meshlayout.distribute.parameter_server.placement import VariableShards
from meshlayout.distribute.parameter_server.programs import (
    BatchSource,
    ClosureProgram,
    Executable,
    Outputs,
)
from meshlayout.distribute.parameter_server.servers import Arrays, Push, Receipt
from meshlayout.errors import StrategyError


@dataclass(frozen=True)
class World:
    """What workers know of the servers; it changes when variables are placed.

    Attributes:
        shards: Where each variable is.
        params: By the number of an optimizer, the names of its parameters.
        max_staleness: How old a push may be; None for any age.
    """

    shards: Mapping[str, VariableShards] = field(default_factory=dict)
    params: Mapping[int, list[str]] = field(default_factory=dict)
    max_staleness: int | None = None


class Servers(Protocol):
    """The parameter servers, as a worker calls them."""

    def call(self, method: str, arguments: Mapping[int, Any]) -> dict[int, Any]:
        """Calls a method of several servers at a time, with one argument each.

        Raises:
            ServerLost: If one does not answer.
        """
        ...


class ServerLost(Exception):  # noqa: N818 - an event, not a mistake
    """A parameter server died, or has come back empty."""

    def __init__(self, server: int) -> None:
        super().__init__(server)
        self.server = server


class WorkerLost(Exception):  # noqa: N818 - an event, not a mistake
    """A worker died while it ran a closure."""


@dataclass(frozen=True)
class Done:
    """A closure was run, and what it changes has been applied.

    Attributes:
        result: What the function returned.
        staleness: The most pushes that were applied on a server between pull and push;
            None if it pushed nothing.
        num_recomputed: How often it was computed again, as it was too old.
        servers: The servers that it pushed to.
    """

    result: PyTree
    staleness: int | None = None
    num_recomputed: int = 0
    servers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Unplaced:
    """A closure uses variables or optimizers that are not on the servers yet."""

    variables: list[str]
    params: dict[int, PyTree]


@dataclass(frozen=True)
class Lost:
    """A closure was not completed, since a server is gone."""

    server: int


@dataclass(frozen=True)
class Failed:
    """A closure raised an exception.

    Attributes:
        error: The pickled exception; None if it cannot be pickled.
        text: Its traceback.
    """

    error: bytes | None
    text: str

    @classmethod
    def of(cls, error: BaseException) -> "Failed":
        """Describes an exception that is being handled."""
        text = "".join(traceback.format_exception(error))
        with contextlib.suppress(Exception):
            data = cloudpickle.dumps(error)
            pickle.loads(data)  # an exception with a constructor of its own may fail
            return cls(data, text)
        return cls(None, text)


# What a worker answers.
Outcome = Done | Unplaced | Lost | Failed

# Programs of functions that are not called again are dropped, oldest first.
_MOST_PROGRAMS = 32


class Worker:
    """Runs closures.

    Args:
        index: Its number among the workers, from 0.
        num_workers: The number of workers.
        devices: The devices of its mesh; None for all of this process.
    """

    def __init__(
        self, index: int, num_workers: int, devices: list[Any] | None = None
    ) -> None:
        self._index = index
        self._context = InputContext(num_workers, index, 1)
        grid = np.array(jax.devices() if devices is None else devices)
        auto = (jax.sharding.AxisType.Auto,)
        self._mesh = jax.sharding.Mesh(grid, ("batch",), axis_types=auto)
        self._programs: OrderedDict[str, ClosureProgram] = OrderedDict()
        self._sources: dict[int, BatchSource] = {}
        # Values of "per_replica" variables, of all closures.
        self._local: Arrays = {}

    def has_program(self, digest: str) -> bool:
        """Returns whether it has unpickled a closure's function."""
        return digest in self._programs

    def run(
        self,
        number: int,
        closure: Packed,
        datasets: Mapping[int, Callable[[], bytes]],
        world: World,
        servers: Servers,
    ) -> Outcome:
        """Runs a closure, and pushes what it changes.

        Args:
            number: The number of the closure.
            closure: The closure.
            datasets: By the number of an iterator, a function that returns the pickled
                dataset function.
            world: Where variables are.
            servers: The servers.
        """
        try:
            program = self._program(closure)
            for iterator in closure.iterators:
                if iterator not in self._sources:
                    self._sources[iterator] = self._source(datasets[iterator]())
            executable, batches = program.prepare(closure.inputs, self._sources)
            unplaced = _unplaced(executable, world)
            if unplaced is not None:
                return unplaced
            done = self._run(
                number, closure, program, executable, batches, world, servers
            )
        except ServerLost as lost:
            return Lost(lost.server)
        except StopIteration:
            msg = (
                f"{closure.name} asked for a batch on worker {self._index}, where the "
                "dataset has ended. Let the dataset function return one that repeats: "
                "it is not known how many closures a worker will run."
            )
            return Failed.of(StrategyError(msg))
        except Exception as error:
            return Failed.of(error)
        # Only now: until then, a closure that is run again here gets the same batches.
        for iterator, count in executable.counts.items():
            self._sources[iterator].drop(count)
        return done

    def _run(
        self,
        number: int,
        closure: Packed,
        program: ClosureProgram,
        executable: Executable,
        batches: Mapping[int, list[PyTree]],
        world: World,
        servers: Servers,
    ) -> Done:
        num_recomputed = 0
        while True:
            values, versions = _pull(executable.pulled, world, servers)
            outputs = program.run(executable, values, closure.inputs, batches, number)
            pushes = _pushes(number, outputs, versions, world)
            receipts: dict[int, Receipt] = servers.call("push", pushes)
            if all(receipt.status != "stale" for receipt in receipts.values()):
                break
            num_recomputed += 1
        program.keep(outputs)
        applied = [r.staleness for r in receipts.values() if r.status == "applied"]
        return Done(
            outputs.result, max(applied, default=None), num_recomputed, tuple(receipts)
        )

    def _program(self, closure: Packed) -> ClosureProgram:
        program = self._programs.get(closure.digest)
        if program is None:
            program = ClosureProgram(closure.payload, self._mesh, self._local)
            self._programs[closure.digest] = program
            if len(self._programs) > _MOST_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(closure.digest)
        return program

    def _source(self, pickled: bytes) -> BatchSource:
        make, takes_context = cloudpickle.loads(pickled)
        name = getattr(make, "__qualname__", type(make).__name__)
        description = f"a batch of the dataset of {name} on worker {self._index}"
        with _checks.noted(f"in the dataset function {name} on worker {self._index}"):
            dataset = make(*[self._context] * takes_context)
            try:
                return BatchSource(iter(dataset), description)
            except TypeError:
                msg = (
                    f"the dataset function {name} must return something that can be "
                    f"iterated, got {_checks.shown(dataset)}."
                )
                raise StrategyError(msg) from None


def _unplaced(executable: Executable, world: World) -> Unplaced | None:
    variables = [name for name in executable.touched if name not in world.shards]
    params = {
        number: names
        for number, names in executable.params.items()
        if world.params.get(number) != jax.tree.leaves(names)
    }
    return Unplaced(variables, params) if variables or params else None


def _pull(
    names: list[str], world: World, servers: Servers
) -> tuple[dict[str, Any], dict[int, Any]]:
    """Returns the values of variables, and the version of each server."""
    by_server: dict[int, list[str]] = {}
    for name in names:
        for server in world.shards[name].reads():
            by_server.setdefault(server, []).append(name)
    pulled = servers.call("pull", by_server)
    values = {
        name: world.shards[name].join(
            {s: pulled[s].values[name] for s in world.shards[name].reads()}
        )
        for name in names
    }
    return values, {server: answer.version for server, answer in pulled.items()}


def _pushes(
    number: int, outputs: Outputs, versions: Mapping[int, Any], world: World
) -> dict[int, Push]:
    """Divides what a closure changes over the servers that have it."""
    pushes: dict[int, Push] = {}

    def divided(name: str, value: np.ndarray[Any, Any]) -> Iterator[tuple[Push, Any]]:
        for server, part in world.shards[name].split(value).items():
            if server not in pushes:
                version = versions.get(server)
                pushes[server] = Push(number, version, {}, {}, {}, world.max_staleness)
            yield pushes[server], part

    for optimizer, grads in outputs.grads.items():
        for name, value in grads.items():
            for push, part in divided(name, value):
                push.grads.setdefault(optimizer, {})[name] = part
    for name, value in outputs.added.items():
        for push, part in divided(name, value):
            push.added[name] = part
    for name, value in outputs.assigned.items():
        for push, part in divided(name, value):
            push.assigned[name] = part
    return pushes
