"""`ClusterCoordinator`: schedules functions on workers, and keeps training going.

One thread per worker takes closures from a queue, has the worker run them, and then has
the servers apply what they change. A worker that dies has changed nothing: its closure
goes back to the queue. Values and gradients go from servers to workers and back by
Ray's references, without passing through the coordinator.
"""

import contextlib
import functools
import inspect
import itertools
import pickle
import queue
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout.checkpoint import Checkpointer
from meshlayout.distribute.parameter_server import servers, workers
from meshlayout.distribute.parameter_server.strategy import ParameterServerStrategy
from meshlayout.errors import StrategyError


# A closure that was running on so many workers when they died is the likely reason.
_MOST_LOST = 5


class RemoteValue(Future[PyTree]):
    """What a scheduled function returns, once it has run: a future."""

    num_lost = 0

    def fetch(self) -> PyTree:
        """Waits for the function; returns NumPy arrays, or raises its exception."""
        return self.result()


class PerWorkerDataset:
    """A dataset of which each worker has its own, or an iterator of it."""

    def __init__(self, dataset_fn: Any, iterators: dict[int, Any]) -> None:
        self._dataset_fn, self._iterators = dataset_fn, iterators
        self._number = len(iterators)
        iterators[self._number] = dataset_fn

    def __iter__(self) -> "PerWorkerDataset":
        return PerWorkerDataset(self._dataset_fn, self._iterators)

    def __next__(self) -> Any:
        msg = "the batches are on the workers: call next in a scheduled function."
        raise StrategyError(msg)

    def __reduce__(self) -> Any:
        return workers.on_worker, ("iterator", self._number)


