"""`Trainer`: the loop of a tutorial, with callbacks and parts to replace."""

from meshlayout.trainer import callbacks as callbacks
from meshlayout.trainer.history import History as History
from meshlayout.trainer.trainer import Trainer as Trainer
