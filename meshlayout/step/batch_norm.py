"""Batch statistics over the real examples of the whole global batch.

In a program over the global batch Flax's own statistics are already global; what is
left is to leave padding out, and to keep them exact when the batch is cut into
microbatches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx

from meshlayout import _paths
from meshlayout.errors import StepError
from meshlayout.step.calls import Call


_KINDS = (nn.BatchNorm, nnx.BatchNorm)


@dataclass(frozen=True)
class Moments:
    """Sums over the elements of one call of a BatchNorm, or of several microbatches.

    Attributes:
        first: Sum of the elements, float32, in the shape of the features.
        second: Sum of their squares (or of squared distances from the mean).
        count: How many elements were summed.
    """

    first: Any
    second: Any
    count: Any


jax.tree_util.register_dataclass(Moments, ["first", "second", "count"], [])


class Masking:
    """Leaves examples of weight 0 out of the statistics; see `calls.Interceptor`.

    Args:
        weights: The batch's weights, (batch,) or (batch, ...).
    """

    def __init__(self, weights: jax.Array) -> None:
        self._weights = weights

    def wants(self, path: str, module: Any) -> bool:
        """Tells whether a submodule is a BatchNorm."""
        return isinstance(module, _KINDS)

    def call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a BatchNorm with a mask, unless it has one."""
        if _uses_running_average(call.module, args, kwargs):
            return call.proceed(*args, **kwargs)
        if kwargs.get("mask") is None:
            real = real_mask(call.path, self._weights, args[0])
            # Without any real example all count, so that nothing is NaN.
            kwargs = {**kwargs, "mask": real | ~real.any()}
        return call.proceed(*args, **kwargs)


class BatchMoments(nnx.Intermediate[Any]):
    """Where an NNX BatchNorm leaves the moments of its calls."""


# Linen's collection for the same.
MOMENTS = "batch_moments"


class Replaying:
    """Normalises by given statistics, and leaves this part's share of them behind.

    See `calls.Interceptor`. The n-th call of a BatchNorm takes its n-th statistics.

    Args:
        weights: The weights of this part of the batch, or None.
        given: The whole batch's moments, by the BatchNorm's path, one for each call;
            empty to use those of this part alone.

    Attributes:
        order: How many passes over the batch it takes until the statistics are exact:
            those of one layer depend on those of the layers before it.
    """

    def __init__(
        self, weights: Any, given: Mapping[str, Sequence[Moments]] | None = None
    ) -> None:
        self._weights = weights
        self._given = given or {}
        self.order = 0

    def wants(self, path: str, module: Any) -> bool:
        """Tells whether a submodule is a BatchNorm."""
        return isinstance(module, _KINDS)

    def call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a BatchNorm with the whole batch's statistics."""
        module, x = call.module, args[0]
        if _uses_running_average(module, args, kwargs):
            return call.proceed(*args, **kwargs)
        mask = kwargs.get("mask")
        if mask is None and self._weights is not None:
            mask = real_mask(call.path, self._weights, x)
        self.order += 1 if module.use_fast_variance else 2
        of_all = self._given.get(call.path)
        given = None if of_all is None else of_all[_num_calls(module)]
        own = _moments(module, x, mask, given)
        kind: Any = MOMENTS if isinstance(module, nn.Module) else BatchMoments
        module.sow(kind, "moments", own)
        mean, variance = _mean_and_variance(module, own if given is None else given)
        before = _read(module)
        _write(module, (mean, variance))
        result = _normalised(call, x)
        momentum = module.momentum
        after = [
            momentum * old + (1 - momentum) * jax.lax.stop_gradient(new)
            for old, new in zip(before, (mean, variance), strict=True)
        ]
        _write(module, after)
        return result


def found_moments(model: Any) -> dict[str, tuple[Moments, ...]]:
    """Takes the moments of all BatchNorm calls out of a model that was called.

    Args:
        model: The model.

    Returns:
        By the BatchNorm's path, one for each call.
    """
    if isinstance(model, nn.Module):
        tree = dict(model.variables).get(MOMENTS, {})
    else:
        tree = nnx.to_pure_dict(nnx.pop(model, BatchMoments))
    found: dict[str, tuple[Moments, ...]] = {}
    _gather((), tree, found)
    return found


