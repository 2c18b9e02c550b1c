"""Grain's and TFDS's objects as sources, and which packages are imported for it."""

import subprocess
import sys

import grain
import numpy as np
import pytest
import tensorflow_datasets as tfds

import meshlayout as ml
from meshlayout.data import distribute_dataset
from tests.tfds_directory import NUM_ROWS, made_up_examples, tiny_directory


@pytest.fixture(scope="module")
def mesh():
    return ml.create_mesh({"batch": 8})


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tiny_directory(tmp_path_factory.mktemp("tfds"))
    return tfds.data_source("tiny", split="train", data_dir=directory)


SQUARES = np.arange(20) ** 2
ROWS = grain.MapDataset.source([{"y": square} for square in SQUARES])


def values(data):
    """The rows of one iteration, padding left out."""
    rows = [np.asarray(b["y"])[np.asarray(b["weight"]) > 0] for b in data]
    return np.concatenate(rows).tolist()


def test_a_map_dataset_is_shuffled_by_grain_or_by_a_seed_in_every_epoch(mesh):
    source = ROWS.shuffle(seed=3)
    data = distribute_dataset(source, mesh, global_batch_size=8)
    for epoch in range(3):
        assert values(data) == [source[epoch * 20 + row]["y"] for row in range(20)]
    data, arrays = (
        distribute_dataset(x, mesh, global_batch_size=8, shuffle=0)
        for x in (ROWS, {"y": SQUARES})
    )
    first, second = values(data), values(data)
    assert first != second
    assert [first, second] == [values(arrays), values(arrays)]


@pytest.mark.slow
def test_grains_worker_processes_start_outside_of_absl():
    # In a process of its own: absl's flags are parsed in this one by pytest or not.
    program = """
import grain, numpy as np
import meshlayout as ml
from meshlayout.data import distribute_dataset

if __name__ == "__main__":
    mesh = ml.create_mesh({"batch": 1})
    rows = grain.MapDataset.source([{"y": i, "x": np.ones(2)} for i in range(20)])
    dataset = rows.to_iter_dataset().mp_prefetch(
        grain.multiprocessing.MultiprocessingOptions(num_workers=1)
    )
    data = distribute_dataset(dataset, mesh, global_batch_size=10)
    print([y for batch in data for y in batch["y"].tolist()])
"""
    run = [sys.executable, "-c", program]
    said = subprocess.check_output(run, text=True, timeout=60)
    assert said.strip() == str(list(range(20)))


def test_a_tfds_data_source_gives_every_example_decoded_in_its_own_dtypes(mesh, source):
    data = distribute_dataset(source, mesh, global_batch_size=40, strings="host")
    assert data.element_spec["image"].shape == (40, 6, 6, 1)
    assert data.element_spec["image"].dtype == np.uint8
    assert data.element_spec["small"].dtype == np.int16
    images, found = made_up_examples(), []
    for batch in data:
        rows = np.asarray(batch["number"])
        np.testing.assert_array_equal(batch["image"][..., 0], images[rows])
        assert batch["name"].tolist() == [b"row %d" % row for row in rows]
        found += rows.tolist()
    assert sorted(found) == list(range(NUM_ROWS))


def test_an_object_is_recognised_by_the_package_of_a_base_class(mesh):
    members = dict.fromkeys(("batch_sampler", "batch_size", "sampler", "drop_last"))
    members["__iter__"] = lambda self: iter([{"y": 1}, {"y": 2}])
    loader = type("DataLoader", (), {"__module__": "torch.inside", **members})
    users_own = type("MyLoader", (loader,), {})
    imported = {*sys.modules}
    data = distribute_dataset(users_own(), mesh, global_batch_size=8)
    assert values(data) == [1, 2]
    assert "torch" not in {*sys.modules} - imported
