"""The trainer trains as a loop written by hand does, and leaves the state usable."""

import doctest
import inspect
import io
import itertools
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

import meshlayout as ml
from models import gan
from tests.bad_values import refusal
from tests.error_messages import message_of
from tests.same_bits import assert_same_bits


FEATURES = 4


@pytest.fixture
def mesh() -> ml.Mesh:
    return ml.create_mesh({"batch": 4}, devices=jax.devices()[:4])


def create_state(mesh, optimizer=None):
    return ml.TrainState.create(
        lambda: nnx.Linear(FEATURES, 1, rngs=nnx.Rngs(0)),
        optimizer or optax.sgd(0.05),
        ml.LayoutMap(mesh, {}),
    )


def loss_fn(model, batch):
    out = model(batch["x"])[:, 0]
    return jnp.square(out - batch["y"]), {"out": out}


def examples(count, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, FEATURES)).astype("float32")
    return {"x": x, "y": x @ np.arange(1, FEATURES + 1).astype("float32")}


def cut(data, size):
    count = len(data["x"])
    return [
        {name: rows[at : at + size] for name, rows in data.items()}
        for at in range(0, count, size)
    ]


def quiet_fit(trainer, *data, **options):
    return trainer.fit(*data, progress=False, **options)


def params_of(state):
    return jax.tree.map(np.array, state.params)


def numpy_epochs(state, batches, epochs, rate=0.05):
    """Gradient descent on the mean squared error, and each epoch's mean loss."""
    params = params_of(state)
    w, b = params["kernel"][:, 0].astype("float64"), params["bias"].astype("float64")
    losses = []
    for _ in range(epochs):
        seen = []
        for batch in batches:
            error = batch["x"] @ w + b - batch["y"]
            seen.append(error**2)
            w = w - rate * 2 * (error[:, None] * batch["x"]).mean(axis=0)
            b = b - rate * 2 * error.mean()
        losses.append(np.concatenate(seen).mean())
    return w, b, losses


# Training.


def test_fit_is_gradient_descent_on_the_real_examples(mesh):
    state = create_state(mesh)
    batches = cut(examples(22), 8)  # the last one has 6
    w, b, losses = numpy_epochs(state, batches, epochs=3)
    trainer = ml.Trainer(state, loss_fn)
    history = quiet_fit(trainer, batches, epochs=3)
    params = params_of(trainer.state)
    # float32 against float64 over nine steps
    np.testing.assert_allclose(params["kernel"][:, 0], w, atol=1e-5)
    np.testing.assert_allclose(params["bias"], b, atol=1e-5)
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)
    assert history.epochs == [1, 2, 3]
    assert history is trainer.history


def test_fit_has_the_bits_of_the_loop_written_by_hand(mesh):
    batches = cut(examples(24), 8)
    accuracy = {"error": ml.metrics.Mean("out")}
    trainer = ml.Trainer(create_state(mesh), loss_fn, metrics=accuracy, clip_norm=1.0)
    history = quiet_fit(trainer, batches, epochs=2)
    state = create_state(mesh)
    train_step = ml.make_train_step(loss_fn, metrics=accuracy, clip_norm=1.0)
    for epoch in range(2):
        metrics = None
        for batch in batches:
            weighted = {**batch, "weight": np.ones(8, np.float32)}
            placed = ml.relayout(weighted, mesh.layout("batch", ...))
            state, metrics = train_step(state, placed, metrics)
        assert {name: history[name][epoch] for name in history} == metrics.to_host()
    assert_same_bits(params_of(trainer.state), params_of(state))


def test_one_program_serves_full_and_short_batches(mesh):
    # A warning is an error here, and a second program warns.
    trainer = ml.Trainer(create_state(mesh), loss_fn, on_recompile="error")
    quiet_fit(trainer, cut(examples(22), 8), 2, validation_data=cut(examples(13), 8))
    assert trainer.position.step == 6


def test_a_larger_batch_than_the_first_is_padded_too(mesh):
    data = examples(21)
    batches = [
        {name: rows[start:stop] for name, rows in data.items()}
        for start, stop in ((0, 3), (3, 16), (16, 21))
    ]
    state = create_state(mesh)
    w, _, (loss,) = numpy_epochs(state, batches, epochs=1)
    trainer = ml.Trainer(state, loss_fn, on_recompile="ignore")
    history = quiet_fit(trainer, batches)
    np.testing.assert_allclose(history["loss"], [loss], rtol=1e-6)
    params = params_of(trainer.state)
    np.testing.assert_allclose(params["kernel"][:, 0], w, atol=1e-6)
    found = trainer.predict(batches)["out"]
    expected = data["x"] @ params["kernel"][:, 0] + params["bias"]
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("kind", [list, tuple])
def test_batches_of_any_kind_are_trained_on_in_groups(kind, mesh):
    data, state = cut(examples(40), 8), create_state(mesh)
    w, _, (loss,) = numpy_epochs(state, data, epochs=1)
    trainer = ml.Trainer(state, pair_loss, steps_per_call=2)
    history = quiet_fit(trainer, [kind((one["x"], one["y"])) for one in data])
    assert int(trainer.state.step) == 5
    np.testing.assert_allclose(history["loss"], [loss], rtol=1e-5)
    np.testing.assert_allclose(params_of(trainer.state)["kernel"][:, 0], w, atol=1e-5)


