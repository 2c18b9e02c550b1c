"""Tokens in shards along the sequence, gathered once for all matrices that read them.

XLA gathers them anew for the gradient of each matrix in shards. The jaxpr of a step
shows what reads the same array, in both passes: all then read one that is whole.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _jax
from meshlayout._annotations import Equation
from meshlayout.layout import axes_of


_SAME_VALUES = ("convert_element_type", "transpose", "slice", "dynamic_slice")
_SAME_VALUES += ("squeeze", "optimization_barrier", "sharding_constraint")
_TOKENS = 0  # in place of a dim


def gathering_once(traced: Any, leaves: Sequence[Any], shardings: Sequence[Any]) -> Any:
    """Returns what runs a traced step with one gather of tokens, or None without any.

    Tokens have the leading dims of an activation whose layout yields over a mesh axis,
    and are multiplied with parameters whose columns are sharded over this axis.
    """
    jaxpr, is_traced = traced.jaxpr.jaxpr, [isinstance(x, Tracer) for x in leaves]
    yielding = [x for x in _jax.equations(jaxpr) if x.primitive is _jax.yielding]
    if not yielding:
        return None
    layouts = {x.outvars[0].aval.shape[:-1]: x.params["sharding"] for x in yielding}
    gathers = _Gathers(yielding[0].params["axis"], layouts, {})
    for var, layout in zip(jaxpr.invars, compress(shardings, is_traced), strict=True):
        for dim, entry in enumerate(getattr(layout, "spec", ())):
            if gathers.axis in axes_of(entry):
                gathers.dims[id(var)] = dim - var.aval.ndim
    run = jaxpr_as_fun(traced.jaxpr.replace(jaxpr=gathers.rewrite(jaxpr)))
    tree = jax.tree.structure(traced.out_info)
    return lambda: tree.unflatten(run(*compress(leaves, is_traced)))


@dataclass(frozen=True)
class _Gathers:
    axis: str
    layouts: dict[tuple[int, ...], NamedSharding]  # of residuals, by leading dims
    dims: dict[int, int]  # in shards, from the last as -1; by the id of a variable

    def rewrite(self, jaxpr: Any) -> Any:
        """Returns a jaxpr that gathers tokens before they are first multiplied."""
        eqns: list[Equation] = []
        whole: dict[int, Any] = {}
        for eqn in [*map(self._inspect, jaxpr.eqns)]:
            for x in eqn.invars if eqn.primitive.name == "dot_general" else ():
                layout = self.layouts.get(x.aval.shape[:-1])
                if layout and self.dims.get(id(x)) == _TOKENS and id(x) not in whole:
                    gather = jax.make_jaxpr(self._gather(layout))(x.aval).eqns[0]
                    whole[id(x)] = gather.outvars[0]
                    eqns.append(gather.replace(invars=[x], source_info=eqn.source_info))
                eqn = eqn.replace(invars=[whole.get(id(x), x) for x in eqn.invars])
            eqns.append(eqn)
        return jaxpr.replace(eqns=eqns)

    def _gather(self, layout: NamedSharding) -> Any:
        spec = (None if self.axis in axes_of(entry) else entry for entry in layout.spec)
        whole = layout.update(spec=PartitionSpec(*spec))
        constrain = functools.partial(_jax.constrain, yields=self.axis)
        return jax.jit(lambda x: _jax.constrain(constrain(x, layout), whole))

    def _inspect(self, eqn: Equation) -> Equation:
        """Learns from an operation, and rewrites jaxprs inside of it."""
        name, operands = eqn.primitive.name, eqn.invars
        if name == "dot_general":
            contracted, batch = eqn.params["dimension_numbers"]
            for side, (x, other) in enumerate((operands, operands[::-1])):
                rows = *contracted[1 - side], *batch[1 - side]
                dim = self.dims.get(id(other), _TOKENS)
                is_column = dim < 0 and dim + other.aval.ndim not in rows
                if is_column and x.aval.ndim - 1 in contracted[side]:
                    self.dims[id(x)] = _TOKENS
        elif name in _SAME_VALUES:
            self._follow(operands, eqn.outvars)
            rank, order = operands[0].aval.ndim, eqn.params.get("permutation", ())
            dim = self.dims.get(id(operands[0]), _TOKENS) + rank
            if dim in order:
                self.dims[id(eqn.outvars[0])] = order.index(dim) - rank
        elif name != "shard_map":
            params = {key: self._inside(eqn, x) for key, x in eqn.params.items()}
            return eqn.replace(params=params)
        return eqn

    def _inside(self, eqn: Equation, param: Any) -> Any:
        jaxpr = getattr(param, "jaxpr", param)
        if not hasattr(jaxpr, "eqns"):
            return param
        # From the last: the first operands of a loop may be those of its condition.
        self._follow(eqn.invars[::-1], jaxpr.invars[::-1])
        new = self.rewrite(jaxpr)
        self._follow(new.outvars, eqn.outvars)
        return new if param is jaxpr else param.replace(jaxpr=new)

    def _follow(self, olds: Sequence[Any], news: Sequence[Any]) -> None:
        for old, new in zip(olds, news, strict=False):
            if id(old) in self.dims:
                self.dims[id(new)] = self.dims[id(old)]
