"""Input pipelines on several real processes."""

import functools
import itertools
import json
import random
import time
from typing import Any

import grain
import jax
import numpy as np
import pytest

import meshlayout as ml
from meshlayout import data as md
from tests import test_data_golden
from tests.error_messages import outcome_of
from tests.processes import run_processes
from tests.seekable import Seekable


pytestmark = pytest.mark.multiprocess

ROWS = 22


def mesh_of(axes: dict[str, int], order: list[int] | None = None) -> ml.Mesh:
    devices = sorted(jax.devices(), key=lambda device: device.id)
    if order is not None:
        devices = [devices[i] for i in order]
    return ml.create_mesh(axes, devices=devices)


# Meshes over 4 devices, and how batches lie on them.
LAYOUTS: dict[str, tuple[dict[str, int], list[int] | None, list[Any]]] = {
    "batch": ({"batch": 4}, None, ["batch", None]),
    "model in a process": ({"batch": 2, "model": 2}, None, ["batch", "model"]),
    "model across processes": ({"model": 2, "batch": 2}, None, ["batch", "model"]),
    "rows in turn": ({"batch": 4}, [0, 2, 1, 3], ["batch", None]),
    "backwards": ({"batch": 4}, [3, 2, 1, 0], ["batch", None]),
    "two axes": ({"a": 2, "b": 2}, None, [("b", "a"), None]),
    "replicated": ({"batch": 4}, None, [None, "batch"]),
    "only the second dim": ({"batch": 2, "seq": 2}, None, [None, ("seq", "batch")]),
}


def source() -> dict[str, Any]:
    return {
        "x": np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4),
        "y": np.arange(ROWS, dtype=np.int32),
    }


def local_parts(x: Any) -> list[Any]:
    """What this process's devices hold: start of each dim, and values."""
    return [
        [[s.start or 0 for s in shard.index], np.asarray(shard.data).tolist()]
        for shard in x.addressable_shards
    ]


def examples():
    data = source()
    for row in range(ROWS):
        yield {key: leaf[row] for key, leaf in data.items()}


def job() -> dict[str, Any]:
    """What every process of the job does; the tests look at what it returns."""
    here = jax.process_index()
    mesh = mesh_of({"batch": 4})
    return {
        "golden": test_data_golden.digests(),
        "layouts": layouts_job(),
        "unequal resumed": _unequal_resumed(mesh, here),
        "not made": _not_made(mesh, here),
        "failed": _failed(mesh, here),
        "failed shared": _failed_shared(mesh),
        "resume": _resumed(mesh),
        "messages": _messages(mesh, here),
        "context": _context(mesh),
        "other mesh": _without_devices(),
        "left": _left_early(mesh, here),
        "differ": _differing(mesh, here),
        "in between": _loops_in_between(mesh, rounds=2),
    }


def layouts_job() -> dict[str, Any]:
    """What each process holds of batches, by layout."""
    found: dict[str, Any] = {}
    for name, (axes, order, specs) in LAYOUTS.items():
        layout = ml.Layout(specs, mesh_of(axes, order))
        batches = {}
        for kind, given in (("rows", source()), ("stream", examples)):
            data = ml.data.distribute_dataset(given, layout, global_batch_size=8)
            batches[kind] = [
                {key: local_parts(leaf) for key, leaf in batch.items()}
                for batch in data
            ]
        found[name] = batches
    return found


def _unequal_resumed(mesh, here):
    """What is left after each state, without and with going on from it."""
    rows = np.arange([10, 3][here], dtype=np.int32) + 100 * here
    sources = {
        "rows": {"y": rows},
        "stream": lambda: ({"y": row} for row in rows),
        "stream with places": Seekable([{"y": row} for row in rows]),
    }

    def made(given):
        return ml.data.distribute_dataset(
            given, mesh, global_batch_size=8, per_process=True, epochs=2
        )

    def held(batch):
        return {key: sorted(local_parts(leaf)) for key, leaf in batch.items()}

    found = {}
    for kind, given in sources.items():
        it = iter(made(given))
        states, whole = [], []
        for batch in it:
            whole.append(held(batch))
            states.append(json.dumps(it.get_state()))
        again = []
        for state in states:
            it = iter(made(given))
            it.set_state(json.loads(state), skip=True)
            again.append([held(batch) for batch in it])
        found[kind] = {"whole": whole, "again": again}
    return found


