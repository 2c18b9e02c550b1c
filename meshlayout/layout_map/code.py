r"""From the layout of every leaf to a few patterns, and to Python.

Models repeat: `blocks/0/query/kernel`, `blocks/1/query/kernel` and so on. A number that
tells no layouts apart becomes `\d+`, others are listed; and patterns that differ in one
key are joined, as `(query|key|value)`. Each is a whole path, so that a leaf which the
model gets later is not taken for one of these.
"""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from meshlayout.errors import LayoutMapError
from meshlayout.layout import Layout, axes_of
from meshlayout.layout_map.rules import Rule, checked_rule


class _Kind(NamedTuple):
    """What leaves that share a rule have in common; no layout if replicated."""

    layout: Layout | None
    note: str | None


_NUMBER = re.compile("([0-9]+)")


def rules_for(specs: Mapping[str, Layout | Rule]) -> dict[str, Rule]:
    r"""Returns rules that give every leaf of a tree the layout it is listed with.

    Use this to write down layouts that were computed leaf by leaf. In a `LayoutMap`
    these rules resolve the tree to the same layouts, and own rules win over them.
    Replicated leaves have no rule, unless they have a note.

    Args:
        specs: The layout of every leaf of the tree by path, also of the replicated
            ones, with one entry per dim; or a `Rule` with such a layout and a note.
            Leaves with different notes have different rules.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> columns, rows = ml.Layout([None, "model"], mesh), ml.Layout([None], mesh)
        >>> paths = ["blocks/0/query", "blocks/0/key", "blocks/1/query", "blocks/1/key"]
        >>> [*rules_for({**dict.fromkeys(paths, columns), "out/bias": rows})]
        ['(^|/)blocks/\\d+/(query|key)$']
    """
    kinds: dict[str, _Kind] = {}
    sends: dict[str, int] = {}
    for path, value in specs.items():
        rule = checked_rule(value, path)
        layout: Any = rule.layout
        is_plain = layout.is_fully_replicated and layout.memory_kind is None
        needs_rule = not is_plain or rule.note
        kinds[path] = _Kind(layout if needs_rule else None, rule.note)
        sends[path] = rule.sends or 0
    rules: dict[str, Rule] = {}
    for kind, keys in _joined(_repeats(kinds)):
        if kind.layout is None:
            continue
        whole = "/".join(keys)
        # A path may be the end of another one.
        for pattern in (f"(^|/){whole}$", f"^{whole}$"):
            found = [path for path in kinds if re.search(pattern, path)]
            if all(kinds[path] == kind for path in found):
                break
        sent = sum(sends[path] for path in found) or None
        options = {"note": kind.note, "sends": sent, "is_generated": True}
        rules[pattern] = Rule(kind.layout, **options)
    return rules


def _repeats(kinds: Mapping[str, _Kind]) -> list[tuple[_Kind, tuple[str, ...]]]:
    """Returns patterns, as keys, for all paths of each kind, numbers folded."""
    by_fold: dict[tuple[str, ...], dict[tuple[str, ...], _Kind]] = {}
    for path, kind in kinds.items():
        texts = _NUMBER.split(path)
        by_fold.setdefault(tuple(texts[::2]), {})[tuple(texts[1::2])] = kind
    found: list[tuple[_Kind, tuple[str, ...]]] = []
    for texts, by_numbers in by_fold.items():
        for kind, numbers in _numbers(by_numbers):
            pairs = zip(map(re.escape, texts), (*numbers, ""), strict=True)
            found.append((kind, tuple("".join(map("".join, pairs)).split("/"))))
    return found


