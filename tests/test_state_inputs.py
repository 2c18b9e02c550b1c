"""What cannot be meant by an argument of `ml.state` is refused in a sentence."""

from collections.abc import Callable
from typing import Any

import optax
import pytest
from flax import nnx

import meshlayout as ml
from tests.bad_values import BAD, refusal


LAYOUTS = ml.LayoutMap(ml.create_mesh({"batch": 2, "model": 4}), {})
SGD = optax.sgd(0.1)


def build():
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


# A call with one argument, and the values of the table that work there.
CALLS: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "create: build": (lambda x: ml.create(x, LAYOUTS), []),
    "create: layouts": (lambda x: ml.create(build, x), [None]),
    "describe: build": (lambda x: ml.describe(x, LAYOUTS), []),
    "describe: layouts": (lambda x: ml.describe(build, x), [None]),
    "TrainState.create: build": (lambda x: ml.TrainState.create(x, SGD, LAYOUTS), []),
    "TrainState.create: optimizer": (
        lambda x: ml.TrainState.create(build, x, LAYOUTS),
        [],
    ),
    "TrainState.create: layouts": (
        lambda x: ml.TrainState.create(build, SGD, x),
        [None],
    ),
    "TrainState.create: module": (
        lambda x: ml.TrainState.create(build, SGD, LAYOUTS, module=x),
        [None],
    ),
    "TrainState.create: rng": (
        lambda x: ml.TrainState.create(build, SGD, LAYOUTS, rng=x),
        [-1, 0],
    ),
    "TrainState.describe: optimizer": (
        lambda x: ml.TrainState.describe(build, x, LAYOUTS),
        [],
    ),
    "TrainState.describe: rng": (
        lambda x: ml.TrainState.describe(build, SGD, LAYOUTS, rng=x),
        [-1, 0],
    ),
    "optimizer_by_path: optimizers": (ml.optimizer_by_path, []),
    "optimizer_by_path: optimizer": (
        lambda x: ml.optimizer_by_path({"kernel": x}),
        [None],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_work_or_are_refused_with_a_sentence(name):
    call, works = CALLS[name]
    known = [(type(value), value) for value in works]
    for value in BAD:
        said = refusal(ml.MeshLayoutError, call, value)
        is_refused = all(type(value) is not kind or value != one for kind, one in known)
        assert (said is not None) == is_refused, (value, said)


@pytest.mark.parametrize("value", [None, float("nan"), -1, 0, object(), "a(", ("x",)])
def test_a_path_of_optimizer_by_path_must_be_a_regular_expression(value):
    said = refusal(ml.MeshLayoutError, ml.optimizer_by_path, {value: SGD})
    assert said is not None
