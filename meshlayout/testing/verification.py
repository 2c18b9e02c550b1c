"""`verify`: the same step on a mesh and on one device, compared leaf by leaf."""

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
from meshlayout.arrays import to_numpy
from meshlayout.mesh import Mesh, as_mesh
from meshlayout.metrics import Metrics
from meshlayout.step import CompiledStep, compile_step
from meshlayout.step.eval_step import EvalStep, PredictStep
from meshlayout.step.state_step import StateStep
from meshlayout.testing.expectations import VerificationError, leaf_text
from meshlayout.testing.one_device import alone, copied, one_device_mesh, to_one_device


# A difference may be this many times the effect of one rounding error per input. One
# run stands for all: where a unit of relu is on in one of two runs, a gradient differs
# by up to eleven times what another run shows.
_FACTOR = 12

_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}

_HEADERS = ["leaf", "array", "largest difference", "allowed"]

_CAUSES = (
    "Usual causes: a mean of per-shard means, a denominator or batch statistics of one "
    "device, a missing sum over shards, a random key made from a device index. "
    "Rounding was measured and is allowed for; if this is rounding nevertheless, allow "
    "more with rtol= or atol=."
)


@dataclass(frozen=True)
class Difference:
    """The largest difference between the two values of a leaf.

    Attributes:
        path: The path of the leaf, which begins with `state` or `aux`.
        array: Its dtype, shape and layout on the mesh, such as `f32[512@batch, 10]`.
        step: The step after which it was compared, from 1.
        largest: The largest difference; infinite if only one value is NaN.
        allowed: The largest difference that passes.
        text: What differs and by how much; empty if it passes.
    """

    path: str
    array: str
    step: int
    largest: float
    allowed: float
    text: str = ""


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
        return f"{self._title()}\n{_render.text_table(_HEADERS, self._rows(), 'llrr')}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = self._rows()
        return _render.html_table(_HEADERS, rows, "llrr", caption=self._title())

    def _title(self) -> str:
        leaves, steps = len(self.differences), self.num_steps
        return (
            f"{leaves} {'leaf' if leaves == 1 else 'leaves'} agree on {self.mesh!r} "
            f"and on one device, after {steps} step{'s' if steps > 1 else ''}."
        )

    def _rows(self) -> list[list[str]]:
        return [
            [leaf.path, leaf.array, f"{leaf.largest:.2g}", f"{leaf.allowed:.2g}"]
            for leaf in self.differences
        ]


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
    of the leaf, and by 12 times what rounding does to the change of the leaf, which is
    measured: the step runs on the one device once more, from a state and a batch that
    are off by one rounding error of the dtype it computes in. So a gradient that is
    zero except for rounding (such as that of a convolution's bias before BatchNorm) is
    no false alarm, whatever the optimizer makes of it.

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
    where: Any = {"where": "verify", "error": VerificationError}
    num_steps = _checks.count("num_steps", num_steps, **where)
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None:
            _checks.number(name, value, at_least=0, **where)
    batches = _batches(batch, num_steps)
    mesh = _mesh_of((state, batches, args, kwargs))
    one = one_device_mesh(mesh)
    step_on_one = _for_one_device(step)
    args_on_one, kwargs_on_one = to_one_device((args, kwargs), one)

    def run_on_one(state: PyTree, batch: Batch) -> tuple[PyTree, dict[str, np.ndarray]]:
        try:
            with alone(one):
                result = step_on_one(state, batch, *args_on_one, **kwargs_on_one)
                state, aux = _state_and_aux(step, result, state)
                return state, _values(state, aux)
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
    if not hasattr(step, "lower"):
        step = compile_step(step, on_recompile="ignore")
    lowered = step.lower(state, batches[0], *args, **kwargs)
    rng, eps = np.random.default_rng(0), _rounding_error(lowered.as_text())
    whole = to_one_device(state, one)
    moved = _with_errors(whole, rng, eps)
    starts = _values(whole, None), _values(moved, None)
    state, worst = copied(state), {}
    for number, batch in enumerate(batches, 1):
        result = step(state, batch, *args, **kwargs)
        state, aux = _state_and_aux(step, result, state)
        batch_on_one = to_one_device(batch, one)
        whole, expected = run_on_one(whole, batch_on_one)
        moved, noisy = run_on_one(moved, _with_errors(batch_on_one, rng, eps))
        leaves = _leaves(state, aux)
        if leaves.keys() != expected.keys():
            names = ", ".join(sorted(map(repr, leaves.keys() ^ expected.keys())))
            msg = (
                f"step {number}: the step returns {names} only on the mesh or only on "
                "one device. Its results must not depend on the number of devices."
            )
            raise VerificationError(msg)
        noise = _noise(expected, noisy, *starts)
        found = []
        for path, leaf in leaves.items():
            allowed = _allowed(expected[path], noise[path], rtol, atol)
            found.append(_compared(path, number, leaf, expected[path], allowed))
        if any(difference.text for difference in found):
            raise VerificationError(_message(mesh, found))
        for difference in found:
            before = worst.setdefault(difference.path, difference)
            worst[difference.path] = max(before, difference, key=lambda x: x.largest)
    return Verification(mesh, num_steps, tuple(worst.values()))


# Values and how far they may be apart.


def _leaves(state: PyTree, aux: PyTree) -> dict[str, Leaf]:
    """Returns the leaves of a step's results by path."""
    aux = aux.compute() if isinstance(aux, Metrics) else aux
    return {
        "/".join(filter(None, [name, leaf.path])): leaf.value
        for name, tree in (("state", state), ("aux", aux))
        for leaf in _paths.flatten(tree).leaves
    }


def _values(state: PyTree, aux: PyTree) -> dict[str, np.ndarray]:
    """Returns the leaves of a step's results on the host."""
    leaves = _leaves(state, aux).items()
    return {path: np.asarray(to_numpy(leaf)) for path, leaf in leaves}


def _wide(values: np.ndarray) -> np.ndarray:
    """Returns numbers in a dtype in which differences are exact enough."""
    is_complex = jnp.issubdtype(values.dtype, jnp.complexfloating)
    return values.astype(np.complex128 if is_complex else np.float64)


def _largest(values: np.ndarray) -> float:
    """Returns the largest finite magnitude of an array."""
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def _noise(
    expected: Mapping[str, np.ndarray],
    noisy: Mapping[str, np.ndarray],
    start: Mapping[str, np.ndarray],
    noisy_start: Mapping[str, np.ndarray],
) -> dict[str, float]:
    """Returns what rounding does to the change of each leaf."""
    noise = {}
    for path, values in expected.items():
        with np.errstate(invalid="ignore"):  # infinity minus infinity
            effect = _wide(noisy[path]) - _wide(values)
            if path in start:
                # A parameter's own error is not that of its update, which is smaller.
                effect -= _wide(noisy_start[path]) - _wide(start[path])
        noise[path] = _largest(effect)
    return noise


def _allowed(
    values: np.ndarray, noise: float, rtol: float | None, atol: float | None
) -> float:
    """Returns how far apart the two values of a leaf may be."""
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        return 0.0
    of_leaf = float(jnp.finfo(values.dtype).eps)
    # Sums are computed in float32 or better, in another order on the mesh, and are
    # then rounded to the dtype of the leaf.
    of_sums = min(of_leaf, float(jnp.finfo(jnp.float32).eps))
    rtol = 128 * of_sums + 4 * of_leaf if rtol is None else rtol
    atol = of_sums / 8 + _FACTOR * noise if atol is None else atol
    return atol + rtol * _largest(_wide(values))


def _compared(
    path: str, step: int, leaf: Leaf, expected: np.ndarray, allowed: float
) -> Difference:
    """Compares the value of a leaf on the mesh with that on one device."""
    array, values = leaf_text(leaf), np.asarray(to_numpy(leaf))
    kinds = [_render.array_text(x.dtype, x.shape) for x in (values, expected)]
    if kinds[0] != kinds[1]:
        text = f": it is {kinds[0]} on the mesh and {kinds[1]} on one device."
        return Difference(path, array, step, np.inf, 0.0, text)
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        distances = np.abs(_wide(values) - _wide(expected))
    both_nan = (values != values) & (expected != expected)
    # NaN on one side alone, and integers so large that floats do not tell them apart.
    distances = np.where(distances > 0, distances, np.inf)
    distances = np.where((values == expected) | both_nan, 0.0, distances)
    largest, num_wrong = float(distances.max(initial=0.0)), np.sum(distances > allowed)
    if not num_wrong:
        return Difference(path, array, step, largest, allowed)
    index = tuple(map(int, np.unravel_index(distances.argmax(), distances.shape)))
    text = (
        f". The largest difference is {largest:.3g}"
        f"{f' at {list(index)}' if index else ''}: {values[index]} on the mesh and "
        f"{expected[index]} on one device, where {allowed:.2g} is allowed. Elements "
        f"that differ: {num_wrong:,} of {values.size:,}."
    )
    return Difference(path, array, step, largest, allowed, text)


def _with_errors(tree: PyTree, rng: np.random.Generator, eps: float) -> PyTree:
    """Returns a tree with every float off by a rounding error, up or down."""

    def with_errors(leaf: Leaf) -> Leaf:
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

    return jax.tree.map(with_errors, copied(tree))


def _rounding_error(program: str) -> float:
    """Returns the largest rounding error of the dtypes in a program's text."""
    found = set(re.findall(r"[x<](f16|bf16|f32)>", program)) or {"f32"}
    return max(float(jnp.finfo(_DTYPES[name]).eps) for name in found)


# Steps.


def _for_one_device(step: Any) -> Any:
    """Returns a step that follows no layout map of its own."""
    if isinstance(step, StateStep):
        return step.without_layouts()
    if isinstance(step, CompiledStep):
        static = step.static_argnames
        return jax.jit(step.function, static_argnames=static)
    return step if hasattr(step, "lower") else jax.jit(step)


def _state_and_aux(step: Any, result: Any, state: PyTree) -> tuple[PyTree, PyTree]:
    """Returns a step's result as the state and the rest."""
    if isinstance(step, (EvalStep, PredictStep)):
        return state, result
    if isinstance(result, tuple) and len(result) == 2:
        return result
    msg = (
        f"the step returned {_checks.type_text(result)}; a step returns a pair, "
        "(state, aux)."
    )
    raise VerificationError(msg)


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


def _mesh_of(arguments: PyTree) -> Mesh:
    """Returns the mesh of a step's arguments that has several devices."""
    leaves = [leaf.value for leaf in _paths.flatten(arguments).leaves]
    for sharding in (getattr(leaf, "sharding", None) for leaf in leaves):
        if isinstance(sharding, NamedSharding) and sharding.num_devices > 1:
            return as_mesh(sharding.mesh)
    msg = (
        "the state is on no mesh of several devices, and so there is nothing to "
        "compare with one device. virtual_devices(8) makes eight on any machine."
    )
    raise VerificationError(msg)


def _message(mesh: Mesh, found: list[Difference]) -> str:
    different = [leaf for leaf in found if leaf.text]
    # The loss is nearest to the cause: parameters differ because it does.
    different.sort(key=lambda leaf: leaf.path != "aux/loss")
    first, *others = different
    paths = [leaf.path for leaf in others[:5]]
    if len(others) > 5:
        paths.append(f"... ({len(others) - 5} more)")
    also = f": also {', '.join(paths)}" if paths else ""
    return (
        f"step {first.step}: {first.path} {first.array} differs between {mesh!r} and "
        f"one device{first.text}\nLeaves that differ: {len(different)} of "
        f"{len(found)}{also}.\n{_CAUSES}"
    )
