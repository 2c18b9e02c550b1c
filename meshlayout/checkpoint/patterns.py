"""Patterns of paths: new names for saved arrays, and values by path.

They follow the rules of layout maps: regular expressions for `re.search`, an exact path
wins, and a pattern that matches nothing is an error, since it is nearly always a typo.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from meshlayout import _checks
from meshlayout.errors import CheckpointError
from meshlayout.layout_map.report import nearest_paths


T = TypeVar("T")


class PathPatterns:
    """The regular expressions of an option, each of which must match a path.

    Args:
        option: The option, for messages.
        patterns: The user's patterns.
        paths: All paths.

    Attributes:
        regexes: The compiled patterns, by their text.

    Raises:
        CheckpointError: If one is not a regular expression, or matches no path.
    """

    def __init__(
        self, option: str, patterns: Iterable[str], paths: Sequence[str]
    ) -> None:
        if isinstance(patterns, (str, bytes)) or not isinstance(patterns, Iterable):
            msg = (
                f"{option}= must be one or several patterns of paths, got "
                f"{_checks.shown(patterns)}."
            )
            raise CheckpointError(msg)
        self.regexes = {
            pattern: _checks.pattern(option, pattern, error=CheckpointError)
            for pattern in patterns
        }
        for pattern, regex in self.regexes.items():
            if pattern in paths or any(map(regex.search, paths)):
                continue
            near = nearest_paths([regex.pattern], paths)[regex.pattern]
            hint = f" Nearest: {', '.join(near)}." if near else ""
            msg = (
                f"the pattern {regex.pattern!r} of {option}= matches none of the "
                f"{len(paths):,} paths.{hint} Correct it or remove it."
            )
            raise CheckpointError(msg)

    def matching(self, path: str) -> list[str]:
        """Returns the patterns that match a path; one that equals it wins alone."""
        if path in self.regexes:
            return [path]
        return [text for text, regex in self.regexes.items() if regex.search(path)]


def by_pattern(
    values: Mapping[str, T], paths: Sequence[str], option: str
) -> dict[str, T]:
    """Returns the value of the matching pattern for each path that one matches.

    Raises:
        CheckpointError: As `PathPatterns`, or if two patterns with different values
            match one path.
    """
    patterns = PathPatterns(option, values, paths)
    by_path: dict[str, T] = {}
    for path in paths:
        matching = patterns.matching(path)
        for text in matching:
            by_path[path] = values[matching[0]]
            if values[text] != by_path[path]:
                msg = (
                    f"{path}: the patterns {matching[0]!r} and {text!r} of {option}= "
                    f"give {by_path[path]!r} and {values[text]!r}. Make one of them "
                    "narrower."
                )
                raise CheckpointError(msg)
    return by_path


def permutations(
    transpose: Mapping[str, Sequence[int]] | None, paths: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """Returns the permutation of dims for each array that has one, by its path.

    Raises:
        CheckpointError: As `by_pattern`, or if a value is not a permutation.
    """
    if transpose is None:
        return {}
    if not isinstance(transpose, Mapping):
        msg = (
            "transpose= must map patterns of paths to permutations of dims, got "
            f"{_checks.shown(transpose)}. Write transpose={{r'kernel$': (1, 0)}}."
        )
        raise CheckpointError(msg)
    for pattern, dims in transpose.items():
        is_plain = isinstance(dims, (list, tuple)) and {*map(type, dims)} <= {int}
        if not is_plain or sorted(dims) != list(range(len(dims))):
            msg = (
                f"transpose= gives {pattern!r} the dims {dims!r}, which are not a "
                "permutation. Write (1, 0) to swap the dims of a matrix."
            )
            raise CheckpointError(msg)
    table = {pattern: tuple(dims) for pattern, dims in transpose.items()}
    return by_pattern(table, paths, "transpose")


def renamed(
    paths: Sequence[str],
    rename: Mapping[str, str] | None,
    separator: str = "/",
    new_separator: str = "/",
) -> list[str]:
    r"""Returns paths under their new names.

    Args:
        paths: The paths.
        rename: `{pattern: replacement}`, applied as by `re.sub`. Only one pattern may
            change a path.
        separator: The separator between the keys of a path, after renaming.
        new_separator: The separator that replaces it.

    Raises:
        CheckpointError: As `PathPatterns`, or if a replacement does not fit its
            pattern, two patterns disagree, or two paths get the same name.

    Example:
        >>> renamed(["h.0.w", "h.1.w"], {r"h\.(\d+)": r"layers/\1"}, ".")
        ['layers/0/w', 'layers/1/w']
    """
    if rename is None and separator == new_separator:
        return list(paths)
    if rename is not None and not isinstance(rename, Mapping):
        msg = (
            "rename= must map patterns of saved paths to replacements, got "
            f"{_checks.shown(rename)}. Write rename={{r'^encoder/': 'model/encoder/'}}."
        )
        raise CheckpointError(msg)
    patterns = PathPatterns("rename", rename or {}, paths)
    for pattern, replacement in (rename or {}).items():
        if not isinstance(replacement, str):
            msg = (
                f"rename= replaces {pattern!r} by {replacement!r}, which is not a "
                "string. To leave arrays out, use partial=True."
            )
            raise CheckpointError(msg)
    table = [(patterns.regexes[key], text) for key, text in (rename or {}).items()]
    path_by_name: dict[str, str] = {}
    for path in paths:
        name = _new_name(path, table).replace(separator, new_separator)
        if path_by_name.setdefault(name, path) != path:
            msg = (
                f"the saved arrays {path_by_name[name]!r} and {path!r} both become "
                f"{name!r}. Change rename= so that they differ."
            )
            raise CheckpointError(msg)
    return list(path_by_name)


def _new_name(path: str, table: Sequence[tuple[re.Pattern[str], str]]) -> str:
    names: dict[str, str] = {}  # by pattern
    for regex, replacement in table:
        try:
            name = regex.sub(replacement, path)
        except (re.error, IndexError) as error:
            msg = (
                f"rename= replaces {regex.pattern!r} by {replacement!r}, which does "
                f"not fit the pattern: {error}. Groups are written r'\\1'."
            )
            raise CheckpointError(msg) from None
        if name != path:
            names[regex.pattern] = name
    (first, name), *others = names.items() or [("", path)]
    for pattern, other in others:
        if other != name:
            msg = (
                f"{path}: rename= gives it the name {name!r} by {first!r}, and "
                f"{other!r} by {pattern!r}. Let only one pattern match it."
            )
            raise CheckpointError(msg)
    return name
