"""Closures on their way to a worker.

A closure is pickled with everything it uses, but for three things. The values of NNX
Variables stay on the parameter servers: a Variable travels as its name. An optimizer
travels without its Optax transformation: on a worker, `update` hands the gradients
over. And iterators of per-worker datasets are each worker's own.

Numbers and arrays among the arguments are taken out as well. What remains is the same
bytes at every call, and these are how a worker knows that it has compiled the function:
a mode that was switched (`model.eval()`) or another learning rate makes other bytes,
and so another program.
"""

import contextlib
import hashlib
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from meshlayout import _checks, _jax, _paths
from meshlayout._annotations import PyTree
from meshlayout._host_arrays import host_array
from meshlayout.distribute.nnx_graph import iter_graph
from meshlayout.distribute.parameter_server.per_worker_data import (
    PerWorkerIterator,
)
from meshlayout.errors import StrategyError


@dataclass(frozen=True)
class ClosureInput:
    """Stands for an array among the arguments of a closure."""

    index: int


@dataclass(frozen=True)
class HostKey:
    """A PRNG key on its way: its words, and the name of its generator."""

    words: np.ndarray[Any, Any]
    impl: str

    def __call__(self) -> jax.Array:
        """Returns the key."""
        return jax.random.wrap_key_data(jnp.asarray(self.words), impl=self.impl)


def is_key(leaf: object) -> bool:
    """Returns whether this is a PRNG key on its way."""
    return isinstance(leaf, HostKey)


def to_host(value: Any, where: str) -> Any:
    """Returns an array or a number as it travels.

    Raises:
        StrategyError: If it is not an array of numbers.
    """
    if isinstance(value, (bool, int, float, complex)):
        return value
    if hasattr(value, "dtype") and _jax.is_extended(value.dtype):
        words = np.asarray(jax.random.key_data(value))
        return HostKey(words, _jax.key_impl(value.dtype))
    try:
        return host_array(value, where)
    except ValueError as problem:
        raise StrategyError(str(problem)) from None


@dataclass(frozen=True)
class VariableReference:
    """An NNX Variable without its value, as it travels.

    Attributes:
        name: Its name on the parameter servers.
        kind: Its class.
        metadata: Its metadata.
        shape: The shape of its value.
        dtype: The dtype of its value.
        constant: The value, if it does not come from the servers: of random streams.
    """

    name: str
    kind: type["nnx.Variable[Any]"]
    metadata: dict[str, Any]
    shape: tuple[int, ...]
    dtype: Any
    constant: Any = None


class VariableTable:
    """The names of all Variables and optimizers that closures have used.

    It keeps them alive, so that no other object gets the identity of one.
    """

    def __init__(self) -> None:
        self.variables: dict[str, nnx.Variable[Any]] = {}
        self.optimizers: list[nnx.Optimizer[Any]] = []
        self._names: dict[int, str] = {}

    def name(self, variable: "nnx.Variable[Any]", path: str = "") -> str:
        """Returns the name of a Variable; the first time, after its path."""
        if id(variable) not in self._names:
            path = path or type(variable).__name__
            name, number = path, 2
            while name in self.variables:
                name, number = f"{path}_{number}", number + 1
            self._names[id(variable)] = name
            self.variables[name] = variable
        return self._names[id(variable)]

    def add(self, root: str, node: Any) -> None:
        """Names all Variables of an NNX object."""
        for parts, child in iter_graph(node):
            if isinstance(child, nnx.Variable):
                self.name(child, "/".join((root, *map(str, parts))))

    def number(self, optimizer: "nnx.Optimizer[Any]") -> int:
        """Returns the number of an optimizer."""
        for number, known in enumerate(self.optimizers):
            if known is optimizer:
                return number
        self.optimizers.append(optimizer)
        return len(self.optimizers) - 1


@dataclass(frozen=True)
class Packed:
    """A closure, ready to be sent.

    Attributes:
        name: The name of the function, for messages.
        digest: A hash of the payload, which names the program on a worker.
        payload: The function, its NNX objects and its other arguments.
        inputs: The arrays and numbers among its arguments.
        iterators: The numbers of the iterators that it uses.
    """

    name: str
    digest: str
    payload: bytes
    inputs: tuple[Any, ...]
    iterators: tuple[int, ...]


def pack(
    fn: Callable[..., PyTree],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    table: VariableTable,
) -> Packed:
    """Pickles a closure.

    Args:
        fn: The function; if it is jitted, the function inside is taken, since a closure
            is compiled as a whole.
        args: Its arguments.
        kwargs: Its arguments by name.
        table: Names Variables.

    Raises:
        StrategyError: If something in it cannot be sent.
    """
    fn = _unjitted(fn)
    name = getattr(fn, "__qualname__", type(fn).__name__)
    leaves, treedef = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=_is_object)
    inputs: list[Any] = []
    for index, leaf in enumerate(leaves):
        kinds = (jax.Array, np.ndarray, np.generic, int, float, complex)
        # Booleans are mostly switches, which Python code asks while it is traced.
        if isinstance(leaf, kinds) and not isinstance(leaf, bool):
            leaves[index] = ClosureInput(len(inputs))
            inputs.append(to_host(leaf, f"schedule: an argument of {name}"))
    file = io.BytesIO()
    pickler = _Pickler(file, table, _names_of_objects(fn, args, kwargs))
    try:
        # Twice by one pickler: the second one refers to the objects of the first.
        pickler.dump((fn, *treedef.unflatten(leaves)))
        pickler.dump(pickler.roots())
    except StrategyError:
        raise
    except Exception as problem:
        reason = str(problem).partition("\n")[0]
        msg = (
            f"schedule: {name} cannot be sent to a worker, as something that it uses "
            f"cannot be pickled: {type(problem).__name__}: {reason} Make files, locks "
            "and connections inside the dataset function, which runs on each worker."
        )
        raise StrategyError(msg) from problem
    payload = file.getvalue()
    digest = hashlib.sha256(payload).hexdigest()
    return Packed(name, digest, payload, tuple(inputs), tuple(pickler.iterators))


