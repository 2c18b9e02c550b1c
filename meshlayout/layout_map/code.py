"""A layout map as the Python that a person would have written for it."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from meshlayout.errors import LayoutMapError
from meshlayout.layout import Layout, axes_of
from meshlayout.layout_map.patterns import rules_for
from meshlayout.layout_map.report import Resolution, Resolved
from meshlayout.layout_map.rules import Rule


# How `Resolution.reason` begins where the leaf's layout comes from elsewhere, and will
# again, from its parameter.
_FROM_ELSEWHERE = ("follows", "belongs to")


def tree_rules(resolved: Resolved) -> dict[str, Layout | Rule]:
    """Returns rules for what a map decided about the leaves of a tree.

    Args:
        resolved: The tree's layouts.
    """
    return rules_for(
        {
            leaf.path: Rule(leaf.layout, note=leaf.note)
            if _has_note(leaf)
            else leaf.layout
            for leaf in resolved.resolutions
            if not leaf.reason.startswith(_FROM_ELSEWHERE)
        }
    )


def _has_note(leaf: Resolution) -> bool:
    # Most leaves that stay replicated are small; each with a rule would hide the rest.
    return bool(leaf.note) and not leaf.layout.is_fully_replicated


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
        lines += ["    {", *_indented(_rule_lines(rules)), "    },"]
    for name, value in options.items():
        text = _value_text(name, value) if name == "default" else repr(value)
        lines.append(f"    {name}={text},")
    return "\n".join([*lines, ")"])


def _rule_lines(rules: Mapping[str, Any]) -> Iterable[str]:
    for pattern, value in rules.items():
        if isinstance(value, Rule) and value.note:
            for line in value.note.splitlines():
                yield f"# {line}"
        yield f"{_pattern_text(pattern)}: {_value_text(pattern, value)},"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"        {line}" for line in lines]


def _pattern_text(pattern: str) -> str:
    is_raw = pattern.isprintable() and '"' not in pattern and pattern[-1] != "\\"
    return f'r"{pattern}"' if is_raw else repr(pattern)


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
    if value.memory_kind is None:
        return _specs_text(value)
    return f"ml.Layout({_specs_text(value)}, mesh, memory_kind={value.memory_kind!r})"


def _specs_text(layout: Layout) -> str:
    entries = [
        "..." if entry is ... else _axes_text(axes_of(entry)) for entry in layout.specs
    ]
    return _tuple_text(entries)


def _axes_text(axes: tuple[str, ...]) -> str:
    names = [json.dumps(axis, ensure_ascii=False) for axis in axes]
    return names[0] if len(names) == 1 else _tuple_text(names) if names else "None"


def _tuple_text(entries: list[str]) -> str:
    return f"({', '.join(entries)}{',' * (len(entries) == 1)})"
