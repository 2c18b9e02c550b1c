"""`ParameterServerStrategy`: asynchronous training with parameter servers.

Workers compute gradients independently of each other, and push them to the servers that
hold the variables. Nobody waits for the slowest; the price is that a gradient may be
computed from variables that others have changed meanwhile. Ray starts the processes on
the machines of its cluster, which takes the place of `TF_CONFIG`.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from meshlayout import _checks, _optional
from meshlayout._annotations import PyTree
from meshlayout.checkpoint import Checkpointer
from meshlayout.distribute.default_strategy import get_strategy
from meshlayout.distribute.parameter_server.actors import RayCluster
from meshlayout.distribute.strategy import Strategy
from meshlayout.distribute.values import REPLICA_AXIS
from meshlayout.errors import StrategyError
from meshlayout.mesh_creation import create_mesh


if TYPE_CHECKING:
    from meshlayout.distribute.parameter_server.coordinator import Cluster


class ParameterServerStrategy(Strategy):
    """Variables on parameter servers, and workers that train without waiting.

    Use this where workers differ in speed or come and go; with equal accelerators that
    stay, `MultiWorkerMirroredStrategy` trains faster and with the numbers of one
    device. Make models, optimizers and metrics in `scope()`, and schedule training
    steps through a `ClusterCoordinator`; in a step, `strategy.run(fn, args)` calls the
    function, as each worker is one replica.

    Workers and servers are Ray actors, which need `pip install 'meshlayout[ray]'`. They
    run in the Ray that the program has joined by `ray.init`, or on this machine.

    Args:
        num_workers: The number of workers.
        num_servers: The number of parameter servers.
        variable_partitioner: How variables are divided over the servers; None to leave
            them whole. Rows are divided alone. A partitioner, or a function of shape
            and dtype that returns the number of shards along each dim.
        max_staleness: How many other closures' changes a server may apply between the
            moment when a closure pulls variables and the one when it pushes. An older
            push is computed again from new values. None for any number.
        checkpoint_dir: An empty or new directory in which `ml.Checkpointer` keeps what
            a server needs that dies; None to let training fail then.
        checkpoint_every: After how many closures servers are saved.
        worker_options: Options of a worker's Ray actor, such as `{"num_gpus": 1}`.
        server_options: Options of a server's Ray actor.

    Raises:
        StrategyError: If an argument is wrong.
        MeshLayoutError: If Ray is not installed.
    """

    def __init__(
        self,
        num_workers: int,
        num_servers: int = 1,
        *,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        max_staleness: int | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 100,
        worker_options: Mapping[str, Any] | None = None,
        server_options: Mapping[str, Any] | None = None,
    ) -> None:
        def count(name: str, value: object, at_least: int = 1) -> int:
            return _checks.count(
                name, value, at_least=at_least, where=where, error=StrategyError
            )

        where = type(self).__name__
        self.num_workers = count("num_workers", num_workers)
        self.num_servers = count("num_servers", num_servers)
        self.checkpoint_every = count("checkpoint_every", checkpoint_every)
        self.max_staleness = (
            None if max_staleness is None else count("max_staleness", max_staleness, 0)
        )
        if variable_partitioner is not None:
            _checks.function(
                "variable_partitioner",
                variable_partitioner,
                "shape",
                "dtype",
                where=where,
                error=StrategyError,
            )
        self.variable_partitioner = variable_partitioner
        if checkpoint_dir is not None and not isinstance(
            checkpoint_dir, (str, os.PathLike)
        ):
            msg = (
                f"{where}: checkpoint_dir must be a path, got "
                f"{_checks.shown(checkpoint_dir)}."
            )
            raise StrategyError(msg)
        self._checkpoint_dir = checkpoint_dir
        self._has_coordinator = False
        self._options = {}
        for name, options in (("worker", worker_options), ("server", server_options)):
            if options is not None and not isinstance(options, Mapping):
                msg = (
                    f"{where}: {name}_options must be a dict of options of a Ray "
                    f"actor, got {_checks.shown(options)}."
                )
                raise StrategyError(msg)
            self._options[name] = dict(options or {})
        _optional.require("ray", extra="ray", purpose=where)
        # Objects on the coordinator are on one of its devices.
        mesh = create_mesh({REPLICA_AXIS: 1}, devices=jax.local_devices()[:1])
        super().__init__(mesh)

    def run(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> PyTree:
        """Calls a function in a scheduled one; refused on the coordinator.

        Args:
            fn: The function.
            args: Its arguments.
            kwargs: Its arguments by name.

        Raises:
            StrategyError: If it is not called in a function that a worker runs.
        """
        msg = (
            "ParameterServerStrategy.run was called on the coordinator, which computes "
            "nothing itself: call it in a function that you pass to "
            "ClusterCoordinator.schedule."
        )
        raise StrategyError(msg)

    def __reduce__(self) -> Any:
        # On a worker, there is one replica: the function that it runs.
        return get_strategy, ()

    def __repr__(self) -> str:
        workers = f"{self.num_workers} worker{'s' * (self.num_workers > 1)}"
        servers = f"{self.num_servers} parameter server{'s' * (self.num_servers > 1)}"
        return f"{type(self).__name__}({workers}, {servers})"

    def _store(self, variable: "nnx.Variable[Any]") -> None:
        """Leaves a Variable as it is: the coordinator places it when it is used."""

    def _start_cluster(self) -> "Cluster":
        return RayCluster(
            self.num_workers, self._options["worker"], self._options["server"]
        )

    def _checkpointer(self) -> Checkpointer | None:
        if self._checkpoint_dir is None:
            return None
        checkpointer = Checkpointer(self._checkpoint_dir, keep=2)
        if checkpointer.latest_step() is not None:
            checkpointer.close()
            msg = (
                f"ParameterServerStrategy: checkpoint_dir {self._checkpoint_dir} holds "
                "checkpoints of an earlier run, and this one would mix its own with "
                "them. Give an empty directory."
            )
            raise StrategyError(msg)
        return checkpointer
