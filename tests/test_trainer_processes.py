"""The trainer on two real processes does what it does on one."""

import contextlib
import io
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from tests.processes import run_processes


pytestmark = pytest.mark.multiprocess

ROWS, BATCH = 22, 8


def source():
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    return {"x": x, "y": x @ np.arange(1, 5).astype("float32")}


def loss_fn(model, batch):
    out = model(batch["x"])[:, 0]
    return jnp.square(out - batch["y"]), {"out": out, "label": batch["y"]}


def job(folder):
    """Trains, validates and predicts on all devices, and returns what came of it."""
    mesh = ml.create_mesh({"batch": 4}, devices=jax.devices()[:4])
    state = ml.TrainState.create(
        lambda: nnx.Linear(4, 1, rngs=nnx.Rngs(0)),
        optax.adam(0.05),
        ml.LayoutMap(mesh, {}),
    )
    data = ml.distribute_dataset(source(), mesh, global_batch_size=BATCH, shuffle=1)
    in_order = ml.distribute_dataset(source(), mesh, global_batch_size=BATCH)
    error = ml.metrics.MeanAbsoluteError("out", "label")
    trainer = ml.Trainer(state, loss_fn, metrics={"error": error})
    name = f"{jax.process_index()}-of-{jax.process_count()}"
    path = Path(folder) / f"{name}.csv"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        history = trainer.fit(
            data,
            epochs=3,
            validation_data=in_order,
            callbacks=[
                ml.callbacks.CSVLogger(path),
                ml.callbacks.EarlyStopping("val_loss", patience=5),
            ],
        )
    return {
        "loss": history["loss"],
        "val_error": history["val_error"],
        "evaluated": trainer.evaluate(in_order),
        "predicted": np.asarray(trainer.predict(in_order)["out"]).tolist(),
        "kernel": np.asarray(trainer.state.params["kernel"]).tolist(),
        "printed": len(printed.getvalue().splitlines()),
        "wrote": path.exists(),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("logs"))
    several = run_processes(2, job, folder, devices_per_process=2)
    return json.loads(json.dumps(job(folder))), several


@pytest.mark.parametrize("name", ["loss", "val_error", "kernel", "predicted"])
def test_two_processes_compute_what_one_does(results, name):
    one, several = results
    for found in several:
        np.testing.assert_allclose(found[name], one[name], rtol=2e-5, atol=1e-6)


def test_the_last_evaluation_is_the_last_validation(results):
    for found in results[1]:
        assert found["evaluated"]["error"] == pytest.approx(found["val_error"][-1])


def test_predictions_are_of_the_real_examples_in_order(results):
    for found in results[1]:
        kernel = np.array(found["kernel"])
        expected = source()["x"] @ kernel[:, 0]
        off = np.array(found["predicted"]) - expected
        assert len(off) == ROWS
        np.testing.assert_allclose(off, off[0], atol=1e-5)  # the bias


def test_only_process_0_talks(results):
    first, second = results[1]
    assert first["printed"] >= 3
    assert second["printed"] == 0
    assert (first["wrote"], second["wrote"]) == (True, False)
