"""Rules: a pattern on paths, and the layout of the leaves that it matches.

Rules are parsed once, when they are inserted into a map, so that mistakes are reported
where they are made.
"""

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
"""`(path, shape, dtype) -> spec`, or None if the function has no opinion; a `Rule` to
give a note as well. One that has a method `extend(path, shape, dtype, layout)`, as
`zero_rule` returns, is given the layout that the leaf has without it, such as that of
an optimizer slot's parameter."""

RuleLike: TypeAlias = "LayoutLike | LayoutFunction | Rule"


@dataclass(frozen=True)
class Rule:
    """The layout for a pattern, with its own options.

    Attributes:
        layout: A `Layout`, a spec (tuple, list or `PartitionSpec`) or a function
            `(path, shape, dtype) -> layout or spec or None`.
        on_uneven: What to do with a dim that does not divide: `"error"`, or
            `"replicate"` to leave that dim unsharded and record it. None follows
            the map.
        note: Why, in one sentence, for `explain` and `to_code`.
        sends: Bytes that all-reduces send in one step because of this rule, where a
            program was traced, for `explain`.
        is_generated: Whether a function of `meshlayout.parallel` made this rule: one of
            your own that matches the same leaf then wins.
    """

    layout: LayoutLike | LayoutFunction
    on_uneven: OnUneven | None = None
    note: str | None = None
    sends: int | None = None
    is_generated: bool = False


@dataclass(frozen=True, eq=False)
class ParsedRule:
    """A rule, checked against the mesh.

    Attributes:
        pattern: The pattern as the user wrote it.
        regex: The compiled pattern.
        rule: The rule, with a `Layout` or a function.
    """

    pattern: str
    regex: re.Pattern[str]
    rule: Rule

    @property
    def function(self) -> Any:
        """The function that decides, or None."""
        return None if isinstance(self.rule.layout, Layout) else self.rule.layout

    def value(self) -> "Layout | LayoutFunction | Rule":
        """Returns the value that the user could assign to get this rule again."""
        layout: Any = self.rule.layout
        return layout if self.rule == Rule(layout) else self.rule


def parse_rule(pattern: Any, value: Any, mesh: Mesh) -> ParsedRule:
    """Checks one rule when it is inserted.

    Raises:
        LayoutMapError: If the pattern is not a regular expression, or its value is
            not a layout on this mesh.
    """
    if pattern == "":
        msg = "the empty pattern matches every path; use default=... instead."
        raise LayoutMapError(msg)
    regex = _checks.pattern("pattern", pattern, error=LayoutMapError)
    if not isinstance(pattern, str):
        msg = f"a pattern must be a string, not compiled: write {regex.pattern!r}."
        raise LayoutMapError(msg)
    where = f"rule {pattern!r}"
    rule = checked_rule(value, where)
    layout: Any = rule.layout
    is_layout = isinstance(layout, (Layout, NamedSharding))
    if callable(layout) and not is_layout:
        context = _checks.Context(where=where, error=LayoutMapError)
        _checks.function("function", layout, "path", "shape", "dtype", **context)
    else:
        try:
            layout = parse_spec(layout, mesh)
        except LayoutError as error:
            raise LayoutMapError(f"{where}: {error}") from None
    return ParsedRule(pattern, regex, replace(rule, layout=layout))


def checked_rule(value: Any, where: str) -> Rule:
    """Returns a value as a `Rule`; raises LayoutMapError if its options are wrong."""
    if not isinstance(value, Rule):
        return Rule(value)
    if value.on_uneven is not None:
        context = _checks.Context(where=where, error=LayoutMapError)
        _checks.choice("on_uneven", value.on_uneven, get_args(OnUneven), **context)
    if value.note is not None and not isinstance(value.note, str):
        msg = f"{where}: note must be a string, got {_checks.shown(value.note)}."
        raise LayoutMapError(msg)
    return value


def parse_spec(value: Any, mesh: Mesh) -> Layout:
    """Returns the layout that a rule specifies, on the mesh of the map.

    A `PartitionSpec` or `NamedSharding` has the same meaning as in JAX: dims that it
    leaves out are unsharded. A list or tuple has one entry per dim, or a `...`.

    Raises:
        LayoutError: If it is not a layout on this mesh.
    """
    if isinstance(value, (Layout, NamedSharding)):
        layout = Layout.of(value)
        if layout.mesh != mesh:
            msg = (
                f"{layout!r} is on another mesh than the map, {mesh!r}. Give the spec "
                f"alone, or a layout on the mesh of the map."
            )
            raise LayoutError(msg)
        if isinstance(value, NamedSharding):  # whose spec may leave out trailing dims
            layout = layout.with_specs((*layout.specs, ...))
    elif isinstance(value, PartitionSpec):
        layout = Layout((*Layout(value, mesh).specs, ...), mesh)
    elif isinstance(value, (list, tuple)):
        layout = Layout(value, mesh)
    else:
        msg = (
            "expected a Layout, a tuple or list with one entry per dim, a "
            "PartitionSpec, or a function (path, shape, dtype) -> spec, got "
            f"{_checks.shown(value)}."
        )
        if isinstance(value, str):
            msg += f" Write ({value!r}, ...) to shard the first dim."
        elif value is None:
            msg += " Write [...] for replicated."
        raise LayoutError(msg)
    if MATCH in layout.specs:
        msg = f"{layout} holds MATCH, which is for relayout; there is no array yet."
        raise LayoutError(msg)
    return layout
