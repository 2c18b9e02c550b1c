"""`compose`: several maps for one model, each on axes of its own.

The parts are asked in turn, for each leaf. The first says what it says; each further
one shards what is left, so that `fsdp` takes another dim of a matrix than
`tensor_parallel`. All patterns of all parts lead to the same rule, which asks them, and
so does the default: the result is a plain map that can be printed, extended and locked.
"""

from dataclasses import dataclass, field

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
    once, as `compose(tensor_parallel(...), fsdp(mesh))`. A leaf that no part names is
    an error if a part has `unmatched="error"`; rules for `^opt_state/` stay as they
    are. Activations follow the rules whose names match, as in one map.

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
    slots = {
        pattern: rule
        for part in parts
        for pattern, rule in part.items()
        if pattern.lstrip("^").startswith(OPT_STATE)
    }
    copies = tuple(part.copy() for part in parts)
    for part in copies:
        for pattern in slots.keys() & part.keys():
            del part[pattern]
    everything = Composition(copies)
    rules = {
        pattern: Rule(everything, sends=_rule(part, pattern).sends, is_generated=True)
        for part in copies
        for pattern in part
    }
    modes = {part._options.unused for part in parts if part}
    unused: Unused = "error" if "error" in modes else "warn"
    strict = any(part._options.unmatched == "error" for part in parts)
    return LayoutMap(
        first.mesh,
        rules | slots,
        default=everything,
        unmatched="error" if strict else "replicate",
        unused="ignore" if modes == {"ignore"} else unused,
    )


@dataclass(frozen=True)
class Composition:
    """The rule of `compose`.

    Attributes:
        parts: The maps, in order; nothing changes them.
    """

    parts: tuple[LayoutMap, ...] = field(hash=False)

    def __call__(self, path: str, shape: tuple[int, ...], dtype: DType) -> Rule | None:
        """Returns the layout of one array, and which parts decided."""
        whole = Layout([None] * len(shape), self.parts[0].mesh)
        return self.extend(path, shape, dtype, whole)

    def extend(
        self, path: str, shape: tuple[int, ...], dtype: DType, layout: Layout
    ) -> Rule | None:
        """Returns the layout of an array that has one; None if no part names it."""
        reasons: list[str] = []
        is_named = False
        for number, part in enumerate(self.parts, start=1):
            decision = part._resolver().opinion(path, shape, dtype, layout)
            if decision is None:
                continue
            is_named = True
            rule = _rule(part, decision.rule)
            new, why = decision.layout, decision.fallback or decision.note
            if not hasattr(rule.layout, "extend"):
                new = _merged(layout, new)
                if (rule.on_uneven or part._options.on_uneven) == "replicate":
                    new, lost = _fitting(new, layout, shape)
                    why = lost or why
            if new.specs != layout.specs:
                text = f"{new} by part {number}, {decision.rule or _name(part)}"
                reasons.append(f"{text}: {why}" if why else text)
            elif why:
                reasons.append(why)
            layout = new
        return Rule(layout, note="; ".join(reasons) or None) if is_named else None

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
    specs, reasons = list(new.specs), list[str]()
    for x in new.misfits(shape):
        specs[x.dim] = before.specs[x.dim]
        reasons.append(
            f"dim {x.dim} left as before: size {x.size} does not divide into "
            f"{x.num_shards} shards over {', '.join(x.axes)}"
        )
    return new.with_specs(specs), "; ".join(reasons)


def _rule(part: LayoutMap, pattern: str | None) -> Rule:
    """Returns a part's rule for a pattern, or its default."""
    parsed = part._options.default if pattern is None else part._rules[pattern]
    return Rule(()) if parsed is None else parsed.rule


def _name(part: LayoutMap) -> str:
    default = _rule(part, None).layout
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
    if part._options.logical_axes is not None:
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
        value = _rule(part, pattern).layout
        if isinstance(value, Layout):
            used.update(axis for entry in value.specs for axis in axes_of(entry))
        elif isinstance(value, FsdpRule):
            used.update(value.axes)
        elif isinstance(value, Composition):
            used.update(*map(_axes_used, value.parts))
    return used
