"""Penalties on parameters, which do not depend on the number of examples."""

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from meshlayout import _checks, _paths
from meshlayout._annotations import PyTree
from meshlayout.errors import LossError


Regularizer: TypeAlias = Callable[[PyTree], jax.Array]
"""A penalty on parameters: a function that returns a scalar."""


@_checks.user_call
def l2(strength: float, where: str | re.Pattern[str] = "") -> Regularizer:
    """Returns the penalty `strength * sum(w ** 2)`, like Keras' `regularizers.l2`.

    For `make_train_step(..., regularizers={"l2": l2(1e-5)})`. It is part of the loss,
    so the optimizer scales its gradient; `optax.adamw` decays weights instead.

    Args:
        strength: The factor, not negative.
        where: A regular expression, searched for in parameters' paths; one must match.

    Examples:
        >>> float(l2(0.5, where="kernel")({"kernel": jnp.ones(4), "bias": jnp.ones(2)}))
        2.0
    """
    return _penalty("l2", strength, where, jnp.square)


@_checks.user_call
def l1(strength: float, where: str | re.Pattern[str] = "") -> Regularizer:
    """Returns the penalty `strength * sum(abs(w))`; arguments and errors as `l2`."""
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
