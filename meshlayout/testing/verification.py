"""`verify`: the same step on a mesh and on one device, compared leaf by leaf."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshlayout import _paths, _render
from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout._batches import batch_layout, leaf_layout
from meshlayout._checks import count, number
from meshlayout.arrays import relayout, to_numpy
from meshlayout.layout_map import LayoutMap
from meshlayout.mesh import Mesh, as_mesh
from meshlayout.metrics import Metrics
from meshlayout.step import CompiledStep, compile_step
from meshlayout.step.eval_step import EvalStep
from meshlayout.step.train_step import TrainStep
from meshlayout.testing.differences import Difference, Tolerance, compare, values_of
from meshlayout.testing.expectations import VerificationError
from meshlayout.testing.one_device import alone, copied, one_device_mesh, to_one_device
from meshlayout.testing.plain_step import PlainEvalStep, PlainTrainStep, computed
from meshlayout.testing.rounding_errors import RoundingErrors, Values, rounding_error


Step: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Verification:
    """The result of `verify`: a step computes on meshes what it computes on one device.

    Text by `str` or `print`, a table in notebooks.

    Attributes:
        meshes: The meshes.
        num_steps: How many steps were compared on each.
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
    "device, a sum over shards that is missing, a random key made from a device's "
    "index, a loss in which examples meet that sees the padding. Rounding was measured "
    "and is allowed for; if it is rounding all the same, say so with rtol= or atol=."
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
    """Checks that a step computes on a mesh what it computes on one device.

    Use this in a test of a model or of a step, before training it on many devices. The
    step runs on the mesh from a copy of `state`, which is not used up. What it is
    compared with runs on the first device of that mesh:

    - for a step of `make_train_step` or `make_eval_step`, plain Flax and Optax that
      does what the options say, written out once more and sharing no code with the
      step: padding is cut off, losses are averaged by hand, and everything is computed
      in the dtype of the parameters;
    - for another step, the user's function in plain `jax.jit`. The active mesh
      (`default_mesh`, `jax.set_mesh`) is `one_device_mesh(mesh)` there, and `constrain`
      leaves values where they are.

    It compares all leaves of the new state and of the step's other results, or the
    metrics by name. Integers and PRNG keys must be equal; NaN is equal to NaN.
    Floats may be apart by the rounding of sums in another order, relative to the leaf's
    largest value; by the rounding of the dtype that the step computes in, relative to
    how much the leaf has changed; and by what rounding was seen to do to the leaf.
    Where there is a larger difference, the reference runs three times more, from
    arguments that are off by one rounding error. So a gradient that is zero but for
    rounding (of a convolution's bias before BatchNorm) is not a false alarm, whatever
    the optimizer makes of it.

    A number that a step of your own takes from a mesh it names itself, such as its
    size, is the same in both runs, and a mistake in it is not seen. Take it from
    `get_default_mesh()` inside the step, or pass a `reference`.

    Args:
        step: What `make_train_step`, `make_eval_step` or `compile_step` returned, or
            another callable with `lower`; a plain function `(state, batch, ...) ->
            (state, aux)` is compiled first.
        state: A state on a mesh of several devices.
        batch: The global batch, for every step; or an iterator over batches, such as
            `iter([first, second])`, one for each step.
        *args: Further arguments of the step.
        rtol: Relative tolerance, instead of what the dtypes suggest: 128 times the
            rounding error of sums and 4 times that of the leaf's own dtype, which is
            1.6e-5 for float32 and 3.1e-2 for bfloat16.
        atol: Absolute tolerance, instead of an eighth of the rounding error of sums
            (1.5e-8) and of the rounding that is measured.
        num_steps: How many steps to run, each from the state of the one before.
        meshes: Meshes to run on, one after the other, instead of the state's: state and
            batch are moved there. On a `LayoutMap`'s mesh the state is laid out by its
            rules, on a plain mesh it is replicated; batches are sharded over the axes
            called `batch`, `data` or `fsdp`.
        reference: What to run on the one device instead: the step made for
            `one_device_mesh(mesh)`, where it names its mesh (as `jax.shard_map` with
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
    num_steps = count("num_steps", num_steps, where="verify", error=VerificationError)
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None:
            number(name, value, at_least=0, where="verify", error=VerificationError)
    _check_step("step", step)
    _check_step("reference", step if reference is None else reference)
    is_plain = reference is None and isinstance(step, (TrainStep, EvalStep))
    if is_plain and (args or kwargs):
        msg = (
            "verify: a step of make_train_step or make_eval_step is run from empty "
            "metrics; leave out what is given besides the state and the batch."
        )
        raise VerificationError(msg)
    batches = _batches(batch, num_steps)
    if meshes is None:
        runs = [(_mesh_of(state, (batches, args, kwargs)), state, batches)]
    else:
        runs = [
            (_as_layouts(target).mesh, *_moved(state, batches, target))
            for target in _targets(meshes)
        ]
    worst: dict[str, Difference] = {}
    for mesh, placed, placed_batches in runs:
        arguments = _Arguments(placed, placed_batches, args, kwargs)
        other = _reference(step, reference, mesh, arguments)
        differences = _compared(step, other, mesh, arguments, rtol, atol)
        for difference in differences:
            largest = worst.setdefault(difference.path, difference)
            worst[difference.path] = max(
                largest, difference, key=lambda leaf: leaf.badness
            )
    used = tuple(mesh for mesh, _, _ in runs)
    return Verification(used, num_steps, tuple(worst.values()))


@dataclass(frozen=True)
class _Arguments:
    """The arguments of a step: a state, a batch for every step, and the rest."""

    state: PyTree
    batches: list[Batch]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _compared(
    step: Step,
    reference: "_Reference",
    mesh: Mesh,
    arguments: _Arguments,
    rtol: float | None,
    atol: float | None,
) -> Iterator[Difference]:
    """Runs both, and yields the differences of every step.

    Raises:
        VerificationError: If there is one that is not rounding.
    """
    run = step if hasattr(step, "lower") else compile_step(step, on_recompile="ignore")
    sharded, whole = copied(arguments.state), reference.state
    tolerance = Tolerance(rtol, atol, reference.eps)
    start = values_of("state", whole)
    errors: RoundingErrors | None = None
    for index, batch in enumerate(arguments.batches, 1):
        before = sharded
        result = _on_mesh(run, sharded, batch, arguments)
        sharded, aux = _pair("step", result, sharded)
        reference.skips.append(_num_skipped(sharded) - _num_skipped(before))
        whole, expected = reference.run(whole, index)
        found = {**_leaves("state", sharded), **_leaves("aux", aux)}
        if reference.is_plain:  # a step may report more than the reference knows of
            found = {path: leaf for path, leaf in found.items() if path in expected}
            expected = _as_kinds(expected, found)
        differences = compare(index, found, expected, start, tolerance)
        if atol is None and any(leaf.is_too_large for leaf in differences):
            errors = errors or RoundingErrors(
                reference.run,
                lambda state: values_of("state", state),
                reference.state,
                reference.eps,
            )
            allowed = errors.after(index, expected)
            differences = [
                leaf.allowing(leaf.allowed + allowed[leaf.path]) for leaf in differences
            ]
        if any(leaf.is_too_large for leaf in differences):
            raise VerificationError(_message(mesh, differences))
        yield from differences


# On the mesh.


def _check_step(name: str, step: object) -> None:
    if not callable(step):
        msg = (
            "verify takes a function (state, batch, ...) -> (state, aux) as its "
            f"{name}, and got {step!r} of type {type(step).__name__}."
        )
        raise VerificationError(msg)


def _on_mesh(step: Step, state: PyTree, batch: Batch, rest: _Arguments) -> Any:
    try:
        return step(state, batch, *rest.args, **rest.kwargs)
    except (TypeError, KeyError, IndexError) as error:
        if not isinstance(batch, list) or not all(map(_is_batch, batch)):
            raise
        msg = (
            f"the step does not take a list of {len(batch)} as its batch: "
            f"{type(error).__name__}: {error}. verify gives each step the whole list; "
            "for a batch per step, give iter([first, second]) and num_steps=2."
        )
        raise VerificationError(msg) from error


def _is_batch(value: object) -> bool:
    return isinstance(value, (Mapping, tuple, list))


def _pair(name: str, result: Any, state: PyTree) -> tuple[PyTree, PyTree]:
    """Returns a step's result as the state and the rest, or metrics alone."""
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