def test_an_overridden_step_of_several_batches_always_gets_a_list(mesh):
    counts = []

    class Doubled(ml.Trainer):
        def train_step(self, state, batch, metrics):
            counts.append(len(batch))
            doubled = [{**one, "y": 2 * one["y"]} for one in batch]
            return super().train_step(state, doubled, metrics)

    class OneByOne(ml.Trainer):
        def train_step(self, state, batch, metrics) -> Any:
            for one in batch:
                state, metrics = super().train_step(state, one, metrics)
            return state, metrics

    data = examples(40)
    truth = cut({**data, "y": 2 * data["y"]}, 8)
    _, _, (loss,) = numpy_epochs(create_state(mesh), truth, epochs=1)
    many = Doubled(create_state(mesh), loss_fn, steps_per_call=2)
    history = quiet_fit(many, cut(data, 8))
    np.testing.assert_allclose(history["loss"], [loss], rtol=1e-6)
    assert counts == [2, 2, 1]
    single = OneByOne(create_state(mesh), loss_fn, steps_per_call=2)
    history = quiet_fit(single, truth)
    np.testing.assert_allclose(history["loss"], [loss], rtol=1e-6)
    assert int(single.state.step) == 5


def test_tuples_carry_weights_in_the_place_that_is_named(mesh):
    def tuple_loss(model, batch):
        x, y, _ = batch
        return loss_fn(model, {"x": x, "y": y})

    data = cut(examples(14), 8)
    state = create_state(mesh)
    _, _, (loss,) = numpy_epochs(state, data, epochs=1)
    trainer = ml.Trainer(state, tuple_loss, weights=2)
    history = quiet_fit(trainer, [(one["x"], one["y"]) for one in data])
    np.testing.assert_allclose(history["loss"], [loss], rtol=1e-6)


def test_weights_that_batches_carry_are_kept(mesh):
    data = examples(8)
    weight = np.array([1, 2, 0, 1, 3, 0, 1, 1], "float32")
    state = create_state(mesh)
    params = params_of(state)
    errors = data["x"] @ params["kernel"][:, 0] + params["bias"] - data["y"]
    expected = (errors**2 * weight).sum() / weight.sum()
    found = ml.Trainer(state, loss_fn).evaluate([{**data, "weight": weight}])
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-6)


def test_batches_on_devices_are_taken_as_they_are(mesh):
    seen = []

    class Spy(ml.Trainer):
        def train_step(self, state, batch, metrics):
            seen.append(batch)
            return super().train_step(state, batch, metrics)

    batch = ml.relayout(examples(8), mesh.layout("batch", ...))
    quiet_fit(Spy(create_state(mesh), loss_fn), [batch])
    assert seen[0] is batch


def test_without_padding_a_scalar_loss_is_taken(mesh):
    def scalar_loss(model, batch):
        return loss_fn(model, batch)[0].mean()

    state, batches = create_state(mesh), cut(examples(16), 8)
    _, _, (loss,) = numpy_epochs(state, batches, epochs=1)
    history = quiet_fit(ml.Trainer(state, scalar_loss, pad=False), batches)
    np.testing.assert_allclose(history["loss"], [loss], rtol=1e-6)


@pytest.mark.parametrize(
    ("axes", "given", "expected"),
    [
        ({"batch": 2, "model": 2}, None, "batch"),
        ({"data": 2, "fsdp": 2}, None, ("data", "fsdp")),
        ({"model": 4}, None, None),
        ({"model": 4}, ("model", ...), "model"),
    ],
)
def test_batches_are_sharded_over_the_axes_for_it(axes, given, expected):
    layouts = []

    class Spy(ml.Trainer):
        def eval_step(self, state, batch, metrics):
            layouts.append(ml.fetch_layout(batch["x"]))
            return ml.metrics.Metrics({})

    mesh = ml.create_mesh(axes, devices=jax.devices()[:4])
    layout = None if given is None else mesh.layout(*given)
    Spy(create_state(mesh), data_layout=layout).evaluate([examples(8)])
    assert layouts == [mesh.layout(expected, None)]


def test_a_state_on_one_device_needs_no_mesh():
    mesh = ml.create_mesh({"batch": 1}, devices=jax.devices()[:1])
    state = jax.device_put(create_state(mesh), jax.devices()[0])
    trainer = ml.Trainer(state, loss_fn)
    assert quiet_fit(trainer, cut(examples(6), 4))["loss"][0] > 0
    assert trainer.predict(cut(examples(6), 4))["out"].shape == (6,)


# Data.


class Counted(ml.Trainer):
    """Counts instead of training, and keeps what it saw."""

    def __init__(self):
        super().__init__({"n": jnp.int32(0)}, pad=False)
        self.seen = []

    def train_step(self, state, batch, metrics):
        self.seen.append(int(batch["i"][0]))
        return state, ml.metrics.Metrics({"i": ml.metrics.Last().update(batch["i"][0])})


def numbered(*numbers):
    return [{"i": np.array([number], np.float32)} for number in numbers]


def test_a_list_and_a_function_start_over_each_epoch():
    for data in (numbered(1, 2), lambda: iter(numbered(1, 2))):
        trainer = Counted()
        quiet_fit(trainer, data, 2)
        assert trainer.seen == [1, 2, 1, 2]


def test_epochs_of_a_number_of_steps_leave_nothing_out():
    trainer = Counted()
    history = quiet_fit(trainer, numbered(1, 2, 3), 3, steps_per_epoch=2)
    assert trainer.seen == [1, 2, 3, 1, 2, 3]
    assert history["i"] == [2, 1, 3]


def test_an_iterator_continues_where_it_stopped_in_a_later_fit_too():
    trainer, data = Counted(), itertools.count(1)
    batches = (numbered(i)[0] for i in data)
    quiet_fit(trainer, batches, 2, steps_per_epoch=2)
    quiet_fit(trainer, batches, 1, steps_per_epoch=1)
    assert trainer.seen == [1, 2, 3, 4, 5]
    assert trainer.history.epochs == [1, 2, 3]


