"""`from_tfds`: from a dataset's name to batches, read, decoded, mapped and kept."""

import inspect
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds

import meshlayout as ml
from meshlayout.data import from_tfds
from tests.processes import run_processes
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

    def make(**options):
        given = {
            "global_batch_size": 32,
            "data_dir": directory,
            "map": numbers_and_images,
            **options,
        }
        return from_tfds("tiny", "train", mesh, **given)

    return make


def numbers_and_images(example):
    return {"image": example["image"], "number": example["number"]}


def add_noise(example, rng):
    return {"number": example["number"], "noise": rng.normal(size=3)}


def fail_at_77(example):
    if example["number"] == 77:
        raise ArithmeticError("77 is not to be had")
    return {"number": example["number"]}


def stop_process_at_77(example):
    if example["number"] == 77:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"number": example["number"]}


def leave_without_a_word_at_77(example):
    if example["number"] == 77:
        os._exit(0)
    return {"number": example["number"]}


def host(data):
    return [jax.tree.map(np.asarray, batch) for batch in data]


def numbers(batches):
    """The numbers of the real rows of batches, in order."""
    return [
        number
        for batch in batches
        for number, weight in zip(
            np.asarray(batch["number"]).tolist(),
            np.asarray(batch["weight"]).tolist(),
            strict=True,
        )
        if weight
    ]


def notes(data):
    return " ".join(data.report().notes)


def same(one, other):
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert jax.tree.structure(left) == jax.tree.structure(right)
        for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype


WAYS = {
    "memory": {"in_memory": True},
    "as fits": {},
    "by record": {"in_memory": False},
    "by process": {"in_memory": False, "num_workers": 2},
}


# Those without worker processes, which take seconds to start.
HERE = ["memory", "as fits", "by record"]


# The same examples, however they are read


@pytest.mark.parametrize("way", HERE)
def test_every_example_comes_once_per_epoch_as_it_was_stored(tiny, way):
    images = made_up_examples()
    for _ in range(2):
        batches = host(tiny(**WAYS[way]))
        assert len(batches) == 7
        assert sorted(numbers(batches)) == list(range(NUM_ROWS))
        for batch in batches:
            assert batch["image"].dtype == np.uint8
            assert batch["image"].shape == (32, 6, 6, 1)
            np.testing.assert_array_equal(
                batch["image"][..., 0], images[batch["number"]]
            )


@pytest.mark.parametrize("way", HERE)
def test_the_order_is_a_function_of_seed_and_epoch_alone(tiny, way):
    expected = host(tiny(in_memory=True, epochs=2, shuffle=3))
    same(host(tiny(epochs=2, shuffle=3, **WAYS[way])), expected)
    assert numbers(expected[:7]) != numbers(expected[7:])
    assert numbers(host(tiny(shuffle=4, **WAYS[way]))) != numbers(expected[:7])


@pytest.mark.slow
def test_worker_processes_give_the_same_batches(tiny):
    expected = host(tiny(in_memory=True, map=add_noise))
    same(host(tiny(in_memory=False, num_workers=3, map=add_noise)), expected)
    same(host(tiny(in_memory=True, num_workers=1, map=add_noise)), expected)


def test_without_shuffle_rows_come_in_the_order_of_the_files(tiny, directory):
    source = tfds.data_source("tiny", split="train", data_dir=directory)
    stored = [int(source[row]["number"]) for row in range(NUM_ROWS)]
    assert numbers(tiny(shuffle=None)) == stored
    assert numbers(tiny(shuffle=None, in_memory=False)) == stored


def test_a_part_of_a_split_has_only_its_rows(mesh, directory):
    data = from_tfds(
        "tiny",
        "train[10:50]",
        mesh,
        global_batch_size=32,
        data_dir=directory,
        map=numbers_and_images,
        shuffle=None,
    )
    source = tfds.data_source("tiny", split="train[10:50]", data_dir=directory)
    assert numbers(data) == [int(source[row]["number"]) for row in range(40)]


@pytest.mark.parametrize("in_memory", [True, False])
def test_an_iteration_resumes_in_the_middle_of_an_epoch_also_in_another_cache(
    tiny, in_memory
):
    expected = host(tiny(in_memory=True, epochs=2, map=add_noise))
    iterator = iter(tiny(in_memory=True, epochs=2, map=add_noise))
    for _ in range(9):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    again = iter(tiny(in_memory=in_memory, epochs=2, map=add_noise))
    again.set_state(state)
    same(host(again), expected[9:])


