"""What an optimizer is on a worker: its `update` hands gradients over to be pushed.

In a function that `strategy.run` compiles, the gradients are traced values; there they
leave the program as results of their own, and are handed over when it has run.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

import jax
from flax import nnx

from meshlayout._annotations import PyTree
from meshlayout.distribute.strategies import OneDeviceStrategy
from meshlayout.distribute.variables import raw_value, set_raw_value
from meshlayout.errors import StrategyError


class Pushes:
    """The gradients that a closure hands over in a `with` block, by optimizer and name.

    In the block, a parameter cannot be used after its update: its new value will be on
    the servers, and the old one would be taken for it. `params` has the names of each
    optimizer's parameters, in the structure that Optax gets.
    """

    def __init__(
        self, variables: Mapping[str, "nnx.Variable[Any]"], params: dict[int, PyTree]
    ) -> None:
        self.variables, self.params = variables, params
        self.grads: dict[int, dict[str, Any]] = {}
        self._values: dict[str, Any] = {}

    def take(self, number: int, grads: dict[str, Any]) -> None:
        """Takes the gradients of one optimizer."""
        if number in self.grads:
            _Updated(next(iter(grads)))._refuse()
        self.grads[number] = grads
        for name in grads:
            self._values.setdefault(name, raw_value(self.variables[name]))
            set_raw_value(self.variables[name], _Updated(name))

    def __enter__(self) -> "Pushes":
        self._token = _pushes.set(self)
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        _pushes.reset(self._token)
        used = [n for n in self._values if not isinstance(self._value(n), _Updated)]
        for name, value in self._values.items():
            set_raw_value(self.variables[name], value)
        if used and kind is None:
            _Updated(used[0])._refuse()

    def _value(self, name: str) -> Any:
        return raw_value(self.variables[name])


_pushes: ContextVar[Pushes] = ContextVar("pushes")


class _Updated:
    """Takes the place of a parameter's value after its update."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *args: object) -> NoReturn:
        msg = (
            f"the closure uses {self._name} after optimizer.update, which changes it "
            "on the parameter servers when the closure has ended. Do that before, or "
            "in another closure."
        )
        raise StrategyError(msg)

    __getattr__ = __getitem__ = __setitem__ = __jax_array__ = __array__ = _refuse


@jax.tree_util.register_static
class RemoteOptimizer:
    """An `nnx.Optimizer` on a worker; `model` is that of an `nnx.ModelAndOptimizer`."""

    def __init__(self, number: int, wrt: Any, step: object, model: PyTree) -> None:
        self.number, self.wrt, self.step, self.model = number, wrt, step, model

    def update(self, *args: Any) -> None:
        """Hands gradients over, for the servers to apply when the closure has ended."""
        model, grads = args if self.model is None else (self.model, *args)
        pushes, state = _pushes.get(), nnx.state(model, self.wrt)
        own = {id(variable): name for name, variable in pushes.variables.items()}
        nodes = dict(nnx.iter_graph(model))
        names = {id(x): own.get(id(nodes[p])) for p, x in nnx.to_flat_state(state)}
        params = jax.tree.map(lambda x: names[id(x)], state, is_leaf=_is_variable)
        leaves = jax.tree.leaves(params)
        known = jax.tree.leaves(pushes.params.get(self.number, params))
        if None in names.values() or known != leaves:
            msg = (
                "optimizer.update got other parameters than its model's own: copies, "
                "as in nnx.jit, or another model's. Compile the step by strategy.run, "
                "and make an nnx.Optimizer for each model."
            )
            raise StrategyError(msg)
        pushes.params[self.number] = params
        values = jax.tree.leaves(nnx.state(grads, self.wrt), is_leaf=_is_variable)
        arrays = [raw_value(x) if _is_variable(x) else x for x in values]
        pushes.take(self.number, dict(zip(leaves, arrays, strict=True)))


def _is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)


class WorkerStrategy(OneDeviceStrategy):
    """What a `ParameterServerStrategy` is on a worker: one replica, on one device."""

    def run(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
        options: None = None,
    ) -> PyTree:
        """Compiles and calls a function, and hands its gradients over."""
        call = functools.partial(_call, fn)
        result, grads = super().run(call, args, kwargs, options)
        for number, by_name in grads.items():
            _pushes.get().take(number, by_name)
        return result


def _call(fn: Callable[..., PyTree], /, *args: PyTree, **kwargs: PyTree) -> PyTree:
    outer = _pushes.get()
    with Pushes(outer.variables, outer.params) as pushes:
        result = fn(*args, **kwargs)
    return result, pushes.grads


@functools.cache
def worker_strategy() -> WorkerStrategy:
    """Returns the strategy of this worker."""
    return WorkerStrategy(jax.local_devices()[0])
