"""Patterns of paths: new names for saved arrays, and values by path."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from meshlayout import _checks
from meshlayout.errors import CheckpointError
from meshlayout.layout_map.report import nearest_paths


T = TypeVar("T")


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
    table = _rename_table(rename)
    names = [_rename(path, table) for path in paths]
    check_used({pattern.pattern: pattern for pattern, _ in table}, paths, "rename")
    if separator != "/":
        names = [name.replace(separator, "/") for name in names]
    if table or separator != "/":
        _check_distinct(paths, names)
    return names


def by_pattern(
    values: Mapping[str, T], paths: Sequence[str], option: str
) -> dict[str, T]:
    """Returns the value of the pattern that matches, for each path that one does.

    Args:
        values: `{pattern: value}`; an exact path wins over patterns.
        paths: The paths.
        option: The option that the patterns belong to, for messages.

    Raises:
        CheckpointError: If a pattern is wrong or matches no path, or two that match
            one path have different values.
    """
    compiled = compile_patterns(option, values)
    check_used(compiled, paths, option)
    by_path: dict[str, T] = {}
    for path in paths:
        if path in values:
            by_path[path] = values[path]
            continue
        matches = [text for text, regex in compiled.items() if regex.search(path)]
        for text in matches:
            if values[text] != values[matches[0]]:
                msg = (
                    f"{path}: the patterns {matches[0]!r} and {text!r} of {option}= "
                    f"say {values[matches[0]]!r} and {values[text]!r}. Make one of "
                    "them narrower."
                )
                raise CheckpointError(msg)
            by_path[path] = values[text]
    return by_path


def permutations(
    transpose: Mapping[str, Sequence[int]] | None, paths: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """Returns the permutation of dims of each array that has one, by its path.

    Args:
        transpose: `{pattern: permutation}`, or None.
        paths: The paths of the arrays.

    Raises:
        CheckpointError: If one is not a permutation, or a pattern matches nothing.
    """
    if transpose is None:
        return {}
    if not isinstance(transpose, Mapping):
        msg = (
            "transpose= maps patterns of paths to permutations of dims, got "
            f"{transpose!r}. Write transpose={{r'kernel$': (1, 0)}}."
        )
        raise CheckpointError(msg)
    for pattern, dims in transpose.items():
        numbers: list[Any] = list(dims) if isinstance(dims, (list, tuple)) else [None]
        is_plain = all(type(number) is int for number in numbers)
        if not is_plain or sorted(numbers) != list(range(len(numbers))):
            msg = (
                f"transpose= gives {pattern!r} the dims {dims!r}, which are not a "
                "permutation. Write (1, 0) to swap the dims of a matrix."
            )
            raise CheckpointError(msg)
    table = {pattern: tuple(dims) for pattern, dims in transpose.items()}
    return by_pattern(table, paths, "transpose")


def compile_patterns(
    option: str, patterns: Iterable[str]
) -> dict[str, re.Pattern[str]]:
    """Returns patterns, compiled, by their text.

    Args:
        option: The option that they belong to, for messages.
        patterns: What the user gave.

    Raises:
        CheckpointError: If one is not a regular expression.
    """
    if isinstance(patterns, (str, bytes)) or not isinstance(patterns, Iterable):
        msg = (
            f"{option}= takes a pattern of paths or several, got "
            f"{_checks.shown(patterns)}."
        )
        raise CheckpointError(msg)
    compiled: dict[str, re.Pattern[str]] = {}
    for text in patterns:
        if not isinstance(text, str):
            msg = (
                f"{option}= takes patterns of paths, got {text!r} of type "
                f"{type(text).__name__}. Write a regular expression as a string."
            )
            raise CheckpointError(msg)
        compiled[text] = _checks.pattern(option, text, error=CheckpointError)
    return compiled


def check_used(
    patterns: Mapping[str, re.Pattern[str]], paths: Sequence[str], option: str
) -> None:
    """Raises if a pattern matches no path.

    Args:
        patterns: The patterns, compiled.
        paths: The paths.
        option: The option that they belong to, for messages.

    Raises:
        CheckpointError: Names the pattern, and paths near it.
    """
    for pattern, regex in patterns.items():
        if pattern not in paths and not any(map(regex.search, paths)):
            near = nearest_paths([pattern], paths)[pattern]
            hint = f" Nearest: {', '.join(near)}." if near else ""
            msg = (
                f"the pattern {pattern!r} of {option}= matches none of the "
                f"{len(paths):,} paths.{hint} Correct it or leave it out."
            )
            raise CheckpointError(msg)


def _rename_table(
    rename: Mapping[str, str] | None,
) -> list[tuple[re.Pattern[str], str]]:
    if rename is None:
        return []
    if not isinstance(rename, Mapping):
        msg = (
            "rename= maps patterns of saved paths to replacements, got "
            f"{rename!r}. Write rename={{r'^encoder/': 'model/encoder/'}}."
        )
        raise CheckpointError(msg)
    compiled = compile_patterns("rename", rename)
    for pattern, replacement in rename.items():
        if not isinstance(replacement, str):
            msg = (
                f"rename= replaces {pattern!r} by {replacement!r}, which is not a "
                "string. To leave arrays out, use partial=True."
            )
            raise CheckpointError(msg)
    return [(compiled[pattern], text) for pattern, text in rename.items()]


def _rename(path: str, table: Sequence[tuple[re.Pattern[str], str]]) -> str:
    renaming: tuple[str, str] | None = None  # the pattern that matched, and the name
    for pattern, replacement in table:
        try:
            name = pattern.sub(replacement, path)
        except (re.error, IndexError) as error:
            msg = (
                f"rename= replaces {pattern.pattern!r} by {replacement!r}, which is "
                f"not a replacement for it: {error}. Groups are written r'\\1'."
            )
            raise CheckpointError(msg) from None
        if name == path:
            continue
        if renaming is not None and renaming[1] != name:
            msg = (
                f"{path}: rename= makes {renaming[1]!r} of it by {renaming[0]!r}, and "
                f"{name!r} by {pattern.pattern!r}. Let one pattern match it."
            )
            raise CheckpointError(msg)
        renaming = (pattern.pattern, name)
    return path if renaming is None else renaming[1]


def _check_distinct(paths: Sequence[str], names: Sequence[str]) -> None:
    path_by_name: dict[str, str] = {}
    for path, name in zip(paths, names, strict=True):
        if name in path_by_name:
            msg = (
                f"the saved arrays {path_by_name[name]!r} and {path!r} both become "
                f"{name!r}. Change rename= so that they differ."
            )
            raise CheckpointError(msg)
        path_by_name[name] = path
