"""A worker: runs closures, one at a time, on the values that it is given.

It returns what each server is to change: a worker that is killed changed nothing, and
its closure can run on another. A function that was sent before is the same object, with
the same Variables, so that what has been compiled for it is used again.

In a pickled closure, a Variable is a name: its value is on the servers (not that of a
random stream), an optimizer has no Optax transformation and no state, and an iterator
of a per-worker dataset is a number.
"""

import functools
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshlayout import _optional, _paths
from meshlayout._annotations import PyTree
from meshlayout.data import InputContext
from meshlayout.distribute.capture import Roots
from meshlayout.distribute.strategy import OneDeviceStrategy
from meshlayout.distribute.variables import aggregation, raw_value, set_raw_value
from meshlayout.errors import StrategyError


# Functions that a worker keeps, with the programs that were compiled for them.
MOST_FUNCTIONS = 64


def ray_module() -> Any:
    """Returns Ray, if it is installed."""
    return _optional.require("ray", extra="ray", purpose="ParameterServerStrategy")


class Closure(NamedTuple):
    """A pickled function with its arguments: of these, arrays and numbers apart."""

    name: str
    number: int
    payload: Any
    inputs: bytes
    variables: list[str]


class ClosureInput(int):
    """Stands for one of the arrays and numbers among the arguments of a closure."""


def is_whole(argument: object) -> bool:
    """Returns whether an argument is one thing, and no tree of arrays."""
    return _paths.is_nnx_object(argument) or isinstance(argument, Iterator)


