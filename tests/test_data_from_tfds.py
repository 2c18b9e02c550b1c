"""`from_tfds`: from a dataset's name to batches, read, decoded, mapped and kept."""

import gc
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time

import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds

import meshlayout as ml
from meshlayout.data import from_tfds
from tests.tfds_directory import NUM_ROWS, made_up_examples, tiny_directory


@pytest.fixture(scope="module")
def mesh():
    return ml.create_mesh({"batch": 4, "model": 2})


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_directory(tmp_path_factory.mktemp("tfds"))


@pytest.fixture
def tiny(mesh, directory):
    """Makes a dataset of the small directory, without its strings."""

    def make(split="train", **options):
        given = {
            "global_batch_size": 32,
            "data_dir": directory,
            "map": numbers_and_images,
            **options,
        }
        return from_tfds("tiny", split, mesh, **given)

    return make


def numbers_and_images(example):
    return {"image": example["image"], "number": example["number"]}


def add_noise(example, rng):
    return {"number": example["number"], "noise": rng.normal(size=3)}


def fails_at_77(kind):
    def fail(example):
        if example["number"] == 77:
            raise kind("77 is not to be had")
        return {"number": example["number"]}

    return fail


def stop_process_at_77(example):
    if example["number"] == 77:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"number": example["number"]}


def host(data):
    return [jax.tree.map(np.asarray, batch) for batch in data]


def numbers(batches):
    """The numbers of the real rows of batches, in order."""
    rows = [np.asarray(b["number"])[np.asarray(b["weight"]) > 0] for b in batches]
    return np.concatenate(rows).tolist()


def notes(data):
    return " ".join(data.report().notes)


def same(one, other):
    def equal(a, b):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype

    jax.tree.map(equal, one, other)


# Without worker processes, which take seconds to start.
WAYS = {"memory": {"in_memory": True}, "by record": {"in_memory": False}}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


def test_every_example_comes_once_per_epoch_as_it_was_stored(tiny, way):
    images = made_up_examples()
    batches = host(tiny(**way))
    assert len(batches) == 7
    assert sorted(numbers(batches)) == list(range(NUM_ROWS))
    for batch in batches:
        assert batch["image"].dtype == np.uint8
        np.testing.assert_array_equal(batch["image"][..., 0], images[batch["number"]])


@pytest.mark.slow
def test_worker_processes_give_the_same_batches(tiny):
    expected = host(tiny(in_memory=True, map=add_noise))
    same(host(tiny(in_memory=False, num_workers=3, map=add_noise)), expected)
    same(host(tiny(in_memory=True, num_workers=1, map=add_noise)), expected)
    gc.collect()
    assert not multiprocessing.active_children()


def test_an_iteration_resumes_in_the_middle_of_an_epoch_also_read_otherwise(tiny, way):
    expected = host(tiny(in_memory=True, epochs=2, map=add_noise))
    iterator = iter(tiny(in_memory=True, epochs=2, map=add_noise))
    for _ in range(9):
        next(iterator)
    again = iter(tiny(epochs=2, map=add_noise, **way))
    again.set_state(iterator.get_state())
    same(host(again), expected[9:])


def test_random_numbers_of_map_are_functions_of_seed_epoch_and_row(tiny, way):
    batches = host(tiny(map=add_noise, epochs=2, shuffle=5, **way))
    row = numbers(tiny(shuffle=None)).index(42)
    for epoch, part in enumerate((batches[:7], batches[7:])):
        noise = np.concatenate([batch["noise"] for batch in part])
        expected = np.random.default_rng([5, epoch, row]).normal(size=3)
        found = noise[np.concatenate([batch["number"] for batch in part]) == 42]
        np.testing.assert_array_equal(found[0], expected.astype(np.float32))


def test_decoders_leave_features_as_they_are_stored(tiny):
    data = tiny(
        decoders={"image": tfds.decode.SkipDecoding()},
        map=lambda example: {
            "number": example["number"],
            "is_png": np.bool_(example["image"].startswith(b"\x89PNG")),
        },
    )
    assert all(batch["is_png"].all() for batch in host(data))


@pytest.mark.parametrize("kind", [ArithmeticError, SystemExit, KeyboardInterrupt])
def test_whatever_map_raises_ends_the_loop_and_names_the_row(tiny, way, kind):
    outcome = []

    def run():
        try:
            host(tiny(map=fails_at_77(kind), **way))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    (error,) = outcome
    assert type(error) is kind
    if kind is ArithmeticError:
        note = r"This was raised by map= at row \d+ of the split."
        assert re.fullmatch(note, error.__notes__[0])


@pytest.mark.slow
def test_errors_and_deaths_of_worker_processes_surface(tiny):
    options = {"in_memory": False, "num_workers": 1}
    with pytest.raises(ArithmeticError, match="77 is not to be had") as error:
        host(tiny(map=fails_at_77(ArithmeticError), **options))
    assert "in fail" in str(error.value.__cause__)
    with pytest.raises(ml.errors.DataError) as error:
        host(tiny(map=stop_process_at_77, **options))
    assert str(error.value) == (
        "a worker process ended while it read examples: out of memory, or because "
        "a script does not keep what it runs under `if __name__ == '__main__':`. "
        "What it printed says more, and num_workers=0."
    )


