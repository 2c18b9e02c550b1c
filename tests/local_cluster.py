"""Workers and parameter servers in this process, and what may happen to them."""

import threading

import jax

from meshlayout import _optional, distribute
from meshlayout.distribute.parameter_server.servers import (
    ParameterServer,
    ServerIsEmpty,
)
from meshlayout.distribute.parameter_server.workers import (
    ServerLost,
    Worker,
    WorkerLost,
)


class WorkerKilled(BaseException):
    """Ends a worker in the middle of what it does."""


class LocalCluster:
    """Takes the place of Ray's actors.

    Args:
        num_workers: The number of workers.
        fault: Called as `fault(when, method, count)` around every call of a worker to a
            server: `when` is "before" or "after", `count` counts the calls of this
            method. It may raise `WorkerKilled`, or kill a server.
    """

    def __init__(self, num_workers, fault=None):
        self.num_workers = num_workers
        self.fault = fault or (lambda when, method, count: None)
        self.servers = {}
        self.workers = {}
        self.datasets = []
        self.num_started = {}
        self.num_calls = {}
        self.lock = threading.RLock()

    def start_server(self, server, life, snapshot):
        self.servers[server] = ParameterServer(life, snapshot)

    def kill_server(self, server):
        self.servers[server] = None

    def start_worker(self, worker):
        self.num_started[worker] = self.num_started.get(worker, 0) + 1
        devices = jax.devices()[2 * worker : 2 * worker + 2]
        self.workers[worker] = Worker(worker, self.num_workers, devices)

    def add_dataset(self, pickled):
        self.datasets.append(pickled)
        return len(self.datasets) - 1

    def call(self, method, arguments):
        results = {}
        for server, argument in arguments.items():
            with self.lock:
                actor = self.servers[server]
                if actor is None:
                    raise ServerLost(server)
                try:
                    results[server] = getattr(actor, method)(argument)
                except ServerIsEmpty as error:
                    raise ServerLost(server) from error
        return results

    def run(self, worker, number, packed, world):
        datasets = dict(enumerate(lambda data=data: data for data in self.datasets))
        try:
            return self.workers[worker].run(
                number, packed, datasets, world, _FaultyServers(self)
            )
        except WorkerKilled as killed:
            raise WorkerLost("killed") from killed

    def stop(self):
        pass


class _FaultyServers:
    def __init__(self, cluster):
        self.cluster = cluster

    def call(self, method, arguments):
        results = {}
        for server, argument in arguments.items():
            count = self.cluster.num_calls.get(method, 0)
            self.cluster.num_calls[method] = count + 1
            self.cluster.fault("before", method, count)
            results |= self.cluster.call(method, {server: argument})
            self.cluster.fault("after", method, count)
        return results


def start(monkeypatch, num_workers=1, num_servers=1, fault=None, **options):
    """Returns a strategy, its coordinator and its cluster."""
    monkeypatch.setattr(_optional, "require", lambda *args, **kwargs: None)
    strategy = distribute.ParameterServerStrategy(num_workers, num_servers, **options)
    cluster = LocalCluster(num_workers, fault)
    monkeypatch.setattr(strategy, "_start_cluster", lambda: cluster)
    return strategy, distribute.ClusterCoordinator(strategy), cluster
