"""Losses that a loss function does not return: on parameters, and from inside models.

Neither kind belongs to the denominator of the examples' losses: a penalty does not
depend on the batch at all, and a recorded scalar is added unchanged.
"""

import re
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx
from jax.typing import ArrayLike

from meshlayout import _checks, _paths
from meshlayout._annotations import PyTree
from meshlayout.errors import LossError
from meshlayout.losses.reduction import real_array


@dataclass(frozen=True)
class Regularizer:
    """A penalty on the parameters whose paths match; made by `l1` and `l2`.

    Calling it with a tree of parameters returns a float32 scalar. It does not depend on
    the batch, so no denominator applies to it.

    Attributes:
        name: Its name in a step's metrics.
        strength: The factor.
        where: A regular expression, which may be compiled, searched for in the paths.
        power: 1 for absolute values, 2 for squares.
    """

    name: str
    strength: float
    where: str | re.Pattern[str]
    power: Literal[1, 2]

    def __call__(self, params: PyTree) -> jax.Array:
        """Returns the penalty.

        Args:
            params: A tree of parameters.

        Raises:
            LossError: If no parameter's path matches: a typing error in `where` would
                otherwise switch regularization off.
        """
        pattern = re.compile(self.where)
        leaves = _paths.flatten(params).leaves
        chosen = [leaf.value for leaf in leaves if pattern.search(leaf.path)]
        if not chosen:
            paths = ", ".join(repr(leaf.path) for leaf in leaves[:4])
            msg = (
                f"{self.name}: no parameter's path matches {pattern.pattern!r}; there "
                f"are {paths}{', ...' if len(leaves) > 4 else ''}."
            )
            raise LossError(msg)
        # Summed in float32, as bfloat16 stops counting at 256.
        sums = [self._sum(jnp.asarray(leaf).astype("float32")) for leaf in chosen]
        return jnp.float32(self.strength) * jnp.stack(sums).sum()

    def _sum(self, leaf: jax.Array) -> jax.Array:
        return jnp.abs(leaf).sum() if self.power == 1 else jnp.square(leaf).sum()


def l2(
    strength: float, where: str | re.Pattern[str] = "", *, name: str = "l2"
) -> Regularizer:
    """Returns the penalty `strength * sum(w ** 2)`, like Keras' `regularizers.l2`.

    Use this in `make_train_step(..., regularizers=[...])`. It is part of the loss, and
    so of the gradient that the optimizer scales; `optax.adamw` decays weights instead.

    Args:
        strength: The factor, not negative.
        where: Which parameters: a regular expression, searched for in their paths.
        name: Its name in the metrics.

    Raises:
        LossError: If an argument is wrong, or a step's metrics already use the name.

    Example:
        >>> import jax.numpy as jnp
        >>> float(l2(0.5, where="kernel")({"kernel": jnp.ones(4), "bias": jnp.ones(2)}))
        2.0
    """
    return _regularizer(name, strength, where, 2)


def l1(
    strength: float, where: str | re.Pattern[str] = "", *, name: str = "l1"
) -> Regularizer:
    """Returns the penalty `strength * sum(abs(w))`, like Keras' `regularizers.l1`.

    Arguments and errors: as for `l2`.

    Example:
        >>> import jax.numpy as jnp
        >>> float(l1(0.5)({"kernel": -jnp.ones(4)}))
        2.0
    """
    return _regularizer(name, strength, where, 1)


def _regularizer(
    name: str, strength: float, where: str | re.Pattern[str], power: Literal[1, 2]
) -> Regularizer:
    """Returns a checked penalty."""
    function = f"l{power}"
    if not isinstance(name, str) or not name:
        msg = f"{function}: name must be a non-empty string, got {_checks.shown(name)}."
        raise LossError(msg)
    if name == "loss":
        msg = (
            f"{function}: a step's metrics hold {name!r} already, which a penalty of "
            f"that name would replace. Choose another, as name='{function}_{name}'."
        )
        raise LossError(msg)
    strength = _checks.number(
        "strength", strength, at_least=0, where=name, error=LossError
    )
    _checks.pattern("where", where, where=name, error=LossError)
    return Regularizer(name, strength, where, power)


# A type of its own, so that a step can tell losses from what a user sows for debugging.
class ModelLoss(nnx.Intermediate[Any]):
    """A loss that an NNX module has recorded; train and eval steps add it."""


# Linen's collection for recorded losses.
COLLECTION = "losses"


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
        LossError: If `module` is not a Flax module.

    Example:
        >>> import jax.numpy as jnp
        >>> class Active(nnx.Module):
        ...     def __call__(self, x):
        ...         record(self, "activity", 0.01 * jnp.square(x))
        ...         return x
    """
    if not isinstance(name, str) or not name:
        msg = f"record: name must be a non-empty string, got {_checks.shown(name)}."
        raise LossError(msg)
    loss = real_array("loss", loss, "record")
    if isinstance(module, nn.Module):
        module.sow(COLLECTION, name, loss)
        return
    if not isinstance(module, nnx.Module):
        msg = f"record takes a Flax module first, got {_checks.shown(module)}."
        raise LossError(msg)
    with warnings.catch_warnings():
        # Flax wants `sow` to be called inside nnx.capture; here the step collects the
        # losses. A warning that is worded otherwise reaches the user.
        warnings.filterwarnings("ignore", "\\s*Using 'Module.sow", DeprecationWarning)
        module.sow(ModelLoss, name, loss)
