"""Grain's and TFDS's objects as sources, and which packages are imported for it."""

import itertools
import subprocess
import sys

import grain
import jax
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
def directory(tmp_path_factory):
    return tiny_directory(tmp_path_factory.mktemp("tfds"))


def records(count):
    return [
        {"x": np.full((2, 3), row, np.uint8), "y": row * row} for row in range(count)
    ]


def values(data, name="y"):
    """The rows that one iteration gives, padding left out."""
    return [
        value
        for batch in data
        for value, weight in zip(
            np.asarray(batch[name]).tolist(),
            np.asarray(batch["weight"]).tolist(),
            strict=True,
        )
        if weight
    ]


def squares(numbers):
    return [number * number for number in numbers]


def only_y(dataset):
    """Grain's own order of an epoch, the reference for ours."""
    return [int(example["y"]) for example in dataset]


# Grain: MapDataset


def test_a_map_dataset_gives_every_example_once_in_its_order(mesh):
    source = grain.MapDataset.source(records(20))
    data = distribute_dataset(source, mesh, global_batch_size=8)
    assert len(data) == 3
    batches = [jax.tree.map(np.asarray, batch) for batch in data]
    np.testing.assert_array_equal(batches[1]["y"], squares(range(8, 16)))
    np.testing.assert_array_equal(batches[1]["x"][0], np.full((2, 3), 8))
    assert batches[0]["x"].dtype == np.uint8
    assert [batch["weight"].sum() for batch in batches] == [8, 8, 4]


def test_a_map_dataset_that_shuffles_has_grains_order_in_every_epoch(mesh):
    source = grain.MapDataset.source(records(20)).shuffle(seed=3)
    data = distribute_dataset(source, mesh, global_batch_size=8)
    for epoch in range(3):
        assert values(data) == [source[epoch * 20 + row]["y"] for row in range(20)]


def test_a_map_dataset_can_be_shuffled_by_seed_and_epoch(mesh):
    source = grain.MapDataset.source(records(20))
    data = distribute_dataset(source, mesh, global_batch_size=8, shuffle=0)
    first, second = values(data), values(data)
    assert first != second
    assert sorted(first) == sorted(second) == squares(range(20))


def test_a_map_dataset_that_filters_leaves_those_examples_out(mesh):
    source = grain.MapDataset.source(records(20)).filter(lambda e: e["y"] % 2 == 0)
    data = distribute_dataset(source, mesh, global_batch_size=8)
    assert values(data) == squares(range(0, 20, 2))


def test_a_map_dataset_whose_map_leaves_holes_is_an_error(mesh):
    source = grain.MapDataset.source(records(20)).map(
        lambda example: None if example["y"] == 9 else example
    )
    data = distribute_dataset(source, mesh, global_batch_size=8)
    with pytest.raises(ml.errors.DataError) as error:
        values(data)
    assert str(error.value) == (
        "the Grain MapDataset has None for some rows: one of its steps filters. Give "
        "its to_iter_dataset(), which leaves them out."
    )


def test_a_map_dataset_of_batches_is_batched_again(mesh):
    source = grain.MapDataset.source(records(20)).batch(6)
    data = distribute_dataset(source, mesh, global_batch_size=8)
    assert values(data) == squares(range(20))


def test_a_map_dataset_that_repeats_for_ever_is_read_for_a_number_of_steps(mesh):
    source = grain.MapDataset.source(records(5)).repeat()
    batches = iter(distribute_dataset(source, mesh, global_batch_size=8))
    assert values(itertools.islice(batches, 2)) == squares([*range(5)] * 4)[:16]


def test_single_arrays_in_a_map_dataset_may_be_batches(mesh):
    source = grain.MapDataset.source(np.zeros((20, 4), np.float32))
    with pytest.raises(ml.errors.DataError) as error:
        distribute_dataset(source, mesh, global_batch_size=8)
    assert str(error.value) == (
        "the elements of the Grain dataset may be examples or batches: all their "
        "arrays have the same first dim. Say batched=False for examples, or "
        "batched=True for batches."
    )
    options = {"global_batch_size": 8, "remainder": "drop", "weights": None}
    rows = distribute_dataset(source, mesh, batched=False, **options)
    assert rows.element_spec.shape == (8, 4)
    numbers = distribute_dataset(source, mesh, batched=True, **options)
    assert numbers.element_spec.shape == (8,)


# Grain: IterDataset and DataLoader


@pytest.mark.parametrize(
    "make",
    [
        lambda source: source.to_iter_dataset(),
        lambda source: source.to_iter_dataset().batch(3),
        lambda source: source.batch(7).to_iter_dataset(),
        lambda source: source.to_iter_dataset().filter(lambda e: e["y"] != 16),
    ],
    ids=["examples", "batches", "batches before", "filter"],
)
def test_an_iter_dataset_gives_every_example_once(mesh, make):
    dataset = make(grain.MapDataset.source(records(20)).shuffle(seed=1))
    expected = [int(y) for element in dataset for y in np.atleast_1d(element["y"])]
    data = distribute_dataset(dataset, mesh, global_batch_size=8)
    assert values(data) == expected
    assert values(data) == expected


