"""Ready-made rules that lay out models on meshes, and code that runs on shards."""

from meshlayout import _checks
from meshlayout.exchange.attention import (
    all_to_all_attention as all_to_all_attention,
    ring_attention as ring_attention,
)
from meshlayout.exchange.schedule import pipeline as pipeline, stages as stages
from meshlayout.exchange.tokens import dispatch as dispatch
from meshlayout.parallel.composition import (
    Composition as Composition,
    compose as compose,
)
from meshlayout.parallel.data_parallelism import (
    FsdpRule as FsdpRule,
    data_parallel as data_parallel,
    fsdp as fsdp,
    zero_rule as zero_rule,
)
from meshlayout.parallel.tensor import (
    expert_parallel as expert_parallel,
    tensor_parallel as tensor_parallel,
)


vars()["__getattr__"] = _checks.names_of(vars())
