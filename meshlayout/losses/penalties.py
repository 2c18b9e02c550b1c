"""Losses that a loss function does not return: on parameters, and from inside models.

Neither kind belongs to the denominator of the examples' losses: a penalty does not
depend on the batch at all, and a recorded scalar is added unchanged.
"""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx
from jax.typing import ArrayLike

from meshlayout import _checks, _paths
from meshlayout._annotations import PyTree
from meshlayout.errors import LossError
from meshlayout.losses.reduction import real_array


Regularizer: TypeAlias = Callable[[PyTree], jax.Array]
"""A penalty on parameters: a function that returns a scalar."""

# Linen's collection for recorded losses.
COLLECTION = "losses"


def l2(strength: float, where: str | re.Pattern[str] = "") -> Regularizer:
    """Returns the penalty `strength * sum(w ** 2)`, like Keras' `regularizers.l2`.

    Use this in `make_train_step(..., regularizers={"l2": l2(1e-5)})`, which takes any
    function from parameters to a scalar. It is part of the loss, and so of the gradient
    that the optimizer scales; `optax.adamw` decays weights instead.

    Args:
        strength: The factor, not negative.
        where: Which parameters: a regular expression, searched for in their paths.

    Raises:
        LossError: If an argument is wrong; when called, if no parameter's path matches.

    Example:
        >>> float(l2(0.5, where="kernel")({"kernel": jnp.ones(4), "bias": jnp.ones(2)}))
        2.0
    """
    return _penalty("l2", strength, where, jnp.square)


def l1(strength: float, where: str | re.Pattern[str] = "") -> Regularizer:
    """Returns the penalty `strength * sum(abs(w))`; arguments and errors as `l2`.

    Example:
        >>> float(l1(0.5)({"kernel": -jnp.ones(4)}))
        2.0
    """
    return _penalty("l1", strength, where, jnp.abs)


def _penalty(
    name: str,
    strength: float,
    where: str | re.Pattern[str],
    function: Callable[[jax.Array], jax.Array],
) -> Regularizer:
    context: Any = {"where": name, "error": LossError}
    strength = _checks.number("strength", strength, at_least=0, **context)
    pattern = _checks.pattern("where", where, **context)

    def penalty(params: PyTree) -> jax.Array:
        leaves = _paths.flatten(params).leaves
        chosen = [leaf.value for leaf in leaves if pattern.search(leaf.path)]
        if not chosen:  # a typing error would switch regularization off
            paths = ", ".join(repr(leaf.path) for leaf in leaves[:4])
            msg = (
                f"{name}: no parameter's path matches {pattern.pattern!r}; there are "
                f"{paths}{', ...' if len(leaves) > 4 else ''}."
            )
            raise LossError(msg)
        # Summed in float32, as bfloat16 stops counting at 256.
        sums = [function(jnp.asarray(x).astype("float32")).sum() for x in chosen]
        return jnp.float32(strength) * jnp.stack(sums).sum()

    return penalty


# A type of its own, so that a step can tell losses from what a user sows for debugging.
class ModelLoss(nnx.Intermediate[Any]):
    """A loss that an NNX module has recorded; train and eval steps add it."""


def record(module: nnx.Module | nn.Module, name: str, loss: ArrayLike) -> None:
    """Records a loss inside a module; train and eval steps add it to the total.

    Use this for losses of activations, such as load balancing of experts. Works in NNX
    and in Linen modules. Recording under the same name again adds another loss.

    Args:
        module: The module, usually `self`.
        name: Its name; the metrics show it under the module's path.
        loss: One loss per example, (batch,) or (batch, ...), averaged like the losses
            of the loss function; or a scalar, which is added unchanged, and refused for
            a batch with weights.

    Raises:
        LossError: If `module` is not a Flax module, or `loss` is not an array.

    Example:
        >>> class Active(nnx.Module):
        ...     def __call__(self, x):
        ...         record(self, "activity", 0.01 * jnp.square(x))
        ...         return x
    """
    loss = real_array("loss", loss, "record")
    if isinstance(module, nn.Module):
        module.sow(COLLECTION, name, loss)
        return
    if not isinstance(module, nnx.Module):
        msg = f"record takes a Flax module first, got {_checks.shown(module)}."
        raise LossError(msg)
    with quiet_sow():
        module.sow(ModelLoss, name, loss)


@contextlib.contextmanager
def quiet_sow() -> Iterator[None]:
    """Silences Flax's warning that sown values should be captured; the step does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "\\s*Using 'Module.sow", DeprecationWarning)
        yield
