"""Several optimizers in one, chosen by the paths of the parameters."""

from collections.abc import Hashable, Mapping

import optax

from meshlayout import _checks, _paths
from meshlayout._annotations import PyTree
from meshlayout.errors import StateError


def optimizer_by_path(
    optimizers: Mapping[str, optax.GradientTransformation | None],
) -> optax.GradientTransformation:
    """Returns `optax.multi_transform` with patterns of paths instead of labels.

    Use this to freeze a part of the model, or to give parts their own learning rates.

    Args:
        optimizers: Optimizers by pattern, searched for in the paths; the first match
            wins. None freezes the parameters, and keeps no state for them.

    Raises:
        StateError: If an entry is wrong; and at initialization, if a parameter matches
            no pattern.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = optimizer_by_path({"head": optax.sgd(1.0), "": None})
        >>> params = {"body": jnp.ones(2), "head": jnp.ones(2)}
        >>> updates, _ = tx.update(params, tx.init(params), params)
        >>> updates["head"].tolist(), updates["body"].tolist()
        ([-1.0, -1.0], [0.0, 0.0])
    """
    is_mapping = isinstance(optimizers, Mapping) and len(optimizers) > 0
    kinds = (optax.GradientTransformation, type(None))
    if not is_mapping or not all(isinstance(tx, kinds) for tx in optimizers.values()):
        msg = (
            "optimizer_by_path takes a dict from patterns to Optax optimizers or None, "
            f"got {_checks.shown(optimizers)}."
        )
        raise StateError(msg)
    context = {"where": "optimizer_by_path", "error": StateError}
    patterns = [_checks.pattern("pattern", text, **context) for text in optimizers]

    # Labeled by index: labels become keys in the optimizer's state, where the `/` of a
    # pattern would separate the keys of a path.
    def label(path: str) -> str:
        for index, pattern in enumerate(patterns):
            if pattern.search(path):
                return str(index)
        msg = (
            f"no pattern of the optimizer matches the parameter {path!r}. Add a last "
            'pattern for the rest: "": optax.adam(1e-3), or "": None to freeze it.'
        )
        raise StateError(msg)

    def labels(params: PyTree) -> PyTree:
        flat = _paths.flatten(params)
        return flat.unflatten([label(leaf.path) for leaf in flat.leaves])

    parts: dict[Hashable, optax.GradientTransformation] = {
        str(i): tx or optax.set_to_zero() for i, tx in enumerate(optimizers.values())
    }
    return optax.multi_transform(parts, labels)
