"""Parameter servers and workers: Ray actors, in processes of their own.

A worker returns each server's changes, so a worker that is killed has changed nothing.
In what is pickled for it, Variables are names, as their values are on the servers (but
for random streams), optimizers have no state, and iterators are numbers.
"""

import functools
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout._paths import box_value, is_nnx_object
from meshlayout.data import InputContext
from meshlayout.distribute.capture import Roots
from meshlayout.distribute.strategy import OneDeviceStrategy
from meshlayout.distribute.variables import aggregation, raw_value, set_raw_value
from meshlayout.errors import StrategyError


# Functions and arguments that a worker keeps, with the programs compiled for them.
MOST_KEPT = 64


def ray_module() -> Any:
    """Returns Ray, if it is installed."""
    return _checks.require("ray", extra="ray", purpose="ParameterServerStrategy")


class ParameterServer:
    """Variables and their optimizers: a Ray actor, which runs one call at a time."""

    def __init__(self) -> None:
        self._values: dict[str, jax.Array] = {}
        self._updates: dict[str, Any] = {}

    def place(self, values: Mapping[str, Any], rules: Mapping[str, Any]) -> None:
        """Stores values of variables, and optimizers with their variables' names."""
        self._values |= {name: jnp.asarray(x) for name, x in values.items()}
        masked = optax.MaskedNode()
        for optimizer, (tx, names) in rules.items():
            names = jax.tree.map(lambda n: n if n in self._values else masked, names)
            self._updates[optimizer] = jax.jit(functools.partial(_update, tx, names))

    def pull(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns variables, all from the same moment."""
        return {name: np.asarray(self._values[name]) for name in names}

    def push(self, push: tuple[Any, dict[str, Any]]) -> None:
        """Applies a closure's changes: gradients for optimizers, and increments."""
        updates, added = push
        new = {name: self._values[name] + x for name, x in added.items()}
        for optimizer, grads in updates:
            new |= self._updates[optimizer](self._values | new, grads)
        # Errors surface here at the latest, before anything has changed.
        self._values |= jax.block_until_ready(new)


def _update(tx: Any, names: Any, values: Any, grads: Any) -> dict[str, Any]:
    """Returns the new values of the variables and slots of an optimizer."""
    param_names, slot_names, step = names
    params, slots = jax.tree.map(values.__getitem__, (param_names, slot_names))
    gradients = jax.tree.map(grads.__getitem__, param_names)
    updates, slots = tx.update(gradients, slots, params)
    new = jax.tree.leaves((optax.apply_updates(params, updates), slots))
    pairs = zip(jax.tree.leaves((param_names, slot_names)), new, strict=True)
    new = {name: x.astype(jnp.result_type(values[name])) for name, x in pairs}
    return {**new, step: values[step] + 1}


class RemoteWorker:
    """Runs closures, as worker `index` of `num_workers`; a Ray actor."""

    def __init__(self, index: int, num_workers: int) -> None:
        self.context = InputContext(num_workers, index, 1)
        # An object sent again is the same, with its Variables: programs are reused.
        self._load = functools.lru_cache(MOST_KEPT)(
            lambda part: pickle.loads(ray_module().get(part))
        )
        self.datasets: Mapping[int, Any] = {}
        self.iterators: dict[int, Any] = {}
        self.random: dict[str, Any] = {}
        self.variables: dict[str, nnx.Variable[Any]] = {}
        self.params: dict[str, PyTree] = {}
        self.grads: dict[tuple[str, int], dict[str, Any]] = {}  # by optimizer and call

    def run(
        self, name: str, number: int, parts: Any, datasets: Any, *pulled: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Runs a function on variables, each dict of them from one server.

        Returns its result, the names of the parameters of each optimizer that has been
        updated here, and a push for each of these servers.
        """
        _worker.set(self)
        self.datasets, self.grads = datasets, {}
        fn, args, kwargs = jax.tree.map(self._load, parts)
        arrays = {n: jnp.asarray(x) for part in pulled for n, x in part.items()}
        for variable, x in self.random.items():
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                # Closures differ, and one that is run again draws the same numbers.
                fold_in = jax.vmap(jax.random.fold_in, in_axes=(0, None))
                x = fold_in(x.ravel(), number).reshape(x.shape)
            arrays[variable] = x
        for variable, x in arrays.items():
            set_raw_value(self.variables[variable], x)
        roots = Roots(fn)
        try:
            with roots.refuse_changes(name):
                result = fn(*args, **kwargs)
        except StopIteration:
            msg = f"{name} asked for a batch, and the worker's dataset has ended: let "
            msg += "the dataset function return one that repeats."
            raise StrategyError(msg) from None
        pushes = [self._push(roots, part, arrays) for part in pulled]
        return jax.device_get(result), self.params, *pushes

    def _push(self, roots: Roots, values: dict[str, Any], arrays: Any) -> Any:
        """Returns a closure's changes to the variables of one server."""
        updates, added = list[Any](), dict[str, Any]()
        for (optimizer, _), grads in self.grads.items():
            own = {n: np.asarray(x) for n, x in grads.items() if n in values}
            updates.extend([(optimizer, own)] if own else [])
        for name, old in values.items():
            new = raw_value(variable := self.variables[name])
            # Flax's transforms give Variables back as new arrays.
            if new is arrays[name] or np.asarray(new).tobytes() == old.tobytes():
                continue
            if aggregation(variable) in (None, "first", "per_replica"):
                msg = f"the closure assigns {roots.path_of(variable)}, as others may. "
                msg += "To add changes up, make it with "
                raise StrategyError(f'{msg}nnx.Variable(x, aggregation="sum").')
            added[name] = np.asarray(new) - old
        return updates, added


_worker: ContextVar[RemoteWorker] = ContextVar("worker")


def iterator(number: int) -> Any:
    """Returns the worker's iterator over a per-worker dataset."""
    worker = _worker.get()
    if number not in worker.iterators:
        dataset_fn, takes_context = ray_module().get(worker.datasets[number])
        worker.iterators[number] = iter(dataset_fn(*[worker.context] * takes_context))
    return worker.iterators[number]


def variable(name: str, kind: Any, metadata: Any, random: Any) -> Any:
    """Returns the Variable of a name, which gets its value before each closure."""
    worker = _worker.get()
    if name not in worker.variables:
        worker.variables[name] = kind.from_metadata(jnp.zeros(()), metadata)
    worker.random |= {} if random is None else {name: random}
    return worker.variables[name]


def pickled(part: Any, name_of: Callable[[Any], str]) -> tuple[bytes, list[str]]:
    """Returns a pickled function or argument, and the names of its variables."""
    file, names = io.BytesIO(), list[str]()
    pickler = ray_module().cloudpickle.Pickler(file)
    reduce_other = pickler.reducer_override

    def reduce(obj: Any) -> Any:
        if isinstance(obj, nnx.metrics.Welford):
            msg = "schedule: closures cannot add up what an nnx.metrics.Welford keeps."
            raise StrategyError(msg)
        if isinstance(obj, nnx.Optimizer):
            return RemoteOptimizer, (name_of(obj), obj.wrt, obj.step)
        if not isinstance(obj, nnx.Variable):
            return reduce_other(obj)
        name, metadata = name_of(obj), dict(obj.get_metadata())
        random = box_value(obj) if isinstance(obj, nnx.RngState) else None
        names.extend([name] if random is None else [])
        return variable, (name, type(obj), metadata, random)

    pickler.reducer_override = reduce
    pickler.dump(part)
    return file.getvalue(), names


@jax.tree_util.register_static
class RemoteOptimizer:
    """The counterpart of an `nnx.Optimizer` on a worker."""

    def __init__(self, name: str, wrt: Any, step: object) -> None:
        self.name, self.wrt, self.step = name, wrt, step

    def update(self, model: PyTree, grads: PyTree) -> None:
        """Records gradients, which the servers apply when the closure has ended."""
        worker = _worker.get()
        own = {id(variable): name for name, variable in worker.variables.items()}
        params, values = nnx.state(model, self.wrt), nnx.state(grads, self.wrt)
        if not own.keys() >= {*map(id, jax.tree.leaves(params, is_leaf=is_nnx_object))}:
            msg = "optimizer.update got copies, as in nnx.jit: write strategy.run."
            raise StrategyError(msg)
        names = jax.tree.map(lambda x: own[id(x)], params, is_leaf=is_nnx_object)
        arrays = map(box_value, jax.tree.leaves(values, is_leaf=is_nnx_object))
        by_name = dict(zip(jax.tree.leaves(names), arrays, strict=True))
        worker.params[self.name] = names
        worker.grads[self.name, len(worker.grads)] = by_name


class WorkerStrategy(OneDeviceStrategy):
    """The counterpart of a `ParameterServerStrategy` on a worker: one replica."""

    def __init__(self) -> None:
        super().__init__(jax.local_devices()[0])

    def _run(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PyTree:
        @functools.wraps(fn)
        def with_grads(*args: PyTree, **kwargs: PyTree) -> Any:
            outer, worker.grads = worker.grads, {}
            try:
                return fn(*args, **kwargs), worker.grads
            finally:
                worker.grads = outer

        worker = _worker.get()
        result, grads = super()._run(with_grads, args, kwargs)
        for (optimizer, _), by_name in grads.items():
            worker.grads[optimizer, len(worker.grads)] = by_name
        return result
