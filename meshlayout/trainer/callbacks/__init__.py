"""Callbacks of a trainer, and the base class for your own."""

from meshlayout._checks import names_of
from meshlayout.trainer.callbacks.callback import Callback as Callback
from meshlayout.trainer.callbacks.checkpoint import Checkpoint as Checkpoint
from meshlayout.trainer.callbacks.progress import Log as Log, Progress as Progress
from meshlayout.trainer.callbacks.stop_conditions import (
    EarlyStopping as EarlyStopping,
    StopOnNaN as StopOnNaN,
)


vars()["__getattr__"] = names_of(vars())
