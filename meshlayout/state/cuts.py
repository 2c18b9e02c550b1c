"""How every value of a traced builder is cut while it is made."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _jax
from meshlayout._bit_exact import bit_exact_sharding, finest_layout
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh


class Cuts:
    """The shardings of a builder's values, chosen from its results backwards.

    Args:
        mesh: The mesh, with Auto axes.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._shardings: dict[Any, NamedSharding] = {}

    def of(self, var: Any) -> NamedSharding:
        """Returns the sharding in which a value is made.

        Args:
            var: A variable or literal of the traced builder.
        """
        if is_literal(var):
            return NamedSharding(self._mesh.jax_mesh, PartitionSpec())
        if var not in self._shardings:
            cut = finest_layout(self._mesh, var.aval.shape).specs
            self._shardings[var] = self._tidy(var, cut)
        return self._shardings[var]

    def choose(
        self, outputs: Sequence[Any], targets: Sequence[Layout], eqns: Iterable[Any]
    ) -> None:
        """Gives every value a sharding: its use's where the shapes agree.

        Args:
            outputs: The results of all operations.
            targets: The layout that each will have.
            eqns: The operations, the last one first.
        """
        for var, target in zip(outputs, targets, strict=True):
            if not is_literal(var):
                self._shardings.setdefault(var, self._tidy(var, target.specs))
        for eqn in eqns:
            self._recut(eqn)
            for out in eqn.outvars:
                sharding = self.of(out)
                for var in eqn.invars:
                    if is_literal(var) or var in self._shardings:
                        continue
                    if var.aval.shape == out.aval.shape:
                        self._shardings[var] = sharding
                    elif (specs := _specs_before(eqn, sharding)) is not None:
                        self._shardings[var] = self._tidy(var, specs)

    def _recut(self, eqn: Any) -> None:
        """Cuts the result of a reordering otherwise, if its operand cannot lie so.

        Moving it afterwards is cheap; inside the operation, XLA may make it whole.
        """
        operands = [var for var in eqn.invars if not is_literal(var)]
        if eqn.primitive.name not in _REORDERINGS or not operands:
            return
        (out,) = eqn.outvars
        shape = out.aval.shape
        for specs in (
            tuple(self.of(out).spec),
            [*finest_layout(self._mesh, shape[:-1]).specs, None],
            [*[None] * (len(shape) - 1), *finest_layout(self._mesh, shape[-1:]).specs],
        ):
            sharding = self._tidy(out, specs)
            if _specs_before(eqn, sharding) is not None:
                self._shardings[out] = sharding
                return

    def _tidy(self, var: Any, specs: Sequence[Any]) -> NamedSharding:
        sharding = Layout(specs, self._mesh).sharding
        return bit_exact_sharding(sharding, var.aval.shape, var.aval.dtype, self._mesh)


def is_literal(var: Any) -> bool:
    """Tells a constant of a traced builder from its variables."""
    return hasattr(var, "val")


_REORDERINGS = ("reshape", "squeeze", "expand_dims", "concatenate", "stack")


def _specs_before(eqn: Any, sharding: NamedSharding) -> list[Any] | None:
    """Returns how an operand has to lie for a reordering to move nothing.

    None for other operations, and where there is no such cut.
    """
    name, shape = eqn.primitive.name, eqn.invars[0].aval.shape
    specs = [*sharding.spec, *[None] * (eqn.outvars[0].aval.ndim - len(sharding.spec))]
    if name == "transpose":
        return [specs[at] for at in np.argsort(eqn.params["permutation"])]
    if name == "broadcast_in_dim":
        placed = eqn.params["broadcast_dimensions"]
        of = zip(placed, shape, strict=True)
        return [specs[at] if size > 1 else None for at, size in of]
    if name == "concatenate":
        return None if specs[eqn.params["dimension"]] else specs
    if name == "stack":
        return None if specs.pop(eqn.params["axis"]) else specs
    if name not in _REORDERINGS:
        return None
    # A cut of one dim is one of another dim that begins at the same place in memory.
    before: list[Any] = [None] * len(shape)
    starts = _starts(shape)
    cuts = zip(specs, _starts(eqn.outvars[0].aval.shape), strict=True)
    for spec, start in cuts:
        if spec is None:
            continue
        axes = spec if isinstance(spec, tuple) else (spec,)
        count = math.prod(sharding.mesh.shape[axis] for axis in axes)
        fitting = [
            dim
            for dim, size in enumerate(shape)
            if starts[dim] == start and size % count == 0 and before[dim] is None
        ]
        if not fitting:
            return None
        before[fitting[-1]] = spec
    return before


def _starts(shape: tuple[int, ...]) -> list[int]:
    """Returns, for each dim, into how many runs the dims before it cut an array."""
    return [math.prod(shape[:dim]) for dim in range(len(shape))]


# Operations that give each element the same bits however the array is cut: one
# element at a time, moving elements about, or counter-based random numbers.
_SAFE_NAMES = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type
broadcast_in_dim cbrt ceil clamp clz complex concatenate conj
convert_element_type copy copy_p cos cosh digamma div dynamic_slice
dynamic_update_slice empty eq erf erf_inv erfc exp exp2 expand_dims expm1 floor
full gather ge gt imag integer_pow iota is_finite le lgamma log log1p logistic
lt max min mul ne neg nextafter not or optimization_barrier pad population_count
pow random_bits random_clone random_fold_in random_seed random_split
random_unwrap random_wrap real reduce_precision rem reshape rev round rsqrt
select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh
slice split sqrt square squeeze stack stop_gradient sub tan tanh threefry2x32 tile
transpose unstack xor
"""
_CONTAINER_NAMES = """
jit pjit closed_call core_call custom_jvp_call custom_vjp_call remat2
scan while cond
"""
_SAFE = frozenset(_SAFE_NAMES.split())
_CONTAINERS = frozenset(_CONTAINER_NAMES.split())


def keeps_bits_when_sharded(eqn: Any) -> bool:
    """Tells whether an operation gives the same bits on shards as on the whole."""
    name = eqn.primitive.name
    if name in _SAFE:
        return True
    return name in _CONTAINERS and all(
        keeps_bits_when_sharded(inner)
        for jaxpr in _jax.inner_jaxprs(eqn)
        for inner in jaxpr.eqns
    )
