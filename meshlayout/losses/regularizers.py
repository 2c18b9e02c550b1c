"""Penalties on parameters, chosen by path."""

import re
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from meshlayout import _checks, _paths
from meshlayout._annotations import PyTree
from meshlayout.errors import LossError


@dataclass(frozen=True)
class Regularizer:
    """A penalty on the parameters whose paths match; made by `l1` and `l2`.

    Calling it with a tree of parameters returns a float32 scalar. It does not depend on
    the batch, so no denominator applies to it.

    Attributes:
        name: What it is called in a step's metrics.
        strength: The factor.
        where: A regular expression, searched for in the paths.
        power: 1 for absolute values, 2 for squares.
    """

    name: str
    strength: float
    where: str
    power: Literal[1, 2]

    def __call__(self, params: PyTree) -> jax.Array:
        """Returns the penalty.

        Args:
            params: Parameters, as any tree.

        Raises:
            LossError: If no parameter's path matches.
        """
        pattern = re.compile(self.where)
        leaves = _paths.flatten(params).leaves
        chosen = [leaf.value for leaf in leaves if pattern.search(leaf.path)]
        if not chosen:
            paths = ", ".join(repr(leaf.path) for leaf in leaves[:4])
            msg = (
                f"{self.name}: no parameter's path matches {self.where!r}; there are "
                f"{paths}{', ...' if len(leaves) > 4 else ''}."
            )
            raise LossError(msg)
        sums = [self._sum(jnp.asarray(leaf).astype("float32")) for leaf in chosen]
        return jnp.float32(self.strength) * jnp.stack(sums).sum()

    def _sum(self, leaf: jax.Array) -> jax.Array:
        return jnp.abs(leaf).sum() if self.power == 1 else jnp.square(leaf).sum()


def l2(strength: float, where: str = "", *, name: str = "l2") -> Regularizer:
    """Returns the penalty `strength * sum(w ** 2)`, as Keras' `regularizers.l2`.

    Args:
        strength: The factor, not negative.
        where: Which parameters: a regular expression, searched for in their paths.
        name: What it is called in the metrics.

    Raises:
        LossError: If an argument is wrong, or a step's metrics have the name already.

    Example:
        >>> import jax.numpy as jnp
        >>> float(l2(0.5, where="kernel")({"kernel": jnp.ones(4), "bias": jnp.ones(2)}))
        2.0
    """
    return _regularizer(name, strength, where, 2)


def l1(strength: float, where: str = "", *, name: str = "l1") -> Regularizer:
    """Returns the penalty `strength * sum(abs(w))`, as Keras' `regularizers.l1`.

    Args:
        strength: The factor, not negative.
        where: Which parameters: a regular expression, searched for in their paths.
        name: What it is called in the metrics.

    Raises:
        LossError: If an argument is wrong, or a step's metrics have the name already.

    Example:
        >>> import jax.numpy as jnp
        >>> float(l1(0.5)({"kernel": -jnp.ones(4)}))
        2.0
    """
    return _regularizer(name, strength, where, 1)


def _regularizer(
    name: str, strength: float, where: str, power: Literal[1, 2]
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
    pattern = _checks.pattern("where", where, where=name, error=LossError)
    return Regularizer(name, strength, pattern.pattern, power)
