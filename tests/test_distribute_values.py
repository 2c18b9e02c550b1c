"""Values of replicas: what they are, and what reduce and gather make of them."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshlayout.distribute import OneDeviceStrategy, PerReplica, get_replica_context
from meshlayout.errors import StrategyError
from tests.error_messages import message_of
from tests.replicas import mirrored, parts_of, values_of


OPS = {"SUM": np.sum, "MEAN": np.mean, "MAX": np.max, "MIN": np.min}
UNEVEN = "the replicas' values have different shapes, as in a short last batch"


def uneven(strategy):
    """Rows 1, 2, 3 on one replica and 4 on the other."""
    parts = np.arange(1, 4, dtype=np.float32), np.array([4], np.float32)
    return values_of(strategy, *parts)


@hypothesis.settings(max_examples=8, deadline=None, derandomize=True)
@hypothesis.given(
    counts=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    op=st.sampled_from(list(OPS)),
    dtype=st.sampled_from(["float32", "int32", "int8", "bool", "bfloat16"]),
    in_jit=st.booleans(),
)
def test_reduction_over_rows_is_numpys_of_all_rows(counts, op, dtype, in_jit):
    strategy = mirrored(len(counts))
    hypothesis.assume(sum(counts))
    rng = np.random.default_rng(sum(counts))
    parts = [jnp.asarray(rng.integers(-9, 99, (n, 2)), dtype) for n in counts]
    value = values_of(strategy, *parts)

    def reduce(value):
        return strategy.reduce(op, value, axis=0)

    result = (jax.jit(reduce) if in_jit else reduce)(value)
    rows = np.concatenate([np.asarray(part, "float64") for part in parts])
    expected = OPS[op](rows, axis=0)
    tolerance = 1e-2 if dtype == "bfloat16" else 1e-6
    np.testing.assert_allclose(np.asarray(result, "float64"), expected, rtol=tolerance)


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_reduction_of_even_values_is_numpys(two, axis):
    parts = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32")
    dims = 0 if axis is None else (0, axis % 2 + 1)
    for op, reduction in OPS.items():
        result = two.reduce(op, values_of(two, *parts), axis=axis)
        np.testing.assert_allclose(result, reduction(parts, axis=dims), rtol=1e-5)
        assert result.sharding.is_fully_replicated


@pytest.mark.parametrize(
    ("dtype", "number", "op", "expected"),
    [
        ("int32", 2_000_000_000, "MEAN", 2e9),
        ("uint8", 200, "SUM", 800),
        ("float16", 60_000, "MEAN", 60_000),
        ("float32", -np.inf, "MAX", -np.inf),
        ("float32", np.inf, "MIN", np.inf),
        ("bool", False, "MAX", False),
        ("complex64", 1j, "MEAN", 1j),
        *(("float32", np.nan, op, np.nan) for op in OPS),
    ],
)
def test_nothing_overflows_on_the_way_and_nan_stays(two, dtype, number, op, expected):
    for rows in ((2, 2), (1, 3)):
        parts = [jnp.full(n, number, dtype) for n in rows]
        if expected != expected:  # NaN: of one replica alone
            parts[0] = jnp.ones(rows[0], dtype)
        result = two.reduce(op, values_of(two, *parts), axis=0)
        np.testing.assert_array_equal(result, expected)


def test_nan_in_padding_does_not_count(two):
    def fn(x):
        return jnp.where(get_replica_context().example_mask == 1, x, jnp.nan)

    value = two.run(fn, args=(uneven(two),))
    for op, reduction in OPS.items():
        assert two.reduce(op, value, axis=0) == reduction([1.0, 2.0, 3.0, 4.0])


def test_uneven_rows_are_combined_along_rows_alone_and_outside_of_jit(two):
    for axis in (None, 1):
        value = values_of(two, np.ones((2, 2)), np.ones((1, 2)))
        assert message_of(two.reduce, "SUM", value, axis=axis) == (
            f"reduce: {UNEVEN}: give axis=0 to reduce over rows."
        )
    jitted = jax.jit(lambda value: two.gather(value, axis=0))
    for call in (lambda value: two.gather(value, axis=1), jitted):
        assert message_of(call, value) == (
            f"gather: {UNEVEN}: use axis=0, outside of jit."
        )


def test_an_axis_that_the_values_lack_is_told_with_their_shape(two):
    value = values_of(two, 1.0, 2.0)
    for combine in (functools.partial(two.reduce, "SUM"), two.gather):
        assert message_of(combine, value, axis=0) == (
            "each replica's value has shape (), and no dim for axis=0. Write "
            "reduce(..., axis=None), or local_results(value)."
        )


def test_plain_arrays_are_the_value_of_a_single_replica():
    strategy = OneDeviceStrategy(jax.devices()[1])
    x = np.array([[1, 2], [3, 5]])
    assert strategy.reduce("MEAN", x, axis=0).tolist() == [2.0, 3.5]
    assert strategy.reduce("SUM", jnp.asarray(x), axis=None).tolist() == x.tolist()
    assert strategy.reduce("MEAN", 3, axis=None).dtype == np.float32
    assert strategy.gather(x, axis=1).tolist() == x.tolist()
    assert strategy.local_results(x) == (x,)


def test_a_plain_array_stands_for_one_equal_value_per_replica(two):
    value = two.run(lambda x: 2 * x, args=(jnp.array([3.0, 4.0]),))
    assert isinstance(value, jax.Array)
    assert two.reduce("SUM", value, axis=None).tolist() == [12, 16]
    assert two.reduce("MEAN", value, axis=None).tolist() == [6, 8]
    assert float(two.reduce("SUM", value, axis=0)) == 28
    assert two.gather(value, axis=0).tolist() == [6, 8, 6, 8]
    total = two.reduce("sum", {"a": value, "b": (values_of(two, 3, 4),)}, axis=None)
    assert jax.tree.map(np.sum, total) == {"a": 28, "b": (7,)}
    parts = two.local_results({"a": value, "b": 1})
    assert [part["a"].tolist() for part in parts] == [[6, 8], [6, 8]]
    assert [part["a"].devices() for part in parts] == [{d} for d in jax.devices()[:2]]
    for plain in (3.0, np.float32(3), jnp.array(3.0)):
        assert [float(two.reduce(op, plain, axis=None)) for op in OPS] == [6, 3, 3, 3]
        assert two.local_results(plain) == (3, 3)
    assert two.gather(np.ones((1, 2)), axis=1).shape == (1, 4)
    sharded = jax.device_put(jnp.ones(4), two.mesh.layout("batch").sharding)
    for name, combine in {"reduce": two.reduce, "gather": two.gather}.items():
        arguments = (*["SUM"] * (name == "reduce"), sharded, 0)
        assert message_of(combine, *arguments, error=StrategyError) == (
            f"{name} got an array of shape (4,) that is sharded, but combines values "
            "of replicas. Compute with a sharded array as with any array."
        )


def test_a_value_passes_through_jit_and_may_be_laid_out_otherwise(two):
    for value in (uneven(two), values_of(two, 1, 2)):
        copied = jax.jit(lambda value: value)(value)
        assert isinstance(copied, PerReplica)
        assert parts_of(two, copied) == parts_of(two, value)
        again = two.run(lambda x: x * 2, args=(copied,))
        np.testing.assert_array_equal(again.values[1], value.values[1] * 2)
    whole = jax.device_put(jnp.arange(4), two.mesh.layout(...).sharding)
    value = PerReplica(whole, num_replicas=2)
    assert [part.tolist() for part in value.values] == [[0, 1], [2, 3]]


USES = [float, bool, list, np.asarray, jnp.sum, lambda x: x[0]]
USES += [lambda x: x + 1, lambda x: jnp.ones(2) * x]


@pytest.mark.parametrize("operation", USES)
def test_a_value_is_not_used_as_one_array(two, operation):
    assert message_of(operation, values_of(two, 1.0, 2.0)) == (
        "a value of 2 replicas was used as one array. Combine it first, with "
        "strategy.reduce('SUM', value, axis=None) or strategy.gather(value, axis=0), "
        "or compute in strategy.run. A train step takes "
        "ml.distribute_dataset(source, mesh, ...)."
    )


@pytest.mark.parametrize("replicas", [4, 1])
def test_values_of_another_number_of_replicas_are_refused(two, replicas):
    value, other = values_of(two, np.ones(2), np.ones(2)), mirrored(replicas)
    for name, use in {
        "run": lambda s: s.run(lambda x: x, args=(value,)),
        "reduce": lambda s: s.reduce("SUM", value, axis=None),
        "gather": lambda s: s.gather(value, axis=0),
        "local_results": lambda s: s.local_results(value),
    }.items():
        assert message_of(use, other, error=StrategyError) == (
            f"{name}: the value has 2 replicas, but this strategy {replicas}: it is "
            "another strategy's."
        )
