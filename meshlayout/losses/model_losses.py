"""Losses that a model records on its way, as activity regularization does."""

import warnings
from typing import Any

from flax import linen as nn, nnx
from jax.typing import ArrayLike

from meshlayout._checks import shown
from meshlayout.errors import LossError
from meshlayout.losses.averages import real_array


class ModelLoss(nnx.Intermediate[Any]):
    """A loss that an NNX module has sown; train and eval steps add it."""


# Linen's collection for the same.
COLLECTION = "losses"


def record(module: nnx.Module | nn.Module, name: str, loss: ArrayLike) -> None:
    """Records a loss inside a module; train and eval steps add it to the total.

    Works in NNX and in Linen modules. Recording under one name again adds another one.

    Args:
        module: The module, usually `self`.
        name: What it is called; the metrics show it under the module's path.
        loss: One loss per example, (batch,) or (batch, ...), averaged as the losses of
            the loss function are; or a scalar, which is added unchanged, and refused
            for a batch with weights.

    Raises:
        LossError: If `module` is not a Flax module.

    Example:
        >>> import jax.numpy as jnp
        >>> class Active(nnx.Module):
        ...     def __call__(self, x):
        ...         record(self, "activity", 0.01 * jnp.square(x))
        ...         return x
    """
    if not isinstance(name, str) or not name:
        msg = f"record: name must be a non-empty string, got {shown(name)}."
        raise LossError(msg)
    loss = real_array("loss", loss, "record")
    if isinstance(module, nn.Module):
        module.sow(COLLECTION, name, loss)
        return
    if not isinstance(module, nnx.Module):
        msg = f"record takes a Flax module first, got {shown(module)}."
        raise LossError(msg)
    with warnings.catch_warnings():
        # Flax would have this inside nnx.capture; a step collects it by itself.
        warnings.filterwarnings("ignore", "\\s*Using 'Module.sow", DeprecationWarning)
        module.sow(ModelLoss, name, loss)
