"""`verify`: the same step on a mesh and on one device, compared leaf by leaf."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from meshlayout import _checks, _paths, _render
from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout.mesh import Mesh, as_mesh
from meshlayout.metrics import Metrics
from meshlayout.step import CompiledStep, compile_step
from meshlayout.step.eval_step import EvalStep, PredictStep
from meshlayout.step.train_step import TrainStep
from meshlayout.testing.differences import (
    Difference,
    check_same_leaves,
    compare,
    largest_of,
    leaves_of,
    values_of,
    wide,
)
from meshlayout.testing.expectations import VerificationError
from meshlayout.testing.one_device import (
    alone,
    copied,
    one_device_mesh,
    to_one_device,
)


# A difference may be this many times the effect of one rounding error per input. One
# run stands for all: where a unit of relu is on in one of two runs, a gradient differs
# by up to eleven times what another run shows. Scalars, such as losses, have no jumps.
_FACTOR, _FACTOR_OF_SCALARS = 16, 4

_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}

_CAUSES = (
    "Usual causes: a mean of per-shard means, a denominator or batch statistics of one "
    "device, a missing sum over shards, a random key made from a device index. "
    "Rounding was measured and is allowed for; if this is rounding nevertheless, allow "
    "more with rtol= or atol=."
)


@dataclass(frozen=True)
class Verification:
    """The result of `verify`: a step has the same results on a mesh and on one device.

    Print it, or display it in a notebook.

    Attributes:
        mesh: The mesh.
        num_steps: The number of steps that were compared.
        differences: One `Difference` per leaf of the state and of the step's other
            results, from the step where it was largest.
    """

    mesh: Mesh
    num_steps: int
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        return f"{self._title()}\n{_render.text_table(_HEADERS, self._rows(), _ALIGN)}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _render.html_table(_HEADERS, self._rows(), _ALIGN, caption=self._title())

    def _title(self) -> str:
        return (
            f"{_count(len(self.differences), 'leaf', 'leaves')} agree on {self.mesh!r} "
            f"and on one device, after {_count(self.num_steps, 'step', 'steps')}."
        )

    def _rows(self) -> list[list[str]]:
        return [
            [leaf.path, leaf.array, f"{leaf.largest:.2g}", f"{leaf.allowed:.2g}"]
            for leaf in self.differences
        ]


_HEADERS = ["leaf", "array", "largest difference", "allowed"]
_ALIGN = "llrr"


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

    Use this in a test of a model or of a step, before training it on many devices. The
    step runs on the mesh from a copy of `state`, which is not used up, and from another
    copy on the first device of that mesh. There the mesh of `jax.set_mesh` is
    `one_device_mesh(mesh)`, and `constrain` has no effect.

    All leaves of the new state and of the step's other results are compared, or the
    metrics by name. Integers and PRNG keys must be equal; NaN is equal to NaN. Floats
    may differ by the rounding of sums in another order, relative to the largest value
    of the leaf; by the rounding of the dtype that the step computes in, relative to the
    change of the leaf; and by 16 times what rounding does to the step, which is
    measured: it runs on the one device once more, from a state and a batch that are off
    by one rounding error. So a gradient that is zero except for rounding (such as that
    of a convolution's bias before BatchNorm) is no false alarm, whatever the optimizer
    makes of it.

    A step that is wrong on one device, too, agrees with itself. If your own step takes
    a number, such as a size, from a mesh that it names itself, the number is the same
    in both runs: take it from `jax.sharding.get_abstract_mesh()` inside the step.

    Args:
        step: A step of this library, or another callable with `lower`; a plain
            function `(state, batch, ...) -> (state, aux)` is compiled first.
        state: A state on a mesh of several devices.
        batch: The global batch for all steps; or an iterator over batches, such as
            `iter([first, second])`, one for each step.
        *args: Further arguments of the step.
        rtol: Relative tolerance. By default 128 times the rounding error of sums plus
            4 times that of the leaf's dtype: 1.6e-5 for float32, 3.1e-2 for bfloat16.
        atol: Absolute tolerance. By default an eighth of the rounding error of sums
            (1.5e-8), and the measured effect of rounding.
        num_steps: The number of steps, each from the state of the previous one.
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
    if not callable(step):
        msg = (
            "verify: step must be a function (state, batch, ...) -> (state, aux), got "
            f"{step!r} of type {type(step).__name__}."
        )
        raise VerificationError(msg)
    batches = _batches(batch, num_steps)
    mesh = _mesh_of(state, (batches, args, kwargs))
    one = one_device_mesh(mesh)
    step_on_one, state_on_one = _for_one_device(step), to_one_device(state, one)
    args_on_one, kwargs_on_one = to_one_device((args, kwargs), one)

    def run_on_one(state: PyTree, batch: Batch) -> tuple[PyTree, dict[str, np.ndarray]]:
        try:
            with alone(one):
                result = step_on_one(
                    copied(state), batch, *args_on_one, **kwargs_on_one
                )
                state, aux = _state_and_aux(step, result, state)
                return state, values_of(leaves_of(state, aux))
        except VerificationError:
            raise
        except Exception as error:
            first = str(error).strip().partition("\n")[0].rstrip(".")
            msg = (
                f"the step runs on {mesh!r}, and not on one device: {first}. A mesh "
                "that the step names itself cannot be replaced: take it from "
                "jax.sharding.get_abstract_mesh() inside the step."
            )
            raise VerificationError(msg) from error

    # Compiled as on the one device: run eagerly, it would round in other places.
    is_compiled = hasattr(step, "lower")
    step = step if is_compiled else compile_step(step, on_recompile="ignore")
    batches_on_one = to_one_device(batches, one)
    lowered = step.lower(state, batches[0], *args, **kwargs)
    rng, eps = np.random.default_rng(0), _rounding_error(lowered.as_text())
    moved = _with_errors(state_on_one, rng, eps)
    starts = [values_of(leaves_of(x, None)) for x in (state_on_one, moved)]
    state, worst = copied(state), {}
    for number, (batch, batch_on_one) in enumerate(
        zip(batches, batches_on_one, strict=True), 1
    ):
        result = step(state, batch, *args, **kwargs)
        state, aux = _state_and_aux(step, result, state)
        leaves = leaves_of(state, aux)
        state_on_one, expected = run_on_one(state_on_one, batch_on_one)
        check_same_leaves(number, leaves, expected)
        moved, noisy = run_on_one(moved, _with_errors(batch_on_one, rng, eps))
        found = [
            compare(
                path,
                number,
                leaf,
                expected[path],
                _allowed(path, expected, noisy, starts, eps, rtol, atol),
            )
            for path, leaf in leaves.items()
        ]
        if any(difference.text for difference in found):
            raise VerificationError(_message(mesh, found))
        for difference in found:
            largest = worst.setdefault(difference.path, difference)
            if difference.largest > largest.largest:
                worst[difference.path] = difference
    return Verification(mesh, num_steps, tuple(worst.values()))


def _allowed(
    path: str,
    expected: Mapping[str, np.ndarray],
    noisy: Mapping[str, np.ndarray],
    starts: list[dict[str, np.ndarray]],
    eps: float,
    rtol: float | None,
    atol: float | None,
) -> float:
    """Returns how far apart the two values of a leaf may be.

    Args:
        path: The path of the leaf.
        expected: All leaves on one device.
        noisy: All leaves of the run that is off by rounding errors.
        starts: The values before the first step, of both runs.
        eps: The rounding error of the dtype that the step computes in.
        rtol: The relative tolerance, if the user gives one.
        atol: The absolute tolerance, if the user gives one.
    """
    values = expected[path]
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        return 0.0
    # A parameter's own rounding is not that of its update, which is much smaller.
    change, moved = (
        wide(x[path]) - wide(start[path]) if path in start else wide(x[path])
        for x, start in zip((expected, noisy), starts, strict=True)
    )
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        noise = largest_of(moved - change)
    noise *= _FACTOR if values.ndim else _FACTOR_OF_SCALARS
    of_leaf = float(jnp.finfo(values.dtype).eps)
    # Sums are computed in float32 or better, in another order on the mesh, and are
    # then rounded to the dtype of the leaf.
    of_sums = min(of_leaf, float(jnp.finfo(jnp.float32).eps))
    allowed = of_sums / 8 + noise if atol is None else atol
    if rtol is not None:
        return allowed + rtol * largest_of(values)
    allowed += (128 * of_sums + 4 * of_leaf) * largest_of(values)
    return allowed + 2 * max(eps - of_sums, 0) * largest_of(change)


def _with_errors(tree: PyTree, rng: np.random.Generator, eps: float) -> PyTree:
    """Returns a tree with every float off by a rounding error, up or down."""

    def with_errors(leaf: Leaf) -> Any:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            return leaf
        values = np.asarray(leaf).astype(np.float64)
        # Masks, counts and labels are integers stored as floats, and must stay so.
        if not np.any(values != np.round(values)):
            return leaf
        error = max(eps, float(jnp.finfo(dtype).eps))
        moved = values * (1 + error * rng.choice([-1.0, 1.0], values.shape))
        moved = moved.astype(dtype)
        is_placed = isinstance(leaf, jax.Array)
        return jax.device_put(moved, leaf.sharding) if is_placed else moved

    return jax.tree.map(with_errors, tree)


def _rounding_error(program: str) -> float:
    """Returns the largest rounding error of the dtypes in a program's text."""
    found = set(re.findall(r"[x<](f16|bf16|f32)>", program)) or {"f32"}
    return max(float(jnp.finfo(_DTYPES[name]).eps) for name in found)


