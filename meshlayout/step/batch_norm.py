"""Statistics of normalization layers in one program over the global batch.

Flax's own statistics are already those of the global batch there: a mean over rows that
are sharded is a mean over all of them. Two things are left. Padding has to be left out.
And layers that were written for pmap name an axis over which to average, which does not
exist here and is not needed.
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx

from meshlayout.errors import StepError
from meshlayout.step.interception import Call, Module, intercepting_classes


_BATCH_NORMS = (nn.BatchNorm, nnx.BatchNorm)
# InstanceNorm is new in Flax 0.12.
_NNX_NORMS = tuple(
    getattr(nnx, name)
    for name in ("BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm")
    if hasattr(nnx, name)
)


class WeightMask:
    """Leaves examples of weight 0 out of batch statistics; an `Interceptor`.

    Args:
        weights: The batch's weights, (batch,) or (batch, ...).
    """

    def __init__(self, weights: jax.Array) -> None:
        self._weights = weights

    def wants(self, path: str, module: Module) -> bool:
        """Returns whether a submodule is a BatchNorm."""
        return isinstance(module, _BATCH_NORMS)

    def call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a BatchNorm with a mask, unless it has one."""
        uses_average = _uses_running_average(call.module, args, kwargs)
        if not uses_average and kwargs.get("mask") is None:
            mask = _real_mask(call.path, self._weights, args[0])
            # Without any real example all count, so that nothing is NaN.
            kwargs = {**kwargs, "mask": mask | ~mask.any()}
        return call.proceed(*args, **kwargs)


def _uses_running_average(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    flag = args[1] if len(args) > 1 else kwargs.get("use_running_average")
    return bool(module.use_running_average if flag is None else flag)


def _real_mask(path: str, weights: jax.Array, x: jax.Array) -> jax.Array:
    """Returns which elements are real, in a shape that broadcasts to `x`.

    Raises:
        StepError: If the rows of `x` are not the examples.
    """
    if jnp.shape(x)[:1] != weights.shape[:1]:
        msg = (
            f"{path or 'the model'}: a BatchNorm is called with an array of shape "
            f"{jnp.shape(x)} in a batch with weights for {weights.shape[0]} examples, "
            "so which rows are padding is unknown. Pass it mask= in the model."
        )
        raise StepError(msg)
    real = weights != 0
    # The weights may be per token: as many of their dims as the features have, too.
    dims = 1
    while dims < min(real.ndim, x.ndim - 1) and real.shape[dims] == x.shape[dims]:
        dims += 1
    if dims < real.ndim:
        real = real.any(axis=tuple(range(dims, real.ndim)))
    return real.reshape(real.shape + (1,) * (x.ndim - dims))


class _UnboundAxes:
    """Lets layers ignore an `axis_name` that is not bound; an `Interceptor`.

    Inside a shard_map of the user's own the axis is bound, and counts.
    """

    def wants(self, path: str, module: Module) -> bool:
        """Returns whether a submodule averages over an axis that does not exist."""
        axis_name = getattr(module, "axis_name", None)
        return axis_name is not None and not _is_bound(axis_name)

    def call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a layer as if it named no axis."""
        # Past the guards of Linen (modules are frozen) and NNX (another trace).
        axis_name = call.module.axis_name
        object.__setattr__(call.module, "axis_name", None)
        try:
            return call.proceed(*args, **kwargs)
        finally:
            object.__setattr__(call.module, "axis_name", axis_name)


def _is_bound(axis_name: Any) -> bool:
    try:
        jax.lax.psum(1, axis_name)  # a number, known without tracing
    except NameError:
        return False
    return True


def ignoring_unbound_axes() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which layers written for pmap need no axis.

    Example:
        >>> norm = nnx.BatchNorm(2, axis_name="batch", rngs=nnx.Rngs(0))
        >>> with ignoring_unbound_axes():
        ...     print(norm(jnp.eye(2)).shape, norm.axis_name)
        (2, 2) batch
    """
    return intercepting_classes(_NNX_NORMS, (_UnboundAxes(),))
