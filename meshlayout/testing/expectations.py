"""What tests expect: layouts of arrays, and collectives of compiled programs."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _checks, _paths
from meshlayout._annotations import PyTree
from meshlayout.arrays.placement import array_text, is_same_layout
from meshlayout.errors import LayoutError, MeshLayoutError, did_you_mean
from meshlayout.hlo import KINDS, Communication, read_communication
from meshlayout.layout import Layout, as_layout
from meshlayout.layout_map import LayoutMap
from meshlayout.step import compile_step
from meshlayout.step.inspection import StepInspection


class VerificationError(MeshLayoutError, AssertionError):
    """A step, a layout or a program differs from what a test expects."""


@_checks.user_call
def assert_layout(x: PyTree, expected: object) -> None:
    """Raises VerificationError unless arrays have the expected layouts.

    Layouts are compared by their effect: every device must hold the same piece,
    whatever the names of the axes; axes of size 1 make no difference.

    Args:
        x: An array, an abstract array with a sharding, or a tree of these.
        expected: A `LayoutMap`; or, for all arrays, a `Layout`, `NamedSharding`,
            `PartitionSpec` or tuple of entries for the mesh of each array, where `...`
            is any number of unsharded dims, and `MATCH` anything in that dim.

    Raises:
        VerificationError: If a layout differs, or there are no arrays.
        LayoutError: If `expected` is not a layout, or does not fit; or the map.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> kernel = ml.arrays.zeros((4, 8), mesh.layout(None, "model"))
        >>> assert_layout(kernel, (None, "model"))
        >>> assert_layout({"kernel": kernel}, ml.LayoutMap(mesh, {"k": (..., "model")}))
    """
    leaves = _paths.flatten(x).leaves
    if isinstance(expected, LayoutMap):
        resolved = _paths.flatten(expected.resolve(x).layouts).leaves
        layouts = {leaf.path: leaf.value for leaf in resolved}
        # Leaves that are neither arrays nor numbers have no layout in the map.
        leaves = [leaf for leaf in leaves if leaf.path in layouts]
    else:
        layouts = dict.fromkeys((leaf.path for leaf in leaves), expected)
    if not leaves:
        raise VerificationError(f"{x!r} holds no arrays: there is no layout to check.")
    problems = [text for leaf in leaves if (text := _problem(leaf, layouts[leaf.path]))]
    if problems:
        raise VerificationError("\n".join(problems))


def _problem(leaf: _paths.Leaf, expected: object) -> str:
    where = array_text(leaf.path, leaf.value) or _checks.shown(leaf.value)
    if not isinstance(leaf.value, (jax.Array, jax.ShapeDtypeStruct)):
        return f"{where} is on no mesh, but {expected!r} was expected."
    try:
        actual = Layout.of(leaf.value)
        if isinstance(expected, PartitionSpec):  # it may leave out unsharded dims
            expected = NamedSharding(actual.mesh.jax_mesh, expected)
        elif isinstance(expected, (tuple, list)):
            expected = Layout(expected, actual.mesh, memory_kind=actual.memory_kind)
        layout = as_layout(expected, actual.rank)
    except LayoutError as error:
        raise LayoutError(f"{where}: {error}") from None
    if is_same_layout(actual, layout):
        return ""
    return f"{where}: the layout is {actual!r}, but {layout!r} was expected."


@_checks.user_call
def expect_communication(
    program: Any,
    *args: Any,
    only: bool = False,
    max_wire_bytes: int | None = None,
    **counts: int,
) -> Communication:
    """Checks how many collectives of each kind a compiled program has; returns them.

    To keep all as they are, commit the result's `to_lock()` for its `check_lock`.

    Args:
        program: A compiled step, what `jax.jit`, `lower` or `compile` returned, or a
            plain function `(state, batch, ...) -> (state, aux)`.
        *args: The step's arguments; nothing is run or donated.
        only: Whether kinds that are not named must be absent.
        max_wire_bytes: The most bytes that each device may send in one run, loops
            counted in full (once, if their length is unknown).
        **counts: Counts by kind: `all_reduce`, `all_gather`, `reduce_scatter`,
            `all_to_all`, `collective_permute`, `ragged_all_to_all`,
            `collective_broadcast`. In a loop, one counts once; `in_loops` has those.

    Raises:
        VerificationError: If a count differs, or more is sent; lists all collectives.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 8})
        >>> @ml.compile_step
        ... def step(state, batch):
        ...     return state, (state * batch).sum()
        >>> batch = ml.arrays.ones(8, mesh.layout("batch"))
        >>> found = expect_communication(
        ...     step, ml.arrays.ones((), mesh.layout()), batch, all_reduce=1, only=True
        ... )
        >>> found["all_reduce"], found.in_loops["all_reduce"]
        (1, 0)
    """
    for kind, count in counts.items():
        if kind not in KINDS:
            near = did_you_mean(kind, (*KINDS, "only", "max_wire_bytes"))
            msg = (
                f"{kind!r} is not a kind of collective; these are: {', '.join(KINDS)}."
            )
            raise VerificationError(msg + near)
        _checks.count(kind, count, at_least=0, error=VerificationError)
    expected = {**dict.fromkeys(KINDS, 0), **counts} if only else counts
    sent = _sent_by(program, args)
    wrong = [
        f"{sent[kind]} {kind} where {count} was expected"
        for kind, count in expected.items()
        if sent[kind] != count
    ]
    if max_wire_bytes is not None and sent.wire_bytes > max_wire_bytes:
        wrong.append(
            f"{sent.wire_bytes} bytes of collectives sent by each device where at most "
            f"{max_wire_bytes} were expected"
        )
    if wrong:
        name = getattr(program, "__name__", "the program")
        raise VerificationError(f"{name} has {', and '.join(wrong)}.\n{sent}")
    return sent


def _sent_by(program: Any, args: tuple[Any, ...]) -> Communication:
    is_lowered = hasattr(program, "as_text")
    if is_lowered and args:
        msg = "expect_communication: a lowered program takes no further arguments."
        raise VerificationError(msg)
    step: Any = program
    if not is_lowered and not hasattr(program, "lower"):
        step = compile_step(program)
    if isinstance(step, StepInspection):
        return step.communication(*args)
    lowered = step if is_lowered else step.lower(*args)
    is_compiled = not hasattr(lowered, "compile")
    return read_communication(lowered if is_compiled else lowered.compile())
