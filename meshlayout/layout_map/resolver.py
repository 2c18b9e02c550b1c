"""Decides the layout of one leaf after another, by the rules of a layout map.

Large models repeat: thousands of leaves share their rules, shape and dtype. A decision
is cached for the next leaf of its kind, which then costs a few dictionary lookups.
Whatever depends on the leaf itself (its own metadata, a function as its rule, the
current layout of a concrete array) is evaluated each time.

The sources of layouts, in this order: rules, logical axes, for optimizer states the
parameter, and the default.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from meshlayout import _checks, _paths, _render
from meshlayout._annotations import Box, DType
from meshlayout.errors import LayoutError, LayoutMapError
from meshlayout.layout import Layout
from meshlayout.layout_map.metadata import (
    AxisRule,
    axis_rules,
    logical_axes,
    logical_layout,
    means_nothing,
)
from meshlayout.layout_map.optimizer_slots import OptimizerSlot
from meshlayout.layout_map.report import Resolution
from meshlayout.layout_map.rules import (
    Conflict,
    Matcher,
    OnUneven,
    ParsedRule,
    Rule,
    Unmatched,
    Unused,
    check_rule_options,
    parse_spec,
)
from meshlayout.mesh import Mesh


@dataclass(frozen=True)
class Options:
    """The options of a layout map, besides its rules; see `LayoutMap`."""

    mesh: Mesh
    default: ParsedRule | None
    conflict: Conflict
    unmatched: Unmatched
    on_uneven: OnUneven
    unused: Unused
    logical_axes: tuple[AxisRule, ...] | None


class Resolver:
    """Resolves leaves one after another, and caches what repeats.

    Args:
        options: The map's options.
        rules: The map's rules, in order.
    """

    def __init__(self, options: Options, rules: Collection[ParsedRule]) -> None:
        self._options = options
        self.matcher = Matcher(rules)
        default = options.default
        self._asks_default = default is not None and default.function is not None
        self._functions = {rule for rule in rules if rule.function is not None}
        self._replicated: dict[int, Layout] = {}
        self._decisions: dict[Any, _Decision] = {}
        self._fits: dict[Any, _Fit] = {}
        self._placed: dict[tuple[NamedSharding, int], Layout | None] = {}

    def leaf(self, leaf: _paths.Leaf) -> Resolution | None:
        """Resolves a leaf by the first source of layouts that has an answer.

        Returns:
            The resolution; None if the leaf is neither an array nor a number.
        """
        path, value, box = leaf
        array = _array_of(path, value)
        if array is None:
            return None
        rules = self.matcher.candidates(path)
        if box is not None:
            decision = self._by_metadata(array, box, rules)
        elif self._asks_default or not self._functions.isdisjoint(rules):
            decision = self._by_rules(array, rules) or self._by_default(array)
        else:
            # An exact path may apply to a scalar, where a pattern would not.
            is_exact = bool(rules) and rules[0].pattern == path
            key = (rules, is_exact, array.shape, array.dtype)
            decision = self._decisions.get(key)
            if decision is None:
                decision = self._by_rules(array, rules) or self._by_default(array)
                self._decisions[key] = decision
        return self._resolution(array, value, decision)

    def slots(
        self,
        leaves: Sequence[_paths.Leaf],
        slots: Sequence[OptimizerSlot | None],
        owners: Sequence[Resolution | None],
    ) -> list[Resolution | None]:
        """Returns the resolutions of the leaves of an optimizer state.

        Args:
            leaves: The leaves.
            slots: The parameter of each leaf, if any.
            owners: The resolutions of the parameters.
        """
        # A rule that matches any parameter is not a rule for slots: it would match
        # their paths only because names coincide.
        taken = {
            rule
            for owner in owners
            if owner is not None
            for rule in self.matcher.all_matching(owner.path)
        }
        resolutions: list[Resolution | None] = []
        for leaf, slot in zip(leaves, slots, strict=True):
            array = _array_of(leaf.path, leaf.value)
            if array is None:
                resolutions.append(None)
                continue
            rules = [r for r in self.matcher.candidates(leaf.path) if r not in taken]
            owner = None if slot is None else owners[slot.param]
            decision = self._by_owner(array, slot, owner)
            decision = self._by_rules(array, rules, decision.fit.layout) or decision
            resolutions.append(self._resolution(array, leaf.value, decision))
        return resolutions

    def by_rules(
        self, path: str, shape: tuple[int, ...], dtype: DTypeLike
    ) -> Resolution | None:
        """Resolves one array by the rules alone; returns None if none matches."""
        array = _ArrayAt(path, shape, dtype)
        decision = self._by_rules(array, self.matcher.candidates(path))
        return decision and self._resolution(array, None, decision)

    def by_path(
        self, path: str, shape: tuple[int, ...], dtype: DTypeLike
    ) -> Resolution:
        """Returns what the rules, or the default, decide for one array."""
        array = _ArrayAt(path, shape, dtype)
        decision = self._by_rules(array, self.matcher.candidates(path))
        return self._resolution(array, None, decision or self._by_default(array))

    def _resolution(
        self, array: "_ArrayAt", value: object, decision: "_Decision"
    ) -> Resolution:
        (layout, lost, size), rule, reason, note = decision
        is_array = not isinstance(value, _NUMBERS) or isinstance(value, np.generic)
        placed = None
        if isinstance(value, jax.Array) and not isinstance(value, Tracer):
            placed = self._placed_otherwise(value, layout)
            if placed is not None:
                size = placed.bytes_per_device(array.shape, array.dtype)
        size = size if is_array else 0
        return Resolution(
            *array, layout, rule, reason, lost, note, size, placed, is_array
        )

    def _placed_otherwise(self, x: jax.Array, layout: Layout) -> Layout | None:
        """Returns the layout of an array on this mesh, if it differs from `layout`."""
        sharding = x.sharding
        mesh = self._options.mesh.jax_mesh
        if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
            return None
        key = (sharding, x.ndim)
        if key not in self._placed:
            try:
                self._placed[key] = Layout.of(sharding, x.ndim)
            except LayoutError:  # partial sums have no layout
                self._placed[key] = None
        current = self._placed[key]
        if current is None or current == layout:
            return None
        return None if sharding.is_equivalent_to(layout.sharding, x.ndim) else current

    # Each source of layouts, in the order in which they are asked.

    def _by_metadata(
        self, array: "_ArrayAt", box: Box, rules: tuple[ParsedRule, ...]
    ) -> "_Decision":
        decision = self._by_rules(array, rules)
        if logical_axes(box) is not None:
            return self._by_names(array, box, decision)
        return decision or self._by_default(array)

    def _by_rules(
        self,
        array: "_ArrayAt",
        rules: Iterable[ParsedRule],
        layout: Layout | None = None,
    ) -> "_Decision | None":
        """Asks rules; some extend the layout that the array has without them."""
        chosen: tuple[ParsedRule, _Answer] | None = None
        for rule in rules:
            answer = self._expand(rule, array, layout)
            if answer is None:
                continue
            if chosen is None:
                chosen = (rule, answer)
                if self._options.conflict == "first":
                    break
            elif answer.layout != chosen[1].layout:
                first = (chosen[0], chosen[1].layout)
                raise LayoutMapError(
                    _conflict_text(array, first, (rule, answer.layout))
                )
        if chosen is None:
            return None
        rule, answer = chosen
        policy = answer.on_uneven or self._options.on_uneven
        fit = self._fit(array, answer.layout, policy, f"rule {rule.pattern!r}, ")
        reason = "exact path" if rule.pattern == array.path else "pattern"
        return _Decision(fit, rule.pattern, reason, answer.note)

    def _by_names(
        self, array: "_ArrayAt", box: Box, by_rules: "_Decision | None"
    ) -> "_Decision":
        options = self._options
        rules = axis_rules(box, options.logical_axes or ())
        has_default = by_rules is None and options.default is not None
        if has_default and means_nothing(box, rules, options.mesh):
            return self._by_default(array)
        source = f"logical axes {logical_axes(box)}"
        try:
            layout, notes = logical_layout(box, rules, options.mesh)
            layout = layout.with_rank(len(array.shape))
        except LayoutError as error:
            if by_rules is not None:
                note = f"its {source} cannot be read: {error}"
                return by_rules._replace(note=note)
            raise LayoutMapError(f"{array}: {source}: {error}") from None
        if by_rules is None:
            fit = self._fit(array, layout, options.on_uneven, f"{source}, ")
            return _Decision(fit, None, source, "; ".join(notes) or None)
        if layout == by_rules.fit.layout:
            return by_rules
        note = f"the rule wins over its {source}, which mean {layout}"
        return by_rules._replace(note=note)

    def _by_owner(
        self, array: "_ArrayAt", slot: OptimizerSlot | None, owner: Resolution | None
    ) -> "_Decision":
        if owner is None or slot is None:
            return self._replicate(array, "belongs to no parameter")
        layout = slot.layout(len(array.shape), owner.layout)
        fit = self._fit(array, layout, "replicate", "")
        return _Decision(fit, owner.rule, f"follows parameter {owner.path!r}", None)

    def _by_default(self, array: "_ArrayAt") -> "_Decision":
        if not array.shape:
            return self._replicate(array, "scalar")
        if self._options.unmatched == "error":
            hint = "" if self.matcher.has_rules else " The map has no rules."
            msg = (
                f"{array}: no rule matches, and the map has unmatched='error'.{hint} "
                f"Add a rule, such as layouts[{array.path!r}] = [...] for replicated."
            )
            raise LayoutMapError(msg)
        default = self._options.default
        answer = None if default is None else self._expand(default, array)
        if answer is None:
            return self._replicate(array, "default")
        policy = answer.on_uneven or self._options.on_uneven
        fit = self._fit(array, answer.layout, policy, "default, ")
        return _Decision(fit, None, "default", answer.note)

    def _replicate(self, array: "_ArrayAt", reason: str) -> "_Decision":
        rank = len(array.shape)
        if rank not in self._replicated:
            self._replicated[rank] = Layout.replicated(self._options.mesh, rank)
        fit = self._fit(array, self._replicated[rank], "error", "")
        return _Decision(fit, None, reason, None)

    # From a rule to a layout that fits.

    def _expand(
        self, rule: ParsedRule, array: "_ArrayAt", layout: Layout | None = None
    ) -> "_Answer | None":
        """Returns the answer of a rule for an array; None if it has none."""
        rank = len(array.shape)
        try:
            if rule.function is not None:
                return self._ask(rule, rule.function, array, layout)
            assert rule.layout is not None
            if rank not in rule.expanded:
                # A pattern for arrays may also match a scalar, such as a step number,
                # which it does not mean.
                is_exact = rule.pattern == array.path
                if not rank and not is_exact and {*rule.layout.specs} - {...}:
                    return None
                rule.expanded[rank] = rule.layout.with_rank(rank)
            return _Answer(rule.expanded[rank], rule.on_uneven, rule.note)
        except LayoutError as error:
            msg = f"{array}: rule {rule.pattern!r}: {error}"
            raise LayoutMapError(msg) from None

    def _ask(
        self,
        rule: ParsedRule,
        function: Any,
        array: "_ArrayAt",
        layout: Layout | None,
    ) -> "_Answer | None":
        context = f"in the function of rule {rule.pattern!r}, called for {array}"
        with _checks.noted(context):
            if layout is None or not hasattr(function, "extend"):
                spec = function(*array)
            else:
                spec = function.extend(*array, layout)
        policy, note = rule.on_uneven, rule.note
        if isinstance(spec, Rule):
            check_rule_options(spec, f"{array}: rule {rule.pattern!r}")
            policy, note = spec.on_uneven or policy, spec.note or note
            spec = spec.layout
        if spec is None:
            return None
        layout = parse_spec(spec, self._options.mesh).with_rank(len(array.shape))
        return _Answer(layout, policy, note)

    def _fit(
        self, array: "_ArrayAt", layout: Layout, policy: OnUneven, source: str
    ) -> "_Fit":
        """Returns the layout that fits the shape, and what was lost for it."""
        key = (layout, array.shape, array.dtype, policy)
        if key in self._fits:
            return self._fits[key]
        misfits = layout.misfits(array.shape)
        lost = None
        if misfits and policy == "error":
            fact, _, fix = str(misfits[0]).rstrip(".").partition(". ")
            fixes = f"{fix}, or give the rule on_uneven='replicate'."
            msg = f"{array}: {fact} ({source}{layout!r}). {fixes}"
            raise LayoutMapError(msg)
        if misfits:
            lost = "; ".join(
                f"dim {misfit.dim} left unsharded: size {misfit.size} does not divide "
                f"into {misfit.num_shards} shards over {', '.join(misfit.axes)}"
                for misfit in misfits
            )
            uneven = {misfit.dim for misfit in misfits}
            layout = layout.with_specs(
                [None if d in uneven else e for d, e in enumerate(layout.specs)]
            )
        size = layout.bytes_per_device(array.shape, array.dtype)
        self._fits[key] = _Fit(layout, lost, size)
        return self._fits[key]


class _ArrayAt(NamedTuple):
    """An array to find a layout for; as text, how errors name it."""

    path: str
    shape: tuple[int, ...]
    dtype: DType

    def __str__(self) -> str:
        return f"{self.path} {_render.array_text(self.dtype, self.shape)}"


class _Answer(NamedTuple):
    """What one rule says about an array, before its shape is looked at."""

    layout: Layout
    on_uneven: OnUneven | None
    note: str | None


class _Fit(NamedTuple):
    """A layout that an array's shape can take."""

    layout: Layout
    lost: str | None
    bytes_per_device: int


class _Decision(NamedTuple):
    """The part of a resolution that leaves of one kind have in common."""

    fit: _Fit
    rule: str | None
    reason: str
    note: str | None


_NUMBERS = (bool, int, float, complex)


def _array_of(path: str, value: Any) -> _ArrayAt | None:
    """Returns the array or number that a leaf is; None for anything else."""
    dtype = getattr(value, "dtype", None)
    if dtype is not None and hasattr(value, "shape"):
        return _ArrayAt(path, tuple(value.shape), dtype)
    if isinstance(value, _NUMBERS):
        return _ArrayAt(path, (), jax.dtypes.canonicalize_dtype(np.result_type(value)))
    return None


def _conflict_text(
    array: _ArrayAt,
    first: tuple[ParsedRule, Layout],
    other: tuple[ParsedRule, Layout],
) -> str:
    return (
        f"{array}: rules {first[0].pattern!r} and {other[0].pattern!r} both match and "
        f"disagree: {first[1]} against {other[1]}. Make the patterns exclusive, add a "
        "rule for the exact path, or use conflict='first', for which the order counts."
    )
