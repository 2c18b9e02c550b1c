"""Decides the layout of one leaf after another, by the rules of a layout map."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from meshlayout import _paths, _render
from meshlayout.errors import LayoutError, LayoutMapError
from meshlayout.layout import Layout
from meshlayout.layout_map.follow import Slot, slot_layout
from meshlayout.layout_map.metadata import (
    axis_rules,
    logical_axes,
    logical_layout,
    own_layout_metadata,
)
from meshlayout.layout_map.resolution import Resolution
from meshlayout.layout_map.rules import (
    Conflict,
    Matcher,
    OnUneven,
    ParsedRule,
    Unmatched,
    Unused,
    parse_spec,
)
from meshlayout.mesh import Mesh


@dataclass(frozen=True)
class Options:
    """What a layout map decides by, besides its rules; see `LayoutMap`."""

    mesh: Mesh
    default: ParsedRule | None
    conflict: Conflict
    unmatched: Unmatched
    on_uneven: OnUneven
    unused: Unused
    logical_axes: Mapping[str, Any] | None


class _Array(NamedTuple):
    """An array to find a layout for; as text, how errors name it."""

    path: str
    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        return f"{self.path} {_render.array_text(self.dtype, self.shape)}"


class _Fit(NamedTuple):
    """A layout that an array's shape can take."""

    layout: Layout
    lost: str | None
    bytes_per_device: int


