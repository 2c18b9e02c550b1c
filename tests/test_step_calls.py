"""Calls of steps: how often they trace, what they are given, and what they refuse."""

import copy
import re
import warnings

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from meshlayout._batches import marked_weights
from meshlayout.testing import verify
from tests.error_messages import message_of
from tests.small_states import DATA, assert_close, create, mesh_of, on, squares


class Net(nnx.Module):
    """A layer, and a key of its own for dropout."""

    def __init__(self):
        self.up = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.drop(self.up(x))


def make(devices=8, **options):
    """Returns a train step, a state and a batch."""
    mesh = mesh_of(batch=devices)
    state = create(mesh, Net, optax.adam(0.1), **options)
    return ml.make_train_step(squares), state, on(mesh, DATA)


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


TRACED = {
    "plain": {},
    "float16": {"precision": "float16", "clip_norm": 1.0, "ema": 0.5},
    "hyperparams": {"tx": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)},
    "microbatches": {"accumulate": 2},
    "metrics": {"metrics": {"accuracy": ml.metrics.Accuracy(labels="label")}},
    "several": {"steps_per_call": 2},
}


@pytest.mark.parametrize("name", TRACED)
def test_the_loss_function_is_traced_once_to_lower_a_step_and_to_call_it(name):
    traces = []

    def loss_fn(model, batch):
        traces.append(batch)
        logits = model(batch["x"])
        return jnp.square(logits).mean(-1), {"logits": logits}

    options, mesh = dict(TRACED[name]), mesh_of(batch=8)
    state = create(mesh, Net, options.pop("tx", optax.adam(0.1)))
    rows = {**DATA, "label": np.zeros(16, "int32"), "weight": np.ones(16, "float32")}
    batch = on(mesh, rows)
    batch = [batch, batch] if name == "several" else batch
    step = ml.make_train_step(loss_fn, **options)
    step.lower(state, batch)
    if name in ("plain", "several", "metrics"):
        state, metrics = step(state, batch)
        state, metrics = step(state, batch, metrics)
        step(state, batch)
    assert len(traces) == 1


class Recording(nnx.Module):
    """Records a loss, which only a trace can know."""

    def __init__(self):
        self.up = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        y = self.up(x)
        ml.losses.record(self, "size", jnp.abs(y).mean(-1))
        return y


def test_metrics_of_a_step_continue_in_another_that_was_not_traced_yet():
    _, _, batch = make()
    state = create(mesh_of(batch=8), Recording, optax.sgd(0.0))
    state, metrics = ml.make_train_step(squares)(state, batch)
    once = metrics.to_host()
    assert list(once) == ["loss", "data_loss", "size"]
    state, metrics = ml.make_train_step(squares)(state, batch, metrics)
    assert metrics.to_host() == pytest.approx(once)
    assert float(metrics.metric("loss").count) == 32
    step = ml.make_train_step(squares, clip_norm=1.0)
    assert message_of(lambda: step(state, batch, metrics)) == (
        "Metrics of loss, data_loss, size do not merge with loss, data_loss, "
        "size, grad_norm. Start with None, and pass on what the step returned."
    )


@pytest.mark.parametrize("devices", [1, 8])
def test_a_used_up_state_is_named_wherever_it_is_used(devices):
    step, state, batch = make(devices)
    eval_step = ml.make_eval_step(squares)
    first, _ = step(state, batch)
    eval_step(first, batch)
    step(first, batch)
    assert first.rng.is_deleted()
    copying = ml.make_train_step(squares, ema=0.5)
    for call in (
        lambda: first.model,
        lambda: copying(first, batch),
        lambda: jax.jit(lambda batch: step(first, batch))(batch),
        lambda: jax.jit(lambda batch: eval_step(first, batch))(batch),
        lambda: verify(step, first, batch) if devices > 1 else first.model,
        lambda: ml.arrays.to_numpy(first),
        lambda: ml.relayout(first, first.layouts),
        lambda: ml.create(lambda: first.params),
        lambda: ml.unpack(first.params["up"]["bias"]),
    ):
        said = message_of(call)
        assert re.search("has used up th(is|e) state", said), said
    for name, call in (("train_step", step), ("eval_step", eval_step)):
        assert message_of(lambda: call(first, batch)) == (  # noqa: B023
            f"{name}: 'state/params/up/bias' was used up by an earlier call of a step. "
            "Continue with the state that the step returned."
        )


def test_a_call_that_fails_while_it_runs_is_not_said_to_have_used_the_state():
    """JAX looks for NaN when the step has run, and its state is gone by then."""
    step, state, batch = make()
    with jax.debug_nans(True):
        for _ in range(2):
            state, _ = step(state, batch)
        bad = {**batch, "x": batch["x"] * jnp.inf}
        with pytest.raises((FloatingPointError, RuntimeError)) as caught:
            step(state, bad)
    assert not isinstance(caught.value, ml.MeshLayoutError)


