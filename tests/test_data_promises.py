"""What a user is promised of input, sentence by sentence, as a stranger would try it."""

import time

import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from tests.tfds_directory import tiny_directory


X = np.arange(160, dtype=np.float32).reshape(40, 4)
Y = np.arange(40, dtype=np.int32)


@pytest.fixture(scope="module")
def mesh():
    return ml.create_mesh({"batch": 8})


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_directory(tmp_path_factory.mktemp("tfds"))


def numbers(batches, name="y"):
    return np.concatenate([np.asarray(batch[name]) for batch in batches]).tolist()


def loss_fn(model, batch):
    labels = batch["y"] % 8
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def fitted(mesh, data, **options):
    """The parameters after a fit."""
    state = ml.TrainState.create(
        lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0)),
        optax.sgd(0.1),
        ml.LayoutMap(mesh, {}),
    )
    trainer = ml.Trainer(state, loss_fn)
    trainer.fit(data, progress=False, **options)
    return np.asarray(trainer.state.params["kernel"]).tolist()


# "It takes pandas DataFrames and Series (anything with __array__) and lists, and says
# which entry is wrong and of what type."


class Series:
    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)

    def __len__(self):
        return len(self.values)


COLUMNS = {
    "anything with __array__": {"x": Series(X), "y": Series(Y)},
    "lists": {"x": X.tolist(), "y": Y.tolist()},
    "mixed": {"x": X, "y": Y.tolist()},
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_of_any_kind_are_rows_also_in_fit(mesh, kind):
    data = ml.distribute_dataset(COLUMNS[kind], mesh, global_batch_size=8)
    assert numbers(data) == Y.tolist()
    np.testing.assert_array_equal(np.stack(numbers(data, "x")), X)
    found = fitted(mesh, COLUMNS[kind], batch_size=8, epochs=2)
    assert found == fitted(mesh, {"x": X, "y": Y}, batch_size=8, epochs=2)


def test_pandas_goes_in_as_it_is_also_in_fit(mesh):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"y": Y})
    for table in (frame, {"y": frame["y"]}, dict(frame)):
        data = ml.distribute_dataset(table, mesh, global_batch_size=8)
        assert numbers(data) == Y.tolist()
    columns = {"x": pandas.DataFrame(X), "y": frame["y"]}
    expected = fitted(mesh, {"x": X, "y": Y}, batch_size=8)
    assert fitted(mesh, columns, batch_size=8) == expected


@pytest.mark.parametrize("wrong", [object(), {"a", "b"}, 3.5])
def test_a_wrong_entry_is_named_with_its_type_also_in_fit(mesh, wrong):
    columns = {"x": X, "y": wrong}
    for call in (
        lambda: ml.distribute_dataset(columns, mesh, global_batch_size=8),
        lambda: fitted(mesh, columns, batch_size=8),
    ):
        with pytest.raises(ml.MeshLayoutError, match="'y'") as error:
            call()
        assert type(wrong).__name__ in str(error.value)


# "shuffle= is a seed in distribute_dataset, from_tfds and fit alike; shuffle=True is
# refused with 'Write shuffle=0'"


def shuffled(mesh, directory, place, shuffle):
    if place == "from_tfds":
        data = ml.data.from_tfds(
            "tiny",
            "train",
            mesh,
            global_batch_size=40,
            data_dir=directory,
            map=lambda example: {"y": example["number"]},
            shuffle=shuffle,
        )
        return numbers(data)
    if place == "fit":
        return fitted(mesh, {"x": X, "y": Y}, batch_size=8, shuffle=shuffle)
    return numbers(
        ml.distribute_dataset({"y": Y}, mesh, global_batch_size=8, shuffle=shuffle)
    )


@pytest.mark.parametrize("place", ["distribute_dataset", "from_tfds", "fit"])
def test_shuffle_is_a_seed(mesh, directory, place):
    first = shuffled(mesh, directory, place, 0)
    assert shuffled(mesh, directory, place, 0) == first
    assert shuffled(mesh, directory, place, 1) != first
    assert shuffled(mesh, directory, place, None) != first
    with pytest.raises(ml.MeshLayoutError, match="Write shuffle=0"):
        shuffled(mesh, directory, place, True)


# "tensorflow-datasets is a plain dependency again; from_tfds says within ten seconds,
# and in one sentence with `make data` and `data_dir` ..."


@pytest.mark.parametrize("name", ["cifar10", "fashon_mnist", "mnist:9.9.9"])
def test_a_dataset_that_cannot_be_had_is_said_at_once(
    mesh, tmp_path, monkeypatch, capfd, name
):
    for variable in ("http_proxy", "https_proxy"):  # where nothing answers
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    start = time.monotonic()
    with pytest.raises(ml.errors.DataError) as error:
        ml.data.from_tfds(name, "train", mesh, global_batch_size=8, data_dir=tmp_path)
    assert time.monotonic() - start < 10
    for text in ("`make data`", "data_dir=", name.partition(":")[0]):
        assert text in str(error.value)
    assert str(error.value).count(". ") == str(error.value).count("\n") == 0
    assert "fashion_mnist" in str(error.value) or name != "fashon_mnist"
    assert "Retrying" not in capfd.readouterr().err
