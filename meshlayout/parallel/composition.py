"""`compose`: several maps for one model, each on axes of its own.

The parts are asked in turn, for each leaf. The first says what it says; each further
one shards what is left, so that `fsdp` takes another dim of a matrix than
`tensor_parallel`. All patterns of all parts lead to the same rule, which asks them, and
so does the default: the result is a plain map that can be printed, extended and locked.
"""

from dataclasses import dataclass, field
from typing import Any

from meshlayout import _checks
from meshlayout._annotations import DType
from meshlayout.errors import LayoutMapError
from meshlayout.layout import Layout, axes_of
from meshlayout.layout_map import LayoutMap, Rule
from meshlayout.layout_map.optimizer_slots import OPT_STATE
from meshlayout.layout_map.rules import Unused
from meshlayout.parallel.data_parallelism import FsdpRule


def compose(first: LayoutMap, second: LayoutMap, *others: LayoutMap) -> LayoutMap:
    """Returns the map in which each part shards what those before it left.

    On dims that the parts before left whole, or further on the same dim. Notes in
    `explain` say which part decided. Use this for several kinds of parallelism at
    once, as `compose(tensor_parallel(...), fsdp(mesh))`. Activations follow the rules
    whose names match, as in one map.

    Args:
        first: A map.
        second: Another, on other axes of the same mesh.
        *others: More of them.

    Raises:
        LayoutMapError: If a part is not a layout map, has logical axes, or two of
            them are on different meshes or use the same axis.

    Example:
        >>> import numpy as np
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> columns = ml.LayoutMap(mesh, {"up/kernel": (None, "model")})
        >>> layouts = compose(columns, ml.parallel.fsdp(mesh, min_bytes=0))
        >>> params = {"up": {"kernel": np.zeros((64, 256))}, "out": np.zeros((256, 64))}
        >>> print(layouts.resolve(params).to_lock())
        # layouts on Mesh(batch=2, model=4)
        out: f64[256, 64] [batch, unsharded]
        up/kernel: f64[64, 256] [batch, model]
        <BLANKLINE>
    """
    parts = (first, second, *others)
    for part in parts:
        _check_part(part, first)
    owners: dict[str, int] = {}
    for number, part in enumerate(parts, start=1):
        for axis in _axes_used(part):
            if owners.setdefault(axis, number) != number:
                msg = (
                    f"compose: parts {owners[axis]} and {number} both use mesh axis "
                    f"{axis!r}, and an axis shards an array once. Give one of them "
                    f"other axes of {first.mesh!r}."
                )
                raise LayoutMapError(msg)
    # Slots start from their parameter's layout, which all parts together decide.
    slot_rules = {
        pattern: rule
        for part in parts
        for pattern, rule in part.items()
        if pattern.lstrip("^").startswith(OPT_STATE)
    }
    rest = tuple(part.copy() for part in parts)
    for part in rest:
        for pattern in slot_rules.keys() & part.keys():
            del part[pattern]
    rule = Composition(rest)
    return LayoutMap(
        first.mesh,
        {pattern: rule for part in rest for pattern in part} | slot_rules,
        default=rule,
        unused=_strictest(parts),
    )


@dataclass(frozen=True)
class Composition:
    """The rule of `compose`.

    Attributes:
        parts: The maps, in order; nothing changes them.
    """

    parts: tuple[LayoutMap, ...] = field(hash=False)

    def __call__(self, path: str, shape: tuple[int, ...], dtype: DType) -> Rule:
        """Returns the layout of one array, and which parts decided."""
        whole = Layout([None] * len(shape), self.parts[0].mesh)
        return self.extend(path, shape, dtype, whole)

    def extend(
        self, path: str, shape: tuple[int, ...], dtype: DType, layout: Layout
    ) -> Rule:
        """Returns the layout of an array that has one, and which parts decided."""
        reasons: list[str] = []
        for number, part in enumerate(self.parts, start=1):
            decision = part._decide(path, shape, dtype)
            value: Any = _value_of(part, decision.rule)
            if hasattr(value, "extend"):
                rule = value.extend(path, shape, dtype, layout)
                new, why = rule.layout, rule.note
            else:
                new = _merged(layout, decision.layout)
                why = decision.fallback or decision.note
                if _may_replicate(part, decision.rule):
                    new, lost = _fitting(new, layout, shape)
                    why = lost or why
            if new.specs != layout.specs:
                source = f"part {number}, {decision.rule or _name(part)}"
                text = f"{new} by {source}"
                reasons.append(f"{text}: {why}" if why else text)
            elif why:
                reasons.append(why)
            layout = new
        return Rule(layout, note="; ".join(reasons) or None)

    def __repr__(self) -> str:
        return f"Composition({', '.join(map(_name, self.parts))})"


