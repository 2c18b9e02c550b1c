"""A strategy's datasets and values: each example once, in the source's own tree."""

import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshlayout as ml
from meshlayout.distribute import InputContext, PerReplica
from tests.error_messages import message_of
from tests.processes import run_processes


def mirrored(num_replicas):
    return ml.distribute.MirroredStrategy(jax.devices()[:num_replicas])


@pytest.fixture(scope="module")
def two():
    return mirrored(2)


def rows_of(strategy, value):
    return [np.asarray(part).tolist() for part in strategy.local_results(value)]


# What tf.distribute's pages show.


def test_a_batched_source_keeps_its_batch_size_and_each_replica_gets_its_part(two):
    source = [np.array([0, 1], np.int32), np.array([2, 3], np.int32)]
    data = two.distribute_dataset(source)
    assert len(data) == 2
    results = [two.run(lambda x: x * 2, args=(x,)) for x in data]
    assert [rows_of(two, result) for result in results] == [[[0], [2]], [[4], [6]]]


@pytest.mark.parametrize("options", [{}, {"per_process": True}])
def test_a_short_batch_of_six_on_two_replicas_is_three_and_three(two, options):
    full, short = two.distribute_dataset(np.arange(14, dtype=np.int32), 8, **options)
    assert full.mask is None
    assert short.mask is None
    assert rows_of(two, short) == [[8, 9, 10], [11, 12, 13]]
    assert int(two.reduce("SUM", short, axis=0)) == sum(range(8, 14))
    assert float(two.reduce("MEAN", short, axis=0)) == sum(range(8, 14)) / 6


def test_a_short_batch_of_five_is_masked(two):
    _, short = two.distribute_dataset(np.arange(13, dtype=np.int32), 8)
    assert rows_of(two, short) == [[8, 9, 10, 11], [12]]
    assert np.asarray(short.mask).tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert short.mask.dtype == np.float32
    # The denominator is 5, not 8 nor the mean of two means.
    assert float(two.reduce("MEAN", short, axis=0)) == 10


def test_a_function_makes_a_value_of_each_replica(two):
    def value_fn(context):
        third = np.array([3.0, 2.0, 1.0])[context.replica_id_in_sync_group]
        key = jax.random.key(context.replica_id_in_sync_group)
        return [1.0, context.num_replicas_in_sync, third], key

    value, keys = two.distribute_values_from_function(value_fn)
    assert all(leaf.is_scalar for leaf in value)
    assert [str(leaf.array.dtype) for leaf in value] == ["float32", "int32", "float32"]
    assert [rows_of(two, leaf) for leaf in value] == [[1, 1], [2, 2], [3, 2]]
    bits = two.run(lambda key: jax.random.bits(key), args=(keys,))
    expected = [int(jax.random.bits(jax.random.key(i))) for i in range(2)]
    assert rows_of(two, bits) == expected


def test_a_function_of_the_input_context_feeds_one_batch_to_each_replica(two):
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        size = context.get_per_replica_batch_size(4)
        return (np.full(size, i, np.int32) for i in range(4))

    data = two.distribute_datasets_from_function(dataset_fn)
    assert [rows_of(two, x) for x in data] == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]
    assert contexts == [InputContext(1, 0, 2)]


def test_an_input_function_that_ends_unevenly_ends_in_a_short_batch(two):
    batches = [np.full(4, i, np.int32) for i in range(3)] + [np.full(1, 3, np.int32)]
    for count, last in ((3, [[2, 2], [2, 2]]), (4, [[2, 2, 2, 2], [3]])):
        data = two.distribute_datasets_from_function(
            lambda context, count=count: batches[:count]
        )
        first, second = data
        assert rows_of(two, first) == [[0] * 4, [1] * 4]
        assert rows_of(two, second) == last
        assert first.mask is None


# Every example once, in the source's tree.


def source_of(kind, rows, size):
    """Rows 1, 2, ... of a tree, as each kind of source."""
    x = np.arange(1, rows + 1, dtype=np.int32)
    columns = {"weight": x, "pair": (np.stack([x, x], 1), [x])}
    cuts = range(0, rows, size)
    batches = [jax.tree.map(lambda a, i=i: a[i : i + size], columns) for i in cuts]
    if kind == "arrays":
        return columns
    return batches if kind == "batches" else lambda: iter(batches)


