"""`ParameterServerStrategy`: asynchronous training with parameter servers.

Workers compute gradients independently of each other, and push them to the servers that
hold the variables. Nobody waits for the slowest; the price is that a gradient may be
computed from variables that others have changed meanwhile. Ray starts the processes on
the machines of its cluster, which takes the place of `TF_CONFIG`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from meshlayout import _checks, _optional
from meshlayout._annotations import PyTree
from meshlayout.distribute.parameter_server.pushes import worker_strategy
from meshlayout.distribute.strategy import Strategy
from meshlayout.distribute.values import REPLICA_AXIS
from meshlayout.errors import StrategyError
from meshlayout.mesh_creation import create_mesh


class ParameterServerStrategy(Strategy):
    """Variables on parameter servers, and workers that train without waiting.

    Use this where workers differ in speed or come and go; with equal accelerators that
    stay, `MultiWorkerMirroredStrategy` trains faster and with the numbers of one
    device. Make models, optimizers and metrics in `scope()`, and schedule training
    steps through a `ClusterCoordinator`; in a step, `strategy.run(fn, args)` compiles
    and calls the function, as each worker is one replica, on its first device.

    Workers and servers are Ray actors, which need `pip install 'meshlayout[ray]'`. They
    run in the Ray that the program has joined by `ray.init`, or on this machine.

    Args:
        num_workers: The number of workers.
        num_servers: The number of parameter servers; variables go to them in turn.
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
        worker_options: Mapping[str, Any] | None = None,
        server_options: Mapping[str, Any] | None = None,
    ) -> None:
        where = type(self).__name__
        count = functools.partial(
            _checks.count, at_least=1, where=where, error=StrategyError
        )
        self.num_workers = count("num_workers", num_workers)
        self.num_servers = count("num_servers", num_servers)
        cpu = {"runtime_env": {"env_vars": {"JAX_PLATFORMS": "cpu"}}}
        self._worker_options = dict(worker_options or {})
        self._server_options = {**cpu, **(server_options or {})}
        _optional.require("ray", extra="ray", purpose=where)
        # Objects on the coordinator are on one of its devices.
        mesh = create_mesh({REPLICA_AXIS: 1}, devices=jax.local_devices()[:1])
        super().__init__(mesh)

    def run(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
        options: None = None,
    ) -> PyTree:
        """Compiles and calls a function in a scheduled one; an error elsewhere."""
        msg = (
            "ParameterServerStrategy.run was called on the coordinator, which computes "
            "nothing itself: call it in a function that you pass to "
            "ClusterCoordinator.schedule."
        )
        raise StrategyError(msg)

    def __reduce__(self) -> Any:
        return worker_strategy, ()

    def __repr__(self) -> str:
        workers = f"{self.num_workers} worker{'s' * (self.num_workers > 1)}"
        servers = f"{self.num_servers} parameter server{'s' * (self.num_servers > 1)}"
        return f"{type(self).__name__}({workers}, {servers})"
