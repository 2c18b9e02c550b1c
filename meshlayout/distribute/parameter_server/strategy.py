"""`ParameterServerStrategy`: asynchronous training with parameter servers.

Workers compute gradients independently of each other, and push them to the servers that
hold the variables. Nobody waits for the slowest; the price is that a gradient may be
computed from variables that others have changed meanwhile. Ray starts the processes on
the machines of its cluster, which takes the place of `TF_CONFIG`.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import jax

from meshlayout import _checks
from meshlayout.distribute.parameter_server.worker import ray_module, worker_strategy
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
        context: Any = {"where": type(self).__name__, "error": StrategyError}
        count = _checks.count
        self.num_workers = count("num_workers", num_workers, at_least=1, **context)
        self.num_servers = count("num_servers", num_servers, at_least=1, **context)
        ray_module()  # refuses, if it is not installed
        cpu = {"runtime_env": {"env_vars": {"JAX_PLATFORMS": "cpu"}}}
        self._worker_options = dict(worker_options or {})
        self._server_options = {**cpu, **(server_options or {})}
        # Objects on the coordinator are on one of its devices.
        mesh = create_mesh({REPLICA_AXIS: 1}, devices=jax.local_devices()[:1])
        super().__init__(mesh)
        self._coordinator: Any = None

    def _run(self, fn: Any, args: Any, kwargs: Any) -> NoReturn:
        msg = (
            "ParameterServerStrategy.run was called on the coordinator, which computes "
            "nothing itself: call it in a function that you pass to "
            "ClusterCoordinator.schedule."
        )
        raise StrategyError(msg)

    def __reduce__(self) -> Any:
        return worker_strategy, ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_workers}, {self.num_servers})"
