"""Layouts for a whole tree, by rules on the paths of its leaves."""

from meshlayout.layout_map.activations import (
    constrain as constrain,
    in_force as in_force,
)
from meshlayout.layout_map.explain import Explanation as Explanation
from meshlayout.layout_map.layout_map import (
    LayoutMap as LayoutMap,
    register_scope_factory as register_scope_factory,
)
from meshlayout.layout_map.metadata import (
    OWN_LAYOUT as OWN_LAYOUT,
    LayoutBox as LayoutBox,
)
from meshlayout.layout_map.resolution import (
    Resolution as Resolution,
    Resolved as Resolved,
)
from meshlayout.layout_map.rules import Rule as Rule
from meshlayout.layout_map.zero import zero_rule as zero_rule
