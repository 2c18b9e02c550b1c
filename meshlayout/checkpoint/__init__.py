"""Saves states, and restores them on any mesh: whole, verified, or not at all."""

from meshlayout.checkpoint.checkpointer import Checkpointer as Checkpointer
from meshlayout.checkpoint.foreign import (
    load_arrays as load_arrays,
    load_msgpack as load_msgpack,
    load_orbax as load_orbax,
    load_safetensors as load_safetensors,
    save_safetensors as save_safetensors,
)
from meshlayout.checkpoint.load import Change as Change, RestoreDiff as RestoreDiff
from meshlayout.checkpoint.orbax import Inspection as Inspection
from meshlayout.cluster.preemption import (
    EXIT_STATUS as EXIT_STATUS,
    Preempted as Preempted,
    Preemption as Preemption,
)
