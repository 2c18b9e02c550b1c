"""`verify`: the same step on a mesh and on one device, compared leaf by leaf.

Here are the arguments, the meshes and the comparison; `reference` runs the other side,
and `plain_step` is what it runs for steps of this library.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshlayout import _checks, _paths, _render
from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout._batches import batch_layout, leaf_layout
from meshlayout.arrays import relayout, to_numpy
from meshlayout.layout_map import LayoutMap
from meshlayout.mesh import Mesh, as_mesh
from meshlayout.step import CompiledStep, compile_step
from meshlayout.step.eval_step import EvalStep, PredictStep
from meshlayout.step.train_step import TrainStep
from meshlayout.testing.differences import Difference, Tolerance, compare
from meshlayout.testing.expectations import VerificationError
from meshlayout.testing.plain_step import PlainEvalStep, PlainPredictStep
from meshlayout.testing.plain_train_step import PlainTrainStep
from meshlayout.testing.reference import (
    Reference,
    Values,
    changes,
    copied,
    leaves_of,
    state_and_aux,
    values_of,
)


Step: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Verification:
    """The result of `verify`: a step has the same results on meshes and on one device.

    Print it, or display it in a notebook.

    Attributes:
        meshes: The meshes.
        num_steps: The number of steps that were compared on each mesh.
        differences: One `Difference` per leaf of the state and of the step's other
            results, from the mesh and the step where it was largest.
    """

    meshes: tuple[Mesh, ...]
    num_steps: int
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        return f"{self._title()}\n{_render.text_table(_HEADERS, self._rows(), _ALIGN)}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _render.html_table(_HEADERS, self._rows(), _ALIGN, caption=self._title())

    def _title(self) -> str:
        return (
            f"{_count(len(self.differences), 'leaf', 'leaves')} agree on "
            f"{' and '.join(map(repr, self.meshes))} and on one device, after "
            f"{_count(self.num_steps, 'step', 'steps')}."
        )

    def _rows(self) -> list[list[str]]:
        return [
            [leaf.path, leaf.array, f"{leaf.largest:.2g}", f"{leaf.allowed:.2g}"]
            for leaf in self.differences
        ]


_HEADERS = ["leaf", "array", "largest difference", "allowed"]
_ALIGN = "llrr"

_CAUSES = (
    "Usual causes: a mean of per-shard means, a denominator or batch statistics of one "
    "device, a missing sum over shards, a random key made from a device index, a loss "
    "across examples that includes padding. Rounding was measured and is allowed for; "
    "if this is rounding nevertheless, allow more with rtol= or atol=."
)


def verify(
    step: Step,
    state: PyTree,
    batch: Batch,
    *args: Any,
    rtol: float | None = None,
    atol: float | None = None,
    num_steps: int = 1,
    meshes: Sequence[Mesh | LayoutMap] | None = None,
    reference: Step | None = None,
    **kwargs: Any,
) -> Verification:
    """Checks that a step has the same results on a mesh as on one device.

    Use this in a test of a model or of a step, before training it on many devices. The
    step runs on the mesh from a copy of `state`, which is not used up. The reference
    runs on the first device of that mesh:

    - For a step of `make_train_step`, `make_eval_step` or `make_predict_step`, it is
      plain Flax and Optax that does what the options say and shares no code with the
      step: padding is cut off, losses are averaged by hand, and everything is computed
      in the dtype of the parameters.
    - For another step, it is your function in plain `jax.jit`. There the active mesh
      (`default_mesh`, `jax.set_mesh`) is `one_device_mesh(mesh)`, and `constrain` has
      no effect.

    All leaves of the new state and of the step's other results are compared, or the
    metrics by name. Integers and PRNG keys must be equal; NaN is equal to NaN. Floats
    may differ by the rounding of sums in another order, relative to the largest value
    of the leaf; by the rounding of the dtype that the step computes in, relative to the
    change of the leaf (for a mean of n losses, divided by the root of n); and by the
    measured effect of rounding. If a difference is larger, the reference runs eight
    more times, from arguments that are off by one rounding error. So a gradient that is
    zero except for rounding (such as that of a convolution's bias before BatchNorm) is
    no false alarm, whatever the optimizer makes of it. In bfloat16, a loss that is
    wrong by one to three percent is found, depending on the size of the batch.

    If your own step takes a number, such as a size, from a mesh that it names itself,
    the number is the same in both runs, and a mistake in it goes unseen. Take it from
    `get_default_mesh()` inside the step, or pass a `reference`.

    Args:
        step: One of these steps, a step from `compile_step`, or another callable with
            `lower`; a plain function `(state, batch, ...) -> (state, aux)` is compiled
            first.
        state: A state on a mesh of several devices.
        batch: The global batch for all steps; or an iterator over batches, such as
            `iter([first, second])`, one for each step.
        *args: Further arguments of the step.
        rtol: Relative tolerance. By default 128 times the rounding error of sums plus
            4 times that of the leaf's dtype: 1.6e-5 for float32, 3.1e-2 for bfloat16.
        atol: Absolute tolerance. By default an eighth of the rounding error of sums
            (1.5e-8), and the measured effect of rounding.
        num_steps: The number of steps, each from the state of the previous one.
        meshes: Meshes to run on, one after the other, instead of that of the state;
            state and batch are moved there. On the mesh of a `LayoutMap` the state has
            the layouts of its rules, on a plain mesh it is replicated; batches are
            sharded over the axes called `batch`, `data` or `fsdp`.
        reference: Another step to run on the one device: the step made for
            `one_device_mesh(mesh)`, if it names its mesh (as `jax.shard_map` with
            `mesh=` does), or a simpler program.
        **kwargs: Further arguments of the step, by name.

    Returns:
        The largest difference of every leaf.

    Raises:
        VerificationError: If a leaf differs (`aux/loss` is named before others), the
            step does not run on one device, or there is nothing to compare.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> def step(state, batch):
        ...     return state + batch.mean(), {"loss": batch.mean()}
        >>> state = ml.arrays.zeros(8, mesh.layout("model"))
        >>> print(
        ...     verify(
        ...         step, state, ml.arrays.ones(4, mesh.layout("batch")), num_steps=2
        ...     )
        ... )
        2 leaves agree on Mesh(batch=2, model=4) and on one device, after 2 steps.
        leaf      array         largest difference  allowed
        ────────  ────────────  ──────────────────  ───────
        state     f32[8@model]                   0  1.6e-05
        aux/loss  f32[]                          0  1.6e-05
    """
    where: dict[str, Any] = {"where": "verify", "error": VerificationError}
    num_steps = _checks.count("num_steps", num_steps, **where)
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None:
            _checks.number(name, value, at_least=0, **where)
    _check_step("step", step)
    _check_step("reference", step if reference is None else reference)
    is_plain = reference is None and isinstance(
        step, (TrainStep, EvalStep, PredictStep)
    )
    if is_plain and (args or kwargs):
        msg = (
            "verify: a step of make_train_step or make_eval_step runs from empty "
            "metrics; give only the state and the batch."
        )
        raise VerificationError(msg)
    batches = _batches(batch, num_steps)
    if meshes is None:
        runs = [(_mesh_of(state, (batches, args, kwargs)), state, batches)]
    else:
        runs = [_moved(state, batches, target) for target in _targets(meshes)]
    other = _reference_step(step, reference)
    # Compiled as the reference is: run eagerly, it would round in other places.
    if not hasattr(step, "lower"):
        step = compile_step(step, on_recompile="ignore")

    def run(state: PyTree, batch: Batch) -> tuple[PyTree, PyTree]:
        result = _run_on_mesh(step, state, batch, args, kwargs)
        if isinstance(step, PredictStep):
            return state, result
        return state_and_aux("step", result, state)

    worst: dict[str, Difference] = {}
    for mesh, placed, placed_batches in runs:
        expected = Reference(mesh, other, placed, placed_batches, args, kwargs)
        tolerance = Tolerance(rtol, atol)
        for difference in _differences(
            mesh, run, placed, placed_batches, expected, tolerance
        ):
            largest = worst.setdefault(difference.path, difference)
            worst[difference.path] = max(
                largest, difference, key=lambda leaf: leaf.badness
            )
    used = tuple(mesh for mesh, _, _ in runs)
    return Verification(used, num_steps, tuple(worst.values()))


def _differences(
    mesh: Mesh,
    run: Step,
    state: PyTree,
    batches: list[Batch],
    reference: Reference,
    tolerance: Tolerance,
) -> Iterator[Difference]:
    """Runs both, and yields the differences of every step.

    Raises:
        VerificationError: If there is one that is not rounding.
    """
    state, whole = copied(state), reference.state
    start = values_of(whole, None)
    for number, batch in enumerate(batches, 1):
        num_skipped = _num_skipped(state)
        state, aux = run(state, batch)
        reference.skips.append(_num_skipped(state) - num_skipped)
        whole, expected = reference.run(whole, number)
        leaves = leaves_of(state, aux)
        if reference.is_plain:  # a step may report more than the reference computes
            leaves = {path: leaf for path, leaf in leaves.items() if path in expected}
            expected = _as_kinds(expected, leaves)
        moved = changes(expected, start)
        num_terms = reference.num_terms(number)
        means = [path for path, x in moved.items() if reference.is_mean(path, x)]
        tolerance = replace(
            tolerance,
            eps=reference.eps,
            num_terms=dict.fromkeys(means, num_terms),
            rounding={},
        )
        differences = compare(number, leaves, expected, moved, tolerance)
        # Measured only if needed: it runs the reference eight more times.
        if tolerance.atol is None and any(leaf.is_too_large for leaf in differences):
            rounding = reference.rounding(number, moved)
            tolerance = replace(tolerance, rounding=rounding)
            differences = compare(number, leaves, expected, moved, tolerance)
        if any(leaf.is_too_large for leaf in differences):
            raise VerificationError(_message(mesh, differences))
        yield from differences


def _check_step(name: str, step: object) -> None:
    if not callable(step):
        msg = (
            f"verify: {name} must be a function (state, batch, ...) -> (state, aux), "
            f"got {step!r} of type {type(step).__name__}."
        )
        raise VerificationError(msg)


def _run_on_mesh(
    step: Step,
    state: PyTree,
    batch: Batch,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    try:
        return step(state, batch, *args, **kwargs)
    except (TypeError, KeyError, IndexError) as error:
        # A list of whole batches, from a user who expects one per step.
        batches = batch if isinstance(batch, list) else [None]
        if not all(isinstance(value, (Mapping, tuple, list)) for value in batches):
            raise
        msg = (
            f"the step does not take a list of {len(batch)} as its batch: "
            f"{type(error).__name__}: {error}. verify gives each step the whole list; "
            "for a batch per step, give iter([first, second]) and num_steps=2."
        )
        raise VerificationError(msg) from error


def _reference_step(step: Step, reference: Step | None) -> Step:
    """Returns the step for one device: plain Flax, or a jitted function."""
    if reference is None and isinstance(step, TrainStep):
        return PlainTrainStep(step)
    if reference is None and isinstance(step, EvalStep):
        return PlainEvalStep(step)
    if reference is None and isinstance(step, PredictStep):
        return PlainPredictStep(step)
    other: Any = step if reference is None else reference
    if isinstance(other, CompiledStep):
        static = other.static_argnames
        return jax.jit(vars(other)["__wrapped__"], static_argnames=static)
    return other if hasattr(other, "lower") else jax.jit(other)


def _num_skipped(state: PyTree) -> int:
    """Returns the number of steps that a state skipped for a too large loss scale."""
    extra = getattr(state, "extra", {})
    return int(extra["skipped"]) if "loss_scale" in extra else 0


def _as_kinds(expected: Values, leaves: Mapping[str, Leaf]) -> Values:
    """Returns metrics in the dtypes of the step's metrics."""
    return {
        path: value.astype(leaves[path].dtype)
        if path.startswith("aux/") and value.shape == np.shape(leaves[path])
        else value
        for path, value in expected.items()
        if path in leaves
    }


# Batches and meshes.


def _batches(batch: Batch, num_steps: int) -> list[Batch]:
    """Returns the batch of every step."""
    if not isinstance(batch, Iterator):
        return [batch] * num_steps
    batches = [item for item, _ in zip(batch, range(num_steps), strict=False)]
    if len(batches) < num_steps:
        msg = (
            f"the batches ended after {len(batches)} of num_steps={num_steps}. Give "
            "more batches, or run fewer steps."
        )
        raise VerificationError(msg)
    return batches


def _mesh_of(state: PyTree, rest: PyTree) -> Mesh:
    """Returns the mesh of a step's arguments that has several devices."""
    values = [leaf.value for leaf in _paths.flatten(state).leaves]
    leaves = (*values, *jax.tree.leaves(rest))
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    named = [x for x in shardings if isinstance(x, NamedSharding)]
    for sharding in named:
        if math.prod(sharding.mesh.shape.values()) > 1:
            return as_mesh(sharding.mesh)
    where = "on a mesh of one device" if named else "on no mesh"
    msg = (
        f"the state is {where}, and so there is nothing to compare with one device. "
        "Create it on a mesh of several; virtual_devices(8) makes eight on any machine."
    )
    raise VerificationError(msg)


def _targets(meshes: Any) -> list[Mesh | LayoutMap]:
    is_list = isinstance(meshes, Sequence) and not isinstance(meshes, str)
    kinds = (Mesh, LayoutMap)
    if not is_list or not meshes or not all(isinstance(x, kinds) for x in meshes):
        msg = (
            "verify: meshes must be a list of Mesh and LayoutMap objects, such as "
            "[ml.create_mesh({'batch': 8}), layouts]."
        )
        raise VerificationError(msg)
    return list(meshes)


def _moved(
    state: PyTree, batches: list[Batch], target: Mesh | LayoutMap
) -> tuple[Mesh, PyTree, list[Batch]]:
    """Returns another mesh, with a state and its batches on it."""
    layouts = target if isinstance(target, LayoutMap) else LayoutMap(target)
    mesh, rows = layouts.mesh, batch_layout(layouts.mesh)
    resolved = _paths.flatten(layouts.resolve(state).layouts).leaves
    layout_by_path = {leaf.path: leaf.value for leaf in resolved}
    flat = _paths.flatten(state)
    placed_state = flat.unflatten(
        [
            relayout(leaf.value, layout_by_path[leaf.path])
            if leaf.path in layout_by_path
            else leaf.value
            for leaf in flat.leaves
        ]
    )

    def placed(leaf: Leaf) -> Leaf:
        layout = leaf_layout(rows, np.ndim(leaf)) if np.ndim(leaf) else mesh.layout()
        return relayout(to_numpy(leaf), layout)

    return mesh, placed_state, jax.tree.map(placed, batches)


# Messages.


def _message(mesh: Mesh, differences: list[Difference]) -> str:
    different = [leaf for leaf in differences if leaf.is_too_large]
    # The loss is nearest to the cause: parameters differ because it does.
    different.sort(key=lambda leaf: leaf.path != "aux/loss")
    first = different[0]
    head = (
        f"step {first.step}: {first.path} {first.array} differs between {mesh!r} and "
        "one device"
    )
    if first.kinds:
        fact = f"{head}: {first.kinds}."
    else:
        where = f" at {list(first.index)}" if first.index else ""
        fact = (
            f"{head}. The largest difference is {first.largest:.3g}{where}: "
            f"{first.on_mesh} on the mesh and {first.on_one_device} on one device, "
            f"where {first.allowed:.2g} is allowed. Elements that differ: "
            f"{first.num_different:,} of {first.size:,}."
        )
    others = [leaf.path for leaf in different[1:]]
    more = f", ... ({len(others) - 5} more)" * (len(others) > 5)
    also = f": also {', '.join(others[:5])}{more}" if others else ""
    leaves = f"Leaves that differ: {len(different)} of {len(differences)}{also}."
    return f"{fact}\n{leaves}\n{_CAUSES}"


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"