def _not_made(mesh, here):
    """What is said where process 1 alone finds that it cannot make its dataset."""

    def made(given, **options):
        options = {"global_batch_size": 8, "per_process": True, **options}
        ml.data.distribute_dataset(given, mesh, **options)

    def pair(*counts):
        return (np.zeros(counts[here], np.float32),) * 2

    def cannot_open():
        if here:
            raise OSError("the disk is gone")
        yield {"x": np.float32(1)}

    def fn(context):
        if context.input_pipeline_id:
            raise ValueError("no such file")
        return [{"x": np.zeros(2, np.float32)}] * 4

    tries = {
        "no place for padding": lambda: made(pair(8, 6)),
        "no place for padding up to others": lambda: made(pair(12, 4)),
        "all rows are dropped": lambda: made(pair(8, 3), remainder="drop"),
        "the source does not open": lambda: made(cannot_open),
        "the function fails": lambda: ml.data.distribute_datasets_from_function(
            fn, mesh
        ),
        "an argument is wrong": lambda: made(pair(8, 8), epochs=1 - here),
    }
    return {name: outcome_of(one) for name, one in tries.items()}


class Broken:
    """Rows, some of which cannot be read on one process."""

    def __init__(self, *broken, num_rows=20):
        self.broken, self.num_rows = broken, num_rows

    def __len__(self):
        return self.num_rows

    def __getitem__(self, row):
        if row in self.broken:
            raise OSError("a row is gone")
        return {"x": np.float32(row)}


def _taken(mesh, given, *, fails_at=None, **options):
    """Steps taken, and what ends them; the loop of process 1 may fail."""
    data = ml.data.distribute_dataset(given, mesh, global_batch_size=8, **options)
    steps = []

    def loop():
        for _ in data:
            steps.append(True)
            if jax.process_index() == 1 and len(steps) == fails_at:
                raise ArithmeticError("the loss is not a number")

    said = outcome_of(loop)
    return [len(steps), said]


def _failed(mesh, here):
    """Steps taken and what is said where process 1 alone fails on its way."""
    broken = Broken(*[9] * here)

    def pairs(*counts):
        return lambda: ((np.float32(row), row) for row in range(counts[here]))

    def stream():
        return (broken[row] for row in range(20))

    taken = functools.partial(_taken, mesh, per_process=True)
    return {
        "stream repeated": taken(stream, remainder="repeat", epochs=None),
        "no place for padding": taken(pairs(8, 6)),
        "no place for padding up to others": taken(pairs(12, 4)),
    }


def four_job() -> dict[str, Any]:
    """What each of four processes sees."""
    mesh = mesh_of({"batch": 4})
    return {
        "golden": test_data_golden.digests(),
        "layouts": layouts_job(),
        "failed shared": _failed_shared(mesh),
        "in between": _loops_in_between(mesh, rounds=20),
    }


def _failed_shared(mesh):
    """Steps and what is said if process 1 fails in what all of them read."""
    here = jax.process_index() == 1
    # The row that process 1 loads of two and of four processes: both in the second
    # batch, and not among the rows that are compared when the dataset is made.
    broken = Broken(*[11, 13] * here, num_rows=64)

    def stream():
        return (broken[row] for row in range(20))

    numbers = itertools.count()

    def opened_again():
        if next(numbers) and here:
            raise OSError("a row is gone")
        return ({"x": row} for row in range(16))

    rows = grain.MapDataset.range(64).map(lambda row: broken[int(row)])

    taken = functools.partial(_taken, mesh)
    return {
        "stream": taken(stream),
        "stream, nothing ahead": taken(stream, prefetch=0),
        "stream repeated": taken(stream, remainder="repeat"),
        "Grain stream": taken(rows.to_iter_dataset()),
        "second epoch": taken(opened_again, epochs=2),
        "loop": taken(stream, prefetch=0, fails_at=1),
    }


