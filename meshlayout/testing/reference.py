"""What `verify` compares with: a step on one device, and how far rounding moves it.

A gradient that is zero in exact arithmetic (of a convolution's bias before BatchNorm)
is nothing but rounding, and Adam makes whole steps of it; a fixed tolerance is then
either a false alarm or blind. So where values differ, the reference runs again from
parameters and batches that are off by one rounding error each. The resulting change is
what rounding may cause: it scales with the sums, and is carried through the optimizer
and through earlier steps.
"""

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from meshlayout import _jax, _paths
from meshlayout._annotations import Batch, DType, Leaf, PyTree
from meshlayout._default_mesh import default_mesh, get_default_mesh
from meshlayout.arrays import copy_to_mesh, to_numpy
from meshlayout.errors import MeshError, RecompileWarning
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap, activate
from meshlayout.mesh import Mesh, as_mesh
from meshlayout.mesh_creation import create_mesh
from meshlayout.metrics import Metrics
from meshlayout.testing.expectations import VerificationError
from meshlayout.testing.plain_step import PlainStep, coarsest


Values: TypeAlias = dict[str, np.ndarray]
"""The leaves of a state and of a step's other results, by path, on the host."""

# Measured for convolutions and perceptrons in float32, bfloat16 and float16: with eight
# runs, differences are up to 2.5 times the largest of theirs. With three they are up to
# 11 times as large: a unit of relu that is on in one dtype and off in the other changes
# a gradient as a whole, in one of several runs.
_FACTOR = 4
_NUM_RUNS = 8

# A mean over examples has no such jumps. Values that are off by `eps` either way are
# off 3.5 times as much as rounded ones are, so that this is seven standard deviations.
_FACTOR_OF_MEANS = 2

# The operations whose rounding adds up.
_SUMS = {"dot_general", "conv_general_dilated", "reduce_sum", "cumsum", "scatter-add"}


