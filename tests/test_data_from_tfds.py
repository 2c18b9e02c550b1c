"""`from_tfds`: from a data set's name to batches, read, decoded, mapped and kept."""

import gc
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds

import meshlayout as ml
from meshlayout.data import from_tfds
from tests.processes import run_processes
from tests.tfds_directory import NUM_ROWS, NUM_SHARDS, made_up_examples, tiny_directory


@pytest.fixture(scope="module")
def mesh():
    return ml.create_mesh({"batch": 4, "model": 2})


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_directory(tmp_path_factory.mktemp("tfds"))


@pytest.fixture
def tiny(mesh, directory):
    """Makes a data set of the small directory, without its strings."""

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
    "memory": {"cache": "memory"},
    "auto": {},
    "by record": {"cache": "none", "num_workers": 0},
    "in threads": {"cache": "none", "num_workers": 3, "worker_kind": "threads"},
    "measured": {"cache": "none"},
    "memory, mapped in threads": {
        "cache": "memory",
        "num_workers": 2,
        "worker_kind": "threads",
    },
}


# The same examples, however they are read


@pytest.mark.parametrize("way", WAYS)
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


@pytest.mark.parametrize("way", WAYS)
def test_the_order_is_a_function_of_seed_and_epoch_alone(tiny, way):
    expected = host(tiny(cache="memory", num_workers=0, epochs=2, seed=3))
    same(host(tiny(epochs=2, seed=3, **WAYS[way])), expected)
    assert numbers(expected[:7]) != numbers(expected[7:])
    assert numbers(host(tiny(seed=4, **WAYS[way]))) != numbers(expected[:7])


@pytest.mark.slow
def test_worker_processes_give_the_same_batches(tiny, caplog):
    expected = host(tiny(cache="memory", num_workers=0, map=add_noise))
    data = tiny(cache="none", num_workers=2, map=add_noise)
    same(host(data), expected)
    assert "Reading is done by 2 processes, as num_workers=2 says." in notes(data)
    mapped = tiny(cache="memory", num_workers=1, worker_kind="processes", map=add_noise)
    same(host(mapped), expected)


def test_without_shuffle_rows_come_in_the_order_of_the_files(tiny, directory):
    source = tfds.data_source("tiny", split="train", data_dir=directory)
    stored = [int(source[row]["number"]) for row in range(NUM_ROWS)]
    assert numbers(tiny(shuffle=False)) == stored
    assert numbers(tiny(shuffle=False, cache="none")) == stored


def test_a_part_of_a_split_has_only_its_rows(mesh, directory):
    data = from_tfds(
        "tiny",
        "train[10:50]",
        mesh,
        global_batch_size=32,
        data_dir=directory,
        map=numbers_and_images,
        shuffle=False,
    )
    source = tfds.data_source("tiny", split="train[10:50]", data_dir=directory)
    assert numbers(data) == [int(source[row]["number"]) for row in range(40)]


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_an_iteration_resumes_in_the_middle_of_an_epoch_also_in_another_cache(
    tiny, cache
):
    expected = host(tiny(cache="memory", epochs=2, map=add_noise))
    iterator = iter(tiny(cache="memory", epochs=2, map=add_noise))
    for _ in range(9):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    again = iter(tiny(cache=cache, epochs=2, map=add_noise))
    again.set_state(state)
    same(host(again), expected[9:])


# What map is given


def test_random_numbers_of_map_are_functions_of_seed_epoch_and_row(tiny):
    batches = host(tiny(map=add_noise, epochs=2, seed=5))
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
        stored = numbers(host(tiny(shuffle=False)))
        row = stored.index(42)
        expected = np.random.default_rng([5, epoch, row]).normal(size=3)
        np.testing.assert_array_equal(found[42], expected.astype(np.float32))


def test_map_batched_is_called_with_whole_batches(tiny):
    sizes = []

    def brighten(batch):
        sizes.append(len(batch["number"]))
        return {"number": batch["number"], "mean": batch["image"].mean((1, 2, 3))}

    batches = host(tiny(map=brighten, map_batched=True))
    assert sizes[-7:] == [32] * 7
    means = made_up_examples().mean((1, 2))
    for batch in batches:
        np.testing.assert_allclose(batch["mean"], means[batch["number"]], rtol=1e-6)


