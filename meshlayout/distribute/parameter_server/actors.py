"""Parameter servers and workers as Ray actors.

Ray starts processes, finds machines for them, carries arguments and notices deaths.
Actors are not restarted by Ray itself (`max_restarts=0`): a server must not come back
empty, and a worker's closure must not be run again before others know. They are started
anew here, and every call passes the handles of today's servers to the worker.
"""

import dataclasses
import functools
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from meshlayout import _optional
from meshlayout.distribute.parameter_server.closures import Packed
from meshlayout.distribute.parameter_server.servers import (
    ParameterServer,
    ServerIsEmpty,
    Snapshot,
)
from meshlayout.distribute.parameter_server.workers import (
    Outcome,
    ServerLost,
    Worker,
    WorkerLost,
    World,
)


# Payloads of functions that are not called again are dropped, oldest first.
_MOST_PAYLOADS = 64


def _ray() -> Any:
    return _optional.require("ray", extra="ray", purpose="ParameterServerStrategy")


class RayServers:
    """The servers, called through Ray.

    Args:
        handles: The actors, by server.
    """

    def __init__(self, handles: Mapping[int, Any]) -> None:
        self._handles = handles

    def call(self, method: str, arguments: Mapping[int, Any]) -> dict[int, Any]:
        """Calls a method of several servers at a time.

        Raises:
            ServerLost: If one does not answer.
        """
        ray = _ray()
        answers = {
            server: getattr(self._handles[server], method).remote(argument)
            for server, argument in arguments.items()
        }
        results = {}
        for server, answer in answers.items():
            try:
                results[server] = ray.get(answer)
            except (ray.exceptions.RayActorError, ServerIsEmpty) as error:
                raise ServerLost(server) from error
        return results


class WorkerActor(Worker):
    """A worker, which takes from Ray's object store what it lacks."""

    def run_remote(
        self,
        number: int,
        packed: Packed,
        payload: list[Any],
        datasets: Mapping[int, Any],
        world: list[Any],
        handles: Mapping[int, Any],
    ) -> Outcome:
        """As `run`, with references instead of large arguments."""
        get = _ray().get
        if not self.has_program(packed.digest):
            packed = dataclasses.replace(packed, payload=get(payload[0]))
        lazy = {n: functools.partial(get, ref) for n, ref in datasets.items()}
        return self.run(
            number, packed, lazy, self._world(world[0]), RayServers(handles)
        )

    def _world(self, reference: Any) -> World:
        known = getattr(self, "_last_world", None)
        if known is None or known[0] != reference:
            known = self._last_world = (reference, _ray().get(reference))
        return known[1]


class RayCluster:
    """The actors of a coordinator.

    Joins the Ray that the program has started, or starts one on this machine.

    Args:
        num_workers: The number of workers.
        worker_options: Options of workers' actors.
        server_options: Options of servers' actors.
    """

    def __init__(
        self,
        num_workers: int,
        worker_options: Mapping[str, Any],
        server_options: Mapping[str, Any],
    ) -> None:
        ray = _ray()
        if not ray.is_initialized():
            with warnings.catch_warnings():
                # The fork is followed by exec at once, which is harmless.
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called")
                ray.init(include_dashboard=False)
        self._num_workers = num_workers
        self._worker_options = worker_options
        self._server_options = server_options
        self.workers: dict[int, Any] = {}
        self.servers: dict[int, Any] = {}
        self._datasets: list[Any] = []
        self._payloads: OrderedDict[str, Any] = OrderedDict()
        self._world: tuple[World | None, Any] = (None, None)

    def start_server(self, server: int, life: int, snapshot: Snapshot | None) -> None:
        """Starts a server, in place of one that died."""
        ray = _ray()
        if server in self.servers:
            # It may be alive, and cut off from us alone.
            ray.kill(self.servers[server])
        options = _with_environment(self._server_options, {"JAX_PLATFORMS": "cpu"})
        actor = ray.remote(ParameterServer).options(**options)
        self.servers[server] = actor.remote(life, snapshot)

    def start_worker(self, worker: int) -> None:
        """Starts a worker, in place of one that died."""
        actor = (
            _ray()
            .remote(WorkerActor)
            .options(**_with_environment(self._worker_options, {}))
        )
        self.workers[worker] = actor.remote(worker, self._num_workers)

    def add_dataset(self, pickled: bytes) -> int:
        """Keeps a pickled dataset function for the workers; returns its number."""
        self._datasets.append(_ray().put(pickled))
        return len(self._datasets) - 1

    def call(self, method: str, arguments: Mapping[int, Any]) -> dict[int, Any]:
        """Calls a method of several servers; see `RayServers.call`."""
        return RayServers(self.servers).call(method, arguments)

    def run(self, worker: int, number: int, packed: Packed, world: World) -> Outcome:
        """Runs a closure on a worker.

        Raises:
            WorkerLost: If the worker died.
        """
        ray = _ray()
        payload = self._payloads.get(packed.digest)
        if payload is None:
            payload = self._payloads[packed.digest] = ray.put(packed.payload)
            if len(self._payloads) > _MOST_PAYLOADS:
                self._payloads.popitem(last=False)
        if self._world[0] is not world:
            self._world = (world, ray.put(world))
        datasets = {n: self._datasets[n] for n in packed.iterators}
        light = dataclasses.replace(packed, payload=b"")
        try:
            return ray.get(
                self.workers[worker].run_remote.remote(
                    number,
                    light,
                    [payload],
                    datasets,
                    [self._world[1]],
                    dict(self.servers),
                )
            )
        except ray.exceptions.RayActorError as error:
            raise WorkerLost(str(error)[:2000]) from error

    def stop(self) -> None:
        """Ends all actors."""
        ray = _ray()
        if ray.is_initialized():
            for actor in (*self.workers.values(), *self.servers.values()):
                ray.kill(actor)


def _with_environment(
    options: Mapping[str, Any], variables: Mapping[str, str]
) -> dict[str, Any]:
    """Returns options of an actor, with environment variables that the user may set."""
    environment = dict(options.get("runtime_env", {}))
    environment["env_vars"] = {**variables, **environment.get("env_vars", {})}
    # Never restarted, and never called twice, by Ray: see the head of this module.
    fixed = {"max_restarts": 0, "max_task_retries": 0, "runtime_env": environment}
    return {**options, **fixed}
