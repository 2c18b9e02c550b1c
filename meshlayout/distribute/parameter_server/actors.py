"""Parameter servers and workers as Ray actors.

Ray starts processes, finds machines for them, carries arguments and notices deaths.
Actors are not restarted by Ray itself: a server must not come back empty, and a
worker's closure must not be run again before others know.
"""

import dataclasses
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from meshlayout import _optional
from meshlayout.distribute.parameter_server.closures import Closure
from meshlayout.distribute.parameter_server.servers import ParameterServer
from meshlayout.distribute.parameter_server.worker import (
    Outcome,
    ServerLost,
    Worker,
    WorkerLost,
)


# Payloads of functions that are not scheduled again are dropped, oldest first.
_MOST_PAYLOADS = 64


def _ray() -> Any:
    return _optional.require("ray", extra="ray", purpose="ParameterServerStrategy")


class RayServers:
    """The servers, called through Ray."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def call(self, method: str, arguments: Mapping[int, Any]) -> dict[int, Any]:
        """Calls a method of several servers at a time."""
        ray = _ray()
        answers = {
            server: getattr(self._handles[server], method).remote(argument)
            for server, argument in arguments.items()
        }
        results = {}
        for server, answer in answers.items():
            try:
                results[server] = ray.get(answer)
            except ray.exceptions.RayActorError as error:
                raise ServerLost(server) from error
        return results


class WorkerActor(Worker):
    """A worker, which takes from Ray's object store what it lacks."""

    def run_remote(
        self,
        closure: Closure,
        payload: list[Any],
        datasets: Mapping[int, Any],
        placed: set[int],
        handles: list[Any],
    ) -> Outcome:
        """As `run`, with references instead of large arguments."""
        get = _ray().get
        if not self.has_function(closure.digest):
            closure = dataclasses.replace(closure, payload=get(payload[0]))
        servers = RayServers(handles)
        return self.run(closure, lambda n: get(datasets[n]), placed, servers)


class RayCluster:
    """The actors of a coordinator, in the Ray of the program, or one of its own."""

    def __init__(
        self,
        num_workers: int,
        num_servers: int,
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
        self._worker = ray.remote(WorkerActor).options(**_options(worker_options, {}))
        server = ray.remote(ParameterServer).options(
            **_options(server_options, {"JAX_PLATFORMS": "cpu"})
        )
        self.servers = [server.remote() for _ in range(num_servers)]
        self.workers: dict[int, Any] = {}
        self._datasets: list[Any] = []
        self._payloads: OrderedDict[str, Any] = OrderedDict()

    def start_worker(self, worker: int) -> None:
        """Starts a worker, in place of one that died, and waits for it."""
        self.workers[worker] = self._worker.remote(worker, self._num_workers)
        _ray().get(self.workers[worker].has_function.remote(""))

    def add_dataset(self, pickled: bytes) -> int:
        """Keeps a pickled dataset function for the workers; returns its number."""
        self._datasets.append(_ray().put(pickled))
        return len(self._datasets) - 1

    def call(self, method: str, arguments: Mapping[int, Any]) -> dict[int, Any]:
        """Calls a method of several servers at a time."""
        return RayServers(self.servers).call(method, arguments)

    def run(self, worker: int, closure: Closure, placed: set[int]) -> Outcome:
        """Runs a closure on a worker; raises `WorkerLost` if it died."""
        ray = _ray()
        payload = self._payloads.get(closure.digest)
        if payload is None:
            payload = self._payloads[closure.digest] = ray.put(closure.payload)
            if len(self._payloads) > _MOST_PAYLOADS:
                self._payloads.popitem(last=False)
        datasets = {n: self._datasets[n] for n in closure.iterators}
        light = dataclasses.replace(closure, payload=b"")
        answer = self.workers[worker].run_remote.remote(
            light, [payload], datasets, placed, self.servers
        )
        try:
            return ray.get(answer)
        except ray.exceptions.RayActorError as error:
            raise WorkerLost(str(error)[:2000]) from error

    def stop(self) -> None:
        """Ends all actors."""
        ray = _ray()
        if ray.is_initialized():
            for actor in (*self.workers.values(), *self.servers):
                ray.kill(actor)


def _options(
    options: Mapping[str, Any], variables: Mapping[str, str]
) -> dict[str, Any]:
    """Returns options of an actor, with environment variables that the user may set."""
    environment = dict(options.get("runtime_env", {}))
    environment["env_vars"] = {**variables, **environment.get("env_vars", {})}
    fixed = {"max_restarts": 0, "max_task_retries": 0, "runtime_env": environment}
    return {**options, **fixed}