@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
@hypothesis.given(
    rows=st.integers(1, 20),
    per_replica=st.integers(1, 4),
    num_replicas=st.integers(1, 8),
    kind=st.sampled_from(["arrays", "batches", "function"]),
)
def test_sums_and_means_are_those_of_all_examples(
    rows, per_replica, num_replicas, kind
):
    strategy = mirrored(num_replicas)
    size = per_replica * num_replicas
    source = source_of(kind, rows, size)
    data = strategy.distribute_dataset(source, size, batched=kind != "arrays" or None)
    seen = []
    for number, batch in enumerate(data):
        assert set(batch) == {"weight", "pair"}
        assert isinstance(batch["pair"], tuple)
        assert isinstance(batch["pair"][1], list)
        start = number * size
        expected = np.arange(start + 1, min(start + size, rows) + 1)
        x = batch["weight"]
        assert int(strategy.reduce("SUM", x, axis=0)) == expected.sum()
        mean = strategy.reduce("MEAN", batch["pair"][0], axis=0)
        np.testing.assert_allclose(mean, [expected.mean()] * 2, rtol=1e-6)
        parts = rows_of(strategy, x)
        assert all(len(part) <= per_replica for part in parts)
        seen += [row for part in parts for row in part]
        if num_replicas > 1:
            leaves = jax.tree.leaves(batch, is_leaf=lambda x: isinstance(x, PerReplica))
            assert all(leaf.mask is x.mask for leaf in leaves)
            assert (x.mask is None) == (len(expected) % num_replicas == 0)
    assert seen == list(range(1, rows + 1))
    assert number + 1 == math.ceil(rows / size)


def test_fewer_examples_than_replicas_leave_replicas_without_rows():
    strategy = mirrored(8)
    three = np.arange(1.0, 4, dtype=np.float32)
    for data in (
        strategy.distribute_dataset(three, 8),
        strategy.distribute_dataset([three]),
        strategy.distribute_dataset(lambda: iter([three])),
    ):
        (x,) = data
        assert rows_of(strategy, x) == [[1], [2], [3], [], [], [], [], []]
        assert float(strategy.reduce("MEAN", x, axis=0)) == 2


def test_one_replica_gets_plain_arrays_and_a_last_batch_with_fewer_rows():
    strategy = ml.distribute.OneDeviceStrategy(jax.devices()[1])
    source = (np.arange(5, dtype=np.int32), np.ones((5, 2), np.float32))
    batches = list(strategy.distribute_dataset(source, 4))
    assert [x.tolist() for x, _ in batches] == [[0, 1, 2, 3], [4]]
    assert [y.shape for _, y in batches] == [(4, 2), (1, 2)]
    cut = [np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32)]
    made = list(strategy.distribute_datasets_from_function(lambda context: cut))
    assert [x.tolist() for x in made] == [[0, 1, 2], [0, 1]]
    value = strategy.distribute_values_from_function(lambda context: {"x": 2.0})
    assert value == {"x": 2}
    for leaf in jax.tree.leaves((batches, made, value)):
        assert isinstance(leaf, jax.Array)
        assert leaf.devices() == {jax.devices()[1]}


def test_strings_stay_on_the_host_without_padding(two):
    source = {"x": np.arange(3.0, dtype=np.float32), "name": np.array(["a", "b", "c"])}
    full, short = two.distribute_dataset(source, 2, strings="host")
    assert full["name"].tolist() == ["a", "b"]
    assert short["name"].tolist() == ["c"]
    assert rows_of(two, short["x"]) == [[2.0], []]


