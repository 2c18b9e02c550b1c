"""`ClusterCoordinator`: schedules functions on workers, and keeps training going.

One thread per worker takes closures from a queue and waits for the worker to run them.
A closure whose worker dies goes back to the queue, and the next free worker takes it;
the servers know which closures they have applied.
"""

import functools
import inspect
import itertools
import queue
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import cloudpickle
import jax

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout.checkpoint import Checkpointer
from meshlayout.distribute.parameter_server.closures import (
    Closure,
    PerWorkerIterator,
    VariableTable,
    pack,
)
from meshlayout.distribute.parameter_server.server import ParameterServer
from meshlayout.distribute.parameter_server.strategy import ParameterServerStrategy
from meshlayout.distribute.parameter_server.variable_store import VariableStore
from meshlayout.distribute.parameter_server.worker import (
    RemoteWorker,
    ServerLost,
    ray_module,
)
from meshlayout.errors import StrategyError


# A closure that was running on so many workers when they died is the likely reason.
_MOST_LOST = 5


class RemoteValue(Future[PyTree]):
    """What a scheduled function returns, once it has run: a future.

    Made by `ClusterCoordinator.schedule`.
    """

    num_lost = 0

    def fetch(self, timeout_s: float | None = None) -> PyTree:
        """Waits for the function, and returns what it returned, as NumPy arrays.

        Raises:
            StrategyError: If it takes longer than `timeout_s`, or was cancelled.
            Exception: The function's own exception, if it raised one.
        """
        if not wait([self], timeout_s).done:
            msg = f"fetch: the function has not finished within {timeout_s:g} s."
            raise StrategyError(msg)
        return self.result()


class PerWorkerDataset:
    """A dataset of which each worker has its own.

    Made by `ClusterCoordinator.create_per_worker_dataset`; `iter` makes an iterator of
    it, to be passed to scheduled functions.
    """

    _numbers = itertools.count()

    def __init__(self, pickled: Any) -> None:
        self._pickled = pickled

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(next(self._numbers), self._pickled)


