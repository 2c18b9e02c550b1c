"""Rules: a pattern on paths, and the layout of the leaves that it matches."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _checks
from meshlayout.errors import LayoutError, LayoutMapError
from meshlayout.layout import MATCH, Layout, SpecLike
from meshlayout.mesh import Mesh


OnUneven: TypeAlias = Literal["error", "replicate"]
Conflict: TypeAlias = Literal["error", "first"]
Unused: TypeAlias = Literal["warn", "error", "ignore"]
Unmatched: TypeAlias = Literal["replicate", "error"]

LayoutLike: TypeAlias = Layout | NamedSharding | SpecLike
"""The layout of a rule: a layout on the mesh of the map, or a spec."""

LayoutFunction: TypeAlias = Callable[
    [str, tuple[int, ...], Any], "LayoutLike | Rule | None"
]
"""`(path, shape, dtype) -> spec`, None if it has no opinion, or a `Rule` with a note. A
method `extend(path, shape, dtype, layout)`, as that of `zero_rule`, is also given the
layout that the leaf has without it, such as that of an optimizer slot's parameter."""

RuleLike: TypeAlias = "LayoutLike | LayoutFunction | Rule"


@_checks.user_call
@dataclass(frozen=True)
class Rule:
    """The layout for a pattern, with its own options.

    Attributes:
        layout: A `Layout`, a spec (tuple, list or `PartitionSpec`) or a function
            `(path, shape, dtype) -> layout or spec or None`.
        on_uneven: What to do with a dim that does not divide: `"error"`, or
            `"replicate"` to leave that dim unsharded. None uses the map's policy.
        note: Why, in one sentence, for `explain` and `to_code`.
        sends: Bytes that all-reduces send in one step because of this rule, if known.
        is_generated: Whether `meshlayout.parallel` made it, so that your own rules win.
        yields: A mesh axis over which the layout of an activation spreads to other
            arrays only where layouts of parameters do not.
    """

    layout: LayoutLike | LayoutFunction
    on_uneven: OnUneven | None = None
    note: str | None = None
    sends: int | None = None
    is_generated: bool = False
    yields: str | None = None


@dataclass(frozen=True, eq=False)
class ParsedRule:
    """A rule, checked against the mesh: its layout is a `Layout` or a function."""

    pattern: str
    regex: re.Pattern[str]
    rule: Rule

    @property
    def function(self) -> Any:
        """The function that decides, or None."""
        return None if isinstance(self.rule.layout, Layout) else self.rule.layout

    def value(self) -> "Layout | LayoutFunction | Rule":
        """Returns what a user could assign to get this rule again."""
        layout: Any = self.rule.layout
        return layout if self.rule == Rule(layout) else self.rule


def parse_rule(pattern: Any, value: Any, mesh: Mesh) -> ParsedRule:
    """Checks one rule; raises LayoutMapError if its pattern or layout is wrong."""
    if not isinstance(pattern, str) or not pattern:
        msg = f"a pattern must be a string, and not empty, got {_checks.shown(pattern)}"
        raise LayoutMapError(f"{msg}. For every path, give the layout as default=.")
    regex = _checks.pattern("pattern", pattern, error=LayoutMapError)
    where = f"rule {pattern!r}"
    rule = checked_rule(value, where)
    layout: Any = rule.layout
    try:
        if callable(layout):
            names = ("path", "shape", "dtype")
            _checks.function("function", layout, *names, error=LayoutError)
        else:
            layout = parse_spec(layout, mesh)
    except LayoutError as error:
        raise LayoutMapError(f"{where}: {error}") from None
    return ParsedRule(pattern, regex, replace(rule, layout=layout))


def checked_rule(value: Any, where: str) -> Rule:
    """Returns a value as a `Rule`; raises LayoutMapError for a wrong option."""
    rule = value if isinstance(value, Rule) else Rule(value)
    if rule.on_uneven is not None:
        context = _checks.Context(where=where, error=LayoutMapError)
        _checks.choice("on_uneven", rule.on_uneven, get_args(OnUneven), **context)
    return rule


def parse_spec(value: Any, mesh: Mesh) -> Layout:
    """Returns the layout that a rule specifies; raises LayoutError if it is none."""
    if isinstance(value, (Layout, NamedSharding)):
        layout = Layout.of(value)
        if layout.mesh != mesh:
            msg = f"{layout!r} is on another mesh than the map, {mesh!r}. Give the spec"
            raise LayoutError(f"{msg} alone, or a layout on the mesh of the map.")
    elif isinstance(value, (PartitionSpec, list, tuple)):
        layout = Layout(value, mesh)
    else:
        raise LayoutError(
            "expected a Layout, a tuple or list with one entry per dim, a "
            "PartitionSpec, or a function (path, shape, dtype) -> spec, got "
            f"{_checks.shown(value)}. Write (..., 'model') to shard the last dim, "
            "[...] for replicated. Rules for logical axis names go into logical_axes=."
        )
    if MATCH in layout.specs:
        raise LayoutError(f"{layout} holds MATCH, which is for relayout alone.")
    if isinstance(value, (PartitionSpec, NamedSharding)):  # may leave out dims
        layout = layout.with_specs((*layout.specs, ...))
    return layout
