"""Steps that XLA's partitioner would compute wrongly, or with more than it needs.

For convolutions and pooling over images sharded in space, XLA exchanges the rows and
columns at the edges of shards between neighbors (halos). Where shards have few rows,
results may be wrong, or the process may abort (jax 0.7.2 and 0.10.2, also for TPUs).
`is_sure` comes from thousands of random programs that were compared with one device.

Tokens in shards along the sequence are gathered anew for the gradient of each matrix in
shards. The jaxpr of a step shows what reads the same array, in both passes: with
`gathering_once`, all read one that is whole.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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


def is_sure(eqn: Equation, shards: Mapping[int, int]) -> bool:
    """Returns whether XLA is right for so many shards, but for gradients of kernels."""
    is_pooling = "window_dimensions" in eqn.params
    is_scatter = eqn.primitive.name == "select_and_scatter_add"
    for dim, size, stride, padding, num_inputs, num_outputs in _windows(eqn):
        num_shards = shards.get(dim, 1)
        inputs, outputs = (-(-n // num_shards) for n in (num_inputs, num_outputs))
        num_used = -(-num_outputs // max(outputs, 1))
        if num_shards > 1 and (
            stride > 2
            or size > (min if is_pooling else max)(inputs, outputs) + 1
            or not 0 <= min(padding) <= max(padding) < size
            or num_used < num_shards - 1
            or (is_scatter and size >= 2 * stride)
        ):
            return False
    return True


def _windows(eqn: Equation) -> Iterator[tuple[Any, ...]]:
    """Yields the dim, dilated size, stride, padding, inputs and outputs of windows."""
    params, names = eqn.params, ("window_dimensions", "window_strides", "padding")
    images, outputs = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if names[0] in params:
        if eqn.primitive.name == "select_and_scatter_add":
            images, outputs = outputs, images
        windows = zip(*(params[name] for name in names), images, outputs, strict=True)
        for dim, window in enumerate(windows):
            if window[:3] != (1, 1, (0, 0)):
                yield (dim, *window)
        return
    numbers, kernel = params["dimension_numbers"], eqn.invars[1].aval.shape
    for i, dim in enumerate(numbers.lhs_spec[2:]):
        size = (kernel[numbers.rhs_spec[2 + i]] - 1) * params["rhs_dilation"][i] + 1
        spread, (low, high) = params["lhs_dilation"][i], params["padding"][i]
        padding = low, min(high, size - 1) if spread > 1 else high  # of gradients
        stride, out = max(params["window_strides"][i], spread), numbers.out_spec[2 + i]
        yield dim, size, stride, padding, images[dim], outputs[out]


def may_shard(
    shape: tuple[int, ...],
    dim: int,
    eqn: Equation,
    count: int,
    *,
    is_part: bool,
    flat: Collection[int],
) -> bool:
    """Returns whether XLA may shard images, but over a part of the axes, as this dim.

    It would be a map of positions or a flat matrix: with `is_part`, over some of the
    axes, else with too many shards for the first dim of the images. `flat` has the
    sizes of dims that are reshaped into others.
    """
    (lhs, rhs, _), size = eqn.params["dimension_numbers"], shape[dim]
    for var, spec in zip(eqn.invars, (lhs, rhs), strict=True):
        features, *space = (var.aval.shape[d] for d in (spec[0], *spec[2:]))
        area = math.prod(space)
        is_map = len(space) < len(shape) > dim + 1 and size in space
        is_pooled = spec is rhs and size > 8 * features and not area * features % size
        is_flat = size in flat and (is_pooled or size in (area, area * features))
        flat_dims = sorted(spec[2:] if size == area else (spec[0], *spec[2:]))
        first = next((d for d in flat_dims if var.aval.shape[d] > 1), spec[0])
        pooled = area * features // size if is_pooled and first != spec[0] else 1
        length = var.aval.shape[first] // round(pooled ** (1 / len(space)))
        is_cut = is_part or (is_flat and 1 < math.gcd(length, count) < count)
        if count > 1 and is_cut and (is_map or is_flat):
            return True
    return False


def run_without(axes: frozenset[str], function: Callable[[], Any]) -> Any:
    """Returns what a function does with all arrays whole over axes that XLA ignores."""
    options: Any = {"mesh": jax.sharding.get_abstract_mesh(), "axis_names": {*axes}}
    specs = {"in_specs": (), "out_specs": PartitionSpec()}
    return jax.jit(jax.shard_map(function, **options, **specs, check_vma=False))()


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
        kept = ((x for x in axes_of(entry) if x != self.axis) for entry in layout.spec)
        whole = layout.update(spec=PartitionSpec(*map(tuple, kept)))
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
