"""The traced forward program of a model, and what becomes of its parameters in it.

A model is traced as its user calls it, abstractly: nothing is computed or put on a
device. Then its jaxpr is walked once from the arguments to the results, inner jaxprs in
place. What a loop carries depends value by value, not each on all: else a counter would
make activations of the weights that it picks.
"""

import inspect
import itertools
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx
from jax.extend.core import Literal

from meshlayout import _checks, _jax, _paths, _render
from meshlayout._annotations import Batch, Equation, Leaf, PyTree
from meshlayout.errors import LayoutMapError
from meshlayout.layout_map import LayoutMap, activate
from meshlayout.mesh import Mesh
from meshlayout.parallel.factors import (
    OF_INPUTS,
    Flow,
    Value,
    block,
    fresh_dims,
    link_all,
    made_of,
    union,
)
from meshlayout.parallel.operations import OPERATIONS, STACKED, out_shapes, unknown
from meshlayout.state.creation import eager_sharding_off, is_array, trace
from meshlayout.state.train_state import start_training


Model: TypeAlias = PyTree
"""An NNX or Linen module, or a pytree of parameters; arrays may be abstract."""

Call: TypeAlias = Callable[..., PyTree]
"""`(model, *inputs) -> anything`, as a user calls a model."""


@dataclass(frozen=True, eq=False)
class Parameter:
    """An array of a model."""

    path: str
    nbytes: int
    array: Value  # its shape, and the factors of its dims


def follow(
    model_or_build: Model | Callable[[], Model],
    example_inputs: Batch,
    call: Call | None,
    where: str,
    mesh: Mesh | None = None,
) -> tuple[list[Parameter], Flow]:
    """Traces a model's forward program, and follows its parameters through it.

    With a mesh, constraints that the model asks for by name are in the program.
    """
    context = _checks.Context(where=where, error=LayoutMapError)
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    hint = "Give arrays, or jax.ShapeDtypeStruct(shape, dtype)."
    _checks.has_arrays("example_inputs", inputs, **{**context, "hint": hint})
    if call is not None:
        names = (f"input_{index}" for index in range(len(inputs)))
        hint = "Give a batch that is a tuple as (batch,)." if len(inputs) > 1 else ""
        options = {**context, "hint": hint, "keywords": ("rngs", "train")}
        _checks.function("call", call, "model", *names, **options)
        call = _as_loss(call)
    with eager_sharding_off(), _jax.no_mesh():
        model = _built(model_or_build, where)
        examples = filter(is_array, jax.tree.leaves(inputs))
        texts = ", ".join(_render.array_text(x.dtype, x.shape) for x in examples)
        named = activate(LayoutMap(mesh, {".": [...]})) if mesh else nullcontext()
        tracing = _checks.noted(f"while {where} traces the model for inputs of {texts}")
        with named, _jax.short_sharding_errors, tracing:
            tree, run = _as_function(model, inputs, call, where)
            shapes, rebuild = _split_arrays((tree, *inputs))

            def forward(values: list[Leaf]) -> list[Leaf]:
                result = run(*rebuild(values))
                return [leaf for leaf in jax.tree.leaves(result) if is_array(leaf)]

            closed = jax.make_jaxpr(forward)(shapes)
    flow = Flow()
    params: list[Parameter] = []
    paths = [leaf.path for leaf in _paths.flatten(tree).leaves if is_array(leaf.value)]
    for index, (path, x) in enumerate(zip(paths, shapes, strict=False)):
        # Keys and counts are not learned: what is made of them alone is not a weight.
        is_quantized = jnp.issubdtype(x.dtype, jnp.integer) and len(x.shape) > 1
        is_weight = is_quantized or jnp.issubdtype(x.dtype, jnp.inexact)
        array = Value(x.shape, fresh_dims(x.shape), params=is_weight << index)
        params.append(Parameter(path, x.size * _jax.itemsize(x.dtype), array))
    arrays = [param.array for param in params]
    for x in shapes[len(params) :]:
        arrays.append(Value(x.shape, fresh_dims(x.shape, OF_INPUTS), of_inputs=True))
    _walk(flow, closed.jaxpr, arrays)
    return params, flow


