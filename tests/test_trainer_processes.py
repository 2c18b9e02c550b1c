"""The trainer on two real processes does what it does on one."""

import contextlib
import functools
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
from meshlayout.data.agreement import WAY_OUT
from tests.processes import run_processes
from tests.resuming_runs import source
from tests.small_states import create, mesh_of


pytestmark = pytest.mark.multiprocess

ROWS, BATCH = 22, 8


def loss_fn(model, batch):
    out = model(batch["x"])[:, 0]
    return jnp.square(out - batch["y"]), {"out": out, "off": abs(out - batch["y"])}


def fit_failure(trainer, mesh, *, ends=False, **last):
    """The steps of a fit, and what is said if one process cannot read a batch.

    Or if its batches end there; of `last` of the data and of the validation. Without a
    mesh, they are plain arrays.
    """

    def batches(name):
        for number in range(4):
            if number == last[name] and jax.process_index() == 1:
                if ends:
                    return
                raise OSError(f"the {name} of batch {number} is gone")
            yield source(BATCH)

    data, validation = (functools.partial(batches, name) for name in last)
    if mesh is not None:
        options = {"global_batch_size": BATCH, "batched": True}
        data, validation = (
            ml.distribute_dataset(function, mesh, **options)
            for function in (data, validation)
        )
    start, said = int(trainer.state.step), "no error"
    try:
        trainer.fit(data, epochs=1, validation_data=validation)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return [int(trainer.state.step) - start, said]


def job(folder):
    """Trains, validates and predicts on all devices, and returns what came of it."""
    mesh = mesh_of(batch=4)
    build = lambda: nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    state = create(mesh, build, optax.adam(0.05))
    rows, options = source(ROWS), {"global_batch_size": BATCH}
    data = ml.distribute_dataset(rows, mesh, shuffle=1, **options)
    in_order = ml.distribute_dataset(rows, mesh, **options)
    error = ml.metrics.Mean("off")
    trainer = ml.Trainer(state, loss_fn, metrics={"error": error})
    name = f"{jax.process_index()}-of-{jax.process_count()}"
    path = Path(folder) / f"{name}.csv"
    printed = io.StringIO()
    stopping = ml.callbacks.EarlyStopping("val_loss", patience=5)
    callbacks = [ml.callbacks.Log(path), stopping]
    with contextlib.redirect_stdout(printed):
        history = trainer.fit(
            data, epochs=3, validation_data=in_order, callbacks=callbacks
        )
    return {
        "loss": history["loss"],
        "val_error": history["val_error"],
        "evaluated": trainer.evaluate(in_order),
        "predicted": np.asarray(trainer.predict(in_order)["out"]).tolist(),
        "kernel": np.asarray(trainer.state.params["kernel"]).tolist(),
        "printed": len(printed.getvalue().splitlines()),
        "wrote": path.exists(),
        "failed": [
            fit_failure(trainer, mesh, data=1, validation=4),
            fit_failure(trainer, mesh, data=4, validation=1),
            fit_failure(trainer, None, data=1, validation=4),
            fit_failure(trainer, None, data=4, validation=1),
            fit_failure(trainer, None, ends=True, data=2, validation=4),
        ],
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("logs"))
    several = run_processes(2, job, folder, devices_per_process=2, shared=True)
    return json.loads(json.dumps(job(folder))), several


@pytest.mark.parametrize("name", ["loss", "val_error", "kernel", "predicted"])
def test_two_processes_compute_what_one_does(results, name):
    one, several = results
    for found in several:
        np.testing.assert_allclose(found[name], one[name], rtol=2e-5, atol=1e-6)
    first, second = several
    assert first["evaluated"]["error"] == pytest.approx(first["val_error"][-1])
    assert len(first["predicted"]) == ROWS
    # Only process 0 talks.
    assert (first["printed"] >= 3, second["printed"]) == (True, 0)
    assert (first["wrote"], second["wrote"]) == (True, False)


@pytest.mark.parametrize(
    ("case", "name", "steps"),
    [(0, "data", 1), (1, "validation", 4), (2, "data", 1), (3, "validation", 4)],
)
def test_data_that_one_process_cannot_read_ends_the_fit_of_all(
    results, case, name, steps
):
    error = f"OSError: the {name} of batch 1 is gone"
    one, several = results
    assert one["failed"][case] == [4, "no error"]
    assert [found["failed"][case] for found in several] == [
        [steps, f"DataError: the source of process 1 failed: {error}"],
        [steps, error],
    ]


def test_plain_batches_that_end_on_one_process_end_the_fit_of_all(results):
    one, several = results
    assert one["failed"][4] == [4, "no error"]
    assert [found["failed"][4] for found in several] == 2 * [
        [
            2,
            "DataError: the processes read different data: 8 rows in batch 3 of epoch 4 "
            "on process 0, 0 rows in batch 3 of epoch 4 on process 1. Their iterations "
            f"must start at the same position. {WAY_OUT}",
        ]
    ]
