r"""From the layout of every leaf to a few patterns, and to Python.

Models repeat: `blocks/0/query/kernel`, `blocks/1/query/kernel` and so on. Paths that
differ in one key are joined, as `(query|key|value)`, and numbers that do not affect the
layout become `\d+`. Each pattern is a whole path, and matches no leaves added later.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from meshlayout.errors import LayoutMapError
from meshlayout.layout import Layout
from meshlayout.layout_map.report import Resolution
from meshlayout.layout_map.rules import Rule, checked_rule


def rules_of(leaves: Iterable[Resolution]) -> dict[str, Rule]:
    """Returns plain rules for what a map decided about the leaves of a tree."""
    specs: dict[str, Layout | Rule | None] = {}
    for leaf in leaves:
        if leaf.reason.startswith("logical axes"):
            specs[leaf.path] = None  # the leaf sets it itself, also next time
        elif leaf.reason in ("exact path", "pattern", "default", "fsdp", "scalar"):
            note = None if leaf.layout.is_fully_replicated else leaf.note
            specs[leaf.path] = Rule(leaf.layout, note=note)
    return rules_for(specs)


def rules_for(specs: Mapping[str, Layout | Rule | None]) -> dict[str, Rule]:
    """Returns rules that give every leaf of a tree the layout it is listed with.

    Leaves with different notes get different rules; replicated leaves without a note
    get none. No rule matches a leaf that is listed with None.
    """
    rules = {p: checked_rule(x, p) for p, x in specs.items() if x is not None}
    kinds: dict[str, Rule | None] = dict.fromkeys(specs)
    for path, rule in rules.items():
        layout: Any = rule.layout
        if rule.note or layout.memory_kind or not layout.is_fully_replicated:
            kinds[path] = Rule(layout, note=rule.note, is_generated=True)
    generated: dict[str, Rule] = {}
    for kind, whole in _joined(kinds):
        pattern = f"(^|/){whole}$"
        if not _is_of(kind, pattern, kinds):  # a path may be the end of another one
            pattern = f"^{whole}$"
        sends = [rules[path].sends or 0 for path in rules if re.search(pattern, path)]
        generated[pattern] = replace(kind, sends=sum(sends) or None)
    return generated


def _joined(kinds: Mapping[str, Rule | None]) -> list[tuple[Rule, str]]:
    """Joins paths of a kind that differ in one key or number, the last key first."""
    parts = {path: re.findall("[0-9]+|/|[^0-9/]+", path) for path in kinds}
    longest = max(map(len, parts.values()), default=0)
    patterns = [
        (kind, (*map(re.escape, parts[path]), *[""] * (longest - len(parts[path]))))
        for path, kind in kinds.items()
        if kind is not None
    ]
    for place in reversed(range(longest)):
        groups: dict[Any, list[str]] = {}
        for kind, words in patterns:
            around = (kind, words[:place], words[place + 1 :])
            groups.setdefault(around, []).append(words[place])
        patterns = []
        for (kind, before, after), words in groups.items():
            if len(words) > 1:
                any_number = "".join((*before, r"\d+", *after))
                is_number = all(word.isdecimal() for word in words)
                is_any = is_number and _is_of(kind, f"^{any_number}$", kinds)
                words = [r"\d+" if is_any else f"({'|'.join(words)})"]
            patterns.append((kind, (*before, *words, *after)))
    return [(kind, "".join(words)) for kind, words in patterns]


def _is_of(kind: Rule, pattern: str, kinds: Mapping[str, Rule | None]) -> bool:
    """Returns whether a pattern matches leaves of this kind only."""
    return all(kinds[path] == kind for path in kinds if re.search(pattern, path))


def map_text(rules: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Returns the expression that creates a map; a function is a LayoutMapError."""
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
            yield from (f"# {line}" for line in value.note.splitlines())
        is_raw = pattern.isprintable() and '"' not in pattern and pattern[-1] != "\\"
        text = f'r"{pattern}"' if is_raw else repr(pattern)
        yield f"{text}: {_value_text(pattern, value)},"


def _value_text(pattern: str, value: Any) -> str:
    if isinstance(value, Rule):
        text = _value_text(pattern, value.layout)
        options = {"on_uneven": value.on_uneven, "yields": value.yields}
        names = (f", {name}={x!r}" for name, x in options.items() if x is not None)
        options = "".join(names)
        return f"ml.Rule({text}{options})" if options else text
    if not isinstance(value, Layout):
        msg = f"rule {pattern!r} is {value!r}, a function, which cannot be written as a"
        hint = "Pass the model, to_code(model), to write the layouts it chooses."
        raise LayoutMapError(f"{msg} layout. {hint}")
    names = {None: "None", ...: "..."}
    entries = [names.get(e) or json.dumps(e, ensure_ascii=False) for e in value.specs]
    text = f"({', '.join(entries)}{',' * (len(entries) == 1)})"
    kind = value.memory_kind
    return f"ml.Layout({text}, mesh, memory_kind={kind!r})" if kind else text
