"""Decides the layout of one leaf after another, by the rules of a layout map.

In this order: rules, logical axes, for optimizer states the parameter, and the default.
"""

import contextlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from meshlayout import _checks, _paths, _render
from meshlayout._annotations import Box, DType
from meshlayout.errors import LayoutError, LayoutMapError
from meshlayout.layout import Layout
from meshlayout.layout_map.metadata import AxisRule, logical_axes, logical_layout
from meshlayout.layout_map.optimizer_slots import OptimizerSlot
from meshlayout.layout_map.report import Resolution
from meshlayout.layout_map.rules import (
    Conflict,
    OnUneven,
    ParsedRule,
    Unmatched,
    Unused,
    checked_rule,
    parse_spec,
)
from meshlayout.mesh import Mesh, sizes_text


_NUMBERS = (bool, int, float, complex)


@dataclass(frozen=True)
class Options:
    """The options of a `LayoutMap`, besides its rules, with the same defaults."""

    mesh: Mesh
    default: ParsedRule | None = None
    conflict: Conflict = "error"
    unmatched: Unmatched = "replicate"
    on_uneven: OnUneven = "error"
    unused: Unused = "warn"
    logical_axes: tuple[AxisRule, ...] | None = None


class _Array(NamedTuple):
    """An array to find a layout for; as text, how errors name it."""

    path: str
    shape: tuple[int, ...]
    dtype: DType

    def __str__(self) -> str:
        return f"{self.path} {_render.array_text(self.dtype, self.shape)}"