# Steps.


def _for_one_device(step: Any) -> Any:
    """Returns a step that follows no layout map of its own."""
    if isinstance(step, (TrainStep, EvalStep, PredictStep)):
        return step.without_layouts()
    if isinstance(step, CompiledStep):
        static = step.static_argnames
        return jax.jit(step.function, static_argnames=static)
    return step if hasattr(step, "lower") else jax.jit(step)


def _state_and_aux(step: Any, result: Any, state: PyTree) -> tuple[PyTree, PyTree]:
    """Returns a step's result as the state and the rest."""
    if isinstance(step, PredictStep) or isinstance(result, Metrics):
        return state, result
    if not isinstance(result, tuple) or len(result) != 2:
        what = (
            f"a tuple of {len(result)}"
            if isinstance(result, tuple)
            else f"a value of type {type(result).__name__}"
        )
        msg = f"the step returned {what}; a step returns a pair, (state, aux)."
        raise VerificationError(msg)
    return result


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


def _message(mesh: Mesh, found: list[Difference]) -> str:
    different = [leaf for leaf in found if leaf.text]
    # The loss is nearest to the cause: parameters differ because it does.
    different.sort(key=lambda leaf: leaf.path != "aux/loss")
    first = different[0]
    others = [leaf.path for leaf in different[1:]]
    more = f", ... ({len(others) - 5} more)" * (len(others) > 5)
    also = f": also {', '.join(others[:5])}{more}" if others else ""
    return (
        f"step {first.step}: {first.path} {first.array} differs between {mesh!r} and "
        f"one device{first.text}\nLeaves that differ: {len(different)} of "
        f"{len(found)}{also}.\n{_CAUSES}"
    )


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"
