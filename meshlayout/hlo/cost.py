"""What a program computes: the FLOPs of its jaxpr, loops counted in full.

XLA's `cost_analysis` counts a loop's body once, has no FLOPs on GPUs, and depends on
the platform's compiler. The jaxpr is the same on all, and knows how often scans run.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax

from meshlayout import _checks, _jax
from meshlayout._annotations import Equation


@dataclass(frozen=True)
class Cost:
    """The computation of all devices together in one run of a program.

    Attributes:
        flops: FLOPs of matrix multiplications and convolutions, padding included, 2 per
            multiply-add. Elementwise operations are not counted.
        is_exact: False if a loop of unknown length counts as one iteration, only the
            largest branch counts, or a custom kernel or callback counts as 0.
    """

    flops: int
    is_exact: bool = True


@_checks.user_call
def read_cost(program: jax.stages.Traced) -> Cost:
    """Counts the FLOPs of a traced program, on all devices together.

    Args:
        program: What `jax.jit(...).trace(...)` or a step's `trace` returns.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> def chain(w, x):
        ...     return jax.lax.scan(lambda x, _: (x @ w, None), x, length=10)[0]
        >>> arguments = jnp.ones((64, 64)), jnp.ones((32, 64))
        >>> read_cost(jax.jit(chain).trace(*arguments)).flops
        2621440
    """
    return _cost(program.jaxpr.jaxpr)


_UNCOUNTED = ("pallas_call", "pure_callback", "io_callback", "ffi_call")


def _cost(jaxpr: Any) -> Cost:
    costs = [_cost_of(eqn) for eqn in jaxpr.eqns]
    return Cost(sum(cost.flops for cost in costs), all(x.is_exact for x in costs))


def _cost_of(eqn: Equation) -> Cost:
    name, params = eqn.primitive.name, eqn.params
    if name in _UNCOUNTED:
        return Cost(0, is_exact=False)
    if products := _products(eqn):
        return Cost(2 * products * math.prod(eqn.outvars[0].aval.shape))
    bodies = [_cost(jaxpr) for jaxpr in _jax.inner_jaxprs(eqn)]
    flops = [body.flops for body in bodies]
    times = params["length"] if name == "scan" else 1
    if name == "shard_map":  # the program of one device
        mesh = params["mesh"]
        manual = params.get("manual_axes", mesh.axis_names)
        times = math.prod(mesh.shape[axis] for axis in manual)
    is_exact = name not in ("cond", "while") and all(body.is_exact for body in bodies)
    return Cost(max(flops) if name == "cond" else times * sum(flops), is_exact)


def _products(eqn: Equation) -> int:
    """Returns the number of products per element of the result; 0 if other."""
    name, params = eqn.primitive.name, eqn.params
    numbers = params.get("dimension_numbers")
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        # Between the numbers of a dilated input, such as in gradients, are zeros.
        holes = kernel[numbers.rhs_spec[0]] * math.prod(params["lhs_dilation"])
        return math.prod(kernel) // holes
    if name == "ragged_dot_general":
        numbers = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    elif name != "dot_general":
        return 0
    (contracted, _), _ = numbers
    return math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
