"""What a call of a train step costs on the host, and the state that it returns."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from meshlayout._batches import mark_weights


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


TRACED = {
    "plain": {},
    "clip_norm": {"clip_norm": 1.0},
    "skip": {"on_nonfinite": "skip"},
    "float16": {"precision": "float16"},
    "hyperparams": {"tx": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)},
    "penalty": {"regularizers": {"l2": ml.losses.l2(0.1)}},
    "microbatches": {"accumulate": 2},
    "metrics": {"metrics": {"accuracy": ml.metrics.Accuracy()}},
    "several": {"steps_per_call": 2},
}
LATER = ("clip_norm", "skip", "hyperparams", "penalty")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in LATER)) for name in TRACED],
)
def test_the_loss_function_is_traced_once_to_lower_a_step_and_to_call_it(name):
    traces = []

    def loss_fn(model, batch):
        traces.append(batch)
        logits = model(batch["x"])
        return jnp.square(logits).mean(-1), {"logits": logits}

    options = dict(TRACED[name])
    tx = options.pop("tx", optax.adam(0.1))
    mesh = ml.create_mesh({"batch": 8})
    state = ml.TrainState.create(Net, tx, ml.LayoutMap(mesh, {}))
    rows = {"x": jnp.ones((16, 2)), "label": jnp.zeros(16, "int32")}
    batch = ml.relayout({**rows, "weight": jnp.ones(16)}, mesh.layout("batch", ...))
    batch = [batch, batch] if name == "several" else batch
    step = ml.make_train_step(loss_fn, **options)
    step.lower(state, batch)
    assert len(traces) == 1
    if name in ("plain", "metrics"):
        state, metrics = step(state, batch)
        state, metrics = step(state, batch, metrics)
        step(state, batch)
        assert len(traces) == 1


# A mesh of one device has no path of its own: its cases are left to test-all.
ONE_LATER = [pytest.param(1, marks=pytest.mark.slow), 8]


class Recording(nnx.Module):
    """Records a loss, which only a trace can know."""

    def __init__(self):
        self.up = nnx.Linear(2, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        y = self.up(x)
        ml.losses.record(self, "size", jnp.abs(y).mean(-1))
        return y


@pytest.mark.parametrize("devices", ONE_LATER)
def test_metrics_of_a_step_continue_in_another_that_was_not_traced_yet(devices):
    _, _, batch = make(devices)
    mesh = ml.create_mesh({"batch": devices}, devices=jax.devices()[:devices])
    state = ml.TrainState.create(Recording, optax.sgd(0.0), ml.LayoutMap(mesh, {}))
    state, metrics = ml.make_train_step(loss_fn)(state, batch)
    once = metrics.to_host()
    assert list(once) == ["loss", "data_loss", "size"]
    state, metrics = ml.make_train_step(loss_fn)(state, batch, metrics)
    assert metrics.to_host() == pytest.approx(once)
    assert float(metrics.metric("loss").count) == 16
    step = ml.make_train_step(loss_fn, clip_norm=1.0)
    with pytest.raises(ml.errors.StepError) as caught:
        step(state, batch, metrics)
    assert str(caught.value) == (
        "Metrics of loss, data_loss, size do not merge with loss, data_loss, "
        "size, grad_norm. Start with None, and pass on what the step returned."
    )


@pytest.mark.parametrize("devices", [1, 8])
def test_a_used_up_state_is_named_even_if_it_was_never_read(devices):
    step, state, batch = make(devices)
    first, _ = step(state, batch)
    step(first, batch)
    assert first.rng.is_deleted()
    with pytest.raises(ml.errors.StateError, match="has used up this state"):
        _ = first.model
    with pytest.raises(ml.errors.StepError, match="was used up by an earlier call"):
        step(first, batch)


@pytest.mark.parametrize("devices", ONE_LATER)
def test_a_call_that_fails_while_it_runs_is_not_said_to_have_used_the_state(devices):
    """JAX looks for NaN when the step has run, and its state is gone by then."""
    step, state, batch = make(devices)
    with jax.debug_nans(True):
        for _ in range(2):
            state, _ = step(state, batch)
        bad = {**batch, "x": batch["x"] * jnp.inf}
        with pytest.raises((FloatingPointError, RuntimeError)) as caught:
            step(state, bad)
    assert not isinstance(caught.value, ml.MeshLayoutError)


@pytest.mark.parametrize("devices", ONE_LATER)
def test_a_call_like_the_one_before_refuses_what_any_call_refuses(devices):
    step, state, batch = make(devices)
    mask = ml.relayout(jnp.ones(8), ml.Layout.of(batch["x"]).mesh.layout("batch"))
    batch = {**batch, "mask": mask}
    for _ in range(2):
        state, metrics = step(state, batch)
    used_up = {**batch, "x": jnp.copy(batch["x"])}
    used_up["x"].delete()
    with pytest.raises(ml.errors.StepError) as caught:
        step(state, used_up, metrics)
    assert str(caught.value).startswith("train_step: 'batch/x' was used up by an ")
    mark_weights(mask)
    with pytest.raises(ml.errors.StepError, match="the batch's weights are at 'mask'"):
        step(state, batch, metrics)
    on_host = {"x": np.ones((8, 2), "float32"), "weight": -np.ones(8, "float32")}
    with pytest.raises(ml.errors.StepError, match="must be finite and not negative"):
        step(state, on_host, metrics)
    with pytest.warns(
        ml.errors.RecompileWarning, match="batch/mask changed from f32.8."
    ):
        step(state, {"x": jnp.ones((16, 2)), "mask": jnp.ones(16)})


def test_a_loop_that_passes_its_results_on_is_refused_what_would_end_the_process():
    """JAX 0.10 ends it on several devices, and not each array is looked at."""
    step, state, batch = make(8)
    batch |= {"number": jnp.copy(state.step)}
    for _ in range(3):
        state, metrics = step(state, batch)
    twice = {**batch, "number": state.step}
    with pytest.raises(ml.errors.StepError, match="are the same array"):
        step(state, twice, metrics)
    with pytest.raises(ml.errors.StepError, match="are the same array"):
        step(state.replace(extra={"b": state.params["up"]["bias"]}), batch, metrics)
    after, _ = ml.make_train_step(loss_fn)(state, batch)
    with pytest.raises(ml.errors.StepError, match="was used up by an earlier call"):
        step(state, batch, metrics)
    step(after, batch, metrics)


@pytest.mark.parametrize("devices", ONE_LATER)
@pytest.mark.parametrize(
    "kind",
    [
        "NumPy",
        pytest.param("uncommitted", marks=pytest.mark.slow),
        pytest.param("more rows", marks=pytest.mark.slow),
        "other keys",
    ],
)
def test_what_is_new_in_a_batch_gets_the_numbers_of_a_first_call(devices, kind):
    other = np.random.default_rng(0).normal(size=(8, 2)).astype("float32")
    batches = {
        "NumPy": {"x": other},
        "uncommitted": {"x": jnp.asarray(other)},
        "more rows": {"x": np.concatenate([other, other])},
        "other keys": {"x": other, "weight": np.arange(8, dtype="float32")},
    }
    results = []
    for is_first in (True, False):
        step, state, batch = make(devices)
        step = ml.make_train_step(loss_fn, on_recompile="ignore")
        if not is_first:
            for _ in range(2):
                step(make(devices)[1], batch)
        results.append(step(state, batches[kind])[1].to_host())
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_a_batch_in_another_layout_is_named_by_the_call_that_is_given_it():
    step, state, batch = make(8)
    for _ in range(2):
        state, metrics = step(state, batch)
    other = jax.device_put(np.asarray(batch["x"]), state.step.sharding)
    with pytest.warns(ml.errors.RecompileWarning) as caught:
        step(state, {"x": other}, metrics)
    assert [str(one.message) for one in caught] == [
        "train_step recompiles: the layout of batch/x changed from ('batch', None) on "
        "(batch=8) to () on (batch=8)."
    ]


def other_devices(devices):
    return ml.create_mesh({"batch": devices}, devices=jax.devices()[4 : 4 + devices])


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_runs_where_its_state_was_moved_between_two_calls(devices):
    step, state, batch = make(devices)
    for _ in range(2):
        state, _ = step(state, batch)
    mesh = other_devices(devices)
    copy_of_state = jax.tree.map(jnp.copy, state)
    expected, _ = step(state, batch)
    state = ml.relayout(copy_of_state, mesh.layout(...))
    batch = ml.relayout(batch, mesh.layout("batch", ...))
    state, metrics = step(state, batch)
    for leaf in jax.tree.leaves((state, metrics)):
        assert leaf.devices() == set(jax.devices()[4 : 4 + devices])
    params = zip(*map(jax.tree.leaves, (state.params, expected.params)), strict=True)
    for leaf, value in params:
        np.testing.assert_allclose(leaf, value, rtol=1e-6)


@pytest.mark.parametrize("kind", ["train_step", "eval_step", "predict_step"])
def test_a_batch_on_other_devices_or_in_another_order_is_refused_in_words(kind):
    _, state, batch = make(2)
    step = {
        "train_step": lambda: ml.make_train_step(loss_fn),
        "eval_step": lambda: ml.make_eval_step(loss_fn),
        "predict_step": lambda: ml.make_predict_step(
            lambda model, batch: model(batch["x"])
        ),
    }[kind]
    for ids in ((4, 5), (1, 0)):
        devices = [jax.devices()[index] for index in ids]
        mesh = ml.create_mesh({"batch": 2}, devices=devices)
        with pytest.raises(ValueError, match=r"incompatible devices.* batch\['x'\]"):
            step()(state, ml.relayout(batch, mesh.layout("batch", ...)))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_compiled_step_runs_where_its_state_was_moved_and_says_so(devices):
    @ml.compile_step
    def step(state, batch):
        return state + batch.sum(), batch.sum()

    mesh = ml.create_mesh({"batch": devices}, devices=jax.devices()[:devices])
    state, batch = ml.relayout((jnp.zeros(2), jnp.ones(4)), mesh.layout(...))
    for _ in range(2):
        state, _ = step(state, batch)
    there = other_devices(devices).layout(...)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ml.errors.RecompileWarning)
        with pytest.raises(ValueError, match="incompatible devices"):
            step(state, ml.relayout(batch, there))
    state, batch = ml.relayout((state, batch), there)
    with pytest.warns(ml.errors.RecompileWarning, match="its devices"):
        state, total = step(state, batch)
    assert state.devices() == total.devices() == set(jax.devices()[4 : 4 + devices])
    assert state.tolist() == [12.0, 12.0]


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
