"""`ClusterCoordinator`: schedules functions on workers, and keeps training going.

One thread per worker takes closures from a queue and waits for the worker to run them.
A closure whose worker dies goes back to the queue, and another worker takes it; the
servers know which closures they have applied. If a server comes back from a checkpoint,
the closures that it has forgotten are run again, so that in the end each one has been
applied once on every server.
"""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import cloudpickle
import jax

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout.distribute.parameter_server.closure_queue import (
    Closure,
    ClosureQueue,
)
from meshlayout.distribute.parameter_server.closures import (
    Packed,
    VariableTable,
    pack,
)
from meshlayout.distribute.parameter_server.per_worker_data import (
    PerWorkerDataset,
    pickled_dataset,
)
from meshlayout.distribute.parameter_server.placement import VariablePlacement
from meshlayout.distribute.parameter_server.results import (
    RemoteValue,
    Staleness,
    WorkerStaleness,
)
from meshlayout.distribute.parameter_server.servers import ServerCounts
from meshlayout.distribute.parameter_server.strategy import ParameterServerStrategy
from meshlayout.distribute.parameter_server.variable_store import (
    ServerCluster,
    VariableStore,
)
from meshlayout.distribute.parameter_server.workers import (
    Done,
    Failed,
    Lost,
    Outcome,
    ServerLost,
    Unplaced,
    WorkerLost,
    World,
)
from meshlayout.errors import StrategyError


# A closure that was running on so many workers when they died is the likely reason.
_MOST_LOST = 5


class Cluster(ServerCluster, Protocol):
    """The actors of a coordinator."""

    def start_worker(self, worker: int) -> None:
        """Starts a worker, in place of one that died."""
        ...

    def add_dataset(self, pickled: bytes) -> int:
        """Keeps a pickled dataset function for the workers; returns its number."""
        ...

    def run(self, worker: int, number: int, packed: Packed, world: World) -> Outcome:
        """Runs a closure on a worker.

        Raises:
            WorkerLost: If the worker died.
        """
        ...

    def stop(self) -> None:
        """Ends all actors."""
        ...


