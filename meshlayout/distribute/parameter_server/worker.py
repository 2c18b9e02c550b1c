"""A worker: runs closures, one at a time.

It pulls the variables that a closure uses, calls its function, and pushes gradients and
changes to every server that has a part of them. All closures share its Variables, one
per name, and a function that was sent before is the same object, so that what has been
compiled for it is used again.
"""

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshlayout import _checks, _optional, _paths
from meshlayout._annotations import PyTree
from meshlayout.data import InputContext
from meshlayout.distribute.captured import refuse_appends
from meshlayout.distribute.parameter_server.closures import Closure, ClosureInput
from meshlayout.distribute.parameter_server.pushes import Pushes, RemoteOptimizer
from meshlayout.distribute.parameter_server.server import Push
from meshlayout.distribute.variables import set_raw_value
from meshlayout.errors import StrategyError


_OBJECTS = (nnx.Pytree, nnx.Variable, RemoteOptimizer)


class ServerLost(Exception):  # noqa: N818 - an event, not a mistake
    """A parameter server died; its number is the argument."""


def call(
    servers: Sequence[Any], method: str, arguments: Mapping[int, Any]
) -> dict[int, Any]:
    """Calls a method of several servers at a time, with a tuple of arguments each."""
    ray = _optional.require("ray", extra="ray", purpose="ParameterServerStrategy")
    answers = {s: getattr(servers[s], method).remote(*x) for s, x in arguments.items()}
    results = {}
    for server, answer in answers.items():
        try:
            results[server] = ray.get(answer)
        except ray.exceptions.RayActorError as error:
            raise ServerLost(server) from error
    return results