# What map is given


def test_random_numbers_of_map_are_functions_of_seed_epoch_and_row(tiny):
    batches = host(tiny(map=add_noise, epochs=2, shuffle=5))
    assert batches[0]["noise"].dtype == np.float32
    for epoch, part in enumerate((batches[:7], batches[7:])):
        found = {
            number: noise
            for batch in part
            for number, noise in zip(
                batch["number"].tolist(), batch["noise"], strict=True
            )
        }
        assert len({noise.tobytes() for noise in found.values()}) == NUM_ROWS
        stored = numbers(host(tiny(shuffle=None)))
        row = stored.index(42)
        expected = np.random.default_rng([5, epoch, row]).normal(size=3)
        np.testing.assert_array_equal(found[42], expected.astype(np.float32))


@pytest.mark.parametrize("way", HERE)
def test_what_map_returns_has_dtypes_of_its_own(tiny, way):
    def halved(example):
        # The same numbers of NumPy's, however examples are read.
        assert example["small"].dtype == np.int16
        return {"number": example["number"] / 2, "small": example["small"] + 0.5}

    batches = host(tiny(map=halved, **WAYS[way]))
    assert sorted(numbers(batches)) == [row / 2 for row in range(NUM_ROWS)]
    assert all(set(batch["small"] % 1) == {0.5} for batch in batches)


def test_supervised_examples_are_pairs(mesh, directory):
    data = from_tfds(
        "tiny",
        "train",
        mesh,
        global_batch_size=32,
        data_dir=directory,
        supervised=True,
        in_memory=False,
    )
    images = made_up_examples()
    for image, number, weights in data:
        assert image.dtype == np.uint8
        real = np.asarray(weights) > 0
        np.testing.assert_array_equal(
            np.asarray(image)[real][..., 0], images[np.asarray(number)[real]]
        )


def test_strings_are_refused_before_the_split_is_decoded(mesh, directory, monkeypatch):
    monkeypatch.setattr(
        tfds.features.FeaturesDict,
        "deserialize_example_np",
        one_more_than_the_first_example,
    )
    _calls.clear()
    for in_memory in (True, False):
        with pytest.raises(ml.errors.DataError) as error:
            from_tfds(
                "tiny",
                "train",
                mesh,
                global_batch_size=32,
                data_dir=directory,
                in_memory=in_memory,
            )
        assert str(error.value) == (
            "leaf 'name' holds strings, which devices do not take. Leave it out, or "
            "keep it on the host with strings='host'."
        )


@pytest.mark.parametrize("in_memory", [True, False])
def test_strings_stay_on_the_host_where_asked(mesh, directory, in_memory):
    data = from_tfds(
        "tiny",
        "train",
        mesh,
        global_batch_size=32,
        data_dir=directory,
        strings="host",
        in_memory=in_memory,
    )
    for batch in data:
        assert [int(name.split()[1]) for name in batch["name"]] == np.asarray(
            batch["number"]
        ).tolist()


# Errors in map and in workers


@pytest.mark.parametrize("way", HERE)
def test_an_exception_in_map_surfaces_with_its_row(tiny, way):
    with pytest.raises(ArithmeticError) as error:
        host(tiny(map=fail_at_77, **WAYS[way]))
    assert str(error.value) == "77 is not to be had"
    assert re.fullmatch(
        r"This was raised by map= at row \d+ of the split.", error.value.__notes__[0]
    )
    frames = [entry.name for entry in error.traceback]
    assert "fail_at_77" in frames


@pytest.mark.parametrize("way", HERE)
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_whatever_map_raises_ends_the_loop(tiny, way, kind):
    def leave_at_77(example):
        if example["number"] == 77:
            raise kind(77)
        return {"number": example["number"]}

    outcome = []

    def run():
        try:
            host(tiny(map=leave_at_77, **WAYS[way]))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert [type(error) for error in outcome] == [kind]


@pytest.mark.slow
def test_errors_and_deaths_of_worker_processes_surface(tiny):
    options = {"in_memory": False, "num_workers": 1}
    with pytest.raises(ArithmeticError) as error:
        host(tiny(map=fail_at_77, **options))
    assert str(error.value) == "77 is not to be had"
    assert "in fail_at_77" in str(error.value.__cause__)
    for fatal in (stop_process_at_77, leave_without_a_word_at_77):
        with pytest.raises(ml.errors.DataError) as error:
            host(tiny(map=fatal, **options))
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
    assert len(numbers(tiny(map=locked, in_memory=False))) == 200


