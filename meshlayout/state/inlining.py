"""Takes apart the operations whose bodies JAX without jit runs one by one."""

from collections.abc import Iterable, Iterator
from typing import Any

from meshlayout.state.cuts import is_literal


class _Value:
    """A variable of a traced function, of which one body can have many copies."""

    def __init__(self, aval: Any) -> None:
        self.aval = aval


_OPENED = ("remat2", "remat", "checkpoint", "custom_jvp_call", "custom_vjp_call")


def inlined(
    eqns: Iterable[Any], names: dict[Any, Any], consts: dict[Any, Any]
) -> Iterator[Any]:
    """Yields operations without those of `jax.checkpoint` and custom derivatives.

    Args:
        eqns: The operations of a jaxpr.
        names: What its variables are called in the result; filled in on the way.
        consts: Values by variable; those of inner jaxprs are added.
    """
    for eqn in eqns:
        invars = [var if is_literal(var) else names.get(var, var) for var in eqn.invars]
        if eqn.primitive.name == "sharding_constraint":
            # The layout map decides; a constraint would be computed whole.
            names[eqn.outvars[0]] = invars[0]
            continue
        if eqn.primitive.name not in _OPENED:
            outvars = [_Value(var.aval) for var in eqn.outvars]
            names.update(zip(eqn.outvars, outvars, strict=True))
            yield eqn.replace(invars=invars, outvars=outvars)
            continue
        params = eqn.params
        closed = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
        body = getattr(closed, "jaxpr", closed)
        inner = dict(zip(body.invars, invars, strict=True))
        for var, value in zip(
            body.constvars, getattr(closed, "consts", ()), strict=False
        ):
            inner[var] = _Value(var.aval)
            consts[inner[var]] = value
        yield from inlined(body.eqns, inner, consts)
        for out, var in zip(eqn.outvars, body.outvars, strict=True):
            names[out] = var if is_literal(var) else inner[var]
