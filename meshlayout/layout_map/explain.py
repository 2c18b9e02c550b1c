"""The report on how a layout map lies on a tree."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshlayout import _render
from meshlayout.layout_map.resolution import Resolution, Resolved
from meshlayout.mesh import Mesh


# A replicated leaf is worth a line from this share of the whole tree on.
_LARGE_SHARE = 0.01
_LARGE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Explanation:
    """How a layout map lies on a tree; text by `str` or `print`, HTML in notebooks.

    Attributes:
        mesh: The mesh.
        resolutions: One `Resolution` per array.
        bytes_per_device: Bytes on each device, all leaves together.
        replicated_bytes: Bytes on each device if everything were replicated.
        dead_rules: Patterns that match nothing, with the paths they almost matched.
        shadowed_rules: Patterns that match leaves but decide none, with what wins.
        large_replicated: Paths of large leaves that every device holds whole.
    """

    mesh: Mesh
    resolutions: tuple[Resolution, ...]
    bytes_per_device: int
    replicated_bytes: int
    dead_rules: Mapping[str, tuple[str, ...]]
    shadowed_rules: Mapping[str, tuple[str, ...]]
    large_replicated: tuple[str, ...]

    @property
    def notes(self) -> list[str]:
        """Whatever deserves a second look, one sentence each."""
        return [
            *(
                f"fallback: {r.path}: {r.fallback}"
                for r in self.resolutions
                if r.fallback
            ),
            *(f"note: {r.path}: {r.note}" for r in self.resolutions if r.note),
            *(
                f"dead rule: {pattern!r} matches nothing."
                + (f" Nearest: {', '.join(near)}." if near else "")
                for pattern, near in self.dead_rules.items()
            ),
            *(
                f"shadowed rule: {pattern!r} decides nothing; "
                f"where it matches, {', '.join(winners)} wins."
                for pattern, winners in self.shadowed_rules.items()
            ),
            *(f"large and replicated: {path}" for path in self.large_replicated),
        ]

    def __str__(self) -> str:
        parts = [
            repr(self.mesh),
            _render.text_table(_HEADERS, self._rows(), align=_ALIGN),
            self._total(),
            *self.notes,
        ]
        return "\n".join(parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _render.html_table(
            _HEADERS,
            self._rows(),
            align=_ALIGN,
            caption=repr(self.mesh),
            notes=[self._total(), *self.notes],
        )

    def _rows(self) -> list[list[str]]:
        return [
            [
                found.path or "(the array)",
                found.array,
                str(found.layout),
                found.rule or f"({found.reason})",
                _render.bytes_text(found.bytes_per_device),
                _saving(found.bytes_per_device, found.nbytes),
            ]
            for found in self.resolutions
        ]

    def _total(self) -> str:
        here = _render.bytes_text(self.bytes_per_device)
        whole = _render.bytes_text(self.replicated_bytes)
        saving = _saving(self.bytes_per_device, self.replicated_bytes)
        return (
            f"{len(self.resolutions)} arrays, {here} on each of {self.mesh.size} "
            f"devices; replicated it would be {whole} (saving {saving})."
        )


_HEADERS = ["path", "array", "layout", "rule", "bytes/device", "saving"]
_ALIGN = "llllrr"


def _saving(here: int, whole: int) -> str:
    return f"{100 * (1 - here / whole):.0f}%" if whole else "0%"


def explain(
    mesh: Mesh, resolved: Resolved, matching: Mapping[str, Sequence[str]]
) -> Explanation:
    """Makes the report.

    Args:
        mesh: The map's mesh.
        resolved: What was decided.
        matching: For each pattern of the map, the paths that it matches.
    """
    used = {found.rule for found in resolved.resolutions}
    deciding = {
        found.path: found.rule or f"({found.reason})" for found in resolved.resolutions
    }
    paths = list(deciding)
    dead = {
        pattern: nearest_paths(pattern, paths)
        for pattern, matched in matching.items()
        if not matched and pattern not in used
    }
    shadowed = {
        pattern: tuple(sorted({deciding[path] for path in matched}))
        for pattern, matched in matching.items()
        if matched and pattern not in used
    }
    large = max(_LARGE_BYTES, _LARGE_SHARE * resolved.nbytes)
    return Explanation(
        mesh,
        resolved.resolutions,
        resolved.bytes_per_device,
        resolved.nbytes,
        dead,
        shadowed,
        tuple(
            found.path
            for found in resolved.resolutions
            if mesh.size > 1
            and found.nbytes >= large
            and found.layout.is_fully_replicated
        ),
    )


def nearest_paths(pattern: str, paths: Sequence[str]) -> tuple[str, ...]:
    """Returns up to three paths that a pattern almost matched.

    The pattern's letters are compared with every path, with its digits folded, and
    with every run of the path's last keys.
    """
    letters = re.sub(r"\\[a-zA-Z]|[^\w/]+", "/", pattern).strip("/").lower()
    folded: dict[str, str] = {}
    for path in paths:
        folded.setdefault(re.sub(r"\d+", "0", path), path)
    tails: dict[str, str] = {}
    for path in list(folded.values())[:5000]:
        keys = path.split("/")
        for start in range(len(keys)):
            tails.setdefault("/".join(keys[start:]).lower(), path)
    near = difflib.get_close_matches(letters, list(tails), n=9, cutoff=0.5)
    return tuple(dict.fromkeys(tails[tail] for tail in near))[:3]