SCRIPT = """
import gc, os, subprocess
import meshlayout as ml
from meshlayout.data import from_tfds

def children():
    listed = subprocess.run(["ps", "-ww", "--ppid", str(os.getpid()), "-o", "args="],
                            capture_output=True, text=True).stdout
    return sum("spawn_main" in line for line in listed.splitlines())

factor = 3

def main():
    mesh = ml.create_mesh({"batch": 1})
    data = from_tfds("tiny", "train", mesh, global_batch_size=50,
                     data_dir=DIRECTORY, in_memory=False, num_workers=2,
                     map=lambda e: {"n": factor * e["number"]})
    print(sum(int((b["n"] * b["weight"]).sum()) for b in data), children())
    del data
    gc.collect()
    print(children())

"""


def run_script(directory, script):
    file = Path(directory) / "script.py"
    file.write_text(f"DIRECTORY = {str(directory)!r}\n{script}")
    return subprocess.run(
        [sys.executable, str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )


@pytest.mark.slow
def test_worker_processes_end_with_the_data_set(directory):
    run = run_script(directory, SCRIPT + 'if __name__ == "__main__":\n    main()\n')
    assert run.stdout.split() == [str(3 * sum(range(200))), "2", "0"], run.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_workers": "two"},
            "num_workers must be a non-negative integer, got 'two'.",
        ),
        ({"in_memory": "auto"}, "in_memory must be True, False or None, got 'auto'."),
        ({"map": 3}, "map must be a function of an example, got 3."),
    ],
)
def test_wrong_choices_are_errors(tiny, options, message):
    with pytest.raises(ml.errors.DataError) as error:
        tiny(**options)
    assert str(error.value) == message


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_bool_is_no_seed(tiny, shuffle):
    with pytest.raises(ml.errors.DataError, match="give a seed, shuffle=0"):
        tiny(shuffle=shuffle)


# Caches


def test_auto_keeps_what_fits_into_memory_and_says_so(tiny, monkeypatch):
    data = tiny()
    host(data)
    assert "Decoded 200 examples once into " in notes(data)
    module = sys.modules["meshlayout.data.from_tfds"]
    monkeypatch.setattr(module, "_KEPT_BYTES", 250)
    data = tiny()
    assert sorted(numbers(data)) == list(range(NUM_ROWS))
    assert re.match(
        r"The split is not kept in memory: decoded, it takes [\d.]+ KiB, more than "
        r"250 B\.",
        notes(data),
    )