@pytest.mark.parametrize("steps", [3, 4])
def test_an_iterator_that_ends_ends_training(steps):
    trainer = Counted()
    history = quiet_fit(trainer, iter(numbered(1, 2, 3, 4)), 9, steps_per_epoch=steps)
    assert trainer.seen == [1, 2, 3, 4]
    assert history.stopped == "the training data ended at step 4"
    assert len(history.epochs) == (2 if steps == 3 else 1)


def test_predict_returns_the_real_examples_in_order(mesh):
    data = examples(21)
    state = create_state(mesh)
    params = params_of(state)
    expected = data["x"] @ params["kernel"][:, 0] + params["bias"]
    by_loss = ml.Trainer(state, loss_fn).predict(cut(data, 8))
    np.testing.assert_allclose(by_loss["out"], expected, atol=1e-6)
    of_arrays = ml.Trainer(state, predict_fn=lambda model, x: {"o": (model(x), x)})
    found, x = of_arrays.predict([one["x"] for one in cut(data, 8)])["o"]
    np.testing.assert_allclose(found[:, 0], expected, atol=1e-6)
    np.testing.assert_array_equal(x, data["x"])


def test_predict_returns_every_row_that_came_and_no_padding(mesh):
    data = examples(8)
    batch = {**data, "weight": np.array([1] * 5 + [0] * 3, "float32")}
    placed = ml.relayout(batch, mesh.layout("batch", ...))
    trainer = ml.Trainer(create_state(mesh), predict_fn=lambda model, b: b["x"])
    for batches in ([placed], [batch], cut(batch, 6)):
        np.testing.assert_array_equal(trainer.predict(batches), data["x"])
    padded = ml.distribute_dataset(
        {"x": data["x"][:5]}, mesh, global_batch_size=8, weights="weight"
    )
    np.testing.assert_array_equal(trainer.predict(padded), data["x"][:5])


def pair_loss(model, batch):
    x, y = batch
    return jnp.square(model(x)[:, 0] - y), {"out": -model(x)}


def test_data_without_labels_goes_to_the_model(mesh):
    data = examples(21)
    trainer = ml.Trainer(create_state(mesh), pair_loss)
    quiet_fit(trainer, data["x"], data["y"], batch_size=8, epochs=2)
    params = params_of(trainer.state)
    expected = data["x"] @ params["kernel"] + params["bias"]
    bare = trainer.predict(data["x"], batch_size=8)
    np.testing.assert_allclose(bare, expected, atol=1e-5)
    batches = [{"x": one["x"]} for one in cut(data, 8)]
    np.testing.assert_array_equal(trainer.predict(batches), bare)
    padded = ml.distribute_dataset({"x": data["x"]}, mesh, global_batch_size=8)
    np.testing.assert_array_equal(trainer.predict(padded), bare)
    whole = trainer.predict((data["x"], data["y"]), batch_size=8)
    np.testing.assert_allclose(whole["out"], -expected, atol=1e-5)

    def twice(model, x):
        return 2 * model(x)

    np.testing.assert_allclose(
        trainer.predict(data["x"], batch_size=8, predict_fn=twice), 2 * bare
    )


def test_a_single_array_is_predicted_as_it_was_trained_on(mesh):
    def autoencoder(model, batch):
        (x,) = batch
        return jnp.square(model(x) - x).mean(axis=-1), {"out": model(x)}

    x = examples(8)["x"]
    trainer = ml.Trainer(create_state(mesh), autoencoder)
    quiet_fit(trainer, (x,), batch_size=8)
    found = trainer.predict(x, batch_size=8)["out"]
    np.testing.assert_array_equal(found, trainer.predict((x,), batch_size=8)["out"])


def test_predicting_what_the_loss_function_cannot_read_says_what_to_do(mesh):
    def labeled_loss(model, batch):
        logits = model(batch["x"])
        return (logits - batch["y"]) ** 2, {"logits": logits}

    trainer = ml.Trainer(create_state(mesh), labeled_loss)
    with pytest.raises(KeyError) as caught:
        trainer.predict({"x": examples(8)["x"]}, batch_size=8)
    assert (
        "predict calls labeled_loss for its outputs, and what it reads of a batch has to "
        "be there. Without labels, give predict_fn=, a function of the model and a batch."
    ) in caught.value.__notes__


def test_evaluate_measures_the_real_examples_and_changes_nothing(mesh):
    data = examples(13)
    trainer = ml.Trainer(create_state(mesh), loss_fn)
    params = params_of(trainer.state)
    errors = data["x"] @ params["kernel"][:, 0] + params["bias"] - data["y"]
    for _ in range(2):
        found = trainer.evaluate(cut(data, 8))
        np.testing.assert_allclose(found["loss"], (errors**2).mean(), rtol=1e-6)
    assert_same_bits(params_of(trainer.state), params)


def test_weights_that_the_trainer_would_not_see_are_refused(mesh):
    data = examples(13)
    source = data["x"], data["y"]
    batches = ml.distribute_dataset(source, mesh, global_batch_size=8, weights=2)

    def losses(model, batch):
        return jnp.square(model(batch[0])[:, 0] - batch[1])

    trainer = ml.Trainer(create_state(mesh), losses)
    with pytest.raises(ml.MeshLayoutError) as caught:
        trainer.fit(batches)
    assert str(caught.value) == (
        "the batch's weights are at 2, but the step looks for them at 'weight', so that "
        "padding would count as examples. Give weights=2 to the step, or weights='weight' to the dataset."
    )
    for padded in (batches, iter(batches)):  # predict would return the padding
        with pytest.raises(ml.MeshLayoutError, match="padding would count as examples"):
            trainer.predict(padded)
    trainer = ml.Trainer(create_state(mesh), losses, weights=2)
    found = trainer.evaluate(batches)
    params = params_of(trainer.state)
    errors = data["x"] @ params["kernel"][:, 0] + params["bias"] - data["y"]
    np.testing.assert_allclose(found["loss"], (errors**2).mean(), rtol=1e-6)


