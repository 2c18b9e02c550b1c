"""Ray's actors in this process, and what may happen to them."""

import functools
import threading
import traceback
import types

import cloudpickle

from meshlayout import _checks, distribute
from meshlayout.distribute.parameter_server.actors import RemoteWorker


class WorkerKilled(BaseException):
    """Ends a worker in the middle of what it does."""


class RayActorError(Exception):
    """An actor is dead."""


class RayTaskError(Exception):
    """A method of an actor raised an exception."""

    def __init__(self, cause):
        super().__init__("".join(traceback.format_exception(cause)))
        self.cause = cause


class RayTaskActorError(RayTaskError, RayActorError):
    """What a method was to get is of an actor that is dead."""


class Reference:
    """A value that is computed when it is first asked for."""

    def __init__(self, compute):
        self.get = functools.cache(compute)


class LocalRay:
    """Takes the place of the module `ray`.

    `fault("before", count)` and `fault("after", count)`, around each closure that a
    worker runs, may raise `WorkerKilled`.
    """

    exceptions = types.SimpleNamespace(
        RayActorError=RayActorError, RayTaskError=RayTaskError
    )
    cloudpickle = cloudpickle

    def __init__(self, fault=None):
        self.fault = fault or (lambda when, count: None)
        self.servers, self.num_workers_started, self.num_closures = [], 0, 0

    def put(self, value):
        return Reference(lambda: value)

    def get(self, value):
        return [x.get() for x in value] if isinstance(value, list) else value.get()

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
        try:
            args = [x.get() if isinstance(x, Reference) else x for x in args]
        except RayActorError as error:
            raise RayTaskActorError(error) from None
        is_worker = isinstance(actor.object, RemoteWorker)
        fault = self.fault if is_worker else lambda when, count: None
        count, self.num_closures = self.num_closures, self.num_closures + is_worker
        try:
            with actor.lock:
                fault("before", count)
                if actor.is_dead:
                    raise RayActorError("dead")
                result = getattr(actor.object, method)(*args)
                fault("after", count)
                return result
        except WorkerKilled:
            actor.is_dead = True
            raise RayActorError("killed") from None
        except RayActorError:
            raise
        except Exception as error:
            raise RayTaskError(error) from None


class Actor:
    """An object whose methods are called by `actor.method.remote(...)`."""

    def __init__(self, ray, obj):
        self.ray, self.object, self.is_dead = ray, obj, False
        self.lock = threading.RLock()

    def __getattr__(self, method):
        def remote(*args):
            return Reference(lambda: self.ray.call(self, method, args))

        def remote_parts(num_returns, *args):
            whole = remote(*args)
            return [Reference(lambda i=i: whole.get()[i]) for i in range(num_returns)]

        def options(num_returns):
            parts = functools.partial(remote_parts, num_returns)
            return types.SimpleNamespace(remote=parts)

        return types.SimpleNamespace(remote=remote, options=options)


def start(monkeypatch, num_workers=1, num_servers=1, fault=None, **options):
    """Returns a strategy, its coordinator and its Ray."""
    ray = LocalRay(fault)
    monkeypatch.setattr(_checks, "require", lambda *args, **kwargs: ray)
    strategy = distribute.ParameterServerStrategy(num_workers, num_servers)
    return strategy, distribute.ClusterCoordinator(strategy, **options), ray
