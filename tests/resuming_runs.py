"""A small run that is killed, or told to end, and started again; for test_launcher_jobs."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshlayout as ml


ROWS, BATCH, EPOCHS = 46, 8, 3
STEPS = EPOCHS * -(-ROWS // BATCH)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))[:, 0]


def loss_fn(model, batch):
    out = model(batch["x"])
    return jnp.square(out - batch["y"]), {"out": out, "row": batch["row"]}


def source(rows):
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype("float32")
    y = x @ np.arange(1, 5).astype("float32")
    return {"x": x, "y": y, "row": np.arange(rows, dtype=np.float32)}


OPTIMIZER = optax.adam(0.05)


class Trainer(ml.Trainer):
    """Takes its time for a step, and writes down the rows of each, a line each."""

    def __init__(self, *args, file, seconds, say, **options):
        super().__init__(*args, **options)
        self.file, self.seconds, self.say = file, seconds, say

    def train_step(self, state, batch, metrics):
        time.sleep(self.seconds)
        rows = ml.to_numpy(batch["row"]) * (ml.to_numpy(batch["weight"]) > 0)
        self.rows = " ".join(str(int(row)) for row in rows)
        return super().train_step(state, batch, metrics)


class Rows(ml.callbacks.Callback):
    def on_step_end(self, trainer, step, metrics):
        if jax.process_index() == 0:
            with trainer.file.open("a") as file:
                file.write(f"{step} {trainer.rows}\n")
        trainer.say(step)


def run(directory, seconds, every, say):
    """Runs, or goes on, and writes what came of it."""
    mesh = ml.create_mesh({"batch": jax.device_count()})
    state = ml.TrainState.create(
        lambda: Net(nnx.Rngs(0)), OPTIMIZER, ml.LayoutMap(mesh, {}), rng=1
    )
    data = ml.distribute_dataset(source(ROWS), mesh, global_batch_size=BATCH, shuffle=3)
    with ml.Checkpointer(directory / "checkpoints", keep=2) as ck:
        trainer = Trainer(
            state,
            loss_fn,
            metrics={"error": ml.metrics.Mean("out")},
            file=directory / "rows.txt",
            seconds=seconds,
            say=say,
        )
        trainer.fit(
            data,
            EPOCHS,
            callbacks=[ml.callbacks.Checkpoint(ck, every=every), Rows()],
            progress=False,
            resume=True,
        )
    leaves = {
        jax.tree_util.keystr(path): ml.to_numpy(leaf).tobytes().hex()
        for path, leaf in jax.tree.leaves_with_path(trainer.state)
    }
    history = {
        name: [float(one).hex() for one in values]
        for name, values in trainer.history.items()
    }
    result = {"leaves": leaves, "history": history, "step": trainer.position.step}
    if jax.process_index() == 0:
        (directory / "result.json").write_text(json.dumps(result))


def result_of(directory):
    return json.loads((directory / "result.json").read_text())


def rows_of(directory):
    """The rows of every step; a step that was made twice has to see the same ones."""
    found = {}
    for line in (directory / "rows.txt").read_text().splitlines():
        step, *rows = map(int, line.split())
        assert found.setdefault(step, rows) == rows, step
    return found
