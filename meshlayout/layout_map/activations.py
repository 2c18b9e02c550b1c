"""Activations: the active layout map, and `constrain`.

A model calls `constrain` by name and knows no map; whoever traces the model activates
one. JAX must not reuse a function traced under another map, so the active map is part
of the keys of its compilation caches, as a snapshot that does not change.
"""

import contextlib
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from meshlayout import _checks, _jax
from meshlayout._annotations import Leaf
from meshlayout.errors import LayoutMapError, LayoutWarning, stack_level


if TYPE_CHECKING:
    from meshlayout.layout_map.layout_map import LayoutMap


_active_map = jax.make_user_context(None)


@dataclass(eq=False)
class FrozenMap:
    """A snapshot of a layout map, hashed by identity for JAX's compilation caches."""

    layouts: "LayoutMap"
    is_read: bool = False  # whether `constrain` has used it


def activate(layouts: "LayoutMap") -> contextlib.AbstractContextManager[None]:
    """Returns a context manager in which `constrain` follows these layouts."""
    return _active_map(layouts._take_snapshot())


def active_map() -> "LayoutMap | None":
    """Returns the layout map of the innermost open scope; None outside of scopes."""
    return _active_map.value and _active_map.value.layouts


@_checks.user_call
def constrain(x: Leaf, name: str) -> Any:
    """Returns an activation in the layout that the active layout map gives it.

    Inside `with ml.scope(layouts):` (or a step compiled with `layouts=`), the rules of
    the map are matched against `name` as against the path of a parameter, such as
    `"encoder/residual"`. If no map is active, or no rule matches, the value is returned
    unchanged. Rules that disagree and layouts that do not fit are LayoutMapErrors.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> layouts = ml.LayoutMap(mesh, {"hidden": ("batch", "model")})
        >>> with ml.scope(layouts):
        ...     h = jax.jit(lambda x: ml.constrain(x, "hidden"))(jax.numpy.ones((4, 8)))
        >>> str(ml.Layout.of(h))
        '[batch, model]'
    """
    snapshot = _active_map.value
    if snapshot is None:
        return x
    snapshot.is_read = True
    x = jax.numpy.asarray(x)
    resolution = snapshot.layouts.match(name, x.shape, x.dtype)
    if resolution is None:
        return x
    where = f"{name} {resolution.array}"
    if resolution.fallback:
        line = f"{where}: {resolution.fallback} (rule {resolution.rule!r})."
        warnings.warn(line, LayoutWarning, stacklevel=stack_level())
    if _jax.is_manual(x):
        msg = f"{where}: inside shard_map every device works on its own shard, which "
        raise LayoutMapError(f"{msg}constrain cannot move. Call it outside shard_map.")
    move = _jax.constrain if _jax.is_staged(x) else _jax.put
    return move(x, resolution.layout.sharding)
