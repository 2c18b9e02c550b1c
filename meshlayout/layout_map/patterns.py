r"""From the layout of every leaf to the few patterns that a person would have written.

Models repeat: `blocks/0/query/kernel`, `blocks/1/query/kernel` and so on. Their digits
become `\d+` where all of them are laid out alike; each group of leaves then takes the
shortest end of its path, such as `query/kernel`, that no leaf of another layout holds,
and ends that differ only at the front are joined as `(query|key|value)/kernel`. Every
pattern is tried on the whole tree, with `re.search`, before it is taken: so none
matches by accident, and no two rules disagree.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from meshlayout.layout import Layout
from meshlayout.layout_map.rules import Rule


def rules_for(specs: Mapping[str, Layout | Rule]) -> dict[str, Layout | Rule]:
    r"""Returns rules that give every leaf of a tree the layout it is listed with.

    Use this to write down layouts that were computed leaf by leaf. In a `LayoutMap`
    these rules resolve the tree to the same layouts, also with `conflict="error"`.
    Replicated leaves have no rule, unless they have a note.

    Args:
        specs: The layout of every leaf of the tree by path, also of the replicated
            ones, with one entry per dim; or a `Rule` with such a layout and a note.
            Leaves with different notes have different rules.

    Returns:
        Layouts by pattern, in the order of the first leaf that each is for; a `Rule`
        where there is a note. Leaves of several ranks have a layout with `...`.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> columns, rows = ml.Layout([None, "model"], mesh), ml.Layout([None], mesh)
        >>> paths = ["blocks/0/query", "blocks/0/key", "blocks/1/query", "blocks/1/key"]
        >>> rules_for(
        ...     {**{f"{path}/kernel": columns for path in paths}, "out/bias": rows}
        ... )
        {'kernel': Layout([unsharded, model], Mesh(batch=2, model=4))}
    """
    kinds = _with_open_ranks(_kinds(specs))
    leaves = _LeafPatterns(kinds)
    ends: dict[_Kind, list[_End]] = {}
    for kind, keys in _repeats(kinds):
        if kind.layout is not None:
            ends.setdefault(kind, []).append(_shortest_end(kind, keys, leaves))
    rules: dict[str, Layout | Rule] = {}
    for kind, of_kind in ends.items():
        for pattern in _joined(of_kind):
            # Without `...` where one layout will do.
            values = {_layout_of(specs[path]) for path in leaves.matching(pattern)}
            layout = values.pop() if len(values) == 1 else kind.layout
            assert layout is not None
            rules[pattern] = Rule(layout, note=kind.note) if kind.note else layout
    return rules


class _Kind(NamedTuple):
    """What the leaves that may share a rule have in common.

    Attributes:
        layout: Their layout, with `...` if their ranks differ; None for replicated
            leaves, which need no rule.
        note: The note of their rule.
    """

    layout: Layout | None
    note: str | None


class _End(NamedTuple):
    """A pattern in two parts.

    Attributes:
        head: The keys before the last one, with their slash and anchor; may be empty.
        last: The last key, with its anchor.
    """

    head: str
    last: str


def _kinds(specs: Mapping[str, Layout | Rule]) -> dict[str, _Kind]:
    """Returns the kind of every leaf by path."""
    kinds: dict[str, _Kind] = {}
    for path, value in specs.items():
        note = value.note if isinstance(value, Rule) else None
        layout = _layout_of(value)
        is_plain = layout.is_fully_replicated and layout.memory_kind is None
        kinds[path] = _Kind(None if is_plain and not note else layout, note)
    return kinds


def _layout_of(value: Layout | Rule) -> Layout:
    layout = value.layout if isinstance(value, Rule) else value
    assert isinstance(layout, Layout)
    return layout


def _with_open_ranks(kinds: dict[str, _Kind]) -> dict[str, _Kind]:
    """Writes layouts that differ only in unsharded dims at one end with `...`.

    As `(..., "model")` for dense and convolution kernels alike.
    """
    families: dict[_Kind, set[_Kind]] = {}
    for kind in dict.fromkeys(kinds.values()):
        for family in _families(kind):
            families.setdefault(family, set()).add(kind)
    opened: dict[_Kind, _Kind] = {}
    # The largest families first; of equals, those that come first.
    for family, members in sorted(families.items(), key=lambda item: -len(item[1])):
        members = members - set(opened)
        if len(members) > 1:
            opened.update(dict.fromkeys(members, family))
    return {path: opened.get(kind, kind) for path, kind in kinds.items()}


def _families(kind: _Kind) -> list[_Kind]:
    """Returns the forms with `...` of a layout, first the one that keeps its end."""
    if kind.layout is None:
        return []
    specs = list(kind.layout.specs)
    tail = list(itertools.dropwhile(lambda entry: entry is None, specs))
    front = list(itertools.dropwhile(lambda entry: entry is None, specs[::-1]))[::-1]
    forms = [[..., *tail], [*front, ...]] if tail else [[...]]
    return [kind._replace(layout=kind.layout.with_specs(form)) for form in forms]


# Paths that differ by digits.


def _repeats(kinds: Mapping[str, _Kind]) -> list[tuple[_Kind, list[str]]]:
    """Returns expressions for each key of the path, for all groups of like leaves."""
    groups: dict[str, dict[tuple[str, ...], _Kind]] = {}
    for path, kind in kinds.items():
        groups.setdefault(_folded(path), {})[tuple(_DIGITS.findall(path))] = kind
    repeats: list[tuple[_Kind, list[str]]] = []
    for folded, by_numbers in groups.items():
        pieces = [re.escape(piece) for piece in folded.split(_FOLDED)]
        for kind, numbers in _numbers(by_numbers):
            texts = zip(pieces, [*numbers, ""], strict=True)
            repeats.append((kind, "".join(map("".join, texts)).split("/")))
    return repeats


def _numbers(
    by_numbers: dict[tuple[str, ...], _Kind],
) -> list[tuple[_Kind, list[str]]]:
    r"""Returns what to write for the numbers of paths that are alike without them.

    A number that makes no difference is `\d+`, one that is always the same is itself,
    and those that tell layouts apart are listed.
    """
    columns = [set(column) for column in zip(*by_numbers, strict=True)]
    varied = [index for index, column in enumerate(columns) if len(column) > 1]
    for count in range(len(varied) + 1):
        for told in itertools.combinations(varied, count):
            groups: dict[tuple[str, ...], set[_Kind]] = {}
            for numbers, kind in by_numbers.items():
                key = tuple(numbers[index] for index in told)
                groups.setdefault(key, set()).add(kind)
            if all(len(group) == 1 for group in groups.values()):
                pairs = [(group.pop(), key) for key, group in groups.items()]
                return _listed(pairs, told, columns)
    raise AssertionError  # with every number written out, each path is its own group


def _listed(
    pairs: Iterable[tuple[_Kind, tuple[str, ...]]],
    told: Sequence[int],
    columns: Sequence[set[str]],
) -> list[tuple[_Kind, list[str]]]:
    blank = [r"\d+" if len(column) > 1 else min(column) for column in columns]
    if len(told) == 1:  # one list per kind, as (0|2|4)
        by_kind: dict[_Kind, list[str]] = {}
        for kind, (number,) in pairs:
            by_kind.setdefault(kind, []).append(number)
        pairs = [(kind, (_either(numbers),)) for kind, numbers in by_kind.items()]
    listed: list[tuple[_Kind, list[str]]] = []
    for kind, numbers in pairs:
        written = dict(zip(told, numbers, strict=True))
        listed.append(
            (kind, [written.get(index, text) for index, text in enumerate(blank)])
        )
    return listed


_DIGITS = re.compile("[0-9]+")
_FOLDED = "0"


def _folded(path: str) -> str:
    return _DIGITS.sub(_FOLDED, path)


# Ends of paths.


class _LeafPatterns:
    """All leaves of a tree, to try patterns on."""

    def __init__(self, kinds: Mapping[str, _Kind]) -> None:
        self._kinds = kinds
        self._leaves = list(kinds.items())
        # A pattern without literal digits cannot tell these from the others.
        firsts = {(_folded(path), kind): path for path, kind in self._leaves}
        self._firsts = [(path, kind) for (_, kind), path in firsts.items()]
        self._known: dict[tuple[_Kind, str], bool] = {}

    def is_only(self, kind: _Kind, pattern: str) -> bool:
        """Returns whether a pattern matches leaves of one kind and no others."""
        if (kind, pattern) not in self._known:
            search = re.compile(pattern).search
            has_digits = _DIGITS.search(pattern) is not None
            leaves = self._leaves if has_digits else self._firsts
            # A pattern that is a path letter for letter is a rule for that path.
            self._known[kind, pattern] = self._kinds.get(pattern, kind) == kind and all(
                other == kind or search(path) is None for path, other in leaves
            )
        return self._known[kind, pattern]

    def matching(self, pattern: str) -> list[str]:
        """Returns the paths that a pattern matches."""
        search = re.compile(pattern).search
        return [path for path, _ in self._leaves if search(path)]


def _shortest_end(kind: _Kind, keys: list[str], leaves: _LeafPatterns) -> _End:
    """Returns the shortest end of a path that only leaves of its kind have."""
    whole = "/".join(keys)
    if not whole:
        return _End("", "^$")
    *before, last = keys
    heads = ["".join(f"{key}/" for key in before[n:]) for n in range(len(keys))][::-1]
    anchored = [f"/{head}" for head in heads[:-1]] + [f"^{heads[-1]}"]
    for tail in ("", "$"):
        for head in (*heads, *anchored):
            if head + last + tail and leaves.is_only(kind, head + last + tail):
                return _End(head, last + tail)
    return _End(anchored[-1], last + r"\Z")  # `$` matches before a line's end, too


def _joined(ends: Iterable[_End]) -> list[str]:
    """Joins ends that have their last key, or all keys before it, in common."""
    by_last: dict[str, list[str]] = {}
    for head, last in dict.fromkeys(ends):
        by_last.setdefault(last, []).append(head)
    by_heads: dict[frozenset[str], list[str]] = {}
    for last, heads in by_last.items():
        by_heads.setdefault(frozenset(heads), []).append(last)
    patterns: list[str] = []
    for lasts in by_heads.values():
        heads = by_last[lasts[0]]
        if all(head.endswith("/") for head in heads):
            head = _either([head.removesuffix("/") for head in heads]) + "/"
        else:
            head = _either(heads)
        patterns.append(head + _either(lasts))
    return patterns


def _either(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"({'|'.join(texts)})"