class ClusterCoordinator:
    """Schedules functions on the workers of a `ParameterServerStrategy`.

    Functions are compiled: what tf.distribute asks of a `tf.function` holds for them.
    Python in them runs while they are compiled; they return arrays, numbers, and trees
    of them. `next(iterator)` takes a worker's own next batch. An optimizer's `update`
    pushes gradients to the parameter servers, which apply them, once per closure.

    Random streams of models (`nnx.Dropout`) differ between closures, and start again
    from the same numbers if a closure is run again. `nnx.BatchStat` variables and
    those with `aggregation="sum"` or `"mean"` get the changes of all closures added,
    as TensorFlow's moving averages do.

    Args:
        strategy: The strategy.

    Raises:
        StrategyError: If it is not a `ParameterServerStrategy`.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        if not isinstance(strategy, ParameterServerStrategy):
            msg = (
                "ClusterCoordinator takes a ParameterServerStrategy, got "
                f"{_checks.shown(strategy)}."
            )
            raise StrategyError(msg)
        if strategy._has_coordinator:
            msg = (
                f"{strategy!r} has a ClusterCoordinator already, which knows its "
                "variables. Use that one, or shut it down first."
            )
            raise StrategyError(msg)
        strategy._has_coordinator = True
        self.strategy = strategy
        self._table = VariableTable()
        self._queue = ClosureQueue()
        self._cluster: Cluster = strategy._start_cluster()
        self._store = VariableStore(
            self._table,
            self._cluster,
            VariablePlacement(strategy.num_servers, strategy.variable_partitioner),
            strategy.max_staleness,
            strategy._checkpointer(),
        )
        self._next_number = 0
        self._last: Packed | None = None
        self._finished: dict[int, tuple[Closure, tuple[int, ...]]] = {}
        self._num_done = 0
        self._staleness = [WorkerStaleness() for _ in range(strategy.num_workers)]
        self._all_staleness = WorkerStaleness()
        self._lock = threading.Lock()
        self._schedule_lock = threading.Lock()
        for worker in range(strategy.num_workers):
            self._cluster.start_worker(worker)
            name = f"worker {worker}"
            threading.Thread(
                target=self._serve, args=(worker,), name=name, daemon=True
            ).start()

    def schedule(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Runs a function on any worker, some time later; returns at once.

        Args:
            fn: The function. It may use NNX models, optimizers and metrics.
            args: Its arguments: arrays, numbers, NNX objects, iterators of per-worker
                datasets, and anything that can be pickled.
            kwargs: Its arguments by name.

        Returns:
            Where its result will be. If a function that was scheduled before has raised
            an exception, this one is cancelled, until `join` has raised that.

        Raises:
            StrategyError: If it is not a function or cannot be sent to a worker, or a
                parameter server is lost.
        """
        if not callable(fn):
            msg = f"schedule: fn must be a function, got {_checks.shown(fn)}."
            raise StrategyError(msg)
        if not isinstance(args, (tuple, list)):
            msg = (
                "schedule: args must be a tuple of fn's arguments, got "
                f"{_checks.shown(args)}. For one argument, write args=(x,)."
            )
            raise StrategyError(msg)
        if kwargs is not None and not isinstance(kwargs, Mapping):
            msg = f"schedule: kwargs must be a dict, got {_checks.shown(kwargs)}."
            raise StrategyError(msg)
        with self._schedule_lock:
            packed = pack(fn, args, kwargs or {}, self._table)
            if self._last is not None and self._last.digest == packed.digest:
                # An epoch that waits in the queue holds one copy of it.
                packed = dataclasses.replace(packed, payload=self._last.payload)
            self._last = packed
            self._with_servers(self._store.send_changes)
            closure = Closure(self._next_number, packed)
            self._queue.put(closure)
            self._next_number += 1
        return closure.result

    def join(self) -> None:
        """Waits until all scheduled functions have run.

        Afterwards, the models, optimizers and metrics on the coordinator have the
        values of the parameter servers.

        Raises:
            Exception: The exception of a function, with the worker's traceback as a
                note. Functions that had not started are cancelled. It is raised once;
                then functions can be scheduled again.
            StrategyError: If a parameter server died without a checkpoint; says what
                is lost.
        """
        self._with_servers(self._store.send_changes)
        self._queue.wait(until=lambda: self._with_servers(self._store.read_back))

    def done(self) -> bool:
        """Returns whether all scheduled functions have run, without waiting.

        Raises:
            Exception: As `join`.
        """
        return self._queue.is_idle()

    def fetch(self, value: PyTree) -> PyTree:
        """Waits for results, and returns them.

        Args:
            value: A `RemoteValue`, or a tree of them.

        Returns:
            The tree with the results in their place.

        Raises:
            Exception: The exception of one of the functions.
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
                anything that yields batches. `context.num_input_pipelines` is the
                number of workers, `context.input_pipeline_id` the worker's number, and
                `context.num_replicas_in_sync` is 1: a worker's step is its own. A
                worker that replaces a dead one calls it again and starts over.

        Returns:
            What `iter` makes an iterator of, to be passed to scheduled functions.

        Raises:
            StrategyError: If it is not such a function, or cannot be sent to a worker.
        """
        pickled = pickled_dataset(dataset_fn)
        return PerWorkerDataset(lambda: self._cluster.add_dataset(pickled))

    @property
    def staleness(self) -> Staleness:
        """How old gradients were when they were applied, so far."""
        with self._lock:
            return Staleness(
                **vars(self._all_staleness), per_worker=tuple(self._staleness)
            )

    def server_counts(self) -> tuple[ServerCounts, ...]:
        """Returns what each parameter server has applied.

        Use this to see that every closure was applied once: `num_applied` is the number
        of closures that changed something there.
        """
        every = dict.fromkeys(range(self.strategy.num_servers))
        counts = self._with_servers(lambda: self._cluster.call("counts", every))
        return tuple(counts[server] for server in sorted(counts))

    def shutdown(self) -> None:
        """Ends workers and servers; what has not run is cancelled.

        Call `join` before. The coordinator cannot be used afterwards.
        """
        self._queue.close()
        self._cluster.stop()
        self.strategy._has_coordinator = False

    def __reduce__(self) -> Any:
        msg = (
            "a scheduled function uses the ClusterCoordinator, which stays where it "
            "is. Pass the function what it needs of it."
        )
        raise StrategyError(msg)

    def __enter__(self) -> "ClusterCoordinator":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    # In the threads of workers.

    def _serve(self, worker: int) -> None:
        while (closure := self._queue.take()) is not None:
            try:
                self._attempt(worker, closure)
            except BaseException as error:
                # Nobody sees what a thread raises: join does.
                self._queue.fail_for_good(error)
                closure.result._set(error=error)
            finally:
                self._queue.release()

    def _attempt(self, worker: int, closure: Closure) -> None:
        """Runs a closure on a worker, and sees to what becomes of it."""
        lives = list(self._store.lives)
        try:
            outcome = self._cluster.run(
                worker, closure.number, closure.packed, self._store.world
            )
        except WorkerLost as lost:
            closure.num_lost += 1
            if closure.num_lost < _MOST_LOST:
                self._queue.put_first(closure)
            else:
                msg = (
                    f"{closure.packed.name} was running on {_MOST_LOST} workers, one "
                    f"after another, when they died. The last one: {lost}"
                )
                self._queue.fail(closure, StrategyError(msg))
            # Others may take the closure meanwhile.
            self._cluster.start_worker(worker)
            return
        if isinstance(outcome, Done):
            self._finish(worker, closure, outcome, lives)
        elif isinstance(outcome, Failed):
            self._queue.fail(closure, _error(outcome, closure, worker))
        elif isinstance(outcome, Lost):
            self._recover(outcome.server, lives[outcome.server])
            self._queue.put_first(closure)
        else:
            self._place(outcome, closure)

    def _place(self, unplaced: Unplaced, closure: Closure) -> None:
        try:
            self._with_servers(lambda: self._store.place(unplaced))
        except StrategyError as error:
            self._queue.fail(closure, error)
        else:
            self._queue.put_first(closure)

    def _finish(
        self, worker: int, closure: Closure, done: Done, lives: list[int]
    ) -> None:
        with self._lock:
            self._staleness[worker] = self._staleness[worker]._after(done)
            self._all_staleness = self._all_staleness._after(done)
            if done.servers and self._store.has_checkpoints:
                self._finished[closure.number] = (closure, done.servers)
            self._num_done += 1
            is_save_due = self._num_done % self.strategy.checkpoint_every == 0
            # A server that has come back meanwhile may have forgotten it.
            is_old = any(lives[s] != self._store.lives[s] for s in done.servers)
            if is_old and self._finished.pop(closure.number, None):
                self._queue.put_first(closure)
        closure.result._set(done.result)
        if is_save_due and self._store.has_checkpoints:
            self._with_servers(self._save)

    def _save(self) -> None:
        self._store.save()
        with self._lock:
            for number, (_, servers) in list(self._finished.items()):
                if self._store.is_saved(number, servers):
                    del self._finished[number]

    def _with_servers(self, call: Callable[[], Any]) -> Any:
        """Calls a function of servers; if one has died, again when it is back."""
        while True:
            lives = list(self._store.lives)
            try:
                return call()
            except ServerLost as lost:
                self._recover(lost.server, lives[lost.server])

    def _recover(self, server: int, life: int) -> None:
        """Brings a server back, and has closures run again that it has forgotten."""
        try:
            was_started = self._store.recover(server, life)
        except StrategyError as error:
            self._queue.fail_for_good(error)
            raise
        if was_started:
            with self._lock:
                forgotten = [
                    closure
                    for number, (closure, servers) in sorted(self._finished.items())
                    if server in servers and not self._store.is_saved(number, (server,))
                ]
                for closure in forgotten:
                    del self._finished[closure.number]
                self._queue.put_first(*forgotten)


def _error(failed: Failed, closure: Closure, worker: int) -> BaseException:
    """Returns the exception of a closure, with the worker's traceback as a note."""
    where = f"{closure.packed.name}, on worker {worker}:\n{failed.text}"
    if failed.error is None:
        return StrategyError(f"an exception that cannot be pickled, in {where}")
    error: BaseException = cloudpickle.loads(failed.error)
    error.add_note(f"In {where}")
    return error
