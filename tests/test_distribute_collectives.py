"""What replicas send each other, against NumPy on the values of all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshlayout.distribute import ReduceOp, get_replica_context
from tests.error_messages import message_of
from tests.replicas import mirrored


NUM_REPLICAS = 4
RNG = np.random.default_rng(0)


def on_replicas(function, *values):
    """Runs a function once per replica, on its own entry of each value.

    Returns a tree of NumPy arrays with the replicas' results, stacked.
    """

    def replica(*values):
        index = get_replica_context().replica_id_in_sync_group
        return function(*jax.tree.map(lambda x: x[index], values))

    strategy, values = mirrored(NUM_REPLICAS), jax.tree.map(jnp.asarray, values)
    results = strategy.local_results(strategy.run(replica, args=values))
    return jax.tree.map(lambda *parts: np.stack(parts), *results)


def all_reduce(op, value):
    return get_replica_context().all_reduce(op, value)


NUMPY = {"SUM": np.sum, "MEAN": np.mean, "MAX": np.max, "MIN": np.min}
JNP = {"SUM": jnp.sum, "MEAN": jnp.mean, "MAX": jnp.max, "MIN": jnp.min}
X = RNG.normal(size=(NUM_REPLICAS, 3)).astype("float32")
VALUES = {
    "float32": X,
    "bfloat16": X.astype(jnp.bfloat16),
    "large": RNG.integers(2**29, 2**30, (NUM_REPLICAS, 2)).astype("int32"),
    "int8": np.full((NUM_REPLICAS, 2), 120, "int8"),
    "uint8": RNG.integers(200, 255, (NUM_REPLICAS, 2)).astype("uint8"),
    "bool": np.array([[1, 0, 0], [1, 0, 1], [1, 0, 0], [1, 0, 1]], bool),
    "scalar": X[:, 0],
    "empty": np.zeros((NUM_REPLICAS, 0), "float32"),
}


def test_all_replicas_get_what_numpy_says_in_the_dtypes_of_jax():
    reduced = on_replicas(
        lambda values: {op: all_reduce(op, values) for op in NUMPY}, VALUES
    )
    for op, reduction in NUMPY.items():
        for name, value in VALUES.items():
            exact = value.astype("float64") if value.dtype.kind == "V" else value
            expected = reduction(exact, axis=0)
            if name == "large" and op == "SUM":
                expected = expected.astype("int32")  # wraps around, as jnp.sum does
            assert reduced[op][name].dtype == JNP[op](value, axis=0).dtype, name
            tolerance = 2e-2 if name == "bfloat16" else 1e-6
            for result in reduced[op][name].astype("float64"):
                np.testing.assert_allclose(result, expected, tolerance, err_msg=name)


def test_trees_keep_their_structure_and_replicas_know_their_number():
    def replica(x):
        context = get_replica_context()
        assert context.num_replicas_in_sync == NUM_REPLICAS
        tree = {"a": x, "b": (1, 2.5), "c": None, "d": [np.ones(2), True]}
        return all_reduce(ReduceOp.SUM, tree), context.replica_id_in_sync_group

    results, ids = on_replicas(replica, np.arange(4.0, dtype="f"))
    assert ids.tolist() == [0, 1, 2, 3]
    assert jax.tree.map(lambda x: x[0].tolist(), results) == {
        "a": 6,
        "b": (4, 10),
        "c": None,
        "d": [[4, 4], 4],
    }
    assert results["b"][0].dtype == results["d"][1].dtype == ids.dtype == "int32"


def test_gathered_values_are_in_the_order_of_the_replicas():
    value, axes = RNG.normal(size=(NUM_REPLICAS, 2, 3)).astype("float32"), [0, 1, -1]

    def replica(x):
        gather = get_replica_context().all_gather
        return [gather({"x": x, "bool": x > 0}, axis) for axis in axes]

    for axis, results in zip(axes, on_replicas(replica, value), strict=True):
        expected = np.concatenate(list(value), axis=axis)
        for gathered, is_positive in zip(results["x"], results["bool"], strict=True):
            np.testing.assert_array_equal(gathered, expected)
            np.testing.assert_array_equal(is_positive, expected > 0)
            assert is_positive.dtype == bool


# Gradients: of the sum of all replicas' losses, each of which counts once.

FACTORS = np.array([1.0, -2.0, 0.5, 3.0], "float32")
ROWS = RNG.normal(size=(NUM_REPLICAS, 2, 2)).astype("float32")

TRANSFORMED = {
    "plain": lambda f, x: f(x),
    "scan": lambda f, x: lax.scan(lambda carry, row: (carry, f(row)), 0, x)[1],
    "cond": lambda f, x: lax.cond(all_reduce("MAX", 1) > 0, f, lambda x: x, x),
    "vmap": lambda f, x: jax.vmap(f)(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "remat": lambda f, x: jax.checkpoint(f)(x),
}


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_reductions_and_their_gradients_also_inside_of_transformations(op):
    def replica(factor, x):
        def loss(x, transformed):
            y = transformed(functools.partial(all_reduce, op), x * x)
            return factor * (jnp.sin(y) * x).sum(), y

        gradients = jax.grad(loss, has_aux=True)
        return [gradients(x, transformed) for transformed in TRANSFORMED.values()]

    def total(x):
        y = JNP[op](x * x, axis=0)
        return (FACTORS * (jnp.sin(y)[None] * x).sum(1)).sum()

    expected = np.tile(NUMPY[op](X * X, axis=0), (NUM_REPLICAS, 1))
    results = on_replicas(replica, FACTORS, X)
    for name, (grads, values) in zip(TRANSFORMED, results, strict=True):
        np.testing.assert_allclose(values, expected, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(grads, jax.grad(total)(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axis", [0, -1])
def test_gradients_of_what_was_gathered_are_those_of_all_replicas_losses(axis):
    def weighted(factor, gathered):
        weights = jnp.arange(gathered.size, dtype="float32").reshape(gathered.shape)
        return factor * (jnp.sin(gathered) * weights).sum()

    def replica(factor, rows):
        gather = get_replica_context().all_gather
        return jax.grad(lambda rows: weighted(factor, gather(rows, axis)))(rows)

    def total(rows):
        gathered = jnp.concatenate(list(rows), axis=axis)
        return sum(weighted(factor, gathered) for factor in FACTORS)

    expected = jax.grad(total)(jnp.asarray(ROWS))
    result = on_replicas(replica, FACTORS, ROWS)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_outside_of_a_strategy_there_is_one_replica():
    context = get_replica_context()
    assert (context.num_replicas_in_sync, context.replica_id_in_sync_group) == (1, 0)
    for op in JNP:
        result = context.all_reduce(op.capitalize(), {"a": X, "b": np.uint8([200])})
        assert (result["a"].tolist(), result["b"].tolist()) == (X.tolist(), [200])
    np.testing.assert_array_equal(context.all_gather(X, 1), X)
    assert (context.example_mask, context.num_examples) == (None, None)


@pytest.mark.parametrize("op", ["MAXX", None, 1.0])
def test_what_is_no_operation_is_refused(two, op):
    hint = " Did you mean 'MAX'?" if op == "MAXX" else ""
    message = f"reduce_op must be 'SUM', 'MEAN', 'MAX' or 'MIN', got {op!r}.{hint}"
    assert message_of(two.run, lambda: all_reduce(op, 1.0)) == message
    assert message_of(two.reduce, op, 1.0, axis=None) == message
