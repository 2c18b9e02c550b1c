"""A run that is interrupted and resumed ends with the bits of one that was not."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshlayout as ml
from tests.error_messages import message_of
from tests.resuming_runs import OPTIMIZER, Net, loss_fn, source
from tests.same_bits import on_host


ROWS, BATCH, EPOCHS = 20, 8, 2
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


@pytest.fixture(scope="module")
def mesh():
    return ml.create_mesh({"batch": 4}, devices=jax.devices()[:4])


def create_state(mesh):
    layouts = ml.LayoutMap(mesh, {})
    return ml.TrainState.create(lambda: Net(nnx.Rngs(0)), OPTIMIZER, layouts, rng=1)


examples = functools.partial(source, ROWS)


def host_batches():
    cuts = [slice(at, at + BATCH) for at in range(0, ROWS, BATCH)]
    return [{name: rows[cut] for name, rows in examples().items()} for cut in cuts]


def distributed(mesh):
    return ml.distribute_dataset(examples(), mesh, global_batch_size=BATCH, shuffle=3)


def streamed(mesh):
    def rows():
        data = examples()
        for at in range(ROWS):
            yield {name: values[at] for name, values in data.items()}

    return ml.distribute_dataset(rows, mesh, global_batch_size=BATCH)


DATASET = "a distributed dataset"
KINDS = {  # data, options of the trainer and of fit
    DATASET: (distributed, {}, {}),
    "a stream": (streamed, {}, {}),
    "a generator function": (lambda mesh: lambda: iter(host_batches()), {}, {}),
    "an iterator": (lambda mesh: iter(host_batches() * 2), {}, {"steps_per_epoch": 3}),
    "several steps in a call, lists": (
        *(lambda mesh: host_batches(), {"steps_per_call": 2}),
        {"steps_per_epoch": 5},
    ),
    "what a step keeps beside": (
        *(distributed, {"ema": 0.9, "on_nonfinite": "skip"}),
        {},
    ),
}


@functools.cache
def trainer_of(kind):
    """One trainer for all runs of a kind, to compile once."""
    metrics = {"row": ml.metrics.Mean("row"), "out": ml.metrics.Mean("out")}
    return ml.Trainer(None, loss_fn, metrics=metrics, **KINDS[kind][1])


def fit(mesh, ck=None, kind=DATASET, *, every=100, until=None, resume=False):
    """Runs as a new process would; returns all that came of it, and its own steps."""
    trainer = trainer_of(kind)
    trainer.state, trainer.history = create_state(mesh), ml.History()
    callbacks = [] if ck is None else [ml.callbacks.Checkpoint(ck, every=every)]
    callbacks += [] if until is None else [InterruptAt(until)]
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
    history, position = trainer.history, trainer.position
    found = bits(trainer.state), dict(history), history.epochs, position.step
    return found, position.step_in_fit


def bits(state):
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path): on_host(leaf) for path, leaf in leaves}


@functools.cache
def whole(kind=DATASET):
    mesh = ml.create_mesh({"batch": 4}, devices=jax.devices()[:4])
    return fit(mesh, kind=kind)[0]


SLOW = [*KINDS][1:]


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in KINDS]
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    kind, mesh, tmp_path
):
    # One inside an epoch, and the last of an epoch.
    for step in (1, 3):
        with ml.Checkpointer(tmp_path / str(step)) as ck:
            fit(mesh, ck, kind, every=step, until=step + 2)
        with ml.Checkpointer(tmp_path / str(step)) as ck:
            saved = ck.latest_step()
            found, steps = fit(mesh, ck, kind, resume=True)
        assert found == whole(kind)
        assert steps == found[-1] - saved < found[-1]


@pytest.mark.parametrize(
    "options",
    [
        {"ema": 0.9},
        pytest.param({"on_nonfinite": "skip"}, marks=pytest.mark.slow),
        pytest.param({"precision": "float16"}, marks=pytest.mark.slow),
    ],
)
def test_a_loop_of_ones_own_resumes_what_the_step_keeps(options, mesh, tmp_path):
    step = ml.make_train_step(loss_fn, **options)
    first, second, *_ = host_batches()
    state, _ = step(create_state(mesh), first)
    with ml.Checkpointer(tmp_path) as ck:
        ck.save(1, state)
        state, _ = step(state, second)
        with pytest.raises(ml.errors.RestoreDiffError, match=r"train_step\.prepare"):
            ck.resume(create_state(mesh))
        resumed = ck.resume(step.prepare(create_state(mesh)))
    resumed, _ = step(resumed, second)
    assert resumed.extra
    assert bits(resumed) == bits(state)


def test_a_run_begins_ends_and_is_restored_alone(mesh, tmp_path):
    with ml.Checkpointer(tmp_path) as ck:
        begun, _ = fit(mesh, ck, every="epoch", resume=True)
        assert begun == whole()
        logs = {name: values[-1] for name, values in begun[1].items()}
        assert ck.inspect().metadata["logs"] == logs
        assert fit(mesh, ck, resume=True) == (whole(), 0)
        assert bits(ck.restore(create_state(mesh))) == begun[0]


def test_a_damaged_checkpoint_is_left_for_the_one_before(mesh, tmp_path):
    with ml.Checkpointer(tmp_path) as ck:
        fit(mesh, ck, every=1, until=5)
        ck.wait()
        steps = ck.all_steps()
    (tmp_path / str(steps[-1]) / "files.json").write_text("{")
    words = f"restored step {steps[-2]}, the newest"
    with ml.Checkpointer(tmp_path) as ck, pytest.warns(UserWarning, match=words):
        found, done = fit(mesh, ck, resume=True)
    assert (found, done) == (whole(), STEPS - steps[-2])


ONES = [{"x": np.ones(1, np.float32)}] * 3


class Counting(ml.Trainer):
    """Counts its steps."""

    def __init__(self):
        super().__init__({"count": np.zeros(())}, pad=False)

    def train_step(self, state, batch, metrics):
        last = ml.metrics.Last().update(jnp.float32(0))
        return {"count": state["count"] + 1}, ml.metrics.Metrics({"zero": last})

    def count(self, data, ck, *, every=1, **options):
        saving = [ml.callbacks.Checkpoint(ck, every=every)] if ck else []
        self.fit(data, callbacks=saving, progress=False, **options)
        return int(self.state["count"]), self.position.step_in_fit


error_of = functools.partial(message_of, error=ml.errors.CheckpointError)


@pytest.mark.parametrize("count", [1, 3])
def test_a_run_begins_in_no_directory_of_another_one(count, tmp_path):
    with ml.Checkpointer(tmp_path, keep=None) as ck:
        Counting().count(ONES[:count], ck)
        trainer = Counting()
        assert error_of(trainer.count, ONES[:count], ck) == (
            f"fit begins at step 0, but {tmp_path} holds steps of another run, up to "
            f"{count}. Give resume=True to resume from there, or save to another directory."
        )
        assert (trainer.position.step, trainer.state) == (0, {"count": 0})
        assert trainer.count(ONES * 2, ck, resume=True) == (6, 6 - count)
        assert trainer.count(ONES, ck) == (9, 3)  # in its own directory
        assert ck.latest_step() == 9


def test_resuming_needs_a_checkpoint_of_a_trainer(tmp_path):
    resume = functools.partial(Counting().count, ONES, resume=True)
    assert message_of(resume, None) == (
        "fit(resume=True) needs a Checkpoint among the callbacks, to resume from: "
        "ml.callbacks.Checkpoint(checkpointer)."
    )
    with ml.Checkpointer(tmp_path) as ck:
        ck.save(3, {"count": np.zeros(())})
        assert error_of(resume, ck) == (
            f"{tmp_path}/3 holds a state, but not its position in the data. Restore it "
            "with Checkpointer.restore."
        )


def test_what_callbacks_know_comes_along(mesh, tmp_path):
    trainer = trainer_of(DATASET)

    def run(name, until=None, *, resume=False):
        trainer.state, trainer.history = create_state(mesh), ml.History()
        callbacks = [
            ml.callbacks.Log(tmp_path / f"{name}.csv"),
            ml.callbacks.Log(tmp_path / f"{name}.jsonl"),
            ml.callbacks.EarlyStopping("row", mode="min", patience=2),  # stays as it is
        ]
        callbacks += [] if until is None else [InterruptAt(until)]
        with (
            contextlib.suppress(InterruptError),
            ml.Checkpointer(tmp_path / name) as ck,
        ):
            callbacks.append(ml.callbacks.Checkpoint(ck, every=2))
            options = {"progress": False, "resume": resume}
            trainer.fit(distributed(mesh), 5, callbacks=callbacks, **options)
        return trainer.history.epochs, trainer.history.stopped

    whole = run("whole")
    run("cut", until=7)
    assert run("cut", resume=True) == whole
    assert whole == ([1, 2, 3], "row has not improved since epoch 1")
    for kind in ("csv", "jsonl"):
        files = (tmp_path / f"{x}.{kind}" for x in ("cut", "whole"))
        cut, whole = (file.read_text().splitlines() for file in files)
        # The line of an epoch that ends again after a resume is written again.
        assert [*dict.fromkeys(cut)] == whole != []
