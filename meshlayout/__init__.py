"""Meshes, layouts and SPMD training for JAX and Flax."""

from meshlayout import (
    arrays as arrays,
    checkpoint as checkpoint,
    cluster as cluster,
    data as data,
    distribute as distribute,
    errors as errors,
    hlo as hlo,
    layout_map as layout_map,
    losses as losses,
    metrics as metrics,
    parallel as parallel,
    state as state,
    step as step,
    testing as testing,
    trainer as trainer,
)
from meshlayout._default_mesh import (
    default_mesh as default_mesh,
    get_default_mesh as get_default_mesh,
)
from meshlayout.arrays import (
    check_layout as check_layout,
    copy_to_mesh as copy_to_mesh,
    fetch_layout as fetch_layout,
    pack as pack,
    relayout as relayout,
    to_numpy as to_numpy,
    unpack as unpack,
)
from meshlayout.checkpoint import Checkpointer as Checkpointer
from meshlayout.cluster import initialize as initialize, shutdown as shutdown
from meshlayout.data import distribute_dataset as distribute_dataset
from meshlayout.devices import virtual_devices as virtual_devices
from meshlayout.errors import MeshLayoutError as MeshLayoutError
from meshlayout.layout import MATCH as MATCH, UNSHARDED as UNSHARDED, Layout as Layout
from meshlayout.layout_map import (
    LayoutMap as LayoutMap,
    Rule as Rule,
    constrain as constrain,
    zero_rule as zero_rule,
)
from meshlayout.mesh import Mesh as Mesh
from meshlayout.mesh_creation import create_mesh as create_mesh
from meshlayout.state import (
    PrecisionPolicy as PrecisionPolicy,
    TrainState as TrainState,
    create as create,
    describe as describe,
    optimizer_by_path as optimizer_by_path,
)
from meshlayout.step import (
    compile_step as compile_step,
    make_eval_step as make_eval_step,
    make_predict_step as make_predict_step,
    make_train_step as make_train_step,
)
from meshlayout.trainer import (
    History as History,
    Trainer as Trainer,
    callbacks as callbacks,
)
from meshlayout.visualize import visualize as visualize


__version__ = "0.1.0"

__all__ = [
    "MATCH",
    "UNSHARDED",
    "Checkpointer",
    "History",
    "Layout",
    "LayoutMap",
    "Mesh",
    "MeshLayoutError",
    "PrecisionPolicy",
    "Rule",
    "TrainState",
    "Trainer",
    "arrays",
    "callbacks",
    "check_layout",
    "checkpoint",
    "cluster",
    "compile_step",
    "constrain",
    "copy_to_mesh",
    "create",
    "create_mesh",
    "data",
    "default_mesh",
    "describe",
    "distribute",
    "distribute_dataset",
    "errors",
    "fetch_layout",
    "get_default_mesh",
    "hlo",
    "initialize",
    "layout_map",
    "losses",
    "make_eval_step",
    "make_predict_step",
    "make_train_step",
    "metrics",
    "optimizer_by_path",
    "pack",
    "parallel",
    "relayout",
    "shutdown",
    "state",
    "step",
    "testing",
    "to_numpy",
    "trainer",
    "unpack",
    "virtual_devices",
    "visualize",
    "zero_rule",
]


def __dir__() -> list[str]:
    # Completion shows what users use, not the modules that imports leave behind.
    return [*__all__, "__version__"]
