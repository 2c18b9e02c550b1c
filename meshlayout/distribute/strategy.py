"""Strategies: a mesh, a layout map, and a way to call a function on each replica.

Replicas are the devices of a mesh with one axis, which also shards batches. What is
made in a strategy's scope is whole on each. Strategies differ in their devices.
"""

import contextlib
import functools
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from meshlayout import _checks, _jax
from meshlayout._annotations import Leaf, PyTree
from meshlayout.cluster import initialize, process_count, process_index
from meshlayout.collectives import ReduceOp, entered, in_cross_replica_context
from meshlayout.data import DistributedDataset, InputContext
from meshlayout.data.per_replica import make_plan_from_function
from meshlayout.distribute import datasets, values
from meshlayout.distribute.arguments import Arguments
from meshlayout.distribute.datasets import ValueContext
from meshlayout.distribute.replica_program import ProgramCache
from meshlayout.distribute.values import REPLICA_AXIS, PerReplica
from meshlayout.distribute.variables import aggregation, raw_value, set_raw_value
from meshlayout.errors import LayoutWarning, StrategyError, warn
from meshlayout.hlo import Communication
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap, activate
from meshlayout.mesh import Mesh, create_mesh, parse_devices
from meshlayout.state import scope


# The strategy whose scope is open, or whose `run` is under way.
_current: ContextVar["Strategy | None"] = ContextVar("strategy", default=None)

_ONE = "For one argument, write args=(x,)."

# Threads that train one model take turns, or updates would be lost.
_lock = threading.RLock()


