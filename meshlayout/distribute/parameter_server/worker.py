"""A worker: runs closures, one at a time.

It pulls the variables that a closure uses, calls its function, and pushes gradients and
changes to every server that has a part of them. All closures share its Variables, one
per name, and a function that was sent before is the same object, so that what has been
compiled for it is used again.
"""

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshlayout import _checks, _optional, _paths
from meshlayout._annotations import PyTree
from meshlayout.data import InputContext
from meshlayout.distribute.capture import Roots
from meshlayout.distribute.parameter_server.closures import (
    Closure,
    ClosureInput,
    VariableReference,
)
from meshlayout.distribute.parameter_server.pushes import Pushes
from meshlayout.distribute.parameter_server.server import Push
from meshlayout.distribute.variables import set_raw_value
from meshlayout.errors import StrategyError


class ServerLost(Exception):  # noqa: N818 - an event, not a mistake
    """A parameter server died; its number is the argument."""


def ray_module() -> Any:
    """Returns Ray, if it is installed."""
    return _optional.require("ray", extra="ray", purpose="ParameterServerStrategy")


def call(
    servers: Sequence[Any], method: str, arguments: Mapping[int, Any]
) -> list[Any]:
    """Calls a method of several servers at a time, with one argument each."""
    ray, results = ray_module(), []
    answers = {s: getattr(servers[s], method).remote(x) for s, x in arguments.items()}
    for server, answer in answers.items():
        try:
            results.append(ray.get(answer))
        except ray.exceptions.RayActorError as error:
            raise ServerLost(server) from error
    return results


class RemoteWorker:
    """Runs closures, as worker `index` of `num_workers`; a Ray actor."""

    def __init__(self, index: int, num_workers: int) -> None:
        self._index = index
        self._context = InputContext(num_workers, index, 1)
        self._variables: dict[str, nnx.Variable[Any]] = {}
        self._roles: dict[str, str | None] = {}
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
        call(servers, "push", pushes)
        self._unpushed = None
        return result, {}

    def _compute(
        self, closure: Closure, servers: Sequence[Any]
    ) -> tuple[int, bytes, dict[int, Push], set[int]]:
        get = ray_module().get
        for number, (dataset,) in closure.datasets.items():
            if number not in self._iterators:
                make, takes_context = cloudpickle.loads(get(dataset))
                with _checks.noted(f"in the dataset function on worker {self._index}"):
                    batches = make(*[self._context] * takes_context)
                    self._iterators[number] = iter(batches)
        if closure.digest not in self._functions:
            file = io.BytesIO(get(closure.payload[0]))
            self._functions[closure.digest] = _Unpickler(file, self._load).load()
        fn, *arguments = self._functions[closure.digest]
        inputs, random = pickle.loads(closure.values)
        kinds = (ClosureInput, Iterator, nnx.Pytree, nnx.Variable)
        args, kwargs = jax.tree.map(
            lambda x: inputs[x.number] if isinstance(x, ClosureInput) else x,
            arguments,
            is_leaf=lambda x: isinstance(x, kinds),
        )
        for name, x in random.items():
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                # Closures differ, and one that is run again draws the same numbers.
                keys = [jax.random.fold_in(key, closure.number) for key in x.ravel()]
                x = jnp.stack(keys).reshape(x.shape)
            self._set(name, x)
        by_server: dict[int, list[str]] = {}
        for name, server in closure.servers.items():
            by_server.setdefault(server, []).append(name)
        pulled = call(servers, "pull", by_server)
        before = {name: x for values in pulled for name, x in values.items()}
        for name, x in before.items():
            self._set(name, x)
        handed_over = Pushes(self._variables, self._params)
        with Roots(fn).refuse_appends(closure.name), handed_over:
            result = fn(*args, **kwargs)
        pushes = self._pushes(closure, handed_over.grads, before)
        # Numbers are NumPy's scalars, which can be formatted.
        to_host = lambda x: np.asarray(x)[()] if isinstance(x, jax.Array) else x  # noqa: E731
        pickled = cloudpickle.dumps(jax.tree.map(to_host, result))
        return closure.number, pickled, pushes, set(handed_over.grads)

    def _load(self, pid: int | VariableReference) -> Any:
        """Returns what stands for a reference on this worker."""
        if isinstance(pid, int):
            return self._iterators[pid]
        if pid.name not in self._variables:
            variable = pid.kind.from_metadata(jnp.zeros(()), pid.metadata)
            self._variables[pid.name], self._roles[pid.name] = variable, pid.role
        return self._variables[pid.name]

    def _set(self, name: str, value: Any) -> None:
        set_raw_value(self._variables[name], jnp.asarray(value))

    def _pushes(
        self, closure: Closure, grads: Mapping[int, Any], before: Mapping[str, Any]
    ) -> dict[int, Push]:
        """Divides what a closure changes over the servers."""
        pushes: dict[int, Push] = {}

        def push(name: str) -> Push:
            return pushes.setdefault(
                closure.servers[name], Push(closure.number, {}, {}, {})
            )

        for optimizer, by_name in grads.items():
            for name, grad in by_name.items():
                push(name).grads.setdefault(optimizer, {})[name] = np.asarray(grad)
        for name, old in before.items():
            new, role = (
                np.asarray(_paths.box_value(self._variables[name])),
                self._roles[name],
            )
            # By value: Flax's transforms give Variables back as new arrays.
            if np.array_equal(old, new, equal_nan=old.dtype.kind in "fc"):
                continue
            if role not in ("sum", "mean", "first"):
                msg = (
                    f"the closure changes {name} without an nnx.Optimizer, and what "
                    "several workers change would get lost. Make it with "
                    'nnx.Variable(x, aggregation="sum") to add changes up, or "first" '
                    "to keep the last value."
                )
                raise StrategyError(msg)
            if role == "first":
                push(name).assigned[name] = new
            else:
                push(name).added[name] = new - old
        return pushes


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, load: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._load = load

    def persistent_load(self, pid: int | VariableReference) -> Any:
        return self._load(pid)