class Reference:
    """A step on one device.

    Args:
        mesh: The mesh of the step that is compared with it.
        step: A step in plain Flax, or a jitted function.
        state: The state to start from, on that mesh.
        batches: The batch of every step.
        args: Further arguments of the step.
        kwargs: Further arguments of the step, by name.

    Attributes:
        is_plain: Whether the step is one in plain Flax.
        state: The state to start from, on one device.
        skips: How many steps float16 has skipped on the mesh, in each step so far.
    """

    def __init__(
        self,
        mesh: Mesh,
        step: Callable[..., Any],
        state: PyTree,
        batches: list[Batch],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._mesh, self._alone = mesh, one_device_mesh(mesh)
        self._step: Any = step
        self.is_plain = isinstance(step, PlainStep)
        if isinstance(step, PlainStep):
            state = step.prepared(state)
        self.state = self._on_one_device(state)
        place = _on_host if self.is_plain else self._on_one_device
        self._batches = jax.tree.map(place, batches)
        self._args, self._kwargs = self._on_one_device((args, dict(kwargs)))
        self.skips: list[int] = []
        self._perturbed_runs = [self._perturbed_run(seed) for seed in range(_NUM_RUNS)]
        self._perturbed: list[Values] = []
        self._num_perturbed_steps = 0

    def run(
        self, state: PyTree, number: int, rng: np.random.Generator | None = None
    ) -> tuple[PyTree, Values]:
        """Runs a step, and returns the next state and all values by path.

        Args:
            state: The state, which is copied.
            number: The number of the step, from 1.
            rng: Makes rounding errors in the batch; with it, plain Flax also computes
                in the dtype that the step computes in.

        Raises:
            VerificationError: If the step does not run.
        """
        batch = self._batches[number - 1]
        batch = batch if rng is None else self._with_errors(batch, rng)
        state = copied(state)
        try:
            with alone(self._alone):
                if self.is_plain:
                    dtype = None if rng is None else coarsest(self._step.dtypes)
                    skipped = self.skips[number - 1]
                    result = self._step(dtype, state, batch, skipped)
                else:
                    result = self._step(state, batch, *self._args, **self._kwargs)
        except Exception as error:
            first = str(error).strip().partition("\n")[0].rstrip(".")
            msg = (
                f"the step runs on {self._mesh!r}, and not on one device: {first}. A "
                "mesh that the step names itself cannot be replaced: take it from "
                "get_default_mesh() inside the step, or give reference= the step made "
                "for one_device_mesh(mesh)."
            )
            raise VerificationError(msg) from error
        state, aux = state_and_aux("reference", result, state)
        return state, values_of(state, aux)

    @functools.cached_property
    def eps(self) -> float:
        """The rounding error of the dtype that the step, once run, computes in."""
        if self.is_plain:
            return _rounding_error(self._step.jaxpr, self._step.dtypes)
        if not hasattr(self._step, "trace"):
            return _rounding_error(None, ())
        with alone(self._alone):
            args = (self.state, self._batches[0], *self._args)
            return _rounding_error(self._step.trace(*args, **self._kwargs).jaxpr, ())

    def rounding(self, number: int, expected: Values) -> dict[str, float]:
        """Returns how far rounding may move each leaf up to a step, by path.

        Args:
            number: The number of the step, from 1; no less than in the last call.
            expected: The changes of the leaves without errors.
        """
        while self._num_perturbed_steps < number:
            self._num_perturbed_steps += 1
            self._perturbed = [next(run) for run in self._perturbed_runs]
        return {path: self._rounding(path, x) for path, x in expected.items()}

    def _rounding(self, path: str, expected: np.ndarray) -> float:
        distances = [_distance(run[path], expected) for run in self._perturbed]
        if self.is_mean(path, expected):
            return _FACTOR_OF_MEANS * float(np.sqrt(np.mean(np.square(distances))))
        return _FACTOR * max(distances)

    def is_mean(self, path: str, values: Leaf) -> bool:
        """Returns whether a leaf is a mean over examples, as losses and metrics are."""
        return self.is_plain and path.startswith("aux/") and not np.shape(values)

    def num_terms(self, number: int) -> int:
        """Returns how many losses a step averages; 1 if that is not known."""
        batch = self._batches[number - 1]
        return self._step.num_terms(batch) if self.is_plain else 1

    def _perturbed_run(self, seed: int) -> Iterator[Values]:
        """Yields the changes of the leaves after each step of a run with errors."""
        rng = np.random.default_rng(seed)
        state = self._with_errors(self.state, rng)
        start = values_of(state, None)
        for number in itertools.count(1):
            state, values = self.run(state, number, rng)
            yield changes(values, start)

    def _with_errors(self, tree: PyTree, rng: np.random.Generator) -> PyTree:
        """Returns a tree with every float off by its rounding error."""

        def with_errors(leaf: Leaf) -> Any:
            dtype = getattr(leaf, "dtype", None)
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                return leaf
            values = np.asarray(leaf).astype(np.float64)
            # Masks, counts and labels are integers stored as floats, and must stay so.
            if not np.any(values != np.round(values)):
                return leaf
            eps = max(self.eps, float(jnp.finfo(dtype).eps))
            moved = values * (1 + eps * rng.choice([-1.0, 1.0], values.shape))
            moved = moved.astype(dtype)
            is_placed = isinstance(leaf, jax.Array)
            return jax.device_put(moved, leaf.sharding) if is_placed else moved

        return jax.tree.map(with_errors, tree)

    def _on_one_device(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: _to_one_device(leaf, self._alone), tree)


# Values.


def state_and_aux(name: str, result: Any, state: PyTree) -> tuple[PyTree, PyTree]:
    """Returns a step's result as the state and the rest; metrics alone are the rest."""
    if isinstance(result, Metrics):
        return state, result
    if not isinstance(result, tuple) or len(result) != 2:
        what = (
            f"a tuple of {len(result)}"
            if isinstance(result, tuple)
            else f"a value of type {type(result).__name__}"
        )
        msg = f"the {name} returned {what}; a step returns a pair, (state, aux)."
        raise VerificationError(msg)
    return result


def leaves_of(state: PyTree, aux: PyTree) -> dict[str, Leaf]:
    """Returns the leaves of a step's results by path."""
    aux = aux.compute() if isinstance(aux, Metrics) else aux
    return {
        "/".join(filter(None, [name, leaf.path])): leaf.value
        for name, tree in (("state", state), ("aux", aux))
        for leaf in _paths.flatten(tree).leaves
    }


def values_of(state: PyTree, aux: PyTree) -> Values:
    """Returns the leaves of a step's results by path, on the host."""
    leaves = leaves_of(state, aux)
    return {path: np.asarray(to_numpy(leaf)) for path, leaf in leaves.items()}


def changes(values: Values, start: Values) -> Values:
    """Returns the changes of floats since the start, and other values unchanged.

    A parameter's own rounding is not that of its update, which is much smaller.
    """
    return {
        path: value - start[path]
        if path in start and jnp.issubdtype(value.dtype, jnp.inexact)
        else value
        for path, value in values.items()
    }


def wide(values: np.ndarray) -> np.ndarray:
    """Returns floats in a dtype in which their differences are exact enough."""
    is_complex = jnp.issubdtype(values.dtype, jnp.complexfloating)
    return values.astype(np.complex128 if is_complex else np.float64)


def _distance(values: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest finite distance of two arrays of floats; 0 of others."""
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        return 0.0
    with np.errstate(invalid="ignore"):
        distances = np.abs(wide(values) - wide(expected))
    return float(np.max(distances, where=np.isfinite(distances), initial=0.0))


def _rounding_error(jaxpr: Any, dtypes: Iterable[DType]) -> float:
    """Returns the largest rounding error of the dtypes that a program adds up in.

    Args:
        jaxpr: The traced program; None if there is none.
        dtypes: Others that are known.
    """
    known = {jnp.dtype(dtype) for dtype in dtypes}
    for eqn in () if jaxpr is None else _jax.equations(jaxpr):
        if eqn.primitive.name in _SUMS:
            known.update(var.aval.dtype for var in eqn.outvars)
    return float(jnp.finfo(coarsest(known) or jnp.float32).eps)


# One device.


def one_device_mesh(mesh: Mesh | jax.sharding.Mesh) -> Mesh:
    """Returns a mesh with the same axes, all of size 1, on its first device.

    On several processes, it is each process's own first device.

    Args:
        mesh: The mesh.

    Raises:
        MeshError: If this process has no devices in the mesh.

    Example:
        >>> import meshlayout as ml
        >>> one_device_mesh(ml.create_mesh({"batch": 2, "model": 4}))
        Mesh(batch=1, model=1)
    """
    mesh = as_mesh(mesh)
    if not mesh.local_devices:
        msg = (
            f"one_device_mesh: process {jax.process_index()} has no devices in "
            f"{mesh!r}. Call this on the processes of the mesh."
        )
        raise MeshError(msg)
    return create_mesh(
        dict.fromkeys(mesh.axis_names, 1),
        devices=mesh.local_devices[:1],
        axis_types=dict(zip(mesh.axis_names, mesh.axis_types, strict=True)),
    )


@functools.lru_cache(maxsize=8)
def _map_without_rules(mesh: Mesh) -> LayoutMap:
    """Returns one map per mesh: under another map JAX compiles everything again."""
    return LayoutMap(mesh)


@contextlib.contextmanager
def alone(mesh: Mesh) -> Iterator[None]:
    """Replaces the active mesh by one of one device, and layout maps by none.

    Args:
        mesh: A mesh of one device.
    """
    outer, default = _jax.concrete_mesh(), get_default_mesh()
    with contextlib.ExitStack() as stack:
        if outer is not None:
            stack.enter_context(jax.set_mesh(one_device_mesh(outer).jax_mesh))
        if default is not None:
            stack.enter_context(default_mesh(one_device_mesh(default)))
        # Without a rule, `constrain` leaves every value where it is.
        stack.enter_context(activate(_map_without_rules(mesh)))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", RecompileWarning)
        yield


def _to_one_device(leaf: Leaf, mesh: Mesh) -> Any:
    """Copies an array to a mesh of one device; other leaves are unchanged."""
    if not isinstance(leaf, jax.Array):
        return leaf
    values = to_numpy(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        values = jax.random.wrap_key_data(values, impl=jax.random.key_impl(leaf))
    layout = Layout([...], mesh)
    if isinstance(leaf.sharding, NamedSharding):
        now = Layout.of(leaf)
        layout = Layout(now.specs, mesh, memory_kind=now.memory_kind)
    # The program depends on it, whether an array is weakly typed.
    is_weak = jax.typeof(leaf).weak_type
    return _jax.with_weak_type(copy_to_mesh(values, layout), weak_type=is_weak)


def _on_host(leaf: Leaf) -> Any:
    """Copies an array to the host, where padding can be cut off; keys stay."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return leaf
    return np.asarray(to_numpy(leaf))


def copied(tree: PyTree) -> Any:
    """Copies the arrays of a tree, each on its own devices."""
    return jax.tree.map(_copied, tree)


def _copied(leaf: Leaf) -> Any:
    if isinstance(leaf, jax.Array) and _jax.is_committed(leaf):
        return _jax.put(leaf, leaf.sharding, may_alias=False)
    return leaf.copy() if isinstance(leaf, (np.ndarray, jax.Array)) else leaf
