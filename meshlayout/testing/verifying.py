"""`verify`: the same step on the mesh and on one device, compared leaf by leaf."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshlayout import _paths, _render
from meshlayout.mesh import Mesh, as_mesh
from meshlayout.step import CompiledStep, compile_step
from meshlayout.testing.comparing import Difference, Tolerance, compare
from meshlayout.testing.failure import VerificationError
from meshlayout.testing.one_device import (
    alone,
    copied,
    one_device_mesh,
    to_one_device,
)


@dataclass(frozen=True)
class Verification:
    """That a step computes on a mesh what it computes on one device.

    Text by `str` or `print`, a table in notebooks.

    Attributes:
        mesh: The mesh.
        num_steps: How many steps were compared.
        differences: One `Difference` per leaf of the state and of what else the step
            returns, from the step where it was largest.
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
            f"{_count(len(self.differences), 'leaf', 'leaves')} agree on "
            f"{self.mesh!r} and on one device, after "
            f"{_count(self.num_steps, 'step', 'steps')}."
        )

    def _rows(self) -> list[list[str]]:
        return [
            [one.path, one.array, f"{one.largest:.2g}", f"{one.allowed:.2g}"]
            for one in self.differences
        ]


_HEADERS = ["leaf", "array", "largest difference", "allowed"]
_ALIGN = "llrr"

_CAUSES = (
    "Usual causes: a mean of per-shard means, a denominator or batch statistics of one "
    "device, a sum over shards that is missing, a random key made from a device's "
    "index. If it is rounding (Adam divides gradients that are almost zero by "
    "themselves; the step computes in bfloat16), say so with rtol= or atol=."
)