def test_evaluate_takes_another_batch_size_than_fit_without_a_warning(mesh):
    trainer = ml.Trainer(create_state(mesh, optax.sgd(0.0)), loss_fn)
    data = examples(12)
    quiet_fit(trainer, cut(data, 4), validation_data=cut(data, 12))
    first = trainer.history["val_loss"][0]
    for size in (8, 12):
        found = trainer.evaluate(cut(data, size))
        np.testing.assert_allclose(found["loss"], first, rtol=1e-6)
        assert len(trainer.predict(cut(data, size))["out"]) == 12


def test_validation_is_evaluate_after_the_epoch(mesh):
    data, held_out = cut(examples(16), 8), cut(examples(11, seed=1), 8)
    trainer = ml.Trainer(create_state(mesh), loss_fn)
    history = quiet_fit(trainer, data, 2, validation_data=held_out)
    assert list(history) == ["loss", "val_loss"]
    assert history["val_loss"][-1] == trainer.evaluate(held_out)["loss"]


# History.


def test_a_history_is_a_table(mesh):
    trainer = Counted()
    quiet_fit(trainer, numbered(1, 2))
    quiet_fit(trainer, numbered(5))
    assert repr(trainer.history).splitlines() == [
        "epoch       i",
        "─────  ──────",
        "    1  2.0000",
        "    2  5.0000",
    ]
    assert "<table" in trainer.history._repr_html_()
    assert trainer.history.to_dict() == {"i": [2.0, 5.0]}
    with pytest.raises(KeyError, match=r"the history has no 'j', only 'i'\."):
        trainer.history["j"]


# No waiting.


def test_nothing_is_read_before_the_end_of_an_epoch(mesh, monkeypatch, tmp_path):
    reads = []
    array = type(jnp.zeros(()))
    for name in ("__float__", "__array__", "__int__", "__bool__", "block_until_ready"):
        real = getattr(array, name)

        def spy(self, *args, name=name, real=real, **kwargs):
            reads.append(name)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(array, name, spy)
    # As on a device that is far behind: what is not there is not read.
    monkeypatch.setattr(array, "is_ready", lambda self: False)
    monkeypatch.setattr(jax, "block_until_ready", lambda x: reads.append("wait") or x)
    counts = []

    class Count(ml.callbacks.Callback):
        def on_step_end(self, trainer, step, metrics):
            counts.append(len(reads))

    trainer = ml.Trainer(create_state(mesh), loss_fn)
    quiet_fit(trainer, cut(examples(56), 8))  # seven steps: CPUs wait at the eighth
    reads.clear()
    terminal = Console(file=io.StringIO(), force_terminal=True)
    callbacks = [
        ml.callbacks.Progress(terminal),
        ml.callbacks.StopOnNaN(),
        ml.callbacks.Log(tmp_path / "log.jsonl", every=1),
        Count(),
    ]
    trainer.fit(cut(examples(24), 8), callbacks=callbacks)
    before = counts[-3]
    assert counts[-3:] == [before] * 3
    float(jnp.zeros(()))
    assert len(reads) > before  # the spy sees reads


# Overriding.


def test_options_of_the_steps_are_those_of_make_train_step():
    taken = set(inspect.signature(ml.make_train_step).parameters)
    typed = set(inspect.get_annotations(ml.trainer.StepOptions))
    assert typed == taken - {"loss_fn", "metrics", "layouts"}


def test_a_subclass_may_override_a_step_and_keep_the_rest(mesh):
    class Twice(ml.Trainer):
        def train_step(self, state, batch, metrics):
            state, _ = super().train_step(state, batch, None)
            return super().train_step(state, batch, metrics)

    trainer = Twice(create_state(mesh), loss_fn)
    batches = cut(examples(16), 8)
    _, _, (loss,) = numpy_epochs(
        trainer.state, [b for b in batches for _ in range(2)], 1
    )
    quiet_fit(trainer, batches)
    assert int(trainer.state.step) == 4
    assert trainer.history["loss"][0] < loss


def run_gan(layouts, steps=4):
    state = gan.create_state(layouts, learning_rate=1e-3, hidden_features=16)
    images = np.random.default_rng(0).uniform(-1, 1, (8 * steps - 3, 28, 28, 1))
    images = images.astype("float32")
    batches = [{"image": images[at : at + 8]} for at in range(0, len(images), 8)]
    trainer = gan.GANTrainer(state, layouts.mesh)
    history = quiet_fit(trainer, batches, 2)
    return trainer.state, history


# For both models; columns, then rows.
GAN_RULES = {
    r"hidden/kernel": (None, "model"),
    r"hidden/bias": ("model",),
    r"output/kernel": ("model", None),
}


@pytest.mark.slow
def test_a_gan_on_a_mesh_is_the_gan_on_one_device(mesh_2x4):
    one = ml.create_mesh({"batch": 1}, devices=jax.devices()[:1])
    alone, expected = run_gan(ml.parallel.data_parallel(one))
    sharded = (
        ml.LayoutMap(mesh_2x4, GAN_RULES),
        ml.parallel.fsdp(mesh_2x4, min_bytes=1024),
    )
    for layouts in sharded:
        state, history = run_gan(layouts)
        for name in ("generator", "discriminator"):
            assert np.isfinite(history[name]).all()
            np.testing.assert_allclose(history[name], expected[name], rtol=1e-5)
            # Adam divides by the root of squares, near zero for some gradients.
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
                params_of(state[name]),
                params_of(alone[name]),
            )
    assert int(alone["generator"].step) == int(alone["discriminator"].step) == 8