def _left_early(mesh, here):
    """What is said where all leave their loops early, and where one does."""

    def stream():
        for row in range(400):
            yield {"x": np.int32(row)}

    data = ml.data.distribute_dataset(
        stream, mesh, global_batch_size=8, per_process=True
    )
    for _ in data:
        break
    start = time.monotonic()
    steps = []

    def loop():
        for batch in data:
            steps.append(batch)
            if here == 0:
                break

    said = outcome_of(loop)
    quickly = time.monotonic() - start < 30
    return {"said": said, "all": len(steps) == 100, "quickly": quickly}


def _loops_in_between(mesh, rounds):
    """What loops see that are left early, moved back, or run at once.

    The processes take different times, so that they meet in every order.
    """
    same, own = random.Random(0), random.Random(jax.process_index())
    seen = []

    def first_of(batch):
        time.sleep(own.choice([0, 0, 0.002]))
        assert len(batch["y"]) == 8
        return sorted(local_parts(batch["weight"]))[0][1][0]

    def stream():
        return ({"y": row} for row in range(152))

    for _, given in itertools.product(range(rounds), ({"y": np.arange(152)}, stream)):
        data = ml.data.distribute_dataset(
            given, mesh, global_batch_size=8, prefetch=same.choice([0, 1, 5]), epochs=2
        )
        for _ in range(2):
            last = same.randrange(30)
            seen += [first_of(batch) for batch in itertools.islice(data, last)]
        began = iter(data)
        state = [first_of(next(began)), began.get_state()][1]
        seen += [first_of(next(began)), sum(map(first_of, data))]
        if same.random() < 0.5:
            began.set_state(state, skip=True)
        seen += [sum(map(first_of, began))]
    return seen


def _differing(mesh, here):
    """What is said of sources that are not the same on both processes."""
    replicated = mesh_of({"model": 2, "batch": 2}).layout("batch")
    own_mesh = ml.create_mesh({"batch": 2}, devices=jax.local_devices())

    def shuffled(seed):
        passes = itertools.count()

        def stream():
            order = np.random.default_rng([seed, next(passes)]).permutation(64)
            return ({"i": int(i), "kind": 3} for i in order)

        return stream

    def rows_of(numbers):
        return lambda: ({"i": number} for number in numbers)

    class Augmented:
        """Rows with an order, and noise that is never the same."""

        def __len__(self):
            return 64

        def __getitem__(self, row):
            return {"i": row, "x": np.random.default_rng().normal(size=3)}

    class Noise(Augmented):
        def __getitem__(self, row):
            return {"i": row + 100 * here, "x": np.random.default_rng().normal(size=3)}

    def parts():
        return ({"i": i} for i in range(here, 64, 2))

    permuted = np.random.default_rng(here).permutation(64)
    tries = {
        "arrays shuffled without a seed": {"i": permuted},
        "a generator without a seed": shuffled(here),
        "a stream that is shorter": rows_of(range(32 - 8 * here)),
        "another position": (rows_of(range(64)), {"skip": here}),
        "rows of other numbers, with noise": Noise(),
        "the same part of rows that both hold": (
            shuffled(7),
            {"layout": replicated, "per_process": True},
        ),
        "the same rows, with noise": Augmented(),
        "a part, said so": (parts, {"per_process": True}),
    }
    found = {}
    for name, given in tries.items():
        source, options = given if isinstance(given, tuple) else (given, {})
        options = {"global_batch_size": 8, "epochs": 2, **options}
        skip, layout = options.pop("skip", 0), options.pop("layout", mesh)
        steps = []

        def loop(source=source, options=options, steps=steps, skip=skip, layout=layout):
            batches = iter(ml.data.distribute_dataset(source, layout, **options))
            if skip:
                alone = iter(ml.data.distribute_dataset(source, own_mesh, **options))
                next(alone)
                batches.set_state(alone.get_state(), skip=True)
            steps.extend(1 for _ in batches)

        found[name] = [outcome_of(loop), len(steps)]
    return found