def test_map_batched_has_to_keep_the_number_of_rows(tiny):
    data = tiny(map=lambda b: {"number": b["number"][:20]}, map_batched=True)
    with pytest.raises(ml.errors.DataError) as error:
        host(data)
    assert str(error.value) == (
        "map= returned 20 rows for a batch of 32. With map_batched=True it has to keep "
        "their number."
    )


def test_supervised_examples_are_pairs(mesh, directory):
    data = from_tfds(
        "tiny",
        "train",
        mesh,
        global_batch_size=32,
        data_dir=directory,
        supervised=True,
        cache="none",
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
    for cache in ("memory", "none"):
        with pytest.raises(ml.errors.DataError) as error:
            from_tfds(
                "tiny",
                "train",
                mesh,
                global_batch_size=32,
                data_dir=directory,
                cache=cache,
            )
        assert str(error.value) == (
            "leaf 'name' holds strings, which devices do not take. Leave it out, or "
            "keep it on the host with strings='host'."
        )


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_strings_stay_on_the_host_where_asked(mesh, directory, cache):
    data = from_tfds(
        "tiny",
        "train",
        mesh,
        global_batch_size=32,
        data_dir=directory,
        strings="host",
        cache=cache,
    )
    for batch in data:
        assert [int(name.split()[1]) for name in batch["name"]] == np.asarray(
            batch["number"]
        ).tolist()


# Errors in map and in workers


@pytest.mark.parametrize("way", [*WAYS, "as they come"])
def test_an_exception_in_map_surfaces_with_its_row(tiny, way):
    way = WAYS.get(way, {"cache": "none", "deterministic": False})
    with pytest.raises(ArithmeticError) as error:
        host(tiny(map=fail_at_77, **way))
    assert str(error.value) == "77 is not to be had"
    assert re.fullmatch(
        r"This was raised by map= at row \d+ of the split.", error.value.__notes__[0]
    )
    frames = [entry.name for entry in error.traceback]
    assert "fail_at_77" in frames


@pytest.mark.slow
def test_errors_and_deaths_of_worker_processes_surface(tiny):
    options = {"cache": "none", "num_workers": 1}
    with pytest.raises(ArithmeticError) as error:
        host(tiny(map=fail_at_77, **options))
    assert str(error.value) == "77 is not to be had"
    assert "in fail_at_77" in error.value.__notes__[-1]
    with pytest.raises(ml.errors.DataError) as error:
        host(tiny(map=stop_process_at_77, **options))
    assert re.fullmatch(
        r"a worker process was killed by SIGKILL while it read examples. Memory that "
        r"ran out is the usual cause: use fewer workers, or num_workers=0, which shows "
        r"errors where they happen.",
        str(error.value),
    )


def test_a_map_that_cannot_be_sent_to_processes_is_an_error_that_says_so(tiny):
    lock = threading.Lock()

    def locked(example):
        with lock:
            return {"number": example["number"]}

    with pytest.raises(ml.errors.DataError) as error:
        tiny(map=locked, cache="none", num_workers=2)
    assert str(error.value) == (
        "map= and what it uses cannot be sent to worker processes (TypeError: cannot "
        "pickle '_thread.lock' object). Create such objects inside of map, or use "
        "worker_kind='threads'."
    )
    assert len(numbers(tiny(map=locked, cache="none", worker_kind="threads"))) == 200


@pytest.mark.slow
def test_worker_processes_end_with_the_data_set_and_need_no_main_guard(directory):
    program = f"""
import gc, multiprocessing, os, subprocess, time
import meshlayout as ml
from meshlayout.data import from_tfds
from tests.processes import run_processes

def children():
    listed = subprocess.run(["ps", "-ww", "--ppid", str(os.getpid()), "-o", "args="],
                            capture_output=True, text=True).stdout
    return sum("spawn_main" in line for line in listed.splitlines())

factor = 3
mesh = ml.create_mesh({{"batch": 1}})
data = from_tfds("tiny", "train", mesh, global_batch_size=50,
                 data_dir={str(directory)!r}, cache="none", num_workers=2,
                 map=lambda e: {{"n": factor * e["number"]}})
print(sum(int((b["n"] * b["weight"]).sum()) for b in data), children())
del data
gc.collect()
print(children())
"""
    script = Path(directory) / "script.py"
    script.write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    assert run.stdout.split() == [str(3 * sum(range(200))), "2", "0"], run.stderr


def test_leaving_early_leaves_no_thread_behind(tiny):
    before = {thread.ident for thread in threading.enumerate()}
    for options in (
        {"cache": "none", "num_workers": 2, "worker_kind": "threads"},
        {"cache": "none", "deterministic": False},
    ):
        data = tiny(**options)
        for _ in data:
            break
        del data
    gc.collect()  # TFDS keeps frames of its callers in cycles
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        left = {thread.ident for thread in threading.enumerate()} - before
        if not left:
            return
        time.sleep(0.05)
    names = [t.name for t in threading.enumerate() if t.ident in left]
    pytest.fail(f"still running: {names}")


# num_workers="auto"


def test_the_number_of_workers_is_measured_said_and_logged(tiny, caplog):
    with caplog.at_level(logging.INFO, logger="meshlayout"):
        data = tiny(cache="none", epochs=2)
        host(data)
    said = [note for note in data.report().notes if note.startswith("Reading is done")]
    assert len(said) == 1
    assert re.fullmatch(
        r"Reading is done by (0 workers|\d+ threads): num_workers='auto' measured "
        r"0 workers [\d,]+ rows/s(, \d+ threads? [\d,]+ rows/s; processes were not "
        r"tried, since an epoch takes [\d.]+ s|; there is one core)\.",
        said[0],
    )
    assert [record.getMessage() for record in caplog.records] == said


def test_threads_are_chosen_where_they_help(tiny):
    def slow(example):
        time.sleep(0.01)
        return {"number": example["number"]}

    data = tiny(map=slow, cache="none", worker_kind="threads", epochs=2)
    assert sorted(numbers(data)) == sorted([*range(200)] * 2)
    assert re.search(
        r"Reading is done by \d+ threads?: num_workers='auto'", notes(data)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_workers": "two"},
            "num_workers= is a whole number or 'auto', and got 'two'.",
        ),
        ({"num_workers": -1}, "num_workers= is a whole number, 0 or more, and got -1."),
        (
            {"worker_kind": "fibers"},
            "worker_kind= is 'auto', 'threads' or 'processes', and got 'fibers'.",
        ),
        (
            {"cache": "memry"},
            "cache= is one of 'auto', 'memory', 'disk', 'none', and got 'memry'. Did "
            "you mean 'memory'?",
        ),
        (
            {"cache": "disk"},
            "cache='disk' needs cache_dir=, the directory that keeps decoded splits.",
        ),
        (
            {"cache": "none", "cache_dir": "x"},
            "cache_dir= is for cache='disk', and cache='none'.",
        ),
        ({"shuffle": 3}, "shuffle= is True or False, and got 3."),
        (
            {"map": None, "map_batched": True},
            "map_batched=True says how map= is called, and there is no map=.",
        ),
        ({"map": 3}, "map= is a function of an example, and got 3."),
        (
            {"map": lambda a, b, c: a},
            "map= is a function of an example, or of an example and a NumPy random "
            "generator, and got one that needs 3 arguments.",
        ),
        (
            {"deterministic": False, "cache": "memory"},
            "cache='memory' gathers every batch from arrays, in one order: nothing is "
            "faster without it. Leave out deterministic=False.",
        ),
        (
            {"deterministic": False, "map_batched": True, "cache": "none"},
            "map_batched=True needs batches, which with deterministic=False are made "
            "after map=. Leave out one of them.",
        ),
    ],
)
def test_wrong_choices_are_errors(tiny, options, message):
    with pytest.raises(ml.errors.DataError) as error:
        tiny(**options)
    assert str(error.value) == message


