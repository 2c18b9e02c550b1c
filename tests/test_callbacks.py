"""Callbacks show, log, save and stop, and cost the loop no waiting."""

import csv
import dataclasses
import io
import json
import math
import re
import sys
import time
import types
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

import meshlayout as ml
from tests.error_messages import message_of
from tests.small_states import create, mesh_of


FEATURES = 4


@pytest.fixture
def state():
    optimizer = optax.inject_hyperparams(optax.sgd)(0.05)
    build = lambda: nnx.Linear(FEATURES, 1, rngs=nnx.Rngs(0))
    return create(mesh_of(batch=4), build, optimizer)


def loss_fn(model, batch):
    return jnp.square(model(batch["x"])[:, 0] - batch["y"])


def batches(count=3):
    x = np.random.default_rng(0).normal(size=(8 * count, FEATURES)).astype("float32")
    y = x @ np.arange(FEATURES).astype("float32")
    return [{"x": x[at : at + 8], "y": y[at : at + 8]} for at in range(0, len(x), 8)]


def fit(trainer, *callbacks, epochs=1, data=None, **options):
    data = batches() if data is None else data
    options = {"progress": False, **options}
    return trainer.fit(data, epochs, callbacks=callbacks, **options)


class Scripted(ml.Trainer):
    """Measures what it is told to, epoch by epoch; its parameter counts the epochs."""

    def __init__(self, *values, name="loss"):
        super().__init__({"w": jnp.zeros(2)}, pad=False)
        self.values, self.name = values, name
        self._step = ml.compile_step(lambda state, batch: ({"w": state["w"] + 1}, None))

    def train_step(self, state, batch, metrics):
        state, _ = self._step(state, batch["x"])
        value = jnp.float32(self.values[(self.position.epoch - 1) % len(self.values)])
        return state, ml.metrics.Metrics({self.name: ml.metrics.Last().update(value)})

    def run(self, *callbacks, **options):
        data = [{"x": np.ones(1, np.float32)}]
        return fit(self, *callbacks, epochs=len(self.values), data=data, **options)


def test_a_callback_is_called_at_every_moment_in_order(state):
    calls = []

    def recorded(moment):
        def method(self, trainer=None, *args):
            # An epoch, or a step and its metrics, or an epoch and its values.
            values = [sorted(x) if isinstance(x, dict) else x for x in args]
            is_step = moment == "on_step_end"
            assert not is_step or isinstance(values.pop()["loss"], jax.Array)
            calls.append((moment, *values))

        return method

    moments = [name for name in vars(ml.callbacks.Callback) if name[0] != "_"]
    own = type("Own", (ml.callbacks.Callback,), {x: recorded(x) for x in moments})
    trainer = ml.Trainer(state, loss_fn)
    fit(trainer, own(), epochs=2, data=batches(1), validation_data=batches(2))
    logs = ["learning_rate", "loss", "val_loss"]
    assert calls[0] == ("on_fit_start",)
    for epoch in (1, 2):
        assert calls[4 * epoch - 3 : 4 * epoch + 1] == [
            ("on_epoch_start", epoch),
            ("on_step_end", epoch),
            ("on_validation_start",),
            ("on_epoch_end", epoch, logs),
        ]
    assert calls[9:] == [("on_fit_end",), ("close",)]


def run_with(**methods):
    Scripted(1.0).run(type("Own", (ml.callbacks.Callback,), methods)())