def _resumed(mesh):
    data = ml.data.distribute_dataset(source(), mesh, global_batch_size=4, shuffle=7)
    it = iter(data)
    next(it)
    next(it)
    state = json.dumps(it.get_state())
    rest = [local_parts(batch["y"]) for batch in it]
    return {"state": state, "rest": rest}


def _messages(mesh, here):
    def made(rows=ROWS, size=8, **options):
        columns = {"x": np.zeros((rows, 2), np.float32)}
        return ml.data.distribute_dataset(
            columns, mesh, global_batch_size=size, **options
        )

    def other_process():
        batches = iter(made(per_process=True))
        batches.set_state({**batches.get_state(), "of_process": [1 - here, 2]})

    return {
        "different_size": outcome_of(lambda: made(size=4 + 4 * here)),
        "different_rows": outcome_of(lambda: made(rows=10 + here)),
        "other_process": outcome_of(other_process),
    }


def _context(mesh):
    across = mesh_of({"model": 2, "batch": 2})
    contexts = [md.InputContext.of(mesh), md.InputContext.of(across)]

    def fn(context):
        size = context.get_per_replica_batch_size(8)
        start = 100 * context.input_pipeline_id
        return [{"x": np.full(size, start + i, np.int32)} for i in range(4)]

    data = ml.data.distribute_datasets_from_function(fn, mesh)
    batches = [local_parts(batch["x"]) for batch in data]
    numbers = [[*vars(one).values()] for one in contexts]
    return {"contexts": numbers, "batches": batches}


def _without_devices():
    """A mesh of process 0's devices alone, on both processes."""
    mesh = mesh_of({"batch": 2}, [0, 1])
    data = ml.data.distribute_dataset(source(), mesh, global_batch_size=8)
    arrays = [batch["x"] for batch in data]
    shapes = [[list(x.shape), len(x.addressable_shards)] for x in arrays]
    return {"shapes": shapes, "rows": md.process_rows(mesh, 8).tolist()}


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_processes(2, job, timeout_s=300)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_processes(4, four_job, devices_per_process=1, timeout_s=300)


@pytest.fixture(params=["two", pytest.param("four", marks=pytest.mark.slow)])
def several(request) -> list[dict[str, Any]]:
    return request.getfixturevalue(request.param)


def test_batches_are_those_of_earlier_versions(several):
    expected = test_data_golden.expected_on(len(several))
    assert [here["golden"] for here in several] == [expected] * len(several)


