"""The traced forward program of a model, and what becomes of its parameters in it.

A model is an NNX module, a Linen module, or any pytree of arrays with the function that
calls it; arrays or their shapes, or a function that builds one of these. It is traced
as its user calls it, abstractly: nothing is computed or put on a device.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx

from meshlayout import _checks, _jax, _jaxprs, _paths, _render
from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout.errors import LayoutMapError
from meshlayout.layout_map import LayoutMap, activate
from meshlayout.mesh import Mesh
from meshlayout.parallel.factors import OF_INPUTS, Value, fresh_dims
from meshlayout.parallel.flow import Flow
from meshlayout.parallel.program import walk
from meshlayout.state.creation import eager_sharding_off, is_array, trace


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

    Args:
        model_or_build: The model, or a function that builds it.
        example_inputs: The arguments of the call: a tuple, or the only one.
        call: How the model is called.
        where: The public function, which messages name.
        mesh: The mesh, if constraints that the model asks for by name matter.

    Raises:
        LayoutMapError: If the model cannot be called so.
    """
    context = _checks.Context(where=where, error=LayoutMapError)
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    hint = "Give arrays, or jax.ShapeDtypeStruct(shape, dtype)."
    _checks.has_arrays("example_inputs", inputs, **{**context, "hint": hint})
    if call is not None:
        names = [f"input_{index}" for index in range(len(inputs))]
        _checks.function("call", call, "model", *names, **context)
    with eager_sharding_off(), _jax.no_mesh():
        model = _built(model_or_build, where)
        arrays, rebuild_inputs = _split_arrays(inputs)
        shapes = ", ".join(_render.array_text(x.dtype, x.shape) for x in arrays)
        named = activate(LayoutMap(mesh, {".": [...]})) if mesh else nullcontext()
        tracing = _checks.noted(
            f"while {where} traces the model for inputs of {shapes}"
        )
        with named, _jaxprs.short_sharding_errors, tracing:
            tree, run = _as_function(model, inputs, call, where)
            values, rebuild_tree = _split_arrays(tree)

            def forward(values: list[Leaf], arrays: list[Leaf]) -> list[Leaf]:
                result = run(rebuild_tree(values), *rebuild_inputs(arrays))
                return [leaf for leaf in jax.tree.leaves(result) if is_array(leaf)]

            closed = jax.make_jaxpr(forward)(values, arrays)
    paths = [leaf.path for leaf in _paths.flatten(tree).leaves if is_array(leaf.value)]
    params: list[Parameter] = []
    for index, (path, x) in enumerate(zip(paths, values, strict=True)):
        # Keys and counts are not learned: what is made of them alone is no weight.
        is_quantized = jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize == 1
        is_weight = is_quantized or jnp.issubdtype(x.dtype, jnp.inexact)
        array = Value(x.shape, fresh_dims(x.shape), params=is_weight << index)
        params.append(Parameter(path, x.size * _jax.itemsize(x.dtype), array))
    flow = Flow()
    batch = [
        Value(x.shape, fresh_dims(x.shape, OF_INPUTS), of_inputs=True) for x in arrays
    ]
    walk(flow, closed.jaxpr, [*(param.array for param in params), *batch])
    return params, flow


def _built(model_or_build: Model | Callable[[], Model], where: str) -> Model:
    """Returns the model, which a function may build."""
    if isinstance(model_or_build, nn.Module) or _paths.holds_modules(model_or_build):
        return model_or_build
    hint = (
        "Give a module, a pytree of parameters with call=, or a function that builds "
        "one, such as lambda: Model(rngs=nnx.Rngs(0))."
    )
    context = _checks.Context(where=where, error=LayoutMapError, hint=hint)
    if not callable(model_or_build):
        _checks.has_arrays("model_or_build", model_or_build, **context)
        return model_or_build
    _checks.function("model_or_build", model_or_build, **context)
    with _checks.noted(f"while {where} builds the model"):
        traced = trace(model_or_build)
    _checks.has_arrays("what model_or_build returned", traced.node, **context)
    return traced.rebuild(traced.leaves)


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
        msg = (
            f"{where}: {_checks.shown(model)} does not say how it is called. Give "
            "call=, a function of the model and the inputs, such as call=module.apply."
        )
        raise LayoutMapError(msg)
    if not _paths.holds_modules(model):
        return model, call or model
    graphdef, state = nnx.split(model)

    def merged(state: PyTree, *inputs: Batch) -> PyTree:
        module = nnx.merge(graphdef, state)
        result = call(module, *inputs) if call else module(*inputs)
        return result, nnx.state(module)

    return state, merged


def _split_arrays(tree: PyTree) -> tuple[list[Leaf], Callable[[list[Leaf]], PyTree]]:
    """Returns the shapes of a tree's arrays, and how other ones take their places.

    What is not an array, such as `train=False`, stays.
    """
    leaves, treedef = jax.tree.flatten(tree)
    shapes = [
        jax.ShapeDtypeStruct(leaf.shape, _jax.canonical_dtype(leaf.dtype))
        for leaf in filter(is_array, leaves)
    ]

    def rebuild(arrays: list[Leaf]) -> PyTree:
        rest = iter(arrays)
        return treedef.unflatten([next(rest) if is_array(x) else x for x in leaves])

    return shapes, rebuild
