"""States created sharded: `create`, `scope`, `TrainState`."""

from meshlayout.state.creation import (
    StateDescription as StateDescription,
    create as create,
    describe as describe,
)
from meshlayout.state.model_scope import scope as scope
from meshlayout.state.train_state import (
    TrainState as TrainState,
    optimizer_by_path as optimizer_by_path,
)