@pytest.mark.parametrize("kind", ["rows", "stream"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_process_holds_its_shards_of_the_global_batches(several, name, kind):
    data = source()
    expected = {key: [] for key in data}
    order = np.minimum(np.arange(24), ROWS - 1)
    for step in range(3):
        for key, leaf in data.items():
            expected[key].append(leaf[order[8 * step : 8 * step + 8]])
    expected["weight"] = [np.ones(8), np.ones(8), np.repeat([1, 0], [6, 2])]
    for here in several:
        batches = here["layouts"][name][kind]
        assert len(batches) == 3
        for step, batch in enumerate(batches):
            assert set(batch) == {"x", "y", "weight"}
            for key, parts in batch.items():
                for starts, values in parts:
                    part = np.array(values)
                    cut = tuple(
                        slice(a, a + n) for a, n in zip(starts, part.shape, strict=True)
                    )
                    np.testing.assert_array_equal(part, expected[key][step][cut])


@pytest.mark.parametrize("kind", ["rows", "stream", "stream with places"])
def test_processes_with_unequal_rows_continue_from_any_step(two, kind):
    for process, here in enumerate(two):
        whole = here["unequal resumed"][kind]["whole"]
        weights = [[1] * 4, [1] * 4, [1, 1, 0, 0]]
        if process:
            weights = [[1, 1, 1, 0], [0] * 4, [0] * 4]
        found = [[w for _, part in b["weight"] for w in part] for b in whole]
        assert found == weights * 2
        again = here["unequal resumed"][kind]["again"]
        assert again == [whole[step:] for step in range(1, 7)]


WEIGHTS = (
    "Padding is marked by weights: weights=2 appends them. Or choose another "
    "remainder=."
)
SHORT = (
    f"DataError: the last batch of an epoch has 2 rows, and batches have 4. {WEIGHTS}"
)
DROPPED = (
    "DataError: the source has 3 rows in epoch 1, fewer than a batch: remainder='drop' "
    "drops all of them. Take a smaller global_batch_size, or another remainder=."
)
ALONE = "DataError: process 1 cannot make the dataset: "
# What processes 0 and 1 say when process 1 alone finds that it cannot make its dataset.
NOT_MADE = {
    "no place for padding": (SHORT, SHORT),
    "no place for padding up to others": (SHORT.replace("2 rows", "0 rows"),) * 2,
    "all rows are dropped": (DROPPED, DROPPED),
    **{
        name: (f"{ALONE}{error.removeprefix('DataError: ')}", error)
        for name, error in {
            "the source does not open": "OSError: the disk is gone",
            "the function fails": "ValueError: no such file",
            "an argument is wrong": (
                "DataError: epochs must be a positive integer, got 0."
            ),
        }.items()
    },
}


@pytest.mark.parametrize("name", NOT_MADE)
def test_what_one_process_cannot_make_is_an_error_on_all(two, name):
    assert [here["not made"][name] for here in two] == [*NOT_MADE[name]]


FEWER = "DataError: the source of process 1 has fewer batches than that of another process. "
ROW_GONE = "the source of process 1 failed: OSError: a row is gone"
FAILED = {
    "stream repeated": (2, f"DataError: {ROW_GONE}", "OSError: a row is gone"),
    "no place for padding": (
        1,
        f"DataError: the source of process 1 failed: {SHORT.removeprefix('DataError: ')}",
        SHORT,
    ),
    "no place for padding up to others": (1, FEWER + WEIGHTS, FEWER + WEIGHTS),
}


@pytest.mark.parametrize("name", FAILED)
def test_what_fails_on_one_process_ends_the_loops_of_all_at_one_step(two, name):
    steps, *said = FAILED[name]
    assert [here["failed"][name] for here in two] == [[steps, one] for one in said]


GONE = "OSError: a row is gone"
LEFT = (
    "DataError: process 1 has left its loop over the data, and this one continues. All "
    "processes must take the same number of steps."
)
SHARED = {
    "stream": (1, GONE),
    "stream, nothing ahead": (1, GONE),
    "stream repeated": (1, GONE),
    "Grain stream": (1, GONE),
    "second epoch": (2, GONE),
    "loop": (1, "ArithmeticError: the loss is not a number"),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_fails_on_one_process_of_a_shared_source_ends_the_loops_of_all(
    several, name
):
    steps, error = SHARED[name]
    told = f"DataError: the source of process 1 failed: {error}"
    expected = LEFT if name.startswith("loop") else told
    for process, here in enumerate(several):
        said = error if process == 1 else expected
        assert here["failed shared"][name] == [steps, said]


WAY_OUT = (
    "Without per_process=True, every process reads all examples in the same order, and "
    "keeps those of its devices: otherwise examples are lost. If the source gives each "
    "process its own part, say per_process=True; if it shuffles or draws random "
    "numbers, give it the same seed on all processes; if it lists files, sort them."
)


DIFFERS = "differ"
OTHER = (
    "DataError: the processes read different data: {} of epoch 1 on process 0, {} of "
    f"epoch 1 on process 1. Their iterations must start at the same position. {WAY_OUT}"
)

# What is said of a source that differs, and after how many steps.
DIFFER = {
    "arrays shuffled without a seed": (DIFFERS, 0),
    "a generator without a seed": (DIFFERS, 0),
    "a stream that is shorter": (
        OTHER.format("8 rows in batch 4", "no rows in batch 4"),
        3,
    ),
    "another position": (OTHER.format("8 rows in batch 1", "8 rows in batch 2"), 0),
    "rows of other numbers, with noise": (DIFFERS, 0),
    "the same part of rows that both hold": ("worked", 16),
    "the same rows, with noise": ("worked", 16),
    "a part, said so": ("worked", 16),
}


@pytest.mark.parametrize("name", DIFFER)
def test_sources_that_differ_between_processes_are_refused_on_all(two, name):
    expected, steps = DIFFER[name]
    for here in two:
        said, taken = here["differ"][name]
        if expected == DIFFERS:  # with checksums, the same words on both processes
            start, _, end = two[0]["differ"][name][0].partition(" is ")
            assert said == two[0]["differ"][name][0]
            assert start == (
                "DataError: the processes make different datasets: the checksum of "
                "some rows of leaf 'i'"
            )
            assert end.endswith(f" on process 1. {WAY_OUT}")
        else:
            assert said == expected
        assert taken == steps


def test_loops_that_are_left_or_run_at_once_see_all_batches(several):
    for here in several:
        # 19 batches in each of two epochs.
        assert here["in between"] == several[0]["in between"]
        assert {38.0} < set(here["in between"]) <= {1.0, 36.0, 37.0, 38.0}


def test_a_process_that_leaves_its_loop_early_ends_those_of_the_others(two):
    assert [here["left"] for here in two] == [
        {"said": said, "all": False, "quickly": True}
        for said in ("worked", LEFT.replace("process 1", "process 0"))
    ]


def test_a_state_of_two_processes_continues_in_one(two):
    mesh = ml.create_mesh({"batch": 4}, devices=jax.devices()[:4])
    data = ml.data.distribute_dataset(source(), mesh, global_batch_size=4, shuffle=7)
    states = {here["resume"]["state"] for here in two}
    assert len(states) == 1
    it = iter(data)
    it.set_state(json.loads(states.pop()))
    rest = [np.asarray(batch["y"]) for batch in it]
    assert len(rest) == 4
    for here in two:
        for mine, parts in zip(rest, here["resume"]["rest"], strict=True):
            for (start,), values in parts:
                np.testing.assert_array_equal(mine[start : start + len(values)], values)


MESSAGES = {
    "different_size": "global_batch_size is 4 on process 0, 8 on process 1",
    "different_rows": "the number of rows is 10 on process 0, 11 on process 1",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_disagreement_is_an_error_on_all_processes(two, name):
    assert [here["messages"][name] for here in two] == [
        f"DataError: the processes make different datasets: {MESSAGES[name]}. {WAY_OUT}"
    ] * 2


def test_a_state_of_another_process_is_refused(two):
    for index, here in enumerate(two):
        assert here["messages"]["other_process"].startswith(
            f"DataError: the state is of a dataset with process=[{1 - index}, 2], and "
            f"this one has process=[{index}, 2]: "
        )


def test_input_contexts_count_what_feeds_different_replicas(two):
    for process, here in enumerate(two):
        # How many pipelines there are, which one this is, and the replicas.
        assert here["context"]["contexts"] == [[2, process, 4], [1, 0, 2]]


def test_each_replica_takes_one_of_its_pipelines_batches_in_turn(two):
    for process, here in enumerate(two):
        batches = here["context"]["batches"]
        found = [[values for _, values in sorted(batch)] for batch in batches]
        expected = 100 * process + np.arange(4).repeat(2).reshape(2, 2, 2)
        assert found == expected.tolist()


def test_a_process_without_devices_in_the_mesh_gets_arrays_without_shards(two):
    assert two[0]["other mesh"] == {"shapes": [[[8, 4], 2]] * 3, "rows": list(range(8))}
    assert two[1]["other mesh"] == {"shapes": [[[8, 4], 0]] * 3, "rows": []}
