"""`LayoutMap`: a mapping from patterns to layouts, and how it is resolved."""

from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from meshlayout import _paths, _render
from meshlayout.errors import (
    LayoutError,
    LayoutMapError,
    LayoutMapKeyError,
    did_you_mean,
)
from meshlayout.layout import Layout
from meshlayout.layout_map.activations import Snapshot
from meshlayout.layout_map.explain import Explanation, explain
from meshlayout.layout_map.follow import Slot, find_slots, slot_layout
from meshlayout.layout_map.metadata import (
    axis_rules,
    logical_axes,
    logical_layout,
    own_layout_metadata,
)
from meshlayout.layout_map.resolution import Resolution, Resolved
from meshlayout.layout_map.rules import (
    Conflict,
    Matcher,
    OnUneven,
    ParsedRule,
    RuleLike,
    Unmatched,
    check_option,
    parse_rule,
    parse_spec,
)
from meshlayout.mesh import Mesh, as_mesh


@runtime_checkable
class Resolvable(Protocol):
    """A state that knows which of its parts follow which; see `TrainState`."""

    def resolve_layouts(self, layouts: "LayoutMap") -> Resolved:
        """Returns the layouts of all its arrays."""
        ...


class LayoutMap(MutableMapping[str, Any]):
    r"""Maps patterns on paths to layouts, for a whole tree of parameters.

    A pattern is a regular expression, found anywhere in a path (`re.search`). A
    pattern that is a leaf's path letter for letter wins; otherwise two patterns that
    match a leaf and give different layouts are an error. Patterns and layouts are
    checked when they are inserted; nothing is placed by a map alone.

    Args:
        mesh: The mesh of all its layouts.
        rules: A mapping, or pairs, of pattern and layout: a `Layout`, a tuple or
            list with one entry per dim (`...` for any number of unsharded dims), a
            `PartitionSpec`, a `NamedSharding`, a function
            `(path, shape, dtype) -> spec or None`, or a `Rule`.
        default: The layout of leaves that nothing matches; replicated if None.
        conflict: `"error"`, or `"first"` for rules whose order decides.
        unmatched: `"replicate"` (as `default` says), or `"error"`. Scalars cannot
            be sharded and are never an error.
        on_uneven: What to do with a dim that does not divide into its shards:
            `"error"`, or `"replicate"` to leave that dim unsharded. Recorded in the
            resolution's `fallback`. A `Rule` can say otherwise for itself.
        logical_axes: Mesh axes (or None) by logical axis name, for leaves with
            Flax's partitioning metadata that no pattern matches.

    Raises:
        LayoutMapError: If a rule is malformed, as its insertion would.

    Example:
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
        logical_axes: Mapping[str, Any] | None = None,
    ) -> None:
        self._mesh = as_mesh(mesh)
        self._conflict = check_option("conflict", conflict, Conflict)
        self._unmatched = check_option("unmatched", unmatched, Unmatched)
        self._on_uneven = check_option("on_uneven", on_uneven, OnUneven)
        self._logical_axes = _check_logical(logical_axes, self._mesh)
        self._default = (
            None if default is None else parse_rule("default", default, self._mesh)
        )
        if default is not None and unmatched == "error":
            msg = "default= is never used with unmatched='error'; give one of them."
            raise LayoutMapError(msg)
        self._rules: dict[str, ParsedRule] = {}
        self._snapshot: Snapshot | None = None
        for pattern, value in _pairs(rules):
            self[pattern] = value

    @property
    def mesh(self) -> Mesh:
        """The mesh of all layouts."""
        return self._mesh

    # The mapping protocol.

    def __getitem__(self, pattern: str) -> Any:
        """Returns the layout or function (or `Rule`) inserted for a pattern.

        This looks the pattern up; `match` finds the rule for a path.

        Raises:
            LayoutMapKeyError: If no rule has this pattern.
        """
        if pattern not in self._rules:
            raise LayoutMapKeyError(self._missing(pattern))
        return self._rules[pattern].value()

    def __setitem__(self, pattern: str, value: "RuleLike") -> None:
        """Inserts a rule.

        Raises:
            LayoutMapError: If the pattern is there already or is no regular
                expression, or the value is no layout on this mesh.
        """
        if isinstance(pattern, str) and pattern in self._rules:
            msg = (
                f"pattern {pattern!r} is in the map already, with "
                f"{self._rules[pattern].value()!r}. Delete it first to change it."
            )
            raise LayoutMapError(msg)
        self._rules[pattern] = parse_rule(pattern, value, self._mesh)
        self._snapshot = None

    def __delitem__(self, pattern: str) -> None:
        """Removes a rule.

        Raises:
            LayoutMapKeyError: If no rule has this pattern.
        """
        if pattern not in self._rules:
            raise LayoutMapKeyError(self._missing(pattern))
        del self._rules[pattern]
        self._snapshot = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __contains__(self, pattern: object) -> bool:
        return pattern in self._rules

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayoutMap):
            return NotImplemented
        return self._options() == other._options() and (
            list(self.items()) == list(other.items())
        )

    __hash__ = None  # it changes

    def copy(self) -> "LayoutMap":
        """Returns a map with the same rules and options."""
        options = self._options()
        del options["mesh"]
        return LayoutMap(self._mesh, list(self.items()), **options)

    def __repr__(self) -> str:
        rules = ", ".join(f"{p!r}: {_value_text(v)}" for p, v in self.items())
        options = "".join(
            f", {name}={_value_text(value)}"
            for name, value in self._options().items()
            if name != "mesh" and value != _DEFAULTS[name]
        )
        return f"LayoutMap({self._mesh!r}, {{{rules}}}{options})"

    def _repr_html_(self) -> str:
        rows = [[pattern, _value_text(value)] for pattern, value in self.items()]
        return _render.html_table(
            ["pattern", "layout"], rows, caption=f"LayoutMap on {self._mesh!r}"
        )

    # Resolving.

    def match(self, path: str, shape: Iterable[int], dtype: Any) -> Resolution | None:
        """Returns what the rules say of one leaf, or None where none matches.

        Args:
            path: The leaf's path, or the name of an activation.
            shape: Its global shape.
            dtype: Its dtype.

        Raises:
            LayoutMapError: If two rules disagree, or the layout does not fit.
        """
        resolver = _Resolver(self)
        return resolver.by_rules(path, tuple(shape), dtype)

    def resolve_leaf(self, leaf: _paths.Leaf) -> Resolution | None:
        """Returns the resolution of one named leaf; None if it is no array."""
        return _Resolver(self).leaf(leaf)

    def resolve(self, tree: Any, *, params: Any = None) -> Resolved:
        """Returns the layout of every leaf, and why.

        Touches no device: the leaves may be `jax.ShapeDtypeStruct`.

        Args:
            tree: An NNX module or state, Linen variables, an Optax state, or any
                pytree. For a module, the layouts come as an `nnx.State`.
            params: For an optimiser state: the parameters that it belongs to. Its
                slots then take the parameters' layouts by structure; a rule that
                matches a slot's path and no parameter's overrides this.

        Raises:
            LayoutMapError: If rules disagree, a layout does not fit its leaf, or
                nothing matches a leaf and `unmatched` is `"error"`.
        """
        if isinstance(tree, Resolvable):
            return tree.resolve_layouts(self)
        resolver = _Resolver(self)
        if params is not None:
            owners = [resolver.leaf(leaf) for leaf in _paths.flatten(params).leaves]
            return self.resolve_slots(tree, params, owners)
        flat = _paths.flatten(tree)
        found = [resolver.leaf(leaf) for leaf in flat.leaves]
        return _resolved(flat, found)

    def resolve_slots(
        self, opt_state: Any, params: Any, owners: Sequence[Resolution | None]
    ) -> Resolved:
        """Returns the layouts of an optimiser state, from those of its parameters.

        Args:
            opt_state: The optimiser's state.
            params: The parameters it belongs to.
            owners: The resolution of each leaf of `params`.

        Raises:
            LayoutMapError: If rules for the slots alone disagree or do not fit.
        """
        resolver = _Resolver(self)
        flat = _paths.flatten(opt_state)
        taken: set[ParsedRule] = set()
        slots = find_slots(opt_state, params)
        # A rule that speaks for any parameter is no rule for slots: it would match
        # their paths by accident of names.
        for owner in owners:
            if owner is not None:
                taken.update(resolver.speaking_for(owner.path))
        found = [
            resolver.slot(leaf, slot, owners, taken)
            for leaf, slot in zip(flat.leaves, slots, strict=True)
        ]
        return _resolved(flat, found)

    def explain(self, tree: Any, *, params: Any = None) -> Explanation:
        """Returns a report on how this map lies on a tree; print or display it.

        It shows every leaf with its layout, rule and bytes per device, the totals
        against full replication, whatever fell back or disagreed, rules that match
        nothing with the paths they almost matched, rules that others hide, and
        large leaves that stay replicated.

        Args:
            tree: As for `resolve`; abstract trees need no device memory.
            params: As for `resolve`.

        Raises:
            LayoutMapError: As `resolve`.
        """
        return self.explain_resolved(self.resolve(tree, params=params))

    def explain_resolved(self, resolved: Resolved) -> Explanation:
        """Returns the report on layouts that were resolved before; see `explain`."""
        resolver = _Resolver(self)
        matching: dict[str, list[str]] = {pattern: [] for pattern in self._rules}
        for found in resolved.resolutions:
            for rule in set(resolver.speaking_for(found.path)):
                matching[rule.pattern].append(found.path)
        return explain(self._mesh, resolved, matching)

    def scope(self) -> AbstractContextManager["LayoutMap"]:
        """Returns a context in which models are born with these layouts.

        Inside `with layouts.scope():`, NNX modules and the variables of Linen's
        `init` are created sharded, in unchanged code, and `constrain` follows the
        map. See `create` for the explicit form.

        Example:
            >>> import meshlayout as ml
            >>> from flax import nnx
            >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
            >>> with ml.LayoutMap(mesh, {"kernel": (None, "model")}).scope():
            ...     layer = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
            >>> ml.Layout.of(layer.kernel[...])
            Layout([unsharded, model], Mesh(batch=2, model=4))
        """
        return _scope_factory[0](self)

    def snapshot(self) -> Snapshot:
        """Returns this map as it is now, as a value that does not change."""
        if self._snapshot is None:
            self._snapshot = Snapshot(self.copy())
        return self._snapshot

    # Inside.

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_snapshot": None}

    def _options(self) -> dict[str, Any]:
        return {
            "mesh": self._mesh,
            "default": self._default and self._default.value(),
            "conflict": self._conflict,
            "unmatched": self._unmatched,
            "on_uneven": self._on_uneven,
            "logical_axes": self._logical_axes,
        }

    def _missing(self, pattern: object) -> str:
        hint = did_you_mean(pattern, self._rules)
        return (
            f"no rule has the pattern {pattern!r}.{hint} To find the layout of a path, "
            "use match(path, shape, dtype)."
        )


_DEFAULTS = {
    "default": None,
    "conflict": "error",
    "unmatched": "replicate",
    "on_uneven": "error",
    "logical_axes": None,
}

_scope_factory: list[Callable[[LayoutMap], AbstractContextManager[LayoutMap]]] = []


def register_scope_factory(
    factory: Callable[[LayoutMap], AbstractContextManager[LayoutMap]],
) -> None:
    """Says what `scope()` does; called once, by the module that creates states."""
    _scope_factory[:] = [factory]


def _resolved(flat: _paths.Flat, found: list[Resolution | None]) -> Resolved:
    layouts = flat.unflatten([one and one.layout for one in found])
    return Resolved(layouts, tuple(one for one in found if one is not None))


def _pairs(rules: Any) -> list[tuple[Any, Any]]:
    pairs = rules.items() if isinstance(rules, Mapping) else rules
    try:
        return [(pattern, value) for pattern, value in pairs]
    except (TypeError, ValueError):
        msg = (
            f"rules are a mapping or pairs of pattern and layout, and got {rules!r}. "
            "Write {'dense/kernel': (None, 'model')}."
        )
        raise LayoutMapError(msg) from None


def _check_logical(axes: Any, mesh: Mesh) -> dict[str, Any] | None:
    if axes is None:
        return None
    for name, meant in axes.items():
        for axis in (meant,) if isinstance(meant, str) else tuple(meant or ()):
            if axis not in mesh:
                msg = (
                    f"logical_axes maps {name!r} to {axis!r}, which is no axis of "
                    f"{mesh!r}.{did_you_mean(axis, mesh.axis_names)}"
                )
                raise LayoutMapError(msg)
    return dict(axes)


def _value_text(value: Any) -> str:
    return str(value) if isinstance(value, Layout) else repr(value)


class _Resolver:
    """Resolves leaves one after another, and remembers what repeats."""

    def __init__(self, layouts: LayoutMap) -> None:
        self._map = layouts
        self._matcher = Matcher(layouts._rules.values())
        self._replicated: dict[int, Layout] = {}
        self._fitted: dict[Any, tuple[Layout, str | None, int]] = {}

    def leaf(self, leaf: _paths.Leaf) -> Resolution | None:
        """Returns the resolution of a leaf; None if it is no array."""
        array = _shape_and_dtype(leaf.value)
        if array is None:
            return None
        shape, dtype = array
        own = None if leaf.box is None else own_layout_metadata(leaf.box)
        if own is not None:
            return self._by_own(leaf, own, shape, dtype)
        names = None if leaf.box is None else logical_axes(leaf.box)
        found = self.by_rules(leaf.path, shape, dtype)
        if names is None:
            return found or self._by_default(leaf.path, shape, dtype)
        return self._by_names(leaf, names, found, shape, dtype)

    def slot(
        self,
        leaf: _paths.Leaf,
        slot: Slot | None,
        params: Sequence[Resolution | None],
        taken: set[ParsedRule],
    ) -> Resolution | None:
        """Returns the resolution of a leaf of an optimiser state.

        Args:
            leaf: The leaf.
            slot: Which parameter it belongs to, if any.
            params: The parameters' resolutions.
            taken: The rules that speak for parameters.
        """
        array = _shape_and_dtype(leaf.value)
        if array is None:
            return None
        shape, dtype = array
        owner = None if slot is None else params[slot.param]
        rules = [rule for rule in self.candidates(leaf.path) if rule not in taken]
        if rules:
            found = self._decide(leaf.path, shape, dtype, rules)
            if found is not None:
                return found
        if owner is None or slot is None:
            return self._whole(leaf.path, shape, dtype, "belongs to no parameter")
        if slot.kept is None:
            why = f"of shape unlike its parameter {owner.path!r}"
            lost = "replicated: its dims cannot be told from the parameter's"
            return self._whole(leaf.path, shape, dtype, why, lost)
        layout = slot_layout(slot, len(shape), owner.layout)
        reason = f"follows parameter {owner.path!r}"
        fitted, lost, size = self._fit(layout, shape, dtype, "replicate", leaf.path, "")
        return Resolution(
            leaf.path, shape, dtype, fitted, owner.rule, reason, lost, None, size
        )

    def by_rules(
        self, path: str, shape: tuple[int, ...], dtype: Any
    ) -> Resolution | None:
        """Returns what the rules say, or None where none matches."""
        return self._decide(path, shape, dtype, self.candidates(path))

    def candidates(self, path: str) -> tuple[ParsedRule, ...]:
        """Returns the rules that speak for a path: the exact one, or all that match."""
        return self._matcher.exact(path) or self._matcher.matching(path)

    def speaking_for(self, path: str) -> tuple[ParsedRule, ...]:
        """Returns every rule that matches a path, hidden by the exact one or not."""
        return (*self._matcher.exact(path), *self._matcher.matching(path))

    def _decide(
        self, path: str, shape: tuple[int, ...], dtype: Any, rules: Iterable[ParsedRule]
    ) -> Resolution | None:
        chosen: tuple[ParsedRule, Layout] | None = None
        for rule in rules:
            layout = self._expand(rule, path, shape, dtype)
            if layout is None:
                continue
            if chosen is None:
                chosen = (rule, layout)
                if self._map._conflict == "first":
                    break
            elif layout != chosen[1]:
                raise LayoutMapError(
                    _conflict_text(path, shape, dtype, chosen, (rule, layout))
                )
        if chosen is None:
            return None
        rule, layout = chosen
        policy = rule.on_uneven or self._map._on_uneven
        fitted, lost, size = self._fit(
            layout, shape, dtype, policy, path, f"rule {rule.pattern!r}, "
        )
        reason = "exact path" if rule.pattern == path else "pattern"
        return Resolution(
            path, shape, dtype, fitted, rule.pattern, reason, lost, None, size
        )

    def _expand(
        self, rule: ParsedRule, path: str, shape: tuple[int, ...], dtype: Any
    ) -> Layout | None:
        """Returns the rule's layout for an array of this rank."""
        try:
            if rule.function is not None:
                given = rule.function(path, shape, dtype)
                if given is None:
                    return None
                return parse_spec(given, self._map.mesh).with_rank(len(shape))
            assert rule.layout is not None
            rank = len(shape)
            if rank not in rule.expanded:
                rule.expanded[rank] = rule.layout.with_rank(rank)
            return rule.expanded[rank]
        except LayoutError as error:
            where = f"{path} {_render.array_text(dtype, shape)}"
            msg = f"{where}: rule {rule.pattern!r}: {error}"
            raise LayoutMapError(msg) from None

    def _fit(
        self,
        layout: Layout,
        shape: tuple[int, ...],
        dtype: Any,
        policy: OnUneven,
        path: str,
        source: str,
    ) -> tuple[Layout, str | None, int]:
        """Returns the layout that the shape takes, what was lost, and bytes."""
        key = (layout, shape, dtype, policy)
        if key in self._fitted:
            return self._fitted[key]
        misfits = layout.misfits(shape)
        lost = None
        if misfits and policy == "error":
            fact = str(misfits[0]).rstrip(".")
            where = f"{path} {_render.array_text(dtype, shape)}"
            fact, _, fix = fact.partition(". ")
            ways = f"{fix}, or give the rule on_uneven='replicate'."
            raise LayoutMapError(f"{where}: {fact} ({source}{layout!r}). {ways}")
        if misfits:
            lost = "; ".join(
                f"dim {one.dim} left unsharded: size {one.size} does not divide into "
                f"{one.num_shards} shards over {', '.join(one.axes)}"
                for one in misfits
            )
            gone = {one.dim for one in misfits}
            specs = [None if d in gone else e for d, e in enumerate(layout.specs)]
            layout = Layout(specs, layout.mesh, memory_kind=layout.memory_kind)
        self._fitted[key] = layout, lost, layout.bytes_per_device(shape, dtype)
        return self._fitted[key]

    def _by_own(
        self, leaf: _paths.Leaf, own: Any, shape: tuple[int, ...], dtype: Any
    ) -> Resolution:
        where = f"{leaf.path} {_render.array_text(dtype, shape)}"
        try:
            layout = parse_spec(own, self._map.mesh).with_rank(len(shape))
        except LayoutError as error:
            msg = f"{where}: the layout given on its layer does not fit: {error}"
            raise LayoutMapError(msg) from None
        fitted, lost, size = self._fit(
            layout,
            shape,
            dtype,
            self._map._on_uneven,
            leaf.path,
            "given on its layer, ",
        )
        rules = ", ".join(repr(r.pattern) for r in self.candidates(leaf.path))
        note = f"its own layout wins over rule {rules}" if rules else None
        reason = "given on its layer"
        return Resolution(
            leaf.path, shape, dtype, fitted, None, reason, lost, note, size
        )

    def _by_names(
        self,
        leaf: _paths.Leaf,
        names: tuple[Any, ...],
        found: Resolution | None,
        shape: tuple[int, ...],
        dtype: Any,
    ) -> Resolution:
        rules = axis_rules(leaf.box, self._map._logical_axes)
        where = f"{leaf.path} {_render.array_text(dtype, shape)}"
        try:
            layout = logical_layout(names, rules, self._map.mesh).with_rank(len(shape))
        except LayoutError as error:
            if found is not None:
                note = f"its logical axes {names} cannot be read: {error}"
                return _with_note(found, note)
            msg = f"{where}: logical axes {names}: {error}"
            raise LayoutMapError(msg) from None
        if found is not None:
            if layout == found.layout:
                return found
            return _with_note(
                found,
                f"the rule wins over its logical axes {names}, which mean {layout}",
            )
        fitted, lost, size = self._fit(
            layout,
            shape,
            dtype,
            self._map._on_uneven,
            leaf.path,
            f"logical axes {names}, ",
        )
        reason = f"logical axes {names}"
        return Resolution(
            leaf.path, shape, dtype, fitted, None, reason, lost, None, size
        )

    def _by_default(self, path: str, shape: tuple[int, ...], dtype: Any) -> Resolution:
        if not shape:
            return self._whole(path, shape, dtype, "scalar")
        if self._map._unmatched == "error":
            hint = "" if self._map else " The map has no rules."
            msg = (
                f"{path} {_render.array_text(dtype, shape)}: no rule matches, and the "
                f"map has unmatched='error'.{hint} Add a rule, for instance "
                f"layouts[{path!r}] = [...] for replicated."
            )
            raise LayoutMapError(msg)
        default = self._map._default
        layout = default and self._expand(default, path, shape, dtype)
        if layout is None:
            return self._whole(path, shape, dtype, "default")
        fitted, lost, size = self._fit(
            layout, shape, dtype, self._map._on_uneven, path, "default, "
        )
        return Resolution(path, shape, dtype, fitted, None, "default", lost, None, size)

    def _whole(
        self,
        path: str,
        shape: tuple[int, ...],
        dtype: Any,
        reason: str,
        lost: str | None = None,
    ) -> Resolution:
        """Returns a replicated resolution."""
        rank = len(shape)
        if rank not in self._replicated:
            self._replicated[rank] = Layout.replicated(self._map.mesh, rank)
        layout = self._replicated[rank]
        _, _, size = self._fit(layout, shape, dtype, "error", path, "")
        return Resolution(path, shape, dtype, layout, None, reason, lost, None, size)


def _with_note(found: Resolution, note: str) -> Resolution:
    return Resolution(
        found.path,
        found.shape,
        found.dtype,
        found.layout,
        found.rule,
        found.reason,
        found.fallback,
        note,
        found.bytes_per_device,
    )


def _conflict_text(
    path: str,
    shape: tuple[int, ...],
    dtype: Any,
    one: tuple[ParsedRule, Layout],
    other: tuple[ParsedRule, Layout],
) -> str:
    return (
        f"{path} {_render.array_text(dtype, shape)}: rules {one[0].pattern!r} and "
        f"{other[0].pattern!r} both match and disagree: {one[1]} against {other[1]}. "
        "Make the patterns exclusive, add a rule for the exact path, or let the order "
        "decide with conflict='first'."
    )


def _shape_and_dtype(value: Any) -> tuple[tuple[int, ...], Any] | None:
    """Returns the shape and dtype of an array-like leaf; None for anything else."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return tuple(value.shape), value.dtype
    if isinstance(value, (bool, int, float, complex)):
        return (), jax.dtypes.canonicalize_dtype(np.result_type(value))
    return None
