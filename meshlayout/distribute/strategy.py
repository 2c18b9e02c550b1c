"""`Strategy`: a mesh, a layout map, and a way to call a function on each replica.

Replicas are the devices of a mesh with one axis, which also shards batches. Whatever is
made in a strategy's scope is whole on each of them. Everything else is the library's:
data comes from `distribute_dataset`, and `run` compiles through `compile_step`.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshlayout import _checks, _jax
from meshlayout._annotations import Leaf, PyTree
from meshlayout._default_mesh import default_mesh
from meshlayout._patches import SharedPatches
from meshlayout.collectives import ReduceOp, entered, in_cross_replica_context
from meshlayout.data import InputContext
from meshlayout.distribute import datasets, reduction
from meshlayout.distribute.arguments import Arguments, is_on
from meshlayout.distribute.datasets import ReplicaDataset, ValueContext
from meshlayout.distribute.extension import StrategyExtended
from meshlayout.distribute.program_cache import ProgramCache
from meshlayout.distribute.values import PerReplica, per_replica
from meshlayout.distribute.variables import aggregation, raw_value, set_raw_value
from meshlayout.errors import StrategyError
from meshlayout.hlo import Communication
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap
from meshlayout.mesh import Mesh
from meshlayout.step import compile_step


# The strategy whose scope is open, or whose `run` is under way.
current_strategy: ContextVar["Strategy | None"] = ContextVar("strategy", default=None)

# Threads that train one model come one after another, or updates would be lost.
_lock = threading.RLock()


class Strategy:
    """How a program is distributed: the base of all strategies.

    Use one of its subclasses. The names and their meaning are tf.distribute's; where
    something differs, the documentation's page for tf.distribute says so.

    Args:
        mesh: A mesh with one axis, called batch; its devices are the replicas.

    Attributes:
        mesh: The mesh of replicas.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._programs = ProgramCache(self)

    if not TYPE_CHECKING:  # to a type checker, any attribute would exist

        def __getattr__(self, name: str) -> Any:
            """Says what TensorFlow's experimental methods are called here."""
            ours = name.removeprefix("experimental_")
            is_known = ours != name and hasattr(type(self), ours)
            hint = f" Here it is {ours}." if is_known else ""
            msg = f"{type(self).__name__} has no attribute {name!r}.{hint}"
            raise AttributeError(msg, name=name, obj=self)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose gradients are added up."""
        return self.mesh.size

    @property
    def cluster_resolver(self) -> Any:
        """The processes of the program, if the strategy is for several; else None."""
        return None

    @property
    def extended(self) -> StrategyExtended:
        """Extra methods for library authors."""
        return StrategyExtended(self)

    @property
    def layouts(self) -> LayoutMap:
        """The layout map of what is made in the scope: whole on every replica."""
        return LayoutMap(self.mesh, unused="ignore")

    @contextlib.contextmanager
    def scope(self) -> Iterator["Strategy"]:
        """Makes this the current strategy; what is made inside is mirrored.

        Make models, optimizers and metrics in it: NNX objects, single Variables and the
        variables of Linen's `init`. Each replica then has a copy of the same values. It
        is also the cross-replica context, in which `get_replica_context()` is None, and
        the strategy's mesh is the default one: a state that `TrainState.create` makes
        here without layouts can be trained by `make_train_step` and `Trainer`.

        Raises:
            StrategyError: If a strategy's scope is open already, or this is called in a
                function that runs on a replica.

        Example:
            >>> from flax import nnx
            >>> import meshlayout as ml
            >>> strategy = ml.distribute.MirroredStrategy()
            >>> with strategy.scope():
            ...     model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
            >>> model.kernel.sharding.is_fully_replicated
            True
        """
        outer = current_strategy.get()
        if outer is not None:
            where = "a strategy's scope"
            if not in_cross_replica_context():
                where = "a function that run calls on each replica"
            msg = (
                f"{self!r}: its scope was opened inside {where} ({outer!r}). Scopes "
                "cannot be nested: leave the outer one first."
            )
            raise StrategyError(msg)
        with self.layouts.scope(), _variables, _Current(self):
            yield self

    def run(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
        options: None = None,
    ) -> PyTree:
        """Calls a function once on each replica.

        It is compiled for all replicas as one program, once per shapes of arguments, so
        Python code in it runs while it is compiled. NNX modules, optimizers and metrics
        may be passed or used from outside; what it changes in them must be the same on
        all replicas, which is proven when it is compiled, unless the Variable says how
        the replicas' values become one: with `nnx.Variable(x, aggregation="sum")`, what
        is added to it on each replica is added, and what is assigned is added up;
        `"mean"` averages, `"first"` takes replica 0's, and `"per_replica"` keeps one
        value for each. Sums of metrics are added and batch statistics averaged by
        themselves. `nnx.Optimizer.update` adds up the replicas' gradients, unless the
        function has combined them itself. Random streams differ between replicas.

        Args:
            fn: The function. In it, `get_replica_context()` says which replica this is.
            args: Its arguments: of a `PerReplica`, each replica gets its own value; any
                other array or number is the same for all. A bool stays one of Python's,
                and of an `nnx.State` the values are passed.
            kwargs: Its arguments by name.
            options: None; TensorFlow's RunOptions have no meaning here.

        Returns:
            What the function returns: plain arrays where all replicas have the same,
            and a `PerReplica` where they differ.

        Raises:
            StrategyError: If an argument or result is not an array, a variable or a
                state would differ between replicas, the function appends to a list or
                dict, ignores padding, or uses variables of another strategy.

        Example:
            >>> import meshlayout as ml
            >>> strategy = ml.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> strategy.run(
            ...     lambda: ml.distribute.get_replica_context().replica_id_in_sync_group
            ... )
            PerReplica:{
              0: Array(0, dtype=int32),
              1: Array(1, dtype=int32)
            }
        """
        args, kwargs = self._checked_call(fn, args, kwargs, options)
        with _lock:
            arguments = Arguments(fn, args, kwargs, self.mesh)
            return self._programs.find(fn, arguments)(fn, arguments)

    def communication(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> Communication:
        """Returns what `run` of these arguments sends between devices."""
        step, inputs = self._compiled_for(fn, args, kwargs)
        return step.communication(*inputs)

    def _compiled_for(self, fn: Any, args: Any, kwargs: Any = None) -> Any:
        """Returns the compiled step of a call, and its inputs."""
        args, kwargs = self._checked_call(fn, args, kwargs, None)
        with _lock:
            arguments = Arguments(fn, args, kwargs, self.mesh)
            program = self._programs.find(fn, arguments)
            return program.held(fn, arguments), program.inputs(arguments)

    def _compile(self, step: Callable[..., Any]) -> Any:
        """Compiles `step(state, other variables, arguments)`; the state is used up."""
        return compile_step(step, on_recompile="ignore")

    def _checked_call(
        self, fn: object, args: Any, kwargs: Any, options: object
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        msg = ""
        if not callable(fn):
            msg = f"run: fn must be a function, got {_checks.shown(fn)}."
        elif not isinstance(args, (tuple, list)):
            msg = (
                f"run: args must be a tuple of fn's arguments, got "
                f"{_checks.shown(args)}. For one argument, write args=(x,)."
            )
        elif kwargs is not None and not isinstance(kwargs, Mapping):
            msg = f"run: kwargs must be a dict, got {_checks.shown(kwargs)}."
        elif options is not None:
            msg = (
                f"run: options must be None, got {_checks.shown(options)}: RunOptions "
                "have no counterpart."
            )
        outer = current_strategy.get()
        if outer is not None and not in_cross_replica_context():
            msg = (
                "run was called in a function that already runs on each replica. Call "
                "the inner function directly."
            )
        elif outer is not None and outer is not self:
            msg = f"{self!r} was used in the scope of another strategy, {outer!r}."
        if msg:
            raise StrategyError(msg)
        return tuple(args), dict(kwargs or {})

    def _inside(self) -> contextlib.AbstractContextManager[None]:
        """Makes this the current strategy, while a function is traced for it."""
        return _Current(self)

    def distribute_dataset(
        self, dataset: object, global_batch_size: int | None = None, **options: Any
    ) -> ReplicaDataset:
        """Divides the batches of a source among the replicas.

        Iterating yields trees of the source's structure whose leaves are `PerReplica`,
        for `run`. A last batch that is short is divided evenly if its rows divide among
        the replicas. If not, some replicas have fewer rows than others, or none, and
        each leaf then says so. With one replica, leaves are plain arrays. A dataset can
        be iterated over again, and its iterators save and restore their position.

        Args:
            dataset: Any source that `ml.distribute_dataset` takes. "weight" is data
                like any other key.
            global_batch_size: Rows of a batch, on all replicas together; None for a
                source of batches, which keep their size: that of the first one.
            **options: Other options of `ml.distribute_dataset`.

        Raises:
            StrategyError: If the batch size cannot be inferred or does not divide.
            DataError: As `ml.distribute_dataset`.

        Example:
            >>> import numpy as np
            >>> import meshlayout as ml
            >>> strategy = ml.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> data = strategy.distribute_dataset(np.arange(6, dtype="int32"), 4)
            >>> [[x.tolist() for x in strategy.local_results(batch)] for batch in data]
            [[[0, 1], [2, 3]], [[4], [5]]]
        """
        size = global_batch_size
        return datasets.distribute_dataset(dataset, self.mesh, size, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        global_batch_size: int | None = None,
        **options: Any,
    ) -> ReplicaDataset:
        """Feeds the replicas from sources that a function makes on each process.

        Use this to say yourself what each process reads, and how it is batched. Of a
        source of batches of the per-replica size, each replica of the process gets one
        in every step; batches of other sizes are cut anew. When a process runs out of
        batches before the others, its replicas have no rows in the last steps.

        Args:
            dataset_fn: Called once with an `InputContext`, which says which part of the
                input to make; returns any source that `ml.distribute_dataset` takes.
            global_batch_size: Rows of a batch, on all replicas together; None for the
                size of the source's first batch on each replica.
            **options: As for `distribute_dataset`.

        Example:
            >>> import numpy as np
            >>> import meshlayout as ml
            >>> strategy = ml.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> def dataset_fn(context):
            ...     size = context.get_per_replica_batch_size(4)
            ...     return [np.full(size, i, "int32") for i in range(2)]
            >>> (x,) = strategy.distribute_datasets_from_function(dataset_fn)
            >>> strategy.local_results(x)
            (Array([0, 0], dtype=int32), Array([1, 1], dtype=int32))
        """
        size = global_batch_size
        make = datasets.distribute_datasets_from_function
        return make(dataset_fn, self.mesh, size, options)

    def distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], PyTree]
    ) -> PyTree:
        """Makes a value of each replica, for `run`, `reduce` and the like.

        Args:
            value_fn: Called once for each replica of this process, with a
                `ValueContext`; returns an array or a tree of arrays. The arrays of one
                process may differ in their numbers of rows.

        Raises:
            StrategyError: If it returns anything else, or the replicas' trees differ.

        Example:
            >>> import meshlayout as ml
            >>> strategy = ml.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> strategy.distribute_values_from_function(
            ...     lambda context: [3.0, 2.0, 1.0][context.replica_id_in_sync_group]
            ... )
            PerReplica:{
              0: Array(3., dtype=float32),
              1: Array(2., dtype=float32)
            }
        """
        return datasets.distribute_values_from_function(value_fn, self.mesh)

    def reduce(
        self, reduce_op: ReduceOp | str, value: PyTree, axis: int | None
    ) -> PyTree:
        """Combines the values of all replicas into arrays that are whole on each.

        Args:
            reduce_op: `"SUM"`, `"MEAN"`, `"MAX"` or `"MIN"`, or a `ReduceOp`.
            value: What `run` returned, or a tree of that. A plain array stands for one
                equal value on each replica.
            axis: A dim of each replica's value to combine along as well, such as 0 for
                examples: a mean then divides by the number of all examples, also if
                some replicas have fewer. None combines replicas alone.

        Raises:
            StrategyError: If the operation or the axis does not exist, the value is not
                on the replicas, or shapes differ.

        Example:
            >>> import jax.numpy as jnp
            >>> import meshlayout as ml
            >>> strategy = ml.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> def losses_of_four_examples():
            ...     replica = ml.distribute.get_replica_context()
            ...     return jnp.arange(4.0) + 4 * replica.replica_id_in_sync_group
            >>> losses = strategy.run(losses_of_four_examples)
            >>> strategy.reduce("SUM", losses, axis=None).tolist()
            [4.0, 6.0, 8.0, 10.0]
            >>> float(strategy.reduce("SUM", losses, axis=0))
            28.0
        """
        op = ReduceOp.parse(reduce_op)
        self._check_cross_replica("reduce", "all_reduce")
        return reduction.reduce_tree(op, self._divided(value), axis, self.mesh)

    def gather(self, value: PyTree, axis: int) -> PyTree:
        """Concatenates the values of all replicas along a dim, without padding.

        Args:
            value: As for `reduce`.
            axis: The dim.

        Raises:
            StrategyError: If a value has no such dim or is not on the replicas, or
                shapes differ in another dim.

        Example:
            >>> import jax.numpy as jnp
            >>> import meshlayout as ml
            >>> strategy = ml.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> values = strategy.run(lambda: jnp.array([[1], [2]]))
            >>> strategy.gather(values, axis=0).tolist()
            [[1], [2], [1], [2]]
        """
        self._check_cross_replica("gather", "all_gather")
        return reduction.gather_tree(self._divided(value), axis, self.mesh)

    def local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """Returns the values of this process's replicas, one after another.

        Args:
            value: What `run` returned, a Variable made in the scope, or an array.

        Raises:
            StrategyError: Inside a compiled function, if rows are padded.
        """
        return reduction.local_results(self._divided(value), self.mesh)

    def _check_cross_replica(self, name: str, instead: str) -> None:
        if current_strategy.get() is not None and not in_cross_replica_context():
            msg = (
                f"{name} combines values of all replicas, and was called in a function "
                f"that runs on one: use get_replica_context().{instead} there."
            )
            raise StrategyError(msg)

    # Where variables are.

    def _layout(self, shape: tuple[int, ...], dtype: Any) -> Layout:
        """Returns how a variable is stored: whole on each replica."""
        del dtype
        return self.mesh.layout(...).with_rank(len(shape))

    def _place(self, path: str, x: Leaf, *, is_own: bool) -> Any:
        """Returns an array of a variable where this strategy keeps it.

        Raises:
            StrategyError: If it was placed elsewhere, as those of another strategy.
        """
        is_values = isinstance(x, PerReplica)
        if is_values and x.num_replicas == self.num_replicas_in_sync:
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            sharding = self._layout(x.shape, x.dtype).sharding
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        if is_own and not is_values:
            return per_replica([x] * len(self.mesh.local_devices), self.mesh)
        is_here = False if is_values else is_on(x, self.mesh.jax_mesh)
        if is_here is None:
            x = jnp.asarray(x)
            return _jax.put(x, self._layout(x.shape, x.dtype).sharding)
        if is_here:
            return x
        place = f"{x.num_replicas} replicas" if is_values else str(Layout.of(x))
        msg = (
            f"the variable {path} is on {place}, and {self!r} needs it whole on each "
            "of its replicas. Create it in this strategy's scope."
        )
        raise StrategyError(msg)

    def _entered(self, variable: "nnx.Variable[Any]", value: Leaf) -> Any:
        """Returns a Variable's value as a program computes with it."""
        del variable
        return value

    def _store(self, variable: "nnx.Variable[Any]") -> None:
        """Mirrors a Variable that was made in the scope."""
        is_own = aggregation(variable) == "per_replica"

        def place(x: Leaf) -> Any:
            return self._place("variable", x, is_own=is_own)

        set_raw_value(variable, jax.tree.map(place, raw_value(variable)))

    def _divided(self, value: PyTree) -> PyTree:
        """Gives each replica what a Variable of one value per replica was reset to."""
        is_own = isinstance(value, nnx.Variable) and aggregation(value) == "per_replica"
        if is_own and not isinstance(raw_value(value), PerReplica):
            self._store(value)
        return value

    def __repr__(self) -> str:
        count = self.num_replicas_in_sync
        return f"{type(self).__name__}({count} replica{'s' * (count > 1)})"


class _Current(contextlib.AbstractContextManager[None]):
    """Makes a strategy the current one, in cross-replica context."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._contexts = default_mesh(strategy.mesh), entered(None)

    def __enter__(self) -> None:
        self._token = current_strategy.set(self._strategy)
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: object) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)
        current_strategy.reset(self._token)


# Bare Variables and NNX metrics, which `LayoutMap.scope` does not know, since they are
# not modules. If Flax makes Variables in another way, what is made in a scope stays on
# one device until the first run; tests/test_distribute.py notices.


def _mirroring(init: Callable[..., None]) -> Callable[..., None]:
    def mirrored_init(self: nnx.Variable[Any], *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        strategy = current_strategy.get()
        if strategy is not None and not _jax.is_tracing():
            strategy._store(self)

    return mirrored_init


_variables = SharedPatches((nnx.Variable, "__init__", _mirroring))
