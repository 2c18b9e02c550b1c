"""Jaxprs of private classes: run one operation at a time, and rewritten.

With `_jax`, the only place for private JAX. Creation runs a traced builder one
operation at a time, which no public function of JAX does: `jax.core.eval_jaxpr` would
set the mesh that the builder was traced under, and jit would change bits.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportAttributeAccessIssue=false

from typing import Any

import jax
from jax._src import core as jax_core
from jax._src.sharding_impls import UNSPECIFIED
from jax.sharding import NamedSharding

from meshlayout._annotations import Equation
from meshlayout._jax import is_explicit, no_mesh
from meshlayout._patches import SharedPatches


def apply_operation(eqn: Equation, operands: list[Any]) -> list[Any]:
    """Runs one operation of a jaxpr under the configuration that it was traced in.

    The mesh is left out of that configuration: the operands already have layouts, and
    JAX refuses operands on another mesh, or on axes of other types, than those of the
    mesh that is set. `jax.core.eval_jaxpr` would set it. If JAX binds operations in
    another way, creation fails, and tests/test_create.py notices.

    Args:
        eqn: The operation.
        operands: Its operands.
    """
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with eqn.ctx.manager, no_mesh():
        results = eqn.primitive.bind(*functions, *operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


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
    operands of any other type. This removes shardings from types and parameters, and
    the operations that only reshard values, also in inner jaxprs. It relies on the
    classes of jaxprs; if they change, tests/test_create_under_a_mesh.py notices. A
    jaxpr without Explicit axes is returned unchanged.
    """
    jaxpr = closed.jaxpr
    values = [v for eqn in jaxpr.eqns for v in (*eqn.invars, *eqn.outvars)]
    every = [*jaxpr.invars, *jaxpr.constvars, *values]
    if not any(is_explicit(getattr(var.aval, "sharding", None)) for var in every):
        return closed
    with no_mesh():
        return _without_types(closed)


# Operations that only change the sharding of a value.
_RESHARDING = ("reshard", "sharding_constraint", "mesh_cast")


def _without_types(value: Any) -> Any:
    """Returns a parameter of an operation, or a jaxpr, without shardings."""
    if type(value) in (tuple, list):  # named tuples hold no types
        return type(value)(map(_without_types, value))
    if isinstance(value, NamedSharding):
        return None
    if isinstance(value, jax_core.ShapedArray):
        return _untyped(value)
    if isinstance(value, jax_core.ClosedJaxpr):
        return value.replace(jaxpr=_without_types(value.jaxpr))
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
        if eqn.primitive.name in _RESHARDING:
            names[eqn.outvars[0]] = invars[0]
            continue
        params = {name: _without_types(param) for name, param in eqn.params.items()}
        # Of an inner jit: as if its caller had named no sharding.
        for name in ("in_shardings", "out_shardings"):
            if name in params:
                params[name] = (UNSPECIFIED,) * len(params[name])
        outvars = list(map(renamed, eqn.outvars))
        with eqn.ctx.manager, no_mesh():
            plain = jax_core.new_jaxpr_eqn(
                invars, outvars, eqn.primitive, params, eqn.effects, eqn.source_info
            )
        eqns.append(plain)
    return value.replace(
        invars=list(map(renamed, value.invars)),
        constvars=list(map(renamed, value.constvars)),
        outvars=list(map(renamed, value.outvars)),
        eqns=eqns,
    )


def _untyped(aval: Any) -> Any:
    """Returns an abstract value without its sharding; called where no mesh is set."""
    if not isinstance(aval, jax_core.ShapedArray):
        return aval
    return jax_core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)
