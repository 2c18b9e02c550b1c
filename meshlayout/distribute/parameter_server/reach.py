"""How far an optimizer looks: at single elements, whole variables, or all of them.

A server updates the rows that it has. That gives the numbers of one optimizer if each
element's update depends on this element's gradient alone, as in SGD and Adam. LAMB and
Adafactor look at a whole variable, and clipping by the global norm at all gradients:
with a part of them, these would compute something else without an error. So the traced
update is read, operation by operation. An operation that is not known to work on
elements counts as one that looks at everything it gets, which errs on the safe side.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from meshlayout import _jax
from meshlayout._annotations import Equation, PyTree
from meshlayout.layout_map.optimizer_states import find_slots


class Reach(enum.IntEnum):
    """What the update of one element depends on."""

    ELEMENT = 0
    VARIABLE = 1
    TREE = 2


class _Form(enum.IntEnum):
    """How the elements of a value depend on where they are."""

    UNIFORM = 0  # a number, or an array of equal ones
    ALIGNED = 1  # each element depends on the same element of a variable
    MIXED = 2  # anything else


@dataclass(frozen=True)
class _Dependence:
    """What is known of a value: the variables it depends on, and its form."""

    variables: frozenset[int] = frozenset()
    form: _Form = _Form.UNIFORM


@dataclass(frozen=True)
class OptimizerTrace:
    """An optimizer's update, traced.

    Attributes:
        reach: How far it looks.
        operations: The names of its operations. They are the same for fewer rows,
            unless it decides something by the shapes of variables.
        slots: For each leaf of the state, the index of its parameter, or None; and
            whether its rows are those of the parameter.
    """

    reach: Reach
    operations: tuple[str, ...]
    slots: tuple[tuple[int | None, bool], ...]


def trace_optimizer(
    tx: optax.GradientTransformation, params: PyTree, state: PyTree
) -> OptimizerTrace:
    """Reads what an optimizer's update depends on.

    Args:
        tx: The optimizer.
        params: The parameters, or their shapes and dtypes.
        state: Its state for them, or its shapes and dtypes.

    Example:
        >>> params = {"w": jax.ShapeDtypeStruct((2,), "float32")}
        >>> for tx in (optax.adam(1e-3), optax.lamb(1e-3), optax.clip(1.0)):
        ...     state = jax.eval_shape(tx.init, params)
        ...     print(trace_optimizer(tx, params, state).reach.name)
        ELEMENT
        VARIABLE
        ELEMENT
    """
    param_leaves, treedef = jax.tree.flatten(params)
    slots = find_slots(state, params)
    owners = [None if slot is None else slot.param for slot in slots]

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[Any, Any]:
        updates, new_state = tx.update(grads, state, params)
        return updates, new_state

    closed, shapes = jax.make_jaxpr(update, return_shape=True)(params, state, params)
    numbers = list(range(len(param_leaves)))
    inputs = [_of_variable(number) for number in numbers]
    inputs += [
        _Dependence() if owner is None else _of_variable(owner) for owner in owners
    ]
    # A slot of another shape than its parameter's does not follow its rows.
    state_leaves = jax.tree.leaves(state)
    for index, (leaf, owner) in enumerate(zip(state_leaves, owners, strict=True)):
        position = len(numbers) + index
        if owner is not None and leaf.shape != param_leaves[owner].shape:
            inputs[position] = _Dependence(inputs[position].variables, _Form.MIXED)
        elif owner is None and leaf.shape:
            inputs[position] = _Dependence(form=_Form.MIXED)
    inputs += [_of_variable(number) for number in numbers]
    outputs = _walk(closed.jaxpr, inputs)
    is_whole = jax.tree.structure(shapes[0]) == treedef and jax.tree.structure(
        shapes[1]
    ) == jax.tree.structure(state)
    reach = _reach(outputs, [*numbers, *owners]) if is_whole else Reach.TREE
    pairs = zip(state_leaves, owners, strict=True)
    follows = (
        (owner, owner is not None and leaf.shape == param_leaves[owner].shape)
        for leaf, owner in pairs
    )
    return OptimizerTrace(reach, tuple(_operations(closed.jaxpr)), tuple(follows))


def _of_variable(number: int) -> _Dependence:
    return _Dependence(frozenset({number}), _Form.ALIGNED)


def _reach(outputs: Sequence[_Dependence], owners: Sequence[int | None]) -> Reach:
    reach = Reach.ELEMENT
    for output, owner in zip(outputs, owners, strict=True):
        own = frozenset() if owner is None else frozenset({owner})
        if not output.variables <= own:
            return Reach.TREE
        if output.form is _Form.MIXED and owner is not None:
            reach = Reach.VARIABLE
    return reach


# Operations whose result has, at each position, a function of the operands there.
_ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2",
    "atanh", "cbrt", "ceil", "clamp", "complex", "conj", "convert_element_type", "copy",
    "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp",
    "exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le",
    "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "name", "ne",
    "neg", "nextafter", "not", "or", "population_count", "pow", "real",
    "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical",
    "sign", "sin", "sinh", "sqrt", "square", "stop_gradient",
    "sub", "tan", "tanh", "xor",
}  # fmt: skip

# Operations that call their only inner jaxpr once, with their operands in order.
_CALLS = {
    "checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "jit", "pjit", "remat", "remat2",
}  # fmt: skip


def _walk(jaxpr: Jaxpr, inputs: Sequence[_Dependence]) -> list[_Dependence]:
    """Returns what is known of each output."""
    # An array that is a constant has been made for the shapes of this trace.
    values: dict[Any, _Dependence] = {var: _constant(var) for var in jaxpr.constvars}
    values |= dict(zip(jaxpr.invars, inputs, strict=True))

    def look_up(var: Any) -> _Dependence:
        if isinstance(var, Literal):
            return _constant(var)
        return values[var]

    for eqn in jaxpr.eqns:
        results = _operation(eqn, [look_up(var) for var in eqn.invars])
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [look_up(var) for var in jaxpr.outvars]


def _constant(var: Any) -> _Dependence:
    return _Dependence(form=_Form.MIXED if var.aval.shape else _Form.UNIFORM)


def _operation(eqn: Equation, operands: list[_Dependence]) -> list[_Dependence]:
    name = eqn.primitive.name
    inner = _jax.inner_jaxprs(eqn)
    if name in _CALLS and len(inner) == 1 and len(inner[0].invars) == len(operands):
        return _walk(inner[0], operands)
    if name == "cond":
        index, *rest = operands
        branches = [_walk(branch, rest) for branch in inner]
        columns = zip(*branches, strict=True)
        return [_merged([index, *column]) for column in columns]
    merged = _merged(operands)
    shapes = {var.aval.shape for var in (*eqn.invars, *eqn.outvars)} - {()}
    is_uniform = merged.form is _Form.UNIFORM and not merged.variables
    out_is_scalar = not any(var.aval.shape for var in eqn.outvars)
    if name in _ELEMENTWISE and len(shapes) <= 1:
        form = merged.form
    elif is_uniform and (out_is_scalar or name in ("broadcast_in_dim", "reshape")):
        form = _Form.UNIFORM
    elif name == "broadcast_in_dim" and len(shapes) == 1 and eqn.invars[0].aval.shape:
        form = merged.form
    else:
        form = _Form.MIXED
    return [_Dependence(merged.variables, form)] * len(eqn.outvars)


def _merged(values: Sequence[_Dependence]) -> _Dependence:
    variables = frozenset().union(*(value.variables for value in values))
    form = max((value.form for value in values), default=_Form.UNIFORM)
    return _Dependence(variables, form)


def _operations(jaxpr: Jaxpr | ClosedJaxpr) -> list[str]:
    names = []
    for eqn in _jax.equations(jaxpr):
        if eqn.primitive.name != "broadcast_in_dim":  # of numbers to arrays
            names.append(eqn.primitive.name)
    return names
