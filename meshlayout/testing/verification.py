"""`verify`: a step on a mesh and on one device; expected layouts and collectives."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout import _checks, _jax, _paths, _render
from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout.arrays import copy_to_mesh, to_numpy
from meshlayout.arrays.placement import array_text, is_same_layout
from meshlayout.errors import LayoutError, MeshLayoutError
from meshlayout.hlo import KINDS, Communication, read_communication
from meshlayout.layout import Layout, as_layout
from meshlayout.layout_map import LayoutMap, activate
from meshlayout.mesh import Mesh, as_mesh, create_mesh
from meshlayout.metrics import Metrics
from meshlayout.step import CompiledStep, EvalStep, PredictStep, compile_step
from meshlayout.step.inspection import StepInspection
from meshlayout.step.train_step import StateStep


# A difference may be this many times the effect of one rounding error per input. One
# run stands for all: if a relu switches between two runs, a gradient differs by up to
# eleven times what another run shows.
_FACTOR = 12

_NOTE = (
    "verify runs the step on one device, too. A mesh that the step names itself cannot "
    "be replaced: take it from jax.sharding.get_abstract_mesh() inside the step."
)

_CAUSES = (
    "Usual causes: a mean of per-shard means, a denominator or batch statistics of one "
    "device, a missing sum over shards, a random key made from a device index. If this "
    "is rounding, allow more with rtol= or atol=."
)


class VerificationError(MeshLayoutError, AssertionError):
    """A step, a layout or a program differs from what a test expects."""


@dataclass(frozen=True)
class Difference:
    """The largest difference between the two values of a leaf."""

    path: str  # of the leaf; it begins with `state` or `aux`
    largest: float  # infinite if only one value is NaN
    allowed: float  # the largest difference that passes
    text: str = ""  # what differs and by how much; empty if it passes


@dataclass(frozen=True)
class Verification:
    """The result of `verify`."""

    mesh: Mesh
    num_steps: int  # that were compared
    differences: tuple[Difference, ...]  # of state and other results, after the last

    def __str__(self) -> str:
        fact = f"{len(self.differences)} leaves agree on {self.mesh!r}"
        return f"{fact} and on one device, steps: {self.num_steps}."


@_checks.user_call
def verify(
    step: Any,
    state: PyTree,
    batch: Batch,
    *args: Any,
    rtol: float | None = None,
    atol: float | None = None,
    num_steps: int = 1,
    **kwargs: Any,
) -> Verification:
    """Checks that a step has the same results on a mesh as on one device.

    The step runs from copies of `state` on the mesh, and on its first device alone,
    where the current mesh has the same axes, of size 1, and `constrain` has no effect.
    A step that is also wrong on one device goes unnoticed.

    Integers and PRNG keys must be equal; NaN is equal to NaN. Floats may differ by the
    rounding of a sum, relative to the leaf's largest value, and by 12 times the effect
    of one rounding error in the state and batch, which a third run measures.

    Args:
        step: A step of this library, or another callable with `lower`; a plain function
            `(state, batch, ...) -> (state, aux)` is compiled first. To find its mesh,
            it calls `jax.sharding.get_abstract_mesh()`.
        state: A state on a mesh of several devices.
        batch: The global batch, for all steps.
        *args: Further arguments of the step.
        rtol: Relative tolerance; by default 1.6e-5 for float32, 3.1e-2 for bfloat16.
        atol: Absolute tolerance; by default 1.5e-8 and the measured effect of rounding.
        num_steps: The number of steps, each from the state of the previous one.
        **kwargs: Further arguments of the step, by name.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> def step(state, batch):
        ...     return state + batch.mean(), {"loss": batch.mean()}
        >>> state = ml.arrays.zeros(8, mesh.layout("model"))
        >>> print(verify(step, state, ml.arrays.ones(4, mesh.layout("batch"))))
        2 leaves agree on Mesh(batch=2, model=4) and on one device, steps: 1.
    """
    num_steps = _checks.count("num_steps", num_steps, error=VerificationError)
    mesh = _mesh_of((state, batch, args, kwargs))
    sizes, devices = dict.fromkeys(mesh.axis_names, 1), mesh.local_devices[:1]
    one = create_mesh(sizes, devices=devices, axis_types=mesh.axis_types)
    # One map for all steps, as JAX compiles everything anew for another.
    no_rules = LayoutMap(one)
    # Compiled as on one device: run eagerly, it would round differently.
    if not hasattr(step, "lower"):
        step = compile_step(step, on_recompile="ignore")
    step_on_one: Any = step
    if isinstance(step, StateStep):
        step_on_one = step.without_layouts()
    elif isinstance(step, CompiledStep):
        step_on_one = jax.jit(step.function, static_argnames=step.static_argnames)
    args_on_one, kwargs_on_one = _to_one_device((args, kwargs), one)

    def results(result: Any, state: PyTree) -> tuple[PyTree, dict[str, Leaf]]:
        is_aux = isinstance(step, (EvalStep, PredictStep))
        state, aux = (state, result) if is_aux else result
        return state, _leaves(state, aux)

    def on_one(state: PyTree, batch: Batch) -> tuple[PyTree, dict[str, Leaf]]:
        # Without a rule, `constrain` leaves every value where it is.
        with _checks.noted(_NOTE), jax.set_mesh(one.jax_mesh), activate(no_rules):
            result = step_on_one(state, batch, *args_on_one, **kwargs_on_one)
            return results(result, state)

    program = step.lower(state, batch, *args, **kwargs).as_text()
    dtypes = {*re.findall(r"[x<](f16|bf16|f32)>", program)} or {"f32"}
    eps = max(float(jnp.finfo(x.replace("f", "float")).eps) for x in dtypes)
    rng = np.random.default_rng(0)

    def rounded(values: np.ndarray) -> np.ndarray:
        is_float = jnp.issubdtype(values.dtype, jnp.floating)
        wide = values.astype(np.float64) if is_float else values
        # Masks, counts and labels are integers stored as floats, and must stay exact.
        if not is_float or np.all(wide == np.round(wide)):
            return values
        error = max(eps, float(jnp.finfo(values.dtype).eps))
        wide = wide * (1 + error * rng.choice([-1.0, 1.0], wide.shape))
        return wide.astype(values.dtype)

    whole, moved = _to_one_device(state, one), _to_one_device(state, one, rounded)
    starts = [jax.tree.map(_wide, _leaves(tree, None)) for tree in (whole, moved)]
    state = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, state)
    differences = []
    for number in range(1, num_steps + 1):
        state, leaves = results(step(state, batch, *args, **kwargs), state)
        whole, expected = on_one(whole, _to_one_device(batch, one))
        moved, noisy = on_one(moved, _to_one_device(batch, one, rounded))
        if other := sorted(leaves.keys() ^ expected.keys()):
            msg = f"step {number}: the step returns {str(other)[1:-1]} only on the mesh"
            hint = "Its results must not depend on the number of devices."
            raise VerificationError(f"{msg} or only on one device. {hint}")
        differences = []
        for path, leaf in leaves.items():
            with np.errstate(invalid="ignore"):  # infinity minus infinity
                noise = _wide(noisy[path]) - _wide(expected[path])
                if path in starts[0]:
                    # A parameter's own error is larger than that of its update.
                    noise -= starts[1][path] - starts[0][path]
                values = np.asarray(to_numpy(expected[path]))
                allowed = _allowed(values, _largest(noise), rtol, atol)
                differences.append(_compared(path, leaf, values, allowed))
        if wrong := [leaf for leaf in differences if leaf.text]:
            # The loss is nearest to the cause: parameters differ because it does.
            first = min(wrong, key=lambda leaf: leaf.path != "aux/loss")
            raise VerificationError(
                f"step {number}: {array_text(first.path, leaves[first.path])} differs "
                f"between {mesh!r} and one device{first.text}\nLeaves that differ: "
                f"{len(wrong)} of {len(differences)}.\n{_CAUSES}"
            )
    return Verification(mesh, num_steps, tuple(differences))


def _mesh_of(arguments: PyTree) -> Mesh:
    for leaf in jax.tree.leaves(arguments):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.num_devices > 1:
            return as_mesh(sharding.mesh)
    msg = "the state is not on a mesh of several devices: there is nothing to"
    hint = "virtual_devices(8) makes eight on any machine."
    raise VerificationError(f"{msg} compare with one device. {hint}")


def _leaves(state: PyTree, aux: PyTree) -> dict[str, Leaf]:
    aux = aux.compute() if isinstance(aux, Metrics) else aux
    return {
        "/".join(filter(None, [name, leaf.path])): leaf.value
        for name, tree in (("state", state), ("aux", aux))
        for leaf in _paths.flatten(tree).leaves
    }


def _wide(leaf: Leaf) -> np.ndarray:
    values = np.asarray(to_numpy(leaf))
    is_complex = jnp.issubdtype(values.dtype, jnp.complexfloating)
    return values.astype(np.complex128 if is_complex else np.float64)


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def _allowed(
    values: np.ndarray, noise: float, rtol: float | None, atol: float | None
) -> float:
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        return 0.0
    of_leaf = float(jnp.finfo(values.dtype).eps)
    # Sums are computed in float32 or better, in a different order on the mesh, and then
    # rounded to the dtype of the leaf.
    of_sums = min(of_leaf, float(jnp.finfo(jnp.float32).eps))
    rtol = 128 * of_sums + 4 * of_leaf if rtol is None else rtol
    atol = of_sums / 8 + _FACTOR * noise if atol is None else atol
    return atol + rtol * _largest(_wide(values))


def _compared(
    path: str, leaf: Leaf, expected: np.ndarray, allowed: float
) -> Difference:
    values = np.asarray(to_numpy(leaf))
    kinds = [_render.array_text(x.dtype, x.shape) for x in (values, expected)]
    if kinds[0] != kinds[1]:
        text = f": it is {kinds[0]} on the mesh and {kinds[1]} on one device."
        return Difference(path, np.inf, 0.0, text)
    distances = np.abs(_wide(values) - _wide(expected))
    both_nan = (values != values) & (expected != expected)
    # NaN on one side alone, and integers so large that floats do not tell them apart.
    distances = np.where(distances > 0, distances, np.inf)
    distances = np.where((values == expected) | both_nan, 0.0, distances)
    largest, num_wrong = float(distances.max(initial=0.0)), np.sum(distances > allowed)
    if not num_wrong:
        return Difference(path, largest, allowed)
    index = tuple(map(int, np.unravel_index(distances.argmax(), distances.shape)))
    text = (
        f". The largest difference is {largest:.3g}"
        f"{f' at {list(index)}' if index else ''}: {values[index]} on the mesh and "
        f"{expected[index]} on one device, where {allowed:.2g} is allowed. Elements "
        f"that differ: {num_wrong:,} of {values.size:,}."
    )
    return Difference(path, largest, allowed, text)


def _to_one_device(
    tree: PyTree, mesh: Mesh, change: Callable[[Any], Any] = lambda values: values
) -> Any:
    """Copies the arrays of a tree to a mesh of one device, with changed values."""

    def move(leaf: Leaf) -> Leaf:
        if isinstance(leaf, np.ndarray):
            return change(leaf)
        if not isinstance(leaf, jax.Array):
            return leaf
        values, layout = change(to_numpy(leaf)), Layout([...], mesh)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            values = jax.random.wrap_key_data(values, impl=jax.random.key_impl(leaf))
        if isinstance(leaf.sharding, NamedSharding):
            now = Layout.of(leaf)
            layout = Layout(now.specs, mesh, memory_kind=now.memory_kind)
        # The program depends on it, whether an array is weakly typed.
        is_weak = jax.typeof(leaf).weak_type
        with _jax.without_set_mesh():
            return _jax.with_weak_type(copy_to_mesh(values, layout), weak_type=is_weak)

    return jax.tree.map(move, tree)


@_checks.user_call
def assert_layout(x: PyTree, expected: object) -> None:
    """Raises VerificationError unless arrays have the expected layouts.

    Layouts are compared by their effect: every device must hold the same piece,
    whatever the axes are called; axes of size 1 make no difference.

    Args:
        x: An array, an abstract array with a sharding, or a tree of these.
        expected: A `LayoutMap`; or, for all arrays, a `Layout`, `NamedSharding`,
            `PartitionSpec` or tuple of entries for the mesh of each array. `...` stands
            for any number of unsharded dims, and `MATCH` for anything in its dim.

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
    program: Any, *args: Any, only: bool = False, **counts: int
) -> Communication:
    """Checks the number of collectives per kind in a compiled program; returns them.

    If a number differs, the error lists all collectives. To lock all of them, commit
    the result's `to_lock()` and call its `check_lock`.

    Args:
        program: A compiled step, the result of `jax.jit`, `lower` or `compile`, or a
            plain function `(state, batch, ...) -> (state, aux)`.
        *args: The step's arguments. Nothing is run or donated.
        only: Whether kinds that are not listed must be absent.
        **counts: Counts by kind: `all_reduce`, `all_gather`, `reduce_scatter`,
            `all_to_all`, `collective_permute`, `ragged_all_to_all`,
            `collective_broadcast`. One in a loop counts once; see `in_loops`.

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
        _checks.choice("a kind of collective", kind, KINDS, error=VerificationError)
        _checks.count(kind, count, at_least=0, error=VerificationError)
    expected = {**dict.fromkeys(KINDS, 0), **counts} if only else counts
    sent = _sent_by(program, args)
    wrong = [
        f"{sent[kind]} {kind} where {count} was expected"
        for kind, count in expected.items()
        if sent[kind] != count
    ]
    if wrong:
        name = getattr(program, "__name__", "the program")
        raise VerificationError(f"{name} has {', and '.join(wrong)}.\n{sent}")
    return sent


def _sent_by(program: Any, args: tuple[Any, ...]) -> Communication:
    is_lowered = hasattr(program, "as_text")
    if is_lowered and args:
        msg = "expect_communication: a lowered program takes no further arguments."
        raise VerificationError(msg)
    is_jitted = is_lowered or hasattr(program, "lower")
    step: Any = program if is_jitted else compile_step(program)
    if isinstance(step, StepInspection):
        return step.communication(*args)
    lowered = step if is_lowered else step.lower(*args)
    return read_communication(getattr(lowered, "compile", lambda: lowered)())
