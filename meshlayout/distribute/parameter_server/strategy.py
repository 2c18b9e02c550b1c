"""`ParameterServerStrategy`: asynchronous training with parameter servers.

Nobody waits for the slowest worker; the price is gradients of former variables.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import jax

from meshlayout import _checks
from meshlayout.distribute.parameter_server.workers import WorkerStrategy, ray_module
from meshlayout.distribute.strategy import Strategy
from meshlayout.distribute.values import REPLICA_AXIS
from meshlayout.errors import StrategyError
from meshlayout.mesh import create_mesh


class ParameterServerStrategy(Strategy):
    """Variables on parameter servers, and workers that train without waiting.

    Use this where workers differ in speed or come and go. Schedule training steps
    through a `ClusterCoordinator`. Workers and servers are actors of the Ray that
    `ray.init` has joined, or of one on this machine (`meshlayout[ray]`).

    Args:
        num_workers: The number of workers.
        num_servers: The number of parameter servers; variables go to them in turn.
        worker_options: Options of a worker's Ray actor, such as `{"num_gpus": 1}`.
        server_options: Options of a server's Ray actor.
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
        msg = "run was called on the coordinator: call it in a scheduled function."
        raise StrategyError(msg)

    def __reduce__(self) -> Any:
        return WorkerStrategy, ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_workers}, {self.num_servers})"
