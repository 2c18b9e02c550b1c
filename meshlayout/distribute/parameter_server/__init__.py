"""Asynchronous training: parameter servers and workers, as Ray actors."""

from meshlayout.distribute.parameter_server.closure_queue import (
    RemoteValue as RemoteValue,
)
from meshlayout.distribute.parameter_server.coordinator import (
    ClusterCoordinator as ClusterCoordinator,
    PerWorkerDataset as PerWorkerDataset,
    PerWorkerIterator as PerWorkerIterator,
    Staleness as Staleness,
    WorkerStaleness as WorkerStaleness,
)
from meshlayout.distribute.parameter_server.partitioners import (
    FixedShardsPartitioner as FixedShardsPartitioner,
    MaxSizePartitioner as MaxSizePartitioner,
    MinSizePartitioner as MinSizePartitioner,
    Partitioner as Partitioner,
)
from meshlayout.distribute.parameter_server.servers import (
    ServerCounts as ServerCounts,
)
from meshlayout.distribute.parameter_server.strategy import (
    ParameterServerStrategy as ParameterServerStrategy,
)