def _gather(path: tuple[str, ...], tree: Any, found: dict[str, Any]) -> None:
    if isinstance(tree, tuple):
        found["/".join(path[:-1])] = tree
        return
    for name, part in tree.items():
        _gather((*path, str(name)), part, found)


def real_mask(path: str, weights: jax.Array, x: jax.Array) -> jax.Array:
    """Returns which elements are real, in a shape that broadcasts to `x`.

    Raises:
        StepError: If the rows of `x` are not the examples.
    """
    if jnp.shape(x)[:1] != weights.shape[:1]:
        msg = (
            f"{path or 'the model'}: a BatchNorm is called with an array of shape "
            f"{jnp.shape(x)} in a batch with weights for {weights.shape[0]} examples: "
            "what is padding there cannot be told. Give it mask= in the model."
        )
        raise StepError(msg)
    real = weights != 0
    kept = 1
    while kept < min(real.ndim, x.ndim - 1) and real.shape[kept] == x.shape[kept]:
        kept += 1
    if kept < real.ndim:
        real = real.any(axis=tuple(range(kept, real.ndim)))
    return real.reshape(real.shape + (1,) * (x.ndim - kept))


def _uses_running_average(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    flag = args[1] if len(args) > 1 else kwargs.get("use_running_average")
    return bool(module.use_running_average if flag is None else flag)


def _normalised(call: Call, x: jax.Array) -> Any:
    """Calls a BatchNorm so that it uses the statistics it holds."""
    flag = call.module.use_running_average
    if flag is None or not isinstance(call.module, nn.Module):
        return call.proceed(x, use_running_average=True)
    # Linen refuses the flag in a call where the module was made with one.
    object.__setattr__(call.module, "use_running_average", True)
    try:
        return call.proceed(x)
    finally:
        object.__setattr__(call.module, "use_running_average", flag)


def _moments(module: Any, x: jax.Array, mask: Any, given: Moments | None) -> Moments:
    axis = module.axis
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    features = {one % x.ndim for one in axes}
    over = tuple(dim for dim in range(x.ndim) if dim not in features)
    x = x.astype("float32")
    kept = jnp.ones((), bool) if mask is None else mask
    count = jnp.broadcast_to(kept, x.shape).sum(axis=over).astype("float32")
    first = jnp.where(kept, x, 0).sum(axis=over)
    if module.use_fast_variance:
        squares = jnp.square(x)
    else:
        known = Moments(first, first, count) if given is None else given
        mean = known.first / jnp.maximum(known.count, 1)
        squares = jnp.square(x - jnp.expand_dims(mean, over))
    return Moments(first, jnp.where(kept, squares, 0).sum(axis=over), count)


def _mean_and_variance(module: Any, moments: Moments) -> tuple[jax.Array, jax.Array]:
    # A part of nothing but padding has no elements; the whole batch always has some.
    count = jnp.maximum(moments.count, 1)
    mean, second = moments.first / count, moments.second / count
    if not module.use_fast_variance:
        return mean, second
    return mean, jnp.maximum(0.0, second - jnp.square(mean))


def _num_calls(module: Any) -> int:
    """Returns how often a module was called before, in this pass."""
    if isinstance(module, nn.Module):
        return len(module.get_variable(MOMENTS, "moments", ()))
    variable = getattr(module, "moments", None)
    return 0 if variable is None else len(_paths.box_value(variable))


def _read(module: Any) -> tuple[Any, Any]:
    if isinstance(module, nn.Module):
        stats = [module.get_variable("batch_stats", name) for name in ("mean", "var")]
        return stats[0], stats[1]
    return module.mean[...], module.var[...]


def _write(module: Any, values: Sequence[Any]) -> None:
    for name, value in zip(("mean", "var"), values, strict=True):
        if isinstance(module, nn.Module):
            module.put_variable("batch_stats", name, value)
        else:
            variable = getattr(module, name)
            variable[...] = value.astype(variable[...].dtype)
