"""Jaxprs of private classes: run one operation at a time, and rewritten.

With `_jax`, the only place for private JAX. Creation runs a traced builder one
operation at a time, which no public function of JAX does: `jax.core.eval_jaxpr` would
set the mesh that the builder was traced under, and jit would change bits.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportAttributeAccessIssue=false

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import core as jax_core
from jax._src.sharding_impls import UNSPECIFIED
from jax.sharding import NamedSharding

from meshlayout._jax import is_explicit, no_mesh
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


def without_sharding_types(closed: Any) -> Any:
    """Returns a jaxpr as if traced without a mesh.

    On Explicit axes, the default of `jax.make_mesh`, every traced value has a sharding
    in its type, some operations have one among their parameters, and JAX refuses
    operands of any other type. It relies on the classes of jaxprs; if they change,
    tests/test_create_under_a_mesh.py notices. Other jaxprs are returned unchanged.
    """
    jaxpr = closed.jaxpr
    values = [v for eqn in jaxpr.eqns for v in (*eqn.invars, *eqn.outvars)]
    every = [*jaxpr.invars, *jaxpr.constvars, *values]
    if not any(is_explicit(getattr(var.aval, "sharding", None)) for var in every):
        return closed
    with no_mesh():
        return _untyped(closed)


def _untyped(value: Any) -> Any:
    """Returns a jaxpr, a type or a parameter of an operation without shardings."""
    if type(value) in (tuple, list):  # named tuples hold no types
        return type(value)(map(_untyped, value))
    if isinstance(value, NamedSharding):
        return None
    if isinstance(value, jax_core.ShapedArray):
        return jax_core.ShapedArray(value.shape, value.dtype, value.weak_type)
    if isinstance(value, jax_core.ClosedJaxpr):
        return value.replace(jaxpr=_untyped(value.jaxpr))
    if not isinstance(value, jax_core.Jaxpr):
        return value
    names: dict[Any, Any] = {}

    def renamed(var: Any) -> Any:
        if isinstance(var, jax_core.Literal):
            return jax_core.Literal(var.val, _untyped(var.aval))
        if var not in names:
            names[var] = jax_core.Var(_untyped(var.aval))
        return names[var]

    eqns = []
    for eqn in value.eqns:
        invars = list(map(renamed, eqn.invars))
        # These only change the sharding of a value.
        if eqn.primitive.name in ("reshard", "sharding_constraint", "mesh_cast"):
            names[eqn.outvars[0]] = invars[0]
            continue
        # An inner jit has the shardings of its operands.
        params = {
            name: (UNSPECIFIED,) * len(param)
            if name in ("in_shardings", "out_shardings")
            else _untyped(param)
            for name, param in eqn.params.items()
        }
        outvars = list(map(renamed, eqn.outvars))
        eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params))
    return value.replace(
        invars=list(map(renamed, value.invars)),
        constvars=list(map(renamed, value.constvars)),
        outvars=list(map(renamed, value.outvars)),
        eqns=eqns,
    )