@_checks.user_call
class Strategy(_checks.WithReflexes):
    """The base class of all strategies, which say how a program is distributed.

    Names and meanings are those of tf.distribute. Use one of the subclasses.

    Args:
        mesh: A mesh with one axis, `batch`, whose devices are the replicas.

    Attributes:
        cluster_resolver: The processes of a multi-process strategy; otherwise None.

    Examples:
        >>> import meshlayout as ml
        >>> strategy = ml.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> model.kernel.sharding.is_fully_replicated
        True
        >>> (x,) = strategy.distribute_dataset(jnp.arange(4), 4)
        >>> y = strategy.run(lambda x: 2 * x, args=(x,))
        >>> strategy.gather(y, axis=0).tolist(), int(strategy.reduce("SUM", y, axis=0))
        ([0, 2, 4, 6], 12)
    """

    cluster_resolver: Any = None

    def __init_subclass__(cls) -> None:
        _checks.user_call(cls)

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._programs = ProgramCache(self)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose gradients are summed."""
        return self.mesh.size

    @property
    def extended(self) -> "StrategyExtended":
        """Extra methods for library authors."""
        return StrategyExtended(self)

    @property
    def layouts(self) -> LayoutMap:
        """The layout map of the scope, which makes arrays whole on every replica."""
        rules = {".*": lambda path, shape, dtype: self._layout(shape, dtype)}
        return LayoutMap(self.mesh, rules, unused="ignore")

    @contextlib.contextmanager
    def scope(self) -> Iterator["Strategy"]:
        """Makes this the current strategy; objects made inside are mirrored.

        Create NNX models, optimizers and Linen's variables in the scope. Metrics and
        single Variables are copied when they are first used. In a scope, the strategy's
        mesh is the current mesh. Scopes cannot be nested.
        """
        if (outer := _current.get()) is not None:
            msg = f"{self!r}: its scope was opened inside that of {outer!r}, or of its "
            raise StrategyError(f"{msg}run. Scopes cannot be nested: leave that first.")
        # Arguments of steps, such as a TrainState, are on the devices.
        with scope(self.layouts), activate(LayoutMap(self.mesh)), self._inside():
            yield self

    def run(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
        options: None = None,
    ) -> PyTree:
        """Calls a function once on each replica.

        The function is compiled as one program for all replicas, once per set of
        shapes, and its Python code runs only then. It may use NNX objects from
        arguments or from outside. Replicas must give a Variable the same value, unless
        it says how to combine their values: `nnx.Variable(x, aggregation="sum")` adds
        them, `"mean"` averages them, `"first"` takes replica 0's, `"per_replica"` keeps
        all. Metrics, batch statistics, and gradients in `nnx.Optimizer.update` are
        combined automatically. Random streams differ between replicas.

        Args:
            fn: The function; inside, `get_replica_context()` tells which replica runs.
            args: Its arguments. Each replica gets its own value of a `PerReplica`; any
                other array or number is the same for all. A bool stays a Python bool.
            kwargs: Its arguments by name.
            options: None; TensorFlow's RunOptions have no meaning here.

        Returns:
            The results of the function: plain arrays where all replicas agree, and a
            `PerReplica` where they differ.

        Raises:
            StrategyError: If a variable or state would differ between replicas, or the
                function adds to a list or dict, or ignores padding.
        """
        _check_cross_replica("run", "call the inner function directly")
        _checks.choice("run: options", options, [None], error=StrategyError)
        if not isinstance(args, (tuple, list)):
            given = f"got {_checks.shown(args)}. {_ONE}"
            raise StrategyError(f"run: args must be a tuple of fn's arguments, {given}")
        try:
            return self._run(fn, tuple(args), dict(kwargs or {}))
        except TypeError:
            names = [f"args[{index}]" for index in range(len(args))]
            how = _checks.Context(error=StrategyError, hint=_ONE)
            _checks.function("fn", fn, *names, keywords=kwargs or (), **how)
            raise

    def _run(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PyTree:
        """Calls a function on each replica, in the way of this strategy."""
        with _lock:
            arguments = Arguments(fn, args, kwargs, self.mesh)
            return self._programs.find(fn, arguments)(fn, arguments)

    def communication(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> Communication:
        """Returns what `run` with these arguments sends between devices."""
        step, inputs = self._compiled_for(fn, args, kwargs)
        return step.communication(*inputs)

    def _compiled_for(self, fn: Any, args: PyTree, kwargs: PyTree = None) -> Any:
        """Returns the compiled step of a call, and its inputs."""
        with _lock:
            arguments = Arguments(fn, tuple(args), dict(kwargs or {}), self.mesh)
            program = self._programs.find(fn, arguments)
            return program.lowered(fn, arguments)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Makes this the current strategy, in cross-replica context."""
        token = _current.set(self)
        try:
            # JAX cannot set a mesh while it traces, where the outer one applies.
            mesh = None if _jax.is_tracing() else jax.set_mesh(self.mesh.jax_mesh)
            with mesh or contextlib.nullcontext(), entered(None):
                yield
        finally:
            _current.reset(token)

    def distribute_dataset(
        self, dataset: object, global_batch_size: int | None = None, **options: Any
    ) -> DistributedDataset:
        """Divides the batches of a source among the replicas.

        The leaves of a batch are `PerReplica`, or plain arrays if there is one replica.
        A short batch is divided evenly if its rows allow it; otherwise some replicas
        get fewer rows, or none, and each leaf has a mask.

        Args:
            dataset: Any source that `ml.distribute_dataset` takes. The key "weight" has
                no special meaning here.
            global_batch_size: Rows of a batch, on all replicas together; None for a
                source of batches, which keep the size of the first one.
            **options: Other options of `ml.distribute_dataset`, except `weights`.
        """
        options["global_batch_size"] = global_batch_size
        return datasets.distribute_dataset(dataset, self.mesh, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        global_batch_size: int | None = None,
        **options: Any,
    ) -> DistributedDataset:
        """Feeds the replicas from sources that a function makes on each process.

        Args:
            dataset_fn: Called with an `InputContext` (once, or per epoch if it is a
                generator function); returns this process's part of the input, as any
                source of `ml.distribute_dataset`. Each replica gets one of its batches.
            global_batch_size: Rows of a batch on all replicas together, to rebatch to;
                None keeps the source's batches.
            **options: As for `distribute_dataset`.
        """
        options["global_batch_size"] = global_batch_size
        plan = make_plan_from_function
        return datasets.distributed(plan, dataset_fn, self.mesh, options)

    def distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], PyTree]
    ) -> PyTree:
        """Makes one value per replica, a tree of arrays, to pass to `run`.

        The function is called with a `ValueContext` for each replica of this process.
        """
        return datasets.values_from_function(value_fn, self.mesh)

    def reduce(
        self, reduce_op: ReduceOp | str, value: PyTree, axis: int | None
    ) -> PyTree:
        """Combines the values of all replicas into replicated arrays.

        Args:
            reduce_op: `"SUM"`, `"MEAN"`, `"MAX"` or `"MIN"`, or a `ReduceOp`.
            value: A result of `run`, or a tree of results. A plain array or number
                counts as one value per replica, so SUM adds it once for each.
            axis: A dim of each replica's value to reduce as well, such as 0 for a sum
                or mean over examples. None reduces over replicas only.
        """
        _check_cross_replica("reduce", "use get_replica_context().all_reduce")
        stored, op = self._stored(value), ReduceOp(reduce_op)
        return values.on_each(values.reduce, stored, self.mesh, op=op, axis=axis)

    def gather(self, value: PyTree, axis: int) -> PyTree:
        """Concatenates the values of all replicas along a dim, without padding."""
        _check_cross_replica("gather", "use get_replica_context().all_gather")
        return values.on_each(values.gather, self._stored(value), self.mesh, axis=axis)

    def local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """Returns the values of a result or a Variable on this process's replicas."""
        return values.local_results(self._stored(value), self.mesh)

    def _layout(self, shape: tuple[int, ...], dtype: Any) -> Layout:
        """Returns how a variable is stored: whole on each replica."""
        return whole(self.mesh, len(shape), None)

    def _placed(self, variable: "nnx.Variable[Any]") -> Any:
        """Returns the value of a Variable where this strategy keeps it."""

        def place(x: Leaf) -> Any:
            if isinstance(x, PerReplica):
                values.check_replicas(x, self.mesh, "a variable of each replica's own")
            if isinstance(x, PerReplica | Tracer):
                return x
            if aggregation(variable) == "per_replica" and self.mesh.size > 1:
                return values.per_replica([x] * len(self.mesh.local_devices), self.mesh)
            if not isinstance(x, jax.ShapeDtypeStruct):  # a number, or one set by Flax
                x = _jax.with_weak_type(jnp.asarray(x), weak_type=False)
            sharding = self._layout(x.shape, x.dtype).sharding
            if isinstance(x, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            if _jax.is_committed(x) and x.sharding.is_equivalent_to(sharding, x.ndim):
                return x
            return _jax.put(jnp.asarray(x), sharding, may_alias=False)

        return jax.tree.map(place, raw_value(variable), is_leaf=values.is_per_replica)

    def _entered(self, variable: "nnx.Variable[Any]", value: Leaf) -> Any:
        """Returns a Variable's value as a program computes with it."""
        return value

    def _stored(self, value: PyTree) -> PyTree:
        """Returns a value; a Variable's value is placed first."""
        if isinstance(value, nnx.Variable):
            set_raw_value(value, self._placed(value))
            value = raw_value(value)
        return value

    def __repr__(self) -> str:
        count = self.num_replicas_in_sync
        return f"{type(self).__name__}({count} replica{'s' * (count > 1)})"


@functools.lru_cache(maxsize=1024)
def whole(mesh: Mesh, rank: int, memory_kind: str | None) -> Layout:
    """Returns the layout of replicated arrays, in a kind of memory."""
    return Layout([None] * rank, mesh, memory_kind=memory_kind)


def _check_cross_replica(name: str, instead: str) -> None:
    if _current.get() is not None and not in_cross_replica_context():
        msg = f"{name} was called in a function that runs on each replica: {instead}."
        raise StrategyError(msg)


class StrategyExtended:
    """Extra methods for library authors; get it as `strategy.extended`.

    Both `worker_devices` and `parameter_devices` are the replicas' devices, in order.
    """

    def __init__(self, strategy: Strategy) -> None:
        devices: tuple[Any, ...] = tuple(strategy.mesh.devices.flat)
        self.worker_devices = self.parameter_devices = devices
        self._strategy = strategy

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: PyTree, destinations: Any
    ) -> PyTree:
        """Reduces over replicas, to a device, or that of a Variable or array."""
        if isinstance(destinations, str):
            (destinations,) = parse_devices(destinations)
        place = getattr(destinations, "sharding", destinations)
        return jax.device_put(self._strategy.reduce(reduce_op, value, None), place)

    def batch_reduce_to(
        self, reduce_op: ReduceOp | str, value_destination_pairs: Iterable[Any]
    ) -> list[PyTree]:
        """Applies `reduce_to` to pairs of a value and its destination."""
        return [self.reduce_to(reduce_op, *pair) for pair in value_destination_pairs]


