"""Rules: a pattern on paths, and the layout of the leaves that it matches."""

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from jax.sharding import NamedSharding, PartitionSpec

from meshlayout.errors import LayoutError, LayoutMapError, did_you_mean
from meshlayout.layout import MATCH, Layout
from meshlayout.mesh import Mesh


OnUneven: TypeAlias = Literal["error", "replicate"]
Conflict: TypeAlias = Literal["error", "first"]
Unused: TypeAlias = Literal["warn", "error", "ignore"]
Unmatched: TypeAlias = Literal["replicate", "error"]

LayoutFunction: TypeAlias = Callable[[str, tuple[int, ...], Any], Any]
"""`(path, shape, dtype) -> spec`, or None where the function has no opinion."""

RuleLike: TypeAlias = (
    "Layout | NamedSharding | PartitionSpec | Sequence[Any] | LayoutFunction | Rule"
)


@dataclass(frozen=True)
class Rule:
    """What a pattern gives, with options of its own.

    Attributes:
        layout: A `Layout`, a spec (tuple, list or `PartitionSpec`) or a function
            `(path, shape, dtype) -> layout or spec or None`.
        on_uneven: What to do with a dim that does not divide: `"error"`, or
            `"replicate"` to leave that dim unsharded and record it. None follows
            the map.
    """

    layout: Any
    on_uneven: OnUneven | None = None


@dataclass(frozen=True, eq=False)
class ParsedRule:
    """A rule, checked against the mesh.

    Attributes:
        pattern: The pattern in the user's words.
        regex: The pattern, compiled.
        layout: The layout, or None where a function decides.
        function: The function, or None.
        on_uneven: The rule's own policy, or None.
    """

    pattern: str
    regex: re.Pattern[str]
    layout: Layout | None
    function: LayoutFunction | None
    on_uneven: OnUneven | None
    expanded: dict[int, Layout] = field(default_factory=dict)

    def value(self) -> Any:
        """Returns what the user may assign to get this rule again."""
        given = self.function if self.layout is None else self.layout
        return Rule(given, self.on_uneven) if self.on_uneven else given


def check_option(name: str, value: Any, allowed: Any) -> Any:
    """Returns an option's value, or raises LayoutMapError naming what is allowed."""
    choices = get_args(allowed)
    if value not in choices:
        msg = (
            f"{name}={value!r} is not one of {', '.join(map(repr, choices))}."
            f"{did_you_mean(value, choices)}"
        )
        raise LayoutMapError(msg)
    return value


def parse_rule(pattern: Any, value: Any, mesh: Mesh) -> ParsedRule:
    """Checks one rule when it is inserted.

    Raises:
        LayoutMapError: If the pattern is no regular expression, or what it gives is
            no layout on this mesh.
    """
    if not isinstance(pattern, str):
        msg = (
            f"a pattern is a string, and got {pattern!r} of type "
            f"{type(pattern).__name__}."
        )
        raise LayoutMapError(msg)
    if not pattern:
        msg = "the empty pattern matches every path; use default=... instead."
        raise LayoutMapError(msg)
    try:
        regex = re.compile(pattern)
    except re.error as error:
        msg = f"pattern {pattern!r} is not a regular expression: {error}."
        raise LayoutMapError(msg) from None
    on_uneven = None
    if isinstance(value, Rule):
        if value.on_uneven is not None:
            on_uneven = check_option("on_uneven", value.on_uneven, OnUneven)
        value = value.layout
    try:
        if callable(value) and not isinstance(value, (Layout, NamedSharding)):
            return ParsedRule(pattern, regex, None, value, on_uneven)
        return ParsedRule(pattern, regex, parse_spec(value, mesh), None, on_uneven)
    except LayoutError as error:
        raise LayoutMapError(f"rule {pattern!r}: {error}") from None


