"""Which values of a function that runs on every replica are the same on all of them.

A strategy must know whether a variable's new value is one value or as many as there are
replicas, and whether gradients have been reduced already. JAX's own types can say so
(`check_vma=True`), but refuse ordinary code, such as a scan that starts from zeros. So
the jaxpr of the unchecked function is read instead: one pass from the inputs to the
outputs, with a fixpoint for loops.

The answer errs in one direction alone. "The same" is a proof: each operation is known
to give equal results for equal operands. Whatever is unknown counts as different.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import PartitionSpec

from meshlayout import _jax
from meshlayout._annotations import Equation, PyTree


@dataclasses.dataclass(frozen=True)
class Sameness:
    """What is the same on all replicas.

    Attributes:
        outputs: Of each output of the jaxpr, whether it is.
        marks: By name, whether everything marked so is. A mark on a value that nothing
            depends on may be missing, since JAX drops such values.
        unmatched: The names of collectives that perhaps only some of the replicas get
            to, as in one branch of a `cond`, where they would wait for the others.
    """

    outputs: list[bool]
    marks: dict[str, bool]
    unmatched: list[str]


# Names of JAX's own remat policies do not begin so.
_MARK = "meshlayout.distribute/"
# The mark of what the library has combined, and not the function itself.
OWN_SUM = "own sum"


def mark(tree: PyTree, name: str) -> PyTree:
    """Returns the arrays of a tree unchanged, so named that `Sameness.marks` has them.

    The names are those of `jax.checkpoint`'s policies: they stay in the jaxpr under all
    transformations, and cost nothing in the compiled program.

    Args:
        tree: Arrays and traced values; other leaves stay as they are.
        name: The name; several values may share it.
    """
    return jax.tree.map(
        lambda leaf: (
            checkpoint_name(leaf, _MARK + name) if hasattr(leaf, "dtype") else leaf
        ),
        tree,
    )


def same_values(
    jaxpr: ClosedJaxpr,
    axis_name: str,
    inputs: Sequence[bool],
    *,
    of_same: bool = True,
    of_differing: bool = True,
) -> Sameness:
    """Returns which results of a replica's function are the same on all replicas.

    Along other mesh axes values may differ: the same means equal on any two devices
    that differ in their position along `axis_name` alone.

    Args:
        jaxpr: The function, traced under `jax.shard_map` with `check_vma=False`, or
            with this axis in the `axis_env` of `jax.make_jaxpr`; or a function that
            calls such a `jax.shard_map`.
        axis_name: The mesh axis along which the replicas are.
        inputs: Of each input, whether it is the same on all replicas.
        of_same: Whether a collective of equal values gives equal values. False leaves
            only what is the same without any collective of the function's own.
        of_differing: Whether a collective of values that differ gives equal values.

    Example:
        >>> def replica(x, w):
        ...     total = jax.lax.psum(x, "batch")
        ...     return total, x + w, mark(w, "weights") * 2
        >>> jaxpr = jax.make_jaxpr(replica, axis_env=[("batch", 8)])(1.0, 2.0)
        >>> same_values(jaxpr, "batch", [False, True])
        Sameness(outputs=[True, False, True], marks={'weights': True}, unmatched=[])
    """
    analysis = _Analysis(axis_name, of_same=of_same, of_differing=of_differing)
    outputs, _ = analysis.run(jaxpr.jaxpr, inputs)
    return Sameness(outputs, analysis.marks, sorted(analysis.unmatched))


# Operations that call their only inner jaxpr once, with their operands in order.
_CALLS = {
    "call", "checkpoint", "closed_call", "composite", "compute_on", "core_call",
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "eval_jaxpr", "jit",
    "pjit", "remat", "remat2", "shard_map", "xla_metadata_call",
}  # fmt: skip

# Collectives after which every replica of the axis has the same value.
_UNIFYING = {
    "all_gather", "all_gather_invariant", "pbroadcast", "pmax", "pmin", "psum", "psum2",
    "psum_invariant",
}  # fmt: skip

# Operations that give each operand back, in JAX's type system of another type.
_IDENTITIES = {
    "copy", "copy_p", "device_put", "name", "optimization_barrier", "pcast", "pvary",
}  # fmt: skip

# Operations whose results depend on more than their operands: on the host, on memory
# that nobody wrote, or on a generator of the device. Of `call_hi_primitive` JAX shows
# no jaxpr.
_UNPREDICTABLE = {
    "call_hi_primitive", "call_hi_primitive_linearized", "create_token", "dma_start",
    "empty", "empty_ref", "infeed", "io_callback", "outside_call", "pure_callback",
    "recv", "rng_uniform", "semaphore_signal",
}  # fmt: skip

# Effects that say nothing about results: of references, which are followed here.
_FOLLOWED = {
    "AccumEffect", "InternalMutableArrayEffect", "NamedAxisEffect", "ReadEffect",
    "WriteEffect",
}  # fmt: skip


class _Analysis:
    """One walk over a jaxpr; collects what its marks say.

    Every part of the walk returns two things: of each result whether it is the same on
    all replicas, and whether all values inside are, results and others.

    Args:
        axis_name: The mesh axis along which the replicas are.
        of_same: As of `same_values`.
        of_differing: As of `same_values`.
    """

    def __init__(self, axis_name: str, *, of_same: bool, of_differing: bool) -> None:
        self.axis_name = axis_name
        self.of_same = of_same
        self.of_differing = of_differing
        self.marks: dict[str, bool] = {}
        self.unmatched: set[str] = set()
        # Whether all replicas run this part equally often. Where they do not, nothing
        # is the same, not even a constant: some replicas do not get there.
        self.in_step = True
        self.results: dict[object, tuple[list[bool], bool]] = {}

    def run(self, jaxpr: Jaxpr, inputs: Sequence[bool]) -> tuple[list[bool], bool]:
        """Walks over the operations of a jaxpr."""
        # Calls of one jitted function share its jaxpr, as do repeated blocks of a
        # model. What was marked in it has been noted the first time.
        key = (jaxpr, tuple(inputs), self.in_step)
        if key not in self.results:
            self.results[key] = self.operations(jaxpr, inputs)
        return self.results[key]

    def run_out_of_step(self, jaxprs: Iterable[Jaxpr]) -> None:
        """Walks over jaxprs that only some of the replicas run, for their marks."""
        in_step, self.in_step = self.in_step, False
        for jaxpr in jaxprs:
            self.run(jaxpr, [False] * len(jaxpr.invars))
        self.in_step = in_step

    def operations(
        self, jaxpr: Jaxpr, inputs: Sequence[bool]
    ) -> tuple[list[bool], bool]:
        """As `run`, without looking up an earlier result."""
        # A reference that is a constant may hold what an earlier call wrote to it.
        same: dict[Any, bool] = {var: not _is_reference(var) for var in jaxpr.constvars}
        same |= dict(zip(jaxpr.invars, inputs, strict=True))

        def look_up(var: Any) -> bool:
            return self.in_step and (isinstance(var, Literal) or same[var])

        all_same = True
        for eqn in jaxpr.eqns:
            operands = [look_up(var) for var in eqn.invars]
            results, all_same_inside = self.operation(eqn, operands)
            same |= dict(zip(eqn.outvars, results, strict=True))
            is_uniform = all(operands) and all_same_inside
            for var in filter(_is_reference, eqn.invars):
                same[var] = look_up(var) and is_uniform  # it may be written to
            all_same = all_same and is_uniform and all(results)
        return [look_up(var) for var in jaxpr.outvars], all_same and all(inputs)

    def operation(self, eqn: Equation, operands: list[bool]) -> tuple[list[bool], bool]:
        """Applies the rule of one operation."""
        name, params = eqn.primitive.name, eqn.params
        inner = _jax.inner_jaxprs(eqn)
        if inner:
            has_references = any(map(_is_reference, eqn.invars))
            rules = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}
            rule = rules.get(name, self.call if name in _CALLS else self.opaque)
            return (self.opaque if has_references else rule)(eqn, operands)
        if name == "name" and params["name"].startswith(_MARK):
            mark_name = params["name"].removeprefix(_MARK)
            if mark_name == OWN_SUM:
                return [self.in_step], self.in_step
            self.marks[mark_name] = self.marks.get(mark_name, True) and all(operands)
        is_one_to_one = len(operands) == len(eqn.outvars)
        if name in _IDENTITIES and is_one_to_one:
            return operands, all(operands)
        if not self.in_step and name != "axis_index" and self.runs_along_axis(eqn):
            self.unmatched.add(name)
        if name in _UNIFYING and is_one_to_one:
            if not self.runs_along_axis(eqn):  # along other axes
                return operands, all(operands)
            # Of groups of replicas, each would have a value of its own.
            is_same = self.in_step and params.get("axis_index_groups") is None
            results = [
                is_same and (self.of_same if operand else self.of_differing)
                for operand in operands
            ]
            return results, all(results)
        is_same = all(operands) and self.in_step and self.is_predictable(eqn)
        return [is_same] * len(eqn.outvars), is_same or not eqn.outvars

    def is_predictable(self, eqn: Equation) -> bool:
        """Returns whether an operation's results depend on its operands alone."""
        effects = {type(effect).__name__ for effect in eqn.effects}
        is_known = eqn.primitive.name not in _UNPREDICTABLE
        return is_known and effects <= _FOLLOWED and not self.runs_along_axis(eqn)

    def runs_along_axis(self, eqn: Equation) -> bool:
        """Returns whether an operation itself knows the replicas' axis."""
        # `name` is of a function or a mark, which may be called like the axis.
        values = [value for key, value in eqn.params.items() if key != "name"]
        axes = [getattr(effect, "name", None) for effect in eqn.effects]
        return self.names_axis(values) or self.names_axis(axes)

    def names_axis(self, value: object) -> bool:
        """Returns whether a parameter is the axis, or a collection that holds it."""
        if isinstance(value, (tuple, list, set, frozenset, PartitionSpec)):
            return any(map(self.names_axis, value))
        return isinstance(value, str) and value == self.axis_name

    def scan(self, eqn: Equation, operands: list[bool]) -> tuple[list[bool], bool]:
        """Repeats the body until the carry stays as it is."""
        (body,) = _jax.inner_jaxprs(eqn)
        num_constants, num_carried = _jax.scan_counts(eqn)
        constants, rest = operands[:num_constants], operands[num_constants:]
        carry, slices = rest[:num_carried], rest[num_carried:]
        while True:
            results, all_same = self.run(body, [*constants, *carry, *slices])
            merged = [a and b for a, b in zip(carry, results, strict=False)]
            if merged == carry:
                return [*carry, *results[num_carried:]], all_same
            carry = merged

    def while_loop(
        self, eqn: Equation, operands: list[bool]
    ) -> tuple[list[bool], bool]:
        """As `scan`; nothing is the same if replicas may leave at different times."""
        params = eqn.params
        condition, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
        num_condition, num_body = params["cond_nconsts"], params["body_nconsts"]
        of_condition, rest = operands[:num_condition], operands[num_condition:]
        of_body, carry = rest[:num_body], rest[num_body:]
        while True:
            (goes_on,), all_same = self.run(condition, [*of_condition, *carry])
            if not goes_on:
                self.run_out_of_step((condition, body))
                return [False] * len(carry), False
            results, all_same_in_body = self.run(body, [*of_body, *carry])
            merged = [a and b for a, b in zip(carry, results, strict=True)]
            if merged == carry:
                return carry, all_same and all_same_in_body
            carry = merged

    def cond(self, eqn: Equation, operands: list[bool]) -> tuple[list[bool], bool]:
        """Takes what is the same in all branches, if all replicas take the same."""
        branches = _jax.inner_jaxprs(eqn)
        index, *rest = operands
        if not index:
            self.run_out_of_step(branches)
            return [False] * len(eqn.outvars), False
        runs = [self.run(branch, rest) for branch in branches]
        columns = zip(*(results for results, _ in runs), strict=True)
        return list(map(all, columns)), all(all_same for _, all_same in runs)

    def call(self, eqn: Equation, operands: list[bool]) -> tuple[list[bool], bool]:
        """Walks over the function that is called."""
        body, *others = _jax.inner_jaxprs(eqn)
        counts = (len(body.invars), len(body.outvars))
        if others or counts != (len(eqn.invars), len(eqn.outvars)):
            return self.opaque(eqn, operands)
        if eqn.primitive.name == "shard_map":
            # One that makes the replicas gives each its own part of such an operand.
            specs = eqn.params["in_specs"]
            operands = [
                is_same and not self.names_axis(spec)
                for is_same, spec in zip(operands, specs, strict=True)
            ]
        return self.run(body, operands)

    def opaque(self, eqn: Equation, operands: list[bool]) -> tuple[list[bool], bool]:
        """All or nothing: of unknown operations, and of those with references."""
        inner = _jax.inner_jaxprs(eqn)
        is_same = all(operands) and self.in_step
        if not is_same:
            self.run_out_of_step(inner)
        else:
            runs = [self.run(jaxpr, [True] * len(jaxpr.invars)) for jaxpr in inner]
            is_same = all(all_same for _, all_same in runs)
            is_same = is_same and eqn.primitive.name not in _UNPREDICTABLE
            is_same = is_same and not self.names_axis(list(eqn.params.values()))
        return [is_same] * len(eqn.outvars), is_same


def _is_reference(var: Any) -> bool:
    """Returns whether a variable is of `jax.new_ref`, whose value can change."""
    return hasattr(var.aval, "inner_aval")
