"""What replicas send each other, against NumPy on the values of all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshlayout as ml
from meshlayout.distribute import ReduceOp, get_replica_context


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
    "uint32": RNG.integers(0, 9, (NUM_REPLICAS, 2, 2)).astype("uint32"),
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


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("op", NUMPY)
def test_all_replicas_get_what_numpy_says(reduced, op, name):
    value, results = VALUES[name], reduced[op][name]
    exact = value.astype("float64") if value.dtype.kind == "V" else value
    expected = NUMPY[op](exact, axis=0)
    if name == "large" and op == "SUM":
        expected = expected.astype("int32")  # wraps around, as jnp.sum does
    for result in results:
        tolerance = 2e-2 if "16" in name else 1e-6
        np.testing.assert_allclose(
            result.astype("float64"), expected.astype("float64"), rtol=tolerance
        )


@pytest.mark.parametrize("op", NUMPY)
def test_results_have_the_dtypes_that_jax_gives_on_one_device(reduced, op):
    for name, value in VALUES.items():
        assert reduced[op][name].dtype == JNP[op](value, axis=0).dtype, name


def test_trees_of_arrays_and_numbers_keep_their_structure():
    def replica(x):
        tree = {"a": x, "b": (1, 2.5), "c": None, "d": [np.ones(2), True]}
        return all_reduce("SUM", tree)

    results = on_replicas(replica, X[:, 0])
    first = jax.tree.map(lambda x: x[0], results)
    np.testing.assert_allclose(first["a"], X[:, 0].sum(), rtol=1e-6)
    assert first["b"] == (4, 10)
    assert first["c"] is None
    assert first["d"][1] == 4
    np.testing.assert_array_equal(first["d"][0], [4, 4])
    assert first["b"][0].dtype == first["d"][1].dtype == "int32"


@pytest.mark.parametrize("op", ["sum", "Sum", ReduceOp.SUM])
def test_an_operation_may_be_named_in_any_case(op):
    context = get_replica_context()
    assert context.all_reduce(op, 3.0) == 3


def test_every_replica_knows_its_number():
    def replica(x):
        context = get_replica_context()
        assert context.num_replicas_in_sync == NUM_REPLICAS
        assert repr(context) == "ReplicaContext(num_replicas_in_sync=4)"
        return context.replica_id_in_sync_group

    ids = on_replicas(replica, X)
    np.testing.assert_array_equal(ids, range(NUM_REPLICAS))
    assert ids.dtype == "int32"


def test_gathered_values_are_in_the_order_of_the_replicas():
    values = {
        "float": RNG.normal(size=(NUM_REPLICAS, 2, 3)).astype("float32"),
        "bool": RNG.normal(size=(NUM_REPLICAS, 3, 1)) > 0,
        "empty": np.zeros((NUM_REPLICAS, 0, 2), "int32"),
    }
    axes = [0, 1, -1, -2, np.int64(1)]

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

FACTORS = np.array([1.0, -2.0, 0.5, 3.0], "float32")
TIED = np.array([[1, 2, 3], [1, 5, 3], [0, 5, 3], [-1, 4, 3]], "float32")


def test_gradients_of_reductions_are_those_of_all_replicas_losses():
    def replica(factor, x, tied):
        def loss(x, tied, op):
            top, mixed = all_reduce(op, (x, tied))
            return factor * (jnp.sin(top).sum() + (mixed * x).sum() + (tied**2).sum())

        return {op: jax.grad(loss, (0, 1))(x, tied, op) for op in ("SUM", "MEAN")}

    def total_loss(x, tied, op):
        top, mixed = JNP[op](x, axis=0), JNP[op](tied, axis=0)
        each = jnp.sin(top).sum() + (mixed[None] * x).sum(1) + (tied**2).sum(1)
        return (FACTORS * each).sum()

    for op, results in on_replicas(replica, FACTORS, X, TIED).items():
        expected = jax.grad(total_loss, (0, 1))(X, TIED, op)
        for result, reference in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, reference, rtol=1e-5, atol=1e-6)


def test_gradients_of_gathered_values_are_those_of_all_replicas_losses():
    x = RNG.normal(size=(NUM_REPLICAS, 2, 2)).astype("float32")

    def weighted(factor, gathered):
        weights = jnp.arange(gathered.size, dtype="float32").reshape(gathered.shape)
        return factor * (jnp.sin(gathered) * weights).sum()

    def replica(factor, x):
        def loss(x, axis):
            return weighted(factor, get_replica_context().all_gather(x, axis))

        return [jax.grad(loss)(x, axis) for axis in (0, -1)]

    def total_loss(x, axis):
        gathered = jnp.concatenate(list(x), axis=axis)
        return sum(weighted(factor, gathered) for factor in FACTORS)

    results = on_replicas(replica, FACTORS, x)
    for result, axis in zip(results, (0, -1), strict=True):
        expected = jax.grad(total_loss)(jnp.asarray(x), axis)
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_derivatives_of_higher_order_and_forward_mode_agree_with_one_device():
    def tangents(function, x):
        return jax.jvp(lambda x: jax.jvp(function, (x,), (x,))[1], (x,), (x + 1,))[1]

    def replica(x):
        return {
            op: tangents(lambda x, op=op: all_reduce(op, x * x * x).sum(), x)
            for op in ("SUM", "MEAN")
        }

    for op, results in on_replicas(replica, X).items():
        expected = tangents(lambda x, op=op: JNP[op](x * x * x, axis=0).sum(), X)
        np.testing.assert_allclose(results, [expected] * NUM_REPLICAS, rtol=1e-5)


# Inside of other transformations.


def scanned(function, x):
    return lax.scan(lambda carry, row: (carry, function(row)), 0, x)[1]


def looped(function, x):
    def body(index, rows):
        return rows.at[index].set(function(x[index]))

    return lax.fori_loop(0, x.shape[0], body, jnp.zeros_like(x))


def branched(function, x):
    return lax.cond(
        all_reduce("MAX", lax.stop_gradient(x[0])) > -9, function, lambda x: x, x
    )


@pytest.mark.parametrize(
    "transformed",
    [
        scanned,
        looped,
        branched,
        lambda function, x: jax.vmap(function)(x),
        lambda function, x: jax.jit(function)(x),
        lambda function, x: jax.checkpoint(function)(x),
    ],
    ids=["scan", "while", "cond", "vmap", "jit", "remat"],
)
def test_reductions_and_their_gradients_are_the_same_inside_of(transformed):
    def replica(factor, x):
        results = {}
        for op in ("MEAN", "SUM"):

            def loss(x, op=op):
                y = transformed(functools.partial(all_reduce, op), x * x)
                return factor * (y * x).sum(), y

            if transformed is looped:  # JAX differentiates no dynamic loop in reverse
                results[op] = (loss(x)[1], None)
            else:
                grads, y = jax.grad(loss, has_aux=True)(x)
                results[op] = (y, grads)
        return results

    results = on_replicas(replica, FACTORS, X)
    for op, (values, grads) in results.items():

        def total(x, op=op):
            y = JNP[op](x * x, axis=0)
            return (FACTORS * (y[None] * x).sum(1)).sum()

        expected = NUMPY[op](X * X, axis=0)
        np.testing.assert_allclose(values, [expected] * NUM_REPLICAS, rtol=1e-5)
        if grads is not None:
            np.testing.assert_allclose(grads, jax.grad(total)(X), rtol=1e-4, atol=1e-5)


# Outside of replicas, and in all of them at once.


def test_outside_of_a_strategy_there_is_one_replica():
    context = get_replica_context()
    assert context.num_replicas_in_sync == 1
    assert context.replica_id_in_sync_group == 0
    value = {"a": X, "b": np.array([200], "uint8")}
    for op, reduce in JNP.items():
        result = context.all_reduce(op, value)
        np.testing.assert_array_equal(result["a"], X)
        assert result["b"] == 200
        assert result["b"].dtype == reduce(value["b"]).dtype
    np.testing.assert_array_equal(context.all_gather(X, 1), X)
    assert context.example_mask is None
    assert context.num_examples is None


def test_there_is_no_replica_context_in_cross_replica_context():
    with strategy_of(2).scope():
        assert get_replica_context() is None
        assert ml.distribute.in_cross_replica_context()
    assert get_replica_context() is not None


def strategy_of(num_replicas):
    return ml.distribute.MirroredStrategy(jax.devices()[:num_replicas])


@pytest.fixture(scope="module")
def two():
    return strategy_of(2)


def in_a_replica(strategy, function):
    """Returns what a function of the replica context is refused with."""
    with pytest.raises(ml.errors.StrategyError) as error:
        strategy.run(lambda: function(get_replica_context()))
    return str(error.value)


TEXTS = {
    "'SUM', 'MEAN', 'MAX' or 'MIN', or a ReduceOp, got 'MAXX'. Did you mean 'MAX'?": (
        lambda context: context.all_reduce("MAXX", 1.0)
    ),
    "all_reduce takes arrays and numbers, got 'x'.": (
        lambda context: context.all_reduce("SUM", {"a": 1.0, "b": "x"})
    ),
    "all_gather: axis must be a dim of a value of shape (2, 3) (-2 to 1), got 2.": (
        lambda context: context.all_gather(jnp.ones((2, 3)), 2)
    ),
    "all_gather: axis must be a dim of a value of shape (2, 3) (-2 to 1), got -3.": (
        lambda context: context.all_gather(jnp.ones((2, 3)), -3)
    ),
    "all_gather: axis must be a dim of a value of shape () (none, it is a scalar), got "
    "0.": lambda context: context.all_gather(1.0, 0),
    "complex numbers (complex64) have no order: MAX is not defined.": (
        lambda context: context.all_reduce("MAX", 1j)
    ),
}


@pytest.mark.parametrize("text", TEXTS)
def test_what_cannot_be_combined_is_refused_with_a_sentence(two, text):
    assert text in in_a_replica(two, TEXTS[text])


BAD = [None, float("nan"), -1, 0, "x", object(), True, 1.5, [1], jax.random.key(0)]
PARAMETERS = {
    "reduce_op": lambda context, bad: context.all_reduce(bad, 1.0),
    "value": lambda context, bad: context.all_reduce("MAX", bad),
    "gathered": lambda context, bad: context.all_gather(bad, 0),
    "axis": lambda context, bad: context.all_gather(jnp.ones(2), bad),
}
# What works: numbers are values, 0 and -1 are dims.
WORKS = {
    "value": {"nan", "-1", "0", "True", "1.5", "[1]"},
    "gathered": set(),
    "axis": {"-1", "0"},
}


@pytest.mark.parametrize("parameter", PARAMETERS)
def test_bad_values_are_refused(two, parameter):
    def replica():
        context = get_replica_context()
        for bad in BAD:
            if repr(bad) in WORKS.get(parameter, ()):
                PARAMETERS[parameter](context, bad)
                continue
            with pytest.raises(ml.errors.MeshLayoutError) as error:
                PARAMETERS[parameter](context, bad)
            assert str(error.value).endswith((".", "?"))
        return 1

    two.run(replica)


def test_values_of_all_replicas_are_not_taken_for_one_replicas_own(two):
    value = two.run(lambda: get_replica_context().replica_id_in_sync_group)
    text = (
        "all_reduce takes a replica's own arrays, got the values of all replicas, a "
        "PerReplica. Pass it to run as an argument, so that each replica gets its own; "
        "outside of run, use strategy.reduce or strategy.gather."
    )
    assert in_a_replica(two, lambda context: context.all_reduce("SUM", value)) == text
    with pytest.raises(ml.errors.StrategyError) as error:
        get_replica_context().all_reduce("SUM", {"a": value})
    assert str(error.value) == text
