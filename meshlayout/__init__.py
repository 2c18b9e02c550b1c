"""Meshes, layouts and SPMD training for JAX and Flax."""

from meshlayout import (
    checkpoint as checkpoint,
    data as data,
    losses as losses,
    metrics as metrics,
    testing as testing,
)
from meshlayout._default_mesh import (
    default_mesh as default_mesh,
    get_default_mesh as get_default_mesh,
)
from meshlayout.arrays import (
    arange as arange,
    call_with_layout as call_with_layout,
    check_layout as check_layout,
    copy_to_mesh as copy_to_mesh,
    fetch_layout as fetch_layout,
    full as full,
    normal as normal,
    ones as ones,
    pack as pack,
    relayout as relayout,
    relayout_like as relayout_like,
    to_numpy as to_numpy,
    uniform as uniform,
    unpack as unpack,
    zeros as zeros,
)
from meshlayout.checkpoint import Checkpointer as Checkpointer
from meshlayout.data import distribute_dataset as distribute_dataset
from meshlayout.devices import virtual_devices as virtual_devices
from meshlayout.errors import (
    CheckpointError as CheckpointError,
    CheckpointWarning as CheckpointWarning,
    DamagedCheckpointError as DamagedCheckpointError,
    DataError as DataError,
    LayoutError as LayoutError,
    LayoutMapError as LayoutMapError,
    LayoutMapKeyError as LayoutMapKeyError,
    LayoutWarning as LayoutWarning,
    LossError as LossError,
    MeshError as MeshError,
    MeshLayoutError as MeshLayoutError,
    MetricError as MetricError,
    RecompileWarning as RecompileWarning,
    RestoreDiffError as RestoreDiffError,
    StateError as StateError,
    StepError as StepError,
)
from meshlayout.layout import MATCH as MATCH, UNSHARDED as UNSHARDED, Layout as Layout
from meshlayout.layout_map import (
    Explanation as Explanation,
    LayoutMap as LayoutMap,
    Resolution as Resolution,
    Resolved as Resolved,
    Rule as Rule,
    constrain as constrain,
    zero_rule as zero_rule,
)
from meshlayout.mesh import (
    Mesh as Mesh,
    create_mesh as create_mesh,
)
from meshlayout.state import (
    Description as Description,
    MemoryEstimate as MemoryEstimate,
    TrainState as TrainState,
    create as create,
    describe as describe,
    optimizer_by_path as optimizer_by_path,
    with_layouts as with_layouts,
)
from meshlayout.state.precision import Policy as Policy
from meshlayout.step import (
    CompiledStep as CompiledStep,
    EvalStep as EvalStep,
    StepMemory as StepMemory,
    TrainStep as TrainStep,
    compile_step as compile_step,
    make_eval_step as make_eval_step,
    make_predict_step as make_predict_step,
    make_train_step as make_train_step,
    scan_epoch as scan_epoch,
)
from meshlayout.trainer import (
    History as History,
    Trainer as Trainer,
    callbacks as callbacks,
)
from meshlayout.visualize import visualize as visualize
