"""Saves states, and restores them on any mesh: whole, verified, or not at all."""

from meshlayout.checkpoint.checkpointer import Checkpointer as Checkpointer
from meshlayout.checkpoint.difference import (
    Change as Change,
    RestoreDiff as RestoreDiff,
)
from meshlayout.checkpoint.inspection import (
    InspectedLeaf as InspectedLeaf,
    Inspection as Inspection,
)
from meshlayout.checkpoint.preemption import (
    EXIT_STATUS as EXIT_STATUS,
    Preempted as Preempted,
    Preemption as Preemption,
)
