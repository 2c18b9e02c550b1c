"""ZeRO stage 1: optimizer state sharded over axes that replicate the parameters."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from meshlayout import _checks
from meshlayout._annotations import DType
from meshlayout._specs import DimSpec, axes_of
from meshlayout.errors import LayoutMapError
from meshlayout.mesh import Mesh


MIN_SIZE = 1024
"""Elements. Each sharded array costs an all-gather in every step, whatever its size,
and biases and norms hold next to none of the memory."""


def zero_spec(
    shape: Sequence[int],
    spec: Sequence[DimSpec],
    axes: Sequence[str],
    axis_sizes: Mapping[str, int],
    min_size: int = MIN_SIZE,
) -> tuple[tuple[DimSpec, ...], str]:
    """Shards an array's largest dim that divides over axes that do not shard it yet.

    Arrays of fewer than `min_size` elements are left unchanged.

    Returns:
        The new entries, and why they are unchanged; empty if they did change.

    Example:
        >>> zero_spec((784, 4096), (None, "model"), ["batch"], {"batch": 2, "model": 4})
        ((None, ('model', 'batch')), '')
        >>> zero_spec((999, 3), (None, None), ["batch"], {"batch": 8})
        ((None, None), "no dim divides over 'batch'")
        >>> zero_spec((64,), (None,), ["batch"], {"batch": 8})
        ((None,), '64 elements, fewer than 1024')
    """
    spec = tuple(spec)
    used = {axis for entry in spec for axis in axes_of(entry)}
    free = tuple(axis for axis in axes if axis not in used)
    num_shards = math.prod(axis_sizes[axis] for axis in free)
    if not shape or num_shards == 1:
        return spec, ""
    if math.prod(shape) < min_size:
        return spec, f"{math.prod(shape)} elements, fewer than {min_size}"
    for dim in sorted(range(len(shape)), key=lambda dim: -shape[dim]):
        now = axes_of(spec[dim])
        if shape[dim] % (num_shards * math.prod(axis_sizes[axis] for axis in now)) == 0:
            entry = (*now, *free)
            new = entry[0] if len(entry) == 1 else entry
            return (*spec[:dim], new, *spec[dim + 1 :]), ""
    return spec, f"no dim divides over {', '.join(map(repr, free))}"


def zero_rule(
    mesh: Mesh | jax.sharding.Mesh,
    axes: str | Sequence[str] = "batch",
    *,
    min_size: int = MIN_SIZE,
) -> Callable[[str, tuple[int, ...], Any], tuple[DimSpec, ...]]:
    """Returns a rule that shards arrays over axes on the largest dim that divides.

    As a rule for `"^opt_state/"` it shards the optimizer's state over the axes that
    shard the batch, while the parameters stay replicated; the update is then sharded
    too (Rajbhandari et al., "ZeRO", 2020, stage 1). Small arrays and those
    that do not divide are replicated. `make_train_step(zero=1)` does the same on top of
    the parameters' own rules.

    Args:
        mesh: The mesh.
        axes: The axes.
        min_size: Arrays of fewer elements are replicated: gathering each of them costs
            more time than it saves memory.

    Raises:
        MeshError: If the mesh has no such axis.
        LayoutMapError: If no axis is given, or `min_size` is not an integer.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 8})
        >>> rule = zero_rule(mesh)
        >>> rule("opt_state/0/mu/kernel", (784, 128), "float32")
        ('batch', None)
        >>> rule("opt_state/0/mu/bias", (128,), "float32")
        (None,)
        >>> layouts = ml.LayoutMap(mesh, {"^opt_state/": rule})
    """
    names = (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, Sequence) or not names:
        msg = (
            "zero_rule takes the mesh axes that shard the batch, and got "
            f"{_checks.shown(axes)}."
        )
        raise LayoutMapError(msg)
    wrapped = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
    wrapped.axis_size(names)
    _checks.count(
        "min_size", min_size, at_least=0, where="zero_rule", error=LayoutMapError
    )

    def rule(path: str, shape: tuple[int, ...], dtype: DType) -> tuple[DimSpec, ...]:
        unsharded = (None,) * len(shape)
        return zero_spec(shape, unsharded, names, wrapped.shape, min_size)[0]

    return rule