# Caches


def test_auto_keeps_what_fits_into_memory_and_says_so(tiny, monkeypatch):
    data = tiny()
    host(data)
    assert "Decoded 200 examples once into " in notes(data)
    module = sys.modules["meshlayout.data.from_tfds"]
    monkeypatch.setattr(module, "free_memory", lambda: 1000)
    data = tiny()
    assert sorted(numbers(data)) == list(range(NUM_ROWS))
    assert re.match(
        r"cache='auto' keeps nothing: decoded, the split takes [\d.]+ KiB, more than "
        r"250 B, 25% of the free memory\.",
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
    data = tiny(cache="memory", epochs=3)
    assert len(numbers(data)) == 600
    assert NUM_ROWS <= len(decoded) <= NUM_ROWS + 3


def test_a_cache_on_disk_is_made_once_and_read_by_the_next_run(
    mesh, directory, tmp_path, monkeypatch
):
    def make():
        return from_tfds(
            "tiny",
            "train",
            mesh,
            global_batch_size=32,
            data_dir=directory,
            supervised=True,
            cache="disk",
            cache_dir=tmp_path,
        )

    first = make()
    expected = host(first)
    assert "Decoded 200 examples once into files in " in notes(first)
    monkeypatch.setattr(
        tfds.features.FeaturesDict,
        "deserialize_example_np",
        one_more_than_the_first_example,
    )
    _calls.clear()
    second = make()
    same(host(second), expected)
    assert "Read the decoded examples that are kept in " in notes(second)
    files = sorted(file.name for file in tmp_path.rglob("*.*") if file.is_file())
    assert files == ["0.npy", "1.npy", "index.json"]


_original = tfds.features.FeaturesDict.deserialize_example_np
_calls: list[int] = []


def one_more_than_the_first_example(self, *args, **kwargs):
    _calls.append(1)
    assert len(_calls) <= 2, "the split was decoded again"
    return _original(self, *args, **kwargs)


def test_parts_of_a_split_are_kept_apart_on_disk(mesh, directory, tmp_path):
    for number, split in enumerate(("train[:40]", "train[:30]", "train[30:60]"), 1):
        options = {
            "global_batch_size": 8,
            "data_dir": directory,
            "supervised": True,
            "shuffle": False,
        }
        kept = from_tfds(
            "tiny", split, mesh, cache="disk", cache_dir=tmp_path, **options
        )
        same(host(kept), host(from_tfds("tiny", split, mesh, cache="none", **options)))
        assert len(list(tmp_path.rglob("index.json"))) == number


def test_what_fits_into_memory_is_gathered_in_order_also_where_order_is_free(tiny):
    data = tiny(deterministic=False, seed=2)
    same(host(data), host(tiny(seed=2)))
    assert "deterministic=False is not needed: the split fits into memory" in notes(
        data
    )


def test_a_damaged_cache_on_disk_is_an_error_that_names_it(mesh, directory, tmp_path):
    def make():
        return from_tfds(
            "tiny",
            "train",
            mesh,
            global_batch_size=32,
            data_dir=directory,
            supervised=True,
            cache="disk",
            cache_dir=tmp_path,
        )

    make()
    (file,) = tmp_path.rglob("0.npy")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ml.errors.DataError) as error:
        make()
    message = str(error.value)
    assert message.startswith(
        f"the decoded examples kept in {file.parent} cannot be read ("
    )
    assert message.endswith("). Remove that directory: it is made again.")