WRONG = {
    "EarlyStopping('accuracy'): say mode='max' if higher values are better, or "
    "mode='min'.": lambda: ml.callbacks.EarlyStopping("accuracy"),
    "fit: callbacks must be a list of instances of ml.callbacks.Callback, got the class "
    "StopOnNaN.": lambda: Scripted(1.0).run(ml.callbacks.StopOnNaN),
    "fit never calls Own.on_train_begin. The methods of a callback are on_fit_start, "
    "on_epoch_start, on_step_end, on_validation_start, on_epoch_end, on_fit_end.": (
        lambda: run_with(on_train_begin=lambda self: None)
    ),
    "Own.on_epoch_end is called as Own.on_epoch_end(trainer, epoch, logs), but takes "
    "(epoch, logs).": lambda: run_with(
        on_epoch_end=lambda self, epoch, logs=None: None
    ),
    "EarlyStopping: mode must be 'min' or 'max', got 'least'.": (
        lambda: ml.callbacks.EarlyStopping(mode="least")
    ),
    "EarlyStopping: patience must be a positive integer, got 0.": (
        lambda: ml.callbacks.EarlyStopping(patience=0)
    ),
    "EarlyStopping(restore_best=True) restores the model of a TrainState. The state is "
    "{'w': Array([0., 0.], dtype=float32)}.": (
        lambda: Scripted(1.0).run(ml.callbacks.EarlyStopping("loss", restore_best=True))
    ),
    "Checkpoint: checkpointer must be an ml.Checkpointer(directory), got 'directory'.": (
        lambda: ml.callbacks.Checkpoint("directory")
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_refused_with_a_sentence(message):
    assert message_of(WRONG[message]) == message


class Mine(ml.callbacks.Callback):
    def on_epoch_end(self, trainer, epoch, logs):
        logs["mine"] = np.float32(1 / epoch)


def test_a_value_of_ones_own_is_in_the_history_and_can_be_watched(tmp_path):
    trainer = Scripted(*range(9))
    stopping = ml.callbacks.EarlyStopping("mine", mode="max", patience=2)
    saving = ml.Checkpointer(tmp_path, best=("mine", "max"))
    history = trainer.run(Mine(), stopping, ml.callbacks.Checkpoint(saving))
    np.testing.assert_allclose(history["mine"], [1, 1 / 2, 1 / 3])
    assert len(history["loss"]) == 3
    assert saving.best_step() == 1
    assert "there will be no 'mine'" in message_of(Scripted(1).run, stopping)
    assert message_of(Scripted(1).run, stopping, Mine()) == (
        "EarlyStopping: there will be no 'mine', only 'loss'. If a later callback adds "
        "it, list that one first."
    )
    misspelled = ml.callbacks.EarlyStopping("mien", mode="max")  # as is known later
    with pytest.raises(KeyError, match=r"only 'loss', 'mine'\. Did you mean 'mine'"):
        Scripted(1).run(Mine(), misspelled)


@pytest.mark.parametrize("kind", ["EarlyStopping", "StopOnNaN"])
def test_a_value_to_watch_that_is_not_there_is_named_at_once(kind, state):
    trainer = Scripted(1.0, name="val_loss")
    callback = getattr(ml.callbacks, kind)
    assert message_of(lambda: trainer.run(callback("vall_loss"))) == (
        f"{kind}: there will be no 'vall_loss', only 'val_loss'. Did you mean "
        "'val_loss'?"
    )
    assert trainer.position.step == 1  # not after an epoch
    trainer = ml.Trainer(state, loss_fn)
    data = {"data": batches(1), "validation_data": batches(1)}
    assert message_of(lambda: fit(trainer, callback("val_floss"), **data)).endswith(
        "only 'loss', 'learning_rate', 'val_loss', 'val_learning_rate'. Did you mean "
        "'val_loss'?"
    )
    words = "there will be no 'val_loss', only what a step returns. Give fit "
    for watching in (
        callback("val_loss"),
        ml.callbacks.Checkpoint(ml.Checkpointer("unused", best=("val_loss", "min"))),
    ):
        assert message_of(lambda: fit(trainer, watching)) == (  # noqa: B023
            f"{type(watching).__name__}: {words}validation_data= or validation_split=."
        )
    assert trainer.position.step == 1  # the step above


def test_a_fit_that_does_not_validate_any_more_says_so(state):
    trainer, callback = ml.Trainer(state, loss_fn), ml.callbacks.EarlyStopping()
    fit(trainer, callback, validation_data=batches(1))
    assert message_of(lambda: fit(trainer, callback)) == (
        "EarlyStopping: there will be no 'val_loss', only what a step returns. Give fit "
        "validation_data= or validation_split=."
    )
    assert trainer.position.step == 3  # at once
    with pytest.raises(KeyError, match="the history has no -1, only 'loss', "):
        trainer.history[-1]


def test_a_log_has_a_plain_line_per_epoch_and_a_terminal_a_bar(capsys):
    losses = 12.5, 0.75, math.nan, 0.0625, 1e-5
    history = Scripted(*losses).run(progress=True)
    lines = capsys.readouterr().out.splitlines()
    texts = [" 12.5000", "  0.7500", "     nan", "  0.0625", "1.00e-05"]
    for number, (line, text) in enumerate(zip(lines, texts, strict=True), 1):
        start, _, facts = line.partition("  (")
        assert start == f"epoch {number}/5  loss {text}"
        assert " left, " in facts or number == 5
        assert facts.endswith(" examples/s)")
    assert [line[-8:] for line in repr(history).splitlines()[2:]] == texts
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system=None)
    Scripted(*losses).run(ml.callbacks.Progress(terminal))
    shown = terminal.file.getvalue()
    assert "step 0" in shown
    assert all(f"epoch {n}/5  loss" in shown for n in range(1, 6))
    assert shown.endswith("\x1b[2K")  # the bar is taken away


@pytest.mark.parametrize("width", [200, 100, 70, 40, 20])
def test_the_lines_of_epochs_fit_the_terminal(state, width):
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    trainer = ml.Trainer(state, loss_fn)
    progress = ml.callbacks.Progress(console)
    fit(trainer, progress, epochs=2, validation_data=batches(1))
    text = re.sub(r"\x1b\[[0-9?]*[A-Za-z]|\r", "\n", out.getvalue())
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    (line,) = [x for x in lines if x.startswith("epoch 1/2  loss") and "step" not in x]
    facts = [" s", " left", " examples/s"]
    count = {200: 3, 100: 2, 70: 0}.get(width, 0)
    shown = [fact for fact in facts if f"{fact}," in line or f"{fact})" in line]
    assert shown == facts[:count]
    assert line.endswith("…") == (width <= 40)


def test_a_resumed_epoch_counts_its_own_examples(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    console = Console(file=io.StringIO())
    progress = ml.callbacks.Progress(console)
    trainer = Scripted(1.0)
    trainer.position = ml.trainer.epochs.TrainingPosition(
        epoch=3, last_epoch=3, step_in_epoch=5, examples_in_epoch=1_000_000
    )
    progress.on_fit_start(trainer)
    for more in (0, 60):
        progress.on_epoch_start(trainer, 3)
        examples = trainer.position.examples_in_epoch + more
        position = dataclasses.replace(trainer.position, examples_in_epoch=examples)
        trainer.position = position
        progress.on_epoch_end(trainer, 3, {"loss": 1.0})
    first, second = console.file.getvalue().splitlines()
    assert "examples/s" not in first
    assert second.endswith(" 60 examples/s)")


def test_the_first_epoch_whose_loss_is_nan_gives_one_hint(caplog):
    trainer = Scripted(1.0, math.nan, math.nan)
    trainer.run()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("the loss is NaN, as too high a learning rate makes it, NaN")
    assert "Parameters that are NaN stay so: create the state and " in said
    trainer.run()  # from parameters that may be NaN
    assert len(caplog.records) == 2
    caplog.clear()
    Scripted(1.0, math.nan).run(ml.callbacks.StopOnNaN())
    assert not caplog.records
    Scripted(math.nan, math.nan, name="val_loss").run()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("the val_loss is NaN, as ")
    assert "callbacks=[ml.callbacks.StopOnNaN('val_loss')] stops" in said


def test_a_notebook_has_one_display_whose_bar_moves(state, monkeypatch):
    shown = []
    display = types.ModuleType("IPython.display")
    display.HTML = str
    handle = types.SimpleNamespace(update=shown.append)
    display.display = lambda html, display_id: handle
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(ml.trainer.callbacks.progress, "_INTERVAL_S", 0)
    data = {"validation_data": batches(3), "progress": True}
    fit(ml.Trainer(state, loss_fn), epochs=2, **data)
    assert sum("validating" in html for html in shown) == 2
    assert "<progress" in shown[0]
    assert all(f"epoch {n}/2  loss " in shown[-1] for n in (1, 2))
    assert not re.search("<progress|validating", shown[-1])


def test_early_stopping_waits_for_its_patience():
    trainer = Scripted(3.0, 2.0, 2.5, 1.95, 2.1, 0.0)
    stopping = ml.callbacks.EarlyStopping("loss", patience=2, min_delta=0.1)
    history = trainer.run(stopping)
    assert history["loss"] == pytest.approx([3.0, 2.0, 2.5, 1.95])
    assert history.stopped == "loss has not improved since epoch 2"
    stopping = ml.callbacks.EarlyStopping("loss", patience=2)
    history = Scripted(math.nan, math.nan, 1.0).run(stopping)
    assert history.stopped == "loss was not a number in any epoch"


@pytest.mark.parametrize("patience", [2, 9])  # stopped, or not
def test_the_best_parameters_keep_layout_step_and_random_streams(patience):
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(FEATURES, 1, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dense(self.dropout(x))

    class Keep(ml.callbacks.Callback):
        def on_epoch_end(self, trainer, epoch, logs):
            state = trainer.state
            kept.append(jax.tree.map(np.array, (state.params, state.extra["ema"])))

    kept = []
    mesh, rules = mesh_of(batch=4), {"kernel": ("batch", None)}
    state = create(mesh, lambda: Noisy(nnx.Rngs(0)), optax.sgd(0.1), rules)
    trainer = ml.Trainer(state, loss_fn, ema=0.9)
    # Epochs are better only if the loss falls by more than it can.
    options = {"patience": patience, "min_delta": 1e6, "restore_best": True}
    stopping = ml.callbacks.EarlyStopping("loss", **options)
    assert bool(fit(trainer, Keep(), stopping, epochs=3).stopped) == (patience == 2)
    state = trainer.state
    best = state.params, state.extra["ema"]
    jax.tree.map(np.testing.assert_array_equal, best, kept[0])
    layout = ml.fetch_layout(state.params["dense"]["kernel"])
    assert (layout, int(state.step)) == (mesh.layout("batch", None), 9)
    fit(trainer)


def test_nan_stops_training_within_the_epoch(state, capsys):
    Scripted(1.0, math.nan, 1.0).run(ml.callbacks.StopOnNaN(), progress=True)
    assert capsys.readouterr().out.splitlines()[-1] == "stopped: loss is nan at step 2"
    data = [batches(1)[0] for _ in range(200)]
    data[2] = {**data[2], "y": np.full(8, np.nan, np.float32)}
    history = fit(
        ml.Trainer(state, loss_fn), ml.callbacks.StopOnNaN(), epochs=5, data=data
    )
    assert history.epochs == [1]
    assert history.stopped == "loss is nan at step 3"
    assert repr(history).splitlines()[-1] == "stopped: loss is nan at step 3"


def test_a_csv_file_has_a_line_per_epoch_of_every_fit(state, tmp_path):
    path = tmp_path / "runs" / "log.csv"
    path.parent.mkdir()
    path.write_text("old\n")
    trainer, logger = ml.Trainer(state, loss_fn), ml.callbacks.Log(path)
    fit(trainer, logger, epochs=2)
    history = fit(trainer, logger)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [*rows[0]] == ["epoch", "step", *history]
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3]
    assert [int(row["step"]) for row in rows] == [3, 6, 9]
    assert [float(row["loss"]) for row in rows] == history["loss"]
    assert {float(row["learning_rate"]) for row in rows} == {float(np.float32(0.05))}
    fit(trainer, ml.callbacks.Log(path))  # another one begins anew
    assert len(path.read_text().splitlines()) == 2
    refused = ml.callbacks.Log(path)
    refused.on_fit_start(trainer)  # of a fit that another callback refuses
    refused.close()
    assert len(path.read_text().splitlines()) == 2
    Scripted(1.0, name="error").run(logger)  # a new column, and others without a value
    first, second = csv.DictReader(path.read_text().splitlines())
    assert (first["error"], second["error"], second["loss"]) == ("", "1.0", "")


class Counting(ml.Trainer):
    """Measures metrics with dims, and NaN."""

    def train_step(self, state, batch, metrics):
        counted = ml.metrics.ConfusionMatrix(2).update(jnp.eye(2), jnp.array([0, 0]))
        metrics = {"counts": counted, "loss": ml.metrics.Last().update(jnp.nan)}
        recall = ml.metrics.Recall(2, average=None)
        metrics["recall"] = recall.update(jnp.eye(2), jnp.array([0, 0]))
        return state, ml.metrics.Metrics(metrics)


def test_metrics_with_dims_and_nan_are_shown_as_far_as_each_place_holds_them(
    tmp_path, capsys
):
    loggers = [ml.callbacks.Log(tmp_path / f"log.{kind}") for kind in ("csv", "jsonl")]
    history = fit(Counting({"n": 0}), *loggers, data=[{"x": np.ones(2)}])
    counts = history["counts"][0].tolist()
    assert sum(map(sum, counts)) == 2
    row = json.loads((tmp_path / "log.jsonl").read_text())
    recall = [0.5, 0.0]  # of two rows of class 0 one is right; class 1 has none
    scalars = {"epoch": 1, "step": 1, "loss": None}
    assert row == {**scalars, "counts": counts, "recall": recall}
    lines = (tmp_path / "log.csv").read_text().split()
    assert lines == ["epoch,step,loss,recall_0,recall_1", "1,1,nan,0.5,0.0"]
    assert "f32[2, 2]" in repr(history)
    assert "recall_0" in repr(history.plot())
    fit(Counting({"n": 0}), data=[{"x": np.ones(2)}], progress=True)
    assert "recall [0.5000 0.0000]" in capsys.readouterr().out
    stopping = ml.callbacks.EarlyStopping("recall", mode="max")
    data = [{"x": np.ones(2)}]
    assert message_of(lambda: fit(Counting({"n": 0}), stopping, data=data)) == (
        "EarlyStopping: 'recall' has 2 values: watch a scalar, as of average='macro'."
    )


def test_tensorboard_gets_epochs(monkeypatch, tmp_path):
    package = unittest.mock.Mock()
    writer = package.SummaryWriter.return_value
    monkeypatch.setitem(sys.modules, "tensorboardX", package)
    Scripted(1.0, 0.5).run(ml.callbacks.Log(tmp_path))
    package.SummaryWriter.assert_called_once_with(str(tmp_path))
    scalars = [call.args for call in writer.add_scalar.call_args_list]
    assert scalars == [("loss", 1.0, 1), ("loss", 0.5, 2)]
    writer.close.assert_called_once()


@pytest.mark.parametrize(("every", "steps"), [(2, [2, 4, 6]), (3, [4, 6])])
def test_steps_of_many_at_once_are_due_when_they_pass(every, steps, state, tmp_path):
    trainer = ml.Trainer(state, loss_fn, steps_per_call=2)
    with ml.Checkpointer(tmp_path, keep=None) as ck:
        fit(trainer, ml.callbacks.Checkpoint(ck, every=every), data=batches(6))
        assert ck.all_steps() == steps


@pytest.mark.parametrize(("every", "own"), [(2, {}), ("epoch", {}), (1, {"every": 4})])
def test_the_best_epoch_is_kept_however_often_is_saved(every, own, tmp_path):
    data = [{"x": np.ones(1, np.float32)}] * 3
    with ml.Checkpointer(tmp_path, keep=1, best=("loss", "min"), **own) as ck:
        callback = ml.callbacks.Checkpoint(ck, every=every)
        fit(Scripted(3.0, 1.0, 2.0), callback, epochs=3, data=data)
        assert (ck.all_steps(), ck.best_step()) == ([6, 9], 6)
        assert ck.inspect(6).metadata["logs"] == {"loss": 1.0}
        assert ck.inspect(6).metadata["epoch"] == 2
        np.testing.assert_array_equal(ck.restore_numpy(step="best")["w"], [6, 6])


@pytest.mark.parametrize("every", [1, "epoch"])
def test_a_run_that_is_stopped_before_validation_is_saved(every, state, tmp_path):
    class Stop(ml.callbacks.Callback):
        def on_step_end(self, trainer, step, metrics):
            if step == 2:
                trainer.stop("enough")

    with ml.Checkpointer(tmp_path, best=("val_loss", "min")) as ck:
        trainer = ml.Trainer(state, loss_fn)
        callbacks = ml.callbacks.Checkpoint(ck, every=every), Stop()
        history = fit(trainer, *callbacks, epochs=3, validation_data=batches(1))
        assert (history.stopped, ck.latest_step()) == ("enough", 2)
        assert ck.best_step() is None
        assert set(ck.inspect().metadata["logs"]) == {"loss", "learning_rate"}