def _built(model_or_build: Model | Callable[[], Model], where: str) -> Model:
    """Returns the model, which a function may build."""
    if isinstance(model_or_build, nn.Module) or _paths.holds_modules(model_or_build):
        return model_or_build
    hint = "Give a module, parameters with call=, or a function that builds either."
    context = _checks.Context(where=where, error=LayoutMapError, hint=hint)
    if not callable(model_or_build):
        _checks.has_arrays("model_or_build", model_or_build, **context)
        return model_or_build
    _checks.function("model_or_build", model_or_build, **context)
    with _checks.noted(f"while {where} builds the model"):
        traced = trace(model_or_build)
    _checks.has_arrays("what model_or_build returned", traced.node, **context)
    model = traced.rebuild(traced.leaves)
    if isinstance(model, nnx.Module):
        start_training(model)
    return model


def _as_loss(call: Call) -> Call:
    """Returns a call with what a step, too, passes to a loss function that needs it."""
    parameters: dict[str, Any] = {}
    with suppress(ValueError):  # some of NumPy's have no signature
        parameters = {**inspect.signature(call).parameters}
    makers = {"rngs": lambda: nnx.Rngs(0), "train": lambda: True}
    empty = inspect.Parameter.empty
    needed = [x for x in makers if x in parameters and parameters[x].default is empty]
    return lambda *args: call(*args, **{name: makers[name]() for name in needed})


def _as_function(
    model: Model, inputs: tuple[Batch, ...], call: Call | None, where: str
) -> tuple[PyTree, Call]:
    """Returns a model's arrays, and its call as a function of these and the inputs."""
    if isinstance(model, nn.Module):
        arrays, rebuild = _split_arrays(inputs)
        variables = jax.eval_shape(
            lambda arrays: model.init(jax.random.key(0), *rebuild(arrays), method=call),
            arrays,
        )
        keys = {"params": jax.random.key(0)}  # Linen draws all others from it
        options: Any = {"method": call, "rngs": keys, "mutable": True}
        return variables, lambda *args: model.apply(*args, **options)
    if call is None and (not callable(model) or isinstance(model, type)):
        fact = f"{where}: {_checks.shown(model)} does not say how it is called"
        fix = "call=, a function of the model and the inputs, such as call=module.apply"
        raise LayoutMapError(f"{fact}. Give {fix}.")
    if not _paths.holds_modules(model):
        return model, call or model
    graphdef, state = nnx.split(model)

    def merged(state: PyTree, *inputs: Batch) -> PyTree:
        module = nnx.merge(graphdef, state)
        result = call(module, *inputs) if call else module(*inputs)
        return result, nnx.state(module)

    return state, merged


def _split_arrays(tree: PyTree) -> tuple[list[Leaf], Callable[[list[Leaf]], PyTree]]:
    """Returns the shapes of a tree's arrays, and how other ones take their places."""
    leaves, treedef = jax.tree.flatten(tree)
    shapes = [
        jax.ShapeDtypeStruct(leaf.shape, _jax.canonical_dtype(leaf.dtype))
        for leaf in filter(is_array, leaves)
    ]

    def rebuild(arrays: list[Leaf]) -> PyTree:
        rest = iter(arrays)
        return treedef.unflatten([next(rest) if is_array(x) else x for x in leaves])

    return shapes, rebuild


def _walk(flow: Flow, jaxpr: Any, args: Sequence[Value]) -> list[Value]:
    """Walks a jaxpr from its arguments, notes in a flow, and returns its results."""
    values: dict[Any, Value] = dict(zip(jaxpr.invars, args, strict=True))
    values |= {constant: _constant(constant) for constant in jaxpr.constvars}

    def read(var: Any) -> Value:
        return _constant(var) if isinstance(var, Literal) else values[var]

    for eqn in jaxpr.eqns:
        call = _CALLS.get(eqn.primitive.name, _operation)
        args = list(map(read, eqn.invars))
        results = call(flow, eqn, args)
        flow.visit(eqn, args, results)
        values.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _constant(var: Any) -> Value:
    shape = tuple(getattr(var.aval, "shape", ()))
    return Value(shape, fresh_dims(shape))


# Their results are their operands, in another form.
MOVES = {"convert_element_type", "copy", "reduce_precision", "reshape", "transpose"}
MOVES |= {"squeeze", "expand_dims"}


