"""The only place for jax.experimental, private JAX and differences between versions.

Everything else in the library uses the public API that jax 0.7.2 and later share.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import mesh as jax_mesh, xla_bridge
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def is_unreduced(spec: PartitionSpec) -> bool:
    """Tells whether a spec has axes that hold partial sums."""
    return bool(getattr(spec, "unreduced", ()) or getattr(spec, "reduced", ()))


def sharding_of(value: Any) -> jax.sharding.Sharding | None:
    """Returns the sharding of an array, an abstract array or a traced value.

    While tracing, JAX knows it only on a mesh whose axes are all Explicit.
    """
    if not isinstance(value, jax.core.Tracer):
        return getattr(value, "sharding", None)
    sharding = getattr(jax.typeof(value), "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    types = sharding.mesh.axis_types
    known = bool(types) and all(kind == AxisType.Explicit for kind in types)
    return sharding if known else None


def itemsize(dtype: Any) -> int:
    """Returns the bytes of one element in an array; for PRNG keys, of a key's words.

    Arrays are 32-bit where JAX is not told otherwise, whatever NumPy's dtype says.
    """
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        words = jax.eval_shape(
            jax.random.key_data, jax.ShapeDtypeStruct((), dtype)
        )
        return math.prod(words.shape) * np.dtype(words.dtype).itemsize
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype)).itemsize


def memory_kinds(device: Any) -> tuple[tuple[str, ...], str | None]:
    """Returns the memories a device has, and its default one.

    A device of a topology description has none to ask: `((), None)`.
    """
    try:
        kinds = tuple(memory.kind for memory in device.addressable_memories())
        return kinds, device.default_memory().kind
    except (AttributeError, jax.errors.JaxRuntimeError, NotImplementedError):
        return (), None


def traced(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """Traces a function once.

    Returns:
        Its jaxpr, closed, and the tree of `ShapeDtypeStruct` of its results.
    """
    return jax.make_jaxpr(function, return_shape=True)(*arguments)


def apply_operation(eqn: Any, operands: list[Any]) -> list[Any]:
    """Applies one operation of a jaxpr, under the configuration it was traced in."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*functions, *operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def inner_jaxprs(eqn: Any) -> list[Any]:
    """Returns the jaxprs that an operation holds, as jit, scan and cond do."""
    found = []
    for value in eqn.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(one, "jaxpr", one)
            if hasattr(inner, "eqns"):
                found.append(inner)
    return found


def backends_started() -> bool:
    """Tells whether JAX has looked at the devices already."""
    return xla_bridge.backends_are_initialized()


def concrete_mesh() -> jax.sharding.Mesh | None:
    """Returns the mesh that `jax.set_mesh` has set, or None."""
    mesh = jax_mesh.get_concrete_mesh()
    return mesh if isinstance(mesh, jax.sharding.Mesh) and mesh.size else None


def concrete_mesh_for(abstract: Any) -> jax.sharding.Mesh | None:
    """Returns the mesh that is set, if it is the one that `abstract` describes."""
    mesh = concrete_mesh()
    return mesh if mesh is not None and mesh.abstract_mesh == abstract else None


def place(x: Any, sharding: NamedSharding) -> Any:
    """Moves a value to a sharding; inside jit, constrains it."""
    if not isinstance(x, jax.core.Tracer):
        return jax.device_put(x, sharding)
    explicit = [kind == AxisType.Explicit for kind in sharding.mesh.axis_types]
    if any(explicit):
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)