def test_a_map_that_cannot_be_sent_to_processes_is_an_error_that_says_so(tiny):
    lock = threading.Lock()

    def locked(example):
        with lock:
            return {"number": example["number"]}

    with pytest.raises(TypeError, match="cannot pickle") as error:
        tiny(map=locked, in_memory=False, num_workers=2)
    assert error.value.__notes__[0] == (
        "map= and what it uses cannot be sent to worker processes: create such objects "
        "inside of it, or use num_workers=0."
    )


def test_auto_keeps_what_fits_into_memory_and_says_so(tiny, monkeypatch):
    assert "Decoded 200 examples once into " in notes(tiny())
    module = sys.modules["meshlayout.data.tfds"]
    monkeypatch.setattr(module, "_KEPT_BYTES", 250)
    data = tiny()
    assert sorted(numbers(data)) == list(range(NUM_ROWS))
    assert notes(data) == "The split is not kept in memory, but decoded in every epoch."


def test_what_is_kept_is_decoded_once_and_strings_are_refused_before(tiny, monkeypatch):
    decoded = []
    features = tfds.features.FeaturesDict
    original = features.deserialize_example_np

    def counted(self, *args, **kwargs):
        decoded.append(1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(features, "deserialize_example_np", counted)
    with pytest.raises(ml.errors.DataError, match="leaf 'name' holds strings, which"):
        tiny(map=None)
    assert len(decoded) <= 3  # what is looked at, and not the split
    assert len(numbers(tiny(in_memory=True, epochs=3))) == 600
    assert NUM_ROWS <= len(decoded) <= NUM_ROWS + 6


WAY_OUT = (
    "name a directory that has it with data_dir=, as `tfds build "
    "--file_format=array_record` makes elsewhere, or run `make data` in a checkout, "
    "which has Fashion-MNIST even without internet."
)


def unreadable(directory, split, reason):
    return (
        f"split '{split}' of tiny/1.0.0 cannot be read ({reason}). It has 'train', and "
        f"parts of them, as 'train[:10%]'. If {directory}/tiny/1.0.0 is damaged, remove "
        "it and prepare it again with `tfds build tiny --file_format=array_record`."
    )


@pytest.mark.parametrize(
    ("split", "reason"),
    [
        ("trian", "Unknown split 'trian'. Should be one of ['train']"),
        ("train[5:5]", "it has no examples"),
    ],
)
def test_a_wrong_split_is_an_error_with_those_there_are(tiny, directory, split, reason):
    with pytest.raises(ml.errors.DataError) as error:
        tiny(split)
    assert str(error.value) == unreadable(directory, split, reason)


def test_a_damaged_directory_is_an_error_that_names_it(tiny, directory, tmp_path):
    shutil.copytree(directory / "tiny", tmp_path / "tiny")
    (file, *_) = (tmp_path / "tiny").rglob("*array_record-00001*")
    file.unlink()
    with pytest.raises(ml.errors.DataError) as error:
        tiny(data_dir=tmp_path)
    reason = "tiny-train.array_record-00001-of-00004 is missing"
    assert str(error.value) == unreadable(tmp_path, "train", reason)


@pytest.mark.parametrize("name", ["cifar10", "fashon_mnist", "mnist:9.9.9"])
def test_a_dataset_that_cannot_be_had_is_said_at_once(
    mesh, tmp_path, monkeypatch, capfd, name
):
    for variable in ("http_proxy", "https_proxy"):  # where nothing answers
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    start = time.monotonic()
    with pytest.raises(ml.errors.DataError) as error:
        from_tfds(name, "train", mesh, global_batch_size=8, data_dir=tmp_path)
    assert time.monotonic() - start < 10
    for text in ("`make data`", "data_dir=", name.partition(":")[0]):
        assert text in str(error.value)
    assert str(error.value).count(". ") == str(error.value).count("\n") == 0
    assert "fashion_mnist" in str(error.value) or name != "fashon_mnist"
    assert "Retrying" not in capfd.readouterr().err


@pytest.mark.skipif(
    "tensorflow" in sys.modules, reason="TensorFlow would prepare the dataset"
)
def test_a_data_set_whose_preparation_fails_says_how_to_prepare_it(
    mesh, tmp_path, monkeypatch
):
    def no_tensorflow(self, **options):
        raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")

    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", no_tensorflow)
    prepared = sys.modules["meshlayout.data.preparation"]
    monkeypatch.setattr(prepared, "unreachable", lambda builder: "")
    with pytest.raises(ml.errors.DataError) as error:
        from_tfds("mnist", "train", mesh, global_batch_size=8, data_dir=tmp_path)
    assert str(error.value) == (
        f"the dataset 'mnist/3.0.1' is not prepared in {tmp_path}/mnist/3.0.1 and "
        "cannot be downloaded and prepared here (No module named 'tensorflow'): "
        + WAY_OUT
    )