def loader(num_workers=0, batch_size=None):
    return grain.DataLoader(
        data_source=records(40),
        sampler=grain.samplers.IndexSampler(
            40,
            shuffle=True,
            seed=5,
            num_epochs=1,
            shard_options=grain.sharding.NoSharding(),
        ),
        operations=[grain.transforms.Batch(batch_size)] if batch_size else [],
        worker_count=num_workers,
    )


@pytest.mark.parametrize("batch_size", [None, 5])
def test_a_data_loader_gives_what_it_gives_by_itself(mesh, batch_size):
    expected = [
        int(y) for element in loader(0, batch_size) for y in np.atleast_1d(element["y"])
    ]
    options = {"batched": True} if batch_size else {}
    source = loader(0, batch_size)
    data = distribute_dataset(source, mesh, global_batch_size=16, **options)
    assert values(data) == expected
    assert sorted(expected) == squares(range(40))


def sources():
    return {
        "MapDataset": lambda: grain.MapDataset.source(records(100)).shuffle(seed=2),
        "MapDataset of batches": lambda: grain.MapDataset.source(records(100)).batch(7),
        "IterDataset": lambda: (
            grain.MapDataset.source(records(100)).shuffle(seed=2).to_iter_dataset()
        ),
        "IterDataset of batches": lambda: (
            grain.MapDataset.source(records(100)).to_iter_dataset().batch(9)
        ),
        "DataLoader": loader,
        "DataLoader of batches": lambda: loader(0, 3),
    }


@pytest.mark.parametrize("name", sources())
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_a_grain_source_resumes_exactly_where_it_stopped(mesh, name, stop):
    make = sources()[name]
    options = {"global_batch_size": 8, "epochs": 2}
    if name == "DataLoader of batches":
        options["batched"] = True
    whole = values(distribute_dataset(make(), mesh, **options))
    with distribute_dataset(make(), mesh, **options).iterator() as iterator:
        before = values(next(iterator) for _ in range(stop))
        state = iterator.get_state()
    resumed = iter(distribute_dataset(make(), mesh, **options))
    resumed.set_state(state)
    assert before + values(resumed) == whole


@pytest.mark.slow
def test_grains_worker_processes_start_outside_of_absl(mesh):
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
    run = run_python(program, timeout=60)
    assert run.stdout.strip() == str(list(range(20))), run.stderr


def test_an_exception_in_a_grain_map_comes_after_the_examples_before_it(mesh):
    def fail(example):
        if example["y"] == 81:
            raise ArithmeticError("no root of 81")
        return example

    dataset = grain.MapDataset.source(records(20)).to_iter_dataset().map(fail)
    batches = iter(distribute_dataset(dataset, mesh, global_batch_size=8))
    assert values([next(batches)]) == squares(range(8))
    with pytest.raises(ArithmeticError, match="no root of 81"):
        next(batches)


# TFDS: data sources, without TensorFlow


def test_a_tfds_data_source_gives_every_example_decoded_in_its_own_dtypes(
    mesh, directory
):
    source = tfds.data_source("tiny", split="train", data_dir=directory)
    data = distribute_dataset(source, mesh, global_batch_size=64, strings="host")
    assert data.element_spec["image"].shape == (64, 6, 6, 1)
    assert data.element_spec["image"].dtype == np.uint8
    assert data.element_spec["small"].dtype == np.int16
    images = {}
    for batch in data:
        for number, weight, image, name in zip(
            np.asarray(batch["number"]).tolist(),
            np.asarray(batch["weight"]),
            np.asarray(batch["image"]),
            batch["name"],
            strict=True,
        ):
            if weight:
                assert name == b"row %d" % number
                images[number] = image
    assert sorted(images) == list(range(NUM_ROWS))
    for number, example in enumerate(made_up_examples()):
        np.testing.assert_array_equal(images[number][..., 0], example)


def test_a_tfds_data_source_resumes_in_the_middle_of_a_shuffled_epoch(mesh, directory):
    def new():
        source = tfds.data_source("tiny", split="train", data_dir=directory)
        return distribute_dataset(
            source, mesh, global_batch_size=32, shuffle=7, strings="host"
        )

    iterator = iter(new())
    for _ in range(3):
        next(iterator)
    state = iterator.get_state()
    rest = values(iterator, "number")
    again = iter(new())
    again.set_state(state)
    assert values(again, "number") == rest
    assert len(rest) == NUM_ROWS - 3 * 32


def test_strings_of_a_tfds_data_source_are_an_error_unless_they_stay_on_the_host(
    mesh, directory
):
    source = tfds.data_source("tiny", split="train", data_dir=directory)
    with pytest.raises(ml.errors.DataError) as error:
        distribute_dataset(source, mesh, global_batch_size=32)
    assert str(error.value) == (
        "leaf 'name' holds strings, which devices do not take. Leave it out, or keep "
        "it on the host with strings='host'."
    )


def test_a_tfds_data_source_gives_no_batches(mesh, directory):
    source = tfds.data_source("tiny", split="train", data_dir=directory)
    with pytest.raises(ml.errors.DataError) as error:
        distribute_dataset(source, mesh, global_batch_size=32, batched=True)
    assert str(error.value) == (
        "an ArrayRecordDataSource yields single examples: leave out batched=True."
    )


