"""Meshes, layouts and SPMD training for JAX and Flax.

Each public name is loaded when it is first used (PEP 562), so a program loads only what
it uses, and the launcher, which starts programs, loads nothing.
"""

import importlib
import inspect
from typing import TYPE_CHECKING, Any


__version__ = "0.1.0"

# The public modules, and the other public names by the module that has them.
_MODULES = (
    *("arrays", "checkpoint", "cluster", "data", "distribute", "errors", "hlo"),
    *("layout_map", "losses", "metrics", "parallel", "planning", "state", "step"),
    *("testing", "trainer"),
)
_NAMES = {
    "arrays": "check_layout copy_to_mesh fetch_layout pack relayout to_numpy unpack",
    "checkpoint": "Checkpointer",
    "cluster": "initialize shutdown",
    "data": "distribute_dataset",
    "errors": "MeshLayoutError",
    "layout": "MATCH UNSHARDED Layout",
    "layout_map": "LayoutMap Rule constrain",
    "mesh": "Mesh create_mesh virtual_devices",
    "parallel": "zero_rule",
    "pictures": "visualize",
    "planning": "doctor plan",
    "state": "TrainState create describe optimizer_by_path scope",
    "step": "PrecisionPolicy compile_step make_eval_step make_predict_step "
    "make_train_step",
    "trainer": "History Trainer callbacks",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_MODULES, *_HOME])  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
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
        planning as planning,
        state as state,
        step as step,
        testing as testing,
        trainer as trainer,
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
    from meshlayout.errors import MeshLayoutError as MeshLayoutError
    from meshlayout.layout import (
        MATCH as MATCH,
        UNSHARDED as UNSHARDED,
        Layout as Layout,
    )
    from meshlayout.layout_map import (
        LayoutMap as LayoutMap,
        Rule as Rule,
        constrain as constrain,
    )
    from meshlayout.mesh import (
        Mesh as Mesh,
        create_mesh as create_mesh,
        virtual_devices as virtual_devices,
    )
    from meshlayout.parallel import zero_rule as zero_rule
    from meshlayout.pictures import visualize as visualize
    from meshlayout.planning import doctor as doctor, plan as plan
    from meshlayout.state import (
        TrainState as TrainState,
        create as create,
        describe as describe,
        optimizer_by_path as optimizer_by_path,
        scope as scope,
    )
    from meshlayout.step import (
        PrecisionPolicy as PrecisionPolicy,
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
else:  # to a type checker, every misspelled name would be right

    def __getattr__(name: str) -> Any:
        if name not in _HOME and name not in _MODULES:
            for module in () if name.startswith("_") else _MODULES:
                value = getattr(
                    importlib.import_module(f"{__name__}.{module}"), name, None
                )
                if value is not None and not inspect.ismodule(value):
                    msg = f"module {__name__!r} has no attribute {name!r}: write"
                    raise AttributeError(f"{msg} {__name__}.{module}.{name}")
            checks = importlib.import_module(f"{__name__}._checks")
            checks.unknown(f"module {__name__!r}", __all__, name)
        value = importlib.import_module(f"{__name__}.{_HOME.get(name, name)}")
        if name in _HOME:
            value = getattr(value, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    # Completion shows what users use, not the modules that are loaded.
    return [*__all__, "__version__"]
