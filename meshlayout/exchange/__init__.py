"""Code on shards, for exchanges along a mesh axis that layouts cannot express.

Algorithms that visit one shard after another, such as ring attention, run under
`jax.shard_map` here, on one mesh axis; the compiler handles all other axes.
"""
