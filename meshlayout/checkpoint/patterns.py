"""Patterns of paths: new names for what was saved, and values by path."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshlayout.errors import CheckpointError
from meshlayout.layout_map.explain import nearest_paths


def renamed(
    paths: Sequence[str], rename: Mapping[str, str] | None, separator: str = "/"
) -> list[str]:
    r"""Returns saved paths under their new names, with `/` between the keys.

    Args:
        paths: The paths as they were saved.
        rename: As for `match`.
        separator: As for `match`.

    Raises:
        CheckpointError: As `match`.

    Example:
        >>> renamed(["h.0.w", "h.1.w"], {r"h\.(\d+)": r"layers/\1"}, ".")
        ['layers/0/w', 'layers/1/w']
    """
    table = _table(rename)
    names = [_rename(path, table) for path in paths]
    patterns = {pattern.pattern: pattern for pattern, _ in table}
    check_used(patterns, paths, "rename")
    if separator != "/":
        names = [name.replace(separator, "/") for name in names]
    if table or separator != "/":
        _check_distinct(paths, names)
    return names


def by_pattern(
    patterns: Mapping[str, Any], paths: Sequence[str], option: str
) -> dict[str, Any]:
    """Returns the value of the pattern that matches, for each path that one does.

    Args:
        patterns: `{pattern: value}`; an exact path wins over patterns.
        paths: The paths.
        option: The option that the patterns are of, for messages.

    Raises:
        CheckpointError: If a pattern is wrong or matches no path, or two that match
            one path have different values.
    """
    compiled = compile_patterns(option, patterns)
    check_used(compiled, paths, option)
    found: dict[str, Any] = {}
    for path in paths:
        if path in patterns:
            found[path] = patterns[path]
            continue
        fitting = [one for one, regex in compiled.items() if regex.search(path)]
        for one in fitting:
            if patterns[one] != patterns[fitting[0]]:
                msg = (
                    f"{path}: the patterns {fitting[0]!r} and {one!r} of {option}= "
                    f"say {patterns[fitting[0]]!r} and {patterns[one]!r}. Make one of "
                    "them narrower."
                )
                raise CheckpointError(msg)
            found[path] = patterns[one]
    return found


def _table(rename: Any) -> list[tuple[re.Pattern[str], str]]:
    if rename is None:
        return []
    if not isinstance(rename, Mapping):
        msg = (
            "rename= maps patterns of saved paths to replacements, and got "
            f"{rename!r}. Write rename={{r'^encoder/': 'model/encoder/'}}."
        )
        raise CheckpointError(msg)
    compiled = compile_patterns("rename", rename)
    for pattern, new in rename.items():
        if not isinstance(new, str):
            msg = (
                f"rename= replaces {pattern!r} by {new!r}, which is no text. To leave "
                "arrays out, use partial=True."
            )
            raise CheckpointError(msg)
    return [(compiled[pattern], new) for pattern, new in rename.items()]


def _rename(path: str, table: list[tuple[re.Pattern[str], str]]) -> str:
    found: tuple[str, str] | None = None
    for pattern, replacement in table:
        try:
            new = pattern.sub(replacement, path)
        except (re.error, IndexError) as error:
            msg = (
                f"rename= replaces {pattern.pattern!r} by {replacement!r}, which is "
                f"not a replacement for it: {error}. Groups are written r'\\1'."
            )
            raise CheckpointError(msg) from None
        if new == path:
            continue
        if found is not None and found[1] != new:
            msg = (
                f"{path}: rename= makes {found[1]!r} of it by {found[0]!r}, and "
                f"{new!r} by {pattern.pattern!r}. Let one pattern match it."
            )
            raise CheckpointError(msg)
        found = (pattern.pattern, new)
    return path if found is None else found[1]


def _check_distinct(paths: Sequence[str], names: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for path, name in zip(paths, names, strict=True):
        if name in seen:
            msg = (
                f"the saved arrays {seen[name]!r} and {path!r} both become {name!r}. "
                "Change rename= so that they differ."
            )
            raise CheckpointError(msg)
        seen[name] = path


def compile_patterns(option: str, given: Iterable[Any]) -> dict[str, re.Pattern[str]]:
    """Returns patterns, compiled, by their text.

    Args:
        option: The option that they are of, for messages.
        given: What the user gave.

    Raises:
        CheckpointError: If one is no regular expression.
    """
    compiled: dict[str, re.Pattern[str]] = {}
    for pattern in given:
        if not isinstance(pattern, str):
            msg = (
                f"{option}= takes patterns of paths, and got {pattern!r} of type "
                f"{type(pattern).__name__}. Write a regular expression as text."
            )
            raise CheckpointError(msg)
        try:
            compiled[pattern] = re.compile(pattern)
        except re.error as error:
            msg = (
                f"{option}= holds {pattern!r}, which is no regular expression: {error}."
            )
            raise CheckpointError(msg) from None
    return compiled


def check_used(
    patterns: Mapping[str, re.Pattern[str]], paths: Sequence[str], option: str
) -> None:
    """Raises if a pattern matches no path.

    Args:
        patterns: The patterns, compiled.
        paths: The paths.
        option: The option that they are of, for messages.

    Raises:
        CheckpointError: Names the pattern, and paths near it.
    """
    for pattern, regex in patterns.items():
        if pattern not in paths and not any(map(regex.search, paths)):
            near = nearest_paths(pattern, paths)
            hint = f" Nearest: {', '.join(near)}." if near else ""
            msg = (
                f"the pattern {pattern!r} of {option}= matches none of the "
                f"{len(paths):,} paths.{hint} Correct it or leave it out."
            )
            raise CheckpointError(msg)