def _leaves(name: str, tree: PyTree) -> dict[str, Leaf]:
    tree = computed(tree) if isinstance(tree, Metrics) else tree
    return {
        "/".join(filter(None, [name, leaf.path])): leaf.value
        for leaf in _paths.flatten(tree).leaves
    }


def _num_skipped(state: PyTree) -> int:
    """Returns how many steps a state has skipped as its loss scale was too large."""
    extra = getattr(state, "extra", {})
    return int(extra["skipped"]) if "loss_scale" in extra else 0


def _batches(batch: Batch, num_steps: int) -> list[Batch]:
    """Returns the batch of every step."""
    if not isinstance(batch, Iterator):
        return [batch] * num_steps
    batches = [item for item, _ in zip(batch, range(num_steps), strict=False)]
    if len(batches) < num_steps:
        msg = (
            f"the batches ended after {len(batches)} of num_steps={num_steps}. Give "
            "more of them, or run fewer steps."
        )
        raise VerificationError(msg)
    return batches


def _mesh_of(state: PyTree, rest: PyTree) -> Mesh:
    """Returns the mesh of several devices of a step's arguments."""
    values = [leaf.value for leaf in _paths.flatten(state).leaves]
    leaves = (*values, *jax.tree.leaves(rest))
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    named = [x for x in shardings if isinstance(x, NamedSharding)]
    for sharding in named:
        if math.prod(sharding.mesh.shape.values()) > 1:
            return as_mesh(sharding.mesh)
    where = "on a mesh of one device" if named else "on no mesh"
    msg = (
        f"the state lies {where}, and there is nothing to compare with one device. "
        "Create it on a mesh of several; virtual_devices(8) makes eight on any machine."
    )
    raise VerificationError(msg)


