"""What a program computes: the FLOPs of its jaxpr, loops counted in full.

XLA's own `cost_analysis` counts a loop's body once, says nothing of FLOPs on GPUs, and
adds up whatever a platform's compiler made of the program. The jaxpr is the same on
every platform, and knows how often its scans run.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax

from meshlayout import _jax, _render
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

    def __str__(self) -> str:
        notes = []
        if self.uncounted:
            notes.append(f"not counted: the FLOPs of {', '.join(self.uncounted)}")
        if not self.times_known:
            notes.append(
                "loops of unknown length count as one iteration, branches as taken"
            )
        rows = [["FLOPs", f"{self.flops:,}"]]
        return _render.text_table(["", "all devices"], rows, "lr", notes)

    __repr__ = __str__


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
    return _cost_of(program.jaxpr.jaxpr)


_KERNELS = ("pallas_call", "pure_callback", "io_callback", "ffi_call")


def _cost_of(jaxpr: Any) -> Cost:
    costs = [_equation_cost(eqn) for eqn in jaxpr.eqns]
    return Cost(
        sum(cost.flops for cost in costs),
        all(cost.times_known for cost in costs),
        tuple(dict.fromkeys(name for cost in costs for name in cost.uncounted)),
    )


def _equation_cost(eqn: Equation) -> Cost:
    name, params = eqn.primitive.name, eqn.params
    if name in _KERNELS:
        return Cost(0, uncounted=(name,))
    if name in ("dot_general", "ragged_dot_general", "conv_general_dilated"):
        shapes = [x.aval.shape for x in eqn.invars[:2]]
        products = _products(params, *shapes)
        return Cost(2 * products * math.prod(eqn.outvars[0].aval.shape))
    inner = [_cost_of(jaxpr) for jaxpr in _jax.inner_jaxprs(eqn)]
    flops = [cost.flops for cost in inner]
    times = params["length"] if name == "scan" else 1
    if name == "shard_map":  # the program of one device
        mesh = params["mesh"]
        manual = params.get("manual_axes", mesh.axis_names)
        times = math.prod(mesh.shape[axis] for axis in manual)
    return Cost(
        max(flops) if name == "cond" else times * sum(flops),
        name not in ("while", "cond") and all(cost.times_known for cost in inner),
        tuple(kernel for cost in inner for kernel in cost.uncounted),
    )


def _products(params: Any, left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Returns how many products make one number of the result."""
    numbers = params.get("dimension_numbers")
    if "lhs_dilation" in params:
        outputs = right[numbers.rhs_spec[0]]
        # Between the numbers of a dilated input, such as in gradients, are zeros.
        return math.prod(right) // outputs // math.prod(params["lhs_dilation"])
    if numbers is None:
        numbers = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    (contracted, _), _ = numbers
    return math.prod(left[dim] for dim in contracted)
