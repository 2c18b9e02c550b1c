"""`ParameterServerStrategy`, and the `ClusterCoordinator` that trains with it.

One thread per worker makes it run closures, whose changes the servers then apply.
Values and gradients travel as Ray references, not through the coordinator.
"""

import contextlib
import functools
import inspect
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshlayout import _checks, _jax, _paths
from meshlayout._annotations import Leaf, PyTree
from meshlayout.checkpoint import Checkpointer
from meshlayout.distribute.parameter_server import actors
from meshlayout.distribute.strategy import OneDeviceStrategy
from meshlayout.distribute.variables import set_raw_value
from meshlayout.errors import StrategyError
from meshlayout.layout_map.optimizer_slots import find_slots


class ParameterServerStrategy(OneDeviceStrategy):
    """Keeps variables on parameter servers; workers train without waiting.

    Use it with a `ClusterCoordinator`. Workers and servers are actors in the cluster
    that `ray.init` joined, or on this machine. It needs the extra `ray`.

    Args:
        num_workers: The number of workers.
        num_servers: The number of parameter servers, which get variables in turn.
        worker_options: Options of a worker's Ray actor, such as `{"num_gpus": 1}`.
    """

    def __init__(
        self,
        num_workers: int,
        num_servers: int = 1,
        *,
        worker_options: Mapping[str, Any] | None = None,
    ) -> None:
        context: Any = {"where": type(self).__name__, "error": StrategyError}
        self.num_workers = _checks.count("num_workers", num_workers, **context)
        self.num_servers = _checks.count("num_servers", num_servers, **context)
        actors.ray_module()  # refuses, if it is not installed
        self._worker_options = dict(worker_options or {})
        super().__init__(jax.local_devices()[0])  # where the coordinator's objects are

    def _run(self, fn: Any, args: PyTree, kwargs: PyTree) -> NoReturn:
        msg = "run was called on the coordinator: call it in a scheduled function."
        raise StrategyError(msg)

    def __reduce__(self) -> Any:
        return actors.WorkerStrategy, ()


class RemoteValue(Future[PyTree]):
    """The future result of a scheduled function."""

    lives = 5  # a function that ran on so many workers that died is given up

    def fetch(self) -> PyTree:
        """Waits for the function, and returns NumPy arrays or raises its exception."""
        return self.result()


class PerWorkerDataset:
    """A dataset that each worker makes for itself, or an iterator over it."""

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
        return actors.iterator, (self._number,)


