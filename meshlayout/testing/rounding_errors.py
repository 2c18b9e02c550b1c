"""How much of a difference is rounding: the reference, rerun with perturbed inputs.

A gradient that is zero in exact arithmetic (of a convolution's bias before BatchNorm)
is nothing but rounding, and Adam makes whole steps of it; a fixed tolerance is then
either a false alarm or blind. So where values differ, the reference runs again from
parameters and batches that are off by one rounding error each. The resulting change is
what rounding may cause: it scales with the sums, and is carried through the optimizer
and through earlier steps.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from meshlayout import _jax
from meshlayout._annotations import Leaf, PyTree


Values: TypeAlias = dict[str, np.ndarray]
"""The leaves of a state and of a step's other results, by path, on the host."""

# Every operation rounds again, and in another order on every mesh. Measured for
# convolutions and perceptrons in float32, bfloat16 and float16: up to 5 times.
_FACTOR = 8
_NUM_RUNS = 3

# The operations whose rounding adds up.
_SUMS = {"dot_general", "conv_general_dilated", "reduce_sum", "cumsum", "scatter-add"}


class RoundingErrors:
    """Measures how far rounding moves what a reference computes.

    Args:
        run: Runs a step of the reference. It takes a state, the step's number and what
            makes errors in the batch; it returns the next state, and all values.
        values_of: Returns the values of a state.
        state: The state to begin with.
        eps: The rounding error of the dtype that is computed in.
    """

    def __init__(
        self,
        run: Callable[[PyTree, int, Callable[[PyTree], PyTree]], tuple[PyTree, Values]],
        values_of: Callable[[PyTree], Values],
        state: PyTree,
        eps: float,
    ) -> None:
        self._run, self._eps = run, eps
        self._start = values_of(state)
        self._generators = [np.random.default_rng(seed) for seed in range(_NUM_RUNS)]
        self._states = [self._off(state, rng) for rng in self._generators]
        self._starts = list(map(values_of, self._states))
        self._values: list[Values] = []
        self._step = 0

    def after(self, step: int, expected: Values) -> dict[str, float]:
        """Returns how much each leaf may differ after a step, by path.

        Args:
            step: The step's number, from 1.
            expected: What the reference computes without errors.
        """
        while self._step < step:
            self._step += 1
            runs = zip(self._states, self._generators, strict=True)
            results = [self._one(state, rng) for state, rng in runs]
            self._states = [state for state, _ in results]
            self._values = [values for _, values in results]
        expected = changes(expected, self._start)
        runs = [
            changes(values, start)
            for values, start in zip(self._values, self._starts, strict=True)
        ]
        return {
            path: _FACTOR * max(_distance(run[path], value) for run in runs)
            for path, value in expected.items()
        }

    def _one(self, state: PyTree, rng: np.random.Generator) -> tuple[PyTree, Values]:
        return self._run(state, self._step, lambda batch: self._off(batch, rng))

    def _off(self, tree: PyTree, rng: np.random.Generator) -> PyTree:
        """Returns a tree with every float off by its rounding error."""

        def off(leaf: Leaf) -> Any:
            dtype = getattr(leaf, "dtype", None)
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                return leaf
            values = np.asarray(leaf).astype(np.float64)
            # Masks, counts and labels are whole numbers, and must stay so.
            if not np.any(values != np.round(values)):
                return leaf
            eps = max(self._eps, float(jnp.finfo(dtype).eps))
            moved = values * (1 + eps * rng.choice([-1.0, 1.0], values.shape))
            moved = moved.astype(dtype)
            is_placed = isinstance(leaf, jax.Array)
            return jax.device_put(moved, leaf.sharding) if is_placed else moved

        return jax.tree.map(off, tree)


def changes(values: Values, start: Values) -> Values:
    """Returns the change of floats since the start.

    A parameter's own rounding is not that of its update, which is much smaller.
    """
    return {
        path: value - start[path]
        if path in start and jnp.issubdtype(value.dtype, jnp.inexact)
        else value
        for path, value in values.items()
    }


def _distance(values: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest finite distance of two arrays of floats; 0 of others."""
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        return 0.0
    is_complex = jnp.issubdtype(expected.dtype, jnp.complexfloating)
    kind = np.complex128 if is_complex else np.float64
    with np.errstate(invalid="ignore"):
        apart = np.abs(values.astype(kind) - expected.astype(kind))
    return float(np.max(apart, where=np.isfinite(apart), initial=0.0))


def coarsest(dtypes: Iterable[Any]) -> Any:
    """Returns the floating-point dtype that rounds most; None if there is none.

    Example:
        >>> coarsest(["float32", "bfloat16", "int32"])
        dtype(bfloat16)
    """
    floats = [jnp.dtype(x) for x in dtypes if jnp.issubdtype(x, jnp.inexact)]
    return max(floats, key=lambda dtype: jnp.finfo(dtype).eps, default=None)


def rounding_error(jaxpr: Any, dtypes: Iterable[Any] = ()) -> float:
    """Returns the largest rounding error of the dtypes that a program adds up in.

    Args:
        jaxpr: The traced program; None if there is none.
        dtypes: Others that are known.
    """
    found = {jnp.dtype(dtype) for dtype in dtypes}
    todo = [] if jaxpr is None else [jaxpr]
    while todo:
        for eqn in todo.pop().eqns:
            todo += _jax.inner_jaxprs(eqn)
            if eqn.primitive.name in _SUMS:
                found.update(var.aval.dtype for var in eqn.outvars)
    return float(jnp.finfo(coarsest(found) or jnp.float32).eps)
