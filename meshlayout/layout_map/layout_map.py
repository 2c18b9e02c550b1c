"""`LayoutMap`: a mapping from patterns to layouts, and how it is resolved.

`rules` parses rules as they are inserted, `resolver` decides about each leaf,
`optimizer_slots` finds the parameter of each slot, and `report` shows the result.
"""

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, get_args

import jax
from jax.typing import DTypeLike

from meshlayout import _checks, _jax, _paths
from meshlayout._annotations import Leaf, PyTree
from meshlayout.errors import (
    LayoutMapError,
    LayoutMapKeyError,
    LayoutWarning,
    did_you_mean,
    warn,
)
from meshlayout.layout import Layout
from meshlayout.layout_map.code import map_text, rules_of
from meshlayout.layout_map.metadata import AxisRule, parse_axis_rules
from meshlayout.layout_map.optimizer_slots import find_slots, state_indices
from meshlayout.layout_map.report import (
    Explanation,
    Resolution,
    Resolved,
    folded,
    grouped,
    nearest_paths,
)
from meshlayout.layout_map.resolver import Options, Resolver
from meshlayout.layout_map.rules import (
    Conflict,
    LayoutFunction,
    OnUneven,
    ParsedRule,
    Rule,
    RuleLike,
    Unmatched,
    Unused,
    parse_rule,
)
from meshlayout.mesh import Mesh, auto_mesh


