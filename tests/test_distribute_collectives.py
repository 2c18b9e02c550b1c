"""What replicas send each other, against NumPy on the values of all of them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshlayout as ml
from meshlayout.distribute import ReduceOp, get_replica_context
from meshlayout.errors import StrategyError
from tests.error_messages import message_of


NUM_REPLICAS = 4
RNG = np.random.default_rng(0)


def on_replicas(function, *values):
    """Runs a function once per replica, on its own entry of each value.

    Returns a tree of NumPy arrays with the replicas' results, stacked.
    """

    def replica(*values):
        index = get_replica_context().replica_id_in_sync_group
        return function(*jax.tree.map(lambda x: x[index], values))

    strategy = ml.distribute.MirroredStrategy(jax.devices()[:NUM_REPLICAS])
    values = jax.tree.map(jnp.asarray, values)
    results = strategy.local_results(strategy.run(replica, args=values))
    return jax.tree.map(lambda *parts: np.stack(parts), *results)


def all_reduce(op, value):
    return get_replica_context().all_reduce(op, value)


NUMPY = {"SUM": np.sum, "MEAN": np.mean, "MAX": np.max, "MIN": np.min}
JNP = {"SUM": jnp.sum, "MEAN": jnp.mean, "MAX": jnp.max, "MIN": jnp.min}
X = RNG.normal(size=(NUM_REPLICAS, 3)).astype("float32")
VALUES = {
    "float32": X,
    "float16": X.astype("float16"),
    "bfloat16": X.astype(jnp.bfloat16),
    "int32": RNG.integers(-9, 9, (NUM_REPLICAS, 3)).astype("int32"),
    "large": RNG.integers(2**29, 2**30, (NUM_REPLICAS, 2)).astype("int32"),
    "int8": np.full((NUM_REPLICAS, 2), 120, "int8"),
    "uint8": RNG.integers(200, 255, (NUM_REPLICAS, 2)).astype("uint8"),
    "bool": np.array([[1, 0, 0], [1, 0, 1], [1, 0, 0], [1, 0, 1]], bool),
    "scalar": X[:, 0],
    "empty": np.zeros((NUM_REPLICAS, 0), "float32"),
}


@pytest.fixture(scope="module")
def reduced():
    """Every value by every operation, in one program."""
    return on_replicas(
        lambda values: {op: all_reduce(op, values) for op in NUMPY}, VALUES
    )


@pytest.mark.parametrize("op", NUMPY)
def test_all_replicas_get_what_numpy_says_in_the_dtypes_of_jax(reduced, op):
    for name, value in VALUES.items():
        exact = value.astype("float64") if value.dtype.kind == "V" else value
        expected = NUMPY[op](exact, axis=0)
        if name == "large" and op == "SUM":
            expected = expected.astype("int32")  # wraps around, as jnp.sum does
        results = reduced[op][name]
        assert results.dtype == JNP[op](value, axis=0).dtype, name
        for result in results:
            np.testing.assert_allclose(
                result.astype("float64"),
                expected.astype("float64"),
                rtol=2e-2 if "16" in name else 1e-6,
                err_msg=name,
            )


def test_trees_keep_their_structure_and_replicas_know_their_number():
    def replica(x):
        context = get_replica_context()
        assert context.num_replicas_in_sync == NUM_REPLICAS
        tree = {"a": x, "b": (1, 2.5), "c": None, "d": [np.ones(2), True]}
        return all_reduce(ReduceOp.SUM, tree), context.replica_id_in_sync_group

    results, ids = on_replicas(replica, X[:, 0])
    first = jax.tree.map(lambda x: x[0], results)
    np.testing.assert_allclose(first["a"], X[:, 0].sum(), rtol=1e-6)
    assert (first["b"], first["c"], first["d"][1]) == ((4, 10), None, 4)
    np.testing.assert_array_equal(first["d"][0], [4, 4])
    assert first["b"][0].dtype == first["d"][1].dtype == ids.dtype == "int32"
    np.testing.assert_array_equal(ids, range(NUM_REPLICAS))


def test_gathered_values_are_in_the_order_of_the_replicas():
    values = {
        "float": RNG.normal(size=(NUM_REPLICAS, 2, 3)).astype("float32"),
        "bool": RNG.normal(size=(NUM_REPLICAS, 3, 1)) > 0,
    }
    axes = [0, 1, -1, -2]

    def replica(values):
        context = get_replica_context()
        return [context.all_gather(values, axis) for axis in axes]

    for axis, results in zip(axes, on_replicas(replica, values), strict=True):
        for name, value in values.items():
            expected = np.concatenate(list(value), axis=axis)
            for result in results[name]:
                np.testing.assert_array_equal(result, expected)
                assert result.dtype == value.dtype


# Gradients: of the sum of all replicas' losses, each of which counts once.

SUMS = ("SUM", "MEAN")
FACTORS = np.array([1.0, -2.0, 0.5, 3.0], "float32")
ROWS = RNG.normal(size=(NUM_REPLICAS, 2, 2)).astype("float32")
TIED = np.array([[1, 2, 3], [1, 5, 3], [0, 5, 3], [-1, 4, 3]], "float32")


def weighted(factor, gathered):
    weights = jnp.arange(gathered.size, dtype="float32").reshape(gathered.shape)
    return factor * (jnp.sin(gathered) * weights).sum()


def test_gradients_of_what_was_sent_are_those_of_all_replicas_losses():
    def replica(factor, x, tied, rows):
        def loss(x, tied, op):
            top, mixed = all_reduce(op, (x, tied))
            return factor * (jnp.sin(top).sum() + (mixed * x).sum() + (tied**2).sum())

        def gathering_loss(rows, axis):
            return weighted(factor, get_replica_context().all_gather(rows, axis))

        reductions = {op: jax.grad(loss, (0, 1))(x, tied, op) for op in SUMS}
        return reductions, [jax.grad(gathering_loss)(rows, axis) for axis in (0, -1)]

    def total_loss(x, tied, op):
        top, mixed = JNP[op](x, axis=0), JNP[op](tied, axis=0)
        each = jnp.sin(top).sum() + (mixed[None] * x).sum(1) + (tied**2).sum(1)
        return (FACTORS * each).sum()

    def total_gathering_loss(rows, axis):
        gathered = jnp.concatenate(list(rows), axis=axis)
        return sum(weighted(factor, gathered) for factor in FACTORS)

    reductions, gathered = on_replicas(replica, FACTORS, X, TIED, ROWS)
    for op in SUMS:
        expected = jax.grad(total_loss, (0, 1))(X, TIED, op)
        for result, reference in zip(reductions[op], expected, strict=True):
            np.testing.assert_allclose(result, reference, rtol=1e-5, atol=1e-6)
    for result, axis in zip(gathered, (0, -1), strict=True):
        expected = jax.grad(total_gathering_loss)(jnp.asarray(ROWS), axis)
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


# Inside of other transformations.


TRANSFORMED = {
    "scan": lambda f, x: lax.scan(lambda carry, row: (carry, f(row)), 0, x)[1],
    "cond": lambda f, x: lax.cond(all_reduce("MAX", 1) > 0, f, lambda x: x, x),
    "vmap": lambda f, x: jax.vmap(f)(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "remat": lambda f, x: jax.checkpoint(f)(x),
}


def test_reductions_and_their_gradients_are_the_same_inside_of_transformations():
    def replica(factor, x):
        def loss(x, transformed, op):
            y = transformed(functools.partial(all_reduce, op), x * x)
            return factor * (y * x).sum(), y

        gradients = jax.grad(loss, has_aux=True)
        pairs = itertools.product(TRANSFORMED.values(), SUMS)
        return [gradients(x, transformed, op) for transformed, op in pairs]

    pairs = itertools.product(TRANSFORMED, SUMS)
    results = on_replicas(replica, FACTORS, X)
    for (name, op), (grads, values) in zip(pairs, results, strict=True):

        def total(x, op=op):
            y = JNP[op](x * x, axis=0)
            return (FACTORS * (y[None] * x).sum(1)).sum()

        expected = np.tile(NUMPY[op](X * X, axis=0), (NUM_REPLICAS, 1))
        np.testing.assert_allclose(values, expected, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(grads, jax.grad(total)(X), rtol=1e-4, atol=1e-5)


# Outside of replicas, and what is refused.


def test_outside_of_a_strategy_there_is_one_replica():
    context = get_replica_context()
    assert context.num_replicas_in_sync == 1
    assert context.replica_id_in_sync_group == 0
    value = {"a": X, "b": np.array([200], "uint8")}
    for op, reduce in JNP.items():
        result = context.all_reduce(op.capitalize(), value)
        np.testing.assert_array_equal(result["a"], X)
        assert result["b"] == 200
        assert result["b"].dtype == reduce(value["b"]).dtype
    np.testing.assert_array_equal(context.all_gather(X, 1), X)
    assert context.example_mask is None
    assert context.num_examples is None


@pytest.fixture(scope="module")
def two():
    return ml.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.mark.parametrize("op", ["MAXX", None, 3, 1.0])
def test_what_is_no_operation_is_refused(two, op):
    def replica():
        return all_reduce(op, 1.0)

    hint = " Did you mean 'MAX'?" if op == "MAXX" else ""
    message = f"reduce_op must be 'SUM', 'MEAN', 'MAX' or 'MIN', got {op!r}.{hint}"
    assert message_of(two.run, replica) == message
    assert message_of(two.reduce, op, 1.0, axis=None) == message


def test_values_of_all_replicas_are_not_taken_for_one_replicas_own(two):
    value = two.run(lambda: get_replica_context().replica_id_in_sync_group)
    for combine in (
        lambda: all_reduce("SUM", {"a": value}),
        lambda: get_replica_context().all_gather([value], 0),
    ):
        for call in (combine, lambda combine=combine: two.run(combine)):
            assert message_of(call, error=StrategyError) == (
                "a value of 2 replicas was used as one array. Combine it first, with "
                "strategy.reduce('SUM', value, axis=None) or strategy.gather(value, "
                "axis=0), or compute in a function that strategy.run calls."
            )
