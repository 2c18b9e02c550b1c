"""Losses are averaged over the global batch, whatever a replica holds of it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshlayout as ml
from meshlayout import collectives, losses
from tests.error_messages import message_of
from tests.small_states import mesh_of


RNG = np.random.default_rng(0)
LOSSES = RNG.uniform(1, 2, size=8).astype("float32")
WEIGHTS = np.array([1, 0, 2, 0.5, 0, 0, 1, 3], "float32")


PIXELS = RNG.normal(size=(4, 3)).astype("float32")
FOUR = np.array([1.0, 0.0, 2.0, 1.0])


AVERAGES = [
    ((LOSSES,), LOSSES.mean()),
    # Losses of more dims are summed, as by tf.nn.
    ((PIXELS, FOUR), (PIXELS * FOUR[:, None]).sum() / 4),
    # In float32.
    ((jnp.full(4096, 1.0, "bfloat16"), None, 4095), 4096 / 4095),
    # Over no examples.
    *(((np.zeros(0),), 0), ((np.zeros((0, 3)),), 0), ((LOSSES, None, 0), 0)),
    # Sizes are any integers.
    *(
        ((LOSSES, None, kind(4)), LOSSES.sum() / 4)
        for kind in (int, np.int64, np.array)
    ),
]


@pytest.mark.parametrize(("args", "expected"), AVERAGES)
def test_averages_of_one_device(args, expected):
    for function in (losses.compute_average_loss, jax.jit(losses.compute_average_loss)):
        assert function(*args).dtype == "float32"
        np.testing.assert_allclose(function(*args), expected, rtol=1e-6)


def test_the_gradient_of_an_average_is_zero_where_the_weight_is():
    rows = jnp.array([1.0, jnp.nan, jnp.inf, 2.0])
    weights = jnp.array([2.0, 0.0, 0.0, 1.0])
    grads = jax.grad(losses.compute_average_loss)(rows, weights)
    np.testing.assert_array_equal(grads, [0.5, 0.0, 0.0, 0.25])


def test_averages_and_scalings_as_a_gradient_of_replica_code():
    kernel = jnp.array([1.0, -2.0])
    rows = RNG.normal(size=(4, 2)).astype("float32")

    def loss(kernel, rows):
        average = losses.compute_average_loss(jnp.square(rows @ kernel))
        penalty = losses.scale_regularization_loss(losses.l2(0.1)(kernel))
        return jax.lax.psum(average + penalty + 0 * rows.sum(), "batch")

    mesh = mesh_of(batch=2).jax_mesh
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("batch")), out_specs=P())
    value, grad = jax.jit(jax.value_and_grad(mapped))(kernel, rows)
    made = rows @ np.asarray(kernel)
    np.testing.assert_allclose(value, (made**2).mean() + 0.1 * 5, rtol=1e-5)
    expected = 2 * rows.T @ made / 4 + 0.2 * np.asarray(kernel)
    np.testing.assert_allclose(grad, expected, rtol=1e-5)


def in_replicas(function, mask, *arrays, context=None):
    """Runs a function as a strategy does, on 4 replicas; returns their results."""
    context = {} if context is None else context

    def replica(mask, *rows):
        context["replica"] = collectives.ReplicaContext(object(), "batch", 4, mask)
        with collectives.entered(context["replica"]):
            return jax.tree.map(lambda x: x[None], function(*rows))

    mapped = jax.shard_map(
        replica,
        mesh=mesh_of(batch=4).jax_mesh,
        in_specs=(P("batch"),) * (1 + len(arrays)),
        out_specs=P("batch"),
        check_vma=False,
    )
    return jax.tree.map(np.asarray, jax.jit(mapped)(mask, *arrays))


# 12 rows on 4 replicas, 3 each: full, short, empty, full.
MASK = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1], "float32")
ROWS = RNG.uniform(1, 2, size=12).astype("float32")
PADDED = np.where(MASK > 0, ROWS, np.float32(np.nan))
ROW_WEIGHTS = np.where(MASK > 0, RNG.uniform(0, 2, size=12), np.nan).astype("float32")


@pytest.mark.parametrize(
    ("mask", "dims"), [(MASK, ()), (MASK, (2,)), (0 * MASK, ())], ids=str
)
@pytest.mark.parametrize("size", [None, 5])
@pytest.mark.parametrize("weights", [None, ROW_WEIGHTS])
def test_shares_of_a_padded_batch_add_up_to_its_average_on_one_device(
    weights, size, mask, dims
):
    rows = PADDED.reshape(12, *[1] * len(dims)) * np.ones(dims, "float32")
    # The gradient is of each replica's own share, as run sums these.
    average = jax.value_and_grad(losses.compute_average_loss)
    arrays = (rows,) if weights is None else (rows, weights)
    shares, grads = in_replicas(
        lambda rows, weights=None: average(rows, weights, size), mask, *arrays
    )
    real = mask > 0
    real_weights = None if weights is None else weights[real]
    expected, expected_grads = average(rows[real], real_weights, size)
    np.testing.assert_allclose(shares.sum(), expected, rtol=1e-6)
    assert shares[2] == 0
    grads = grads.reshape(rows.shape)
    np.testing.assert_allclose(grads[real], expected_grads, rtol=1e-6)
    np.testing.assert_array_equal(grads[~real], 0)


def test_averages_without_padding_and_the_question_for_it():
    seen, average = {}, losses.compute_average_loss
    for count in (1, 2):  # of losses in a row
        repeated = lambda rows, count=count: average(rows.repeat(count))
        shares = in_replicas(repeated, None, ROWS)
        np.testing.assert_allclose(shares.sum(), ROWS.mean(), rtol=1e-6)
    for function in (average, jnp.sum):
        in_replicas(function, MASK, ROWS, context=seen)
        assert seen["replica"].mask_was_read == (function is average)


def test_regularization_is_divided_by_the_strategys_replicas():
    shares = in_replicas(lambda: losses.scale_regularization_loss(2.0), MASK)
    np.testing.assert_array_equal(shares, [0.5] * 4)
    alone = collectives.ReplicaContext(object(), None, 1, jnp.array([1.0, 0.0]))
    with collectives.entered(alone):
        assert losses.scale_regularization_loss(2.0) == 2
        assert losses.compute_average_loss(np.array([3.0, np.nan])) == 3


@pytest.mark.parametrize("more", [(), (np.ones(6), 14)])
def test_losses_that_are_not_one_per_row_of_a_padded_batch_are_refused(more):
    with pytest.raises(ml.errors.LossError, match="some of which may be padding"):
        in_replicas(
            lambda rows: losses.compute_average_loss(jnp.repeat(rows, 2), *more),
            *(MASK, ROWS),
        )


def test_a_function_that_has_the_mask_may_average_microbatches():
    def replica(rows):
        context = collectives.get_replica_context()

        def microbatch(total, part):
            row, is_real = part
            share = losses.compute_average_loss(
                row[None], is_real[None], context.num_examples
            )
            return total + share, None

        parts = (rows, context.example_mask)
        return jax.lax.scan(microbatch, jnp.float32(0), parts)[0]

    shares = in_replicas(replica, MASK, PADDED)
    np.testing.assert_allclose(shares.sum(), ROWS[MASK > 0].mean(), rtol=1e-6)


def test_losses_are_averaged_over_all_dims_that_weights_do_not_have():
    rows = RNG.normal(size=(4, 3, 2)).astype("float32")
    for weights, axes in ((None, (1, 2)), (np.ones(4), (1, 2)), (np.ones((4, 3)), 2)):
        averages = losses.per_example(rows, weights)
        np.testing.assert_allclose(averages, rows.mean(axis=axes), rtol=1e-6)


def test_denominators():
    size = losses.denominator_of
    assert size("real", None, 8) == size("global_batch_size", WEIGHTS, 8) == 8
    assert size("real", WEIGHTS, 8) == 7.5
    assert size("real", np.zeros(8), 8) == 1
    assert size("real", WEIGHTS.astype(bool), 8) == 5


PARAMS = {
    "hidden": {"kernel": jnp.array([[1.0, -2.0]]), "bias": jnp.array([3.0])},
    "head": {"kernel": jnp.array([0.5])},
}


@pytest.mark.parametrize(
    ("regularizer", "expected"),
    [
        (losses.l2(0.1), 0.1 * (1 + 4 + 9 + 0.25)),
        (losses.l1(0.1), 0.1 * (1 + 2 + 3 + 0.5)),
        (losses.l2(2, where="kernel"), 2 * (1 + 4 + 0.25)),
        (losses.l1(2, where="^hidden/"), 2 * (1 + 2 + 3)),
        (losses.l2(1, where=re.compile("KERNEL", re.IGNORECASE)), 1 + 4 + 0.25),
        (losses.l2(0), 0),
    ],
)
def test_penalties_are_sums_over_the_parameters_that_match(regularizer, expected):
    np.testing.assert_allclose(regularizer(PARAMS), expected, rtol=1e-6)
    ones = {"hidden/kernel": jnp.full(4097, 1.0, "bfloat16")}
    assert regularizer(ones) == regularizer(jax.tree.map(np.float32, ones))


def in_two_axes(x):
    mapped = jax.shard_map(
        lambda x: losses.scale_regularization_loss(x.sum())[None],
        mesh=mesh_of(batch=2, model=4).jax_mesh,
        in_specs=P("batch"),
        out_specs=P(),
    )
    return jax.jit(mapped)(x)


WRONG = {
    "compute_average_loss takes one loss per example, (batch,), got a scalar.": (
        lambda: losses.compute_average_loss(3.0)
    ),
    "weights of shape (4, 2) do not fit losses of shape (4, 3); give one weight per "
    "example, (4,), or one per loss.": (
        lambda: losses.per_example(np.ones((4, 3)), np.ones((4, 2)))
    ),
    "weights of shape (4, 3) do not fit losses of shape (4,); give all losses, (4, 3): "
    "steps take the weighted mean.": (
        lambda: losses.per_example(np.ones(4), np.ones((4, 3)))
    ),
    "this code runs under the axes 'batch', 'model', and it is not known which of them "
    "are replicas. Give global_batch_size=, or divide by the number of replicas "
    "yourself.": lambda: in_two_axes(np.zeros(2, "float32")),
    "l2: strength must be a finite number of at least 0, got -1.": (
        lambda: losses.l2(-1)
    ),
    "l2: no parameter's path matches 'decoder'; there are 'head/kernel', "
    "'hidden/bias', 'hidden/kernel'.": (
        lambda: losses.l2(1.0, where="decoder")(PARAMS)
    ),
    "per_example: losses must be an array of real numbers, got an array of shape (8,) "
    "of dtype complex64.": lambda: losses.per_example(LOSSES * 1j),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_refused_in_words(message):
    assert message_of(WRONG[message], error=ml.errors.LossError) == message


def test_losses_and_weights_are_any_real_numbers():
    large = np.array([2**40, 1])  # which JAX would wrap around
    assert losses.per_example(large).tolist() == [2**40, 1]
    assert float(losses.weighted_sum(np.ones(2), large)) == 2**40  # in float32
    assert float(losses.denominator_of("real", large, 2)) == 2**40
    assert float(losses.scale_regularization_loss(2**40)) == 2**40
    pixels = np.arange(6.0, dtype="float32").reshape(2, 3)
    assert losses.per_example(pixels, 2.0).tolist() == [1, 4]  # one weight for all
