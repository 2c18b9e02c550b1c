"""A strategy's datasets and values: each example once, in the source's own tree."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshlayout as ml
from meshlayout.distribute import InputContext
from tests.error_messages import message_of
from tests.replicas import mirrored, parts_of, total, values_of


def test_an_input_function_that_ends_unevenly_ends_in_a_short_batch(two):
    batches = [np.full(4, i, np.int32) for i in range(3)] + [np.full(1, 3, np.int32)]
    contexts = []
    for count, last in ((3, [[2, 2], [2, 2]]), (4, [[2, 2, 2, 2], [3]])):
        first, second = two.distribute_datasets_from_function(
            lambda context, count=count: contexts.append(context) or batches[:count]
        )
        assert contexts.pop() == InputContext(1, 0, 2)
        assert parts_of(two, first) == [[0] * 4, [1] * 4]
        assert parts_of(two, second) == last
        assert first.mask is None


def source_of(kind, rows, size):
    """Rows 1, 2, ... of a tree, as each kind of source."""
    x = np.arange(1, rows + 1, dtype=np.int32)
    columns = {"weight": x, "pair": (np.stack([x, x], 1), [x])}
    if kind == "arrays":
        return columns
    cuts = range(0, rows, size)
    batches = [jax.tree.map(lambda a, i=i: a[i : i + size], columns) for i in cuts]
    return batches if kind == "batches" else lambda: iter(batches)


@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
@hypothesis.example(rows=3, per_replica=1, num_replicas=8, kind="function")
@hypothesis.given(
    rows=st.integers(1, 20),
    per_replica=st.integers(1, 4),
    num_replicas=st.integers(1, 8),
    kind=st.sampled_from(["arrays", "batches", "function"]),
)
def test_sums_and_means_are_those_of_all_examples(
    rows, per_replica, num_replicas, kind
):
    strategy, size, seen = mirrored(num_replicas), per_replica * num_replicas, []
    source = source_of(kind, rows, size)
    for batch in strategy.distribute_dataset(
        source, size, batched=kind != "arrays" or None
    ):
        x, (pair, [again]) = batch["weight"], batch["pair"]
        expected = np.arange(rows)[len(seen) :][:size] + 1
        assert int(strategy.reduce("SUM", x, axis=0)) == expected.sum()
        mean = strategy.reduce("MEAN", pair, axis=0)
        np.testing.assert_allclose(mean, [expected.mean()] * 2, rtol=1e-6)
        parts = parts_of(strategy, x)
        assert all(len(part) <= per_replica for part in parts)
        seen += [row for part in parts for row in part]
        if num_replicas > 1:
            assert x.mask is pair.mask is again.mask
            assert (x.mask is None) == (len(expected) % num_replicas == 0)
    assert seen == list(range(1, rows + 1))


def test_one_replica_gets_plain_arrays_and_a_last_batch_with_fewer_rows():
    strategy = ml.distribute.OneDeviceStrategy(jax.devices()[1])
    x = np.arange(5, dtype=np.int32)
    batches = list(strategy.distribute_dataset(x, 4))
    cut = lambda context: [x[:4], x[4:]]
    batches += strategy.distribute_datasets_from_function(cut)
    assert [x.tolist() for x in batches] == [[0, 1, 2, 3], [4]] * 2
    value = strategy.distribute_values_from_function(lambda context: {"x": 2.0})
    assert value == {"x": 2}
    for leaf in jax.tree.leaves((batches, value)):
        assert isinstance(leaf, jax.Array)
        assert leaf.devices() == {jax.devices()[1]}


def test_batches_on_the_devices_and_other_datasets_are_sources(two):
    for layout in (two.mesh.layout("batch"), two.mesh.layout(...)):
        x = jax.device_put(jnp.arange(8), layout.sharding)
        (batch,) = two.distribute_dataset([x])
        assert parts_of(two, batch) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        doubled = two.run(lambda x: 2 * x, args=(batch,))
        assert parts_of(two, doubled) == [[0, 2, 4, 6], [8, 10, 12, 14]]
    source = {"x": np.arange(6.0, dtype=np.float32)}
    whole = ml.distribute_dataset(source, two.mesh, global_batch_size=2, weights=None)
    batches = [parts_of(two, batch["x"]) for batch in two.distribute_dataset(whole)]
    assert batches == [[[0], [1]], [[2], [3]], [[4], [5]]]
    data = ml.distribute_dataset(source, two.mesh, global_batch_size=4)
    assert message_of(two.distribute_dataset, data) == (
        "the source is a dataset whose batches are padded and carry weights already "
        "('weight'), so that padding would count as examples. Give the original "
        "source."
    )


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


def test_values_may_differ_in_their_rows():
    strategy = mirrored(4)

    def value_fn(context):
        count = context.replica_id_in_sync_group
        x, key = np.arange(count, dtype=np.int32), jax.random.key(count)
        pair = np.ones((count, 2), np.float32), 1.5
        return {"x": x, "pair": pair, "same": [x[:0]], "key": key}

    value = strategy.distribute_values_from_function(value_fn)
    x, (ones, number), [empty] = value["x"], value["pair"], value["same"]
    assert parts_of(strategy, x) == [[], [0], [0, 1], [0, 1, 2]]
    assert number.is_scalar
    assert (str(number.array.dtype), number.mask, empty.mask) == ("float32", None, None)
    assert strategy.reduce("MEAN", ones, axis=0).tolist() == [1.0, 1.0]
    assert strategy.gather(x, axis=0).tolist() == [0, 0, 1, 0, 1, 2]
    # One batch for run, which masks it once.
    rows = strategy.run(lambda x, ones: x + ones[:, 0], args=(x, ones))
    assert total(strategy, rows, axis=0) == 4 + 6
    bits = strategy.run(jax.random.bits, args=(value["key"],))
    expected = [int(jax.random.bits(jax.random.key(i))) for i in range(4)]
    assert parts_of(strategy, bits) == expected


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["x", "x"], "'x' is not an array of numbers"),
        ([{"a": 2**40}, {"a": 0}], "would turn int64 into int32"),
        ([{"a": 1}, {"b": 1}], "structure|mismatch"),
        ([1, 1.0], "matching dtypes"),
        ([np.ones((2, 3)), np.ones((2, 4))], "shape"),
    ],
)
def test_values_that_do_not_fit_are_refused(two, parts, expected):
    with pytest.raises(ValueError, match=expected):
        values_of(two, *parts)


INFERRED = (
    "which does not say how many rows a batch of all 2 replicas has. Give "
    "global_batch_size=, such as {}: batches are then cut anew, and a short last one is "
    "padded."
)
BAD_SOURCES = [
    (
        (np.arange(4),),
        "the first element of the source is of single examples, " + INFERRED.format(2),
    ),
    ((np.arange(4.0), 3), "a global batch of 3 rows does not divide into 2 replicas"),
]


@pytest.mark.parametrize(("args", "expected"), BAD_SOURCES)
def test_sources_that_do_not_fit_are_refused(two, args, expected):
    assert message_of(two.distribute_dataset, *args).startswith(expected)
