"""Values of replicas: what they are, and what reduce and gather make of them."""

import copy
import operator
import pickle

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshlayout.distribute import (
    MirroredStrategy,
    OneDeviceStrategy,
    PerReplica,
    get_replica_context,
)
from meshlayout.errors import StrategyError
from tests.bad_values import BAD, refusal
from tests.error_messages import message_of


OPS = {"SUM": np.sum, "MEAN": np.mean, "MAX": np.max, "MIN": np.min}


def mirrored(replicas):
    return MirroredStrategy(jax.devices()[:replicas])


def values(strategy, *parts):
    return strategy.distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group]
    )


def uneven(strategy=None):
    """Rows 1, 2, 3 on one replica and 4 on the other."""
    parts = np.arange(1, 4, dtype=np.float32), np.array([4], np.float32)
    return values(strategy or mirrored(2), *parts)


# What tf.distribute's page on strategies shows.


def test_reduce_of_replica_ids_is_their_sum():
    for replicas, expected in ((1, 0), (2, 1), (8, 28)):
        strategy = mirrored(replicas)
        ids = strategy.run(lambda: get_replica_context().replica_id_in_sync_group)
        assert int(strategy.reduce("SUM", ids, axis=None)) == expected


def test_reduce_over_replicas_alone_or_over_examples_too():
    strategy = mirrored(2)
    value = values(strategy, np.arange(4), np.arange(4, 8))
    assert strategy.reduce("SUM", value, axis=None).tolist() == [4, 6, 8, 10]
    assert int(strategy.reduce("SUM", value, axis=0)) == 28


def test_a_last_batch_of_six_is_reduced_by_its_own_denominator():
    strategy = mirrored(2)
    value = values(strategy, np.arange(4), np.arange(4, 6))
    assert int(strategy.reduce("SUM", value, axis=0)) == 15
    assert float(strategy.reduce("MEAN", value, axis=0)) == 2.5
    assert message_of(lambda: strategy.reduce("SUM", value, axis=None)) == (
        "reduce: the replicas' values have different shapes, as in a short "
        "last batch: give axis=0 to reduce over rows."
    )


def test_gather_of_columns():
    strategy = mirrored(2)
    value = values(strategy, *[np.array([[1], [2]])] * 2)
    assert strategy.gather(value, axis=0).tolist() == [[1], [2], [1], [2]]


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_gather_concatenates_along_any_dim(axis):
    strategy = mirrored(4)
    single = np.arange(6).reshape(1, 2, 3)
    gathered = strategy.gather(values(strategy, *[single] * 4), axis=axis)
    np.testing.assert_array_equal(gathered, np.concatenate([single] * 4, axis))
    assert gathered.sharding.is_fully_replicated


def test_run_gives_each_replica_its_value_and_constants_to_all():
    strategy = mirrored(2)
    twice = strategy.run(lambda x: x * 2.0, args=(3.0,))
    assert [float(part) for part in strategy.local_results(twice)] == [6, 6]
    counts = strategy.distribute_values_from_function(
        lambda context: context.num_replicas_in_sync
    )
    doubled = strategy.run(lambda x: x * 2, args=(counts,))
    assert [int(part) for part in strategy.local_results(doubled)] == [4, 4]
    ids = strategy.distribute_values_from_function(
        lambda context: context.replica_id_in_sync_group
    )
    total = strategy.run(
        lambda x: get_replica_context().all_reduce("sum", x), args=(ids,)
    )
    assert [int(part) for part in strategy.local_results(total)] == [1, 1]


# Reductions, against NumPy.