def test_what_is_kept_is_decoded_once(tiny, monkeypatch):
    decoded = []
    features = tfds.features.FeaturesDict
    original = features.deserialize_example_np

    def counted(self, *args, **kwargs):
        decoded.append(1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(features, "deserialize_example_np", counted)
    data = tiny(in_memory=True, epochs=3)
    assert len(numbers(data)) == 600
    assert NUM_ROWS <= len(decoded) <= NUM_ROWS + 3


_original = tfds.features.FeaturesDict.deserialize_example_np
_calls: list[int] = []


def one_more_than_the_first_example(self, *args, **kwargs):
    _calls.append(1)
    assert len(_calls) <= 2, "the split was decoded again"
    return _original(self, *args, **kwargs)


# As they come


# Several processes


def rows_of_this_process(data_dir, options, state):
    """Returns, batch by batch, the real rows on this process's devices."""
    data = from_tfds(
        "tiny",
        "train",
        ml.create_mesh({"batch": 4}, devices=jax.devices()[:4]),
        global_batch_size=32,
        data_dir=data_dir,
        epochs=2,
        **options,
    )
    batches = iter(data)
    if state is not None:
        batches.set_state(state)
    rows = []
    for batch in batches:
        number, weight, noise = (
            np.concatenate([shard.data for shard in batch[name].addressable_shards])
            for name in ("number", "weight", "noise")
        )
        rows.append(
            [[int(number[i]), *noise[i].tolist()] for i in np.flatnonzero(weight)]
        )
    return rows


OF_SEVERAL = {
    "kept": {"in_memory": True, "map": add_noise},
    "by record": {"in_memory": False, "map": add_noise},
}


def several_runs(data_dir, states):
    return {
        way: rows_of_this_process(data_dir, options, states[way])
        for way, options in OF_SEVERAL.items()
    }


@pytest.mark.multiprocess
def test_several_processes_read_their_rows_and_resume_what_one_process_began(directory):
    whole = several_runs(str(directory), dict.fromkeys(OF_SEVERAL))
    states = dict.fromkeys(OF_SEVERAL)
    for way in ("by record",):
        data = from_tfds(
            "tiny",
            "train",
            ml.create_mesh({"batch": 8}),
            global_batch_size=32,
            data_dir=directory,
            epochs=2,
            **OF_SEVERAL[way],
        )
        iterator = iter(data)
        for _ in range(4):
            next(iterator)
        states[way] = iterator.get_state()
    one, other = run_processes(2, several_runs, str(directory), states, shared=True)
    for way, rows in whole.items():
        joined = [a + b for a, b in zip(one[way], other[way], strict=True)]
        assert joined == rows[0 if states[way] is None else 4 :]


# What cannot be had


def unreadable(directory, split, reason):
    return (
        f"split '{split}' of tiny/1.0.0 cannot be read ({reason}). It has 'train', and "
        f"parts of them, as 'train[:10%]'. If {directory}/tiny/1.0.0 is damaged, remove "
        "it and prepare it again with `tfds build tiny --file_format=array_record`."
    )


WAY_OUT = (
    "name a directory that has it with data_dir=, as `tfds build "
    "--file_format=array_record` makes elsewhere, or run `make data` in a checkout, "
    "which has Fashion-MNIST even without internet."
)


def test_an_unknown_data_set_is_an_error_with_the_nearest_name(mesh, tmp_path):
    with pytest.raises(ml.errors.DataError) as error:
        from_tfds("fashon_mnist", "train", mesh, global_batch_size=8, data_dir=tmp_path)
    assert str(error.value) == (
        f"the dataset 'fashon_mnist' is not prepared in {tmp_path} and cannot be "
        "downloaded and prepared here (TFDS knows no such dataset: Dataset "
        "fashon_mnist not found; the nearest name is fashion_mnist): " + WAY_OUT
    )


@pytest.mark.parametrize(
    ("split", "reason"),
    [
        ("trian", "Unknown split 'trian'. Should be one of ['train']"),
        ("train[5:5]", "it has no examples"),
    ],
)
def test_a_wrong_split_is_an_error_with_those_there_are(mesh, directory, split, reason):
    with pytest.raises(ml.errors.DataError) as error:
        from_tfds("tiny", split, mesh, global_batch_size=8, data_dir=directory)
    assert str(error.value) == unreadable(directory, split, reason)


def test_decoders_leave_features_as_they_are_stored(tiny):
    data = tiny(
        decoders={"image": tfds.decode.SkipDecoding()},
        map=lambda example: {
            "number": example["number"],
            "is_png": np.bool_(example["image"].startswith(b"\x89PNG")),
        },
    )
    assert all(batch["is_png"].all() for batch in host(data))


ODD_VALUES = [None, float("nan"), -1, 0, "x", object()]
PARAMETERS = [
    name
    for name in inspect.signature(from_tfds).parameters
    if name not in ("global_batch_size", "decoders", "options")
]


@pytest.mark.parametrize("value", ODD_VALUES)
@pytest.mark.parametrize("name", [*PARAMETERS, "global_batch_size"])
def test_odd_values_work_or_are_refused_in_a_sentence(mesh, directory, name, value):
    options = {
        "name": "tiny",
        "split": "train[:20]",
        "layout_or_mesh": mesh,
        "global_batch_size": 8,
        "data_dir": directory,
        "map": numbers_and_images,
    }
    try:
        data = from_tfds(**{**options, name: value})
        # Without a number of epochs, there is no end.
        shapes = [batch["number"].shape for batch in itertools.islice(data, 5)]
    except ml.errors.MeshLayoutError as error:
        message = str(error)
    else:
        message = ""
        assert set(shapes) == {(8,)}
    assert re.fullmatch(r"(?s)|[\w'].*[.?]", message)


def test_a_damaged_directory_is_an_error_that_names_it(mesh, directory, tmp_path):
    shutil.copytree(directory / "tiny", tmp_path / "tiny")
    (file, *_) = (tmp_path / "tiny").rglob("*array_record-00001*")
    file.unlink()
    with pytest.raises(ml.errors.DataError) as error:
        from_tfds(
            "tiny",
            "train",
            mesh,
            global_batch_size=8,
            data_dir=tmp_path,
            map=numbers_and_images,
        )
    reason = "tiny-train.array_record-00001-of-00004 is missing"
    assert str(error.value) == unreadable(tmp_path, "train", reason)


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


# The report
