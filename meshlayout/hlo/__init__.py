"""What a program sends, computes and holds, from its text and its jaxpr.

`compile_step` and the made steps have this as `step.communication`, `step.cost` and
`step.memory`; `read_communication` is for any other program that `jax.jit` compiled.
"""

from meshlayout.hlo.collectives import KINDS as KINDS, Collective as Collective
from meshlayout.hlo.communication import (
    Communication as Communication,
    read_communication as read_communication,
)
from meshlayout.hlo.cost import Cost as Cost, read_cost as read_cost
from meshlayout.hlo.origins import leaf_name as leaf_name
