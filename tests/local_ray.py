"""Ray's actors in this process, and what may happen to them."""

import threading
import traceback
import types

from meshlayout import _optional, distribute
from meshlayout.distribute.parameter_server.worker import RemoteWorker


class WorkerKilled(BaseException):
    """Ends a worker in the middle of what it does."""


class RayActorError(Exception):
    """An actor is dead."""


class RayTaskError(Exception):
    """A method of an actor raised an exception."""

    def __init__(self, cause, text):
        super().__init__(text)
        self.cause = cause


class LocalRay:
    """Takes the place of the module `ray`.

    Args:
        fault: Called as `fault(when, method, count)` around every call of a worker to a
            server: `when` is "before" or "after", `count` counts the calls of this
            method. It may raise `WorkerKilled`, or kill a server.
    """

    exceptions = types.SimpleNamespace(
        RayActorError=RayActorError, RayTaskError=RayTaskError
    )

    def __init__(self, fault=None):
        self.fault = fault or (lambda when, method, count: None)
        self.servers = []
        self.num_workers_started = 0
        self.num_calls = {}
        self.num_duplicates = 0
        self.thread = threading.local()

    def is_initialized(self):
        return True

    def put(self, value):
        return lambda: value

    def get(self, call):
        return call()

    def kill(self, actor):
        actor.is_dead = True

    def remote(self, cls):
        def make(*args):
            actor = Actor(self, cls(*args))
            self.num_workers_started += cls is RemoteWorker
            self.servers += [actor] * (cls is not RemoteWorker)
            return actor

        return types.SimpleNamespace(
            options=lambda **options: types.SimpleNamespace(remote=make)
        )

    def call(self, actor, method, args):
        is_worker = isinstance(actor.object, RemoteWorker)
        count = self.num_calls.get(method, 0)
        is_counted = getattr(self.thread, "is_worker", False)
        if is_counted:
            self.num_calls[method] = count + 1
            self.fault("before", method, count)
        if actor.is_dead:
            raise RayActorError("dead")
        self.thread.is_worker = is_worker
        try:
            with actor.lock:
                result = getattr(actor.object, method)(*args)
        except WorkerKilled:
            actor.is_dead = True
            raise RayActorError("killed") from None
        except Exception as error:
            raise RayTaskError(error, traceback.format_exc()) from None
        finally:
            self.thread.is_worker = is_counted
        self.num_duplicates += result is False
        if is_counted:
            self.fault("after", method, count)
        return result


class Actor:
    """An object whose methods are called by `actor.method.remote(...)`."""

    def __init__(self, ray, obj):
        self.ray, self.object, self.is_dead = ray, obj, False
        self.lock = threading.RLock()

    def __getattr__(self, method):
        def remote(*args):
            return lambda: self.ray.call(self, method, args)

        return types.SimpleNamespace(remote=remote)


def start(monkeypatch, num_workers=1, num_servers=1, fault=None, **options):
    """Returns a strategy, its coordinator and its Ray."""
    ray = LocalRay(fault)
    monkeypatch.setattr(_optional, "require", lambda *args, **kwargs: ray)
    strategy = distribute.ParameterServerStrategy(num_workers, num_servers)
    return strategy, distribute.ClusterCoordinator(strategy, **options), ray