# What is imported


def run_python(program, timeout=60):
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_no_framework_is_imported_for_a_source_that_is_not_its_own():
    program = """
import sys
import numpy as np
import meshlayout as ml
from meshlayout.data import distribute_dataset

mesh = ml.create_mesh({"batch": 1})
for source in ({"x": np.zeros((4, 2))}, lambda: iter([{"x": 1.0}] * 4)):
    for batch in distribute_dataset(source, mesh, global_batch_size=2):
        pass
heavy = ("tensorflow", "torch", "datasets", "grain", "tensorflow_datasets")
print([name for name in heavy if name in sys.modules])
"""
    run = run_python(program)
    assert run.stdout.strip() == "[]", run.stderr


def stand_in(package, name, bases=(object,), **members):
    """A class that says it was defined in a package."""
    return type(name, bases, {"__module__": f"{package}.inside", **members})


def test_an_object_is_recognised_by_the_package_of_a_base_class(mesh):
    loader = stand_in(
        "torch",
        "DataLoader",
        batch_sampler=None,
        batch_size=None,
        sampler=None,
        drop_last=False,
        __iter__=lambda self: iter([{"y": 1}, {"y": 2}]),
    )
    users_own = type("MyLoader", (loader,), {})
    imported = {*sys.modules}
    data = distribute_dataset(users_own(), mesh, global_batch_size=8)
    assert values(data) == [1, 2]
    assert "torch" not in {*sys.modules} - imported


def test_a_dict_of_splits_asks_for_one_of_them(mesh):
    splits = stand_in("datasets", "DatasetDict", (dict,))(train=1, test=2)
    with pytest.raises(ml.errors.DataError) as error:
        distribute_dataset(splits, mesh, global_batch_size=8)
    assert str(error.value) == (
        "a DatasetDict holds the splits 'train', 'test'. Choose one, as "
        "dataset['train']."
    )


# Frameworks that are not installed: classes with the public methods that are used


def test_a_pytorch_dataset_is_a_source_of_rows(mesh):
    members = {
        "__len__": lambda self: 20,
        "__getitem__": lambda self, row: {"y": row * row},
    }
    dataset = stand_in("torch", "Dataset", **members)()
    data = distribute_dataset(dataset, mesh, global_batch_size=8)
    assert values(data) == squares(range(20))
    data = distribute_dataset(dataset, mesh, global_batch_size=8, shuffle=1)
    assert sorted(values(data)) == squares(range(20))


class HuggingFaceMembers:
    features = None

    def __init__(self, elements):
        self.elements, self.row = elements, 0

    def __iter__(self):
        while self.row < len(self.elements):
            self.row += 1
            yield self.elements[self.row - 1]

    def set_epoch(self, epoch):
        self.epoch = epoch

    def load_state_dict(self, state):
        self.row = 0 if state is None else state["row"]

    def state_dict(self):
        return {"row": self.row}


def hugging_face_stream(elements, ex_iterable=None):
    kind = stand_in("datasets", "IterableDataset", (HuggingFaceMembers,))
    dataset = kind(elements)
    if ex_iterable is not None:
        dataset._ex_iterable = ex_iterable
    return dataset


def test_a_hugging_face_stream_gives_its_examples_and_batches(mesh):
    examples = [{"y": row, "x": [row, row + 1]} for row in range(20)]
    data = distribute_dataset(hugging_face_stream(examples), mesh, global_batch_size=8)
    assert values(data) == list(range(20))
    assert values(data, "x") == [[row, row + 1] for row in range(20)]
    batches = [{"y": list(range(row, row + 5))} for row in range(0, 20, 5)]
    with pytest.raises(ml.errors.DataError, match="may be examples or batches"):
        distribute_dataset(hugging_face_stream(batches), mesh, global_batch_size=8)
    data = distribute_dataset(
        hugging_face_stream(batches), mesh, global_batch_size=8, batched=True
    )
    assert values(data) == list(range(20))


def test_a_hugging_face_stream_is_trusted_with_its_place_where_it_is_known(mesh):
    examples = [{"y": row} for row in range(20)]
    plain = type("ArrowExamplesIterable", (), {})()
    shuffled = type("BufferShuffledExamplesIterable", (), {"ex_iterable": plain})()
    for steps, is_trusted in ((plain, True), (shuffled, False), (None, False)):
        it = iter(
            distribute_dataset(
                hugging_face_stream(examples, steps), mesh, global_batch_size=8
            )
        )
        next(it)
        assert (it.get_state()["source"] is not None) == is_trusted


def test_a_hugging_face_list_of_structures_is_left_to_the_users_map(mesh):
    examples = [{"listed": [{"a": 1}, {"a": 2}]}] * 8
    with pytest.raises(ml.errors.DataError) as error:
        distribute_dataset(hugging_face_stream(examples), mesh, global_batch_size=8)
    assert str(error.value) == (
        "leaf 'listed' is a list of structures. Make arrays of their fields with the "
        "dataset's map or filter."
    )
