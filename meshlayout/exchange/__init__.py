"""Code on shards, for exchanges along a mesh axis that layouts cannot express.

Algorithms that visit one shard after another, such as ring attention, run under
`jax.shard_map` here, on one mesh axis; the compiler handles all other axes.
"""

from meshlayout.exchange.attention import (
    all_to_all_attention as all_to_all_attention,
    ring_attention as ring_attention,
)
from meshlayout.exchange.axes import MeshAxis as MeshAxis, find_axis as find_axis
from meshlayout.exchange.schedule import pipeline as pipeline, stages as stages
from meshlayout.exchange.tokens import dispatch as dispatch
