"""Ready-made rules for how models lie on meshes."""

from meshlayout.parallel.experts import expert_parallel as expert_parallel
from meshlayout.parallel.tensor import tensor_parallel as tensor_parallel
