"""Several optimizers in one, chosen by the paths of the parameters."""

import re
from collections.abc import Hashable, Mapping

import optax

from meshlayout import _checks, _paths
from meshlayout._annotations import PyTree
from meshlayout.errors import StateError


def optimizer_by_path(
    optimizers: Mapping[str, optax.GradientTransformation | None],
) -> optax.GradientTransformation:
    """Returns an optimizer that updates parameters by their paths.

    Use this to freeze a part of the model, or to give parts their own learning rates.
    It is `optax.multi_transform` with patterns instead of labels.

    Args:
        optimizers: Optimizers by pattern, searched for in the paths; the first match
            wins. None freezes the parameters, and keeps no state for them.

    Returns:
        An Optax transformation; its state follows the parameters like any other.

    Raises:
        StateError: If a pattern is not a regular expression, or a value is not an
            optimizer; and at initialization, if a parameter matches no pattern.

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
            "optimizer_by_path takes a dict from patterns to optimizers, got "
            f"{_checks.shown(optimizers)}."
        )
        raise StateError(msg)
    for pattern, optimizer in optimizers.items():
        _checks.pattern("pattern", pattern, where="optimizer_by_path", error=StateError)
        if optimizer is not None and not isinstance(
            optimizer, optax.GradientTransformation
        ):
            msg = (
                f"optimizer_by_path: {pattern!r} is mapped to "
                f"{_checks.shown(optimizer)}, which is neither an Optax optimizer nor "
                "None."
            )
            raise StateError(msg)
    patterns = list(optimizers)

    def labels(params: PyTree) -> PyTree:
        flat = _paths.flatten(params)
        return flat.unflatten([_label(leaf.path, patterns) for leaf in flat.leaves])

    # Labeled by index, because labels become keys in the optimizer's state: a pattern
    # may contain a `/`, which separates the keys of a path.
    parts: dict[Hashable, optax.GradientTransformation] = {
        str(index): optax.set_to_zero() if optimizer is None else optimizer
        for index, optimizer in enumerate(optimizers.values())
    }
    return optax.multi_transform(parts, labels)


def _label(path: str, patterns: list[str]) -> str:
    for index, pattern in enumerate(patterns):
        if re.search(pattern, path):
            return str(index)
    msg = (
        f"no pattern of the optimizer matches the parameter {path!r}. Add a last "
        'pattern for the rest: "": optax.adam(1e-3), or "": None to freeze it.'
    )
    raise StateError(msg)
