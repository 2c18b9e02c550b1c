"""Creating, placing, moving and splitting sharded arrays, or pytrees of them."""

from meshlayout.arrays.creation import (
    arange as arange,
    call_with_layout as call_with_layout,
    full as full,
    normal as normal,
    ones as ones,
    uniform as uniform,
    zeros as zeros,
)
from meshlayout.arrays.parts import pack as pack, to_numpy as to_numpy, unpack as unpack
from meshlayout.arrays.placement import (
    check_layout as check_layout,
    copy_to_mesh as copy_to_mesh,
    fetch_layout as fetch_layout,
    relayout as relayout,
    relayout_like as relayout_like,
)
