"""Rules: a pattern on paths, and the layout of the leaves that it matches."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _checks
from meshlayout._specs import SpecLike
from meshlayout.errors import LayoutError, LayoutMapError
from meshlayout.layout import MATCH, Layout
from meshlayout.mesh import Mesh


OnUneven: TypeAlias = Literal["error", "replicate"]
Conflict: TypeAlias = Literal["error", "first"]
Unused: TypeAlias = Literal["warn", "error", "ignore"]
Unmatched: TypeAlias = Literal["replicate", "error"]

LayoutLike: TypeAlias = Layout | NamedSharding | SpecLike
"""What a rule may give: a layout on the map's mesh, or a spec."""

LayoutFunction: TypeAlias = Callable[[str, tuple[int, ...], Any], LayoutLike | None]
"""`(path, shape, dtype) -> spec`, or None where the function has no opinion."""

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
    """

    layout: LayoutLike | LayoutFunction
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

    def value(self) -> "Layout | LayoutFunction | Rule":
        """Returns what the user may assign to get this rule again."""
        value = self.function if self.layout is None else self.layout
        assert value is not None
        return Rule(value, self.on_uneven) if self.on_uneven else value


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
        msg = f"a pattern is text, not a compiled one: write {regex.pattern!r}."
        raise LayoutMapError(msg)
    on_uneven = None
    if isinstance(value, Rule):
        if value.on_uneven is not None:
            on_uneven = _checks.choice(
                "on_uneven",
                value.on_uneven,
                get_args(OnUneven),
                where=f"rule {pattern!r}",
                error=LayoutMapError,
            )
        value = value.layout
    where = f"rule {pattern!r}"
    try:
        if callable(value) and not isinstance(value, (Layout, NamedSharding)):
            args = ("path", "shape", "dtype")
            function: Any = _checks.function(
                "function", value, *args, where=where, error=LayoutMapError
            )
            return ParsedRule(pattern, regex, None, function, on_uneven)
        return ParsedRule(pattern, regex, parse_spec(value, mesh), None, on_uneven)
    except LayoutError as error:
        raise LayoutMapError(f"{where}: {error}") from None


def parse_spec(value: Any, mesh: Mesh) -> Layout:
    """Returns the layout that a rule specifies, on the map's mesh.

    A `PartitionSpec` or `NamedSharding` means the same as in JAX: dims that it leaves
    out are unsharded. A list or tuple has one entry per dim, or a `...`.

    Raises:
        LayoutError: If it is not a layout on this mesh.
    """
    if isinstance(value, (Layout, NamedSharding)):
        layout = Layout.of(value)
        if layout.mesh != mesh:
            msg = (
                f"{layout!r} is on another mesh than the map's {mesh!r}. Give the spec "
                f"alone, or a layout on the map's mesh."
            )
            raise LayoutError(msg)
        if isinstance(value, NamedSharding):
            layout = layout.with_specs((*layout.specs, ...))
    elif isinstance(value, PartitionSpec):
        layout = Layout((*Layout(value, mesh).specs, ...), mesh)
    elif isinstance(value, (list, tuple)):
        layout = Layout(value, mesh)
    else:
        msg = (
            "expected a Layout, a tuple or list with one entry per dim, a "
            "PartitionSpec, or a function (path, shape, dtype) -> spec, and got "
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

    Models repeat: `layers/0/kernel`, `layers/1/kernel`. A pattern that cannot tell one
    digit from another has the same answer for all of them, so its answer is cached
    under the path with every digit replaced by 0. Patterns that might tell them apart
    are tried on every path, unless their text, with its digits replaced too, does not
    occur in that.
    """

    def __init__(self, rules: Iterable[ParsedRule]) -> None:
        rules = tuple(rules)
        self.has_rules = bool(rules)
        self._by_pattern = {rule.pattern: (rule,) for rule in rules}
        self._index = {rule: index for index, rule in enumerate(rules)}
        searches: list[_Search] = [
            (rule, required_text(rule.pattern), rule.regex.search) for rule in rules
        ]
        self._blind = [entry for entry in searches if _is_digit_blind(entry[0].pattern)]
        self._sighted = [entry for entry in searches if entry not in self._blind]
        self._memo: dict[str, tuple[tuple[ParsedRule, ...], list[_Search]]] = {}

    def candidates(self, path: str) -> tuple[ParsedRule, ...]:
        """Returns the rule whose pattern is the path, or else all that match it."""
        exact = self._by_pattern.get(path)
        if exact is not None:
            return exact
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
    """Returns text that every match of a pattern contains; often all of it, or "".

    Looking for it first is several times faster than the regular expression.
    """
    if set(pattern) & set("|(\\[{"):
        return ""  # alternatives, groups, classes and escapes: no simple answer
    runs = re.findall(r"[\w/ -]+(?![?*\w/ -])|[\w/ -]+(?=[\w/ -][?*])", pattern)
    return max(runs, key=len, default="")


_ZERO_DIGITS = {ord(digit): "0" for digit in "123456789"}


def _is_digit_blind(pattern: str) -> bool:
    r"""Returns whether a pattern certainly treats all ASCII digits alike.

    Literal digits, counts, numbered references and escapes by code all contain a
    digit; named references and `\N{...}` are refused by their letters. A range
    between two other characters holds all ASCII digits or none.
    """
    has_digit = any(character.isdigit() for character in pattern)
    return not has_digit and "(?P=" not in pattern and "\\N" not in pattern
