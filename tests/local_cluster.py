"""Workers and parameter servers in this process, and what may happen to them."""

import threading

from meshlayout import _optional, distribute
from meshlayout.distribute.parameter_server.servers import ParameterServer
from meshlayout.distribute.parameter_server.worker import (
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
        num_servers: The number of servers.
        fault: Called as `fault(when, method, count)` around every call of a worker to a
            server: `when` is "before" or "after", `count` counts the calls of this
            method. It may raise `WorkerKilled`, or kill a server.
    """

    def __init__(self, num_workers, num_servers, fault=None):
        self.num_workers = num_workers
        self.fault = fault or (lambda when, method, count: None)
        self.servers = [ParameterServer() for _ in range(num_servers)]
        self.workers = {}
        self.datasets = []
        self.num_started = {}
        self.num_calls = {}
        self.num_duplicates = 0
        self.lock = threading.RLock()

    def kill_server(self, server):
        self.servers[server] = None

    def start_worker(self, worker):
        self.num_started[worker] = self.num_started.get(worker, 0) + 1
        self.workers[worker] = Worker(worker, self.num_workers)

    def add_dataset(self, pickled):
        self.datasets.append(pickled)
        return len(self.datasets) - 1

    def call(self, method, arguments):
        results = {}
        for server, argument in arguments.items():
            with self.lock:
                if self.servers[server] is None:
                    raise ServerLost(server)
                results[server] = getattr(self.servers[server], method)(argument)
                self.num_duplicates += results[server] is False
        return results

    def run(self, worker, closure, placed):
        try:
            return self.workers[worker].run(
                closure, self.datasets.__getitem__, placed, _FaultyServers(self)
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
    strategy = distribute.ParameterServerStrategy(num_workers, num_servers)
    cluster = LocalCluster(num_workers, num_servers, fault)
    monkeypatch.setattr(strategy, "_start_cluster", lambda: cluster)
    return strategy, distribute.ClusterCoordinator(strategy, **options), cluster
