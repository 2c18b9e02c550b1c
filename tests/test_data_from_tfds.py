"""`from_tfds`: from a dataset's name to batches, read, decoded, mapped and kept."""

import gc
import inspect
import itertools
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
from meshlayout.data import from_tfds, records
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


def noise_by_row(batch, rng):
    noise = rng.normal(size=(len(batch["number"]), 3))
    return {"number": batch["number"], "noise": noise}


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


@pytest.mark.parametrize("way", WAYS)
def test_what_map_returns_has_dtypes_of_its_own(tiny, way):
    def halved(example):
        # The same numbers of NumPy's, however examples are read.
        assert example["small"].dtype == np.int16
        return {"number": example["number"] / 2, "small": example["small"] + 0.5}

    batches = host(tiny(map=halved, **WAYS[way]))
    assert sorted(numbers(batches)) == [row / 2 for row in range(NUM_ROWS)]
    assert all(set(batch["small"] % 1) == {0.5} for batch in batches)


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


def test_random_numbers_of_a_batched_map_are_those_of_its_rows(tiny):
    expected = host(tiny(map=add_noise, epochs=2, seed=5))
    for size in (32, 8):
        options = {"map_batched": True, "epochs": 2, "seed": 5}
        batches = host(tiny(map=noise_by_row, global_batch_size=size, **options))
        for epoch in (0, 1):
            by_number = [
                {
                    number: noise.tolist()
                    for batch in data[epoch * len(data) // 2 :][: len(data) // 2]
                    for number, noise in zip(
                        batch["number"].tolist(), batch["noise"], strict=True
                    )
                }
                for data in (expected, batches)
            ]
            assert by_number[0] == by_number[1]


def test_generators_of_rows_draw_as_the_generator_of_each_row():
    rows = np.array([3, 8])
    rng = records.RowGenerators(1, 0, rows)
    alone = [np.random.default_rng([1, 0, row]) for row in rows]
    np.testing.assert_array_equal(rng.random(2), [one.random() for one in alone])
    np.testing.assert_array_equal(
        rng.integers(5, 9, size=(2, 4)), [one.integers(5, 9, 4) for one in alone]
    )
    np.testing.assert_array_equal(
        rng.normal(2.0, size=(2, 3)), [one.normal(2.0, size=3) for one in alone]
    )
    again = [one.permutation(4) for one in rng]
    np.testing.assert_array_equal(again, [one.permutation(4) for one in alone])


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda rng: rng.normal(size=3), "normal"),
        (lambda rng: rng.random(), "random"),
        (lambda rng: rng.permutation(32), "permutation"),
        (lambda rng: rng.choice(64, 32, replace=False), "choice"),
    ],
)
def test_a_batched_map_that_draws_for_all_rows_at_once_is_refused(tiny, draw, name):
    with pytest.raises(ml.errors.DataError) as error:
        tiny(map=lambda batch, rng: {**batch, "noise": draw(rng)}, map_batched=True)
    assert str(error.value) == (
        f"rng.{name} draws for each row of the batch by itself: give size=(32, ...), or "
        f"call the generators of the rows, as in [rng_of_row.{name}(...) for "
        "rng_of_row in rng]."
    )


