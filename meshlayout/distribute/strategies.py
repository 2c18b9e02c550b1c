"""The strategies that keep a copy of all variables on each replica.

They differ in their devices: one, those of this process, of all processes, or of a TPU
slice in the order of its network.
"""

import dataclasses
import json
import os
import warnings
from collections.abc import Iterable
from typing import Any

import jax

from meshlayout.cluster import initialize, process_count, process_index
from meshlayout.distribute.strategy import Strategy
from meshlayout.distribute.values import REPLICA_AXIS
from meshlayout.errors import LayoutWarning, StrategyError, stack_level
from meshlayout.mesh import Mesh, create_mesh, parse_devices


class OneDeviceStrategy(Strategy):
    """Everything on one device.

    Use this to try a program that is written for strategies: values are plain arrays.

    Args:
        device: The device, as an object or as text such as `"GPU:0"`.
    """

    def __init__(self, device: Any) -> None:
        super().__init__(local_mesh([device], "OneDeviceStrategy"))


class MirroredStrategy(Strategy):
    """Copies of the variables on several devices of this process, trained in step.

    Use this on one machine with several GPUs or virtual CPU devices.

    Args:
        devices: The devices, as objects or as text such as `"GPU:0"`; None for all of
            this process.

    Raises:
        StrategyError: If one belongs to another process.
    """

    def __init__(self, devices: Iterable[Any] | None = None) -> None:
        super().__init__(local_mesh(devices, "MirroredStrategy"))


@dataclasses.dataclass(frozen=True)
class ClusterResolver:
    """Which process of a cluster this is.

    Attributes:
        task_type: `"worker"`, or `"chief"` if `TF_CONFIG` says so.
        task_id: Its index among the tasks of this type.
        process_index: Its index among all processes.
        num_workers: The number of processes.
    """

    task_type: str
    task_id: int
    process_index: int
    num_workers: int


class MultiWorkerMirroredStrategy(Strategy):
    """Copies of the variables on all devices of all processes, trained in step.

    Make it first in the program, on every process: it calls `ml.initialize()`, which
    finds the other processes by `TF_CONFIG` and the like. Its `cluster_resolver` says
    which process of the cluster this is.
    """

    def __init__(self) -> None:
        initialize()
        super().__init__(create_mesh({REPLICA_AXIS: -1}))
        task = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {})
        kind, index = task.get("type", "worker"), process_index()
        number = int(task.get("index", index))
        self.cluster_resolver = ClusterResolver(kind, number, index, process_count())


class TPUStrategy(Strategy):
    """Copies of the variables on the chips of a TPU slice, trained in step.

    Replicas are in the order of the slice's network. On a slice of several hosts, call
    `ml.initialize()` first. Where there are no TPUs, it warns and takes the devices
    there are.
    """

    def __init__(self) -> None:
        mesh = create_mesh({REPLICA_AXIS: -1})
        if mesh.platform != "tpu":
            warnings.warn(
                f"TPUStrategy: there are no TPUs here. It runs on {mesh.size} "
                f"{mesh.platform.upper()} devices instead.",
                LayoutWarning,
                stacklevel=stack_level(),
            )
        super().__init__(mesh)


def local_mesh(devices: Iterable[Any] | None, name: str) -> Mesh:
    """Returns the mesh of a strategy for devices of this process, by default all."""
    chosen: Any = jax.local_devices() if devices is None else devices
    if not isinstance(chosen, str):  # TensorFlow writes "/gpu:0" and "/device:GPU:0"
        chosen = [
            x.rpartition("/")[2].removeprefix("device:") if isinstance(x, str) else x
            for x in chosen
        ]
    chosen, here = parse_devices(chosen), jax.process_index()
    for device in chosen:
        if device.process_index != here:
            msg = (
                f"{device} belongs to process {device.process_index}; {name} is for "
                f"the devices of one process, here {here}. Use "
                "MultiWorkerMirroredStrategy."
            )
            raise StrategyError(msg)
    return create_mesh({REPLICA_AXIS: len(chosen)}, devices=chosen)