def get_strategy() -> Strategy:
    """Returns the current strategy; outside of scopes, one with a single replica."""
    return _current.get() or _default_strategy()


def has_strategy() -> bool:
    """Returns whether this code runs in a strategy's scope, or in its `run`."""
    return _current.get() is not None


class MirroredStrategy(Strategy):
    """Mirrors variables on several devices of this process, and keeps them in sync.

    Use this on one machine with several GPUs or virtual CPU devices.

    Args:
        devices: Devices, or text such as `"GPU:0"`; None for all of this process.
    """

    def __init__(self, devices: Iterable[Any] | None = None) -> None:
        chosen = jax.local_devices() if devices is None else parse_devices(devices)
        super().__init__(create_mesh({REPLICA_AXIS: -1}, devices=chosen))


class OneDeviceStrategy(MirroredStrategy):
    """Runs everything on one device; values are plain arrays.

    Args:
        device: A device, or text such as `"GPU:0"`.
    """

    def __init__(self, device: Any) -> None:
        super().__init__([device])


class DefaultStrategy(OneDeviceStrategy):
    """The strategy outside of any scope: one replica, and nothing is changed."""

    def scope(self) -> Any:
        """Changes nothing."""
        return contextlib.nullcontext(self)

    def _run(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PyTree:
        return fn(*args, **kwargs)


_default_strategy = functools.cache(lambda: DefaultStrategy(jax.local_devices()[0]))


class ClusterResolver(NamedTuple):
    """The place of this process in a cluster; a strategy's `cluster_resolver`."""

    task_type: str  # "worker", or "chief" if TF_CONFIG says so
    task_id: int  # among the tasks of this type
    process_index: int  # among all processes
    num_workers: int  # that is, processes


class MultiWorkerMirroredStrategy(Strategy):
    """Mirrors variables on all devices of all processes, and keeps them in sync.

    Create it first in the program, on every process: it calls `ml.initialize()`, which
    finds the other processes, for example from `TF_CONFIG`.
    """

    def __init__(self) -> None:
        initialize()
        super().__init__(create_mesh({REPLICA_AXIS: -1}))
        task = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {})
        kind, index = task.get("type", "worker"), process_index()
        number = int(task.get("index", index))
        self.cluster_resolver = ClusterResolver(kind, number, index, process_count())


class TPUStrategy(Strategy):
    """Mirrors variables on the chips of a TPU slice, and keeps them in sync.

    Replicas follow the order of the slice's network. On a slice with several hosts,
    call `ml.initialize()` first. Without TPUs, it warns and uses the available devices.
    """

    def __init__(self) -> None:
        mesh = create_mesh({REPLICA_AXIS: -1})
        if mesh.platform != "tpu":
            devices = f"{mesh.size} {mesh.platform.upper()} devices"
            text = f"TPUStrategy: there are no TPUs here. It runs on {devices} instead."
            warn(text, LayoutWarning)
        super().__init__(mesh)