class ClusterCoordinator:
    """Schedules functions on the workers of a `ParameterServerStrategy`.

    A scheduled function runs on one worker as it is, one operation at a time; what is
    worth compiling goes through `strategy.run(fn, args)`. `next(iterator)` takes a
    worker's own next batch. An optimizer's `update` pushes gradients to the parameter
    servers, which apply them, once per closure.

    Random streams of models (`nnx.Dropout`) differ between closures, and start again
    from the same numbers if a closure is run again. `nnx.BatchStat` variables, metrics,
    and variables with `aggregation="sum"` or `"mean"` get all closures' changes added.

    Args:
        strategy: The strategy.
        checkpointer: The one that saves the models of this training; the error that a
            parameter server died names its last checkpoint.
    """

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self.strategy, self._checkpointer = strategy, checkpointer
        self._ray = ray = ray_module()
        if not ray.is_initialized():
            with warnings.catch_warnings():
                # The fork is followed by exec at once, which is harmless.
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called")
                ray.init(include_dashboard=False)
        self._put = functools.lru_cache(64)(ray.put)
        server = ray.remote(ParameterServer).options(**strategy._server_options)
        self._servers = [server.remote() for _ in range(strategy.num_servers)]
        self._workers: dict[int, Any] = {}
        self._table = VariableTable()
        self._store = VariableStore(self._table, self._servers)
        self._queue = queue.SimpleQueue[tuple[Closure, RemoteValue] | None]()
        self._results: set[RemoteValue] = set()
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._error: tuple[str, BaseException] | None = None
        self._fatal: BaseException | None = None
        for worker in range(strategy.num_workers):
            threading.Thread(target=self._serve, args=(worker,), daemon=True).start()

    def schedule(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Runs a function on any worker, some time later; returns at once.

        Args:
            fn: The function. It may use NNX models, optimizers and metrics, and returns
                arrays, numbers, and trees of them.
            args: Its arguments: arrays, numbers, NNX objects, iterators of per-worker
                datasets, and anything that can be pickled.
            kwargs: Its arguments by name.

        Returns:
            Where its result will be. If a function that was scheduled before has raised
            an exception, this one is cancelled, until `join` has raised that.

        Raises:
            StrategyError: If it cannot be sent to a worker, or a server has died.
        """
        if not callable(fn) or not isinstance(args, (tuple, list)):
            msg = "schedule takes a function and a tuple of its arguments: args=(x,)."
            raise StrategyError(msg)
        with self._lock:
            closure = pack(fn, args, kwargs or {}, self._table)
            self._with_servers(self._store.place, closure.variables)
            servers = {n: self._store.places[n][0] for n in closure.variables}
            number, payload = next(self._numbers), [self._put(closure.payload)]
            closure = closure._replace(number=number, servers=servers, payload=payload)
            result = RemoteValue()
            self._results.add(result)
            self._queue.put((closure, result))
        return result

    def join(self) -> None:
        """Waits until all scheduled functions have run.

        Afterwards, the models, optimizers and metrics on the coordinator have the
        values of the parameter servers.

        Raises:
            Exception: The exception of a function, with the worker's traceback as a
                note. Functions that had not started are cancelled. It is raised once;
                then functions can be scheduled again.
            StrategyError: If a parameter server died; says what is lost, and which
                checkpoint is the last.
        """
        self._with_servers(self._store.send_changes)
        while wait(self._results, 0.5).not_done:  # in parts, so that Ctrl-C ends it
            pass
        self._with_servers(self._store.read_back)
        self._results.clear()
        self._raise_error()

    def done(self) -> bool:
        """Returns whether all scheduled functions have run; raises as `join`."""
        if not all(result.done() for result in self._results):
            return False
        self._raise_error()
        return True

    def fetch(self, value: PyTree) -> PyTree:
        """Waits for the results in a tree of `RemoteValue`s, and returns them.

        Raises:
            Exception: The exception of one of the functions; `join` raises it as well.
        """
        return jax.tree.map(
            lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, value
        )

    def create_per_worker_dataset(
        self, dataset_fn: Callable[..., Any]
    ) -> PerWorkerDataset:
        """Makes a dataset on each worker, by calling a function there.

        Args:
            dataset_fn: Called as `dataset_fn(context)` or `dataset_fn()`; returns
                anything that yields batches. `context.input_pipeline_id` is the
                worker's number. A worker that replaces a dead one calls it anew.

        Returns:
            What `iter` makes an iterator of, to be passed to scheduled functions.
        """
        takes_context = callable(dataset_fn) and _takes_context(dataset_fn)
        names = ("context",) if takes_context else ()
        _checks.function("dataset_fn", dataset_fn, *names, error=StrategyError)
        pickled = cloudpickle.dumps((dataset_fn, takes_context))
        return PerWorkerDataset([self._ray.put(pickled)])

    def shutdown(self) -> None:
        """Ends workers and servers; what has not run is cancelled.

        Call `join` before. The coordinator cannot be used afterwards.
        """
        self._fatal = self._fatal or StrategyError("the coordinator was shut down.")
        for _ in range(self.strategy.num_workers):
            self._queue.put(None)
        for actor in (*self._workers.values(), *self._servers):
            self._ray.kill(actor)

    def __enter__(self) -> "ClusterCoordinator":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    # In the threads of workers.

    def _serve(self, worker: int) -> None:
        self._start(worker)
        while (scheduled := self._queue.get()) is not None:
            closure, result = scheduled
            try:
                result.set_result(self._run(worker, closure))
            except self._ray.exceptions.RayActorError as lost:
                result.num_lost += 1
                if result.num_lost < _MOST_LOST and self._fatal is None:
                    self._queue.put(scheduled)
                else:
                    msg = (
                        f"{closure.name} was running on {result.num_lost} workers, one "
                        f"after another, when they died. The last one: {lost}"
                    )
                    self._fail(closure, result, StrategyError(msg))
                # Others may take the closure meanwhile.
                self._start(worker)
            except BaseException as error:
                self._fail(closure, result, error)

    def _start(self, worker: int) -> None:
        """Starts a worker, in place of one that died, and waits for it."""
        actor = self._ray.remote(RemoteWorker).options(**self.strategy._worker_options)
        for attempt in range(_MOST_LOST if self._fatal is None else 0):
            self._workers[worker] = actor.remote(worker, self.strategy.num_workers)
            try:
                return self._ray.get(self._workers[worker].ping.remote())
            except Exception as error:  # nobody sees what a thread raises: join does
                self._fatal = error if attempt + 1 == _MOST_LOST else self._fatal
        return None

    def _run(self, worker: int, closure: Closure) -> PyTree:
        if self._fatal is not None or self._error is not None:
            name, error = self._error or ("", self._fatal)
            reason = f"{name} raised {type(error).__name__}." if name else str(error)
            msg = f"{closure.name} was cancelled, because {reason}"
            raise StrategyError(msg)
        while True:
            run, placed = self._workers[worker].run, self._store.placed()
            try:
                answer = self._ray.get(run.remote(closure, placed, self._servers))
            except self._ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, ServerLost):
                    raise self._server_lost(error.cause.args[0]) from None
                error.cause.add_note(f"In {closure.name}, on worker {worker}:\n{error}")
                raise error.cause from None
            if not answer[1]:
                return cloudpickle.loads(answer[0])
            for number, params in answer[1].items():
                self._with_servers(self._store.place_optimizer, number, params)

    def _fail(self, closure: Closure, result: RemoteValue, error: Any) -> None:
        self._error = self._error or (closure.name, error)
        result.set_exception(error)

    def _raise_error(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        if self._error is not None:
            (_, error), self._error = self._error, None
            raise error

    def _with_servers(self, call: Callable[..., None], *args: Any) -> None:
        if self._fatal is not None:
            raise self._fatal
        try:
            call(*args)
        except ServerLost as lost:
            raise self._server_lost(lost.args[0]) from None

    def _server_lost(self, server: int) -> BaseException:
        """Ends the training, and returns what says why."""
        last = "No Checkpointer was given to the ClusterCoordinator"
        if (checkpointer := self._checkpointer) is not None:
            step = checkpointer.latest_step()
            what = "none yet" if step is None else f"step {step}"
            last = f"The last checkpoint is {what} in {checkpointer.directory}"
        msg = (
            f"parameter server {server} died. Lost are its values of "
            f"{self._store.contents(server)}, with all updates since the last join, "
            f"whose values the objects on the coordinator still have. {last}. Restore "
            "it, or keep the objects as they are, and go on with another coordinator."
        )
        self._fatal = self._fatal or StrategyError(msg)
        return self._fatal


def _takes_context(function: Callable[..., Any]) -> bool:
    """Returns whether a function needs an argument, or has one that is called so."""
    for name, parameter in inspect.signature(function).parameters.items():
        is_needed = parameter.default is parameter.empty and parameter.kind < 2
        return is_needed or "context" in name
    return False