@_checks.user_call
class LayoutMap(
    _checks.WithReflexes, MutableMapping[str, "Layout | LayoutFunction | Rule"]
):
    r"""Maps patterns on paths to layouts, for a whole tree of parameters.

    A pattern is a regular expression that is searched for anywhere in a path
    (`re.search`). A pattern that equals the path of a leaf wins; otherwise, two
    patterns that give a leaf different layouts are an error. A map places nothing by
    itself: pass it to `create` or `scope`. A malformed rule is a LayoutMapError.

    Args:
        mesh: The mesh of all layouts.
        rules: A mapping, or pairs, of pattern and layout: a `Layout`, a tuple or
            list with one entry per dim (`...` for any number of unsharded dims), a
            `PartitionSpec`, a `NamedSharding`, a function
            `(path, shape, dtype) -> spec or None`, or a `Rule`.
        default: The layout of leaves that no pattern matches and whose metadata names
            no known axis. If None, they are replicated.
        conflict: `"error"`, or `"first"` if the first of several matching rules wins.
        unmatched: `"replicate"` (or the default), or `"error"`, except for scalars.
        on_uneven: `"error"` where a dim does not divide into its shards, or
            `"replicate"` to leave it unsharded. A `Rule` can have its own policy.
        unused: What `create` and `scope` do about a rule that matches no path, and
            steps about one for no activation: `"warn"`, `"error"` or `"ignore"`.
        logical_axes: Mesh axes (or None) by logical axis name, for leaves with Flax's
            partitioning metadata that no pattern matches: a mapping, or pairs in order
            of preference, of which the next applies if an axis is taken.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> layouts = ml.LayoutMap(mesh, {r"(query|key)/kernel": (..., "model")})
        >>> layouts[r"embed/embedding"] = ("model", None)
        >>> shapes = {"embed": {"embedding": jax.ShapeDtypeStruct((64, 8), "float32")}}
        >>> layouts.resolve(shapes)["embed/embedding"].layout
        Layout([model, unsharded], Mesh(batch=2, model=4))
    """

    def __init__(
        self,
        mesh: Mesh | jax.sharding.Mesh,
        rules: "Mapping[str, RuleLike] | Iterable[tuple[str, RuleLike]]" = (),
        *,
        default: "RuleLike | None" = None,
        conflict: Conflict = "error",
        unmatched: Unmatched = "replicate",
        on_uneven: OnUneven = "error",
        unused: Unused = "warn",
        logical_axes: "Mapping[str, Any] | Iterable[AxisRule] | None" = None,
    ) -> None:
        mesh = auto_mesh(mesh)
        where = _checks.Context(where="LayoutMap", error=LayoutMapError)
        self._options = Options(
            mesh,
            None if default is None else parse_rule("default", default, mesh),
            _checks.choice("conflict", conflict, get_args(Conflict), **where),
            _checks.choice("unmatched", unmatched, get_args(Unmatched), **where),
            _checks.choice("on_uneven", on_uneven, get_args(OnUneven), **where),
            _checks.choice("unused", unused, get_args(Unused), **where),
            parse_axis_rules(logical_axes, mesh),
        )
        parsed = self._options.default
        if parsed is not None and parsed.function is None and unmatched == "error":
            raise LayoutMapError("give default= or unmatched='error', not both.")
        self._rules: dict[str, ParsedRule] = {}
        self._snapshot: FrozenMap | None = None
        self.update(cast("Any", rules))

    @property
    def mesh(self) -> Mesh:
        """The mesh of all layouts."""
        return self._options.mesh

    def __getitem__(self, pattern: str) -> "Layout | LayoutFunction | Rule":
        """Returns the rule of a pattern; LayoutMapKeyError if there is none."""
        if pattern in self._rules:
            return self._rules[pattern].value()
        near = did_you_mean(pattern, self._rules)
        msg = f"no rule has the pattern {pattern!r}.{near} To find the layout of a path"
        raise LayoutMapKeyError(f"{msg}, use match(path, shape, dtype).")

    @_checks.user_call
    def __setitem__(self, pattern: str, value: "RuleLike") -> None:
        """Inserts a rule; LayoutMapError if it is malformed or there already."""
        rule = parse_rule(pattern, value, self.mesh)
        # Of two equal patterns in a program, one is usually a mistake. `|` replaces.
        if pattern in self._rules:
            msg = f"the map already has the pattern {pattern!r}, with {self[pattern]!r}"
            raise LayoutMapError(f"{msg}. Delete it first to change it.")
        self._rules[pattern] = rule
        self._snapshot = None

    def __delitem__(self, pattern: str) -> None:
        """Removes a rule; raises LayoutMapKeyError if no rule has this pattern."""
        _ = self[pattern]
        del self._rules[pattern]
        self._snapshot = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayoutMap):
            return NotImplemented
        return self._arguments() == other._arguments()

    __hash__ = None  # mutable

    def __or__(self, rules: "Mapping[str, RuleLike]") -> "LayoutMap":
        """Returns a map with more rules, which replace those of equal patterns.

        Your own rules win over those that a function of `meshlayout.parallel` made.
        """
        if not isinstance(rules, Mapping):
            return NotImplemented
        return LayoutMap(**{**self._arguments(), "rules": {**self, **rules}})

    def __repr__(self) -> str:
        rules = ", ".join(f"{p!r}: {_value_text(v)}" for p, v in self.items())
        changed = self._changed_options().items()
        options = "".join(f", {name}={_value_text(value)}" for name, value in changed)
        return f"LayoutMap({self.mesh!r}, {{{rules}}}{options})"

    def match(
        self, path: str, shape: Iterable[int], dtype: DTypeLike
    ) -> Resolution | None:
        """Resolves a leaf or activation by rules alone; None if no rule matches."""
        return self._resolver().by_rules(path, tuple(shape), dtype)

    def resolve(self, tree: PyTree, *, params: PyTree = None) -> Resolved:
        """Returns the layout of every leaf, and the reason for it.

        Use this to see or test layouts before anything is created. Rules that disagree,
        layouts that do not fit and leaves that `unmatched` refuses are LayoutMapErrors.

        Args:
            tree: An NNX module or state, Linen variables, an Optax state, or any
                pytree; leaves may be abstract. Layouts of a module are an `nnx.State`.
            params: The parameters, if the tree is an optimizer state without them. A
                slot takes the layout of the parameter whose path ends its own, unless a
                rule matches slots and no parameter.
        """
        if hasattr(tree, "resolve_layouts"):  # a TrainState knows its parameters
            return tree.resolve_layouts(self)
        resolver = self._resolver()
        if params is not None:
            owners = [resolver.leaf(leaf) for leaf in _paths.flatten(params).leaves]
            return self._resolve_slots(tree, params, owners)
        flat = _paths.flatten(tree)
        inside = state_indices(tree)
        if len(inside) in (0, len(flat.leaves)):  # a state alone is laid out by rules
            return _resolved(flat, [resolver.leaf(leaf) for leaf in flat.leaves])
        # Parameters first, as the slots take their layouts.
        params = [leaf for i, leaf in enumerate(flat.leaves) if i not in inside]
        state = [flat.leaves[i] for i in sorted(inside)]
        owners = [resolver.leaf(leaf) for leaf in params]
        slots = iter(resolver.slots(state, find_slots(state, params), owners))
        owner = iter(owners)
        indices = range(len(flat.leaves))
        return _resolved(flat, [next(slots if i in inside else owner) for i in indices])

    def explain(self, tree: PyTree, *, params: PyTree = None) -> Explanation:
        """Returns a report on how this map applies to a tree; print or display it.

        It lists every leaf with its layout, rule and bytes per device, and names the
        rules that match nothing. Arguments and errors are those of `resolve`.
        """
        return self._explain_resolved(self.resolve(tree, params=params))

    def to_code(self, tree: PyTree = None) -> str:
        r"""Returns this map as Python, with a pattern for each kind of leaf.

        Use this to keep or edit the result of a ready-made rule. Notes become comments.
        Functions need the tree: patterns for its leaves take their place.

        Examples:
            >>> import meshlayout as ml
            >>> import numpy as np
            >>> mesh = ml.create_mesh({"batch": 8})
            >>> layouts = ml.LayoutMap(mesh, default=ml.zero_rule(mesh, min_size=64))
            >>> params = [{"kernel": np.ones((8, 16)), "bias": np.ones(16)}] * 2
            >>> print(layouts.to_code(params))
            ml.LayoutMap(
                mesh,
                {
                    r"(^|/)\d+/kernel$": (None, "batch"),
                },
            )
        """
        options, default = self._changed_options(), self._options.default
        # Written out, no rule is generated: those that win come first.
        parsed = sorted(self._rules.values(), key=lambda x: x.rule.is_generated)
        if tree is None or not any(x and x.function for x in (*parsed, default)):
            if len({x.rule.is_generated for x in parsed}) == 2:
                options["conflict"] = "first"
            return map_text({x.pattern: x.value() for x in parsed}, options)
        for name in ("default", "unmatched"):
            options.pop(name, None)
        leaves = self.resolve(tree).resolutions
        rules: dict[str, Any] = {**rules_of(leaves)}
        # Resolved again, as leaves' own metadata might now win.
        again = LayoutMap(self.mesh, rules, **options).resolve(tree)
        for before, after in zip(leaves, again.resolutions, strict=True):
            if before.layout != after.layout:
                rules[f"^{re.escape(before.path)}$"] = before.layout
        for rule in self._rules.values():  # such as those for activations
            if not rule.function and not any(rule.regex.search(x.path) for x in leaves):
                rules[rule.pattern] = rule.value()
        return map_text(rules, options)

    def _resolve_slots(
        self, opt_state: PyTree, params: PyTree, owners: Sequence[Resolution | None]
    ) -> Resolved:
        flat = _paths.flatten(opt_state)
        slots = find_slots(flat.leaves, _paths.flatten(params).leaves)
        return _resolved(flat, self._resolver().slots(flat.leaves, slots, owners))

    def _explain_resolved(self, resolved: Resolved) -> Explanation:
        leaves, matching = resolved.resolutions, self._resolver().matching
        # A slot has the rule of its parameter, whose path the pattern need not match.
        used = {leaf.rule for leaf in leaves}
        winners = {pattern: set[str]() for pattern in self if pattern not in used}
        for leaf in leaves if winners else ():
            for pattern in winners.keys() & {x.pattern for x in matching(leaf.path)}:
                winners[pattern].add(leaf.rule or f"({leaf.reason})")
        one_of_each = {folded(leaf.path): leaf.path for leaf in reversed(leaves)}
        dead, paths = [x for x in winners if not winners[x]], one_of_each.values()
        near = {pattern: nearest_paths(pattern, paths) for pattern in dead}
        axes = dict(self._options.logical_axes or ())
        names = {name for leaf in leaves for name in leaf.axes}
        # A table may hold names of other models, and plain arrays have lost theirs.
        is_plain = any(leaf.placed for leaf in leaves) and not names
        if not is_plain and (not names or names - {*axes, *self.mesh.axis_names}):
            for axis in axes.keys() - names:
                closest = difflib.get_close_matches(axis, names, cutoff=0)
                near[f"logical_axes[{axis!r}]"] = tuple(closest)
        return Explanation(
            resolved.layouts,
            leaves,
            self.mesh,
            near,
            {p: tuple(sorted(others)) for p, others in winners.items() if others},
            {p: x.rule.sends for p, x in self._rules.items() if x.rule.sends},
        )

    def _check_used(self, resolved: Resolved) -> None:
        """Warns or raises, as `unused` says, about rules and axis names without use."""
        wrong = ((x.path, x.note) for x in resolved.resolutions if x.wrong_axes)
        names = [*grouped("axis names", wrong)]
        lines = [*self._explain_resolved(resolved).dead_lines(), *names]
        hint = "Correct it. One for activations applies in a step that gets the map"
        hint += " as layouts=; give that map unused='ignore' here."
        if names:
            hint = "Correct them, or give logical_axes={'mlp': 'model', 'embed': None}."
        if lines:
            self._report_unused("\n".join([*lines, hint]))

    def _report_unused(self, text: str) -> None:
        """Warns or raises, as `unused` says, with a text on unused rules."""
        if self._options.unused == "error":
            raise LayoutMapError(text)
        if self._options.unused == "warn":
            warn(text, LayoutWarning)

    def _take_snapshot(self) -> "FrozenMap":
        if self._snapshot is None:
            self._snapshot = FrozenMap(self | {})
        return self._snapshot

    def _resolver(self) -> Resolver:
        return Resolver(self._options, self._rules.values())

    def _arguments(self) -> dict[str, Any]:
        """Returns the constructor's arguments for an equal map."""
        default = self._options.default and self._options.default.value()
        return {**vars(self._options), "rules": [*self.items()], "default": default}

    def _changed_options(self) -> dict[str, Any]:
        defaults, arguments = vars(Options(self.mesh)), self._arguments()
        return {k: arguments[k] for k in defaults if arguments[k] != defaults[k]}


