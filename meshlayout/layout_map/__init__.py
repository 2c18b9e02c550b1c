"""Layouts for a whole tree, by rules on the paths of its leaves."""

from meshlayout.layout_map.code import rules_for as rules_for
from meshlayout.layout_map.layout_map import (
    LayoutMap as LayoutMap,
    activate as activate,
    active_map as active_map,
    applied as applied,
    constrain as constrain,
)
from meshlayout.layout_map.report import (
    Explanation as Explanation,
    Resolution as Resolution,
    Resolved as Resolved,
)
from meshlayout.layout_map.rules import Rule as Rule