def _operation(flow: Flow, eqn: Equation, args: list[Value]) -> list[Value]:
    name = eqn.primitive.name
    flow.new_bits = 0
    flow.itemsize = max([1, *(_jax.itemsize(v.aval.dtype) for v in eqn.outvars[:1])])
    dims = OPERATIONS.get(name, unknown)(flow, eqn, *args)
    # A slice of a weight is a weight; but not a row that the inputs choose.
    is_row = sum(map(bool, [*dims, ()][0])) < 2 and any(x.of_inputs for x in args[1:])
    sources = args[:1] if name == "dynamic_slice" and not is_row else args
    results = [
        made_of(sources, shape, each, flow.new_bits)
        for shape, each in zip(out_shapes(eqn), dims, strict=True)
    ]
    if name in MOVES:
        return [replace(results[0], source=args[0].source)]
    return results


def _called(flow: Flow, eqn: Equation, args: list[Value]) -> list[Value]:
    return _walk(flow, _jax.inner_jaxprs(eqn)[0], args)


def _scan(flow: Flow, eqn: Equation, args: list[Value]) -> list[Value]:
    num_consts, num_carry = _jax.scan_counts(eqn)
    length = eqn.params["length"]
    (body,) = _jax.inner_jaxprs(eqn)
    consts, rest = args[:num_consts], args[num_consts:]
    carry, stacked = rest[:num_carry], rest[num_carry:]
    block([x.dims[0] for x in stacked], STACKED)
    slices = [replace(x, shape=x.shape[1:], dims=x.dims[1:]) for x in stacked]
    results = _looped(flow, body, consts, carry, slices, max(1, length))
    loop = fresh_dims((length,), STACKED)
    stacks = [
        replace(x, shape=(length, *x.shape), dims=(*loop, *x.dims))
        for x in results[num_carry:]
    ]
    return [*results[:num_carry], *stacks]


def _while(flow: Flow, eqn: Equation, args: list[Value]) -> list[Value]:
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    cond, body = (getattr(x, "jaxpr", x) for x in (cond, body))  # as they are in 0.12
    consts, carry = args[first : first + second], args[first + second :]
    _walk(flow, cond, (*args[:first], *carry))
    return _looped(flow, body, consts, carry, [], 1)  # how often is not known here


def _looped(
    flow: Flow,
    body: Any,
    consts: list[Value],
    carry: list[Value],
    slices: list[Value],
    length: int,
) -> list[Value]:
    """Walks the body of a loop, when it is known what each carried value depends on."""
    uses = [_jax.operands_of(body, index) for index in range(len(carry))]
    dependence = operator.attrgetter("params", "of_inputs", "history")
    while True:
        args = [*consts, *carry, *slices]
        after = [
            made_of([x, *itertools.compress(args, used)], x.shape, x.dims)
            for x, used in zip(carry, uses, strict=True)
        ]
        if list(map(dependence, after)) == list(map(dependence, carry)):
            break
        carry = after
    read = union(arg.weights for arg in args)
    constrained = {
        out_shapes(eqn)[0]
        for eqn in _jax.equations(body)
        if eqn.primitive.name == "sharding_constraint"
    }
    flow.loops += [
        (x.shape, read)
        for x, var in zip(carry, body.outvars, strict=False)
        if x.of_inputs and len(x.shape) > 1 and x.shape not in constrained
        if jnp.issubdtype(var.aval.dtype, jnp.inexact)
    ]
    runs = flow.runs
    flow.runs, flow.depth = runs * length, flow.depth + 1
    results = _walk(flow, body, args)
    flow.runs, flow.depth = runs, flow.depth - 1
    for x, result in zip(carry, results, strict=False):
        link_all(x.dims, result.dims)
    return results


def _conditional(flow: Flow, eqn: Equation, args: list[Value]) -> list[Value]:
    branches = [_walk(flow, inner, args[1:]) for inner in _jax.inner_jaxprs(eqn)]
    results: list[Value] = []
    for x, *others in zip(*branches, strict=True):
        for other in others:
            link_all(x.dims, other.dims)
        # It depends on what the branches make it of.
        results.append(made_of([x, *others], x.shape, x.dims))
    return results


_INLINED = """
    jit pjit closed_call core_call named_call checkpoint remat remat2 custom_jvp_call
    custom_vjp_call custom_vjp_call_jaxpr composite
"""
_CALLS: dict[str, Callable[..., list[Value]]] = {
    **dict.fromkeys(_INLINED.split(), _called),
    "scan": _scan,
    "while": _while,
    "cond": _conditional,
}
