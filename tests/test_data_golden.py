"""Batches of seeded sources and packed rows are those of earlier releases, bit for bit.

A run that resumes after an upgrade has to see the rows that it has not seen yet, so the
order, the random numbers of `map` and the packing may never change. The digests in
`golden_data.json` were recorded at commit bb727a3, before these parts were rewritten.
"""

import hashlib
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import meshlayout as ml
from meshlayout.data import distribute_dataset, from_tfds, pack_sequences
from tests import batches_golden
from tests.tfds_directory import tiny_directory


GOLDEN = json.loads(Path(__file__).with_name("golden_data.json").read_text())


def digest(trees):
    """One digest of the values, dtypes, shapes and names of all leaves, in order."""
    total = hashlib.sha256()
    for tree in trees:
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            array = np.asarray(leaf)
            name = jax.tree_util.keystr(path)
            total.update(f"{name} {array.dtype} {array.shape}".encode())
            total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()[:24]


def mesh():
    return ml.create_mesh({"batch": 4, "model": 2})


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_directory(tmp_path_factory.mktemp("tfds"))


@pytest.mark.parametrize("name", batches_golden.CASES)
def test_batches_of_arrays_sources_streams_and_fit(name):
    found = batches_golden.digest(batches_golden.CASES[name]())
    assert found == batches_golden.EXPECTED["1"][name]


def numbers_and_images(example):
    return {"image": example["image"], "number": example["number"]}


def add_noise(example, rng):
    return {"number": example["number"], "noise": rng.normal(size=3)}


FROM_TFDS = {
    "default order": {},
    "seed 3": {"shuffle": 3, "epochs": 2},
    "in order": {"shuffle": None},
    "noise": {"shuffle": 5, "epochs": 2, "map": add_noise},
    "part": {"split": "train[10:50]", "shuffle": 1},
}


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("name", FROM_TFDS)
def test_batches_of_a_tfds_dataset(directory, name, in_memory):
    options = {
        "split": "train",
        "global_batch_size": 32,
        "map": numbers_and_images,
        **FROM_TFDS[name],
    }
    split = options.pop("split")
    batches = from_tfds(
        "tiny", split, mesh(), data_dir=directory, in_memory=in_memory, **options
    )
    assert digest(batches) == GOLDEN[f"from_tfds {name}"]


def test_supervised_batches_of_a_tfds_dataset(directory):
    batches = from_tfds(
        "tiny",
        "train",
        mesh(),
        global_batch_size=32,
        data_dir=directory,
        supervised=True,
        shuffle=2,
    )
    assert digest(batches) == GOLDEN["from_tfds supervised"]


def hugging_face(streamed):
    datasets = pytest.importorskip("datasets")
    rng = np.random.default_rng(0)
    columns = {
        "number": list(range(50)),
        "vector": rng.normal(size=(50, 3)).tolist(),
        "flag": [row % 3 == 0 for row in range(50)],
    }
    features = {
        "number": datasets.Value("int16"),
        "vector": datasets.List(datasets.Value("float32"), length=3),
        "flag": datasets.Value("bool"),
    }
    dataset = datasets.Dataset.from_dict(columns, datasets.Features(features))
    return dataset.to_iterable_dataset(num_shards=3) if streamed else dataset


class Squares:
    def __len__(self):
        return 50

    def __getitem__(self, row):
        return {"x": np.float32(row) ** 2, "y": row}


def torch_rows():
    torch = pytest.importorskip("torch")
    return type("Rows", (Squares, torch.utils.data.Dataset), {})()


def grain_rows(*, is_shuffled):
    grain = pytest.importorskip("grain")
    rows = grain.MapDataset.source(range(50)).seed(4)
    if is_shuffled:
        rows = rows.shuffle()
    return rows.random_map(lambda row, rng: {"y": row, "noise": rng.random()})


SOURCES = {
    "hugging face": (lambda: hugging_face(streamed=False), {"shuffle": 3}),
    "hugging face in order": (lambda: hugging_face(streamed=False), {}),
    "hugging face stream": (lambda: hugging_face(streamed=True), {"batched": False}),
    "torch": (torch_rows, {"shuffle": 3}),
    "grain": (lambda: grain_rows(is_shuffled=False), {"shuffle": 3}),
    "grain's order": (lambda: grain_rows(is_shuffled=True), {}),
    "arrays": (lambda: {"y": np.arange(50), "x": np.ones((50, 2))}, {"shuffle": 3}),
}


@pytest.mark.parametrize("name", SOURCES)
def test_batches_of_other_sources(name):
    make, options = SOURCES[name]
    batches = distribute_dataset(
        make(), mesh(), global_batch_size=8, epochs=2, **options
    )
    assert digest(batches) == GOLDEN[name]


def test_a_stream_that_hugging_face_shuffles_keeps_its_order():
    # Which is another one in other releases of theirs.
    stream = hugging_face(streamed=True).shuffle(seed=1, buffer_size=8)
    batches = distribute_dataset(stream, mesh(), global_batch_size=8, epochs=2)
    found, expected = [], []
    for batch in batches:
        found += batch["number"][batch["weight"] > 0].tolist()
    for epoch in (0, 1):
        stream.set_epoch(epoch)
        expected += [row["number"] for row in stream]
    assert found == expected


def token_documents():
    rng = np.random.default_rng(0)
    return [rng.integers(1, 250, rng.integers(0, 60)) for _ in range(300)]


PACKED = {
    "pack": (24, {"mode": "pack"}),
    "pack targets": (24, {"mode": "pack", "targets": True}),
    "pack all": (
        17,
        {"mode": "pack", "targets": True, "document_ids": True, "separator": 7},
    ),
    "chunk": (24, {}),
    "chunk all": (17, {"targets": True, "document_ids": True, "separator": 7}),
    "chunk dropped": (23, {"targets": True, "remainder": "drop"}),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_rows(name):
    length, options = PACKED[name]
    rows = pack_sequences(token_documents(), length, **options)
    assert digest(rows) == GOLDEN[f"packed {name}"]