class RemoteWorker:
    """Runs closures, as worker `index` of `num_workers`; a Ray actor."""

    def __init__(self, index: int, num_workers: int) -> None:
        self._index, self._context = index, InputContext(num_workers, index, 1)
        self._load = functools.lru_cache(MOST_FUNCTIONS)(
            lambda payload: pickle.loads(ray_module().get(payload))
        )
        self._datasets: Mapping[int, Any] = {}
        self._iterators: dict[int, Any] = {}
        self._random: dict[str, Any] = {}
        self.variables: dict[str, nnx.Variable[Any]] = {}
        self.params: dict[str, PyTree] = {}
        self.grads: dict[tuple[str, int], dict[str, Any]] = {}  # by optimizer and call

    def run(
        self, closure: Closure, datasets: Mapping[int, Any], *pulled: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Runs a closure on variables, each dict of them from one server.

        Returns its result, the names of the parameters of each optimizer that it
        updated, and a push for each of these servers.
        """
        _worker.set(self)
        self._datasets, self.grads = datasets, {}
        fn, arguments = self._load(closure.payload)
        inputs = pickle.loads(closure.inputs)
        args, kwargs = jax.tree.map(
            lambda x: inputs[x] if isinstance(x, ClosureInput) else x,
            arguments,
            is_leaf=is_whole,
        )
        arrays = {n: jnp.asarray(x) for part in pulled for n, x in part.items()}
        for name, x in self._random.items():
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                # Closures differ, and one that is run again draws the same numbers.
                fold_in = jax.vmap(jax.random.fold_in, in_axes=(0, None))
                x = fold_in(x.ravel(), closure.number).reshape(x.shape)
            arrays[name] = x
        for name, x in arrays.items():
            set_raw_value(self.variables[name], x)
        roots = Roots(fn)
        try:
            with roots.refuse_appends(closure.name):
                result = fn(*args, **kwargs)
        except StopIteration:
            msg = (
                f"{closure.name} asked for a batch on worker {self._index}, where the "
                "dataset has ended: let the dataset function return one that repeats."
            )
            raise StrategyError(msg) from None
        pushes = [self._push(roots, part, arrays) for part in pulled]
        params = {optimizer: self.params[optimizer] for optimizer, _ in self.grads}
        return jax.device_get(result), params, *pushes

    def _push(self, roots: Roots, values: dict[str, Any], arrays: Any) -> Any:
        """Returns a closure's changes to the variables of one server."""
        push: Any = [], {}
        for (optimizer, _), grads in self.grads.items():
            own = {n: np.asarray(x) for n, x in grads.items() if n in values}
            push[0].extend([(optimizer, own)] if own else [])
        for name, old in values.items():
            new = raw_value(variable := self.variables[name])
            # Flax's transforms give Variables back as new arrays.
            if new is arrays[name] or np.asarray(new).tobytes() == old.tobytes():
                continue
            if aggregation(variable) in (None, "first", "per_replica"):
                msg = (
                    f"the closure assigns {roots.path_of(variable)}, as others may. To "
                    'add changes up, make it with nnx.Variable(x, aggregation="sum").'
                )
                raise StrategyError(msg)
            push[1][name] = np.asarray(new) - old
        return push

    def iterator(self, number: int) -> Any:
        """Returns this worker's iterator over a per-worker dataset."""
        if number not in self._iterators:
            dataset_fn, takes_context = ray_module().get(self._datasets[number])
            batches = dataset_fn(*[self._context] * takes_context)
            self._iterators[number] = iter(batches)
        return self._iterators[number]

    def variable(self, name: str, kind: Any, metadata: Any, random: Any) -> Any:
        """Returns the Variable of a name, which gets its value before each closure."""
        if name not in self.variables:
            self.variables[name] = kind.from_metadata(jnp.zeros(()), metadata)
        self._random |= {} if random is None else {name: random}
        return self.variables[name]


_worker: ContextVar[RemoteWorker] = ContextVar("worker")


def on_worker(method: str, *args: Any) -> Any:
    """Calls a method of the worker: so Variables and iterators are pickled."""
    return getattr(_worker.get(), method)(*args)


def pickled(closure: PyTree, name_of: Callable[[Any], str]) -> tuple[bytes, list[str]]:
    """Returns a pickled closure, and the names of the variables in it."""
    file, names = io.BytesIO(), list[str]()
    pickler = ray_module().cloudpickle.Pickler(file)
    reduce_other = pickler.reducer_override

    def reduce(obj: Any) -> Any:
        if isinstance(obj, nnx.metrics.Welford):
            msg = "schedule: closures cannot add up what an nnx.metrics.Welford keeps."
            raise StrategyError(msg)
        if isinstance(obj, nnx.Optimizer):
            model = vars(obj).get("model")
            return RemoteOptimizer, (name_of(obj), obj.wrt, obj.step, model)
        if not isinstance(obj, nnx.Variable):
            return reduce_other(obj)
        name, metadata = name_of(obj), dict(obj.get_metadata())
        random = _paths.box_value(obj) if isinstance(obj, nnx.RngState) else None
        names.extend([name] if random is None else [])
        return on_worker, ("variable", name, type(obj), metadata, random)

    pickler.reducer_override = reduce
    pickler.dump(closure)
    return file.getvalue(), names


@jax.tree_util.register_static
class RemoteOptimizer:
    """An `nnx.Optimizer` on a worker; `model` is that of an `nnx.ModelAndOptimizer`."""

    def __init__(self, name: str, wrt: Any, step: object, model: PyTree) -> None:
        self.name, self.wrt, self.step, self.model = name, wrt, step, model

    def update(self, *args: Any) -> None:
        """Hands gradients over, for the servers to apply when the closure has ended."""
        model, grads = args if self.model is None else (self.model, *args)
        worker, state = _worker.get(), nnx.state(model, self.wrt)
        own = {id(variable): name for name, variable in worker.variables.items()}
        params = jax.tree.map(lambda x: own.get(id(x), ""), state, is_leaf=is_whole)
        names, values = jax.tree.leaves(params), nnx.state(grads, self.wrt)
        if "" in names:
            msg = "optimizer.update got copies, as in nnx.jit: compile by strategy.run."
            raise StrategyError(msg)
        leaves = jax.tree.leaves(values, is_leaf=is_whole)
        arrays = [raw_value(x) if is_whole(x) else x for x in leaves]
        worker.params[self.name] = params
        by_name = dict(zip(names, arrays, strict=True))
        worker.grads[self.name, len(worker.grads)] = by_name


class WorkerStrategy(OneDeviceStrategy):
    """What a `ParameterServerStrategy` is on a worker: one replica, on one device."""

    def __init__(self) -> None:
        super().__init__(jax.local_devices()[0])

    def _run(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PyTree:
        result, grads = super()._run(functools.partial(_with_grads, fn), args, kwargs)
        worker = _worker.get()
        for (optimizer, _), by_name in grads.items():
            worker.grads[optimizer, len(worker.grads)] = by_name
        return result


def _with_grads(fn: Callable[..., PyTree], /, *args: PyTree, **kwargs: PyTree) -> Any:
    """Returns gradients as results, too: so they leave a compiled program."""
    worker = _worker.get()
    outer, worker.grads = worker.grads, {}
    try:
        return fn(*args, **kwargs), worker.grads
    finally:
        worker.grads = outer