def test_a_cache_that_cannot_be_finished_leaves_nothing_behind(
    mesh, directory, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        tfds.features.FeaturesDict,
        "deserialize_example_np",
        one_more_than_the_first_example,
    )
    _calls.clear()
    with pytest.raises(AssertionError, match="the split was decoded again"):
        from_tfds(
            "tiny",
            "train",
            mesh,
            global_batch_size=32,
            data_dir=directory,
            cache="disk",
            cache_dir=tmp_path,
            num_workers=0,
            strings="host",
        )
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_strings_are_kept_on_disk_for_a_map_to_use_or_to_drop(
    mesh, directory, tmp_path
):
    def from_name(example):
        return {"number": example["number"], "of": int(example["name"].split()[1])}

    for _ in range(2):  # decoded, and read from the files
        for map_of, strings in ((from_name, "error"), (None, "host")):
            data = from_tfds(
                "tiny",
                "train",
                mesh,
                global_batch_size=32,
                data_dir=directory,
                map=map_of,
                num_workers=0,
                cache="disk",
                cache_dir=tmp_path,
                strings=strings,
            )
            for batch in data:
                of = (
                    batch["of"]
                    if map_of
                    else [name.split()[1] for name in batch["name"]]
                )
                np.testing.assert_array_equal(
                    np.asarray(of, int), np.asarray(batch["number"])
                )
    files = sorted(file.name for file in tmp_path.rglob("*.*") if file.is_file())
    assert files == ["0.npy", "1.json", "2.npy", "3.npy", "index.json"]