def _targets(meshes: Any) -> list[Mesh | LayoutMap]:
    is_list = isinstance(meshes, Sequence) and not isinstance(meshes, str)
    kinds = (Mesh, LayoutMap)
    if not is_list or not meshes or not all(isinstance(x, kinds) for x in meshes):
        msg = (
            "verify: meshes must be a list of Mesh and LayoutMap objects, as "
            "[ml.create_mesh({'batch': 8}), layouts]."
        )
        raise VerificationError(msg)
    return list(meshes)


def _as_layouts(target: Mesh | LayoutMap) -> LayoutMap:
    return target if isinstance(target, LayoutMap) else LayoutMap(target)


def _moved(
    state: PyTree, batches: list[Batch], target: Mesh | LayoutMap
) -> tuple[PyTree, list[Batch]]:
    """Returns a state and its batches on another mesh."""
    layouts = _as_layouts(target)
    mesh = layouts.mesh
    places = {
        leaf.path: leaf.value
        for leaf in _paths.flatten(layouts.resolve(state).layouts).leaves
    }
    flat = _paths.flatten(state)
    moved = flat.unflatten(
        [
            relayout(leaf.value, places[leaf.path])
            if leaf.path in places
            else leaf.value
            for leaf in flat.leaves
        ]
    )
    rows = batch_layout(mesh)

    def placed(leaf: Leaf) -> Leaf:
        layout = leaf_layout(rows, np.ndim(leaf)) if np.ndim(leaf) else mesh.layout()
        return relayout(to_numpy(leaf), layout)

    return moved, [jax.tree.map(placed, batch) for batch in batches]


# On one device.


