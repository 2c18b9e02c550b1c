"""Rules: a pattern on paths, and the layout of the leaves that it matches.

Rules are parsed once, when they are inserted into a map, so that mistakes are reported
where they are made. `Matcher` then finds the rules of a path, fast enough for models of
a hundred thousand leaves.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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
    """

    layout: LayoutLike | LayoutFunction
    on_uneven: OnUneven | None = None
    note: str | None = None


@dataclass(frozen=True, eq=False)
class ParsedRule:
    """A rule, checked against the mesh.

    Attributes:
        pattern: The pattern as the user wrote it.
        regex: The compiled pattern.
        layout: The layout, or None if a function decides.
        function: The function, or None.
        on_uneven: The rule's own policy, or None.
        note: The reason that the user gave, or None.
        expanded: The layout by rank, with `...` filled in; a cache.
    """

    pattern: str
    regex: re.Pattern[str]
    layout: Layout | None
    function: LayoutFunction | None
    on_uneven: OnUneven | None
    note: str | None = None
    expanded: dict[int, Layout] = field(default_factory=dict)

    def value(self) -> "Layout | LayoutFunction | Rule":
        """Returns the value that the user could assign to get this rule again."""
        value = self.function if self.layout is None else self.layout
        assert value is not None
        is_plain = self.on_uneven is None and self.note is None
        return value if is_plain else Rule(value, self.on_uneven, self.note)


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
    context = _checks.Context(where=f"rule {pattern!r}", error=LayoutMapError)
    on_uneven = note = None
    if isinstance(value, Rule):
        check_rule_options(value, f"rule {pattern!r}")
        on_uneven, note, value = value.on_uneven, value.note, value.layout
    try:
        if callable(value) and not isinstance(value, (Layout, NamedSharding)):
            args = ("path", "shape", "dtype")
            function: Any = _checks.function("function", value, *args, **context)
            return ParsedRule(pattern, regex, None, function, on_uneven, note)
        layout = parse_spec(value, mesh)
        return ParsedRule(pattern, regex, layout, None, on_uneven, note)
    except LayoutError as error:
        raise LayoutMapError(f"rule {pattern!r}: {error}") from None


def check_rule_options(rule: Rule, where: str) -> None:
    """Raises LayoutMapError if the options of a `Rule` are not valid."""
    if rule.on_uneven is not None:
        context = _checks.Context(where=where, error=LayoutMapError)
        _checks.choice("on_uneven", rule.on_uneven, get_args(OnUneven), **context)
    if rule.note is not None and not isinstance(rule.note, str):
        msg = f"{where}: note must be a string, got {_checks.shown(rule.note)}."
        raise LayoutMapError(msg)


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


class Matcher:
    """Finds the rules that match a path; fast for many paths that differ by digits.

    Models repeat: `layers/0/kernel`, `layers/1/kernel`. A pattern that does not
    distinguish digits has the same answer for all of them, which is cached under the
    path with every digit replaced by 0. A pattern that may distinguish them is tried on
    every path, except where its text, with digits replaced, does not occur in the key.
    """

    def __init__(self, rules: Iterable[ParsedRule]) -> None:
        rules = tuple(rules)
        self.has_rules = bool(rules)
        self._by_pattern = {rule.pattern: (rule,) for rule in rules}
        self._index = {rule: index for index, rule in enumerate(rules)}
        searches: list[_Search] = [
            (rule, required_text(rule.pattern), rule.regex.search) for rule in rules
        ]
        # Digit-blind patterns, whose answers are cached, and the others.
        self._blind = [entry for entry in searches if _is_digit_blind(entry[0].pattern)]
        self._sighted = [entry for entry in searches if entry not in self._blind]
        self._memo: dict[str, tuple[tuple[ParsedRule, ...], list[_Search]]] = {}

    def candidates(self, path: str) -> tuple[ParsedRule, ...]:
        """Returns the rule whose pattern equals the path, or else all that match it."""
        exact = self._by_pattern.get(path)
        if exact is not None:
            return exact
        # Any other path is its own key: `\d` also matches digits of other scripts.
        key = path.translate(_ZERO_DIGITS) if path.isascii() else path
        known = self._memo.get(key)
        if known is None:
            possible = [
                entry
                for entry in self._sighted
                if not path.isascii() or entry[1].translate(_ZERO_DIGITS) in key
            ]
            known = self._memo[key] = (tuple(_search(self._blind, path)), possible)
        blind, possible = known
        seen = _search(possible, path) if possible else ()
        if not seen:
            return blind
        return tuple(sorted([*blind, *seen], key=self._index.__getitem__))

    def all_matching(self, path: str) -> tuple[ParsedRule, ...]:
        """Returns every rule that matches a path, even if the exact one hides it."""
        exact = self._by_pattern.get(path, ())
        searched = _search([*self._blind, *self._sighted], path) if exact else ()
        return (*exact, *(searched or self.candidates(path)))


_Search: TypeAlias = tuple[ParsedRule, str, Callable[[str], re.Match[str] | None]]


def _search(searches: list[_Search], path: str) -> list[ParsedRule]:
    return [rule for rule, text, search in searches if text in path and search(path)]


def required_text(pattern: str) -> str:
    """Returns text that every match contains, which is faster to find than a match."""
    if set(pattern) & set("|(\\[{"):
        return ""  # alternatives, groups, classes and escapes: no simple answer
    # Runs of literal characters; the one before `?` or `*` may be missing in a match.
    runs = re.findall(r"[\w/ -]+(?![?*\w/ -])|[\w/ -]+(?=[\w/ -][?*])", pattern)
    return max(runs, key=len, default="")


_ZERO_DIGITS = {ord(digit): "0" for digit in "123456789"}


def _is_digit_blind(pattern: str) -> bool:
    r"""Returns whether a pattern certainly treats all ASCII digits alike.

    Literal digits, counts, numbered references and escapes by code all contain a digit;
    named references and `\N{...}` are recognized by their letters. A range between two
    other characters contains all ASCII digits or none.
    """
    has_digit = any(character.isdigit() for character in pattern)
    return not has_digit and "(?P=" not in pattern and "\\N" not in pattern
