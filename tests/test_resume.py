"""A run that is interrupted and resumed ends with the bits of one that was not."""

import contextlib
import functools
import signal
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from tests.same_bits import on_host


FEATURES, ROWS, BATCH, EPOCHS = 4, 20, 8, 2
STEPS = EPOCHS * -(-ROWS // BATCH)


class InterruptError(Exception):
    pass


class InterruptAt(ml.callbacks.Callback):
    """Ends a run as a kill would, when a number of steps are done."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, step, metrics):
        if step >= self.step:
            raise InterruptError


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(FEATURES, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))[:, 0]


@pytest.fixture(scope="module")
def mesh():
    return ml.create_mesh({"batch": 4}, devices=jax.devices()[:4])


OPTIMIZER = optax.adam(0.05)


def create_state(mesh, model=Net):
    return ml.TrainState.create(
        lambda: model(nnx.Rngs(0)), OPTIMIZER, ml.LayoutMap(mesh, {}), rng=1
    )


def loss_fn(model, batch):
    out = model(batch["x"])
    return jnp.square(out - batch["y"]), {"out": out, "row": batch["row"]}


def examples():
    x = np.random.default_rng(0).normal(size=(ROWS, FEATURES)).astype("float32")
    y = x @ np.arange(1, FEATURES + 1).astype("float32")
    return {"x": x, "y": y, "row": np.arange(ROWS, dtype=np.float32)}


def host_batches():
    data = examples()
    return [
        {name: rows[at : at + BATCH] for name, rows in data.items()}
        for at in range(0, ROWS, BATCH)
    ]


def distributed(mesh):
    return ml.distribute_dataset(examples(), mesh, global_batch_size=BATCH, shuffle=3)


def streamed(mesh):
    def rows():
        data = examples()
        for at in range(ROWS):
            yield {name: values[at] for name, values in data.items()}

    return ml.distribute_dataset(rows, mesh, global_batch_size=BATCH)


KINDS = {
    "a distributed dataset": (distributed, {}, {}),
    "a stream": (streamed, {}, {}),
    "a generator function": (lambda mesh: lambda: iter(host_batches()), {}, {}),
    "an iterator": (
        lambda mesh: iter(host_batches() * EPOCHS),
        {},
        {"steps_per_epoch": 3},
    ),
    "several steps in a call, lists": (
        lambda mesh: host_batches(),
        {"steps_per_call": 2},
        {"steps_per_epoch": 5},
    ),
    "what a step keeps beside": (
        distributed,
        {"ema": 0.9, "on_nonfinite": "error", "zero": 1},
        {},
    ),
}


@functools.cache
def trainer_of(kind):
    """One trainer for all runs of a kind, to compile once."""
    metrics = {"row": ml.metrics.Mean("row"), "out": ml.metrics.Mean("out")}
    return ml.Trainer(None, loss_fn, metrics=metrics, **KINDS[kind][1])


ONES = [{"x": np.ones(1, np.float32)}] * 3


class Counting(ml.Trainer):
    """Counts its steps, without a model."""

    def __init__(self):
        super().__init__({"count": np.zeros(())}, pad=False)

    def train_step(self, state, batch, metrics):
        last = ml.metrics.Last().update(jnp.float32(0))
        return {"count": state["count"] + 1}, ml.metrics.Metrics({"zero": last})


@dataclass
class Run:
    leaves: dict
    history: dict
    epochs: list
    step: int
    num_steps: int


def fit(mesh, kind, ck=None, *, every=100, until=None, resume=False):
    """Runs as a new process would, and returns all bits of what came of it."""
    trainer = trainer_of(kind)
    trainer.state, trainer.history = create_state(mesh), ml.History()
    callbacks = [] if ck is None else [ml.callbacks.Checkpoint(ck, every=every)]
    if until is not None:
        callbacks.append(InterruptAt(until))
    make, _, options = KINDS[kind]
    with contextlib.suppress(InterruptError):
        trainer.fit(
            make(mesh),
            EPOCHS,
            validation_data=host_batches(),
            callbacks=callbacks,
            progress=False,
            resume=resume,
            **options,
        )
    return Run(
        bits(trainer.state),
        trainer.history.to_dict(),
        trainer.history.epochs,
        trainer.position.step,
        trainer.position.step_in_fit,
    )


def bits(state):
    return {
        jax.tree_util.keystr(path): on_host(leaf)
        for path, leaf in jax.tree.leaves_with_path(state)
    }


SLOW = [*KINDS][3:]


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in KINDS]
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    kind, mesh, tmp_path
):
    whole = fit(mesh, kind)
    # One inside an epoch, and the last of an epoch.
    for step in (1, 3):
        directory = tmp_path / str(step)
        with ml.Checkpointer(directory) as ck:
            fit(mesh, kind, ck, every=step, until=step + 2)
        with ml.Checkpointer(directory) as ck:
            saved = ck.latest_step()
            resumed = fit(mesh, kind, ck, resume=True)
        assert resumed.num_steps == whole.step - saved < whole.step
        resumed.num_steps = whole.num_steps
        assert resumed == whole


def test_a_run_without_a_checkpoint_begins(mesh, tmp_path):
    with ml.Checkpointer(tmp_path) as ck:
        begun = fit(mesh, "a distributed dataset", ck, resume=True)
    assert begun == fit(mesh, "a distributed dataset")


def test_a_finished_run_is_not_continued(mesh, tmp_path):
    kind = "a distributed dataset"
    with ml.Checkpointer(tmp_path) as ck:
        whole = fit(mesh, kind, ck, every="epoch")
        assert ck.inspect().metadata["logs"] == {
            name: values[-1] for name, values in whole.history.items()
        }
        resumed = fit(mesh, kind, ck, resume=True)
    assert resumed.num_steps == 0
    resumed.num_steps = whole.num_steps
    assert resumed == whole


def test_a_damaged_checkpoint_is_left_for_the_one_before(mesh, tmp_path):
    kind = "a distributed dataset"
    whole = fit(mesh, kind)
    with ml.Checkpointer(tmp_path) as ck:
        fit(mesh, kind, ck, every=1, until=5)
        ck.wait()
        steps = ck.all_steps()
    (tmp_path / str(steps[-1]) / "files.json").write_text("{")
    with (
        ml.Checkpointer(tmp_path) as ck,
        pytest.warns(UserWarning, match=f"restored step {steps[-2]}, the newest"),
    ):
        resumed = fit(mesh, kind, ck, resume=True)
    assert resumed.num_steps == whole.step - steps[-2]
    assert resumed.leaves == whole.leaves


def test_the_state_of_a_resumable_checkpoint_can_be_restored_alone(mesh, tmp_path):
    with ml.Checkpointer(tmp_path) as ck:
        whole = fit(mesh, "a distributed dataset", ck, every=1)
        assert bits(ck.restore(create_state(mesh))) == whole.leaves


@pytest.mark.parametrize(("count", "has"), [(1, "step 1"), (3, "3 steps up to 3")])
def test_a_run_begins_in_no_directory_of_another_one(count, has, tmp_path):
    with ml.Checkpointer(tmp_path) as ck:
        saving = ml.callbacks.Checkpoint(ck, every=1)
        Counting().fit(ONES[:count], callbacks=[saving], progress=False)
        trainer = Counting()
        with pytest.raises(ml.errors.CheckpointError) as error:
            trainer.fit(ONES[:count], callbacks=[saving], progress=False)
        assert str(error.value) == (
            f"fit begins at step 0, but {tmp_path} holds {has} of another run: "
            f"resume=True would later resume from step {count}, not from this run. Give resume=True to resume from there now, or save to another directory."
        )
        assert trainer.position.step == 0
        assert trainer.state == {"count": 0}
        trainer.fit(ONES * 2, callbacks=[saving], progress=False, resume=True)
        assert (trainer.position.step, trainer.position.step_in_fit) == (6, 6 - count)
        assert trainer.state == {"count": 6}


def test_a_trainer_fits_again_in_its_own_directory(tmp_path):
    with ml.Checkpointer(tmp_path, keep=None) as ck:
        trainer = Counting()
        for _ in range(2):
            trainer.fit(ONES, callbacks=[ml.callbacks.Checkpoint(ck)], progress=False)
        assert ck.all_steps() == [3, 6]


def test_resuming_needs_a_checkpoint(mesh):
    with pytest.raises(ml.MeshLayoutError) as error:
        fit(mesh, "a distributed dataset", resume=True)
    assert str(error.value) == (
        "fit(resume=True) needs a Checkpoint among the callbacks, from whose directory it resumes. Add ml.callbacks.Checkpoint(checkpointer)."
    )


# Loops written by hand.


class Loops:
    """Runs of a loop written by hand."""

    def __init__(self, mesh):
        self.mesh = mesh
        self.train_step = ml.make_train_step(loss_fn, ema=0.9)

    def run(self, ck, until=None, told=None):
        """Returns the rows of each step, and the bits of the state at the end."""
        rows = []
        data = ml.distribute_dataset(
            examples(), self.mesh, global_batch_size=BATCH, shuffle=3, epochs=EPOCHS
        )
        batches = iter(data)
        first = next(iter(data))
        begin, _ = self.train_step(create_state(self.mesh), first)  # has the EMA
        state = ck.resume(begin, data=batches)
        for batch in batches:
            state, _ = self.train_step(state, batch)
            step = int(state.step)
            rows.append((step, np.asarray(batch["row"]).tolist()))
            if step == told:
                signal.raise_signal(signal.SIGTERM)
            ck.save(step, state, data=batches)
            if step == until:
                break
        return rows, bits(state)


def test_a_loop_continues_at_the_exact_batch(mesh, tmp_path):
    loops = Loops(mesh)
    with ml.Checkpointer(tmp_path / "whole", every=100) as ck:
        rows, whole = loops.run(ck)
    for step in range(rows[0][0], rows[-1][0] + 1):
        with ml.Checkpointer(tmp_path / str(step), every=1, keep=1) as ck:
            before, _ = loops.run(ck, until=step)
        with ml.Checkpointer(tmp_path / str(step), every=100) as ck:
            after, end = loops.run(ck)
        assert before + after == rows
        assert end == whole


def test_a_loop_that_is_asked_to_end_saves_that_step_and_continues_later(
    mesh, tmp_path
):
    loops = Loops(mesh)
    with ml.Checkpointer(tmp_path / "whole", every=100) as ck:
        rows, whole = loops.run(ck)
    before = signal.getsignal(signal.SIGTERM)
    with ml.Checkpointer(tmp_path / "told", every=100) as ck:
        with pytest.raises(SystemExit) as ended:
            loops.run(ck, told=3)
        assert ended.value.code == ml.checkpoint.EXIT_STATUS == 75
        assert signal.getsignal(signal.SIGTERM) is before
        assert ck.all_steps() == [3]
    with ml.Checkpointer(tmp_path / "told", every=100) as ck:
        after, end = loops.run(ck)
    assert (after, end) == (rows[2:], whole)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_trainer_does_not_continue_the_run_of_a_loop(tmp_path):
    with ml.Checkpointer(tmp_path) as ck:
        ck.save(3, {"count": np.zeros(())})
        trainer = Counting()
        saving = ml.callbacks.Checkpoint(ck)
        with pytest.raises(ml.errors.CheckpointError) as error:
            trainer.fit(ONES, callbacks=[saving], progress=False, resume=True)
    assert str(error.value) == (
        f"{tmp_path}/3 holds a state, but not its position in the data: it was saved "
        "with Checkpointer.save. Restore it with Checkpointer.restore, or resume from "
        "another directory."
    )
    assert not getattr(error.value, "__notes__", [])


def test_data_that_cannot_go_to_its_place_is_read_up_to_it(mesh, tmp_path, caplog):
    def rows(iterator):
        return [np.asarray(batch["row"]).tolist() for batch in iterator]

    whole = rows(streamed(mesh))
    iterator = iter(streamed(mesh))
    next(iterator)
    with ml.Checkpointer(tmp_path) as ck:
        ck.save(1, {"x": 1}, data=iterator)
        again = iter(streamed(mesh))
        ck.restore(data=again)
        assert rows(again) == whole[1:] != []
        with pytest.raises(ml.errors.DataError):
            ck.restore(data=iter(distributed(mesh)))


@pytest.mark.parametrize("until", [6, 7])
def test_what_callbacks_know_comes_along(until, mesh, tmp_path):
    trainer = trainer_of("a distributed dataset")

    def run(name, ck, until=None, resume=False):
        trainer.state, trainer.history = create_state(mesh), ml.History()
        callbacks = [
            ml.callbacks.Checkpoint(ck, every=2),
            ml.callbacks.CSVLogger(tmp_path / f"{name}.csv"),
            ml.callbacks.JSONLLogger(tmp_path / f"{name}.jsonl", every=1),
            ml.callbacks.EarlyStopping("row", patience=2),  # stays as it is
        ]
        callbacks += [] if until is None else [InterruptAt(until)]
        with contextlib.suppress(InterruptError):
            trainer.fit(
                distributed(mesh), 5, callbacks=callbacks, progress=False, resume=resume
            )
        return trainer.history.epochs, trainer.history.stopped

    with ml.Checkpointer(tmp_path / "whole") as ck:
        whole = run("whole", ck)
    with ml.Checkpointer(tmp_path / "cut") as ck:
        run("cut", ck, until=until)
    with ml.Checkpointer(tmp_path / "cut") as ck:
        assert run("cut", ck, resume=True) == whole
    assert whole == ([1, 2, 3], "row has not improved since epoch 1")
    for kind in ("csv", "jsonl"):
        lines = [
            (tmp_path / f"{name}.{kind}").read_text().splitlines()
            for name in ("cut", "whole")
        ]
        assert lines[0] == lines[1] != []