class Worker:
    """Runs closures, as worker `index` of `num_workers`; an actor."""

    def __init__(self, index: int, num_workers: int) -> None:
        self._index = index
        self._context = InputContext(num_workers, index, 1)
        self._variables: dict[str, nnx.Variable[Any]] = {}
        self._roles: dict[str, str | None] = {}
        self._own: set[str] = set()  # "per_replica" variables that were pulled once
        self._iterators: dict[int, Any] = {}
        self._functions: dict[str, Any] = {}
        self._params: dict[int, PyTree] = {}
        self._unpushed: tuple[int, bytes, dict[int, Push], set[int]] | None = None

    def ping(self) -> None:
        """Shows that the worker has started."""

    def run(
        self, closure: Closure, placed: set[int], servers: Sequence[Any]
    ) -> tuple[bytes, dict[int, PyTree]]:
        """Runs a closure, and pushes what it changes.

        Returns what the function returned, pickled, and the parameters of optimizers
        whose state is to be `placed` on the servers first. The closure is then sent
        here again, where its gradients are kept.
        """
        if self._unpushed is None or self._unpushed[0] != closure.number:
            try:
                self._unpushed = self._compute(closure, servers)
            except StopIteration:
                msg = (
                    f"{closure.name} asked for a batch on worker {self._index}, where "
                    "the dataset has ended. Let the dataset function return one that "
                    "repeats: it is not known how many closures a worker will run."
                )
                raise StrategyError(msg) from None
        _, result, pushes, optimizers = self._unpushed
        if not optimizers <= placed:
            return result, {n: self._params[n] for n in optimizers - placed}
        call(servers, "push", {s: (push,) for s, push in pushes.items()})
        self._unpushed = None
        return result, {}

    def _compute(
        self, closure: Closure, servers: Sequence[Any]
    ) -> tuple[int, bytes, dict[int, Push], set[int]]:
        ray = _optional.require("ray", extra="ray", purpose="ParameterServerStrategy")
        for number, (dataset,) in closure.datasets.items():
            if number not in self._iterators:
                self._iterators[number] = self._iterator(ray.get(dataset))
        if closure.digest not in self._functions:
            unpickler = pickle.Unpickler(io.BytesIO(ray.get(closure.payload[0])))
            unpickler.persistent_load = self._load  # pyright: ignore
            self._functions[closure.digest] = unpickler.load()
        fn, *arguments = self._functions[closure.digest]
        inputs, random = pickle.loads(closure.values)
        args, kwargs = jax.tree.map(
            lambda x: inputs[x.index] if isinstance(x, ClosureInput) else x,
            arguments,
            is_leaf=lambda x: isinstance(x, (ClosureInput, Iterator, *_OBJECTS)),
        )
        self._draw(closure.number, random)
        before = self._pull(closure.servers, servers)
        try:
            with (
                refuse_appends(fn, closure.name),
                Pushes(self._variables, self._params) as handed_over,
            ):
                result = fn(*args, **kwargs)
            grads = handed_over.grads
            pushes = self._pushes(closure, grads, before)
            result = jax.tree.map(_on_host, result, is_leaf=_is_object)
            return closure.number, cloudpickle.dumps(result), pushes, set(grads)
        except BaseException:
            # Variables of this worker alone are as if the closure had not run.
            for name in self._own & before.keys():
                self._set(name, before[name])
            raise

    def _value(self, name: str) -> Any:
        return _paths.box_value(self._variables[name])

    def _load(self, pid: Any) -> Any:
        """Returns what stands for a reference on this worker."""
        if isinstance(pid, int):
            return self._iterators[pid]
        if pid.name not in self._variables:
            variable = pid.kind.from_metadata(jnp.zeros(()), pid.metadata)
            self._variables[pid.name], self._roles[pid.name] = variable, pid.role
        return self._variables[pid.name]

    def _draw(self, number: int, random: Mapping[str, jax.Array]) -> None:
        """Gives random streams the values that they have in this closure."""
        for name, x in random.items():
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                # Closures differ, and one that is run again draws the same numbers.
                keys = [jax.random.fold_in(key, number) for key in x.ravel()]
                x = jnp.stack(keys).reshape(x.shape)
            set_raw_value(self._variables[name], x)

    def _pull(
        self, places: Mapping[str, int], servers: Sequence[Any]
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Gives Variables the servers' values, and returns all values."""
        own = {
            name: np.asarray(self._value(name)) for name in self._own & places.keys()
        }
        by_server: dict[int, tuple[list[str]]] = {}
        for name, server in places.items():
            if name not in own:
                by_server.setdefault(server, ([],))[0].append(name)
        pulled = call(servers, "pull", by_server).values()
        values = {name: x for by_name in pulled for name, x in by_name.items()}
        for name, value in values.items():
            self._set(name, value)
            if self._roles[name] == "per_replica":
                self._own.add(name)
        return own | values

    def _set(self, name: str, value: np.ndarray[Any, Any]) -> None:
        set_raw_value(self._variables[name], jnp.asarray(value))

    def _pushes(
        self,
        closure: Closure,
        grads: Mapping[int, Mapping[str, jax.Array]],
        before: Mapping[str, np.ndarray[Any, Any]],
    ) -> dict[int, Push]:
        """Divides what a closure changes over the servers."""
        pushes: dict[int, Push] = {}

        def push(name: str) -> Push:
            return pushes.setdefault(closure.servers[name], Push(closure.number))

        for optimizer, by_name in grads.items():
            for name, grad in by_name.items():
                push(name).grads.setdefault(optimizer, {})[name] = np.asarray(grad)
        for name, old in before.items():
            role, new = self._roles[name], np.asarray(self._value(name))
            # By value: Flax's transforms give Variables back as new arrays.
            is_same = np.array_equal(old, new, equal_nan=old.dtype.kind in "fc")
            if is_same or role == "per_replica":
                continue
            if role is None:
                msg = (
                    f"the closure changes {name} without an nnx.Optimizer, and the "
                    "changes of several workers would get lost. Make it with "
                    'nnx.Variable(x, aggregation="sum") to add them up, or "first" to '
                    "keep the last value."
                )
                raise StrategyError(msg)
            if role == "first":
                push(name).assigned[name] = new
            else:
                push(name).added[name] = new - old
        return pushes

    def _iterator(self, pickled: bytes) -> Any:
        make, takes_context = cloudpickle.loads(pickled)
        name = getattr(make, "__qualname__", type(make).__name__)
        with _checks.noted(f"in the dataset function {name} on worker {self._index}"):
            return iter(make(*[self._context] * takes_context))


def _on_host(leaf: Any) -> Any:
    """Returns what a function returned; numbers are scalars that can be formatted."""
    if isinstance(leaf, _OBJECTS):
        kind = type(leaf).__name__.removeprefix("Remote")
        msg = (
            f"a closure returned the object {kind}. Return arrays, numbers, or trees "
            "of them: join gives the models on the coordinator their values."
        )
        raise StrategyError(msg)
    return np.asarray(leaf)[()] if isinstance(leaf, jax.Array) else leaf


def _is_object(node: object) -> bool:
    return isinstance(node, _OBJECTS)