def test_the_models_examples_run():
    assert doctest.testmod(gan).failed == 0


# Interrupts and errors.


class BangError(Exception):
    """What a user's code raises."""


MOMENTS = [
    "on_fit_start",
    "on_epoch_start",
    "on_step_end",
    "on_epoch_end",
    "on_fit_end",
]


@pytest.mark.parametrize(
    ("moment", "error"),
    [(moment, BangError) for moment in MOMENTS] + [("on_step_end", KeyboardInterrupt)],
)
def test_training_continues_after_an_error_in_a_callback(moment, error, mesh):
    def bang(self, trainer, *args):
        if trainer.position.epoch >= 2 or moment == "on_fit_start":
            raise error

    trainer = ml.Trainer(create_state(mesh), loss_fn)
    batches = cut(examples(16), 8)
    callback = type("Bad", (ml.callbacks.Callback,), {moment: bang})()
    with pytest.raises(error):
        quiet_fit(trainer, batches, 2, callbacks=[callback])
    steps = {"on_fit_start": 0, "on_epoch_start": 2, "on_step_end": 3}.get(moment, 4)
    epochs = {"on_fit_start": 0, "on_epoch_start": 1, "on_step_end": 1}.get(moment, 2)
    assert int(trainer.state.step) == steps
    assert trainer.history.epochs == list(range(1, epochs + 1))
    quiet_fit(trainer, batches)
    assert int(trainer.state.step) == trainer.position.step == steps + 2
    assert trainer.history.epochs == list(range(1, epochs + 2))


def test_training_continues_after_an_error_in_the_data(mesh):
    def bad():
        yield from cut(examples(16), 8)
        raise BangError

    trainer = ml.Trainer(create_state(mesh), loss_fn)
    with pytest.raises(BangError):
        quiet_fit(trainer, bad)
    assert int(trainer.state.step) == 2
    quiet_fit(trainer, cut(examples(16), 8))
    assert int(trainer.state.step) == 4


