"""`compose`: several maps for one model, each on axes of its own.

All patterns lead to one rule that asks the parts in turn: the result is a plain map.
"""

from dataclasses import dataclass, field

from meshlayout import _checks
from meshlayout._annotations import DType
from meshlayout.errors import LayoutMapError
from meshlayout.layout import Layout, axes_of
from meshlayout.layout_map import LayoutMap, Rule
from meshlayout.layout_map.optimizer_slots import OPT_STATE
from meshlayout.layout_map.rules import OnUneven, Unused


def compose(first: LayoutMap, second: LayoutMap, *others: LayoutMap) -> LayoutMap:
    """Returns a map in which each part shards what the parts before it left whole.

    Each part shards other dims than the parts before it, or the same dim further. Use
    this for several kinds of parallelism at once, such as
    `compose(tensor_parallel(...), fsdp(mesh))`. A leaf that no part matches is an error
    if a part has `unmatched="error"`. Rules for `^opt_state/` are kept unchanged.

    Args:
        first: A map.
        second: Another, on other axes of the same mesh.
        *others: More maps.

    Raises:
        LayoutMapError: If a part is not a layout map, has logical axes, or is on
            another mesh; if two parts shard one leaf over the same axis, on `resolve`.

    Examples:
        >>> import numpy as np
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> columns = ml.LayoutMap(mesh, {"up/kernel": (None, "model")})
        >>> layouts = compose(columns, ml.parallel.fsdp(mesh, min_bytes=0))
        >>> params = {"up": {"kernel": np.zeros((64, 256))}, "out": np.zeros((256, 64))}
        >>> layouts.resolve(params)["up/kernel"].layout
        Layout([batch, model], Mesh(batch=2, model=4))
    """
    parts = (first, second, *others)
    for part in parts:
        problem = ""
        if not isinstance(part, LayoutMap):
            problem = f"got {_checks.shown(part)}: write LayoutMap(mesh, rules)"
        elif part.mesh != first.mesh:
            problem = f"got maps on {first.mesh!r} and on {part.mesh!r}"
        elif part._options.logical_axes is not None:
            problem = "got one with logical_axes, which a composed rule does not see"
        if problem:
            msg = f"compose takes layout maps on one mesh, of patterns; {problem}."
            raise LayoutMapError(msg)
    # Slots start from their parameter's layout, which all parts together decide.
    slots = {
        pattern: rule
        for part in parts
        for pattern, rule in part.items()
        if pattern.lstrip("^").startswith(OPT_STATE)
    }
    everything = Composition(tuple(part | {} for part in parts))
    rules = {
        pattern: Rule(everything, sends=x.sends, is_generated=True, yields=x.yields)
        for part in parts
        for pattern, x in ((name, _rule(part, name)) for name in part)
    }
    modes = {part._options.unused for part in parts if part}
    unused: Unused = "error" if "error" in modes else "warn"
    unmatched = {part._options.unmatched for part in parts}
    return LayoutMap(
        first.mesh,
        rules | slots,
        default=everything,
        unmatched="error" if "error" in unmatched else "replicate",
        unused="ignore" if modes == {"ignore"} else unused,
    )


@dataclass(frozen=True)
class Composition:
    """The rule of `compose`."""

    parts: tuple[LayoutMap, ...] = field(hash=False)  # in order; nothing changes them

    def __call__(self, path: str, shape: tuple[int, ...], dtype: DType) -> Rule | None:
        """Returns the layout of one array, and which parts decided."""
        whole = Layout.replicated(self.parts[0].mesh, len(shape))
        return self.extend(path, shape, dtype, whole)

    def extend(
        self, path: str, shape: tuple[int, ...], dtype: DType, layout: Layout
    ) -> Rule | None:
        """Returns the layout of an array that has one; None if no part names it."""
        reasons: list[str] = []
        policies: set[OnUneven] = set()
        is_named = False
        for number, part in enumerate(self.parts, start=1):
            decision = part._resolver().opinion(path, shape, dtype, layout)
            if decision is None:
                continue
            is_named = True
            rule = _rule(part, decision.rule)
            new, why = decision.layout, decision.fallback or decision.note
            if not hasattr(rule.layout, "extend"):
                pairs = zip(layout.specs, new.specs, strict=True)
                entries = [(*axes_of(old), *axes_of(more)) for old, more in pairs]
                kind = layout.memory_kind or new.memory_kind
                new = Layout(entries, layout.mesh, memory_kind=kind)
                policies.add(rule.on_uneven or part._options.on_uneven)
            if new.specs != layout.specs:
                text = f"{new} by part {number}, {decision.rule or repr(rule.layout)}"
                why = f"{text}: {why}" if why else text
            reasons += [why] if why else []
            layout = new
        policy: OnUneven | None = "replicate" if "replicate" in policies else None
        return Rule(layout, policy, "; ".join(reasons) or None) if is_named else None


def _rule(part: LayoutMap, pattern: str | None) -> Rule:
    """Returns a part's rule for a pattern, or its default."""
    parsed = part._options.default if pattern is None else part._rules[pattern]
    return Rule(()) if parsed is None else parsed.rule