@_checks.user_call
class ClusterCoordinator(contextlib.AbstractContextManager["ClusterCoordinator"]):
    """Schedules functions on the workers of a `ParameterServerStrategy`.

    A scheduled function runs on one worker, one operation at a time; `strategy.run(fn,
    args)` in it compiles. When the function has ended, the servers apply exactly once
    the gradients passed to `optimizer.update`, and the changes to metrics, batch
    statistics, and variables with `aggregation="sum"` or `"mean"`.

    Args:
        strategy: The strategy.
        checkpointer: If a parameter server dies, the error names its last checkpoint.
    """

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        if not isinstance(strategy, ParameterServerStrategy):
            fact = "ClusterCoordinator takes ParameterServerStrategy, got"
            raise StrategyError(f"{fact} {strategy!r}, which needs none: call its run.")
        self.strategy, self._ray = strategy, actors.ray_module()
        # Equal bytes are put once, so workers recognize them.
        self._put = functools.lru_cache(actors.MOST_KEPT)(self._ray.put)
        on_cpu = {"env_vars": {"JAX_PLATFORMS": "cpu"}}
        start = self._ray.remote(actors.ParameterServer).options(runtime_env=on_cpu)
        self._servers = [start.remote() for _ in range(strategy.num_servers)]
        self._store = VariableStore(self._ray, self._servers, checkpointer)
        self._workers: dict[int, Any] = {}
        self._iterators: dict[int, Any] = {}
        self._numbers = itertools.count()
        self._queue = queue.Queue[Any]()
        self._failed: BaseException | None = None
        for worker in range(strategy.num_workers):
            threading.Thread(target=self._serve, args=(worker,), daemon=True).start()

    def schedule(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Schedules a function to run on any worker; returns at once.

        Args:
            fn: The function. It may use NNX models, optimizers and metrics.
            args: Its arguments: NNX objects, iterators of per-worker datasets, arrays,
                and anything that can be pickled.
            kwargs: Its arguments by name.
        """
        variables: list[str] = []

        def sent(part: Any) -> Any:
            payload, names = actors.pickled(part, self._store.name)
            variables.extend(names)
            return self._put(payload)

        named = {name: sent(x) for name, x in (kwargs or {}).items()}
        parts = sent(fn), [sent(x) for x in args], named
        self._store.place(variables)
        name = getattr(fn, "__qualname__", type(fn).__name__)
        result, number = RemoteValue(), next(self._numbers)
        result.set_running_or_notify_cancel()
        self._queue.put((name, number, parts, [*dict.fromkeys(variables)], result))
        return result

    def join(self) -> None:
        """Waits for all scheduled functions, then updates the local objects.

        Raises:
            Exception: The first exception of a function, once, with the worker's
                traceback as a note; functions that have not started are cancelled.
            StrategyError: If a parameter server died; names the last checkpoint.
        """
        self._store.place([])
        self._queue.join()
        self._store.read_back()
        self.done()

    def done(self) -> bool:
        """Returns whether all scheduled functions have run; raises like `join`."""
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
        """Makes a dataset on each worker; pass `iter(dataset)` to scheduled functions.

        Args:
            dataset_fn: Returns an iterable of batches. If it takes an argument, that is
                a context whose `input_pipeline_id` is the worker's number.
        """
        parameters = inspect.signature(dataset_fn).parameters.values()
        takes_context = any(x.default is x.empty for x in parameters)
        put = self._ray.put((dataset_fn, takes_context))
        return PerWorkerDataset(put, self._iterators)

    def shutdown(self) -> None:
        """Ends workers and servers; call `join` first."""
        ended = StrategyError("the coordinator was shut down.")
        self._store.ended = self._store.ended or ended
        for _ in range(self.strategy.num_workers):
            self._queue.put(None)
        for actor in (*self._workers.values(), *self._servers):
            self._ray.kill(actor)

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _serve(self, worker: int) -> None:
        """Runs closures on a worker, and starts another one if it dies."""
        while (scheduled := self._queue.get()) is not None:
            *closure, result = scheduled
            try:
                result.set_result(self._run(worker, *closure))
            except BaseException as error:
                is_lost = isinstance(error, self._ray.exceptions.RayActorError)
                if is_lost:
                    del self._workers[worker]
                    result.lives -= 1
                if is_lost and result.lives and not self._store.ended:
                    self._queue.put(scheduled)
                else:
                    self._failed = self._failed or error
                    result.set_exception(error)
            self._queue.task_done()

    def _run(self, worker: int, name: str, number: int, parts: Any, used: Any) -> Any:
        store, ray, strategy = self._store, self._ray, self.strategy
        store.wait({})
        if self._failed is not None:
            msg = f"{name} was cancelled: another one raised {self._failed!r}."
            raise StrategyError(msg)
        if worker not in self._workers:
            start = ray.remote(actors.RemoteWorker).options(**strategy._worker_options)
            self._workers[worker] = start.remote(worker, strategy.num_workers)
        pulled = store.pull(used)
        run = self._workers[worker].run.options(num_returns=2 + len(pulled))
        answers = run.remote(name, number, parts, {**self._iterators}, *pulled.values())
        try:
            result, params = ray.get(answers[:2])
            for optimizer, names in params.items():
                store.place_optimizer(optimizer, names)
            pushes = zip(pulled, answers[2:], strict=True)
            store.wait({s: self._servers[s].push.remote(x) for s, x in pushes})
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ray.exceptions.RayActorError):
                store.wait(pulled)  # raises: it is a server that died
            error.cause.add_note(f"In {name}, on worker {worker}:\n{error}")
            raise error.cause from None
        return result


class VariableStore:
    """The Variables and optimizers that closures have used, on parameter servers."""

    def __init__(self, ray: Any, servers: Sequence[Any], checkpointer: Any) -> None:
        self._ray, self._servers, self._checkpointer = ray, servers, checkpointer
        self._objects: dict[str, Any] = {}  # so that no other gets the id of one
        self._names: dict[int, str] = {}
        # One server; for the counters of an optimizer, all of its servers.
        self._places: dict[str, tuple[int, ...]] = {}
        # The value of each Variable when it last agreed with the servers.
        self._known: dict[str, Any] = {}
        self._placed: dict[str, optax.GradientTransformation] = {}  # by optimizer
        self._lock = threading.RLock()
        self.ended: StrategyError | None = None  # why the training is over

    def name(self, node: Any) -> str:
        """Returns the name of a Variable or an optimizer."""
        with self._lock:
            new = f"{type(node).__name__}_{len(self._names)}"
            name = self._names.setdefault(id(node), new)
            self._objects[name] = node
            return name

    def place(self, names: Sequence[str]) -> None:
        """Puts variables on the servers that are not there yet, and sends changes."""
        with self._lock:
            for name in names:
                turn = len(self._places) % len(self._servers)
                self._places.setdefault(name, (turn,))
            every, known = {*self._known, *names}, self._known
            changed = [n for n in every if known.get(n) is not self._value(n)]
            self._send({name: self._places[name] for name in changed}, {})

    def place_optimizer(self, name: str, params: PyTree) -> None:
        """Puts the state of an optimizer on the servers of its parameters, once."""
        optimizer, places = self._objects[name], self._places

        def slot_of(variable: Any) -> Any:  # Optax has masked some: these have none
            value = _paths.box_value(variable)
            return self.name(variable) if jax.tree.leaves(value) else value

        with self._lock:
            if self._placed.get(name) is optimizer.tx:
                return
            is_leaf, names = _paths.is_nnx_object, jax.tree.leaves(params)
            slots = jax.tree.map(slot_of, optimizer.opt_state, is_leaf=is_leaf)
            values, state = jax.tree.map(self._value, (params, slots))
            servers = tuple({places[n][0]: None for n in names})
            parts = [{n for n in names if places[n][0] == server} for server in servers]
            trees = params, values, state
            if len(parts) > 1 and any(_mixes(optimizer.tx, *trees, x) for x in parts):
                raise StrategyError(
                    "the optimizer looks at all parameters at once, as clipping by the "
                    f"global norm does, and they are on {len(parts)} servers. Use "
                    "num_servers=1; or clip the gradients before optimizer.update."
                )
            leaves = (_paths.flatten(tree).leaves for tree in (state, values))
            pairs = zip(jax.tree.leaves(slots), find_slots(*leaves), strict=True)
            added = {n: places[names[x.param]] if x else servers for n, x in pairs}
            step = self.name(optimizer.step)
            rules = {name: (optimizer.tx, (params, slots, step))}
            self._send({**added, step: servers}, rules)
            self._placed[name] = optimizer.tx

    def _send(self, places: Any, rules: Mapping[str, Any]) -> None:
        known, answers = {name: self._value(name) for name in places}, {}
        for server in {server for on in places.values() for server in on}:
            values = {n: np.asarray(x) for n, x in known.items() if server in places[n]}
            answers[server] = self._servers[server].place.remote(values, rules)
        self.wait(answers)
        self._known |= known
        self._places |= places

    def read_back(self) -> None:
        """Gives the Variables on the coordinator the servers' values."""
        for values in self.wait(self.pull(self._known)):
            for name, value in values.items():
                place = getattr(self._known[name], "sharding", None)
                self._known[name] = jax.device_put(value, place)
                set_raw_value(self._objects[name], self._known[name])

    def pull(self, names: Iterable[str]) -> dict[int, Any]:
        """Asks the servers for variables."""
        by_server: dict[int, list[str]] = {}
        for name in names:
            by_server.setdefault(self._places[name][0], []).append(name)
        return {s: self._servers[s].pull.remote(x) for s, x in by_server.items()}

    def wait(self, answers: Mapping[int, Any]) -> list[Any]:
        """Waits for the servers' answers; the death of a server ends the training."""
        results: list[Any] = []
        for server, answer in answers.items() if self.ended is None else ():
            try:
                results.append(self._ray.get(answer))
            except self._ray.exceptions.RayActorError:
                saved, last = self._checkpointer, "none"
                if saved is not None and (step := saved.latest_step()) is not None:
                    last = f"step {step} in {saved.directory}"
                self.ended = StrategyError(
                    f"parameter server {server} of {len(self._servers)} died, and all "
                    f"updates since the last join. The last checkpoint: {last}. Go on "
                    "from that or from the last join with another coordinator."
                )
        if self.ended is not None:
            raise self.ended
        return results

    def _value(self, name: str) -> Any:
        return _paths.box_value(self._objects[name])


def _mixes(tx: Any, names: Any, params: Any, state: Any, part: set[str]) -> bool:
    """Returns whether the update of one part depends on the gradients of another.

    JAX's batching rules tell, as the gradients of the others are mapped over an axis.
    """
    depends: list[bool] = []

    def update(other: jax.Array) -> jax.Array:
        def grad(name: str, param: Leaf) -> jax.Array:
            return jnp.zeros_like(param) + (0 if name in part else other)

        updates, _ = tx.update(jax.tree.map(grad, names, params), state, params)
        pairs = zip(*map(jax.tree.leaves, (names, updates)), strict=True)
        depends.extend(_jax.is_mapped(x, "others") for n, x in pairs if n in part)
        return other

    jax.eval_shape(jax.vmap(update, axis_name="others"), jnp.zeros(1))
    return any(depends)