def verify(
    step: Callable[..., Any],
    state: Any,
    batch: Any,
    *args: Any,
    rtol: float | None = None,
    atol: float | None = None,
    num_steps: int = 1,
    reference: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Verification:
    """Checks that a step computes on its mesh what it computes on one device.

    The step runs twice, from copies of `state`, which is not used up: on the mesh
    that the state lies on, and on the first device of that mesh. There, the mesh in
    force (`default_mesh`, `jax.set_mesh`) is `one_device_mesh(mesh)`, and `constrain`
    leaves values where they are. Compared are all leaves of the new state and of what
    the step returns besides: return gradients there to have them compared at their
    own scale. Integers and PRNG keys have to be equal; floats may be apart by `atol +
    rtol * s`, where s is the largest value of the leaf on one device. NaN is equal to
    NaN.

    A number that the step takes from a mesh it names itself, such as its size, is the
    same in both runs, and a mistake in it is not seen. Take it from
    `get_default_mesh()` inside the step, or pass a `reference`.

    Args:
        step: What `compile_step` returned, or another callable with `lower`; a plain
            function `(state, batch, ...) -> (state, aux)` is compiled first.
        state: A state on a mesh of several devices.
        batch: The global batch, for every step; or an iterator over batches, such as
            `iter([first, second])`, which gives each step its own.
        *args: Further arguments of the step.
        rtol: Relative tolerance. By default 128 times the rounding error of sums
            (that of float32, or float64 for such leaves), for their other order,
            and 4 times that of the leaf's own dtype: 1.6e-5 for float32, 3.1e-2 for
            bfloat16. Nothing tells in what dtype the step computes in between.
        atol: Absolute tolerance, for what is zero but for rounding. By default an
            eighth of the rounding error of sums: 1.5e-8.
        num_steps: How many steps to run, each from the state of the one before.
        reference: What to run on the one device instead: the step made for
            `one_device_mesh(mesh)`, where it names its mesh (as `jax.shard_map` with
            `mesh=` does), or a simpler program.
        **kwargs: Further arguments of the step, by name.

    Returns:
        The largest difference of every leaf.

    Raises:
        VerificationError: If a leaf differs (the first one is named), the step does
            not run on one device, or there is nothing to compare.

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
    here, there = _on_mesh("step", step), _on_one_device("reference", reference or step)
    _check_numbers(rtol, atol, num_steps)
    placed = None if isinstance(batch, Iterator) else batch
    mesh = _mesh_of(state, (placed, args, kwargs))
    one = one_device_mesh(mesh)
    tolerance = Tolerance(rtol, atol)
    sharded, whole = copied(state), to_one_device(state, one)
    worst: dict[str, Difference] = {}
    for number, given in _numbered(batch, num_steps):
        sharded, aux = _pair("step", _run(here, sharded, given, args, kwargs))
        rest = to_one_device((given, args, kwargs), one)
        whole, other_aux = _run_alone(mesh, one, there, whole, *rest)
        found = [
            *compare("state", number, sharded, whole, tolerance),
            *compare("aux", number, aux, other_aux, tolerance),
        ]
        if any(difference.is_too_large for difference in found):
            raise VerificationError(_message(mesh, found))
        for difference in found:
            before = worst.setdefault(difference.path, difference)
            worst[difference.path] = max(before, difference, key=_badness)
    return Verification(mesh, num_steps, tuple(worst.values()))


def _badness(difference: Difference) -> tuple[bool, float]:
    return difference.badness


# Running.


def _on_mesh(name: str, step: Any) -> Callable[..., Any]:
    """Returns what to call on the mesh: the step itself, if it is compiled."""
    if not callable(step):
        msg = (
            "verify takes a function (state, batch, ...) -> (state, aux) as its "
            f"{name}, and got {step!r} of type {type(step).__name__}."
        )
        raise VerificationError(msg)
    if hasattr(step, "lower"):
        return step
    return compile_step(step, on_recompile="ignore")


def _on_one_device(name: str, step: Any) -> Callable[..., Any]:
    """Returns what to call on one device: without the layouts of a mesh."""
    if not isinstance(step, CompiledStep):
        return _on_mesh(name, step)
    static = step.static_argnames
    plain = vars(step)["__wrapped__"]
    return compile_step(plain, static_argnames=static, on_recompile="ignore")


def _run(
    step: Callable[..., Any],
    state: Any,
    batch: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    try:
        return step(state, batch, *args, **kwargs)
    except (TypeError, KeyError, IndexError) as error:
        if not isinstance(batch, list) or not all(map(_is_batch, batch)):
            raise
        msg = (
            f"the step does not take a list of {len(batch)} as its batch: "
            f"{type(error).__name__}: {error}. verify gives each step the whole list; "
            "for a batch per step, give iter([first, second]) and num_steps=2."
        )
        raise VerificationError(msg) from error


def _is_batch(one: Any) -> bool:
    return isinstance(one, (Mapping, tuple, list))


def _run_alone(
    mesh: Mesh,
    one: Mesh,
    step: Callable[..., Any],
    state: Any,
    batch: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Any]:
    try:
        with alone(one):
            result = step(state, batch, *args, **kwargs)
    except Exception as error:
        first = str(error).strip().partition("\n")[0].rstrip(".")
        msg = (
            f"the step runs on {mesh!r}, and not on one device: {first}. A mesh that "
            "the step names itself cannot be replaced: take it from get_default_mesh() "
            "inside the step, or give reference= the step made for "
            "one_device_mesh(mesh)."
        )
        raise VerificationError(msg) from error
    return _pair("reference", result)


def _pair(name: str, result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        what = (
            f"a tuple of {len(result)}"
            if isinstance(result, tuple)
            else f"a value of type {type(result).__name__}"
        )
        msg = f"the {name} returned {what}; a step returns a pair, (state, aux)."
        raise VerificationError(msg)
    return result


def _numbered(batch: Any, num_steps: int) -> Iterator[tuple[int, Any]]:
    """Yields the number and the batch of every step."""
    for number in range(1, num_steps + 1):
        if not isinstance(batch, Iterator):
            yield number, batch
            continue
        ended = object()
        given = next(batch, ended)
        if given is ended:
            msg = (
                f"the batches ended after {number - 1} of num_steps={num_steps}. Give "
                "more of them, or run fewer steps."
            )
            raise VerificationError(msg)
        yield number, given


# Checking arguments.


def _check_numbers(rtol: Any, atol: Any, num_steps: Any) -> None:
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is None:
            continue
        if not isinstance(value, Real) or isinstance(value, bool) or float(value) < 0:
            msg = f"{name} is a number, 0 or more, and got {value!r}."
            raise VerificationError(msg)
    is_count = isinstance(num_steps, Integral) and not isinstance(num_steps, bool)
    if not is_count or num_steps < 1:
        msg = f"num_steps is a whole number, 1 or more, and got {num_steps!r}."
        raise VerificationError(msg)


def _mesh_of(state: Any, rest: Any) -> Mesh:
    """Returns the mesh of several devices that a step's arguments lie on."""
    values = [leaf.value for leaf in _paths.flatten(state).leaves]
    shardings = [
        getattr(leaf, "sharding", None) for leaf in (*values, *jax.tree.leaves(rest))
    ]
    named = [one for one in shardings if isinstance(one, NamedSharding)]
    for sharding in named:
        if math.prod(sharding.mesh.shape.values()) > 1:
            return as_mesh(sharding.mesh)
    where = "on a mesh of one device" if named else "on no mesh"
    msg = (
        f"the state lies {where}, and there is nothing to compare with one device. "
        "Create it on a mesh of several; virtual_devices(8) makes eight on any machine."
    )
    raise VerificationError(msg)


# What is said.


def _message(mesh: Mesh, found: list[Difference]) -> str:
    different = [one for one in found if one.is_too_large]
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
    others = [one.path for one in different[1:]]
    more = f", ... ({len(others) - 5} more)" * (len(others) > 5)
    also = f": also {', '.join(others[:5])}{more}" if others else ""
    leaves = f"Leaves that differ: {len(different)} of {len(found)}{also}."
    return f"{fact}\n{leaves}\n{_CAUSES}"


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"
