"""ZeRO-1 as a rule: the optimiser's state sharded where parameters are not."""

import math
from collections.abc import Callable
from typing import Any

import jax

from meshlayout.errors import LayoutMapError
from meshlayout.mesh import Mesh


def zero_rule(
    mesh: Mesh | jax.sharding.Mesh, axes: str | tuple[str, ...] = "batch"
) -> Callable[[str, tuple[int, ...], Any], tuple[Any, ...]]:
    """Returns a rule that shards arrays over axes on the first dim that divides.

    As a rule for `"^opt_state/"` it shards the optimiser's state over the axes that
    shard the batch, while the parameters stay replicated; the update is then computed
    in shards, too (Rajbhandari et al., "ZeRO", 2020, stage 1). What does not divide is
    replicated. `make_train_step(zero=1)` does the same beside rules for the parameters.

    Args:
        mesh: The mesh.
        axes: The axes.

    Raises:
        MeshError: If the mesh has no such axis.
        LayoutMapError: If no axis is given.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 8})
        >>> rule = zero_rule(mesh)
        >>> rule("opt_state/0/mu/kernel", (784, 128), "float32")
        ('batch', None)
        >>> rule("opt_state/0/mu/bias", (10,), "float32")
        (None,)
        >>> layouts = ml.LayoutMap(mesh, {"^opt_state/": rule})
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    if not names:
        msg = "zero_rule takes the axes that shard the batch, and got none."
        raise LayoutMapError(msg)
    wrapped = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
    shards = math.prod(wrapped.axis_size(name) for name in names)
    entry = names[0] if len(names) == 1 else names

    def rule(path: str, shape: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
        dims = [dim for dim, size in enumerate(shape) if size and size % shards == 0]
        return tuple(
            entry if dims and dim == dims[0] else None for dim in range(len(shape))
        )

    return rule
