"""Tokens in shards along the sequence, gathered once for all matrices that read them.

XLA gathers what a matrix in shards multiplies once more for the gradient of each such
matrix. The jaxpr of a step, with its derivatives, shows what reads the same array: all
of them then read one that is whole.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _jax
from meshlayout._annotations import Equation
from meshlayout.layout import axes_of


_Axes: TypeAlias = list[tuple[str, ...]]  # of each dim

_SAME_VALUES = ("convert_element_type", "transpose", "reshape", "squeeze", "slice")
_SAME_VALUES += ("dynamic_slice", "optimization_barrier", "sharding_constraint")


def gather_once(closed: Any, shardings: Sequence[object]) -> Any:
    """Returns the jaxpr of a step, in which tokens are gathered once.

    Tokens have the leading dims of an activation whose layout yields over a mesh axis,
    and are multiplied with a parameter whose columns are sharded over this axis.
    """
    yielding = [x for x in _jax.equations(closed.jaxpr) if x.primitive is _jax.yielding]
    axes: dict[int, _Axes] = {}
    for var, sharding in zip(closed.jaxpr.invars, shardings, strict=True):
        if isinstance(sharding, NamedSharding):
            spec = [*sharding.spec, *[None] * var.aval.ndim]
            axes[id(var)] = [axes_of(entry) for entry in spec[: var.aval.ndim]]
    constraints = {x.outvars[0].aval.shape[:-1]: x.params for x in yielding}
    gathers = _Gathers(constraints, axes, set())
    return closed.replace(jaxpr=gathers.rewrite(closed.jaxpr)) if yielding else closed


@dataclass(frozen=True)
class _Gathers:
    """What is known of variables, by their ids: literals cannot be hashed."""

    constraints: dict[tuple[int, ...], Any]  # by the leading dims of what they shard
    axes: dict[int, _Axes]  # of parameters, and what has their values
    tokens: set[int]  # to be gathered

    def rewrite(self, jaxpr: Any) -> Any:
        """Returns a jaxpr that gathers tokens before they are first multiplied."""
        eqns: list[Equation] = []
        whole: dict[int, Any] = {}
        for eqn in [*map(self._inspect, jaxpr.eqns)]:
            if eqn.primitive.name == "dot_general":
                for x in eqn.invars:
                    if id(x) in self.tokens and id(x) not in whole:
                        gather = self._gather(x).replace(source_info=eqn.source_info)
                        [whole[id(x)]] = gather.outvars
                        eqns.append(gather)
                eqn = eqn.replace(invars=[whole.get(id(x), x) for x in eqn.invars])
            eqns.append(eqn)
        return jaxpr.replace(eqns=eqns)

    def _gather(self, x: Any) -> Equation:
        constraint = self.constraints[x.aval.shape[:-1]]
        sharding, axis = constraint["sharding"], constraint["axis"]
        entries = [
            tuple(a for a in axes_of(entry) if a != axis) if axes_of(entry) else entry
            for entry in sharding.spec
        ]

        @jax.jit
        def gather(x: jax.Array) -> jax.Array:
            x = _jax.constrain(x, sharding, yields=axis)  # what it is made of, too
            return _jax.constrain(x, sharding.update(spec=PartitionSpec(*entries)))

        [eqn] = jax.make_jaxpr(gather)(x.aval).eqns
        return eqn.replace(invars=[x])

    def _inspect(self, eqn: Equation) -> Equation:
        """Learns from an operation, and rewrites jaxprs inside of it."""
        name = eqn.primitive.name
        if name == "dot_general":
            contracted, batch = eqn.params["dimension_numbers"]
            for side, x in enumerate(eqn.invars):
                other, shape = 1 - side, x.aval.shape
                weights = enumerate(self.axes.get(id(eqn.invars[other]), ()))
                rows = *contracted[other], *batch[other]
                columns = {axis for d, axes in weights if d not in rows for axis in axes}
                constraint = self.constraints.get(shape[:-1], {"axis": None})
                if len(shape) - 1 in contracted[side] and constraint["axis"] in columns:
                    self.tokens.add(id(x))
        elif name in _SAME_VALUES:
            for old, new in zip(eqn.invars, eqn.outvars, strict=False):
                if axes := self.axes.get(id(old)):
                    self.axes[id(new)] = _moved(eqn, axes, old.aval.shape)
        elif name != "shard_map" and _jax.inner_jaxprs(eqn):
            params = {key: self._inside(eqn, x) for key, x in eqn.params.items()}
            return eqn.replace(params=params)
        return eqn

    def _inside(self, eqn: Equation, param: Any) -> Any:
        if type(param) is tuple:  # of branches
            return tuple(self._inside(eqn, x) for x in param)
        if hasattr(param, "jaxpr"):
            return param.replace(jaxpr=self._inside(eqn, param.jaxpr))
        if not hasattr(param, "eqns"):
            return param
        # Backwards: the first operands are an index, or those of a loop's condition.
        self._copy(eqn.invars[::-1], param.invars[::-1])
        jaxpr = self.rewrite(param)
        self._copy(jaxpr.outvars, eqn.outvars)
        return jaxpr

    def _copy(self, sources: Sequence[Any], targets: Sequence[Any]) -> None:
        """Takes over what is known; arrays that are scanned have one more dim."""
        for old, new in zip(sources, targets, strict=False):
            if id(old) in self.tokens:
                self.tokens.add(id(new))
            if axes := self.axes.get(id(old)):
                axes = [*[()] * (new.aval.ndim - len(axes)), *axes]
                self.axes[id(new)] = axes[len(axes) - new.aval.ndim :]


def _moved(eqn: Equation, axes: _Axes, shape: tuple[int, ...]) -> _Axes:
    """Returns the axes of the dims of a result that has the values of an array."""
    new = eqn.outvars[0].aval.shape
    if "permutation" in eqn.params:
        return [axes[dim] for dim in eqn.params["permutation"]]
    if len(new) == len(shape):
        return axes
    # Dims that begin where a dim did, counted in elements.
    begins = {math.prod(shape[:d]): x for d, x in enumerate(axes) if shape[d] > 1}
    return [begins.get(math.prod(new[:d]), ()) for d in range(len(new))]