def _resolved(flat: _paths.Flat, resolutions: list[Resolution | None]) -> Resolved:
    layouts = flat.unflatten([leaf and leaf.layout for leaf in resolutions])
    return Resolved(layouts, tuple([leaf for leaf in resolutions if leaf]))


def _value_text(value: Any) -> str:
    if isinstance(value, Rule) and value.is_generated:
        value = value.layout
    return str(value) if isinstance(value, Layout) else repr(value)


# Activations. A model calls `constrain` by name, and whoever traces it activates a map.
# A snapshot of that is part of the keys of JAX's compilation caches.

_active_map = jax.make_user_context(None)


@dataclass(eq=False)
class FrozenMap:
    """A snapshot of a layout map, hashed by identity for JAX's compilation caches."""

    layouts: LayoutMap
    names: set[str] = field(default_factory=set)  # that `constrain` was called with
    is_reported: bool = False  # whether a step has warned of unused rules


def activate(layouts: LayoutMap) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager in which `constrain` follows these layouts."""
    return _active_map(layouts._take_snapshot())


@contextlib.contextmanager
def applied(layouts: LayoutMap, paths: Iterable[str]) -> Iterator[None]:
    """Activates a step's layouts; warns of rules for neither activations nor paths."""
    with activate(layouts):
        yield
    snapshot = layouts._take_snapshot()
    names = snapshot.names
    ends = {*names, *(x[m.end() :] for x in paths for m in re.finditer("^|/", x))}
    rules = [x for x in layouts._rules.values() if not x.rule.is_generated]
    unused = [x.pattern for x in rules if not any(map(x.regex.search, ends))]
    if unused and not snapshot.is_reported:
        text = f"rule {unused[0]!r} matches no name that constrain was called with."
        layouts._report_unused(text + did_you_mean(unused[0], names))
        snapshot.is_reported = True


