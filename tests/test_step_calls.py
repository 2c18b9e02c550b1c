"""What a call of a train step costs on the host, and the state that it returns."""

import copy
import pathlib
import pickle
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml


PACKAGE = str(pathlib.Path(ml.__file__).parent)


class Net(nnx.Module):
    """A layer, and a key of its own for dropout."""

    def __init__(self):
        self.up = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.drop(self.up(x))


def loss_fn(model, batch):
    return jnp.square(model(batch["x"])).mean(-1)


def make(devices=1, **options):
    """Returns a step, a state and a batch."""
    mesh = ml.create_mesh({"batch": devices}, devices=jax.devices()[:devices])
    state = ml.TrainState.create(
        Net, optax.adam(0.1), ml.LayoutMap(mesh, {}), **options
    )
    batch = ml.relayout({"x": jnp.ones((8, 2))}, mesh.layout("batch", ...))
    return ml.make_train_step(loss_fn), state, batch


def calls_of(function):
    """Returns how many functions of the library a call runs."""
    names = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return names


@pytest.mark.parametrize("with_metrics", [False, True])
def test_a_call_that_follows_another_runs_few_functions(with_metrics, monkeypatch):
    # Weights of other tests' batches that are still alive cost a look-up per array.
    monkeypatch.setattr("meshlayout._batches._marked", {})
    step, state, batch = make()
    box = [*step(state, batch)]
    for _ in range(2):
        names = calls_of(
            lambda: box.__setitem__(
                slice(None), step(box[0], batch, box[1] if with_metrics else None)
            )
        )
    assert len(names) <= 16, names


@pytest.mark.parametrize("devices", [1, 8])
def test_jit_is_handed_plain_arrays_in_a_tuple(devices):
    step, state, batch = make(devices)
    into, _ = step.lower(state, batch).args_info[0]
    assert type(into) is tuple
    assert len(into) == len(jax.tree.leaves(state))
    assert not any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in into)
    assert all(x.donated for x in into)


@pytest.mark.parametrize("devices", [1, 8])
def test_states_that_were_read_and_those_that_were_not_train_alike(devices):
    step, state, batch = make(devices)
    other_step, other, _ = make(devices)
    for _ in range(3):
        state, _ = step(state, batch)
        other, _ = other_step(other, batch)
        jax.block_until_ready(other)
        assert jnp.issubdtype(other.rng.dtype, jax.dtypes.prng_key)
        assert isinstance(other.model.up, nnx.Linear)
    assert int(state.step) == 3
    jax.tree.map(assert_same, state, other.replace(program=state.program))


def assert_same(one, other):
    assert one.dtype == other.dtype
    assert one.sharding == other.sharding
    if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    np.testing.assert_array_equal(one, other)


def test_what_is_changed_in_a_returned_state_is_what_the_next_call_takes():
    step, state, batch = make()
    state, _ = step(state, batch)
    zeros = jax.tree.map(jnp.zeros_like, state.params["up"])
    state.params["up"] = jax.device_put(zeros, state.step.sharding)
    _, metrics = step(state, batch)
    assert metrics.to_host()["loss"] == 0


def test_a_returned_state_is_copied_pickled_and_mapped_unread():
    step, state, batch = make()
    for of in (
        lambda x: pickle.loads(pickle.dumps(x)),
        copy.copy,
        copy.deepcopy,
        lambda x: x.replace(),
        lambda x: jax.tree.map(lambda leaf: leaf, x),
    ):
        state, _ = step(state, batch)
        other = of(state)
        assert jax.tree.structure(other.params) == jax.tree.structure(state.params)
        jax.tree.map(assert_same, other, state.replace(program=other.program))


def test_a_used_up_state_says_so_though_nobody_read_it():
    step, state, batch = make()
    first, _ = step(state, batch)
    step(first, batch)
    assert first.rng.is_deleted()
    with pytest.raises(ml.errors.StateError, match="used up by a step"):
        _ = first.model
    with pytest.raises(ml.errors.StepError, match="was used up by an earlier call"):
        step(first, batch)


def test_an_attribute_that_a_state_lacks_is_named():
    step, state, batch = make()
    state, _ = step(state, batch)
    for _ in range(2):
        with pytest.raises(
            AttributeError, match="'TrainState' object has no attribute 'parms'"
        ):
            _ = state.parms
        assert int(state.step) == 1


def test_keys_of_different_generators_each_stay_what_they_are():
    step, state, batch = make(rng=jax.random.key(0))
    _, other, _ = make(rng=jax.random.key(0, impl="rbg"))
    _, raw, _ = make(rng=jax.random.PRNGKey(0))
    dtypes = state.rng.dtype, other.rng.dtype, raw.rng.dtype
    state, _ = step(state, batch)
    with pytest.warns(ml.errors.RecompileWarning, match="state/rng changed"):
        other, _ = step(other, batch)
    with pytest.warns(ml.errors.RecompileWarning, match="state/rng changed"):
        raw, _ = step(raw, batch)
    assert (state.rng.dtype, other.rng.dtype, raw.rng.dtype) == dtypes


@pytest.mark.slow
def test_a_call_costs_little_more_than_that_of_jit_over_the_same_leaves():
    step, state, batch = make()
    state, metrics = step(state, batch)
    leaves = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(state)
    ]
    leaves = jax.tree.map(jnp.copy, leaves)
    raw = jax.jit(lambda leaves, _: [x + 1 for x in leaves], donate_argnums=0)
    box = [state, metrics, leaves]

    def ours():
        box[:2] = step(box[0], batch, box[1])

    def plain():
        box[2] = raw(box[2], batch)

    def seconds(call):
        start = time.thread_time()
        for _ in range(500):
            call()
        taken = time.thread_time() - start
        jax.block_until_ready(box)
        return taken

    windows = [(seconds(ours), seconds(plain)) for _ in range(7)]
    mine, jits = map(min, zip(*windows, strict=True))
    assert mine < 2 * jits
