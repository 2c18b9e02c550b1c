"""Several optimisers in one, chosen by the paths of the parameters."""

import re
from collections.abc import Hashable, Mapping
from typing import Any

import optax

from meshlayout import _paths
from meshlayout.errors import StateError


def optimizer_by_path(
    optimizers: Mapping[str, optax.GradientTransformation | None],
) -> optax.GradientTransformation:
    """Returns an optimiser that treats parameters by their paths.

    Args:
        optimizers: From patterns, searched for in the paths, to optimisers; the first
            that matches counts. None leaves the parameters as they are, and keeps no
            state for them.

    Returns:
        An Optax transformation; its state follows the parameters as any other does.

    Raises:
        StateError: If a pattern is no regular expression, or an optimiser none; and
            when it is initialised, if a parameter matches no pattern.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = optimizer_by_path({"head": optax.sgd(1.0), "": None})
        >>> params = {"body": jnp.ones(2), "head": jnp.ones(2)}
        >>> updates, _ = tx.update(params, tx.init(params), params)
        >>> updates["head"].tolist(), updates["body"].tolist()
        ([-1.0, -1.0], [0.0, 0.0])
    """
    if not isinstance(optimizers, Mapping) or not optimizers:
        msg = (
            "optimizer_by_path takes a dict from patterns to optimizers, and got "
            f"{optimizers!r}."
        )
        raise StateError(msg)
    for pattern, optimizer in optimizers.items():
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            msg = f"optimizer_by_path: {pattern!r} is no regular expression: {error}."
            raise StateError(msg) from None
        if optimizer is not None and not isinstance(
            optimizer, optax.GradientTransformation
        ):
            msg = (
                f"optimizer_by_path: {pattern!r} is given {optimizer!r}, which is "
                "neither an Optax optimizer nor None."
            )
            raise StateError(msg)
    patterns = list(optimizers)

    def labels(params: Any) -> Any:
        flat = _paths.flatten(params)
        return flat.unflatten([_label(leaf.path, patterns) for leaf in flat.leaves])

    parts: dict[Hashable, optax.GradientTransformation] = {
        str(at): optax.set_to_zero() if optimizer is None else optimizer
        for at, optimizer in enumerate(optimizers.values())
    }
    return optax.multi_transform(parts, labels)


def _label(path: str, patterns: list[str]) -> str:
    for at, pattern in enumerate(patterns):
        if re.search(pattern, path):
            return str(at)
    msg = (
        f"no pattern of the optimizer matches the parameter {path!r}. Add a last "
        'pattern for the rest: "": optax.adam(1e-3), or "": None to leave it as it is.'
    )
    raise StateError(msg)
