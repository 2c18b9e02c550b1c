"""Meshes, layouts and SPMD training for JAX and Flax."""

from meshlayout.errors import (
    LayoutError as LayoutError,
    LayoutMapError as LayoutMapError,
    LayoutMapKeyError as LayoutMapKeyError,
    MeshError as MeshError,
    MeshLayoutError as MeshLayoutError,
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
)
from meshlayout.mesh import (
    Mesh as Mesh,
    create_mesh as create_mesh,
    default_mesh as default_mesh,
    get_default_mesh as get_default_mesh,
)
from meshlayout.state import (
    Description as Description,
    MemoryEstimate as MemoryEstimate,
    TrainState as TrainState,
    create as create,
    describe as describe,
    with_layouts as with_layouts,
)
