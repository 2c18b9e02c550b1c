"""tf.distribute's strategies: a function that runs once per replica.

Use them for code written per replica, such as code from TensorFlow. A strategy is a
mesh, a layout map that replicates everything, and `run`.
"""

from meshlayout import _checks
from meshlayout.collectives import (
    ReduceOp as ReduceOp,
    ReplicaContext as ReplicaContext,
    get_replica_context as get_replica_context,
    in_cross_replica_context as in_cross_replica_context,
)
from meshlayout.data import InputContext as InputContext
from meshlayout.distribute.central_storage import (
    CentralStorageStrategy as CentralStorageStrategy,
)
from meshlayout.distribute.datasets import ValueContext as ValueContext
from meshlayout.distribute.parameter_server import (
    ClusterCoordinator as ClusterCoordinator,
    ParameterServerStrategy as ParameterServerStrategy,
    PerWorkerDataset as PerWorkerDataset,
    RemoteValue as RemoteValue,
)
from meshlayout.distribute.strategy import (
    ClusterResolver as ClusterResolver,
    MirroredStrategy as MirroredStrategy,
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    OneDeviceStrategy as OneDeviceStrategy,
    Strategy as Strategy,
    StrategyExtended as StrategyExtended,
    TPUStrategy as TPUStrategy,
    get_strategy as get_strategy,
    has_strategy as has_strategy,
)
from meshlayout.distribute.values import PerReplica as PerReplica


vars()["__getattr__"] = _checks.names_of(vars())
