"""Decides the layout of one leaf after another, by the rules of a layout map.

The sources of layouts, in this order: rules, logical axes, for optimizer states the
parameter, and the default. Large models repeat: a decision of plain rules is kept for
the next leaf of the same rules, shape and dtype.
"""

import contextlib
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
    OnUneven,
    ParsedRule,
    Unmatched,
    Unused,
    checked_rule,
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


class Decision(NamedTuple):
    """The layout of a leaf and its reasons, as in `Resolution`."""

    layout: Layout
    rule: str | None
    reason: str
    fallback: str | None = None
    note: str | None = None


class _ArrayAt(NamedTuple):
    """An array to find a layout for; as text, how errors name it."""

    path: str
    shape: tuple[int, ...]
    dtype: DType

    def __str__(self) -> str:
        return f"{self.path} {_render.array_text(self.dtype, self.shape)}"


class Resolver:
    """Resolves leaves one after another.

    Args:
        options: The map's options.
        rules: The map's rules, in order.
    """

    def __init__(self, options: Options, rules: Collection[ParsedRule]) -> None:
        self._options = options
        self._by_pattern = {rule.pattern: rule for rule in rules}
        self._searches = [(rule, rule.regex.search) for rule in rules]
        self._functions = {rule for rule in rules if rule.function is not None}
        default = options.default
        self._asks_default = default is not None and default.function is not None
        self._decisions: dict[Any, Decision] = {}

    def matching(self, path: str) -> list[ParsedRule]:
        """Returns all rules that match a path, in order."""
        found = [rule for rule, search in self._searches if search(path)]
        exact = self._by_pattern.get(path)
        return found if exact is None or exact in found else [exact, *found]

    def deciding(self, path: str) -> tuple[ParsedRule, ...]:
        """Returns the rules that decide about a path.

        That whose pattern equals the path; else those of the user; else those that a
        function of `parallel` made.
        """
        exact = self._by_pattern.get(path)
        if exact is not None:
            return (exact,)
        found = [rule for rule, search in self._searches if search(path)]
        own = [rule for rule in found if not rule.rule.is_generated]
        return tuple(own or found)

    def leaf(self, leaf: _paths.Leaf) -> Resolution | None:
        """Resolves a leaf by the first source of layouts that has an answer.

        Returns:
            The resolution; None if the leaf is neither an array nor a number.
        """
        path, value, box = leaf
        array = _array_of(path, value)
        if array is None:
            return None
        rules = self.deciding(path)
        if box is not None and logical_axes(box) is not None:
            by_rules = self._by_rules(array, rules)
            return self._resolution(array, value, self._by_names(array, box, by_rules))
        # An exact path may apply to a scalar, where a pattern would not.
        is_exact = bool(rules) and rules[0].pattern == path
        key = (rules, is_exact, array.shape, array.dtype)
        decision = self._decisions.get(key)
        if decision is None:
            decision = self._by_rules(array, rules) or self._by_default(array)
            if self._functions.isdisjoint(rules) and (rules or not self._asks_default):
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
        paths = [owner.path for owner in owners if owner is not None]
        taken = {rule for path in paths for rule in self.matching(path)}
        resolutions: list[Resolution | None] = []
        for leaf, slot in zip(leaves, slots, strict=True):
            array = _array_of(leaf.path, leaf.value)
            if array is None:
                resolutions.append(None)
                continue
            owner = None if slot is None else owners[slot.param]
            if owner is None or slot is None:
                decision = self._replicate(array, "belongs to no parameter")
            else:
                layout = slot.layout(len(array.shape), owner.layout)
                reason = f"follows parameter {owner.path!r}"
                layout, lost = self._fit(array, layout, "replicate", "")
                decision = Decision(layout, owner.rule, reason, lost)
            rules = [r for r in self.deciding(leaf.path) if r not in taken]
            decision = self._by_rules(array, rules, decision.layout) or decision
            resolutions.append(self._resolution(array, leaf.value, decision))
        return resolutions

    def by_rules(
        self, path: str, shape: tuple[int, ...], dtype: DTypeLike
    ) -> Resolution | None:
        """Resolves one array by the rules alone; returns None if none matches."""
        array = _ArrayAt(path, shape, dtype)
        decision = self._by_rules(array, self.deciding(path))
        return decision and self._resolution(array, None, decision)

    def opinion(
        self, path: str, shape: tuple[int, ...], dtype: DType, layout: Layout
    ) -> Decision | None:
        """Returns what rules or default say about an array that has a layout already.

        None if no rule matches and the default, if there is one, has no opinion.
        """
        array, default = _ArrayAt(path, shape, dtype), self._options.default
        decision = self._by_rules(array, self.deciding(path), layout)
        if decision is None and default is not None:
            return self._by_rules(array, (default,), layout)
        return decision

    def _resolution(
        self, array: _ArrayAt, value: object, decision: Decision
    ) -> Resolution:
        is_array = not isinstance(value, _NUMBERS) or isinstance(value, np.generic)
        placed = None
        if isinstance(value, jax.Array) and not isinstance(value, Tracer):
            here, mesh = value.sharding, self._options.mesh.jax_mesh
            if isinstance(here, NamedSharding) and here.mesh == mesh:
                there = decision.layout.sharding
                if not here.is_equivalent_to(there, value.ndim):
                    with contextlib.suppress(
                        LayoutError
                    ):  # partial sums have no layout
                        placed = Layout.of(here, value.ndim)
        return Resolution(*array, *decision, placed, is_array)

    # Each source of layouts.

    def _by_rules(
        self,
        array: _ArrayAt,
        rules: Iterable[ParsedRule],
        layout: Layout | None = None,
    ) -> Decision | None:
        """Asks rules; some extend the layout that the array has without them."""
        chosen: tuple[ParsedRule, Layout, OnUneven | None, str | None] | None = None
        for rule in rules:
            answer = self._expand(rule, array, layout)
            if answer is None:
                continue
            if chosen is None:
                chosen = (rule, *answer)
                if self._options.conflict == "first":
                    break
            elif answer[0] != chosen[1]:
                msg = (
                    f"{array}: rules {chosen[0].pattern!r} and {rule.pattern!r} both "
                    f"match and disagree: {chosen[1]} against {answer[0]}. Make the "
                    "patterns exclusive, add a rule for the exact path, or use "
                    "conflict='first', for which the order counts."
                )
                raise LayoutMapError(msg)
        if chosen is None:
            return None
        rule, found, policy, note = chosen
        policy = policy or self._options.on_uneven
        if rule is self._options.default:
            found, lost = self._fit(array, found, policy, "default, ")
            return Decision(found, None, "default", lost, note)
        found, lost = self._fit(array, found, policy, f"rule {rule.pattern!r}, ")
        reason = "exact path" if rule.pattern == array.path else "pattern"
        return Decision(found, rule.pattern, reason, lost, note)

    def _by_names(
        self, array: _ArrayAt, box: Box, by_rules: Decision | None
    ) -> Decision:
        options = self._options
        rules = axis_rules(box, options.logical_axes or ())
        has_default = by_rules is None and options.default is not None
        if has_default and means_nothing(box, rules, options.mesh):
            return self._by_default(array)
        source = f"logical axes {logical_axes(box)}"
        try:
            layout, note = logical_layout(box, rules, options.mesh)
            layout = layout.with_rank(len(array.shape))
        except LayoutError as error:
            if by_rules is not None:
                note = f"its {source} cannot be read: {error}"
                return by_rules._replace(note=note)
            raise LayoutMapError(f"{array}: {source}: {error}") from None
        if by_rules is None:
            layout, lost = self._fit(array, layout, options.on_uneven, f"{source}, ")
            return Decision(layout, None, source, lost, note)
        if layout == by_rules.layout:
            return by_rules
        note = f"the rule wins over its {source}, which mean {layout}"
        return by_rules._replace(note=note)

    def _by_default(self, array: _ArrayAt) -> Decision:
        if not array.shape:
            return self._replicate(array, "scalar")
        default = self._options.default
        decision = None if default is None else self._by_rules(array, (default,))
        if decision is None and self._options.unmatched == "error":
            hint = "" if self._searches else " The map has no rules."
            msg = (
                f"{array}: no rule matches, and the map has unmatched='error'.{hint} "
                f"Add a rule, such as layouts[{array.path!r}] = [...] for replicated."
            )
            raise LayoutMapError(msg)
        return decision or self._replicate(array, "default")

    def _replicate(self, array: _ArrayAt, reason: str) -> Decision:
        layout = Layout.replicated(self._options.mesh, len(array.shape))
        return Decision(layout, None, reason)

    # From a rule to a layout that fits.

    def _expand(
        self, rule: ParsedRule, array: _ArrayAt, layout: Layout | None
    ) -> tuple[Layout, OnUneven | None, str | None] | None:
        """Returns a rule's layout, policy and note; None if it has no opinion."""
        found: Any = rule.rule
        where = f"{array}: rule {rule.pattern!r}"
        if rule.function is not None:
            context = f"in the function of rule {rule.pattern!r}, called for {array}"
            with _checks.noted(context):
                if layout is None or not hasattr(rule.function, "extend"):
                    found = rule.function(*array)
                else:
                    found = rule.function.extend(*array, layout)
            found = checked_rule(found, where)
            if found.layout is None:
                return None
        rank, is_exact = len(array.shape), rule.pattern == array.path
        try:
            spec = parse_spec(found.layout, self._options.mesh)
            # A pattern for arrays may also match a scalar, such as a step number,
            # which it does not mean.
            is_plain = rule.function is None
            if is_plain and not rank and not is_exact and {*spec.specs} - {...}:
                return None
            policy = found.on_uneven or rule.rule.on_uneven
            return spec.with_rank(rank), policy, found.note or rule.rule.note
        except LayoutError as error:
            raise LayoutMapError(f"{where}: {error}") from None

    def _fit(
        self, array: _ArrayAt, layout: Layout, policy: OnUneven, source: str
    ) -> tuple[Layout, str | None]:
        """Returns the layout that fits the shape, and what was lost for it."""
        misfits = layout.misfits(array.shape)
        if not misfits:
            return layout, None
        if policy == "error":
            fact, _, fix = str(misfits[0]).rstrip(".").partition(". ")
            fixes = f"{fix}, or give the rule on_uneven='replicate'."
            msg = f"{array}: {fact} ({source}{layout!r}). {fixes}"
            raise LayoutMapError(msg)
        lost = "; ".join(
            f"dim {misfit.dim} left unsharded: size {misfit.size} does not divide "
            f"into {misfit.num_shards} shards over {', '.join(misfit.axes)}"
            for misfit in misfits
        )
        uneven = {misfit.dim for misfit in misfits}
        entries = [None if d in uneven else e for d, e in enumerate(layout.specs)]
        return layout.with_specs(entries), lost


_NUMBERS = (bool, int, float, complex)


def _array_of(path: str, value: Any) -> _ArrayAt | None:
    """Returns the array or number that a leaf is; None for anything else."""
    dtype = getattr(value, "dtype", None)
    if dtype is not None and hasattr(value, "shape"):
        return _ArrayAt(path, tuple(value.shape), dtype)
    if isinstance(value, _NUMBERS):
        return _ArrayAt(path, (), jax.dtypes.canonicalize_dtype(np.result_type(value)))
    return None