def _is_object(node: object) -> bool:
    return isinstance(node, (nnx.Pytree, nnx.Variable))


def _unjitted(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    package = type(fn).__module__.partition(".")[0]
    if package in ("jax", "jaxlib", "flax") and hasattr(fn, "__wrapped__"):
        return fn.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    return fn


def _names_of_objects(
    fn: Callable[..., PyTree], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[int, str]:
    """Returns the names by which the user knows NNX objects, by identity."""
    named: dict[str, Any] = {}
    code = getattr(fn, "__code__", None)
    if code is not None:
        scope = getattr(fn, "__globals__", {})
        named |= {name: scope[name] for name in _global_names(code) if name in scope}
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # not assigned yet
                named[name] = cell.cell_contents
        named |= dict(zip(code.co_varnames, args, strict=False))
    named |= kwargs
    return {id(value): name for name, value in named.items() if _is_object(value)}


def _global_names(code: CodeType) -> Iterator[str]:
    """Yields the globals that a function uses, and those of the functions in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


class _Pickler(cloudpickle.Pickler):
    """Pickles a closure; notes the NNX objects and iterators in it."""

    def __init__(
        self, file: io.BytesIO, table: VariableTable, names: Mapping[int, str]
    ) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._table = table
        self._user_names = names
        self._objects: dict[int, tuple[str, Any]] = {}
        self._inside: set[int] = set()
        self.iterators: dict[int, None] = {}

    def roots(self) -> list[tuple[str, Any]]:
        """Returns the NNX objects that are not part of another one, with names."""
        return [x for key, x in self._objects.items() if key not in self._inside]

    def persistent_id(self, obj: Any) -> Any:
        """Returns what stands for an object whose contents are not sent."""
        if isinstance(obj, (nnx.Pytree, nnx.Variable)):
            self._note(obj)
        if isinstance(obj, nnx.Variable):
            return self._reference(obj)
        if isinstance(obj, PerWorkerIterator):
            self.iterators[obj.number] = None
            return obj.number
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Leaves the transformation of an optimizer behind."""
        if not isinstance(obj, nnx.Optimizer):
            return super().reducer_override(obj)
        reduced: Any = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        call, args, state, *rest = reduced
        number = self._table.number(obj)
        return (call, args, {**state, "tx": handed_over(number)}, *rest)

    def _note(self, node: Any) -> None:
        if id(node) in self._objects or id(node) in self._inside:
            return
        name = self._user_names.get(id(node), type(node).__name__)
        self._objects[id(node)] = (name, node)
        self._table.add(name, node)
        self._inside.update(id(x) for _, x in iter_graph(node) if x is not node)

    def _reference(self, variable: "nnx.Variable[Any]") -> VariableReference:
        name = self._table.name(variable)
        value = _paths.box_value(variable)
        kind, metadata = type(variable), dict(variable.get_metadata())
        if isinstance(variable, nnx.RngState):
            constant = to_host(value, name)
            return VariableReference(
                name, kind, metadata, value.shape, value.dtype, constant
            )
        check_on_one_device(name, value)
        dtype = jnp.result_type(value)
        return VariableReference(name, kind, metadata, np.shape(value), dtype)


def check_on_one_device(name: str, value: Any) -> None:
    """Refuses values of a Variable that a parameter server cannot hold.

    Raises:
        StrategyError: If it is not an array of numbers, or is on several devices.
    """
    numbers = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    kinds = (jnp.number, jnp.bool_)
    if not isinstance(value, numbers) or not any(
        jnp.issubdtype(jnp.result_type(value), kind) for kind in kinds
    ):
        msg = (
            f"{name} holds {_checks.type_text(value)}; parameter servers keep arrays "
            "of numbers. Make it a plain attribute, if it does not change."
        )
        raise StrategyError(msg)
    if isinstance(value, jax.Array) and len(value.sharding.device_set) > 1:
        msg = (
            f"{name} is on {len(value.sharding.device_set)} devices: it belongs to "
            "another strategy or mesh. Make it in the scope of the "
            "ParameterServerStrategy."
        )
        raise StrategyError(msg)


def handed_over(number: int) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that hands gradients over to whoever compiles."""
    return optax.GradientTransformationExtraArgs(_no_init, _HandOver(number))


def number_of(optimizer: "nnx.Optimizer[Any]") -> int:
    """Returns the number of an optimizer, on a worker."""
    update: Any = optimizer.tx.update
    return update.number


def _no_init(params: PyTree) -> PyTree:
    raise StrategyError(
        "an optimizer was used in a closure that cannot make its state there. Make "
        "optimizers in the strategy's scope."
    )


TakeOver = Callable[[int, PyTree, PyTree, PyTree, Mapping[str, Any]], Any]

# Where gradients go while a worker traces a closure.
take_over: ContextVar[TakeOver] = ContextVar("take_over")


@dataclass(frozen=True)
class _HandOver:
    """The update of an optimizer on a worker."""

    number: int

    def __call__(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **kwargs: Any
    ) -> Any:
        return take_over.get()(self.number, updates, state, params, kwargs)