class Resolver:
    """Resolves leaves one after another, by a map's options and rules, in order."""

    def __init__(self, options: Options, rules: Collection[ParsedRule]) -> None:
        self._options = options
        self._rules = rules
        self._default = [] if options.default is None else [options.default]

    def matching(self, path: str) -> list[ParsedRule]:
        """Returns all rules that match a path: the exact one, then the others."""
        rules = [x for x in self._rules if x.pattern == path or x.regex.search(path)]
        return sorted(rules, key=lambda rule: rule.pattern != path)

    def leaf(self, leaf: _paths.Leaf) -> Resolution | None:
        """Resolves an array or number by the first source that has an answer."""
        array = _array_of(leaf)
        if array is None:
            return None
        resolution = self._by_rules(array, self._deciding(array.path))
        if logical_axes(leaf.box) is not None:
            resolution = self._by_names(array, leaf.box, resolution)
        return self._of_leaf(resolution or self._by_default(array), leaf)

    def slots(
        self,
        leaves: Sequence[_paths.Leaf],
        slots: Sequence[OptimizerSlot | None],
        owners: Sequence[Resolution | None],
    ) -> list[Resolution | None]:
        """Resolves an optimizer state, whose parameters are resolved as `owners`."""
        # Rules that match a parameter are not meant for slots, whose paths end alike.
        paths = [owner.path for owner in owners if owner is not None]
        for_params = {rule for path in paths for rule in self.matching(path)}

        def resolve(leaf: _paths.Leaf, slot: OptimizerSlot | None) -> Resolution | None:
            array = _array_of(leaf)
            if array is None:
                return None
            owner = None if slot is None else owners[slot.param]
            if owner is None or slot is None:
                resolution = self._replicated(array, "belongs to no parameter")
            else:
                layout = slot.layout(owner.layout)
                layout, fallback = self._fitting(array, layout, "replicate", "")
                reason = f"follows parameter {owner.path!r}"
                resolution = Resolution(*array, layout, owner.rule, reason, fallback)
            rules = [x for x in self._deciding(leaf.path) if x not in for_params]
            by_rules = self._by_rules(array, rules, resolution.layout)
            return self._of_leaf(by_rules or resolution, leaf)

        return list(map(resolve, leaves, slots))

    def opinion(
        self, path: str, shape: tuple[int, ...], dtype: DType, layout: Layout
    ) -> Resolution | None:
        """Returns what rules or the default say about an array that has a layout."""
        array = _Array(path, shape, dtype)
        by_rules = self._by_rules(array, self._deciding(path), layout)
        return by_rules or self._by_rules(array, self._default, layout)

    def by_rules(
        self, path: str, shape: tuple[int, ...], dtype: DType
    ) -> Resolution | None:
        """Resolves one array by the rules alone; returns None if none matches."""
        return self._by_rules(_Array(path, shape, dtype), self._deciding(path))

    def _deciding(self, path: str) -> list[ParsedRule]:
        """Returns the exact rule for a path, else the user's, else generated ones."""
        rules = self.matching(path)
        if rules and rules[0].pattern == path:
            return rules[:1]
        return [rule for rule in rules if not rule.rule.is_generated] or rules

    def _of_leaf(self, resolution: Resolution, leaf: _paths.Leaf) -> Resolution:
        """Returns a resolution for a leaf, with its path, and where it is now."""
        x, placed, note = leaf.value, None, resolution.note
        if isinstance(x, jax.Array) and not isinstance(x, Tracer):
            actual, planned = x.sharding, resolution.layout.sharding
            is_named = isinstance(actual, NamedSharding)
            if is_named and actual.mesh != planned.mesh:
                place = f"now on Mesh({sizes_text(actual.mesh.shape)})"
                note = note or f"{place}; this is what the map would give it"
            elif is_named and not actual.is_equivalent_to(planned, x.ndim):
                with contextlib.suppress(LayoutError):  # partial sums have no layout
                    placed = Layout.of(actual, x.ndim)
        axes = tuple(jax.tree.leaves(logical_axes(leaf.box)))
        if placed and self._options.logical_axes and not axes:
            note = note or "plain arrays have lost their axis names: explain the state"
        return replace(resolution, path=leaf.path, placed=placed, axes=axes, note=note)

    def _by_rules(
        self, array: _Array, rules: Iterable[ParsedRule], layout: Layout | None = None
    ) -> Resolution | None:
        """Asks rules; some extend the layout that the array has without them."""
        decisions: list[tuple[ParsedRule, Layout, OnUneven, str | None]] = []
        for rule in rules:
            decision = self._decide(rule, array, layout)
            decisions += [] if decision is None else [(rule, *decision)]
            if decisions and self._options.conflict == "first":
                break
        if not decisions:
            return None
        rule, layout, policy, note = decisions[0]
        for other, other_layout, *_ in decisions:
            if other_layout != layout:
                raise LayoutMapError(
                    f"{array}: rules {rule.pattern!r} and {other.pattern!r} both match "
                    f"and disagree: {layout} against {other_layout}. Make the patterns "
                    "exclusive, add a rule for the exact path, or use "
                    "conflict='first', for which the order counts."
                )
        if rule is self._options.default:
            pattern, source = None, "default, "
            reason = getattr(rule.function, "name", "default")
        else:
            pattern, source = rule.pattern, f"rule {rule.pattern!r}, "
            reason = "exact path" if pattern == array.path else "pattern"
        layout, fallback = self._fitting(array, layout, policy, source)
        return Resolution(*array, layout, pattern, reason, fallback, note)

    def _by_names(
        self, array: _Array, box: Box, by_rules: Resolution | None
    ) -> Resolution | None:
        """Reads the axis names in a leaf's metadata, over which rules win."""
        options = self._options
        source = f"logical axes {logical_axes(box)}"
        try:
            rules = options.logical_axes or ()
            layout, note, is_known, wrong = logical_layout(box, rules, options.mesh)
            layout = layout.with_rank(len(array.shape))
        except LayoutError as error:
            if by_rules is None:
                raise LayoutMapError(f"{array}: {source}: {error}") from None
            return replace(by_rules, note=f"its {source} cannot be read: {error}")
        if by_rules is not None:
            if layout == by_rules.layout:
                return by_rules
            note = f"the rule wins over its {source}, which mean {layout}"
            return replace(by_rules, note=note)
        if self._default and not is_known:
            by_names = self._by_default(array) if any(wrong.values()) else None
        else:
            fitting = self._fitting(array, layout, options.on_uneven, f"{source}, ")
            by_names = Resolution(*array, fitting[0], None, source, fitting[1])
        return by_names and replace(by_names, note=note, wrong_axes=tuple(wrong))

    def _by_default(self, array: _Array) -> Resolution:
        if not array.shape:
            return self._replicated(array, "scalar")
        resolution = self._by_rules(array, self._default)
        if resolution is None and self._options.unmatched == "error":
            msg = f"{array}: no rule matches, and the map has unmatched='error'. Add a "
            rule = f"rule, such as layouts[{array.path!r}] = [...] for replicated."
            raise LayoutMapError(msg + rule)
        return resolution or self._replicated(array, "default")

    def _replicated(self, array: _Array, reason: str) -> Resolution:
        layout = Layout.replicated(self._options.mesh, len(array.shape))
        return Resolution(*array, layout, None, reason)

    def _decide(
        self, parsed: ParsedRule, array: _Array, layout: Layout | None
    ) -> tuple[Layout, OnUneven, str | None] | None:
        """Returns a rule's layout, policy and note; None if it has no opinion."""
        rule, function = parsed.rule, parsed.function
        if function is not None:
            context = f"in the function of rule {parsed.pattern!r}, called for {array}"
            extend = None if layout is None else getattr(function, "extend", None)
            with _checks.noted(context):
                result = extend(*array, layout) if extend else function(*array)
            rule = checked_rule(result, f"{array}: rule {parsed.pattern!r}")
            if rule.layout is None:
                return None
        try:
            layout = parse_spec(rule.layout, self._options.mesh)
            # A pattern for arrays may happen to match a scalar, such as a step number.
            is_pattern = function is None and parsed.pattern != array.path
            if is_pattern and not array.shape and {*layout.specs} - {...}:
                return None
            layout = layout.with_rank(len(array.shape))
        except LayoutError as error:
            raise LayoutMapError(f"{array}: rule {parsed.pattern!r}: {error}") from None
        policy = rule.on_uneven or parsed.rule.on_uneven or self._options.on_uneven
        return layout, policy, rule.note or parsed.rule.note

    def _fitting(
        self, array: _Array, layout: Layout, policy: OnUneven, source: str
    ) -> tuple[Layout, str | None]:
        """Returns a layout that fits the shape, and the dims left unsharded for it."""
        misfits = layout.misfits(array.shape)
        if misfits and policy == "error":
            fact, fix = misfits[0].fact, misfits[0].fix.removesuffix(".")
            msg = f"{array}: {fact} ({source}{layout!r}). {fix}"
            msg += ", or write ml.Rule(..., on_uneven='replicate') or, for all rules, "
            raise LayoutMapError(f"{msg}LayoutMap(..., on_uneven='replicate').")
        specs, fallbacks = list(layout.specs), list[str]()
        for misfit in misfits:
            specs[misfit.dim] = None
            fallbacks.append(
                f"dim {misfit.dim} left unsharded: size {misfit.size} does not divide "
                f"into {misfit.num_shards} shards over {', '.join(misfit.axes)}"
            )
        return layout.with_specs(specs), "; ".join(fallbacks) or None


def _array_of(leaf: _paths.Leaf) -> _Array | None:
    """Returns the array or number that a leaf is, or None."""
    path, value, _ = leaf
    dtype = getattr(value, "dtype", None)
    if dtype is not None and hasattr(value, "shape"):
        return _Array(path, tuple(value.shape), dtype)
    if isinstance(value, _NUMBERS):
        return _Array(path, (), jax.dtypes.canonicalize_dtype(np.result_type(value)))
    return None