def _merged(layout: Layout, more: Layout) -> Layout:
    """Returns a layout with the axes of another one after its own."""
    pairs = zip(layout.specs, more.specs, strict=True)
    entries = [(*axes_of(before), *axes_of(after)) for before, after in pairs]
    kind = layout.memory_kind or more.memory_kind
    return Layout(entries, layout.mesh, memory_kind=kind)


def _fitting(new: Layout, before: Layout, shape: tuple[int, ...]) -> tuple[Layout, str]:
    """Returns a layout with entries as before where it does not divide, and why."""
    misfits = {misfit.dim: misfit for misfit in new.misfits(shape)}
    reasons = [
        f"dim {dim} left as before: size {misfit.size} does not divide into "
        f"{misfit.num_shards} shards over {', '.join(misfit.axes)}"
        for dim, misfit in misfits.items()
    ]
    kept = [
        before.specs[dim] if dim in misfits else entry
        for dim, entry in enumerate(new.specs)
    ]
    return new.with_specs(kept), "; ".join(reasons)


def _may_replicate(part: LayoutMap, pattern: str | None) -> bool:
    """Returns whether a part leaves dims that do not divide as they are."""
    options = part._arguments()
    value = options["default"] if pattern is None else part[pattern]
    policy = value.on_uneven if isinstance(value, Rule) else None
    return (policy or options["on_uneven"]) == "replicate"


def _strictest(parts: tuple[LayoutMap, ...]) -> Unused:
    """Returns what to do about unused rules; parts without rules do not count."""
    answers: set[Unused] = {part._arguments()["unused"] for part in parts if part}
    if "error" in answers:
        return "error"
    return "ignore" if answers == {"ignore"} else "warn"


def _value_of(part: LayoutMap, pattern: str | None) -> object:
    """Returns the layout or function of a part's rule, or of its default."""
    value = part._arguments()["default"] if pattern is None else part[pattern]
    return value.layout if isinstance(value, Rule) else value


def _name(part: LayoutMap) -> str:
    default = _value_of(part, None)
    rules = f"{len(part)} rule{'s' * (len(part) != 1)}" if part or not default else ""
    return ", ".join(filter(None, [rules, repr(default) if default else ""]))


def _check_part(part: object, first: LayoutMap) -> None:
    if not isinstance(part, LayoutMap):
        msg = (
            "compose takes layout maps, as of fsdp(mesh), and got "
            f"{_checks.shown(part)}. For a mapping of rules, write "
            "LayoutMap(mesh, rules)."
        )
        raise LayoutMapError(msg)
    if part.mesh != first.mesh:
        msg = (
            f"compose: the parts are on different meshes, {first.mesh!r} and "
            f"{part.mesh!r}. Make them on one mesh that has the axes of all."
        )
        raise LayoutMapError(msg)
    if "logical_axes" in part._changed_options():
        msg = (
            "compose: a part has logical_axes, which are read off an array's own "
            "metadata, and a composed rule sees path, shape and dtype alone. Give "
            "patterns, or logical_axes without compose."
        )
        raise LayoutMapError(msg)


def _axes_used(part: LayoutMap) -> set[str]:
    """Returns the mesh axes that a map's rules name; those of functions are unknown."""
    used: set[str] = set()
    for pattern in (*part, None):
        value = _value_of(part, pattern)
        if isinstance(value, Layout):
            used.update(axis for entry in value.specs for axis in axes_of(entry))
        elif isinstance(value, FsdpRule):
            used.update(value.axes)
        elif isinstance(value, Composition):
            used.update(*map(_axes_used, value.parts))
    return used
