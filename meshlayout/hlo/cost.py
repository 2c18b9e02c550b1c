"""What a program computes: the FLOPs of its jaxpr, loops counted in full.

XLA's own `cost_analysis` counts a loop's body once, says nothing of FLOPs on GPUs, and
adds up whatever a platform's compiler made of the program. The jaxpr is the same on
every platform, and knows how often its scans run.
"""

import math
from dataclasses import dataclass

import jax

from meshlayout import _jax
from meshlayout._annotations import Equation


@dataclass(frozen=True)
class Cost:
    """What all devices together compute in one run of a program.

    Attributes:
        flops: Of matrix multiplications and convolutions, 2 per multiply-add, those
            with padding included. Elementwise operations are not counted.
        times_known: Whether it is known how often each operation runs. Otherwise a loop
            counts as one iteration, and of branches the one that computes most.
        uncounted: Operations whose FLOPs are not known, such as hand-written kernels.
    """

    flops: int
    times_known: bool = True
    uncounted: tuple[str, ...] = ()


def read_cost(program: jax.stages.Traced) -> Cost:
    """Counts the FLOPs of a traced program, on all devices together.

    Args:
        program: What `jax.jit(...).trace(...)` or a step's `trace` returns.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def chain(w, x):
        ...     return jax.lax.scan(lambda x, _: (x @ w, None), x, length=10)[0]
        >>> arguments = jnp.ones((64, 64)), jnp.ones((32, 64))
        >>> read_cost(jax.jit(chain).trace(*arguments)).flops
        2621440
    """
    return _total([_cost_of(eqn) for eqn in program.jaxpr.jaxpr.eqns])


def _total(costs: list[Cost]) -> Cost:
    names = dict.fromkeys(name for cost in costs for name in cost.uncounted)
    is_known = all(cost.times_known for cost in costs)
    return Cost(sum(cost.flops for cost in costs), is_known, tuple(names))


def _cost_of(eqn: Equation) -> Cost:
    name, params = eqn.primitive.name, eqn.params
    if name in ("pallas_call", "pure_callback", "io_callback", "ffi_call"):
        return Cost(0, uncounted=(name,))
    products = _products(eqn)
    if products:
        return Cost(2 * products * math.prod(eqn.outvars[0].aval.shape))
    bodies = [
        _total([_cost_of(x) for x in jaxpr.eqns]) for jaxpr in _jax.inner_jaxprs(eqn)
    ]
    whole = _total(bodies)
    if name == "cond":
        most = max(body.flops for body in bodies)
        return Cost(most, times_known=False, uncounted=whole.uncounted)
    times = params["length"] if name == "scan" else 1
    if name == "shard_map":  # the program of one device
        mesh = params["mesh"]
        manual = params.get("manual_axes", mesh.axis_names)
        times = math.prod(mesh.shape[axis] for axis in manual)
    is_known = whole.times_known and name != "while"
    return Cost(times * whole.flops, is_known, whole.uncounted)


def _products(eqn: Equation) -> int:
    """Returns how many products make one number of the result; 0 for others."""
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
