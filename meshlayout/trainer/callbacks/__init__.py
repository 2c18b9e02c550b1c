"""Callbacks of a trainer, and the base class for your own."""

import functools

from meshlayout import _checks
from meshlayout.trainer.callbacks.callback import Callback as Callback
from meshlayout.trainer.callbacks.checkpoint import Checkpoint as Checkpoint
from meshlayout.trainer.callbacks.log import Log as Log
from meshlayout.trainer.callbacks.progress import Progress as Progress
from meshlayout.trainer.callbacks.stop_conditions import (
    EarlyStopping as EarlyStopping,
    StopOnNaN as StopOnNaN,
)


# Not `def`, by which a type checker would take every name.
globals()["__getattr__"] = functools.partial(_checks.unknown, __name__, globals())
