"""Closures on their way to a worker.

A closure is pickled with all that it uses, except for three things. A Variable travels
as its name, since its value is on the servers; an optimizer without its Optax
transformation and state; an iterator of a per-worker dataset as its number.

Arrays and numbers among the arguments are pickled apart. The rest is the same bytes at
every call: that is how a worker knows a function for which programs are compiled.
"""

import contextlib
import hashlib
import inspect
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle
import jax
import numpy as np
from flax import nnx

from meshlayout import _paths
from meshlayout._annotations import PyTree
from meshlayout.distribute.parameter_server.pushes import RemoteOptimizer
from meshlayout.distribute.variables import aggregation
from meshlayout.errors import StrategyError


class PerWorkerIterator(Iterator[Any]):
    """An iterator of a per-worker dataset, to be passed to scheduled functions."""

    def __init__(self, number: int, dataset: list[Any]) -> None:
        self.number, self.dataset = number, dataset

    def __next__(self) -> Any:
        msg = (
            "next(iterator) was called on the coordinator, and the batches are on the "
            "workers. Pass the iterator to a scheduled function, as in schedule(step, "
            "args=(iterator,)), and call next(iterator) there."
        )
        raise StrategyError(msg)


class VariableReference(NamedTuple):
    """A Variable as it travels; its role is its aggregation, or `"random"`."""

    name: str
    kind: Any
    metadata: dict[str, Any]
    role: str | None


class ClosureInput(NamedTuple):
    """Stands for an array or a number among the arguments of a closure."""

    number: int


class Closure(NamedTuple):
    """A function and its arguments, ready to be sent.

    Ray keeps the `payload`: the pickled function, of which `digest` is a hash. `values`
    are the pickled arrays and numbers among the arguments, and the values of random
    streams. Servers remember the `number`.
    """

    name: str
    digest: str
    payload: Any
    values: bytes
    variables: list[str]
    datasets: dict[int, Any]
    number: int = -1
    servers: Mapping[str, int] = {}


class VariableTable:
    """The names of all Variables and optimizers that closures have used.

    It keeps them alive, so that no other object gets the identity of one.
    """

    def __init__(self) -> None:
        self.variables: dict[str, nnx.Variable[Any]] = {}
        self.roles: dict[str, str | None] = {}
        self.optimizers: list[nnx.Optimizer[Any]] = []
        self._names: dict[int, str] = {}
        self._nodes: dict[int, Any] = {}

    def add(self, root: str, node: PyTree) -> None:
        """Names all Variables of an NNX object after their paths."""
        if id(node) in self._nodes:
            return
        for path, x in nnx.iter_graph(node):
            if isinstance(x, nnx.Variable):
                self.name(x, "/".join((root, *map(str, path))))
            elif isinstance(x, nnx.Pytree):
                self._nodes[id(x)] = x
            if isinstance(x, nnx.metrics.Welford):  # its mean is no sum
                self.roles |= {self.name(v): None for v in (x.mean, x.m2)}

    def name(self, variable: "nnx.Variable[Any]", path: str = "") -> str:
        """Returns the name of a Variable; the first time, after its path."""
        if id(variable) not in self._names:
            path = name = path or type(variable).__name__
            while name in self.variables:
                name = f"{path}_{len(self.variables)}"
            is_random = isinstance(variable, nnx.RngState)
            role = "random" if is_random else aggregation(variable)
            self.roles[name] = "sum" if role == "metric" else role
            self.variables[name], self._names[id(variable)] = variable, name
        return self._names[id(variable)]


class _Pickler(cloudpickle.Pickler):
    """Pickles a closure, and notes the Variables and datasets in it."""

    def __init__(self, file: io.BytesIO, table: VariableTable) -> None:
        super().__init__(file)
        self._table = table
        self.variables: dict[str, None] = {}
        self.datasets: dict[int, Any] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, nnx.Pytree):
            self._table.add(type(obj).__name__, obj)
        if isinstance(obj, nnx.Variable):
            name = self._table.name(obj)
            self.variables[name] = None
            metadata, role = dict(obj.get_metadata()), self._table.roles[name]
            return VariableReference(name, type(obj), metadata, role)
        if isinstance(obj, PerWorkerIterator):
            self.datasets[obj.number] = obj.dataset
            return obj.number
        return None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, nnx.Optimizer):
            return super().reducer_override(obj)
        optimizers = self._table.optimizers
        if not any(obj is known for known in optimizers):
            optimizers.append(obj)
        number = next(i for i, known in enumerate(optimizers) if known is obj)
        return RemoteOptimizer, (number, obj.wrt, obj.step, vars(obj).get("model"))


def pack(
    fn: Callable[..., PyTree],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    table: VariableTable,
) -> Closure:
    """Pickles a function and its arguments."""
    if type(fn).__module__.partition(".")[0] in ("jax", "jaxlib", "flax"):
        # A jitted function could not draw batches, nor push.
        fn = getattr(fn, "__wrapped__", fn)
    name = getattr(fn, "__qualname__", type(fn).__name__)
    is_nnx = _paths.is_nnx_object
    leaves, treedef = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=is_nnx)
    inputs: list[Any] = []
    for index, leaf in enumerate(leaves):
        kinds = (jax.Array, np.ndarray, np.generic, int, float, complex)
        if isinstance(leaf, kinds) and not isinstance(leaf, bool):  # mostly a switch
            leaves[index] = ClosureInput(len(inputs))
            inputs.append(leaf)
    with contextlib.suppress(TypeError, ValueError):  # no Python code; an empty cell
        scope = inspect.getclosurevars(fn)
        named = inspect.signature(fn).bind(*args, **kwargs).arguments
        for root, value in {**scope.globals, **scope.nonlocals, **named}.items():
            if is_nnx(value):
                table.add(root, value)
    file = io.BytesIO()
    pickler = _Pickler(file, table)
    try:
        pickler.dump((fn, *treedef.unflatten(leaves)))
        names = {x: table.roles[x] == "random" for x in pickler.variables}
        random = {x: _paths.box_value(table.variables[x]) for x in names if names[x]}
        values = cloudpickle.dumps((inputs, random))
    except (TypeError, AttributeError, ValueError) as problem:
        if isinstance(problem, StrategyError):
            raise
        msg = (
            f"schedule: {name} cannot be sent to a worker, as something that it uses "
            f"cannot be pickled: {type(problem).__name__}: {problem}. Make files, "
            "locks and connections inside the dataset function, which runs on each "
            "worker."
        )
        raise StrategyError(msg) from problem
    payload, variables = file.getvalue(), [x for x in names if not names[x]]
    digest = hashlib.sha256(payload).hexdigest()
    return Closure(name, digest, payload, values, variables, pickler.datasets)