def active_map() -> LayoutMap | None:
    """Returns the layout map of the innermost open scope; None outside of scopes."""
    return _active_map.value and _active_map.value.layouts


@_checks.user_call
def constrain(x: Leaf, name: str) -> Any:
    """Returns an activation in the layout that the active layout map gives it.

    Inside `with ml.scope(layouts):` (or a step compiled with `layouts=`), the rules of
    the map are matched against `name` as against the path of a parameter, such as
    `"encoder/residual"`. If no map is active, or no rule matches, the value is returned
    unchanged. Rules that disagree and layouts that do not fit are LayoutMapErrors.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> layouts = ml.LayoutMap(mesh, {"hidden": ("batch", "model")})
        >>> with ml.scope(layouts):
        ...     h = jax.jit(lambda x: ml.constrain(x, "hidden"))(jax.numpy.ones((4, 8)))
        >>> str(ml.Layout.of(h))
        '[batch, model]'
    """
    if not isinstance(name, str):
        fact = f"takes the name of an activation, got {_checks.shown(name)}"
        hint = "For a layout, write ml.relayout(x, layout)."
        raise LayoutMapError(f"constrain(x, name) {fact}. {hint}")
    snapshot = _active_map.value
    if snapshot is None:
        return x
    snapshot.names.add(name)
    x = jax.numpy.asarray(x)
    resolution = snapshot.layouts.match(name, x.shape, x.dtype)
    if resolution is None:
        return x
    where = f"{name} {resolution.array}"
    if resolution.fallback:
        line = f"{where}: {resolution.fallback} (rule {resolution.rule!r})."
        warn(line, LayoutWarning)
    if _jax.is_manual(x):
        msg = f"{where}: inside shard_map every device works on its own shard, which "
        raise LayoutMapError(f"{msg}constrain cannot move. Call it outside shard_map.")
    if not _jax.is_staged(x):
        return _jax.put(x, resolution.layout.sharding)
    yields = getattr(snapshot.layouts.get(resolution.rule), "yields", None)
    return _jax.constrain(x, resolution.layout.sharding, yields=yields)