@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
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
    value = values(strategy, *parts)

    def reduce(value):
        return strategy.reduce(op, value, axis=0)

    result = (jax.jit(reduce) if in_jit else reduce)(value)
    rows = np.concatenate([np.asarray(part, "float64") for part in parts])
    expected = OPS[op](rows, axis=0)
    tolerance = 1e-2 if dtype == "bfloat16" else 1e-6
    np.testing.assert_allclose(np.asarray(result, "float64"), expected, rtol=tolerance)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_reduction_of_even_values_is_numpys(op, axis):
    strategy = mirrored(2)
    parts = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32")
    dims = 0 if axis is None else (0, axis % 2 + 1)
    result = strategy.reduce(op, values(strategy, *parts), axis=axis)
    np.testing.assert_allclose(result, OPS[op](parts, axis=dims), rtol=1e-5)
    assert result.sharding.is_fully_replicated


@pytest.mark.parametrize("rows", [(2, 2), (1, 3)])
@pytest.mark.parametrize(
    ("dtype", "number", "op", "expected"),
    [
        ("int32", 2_000_000_000, "MEAN", 2e9),
        ("int8", 100, "SUM", 400),
        ("uint8", 200, "SUM", 800),
        ("int8", 100, "MEAN", 100),
        ("int4", 7, "SUM", 28),
        ("float16", 60_000, "MEAN", 60_000),
        ("float32", -np.inf, "MAX", -np.inf),
        ("float32", np.inf, "MIN", np.inf),
        ("bool", False, "MAX", False),
        ("bool", True, "MIN", True),
        ("bool", True, "SUM", 4),
        ("complex64", 1j, "MEAN", 1j),
        ("float8_e4m3fn", 2, "MEAN", 2),
    ],
)
def test_nothing_overflows_on_the_way(rows, dtype, number, op, expected):
    strategy = mirrored(2)
    parts = [jnp.full(n, number, dtype) for n in rows]
    assert strategy.reduce(op, values(strategy, *parts), axis=0).item() == expected


@pytest.mark.parametrize("op", ["MAX", "MIN", "SUM", "MEAN"])
@pytest.mark.parametrize("counts", [(1, 2), (2, 2)])
def test_a_nan_of_any_replica_stays_one(op, counts):
    strategy = mirrored(2)
    for bad in range(2):
        parts = [np.ones(n, np.float32) for n in counts]
        parts[bad][0] = np.nan
        assert np.isnan(strategy.reduce(op, values(strategy, *parts), axis=0))


@pytest.mark.parametrize("op", OPS)
def test_nan_in_padding_does_not_count(op):
    strategy = mirrored(2)

    def fn(x):
        mask = get_replica_context().example_mask
        assert mask is not None
        return jnp.where(mask > 0, x, jnp.nan)

    value = strategy.run(fn, args=(uneven(strategy),))
    expected = OPS[op]([1.0, 2.0, 3.0, 4.0])
    assert float(strategy.reduce(op, value, axis=0)) == expected


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_sum_and_a_mean_of_no_rows_are_zero_and_there_is_no_maximum(replicas):
    strategy = mirrored(replicas)
    value = values(strategy, *[np.zeros((0, 3), np.float32)] * replicas)
    for op in ("SUM", "MEAN"):
        assert strategy.reduce(op, value, axis=0).tolist() == [0, 0, 0]
    for op in ("MAX", "MIN"):
        assert message_of(lambda op=op: strategy.reduce(op, value, axis=0)) == (
            f"reduce: there is no {op} of values of dtype float32 and shape (0, 3)."
        )
    assert strategy.gather(value, axis=0).shape == (0, 3)


def test_plain_arrays_are_the_value_of_a_single_replica():
    strategy = OneDeviceStrategy(jax.devices()[1])
    x = np.array([[1, 2], [3, 5]])
    assert strategy.reduce("MEAN", x, axis=0).tolist() == [2.0, 3.5]
    assert strategy.reduce("SUM", jnp.asarray(x), axis=None).tolist() == x.tolist()
    assert strategy.reduce("SUM", np.array([True, True]), axis=0).item() == 2
    assert strategy.reduce("MEAN", 3, axis=None).dtype == np.float32
    assert strategy.gather(x, axis=1).tolist() == x.tolist()
    assert message_of(lambda: strategy.reduce("SUM", np.int64(2**40), None)) == (
        "reduce: the value holds 1099511627776, and JAX would turn int64 into int32. "
        "Set jax_enable_x64, or give it another dtype."
    )