# As they come


def test_examples_as_they_come_are_all_there_once_per_epoch(tiny):
    data = tiny(cache="none", deterministic=False, epochs=2)
    batches = host(data)
    assert sorted(numbers(batches)) == sorted([*range(NUM_ROWS)] * 2)
    images = made_up_examples()
    for batch in batches:
        np.testing.assert_array_equal(batch["image"][..., 0], images[batch["number"]])
    assert f"Examples of {NUM_SHARDS} files come as they are ready" in notes(data)


def test_files_are_read_in_turn_where_nothing_is_shuffled(tiny, directory):
    data = tiny(cache="none", deterministic=False, shuffle=False, num_workers=0)
    source = tfds.data_source("tiny", split="train", data_dir=directory)
    stored = [int(source[row]["number"]) for row in range(NUM_ROWS)]
    per_file = NUM_ROWS // NUM_SHARDS
    # Pieces of a file are 64 rows at most, here the whole file of 50.
    assert per_file == 50
    assert numbers(data) == stored


def test_a_slow_file_does_not_hold_up_the_others(tiny, directory):
    source = tfds.data_source("tiny", split="train", data_dir=directory)
    first_file = {int(source[row]["number"]) for row in range(50)}
    gate = threading.Event()

    def slow_first_file(example):
        if int(example["number"]) in first_file:
            gate.wait(30)
        return {"number": example["number"]}

    data = tiny(
        map=slow_first_file,
        cache="none",
        deterministic=False,
        shuffle=False,
        num_workers=2,
        worker_kind="threads",
        global_batch_size=16,
        prefetch=0,
    )
    batches = iter(data)
    found = numbers(next(batches) for _ in range(8))
    assert not first_file & set(found)
    gate.set()
    assert sorted(found + numbers(batches)) == list(range(NUM_ROWS))


def test_examples_as_they_come_have_no_place_to_resume_from(tiny):
    iterator = iter(tiny(cache="none", deterministic=False))
    next(iterator)
    state = iterator.get_state()
    for options in ({}, {"skip": True}):
        again = iter(tiny(cache="none", deterministic=False))
        with pytest.raises(ml.errors.DataError) as error:
            again.set_state(state, **options)
        assert str(error.value) == (
            "this source gives its examples in another order in every run, so that "
            "those before row 32 of epoch 1 cannot be told from those after it. Resume "
            "from a state of an epoch's end."
        )


def test_examples_as_they_come_resume_at_an_epochs_end(tiny):
    iterator = iter(tiny(cache="none", deterministic=False, epochs=2))
    first = numbers(next(iterator) for _ in range(7))
    state = json.loads(json.dumps(iterator.get_state()))
    again = iter(tiny(cache="none", deterministic=False, epochs=2))
    again.set_state(state)
    assert sorted(first) == sorted(numbers(again)) == list(range(NUM_ROWS))


# Several processes


def rows_of_this_process(data_dir, options, state):
    """Returns, batch by batch, the numbers of the rows on this process's devices."""
    data = from_tfds(
        "tiny",
        "train",
        ml.create_mesh({"batch": 4}),
        global_batch_size=32,
        data_dir=data_dir,
        map=numbers_and_images,
        epochs=2,
        **options,
    )
    batches = iter(data)
    if state is not None:
        batches.set_state(state)
    found = []
    for batch in batches:
        shards = zip(
            batch["number"].addressable_shards,
            batch["weight"].addressable_shards,
            strict=True,
        )
        found.append(
            [
                int(number)
                for numbers, weights in shards
                for number, weight in zip(numbers.data, weights.data, strict=True)
                if weight
            ]
        )
    return found


