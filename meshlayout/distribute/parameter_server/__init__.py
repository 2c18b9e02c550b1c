"""Asynchronous training: parameter servers and workers, as Ray actors."""

from meshlayout.distribute.parameter_server.coordinator import (
    ClusterCoordinator as ClusterCoordinator,
)
from meshlayout.distribute.parameter_server.partitioners import (
    FixedShardsPartitioner as FixedShardsPartitioner,
    MaxSizePartitioner as MaxSizePartitioner,
    MinSizePartitioner as MinSizePartitioner,
    Partitioner as Partitioner,
)
from meshlayout.distribute.parameter_server.per_worker_data import (
    PerWorkerDataset as PerWorkerDataset,
    PerWorkerIterator as PerWorkerIterator,
)
from meshlayout.distribute.parameter_server.results import (
    RemoteValue as RemoteValue,
    Staleness as Staleness,
    WorkerStaleness as WorkerStaleness,
)
from meshlayout.distribute.parameter_server.servers import (
    ServerCounts as ServerCounts,
)
from meshlayout.distribute.parameter_server.strategy import (
    ParameterServerStrategy as ParameterServerStrategy,
)