class _Reference:
    """The reference that a step is compared with.

    Attributes:
        state: The state to begin with, on one device.
        eps: The rounding error of the dtype that is computed in.
        is_plain: Whether it is written out in plain Flax.
        skips: How many steps float16 skipped on the mesh, in each step.
    """

    def __init__(
        self,
        mesh: Mesh,
        step: Step,
        arguments: _Arguments,
    ) -> None:
        self._mesh, self._alone, self._step = mesh, one_device_mesh(mesh), step
        self.is_plain = isinstance(step, (PlainTrainStep, PlainEvalStep))
        self.skips: list[int] = []
        self.state = self._to_one(arguments.state)
        place = _to_host if self.is_plain else self._to_one
        self._batches = [place(batch) for batch in arguments.batches]
        self._args, self._kwargs = self._to_one((arguments.args, arguments.kwargs))
        self.eps = self._rounding_error()

    def _to_one(self, tree: PyTree) -> PyTree:
        return to_one_device(tree, self._alone)

    def _rounding_error(self) -> float:
        step: Any = self._step
        with alone(self._alone):
            state, batch = copied(self.state), self._batches[0]
            try:
                if self.is_plain:
                    return rounding_error(step.jaxpr(state, batch), step.dtypes)
                traced = step.trace(state, batch, *self._args, **self._kwargs)
                return rounding_error(traced.jaxpr.jaxpr)
            except Exception:  # it is raised when it runs, with a sentence
                return rounding_error(None)

    def run(
        self,
        state: PyTree,
        number: int,
        off: Callable[[Batch], Batch] | None = None,
    ) -> tuple[PyTree, Values]:
        """Runs a step, and returns the next state and all values by path.

        Args:
            state: The state, which is copied.
            number: The number of the step, from 1.
            off: Makes rounding errors in the batch; with it, plain Flax also computes
                in the dtype that the step computes in.
        """
        step: Any = self._step
        batch = self._batches[number - 1]
        batch = batch if off is None else off(batch)
        try:
            with alone(self._alone):
                if self.is_plain:
                    skipped = self.skips[number - 1]
                    result = step(
                        copied(state), batch, skipped, is_rounded=off is not None
                    )
                else:
                    result = step(copied(state), batch, *self._args, **self._kwargs)
        except Exception as error:
            first = str(error).strip().partition("\n")[0].rstrip(".")
            msg = (
                f"the step runs on {self._mesh!r}, and not on one device: {first}. A "
                "mesh that the step names itself cannot be replaced: take it from "
                "get_default_mesh() inside the step, or give reference= the step made "
                "for one_device_mesh(mesh)."
            )
            raise VerificationError(msg) from error
        state, aux = _pair("reference", result, state)
        aux = computed(aux) if isinstance(aux, Metrics) else aux
        return state, {**values_of("state", state), **values_of("aux", aux)}


def _to_host(batch: Batch) -> Batch:
    """Returns a batch on the host, where padding can be cut off; keys stay."""

    def host(leaf: Leaf) -> Leaf:
        is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return leaf if is_key else np.asarray(to_numpy(leaf))

    return jax.tree.map(lambda x: host(x) if hasattr(x, "dtype") else x, batch)


def _reference(
    step: Step, reference: Step | None, mesh: Mesh, arguments: _Arguments
) -> _Reference:
    if reference is None and isinstance(step, TrainStep):
        plain = PlainTrainStep(step)
        state = plain.prepared(arguments.state)
        return _Reference(mesh, plain, _Arguments(state, arguments.batches, (), {}))
    if reference is None and isinstance(step, EvalStep):
        return _Reference(mesh, PlainEvalStep(step), arguments)
    other: Any = step if reference is None else reference
    if isinstance(other, CompiledStep):
        static = other.static_argnames
        other = jax.jit(vars(other)["__wrapped__"], static_argnames=static)
    elif not hasattr(other, "lower"):
        other = jax.jit(other)
    return _Reference(mesh, other, arguments)


def _as_kinds(expected: Values, found: Mapping[str, Leaf]) -> Values:
    """Returns metrics in the dtypes that a step has them in."""
    return {
        path: value.astype(found[path].dtype)
        if path.startswith("aux/") and value.shape == np.shape(found[path])
        else value
        for path, value in expected.items()
        if path in found
    }


# Messages.


def _message(mesh: Mesh, differences: list[Difference]) -> str:
    different = [leaf for leaf in differences if leaf.is_too_large]
    # The loss is nearest to the cause.
    different.sort(key=lambda leaf: leaf.path != "aux/loss")
    first = different[0]
    head = (
        f"step {first.step}: {first.path} {first.array} is not the same on {mesh!r} "
        "as on one device"
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
