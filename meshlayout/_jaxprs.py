"""Builders are traced, and run one operation at a time: with private JAX, as in `_jax`.

No public function of JAX does it: `jax.core.eval_jaxpr` would set the mesh that the
builder was traced under, and jit would change bits.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportAttributeAccessIssue=false

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import core as jax_core

from meshlayout._jax import no_mesh
from meshlayout._patches import SharedPatches


def apply_operation(
    primitive: Any, params: dict[str, Any], context: Any, operands: Sequence[Any]
) -> list[Any]:
    """Runs one operation of a jaxpr in the context that it was traced in.

    But without its mesh: the operands have layouts, perhaps on another one, and JAX
    would refuse them. If JAX binds operations in another way, tests/test_create.py
    notices.
    """
    bound = primitive.get_bind_params(params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with context.manager, no_mesh():
        results = primitive.bind(*functions, *operands, **params)
    return list(results) if primitive.multiple_results else [results]


# Flax asks every value of a Variable for its sharding. For a traced value, JAX answers
# with an AttributeError whose text names its origin, for which it walks all operations
# so far: quadratic in the size of a model. Inside this, the text is short. Once Flax or
# JAX fix it, test_describing_takes_time_in_proportion_to_the_layers passes without it.
short_sharding_errors = SharedPatches(
    (jax_core.Tracer, "sharding", lambda _: property(_no_sharding))
)


def _no_sharding(tracer: jax.core.Tracer) -> Any:
    msg = f"the 'sharding' attribute is not available on {type(tracer).__name__}."
    raise AttributeError(msg)