def test_map_batched_has_to_keep_the_number_of_rows(tiny):
    with pytest.raises(ml.errors.DataError) as error:
        tiny(map=lambda b: {"number": b["number"][:20]}, map_batched=True)
    assert str(error.value) == (
        "map= returned 20 rows for a batch of 32. With map_batched=True it must keep "
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


EVERY_WAY = {**WAYS, "by file": {"cache": "none", "deterministic": False}}


@pytest.mark.parametrize("way", EVERY_WAY)
def test_an_exception_in_map_surfaces_with_its_row(tiny, way):
    with pytest.raises(ArithmeticError) as error:
        host(tiny(map=fail_at_77, **EVERY_WAY[way]))
    assert str(error.value) == "77 is not to be had"
    assert re.fullmatch(
        r"This was raised by map= at row \d+ of the split.", error.value.__notes__[0]
    )
    frames = [entry.name for entry in error.traceback]
    assert "fail_at_77" in frames


@pytest.mark.parametrize("way", EVERY_WAY)
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_whatever_map_raises_ends_the_loop(tiny, way, kind):
    def leave_at_77(example):
        if example["number"] == 77:
            raise kind(77)
        return {"number": example["number"]}

    outcome = []

    def run():
        try:
            host(tiny(map=leave_at_77, **EVERY_WAY[way]))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert [type(error) for error in outcome] == [kind]


@pytest.mark.slow
def test_errors_and_deaths_of_worker_processes_surface(tiny):
    options = {"cache": "none", "num_workers": 1}
    with pytest.raises(ArithmeticError) as error:
        host(tiny(map=fail_at_77, **options))
    assert str(error.value) == "77 is not to be had"
    assert any("in fail_at_77" in note for note in error.value.__notes__)
    memory = "Running out of memory is the usual cause: use fewer workers"
    for fatal, how, why in (
        (stop_process_at_77, "was killed by SIGKILL", memory),
        (
            leave_without_a_word_at_77,
            "ended with exit code 0",
            "What it printed says why",
        ),
    ):
        with pytest.raises(ml.errors.DataError) as error:
            host(tiny(map=fatal, **options))
        assert str(error.value) == (
            f"a worker process {how} while it read examples. {why}, or use "
            "num_workers=0, which shows errors where they happen."
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


SCRIPT = """
import gc, os, subprocess
import meshlayout as ml
from meshlayout.data import from_tfds, records

def children():
    listed = subprocess.run(["ps", "-ww", "--ppid", str(os.getpid()), "-o", "args="],
                            capture_output=True, text=True).stdout
    return sum("spawn_main" in line for line in listed.splitlines())

factor = 3

def main():
    mesh = ml.create_mesh({"batch": 1})
    data = from_tfds("tiny", "train", mesh, global_batch_size=50,
                     data_dir=DIRECTORY, cache="none", num_workers=2,
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


@pytest.mark.slow
def test_a_script_that_would_run_again_in_every_worker_is_refused(directory):
    run = run_script(directory, SCRIPT + "main()\n")
    assert run.stdout == ""
    assert run.stderr.rstrip().splitlines()[-1] == (
        "meshlayout.errors.DataError: every worker process imports script.py again, "
        "and would run all of it. Put what it runs under `if __name__ == "
        "'__main__':`, or use worker_kind='threads'."
    )


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
    messages = [record.getMessage() for record in caplog.records]
    assert [text for text in messages if "int64 becomes" not in text] == said


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
            "num_workers must be a non-negative integer, got 'two'. Or 'auto', which "
            "measures.",
        ),
        (
            {"num_workers": -1},
            "num_workers must be a non-negative integer, got -1. Or 'auto', which "
            "measures.",
        ),
        (
            {"worker_kind": "fibers"},
            "worker_kind must be 'auto', 'threads' or 'processes', got 'fibers'.",
        ),
        (
            {"cache": "memry"},
            "cache must be 'auto', 'memory' or 'none', got 'memry'. Did you mean "
            "'memory'?",
        ),
        ({"shuffle": 3}, "shuffle must be True or False, got 3."),
        (
            {"map": None, "map_batched": True},
            "map_batched=True says how map= is called, and there is no map=.",
        ),
        ({"map": 3}, "map must be a function of an example, got 3."),
        (
            {"map": lambda a, b, c: a},
            "map must be a function of an example, or of an example and a NumPy random "
            "generator, got one that needs 3 arguments.",
        ),
        (
            {"deterministic": False, "cache": "memory"},
            "cache='memory' gathers batches from arrays, where no order is faster than "
            "another. Leave out deterministic=False, for a shuffle of all rows.",
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
    module = sys.modules["meshlayout.data.decode_cache"]
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


_original = tfds.features.FeaturesDict.deserialize_example_np
_calls: list[int] = []


def one_more_than_the_first_example(self, *args, **kwargs):
    _calls.append(1)
    assert len(_calls) <= 2, "the split was decoded again"
    return _original(self, *args, **kwargs)


def test_the_order_by_file_does_not_depend_on_what_is_kept_in_memory(tiny):
    kept = tiny(deterministic=False, seed=2)
    same(host(kept), host(tiny(deterministic=False, seed=2, cache="none")))
    assert "Decoded 200 examples once" in notes(kept)


@pytest.mark.parametrize("other", [{"deterministic": True}, {"seed": 3}])
def test_a_place_in_the_order_by_file_is_of_no_other_order(tiny, other):
    iterator = iter(tiny(deterministic=False, seed=2))
    next(iterator)
    again = iter(tiny(**{"deterministic": False, "seed": 2, **other}))
    with pytest.raises(ml.errors.DataError, match="the state is of"):
        again.set_state(iterator.get_state())


# As they come


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_by_file_are_all_there_once_per_epoch_in_orders_of_their_own(
    tiny, num_workers
):
    options = {
        "cache": "none",
        "deterministic": False,
        "num_workers": num_workers,
        "worker_kind": "threads",
    }
    data = tiny(epochs=2, **options)
    batches = host(data)
    first, second = numbers(batches[:7]), numbers(batches[7:])
    assert sorted(first) == sorted(second) == list(range(NUM_ROWS))
    assert len({tuple(first), tuple(second), tuple(range(NUM_ROWS))}) == 3
    images = made_up_examples()
    for batch in batches:
        np.testing.assert_array_equal(batch["image"][..., 0], images[batch["number"]])
    assert (
        f"deterministic=False: rows come in the order of {NUM_SHARDS} files, read side "
        "by side and shuffled within a window."
    ) in data.report().notes
    same(host(tiny(epochs=2, **options)), batches)


def test_an_order_by_file_keeps_neighbors_near_and_mixes_the_files():
    files = [range(start, start + 5000) for start in range(0, 40_000, 5000)]
    order = records.FileOrder(files, seed=1)
    places = np.arange(40_000)
    rows = order.at(places, 0)
    assert sorted(rows) == list(range(40_000))
    assert (rows != order.at(places, 1)).any()
    np.testing.assert_array_equal(order.at(places[::-7], 0), rows[::-7])
    for start in range(0, 40_000, 1000):
        window = rows[start : start + 1000]
        # A thousand rows come from a few dozen runs of 64, of most of the files.
        assert len(np.unique(window // 64)) < 80
        assert len(np.unique(window // 5000)) >= 5
        # Neighbors are not read one right after another.
        assert (np.diff(window) == 1).sum() < 20


def test_files_are_read_in_turn_where_nothing_is_shuffled(tiny, directory):
    data = tiny(cache="none", deterministic=False, shuffle=False, num_workers=0)
    source = tfds.data_source("tiny", split="train", data_dir=directory)
    stored = [int(source[row]["number"]) for row in range(NUM_ROWS)]
    per_file = NUM_ROWS // NUM_SHARDS
    # Pieces of a file are 64 rows at most, here the whole file of 50.
    assert per_file == 50
    assert numbers(data) == stored


def test_iterations_by_file_in_different_epochs_do_not_disturb_each_other(tiny):
    options = {"cache": "none", "deterministic": False, "global_batch_size": 8}
    expected = host(tiny(epochs=2, **options))
    data = tiny(**options)
    both = list(zip(data, data, strict=True))
    same([host([one])[0] for one, _ in both], expected[:25])
    same([host([other])[0] for _, other in both], expected[25:])


def test_rows_by_file_resume_in_the_middle_of_an_epoch(tiny):
    options = {"cache": "none", "deterministic": False, "map": add_noise, "epochs": 2}
    expected = host(tiny(**options))
    iterator = iter(tiny(**options))
    for _ in range(9):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    again = iter(tiny(num_workers=2, worker_kind="threads", **options))
    again.set_state(state)
    same(host(again), expected[9:])


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
    "kept": {"cache": "memory", "map": add_noise},
    "by record": {"cache": "none", "map": add_noise},
    "in batches": {"map": noise_by_row, "map_batched": True},
    "by file": {"cache": "none", "deterministic": False, "map": add_noise},
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
    for way in ("by record", "by file"):
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


WORKERS = {
    "in memory": {"cache": "memory"},
    "threads": {"cache": "none", "num_workers": 2, "worker_kind": "threads"},
    "processes": {"cache": "none", "num_workers": 2, "worker_kind": "processes"},
    "by file": {"cache": "none", "num_workers": 2, "deterministic": False},
}


def keep_number(example):
    return {"number": example["number"]}


def failing_runs(data_dir):
    """Steps and what is said if the map fails on process 0 alone."""
    function = keep_number if jax.process_index() else fail_at_77
    found = {}
    for way, options in WORKERS.items():
        data = from_tfds(
            "tiny",
            "train",
            ml.create_mesh({"batch": 4}),
            global_batch_size=32,
            data_dir=data_dir,
            shuffle=False,
            map=function,
            **options,
        )
        steps = 0
        try:
            for _ in data:
                steps += 1
        except Exception as error:
            found[way] = [steps, f"{type(error).__name__}: {error}"]
    return found


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_map_that_fails_on_one_process_ends_the_loops_of_all(directory):
    failing, other = run_processes(2, failing_runs, str(directory))
    assert set(failing) == set(WORKERS)
    for way, (steps, said) in failing.items():
        assert "77 is not to be had" in said
        assert other[way] == [
            steps,
            f"DataError: the source of process 0 failed: {said.removeprefix('DataError: ')}",
        ]


# What cannot be had


def test_an_unknown_data_set_is_an_error_with_the_nearest_name(mesh, tmp_path):
    with pytest.raises(ml.errors.DataError) as error:
        from_tfds("fashon_mnist", "train", mesh, global_batch_size=8, data_dir=tmp_path)
    assert str(error.value) == (
        f"TFDS has no dataset 'fashon_mnist' and none is prepared in {tmp_path}. Did "
        "you mean 'fashion_mnist'?"
    )


def test_an_unknown_split_is_an_error_with_those_there_are(mesh, directory):
    with pytest.raises(ml.errors.DataError) as error:
        from_tfds("tiny", "trian", mesh, global_batch_size=8, data_dir=directory)
    assert str(error.value) == (
        "tiny/1.0.0 has no split 'trian'. Did you mean 'train'? It has 'train', and "
        "parts of them, as 'train[:10%]'."
    )


@pytest.mark.parametrize("split", ["train[:0%]", "train[5:5]"])
def test_an_empty_part_of_a_split_is_an_error_that_says_what_there_is(
    mesh, directory, split
):
    with pytest.raises(ml.errors.DataError) as error:
        from_tfds("tiny", split, mesh, global_batch_size=8, data_dir=directory)
    assert str(error.value) == (
        f"split '{split}' of tiny/1.0.0 has no examples. Name a larger part; the "
        "dataset has 'train' with 200."
    )


@pytest.mark.parametrize(
    ("decoders", "message"),
    [
        (
            {"imgae": tfds.decode.SkipDecoding()},
            "decoders names 'imgae', which is not a feature. Did you mean 'image'? The "
            "features there are 'image', 'name', 'number', 'small'.",
        ),
        (
            {"image": 3},
            "decoders['image'] must be one of TFDS's decoders, or a dict of them as "
            "{'image': tfds.decode.SkipDecoding()}, got 3.",
        ),
        (
            "image",
            "decoders must be one of TFDS's decoders, or a dict of them as {'image': "
            "tfds.decode.SkipDecoding()}, got 'image'.",
        ),
    ],
)
def test_decoders_of_nothing_are_errors(tiny, decoders, message):
    with pytest.raises(ml.errors.DataError) as error:
        tiny(decoders=decoders)
    assert str(error.value) == message


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
    if name != "global_batch_size"
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
    assert str(error.value) == (
        f"the prepared dataset in {tmp_path}/tiny/1.0.0 cannot be read "
        "(tiny-train.array_record-00001-of-00004 is missing). Remove that directory "
        "and prepare it again with `tfds build tiny --file_format=array_record`."
    )


@pytest.mark.skipif(
    "tensorflow" in sys.modules, reason="TensorFlow would prepare the dataset"
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
        "the dataset once with `tfds build mnist --file_format=array_record`; reading "
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
