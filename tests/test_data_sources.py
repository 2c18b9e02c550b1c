"""Where images come from: prepared directories, downloads, and the carried part."""

import gzip
import hashlib
import importlib.util
import os
import re
import shutil
import socket
import time
import zipfile
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds

import meshlayout as ml
from meshlayout.data import mnist_family, preparation as prepared_module
from models import data, prepare_data
from models.data import Split, batches, load_dataset, num_batches
from models.prepare_data import DataError, find_builder, is_prepared, prepare
from tests.error_messages import message_of


NUM_TRAIN, NUM_TEST = 300, 100


def idx(array):
    """The gzipped bytes of MNIST's IDX format."""
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    return gzip.compress(header + array.astype(np.uint8).tobytes())


def examples(num_examples, seed):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (num_examples, 28, 28), np.uint8)
    return images, rng.integers(0, 10, num_examples, np.uint8)


TRAIN, TEST = examples(NUM_TRAIN, 0), examples(NUM_TEST, 1)


def made_up_files(builder, dl_manager):
    return {
        split: (idx(images), idx(labels))
        for split, (images, labels) in (("train", TRAIN), ("test", TEST))
    }


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A TFDS directory with a small mnist of random images."""
    data_dir = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mnist_family, "mnist_files", made_up_files)
        prepare(find_builder("mnist", data_dir))
    return data_dir


@pytest.fixture
def copied(prepared, tmp_path):
    """The directory of the small mnist in a copy that a test may damage."""
    shutil.copytree(prepared / "mnist", tmp_path / "mnist")
    return tmp_path / "mnist" / "3.0.1"


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(data, "unreachable", lambda builder: "the server is away")


def by_content(split):
    """Digests of (image, label) pairs, in any order."""
    return sorted(
        hashlib.sha256(image.tobytes() + bytes([label])).digest()
        for image, label in zip(split.images, split.labels, strict=True)
    )


def test_a_prepared_directory_gives_every_example_as_it_was(prepared):
    dataset = load_dataset("mnist", prepared)
    assert str(dataset) == (
        f"mnist from the prepared TFDS directory {prepared}/mnist/3.0.1, "
        "300 training and 100 test images."
    )
    builder: Any = tfds.builder("mnist", data_dir=prepared)
    assert len(builder.as_data_source(split="test")) == NUM_TEST  # TFDS's own dataset
    for split, (images, labels) in ((dataset.train, TRAIN), (dataset.test, TEST)):
        assert split.images.shape == (len(labels), 28, 28, 1)
        assert split.images.dtype == np.uint8
        assert split.labels.dtype == np.int32
        assert by_content(split) == by_content(Split(images, labels))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: (d / "dataset_info.json").unlink(), "it has no dataset_info.json"),
        (
            lambda d: [
                os.truncate(x, x.stat().st_size // 2)
                for x in d.glob("*train.array_record*")
            ],
            "Invalid Riegeli/records file",
        ),
    ],
)
def test_a_damaged_directory_is_an_error_that_names_it(copied, damage, reason):
    damage(copied)
    with pytest.raises(DataError) as error:
        load_dataset("mnist", copied.parent.parent)
    message = str(error.value)
    assert message.startswith(f"the prepared dataset in {copied.parent}")
    assert f"cannot be read ({reason}" in message
    assert message.endswith(
        "Remove that directory and prepare it again with "
        "`python -m models.prepare_data`."
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "fashion_mnis",
            "TFDS has no dataset 'fashion_mnis'. Did you mean 'fashion_mnist'?",
        ),
        (
            "cifar10",
            "dataset 'cifar10' holds images of shape (32, 32, 3); these models take "
            "(28, 28, 1), as mnist, fashion_mnist, kmnist and emnist have.",
        ),
    ],
)
def test_a_dataset_that_cannot_be_is_refused_before_any_download(
    tmp_path, name, message
):
    assert message_of(find_builder, name, tmp_path, error=DataError) == message


def test_a_download_is_prepared_and_then_found(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "unreachable", lambda builder: "")
    monkeypatch.setattr(mnist_family, "mnist_files", made_up_files)
    first = load_dataset("kmnist", tmp_path)
    assert str(first) == (
        f"kmnist from TFDS's download, prepared in {tmp_path}/kmnist/3.0.1, "
        "300 training and 100 test images."
    )
    monkeypatch.setattr(data, "unreachable", lambda builder: "the server is away")
    second = load_dataset("kmnist", tmp_path)
    assert second.source.startswith("the prepared TFDS directory")
    assert by_content(second.train) == by_content(first.train)


@pytest.mark.parametrize("name", ["mnist", "emnist/digits"])
def test_another_dataset_is_never_taken_in_place_of_one_that_is_away(
    tmp_path, offline, name
):
    assert message_of(load_dataset, name, tmp_path, error=DataError) == (
        f"{name} is not prepared in {tmp_path} and cannot be downloaded: the server is "
        "away. Run this once with internet, or copy a prepared TFDS directory here and "
        "name it with --data-dir."
    )


@pytest.mark.parametrize("by_name", [True, False], ids=["name", "builder"])
def test_from_tfds_prepares_the_mnist_family_without_tensorflow(
    tmp_path, monkeypatch, by_name
):
    assert importlib.util.find_spec("tensorflow") is None
    monkeypatch.setattr(mnist_family, "mnist_files", made_up_files)
    monkeypatch.setattr(prepared_module, "unreachable", lambda builder: "")
    name = "kmnist" if by_name else tfds.builder("kmnist", data_dir=tmp_path)
    mesh = ml.create_mesh({"batch": -1})
    options: Any = {"global_batch_size": NUM_TRAIN + 4, "shuffle": None}
    (batch,) = ml.data.from_tfds(name, "train", mesh, data_dir=tmp_path, **options)
    images, labels = ml.to_numpy(batch["image"]), ml.to_numpy(batch["label"])
    rows = ml.to_numpy(batch["weight"]) > 0
    assert by_content(Split(images[rows], labels[rows])) == by_content(Split(*TRAIN))


def test_the_tutorials_have_images_without_internet(tmp_path, monkeypatch):
    own, carried = tmp_path / "own", tmp_path / "models" / "carried.npz"
    monkeypatch.setenv("TFDS_DATA_DIR", str(own))
    carried.parent.mkdir()
    with np.load(data.CARRIED_PART) as arrays:
        np.savez(carried, **{name: rows[:40] for name, rows in arrays.items()})
    monkeypatch.setattr(data, "CARRIED_PART", carried)
    monkeypatch.setattr(data, "unreachable", lambda builder: "the server is away")
    data_dir = data.tutorial_data_dir()
    assert data_dir == tmp_path / ".cache" / "tfds"
    part, whole = load_dataset("fashion_mnist", data_dir), data.read_carried_part("")
    assert by_content(part.train) == by_content(whole.train)
    assert by_content(part.test) == by_content(whole.test)
    monkeypatch.setattr(data, "prepare_carried_part", None)  # it is there
    assert data.tutorial_data_dir() == data_dir
    monkeypatch.setattr(data, "unreachable", lambda builder: "")
    assert data.tutorial_data_dir() == own  # where it is downloaded


def test_a_download_that_fails_is_an_error(tmp_path, monkeypatch):
    def fail(builder, dl_manager):
        raise OSError("connection lost")

    monkeypatch.setattr(data, "unreachable", lambda builder: "")
    monkeypatch.setattr(mnist_family, "mnist_files", fail)
    with pytest.raises(DataError, match="connection lost"):
        load_dataset("mnist", tmp_path)
    assert not is_prepared(find_builder("mnist", tmp_path))


def test_a_file_that_is_not_the_registered_one_is_refused(tmp_path):
    manual_dir = tmp_path / "files"
    manual_dir.mkdir()
    for kind in ("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz"):
        for prefix in ("train", "t10k"):
            (manual_dir / f"{prefix}-{kind}").write_bytes(b"something else")
    with pytest.raises(DataError, match="fashion_mnist cannot be prepared"):
        prepare(find_builder("fashion_mnist", tmp_path), manual_dir=manual_dir)


def test_emnist_is_read_from_its_archive(tmp_path):
    archive = tmp_path / "gzip.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for split in ("train", "test"):
            for kind in ("images-idx3", "labels-idx1"):
                name = f"gzip/emnist-letters-{split}-{kind}-ubyte.gz"
                file.writestr(name, f"{split} {kind}")
    builder = find_builder("emnist/letters", tmp_path)
    manager = SimpleNamespace(download=lambda url: archive)
    assert mnist_family.mnist_files(builder, manager) == {
        "train": (b"train images-idx3", b"train labels-idx1"),
        "test": (b"test images-idx3", b"test labels-idx1"),
    }


@pytest.mark.parametrize(
    ("listens", "reason"),
    [
        (False, r"cannot be reached \(ProxyError\)"),
        (True, r"(does not answer within 0.3 s|cannot be reached \(ReadTimeout\))"),
    ],
)
def test_a_network_that_refuses_or_never_answers_is_given_up(
    listens, reason, tmp_path, monkeypatch
):
    with socket.socket() as proxy:
        proxy.bind(("127.0.0.1", 0))  # without listening, it refuses connections
        if listens:
            proxy.listen()
        port = proxy.getsockname()[1]
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        monkeypatch.delenv("no_proxy", raising=False)
        builder = find_builder("fashion_mnist", tmp_path)
        start = time.monotonic()
        options = {"timeout_s": 0.3} if listens else {}
        found = prepare_data.unreachable(builder, **options)
        assert time.monotonic() - start < 4
    server = "fashion-mnist.s3-website.eu-central-1.amazonaws.com"
    assert re.fullmatch(f"{server} {reason}", found)


def test_the_carried_part_says_what_it_is(tmp_path, offline):
    dataset = load_dataset("fashion_mnist", tmp_path)
    assert str(dataset) == (
        "fashion_mnist from the subset of it in models/, 5,000 "
        "training and 1,000 test images. Expect 81 to 83% test accuracy after 3 epochs "
        "of the MLP. All of Fashion-MNIST, which gives 86 to 88%, is not used because "
        f"it is not prepared in {tmp_path}, and the server is away; `make data` "
        "prepares it."
    )
    for split, size in ((dataset.train, 5000), (dataset.test, 1000)):
        assert split.images.shape == (size, 28, 28, 1)
        assert set(split.labels.tolist()) == set(range(10))
    licence = data.CARRIED_PART.with_suffix(".LICENSE").read_text()
    assert "Copyright (c) 2017 Zalando SE" in licence
    assert "MIT License" in licence


@pytest.mark.parametrize("size", [1, 3, 8, 16])
@pytest.mark.parametrize("num_examples", [1, 7, 8])
def test_batches_count_every_example_exactly_once(num_examples, size):
    images = np.zeros((num_examples, 28, 28, 1), np.uint8)
    split = Split(images, np.arange(num_examples, dtype=np.int32))
    seen = list(batches(split, size, order=np.random.default_rng(0)))
    assert len(seen) == num_batches(split, size)
    assert {batch["image"].shape for batch in seen} == {(size, 28, 28, 1)}
    labels = np.concatenate([batch["label"] for batch in seen])
    weights = np.concatenate([batch["weight"] for batch in seen])
    assert set(weights.tolist()) <= {0.0, 1.0}
    assert sorted(labels[weights == 1].tolist()) == list(range(num_examples))
    again = list(batches(split, size, order=np.random.default_rng(0)))
    assert [b["label"].tolist() for b in again] == [b["label"].tolist() for b in seen]