def test_trees_are_reduced_leaf_by_leaf():
    strategy = mirrored(2)
    tree = {"a": values(strategy, 1, 2), "b": (values(strategy, 3.0, 4.0),)}
    total = strategy.reduce("sum", tree, axis=None)
    assert jax.tree.map(float, total) == {"a": 3.0, "b": (7.0,)}


# Values as objects.


COPIES = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "jit": jax.jit(lambda value: value),
    "device_get": jax.device_get,
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_have_the_same_values(name):
    strategy = mirrored(2)
    for value in (uneven(strategy), values(strategy, 1, 2)):
        copied = COPIES[name](value)
        assert isinstance(copied, PerReplica)
        for part, other in zip(value.values, copied.values, strict=True):
            np.testing.assert_array_equal(part, other)
        axis = None if value.is_scalar else 0
        assert strategy.reduce("SUM", copied, axis) == strategy.reduce(
            "SUM", value, axis
        )
        again = strategy.run(lambda x: x * 2, args=(copied,))
        np.testing.assert_array_equal(again.values[1], value.values[1] * 2)


def test_a_value_whose_array_is_laid_out_otherwise_keeps_its_parts():
    strategy = mirrored(2)
    whole = jax.device_put(jnp.arange(4), strategy.mesh.layout(...).sharding)
    value = PerReplica(whole, num_replicas=2)
    assert [part.tolist() for part in value.values] == [[0, 1], [2, 3]]


def test_keys_are_values_that_cannot_be_summed():
    strategy = mirrored(2)
    keys = values(strategy, jax.random.key(0), jax.random.key(1))
    bits = strategy.run(lambda key: jax.random.bits(key), args=(keys,))
    for index, part in enumerate(strategy.local_results(bits)):
        assert part == jax.random.bits(jax.random.key(index))
    assert message_of(lambda: strategy.reduce("SUM", keys, axis=None)) == (
        "reduce: there is no SUM of values of dtype key<fry> and shape ()."
    )


def test_complex_numbers_have_no_maximum():
    strategy = mirrored(2)
    assert message_of(
        lambda: strategy.reduce("MAX", values(strategy, 1j, 2j), None)
    ) == ("reduce: there is no MAX of values of dtype complex64 and shape ().")


def test_repr_is_short_and_shows_real_rows():
    strategy = mirrored(2)
    assert repr(uneven(strategy)) == (
        "PerReplica:{\n"
        "  0: Array([1., 2., 3.], dtype=float32),\n"
        "  1: Array([4.], dtype=float32)\n"
        "}"
    )
    large = values(strategy, *[np.zeros((1000, 1000), np.float32)] * 2)
    assert len(repr(large)) < 1000
    assert f"{values(strategy, 1, 2)}".startswith("PerReplica:{")


