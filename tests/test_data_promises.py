"""What a user is promised of input, sentence by sentence, as a stranger would try it."""

import itertools
import json
import logging
import os
import subprocess
import sys
import textwrap
import time
import tomllib

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from tests.processes import ROOT
from tests.tfds_directory import tiny_directory


X = np.arange(160, dtype=np.float32).reshape(40, 4)
Y = np.arange(40, dtype=np.int32)


def mesh(**axes):
    return ml.create_mesh(axes or {"batch": 8})


def numbers(batches, name="y"):
    return np.concatenate([np.asarray(batch[name]) for batch in batches]).tolist()


class Model(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 8, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


def loss_fn(model, batch):
    logits = model(batch["x"])
    labels = batch["y"] % 8
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def state(on, rules=None):
    return ml.TrainState.create(
        lambda: Model(nnx.Rngs(0)), optax.sgd(0.1), ml.LayoutMap(on, rules or {})
    )


# "steps= goes: itertools.islice of one iterator goes on where it ended"


def test_islice_of_one_iterator_goes_on_where_it_ended():
    data = ml.distribute_dataset({"y": Y}, mesh(), global_batch_size=8, epochs=2)
    iterator = iter(data)
    parts = [numbers(itertools.islice(iterator, count)) for count in (2, 3, 4)]
    assert [*parts[0], *parts[1], *parts[2]] == [*Y.tolist(), *Y.tolist()][:72]
    with pytest.raises(TypeError, match="steps"):
        ml.distribute_dataset({"y": Y}, mesh(), global_batch_size=8, steps=2)


def test_steps_per_epoch_of_the_trainer_does_just_that():
    data = ml.distribute_dataset({"x": X, "y": Y}, mesh(), global_batch_size=8)
    one = ml.Trainer(state(mesh()), loss_fn)
    one.fit(data, epochs=2, progress=False)  # ten steps over all rows, twice
    other = ml.Trainer(state(mesh()), loss_fn)
    again = ml.distribute_dataset({"x": X, "y": Y}, mesh(), global_batch_size=8)
    other.fit(again, epochs=5, steps_per_epoch=2, progress=False)
    for a, b in zip(
        jax.tree.leaves(one.state.params),
        jax.tree.leaves(other.state.params),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# "Ctrl-C, an exception or the end of the program while a source blocks for ever ends
# within two seconds"

BLOCKS = """
import os, signal, sys, threading, time
import numpy as np
import meshlayout as ml

def source():
    for row in range(3):
        yield {"y": np.int32(row)}
    threading.Event().wait()

def forever(example):
    threading.Event().wait()

if __name__ == "__main__":
    mesh = ml.create_mesh({"batch": 1})
    data = ml.distribute_dataset(source, mesh, global_batch_size=1)
    iterator = iter(data)
    next(iterator)
    how = sys.argv[1]
    if how == "interrupt":
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    print(time.time() + (how == "interrupt"), flush=True)
    try:
        if how == "error":
            raise ValueError("mine")
        if how == "interrupt":
            for _ in iterator:
                pass
    finally:
        print(time.time(), flush=True)
"""


@pytest.mark.parametrize("how", ["end", "error", "interrupt"])
def test_a_source_that_blocks_for_ever_holds_nobody_up(tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(BLOCKS)
    run = subprocess.run(
        [sys.executable, str(script), how],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    ended = time.time()
    start = float(run.stdout.split()[0])
    # Two seconds, and what Python and JAX take to shut down on a busy machine.
    assert ended - start < 2 + 3, run.stderr
    expected = {
        "end": "",
        "error": "ValueError: mine",
        "interrupt": "KeyboardInterrupt",
    }
    assert expected[how] in run.stderr
    assert (run.returncode == 0) == (how == "end")


# "Arrays and tables ... It takes pandas DataFrames and Series (anything with
# __array__) and lists, and says which entry is wrong and of what type."


class Series:
    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)

    def __len__(self):
        return len(self.values)


COLUMNS = {
    "arrays": {"x": X, "y": Y},
    "anything with __array__": {"x": Series(X), "y": Series(Y)},
    "lists": {"x": X.tolist(), "y": Y.tolist()},
    "mixed": {"x": X, "y": Y.tolist()},
}


def frames():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": X[:, 0], "y": Y})
    return frame, {"x": frame["x"], "y": frame["y"]}


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_of_any_kind_are_rows(kind):
    data = ml.distribute_dataset(COLUMNS[kind], mesh(), global_batch_size=8)
    assert numbers(data) == Y.tolist()
    np.testing.assert_array_equal(np.stack(numbers(data, "x")), X)


def test_pandas_goes_in_as_it_is():
    for table in frames():
        data = ml.distribute_dataset(table, mesh(), global_batch_size=8)
        assert numbers(data) == Y.tolist()
        assert numbers(data, "x") == X[:, 0].tolist()


def test_pandas_goes_into_fit_as_it_is():
    frame, columns = frames()

    def loss(model, batch):
        del model
        return (batch["x"] - batch["y"]) ** 2

    for table in (frame, columns, dict(frame)):
        trainer = ml.Trainer(state(mesh()), loss)
        trainer.fit(table, batch_size=8, progress=False)


@pytest.mark.parametrize("kind", COLUMNS)
def test_fit_takes_columns_of_any_kind(kind):
    def fitted(columns):
        trainer = ml.Trainer(state(mesh()), loss_fn)
        return trainer.fit(columns, batch_size=8, epochs=2, progress=False)["loss"]

    assert fitted(COLUMNS[kind]) == fitted(COLUMNS["arrays"])


@pytest.mark.parametrize("wrong", [object(), {"a", "b"}, 3.5])
def test_an_entry_that_is_none_is_named_with_its_type(wrong):
    with pytest.raises(ml.errors.MeshLayoutError) as error:
        ml.distribute_dataset({"x": X, "y": wrong}, mesh(), global_batch_size=8)
    assert "'y'" in str(error.value)
    assert type(wrong).__name__ in str(error.value)
    trainer = ml.Trainer(state(mesh()), loss_fn)
    with pytest.raises(ml.errors.MeshLayoutError) as error:
        trainer.fit({"x": X, "y": wrong}, batch_size=8, progress=False)
    assert "'y'" in str(error.value)
    assert type(wrong).__name__ in str(error.value)


# "shuffle= is a seed in distribute_dataset, from_tfds and fit alike; shuffle=True is
# refused with 'give a seed, shuffle=0'"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_directory(tmp_path_factory.mktemp("tfds"))


def shuffled(directory, place, shuffle):
    if place == "from_tfds":
        data = ml.data.from_tfds(
            "tiny",
            "train",
            mesh(),
            global_batch_size=40,
            data_dir=directory,
            map=lambda example: {"y": example["number"]},
            shuffle=shuffle,
        )
        return numbers(data)
    if place == "distribute_dataset":
        return numbers(
            ml.distribute_dataset(
                {"y": Y}, mesh(), global_batch_size=8, shuffle=shuffle
            )
        )
    trainer = ml.Trainer(state(mesh()), loss_fn)
    trainer.fit({"x": X, "y": Y}, batch_size=8, shuffle=shuffle, progress=False)
    return np.asarray(trainer.state.params["linear"]["kernel"]).ravel().tolist()


@pytest.mark.parametrize("place", ["distribute_dataset", "from_tfds", "fit"])
def test_shuffle_is_a_seed(directory, place):
    first = shuffled(directory, place, 0)
    assert shuffled(directory, place, 0) == first
    assert shuffled(directory, place, 1) != first
    assert shuffled(directory, place, None) != first
    with pytest.raises(ml.errors.MeshLayoutError, match="give a seed, shuffle=0"):
        shuffled(directory, place, True)


# "Never all rows on every device without a word"


@pytest.mark.parametrize(
    "axis", ["batch", "data", "replica", "fsdp", "dp", "ddp", "data_parallel"]
)
def test_a_batch_axis_by_any_of_its_names_divides_the_rows(axis, caplog):
    with caplog.at_level(logging.WARNING, logger="meshlayout"):
        data = ml.distribute_dataset(
            {"x": X, "y": Y}, mesh(**{axis: 8}), global_batch_size=8
        )
        batch = next(iter(data))
    assert batch["x"].sharding.shard_shape((8, 4)) == (1, 4)
    assert "every device" not in caplog.text


def test_a_mesh_without_a_batch_axis_is_said_once(caplog):
    with caplog.at_level(logging.INFO, logger="meshlayout"):
        data = ml.distribute_dataset({"x": X}, mesh(workers=8), global_batch_size=8)
        assert [len([*data]) for _ in range(2)] == [5, 5]
    said = [text for text in caplog.messages if "every device" in text]
    assert len(said) == 1
    for name in ("batch", "data", "replica", "fsdp", "dp", "ddp", "data_parallel"):
        assert name in said[0]


def test_a_layout_in_place_of_the_mesh_is_taken_at_its_word(caplog):
    on = mesh(workers=8)
    for spec, rows in ((None, 8), ("workers", 1)):
        with caplog.at_level(logging.INFO, logger="meshlayout"):
            data = ml.distribute_dataset(
                {"x": X}, ml.Layout([spec], on), global_batch_size=8
            )
            batch = next(iter(data))
        assert batch["x"].sharding.shard_shape((8, 4)) == (rows, 4)
    assert "every device" not in caplog.text


def test_a_step_that_no_axis_divides_is_an_error():
    on = mesh(workers=8)
    batch = ml.distribute_dataset({"x": X, "y": Y}, on, global_batch_size=8)
    with pytest.raises(ml.errors.MeshLayoutError, match="workers") as error:
        ml.make_train_step(loss_fn)(state(on), next(iter(batch)))
    assert "batch" in str(error.value)  # a way out
    with pytest.raises(ml.errors.MeshLayoutError, match="workers"):
        ml.Trainer(state(on), loss_fn).fit(batch, progress=False)


def test_a_mesh_that_shards_only_the_model_stays_right():
    on = mesh(model=8)
    rules = {".*kernel": [None, "model"]}
    batch = ml.distribute_dataset({"x": X, "y": Y}, on, global_batch_size=8)
    _, metrics = ml.make_train_step(loss_fn)(state(on, rules), next(iter(batch)))
    alone = ml.create_mesh({"batch": 1}, devices=jax.devices()[:1])
    batch = ml.distribute_dataset({"x": X, "y": Y}, alone, global_batch_size=8)
    _, expected = ml.make_train_step(loss_fn)(state(alone), next(iter(batch)))
    loss, other = metrics.compute()["loss"], expected.compute()["loss"]
    np.testing.assert_allclose(loss, other, rtol=1e-6)  # another order of sums


# "tensorflow-datasets is a plain dependency again; from_tfds says within ten seconds,
# and in one sentence with `make data` and `data_dir` ..."


def test_tensorflow_datasets_is_a_plain_dependency_and_loaded_when_used():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plain = " ".join(project["dependencies"])
    assert "tensorflow-datasets" in plain
    assert "importlib_resources" in plain
    assert "pillow" in plain
    assert "tfds" not in project["optional-dependencies"]
    program = "import sys, meshlayout; print([*sys.modules])"
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert "'tensorflow_datasets'" not in loaded


def test_a_dataset_that_is_away_is_said_in_ten_seconds(tmp_path):
    program = textwrap.dedent(
        f"""
        import meshlayout as ml
        try:
            ml.data.from_tfds("cifar10", "train", ml.create_mesh({{"batch": 1}}),
                              global_batch_size=8, data_dir={str(tmp_path)!r})
        except ml.errors.DataError as error:
            print(error)
        """
    )
    # Nothing answers there, whatever this machine has.
    environment = {
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    start = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert time.monotonic() - start < 10 + 5  # and imports on a busy machine
    assert "make data" in run.stdout
    assert "data_dir" in run.stdout
    assert run.stdout.count("\n") == 1
    assert "Retrying" not in run.stderr


# "exact positions", "one generator per row", `num_workers=` and `pack_sequences`


def add_noise(example, rng):
    return {"y": example["number"], "noise": rng.normal(size=2)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"in_memory": False},
        pytest.param(
            {"in_memory": False, "num_workers": 2}, marks=pytest.mark.slow, id="workers"
        ),
    ],
)
def test_a_resumed_iteration_equals_an_uninterrupted_one(directory, options):
    def new():
        return iter(
            ml.data.from_tfds(
                "tiny",
                "train",
                mesh(),
                global_batch_size=40,
                data_dir=directory,
                map=add_noise,
                shuffle=3,
                epochs=2,
                **options,
            )
        )

    whole = [jax.tree.map(np.asarray, batch) for batch in new()]
    iterator = new()
    for _ in range(6):
        next(iterator)
    again = new()
    again.set_state(json.loads(json.dumps(iterator.get_state())))
    rest = [jax.tree.map(np.asarray, batch) for batch in again]
    jax.tree.map(np.testing.assert_array_equal, rest, whole[6:])


def test_packed_rows_go_in_and_resume():
    rows = ml.data.pack_sequences(["to be", "or not", "to be"] * 20, 16, mode="pack")

    def new():
        return iter(ml.distribute_dataset(rows, mesh(), global_batch_size=8))

    whole = [jax.tree.map(np.asarray, batch) for batch in new()]
    iterator = new()
    next(iterator)
    again = new()
    again.set_state(json.loads(json.dumps(iterator.get_state())))
    rest = [jax.tree.map(np.asarray, batch) for batch in again]
    jax.tree.map(np.testing.assert_array_equal, rest, whole[1:])
