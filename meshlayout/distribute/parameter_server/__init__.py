"""Asynchronous training: parameter servers and workers, as Ray actors."""

from meshlayout.distribute.parameter_server.coordinator import (
    ClusterCoordinator as ClusterCoordinator,
    ParameterServerStrategy as ParameterServerStrategy,
    PerWorkerDataset as PerWorkerDataset,
    RemoteValue as RemoteValue,
)
