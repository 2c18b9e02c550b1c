"""Activations: the layout map in force, and `constrain`."""

import contextlib
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

from meshlayout import _jax
from meshlayout.errors import LayoutMapError, LayoutWarning, stack_level


if TYPE_CHECKING:
    from meshlayout.layout_map.layout_map import LayoutMap


# Part of the key of every jit cache: a function that was traced under one map is
# traced again under another one.
_map_in_force = jax.make_user_context(None)


class Snapshot:
    """A layout map as it is now, hashable by identity for JAX's compilation caches."""

    def __init__(self, layouts: "LayoutMap") -> None:
        self.layouts = layouts
        self.is_read = False  # whether `constrain` has asked it


def in_force(layouts: "LayoutMap") -> Any:
    """Returns a context manager in which `constrain` follows these layouts."""
    return _map_in_force(layouts.snapshot())


def constrain(x: Any, name: str) -> Any:
    """Places an activation by the layout map in force.

    Inside `with layouts.scope():` (or a step compiled with `layouts=`), the rules of
    the map are matched against `name` as against the path of a parameter. Where no
    map is in force, or no rule matches, the value is returned as it is.

    Args:
        x: An array, of any shape and dtype.
        name: What the map calls this activation, as `"encoder/residual"`.

    Returns:
        The same values; inside jit, laid out by the rule.

    Raises:
        LayoutMapError: If two rules disagree, or the layout does not fit; for
            anything but one array; and inside `shard_map`.

    Warns:
        LayoutWarning: If `on_uneven="replicate"` left a dim unsharded.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> layouts = ml.LayoutMap(mesh, {"hidden": ("batch", "model")})
        >>> with layouts.scope():
        ...     h = jax.jit(lambda x: ml.constrain(x, "hidden"))(jax.numpy.ones((4, 8)))
        >>> str(ml.Layout.of(h))
        '[batch, model]'
        >>> x = jax.numpy.ones(3)
        >>> ml.constrain(x, "hidden") is x
        True
    """
    if not isinstance(name, str) or not name:
        msg = f"constrain(x, name) takes the activation's name, and got {name!r}."
        raise LayoutMapError(msg)
    snapshot = _map_in_force.value
    if snapshot is None:
        return x
    snapshot.is_read = True
    if not hasattr(x, "dtype") and not isinstance(x, (bool, int, float, complex)):
        msg = (
            f"constrain places one array, and {name!r} is a {type(x).__name__}. Call "
            "it for each array, by a name of its own."
        )
        raise LayoutMapError(msg)
    x = jax.numpy.asarray(x)
    found = snapshot.layouts.match(name, x.shape, x.dtype)
    if found is None:
        return x
    if found.fallback:
        line = f"{name} {found.array}: {found.fallback} (rule {found.rule!r})."
        warnings.warn(line, LayoutWarning, stacklevel=stack_level())
    replica_axes = _replica_axes.get()
    if replica_axes:
        return _jax.constrain_locally(x, _without(found.layout.spec, replica_axes))
    if _jax.is_manual(x):
        msg = (
            f"{name} {found.array}: inside shard_map every device works on its own "
            "shard, which constrain cannot move. Call it outside of shard_map."
        )
        raise LayoutMapError(msg)
    return _jax.place(x, found.layout.sharding)


# Mesh axes that a value inside is already one shard of, in a step's replicas.
_replica_axes: ContextVar[tuple[str, ...]] = ContextVar("replica_axes", default=())


@contextlib.contextmanager
def leaving_out(axes: tuple[str, ...]) -> Iterator[None]:
    """Makes `constrain` leave out mesh axes, for a shard_map over just those.

    Args:
        axes: The manual axes.
    """
    token = _replica_axes.set(axes)
    try:
        yield
    finally:
        _replica_axes.reset(token)


def _without(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    entries = []
    for entry in spec:
        names = entry if isinstance(entry, tuple) else (entry,)
        kept = tuple(name for name in names if name not in axes and name is not None)
        entries.append(kept or None)
    return PartitionSpec(*entries)