def several_runs(data_dir, state):
    kept = rows_of_this_process(data_dir, {"cache": "memory"}, None)
    by_record = rows_of_this_process(data_dir, {"cache": "none"}, state)
    as_they_come = rows_of_this_process(
        data_dir, {"cache": "none", "deterministic": False}, None
    )
    return kept, by_record, as_they_come


@pytest.mark.multiprocess
def test_several_processes_read_their_rows_and_resume_what_one_process_began(
    tiny, directory
):
    whole = [numbers([batch]) for batch in tiny(epochs=2)]
    iterator = iter(tiny(epochs=2))
    for _ in range(4):
        next(iterator)
    results = run_processes(2, several_runs, str(directory), iterator.get_state())
    kept, by_record, as_they_come = zip(*results, strict=True)
    assert [one + other for one, other in zip(*kept, strict=True)] == whole
    assert [one + other for one, other in zip(*by_record, strict=True)] == whole[4:]
    assert [len(batches) for batches in kept] == [14, 14]
    # Each process has examples of its own, and both take as many steps.
    assert len(as_they_come[0]) == len(as_they_come[1])
    everything = [n for batches in as_they_come for batch in batches for n in batch]
    assert sorted(everything) == sorted([*range(NUM_ROWS)] * 2)


# What cannot be had


def test_an_unknown_data_set_is_an_error_with_the_nearest_name(mesh, tmp_path):
    with pytest.raises(ml.errors.DataError) as error:
        from_tfds("fashon_mnist", "train", mesh, global_batch_size=8, data_dir=tmp_path)
    assert str(error.value) == (
        f"TFDS has no data set 'fashon_mnist' and none is prepared in {tmp_path}. Did "
        "you mean 'fashion_mnist'?"
    )


def test_an_unknown_split_is_an_error_with_those_there_are(mesh, directory):
    with pytest.raises(ml.errors.DataError) as error:
        from_tfds("tiny", "trian", mesh, global_batch_size=8, data_dir=directory)
    assert str(error.value) == (
        "tiny/1.0.0 has no split 'trian'. Did you mean 'train'? It has 'train', and "
        "parts of them, as 'train[:10%]'."
    )


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
    assert str(error.value) == (
        f"the prepared data set in {tmp_path}/tiny/1.0.0 cannot be read "
        "(tiny-train.array_record-00001-of-00004 is missing). Remove that directory "
        "and prepare it again with `tfds build tiny --file_format=array_record`."
    )


@pytest.mark.skipif(
    "tensorflow" in sys.modules, reason="TensorFlow would prepare the data set"
)
def test_a_data_set_whose_preparation_fails_says_how_to_prepare_it(
    mesh, tmp_path, monkeypatch
):
    def no_tensorflow(self, **options):
        raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")

    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", no_tensorflow)
    with pytest.raises(ml.errors.DataError) as error:
        from_tfds("mnist", "train", mesh, global_batch_size=8, data_dir=tmp_path)
    assert str(error.value) == (
        f"mnist/3.0.1 is not prepared in {tmp_path}/mnist/3.0.1, and TFDS's code that "
        "prepares it needs tensorflow, which is not installed. Where it is, prepare "
        "the data set once with `tfds build mnist --file_format=array_record`; to read "
        "it afterwards needs no TensorFlow."
    )


# The report


def test_the_report_has_a_line_for_every_stage_and_names_the_slowest(tiny):
    data = tiny(map=add_noise, cache="none", num_workers=0)
    host(data)
    report = data.report()
    stages = {stage.name: stage for stage in report.stages}
    assert list(stages) == ["read", "decode", "map", "stack", "place"]
    for name in ("read", "decode", "map"):
        assert stages[name].rows >= 200
        assert stages[name].seconds > 0
    assert report.bottleneck in stages
    slow = tiny(map=slowly, cache="none", num_workers=0)
    host(slow)
    assert slow.report().bottleneck == "map"
    kept = tiny(map=slowly, cache="memory", num_workers=0)
    host(kept)
    assert [stage.name for stage in kept.report().stages] == ["read", "map", "place"]
    assert kept.report().bottleneck == "map"


def slowly(example):
    time.sleep(0.001)
    return {"number": example["number"]}