def test_a_call_like_the_one_before_refuses_what_any_call_refuses():
    step, state, batch = make()
    mesh = ml.Layout.of(batch["x"]).mesh
    batch = {**batch, "mask": on(mesh, jnp.ones(16))}
    for _ in range(2):
        state, metrics = step(state, batch)
    gone = {**batch, "x": jnp.copy(batch["x"])}
    gone["x"].delete()
    said = message_of(lambda: step(state, gone, metrics))
    assert said.startswith("train_step: 'batch/x' was used up by an earlier call ")
    elsewhere = jax.device_put(np.asarray(batch["x"]), state.step.sharding)
    other = {**batch, "x": elsewhere}
    with pytest.warns(ml.errors.RecompileWarning) as caught:
        state, metrics = step(state, other, metrics)
    assert [str(one.message) for one in caught] == [
        "train_step recompiles: the layout of batch/x changed from ('batch', None) on "
        "(batch=8) to () on (batch=8)."
    ]
    marked_weights[id(batch["mask"])] = batch["mask"]
    for call in (step, ml.make_eval_step(squares)):
        said = message_of(call, state, batch, metrics)
        assert said.startswith("the batch's weights are at 'mask', but the step looks ")
    more = {name: np.concatenate([x, x]) for name, x in ml.to_numpy(batch).items()}
    with pytest.warns(ml.errors.RecompileWarning, match="batch/mask changed from f32"):
        step(state, more)


@pytest.mark.parametrize("kind", ["train step", "compile_step"])
def test_a_loop_that_passes_its_results_on_is_refused_what_would_end_the_process(kind):
    """JAX 0.10 ends it on several devices, and not each array is looked at."""
    step, state, batch = make()
    batch |= {"number": jnp.copy(state.step)}
    state, metrics = step(state, batch)
    if kind == "compile_step":
        step = ml.compile_step(step.__call__)
    for _ in range(3):
        state, metrics = step(state, batch, metrics)
    again = state.replace(extra={"b": state.params["up"]["bias"]})
    twice = {**batch, "number": state.step}
    for pair in ((state, state), (state, twice), (again, batch)):
        assert "are the same array" in message_of(step, *pair, metrics)
    after, _ = ml.make_train_step(squares)(state, batch)
    assert "was used up by an earlier call" in message_of(step, state, batch, metrics)
    step(after, batch, metrics)


@pytest.mark.parametrize("kind", ["NumPy", "uncommitted", "more rows", "other keys"])
def test_what_is_new_in_a_batch_gets_the_numbers_of_a_first_call(kind):
    new = {
        "NumPy": DATA,
        "uncommitted": jax.tree.map(jnp.asarray, DATA),
        "more rows": jax.tree.map(lambda x: np.concatenate([x, x]), DATA),
        "other keys": {**DATA, "weight": np.arange(16, dtype="float32")},
    }[kind]
    _, state, batch = make()
    step = ml.make_train_step(squares, on_recompile="ignore")
    _, expected = step(copied(state), new)
    step = ml.make_train_step(squares, on_recompile="ignore")
    for _ in range(2):
        step(copied(state), jax.tree.map(lambda x: 2 * x, batch))
    _, found = step(state, new)
    assert found.to_host() == pytest.approx(expected.to_host(), rel=1e-5)


@pytest.mark.parametrize("devices", [1, 2])
def test_steps_run_where_their_state_was_moved_between_two_calls(devices):
    step, state, batch = make(devices)
    eval_step = ml.make_eval_step(squares)
    for _ in range(2):
        state, _ = step(state, batch)
        eval_step(state, batch)
    mesh = mesh_of(range(4, 4 + devices), batch=devices)
    moved = ml.relayout(copied(state), mesh.layout(...))
    expected, _ = step(state, batch)
    evaluated = eval_step(moved, on(mesh, DATA))
    moved, metrics = step(moved, on(mesh, DATA))
    for leaf in jax.tree.leaves((moved, metrics, evaluated)):
        assert leaf.devices() == set(mesh.devices.flat)
    assert_close(moved.params, expected.params)


STEPS = {
    "train_step": lambda: ml.make_train_step(squares),
    "eval_step": lambda: ml.make_eval_step(squares),
    "predict_step": lambda: ml.make_predict_step(lambda m, batch: m(batch["x"])),
}


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("devices", [(4, 5), (1, 0)])
def test_a_batch_on_other_devices_or_in_another_order_is_refused(kind, devices):
    _, state, right = make(2)
    batch = on(mesh_of(devices, batch=2), DATA)
    step, later = STEPS[kind](), STEPS[kind]()
    for _ in range(2):
        result = later(state, right)
        state = result[0] if kind == "train_step" else state
    for call in (step, later):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ml.errors.RecompileWarning)
            with pytest.raises(
                ValueError, match=r"incompatible devices.* batch\['x'\]"
            ):
                call(state, batch)


def test_steps_are_copied_and_pickled_without_what_was_compiled():
    _, state, batch = make()
    doubled = ml.compile_step(lambda state, batch: (state, batch["x"].sum()))
    for step in (STEPS["train_step"](), STEPS["eval_step"](), doubled):
        expected = step(copied(state), batch)
        for same in (copy.deepcopy(step), cloudpickle.loads(cloudpickle.dumps(step))):
            found = same(copied(state), batch)
            if isinstance(found, tuple):
                assert str(found[1]) == str(expected[1])
            else:
                assert str(found) == str(expected)
