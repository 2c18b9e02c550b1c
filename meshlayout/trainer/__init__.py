"""`Trainer`: a tutorial's loop, with callbacks and parts that you can replace."""

from meshlayout.trainer import callbacks as callbacks
from meshlayout.trainer.history import History as History
from meshlayout.trainer.trainer import Trainer as Trainer