OPERATIONS = {
    "__add__": lambda x: x + 1,
    "__radd__": lambda x: 1 + x,
    "__divmod__": lambda x: divmod(x, 2),
    "__and__": lambda x: x & x,
    "__neg__": operator.neg,
    "__invert__": operator.invert,
    "__round__": round,
    "__lt__": lambda x: x < 1,
    "__getitem__": lambda x: x[0],
    "__contains__": lambda x: 1 in x,
    "__len__": len,
    "__iter__": list,
    "__bool__": bool,
    "__float__": float,
    "__complex__": complex,
    "__array__": np.asarray,
    "__jax_array__": jnp.sum,
    "__format__": lambda x: f"{x:.3f}",
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_value_is_not_used_as_one_array(name):
    value = values(mirrored(2), 1.0, 2.0)
    assert message_of(lambda: OPERATIONS[name](value)) == (
        f"a value of 2 replicas was used as one array ({name}). Combine it first, with "
        "strategy.reduce('SUM', value, axis=None) or strategy.gather(value, axis=0), or "
        "compute in a function that strategy.run calls."
    )


def test_methods_of_arrays_say_what_to_do_instead():
    value = values(mirrored(2), 1.0, 2.0)
    with pytest.raises(AttributeError) as error:
        value.item()
    assert str(error.value) == (
        "a PerReplica has no attribute 'item': it is not one array. Combine it first, "
        "with strategy.reduce('SUM', value, axis=None) or strategy.gather(value, "
        "axis=0), or compute in a function that strategy.run calls."
    )


# Bad input.


@pytest.mark.parametrize(
    "other", [mirrored(4), mirrored(1), MirroredStrategy(jax.devices()[2:4])]
)
def test_values_of_another_strategy_are_refused(other):
    value = values(mirrored(2), [1.0, 2.0], [3.0, 4.0])[0]
    rows = values(mirrored(2), *[np.ones(1)] * 2)
    for name, use in {
        "run": lambda s: s.run(lambda x: x, args=(value,)),
        "reduce": lambda s: s.reduce("SUM", value, axis=None),
        "gather": lambda s: s.gather(rows, axis=0),
        "local_results": lambda s: s.local_results(value),
    }.items():
        message = message_of(use, other)
        assert message.startswith(f"{name}: the value is of 2 replicas, and this")
        assert message.endswith("it is another strategy's.")


BAD_ARGUMENTS = {
    "large integer": (
        np.array([2**40]),
        "x holds 1099511627776, and JAX would turn int64 into int32. Set "
        "jax_enable_x64, or give it another dtype.",
    ),
    "large number": (
        2**40,
        "x holds 1099511627776, and JAX would turn int64 into int32. Set "
        "jax_enable_x64, or give it another dtype.",
    ),
    "text": (
        np.array(["a"]),
        "x: a NumPy array of dtype <U1 is not an array of numbers.",
    ),
    "masked array": (
        np.ma.masked_array([1.0, 2.0], mask=[0, 1]),
        "x is a masked array, and JAX would lose its mask. Fill it with "
        "x.filled(value), and pass the mask as a separate array if it matters.",
    ),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_arguments_of_run_that_devices_would_change_are_refused(name):
    argument, problem = BAD_ARGUMENTS[name]
    strategy = mirrored(2)
    assert message_of(lambda: strategy.run(lambda x: x, args=(argument,))) == (
        f"run: the argument {problem}"
    )


@pytest.mark.parametrize("name", ["reduce_op", "value", "axis"])
@pytest.mark.parametrize("method", ["reduce", "gather"])
def test_nothing_that_nobody_can_mean_is_taken_silently(method, name):
    strategy = mirrored(2)
    value = values(strategy, *[np.ones((1, 2), np.float32)] * 2)
    arguments = {"reduce_op": "SUM", "value": value, "axis": 1}
    if method == "gather":
        if name == "reduce_op":
            pytest.skip("gather has none")
        del arguments["reduce_op"]
    works = [
        bad
        for bad in BAD
        if refusal(StrategyError, getattr(strategy, method), **{**arguments, name: bad})
        is None
    ]
    # Dims that exist, and over replicas alone.
    fine = {"axis": [None, -1, 0] if method == "reduce" else [-1, 0]}
    assert works == fine.get(name, [])


def test_inside_of_jit_uneven_rows_are_unknown():
    strategy = mirrored(2)
    assert message_of(lambda: jax.jit(strategy.local_results)(uneven(strategy))) == (
        "the replicas may have different numbers of rows, which is not known inside a "
        "compiled function: call local_results outside of it, or reduce along axis=0."
    )
    gather = jax.jit(lambda value: strategy.gather(value, axis=0))
    assert message_of(lambda: gather(uneven(strategy))) == (
        "gather: the replicas' values have different shapes, as in a short last batch: "
        "gather along axis=0, outside of jit."
    )