@pytest.fixture
def ctrl_c():
    """Has SIGINT interrupt this process, also where it is a background job."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_within_a_step_waits_for_the_new_state(mesh):
    class Interrupted(ml.Trainer):
        def train_step(self, state, batch, metrics):
            result = super().train_step(state, batch, metrics)
            if self.position.step == 1:
                signal.raise_signal(signal.SIGINT)
            return result

    before = signal.getsignal(signal.SIGINT)
    trainer = Interrupted(create_state(mesh), loss_fn)
    with pytest.raises(KeyboardInterrupt):
        quiet_fit(trainer, cut(examples(32), 8))
    assert signal.getsignal(signal.SIGINT) is before
    assert int(trainer.state.step) == 2
    assert np.isfinite(params_of(trainer.state)["kernel"]).all()


INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
import jax
jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp, numpy as np, optax
from flax import nnx
import meshlayout as ml

def loss_fn(model, batch):
    return jnp.square(model(batch["x"])[:, 0])

layouts = ml.LayoutMap(ml.create_mesh({"batch": 4}), {})
state = ml.TrainState.create(
    lambda: nnx.Linear(256, 256, rngs=nnx.Rngs(0)), optax.sgd(1e-3), layouts
)

class Started(ml.callbacks.Callback):
    def on_step_end(self, trainer, step, metrics):
        if step == 20:
            print("started", flush=True)

def forever():
    while True:
        yield {"x": np.ones((64, 256), "float32")}

trainer = ml.Trainer(state, loss_fn)
try:
    trainer.fit(forever, steps_per_epoch=10**9, callbacks=[Started()])
except KeyboardInterrupt:
    print("interrupted", flush=True)
before = int(trainer.state.step)
trainer.fit(forever, steps_per_epoch=5, progress=False)
print(int(trainer.state.step) - before, before == trainer.position.step - 5)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's here")
def test_a_real_ctrl_c_leaves_a_state_to_continue_from():
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path.cwd())},
    ) as process:
        try:
            assert process.stdout.readline() == "started\n", process.stderr.read()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert out.splitlines() == ["interrupted", "5 True"], err[-2000:]


# Messages.


def test_an_unknown_option_is_refused():
    message = message_of(lambda: ml.Trainer({}, loss_fn, clip_nrm=1.0))
    assert message.startswith(
        "Trainer has no option 'clip_nrm'. Did you mean 'clip_norm'? The options of its steps are regularizers, weights, "
    )


def test_options_without_a_loss_function_are_refused():
    assert message_of(lambda: ml.Trainer({}, metrics={}, ema=0.9)) == (
        "Trainer got no loss function, but ema, metrics for the steps that are made from one. Give loss_fn, or leave these to your own steps."
    )


@pytest.mark.parametrize(
    ("step", "run"),
    [
        ("train_step", lambda trainer, data: trainer.fit(data, progress=False)),
        ("eval_step", lambda trainer, data: trainer.evaluate(data)),
        ("predict_step", lambda trainer, data: trainer.predict(data)),
    ],
)
def test_a_trainer_without_a_loss_function_says_which_step_it_lacks(step, run):
    trainer = ml.Trainer({"n": jnp.zeros(())})
    assert message_of(lambda: run(trainer, [{"x": np.ones(2)}])) == (
        f"the trainer has no loss function to make {step} from: give loss_fn, or "
        f"override {step} in a subclass."
    )


@pytest.mark.parametrize(
    "data",
    [{"x": np.ones((2, 3))}, np.ones((2, 3)), (np.ones(2), np.ones(2))],
    ids=["dict", "array", "tuple"],
)
def test_arrays_without_a_batch_size_are_answered_with_the_line_to_write(data):
    text = message_of(lambda: Counted().fit(data))
    assert text.startswith("fit: train is ")
    assert text.endswith(
        ", of arrays with 2 rows. Give the size of a batch, fit(train, "
        "batch_size=32), or an iterable of batches, which may be a list of one batch."
    )
    text = message_of(lambda: Counted().fit(np.ones(2), np.ones(2)))
    assert "fit(train, labels, batch_size=32)" in text


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            3,
            "train must be an iterable of batches, or a function that returns one, got 3.",
        ),
        (
            lambda: None,
            "train is a function that returned None, not an iterable of batches.",
        ),
        (lambda a: [], "train is called as train(), but takes (a)."),
    ],
)
def test_what_cannot_be_data_is_refused(data, expected):
    assert message_of(lambda: quiet_fit(Counted(), data)) == expected


def test_data_that_gives_nothing_is_refused():
    for data in ([], iter([]), list):
        assert message_of(lambda data=data: quiet_fit(Counted(), data)) == (
            "train yielded no batch. Perhaps it is a used-up iterator."
        )


def test_an_iterator_for_several_epochs_is_refused():
    assert message_of(lambda: Counted().fit(iter([]), epochs=3)) == (
        "train is an iterator, which yields its batches only once, but epochs=3. Give the number of batches in an epoch, steps_per_epoch=, or a list, or a function that "
        "returns a new iterator."
    )


def test_a_batch_that_cannot_be_padded_is_computed_whole(mesh, caplog):
    def tuple_loss(model, batch):
        return loss_fn(model, {"x": batch[0], "y": batch[1]})

    data = examples(14)
    state = create_state(mesh)
    w, _, losses = numpy_epochs(state, cut(data, 8), epochs=2)
    trainer = ml.Trainer(state, tuple_loss)
    batches = [(one["x"], one["y"]) for one in cut(data, 8)]
    history = quiet_fit(trainer, batches, 2)
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)
    np.testing.assert_allclose(params_of(trainer.state)["kernel"][:, 0], w, atol=1e-5)
    assert [record.getMessage() for record in caplog.records] == [
        "a batch of 6 rows does not divide into 4 shards, and cannot be padded: every device computes the whole batch."
    ]


def mean_loss(model, batch):
    return loss_fn(model, batch)[0].mean()


@pytest.mark.parametrize("options", [{}, {"steps_per_call": 2}], ids=str)
@pytest.mark.parametrize("size", [pytest.param(8, marks=pytest.mark.slow), 6])
def test_a_mean_as_the_loss_trains_on_a_generator(mesh, size, options):
    state, batches = create_state(mesh), cut(examples(22), size)
    w, _, losses = numpy_epochs(state, batches, epochs=2)
    trainer = ml.Trainer(state, mean_loss, **options)
    history = quiet_fit(trainer, lambda: iter(batches), 2, validation_data=batches)
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)
    np.testing.assert_allclose(params_of(trainer.state)["kernel"][:, 0], w, atol=1e-5)
    measured = trainer.evaluate(lambda: iter(batches))["loss"]
    np.testing.assert_allclose(history["val_loss"][-1], measured, rtol=1e-6)


def test_a_loss_that_fits_with_no_weights_either_says_so(mesh):
    def wrong(model, batch):
        return loss_fn(model, batch)[0][:3]

    trainer = ml.Trainer(create_state(mesh), wrong)
    with pytest.raises(ml.errors.LossError) as caught:
        quiet_fit(trainer, lambda: iter(cut(examples(8), 8)))
    assert caught.value.__notes__[-1] == "in fit: batch 1 of epoch 1"


# Arrays.


@pytest.mark.parametrize(
    "kind", ["dict", pytest.param("tuple", marks=pytest.mark.slow), "labels"]
)
def test_arrays_train_with_a_batch_size(mesh, kind):
    def pair_loss(model, batch):
        return loss_fn(model, {"x": batch[0], "y": batch[1]})[0]

    data = examples(22)
    state = create_state(mesh)
    w, _, losses = numpy_epochs(state, cut(data, 8), epochs=2)
    trainer = ml.Trainer(state, loss_fn if kind == "dict" else pair_loss)
    options: Any = {"batch_size": 8, "shuffle": None, "progress": False}
    pair = data["x"], data["y"]
    if kind == "dict":
        history = trainer.fit(data, 2, validation_data=data, **options)
    elif kind == "tuple":
        history = trainer.fit(pair, epochs=2, validation_data=pair, **options)
    else:
        history = trainer.fit(*pair, epochs=2, validation_data=pair, **options)
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)
    np.testing.assert_allclose(params_of(trainer.state)["kernel"][:, 0], w, atol=1e-5)
    given = (data,) if kind == "dict" else pair
    measured = trainer.evaluate(*given, batch_size=8)
    np.testing.assert_allclose(history["val_loss"][-1], measured["loss"], rtol=1e-6)
    predicting = ml.Trainer(trainer.state, predict_fn=lambda model, x: model(x)[:, 0])
    found = predicting.predict(data["x"], batch_size=8)
    expected = data["x"] @ w + params_of(trainer.state)["bias"]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_arrays_are_shuffled_again_in_each_epoch_and_lose_no_row():
    class Rows(ml.Trainer):
        def train_step(self, state, batch, metrics):
            seen.append(np.asarray(batch["i"]).astype(int).tolist())
            return state, ml.metrics.Metrics({})

    seen: list[list[int]] = []
    trainer = Rows({"n": jnp.int32(0)}, pad=False)
    rows = {"i": np.arange(10, dtype="float32")}
    trainer.fit(rows, epochs=2, batch_size=4, progress=False)
    epochs = [[*itertools.chain(*seen[:3])], [*itertools.chain(*seen[3:])]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1] != list(range(10))


# Batches that do not fit.


def test_an_error_in_a_later_batch_says_which_it_was(mesh):
    first = examples(8)
    trainer = ml.Trainer(create_state(mesh), loss_fn, on_recompile="ignore")
    data = [first, first, {"x": first["x"]}]
    with pytest.raises(KeyError) as caught:
        quiet_fit(trainer, lambda: iter(data))
    assert caught.value.__notes__[-1] == "in fit: batch 3 of epoch 1"
    assert int(trainer.state.step) == 2
    with pytest.raises(KeyError) as caught:
        trainer.evaluate(lambda: iter(data))
    assert caught.value.__notes__[-1] == "in evaluate: batch 3"


# Arguments.


def test_fit_inside_of_fit_is_refused_and_the_callback_is_named(mesh):
    class Again(ml.callbacks.Callback):
        def on_step_end(self, trainer, step, metrics):
            quiet_fit(trainer, cut(examples(8), 8))

    trainer = ml.Trainer(create_state(mesh), loss_fn)
    with pytest.raises(ml.MeshLayoutError) as caught:
        quiet_fit(trainer, cut(examples(8), 8), callbacks=[Again()])
    assert str(caught.value) == (
        "fit was called inside a fit of the same trainer, by a callback or the data. "
        "Call it after the other one has returned, or make another Trainer."
    )
    assert caught.value.__notes__ == ["in Again.on_step_end, at step 1, epoch 1"]
    assert quiet_fit(trainer, cut(examples(8), 8)).epochs == [1]


BAD = [None, float("nan"), -1, 0, "x", object(), 1.5]


def test_a_shuffle_without_a_seed_is_refused():
    said = message_of(lambda: Counted().fit(numbered(1, 2), shuffle=True))
    assert said == (
        "fit: shuffle=True is no seed: give a seed, shuffle=0, which with the epoch "
        "determines the order of the rows; or shuffle=None, which keeps their order."
    )


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(
    "name",
    [
        *("epochs", "steps_per_epoch", "batch_size", "shuffle", "progress", "resume"),
        *("callbacks", "validation_data", "train"),
    ],
)
def test_arguments_of_fit_work_or_are_refused_with_a_sentence(mesh, name, value):
    can_be_none = ("steps_per_epoch", "batch_size", "validation_data", "shuffle")
    if (value is None and name in can_be_none) or (name == "shuffle" and value == 0):
        return
    trainer = Counted()
    arguments: Any = {"train": numbered(1, 2), "progress": False, name: value}
    with pytest.raises(ml.MeshLayoutError) as caught:
        trainer.fit(**arguments)
    assert str(caught.value).endswith(".")
    assert trainer.seen == []


@pytest.mark.parametrize("value", [*BAD, 3])
@pytest.mark.parametrize("name", ["loss_fn", "predict_fn", "pad", "metrics"])
def test_arguments_of_the_trainer_work_or_are_refused_with_a_sentence(
    mesh, name, value
):
    if value is None and name != "pad":
        return
    arguments: Any = {"loss_fn": loss_fn, name: value}
    with pytest.raises(ml.MeshLayoutError) as caught:
        ml.Trainer({}, **arguments)
    assert str(caught.value).endswith(".")


def test_a_history_shows_small_and_large_values_in_powers_of_ten():
    history = ml.History()
    for epoch, (loss, rate) in enumerate([(0.788, 1e-5), (0.81, 2e-3), (1e6, 1.0)], 1):
        history.add(epoch, {"loss": loss, "rate": rate})
    assert repr(history).splitlines()[2:] == [
        "    1    0.7880  1.00e-05",
        "    2    0.8100  2.00e-03",
        "    3  1.00e+06    1.0000",
    ]


@pytest.mark.parametrize(
    ("result", "what"),
    [
        (None, "None"),
        (ml.metrics.Metrics({}), "a Metrics"),
        ((1, 2, 3), "(1, 2, 3)"),
        ((1, {"loss": 1.0}), "(1, {'loss': 1.0})"),
    ],
)
def test_a_step_that_returns_no_pair_is_refused(result, what):
    class Bad(ml.Trainer):
        def train_step(self, state, batch, metrics) -> Any:
            return result

    assert message_of(lambda: quiet_fit(Bad({"n": 0}), [{"x": np.ones(1)}])) == (
        "Bad.train_step must return (state, metrics), with metrics of type "
        f"ml.metrics.Metrics, got {what}."
    )


@pytest.mark.parametrize("value", [*BAD, True])
@pytest.mark.parametrize(
    "call",
    [
        lambda bad: ml.Trainer({}, steps_per_call=bad),
        lambda bad: ml.Trainer({}, weights=bad),
        lambda bad: ml.Trainer({}).stop(bad),
        lambda bad: ml.Trainer({}).evaluate(bad),
        lambda bad: ml.Trainer({}).predict(bad),
        lambda bad: ml.Trainer({}).evaluate([], batch_size=bad),
        lambda bad: ml.History().add(bad, {}),
        lambda bad: ml.History().add(1, bad),
    ],
    ids=lambda call: inspect.getsource(call).strip(),
)
def test_every_other_argument_works_or_is_refused_with_a_sentence(call, value):
    message = refusal(ml.MeshLayoutError, call, value)
    # A text is a key of weights, a reason, and the worst that a history may hold.
    assert message.endswith(".") if message else isinstance(value, (int, str))


def test_outputs_that_do_not_fit_together_are_refused(mesh):
    trainer = ml.Trainer(create_state(mesh), predict_fn=lambda model, b: b["x"])
    data = [{"x": np.ones((8, 4), "float32")}, {"x": np.ones((8, 3), "float32")}]
    assert message_of(lambda: trainer.predict(data)) == (
        "predict: the outputs of the batches cannot be concatenated; each must be the same tree of arrays, which differ only in their first dim."
    )


def test_predict_names_what_is_not_an_output(mesh):
    def bare(model, batch):
        return loss_fn(model, batch)[0]

    state, data = create_state(mesh), [examples(8)]
    assert message_of(lambda: ml.Trainer(state, bare).predict(data)) == (
        "predict: bare returns losses but no outputs. Return a pair of losses and a dict "
        "of outputs, or give the trainer a predict_fn(model, batch)."
    )
    mean = ml.Trainer(state, predict_fn=lambda model, b: b["x"].mean())
    assert message_of(lambda: mean.predict(data)) == (
        "predict: an output has shape () for a batch of 8 rows; it must have one row per "
        "example."
    )


# Batches without examples, and means over batches of several sizes.


def test_a_batch_of_weight_0_makes_no_step(mesh, caplog):
    data = examples(16)
    data["weight"] = np.ones(16, "float32")
    batches = cut(data, 8)
    padding = {**batches[0], "weight": np.zeros(8, "float32")}
    empty = {name: rows[:0] for name, rows in data.items()}
    states = []
    for given in (batches, [padding, batches[0], padding, empty, batches[1]]):
        optimizer = optax.adamw(0.05, weight_decay=0.1)
        trainer = ml.Trainer(create_state(mesh, optimizer), loss_fn)
        history = quiet_fit(trainer, given)
        states.append((trainer.state.params, trainer.state.opt_state, history["loss"]))
        assert int(trainer.state.step) == trainer.position.step == 2
    assert_same_bits(*states)
    for number in (1, 3, 4):
        assert f"batch {number} of train has no rows, or only" in caplog.text


def test_weights_of_the_host_are_named_once_and_not_negative(mesh, caplog):
    data = {**examples(16), "weight": np.linspace(0.5, 2, 16, dtype="float32")}
    said = "examples are weighted by 'weight' of their batch."
    for call in (
        lambda trainer, data: quiet_fit(trainer, data, batch_size=8, epochs=2),
        lambda trainer, data: quiet_fit(trainer, cut(data, 8), epochs=2),
    ):
        caplog.clear()
        call(ml.Trainer(create_state(mesh), loss_fn), data)
        assert [x.getMessage() for x in caplog.records] == [said]
        data["weight"] = -data["weight"]
        with pytest.raises(ml.MeshLayoutError, match="'weight' has values from"):
            call(ml.Trainer(create_state(mesh), loss_fn), data)
        data["weight"] = -data["weight"]


def test_a_share_of_the_rows_is_held_out(mesh):
    data = examples(40)
    first, last = (
        {k: v[i] for k, v in data.items()} for i in (slice(30), slice(30, 40))
    )
    options = {"batch_size": 8, "epochs": 2, "shuffle": 3}
    split = ml.Trainer(create_state(mesh), loss_fn)
    whole = ml.Trainer(create_state(mesh), loss_fn)
    found = quiet_fit(split, data, validation_split=0.25, **options)
    expected = quiet_fit(whole, first, validation_data=last, **options)
    assert found.to_dict() == expected.to_dict()
    assert message_of(lambda: quiet_fit(split, cut(data, 8), validation_split=0.1)) == (
        "fit: validation_split= holds out rows of arrays. With batches, or validation "
        "data of your own, give validation_data= alone."
    )


def test_arrays_are_shuffled_by_the_users_seed():
    orders = []
    for seed in (0, 0, 7):
        seen = []

        class Rows(ml.Trainer):
            def train_step(self, state, batch, metrics):
                seen.extend(np.asarray(batch["i"]).astype(int).tolist())  # noqa: B023
                return state, ml.metrics.Metrics({})

        rows = {"i": np.arange(16, dtype="float32")}
        trainer = Rows({"n": jnp.int32(0)}, pad=False)
        quiet_fit(trainer, rows, batch_size=4, shuffle=seed)
        orders.append(seen)
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2]) == list(range(16))


def test_a_state_that_is_used_up_is_refused(mesh):
    state, batches = create_state(mesh), cut(examples(8), 8)
    quiet_fit(ml.Trainer(state, loss_fn), batches)
    other = ml.Trainer(state, loss_fn)
    for call in (quiet_fit, ml.Trainer.evaluate, ml.Trainer.predict):
        with pytest.raises(ml.MeshLayoutError, match="used up"):
            call(other, batches)


def test_verbose_0_shows_no_progress(mesh, capsys):
    ml.Trainer(create_state(mesh), loss_fn).fit(cut(examples(8), 8), verbose=0)
    assert capsys.readouterr().out == ""


def test_the_trainer_runs_under_a_mesh_that_is_set(mesh):
    batches, found = cut(examples(22), 8), []
    for ambient in (None, mesh):
        trainer = ml.Trainer(create_state(mesh), loss_fn)
        stop = ml.callbacks.StopOnNaN()
        data = {"validation_data": batches, "callbacks": [stop]}
        if ambient is None:
            history = quiet_fit(trainer, batches, 2, **data)
        else:
            with jax.set_mesh(ambient.jax_mesh):
                history = quiet_fit(trainer, batches, 2, **data)
        found.append((history.to_dict(), trainer.predict(batches)["out"].tolist()))
    assert found[1] == found[0]