def _numbers(
    by_numbers: dict[tuple[str, ...], _Kind],
) -> list[tuple[_Kind, tuple[str, ...]]]:
    """Returns what to write for the numbers of paths that are alike without them."""
    columns = [dict.fromkeys(column) for column in zip(*by_numbers, strict=True)]
    blank = [r"\d+" if len(column) > 1 else next(iter(column)) for column in columns]
    varied = [index for index, column in enumerate(columns) if len(column) > 1]
    for count in range(len(varied) + 1):  # as few as tell the kinds apart
        for told in itertools.combinations(varied, count):
            groups: dict[tuple[str, ...], set[_Kind]] = {}
            for numbers, kind in by_numbers.items():
                key = tuple(numbers[index] for index in told)
                groups.setdefault(key, set()).add(kind)
            if all(len(group) == 1 for group in groups.values()):
                found: dict[tuple[_Kind, tuple[str, ...]], list[str]] = {}
                for key, (kind,) in groups.items():
                    found.setdefault((kind, key[:-1]), []).extend(key[-1:])
                return [
                    (kind, _filled(blank, told, (*key, *_either(last))))
                    for (kind, key), last in found.items()
                ]
    raise AssertionError  # with every number written out, each path is its own group


def _filled(
    blank: Sequence[str], told: Sequence[int], numbers: Sequence[str]
) -> tuple[str, ...]:
    written = dict(zip(told, numbers, strict=True))
    return tuple(written.get(index, text) for index, text in enumerate(blank))


def _joined(
    patterns: list[tuple[_Kind, tuple[str, ...]]],
) -> list[tuple[_Kind, tuple[str, ...]]]:
    """Joins patterns of one kind that differ in one key, the last ones first."""
    for place in range(1, 1 + max((len(keys) for _, keys in patterns), default=0)):
        groups: dict[Any, list[str]] = {}
        for kind, keys in patterns:
            before, after = keys[:-place], keys[len(keys) - place + 1 :]
            if len(keys) < place:
                groups[kind, keys, None] = []
            else:
                groups.setdefault((kind, before, after), []).append(keys[-place])
        patterns = [
            (kind, before if after is None else (*before, *_either(middle), *after))
            for (kind, before, after), middle in groups.items()
        ]
    return patterns


def _either(texts: Sequence[str]) -> list[str]:
    return [f"({'|'.join(texts)})"] if len(texts) > 1 else [*texts]


# Python.


def map_text(rules: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Returns the expression that creates a map, its rules one per line.

    Args:
        rules: The values by pattern; no functions.
        options: The arguments besides mesh and rules that are not their defaults.

    Raises:
        LayoutMapError: If a rule is a function.
    """
    lines = ["ml.LayoutMap(", "    mesh,"]
    if rules:
        lines += ["    {", *(f"        {x}" for x in _rule_lines(rules)), "    },"]
    for name, value in options.items():
        text = _value_text(name, value) if name == "default" else repr(value)
        lines.append(f"    {name}={text},")
    return "\n".join([*lines, ")"])


def _rule_lines(rules: Mapping[str, Any]) -> Iterable[str]:
    for pattern, value in rules.items():
        if isinstance(value, Rule) and value.note:
            for line in value.note.splitlines():
                yield f"# {line}"
        is_raw = pattern.isprintable() and '"' not in pattern and pattern[-1] != "\\"
        text = f'r"{pattern}"' if is_raw else repr(pattern)
        yield f"{text}: {_value_text(pattern, value)},"


def _value_text(pattern: str, value: Any) -> str:
    if isinstance(value, Rule):
        text = _value_text(pattern, value.layout)
        policy = value.on_uneven
        return f"ml.Rule({text}, on_uneven={policy!r})" if policy else text
    if not isinstance(value, Layout):
        msg = (
            f"rule {pattern!r} is {value!r}, a function, which cannot be written as a "
            "layout. Pass the model, to_code(model), to write what it decides for it."
        )
        raise LayoutMapError(msg)
    entries = ["..." if e is ... else _axes_text(axes_of(e)) for e in value.specs]
    if value.memory_kind is None:
        return _tuple_text(entries)
    kind = f"memory_kind={value.memory_kind!r}"
    return f"ml.Layout({_tuple_text(entries)}, mesh, {kind})"


def _axes_text(axes: tuple[str, ...]) -> str:
    names = [json.dumps(axis, ensure_ascii=False) for axis in axes]
    return names[0] if len(names) == 1 else _tuple_text(names) if names else "None"


def _tuple_text(entries: list[str]) -> str:
    return f"({', '.join(entries)}{',' * (len(entries) == 1)})"
