"""Code on shards: what models exchange along a mesh axis where layouts cannot say it.

An algorithm that meets one shard after another, such as ring attention, runs under
`jax.shard_map` here, on one mesh axis; all other axes stay with the compiler.
"""

from meshlayout.exchange.attention import (
    all_to_all_attention as all_to_all_attention,
    ring_attention as ring_attention,
)
from meshlayout.exchange.axes import MeshAxis as MeshAxis, find_axis as find_axis
from meshlayout.exchange.schedule import pipeline as pipeline, stages as stages
from meshlayout.exchange.tokens import dispatch as dispatch