def test_batches_on_the_devices_and_other_datasets_are_sources(two):
    for layout in (two.mesh.layout("batch"), two.mesh.layout(...)):
        x = jax.device_put(jnp.arange(8), layout.sharding)
        (batch,) = two.distribute_dataset([x])
        assert rows_of(two, batch) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        doubled = two.run(lambda x: 2 * x, args=(batch,))
        assert rows_of(two, doubled) == [[0, 2, 4, 6], [8, 10, 12, 14]]
    source = {"x": np.arange(6.0, dtype=np.float32)}
    whole = ml.distribute_dataset(source, two.mesh, global_batch_size=2, weights=None)
    batches = [rows_of(two, batch["x"]) for batch in two.distribute_dataset(whole)]
    assert batches == [[[0], [1]], [[2], [3]], [[4], [5]]]
    data = ml.distribute_dataset(source, two.mesh, global_batch_size=4)
    assert message_of(two.distribute_dataset, data) == (
        "the source is a dataset whose batches are padded and carry weights already "
        "('weight'), so that padding would count as examples. Give the source that it "
        "was made of."
    )


# The dataset.


def test_a_dataset_says_what_it_yields():
    strategy = mirrored(4)
    source = (np.zeros((9, 3), np.float32), {"y": np.zeros(9, np.uint8)})
    data = strategy.distribute_dataset(source, 8)
    assert len(data) == 2
    x, y = data.element_spec
    assert (x.shape, x.dtype) == ((2, 3), np.float32)
    assert (y["y"].shape, y["y"].dtype) == ((2,), np.uint8)
    assert data.global_batch_size == 8


def test_a_loop_resumes_in_the_middle_of_an_epoch_on_other_replicas(tmp_path):
    source = np.arange(14, dtype=np.int32)

    def trained(replicas, stop=None):
        strategy = mirrored(replicas)
        data = strategy.distribute_dataset(source, 4, shuffle=1, epochs=2)
        batches = iter(data)
        with ml.Checkpointer(tmp_path) as ck:
            state = ck.resume({"sum": np.zeros((), np.int32)}, data=batches)
            total = state["sum"]
            for step, batch in enumerate(batches, 1):
                total = total + strategy.reduce("SUM", batch, axis=0)
                if step == stop:
                    ck.save(step, {"sum": np.asarray(total)}, data=batches)
                    return None
            return int(total)

    trained(2, stop=6)
    assert trained(4) == 2 * source.sum()


# Values of functions.


def test_values_may_differ_in_their_rows():
    strategy = mirrored(4)

    def value_fn(context):
        count = context.replica_id_in_sync_group
        x = np.arange(count, dtype=np.int32)
        return {"x": x, "pair": (np.ones((count, 2), np.float32), 1.5), "same": [x[:0]]}

    value = strategy.distribute_values_from_function(value_fn)
    x, (ones, number), [empty] = value["x"], value["pair"], value["same"]
    assert rows_of(strategy, x) == [[], [0], [0, 1], [0, 1, 2]]
    assert (number.mask, empty.mask) == (None, None)
    assert int(strategy.reduce("SUM", x, axis=0)) == 0 + 1 + 3
    assert strategy.reduce("MEAN", ones, axis=0).tolist() == [1.0, 1.0]
    assert strategy.gather(x, axis=0).tolist() == [0, 0, 1, 0, 1, 2]
    # One batch for run, which masks it once.
    rows = strategy.run(lambda x, ones: x + ones[:, 0], args=(x, ones))
    assert float(strategy.reduce("SUM", rows, axis=0)) == 4 + 6


# Bad input.


def differing(first, second):
    return lambda context: second if context.replica_id_in_sync_group else first


BAD_FUNCTIONS = {
    "text": (lambda context: "x", "'x' is not an array of numbers"),
    "a large integer": (lambda context: {"a": 2**40}, "would turn int64 into int32"),
    "other leaves": (differing({"a": 1}, {"b": 1}), "structure|mismatch"),
    "another dtype": (differing(1, 1.0), "matching dtypes"),
    "another dim": (differing(np.ones((2, 3)), np.ones((2, 4))), "shape"),
}


@pytest.mark.parametrize("name", BAD_FUNCTIONS)
def test_values_that_do_not_fit_are_refused(two, name):
    value_fn, expected = BAD_FUNCTIONS[name]
    with pytest.raises(ValueError, match=expected):
        two.distribute_values_from_function(value_fn)


