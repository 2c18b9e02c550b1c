"""Which operations of a jaxpr can be done one slice along dim 0 at a time, and how.

Elementwise operations and some that leave dim 0 alone. What is not known here is done
on whole arrays: the numbers are the same, and a device holds more.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Literal

from meshlayout import _jax, _jaxprs
from meshlayout._annotations import Equation


# Operations whose result at an index depends on the operands at that index alone.
_ELEMENTWISE = frozenset(
    {"abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2"}
    | {"atanh", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "copy_p"}
    | {"cos", "cosh", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1"}
    | {"floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p"}
    | {"logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "nextafter", "not"}
    | {"or", "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign"}
    | {"sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"}
)
_OVER_REPLICAS = ("psum", "pmax", "pmin")
_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or")


def has_slices(var: Any) -> bool:
    """Returns whether slices along dim 0 can be moved between host and device.

    Of vectors, and of matrices of elements smaller than four bytes, XLA cannot move
    one entry or row to a TPU or back: it is packed together with others.
    """
    ndim, itemsize = var.aval.ndim, _jax.itemsize(var.aval.dtype)
    return ndim > 2 or (ndim == 2 and itemsize >= 4)


def slice_operation(eqn: Equation) -> Callable[..., Any] | None:
    """Returns what an operation does to slices along dim 0; None if it mixes slices.

    The function takes slices and scalars, where the operation takes arrays and scalars.
    """
    name, params, shape = eqn.primitive.name, eqn.params, eqn.outvars[0].aval.shape
    operands = [var.aval.shape for var in eqn.invars]
    if not shape or all(operand[:1] != shape[:1] for operand in operands):
        return None
    if name in _ELEMENTWISE:
        is_plain = all(not x or x[:1] == shape[:1] for x in operands)
        return functools.partial(_apply, eqn) if is_plain else None
    if name in _OVER_REPLICAS:
        return functools.partial(_apply, eqn)
    if name == "transpose" and params["permutation"][0] == 0:
        dims = _inner(params["permutation"])
        return lambda x: jax.lax.transpose(x, dims)
    if name == "broadcast_in_dim" and 0 in params["broadcast_dimensions"]:
        dims = _inner(params["broadcast_dimensions"])
        return lambda x: jax.lax.broadcast_in_dim(x, shape[1:], dims)
    is_reshape = name == "reshape" and params.get("dimensions") is None
    if is_reshape or (name == "squeeze" and 0 not in params["dimensions"]):
        return lambda x: x.reshape(shape[1:])
    if name in _REDUCTIONS and 0 not in params["axes"]:
        return functools.partial(_reduced, eqn, [axis - 1 for axis in params["axes"]])
    return None


def is_elementwise(eqn: Equation) -> bool:
    """Returns whether an operation can be done on any equal shards of its operands."""
    shape = eqn.outvars[0].aval.shape
    operands = {var.aval.shape for var in eqn.invars}
    return eqn.primitive.name in _ELEMENTWISE and operands <= {(), shape}


def filled_slice(eqn: Equation) -> Callable[[Any], jax.Array] | None:
    """Returns what makes one slice of an array whose slices are all the same."""
    shape, dims = eqn.outvars[0].aval.shape, eqn.params.get("broadcast_dimensions")
    if eqn.primitive.name != "broadcast_in_dim" or not shape or 0 in dims:
        return None
    return lambda x: jax.lax.broadcast_in_dim(x, shape[1:], [dim - 1 for dim in dims])


def split_reduction(eqn: Equation) -> tuple[Any, Any] | None:
    """Returns a reduction over dim 0 and others in two steps, as of a gradient's norm.

    Returns:
        What reduces one slice, and what reduces the stacked results over dim 0; None if
        it is not such a reduction, or a slice is not reduced at all.
    """
    axes = eqn.params.get("axes", ())
    is_vector = bool(eqn.invars) and eqn.invars[0].aval.ndim == 1
    if eqn.primitive.name not in _REDUCTIONS or 0 not in axes:
        return None
    if len(axes) == 1 and not is_vector:
        return None
    inner = functools.partial(_reduced, eqn, _inner(axes))
    return inner, functools.partial(_reduced, eqn, (0,))


def streamed(jaxpr: Any, hosted: Iterable[Any]) -> set[Any]:
    """Returns the variables of a jaxpr that need not be whole on a device.

    These are connected to an operand or a result of a scan over dim 0, and to an input
    in host memory, by operations that can be done slice by slice.

    Args:
        jaxpr: The jaxpr, without calls of inner ones.
        hosted: Its inputs that are in host memory.
    """
    groups: dict[Any, set[Any]] = {}

    def join(var: Any, other: Any) -> None:
        group, others = (groups.setdefault(x, {x}) for x in (var, other))
        if group is not others:
            group |= others
            groups.update(dict.fromkeys(others, group))

    scanned: list[Any] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and eqn.params["length"] > 1:
            num_consts, num_carry = _jax.scan_counts(eqn)
            scanned += eqn.invars[num_consts + num_carry :]
            scanned += eqn.outvars[num_carry:]
        elif len(eqn.outvars) == 1 and slice_operation(eqn) is not None:
            for var in eqn.invars:
                if not isinstance(var, Literal) and var.aval.ndim:
                    join(var, eqn.outvars[0])
    inputs = set(hosted)
    anchors = (groups.get(v, {v}) for v in scanned if not isinstance(v, Literal))
    return set().union(*(group for group in anchors if group & inputs))


def part_of_slices(
    body: Any, result: int, constants: dict[int, Any], slices: set[int]
) -> tuple[list[int], Callable[..., jax.Array]] | None:
    """Returns how a result of a scan's body follows from slices and constants alone.

    Such as a kernel in another dtype, which the backward pass takes again. Kept for all
    slices, it would be as large as the variable that it is computed from.

    Args:
        body: The body, a closed jaxpr.
        result: Which of its results.
        constants: The operands that are the same for all slices, by index.
        slices: The indices of operands that are slices.

    Returns:
        The indices of the slices that it takes, and the function of these; None if it
        depends on anything else, or on no slice, or has side effects.
    """
    jaxpr, is_used = _jaxprs.needed(body.jaxpr, result)
    inputs = [i for i, used in enumerate(is_used) if used]
    taken = [i for i in inputs if i in slices]
    # What prints, for example, must not do so again.
    is_pure = not getattr(jaxpr, "effects", None)
    is_part = is_pure and all(i in slices or i in constants for i in inputs)
    if not taken or not is_part:
        return None

    def compute(*operands: jax.Array) -> jax.Array:
        values = constants | dict(zip(taken, operands, strict=True))
        return eval_jaxpr(jaxpr, body.consts, *(values[i] for i in inputs))[0]

    return taken, compute


def _inner(dims: Sequence[int]) -> list[int]:
    """Returns the dims besides 0 as dims of a slice."""
    return [dim - 1 for dim in dims if dim]


def _apply(eqn: Equation, *operands: Any) -> Any:
    return _jaxprs.apply_operation(eqn, list(operands), in_mesh=True)[0]


def _reduced(eqn: Equation, axes: Sequence[int], x: jax.Array) -> Any:
    params = eqn.params | {"axes": tuple(axes)}
    return eqn.primitive.bind(x, **params) if axes else x