class ClusterCoordinator(contextlib.AbstractContextManager["ClusterCoordinator"]):
    """Schedules functions on the workers of a `ParameterServerStrategy`.

    A scheduled function runs on one worker, one operation at a time; what is worth
    compiling goes through `strategy.run(fn, args)`. What `optimizer.update` gets is
    applied on the servers, exactly once, when the function has ended; it sees
    parameters as they were when it began. Batch statistics, metrics, and variables with
    `aggregation="sum"` or `"mean"` get the changes of all functions added.

    Args:
        strategy: The strategy, which has one coordinator at a time.
        checkpointer: Whose last checkpoint is named if a parameter server dies.
    """

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        if strategy._coordinator is not None and not strategy._coordinator._store.ended:
            msg = f"{strategy!r} has a ClusterCoordinator: call shutdown() on that one."
            raise StrategyError(msg)
        self.strategy, self._ray = strategy, workers.ray_module()
        strategy._coordinator = self
        if not self._ray.is_initialized():
            with warnings.catch_warnings():
                # The fork is followed by exec at once, which is harmless.
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called")
                self._ray.init(include_dashboard=False)
        # Equal bytes are put once, and so workers know them.
        self._put = functools.lru_cache(workers.MOST_FUNCTIONS)(self._ray.put)
        options, count = strategy._server_options, strategy.num_servers
        actor = self._ray.remote(servers.ParameterServer).options(**options)
        self._servers = [actor.remote() for _ in range(count)]
        self._store = servers.VariableStore(self._ray, self._servers, checkpointer)
        self._workers: dict[int, Any] = {}
        self._iterators: dict[int, Any] = {}
        self._numbers = itertools.count()
        self._queue = queue.Queue[tuple[workers.Closure, RemoteValue] | None]()
        self._failed: BaseException | None = None
        for worker in range(strategy.num_workers):
            threading.Thread(target=self._serve, args=(worker,), daemon=True).start()

    def schedule(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Runs a function on any worker, some time later; returns at once.

        If a function that was scheduled before has raised an exception, this one is
        cancelled, until `join` has raised that.

        Args:
            fn: The function. It may use NNX models, optimizers and metrics.
            args: Its arguments: arrays, numbers, NNX objects, iterators of per-worker
                datasets, and anything that can be pickled.
            kwargs: Its arguments by name.
        """
        if not callable(fn) or not isinstance(args, (tuple, list)):
            msg = "schedule takes a function and a tuple of its arguments: args=(x,)."
            raise StrategyError(msg)
        if type(fn).__module__.partition(".")[0] in ("jax", "jaxlib", "flax"):
            # A jitted function could not draw batches, nor push.
            fn = getattr(fn, "__wrapped__", fn)
        inputs: list[Any] = []

        def apart(leaf: Any) -> Any:
            kinds = (jax.Array, np.ndarray, np.generic, int, float, complex)
            if not isinstance(leaf, kinds) or isinstance(leaf, bool):  # mostly a switch
                return leaf
            inputs.append(leaf)
            return workers.ClosureInput(len(inputs) - 1)

        tree = tuple(args), dict(kwargs or {})
        arguments = jax.tree.map(apart, tree, is_leaf=workers.is_whole)
        name = getattr(fn, "__qualname__", type(fn).__name__)
        note = f"{name} is sent to a worker: make files and locks in dataset functions."
        with _checks.noted(note):
            payload, variables = workers.pickled((fn, arguments), self._store.name)
        self._store.place(variables)
        number, values = next(self._numbers), pickle.dumps(inputs)
        closure = workers.Closure(name, number, self._put(payload), values, variables)
        result = RemoteValue()
        result.set_running_or_notify_cancel()
        self._queue.put((closure, result))
        return result

    def join(self) -> None:
        """Waits until all scheduled functions have run.

        Afterwards, the models, optimizers and metrics on the coordinator have the
        values of the parameter servers.

        Raises:
            Exception: A function's exception, once, with the worker's traceback as a
                note; functions that had not started are cancelled.
            StrategyError: If a parameter server died; names the last checkpoint.
        """
        self._store.place([])
        self._queue.join()
        self._store.read_back()
        self.done()

    def done(self) -> bool:
        """Returns whether all scheduled functions have run; raises as `join`."""
        self._store.wait({})
        if self._queue.unfinished_tasks:
            return False
        error, self._failed = self._failed, None
        if error is not None:
            raise error
        return True

    def fetch(self, value: PyTree) -> PyTree:
        """Waits for the `RemoteValue`s in a tree, and returns their results."""
        return jax.tree.map(
            lambda x: x.fetch() if isinstance(x, RemoteValue) else x, value
        )

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Makes a dataset on each worker, by calling a function there.

        `iter` makes an iterator of it, for scheduled functions. A batch that one has
        taken is used up, also if it then fails.

        Args:
            dataset_fn: Called as `dataset_fn(context)` if it needs an argument, else as
                `dataset_fn()`, by each new worker; returns anything that yields
                batches. `context.input_pipeline_id` is the worker's number.
        """
        takes_context = any(
            x.default is x.empty and x.kind < x.VAR_POSITIONAL
            for x in inspect.signature(dataset_fn).parameters.values()
        )
        put = self._ray.put((dataset_fn, takes_context))
        return PerWorkerDataset(put, self._iterators)

    def shutdown(self) -> None:
        """Ends workers and servers; call `join` before."""
        ended = StrategyError("the coordinator was shut down.")
        self._store.ended = self._store.ended or ended
        for _ in range(self.strategy.num_workers):
            self._queue.put(None)
        for actor in (*self._workers.values(), *self._servers):
            self._ray.kill(actor)

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _serve(self, worker: int) -> None:
        """Has a worker run closures, and starts another when it dies."""
        while (scheduled := self._queue.get()) is not None:
            closure, result = scheduled
            try:
                result.set_result(self._run(worker, closure))
            except BaseException as error:
                is_lost = isinstance(error, self._ray.exceptions.RayActorError)
                if is_lost:
                    del self._workers[worker]
                    result.num_lost += 1
                if is_lost and result.num_lost < _MOST_LOST and not self._store.ended:
                    self._queue.put(scheduled)
                else:
                    self._failed = self._failed or error
                    result.set_exception(error)
            self._queue.task_done()

    def _run(self, worker: int, closure: workers.Closure) -> PyTree:
        store, ray, strategy = self._store, self._ray, self.strategy
        store.wait({})
        if self._failed is not None:
            msg = f"{closure.name} was cancelled: another one raised {self._failed!r}."
            raise StrategyError(msg)
        if worker not in self._workers:
            start = ray.remote(workers.RemoteWorker).options(**strategy._worker_options)
            self._workers[worker] = start.remote(worker, strategy.num_workers)
        pulled = store.pull(closure.variables)
        run = self._workers[worker].run.options(num_returns=2 + len(pulled))
        answers = run.remote(closure, dict(self._iterators), *pulled.values())
        try:
            result, params = ray.get(answers[:2])
            for optimizer, names in params.items():
                store.place_optimizer(optimizer, names)
            pushes = zip(pulled, answers[2:], strict=True)
            store.wait({s: self._servers[s].push.remote(x) for s, x in pushes})
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ray.exceptions.RayActorError):
                store.wait(pulled)  # raises: it is a server that died
            error.cause.add_note(f"In {closure.name}, on worker {worker}:\n{error}")
            raise error.cause from None
        return result