INFERRED = (
    "which does not say how many rows a batch of all 2 replicas has. Give "
    "global_batch_size=, such as {}: batches are then cut anew, and a short last one is "
    "padded."
)
BAD_SOURCES = {
    "rows without a batch size": (
        lambda s: s.distribute_dataset(np.arange(4)),
        "the first element of the source is of single examples, " + INFERRED.format(2),
    ),
    "batches that do not divide": (
        lambda s: s.distribute_dataset([np.arange(3.0)] * 2),
        "the first element of the source has 3 rows, " + INFERRED.format(4),
    ),
    "a batch size that does not divide": (
        lambda s: s.distribute_dataset(np.arange(4.0), 3),
        "a global batch of 3 rows does not divide into 2 replicas (Layout([batch, ...], "
        "Mesh(batch=2))). Nearest sizes that divide: 2 and 4.",
    ),
}


@pytest.mark.parametrize("name", BAD_SOURCES)
def test_sources_that_do_not_fit_are_refused(two, name):
    make, expected = BAD_SOURCES[name]
    assert message_of(make, two) == expected


# Several processes.


def on_processes():
    """What one of two processes with two replicas each sees."""
    strategy = ml.distribute.MultiWorkerMirroredStrategy()
    here = jax.process_index()
    seen = {}

    def described(data):
        return [
            [
                rows_of(strategy, x),
                x.mask is not None,
                int(strategy.reduce("SUM", x, axis=0)),
            ]
            for x in data
        ]

    x = np.arange(22, dtype=np.int32)
    seen["shared"] = described(strategy.distribute_dataset(x, 8))
    # Process 0 has 3 batches of 2 rows, process 1 has 4 and one of one row.
    mine = [np.full(2, 10 * here + i, np.int32) for i in range(3 + here)]
    mine += [np.full(1, 99, np.int32)] * here
    contexts = []

    def dataset_fn(context):
        contexts.append([context.num_input_pipelines, context.input_pipeline_id])
        return mine

    seen["function"] = described(strategy.distribute_datasets_from_function(dataset_fn))
    seen["contexts"] = contexts
    own = np.arange(2 + 5 * here, dtype=np.int32)
    seen["own rows"] = described(strategy.distribute_dataset(own, 8, per_process=True))
    ids = strategy.distribute_values_from_function(
        lambda context: context.replica_id_in_sync_group
    )
    seen["repr"] = repr(ids)
    rows = strategy.distribute_values_from_function(
        lambda context: np.full(2, context.replica_id_in_sync_group, np.int32)
    )
    seen["gathered"] = strategy.gather(rows, axis=0).tolist()
    seen["largest"] = int(strategy.reduce("MAX", ids, axis=None))
    return seen


@pytest.mark.multiprocess
@pytest.mark.slow
def test_processes_agree_about_padding_and_read_every_example_once():
    first, second = run_processes(2, on_processes, shared=True)
    assert first["shared"] == [
        [[[0, 1], [2, 3]], False, 28],
        [[[8, 9], [10, 11]], False, 92],
        [[[16, 17], [18, 19]], True, 111],
    ]
    assert [rows for rows, _, _ in second["shared"]] == [
        [[4, 5], [6, 7]],
        [[12, 13], [14, 15]],
        [[20, 21], []],
    ]
    assert (first["contexts"], second["contexts"]) == ([[2, 0]], [[2, 1]])
    assert [rows for rows, _, _ in first["function"]] == [
        [[0, 0], [1, 1]],
        [[2, 2], []],
        [[], []],
    ]
    assert [rows for rows, _, _ in second["function"]] == [
        [[10, 10], [11, 11]],
        [[12, 12], [13, 13]],
        [[99], []],
    ]
    assert [rest for _, *rest in first["function"]] == [
        [False, 44],
        [True, 54],
        [True, 99],
    ]
    assert [rows for rows, _, _ in first["own rows"]] == [[[0, 1], []], [[], []]]
    assert [rows for rows, _, _ in second["own rows"]] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6]],
    ]
    # Also where a process has no padding itself.
    for seen in (first, second):
        assert [rest for _, *rest in seen["own rows"]] == [[True, 7], [True, 15]]
        assert seen["gathered"] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert seen["largest"] == 3
    assert second["repr"] == (
        "PerReplica:{\n  0: Array(2, dtype=int32),\n  1: Array(3, dtype=int32)\n}"
    )