def parse_spec(value: Any, mesh: Mesh) -> Layout:
    """Returns the layout that a rule gives, on the map's mesh.

    A `PartitionSpec` or `NamedSharding` means what it means in JAX: dims that it
    leaves out are unsharded. A list or tuple has one entry per dim, or a `...`.

    Raises:
        LayoutError: If it is no layout on this mesh.
    """
    if isinstance(value, NamedSharding):
        layout = Layout.of(value)
        _check_mesh(layout, mesh)
        return Layout((*layout.specs, ...), mesh, memory_kind=layout.memory_kind)
    if isinstance(value, Layout):
        _check_mesh(value, mesh)
        layout = value
    elif isinstance(value, PartitionSpec):
        layout = Layout((*Layout(value, mesh).specs, ...), mesh)
    elif isinstance(value, (list, tuple)):
        layout = Layout(value, mesh)
    else:
        msg = (
            "expected a Layout, a tuple or list with one entry per dim, a "
            "PartitionSpec, or a function (path, shape, dtype) -> spec, and got "
            f"{value!r} of type {type(value).__name__}."
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


def _check_mesh(layout: Layout, mesh: Mesh) -> None:
    if layout.mesh != mesh:
        msg = (
            f"{layout!r} is on another mesh than the map's {mesh!r}. Give the spec "
            f"alone, or a layout on the map's mesh."
        )
        raise LayoutError(msg)


class Matcher:
    """Finds the rules that match a path; fast for many paths that differ by digits.

    Models repeat: `layers/0/kernel`, `layers/1/kernel`. A pattern that cannot tell
    one digit from another gives the same answer for all of them, so its answer is
    kept by the path with every digit replaced by 0. Patterns that might tell are
    tried on every path.
    """

    def __init__(self, rules: Iterable[ParsedRule]) -> None:
        rules = tuple(rules)
        self._by_pattern = {rule.pattern: (rule,) for rule in rules}
        searches = [
            (at, rule, required_text(rule.pattern), rule.regex.search)
            for at, rule in enumerate(rules)
        ]
        self._blind = [entry for entry in searches if _is_digit_blind(entry[1].pattern)]
        self._sighted = [entry for entry in searches if entry not in self._blind]
        self._memo: dict[str, list[tuple[int, ParsedRule]]] = {}

    def __len__(self) -> int:
        return len(self._by_pattern)

    def exact(self, path: str) -> tuple[ParsedRule, ...]:
        """Returns the rule whose pattern is the path itself, if any."""
        return self._by_pattern.get(path, ())

    def matching(self, path: str) -> tuple[ParsedRule, ...]:
        """Returns all rules that match, in the order they were given."""
        key = path.translate(_ZERO_DIGITS) if path.isascii() else path
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = _search(self._blind, path)
        seen = _search(self._sighted, path)
        if seen:
            found = sorted([*found, *seen], key=operator.itemgetter(0))
        return tuple([rule for _, rule in found])


def _search(searches: list[Any], path: str) -> list[tuple[int, ParsedRule]]:
    return [
        (at, r) for at, r, text, search in searches if text in path and search(path)
    ]


def required_text(pattern: str) -> str:
    """Returns text that every match of a pattern contains; often all of it, or "".

    Looking for it first is several times faster than the regular expression.
    """
    if set(pattern) & set("|(\\[{"):
        return ""  # alternatives, groups, classes and escapes: no simple answer
    runs = re.findall(r"[\w/ -]+(?![?*\w/ -])|[\w/ -]+(?=[\w/ -][?*])", pattern)
    return max(runs, key=len, default="")


_ZERO_DIGITS = {ord(digit): "0" for digit in "123456789"}


def _is_digit_blind(pattern: str) -> bool:
    r"""Tells whether a pattern surely treats all ASCII digits alike.

    Literal digits, counts, numbered references and escapes by code all contain a
    digit; named references and `\N{...}` are refused by their letters. A range
    between two other characters holds all ASCII digits or none.
    """
    has_digit = any(character.isdigit() for character in pattern)
    return not has_digit and "(?P=" not in pattern and "\\N" not in pattern