class Resolver:
    """Resolves leaves one after another, and remembers what repeats.

    Args:
        options: The map's options.
        rules: The map's rules, in order.
    """

    def __init__(self, options: Options, rules: Iterable[ParsedRule]) -> None:
        self._options = options
        self._matcher = Matcher(rules)
        self._replicated: dict[int, Layout] = {}
        self._fits: dict[Any, _Fit] = {}

    def leaf(self, leaf: _paths.Leaf) -> Resolution | None:
        """Returns the resolution of a leaf; None if it is no array.

        Args:
            leaf: The leaf.
        """
        array = _array_of(leaf)
        if array is None:
            return None
        own = None if leaf.box is None else own_layout_metadata(leaf.box)
        if own is not None:
            return self._by_own(array, own)
        found = self._by_rules(array, self._candidates(leaf.path))
        names = None if leaf.box is None else logical_axes(leaf.box)
        if names is not None:
            rules = axis_rules(leaf.box, self._options.logical_axes)
            return self._by_names(array, names, rules, found)
        return found or self._by_default(array)

    def slots(
        self,
        leaves: Sequence[_paths.Leaf],
        slots: Sequence[Slot | None],
        owners: Sequence[Resolution | None],
    ) -> list[Resolution | None]:
        """Returns the resolutions of an optimiser state.

        Args:
            leaves: Its leaves.
            slots: Which parameter each belongs to, if any.
            owners: The parameters' resolutions.
        """
        # A rule that speaks for any parameter is no rule for slots: it would match
        # their paths by accident of names.
        taken = {
            rule
            for owner in owners
            if owner is not None
            for rule in self.speaking_for(owner.path)
        }
        return [
            self._slot(leaf, slot, owners, taken)
            for leaf, slot in zip(leaves, slots, strict=True)
        ]

    def _slot(
        self,
        leaf: _paths.Leaf,
        slot: Slot | None,
        owners: Sequence[Resolution | None],
        taken: set[ParsedRule],
    ) -> Resolution | None:
        array = _array_of(leaf)
        if array is None:
            return None
        rules = [rule for rule in self._candidates(leaf.path) if rule not in taken]
        found = self._by_rules(array, rules)
        if found is not None:
            return found
        owner = None if slot is None else owners[slot.param]
        if owner is None or slot is None:
            return self._whole(array, "belongs to no parameter")
        if slot.kept is None:
            why = f"of shape unlike its parameter {owner.path!r}"
            lost = "replicated: its dims cannot be told from the parameter's"
            return self._whole(array, why, lost)
        layout = slot_layout(slot, len(array.shape), owner.layout)
        fit = self._fit(array, layout, "replicate", "")
        return _resolution(array, fit, owner.rule, f"follows parameter {owner.path!r}")

    def by_rules(
        self, path: str, shape: tuple[int, ...], dtype: Any
    ) -> Resolution | None:
        """Returns what the rules say, or None where none matches.

        Args:
            path: The leaf's path.
            shape: Its global shape.
            dtype: Its dtype.
        """
        return self._by_rules(_Array(path, shape, dtype), self._candidates(path))

    def speaking_for(self, path: str) -> tuple[ParsedRule, ...]:
        """Returns every rule that matches a path, hidden by the exact one or not.

        Args:
            path: The path.
        """
        return (*self._matcher.exact(path), *self._matcher.matching(path))

    def _candidates(self, path: str) -> tuple[ParsedRule, ...]:
        return self._matcher.exact(path) or self._matcher.matching(path)

    # Each source of layouts, in the order in which they are asked.

    def _by_own(self, array: _Array, own: Any) -> Resolution:
        try:
            layout = parse_spec(own, self._options.mesh).with_rank(len(array.shape))
        except LayoutError as error:
            msg = f"{array}: the layout given on its layer does not fit: {error}"
            raise LayoutMapError(msg) from None
        on_uneven = self._options.on_uneven
        fit = self._fit(array, layout, on_uneven, "given on its layer, ")
        rules = ", ".join(repr(r.pattern) for r in self._candidates(array.path))
        note = f"its own layout wins over rule {rules}" if rules else None
        return _resolution(array, fit, None, "given on its layer", note)

    def _by_rules(
        self, array: _Array, rules: Iterable[ParsedRule]
    ) -> Resolution | None:
        chosen: tuple[ParsedRule, Layout] | None = None
        for rule in rules:
            layout = self._expand(rule, array)
            if layout is None:
                continue
            if chosen is None:
                chosen = (rule, layout)
                if self._options.conflict == "first":
                    break
            elif layout != chosen[1]:
                raise LayoutMapError(_conflict_text(array, chosen, (rule, layout)))
        if chosen is None:
            return None
        rule, layout = chosen
        policy = rule.on_uneven or self._options.on_uneven
        fit = self._fit(array, layout, policy, f"rule {rule.pattern!r}, ")
        reason = "exact path" if rule.pattern == array.path else "pattern"
        return _resolution(array, fit, rule.pattern, reason)

    def _by_names(
        self,
        array: _Array,
        names: tuple[Any, ...],
        rules: Any,
        found: Resolution | None,
    ) -> Resolution:
        mesh = self._options.mesh
        try:
            layout = logical_layout(names, rules, mesh).with_rank(len(array.shape))
        except LayoutError as error:
            if found is not None:
                note = f"its logical axes {names} cannot be read: {error}"
                return dataclasses.replace(found, note=note)
            msg = f"{array}: logical axes {names}: {error}"
            raise LayoutMapError(msg) from None
        if found is None:
            source = f"logical axes {names}"
            fit = self._fit(array, layout, self._options.on_uneven, f"{source}, ")
            return _resolution(array, fit, None, source)
        if layout == found.layout:
            return found
        note = f"the rule wins over its logical axes {names}, which mean {layout}"
        return dataclasses.replace(found, note=note)

    def _by_default(self, array: _Array) -> Resolution:
        if not array.shape:
            return self._whole(array, "scalar")
        if self._options.unmatched == "error":
            hint = "" if self._matcher else " The map has no rules."
            msg = (
                f"{array}: no rule matches, and the map has unmatched='error'.{hint} "
                f"Add a rule, for instance layouts[{array.path!r}] = [...] for "
                "replicated."
            )
            raise LayoutMapError(msg)
        default = self._options.default
        layout = default and self._expand(default, array)
        if layout is None:
            return self._whole(array, "default")
        policy = (default and default.on_uneven) or self._options.on_uneven
        fit = self._fit(array, layout, policy, "default, ")
        return _resolution(array, fit, None, "default")

    def _whole(self, array: _Array, reason: str, lost: str | None = None) -> Resolution:
        """Returns a replicated resolution."""
        rank = len(array.shape)
        if rank not in self._replicated:
            self._replicated[rank] = Layout.replicated(self._options.mesh, rank)
        fit = self._fit(array, self._replicated[rank], "error", "")
        return _resolution(array, fit._replace(lost=lost), None, reason)

    # From a rule to a layout that fits.

    def _expand(self, rule: ParsedRule, array: _Array) -> Layout | None:
        """Returns the rule's layout for an array of this rank."""
        rank = len(array.shape)
        try:
            if rule.function is not None:
                given = rule.function(*array)
                if given is None:
                    return None
                return parse_spec(given, self._options.mesh).with_rank(rank)
            assert rule.layout is not None
            if rank not in rule.expanded:
                # A pattern for arrays may match a scalar, such as a step number.
                if not rank and rule.pattern != array.path and _needs_dims(rule):
                    return None
                rule.expanded[rank] = rule.layout.with_rank(rank)
            return rule.expanded[rank]
        except LayoutError as error:
            msg = f"{array}: rule {rule.pattern!r}: {error}"
            raise LayoutMapError(msg) from None

    def _fit(
        self, array: _Array, layout: Layout, policy: OnUneven, source: str
    ) -> _Fit:
        """Returns the layout that the shape takes, and what was lost."""
        key = (layout, array.shape, array.dtype, policy)
        if key in self._fits:
            return self._fits[key]
        misfits = layout.misfits(array.shape)
        lost = None
        if misfits and policy == "error":
            fact, _, fix = str(misfits[0]).rstrip(".").partition(". ")
            ways = f"{fix}, or give the rule on_uneven='replicate'."
            msg = f"{array}: {fact} ({source}{layout!r}). {ways}"
            raise LayoutMapError(msg)
        if misfits:
            lost = "; ".join(
                f"dim {one.dim} left unsharded: size {one.size} does not divide into "
                f"{one.num_shards} shards over {', '.join(one.axes)}"
                for one in misfits
            )
            gone = {one.dim for one in misfits}
            specs = [None if d in gone else e for d, e in enumerate(layout.specs)]
            layout = Layout(specs, layout.mesh, memory_kind=layout.memory_kind)
        size = layout.bytes_per_device(array.shape, array.dtype)
        self._fits[key] = _Fit(layout, lost, size)
        return self._fits[key]


def _needs_dims(rule: ParsedRule) -> bool:
    layout = rule.layout
    return layout is not None and any(entry is not ... for entry in layout.specs)


def _resolution(
    array: _Array, fit: _Fit, rule: str | None, reason: str, note: str | None = None
) -> Resolution:
    return Resolution(
        *array, fit.layout, rule, reason, fit.lost, note, fit.bytes_per_device
    )


def _conflict_text(
    array: _Array, one: tuple[ParsedRule, Layout], other: tuple[ParsedRule, Layout]
) -> str:
    return (
        f"{array}: rules {one[0].pattern!r} and {other[0].pattern!r} both match and "
        f"disagree: {one[1]} against {other[1]}. Make the patterns exclusive, add a "
        "rule for the exact path, or let the order decide with conflict='first'."
    )


def _array_of(leaf: _paths.Leaf) -> _Array | None:
    """Returns the array or number that a leaf is; None for anything else."""
    value = leaf.value
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return _Array(leaf.path, tuple(value.shape), value.dtype)
    if isinstance(value, (bool, int, float, complex)):
        dtype = jax.dtypes.canonicalize_dtype(np.result_type(value))
        return _Array(leaf.path, (), dtype)
    return None
