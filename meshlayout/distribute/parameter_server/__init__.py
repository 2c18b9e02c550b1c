"""Asynchronous training: parameter servers and workers, as Ray actors."""

from meshlayout.distribute.parameter_server.coordinator import (
    ClusterCoordinator as ClusterCoordinator,
    PerWorkerDataset as PerWorkerDataset,
    RemoteValue as RemoteValue,
)
from meshlayout.distribute.parameter_server.strategy import (
    ParameterServerStrategy as ParameterServerStrategy,
)
